"""`lora-fp8 extract`: the difference of two models of one architecture as a LoRA.

Both are streamed in the order of their files, and a layer is compared as soon as both have come: of two models in one
layout no more than one tensor of each is held (of CLIP text encoders, one encoder). Layers that no LoRA is made for may
differ as well (norms, biases, what --layers leaves out); how much of the whole difference that is, is measured and
told.

The singular values of a difference come from the exact SVD, or, where a rank is given and the layer is large, from a
randomised one with two power iterations and twice as many columns as asked for (Halko, Martinsson and Tropp, 2011). The
energy is that of the difference itself in both, so that the share that is kept is never an estimate.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import config, export, families, precision
from ..config import UserError
from ..families.base import CLIP_LAYERS
from ..layouts import text_encoder_of
from ..wording import sides
from . import pairs
from .pairs import Spectrum
from .resize import Row

TEXT_WEIGHTS = tuple(f".{layer}.weight" for layer in CLIP_LAYERS)
EXACT = 1024
"""Shorter side of a matrix up to which the exact SVD is taken, in any case: it takes a second there."""

SAME = 1e-12
"""Share of a weight's energy below which a difference is none."""


@dataclass(frozen=True)
class Report:
    """What was extracted.

    Attributes:
        rows: one for each layer of the file.
        left_out: tensors that differ and are no part of the file.
        outside: their share of the energy of the whole difference.
    """

    rows: list[Row]
    left_out: list[str]
    outside: float

    def lines(self) -> list[str]:
        rows = sorted(self.rows, key=lambda row: (row.kept, row.module))
        told = [f"{row.kept:8.4%}  rank {row.rank}  {row.module}" for row in rows]
        if self.left_out:
            names = export.first_few(self.left_out)
            told.append(f"not in the file, {self.outside:.2%} of the difference: {names}")
        kept = sum(row.kept * row.energy for row in self.rows) / sum(row.energy for row in self.rows)
        return [*told, f"{len(self.rows)} layers, {kept:.4%} of their difference's energy"]

    def to_json(self) -> dict[str, Any]:
        return {"layers": [vars(row) for row in self.rows], "left_out": self.left_out, "outside": self.outside}


def extract(
    base: str,
    tuned: str,
    output: Path,
    *,
    family_name: str,
    components: str = "",
    rank: int = 0,
    energy: float = 0.0,
    layers: Sequence[str] = (),
    layout: str = "",
    dtype: str = "bf16",
    progress: Callable[[str], None] = lambda line: None,
) -> Report:
    """Write the LoRA that turns `base` into `tuned`.

    Args:
        base, tuned: as `model.path`: diffusers folders, single files or hub ids, in any mixture.
        components: as `model.components`, for single files.
        rank: at most this; 0 leaves it to `energy`.
        energy: share of each layer's difference to keep; 0 asks for `rank` alone.
        layers: endings of the denoiser's layers; empty is what a LoRA of the family is trained on, ("all",) every
            layer. With either, CLIP text encoders that differ are part of the file too.
        layout: of the file; empty is the first of the family's.
        progress: is given a line for each layer.

    Raises:
        UserError: another architecture, other shapes, no difference, or an output that exists.
    """
    pairs.check_size(rank, energy)
    held = pairs.dtype_of(dtype, torch.bfloat16)
    if output.exists():
        raise UserError(f"{output}: exists already; choose another name with --output")
    Family = families.get(family_name)
    models = [
        Family(config.Model(family=family_name, path=path, components=components), device="cpu", dtype=torch.float32)
        for path in (base, tuned)
    ]
    denoisers = [family.empty_denoiser() for family in models]
    shapes = [{name: tuple(tensor.shape) for name, tensor in made.state_dict().items()} for made in denoisers]
    if wrong := sorted(n for n in shapes[0].keys() | shapes[1].keys() if shapes[0].get(n) != shapes[1].get(n)):
        here, there = (known.get(wrong[0]) for known in shapes)
        raise UserError(f"{base} and {tuned} are not of one architecture: {wrong[0]} is {here} and {there}")
    targets = ["all"] if list(layers) == ["all"] else Family.adapter_names(denoisers[0], list(layers))
    if targets == ["all"]:
        modules = denoisers[0].named_modules()
        targets = [name for name, module in modules if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)]
    wanted = {f"{name}.weight": name for name in targets}

    with_text = not layers or list(layers) == ["all"]

    state: dict[str, Tensor] = {}
    rows: list[Row] = []
    left_out: dict[str, float] = {}
    for name, before, after in chain(
        both(models[0].denoiser_tensors(), models[1].denoiser_tensors()),
        both(models[0].trained_text_tensors(), models[1].trained_text_tensors()),
    ):
        if with_text and text_encoder_of(name, Family) and name.endswith(TEXT_WEIGHTS):
            wanted[name] = name.removesuffix(".weight")
        difference = after.float() - before.float()
        size = float(difference.double().square().sum())
        if not math.isfinite(size):
            raise UserError(f"{name} holds NaN or infinity in {base} or {tuned}: there is no difference to take")
        if size <= SAME * float(before.double().square().sum()):
            continue
        if name not in wanted:
            left_out[name] = size
            continue
        found = spectrum(difference, rank)
        number = found.rank_for(energy, size) if energy else len(found.values)
        number = min(number, rank or number)
        pair = found.pair(number)
        module = wanted[name]
        state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"] = pair.a, pair.b
        kept = float(found.values[:number].square().sum()) / size
        rows.append(Row(module, min(difference.flatten(1).shape), number, kept, size))
        progress(f"{len(rows)} of {len(wanted)}: {module}, rank {number}, {kept:.2%}")
    if not state:
        raise UserError(f"{base} and {tuned} do not differ in the layers asked for: there is nothing to extract")

    layout = layout or Family.layouts[0]
    tensors = export.to_layout(state, 1.0, models[0], models[0].denoiser_config(), layout)
    _write(tensors, output, held, models[0], layout, f"extract {export.basename(tuned)} - {export.basename(base)}")
    total = sum(left_out.values()) + sum(row.energy for row in rows)
    return Report(rows, sorted(left_out), sum(left_out.values()) / total)


def both(
    first: Iterator[tuple[str, precision.Weight]], second: Iterator[tuple[str, precision.Weight]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, tensor of the first, of the second), as soon as both have come.

    Raises:
        UserError: a tensor that only one of them has, or of two shapes.
    """
    waiting: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for items in zip_longest(first, second):
        for side, item in enumerate(items):
            if item is None:
                continue
            name, tensor = item[0], precision.plain(item[1])
            other = waiting[1 - side].pop(name, None)
            if other is None:
                waiting[side][name] = tensor
                continue
            one, two = (other, tensor) if side else (tensor, other)
            if one.shape != two.shape:
                raise UserError(f"{name} is {sides(one.shape)} in one model and {sides(two.shape)} in the other")
            yield name, one, two
    if alone := sorted({**waiting[0], **waiting[1]}):
        raise UserError(f"{export.first_few(alone)}: only one of the two models has it; they are of two architectures")


def spectrum(difference: Tensor, rank: int) -> Spectrum:
    """The singular values of a weight's difference: all, or the largest `rank` and as many more of a large one."""
    matrix = difference.flatten(1)
    columns = 2 * rank
    if rank and min(matrix.shape) > max(EXACT, columns):
        with torch.random.fork_rng(devices=[]):  # the same file each time, and nobody else's numbers moved
            torch.manual_seed(0)
            u, values, v = torch.svd_lowrank(matrix, q=columns, niter=2)
        return Spectrum(u.double(), values.double(), v.T.double(), tuple(difference.shape))
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    return Spectrum(u.double(), values.double(), v.double(), tuple(difference.shape))


def _write(tensors: dict[str, Tensor], output: Path, dtype: torch.dtype, family: Any, layout: str, tool: str) -> None:
    halves = next(found for found in pairs.HALVES if any(name.endswith(found) for name in tensors))
    made = {}
    for name, a in tensors.items():
        if name.endswith(halves[0]):
            module = name.removesuffix(halves[0])
            alpha = tensors.get(f"{module}.alpha")
            scale = 1.0 if alpha is None else float(alpha) / a.shape[0]
            made[module] = pairs.Pair(a, tensors[module + halves[1]], scale)
    side = family.native_resolution
    about = {
        **pairs.named(output),
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{family.modelspec_architecture}/lora",
        "modelspec.implementation": export.implementation(family, layout),
        "modelspec.resolution": f"{side}x{side}",
        "ss_network_module": export.network_module(family, "lora"),
        "ss_base_model_version": family.kohya_base_version,
        "ss_v2": str(family.kohya_base_version.startswith("sd_v2")),
        "lora_fp8_layout": layout,
        "lora_fp8_tool": tool,
    }
    pairs.write(pairs.Lora(made, halves, layout == "kohya", dtype), output, dtype, about)
