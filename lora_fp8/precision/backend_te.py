"""`quantize.backend = "te"`: frozen layers that TransformerEngine stores and multiplies in FP8.

Written for the documentation and sources of TransformerEngine 2.20 (`te.Linear` built under
`te.quantized_model_init`, forward under `te.autocast`, recipes of `transformer_engine.common.recipe`). CUDA only.

| recipe | TransformerEngine's recipe | scales |
|---|---|---|
| current | Float8CurrentScaling | per tensor, from this step |
| delayed | DelayedScaling | per tensor, from past steps |
| block | Float8BlockScaling | 1x128 for activations, 128x128 for weights |
| mxfp8 | MXFP8BlockScaling | 1x32 |

Shapes: M tokens, N output features, K input features.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
import transformer_engine.pytorch as te
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling

from ..errors import Message, UserError
from .formats import E4M3_MAX, MIN_SCALE, make_nonfinite_error
from .frozen import find_frozen_layers
from .linear import AMAX_HISTORY, AmaxHistory, FrozenLinear
from .quantized import Weight, to_plain

WEIGHT = 1  # index in a layer's forward scales: input, weight, output


@functools.cache  # one object per recipe: TransformerEngine checks that a layer's recipe has not changed
def make_recipe(name: str) -> Any:
    """Return TransformerEngine's recipe for a quantize.recipe."""
    if name == "delayed":
        # Without exchange between processes: it would wait for a process that has no part of a short batch.
        return DelayedScaling(amax_history_len=AMAX_HISTORY, amax_compute_algo="max", reduce_amax=False)
    return {"current": Float8CurrentScaling, "block": Float8BlockScaling, "mxfp8": MXFP8BlockScaling}[name]()


class TeLinear(FrozenLinear):
    """A frozen linear layer around a `te.Linear`, which is created when the weight is set.

    Attributes:
        inner: the `te.Linear` (which has no types), without bias and without gradients; None before `set_weight_`.
    """

    backend = "te"

    inner: Any

    def _make_(self, device: torch.device | str | None) -> None:
        self.compute, self.inner = "fp8", None

    def set_compute_(self, compute: str, recipe: str = "current", fast_accum: bool = True) -> None:
        """Choose "fp8", TransformerEngine's matmul, or "upcast", which dequantizes as a program without it does.

        Raises:
            ValueError: `compute` is neither, or the weight is stored for another recipe.
        """
        if compute not in ("fp8", "upcast"):
            raise ValueError(f"TransformerEngine multiplies in FP8, not in {compute}")
        if self.inner is not None and recipe != self.recipe:
            raise ValueError(f"the weight is held for recipe {self.recipe}, not for {recipe}")
        self.compute, self.recipe = compute, recipe

    def set_weight_(self, weight: Weight, name: str = "weight") -> None:
        """Replace the weight. It is stored in FP8 at once: only this weight exists in the compute dtype besides.

        Raises:
            ValueError: the weight is not finite; names `name`.
        """
        weight_NK = to_plain(weight)
        if weight_NK.device.type == "meta":
            return
        if not weight_NK.isfinite().all():
            raise make_nonfinite_error(name)
        # Gradients are enabled although none is wanted: otherwise the layout that the backward multiplies is left out.
        with torch.enable_grad(), te.quantized_model_init(enabled=True, recipe=make_recipe(self.recipe)):
            inner = te.Linear(
                self.in_features,
                self.out_features,
                bias=False,
                params_dtype=self.compute_dtype,
                device=weight_NK.device,
            )
        inner.requires_grad_(False)  # te.Linear is created trainable, and would compute a gradient for the base
        inner.train(self.training)
        with torch.no_grad():
            if self.recipe == "delayed":
                # A new history has scale 1, which would cost small weights their last bits; see `formats`.
                amax = weight_NK.abs().amax().to(torch.float32).clamp(min=MIN_SCALE * E4M3_MAX)
                inner.fp8_meta["scaling_fwd"].scale[WEIGHT].copy_(E4M3_MAX / amax)
            inner.weight.copy_(weight_NK.to(self.compute_dtype))
        self.inner = inner

    def set_parts_(self, *parts: Tensor) -> None:
        """Refuse: the quantized tensors belong to TransformerEngine."""
        raise NotImplementedError("TransformerEngine holds what set_weight_ gives it")

    def get_parts(self) -> tuple[Tensor, ...]:
        """Refuse: the quantized tensors belong to TransformerEngine."""
        raise NotImplementedError("TransformerEngine keeps its bytes to itself; ask for weight")

    @property
    def qweight(self) -> Any:  # type: ignore[override]  # `inner` holds it
        """Return TransformerEngine's tensor; before the weight is set, an empty tensor on the meta device."""
        if self.inner is None:
            return torch.empty(self.out_features, self.in_features, dtype=self.compute_dtype, device="meta")
        return self.inner.weight

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # dequantized at every access
        """Return the dequantized weight (N, K) in the compute dtype, computed at every access."""
        return self.qweight.detach() if self.inner is None else self.qweight.dequantize(dtype=self.compute_dtype)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # `takes_lora` is False here
        """Multiply x (..., K) by the weight, with TransformerEngine's FP8 matmul or dequantized."""
        if x.dtype != self.compute_dtype:
            raise RuntimeError(f"TeLinear computes in {self.compute_dtype} but was given {x.dtype}")
        if self.compute == "upcast":
            return F.linear(x, self.weight, self.bias)
        x_MK = x.reshape(-1, x.shape[-1])
        num = x_MK.shape[0]
        # Padding rows, which are cut off again: FP8 matmuls take tokens in multiples of 8, MXFP8's scales in 32.
        x_MK = F.pad(x_MK, (0, 0, 0, -num % (32 if self.recipe == "mxfp8" else 8)))
        with autocast(self.recipe):
            y_MN = self.inner(x_MK)[:num]
        y = y_MN.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        dtype = fn(torch.empty(0, dtype=self.compute_dtype)).dtype
        if self.inner is not None and dtype != self.compute_dtype:
            raise RuntimeError(f"TeLinear holds its weight for {self.compute_dtype}; quantize it anew for {dtype}")
        nn.Module._apply(self, fn, recurse)
        self.compute_dtype = dtype
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        nn.Module._load_from_state_dict(self, *args)


def autocast(recipe: str) -> AbstractContextManager[None]:
    """Return a context in which every `te.Linear` computes in FP8."""
    return te.autocast(enabled=True, recipe=make_recipe(recipe))


class TeAmaxHistory(AmaxHistory):
    """`linear.AmaxHistory` for TransformerEngine's layers with the delayed recipe.

    TransformerEngine advances the history where the outermost `te.autocast` ends, so one is put around each forward of
    the denoiser. Checkpoints store the tensors themselves: TransformerEngine's own `get_extra_state` pickles them, and
    a pickle from a checkpoint could run code.
    """

    layers: Mapping[str, TeLinear]

    def __init__(self, denoiser: nn.Module) -> None:
        layers = find_frozen_layers(denoiser).items()
        self.layers = {
            name: layer for name, layer in layers if isinstance(layer, TeLinear) and layer.recipe == "delayed"
        }
        open_now: list[AbstractContextManager[None]] = []

        def enter(*_: Any) -> None:
            open_now.append(autocast("delayed"))
            open_now[-1].__enter__()

        def leave(*_: Any) -> None:
            open_now.pop().__exit__(None, None, None)

        if self.layers:
            denoiser.register_forward_pre_hook(enter)
            denoiser.register_forward_hook(leave, always_call=True)
        self.before_step = self.copy_tensors()

    def copy_tensors(self) -> dict[str, Tensor]:
        """Return the history as {"amax.<layer>.scaling_fwd.scale" and the like: float32 tensor}."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self._list_tensors().items()}

    def load_(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `copy_tensors` returned.

        Raises:
            UserError: a layer's history is missing.
        """
        missing = [name for name in self._list_tensors() if name not in tensors]
        if missing:
            raise UserError(
                Message(
                    "the checkpoint lacks {count} amax histories (first: {name})", count=len(missing), name=missing[0]
                )
            )
        for name, tensor in self._list_tensors().items():
            tensor.copy_(tensors[name])  # in place: TransformerEngine holds other references to it
        self.before_step = self.copy_tensors()

    def forget_step_(self) -> None:
        """Restore the history of before a trial run."""
        for name, tensor in self._list_tensors().items():
            tensor.copy_(self.before_step[name])

    def end_step_(self, max_over_processes: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        """Do nothing: TransformerEngine has advanced its history, and a job with this recipe is one process."""

    def _list_tensors(self) -> dict[str, Tensor]:
        return {
            f"amax.{name}.{direction}.{kind}": getattr(layer.inner.fp8_meta[direction], kind)
            for name, layer in self.layers.items()
            for direction in ("scaling_fwd", "scaling_bwd")
            for kind in ("scale", "amax_history")
        }
