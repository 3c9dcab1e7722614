"""The Plan: everything that is known of a job before a weight is loaded.

`check`, `estimate`, `precision`, `train` and `resume` all make the same Plan, and later stages read it instead of the
job. Problems are collected, so that the user sees all of them at once.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from .. import families, precision
from ..adapters import kinds
from ..common.text import quote
from ..config import find_unused_settings
from ..data import images
from ..data.cache import Cache
from ..data.caption_variants import list_dataset_captions
from ..data.examples import ScanReport
from ..data.prompts import Prompt
from ..errors import Message, UserError, UserErrors, combine
from ..families._prompt_weights import LARGE_WEIGHT, find_largest_weight, has_weights, splits_bracket
from ..families.base import ModelFamily
from ..families.sources import BaseDescription, describe
from ..lora_files.export import Adapter
from ..lora_files.layer_names import find_text_encoder
from ..precision.dtypes import DTYPES
from ..run.disk_space import Need
from ..settings import Dataset, Job, Preview, split_preview
from ..training import memory, optim
from ..training.shared_blocks import find_shared_blocks
from . import disk_budget
from .placement import PlacedImages, make_preview_prompts, place_images
from .resolve import choose_layouts, get_resolution, make_family, resolve_auto
from .scan import scan
from .score_model import find_score_model
from .start import read_start_values, read_training_adapter
from .trackers import require_packages

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """A job, its base model described from its headers, its images in their buckets, and its planned layers."""

    job: Job
    """the job, with a number or a name for every "auto" that does not need the weights"""
    family: ModelFamily
    """the architecture of the base model; its files are found and checked, and none is loaded"""
    images: PlacedImages
    layers: precision.Plan
    """storage and matmul of each layer of the base model"""
    warnings: list[str] = field(default_factory=list)
    """about the base model, its layers and unused settings; `images.warnings` are about the dataset"""

    @property
    def run_folder(self) -> Path:
        """Return the folder of the run."""
        return self.job.run_folder

    @cached_property
    def cache(self) -> Cache:
        """Return the cache of encoded images and captions."""
        section = self.job.dataset
        return Cache(section.cache_dir, self.family, section, DTYPES[self.job.model.dtype])

    @cached_property
    def preview_prompts(self) -> tuple[list[str | Prompt], list[str | Prompt]]:
        """Return the prompts of the previews, and the negative prompt of each."""
        return make_preview_prompts(self.job.preview, self.cache)

    @cached_property
    def texts(self) -> list[str | Prompt]:
        """Return all texts that the text encoders will encode, each once."""
        prompts, negative_prompts = self.preview_prompts
        return list(
            dict.fromkeys([*self.cache.list_prompts(self.images.placed, self.job.seed), *prompts, *negative_prompts])
        )

    @cached_property
    def trainable(self) -> disk_budget.Named:
        """Return the parameters that the job trains, by name, on the meta device."""
        return disk_budget.list_trainable(self.job, self.family)

    @cached_property
    def adapted_layers(self) -> list[str]:
        """Return the layers of the denoiser that get an adapter."""
        layers = kinds.group_by_layer({name: parameter for name, parameter in self.trainable})
        return [layer for layer in layers if not find_text_encoder(layer, self.family)]

    @cached_property
    def start(self) -> dict[str, Tensor]:
        """Return the tensors of `adapter.init_from`; {} without one. Raises UserError."""
        return read_start_values(self.job, self.family, self.trainable) if self.job.adapter.init_from else {}

    @cached_property
    def training_adapter(self) -> Adapter | None:
        """Return the LoRA of `model.training_adapter`; None without one. Raises UserError."""
        return read_training_adapter(self.job, self.family)

    @cached_property
    def base_identity(self) -> str:
        """Return the SHA-256 of the denoiser's files, and of the training adapter if there is one."""
        identity, adapter = self.family.compute_base_identity(), self.job.model.training_adapter
        if not adapter:
            return identity
        with Path(adapter).expanduser().open("rb") as file:
            return f"{identity}+{hashlib.file_digest(file, 'sha256').hexdigest()}"

    def estimate_writes(self, world: int = 1) -> list[Need]:
        """Estimate the bytes that the job will still write: the base model, checkpoints, LoRA files, previews, cache.

        Args:
            world: number of processes that train.
        """
        missing = self.cache.find_missing(self.images.placed, self.texts)
        cached = disk_budget.estimate_cache(self.cache, missing, min(self.images.buckets))
        size = self.family.count_missing_bytes()
        download = [Need(self.family.folder, Message("the base model"), size, size)] if size else []
        return [*download, *disk_budget.estimate_run(self.job, self.trainable, self.run_folder, world), cached]


class Problems(list[str]):
    """Problems of a job, one line each, without duplicates."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        super().__init__(lines)
        self.errors: list[UserError] = []

    def collect(self, action: Callable[[], T]) -> T | None:
        """Return the result of `action`; if it raises UserError, add its problems and return None."""
        try:
            return action()
        except UserError as error:
            self.errors.append(error)
            self.extend(line for line in error.problems if line not in self)
            return None


def make(
    job: Job,
    device: torch.device | None = None,
    *,
    base: BaseDescription | None = None,
    world: int = 1,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Make the Plan of a job.

    Args:
        device: device to train on; None checks nothing about the devices of this machine.
        base: the description of the base model, if it was asked for already.
        world: number of processes that will train.
        resume: True if the run continues from a checkpoint, so that `adapter.init_from` is not read.
        progress: called with (files done, files in all) while images are decoded.

    Raises:
        UserError: the job has one problem; UserErrors: it has several, all listed.
    """
    report = scan(job, progress)
    plan, problems = attempt(job, report, device, base=base, world=world, resume=resume)
    if plan is not None and not problems:
        return plan
    if problems == report.problems:
        raise UserErrors(problems, "dataset")
    alone = problems.errors[0] if len(problems.errors) == 1 else None
    if alone is not None and alone.problems == problems:
        raise alone  # it names the place of its problems
    raise combine(problems)


def find_batch_problems(batch_size: int, world: int) -> list[str]:
    """Return the problem of a batch that so many processes cannot share; [] if they can."""
    if batch_size % world == 0:
        return []
    return [
        Message(
            "train.batch_size = {size} is divided among {count} processes; use a multiple of {count}",
            size=batch_size,
            count=world,
        )
    ]


def attempt(
    job: Job,
    report: ScanReport,
    device: torch.device | None = None,
    *,
    base: BaseDescription | None = None,
    world: int = 1,
    resume: bool = False,
) -> tuple[Plan | None, Problems]:
    """Make the Plan of a job as far as possible, and collect all problems.

    Args:
        report: the images of the job.
        base: the description of the base model, if it was asked for already. The other arguments are those of `make`.

    Returns:
        The Plan, or None if it cannot be made; and the problems, empty if training can start.
    """
    problems = Problems(report.problems)
    base = base or describe(job.model.path, job.model.revision, job.model.family)
    problems.extend(base.problems)
    family = None if base.problems else problems.collect(lambda: make_family(job, device or "cpu", base))
    if device is not None:
        refusals = precision.find_problem(job.quantize, device, world), memory.find_problem(job.memory, device)
        problems.extend(filter(None, refusals))
    problems.extend(find_batch_problems(job.train.batch_size, world))
    resolved = problems.collect(lambda: resolve_auto(job, families.get(job.model.family)))
    if family is None or resolved is None:
        return None, problems
    num_errors = len(problems.errors)
    problems.collect(family.check_parts)
    if len(problems.errors) == num_errors:  # otherwise a scheduler that makes no sense is reported already
        problems.collect(lambda: family.make_objective(job.objective))
    layers = problems.collect(lambda: plan_layers(job, family))
    if job.memory.shard_base:
        problems.collect(lambda: find_shared_blocks(family.outline))
    resolved = problems.collect(partial(choose_layouts, resolved, family))
    if resolved is None or report.problems:
        return None, problems
    if job.dataset.resolution == "auto":
        images.warn_of_sizes(report, resolved.dataset, get_resolution(resolved))
    placed = problems.collect(partial(place_images, resolved, report))
    if placed is None or layers is None:
        if job.adapter.init_from and not resume:
            problems.collect(lambda: read_start_values(resolved, family, disk_budget.list_trainable(resolved, family)))
        return None, problems
    plan = Plan(resolved, family, placed, layers)
    _check_plan(plan, problems, resume)
    placed.warnings[:0] = report.warnings
    placed.warnings.extend(_find_caption_warnings(plan, report))
    # The number of training processes is unknown without a device.
    facts = {} if device is None else {"run.several_processes": world > 1}
    plan.warnings.extend([*layers.warnings, *_find_warnings(plan, facts)])
    return plan, problems


def _check_plan(plan: Plan, problems: Problems, resume: bool) -> None:
    """Add the problems that show once layers and buckets are planned: in buckets, previews, optimizer and adapters."""
    job, family = plan.job, plan.family
    for width, height, *_ in plan.images.buckets | plan.images.held_out_buckets:
        problems.collect(partial(family.check_bucket, width, height))
    for table in split_preview(job.preview):
        if table.guidance != "auto":
            problems.collect(partial(family.make_guidance_inputs, table.guidance))
    problems.collect(lambda: optim.try_out(job.optimizer, limits=bool(job.adapter.scale_weight_norms)))
    problems.collect(lambda: require_packages(job.tracking))
    if job.preview.prompts and job.preview.score_model:
        problems.collect(lambda: find_score_model(job.preview.score_model))
    if not resume:
        problems.collect(lambda: plan.start)
    problems.collect(lambda: plan.training_adapter)


def _find_caption_warnings(plan: Plan, report: ScanReport) -> list[str]:
    """Find warnings about captions and preview prompts: what the family does not expect, and doubtful weights."""
    job, family = plan.job, plan.family
    captions = list_dataset_captions(report.examples, job.dataset, job.seed)
    texts = dict.fromkeys([*captions, *_list_preview_texts(family, job.preview)])
    return [*family.list_caption_caveats(captions), *_find_doubtful_weights(family, texts, captions, job.dataset)]


def _list_preview_texts(family: ModelFamily, preview: Preview) -> list[str]:
    """List the preview prompts and the negative prompts that are used."""
    tables = split_preview(preview)
    return [*(table.prompts[0] for table in tables), *(table.negative for table in tables if family.uses_negative)]


def _find_doubtful_weights(
    family: ModelFamily, texts: Collection[str], captions: Collection[str], dataset: Dataset
) -> list[str]:
    """Return warnings about weights in texts: read as text, very large, or of several tags that are shuffled."""
    weighted = [text for text in texts if has_weights(text)]
    if not weighted or not family.long_captions:
        return []
    if not family.prompt_weights:
        return [
            Message(
                "{count} of {total} captions and prompts contain weights, such as {example}, which are read as "
                "text; to use them, set model.prompt_weights = true",
                example=quote(weighted[0]),
                count=len(weighted),
                total=len(texts),
            )
        ]
    warnings: list[str] = []
    large = [text for text in weighted if find_largest_weight(text) > LARGE_WEIGHT]
    if large:
        warnings.append(
            Message(
                "{count} of {total} captions and prompts have a weight above {most}, such as {example}; usual "
                "weights are 0.5 to 1.5",
                count=len(large),
                total=len(texts),
                most=LARGE_WEIGHT,
                example=quote(large[0]),
            )
        )
    split = [text for text in captions if splits_bracket(text, dataset.tag_separator)]
    if split and (dataset.shuffle_tags or dataset.tag_dropout):
        warnings.append(
            Message(
                "{count} of {total} captions have brackets around several tags, such as {example}, which shuffling "
                "or dropping tags tears apart; give each tag a weight of its own",
                count=len(split),
                total=len(captions),
                example=quote(split[0]),
            )
        )
    return warnings


def plan_layers(job: Job, family: ModelFamily) -> precision.Plan:
    """Decide storage and matmul of each layer of the job's base model, from its config and without its weights.

    Raises:
        UserErrors: a setting of [quantize] does not fit this model.
    """
    dtype = DTYPES[job.model.dtype]
    keep, modulation = family.keep_precise, family.modulation
    return precision.decide(family.outline, job.quantize, keep, dtype, modulation, family.read_file_scale())


def _find_warnings(plan: Plan, facts: Mapping[str, bool]) -> list[str]:
    """Find warnings: about the base model, unused settings, and settings that are known to cause trouble."""
    job, family = plan.job, plan.family
    return [
        *family.warnings,
        *find_unused_settings(job, {**family.list_base_facts(), **plan.layers.facts, **facts}),
        *optim.find_cautions(job.optimizer, job.schedule),
        *(optim.find_lr_factors(job.optimizer, plan.adapted_layers)[1] if job.optimizer.lrs else []),
    ]
