"""Resolve a job against its family, for the Plan: the base model's files, "auto" sizes, and the layouts of the LoRA."""

from dataclasses import replace
from typing import Any

import torch

from .. import adapters, families
from ..adapters import kinds
from ..errors import Message, UserError, UserErrors
from ..families import _released
from ..families.base import ModelFamily
from ..families.sources import BaseDescription, describe
from ..lora_files import layouts
from ..precision.dtypes import DTYPES
from ..settings import Job
from ..training import optim, text_encoders


def make_family(job: Job, device: torch.device | str = "cpu", base: BaseDescription | None = None) -> ModelFamily:
    """Find and check the files of the job's base model, without loading them.

    Of a base on a hub, nothing but configs, tokenizers and headers is transferred. A base from `describe_for_estimate`
    whose host could not be asked becomes the family's released model without its files.

    Args:
        job: with its base model.
        device: device of the encoders and the denoiser.
        base: the description of the base, if it was asked for already.

    Raises:
        UserError: see `ModelFamily`.
    """
    Family, dtype, section = families.get(job.model.family), DTYPES[job.model.dtype], job.objective
    if base is not None and base.unanswered and not base.problems:
        return _released.make(Family, job.model, base, device=device, dtype=dtype)
    stated, zero_snr = section.prediction, section.zero_terminal_snr
    return Family(job.model, device=device, dtype=dtype, prediction=stated, zero_snr=zero_snr, base=base)


def describe_for_estimate(job: Job) -> BaseDescription:
    """Describe the job's base model; if its host cannot be asked, that is no problem, as published sizes replace it."""
    base = describe(job.model.path, job.model.revision, job.model.family)
    return replace(base, problems=()) if base.unanswered else base


def resolve_auto(job: Job, Family: type[ModelFamily]) -> Job:
    """Replace each "auto" that must be a number before the model is loaded by the family's value.

    Raises:
        UserError: a setting does not fit the family.
    """
    updates: dict[str, Any] = {}
    if job.dataset.resolution == "auto":
        updates["resolution"] = Family.native_resolution
    if job.dataset.bucket_step == "auto":
        updates["bucket_step"] = Family.bucket_step
    elif job.dataset.bucket_step % Family.bucket_multiple:
        raise UserError(
            Message(
                "dataset.bucket_step = {step}: {title} needs a multiple of {multiple}",
                step=job.dataset.bucket_step,
                title=Family.title,
                multiple=Family.bucket_multiple,
            )
        )
    if job.dataset.frames and job.dataset.fps == "auto":
        updates["fps"] = float(Family.clips[1])
    if problem := text_encoders.find_problem(job.adapter, Family):
        raise UserError(problem)
    sides = {"dataset.resolution": updates.get("resolution", job.dataset.resolution)}
    sides |= {f"dataset.folders.{i}.resolution": folder.resolution for i, folder in enumerate(job.dataset.folders)}
    for key, side in sides.items():
        if side % Family.bucket_multiple:
            raise UserError(
                Message(
                    "{key} = {side}: {title} needs a multiple of {multiple}",
                    key=key,
                    side=side,
                    title=Family.title,
                    multiple=Family.bucket_multiple,
                )
            )
    section = job.export
    # Which layouts carry another kind than LoRA depends on the layers: see `choose_layouts`.
    if section.formats == ["auto"] and job.adapter.type == "lora":
        section = section.model_copy(update={"formats": list(Family.choose_layouts())})
    unknown = [layout for layout in section.formats if layout not in Family.layouts]
    if unknown and section.formats != ["auto"]:
        raise UserError(
            Message(
                "export.formats = {name}: {title} has no such layout; accepted: auto | {names}",
                name=unknown,
                title=Family.title,
                names=" | ".join(Family.layouts),
            )
        )
    return job.model_copy(update={"dataset": job.dataset.model_copy(update=updates), "export": section})


def get_resolution(job: Job) -> int:
    """Return `dataset.resolution` of a job from `resolve_auto`.

    Raises:
        ValueError: it is still "auto".
    """
    if job.dataset.resolution == "auto":
        raise ValueError('dataset.resolution is still "auto"; call resolve_auto first')
    return job.dataset.resolution


def choose_layouts(job: Job, family: ModelFamily) -> Job:
    """Choose layouts that support the job's kind of adapter, before anything is encoded. Returns the job with them.

    Raises:
        UserErrors: a layout of export.formats does not support it, or none does.
        UserError: adapter.ranks or optimizer.lrs names no layer.
    """
    kind, formats = job.adapter.type, job.export.formats
    if kind == "lora" and not job.adapter.ranks and not job.optimizer.lrs:
        return job
    title, sizes = kinds.TITLES[kind], family.read_denoiser_config()
    names = family.choose_adapter_layers(family.outline, job.adapter.targets)
    names = list(adapters.assign_ranks(job.adapter, names)[0])
    optim.find_lr_factors(job.optimizer, names)
    if kind == "lora":
        return job
    reasons = {layout: layouts.explain_unsupported(kind, names, family, sizes, layout) for layout in family.layouts}
    able = [layout for layout, reason in reasons.items() if reason is None]
    refused = (
        family.layouts if formats == ["auto"] and not able else [layout for layout in formats if reasons.get(layout)]
    )
    if refused:
        instead = (
            Message("set export.formats = [{name}]", name=f"'{able[0]}'")
            if able
            else Message("no layout supports it: remove such layers from adapter.targets, or set adapter.type = 'lora'")
        )
        raise UserErrors(
            [
                Message(
                    "the {layout} layout of {title} does not support {kind}: {why}; {line}",
                    layout=layout,
                    title=family.title,
                    kind=title,
                    why=reasons[layout],
                    line=instead,
                )
                for layout in refused
            ],
            f"adapter.type = '{kind}'",
        )
    if formats != ["auto"]:
        return job
    return job.model_copy(update={"export": job.export.model_copy(update={"formats": able[:1]})})
