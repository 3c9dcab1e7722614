"""Choose the memory settings that a job leaves to "auto": the fastest that fit into the free memory of its device.

What is chosen changes neither the LoRA nor the checkpoints: recomputed activations and offloaded weights are the same
bits. So a resumed run chooses again, for the machine it runs on. Previews in tiles are other images than whole ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..config.relations import excludes_recomputing, find_offload_clashes
from ..data.buckets import Bucket
from ..errors import Joined, Message
from ..families.base import ModelFamily
from ..settings import Job, Memory
from . import training_memory
from .plan import Plan
from .training_memory import TrainingMemory

SHARES = tuple(tenth / 10 for tenth in range(11))
"""Shares of the base that may be offloaded."""
MARGIN, WORKSPACE = 0.05, 2**29
"""Part of the free memory that torch's allocator loses between its blocks, and bytes for the libraries' workspaces."""
UNKNOWN_STEP = 6 * 2**30
"""Bytes that are kept free for a step that cannot be measured before it is tried."""
DRAWING = 3 * 2**29
"""Bytes that are kept free for the passes of a drawing, which keep no activations."""
GIB = 2**30


@dataclass(frozen=True)
class MemoryChoice:
    """What was chosen for a job, and why."""

    section: Memory
    """the job's `[memory]` table, with a value for every "auto\""""
    tiled: bool
    """True if previews are decoded in tiles"""
    free: int | None = None
    """free bytes of the device before anything was loaded; None on a CPU"""
    peak: int = 0
    """estimated bytes of the training with these settings"""
    training: TrainingMemory | None = None
    """what the training takes, if it was measured for this choice"""
    advice: str = ""
    """what to do if even the most economical settings may not fit, else \"\""""

    def format_lines(self) -> list[str]:
        """Return what was chosen, in a line; none where nothing was to be chosen."""
        if self.free is None:
            return []
        section, share = self.section, self.section.share_in_ram
        chosen: list[str] = [
            Message("gradient checkpointing on") if section.recomputes else Message("gradient checkpointing off"),
            Message("{percent} % of the base offloaded to RAM", percent=round(100 * share))
            if share
            else Message("the whole base on the GPU"),
        ]
        if self.tiled:
            chosen.append(Message("previews decoded in tiles"))
        line = Message(
            "memory: {settings}; about {peak} of {free} GiB",
            settings=Joined(", ", chosen),
            peak=f"{self.peak / GIB:.1f}",
            free=f"{self.free / GIB:.1f}",
        )
        return [line]

    def format_warning(self) -> str:
        """Return a sentence if even the most economical settings may not fit, else ""."""
        if not self.advice or self.free is None:
            return ""
        return Message(
            "the training needs about {peak} GiB, but {free} GiB are free: it may run out of memory; {line}",
            peak=f"{self.peak / GIB:.1f}",
            free=f"{self.free / GIB:.1f}",
            line=self.advice,
        )


def is_open(job: Job) -> bool:
    """Return True if the job leaves something about memory to "auto"."""
    return "auto" in (job.memory.gradient_checkpointing, job.memory.offload, job.preview.tiled)


def choose_memory(plan: Plan, free: int | None, world: int = 1) -> MemoryChoice:
    """Choose the memory settings of a job.

    Recomputing costs 1.4 times the time, and offloading more, so nothing is offloaded while recomputing is enough. A
    model of which only trying tells what a step takes gets gradient checkpointing, and room for 6 GiB.

    Args:
        plan: of the job.
        free: free bytes of its GPU, before anything is loaded; None on a CPU, which has no other memory to offload to.
        world: number of processes that train, each on a GPU of its own.
    """
    job = plan.job
    section, tiled = job.memory, job.preview.tiled is True
    if free is None or not is_open(job):
        recomputes = section.recomputes and not excludes_recomputing(job.quantize)
        return MemoryChoice(_apply_choice(section, recomputes, section.share_in_ram), tiled)
    budget = _find_budget(free)
    recomputes, share, peak, training = _choose_training(plan, budget, world)
    if job.preview.tiled == "auto":
        whole = training_memory.measure_preview(plan, [], tiled=False)
        tiled = whole is not None and training.count_held(share) + plan.family.count_vae_bytes() + whole > budget
    advice = "" if peak <= budget else _advise(job)
    return MemoryChoice(_apply_choice(section, recomputes, share), tiled, free, peak, training, advice)


def choose_for_drawing(job: Job, family: ModelFamily, bucket: Bucket, free: int | None) -> tuple[float, bool]:
    """Choose, for images without a training, the share of the base to offload and whether to decode in tiles.

    Args:
        job: whose `[quantize]`, `[memory]` and `[preview]` tables count.
        family: of the base model.
        bucket: (width, height) or (width, height, frames) of an image.
        free: free bytes of the GPU before anything is loaded; None on a CPU.
    """
    share, tiled = job.memory.share_in_ram, job.preview.tiled is True
    if free is None or not is_open(job):
        return share, tiled
    # One process draws, which shares the base with none.
    job = job.model_copy(update={"memory": job.memory.model_copy(update={"shard_base": False})})
    base = training_memory.measure_base(training_memory.build_base(job, family))
    room = _find_budget(free) - family.count_vae_bytes()
    if job.memory.offload == "auto" and not any(find_offload_clashes(job)):
        fitting = (share for share in SHARES if base.count(share)[0] + DRAWING <= room)
        share = next(fitting, SHARES[-1])
    if job.preview.tiled == "auto":
        whole = training_memory.measure_vae(family, bucket, "decode", [])[0]
        tiled = whole is not None and base.count(share)[0] + whole > room
    return share, tiled


def _find_budget(free: int) -> int:
    """Return the bytes of the free memory that tensors can take."""
    return int(free * (1 - MARGIN)) - WORKSPACE


def _apply_choice(section: Memory, recomputes: bool, share: float) -> Memory:
    return section.model_copy(update={"gradient_checkpointing": recomputes, "offload": share})


def _advise(job: Job) -> str:
    """Return what to change for a job that may not fit."""
    smaller = Message("choose a smaller dataset.resolution, train.batch_size or adapter.rank")
    clashes = [key for key, _ in find_offload_clashes(job)]
    if not clashes:
        return smaller
    names = Joined(", ", clashes)
    return Message(
        "{settings} prevents offloading of the base; change that setting, or {line}", settings=names, line=smaller
    )


def _choose_training(plan: Plan, budget: int, world: int) -> tuple[bool, float, int, TrainingMemory]:
    """Choose gradient checkpointing and the share to offload: the first candidate that fits, else the last.

    Returns:
        Both, the peak of training, and what it takes with this gradient checkpointing.
    """
    latents = training_memory.measure_vae(plan.family, training_memory.find_heaviest_bucket(plan)[0], "encode", [])[1]
    measured: dict[bool, TrainingMemory] = {}
    candidates = list(_list_candidates(plan.job))
    for recomputes, share in candidates:
        if recomputes not in measured:
            trial = plan.job.model_copy(update={"memory": _apply_choice(plan.job.memory, recomputes, 0.0)})
            measured[recomputes] = training_memory.measure_training(replace(plan, job=trial), latents, world)
        training = measured[recomputes]
        step = training.step_bytes
        if step is None and not recomputes and len(candidates) > 1:
            continue
        peak = training.count_held(share) + (UNKNOWN_STEP if step is None else step)
        if peak <= budget:
            break
    return recomputes, share, peak, training


def _list_candidates(job: Job) -> Iterator[tuple[bool, float]]:
    """Yield (gradient checkpointing, share to offload), the fastest first."""
    section = job.memory
    recomputing: tuple[bool, ...] = (False, True)
    if section.gradient_checkpointing != "auto":
        recomputing = (section.gradient_checkpointing,)
    elif excludes_recomputing(job.quantize):
        recomputing = (False,)
    shares: tuple[float, ...] = SHARES
    if section.offload != "auto":
        shares = (float(section.offload),)
    elif section.cuda_graphs or any(find_offload_clashes(job)):
        shares = (0.0,)
    for recomputes in recomputing:
        for share in shares if recomputes == recomputing[-1] else shares[:1]:
            yield recomputes, share
