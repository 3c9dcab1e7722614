"""`FrozenConv2d`: a convolution whose weight is quantized and never changes.

The weight is dequantized before each convolution, and again in the backward: autograd would keep the dequantized weight
of every layer. It gets no gradient, so a step costs two convolutions per layer instead of three. GPUs have no FP8
convolution that torch exposes, so there is no other way to compute it.

Shapes: B images, C channels, H x W places; N output channels; a filter has R x S places, and K = C R S.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import Message
from . import cpu
from .formats import FP8_ROW, Format, decode
from .frozen import FrozenLayer
from .matmul import hide_from_compiler
from .stream import fetch_parts

SIZES = (*nn.Conv2d.__constants__, "transposed", "_reversed_padding_repeated_twice")
"""The attributes of a convolution besides its weight and bias."""
Pair = tuple[int, int]


def find_conv_problem(conv: nn.Conv2d) -> str:
    """Return why a convolution cannot be a `FrozenConv2d`, or "" if it can."""
    if type(conv) not in (nn.Conv2d, FrozenConv2d):
        return Message("{name} is not a plain nn.Conv2d", name=type(conv).__name__)
    if conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
        return Message("a grouped convolution, or one with padding other than zeros")
    return ""


class UpcastConv(torch.autograd.Function):
    """Computes `y = conv2d(x, decode(W)) + bias`, with a gradient for x (and bias) only.

    Arguments: x (B, C, H, W); bias (N) or None; the storage's name; the weight's shape (N, C, R, S); stride, padding
    and dilation; the two or four tensors of `formats.encode`.
    """

    # The parts are named one by one for torch.compile; see `matmul.UpcastLinear`.
    @staticmethod
    def forward(  # noqa: PLR0913  # autograd takes each tensor by itself
        ctx: Any,
        x: Tensor,
        bias_N: Tensor | None,
        storage: str,
        shape: tuple[int, ...],
        places: tuple[Pair, Pair, Pair],
        qweight: Tensor,
        scale: Tensor,
        nested_scale: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> Tensor:
        """Compute y (B, N, ...); keep references to the layer's parts, and neither a dequantized weight nor x."""
        parts: tuple[Tensor, ...] = (qweight, scale)
        if nested_scale is not None and offset is not None:
            parts = (qweight, scale, nested_scale, offset)
        ctx.save_for_backward(*parts)  # references to the layer's own tensors: no extra bytes
        ctx.storage, ctx.shape, ctx.places, ctx.input_shape = storage, shape, places, x.shape
        stride, padding, dilation = places
        return F.conv2d(x, decode(fetch_parts(parts), storage, x.dtype).view(shape), bias_N, stride, padding, dilation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for x and the bias, and None for the other arguments."""
        parts = ctx.saved_tensors  # read once: non-reentrant checkpointing refuses a second access
        grad_x = grad_bias_N = None
        if ctx.needs_input_grad[0]:
            weight = decode(hide_from_compiler(fetch_parts(parts)), ctx.storage, grad.dtype).view(ctx.shape)
            grad_x = cpu.compute_input_gradient(ctx.input_shape, weight, grad, *ctx.places)
        if ctx.needs_input_grad[1]:
            grad_bias_N = grad.sum(dim=(0, 2, 3))
        return grad_x, grad_bias_N, None, None, None, *[None for _ in parts]


class FrozenConv2d(FrozenLayer, nn.Conv2d):  # type: ignore[override]  # `weight` is dequantized at every access
    """A convolution with a frozen weight (N, C, R, S), stored as the matrix (N, K) of its flattened filters."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain convolution if called with the arguments of one.

        peft makes the convolutions of an adapter by calling the class of the layer that it adapts.
        """
        if args and isinstance(args[0], nn.Conv2d):
            return super().__new__(cls)
        return nn.Conv2d(*args, **kwargs)

    def __init__(self, like: nn.Conv2d, dtype: torch.dtype, form: Format = FP8_ROW) -> None:
        """Create the layer on the meta device, with the sizes of a convolution that `find_conv_problem` accepts."""
        nn.Module.__init__(self)  # nn.Conv2d's own would allocate and initialize a float weight
        for name in SIZES:
            setattr(self, name, getattr(like, name))
        bias_N = None if like.bias is None else torch.zeros(like.out_channels, dtype=dtype, device="meta")
        self.register_parameter("bias", None if bias_N is None else nn.Parameter(bias_N, False))
        self.form, self.compute_dtype = form, dtype
        self._make_("meta")
        self.train(like.training)

    @classmethod
    def from_conv(cls, conv: nn.Conv2d, dtype: torch.dtype, form: Format = FP8_ROW) -> Self:
        """Return a quantized copy of `conv`, on its device.

        Args:
            conv: the layer to copy.
            dtype: compute dtype.
            form: storage format.

        Raises:
            ValueError: the weight is not finite.
        """
        layer = cls(conv, dtype, form)
        layer.set_weight_(conv.weight.detach(), "weight")
        if conv.bias is not None:
            layer.bias = nn.Parameter(conv.bias.detach().to(dtype, copy=True), False)
        return layer

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Return (N, C, R, S)."""
        return self.out_channels, self.in_channels, *self.kernel_size

    @property
    def _places(self) -> tuple[Pair, Pair, Pair]:
        """Return stride, padding and dilation."""
        assert not isinstance(self.padding, str)
        pairs = [(pair[0], pair[1]) for pair in (self.stride, self.padding, self.dilation)]
        return pairs[0], pairs[1], pairs[2]

    def make_input_rows(self, x: Tensor) -> Tensor:
        """Return the patches (M, K) of an input (B, C, H, W), image by image, row by row."""
        stride, padding, dilation = self._places
        kernel = (self.kernel_size[0], self.kernel_size[1])
        return F.unfold(x, kernel, dilation, padding, stride).transpose(1, 2).flatten(0, 1)

    def set_compute_(self, compute: str, recipe: str = "current", fast_accum: bool = True) -> None:
        """Accept "upcast", the only way in which a convolution multiplies."""
        if compute != "upcast":
            raise ValueError(f"a convolution is dequantized, not multiplied as {compute!r}")

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, C, H, W), in the compute dtype, with the weight."""
        x, bias_N = self._cast(x)
        return UpcastConv.apply(x, bias_N, self.form.storage, self.weight_shape, self._places, *self.get_parts())
