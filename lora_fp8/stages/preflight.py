"""Before training: run one forward and backward pass at the heaviest batch, and choose the fastest matmul.

A batch that does not fit into memory, or a broken base model, then fails now and not in an hour.
"""

import math
from collections.abc import Callable

import torch

from .. import adapters, precision
from ..errors import Joined, Message, RunFailure
from ..training import memory
from .cache import Data
from .load import Loaded
from .progress import StageProgress
from .resume import State
from .session import Session
from .step import compute_weighted_losses, name_files_not_finite


def preflight(session: Session, data: Data, loaded: Loaded, state: State) -> None:
    """Try one batch, so that problems of memory and of the base model show before training.

    With quantize.compute = "auto" each matmul is timed, and the fastest is used. A resumed run keeps its matmul if this
    machine has it, so that the result stays the same bit for bit.

    Raises:
        RunFailure: the loss is not finite, no matmul works, or the memory is too small.
    """
    job, processes, run = session.job, session.processes, session.run
    run.log_event("stage", stage="preflight")
    memory.reset_peak(processes.device)
    batch = data.loader.micro(0, data.heaviest, processes.rank, processes.world)

    def attempt() -> None:
        if batch is None:
            return
        losses_B = compute_weighted_losses(session, loaded, batch)
        losses_B.sum().backward()
        if not torch.isfinite(losses_B).all():
            files = name_files_not_finite(batch, losses_B)
            raise RunFailure(
                Message("the loss is not finite before any training; {files}; is the base model whole?", files=files)
            )

    if job.quantize.compute == "auto":
        _choose_compute(session, loaded, state, attempt)
    attempt()
    loaded.amax.forget_step_()
    _clear_gradients(loaded)
    fused = {"fused": adapters.num_fused(loaded.denoiser)} if job.quantize.kernels == "triton" else {}
    run.log_event("preflight", peak_gib=round(memory.peak_gib(processes.device), 3), **fused)


def _choose_compute(session: Session, loaded: Loaded, state: State, attempt: Callable[[], None]) -> None:
    """Choose the matmul, or keep that of the checkpoint if this machine has it, and switch to it."""
    section, processes = session.job.quantize, session.processes
    usable = precision.candidates(section, processes.device)
    is_lost = bool(state.compute) and precision.chosen(state.compute, section)[0] not in usable
    if any(processes.gather(is_lost)):
        session.warn(
            Message(
                "the matmul that the checkpoint had chosen, {name}, does not exist on this machine; the fastest is "
                "measured again",
                name=state.compute,
            )
        )
        state.compute = ""
    state.compute = state.compute or _find_fastest(session, loaded, attempt)
    switch_compute(session, loaded, state.compute)
    _clear_gradients(loaded)
    memory.reset_peak(processes.device)  # the slower matmuls are not part of this job's memory


def _find_fastest(session: Session, loaded: Loaded, attempt: Callable[[], None]) -> str:
    """Time each matmul on this batch, and log the times. All processes return the same, fastest one."""
    if not any(layer.compute.startswith("fp8") for layer in loaded.layers.layers):
        return "upcast"
    processes, section = session.processes, session.job.quantize
    modes = precision.candidates(section, processes.device)
    progress = StageProgress(session.run, "preflight", seconds=0)

    def switch(mode: str) -> None:
        progress.update(modes.index(mode), len(modes))
        switch_compute(session, loaded, mode)

    seconds, failed = precision.fastest(modes, switch, attempt, processes.device)
    answers = processes.gather([(seconds[mode], failed.get(mode, "")) for mode in modes])
    by_mode = dict(zip(modes, zip(*answers, strict=True), strict=True))
    totals = [sum(taken for taken, _ in by_process) for by_process in by_mode.values()]
    reasons = {mode: next((why for _, why in by_process if why), "") for mode, by_process in by_mode.items()}
    if min(totals) == math.inf:
        if set(reasons.values()) == {precision.OUT_OF_MEMORY}:
            raise RunFailure(memory.out_of_memory_advice(processes.device))
        modes_by_reason = {why: [mode for mode in modes if reasons[mode] == why] for why in reasons.values()}
        lines = [
            Message("{key}: {line}", key=", ".join(failed_modes), line=reason)
            for reason, failed_modes in modes_by_reason.items()
        ]
        raise RunFailure(
            Message("quantize.compute = 'auto': no matmul works on this machine ({why})", why=Joined("; ", lines))
        )
    chosen = modes[totals.index(min(totals))]
    for mode, why in reasons.items():
        if why:
            session.warn(
                Message("quantize.compute = 'auto': {mode} failed and is left out ({why})", mode=mode, why=why)
            )
    finite = {mode: round(seconds[mode], 4) for mode in modes if seconds[mode] < math.inf}
    session.run.log_event("compute", chosen=chosen, seconds=finite)
    return chosen


def switch_compute(session: Session, loaded: Loaded, mode: str) -> None:
    """Make the frozen layers use this matmul."""
    compute, section = precision.chosen(mode, session.job.quantize)
    precision.set_compute_(loaded.denoiser, loaded.layers.with_compute(compute), section)


def _clear_gradients(loaded: Loaded) -> None:
    for _, parameter in adapters.parameters(loaded.adapted):
        parameter.grad = None
