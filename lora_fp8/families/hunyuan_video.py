"""HunyuanVideo: a 13 B double- and single-stream DiT, trained on clips, and on pictures as clips of one frame.

Kong et al. 2024, "HunyuanVideo: A Systematic Framework For Large Video Generative Models". Prompts stand in a template
and are read by Llama 3 (the third layer from the end, without the template's tokens), pass two refiner blocks, and are
masked to their length in attention; CLIP gives a pooled vector. The released model is guidance-distilled: it takes the
guidance scale as an input, and answers in one pass what classifier-free guidance would.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from PIL import Image
from torch import Tensor, nn

from lora_fp8 import config, naming
from lora_fp8.objectives import FlowMatching

from . import _llama, _miniature
from ._files import Header
from .base import Cond, Conversion, ModelFamily, as_clip, as_picture, padded

BEFORE: str = DEFAULT_PROMPT_TEMPLATE["template"].partition("{}")[0]
"""What the pipeline puts before a prompt."""

CROPPED: int = DEFAULT_PROMPT_TEMPLATE["crop_start"]
"""Tokens of the template, which the denoiser does not see."""


def _double(stream: str, qkv: str, out: str, norm: str, suffix: str) -> tuple[naming.Row, ...]:
    """The rows of one stream of the double blocks."""
    native, ours = f"double_blocks.#.{stream}", "transformer_blocks.#"
    return (
        (f"{native}_mod.linear", f"{ours}.norm1{suffix}.linear"),
        (f"{native}_attn_qkv", " ".join(f"{ours}.attn.{qkv.format(x)}" for x in "qkv")),
        *((f"{native}_attn_{x}_norm", f"{ours}.attn.{norm}_{x}") for x in "qk"),
        (f"{native}_attn_proj", f"{ours}.attn.{out}"),
        (f"{native}_mlp.fc1", f"{ours}.ff{suffix}.net.0.proj"),
        (f"{native}_mlp.fc2", f"{ours}.ff{suffix}.net.2"),
    )


def _embedder(native: str, ours: str, layers: tuple[str, str]) -> tuple[naming.Row, ...]:
    return tuple((f"{native}.{layer}", f"{ours}.linear_{i}") for i, layer in enumerate(layers, 1))


REFINER = "txt_in.individual_token_refiner.blocks.#", "context_embedder.token_refiner.refiner_blocks.#"
SINGLE = "single_blocks.#", "single_transformer_blocks.#"
LAST_MODULATION = "final_layer.adaLN_modulation.1"


class Family(ModelFamily):
    name = "hunyuan_video"
    title = "HunyuanVideo"
    example_base = "hunyuanvideo-community/HunyuanVideo"
    pipeline_class = "HunyuanVideoPipeline"
    denoiser_class = "HunyuanVideoTransformer3DModel"
    denoiser_name = "transformer"
    text_parts = {
        # The released folder says LlamaTokenizerFast, whose rules are those of Llama 2: Llama 3's are in the file.
        "tokenizer": "PreTrainedTokenizerFast",
        "text_encoder": "LlamaModel",
        "tokenizer_2": "CLIPTokenizer",
        "text_encoder_2": "CLIPTextModel",
    }
    objective = FlowMatching
    adapter_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *(f"{ff}.net.{layer}" for ff in ("ff", "ff_context") for layer in ("0.proj", "2")),
        *("proj_mlp", "proj_out"),  # of the single-stream blocks
    )
    # The refiner belongs to the embedding of the text; the last layer has the name of one in the single-stream blocks.
    adapter_exclude = ("context_embedder", "^proj_out")
    keep_precise = ("x_embedder", "context_embedder", "^time_text_embed", "^norm_out", "^proj_out")
    modulation = ("norm1.linear", "norm1_context.linear", "norm.linear")
    bucket_multiple = 16
    native_resolution = 960  # the area of 720p
    default_guidance = 6.0
    clips = (4, 24)
    text_shapes = {
        "prompt_embeds": ("tokens", "text_embed_dim"),
        "pooled_prompt_embeds": ("pooled_projection_dim",),
    }
    uses_negative = False
    embeds_guidance = True
    vae_class = "AutoencoderKLHunyuanVideo"
    config_marks = {"image_condition_type": None}  # image-to-video has a pipeline of its own
    modelspec_architecture = "hunyuan-video"
    kohya_base_version = "hunyuan_video"
    # ComfyUI looks for kohya's names of its own copy of the model, which has 0 and 2 for fc1 and fc2: such a file would
    # lose the feed-forward of the double blocks there, and diffusers reads none of it.
    kohya_naming = ""
    layouts = ("comfy", "diffusers")
    converter_width = 3072
    call_options = {"num_frames": 1}
    reference_config = {"num_layers": 20, "num_single_layers": 40}
    native_layers = (
        ("img_in", "x_embedder"),
        *_embedder("time_in", "time_text_embed.timestep_embedder", ("mlp.0", "mlp.2")),
        *_embedder("guidance_in", "time_text_embed.guidance_embedder", ("mlp.0", "mlp.2")),
        *_embedder("vector_in", "time_text_embed.text_embedder", ("in_layer", "out_layer")),
        ("txt_in.input_embedder", "context_embedder.proj_in"),
        *_embedder("txt_in.t_embedder", "context_embedder.time_text_embed.timestep_embedder", ("mlp.0", "mlp.2")),
        ("txt_in.c_embedder", "context_embedder.time_text_embed.text_embedder"),
        (f"{REFINER[0]}.self_attn_qkv", " ".join(f"{REFINER[1]}.attn.to_{x}" for x in "qkv")),
        (f"{REFINER[0]}.self_attn_proj", f"{REFINER[1]}.attn.to_out.0"),
        (f"{REFINER[0]}.mlp.fc1", f"{REFINER[1]}.ff.net.0.proj"),
        (f"{REFINER[0]}.mlp.fc2", f"{REFINER[1]}.ff.net.2"),
        (f"{REFINER[0]}.adaLN_modulation.1", f"{REFINER[1]}.norm_out.linear"),
        *((f"{REFINER[0]}.norm{i}", f"{REFINER[1]}.norm{i}") for i in (1, 2)),
        *_double("img", "to_{}", "to_out.0", "norm", ""),
        *_double("txt", "add_{}_proj", "to_add_out", "norm_added", "_context"),
        (
            f"{SINGLE[0]}.linear1",
            " ".join(f"{SINGLE[1]}.{x}" for x in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp")),
        ),
        (f"{SINGLE[0]}.linear2", f"{SINGLE[1]}.proj_out"),
        (f"{SINGLE[0]}.modulation.linear", f"{SINGLE[1]}.norm.linear"),
        *((f"{SINGLE[0]}.{x}_norm", f"{SINGLE[1]}.attn.norm_{x}") for x in "qk"),
        ("final_layer.linear", "proj_out"),
    )
    tiny_hw = (32, 48)
    # Image-to-video takes more channels than it gives.
    single_file = {
        "has": ("double_blocks.0.img_attn_qkv.weight", "vector_in.in_layer.weight"),
        "shapes": {"img_in.proj.weight": (None, None, None, None, None)},
        "in_is_out": ("img_in.proj.weight", "final_layer.linear.weight"),
    }

    @torch.no_grad()
    def encode_images(self, pixels_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("encode_images before load_encoders")
        latents = self.vae.encode(self.pack(pixels_BCHW.to(self.device, torch.float32))).latent_dist.mode()
        return as_picture(latents) * self.vae.config.scaling_factor

    @torch.no_grad()
    def decode_latents(self, latents_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("decode_latents before load_vae")
        latents_BCHW = latents_BCHW.to(self.device, torch.float32) / self.vae.config.scaling_factor
        return as_picture(self.vae.decode(self.pack(latents_BCHW), return_dict=False)[0])

    def as_read(self, prompt: str) -> tuple[str, str]:
        return BEFORE, prompt

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        with torch.no_grad():
            embeds_BLD, pooled_BD, mask_BL = self.text_pipeline.encode_prompt(
                prompts, device=self.device, max_sequence_length=self.max_sequence_length
            )
        rows = zip(embeds_BLD.to(self.dtype), mask_BL.bool(), pooled_BD.to(self.dtype), strict=True)
        return [{"prompt_embeds": e_LD[m_L], "pooled_prompt_embeds": p_D.clone()} for e_LD, m_L, p_D in rows]

    def token_limit(self, name: str) -> int:
        return CROPPED + self.max_sequence_length if name == "tokenizer" else self.tokenizer(name).model_max_length

    @property
    def max_sequence_length(self) -> int:
        """Llama's tokens of a prompt that are read; what the pipeline calls so."""
        return 256

    def collate(self, conds: list[Cond]) -> Cond:
        pooled_BD = torch.stack([cond["pooled_prompt_embeds"] for cond in conds])
        return padded(conds, "prompt_embeds") | {"pooled_prompt_embeds": pooled_BD}

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        to = {"device": noisy_BCHW.device, "dtype": self.dtype}
        guidance_B = torch.full((len(noisy_BCHW),), guidance, **to) * 1000.0
        answer = denoiser(
            hidden_states=self.pack(noisy_BCHW.to(self.dtype)),
            timestep=t_B.to(noisy_BCHW.device) * 1000,
            encoder_hidden_states=cond["prompt_embeds"].to(**to),
            encoder_attention_mask=cond["prompt_embeds_mask"].to(**to),
            pooled_projections=cond["pooled_prompt_embeds"].to(**to),
            guidance=guidance_B if denoiser.config.guidance_embeds else None,
            return_dict=False,
        )[0]
        return self.unpack(answer, tuple(noisy_BCHW.shape[-2:]))

    def pack(self, latents_BCHW: Tensor) -> Tensor:
        return as_clip(latents_BCHW)

    def unpack(self, packed: Tensor, latent_hw: tuple[int, int]) -> Tensor:
        return as_picture(packed)

    def pictures(self, output: Any) -> list[Image.Image]:
        return [frames[0] for frames in output.frames]

    def frames(self, output: Any) -> list[Image.Image]:
        return output.frames[0]

    def seq_len(self, latent_hw: tuple[int, ...]) -> int:
        *num_frames, height, width = latent_hw
        return math.prod(num_frames) * (height // 2) * (width // 2)

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        # A negative prompt would need true_cfg_scale > 1, twice the time, on a model distilled to do without.
        one = self.collate([cond])
        inputs = {name: one[name].to(self.device, self.dtype) for name in ("prompt_embeds", "pooled_prompt_embeds")}
        return inputs | {"prompt_attention_mask": one["prompt_embeds_mask"].to(self.device)}

    def unused_settings(self, section: config.Objective) -> list[str]:
        if section.guidance != 1.0 and not self.denoiser_config().get("guidance_embeds", True):
            return [f"objective.guidance = {section.guidance} has no effect: this model has no guidance embedding"]
        return []

    def caveats(self) -> list[str]:
        # Its second version has the very tensors of text-to-video.
        if not self.file_is_called(r"i2v|image[-_. ]?to[-_. ]?video"):
            return []
        return [
            f"{self.checkpoint.name} is image-to-video by its name: it is trained and drawn here without a picture to "
            "begin with; train on text-to-video"
        ]

    def convert_checkpoint(self, header: Header) -> Conversion:
        found = ModelFamily.convert_checkpoint(self, header)
        for kind in ("weight", "bias"):
            key, _ = found.pop(f"{LAST_MODULATION}.{kind}")
            found[f"norm_out.linear.{kind}"] = (key, _shift_scale_swapped)
        return found

    @classmethod
    def _tiny_pipeline(cls) -> HunyuanVideoPipeline:
        # Of the template's words those that are long are one token each, which makes about as many as in Llama 3.
        known = [word for word in BEFORE.split() if len(word) > 3]
        llama, clip = _llama.tokenizer(known), _miniature.clip_tokenizer()
        return HunyuanVideoPipeline(
            text_encoder=_llama.text(llama, layers=3).model,
            tokenizer=llama,
            transformer=HunyuanVideoTransformer3DModel(
                in_channels=4,
                out_channels=4,
                num_attention_heads=2,
                attention_head_dim=16,
                num_layers=1,
                num_single_layers=2,
                num_refiner_layers=1,
                text_embed_dim=32,
                pooled_projection_dim=32,
                rope_axes_dim=(4, 6, 6),
            ),
            vae=AutoencoderKLHunyuanVideo(
                latent_channels=4, block_out_channels=(4, 4, 8, 8), layers_per_block=1, norm_num_groups=4
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
            text_encoder_2=_miniature.clip_text(clip),
            tokenizer_2=clip,
        )


def _shift_scale_swapped(tensor: Tensor) -> Tensor:
    # The original's last modulation gives (shift, scale), diffusers' AdaLayerNormContinuous expects (scale, shift).
    shift, scale = tensor.chunk(2)
    return torch.cat([scale, shift])
