"""Triton kernels of the FP8 matmul: what torch does to a large tensor in several passes over memory, done in one.

| kernel | what it does | what torch writes in between |
|---|---|---|
| `quantize_rows` | reads x once, writes e4m3 and a scale per row | its size, x in float32, x / scale, that clipped |
| the same with a factor | folds W's row scale into dY on the way | dY * scale in float32 too |
| `transpose_bytes` | W's bytes for the backward, tile by tile | nothing, but single bytes are read far apart |
| `epilogue` | scales, bias and LoRA onto the GEMM's result | the result of each: three in float32, three in bf16 |

`KernelLinear` puts them together. Triton comes with torch for CUDA. Without a GPU it can interpret the kernels
(`TRITON_INTERPRET=1`, set before anything imports triton), which is how they are tested: slowly, and with a cast to
e4m3 that does not round to nearest.

In code that torch.compile makes, rows are quantized by torch's own operations: the compiler fuses them with the norm
and the modulation in front, which a kernel that is called as a whole would prevent. The other two stay, as operators.

Shapes: M tokens, N output features, K input features, R rank.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from .formats import E4M3_MAX, MIN_SCALE, decode
from .matmul import E4M3, once_more, quantize, unscaled_product

_INTERPRETED = knobs.runtime.interpret
_LARGEST = tl.constexpr(E4M3_MAX)
_SMALLEST_SCALE = tl.constexpr(MIN_SCALE)
_TILE = 128  # bytes a side: whole cache lines in both directions


# -- rows to e4m3 ------------------------------------------------------------------------------------------------------


@triton.jit
def _quantize_rows(
    x_ptr, factor_ptr, values_ptr, scale_ptr, K, x_stride, factor_stride, FOLD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    x = tl.load(x_ptr + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    if FOLD:
        x *= tl.load(factor_ptr + k * factor_stride, mask=inside, other=0.0)
    size = tl.abs(x)
    scale = tl.math.div_rn(tl.max(size, axis=0), _LARGEST)
    scale = tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
    # A maximum passes over NaN, so that is asked for.
    broken = tl.max(tl.where(size < float("inf"), 0, 1), axis=0)
    scale = tl.where(broken == 0, scale, float("nan"))
    # No clipping: the largest quotient is 448 and a rounding error, which the cast takes to 448.
    tl.store(values_ptr + row * K + k, tl.math.div_rn(x, scale).to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr + row, scale)


def quantize_rows(x_MK: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`matmul.quantize` of `x * factor` with the recipe "current": e4m3 values (M, K) and float32 scale (M, 1).

    Args:
        x_MK: bf16, fp16 or float32.
        factor: float32, K values or one; None means 1. The product exists in registers only.

    A row with NaN or infinity gets the scale NaN, so that what it is multiplied with is NaN.
    """
    num_rows, num_columns = x_MK.shape
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    values_MK = torch.empty((num_rows, num_columns), dtype=E4M3, device=x_MK.device)
    scale = torch.empty((num_rows, 1), dtype=torch.float32, device=x_MK.device)
    block = triton.next_power_of_2(num_columns)
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
            num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16,  # up to 32 values a thread, for any width
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
    """`matmul.transpose` of contiguous uint8 (N, K) of any size: contiguous (K, N)."""
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


def epilogue(
    sum_MN: Tensor,
    a_scale: Tensor,
    w_scale: Tensor | None,
    bias_N: Tensor | None,
    h_MR: Tensor | None,
    b_NR: Tensor | None,
    scaling: float,
    dtype: torch.dtype,
) -> Tensor:
    """`sum * a_scale * w_scale + bias + scaling * h @ b.T` in `dtype`, added up in float32 and rounded once.

    Args:
        sum_MN: what the GEMM gave without scales; its memory becomes that of the result where it has the dtype.
        a_scale: float32 (M, 1).
        w_scale: float32, N values or one; None means 1.
        h_MR: (M, R) and `b_NR`: (N, R, of any strides) in one dtype; both None means no LoRA.
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
            WIDE=_INTERPRETED,  # the interpreter multiplies bf16 as if its bits were whole numbers
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_R=min(64, max(16, triton.next_power_of_2(rank))),
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
    y_MN = torch.empty_like(sum_MN, dtype=dtype)  # an operator must not give back what it was given
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
    """`matmul.Fp8Linear` with the recipe "current", and a LoRA beside it in the same pass over the result.

        y = x W^T + bias + scaling * (x A^T) B^T

    W's part is multiplied in FP8; A's and B's in their own dtype, as peft does, except that their product is added in
    float32 before the one rounding. The gradient for x holds both parts, rounded once too.

    Arguments: x (..., K), which the gradient is for; its e4m3 values (M, K) and scale (M, 1); bias (N) or None; W's
    bytes and scale; A (R, K) and B (N, R), or None and None; scaling; whether the backward decodes W instead of
    multiplying in FP8; whether the forward may accumulate fast (in fewer bits).
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
        ctx.scaling, ctx.precise_backward = scaling, precise_backward
        h_MR = None
        if a_RK is None:
            ctx.save_for_backward(qweight_NK, scale)
        else:
            # To A's dtype, as peft casts; and the product too, which autocast may have given another.
            h_MR = (x.reshape(-1, x.shape[-1]).to(a_RK.dtype) @ a_RK.t()).to(a_RK.dtype)
            ctx.save_for_backward(qweight_NK, scale, x, h_MR, a_RK, b_NR)
        sum_MN = unscaled_product(values_MK, qweight_NK, x.dtype, fast_accum)
        y_MN = epilogue(sum_MN, x_scale, scale, bias_N, h_MR, b_NR, scaling, x.dtype)
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: non-reentrant checkpointing refuses a second look
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
            if ctx.precise_backward:
                grad_MK = grad_MN @ decode(once_more((qweight_NK, scale)), "fp8", grad.dtype)
                if a_RK is not None:
                    grad_MK = (grad_MK + grad_h_MR @ a_RK).to(grad.dtype)
            else:
                if torch.compiler.is_compiling():
                    values_MN, grad_scale = quantize(grad_MN * scale.view(1, -1))
                else:
                    values_MN, grad_scale = quantize_rows(grad_MN, scale)
                # Fast accumulation is for the forward only: gradients' small terms are what it drops.
                sum_MK = unscaled_product(values_MN, transpose_bytes(qweight_NK), grad.dtype, False)
                a_KR = None if a_RK is None else a_RK.t()
                grad_MK = epilogue(sum_MK, grad_scale, None, None, grad_h_MR, a_KR, 1.0, grad.dtype)
            grad_x = grad_MK.view(*grad.shape[:-1], qweight_NK.shape[1])
        if ctx.needs_input_grad[3]:
            grad_bias_N = grad.sum(dim=tuple(range(grad.ndim - 1)))
        return grad_x, None, None, grad_bias_N, None, None, grad_a_RK, grad_b_NR, None, None, None
