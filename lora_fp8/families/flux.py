"""FLUX.1: a 12 B double- and single-stream DiT, conditioned on T5-XXL and pooled CLIP, trained with rectified flow.

Black Forest Labs 2024 (https://github.com/black-forest-labs/flux). Latents are packed in 2 x 2 patches into a sequence
with (0, row, column) position ids. FLUX.1-dev is guidance-distilled: the guidance scale is an input, and one pass
replaces the two of classifier-free guidance. FLUX.1-schnell has no such input (`guidance_embeds` in its config).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import Template
from ..lora_files import naming
from . import _files, _flux, _published
from ._facts import TextEncoder
from ._files import Header
from .base import Cond, ModelFamily


class Family(ModelFamily):
    name = "flux"
    title = "FLUX.1"
    example_base = "black-forest-labs/FLUX.1-dev"
    pipeline_class = "FluxPipeline"
    denoiser_class = "FluxTransformer2DModel"
    text_widths = {
        "joint_attention_dim": "text_encoder_2.d_model",
        "pooled_projection_dim": "text_encoder.hidden_size",
    }
    prompt_tokens = 512  # flux src/flux/util.py: load_t5(max_length=512); `get_trained_length` tells schnell's
    text_millions = (4762, 132)  # T5-XXL
    text_parts = {
        "tokenizer": "CLIPTokenizer",
        "text_encoder": "CLIPTextModel",
        "tokenizer_2": "T5TokenizerFast",
        "text_encoder_2": "T5EncoderModel",
    }
    trained_text = {"text_encoder": TextEncoder("lora_te1_", "clip_l", width=768, hidden=3072, num_layers=12)}
    judge_length_by = ("tokenizer_2",)  # CLIP gives one pooled vector only, and prompts often exceed its 77
    text_answers = ("prompt_embeds", "pooled_prompt_embeds")
    text_shapes = {
        "prompt_embeds": ("tokens", "joint_attention_dim"),
        "pooled_prompt_embeds": ("pooled_projection_dim",),
    }
    adapter_targets = _flux.ADAPTER_TARGETS
    adapter_exclude = (_flux.LAST_LAYER,)
    # Embedders and the output: everything passes through them.
    keep_precise = ("x_embedder", "context_embedder", "time_text_embed", "norm_out", "^proj_out")
    modulation = _flux.MODULATION  # 3.2 of the 11.9 B parameters
    further_layers = {"blocks": _flux.MODULATION}
    bucket_multiple = 16
    patch = 2
    latents_as = "BSD"
    native_resolution = 1024  # model card
    default_guidance = 3.5  # model card
    uses_negative = False  # it would need true_cfg_scale > 1, twice the time, on a model distilled to do without
    embeds_guidance = True
    modelspec_architecture = "flux-1-dev"  # `get_architecture_name` tells schnell
    kohya_base_version = "flux1"
    kohya_naming = "bfl_flux"
    kohya_module = "networks.lora_flux"  # sd-scripts
    layouts = ("diffusers", "kohya", "comfy")
    split_names_in_comfy = True
    layouts_of_diffusers = ("diffusers", "kohya")
    converter_width = 3072
    auto_layouts = ("diffusers", "kohya")  # Forge reads kohya's
    native_layers = _flux.LAYERS + naming.parse_table("""
        double_blocks.#.img_mod.lin = transformer_blocks.#.norm1.linear
        double_blocks.#.txt_mod.lin = transformer_blocks.#.norm1_context.linear
        single_blocks.#.modulation.lin = single_transformer_blocks.#.norm.linear
        time_in.in_layer = time_text_embed.timestep_embedder.linear_1
        time_in.out_layer = time_text_embed.timestep_embedder.linear_2
        vector_in.in_layer = time_text_embed.text_embedder.linear_1
        vector_in.out_layer = time_text_embed.text_embedder.linear_2
        guidance_in.in_layer = time_text_embed.guidance_embedder.linear_1
        guidance_in.out_layer = time_text_embed.guidance_embedder.linear_2
        final_layer.adaLN_modulation.1 = norm_out.linear
    """)
    swapped_halves = ("norm_out.linear",)
    reference_config = {"in_channels": 64, "num_layers": 19, "num_single_layers": 38}
    sizes_from = {**_flux.SIZES, "pooled_projection_dim": "vector_in.in_layer.weight[1]"}
    checkpoint_text = {
        "text_encoder": "text_encoders.clip_l.transformer.",
        "text_encoder_2": "text_encoders.t5xxl.transformer.",
    }
    published = {
        "scheduler": _published.FLUX_SCHEDULER,
        "vae": _published.FLUX_VAE,
        "text_encoder": _published.CLIP_L,
        "text_encoder_2": _published.T5_XXL,
    }
    tokenizers_from = _published.FLUX_TOKENIZERS
    file_names = _published.FLUX_FILES
    # Fill, Canny and Depth take more channels than they return; Chroma has no modulation layers.
    single_file = {
        "has": ("double_blocks.0.img_attn.qkv.weight", "vector_in.in_layer.weight"),
        "in_is_out": ("img_in.weight", "final_layer.linear.weight"),
    }
    caveats_by_name = {
        "kontext": Template(
            "the name of {name} suggests FLUX.1 Kontext, an editing model, but model.family = 'flux' trains "
            "without control images; to use them, set model.family = 'flux_kontext'"
        )
    }

    make_inputs = _flux.make_inputs

    def get_architecture_name(self) -> str:
        """Return the name that sd-scripts writes (sai_model_spec.py): schnell's if there is no guidance input."""
        return "flux-1-dev" if self.read_denoiser_config().get("guidance_embeds", False) else "flux-1-schnell"

    def find_training_adapter(self) -> str:
        is_schnell = not self.read_denoiser_config().get("guidance_embeds", False)
        return "https://huggingface.co/ostris/FLUX.1-schnell-training-adapter" if is_schnell else ""

    def get_trained_length(self) -> int:
        """Return the length that the model was trained with: 512 for dev, 256 for schnell (their model cards).

        It matters for short prompts too, because T5's padding is attended to.
        """
        return 512 if self.read_denoiser_config().get("guidance_embeds", False) else 256

    def encode_with(self, pipeline: Any, prompts: list[str], cond: Cond) -> Cond:
        pooled_BD = pipeline._get_clip_prompt_embeds(prompts, device=self.device)
        return {**cond, "pooled_prompt_embeds": pooled_BD.to(self.dtype)}

    @classmethod
    def infer_denoiser_sizes(cls, native: Header, config: Mapping[str, Any], file: Path) -> dict[str, Any]:
        entries = _files.read_sizes(cls.sizes_from, native, config)
        return entries | {"guidance_embeds": "guidance_in.in_layer.weight" in native}  # dev has it, schnell does not

    @classmethod
    def choose_published_parts(cls, native: Header) -> dict[str, dict[str, Any]]:
        if "guidance_in.in_layer.weight" in native:
            return cls.published
        return cls.published | {"scheduler": _published.SCHNELL_SCHEDULER}
