"""Stable Diffusion 1.x: a UNet of 0.86 B parameters, conditioned on CLIP ViT-L/14, trained to predict the noise.

Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models". Whether a fine-tune predicts
v is read from the scheduler's config. SD 2.x shares the pipeline class but not the network (`config_marks`); its family
is `sd2.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import _ldm, _published
from ._facts import TextEncoder
from ._files import Header
from .base import ModelFamily


class Family(ModelFamily):
    name = "sd15"
    title = "Stable Diffusion 1.5"
    example_base = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    pipeline_class = "StableDiffusionPipeline"
    denoiser_class = "UNet2DConditionModel"
    denoiser_name = "unet"
    text_widths = {"cross_attention_dim": "text_encoder.hidden_size"}
    text_millions = (123, 38)  # CLIP ViT-L/14
    text_parts = {"tokenizer": "CLIPTokenizer", "text_encoder": "CLIPTextModel"}
    long_captions = True
    skips_layers = True  # NovelAI's model, from which most anime models descend, was trained with clip skip 2
    trained_text = {"text_encoder": TextEncoder("lora_te_", "", width=768, hidden=3072, num_layers=12)}
    text_shapes = {"prompt_embeds": ("tokens", "cross_attention_dim")}
    noise_argument = "sample"
    objective = "Diffusion"
    adapter_targets = _ldm.ADAPTER_TARGETS  # 192 layers; proj_in and proj_out are 1x1 convolutions
    keep_precise = _ldm.KEEP_PRECISE
    bucket_multiple = 8
    native_resolution = 512  # unet/config.json: sample_size 64, of 8 pixels
    default_guidance = 7.5  # CompVis/stable-diffusion scripts/txt2img.py: --scale
    captions = "tags"  # sd-scripts and its tagger (WD14): its LoRAs are trained on tags
    modelspec_architecture = "stable-diffusion-v1"
    kohya_base_version = "sd_v1"
    kohya_naming = "diffusers_underscored"
    config_marks = {"in_channels": 4, "use_linear_projection": False}
    checkpoint_text = {"text_encoder": "cond_stage_model."}
    pipeline_options = {"requires_safety_checker": False}
    reference_config = {
        "sample_size": 64,
        "block_out_channels": [320, 640, 1280, 1280],
        "cross_attention_dim": 768,
        "attention_head_dim": 8,
    }
    # SD 2.x has linear projections around its attention, SDXL has nothing there at all; inpainting models have 9 input
    # channels.
    single_file = {
        "shapes": {
            "input_blocks.0.0.weight": (None, 4, None, None),
            "input_blocks.1.1.proj_in.weight": (None, None, None, None),
        },
        "lacks": ("label_emb.",),
    }
    published = {
        "scheduler": _published.SD15_SCHEDULER,
        "vae": _published.SD_VAE,
        "text_encoder": _published.CLIP_L,
        "index": {"requires_safety_checker": False},
    }
    tokenizers_from = {"tokenizer": (_published.SDXL_TOKENIZER,)}

    convert_checkpoint = _ldm.convert_checkpoint

    @classmethod
    def infer_denoiser_sizes(cls, native: Header, config: Mapping[str, Any], file: Path) -> dict[str, Any]:
        return _ldm.read_sizes(native, config)
