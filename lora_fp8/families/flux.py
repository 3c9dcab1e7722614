"""FLUX.1: a 12 B double- and single-stream DiT, conditioned on T5-XXL and pooled CLIP, trained with rectified flow.

Black Forest Labs 2024 (https://github.com/black-forest-labs/flux). Latents are packed in 2 x 2 patches into a sequence
with (0, row, column) position ids. FLUX.1-dev is guidance-distilled: it takes the guidance scale as an input, and
answers in one pass what classifier-free guidance would; FLUX.1-schnell has no such input (`guidance_embeds` in its
config).
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from torch import Tensor, nn

from lora_fp8 import config, naming
from lora_fp8.objectives import FlowMatching

from . import _miniature
from ._files import Header, checkpoint_prefix
from .base import Cond, Conversion, ModelFamily, TextEncoder


class Family(ModelFamily):
    name = "flux"
    title = "FLUX.1"
    example_base = "black-forest-labs/FLUX.1-dev"
    pipeline_class = "FluxPipeline"
    denoiser_class = "FluxTransformer2DModel"
    denoiser_name = "transformer"
    text_parts = {
        "tokenizer": "CLIPTokenizer",
        "text_encoder": "CLIPTextModel",
        "tokenizer_2": "T5TokenizerFast",
        "text_encoder_2": "T5EncoderModel",
    }
    trained_text = {"text_encoder": TextEncoder("lora_te1_", "clip_l", width=768, hidden=3072, num_layers=12)}
    judge_length_by = ("tokenizer_2",)  # CLIP gives one pooled vector, and a prompt longer than its 77 is usual
    objective = FlowMatching
    adapter_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *(f"{ff}.net.{layer}" for ff in ("ff", "ff_context") for layer in ("0.proj", "2")),
        *("proj_mlp", "proj_out"),  # of the single-stream blocks
    )
    adapter_exclude = ("^proj_out",)  # the last layer of the whole model, which has the same name
    # Embedders and the output: everything passes through them.
    keep_precise = ("x_embedder", "context_embedder", "time_text_embed", "norm_out", "^proj_out")
    modulation = ("norm1.linear", "norm1_context.linear", "norm.linear")  # 3.2 of the 11.9 B parameters
    bucket_multiple = 16
    native_resolution = 1024
    default_guidance = 3.5
    text_shapes = {
        "prompt_embeds": ("tokens", "joint_attention_dim"),
        "pooled_prompt_embeds": ("pooled_projection_dim",),
    }
    uses_negative = False
    embeds_guidance = True
    modelspec_architecture = "flux-1-dev"
    kohya_base_version = "flux1"
    kohya_naming = "bfl_flux"
    kohya_module = "networks.lora_flux"
    layouts = ("diffusers", "kohya", "comfy")
    split_names_in_comfy = True
    layouts_of_diffusers = ("diffusers", "kohya")
    converter_width = 3072
    auto_layouts = ("diffusers", "kohya")  # Forge reads kohya's
    native_layers = (
        *(
            row
            for stream, q, k, v, out, added, ff in (
                ("img", "to_q", "to_k", "to_v", "to_out.0", "", "ff"),
                ("txt", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "added_", "ff_context"),
            )
            for row in (
                (f"double_blocks.#.{stream}_attn.qkv", " ".join(f"transformer_blocks.#.attn.{x}" for x in (q, k, v))),
                (f"double_blocks.#.{stream}_attn.proj", f"transformer_blocks.#.attn.{out}"),
                *(
                    (
                        f"double_blocks.#.{stream}_attn.norm.{name}_norm.scale",
                        f"transformer_blocks.#.attn.norm_{added}{x}.weight",
                    )
                    for name, x in (("query", "q"), ("key", "k"))
                ),
                (f"double_blocks.#.{stream}_mlp.0", f"transformer_blocks.#.{ff}.net.0.proj"),
                (f"double_blocks.#.{stream}_mlp.2", f"transformer_blocks.#.{ff}.net.2"),
            )
        ),
        ("double_blocks.#.img_mod.lin", "transformer_blocks.#.norm1.linear"),
        ("double_blocks.#.txt_mod.lin", "transformer_blocks.#.norm1_context.linear"),
        ("single_blocks.#.modulation.lin", "single_transformer_blocks.#.norm.linear"),
        (
            "single_blocks.#.linear1",
            " ".join(f"single_transformer_blocks.#.{x}" for x in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
        ),
        ("single_blocks.#.linear2", "single_transformer_blocks.#.proj_out"),
        ("single_blocks.#.norm.query_norm.scale", "single_transformer_blocks.#.attn.norm_q.weight"),
        ("single_blocks.#.norm.key_norm.scale", "single_transformer_blocks.#.attn.norm_k.weight"),
        *(
            (f"{name}_in.{side}_layer", f"time_text_embed.{ours}_embedder.linear_{i}")
            for name, ours in (("time", "timestep"), ("vector", "text"), ("guidance", "guidance"))
            for i, side in ((1, "in"), (2, "out"))
        ),
        ("txt_in", "context_embedder"),
        ("img_in", "x_embedder"),
        ("final_layer.linear", "proj_out"),
    )
    reference_config = {"in_channels": 64, "num_layers": 19, "num_single_layers": 38}
    # Fill, Canny and Depth take more channels than they give; Chroma has no modulation of its own.
    single_file = {
        "has": ("double_blocks.0.img_attn.qkv.weight", "vector_in.in_layer.weight"),
        "in_is_out": ("img_in.weight", "final_layer.linear.weight"),
    }

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        with torch.no_grad():
            embeds_BLD, pooled_BD, _ = self.text_pipeline.encode_prompt(
                prompts, device=self.device, max_sequence_length=self.max_sequence_length
            )
        pairs = zip(embeds_BLD.to(self.dtype), pooled_BD.to(self.dtype), strict=True)
        return [{"prompt_embeds": e_LD.clone(), "pooled_prompt_embeds": p_D.clone()} for e_LD, p_D in pairs]

    def encode_with(self, pipeline: Any, prompts: list[str], cond: Cond) -> Cond:
        pooled_BD = pipeline._get_clip_prompt_embeds(prompts, device=self.device)
        return {**cond, "pooled_prompt_embeds": pooled_BD.to(self.dtype)}

    def token_limit(self, name: str) -> int:
        limit = self.tokenizer(name).model_max_length
        if name != "tokenizer_2":
            return limit
        # T5's padding is attended to, so the length matters for short prompts too: dev was trained with 512 tokens,
        # schnell with 256 (their model cards).
        return min(512 if self.denoiser_config().get("guidance_embeds", False) else 256, limit)

    @property
    def max_sequence_length(self) -> int:
        """T5 tokens that a prompt is padded or cut to; what the pipeline calls so."""
        return self.token_limit("tokenizer_2")

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        num, _, height, width = noisy_BCHW.shape
        device = noisy_BCHW.device
        to = {"device": device, "dtype": self.dtype}
        guidance_B = torch.full((num,), guidance, device=device) if denoiser.config.guidance_embeds else None
        pred_BSD = denoiser(
            hidden_states=self.pack(noisy_BCHW.to(self.dtype)),
            timestep=t_B.to(device),  # sigma in [0, 1]: the transformer multiplies by 1000 itself
            guidance=guidance_B,
            pooled_projections=cond["pooled_prompt_embeds"].to(**to),
            encoder_hidden_states=cond["prompt_embeds"].to(**to),
            txt_ids=torch.zeros(cond["prompt_embeds"].shape[1], 3, device=device),
            img_ids=FluxPipeline._prepare_latent_image_ids(num, height // 2, width // 2, device, torch.float32),
            return_dict=False,
        )[0]
        return self.unpack(pred_BSD, (height, width))

    def pack(self, latents_BCHW: Tensor) -> Tensor:
        return FluxPipeline._pack_latents(latents_BCHW, *latents_BCHW.shape)

    def unpack(self, packed: Tensor, latent_hw: tuple[int, int]) -> Tensor:
        # The helper takes pixels; with a scale factor of 1 they are latents.
        return FluxPipeline._unpack_latents(packed, *latent_hw, vae_scale_factor=1)

    def seq_len(self, latent_hw: tuple[int, int]) -> int:
        return (latent_hw[0] // 2) * (latent_hw[1] // 2)

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        # A negative prompt would need true_cfg_scale > 1, twice the time, on a model distilled to do without.
        inputs = {key: cond[key][None] for key in ("prompt_embeds", "pooled_prompt_embeds")}
        return {k: v.to(self.device, self.dtype) for k, v in inputs.items()}

    def unused_settings(self, section: config.Objective) -> list[str]:
        if section.guidance != 1.0 and not self.denoiser_config().get("guidance_embeds", False):
            return [f"objective.guidance = {section.guidance} has no effect: this model has no guidance embedding"]
        return []

    def caveats(self) -> list[str]:
        if not self.file_is_called("kontext"):
            return []
        return [
            f"{self.checkpoint.name} is FLUX.1 Kontext by its name, which edits pictures: it is trained and drawn here "
            "without one to edit; set model.family = 'flux_kontext' to give it control pictures"
        ]

    def denoiser_config(self) -> dict[str, Any]:
        found = ModelFamily.denoiser_config(self)
        # dev and schnell differ in this only, and the file knows which it is: the parts beside it may be the other's
        if self.checkpoint:
            found["guidance_embeds"] = any("guidance_in.in_layer.weight" in key for key in self._header)
        return found

    def convert_checkpoint(self, header: Header) -> Conversion:
        return bfl_conversion(header)

    @classmethod
    def _tiny_pipeline(cls) -> FluxPipeline:
        clip, t5 = _miniature.clip_tokenizer(), _miniature.t5_tokenizer()
        transformer = FluxTransformer2DModel(
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=48,
            pooled_projection_dim=32,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        )
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
            vae=_miniature.vae(scaling_factor=0.3611, shift_factor=0.1159, quant_conv=False),
            text_encoder=_miniature.clip_text(clip),
            tokenizer=clip,
            text_encoder_2=_miniature.t5_text(t5, width=48),
            tokenizer_2=t5,
            transformer=transformer,
        )


def _rows(start: int, stop: int) -> Any:
    return lambda tensor: tensor[start:stop]


def _shift_scale_swapped(tensor: Tensor) -> Tensor:
    # The original's last modulation gives (shift, scale), diffusers' AdaLayerNormContinuous expects (scale, shift).
    shift, scale = tensor.chunk(2)
    return torch.cat([scale, shift])


def bfl_conversion(header: Header) -> Conversion:
    """Every tensor of the transformer: its name in diffusers, its key in the file, and which rows of it.

    diffusers has a converter, but it needs all 24 GB in memory at once, and knows one width only.
    """
    conversion: Conversion = {}
    begin = checkpoint_prefix(header)
    for key, shape in header.items():
        native = key.removeprefix(begin)
        module, _, kind = native.rpartition(".")
        if module == "final_layer.adaLN_modulation.1":
            conversion[f"norm_out.linear.{kind}"] = (key, _shift_scale_swapped)
            continue
        names = naming.from_native(Family.native_layers, native) or ()
        if len(names) == 1:
            conversion[names[0]] = (key, None)
            continue
        # Fused rows: q, k and v take the model's width each, the single blocks' MLP what is left.
        width = shape[0] // 3
        if len(names) == 4:
            prefix = key.removesuffix(f"linear1.{kind}")
            width = header[f"{prefix}linear2.weight"][0]
        for i, name in enumerate(names):
            stop = shape[0] if i == len(names) - 1 else (i + 1) * width
            conversion[name] = (key, _rows(i * width, stop))
    return conversion
