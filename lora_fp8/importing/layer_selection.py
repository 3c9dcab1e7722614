"""Choose layers by their names: what another trainer's expressions select, as adapter.targets and adapter.ranks.

Which layers there are follows from the family's facts: its targets, its original names and the released model's size.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import families
from ..errors import Message
from ..lora_files import naming
from . import target_modules
from .kohya_blocks import make_chosen_ranks
from .readers import Unfit

MOST_LENGTH, MOST_REPEATS, MOST_PATTERNS = 200, 3, 100
"""Limits of an expression, and of a list: with more repeats, matching could take hours."""
SLOW = re.compile(r"\)[*+{?]|\(\?[^=!]|\\[1-9]")
"""Matches repeats of a group, other groups than lookaheads, and references to groups."""

Layer = tuple[str, str, int]
"""A layer in a block: the container of the blocks, the layer's ending, the block's number."""


def compile_simple(pattern: Any) -> re.Pattern[str]:
    """Compile a regular expression that is quick to match, as these are of somebody's file.

    Raises:
        Unfit: it is none, or one that could take long: too many repeats, repeated groups, or references to groups.
    """
    is_short = isinstance(pattern, str) and len(pattern) <= MOST_LENGTH
    if is_short and not SLOW.search(pattern) and len(re.findall(r"(?<!\\)[*+{]", pattern)) <= MOST_REPEATS:
        with contextlib.suppress(re.error):  # told below
            return re.compile(pattern)
    raise Unfit(Message("{value} is not a simple regular expression", value=repr(pattern)))


def compile_all(patterns: Sequence[Any]) -> list[re.Pattern[str]]:
    """Compile regular expressions; see `compile_simple`. Raises Unfit for more than anybody writes."""
    if len(patterns) > MOST_PATTERNS:
        raise Unfit(Message("there are more than {most} regular expressions", most=MOST_PATTERNS))
    return [compile_simple(pattern) for pattern in patterns]


def names_blocks_only(family: str, pattern: str) -> bool:
    """Return True if a part of names, or an expression, can select no layers outside of blocks.

    It names the blocks, or a kind of layer that only blocks have: attention or feed-forward.
    """
    kinds = ("attn", "attention", "ff.", "ffn", "feed_forward", "img_mlp", "txt_mlp", "proj_mlp")
    return any(word in pattern.replace("\\", "") for word in (*kinds, *count_blocks(family)))


def make_settings(family: str, is_trained: Callable[[str], bool], rank: int) -> dict[str, Any]:
    """Return adapter.targets and, if blocks or layers of some blocks are left out, adapter.ranks.

    Args:
        family: the architecture, one for which `count_blocks` knows the blocks.
        is_trained: returns True for the name of a layer, as diffusers names it.
        rank: the rank of the trained layers.

    Raises:
        Unfit: no layer is trained.
    """
    layers = list(_list_layers(family))
    trained = {layer for layer in layers if is_trained(_format_name(layer))}
    singles = [target for target in list_single_layers(family) if is_trained(target.removeprefix("^"))]
    endings = {ending for _, ending, _ in trained}
    targets = [target for target in target_modules.list_layers(family) if target in endings]
    if not trained:
        raise Unfit(Message("no block is trained"))
    ranks = _make_ranks([layer for layer in layers if layer[1] in endings], trained, rank)
    return {"adapter.targets": [*targets, *singles]} | ({"adapter.ranks": ranks} if ranks else {})


def _format_name(layer: Layer) -> str:
    container, ending, i = layer
    return f"{container}.{i}.{ending}"


def _list_layers(family: str) -> Iterator[Layer]:
    """Yield the layers in the blocks of the released model."""
    Family = families.get(family)
    endings = target_modules.list_layers(family)
    for container, count in count_blocks(family).items():
        known = [e for e in endings if naming.to_native(Family.native_layers, f"{container}.0.{e}")]
        no_adapter = {name.replace(".-1.", f".{count - 1}.") for name in Family.no_adapter}
        for ending in known:
            # A row of the table is about everything below it, which may not exist.
            if not any(ending.startswith(f"{other}.") for other in known):
                every = [(container, ending, i) for i in range(count)]
                yield from (layer for layer in every if _format_name(layer) not in no_adapter)


def count_blocks(family: str) -> dict[str, int]:
    """Return the containers of an architecture's blocks, and the number of blocks in the released model."""
    Family = families.get(family)
    counts: dict[str, int] = {}
    for native, ours in Family.native_layers:
        for key, source in Family.sizes_from.items():
            if "#" in ours and key in Family.reference_config and source.startswith(native.partition("#")[0] + "#."):
                counts[ours.partition(".#")[0]] = Family.reference_config[key]
    return counts


def list_single_layers(family: str) -> list[str]:
    """Return the targets of an architecture's further layers that are named one by one."""
    further = families.get(family).further_layers
    return [target for place in ("refiners", "outside") for target in further.get(place, ())]


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
