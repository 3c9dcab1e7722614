"""Check a job completely without loading any model: `lora-fp8 check`.

Checks that need no torch run first. torch is imported only to read the base model's files, which takes seconds.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .. import families
from ..config import find_unused_settings
from ..config.validation import STILL_OPEN, TODO
from ..data import buckets, image_files, images
from ..data.examples import ScanReport
from ..errors import Message, Template, UserError
from ..families import _files
from ..families.sources import BaseDescription, describe
from ..run import disk_space, ownership
from ..settings import Job, Model, find_path_places
from .scan import scan


@dataclass
class Check:
    """The result of a check."""

    problems: list[str] = field(default_factory=list)
    """one line each; empty if training can start"""
    warnings: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    """lines about the dataset and the base model"""

    @property
    def lines(self) -> list[str]:
        """Return the facts, then each warning once."""
        return [*self.facts, *(Message("warning: {line}", line=text) for text in dict.fromkeys(self.warnings))]

    def to_json(self) -> dict[str, Any]:
        """Return the check as plain JSON types."""
        return {"ok": not self.problems, "problems": self.problems, "lines": self.lines}


def check(job: Job, progress: Callable[[int, int], None] | None = None) -> Check:
    """Check a job's folders, images, base model and disk space.

    Args:
        job: with its config.
        progress: called with (files done, files in all) while images are decoded.

    Returns:
        All problems, warnings and facts; nothing is raised for a wrong job.
    """
    if _find_open_places(job):
        return Check(check_files(job))
    report = scan(job, progress)
    result = Check(problems=[*report.problems], facts=images.describe(report))
    result.problems += _check_places(job)
    section = job.model
    base = _describe_base(section)
    result.problems += base.problems
    result.facts += base.lines
    if report.problems:  # reported at once: importing torch takes seconds
        result.warnings += [*report.warnings, *find_unused_settings(job)]
        _add_buckets(job, report, result)
    elif not base.problems:
        _check_with_base(job, report, result, base)
    else:
        _check_sizes(job, report, result)
    return result


def check_files(job: Job, wrong: Collection[str] = ()) -> list[str]:
    """Return the TODOs among the paths of an incomplete config, and the problems of its image folders and base model.

    A folder or base is checked if its own settings are valid. No image is decoded.

    Args:
        job: with its config, without the invalid settings.
        wrong: the invalid settings, such as "train.steps" and "dataset.folders.0.path".
    """
    open_places = _find_open_places(job)
    excluded = [*wrong, *open_places]
    report = ScanReport(problems=[Message("{key}: {line}", key=key, line=STILL_OPEN) for key in open_places])

    def is_valid(*keys: str) -> bool:
        pairs = [(f"{key}.", f"{name}.") for key in keys for name in excluded]
        return not any(key.startswith(name) or name.startswith(key) for key, name in pairs)

    knows_family = is_valid("model.family")
    clip_rate = families.get(job.model.family).clips[1] if knows_family else None
    for index in range(len(job.dataset.folders)):
        key = f"dataset.folders.{index}"
        if is_valid(f"{key}.path", f"{key}.mask", "dataset.frames"):
            image_files.list_folder(index, job.dataset, report, clip_rate)
    if knows_family and is_valid("model.path", "model.revision"):
        report.problems += _describe_base(job.model).problems
    return report.problems


def _find_open_places(job: Job) -> list[str]:
    """Return the settings that name a path and are still to be filled in."""
    return [named.key for named in find_path_places(job.model_dump()) if named.path == TODO]


def _describe_base(section: Model) -> BaseDescription:
    """Describe the base model, with the problems of its files on this machine."""
    base = describe(section.path, section.revision, section.family)
    if not base.problems:
        try:
            _files.locate(section.path, section.revision, family=section.family, base=base)
        except UserError as error:
            return replace(base, problems=tuple(error.problems))
    return base


def _check_sizes(job: Job, report: ScanReport, result: Check) -> None:
    """Check what the family alone decides: sizes, layouts, buckets and images to hold out."""
    from . import placement, resolve

    try:
        resolved = resolve.resolve_auto(job, families.get(job.model.family))
        if job.dataset.resolution == "auto":
            images.warn_of_sizes(report, resolved.dataset, resolve.get_resolution(resolved))
        placement.split(resolved, report.examples)
    except UserError as error:
        result.problems += error.problems
    else:
        _add_buckets(resolved, report, result)
    result.warnings += [*report.warnings, *find_unused_settings(job)]


def _check_with_base(job: Job, report: ScanReport, result: Check, base: BaseDescription) -> None:
    """Make the job's Plan, then check how the tokenizers cut the captions and whether the disks have room."""
    from ..adapters.targets import choose_layers
    from ..data.caption_variants import warn_of_truncation
    from ..data.prompts import get_text
    from . import plan as planning

    plan, problems = planning.attempt(job, report, base=base)
    result.problems += [line for line in problems if line not in result.problems]
    if plan is None:
        result.warnings += [*report.warnings, *find_unused_settings(job)]
        return
    family, section = plan.family, job.model
    for described in family.bases:
        result.facts += described.lines if described.reference != base.reference else []  # those of model.components
    if not result.problems:
        try:
            names = family.choose_adapter_layers(family.outline, job.adapter.targets)
            result.warnings += choose_layers(family.outline, job.adapter.model_copy(update={"targets": []}), names)[1]
            result.warnings += disk_space.require_space(plan.estimate_writes())
        except UserError as error:
            result.problems += error.problems
        texts = list(dict.fromkeys(map(get_text, plan.texts)))
        result.warnings += warn_of_truncation(family.find_overlong(texts), len(texts))
    template = Template("base: {title}, {path}, predicts {kind}")
    if family.assumes_prediction():
        template = Template("base: {title}, {path}, predicts {kind} (assumed from {place})")
    place = {"place": family.folder / "scheduler"} if family.assumes_prediction() else {}
    result.facts.append(template(title=family.title, path=section.path, kind=family.get_prediction(), **place))
    _add_buckets(plan.job, report, result)
    result.warnings = [*plan.images.warnings, *plan.warnings, *_find_refusals(job), *result.warnings]


def _find_refusals(job: Job) -> list[str]:
    """Return why training would not start on this machine; the config may be meant for another one."""
    import torch

    from .. import precision
    from ..training import memory

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = precision.find_problem(job.quantize, device, 1), memory.find_problem(job.memory, device)
    return [Message("this machine cannot train the job: {line}", line=line) for line in lines if line]


def _add_buckets(job: Job, report: ScanReport, result: Check) -> None:
    """Add the size and the number of images of each bucket, if the sizes are known."""
    resolution, step = job.dataset.resolution, job.dataset.bucket_step
    if resolution == "auto" or step == "auto":
        return
    placed = buckets.assign(report.examples, job.dataset, resolution=resolution, step=step)
    sizes = {buckets.format_bucket(bucket): len(members) for bucket, members in buckets.group(placed).items()}
    if sizes:
        counts = ", ".join(f"{size}: {count}" for size, count in sizes.items())
        result.facts.append(Message("buckets {counts}", counts=counts))


def _check_places(job: Job) -> list[str]:
    """Return the problems of the folders that training writes into: each is writable, and the run's is new."""
    run = job.run_folder
    places = {"output_dir": run, "dataset.cache_dir": Path(os.path.expanduser(job.dataset.cache_dir))}
    refusals = {f"{key} = {str(place)!r}": disk_space.find_write_obstacle(place) for key, place in places.items()}
    problems: list[str] = [disk_space.NOT_WRITABLE(path=where, why=why) for where, why in refusals.items() if why]
    if not refusals[f"output_dir = {str(run)!r}"]:
        try:
            ownership.require_new(run)
        except UserError as error:
            problems.append(str(error))
    return problems
