"""Stable Diffusion 1.x: a UNet of 0.86 B parameters, conditioned on CLIP ViT-L/14, trained to predict the noise.

Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models". Fine-tunes with v_prediction are
read from the scheduler's config. SD 2.x shares the pipeline class but not the network (`config_marks`); it is `sd2.py`.
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
    name = "sd15"
    title = "Stable Diffusion 1.5"
    example_base = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    pipeline_class = "StableDiffusionPipeline"
    denoiser_class = "UNet2DConditionModel"
    denoiser_name = "unet"
    text_parts = {"tokenizer": "CLIPTokenizer", "text_encoder": "CLIPTextModel"}
    trained_text = {"text_encoder": TextEncoder("lora_te_", "", width=768, hidden=3072, num_layers=12)}
    objective = Diffusion
    # Everything inside the Transformer2DModels, as kohya's sd-scripts choose it: 192 layers. proj_in and proj_out are
    # 1x1 convolutions here.
    adapter_targets = (
        *(f"{attn}.{proj}" for attn in ("attn1", "attn2") for proj in ("to_q", "to_k", "to_v", "to_out.0")),
        "ff.net.0.proj",
        "ff.net.2",
        "proj_in",
        "proj_out",
    )
    keep_precise = ("time_embedding", "time_emb_proj", "conv_in", "conv_out", "conv_norm_out")
    bucket_multiple = 8
    native_resolution = 512
    default_guidance = 7.5
    text_shapes = {"prompt_embeds": ("tokens", "cross_attention_dim")}
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
    # SD 2.x has linear projections around its attention, SDXL none at all there;
    # inpainting models have 9 input channels.
    single_file = {
        "shapes": {
            "input_blocks.0.0.weight": (None, 4, None, None),
            "input_blocks.1.1.proj_in.weight": (None, None, None, None),
        },
        "lacks": ("label_emb.",),
    }

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
            cross_attention_dim=32,
            attention_head_dim=2,
            norm_num_groups=16,
        )
        return StableDiffusionPipeline(
            vae=_miniature.vae(scaling_factor=0.18215),
            text_encoder=_miniature.clip_text(tokenizer),
            tokenizer=tokenizer,
            unet=unet,
            scheduler=DDIMScheduler(
                beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
            ),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
