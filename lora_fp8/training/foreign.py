"""Optimizers by class: `optimizer.name = "package.Class"` with `optimizer.arguments`, tried before anything is loaded.

Any `torch.optim.Optimizer` that takes a learning rate will do, if its state can be saved and restored to the bit. That
is not taken on trust: `try_out` takes a few steps with two small parameters, straight and resumed from a saved state,
and compares them. A class that needs a closure, keeps what is neither a tensor nor a number, draws from global random
numbers, or hides a part of its state elsewhere is refused with the reason.
"""

import importlib
import inspect
import json
from collections.abc import Callable
from typing import Any

import torch

from ..common.text import find_similar
from ..errors import Joined, Message, UserError, reason
from ..settings import Optimizer, is_class

OURS = ("params", "lr")
"""Arguments that the trainer gives."""


def find_class(section: Optimizer) -> type[torch.optim.Optimizer]:
    """Import the class that `optimizer.name` names.

    Raises:
        UserError: its package is not installed or does not load, or it is no optimizer with a learning rate.
    """
    module_name, _, class_name = section.name.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _make_error(section, Message("there is no module {name}; install its package", name=error.name)) from None
    except Exception as error:
        raise _make_error(
            section, Message("{name} does not load ({why})", name=module_name, why=reason(error))
        ) from error
    made = getattr(module, class_name, None)
    if made is None:
        near = find_similar(class_name, dir(module))
        line = Message("{module} has no {name}", module=module_name, name=class_name)
        if near:
            line = Message("{line}, did you mean {meant}?", line=line, meant=repr(f"{module_name}.{near}"))
        raise _make_error(section, line)
    if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
        raise _make_error(section, Message("it is not a torch.optim.Optimizer"))
    if "lr" not in inspect.signature(made).parameters:
        raise _make_error(section, Message("it has no argument lr, so no learning rate can be set"))
    return made


def check_arguments(section: Optimizer, made: type[torch.optim.Optimizer]) -> None:
    """Check `optimizer.arguments` against the signature of the class.

    Raises:
        UserError: the class has no such argument, or the trainer gives it.
    """
    parameters = inspect.signature(made).parameters
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = [name for name, entry in parameters.items() if name not in OURS and entry.kind not in variable]
    for name in section.arguments:
        if name in OURS:
            raise UserError(
                Message(
                    "optimizer.arguments: the trainer sets {name} itself; set optimizer.lr instead", name=repr(name)
                )
            )
        if name not in names:  # not even where the class takes any **keyword: it would ignore a misspelled one
            raise UserError(
                Message(
                    "optimizer.arguments: {made} has no argument {name}; its arguments are {names}",
                    made=section.name,
                    name=repr(name),
                    names=Joined(", ", names),
                )
            )


def make_arguments(section: Optimizer) -> dict[str, Any]:
    """Return `optimizer.arguments` as the class takes them: a list in TOML is a tuple in Python, such as betas."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in section.arguments.items()}


def try_out(section: Optimizer, build: Callable[[list[tuple[str, torch.nn.Parameter]]], Any]) -> None:
    """Take a few steps, straight and resumed, and compare them to the bit.

    Args:
        section: names a class.
        build: makes an `AdapterOptimizer` of these parameters.

    Raises:
        UserError: the class refuses its arguments, or cannot be resumed, with the reason.
    """
    check_arguments(section, find_class(section))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        straight, whole = _begin(section, build)
        _take_steps(section, whole, range(1, 3))
        tensors, meta = whole.copy_state()
        try:
            meta = json.loads(json.dumps(meta, allow_nan=False))
        except (TypeError, ValueError):
            raise _make_error(section, Message("its state cannot be saved")) from None
        copies = {name: param.detach().clone() for name, param in straight}
        _take_steps(section, whole, range(3, 6))
        again, resumed = _begin(section, build)
        for name, param in again:
            param.data.copy_(copies[name])
        resumed.load_state(tensors, meta)
        _take_steps(section, resumed, range(3, 6))
    if not all(torch.equal(param, other) for (_, param), (_, other) in zip(straight, again, strict=True)):
        raise _make_error(
            section,
            Message("its state cannot be restored, so a resumed training would differ from an uninterrupted one"),
        )


def _begin(section: Optimizer, build: Callable[[list[tuple[str, torch.nn.Parameter]]], Any]) -> tuple[Any, Any]:
    """Return two small parameters and their optimizer."""
    drawn = torch.Generator().manual_seed(0)
    shapes = {"matrix": (8, 16), "small": (4, 8)}
    named = [(name, torch.nn.Parameter(torch.randn(shape, generator=drawn))) for name, shape in shapes.items()]
    try:
        return named, build(named)
    except UserError:
        raise
    except Exception as error:
        line = Message("optimizer.arguments: {made} does not accept them ({why})", made=section.name, why=reason(error))
        raise UserError(line) from error


def _take_steps(section: Optimizer, optimizer: Any, steps: range) -> None:
    for step in steps:
        drawn = torch.Generator().manual_seed(step)
        gradient = torch.randn(optimizer.layout.size, generator=drawn)
        try:
            with optimizer.evaluation():
                pass
            optimizer.step(gradient, 1e-3 / step, step)
        except UserError:
            raise
        except Exception as error:
            parameters = inspect.signature(optimizer.library.step).parameters
            closure = parameters.get("closure")
            if closure is not None and (closure.default is inspect.Parameter.empty or "closure" in str(error)):
                raise _make_error(section, Message("it needs a closure that computes the loss again")) from error
            raise _make_error(section, Message("its first steps failed ({why})", why=reason(error))) from error


def _make_error(section: Optimizer, line: Message) -> UserError:
    assert is_class(section.name)
    return UserError(Message("optimizer.name = {name}: {line}", name=repr(section.name), line=line))
