"""Stable Diffusion XL: a UNet of 2.6 B parameters, conditioned on two CLIPs and on the sizes of the training image.

Podell et al. 2023, "SDXL: Improving Latent Diffusion Models for High-Resolution Image Synthesis". Three things differ
from SD 1.5. The text embeddings of CLIP ViT-L and OpenCLIP ViT-bigG are concatenated. The second encoder's pooled
embedding is added to the timestep's. So are six numbers of each image: its original height and width, the top and left
of its crop, and the height and width of the crop it was trained at (sect. 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import _ldm, _published
from ._facts import TextEncoder
from ._files import Header
from .base import Cond, ModelFamily


class Family(ModelFamily):
    name = "sdxl"
    title = "Stable Diffusion XL"
    example_base = "stabilityai/stable-diffusion-xl-base-1.0"
    pipeline_class = "StableDiffusionXLPipeline"
    denoiser_class = "UNet2DConditionModel"
    denoiser_name = "unet"
    text_widths = {
        "cross_attention_dim": "text_encoder.hidden_size + text_encoder_2.hidden_size",
        "projection_class_embeddings_input_dim": "text_encoder_2.projection_dim + 6 * unet.addition_time_embed_dim",
    }
    text_millions = (695, 63)  # OpenCLIP ViT-bigG/14
    text_parts = {
        "tokenizer": "CLIPTokenizer",
        "text_encoder": "CLIPTextModel",
        "tokenizer_2": "CLIPTokenizer",
        "text_encoder_2": "CLIPTextModelWithProjection",
    }
    long_captions = True
    # The prompt embeddings are taken before the last layer. The second encoder's pooled embedding comes after it, but
    # nothing reads the first encoder's last layer. Kohya's files contain that layer too, untrained.
    trained_text = {
        "text_encoder": TextEncoder("lora_te1_", "", width=768, hidden=3072, num_layers=12, unread=1),
        "text_encoder_2": TextEncoder("lora_te2_", "", width=1280, hidden=5120, num_layers=32),
    }
    judge_length_by = ("tokenizer", "tokenizer_2")
    text_answers = ("prompt_embeds", "", "text_embeds")
    text_arguments = {"text_embeds": "pooled_prompt_embeds"}
    text_shapes = {  # the embedded sizes and the pooled text embedding are concatenated into one input
        "prompt_embeds": ("tokens", "cross_attention_dim"),
        "text_embeds": ("projection_class_embeddings_input_dim - 6 * addition_time_embed_dim",),
    }
    size_cond = "time_ids"
    exact_cond = ("time_ids",)  # bf16 would round 667 pixels to 668
    noise_argument = "sample"
    denoiser_reads = {"encoder_hidden_states": "prompt_embeds", "added_cond_kwargs": ("text_embeds", "time_ids")}
    objective = "Diffusion"
    adapter_targets = _ldm.ADAPTER_TARGETS  # 722 layers; proj_in and proj_out are linear
    keep_precise = (*_ldm.KEEP_PRECISE, "add_embedding")
    bucket_multiple = 8
    native_resolution = 1024  # unet/config.json: sample_size 128, of 8 pixels
    default_guidance = 7.0  # sd-scripts sdxl_minimal_inference.py; the pipeline has 5
    captions = "tags"  # Illustrious, NoobAI and Pony, which most people train on, know booru tags
    modelspec_architecture = "stable-diffusion-xl-v1-base"
    kohya_base_version = "sdxl_base_v1-0"
    kohya_naming = "sgm_unet"
    config_marks = {"in_channels": 4, "addition_embed_type": "text_time"}
    checkpoint_text = {"text_encoder": "conditioner.embedders.0.", "text_encoder_2": "conditioner.embedders.1."}
    pipeline_options = {"add_watermarker": False}
    reference_config = {
        "sample_size": 128,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "block_out_channels": [320, 640, 1280],
        "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20],
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    }
    # The refiner has a label embedding too, but four levels (input blocks 0 .. 11) instead of three (0 .. 8).
    single_file = {
        "has": ("label_emb.0.0.weight",),
        "shapes": {"input_blocks.0.0.weight": (None, 4, None, None)},
        "lacks": ("input_blocks.9.",),
    }
    published = {
        "scheduler": _published.SDXL_SCHEDULER,
        "vae": _published.SDXL_VAE,
        "text_encoder": _published.CLIP_L,
        "text_encoder_2": _published.CLIP_G,
        "index": {"force_zeros_for_empty_prompt": True},
    }

    def make_default_negative(self, empty: Cond) -> Cond | None:
        # SDXL was trained with zeros for a dropped caption; the pipeline creates them if it gets no negative prompt.
        return None if self.read_index().get("force_zeros_for_empty_prompt", True) else empty

    convert_checkpoint = _ldm.convert_checkpoint

    @classmethod
    def infer_denoiser_sizes(cls, native: Header, config: Mapping[str, Any], file: Path) -> dict[str, Any]:
        return _ldm.read_sizes(native, config)
