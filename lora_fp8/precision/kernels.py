"""Triton kernels of the FP8 matmul: operations that take torch several passes over a large tensor, done in one.

| kernel | what it does | what torch writes in between |
|---|---|---|
| `quantize_rows` | reads x once, writes e4m3 and a scale per row | abs(x), x in float32, x / scale, and that clipped |
| the same with a factor | multiplies dY by W's row scale on the way | also dY * scale in float32 |
| `transpose_bytes` | transposes W's bytes for the backward, tile by tile | nothing, but reads single bytes far apart |
| `epilogue` | applies scales, bias and LoRA to the GEMM's result | each result: three in float32, three in bf16 |

`KernelLinear` combines them. Triton comes with torch for CUDA. Without a GPU, Triton can interpret the kernels
(`TRITON_INTERPRET=1`, set before anything imports triton), and this is how they are tested: slowly, and with a cast to
e4m3 that does not round to nearest.

In code compiled by torch.compile, rows are quantized by torch's own operations: the compiler fuses them with the norm
and the modulation before them, which a call to a kernel would prevent. The other two kernels are kept, as operators.

Shapes: M tokens, N output features, K input features, R rank.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from .formats import E4M3_MAX, MIN_SCALE, decode
from .matmul import E4M3, hide_from_compiler, multiply_unscaled, quantize
from .stream import fetch_parts

_INTERPRETED = knobs.runtime.interpret
_LARGEST = tl.constexpr(E4M3_MAX)
_SMALLEST_SCALE = tl.constexpr(MIN_SCALE)
_TILE = 128  # bytes a side: whole cache lines in both directions
_WIDEST = (
    16384  # values of a row that a program's registers hold, 32 a thread; 64 spill (tests/test_kernels_compiled.py)
)
_LARGEST_RANK_BLOCK = 32  # ranks that are multiplied at once; 64 spill on sm_89 with Triton 3.7.1


# -- rows to e4m3 ------------------------------------------------------------------------------------------------------


@triton.jit
def _load_row(x_ptr, factor_ptr, k, K, factor_stride, FOLD: tl.constexpr):
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    if FOLD:
        x *= tl.load(factor_ptr + k * factor_stride, mask=k < K, other=0.0)
    return x


@triton.jit
def _quantize_rows(
    x_ptr, factor_ptr, values_ptr, scale_ptr, K, x_stride, factor_stride,
    FOLD: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    k = tl.arange(0, BLOCK)
    if WHOLE:
        x = _load_row(x_ptr, factor_ptr, k, K, factor_stride, FOLD)
        size = tl.abs(x)
        # A maximum ignores NaN, so NaN is checked separately.
        broken = tl.where(size < float("inf"), 0, 1)
    else:  # a row that does not fit into registers is read twice
        size, broken = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
        for first in range(0, K, BLOCK):
            part = tl.abs(_load_row(x_ptr, factor_ptr, first + k, K, factor_stride, FOLD))
            size = tl.maximum(size, part)
            broken = tl.where(part < float("inf"), broken, 1)
    scale = tl.math.div_rn(tl.max(size, axis=0), _LARGEST)
    scale = tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
    scale = tl.where(tl.max(broken, axis=0) == 0, scale, float("nan"))
    # No clipping: the largest quotient is 448 plus a rounding error, which the cast rounds to 448.
    if WHOLE:
        tl.store(values_ptr + row * K + k, tl.math.div_rn(x, scale).to(tl.float8e4nv), mask=k < K)
    else:
        for first in range(0, K, BLOCK):
            part = _load_row(x_ptr, factor_ptr, first + k, K, factor_stride, FOLD)
            place = values_ptr + row * K + first + k
            tl.store(place, tl.math.div_rn(part, scale).to(tl.float8e4nv), mask=first + k < K)
    tl.store(scale_ptr + row, scale)


def quantize_rows(x_MK: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize `x * factor` as `matmul.quantize` does with the recipe "current".

    A row with NaN or infinity gets the scale NaN, so that its products are NaN.

    Args:
        x_MK: bf16, fp16 or float32.
        factor: float32, K values or one; None means 1. The product exists in registers only.

    Returns:
        e4m3 values (M, K) and float32 scale (M, 1).
    """
    num_rows, num_columns = x_MK.shape
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    values_MK = torch.empty((num_rows, num_columns), dtype=E4M3, device=x_MK.device)
    scale = torch.empty((num_rows, 1), dtype=torch.float32, device=x_MK.device)
    block = min(triton.next_power_of_2(num_columns), _WIDEST)
    with torch.cuda.device_of(x_MK):
        _quantize_rows[(num_rows,)](
            x_MK,
            scale if factor is None else factor,
            values_MK,
            scale,
            num_columns,
            x_MK.stride(0),
            0 if factor is None or factor.numel() == 1 else 1,
            FOLD=factor is not None,
            BLOCK=block,
            WHOLE=num_columns <= block,
            num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16,
        )
    return values_MK, scale


# -- W's bytes for the backward ----------------------------------------------------------------------------------------


@triton.jit
def _transpose_bytes(bytes_ptr, transposed_ptr, N, K, TILE: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    k = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    tile = tl.load(bytes_ptr + n[:, None] * K + k[None, :], mask=(n[:, None] < N) & (k[None, :] < K), other=0)
    mask = (k[:, None] < K) & (n[None, :] < N)
    tl.store(transposed_ptr + k[:, None] * N + n[None, :], tl.trans(tile), mask=mask)


def transpose_bytes(qweight_NK: Tensor) -> Tensor:
    """Transpose contiguous uint8 (N, K) of any size, as `matmul.transpose` does. Returns contiguous (K, N)."""
    if torch.compiler.is_compiling():
        return _transpose_operator(qweight_NK)
    num_rows, num_columns = qweight_NK.shape
    transposed_KN = qweight_NK.new_empty((num_columns, num_rows))
    grid = (triton.cdiv(num_rows, _TILE), triton.cdiv(num_columns, _TILE))
    with torch.cuda.device_of(qweight_NK):
        _transpose_bytes[grid](qweight_NK, transposed_KN, num_rows, num_columns, TILE=_TILE, num_warps=8)
    return transposed_KN


@torch.library.custom_op("lora_fp8::transpose_bytes", mutates_args=())
def _transpose_operator(qweight_NK: Tensor) -> Tensor:
    return transpose_bytes(qweight_NK)


@_transpose_operator.register_fake
def _(qweight_NK: Tensor) -> Tensor:
    return qweight_NK.new_empty((qweight_NK.shape[1], qweight_NK.shape[0]))


# -- what follows the GEMM ---------------------------------------------------------------------------------------------


@triton.jit
def _epilogue(
    sum_ptr, a_scale_ptr, w_scale_ptr, bias_ptr, h_ptr, b_ptr, y_ptr,
    M, N, R, scaling, w_stride, b_stride_n, b_stride_r,
    SCALED: tl.constexpr, BIASED: tl.constexpr, ADAPTED: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = m[:, None] * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    y = tl.load(sum_ptr + place, mask=inside, other=0.0).to(tl.float32)
    y *= tl.load(a_scale_ptr + m, mask=m < M, other=0.0)[:, None]
    if SCALED:
        y *= tl.load(w_scale_ptr + n * w_stride, mask=n < N, other=0.0)[None, :]
    if BIASED:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    if ADAPTED:
        update = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, R, BLOCK_R):
            r = first + tl.arange(0, BLOCK_R)
            h = tl.load(h_ptr + m[:, None] * R + r[None, :], mask=(m[:, None] < M) & (r[None, :] < R), other=0.0)
            b_place = r[:, None] * b_stride_r + n[None, :] * b_stride_n
            b = tl.load(b_ptr + b_place, mask=(r[:, None] < R) & (n[None, :] < N), other=0.0)
            if WIDE:
                h, b = h.to(tl.float32), b.to(tl.float32)
            update = tl.dot(h, b, update, input_precision="ieee")
        y += scaling * update
    tl.store(y_ptr + place, y.to(y_ptr.dtype.element_ty), mask=inside)


def apply_epilogue(
    sum_MN: Tensor,
    a_scale: Tensor,
    w_scale: Tensor | None,
    bias_N: Tensor | None,
    h_MR: Tensor | None,
    b_NR: Tensor | None,
    scaling: float,
    dtype: torch.dtype,
) -> Tensor:
    """Compute `sum * a_scale * w_scale + bias + scaling * h @ b.T` in float32, rounded once to `dtype`.

    Args:
        sum_MN: result of the GEMM without scales; if it has the right dtype, the result is written into its memory.
        a_scale: float32 (M, 1).
        w_scale: float32, N values or one; None means 1.
        bias_N: bias, or None.
        h_MR, b_NR: (M, R) and (N, R, of any strides) in one dtype; both None means no LoRA.
        scaling: factor of the LoRA.
        dtype: dtype of the result.
    """
    if torch.compiler.is_compiling():
        return _epilogue_operator(sum_MN, a_scale, w_scale, bias_N, h_MR, b_NR, scaling, dtype)
    y_MN = sum_MN if sum_MN.dtype == dtype else torch.empty_like(sum_MN, dtype=dtype)
    return _run_epilogue(sum_MN, a_scale, w_scale, bias_N, h_MR, b_NR, scaling, y_MN)


def _run_epilogue(
    sum_MN: Tensor,
    a_scale: Tensor,
    w_scale: Tensor | None,
    bias_N: Tensor | None,
    h_MR: Tensor | None,
    b_NR: Tensor | None,
    scaling: float,
    y_MN: Tensor,
) -> Tensor:
    num_rows, num_columns = sum_MN.shape
    rank = 0 if h_MR is None else h_MR.shape[1]
    block_m, block_n = 64, 128
    grid = (triton.cdiv(num_rows, block_m), triton.cdiv(num_columns, block_n))
    with torch.cuda.device_of(sum_MN):
        _epilogue[grid](
            sum_MN,
            a_scale,
            a_scale if w_scale is None else w_scale,
            a_scale if bias_N is None else bias_N,
            a_scale if h_MR is None else h_MR,
            a_scale if b_NR is None else b_NR,
            y_MN,
            num_rows,
            num_columns,
            rank,
            scaling,
            0 if w_scale is None or w_scale.numel() == 1 else 1,
            0 if b_NR is None else b_NR.stride(0),
            0 if b_NR is None else b_NR.stride(1),
            SCALED=w_scale is not None,
            BIASED=bias_N is not None,
            ADAPTED=h_MR is not None,
            WIDE=_INTERPRETED,  # the interpreter multiplies bf16 as if its bits were integers
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_R=min(_LARGEST_RANK_BLOCK, max(16, triton.next_power_of_2(rank))),
            num_warps=8,
        )
    return y_MN


@torch.library.custom_op("lora_fp8::epilogue", mutates_args=())
def _epilogue_operator(
    sum_MN: Tensor,
    a_scale: Tensor,
    w_scale: Tensor | None,
    bias_N: Tensor | None,
    h_MR: Tensor | None,
    b_NR: Tensor | None,
    scaling: float,
    dtype: torch.dtype,
) -> Tensor:
    y_MN = torch.empty_like(sum_MN, dtype=dtype)  # a custom operator must not return its input
    return _run_epilogue(sum_MN, a_scale, w_scale, bias_N, h_MR, b_NR, scaling, y_MN)


@_epilogue_operator.register_fake
def _(
    sum_MN: Tensor,
    a_scale: Tensor,
    w_scale: Tensor | None,
    bias_N: Tensor | None,
    h_MR: Tensor | None,
    b_NR: Tensor | None,
    scaling: float,
    dtype: torch.dtype,
) -> Tensor:
    return torch.empty_like(sum_MN, dtype=dtype)


# -- a layer and its adapter -------------------------------------------------------------------------------------------


class KernelLinear(torch.autograd.Function):
    """`matmul.Fp8Linear` with the recipe "current", and a LoRA added in the same pass over the result.

        y = x W^T + bias + scaling * (x A^T) B^T

    W's product is computed in FP8. A's and B's are computed in their own dtype, as in peft, except that they are added
    in float32 before the single rounding. The gradient for x contains both parts and is rounded once too.

    Arguments: x (..., K), which gets a gradient; its e4m3 values (M, K) and scale (M, 1); bias (N) or None; W's bytes
    and scale; A (R, K) and B (N, R), or None and None; scaling; True if the backward dequantizes W instead of
    multiplying in FP8; True if the forward may accumulate fast (in fewer bits).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values_MK: Tensor,
        x_scale: Tensor,
        bias_N: Tensor | None,
        qweight_NK: Tensor,
        scale: Tensor,
        a_RK: Tensor | None,
        b_NR: Tensor | None,
        scaling: float,
        precise_backward: bool,
        fast_accum: bool,
    ) -> Tensor:
        """Compute y (..., N) with the bias and the LoRA added in the epilogue."""
        ctx.scaling, ctx.precise_backward = scaling, precise_backward
        h_MR = None
        if a_RK is None:
            ctx.save_for_backward(qweight_NK, scale)
        else:
            # Both the input and the product are cast to A's dtype, as in peft: autocast may have given the product
            # another.
            h_MR = (x.reshape(-1, x.shape[-1]).to(a_RK.dtype) @ a_RK.t()).to(a_RK.dtype)
            ctx.save_for_backward(qweight_NK, scale, x, h_MR, a_RK, b_NR)
        qweight_NK, scale = fetch_parts((qweight_NK, scale))
        sum_MN = multiply_unscaled(values_MK, qweight_NK, x.dtype, fast_accum)
        y_MN = apply_epilogue(sum_MN, x_scale, scale, bias_N, h_MR, b_NR, scaling, x.dtype)
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for x, the bias, A and B, and None for the other arguments."""
        saved = ctx.saved_tensors  # read once: non-reentrant checkpointing refuses a second access
        qweight_NK, scale = saved[:2]
        grad_x = grad_bias_N = grad_a_RK = grad_b_NR = a_RK = grad_h_MR = None
        grad_MN = grad.reshape(-1, grad.shape[-1])
        if len(saved) > 2:
            x, h_MR, a_RK, b_NR = saved[2:]
            own_MN = grad_MN.to(b_NR.dtype)
            grad_h_MR = (own_MN @ b_NR) * ctx.scaling
            if ctx.needs_input_grad[6]:
                grad_a_RK = grad_h_MR.t() @ x.reshape(-1, x.shape[-1]).to(a_RK.dtype)
            if ctx.needs_input_grad[7]:
                grad_b_NR = (own_MN.t() @ h_MR) * ctx.scaling
        if ctx.needs_input_grad[0]:
            qweight_NK, scale = fetch_parts((qweight_NK, scale))
            if ctx.precise_backward:
                grad_MK = grad_MN @ decode(hide_from_compiler((qweight_NK, scale)), "fp8", grad.dtype)
                if a_RK is not None:
                    grad_MK = (grad_MK + grad_h_MR @ a_RK).to(grad.dtype)
            else:
                if torch.compiler.is_compiling():
                    values_MN, grad_scale = quantize(grad_MN * scale.view(1, -1))
                else:
                    values_MN, grad_scale = quantize_rows(grad_MN, scale)
                # Fast accumulation is for the forward only: it drops small terms, which gradients need.
                sum_MK = multiply_unscaled(values_MN, transpose_bytes(qweight_NK), grad.dtype, False)
                a_KR = None if a_RK is None else a_RK.t()
                grad_MK = apply_epilogue(sum_MK, grad_scale, None, None, grad_h_MR, a_KR, 1.0, grad.dtype)
            grad_x = grad_MK.view(*grad.shape[:-1], qweight_NK.shape[1])
        if ctx.needs_input_grad[3]:
            grad_bias_N = grad.sum(dim=tuple(range(grad.ndim - 1)))
        return grad_x, None, None, grad_bias_N, None, None, grad_a_RK, grad_b_NR, None, None, None
