"""Sana: a DiT of 0.6 or 1.6 B parameters with linear attention, on latents of a 32nd of the image's sides.

Xie et al. 2024, "SANA: Efficient High-Resolution Image Synthesis with Linear Diffusion Transformers". A deep
compression autoencoder gives 32 channels; the feed-forward layers are convolutions, nearly half of all parameters; and
Gemma 2 reads the prompt behind a long instruction (sect. 2.3), of which the denoiser sees the first and the last token
only. Trained with flow matching and drawn with DPM-Solver++.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
from torch import Tensor, nn

from lora_fp8.config import UserError
from lora_fp8.objectives import FlowMatching

from . import _gemma
from ._files import Header, native_header
from .base import Cond, Conversion, ModelFamily, padded

CROSS_HEADS = {1152: 16, 2240: 20}
"""Width of a released model -> heads of its cross-attention, which no shape tells."""
INSTRUCTION: list[str] = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
BEFORE = "\n".join(INSTRUCTION)
"""What the pipeline puts before a prompt that it follows."""


class Family(ModelFamily):
    name = "sana"
    title = "Sana"
    example_base = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
    pipeline_class = "SanaPipeline"
    denoiser_class = "SanaTransformer2DModel"
    denoiser_name = "transformer"
    text_parts = {"tokenizer": "GemmaTokenizerFast", "text_encoder": "Gemma2Model"}
    objective = FlowMatching
    # Attention, and the 1x1 convolutions of the feed-forward; the depthwise one between them has nothing to factorise.
    adapter_targets = (
        *(f"{attn}.{proj}" for attn in ("attn1", "attn2") for proj in ("to_q", "to_k", "to_v", "to_out.0")),
        *("ff.conv_inverted", "ff.conv_point"),
    )
    keep_precise = ("patch_embed", "time_embed", "caption_projection", "^proj_out")
    bucket_multiple = 32
    native_resolution = 1024
    default_guidance = 4.5
    text_shapes = {"prompt_embeds": ("tokens", "caption_channels")}
    vae_class = "AutoencoderDC"
    config_marks = {"guidance_embeds": False}  # Sana-Sprint, which has another pipeline, takes the guidance as an input
    modelspec_architecture = "sana"
    kohya_base_version = "sana"
    kohya_naming = ""
    layouts = ("diffusers",)
    call_options = {"use_resolution_binning": False}  # else it draws at the nearest of its sizes and crops
    reference_config = {"num_layers": 20, "sample_size": 32}
    native_layers = (
        ("x_embedder", "patch_embed"),
        ("t_embedder.mlp.0", "time_embed.emb.timestep_embedder.linear_1"),
        ("t_embedder.mlp.2", "time_embed.emb.timestep_embedder.linear_2"),
        ("t_block.1", "time_embed.linear"),
        ("y_embedder.y_proj.fc1", "caption_projection.linear_1"),
        ("y_embedder.y_proj.fc2", "caption_projection.linear_2"),
        ("attention_y_norm", "caption_norm"),
        ("blocks.#.attn.qkv", " ".join(f"transformer_blocks.#.attn1.to_{x}" for x in "qkv")),
        ("blocks.#.attn.proj", "transformer_blocks.#.attn1.to_out.0"),
        ("blocks.#.cross_attn.q_linear", "transformer_blocks.#.attn2.to_q"),
        ("blocks.#.cross_attn.kv_linear", "transformer_blocks.#.attn2.to_k transformer_blocks.#.attn2.to_v"),
        ("blocks.#.cross_attn.proj", "transformer_blocks.#.attn2.to_out.0"),
        *(  # of Sana 1.5
            (f"blocks.#.{theirs}.{x}_norm", f"transformer_blocks.#.{ours}.norm_{x}")
            for theirs, ours in (("attn", "attn1"), ("cross_attn", "attn2"))
            for x in "qk"
        ),
        *(
            (f"blocks.#.mlp.{part}_conv.conv", f"transformer_blocks.#.ff.conv_{part}")
            for part in ("inverted", "depth", "point")
        ),
        ("blocks.#.scale_shift_table", "transformer_blocks.#.scale_shift_table"),
        ("final_layer.linear", "proj_out"),
        ("final_layer.scale_shift_table", "scale_shift_table"),
    )
    tiny_hw = (32, 64)
    # Sana-Sprint embeds the guidance.
    single_file = {
        "has": ("blocks.0.cross_attn.kv_linear.weight", "blocks.0.mlp.inverted_conv.conv.weight"),
        "lacks": ("cfg_embedder",),
    }

    @torch.no_grad()
    def encode_images(self, pixels_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("encode_images before load_encoders")
        latents_BCHW = self.vae.encode(pixels_BCHW.to(self.device, torch.float32)).latent
        return latents_BCHW * self.vae.config.scaling_factor

    @torch.no_grad()
    def decode_latents(self, latents_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("decode_latents before load_vae")
        latents_BCHW = latents_BCHW.to(self.device, torch.float32) / self.vae.config.scaling_factor
        return self.vae.decode(latents_BCHW, return_dict=False)[0]

    def negative_text(self, prompt: str) -> str:
        return _gemma.negative_text(prompt)

    def as_read(self, prompt: str) -> tuple[str, str]:
        # A negative prompt has no instruction before it, and as many tokens as are left to a prompt behind one.
        return BEFORE, prompt.removeprefix(_gemma.AVOIDED).lower().strip()

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        options = {"device": self.device, "complex_human_instruction": INSTRUCTION}
        embeds = [_gemma.encode(self.text_pipeline, prompt, **options) for prompt in prompts]
        return [{"prompt_embeds": embeds_LD.to(self.dtype)} for embeds_LD in embeds]

    def token_limit(self, name: str) -> int:
        # The pipeline's own sum: 300 tokens of a prompt, two of which the instruction counts as well.
        return len(self.tokenizer(name).encode(BEFORE)) + 300 - 2

    def collate(self, conds: list[Cond]) -> Cond:
        return padded(conds, "prompt_embeds")

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        device = noisy_BCHW.device
        return denoiser(
            noisy_BCHW.to(self.dtype),
            encoder_hidden_states=cond["prompt_embeds"].to(device, self.dtype),
            encoder_attention_mask=cond["prompt_embeds_mask"].to(device, self.dtype),
            timestep=t_B.to(device) * 1000 * denoiser.config.timestep_scale,
            return_dict=False,
        )[0]

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        # Both padded to one length, which the pipeline insists on.
        both = padded([cond] if negative is None else [cond, negative], "prompt_embeds")
        embeds_BLD, mask_BL = both["prompt_embeds"].to(self.device, self.dtype), both["prompt_embeds_mask"]
        mask_BL = mask_BL.to(self.device, self.dtype)
        inputs = {"prompt_embeds": embeds_BLD[:1], "prompt_attention_mask": mask_BL[:1]}
        if negative is not None:
            inputs |= {"negative_prompt_embeds": embeds_BLD[1:], "negative_prompt_attention_mask": mask_BL[1:]}
            inputs |= {"negative_prompt": None}  # its default is a text, and both at once are refused
        return inputs

    def denoiser_config(self) -> dict[str, Any]:
        found = ModelFamily.denoiser_config(self)
        if not self.checkpoint:
            return found
        # What 0.6, 1.6 and 4.8 B, and Sana and Sana 1.5, differ in; the components may be of another.
        native = native_header(self._header)
        width = native["x_embedder.proj.weight"][0]
        if found.get("cross_attention_dim", 2240) != width:
            if width not in CROSS_HEADS:
                raise UserError(
                    f"{self.checkpoint} is a Sana of width {width}, of which the number of heads is not known: put its "
                    f"{self.denoiser_name}/config.json into {self.folder}"
                )
            heads = CROSS_HEADS[width]
            found |= {"num_cross_attention_heads": heads, "cross_attention_head_dim": width // heads}
            found |= {"cross_attention_dim": width, "num_attention_heads": width // found.get("attention_head_dim", 32)}
        found["num_layers"] = sum(key.endswith(".cross_attn.kv_linear.weight") for key in native)
        found["qk_norm"] = "rms_norm_across_heads" if "blocks.0.attn.q_norm.weight" in native else None
        return found

    def convert_checkpoint(self, header: Header) -> Conversion:
        # A table that older versions did not compute, and what stood for a caption that was dropped in training.
        beside = ("pos_embed", "y_embedder.y_embedding")
        return ModelFamily.convert_checkpoint(self, {k: v for k, v in header.items() if not k.endswith(beside)})

    @classmethod
    def _tiny_pipeline(cls) -> SanaPipeline:
        tokenizer = _gemma.tokenizer(BEFORE)
        transformer = SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=4,
            attention_head_dim=16,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=32,
            cross_attention_dim=64,
            caption_channels=32,
            sample_size=32,
        )
        vae = AutoencoderDC(
            in_channels=3,
            latent_channels=4,
            attention_head_dim=4,
            encoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
            decoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
            encoder_block_out_channels=(8, 8, 16),
            decoder_block_out_channels=(8, 8, 16),
            encoder_layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            encoder_qkv_multiscales=((), (), (5,)),
            decoder_qkv_multiscales=((), (), (5,)),
            upsample_block_type="interpolate",
            downsample_block_type="Conv",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41407,
        )
        return SanaPipeline(
            tokenizer=tokenizer,
            text_encoder=_gemma.text(tokenizer),
            vae=vae,
            transformer=transformer,
            scheduler=DPMSolverMultistepScheduler(
                flow_shift=3.0,
                use_flow_sigmas=True,
                prediction_type="flow_prediction",
                algorithm_type="dpmsolver++",
                solver_order=2,
                final_sigmas_type="zero",
            ),
        )
