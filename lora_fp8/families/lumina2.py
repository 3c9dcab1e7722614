"""Lumina-Image 2.0: a single-stream DiT of 2.6 B parameters, conditioned on the hidden states of Gemma 2.

Qin et al. 2025, "Lumina-Image 2.0: A Unified and Efficient Image Generative Framework". Captions pass two refiner
blocks and then form one sequence with the image's patches; the denoiser removes padding. An instruction precedes each
prompt, but not a negative prompt or a dropped caption. Time runs from 0 (noise) to 1 (image), the opposite of the
scheduler's, and the denoiser predicts the velocity towards the image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lora_files import naming
from . import _gemma, _published
from .base import Cond, Inputs, ModelFamily

if TYPE_CHECKING:
    from torch import Tensor, nn

SYSTEM_PROMPT = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts."
)
BEFORE = f"{SYSTEM_PROMPT} <Prompt Start> "
"""The text that the pipeline puts before a positive prompt."""


class Family(ModelFamily):
    name = "lumina2"
    title = "Lumina-Image 2.0"
    example_base = "Alpha-VLLM/Lumina-Image-2.0"
    pipeline_class = "Lumina2Pipeline"
    denoiser_class = "Lumina2Transformer2DModel"
    is_recordable = False  # it reads the lengths of the prompts
    text_widths = {"cap_feat_dim": "text_encoder.hidden_size"}
    text_millions = (2614, 590)  # Gemma 2 2B
    text_parts = {"tokenizer": "GemmaTokenizerFast", "text_encoder": "Gemma2Model"}
    prompt_tokens = 256  # with the instruction's; Lumina2Pipeline, sd-scripts lumina_train_network.py
    text_options = {"system_prompt": SYSTEM_PROMPT}
    text_arguments = {"mask": "prompt_attention_mask"}
    text_shapes = {"prompt_embeds": ("tokens", "cap_feat_dim")}
    prompts_vary = True
    towards_image = True
    adapter_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *(f"feed_forward.linear_{i}" for i in (1, 2, 3)),
    )
    keep_precise = ("x_embedder", "time_caption_embed", "norm_out")
    modulation = ("norm1.linear",)
    further_layers = {"blocks": modulation}
    bucket_multiple = 16
    patch = 2
    native_resolution = 1024  # Lumina2Pipeline: 128 latents of 8 pixels
    default_guidance = 4.0  # model card
    modelspec_architecture = "lumina-2"
    kohya_base_version = "lumina2"
    kohya_naming = "native"
    kohya_module = "networks.lora_lumina"  # sd-scripts
    # diffusers reads the original names only if a LoRA has every linear of the blocks, modulation included. ComfyUI
    # reads no others: its table of diffusers' names for this architecture is Z-Image's.
    layouts = ("comfy", "diffusers", "kohya")
    layouts_of_diffusers = ("diffusers",)
    reference_config = {"cap_feat_dim": 2304, "num_layers": 26}
    sizes_from = {
        "hidden_size": "cap_embedder.1.weight[0]",
        "cap_feat_dim": "cap_embedder.1.weight[1]",
        "num_layers": "layers.#.attention.qkv.weight",
    }
    file_names = _published.FLUX_FILES
    # In blocks without a timestep, the first norm is a plain one.
    native_layers = naming.parse_table("""
        x_embedder
        t_embedder.mlp.0 = time_caption_embed.timestep_embedder.linear_1
        t_embedder.mlp.2 = time_caption_embed.timestep_embedder.linear_2
        cap_embedder = time_caption_embed.caption_embedder
        noise_refiner.#, context_refiner.#, layers.#
            attention.qkv = attn.to_q attn.to_k attn.to_v
            attention.out = attn.to_out.0
            attention.q_norm = attn.norm_q
            attention.k_norm = attn.norm_k
            feed_forward.w1 = feed_forward.linear_1
            feed_forward.w2 = feed_forward.linear_2
            feed_forward.w3 = feed_forward.linear_3
            adaLN_modulation.1 = norm1.linear
            attention_norm2 = norm2
            ffn_norm1, ffn_norm2
        noise_refiner.#, layers.#
            attention_norm1 = norm1.norm
        context_refiner.#.attention_norm1 = context_refiner.#.norm1
        final_layer.adaLN_modulation.1 = norm_out.linear_1
        final_layer.linear = norm_out.linear_2
    """)
    beside_denoiser = ("norm_final",)  # a norm in the published file, which its own code never calls
    computed = {"rope_embedder": ("theta", "axes_dim", "axes_lens", "patch_size")}
    # Z-Image has the same blocks with another modulation, and learned padding tokens.
    single_file = {
        "has": ("cap_embedder.0.weight", "layers.0.attention.qkv.weight", "layers.0.adaLN_modulation.1.weight"),
        "lacks": ("cap_pad_token",),
    }

    make_negative_text, encode_prompts = _gemma.make_negative_text, _gemma.encode_prompts

    def as_read(self, prompt: str) -> tuple[str, str]:
        return "" if _gemma.is_negative(prompt) else BEFORE, prompt.removeprefix(_gemma.AVOIDED)

    def make_inputs(self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        return {
            "hidden_states": noisy_BCHW,
            "timestep": 1 - t_B,
            "encoder_hidden_states": cond["prompt_embeds"],
            "encoder_attention_mask": cond["prompt_embeds_mask"],
        }
