"""kohya's and LyCORIS' adapters on the convolutions of a UNet (LoCon): which layers they are, and their rank."""

from __future__ import annotations

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


def set_convolutions(draft: Draft, given: dict[str, str], lycoris: bool, paged: bool) -> None:
    """Set adapter.targets and adapter.ranks where the convolutions of a UNet are adapted.

    Args:
        draft: the import; its adapter.type is set.
        given: the network's arguments; those that are converted are removed.
        lycoris: the network is LyCORIS', which adapts convolutions unless its preset leaves them out.
        paged: the keys of a settings page count, which stores them for every type of LoRA.
    """
    source = {key: draft.given[key] for key in (*KEYS, *PRESETS) if paged and draft.has(key)} | given
    own = draft.settings.get("adapter.type")
    preset = str(next((source[key] for key in PRESETS if source.get(key)), "full"))
    left_out = preset != "full" if lycoris else is_off(source.get("conv_dim"))
    if left_out or draft.family not in BLOCKS or own == "oft":
        return
    if "adapter.ranks" in draft.settings:  # ranks of blocks do not cover blocks without attention
        return
    try:
        settings, note = _find_settings(draft, source, lycoris)
    except Unfit:
        return  # the caller reports these arguments by name
    used = [key for key in (*KEYS, *PRESETS) if key in source]
    if not used:
        draft.assume("adapter.targets", settings["adapter.targets"], "preset", BY_DEFAULT)
        return
    keys = [key for key in used if key not in given] + pop_arguments(given, used)
    (draft.report_different if note else draft.report_mapped)(keys, settings, note)


def _find_settings(draft: Draft, source: dict[str, Any], lycoris: bool) -> tuple[dict[str, Any], str]:
    """Return our settings, and what differs."""
    rank, alpha = draft.get("network_dim", read_whole) or 4, draft.get("network_alpha", read_number) or 1.0
    # LyCORIS takes the linear layers' values where these are left out or 0; sd-scripts' conv_alpha is 1 then.
    conv_rank = read_whole(source.get("conv_dim") or 0) or rank
    conv_alpha = read_number(source.get("conv_alpha") or 0.0) or (alpha if lycoris else 1.0)
    convolutions = CONVOLUTIONS + (LYCORIS_CONVOLUTIONS if lycoris else ())
    others = BESIDE_THEM + (LYCORIS_BESIDE_THEM if lycoris else ())
    targets = [*families.get(draft.family).adapter_targets, *convolutions, *others]
    settings: dict[str, Any] = {"adapter.targets": targets}
    if conv_rank != rank:
        is_lokr = draft.settings.get("adapter.type") == "lokr"
        own_rank = adapter_settings.choose_lokr_rank(conv_rank, False) if is_lokr else conv_rank
        settings["adapter.ranks"] = dict.fromkeys(convolutions, own_rank)
    ours, theirs = alpha / rank, conv_alpha / conv_rank
    return settings, "" if abs(ours - theirs) < 1e-9 else ONE_SCALE(ours=f"{ours:g}", theirs=f"{theirs:g}")
