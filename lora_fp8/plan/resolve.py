"""Resolve a job against its family: the base model's files, "auto" sizes, and layouts that can carry the adapter."""

import os
from pathlib import Path
from typing import Any

import torch

from .. import adapters, families
from ..adapters import kinds
from ..errors import UserError, UserErrors
from ..families.base import ModelFamily
from ..lora_files import layouts
from ..precision.dtypes import DTYPES
from ..settings import Job
from ..training import optim, text_encoders


def make_family(job: Job, device: torch.device | str = "cpu") -> ModelFamily:
    """Find and check the files of the job's base model; loads none of them.

    Raises:
        UserError: see `ModelFamily`.
    """
    dtype, prediction = DTYPES[job.model.dtype], job.objective.prediction
    return families.get(job.model.family)(job.model, device=device, dtype=dtype, prediction=prediction)


def run_folder(job: Job) -> Path:
    """Where the job's run is, or will be."""
    return Path(os.path.expanduser(job.output_dir)) / job.name


def resolve_auto(job: Job, Family: type[ModelFamily]) -> Job:
    """Put the family's own numbers where the config says "auto" and a number is needed before the model is loaded."""
    updates: dict[str, Any] = {}
    if job.dataset.resolution == "auto":
        updates["resolution"] = Family.native_resolution
    if job.dataset.bucket_step == "auto":
        updates["bucket_step"] = Family.bucket_step
    elif job.dataset.bucket_step % Family.bucket_multiple:
        raise UserError(
            f"dataset.bucket_step = {job.dataset.bucket_step}: {Family.title} needs a multiple of "
            f"{Family.bucket_multiple}"
        )
    if job.dataset.frames and job.dataset.fps == "auto":
        updates["fps"] = float(Family.clips[1])
    if told := text_encoders.problem(job.adapter, Family):
        raise UserError(told)
    sides = {"dataset.resolution": updates.get("resolution", job.dataset.resolution)}
    sides |= {f"dataset.folders.{i}.resolution": folder.resolution for i, folder in enumerate(job.dataset.folders)}
    for key, side in sides.items():
        if side % Family.bucket_multiple:
            raise UserError(f"{key} = {side}: {Family.title} needs a multiple of {Family.bucket_multiple}")
    section = job.export
    # Which layouts carry another kind than LoRA depends on the layers: see `carried`.
    if section.formats == ["auto"] and job.adapter.type == "lora":
        section = section.model_copy(update={"formats": list(Family.recommended_layouts())})
    unknown = [layout for layout in section.formats if layout not in Family.layouts]
    if unknown and section.formats != ["auto"]:
        raise UserError(
            f"export.formats = {unknown}: {Family.title} has no such layout; accepted: auto | "
            f"{' | '.join(Family.layouts)}"
        )
    return job.model_copy(update={"dataset": job.dataset.model_copy(update=updates), "export": section})


def carried(job: Job, family: ModelFamily) -> Job:
    """The job with layouts that can carry its kind of adapter; found out before anything is encoded.

    Raises:
        UserErrors: a layout that was asked for cannot, or none can; UserError: adapter.ranks or
            optimizer.lrs names no layer.
    """
    kind, formats = job.adapter.type, job.export.formats
    if kind == "lora" and not job.adapter.ranks and not job.optimizer.lrs:
        return job
    title, sizes = kinds.TITLES[kind], family.denoiser_config()
    names = family.adapter_names(family.empty_denoiser(), job.adapter.targets)
    names = list(adapters.ranks(job.adapter, names)[0])
    optim.lr_factors(job.optimizer, names)
    if kind == "lora":
        return job
    reasons = {layout: layouts.uncarried(kind, names, family, sizes, layout) for layout in family.layouts}
    able = [layout for layout, reason in reasons.items() if reason is None]
    refused = family.layouts if formats == ["auto"] and not able else [one for one in formats if reasons.get(one)]
    if refused:
        instead = (
            f"set export.formats = ['{able[0]}']"
            if able
            else "none carries it: leave such layers out of adapter.targets, or set adapter.type = 'lora'"
        )
        raise UserErrors(
            [f"the {one} layout of {family.title} carries no {title}: {reasons[one]}; {instead}" for one in refused],
            f"adapter.type = '{kind}'",
        )
    if formats != ["auto"]:
        return job
    return job.model_copy(update={"export": job.export.model_copy(update={"formats": able[:1]})})
