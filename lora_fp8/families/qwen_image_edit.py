"""Qwen-Image-Edit: Qwen-Image trained to edit an image by a prompt; its text encoder sees the image too.

Qwen team 2025. The network and its tensors are Qwen-Image's. The image, at about 1024 x 1024 pixels, goes to Qwen2.5-VL
together with the prompt, and its latents follow the noise as tokens; the network's output for them is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image

from . import _qwen, _qwen_edit, qwen_image
from .base import Cond, ModelFamily, list_control_images

SIDE = 1024
"""Side in pixels of the square to whose area the pipeline resizes the image, for the VAE and the text encoder."""


class Family(ModelFamily):
    name = "qwen_image_edit"
    title = "Qwen-Image-Edit"
    example_base = "Qwen/Qwen-Image-Edit"
    controls = (1, 1)
    prompts_see_controls = True
    same_tensors_as = "qwen_image"
    pipeline_class = "QwenImageEditPipeline"
    denoiser_class = "QwenImageTransformer2DModel"
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
    native_resolution = 1024  # QwenImageEditPipeline: calculate_dimensions(1024 * 1024)
    default_guidance = 4.0  # model card: true_cfg_scale
    captions = "instructions"  # its model card: prompts say what to change
    guidance_argument = qwen_image.Family.guidance_argument
    modelspec_architecture = "Qwen-Image-Edit"
    kohya_base_version = "qwen_image_edit"
    kohya_naming = "native"
    kohya_module = "networks.lora_qwen_image"  # musubi-tuner
    layouts = qwen_image.Family.layouts
    native_layers = qwen_image.Family.native_layers
    no_adapter = qwen_image.Family.no_adapter
    computed = qwen_image.Family.computed
    config_marks = qwen_image.Family.config_marks
    reference_config = qwen_image.Family.reference_config
    sizes_from = qwen_image.Family.sizes_from
    file_names = qwen_image.Family.file_names

    make_inputs = _qwen.make_inputs
    load_tokenizer = _qwen_edit.load_tokenizer
    list_caveats = _qwen_edit.list_caveats

    @classmethod
    def mend_(cls, pipeline: Any) -> None:
        _qwen_edit.fix_pipeline_(pipeline)

    def encode_prompts(self, prompts: list[str], pictures: Sequence[Sequence[Image.Image]] = ()) -> list[Cond]:
        sizes = [[self.compute_control_size(*picture.size) for picture in seen] for seen in pictures]
        return _qwen_edit.encode_prompts(self, prompts, pictures, sizes)

    @property
    def longest_prompt(self) -> int:
        return _qwen_edit.compute_longest_prompt(self, SIDE, 1)

    def compute_control_size(self, width: int, height: int, resolution: int | None = None) -> tuple[int, int]:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

        wide, high, _ = pipeline_qwenimage_edit.calculate_dimensions(SIDE * SIDE, width / height)
        return _qwen_edit.compute_control_size((wide, high), resolution, self.bucket_multiple)

    def make_pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        (picture,) = list_control_images(cond)
        return ModelFamily.make_pipeline_inputs(self, cond, negative) | {"image": picture}
