"""The checks of `ModelFamily`: that what was found is this architecture, is whole, and is held in a form that is read.

From headers and JSON only, before anything large is read.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import diffusers
import torch
from diffusers.loaders.single_file_utils import infer_diffusers_model_type

from lora_fp8 import config
from lora_fp8.config import UserError, UserErrors
from lora_fp8.layouts import first_few

from . import UNKNOWN, _files, available, describe, get
from ._files import Header
from ._weights import ADVICE, WeightFile

if TYPE_CHECKING:
    from .base import ModelFamily


class Checks:
    """What is asked of the files when a family is made, each problem in one line."""

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
                known = ("tokenizer.json", "vocab.json", "spiece.model", "tokenizer.model")
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
        self.scheduler_config()  # that it can be read; it is needed when everything is encoded

    def _check_denoiser(self) -> None:
        """That a folder's denoiser has the weights that its config describes, by their headers: `precision.fill_` asks
        the same of them when pictures and captions are encoded."""
        if self.checkpoint:
            return  # its sizes are read from its own tensors
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
        """That the scheduler's config describes a noising process, and a sampler of diffusers."""
        path, told = self.folder / "scheduler" / "scheduler_config.json", self.scheduler_config()
        class_name = told.get("_class_name")
        scheduler_class = getattr(diffusers, class_name, None) if isinstance(class_name, str) else None
        if scheduler_class is None:
            raise UserError(f"{path}: diffusers has no scheduler named {class_name!r}")
        _files.built(scheduler_class, path, told)
        one_BCHW = torch.ones(1, 1, 1, 1)
        try:
            objective = self.objective(told, config.Objective())
            for tokens in (256, 4096):
                t_B = objective.sample_t([torch.Generator().manual_seed(0)], tokens)
                noised = objective.add_noise(one_BCHW, one_BCHW, t_B)
                if not torch.isfinite(noised).all():
                    raise ValueError("what is noised is not finite")
        except (TypeError, ValueError, ArithmeticError, LookupError, RuntimeError, NotImplementedError) as error:
            raise UserError(f"{path} does not describe how pictures are noised ({_files.in_short(error)})") from error

    def _check_vae(self) -> None:
        """That its statistics are not another model's, where class and config are the same."""
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
