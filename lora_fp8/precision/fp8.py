"""A frozen linear layer held in FP8 (e4m3, one float32 scale per output row) and decoded at the matmul.

Why each part is as it is:

* One scale per row, not per tensor or block: e4m3's error on bell-shaped weights is 2.65 % rms whatever the granularity
  (it is the 3-bit mantissa), but a row scale costs 4 bytes a row and removes the failure of unscaled casts, which flush
  small weights to zero (11 % error at a standard deviation of 0.005, 56 % at 0.001).
* The bytes are a uint8 *parameter*. A float8 parameter would silently become bf16, without its scale, in
  `module.to(bf16)` and in `load_state_dict`; gloo cannot send float8; and a buffer would be sent at every forward by
  DDP and never sharded by FSDP.
* An own autograd.Function. Decoding in front of `F.linear` would make autograd keep the decoded weight of every layer
  from forward to backward, which is the memory FP8 was to save. Here backward decodes again, and only references to the
  bytes and scales that the layer owns anyway are saved. The weight never gets a gradient, so a step costs two GEMMs per
  layer and not three.
* Decoding rounds once: bytes -> float32, times the float32 scale, -> compute dtype.

Shapes: N output features, K input features, B any leading dimensions.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

E4M3_MAX = 448.0
# Below float32's smallest normal number a scale would itself be denormal, which GPUs may flush to zero. A zero row gets
# this too.
MIN_SCALE = 2.0**-126
# Rows are encoded in pieces of about this many elements, so that the float32 working copy stays small beside the
# weight.
CHUNK_ELEMENTS = 1 << 18


def encode(weight_NK: Tensor, name: str = "weight") -> tuple[Tensor, Tensor]:
    """Quantizes a weight to e4m3 with a scale per row, `amax / 448`, in float32 arithmetic.

    Args:
        weight_NK: any floating dtype, on the device where the result shall be.
        name: the layer, for the error.

    Returns:
        `qweight_NK` (uint8, the bits of float8_e4m3fn) and `scale_N1` (float32).

    Raises:
        ValueError: the weight holds NaN or infinity. Checked here because torch's cast to e4m3 turns infinities into
        448.
    """
    num_rows, num_columns = weight_NK.shape
    qweight_NK = torch.empty(num_rows, num_columns, dtype=torch.uint8, device=weight_NK.device)
    scale_N1 = torch.empty(num_rows, 1, dtype=torch.float32, device=weight_NK.device)
    rows_at_once = max(1, CHUNK_ELEMENTS // max(1, num_columns))
    for start in range(0, num_rows, rows_at_once):
        rows = slice(start, start + rows_at_once)
        chunk = weight_NK[rows].to(torch.float32, copy=True)
        torch.div(chunk.abs().amax(dim=1, keepdim=True), E4M3_MAX, out=scale_N1[rows])
        scale_N1[rows].clamp_(min=MIN_SCALE)
        # amax / (amax / 448) may come out a hair above 448, and older torch turns what is above 464 into NaN.
        chunk.div_(scale_N1[rows]).clamp_(-E4M3_MAX, E4M3_MAX)
        qweight_NK[rows] = chunk.to(torch.float8_e4m3fn).view(torch.uint8)
    if scale_N1.device.type != "meta" and not (finite := torch.isfinite(scale_N1)).all():
        bad = (~finite).nonzero()[:, 0].tolist()
        raise ValueError(f"{name}: weight has NaN or infinity in {len(bad)} of {num_rows} rows (first: row {bad[0]})")
    return qweight_NK, scale_N1


def decode(qweight_NK: Tensor, scale_N1: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that the bytes stand for, in `dtype`, rounded once from float32."""
    if qweight_NK.device.type != "cpu":
        return qweight_NK.view(torch.float8_e4m3fn).to(torch.float32).mul_(scale_N1).to(dtype)
    # torch's CPU cast from e4m3 takes one value at a time: 3.2 ms for a million, this 0.4 ms. e4m3 is fp16 with fewer
    # bits: moved to fp16's place, the bits mean exactly 1/256 of the value (the exponent biases are 7 and 15),
    # subnormals included.
    bits = qweight_NK.to(torch.int16)
    sign = bits.bitwise_and(0x80).bitwise_left_shift_(8)
    half_NK = bits.bitwise_and_(0x7F).bitwise_left_shift_(7).bitwise_or_(sign).view(torch.float16)
    return half_NK.to(torch.float32).mul_(scale_N1 * 256.0).to(dtype)


class _DecodeLinear(torch.autograd.Function):
    """`y_BN = x_BK @ decode(W)_NK.T + bias_N`, with a gradient for x (and bias) only."""

    @staticmethod
    def forward(ctx: Any, x_BK: Tensor, qweight_NK: Tensor, scale_N1: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(qweight_NK, scale_N1)  # references to what the layer owns: no bytes are added
        return F.linear(x_BK, decode(qweight_NK, scale_N1, x_BK.dtype), bias_N)

    @staticmethod
    def backward(ctx: Any, grad_BN: Tensor) -> tuple[Tensor | None, None, None, Tensor | None]:
        qweight_NK, scale_N1 = ctx.saved_tensors
        grad_x_BK = grad_bias_N = None
        if ctx.needs_input_grad[0]:
            weight_NK = decode(qweight_NK, scale_N1, grad_BN.dtype)
            # Flattened as autograd does for F.linear, so that the result is the same to the bit.
            flat = grad_BN.reshape(-1, grad_BN.shape[-1]) @ weight_NK
            grad_x_BK = flat.view(*grad_BN.shape[:-1], weight_NK.shape[1])
        if ctx.needs_input_grad[3]:
            grad_bias_N = grad_BN.sum(dim=tuple(range(grad_BN.ndim - 1)))
        return grad_x_BK, None, None, grad_bias_N


class FrozenFp8Linear(nn.Linear):
    """A linear layer whose frozen weight takes one byte per element.

    Stays an `nn.Linear` for peft's dispatch and for `isinstance` checks in models, but has no `weight` parameter:
    `weight` is a property that decodes anew at every access, so writing into it changes nothing (`merge` a LoRA into
    `decoded_state_dict`).

    Attributes:
        qweight: uint8 parameter (N, K), never trained; the bits of float8_e4m3fn.
        scale: float32 buffer (N, 1). Follows moves between devices, never changes dtype.
        bias: frozen parameter (N,) in the compute dtype, or None.
        compute_dtype: what the weight is decoded to. Follows `.to(dtype)`, `.half()` and the like. peft reads this name
            and puts its adapters in this dtype; without it they would end up in the dtype of the bytes.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate and draw a float weight
        self.in_features = in_features
        self.out_features = out_features
        self.compute_dtype = dtype or torch.get_default_dtype()
        self.qweight = nn.Parameter(torch.zeros(out_features, in_features, dtype=torch.uint8, device=device), False)
        self.register_buffer("scale", torch.full((out_features, 1), MIN_SCALE, dtype=torch.float32, device=device))
        bias_N = torch.zeros(out_features, dtype=self.compute_dtype, device=device) if bias else None
        self.register_parameter("bias", None if bias_N is None else nn.Parameter(bias_N, False))

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: torch.dtype, name: str = "weight") -> Self:
        """The quantized stand-in of `linear`, on its device (meta included).

        Raises:
            ValueError: non-finite weights, naming `name`.
        """
        device = linear.weight.device
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta", dtype=dtype)
        layer.train(linear.training)
        layer.set_weight_(linear.weight.detach(), name)
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().to(device=device, dtype=dtype, copy=True), False)
        return layer

    def set_weight_(self, weight_NK: Tensor, name: str = "weight") -> None:
        """Replaces the weight; the layer's bytes then lie on `weight_NK`'s device.

        Raises:
            ValueError: non-finite weights, naming `name`.
        """
        qweight_NK, scale_N1 = encode(weight_NK, name)
        self.qweight = nn.Parameter(qweight_NK, requires_grad=False)
        self.scale = scale_N1

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return decode(self.qweight, self.scale, self.compute_dtype)

    def forward(self, x_BK: Tensor) -> Tensor:
        bias_N = self.bias
        kind = x_BK.device.type
        # The meta device has no autocast, and raises if asked about it.
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x_BK, bias_N = x_BK.to(dtype), None if bias_N is None else bias_N.to(dtype)
        elif x_BK.dtype != self.compute_dtype:
            raise RuntimeError(f"FrozenFp8Linear computes in {self.compute_dtype} but was given {x_BK.dtype}")
        return _DecodeLinear.apply(x_BK, self.qweight, self.scale, bias_N)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        scale_N1 = self.scale
        probe = torch.empty(0, dtype=self.compute_dtype, device=self.qweight.device)
        super()._apply(fn, recurse)
        self.compute_dtype = fn(probe).dtype
        if self.scale.dtype != torch.float32:  # a cast, which would round the scales: take the old ones along instead
            moved_to = self.scale.device
            on_meta = scale_N1.device.type == "meta"
            self.scale = torch.empty_like(scale_N1, device=moved_to) if on_meta else scale_N1.to(moved_to)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        given = state_dict.get(f"{prefix}qweight")
        if given is not None and given.dtype != torch.uint8:
            # copy_ would convert the values, not the bits.
            raise ValueError(f"{prefix}qweight: expected the e4m3 bits as uint8, was given {given.dtype}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, storage=e4m3 per row, compute={str(self.compute_dtype).removeprefix('torch.')}"
