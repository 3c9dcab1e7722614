"""kohya's networks block by block: ranks, alphas and rates of a UNet's blocks, and LoRA+."""

from __future__ import annotations

import math

from . import words
from .base import Draft, Unfit, number, whole
from .kohya_table import NO_RATIO

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
"""How many numbers block_dims has, and the places in it that have linear layers: the blocks with attention."""
PARTS = {"sd15": (12, 1), "sd2": (12, 1), "sdxl": (9, 3)}
"""How many numbers down_lr_weight and up_lr_weight have each, and mid_lr_weight; SDXL has one more at each end."""
RATES = ("down_lr_weight", "mid_lr_weight", "up_lr_weight", "block_lr_zero_threshold")


FLUX = {"flux": (19, 38), "chroma": (19, 38)}
"""How many double and single blocks there are, of the architectures whose networks take the blocks to train."""
CHOICES = ("train_blocks", "train_double_block_indices", "train_single_block_indices")


def set_choice(draft: Draft, given: dict[str, str], plain: bool) -> None:
    """adapter.ranks from the blocks of FLUX that are trained: of one kind, or by number. Arguments as `set_blocks`'."""
    source = {key: str(draft.given[key]) for key in CHOICES if draft.has(key)} | given
    said = {key: source[key].strip().lower() for key in CHOICES if key in source}
    paged = [key for key in said if key not in given]
    if all(value == "all" for value in said.values()):
        draft.none(paged, "all blocks are trained", off=True)
        for key in said:
            given.pop(key, None)
        return
    if not plain or draft.family not in FLUX:
        return
    rank = draft.get("network_dim", whole) or 4
    kinds = {"double": "^transformer_blocks", "single": "^single_transformer_blocks"}
    try:
        chosen = {
            kind: _numbers(said.get(f"train_{kind}_block_indices", "all"), total)
            if said.get("train_blocks", "all") in ("all", kind)
            else set()
            for kind, total in zip(kinds, FLUX[draft.family], strict=True)
        }
    except Unfit:
        return  # what they are is told by name
    if not any(chosen.values()):
        return
    entries = []
    for (kind, name), total in zip(kinds.items(), FLUX[draft.family], strict=True):
        others = set(range(total)) - chosen[kind]
        if len(chosen[kind]) < len(others):
            entries += [f"{name}.{i} = {rank}" for i in sorted(chosen[kind])] + [f"{name} = 0"]
        else:
            entries += [f"{name}.{i} = 0" for i in sorted(others)]
    keys = paged + (["network_args"] if any(given.pop(key, None) for key in said) else [])
    draft.mapped(keys, {"adapter.ranks": entries})


def _numbers(said: str, total: int) -> set[int]:
    """ "0,4-6" as numbers below total; "all" and "none" too."""
    if said in ("all", "none", ""):
        return set(range(total)) if said == "all" else set()
    found: set[int] = set()
    for part in said.split(","):
        first, dash, last = part.partition("-")
        found |= set(range(whole(first), whole(last if dash else first) + 1))
    if not found <= set(range(total)):
        raise Unfit("another number of blocks")
    return found


def set_blocks(draft: Draft, given: dict[str, str], plain: bool) -> None:
    """adapter.ranks and optimizer.lrs from ranks, alphas and rates of blocks.

    Args:
        given: the network's arguments; what is understood is taken out of them.
        plain: whether the network is one of those that heed them.
    """
    if draft.has("enable_block_weights") and not words.on(draft.given["enable_block_weights"]):
        draft.none([*RATES, "enable_block_weights"], "block weights are off", off=True)
    if not plain or draft.family not in BLOCKS:
        return
    source = {key: str(draft.given[key]) for key in ("block_dims", "block_alphas", *RATES) if draft.has(key)} | given
    used = [key for key in ("block_dims", "block_alphas", *RATES) if source.get(key)]
    try:
        weights = _weights(source, draft.family) if any(source.get(key) for key in RATES[:3]) else {}
        ranks, told = _ranks(draft, source, weights)
    except (Unfit, ValueError):
        return  # what they are is told by name
    rates = [f"{name} = {weight:.10g}" for name, weight in weights.items() if weight not in (0, 1)]
    if not used or rates and _finds_its_rate(draft):
        return
    keys = [key for key in used if key not in given]
    keys += ["network_args"] if any(given.pop(key, None) for key in used) else []
    ours = ({"adapter.ranks": ranks} if ranks else {}) | ({"optimizer.lrs": rates} if rates else {})
    (draft.differs if told else draft.mapped)(keys, ours, told)
    draft.mapped("enable_block_weights", {}, "on")


def _ranks(draft: Draft, source: dict[str, str], weights: dict[str, float]) -> tuple[list[str], str]:
    """Lines of adapter.ranks, and what differs. A block without a rate has no rank there."""
    number_of, blocks = BLOCKS[draft.family]
    rank, alpha = draft.get("network_dim", whole) or 4, draft.get("network_alpha", number) or 1.0
    dims = [whole(one) for one in source["block_dims"].split(",")] if source.get("block_dims") else [rank] * number_of
    alphas = [number(one) for one in source.get("block_alphas", "").split(",") if one.strip()]
    alphas = alphas or [alpha] * number_of
    if len(dims) != number_of or len(alphas) != number_of:
        raise Unfit("another number of blocks")
    used = {name: dims[place] if weights.get(name, 1.0) else 0 for place, name in blocks.items()}
    if not any(used.values()):
        raise Unfit("no block is trained")
    entries = [f"{name} = {dim}" for name, dim in used.items() if dim != rank]
    scales = {alphas[place] / dims[place] for place, name in blocks.items() if used[name]}
    if all(math.isclose(scale, alpha / rank) for scale in scales):
        return entries, ""
    if len(scales) == 1:  # of the blocks; text encoders are at network_dim
        draft.set("adapter.alpha", scales.pop() * rank)
        return entries, "text encoders are scaled as the blocks are"
    return entries, "alpha goes with the rank here: all layers are scaled by alpha / rank"


def _weights(source: dict[str, str], family: str) -> dict[str, float]:
    """The factor on the rate of each block with attention, as `get_block_lr_weight` of sd-scripts' networks/lora.py."""
    outer, inner = PARTS[family]
    threshold = number(source.get("block_lr_zero_threshold") or 0.0)

    def of(key: str, length: int) -> list[float]:
        said = source.get(key, "").strip()
        if not said:
            return [1.0] * length
        shape, _, lift = said.partition("+")
        if key != "mid_lr_weight" and "," not in said:
            steps = [i / (length - 1) for i in range(length)]
            rising = {
                "sine": [math.sin(math.pi * step / 2) for step in steps],
                "linear": steps,
                "zeros": [0.0] * length,
            }
            falling = {"cosine": rising["sine"][::-1], "reverse_linear": steps[::-1]}
            found = [one + number(lift or 0.0) for one in (rising | falling).get(shape.strip()) or ()]
            if not found:
                raise Unfit(f"{said!r} is no shape of rates")
        else:
            found = [number(one) if one.strip() else 0.0 for one in said.split(",")][:length]
            found += [1.0] * (length - len(found))
        return [one if one > threshold else 0.0 for one in found]

    every = [*of("down_lr_weight", outer), *of("mid_lr_weight", inner), *of("up_lr_weight", outer)]
    every = [1.0, *every, 1.0] if family == "sdxl" else every
    return {name: every[place] for place, name in BLOCKS[family][1].items()}


def set_loraplus(draft: Draft, given: dict[str, str], plain: bool) -> None:
    """optimizer.loraplus_lr_ratio, from the network's arguments or the page's keys; one for all that is trained."""
    names = ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio")
    source = {name: draft.given[name] for name in names if draft.has(name)} | {n: given[n] for n in names if n in given}
    try:
        general, unet, text = (number(source[name]) if source.get(name) else 0.0 for name in names)
    except Unfit:
        return
    ratio, own = unet or general, text or general
    if not plain or not ratio or _finds_its_rate(draft):
        return
    keys = [name for name in source if name not in given]
    keys += ["network_args"] if any(given.pop(name, None) for name in names) else []
    if own != ratio and draft.family in words.TRAINED_TEXT:
        told = f"{own or 1:g} for text encoders there; one ratio here for all that is trained"
        draft.differs(keys, {"optimizer.loraplus_lr_ratio": ratio}, told)
    else:
        draft.mapped(keys, {"optimizer.loraplus_lr_ratio": ratio})
    draft.none([name for name in names if draft.has(name)], NO_RATIO)


def _finds_its_rate(draft: Draft) -> bool:
    """Whether the optimizer has one rate for all: it is Prodigy, or one of its kind that is not here."""
    return any(word in words.plain(draft.get("optimizer_type") or "") for word in words.FINDS_ITS_RATE)
