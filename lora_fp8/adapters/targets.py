"""The layers that get an adapter, and the rank of each.

A target that matches nothing is an error, not a smaller adapter; so is an entry of `ranks`. A layer of rank 0 has no
adapter.
"""

import math
from collections.abc import Sequence

from torch import nn

from ..errors import Message, Plural, UserError
from ..precision.names import map_by_name, suggest_names
from ..settings import Adapter
from . import kinds


def choose_layers(model: nn.Module, section: Adapter, targets: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Return the rank of each layer that gets an adapter, in the model's order, and warnings.

    Args:
        model: the model to adapt; nothing of it is changed, and its tensors may be on the meta device.
        section: the job's `[adapter]` table.
        targets: used if `section.targets` is empty. Each is a layer's name or a suffix: "to_q" means every layer
            called to_q. `nn.Linear` (FP8 ones too) and `nn.Conv2d` can be adapted.

    Raises:
        UserError: a target matches no layer that can be adapted, or one that this kind cannot adapt.
    """
    setting = "adapter.targets" if section.targets else "targets"
    names, notes = _match(model, list(section.targets or targets), setting)
    rank_of, rank_notes = assign_ranks(section, names)
    return rank_of, [*notes, *rank_notes, *_check_layers(model, section, rank_of)]


def assign_ranks(section: Adapter, names: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Return the rank of each of these layers that gets an adapter, and warnings.

    The first entry of `section.ranks` that matches a layer applies; a layer of rank 0 gets none.

    Raises:
        UserError: an entry matches no layer, or no layer is left.
    """
    given_ranks, notes = map_by_name("adapter.ranks", section.ranks.items(), names)
    of_all = {name: given_ranks.get(name, section.rank) for name in names}
    if names and not any(of_all.values()):
        raise UserError(Message("adapter.ranks: no layer is left to train; give at least one layer a rank above 0"))
    return {name: rank for name, rank in of_all.items() if rank}, notes


def _match(denoiser: nn.Module, targets: list[str], setting: str) -> tuple[list[str], list[str]]:
    """Return the names of the layers that `targets` match, in the model's order, and warnings."""
    adaptable = {name: module for name, module in denoiser.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    chosen: set[str] = set()
    notes: list[str] = []
    if not targets:
        raise UserError(
            Message(
                "{key}: the list is empty, so there is nothing to train; name target modules, such as 'to_q'",
                key=setting,
            )
        )
    for target in targets:
        matched = {name for name in adaptable if f".{name}".endswith(f".{target}")}
        if not matched:
            raise UserError(
                Message(
                    "{setting}: {target} matches no layer that can be adapted; {line}",
                    setting=setting,
                    target=repr(target),
                    line=suggest_names(target, adaptable),
                )
            )
        if matched <= chosen:
            notes.append(
                Message(
                    "{target} adds nothing: the targets before it name all of its layers",
                    target=f"{setting}: {target!r}",
                )
            )
        chosen |= matched
    return [name for name in adaptable if name in chosen], notes


def _check_layers(denoiser: nn.Module, section: Adapter, rank_of: dict[str, int]) -> list[str]:
    """Return warnings about ranks that a layer cannot use. Raises UserError for a layer that cannot be adapted."""
    wide: list[tuple[str, int, int]] = []
    for name, rank in rank_of.items():
        layer = denoiser.get_submodule(name)
        if isinstance(layer, nn.Conv2d):
            count = layer.groups
            narrow = min(layer.in_channels // count * math.prod(layer.kernel_size), layer.out_channels)
        else:
            assert isinstance(layer, nn.Linear)  # `_match` finds no others
            narrow, count = min(layer.in_features, layer.out_features), 1
        if section.type != "lora" and count > 1:
            raise UserError(
                Message(
                    "adapter.type = {type}: {name} is a grouped convolution ({count} groups), which only 'lora' can "
                    "train; remove it from adapter.targets",
                    type=repr(section.type),
                    name=name,
                    count=count,
                )
            )
        if section.doubles_rank and count > 1:
            raise UserError(
                Message(
                    "adapter.init = {init}: {name} is a grouped convolution ({count} groups), which has no such "
                    "initialization; remove it from adapter.targets, or use 'default'",
                    init=repr(section.init),
                    name=name,
                    count=count,
                )
            )
        if rank % count:  # peft's B has the groups as well
            raise UserError(
                Message(
                    "adapter.rank = {rank}: {name} is a grouped convolution, so its rank must be a multiple of "
                    "{count}; set one in adapter.ranks, or remove it from adapter.targets",
                    rank=rank,
                    name=name,
                    count=count,
                )
            )
        if section.type == "oft":
            rows = layer.out_channels if isinstance(layer, nn.Conv2d) else layer.out_features
            if kinds.choose_block_size(rows, section.block_size) == 1:
                raise UserError(
                    Message(
                        "adapter.block_size = {size}: {name} has {rows} output features, and no block up to that "
                        "size divides them; remove it from adapter.targets, or choose another size",
                        size=section.block_size,
                        name=name,
                        rows=rows,
                    )
                )
        elif rank > narrow and section.type != "lokr":
            wide.append((name, rank, narrow))
    return [_describe_wide_ranks(wide)] if wide else []


def _describe_wide_ranks(wide: Sequence[tuple[str, int, int]]) -> str:
    """Describe layers whose rank is above the largest that they can use: (name, rank, largest) of each."""
    name, rank, most = wide[0]
    template = Plural(
        "adapter.rank {rank} exceeds the largest rank of {name} ({most})",
        "adapter.rank {rank} exceeds the largest rank of {count} layers, such as {name} ({most})",
    )
    return template(count=len(wide), rank=rank, name=name, most=most)
