"""Matches module names with entries of settings such as quantize.keep. Imports no torch, so that all may share it."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import TypeVar

from ..errors import Message, UserError

T = TypeVar("T")


def name_matches(name: str, entry: str) -> bool:
    """Return True if `entry`, a run of whole dot-separated segments, occurs in the dotted module `name`.

    "norm1.linear" matches "transformer_blocks.3.norm1.linear", but not "...norm1_context.linear". An entry that starts
    with "^" must match at the start: "^proj_out" is FLUX's last layer and not the `proj_out` of each single block. A
    "*" stands for any characters of one segment: "*attn*" matches names with "attn" in a segment, "*" matches
    everything.
    """
    if "*" in entry:
        begin, rest = ("^", entry[1:]) if entry.startswith("^") else (r"(?:^|\.)", entry)
        return re.search(begin + re.escape(rest).replace(r"\*", r"[^.]*") + r"(?:\.|$)", name) is not None
    if entry.startswith("^"):
        return f"{name}.".startswith(f"{entry[1:]}.")
    return f".{entry}." in f".{name}."


def map_by_name(setting: str, entries: Iterable[tuple[str, T]], names: Sequence[str]) -> tuple[dict[str, T], list[str]]:
    """Map each name to the value of the first entry that matches it.

    Args:
        setting: name of the setting, for messages.
        entries: (entry, value) pairs.
        names: module names.

    Returns:
        The map, and warnings about entries that add nothing.

    Raises:
        UserError: an entry matches none of the names.
    """
    matched: dict[str, T] = {}
    notes: list[str] = []
    for entry, value in entries:
        meant = [name for name in names if name_matches(name, entry)]
        if not meant:
            near = suggest_names(entry.removeprefix("^"), names)
            raise UserError(
                Message("{name} matches no trained layer; {which}", name=f"{setting}: {entry!r}", which=near)
            )
        if all(name in matched for name in meant):
            notes.append(
                Message(
                    "{name} adds nothing: the entries before it name all of its layers", name=f"{setting}: {entry!r}"
                )
            )
        matched |= {name: value for name in meant if name not in matched}
    return matched, notes


def suggest_names(target: str, names: Iterable[str]) -> str:
    """Suggest names for a `target` that is the ending of none of these names."""
    ends: dict[str, None] = {}  # all endings of all names that start with a word, shortest first
    for length in (1, 2, 3, 4):
        for name in names:
            parts = name.split(".")[-length:]
            if not parts[0].isdigit():
                ends[".".join(parts)] = None
    inside = [end for end in ends if f".{end}.".startswith(f".{target}.")]  # "to_out" is a list: suggest "to_out.0"
    near = inside[:3] or difflib.get_close_matches(target, ends, n=3)
    if near:
        return Message("did you mean {names}?", names=" or ".join(map(repr, near)))
    return Message("the layers of this model end in {names}", names=", ".join(list(ends)[:8]))
