"""Krea 2: a 12.9 B single-stream DiT, conditioned on twelve layers of Qwen3-VL 4B, trained with rectified flow.

Krea 2026 (https://github.com/krea-ai/krea-2). The hidden states of twelve layers of the text encoder come in for every
token, and blocks of the transformer's own fuse them. Text has no positions, so that what pads a prompt, in the middle
of the chat template, is left out without a change. VAE and template are Qwen-Image's. One modulation of the timestep
serves all blocks. Krea 2 RAW is the model to train; Turbo is the same, distilled to 8 steps without guidance
(`is_distilled` in model_index.json, or the name of a single file).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Krea2Pipeline, Krea2Transformer2DModel
from torch import Tensor, nn

from lora_fp8.objectives import FlowMatching

from . import _files, _miniature, _qwen
from ._files import Header
from .base import Cond, Conversion, ModelFamily, padded

SUFFIX_TOKENS = 5
"""Tokens of the template behind the prompt, which have their places in `max_sequence_length`."""
TURBO_MU = 1.15
"""The shift parameter of Turbo, at any resolution; `Krea2Pipeline` says so."""


def _block(native: str, name: str) -> tuple[tuple[str, str], ...]:
    """Rows for one list of blocks."""
    layers = {"wq": "to_q", "wk": "to_k", "wv": "to_v", "wo": "to_out.0", "gate": "to_gate"}
    norms = {"attn.qknorm.qnorm": "attn.norm_q", "attn.qknorm.knorm": "attn.norm_k"}
    norms |= {"prenorm": "norm1", "postnorm": "norm2"}
    return (
        *((f"{native}.#.attn.{theirs}", f"{name}.#.attn.{ours}") for theirs, ours in layers.items()),
        *((f"{native}.#.{theirs}.scale", f"{name}.#.{ours}.weight") for theirs, ours in norms.items()),
        (f"{native}.#.mlp", f"{name}.#.ff"),
        (f"{native}.#.mod.lin", f"{name}.#.scale_shift_table"),
    )


class Family(ModelFamily):
    name = "krea2"
    title = "Krea 2"
    example_base = "krea/Krea-2-Raw"
    pipeline_class = "Krea2Pipeline"
    denoiser_class = "Krea2Transformer2DModel"
    denoiser_name = "transformer"
    text_parts = {"tokenizer": "Qwen2Tokenizer", "text_encoder": "Qwen3VLModel"}
    vae_class = "AutoencoderKLQwenImage"
    vae_marks = _qwen.VAE_MARKS
    objective = FlowMatching
    adapter_targets = (
        *(f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_gate", "to_out.0")),
        *(f"ff.{layer}" for layer in ("gate", "up", "down")),
    )
    adapter_exclude = ("text_fusion",)  # four blocks before image and text meet
    keep_precise = ("img_in", "txt_in", "time_embed", "text_fusion", "final_layer")
    modulation = ("time_mod_proj",)
    bucket_multiple = 16
    native_resolution = 1024
    default_guidance = 4.5  # 3.5 as its makers count: they add it to the answer, see `guidance_inputs`
    text_shapes = {"prompt_embeds": ("tokens", "num_text_layers", "text_hidden_dim")}
    modelspec_architecture = "Krea-2"
    kohya_base_version = "krea2"
    kohya_naming = "native"
    kohya_module = "networks.lora_krea2"
    layouts = ("comfy", "diffusers", "kohya")
    layouts_of_diffusers = ("diffusers", "comfy")
    native_layers = (
        *_block("blocks", "transformer_blocks"),
        *_block("txtfusion.layerwise_blocks", "text_fusion.layerwise_blocks"),
        *_block("txtfusion.refiner_blocks", "text_fusion.refiner_blocks"),
        ("txtfusion.projector", "text_fusion.projector"),
        ("first", "img_in"),
        ("tmlp.0", "time_embed.linear_1"),
        ("tmlp.2", "time_embed.linear_2"),
        ("tproj.1", "time_mod_proj"),
        ("txtmlp.0.scale", "txt_in.norm.weight"),
        ("txtmlp.1", "txt_in.linear_1"),
        ("txtmlp.3", "txt_in.linear_2"),
        ("last.linear", "final_layer.linear"),
        ("last.norm.scale", "final_layer.norm.weight"),
        ("last.modulation.lin", "final_layer.scale_shift_table"),
    )
    reference_config = {
        "in_channels": 64,
        "num_layers": 28,
        "attention_head_dim": 128,
        "num_attention_heads": 48,
        "num_key_value_heads": 12,
        "intermediate_size": 16384,
        "text_hidden_dim": 2560,
        "num_text_layers": 12,
    }
    single_file = {"has": ("txtfusion.projector.weight", "blocks.0.attn.wq.weight")}

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
        with torch.no_grad():
            embeds_BLND, mask_BL = self.text_pipeline.encode_prompt(
                prompts, device=self.device, max_sequence_length=self.max_sequence_length
            )
        pairs = zip(embeds_BLND.to(self.dtype), mask_BL, strict=True)
        return [{"prompt_embeds": embeds_LND[mask_L]} for embeds_LND, mask_L in pairs]

    def collate(self, conds: list[Cond]) -> Cond:
        return padded(conds, "prompt_embeds")

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the prompt and of the template's end: the pipeline's default, unless the tokenizer says less."""
        return min(512, self.tokenizer("tokenizer").model_max_length)

    def token_limit(self, name: str) -> int:
        return self.max_sequence_length - SUFFIX_TOKENS

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        height, width = noisy_BCHW.shape[-2:]
        device = noisy_BCHW.device
        embeds_BLND, mask_BL = cond["prompt_embeds"].to(device, self.dtype), cond["prompt_embeds_mask"].to(device)
        pred_BSD = denoiser(
            hidden_states=self.pack(noisy_BCHW.to(self.dtype)),
            encoder_hidden_states=embeds_BLND,
            timestep=t_B.to(device),  # sigma in [0, 1]: the transformer multiplies by 1000 itself
            position_ids=Krea2Pipeline.prepare_position_ids(embeds_BLND.shape[1], height // 2, width // 2, device),
            encoder_attention_mask=None if mask_BL.all() else mask_BL,
            return_dict=False,
        )[0]
        return self.unpack(pred_BSD, (height, width))

    # Qwen-Image's patches; the pipeline's own helpers are no static methods.
    def pack(self, latents_BCHW: Tensor) -> Tensor:
        return _qwen.pack(latents_BCHW)

    def unpack(self, packed: Tensor, latent_hw: tuple[int, int]) -> Tensor:
        return _qwen.unpack(packed, latent_hw)

    def seq_len(self, latent_hw: tuple[int, int]) -> int:
        return (latent_hw[0] // 2) * (latent_hw[1] // 2)

    def scheduler_config(self) -> dict[str, Any]:
        found = ModelFamily.scheduler_config(self)
        return found | {"base_shift": TURBO_MU, "max_shift": TURBO_MU} if self._is_turbo() else found

    def guidance_inputs(self, guidance: float) -> dict[str, Any]:
        # The pipeline adds this times the difference to the answer, so that 0 is without guidance.
        return {"guidance_scale": guidance - 1}

    def usual_guidance(self) -> float:
        return 1.0 if self._is_turbo() else self.default_guidance

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        return _qwen.pipeline_inputs(self, cond, negative)

    def caveats(self) -> list[str]:
        if not self._is_turbo():
            return []
        return [
            "this is Krea 2 Turbo, distilled to 8 steps: plain training undoes that; its makers advise to train on "
            "Krea 2 RAW and to draw with Turbo"
        ]

    def _is_turbo(self) -> bool:
        named = self.distilled_by_name()
        if named is not None:
            return named
        index = self.folder / "model_index.json"
        return bool(_files.read_json(index).get("is_distilled")) if index.is_file() else False

    @property
    def pipeline_options(self) -> dict[str, Any]:
        """By it the pipeline chooses its shift; the index may be that of the other model."""
        return {"is_distilled": self._is_turbo()}

    def convert_checkpoint(self, header: Header) -> Conversion:
        found = ModelFamily.convert_checkpoint(self, header)
        for name, (key, _) in found.items():  # six vectors, which the original holds as one
            if name.startswith("transformer_blocks.") and name.endswith(".scale_shift_table"):
                found[name] = (key, lambda tensor: tensor.reshape(6, -1))
        return found

    @classmethod
    def tiny(cls, folder: Path, seed: int = 0) -> None:
        with _miniature.seeded(seed):
            vocab = _qwen.tokenizer()
            transformer = Krea2Transformer2DModel(
                in_channels=64,
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=4,
                num_key_value_heads=2,
                intermediate_size=96,
                text_hidden_dim=32,
                num_text_layers=2,
                text_num_attention_heads=2,
                text_num_key_value_heads=2,
                text_intermediate_size=48,
                num_layerwise_text_blocks=1,
                num_refiner_text_blocks=1,
                axes_dims_rope=(4, 6, 6),
            )
            for name, parameter in transformer.named_parameters():
                if name.endswith("scale_shift_table") or ".norm" in name:
                    nn.init.normal_(parameter, std=0.1)  # they are made of zeros
            Krea2Pipeline(
                scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_image_seq_len=6400),
                vae=_qwen.vae(),
                text_encoder=_qwen.qwen3_vl(vocab),
                tokenizer=vocab,
                transformer=transformer,
                text_encoder_select_layers=(1, 2),
            ).save_pretrained(folder, safe_serialization=True)
