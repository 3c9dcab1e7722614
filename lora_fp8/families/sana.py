"""Sana: a DiT of 0.6 or 1.6 B parameters with linear attention, on latents with a 32nd of the image's sides.

Xie et al. 2024, "SANA: Efficient High-Resolution Image Synthesis with Linear Diffusion Transformers". A deep
compression autoencoder gives 32 channels, and the feed-forward layers are convolutions, nearly half of all parameters.
Gemma 2 reads the prompt after a long instruction (sect. 2.3), of which the denoiser sees the first and the last token
only. Sana is trained with flow matching and sampled with DPM-Solver++.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Message, UserError
from ..lora_files import naming
from . import _gemma
from ._files import Header, list_blocks
from .base import Cond, Inputs, ModelFamily

if TYPE_CHECKING:
    from torch import Tensor

CROSS_HEADS = {1152: 16, 2240: 20}
"""Width of a released model -> heads of its cross-attention, which no tensor's shape shows."""


class Family(ModelFamily):
    name = "sana"
    title = "Sana"
    example_base = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
    pipeline_class = "SanaPipeline"
    denoiser_class = "SanaTransformer2DModel"
    text_widths = {"caption_channels": "text_encoder.hidden_size"}
    text_millions = (2614, 590)  # Gemma 2 2B
    text_parts = {"tokenizer": "GemmaTokenizerFast", "text_encoder": "Gemma2Model"}
    text_arguments = {"mask": "prompt_attention_mask"}
    text_shapes = {"prompt_embeds": ("tokens", "caption_channels")}
    prompts_vary = True
    # Attention and the 1x1 convolutions of the feed-forward; a low rank saves nothing on the depthwise one between
    # them.
    adapter_targets = (
        *(f"{attn}.{proj}" for attn in ("attn1", "attn2") for proj in ("to_q", "to_k", "to_v", "to_out.0")),
        *("ff.conv_inverted", "ff.conv_point"),
    )
    keep_precise = ("patch_embed", "time_embed", "caption_projection", "^proj_out")
    bucket_multiple = 32
    native_resolution = 1024  # Sana_1600M_1024px
    default_guidance = 4.5  # SanaPipeline; model card
    train_shift = 3.0  # NVlabs/Sana configs/sana_config/1024ms: flow_shift 3, logit_normal, mean 0, std 1
    vae_class = "AutoencoderDC"
    config_marks = {"guidance_embeds": False}  # Sana-Sprint, which has another pipeline, takes the guidance as an input
    modelspec_architecture = "sana"
    kohya_base_version = "sana"
    kohya_naming = ""
    layouts = ("diffusers",)
    call_options = {"use_resolution_binning": False}  # otherwise it generates the nearest of its sizes and crops
    reference_config = {"num_layers": 20, "sample_size": 32}
    # Only Sana 1.5 has norms of queries and keys.
    native_layers = naming.parse_table("""
        x_embedder = patch_embed
        t_embedder.mlp.0 = time_embed.emb.timestep_embedder.linear_1
        t_embedder.mlp.2 = time_embed.emb.timestep_embedder.linear_2
        t_block.1 = time_embed.linear
        y_embedder.y_proj.fc1 = caption_projection.linear_1
        y_embedder.y_proj.fc2 = caption_projection.linear_2
        attention_y_norm = caption_norm
        blocks.# = transformer_blocks.#
            attn.qkv = attn1.to_q attn1.to_k attn1.to_v
            attn.proj = attn1.to_out.0
            attn.q_norm = attn1.norm_q
            attn.k_norm = attn1.norm_k
            cross_attn.q_linear = attn2.to_q
            cross_attn.kv_linear = attn2.to_k attn2.to_v
            cross_attn.proj = attn2.to_out.0
            cross_attn.q_norm = attn2.norm_q
            cross_attn.k_norm = attn2.norm_k
            mlp.inverted_conv.conv = ff.conv_inverted
            mlp.depth_conv.conv = ff.conv_depth
            mlp.point_conv.conv = ff.conv_point
            scale_shift_table
        final_layer.linear = proj_out
        final_layer.scale_shift_table = scale_shift_table
    """)
    # A table that older versions stored, and the embedding of captions dropped in training.
    beside_denoiser = ("pos_embed", "y_embedder.y_embedding")
    # Sana-Sprint embeds the guidance.
    single_file = {
        "has": ("blocks.0.cross_attn.kv_linear.weight", "blocks.0.mlp.inverted_conv.conv.weight"),
        "lacks": ("cfg_embedder",),
    }

    def get_encoding_options(self) -> dict[str, Any]:
        """Return the instruction before a prompt, which the pipeline has as the default of its call only."""
        return {"complex_human_instruction": _get_instruction()}

    make_negative_text, encode_prompts = _gemma.make_negative_text, _gemma.encode_prompts

    def as_read(self, prompt: str) -> tuple[str, str]:
        # A negative prompt has no instruction, but the same token limit as a prompt after one.
        return get_text_before_prompt(), prompt.removeprefix(_gemma.AVOIDED).lower().strip()

    def compute_token_limit(self, name: str) -> int:
        # The pipeline's own sum: 300 tokens of a prompt, two of which the instruction's count includes.
        return len(self.load_tokenizer(name).encode(get_text_before_prompt())) + 300 - 2

    def make_inputs(self, denoiser: Any, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        return {
            "hidden_states": noisy_BCHW,
            "encoder_hidden_states": cond["prompt_embeds"],
            "encoder_attention_mask": cond["prompt_embeds_mask"].to(self.dtype),
            "timestep": t_B * 1000 * denoiser.config.timestep_scale,
        }

    def make_pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        inputs = ModelFamily.make_pipeline_inputs(self, cond, negative)
        # The pipeline's default is a text, which it refuses together with embeddings.
        return inputs if negative is None else inputs | {"negative_prompt": None}

    @classmethod
    def infer_denoiser_sizes(cls, native: Header, config: Mapping[str, Any], file: Path) -> dict[str, Any]:
        # 0.6, 1.6 and 4.8 B, and Sana and Sana 1.5, differ in these.
        sizes = {
            "num_layers": len(list_blocks(native, "blocks.#.cross_attn.kv_linear.weight")),
            "caption_channels": native["y_embedder.y_proj.fc1.weight"][1],
            "qk_norm": "rms_norm_across_heads" if "blocks.0.attn.q_norm.weight" in native else None,
        }
        width = native["x_embedder.proj.weight"][0]
        if config.get("cross_attention_dim", 2240) == width:
            return sizes
        if width not in CROSS_HEADS:
            raise UserError(
                Message(
                    "{file} is a Sana of width {width}, whose number of heads is unknown: set model.components to a "
                    "folder with its {name}",
                    file=file,
                    width=width,
                    name=f"{cls.denoiser_name}/config.json",
                )
            )
        heads = CROSS_HEADS[width]
        sizes |= {"num_cross_attention_heads": heads, "cross_attention_head_dim": width // heads}
        sizes |= {"cross_attention_dim": width, "num_attention_heads": width // config.get("attention_head_dim", 32)}
        return sizes


def _get_instruction() -> list[str]:
    from diffusers import SanaPipeline

    return inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default


def get_text_before_prompt() -> str:
    """Return the text that the pipeline puts before a positive prompt."""
    return "\n".join(_get_instruction())
