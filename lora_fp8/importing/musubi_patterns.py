"""musubi-tuner's exclude_patterns and include_patterns: regular expressions that choose the layers of a LoRA.

networks/lora.py: a linear layer of the blocks gets no LoRA if an exclude pattern matches its whole name and no include
pattern does. Names are those of musubi-tuner's models, which fuse q, k and v where the makers' code does. Which layers
there are follows from the family's facts: its targets, its original names and the released model's size.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import Any

from .. import families
from ..errors import Message
from ..lora_files import naming
from . import target_modules
from .import_draft import Draft
from .kohya_blocks import make_chosen_ranks, pop_arguments
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
MOST_LENGTH, MOST_REPEATS = 200, 4
"""Limits of an expression: with more repeats, matching could take hours."""

Layer = tuple[str, str, int]
"""A layer in a block: the container of the blocks, the layer's ending, the block's number."""


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
        raise Unfit(Message("{value} is not a list", value=repr(text))) from None
    if not isinstance(patterns, list | tuple):
        raise Unfit(Message("{value} is not a list", value=repr(text)))
    return [_compile(pattern) for pattern in patterns]


def _compile(pattern: Any) -> re.Pattern[str]:
    """Compile a regular expression that is quick to match, as these are of somebody's file.

    Raises:
        Unfit: it is none, or one that could take long: too many repeats, repeated groups, or references to groups.
    """
    slow = not isinstance(pattern, str) or len(pattern) > MOST_LENGTH or re.search(r"\)[*+{?]|\(\?|\\[1-9]", pattern)
    if slow or len(re.findall(r"(?<!\\)[*+{]", pattern)) > MOST_REPEATS:
        raise Unfit(Message("{value} is not a simple regular expression", value=repr(pattern)))
    try:
        return re.compile(pattern)
    except re.error:
        raise Unfit(Message("{value} is not a simple regular expression", value=repr(pattern))) from None


def _make_settings(
    draft: Draft, exclude: Sequence[re.Pattern[str]], include: Sequence[re.Pattern[str]]
) -> dict[str, Any]:
    """Return adapter.targets and, if blocks or layers of some blocks are left out, adapter.ranks."""

    def is_trained(name: str) -> bool:
        included = any(pattern.fullmatch(name) for pattern in include)
        return included or not any(pattern.fullmatch(name) for pattern in exclude)

    layers = list(_list_layers(draft.family))
    trained = {layer for layer, name in layers if is_trained(name)}
    singles = [target for target, name in _list_single_layers(draft.family) if is_trained(name)]
    endings = {ending for _, ending, _ in trained}
    targets = [target for target in target_modules.list_layers(draft.family) if target in endings]
    if not trained:
        raise Unfit(Message("no block is trained"))
    rank = draft.settings.get("adapter.rank") or draft.get("network_dim", read_whole) or 4
    ranks = _make_ranks([layer for layer, _ in layers if layer[1] in endings], trained, rank)
    settings: dict[str, Any] = {"adapter.targets": [*targets, *singles]}
    own = list(families.get(draft.family).adapter_targets)
    if [*targets, *singles] == own and draft.family not in target_modules.FURTHER_LAYERS[draft.tool.name]:
        settings = {}
    return settings | ({"adapter.ranks": ranks} if ranks else {})


def _list_layers(family: str) -> Iterator[tuple[Layer, str]]:
    """Yield the layers in the blocks of the released model, and what musubi-tuner calls each."""
    Family = families.get(family)
    endings = target_modules.list_layers(family)
    for container, count in _count_blocks(family).items():
        natives = {ending: _get_name(family, f"{container}.0.{ending}") for ending in endings}
        for ending, native in natives.items():
            outer = [other for other in endings if ending.startswith(f"{other}.") and natives[other]]
            if not native or outer:  # a row of the table is about everything below it, which may not exist
                continue
            for i in range(count):
                layer = f"{container}.{i}.{ending}"
                if layer not in {name.replace(".-1.", f".{count - 1}.") for name in Family.no_adapter}:
                    yield (container, ending, i), _get_name(family, layer)


def _count_blocks(family: str) -> dict[str, int]:
    """Return the containers of an architecture's blocks, and the number of blocks in the released model."""
    Family = families.get(family)
    counts: dict[str, int] = {}
    for native, ours in Family.native_layers:
        for key, source in Family.sizes_from.items():
            if "#" in ours and key in Family.reference_config and source.startswith(native.partition("#")[0] + "#."):
                counts[ours.partition(".#")[0]] = Family.reference_config[key]
    return counts


def _list_single_layers(family: str) -> Iterator[tuple[str, str]]:
    """Yield the targets of layers that are named one by one, and what musubi-tuner calls each."""
    for place in ("refiners", "outside"):
        for target in families.get(family).further_layers.get(place, ()):
            yield target, _get_name(family, target.removeprefix("^"))


def _get_name(family: str, layer: str) -> str:
    """Return what musubi-tuner calls a layer; "" if there is no such layer."""
    native = naming.to_native(families.get(family).native_layers, layer)
    return "" if native is None else layer if family in NAMED_AS_IN_DIFFUSERS else native[0]


def _make_ranks(layers: Sequence[Layer], trained: set[Layer], rank: int) -> dict[str, int]:
    """Return the entries of adapter.ranks with which only some of the targeted layers are trained."""
    inner: dict[str, int] = {}
    blocks: dict[str, int] = {}
    for container in dict.fromkeys(layer[0] for layer in layers):
        own = [layer for layer in layers if layer[0] == container]
        used = {i for name, _, i in trained if name == container}
        for ending in dict.fromkeys(layer[1] for layer in own):
            of_ending = [layer for layer in own if layer[1] == ending and layer[2] in used]
            left_out = [layer for layer in of_ending if layer not in trained]
            if of_ending and len(left_out) == len(of_ending):
                inner[f"^{container}.*.{ending}"] = 0
            else:
                inner |= {f"^{container}.{i}.{ending}": 0 for _, _, i in left_out}
        total = max(i for _, _, i in own) + 1
        blocks |= make_chosen_ranks(f"^{container}", used, total, rank) if used else {f"^{container}": 0}
    return inner | blocks
