"""What FLUX.1 and Chroma1, which derives from it, share: adapter targets, and their blocks' names in both namings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lora_files import naming

if TYPE_CHECKING:
    from torch import Tensor

    from .base import Cond, Inputs, ModelFamily

ADAPTER_TARGETS = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    *(f"{ff}.net.{layer}" for ff in ("ff", "ff_context") for layer in ("0.proj", "2")),
    *("proj_mlp", "proj_out"),  # in the single-stream blocks
)
MODULATION = ("norm1.linear", "norm1_context.linear", "norm.linear")
LAST_LAYER = "^proj_out"
"""The output projection, excluded because layers in the single-stream blocks end with the same name."""

LAYERS = naming.parse_table("""
    double_blocks.# = transformer_blocks.#
        img_attn.qkv = attn.to_q attn.to_k attn.to_v
        img_attn.proj = attn.to_out.0
        img_attn.norm.query_norm.scale = attn.norm_q.weight
        img_attn.norm.key_norm.scale = attn.norm_k.weight
        img_mlp.0 = ff.net.0.proj
        img_mlp.2 = ff.net.2
        txt_attn.qkv = attn.add_q_proj attn.add_k_proj attn.add_v_proj
        txt_attn.proj = attn.to_add_out
        txt_attn.norm.query_norm.scale = attn.norm_added_q.weight
        txt_attn.norm.key_norm.scale = attn.norm_added_k.weight
        txt_mlp.0 = ff_context.net.0.proj
        txt_mlp.2 = ff_context.net.2
    single_blocks.# = single_transformer_blocks.#
        linear1 = attn.to_q attn.to_k attn.to_v proj_mlp
        linear2 = proj_out
        norm.query_norm.scale = attn.norm_q.weight
        norm.key_norm.scale = attn.norm_k.weight
    txt_in = context_embedder
    img_in = x_embedder
    final_layer.linear = proj_out
""")


def make_positions(latents_BCHW: Tensor, embeds_BLD: Tensor) -> dict[str, Tensor]:
    """Return position ids: the origin for all text tokens, (0, row, column) for 2 x 2 patches of latents."""
    import torch
    from diffusers import FluxPipeline

    (num, _, height, width), device = latents_BCHW.shape, latents_BCHW.device
    return {
        "txt_ids": torch.zeros(embeds_BLD.shape[1], 3, device=device),
        "img_ids": FluxPipeline._prepare_latent_image_ids(num, height // 2, width // 2, device, torch.float32),
    }


def make_inputs(
    family: ModelFamily, denoiser: Any, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float
) -> Inputs:
    """Return the arguments of FLUX.1's transformer: see `ModelFamily.make_inputs`."""
    import torch

    guidance_B = torch.full(t_B.shape, guidance, device=t_B.device)
    return {
        "hidden_states": family.pack(noisy_BCHW),
        "timestep": t_B,  # sigma in [0, 1]: the transformer multiplies by 1000 itself
        "guidance": guidance_B if denoiser.config.guidance_embeds else None,
        "pooled_projections": cond["pooled_prompt_embeds"],
        "encoder_hidden_states": cond["prompt_embeds"],
        **make_positions(noisy_BCHW, cond["prompt_embeds"]),
    }


SIZES = {
    "in_channels": "img_in.weight[1]",
    "num_layers": "double_blocks.#.img_attn.qkv.weight",
    "num_single_layers": "single_blocks.#.linear1.weight",
    "attention_head_dim": "double_blocks.0.img_attn.norm.query_norm.scale[0]",
    "num_attention_heads": "img_in.weight[0] // attention_head_dim",
    "joint_attention_dim": "txt_in.weight[1]",
}
"""See the fact `sizes_from`."""
