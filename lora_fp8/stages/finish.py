"""The last stage of a job: the LoRA files, and the proof that each does what the training model does."""

import gc
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .. import adapters, config, precision, settings, verify
from ..adapters import kinds
from ..common.writing import atomic_write
from ..data import images
from ..data.buckets import Bucket, Placed
from ..errors import RunFailure, UserError
from ..families.base import ModelFamily
from ..lora_files import export
from ..objectives import PREDICTION_TYPES
from ..plan.placement import may_be_held_out, place, scan, split
from ..plan.resolve import carried, make_family, resolve_auto
from ..run import Run, ownership
from ..settings import Job
from ..training import checkpoint, memory, optim
from ..training.text_encoders import answers
from . import previews
from .cache import Data
from .load import Loaded, preview_conditioning
from .session import Session

ROOM_OF_PLAIN = 1.25
"""What the unquantized model needs to answer, as a multiple of its weights: activations, and the VAE."""


@dataclass
class Result:
    """What a finished run hands back."""

    run: Run
    files: list[Path]
    reports: list[verify.Report]


def finish(session: Session, data: Data, loaded: Loaded, step: int) -> Result:
    """Draw the last previews, by all processes; then let the main one write the files and verify them."""
    job, run, processes = session.job, session.run, session.processes
    run.log_event("stage", stage="export")
    # From here on the model answers as a program without FP8 matmuls makes it answer: that is what the file is for.
    precision.set_compute_(loaded.denoiser, loaded.layers.with_compute("upcast"), job.quantize)
    drawn: list[Image.Image] = []
    with processes.together():
        if job.preview.prompts:
            conds, negatives = preview_conditioning(data, loaded)
            drawn = previews.draw(session, loaded.denoiser, conds, negatives, step)
    processes.leave()
    if not processes.is_main:
        return Result(run, [], [])
    if drawn and (before := _drawn_at_the_start(job.preview.prompts, run)):
        first = "start" if job.adapter.init_from else "base"
        rows = {first: before, f"LoRA, step {step}": drawn}
        previews.write_png(previews.contact_sheet(rows, job.preview.prompts), run.samples / "contact_sheet.png")

    state = adapters.state(loaded.adapted)
    files = write_files(session, state, step, run.export)
    reports = verify_files(session, data, loaded, state, drawn, files) if job.export.verify else []
    run.log_event("done", step=step, files=[str(path.relative_to(run.path)) for path in files])
    return Result(run, files, reports)


def export_folder(run: Run, step: int) -> Path:
    """Where the LoRA files of a step go that is not the last one."""
    return run.export / f"step-{step:06d}"


def write_files(session: Session, state: dict[str, Tensor], step: int, folder: Path) -> list[Path]:
    """Write the LoRA files of an adapter's state at this step, and log them."""
    job, family, run, placed = session.job, session.family, session.run, session.plan.images
    facts = _facts(job, family, placed.examples, placed.buckets, step)
    files = export.write(state, _scaling(job, state), family, family.denoiser_config(), job.export, facts, folder)
    for path in files:
        run.log_event("export", path=str(path.relative_to(run.path)), bytes=path.stat().st_size)
    return files


def _drawn_at_the_start(prompts: list[str], run: Run) -> list[Image.Image]:
    """The previews of step 0, if they are of the same prompts: a resumed run may have been given others."""
    first = [event for event in run.events() if event["event"] == "preview" and event.get("step") == 0]
    if not first or first[-1].get("prompts") != prompts:
        return []
    paths = [previews.path_of(run.samples, 0, number) for number in range(len(prompts))]
    try:
        return [previews.read(path) for path in paths] if all(path.exists() for path in paths) else []
    except OSError as error:  # all is trained; the sheet alone is without them
        run.log_event("warning", text=f"a preview of step 0 cannot be read, and there is no contact sheet: {error}")
        return []


def verify_files(
    session: Session,
    data: Data,
    loaded: Loaded,
    state: dict[str, Tensor],
    drawn: list[Image.Image],
    files: list[Path],
) -> list[verify.Report]:
    """Load each file into a clean pipeline and compare it with the training model, which leaves the memory first.

    Args:
        drawn: the last previews.

    Raises:
        RunFailure: a file does not do what training did. The files and the report stay, to look at.
    """
    job, family, run = session.job, session.family, session.run
    run.log_event("stage", stage="verify")
    batch = data.loader.micro(0, data.heaviest)
    probe = verify.make_probe(
        family, loaded.denoiser, loaded.objective, batch, job.objective.guidance, text=loaded.text
    )
    verify.save_probe(probe, run.path / "probe.safetensors")
    decoded = None
    if layers := {f"{layer.name}.weight": layer for layer in loaded.layers.quantized}:
        decoded = partial(_as_trained, family, layers, job.quantize)
    # Two copies of a large model would not fit beside each other.
    loaded.denoiser = loaded.optimizer = loaded.exchange = loaded.text = None
    gc.collect()
    device = _place_of_plain(family.device, loaded.layers.plain_num_bytes, run)
    redrawn = None
    if drawn and device == family.device:
        redrawn = verify.Previews(drawn, partial(_redraw, job, family, data))
    reports = []
    for path in files:
        asked = {"probe": probe, "previews": redrawn, "base": decoded, "device": device}
        # What merging would leave is the same of every file: they hold one adapter.
        asked["merged"] = path == files[0]
        report = verify.check(path, family, state=state, scaling=_scaling(job, state), **asked)
        run.log_event("verify", file=path.name, ok=report.ok, lines=report.lines())
        reports.append(report)
    written = {report.file: report.to_json() for report in reports}
    atomic_write(run.verify_file, (json.dumps(written, indent=1) + "\n").encode())
    if failed := [f"{report.file}: {line}" for report in reports for line in report.failed()]:
        raise RunFailure("the exported file does not do what training did: " + "; ".join(failed))
    return reports


def _place_of_plain(device: torch.device, num_bytes: int, run: Run) -> torch.device:
    """Where the model is compared whose weights take so many bytes unquantized: the CPU, if the GPU has no room."""
    free = memory.free_bytes(device)
    if free is None or ROOM_OF_PLAIN * num_bytes <= free:
        return device
    run.log_event(
        "warning",
        text=f"unquantized, the model takes {num_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free on "
        f"{device}: the files are compared on the CPU, which takes longer, and previews are not",
    )
    return torch.device("cpu")


def _redraw(job: Job, family: ModelFamily, data: Data, pipeline: Any) -> list[Image.Image]:
    """The previews by another pipeline, whose own text encoders read the prompts where they are trained."""
    conds, negatives = data.preview_conds, data.preview_negatives
    if job.adapter.text_encoder:
        prompts, guided_away = data.preview_texts
        conds = answers(family, pipeline, prompts, conds)
        if negatives is not None:
            negatives = answers(family, pipeline, [guided_away] * len(negatives), negatives)
    return previews.render(family, pipeline, conds, negatives, job.preview, job.dataset.resolution)


def export_run(folder: Path, overrides: list[str], step: int = 0) -> list[Path]:
    """Write the LoRA files of a run's checkpoint again, under the run's config with `overrides` (such as export.dtype).

    Args:
        step: which checkpoint; 0 is the newest. Another step's files go into a folder of their own.

    Raises:
        UserError: no such run or checkpoint.
        RunFailure: no checkpoint is whole, or the disk refused.
    """
    run, job, found = _checkpointed(folder, overrides, step)
    ownership.require_ours(run.path)
    return export_adapter(run, job, found.adapter, found.step, export_folder(run, step) if step else run.export)


def export_adapter(run: Run, job: Job, adapter: dict[str, Tensor], step: int, target: Path) -> list[Path]:
    """Write LoRA files of a run's adapter into `target`, with what is to be said of the run at this step.

    Args:
        adapter: internal naming, at the job's alpha / rank.

    Raises:
        RunFailure: the disk refused, or the adapter is broken.
    """
    job, family, facts = _described(job, step)
    try:
        return export.write(
            adapter, _scaling(job, adapter), family, family.denoiser_config(), job.export, facts, target
        )
    except OSError as error:
        raise RunFailure(f"{error.filename or target}: {error.strerror or error}; nothing was replaced") from error


def preview_metadata(folder: Path, overrides: list[str], step: int = 0) -> dict[str, dict[str, str]]:
    """{layout: metadata} that `export_run` would write, without the hashes of bytes that are not there yet.

    Raises:
        UserError: no such run or checkpoint.
    """
    run, job, found = _checkpointed(folder, overrides, step)
    job, family, facts = _described(job, found.step)
    return {layout: export.metadata(family, job.export, facts, layout) for layout in job.export.formats}


def _checkpointed(folder: Path, overrides: list[str], step: int) -> tuple[Run, Job, checkpoint.Checkpoint]:
    """A run, its job and the checkpoint of a step; 0 is the newest."""
    run = Run.open(folder)
    job = config.load(run.config_file, overrides)
    found = checkpoint.read(run.checkpoints / f"step-{step:06d}") if step else checkpoint.latest(run.checkpoints)[0]
    if found is None:
        raise UserError(f"{folder}: there is no checkpoint to export yet")
    return run, job, found


def _described(job: Job, step: int) -> tuple[Job, ModelFamily, export.ExportFacts]:
    """The job without "auto", its family, and what is to be said of the run at a step."""
    family = make_family(job)
    job = carried(resolve_auto(job, type(family)), family)
    scanned = scan(job, type(family))
    if scanned.problems:
        # The pictures are needed for what the metadata tell of them, and that is no reason to withhold the file.
        print(
            f"warning: {len(scanned.problems)} problem(s) with the pictures ({scanned.problems[0]}); "
            "what the file tells of the training data is incomplete",
            file=sys.stderr,
        )
    examples = scanned.examples
    if len(may_be_held_out(job, examples)) > job.validation.pictures:
        examples, _ = split(job, examples)  # else some have gone, and nothing can be said of which were kept out
    return job, family, _facts(job, family, examples, place(job, examples), step)


def _as_trained(
    family: ModelFamily, layers: dict[str, precision.LayerPlan], section: settings.Quantize
) -> Iterator[tuple[str, Tensor]]:
    """The base as training saw it: the model's own files, with the quantized weights as their bytes read."""
    for name, tensor in family.denoiser_tensors():
        if layer := layers.get(name):
            tensor = precision.as_held(tensor.to(family.device), layer, section, family.dtype)
        yield name, precision.plain(tensor)


def _scaling(job: Job, state: dict[str, Tensor]) -> dict[str, float]:
    return kinds.scalings(state, job.adapter.alpha, job.adapter.rank)


def _kind_settings(section: settings.Adapter) -> dict[str, str]:
    """What LyCORIS' own files say of its kinds; {} for LoRA and DoRA."""
    if section.type not in ("lokr", "loha"):
        return {}
    told = {"algo": section.type}
    if section.type == "lokr":
        told |= {"factor": str(section.factor or -1), "decompose_both": str(section.decompose_both)}
    return told


def _facts(
    job: Job, family: ModelFamily, examples: list[images.Example], buckets: dict[Bucket, list[Placed]], step: int
) -> export.ExportFacts:
    """What the file's metadata may tell of this run."""
    folders = []
    for i, folder in enumerate(job.dataset.folders):
        captions = [example.caption for example in examples if example.folder_index == i]
        counted = export.FolderFacts.count(folder.path, captions, folder.repeats, job.dataset.tag_separator)
        # Tags of pictures without the subject are none to prompt the LoRA with.
        folders.append(replace(counted, tags={}) if folder.regularization else counted)
    sizes: Counter[tuple[int, int]] = Counter()  # programs that read them know no lengths
    for (width, height, *_), members in buckets.items():
        sizes[width, height] += len(members)
    factor = optim.lr_factor(job.optimizer, job.quantize.storage)
    return export.ExportFacts(
        name=job.name,
        steps=step,
        rank=job.adapter.rank,
        alpha=job.adapter.alpha,
        kind=job.adapter.type,
        kind_settings=_kind_settings(job.adapter),
        learning_rate=optim.lr(job.optimizer) * factor,
        learning_rate_factor=factor,
        text_encoder_lr=optim.text_encoder_lr(job.optimizer) if job.adapter.text_encoder else None,
        seed=job.seed,
        resolution=(job.dataset.resolution, job.dataset.resolution),
        folders=tuple(folders),
        batch_size=job.train.batch_size * job.train.accumulate,
        optimizer=job.optimizer.name,
        schedule=job.schedule.name,
        warmup_steps=optim.warmup_steps(job.schedule, job.train.steps),
        storage=job.quantize.storage,
        mixed_precision="bf16" if job.model.dtype == "bf16" else "no",
        base_name=job.model.path,
        base_hash=family.base_identity(),
        prediction_type=PREDICTION_TYPES.get(family.predicts()),
        trigger=job.dataset.trigger,
        dropout=job.adapter.dropout,
        min_snr_gamma=job.objective.min_snr_gamma,
        noise_offset=job.objective.noise_offset,
        max_grad_norm=job.train.max_grad_norm,
        caption_dropout=job.dataset.caption_dropout,
        buckets=sizes,
        config_toml=config.dumps(job),
    )
