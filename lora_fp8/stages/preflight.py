"""One forward and backward pass at the heaviest batch before training: does it fit, is the base whole, what is fast?"""

import math
from collections.abc import Callable

import torch

from .. import adapters, precision
from ..errors import RunFailure
from ..training import memory
from .cache import Data
from .load import Loaded
from .resume import State
from .session import Session
from .step import files_not_finite, weighted_losses


def preflight(session: Session, data: Data, loaded: Loaded, state: State) -> None:
    """Try one batch: out of memory or a broken base show now, not in an hour.

    With quantize.compute = "auto" each matmul gets a few tries, and the fastest is taken; a resumed run keeps what it
    had, so that it goes on to the bit, wherever the machine can.

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
        losses_B = weighted_losses(session, loaded, batch)
        losses_B.sum().backward()
        if not torch.isfinite(losses_B).all():
            files = files_not_finite(batch, losses_B)
            raise RunFailure(f"the loss is not finite before any training; {files}; is the base model whole?")

    if job.quantize.compute == "auto":
        _settle_compute(session, loaded, state, attempt)
    attempt()
    loaded.amax.forget_step_()
    _clear_gradients(loaded)
    fused = {"fused": adapters.num_fused(loaded.denoiser)} if job.quantize.kernels == "triton" else {}
    run.log_event("preflight", peak_gib=round(memory.peak_gib(processes.device), 3), **fused)


def _settle_compute(session: Session, loaded: Loaded, state: State, attempt: Callable[[], None]) -> None:
    """Choose the matmul, or keep the checkpoint's where this machine has it, and switch to it."""
    section, processes = session.job.quantize, session.processes
    usable = precision.candidates(section, processes.device)
    is_lost = bool(state.compute) and precision.chosen(state.compute, section)[0] not in usable
    if any(processes.gather(is_lost)):
        text = f"the matmul that the checkpoint had settled on, {state.compute}, is none of this machine's"
        session.warn(f"{text}; the fastest is measured anew")
        state.compute = ""
    state.compute = state.compute or _find_fastest(session, loaded, attempt)
    switch_compute(session, loaded, state.compute)
    _clear_gradients(loaded)
    memory.reset_peak(processes.device)  # what the losers took is nothing that this job takes


def _find_fastest(session: Session, loaded: Loaded, attempt: Callable[[], None]) -> str:
    """Try each matmul on this batch and say what each took; all processes come to the same answer."""
    if not any(layer.compute.startswith("fp8") for layer in loaded.layers.layers):
        return "upcast"
    processes, section = session.processes, session.job.quantize
    modes = precision.candidates(section, processes.device)
    switch = lambda mode: switch_compute(session, loaded, mode)  # noqa: E731
    seconds, failed = precision.fastest(modes, switch, attempt, processes.device)
    answers = processes.gather([(seconds[mode], failed.get(mode, "")) for mode in modes])
    by_mode = dict(zip(modes, zip(*answers, strict=True), strict=True))
    total = [sum(taken for taken, _ in each) for each in by_mode.values()]
    reasons = {mode: next((why for _, why in each if why), "") for mode, each in by_mode.items()}
    if min(total) == math.inf:
        if set(reasons.values()) == {precision.OUT_OF_MEMORY}:
            raise RunFailure(memory.out_of_memory_advice(processes.device))
        alike = {why: [mode for mode in modes if reasons[mode] == why] for why in reasons.values()}
        why = "; ".join(f"{', '.join(tried)}: {each}" for each, tried in alike.items())
        raise RunFailure(f"quantize.compute = 'auto': no matmul works on this machine ({why})")
    chosen = modes[total.index(min(total))]
    for mode, why in reasons.items():
        if why:
            session.warn(f"quantize.compute = 'auto': {mode} failed and is left out ({why})")
    finite = {mode: round(seconds[mode], 4) for mode in modes if seconds[mode] < math.inf}
    session.run.log_event("compute", chosen=chosen, seconds=finite)
    return chosen


def switch_compute(session: Session, loaded: Loaded, mode: str) -> None:
    """Let the frozen layers multiply this way."""
    compute, section = precision.chosen(mode, session.job.quantize)
    precision.set_compute_(loaded.denoiser, loaded.layers.with_compute(compute), section)


def _clear_gradients(loaded: Loaded) -> None:
    for _, parameter in adapters.parameters(loaded.adapted):
        parameter.grad = None
