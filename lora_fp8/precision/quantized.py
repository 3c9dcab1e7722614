"""Weights that a file holds in FP8 already: what they stand for, and how a frozen layer takes them over.

Rounding a rounded weight again costs as much as the first time did. So where the layer's format can hold the file's own
bytes and scales, it gets those, and its decoded weight is the file's, bit for bit; otherwise the weight is decoded in
float32, which is exact up to that type's own last bit, and encoded from there.

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
        scale: float32 (rows, columns), a divisor of N and one of K: a value for each block of the weight.
    """

    codes: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def to(self, device: torch.device | str) -> "Quantized":
        return Quantized(self.codes.to(device), self.scale.to(device))

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Quantized":
        """What `change` makes of it, which picks or reorders whole rows: of the scales, the same ones."""
        codes_NK = change(self.codes.view(torch.uint8)).view(self.codes.dtype)
        return Quantized(codes_NK, change(self.scale.repeat_interleave(len(self.codes) // len(self.scale), dim=0)))

    def decoded(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight (N, K): code times scale in float32, rounded once to `dtype`."""
        if self.codes.dtype == torch.float8_e4m3fn:
            return decode((self.codes.view(torch.uint8), self.scale), "fp8", dtype)
        return apply_scale_(self.codes.to(torch.float32), self.scale).to(dtype)

    def parts(self, form: Format) -> tuple[Tensor, Tensor] | None:
        """The tensors of `form.tensors` with these codes and scales, or None where the form cannot hold them."""
        shape = (self.codes.shape[0], self.codes.shape[1])
        if form.storage != "fp8" or form.problem(shape) or self.codes.dtype != torch.float8_e4m3fn:
            return None
        size, _ = form.tensors(shape)["scale"]
        scale = _spread(_spread(self.scale, 0, size[0]), 1, size[1])
        if scale is None or form.scale == "none" and not scale.eq(1).all():
            return None
        return _own(self.codes.view(torch.uint8)), _own(scale)


Weight = Tensor | Quantized
"""What a file holds under the name of a parameter."""


def plain(weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor that a file's weight stands for; quantized ones in `dtype`, float32 at first."""
    return weight.decoded(dtype or torch.float32) if isinstance(weight, Quantized) else weight


def parts_in(weight: Weight, form: Format, name: str = "weight") -> tuple[Tensor, ...]:
    """What a frozen layer of this form holds of a file's weight: its own bytes where it can, else those of `encode`.

    Raises:
        ValueError: what `encode` raises.
    """
    taken = weight.parts(form) if isinstance(weight, Quantized) else None
    return encode(plain(weight), form, name) if taken is None else taken


def _spread(scale: Tensor | None, dim: int, size: int) -> Tensor | None:
    """The same scales with `size` values along a dimension; None where fewer values cannot say the same."""
    if scale is None or scale.shape[dim] == size:
        return scale
    if size % scale.shape[dim] == 0:
        return scale.repeat_interleave(size // scale.shape[dim], dim=dim)
    if scale.shape[dim] % size:
        return None
    groups = scale.unflatten(dim, (size, -1))
    first = groups.select(dim + 1, 0)
    return first if groups.eq(first.unsqueeze(dim + 1)).all() else None


def _own(tensor: Tensor) -> Tensor:
    # A slice of a fused layer would keep the whole of it alive.
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor.contiguous()
