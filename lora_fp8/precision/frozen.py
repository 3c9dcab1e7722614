"""`FrozenLayer`: what frozen linear layers and convolutions share, a weight in few bytes that never changes.

* The quantized bytes are a uint8 *parameter*: DDP would broadcast a buffer at every forward, and FSDP would not shard
  it. (Why uint8: see `formats`.)
* Scales and the format's other tensors are buffers, which move between devices with the module but keep their dtype.
* The classes are an `nn.Linear` and an `nn.Conv2d` for peft's dispatch and for `isinstance` checks in models, but have
  no `weight` parameter.

Shapes: N output features (rows), K inputs of each. A convolution is stored as the matrix of its flattened filters, so
its K is channels x height x width of the kernel.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn

from . import stream
from .formats import Format, decode
from .quantized import Quantized, Rows, Weight, make_parts
from .stream import copy_to_ram, fetch_parts


class FrozenLayer(nn.Module):
    """A layer with a frozen weight stored as `form`.

    `weight` is a property that dequantizes at every access, so writing into it changes nothing (to `merge` a LoRA,
    write into `dequantize_tensors`).

    Attributes:
        form: storage format of the weight.
        qweight: uint8 parameter (N, K), or (N, K / 2) for nf4; never trained. No parameter in a layer that `waits`.
        scale: float32 buffer, one value per block of `form`; for nf4 see `formats.Format.describe_tensors`.
        bias: frozen parameter (N,) in the compute dtype, or None.
        backend: library that the layer belongs to; see `backends`.
        compute_dtype: dtype to which the weight is dequantized. Follows `.to(dtype)`, `.half()` and the like. peft
            reads this name and creates its adapters in this dtype; without it they would get the dtype of the bytes.
        compute: how the layer multiplies; see `matmul`. Convolutions know "upcast" only.
        kernels: "torch", or "triton": use those of `kernels` for FP8 matmuls with the recipe "current".
    """

    backend = "own"
    kernels: str = "torch"
    compute: str = "upcast"
    form: Format
    compute_dtype: torch.dtype
    scale: Tensor
    nested_scale: Tensor
    offset: Tensor
    bias: Any  # torch declares it differently in its two classes

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Return the shape of the weight in the plain model."""
        raise NotImplementedError

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Return (N, K) of the weight as it is stored."""
        return self.weight_shape[0], torch.Size(self.weight_shape[1:]).numel()

    def make_input_rows(self, x: Tensor) -> Tensor:
        """Return the inputs (M, K) that the weight's rows are multiplied by, one for each place of the output."""
        raise NotImplementedError

    def set_compute_(self, compute: str, recipe: str = "current", fast_accum: bool = True) -> None:
        """Choose how the layer multiplies; see `matmul`."""
        raise NotImplementedError

    def _make_(self, device: torch.device | str | None) -> None:
        """Create the tensors of the weight, zero until `set_weight_`. Other backends override this."""
        for name, (shape, kind) in self.form.describe_tensors(self.matrix_shape).items():
            tensor = torch.zeros(shape, dtype=kind, device=device)
            if name == "qweight":
                self.qweight = nn.Parameter(tensor, requires_grad=False)
            else:
                self.register_buffer(name, tensor)

    def set_weight_(self, weight: Weight, name: str = "weight") -> None:
        """Replace the weight, given in its own shape or as (N, K); the quantized tensors are then on its device.

        Raises:
            ValueError: the weight is not finite; names `name`.
        """
        self.set_parts_(*make_parts(_flatten(weight), self.form, name))

    def set_rows_(self, rows: Rows, name: str = "weight") -> None:
        """Replace the weight with some of its rows: `qweight` has only these, and the scales of all others are zero.

        The format must be able to encode them apart.

        Raises:
            ValueError: the rows are not finite; names `name` and the rows.
        """
        end = rows.start + rows.part.shape[0]
        qweight, own = make_parts(_flatten(rows.part), self.form, f"{name}[{rows.start}:{end}]")
        shape, kind = self.form.describe_tensors(self.matrix_shape)["scale"]
        scale, together = own.new_zeros(shape, dtype=kind), self.matrix_shape[0] // shape[0]
        scale[rows.start // together : end // together] = own
        self.qweight, self.scale = nn.Parameter(qweight, requires_grad=False), scale

    @property
    def device(self) -> torch.device:
        """Return the device on which the layer computes."""
        return self.scale.device if self.waits else self.qweight.device

    @property
    def waits(self) -> bool:
        """Return True if the quantized weight is offloaded to RAM while it is not used; see `stream`."""
        return "qweight" in vars(self)

    def wait_(self) -> None:
        """Offload the quantized weight to RAM, now or when it is set; moves between devices leave it there."""
        if self.waits:
            return
        qweight = self.qweight.detach()
        del self._parameters["qweight"]
        vars(self)["qweight"] = copy_to_ram(qweight)

    def set_parts_(self, *parts: Tensor) -> None:
        """Replace the quantized tensors, in the order and shapes of `form.describe_tensors`."""
        wanted = self.form.describe_tensors(self.matrix_shape)
        for (name, (shape, kind)), tensor in zip(wanted.items(), parts, strict=True):
            if tensor.shape != shape or tensor.dtype != kind:
                raise ValueError(
                    f"{name}: expected {kind} {list(shape)}, was given {tensor.dtype} {list(tensor.shape)}"
                )
            if name != "qweight":
                setattr(self, name, tensor)
            elif self.waits:
                vars(self)[name] = copy_to_ram(tensor)
            else:
                self.qweight = nn.Parameter(tensor, requires_grad=False)

    def get_parts(self) -> tuple[Tensor, ...]:
        """Return the quantized tensors; `stream.fetch_parts` fetches the offloaded ones before `formats.decode`."""
        if self.form.storage == "nf4":
            return self.qweight, self.scale, self.nested_scale, self.offset
        return self.qweight, self.scale

    @property
    def weight(self) -> Tensor:
        """Return the dequantized weight in the compute dtype and in its own shape, computed at every access.

        Where processes share the base, all of them must ask for it together, except in a pass of the model.
        """
        parts = tuple(map(gather_whole, self.get_parts()))
        return decode(fetch_parts(parts), self.form.storage, self.compute_dtype).view(self.weight_shape)

    def _cast(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the input and the bias in the dtype to compute in: autocast's, or the layer's own.

        Raises:
            RuntimeError: the input is in another dtype than the layer.
        """
        bias_N: Tensor | None = self.bias
        kind = x.device.type
        # The meta device has no autocast, and asking about it raises. torch 2.11 cannot compile is_autocast_available.
        if kind != "meta" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            return x.to(dtype), None if bias_N is None else bias_N.to(dtype)
        if x.dtype != self.compute_dtype:
            raise RuntimeError(f"{type(self).__name__} computes in {self.compute_dtype} but was given {x.dtype}")
        return x, bias_N

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
        for name, (_, kind) in self.form.describe_tensors(self.matrix_shape).items():
            given = state_dict.get(f"{prefix}{name}")
            if given is not None and given.dtype != kind:
                # copy_ would convert the values instead of the bits.
                raise ValueError(f"{prefix}{name}: expected {kind}, was given {given.dtype}")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return the layer's storage and matmul for `print(model)`."""
        dtype = str(self.compute_dtype).removeprefix("torch.")
        return f"{super().extra_repr()}, storage={self.form} by {self.backend}, compute={self.compute} in {dtype}"


def _flatten(weight: Weight) -> Weight:
    """Return a weight as the matrix (N, K) that a frozen layer stores."""
    return weight if isinstance(weight, Quantized) else weight.flatten(1)


def gather_whole(tensor: Tensor) -> Tensor:
    """Return a tensor that processes share, gathered from all of them; another one as it is."""
    gather = getattr(tensor, "full_tensor", None)  # of torch's DTensor
    return tensor if gather is None else gather()


# -- a whole denoiser --------------------------------------------------------------------------------------------------


def find_frozen_layers(denoiser: nn.Module) -> dict[str, FrozenLayer]:
    """Return the frozen layers by their names in the plain model, whether or not adapters wrap them."""
    layers = ((name, module) for name, module in denoiser.named_modules() if isinstance(module, FrozenLayer))
    return {strip_base_layer(name): module for name, module in layers}


def strip_base_layer(name: str) -> str:
    """Return the name that a module has in the plain model, whether or not adapters wrap it."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def offload_(denoiser: nn.Module, share: float, blocks: Iterable[str] = ()) -> int:
    """Offload about this share of the frozen bytes to RAM (see `stream`), in place.

    Layers on the meta device are offloaded when their weights are set.

    Args:
        denoiser: quantized.
        share: 0 to 1.
        blocks: names of blocks in which the same layers are offloaded if they are alike, see `stream.choose_offloaded`.

    Returns:
        Number of offloaded bytes.
    """
    layers = find_frozen_layers(denoiser)
    names = stream.choose_offloaded({name: layer.qweight.nbytes for name, layer in layers.items()}, share, blocks)
    for name in names:
        layers[name].wait_()
    return sum(layers[name].qweight.nbytes for name in names)


@contextlib.contextmanager
def decoded_compute(denoiser: nn.Module) -> Iterator[None]:
    """Dequantize before every matmul inside this context: what a program without FP8 matmuls computes."""
    layers = list(find_frozen_layers(denoiser).values())
    before = [layer.compute for layer in layers]
    for layer in layers:
        layer.compute = "upcast"
    try:
        yield
    finally:
        for layer, compute in zip(layers, before, strict=True):
            layer.compute = compute
