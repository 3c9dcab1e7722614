"""The first two stages of a job: pictures and captions into the cache, the denoiser into its storage.

The encoders are loaded, used and freed before the denoiser arrives, so that the two never need memory at the same time.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import adapters, config, disk, exchange, kinds, layouts, memory, optim, precision, text_encoders, writes
from .config import Job, UserError, UserErrors
from .data import buckets as bucketing
from .data import images, permutation
from .data.cache import (
    Cache,
    Prompt,
    dataset_captions,
    plain_captions,
    preview_pictures,
    text_of,
    truncation_warnings,
    whole,
)
from .data.loader import Item, Loader
from .exchange import Exchange
from .families.base import Cond, ModelFamily
from .layouts import text_encoder_of
from .objectives import Objective
from .processes import Processes
from .run import Run, Stopped
from .text_encoders import Adapted, TextEncoders
from .writes import volume

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Data:
    """What the cache stage leaves to the others."""

    loader: Loader
    examples: list[images.Example]  # those that are trained on
    buckets: dict[bucketing.Bucket, list[bucketing.Placed]]
    heaviest: int  # number of the micro-batch with the most pixels, for the preflight and the probe
    held_out: Loader | None  # what validation measures on: one picture a batch, the same each time
    preview_conds: list[Cond]
    preview_negatives: list[Cond] | None  # for each of these
    preview_texts: tuple[list[str], str]  # what these two were encoded from
    fingerprint: str


@dataclass
class Loaded:
    """What the load stage leaves to the others; `finish` empties it once the training model has said all it knows."""

    denoiser: nn.Module
    objective: Objective
    optimizer: optim.AdapterOptimizer
    plan: precision.Plan  # how each layer of the base is held and multiplied
    amax: precision.AmaxHistory  # what the delayed recipe remembers
    exchange: Exchange  # how the processes come to one gradient
    moved: list[str]  # lines that quantize.sensitivity = "auto" has added to quantize.override
    text: TextEncoders | None = None  # those that are trained beside it

    @property
    def adapted(self) -> nn.Module:
        """All that has adapters, for `adapters`."""
        return self.denoiser if self.text is None else Adapted(self.denoiser, self.text.encoders)


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


def scan(job: Job, Family: type[ModelFamily]) -> images.ScanReport:
    """Every picture and clip of a job with what belongs to it, and the previews' control pictures."""
    return images.scan(job.dataset, Family.controls, job.preview, Family.clips[1], job.objective.unmasked_weight)


def place(job: Job, examples: list[images.Example]) -> dict[bucketing.Bucket, list[bucketing.Placed]]:
    """Every picture and clip in its bucket; the job's "auto" sizes are resolved."""
    section = job.dataset
    placed = bucketing.assign(examples, section, resolution=section.resolution, step=section.bucket_step)
    return bucketing.group(placed)


def may_be_held_out(job: Job, examples: list[images.Example]) -> list[str]:
    """The hashes of the files that validation may keep out of training, none of a folder for regularization."""
    # Contents, not examples: of a clip that is cut into pieces, a picture that lies in two folders or a folder that is
    # named twice, nothing may be trained on where it is held out.
    own = [one for one in examples if not job.dataset.folders[one.folder_index].regularization]
    return list(dict.fromkeys(example.image_sha256 for example in own))


def split(job: Job, examples: list[images.Example]) -> tuple[list[images.Example], list[images.Example]]:
    """What is trained on, and what is kept out of it for validation, each once, drawn by the seed.

    Raises:
        UserError: nothing would be left to train on.
    """
    wanted = job.validation.pictures
    files = may_be_held_out(job, examples)
    if wanted and wanted >= len(files):
        raise UserError(
            f"validation.pictures = {wanted}: of {len(files)} pictures none would be left to train on; use fewer"
        )
    held_out = {files[number] for number in permutation(len(files), "held out", job.seed)[:wanted]}
    trained = [example for example in examples if example.image_sha256 not in held_out]
    kept: dict[tuple[str, tuple[int, ...]], images.Example] = {}
    for example in examples:
        if example.image_sha256 in held_out:
            kept.setdefault((example.image_sha256, example.frames), replace(example, repeats=1))
    return trained, list(kept.values())


def cache(
    job: Job,
    family: ModelFamily,
    examples: list[images.Example],
    run: Run,
    processes: Processes,
    written: Sequence[disk.Need] = (),
) -> Data:
    """Encode every picture and caption that is not in the cache yet; the encoders leave before the denoiser arrives.

    Args:
        examples: all of the dataset; `split` is made here.
        written: what comes onto the disks beside it; those of the main process are asked.

    Raises:
        UserError: see `split`; or a disk has no room. Stopped: somebody asked for it. RunFailure: see `Cache.fill`.
    """
    if job.train.batch_size % processes.world:
        raise UserError(
            f"train.batch_size = {job.train.batch_size} is shared out among {processes.world} processes; "
            f"make it a multiple of {processes.world}"
        )
    if job.preview.prompts and job.preview.guidance != "auto":
        family.guidance_inputs(job.preview.guidance)  # what the family cannot do is refused before anything is encoded
    run.log_event("stage", stage="cache")
    section = job.dataset
    examples, held_out = split(job, examples)
    buckets, held_buckets = place(job, examples), place(job, held_out)
    for width, height, *_ in buckets | held_buckets:
        family.check_bucket(width, height)
    placed = [one for members in buckets.values() for one in members]
    held_placed = [one for members in held_buckets.values() for one in members]
    store = Cache(Path(section.cache_dir), family, section, DTYPES[job.model.dtype])
    captions = dataset_captions([*examples, *held_out], section, job.seed)
    guided_away = family.negative_text(job.preview.negative)
    for line in [*images.outside_masks([*placed, *held_placed]), *family.caption_caveats(captions)]:
        run.log_event("warning", text=line)
    drawn, away = preview_prompts(job, store)
    # Every process encodes its share; entries are whole or absent, so that one made twice does no harm.
    texts = list(dict.fromkeys([*store.prompts([*placed, *held_placed], job.seed), *drawn, *away]))
    mine = processes.share([*placed, *held_placed]), processes.share(texts)
    needs = processes.gather(writes.of_cache(store, store.missing(*mine), min(buckets)))
    if processes.is_main:
        for line in disk.require([*written, *needs]):
            run.log_event("warning", text=line)
    report = store.fill(*mine, log=_every_two_seconds(run))
    told = processes.gather(report)
    run.log_event("cache", **{key: sum(getattr(one, key) for one in told) for key in ("encoded", "reused", "bytes")})
    truncated = list(dict.fromkeys(one for each in told for one in each.truncated))
    for line in truncation_warnings(truncated, len({text_of(text) for text in texts})):
        run.log_event("warning", text=line)

    loader = Loader(buckets, store, family, section, seed=job.seed, batch_size=job.train.batch_size)
    run.log_event(
        "data",
        images=len(examples),
        held_out=len(held_out),
        masked=sum(one.mask is not None for one in examples),
        samples_per_epoch=loader.samples_per_epoch,
        steps_per_epoch=loader.batches_per_epoch / job.train.accumulate,
        buckets={bucketing.named(bucket): len(members) for bucket, members in buckets.items()},
    )
    fingerprint = json.dumps([_fingerprint(one, section.folders[one.example.folder_index].weight) for one in placed])
    controls = images.preview_controls(job.preview, section, family.controls)[0]
    shown = [preview_pictures(each, section.background) for each in controls] or [{}] * len(job.preview.prompts)
    negatives = [store.cond(prompt) for prompt in away]
    if not job.preview.negative:
        negatives = [one for one in map(family.without_negative, negatives) if one is not None]
    plain = plain_captions(section).model_copy(update={"flip": False})
    return Data(
        loader=loader,
        examples=examples,
        buckets=buckets,
        held_out=Loader(held_buckets, store, family, plain, seed=job.seed, batch_size=1) if held_out else None,
        heaviest=max(range(loader.batches_per_epoch), key=lambda i: _pixels(store, loader.batch_at(i))),
        preview_conds=[store.cond(prompt) | each for prompt, each in zip(drawn, shown, strict=True)],
        preview_negatives=negatives or None,
        preview_texts=(job.preview.prompts, guided_away),
        fingerprint=hashlib.sha256(fingerprint.encode()).hexdigest(),
    )


def look_at_disks(job: Job, family: ModelFamily, examples: list[images.Example]) -> list[str]:
    """Whether what this job will write has room, asked before it starts; lines to warn with. The job is resolved.

    Raises:
        UserErrors: a disk has too little.
    """
    examples, held_out = split(job, examples)
    buckets = place(job, examples)
    placed = [one for found in (buckets, place(job, held_out)) for members in found.values() for one in members]
    store = Cache(Path(job.dataset.cache_dir), family, job.dataset, DTYPES[job.model.dtype])
    drawn, away = preview_prompts(job, store)
    missing = store.missing(placed, list(dict.fromkeys([*store.prompts(placed, job.seed), *drawn, *away])))
    written = writes.of_run(job, writes.trained(job, family), run_folder(job))
    return disk.require([*written, writes.of_cache(store, missing, min(buckets))])


def preview_prompts(job: Job, store: Cache) -> tuple[list[str | Prompt], list[str | Prompt]]:
    """What the previews are drawn from, and what each is guided away from."""
    prompts, guided_away = job.preview.prompts, store.family.negative_text(job.preview.negative)
    controls = images.preview_controls(job.preview, job.dataset, store.family.controls)[0]
    shown = [whole(each) for each in controls] or [()] * len(prompts)
    drawn = [store.prompt(prompt, each) for prompt, each in zip(prompts, shown, strict=True)]
    return drawn, [store.prompt(guided_away, each) for each in shown]


def plan(job: Job, family: ModelFamily) -> precision.Plan:
    """How each layer of this job's base will be held and multiplied; reads the model's config and no weights.

    Raises:
        UserErrors: [quantize] asks for what this model cannot have.
    """
    return precision.decide(
        family.empty_denoiser(), job.quantize, family.keep_precise, DTYPES[job.model.dtype], family.modulation
    )


def base(family: ModelFamily, section: config.Quantize, offload: float = 0.0) -> tuple[nn.Module, precision.Plan, int]:
    """The denoiser in the storage that the section asks for, on the family's device, how each layer is held, and how
    many of its bytes wait in main memory."""
    denoiser = family.empty_denoiser()
    plan = precision.quantize_(denoiser, section, family.keep_precise, family.dtype, family.modulation)
    waiting = precision.offload_(denoiser, offload)
    precision.fill_(denoiser, family.denoiser_tensors(), dtype=family.dtype, device=family.device)
    precision.set_compute_(denoiser, plan, section)  # again: what it remembers needs the weights to be there
    return denoiser, plan, waiting


def with_moved(section: config.Quantize, moved: Sequence[str]) -> config.Quantize:
    """The section with the lines of `measure.moved_layers`, which come after the user's own."""
    return section.model_copy(update={"override": [*section.override, *moved]})


def load(job: Job, family: ModelFamily, run: Run, processes: Processes, moved: Sequence[str] = ()) -> Loaded:
    """The denoiser in its storage, the adapters beside it, and the optimizer that steps them.

    Args:
        moved: from `measure.moved_layers`.
    """
    run.log_event("stage", stage="load")
    denoiser, plan, waiting = base(family, with_moved(job.quantize, moved), job.memory.offload)
    names = family.adapter_names(denoiser, job.adapter.targets)
    injected = adapters.inject(denoiser, job.adapter.model_copy(update={"targets": []}), names, seed=job.seed)
    applied = memory.apply_(denoiser, job.memory)
    denoiser.train()
    encoders = TextEncoders(family, job.adapter, job.seed) if job.adapter.text_encoder else None
    if encoders is not None:
        if job.memory.gradient_checkpointing:
            encoders.checkpoint_()
        encoders.train()

    objective = family.objective(family.scheduler_config(), job.objective)
    named = adapters.parameters(denoiser if encoders is None else Adapted(denoiser, encoders.encoders))
    optimizer = optim.build(
        named,
        job.optimizer,
        base_storage=job.quantize.storage,
        seed=job.seed,
        of_text=[name for name, _ in named if text_encoder_of(name, family)],
    )
    unused = [
        *family.warnings,
        *objective.unused_settings(),
        *family.unused_settings(job.objective),
        *_unused_settings(job, family),
        *optim.cautions(job.optimizer),
        *optim.lr_factors(job.optimizer, injected.names)[1],
        *exchange.unused_settings(job.train, processes.world),
    ]
    reports = [injected, *(encoders.injected if encoders else [])]
    for line in [*plan.warnings, *(told for report in reports for told in report.warnings), *unused]:
        run.log_event("warning", text=line)
    run.log_event(
        "model",
        base=family.title,
        base_sha256=family.base_identity(),
        storage=plan.summary(),
        adapters=sum(report.num_modules for report in reports),
        trainable=sum(report.num_parameters for report in reports),
        memory=[*applied.lines(), *_waiting_lines(waiting), *(encoders.lines() if encoders else [])],
        lr=optim.lr(job.optimizer),
        lr_factor=optimizer.lr_factor,
        lr_effective=optimizer.base_lr,
        **({"lr_text_encoder": optimizer.base_lr * optimizer.text_ratio} if encoders else {}),
    )
    exchanged = exchange.build(job.train.gradient_exchange, named, processes)
    amax = precision.amax_history(denoiser)
    return Loaded(denoiser, objective, optimizer, plan, amax, exchanged, list(moved), encoders)


def _waiting_lines(waiting: int) -> list[str]:
    return [f"{waiting / 2**30:.2f} GiB of the frozen weights wait in main memory"] if waiting else []


def preview_conditioning(data: Data, loaded: Loaded) -> tuple[list[Cond], list[Cond] | None]:
    """What previews are drawn from: prompts, and what to guide away from, as trained text encoders read them now."""
    if loaded.text is None:
        return data.preview_conds, data.preview_negatives
    prompts, guided_away = data.preview_texts
    negatives = data.preview_negatives
    if negatives is not None:
        negatives = loaded.text.answers([guided_away] * len(negatives), negatives)
    return loaded.text.answers(prompts, data.preview_conds), negatives


def _unused_settings(job: Job, family: ModelFamily) -> list[str]:
    """Settings that were given and have no effect in this job."""
    found = []
    if job.optimizer.rounding == "stochastic" and job.adapter.dtype == "fp32":
        found.append("optimizer.rounding = 'stochastic' has no effect: adapter.dtype is fp32, nothing is rounded")
    if job.optimizer.text_encoder_lr != "auto" and not job.adapter.text_encoder:
        found.append("optimizer.text_encoder_lr has no effect: adapter.text_encoder is false")
    usual, name = config.Optimizer(), job.optimizer.name
    idle = ["eps"] if name == "lion8bit" else []
    of_prodigy = ["d0", "d_coef", "growth_rate", "safeguard_warmup", "use_bias_correction", "decouple"]
    idle += of_prodigy if name != "prodigy" else []
    given = [key for key in idle if getattr(job.optimizer, key) != getattr(usual, key)]
    found += [f"optimizer.{key} has no effect: optimizer.name is {name!r}" for key in given]
    if job.adapter.type != "lokr":
        given = [key for key, usual in (("factor", 8), ("decompose_both", False)) if getattr(job.adapter, key) != usual]
        found += [f"adapter.{key} has no effect: adapter.type is {job.adapter.type!r}, not 'lokr'" for key in given]
    if not job.dataset.shuffle_tags and not job.dataset.tag_dropout and job.dataset.keep_tokens != 1:
        found.append("dataset.keep_tokens has no effect: tags are neither shuffled nor left out")
    if not job.dataset.varies_captions and job.dataset.caption_variants != 8:
        found.append("dataset.caption_variants has no effect: shuffle_tags, tag_dropout and wildcards are off")
    if job.dataset.buckets is False and job.dataset.max_aspect != 2.0:
        found.append("dataset.max_aspect has no effect: dataset.buckets is false")
    if job.schedule.name != "cosine_with_restarts" and job.schedule.cycles != 3:
        found.append(f"schedule.cycles has no effect: schedule.name is {job.schedule.name!r}, which has no restarts")
    if job.schedule.name == "constant" and job.schedule.min_lr:
        found.append("schedule.min_lr has no effect: schedule.name is 'constant'")
    if job.preview.negative and not job.preview.prompts:
        found.append("preview.negative has no effect: preview.prompts is empty")
    elif job.preview.negative and not family.uses_negative:
        found.append(f"preview.negative has no effect: {family.title} draws without a negative prompt")
    if not job.dataset.frames:
        given = [key for key, usual in (("fps", "auto"), ("clip", "head")) if getattr(job.dataset, key) != usual]
        found += [f"dataset.{key} has no effect: dataset.frames is empty, no clip is trained on" for key in given]
    if job.dataset.control_resolution != "auto" and not any(folder.control for folder in job.dataset.folders):
        found.append("dataset.control_resolution has no effect: no folder has control pictures")
    found += _unused_huber(job.objective)
    masked, weight = any(folder.mask for folder in job.dataset.folders), job.objective.unmasked_weight
    if not masked and weight != config.Objective().unmasked_weight:
        found.append("objective.unmasked_weight has no effect: no folder has masks")
    if masked and weight == 1:
        found.append("dataset.folders.mask has no effect: objective.unmasked_weight is 1")
    if not job.preview.prompts and job.preview.every:
        found.append("preview.every has no effect: preview.prompts is empty")
    return found


def _unused_huber(section: config.Objective) -> list[str]:
    usual, names = config.Objective(), ("huber_delta", "huber_schedule", "huber_scale")
    given = [key for key in names if getattr(section, key) != getattr(usual, key)]
    if section.loss == "mse":
        return [f"objective.{key} has no effect: objective.loss is 'mse'" for key in given]
    if "huber_scale" in given and section.huber_schedule != "exponential":
        return [f"objective.huber_scale has no effect: objective.huber_schedule is {section.huber_schedule!r}"]
    return []


def _every_two_seconds(run: Run) -> Callable[[int, int], None]:
    last = time.monotonic()

    def tell(done: int, total: int) -> None:
        nonlocal last
        if run.requested("stop"):
            raise Stopped("stopped before the first step; what was cached stays cached")
        if time.monotonic() - last >= 2:
            last = time.monotonic()
            run.log_event("progress", stage="cache", done=done, total=total)

    return tell


def _fingerprint(one: bucketing.Placed, weight: float) -> list[Any]:
    example = one.example
    controls = [control.sha256 for control in example.controls]
    facts = [one.uid, example.image_sha256, example.caption, example.repeats, one.placement.bucket_wh]
    facts += [controls] if controls else []
    facts += [example.frames] if example.frames else []
    facts += [f"mask {example.mask.sha256} {example.mask.alpha}"] if example.mask else []
    return [*facts, f"weight {weight:g}"] if weight != 1 else facts


def _pixels(store: Cache, items: list[Item]) -> int:
    first = items[0].placed
    controls = sum(math.prod(shown.size) for shown in store.shown(first))
    return len(items) * (volume(store.family, first.bucket) + controls)
