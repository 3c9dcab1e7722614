"""What the UNet families share: the layout of the original (LDM, SGM) checkpoints, and the adapter targets."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ._files import Header, find_checkpoint_prefix, list_blocks, make_native_header
from .base import Conversion, ModelFamily

# All linears and projections inside the Transformer2DModels, as in kohya's sd-scripts.
ADAPTER_TARGETS = (
    *(f"{attn}.{proj}" for attn in ("attn1", "attn2") for proj in ("to_q", "to_k", "to_v", "to_out.0")),
    *("ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"),
)
KEEP_PRECISE = ("time_embedding", "time_emb_proj", "conv_in", "conv_out", "conv_norm_out")
PREFIX = "model.diffusion_model."


def convert_checkpoint(family: ModelFamily, header: Header) -> Conversion:
    """Return the names in diffusers -> names in the file, by diffusers' own converter.

    That converter only moves values between dicts, so it is given names as values and no tensor has to be in memory.
    """
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    prefix = find_checkpoint_prefix(header)
    names = {PREFIX + key: prefix + key for key in make_native_header(header)}
    moved = convert_ldm_unet_checkpoint(names, {"layers_per_block": 2, **family.read_denoiser_config()})
    return {new: (old, None) for new, old in moved.items()}


def read_sizes(native: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the UNet config's entries that an original checkpoint's tensors state.

    A head's width is in no tensor. With other widths than in `config`, heads are 64 wide, as in all models whose
    entry is a list; the entry of Stable Diffusion 1, a number of heads, stays.
    """
    downsamplers = list_blocks(native, "input_blocks.#.0.op.weight")
    blocks = list_blocks(native, "input_blocks.#.0.in_layers.2.weight")
    if not blocks:
        return {}
    levels = [[n for n in blocks if below < n < above] for below, above in pairwise([0, *downsamplers, len(native)])]
    attended = [[n for n in level if f"input_blocks.{n}.1.proj_in.weight" in native] for level in levels]
    channels = [native[f"input_blocks.{level[0]}.0.out_layers.3.weight"][0] for level in levels]
    cross = [bool(level) for level in attended]
    widths = {shape[1] for name, shape in native.items() if name.endswith("attn2.to_k.weight")}
    entries: dict[str, Any] = {
        "in_channels": native["input_blocks.0.0.weight"][1],
        "out_channels": native["out.2.weight"][0],
        "block_out_channels": channels,
        "layers_per_block": len(levels[0]),
        "down_block_types": ["CrossAttnDownBlock2D" if crosses else "DownBlock2D" for crosses in cross],
        "up_block_types": ["CrossAttnUpBlock2D" if crosses else "UpBlock2D" for crosses in reversed(cross)],
    }
    if len(widths) == 1:
        entries["cross_attention_dim"] = widths.pop()
    depths = [_count_transformer_blocks(native, level) for level in attended]
    if max(depths) > 1:  # levels without attention have the depth of published configs: 1
        entries["transformer_layers_per_block"] = [depth or 1 for depth in depths]
    if isinstance(config.get("attention_head_dim"), list | tuple) and list(config["block_out_channels"]) != channels:
        entries["attention_head_dim"] = [channel // 64 for channel in channels]
    if "label_emb.0.0.weight" in native:
        entries["projection_class_embeddings_input_dim"] = native["label_emb.0.0.weight"][1]
    return entries


def _count_transformer_blocks(native: Header, blocks: list[int]) -> int:
    name = f"input_blocks.{blocks[0]}.1.transformer_blocks.#.attn2.to_k.weight" if blocks else ""
    return len(list_blocks(native, name)) if name else 0
