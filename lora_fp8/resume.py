"""What a checkpoint of a run holds, and how a run takes it up again: between the loop in `train` and the bundles in
`checkpoint`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import adapters, checkpoint
from .config import Job, UserError, UserErrors
from .families.base import ModelFamily
from .prepare import Data, Loaded
from .processes import Processes
from .run import Run, RunFailure


@dataclass
class State:
    """What moves while training; with the tensors of adapter, optimizer and exchange it is the whole checkpoint."""

    step: int = 0
    compute: str = ""  # the matmul that quantize.compute = "auto" has settled on


def save_checkpoint(
    job: Job,
    family: ModelFamily,
    data: Data,
    loaded: Loaded,
    state: State,
    residuals: dict[str, Tensor],
    run: Run,
) -> None:
    """One whole bundle at this step.

    Raises:
        RunFailure: the disk refused, or the update left a value that is not finite; earlier bundles are untouched.
        FileNotFoundError: the run folder has gone, and is not made anew.
    """
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
    content |= checkpoint.remember(job, family.base_identity(), data.fingerprint)
    path = checkpoint.save(run.checkpoints, adapter, tensors, content, keep=job.checkpoint.keep)
    run.log_event("checkpoint", step=state.step, path=str(path.relative_to(run.path)))


def take_up(job: Job, family: ModelFamily, data: Data, loaded: Loaded, run: Run, resume: bool) -> State:
    """Where to begin: at 0, or where the newest whole checkpoint ends."""
    if not resume:
        return State()
    found, skipped = checkpoint.latest(run.checkpoints)
    for line in skipped:
        run.log_event("warning", text=line)
    if found is None:
        run.log_event("warning", text="there is no checkpoint yet; training begins at step 0")
        return State()
    now = checkpoint.remember(job, family.base_identity(), data.fingerprint)
    refused, told = checkpoint.compare(found.state, now)
    if refused:
        raise UserErrors(refused, f"{found.path} cannot go on with another")
    for text in told:
        run.log_event("warning", text=text)
    if found.step > job.train.steps:
        raise UserError(
            f"{found.path} is at step {found.step}, but train.steps is {job.train.steps}; raise train.steps to go on"
        )
    adapters.load_state_(loaded.adapted, found.adapter)
    tensors = dict(found.optimizer)
    loaded.amax.load_({name: tensors.pop(name) for name in list(tensors) if name.startswith("amax.")})
    residuals = {name: tensors.pop(name) for name in list(tensors) if name.startswith("residual.")}
    for text in loaded.exchange.load_(residuals):
        run.log_event("warning", text=text)
    loaded.optimizer.load_state(tensors, found.state["optimizer"])
    run.log_event("resume", step=found.step, checkpoint=found.path.name)
    return State(found.step, found.state.get("compute", ""))


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
