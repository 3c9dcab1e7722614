"""FLUX.1 Kontext: FLUX.1-dev trained to edit images; it takes a control image and an instruction.

Black Forest Labs 2025 (https://arxiv.org/abs/2506.15742). The network and its tensors are FLUX.1's. A control image's
latents are appended to the noise as tokens, with 1 in the first position id where the noise has 0; the network's output
for them is dropped. Without a control image it generates from the prompt alone, as FLUX.1-dev does.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from . import _files, _flux, flux
from .base import Cond, Inputs, ModelFamily, list_control_images, list_control_latents

if TYPE_CHECKING:
    from torch import Tensor


class Family(ModelFamily):
    name = "flux_kontext"
    title = "FLUX.1 Kontext"
    example_base = "black-forest-labs/FLUX.1-Kontext-dev"
    controls = (0, 1)
    same_tensors_as = "flux"
    pipeline_class = "FluxKontextPipeline"
    denoiser_class = "FluxTransformer2DModel"
    text_widths = flux.Family.text_widths
    text_millions = flux.Family.text_millions
    text_parts = flux.Family.text_parts
    trained_text = flux.Family.trained_text
    judge_length_by = flux.Family.judge_length_by
    text_answers = flux.Family.text_answers
    text_shapes = flux.Family.text_shapes
    adapter_targets = flux.Family.adapter_targets
    adapter_exclude = flux.Family.adapter_exclude
    keep_precise = flux.Family.keep_precise
    modulation = flux.Family.modulation
    further_layers = flux.Family.further_layers
    bucket_multiple = 16
    patch = flux.Family.patch
    latents_as = flux.Family.latents_as
    native_resolution = 1024  # FluxKontextPipeline: max_area
    default_guidance = 2.5  # model card
    captions = "instructions"  # its model card: prompts say what to change
    uses_negative = False
    embeds_guidance = True
    modelspec_architecture = "flux-1-dev"  # as musubi-tuner writes it: programs treat both as one architecture
    kohya_base_version = "flux_kontext"
    kohya_naming = "bfl_flux"
    kohya_module = "networks.lora_flux"  # musubi-tuner
    layouts = flux.Family.layouts
    layouts_of_diffusers = flux.Family.layouts_of_diffusers
    split_names_in_comfy = flux.Family.split_names_in_comfy
    converter_width = 3072
    auto_layouts = flux.Family.auto_layouts
    native_layers = flux.Family.native_layers
    swapped_halves = flux.Family.swapped_halves
    reference_config = flux.Family.reference_config

    # The network is FLUX.1's; only control images are new.
    encode_with = flux.Family.encode_with
    get_trained_length = flux.Family.get_trained_length
    sizes_from = flux.Family.sizes_from
    infer_denoiser_sizes = flux.Family.infer_denoiser_sizes
    choose_published_parts = flux.Family.choose_published_parts
    published = flux.Family.published
    tokenizers_from = flux.Family.tokenizers_from
    checkpoint_text = flux.Family.checkpoint_text
    file_names = flux.Family.file_names

    def compute_control_size(self, width: int, height: int, resolution: int | None = None) -> tuple[int, int]:
        from diffusers.pipelines.flux import pipeline_flux_kontext

        # As the pipeline does it: round sides down to whole tokens, then take the preferred size of the nearest ratio.
        width, height = (max(self._token_side, side // self._token_side * self._token_side) for side in (width, height))
        preferred = pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS
        _, wide, high = min((abs(width / height - w / h), w, h) for w, h in preferred)
        if resolution is None:
            return wide, high
        scale, multiple = resolution / (wide * high) ** 0.5, self.bucket_multiple
        return tuple(max(multiple, round(side * scale / multiple) * multiple) for side in (wide, high))

    @cached_property
    def _token_side(self) -> int:
        """Side of a token in pixels; a token is 2 x 2 latents."""
        return 2 ** len(_files.read_json(self.folder / "vae" / "config.json")["block_out_channels"])

    def make_inputs(self, denoiser: Any, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        import torch

        tokens, ids = [], []
        for i, latents_BCHW in enumerate([noisy_BCHW, *list_control_latents(cond)]):
            place_S3 = _flux.make_positions(latents_BCHW, cond["prompt_embeds"])["img_ids"]
            place_S3[:, 0] = i
            tokens.append(self.pack(latents_BCHW))
            ids.append(place_S3)
        inputs = _flux.make_inputs(self, denoiser, noisy_BCHW, t_B, cond, guidance)
        return inputs | {"hidden_states": torch.cat(tokens, dim=1), "img_ids": torch.cat(ids)}

    def make_pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        pictures = list_control_images(cond)
        return ModelFamily.make_pipeline_inputs(self, cond, negative) | ({"image": pictures[0]} if pictures else {})

    def make_size_inputs(self, width: int, height: int) -> dict[str, Any]:
        # The pipeline generates an area of 1024 x 1024 pixels unless `max_area` says otherwise.
        return {"width": width, "height": height, "max_area": width * height}

    def list_caveats(self) -> list[str]:
        if not self.checkpoint or self.is_file_called("kontext"):
            return []
        return [self.warn_of_missing_word("Kontext", "FLUX.1")]
