"""What is offloaded."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .. import families
from ..errors import Message
from ..settings import Quantize
from . import common_values, remarks
from .import_draft import Draft
from .readers import read_whole


def set_offload(draft: Draft, keys: str | Sequence[str], share: float, note: str) -> None:
    """Set memory.offload; called after the precision is set, as it depends on it.

    Args:
        draft: the import.
        keys: the tool's keys.
        share: fraction of the frozen weights that the tool keeps in RAM.
        note: the difference in meaning.
    """
    if share <= 0:
        draft.report_unmatched(keys, remarks.OFF, off=True)
        return
    share = common_values.clamp("memory.offload", round(share, 2))
    storage = draft.settings.get("quantize.storage", Quantize.model_fields["storage"].default)
    if storage in ("bf16", "none"):
        draft.report_unmatched(keys, remarks.NEEDS_QUANTIZED)
        what = Message(
            "the other trainer offloads about {share} of the base model to RAM. To do the same, set "
            "quantize.storage = 'fp8' and memory.offload = {share}",
            share=f"{share:g}",
        )
        draft.add_todo("memory.offload", what)
        return
    draft.report_different(keys, {"memory.offload": share}, note)


def set_swap(draft: Draft, key: str) -> None:
    """Set memory.offload from a number of blocks; kohya swaps two single-stream blocks per double-stream block."""
    number_of = draft.get(key, read_whole) or 0
    if number_of > 0 and not draft.family:
        draft.wait(key)
        return
    stated: Mapping[str, Any] = {}
    if draft.family in families.list_families():
        stated = families.get(draft.family).reference_config
    double, single = stated.get("num_layers", stated.get("n_layers", 0)), stated.get("num_single_layers", 0)
    if draft.family == "wan" and re.search(r"1[._]3b", str(draft.settings.get("model.path")).lower()):
        double = 30
    if number_of > 0 and not double:
        draft.report_unmatched(
            key, Message("the number of blocks of this architecture is unknown, but memory.offload is a share")
        )
        draft.add_todo(
            "memory.offload",
            Message(
                "the other trainer offloads {number} blocks to RAM; choose a share of the weights", number=number_of
            ),
        )
        return
    swapped = number_of if not single else number_of // 2 + 2 * (number_of - number_of // 2)
    note = Message(
        "these are about {swapped} of {blocks} blocks; this trainer offloads that share of all frozen weights",
        swapped=min(swapped, double + single),
        blocks=double + single,
    )
    set_offload(draft, key, swapped / (double + single) if number_of > 0 else 0.0, note)
