"""Quantizes a whole denoiser: chooses a format per layer, reports it, and fills the layers from a stream of tensors.

The denoiser never exists whole in bf16. `families` builds it on the meta device, `quantize_` replaces its linear layers
and convolutions while they take no memory, and `fill_` takes the checkpoint's tensors one at a time in the file's own
precision. So weights are rounded to FP8 once (float32 file -> FP8, not float32 -> bf16 -> FP8).

Everything that is not a plain `nn.Linear` or `nn.Conv2d` stays in `dtype` (norms, embeddings, biases), and so do the
layers that the family or the user excludes. Modules in the model class's `_keep_in_fp32_modules` stay float32,
as in diffusers' own loading.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from .. import settings
from ..errors import Joined, Message, Template, UserError, first_few
from .backends import import_linear_class
from .conv import FrozenConv2d
from .frozen import FrozenLayer, find_frozen_layers
from .linear import FrozenLinear
from .plan import Layer, LayerPlan, Plan, choose_held_dtype, decide, find_layer_names
from .quantized import Quantized, Rows, Weight


def quantize_(
    denoiser: nn.Module,
    section: settings.Quantize,
    keep: Iterable[str],
    dtype: torch.dtype,
    modulation: Sequence[str] = (),
    file_scale: str = "",
) -> Plan:
    """Carry out what `plan.decide` decides, in place.

    Linear layers and convolutions are replaced by frozen ones, every parameter is frozen, and the rest is cast to
    `dtype`. Works on real weights and on the meta device (then call `fill_`). Layers that are quantized already stay as
    they are. The arguments are those of `plan.decide`.

    Raises:
        UserErrors: what `plan.decide` raises.
        ValueError: weights are not finite (names the layer), or adapters exist already (they would be quantized too).
    """
    if any("lora_" in name for name, _ in denoiser.named_modules()):
        raise ValueError("quantize_ before adapters.inject: the adapters' own linear layers would be quantized")
    plan = decide(denoiser, section, keep, dtype, modulation, file_scale)
    planned = {layer.name: layer for layer in plan.layers}
    places = find_layer_names(denoiser)
    while places:
        plain, several = places.popitem()  # nothing here keeps a layer alive after it is replaced
        layer = planned[several[0]]
        if layer.form is None:
            continue
        if isinstance(plain, FrozenLayer):
            frozen: FrozenLayer = plain
        else:
            frozen = _make_empty(layer, section, dtype, plain)
            frozen.train(plain.training)
            frozen.set_weight_(plain.weight.detach(), several[0])
            if plain.bias is not None:
                frozen.bias = nn.Parameter(plain.bias.detach().to(dtype, copy=True), False)
            for name in several:
                parent, _, child = name.rpartition(".")
                setattr(denoiser.get_submodule(parent), child, frozen)
        frozen.set_compute_(layer.compute, section.recipe, section.fast_accum)
        frozen.kernels = section.kernels

    for name, module in _list_modules(denoiser):
        held = choose_held_dtype(denoiser, name, dtype)
        # Tensors of a frozen layer other than its bias stay as they are. A non-persistent buffer keeps the precision
        # in which the constructor computed it.
        fixed = {*module._non_persistent_buffers_set, *(module._buffers if isinstance(module, FrozenLayer) else ())}
        tensors = [buffer for key, buffer in module._buffers.items() if key not in fixed]
        tensors += [module.bias] if isinstance(module, FrozenLayer) else module._parameters.values()
        for tensor in tensors:
            if tensor is not None and tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype if isinstance(module, FrozenLayer) else held)
    denoiser.requires_grad_(False)
    return plan


def set_compute_(denoiser: nn.Module, plan: Plan, section: settings.Quantize) -> None:
    """Make every frozen layer multiply as planned, in place, including layers that adapters wrap."""
    layers = find_frozen_layers(denoiser)
    for layer in plan.quantized:
        layers[layer.name].set_compute_(layer.compute, section.recipe, section.fast_accum)
        layers[layer.name].kernels = section.kernels


def fill_(
    denoiser: nn.Module,
    tensors: Iterable[tuple[str, Weight | Rows]],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    filled: Callable[[nn.Module], None] | None = None,
) -> None:
    """Fill a denoiser on the meta device, one tensor at a time, and quantize the layers that `quantize_` replaced.

    Besides the result, at most the tensor just read and one conversion of it are in memory.

    Args:
        denoiser: the denoiser, after `quantize_`.
        tensors: (name in the diffusers model, tensor) in any order and float dtype; the stream is consumed once.
            `Quantized` tensors are stored unchanged if the layer's format allows it. Of a parameter that comes as
            `Rows`, only these are set.
        dtype: compute dtype.
        device: device for the weights. Tensors are moved there before they are quantized.
        filled: called with a module each time one of its tensors was set.

    Raises:
        UserError: names are missing, unknown, given twice or of another shape, all in one message; a module computed
            tensors in its constructor that were lost on the meta device; or a quantized layer's weights are not finite
            (names the layer).
    """
    device = torch.device(device)
    slots = dict(_list_slots(denoiser))
    waiting = dict.fromkeys(slots)
    unknown: list[str] = []
    twice: list[str] = []
    misshapen: list[str] = []
    for name, tensor in tensors:
        if name not in slots:
            unknown.append(name)
        elif name not in waiting:
            twice.append(name)
        else:
            del waiting[name]
            module, attribute, shape = slots[name]
            if tuple(tensor.shape) != shape:
                misshapen.append(
                    Message(
                        "{name} is {given}, expected {wanted}", name=name, given=list(tensor.shape), wanted=list(shape)
                    )
                )
            else:
                try:
                    _set(denoiser, module, attribute, name, tensor.to(device), dtype)
                except ValueError as error:
                    raise UserError(
                        Message("the base model's weights are broken: {why}; download the file again", why=error)
                    ) from None
                if filled is not None:
                    filled(module)
        del tensor  # otherwise it would stay in memory while the stream reads the next one
    lists = {
        Template("{count} missing: {names}"): list(waiting),
        Template("{count} do not belong to this model: {names}"): unknown,
        Template("{count} occur twice: {names}"): twice,
        Template("{count} have another shape: {names}"): misshapen,
    }
    problems = [listed(count=len(names), names=first_few(names, 8)) for listed, names in lists.items() if names]
    if problems:
        line = Joined("; ", problems)
        raise UserError(Message("the base model's weights do not fit the architecture: {lines}", lines=line))
    _move_computed(denoiser, device)


def dequantize_tensors(denoiser: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the base weights as (diffusers name, tensor), one at a time, dequantized to the compute dtype.

    The counterpart of `fill_`: names are those of the plain model, whether or not peft has wrapped its layers, and
    adapters are left out.
    """
    for path, module in _list_modules(denoiser):
        parts = path.split(".")
        if any(part.startswith("lora_") for part in parts):
            continue
        prefix = "".join(f"{part}." for part in parts if part and part != "base_layer")
        for attribute in _list_names(module):
            tensor = getattr(module, attribute)
            yield prefix + attribute, tensor.detach()


def as_held(weight: Weight, layer: LayerPlan, section: settings.Quantize, dtype: torch.dtype) -> Tensor:
    """Return a file's weight as its planned layer computes with it, in `dtype`, on the weight's device."""
    held = _make_empty_linear(layer, section, dtype, bias=False)
    held.set_weight_(weight, layer.name)
    return held.weight.detach().view(weight.shape)


# -- filling -----------------------------------------------------------------------------------------------------------


def _make_empty(layer: LayerPlan, section: settings.Quantize, dtype: torch.dtype, plain: Layer) -> FrozenLayer:
    """Return the planned layer on the meta device, with its matmul set but without its weight."""
    if isinstance(plain, nn.Linear):
        return _make_empty_linear(layer, section, dtype, plain.bias is not None)
    if layer.form is None:
        raise ValueError(f"{layer.name}: is not to be quantized")
    return FrozenConv2d(plain, dtype, layer.form)


def _make_empty_linear(layer: LayerPlan, section: settings.Quantize, dtype: torch.dtype, bias: bool) -> FrozenLinear:
    if layer.form is None:
        raise ValueError(f"{layer.name}: is not to be quantized")
    num_out, num_in = layer.shape
    frozen = import_linear_class(layer.backend)(num_in, num_out, bias, "meta", dtype, layer.form)
    frozen.set_compute_(layer.compute, section.recipe, section.fast_accum)
    return frozen


def _list_modules(denoiser: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Iterate as `named_modules`, without the modules inside other libraries' layers."""
    inside = {part for layer in find_frozen_layers(denoiser).values() for part in layer.modules() if part is not layer}
    return ((name, module) for name, module in denoiser.named_modules() if module not in inside)


def _list_names(module: nn.Module) -> list[str]:
    """Return the module's own parameters and persistent buffers, by their names in the plain model."""
    if isinstance(module, FrozenLayer):
        return ["weight"] if module.bias is None else ["weight", "bias"]
    parameters = [key for key, value in module._parameters.items() if value is not None]
    skipped = module._non_persistent_buffers_set
    return parameters + [key for key, value in module._buffers.items() if value is not None and key not in skipped]


def _list_slots(denoiser: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str, tuple[int, ...]]]]:
    for path, module in _list_modules(denoiser):
        for attribute in _list_names(module):
            if isinstance(module, FrozenLayer) and attribute == "weight":
                shape = module.weight_shape
            else:
                shape = tuple(getattr(module, attribute).shape)
            yield f"{path}.{attribute}" if path else attribute, (module, attribute, shape)


def _set(
    denoiser: nn.Module,
    module: nn.Module,
    attribute: str,
    name: str,
    tensor: Weight | Rows,
    dtype: torch.dtype,
) -> None:
    if isinstance(module, FrozenLayer) and attribute == "weight":
        module.compute_dtype = dtype
        layer = name.removesuffix(".weight")
        module.set_rows_(tensor, layer) if isinstance(tensor, Rows) else module.set_weight_(tensor, layer)
        return
    tensor = tensor.part if isinstance(tensor, Rows) else tensor
    held = choose_held_dtype(denoiser, name.rpartition(".")[0], dtype)
    if isinstance(tensor, Quantized):
        tensor = tensor.dequantize(held)
    elif tensor.is_floating_point():
        tensor = tensor.to(held)
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.clone()  # a slice (of a fused qkv, for example) would keep the whole tensor alive
    if attribute in module._parameters:
        setattr(module, attribute, nn.Parameter(tensor, requires_grad=False))
    else:
        module._buffers[attribute] = tensor


def _move_computed(denoiser: nn.Module, device: torch.device) -> None:
    """Move tensors that no checkpoint stores (non-persistent buffers), and refuse those that were lost on meta.

    Examples are PixArt's position table (a buffer) and Qwen-Image's rotary frequencies (plain attributes).
    UNet2DConditionModel and FluxTransformer2DModel have none.
    """
    lost: list[str] = []
    for path, module in denoiser.named_modules():
        dot = f"{path}." if path else ""
        for key, tensor in module._buffers.items():
            if tensor is not None and key in module._non_persistent_buffers_set and tensor.device.type != "meta":
                module._buffers[key] = tensor.to(device)
        held = [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]
        lost += [dot + key for key, value in held if isinstance(value, Tensor) and value.device.type == "meta"]
    if lost:
        raise UserError(
            Message(
                "{name} computes tensors in its constructor that are in no checkpoint, and they were lost on the "
                "meta device: {names}. Construct it under accelerate.init_empty_weights() instead",
                name=type(denoiser).__name__,
                names=first_few(lost, 8),
            )
        )
