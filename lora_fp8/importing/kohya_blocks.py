"""kohya's networks block by block: rank, alpha and learning rate of each block of a UNet, FLUX blocks, and LoRA+."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from .. import families
from ..errors import Message
from . import common_values, model_settings, optimizer_settings, remarks
from .import_draft import Draft
from .kohya_table import NO_RATIO
from .readers import Unfit, read_number, read_whole

UNET_BLOCKS = {
    **{3 * i + j + 1: f"down_blocks.{i}.attentions.{j}" for i in range(3) for j in range(2)},
    12: "mid_block",
    **{3 * i + j + 13: f"up_blocks.{i}.attentions.{j}" for i in range(1, 4) for j in range(3)},
}
SDXL_BLOCKS = {
    **{3 * i + j + 2: f"down_blocks.{i}.attentions.{j}" for i in (1, 2) for j in range(2)},
    11: "mid_block",
    **{3 * i + j + 13: f"up_blocks.{i}.attentions.{j}" for i in range(2) for j in range(3)},
}
BLOCKS = {"sd15": (25, UNET_BLOCKS), "sd2": (25, UNET_BLOCKS), "sdxl": (23, SDXL_BLOCKS)}
"""Length of block_dims, and the positions in it of blocks that have linear layers: those with attention."""
PARTS = {"sd15": (12, 1), "sd2": (12, 1), "sdxl": (9, 3)}
"""Lengths of down_lr_weight and up_lr_weight (each), and of mid_lr_weight; SDXL has one more block at each end."""
RATES = ("down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold")


FLUX = ("flux", "chroma")
"""Architectures whose networks accept a choice of blocks to train."""
CHOICES = ("train_blocks", "train_double_block_indices", "train_single_block_indices")
FLUX_BLOCKS = {"double": "^transformer_blocks", "single": "^single_transformer_blocks"}
"""Kinds of blocks -> our pattern of their names."""
LORAPLUS = ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio")


def set_choice(draft: Draft, given: dict[str, str], plain: bool) -> None:
    """Set adapter.ranks from the FLUX blocks that are trained, by kind or by number. Arguments as in `set_blocks`."""
    source = {key: str(draft.given[key]) for key in CHOICES if draft.has(key)} | given
    choices = {key: source[key].strip().lower() for key in CHOICES if key in source}
    paged = [key for key in choices if key not in given]
    if all(value == "all" for value in choices.values()):
        draft.report_unmatched(paged, Message("all blocks are trained"), off=True)
        for key in choices:
            given.pop(key, None)
        return
    if plain and not draft.family:
        draft.wait(paged)
    if not plain or draft.family not in FLUX:
        return
    rank = draft.get("network_dim", read_whole) or 4
    released = families.get(draft.family).reference_config
    totals = {"double": released["num_layers"], "single": released["num_single_layers"]}
    try:
        chosen = {kind: _choose_blocks(choices, kind, total) for kind, total in totals.items()}
    except Unfit:
        return  # the caller reports these arguments by name
    if not any(chosen.values()):
        return
    entries: dict[str, int] = {}
    for kind, total in totals.items():
        entries |= make_chosen_ranks(FLUX_BLOCKS[kind], chosen[kind], total, rank)
    draft.report_mapped(paged + pop_arguments(given, choices), {"adapter.ranks": entries})


def _choose_blocks(choices: dict[str, str], kind: str, total: int) -> set[int]:
    """Return the numbers of the blocks of one kind that are trained."""
    if choices.get("train_blocks", "all") not in ("all", kind):
        return set()
    return _parse_numbers(choices.get(f"train_{kind}_block_indices", "all"), total)


def make_chosen_ranks(name: str, chosen: set[int], total: int, rank: int) -> dict[str, int]:
    """Return the entries of adapter.ranks that train only the chosen blocks, as few entries as possible."""
    others = set(range(total)) - chosen
    if len(chosen) < len(others):
        return {f"{name}.{i}": rank for i in sorted(chosen)} | {name: 0}
    return {f"{name}.{i}": 0 for i in sorted(others)}


def pop_arguments(given: dict[str, str], names: Iterable[str]) -> list[str]:
    """Remove converted arguments; return the key that holds them if one of them has a value."""
    values = [given.pop(name, None) for name in names]
    return ["network_args"] if any(values) else []


def _parse_numbers(text: str, total: int) -> set[int]:
    """Parse "0,4-6", "all" or "none" as a set of numbers below total."""
    if text in ("all", "none", ""):
        return set(range(total)) if text == "all" else set()
    numbers: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        numbers |= set(range(read_whole(first), read_whole(last if dash else first) + 1))
    if not numbers <= set(range(total)):
        raise Unfit(remarks.OTHER_BLOCKS)
    return numbers


def set_blocks(draft: Draft, given: dict[str, str], plain: bool) -> None:
    """Set adapter.ranks and optimizer.lrs from ranks, alphas and learning rates of blocks.

    Args:
        draft: the import.
        given: the network's arguments; those that are converted are removed.
        plain: the network is one that uses them.
    """
    if draft.has("enable_block_weights") and not common_values.is_on(draft.given["enable_block_weights"]):
        draft.report_unmatched([*RATES, "enable_block_weights"], Message("block weights are off"), off=True)
    names = ("block_dims", "block_alphas", *RATES)
    if plain and not draft.family:
        draft.wait([key for key in names if draft.has(key)])
    if not plain or draft.family not in BLOCKS:
        return
    source = {key: str(draft.given[key]) for key in names if draft.has(key)} | given
    used = [key for key in names if source.get(key)]
    try:
        ours, note = _make_block_settings(draft, source)
    except (Unfit, ValueError):
        return  # the caller reports these arguments by name
    if not used:
        return
    keys = [key for key in used if key not in given] + pop_arguments(given, used)
    (draft.report_different if note else draft.report_mapped)(keys, ours, note)
    draft.report_mapped("enable_block_weights", {}, remarks.IS_ON(name="enable_block_weights"))


def _make_block_settings(draft: Draft, source: dict[str, str]) -> tuple[dict[str, Any], str]:
    """Return adapter.ranks and optimizer.lrs as far as they have entries, and what differs."""
    weights = _compute_weights(source, draft.family) if any(source.get(key) for key in RATES[:3]) else {}
    ranks, note = _make_ranks(draft, source, weights)
    rates = {name: float(f"{weight:.10g}") for name, weight in weights.items() if weight not in (0, 1)}
    if rates and _finds_its_rate(draft):
        raise Unfit(Message("the optimizer finds its learning rate by itself"))
    tables: dict[str, Any] = {"adapter.ranks": ranks, "optimizer.lrs": rates}
    return {setting: entries for setting, entries in tables.items() if entries}, note


def _make_ranks(draft: Draft, source: dict[str, str], weights: dict[str, float]) -> tuple[dict[str, int], str]:
    """Return the entries of adapter.ranks, and what differs. Blocks whose learning rate is 0 have no rank."""
    number_of, blocks = BLOCKS[draft.family]
    rank, alpha = draft.get("network_dim", read_whole) or 4, draft.get("network_alpha", read_number) or 1.0
    dims = (
        [read_whole(part) for part in source["block_dims"].split(",")]
        if source.get("block_dims")
        else [rank] * number_of
    )
    alphas = [read_number(part) for part in source.get("block_alphas", "").split(",") if part.strip()]
    alphas = alphas or [alpha] * number_of
    if len(dims) != number_of or len(alphas) != number_of:
        raise Unfit(remarks.OTHER_BLOCKS)
    used = {name: dims[place] if weights.get(name, 1.0) else 0 for place, name in blocks.items()}
    if not any(used.values()):
        raise Unfit(Message("no block is trained"))
    entries = {name: dim for name, dim in used.items() if dim != rank}
    scales = {alphas[place] / dims[place] for place, name in blocks.items() if used[name]}
    if all(math.isclose(scale, alpha / rank) for scale in scales):
        return entries, ""
    if len(scales) == 1:  # the scale of all blocks; text encoders have network_dim
        draft.set("adapter.alpha", scales.pop() * rank)
        return entries, Message("text encoders are scaled by the same alpha / rank as the blocks")
    return entries, Message("this trainer scales all layers by the same alpha / rank")


def _compute_weights(source: dict[str, str], family: str) -> dict[str, float]:
    """Return the factor on the learning rate of each block with attention.

    The rules are those of `get_block_lr_weight` in sd-scripts' networks/lora.py.
    """
    outer, inner = PARTS[family]
    threshold = read_number(source.get("block_lr_zero_threshold") or 0.0)

    def parse_part(key: str, length: int) -> list[float]:
        text = source.get(key, "").strip()
        if not text:
            return [1.0] * length
        shape, _, lift = text.partition("+")
        if key != "mid_lr_weight" and "," not in text:
            steps = [i / (length - 1) for i in range(length)]
            rising = {
                "sine": [math.sin(math.pi * step / 2) for step in steps],
                "linear": steps,
                "zeros": [0.0] * length,
            }
            falling = {"cosine": rising["sine"][::-1], "reverse_linear": steps[::-1]}
            weights = [weight + read_number(lift or 0.0) for weight in (rising | falling).get(shape.strip()) or ()]
            if not weights:
                raise Unfit(Message("{word} is not a shape of learning rates", word=repr(text)))
        else:
            weights = [read_number(part) if part.strip() else 0.0 for part in text.split(",")][:length]
            weights += [1.0] * (length - len(weights))
        return [weight if weight > threshold else 0.0 for weight in weights]

    every = [
        *parse_part("down_lr_weight", outer),
        *parse_part("mid_lr_weight", inner),
        *parse_part("up_lr_weight", outer),
    ]
    every = [1.0, *every, 1.0] if family == "sdxl" else every
    return {name: every[place] for place, name in BLOCKS[family][1].items()}


def set_loraplus(draft: Draft, given: dict[str, str], plain: bool) -> None:
    """Set optimizer.loraplus_lr_ratio, one for all that is trained, from the network's arguments or the page's keys."""
    paged = {name: draft.given[name] for name in LORAPLUS if draft.has(name)}
    source = paged | {name: given[name] for name in LORAPLUS if name in given}
    try:
        general, unet, text = (read_number(source[name]) if source.get(name) else 0.0 for name in LORAPLUS)
    except Unfit:
        return
    ratio, own = unet or general, text or general
    if not plain or not ratio or _finds_its_rate(draft):
        return
    keys = [name for name in source if name not in given] + pop_arguments(given, LORAPLUS)
    if own != ratio and (not draft.family or model_settings.can_train_text(draft.family)):
        note = Message(
            "the other trainer uses {ratio} for text encoders; this trainer has one ratio for all trained weights",
            ratio=f"{own or 1:g}",
        )
        draft.report_different(keys, {"optimizer.loraplus_lr_ratio": ratio}, note)
    else:
        draft.report_mapped(keys, {"optimizer.loraplus_lr_ratio": ratio})
    draft.report_unmatched(list(paged), NO_RATIO)


def _finds_its_rate(draft: Draft) -> bool:
    """Return True if the optimizer finds its own learning rate: Prodigy, or a similar one that ours lacks."""
    return any(
        word in common_values.normalize_name(draft.get("optimizer_type") or "")
        for word in optimizer_settings.FINDS_ITS_RATE
    )
