"""Keep the series of held-out losses, what it says, and the LoRA of its best step.

    validation.json             every validation's losses, by image and noise level
    checkpoints/best-000050/    the LoRA of the best validated step

Both belong to the checkpoint from which a run would go on. After a kill the file may hold validations of later steps,
which are made again and are left out when it is read. For the same reason the LoRA that was best so far stays when a
better one is written, until a checkpoint is saved that knows of the better one.
The order after a validation: event, LoRA, file. A validation that is not in the file is missing, and is made again.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import adapters
from ..common.writing import atomic_write
from ..errors import Joined, Message, first_few
from ..run import Run
from ..settings import schedules
from ..training import checkpoint, optim
from ..training.verdict import Measurement, Verdict, find_best_lora, judge
from .cache import Data
from .load import Loaded
from .resume import State, describe_state
from .session import Session


def read_series(session: Session, data: Data, step: int) -> list[Measurement]:
    """Read the validations of this run up to a step. All processes get what the main one reads."""
    series: list[Measurement] = []
    if session.processes.is_main and data.held_out:
        content = session.run.read_validations()
        if content and content.get("measures") != data.held_out_fingerprint:
            session.warn(
                Message(
                    "the held-out images or [objective] changed since the checkpoint: only validations from now on "
                    "are compared"
                )
            )
        else:
            series = [measurement for measurement in _list_measurements(content) if measurement.step <= step]
    return session.processes.gather(series)[0]


def record(session: Session, data: Data, loaded: Loaded, state: State, measurement: Measurement) -> None:
    """Add a validation to the series of `state`; the main process writes it, and the LoRA if it is the best one."""
    job, run = session.job, session.run
    lr, steps = optim.resolve_lr(job.optimizer), job.train.steps
    has_lora = any(schedules.compute_learning_rate(step, job.schedule, lr, steps) for step in range(state.step))
    measurement = replace(measurement, has_lora=has_lora)
    earlier = [before for before in state.series if before.step < measurement.step]
    state.series[:] = [*earlier, measurement]
    if not session.processes.is_main:
        return
    if earlier:
        verdict = judge(state.series)
        run.log_event("verdict", step=measurement.step, **vars(verdict), text=describe(verdict))
    if job.validation.keep_best and find_best_lora(state.series) is measurement:
        content = describe_state(session, data, loaded, state) | {"held_out_loss": measurement.mean}
        run.check_place()
        path, warnings = checkpoint.save_best(run.checkpoints, adapters.copy_state(loaded.adapted), content)
        for line in warnings:
            session.warn(line)
        run.log_event("best", step=measurement.step, path=str(path.relative_to(run.path)))
    rows = [[entry.step, entry.losses, entry.has_lora] for entry in state.series]
    text = json.dumps({"measures": data.held_out_fingerprint, "measurements": rows}) + "\n"
    atomic_write(run.validation_file, text.encode())


def prune(session: Session, series: list[Measurement]) -> None:
    """Remove the LoRAs that are not the best one any more. A checkpoint of the newest measurement or later is saved."""
    if session.job.validation.keep_best and (best := find_best_lora(series)):
        for line in checkpoint.prune_best(session.run.checkpoints, best.step):
            session.warn(line)


def has_ended(session: Session, state: State) -> bool:
    """Return True if all steps are done, or `validation.patience` is exhausted."""
    patience = session.job.validation.patience
    no_patience_left = bool(patience and state.series and judge(state.series).stale >= patience)
    return state.step >= session.job.train.steps or no_patience_left


def describe_end(series: Sequence[Measurement]) -> Message:
    """Say that training ends before `train.steps`."""
    return Message(
        "Training ends at step {step}: the held-out loss has not improved in {count} validations. Raise "
        "validation.patience to go on.",
        step=series[-1].step,
        count=judge(series).stale,
    )


def describe(verdict: Verdict, files: Sequence[Path] = ()) -> str:
    """Say where the held-out loss was best and since when it has risen.

    Args:
        verdict: of the series.
        files: the LoRA files of the best step.
    """
    values = {"best": verdict.best, "loss": f"{verdict.loss:.4g}", "since": verdict.risen_since}
    has_risen = verdict.risen_since is not None
    if not verdict.best and has_risen:
        line = Message("Held-out loss was lowest before training ({loss}) and has risen since step {since}.", **values)
    elif not verdict.best:
        line = Message("Held-out loss was lowest before training ({loss}).", **values)
    elif has_risen:
        line = Message("Held-out loss was best at step {best} ({loss}) and has risen since step {since}.", **values)
    else:
        line = Message("Held-out loss was best at step {best} ({loss}).", **values)
    if not files:
        return line
    names = first_few([path.name for path in files])
    where = Message("The file of step {step} is {names}.", step=verdict.best, names=names)
    return Joined(" ", (line, where))


def choose_best(run: Run) -> Path | None:
    """Return the bundle of the best LoRA that a run has kept; None if it has none."""
    if best := find_best_lora(_list_measurements(run.read_validations())):
        path = checkpoint.get_best_path(run.checkpoints, best.step)
        if path.is_dir():
            return path
    return checkpoint.find_best(run.checkpoints)


def _list_measurements(content: dict[str, Any]) -> list[Measurement]:
    """Return the measurements of a validation.json, by step; [] if it is of another form."""
    try:
        measurements = [
            Measurement(int(step), tuple(tuple(map(float, levels)) for levels in losses), bool(has_lora))
            for step, losses, has_lora in content.get("measurements", [])
        ]
    except (TypeError, ValueError):
        return []
    shapes = {tuple(map(len, measurement.losses)) for measurement in measurements}
    is_whole = len(shapes) == 1 and all(shape and shape[0] and len(set(shape)) == 1 for shape in shapes)
    is_finite = all(math.isfinite(measurement.mean) for measurement in measurements) if is_whole else False
    return sorted(measurements, key=lambda measurement: measurement.step) if is_finite else []
