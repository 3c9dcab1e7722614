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
from torch.utils.hooks import RemovableHandle

from ..precision import strip_base_layer
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
    """Add an adapter to a model inside this context; the arguments are those of `attach_`."""
    handles = attach_(layers, state, scaling, strength, device)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def attach_(
    layers: Mapping[str, nn.Module],
    state: Mapping[str, Tensor],
    scaling: Mapping[str, float] | float,
    strength: float,
    device: torch.device,
) -> list[RemovableHandle]:
    """Add an adapter to a model.

    Args:
        layers: the model's modules by the names that the adapter uses.
        state: the adapter's tensors, in internal naming.
        scaling: alpha / rank of each layer, or of all.
        strength: factor of the adapter's whole effect, as in programs that load it.
        device: device on which the layers compute.

    Returns:
        What removes it.
    """
    handles = []
    for name, parts in kinds.group_by_layer(state).items():
        layer: Any = layers[name]
        moved = {part: tensor.to(device) for part, tensor in parts.items()}
        factor = scaling[name] if isinstance(scaling, Mapping) else scaling
        handles.append(layer.register_forward_hook(_Addition(layer, moved, factor, strength)))
    return handles


def attach_beneath_(
    model: nn.Module, state: Mapping[str, Tensor], scaling: Mapping[str, float] | float, dtype: torch.dtype
) -> None:
    """Add an adapter to the frozen layers of a model for good, beneath the adapters that are trained.

    Args:
        model: with its weights, and with the adapters to train or without.
        state: see `attach_`.
        scaling: see `attach_`.
        dtype: dtype in which the adapter is held and computed.
    """
    layers = {strip_base_layer(name): module for name, module in model.named_modules() if _takes_adapter(module)}
    converted = {name: tensor.to(dtype) for name, tensor in state.items()}
    attach_(layers, converted, scaling, 1.0, next(model.parameters()).device)


@contextmanager
def without_attached(model: nn.Module) -> Iterator[None]:
    """Compute without attached adapters inside this context."""
    additions = [
        hook for module in model.modules() for hook in module._forward_hooks.values() if isinstance(hook, _Addition)
    ]
    for addition in additions:
        addition.is_on = False
    try:
        yield
    finally:
        for addition in additions:
            addition.is_on = True


def _takes_adapter(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d)


class _Addition:
    """A forward hook that adds an adapter's effect to a layer's output."""

    def __init__(self, layer: Any, parts: dict[str, Tensor], scaling: float, strength: float) -> None:
        self.parts, self.scaling, self.strength, self.is_on = parts, scaling, strength, True
        self.is_linear = not isinstance(layer, nn.Conv2d)
        self.turned = kinds.compute_rotation(parts["oft_blocks"]) if "oft_blocks" in parts else None
        self.ratio_N: Tensor | None = None
        if "lora_magnitude_vector" in parts:
            a, b = parts["lora_A.weight"], parts["lora_B.weight"]
            magnitude_N = parts["lora_magnitude_vector"].flatten().float()
            self.ratio_N = kinds.compute_length_ratio(layer, a, b, scaling, magnitude_N)

    def __call__(self, layer: Any, inputs: tuple[Tensor, ...], answer: Tensor) -> Tensor:
        if not self.is_on:
            return answer
        if self.turned is not None:
            plain = self._without_bias(layer, answer)
            turned = kinds.rotate_rows(self.turned.to(answer.dtype), plain, -1 if self.is_linear else 1)
            return (answer + turned * self.strength).to(answer.dtype)
        x = inputs[0]
        added = self._compute_product(layer, x)
        if self.ratio_N is None:
            return (answer + added * self.strength).to(answer.dtype)
        # DoRA rescales the rows of W + s B A, and leaves the bias alone.
        plain = self._without_bias(layer, answer)
        whole = (plain + added) * self._make_broadcastable(self.ratio_N)
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
            delta = kinds.compute_delta(parts, self.scaling, torch.float32).to(dtype)
            size = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
            return F.conv2d(x, delta.reshape(size), None, layer.stride, layer.padding, layer.dilation, layer.groups)
        if "lora_A.weight" in parts:
            return F.linear(F.linear(x, parts["lora_A.weight"]), parts["lora_B.weight"]) * self.scaling
        if "hada_w1_a" in parts:
            return F.linear(x, kinds.compute_delta(parts, self.scaling, dtype))
        return kinds.multiply_kronecker(x, *kinds.compute_kronecker_factors(parts)) * self.scaling

    def _without_bias(self, layer: Any, answer: Tensor) -> Tensor:
        return answer if layer.bias is None else answer - self._make_broadcastable(layer.bias)

    def _make_broadcastable(self, values_N: Tensor) -> Tensor:
        return values_N if self.is_linear else values_N.view(1, -1, 1, 1)
