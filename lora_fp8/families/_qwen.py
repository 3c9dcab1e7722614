"""What Qwen-Image and its relatives share: the normalization of their VAE, and the call of their transformer.

`AutoencoderKLQwenImage` takes videos; an image is a video of one frame. Its latents are normalized per channel, with
numbers from its config.json, where other VAEs have one factor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import Cond, Inputs, ModelFamily, list_control_latents

if TYPE_CHECKING:
    from torch import Tensor, nn

VAE_MARKS: dict[str, Any] = {
    "latents_mean": [
        *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
        *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
    ],
    "latents_std": [
        *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
        *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160),
    ],
}
"""The released VAE's normalization; with another one, the denoisers would get latents they were not trained on."""


def make_inputs(
    family: ModelFamily, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float
) -> Inputs:
    """Return the arguments of Qwen-Image's transformer: see `ModelFamily.make_inputs`.

    The latents of control images follow the noise as tokens, each as a frame of its own.
    """
    import torch

    images = [noisy_BCHW, *list_control_latents(cond)]
    mask_BL = cond["prompt_embeds_mask"]
    return {
        "hidden_states": torch.cat([family.pack(latents_BCHW) for latents_BCHW in images], dim=1),
        "timestep": t_B,  # sigma in [0, 1]: the transformer multiplies by 1000 itself
        "encoder_hidden_states": cond["prompt_embeds"],
        "encoder_hidden_states_mask": None if mask_BL.all() else mask_BL,
        "img_shapes": [[(1, image.shape[-2] // 2, image.shape[-1] // 2) for image in images]] * len(t_B),
    }


SIZES = {
    "in_channels": "img_in.weight[1]",
    "num_layers": "transformer_blocks.#.img_mod.1.weight",
    "attention_head_dim": "transformer_blocks.0.attn.norm_q.weight[0]",
    "num_attention_heads": "img_in.weight[0] // attention_head_dim",
    "joint_attention_dim": "txt_in.weight[1]",
}
"""See the fact `sizes_from`."""
