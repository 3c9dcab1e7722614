"""`quantize.backend = "torchao"`: frozen layers whose weights are torchao's weight-only tensors.

Written for torchao 0.18: `quantize_` with `Float8WeightOnlyConfig` and `Int8WeightOnlyConfig`, with scales per row, per
tensor or per group of a row. torchao dequantizes the weight before torch's own matmul, so autograd keeps the
dequantized weight of every layer from forward to backward. Therefore it is not the default. `tests/test_backends.py`
counts the bytes.

Shapes: N output features, K input features.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization import (
    Float8Tensor,
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
)

from .formats import make_nonfinite_error
from .linear import FrozenLinear
from .quantized import Quantized, Weight, to_plain

GRANULARITIES = {"row": PerRow(), "tensor": PerTensor(), "1x64": PerGroup(64), "1x128": PerGroup(128)}


class TorchaoLinear(FrozenLinear):
    """A frozen linear layer around a torchao tensor.

    Attributes:
        qweight: parameter (N, K), a `Float8Tensor` or `Int8Tensor` whose dtype is the compute dtype.
    """

    backend = "torchao"
    qweight: Any  # torchao's tensors have no types

    def _make_(self, device: torch.device | str | None) -> None:
        self._hold_(torch.zeros(self.out_features, self.in_features, device=device))

    def set_weight_(self, weight: Weight, name: str = "weight") -> None:
        """Replace the weight.

        A weight that the file stores in FP8 keeps its bytes if torchao supports their scales. Any other weight is
        quantized by torchao from the compute dtype.

        Raises:
            ValueError: the weight is not finite; names `name`.
        """
        parts = weight.make_parts(self.form) if isinstance(weight, Quantized) else None
        if parts is not None:
            codes_NK, scale = parts[0].view(torch.float8_e4m3fn), parts[1]
            block = list(self.form.get_block((weight.shape[0], weight.shape[1])))
            held = Float8Tensor(codes_NK, scale, block_size=block, dtype=self.compute_dtype)
            self.qweight = nn.Parameter(held, requires_grad=False)
            return
        weight_NK = to_plain(weight)
        if weight_NK.device.type != "meta" and not weight_NK.isfinite().all():
            raise make_nonfinite_error(name)
        self._hold_(weight_NK)

    def _hold_(self, weight_NK: Tensor) -> None:
        linear = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
        linear.weight = nn.Parameter(weight_NK.to(self.compute_dtype), requires_grad=False)
        kind = Float8WeightOnlyConfig if self.form.storage == "fp8" else Int8WeightOnlyConfig
        # Without set_inductor_config=False, torchao changes how torch.compile tunes everything in the process.
        quantize_(linear, kind(granularity=GRANULARITIES[self.form.scale], set_inductor_config=False))
        held: Any = linear.weight  # by now a parameter around torchao's tensor
        if self.form.storage == "fp8" and held.device.type != "meta" and (held.scale == 0).any():
            # If all weights that share a scale are 0, torchao divides 0 by 0.
            rows, columns = held.block_size
            empty_NK = (held.scale == 0).repeat_interleave(rows, 0).repeat_interleave(columns, 1)
            held.qdata.view(torch.uint8).masked_fill_(empty_NK, 0)
        self.qweight = nn.Parameter(held, requires_grad=False)

    def set_parts_(self, *parts: Tensor) -> None:
        """Refuse: the quantized tensors belong to torchao."""
        raise NotImplementedError("torchao holds what set_weight_ gives it")

    def get_parts(self) -> tuple[Tensor, ...]:
        """Return the bytes and scales as `formats.decode` takes them."""
        return self.qweight.qdata.view(torch.uint8), self.qweight.scale

    def set_compute_(self, compute: str, recipe: str = "current", fast_accum: bool = True) -> None:
        """Check that `compute` is "upcast", the only one that torchao supports.

        Raises:
            ValueError: `compute` is another.
        """
        if compute != "upcast":
            raise ValueError(f"torchao's weight-only tensors are decoded, not multiplied in {compute}")

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # dequantized at every access
        """Return the dequantized weight (N, K) in the compute dtype, computed at every access."""
        return self.qweight.dequantize()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # `takes_lora` is False here
        """Multiply x (..., K) by the weight with torchao's own operation."""
        if x.dtype != self.compute_dtype:
            raise RuntimeError(f"TorchaoLinear computes in {self.compute_dtype} but was given {x.dtype}")
        return F.linear(x, self.qweight, self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        nn.Module._apply(self, fn, recurse)
        dtype = fn(torch.empty(0, dtype=self.compute_dtype, device=self.qweight.device)).dtype
        if dtype != self.compute_dtype:  # torchao's tensors keep their dtype, so they are rebuilt
            names, facts = self.qweight.__tensor_flatten__()
            tensors = {name: getattr(self.qweight, name) for name in names}
            held = type(self.qweight).__tensor_unflatten__(tensors, facts | {"dtype": dtype}, None, None)
            self.compute_dtype, self.qweight = dtype, nn.Parameter(held, requires_grad=False)
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Module._load_from_state_dict(self, *args)  # torchao copies between its own tensors
