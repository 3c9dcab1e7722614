"""Stable Diffusion 3 and 3.5: a 2 to 8 B joint transformer on two CLIPs and T5-XXL, trained with rectified flow.

Esser et al. 2024, "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis". Text and image have
weights of their own and one attention. 3.5 normalises queries and keys, and 3.5 medium attends a second time, to the
image alone, in its first 13 blocks. The denoiser takes the timestep (0 .. 1000), not sigma; the VAE has 16 channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lora_fp8 import naming

from . import _miniature
from ._files import Header
from .base import Cond, Inputs, ModelFamily, TextEncoder


class Family(ModelFamily):
    name = "sd3"
    title = "Stable Diffusion 3"
    example_base = "stabilityai/stable-diffusion-3.5-medium"
    pipeline_class = "StableDiffusion3Pipeline"
    denoiser_class = "SD3Transformer2DModel"
    text_parts = {
        "tokenizer": "CLIPTokenizer",
        "text_encoder": "CLIPTextModelWithProjection",
        "tokenizer_2": "CLIPTokenizer",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "tokenizer_3": "T5TokenizerFast",
        "text_encoder_3": "T5EncoderModel",
    }
    trained_text = {
        "text_encoder": TextEncoder("lora_te1_", "clip_l", width=768, hidden=3072, num_layers=12),
        "text_encoder_2": TextEncoder("lora_te2_", "clip_g", width=1280, hidden=5120, num_layers=32),
    }
    judge_length_by = ("tokenizer_3",)  # the CLIPs read the first 77 tokens of the same prompt, T5 all of it
    prompt_tokens = 256  # trained with 77 and 256 (3.5's model cards)
    text_answers = ("prompt_embeds", "", "pooled_prompt_embeds")
    text_options = {"prompt_2": None, "prompt_3": None}
    text_shapes = {
        "prompt_embeds": ("tokens+77", "joint_attention_dim"),
        "pooled_prompt_embeds": ("pooled_projection_dim",),
    }
    adapter_targets = (
        *(f"{attn}.{proj}" for attn in ("attn", "attn2") for proj in ("to_q", "to_k", "to_v", "to_out.0")),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *(f"{ff}.net.{layer}" for ff in ("ff", "ff_context") for layer in ("0.proj", "2")),
    )
    keep_precise = ("^pos_embed", "context_embedder", "time_text_embed", "norm_out", "proj_out")
    modulation = ("norm1.linear", "norm1_context.linear")
    bucket_multiple = 16
    patch = 2
    native_resolution = 1024
    default_guidance = 7.0
    kohya_base_version = "sd3"
    kohya_naming = "native"
    kohya_module = "networks.lora_sd3"
    layouts = ("diffusers", "comfy", "kohya")
    split_names_in_comfy = True
    layouts_of_diffusers = ("diffusers",)
    # 3.5 medium; the sizes of the others are read from their files.
    reference_config = {
        "sample_size": 128,
        "num_layers": 24,
        "num_attention_heads": 24,
        "attention_head_dim": 64,
        "caption_projection_dim": 1536,
        "pos_embed_max_size": 384,
        "dual_attention_layers": list(range(13)),
        "qk_norm": "rms_norm",
    }
    native_layers = naming.table("""
        joint_blocks.# = transformer_blocks.#
            x_block.attn = attn, x_block.attn2 = attn2
                qkv = to_q to_k to_v
                proj = to_out.0
                ln_q = norm_q
                ln_k = norm_k
            x_block.adaLN_modulation.1 = norm1.linear
            x_block.mlp.fc1 = ff.net.0.proj
            x_block.mlp.fc2 = ff.net.2
            context_block.attn.qkv = attn.add_q_proj attn.add_k_proj attn.add_v_proj
            context_block.attn.proj = attn.to_add_out
            context_block.attn.ln_q = attn.norm_added_q
            context_block.attn.ln_k = attn.norm_added_k
            context_block.adaLN_modulation.1 = norm1_context.linear
            context_block.mlp.fc1 = ff_context.net.0.proj
            context_block.mlp.fc2 = ff_context.net.2
        t_embedder.mlp.0 = time_text_embed.timestep_embedder.linear_1
        t_embedder.mlp.2 = time_text_embed.timestep_embedder.linear_2
        y_embedder.mlp.0 = time_text_embed.text_embedder.linear_1
        y_embedder.mlp.2 = time_text_embed.text_embedder.linear_2
        context_embedder
        x_embedder.proj = pos_embed.proj
        pos_embed = pos_embed.pos_embed
        final_layer.linear = proj_out
        final_layer.adaLN_modulation.1 = norm_out.linear
    """)
    # A ControlNet has no final layer, and inpainting models take more channels than they give.
    single_file = {
        "has": ("joint_blocks.0.context_block.attn.qkv.weight",),
        "shapes": {"x_embedder.proj.weight": (None, None, None, None)},
        "in_is_out": ("x_embedder.proj.weight", "final_layer.linear.weight"),
    }
    tiny_config = {
        "sample_size": 16,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 80,
        "caption_projection_dim": 32,
        "pooled_projection_dim": 80,
        "pos_embed_max_size": 32,
        "dual_attention_layers": (0,),
        "qk_norm": "rms_norm",
    }
    distilled_advice = (
        "Stable Diffusion 3.5 large Turbo is distilled to draw in 4 steps, which plain training undoes: train on "
        "3.5 large and draw with Turbo, or train few steps at a low rate"
    )

    @property
    def modelspec_architecture(self) -> str:
        """Each size has a name of its own."""
        config = self.denoiser_config()
        if not config.get("qk_norm"):
            return "stable-diffusion-3-medium"
        return f"stable-diffusion-3-5-{'medium' if config.get('dual_attention_layers') else 'large'}"

    def encode_with(self, pipeline: Any, prompts: list[str], cond: Cond) -> Cond:
        clips = [pipeline._get_clip_prompt_embeds(prompts, 1, self.device, None, index) for index in (0, 1)]
        embeds_BLD, pooled_BD = (torch.cat(each, dim=-1).to(self.dtype) for each in zip(*clips, strict=True))
        # What the CLIPs say comes first, padded to the width of T5, and T5's own words behind it.
        before_BLD = cond["prompt_embeds"].to(embeds_BLD.device)
        width, length = before_BLD.shape[-1], embeds_BLD.shape[1]
        embeds_BLD = nn.functional.pad(embeds_BLD, (0, width - embeds_BLD.shape[-1]))
        embeds_BLD = torch.cat([embeds_BLD, before_BLD[:, length:]], dim=1)
        return {**cond, "prompt_embeds": embeds_BLD, "pooled_prompt_embeds": pooled_BD}

    def inputs(self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        return {
            "hidden_states": noisy_BCHW,
            "timestep": t_B * 1000,  # sigma, as the scheduler's 1000 training steps count it
            "encoder_hidden_states": cond["prompt_embeds"],
            "pooled_projections": cond["pooled_prompt_embeds"],
        }

    def usual_guidance(self) -> float:
        medium = self.denoiser_config().get("dual_attention_layers")  # 4.5 is of its model card's example
        return 4.5 if medium and not self.is_distilled() else ModelFamily.usual_guidance(self)

    def is_distilled(self) -> bool:
        # Turbo has the files of 3.5 large, and nothing but their name tells.
        return self.is_called(r"3\.?5[-_. ]?large[-_. ]?turbo")

    @classmethod
    def without_adapter(cls, denoiser: nn.Module) -> set[str]:
        # Nothing follows the text in the last block: its queries are for nothing.
        last = len(denoiser.transformer_blocks) - 1
        return {f"transformer_blocks.{last}.attn.add_q_proj", *_swapped(last)}

    @classmethod
    def halves_swapped(cls, denoiser_config: Mapping[str, Any]) -> set[str]:
        return set(_swapped(denoiser_config.get("num_layers", cls.reference_config["num_layers"]) - 1))

    def sizes(self, native: Header, told: Mapping[str, Any]) -> dict[str, Any]:
        # What 3 medium, 3.5 medium and 3.5 large differ in.
        blocks = [key.split(".") for key in native if key.startswith("joint_blocks.")]
        width = native["x_embedder.proj.weight"][0]
        return {
            "num_layers": 1 + max(int(block[1]) for block in blocks),
            "num_attention_heads": width // told.get("attention_head_dim", 64),
            "caption_projection_dim": native["context_embedder.weight"][0],
            "dual_attention_layers": sorted({int(block[1]) for block in blocks if block[3] == "attn2"}),
            "qk_norm": "rms_norm" if "joint_blocks.0.x_block.attn.ln_q.weight" in native else None,
            "pos_embed_max_size": round(native["pos_embed"][1] ** 0.5),
        }

    @classmethod
    def tiny_parts(cls) -> dict[str, Any]:
        clip, t5 = _miniature.clip_tokenizer(), _miniature.t5_tokenizer()
        t5.model_max_length = 112  # more than the CLIPs read of a prompt, as in the model
        return {
            "scheduler": _miniature.flow_euler(shift=3.0),
            "vae": _miniature.vae(scaling_factor=1.5305, shift_factor=0.0609, quant_conv=False),
            "text_encoder": _miniature.clip_text(clip, width=32, projection=32),
            "tokenizer": clip,
            "text_encoder_2": _miniature.clip_text(clip, width=48, projection=48),
            "tokenizer_2": clip,
            "text_encoder_3": _miniature.t5_text(t5, width=80),
            "tokenizer_3": t5,
        }


def _swapped(last: int) -> tuple[str, str]:
    """The norms that end a stream: the original's give (shift, scale), those of diffusers (scale, shift).

    A LoRA of one is therefore no LoRA of the other, and they get no adapter.
    """
    return f"transformer_blocks.{last}.norm1_context.linear", "norm_out.linear"
