"""Which passes of the denoiser each process makes for a micro-batch.

Processes that hold a base of their own make the passes that their own samples need; one without samples makes none.
Processes in lockstep (see `Processes.lockstep`) make the same passes: one without samples, or whose samples need fewer
passes than another's, makes the others too and drops what they give. So the gradient is the same either way.
"""

from dataclasses import dataclass

import torch

from ..data.loader import Batch, Loader
from ..settings import Objective
from .prior import constrains_outside_masks, replaces_targets
from .session import Session


@dataclass(frozen=True)
class Passes:
    """Passes of the denoiser beside that of a batch itself."""

    prior: bool = False
    """the base's own prediction, as a target; see `prior`"""
    class_word: bool = False
    """the passes with the class word"""

    @staticmethod
    def of(batch: Batch | None, section: Objective) -> "Passes":
        """Return the passes that a batch needs with this `[objective]` table."""
        if batch is None:
            return NO_PASSES
        needs_base = replaces_targets(section, batch) or constrains_outside_masks(section, batch.mask_BHW)
        return Passes(needs_base, batch.class_cond is not None)


NO_PASSES = Passes()


@dataclass(frozen=True)
class Turn:
    """What a process computes for a micro-batch."""

    batch: Batch
    dropped: Passes = NO_PASSES
    """passes that this batch does not need and another process makes; what they give is dropped"""
    is_own: bool = True
    """False: the batch is another process's, and its gradient is dropped"""


class OtherFailed(Exception):
    """Another process could not read its batch, and will say so when the gradients are exchanged."""


def draw_turn(session: Session, loader: Loader, step: int, position: int) -> Turn | None:
    """Return what this process computes for a micro-batch; None if it has nothing to do.

    Args:
        session: of the run.
        loader: of the training images.
        step: number of the step, from 1; 0 for a trial.
        position: of the micro-batch in the training.

    Raises:
        OtherFailed: in lockstep, another process failed to read its batch.
    """
    processes, section = session.processes, session.job.objective
    if not processes.lockstep:
        batch = loader.take_batch(step, position, processes.rank, processes.world)
        return None if batch is None else Turn(batch)
    failure: Exception | None = None
    batch = stand_in = None
    try:
        batch = loader.take_batch(step, position, processes.rank, processes.world)
        if batch is None:
            stand_in = loader.take_batch(step, position, 0, processes.world)
    except Exception as error:  # told to the others first, which would wait in the first pass
        failure = error
    own = Passes.of(batch, section)
    flags = torch.tensor([own.prior, own.class_word, failure is not None], dtype=torch.int32, device=processes.device)
    prior, class_word, failed = processes.reduce_max_(flags).bool().tolist()
    if failure is not None:
        raise failure
    if failed:
        raise OtherFailed
    is_own = batch is not None
    batch = batch if batch is not None else stand_in
    assert batch is not None  # the first process has a sample of every micro-batch
    own = Passes.of(batch, section)
    return Turn(batch, Passes(prior and not own.prior, class_word and not own.class_word), is_own)
