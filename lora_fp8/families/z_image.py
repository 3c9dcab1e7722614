"""Z-Image: a 6 B single-stream DiT, conditioned on Qwen3 4B, trained with rectified flow.

Tongyi-MAI 2025, "Z-Image: An Efficient Image Generation Foundation Model with Single-Stream Diffusion Transformer".
Time runs backwards, from 0 (noise) to 1 (image), and the velocity points to the image; this module reverses both.
Image and text are padded to multiples of 32 with learned tokens; the transformer takes lists, and pads and masks them
itself. Z-Image-Turbo is this model, distilled to 8 steps without guidance; only its scheduler, or the name of a single
file, tells the two apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import Message
from ..lora_files import naming
from . import _published
from .base import Cond, Inputs, ModelFamily

if TYPE_CHECKING:
    from torch import Tensor, nn


class Family(ModelFamily):
    name = "z_image"
    title = "Z-Image"
    example_base = "Tongyi-MAI/Z-Image"
    pipeline_class = "ZImagePipeline"
    denoiser_class = "ZImageTransformer2DModel"
    text_widths = {"cap_feat_dim": "text_encoder.hidden_size"}
    text_millions = (4022, 389)  # Qwen3-4B
    text_parts = {"tokenizer": "Qwen2Tokenizer", "text_encoder": "Qwen3Model"}
    chat = ({"role": "user", "content": "\0"},)
    prompt_tokens = 512  # with the template's; ZImagePipeline
    text_shapes = {"prompt_embeds": ("tokens", "cap_feat_dim")}
    prompts_vary = True
    towards_image = True
    adapter_targets = (
        *(f"attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"feed_forward.{layer}" for layer in ("w1", "w2", "w3")),
    )
    adapter_exclude = ("noise_refiner", "context_refiner")  # two blocks each, before image and text are joined
    keep_precise = ("all_x_embedder", "cap_embedder", "t_embedder", "all_final_layer")
    modulation = ("adaLN_modulation",)
    further_layers = {
        "blocks": ("adaLN_modulation.0",),
        "refiners": (
            *naming.list_names("^{}_refiner.{}.{}", ("noise", "context"), "01", adapter_targets),
            *naming.list_names("^noise_refiner.{}.adaLN_modulation.0", "01"),
        ),
    }
    bucket_multiple = 16
    patch = 2
    native_resolution = 1024
    default_guidance = 5.0  # ZImagePipeline
    train_shift = 1.0  # OneTrainer (timestep_shift 1), diffusion-pipe; the scheduler's 6 would leave 4 % below 0.5
    plain_guidance = 0.0
    modelspec_architecture = "Z-Image"
    kohya_base_version = "z_image"
    kohya_naming = "native"
    kohya_module = "networks.lora_zimage"  # musubi-tuner
    # ComfyUI reads diffusers' names too. In the original names q, k and v are one layer, which diffusers does not split
    # when it loads a LoRA.
    layouts = ("diffusers", "comfy", "kohya")
    lokr_of_diffusers = True
    layouts_of_diffusers = ("diffusers", "kohya")
    native_layers = naming.parse_table("""
        layers.#, noise_refiner.#, context_refiner.#
            attention.qkv = attention.to_q attention.to_k attention.to_v
            attention.out = attention.to_out.0
            attention.q_norm = attention.norm_q
            attention.k_norm = attention.norm_k
        layers.#, noise_refiner.#, context_refiner.#
        x_embedder = all_x_embedder.2-1
        final_layer = all_final_layer.2-1
        t_embedder, cap_embedder, x_pad_token, cap_pad_token
    """)
    beside_denoiser = ("norm_final",)  # from an older version of the code, which nothing reads
    config_marks = {"siglip_feat_dim": None}  # Omni sees images
    reference_config = {"in_channels": 16, "dim": 3840, "n_layers": 30, "n_heads": 30, "cap_feat_dim": 2560}
    sizes_from = {
        "dim": "cap_embedder.1.weight[0]",
        "cap_feat_dim": "cap_embedder.1.weight[1]",
        "n_layers": "layers.#.attention.qkv.weight",
        "n_refiner_layers": "noise_refiner.#.attention.qkv.weight",
    }
    file_names = _published.FLUX_FILES
    # Lumina 2 has neither learned padding nor a modulation whose first layer is a linear; Omni sees images.
    single_file = {
        "has": ("x_pad_token", "cap_pad_token", "layers.0.attention.qkv.weight", "layers.0.adaLN_modulation.0.weight"),
        "lacks": ("siglip_embedder.1.weight",),
    }
    distilled_mark = ("scheduler", "shift", 3.0)  # Z-Image's is 6
    training_adapter = "https://huggingface.co/ostris/zimage_turbo_training_adapter"
    distilled_advice = Message(
        "the file's name, or the scheduler's shift of 3, suggests Z-Image-Turbo: plain training undoes the "
        "distillation, and images of 8 steps become soft; train on Z-Image or a de-distilled copy and generate with "
        "Turbo, or train few steps at a low learning rate"
    )

    def make_inputs(self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        pairs = zip(cond["prompt_embeds"], cond["prompt_embeds_mask"], strict=True)
        return {
            "x": list(noisy_BCHW[:, :, None].unbind()),
            "t": 1 - t_B,
            "cap_feats": [embeds_LD[mask_L] for embeds_LD, mask_L in pairs],
        }

    def convert_output(self, denoiser: nn.Module, output: Any, noisy_BCHW: Tensor) -> Tensor:
        import torch

        return torch.stack(output)[:, :, 0]
