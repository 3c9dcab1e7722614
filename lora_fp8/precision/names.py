"""Which module names an entry of a keep-list means. Pure, so that families, config checks and tests can share it."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

from lora_fp8.config import UserError

T = TypeVar("T")


def name_matches(name: str, entry: str) -> bool:
    """Whether `entry`, a run of whole dot-separated segments, stands anywhere in the dotted module `name`.

    "norm1.linear" matches "transformer_blocks.3.norm1.linear", but not "...norm1_context.linear". An entry that starts
    with "^" must stand at the start: "^proj_out" is FLUX's last layer and not the `proj_out` of each single block. A
    "*" stands for any characters of one segment: "*attn*" is what has "attn" in a segment, "*" alone everything.
    """
    if "*" in entry:
        begin, rest = ("^", entry[1:]) if entry.startswith("^") else (r"(?:^|\.)", entry)
        return re.search(begin + re.escape(rest).replace(r"\*", r"[^.]*") + r"(?:\.|$)", name) is not None
    if entry.startswith("^"):
        return f"{name}.".startswith(f"{entry[1:]}.")
    return f".{entry}." in f".{name}."


def by_name(setting: str, entries: Iterable[tuple[str, T]], names: Sequence[str]) -> tuple[dict[str, T], list[str]]:
    """What a setting's entries say of these names, of which the first that means a name counts; and warnings.

    Raises:
        UserError: an entry that means none of them.
    """
    found: dict[str, T] = {}
    notes = []
    for entry, value in entries:
        meant = [name for name in names if name_matches(name, entry)]
        if not meant:
            near = hint(entry.removeprefix("^"), names)
            raise UserError(f"{setting}: {entry!r} matches no layer that is adapted; {near}")
        if all(name in found for name in meant):
            notes.append(f"{setting}: {entry!r} adds nothing: the entries before it name all of its layers")
        found |= {name: value for name in meant if name not in found}
    return found, notes


def hint(target: str, names: Iterable[str]) -> str:
    """What might have been meant by an ending that none of these names has."""
    ends: dict[str, None] = {}  # every ending of every name that starts with a word, shortest first
    for length in (1, 2, 3, 4):
        for name in names:
            parts = name.split(".")[-length:]
            if not parts[0].isdigit():
                ends[".".join(parts)] = None
    inside = [end for end in ends if f".{end}.".startswith(f".{target}.")]  # "to_out" is a list: mean "to_out.0"
    near = inside[:3] or difflib.get_close_matches(target, ends, n=3)
    return (
        f"did you mean {' or '.join(map(repr, near))}?" if near else f"layers here end in {', '.join(list(ends)[:8])}"
    )
