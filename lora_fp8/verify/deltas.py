"""Relative errors of tensors, and of the changes that adapters make to a layer's weight."""

import math

import torch
from torch import Tensor

from ..adapters import kinds
from .pipeline import Loaded


def compute_delta_error(pair: tuple[Tensor, Tensor, float], other: tuple[Tensor, Tensor, float]) -> float:
    """Return the relative error ||B'A's' - BAs|| / ||BAs|| (Frobenius norm) of `pair`, compared with `other`.

    Both are (A, B, scaling). The (out, in) matrices are never formed. With X = [B's', -Bs] and Y = [A'; A], ||XY||^2 is
    the trace of (X^T X)(Y Y^T): two small matrices, in float64 because equal deltas cancel.
    """

    def compute_gram(columns: Tensor, rows: Tensor) -> float:
        return max(float((columns.T @ columns * (rows @ rows.T)).sum()), 0.0)

    (a, b, s), (a0, b0, s0) = ((x.double().flatten(1), y.double().flatten(1), z) for x, y, z in (pair, other))
    norm = compute_gram(b0 * s0, a0)
    error = compute_gram(torch.cat([b * s, -b0 * s0], 1), torch.cat([a, a0.to(a.device)]))
    return math.sqrt(error / norm) if norm else (0.0 if error == 0 else math.inf)


def compute_layer_error(loaded: Loaded, parts: dict[str, Tensor], scale: float) -> float:
    """Return the relative error of a loaded layer's change of its weight, compared with the trained tensors'.

    For DoRA it is the larger error of the two loaded things, B @ A and the magnitudes. The change of the weight that
    they make together is a small difference, in which the magnitudes' rounding in a bf16 pipeline would look large.
    """
    if set(loaded.parts) != set(parts):
        return math.inf
    device = loaded.weight.device
    trained = {name: tensor.to(device) for name, tensor in parts.items()}
    if "oft_blocks" in parts:  # R - I: the change of the weight, whatever that is
        return compute_relative_error(
            kinds.compute_rotation(loaded.parts["oft_blocks"].to(device)), kinds.compute_rotation(trained["oft_blocks"])
        )
    if "lora_A.weight" not in parts:
        deltas = (
            kinds.compute_delta(held, by, torch.float64)
            for held, by in ((loaded.parts, loaded.scaling), (trained, scale))
        )
        return compute_relative_error(*deltas)
    pair, own = ((side["lora_A.weight"], side["lora_B.weight"]) for side in (loaded.parts, trained))
    error = compute_delta_error((*pair, loaded.scaling), (*own, scale))
    if "lora_magnitude_vector" in parts:
        lengths = (side["lora_magnitude_vector"].flatten() for side in (loaded.parts, trained))
        error = max(error, compute_relative_error(*lengths))
    return error


def compute_relative_error(tensor: Tensor, reference: Tensor) -> float:
    """Return ||tensor - reference|| / ||reference|| in float64; infinity for different shapes or NaN."""
    if tensor.shape != reference.shape:
        return math.inf
    error = float((tensor.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-30))
    return error if math.isfinite(error) else math.inf
