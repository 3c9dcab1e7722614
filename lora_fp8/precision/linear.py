"""`FrozenLinear`: a linear layer whose weight is a few bytes that never change.

* The bytes are a uint8 *parameter*: a buffer would be sent at every forward by DDP and never sharded by FSDP. (Why
  uint8: see `formats`.)
* Scales and what else the format needs are buffers that follow moves between devices and never change dtype.
* It stays an `nn.Linear` for peft's dispatch and for `isinstance` checks in models, but has no `weight` parameter.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..config import UserError
from . import stream
from .formats import FP8_ROW, Format, decode
from .matmul import Fp8Linear, UpcastLinear, quantize, quantize_shared
from .quantized import Weight, parts_in
from .stream import here, put_away

AMAX_HISTORY = 16
"""Steps that the delayed recipe looks back."""


class FrozenLinear(nn.Linear):
    """A linear layer whose frozen weight is held in `form` and multiplied as `set_compute_` says (at first: upcast).

    `weight` is a property that decodes anew at every access, so writing into it changes nothing (`merge` a LoRA into
    `decoded_state_dict`).

    Attributes:
        form: how the bytes stand for the weight.
        qweight: uint8 parameter (N, K), for nf4 (N, K / 2); never trained. No parameter of a layer that `waits`.
        scale: float32 buffer, a value per block of `form`; for nf4 see `formats.Format.tensors`.
        bias: frozen parameter (N,) in the compute dtype, or None.
        backend: whose layer it is; see `backends`.
        compute_dtype: what the weight is decoded to. Follows `.to(dtype)`, `.half()` and the like. peft reads this name
            and puts its adapters in this dtype; without it they would end up in the dtype of the bytes.
        compute, recipe, fast_accum: see `matmul`.
        kernels: "torch", or "triton": those of `kernels` where the layer multiplies in FP8 with the recipe "current".
        amax_history, amax_newest: with the delayed recipe, float32 (2, 16) and (2, 1): activations, gradients.
    """

    backend = "own"
    kernels = "torch"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        form: Format = FP8_ROW,
    ) -> None:
        nn.Module.__init__(self)  # nn.Linear's own would allocate and draw a float weight
        self.in_features, self.out_features, self.form = in_features, out_features, form
        self.compute_dtype = dtype or torch.get_default_dtype()
        self.compute, self.recipe, self.fast_accum = "upcast", "current", True
        self._make_(device)
        bias_N = torch.zeros(out_features, dtype=self.compute_dtype, device=device) if bias else None
        self.register_parameter("bias", None if bias_N is None else nn.Parameter(bias_N, False))

    def _make_(self, device: torch.device | str | None) -> None:
        """What holds the weight: zeros, until `set_weight_`. Other backends put theirs here."""
        for name, (shape, kind) in self.form.tensors((self.out_features, self.in_features)).items():
            tensor = torch.zeros(shape, dtype=kind, device=device)
            if name == "qweight":
                self.qweight = nn.Parameter(tensor, requires_grad=False)
            else:
                self.register_buffer(name, tensor)

    @classmethod
    def from_linear(cls, linear: nn.Linear, dtype: torch.dtype, name: str = "weight", form: Format = FP8_ROW) -> Self:
        """The quantized stand-in of `linear`, on its device (meta included).

        Raises:
            ValueError: non-finite weights, naming `name`.
        """
        device = linear.weight.device
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, "meta", dtype, form)
        layer.train(linear.training)
        layer.set_weight_(linear.weight.detach(), name)
        if linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().to(device=device, dtype=dtype, copy=True), False)
        return layer

    def set_weight_(self, weight: Weight, name: str = "weight") -> None:
        """Replaces the weight (N, K); the layer's bytes then lie on its device.

        Raises:
            ValueError: non-finite weights, naming `name`.
        """
        self.set_parts_(*parts_in(weight, self.form, name))

    @property
    def device(self) -> torch.device:
        """Where it multiplies."""
        return self.scale.device if self.waits else self.qweight.device

    @property
    def waits(self) -> bool:
        """Whether its bytes are in main memory while they are not used; see `stream`."""
        return "qweight" in vars(self)

    def wait_(self) -> None:
        """Keeps the bytes, now or when it gets them, in main memory, where moves between devices leave them."""
        qweight = self._parameters.pop("qweight")
        vars(self)["qweight"] = put_away(qweight.detach())

    def set_parts_(self, *parts: Tensor) -> None:
        """Replaces what the weight is held in, in the order and shapes of `form.tensors`."""
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
        """What the weight is held in, as `formats.decode` takes it, once `stream.here` has brought what waits."""
        if self.form.storage == "nf4":
            return self.qweight, self.scale, self.nested_scale, self.offset
        return self.qweight, self.scale

    def set_compute_(self, compute: str, recipe: str = "current", fast_accum: bool = True) -> None:
        """Choose how the layer multiplies: "upcast", "fp8" or "fp8_forward"; see `matmul` for the recipes.

        What the delayed recipe remembers begins when the layer has its bytes, and is kept from then on.
        """
        self.compute, self.recipe, self.fast_accum = compute, recipe, fast_accum
        device = self.device
        if compute != "upcast" and recipe == "delayed" and device.type != "meta" and not hasattr(self, "amax_history"):
            self.register_buffer("amax_history", torch.zeros(2, AMAX_HISTORY, device=device), persistent=False)
            self.register_buffer("amax_newest", torch.zeros(2, 1, device=device), persistent=False)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return decode(here(self.parts()), self.form.storage, self.compute_dtype)

    @property
    def takes_lora(self) -> bool:
        """Whether `forward` runs the Triton kernels, which add a LoRA's part in the same pass."""
        # On the meta device, where a step can be tried without memory, there is nothing to run them on.
        return self.kernels == "triton" and self.compute != "upcast" and self.qweight.device.type != "meta"

    def forward(self, x: Tensor, lora: tuple[Tensor, Tensor, float] | None = None) -> Tensor:
        """Multiplies x (..., K). With `lora`, which only a layer that `takes_lora` is given: (A (R, K), B (N, R), the
        factor of `B A x`)."""
        bias_N = self.bias
        kind = x.device.type
        # The meta device has no autocast, and raises if asked about it.
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, bias_N = x.to(dtype), None if bias_N is None else bias_N.to(dtype)
        elif x.dtype != self.compute_dtype:
            raise RuntimeError(f"FrozenLinear computes in {self.compute_dtype} but was given {x.dtype}")
        if self.takes_lora:
            from .kernels import KernelLinear, quantize_rows  # triton, which not every machine has

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
            # What is drawn between two steps must leave no trace in them: only what is trained on counts.
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
            if now.dtype != tensor.dtype:  # a cast, which would round the scales: take the old ones along instead
                on_meta = tensor.device.type == "meta"
                self._buffers[name] = torch.empty_like(tensor, device=now.device) if on_meta else tensor.to(now.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, (_, kind) in self.form.tensors((self.out_features, self.in_features)).items():
            given = state_dict.get(f"{prefix}{name}")
            if given is not None and given.dtype != kind:
                # copy_ would convert the values, not the bits.
                raise ValueError(f"{prefix}{name}: expected {kind}, was given {given.dtype}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        dtype = str(self.compute_dtype).removeprefix("torch.")
        return f"{super().extra_repr()}, storage={self.form} by {self.backend}, compute={self.compute} in {dtype}"


# -- a whole denoiser --------------------------------------------------------------------------------------------------


def frozen_layers(denoiser: nn.Module) -> dict[str, FrozenLinear]:
    """The frozen layers by the names that they have in the plain model, whether or not adapters wrap them."""
    found = ((name, module) for name, module in denoiser.named_modules() if isinstance(module, FrozenLinear))
    return {".".join(part for part in name.split(".") if part != "base_layer"): module for name, module in found}


def offload_(denoiser: nn.Module, share: float) -> int:
    """Has about this share of the frozen bytes wait in main memory (see `stream`), in place. Layers on the meta device
    put theirs there when they get them.

    Returns:
        How many bytes wait.
    """
    layers = frozen_layers(denoiser)
    names = stream.chosen({name: layer.qweight.nbytes for name, layer in layers.items()}, share)
    for name in names:
        layers[name].wait_()
    return sum(layers[name].qweight.nbytes for name in names)


@contextlib.contextmanager
def decoded_compute(denoiser: nn.Module) -> Iterator[None]:
    """For a while, every frozen layer multiplies decoded weights: what a program without FP8 matmuls computes."""
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
    """The delayed recipe's memory of a denoiser: the largest activation and gradient of each layer in the last steps.

    `tensors` is what a checkpoint holds; it is empty under the other recipes, and then nothing here does anything.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        layers = frozen_layers(denoiser)
        self.layers = {name: layer for name, layer in layers.items() if hasattr(layer, "amax_history")}

    def tensors(self) -> dict[str, Tensor]:
        """ "amax.<layer>" -> float32 (2, 16), the newest step first."""
        return {f"amax.{name}": layer.amax_history.cpu().clone() for name, layer in self.layers.items()}

    def load_(self, tensors: dict[str, Tensor]) -> None:
        """Takes up what `tensors` gave.

        Raises:
            config.UserError: a layer's history is missing.
        """
        missing = [name for name in self.layers if f"amax.{name}" not in tensors]
        if missing:
            raise UserError(f"the checkpoint has no amax history of {len(missing)} layers (first: {missing[0]})")
        for name, layer in self.layers.items():
            layer.amax_history.copy_(tensors[f"amax.{name}"])

    def forget_step_(self) -> None:
        """Drops what was seen since the last step ended, such as a trial run's values."""
        for layer in self.layers.values():
            layer.amax_newest.zero_()

    def end_step_(self, max_over_processes: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> None:
        """Moves this step's largest values into the history. All processes must come here together."""
        if not self.layers:
            return
        newest = max_over_processes(torch.stack([layer.amax_newest for layer in self.layers.values()]))
        for layer, values in zip(self.layers.values(), newest, strict=True):
            layer.amax_history.copy_(torch.cat([values, layer.amax_history[:, :-1]], dim=1))
        self.forget_step_()
