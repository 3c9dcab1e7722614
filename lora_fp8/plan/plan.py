"""The Plan: everything that is known of a job before a weight is loaded.

`check`, `estimate`, `plan`, `precision`, `train` and `resume` all make the same one, and nobody after it works out the
same things from the job again. What is wrong is collected, so that the user sees all of it at once.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .. import families, precision
from ..adapters import kinds
from ..config import find_unused_settings
from ..data import images
from ..data.cache import Cache, Prompt, dataset_captions
from ..errors import UserError, UserErrors
from ..families.base import ModelFamily
from ..lora_files.layouts import text_encoder_of
from ..precision.dtypes import DTYPES
from ..run.disk_space import Need
from ..settings import Job
from ..training import memory, optim
from . import disk_budget
from .placement import PlacedImages, place_images, preview_prompts, scan
from .resolve import carried, make_family, resolve_auto, run_folder
from .start import start_values

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """A job, its base model described from its headers, its images in their buckets, and its planned layers."""

    job: Job
    """with a number or a name for every "auto" that does not need the weights"""
    family: ModelFamily
    """its files are found and checked, none is loaded"""
    images: PlacedImages
    layers: precision.Plan
    """how each layer of the base is held and multiplied"""
    warnings: list[str] = field(default_factory=list)
    """about the base, its layers, and settings that have no effect; `images.warnings` are about the dataset"""

    @property
    def run_folder(self) -> Path:
        return run_folder(self.job)

    @cached_property
    def cache(self) -> Cache:
        """The cache of encoded images and captions."""
        section = self.job.dataset
        return Cache(section.cache_dir, self.family, section, DTYPES[self.job.model.dtype])

    @cached_property
    def preview_prompts(self) -> tuple[list[str | Prompt], list[str | Prompt]]:
        """The prompts of the previews, and what each is guided away from."""
        return preview_prompts(self.job, self.cache)

    @cached_property
    def texts(self) -> list[str | Prompt]:
        """Everything that the text encoders are to read, each once."""
        drawn, guided_away = self.preview_prompts
        return list(dict.fromkeys([*self.cache.prompts(self.images.placed, self.job.seed), *drawn, *guided_away]))

    @cached_property
    def trainable(self) -> disk_budget.Named:
        """The parameters that the job trains, by name, on the meta device."""
        return disk_budget.trained(self.job, self.family)

    @cached_property
    def adapted_layers(self) -> list[str]:
        """The layers of the denoiser that get an adapter."""
        layers = kinds.grouped({name: parameter for name, parameter in self.trainable})
        return [layer for layer in layers if not text_encoder_of(layer, self.family)]

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """The tensors of `adapter.init_from`; {} without one. Raises UserError."""
        return start_values(self.job, self.family, self.trainable) if self.job.adapter.init_from else {}

    def writes(self, world: int = 1) -> list[Need]:
        """Return what the job will write from now on, by folder: checkpoints, LoRA files, previews and the cache.

        Args:
            world: processes that train.
        """
        missing = self.cache.missing(self.images.placed, self.texts)
        cached = disk_budget.of_cache(self.cache, missing, min(self.images.buckets))
        return [*disk_budget.of_run(self.job, self.trainable, self.run_folder, world), cached]


class Problems(list[str]):
    """The lines of what is wrong, each once."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        super().__init__(lines)
        self.errors: list[UserError] = []

    def of(self, question: Callable[[], T]) -> T | None:
        """Return the answer to a question, or None and add what is wrong."""
        try:
            return question()
        except UserError as error:
            self.errors.append(error)
            self.extend(line for line in getattr(error, "problems", [str(error)]) if line not in self)
            return None


def make(job: Job, device: torch.device | None = None, *, world: int = 1, resume: bool = False) -> Plan:
    """Find out all that can be known of a job before a weight is loaded.

    Args:
        device: where it will train; None asks nothing of this machine's devices.
        world: processes that will train.
        resume: it goes on from a checkpoint, so `adapter.init_from` is not read.

    Raises:
        UserError: something is wrong; UserErrors: several things are, all of them at once.
    """
    report = scan(job, families.get(job.model.family))
    plan, problems = attempt(job, report, device, world=world, resume=resume)
    if plan is not None and not problems:
        return plan
    if problems == report.problems:
        raise UserErrors(problems, "dataset")
    alone = problems.errors[0] if len(problems.errors) == 1 else None
    if alone is not None and len(problems) == len(getattr(alone, "problems", [alone])):
        raise alone  # it says where its problems are
    raise UserErrors(problems) if len(problems) > 1 else UserError(problems[0])


def attempt(
    job: Job,
    report: images.ScanReport,
    device: torch.device | None = None,
    *,
    world: int = 1,
    resume: bool = False,
) -> tuple[Plan | None, Problems]:
    """Collect everything that is known of a job and everything that is wrong with it.

    Args:
        report: the images of the job; see `make` for the rest.

    Returns:
        The Plan, or None if it cannot be made; and the problems, empty if training can start.
    """
    problems = Problems(report.problems)
    Family = families.get(job.model.family)
    family = problems.of(lambda: make_family(job, device or "cpu"))
    if device is not None:
        refusals = precision.problem(job.quantize, device, world), memory.problem(job.memory, device)
        problems.extend(filter(None, refusals))
    if job.train.batch_size % world:
        problems.append(
            f"train.batch_size = {job.train.batch_size} is shared out among {world} processes; "
            f"make it a multiple of {world}"
        )
    resolved = problems.of(lambda: resolve_auto(job, Family))
    if family is None or resolved is None:
        return None, problems
    problems.of(family.check_parts)
    layers = problems.of(lambda: plan_layers(job, family))
    resolved = problems.of(partial(carried, resolved, family))
    if resolved is None or report.problems:
        return None, problems
    if job.dataset.resolution == "auto":
        images.note_sizes(report, resolved.dataset, resolved.dataset.resolution)
    placed = problems.of(partial(place_images, resolved, report))
    if placed is None or layers is None:
        if job.adapter.init_from and not resume:
            problems.of(lambda: start_values(resolved, family, disk_budget.trained(resolved, family)))
        return None, problems
    for width, height, *_ in placed.buckets | placed.held_out_buckets:
        problems.of(partial(family.check_bucket, width, height))
    if job.preview.prompts and job.preview.guidance != "auto":
        problems.of(lambda: family.guidance_inputs(job.preview.guidance))
    plan = Plan(resolved, family, placed, layers)
    if not resume:
        problems.of(lambda: plan.start)
    captions = dataset_captions(report.examples, resolved.dataset, job.seed)
    placed.warnings[:0] = report.warnings
    placed.warnings.extend(family.caption_caveats(captions))
    # Without a device it is not known how many processes will train.
    facts = {} if device is None else {"run.several_processes": world > 1}
    plan.warnings.extend([*layers.warnings, *_unused(plan, facts)])
    return plan, problems


def plan_layers(job: Job, family: ModelFamily) -> precision.Plan:
    """Decide how each layer of the job's base is held and multiplied; reads the model's config and no weights.

    Raises:
        UserErrors: [quantize] asks for what this model cannot have.
    """
    dtype = DTYPES[job.model.dtype]
    keep, modulation = family.keep_precise, family.modulation
    return precision.decide(family.empty_denoiser(), job.quantize, keep, dtype, modulation, family.file_scale())


def _unused(plan: Plan, facts: Mapping[str, bool]) -> list[str]:
    """Return warnings about settings that have no effect, and about ones that are known to go wrong."""
    job, family = plan.job, plan.family
    return [
        *family.warnings,
        *find_unused_settings(job, family.facts_of_base() | plan.layers.facts | facts),
        *optim.cautions(job.optimizer),
        *(optim.lr_factors(job.optimizer, plan.adapted_layers)[1] if job.optimizer.lrs else []),
    ]
