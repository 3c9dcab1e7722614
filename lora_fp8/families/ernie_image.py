"""ERNIE-Image: an 8 B single-stream DiT, conditioned on Ministral 3 3B, trained with rectified flow.

Baidu 2026 (https://github.com/baidu/ernie-image). Latents are FLUX.2's, with another epsilon in the batch norm that
normalises them. One linear turns the timestep into scales and shifts for all blocks. Prompts are as long as they are:
the transformer masks what pads them, and puts the image behind the text on the first axis of its position ids.
ERNIE-Image-Turbo is this model, distilled to 8 steps without guidance. The model that rewrites prompts before they are
drawn (`pe`) is not loaded: captions say what they say.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from diffusers import ErnieImagePipeline, ErnieImageTransformer2DModel, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from transformers import Mistral3Model

from lora_fp8.objectives import FlowMatching

from . import _flux2, _mistral
from .base import Cond, ModelFamily, padded

EPS = 1e-5
"""Of the VAE's batch norm: the pipeline has it written in, config.json says what FLUX.2 was trained with."""


class Family(ModelFamily):
    name = "ernie_image"
    title = "ERNIE-Image"
    example_base = "baidu/ERNIE-Image"
    pipeline_class = "ErnieImagePipeline"
    denoiser_class = "ErnieImageTransformer2DModel"
    denoiser_name = "transformer"
    text_parts = {"tokenizer": "AutoTokenizer", "text_encoder": "Mistral3Model"}
    vae_class = "AutoencoderKLFlux2"
    objective = FlowMatching
    adapter_targets = (
        *(f"self_attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"mlp.{layer}" for layer in ("gate_proj", "up_proj", "linear_fc2")),
    )
    keep_precise = ("x_embedder", "text_proj", "time_embedding", "final_norm", "final_linear")
    modulation = ("adaLN_modulation",)
    bucket_multiple = 16
    native_resolution = 1024
    default_guidance = 4.0
    text_shapes = {"prompt_embeds": ("tokens", "text_in_dim")}
    modelspec_architecture = "ERNIE-Image"
    kohya_base_version = "ernie_image"
    kohya_naming = ""  # kohya's musubi-tuner trains it, but nothing else reads its names
    kohya_module = "networks.lora_ernie_image"
    layouts = ("comfy", "diffusers")
    # diffusers took the original names over.
    native_layers = tuple(
        (name, name)
        for name in (
            *("x_embedder", "text_proj", "time_embedding", "adaLN_modulation"),
            *("layers.#", "final_norm", "final_linear"),
        )
    )
    reference_config = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_layers": 36,
        "ffn_hidden_size": 12288,
        "text_in_dim": 3072,
    }
    single_file = {"has": ("layers.0.adaLN_sa_ln.weight", "layers.0.mlp.linear_fc2.weight")}

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        embeds = self.text_pipeline.encode_prompt(prompts, self.device)
        return [{"prompt_embeds": embeds_LD.to(self.dtype, copy=True)} for embeds_LD in embeds]

    def collate(self, conds: list[Cond]) -> Cond:
        return padded(conds, "prompt_embeds")

    def encode_images(self, pixels_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("encode_images before load_encoders")
        return _flux2.encode(self.vae, pixels_BCHW.to(self.device, torch.float32), EPS)

    def decode_latents(self, latents_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("decode_latents before load_vae")
        return _flux2.decode(self.vae, latents_BCHW.to(self.device, torch.float32), EPS)

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        device = noisy_BCHW.device
        return denoiser(
            hidden_states=noisy_BCHW.to(self.dtype),
            timestep=(t_B * 1000).to(device, self.dtype),
            text_bth=cond["prompt_embeds"].to(device, self.dtype),
            text_lens=cond["prompt_embeds_mask"].sum(1).to(device),
            return_dict=False,
        )[0]

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        inputs = {"prompt_embeds": cond, "negative_prompt_embeds": negative}
        return {k: [v["prompt_embeds"].to(self.device, self.dtype)] for k, v in inputs.items() if v is not None}

    def usual_guidance(self) -> float:
        return 1.0 if self._is_turbo() else self.default_guidance

    def caveats(self) -> list[str]:
        if not self._is_turbo():
            return []
        return [
            f"{self.checkpoint or self.folder} seems to be ERNIE-Image-Turbo: plain training undoes the distillation, "
            "and images of 8 steps become soft; train on ERNIE-Image and draw with Turbo"
        ]

    def _is_turbo(self) -> bool:
        # Its config.json has an entry that nothing reads and ERNIE-Image's has not; a single file has only its name.
        path = str(self.checkpoint or self.folder).lower()
        return bool(re.search("ernie.?image.?turbo", path)) or (
            not self.checkpoint and "use_lora" in self.denoiser_config()
        )

    @classmethod
    def _tiny_pipeline(cls) -> ErnieImagePipeline:
        tokenizer = _mistral.tokenizer(64)
        transformer = ErnieImageTransformer2DModel(
            hidden_size=64,
            num_attention_heads=4,
            num_layers=3,
            ffn_hidden_size=128,
            in_channels=16,
            out_channels=16,
            text_in_dim=16,
            rope_axes_dim=(4, 6, 6),
        )
        for zeros in (transformer.adaLN_modulation[-1], transformer.final_linear):  # which would answer nothing
            nn.init.normal_(zeros.weight, std=0.2)
        return ErnieImagePipeline(
            transformer=transformer,
            vae=_flux2.vae(),
            text_encoder=Mistral3Model(_mistral.mistral3(tokenizer, num_layers=2)),
            tokenizer=tokenizer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=4.0),
        )
