"""The last stage of a job: write the LoRA files, and verify that each does what the training model does."""

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .. import adapters, config, precision, settings, verify
from ..adapters import kinds
from ..common.json_files import write_json
from ..common.messages import add_translations, get_language, translate
from ..data.buckets import Bucket, Placed
from ..data.caption_variants import unify_separators
from ..data.examples import Example
from ..errors import Joined, Message, Plural, RunFailure, UserError, reason
from ..families.base import ModelFamily
from ..lora_files import export, export_metadata
from ..lora_files.layer_names import LAYOUTS
from ..objectives import PREDICTION_TYPES
from ..plan.placement import find_holdout_candidates, place, split
from ..plan.resolve import choose_layouts, get_resolution, make_family, resolve_auto
from ..plan.scan import scan
from ..run import Run, ownership
from ..settings import Job, schedules
from ..training import checkpoint, memory, optim
from ..training.text_encoders import encode_each
from ..training.verdict import find_best_lora, judge
from . import held_out, previews
from .cache import Data
from .load import Loaded, encode_preview_prompts
from .progress import StageProgress
from .resume import State
from .session import Session

BEST_SUFFIX = "-best"
PLAIN_MEMORY_FACTOR = 1.25
"""Memory of a forward pass of the unquantized model, as a multiple of its weights; for activations and the VAE."""


@dataclass
class Result:
    """The result of a finished run."""

    run: Run
    files: list[Path]
    reports: list[verify.Report]


@dataclass(frozen=True)
class Written:
    """A LoRA that was written: the adapter of a step and its files, one per layout."""

    step: int
    state: dict[str, Tensor]
    files: list[Path]


def finish(session: Session, data: Data, loaded: Loaded, state: State) -> Result:
    """Draw the last previews with all processes; then the main one writes the files and verifies them."""
    job, run, processes, step = session.job, session.run, session.processes, state.step
    run.log_event("stage", stage="export")
    loaded.free_recordings()
    loaded.optimizer.evaluate_()
    # The LoRA file is used in programs without FP8 matmuls, so from here on the model computes without them too.
    precision.set_compute_(loaded.denoiser, loaded.layers.with_compute("upcast"), job.quantize)
    drawn: list[Image.Image] = []
    probes: list[verify.Probe] | None = None
    with processes.together():
        if data.preview.prompts:
            prompts = encode_preview_prompts(data, loaded)
            drawn = previews.draw(session, loaded.denoiser, data.preview, prompts, step)
            data.scores.score(session, drawn, prompts.texts, step)
        best = _read_best(session, state) if processes.is_main or processes.lockstep else None
        if processes.lockstep and not all(processes.gather(best is not None)):
            best = None
        adapter = adapters.copy_state(loaded.adapted)
        if processes.lockstep and job.export.verify:  # while the processes that have the rest of the base are here
            with processes.passing():
                probes = _make_probes(session, data, loaded, [adapter, *([] if best is None else [best[1]])])
    processes.leave()
    if not processes.is_main:
        return Result(run, [], [])
    if drawn and (before := _read_first_previews(data.preview.prompts, run)):
        first = "start" if job.adapter.init_from else "base"
        rows: dict[str, Sequence[Image.Image]] = {first: before, f"LoRA, step {step}": drawn}
        previews.write_png(previews.draw_contact_sheet(rows, data.preview.prompts), run.samples / "contact_sheet.png")

    written = [Written(step, adapter, write_files(session, adapter, step, run.export))]
    written += _write_best(session, state, best)
    reports = verify_files(session, data, loaded, drawn, written, probes) if job.export.verify else []
    _log_verdict(session, state, written)
    files = [path for lora in written for path in lora.files]
    run.log_event("done", step=step, files=[str(path.relative_to(run.path)) for path in files])
    return Result(run, files, reports)


def _read_best(session: Session, state: State) -> tuple[int, dict[str, Tensor]] | None:
    """Read the LoRA of the step with the lowest held-out loss. Returns its step and tensors.

    None if that is the last step, none is kept, or it cannot be read, which is a warning.
    """
    kept = find_best_lora(state.series) if session.job.validation.keep_best else None
    if kept is None or kept.step == state.step:
        return None
    try:
        return kept.step, checkpoint.read(checkpoint.get_best_path(session.run.checkpoints, kept.step)).adapter
    except (UserError, RunFailure) as error:  # the last step's files do not depend on it
        session.warn(Message("the LoRA of the best step was not written: {line}", line=error))
        return None


def _write_best(session: Session, state: State, best: tuple[int, dict[str, Tensor]] | None) -> list[Written]:
    """Write the LoRA files of the step with the lowest held-out loss, from `_read_best`."""
    job, run = session.job, session.run
    kept = find_best_lora(state.series) if job.validation.keep_best else None
    if kept is None:
        return []
    held_out.prune(session, state.series)
    if kept.step == state.step:
        for layout in LAYOUTS:  # of an earlier end of this run, after fewer steps
            (run.export / f"{export_metadata.make_slug(job.name)}{BEST_SUFFIX}_{layout}.safetensors").unlink(
                missing_ok=True
            )
        return []
    if best is None:
        return []
    step, adapter = best
    return [Written(step, adapter, write_files(session, adapter, step, run.export, BEST_SUFFIX))]


def _make_probes(
    session: Session, data: Data, loaded: Loaded, states: Sequence[dict[str, Tensor]]
) -> list[verify.Probe]:
    """Record the training model's prediction with each of these adapters, the first of which it has now."""
    job, family = session.job, session.family
    probes = []
    for number, adapter in enumerate(states):
        if number:
            adapters.load_state_(loaded.adapted, adapter)
        batch = data.loader.take_batch(0, data.heaviest)
        probes.append(
            verify.make_probe(
                family, loaded.denoiser, loaded.objective, batch, job.objective.guidance, text=loaded.text
            )
        )
    return probes


def _log_verdict(session: Session, state: State, written: list[Written]) -> None:
    """Log what the held-out losses say at the end, with the files of the best step."""
    if len(state.series) < 2:
        return
    verdict = judge(state.series)
    # The best one may be the base model.
    files = next((lora.files for lora in written if lora.step == verdict.best), [])
    text = held_out.describe(verdict, files)
    session.run.log_event("verdict", step=state.step, **vars(verdict), text=text)


def get_export_folder(run: Run, step: int) -> Path:
    """Return the folder for the LoRA files of a step before the last one."""
    return run.export / f"step-{step:06d}"


def write_files(session: Session, state: dict[str, Tensor], step: int, folder: Path, suffix: str = "") -> list[Path]:
    """Write the LoRA files of an adapter's state at this step, and log them. `suffix` ends the files' names."""
    job, family, run, placed = session.job, session.family, session.run, session.plan.images
    facts = replace(_make_facts(job, family, placed.examples, placed.buckets, step), suffix=suffix)
    adapter = export.Adapter(state, _compute_scaling(job, state))
    files = export.write(adapter, family, family.read_denoiser_config(), job.export, facts, folder)
    for path in files:
        run.log_event("export", path=str(path.relative_to(run.path)), bytes=path.stat().st_size)
    return files


def _read_first_previews(prompts: list[str], run: Run) -> list[Image.Image]:
    """Read the previews of step 0 if they show the same prompts; a resumed run may have others. [] if not."""
    first = [event for event in run.read_events() if event["event"] == "preview" and event.get("step") == 0]
    if not first or first[-1].get("prompts") != prompts:
        return []
    paths = [previews.get_path(run.samples, 0, number) for number in range(len(prompts))]
    try:
        return [previews.read(path) for path in paths] if all(path.exists() for path in paths) else []
    except OSError as error:  # training is done: only the contact sheet is left out
        run.log_event(
            "warning",
            text=Message("a preview of step 0 cannot be read, and there is no contact sheet: {why}", why=error),
        )
        return []


def verify_files(
    session: Session,
    data: Data,
    loaded: Loaded,
    drawn: list[Image.Image],
    written: list[Written],
    probes: list[verify.Probe] | None = None,
) -> list[verify.Report]:
    """Load each file into a clean pipeline and compare it with the training model, which is freed first.

    Args:
        session: of the run.
        data: from the cache stage.
        loaded: from the load stage; its training model is freed.
        drawn: the last previews.
        written: the LoRAs, first that of the last step, which the training model has.
        probes: the training model's predictions with them, if processes that have left were needed for them.

    Raises:
        RunFailure: a file does not do what training did. The files and the report stay for inspection.
    """
    job, family, run = session.job, session.family, session.run
    run.log_event("stage", stage="verify")
    probes = probes or _make_probes(session, data, loaded, [lora.state for lora in written])
    verify.save_probe(probes[0], run.path / "probe.safetensors")
    base_tensors = None
    if layers := {f"{layer.name}.weight": layer for layer in loaded.layers.quantized}:
        base_tensors = partial(_iterate_base, family, layers, job.quantize)
    # Two copies of a large model would not fit beside each other.
    loaded.denoiser = loaded.optimizer = loaded.exchange = None  # type: ignore[assignment]  # not read again
    loaded.text = None
    gc.collect()
    device = _choose_device(family.device, loaded.layers.plain_num_bytes, run)
    redrawn = None
    if drawn and device == family.device:
        redrawn = verify.Previews(drawn, partial(_redraw, session, data))
    num_files = sum(len(lora.files) for lora in written)
    progress = StageProgress(run, "verify", seconds=0)
    reports: list[verify.Report] = []
    for lora, probe in zip(written, probes, strict=True):
        reference = verify.Reference(
            export.Adapter(lora.state, _compute_scaling(job, lora.state)),
            probe,
            redrawn if lora is written[0] else None,
            base_tensors,
            on_check=lambda check: progress.update(len(reports), num_files, check=check.name),
        )
        for path in lora.files:
            # All files of a step hold the same adapter, so the effect of merging is measured once.
            report = verify.check(path, family, reference, device=device, merged=path == lora.files[0])
            run.log_event("verify", file=path.name, ok=report.ok, lines=report.format_lines())
            reports.append(report)
    content = {report.file: add_translations(report.to_json()) for report in reports}
    write_json(run.verify_file, content)
    failures = [
        Message("{path}: {line}", path=report.file, line=line) for report in reports for line in report.list_failures()
    ]
    if failures:
        raise RunFailure(
            Message("the exported file does not match the training result: {lines}", lines=Joined("; ", failures))
        )
    return reports


def _choose_device(device: torch.device, num_bytes: int, run: Run) -> torch.device:
    """Choose the device for an unquantized model of this size: the CPU if the GPU has too little memory."""
    free = memory.count_free_bytes(device)
    if free is None or PLAIN_MEMORY_FACTOR * num_bytes <= free:
        return device
    run.log_event(
        "warning",
        text=Message(
            "the unquantized model takes {size} GiB, but {free} GiB are free on {device}: the files are compared on "
            "the CPU, which takes longer, and previews are not compared",
            size=f"{num_bytes / 2**30:.1f}",
            free=f"{free / 2**30:.1f}",
            device=device,
        ),
    )
    return torch.device("cpu")


def _redraw(session: Session, data: Data, pipeline: Any) -> list[Image.Image]:
    """Draw the previews with another pipeline; if text encoders are trained, its own ones encode the prompts."""
    job, family, prompts = session.job, session.family, data.previews
    pipeline.vae.decodes_in_tiles = session.tiles_previews
    if job.adapter.text_encoder:
        prompts = prompts.encode(partial(encode_each, family, pipeline))
    return previews.render(family, pipeline, prompts, get_resolution(job))


def export_run(folder: Path, overrides: list[str], step: int = 0, best: bool = False) -> list[Path]:
    """Write the LoRA files of a run's checkpoint again, under the run's config with `overrides` (such as export.dtype).

    Args:
        folder: the run folder.
        overrides: as for `--set`.
        step: step of the checkpoint; 0 is the newest. Files of a given step go into a folder of their own.
        best: take the step with the lowest held-out loss instead. Its files go beside those of the newest.

    Returns:
        The paths of the files.

    Raises:
        UserError: there is no such run or checkpoint.
        RunFailure: no checkpoint is complete, or a file could not be written.
    """
    run, job, saved = _open_checkpoint(folder, overrides, step, best)
    ownership.require_ours(run.path)
    target = get_export_folder(run, step) if step else run.export
    return export_adapter(job, saved.adapter, saved.step, target, BEST_SUFFIX if best else "")


def export_adapter(job: Job, adapter: dict[str, Tensor], step: int, target: Path, suffix: str = "") -> list[Path]:
    """Write the LoRA files of an adapter, with metadata about the run at this step.

    Args:
        job: the job of the run.
        adapter: tensors under internal names, at the job's scaling.
        step: step to name in the metadata.
        target: folder of the files.
        suffix: end of the files' names.

    Returns:
        The paths of the files.

    Raises:
        RunFailure: a file could not be written, or the adapter is broken.
    """
    job, family, facts = _resolve_run(job, step)
    try:
        trained = export.Adapter(adapter, _compute_scaling(job, adapter))
        facts = replace(facts, suffix=suffix)
        return export.write(trained, family, family.read_denoiser_config(), job.export, facts, target)
    except OSError as error:
        raise RunFailure(
            Message("{path}: {why}; nothing was replaced", path=error.filename or target, why=reason(error))
        ) from error


def compute_metadata(
    folder: Path, overrides: list[str], step: int = 0, best: bool = False
) -> dict[str, dict[str, str]]:
    """Compute the metadata that `export_run` would write, without the hashes of the files' bytes.

    Returns:
        Layout -> metadata.

    Raises:
        UserError: there is no such run or checkpoint.
    """
    _, job, saved = _open_checkpoint(folder, overrides, step, best)
    job, family, facts = _resolve_run(job, saved.step)
    facts = replace(facts, suffix=BEST_SUFFIX if best else "")
    return {layout: export_metadata.build_metadata(family, job.export, facts, layout) for layout in job.export.formats}


def _open_checkpoint(
    folder: Path, overrides: list[str], step: int, best: bool
) -> tuple[Run, Job, checkpoint.Checkpoint]:
    """Open a run. Returns it with its job and the checkpoint of a step; step 0 is the newest, unless `best` is set."""
    run = Run.open(folder)
    job = config.load(run.config_file, overrides)
    if best:
        path = held_out.choose_best(run)
        if path is None:
            raise UserError(
                Message(
                    "{path}: the run has no best LoRA. Train with validation.pictures, validation.every and "
                    "validation.keep_best",
                    path=folder,
                )
            )
        return run, job, checkpoint.read(path)
    saved = (
        checkpoint.read(checkpoint.find_path(run.checkpoints, step))
        if step
        else checkpoint.read_latest(run.checkpoints)[0]
    )
    if saved is None:
        raise UserError(Message("{path}: there is no checkpoint to export yet", path=folder))
    return run, job, saved


def _resolve_run(job: Job, step: int) -> tuple[Job, ModelFamily, export_metadata.ExportFacts]:
    """Resolve the job of a run. Returns it without "auto", its family, and the facts for the metadata at a step."""
    family = make_family(job)
    job = choose_layouts(resolve_auto(job, type(family)), family)
    report = scan(job)
    if report.problems:
        # The images are needed only for the metadata, so their problems do not prevent the export.
        line = Plural(
            "{count} problem with the images ({line}); the training data in the file's metadata is incomplete",
            "{count} problems with the images ({line}); the training data in the file's metadata is incomplete",
        )(
            count=len(report.problems),
            line=report.problems[0],
        )
        print(translate(get_language(), Message("warning: {line}", line=line)), file=sys.stderr)
    examples = report.examples
    if len(find_holdout_candidates(job, examples)) > job.validation.pictures:
        examples, _ = split(job, examples)  # with fewer images, the held-out ones are unknown
    return job, family, _make_facts(job, family, examples, place(job, examples), step)


def _iterate_base(
    family: ModelFamily, layers: dict[str, precision.LayerPlan], section: settings.Quantize
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the base model as training used it: the model's own files, with quantized weights dequantized."""
    for name, tensor in family.read_denoiser_tensors():
        if layer := layers.get(name):
            tensor = precision.as_held(tensor.to(family.device), layer, section, family.dtype)
        yield name, precision.to_plain(tensor)


def _compute_scaling(job: Job, state: dict[str, Tensor]) -> dict[str, float]:
    return kinds.compute_scalings(state, job.adapter)


def _make_kind_settings(section: settings.Adapter) -> dict[str, str]:
    """Make the network's arguments that sd-scripts and LyCORIS write into a file."""
    algorithm = export_metadata.LYCORIS.get(section.type)
    kind_settings: dict[str, str] = {"algo": algorithm} if algorithm else {}
    for name in ("rank_dropout", "module_dropout"):
        if getattr(section, name):
            kind_settings[name] = str(getattr(section, name))
    if section.type == "lokr":
        kind_settings |= {"factor": str(section.factor or -1), "decompose_both": str(section.decompose_both)}
    return kind_settings


def _make_facts(
    job: Job, family: ModelFamily, examples: list[Example], buckets: dict[Bucket, list[Placed]], step: int
) -> export_metadata.ExportFacts:
    """Collect the facts about a run for the metadata of its files."""
    folders = []
    for i, folder in enumerate(job.dataset.folders):
        captions = [unify_separators(example.caption, job.dataset) for example in examples if example.folder_index == i]
        counted = export_metadata.FolderFacts.count(folder.path, captions, folder.repeats, job.dataset.tag_separator)
        # Tags of regularization images do not describe the subject, so they are no prompts for the LoRA.
        folders.append(replace(counted, tags={}) if folder.regularization else counted)
    sizes: Counter[tuple[int, int]] = Counter()  # programs that read this field expect width and height only
    for (width, height, *_), members in buckets.items():
        sizes[width, height] += len(members)
    factor = optim.resolve_lr_factor(job.optimizer, job.quantize.storage)
    return export_metadata.ExportFacts(
        architecture=family.get_architecture_name(),
        name=job.name,
        steps=step,
        # LyCORIS calls the size of OFT's blocks its rank; its alpha is a limit, which is not used.
        rank=job.adapter.block_size if job.adapter.type == "oft" else job.adapter.rank,
        alpha=float(job.adapter.block_size) if job.adapter.type == "oft" else job.adapter.alpha,
        rank_stabilized=job.adapter.rank_stabilized,
        rank_factor=2 if job.adapter.doubles_rank else 1,
        kind=job.adapter.type,
        kind_settings=_make_kind_settings(job.adapter),
        learning_rate=optim.resolve_lr(job.optimizer) * factor,
        learning_rate_factor=factor,
        text_encoder_lr=optim.resolve_text_encoder_lr(job.optimizer) if job.adapter.text_encoder else None,
        seed=job.seed,
        resolution=(get_resolution(job), get_resolution(job)),
        folders=tuple(folders),
        batch_size=job.train.batch_size * job.train.accumulate,
        optimizer=job.optimizer.name,
        schedule=job.schedule.name,
        warmup_steps=schedules.count_warmup_steps(job.schedule, job.train.steps),
        storage=job.quantize.storage,
        mixed_precision="bf16" if job.model.dtype == "bf16" else "no",
        base_name=job.model.path,
        base_hash=family.compute_base_identity(),
        prediction_type=PREDICTION_TYPES.get(family.get_prediction()),
        trigger=job.dataset.trigger,
        dropout=job.adapter.dropout,
        objective=job.objective,
        max_grad_norm=job.train.max_grad_norm,
        scale_weight_norms=job.adapter.scale_weight_norms,
        caption_dropout=job.dataset.caption_dropout,
        caption_tokens=job.model.caption_tokens if family.num_chunks > 1 else 0,
        clip_skip=family.clip_skip if family.clip_skip > 1 else 0,
        buckets=sizes,
        config_toml=config.dumps(job),
    )
