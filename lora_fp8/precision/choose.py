"""`quantize.compute = "auto"`: each matmul is tried on this machine and this job, and the fastest that fits is taken.

And what a machine can do at all, which is asked before anything is loaded.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from .. import config
from . import backends

MODES = ("upcast", "fp8_forward", "fp8")
FP8_SINCE = (8, 9)  # compute capability: Ada (RTX 40), Hopper and later have FP8 tensor cores
BLOCKS_ON = 9  # torch's kernel for 1x128 by 128x128 scales exists for Hopper


def problem(section: config.Quantize, device: torch.device, world: int = 1) -> str:
    """Why this machine cannot compute as the section asks, with what to choose instead; "" where it can.

    Args:
        world: processes that train together.
    """
    if section.backend != "own":
        return backends.problem(section, device, world)
    if section.compute in ("upcast", "auto") or device.type != "cuda":
        return ""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return _problem(section, name, capability)


def _problem(section: config.Quantize, name: str, capability: tuple[int, int]) -> str:
    what = f"{name} (compute capability {capability[0]}.{capability[1]})"
    if capability < FP8_SINCE:
        return (
            f"quantize.compute = {section.compute!r}: {what} has no FP8 tensor cores, they came with 8.9; "
            "use quantize.compute = 'upcast', which holds the base in FP8 all the same"
        )
    if section.recipe == "block" and capability[0] != BLOCKS_ON:
        return (
            f"quantize.recipe = 'block': {what} has no kernel for it, Hopper (9.0) has; use quantize.recipe = 'current'"
        )
    return ""


def candidates(section: config.Quantize, device: torch.device) -> tuple[str, ...]:
    """The matmuls that "auto" tries on this device."""
    able = not problem(section.model_copy(update={"compute": "fp8"}), device)
    return MODES if able else MODES[:1]


def fastest(
    modes: Sequence[str],
    switch: Callable[[str], None],
    step: Callable[[], None],
    device: torch.device,
    repeats: int = 3,
) -> dict[str, float]:
    """Seconds of one forward and backward under each of `modes`, the median of a few after one to warm up.

    Args:
        switch: makes the denoiser compute in a mode.
        step: one forward and backward.

    Returns:
        mode -> seconds; infinite where it ran out of memory.
    """
    seconds = {}
    for mode in modes:
        switch(mode)
        taken = []
        try:
            for _ in range(1 + repeats):
                _wait(device)
                started = time.perf_counter()
                step()
                _wait(device)
                taken.append(time.perf_counter() - started)
            seconds[mode] = statistics.median(taken[1:])
        except torch.cuda.OutOfMemoryError:
            seconds[mode] = float("inf")
            torch.cuda.empty_cache()
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
