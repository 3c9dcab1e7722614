"""Which library stores and multiplies the base: this project, torchao or TransformerEngine.

This module knows the other two without importing them: what each stores, in how many bytes, and what it requires of a
machine. So `lora-fp8 plan` can show a job for a GPU on a machine that has none.

| backend | weight | forward | gradient for x | kept for the backward |
|---|---|---|---|---|
| own | our bytes | dequantized, or FP8 | dequantized, or FP8 | the bytes |
| torchao | its weight-only tensors | dequantized | dequantized | the dequantized weight |
| te | its FP8 parameters | FP8 | FP8 | the bytes, and on Hopper a transposed copy |
"""

import importlib
import importlib.util

import torch
from torch import nn

from .. import settings
from ..errors import Message, Template
from .formats import Format
from .frozen import find_frozen_layers
from .linear import AmaxHistory, FrozenLinear

TE_SCALE = {"delayed": "tensor", "current": "tensor", "block": "128x128", "mxfp8": "1x32"}
"""Recipe -> the block that shares a scale in TransformerEngine's weights."""


def import_linear_class(backend: str) -> type[FrozenLinear]:
    """Return the layer class of a backend, importing its library."""
    if backend == "torchao":
        from .backend_torchao import TorchaoLinear

        return TorchaoLinear
    if backend == "te":
        from .backend_te import TeLinear

        return TeLinear
    return FrozenLinear


def make_amax_history(denoiser: nn.Module) -> AmaxHistory:
    """Return the delayed recipe's history of a filled denoiser, for any backend; to be created once."""
    if any(layer.backend == "te" for layer in find_frozen_layers(denoiser).values()):
        from .backend_te import TeAmaxHistory

        return TeAmaxHistory(denoiser)
    return AmaxHistory(denoiser)


def choose_te_alignment(section: settings.Quantize) -> int:
    """Return the number that both sides of a weight must be a multiple of in TransformerEngine's FP8 matmuls."""
    return 32 if section.recipe == "mxfp8" else 16


def count_bytes(backend: str, form: Format, shape: tuple[int, int]) -> int:
    """Return the bytes that a weight of this shape (N, K) takes, with its scales."""
    if backend == "own" or form.storage == "fp8" and backend == "torchao":
        return form.count_bytes(shape)
    rows, columns = form.get_block(shape)
    scales = -(-shape[0] // rows) * -(-shape[1] // columns)
    if backend == "torchao":
        return form.count_bytes(shape) + scales  # torchao's int8 has zero points, which are all zero here
    # Twice, for the transposed copy that the backward multiplies: MXFP8 always has it, other recipes on Hopper.
    return 2 * (shape[0] * shape[1] + scales * (1 if form.scale == "1x32" else 4))


def find_problem(section: settings.Quantize, device: torch.device, world: int = 1) -> str:
    """Return why this machine cannot run the section's backend, and what to choose instead; "" if it can.

    Args:
        section: the job's `[quantize]` table.
        device: device that the job runs on.
        world: number of processes that train together.
    """
    if section.storage not in settings.SCALES or section.backend == "own":
        return ""
    if section.backend != "torchao":
        if device.type == "cuda" and importlib.util.find_spec("transformer_engine") is not None:
            if line := _find_recipe_problem(
                section.recipe, torch.cuda.get_device_capability(device), torch.version.cuda
            ):
                name = torch.cuda.get_device_name(device)
                return Message(
                    "quantize.recipe = {recipe}: {card} {line}", recipe=repr(section.recipe), card=name, line=line
                )
        line = _find_te_problem(section, device, world)
    elif importlib.util.find_spec("torchao") is None:
        line = Message("torchao is not installed; run pip install 'lora-fp8[torchao]', or use quantize.backend = 'own'")
    else:
        return ""
    return Message("quantize.backend = {backend}: {line}", backend=repr(section.backend), line=line) if line else ""


def _find_te_problem(section: settings.Quantize, device: torch.device, world: int) -> str:
    """Return why TransformerEngine cannot be used here, and what to do; "" if it can."""
    if device.type != "cuda":
        return Message(
            "TransformerEngine needs a CUDA GPU, but this job runs on a {device}; use quantize.backend = 'own'",
            device=device.type,
        )
    if importlib.util.find_spec("transformer_engine") is None:
        return Message(
            "TransformerEngine is not installed; run pip install --no-build-isolation 'lora-fp8[te]', or use "
            "quantize.backend = 'own'"
        )
    if section.recipe == "delayed" and world > 1:
        # Each process would have its own history, and a checkpoint has room for one.
        return Message(
            "recipe 'delayed' trains in one process only, not in {count}; use another quantize.recipe, or "
            "quantize.backend = 'own'",
            count=world,
        )
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:  # such as a build for another torch or CUDA
        line = str(error).strip().splitlines()[:1]
        return Message(
            "TransformerEngine cannot be imported ({why}); use quantize.backend = 'own'",
            why=f"{type(error).__name__}: {''.join(line)}",
        )
    return ""


def _find_recipe_problem(recipe: str, capability: tuple[int, int], cuda: str | None) -> str:
    """Return what TransformerEngine's (2.20) own check of a recipe would refuse, and what to choose instead."""
    template = Template(
        "has compute capability {has}, but recipe {recipe} needs {needed}; use quantize.recipe = 'current', or "
        "quantize.backend = 'own'"
    )
    has = f"{capability[0]}.{capability[1]}"
    if recipe == "mxfp8":
        return "" if (10, 0) <= capability < (12, 0) else template(has=has, recipe="'mxfp8'", needed="10.x")
    if recipe == "block":
        if capability < (9, 0):
            return template(has=has, recipe="'block'", needed="9.0")
        if tuple(int(part) for part in (cuda or "0").split(".")[:2]) >= (12, 9):
            return ""
        return Message(
            "runs CUDA {has}, but recipe 'block' needs 12.9; use quantize.recipe = 'current', or quantize.backend = "
            "'own'",
            has=cuda,
        )
    if capability >= (8, 9):
        return ""
    return Message(
        "has compute capability {has}, but FP8 needs 8.9; use quantize.backend = 'own' with quantize.compute = "
        "'upcast'",
        has=has,
    )
