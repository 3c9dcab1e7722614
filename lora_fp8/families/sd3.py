"""Stable Diffusion 3 and 3.5: a 2 to 8 B joint transformer on two CLIPs and T5-XXL, trained with rectified flow.

Esser et al. 2024, "Scaling Rectified Flow Transformers for High-Resolution Image Synthesis". Text and image have
weights of their own and one attention. 3.5 normalises queries and keys, and 3.5 medium attends a second time, to the
image alone, in its first 13 blocks. The denoiser takes the timestep (0 .. 1000), not sigma; the VAE has 16 channels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor, nn

from lora_fp8.objectives import FlowMatching

from . import _miniature
from ._files import Header, native_header
from .base import Cond, Conversion, ModelFamily, TextEncoder


class Family(ModelFamily):
    name = "sd3"
    title = "Stable Diffusion 3"
    example_base = "stabilityai/stable-diffusion-3.5-medium"
    pipeline_class = "StableDiffusion3Pipeline"
    denoiser_class = "SD3Transformer2DModel"
    denoiser_name = "transformer"
    text_parts = {
        "tokenizer": "CLIPTokenizer",
        "text_encoder": "CLIPTextModelWithProjection",
        "tokenizer_2": "CLIPTokenizer",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "tokenizer_3": "T5TokenizerFast",
        "text_encoder_3": "T5EncoderModel",
    }
    trained_text = {
        "text_encoder": TextEncoder("lora_te1_", "clip_l", width=768, hidden=3072, num_layers=12),
        "text_encoder_2": TextEncoder("lora_te2_", "clip_g", width=1280, hidden=5120, num_layers=32),
    }
    judge_length_by = ("tokenizer_3",)  # the CLIPs read the first 77 tokens of the same prompt, T5 all of it
    objective = FlowMatching
    adapter_targets = (
        *(f"{attn}.{proj}" for attn in ("attn", "attn2") for proj in ("to_q", "to_k", "to_v", "to_out.0")),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *(f"{ff}.net.{layer}" for ff in ("ff", "ff_context") for layer in ("0.proj", "2")),
    )
    keep_precise = ("^pos_embed", "context_embedder", "time_text_embed", "norm_out", "proj_out")
    modulation = ("norm1.linear", "norm1_context.linear")
    bucket_multiple = 16
    native_resolution = 1024
    default_guidance = 7.0
    text_shapes = {
        "prompt_embeds": ("tokens+77", "joint_attention_dim"),
        "pooled_prompt_embeds": ("pooled_projection_dim",),
    }
    kohya_base_version = "sd3"
    kohya_naming = "native"
    kohya_module = "networks.lora_sd3"
    layouts = ("diffusers", "comfy", "kohya")
    split_names_in_comfy = True
    layouts_of_diffusers = ("diffusers",)
    # 3.5 medium; the sizes of the others are read from their files.
    reference_config = {
        "sample_size": 128,
        "num_layers": 24,
        "num_attention_heads": 24,
        "attention_head_dim": 64,
        "caption_projection_dim": 1536,
        "pos_embed_max_size": 384,
        "dual_attention_layers": list(range(13)),
        "qk_norm": "rms_norm",
    }
    native_layers = (
        *(
            (f"joint_blocks.#.x_block.{attn}.{native}", " ".join(f"transformer_blocks.#.{attn}.{one}" for one in ours))
            for attn in ("attn", "attn2")
            for native, ours in (
                ("qkv", ("to_q", "to_k", "to_v")),
                ("proj", ("to_out.0",)),
                ("ln_q", ("norm_q",)),
                ("ln_k", ("norm_k",)),
            )
        ),
        (
            "joint_blocks.#.context_block.attn.qkv",
            " ".join(f"transformer_blocks.#.attn.add_{one}_proj" for one in ("q", "k", "v")),
        ),
        ("joint_blocks.#.context_block.attn.proj", "transformer_blocks.#.attn.to_add_out"),
        ("joint_blocks.#.context_block.attn.ln_q", "transformer_blocks.#.attn.norm_added_q"),
        ("joint_blocks.#.context_block.attn.ln_k", "transformer_blocks.#.attn.norm_added_k"),
        *(
            row
            for native, suffix in (("x", ""), ("context", "_context"))
            for row in (
                (f"joint_blocks.#.{native}_block.adaLN_modulation.1", f"transformer_blocks.#.norm1{suffix}.linear"),
                (f"joint_blocks.#.{native}_block.mlp.fc1", f"transformer_blocks.#.ff{suffix}.net.0.proj"),
                (f"joint_blocks.#.{native}_block.mlp.fc2", f"transformer_blocks.#.ff{suffix}.net.2"),
            )
        ),
        ("t_embedder.mlp.0", "time_text_embed.timestep_embedder.linear_1"),
        ("t_embedder.mlp.2", "time_text_embed.timestep_embedder.linear_2"),
        ("y_embedder.mlp.0", "time_text_embed.text_embedder.linear_1"),
        ("y_embedder.mlp.2", "time_text_embed.text_embedder.linear_2"),
        ("context_embedder", "context_embedder"),
        ("x_embedder.proj", "pos_embed.proj"),
        ("pos_embed", "pos_embed.pos_embed"),
        ("final_layer.linear", "proj_out"),
        ("final_layer.adaLN_modulation.1", "norm_out.linear"),
    )
    # A ControlNet has no final layer, and inpainting models take more channels than they give.
    single_file = {
        "has": ("joint_blocks.0.context_block.attn.qkv.weight",),
        "shapes": {"x_embedder.proj.weight": (None, None, None, None)},
        "in_is_out": ("x_embedder.proj.weight", "final_layer.linear.weight"),
    }

    @property
    def modelspec_architecture(self) -> str:
        """Each size has a name of its own."""
        config = self.denoiser_config()
        if not config.get("qk_norm"):
            return "stable-diffusion-3-medium"
        return f"stable-diffusion-3-5-{'medium' if config.get('dual_attention_layers') else 'large'}"

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        with torch.no_grad():
            embeds_BLD, _, pooled_BD, _ = self.text_pipeline.encode_prompt(
                prompts,
                None,
                None,
                device=self.device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_sequence_length,
            )
        pairs = zip(embeds_BLD.to(self.dtype), pooled_BD.to(self.dtype), strict=True)
        return [{"prompt_embeds": e_LD.clone(), "pooled_prompt_embeds": p_D.clone()} for e_LD, p_D in pairs]

    def encode_with(self, pipeline: Any, prompts: list[str], cond: Cond) -> Cond:
        clips = [pipeline._get_clip_prompt_embeds(prompts, 1, self.device, None, index) for index in (0, 1)]
        embeds_BLD, pooled_BD = (torch.cat(each, dim=-1).to(self.dtype) for each in zip(*clips, strict=True))
        # What the CLIPs say comes first, padded to the width of T5, and T5's own words behind it.
        before_BLD = cond["prompt_embeds"].to(embeds_BLD.device)
        width, length = before_BLD.shape[-1], embeds_BLD.shape[1]
        embeds_BLD = nn.functional.pad(embeds_BLD, (0, width - embeds_BLD.shape[-1]))
        embeds_BLD = torch.cat([embeds_BLD, before_BLD[:, length:]], dim=1)
        return {**cond, "prompt_embeds": embeds_BLD, "pooled_prompt_embeds": pooled_BD}

    def token_limit(self, name: str) -> int:
        limit = self.tokenizer(name).model_max_length
        return min(256, limit) if name == "tokenizer_3" else limit  # trained with 77 and 256 (3.5's model cards)

    @property
    def max_sequence_length(self) -> int:
        """T5 tokens that a prompt is padded or cut to; what the pipeline calls so."""
        return self.token_limit("tokenizer_3")

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        to = {"device": noisy_BCHW.device, "dtype": self.dtype}
        return denoiser(
            hidden_states=noisy_BCHW.to(self.dtype),
            timestep=t_B.to(noisy_BCHW.device) * 1000,  # sigma, as the scheduler's 1000 training steps count it
            encoder_hidden_states=cond["prompt_embeds"].to(**to),
            pooled_projections=cond["pooled_prompt_embeds"].to(**to),
            return_dict=False,
        )[0]

    def seq_len(self, latent_hw: tuple[int, int]) -> int:
        return (latent_hw[0] // 2) * (latent_hw[1] // 2)

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        inputs = {key: cond[key][None] for key in ("prompt_embeds", "pooled_prompt_embeds")}
        if negative is not None:
            inputs |= {f"negative_{key}": negative[key][None] for key in ("prompt_embeds", "pooled_prompt_embeds")}
        return {k: v.to(self.device, self.dtype) for k, v in inputs.items()}

    def usual_guidance(self) -> float:
        if self._is_turbo():
            return 1.0
        # of the model card's example
        return 4.5 if self.denoiser_config().get("dual_attention_layers") else self.default_guidance

    def _is_turbo(self) -> bool:
        # Turbo has the files of 3.5 large, and nothing but their name tells.
        name = str(self.checkpoint or self.folder)
        return bool(re.search(r"3\.?5[-_. ]?large[-_. ]?turbo", name, re.IGNORECASE))

    def caveats(self) -> list[str]:
        if not self._is_turbo():
            return []
        return [
            "Stable Diffusion 3.5 large Turbo is distilled to draw in 4 steps, which plain training undoes: train on "
            "3.5 large and draw with Turbo, or train few steps at a low rate"
        ]

    @classmethod
    def without_adapter(cls, denoiser: nn.Module) -> set[str]:
        # Nothing follows the text in the last block: its queries are for nothing.
        last = len(denoiser.transformer_blocks) - 1
        return {f"transformer_blocks.{last}.attn.add_q_proj", *_swapped(last)}

    @classmethod
    def halves_swapped(cls, denoiser_config: Mapping[str, Any]) -> set[str]:
        return set(_swapped(denoiser_config.get("num_layers", cls.reference_config["num_layers"]) - 1))

    def denoiser_config(self) -> dict[str, Any]:
        found = ModelFamily.denoiser_config(self)
        return found | _sizes(native_header(self._header), found) if self.checkpoint else found

    def convert_checkpoint(self, header: Header) -> Conversion:
        conversion = ModelFamily.convert_checkpoint(self, header)
        for layer in _swapped(self.denoiser_config()["num_layers"] - 1):
            for name in (f"{layer}.weight", f"{layer}.bias"):
                conversion[name] = (conversion[name][0], _halves_swapped)
        return conversion

    @classmethod
    def _tiny_pipeline(cls) -> StableDiffusion3Pipeline:
        clip, t5 = _miniature.clip_tokenizer(), _miniature.t5_tokenizer()
        t5.model_max_length = 112  # more than the CLIPs read of a prompt, as in the model
        transformer = SD3Transformer2DModel(
            sample_size=16,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=80,
            caption_projection_dim=32,
            pooled_projection_dim=80,
            pos_embed_max_size=32,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        return StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_miniature.vae(scaling_factor=1.5305, shift_factor=0.0609, quant_conv=False),
            text_encoder=_miniature.clip_text(clip, width=32, projection=32),
            tokenizer=clip,
            text_encoder_2=_miniature.clip_text(clip, width=48, projection=48),
            tokenizer_2=clip,
            text_encoder_3=_miniature.t5_text(t5, width=80),
            tokenizer_3=t5,
        )


def _swapped(last: int) -> tuple[str, str]:
    """The norms that end a stream: the original's give (shift, scale), those of diffusers (scale, shift).

    A LoRA of one is therefore no LoRA of the other, and they get no adapter.
    """
    return f"transformer_blocks.{last}.norm1_context.linear", "norm_out.linear"


def _halves_swapped(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


def _sizes(native: Header, config: dict[str, Any]) -> dict[str, Any]:
    """What a single file's shapes tell of the denoiser's config: 3 medium, 3.5 medium and 3.5 large differ in it."""
    blocks = [key.split(".") for key in native if key.startswith("joint_blocks.")]
    width = native["x_embedder.proj.weight"][0]
    return {
        "num_layers": 1 + max(int(block[1]) for block in blocks),
        "num_attention_heads": width // config.get("attention_head_dim", 64),
        "caption_projection_dim": native["context_embedder.weight"][0],
        "dual_attention_layers": sorted({int(block[1]) for block in blocks if block[3] == "attn2"}),
        "qk_norm": "rms_norm" if "joint_blocks.0.x_block.attn.ln_q.weight" in native else None,
        "pos_embed_max_size": round(native["pos_embed"][1] ** 0.5),
    }
