"""`lora-fp8 extract`: writes the difference of two models of one architecture as a LoRA.

Both models are streamed in the order of their files, and a layer is compared as soon as both models have yielded it.
For two models in one layout, no more than one tensor of each is in memory (of CLIP text encoders, one encoder). Layers
without a LoRA may differ too (norms, biases, layers that --layers leaves out); their share of the whole difference is
measured and reported.

The singular values of a difference come from the exact SVD or, for a large layer with a given rank, from a randomized
one with two power iterations and twice as many columns as the rank (Halko, Martinsson and Tropp, 2011). The energy is
that of the difference itself in both cases, so the share that is kept is never an estimate.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import families, precision, settings
from ..common.numbers import format_shape
from ..errors import Message, UserError, exists_already, first_few
from ..families.base import CLIP_LAYERS, ModelFamily
from ..lora_files import export_metadata, layouts
from ..lora_files.layer_names import find_text_encoder
from . import pairs
from .pairs import Spectrum
from .resize import Row

TEXT_WEIGHTS = tuple(f".{layer}.weight" for layer in CLIP_LAYERS)
EXACT = 1024
"""Shorter side of a matrix up to which the exact SVD is always used: it takes a second at this size."""

SAME = 1e-12
"""Share of a weight's energy below which a difference counts as none."""


@dataclass(frozen=True)
class Report:
    """The result of an extraction.

    Attributes:
        rows: one per layer of the file.
        left_out: tensors that differ but are not in the file.
        outside: their share of the whole difference's energy.
    """

    rows: list[Row]
    left_out: list[str]
    outside: float

    def format_lines(self) -> list[str]:
        """Return a line per layer, the worst first, then what was left out, and one for the whole."""
        rows = sorted(self.rows, key=lambda row: (row.kept, row.module))
        lines: list[str] = [
            Message("{kept}  rank {rank}  {name}", kept=f"{row.kept:8.4%}", rank=row.rank, name=row.module)
            for row in rows
        ]
        if self.left_out:
            names = first_few(self.left_out)
            lines.append(
                Message("not in the file, {share} of the difference: {names}", share=f"{self.outside:.2%}", names=names)
            )
        kept = sum(row.kept * row.energy for row in self.rows) / sum(row.energy for row in self.rows)
        count = len(self.rows)
        return [
            *lines,
            Message("{count} layers, {kept} of the energy of their difference", count=count, kept=f"{kept:.4%}"),
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON types."""
        return {"layers": [vars(row) for row in self.rows], "left_out": self.left_out, "outside": self.outside}


@dataclass(frozen=True)
class Models:
    """The two models to compare.

    Attributes:
        base, tuned: as `model.path`: diffusers folders, single files or hub ids, in any combination.
        family: the architecture of both.
        components: as `model.components`, for single files.
    """

    base: str
    tuned: str
    family: str
    components: str = ""


@dataclass(frozen=True)
class Options:
    """What the LoRA is to hold, and how it is stored.

    Attributes:
        rank: maximum rank of a layer; 0: only `energy` decides.
        energy: share of each layer's difference to keep; 0: only `rank` decides.
        layers: suffixes of the denoiser's layers; empty: the family's targets; ("all",): every layer. With the last
            two, CLIP text encoders that differ are included too.
        layout: layout of the file; empty: the family's first.
        dtype: dtype of the file.
    """

    rank: int = 0
    energy: float = 0.0
    layers: Sequence[str] = ()
    layout: str = ""
    dtype: str = "bf16"


def extract(
    given: Models, output: Path, options: Options, progress: Callable[[str], None] = lambda line: None
) -> Report:
    """Write the LoRA that turns the base into the tuned model.

    Args:
        given: the two models.
        output: the file to write.
        options: what the LoRA is to hold.
        progress: called with a line for each layer.

    Raises:
        UserError: the architectures or shapes differ, there is no difference, or the output exists.
    """
    base, tuned, layers = given.base, given.tuned, list(options.layers)
    pairs.check_size(options.rank, options.energy)
    held = pairs.parse_dtype(options.dtype, torch.bfloat16)
    if output.exists():
        raise exists_already(output)
    Family = families.get(given.family)
    models = [
        Family(
            settings.Model(family=given.family, path=path, components=given.components),
            device="cpu",
            dtype=torch.float32,
        )
        for path in (base, tuned)
    ]
    denoiser = _find_common_denoiser(models, base, tuned)
    for model in models:
        model.fetch_weights()
    wanted = {f"{name}.weight": name for name in _list_targets(Family, denoiser, layers)}
    with_text = not layers or layers == ["all"]

    state: dict[str, Tensor] = {}
    rows: list[Row] = []
    left_out: dict[str, float] = {}
    for name, difference, size in _compute_differences(models, base, tuned):
        if with_text and find_text_encoder(name, Family) and name.endswith(TEXT_WEIGHTS):
            wanted[name] = name.removesuffix(".weight")
        if not size:
            continue
        if name not in wanted:
            left_out[name] = size
            continue
        module = wanted[name]
        pair, row = _factorize(module, difference, size, options.rank, options.energy)
        state[f"{module}.lora_A.weight"], state[f"{module}.lora_B.weight"] = pair.a, pair.b
        rows.append(row)
        progress(f"{len(rows)} of {len(wanted)}: {module}, rank {row.rank}, {row.kept:.2%}")
    if not state:
        raise UserError(
            Message(
                "{base} and {tuned} do not differ in the chosen layers, so there is nothing to extract",
                base=base,
                tuned=tuned,
            )
        )

    layout = options.layout or Family.layouts[0]
    tensors = layouts.to_layout(state, 1.0, models[0], models[0].read_denoiser_config(), layout)
    _write(
        tensors,
        output,
        held,
        models[0],
        layout,
        f"extract {export_metadata.get_basename(tuned)} - {export_metadata.get_basename(base)}",
    )
    total = sum(left_out.values()) + sum(row.energy for row in rows)
    return Report(rows, sorted(left_out), sum(left_out.values()) / total)


def _find_common_denoiser(models: Sequence[ModelFamily], base: str, tuned: str) -> torch.nn.Module:
    """Return the empty denoiser of the models at `base` and `tuned`.

    Raises:
        UserError: it differs between the two.
    """
    denoisers = [family.outline for family in models]
    shapes = [{name: tuple(tensor.shape) for name, tensor in made.state_dict().items()} for made in denoisers]
    if wrong := sorted(n for n in shapes[0].keys() | shapes[1].keys() if shapes[0].get(n) != shapes[1].get(n)):
        here, there = (known.get(wrong[0]) for known in shapes)
        raise UserError(
            Message(
                "{base} and {tuned} have different architectures: {name} is {here} and {there}",
                base=base,
                tuned=tuned,
                name=wrong[0],
                here=here,
                there=there,
            )
        )
    return denoisers[0]


def _list_targets(Family: type[ModelFamily], denoiser: torch.nn.Module, layers: list[str]) -> list[str]:
    """Return the names of the denoiser's layers that `layers` (see `Options`) stands for."""
    if layers == ["all"]:
        modules = denoiser.named_modules()
        return [name for name, module in modules if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)]
    return Family.choose_adapter_layers(denoiser, layers)


def _compute_differences(models: Sequence[ModelFamily], base: str, tuned: str) -> Iterator[tuple[str, Tensor, float]]:
    """Yield (name, difference in float32, its energy) of each tensor of the models at `base` and `tuned`.

    The energy is 0 if the difference is no more than rounding.

    Raises:
        UserError: a tensor holds NaN or infinity, or as for `read_both`.
    """
    for name, before, after in chain(
        read_both(models[0].read_denoiser_tensors(), models[1].read_denoiser_tensors()),
        read_both(models[0].read_trained_text_tensors(), models[1].read_trained_text_tensors()),
    ):
        difference = after.float() - before.float()
        size = float(difference.double().square().sum())
        if not math.isfinite(size):
            raise UserError(
                Message(
                    "{name} contains NaN or infinity in {base} or {tuned}, so there is no difference to extract",
                    name=name,
                    base=base,
                    tuned=tuned,
                )
            )
        yield name, difference, size if size > SAME * float(before.double().square().sum()) else 0.0


def _factorize(module: str, difference: Tensor, size: float, rank: int, energy: float) -> tuple[pairs.Pair, Row]:
    """Return the pair for a layer's difference, and its row in the report.

    Args:
        module: the layer's name.
        difference: after minus before.
        size: energy of the difference.
        rank, energy: as in `Options`.
    """
    factors = compute_spectrum(difference, rank)
    number = factors.find_rank(energy, size) if energy else len(factors.values)
    number = min(number, rank or number)
    kept = float(factors.values[:number].square().sum()) / size
    return factors.make_pair(number), Row(module, min(difference.flatten(1).shape), number, kept, size)


def read_both(
    first: Iterator[tuple[str, precision.Weight]], second: Iterator[tuple[str, precision.Weight]]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, tensor of the first, tensor of the second) as soon as both have been read.

    Raises:
        UserError: only one of the two has a tensor, or its shapes differ.
    """
    waiting: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for items in zip_longest(first, second):
        for side, item in enumerate(items):
            if item is None:
                continue
            name, tensor = item[0], precision.to_plain(item[1])
            other = waiting[1 - side].pop(name, None)
            if other is None:
                waiting[side][name] = tensor
                continue
            left, two = (other, tensor) if side else (tensor, other)
            if left.shape != two.shape:
                raise UserError(
                    Message(
                        "{name} is {shape} in one model and {other} in the other",
                        name=name,
                        shape=format_shape(left.shape),
                        other=format_shape(two.shape),
                    )
                )
            yield name, left, two
    if alone := sorted({**waiting[0], **waiting[1]}):
        raise UserError(
            Message(
                "{names}: only one of the two models has this layer, so their architectures differ",
                names=first_few(alone),
            )
        )


def compute_spectrum(difference: Tensor, rank: int) -> Spectrum:
    """Return the singular values of a weight's difference: all, or the largest 2 x `rank` of a large one."""
    matrix = difference.flatten(1)
    columns = 2 * rank
    if rank and min(matrix.shape) > max(EXACT, columns):
        with torch.random.fork_rng(devices=[]):  # reproducible, without touching the global random state
            torch.manual_seed(0)
            u, values, v = torch.svd_lowrank(matrix, q=columns, niter=2)
        return Spectrum(u.double(), values.double(), v.T.double(), tuple(difference.shape))
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    return Spectrum(u.double(), values.double(), v.double(), tuple(difference.shape))


def _write(tensors: dict[str, Tensor], output: Path, dtype: torch.dtype, family: Any, layout: str, tool: str) -> None:
    halves = next(pair for pair in pairs.HALVES if any(name.endswith(pair) for name in tensors))
    made = {}
    for name, a in tensors.items():
        if name.endswith(halves[0]):
            module = name.removesuffix(halves[0])
            alpha = tensors.get(f"{module}.alpha")
            scale = 1.0 if alpha is None else float(alpha) / a.shape[0]
            made[module] = pairs.Pair(a, tensors[module + halves[1]], scale)
    side = family.native_resolution
    about = {
        **pairs.make_name_metadata(output),
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{family.get_architecture_name()}/lora",
        "modelspec.implementation": export_metadata.find_implementation(family, layout),
        "modelspec.resolution": f"{side}x{side}",
        "ss_network_module": export_metadata.choose_network_module(family, "lora"),
        "ss_base_model_version": family.kohya_base_version,
        "ss_v2": str(family.kohya_base_version.startswith("sd_v2")),
        "lora_fp8_layout": layout,
        "lora_fp8_tool": tool,
    }
    pairs.write(pairs.Lora(made, halves, layout == "kohya", dtype), output, dtype, about)
