"""The checks of `ModelFamily`: the files are of this architecture, complete, and in a format that can be read.

They read headers and JSON only, before anything large is loaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .. import settings
from ..common.text import first_few
from ..errors import UserError, UserErrors
from . import UNKNOWN, _files, available, describe, get
from ._files import Header

if TYPE_CHECKING:
    from .base import ModelFamily


NAMED_V = r"v[-_. ]?(pred|param)"
"""Matches the names of v-prediction models, such as NoobAI-XL-Vpred-v1.0.safetensors."""


class Checks:
    """Checks of the model's files when a family object is created, and before a job starts."""

    def _check_architecture(self) -> None:
        relative = get(self.same_tensors_as) if self.same_tensors_as else None
        if self.checkpoint:
            if not self.recognises(self._header) and not (relative and relative.recognises(self._header)):
                raise UserError(self._other_architecture(str(self.checkpoint), *describe_checkpoint(self._header)))
        index = self.folder / self.index_name
        if index.is_file():
            found = str(_files.read_json(index).get("_class_name"))
            # The components of a single file may come from the family with the same tensors.
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
        """Return the first entry of a folder's configs that is not this architecture's, as text; "" if all match."""
        expected = {cls.denoiser_name: cls.config_marks | {"_class_name": cls.denoiser_class}}
        # A VAE of another class, or with other normalization, would give latents that the denoiser was not trained on.
        expected["vae"] = cls.vae_marks | {"_class_name": cls.vae_class}
        for part, marks in expected.items():
            path = folder / part / "config.json"
            found = _files.read_json(path) if path.is_file() else marks
            for key, value in marks.items():
                # A missing entry was saved by a version without it, so it has its default: "no" or "none".
                if (found.get(key) or None) != (value or None):
                    return f"{part}/config.json says {key} = {found.get(key)!r}, expected {value!r}"
        return ""

    def _family_of(self, pipeline_class: str) -> type[ModelFamily] | None:
        """Return the family of this folder; families that share a pipeline differ in the denoiser's config."""
        sharing = [family for family in _families() if family.pipeline_class == pipeline_class]
        return next((family for family in sharing if not family._foreign_mark(self.folder)), None)

    def _other_architecture(self, path: str, what: str, other: type[ModelFamily] | None) -> str:
        advice = f"set model.family = {other.name!r} or choose another file" if other else "choose another file"
        return f"{path} is {what}, but the config says model.family = {self.name!r} ({self.title}); {advice}"

    def _check_complete(self) -> None:
        """Report all missing files at once, with their places; damaged files are found by their headers."""
        wanted = ["scheduler/scheduler_config.json", "vae/config.json"]
        if not self.checkpoint:
            wanted.append(f"{self.denoiser_name}/config.json")
        missing = [w for w in wanted if not (self.folder / w).is_file()]
        needed = {} if self.checkpoint else {self.denoiser_name: "diffusion_pytorch_model"}
        if not self._vae_prefix():
            needed["vae"] = "diffusion_pytorch_model"
        for name in self.text_parts:
            missing += self._missing_of_text(name)
            if not self._is_tokenizer(name) and not self._has_text(name):
                needed[name] = self._text_class(name)[1]
        weights = {name: _files.weight_files(self.folder / name, stem) for name, stem in needed.items()}
        missing += [f"{name}/{needed[name]}.safetensors" for name, paths in weights.items() if not paths]
        self._check_unquantized()
        self._check_scales(weights)
        if missing:
            why = f", which {self.checkpoint} needs beside it" if self.checkpoint else ""
            raise UserError(f"{self.folder} lacks {', '.join(missing)}{why}")
        self.scheduler_config()  # fails if it cannot be read; the cache needs it

    def _missing_of_text(self, name: str) -> list[str]:
        """Return the files besides weights that a tokenizer or text encoder lacks."""
        part = self.folder / name
        if not self._is_tokenizer(name):
            return [] if (part / "config.json").is_file() else [f"{name}/config.json"]
        known = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")
        if name == "processor":
            known = ("preprocessor_config.json", "processor_config.json")
        return [] if any((part / k).is_file() for k in known) else [f"{name}/ ({' or '.join(known)})"]

    def _check_scales(self, weights: Mapping[str, Sequence[Path]]) -> None:
        """Take the notes of the denoiser's files, and refuse other parts that are quantized with scales."""
        from ._weights import ADVICE, WeightFile

        for name, paths in weights.items():
            for path in paths:
                file = WeightFile(path)
                if name == self.denoiser_name:
                    self.warnings += file.notes()
                elif file.scaled:  # diffusers and transformers load these parts, and ignore the scales
                    raise UserError(f"{path} is quantized with scales, which is read of the denoiser only; {ADVICE}")
        if self._file:
            self.warnings += self._file.notes()

    def _check_denoiser(self) -> None:
        """Check by the headers that a folder's denoiser has the weights that its config describes.

        `precision.fill_` checks the same, but only after images and captions are encoded.
        """
        from ._weights import WeightFile

        if self.checkpoint:
            return  # a single file's config is derived from its own tensors
        wanted = {name: tuple(tensor.shape) for name, tensor in self.empty_denoiser().state_dict().items()}
        found: Header = {}
        for path in self._denoiser_files():
            found |= WeightFile(path).header
        wrong = [f"{name} is missing" for name in wanted if name not in found]
        wrong += [f"{name} is not part of this model" for name in found if name not in wanted]
        wrong += [
            f"{name} is {list(shape)} and not {list(wanted[name])}"
            for name, shape in found.items()
            if name in wanted and wanted[name] != tuple(shape)
        ]
        if wrong:
            raise UserError(
                f"{self.folder / self.denoiser_name} has not the weights that its config.json describes: {len(wrong)} "
                f"differ, {first_few(wrong)}; one of them is another model's"
            )

    def _check_scheduler(self) -> None:
        """Check that the scheduler's config names a sampler of diffusers and describes a noising process."""
        import diffusers
        import torch

        path, told = self.folder / "scheduler" / "scheduler_config.json", self.scheduler_config()
        class_name = told.get("_class_name")
        scheduler_class = getattr(diffusers, class_name, None) if isinstance(class_name, str) else None
        if scheduler_class is None:
            raise UserError(f"{path}: diffusers has no scheduler named {class_name!r}")
        _files.built(scheduler_class, path, told)
        one_BCHW = torch.ones(1, 1, 1, 1)
        try:
            objective = self.objective_type()(told, settings.Objective())
            for tokens in (256, 4096):
                t_B = objective.sample_t([torch.Generator().manual_seed(0)], tokens)
                noised = objective.add_noise(one_BCHW, one_BCHW, t_B)
                if not torch.isfinite(noised).all():
                    raise ValueError("what is noised is not finite")
        except (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError, NotImplementedError) as error:
            raise UserError(f"{path} does not describe how pictures are noised ({_files.in_short(error)})") from error

    def _check_prediction(self) -> None:
        """Check that an unmarked single file is not trained as epsilon although its name says v."""
        if self.assumes_prediction() and self.predicts() == "epsilon" and self.file_is_called(NAMED_V):
            raise UserError(
                f"objective.prediction: {self.checkpoint.name} is a v-prediction model by its name, but has no mark of "
                f"it, and {self.folder / 'scheduler'} says epsilon. Set it to 'v', or to 'epsilon' if the name is wrong"
            )

    def _check_vae(self) -> None:
        """Check that the VAE's statistics are not those of another model with the same class and config."""
        import torch

        from ._weights import WeightFile

        files = _files.weight_files(self.folder / "vae", "diffusion_pytorch_model") if self.other_vaes else []
        for path in files:
            file = WeightFile(path)
            means = file.decoded("bn.running_mean").float() if "bn.running_mean" in file.header else torch.empty(0)
            for model, begin in self.other_vaes.items():
                if len(means) and torch.allclose(means[: len(begin)], torch.tensor(begin), rtol=0, atol=1e-3):
                    raise UserError(
                        f"{path} is {model}'s VAE, whose normalisation is not that of {self.title}: put the vae/ of "
                        f"{self.title}'s diffusers folder in its place"
                    )

    def _check_fit(self) -> None:
        """Check by the configs that the parts belong to one model: each part's output fits the next one's input.

        Raises:
            UserErrors: the parts that do not fit, one line each.
        """
        problems = [self._latents_problem(), *map(self._width_problem, self.text_widths)]
        problems += [self._vocabulary_problem(name) for name in self.text_parts if "tokenizer" in name]
        problems.append(self._sampler_problem())
        if problems := [text for text in problems if text]:
            raise UserErrors(problems) if len(problems) > 1 else UserError(problems[0])

    def _number(self, place: str) -> int | None:
        """Return the integer at "part.entry" of the configs; None if no config has it."""
        part, _, entry = place.partition(".")
        if part == "vae" and self._vae_prefix() or part in self.text_parts and self._has_text(part):
            return None  # the single file contains this part, so the folder's config does not apply
        path = self.folder / part / "config.json"
        found = (
            self.denoiser_config() if part == self.denoiser_name else _files.read_json(path) if path.is_file() else {}
        )
        entry, _, index = entry.partition(".")
        value = found.get(entry, (found.get("text_config") or {}).get(entry))
        if index:
            value = value[int(index)] if isinstance(value, list | tuple) and len(value) > int(index) else None
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def _latents_problem(self) -> str:
        """Compare the VAE's latent channels with what the denoiser takes; returns the problem, or ""."""
        name = "z_dim" if self._number("vae.z_dim") else "latent_channels"
        given, taken = self._number(f"vae.{name}"), self._number(f"{self.denoiser_name}.in_channels")
        # FLUX.2's VAE folds 2 x 2 latents into one, and in a sequence each token is a patch.
        times = 4 if self.vae_class == "AutoencoderKLFlux2" else self.patch**2 if self.latents_as == "BSD" else 1
        if not given or not taken or given * times == taken:
            return ""
        what = f"{given} * {times} = {given * times}" if times > 1 else str(given)
        return self._parts_differ(
            "vae", f"vae says {name} = {what}", f"{self.denoiser_name} says in_channels = {taken}"
        )

    def _width_problem(self, entry: str) -> str:
        place = entry if entry.partition(".")[0] in self.text_parts else f"{self.denoiser_name}.{entry}"
        wanted, total = self._number(place), 0
        for term in self.text_widths[entry].split(" + "):
            times, _, source = term.rpartition(" * ")
            number = self._number(source)
            if wanted is None or number is None:
                return ""
            total += int(times or 1) * number
        part, _, entry = place.partition(".")
        given = f"{self.text_widths.get(entry) or self.text_widths[place]} = {total}"
        return "" if total == wanted else self._parts_differ(part, given, f"{part} says {entry} = {wanted}")

    def _parts_differ(self, part: str, given: str, taken: str) -> str:
        return (
            f"{self.folder / part}: the parts are not of one model: {given}, and {taken}. Take all parts from one "
            f"{self.title} folder"
        )

    def _vocabulary_problem(self, tokenizer: str) -> str:
        """Compare a tokenizer's largest token with its encoder's vocabulary; returns the problem, or ""."""
        encoder = tokenizer.replace("tokenizer", "text_encoder")
        size = self._number(f"{encoder}.vocab_size")
        if encoder not in self.text_parts:  # Anima's second tokenizer feeds its conditioner
            encoder, size = "text_conditioner", self._number("text_conditioner.target_vocab_size")
        path = self.folder / tokenizer / "tokenizer.json"
        if not size or not path.is_file():
            return ""
        told = _files.read_json(path)
        added = [token.get("id") for token in told.get("added_tokens") or [] if isinstance(token, dict)]
        vocabulary = (told.get("model") or {}).get("vocab") or {}
        numbers = [*vocabulary.values(), *added] if isinstance(vocabulary, dict) else [len(vocabulary) - 1, *added]
        largest = max((number for number in numbers if isinstance(number, int)), default=0)
        if largest < size:
            return ""
        return self._parts_differ(
            encoder, f"{tokenizer} has tokens up to {largest}", f"{encoder} says vocab_size = {size}"
        )

    def _sampler_problem(self) -> str:
        """Return the problem if a flow matching model has a diffusion sampler or the reverse, else ""."""
        told = self.scheduler_config()
        flows = "FlowMatch" in str(told.get("_class_name")) or told.get("use_flow_sigmas") is True
        flows = flows or told.get("prediction_type") == "flow_prediction"
        wanted = self.objective == "FlowMatching"
        if flows == wanted or not told.get("_class_name"):
            return ""
        kind = "a flow matching" if wanted else "a diffusion"
        scheduler = f"scheduler says {told['_class_name']}, which is not a sampler of {kind} model"
        return self._parts_differ("scheduler", scheduler, f"{self.title} is {kind} model")

    def _check_unquantized(self) -> None:
        """Check that no part of the folder was saved quantized by diffusers or transformers."""
        from ._weights import ADVICE

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


def _families() -> list[type[ModelFamily]]:
    # Imports every family file, which is affordable only because this serves error messages.
    return [importlib.import_module(f"{__package__}.{name}").Family for name in available()]


def describe_checkpoint(header: Header) -> tuple[str, type[ModelFamily] | None]:
    """Return what a single file seems to be, as words for an error message, and its family if it has one."""
    import torch
    from diffusers.loaders.single_file_utils import infer_diffusers_model_type

    what, name = describe(header)
    if what:
        return what, get(name) if name else None
    # diffusers knows many more kinds. It compares shapes only, and returns "v1" when none fits.
    try:
        kind = infer_diffusers_model_type({key: torch.empty(shape, device="meta") for key, shape in header.items()})
    except (KeyError, IndexError):  # one mark fits, and the next tensors it compares are missing
        kind = "v1"
    return (UNKNOWN if kind == "v1" else f"{kind!r} (as diffusers calls it)"), None
