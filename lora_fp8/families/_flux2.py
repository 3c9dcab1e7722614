"""What FLUX.2 dev and klein share: latents, the transformer's inputs, and the layout of the original files.

All blocks share the timestep modulation: three linears serve them all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..lora_files import naming
from .base import Cond, Inputs, ModelFamily

if TYPE_CHECKING:
    from torch import Tensor

ADAPTER_TARGETS = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    *(f"{ff}.{layer}" for ff in ("ff", "ff_context") for layer in ("linear_in", "linear_out")),
    *("attn.to_qkv_mlp_proj", "attn.to_out"),  # in the single-stream blocks
)
KEEP_PRECISE = ("x_embedder", "context_embedder", "time_guidance_embed", "norm_out", "^proj_out")
LAST_NORM = "norm_out.linear"
OTHER_VAES = {"Ideogram 4": (0.0198, 0.1015, 0.2969, 0.2719)}
"""Models whose VAE has the same files but other batch norm statistics -> the first running means."""
MODULATION = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")

LAYERS = naming.parse_table("""
    img_in = x_embedder
    txt_in = context_embedder
    time_in.in_layer = time_guidance_embed.timestep_embedder.linear_1
    time_in.out_layer = time_guidance_embed.timestep_embedder.linear_2
    guidance_in.in_layer = time_guidance_embed.guidance_embedder.linear_1
    guidance_in.out_layer = time_guidance_embed.guidance_embedder.linear_2
    double_stream_modulation_img.lin = double_stream_modulation_img.linear
    double_stream_modulation_txt.lin = double_stream_modulation_txt.linear
    single_stream_modulation.lin = single_stream_modulation.linear
    double_blocks.# = transformer_blocks.#
        img_attn.qkv = attn.to_q attn.to_k attn.to_v
        img_attn.proj = attn.to_out.0
        img_attn.norm.query_norm.scale = attn.norm_q.weight
        img_attn.norm.key_norm.scale = attn.norm_k.weight
        img_mlp.0 = ff.linear_in
        img_mlp.2 = ff.linear_out
        txt_attn.qkv = attn.add_q_proj attn.add_k_proj attn.add_v_proj
        txt_attn.proj = attn.to_add_out
        txt_attn.norm.query_norm.scale = attn.norm_added_q.weight
        txt_attn.norm.key_norm.scale = attn.norm_added_k.weight
        txt_mlp.0 = ff_context.linear_in
        txt_mlp.2 = ff_context.linear_out
    single_blocks.# = single_transformer_blocks.#
        linear1 = attn.to_qkv_mlp_proj
        linear2 = attn.to_out
        norm.query_norm.scale = attn.norm_q.weight
        norm.key_norm.scale = attn.norm_k.weight
    final_layer.linear = proj_out
    final_layer.adaLN_modulation.1 = norm_out.linear
""")


SIZES = {
    "in_channels": "img_in.weight[1]",
    "num_layers": "double_blocks.#.img_attn.qkv.weight",
    "num_single_layers": "single_blocks.#.linear1.weight",
    "attention_head_dim": "double_blocks.0.img_attn.norm.query_norm.scale[0]",
    "num_attention_heads": "txt_in.weight[0] // attention_head_dim",
    "joint_attention_dim": "txt_in.weight[1]",
}
"""See the fact `sizes_from`; 4B and 9B of klein, and dev, differ in nothing else."""


def make_inputs(
    family: ModelFamily, denoiser: Any, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float
) -> Inputs:
    """Return the denoiser's arguments as in the pipelines' loops: see `ModelFamily.make_inputs`."""
    import torch
    from diffusers import Flux2Pipeline

    takes_guidance, embeds_BLD = denoiser.config.guidance_embeds, cond["prompt_embeds"]
    return {
        "hidden_states": family.pack(noisy_BCHW),
        "timestep": t_B,  # sigma in [0, 1]: the transformer multiplies by 1000 itself
        "guidance": torch.full(t_B.shape, guidance, device=t_B.device) if takes_guidance else None,
        "encoder_hidden_states": embeds_BLD,
        "txt_ids": Flux2Pipeline._prepare_text_ids(embeds_BLD).to(t_B.device),
        "img_ids": Flux2Pipeline._prepare_latent_ids(noisy_BCHW).to(t_B.device),
    }
