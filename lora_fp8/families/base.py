"""The base class of all model families: what the trainer must know about an architecture.

One file in this folder holds one subclass, named `Family`. A family states facts (`_facts`) and adds the one
thing that only it can know: how its denoiser is called, unless the fact `denoiser_reads` says it. Everything else has a
default, here or in a neighbouring module:
`_encoders` (loads the VAE and the text encoders), `_latents` (pixels to latents and back), `_prompts` (prompts to
conditioning), and `_checks` (checks that the files are complete and of this architecture).

Loading has two phases, so that the parts of a model are never in memory together. First the cache is filled with the
VAE, then with one text encoder after another (`encode_in_turn`); each is freed before the next is loaded. Then the
denoiser is built: `make_empty_denoiser` creates it on the meta device, which takes no memory, and
`read_denoiser_tensors` yields one tensor at a time, so that the whole model never exists in high precision. Creating a
family object is cheap: `__init__` finds and checks the files and loads none of them.

`model.path` names one of four sources: a diffusers folder, a hub id, a single .safetensors file in the original layout
(see `_components` for the parts that it lacks), or "demo". See `_files.locate`. The denoiser and the text encoders
run in the model's dtype, and the conditioning is stored in it; the VAE runs in float32.

Shape suffixes: B batch, C channels, F frames, H height, W width, L text tokens, D features. Outside a family, latents
are always BCHW, whatever its denoiser and its pipeline take: `pack` and `unpack` convert between the two. In a family
with `clips`, the latents of a clip of several frames are BCFHW wherever this code says BCHW; the same holds for pixels.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from .. import settings
from ..errors import Message, UserError, UserErrors
from ..lora_files import naming
from . import _checks, _components, _files
from ._files import Header, find_checkpoint_prefix, make_native_header
from ._latents import Latents, decode_in_tiles
from ._prompts import Cond, Prompts

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..objectives import Objective
    from ..precision import Rows, Weight
    from ._weights import WeightFile
    from .sources import BaseDescription
    from .sources.download import Report

DE_DISTILLED = r"de[-_. ]?(distill|turbo)|undistill"
"""Matches the names of de-distilled models, which were trained back from a distilled one (ostris/Z-Image-De-Turbo)."""
Inputs = dict[str, Any]
"""Arguments of the denoiser, by name."""
Conversion = dict[str, tuple[str, "Callable[[Tensor], Tensor] | None"]]
"""Parameter name in diffusers -> (key in the single file, function that selects or reorders the tensor's rows)."""
ChooseRows = Callable[[str, tuple[int, ...], tuple[int, int]], "slice | None"]
"""Chooses the rows to read of a tensor; see `ModelFamily.read_denoiser_rows`."""


CLIP_LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2")
"""The linears of a CLIP layer. All of them get an adapter: 72 in CLIP ViT-L, 192 in OpenCLIP ViT-bigG."""


class ModelFamily(Latents, Prompts):
    """A model architecture. Families derive from this class directly, and nothing here needs `super()`.

    Args:
        model: the job's `[model]` table.
        device: device on which the encoders and the denoiser run.
        dtype: compute dtype of the denoiser and the text encoders.
        prediction: `objective.prediction`; "auto" takes what the model's files state.

        base: the description of a base on a hub, if it was asked for already.

    Raises:
        UserError: files are missing, damaged, pickled, or of another architecture.
    """

    def __init__(
        self,
        model: settings.Model,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        prediction: str = "auto",
        zero_snr: bool = False,
        base: BaseDescription | None = None,
    ):
        import torch

        from ._weights import WeightFile

        self.device, self.dtype = torch.device(device), dtype
        self.given_prediction, self.given_zero_snr = prediction, zero_snr
        self.read_text_settings(model)
        self.has_training_adapter = bool(model.training_adapter)
        parts = _components.find(type(self), model, base)
        self.folder, self.checkpoint, self.warnings = parts.folder, parts.checkpoint, parts.notes
        self.absent, self.bases = parts.absent, parts.bases
        self.vae = None
        self._text_pipeline = None
        self._tokenizers = {}
        self._file = WeightFile(self.checkpoint, self.absent) if self.checkpoint else None
        self._part_files = {name: WeightFile(path) for name, path in parts.files.items()}
        self._header = self._file.header if self._file else {}
        _checks.check_architecture(self)
        _checks.check_complete(self)
        _checks.check_vae(self)
        _checks.check_fit(self)
        self.warnings += self.list_caveats()

    def count_missing_bytes(self) -> int:
        """Return the bytes of the weights that are still to be downloaded."""
        return sum(absent.file.size for path, absent in self.absent.items() if not path.is_file())

    def fetch_weights(self, report: Report | None = None, is_cancelled: Callable[[], bool] = lambda: False) -> None:
        """Download the weights of a base on a hub that are not here yet, and check what only they tell.

        Args:
            report: called with the progress several times a second.
            is_cancelled: asked as often; True stops the download, and the next one continues it.

        Raises:
            UserError: they are not accessible, have no room, or are another model's.
            RunFailure: the connection failed again and again, or a file arrived damaged.
            Stopped: it was cancelled.
        """
        from ._weights import WeightFile
        from .sources.download import download_all

        if not self.count_missing_bytes():
            return
        self.bases = download_all(self.bases, report, is_cancelled)
        if self.checkpoint:
            self._file = WeightFile(self.checkpoint)
        _checks.check_vae(self)

    # -- what only the family knows --------------------------------------------------------------------------------
    def make_inputs(self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        """Return the keyword arguments with which the pipeline's loop calls the denoiser.

        Args:
            denoiser: the model that will be called.
            noisy_BCHW: noisy latents, in the model's dtype.
            t_B: timesteps as the objective draws them: integers for `Diffusion`, sigma in [0, 1] for `FlowMatching`.
            cond: collated conditioning, in the model's dtype except for `exact_cond`. All tensors are on one device.
            guidance: guidance scale for denoisers that take it as an input.
        """
        arguments = {
            argument: cond[names] if isinstance(names, str) else {name: cond[name] for name in names}
            for argument, names in self.denoiser_reads.items()
        }
        return {self.noise_argument: self.pack(noisy_BCHW), "timestep": t_B * self.timestep_unit, **arguments}

    # -- defaults that a family may override -----------------------------------------------------------------------
    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        """Call the denoiser as its pipeline does, with `t_B` as the objective draws it. Returns a prediction BCHW."""
        return self.predict_prepared(denoiser, self.prepare(denoiser, noisy_BCHW, t_B, cond, guidance), noisy_BCHW)

    def prepare(self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        """Return the arguments of the denoiser's call, on its device and in its dtype; see `make_inputs`."""
        device = noisy_BCHW.device
        cond = {name: tensor.to(device) for name, tensor in cond.items()}
        inexact = [name for name, tensor in cond.items() if tensor.is_floating_point() and name not in self.exact_cond]
        cond |= {name: cond[name].to(self.dtype) for name in inexact}
        return self.make_inputs(denoiser, noisy_BCHW.to(self.dtype), t_B.to(device), cond, guidance)

    def predict_prepared(self, denoiser: nn.Module, inputs: Inputs, noisy_BCHW: Tensor) -> Tensor:
        """Call the denoiser with what `prepare` returned. Returns a prediction BCHW."""
        prediction_BCHW = self.convert_output(denoiser, denoiser(**inputs, return_dict=False)[0], noisy_BCHW)
        return -prediction_BCHW if self.towards_image else prediction_BCHW

    def convert_output(self, denoiser: nn.Module, output: Any, noisy_BCHW: Tensor) -> Tensor:
        """Convert the denoiser's output to a prediction BCHW.

        Override it if the output is not laid out as the pipeline's latents.
        """
        if self.latents_as == "BSD":  # the tokens after the noise's are those of the control images
            output = output[:, : self.count_image_tokens(tuple(noisy_BCHW.shape[2:]))]
        return self.unpack(output, tuple(noisy_BCHW.shape[-2:]))

    @classmethod
    def get_pipeline_type(cls) -> Any:
        """Return the pipeline's class: diffusers' own, unless that one cannot be called with embeddings."""
        import diffusers

        return getattr(diffusers, cls.pipeline_class)

    def list_caveats(self) -> list[str]:
        """Return what users must know before training on this model (such as that it is distilled), one line each."""
        caveats: list[str] = [
            caveat(name=self.get_base_name())
            for pattern, caveat in self.caveats_by_name.items()
            if self.is_file_called(pattern)
        ]
        if self.has_training_adapter:
            return caveats
        if self.is_distilled():
            caveats.append(self.distilled_advice)
        if url := self.find_training_adapter():
            caveats.append(
                Message(
                    "with a training adapter, this base still generates in few steps after training: download {url} "
                    "and name the file in model.training_adapter",
                    url=url,
                )
            )
        return caveats

    def find_training_adapter(self) -> str:
        """Return the page of a training adapter for this base; "" if it is not distilled, or none is known."""
        return self.training_adapter if self.is_distilled() else ""

    def warn_of_missing_word(self, word: str, other: str) -> Message:
        """Return the warning that a single file's name lacks the word by which it differs from another family's."""
        assert self.checkpoint
        return Message(
            "the name of {name} does not contain {word}, and its tensors do not differ from {other}: check that it "
            "is the editing model",
            name=self.checkpoint.name,
            word=word,
            other=other,
        )

    def is_distilled(self) -> bool:
        """Return True if the given model is distilled to few steps without guidance; False if no such model exists."""
        if not self.distilled_mark:
            named = bool(self.distilled_name) and self.is_called(self.distilled_name)
            return named and not re.search(DE_DISTILLED, self.get_base_name(), re.IGNORECASE)
        caveats = self.is_distilled_by_name()
        if caveats is None and self.distilled_name and self.is_file_called(self.distilled_name):
            return True
        if caveats is not None:
            return caveats
        place, entry, value = self.distilled_mark
        return (self.read_index() if place == "index" else self.read_scheduler_config()).get(entry) == value

    def get_base_name(self) -> str:
        """Return the name of the given single file, hub repository or folder."""
        if self.checkpoint:
            return self.checkpoint.name
        hub = re.search(r"models--[^/]+?--([^/]+)/snapshots/", f"{self.folder.as_posix()}/")
        return hub[1] if hub else self.folder.resolve().name

    def is_file_called(self, pattern: str) -> bool:
        """Return True if the single file's name matches `pattern`, ignoring case; some models have no other mark."""
        return bool(self.checkpoint and re.search(pattern, self.checkpoint.name, re.IGNORECASE))

    def is_called(self, pattern: str) -> bool:
        """Return True if the name of the given file, folder or hub repository matches `pattern`, ignoring case."""
        return bool(re.search(pattern, self.get_base_name(), re.IGNORECASE))

    def is_distilled_by_name(self) -> bool | None:
        """Return True or False if the name tells whether the model is distilled, None if it does not.

        A single file's components may come from the other model, so its own name decides. For a folder or repository
        the config decides, except for a de-distilled copy: it keeps the config of the original.
        """
        if re.search(DE_DISTILLED, self.get_base_name(), re.IGNORECASE):
            return False
        if self.is_file_called(r"(?<![a-z])(base|raw)(?![a-z])"):
            return False
        return True if self.is_file_called("turbo|distill") else None

    @classmethod
    def recognises(cls, header: Header) -> bool:
        """Return True if a single file with these tensors is this architecture."""
        return _files.matches_marks(cls.single_file, make_native_header(header))

    def convert_checkpoint(self, header: Header) -> Conversion:
        """Return where each of the denoiser's parameters is in a single file that `recognises` accepted.

        The default follows `native_layers`.
        """
        if not self.native_layers:
            raise UserError(
                Message("{title} cannot be read from a single file; give a diffusers folder", title=self.title)
            )
        shapes = {name: tuple(tensor.shape) for name, tensor in self.outline.state_dict().items()}
        prefix = find_checkpoint_prefix(header)
        tensors = naming.locate_tensors(self.native_layers, header, shapes, prefix)
        swapped = self.find_swapped_halves(self.read_denoiser_config())
        return {
            name: (key, _swap_halves if name.rpartition(".")[0] in swapped else rows and _make_row_selector(*rows))
            for name, key, rows in tensors
            if not f"{key.removeprefix(prefix)}.".startswith(tuple(f"{beside}." for beside in self.beside_denoiser))
        }

    def compute_control_size(self, width: int, height: int, resolution: int | None = None) -> tuple[int, int]:
        """Return the size (width, height) in pixels to which a control image of this size is stretched.

        Args:
            width, height: size of the control image in pixels.
            resolution: side in pixels of a square of the wanted area; None: as the pipeline does it.
        """
        raise NotImplementedError(f"{self.title} takes no control images")  # families with `controls` override it

    def make_image_conditioning(
        self, original_hw: tuple[int, int], crop_top_left: tuple[int, int], target_hw: tuple[int, int]
    ) -> Cond:
        """Return the facts about an image that the denoiser takes besides the prompt.

        Args:
            original_hw: size of the image file, (height, width) in pixels.
            crop_top_left: corner (y, x) of the crop in pixels.
            target_hw: size of the crop, (height, width) in pixels.

        Returns:
            The `size_cond`, float32: the six numbers in this order, as the pipelines' `_get_add_time_ids` puts them.
        """
        import torch

        numbers = [*original_hw, *crop_top_left, *target_hw]
        return {self.size_cond: torch.tensor(numbers, dtype=torch.float32)} if self.size_cond else {}

    def extract_images(self, output: Any) -> list[Image.Image]:
        """Return the images in the result of the pipeline's call; of clips, their first frames."""
        return [_as_images(frames)[0] for frames in output.frames] if any(self.clips) else output.images

    def make_pipeline_arguments(self) -> dict[str, Any]:
        """Return the pipeline's `pipeline_options` for the given model.

        A `distilled_mark` in model_index.json is one of them; a single file's components may have the other model's.
        """
        if not self.distilled_mark or self.distilled_mark[0] != "index":
            return self.pipeline_options
        return {**self.pipeline_options, self.distilled_mark[1]: self.is_distilled()}

    def get_architecture_name(self) -> str:
        """Return the `modelspec_architecture` of the given model."""
        return self.modelspec_architecture

    def choose_guidance(self) -> float:
        """Return the guidance scale for previews of the given model."""
        return 1.0 if self.is_distilled() else self.default_guidance

    def extract_frames(self, output: Any) -> list[Image.Image]:
        """Return all frames of the first clip in the result of the pipeline's call; for an image, just that image."""
        return _as_images(output.frames[0]) if any(self.clips) else self.extract_images(output)[:1]

    def count_latent_frames(self, num_frames: int) -> int:
        """Return the number of latent frames of a clip of `num_frames` frames."""
        return 1 if num_frames == 1 else 1 + (num_frames - 1) // self.clips[0]

    def make_guidance_inputs(self, guidance: float) -> dict[str, Any]:
        """Return the pipeline's arguments for this guidance scale; 1 means no guidance."""
        return {self.guidance_argument: guidance - 1 + self.plain_guidance}

    def make_size_inputs(self, width: int, height: int) -> dict[str, Any]:
        """Return the pipeline's arguments for this image size, in pixels."""
        return {"width": width, "height": height}

    def check_bucket(self, width: int, height: int) -> None:
        """Check that the denoiser has position ids for images of this size, in pixels; called before any is encoded.

        Raises:
            UserError: the size is too large.
        """
        return

    def list_caption_caveats(self, captions: Sequence[str]) -> list[str]:
        """Return what users must know about these captions before training, one line each; called before encoding."""
        return []

    def list_base_facts(self) -> dict[str, bool]:
        """Return those of `settings.FACTS` that this base's config decides."""
        return {"base.guidance": self._takes_guidance()} if self.embeds_guidance else {}

    def _takes_guidance(self) -> bool:
        import diffusers

        default = inspect.signature(getattr(diffusers, self.denoiser_class)).parameters["guidance_embeds"].default
        return self.read_denoiser_config().get("guidance_embeds", default)

    @classmethod
    def find_layers_without_adapter(cls, denoiser: nn.Module) -> set[str]:
        """Return the full names of the layers in `no_adapter`."""
        return _resolve_last_block(cls.no_adapter, lambda: [name for name, _ in denoiser.named_modules()])

    @classmethod
    def find_swapped_halves(cls, denoiser_config: Mapping[str, Any]) -> set[str]:
        """Return the full names of the layers in `swapped_halves`."""
        return _resolve_last_block(cls.swapped_halves, lambda: cls.list_layer_shapes(denoiser_config))

    @classmethod
    def list_layer_shapes(cls, denoiser_config: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
        """Return {module path: weight shape} of the linears and convolutions of a denoiser with this config."""
        return _list_layer_shapes(cls.denoiser_class, json.dumps(dict(denoiser_config), sort_keys=True, default=str))

    @classmethod
    def list_text_layer_shapes(cls) -> dict[str, tuple[int, int]]:
        """Return {module path: (out, in)} of the linears that get adapters in the released model's text encoders."""
        from ..lora_files.layer_names import make_text_layer_name

        return {
            make_text_layer_name(name, f"encoder.layers.{number}.{layer}"): {
                "mlp.fc1": (about.hidden, about.width),
                "mlp.fc2": (about.width, about.hidden),
            }.get(layer, (about.width, about.width))
            for name, about in cls.trained_text.items()
            for number in range(about.num_layers)
            for layer in CLIP_LAYERS
        }

    @classmethod
    def choose_layouts(cls) -> tuple[str, ...]:
        """Return the layouts that export.formats = ["auto"] stands for."""
        first = cls.layouts[0]
        return cls.auto_layouts or ((first,) if first in cls.layouts_of_diffusers else (first, "diffusers"))

    @classmethod
    def choose_adapter_layers(cls, denoiser: nn.Module, targets: Sequence[str] = ()) -> list[str]:
        """Return the full names of the layers that get an adapter, in the denoiser's order.

        Args:
            denoiser: the model whose layers are chosen.
            targets: name suffixes that a user chose instead of the family's; empty: the family's. "^name" is one layer,
                named in full, and overrides `adapter_exclude`.

        Raises:
            UserError: a target matches no layer.
        """
        from torch import nn

        layers = [n for n, m in denoiser.named_modules() if hasattr(m, "in_features") or isinstance(m, nn.Conv2d)]
        left_out = cls.find_layers_without_adapter(denoiser)
        layers = [name for name in layers if name not in left_out]
        matches = [(target, cls._find_matching(target, layers)) for target in targets or cls.adapter_targets]
        problems = [
            Message(
                "{target} is not the ending of any layer of {title}",
                target=f"adapter.targets: {target!r}",
                title=cls.title,
            )
            for target, matched in matches
            if not matched
        ]
        if problems and targets:
            raise UserErrors(problems) if len(problems) > 1 else UserError(problems[0])
        chosen = set().union(*(matched for _, matched in matches))
        return [n for n in layers if n in chosen]

    @classmethod
    def _find_matching(cls, target: str, layers: Sequence[str]) -> set[str]:
        """Return the names among `layers` that a target stands for; see `choose_adapter_layers`."""
        from ..precision import name_matches

        if target.startswith("^"):
            return {n for n in layers if n == target[1:]}
        matched = {n for n in layers if n == target or n.endswith(f".{target}")}
        return {n for n in matched if not any(name_matches(n, e) for e in cls.adapter_exclude)}

    # -- the denoiser ----------------------------------------------------------------------------------------------
    def read_denoiser_config(self) -> dict[str, Any]:
        """Return the denoiser's config.json, or the released model's if a single file comes without one."""
        path = self.folder / self.denoiser_name / "config.json"
        config = _files.read_json(path) if path.is_file() else dict(self.reference_config)
        if self.checkpoint is None:
            return config
        return config | self.infer_denoiser_sizes(make_native_header(self._header), config, self.checkpoint)

    @classmethod
    def choose_published_parts(cls, native: Header) -> dict[str, dict[str, Any]]:
        """Return `published` for a file with these tensors; override it if variants differ in more than sizes."""
        return cls.published

    @classmethod
    def count_latent_channels(cls, denoiser_config: Mapping[str, Any]) -> int | None:
        """Return how many latent channels the VAE of a denoiser with this config has; None if the config lacks it."""
        given = denoiser_config.get("in_channels")
        # FLUX.2's VAE folds 2 x 2 latents into one, and in a sequence each token is a patch.
        times = 4 if cls.vae_class == "AutoencoderKLFlux2" else cls.patch**2 if cls.latents_as == "BSD" else 1
        return given // times if isinstance(given, int) else None

    @classmethod
    def infer_denoiser_sizes(cls, native: Header, config: Mapping[str, Any], file: Path) -> dict[str, Any]:
        """Return the denoiser's config entries that a single file states itself.

        They override the config of the components, which may come from another model.

        Args:
            native: names, without their prefix, and shapes of the file's tensors.
            config: the denoiser config of the components, or the released model's.
            file: the file, for those variants that only its name tells apart.
        """
        return _files.read_sizes(cls.sizes_from, native, config)

    def read_index(self) -> dict[str, Any]:
        """Return the model's model_index.json; for a single file that of its components, {} if there is none."""
        path = self.folder / self.index_name
        return _files.read_json(path) if path.is_file() else {}

    @cached_property
    def outline(self) -> nn.Module:
        """Return the denoiser on the meta device, built once: to be looked at, never changed."""
        return self.make_empty_denoiser()

    def make_empty_denoiser(self) -> nn.Module:
        """Build a denoiser on the meta device: all shapes, no memory. Each call builds another, to be changed."""
        import diffusers
        import torch

        from ..precision.formats import load_bitsandbytes

        load_bitsandbytes()  # before diffusers' models import it
        from diffusers.models.modeling_utils import no_init_weights

        path, config = self.folder / self.denoiser_name / "config.json", self.read_denoiser_config()
        with torch.device("meta"), no_init_weights():
            denoiser = _files.build_from_config(getattr(diffusers, self.denoiser_class), path, config)
        if empty := [name for name, parameter in denoiser.named_parameters() if not parameter.numel()]:
            raise UserError(
                Message(
                    "{path} does not describe a {kind}: {name} would have no values",
                    path=path,
                    kind=self.denoiser_class,
                    name=empty[0],
                )
            )
        for name, arguments in self.computed.items():
            lost = getattr(denoiser, name)
            values = [getattr(lost, argument, denoiser.config.get(argument)) for argument in arguments]
            setattr(denoiser, name, type(lost)(*values))
        saved = denoiser.state_dict().keys()
        lost = [n for n, b in denoiser.named_buffers() if b.is_meta and n not in saved]
        if lost:  # no file stores them, so they would stay empty
            raise RuntimeError(f"{self.name}: buffers {lost} are computed, not stored; rebuild them in empty_denoiser")
        return denoiser

    def read_denoiser_tensors(self) -> Iterator[tuple[str, Weight]]:
        """Yield (diffusers parameter name, CPU tensor), one at a time; only the current tensor is in memory.

        Tensors that the file stores in FP8 are `Quantized`, with their scales.
        """
        for file, places in self._open_denoiser_files():
            weights = file.read_all(key for key, _ in places.values())
            for (name, (_, change)), (_, weight) in zip(places.items(), weights, strict=True):
                yield name, _change_weight(weight, change)

    def read_denoiser_rows(self, choose_rows: ChooseRows) -> Iterator[tuple[str, Weight | Rows]]:
        """Yield the tensors of `read_denoiser_tensors`, but only those rows that `choose_rows` wants.

        All of a tensor is read where these rows are not consecutive in the file.

        Args:
            choose_rows: called with a tensor's name, its shape, and the shape of the scales that the file has for it.
                Returns the rows, at least one, or None for the whole tensor.
        """
        from ..precision import Rows

        for file, places in self._open_denoiser_files():
            pieces = []
            for name, (key, change) in places.items():
                numbers = _find_row_numbers(file.header[key], change)
                shape = (len(numbers), *file.header[key][1:])
                wanted = choose_rows(name, shape, file.get_scale_shape(key)) if numbers else None
                rows = _find_range(numbers[wanted]) if wanted else None
                pieces.append((name, None if rows else change, wanted, rows, shape))
            weights = file.read_all((key for key, _ in places.values()), [rows for *_, rows, _ in pieces])
            for (name, change, wanted, rows, shape), (_, weight) in zip(pieces, weights, strict=True):
                yield name, Rows(weight, wanted.start, shape) if wanted and rows else _change_weight(weight, change)

    def _open_denoiser_files(self) -> Iterator[tuple[WeightFile, Conversion]]:
        """Open the denoiser's files one at a time. Yields each, and where its tensors belong."""
        from ._weights import WeightFile

        if self._file is not None:
            yield self._file, self.convert_checkpoint(self._header)
            return
        for path in self._list_denoiser_files():
            file = WeightFile(path, self.absent)
            yield file, {name: (name, None) for name in file.header}

    def check_parts(self) -> None:
        """Check that all parts match their configs; see `_checks.check_parts`."""
        _checks.check_parts(self)

    def make_objective(self, section: settings.Objective) -> Objective:
        """Build the objective of a job's `[objective]` table; the family's shift replaces "auto"."""
        if section.shift == "auto" and self.train_shift is not None:
            section = section.model_copy(update={"shift": self.train_shift})
        return self.get_objective_type()(self.read_scheduler_config(), section)

    @classmethod
    def get_objective_type(cls) -> type[Objective]:
        """Return the class of the objective; override it if its timesteps are drawn in another way."""
        from .. import objectives

        return {"Diffusion": objectives.Diffusion, "FlowMatching": objectives.FlowMatching}[cls.objective]

    def get_prediction(self) -> str:
        """Return what the denoiser predicts, as a value of `objective.prediction`: "epsilon", "v" or "flow"."""
        if self.objective == "FlowMatching":
            return "flow"
        from ..objectives import PREDICTION_TYPES

        prediction_type = self.read_scheduler_config().get("prediction_type", "epsilon")
        return next((word for word, name in PREDICTION_TYPES.items() if name == prediction_type), str(prediction_type))

    def assumes_prediction(self) -> bool:
        """Return True if only a single file's components say what the model predicts."""
        return (
            self.objective == "Diffusion"
            and self.checkpoint is not None
            and self.given_prediction == "auto"
            and not self._is_marked_as_v()
        )

    def _is_marked_as_v(self) -> bool:
        """Return True if a single file is marked as predicting v.

        The mark is an empty tensor, as ComfyUI and Forge read it, or ModelSpec metadata, as sd-scripts writes it. An
        "epsilon" in the metadata is ignored: programs that merge models write it by default.
        """
        stated = self._file.metadata.get("modelspec.prediction_type", "") if self._file else ""
        return "v_pred" in self._header or stated in ("v", "v_prediction")

    # -- previews -------------------------------------------------------------------------------------------------
    def read_scheduler_config(self) -> dict[str, Any]:
        """Return the model's scheduler_config.json, with the prediction and terminal SNR that file or job state."""
        from ..objectives import PREDICTION_TYPES

        scheduler = _files.read_json(self.folder / "scheduler" / "scheduler_config.json")
        if self.given_prediction in PREDICTION_TYPES:
            scheduler["prediction_type"] = PREDICTION_TYPES[self.given_prediction]
        elif self._is_marked_as_v():
            scheduler["prediction_type"] = "v_prediction"
        if self.objective == "Diffusion" and (self.given_zero_snr or "ztsnr" in self._header):
            # Lin et al. 2023: the last timestep is then pure noise, and sampling must begin there.
            scheduler |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
            sampler = _files.find_scheduler(f"{self.folder}/scheduler", scheduler)
            if "rescale_betas_zero_snr" not in inspect.signature(sampler.__init__).parameters:  # SD 1.5's PNDM
                scheduler["_class_name"] = "DDIMScheduler"
        return scheduler

    def make_pipeline(self, denoiser: nn.Module | None = None, *, text: bool = False, tiled: bool = False) -> Any:
        """Return the diffusers pipeline with this denoiser, the VAE and the model's own scheduler.

        Call it with `make_pipeline_inputs`. Latents run in the dtype of the prompt embeddings; the VAE widens them to
        float32.

        Args:
            denoiser: the model to generate with; None: the pipeline has none.
            text: True adds what `load_trained_text_parts` returns, so that a LoRA can be loaded into it; otherwise the
                pipeline has no text encoders.
            tiled: True decodes in tiles, see `_latents.decode_in_tiles`. Control images are encoded whole.
        """
        self.load_vae()
        vae = self.vae
        if "decode" not in vars(vae):
            vae.decode = _wrap_decode(vae)
            if self.controls[1]:
                vae.encode = _wrap_encode(vae.encode)
        vae.decodes_in_tiles = tiled
        scheduler = self.read_scheduler_config()
        scheduler_class = _files.find_scheduler(f"{self.folder}/scheduler", scheduler)
        parts = {"vae": vae, "scheduler": scheduler_class.from_config(scheduler), self.denoiser_name: denoiser}
        parts |= self.load_trained_text_parts() if text else {}
        pipeline = self._assemble(**parts)
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    @classmethod
    def mend_(cls, pipeline: Any) -> None:
        """Correct, in place, a known bug of diffusers' pipeline of this architecture; the default does nothing.

        A bug is a difference from how the model was trained and from what other programs do. The family file names it.
        """
        return

    # -- identities -----------------------------------------------------------------------------------------------
    def compute_base_identity(self) -> str:
        """Return the SHA-256 of the denoiser's files (for a single file: of the whole file)."""
        if self.checkpoint:
            return _files.compute_digest([("checkpoint", self.checkpoint)], self.absent)
        return _files.compute_digest(
            self._list_config_and_weights(self.denoiser_name, "diffusion_pytorch_model"), self.absent
        )

    def read_file_scale(self) -> str:
        """Return the block that shares a scale in FP8 files: "1x64", "1x128" or "128x128"; "" without block scales."""
        from ._weights import WeightFile

        files = [self._file] if self._file else [WeightFile(path, self.absent) for path in self._list_denoiser_files()]
        counts = Counter(scale for file in files for scale in file.list_block_scales())
        return counts.most_common(1)[0][0] if counts else ""

    def _list_denoiser_files(self) -> list[Path]:
        return self._find_weight_files(self.denoiser_name, "diffusion_pytorch_model")

    def _assemble(self, **parts: Any) -> Any:
        """Build the pipeline with these parts and None for the others; options are taken from model_index.json."""
        cls = self.get_pipeline_type()
        index = self.read_index()
        arguments: dict[str, Any] = {}
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            if name == "self":
                continue
            if name in parts or parameter.default is inspect.Parameter.empty:
                arguments[name] = parts.get(name)
            elif name in index and not _is_component(index[name]):
                arguments[name] = index[name]
        pipeline = cls(**{**arguments, **self.make_pipeline_arguments()})
        self.mend_(pipeline)
        return pipeline


def _wrap_decode(vae: Any) -> Callable[..., Any]:
    """Return the VAE's decode, for latents in any dtype: pipelines pass the denoiser's, and this VAE is always float32.

    It decodes in tiles while `vae.decodes_in_tiles` is true.
    """
    import torch

    plain = vae.decode

    def decode(z: Tensor, *args: Any, **kwargs: Any) -> Any:
        with decode_in_tiles(vae) if vae.decodes_in_tiles else contextlib.nullcontext():
            return plain(z.to(torch.float32), *args, **kwargs)

    return decode


def _wrap_encode(encode: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return a wrapper of a float32 VAE's `encode` that takes pixels of any dtype and returns latents in it."""
    import torch
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
    from diffusers.models.modeling_outputs import AutoencoderKLOutput

    def encode_as_given(pixels: Tensor) -> Any:
        parameters = encode(pixels.to(torch.float32)).latent_dist.parameters
        return AutoencoderKLOutput(latent_dist=DiagonalGaussianDistribution(parameters.to(pixels.dtype)))

    return encode_as_given


def _is_component(entry: Any) -> bool:
    """Return True if an entry of model_index.json names a part of the pipeline: [library, class] or [null, null]."""
    return isinstance(entry, list) and all(item is None or isinstance(item, str) for item in entry)


def _resolve_last_block(names: Sequence[str], layers: Callable[[], Iterable[str]]) -> set[str]:
    """Return these names, with -1 replaced by the number of the last block among `layers`."""
    with_last = set()
    for name in names:
        blocks, counted, layer = name.partition(".-1.")
        if counted:
            numbers = (re.match(rf"{re.escape(blocks)}\.(\d+)\.", layer) for layer in layers())
            name = f"{blocks}.{max(int(number[1]) for number in numbers if number)}.{layer}"
        with_last.add(name)
    return with_last


@cache
def _list_layer_shapes(denoiser_class: str, denoiser_config: str) -> Mapping[str, tuple[int, ...]]:
    import diffusers
    import torch
    from torch import nn

    with torch.device("meta"):
        denoiser = getattr(diffusers, denoiser_class).from_config(json.loads(denoiser_config))
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return {path: tuple(layer.weight.shape) for path, layer in denoiser.named_modules() if isinstance(layer, layers)}


def list_control_latents(cond: Cond) -> list[Tensor]:
    """Return the latents of the control images in a conditioning, in order: (C, H, W) or (B, C, H, W) each."""
    return [cond[f"control_{i}"] for i in range(sum(re.fullmatch(r"control_\d+", name) is not None for name in cond))]


def list_control_images(cond: Cond) -> list[Image.Image]:
    """Return the control images of a preview's conditioning, in the size of their files.

    `data.cache.decode_preview_controls` put them there.
    """
    names = [f"control_picture_{i}" for i in range(sum(name.startswith("control_picture_") for name in cond))]
    return [Image.fromarray(cond[name].cpu().numpy()) for name in names]


def _as_images(frames: Any) -> list[Image.Image]:
    """Return the frames of a clip as images; some pipelines return arrays."""
    from diffusers.image_processor import VaeImageProcessor

    return list(frames) if isinstance(frames[0], Image.Image) else VaeImageProcessor.numpy_to_pil(frames)


def _swap_halves(tensor: Tensor) -> Tensor:
    import torch

    return torch.cat(tensor.chunk(2)[::-1])


def _make_row_selector(begin: int, end: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor[begin:end]


def _find_row_numbers(shape: tuple[int, ...], change: Callable[[Tensor], Tensor] | None) -> list[int]:
    """Return which row of the file's tensor each row of the converted one is; [] if `change` does more than that."""
    import torch

    if not shape or change is None:
        return list(range(shape[0])) if shape else []
    rows = change(torch.arange(shape[0]).unsqueeze(1))
    return rows[:, 0].tolist() if rows.shape[1:] == (1,) else []


def _find_range(numbers: list[int]) -> slice | None:
    """Return the slice of these numbers; None if they are not consecutive."""
    first, end = numbers[0], numbers[0] + len(numbers)
    return slice(first, end) if numbers == list(range(first, end)) else None


def _change_weight(weight: Weight, change: Callable[[Tensor], Tensor] | None) -> Weight:
    from ..precision import Quantized

    if change is None:
        return weight
    return weight.change_rows(change) if isinstance(weight, Quantized) else change(weight)
