"""Stable Diffusion XL: a UNet of 2.6 B parameters, conditioned on two CLIPs and on the sizes of the training image.

Podell et al. 2023, "SDXL: Improving Latent Diffusion Models for High-Resolution Image Synthesis". Three things differ
from SD 1.5: the text embeddings of CLIP ViT-L and OpenCLIP ViT-bigG stand side by side, the pooled embedding of the
second enters beside the timestep, and so do six numbers of each image: its original height and width, the top and left
of its crop, and the height and width it was trained at (sect. 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor, nn

from lora_fp8.objectives import Diffusion

from . import _files, _ldm, _miniature
from ._files import Header
from .base import Cond, Conversion, ModelFamily, TextEncoder


class Family(ModelFamily):
    name = "sdxl"
    title = "Stable Diffusion XL"
    example_base = "stabilityai/stable-diffusion-xl-base-1.0"
    pipeline_class = "StableDiffusionXLPipeline"
    denoiser_class = "UNet2DConditionModel"
    denoiser_name = "unet"
    text_parts = {
        "tokenizer": "CLIPTokenizer",
        "text_encoder": "CLIPTextModel",
        "tokenizer_2": "CLIPTokenizer",
        "text_encoder_2": "CLIPTextModelWithProjection",
    }
    # The embeddings are those before the last layer. Of the second, the pooled one comes behind it; of the first,
    # nothing does: kohya's files hold its last layer too, untouched.
    trained_text = {
        "text_encoder": TextEncoder("lora_te1_", "", width=768, hidden=3072, num_layers=12, unread=1),
        "text_encoder_2": TextEncoder("lora_te2_", "", width=1280, hidden=5120, num_layers=32),
    }
    judge_length_by = ("tokenizer", "tokenizer_2")
    objective = Diffusion
    # Everything inside the Transformer2DModels, as kohya's sd-scripts choose it: 722 layers. proj_in and proj_out are
    # linear here.
    adapter_targets = (
        *(f"{attn}.{proj}" for attn in ("attn1", "attn2") for proj in ("to_q", "to_k", "to_v", "to_out.0")),
        "ff.net.0.proj",
        "ff.net.2",
        "proj_in",
        "proj_out",
    )
    keep_precise = ("time_embedding", "add_embedding", "time_emb_proj", "conv_in", "conv_out", "conv_norm_out")
    bucket_multiple = 8
    native_resolution = 1024
    default_guidance = 7.0
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

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        with torch.no_grad():
            cond = self.encode_with(self.text_pipeline, prompts, {})
        pairs = zip(cond["prompt_embeds"], cond["text_embeds"], strict=True)
        return [{"prompt_embeds": e_LD.clone(), "text_embeds": p_D.clone()} for e_LD, p_D in pairs]

    def longest_cond(self, denoiser_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        # The time ids' embeddings and the pooled text share one input.
        both, each = (denoiser_config[f"{n}_dim"] for n in ("projection_class_embeddings_input", "addition_time_embed"))
        embeds = (self.longest_prompt, denoiser_config["cross_attention_dim"])
        return {"prompt_embeds": embeds, "text_embeds": (both - 6 * each,)}

    def encode_with(self, pipeline: Any, prompts: list[str], cond: Cond) -> Cond:
        embeds_BLD, _, pooled_BD, _ = pipeline.encode_prompt(
            prompts, device=self.device, do_classifier_free_guidance=False
        )
        return {**cond, "prompt_embeds": embeds_BLD.to(self.dtype), "text_embeds": pooled_BD.to(self.dtype)}

    def image_conditioning(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Cond:
        # The order of StableDiffusionXLPipeline._get_add_time_ids; float32, as bf16 would round 667 pixels to 668.
        return {"time_ids": torch.tensor([*original_hw, *crop_top_left, *target_hw], dtype=torch.float32)}

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        to = {"device": noisy_BCHW.device, "dtype": self.dtype}
        return denoiser(
            noisy_BCHW.to(self.dtype),
            t_B.to(noisy_BCHW.device),
            encoder_hidden_states=cond["prompt_embeds"].to(**to),
            added_cond_kwargs={
                "text_embeds": cond["text_embeds"].to(**to),
                "time_ids": cond["time_ids"].to(noisy_BCHW.device),
            },
            return_dict=False,
        )[0]

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        inputs = {"prompt_embeds": cond["prompt_embeds"][None], "pooled_prompt_embeds": cond["text_embeds"][None]}
        if negative is not None:
            inputs["negative_prompt_embeds"] = negative["prompt_embeds"][None]
            inputs["negative_pooled_prompt_embeds"] = negative["text_embeds"][None]
        return {k: v.to(self.device, self.dtype) for k, v in inputs.items()}

    def without_negative(self, empty: Cond) -> Cond | None:
        # SDXL was trained with zeros for a dropped caption; the pipeline makes them itself when it is given nothing.
        index = self.folder / "model_index.json"
        zeros = not index.is_file() or _files.read_json(index).get("force_zeros_for_empty_prompt", True)
        return None if zeros else empty

    def convert_checkpoint(self, header: Header) -> Conversion:
        return _ldm.unet_conversion(header, {"layers_per_block": 2, **self.denoiser_config()})

    @classmethod
    def _tiny_pipeline(cls) -> StableDiffusionXLPipeline:
        tokenizer = _miniature.clip_tokenizer()
        unet = UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(32, 64),
            layers_per_block=1,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2),
            attention_head_dim=(2, 4),
            norm_num_groups=16,
            cross_attention_dim=32 + 48,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=16,
            projection_class_embeddings_input_dim=6 * 16 + 32,
        )
        return StableDiffusionXLPipeline(
            vae=_miniature.vae(scaling_factor=0.13025),
            text_encoder=_miniature.clip_text(tokenizer),
            tokenizer=tokenizer,
            text_encoder_2=_miniature.clip_text(tokenizer, width=48, projection=32),
            tokenizer_2=tokenizer,
            unet=unet,
            scheduler=EulerDiscreteScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                steps_offset=1,
                timestep_spacing="leading",
            ),
            add_watermarker=False,
        )
