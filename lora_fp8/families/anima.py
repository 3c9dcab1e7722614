"""Anima: a 2 B DiT for illustrations, conditioned on Qwen3 0.6B through T5's tokens, trained with rectified flow.

CircleStone Labs 2026 (https://huggingface.co/circlestone-labs/Anima). The network is NVIDIA's Cosmos Predict 2, and the
VAE Qwen-Image's. A small transformer of its own, which comes with the weights, turns Qwen3's states into conditioning,
asked by T5's tokens of the same text; it is not trained here, and belongs to the text encoders.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AnimaAutoBlocks,
    AnimaTextConditioner,
    CosmosTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
)
from torch import Tensor, nn

from lora_fp8.objectives import FlowMatching

from . import _anima, _miniature, _qwen
from ._files import Header, checkpoint_prefix
from .base import Cond, Conversion, ModelFamily, Overlong

CONDITIONER = "llm_adapter."
"""What the names of the conditioner begin with, in files that hold it beside the transformer."""


def _block() -> tuple[tuple[str, str], ...]:
    """Rows for the layers of a block."""
    attention = {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "output_proj": "to_out.0"}
    attention |= {"q_norm": "norm_q", "k_norm": "norm_k"}
    layers = {f"{a}_attn.{x}": f"attn{i}.{y}" for i, a in ((1, "self"), (2, "cross")) for x, y in attention.items()}
    layers |= {"mlp.layer1": "ff.net.0.proj", "mlp.layer2": "ff.net.2"}
    for i, part in enumerate(("self_attn", "cross_attn", "mlp"), 1):
        layers |= {f"adaln_modulation_{part}.{j}": f"norm{i}.linear_{j}" for j in (1, 2)}
    return tuple((f"blocks.#.{native}", f"transformer_blocks.#.{ours}") for native, ours in layers.items())


class Family(ModelFamily):
    name = "anima"
    title = "Anima"
    example_base = "circlestone-labs/Anima-Base-v1.0-Diffusers"
    pipeline_class = "AnimaModularPipeline"
    index_name = "modular_model_index.json"
    denoiser_class = "CosmosTransformer3DModel"
    denoiser_name = "transformer"
    text_parts = {
        "tokenizer": "Qwen2Tokenizer",
        "text_encoder": "Qwen3Model",
        "t5_tokenizer": "T5TokenizerFast",
        "text_conditioner": "AnimaTextConditioner",
    }
    judge_length_by = ("tokenizer", "t5_tokenizer")
    vae_class = "AutoencoderKLQwenImage"
    vae_marks = _qwen.VAE_MARKS
    objective = FlowMatching
    adapter_targets = (
        *(f"attn{i}.{layer}" for i in (1, 2) for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *("ff.net.0.proj", "ff.net.2"),
    )
    keep_precise = ("patch_embed", "time_embed", "norm_out", "proj_out")
    modulation = ("norm1", "norm2", "norm3")
    bucket_multiple = 16
    native_resolution = 1024
    default_guidance = 4.0
    text_shapes = {"prompt_embeds": ("tokens", "text_embed_dim")}
    modelspec_architecture = "anima-preview"
    kohya_base_version = "anima"
    kohya_naming = "native"
    kohya_module = "networks.lora_anima"
    layouts = ("comfy", "diffusers", "kohya")
    layouts_of_diffusers = ("diffusers", "comfy")
    native_layers = (
        *_block(),
        ("x_embedder.proj.1", "patch_embed.proj"),
        ("t_embedder.1", "time_embed.t_embedder"),
        ("t_embedding_norm", "time_embed.norm"),
        ("final_layer.adaln_modulation.1", "norm_out.linear_1"),
        ("final_layer.adaln_modulation.2", "norm_out.linear_2"),
        ("final_layer.linear", "proj_out"),
    )
    config_marks = {"extra_pos_embed_type": None, "use_crossattn_projection": False, "img_context_dim_in": None}
    reference_config = {
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 16,
        "attention_head_dim": 128,
        "num_layers": 28,
        "text_embed_dim": 1024,
        "adaln_lora_dim": 256,
        "rope_scale": [1.0, 4.0, 4.0],
        "concat_padding_mask": True,
        "extra_pos_embed_type": None,
    }
    # Cosmos Predict 2 itself has no adapter for Qwen3, and is conditioned on another T5.
    single_file = {"has": ("blocks.0.adaln_modulation_self_attn.1.weight", "llm_adapter.embed.weight")}

    @classmethod
    def pipeline_type(cls) -> Any:
        return _anima.AnimaPipeline

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
        # One by one: an empty text has not a single token, and beside others it would be padding only.
        texts = [self.text_pipeline.encode_prompt(prompt, self.max_sequence_length)[0] for prompt in prompts]
        return [{"prompt_embeds": embeds_LD.to(self.dtype, copy=True)} for embeds_LD in texts]

    @property
    def max_sequence_length(self) -> int:
        """Tokens that each tokenizer gives of a prompt: the pipeline's default, unless one of them says less."""
        return min(512, *(self.tokenizer(name).model_max_length for name in self.judge_length_by))

    def token_limit(self, name: str) -> int:
        return self.max_sequence_length

    def overlong(self, prompts: Sequence[str]) -> list[Overlong]:
        # What one tokenizer cuts off still has an effect where the other reads on.
        one, other = (self.cut_by(name, prompts) for name in self.judge_length_by)
        return [min(one[p], other[p], key=lambda cut: len(cut.lost)) for p in one if p in other]

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        device = noisy_BCHW.device
        embeds_BLD = cond["prompt_embeds"].to(device, self.dtype)
        return _anima.answer(denoiser, noisy_BCHW.to(self.dtype), t_B.to(device), embeds_BLD)

    def seq_len(self, latent_hw: tuple[int, int]) -> int:
        return (latent_hw[0] // 2) * (latent_hw[1] // 2)

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        inputs = {"prompt_embeds": cond, "negative_prompt_embeds": negative}
        return {k: v["prompt_embeds"][None].to(self.device, self.dtype) for k, v in inputs.items() if v is not None}

    def empty_denoiser(self) -> nn.Module:
        return _anima.without_borders_(ModelFamily.empty_denoiser(self))

    def convert_checkpoint(self, header: Header) -> Conversion:
        found = ModelFamily.convert_checkpoint(self, header)
        beside = (CONDITIONER, "pos_embedder.")  # loaded as a text encoder; tables that are computed
        return {name: place for name, place in found.items() if not name.startswith(beside)}

    def _has_text(self, name: str) -> bool:
        return name == "text_conditioner" and self._file is not None

    def _convert_text(self, cls: Any, name: str) -> nn.Module:
        prefix = checkpoint_prefix(self._header) + CONDITIONER
        conditioner = cls.from_config(cls.load_config(self.folder / name))
        conditioner.load_state_dict({k.removeprefix(prefix): t for k, t in self._tensors_with(prefix).items()})
        return conditioner

    @classmethod
    def tiny(cls, folder: Path, seed: int = 0) -> None:
        with _miniature.seeded(seed):
            vocab, t5_vocab = _qwen.tokenizer(), _miniature.t5_tokenizer()
            transformer = CosmosTransformer3DModel(
                in_channels=16,
                out_channels=16,
                num_attention_heads=4,
                attention_head_dim=16,
                num_layers=2,
                mlp_ratio=2.0,
                text_embed_dim=32,
                adaln_lora_dim=16,
                max_size=(1, 64, 64),
                rope_scale=(1.0, 4.0, 4.0),
                extra_pos_embed_type=None,
            )
            conditioner = AnimaTextConditioner(
                source_dim=32,
                target_dim=32,
                model_dim=32,
                num_layers=1,
                num_attention_heads=2,
                target_vocab_size=len(t5_vocab),
                min_sequence_length=_miniature.T5_TOKENS,
            )
            pipeline = AnimaAutoBlocks().init_pipeline()
            pipeline.update_components(
                scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
                vae=_qwen.vae(),
                text_encoder=_qwen.qwen3_text(vocab),
                tokenizer=vocab,
                t5_tokenizer=t5_vocab,
                text_conditioner=conditioner,
                transformer=transformer,
            )
            pipeline.save_pretrained(str(folder), overwrite_modular_index=True)
