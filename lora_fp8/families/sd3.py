"""Stable Diffusion 3 and 3.5: a 2 to 8 B joint transformer on two CLIPs and T5-XXL, trained with rectified flow.

Esser et al. 2024, "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis". Text and image have
separate weights and joint attention. 3.5 normalizes queries and keys, and the first 13 blocks of 3.5 medium have a
second attention for the image alone. The denoiser takes the timestep (0 .. 1000), not sigma; the VAE has 16 channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import Message
from ..lora_files import naming
from . import _files, _published
from ._facts import TextEncoder
from ._files import Header, list_blocks
from .base import Cond, ModelFamily


class Family(ModelFamily):
    name = "sd3"
    title = "Stable Diffusion 3"
    example_base = "stabilityai/stable-diffusion-3.5-medium"
    pipeline_class = "StableDiffusion3Pipeline"
    denoiser_class = "SD3Transformer2DModel"
    text_widths = {
        "joint_attention_dim": "text_encoder_3.d_model",
        "pooled_projection_dim": "text_encoder.projection_dim + text_encoder_2.projection_dim",
    }
    text_millions = (4762, 132)  # T5-XXL
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
    judge_length_by = ("tokenizer_3",)  # T5 reads the whole prompt, the CLIPs only its first 77 tokens
    prompt_tokens = 256  # trained with 77 and 256 (3.5's model cards)
    text_answers = ("prompt_embeds", "", "pooled_prompt_embeds")
    denoiser_reads = {"encoder_hidden_states": "prompt_embeds", "pooled_projections": "pooled_prompt_embeds"}
    timestep_unit = 1000  # the scheduler's num_train_timesteps
    text_options = {"prompt_2": None, "prompt_3": None}
    text_shapes = {
        "prompt_embeds": ("tokens + 77", "joint_attention_dim"),
        "pooled_prompt_embeds": ("pooled_projection_dim",),
    }
    adapter_targets = (
        *(f"{attn}.{proj}" for attn in ("attn", "attn2") for proj in ("to_q", "to_k", "to_v", "to_out.0")),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *(f"{ff}.net.{layer}" for ff in ("ff", "ff_context") for layer in ("0.proj", "2")),
    )
    keep_precise = ("^pos_embed", "context_embedder", "time_text_embed", "norm_out", "proj_out")
    modulation = ("norm1.linear", "norm1_context.linear")
    further_layers = {"blocks": modulation}
    bucket_multiple = 16
    patch = 2
    native_resolution = 1024  # transformer/config.json: sample_size 128, of 8 pixels
    default_guidance = 7.0  # StableDiffusion3Pipeline
    train_shift = 3.0  # Esser et al. 2024, sect. 5.3.2: trained and sampled with 3 at 1024 x 1024
    modelspec_architecture = "stable-diffusion-3-5-large"  # of the largest; `get_architecture_name` tells the others
    kohya_base_version = "sd3"
    kohya_naming = "native"
    kohya_module = "networks.lora_sd3"  # sd-scripts
    layouts = ("diffusers", "comfy", "kohya")
    split_names_in_comfy = True
    layouts_of_diffusers = ("diffusers",)
    # On the norms that end a stream, a LoRA would differ between the original naming and diffusers'. In the last block
    # nothing reads the text's output, so its queries have no effect.
    swapped_halves = ("transformer_blocks.-1.norm1_context.linear", "norm_out.linear")
    no_adapter = (*swapped_halves, "transformer_blocks.-1.attn.add_q_proj")
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
    native_layers = naming.parse_table("""
        joint_blocks.# = transformer_blocks.#
            x_block.attn = attn, x_block.attn2 = attn2
                qkv = to_q to_k to_v
                proj = to_out.0
                ln_q = norm_q
                ln_k = norm_k
            x_block.adaLN_modulation.1 = norm1.linear
            x_block.mlp = ff, context_block.mlp = ff_context
                fc1 = net.0.proj
                fc2 = net.2
            context_block.attn.qkv = attn.add_q_proj attn.add_k_proj attn.add_v_proj
            context_block.attn.proj = attn.to_add_out
            context_block.attn.ln_q = attn.norm_added_q
            context_block.attn.ln_k = attn.norm_added_k
            context_block.adaLN_modulation.1 = norm1_context.linear
        t_embedder.mlp = time_text_embed.timestep_embedder, y_embedder.mlp = time_text_embed.text_embedder
            0 = linear_1
            2 = linear_2
        context_embedder
        x_embedder.proj = pos_embed.proj
        pos_embed = pos_embed.pos_embed
        final_layer.linear = proj_out
        final_layer.adaLN_modulation.1 = norm_out.linear
    """)
    # A ControlNet has no final layer, and inpainting models take more channels than they return.
    single_file = {
        "has": ("joint_blocks.0.context_block.attn.qkv.weight",),
        "shapes": {"x_embedder.proj.weight": (None, None, None, None)},
        "in_is_out": ("x_embedder.proj.weight", "final_layer.linear.weight"),
    }
    # 3 medium, 3.5 medium and 3.5 large differ in these.
    sizes_from = {
        "num_layers": "joint_blocks.#.x_block.attn.qkv.weight",
        "num_attention_heads": "x_embedder.proj.weight[0] // attention_head_dim",
        "caption_projection_dim": "context_embedder.weight[0]",
        "joint_attention_dim": "context_embedder.weight[1]",
        "pooled_projection_dim": "y_embedder.mlp.0.weight[1]",
        "in_channels": "x_embedder.proj.weight[1]",
    }
    checkpoint_text = {
        "text_encoder": "text_encoders.clip_l.transformer.",
        "text_encoder_2": "text_encoders.clip_g.transformer.",
        "text_encoder_3": "text_encoders.t5xxl.transformer.",
    }
    published = {
        "scheduler": _published.SD3_SCHEDULER,
        "vae": _published.SD3_VAE,
        "text_encoder": _published.CLIP_L,
        "text_encoder_2": _published.CLIP_G,
        "text_encoder_3": _published.T5_XXL,
    }
    tokenizers_from = _published.SD3_TOKENIZERS
    file_names = {"vae": r"sd[-_. ]?3"}
    distilled_name = r"3\.?5[-_. ]?large[-_. ]?turbo"  # its files have the same tensors as 3.5 large
    distilled_advice = Message(
        "Stable Diffusion 3.5 large Turbo is distilled to 4 steps, and plain training undoes the distillation: "
        "train on 3.5 large and generate with Turbo, or train few steps at a low learning rate"
    )

    def get_architecture_name(self) -> str:
        """Return the architecture's ModelSpec name, which includes the size."""
        config = self.read_denoiser_config()
        if not config.get("qk_norm"):
            return "stable-diffusion-3-medium"
        return f"stable-diffusion-3-5-{'medium' if config.get('dual_attention_layers') else 'large'}"

    def encode_with(self, pipeline: Any, prompts: list[str], cond: Cond) -> Cond:
        import torch
        from torch import nn

        clips = [pipeline._get_clip_prompt_embeds(prompts, 1, self.device, None, index) for index in (0, 1)]
        embeds_BLD, pooled_BD = (torch.cat(embeds, dim=-1).to(self.dtype) for embeds in zip(*clips, strict=True))
        # The CLIPs' embeddings come first, padded to T5's width, and T5's follow.
        before_BLD = cond["prompt_embeds"].to(embeds_BLD.device)
        width, length = before_BLD.shape[-1], embeds_BLD.shape[1]
        embeds_BLD = nn.functional.pad(embeds_BLD, (0, width - embeds_BLD.shape[-1]))
        embeds_BLD = torch.cat([embeds_BLD, before_BLD[:, length:]], dim=1)
        return {**cond, "prompt_embeds": embeds_BLD, "pooled_prompt_embeds": pooled_BD}

    def choose_guidance(self) -> float:
        medium = self.read_denoiser_config().get("dual_attention_layers")  # 4.5: the example on its model card
        return 4.5 if medium and not self.is_distilled() else ModelFamily.choose_guidance(self)

    @classmethod
    def infer_denoiser_sizes(cls, native: Header, config: Mapping[str, Any], file: Path) -> dict[str, Any]:
        return _files.read_sizes(cls.sizes_from, native, config) | {
            "dual_attention_layers": list_blocks(native, "joint_blocks.#.x_block.attn2.qkv.weight"),
            "qk_norm": "rms_norm" if "joint_blocks.0.x_block.attn.ln_q.weight" in native else None,
            "pos_embed_max_size": round(native["pos_embed"][1] ** 0.5),
        }
