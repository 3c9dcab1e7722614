"""The adapter: which layers it is for, and the ranks of LoKr."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..errors import Message
from ..settings import MOST_RANK
from . import remarks
from .common_values import is_on, list_accepted, normalize_name, parse_whole
from .import_draft import Draft
from .readers import Unfit


def find_type(kind: str) -> str:
    """Return our adapter.type for a kind of adapter, in whatever spelling; "" if there is none."""
    ours = {normalize_name(name): name for name in list_accepted("adapter.type") if name != "oft"}
    return (ours | {"diagoft": "oft"}).get(kind, "")  # "oft" of other trainers is mostly another variant


def set_type(draft: Draft, keys: str | Sequence[str], kind: str) -> str:
    """Set adapter.type, and return it. A kind of adapter without a counterpart becomes a LoRA.

    Args:
        draft: the import.
        keys: the tool's keys for it.
        kind: the kind, in lower case, with letters and digits only.
    """
    if own := find_type(kind):
        draft.report_mapped(keys, {"adapter.type": own})
        return own
    draft.report_unmatched(keys, Message("this trainer has no {name}; a LoRA of this rank was written", name=kind))
    draft.set("adapter.type", "lora")
    draft.add_todo("adapter.type", remarks.CHECK_RANK(kind=kind))
    return "lora"


def convert_name_part(word: str) -> str:
    """Convert a part of a layer's name to our pattern; "transformer." or "unet." stands for the start of the name."""
    inner = re.sub(r"^(transformer|unet)\.", "", word)
    begin = "^" if inner != word else "" if word.startswith(".") else "*"
    pattern = begin + inner.strip(".") + ("" if word.endswith(".") else "*")
    if not inner.strip(".") or re.search(r"[\s=]", pattern):
        raise Unfit(Message("{word} is not part of a layer name", word=repr(word)))
    return pattern


def set_filter(
    draft: Draft, keys: Sequence[str], only: Sequence[str], without: Sequence[str], rank: int, is_exact: bool = False
) -> None:
    """Set adapter.ranks from parts of names that a layer must contain (`only`), or must not (`without`).

    `is_exact`: the tool names the layers as this trainer does, and adapter.targets are those that it filters.
    """
    try:
        entries = dict.fromkeys(map(convert_name_part, without), 0)
        entries |= {name: rank for name in map(convert_name_part, only) if name not in entries}
        entries |= {"*": 0} if only and "*" not in entries else {}
    except Unfit as error:
        draft.report_unmatched(keys, Message("adapter.ranks was not written: {why}", why=error))
        return
    note = Message(
        "these filters apply to the modules that this trainer trains; remove entries that match none of them "
        "(`lora-fp8 check` lists them)"
    )
    (draft.report_mapped if is_exact else draft.report_different)(keys, {"adapter.ranks": entries}, note)


WHOLE_RANK = MOST_RANK
"""Rank that selects LoKr's whole matrices in our settings, as no side of a matrix is twice as long as this.

Other tools use a flag, or a rank larger than any layer's.
"""


def read_lokr_factor(value: Any) -> int:
    """Return adapter.factor from LyCORIS' factor; its -1 becomes 0."""
    return max(parse_whole("factor", value), 0)


def choose_lokr_rank(rank: int, whole: Any) -> int:
    """Return adapter.rank for a LoKr."""
    return WHOLE_RANK if is_on(whole) or rank > WHOLE_RANK else rank
