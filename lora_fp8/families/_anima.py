"""An ordinary diffusers pipeline for Anima.

diffusers offers Anima only as a modular pipeline, whose blocks take texts and not embeddings encoded earlier. This
module has the same loop as an ordinary pipeline; a test compares the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AnimaModularPipeline,
    AnimaTextConditioner,
    AutoencoderKLQwenImage,
    CosmosTransformer3DModel,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.image_processor import VaeImageProcessor
from diffusers.loaders import AnimaLoraLoaderMixin
from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen3Model, T5Tokenizer

from ._latents import as_clip, as_picture, denormalise_latents


def make_inputs(noisy_BCHW: Tensor, t_B: Tensor, embeds_BLD: Tensor) -> dict[str, Any]:
    """Return the arguments of the transformer, which takes a video, here of one frame, and returns one.

    The transformer was made for images with borders, which it finds in a mask given as one more channel. An image
    without borders has zeros there. diffusers would resize the mask with torchvision, so it is appended here.
    """
    noisy_BCFHW = torch.nn.functional.pad(noisy_BCHW, (0, 0, 0, 0, 0, 1))[:, :, None]
    return {"hidden_states": noisy_BCFHW, "timestep": t_B, "encoder_hidden_states": embeds_BLD}


def run_transformer(denoiser: Any, noisy_BCHW: Tensor, t_B: Tensor, embeds_BLD: Tensor) -> Tensor:
    """Call the transformer once. Returns the velocity BCHW."""
    return denoiser(**make_inputs(noisy_BCHW, t_B, embeds_BLD), return_dict=False)[0][:, :, 0]


def expect_border_mask_(denoiser: Any) -> Any:
    """Make the transformer expect the border mask as a channel of its input, in place; see `make_inputs`."""
    denoiser.register_to_config(concat_padding_mask=False)
    return denoiser


Pipeline: Any = DiffusionPipeline
"""diffusers types no attribute of its pipelines."""


class AnimaPipeline(Pipeline, AnimaLoraLoaderMixin):
    """Generates images with Anima, from prompts or from the embeddings of `encode_prompt`."""

    def __init__(
        self,
        scheduler: FlowMatchEulerDiscreteScheduler,
        vae: AutoencoderKLQwenImage,
        text_encoder: Qwen3Model,
        tokenizer: Qwen2Tokenizer,
        t5_tokenizer: T5Tokenizer,
        text_conditioner: AnimaTextConditioner,
        transformer: CosmosTransformer3DModel,
    ):
        super().__init__()
        self.register_modules(
            scheduler=scheduler,
            vae=vae,
            text_encoder=text_encoder,
            tokenizer=tokenizer,
            t5_tokenizer=t5_tokenizer,
            text_conditioner=text_conditioner,
            transformer=transformer and expect_border_mask_(transformer),
        )

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> AnimaPipeline:
        """Load the whole pipeline from a folder of the modular one, with diffusers' `options` such as `dtype`."""
        modular = AnimaModularPipeline.from_pretrained(str(folder), local_files_only=True)
        options.pop("local_files_only", None)
        modular.load_components(**options)
        names = ("scheduler", "vae", "text_encoder", "tokenizer", "t5_tokenizer", "text_conditioner", "transformer")
        return cls(**{name: getattr(modular, name) for name in names})

    @torch.no_grad()
    def encode_prompt(self, prompt: str, max_sequence_length: int = 512) -> Tensor:
        """Encode a prompt. Returns embeddings (1, L, D), with zeros after the last token.

        Qwen3 encodes the prompt. In the conditioner, T5's tokens of the same prompt attend to Qwen3's hidden states.
        """
        read = AnimaTextEncoderStep.encode_prompt(
            self, [prompt], prepare_unconditional_embeds=False, max_sequence_length=max_sequence_length
        )
        states = read["qwen_prompt_embeds"]
        assert states is not None
        return self.text_conditioner(
            source_hidden_states=states.to(self.text_conditioner.dtype),
            target_input_ids=read["t5_input_ids"],
            target_attention_mask=read["t5_attention_mask"],
            source_attention_mask=read["qwen_attention_mask"],
        )

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        negative_prompt: str = "",
        height: int = 1024,
        width: int = 1024,
        num_inference_steps: int = 50,
        guidance_scale: float = 4.0,
        generator: torch.Generator | None = None,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        max_sequence_length: int = 512,
        output_type: str = "pil",
    ) -> ImagePipelineOutput:
        """Generate images, with the arguments of diffusers' other pipelines; guidance 1 uses no negative prompt."""
        if prompt_embeds is None:
            texts = [prompt] if isinstance(prompt, str) else prompt or []
            prompt_embeds = torch.cat([self.encode_prompt(text, max_sequence_length) for text in texts])
        guided = guidance_scale > 1
        if guided and negative_prompt_embeds is None:
            negative_prompt_embeds = self.encode_prompt(negative_prompt, max_sequence_length)
        device, dtype = self._execution_device, self.transformer.dtype
        embeds_BLD = prompt_embeds.to(device, dtype)
        if guided:
            assert negative_prompt_embeds is not None
            negative_BLD = negative_prompt_embeds.to(device, dtype).expand(len(embeds_BLD), -1, -1)
        scale = 2 ** len(self.vae.temperal_downsample)
        shape = (len(embeds_BLD), self.vae.config.z_dim, height // scale, width // scale)
        latents_BCHW = randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)
        sigmas = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps)
        self.scheduler.set_timesteps(sigmas=sigmas, device=device)
        self.scheduler.set_begin_index(0)
        for t in self.progress_bar(self.scheduler.timesteps):
            t_B = t.expand(len(embeds_BLD)).to(dtype) / self.scheduler.config.num_train_timesteps
            noisy_BCHW = latents_BCHW.to(dtype)
            pred_BCHW = run_transformer(self.transformer, noisy_BCHW, t_B, embeds_BLD)
            if guided:
                away_BCHW = run_transformer(self.transformer, noisy_BCHW, t_B, negative_BLD)
                pred_BCHW = away_BCHW + guidance_scale * (pred_BCHW - away_BCHW)
            latents_BCHW = self.scheduler.step(pred_BCHW, t, latents_BCHW, return_dict=False)[0]
        if output_type == "latent":
            return ImagePipelineOutput(images=latents_BCHW)
        latents_BCFHW = as_clip(denormalise_latents(self.vae, latents_BCHW.to(self.vae.dtype)))
        pixels_BCHW = as_picture(self.vae.decode(latents_BCFHW, return_dict=False)[0])
        return ImagePipelineOutput(images=VaeImageProcessor().postprocess(pixels_BCHW, output_type=output_type))
