"""Kolors: SDXL's UNet, conditioned on ChatGLM3 6B, which reads Chinese and English.

Kolors Team 2024, "Kolors: Effective Training of Diffusion Model for Photorealistic Text-to-Image Synthesis". Prompts
are padded in front to 256 tokens, and the UNet sees all of them through one linear layer. The last token's state in the
last layer replaces SDXL's pooled embedding. The noise schedule has 1100 steps and ends with more noise than SDXL's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any

from . import _ldm
from ._prompts import Overlong
from .base import ModelFamily


class Family(ModelFamily):
    name = "kolors"
    title = "Kolors"
    example_base = "Kwai-Kolors/Kolors-diffusers"
    pipeline_class = "KolorsPipeline"
    denoiser_class = "UNet2DConditionModel"
    denoiser_name = "unet"
    text_widths = {
        "encoder_hid_dim": "text_encoder.hidden_size",
        "projection_class_embeddings_input_dim": "text_encoder.hidden_size + 6 * unet.addition_time_embed_dim",
    }
    text_millions = (6244, 266)  # ChatGLM3-6B
    text_parts = {
        "tokenizer": "diffusers.pipelines.kolors.tokenizer.ChatGLMTokenizer",
        "text_encoder": "diffusers.pipelines.kolors.text_encoder.ChatGLMModel",
    }
    prompt_tokens = 256  # KolorsPipeline
    text_answers = ("prompt_embeds", "", "text_embeds")
    text_arguments = {"text_embeds": "pooled_prompt_embeds"}
    text_shapes = {"prompt_embeds": ("tokens", "encoder_hid_dim"), "text_embeds": ("encoder_hid_dim",)}
    size_cond = "time_ids"
    exact_cond = ("time_ids",)  # bf16 would round 667 pixels to 668
    noise_argument = "sample"
    denoiser_reads = {"encoder_hidden_states": "prompt_embeds", "added_cond_kwargs": ("text_embeds", "time_ids")}
    objective = "Diffusion"
    adapter_targets = _ldm.ADAPTER_TARGETS
    keep_precise = (*_ldm.KEEP_PRECISE, "add_embedding", "encoder_hid_proj")
    bucket_multiple = 8
    native_resolution = 1024
    default_guidance = 5.0  # KolorsPipeline; Kwai-Kolors/Kolors scripts/sample.py
    modelspec_architecture = "kolors"
    kohya_base_version = "kolors"
    kohya_naming = "diffusers_underscored"
    config_marks = {"in_channels": 4, "addition_embed_type": "text_time", "encoder_hid_dim_type": "text_proj"}
    reference_config = {
        "sample_size": 128,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "block_out_channels": [320, 640, 1280],
        "transformer_layers_per_block": [1, 2, 10],
        "attention_head_dim": [5, 10, 20],
        "cross_attention_dim": 2048,
        "use_linear_projection": True,
        "encoder_hid_dim": 4096,
        "encoder_hid_dim_type": "text_proj",
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 4096 + 6 * 256,
    }

    def find_cuts(self, name: str, prompts: Sequence[str]) -> dict[str, Overlong]:
        # This tokenizer gives no offsets, so the part that is read is found by decoding the tokens that fit.
        tokenizer = self.load_tokenizer(name)
        model, limit = tokenizer.tokenizer.sp_model, self.compute_token_limit(name) - len(tokenizer.get_prefix_tokens())
        cuts = {}
        for prompt in prompts:
            tokens = model.encode(prompt)
            if len(tokens) > limit:
                read = len(model.decode(tokens[:limit]))
                ends = range(len(prompt))
                end = bisect_left(ends, read, key=partial(_count_decoded, model, prompt))
                cuts[prompt] = Overlong(prompt, prompt[end:], len(tokens) - limit, limit)
        return cuts


def _count_decoded(model: Any, prompt: str, end: int) -> int:
    """Return the length of the text that the tokens of the first `end` characters stand for."""
    return len(model.decode(model.encode(prompt[:end])))
