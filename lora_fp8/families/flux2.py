"""FLUX.2-dev: a 32 B double- and single-stream DiT, conditioned on Mistral Small 3.2, trained with rectified flow.

Black Forest Labs 2025 (https://github.com/black-forest-labs/flux2). Guidance-distilled, as FLUX.1-dev: the scale is an
input, and one pass answers what classifier-free guidance would. The text is what Mistral's layers 10, 20 and 30 say of
the prompt in a chat with a system message, always 512 tokens long; padding is attended to.

t is drawn with the shift of the scheduler's config, FLUX.1's line from 256 to 4096 tokens, as musubi-tuner does. What
the pipeline samples with is that line in the limit of many steps; with few it goes further towards noise (mu 2.02 in
place of 1.15 at 1024 x 1024 and 50 steps), to make up for their length, which training does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Pipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2 import format_input
from torch import Tensor, nn
from transformers import Mistral3ForConditionalGeneration

from lora_fp8.objectives import FlowMatching

from . import _flux2, _mistral
from ._files import Header
from .base import Cond, Conversion, ModelFamily


class Family(ModelFamily):
    name = "flux2"
    title = "FLUX.2-dev"
    example_base = "black-forest-labs/FLUX.2-dev"
    pipeline_class = "Flux2Pipeline"
    denoiser_class = "Flux2Transformer2DModel"
    denoiser_name = "transformer"
    # The released folder names PixtralProcessor, which takes pictures too and so needs torchvision. Its tokenizer has
    # the same chat template, and text is all that the pipeline gives it here.
    text_parts = {"tokenizer": "AutoTokenizer", "text_encoder": "Mistral3ForConditionalGeneration"}
    vae_class = "AutoencoderKLFlux2"
    objective = FlowMatching
    adapter_targets = _flux2.ADAPTER_TARGETS
    keep_precise = _flux2.KEEP_PRECISE
    modulation = _flux2.MODULATION
    bucket_multiple = 16
    native_resolution = 1024
    default_guidance = 4.0
    text_shapes = {"prompt_embeds": ("tokens", "joint_attention_dim")}
    uses_negative = False
    embeds_guidance = True
    modelspec_architecture = "Flux.2-dev"
    kohya_base_version = "flux_2_dev"
    kohya_naming = "native"
    kohya_module = "networks.lora_flux_2"
    layouts = ("comfy", "diffusers", "kohya")
    lokr_of_diffusers = True
    native_layers = _flux2.LAYERS
    reference_config = {
        "num_layers": 8,
        "num_single_layers": 48,
        "num_attention_heads": 48,
        "joint_attention_dim": 15360,
    }
    single_file = {
        "has": (
            "double_stream_modulation_img.lin.weight",
            "single_blocks.0.linear1.weight",
            "guidance_in.in_layer.weight",
        ),
        "in_is_out": ("img_in.weight", "final_layer.linear.weight"),
    }

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        with torch.no_grad():
            embeds_BLD, _ = self.text_pipeline.encode_prompt(
                prompts, device=self.device, max_sequence_length=self.max_sequence_length
            )
        return [{"prompt_embeds": embeds_LD.clone()} for embeds_LD in embeds_BLD.to(self.dtype)]

    @property
    def max_sequence_length(self) -> int:
        """Tokens that a prompt in its template is padded or cut to; what the pipeline calls so."""
        return self.token_limit("tokenizer")

    def token_limit(self, name: str) -> int:
        return min(512, self.tokenizer(name).model_max_length)

    def as_read(self, prompt: str) -> tuple[str, str]:
        # The end is cut off, and with it first what the template has behind the prompt. <s> is counted as a mark.
        tokenizer = self.tokenizer("tokenizer")
        (text,) = tokenizer.apply_chat_template(format_input(["\0"]), tokenize=False)
        before, _, _ = text.partition("\0")
        return before.removeprefix(tokenizer.bos_token), prompt.replace("[IMG]", "")  # as the pipeline does

    def encode_images(self, pixels_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("encode_images before load_encoders")
        return _flux2.encode(self.vae, pixels_BCHW.to(self.device, torch.float32), self.vae.config.batch_norm_eps)

    def decode_latents(self, latents_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("decode_latents before load_vae")
        return _flux2.decode(self.vae, latents_BCHW.to(self.device, torch.float32), self.vae.config.batch_norm_eps)

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        guidance_B = torch.full((len(t_B),), guidance, device=noisy_BCHW.device)
        embeds_BLD = cond["prompt_embeds"].to(noisy_BCHW.device, self.dtype)
        return _flux2.answer(denoiser, noisy_BCHW.to(self.dtype), t_B, embeds_BLD, guidance_B)

    def pack(self, latents_BCHW: Tensor) -> Tensor:
        return Flux2Pipeline._pack_latents(latents_BCHW)

    def unpack(self, packed: Tensor, latent_hw: tuple[int, int]) -> Tensor:
        return _flux2.unpack(packed, latent_hw)

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        return {"prompt_embeds": cond["prompt_embeds"][None].to(self.device, self.dtype)}

    @classmethod
    def without_adapter(cls, denoiser: nn.Module) -> set[str]:
        return {_flux2.LAST_NORM}  # in the original naming its LoRA would be another one

    @classmethod
    def halves_swapped(cls, denoiser_config: Mapping[str, Any]) -> set[str]:
        return {_flux2.LAST_NORM}

    def convert_checkpoint(self, header: Header) -> Conversion:
        return _flux2.with_last_norm(ModelFamily.convert_checkpoint(self, header))

    @classmethod
    def _tiny_pipeline(cls) -> Flux2Pipeline:
        tokenizer = _mistral.tokenizer(128)  # the system message takes 42 of them
        text = _mistral.mistral3(tokenizer, num_layers=30)
        return Flux2Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
            vae=_flux2.vae(),
            text_encoder=Mistral3ForConditionalGeneration(text),
            tokenizer=tokenizer,
            transformer=Flux2Transformer2DModel(**_flux2.TINY, guidance_embeds=True),
        )
