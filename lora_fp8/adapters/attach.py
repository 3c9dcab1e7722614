"""Add the effect of a finished adapter to a model's layers, at any strength, without changing the layers.

A hook beside each layer adds to its output. It works beside frozen layers of every storage, and with every kind of
adapter, whatever its ranks; nothing of it can be trained. A LoRA at strength 1 computes what training computes, in the
same order and dtype.

Shapes: N output features, K input features, R rank.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import kinds

COMPUTED_IN = (torch.bfloat16, torch.float32)
"""Adapters of these dtypes are computed in their own, as peft does; others in the dtype of the layer's input."""


@contextmanager
def attached(
    layers: Mapping[str, nn.Module],
    state: Mapping[str, Tensor],
    scaling: Mapping[str, float],
    strength: float,
    device: torch.device,
) -> Iterator[None]:
    """Add an adapter to a model inside this context.

    Args:
        layers: the model's modules by the names that the adapter uses.
        state: the adapter's tensors, in internal naming.
        scaling: alpha / rank of each layer.
        strength: factor of the adapter's whole effect, as in programs that load it.
        device: device on which the layers compute.
    """
    handles = []
    try:
        for name, parts in kinds.grouped(state).items():
            layer: Any = layers[name]
            moved = {part: tensor.to(device) for part, tensor in parts.items()}
            handles.append(layer.register_forward_hook(_Addition(layer, moved, scaling[name], strength)))
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Addition:
    """A forward hook that adds an adapter's effect to a layer's output."""

    def __init__(self, layer: Any, parts: dict[str, Tensor], scaling: float, strength: float) -> None:
        self.parts, self.scaling, self.strength = parts, scaling, strength
        self.is_linear = not isinstance(layer, nn.Conv2d)
        self.ratio_N: Tensor | None = None
        if "lora_magnitude_vector" in parts:
            a, b = parts["lora_A.weight"], parts["lora_B.weight"]
            magnitude_N = parts["lora_magnitude_vector"].flatten().float()
            self.ratio_N = kinds.length_ratio(layer, a, b, scaling, magnitude_N)

    def __call__(self, layer: Any, inputs: tuple[Tensor, ...], answer: Tensor) -> Tensor:
        x = inputs[0]
        added = self._compute_product(layer, x)
        if self.ratio_N is None:
            return (answer + added * self.strength).to(answer.dtype)
        # DoRA rescales the rows of W + s B A, and leaves the bias alone.
        bias_N = layer.bias
        plain = answer if bias_N is None else answer - self._over_rows(bias_N)
        whole = (plain + added) * self._over_rows(self.ratio_N)
        return (answer + (whole - plain) * self.strength).to(answer.dtype)

    def _compute_product(self, layer: Any, x: Tensor) -> Tensor:
        """Return x times the transposed delta, alpha / rank included."""
        given = next(iter(self.parts.values())).dtype
        dtype = given if given in COMPUTED_IN else x.dtype
        parts = {name: part.to(dtype) for name, part in self.parts.items()}
        x = x.to(dtype)
        if not self.is_linear and "lora_A.weight" in parts and layer.groups == 1:
            reduced = F.conv2d(x, parts["lora_A.weight"], None, layer.stride, layer.padding, layer.dilation)
            return F.conv2d(reduced, parts["lora_B.weight"]) * self.scaling
        if not self.is_linear:
            delta = kinds.delta(parts, self.scaling, torch.float32).to(dtype)
            size = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
            return F.conv2d(x, delta.reshape(size), None, layer.stride, layer.padding, layer.dilation, layer.groups)
        if "lora_A.weight" in parts:
            return F.linear(F.linear(x, parts["lora_A.weight"]), parts["lora_B.weight"]) * self.scaling
        if "hada_w1_a" in parts:
            return F.linear(x, kinds.delta(parts, self.scaling, dtype))
        return kinds.kronecker_linear(x, *kinds.kronecker_factors(parts)) * self.scaling

    def _over_rows(self, values_N: Tensor) -> Tensor:
        return values_N if self.is_linear else values_N.view(1, -1, 1, 1)
