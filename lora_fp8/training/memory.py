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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from .. import precision, settings
from ..common import system
from ..errors import Message, UserError

RECOMPILES = 128
"""How often torch may compile a block: kinds of blocks times bucket shapes. torch's own limit of 8 is below the number
of buckets of a usual dataset; beyond it, a block that must be one graph raises."""

_aten = torch.ops.aten
ATTENTION = (
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
)
"""The operations of torch's attention kernels, as far as training uses them."""
Call = Callable[..., Any]


@dataclass(frozen=True)
class MemoryReport:
    """What `apply_` switched on."""

    gradient_checkpointing: bool
    keeps_attention: bool = False
    compiled: str = ""
    """The compiled blocks: "19 FluxTransformerBlock, ..."; "" if there are none."""

    def format_lines(self) -> list[str]:
        """Return lines for the log."""
        line = Message("gradient checkpointing on")
        if not self.gradient_checkpointing:
            line = Message("gradient checkpointing off")
        elif self.keeps_attention:
            line = Message("gradient checkpointing on, attention results kept")
        return [line, Message("compiled: {names}", names=self.compiled)] if self.compiled else [line]


def find_problem(section: settings.Memory, device: torch.device) -> str:
    """Return why this machine cannot do what the section asks for, and what to choose instead; "" if it can."""
    if section.share_in_ram and device.type != "cuda":
        return Message(
            "memory.offload = {share}: a {device} has no memory of its own; use memory.offload = 0",
            share=f"{section.share_in_ram:g}",
            device=device.type,
        )
    if section.cuda_graphs and device.type != "cuda":
        return Message(
            "memory.cuda_graphs = true: a {device} has no CUDA graphs; use memory.cuda_graphs = false",
            device=device.type,
        )
    if section.shard_base and device.type == "cuda" and not torch.distributed.is_nccl_available():
        return Message(
            "memory.shard_base = true: this PyTorch has no NCCL, which GPUs need to gather the base; use "
            "memory.shard_base = false"
        )
    if section.compile == "off":
        return ""
    if device.type == "cuda":
        needed, is_there = "triton", importlib.util.find_spec("triton") is not None
        if is_there and (line := precision.find_compiler_problem()):
            return Message("memory.compile = 'blocks': {line}, or use 'off'", line=line)
    else:
        needed = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        is_there = shutil.which(needed) is not None
    if is_there:
        return ""
    return Message(
        "memory.compile = 'blocks': torch.compile needs {name}, which is missing; install it, or use 'off'",
        name=needed,
    )


def apply_(denoiser: nn.Module, section: settings.Memory, *, is_random: bool = False) -> MemoryReport:
    """Switch on what the section asks for, in place.

    Checkpointing is non-reentrant (diffusers' default): adapters get gradients even if a region's inputs need none. The
    frozen FP8 layers dequantize again in the recomputation, with bit-identical results.

    Args:
        denoiser: with its adapters.
        section: the job's `[memory]` table.
        is_random: the denoiser draws random numbers, for dropout.

    Raises:
        UserError: this denoiser has nothing to compile.
    """
    compiled, kept = "", ATTENTION if section.keeps_attention else ()
    recompute = _make_recompute(kept, is_random) if section.recomputes else None
    if section.compile == "blocks":
        compiled = _compile_blocks_(denoiser, recompute and _make_recompute(kept, is_random, has_policy=True))
    if recompute is not None:
        # diffusers calls this with each block and its arguments.
        checkpointed = functools.partial(_run_checkpointed, recompute)
        denoiser.enable_gradient_checkpointing(checkpointed)  # type: ignore[operator]  # a method of diffusers' models
    return MemoryReport(section.recomputes, section.keeps_attention, compiled)


def _make_recompute(kept: Sequence[Any], is_random: bool, *, has_policy: bool = False) -> Call:
    """Return what runs a module so that its activations are recomputed in the backward pass.

    Args:
        kept: operations whose results are not recomputed.
        is_random: the module draws random numbers.
        has_policy: say of each operation whether it is kept, also if none is. Compiled by torch 2.11, a module without
            a policy kept 3.7 times the bytes (measured). Uncompiled, a policy costs time.
    """
    # The state of the random numbers is restored only where it matters: a CUDA graph cannot record that.
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": is_random}
    if kept or has_policy:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(kept))
    return functools.partial(checkpoint, **options)


def _run_checkpointed(recompute: Call, block: nn.Module, *args: Any) -> Any:
    compiled = block._compiled_call_impl
    # Compiled code recomputes by itself: from outside, its operations could not be told apart.
    return compiled(*args, checkpointed=True) if compiled and block.training else recompute(block, *args)


def _compile_blocks_(denoiser: nn.Module, recompute: Call | None) -> str:
    """Compile the repeated blocks, each kind once for all of its blocks.

    The first bucket shape gets code of its own; it is the preflight's and therefore the heaviest. The second shape gets
    code for any number of tokens, which all others use.

    Only training uses the compiled code. In eval mode a block runs uncompiled: previews and checks have shapes that
    come once, and are compared with programs that do not compile.
    """
    blocks = precision.find_blocks(denoiser).values()
    if not blocks:
        raise UserError(
            Message(
                "memory.compile = 'blocks': {name} has no list of repeated blocks; use memory.compile = 'off'",
                name=type(denoiser).__name__,
            )
        )
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILES)
    weights = precision.BlockStream(denoiser)
    for block in blocks:
        block._compiled_call_impl = _Compiled(block, recompute, weights if block in weights else None)
    counted = Counter(type(block).__name__ for block in blocks)
    return ", ".join(f"{count} {name}" for name, count in counted.items())


class _Compiled:
    """What a block's call runs: compiled code in training, and the block itself in eval mode.

    Compiled code gets offloaded weights by `weights`; the block itself fetches one after the other.
    """

    def __init__(self, block: nn.Module, recompute: Call | None, weights: precision.BlockStream | None) -> None:
        self.block, self.weights = block, weights
        self._plain = torch.compile(block._call_impl, fullgraph=True)
        if recompute is not None:
            self._checkpointed = torch.compile(lambda *args: recompute(block._call_impl, *args), fullgraph=True)

    def __call__(self, *args: Any, checkpointed: bool = False, **kwargs: Any) -> Any:
        if not self.block.training:
            return self.block._call_impl(*args, **kwargs)
        run = self._checkpointed if checkpointed else self._plain
        if self.weights is None:
            return run(*args, **kwargs)
        with self.weights.fetched(self.block):
            results = run(*args, **kwargs)
        self.weights.fetch_before_backward(self.block, results)
        return results


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


def reset_peak(device: torch.device) -> None:
    """Start a new measurement of the peak, where the system can: on CUDA and, for a CPU, on Linux."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        system.reset_peak_memory()


def read_peak_gib(device: torch.device) -> float:
    """Return the peak memory in GiB since `reset_peak`: of the GPU's allocator, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return system.read_peak_memory() / 2**30


def count_free_bytes(device: torch.device) -> int | None:
    """Return the free bytes of a GPU, after torch's cache is released; None for a CPU, whose system can swap."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]
