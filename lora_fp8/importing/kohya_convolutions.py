"""kohya's and LyCORIS' adapters on the convolutions of a UNet (LoCon): which layers they are, and their rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import families
from ..errors import Message, Template
from . import adapter_settings
from .import_draft import Draft
from .kohya_blocks import BLOCKS, pop_arguments
from .readers import Unfit, is_off, read_number, read_whole

CONVOLUTIONS = ("conv1", "conv2", "downsamplers.0.conv", "upsamplers.0.conv")
"""Endings of the names of the 3 x 3 convolutions in ResNet blocks and samplers, which have the rank conv_dim."""
BESIDE_THEM = ("conv_shortcut", "time_emb_proj")
"""What else those blocks hold, 1 x 1 convolutions and linear layers: adapted too, with the rank network_dim."""
LYCORIS_CONVOLUTIONS = ("conv_in", "conv_out")
LYCORIS_BESIDE_THEM = ("time_embedding.linear_1", "time_embedding.linear_2")
"""What LyCORIS' preset "full", its default, adds at both ends of the UNet."""
ONE_SCALE = Template(
    "this trainer scales all layers by alpha / rank = {ours}; the other trainer uses {theirs} for these convolutions"
)
BY_DEFAULT = Message("LyCORIS trains convolutions by default")
KEYS = ("conv_dim", "conv_alpha")
PRESETS = ("preset", "LyCORIS_preset")
_LINEAR = ("attn", "ff", "proj_")
_FULL = (*_LINEAR, *CONVOLUTIONS, *LYCORIS_CONVOLUTIONS, *BESIDE_THEM, *LYCORIS_BESIDE_THEM)
UNET_PRESETS = {
    "full": _FULL,
    "unet-only": _FULL,
    "full-lin": (*_LINEAR, *BESIDE_THEM, *LYCORIS_BESIDE_THEM),
    "attn-mlp": _LINEAR,
    "unet-transformer-only": _LINEAR,
    "attn-only": ("attn",),
    "unet-convblock-only": (*CONVOLUTIONS, *BESIDE_THEM, *LYCORIS_CONVOLUTIONS),
}
"""Preset of LyCORIS -> beginnings of the targets that it adapts in a UNet (lycoris/config.py)."""
BLOCK_PRESETS = ("full", "full-lin", "attn-mlp", "unet-only", "unet-transformer-only")
"""Presets of LyCORIS that adapt every linear layer in the blocks of a transformer."""


def find_preset(draft: Draft, given: Mapping[str, Any]) -> str:
    """Return the preset of LyCORIS that the network's arguments or the page choose."""
    source = {key: draft.given[key] for key in PRESETS if draft.has(key)} | dict(given)
    return str(next((source[key] for key in PRESETS if source.get(key)), "full"))


def set_convolutions(draft: Draft, given: dict[str, str], lycoris: bool, paged: bool) -> None:
    """Set adapter.targets and adapter.ranks where the convolutions of a UNet are adapted, or by a preset of LyCORIS.

    Args:
        draft: the import; its adapter.type is set.
        given: the network's arguments; those that are converted are removed.
        lycoris: the network is LyCORIS', which adapts convolutions unless its preset leaves them out.
        paged: the keys of a settings page count, which stores them for every type of LoRA.
    """
    source = {key: draft.given[key] for key in (*KEYS, *PRESETS) if paged and draft.has(key)} | given
    own = draft.settings.get("adapter.type")
    preset = find_preset(draft, source) if lycoris else ""
    left_out = preset not in UNET_PRESETS if lycoris else is_off(source.get("conv_dim"))
    if left_out or draft.family not in BLOCKS or own == "oft":
        return
    if "adapter.ranks" in draft.settings:  # ranks of blocks do not cover blocks without attention
        return
    try:
        settings, note = _find_settings(draft, source, preset)
    except Unfit:
        return  # the caller reports these arguments by name
    used = [key for key in (*KEYS, *PRESETS) if key in source]
    if not used:
        draft.assume("adapter.targets", settings["adapter.targets"], "preset", BY_DEFAULT)
        return
    keys = [key for key in used if key not in given] + pop_arguments(given, used)
    (draft.report_different if note else draft.report_mapped)(keys, settings, note)


def _find_settings(draft: Draft, source: dict[str, Any], preset: str) -> tuple[dict[str, Any], str]:
    """Return our settings, and what differs. `preset`: that of LyCORIS; "" for sd-scripts' own LoCon."""
    rank, alpha = draft.get("network_dim", read_whole) or 4, draft.get("network_alpha", read_number) or 1.0
    # LyCORIS takes the linear layers' values where these are left out or 0; sd-scripts' conv_alpha is 1 then.
    conv_rank = read_whole(source.get("conv_dim") or 0) or rank
    conv_alpha = read_number(source.get("conv_alpha") or 0.0) or (alpha if preset else 1.0)
    beginnings = UNET_PRESETS.get(preset, (*_LINEAR, *CONVOLUTIONS, *BESIDE_THEM))
    every = (*families.get(draft.family).adapter_targets, *_FULL[len(_LINEAR) :])
    targets = [target for target in every if target.startswith(beginnings)]
    convolutions = [target for target in targets if target in CONVOLUTIONS + LYCORIS_CONVOLUTIONS]
    settings: dict[str, Any] = {"adapter.targets": targets}
    if convolutions and conv_rank != rank:
        is_lokr = draft.settings.get("adapter.type") == "lokr"
        own_rank = adapter_settings.choose_lokr_rank(conv_rank, False) if is_lokr else conv_rank
        settings["adapter.ranks"] = dict.fromkeys(convolutions, own_rank)
    ours, theirs = alpha / rank, conv_alpha / conv_rank
    is_same = not convolutions or abs(ours - theirs) < 1e-9
    return settings, "" if is_same else ONE_SCALE(ours=f"{ours:g}", theirs=f"{theirs:g}")
