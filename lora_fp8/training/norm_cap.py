"""Limit the norm of what each layer's adapter adds to its weight (`adapter.scale_weight_norms`), after every update.

A layer whose delta s B A has a larger Frobenius norm is scaled down to the limit. Its matrices share the factor: each
is multiplied by the same root of it, as in sd-scripts (`apply_max_norm_regularization`) and LyCORIS (`apply_max_norm`).
DoRA's lengths are not changed. Of OFT it is the norm of the blocks that is limited, as in LyCORIS.

The optimizer's float32 values are scaled before they are rounded to the adapter's dtype, and before they are averaged.
Moments stay as they are, as there.

Shapes: N output features, K input features, R rank, G groups of a convolution.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..adapters import kinds

PIECE = 1 << 22
"""Values of a LoHa's delta that are computed at a time."""


class NormCap:
    """Scales down layers whose delta is too large.

    Attributes:
        limit: the largest norm.
        scaled: how many layers the last call scaled down.
        largest: the largest norm after it.
    """

    def __init__(self, limit: float, tensors: Mapping[str, Tensor], scaling: Mapping[str, float]) -> None:
        """Prepare for an adapter's parameters.

        Args:
            limit: the largest norm.
            tensors: of the adapter, as `adapters.list_tensors` lists them. Those that require no gradient are not
            scaled.
            scaling: factor of each layer's product.
        """
        self.limit, self.scaled, self.largest = limit, 0, 0.0
        self._fixed = {name: tensor.detach() for name, tensor in tensors.items() if not tensor.requires_grad}
        self._layers = {
            layer: ({part: f"{layer}.{part}" for part in parts if part != "lora_magnitude_vector"}, scaling[layer])
            for layer, parts in kinds.group_by_layer(tensors).items()
        }

    @torch.no_grad()
    def __call__(self, values: Mapping[str, Tensor]) -> None:
        """Scale the adapter in place; `values` are the tensors of its parameters, by name."""
        norms = []
        for names, scale in self._layers.values():
            trained = {part: values[name] for part, name in names.items() if name not in self._fixed}
            fixed = {part: self._fixed[name] for part, name in names.items() if name in self._fixed}
            norm = _measure(trained | fixed) * scale
            share = (self.limit / norm).clamp(max=1.0)
            for tensor in trained.values():
                tensor.mul_(share ** (1 / len(trained)))
            norms.append(norm)
        every = torch.stack(norms)
        self.scaled = int((every > self.limit).sum())
        self.largest = float(every.max().clamp(max=self.limit))

    def collect_figures(self) -> dict[str, float]:
        """Return the figures of the last call for the log, under sd-scripts' names."""
        return {"keys_scaled": self.scaled, "max_key_norm": self.largest}


def _measure(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the Frobenius norm of a layer's product, without its factor; a float32 scalar."""
    held = {part: tensor.float() for part, tensor in parts.items()}
    if "oft_blocks" in held:
        return torch.linalg.vector_norm(held["oft_blocks"])
    if "lora_A.weight" in held:
        return _measure_product(held["lora_B.weight"].flatten(1), held["lora_A.weight"].flatten(1))
    if "hada_w1_a" in held:
        rows = max(1, PIECE // held["hada_w1_b"].shape[1])
        squares = [
            ((left_1 @ held["hada_w1_b"]) * (left_2 @ held["hada_w2_b"])).square().sum()
            for left_1, left_2 in zip(held["hada_w1_a"].split(rows), held["hada_w2_a"].split(rows), strict=True)
        ]
        return torch.stack(squares).sum().sqrt()
    # |kron(W1, W2)| = |W1| |W2|
    return _measure_side(held, "lokr_w1") * _measure_side(held, "lokr_w2")


def _measure_side(held: Mapping[str, Tensor], side: str) -> Tensor:
    """Return the norm of one of LoKr's two matrices."""
    if side in held:
        return torch.linalg.vector_norm(held[side])
    return _measure_product(held[f"{side}_a"], held[f"{side}_b"])


def _measure_product(b_NR: Tensor, a_RK: Tensor) -> Tensor:
    """Return |B A| without forming it: the trace of (B^T B)(A A^T), from matrices (R, R).

    In a convolution of G groups, B is (N, R / G), and its rows of a group meet A's rows of the same group.
    """
    groups = a_RK.shape[0] // b_NR.shape[1]
    b, a = b_NR.unflatten(0, (groups, -1)), a_RK.unflatten(0, (groups, -1))
    return ((b.mT @ b).double() * (a @ a.mT).double()).sum().clamp_min(0).sqrt().float()
