"""Values that several trainers write in the same way."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PureWindowsPath
from typing import Any, get_args

from ..config.validation import list_number_ranges
from ..errors import Message, UserError
from ..settings import MAX_SEED, Job
from . import remarks
from .import_draft import Draft
from .readers import Unfit, read_flag, read_number, read_string, read_whole


def read_thousandths(value: Any) -> float:
    """Convert a timestep out of 1000 to a noise level from 0 to 1."""
    return read_number(value) / 1000


def list_accepted(setting: str) -> list[str]:
    """Return the words that one of our settings accepts, such as the names of optimizers."""
    section, _, name = setting.rpartition(".")
    model: Any = Job.model_fields[section].annotation
    words: list[str] = []

    def collect_words(annotation: Any) -> None:
        for argument in get_args(annotation):
            words.append(argument) if isinstance(argument, str) else collect_words(argument)

    collect_words(model.model_fields[name].annotation)
    return words


def find_bounds(setting: str) -> tuple[Any, Any]:
    """Return the lowest and the highest number that one of our settings accepts; None where there is no such bound."""
    section, _, name = setting.rpartition(".")
    model: Any = Job.model_fields[section].annotation
    (_, limits), *_ = list_number_ranges(model.model_fields[name])
    return limits.get("ge"), limits.get("le")


def clamp(setting: str, value: float) -> Any:
    """Return the nearest number that one of our settings accepts."""
    least, most = find_bounds(setting)
    value = value if least is None else max(least, value)
    return value if most is None else min(most, value)


def normalize_name(name: Any) -> str:
    """Return a name in lower case, with letters and digits only, for comparisons."""
    return re.sub(r"[^a-z0-9]", "", str(name).lower())


def make_choice_reader(table: Mapping[str, str], what: str) -> Callable[[Any], str]:
    """Return a reader that looks a word up in a table; any other word is `Unfit`."""

    def read(value: Any) -> str:
        ours = table.get(normalize_name(value))
        if ours is None:
            raise Unfit(Message("{value} has no counterpart among {names}", value=repr(value), names=what))
        return ours

    return read


FILE_DTYPE = make_choice_reader(
    {
        **dict.fromkeys(("fp16", "float16", "half"), "fp16"),
        **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
        **dict.fromkeys(("fp32", "float32", "float", "no", "none"), "fp32"),
    },
    Message("bf16, fp16 and fp32"),
)


def set_seed(draft: Draft, key: str) -> None:
    """Set seed. In other tools, no seed or -1 means a random one; ours is 0 then."""
    seed = draft.get(key, read_whole)
    if seed is None:
        draft.report_unmatched(key, remarks.EMPTY, off=True)
    elif seed < 0:
        draft.report_unmatched(
            key, Message("the other trainer draws a random seed; this trainer uses 0, so that a run can be repeated")
        )
    elif seed > MAX_SEED:
        note = Message("the largest seed is {most}; the remainder was written", most=MAX_SEED)
        draft.report_different(key, {"seed": seed % (MAX_SEED + 1)}, note)
    else:
        draft.report_mapped(key, {"seed": seed})


def set_name(draft: Draft, key: str, value: str | None = None, note: str = "") -> None:
    """Set name, without characters that a folder's name cannot have."""
    given = draft.get(key, read_string) if value is None else value
    if not given:
        draft.report_unmatched(key, remarks.EMPTY, off=True)
        return
    name = "".join("-" if c in "/\\" or not c.isprintable() else c for c in given).strip()[:120]
    name = name if name not in ("", ".", "..") else "my-lora"
    full_note = (
        note
        if name == given
        else remarks.join([note, Message("characters that a folder name cannot have were replaced or removed")])
    )
    (draft.report_mapped if name == given else draft.report_different)(key, {"name": name}, full_note)


def get_stem(path: str) -> str:
    """Return the file name in a path, which may be a Windows path, without its suffix."""
    return PureWindowsPath(path).stem


def is_on(value: Any) -> bool:
    """Return True if a flag is set to true; an empty value is False."""
    return value not in (None, "") and read_flag(value)


def parse_decimal(what: str, value: Any) -> float:
    """Read a number from inside another program's settings.

    Raises:
        UserError: it is not a number.
    """
    try:
        return read_number(value)
    except Unfit as error:
        raise UserError(Message("{key}: {line}", key=what, line=error)) from None


def parse_whole(what: str, value: Any) -> int:
    """Read a whole number from inside another program's settings.

    Raises:
        UserError: it is not a whole number.
    """
    try:
        return int(str(value))
    except ValueError:
        raise UserError(Message("{key} = {given}: expected a whole number", key=what, given=repr(value))) from None
