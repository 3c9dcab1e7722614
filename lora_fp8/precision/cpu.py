"""Convolutions in bf16 and fp16 on a CPU that has no instructions for these dtypes.

On such a CPU, torch computes them element by element: 4 to 30 times slower than in float32, which was 60 % of training
the bundled miniature. `install` replaces the three functions with versions that compute in float32 and round the result
once, as hardware with bf16 does. Tensors on other devices go to torch's own function.

Shapes: B batch, C input channels, O output channels.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_input

HALF = (torch.bfloat16, torch.float16)
NAMES = ("conv1d", "conv2d", "conv3d")


def install() -> None:
    """Compute these convolutions in float32 from now on in this process, unless the CPU has instructions for bf16."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return
    for name in NAMES:
        if not hasattr(convolution := getattr(F, name), "__wrapped__"):
            setattr(F, name, calculate_in_float32(convolution))


def calculate_in_float32(convolution: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the convolution with bf16 and fp16 on the CPU computed in float32; the result has the input's dtype."""

    @functools.wraps(convolution)
    def convolve(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **more: Any) -> Tensor:
        if input.dtype not in HALF or weight.dtype != input.dtype or input.device.type != "cpu":
            return convolution(input, weight, bias, *args, **more)
        wide = None if bias is None else bias.float()
        return convolution(input.float(), weight.float(), wide, *args, **more).to(input.dtype)

    convolve.__wrapped__ = convolution  # builtin functions have no attributes that `wraps` could copy
    return convolve


def compute_input_gradient(shape: torch.Size, weight: Tensor, grad: Tensor, *places: tuple[int, int]) -> Tensor:
    """Compute the gradient for the input of `F.conv2d`, as autograd does: on such a CPU in float32, rounded once.

    Args:
        shape: (B, C, H, W) of the input.
        weight: (O, C, R, S).
        grad: gradient for the output.
        places: stride, padding and dilation.
    """
    if hasattr(F.conv2d, "__wrapped__") and grad.dtype in HALF and grad.device.type == "cpu":
        return conv2d_input(shape, weight.float(), grad.float(), *places).to(grad.dtype)
    return conv2d_input(shape, weight, grad, *places)
