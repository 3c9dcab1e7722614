"""ModelFamily: what the trainer must know about an architecture. One file in this folder = one subclass named `Family`.

A family states facts (class attributes) and two things only it can know: what its denoiser is called with, unless that
is a fact as well (`denoiser_reads`), and the parts of a random miniature of itself for the tests. Everything else is a
default, here or in a room beside: `_encoders` (VAE and text encoders, from their files), `_latents` (pixels to latents
and back), `_prompts` (texts to conditioning), and `_checks` (is it this architecture, and whole?).

Two-phase loading. The cache is filled with the VAE, and then with one text encoder after another (`in_turn`), which
have all left before the denoiser comes: `empty_denoiser` (built on the meta device, no memory) and `denoiser_tensors`,
which yields one tensor at a time, so that the whole model never exists in high precision. A family object is cheap:
`__init__` finds and checks the files, and loads none of them.

Four places to load from (`model.path`): a diffusers folder, a hub id, a single .safetensors in the original layout
(complemented by `model.components`), or "demo". See `_files.locate`. The denoiser and text encoders run in the model's
dtype, and so is the conditioning stored; the VAE runs in float32.

Shape suffixes: B batch, C channels, F frames, H height, W width, L text tokens, D features. Latents are BCHW everywhere
outside of a family, whatever its denoiser and its pipeline take: `pack` and `unpack` are the way there and back. Where
a family has `clips`, the latents of a clip of several frames are BCFHW, in all that is called BCHW; pixels likewise.
"""

from __future__ import annotations

import inspect
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from PIL import Image
from torch import Tensor, nn

from lora_fp8 import config, naming
from lora_fp8.config import UserError, UserErrors
from lora_fp8.layouts import text_layer
from lora_fp8.objectives import FlowMatching, Objective
from lora_fp8.precision import Quantized, Weight, name_matches

from . import _files, _miniature
from ._checks import Checks
from ._encoders import Encoders
from ._files import Header, checkpoint_prefix, native_header
from ._latents import Latents
from ._prompts import Cond, Prompts
from ._weights import WeightFile

Inputs = dict[str, Any]
"""Arguments of the denoiser by name."""
Conversion = dict[str, tuple[str, Callable[[Tensor], Tensor] | None]]
"""Parameter name in diffusers -> (key in the single file, which rows of that tensor, and in what order)."""


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


class ModelFamily(Checks, Encoders, Latents, Prompts, ABC):
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
    text_parts: ClassVar[dict[str, str]]
    """Subfolder -> class in transformers (or diffusers; or its full name, module and all), of tokenizers and of what
    makes conditioning of their tokens, under the names the pipeline uses."""
    adapter_targets: ClassVar[tuple[str, ...]]
    """Endings (whole dotted segments) of the names of the layers that get an adapter."""
    keep_precise: ClassVar[tuple[str, ...]]
    """Name parts (see `precision.names`) of the layers that stay in the model's dtype: small, or sensitive."""
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
    tiny_config: ClassVar[dict[str, Any]]
    """The denoiser's config in the miniature."""

    # -- facts with a default -------------------------------------------------------------------------------------
    denoiser_name: ClassVar[str] = "transformer"
    """"unet" or "transformer": subfolder, pipeline attribute, and prefix of the keys in diffusers' LoRA files."""
    objective: ClassVar[type[Objective]] = FlowMatching
    exact_cond: ClassVar[tuple[str, ...]] = ()
    """Names in the conditioning that stay in float32."""
    towards_image: ClassVar[bool] = False
    """Whether the denoiser answers with the velocity towards the image: the negative of the scheduler's."""
    guidance_argument: ClassVar[str] = "guidance_scale"
    """What the pipeline calls it."""
    plain_guidance: ClassVar[float] = 1.0
    """What the pipeline calls drawing without: 0 where it adds so many times the difference to the answer."""
    adapter_exclude: ClassVar[tuple[str, ...]] = ()
    """Name parts (see `precision.names`) of layers that do not, although their names end so."""
    modulation: ClassVar[tuple[str, ...]] = ()
    """Name parts of the layers that scale and shift the blocks' norms: they see one row per image and no tokens."""
    trained_text: ClassVar[dict[str, TextEncoder]] = {}
    """Text encoders that can be trained, by the pipeline's names: those whose LoRA diffusers' pipeline loads."""
    kohya_module: ClassVar[str] = "networks.lora"
    """What sd-scripts or musubi-tuner train LoRAs of this architecture with: `ss_network_module`. Programs show it, and
    take a file for a LoRA by it; where neither trains the architecture it is their plainest."""
    tiny_hw: ClassVar[tuple[int, int]] = (16, 24)
    """Size in pixels that suits the miniature. Not square on purpose: swapped height and width must show."""
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
    config_marks: ClassVar[dict[str, Any]] = {}
    """Entries of the denoiser's config.json that tell this architecture from others of the same class."""
    checkpoint_text: ClassVar[dict[str, str]] = {}
    """Text encoder -> prefix of its keys in a single-file checkpoint that carries it."""
    native_layers: ClassVar[tuple[naming.Row, ...]] = ()
    """The denoiser's layers in the naming in which the model was first published, and in diffusers': see `naming`."""
    swapped_halves: ClassVar[tuple[str, ...]] = ()
    """Layers whose rows the original has as (shift, scale) and diffusers as (scale, shift). "blocks.-1" is the last of
    the blocks."""
    no_adapter: ClassVar[tuple[str, ...]] = ()
    """Layers that get no adapter whoever asks, named as those above: nothing reads their answer, so that they would
    never learn, or a LoRA of theirs would be another one in the model's original naming."""
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
    beside_denoiser: ClassVar[tuple[str, ...]] = ()
    """Modules and tensors in single files that are none of the denoiser's, although their names begin as its do."""
    reference_config: ClassVar[dict[str, Any]] = {}
    """Denoiser config of the released model, for single files whose components folder has no denoiser config."""
    index_name: ClassVar[str] = "model_index.json"
    """The file that says which pipeline a folder is made for."""
    pipeline_options: ClassVar[dict[str, Any]] = {}
    """Arguments with which the pipeline is made."""
    computed: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Modules of the denoiser that compute tensors when they are made, which no file holds -> what they are made of:
    attributes of theirs, or entries of the denoiser's config."""
    told_by_name: ClassVar[dict[str, str]] = {}
    """Pattern in the name of a single file -> what it is then, where its tensors do not tell: see `caveats`."""
    distilled_advice: ClassVar[str]
    """What to know before training on a model for which `is_distilled`."""
    distilled_name: ClassVar[str] = ""
    """Pattern in the path of a distilled model's file or folder, where nothing else tells; see `is_distilled`."""
    denoiser_reads: ClassVar[dict[str, str]] = {"encoder_hidden_states": "prompt_embeds"}
    """Argument of the denoiser -> name in `Cond`, where that, `hidden_states` and `timestep` are all its `inputs`."""
    timestep_unit: ClassVar[int] = 1
    """What sigma = 1 is as its `timestep`: 1, where the denoiser multiplies by 1000 itself, or 1000."""
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
        self._check_vae()
        self.warnings += self.caveats()

    # -- what only the family knows -------------------------------------------------------------------------------
    def inputs(self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        """What the pipeline's loop calls the denoiser with, by name.

        Args:
            noisy_BCHW: in the model's dtype.
            t_B: as the objective draws it: an integer timestep for `Diffusion`, sigma in [0, 1] for `FlowMatching`.
            cond: collated, in the model's dtype where it is not among `exact_cond`. All is on one device.
        """
        told = {argument: cond[name] for argument, name in self.denoiser_reads.items()}
        return {"hidden_states": self.pack(noisy_BCHW), "timestep": t_B * self.timestep_unit, **told}

    @classmethod
    @abstractmethod
    def tiny_parts(cls) -> dict[str, Any]:
        """The parts of the miniature, but for the denoiser, in the pipeline's names; the caller has seeded them."""

    # -- defaults a family may replace ----------------------------------------------------------------------------
    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        """Call the denoiser as its pipeline does. `t_B` is as the objective draws it. -> prediction BCHW"""
        device = noisy_BCHW.device
        cond = {name: tensor.to(device) for name, tensor in cond.items()}
        inexact = [name for name, tensor in cond.items() if tensor.is_floating_point() and name not in self.exact_cond]
        cond |= {name: cond[name].to(self.dtype) for name in inexact}
        inputs = self.inputs(denoiser, noisy_BCHW.to(self.dtype), t_B.to(device), cond, guidance)
        answer_BCHW = self.prediction(denoiser, denoiser(**inputs, return_dict=False)[0], noisy_BCHW)
        return -answer_BCHW if self.towards_image else answer_BCHW

    def prediction(self, denoiser: nn.Module, answer: Any, noisy_BCHW: Tensor) -> Tensor:
        """The prediction BCHW in what the denoiser answered, where that is not as the pipeline passes latents."""
        if self.latents_as == "BSD":  # what follows the noise's tokens are those of control pictures
            answer = answer[:, : self.seq_len(tuple(noisy_BCHW.shape[2:]))]
        return self.unpack(answer, tuple(noisy_BCHW.shape[-2:]))

    @classmethod
    def tiny(cls, folder: Path, seed: int = 0) -> None:
        """Save a complete random miniature in the diffusers layout; sides of linears are multiples of 16."""
        with _miniature.seeded(seed):
            denoiser = getattr(diffusers, cls.denoiser_class)(**cls.tiny_config)
            cls.wake_(denoiser)
            cls.save_tiny({cls.denoiser_name: denoiser, **cls.tiny_parts()}, folder)

    @classmethod
    def wake_(cls, denoiser: nn.Module) -> None:
        """Gives, in place, random numbers to what a new denoiser has zeros in, where these would hide all the rest."""
        return

    @classmethod
    def save_tiny(cls, parts: dict[str, Any], folder: Path) -> None:
        """Save the parts of the miniature as the pipeline's folder."""
        cls.pipeline_type()(**parts).save_pretrained(folder, safe_serialization=True)

    @classmethod
    def pipeline_type(cls) -> Any:
        """The class of the pipeline: diffusers' own, unless that is of a kind that cannot be called with embeddings."""
        return getattr(diffusers, cls.pipeline_class)

    def caveats(self) -> list[str]:
        """What to know of the given model before training on it, in one line each, such as that it is distilled."""
        fitting = [what for pattern, what in self.told_by_name.items() if self.file_is_called(pattern)]
        told = [f"{self.checkpoint.name} is {what}" for what in fitting]
        return told + ([self.distilled_advice] if self.is_distilled() else [])

    def is_distilled(self) -> bool:
        """Whether the given model is distilled to few steps without guidance, where there is such a model."""
        return bool(self.distilled_name) and self.is_called(self.distilled_name)

    def file_is_called(self, pattern: str) -> bool:
        """Whether the name of the given single file holds this, in any case: of some models nothing else tells."""
        return bool(self.checkpoint and re.search(pattern, self.checkpoint.name, re.IGNORECASE))

    def is_called(self, pattern: str) -> bool:
        """Whether the path of the given single file or folder holds this, in any case."""
        return bool(re.search(pattern, str(self.checkpoint or self.folder), re.IGNORECASE))

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
        swapped = self.halves_swapped(self.denoiser_config())
        return {
            name: (key, _halves_swapped if name.rpartition(".")[0] in swapped else rows and _rows(*rows))
            for name, key, rows in found
            if not f"{key.removeprefix(prefix)}.".startswith(tuple(f"{beside}." for beside in self.beside_denoiser))
        }

    def control_size(self, width: int, height: int, resolution: int | None = None) -> tuple[int, int]:
        """The size (width, height) that a control picture of this size is shown in, stretched to it.

        Args:
            resolution: side of the square with its area; None: as the pipeline shows it.
        """
        raise NotImplementedError(f"{self.title} is shown no control pictures")  # who has `controls` replaces this

    def image_conditioning(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Cond:
        """Facts about one image that the denoiser is told beside the prompt. Pixels; `crop_top_left` is (y, x)."""
        return {}

    def pictures(self, output: Any) -> list[Image.Image]:
        """The pictures in what the pipeline's call returned; of clips, their first frames."""
        return [_as_images(frames)[0] for frames in output.frames] if any(self.clips) else output.images

    def usual_guidance(self) -> float:
        """Guidance scale for previews of the given model."""
        return 1.0 if self.is_distilled() else self.default_guidance

    def frames(self, output: Any) -> list[Image.Image]:
        """All frames of the first clip in what the pipeline's call returned; of a picture, that alone."""
        return _as_images(output.frames[0]) if any(self.clips) else self.pictures(output)[:1]

    def latent_frames(self, num_frames: int) -> int:
        """How many frames the latents of a clip of so many frames have."""
        return 1 if num_frames == 1 else 1 + (num_frames - 1) // self.clips[0]

    def guidance_inputs(self, guidance: float) -> dict[str, Any]:
        """Arguments with which the pipeline draws with this guidance; 1 is to draw without a negative prompt."""
        return {self.guidance_argument: guidance - 1 + self.plain_guidance}

    def size_inputs(self, width: int, height: int) -> dict[str, Any]:
        """Arguments with which the pipeline draws in this size, in pixels."""
        return {"width": width, "height": height}

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
        if section.guidance == 1.0 or self._takes_guidance():
            return []
        model = f"this {self.title}" if self.embeds_guidance else self.title
        return [f"objective.guidance = {section.guidance} has no effect: {model} has no guidance embedding"]

    def _takes_guidance(self) -> bool:
        if not self.embeds_guidance:
            return False
        unless_told = inspect.signature(getattr(diffusers, self.denoiser_class)).parameters["guidance_embeds"].default
        return self.denoiser_config().get("guidance_embeds", unless_told)

    @classmethod
    def without_adapter(cls, denoiser: nn.Module) -> set[str]:
        """Full names of the layers in `no_adapter`."""
        return _with_last_block(cls.no_adapter, lambda: [name for name, _ in denoiser.named_modules()])

    @classmethod
    def halves_swapped(cls, denoiser_config: Mapping[str, Any]) -> set[str]:
        """Full names of the layers in `swapped_halves`."""
        return _with_last_block(cls.swapped_halves, lambda: cls.layer_shapes(denoiser_config))

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

    # -- the denoiser ----------------------------------------------------------------------------------------------
    def denoiser_config(self) -> dict[str, Any]:
        """The denoiser's config.json, or the released model's where a single file comes with none."""
        path = self.folder / self.denoiser_name / "config.json"
        found = _files.read_json(path) if path.is_file() else dict(self.reference_config)
        return found | (self.sizes(native_header(self._header), found) if self.checkpoint else {})

    def sizes(self, native: Header, told: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of the denoiser's config that a single file tells itself: the parts beside it may be another's.

        Args:
            native: names, without their prefix, and shapes of its tensors.
            told: the config of those parts.
        """
        return {}

    def index(self) -> dict[str, Any]:
        """The model's model_index.json; of a single file that of the parts beside it, if there is one."""
        path = self.folder / self.index_name
        return _files.read_json(path) if path.is_file() else {}

    def empty_denoiser(self) -> nn.Module:
        """The denoiser on the meta device: all shapes, no memory."""
        path, told = self.folder / self.denoiser_name / "config.json", self.denoiser_config()
        with torch.device("meta"):
            denoiser = _files.built(getattr(diffusers, self.denoiser_class), path, told)
        if empty := [name for name, parameter in denoiser.named_parameters() if not parameter.numel()]:
            raise UserError(f"{path} does not describe a {self.denoiser_class}: {empty[0]} would have no values")
        for name, arguments in self.computed.items():
            lost = getattr(denoiser, name)
            told = [getattr(lost, argument, denoiser.config.get(argument)) for argument in arguments]
            setattr(denoiser, name, type(lost)(*told))
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
    def base_identity(self) -> str:
        """SHA-256 over the denoiser's files (of a single-file checkpoint: the whole file)."""
        if self.checkpoint:
            return _files.digest([("checkpoint", self.checkpoint)])
        return _files.digest(self._config_and_weights(self.denoiser_name, "diffusion_pytorch_model"))

    def _denoiser_files(self) -> list[Path]:
        return _files.weight_files(self.folder / self.denoiser_name, "diffusion_pytorch_model")

    def _assemble(self, **parts: Any) -> diffusers.DiffusionPipeline:
        """The pipeline with these parts and None for the others; options as the model's model_index.json has them."""
        cls = self.pipeline_type()
        index = self.index()
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


def _encoding_as_given(encode: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The `encode` of a float32 VAE, taking pictures of any dtype and answering in theirs."""

    def encode_as_given(pixels: Tensor) -> Any:
        parameters = encode(pixels.to(torch.float32)).latent_dist.parameters
        return AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(parameters.to(pixels.dtype)))

    return encode_as_given


def _is_component(entry: Any) -> bool:
    """Whether an entry of model_index.json names a part of the pipeline, as [library, class] or [null, null]."""
    return isinstance(entry, list) and all(item is None or isinstance(item, str) for item in entry)


def _with_last_block(names: Sequence[str], layers: Callable[[], Iterable[str]]) -> set[str]:
    """These names, with the number of the last block among `layers` in place of -1."""
    found = set()
    for name in names:
        blocks, counted, layer = name.partition(".-1.")
        if counted:
            numbers = (re.match(rf"{re.escape(blocks)}\.(\d+)\.", one) for one in layers())
            name = f"{blocks}.{max(int(number[1]) for number in numbers if number)}.{layer}"
        found.add(name)
    return found


@cache
def _layer_shapes(denoiser_class: str, denoiser_config: str) -> Mapping[str, tuple[int, ...]]:
    with torch.device("meta"):
        denoiser = getattr(diffusers, denoiser_class).from_config(json.loads(denoiser_config))
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return {path: tuple(layer.weight.shape) for path, layer in denoiser.named_modules() if isinstance(layer, layers)}


def control_latents(cond: Cond) -> list[Tensor]:
    """The latents of the control pictures in a conditioning, (C, H, W) or (B, C, H, W) each, in their order."""
    return [cond[f"control_{i}"] for i in range(sum(re.fullmatch(r"control_\d+", name) is not None for name in cond))]


def control_pictures(cond: Cond) -> list[Image.Image]:
    """The control pictures of a preview's conditioning, as their files have them: see `data.cache.preview_pictures`."""
    names = [f"control_picture_{i}" for i in range(sum(name.startswith("control_picture_") for name in cond))]
    return [Image.fromarray(cond[name].cpu().numpy()) for name in names]


def _as_images(frames: Any) -> list[Image.Image]:
    """The frames of a clip, which some pipelines give as numbers and others as pictures."""
    return list(frames) if isinstance(frames[0], Image.Image) else VaeImageProcessor.numpy_to_pil(frames)


def _halves_swapped(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


def _rows(begin: int, end: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[begin:end]


def _changed(weight: Weight, change: Callable[[Tensor], Tensor] | None) -> Weight:
    if change is None:
        return weight
    return weight.changed(change) if isinstance(weight, Quantized) else change(weight)
