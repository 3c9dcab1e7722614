"""Measures the errors of quantization, per layer and on inputs from the real model, and which storage would do.

Two kinds of figures answer two questions:

* For one layer: how far is W_quantized x from W x? The file's weights are streamed past the quantized denoiser and
  compared one layer at a time, so that two models are never in memory together. The inputs are rows that the layer gets
  inside the quantized denoiser, as in training. They carry the errors of earlier layers, but both sides of the
  comparison share them, so that only this layer's own error is measured.
* For the whole denoiser: `compute_relative_error` compares two predictions, in which the layers' errors add up.

Everything is summed in float64, so that rows of 1e30 or of 1e-30 give valid figures, and the same measurement gives the
same numbers. The bias is not quantized and is left out: it would only make the errors look smaller.

The output has two figures, because one row of huge weights dominates every sum of squares. `output_error` is over all
outputs together. In `feature_error`, each output feature counts the same, relative to its own size (but at least that
of the median feature). The larger one is the `damage`.

Shapes: N output features (rows of the weight), K input features, M sampled inputs (tokens).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import Message
from ..settings import SCALES
from .backends import count_bytes
from .formats import Format, make_nonfinite_error
from .frozen import FrozenLayer, decoded_compute, find_frozen_layers
from .linear import FrozenLinear
from .matmul import forget_shared
from .quantized import Weight, to_plain

NUM_INPUTS = 256
"""Rows of input kept per layer, on the CPU: 1.2 GB for FLUX in bf16."""
EXTREME = 100.0
"""A row is extreme if its largest weight is this many times that of the median row."""


@dataclass(frozen=True)
class LayerError:
    """The error that one layer's storage causes. Errors are relative rms; 0.03 is 3 %."""

    name: str
    storage: str
    """As in quantize.override: "fp8 row"."""
    compute: str
    num_weights: int
    num_bytes: int
    """Bytes of weight and scales."""
    num_inputs: int
    """Number of sampled input rows; 0 if the layer was never called."""
    weight_error: float
    output_error: float | None
    """Error of W x over all outputs together; None if the layer was never called."""
    feature_error: float | None
    """Rms over features of each output feature's error; None if the layer was never called."""
    multiplied_error: float | None
    """`output_error` with the rounding of the FP8 matmul; None if the layer is not multiplied in FP8."""
    flushed: float
    """Share of the nonzero weights that are stored as zero."""
    zero_rows: int
    denormal_rows: int
    """Number of rows whose largest weight is below the smallest normal number of the compute dtype."""
    extreme_rows: int
    better: str = ""
    """The cheapest storage within the bound, if this one is not: "int8 1x128" or "bf16"; else ""."""
    better_damage: float = 0.0
    better_bytes: int = 0

    @property
    def damage(self) -> float:
        """Return the larger error of the output; the weight's error if the layer was never called."""
        if self.output_error is None or self.feature_error is None:
            return self.weight_error
        return max(self.output_error, self.feature_error)

    @property
    def override(self) -> dict[str, str]:
        """Return the entry of quantize.override that changes this layer's storage."""
        return {f"^{self.name}": self.better}


def capture_inputs(
    denoiser: nn.Module, forwards: Sequence[Callable[[], Any]], num_inputs: int = NUM_INPUTS
) -> dict[str, Tensor]:
    """Sample rows of each frozen layer's input in these forwards.

    Rows are taken evenly from each forward, at the same places each time. Weights are dequantized whatever the plan
    says, so that the rows do not depend on the matmul.

    Args:
        denoiser: the quantized denoiser.
        forwards: functions that call it.
        num_inputs: most rows per layer.

    Returns:
        Layer name -> rows (M, K) on the CPU, M at most `num_inputs`.
    """
    share = max(1, num_inputs // max(1, len(forwards)))
    taken: dict[str, list[Tensor]] = {}

    def make_keeper(name: str) -> Callable[..., None]:
        def keep(module: FrozenLayer, args: tuple[Tensor, ...]) -> None:
            x_MK = module.make_input_rows(args[0].detach())
            taken.setdefault(name, []).append(_select_evenly(x_MK, share).cpu())

        return keep

    hooks = [layer.register_forward_pre_hook(make_keeper(name)) for name, layer in find_frozen_layers(denoiser).items()]
    try:
        with torch.no_grad(), decoded_compute(denoiser):
            for forward in forwards:
                forward()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: _select_evenly(torch.cat(rows), num_inputs) for name, rows in taken.items()}


def measure_layer_errors(
    denoiser: nn.Module,
    tensors: Iterable[tuple[str, Weight]],
    inputs: Mapping[str, Tensor],
    dtype: torch.dtype,
    bound: float = math.inf,
) -> list[LayerError]:
    """Compare every frozen layer with the file's weights. Returns the errors, the worst first.

    Args:
        denoiser: quantized and filled.
        tensors: the stream that it was filled from.
        inputs: from `capture_inputs`.
        dtype: compute dtype, in which the unquantized base would store its weights.
        bound: layers whose damage exceeds it get a `better` storage.

    Raises:
        ValueError: a layer's weight or input has NaN or infinity (names the layer), or the stream lacks layers.
    """
    layers = find_frozen_layers(denoiser)
    errors = []
    for name, tensor in tensors:
        layer_name = name.removesuffix(".weight")
        if layer_name == name or layer_name not in layers:
            continue
        layer = layers.pop(layer_name)
        errors.append(_measure_layer_error(layer_name, layer, to_plain(tensor), inputs.get(layer_name), dtype, bound))
    forget_shared()
    if layers:
        raise ValueError(f"the stream of weights lacks {len(layers)} quantized layers (first: {next(iter(layers))})")
    return sorted(errors, key=lambda error: (-error.damage, error.name))


def list_alternatives(form: Format, shape: tuple[int, int]) -> list[Format | None]:
    """Return the storages to try instead for a layer of this shape (N, K), the cheapest first; None is bf16."""
    int8 = next(form for form in (Format("int8", scale) for scale in SCALES["int8"]) if not form.find_problem(shape))
    finer = form.storage != "int8" or form.get_block(shape)[1] > int8.get_block(shape)[1]
    return [int8, None] if finer else [None]


def compute_relative_error(got: Tensor, expected: Tensor) -> float:
    """Return |got - expected| / |expected|, computed in float64."""
    expected = expected.double()
    return _compute_ratio((got.double() - expected).square().sum(), expected.square().sum())


# -- one layer ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sums:
    """Sums of squares per row of a weight, float64 (N,): of weight, weight error, output and output error."""

    weight: Tensor
    weight_off: Tensor
    output: Tensor
    output_off: Tensor
    flushed: int

    def compute_output_error(self) -> float:
        return _compute_ratio(self.output_off.sum(), self.output.sum())

    def compute_feature_error(self) -> float:
        heard = self.output > 0
        if not heard.any():
            return self.compute_output_error()
        # Features smaller than the median one are measured against the median: their errors have no visible effect.
        floor = self.output[heard].median()
        return (self.output_off / self.output.clamp(min=floor))[heard].mean().sqrt().item()

    def compute_damage(self, called: bool) -> float:
        if called:
            return max(self.compute_output_error(), self.compute_feature_error())
        return _compute_ratio(self.weight_off.sum(), self.weight.sum())


def _measure_layer_error(
    name: str, layer: FrozenLayer, tensor: Tensor, x_MK: Tensor | None, dtype: torch.dtype, bound: float
) -> LayerError:
    device = layer.device
    tensor = tensor.to(device).flatten(1)
    plain_NK = tensor.to(dtype)
    if not plain_NK.isfinite().all():
        raise make_nonfinite_error(name)
    shape = layer.matrix_shape
    if x_MK is None or not x_MK.numel():
        called, x_MK = False, plain_NK.new_zeros(0, shape[1])
    else:
        called, x_MK = True, x_MK.to(device)
    if not x_MK.isfinite().all():
        raise ValueError(f"{name}: its input has NaN or infinity; is the base model whole?")
    sums = _compare(name, plain_NK, layer.weight.flatten(1), x_MK)
    amax_N = plain_NK.abs().amax(dim=1).double()
    filled_N = amax_N[amax_N > 0]
    typical = filled_N.median() if len(filled_N) else amax_N.new_zeros(())
    better = (
        _Better() if sums.compute_damage(called) <= bound else _find_better(name, layer, tensor, x_MK, dtype, bound)
    )
    multiplied = None
    if called and layer.compute != "upcast":
        multiplied = _measure_multiplied_error(layer, plain_NK, x_MK)
    return LayerError(
        name=name,
        storage=str(layer.form),
        compute=layer.compute,
        num_weights=plain_NK.numel(),
        num_bytes=count_bytes(layer.backend, layer.form, shape),
        num_inputs=len(x_MK),
        weight_error=_compute_ratio(sums.weight_off.sum(), sums.weight.sum()),
        output_error=sums.compute_output_error() if called else None,
        feature_error=sums.compute_feature_error() if called else None,
        multiplied_error=multiplied,
        flushed=sums.flushed / max(1, int((plain_NK != 0).sum())),
        zero_rows=int((amax_N == 0).sum()),
        denormal_rows=int(((amax_N > 0) & (amax_N < torch.finfo(dtype).tiny)).sum()),
        extreme_rows=int((amax_N > EXTREME * typical).sum()),
        better=better.storage,
        better_damage=better.damage,
        better_bytes=better.num_bytes,
    )


class _Better(NamedTuple):
    """A storage within the bound, its damage, and its bytes; "" if none was looked for."""

    storage: str = ""
    damage: float = 0.0
    num_bytes: int = 0


def _find_better(
    name: str, layer: FrozenLayer, tensor: Tensor, x_MK: Tensor, dtype: torch.dtype, bound: float
) -> _Better:
    """Find the cheapest storage of a layer whose damage is within the bound.

    Args:
        name, layer: the layer, whose own storage exceeds the bound.
        tensor: its unquantized weight (N, K).
        x_MK: rows of its input; none if it was never called.
        dtype: compute dtype.
        bound: as in `measure_layer_errors`.
    """
    plain_NK, shape = tensor.to(dtype), layer.matrix_shape
    # A layer that TransformerEngine does not store is our own; see `plan`. So is a convolution, whose matrix is rounded
    # like any other.
    make_layer = type(layer) if isinstance(layer, FrozenLinear) and layer.backend != "te" else FrozenLinear
    for form in list_alternatives(layer.form, shape):
        if form is None:
            break
        trial = make_layer(shape[1], shape[0], False, "meta", dtype, form)
        trial.set_weight_(tensor, name)
        damage = _compare(name, plain_NK, trial.weight, x_MK).compute_damage(called=len(x_MK) > 0)
        if damage <= bound:
            return _Better(str(form), damage, count_bytes(trial.backend, form, shape))
    return _Better("bf16", 0.0, plain_NK.nbytes)


def _compare(name: str, plain_NK: Tensor, held_NK: Tensor, x_MK: Tensor) -> _Sums:
    x_KM = x_MK.double().t()
    parts, flushed = [], 0
    for rows in _split_rows(plain_NK):
        plain, held = plain_NK[rows].double(), held_NK[rows].double()
        flushed += int(((held == 0) & (plain != 0)).sum())
        off = held.sub_(plain)
        squares = [product.square_().sum(dim=1) for product in (plain @ x_KM, off @ x_KM)]
        parts.append((plain.square_().sum(dim=1), off.square_().sum(dim=1), *squares))
    weight, weight_off, output, output_off = (torch.cat(part) for part in zip(*parts, strict=True))
    sums = _Sums(weight, weight_off, output, output_off, flushed)
    if not (weight_off.isfinite().all() and output_off.isfinite().all()):
        raise ValueError(
            Message(
                "{name}: its weights are so large that they are not finite after dequantization; keep it in bf16",
                name=name,
            )
        )
    return sums


def _measure_multiplied_error(layer: FrozenLayer, plain_NK: Tensor, x_MK: Tensor) -> float:
    with torch.no_grad():
        y_MN = layer(x_MK.to(layer.compute_dtype)).double()
    bias_N = None if layer.bias is None else layer.bias.double()
    off = size = torch.zeros((), dtype=torch.float64, device=x_MK.device)
    for rows in _split_rows(plain_NK):
        product = F.linear(x_MK.double(), plain_NK[rows].double())
        whole = product if bias_N is None else product + bias_N[rows]
        off, size = off + (y_MN[:, rows] - whole).square().sum(), size + product.square().sum()
    return _compute_ratio(off, size)


def _split_rows(weight_NK: Tensor) -> Iterator[slice]:
    """Return slices of about four million weights, so that the float64 copies stay small."""
    step = max(1, (1 << 22) // max(1, weight_NK.shape[1]))
    return (slice(start, start + step) for start in range(0, weight_NK.shape[0], step))


def _select_evenly(x_MK: Tensor, num: int) -> Tensor:
    """Return at most `num` of the rows, evenly spaced from the first; a copy, so that the rest can be freed."""
    if len(x_MK) <= num:
        return x_MK.clone()
    return x_MK[torch.arange(num, device=x_MK.device) * len(x_MK) // num]


def _compute_ratio(off: Tensor, size: Tensor) -> float:
    """Return sqrt(off / size), 0 if `off` is 0."""
    return 0.0 if off == 0 else (off / size).sqrt().item()


# -- printed reports ---------------------------------------------------------------------------------------------------


def format_table(errors: Sequence[LayerError], limit: int = 20) -> list[str]:
    """Return an aligned line for each of the worst layers, and how many were left out."""
    rows: list[tuple[str, ...]] = [("layer", "storage", "output", "feature", "weight", "fp8 matmul", "to zero", "rows")]
    for error in errors[:limit]:
        odd = {"zero": error.zero_rows, "denormal": error.denormal_rows, "extreme": error.extreme_rows}
        rows.append(
            (error.name, error.storage, _format_percent(error.output_error), _format_percent(error.feature_error),
             *map(_format_percent, (error.weight_error, error.multiplied_error, error.flushed)),
             ", ".join(f"{count} {kind}" for kind, count in odd.items() if count))
        )  # fmt: skip
    filled = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    rows = [tuple(row[column] for column in filled) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines: list[str] = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    if len(errors) > limit:
        lines.append(
            Message("... and {count} layers with smaller errors; --json lists them all", count=len(errors) - limit)
        )
    return lines


def format_totals(errors: Sequence[LayerError]) -> list[str]:
    """Return a line for each storage: number of layers, their damage, their bytes."""
    lines: list[str] = []
    for storage in dict.fromkeys(error.storage for error in errors):
        mine = [error for error in errors if error.storage == storage]
        damages = sorted(error.damage for error in mine)
        lines.append(
            Message(
                "{storage}: {count} layers, {size} MB, error of the output: median {middle}, largest {worst}",
                storage=storage,
                count=len(mine),
                size=f"{sum(error.num_bytes for error in mine) / 1e6:.1f}",
                middle=_format_percent(damages[len(damages) // 2]),
                worst=_format_percent(damages[-1]),
            )
        )
    return lines


def format_advice(
    errors: Sequence[LayerError], bound: float, override: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Return lines that say what to do about layers above the bound; `override` is the present quantize.override."""
    over = [error for error in errors if error.better]
    if not over:
        return [
            Message(
                "no layer is above quantize.sensitivity_bound = {bound}: there is nothing to do", bound=f"{bound:g}"
            )
        ]
    more = sum(error.better_bytes - error.num_bytes for error in over)
    table = {name: storage for error in over for name, storage in error.override.items()}
    table |= {name: storage for name, storage in override.items() if name not in table}
    return [
        Message(
            "{count} of {total} layers are above quantize.sensitivity_bound = {bound}; to stay below it takes "
            "{size} MB more: set quantize.sensitivity = 'auto', or",
            count=len(over),
            total=len(errors),
            bound=f"{bound:g}",
            size=f"{more / 1e6:.2f}",
        ),
        "[quantize.override]",
        *(f'"{name}" = "{storage}"' for name, storage in table.items()),
    ]


def _format_percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.3g} %"
