"""Begin a run at the base itself, at a LoRA file or at a checkpoint, and save its checkpoints."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import adapters
from ..adapters import kinds
from ..common.reading import load_text
from ..common.text import first_few
from ..config import read_toml
from ..distributed.processes import Processes
from ..errors import RunFailure, UserError, UserErrors
from ..run import Run
from ..training import checkpoint
from .cache import Data
from .load import Loaded
from .session import Session


@dataclass
class State:
    """What moves while training; with the tensors of adapter, optimizer and exchange it is the whole checkpoint."""

    step: int = 0
    compute: str = ""  # the matmul that quantize.compute = "auto" has settled on


def save_checkpoint(session: Session, data: Data, loaded: Loaded, state: State, residuals: dict[str, Tensor]) -> None:
    """Write one whole checkpoint of this step.

    Args:
        residuals: from `Exchange.collect`.

    Raises:
        RunFailure: the disk refused, or the update left a value that is not finite; earlier bundles are untouched.
        FileNotFoundError: the run folder has gone, and is not made anew.
    """
    job, run = session.job, session.run
    run.check_place()
    tensors, scalars = loaded.optimizer.state()
    adapter = adapters.state(loaded.adapted)
    for name, tensor in (adapter | tensors).items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise RunFailure(
                f"step {state.step}: the update left {name} not finite, so nothing was saved; {last_good(run)}. "
                "Try a lower optimizer.lr or optimizer.weight_decay, or a larger optimizer.eps"
            )
    tensors |= loaded.amax.tensors() | residuals
    content = {
        "step": state.step,
        "compute": state.compute,
        "moved": loaded.moved,
        "optimizer": scalars,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    content |= checkpoint.remember(job, session.family.base_identity(), data.fingerprint, data.files)
    path, gone = checkpoint.save(run.checkpoints, adapter, tensors, content, keep=job.checkpoint.keep)
    for line in gone:
        session.warn(line)
    run.log_event("checkpoint", step=state.step, path=str(path.relative_to(run.path)))


def _begin(session: Session, loaded: Loaded) -> State:
    """Begin at step 0, with the adapter at the base itself or as `adapter.init_from` has it."""
    if values := session.plan.start:
        fresh = adapters.state(loaded.adapted)
        adapters.load_state_(loaded.adapted, fresh | values)
        loaded.optimizer.start_at(values)
        if left := sorted(kinds.grouped(fresh).keys() - kinds.grouped(values).keys()):
            text = f"adapter.init_from has not all layers; {len(left)} begin at the base itself: {first_few(left)}"
            session.warn(text)
    return State()


def take_up(session: Session, data: Data, loaded: Loaded, resume: bool) -> State:
    """Begin at step 0, or load the newest whole checkpoint and go on from it.

    Raises:
        UserError: the checkpoint is of another base, dataset or adapter, or of a later step than train.steps.
    """
    job, run = session.job, session.run
    if not resume:
        return _begin(session, loaded)
    found, skipped = checkpoint.latest(run.checkpoints)
    for line in skipped:
        session.warn(line)
    if found is None:
        session.warn("there is no checkpoint yet; training begins at step 0")
        return _begin(session, loaded)
    now = checkpoint.remember(job, session.family.base_identity(), data.fingerprint, data.files)
    refused, told = checkpoint.compare(found.state, now)
    if refused:
        raise UserErrors(refused, f"{found.path} cannot go on with another")
    if job.adapter.init_from != _begun_from(run):
        told.append("adapter.init_from has no effect: the run goes on from its own checkpoint")
    for text in told:
        session.warn(text)
    if found.step > job.train.steps:
        raise UserError(
            f"{found.path} is at step {found.step}, but train.steps is {job.train.steps}; raise train.steps to go on"
        )
    adapters.load_state_(loaded.adapted, found.adapter)
    tensors = dict(found.optimizer)
    loaded.amax.load_({name: tensors.pop(name) for name in list(tensors) if name.startswith("amax.")})
    residuals = {name: tensors.pop(name) for name in list(tensors) if name.startswith("residual.")}
    for text in loaded.exchange.load_(residuals):
        session.warn(text)
    loaded.optimizer.load_state(tensors, found.state["optimizer"])
    run.log_event("resume", step=found.step, checkpoint=found.path.name)
    return State(found.step, found.state.get("compute", ""))


def _begun_from(run: Run) -> str:
    """adapter.init_from as the run folder's config has it, which is that of the start until this one is accepted."""
    written = read_toml(load_text(run.config_file))
    return written.get("adapter", {}).get("init_from", "")


def same_step(state: State, run: Run, processes: Processes) -> None:
    """That all processes begin at one step.

    Raises:
        RunFailure: they see different checkpoints.
    """
    steps = processes.gather(state.step)
    if len(set(steps)) > 1:
        raise RunFailure(
            f"the processes would begin at different steps ({', '.join(map(str, steps))}): not all of them see the "
            f"checkpoints in {run.path.resolve()}; put output_dir on a disk that all machines share"
        )


def last_good(run: Run) -> str:
    """Words for the newest whole checkpoint."""
    newest = checkpoint.newest(run.checkpoints)
    return f"last good checkpoint: {newest.name}" if newest else "no checkpoint yet"
