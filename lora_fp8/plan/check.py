"""Check a job completely without loading any model: `lora-fp8 check`.

What needs no torch is looked at first, and torch is imported only to look at the base model's files.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import families
from ..config import find_unused_settings
from ..data import buckets, images
from ..errors import UserError
from ..families import _files
from ..run import disk_space, ownership
from ..settings import Job


@dataclass
class Check:
    """What a check found."""

    problems: list[str] = field(default_factory=list)
    """one line each; none means that training can start"""
    warnings: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    """lines about the dataset and the base model"""

    @property
    def lines(self) -> list[str]:
        return [*self.facts, *(f"warning: {text}" for text in dict.fromkeys(self.warnings))]

    def to_json(self) -> dict[str, Any]:
        return {"ok": not self.problems, "problems": self.problems, "lines": self.lines}


def check(job: Job) -> Check:
    """Look at a job's folders, images, base model and disk space, and return everything that was found."""
    report = _scan(job)
    found = Check(problems=[*report.problems], facts=images.describe(report))
    found.problems += _check_places(job)
    base = job.model
    has_base = False
    if _files.is_hub_id(base.path) and not os.path.exists(os.path.expanduser(base.path)):
        found.facts.append(f"base: {base.path}, from the hub when training starts (not looked at here)")
    else:
        try:
            _files.locate(base.path, base.components, base.revision, family=base.family, parts=())
        except UserError as error:
            found.problems += getattr(error, "problems", [str(error)])
        else:
            has_base = True
    if report.problems:  # reported at once: importing torch takes seconds
        found.warnings += [*report.warnings, *find_unused_settings(job)]
        _add_buckets(job, report, found)
    elif has_base:
        _check_with_base(job, report, found)
    else:
        _check_sizes(job, report, found)
    return found


def _check_sizes(job: Job, report: images.ScanReport, found: Check) -> None:
    """Look at what the family alone decides: sizes, layouts, buckets, images to hold out."""
    from . import placement, resolve

    try:
        resolved = resolve.resolve_auto(job, families.get(job.model.family))
        if job.dataset.resolution == "auto":
            images.note_sizes(report, resolved.dataset, resolved.dataset.resolution)
        placement.split(resolved, report.examples)
    except UserError as error:
        found.problems += getattr(error, "problems", [str(error)])
    else:
        _add_buckets(resolved, report, found)
    found.warnings += [*report.warnings, *find_unused_settings(job)]


def _check_with_base(job: Job, report: images.ScanReport, found: Check) -> None:
    """Make the job's Plan, and ask the tokenizers what captions lose and the disks for room."""
    from ..data.cache import dataset_captions, truncation_warnings
    from . import plan as planning

    plan, problems = planning.attempt(job, report)
    found.problems += [line for line in problems if line not in found.problems]
    if plan is None:
        found.warnings += [*report.warnings, *find_unused_settings(job)]
        return
    family, base = plan.family, job.model
    if not found.problems:
        try:
            found.warnings += disk_space.require(plan.writes())
        except UserError as error:
            found.problems += getattr(error, "problems", [str(error)])
        texts = [*dataset_captions(report.examples, job.dataset, job.seed), *job.preview.prompts]
        texts = list(dict.fromkeys(texts))
        found.warnings += truncation_warnings(family.overlong(texts), len(texts))
    assumed = f" (assumed from {family.folder / 'scheduler'})" if family.assumes_prediction() else ""
    found.facts.append(f"base: {family.title}, {base.path}, predicts {family.predicts()}{assumed}")
    _add_buckets(plan.job, report, found)
    found.warnings = [*plan.images.warnings, *plan.warnings, *found.warnings]


def _add_buckets(job: Job, report: images.ScanReport, found: Check) -> None:
    """Add the sizes of the buckets and how many images each has, where the sizes are known."""
    section = job.dataset
    if "auto" in (section.resolution, section.bucket_step):
        return
    placed = buckets.assign(report.examples, section, resolution=section.resolution, step=section.bucket_step)
    sizes = {buckets.named(bucket): len(members) for bucket, members in buckets.group(placed).items()}
    if sizes:
        found.facts.append("buckets " + ", ".join(f"{size}: {count}" for size, count in sizes.items()))


def _scan(job: Job) -> images.ScanReport:
    facts = families.facts(job.model.family)
    controls, (_, clip_rate) = facts.get("controls", (0, 0)), facts.get("clips", (0, 0))
    return images.scan(job.dataset, controls, job.preview, clip_rate, job.objective.unmasked_weight)


def _check_places(job: Job) -> list[str]:
    """Return what is wrong with the folders that training writes into: they can be written, and the run's is new."""
    run = Path(os.path.expanduser(job.output_dir)) / job.name
    places = {"output_dir": run, "dataset.cache_dir": Path(os.path.expanduser(job.dataset.cache_dir))}
    refusals = {f"{key} = {str(place)!r}": disk_space.unwritable(place) for key, place in places.items()}
    problems = [f"{where}: cannot be written ({why}); name another folder" for where, why in refusals.items() if why]
    if not refusals[f"output_dir = {str(run)!r}"]:
        try:
            ownership.require_new(run)
        except UserError as error:
            problems.append(str(error))
    return problems
