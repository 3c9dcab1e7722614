"""Values that several trainers write in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PureWindowsPath
from typing import Any, get_args

from ..config.validation import number_ranges
from ..errors import Message, UserError
from ..settings import MAX_SEED, Job
from . import remarks
from .import_draft import Draft
from .readers import Unfit, flag, number, text, whole


def thousandths(value: Any) -> float:
    """Convert a timestep out of 1000 to a noise level from 0 to 1."""
    return number(value) / 1000


def accepted(setting: str) -> list[str]:
    """Return the words that one of our settings accepts, such as the names of optimizers."""
    section, _, name = setting.rpartition(".")
    model: Any = Job.model_fields[section].annotation
    words: list[str] = []

    def look(annotation: Any) -> None:
        for argument in get_args(annotation):
            words.append(argument) if isinstance(argument, str) else look(argument)

    look(model.model_fields[name].annotation)
    return words


def bounds(setting: str) -> tuple[Any, Any]:
    """Return the lowest and the highest number that one of our settings accepts; None where there is no such bound."""
    section, _, name = setting.rpartition(".")
    model: Any = Job.model_fields[section].annotation
    (_, limits), *_ = number_ranges(model.model_fields[name])
    return limits.get("ge"), limits.get("le")


def clamp(setting: str, value: float) -> Any:
    """Return the nearest number that one of our settings accepts."""
    least, most = bounds(setting)
    value = value if least is None else max(least, value)
    return value if most is None else min(most, value)


def plain(name: Any) -> str:
    """Return a name in lower case, with letters and digits only, for comparisons."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def choice(table: Mapping[str, str], what: str) -> Callable[[Any], str]:
    """Return a reader that looks a word up in a table; any other word is `Unfit`."""

    def read(value: Any) -> str:
        ours = table.get(plain(value))
        if ours is None:
            raise Unfit(Message("{value} has no counterpart among {names}", value=repr(value), names=what))
        return ours

    return read


FILE_DTYPE = choice(
    {
        **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
        **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
        **dict.fromkeys(("fp32", "float32", "float", "no", "none"), "fp32"),
    },
    Message("bf16, fp16 and fp32"),
)


def set_seed(draft: Draft, key: str) -> None:
    """Set seed. In other tools, no seed or -1 means a random one; ours is 0 then."""
    seed = draft.get(key, whole)
    if seed is None:
        draft.none(key, remarks.EMPTY, off=True)
    elif seed < 0:
        draft.none(
            key, Message("the other trainer draws a random seed; this trainer uses 0, so that a run can be repeated")
        )
    elif seed > MAX_SEED:
        note = Message("the largest seed is {most}; the remainder was written", most=MAX_SEED)
        draft.differs(key, {"seed": seed % (MAX_SEED + 1)}, note)
    else:
        draft.mapped(key, {"seed": seed})


def set_name(draft: Draft, key: str, value: str | None = None, note: str = "") -> None:
    """Set name, without characters that a folder's name cannot have."""
    given = draft.get(key, text) if value is None else value
    if not given:
        draft.none(key, remarks.EMPTY, off=True)
        return
    name = "".join("-" if c in "/\\" or not c.isprintable() else c for c in given).strip()[:120]
    name = name if name not in ("", ".", "..") else "my-lora"
    full_note = (
        note
        if name == given
        else remarks.join([note, Message("characters that a folder name cannot have were replaced or removed")])
    )
    (draft.mapped if name == given else draft.differs)(key, {"name": name}, full_note)


def stem(path: str) -> str:
    """Return the file name in a path, which may be a Windows path, without its suffix."""
    return PureWindowsPath(path).stem


def on(value: Any) -> bool:
    """Return True if a flag is set to true; an empty value is False."""
    return value not in (None, "") and flag(value)


def said_decimal(what: str, value: Any) -> float:
    """Read a number from inside another program's settings.

    Raises:
        UserError: it is not a number.
    """
    try:
        return number(value)
    except Unfit as error:
        raise UserError(Message("{key}: {line}", key=what, line=error)) from None


def said_number(what: str, value: Any) -> int:
    """Read a whole number from inside another program's settings.

    Raises:
        UserError: it is not a whole number.
    """
    try:
        return int(str(value))
    except ValueError:
        raise UserError(Message("{key} = {given}: expected a whole number", key=what, given=repr(value))) from None
