"""Saving memory: gradient checkpointing, and figures that tell before step 1 whether a job fits.

Also applies `torch.compile` to the blocks that a denoiser repeats.
"""

import contextlib
import functools
import importlib.util
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import precision, settings
from ..common import system
from ..errors import Message, UserError

RECOMPILES = 128
"""How often torch may compile a block: kinds of blocks times bucket shapes. torch's own limit of 8 is below the number
of buckets of a usual dataset; beyond it, a block that must be one graph raises."""


@dataclass(frozen=True)
class MemoryReport:
    """What `apply_` switched on."""

    gradient_checkpointing: bool
    compiled: str = ""
    """The compiled blocks: "19 FluxTransformerBlock, ..."; "" if there are none."""

    def lines(self) -> list[str]:
        """Return lines for the log."""
        line = Message("gradient checkpointing on")
        if not self.gradient_checkpointing:
            line = Message("gradient checkpointing off")
        return [line, Message("compiled: {names}", names=self.compiled)] if self.compiled else [line]


def problem(section: settings.Memory, device: torch.device) -> str:
    """Return why this machine cannot do what the section asks for, and what to choose instead; "" if it can."""
    if section.offload and device.type != "cuda":
        return Message(
            "memory.offload = {share}: a {device} has no memory of its own; use memory.offload = 0",
            share=f"{section.offload:g}",
            device=device.type,
        )
    if section.cuda_graphs and device.type != "cuda":
        return Message(
            "memory.cuda_graphs = true: a {device} has no CUDA graphs; use memory.cuda_graphs = false",
            device=device.type,
        )
    if section.compile == "off":
        return ""
    if device.type == "cuda":
        needed, is_there = "triton", importlib.util.find_spec("triton") is not None
        if is_there and (line := precision.missing_c_compiler()):
            return Message("memory.compile = 'blocks': {line}, or use 'off'", line=line)
    else:
        needed = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        is_there = shutil.which(needed) is not None
    if is_there:
        return ""
    return Message(
        "memory.compile = 'blocks': there is no {name}, which torch.compile needs; install it, or use 'off'",
        name=needed,
    )


def apply_(denoiser: nn.Module, section: settings.Memory) -> MemoryReport:
    """Switch on what the section asks for, in place.

    Checkpointing is non-reentrant (diffusers' default): adapters get gradients even if a region's inputs need none. The
    frozen FP8 layers dequantize again in the recomputation, with bit-identical results.

    Raises:
        UserError: this denoiser has nothing to compile.
    """
    if section.gradient_checkpointing:
        denoiser.enable_gradient_checkpointing()  # type: ignore[operator]  # a method of diffusers' models
    compiled = _compile_blocks_(denoiser, section) if section.compile == "blocks" else ""
    return MemoryReport(section.gradient_checkpointing, compiled)


def _compile_blocks_(denoiser: nn.Module, section: settings.Memory) -> str:
    """Compile the repeated blocks, each kind once for all of its blocks.

    The first bucket shape gets code of its own; it is the preflight's and therefore the heaviest. The second shape gets
    code for any number of tokens, which all others use.

    Only training uses the compiled code. In eval mode a block runs uncompiled: previews and checks have shapes that
    come once, and are compared with programs that do not compile.
    """
    # diffusers' own lists: the one of its regional compilation, or else the blocks that must not be split.
    kinds = getattr(denoiser, "_repeated_blocks", None) or getattr(denoiser, "_no_split_modules", None) or ()
    blocks = [module for module in denoiser.modules() if type(module).__name__ in kinds]
    if not blocks:
        raise UserError(
            Message(
                "memory.compile = 'blocks': {name} names no repeated blocks; use memory.compile = 'off'",
                name=type(denoiser).__name__,
            )
        )
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILES)
    for block in blocks:
        block.compile(fullgraph=True, mode="reduce-overhead" if section.cuda_graphs else None)
        block._compiled_call_impl = functools.partial(_in_training, block, block._compiled_call_impl)
    if section.cuda_graphs:
        # A recorded graph's outputs live until its next replay: this marks that the previous forward is done.
        denoiser.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    counted = Counter(type(block).__name__ for block in blocks)
    names = ", ".join(f"{count} {name}" for name, count in counted.items())
    return Message("{names} with CUDA graphs", names=names) if section.cuda_graphs else names


@contextlib.contextmanager
def uncompiled(denoiser: nn.Module) -> Iterator[None]:
    """Run the blocks that `apply_` compiled without their compiled code, inside this context."""
    compiled = {module: module._compiled_call_impl for module in denoiser.modules() if module._compiled_call_impl}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, code in compiled.items():
            module._compiled_call_impl = code


def _in_training(block: nn.Module, compiled: Any, *args: Any, **kwargs: Any) -> Any:
    return (compiled if block.training else block._call_impl)(*args, **kwargs)


def reset_peak(device: torch.device) -> None:
    """Start a new measurement of the peak, where the system can: on CUDA and, for a CPU, on Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        system.reset_peak_memory()


def peak_gib(device: torch.device) -> float:
    """Return the peak memory in GiB since `reset_peak`: of the GPU's allocator, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return system.read_peak_memory() / 2**30


def free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a GPU, after torch's cache is released; None for a CPU, whose system can swap."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def out_of_memory_advice(device: torch.device) -> str:
    """Return a sentence for a job that does not fit: how much memory it used, and what to change first."""
    return Message(
        "out of memory on {device} ({size} GiB were in use); in this order: memory.gradient_checkpointing = true, a "
        "smaller train.batch_size, quantize.storage = 'fp8', memory.offload = 0.5, a smaller dataset.resolution, a "
        "smaller adapter.rank",
        device=device,
        size=f"{peak_gib(device):.1f}",
    )
