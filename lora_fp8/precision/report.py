"""What quantization costs: the error of every frozen layer on inputs that it really gets, and which storage would do.

Two kinds of figures answer two questions:

* Of one layer: how far is W_held x from W x? The weights of the file are streamed past the quantized denoiser and are
  compared one layer at a time, so that two models never lie in memory beside each other. The inputs are rows that the
  layer got inside the quantized denoiser: what it will see in training. They carry the errors of the layers before it,
  which both sides of the comparison then share, so that what is left is this layer's own.
* Of the whole denoiser: `relative` of two predictions, which is where the layers' errors add up.

Everything is summed in float64, so that rows of 1e30 or of 1e-30 give figures like any other, and the same measurement
gives the same numbers. A bias is held as it is and left out: it would only make the errors look smaller.

Two figures for the output, because one row of huge weights dominates every sum of squares: `output_error` over all
outputs together, and `feature_error`, in which each output feature is taken relative to its own size (but at least that
of the median feature) and then counts the same. The larger one is the `damage`.

Shapes: N output features (rows of the weight), K input features, M sampled inputs (tokens).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import SCALES
from .backends import num_bytes
from .formats import Format
from .linear import FrozenLinear, decoded_compute, frozen_layers
from .matmul import forget_shared
from .quantized import Weight, plain

NUM_INPUTS = 256
"""Rows of input kept per layer, on the CPU: 1.2 GB for FLUX in bf16."""
EXTREME = 100.0
"""A row is extreme where its largest weight is so many times that of the median row."""


@dataclass(frozen=True)
class LayerError:
    """What the storage of one layer costs. Errors are relative rms; 0.03 is 3 %."""

    name: str
    storage: str
    """as in quantize.override: "fp8 row" """
    compute: str
    num_weights: int
    num_bytes: int
    """of weight and scales"""
    num_inputs: int
    """rows of input that were looked at; 0 where the layer was never called"""
    weight_error: float
    output_error: float | None
    """of W x over all outputs together; None where the layer was never called"""
    feature_error: float | None
    """the same for each output feature, then the rms over features; None where the layer was never called"""
    multiplied_error: float | None
    """output_error with the rounding of the FP8 matmul added; None where the layer is not multiplied in FP8"""
    flushed: float
    """share of the weights that are not zero and are held as zero"""
    zero_rows: int
    denormal_rows: int
    """rows whose largest weight is below the smallest normal number of the compute dtype"""
    extreme_rows: int
    better: str = ""
    """the cheapest storage that holds the bound, where this one does not: "int8 1x128" or "bf16" """
    better_damage: float = 0.0
    better_bytes: int = 0

    @property
    def damage(self) -> float:
        """The larger error of the output; of the weight where the layer was never called."""
        if self.output_error is None or self.feature_error is None:
            return self.weight_error
        return max(self.output_error, self.feature_error)

    @property
    def override(self) -> str:
        """The line of quantize.override that moves this layer."""
        return f"^{self.name} = {self.better}"


def capture_inputs(
    denoiser: nn.Module, forwards: Sequence[Callable[[], Any]], num_inputs: int = NUM_INPUTS
) -> dict[str, Tensor]:
    """Rows of what each frozen layer gets in these forwards: (M, K) per layer on the CPU, M at most `num_inputs`.

    Rows are taken evenly from each forward, at the same places each time. Decoded weights are multiplied, whatever the
    plan says, so that the rows do not depend on the matmul.
    """
    share = max(1, num_inputs // max(1, len(forwards)))
    taken: dict[str, list[Tensor]] = {}

    def keeper(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x_MK = args[0].detach().reshape(-1, args[0].shape[-1])
            taken.setdefault(name, []).append(_evenly(x_MK, share).cpu())

        return keep

    hooks = [layer.register_forward_pre_hook(keeper(name)) for name, layer in frozen_layers(denoiser).items()]
    try:
        with torch.no_grad(), decoded_compute(denoiser):
            for forward in forwards:
                forward()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: _evenly(torch.cat(rows), num_inputs) for name, rows in taken.items()}


def layer_errors(
    denoiser: nn.Module,
    tensors: Iterable[tuple[str, Weight]],
    inputs: Mapping[str, Tensor],
    dtype: torch.dtype,
    bound: float = math.inf,
) -> list[LayerError]:
    """Every frozen layer against the weights of the file, the worst first.

    Args:
        denoiser: quantized and filled.
        tensors: the stream that it was filled from.
        inputs: from `capture_inputs`.
        dtype: compute dtype, in which the unquantized base would hold its weights.
        bound: layers above it are told a `better` storage.

    Raises:
        ValueError: NaN or infinity in a layer's weight or input, naming the layer; the stream lacks layers.
    """
    layers = frozen_layers(denoiser)
    found = []
    for name, tensor in tensors:
        layer_name = name.removesuffix(".weight")
        if layer_name == name or layer_name not in layers:
            continue
        layer = layers.pop(layer_name)
        found.append(_layer_error(layer_name, layer, plain(tensor), inputs.get(layer_name), dtype, bound))
    forget_shared()
    if layers:
        raise ValueError(f"the stream of weights lacks {len(layers)} quantized layers (first: {next(iter(layers))})")
    return sorted(found, key=lambda one: (-one.damage, one.name))


def ladder(form: Format, shape: tuple[int, int]) -> list[Format | None]:
    """What a layer of this shape (N, K) is moved to, one after the other, the cheapest first; None is bf16."""
    int8 = next(one for one in (Format("int8", scale) for scale in SCALES["int8"]) if not one.problem(shape))
    finer = form.storage != "int8" or form.block(shape)[1] > int8.block(shape)[1]
    return [int8, None] if finer else [None]


def relative(got: Tensor, expected: Tensor) -> float:
    """|got - expected| / |expected|, in float64."""
    expected = expected.double()
    return _ratio((got.double() - expected).square().sum(), expected.square().sum())


# -- one layer ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sums:
    """Per row of a weight, float64 (N,): sums of squares of the weight, of its error, and of both times the inputs."""

    weight: Tensor
    weight_off: Tensor
    output: Tensor
    output_off: Tensor
    flushed: int

    def output_error(self) -> float:
        return _ratio(self.output_off.sum(), self.output.sum())

    def feature_error(self) -> float:
        heard = self.output > 0
        if not heard.any():
            return self.output_error()
        # A feature quieter than the median one counts as if it were that loud: an error nobody hears is none.
        floor = self.output[heard].median()
        return (self.output_off / self.output.clamp(min=floor))[heard].mean().sqrt().item()

    def damage(self, called: bool) -> float:
        if called:
            return max(self.output_error(), self.feature_error())
        return _ratio(self.weight_off.sum(), self.weight.sum())


def _layer_error(
    name: str, layer: FrozenLinear, tensor: Tensor, x_MK: Tensor | None, dtype: torch.dtype, bound: float
) -> LayerError:
    device = layer.device
    tensor = tensor.to(device)
    plain_NK = tensor.to(dtype)
    if not plain_NK.isfinite().all():
        raise ValueError(f"{name}: weight has NaN or infinity")
    called = x_MK is not None and x_MK.numel() > 0
    x_MK = x_MK.to(device) if called else plain_NK.new_zeros(0, layer.in_features)
    if not x_MK.isfinite().all():
        raise ValueError(f"{name}: its input has NaN or infinity; is the base model whole?")
    sums = _compare(name, plain_NK, layer.weight, x_MK)
    amax_N = plain_NK.abs().amax(dim=1).double()
    filled_N = amax_N[amax_N > 0]
    typical = filled_N.median() if len(filled_N) else amax_N.new_zeros(())
    shape = (layer.out_features, layer.in_features)
    better, better_damage, better_bytes = "", 0.0, 0
    if sums.damage(called) > bound:
        for form in ladder(layer.form, shape):
            if form is None:
                better, better_damage, better_bytes = "bf16", 0.0, plain_NK.nbytes
                break
            # What TransformerEngine does not hold is our own layer; see `plan`.
            kind = FrozenLinear if layer.backend == "te" else type(layer)
            held = kind(shape[1], shape[0], False, "meta", dtype, form)
            held.set_weight_(tensor, name)
            other = _compare(name, plain_NK, held.weight, x_MK)
            if other.damage(called) <= bound:
                better, better_damage = str(form), other.damage(called)
                better_bytes = num_bytes(held.backend, form, shape)
                break
    multiplied = None
    if called and layer.compute != "upcast":
        multiplied = _multiplied_error(layer, plain_NK, x_MK)
    return LayerError(
        name=name,
        storage=str(layer.form),
        compute=layer.compute,
        num_weights=plain_NK.numel(),
        num_bytes=num_bytes(layer.backend, layer.form, shape),
        num_inputs=len(x_MK),
        weight_error=_ratio(sums.weight_off.sum(), sums.weight.sum()),
        output_error=sums.output_error() if called else None,
        feature_error=sums.feature_error() if called else None,
        multiplied_error=multiplied,
        flushed=sums.flushed / max(1, int((plain_NK != 0).sum())),
        zero_rows=int((amax_N == 0).sum()),
        denormal_rows=int(((amax_N > 0) & (amax_N < torch.finfo(dtype).tiny)).sum()),
        extreme_rows=int((amax_N > EXTREME * typical).sum()),
        better=better,
        better_damage=better_damage,
        better_bytes=better_bytes,
    )


def _compare(name: str, plain_NK: Tensor, held_NK: Tensor, x_MK: Tensor) -> _Sums:
    x_KM = x_MK.double().t()
    parts, flushed = [], 0
    for rows in _pieces(plain_NK):
        plain, held = plain_NK[rows].double(), held_NK[rows].double()
        flushed += int(((held == 0) & (plain != 0)).sum())
        off = held.sub_(plain)
        squares = [each.square_().sum(dim=1) for each in (plain @ x_KM, off @ x_KM)]
        parts.append((plain.square_().sum(dim=1), off.square_().sum(dim=1), *squares))
    weight, weight_off, output, output_off = (torch.cat(part) for part in zip(*parts, strict=True))
    sums = _Sums(weight, weight_off, output, output_off, flushed)
    if not (weight_off.isfinite().all() and output_off.isfinite().all()):
        raise ValueError(f"{name}: its weights are so large that they are not finite when decoded; keep it in bf16")
    return sums


def _multiplied_error(layer: FrozenLinear, plain_NK: Tensor, x_MK: Tensor) -> float:
    with torch.no_grad():
        y_MN = layer(x_MK.to(layer.compute_dtype)).double()
    bias_N = None if layer.bias is None else layer.bias.double()
    off = size = torch.zeros((), dtype=torch.float64, device=x_MK.device)
    for rows in _pieces(plain_NK):
        product = F.linear(x_MK.double(), plain_NK[rows].double())
        whole = product if bias_N is None else product + bias_N[rows]
        off, size = off + (y_MN[:, rows] - whole).square().sum(), size + product.square().sum()
    return _ratio(off, size)


def _pieces(weight_NK: Tensor) -> Iterator[slice]:
    """Rows of about four million weights, so that the float64 copies stay small."""
    step = max(1, (1 << 22) // max(1, weight_NK.shape[1]))
    return (slice(start, start + step) for start in range(0, weight_NK.shape[0], step))


def _evenly(x_MK: Tensor, num: int) -> Tensor:
    """At most `num` of the rows, evenly spaced from the first; a copy, so that the rest can be freed."""
    if len(x_MK) <= num:
        return x_MK.clone()
    return x_MK[torch.arange(num, device=x_MK.device) * len(x_MK) // num]


def _ratio(off: Tensor, size: Tensor) -> float:
    """sqrt(off / size), 0 where nothing is off."""
    return 0.0 if off == 0 else (off / size).sqrt().item()


# -- for people --------------------------------------------------------------------------------------------------------


def table(errors: Sequence[LayerError], limit: int = 20) -> list[str]:
    """A line for each of the worst layers, aligned, and what was left out."""
    rows = [("layer", "storage", "output", "feature", "weight", "fp8 matmul", "to zero", "rows")]
    for one in errors[:limit]:
        odd = {"zero": one.zero_rows, "denormal": one.denormal_rows, "extreme": one.extreme_rows}
        rows.append(
            (one.name, one.storage, _percent(one.output_error), _percent(one.feature_error),
             _percent(one.weight_error), _percent(one.multiplied_error), _percent(one.flushed),
             ", ".join(f"{count} {kind}" for kind, count in odd.items() if count))
        )  # fmt: skip
    filled = [column for column in range(len(rows[0])) if any(row[column] for row in rows[1:])]
    rows = [tuple(row[column] for column in filled) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return lines + ([f"... and {len(errors) - limit} layers with less; --json has them all"] * (len(errors) > limit))


def totals(errors: Sequence[LayerError]) -> list[str]:
    """A line for each storage: how many layers, their damage, their bytes."""
    lines = []
    for storage in dict.fromkeys(one.storage for one in errors):
        mine = [one for one in errors if one.storage == storage]
        damages = sorted(one.damage for one in mine)
        lines.append(
            f"{storage}: {len(mine)} layers, {sum(one.num_bytes for one in mine) / 1e6:.1f} MB, error of the output "
            f"{_percent(damages[len(damages) // 2])} in the middle, {_percent(damages[-1])} at worst"
        )
    return lines


def advice(errors: Sequence[LayerError], bound: float, override: Sequence[str] = ()) -> list[str]:
    """What to do about the layers above the bound; `override` is what quantize.override has already."""
    over = [one for one in errors if one.better]
    if not over:
        return [f"no layer is above quantize.sensitivity_bound = {bound:g}: nothing to do"]
    more = sum(one.better_bytes - one.num_bytes for one in over)
    lines = [*(one.override for one in over), *override]
    return [
        f"{len(over)} of {len(errors)} layers are above quantize.sensitivity_bound = {bound:g}; to hold it takes "
        f"{more / 1e6:.2f} MB more: set quantize.sensitivity = 'auto', or",
        "override = [  # in [quantize]",
        *(f'  "{line}",' for line in lines),
        "]",
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.3g} %"
