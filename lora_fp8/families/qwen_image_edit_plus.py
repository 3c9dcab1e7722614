"""Qwen-Image-Edit-Plus, released as 2509 and 2511: edits with one to three images, which the prompt names by number.

Qwen team 2025. The network is Qwen-Image's. Qwen2.5-VL sees each image at about 384 x 384 pixels, as "Picture 1",
"Picture 2", ..., and the VAE sees it at about 1024 x 1024; the latents follow the noise as tokens. In 2511 these tokens
are at timestep 0, whatever the noise's timestep is (`zero_cond_t`); its tensors have the names and shapes of 2509's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from . import _files, _qwen, _qwen_edit, qwen_image
from ._files import Header
from .base import Cond, ModelFamily, list_control_images

SIDE = 1024
SEEN_SIDE = 384
"""Sides in pixels of the squares to whose area the pipeline resizes an image: for the VAE, and for the text encoder."""


class Family(ModelFamily):
    name = "qwen_image_edit_plus"
    title = "Qwen-Image-Edit-Plus"
    example_base = "Qwen/Qwen-Image-Edit-2511"
    controls = (1, 3)
    prompts_see_controls = True
    same_tensors_as = "qwen_image"
    pipeline_class = "QwenImageEditPlusPipeline"
    denoiser_class = "QwenImageTransformer2DModel"
    is_recordable = False  # it copies to the GPU which tokens are controls
    text_widths = qwen_image.Family.text_widths
    text_millions = qwen_image.Family.text_millions
    text_parts = {**qwen_image.Family.text_parts, "processor": "Qwen2VLProcessor"}
    prompt_tokens = qwen_image.Family.prompt_tokens
    text_answers = qwen_image.Family.text_answers
    text_arguments = qwen_image.Family.text_arguments
    text_shapes = qwen_image.Family.text_shapes
    prompts_vary = True
    vae_class = "AutoencoderKLQwenImage"
    vae_marks = _qwen.VAE_MARKS
    adapter_targets = qwen_image.Family.adapter_targets
    keep_precise = qwen_image.Family.keep_precise
    modulation = qwen_image.Family.modulation
    further_layers = qwen_image.Family.further_layers
    bucket_multiple = 16
    patch = qwen_image.Family.patch
    latents_as = qwen_image.Family.latents_as
    native_resolution = 1024  # QwenImageEditPlusPipeline: VAE_IMAGE_SIZE
    default_guidance = 4.0  # model card: true_cfg_scale
    captions = "instructions"  # its model card: prompts say what to change
    guidance_argument = qwen_image.Family.guidance_argument
    modelspec_architecture = "Qwen-Image-Edit-Plus"
    kohya_base_version = "qwen_image_edit_plus"
    kohya_naming = "native"
    kohya_module = "networks.lora_qwen_image"  # musubi-tuner
    layouts = qwen_image.Family.layouts
    native_layers = qwen_image.Family.native_layers
    no_adapter = qwen_image.Family.no_adapter
    computed = qwen_image.Family.computed
    sizes_from = qwen_image.Family.sizes_from
    file_names = qwen_image.Family.file_names
    config_marks = {"guidance_embeds": False, "use_additional_t_cond": False}
    reference_config = qwen_image.Family.reference_config
    # ComfyUI's files of 2511 have the marker; a file of 2509 differs from Qwen-Image's in its name only.
    single_file = {"has": ("transformer_blocks.0.img_mod.1.weight", "txt_norm.weight", "__index_timestep_zero__")}

    make_inputs = _qwen.make_inputs
    load_tokenizer = _qwen_edit.load_tokenizer
    list_caveats = _qwen_edit.list_caveats

    @classmethod
    def mend_(cls, pipeline: Any) -> None:
        _qwen_edit.fix_pipeline_(pipeline)

    def encode_prompts(self, prompts: list[str], pictures: Sequence[Sequence[Image.Image]] = ()) -> list[Cond]:
        sizes = [[_compute_pipeline_size(SEEN_SIDE, *picture.size) for picture in seen] for seen in pictures]
        return _qwen_edit.encode_prompts(self, prompts, pictures, sizes)

    @property
    def longest_prompt(self) -> int:
        return _qwen_edit.compute_longest_prompt(self, SEEN_SIDE, self.controls[1])

    def compute_control_size(self, width: int, height: int, resolution: int | None = None) -> tuple[int, int]:
        return _qwen_edit.compute_control_size(
            _compute_pipeline_size(SIDE, width, height), resolution, self.bucket_multiple
        )

    def make_pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        return ModelFamily.make_pipeline_inputs(self, cond, negative) | {"image": list_control_images(cond)}

    @classmethod
    def infer_denoiser_sizes(cls, native: Header, config: Mapping[str, Any], file: Path) -> dict[str, Any]:
        marked = _qwen_edit.MARKER in native
        entries = _files.read_sizes(cls.sizes_from, native, config)
        if marked or re.search("25(09|11)", file.name):
            entries["zero_cond_t"] = marked or "2511" in file.name
        return entries


def _compute_pipeline_size(side: int, width: int, height: int) -> tuple[int, int]:
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

    return pipeline_qwenimage_edit_plus.calculate_dimensions(side * side, width / height)
