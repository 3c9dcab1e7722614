"""Chroma1: FLUX.1-schnell made smaller and trained anew, 8.9 B parameters, conditioned on T5-XXL alone.

Lodestone Rock 2025 (https://huggingface.co/lodestones/Chroma1-HD). FLUX's modulation layers are gone: one small
network, `distilled_guidance_layer`, answers all scales and shifts from the timestep. It is guided by a negative prompt,
and its transformer sees the tokens of a prompt and one padding token after them, no more.

diffusers 0.42 hands its mask over as numbers, which attention adds instead of masking with (its issue 13619), and drops
it from the single-stream blocks under gradient checkpointing. Here prompts come without padding, and the mask that a
batch of different lengths needs is one of true and false, everywhere: as in the model's own code, and in ComfyUI.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import diffusers
import torch
from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from lora_fp8.objectives import FlowMatching

from . import _miniature
from .base import Cond, ModelFamily, padded


class Family(ModelFamily):
    name = "chroma"
    title = "Chroma1"
    example_base = "lodestones/Chroma1-HD"
    pipeline_class = "ChromaPipeline"
    denoiser_class = "ChromaTransformer2DModel"
    denoiser_name = "transformer"
    text_parts = {"tokenizer": "T5TokenizerFast", "text_encoder": "T5EncoderModel"}
    objective = FlowMatching
    adapter_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *(f"{ff}.net.{layer}" for ff in ("ff", "ff_context") for layer in ("0.proj", "2")),
        *("proj_mlp", "proj_out"),  # of the single-stream blocks
    )
    adapter_exclude = ("^proj_out",)  # the last layer of the whole model, which has the same name
    # Embedders and the output, and the network that every block's scales and shifts come from.
    keep_precise = ("x_embedder", "context_embedder", "distilled_guidance_layer", "^proj_out")
    bucket_multiple = 16
    native_resolution = 1024
    default_guidance = 3.0
    text_shapes = {"prompt_embeds": ("tokens", "joint_attention_dim")}
    modelspec_architecture = "chroma"
    kohya_base_version = "chroma"
    kohya_naming = "bfl_flux"
    kohya_module = "networks.lora_flux"
    layouts = ("diffusers", "comfy", "kohya")
    layouts_of_diffusers = ("diffusers", "kohya")
    converter_width = 3072
    auto_layouts = ("diffusers", "kohya")  # Forge reads kohya's
    reference_config = {"in_channels": 64, "num_layers": 19, "num_single_layers": 38}
    native_layers = (
        *(
            row
            for stream, q, k, v, out, added, ff in (
                ("img", "to_q", "to_k", "to_v", "to_out.0", "", "ff"),
                ("txt", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "added_", "ff_context"),
            )
            for row in (
                (
                    f"double_blocks.#.{stream}_attn.qkv",
                    " ".join(f"transformer_blocks.#.attn.{one}" for one in (q, k, v)),
                ),
                (f"double_blocks.#.{stream}_attn.proj", f"transformer_blocks.#.attn.{out}"),
                (
                    f"double_blocks.#.{stream}_attn.norm.query_norm.scale",
                    f"transformer_blocks.#.attn.norm_{added}q.weight",
                ),
                (
                    f"double_blocks.#.{stream}_attn.norm.key_norm.scale",
                    f"transformer_blocks.#.attn.norm_{added}k.weight",
                ),
                (f"double_blocks.#.{stream}_mlp.0", f"transformer_blocks.#.{ff}.net.0.proj"),
                (f"double_blocks.#.{stream}_mlp.2", f"transformer_blocks.#.{ff}.net.2"),
            )
        ),
        (
            "single_blocks.#.linear1",
            " ".join(
                f"single_transformer_blocks.#.{one}" for one in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")
            ),
        ),
        ("single_blocks.#.linear2", "single_transformer_blocks.#.proj_out"),
        ("single_blocks.#.norm.query_norm.scale", "single_transformer_blocks.#.attn.norm_q.weight"),
        ("single_blocks.#.norm.key_norm.scale", "single_transformer_blocks.#.attn.norm_k.weight"),
        ("distilled_guidance_layer.layers.#.in_layer", "distilled_guidance_layer.layers.#.linear_1"),
        ("distilled_guidance_layer.layers.#.out_layer", "distilled_guidance_layer.layers.#.linear_2"),
        ("distilled_guidance_layer.norms.#.scale", "distilled_guidance_layer.norms.#.weight"),
        ("distilled_guidance_layer.in_proj", "distilled_guidance_layer.in_proj"),
        ("distilled_guidance_layer.out_proj", "distilled_guidance_layer.out_proj"),
        ("txt_in", "context_embedder"),
        ("img_in", "x_embedder"),
        ("final_layer.linear", "proj_out"),
    )
    # Radiance works on pixels, and has no final layer of this kind.
    single_file = {
        "has": ("distilled_guidance_layer.in_proj.weight",),
        "in_is_out": ("img_in.weight", "final_layer.linear.weight"),
    }

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        with torch.no_grad():
            embeds_BLD, _, mask_BL, *_ = self.text_pipeline.encode_prompt(
                prompts,
                device=self.device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_sequence_length,
            )
        pairs = zip(embeds_BLD.to(self.dtype), mask_BL.bool(), strict=True)
        return [{"prompt_embeds": embeds_LD[mask_L].clone()} for embeds_LD, mask_L in pairs]

    def collate(self, conds: list[Cond]) -> Cond:
        return padded(conds, "prompt_embeds")

    def token_limit(self, name: str) -> int:
        return min(512, self.tokenizer(name).model_max_length)

    @property
    def max_sequence_length(self) -> int:
        """T5 tokens that a prompt is cut to; what the pipeline calls so."""
        return self.token_limit("tokenizer")

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        num, _, height, width = noisy_BCHW.shape
        device = noisy_BCHW.device
        text_BL = cond["prompt_embeds_mask"].to(device)
        packed_BSD = self.pack(noisy_BCHW.to(self.dtype))
        mask_BS = None
        if not text_BL.all():
            mask_BS = torch.cat([text_BL, text_BL.new_ones(packed_BSD.shape[:2])], dim=1)
        with _mask_kept(denoiser, mask_BS):
            pred_BSD = denoiser(
                hidden_states=packed_BSD,
                timestep=t_B.to(device),  # sigma in [0, 1]: the transformer multiplies by 1000 itself
                encoder_hidden_states=cond["prompt_embeds"].to(device, self.dtype),
                txt_ids=torch.zeros(text_BL.shape[1], 3, device=device),
                img_ids=ChromaPipeline._prepare_latent_image_ids(num, height // 2, width // 2, device, torch.float32),
                attention_mask=mask_BS,
                return_dict=False,
            )[0]
        return self.unpack(pred_BSD, (height, width))

    def pack(self, latents_BCHW: Tensor) -> Tensor:
        return ChromaPipeline._pack_latents(latents_BCHW, *latents_BCHW.shape)

    def unpack(self, packed: Tensor, latent_hw: tuple[int, int]) -> Tensor:
        # The helper takes pixels; with a scale factor of 1 they are latents.
        return ChromaPipeline._unpack_latents(packed, *latent_hw, vae_scale_factor=1)

    def seq_len(self, latent_hw: tuple[int, int]) -> int:
        return (latent_hw[0] // 2) * (latent_hw[1] // 2)

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        inputs = {}
        for prefix, one in (("", cond), ("negative_", negative)):
            if one is not None:
                inputs[f"{prefix}prompt_embeds"] = one["prompt_embeds"][None].to(self.device, self.dtype)
                inputs[f"{prefix}prompt_attention_mask"] = torch.ones(
                    1, len(one["prompt_embeds"]), dtype=torch.bool, device=self.device
                )
        return inputs

    def usual_guidance(self) -> float:
        return 1.0 if self._is_flash() else self.default_guidance

    def _is_flash(self) -> bool:
        # It has the files of the others, and nothing but their name tells.
        name = self.checkpoint.name if self.checkpoint else str(self.folder)
        return bool(re.search(r"chroma[^/]*flash(?![a-z])", name, re.IGNORECASE))

    def caveats(self) -> list[str]:
        if not self._is_flash():
            return []
        return [
            "this is Chroma1-Flash by its name, made to draw in few steps without guidance, which plain training "
            "undoes: train on Chroma1-HD and draw with Flash"
        ]

    @classmethod
    def mend_(cls, pipeline: diffusers.DiffusionPipeline) -> None:
        extended = pipeline._prepare_attention_mask
        # 0 and 1 as numbers are added to the attention's logits and mask nothing.
        pipeline._prepare_attention_mask = lambda **given: _as_bool(extended(**given))

    def empty_denoiser(self) -> nn.Module:
        with torch.device("meta"):
            denoiser = ChromaTransformer2DModel.from_config(self.denoiser_config())
        # A table of its own that the constructor computes: no file holds it.
        lost = denoiser.time_text_embed
        denoiser.time_text_embed = type(lost)(lost.time_proj.num_channels, len(lost.mod_proj))
        return denoiser

    @classmethod
    def _tiny_pipeline(cls) -> ChromaPipeline:
        t5 = _miniature.t5_tokenizer()
        transformer = ChromaTransformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=48,
            axes_dims_rope=(4, 6, 6),
            approximator_num_channels=16,
            approximator_hidden_dim=128,
            approximator_layers=2,
        )
        return ChromaPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
            vae=_miniature.vae(scaling_factor=0.3611, shift_factor=0.1159, quant_conv=False),
            text_encoder=_miniature.t5_text(t5, width=48),
            tokenizer=t5,
            transformer=transformer,
        )


def _as_bool(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.bool()


@contextmanager
def _mask_kept(denoiser: nn.Module, mask_BS: Tensor | None) -> Iterator[None]:
    """Inside, single-stream blocks under gradient checkpointing get the mask that diffusers forgets there."""
    checkpointed: Callable[..., Any] | None = getattr(denoiser, "_gradient_checkpointing_func", None)
    if mask_BS is None or checkpointed is None:
        yield
        return
    singles = set(denoiser.single_transformer_blocks)

    def with_mask(block: nn.Module, *args: Any) -> Any:
        # hidden states, modulation and rotary embedding are what it is given; the mask is the fourth
        return checkpointed(block, *args, *([mask_BS] if block in singles and len(args) == 3 else []))

    denoiser._gradient_checkpointing_func = with_mask
    try:
        yield
    finally:
        denoiser._gradient_checkpointing_func = checkpointed
