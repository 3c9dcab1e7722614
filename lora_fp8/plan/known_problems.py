"""Combinations of software and hardware that are known not to work, each with its fix, as data."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import Message

if TYPE_CHECKING:
    from .machine import Machine


@dataclass(frozen=True)
class Known:
    """A combination that is known not to work.

    Attributes:
        applies: returns True if this machine has it.
        text: what it is and what to do.
        blocks: True if no training should be started with it.
    """

    applies: Callable[[Machine], bool]
    text: Message
    blocks: bool = False


def find_known_problems(machine: Machine) -> Iterator[Known]:
    """Yield those of `KNOWN` that this machine has."""
    yield from (known for known in KNOWN if known.applies(machine))


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version: "2.13.0+cu128" -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def _parse_torch_version(machine: Machine) -> tuple[int, ...]:
    return parse_version(machine.versions.get("torch", ""))


def _is_too_new_for_driver(machine: Machine) -> bool:
    """Return True if torch's CUDA is newer than what the driver runs; minor versions of one CUDA work together."""
    built, runs = parse_version(machine.torch_cuda), parse_version(machine.driver_cuda)
    return bool(built and runs and built[0] > runs[0])


def _has_no_kernels(machine: Machine) -> bool:
    """Return True if torch has kernels for none of a card's architectures.

    Binaries run on later minor versions of their major version, PTX on every later card (NVIDIA, CUDA C++ Programming
    Guide, "Binary Compatibility" and "PTX Compatibility").
    """
    built = [
        (kind, int(number[:-1]), int(number[-1]))
        for kind, number in _ARCHITECTURE.findall(" ".join(machine.torch_archs))
    ]
    for gpu in machine.gpus:
        if gpu.capability is None or not built:
            continue
        fits = (
            (major, minor) <= gpu.capability
            if kind == "compute"
            else major == gpu.capability[0] and minor <= gpu.capability[1]
            for kind, major, minor in built
        )
        if not any(fits):
            return True
    return False


_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)")

KNOWN = (
    # Loading weights could run code or corrupt memory: CVE-2025-32434 (fixed in 2.6), CVE-2026-24747 (fixed in 2.10).
    # pyproject.toml asks for 2.11, which an older environment may not have.
    Known(
        lambda machine: () < _parse_torch_version(machine) < (2, 11),
        Message("torch is older than 2.11, the oldest supported version: pip install --upgrade torch"),
        blocks=True,
    ),
    # The most frequent report: pip installs a CPU build on Windows, or an environment was made without CUDA.
    Known(
        lambda machine: bool(machine.driver and _parse_torch_version(machine) and not machine.torch_cuda),
        Message(
            "there is an NVIDIA GPU, but this torch is a build without CUDA. Install one with CUDA: "
            "https://pytorch.org/get-started/locally"
        ),
        blocks=True,
    ),
    # NVIDIA, CUDA Compatibility: a driver runs CUDA of its own major version, and older.
    Known(
        _is_too_new_for_driver,
        Message(
            "torch needs a newer CUDA version than the NVIDIA driver supports. Update the driver, or install "
            "another torch"
        ),
        blocks=True,
    ),
    # RTX 50 (sm_120) with torch for CUDA 12.6 and older: kohya_ss issues 3096, 3159, 3176.
    Known(
        _has_no_kernels,
        Message("torch has no kernels for this GPU (RTX 50 needs CUDA 12.8 or newer). Install a newer build of torch"),
        blocks=True,
    ),
    # torch sees no card although all fits: a container was started without it, or CUDA_VISIBLE_DEVICES hides it.
    Known(
        lambda machine: bool(
            machine.driver and machine.torch_cuda and not machine.is_usable and not _is_too_new_for_driver(machine)
        ),
        Message("torch cannot use the GPU. Check CUDA_VISIBLE_DEVICES, and start containers with --gpus all"),
        blocks=True,
    ),
    # Inductor's FP8 stores through a transpose were miscompiled to NaN from 2.14 on: triton issue 11111.
    Known(
        lambda machine: _parse_torch_version(machine) >= (2, 14) and bool(machine.gpus),
        Message("torch 2.14 and newer may compile FP8 incorrectly. Keep memory.compile = 'off', or install torch 2.13"),
    ),
    # With a full card the driver uses RAM, and steps take minutes: musubi-tuner 685, sd-scripts 834 and 1088, kohya_ss
    # 961, 1288 and 2704.
    Known(
        lambda machine: platform.system() == "Windows" and bool(machine.driver),
        Message(
            "on Windows, a full GPU falls back to RAM and becomes very slow. In the NVIDIA Control Panel, set "
            "CUDA - Sysmem Fallback Policy to Prefer No Sysmem Fallback"
        ),
    ),
    # torch 2.13 honours it wherever weights_only is not given, and runs the code in a pickle.
    Known(
        lambda machine: os.environ.get("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "").lower() in ("1", "y", "yes", "true"),
        Message("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD is set, so opening a .pt file can run code. Unset it"),
    ),
)
