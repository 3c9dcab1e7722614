"""What FLUX.2 dev and klein have in common: latents, the call of the transformer, and the layout of the original files.

The VAE's latents are cut into patches of 2 x 2, which become channels, and normalised with the running statistics of a
batch norm that the VAE keeps for it. The blocks' timestep modulation is shared: three linears serve all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKLFlux2, Flux2Pipeline
from torch import Tensor, nn

from ._files import Header, native_header
from .base import Conversion

ADAPTER_TARGETS = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
    *(f"{ff}.{layer}" for ff in ("ff", "ff_context") for layer in ("linear_in", "linear_out")),
    *("attn.to_qkv_mlp_proj", "attn.to_out"),  # of the single-stream blocks
)
KEEP_PRECISE = ("x_embedder", "context_embedder", "time_guidance_embed", "norm_out", "^proj_out")
LAST_NORM = "norm_out.linear"
MODULATION = ("double_stream_modulation_img", "double_stream_modulation_txt", "single_stream_modulation")

LAYERS = (
    ("img_in", "x_embedder"),
    ("txt_in", "context_embedder"),
    *(
        (f"{name}_in.{side}_layer", f"time_guidance_embed.{ours}_embedder.linear_{i}")
        for name, ours in (("time", "timestep"), ("guidance", "guidance"))
        for i, side in ((1, "in"), (2, "out"))
    ),
    *((f"{name}.lin", f"{name}.linear") for name in MODULATION),
    ("final_layer.linear", "proj_out"),
    ("final_layer.adaLN_modulation.1", LAST_NORM),  # with its halves swapped: see `with_last_norm`
    *(
        (f"double_blocks.#.{stream}_attn.norm.{part}_norm.scale", f"transformer_blocks.#.attn.norm_{added}{x}.weight")
        for stream, added in (("img", ""), ("txt", "added_"))
        for part, x in (("query", "q"), ("key", "k"))
    ),
    *(
        (f"double_blocks.#.{stream}_attn.qkv", " ".join(f"transformer_blocks.#.attn.{x}" for x in qkv))
        for stream, qkv in (("img", ("to_q", "to_k", "to_v")), ("txt", ("add_q_proj", "add_k_proj", "add_v_proj")))
    ),
    ("double_blocks.#.img_attn.proj", "transformer_blocks.#.attn.to_out.0"),
    ("double_blocks.#.txt_attn.proj", "transformer_blocks.#.attn.to_add_out"),
    *(
        (f"double_blocks.#.{stream}_mlp.{i}", f"transformer_blocks.#.{ff}.linear_{side}")
        for stream, ff in (("img", "ff"), ("txt", "ff_context"))
        for i, side in ((0, "in"), (2, "out"))
    ),
    *(
        (f"single_blocks.#.norm.{part}_norm.scale", f"single_transformer_blocks.#.attn.norm_{x}.weight")
        for part, x in (("query", "q"), ("key", "k"))
    ),
    ("single_blocks.#.linear1", "single_transformer_blocks.#.attn.to_qkv_mlp_proj"),
    ("single_blocks.#.linear2", "single_transformer_blocks.#.attn.to_out"),
)


def sizes(header: Header, head_dim: int) -> dict[str, int]:
    """The entries of config.json in which the released models differ, as a single file has them."""
    native = native_header(header)
    width, joint = native["txt_in.weight"]
    single, double = (
        len({key.split(".")[1] for key in native if key.startswith(f"{kind}_blocks.")}) for kind in ("single", "double")
    )
    return {
        "num_layers": double,
        "num_single_layers": single,
        "num_attention_heads": width // head_dim,
        "joint_attention_dim": joint,
    }


def with_last_norm(found: Conversion) -> Conversion:
    """Of the last norm's modulation the original gives (shift, scale); diffusers' layer expects (scale, shift)."""
    return {name: (key, _halves_swapped if name.startswith(LAST_NORM) else rows) for name, (key, rows) in found.items()}


def _halves_swapped(tensor: Tensor) -> Tensor:
    shift, scale = tensor.chunk(2)
    return torch.cat([scale, shift])


@torch.no_grad()
def encode(
    vae: nn.Module,
    pixels_BCHW: Tensor,
    eps: float,
    patches: Callable[[Tensor], Tensor] = Flux2Pipeline._patchify_latents,
) -> Tensor:
    """Pixels in [-1, 1] -> normalised patches as channels: the mode of the posterior. `eps`: of the batch norm."""
    latents_BCHW = patches(vae.encode(pixels_BCHW).latent_dist.mode())
    mean_1C11, std_1C11 = _statistics(vae, eps)
    return (latents_BCHW - mean_1C11) / std_1C11


@torch.no_grad()
def decode(
    vae: nn.Module,
    latents_BCHW: Tensor,
    eps: float,
    whole: Callable[[Tensor], Tensor] = Flux2Pipeline._unpatchify_latents,
) -> Tensor:
    """The inverse of `encode`: normalised patches -> pixels in about [-1, 1]."""
    mean_1C11, std_1C11 = _statistics(vae, eps)
    return vae.decode(whole(latents_BCHW * std_1C11 + mean_1C11), return_dict=False)[0]


def _statistics(vae: nn.Module, eps: float) -> tuple[Tensor, Tensor]:
    mean_1C11, var_1C11 = (x.view(1, -1, 1, 1) for x in (vae.bn.running_mean, vae.bn.running_var))
    return mean_1C11, torch.sqrt(var_1C11 + eps)


def unpack(packed_BSC: Tensor, latent_hw: tuple[int, int]) -> Tensor:
    """The inverse of the pipeline's `_pack_latents`."""
    return packed_BSC.transpose(1, 2).unflatten(2, latent_hw)


def answer(
    denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, embeds_BLD: Tensor, guidance_B: Tensor | None
) -> Tensor:
    """One call of the transformer as in the pipelines' loop. -> BCHW"""
    device = noisy_BCHW.device
    pred_BSC = denoiser(
        hidden_states=Flux2Pipeline._pack_latents(noisy_BCHW),
        timestep=t_B.to(device),  # sigma in [0, 1]: the transformer multiplies by 1000 itself
        guidance=guidance_B,
        encoder_hidden_states=embeds_BLD,
        txt_ids=Flux2Pipeline._prepare_text_ids(embeds_BLD).to(device),
        img_ids=Flux2Pipeline._prepare_latent_ids(noisy_BCHW).to(device),
        return_dict=False,
    )[0]
    return unpack(pred_BSC, (noisy_BCHW.shape[2], noisy_BCHW.shape[3]))


# -- miniatures -------------------------------------------------------------------------------------------------------
TINY: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 3 * 16,  # three layers' hidden states side by side
    "timestep_guidance_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}


def vae() -> AutoencoderKLFlux2:
    """A VAE that halves the image sides, with statistics of its latents that are not those of a new batch norm."""
    made = AutoencoderKLFlux2(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=32,
    )
    made.bn.running_mean.normal_()
    made.bn.running_var.uniform_(0.3, 3.0)
    made.bn.running_var[0] = 0.001  # so small that the epsilon shows
    return made
