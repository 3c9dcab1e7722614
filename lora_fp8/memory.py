"""What is traded for memory: gradient checkpointing, and the figures that tell before step 1 whether a job fits."""

import resource
import sys
from dataclasses import dataclass

import torch
from torch import nn

from . import config


@dataclass(frozen=True)
class MemoryReport:
    """What `apply_` did."""

    gradient_checkpointing: bool

    def lines(self) -> list[str]:
        return [f"gradient checkpointing {'on' if self.gradient_checkpointing else 'off'}"]


def apply_(denoiser: nn.Module, section: config.Memory) -> MemoryReport:
    """Switch on, in place, what the section asks for.

    Non-reentrant checkpointing (diffusers' default): a region's inputs need no gradient for its adapters to get theirs,
    and the frozen FP8 layers decode once more in the recomputation, bit for bit as before.
    """
    if section.gradient_checkpointing:
        denoiser.enable_gradient_checkpointing()
    return MemoryReport(section.gradient_checkpointing)


def reset_peak(device: torch.device) -> None:
    """Begin a new measurement of the peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Peak memory in GiB: of the GPU's allocator since `reset_peak`, or the process's resident peak on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def out_of_memory_advice(device: torch.device) -> str:
    """One sentence for a job that does not fit: what it took and what to change first."""
    return (
        f"out of memory on {device} ({peak_gib(device):.1f} GiB were in use); in this order: "
        "memory.gradient_checkpointing = true, a smaller train.batch_size, quantize.storage = 'fp8', "
        "a smaller dataset.resolution, a smaller adapter.rank"
    )
