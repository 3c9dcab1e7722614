"""The matmul of a frozen layer: dequantize the weight and multiply, or multiply in FP8.

There are three ways to compute `y = x W^T + b` and its gradient for x. The weight never gets a gradient, so a step
costs two GEMMs per layer instead of three, and backward keeps only references to the layer's own bytes and scales.
(Dequantizing before `F.linear` would make autograd save the dequantized weight of every layer: the memory that FP8 is
to save.)

| compute | forward | gradient for x |
|---|---|---|
| upcast | W dequantized, GEMM in the compute dtype | W dequantized again, GEMM in the compute dtype |
| fp8 | x to e4m3 with a scale per token, FP8 GEMM | dY to e4m3 with a scale per token, FP8 GEMM |
| fp8_forward | as fp8 | as upcast |

One stored copy of W serves both FP8 GEMMs. In the forward, W's row scale indexes the output and multiplies the product.
In the backward, it indexes the dimension that is summed over, so dY is multiplied by it before dY is quantized. Only
the layout differs: FP8 tensor cores need both operands contiguous along the sum, so the backward transposes the bytes
into a scratch tensor that lives for that GEMM only.

The GEMM itself runs with unit scales, and the scales multiply its result. torch's kernel for scales per row was
measured to be slower on Hopper than the one for scales per tensor, by up to a factor of two on some shapes
(pytorch#147971).

Activations and gradients are quantized anew at every step, by one of these scaling recipes:

* current: from the tensor itself, per token.
* delayed: one scale per tensor from the largest values of past steps (Micikevicius et al. 2022, as in
  TransformerEngine). It needs no pass over the tensor before the cast, but clips a sudden large value.
* block: per 1x128 block, for a weight with 128x128 scales (as DeepSeek-V3 trains).

Shapes: M tokens (all leading dimensions), N output features, K input features.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .formats import E4M3_MAX, apply_scale_, compute_scales, decode, make_constant
from .stream import fetch_parts

E4M3 = torch.float8_e4m3fn
BLOCK = 128


class UpcastLinear(torch.autograd.Function):
    """Computes `y = x @ decode(W).T + bias`, with a gradient for x (and bias) only.

    Arguments: x (..., K); bias (N) or None; the storage's name; the two or four tensors of `formats.encode`.
    """

    # The parts are named one by one: with `*parts`, torch.compile (torch 2.13) believes that `ctx` was left out if the
    # number of arguments equals the number of parameters, which is so for two parts.
    @staticmethod
    def forward(  # noqa: PLR0913  # autograd takes each tensor by itself
        ctx: Any,
        x: Tensor,
        bias_N: Tensor | None,
        storage: str,
        qweight: Tensor,
        scale: Tensor,
        nested_scale: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> Tensor:
        """Compute y (..., N); keep references to the layer's parts, and no dequantized weight."""
        parts: tuple[Tensor, ...] = (qweight, scale)
        if nested_scale is not None and offset is not None:
            parts = (qweight, scale, nested_scale, offset)
        ctx.save_for_backward(*parts)  # references to the layer's own tensors: no extra bytes
        ctx.storage = storage
        return F.linear(x, decode(fetch_parts(parts), storage, x.dtype), bias_N)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for x and the bias, and None for the other arguments."""
        parts = ctx.saved_tensors  # read once: non-reentrant checkpointing refuses a second access
        grad_x = grad_bias_N = None
        if ctx.needs_input_grad[0]:
            weight_NK = decode(hide_from_compiler(fetch_parts(parts)), ctx.storage, grad.dtype)
            # Flattened as autograd does for F.linear, so that the result is equal bit for bit.
            grad_x = (grad.reshape(-1, grad.shape[-1]) @ weight_NK).view(*grad.shape[:-1], weight_NK.shape[1])
        if ctx.needs_input_grad[1]:
            grad_bias_N = grad.sum(dim=tuple(range(grad.ndim - 1)))
        return grad_x, grad_bias_N, None, *[None for _ in parts]


def hide_from_compiler(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Hide from torch.compile that the backward dequantizes the same parts as the forward.

    Otherwise it would keep the dequantized weight of every layer between the two.
    """
    if not torch.compiler.is_compiling():
        return parts
    return parts[0].bitwise_not().bitwise_not(), *parts[1:]


class Fp8Linear(torch.autograd.Function):
    """As `UpcastLinear`, with e4m3 operands in the forward GEMM and, unless `precise_backward`, in the backward's.

    Arguments: x (..., K), which gets a gradient; its e4m3 values (M, K) and scale from `quantize`; bias (N) or None;
    W's bytes and scale; True if the backward dequantizes W instead; True if the forward may accumulate fast (in fewer
    bits); the recipe; the delayed recipe's amax history of gradients and largest value of this step, else None.
    """

    @staticmethod
    def forward(  # noqa: PLR0913  # autograd takes each tensor by itself
        ctx: Any,
        x: Tensor,
        values_MK: Tensor,
        x_scale: Tensor,
        bias_N: Tensor | None,
        qweight_NK: Tensor,
        scale: Tensor,
        precise_backward: bool,
        fast_accum: bool,
        recipe: str,
        history: Tensor | None,
        newest: Tensor | None,
    ) -> Tensor:
        """Compute y (..., N) in FP8; keep references to W's bytes and scale."""
        ctx.save_for_backward(qweight_NK, scale)
        ctx.precise_backward, ctx.recipe, ctx.history, ctx.newest = precise_backward, recipe, history, newest
        qweight_NK, scale = fetch_parts((qweight_NK, scale))
        y_MN = _multiply((values_MK, x_scale), qweight_NK, scale, x.dtype, recipe, fast_accum)
        if bias_N is not None:
            y_MN = y_MN + bias_N
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for x and the bias, and None for the other arguments."""
        qweight_NK, scale = ctx.saved_tensors
        grad_x = grad_bias_N = None
        if ctx.needs_input_grad[0]:
            qweight_NK, scale = fetch_parts((qweight_NK, scale))
            grad_MN = grad.reshape(-1, grad.shape[-1])
            if ctx.precise_backward:
                grad_MK = grad_MN @ decode(hide_from_compiler((qweight_NK, scale)), "fp8", grad.dtype)
            else:
                if ctx.recipe == "block":
                    folded_MN, transposed_scale = grad_MN, scale.t().contiguous()
                else:
                    folded_MN, transposed_scale = grad_MN * scale.view(1, -1), None  # in float32
                quantized = quantize(folded_MN, ctx.recipe, ctx.history, ctx.newest)
                # Fast accumulation is for the forward only: it drops small terms, which gradients need.
                grad_MK = _multiply(quantized, transpose(qweight_NK), transposed_scale, grad.dtype, ctx.recipe, False)
            grad_x = grad_MK.view(*grad.shape[:-1], qweight_NK.shape[1])
        if ctx.needs_input_grad[3]:
            grad_bias_N = grad.sum(dim=tuple(range(grad.ndim - 1)))
        return grad_x, None, None, grad_bias_N, None, None, None, None, None, None, None


def quantize(
    x_MK: Tensor, recipe: str = "current", history: Tensor | None = None, newest: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize an activation or gradient to e4m3, so that value * scale = x.

    A row with NaN or infinity becomes NaN, as in a bf16 GEMM; it is never clipped to 448.

    Args:
        x_MK: the tensor.
        recipe: "current": scale (M, 1). "delayed": scale (1, 1), from `history`. "block": scale (M, K / 128).
        history: past largest values of the delayed recipe.
        newest: largest value (1) of this step, raised in place to this tensor's if that is larger.

    Returns:
        The e4m3 values (M, K) and the float32 scale.
    """
    if recipe == "block":
        blocks = x_MK.reshape(x_MK.shape[0], -1, BLOCK)
        amax = torch.linalg.vector_norm(blocks, math.inf, dim=-1)
        scale = compute_scales(E4M3_MAX, amax)
        return _to_e4m3(blocks / scale[:, :, None]).view(x_MK.shape), scale
    if recipe == "delayed":
        if history is None or newest is None:
            raise ValueError("quantize: the recipe 'delayed' needs `history` and `newest`")
        amax = x_MK.abs().amax().to(torch.float32).view(1)
        torch.maximum(newest, amax, out=newest)
        known = history.amax().view(1)
        # Before the first step the history is empty, so the tensor's own maximum is used.
        scale = compute_scales(E4M3_MAX, torch.where(known > 0, known, amax)).view(1, 1)
        values = (x_MK / scale).clamp_(-E4M3_MAX, E4M3_MAX)
        return _to_e4m3(values), torch.where(amax.isfinite(), scale, float("nan"))
    scale = compute_scales(E4M3_MAX, torch.linalg.vector_norm(x_MK, math.inf, dim=-1, keepdim=True))
    return _to_e4m3(x_MK / scale), scale


def _to_e4m3(values: Tensor) -> Tensor:
    # Without clipping: the largest quotient is 448 plus a rounding error, which the cast rounds to 448.
    # Row-major, as the CUDA kernel requires: with one image, a tensor from (B, C, H, W) is column-major.
    return values.to(E4M3, memory_format=torch.contiguous_format)


def transpose(qweight_NK: Tensor) -> Tensor:
    """Return the bytes with rows and columns swapped, contiguous (K, N)."""
    return qweight_NK.t().contiguous()


def _multiply(
    quantized: tuple[Tensor, Tensor],
    qweight_NK: Tensor,
    scale: Tensor | None,
    dtype: torch.dtype,
    recipe: str,
    fast_accum: bool,
) -> Tensor:
    """Compute `(a * a_scale) @ (W * scale).T` of e4m3 values; `quantized` is (a, a_scale). Returns (M, N)."""
    a_MK, a_scale = quantized
    if recipe == "block":
        if scale is None:
            raise ValueError("the recipe 'block' needs the weight's scales")
        return _multiply_blocks(a_MK, a_scale, qweight_NK.view(E4M3), scale, dtype)
    # Scaled in float32: a bf16 scale would add an error of 0.2 %.
    y_MN = multiply_unscaled(a_MK, qweight_NK, dtype, fast_accum)
    if scale is None:
        return (y_MN * a_scale).to(dtype)
    return (y_MN * a_scale).mul_(scale.view(1, -1)).to(dtype)


def multiply_unscaled(a_MK: Tensor, qweight_NK: Tensor, dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """Compute `a @ W.T` of the e4m3 values without scales. Returns (M, N) in `dtype`, for fp16 in float32.

    The CUDA kernel has layout rules that the CPU's does not enforce: a row-major, W^T column-major, K and N multiples
    of 16. `tests/test_matmul.py` checks every layer of the large models against them without a GPU.
    """
    # Unscaled sums reach 448 * 448 * K, too much for fp16.
    wide = torch.float32 if dtype == torch.float16 else dtype
    if a_MK.device.type == "cpu":
        # torch 2.13's CPU kernel is a plain loop, 400 to 1,400 times slower than this (2026-11-23, one core of a Xeon
        # with AVX-512). Products of e4m3 values are exact in float32, and both add them in float32.
        return (a_MK.to(torch.float32) @ qweight_NK.view(E4M3).to(torch.float32).t()).to(wide)
    scale = make_constant(1.0, a_MK)
    weight_KN = qweight_NK.view(E4M3).t()
    return torch._scaled_mm(a_MK, weight_KN, scale_a=scale, scale_b=scale, out_dtype=wide, use_fast_accum=fast_accum)


def _multiply_blocks(a_MK: Tensor, a_scale: Tensor, weight_NK: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply 1x128 blocks by 128x128 blocks. Torch does so on Hopper only; a CPU multiplies dequantized values."""
    if a_MK.device.type == "cpu":
        a = apply_scale_(a_MK.to(torch.float32), a_scale)
        return (a @ apply_scale_(weight_NK.to(torch.float32), scale).t()).to(dtype)
    per_row, square = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
    # cuBLAS reads scales in groups of 16 bytes: four rows of the input, and four blocks along the weight's sum.
    num_rows, more = a_MK.shape[0], -a_MK.shape[0] % 4
    if more:
        bytes_MK = F.pad(a_MK.view(torch.uint8), (0, 0, 0, more))
        a_MK, a_scale = bytes_MK.view(E4M3), F.pad(a_scale, (0, 0, 0, more), value=1.0)
    y_MN = F.scaled_mm(
        a_MK,
        weight_NK.t(),
        a_scale.t().contiguous().t(),  # the kernel reads the scales of a column of blocks together
        per_row,
        F.pad(scale, (0, -scale.shape[1] % 4)).t(),
        square,
        output_dtype=dtype,
    )
    return y_MN[:num_rows]


# -- one quantized input for several layers ----------------------------------------------------------------------------

_last: tuple[Any, int, Any, tuple[Tensor, Tensor]] | None = None


def quantize_shared(
    x: Tensor, recipe: str, kernel: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize x (..., K) once for layers that get the same tensor one after the other, as q, k and v do.

    Holds the last result until another tensor comes or `forget_shared` is called. Under torch.compile nothing is
    remembered: the compiler sees that the three computations are the same.

    Args:
        x: the input.
        recipe: as in `quantize`, without "delayed".
        kernel: replaces `quantize`, except under torch.compile, which generates its own kernel.
    """
    global _last
    if torch.compiler.is_compiling():
        return quantize(x.reshape(-1, x.shape[-1]), recipe)
    if _last is not None:
        tensor, version, how, result = _last
        if tensor() is x and version == x._version and how == (recipe, kernel):
            return result
    x_MK = x.detach().reshape(-1, x.shape[-1])
    result = quantize(x_MK, recipe) if kernel is None else kernel(x_MK)
    _last = (weakref.ref(x), x._version, (recipe, kernel), result)
    return result


def forget_shared() -> None:
    """Free the last quantized input."""
    global _last
    _last = None
