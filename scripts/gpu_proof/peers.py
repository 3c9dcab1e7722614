"""Stage 4: measure the same step as other programs compute it, on the same network with the same adapters."""

import time
from typing import Any

import bench_step
import torch

from lora_fp8.training import memory

from .models import empty_cache
from .record import Context, Record, wait

WANTED = ("kohya unscaled cast", "torchao float8 training", "diffusers layerwise casting")


def run(record: Record, context: Context) -> None:
    """Measure each peer compiled, then eager."""
    pixels, size = (64, "tiny") if context.toy else (1024, "full")
    candidates = [one for one in bench_step.list_candidates() if one.name in WANTED and not one.checkpointing]
    candidates = [one for one in candidates if not (context.toy and one.compile)]
    for one in sorted(candidates, key=lambda one: (not one.compile, WANTED.index(one.name))):
        name = f"flux {pixels}: {one.title}"
        if context.seconds_left <= 0:
            record.write(name, None, note="not asked: no time left")
            continue
        record.ask(name, lambda one=one: measure(one, pixels, size, context))
        empty_cache(context.device)


def measure(candidate: bench_step.Candidate, pixels: int, size: str, context: Context) -> dict[str, Any]:
    """Return the median time of a step and its peak memory."""
    torch._dynamo.reset()
    try:
        trainer = bench_step.Trainer(candidate, "flux", pixels, size, context.device)
        started = time.perf_counter()
        for _ in range(2):
            trainer.step()
        wait(context.device)
        warmup = time.perf_counter() - started
        memory.reset_peak(context.device)
        taken = sorted(trainer.time_step()[0] for _ in range(2 if context.toy else 5))
    except ImportError as error:  # a peer that is not installed is no fault of this machine or project
        return {"ok": None, "note": bench_step.shorten_error(error)}
    facts = {"value": taken[len(taken) // 2], "unit": "s/step", "fastest": taken[0], "slowest": taken[-1]}
    return facts | {"warmup_seconds": warmup, "peak_gib": memory.read_peak_gib(context.device)}
