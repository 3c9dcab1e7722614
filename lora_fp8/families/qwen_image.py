"""Qwen-Image: a 20 B double-stream DiT, conditioned on Qwen2.5-VL 7B, trained with rectified flow.

Qwen team 2025, "Qwen-Image Technical Report". The prompt stands in a chat template of which the encoder's first 34
tokens, always the same, are dropped; what is left has any length, and the transformer masks what pads a batch.
Latents of a video VAE are packed in 2 x 2 patches, with position ids that count rows and columns from the middle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import QwenImagePipeline
from torch import Tensor, nn

from lora_fp8.objectives import FlowMatching

from . import _miniature, _qwen, _qwen_edit
from .base import Cond, ModelFamily, padded


class Family(ModelFamily):
    name = "qwen_image"
    title = "Qwen-Image"
    example_base = "Qwen/Qwen-Image"
    pipeline_class = "QwenImagePipeline"
    denoiser_class = "QwenImageTransformer2DModel"
    denoiser_name = "transformer"
    text_parts = {"tokenizer": "Qwen2Tokenizer", "text_encoder": "Qwen2_5_VLForConditionalGeneration"}
    vae_class = "AutoencoderKLQwenImage"
    vae_marks = _qwen.VAE_MARKS
    objective = FlowMatching
    adapter_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *(f"{mlp}.net.{layer}" for mlp in ("img_mlp", "txt_mlp") for layer in ("0.proj", "2")),
    )
    keep_precise = ("img_in", "txt_in", "time_text_embed", "norm_out", "proj_out")
    modulation = ("img_mod", "txt_mod")  # 6.8 of the 20.4 B parameters
    bucket_multiple = 16
    native_resolution = 1024  # the pipeline's default; trained up to 1328, which fits no coarse grid of buckets
    default_guidance = 4.0
    text_shapes = {"prompt_embeds": ("tokens", "joint_attention_dim")}
    modelspec_architecture = "Qwen-Image"
    kohya_base_version = "qwen_image"
    kohya_naming = "native"
    kohya_module = "networks.lora_qwen_image"
    layouts = ("comfy", "diffusers", "kohya")
    native_layers = tuple(
        (name, name)
        for name in ("transformer_blocks.#", "img_in", "txt_in", "txt_norm", "time_text_embed", "norm_out", "proj_out")
    )
    # Edit and Layered share the class: they are told a second time, or in place of the text, what they see.
    config_marks = {"guidance_embeds": False, "use_additional_t_cond": False, "zero_cond_t": False}
    reference_config = {"in_channels": 64, "out_channels": 16, "num_layers": 60, "joint_attention_dim": 3584}
    # Layered has one more embedding; 2511 of Edit a marker, which ComfyUI puts into its files.
    single_file = {
        "has": ("transformer_blocks.0.img_mod.1.weight", "txt_norm.weight"),
        "lacks": ("time_text_embed.addition_t_embedding.weight", "__index_timestep_zero__"),
    }

    @torch.no_grad()
    def encode_images(self, pixels_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("encode_images before load_encoders")
        return _qwen.encode(self.vae, pixels_BCHW.to(self.device, torch.float32))

    @torch.no_grad()
    def decode_latents(self, latents_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("decode_latents before load_vae")
        return _qwen.decode(self.vae, latents_BCHW.to(self.device, torch.float32))

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        limit = self.max_sequence_length
        # Nothing behind the limit reaches the transformer, and the encoder is causal: it need not read it.
        self.text_pipeline.tokenizer_max_length = limit
        with torch.no_grad():
            embeds_BLD, mask_BL = self.text_pipeline.encode_prompt(
                prompts, device=self.device, max_sequence_length=limit
            )
        lengths = [embeds_BLD.shape[1]] * len(prompts) if mask_BL is None else mask_BL.sum(1).tolist()
        pairs = zip(embeds_BLD.to(self.dtype), lengths, strict=True)
        return [{"prompt_embeds": embeds_LD[:length].clone()} for embeds_LD, length in pairs]

    def collate(self, conds: list[Cond]) -> Cond:
        return padded(conds, "prompt_embeds")

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the prompt and of the template's end: the pipeline's default, unless the tokenizer says less."""
        return min(512, self.tokenizer("tokenizer").model_max_length)

    def token_limit(self, name: str) -> int:
        return self.max_sequence_length

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        return _qwen.predict(self, denoiser, noisy_BCHW, t_B, cond)

    def pack(self, latents_BCHW: Tensor) -> Tensor:
        return _qwen.pack(latents_BCHW)

    def unpack(self, packed: Tensor, latent_hw: tuple[int, int]) -> Tensor:
        return _qwen.unpack(packed, latent_hw)

    def seq_len(self, latent_hw: tuple[int, int]) -> int:
        return (latent_hw[0] // 2) * (latent_hw[1] // 2)

    def guidance_inputs(self, guidance: float) -> dict[str, Any]:
        return {"true_cfg_scale": guidance}

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        return _qwen.pipeline_inputs(self, cond, negative)

    def empty_denoiser(self) -> nn.Module:
        denoiser = ModelFamily.empty_denoiser(self)
        rope = denoiser.pos_embed  # computes its frequencies when it is made, and no file holds them
        denoiser.pos_embed = type(rope)(theta=rope.theta, axes_dim=rope.axes_dim, scale_rope=rope.scale_rope)
        return denoiser

    @classmethod
    def without_adapter(cls, denoiser: nn.Module) -> set[str]:
        # What the last block makes of the text is read by nothing.
        last = f"transformer_blocks.{len(denoiser.transformer_blocks) - 1}"
        return {f"{last}.{x}" for x in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")}

    def caveats(self) -> list[str]:
        # 2511 has a mark; Edit and 2509 have the very tensors of Qwen-Image.
        editing = _qwen_edit.family_of_name(self)
        if not editing:
            return []
        return [
            f"{self.checkpoint.name} is Qwen-Image-Edit by its name, which edits pictures: it is trained and drawn "
            f"here without one to edit; set model.family = '{editing}' to give it control pictures"
        ]

    @classmethod
    def tiny(cls, folder: Path, seed: int = 0) -> None:
        with _miniature.seeded(seed):
            vocab, transformer = _qwen.tokenizer(), _qwen.transformer()
            QwenImagePipeline(
                scheduler=_qwen.scheduler(),
                vae=_qwen.vae(),
                text_encoder=_qwen.qwen25_vl(vocab),
                tokenizer=vocab,
                transformer=transformer,
            ).save_pretrained(folder, safe_serialization=True)
