"""The state of a library's optimizer, saved as the library holds it: tensors, and numbers for JSON.

tensors     "<parameter>/<key>" for each tensor of a parameter's state
values      the numbers of a parameter's state, such as a count of steps
groups      the numbers of each group that the library has changed since it was made, such as schedule-free's weights.
            What it was made with is not saved: the job says it, and may change it for the rest of a training.
tensors of "keys" are listed with dtype and shape, so that a missing or foreign tensor is noticed
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import Message, UserError
from .optimizers import Unit

Groups = list[list[dict[str, Any]]]
"""For each optimizer, for each of its groups: values by name."""
PLAIN = (bool, int, float, str, type(None))
SHARED = ("qmap1", "qmap2")
"""bitsandbytes' code books, the same for all parameters and saved once."""
OURS = ("params", "ratio", "lr")
"""What we set in the groups at each step, or once and for all."""


def read_groups(optimizers: Sequence[torch.optim.Optimizer]) -> Groups:
    """Return the plain values of each group."""
    return [[_select_plain(group) for group in optimizer.param_groups] for optimizer in optimizers]


def _select_plain(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in OURS and isinstance(value, PLAIN)}


def collect(
    units: Iterable[Unit], optimizers: Sequence[torch.optim.Optimizer], initial: Groups
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return copies of the state on the CPU: tensors by name, and a dict for JSON.

    Args:
        units: single parameters.
        optimizers: theirs.
        initial: from `read_groups` when they were made.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    keys: dict[str, dict[str, list[Any]]] = {}
    on_cpu: set[str] = set()
    for unit in units:
        name = unit.segments[0].name
        state = unit.optimizer.state
        parameter_state = state[unit.stepped] if unit.stepped in state else {}  # reading would add an entry
        for key, value in parameter_state.items():
            if isinstance(value, Tensor):
                if value.device != unit.values.device:
                    on_cpu.add(key)
                keys.setdefault(name, {})[key] = describe(value)
                tensors[_make_tensor_name(name, key)] = value.detach().cpu().clone()
            elif isinstance(value, PLAIN):
                values.setdefault(name, {})[key] = value
            else:
                raise UserError(
                    Message(
                        "the optimizer's {key} ({kind}) is neither a tensor nor a number, so it cannot be saved",
                        key=repr(key),
                        kind=type(value).__name__,
                    )
                )
    changed = _find_changes(read_groups(optimizers), initial)
    return tensors, {"values": values, "keys": keys, "on_cpu": sorted(on_cpu), "groups": changed}


def _make_tensor_name(parameter: str, key: str) -> str:
    """Return the name of a tensor of a parameter's state in the checkpoint."""
    return key if key in SHARED else f"{parameter}/{key}"


def _find_changes(now: Groups, initial: Groups) -> Groups:
    """Return the values of each group that differ from those that it was made with."""
    changes: Groups = []
    for groups, initial_groups in zip(now, initial, strict=True):
        pairs = zip(groups, initial_groups, strict=True)
        changes.append(
            [
                {key: value for key, value in group.items() if key not in first or first[key] != value}
                for group, first in pairs
            ]
        )
    return changes


def describe(tensor: Tensor) -> list[Any]:
    """Return dtype and shape for JSON."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def is_complete(saved: Any, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return True if the dict has the form of `collect`'s, for these optimizers' groups."""
    if not isinstance(saved, dict) or not isinstance(saved.get("on_cpu"), list):
        return False
    for key in ("values", "keys"):
        by_parameter = saved.get(key)
        if not isinstance(by_parameter, dict) or not all(isinstance(inner, dict) for inner in by_parameter.values()):
            return False
    groups = saved.get("groups")
    if not isinstance(groups, list) or len(groups) != len(optimizers):
        return False
    return all(
        isinstance(of_optimizer, list)
        and len(of_optimizer) == len(optimizer.param_groups)
        and all(isinstance(group, dict) for group in of_optimizer)
        for of_optimizer, optimizer in zip(groups, optimizers, strict=True)
    )


def find_misfits(
    moments: Mapping[str, Mapping[str, Tensor]], shared: Mapping[str, Tensor], saved: Mapping[str, Any]
) -> list[str]:
    """Return the names of tensors that are missing, unknown, or of another dtype or shape than the list says."""
    given = {f"{name}/{key}": describe(tensor) for name, inner in moments.items() for key, tensor in inner.items()}
    given |= {key: describe(tensor) for key, tensor in shared.items()}
    listed = {
        _make_tensor_name(name, key): entry for name, inner in saved["keys"].items() for key, entry in inner.items()
    }
    unknown = sorted(saved["values"].keys() - moments.keys())
    return unknown + sorted(name for name in given.keys() | listed.keys() if given.get(name) != listed.get(name))


def restore_(
    units: Iterable[Unit],
    optimizers: Sequence[torch.optim.Optimizer],
    initial: Groups,
    moments: Mapping[str, Mapping[str, Tensor]],
    shared: Mapping[str, Tensor],
    saved: Mapping[str, Any],
) -> None:
    """Set the state to what `collect` returned, sorted by parameter, in place."""
    for unit in units:
        name = unit.segments[0].name
        state = dict(saved["values"].get(name, {}))
        for key in saved["keys"].get(name, {}):
            if key in SHARED:
                state[key] = shared[key]
                continue
            device = torch.device("cpu") if key in saved["on_cpu"] else unit.values.device
            state[key] = moments[name][key].to(device, copy=True)
        if state:
            unit.optimizer.state[unit.stepped] = state
    for optimizer, starts, groups in zip(optimizers, initial, saved["groups"], strict=True):
        for group, start, changed in zip(optimizer.param_groups, starts, groups, strict=True):
            group.update(start | changed)
