"""`FrozenLinear`: a linear layer whose weight is quantized and never changes; and the delayed recipe's history."""

from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import Tensor, nn

from ..errors import Message, UserError
from .formats import FP8_ROW, Format
from .frozen import FrozenLayer, find_frozen_layers
from .matmul import Fp8Linear, UpcastLinear, quantize, quantize_shared

AMAX_HISTORY = 16
"""Number of past steps that the delayed recipe takes into account."""


class FrozenLinear(FrozenLayer, nn.Linear):  # type: ignore[override]  # `weight` is dequantized at every access
    """A linear layer with a frozen weight (N, K), multiplied as `set_compute_` says (default: upcast).

    Attributes:
        compute, recipe, fast_accum: see `matmul`.
        amax_history, amax_newest: float32 (2, 16) and (2, 1) for activations and gradients, with the delayed recipe
            only.
    """

    amax_history: Tensor
    amax_newest: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        form: Format = FP8_ROW,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate and initialize a float weight
        self.in_features, self.out_features, self.form = in_features, out_features, form
        self.compute_dtype = dtype or torch.get_default_dtype()
        self.compute, self.recipe, self.fast_accum = "upcast", "current", True
        self._make_(device)
        bias_N = torch.zeros(out_features, dtype=self.compute_dtype, device=device) if bias else None
        self.register_parameter("bias", None if bias_N is None else nn.Parameter(bias_N, False))

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: torch.dtype, form: Format = FP8_ROW) -> Self:
        """Return a quantized copy of `linear`, on its device (meta included).

        Args:
            linear: the layer to copy.
            dtype: compute dtype.
            form: storage format.

        Raises:
            ValueError: the weight is not finite.
        """
        device = linear.weight.device
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta", dtype, form)
        layer.train(linear.training)
        layer.set_weight_(linear.weight.detach(), "weight")
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().to(device=device, dtype=dtype, copy=True), False)
        return layer

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Return (N, K)."""
        return self.out_features, self.in_features

    def make_input_rows(self, x: Tensor) -> Tensor:
        """Return the tokens (M, K) of an input (..., K)."""
        return x.reshape(-1, x.shape[-1])

    def set_compute_(self, compute: str, recipe: str = "current", fast_accum: bool = True) -> None:
        """Choose how the layer multiplies: "upcast", "fp8" or "fp8_forward"; see `matmul` for the recipes.

        The delayed recipe's history is created when the layer has its weight, and is kept from then on.
        """
        self.compute, self.recipe, self.fast_accum = compute, recipe, fast_accum
        device = self.device
        if compute != "upcast" and recipe == "delayed" and device.type != "meta" and not hasattr(self, "amax_history"):
            self.register_buffer("amax_history", torch.zeros(2, AMAX_HISTORY, device=device), persistent=False)
            self.register_buffer("amax_newest", torch.zeros(2, 1, device=device), persistent=False)

    @property
    def takes_lora(self) -> bool:
        """Return True if `forward` runs the Triton kernels, which add a LoRA in the same pass."""
        # A dry run on the meta device has no tensors that the kernels could read.
        return self.kernels == "triton" and self.compute != "upcast" and self.qweight.device.type != "meta"

    def forward(self, x: Tensor, lora: tuple[Tensor, Tensor, float] | None = None) -> Tensor:
        """Multiply x (..., K) by the weight.

        Args:
            x: input in the compute dtype.
            lora: (A (R, K), B (N, R), factor of `B A x`); only for a layer that `takes_lora`.
        """
        x, bias_N = self._cast(x)
        if self.takes_lora:
            from .kernels import (
                KernelLinear,
                quantize_rows,  # needs triton, which is not installed everywhere
            )

            values_MK, x_scale = quantize_shared(x, self.recipe, quantize_rows)
            precise = self.compute == "fp8_forward"
            parts = (*self.get_parts(), *(lora or (None, None, 0.0)))
            return KernelLinear.apply(x, values_MK, x_scale, bias_N, *parts, precise, self.fast_accum)
        if lora is not None:
            raise ValueError("FrozenLinear: only the Triton kernels add a LoRA's part; ask takes_lora")
        if self.compute == "upcast":
            return UpcastLinear.apply(x, bias_N, self.form.storage, *self.get_parts())
        of_x = of_grad = (None, None)
        if self.recipe == "delayed":
            # A forward without gradients, such as a preview's, must not change the history of training.
            newest = self.amax_newest if torch.is_grad_enabled() else self.amax_newest.clone()
            of_x, of_grad = zip(self.amax_history, newest, strict=True)
            values_MK, x_scale = quantize(x.detach().reshape(-1, x.shape[-1]), "delayed", *of_x)
        else:
            values_MK, x_scale = quantize_shared(x, self.recipe)
        precise = self.compute == "fp8_forward"
        parts = self.get_parts()
        return Fp8Linear.apply(x, values_MK, x_scale, bias_N, *parts, precise, self.fast_accum, self.recipe, *of_grad)


class AmaxHistory:
    """The delayed recipe's history of a denoiser: the largest activation and gradient of each layer in past steps.

    Checkpoints store `copy_tensors`, which is empty for the other recipes; then all methods do nothing.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        layers = find_frozen_layers(denoiser)
        self.layers: Mapping[str, FrozenLinear]
        self.layers = {
            name: layer
            for name, layer in layers.items()
            if isinstance(layer, FrozenLinear) and hasattr(layer, "amax_history")
        }

    def copy_tensors(self) -> dict[str, Tensor]:
        """Return {"amax.<layer>": float32 (2, 16)}, the newest step first."""
        return {f"amax.{name}": layer.amax_history.cpu().clone() for name, layer in self.layers.items()}

    def load_(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `copy_tensors` returned.

        Raises:
            UserError: a layer's history is missing.
        """
        missing = [name for name in self.layers if f"amax.{name}" not in tensors]
        if missing:
            raise UserError(
                Message(
                    "the checkpoint has no amax history of {count} layers (first: {name})",
                    count=len(missing),
                    name=missing[0],
                )
            )
        for name, layer in self.layers.items():
            layer.amax_history.copy_(tensors[f"amax.{name}"])

    def forget_step_(self) -> None:
        """Discard the values seen since the last step ended, such as those of a trial run."""
        for layer in self.layers.values():
            layer.amax_newest.zero_()

    def end_step_(self, max_over_processes: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        """Append this step's largest values to the history. All processes must call this together."""
        if not self.layers:
            return
        newest = max_over_processes(torch.stack([layer.amax_newest for layer in self.layers.values()]))
        for layer, values in zip(self.layers.values(), newest, strict=True):
            layer.amax_history.copy_(torch.cat([values, layer.amax_history[:, :-1]], dim=1))
        self.forget_step_()
