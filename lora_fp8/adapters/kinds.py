"""The kinds of adapters: the names of their tensors, and how they change a layer's weight W (N, K).

| kind | W becomes | the adapter's tensors |
|---|---|---|
| lora | W + s B A | lora_A.weight (r, K), lora_B.weight (N, r) |
| dora | m / |W + s B A| (W + s B A), row by row | the same, and lora_magnitude_vector m (N) |
| lokr | W + s kron(W1, W2) | lokr_w1 or lokr_w1_a lokr_w1_b, lokr_w2 or lokr_w2_a lokr_w2_b |
| loha | W + s (W1a W1b) * (W2a W2b), elementwise | hada_w1_a, hada_w1_b, hada_w2_a, hada_w2_b |
| oft | R^T W, R of blocks (I + Q) (I - Q)^-1 with Q = P - P^T | oft_blocks P (N / n, n, n) |

s is alpha / rank, or alpha / sqrt(rank) with `adapter.rank_stabilized` (`compute_scaling`), or 1 for a LoKr layer whose
two matrices are both whole, or for OFT, since such a layer has no rank. A convolution's weight is treated as a matrix
(out, in * kh * kw). The names are peft's and LyCORIS's. LoRA: Hu et al. 2021. rsLoRA: Kalajdzievski 2023, "A Rank
Stabilization Scaling Factor for Fine-Tuning with LoRA". DoRA: Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank
Adaptation". LoKr and LoHa: Yeh et al. 2023, "Navigating Text-To-Image Customization"; LoHa after Hyeon-Woo et al. 2021,
"FedPara". OFT: Qiu et al. 2023, "Controlling Text-to-Image Diffusion by Orthogonal Finetuning", in LyCORIS' form
(Diag-OFT), which ComfyUI reads.

Shapes: M tokens, N output features, K input features, R rank.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.numbers import format_shape
from ..errors import Message, UserError
from ..precision import FrozenLayer, gather_whole
from ..precision.formats import decode_rows
from ..precision.stream import fetch_parts
from ..settings import Adapter

PARTS = {
    "lora": ("lora_A.weight", "lora_B.weight"),
    "dora": ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector"),
    "lokr": ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"),
    "loha": ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    "oft": ("oft_blocks",),
}
"""Kind -> the last part of each tensor's name, in the order in which parameters are listed."""
ALL_PARTS = tuple(dict.fromkeys(part for parts in PARTS.values() for part in parts))
TITLES = {"lora": "LoRA", "dora": "DoRA", "lokr": "LoKr", "loha": "LoHa", "oft": "OFT"}
ZERO_AT_START = ("lora_B.weight", "lokr_w2", "lokr_w2_b", "hada_w2_a", "oft_blocks")
"""Tensors that start at zero, so that the delta is zero. DoRA's magnitude starts at the weight's own row lengths."""

FACTORS = (
    *(("lora_B.weight", "lora_A.weight"), ("lokr_w1_a", "lokr_w1_b"), ("lokr_w2_a", "lokr_w2_b")),
    *(("hada_w1_a", "hada_w1_b"), ("hada_w2_a", "hada_w2_b")),
)
"""Pairs of tensors whose matrix product is taken."""

Parts = Mapping[str, Tensor]  # the tensors of one layer, by the last part of their names


def group_by_layer(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Group an adapter's tensors, in internal naming: returns {layer: {part: tensor}}, sorted by layer.

    Raises:
        UserError: a name belongs to no kind.
    """
    layers: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        part = next((part for part in ALL_PARTS if name.endswith(f".{part}")), None)
        if part is None:
            raise UserError(
                Message("{name}: this tensor does not belong to a LoRA, DoRA, LoKr, LoHa or OFT", name=name)
            )
        layers.setdefault(name.removesuffix(f".{part}"), {})[part] = tensor
    return dict(sorted(layers.items()))


def detect_kind(parts: Parts, layer: str) -> str:
    """Return the kind of adapter that a layer's tensors form.

    Raises:
        UserError: they form none: one is missing, belongs to another kind, or its shape does not fit the others.
    """
    names = set(parts)
    if "lora_magnitude_vector" in names:
        kind, wanted = "dora", set(PARTS["dora"])
    elif "lora_A.weight" in names or "lora_B.weight" in names:
        kind, wanted = "lora", set(PARTS["lora"])
    elif any(name.startswith("hada_") for name in names):
        kind, wanted = "loha", set(PARTS["loha"])
    elif "oft_blocks" in names:
        kind, wanted = "oft", set(PARTS["oft"])
    else:
        kind, wanted = "lokr", set()
        for side in ("lokr_w1", "lokr_w2"):
            wanted |= {side} if side in names else {f"{side}_a", f"{side}_b"}
    if names != wanted:
        odd = ", ".join(sorted(names ^ wanted))
        raise UserError(
            Message(
                "{layer}: the {kind} is incomplete or has a tensor too many: {odd}",
                layer=layer,
                kind=TITLES[kind],
                odd=odd,
            )
        )
    if not have_matching_shapes(parts):
        shapes = ", ".join(f"{name} of {format_shape(tensor.shape)}" for name, tensor in parts.items())
        raise UserError(
            Message(
                "{layer}: the shapes of its {kind} tensors do not match: {shapes}",
                layer=layer,
                kind=TITLES[kind],
                shapes=shapes,
            )
        )
    return kind


KERNELS = ("lora_A.weight", "lora_B.weight", "lokr_w2")
"""Tensors that may have a convolution's kernel dimensions after the first two; the others are matrices."""


def have_matching_shapes(parts: Parts) -> bool:
    """Return True if the shapes of a layer's tensors fit each other, so that they can be multiplied."""
    if "oft_blocks" in parts:
        blocks = parts["oft_blocks"]
        return blocks.ndim == 3 and blocks.shape[1] == blocks.shape[2]
    for name, tensor in parts.items():
        if name != "lora_magnitude_vector" and (tensor.ndim < 2 or (tensor.ndim > 2 and name not in KERNELS)):
            return False
    if any(parts[left].shape[1] != parts[right].shape[0] for left, right in FACTORS if left in parts):
        return False
    if "lora_B.weight" in parts and any(side != 1 for side in parts["lora_B.weight"].shape[2:]):
        return False
    if "hada_w1_a" in parts:
        w1, w2 = ((parts[f"hada_{w}_a"].shape[0], parts[f"hada_{w}_b"].shape[1]) for w in ("w1", "w2"))
        return w1 == w2
    magnitude = parts.get("lora_magnitude_vector")
    return magnitude is None or magnitude.numel() == parts["lora_B.weight"].shape[0]


def has_rank(parts: Parts) -> bool:
    """Return True if alpha / rank applies to the layer: not to OFT, nor where a LoKr's matrices are both whole."""
    return not ("oft_blocks" in parts or ("lokr_w1" in parts and "lokr_w2" in parts))


def read_rank(parts: Parts) -> int:
    """Return the layer's rank, 0 if it has none. Two decomposed LoKr matrices have the same rank."""
    for name, dim in (("lora_A.weight", 0), ("hada_w1_b", 0), ("lokr_w2_b", 0), ("lokr_w1_b", 0)):
        if name in parts:
            return parts[name].shape[dim]
    return 0


def fits_shape(parts: Parts, shape: Sequence[int]) -> bool:
    """Return True if a layer's tensors are for a weight of this shape. OFT's tell nothing about K."""
    rows, columns = infer_weight_shape(parts)
    return rows == shape[0] and ("oft_blocks" in parts or columns == math.prod(shape[1:]))


def infer_weight_shape(parts: Parts) -> tuple[int, int]:
    """Return (N, K) of the layer's weight as a matrix; K is 0 for OFT, which is for any."""
    if "oft_blocks" in parts:
        count, size, _ = parts["oft_blocks"].shape
        return count * size, 0
    if "lora_A.weight" in parts:
        return parts["lora_B.weight"].shape[0], parts["lora_A.weight"][0].numel()
    if "hada_w1_a" in parts:
        return parts["hada_w1_a"].shape[0], parts["hada_w1_b"].shape[1]
    # From the shapes alone: a file's tensors may have different dtypes, which torch does not multiply.
    num_rows = num_columns = 1
    for name in ("lokr_w1", "lokr_w2"):
        first = parts[name] if name in parts else parts[f"{name}_a"]
        last = parts[name] if name in parts else parts[f"{name}_b"]
        num_rows *= first.shape[0]
        num_columns *= math.prod(last.shape[1:])
    return num_rows, num_columns


def compute_scaling(section: Adapter, rank: float) -> float:
    """Return the factor of the product of a layer of this rank, under the job's `[adapter]` table.

    Layers of other ranks (`adapter.ranks`) have the same factor, except with `rank_stabilized`, whose factor depends on
    each layer's own rank (as in peft with `rank_pattern` and `use_rslora`).
    """
    return section.alpha / math.sqrt(rank) if section.rank_stabilized else section.alpha / section.rank


def compute_scalings(state: Mapping[str, Tensor], section: Adapter) -> dict[str, float]:
    """Return the factor of each layer's product in an adapter that was trained with this `[adapter]` table.

    Args:
        state: tensors as `adapters.copy_state` returns them.
        section: the table.
    """
    copies = 2 if section.doubles_rank else 1
    return {
        layer: compute_scaling(section, read_rank(parts) / copies) if has_rank(parts) else 1.0
        for layer, parts in group_by_layer(state).items()
    }


def compute_delta(parts: Parts, scale: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the matrix (N, K) that is added to the weight, times `scale`; for DoRA, before rows are rescaled.

    OFT has none without a weight: see `compute_weight_change`.
    """
    held = {name: tensor.to(dtype) for name, tensor in parts.items()}
    if "lora_A.weight" in held:
        return held["lora_B.weight"].flatten(1) @ held["lora_A.weight"].flatten(1) * scale
    if "hada_w1_a" in held:
        return (held["hada_w1_a"] @ held["hada_w1_b"]) * (held["hada_w2_a"] @ held["hada_w2_b"]) * scale
    w1, w2 = compute_kronecker_factors(held)
    return compute_kronecker(w1, w2) * scale


def compute_weight_change(weight: Tensor, parts: Parts, scale: float, strength: float = 1.0) -> Tensor:
    """Return the change of a weight by the adapter, in the weight's shape and dtype.

    Args:
        weight: the layer's weight.
        parts: the layer's tensors.
        scale: alpha / rank.
        strength: strength of the whole adapter, as in programs that load it.
    """
    if "oft_blocks" in parts:
        added = rotate_rows(compute_rotation(parts["oft_blocks"]).to(weight), weight, 0)
        return added * strength
    added = compute_delta(parts, scale, weight.dtype).to(weight.device)
    if "lora_magnitude_vector" in parts:
        sum_NK = weight.flatten(1) + added
        length_N = torch.linalg.vector_norm(sum_NK, dim=1)
        magnitude_N = parts["lora_magnitude_vector"].flatten().to(weight)
        added = sum_NK * _divide_lengths(magnitude_N, length_N)[:, None] - weight.flatten(1)
    return (added * strength).reshape(weight.shape)


# -- DoRA --------------------------------------------------------------------------------------------------------------


def compute_length_ratio(layer: Any, a: Tensor, b: Tensor, scaling: float, magnitude_N: Tensor) -> Tensor:
    """Return m / |W + s B A| for each row, float32 (N), with a gradient for m alone.

    The norm gets none: "we suggest treating the norm as a constant" (Liu et al., 4.3). W is dequantized some rows at a
    time, as the layer does, and nothing of it is kept.
    """
    return _divide_lengths(magnitude_N, compute_row_lengths(layer, a, b, scaling))


def compute_row_lengths(layer: Any, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return |W + s B A| for each row of a layer's weight, float32 (N).

    Args:
        layer: a frozen layer of any storage, `nn.Linear` or `nn.Conv2d`.
        a, b: (R, K...) and (N, R...).
        scaling: alpha / rank.
    """
    if isinstance(layer, FrozenLayer) and layer.backend != "te":  # only TransformerEngine can read its own bytes
        parts, storage, dtype = list(fetch_parts(layer.get_parts())), layer.form.storage, layer.compute_dtype
    else:
        parts, storage, dtype = [layer.weight.detach()], "plain", layer.weight.dtype
    parts = list(map(gather_whole, parts))
    return _compute_row_lengths(parts, storage, a.detach().flatten(1), b.detach().flatten(1), scaling, dtype)


def _divide_lengths(magnitude_N: Tensor, length_N: Tensor) -> Tensor:
    # A row of zeros has no direction that could be rescaled, so it stays as it is.
    return torch.where(length_N > 0, magnitude_N / length_N.clamp_min(1e-30), 1.0)


# A custom operator: torch.compile would unroll the loop and split the dequantization.
@torch.library.custom_op("lora_fp8::row_lengths", mutates_args=())
def _compute_row_lengths(
    parts: list[Tensor], storage: str, a_RK: Tensor, b_NR: Tensor, scaling: float, dtype: torch.dtype
) -> Tensor:
    lengths_N = torch.empty(b_NR.shape[0], dtype=torch.float32, device=b_NR.device)
    a_RK, b_NR = a_RK.float(), b_NR.float()
    for rows, weight in _read_rows(parts, storage, dtype):
        sum_NK = torch.addmm(weight.to(b_NR.device, torch.float32), b_NR[rows], a_RK, alpha=scaling)
        lengths_N[rows] = torch.linalg.vector_norm(sum_NK, dim=1)
    return lengths_N


@_compute_row_lengths.register_fake
def _(parts: list[Tensor], storage: str, a_RK: Tensor, b_NR: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    return b_NR.new_empty(b_NR.shape[0], dtype=torch.float32)


PLAIN_ROWS = 1 << 22  # values per piece of an unquantized weight


def _read_rows(parts: list[Tensor], storage: str, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    if storage != "plain":
        yield from decode_rows(tuple(parts), storage, dtype)
        return
    weight_NK = parts[0].flatten(1)
    step = max(1, PLAIN_ROWS // weight_NK.shape[1])
    for start in range(0, weight_NK.shape[0], step):
        rows = slice(start, min(start + step, weight_NK.shape[0]))
        yield rows, weight_NK[rows]


# -- LoKr --------------------------------------------------------------------------------------------------------------


def split_side(side: int, factor: int) -> tuple[int, int]:
    """Return the two sides whose product is a side of the weight, as peft and LyCORIS split it.

    The first is `factor` where that divides the side, else the largest divisor up to it and to the square root; with a
    factor of 0 the largest up to the square root.
    """
    if factor and side % factor == 0:
        return factor, side // factor
    most = min(factor or side, math.isqrt(side))
    first = next(number for number in range(most, 0, -1) if side % number == 0)
    return first, side // first


def compute_kronecker_factors(parts: Parts) -> tuple[Tensor, Tensor]:
    """Return W1 (n1, k1) and W2 (n2, k2[, kh, kw]) of a LoKr layer; low-rank factors are multiplied."""
    w1, w2 = (
        parts[name] if name in parts else parts[f"{name}_a"] @ parts[f"{name}_b"] for name in ("lokr_w1", "lokr_w2")
    )
    return w1, w2


def compute_kronecker(w1: Tensor, w2: Tensor) -> Tensor:
    """Return kron(W1, W2) as the matrix (N, K) of a linear layer or a convolution."""
    return torch.kron(w1, w2.flatten(1))


def multiply_kronecker(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Multiply x (..., K) by kron(W1, W2) transposed without forming it: W1 X W2^T, where X (k1, k2) is x reshaped."""
    x = x.unflatten(-1, (w1.shape[1], w2.shape[1]))
    return (w1 @ F.linear(x, w2)).flatten(-2)


# -- LoHa --------------------------------------------------------------------------------------------------------------


class HadamardLinear(torch.autograd.Function):
    """Multiplies x (M, K) by the transposed LoHa delta; the backward recomputes the delta (N, K) instead of keeping it.

    Arguments: x; W1a (N, R), W1b (R, K), W2a, W2b; the factor.
    """

    @staticmethod
    def forward(  # noqa: PLR0913  # autograd takes each tensor by itself
        ctx: Any, x_MK: Tensor, w1_a: Tensor, w1_b: Tensor, w2_a: Tensor, w2_b: Tensor, scale: float
    ) -> Tensor:
        """Return x times the transposed delta (M, N), keeping only x and the four factors."""
        ctx.save_for_backward(x_MK, w1_a, w1_b, w2_a, w2_b)
        ctx.scale = scale
        return x_MK @ ((w1_a @ w1_b) * (w2_a @ w2_b) * scale).T

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for x and the four factors; the last argument has none."""
        x_MK, w1_a, w1_b, w2_a, w2_b = ctx.saved_tensors
        left_NK, right_NK = w1_a @ w1_b, w2_a @ w2_b
        grad_x = grad_MN @ (left_NK * right_NK * ctx.scale) if ctx.needs_input_grad[0] else None
        grad_NK = (grad_MN.T @ x_MK) * ctx.scale
        of_left, of_right = grad_NK * right_NK, grad_NK * left_NK
        return grad_x, of_left @ w1_b.T, w1_a.T @ of_left, of_right @ w2_b.T, w2_a.T @ of_right, None


# -- OFT ---------------------------------------------------------------------------------------------------------------

LIMIT = 1000.0
"""alpha of a file with OFT, where it limits the norm of Q and not the strength: far above any that is trained. ComfyUI
takes 0 for no limit, A1111 for a limit of 0."""


def choose_block_size(rows: int, most: int) -> int:
    """Return the size of the blocks of a layer with so many output features: their largest divisor up to `most`."""
    return next(size for size in range(min(rows, most), 0, -1) if rows % size == 0)


def compute_rotation(blocks: Tensor) -> Tensor:
    """Return R - I of OFT's blocks (k, n, n), in float32.

    R = (I + Q) (I - Q)^-1 is Cayley's rotation of Q = P - P^T; R - I = 2 Q (I - Q)^-1 loses nothing where Q is small.
    """
    blocks = blocks.float()
    q = blocks - blocks.mT
    eye = torch.eye(q.shape[-1], dtype=q.dtype, device=q.device)
    return torch.linalg.solve_ex(eye - q, 2 * q, left=False).result


def rotate_rows(turned: Tensor, values: Tensor, dim: int) -> Tensor:
    """Return what blocks of R - I (k, n, n) add to values along the dimension of the output features: (R - I)^T y."""
    count, size, _ = turned.shape
    parts = values.movedim(dim, -1).unflatten(-1, (count, size))
    return torch.einsum("knm,...kn->...km", turned, parts).flatten(-2).movedim(-1, dim)


def limit_norm(blocks: Tensor, alpha: float) -> Tensor:
    """Return the blocks of a file at the norm to which its alpha limits Q; an alpha of 0 limits nothing."""
    q = blocks.double() - blocks.double().mT
    norm = float(q.norm())
    return blocks.float() * (alpha / norm) if 0 < alpha < norm else blocks
