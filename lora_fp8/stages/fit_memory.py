"""Decide the memory settings that are left to "auto", once the encoders are freed and before the base is loaded."""

from dataclasses import replace

from ..plan.memory_choice import choose_memory, is_open
from ..training import memory
from .session import Session


def fit_memory(session: Session) -> Session:
    """Choose the memory settings of this run by the free memory of its device; of several, by the fullest.

    Returns:
        The session with them.
    """
    run, processes = session.run, session.processes
    free = None
    if is_open(session.job):
        per_process = [size for size in processes.gather(memory.count_free_bytes(processes.device)) if size is not None]
        free = min(per_process, default=None)
    if free is not None:
        run.log_event("stage", stage="memory")
    choice = choose_memory(session.plan, free, processes.world)
    if free is not None:
        run.log_event(
            "memory",
            gradient_checkpointing=choice.section.recomputes,
            offload=choice.section.share_in_ram,
            tiled=choice.tiled,
            peak_gib=round(choice.peak / 2**30, 3),
            free_gib=round(free / 2**30, 3),
            lines=choice.format_lines(),
        )
    if warning := choice.format_warning():
        session.warn(warning)
    return replace(session, choice=choice)
