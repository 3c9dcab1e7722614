"""Puts a whole denoiser into its storage: decides per layer, reports what it did, and fills it from a stream.

The denoiser never exists whole in bf16. `families` builds it on the meta device, `quantize_` swaps the linear layers
while they have no bytes, and `fill_` takes the checkpoint's tensors one at a time, in the file's own precision, so that
rounding to FP8 happens once (float32 file -> FP8, not float32 -> bf16 -> FP8).

What stays in `dtype`: everything that is not a plain `nn.Linear` (norms, convolutions, embeddings, biases), and the
linear layers that the family or the user keeps. What a model's class lists in `_keep_in_fp32_modules` stays float32, as
in diffusers' own loading.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import config
from .fp8 import FrozenFp8Linear
from .names import name_matches


@dataclass(frozen=True)
class LayerReport:
    """What was done with one linear layer."""

    name: str
    shape: tuple[int, int]
    """(output features, input features)"""
    storage: str
    """"fp8", "bf16", "fp16" or "fp32" """
    reason: str
    num_bytes: int
    """weight, scales and bias"""


@dataclass(frozen=True)
class QuantReport:
    """What `quantize_` did: every linear layer, and the bytes of the whole denoiser."""

    storage: str
    layers: tuple[LayerReport, ...]
    num_bytes: int
    """all parameters and buffers, as they are held now"""
    plain_num_bytes: int
    """the same, had every parameter been held in the compute dtype"""
    warnings: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.storage == "fp8")

    @property
    def kept(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.storage != "fp8")

    def summary(self) -> str:
        """One line for the log, and one more for each reason why linear layers were kept."""
        lines = [
            f"base: {len(self.quantized)} of {len(self.layers)} linear layers in fp8; "
            f"{self.num_bytes / 2**20:.1f} MiB held, {self.plain_num_bytes / 2**20:.1f} MiB without"
        ]
        if self.storage != "none":
            for reason, count in Counter(layer.reason for layer in self.kept).items():
                lines.append(f"  kept: {count} x {reason}")
        return "\n".join(lines)


def quantize_(denoiser: nn.Module, section: config.Quantize, keep: Iterable[str], dtype: torch.dtype) -> QuantReport:
    """Swaps linear layers for FP8 ones, freezes every parameter and casts the rest to `dtype`, in place.

    Works on real weights and on the meta device (then call `fill_`). Layers that are FP8 already stay as they are.

    Args:
        keep: the family's precise parts, in the terms of `names.name_matches`. Parts that match nothing are fine here:
            one architecture has variants with and without some modules.
        dtype: compute dtype, and storage of what is not quantized.

    Raises:
        config.UserError: an entry of `section.keep` matches no linear layer.
        ValueError: non-finite weights, naming the layer; or adapters are there already (they would be quantized too).
    """
    if any("lora_" in name for name, _ in denoiser.named_modules()):
        raise ValueError("quantize_ before adapters.inject: the adapters' own linear layers would be quantized")
    if section.storage not in ("fp8", "none"):
        raise config.UserError(f"quantize.storage: {section.storage!r} is not known; accepted: fp8, none")
    places: dict[nn.Module, list[str]] = {}  # a layer that stands at two places stays one layer
    for name, module in denoiser.named_modules(remove_duplicate=False):
        if name and isinstance(module, nn.Linear):
            places.setdefault(module, []).append(name)
    names = [name for several in places.values() for name in several]
    _check_keep(section.keep, names)

    reasons: dict[str, str] = {}
    while places:
        linear, several = places.popitem()  # nothing here keeps a layer alive once it is swapped
        reason = next(filter(None, (_reason_to_keep(denoiser, name, linear, section, keep) for name in several)), "")
        reasons |= dict.fromkeys(several, reason)
        if reason or isinstance(linear, FrozenFp8Linear):
            continue
        quantized = FrozenFp8Linear.from_linear(linear, dtype, several[0])
        for name in several:
            parent, _, child = name.rpartition(".")
            setattr(denoiser.get_submodule(parent), child, quantized)

    for name, module in denoiser.named_modules():
        held = _held_dtype(denoiser, name, dtype)
        persistent = [
            buffer for key, buffer in module._buffers.items() if key not in module._non_persistent_buffers_set
        ]
        for tensor in [*module._parameters.values(), *persistent]:
            # A scale of an FP8 layer stays float32; a non-persistent buffer has the precision its constructor computed
            # it in.
            if tensor is not None and tensor.is_floating_point() and tensor is not module._buffers.get("scale"):
                tensor.data = tensor.data.to(held)
    denoiser.requires_grad_(False)

    layers = []
    for name in names:
        layer = denoiser.get_submodule(name)
        storage = "fp8" if isinstance(layer, FrozenFp8Linear) else _short(layer.weight.dtype)
        num_bytes = sum(tensor.nbytes for tensor in layer.state_dict().values())
        shape = (layer.out_features, layer.in_features)
        layers.append(LayerReport(name, shape, storage, reasons[name] or "fp8", num_bytes))
    everything = [*denoiser.parameters(), *denoiser.buffers()]
    plain = sum(parameter.numel() for parameter in denoiser.parameters()) * dtype.itemsize
    warnings = ()
    if section.storage == "none" and section.keep:
        warnings = ("quantize.keep had no effect: quantize.storage is 'none', so nothing is quantized",)
    return QuantReport(section.storage, tuple(layers), sum(t.nbytes for t in everything), plain, warnings)


def fill_(
    denoiser: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> None:
    """Gives a denoiser on the meta device its weights, one tensor at a time, quantizing on the way where `quantize_`
    said so.

    Beside the result, never more lives than the tensor just read and one conversion of it.

    Args:
        tensors: (name as in the diffusers model, tensor) in any order and float dtype; the stream is consumed once.
        device: where the weights go. Tensors are moved there before they are quantized.

    Raises:
        config.UserError: names that are missing, unknown, given twice or of another shape; all of them in one message.
        Or a
            module computed tensors in its constructor that were lost on the meta device.
        ValueError: non-finite weights of a quantized layer, naming it.
    """
    device = torch.device(device)
    slots = dict(_slots(denoiser))
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
                misshapen.append(f"{name} {list(tensor.shape)}, expected {list(shape)}")
            else:
                _set(denoiser, module, attribute, name, tensor, dtype, device)
        del tensor  # or it would live on while the stream reads the next one
    problems = [
        _listed("is missing", list(waiting)),
        _listed("is not part of this model", unknown),
        _listed("is given twice", twice),
        _listed("has another shape", misshapen),
    ]
    if any(problems):
        raise config.UserError(
            "the base model's weights do not fit the architecture: " + "; ".join(filter(None, problems))
        )
    _move_computed(denoiser, device)


def decoded_tensors(denoiser: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The base weights as (diffusers name, tensor), one at a time, FP8 decoded to the compute dtype; adapters left out.

    The counterpart of `fill_`: the names are those of the plain model, whether or not peft has wrapped its layers.
    """
    for path, module in denoiser.named_modules():
        parts = path.split(".")
        if any(part.startswith("lora_") for part in parts):
            continue
        prefix = "".join(f"{part}." for part in parts if part and part != "base_layer")
        for attribute in _names(module):
            tensor = getattr(module, attribute)
            yield prefix + attribute, tensor.detach()


def decoded_state_dict(denoiser: nn.Module) -> dict[str, Tensor]:
    """`decoded_tensors` as a dict, to load into a plain diffusers model: the whole model in the compute dtype."""
    return dict(decoded_tensors(denoiser))


# -- which layers, and in what -----------------------------------------------------------------------------------------


def _reason_to_keep(
    denoiser: nn.Module, name: str, linear: nn.Linear, section: config.Quantize, keep: Iterable[str]
) -> str:
    """Why this layer is not quantized, or "" when it is."""
    if section.storage == "none":
        return "quantize.storage is none"
    for entry in section.keep:
        if name_matches(name, entry):
            return f"{entry!r} in quantize.keep"
    for entry in keep:
        if name_matches(name, entry):
            return f"{entry!r} is precise in this family"
    if _held_dtype(denoiser, name, torch.bfloat16) is torch.float32:
        return "float32 in this model's class"
    if type(linear) not in (nn.Linear, FrozenFp8Linear):
        # Such as the projection of nn.MultiheadAttention, whose weight is read and not called.
        return f"{type(linear).__name__} is not a plain nn.Linear"
    return ""


def _check_keep(entries: Iterable[str], names: list[str]) -> None:
    for entry in entries:
        if any(name_matches(name, entry) for name in names):
            continue
        parts = {part for name in names for part in name.split(".") if not part.isdigit()}
        parts |= {".".join(name.split(".")[-2:]) for name in names}
        near = difflib.get_close_matches(entry.removeprefix("^"), sorted(parts), n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "`lora-fp8 inspect` lists the layers"
        raise config.UserError(f"quantize.keep: {entry!r} matches no linear layer of this model; {hint}")


def _held_dtype(denoiser: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float32 where the model's class asks for it (diffusers' `_keep_in_fp32_modules`)."""
    precise = getattr(denoiser, "_keep_in_fp32_modules", None) or ()
    return torch.float32 if any(part in precise for part in name.split(".")) else dtype


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype, str(dtype))


# -- filling -----------------------------------------------------------------------------------------------------------


def _names(module: nn.Module) -> list[str]:
    """The module's own parameters and persistent buffers, by the names they have in the plain model."""
    if isinstance(module, FrozenFp8Linear):
        return ["weight"] if module.bias is None else ["weight", "bias"]
    parameters = [key for key, value in module._parameters.items() if value is not None]
    skipped = module._non_persistent_buffers_set
    return parameters + [key for key, value in module._buffers.items() if value is not None and key not in skipped]


def _slots(denoiser: nn.Module) -> Iterator[tuple[str, tuple[nn.Module, str, tuple[int, ...]]]]:
    for path, module in denoiser.named_modules():
        for attribute in _names(module):
            quantized = isinstance(module, FrozenFp8Linear) and attribute == "weight"
            held = module.qweight if quantized else getattr(module, attribute)
            yield f"{path}.{attribute}" if path else attribute, (module, attribute, tuple(held.shape))


def _set(
    denoiser: nn.Module,
    module: nn.Module,
    attribute: str,
    name: str,
    tensor: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    tensor = tensor.to(device)
    if isinstance(module, FrozenFp8Linear) and attribute == "weight":
        module.compute_dtype = dtype
        module.set_weight_(tensor, name.removesuffix(".weight"))
        return
    if tensor.is_floating_point():
        tensor = tensor.to(_held_dtype(denoiser, name.rpartition(".")[0], dtype))
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.clone()  # a slice, of a fused qkv for one: keeping it would keep the whole alive
    if attribute in module._parameters:
        setattr(module, attribute, nn.Parameter(tensor, requires_grad=False))
    else:
        module._buffers[attribute] = tensor


def _move_computed(denoiser: nn.Module, device: torch.device) -> None:
    """Moves tensors that no checkpoint holds (non-persistent buffers), and refuses those that were lost on meta.

    Such as PixArt's position table (a buffer) and Qwen-Image's rotary frequencies (plain attributes).
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
        raise config.UserError(
            f"{type(denoiser).__name__} computes tensors in its constructor that no checkpoint holds, and on the meta "
            f"device they were lost: {_first(lost)}. Construct it under accelerate.init_empty_weights() instead"
        )


def _listed(what: str, names: list[str]) -> str:
    return f"{len(names)} {what if len(names) == 1 else _plural(what)}: {_first(names)}" if names else ""


def _plural(what: str) -> str:
    verb, _, rest = what.partition(" ")
    return f"{ {'is': 'are', 'has': 'have'}[verb] } {rest}"


def _first(names: list[str], limit: int = 8) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
