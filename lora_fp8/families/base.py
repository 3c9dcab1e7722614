"""ModelFamily: what the trainer must know about an architecture. One file in this folder = one subclass named `Family`.

A family states facts (class attributes) and four things only it can know: how prompts become conditioning, how the
denoiser is called, what its pipeline wants to be called with, and a random miniature of itself for the tests.
Everything else is a default here:

Two-phase loading. The cache is filled with the VAE, and then with one text encoder after another (`in_turn`), which
have all left before the denoiser comes. `load_encoders` has them all at once. `empty_denoiser` (built on the
meta device, no memory) and `denoiser_tensors`, which yields one tensor at a time, so that the whole model never exists
in high precision. A family object is cheap: `__init__` finds and checks the files, and loads none of them.

Four places to load from (`model.path`): a diffusers folder, a hub id, a single .safetensors in the original layout
(complemented by `model.components`), or "demo". See `_files.locate`. What is found is checked to be this architecture,
from headers and JSON only, before anything large is read.

The VAE always runs in float32: it is small, runs once per image, and in half precision SDXL's overflows and the others
lose detail. Text encoders run in the model's dtype, and the conditioning they give is stored in it.

Shape suffixes: B batch, C channels, F frames, H height, W width, L text tokens, D features. Latents are BCHW everywhere
outside of a family, whatever its denoiser and its pipeline take: `pack` and `unpack` are the way there and back. Where
a family has `clips`, the latents of a clip of several frames are BCFHW, in all that is called BCHW; pixels likewise.
"""

from __future__ import annotations

import gc
import importlib
import inspect
import json
import logging
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import torch
import transformers
from diffusers.loaders.single_file_utils import (
    convert_ldm_vae_checkpoint,
    create_diffusers_clip_model_from_ldm,
    infer_diffusers_model_type,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from PIL import Image
from torch import Tensor, nn

from lora_fp8 import config, naming
from lora_fp8.config import UserError, UserErrors
from lora_fp8.layouts import text_layer
from lora_fp8.objectives import Objective
from lora_fp8.precision import Format, Quantized, Weight, name_matches, quantize_

from . import UNKNOWN, _files, _in_turn, available, describe, get
from ._files import Header, checkpoint_prefix, native_header
from ._weights import ADVICE, WeightFile

Cond = dict[str, Tensor]
"""Conditioning by name: of ONE image (no batch dimension), or of a batch after `collate`."""

TEXT_PRECISE = ("lm_head", "text_projection", "visual")
"""Name parts of the layers of text encoders that are not quantized: outputs, which are small or unused."""
Conversion = dict[str, tuple[str, Callable[[Tensor], Tensor] | None]]
"""Parameter name in diffusers -> (key in the single file, which rows of that tensor, and in what order)."""


@dataclass(frozen=True)
class Overlong:
    """A prompt that its text encoder does not read to the end.

    Attributes:
        prompt: the whole text.
        lost: its end, which is not read.
        num_lost: tokens in `lost`.
        limit: tokens that are read, without those that mark beginning and end.
    """

    prompt: str
    lost: str
    num_lost: int
    limit: int


@dataclass(frozen=True)
class TextEncoder:
    """A CLIP text encoder in which LoRAs are trained, with the sizes of the released one.

    Attributes:
        kohya: what the names of its layers begin with in kohya's naming.
        comfy: what ComfyUI calls it; "" where the family has no such layout.
        width, hidden: of the embeddings, and inside its MLPs.
        num_layers: how many it has.
        unread: so many of its last layers get no adapter: their answer is not part of the conditioning.
    """

    kohya: str
    comfy: str
    width: int
    hidden: int
    num_layers: int
    unread: int = 0


CLIP_LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")
"""The linears of a layer of CLIP, all of which get an adapter: 72 in CLIP ViT-L, 192 in OpenCLIP ViT-bigG."""


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars of transformers inside: loading a text encoder is not worth a bar in a training log."""
    logging = transformers.utils.logging
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


@contextmanager
def silent_tokenizers() -> Iterator[None]:
    """Inside, diffusers' pipelines do not warn of prompts that they cut: asked at every step they would each time."""
    logger = logging.getLogger("diffusers.pipelines")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class ModelFamily(ABC):
    """One architecture. Depth of inheritance is one, and nothing here needs `super()`.

    Args:
        model: the job's `[model]` table.
        device: where encoders and denoiser run.
        dtype: compute dtype of the denoiser and the text encoders.

    Raises:
        UserError: files are missing, damaged, pickled, or of another architecture.
    """

    # -- facts every family states --------------------------------------------------------------------------------
    name: ClassVar[str]
    title: ClassVar[str]
    example_base: ClassVar[str]
    """What `lora-fp8 new` puts into `model.path`: the released model that most people train on."""
    pipeline_class: ClassVar[str]
    """Name of the pipeline in diffusers."""
    denoiser_class: ClassVar[str]
    denoiser_name: ClassVar[str]
    """"unet" or "transformer": subfolder, pipeline attribute, and prefix of the keys in diffusers' LoRA files."""
    text_parts: ClassVar[dict[str, str]]
    """Subfolder -> class in transformers (or diffusers), of tokenizers and of what makes conditioning of their tokens,
    under the names the pipeline uses."""
    judge_length_by: ClassVar[tuple[str, ...]] = ("tokenizer",)
    """Those of the tokenizers whose limit decides what of a prompt is lost."""
    objective: ClassVar[type[Objective]]
    adapter_targets: ClassVar[tuple[str, ...]]
    """Endings (whole dotted segments) of the names of the layers that get an adapter."""
    adapter_exclude: ClassVar[tuple[str, ...]] = ()
    """Name parts (see `precision.names`) of layers that do not, although their names end so."""
    keep_precise: ClassVar[tuple[str, ...]]
    """Name parts (see `precision.names`) of the layers that stay in the model's dtype: small, or sensitive."""
    modulation: ClassVar[tuple[str, ...]] = ()
    """Name parts of the layers that scale and shift the blocks' norms: they see one row per image and no tokens."""
    bucket_multiple: ClassVar[int]
    """Image sides must be multiples of so many pixels."""
    native_resolution: ClassVar[int]
    """The resolution that the released model was trained at, in pixels."""
    default_guidance: ClassVar[float]
    """Guidance scale for previews."""
    modelspec_architecture: ClassVar[str]
    kohya_base_version: ClassVar[str]
    kohya_naming: ClassVar[str]
    """Which rule of `layouts.NAMINGS` the kohya layout follows."""
    kohya_module: ClassVar[str] = "networks.lora"
    """What sd-scripts or musubi-tuner train LoRAs of this architecture with: `ss_network_module`. Programs show it, and
    take a file for a LoRA by it; where neither trains the architecture it is their plainest."""
    tiny_hw: ClassVar[tuple[int, int]] = (16, 24)
    """Size in pixels that suits the miniature. Not square on purpose: swapped height and width must show."""

    trained_text: ClassVar[dict[str, TextEncoder]] = {}
    """Text encoders that can be trained, by the pipeline's names: those whose LoRA diffusers' pipeline loads."""

    # -- facts with a default -------------------------------------------------------------------------------------
    controls: ClassVar[tuple[int, int]] = (0, 0)
    """Fewest and most control pictures that the denoiser is shown beside the noise. A plain value: read without
    importing the file."""
    prompts_see_controls: ClassVar[bool] = False
    """Whether the text encoders look at the control pictures as well: `encode_prompts` is then given them, and what is
    cached is one conditioning for each picture and caption."""
    clips: ClassVar[tuple[int, int]] = (0, 0)
    """Frames of a clip that are one frame of its latents, after the first, which is one by itself; and frames a second.
    (0, 0) draws pictures only. A plain value, as `controls`."""
    same_tensors_as: ClassVar[str] = ""
    """The family whose single files have the very same tensors, so that nothing but their name tells them apart."""
    single_file: ClassVar[dict[str, Any]] = {}
    """What tells this architecture's single files by their headers: "has": names of tensors; "lacks": what no name
    begins with; "shapes": name -> shape, None for any side; "in_is_out": the first layer takes as many values as the
    last gives, which models with more inputs (inpainting, a first frame) do not. Names without their prefix. By
    structure and not by size: miniatures must pass. A plain value: read without importing the file."""
    bucket_step: ClassVar[int] = 64
    """Default distance between bucket sizes, in pixels: few enough buckets that images share one."""
    embeds_guidance: ClassVar[bool] = False
    """Whether models of this architecture may take the guidance as an input: those distilled from a guided one."""
    uses_negative: ClassVar[bool] = True
    """Whether the pipeline guides away from a negative prompt at its usual settings."""
    vae_class: ClassVar[str] = "AutoencoderKL"
    vae_marks: ClassVar[dict[str, Any]] = {"latents_mean": None, "latents_std": None}
    """Entries of the VAE's config.json that `encode_images` counts on; by default no normalisation by channel."""
    config_marks: ClassVar[dict[str, Any]] = {}
    """Entries of the denoiser's config.json that tell this architecture from others of the same class."""
    checkpoint_text: ClassVar[dict[str, str]] = {}
    """Text encoder -> prefix of its keys in a single-file checkpoint that carries it."""
    native_layers: ClassVar[tuple[naming.Row, ...]] = ()
    """The denoiser's layers in the naming in which the model was first published, and in diffusers': see `naming`."""
    layouts: ClassVar[tuple[str, ...]] = ("kohya", "diffusers")
    """Key layouts that LoRA files of this architecture are written in, the one that most programs read in front."""
    layouts_of_diffusers: ClassVar[tuple[str, ...]] = ("diffusers", "comfy", "kohya")
    """Those of `layouts` that diffusers' pipeline loads whole; tests hold it against what the pipeline does."""
    lokr_of_diffusers: ClassVar[bool] = False
    """Whether diffusers' pipeline loads LoKr under its own names of layers; for most architectures it refuses it."""
    split_names_in_comfy: ClassVar[bool] = False
    """Whether ComfyUI knows the layers by diffusers' names too, each as the rows that it is of a fused one."""
    converter_width: ClassVar[int] = 0
    """The width of the released model, if diffusers' converter of other layouts has it written into it."""
    auto_layouts: ClassVar[tuple[str, ...]] = ()
    """What export.formats = ["auto"] writes; empty: the first of `layouts`, and one for diffusers if that is none."""
    reference_config: ClassVar[dict[str, Any]] = {}
    """Denoiser config of the released model, for single files whose components folder has no denoiser config."""
    index_name: ClassVar[str] = "model_index.json"
    """The file that says which pipeline a folder is made for."""
    pipeline_options: ClassVar[dict[str, Any]] = {}
    """Arguments with which the pipeline is made."""
    text_shapes: ClassVar[dict[str, tuple[int | str, ...]]]
    """What `encode_prompts` makes of a prompt that is as long as it is read: name -> shape. A word is an entry of the
    denoiser's config.json, "tokens" is `longest_prompt`, and "tokens+77" a sum."""
    call_options: ClassVar[dict[str, Any]] = {}
    """Arguments that every call of the pipeline needs, such as one frame where it draws videos."""

    def __init__(self, model: config.Model, *, device: torch.device | str, dtype: torch.dtype):
        self.device, self.dtype, self.text_storage = torch.device(device), dtype, model.text_storage
        parts = ("scheduler", "vae", self.denoiser_name, *self.text_parts)
        self.folder, self.checkpoint = _files.locate(
            model.path, model.components or "", model.revision or "", family=self.name, parts=parts
        )
        self.warnings: list[str] = []
        """Settings of `[model]` that have no effect, and what to know of the files; the trainer shows them."""
        if model.components and not self.checkpoint:
            self.warnings.append(
                f"model.components = {model.components!r} has no effect: model.path is a whole model, not a single file"
            )
        if model.revision and (model.path == "demo" or os.path.exists(os.path.expanduser(model.path))):
            self.warnings.append(f"model.revision = {model.revision!r} has no effect: model.path is a local path")
        self.vae: nn.Module | None = None
        self._text_pipeline: diffusers.DiffusionPipeline | None = None
        self._tokenizers: dict[str, Any] = {}
        self._file = WeightFile(self.checkpoint) if self.checkpoint else None
        self._header: Header = self._file.header if self._file else {}
        self._check_architecture()
        self._check_complete()
        self.warnings += self.caveats()

    # -- what only the family knows -------------------------------------------------------------------------------
    @abstractmethod
    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        """What the pipeline's own `encode_prompt` gives, one unbatched Cond per prompt, in the model's dtype.

        With `prompts_see_controls` there is a second argument: for each prompt its control pictures, RGB, not resized.
        """

    @abstractmethod
    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        """Call the denoiser as its pipeline does. `t_B` is as the objective draws it. -> prediction BCHW"""

    @abstractmethod
    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        """Arguments with which `pipeline()(...)` draws this conditioning of one image.

        `negative` is needed where classifier-free guidance is wanted (guidance > 1), as no text encoder is loaded then.
        """

    @classmethod
    def tiny(cls, folder: Path, seed: int = 0) -> None:
        """Save a complete random miniature in the diffusers layout; sides of linears are multiples of 16."""
        from . import _miniature  # which takes its quiet from here

        with _miniature.seeded(seed):
            cls._tiny_pipeline().save_pretrained(folder, safe_serialization=True)

    @classmethod
    def _tiny_pipeline(cls) -> diffusers.DiffusionPipeline:
        """What `tiny` saves, made of random numbers that the caller has seeded."""
        raise NotImplementedError(f"{cls.name} has no miniature")

    @classmethod
    def pipeline_type(cls) -> Any:
        """The class of the pipeline: diffusers' own, unless that is of a kind that cannot be called with embeddings."""
        return getattr(diffusers, cls.pipeline_class)

    def without_negative(self, empty: Cond) -> Cond | None:
        """What the pipeline takes where nobody gives a negative prompt, for `pipeline_inputs`.

        Args:
            empty: the encoded empty text.
        """
        return empty

    def negative_text(self, prompt: str) -> str:
        """What to give to `encode_prompts` for a prompt to guide away from, where the pipeline encodes it otherwise."""
        return prompt

    def caveats(self) -> list[str]:
        """What to know of the given model before training on it, in one line each, such as that it is distilled."""
        return []

    def file_is_called(self, pattern: str) -> bool:
        """Whether the name of the given single file holds this, in any case: of some models nothing else tells."""
        return bool(self.checkpoint and re.search(pattern, self.checkpoint.name, re.IGNORECASE))

    def distilled_by_name(self) -> bool | None:
        """What the name of a single file says of distillation, None for nothing: its components may be of the other."""
        if self.file_is_called(r"de[-_. ]?(distill|turbo)|undistill|(?<![a-z])(base|raw)(?![a-z])"):
            return False
        return True if self.file_is_called("turbo|distill") else None

    @classmethod
    def recognises(cls, header: Header) -> bool:
        """Whether a single-file checkpoint with these tensors is this architecture."""
        return _files.fits(cls.single_file, native_header(header))

    def convert_checkpoint(self, header: Header) -> Conversion:
        """Where each of the denoiser's parameters is in a single file that `recognises` accepted.

        By default as `native_layers` says.
        """
        if not self.native_layers:
            raise UserError(f"{self.title} cannot be read from a single file; give a diffusers folder")
        shapes = {name: tuple(tensor.shape) for name, tensor in self.empty_denoiser().state_dict().items()}
        prefix = checkpoint_prefix(header)
        found = naming.conversion(self.native_layers, header, shapes, prefix)
        return {name: (key, rows and _rows(*rows)) for name, key, rows in found}

    def encode_with(self, pipeline: diffusers.DiffusionPipeline, prompts: list[str], cond: Cond) -> Cond:
        """The conditioning of a batch of prompts with what `pipeline`'s text encoders say of them, with its gradient.

        Only families with `trained_text` have it; `pipeline` holds at least these encoders and their tokenizers.

        Args:
            cond: collated conditioning of the same prompts, for all that these encoders do not say.
        """
        raise NotImplementedError(f"{self.title} has no text encoder that is trained")

    # -- defaults a family may replace ----------------------------------------------------------------------------
    @torch.no_grad()
    def encode_images(self, pixels_BCHW: Tensor) -> Tensor:
        """Pixels in [-1, 1] -> latents as the denoiser wants them, float32. Needs `load_encoders` or `load_vae`.

        The mode of the VAE's posterior, not a sample: its spread is far below the training noise, and a cache that can
        be made twice with the same bytes is worth more.
        """
        if self.vae is None:
            raise RuntimeError("encode_images before load_encoders")
        latents_BCHW = self.vae.encode(pixels_BCHW.to(self.device, torch.float32)).latent_dist.mode()
        return (latents_BCHW - (self.vae.config.shift_factor or 0.0)) * self.vae.config.scaling_factor

    @torch.no_grad()
    def decode_latents(self, latents_BCHW: Tensor) -> Tensor:
        """The inverse of `encode_images`: latents -> pixels in about [-1, 1], float32."""
        if self.vae is None:
            raise RuntimeError("decode_latents before load_vae")
        latents_BCHW = latents_BCHW.to(self.device, torch.float32) / self.vae.config.scaling_factor
        return self.vae.decode(latents_BCHW + (self.vae.config.shift_factor or 0.0), return_dict=False)[0]

    def control_size(self, width: int, height: int, resolution: int | None = None) -> tuple[int, int]:
        """The size (width, height) that a control picture of this size is shown in, stretched to it.

        Args:
            resolution: side of the square with its area; None: as the pipeline shows it.
        """
        raise NotImplementedError(f"{self.title} is shown no control pictures")

    def image_conditioning(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Cond:
        """Facts about one image that the denoiser is told beside the prompt. Pixels; `crop_top_left` is (y, x)."""
        return {}

    def pack(self, latents_BCHW: Tensor) -> Tensor:
        """Latents as the pipeline passes them around: its `latents=`, what its scheduler steps, its output "latent"."""
        return latents_BCHW

    def unpack(self, packed: Tensor, latent_hw: tuple[int, int]) -> Tensor:
        """The inverse of `pack`. -> BCHW"""
        return packed

    def pictures(self, output: Any) -> list[Image.Image]:
        """The pictures in what the pipeline's call returned."""
        return output.images

    def usual_guidance(self) -> float:
        """Guidance scale for previews of the given model: distilled ones may want none."""
        return self.default_guidance

    def frames(self, output: Any) -> list[Image.Image]:
        """All frames of the first clip in what the pipeline's call returned; of a picture, that alone."""
        return self.pictures(output)[:1]

    def latent_frames(self, num_frames: int) -> int:
        """How many frames the latents of a clip of so many frames have."""
        return 1 if num_frames == 1 else 1 + (num_frames - 1) // self.clips[0]

    def guidance_inputs(self, guidance: float) -> dict[str, Any]:
        """Arguments with which the pipeline draws with this guidance; 1 is to draw without a negative prompt."""
        return {"guidance_scale": guidance}

    def size_inputs(self, width: int, height: int) -> dict[str, Any]:
        """Arguments with which the pipeline draws in this size, in pixels."""
        return {"width": width, "height": height}

    def collate(self, conds: list[Cond]) -> Cond:
        """Unbatched conditionings -> one batch. Where lengths differ by prompt, see `padded`."""
        return {key: torch.stack([cond[key] for cond in conds]) for key in conds[0]}

    def token_limit(self, name: str) -> int:
        """Tokens of a prompt that the encoder of this tokenizer reads, those that mark beginning and end included."""
        return self.tokenizer(name).model_max_length

    def as_read(self, prompt: str) -> tuple[str, str]:
        """What the tokenizers are given for a prompt: the words that the pipeline puts before it, and its own."""
        return "", prompt

    def overlong(self, prompts: Sequence[str]) -> list[Overlong]:
        """The prompts of which `encode_prompts` cuts off the end. Needs the tokenizers only, which it loads itself."""
        found: dict[str, Overlong] = {}
        for name in self.judge_length_by:
            for prompt, cut in self.cut_by(name, prompts).items():
                if prompt not in found or cut.num_lost > found[prompt].num_lost:
                    found[prompt] = cut
        return list(found.values())

    def cut_by(self, name: str, prompts: Sequence[str]) -> dict[str, Overlong]:
        """The prompts of which the encoder of this tokenizer does not read the end."""
        if not prompts:
            return {}
        tokenizer = self.tokenizer(name)
        limit = self.token_limit(name) - tokenizer.num_special_tokens_to_add()
        read = [self.as_read(prompt) for prompt in prompts]
        texts = [before + text for before, text in read]
        tokens = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        found: dict[str, Overlong] = {}
        for prompt, (before, _), text, spans in zip(prompts, read, texts, tokens["offset_mapping"], strict=True):
            if len(spans) > limit:
                own = limit - sum(end <= len(before) for _, end in spans)
                lost = text[max(len(before), spans[limit][0]) :]
                found[prompt] = Overlong(text.removeprefix(before), lost, len(spans) - limit, own)
        return found

    @property
    def longest_prompt(self) -> int:
        """Tokens of conditioning that a prompt makes at most."""
        return getattr(self, "max_sequence_length", None) or min(map(self.token_limit, self.judge_length_by))

    def longest_cond(self, denoiser_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Shapes of what `encode_prompts` gives for the longest prompt, to reckon memory before anything is encoded."""
        sizes = {**denoiser_config, "tokens": self.longest_prompt}

        def size(words: int | str) -> int:
            return sum(int(word) if str(word).isdecimal() else sizes[word] for word in str(words).split("+"))

        return {name: tuple(map(size, shape)) for name, shape in self.text_shapes.items()}

    def seq_len(self, latent_hw: tuple[int, ...]) -> int:
        """Image tokens that the denoiser sees: what a resolution-dependent shift depends on.

        Args:
            latent_hw: (height, width) of the latents, of clips (frames, height, width).
        """
        return latent_hw[0] * latent_hw[1]

    def check_bucket(self, width: int, height: int) -> None:
        """Refuse a size of pictures, in pixels, that the denoiser has no places for; asked before any is encoded.

        Raises:
            UserError: it is too large.
        """
        return

    def caption_caveats(self, captions: Sequence[str]) -> list[str]:
        """What to know of these captions before training on them, in one line each; asked before any is encoded."""
        return []

    def unused_settings(self, section: config.Objective) -> list[str]:
        """One sentence per setting that has no effect with this model; the trainer warns with them."""
        if section.guidance != 1.0 and not self.embeds_guidance:
            return [f"objective.guidance = {section.guidance} has no effect: {self.title} has no guidance embedding"]
        return []

    @classmethod
    def without_adapter(cls, denoiser: nn.Module) -> set[str]:
        """Full names of layers that get no adapter whoever asks: nothing reads their answer, so that they would never
        learn, or a LoRA of theirs would be another one in the model's original naming."""
        return set()

    @classmethod
    def halves_swapped(cls, denoiser_config: Mapping[str, Any]) -> set[str]:
        """Layers whose rows the original has as (shift, scale) and diffusers as (scale, shift)."""
        return set()

    @classmethod
    def layer_shapes(cls, denoiser_config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        """{module path: shape of its weight} of a denoiser with this config, of linears and convolutions."""
        return _layer_shapes(cls.denoiser_class, json.dumps(dict(denoiser_config), sort_keys=True, default=str))

    @classmethod
    def text_layer_shapes(cls) -> dict[str, tuple[int, int]]:
        """{module path: (out, in)} of the linears that LoRAs adapt in the released model's trained text encoders."""
        return {
            text_layer(name, f"encoder.layers.{number}.{layer}"): {
                "mlp.fc1": (about.hidden, about.width),
                "mlp.fc2": (about.width, about.hidden),
            }.get(layer, (about.width, about.width))
            for name, about in cls.trained_text.items()
            for number in range(about.num_layers)
            for layer in CLIP_LAYERS
        }

    @classmethod
    def recommended_layouts(cls) -> tuple[str, ...]:
        """The layouts that export.formats = ["auto"] stands for."""
        first = cls.layouts[0]
        return cls.auto_layouts or ((first,) if first in cls.layouts_of_diffusers else (first, "diffusers"))

    @classmethod
    def adapter_names(cls, denoiser: nn.Module, targets: Sequence[str] = ()) -> list[str]:
        """Full names of the layers that get an adapter, in the denoiser's own order.

        Args:
            targets: endings that a user chose in place of the family's; [] means the family's. "^name" is one layer,
                named in full, and overrides `adapter_exclude`.

        Raises:
            UserErrors: a target that matches no layer.
        """
        layers = [n for n, m in denoiser.named_modules() if hasattr(m, "in_features") or isinstance(m, nn.Conv2d)]
        left_out = cls.without_adapter(denoiser)
        layers = [name for name in layers if name not in left_out]
        chosen: set[str] = set()
        problems = []
        for target in targets or cls.adapter_targets:
            if target.startswith("^"):
                matched = {n for n in layers if n == target[1:]}
            else:
                matched = {n for n in layers if n == target or n.endswith(f".{target}")}
                matched = {n for n in matched if not any(name_matches(n, e) for e in cls.adapter_exclude)}
            if not matched:
                problems.append(f"adapter.targets: {target!r} is the ending of no layer of {cls.title}")
            chosen |= matched
        if problems and targets:
            raise UserErrors(problems)
        return [n for n in layers if n in chosen]

    # -- phase one: encoders --------------------------------------------------------------------------------------
    def load_encoders(self) -> None:
        """VAE, tokenizers and text encoders."""
        self.load_vae()
        parts = {name: self._load_text_part(name, self.text_storage) for name in self.text_parts}
        self._text_pipeline = self._assemble(**parts)

    def load_vae(self) -> None:
        """The VAE alone, which previews need for decoding."""
        if self.vae is not None:
            return
        cls = getattr(diffusers, self.vae_class)
        prefix = self._vae_prefix()
        if prefix:
            vae = cls.from_config(cls.load_config(self.folder / "vae"))
            vae.load_state_dict(self._convert_vae(prefix, dict(vae.config)))  # copies, and so widens to float32
        else:
            vae = self._from_pretrained(cls, "vae", "diffusion_pytorch_model", dtype=torch.float32)
        self.vae = vae.to(self.device).eval().requires_grad_(False)

    def empty_vae(self) -> nn.Module:
        """The VAE on the meta device: all shapes, no memory."""
        cls = getattr(diffusers, self.vae_class)
        with torch.device("meta"):
            return cls.from_config(cls.load_config(self.folder / "vae")).eval().requires_grad_(False)

    def tokenizer(self, name: str) -> Any:
        """One of the tokenizers of `text_parts`, or the processor that makes a picture ready for a text encoder: small,
        so it is loaded when first asked for and kept."""
        if name not in self._tokenizers:
            cls = getattr(transformers, self.text_parts[name])
            self._tokenizers[name] = cls.from_pretrained(self.folder / name, local_files_only=True)
        return self._tokenizers[name]

    def vae_bytes(self) -> int:
        """What the VAE takes, by its file's header."""
        prefix = self._vae_prefix()
        if prefix:
            vae = {k: v for k, v in self._header.items() if k.startswith(prefix)}
        else:
            (path, *_) = _files.weight_files(self.folder / "vae", "diffusion_pytorch_model")
            vae = _files.read_header(path)
        return sum(map(math.prod, vae.values())) * torch.float32.itemsize

    def text_bytes(self) -> dict[str, int]:
        """What each text encoder takes while captions are encoded, by the headers of their files."""
        found = {}
        for name in self._text_encoders():
            if self._has_text(name):
                headers = [{k: v for k, v in self._header.items() if k.startswith(self.checkpoint_text[name])}]
            else:
                headers = list(
                    map(_files.read_header, _files.weight_files(self.folder / name, self._text_class(name)[1]))
                )
            found[name] = sum(self._text_bytes(key, shape) for header in headers for key, shape in header.items())
        return found

    def _text_bytes(self, key: str, shape: tuple[int, ...]) -> int:
        """A tensor of a text encoder, as it is held."""
        is_linear = len(shape) == 2 and key.endswith(".weight") and not re.search("embed|shared|relative|wte|wpe", key)
        kept = any(name_matches(key.removesuffix(".weight"), part) for part in TEXT_PRECISE)
        if self.text_storage == "none" or not is_linear or kept:
            return math.prod(shape) * self.dtype.itemsize
        forms = [Format(self.text_storage, scale) for scale in config.SCALES[self.text_storage]]
        return next(form for form in forms if not form.problem(shape)).num_bytes(shape)

    def in_turn(self, asks: Sequence[Callable[[], Any]]) -> Iterator[tuple[int, Any]]:
        """(number, what it returns) of each of these functions, which call `encode_prompts`, with one text encoder in
        memory at a time. They are called several times: see `_in_turn`. Needs nothing loaded."""
        encoders = self._text_encoders()
        turns = _in_turn.Turns(
            encoders,
            partial(self._load_text_part, storage=self.text_storage),
            _give_back_memory,
            self.device,
            self.dtype,
        )
        tokenizers = {name: self.tokenizer(name) for name in self.text_parts if self._is_tokenizer(name)}
        if len(encoders) > 1:
            self._text_pipeline = self._assemble(**tokenizers, **turns.standins)
            yield from turns.ask(asks)
        else:  # as it is, whatever the pipeline does with it
            (name,) = encoders
            self._text_pipeline = self._assemble(**tokenizers, **{name: turns.load(name)})
            yield from enumerate(ask() for ask in asks)

    def free_encoders(self) -> None:
        """Drop VAE and text encoders and give their memory back."""
        self.vae = self._text_pipeline = None
        _give_back_memory()

    @property
    def text_pipeline(self) -> diffusers.DiffusionPipeline:
        """The diffusers pipeline with the text encoders in it and no denoiser, for its `encode_prompt`."""
        if self._text_pipeline is None:
            raise RuntimeError("encode_prompts before load_encoders")
        return self._text_pipeline

    # -- phase two: denoiser --------------------------------------------------------------------------------------
    def denoiser_config(self) -> dict[str, Any]:
        """The denoiser's config.json, or the released model's where a single file comes with none."""
        path = self.folder / self.denoiser_name / "config.json"
        return _files.read_json(path) if path.is_file() else dict(self.reference_config)

    def empty_denoiser(self) -> nn.Module:
        """The denoiser on the meta device: all shapes, no memory."""
        with torch.device("meta"):
            denoiser = getattr(diffusers, self.denoiser_class).from_config(self.denoiser_config())
        saved = denoiser.state_dict().keys()
        lost = [n for n, b in denoiser.named_buffers() if b.is_meta and n not in saved]
        if lost:  # nothing in the files could ever fill them
            raise RuntimeError(f"{self.name}: buffers {lost} are computed, not stored; rebuild them in empty_denoiser")
        return denoiser

    def denoiser_tensors(self) -> Iterator[tuple[str, Weight]]:
        """(diffusers parameter name, CPU tensor), one at a time; nothing but the current tensor is held.

        What the file holds in FP8 comes as `Quantized`, with its scales.
        """
        if self._file is None:
            for path in self._denoiser_files():
                file = WeightFile(path)
                for name in file.header:
                    yield name, file.read(name)
            return
        for name, (key, change) in self.convert_checkpoint(self._header).items():
            yield name, _changed(self._file.read(key), change)

    # -- previews -------------------------------------------------------------------------------------------------
    def scheduler_config(self) -> dict[str, Any]:
        """The model's scheduler_config.json. A single file can mark itself as v-prediction with an empty tensor."""
        scheduler = _files.read_json(self.folder / "scheduler" / "scheduler_config.json")
        if "v_pred" in self._header:
            scheduler["prediction_type"] = "v_prediction"
        if "ztsnr" in self._header:
            scheduler["rescale_betas_zero_snr"] = True
        return scheduler

    def trained_text_parts(self) -> dict[str, Any]:
        """The text encoders that can be trained and their tokenizers, loaded anew, and not quantized."""
        pairs = [(encoder.replace("text_encoder", "tokenizer"), encoder) for encoder in self.trained_text]
        return {name: self._load_text_part(name, "none") for pair in pairs for name in pair}

    def empty_trained_text(self) -> dict[str, nn.Module]:
        """The text encoders of `trained_text` on the meta device, in the model's dtype: all shapes, no memory."""
        found = {}
        for name in self.trained_text:
            cls = self._text_class(name)[0]
            with torch.device("meta"):
                encoder = cls(cls.config_class.from_pretrained(self.folder / name, local_files_only=True))
            found[name] = encoder.to(self.dtype).requires_grad_(False)
        return found

    def trained_text_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, CPU tensor) of all that the text encoders of `trained_text` hold, one encoder at a time.

        Names are those of an adapter's modules with `.weight` or `.bias` behind.
        """
        for name in self.trained_text:
            for path, tensor in self._load_text_part(name, "none").state_dict().items():
                yield text_layer(name, path), tensor.cpu()

    def trained_text_pipeline(self) -> diffusers.DiffusionPipeline:
        """A pipeline of `trained_text_parts` and nothing else, for `encode_with`."""
        return self._assemble(**self.trained_text_parts())

    def pipeline(self, denoiser: nn.Module | None = None, *, text: bool = False) -> diffusers.DiffusionPipeline:
        """The diffusers pipeline with this denoiser, the VAE and the model's own scheduler.

        Call it with `pipeline_inputs`. Latents run in the dtype of the prompt embeds and are widened for the VAE.

        Args:
            text: with `trained_text_parts`, into which a LoRA can be loaded; else there are no text encoders.
        """
        self.load_vae()
        vae = self.vae
        if "decode" not in vars(vae):
            decode = vae.decode
            # Pipelines hand latents over in the denoiser's dtype, and pictures to be answered in it; this VAE is in
            # float32 whatever that is.
            vae.decode = lambda z, *args, **kwargs: decode(z.to(torch.float32), *args, **kwargs)
            if self.controls[1]:
                vae.encode = _encoding_as_given(vae.encode)
        scheduler = self.scheduler_config()
        class_name = scheduler.get("_class_name")
        scheduler_class = getattr(diffusers, str(class_name), None)
        if scheduler_class is None:
            raise UserError(f"{self.folder}/scheduler: diffusers has no scheduler named {class_name!r}")
        parts = {"vae": vae, "scheduler": scheduler_class.from_config(scheduler), self.denoiser_name: denoiser}
        parts |= self.trained_text_parts() if text else {}
        pipeline = self._assemble(**parts)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @classmethod
    def mend_(cls, pipeline: diffusers.DiffusionPipeline) -> None:
        """Puts right, in place, what diffusers' pipeline of this architecture does in another way than the model was
        trained, and than other programs do: a known bug, named in the family's file. Here nothing."""
        return

    # -- identities -----------------------------------------------------------------------------------------------
    def encoder_identity(self, what: str) -> str:
        """SHA-256 over the files that decide what "vae" or "text" encoders answer: weights, configs, tokenizers."""
        if what == "vae":
            files = self._config_and_weights("vae", "diffusion_pytorch_model", from_checkpoint=bool(self._vae_prefix()))
        elif what == "text":
            files = []
            for name in self.text_parts:
                if self._is_tokenizer(name):
                    kinds = (".json", ".txt", ".jinja", ".model")  # a chat's template is part of what is encoded
                    found = sorted(p for p in (self.folder / name).iterdir() if p.suffix in kinds)
                    files += [(f"{name}/{p.name}", p) for p in found]
                else:
                    stem = self._text_class(name)[1]
                    files += self._config_and_weights(name, stem, from_checkpoint=self._has_text(name))
        else:
            raise ValueError(f"encoder_identity({what!r}): 'vae' or 'text'")
        digest = _files.digest(files)
        quantized = what == "text" and self.text_storage != "none"
        return f"{digest} {self.text_storage}" if quantized else digest

    def base_identity(self) -> str:
        """SHA-256 over the denoiser's files (of a single-file checkpoint: the whole file)."""
        if self.checkpoint:
            return _files.digest([("checkpoint", self.checkpoint)])
        return _files.digest(self._config_and_weights(self.denoiser_name, "diffusion_pytorch_model"))

    # -- below: how the defaults above do it ----------------------------------------------------------------------
    def _check_architecture(self) -> None:
        relative = get(self.same_tensors_as) if self.same_tensors_as else None
        if self.checkpoint:
            if not self.recognises(self._header) and not (relative and relative.recognises(self._header)):
                raise UserError(self._other_architecture(str(self.checkpoint), *describe_checkpoint(self._header)))
        index = self.folder / self.index_name
        if index.is_file():
            found = str(_files.read_json(index).get("_class_name"))
            # The parts beside a single file may be its relative's.
            if found != self.pipeline_class and not (self.checkpoint and relative and found == relative.pipeline_class):
                other = self._family_of(found)
                what = f"{other.title} ({found})" if other else f"made for {found}"
                raise UserError(self._other_architecture(str(self.folder), what, other))
        elif not self.checkpoint:
            raise UserError(f"{self.folder} is not a diffusers folder (it has no {self.index_name})")
        foreign = self._foreign_mark(self.folder)
        if foreign:
            other = self._family_of(self.pipeline_class)
            advice = f"; set model.family = {other.name!r} for {other.title}" if other else ""
            raise UserError(f"{self.folder} is not {self.title}: {foreign}{advice}")

    @classmethod
    def _foreign_mark(cls, folder: Path) -> str:
        """The first entry of a folder's configs that this architecture does not have, in words; "" where all fit."""
        expected = {cls.denoiser_name: cls.config_marks | {"_class_name": cls.denoiser_class}}
        # A VAE of another kind, or with a normalisation of its own, would give latents that the denoiser does not know.
        expected["vae"] = cls.vae_marks | {"_class_name": cls.vae_class}
        for part, marks in expected.items():
            path = folder / part / "config.json"
            found = _files.read_json(path) if path.is_file() else marks
            for key, value in marks.items():
                # An entry that is absent was written before it existed, and has its default, which is "no" or "none".
                if (found.get(key) or None) != (value or None):
                    return f"{part}/config.json says {key} = {found.get(key)!r}, expected {value!r}"
        return ""

    def _family_of(self, pipeline_class: str) -> type[ModelFamily] | None:
        """The family that a folder with this pipeline is of: some share one, and the denoiser's config tells."""
        sharing = [family for family in _families() if family.pipeline_class == pipeline_class]
        return next((family for family in sharing if not family._foreign_mark(self.folder)), None)

    def _check_unquantized(self) -> None:
        """That no part of the folder was saved with a quantization of diffusers or transformers."""
        weighed = [self.denoiser_name] if self._file is None else []
        weighed += ["vae"] if not self._vae_prefix() else []
        weighed += [name for name in self.text_parts if not self._is_tokenizer(name) and not self._has_text(name)]
        problems = []
        for name in weighed:
            path = self.folder / name / "config.json"
            section = _files.read_json(path).get("quantization_config") if path.is_file() else None
            if section:
                told = section if isinstance(section, dict) else {}
                bits = " (4 bits)" if told.get("load_in_4bit") else " (8 bits)" if told.get("load_in_8bit") else ""
                method = told.get("quant_method") or "a method without a name"
                problems.append(f"{path.parent} was saved quantized by {method}{bits}, which is not read; {ADVICE}")
        if problems:
            raise UserErrors(problems)

    def _other_architecture(self, path: str, what: str, other: type[ModelFamily] | None) -> str:
        advice = f"set model.family = {other.name!r} or choose another file" if other else "choose another file"
        return f"{path} is {what}, but the config says model.family = {self.name!r} ({self.title}); {advice}"

    def _check_complete(self) -> None:
        """All missing files at once, each with its place. Damaged ones are found here too, by their headers."""
        wanted = ["scheduler/scheduler_config.json", "vae/config.json"]
        if not self.checkpoint:
            wanted.append(f"{self.denoiser_name}/config.json")
        missing = [w for w in wanted if not (self.folder / w).is_file()]
        weights: list[tuple[str, Path]] = []
        needed = {} if self.checkpoint else {self.denoiser_name: "diffusion_pytorch_model"}
        if not self._vae_prefix():
            needed["vae"] = "diffusion_pytorch_model"
        for name in self.text_parts:
            part = self.folder / name
            if self._is_tokenizer(name):
                known = ("tokenizer.json", "vocab.json", "spiece.model")
                if name == "processor":
                    known = ("preprocessor_config.json", "processor_config.json")
                if not any((part / k).is_file() for k in known):
                    missing.append(f"{name}/ ({' or '.join(known)})")
                continue
            if not (part / "config.json").is_file():
                missing.append(f"{name}/config.json")
            if not self._has_text(name):
                needed[name] = self._text_class(name)[1]
        for name, stem in needed.items():
            found = _files.weight_files(self.folder / name, stem)
            weights += [(name, path) for path in found]
            if not found:
                missing.append(f"{name}/{stem}.safetensors")
        self._check_unquantized()
        for name, path in weights:
            file = WeightFile(path)
            if name == self.denoiser_name:
                self.warnings += file.notes()
            elif file.scaled:  # diffusers and transformers read these, and know nothing of the scales
                raise UserError(f"{path} is quantized with scales, which is read of the denoiser only; {ADVICE}")
        if self._file:
            self.warnings += self._file.notes()
        if missing:
            why = f", which {self.checkpoint} needs beside it" if self.checkpoint else ""
            raise UserError(f"{self.folder} lacks {', '.join(missing)}{why}")

    def _is_tokenizer(self, name: str) -> bool:
        return "tokenizer" in name or name == "processor"

    def _text_encoders(self) -> list[str]:
        return [name for name in self.text_parts if not self._is_tokenizer(name)]

    def _text_class(self, name: str) -> tuple[Any, str]:
        """The class of a text part, and what its weights are called: some are networks of diffusers."""
        wanted = self.text_parts[name]
        if hasattr(transformers, wanted):
            return getattr(transformers, wanted), "model"
        return getattr(diffusers, wanted), "diffusion_pytorch_model"

    def _denoiser_files(self) -> list[Path]:
        return _files.weight_files(self.folder / self.denoiser_name, "diffusion_pytorch_model")

    def _config_and_weights(self, name: str, stem: str, *, from_checkpoint: bool = False) -> list[tuple[str, Path]]:
        part = self.folder / name
        if from_checkpoint and self.checkpoint:
            weights = [("checkpoint", self.checkpoint)]
        else:
            weights = [(f"{name}/{p.name}", p) for p in _files.weight_files(part, stem)]
        return [(f"{name}/config.json", part / "config.json"), *weights]

    def _from_pretrained(self, cls: Any, name: str, stem: str, **options: Any) -> Any:
        files = _files.weight_files(self.folder / name, stem)
        for path in files:
            _files.read_header(path)
        options |= {"variant": _files.variant(files), "use_safetensors": True, "local_files_only": True}
        with quiet():
            return cls.from_pretrained(self.folder / name, **options)

    def _load_text_part(self, name: str, storage: str) -> Any:
        if self._is_tokenizer(name):
            return self.tokenizer(name)
        cls, stem = self._text_class(name)
        if self._has_text(name):
            encoder = self._convert_text(cls, name)
        else:
            encoder = self._from_pretrained(cls, name, stem, dtype=self.dtype)
        if storage != "none":
            # T5 names its `wo` here, which transformers itself holds in float32 beside float16 only.
            encoder._keep_in_fp32_modules = ()
            quantize_(encoder, config.Quantize(storage=storage), TEXT_PRECISE, self.dtype)
            return encoder.to(self.device).eval()
        return encoder.to(self.device, self.dtype).eval().requires_grad_(False)

    def _assemble(self, **parts: Any) -> diffusers.DiffusionPipeline:
        """The pipeline with these parts and None for the others; options as the model's model_index.json has them."""
        cls = self.pipeline_type()
        index_path = self.folder / self.index_name
        index = _files.read_json(index_path) if index_path.is_file() else {}
        arguments: dict[str, Any] = {}
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            if name == "self":
                continue
            if name in parts or parameter.default is inspect.Parameter.empty:
                arguments[name] = parts.get(name)
            elif name in index and not _is_component(index[name]):
                arguments[name] = index[name]
        pipeline = cls(**{**arguments, **self.pipeline_options})
        self.mend_(pipeline)
        return pipeline

    # Single-file checkpoints that carry more than the denoiser. The converters are diffusers' own.
    def _vae_prefix(self) -> str | None:
        return next((p for p in ("first_stage_model.", "vae.") if f"{p}decoder.conv_in.weight" in self._header), None)

    def _has_text(self, name: str) -> bool:
        prefix = self.checkpoint_text.get(name)
        return prefix is not None and any(k.startswith(prefix) for k in self._header)

    def _tensors_with(self, prefix: str) -> dict[str, Tensor]:
        assert self._file is not None
        return {k: self._file.decoded(k) for k in self._header if k.startswith(prefix)}

    def _convert_vae(self, prefix: str, vae_config: dict[str, Any]) -> dict[str, Tensor]:
        return convert_ldm_vae_checkpoint(self._tensors_with(prefix), vae_config)

    def _convert_text(self, cls: Any, name: str) -> nn.Module:
        tensors = self._tensors_with(self.checkpoint_text[name])
        # A buffer of old versions of transformers, which new ones compute.
        tensors = {k: v for k, v in tensors.items() if not k.endswith(".position_ids")}
        return create_diffusers_clip_model_from_ldm(
            cls, tensors, subfolder=name, config=str(self.folder), torch_dtype=self.dtype
        )


def _give_back_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _encoding_as_given(encode: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The `encode` of a float32 VAE, taking pictures of any dtype and answering in theirs."""

    def encode_as_given(pixels: Tensor) -> Any:
        parameters = encode(pixels.to(torch.float32)).latent_dist.parameters
        return AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(parameters.to(pixels.dtype)))

    return encode_as_given


def _is_component(entry: Any) -> bool:
    """Whether an entry of model_index.json names a part of the pipeline, as [library, class] or [null, null]."""
    return isinstance(entry, list) and all(item is None or isinstance(item, str) for item in entry)


@cache
def _layer_shapes(denoiser_class: str, denoiser_config: str) -> Mapping[str, tuple[int, ...]]:
    with torch.device("meta"):
        denoiser = getattr(diffusers, denoiser_class).from_config(json.loads(denoiser_config))
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return {path: tuple(layer.weight.shape) for path, layer in denoiser.named_modules() if isinstance(layer, layers)}


def as_clip(tensor: Tensor) -> Tensor:
    """BCHW or BCFHW -> BCFHW, as networks for videos take both: a picture is a clip of one frame."""
    return tensor if tensor.ndim == 5 else tensor[:, :, None]


def as_picture(tensor: Tensor) -> Tensor:
    """The inverse of `as_clip`: BCFHW -> BCHW, if there is one frame."""
    return tensor[:, :, 0] if tensor.shape[2] == 1 else tensor


def control_latents(cond: Cond) -> list[Tensor]:
    """The latents of the control pictures in a conditioning, (C, H, W) or (B, C, H, W) each, in their order."""
    return [cond[f"control_{i}"] for i in range(sum(re.fullmatch(r"control_\d+", name) is not None for name in cond))]


def control_pictures(cond: Cond) -> list[Image.Image]:
    """The control pictures of a preview's conditioning, as their files have them: see `data.cache.preview_pictures`."""
    names = [f"control_picture_{i}" for i in range(sum(name.startswith("control_picture_") for name in cond))]
    return [Image.fromarray(cond[name].cpu().numpy()) for name in names]


def padded(conds: Sequence[Cond], name: str) -> Cond:
    """One entry of several conditionings in a batch, when prompts differ in length.

    Returns:
        `name`: (B, L, ...) with zeros behind the shorter ones; `name`_mask: bool (B, L), True where there is a token.
    """
    rows = [cond[name] for cond in conds]
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    mask_BL = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    return {name: nn.utils.rnn.pad_sequence(rows, batch_first=True), f"{name}_mask": mask_BL}


def _rows(begin: int, end: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[begin:end]


def _changed(weight: Weight, change: Callable[[Tensor], Tensor] | None) -> Weight:
    if change is None:
        return weight
    return weight.changed(change) if isinstance(weight, Quantized) else change(weight)


def _families() -> list[type[ModelFamily]]:
    # Only for the error message: at that moment it is worth importing the other files.
    return [importlib.import_module(f"{__package__}.{name}").Family for name in available()]


def describe_checkpoint(header: Header) -> tuple[str, type[ModelFamily] | None]:
    """What a single file seems to be, in words for an error message, and its family if there is one."""
    what, name = describe(header)
    if what:
        return what, get(name) if name else None
    # diffusers knows many more; it reads shapes only, and answers "v1" when it knows nothing.
    try:
        kind = infer_diffusers_model_type({key: torch.empty(shape, device="meta") for key, shape in header.items()})
    except (KeyError, IndexError):  # it looks further where a mark fits, and a part of a model lacks the rest
        kind = "v1"
    return (UNKNOWN if kind == "v1" else f"{kind!r} (as diffusers calls it)"), None
