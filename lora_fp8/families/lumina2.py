"""Lumina-Image 2.0: a single-stream DiT of 2.6 B parameters that reads the hidden states of Gemma 2.

Qin et al. 2025, "Lumina-Image 2.0: A Unified and Efficient Image Generative Framework". Captions go through two refiner
blocks and then stand in one sequence with the image's patches, of true length: padding is cut out in the denoiser. An
instruction precedes each prompt, and none precedes a negative one or a dropped caption. Time runs from noise at 0 to
the image at 1, the opposite of the scheduler's, and so does the velocity that the denoiser gives.
"""

from __future__ import annotations

from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel
from torch import Tensor, nn

from lora_fp8 import naming
from lora_fp8.objectives import FlowMatching

from . import _gemma, _miniature
from ._files import Header
from .base import Cond, Conversion, ModelFamily, padded

SYSTEM_PROMPT = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts."
)
BEFORE = f"{SYSTEM_PROMPT} <Prompt Start> "
"""What the pipeline puts before a prompt that it follows."""


def _block(native: str, ours: str, norm1: str) -> tuple[naming.Row, ...]:
    """The rows of one list of blocks; in those that know no time, the first norm is a plain one."""
    return (
        (
            f"{native}.#.attention.qkv",
            " ".join(f"{ours}.#.attn.to_{x}" for x in "qkv"),
        ),
        (f"{native}.#.attention.out", f"{ours}.#.attn.to_out.0"),
        (f"{native}.#.attention.q_norm", f"{ours}.#.attn.norm_q"),
        (f"{native}.#.attention.k_norm", f"{ours}.#.attn.norm_k"),
        *((f"{native}.#.feed_forward.w{i}", f"{ours}.#.feed_forward.linear_{i}") for i in (1, 2, 3)),
        (f"{native}.#.adaLN_modulation.1", f"{ours}.#.norm1.linear"),
        (f"{native}.#.attention_norm1", f"{ours}.#.{norm1}"),
        (f"{native}.#.attention_norm2", f"{ours}.#.norm2"),
        (f"{native}.#.ffn_norm1", f"{ours}.#.ffn_norm1"),
        (f"{native}.#.ffn_norm2", f"{ours}.#.ffn_norm2"),
    )


class Family(ModelFamily):
    name = "lumina2"
    title = "Lumina-Image 2.0"
    example_base = "Alpha-VLLM/Lumina-Image-2.0"
    pipeline_class = "Lumina2Pipeline"
    denoiser_class = "Lumina2Transformer2DModel"
    denoiser_name = "transformer"
    text_parts = {"tokenizer": "GemmaTokenizerFast", "text_encoder": "Gemma2Model"}
    objective = FlowMatching
    adapter_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *(f"feed_forward.linear_{i}" for i in (1, 2, 3)),
    )
    keep_precise = ("x_embedder", "time_caption_embed", "norm_out")
    modulation = ("norm1.linear",)
    bucket_multiple = 16
    native_resolution = 1024
    default_guidance = 4.0
    text_shapes = {"prompt_embeds": ("tokens", "cap_feat_dim")}
    modelspec_architecture = "lumina-2"
    kohya_base_version = "lumina2"
    kohya_naming = "native"
    kohya_module = "networks.lora_lumina"
    # diffusers reads the original names only of LoRAs that have every linear of the blocks, modulation included;
    # ComfyUI reads no other, as the names of diffusers that it maps for this architecture are Z-Image's.
    layouts = ("comfy", "diffusers", "kohya")
    layouts_of_diffusers = ("diffusers",)
    reference_config = {"cap_feat_dim": 2304}
    native_layers = (
        ("x_embedder", "x_embedder"),
        ("t_embedder.mlp.0", "time_caption_embed.timestep_embedder.linear_1"),
        ("t_embedder.mlp.2", "time_caption_embed.timestep_embedder.linear_2"),
        ("cap_embedder", "time_caption_embed.caption_embedder"),
        *_block("noise_refiner", "noise_refiner", "norm1.norm"),
        *_block("context_refiner", "context_refiner", "norm1"),
        *_block("layers", "layers", "norm1.norm"),
        ("final_layer.adaLN_modulation.1", "norm_out.linear_1"),
        ("final_layer.linear", "norm_out.linear_2"),
    )
    tiny_hw = (32, 48)
    # Z-Image has the same blocks with another modulation, and learned tokens for padding.
    single_file = {
        "has": ("cap_embedder.0.weight", "layers.0.attention.qkv.weight", "layers.0.adaLN_modulation.1.weight"),
        "lacks": ("cap_pad_token",),
    }

    def empty_denoiser(self) -> nn.Module:
        denoiser = ModelFamily.empty_denoiser(self)
        # Tables of angles that are computed and kept outside of the state: made anew where there is memory for them.
        rope = denoiser.rope_embedder
        rope.freqs_cis = rope._precompute_freqs_cis(rope.axes_dim, rope.axes_lens, rope.theta)
        return denoiser

    def negative_text(self, prompt: str) -> str:
        return _gemma.negative_text(prompt)

    def as_read(self, prompt: str) -> tuple[str, str]:
        return "" if _gemma.is_negative(prompt) else BEFORE, prompt.removeprefix(_gemma.AVOIDED)

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        options = {"device": self.device, "max_sequence_length": self.max_sequence_length}
        options |= {"system_prompt": SYSTEM_PROMPT}
        embeds = [_gemma.encode(self.text_pipeline, prompt, **options) for prompt in prompts]
        return [{"prompt_embeds": embeds_LD.to(self.dtype)} for embeds_LD in embeds]

    def token_limit(self, name: str) -> int:
        return min(256, self.tokenizer(name).model_max_length)

    @property
    def max_sequence_length(self) -> int:
        """Tokens that are read of the instruction and the prompt; what the pipeline calls so."""
        return self.token_limit("tokenizer")

    def collate(self, conds: list[Cond]) -> Cond:
        return padded(conds, "prompt_embeds")

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        device = noisy_BCHW.device
        return -denoiser(
            hidden_states=noisy_BCHW.to(self.dtype),
            timestep=1 - t_B.to(device),
            encoder_hidden_states=cond["prompt_embeds"].to(device, self.dtype),
            encoder_attention_mask=cond["prompt_embeds_mask"].to(device),
            return_dict=False,
        )[0]

    def seq_len(self, latent_hw: tuple[int, int]) -> int:
        return (latent_hw[0] // 2) * (latent_hw[1] // 2)

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        # Both padded to one length, which the pipeline insists on.
        both = padded([cond] if negative is None else [cond, negative], "prompt_embeds")
        embeds_BLD, mask_BL = both["prompt_embeds"].to(self.device, self.dtype), both["prompt_embeds_mask"]
        mask_BL = mask_BL.to(self.device)
        inputs = {"prompt_embeds": embeds_BLD[:1], "prompt_attention_mask": mask_BL[:1]}
        if negative is not None:
            inputs |= {"negative_prompt_embeds": embeds_BLD[1:], "negative_prompt_attention_mask": mask_BL[1:]}
        return inputs

    def convert_checkpoint(self, header: Header) -> Conversion:
        # The published file has one more norm, which its own code never calls.
        return ModelFamily.convert_checkpoint(self, {k: v for k, v in header.items() if "norm_final." not in k})

    @classmethod
    def _tiny_pipeline(cls) -> Lumina2Pipeline:
        tokenizer = _gemma.tokenizer(BEFORE)
        transformer = Lumina2Transformer2DModel(
            in_channels=4,
            hidden_size=96,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=6,
            num_kv_heads=2,
            multiple_of=16,
            axes_dim_rope=(4, 6, 6),
            cap_feat_dim=32,
        )
        return Lumina2Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
            # The pipeline counts on eight pixels per latent, whatever the VAE says.
            vae=_miniature.vae_eighth(scaling_factor=0.3611, shift_factor=0.1159),
            text_encoder=_gemma.text(tokenizer),
            tokenizer=tokenizer,
        )
