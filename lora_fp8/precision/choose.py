"""`quantize.compute = "auto"`: each matmul is tried on this machine and this job, and the fastest that fits is taken.

And what a machine can do at all, which is asked before anything is loaded.
"""

import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from .. import config
from . import backends

MODES = ("upcast", "fp8_forward", "fp8")
WITH_KERNELS = ("fp8_forward with triton", "fp8 with triton")
"""Further modes where quantize.kernels asks for them."""
FP8_SINCE = (8, 9)  # compute capability: Ada (RTX 40), Hopper and later have FP8 tensor cores
BLOCKS_ON = 9  # torch's kernel for 1x128 by 128x128 scales exists for Hopper


def problem(section: config.Quantize, device: torch.device, world: int = 1) -> str:
    """Why this machine cannot compute as the section asks, with what to choose instead; "" where it can.

    Args:
        world: processes that train together.
    """
    if section.backend != "own":
        return backends.problem(section, device, world)
    if section.kernels == "triton" and section.compute != "upcast" and (text := _kernels_problem(device)):
        return text
    if section.compute in ("upcast", "auto") or device.type != "cuda":
        return ""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    return _problem(section, name, capability)


def _kernels_problem(device: torch.device) -> str:
    if importlib.util.find_spec("triton") is None:
        return "quantize.kernels = 'triton': triton is not installed; pip install triton, or use 'torch'"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # slow, for tests
    if device.type != "cuda" and not interpreted:
        return f"quantize.kernels = 'triton': a {device.type} cannot run them, a CUDA device can; use 'torch'"
    return ""


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
    if not able:
        return MODES[:1]
    return MODES + WITH_KERNELS if section.kernels == "triton" else MODES


def chosen(mode: str, section: config.Quantize) -> tuple[str, config.Quantize]:
    """One of `candidates` as a `compute`, and the section with its kernels."""
    compute, _, kernels = mode.partition(" with ")
    # A run that goes on may have settled on kernels which the job no longer asks for.
    kernels = kernels if section.kernels == "triton" and kernels else "torch"
    return compute, section.model_copy(update={"kernels": kernels})


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
