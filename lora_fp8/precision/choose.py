"""`quantize.compute = "auto"`: time each matmul with this job on this machine, and choose the fastest that fits.

Also says which matmuls a machine supports at all, which is checked before anything is loaded.
"""

import importlib.util
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from .. import settings
from ..errors import Message, RunFailure, Stopped
from . import backends

MODES = ("upcast", "fp8_forward", "fp8")
WITH_KERNELS = ("fp8_forward with triton", "fp8 with triton")
"""Further modes if quantize.kernels is "triton"."""
FP8_SINCE = (8, 9)  # NVIDIA's compute capability: Ada (RTX 40), Hopper and later have FP8 tensor cores
FP8_ON_AMD = ("gfx950", "gfx1200", "gfx1201")
"""AMD's architectures that multiply e4m3fn (torch's own list: torch/testing/_internal/common_cuda.py). MI300 (gfx942)
multiplies e4m3fnuz, in which the same byte is another number: half as large, and NaN in other places."""
BLOCKS_ON = 9  # major compute capability: torch has its kernel for 1x128 by 128x128 scales on Hopper only


def find_problem(section: settings.Quantize, device: torch.device, world: int = 1) -> str:
    """Return why this machine cannot compute as the section asks, and what to choose instead; "" if it can.

    Args:
        section: the job's `[quantize]` table.
        device: device that the job runs on.
        world: number of processes that train together.
    """
    if section.backend != "own":
        return backends.find_problem(section, device, world)
    if section.kernels == "triton" and section.compute != "upcast" and (text := _find_kernels_problem(device)):
        return text
    if section.compute in ("upcast", "auto") or device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(device)
    if torch.version.hip:
        return _find_amd_problem(section, name, torch.cuda.get_device_properties(device).gcnArchName)
    return _find_cuda_problem(section, name, torch.cuda.get_device_capability(device))


def _find_kernels_problem(device: torch.device) -> str:
    if importlib.util.find_spec("triton") is None:
        return Message("quantize.kernels = 'triton': triton is not installed; run pip install triton, or use 'torch'")
    if os.environ.get("TRITON_INTERPRET") == "1":  # slow, for tests
        return ""
    if device.type != "cuda":
        return Message(
            "quantize.kernels = 'triton': these kernels need a CUDA device, not a {device}; use 'torch'",
            device=device.type,
        )
    if line := find_compiler_problem():
        return Message("quantize.kernels = 'triton': {line}, or use 'torch'", line=line)
    return ""


def find_compiler_problem() -> str:
    """Return a message if there is no C compiler, which Triton needs to build its launchers; "" if there is one.

    Searches as Triton does (triton/runtime/build.py): CC, clang, gcc.
    """
    compiler = os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc")
    if compiler:
        return ""
    return Message("Triton also needs a C compiler, but there is none; install gcc, or set CC")


def _find_amd_problem(section: settings.Quantize, name: str, architecture: str) -> str:
    architecture = architecture.partition(":")[0]  # "gfx90a:sramecc+:xnack-"
    if architecture not in FP8_ON_AMD:
        return Message(
            "quantize.compute = {compute}: {card} has no e4m3fn matmul, AMD's {others} do; use quantize.compute = "
            "'upcast', which still stores the base in FP8",
            compute=repr(section.compute),
            card=f"{name} ({architecture})",
            others=", ".join(FP8_ON_AMD),
        )
    if section.recipe == "block":
        return _describe_missing_blocks(name)
    return ""


def _describe_missing_blocks(name: str) -> str:
    return Message(
        "quantize.recipe = 'block': {card} has no kernel for it (Hopper, 9.0, has); use quantize.recipe = 'current'",
        card=name,
    )


def _find_cuda_problem(section: settings.Quantize, name: str, capability: tuple[int, int]) -> str:
    what = Message("{name} (compute capability {major}.{minor})", name=name, major=capability[0], minor=capability[1])
    if capability < FP8_SINCE:
        return Message(
            "quantize.compute = {compute}: {card} has no FP8 tensor cores (8.9 and newer have); use "
            "quantize.compute = 'upcast', which still stores the base in FP8",
            compute=repr(section.compute),
            card=what,
        )
    if section.recipe == "block" and capability[0] != BLOCKS_ON:
        return _describe_missing_blocks(what)
    return ""


def list_candidates(section: settings.Quantize, device: torch.device) -> tuple[str, ...]:
    """Return the matmuls that "auto" tries on this device."""
    able = not find_problem(section.model_copy(update={"compute": "fp8"}), device)
    if not able:
        return MODES[:1]
    return MODES + WITH_KERNELS if section.kernels == "triton" else MODES


def split_mode(mode: str, section: settings.Quantize) -> tuple[str, settings.Quantize]:
    """Split one of `list_candidates` into a `compute` and the section with its kernels."""
    compute, _, kernels = mode.partition(" with ")
    # A resumed run may have chosen kernels that the job no longer asks for.
    kernels = kernels if section.kernels == "triton" and kernels else "torch"
    return compute, section.model_copy(update={"kernels": kernels})


def time_modes(
    modes: Sequence[str],
    switch: Callable[[str], None],
    step: Callable[[], None],
    device: torch.device,
    repeats: int = 3,
) -> tuple[dict[str, float], dict[str, str]]:
    """Time one forward and backward in each of `modes`: the median of a few after one to warm up.

    A mode that raises is excluded, whatever it raised: kernels may fail to compile, or torch may lack the operator.

    Args:
        modes: the modes to time.
        switch: makes the denoiser compute in a mode.
        step: runs one forward and backward.
        device: device that they run on.
        repeats: timed steps per mode.

    Returns:
        mode -> seconds, infinite if it failed; and mode -> reason, for those that failed.
    """
    seconds: dict[str, float] = {}
    failed: dict[str, str] = {}
    for mode in modes:
        taken = []
        try:
            switch(mode)
            for _ in range(1 + repeats):
                _wait(device)
                started = time.perf_counter()
                step()
                _wait(device)
                taken.append(time.perf_counter() - started)
            seconds[mode] = statistics.median(taken[1:])
        except Stopped:
            raise
        except Exception as error:
            seconds[mode], failed[mode] = float("inf"), _describe_error(error)
        if mode in failed and device.type == "cuda":  # not earlier: the error's traceback held the step's tensors
            torch.cuda.empty_cache()
    return seconds, failed


def _describe_error(error: Exception) -> str:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return OUT_OF_MEMORY
    if isinstance(error, RunFailure):  # one of our own messages, complete as it is
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}".removesuffix(": ")


OUT_OF_MEMORY = Message("out of memory")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
