"""musubi-tuner's exclude_patterns and include_patterns: regular expressions that choose the layers of a LoRA.

networks/lora.py: a linear layer of the blocks gets no LoRA if an exclude pattern matches its whole name and no include
pattern does. Names are those of musubi-tuner's models, which fuse q, k and v where the makers' code does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any

from .. import families
from ..errors import Message
from ..lora_files import naming
from . import layer_selection, target_modules
from .import_draft import Draft
from .kohya_blocks import pop_arguments
from .readers import Unfit, read_whole

NAMES = ("exclude_patterns", "include_patterns")
QWEN = ("qwen_image", "qwen_image_edit", "qwen_image_edit_plus")
OWN_EXCLUDES = {
    "z_image": (r".*(_modulation|_refiner).*",),
    "hunyuan_video": (r".*(img_mod|txt_mod|modulation).*",),
    **dict.fromkeys((*QWEN, "wan", "wan22_5b", "flux_kontext", "flux2", "flux2_klein", "krea2", "ernie_image"), ()),
}
"""Architecture -> what its network excludes beside the user's patterns, as far as we can train it (networks/lora_*.py).

Ideogram 4 has include patterns of its own, with which exclude patterns have no effect.
"""
UNLESS_GIVEN = {"flux_kontext": (r".*mod.*\.lin",)}
"""The same, for networks whose own patterns apply only if the user gives none."""
NAMED_AS_IN_DIFFUSERS = ("z_image",)
"""Architectures whose layers musubi-tuner names as diffusers does, unlike their makers."""


def set_patterns(draft: Draft, given: dict[str, str]) -> None:
    """Set adapter.targets and adapter.ranks from the patterns, and remove them from the network's arguments."""
    if draft.family in QWEN:
        given.pop("exclude_mod", None)  # it adds or removes a pattern that matches no layer
    if not any(given.get(name) for name in NAMES) or draft.family not in OWN_EXCLUDES:
        return  # the caller reports these arguments by name
    try:
        exclude, include = (_parse_patterns(given.get(name, "")) for name in NAMES)
        own = () if given.get(NAMES[0]) else UNLESS_GIVEN.get(draft.family, ())
        exclude += [re.compile(pattern) for pattern in (*OWN_EXCLUDES[draft.family], *own)]
        settings = _make_settings(draft, exclude, include)
    except Unfit:
        return
    note = Message("the layers that these patterns select, in the names of this trainer")
    draft.report_mapped(pop_arguments(given, NAMES), settings, note)


def _parse_patterns(text: str) -> list[re.Pattern[str]]:
    """Parse a list of regular expressions, written as in Python."""
    try:
        patterns = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        patterns = text
    if not isinstance(patterns, list | tuple):
        raise Unfit(Message("{value} is not a list", value=repr(text)))
    return layer_selection.compile_all(patterns)


def _make_settings(
    draft: Draft, exclude: Sequence[re.Pattern[str]], include: Sequence[re.Pattern[str]]
) -> dict[str, Any]:
    """Return adapter.targets and adapter.ranks; {} if they are our own."""

    def is_trained(layer: str) -> bool:
        name = _get_name(draft.family, layer)
        included = any(pattern.fullmatch(name) for pattern in include)
        return included or not any(pattern.fullmatch(name) for pattern in exclude)

    rank = draft.settings.get("adapter.rank") or draft.get("network_dim", read_whole) or 4
    settings = layer_selection.make_settings(draft.family, is_trained, rank)
    own = {"adapter.targets": list(families.get(draft.family).adapter_targets)}
    return {} if settings == own and draft.family not in target_modules.FURTHER_LAYERS[draft.tool.name] else settings


def _get_name(family: str, layer: str) -> str:
    """Return what musubi-tuner calls a layer."""
    native = naming.to_native(families.get(family).native_layers, layer)
    return layer if native is None or family in NAMED_AS_IN_DIFFUSERS else native[0]
