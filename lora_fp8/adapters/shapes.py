"""The shapes of an adapter's tensors, known from the layers' sizes alone.

A Plan needs no more of an adapter than its names and sizes, and importing peft takes longer than everything else that
`check` does. The shapes are those that peft gives the tensors; tests/test_adapters.py compares the two.

Shapes: N output features, K input features, R rank.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..precision.dtypes import DTYPES
from ..settings import Adapter
from . import kinds
from .targets import choose_layers

Shape = tuple[int, ...]


def plan_tensors(
    model: nn.Module, section: Adapter, targets: Sequence[str], called: Callable[[str], str] = str
) -> list[tuple[str, nn.Parameter]]:
    """Return the tensors that `inject` would add to a model, as `list_tensors` lists them, on the meta device.

    The arguments are those of `inject`; the model is not changed.

    Raises:
        UserError: see `choose_layers`.
    """
    rank_of, _ = choose_layers(model, section, targets)
    return [
        (f"{called(name)}.{part}", _make_parameter(part, shape, section))
        for name, rank in rank_of.items()
        for part, shape in list_shapes(model.get_submodule(name), rank, section).items()
    ]


def _make_parameter(part: str, shape: Shape, section: Adapter) -> nn.Parameter:
    dtype = torch.float32 if part == "lora_magnitude_vector" else DTYPES[section.dtype]
    is_frozen = section.freezes_a and part == "lora_A.weight"
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=not is_frozen)


def list_shapes(layer: nn.Module, rank: int, section: Adapter) -> dict[str, Shape]:
    """Return the shape of each of a layer's tensors by the last part of its name, in the order of `kinds.PARTS`."""
    if isinstance(layer, nn.Conv2d):
        rows, columns, kernel, groups = layer.out_channels, layer.in_channels, tuple(layer.kernel_size), layer.groups
    else:
        assert isinstance(layer, nn.Linear)  # `choose_layers` returns no others
        rows, columns, kernel, groups = layer.out_features, layer.in_features, (), 1
    if section.type == "oft":
        size = kinds.choose_block_size(rows, section.block_size)
        return {"oft_blocks": (rows // size, size, size)}
    if section.type == "loha":
        flat = columns * math.prod(kernel)
        return {
            f"hada_{w}_{half}": (rows, rank) if half == "a" else (rank, flat) for w in ("w1", "w2") for half in "ab"
        }
    if section.type == "lokr":
        return _list_kronecker_shapes((rows, columns, *kernel), rank, section)
    last = (1,) * len(kernel)
    shapes = {"lora_A.weight": (rank, columns, *kernel), "lora_B.weight": (rows, rank // groups, *last)}
    return shapes | ({"lora_magnitude_vector": (rows,)} if section.type == "dora" else {})


def _list_kronecker_shapes(weight: Shape, rank: int, section: Adapter) -> dict[str, Shape]:
    """Return the shapes for a weight (N, K[, kh, kw]): a matrix is whole unless the rank is below half of its side."""
    (rows_1, rows_2), (columns_1, columns_2) = (kinds.split_side(side, section.factor) for side in weight[:2])
    kernel, shapes = weight[2:], dict[str, Shape]()
    if section.decompose_both and rank < max(rows_1, columns_1) / 2:
        shapes |= {"lokr_w1_a": (rows_1, rank), "lokr_w1_b": (rank, columns_1)}
    else:
        shapes["lokr_w1"] = (rows_1, columns_1)
    if rank < max(rows_2, columns_2) / 2:
        return shapes | {"lokr_w2_a": (rows_2, rank), "lokr_w2_b": (rank, columns_2 * math.prod(kernel))}
    return shapes | {"lokr_w2": (rows_2, columns_2, *kernel)}
