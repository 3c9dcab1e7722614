"""What is traded for memory: gradient checkpointing, and the figures that tell before step 1 whether a job fits.

And `torch.compile` of the blocks that a denoiser repeats.
"""

import functools
import importlib.util
import os
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import config

RECOMPILES = 128
"""How often one block may be compiled before torch gives up: kinds of blocks times shapes of buckets. Torch's own 8 are
fewer than the buckets of a common dataset, and beyond them a block that must be one graph raises."""


@dataclass(frozen=True)
class MemoryReport:
    """What `apply_` did."""

    gradient_checkpointing: bool
    compiled: str = ""
    """the compiled blocks: "19 FluxTransformerBlock, ..."; "" where none is"""

    def lines(self) -> list[str]:
        lines = [f"gradient checkpointing {'on' if self.gradient_checkpointing else 'off'}"]
        return [*lines, f"compiled: {self.compiled}"] if self.compiled else lines


def problem(section: config.Memory, device: torch.device) -> str:
    """Why this machine cannot do what the section asks for, with what to choose instead; "" where it can."""
    if section.offload and device.type != "cuda":
        return f"memory.offload = {section.offload:g}: a {device.type} has no memory of its own; use memory.offload = 0"
    if section.cuda_graphs and device.type != "cuda":
        return f"memory.cuda_graphs = true: a {device.type} has no CUDA graphs; use memory.cuda_graphs = false"
    if section.compile == "off":
        return ""
    if device.type == "cuda":
        needed, found = "triton", importlib.util.find_spec("triton")
    else:
        needed = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        found = shutil.which(needed)
    if found:
        return ""
    return f"memory.compile = 'blocks': there is no {needed}, which torch.compile needs; install it, or use 'off'"


def apply_(denoiser: nn.Module, section: config.Memory) -> MemoryReport:
    """Switch on, in place, what the section asks for.

    Non-reentrant checkpointing (diffusers' default): a region's inputs need no gradient for its adapters to get theirs,
    and the frozen FP8 layers decode once more in the recomputation, bit for bit as before.

    Raises:
        config.UserError: there is nothing to compile in this denoiser.
    """
    if section.gradient_checkpointing:
        denoiser.enable_gradient_checkpointing()
    compiled = _compile_blocks_(denoiser, section) if section.compile == "blocks" else ""
    return MemoryReport(section.gradient_checkpointing, compiled)


def _compile_blocks_(denoiser: nn.Module, section: config.Memory) -> str:
    """Compiles the repeated blocks, each kind once for all of its blocks.

    The first shape of a bucket gets code of its own, which is the preflight's and therefore the heaviest; the second
    gets code for any number of tokens, and the others use that.

    Compiled is what trains. In eval mode a block is called as it is: previews and checks come in shapes of their own,
    once, and are compared with programs that do not compile.
    """
    # diffusers' own list, which its regional compilation uses; blocks that must not be split are the same blocks.
    kinds = getattr(denoiser, "_repeated_blocks", None) or getattr(denoiser, "_no_split_modules", None) or ()
    blocks = [module for module in denoiser.modules() if type(module).__name__ in kinds]
    if not blocks:
        raise config.UserError(
            f"memory.compile = 'blocks': {type(denoiser).__name__} names no repeated blocks; use memory.compile = 'off'"
        )
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILES)
    for block in blocks:
        block.compile(fullgraph=True, mode="reduce-overhead" if section.cuda_graphs else None)
        block._compiled_call_impl = functools.partial(_in_training, block, block._compiled_call_impl)
    if section.cuda_graphs:
        # What a recorded graph has given lives until the next replay: this says that a forward is over and done with.
        denoiser.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    counted = Counter(type(block).__name__ for block in blocks)
    return ", ".join(f"{count} {name}" for name, count in counted.items()) + " with CUDA graphs" * section.cuda_graphs


def _in_training(block: nn.Module, compiled: Any, *args: Any, **kwargs: Any) -> Any:
    return (compiled if block.training else block._call_impl)(*args, **kwargs)


def reset_peak(device: torch.device) -> None:
    """Begin a new measurement of the peak, where the system can: on CUDA and, for a CPU, on Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): VmHWM begins at VmRSS again


def peak_gib(device: torch.device) -> float:
    """Peak memory in GiB since `reset_peak`: of the GPU's allocator, or resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "linux":
        # Not ru_maxrss, which keeps over exec the peak of the process that started this one.
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**20
    import resource  # a Unix module: there is none on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # bytes on macOS


def free_bytes(device: torch.device) -> int | None:
    """What is free on a GPU, torch's own reserve given back first; None for a CPU, whose system swaps."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def out_of_memory_advice(device: torch.device) -> str:
    """One sentence for a job that does not fit: what it took and what to change first."""
    return (
        f"out of memory on {device} ({peak_gib(device):.1f} GiB were in use); in this order: "
        "memory.gradient_checkpointing = true, a smaller train.batch_size, quantize.storage = 'fp8', "
        "memory.offload = 0.5, a smaller dataset.resolution, a smaller adapter.rank"
    )
