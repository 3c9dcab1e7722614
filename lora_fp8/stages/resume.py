"""Begin a run at the base model, at a LoRA file or at a checkpoint, and save its checkpoints."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import adapters
from ..adapters import kinds
from ..common.reading import load_text
from ..config import read_toml
from ..distributed.processes import Processes
from ..errors import Message, RunFailure, UserError, UserErrors, first_few
from ..run import Run
from ..training import checkpoint
from ..training.verdict import Measurement
from .cache import Data
from .load import Loaded
from .session import Session


@dataclass
class State:
    """What changes while training; with the tensors of adapter, optimizer and exchange it is the whole checkpoint.

    The series of held-out losses is in a file of its own, as a checkpoint is saved before its step is validated.
    """

    step: int = 0
    compute: str = ""  # the matmul chosen by quantize.compute = "auto"
    series: list[Measurement] = field(default_factory=list)  # of `held_out.read_series`


def save_checkpoint(session: Session, data: Data, loaded: Loaded, state: State, residuals: dict[str, Tensor]) -> None:
    """Write a checkpoint of this step.

    Args:
        session, data, loaded: of the run.
        state: of this step.
        residuals: from `Exchange.collect`.

    Raises:
        RunFailure: it could not be written, or the update left a value that is not finite. Earlier checkpoints stay.
        FileNotFoundError: the run folder does not exist any more, and is not created again.
    """
    run = session.run
    run.check_place()
    tensors, scalars = loaded.optimizer.copy_state()
    adapter = adapters.copy_state(loaded.adapted)
    for name, tensor in (adapter | tensors).items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            last_good = describe_last_checkpoint(run)
            raise RunFailure(
                Message(
                    "step {step}: {name} is not finite after the update, so nothing was saved; {line}. Try a lower "
                    "optimizer.lr or optimizer.weight_decay, or a larger optimizer.eps",
                    step=state.step,
                    name=name,
                    line=last_good,
                )
            )
    tensors |= loaded.amax.copy_tensors() | residuals
    tensors |= {f"start.{name}": tensor.cpu() for name, tensor in adapters.find_frozen_starts(loaded.adapted).items()}
    content = describe_state(session, data, loaded, state) | {"optimizer": scalars}
    path, warnings = checkpoint.save(run.checkpoints, adapter, tensors, content, keep=session.job.checkpoint.keep)
    for line in warnings:
        session.warn(line)
    run.log_event("checkpoint", step=state.step, path=str(path.relative_to(run.path)))


def describe_state(session: Session, data: Data, loaded: Loaded, state: State) -> dict[str, Any]:
    """Return what a checkpoint's state.json has besides the optimizer."""
    content = {
        "step": state.step,
        "compute": state.compute,
        "moved": loaded.moved,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    identity = session.plan.base_identity
    return content | checkpoint.describe_job(session.job, identity, data.fingerprint, data.files)


def _begin(session: Session, loaded: Loaded) -> State:
    """Begin at step 0, with an adapter that changes nothing yet or with that of `adapter.init_from`."""
    if values := session.plan.start:
        fresh = adapters.copy_state(loaded.adapted)
        adapters.load_state_(loaded.adapted, fresh | values)
        loaded.optimizer.start_at(values)
        if untouched := sorted(kinds.group_by_layer(fresh).keys() - kinds.group_by_layer(values).keys()):
            names = first_few(untouched)
            text = Message(
                "adapter.init_from does not contain all layers; {count} layers start from the base model itself: "
                "{names}",
                count=len(untouched),
                names=names,
            )
            session.warn(text)
    return State()


def require_resumable(session: Session) -> None:
    """Refuse, before anything is downloaded or loaded, settings that the newest checkpoint cannot be resumed with.

    Raises:
        UserError: the checkpoint has another adapter or quantization, or a later step than train.steps.
        RunFailure: there are checkpoints, but none is complete.
    """
    job = session.job
    newest, _ = checkpoint.read_latest(session.run.checkpoints)
    if newest is None:
        return
    refusals = checkpoint.compare(newest.state, checkpoint.describe_job(job, session.plan.base_identity, ""))[0]
    if refusals:
        raise UserErrors(
            refusals,
            Message(
                "{path} cannot be resumed with these settings; restore the old values, or train under another name",
                path=newest.path,
            ),
        )
    if newest.step > job.train.steps:
        raise UserError(
            Message(
                "{path} is at step {step}, but train.steps is {steps}; raise train.steps to continue",
                path=newest.path,
                step=newest.step,
                steps=job.train.steps,
            )
        )


def begin_or_resume(session: Session, data: Data, loaded: Loaded, resume: bool) -> State:
    """Begin at step 0, or load the newest complete checkpoint and continue from it.

    Args:
        session, data: of the run.
        loaded: its adapter, optimizer and histories are set.
        resume: True loads the checkpoint.

    Raises:
        RunFailure: there are checkpoints, but none is complete.
    """
    job, run = session.job, session.run
    if not resume:
        return _begin(session, loaded)
    newest, skipped = checkpoint.read_latest(run.checkpoints)
    for line in skipped:
        session.warn(line)
    if newest is None:
        session.warn(Message("there is no checkpoint yet; training begins at step 0"))
        return _begin(session, loaded)
    current = checkpoint.describe_job(job, session.plan.base_identity, data.fingerprint, data.files)
    _, changes = checkpoint.compare(newest.state, current)
    if job.adapter.init_from != _read_init_from(run):
        changes.append(
            Message(
                "{setting} has no effect: {line}",
                setting="adapter.init_from",
                line=Message(
                    "the run continues from its own checkpoint",
                ),
            )
        )
    for text in changes:
        session.warn(text)
    tensors = dict(newest.optimizer)
    starts = {name: tensors.pop(name) for name in list(tensors) if name.startswith("start.")}
    adapters.load_frozen_starts_(loaded.adapted, {name.removeprefix("start."): t for name, t in starts.items()})
    adapters.load_state_(loaded.adapted, newest.adapter)
    loaded.amax.load_({name: tensors.pop(name) for name in list(tensors) if name.startswith("amax.")})
    residuals = {name: tensors.pop(name) for name in list(tensors) if name.startswith("residual.")}
    for text in loaded.exchange.load_(residuals):
        session.warn(text)
    loaded.optimizer.load_state(tensors, newest.state["optimizer"])
    run.log_event("resume", step=newest.step, checkpoint=newest.path.name)
    return State(newest.step, newest.state.get("compute", ""))


def _read_init_from(run: Run) -> str:
    """Read adapter.init_from from the run folder's config, which is the first one until the new one is accepted."""
    written = read_toml(load_text(run.config_file))
    return written.get("adapter", {}).get("init_from", "")


def require_same_step(state: State, run: Run, processes: Processes) -> None:
    """Check that all processes begin at the same step.

    Raises:
        RunFailure: they begin at different steps, as they see different checkpoints.
    """
    steps = processes.gather(state.step)
    if len(set(steps)) > 1:
        raise RunFailure(
            Message(
                "the processes would start at different steps ({steps}), because not all of them see the "
                "checkpoints in {path}; put output_dir on a disk that all machines share",
                steps=", ".join(map(str, steps)),
                path=run.path.resolve(),
            )
        )


def describe_last_checkpoint(run: Run) -> str:
    """Describe the newest checkpoint, for a message."""
    newest = checkpoint.find_newest(run.checkpoints)
    return Message("last good checkpoint: {name}", name=newest.name) if newest else Message("no checkpoint yet")
