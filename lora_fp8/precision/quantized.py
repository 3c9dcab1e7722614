"""Weights that a file stores in FP8, and how a frozen layer takes them over.

Quantizing a quantized weight again adds as large an error as the first time. So if the layer's format can store the
file's own bytes and scales, it gets them, and its dequantized weight equals the file's bit for bit. Otherwise the
weight is dequantized to float32, which is exact up to float32's rounding, and quantized from there.

Shapes: N output features (rows), K input features (columns).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .formats import Format, apply_scale_, decode, encode


@dataclass(frozen=True)
class Quantized:
    """A matrix of FP8 codes times scales.

    Attributes:
        codes: float8_e4m3fn or float8_e5m2 (N, K), finite.
        scale: float32 (rows, columns), where rows divides N and columns divides K: one value per block of the weight.
    """

    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        """Return the shape (N, K) of the weight."""
        return self.codes.shape

    def to(self, device: torch.device | str) -> "Quantized":
        """Return a copy on another device."""
        return Quantized(self.codes.to(device), self.scale.to(device))

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> "Quantized":
        """Apply `change`, which selects or reorders whole rows, to the codes and to the scales of the same rows."""
        codes_NK = change(self.codes.view(torch.uint8)).view(self.codes.dtype)
        return Quantized(codes_NK, change(self.scale.repeat_interleave(len(self.codes) // len(self.scale), dim=0)))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantize to the weight (N, K): code times scale in float32, rounded once to `dtype`."""
        if self.codes.dtype == torch.float8_e4m3fn:
            return decode((self.codes.view(torch.uint8), self.scale), "fp8", dtype)
        return apply_scale_(self.codes.to(torch.float32), self.scale).to(dtype)

    def make_parts(self, form: Format) -> tuple[Tensor, Tensor] | None:
        """Return these codes and scales as `form.describe_tensors` has them; None if the format cannot store them."""
        shape = (self.codes.shape[0], self.codes.shape[1])
        if form.storage != "fp8" or form.find_problem(shape) or self.codes.dtype != torch.float8_e4m3fn:
            return None
        size, _ = form.describe_tensors(shape)["scale"]
        scale = _spread(_spread(self.scale, 0, size[0]), 1, size[1])
        if scale is None or form.scale == "none" and not scale.eq(1).all():
            return None
        return _copy_if_slice(self.codes.view(torch.uint8)), _copy_if_slice(scale)


Weight = Tensor | Quantized
"""A parameter as a file stores it."""


@dataclass(frozen=True)
class Rows:
    """Some consecutive rows of a parameter, for a process that keeps no others.

    Attributes:
        part: these rows, as a file stores them.
        start: number of the first one.
        shape: shape of the whole parameter.
    """

    part: Weight
    start: int
    shape: tuple[int, ...]

    def to(self, device: torch.device | str) -> "Rows":
        """Return a copy on another device."""
        return Rows(self.part.to(device), self.start, self.shape)


def to_plain(weight: Weight) -> Tensor:
    """Return a file's weight as a plain tensor; quantized ones are dequantized to float32."""
    return weight.dequantize(torch.float32) if isinstance(weight, Quantized) else weight


def make_parts(weight: Weight, form: Format, name: str = "weight") -> tuple[Tensor, ...]:
    """Return the tensors of a frozen layer of this format: the file's own bytes if possible, else those of `encode`.

    Raises:
        ValueError: what `encode` raises.
    """
    taken = weight.make_parts(form) if isinstance(weight, Quantized) else None
    return encode(to_plain(weight), form, name) if taken is None else taken


def _spread(scale: Tensor | None, dim: int, size: int) -> Tensor | None:
    """Return the scales with `size` values along a dimension; None if fewer values cannot express them."""
    if scale is None or scale.shape[dim] == size:
        return scale
    if size % scale.shape[dim] == 0:
        return scale.repeat_interleave(size // scale.shape[dim], dim=dim)
    if scale.shape[dim] % size:
        return None
    groups = scale.unflatten(dim, (size, -1))
    first = groups.select(dim + 1, 0)
    return first if groups.eq(first.unsqueeze(dim + 1)).all() else None


def _copy_if_slice(tensor: Tensor) -> Tensor:
    # A slice of a fused layer would keep the whole layer alive.
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor.contiguous()
