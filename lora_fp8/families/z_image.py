"""Z-Image: a 6 B single-stream DiT, conditioned on Qwen3 4B, trained with rectified flow.

Tongyi-MAI 2025, "Z-Image: An Efficient Image Generation Foundation Model with Single-Stream Diffusion Transformer".
Time runs backwards, from 0 (noise) to 1 (image), and the velocity points to the image: both are turned around here.
Image and text are padded to multiples of 32 with tokens that were learned; the transformer takes lists, and pads and
masks by itself. Z-Image-Turbo is this model, distilled to 8 steps without guidance; only its scheduler
tells, and the name of a single file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import Tensor, nn

from lora_fp8.objectives import FlowMatching

from . import _miniature, _qwen
from ._files import Header
from .base import Cond, Conversion, ModelFamily, padded

TURBO_SHIFT = 3.0
"""The shift in the scheduler of Z-Image-Turbo; Z-Image has 6."""


def _block(name: str) -> tuple[tuple[str, str], ...]:
    """Rows for the layers of one list of blocks, in which q, k and v were one layer."""
    attention = f"{name}.#.attention"
    return (
        (f"{attention}.qkv", f"{attention}.to_q {attention}.to_k {attention}.to_v"),
        (f"{attention}.out", f"{attention}.to_out.0"),
        (f"{attention}.q_norm", f"{attention}.norm_q"),
        (f"{attention}.k_norm", f"{attention}.norm_k"),
        (f"{name}.#", f"{name}.#"),
    )


class Family(ModelFamily):
    name = "z_image"
    title = "Z-Image"
    example_base = "Tongyi-MAI/Z-Image"
    pipeline_class = "ZImagePipeline"
    denoiser_class = "ZImageTransformer2DModel"
    denoiser_name = "transformer"
    text_parts = {"tokenizer": "Qwen2Tokenizer", "text_encoder": "Qwen3Model"}
    objective = FlowMatching
    adapter_targets = (
        *(f"attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"feed_forward.{layer}" for layer in ("w1", "w2", "w3")),
    )
    adapter_exclude = ("noise_refiner", "context_refiner")  # two blocks each before image and text meet
    keep_precise = ("all_x_embedder", "cap_embedder", "t_embedder", "all_final_layer")
    modulation = ("adaLN_modulation",)
    bucket_multiple = 16
    native_resolution = 1024
    default_guidance = 5.0
    text_shapes = {"prompt_embeds": ("tokens", "cap_feat_dim")}
    modelspec_architecture = "Z-Image"
    kohya_base_version = "z_image"
    kohya_naming = "native"
    kohya_module = "networks.lora_zimage"
    # ComfyUI reads the names of diffusers too; with those of the original, q, k and v are one layer, which diffusers
    # does not take apart.
    layouts = ("diffusers", "comfy", "kohya")
    lokr_of_diffusers = True
    layouts_of_diffusers = ("diffusers", "kohya")
    native_layers = (
        *(row for name in ("layers", "noise_refiner", "context_refiner") for row in _block(name)),
        ("x_embedder", "all_x_embedder.2-1"),
        ("final_layer", "all_final_layer.2-1"),
        *((name, name) for name in ("t_embedder", "cap_embedder", "x_pad_token", "cap_pad_token")),
    )
    config_marks = {"siglip_feat_dim": None}  # Omni, which sees images
    reference_config = {"in_channels": 16, "dim": 3840, "n_layers": 30, "n_heads": 30, "cap_feat_dim": 2560}
    # Lumina 2 has neither the learned padding nor a modulation that begins with its linear; Omni sees images.
    single_file = {
        "has": ("x_pad_token", "cap_pad_token", "layers.0.attention.qkv.weight", "layers.0.adaLN_modulation.0.weight"),
        "lacks": ("siglip_embedder.1.weight",),
    }

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        with torch.no_grad():
            embeds, _ = self.text_pipeline.encode_prompt(
                list(prompts),  # it writes into its argument
                device=self.device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_sequence_length,
            )
        return [{"prompt_embeds": embeds_LD.to(self.dtype, copy=True)} for embeds_LD in embeds]

    def collate(self, conds: list[Cond]) -> Cond:
        return padded(conds, "prompt_embeds")

    @property
    def max_sequence_length(self) -> int:
        """Tokens that the encoder reads, chat template included: the pipeline's default, or what the tokenizer says."""
        return min(512, self.tokenizer("tokenizer").model_max_length)

    def token_limit(self, name: str) -> int:
        message = [{"role": "user", "content": "prompt"}]
        template = self.tokenizer(name).apply_chat_template(message, tokenize=False)
        return self.max_sequence_length - len(self.tokenizer(name)(template.partition("prompt")[0]).input_ids)

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        device = noisy_BCHW.device
        embeds_BLD, mask_BL = cond["prompt_embeds"].to(device, self.dtype), cond["prompt_embeds_mask"].to(device)
        preds = denoiser(
            x=list(noisy_BCHW.to(self.dtype)[:, :, None].unbind()),
            t=1 - t_B.to(device),
            cap_feats=[embeds_LD[mask_L] for embeds_LD, mask_L in zip(embeds_BLD, mask_BL, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack(preds)[:, :, 0]

    def seq_len(self, latent_hw: tuple[int, int]) -> int:
        return (latent_hw[0] // 2) * (latent_hw[1] // 2)

    def guidance_inputs(self, guidance: float) -> dict[str, Any]:
        # The pipeline adds this times the difference to the answer, so that 0 is without guidance.
        return {"guidance_scale": guidance - 1}

    def usual_guidance(self) -> float:
        return 1.0 if self._is_turbo() else self.default_guidance

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        inputs = {"prompt_embeds": cond, "negative_prompt_embeds": negative}
        return {k: [v["prompt_embeds"].to(self.device, self.dtype)] for k, v in inputs.items() if v is not None}

    def caveats(self) -> list[str]:
        if not self._is_turbo():
            return []
        return [
            "this is Z-Image-Turbo, by the file's name or the scheduler's shift of 3: plain training undoes the "
            "distillation, and images of 8 steps become soft; train on Z-Image or a de-distilled copy and draw "
            "with Turbo, or train few steps at a low rate"
        ]

    def _is_turbo(self) -> bool:
        named = self.distilled_by_name()
        return self.scheduler_config().get("shift") == TURBO_SHIFT if named is None else named

    def convert_checkpoint(self, header: Header) -> Conversion:
        found = ModelFamily.convert_checkpoint(self, header)
        found.pop("norm_final.weight", None)  # of an older version of the code, which nothing reads
        return found

    @classmethod
    def tiny(cls, folder: Path, seed: int = 0) -> None:
        with _miniature.seeded(seed):
            vocab = _qwen.tokenizer()
            transformer = ZImageTransformer2DModel(
                in_channels=4,
                dim=48,
                n_layers=2,
                n_refiner_layers=1,
                n_heads=3,
                n_kv_heads=3,
                cap_feat_dim=32,
                axes_dims=[4, 6, 6],
                axes_lens=[256, 64, 64],
            )
            for token in (transformer.x_pad_token, transformer.cap_pad_token):
                nn.init.normal_(token)  # they are made of zeros
            ZImagePipeline(
                scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
                vae=_miniature.vae(scaling_factor=0.3611, shift_factor=0.1159, quant_conv=False),
                text_encoder=_qwen.qwen3_text(vocab),
                tokenizer=vocab,
                transformer=transformer,
            ).save_pretrained(folder, safe_serialization=True)
