"""`FrozenLinear`: a linear layer whose weight is quantized and never changes.

* The quantized bytes are a uint8 *parameter*: DDP would broadcast a buffer at every forward, and FSDP would not shard
  it. (Why uint8: see `formats`.)
* Scales and the format's other tensors are buffers, which move between devices with the module but keep their dtype.
* The class is an `nn.Linear` for peft's dispatch and for `isinstance` checks in models, but has no `weight` parameter.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..errors import Message, UserError
from . import stream
from .formats import FP8_ROW, Format, decode
from .matmul import Fp8Linear, UpcastLinear, quantize, quantize_shared
from .quantized import Weight, parts_in
from .stream import here, put_away

AMAX_HISTORY = 16
"""Number of past steps that the delayed recipe takes into account."""


class FrozenLinear(nn.Linear):
    """A linear layer with a frozen weight stored as `form` and multiplied as `set_compute_` says (default: upcast).

    `weight` is a property that dequantizes at every access, so writing into it changes nothing (to `merge` a LoRA,
    write into `decoded_state_dict`).

    Attributes:
        form: storage format of the weight.
        qweight: uint8 parameter (N, K), or (N, K / 2) for nf4; never trained. No parameter in a layer that `waits`.
        scale: float32 buffer, one value per block of `form`; for nf4 see `formats.Format.tensors`.
        bias: frozen parameter (N,) in the compute dtype, or None.
        backend: library that the layer belongs to; see `backends`.
        compute_dtype: dtype to which the weight is dequantized. Follows `.to(dtype)`, `.half()` and the like. peft
            reads this name and creates its adapters in this dtype; without it they would get the dtype of the bytes.
        compute, recipe, fast_accum: see `matmul`.
        kernels: "torch", or "triton": use those of `kernels` for FP8 matmuls with the recipe "current".
        amax_history, amax_newest: float32 (2, 16) and (2, 1) for activations and gradients, with the delayed recipe
            only.
    """

    backend = "own"
    kernels: str = "torch"
    scale: Tensor
    nested_scale: Tensor
    offset: Tensor
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

    def _make_(self, device: torch.device | str | None) -> None:
        """Create the tensors of the weight, zero until `set_weight_`. Other backends override this."""
        for name, (shape, kind) in self.form.tensors((self.out_features, self.in_features)).items():
            tensor = torch.zeros(shape, dtype=kind, device=device)
            if name == "qweight":
                self.qweight = nn.Parameter(tensor, requires_grad=False)
            else:
                self.register_buffer(name, tensor)

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: torch.dtype, name: str = "weight", form: Format = FP8_ROW) -> Self:
        """Return a quantized copy of `linear`, on its device (meta included).

        Args:
            linear: the layer to copy.
            dtype: compute dtype.
            name: name of the layer for error messages.
            form: storage format.

        Raises:
            ValueError: the weight is not finite; names `name`.
        """
        device = linear.weight.device
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta", dtype, form)
        layer.train(linear.training)
        layer.set_weight_(linear.weight.detach(), name)
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().to(device=device, dtype=dtype, copy=True), False)
        return layer

    def set_weight_(self, weight: Weight, name: str = "weight") -> None:
        """Replace the weight (N, K); the quantized tensors are then on its device.

        Raises:
            ValueError: the weight is not finite; names `name`.
        """
        self.set_parts_(*parts_in(weight, self.form, name))

    @property
    def device(self) -> torch.device:
        """Return the device on which the layer computes."""
        return self.scale.device if self.waits else self.qweight.device

    @property
    def waits(self) -> bool:
        """True if the quantized weight is offloaded to RAM while it is not used; see `stream`."""
        return "qweight" in vars(self)

    def wait_(self) -> None:
        """Offload the quantized weight to RAM, now or when it is set; moves between devices leave it there."""
        qweight = self.qweight.detach()
        del self._parameters["qweight"]
        vars(self)["qweight"] = put_away(qweight)

    def set_parts_(self, *parts: Tensor) -> None:
        """Replace the quantized tensors, in the order and shapes of `form.tensors`."""
        wanted = self.form.tensors((self.out_features, self.in_features))
        for (name, (shape, kind)), tensor in zip(wanted.items(), parts, strict=True):
            if tensor.shape != shape or tensor.dtype != kind:
                raise ValueError(
                    f"{name}: expected {kind} {list(shape)}, was given {tensor.dtype} {list(tensor.shape)}"
                )
            if name != "qweight":
                setattr(self, name, tensor)
            elif self.waits:
                vars(self)[name] = put_away(tensor)
            else:
                self.qweight = nn.Parameter(tensor, requires_grad=False)

    def parts(self) -> tuple[Tensor, ...]:
        """Return the quantized tensors; `stream.here` fetches the offloaded ones before `formats.decode`."""
        if self.form.storage == "nf4":
            return self.qweight, self.scale, self.nested_scale, self.offset
        return self.qweight, self.scale

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
    def weight(self) -> Tensor:  # type: ignore[override]  # dequantized at every access
        """Return the dequantized weight (N, K) in the compute dtype, computed at every access."""
        return decode(here(self.parts()), self.form.storage, self.compute_dtype)

    @property
    def takes_lora(self) -> bool:
        """True if `forward` runs the Triton kernels, which add a LoRA in the same pass."""
        # A dry run on the meta device has no tensors that the kernels could read.
        return self.kernels == "triton" and self.compute != "upcast" and self.qweight.device.type != "meta"

    def forward(self, x: Tensor, lora: tuple[Tensor, Tensor, float] | None = None) -> Tensor:
        """Multiply x (..., K) by the weight.

        Args:
            x: input in the compute dtype.
            lora: (A (R, K), B (N, R), factor of `B A x`); only for a layer that `takes_lora`.
        """
        bias_N: Tensor | None = self.bias
        kind = x.device.type
        # The meta device has no autocast, and asking about it raises. torch 2.11 cannot compile is_autocast_available.
        if kind != "meta" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, bias_N = x.to(dtype), None if bias_N is None else bias_N.to(dtype)
        elif x.dtype != self.compute_dtype:
            raise RuntimeError(f"FrozenLinear computes in {self.compute_dtype} but was given {x.dtype}")
        if self.takes_lora:
            from .kernels import (
                KernelLinear,
                quantize_rows,  # needs triton, which is not installed everywhere
            )

            values_MK, x_scale = quantize_shared(x, self.recipe, quantize_rows)
            precise = self.compute == "fp8_forward"
            parts = (*self.parts(), *(lora or (None, None, 0.0)))
            return KernelLinear.apply(x, values_MK, x_scale, bias_N, *parts, precise, self.fast_accum)
        if lora is not None:
            raise ValueError("FrozenLinear: only the Triton kernels add a LoRA's part; ask takes_lora")
        if self.compute == "upcast":
            return UpcastLinear.apply(x, bias_N, self.form.storage, *self.parts())
        of_x = of_grad = (None, None)
        if self.recipe == "delayed":
            # A forward without gradients, such as a preview's, must not change the history of training.
            newest = self.amax_newest if torch.is_grad_enabled() else self.amax_newest.clone()
            of_x, of_grad = zip(self.amax_history, newest, strict=True)
            values_MK, x_scale = quantize(x.detach().reshape(-1, x.shape[-1]), "delayed", *of_x)
        else:
            values_MK, x_scale = quantize_shared(x, self.recipe)
        precise = self.compute == "fp8_forward"
        parts = self.parts()
        return Fp8Linear.apply(x, values_MK, x_scale, bias_N, *parts, precise, self.fast_accum, self.recipe, *of_grad)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        before = dict(self._buffers)
        probe = torch.empty(0, dtype=self.compute_dtype, device=self.qweight.device)
        super()._apply(fn, recurse)
        self.compute_dtype = fn(probe).dtype
        for name, tensor in before.items():
            now = self._buffers[name]
            # A cast would round the scales, so the old ones are kept and only moved.
            if now is not None and tensor is not None and now.dtype != tensor.dtype:
                on_meta = tensor.device.type == "meta"
                self._buffers[name] = torch.empty_like(tensor, device=now.device) if on_meta else tensor.to(now.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, (_, kind) in self.form.tensors((self.out_features, self.in_features)).items():
            given = state_dict.get(f"{prefix}{name}")
            if given is not None and given.dtype != kind:
                # copy_ would convert the values instead of the bits.
                raise ValueError(f"{prefix}{name}: expected {kind}, was given {given.dtype}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return the layer's storage and matmul for `print(model)`."""
        dtype = str(self.compute_dtype).removeprefix("torch.")
        return f"{super().extra_repr()}, storage={self.form} by {self.backend}, compute={self.compute} in {dtype}"


# -- a whole denoiser --------------------------------------------------------------------------------------------------


def frozen_layers(denoiser: nn.Module) -> dict[str, FrozenLinear]:
    """Return the frozen layers by their names in the plain model, whether or not adapters wrap them."""
    layers = ((name, module) for name, module in denoiser.named_modules() if isinstance(module, FrozenLinear))
    return {".".join(part for part in name.split(".") if part != "base_layer"): module for name, module in layers}


def offload_(denoiser: nn.Module, share: float) -> int:
    """Offload about this share of the frozen bytes to RAM (see `stream`), in place.

    Layers on the meta device are offloaded when their weights are set.

    Returns:
        Number of offloaded bytes.
    """
    layers = frozen_layers(denoiser)
    names = stream.chosen({name: layer.qweight.nbytes for name, layer in layers.items()}, share)
    for name in names:
        layers[name].wait_()
    return sum(layers[name].qweight.nbytes for name in names)


@contextlib.contextmanager
def decoded_compute(denoiser: nn.Module) -> Iterator[None]:
    """Dequantize before every matmul inside this context: what a program without FP8 matmuls computes."""
    layers = list(frozen_layers(denoiser).values())
    before = [layer.compute for layer in layers]
    for layer in layers:
        layer.compute = "upcast"
    try:
        yield
    finally:
        for layer, compute in zip(layers, before, strict=True):
            layer.compute = compute


class AmaxHistory:
    """The delayed recipe's history of a denoiser: the largest activation and gradient of each layer in past steps.

    Checkpoints store `tensors`, which is empty for the other recipes; then all methods do nothing.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        layers = frozen_layers(denoiser)
        self.layers: Mapping[str, FrozenLinear]
        self.layers = {name: layer for name, layer in layers.items() if hasattr(layer, "amax_history")}

    def tensors(self) -> dict[str, Tensor]:
        """Return {"amax.<layer>": float32 (2, 16)}, the newest step first."""
        return {f"amax.{name}": layer.amax_history.cpu().clone() for name, layer in self.layers.items()}

    def load_(self, tensors: dict[str, Tensor]) -> None:
        """Restore what `tensors` returned.

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
