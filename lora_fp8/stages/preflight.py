"""Before training: run one forward and backward pass at the heaviest batch, and choose the fastest matmul.

A batch that does not fit into memory, or a broken base model, then fails now and not in an hour.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator

import torch

from .. import adapters, precision
from ..errors import Joined, Message, RunFailure
from ..training import memory
from ..training.cuda_graphs import Recorder
from .cache import Data
from .load import Loaded
from .progress import StageProgress
from .resume import State
from .session import Session
from .step import backward_, name_files_not_finite
from .turns import OtherFailed, Turn, draw_turn

MOST_OFF = 0.3
"""Largest relative difference between the gradients of compiled and uncompiled blocks. Rounding in another order makes
0.01 to 0.02 in bf16 (measured); a wrong gradient had 3 and more."""


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

    def draw() -> Turn | None:
        try:
            return draw_turn(session, data.loader, 0, data.heaviest)
        except OtherFailed:
            processes.wait()  # raises what the other process says
            raise

    first = draw()

    def attempt(turn: Turn | None = first, recorder: Recorder | None = None) -> None:
        if turn is None:
            return
        with processes.passing(), _explain_nondeterministic():
            losses_B = backward_(session, loaded, turn.batch, recorder, turn.dropped, turn.is_own)
        if not torch.isfinite(losses_B).all():
            files = name_files_not_finite(turn.batch, losses_B)
            raise RunFailure(
                Message(
                    "the loss is not finite before training; {files}; check that the base model file is complete",
                    files=files,
                )
            )

    if job.quantize.compute == "auto":
        _choose_compute(session, loaded, state, attempt)
    facts: dict[str, float] = {}
    loaded.exchange.gradients.zero_()
    # With dropout, compiled and uncompiled blocks draw other elements.
    is_special = job.memory.compile == "blocks" or loaded.recorder is not None
    if is_special and first is not None and not job.adapter.is_random:
        # A batch draws its noise as it is used: each pass gets a new one, with the same noise.
        off = _compare_with_plain(session, loaded, lambda recorder: attempt(draw(), recorder))
        facts["gradient_off"] = round(off, 5)
    else:
        attempt()
    loaded.amax.forget_step_()
    if job.quantize.kernels == "triton":
        facts["fused"] = adapters.count_fused(loaded.denoiser)
    run.log_event("preflight", peak_gib=round(memory.read_peak_gib(processes.device), 3), **facts)


@contextlib.contextmanager
def _explain_nondeterministic() -> Iterator[None]:
    """Turn torch's error for an operation that has no deterministic kernel into a RunFailure with what to change."""
    try:
        yield
    except RuntimeError as error:
        name = re.match(r"(\S+) does not have a deterministic implementation", str(error))
        if name is None:
            raise
        raise RunFailure(
            Message(
                "train.deterministic = true: {name}, which this model uses, has no deterministic kernel; use "
                "train.deterministic = false",
                name=name[1],
            )
        ) from error


def _compare_with_plain(session: Session, loaded: Loaded, attempt: Callable[[Recorder | None], None]) -> float:
    """Try the batch as training will, compiled or from a recording, and compare the gradients with those of plain code.

    Returns:
        The relative difference.

    Raises:
        RunFailure: they differ by more than rounding explains. Losses do not show it (see `set_torch_options`).
    """
    gradients, device = loaded.exchange.gradients, session.processes.device
    with memory.uncompiled(loaded.denoiser):
        attempt(None)
    exact = gradients.values.to("cpu", copy=True)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # a recording has memory of its own
    memory.reset_peak(device)  # plain code is not part of this job's memory
    for _ in range(1 if loaded.recorder is None else 2):  # the second pass is recorded
        gradients.zero_()
        attempt(loaded.recorder)
    difference, size = (gradients.values.cpu() - exact).norm().item(), exact.norm().item()
    off = difference / size if size else difference
    if not off <= MOST_OFF:
        section = session.job.memory
        setting = "memory.compile = 'blocks'" if section.compile == "blocks" else "memory.cuda_graphs = true"
        usual = "memory.compile = 'off'" if section.compile == "blocks" else "memory.cuda_graphs = false"
        raise RunFailure(
            Message(
                "{setting}: on this machine, it changes the gradient (relative difference {value}); use {usual}",
                setting=setting,
                value=f"{off:.3g}",
                usual=usual,
            )
        )
    return off


def _choose_compute(session: Session, loaded: Loaded, state: State, attempt: Callable[[], None]) -> None:
    """Choose the matmul, or keep that of the checkpoint if this machine has it, and switch to it."""
    section, processes = session.job.quantize, session.processes
    usable = precision.list_candidates(section, processes.device)
    is_lost = bool(state.compute) and precision.split_mode(state.compute, section)[0] not in usable
    if any(processes.gather(is_lost)):
        session.warn(
            Message(
                "the matmul chosen by the checkpoint, {name}, does not exist on this machine; the fastest one is "
                "measured again",
                name=state.compute,
            )
        )
        state.compute = ""
    state.compute = state.compute or _find_fastest(session, loaded, attempt)
    switch_compute(session, loaded, state.compute)
    memory.reset_peak(processes.device)  # the slower matmuls are not part of this job's memory


def _find_fastest(session: Session, loaded: Loaded, attempt: Callable[[], None]) -> str:
    """Time each matmul on this batch, and log the times. All processes return the same, fastest one."""
    if not any(layer.compute.startswith("fp8") for layer in loaded.layers.layers):
        return "upcast"
    processes, section = session.processes, session.job.quantize
    modes = precision.list_candidates(section, processes.device)
    progress = StageProgress(session.run, "preflight", seconds=0)

    def switch(mode: str) -> None:
        progress.update(modes.index(mode), len(modes))
        switch_compute(session, loaded, mode)

    seconds, failed = precision.time_modes(modes, switch, attempt, processes.device)
    totals = dict.fromkeys(modes, 0.0)
    reasons = dict.fromkeys(modes, "")
    for other_seconds, other_failed in processes.gather((seconds, failed)):
        for mode in modes:
            totals[mode] += other_seconds[mode]  # infinite if it failed
            reasons[mode] = reasons[mode] or other_failed.get(mode, "")
    chosen = min(modes, key=lambda mode: totals[mode])
    if totals[chosen] == math.inf:
        raise RunFailure(_describe_failed(session, reasons))
    for mode, why in reasons.items():
        if why:
            session.warn(
                Message("quantize.compute = 'auto': {mode} failed and is not used ({why})", mode=mode, why=why)
            )
    finite = {mode: round(seconds[mode], 4) for mode in modes if seconds[mode] < math.inf}
    session.run.log_event("compute", chosen=chosen, seconds=finite)
    return chosen


def _describe_failed(session: Session, reasons: dict[str, str]) -> Message:
    """Return the message for a machine on which no matmul works; `reasons` says of each mode why."""
    if set(reasons.values()) == {precision.OUT_OF_MEMORY}:
        return session.describe_full_memory()
    modes_by_reason: dict[str, list[str]] = {}
    for mode, why in reasons.items():
        modes_by_reason.setdefault(why, []).append(mode)
    lines = [Message("{key}: {line}", key=", ".join(modes), line=why) for why, modes in modes_by_reason.items()]
    return Message("quantize.compute = 'auto': no matmul works on this machine ({why})", why=Joined("; ", lines))


def switch_compute(session: Session, loaded: Loaded, mode: str) -> None:
    """Make the frozen layers use this matmul."""
    compute, section = precision.split_mode(mode, session.job.quantize)
    precision.set_compute_(loaded.denoiser, loaded.layers.with_compute(compute), section)
