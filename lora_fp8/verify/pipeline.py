"""A diffusers pipeline without our modules, and a LoRA file loaded into it as a user of diffusers does.

diffusers does not convert every layout that other programs read, and its conversion of kohya's FLUX.1 is hard-coded to
the released size: such files are first renamed by `layouts.from_layout`. diffusers does not read LoHa at all, and LoKr
rarely: the deltas of such a file are computed from it and added beside the pipeline's layers."""

import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import precision
from ..adapters import kinds
from ..errors import Message, RunFailure, first_few
from ..families._encoders import quiet
from ..lora_files import export, layer_names, layouts
from .reference import Base, Tensors


def build_clean_pipeline(
    family: Any,
    base: Base | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    *,
    text: bool = False,
) -> Any:
    """Return the family's diffusers pipeline with a new denoiser: a plain diffusers model, without our modules.

    Args:
        family: family of the model.
        base: weights by diffusers' names (the dequantized FP8 ones), or a function that streams them; None: the
            published ones, as the family reads them from the model's files.
        dtype: storage and compute dtype of the denoiser; None: the family's.
        device: device of the denoiser; None: the family's. On another one it can predict, but the pipeline cannot
            generate images.
        text: True adds the trainable text encoders, newly loaded from the model's files.

    Raises:
        RunFailure: the weights are not those of this denoiser.
    """
    dtype = dtype or family.dtype
    denoiser = family.make_empty_denoiser()
    if base is None:
        tensors: Tensors = family.read_denoiser_tensors()
    else:
        tensors = base() if callable(base) else base.items()
    wide = set(getattr(denoiser, "_keep_in_fp32_modules", None) or ())  # float32 in diffusers' own loading, too

    def convert_tensor(name: str, tensor: Tensor) -> Tensor:
        to = torch.float32 if wide & set(name.split(".")) else dtype
        return tensor.detach().to(device or family.device, to if tensor.is_floating_point() else tensor.dtype)

    state = {name: convert_tensor(name, precision.to_plain(tensor)) for name, tensor in tensors}
    wrong = denoiser.load_state_dict(state, strict=False, assign=True)
    if wrong.missing_keys or wrong.unexpected_keys:
        raise RunFailure(
            Message(
                "the base model for verification is incomplete: missing {missing}, unexpected {unexpected}",
                missing=first_few(wrong.missing_keys) or Message("none"),
                unexpected=first_few(wrong.unexpected_keys) or Message("none"),
            )
        )
    left = [name for name, buffer in denoiser.named_buffers() if buffer.is_meta]
    if left:
        raise RunFailure(
            Message(
                "{name} has buffers that are in no file: {names}", name=type(denoiser).__name__, names=", ".join(left)
            )
        )
    foreign = {type(m).__name__ for m in denoiser.modules() if type(m).__module__.split(".")[0] in ("lora_fp8", "peft")}
    if foreign:
        raise RunFailure(
            Message("the denoiser for verification is not clean: it contains {names}", names=", ".join(sorted(foreign)))
        )
    return family.make_pipeline(denoiser.requires_grad_(False).eval(), text=text)


def load(pipeline: Any, file: Path, family: Any) -> tuple[list[str], str | None]:
    """Load a LoRA file into a pipeline as a user of diffusers does.

    Returns:
        Warnings of diffusers and peft; and why the file was renamed before diffusers loaded it, or None.
    """
    denoiser_config = dict(getattr(pipeline, family.denoiser_name).config)
    tensors, _ = export.read_adapter(file, sound=False)
    layout = layouts.detect_layout(tensors, family)
    state = layouts.from_layout(tensors, family, denoiser_config, layout)[0]
    (kind,), layers = layouts.find_kinds(state), kinds.group_by_layer(state)
    renamed = layouts.explain_unread_by_diffusers(family, denoiser_config, layout, kind, layers)
    with _collect_complaints() as complaints, quiet():
        if renamed:
            state, scaling = layouts.from_layout(tensors, family, denoiser_config, layout)
            if layouts.explain_unread_by_diffusers(family, denoiser_config, "diffusers", kind):
                _attach(getattr(pipeline, family.denoiser_name), state, scaling)
                return complaints, Message(
                    "{why}: the changes computed from the file are added beside each layer", why=renamed
                )
            pipeline.load_lora_weights(layouts.to_layout(state, scaling, family, denoiser_config, "diffusers"))
        else:
            pipeline.load_lora_weights(str(file.parent), weight_name=file.name, local_files_only=True)
    return complaints, renamed


@contextmanager
def _collect_complaints() -> Iterator[list[str]]:
    """Collect the warnings of diffusers and peft, whatever verbosity the caller has set."""
    complaints: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            # diffusers warns about each part that a file does not adapt; layers that were not loaded are found by name.
            if not re.search(r"No LoRA keys associated to \w+ found with the prefix=", text):
                complaints.append(text)

    collect = Collect(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("diffusers", "peft")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    try:
        for logger in loggers:  # into the list and not to the screen: the report shows what matters
            logger.handlers, logger.propagate = [collect], False
            logger.setLevel(logging.WARNING)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            yield complaints
        complaints += [str(w.message) for w in warned if not issubclass(w.category, DeprecationWarning | FutureWarning)]
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


class _Attached:
    """A forward hook that adds the effect of LoKr, LoHa or OFT tensors to a layer's output."""

    def __init__(self, parts: dict[str, Tensor], scaling: float) -> None:
        self.parts, self.scaling, self.strength = parts, scaling, 1.0

    def __call__(self, layer: Any, inputs: tuple[Tensor, ...], answer: Tensor) -> Tensor:
        x = inputs[0]
        parts = {name: part.to(x.device) for name, part in self.parts.items()}
        if "oft_blocks" in parts:
            added = kinds.compute_weight_change(layer.weight.float(), parts, self.scaling)
        else:
            added = kinds.compute_delta(parts, self.scaling)
        added = (added * self.strength).to(x.dtype).reshape(layer.weight.shape)
        if isinstance(layer, nn.Conv2d):
            return answer + F.conv2d(x, added, None, layer.stride, layer.padding, layer.dilation)
        return answer + F.linear(x, added)


def _attach(denoiser: nn.Module, state: Mapping[str, Tensor], scaling: Mapping[str, float]) -> None:
    for path, parts in kinds.group_by_layer(state).items():
        layer = denoiser.get_submodule(path)
        attached = _Attached(parts, scaling[path])
        vars(layer)["attached"] = attached
        layer.register_forward_hook(attached)


@dataclass(frozen=True)
class Loaded:
    """The adapter that acts on one layer: its tensors by the last part of their names, and their scaling.

    Attributes:
        parts: the tensors.
        scaling: factor of their product.
        weight: the layer's own weight, on which DoRA's delta depends.
    """

    parts: dict[str, Tensor]
    scaling: float
    weight: Tensor

    @property
    def acts(self) -> bool:
        """Return True if the adapter has an effect; one that fills up a fused layer has only zeros where it starts."""
        return all(tensor.any() for name, tensor in self.parts.items() if name in kinds.ZERO_AT_START)


def find_loaded_layers(denoiser: nn.Module) -> dict[str, Loaded]:
    """Return {module path: adapter} of a denoiser that a file was loaded into."""
    layers = {}
    for path, module in denoiser.named_modules():
        if attached := getattr(module, "attached", None):
            layers[path] = Loaded(attached.parts, attached.scaling, module.weight)
        for adapter in module.active_adapters if hasattr(module, "get_base_layer") else ():
            parts = {}
            for part in kinds.ALL_PARTS:
                held = getattr(module, part.removesuffix(".weight"), None)
                if held is not None and adapter in held:
                    tensor = held[adapter] if isinstance(held, nn.ParameterDict) else held[adapter].weight
                    parts[part] = tensor.detach()
            if parts:
                layers[path] = Loaded(parts, float(module.scaling[adapter]), module.get_base_layer().weight)
    return layers


def find_all_loaded(pipeline: Any, family: Any) -> dict[str, Loaded]:
    """Return `find_loaded_layers` of a pipeline's denoiser and text encoders, by an adapter's names."""
    layers = find_loaded_layers(getattr(pipeline, family.denoiser_name))
    for name in family.trained_text:
        if (encoder := getattr(pipeline, name, None)) is not None:
            layers |= {
                layer_names.make_text_layer_name(name, path): layer
                for path, layer in find_loaded_layers(encoder).items()
            }
    return layers


@contextmanager
def scale_adapter(denoiser: nn.Module, factor: float) -> Iterator[None]:
    """Multiply the loaded adapter's strength by `factor` inside this context."""
    attached: list[_Attached] = [
        vars(module)["attached"] for module in denoiser.modules() if "attached" in vars(module)
    ]
    adapted: list[Any] = [module for module in denoiser.modules() if hasattr(module, "get_base_layer")]
    layers = [(module, dict(module.scaling)) for module in adapted]
    lengths = [
        (dora, dora.weight.detach().clone(), module, name)
        for module, _ in layers
        for name, dora in (getattr(module, "lora_magnitude_vector", None) or {}).items()
    ]
    try:
        for adapter in attached:
            adapter.strength = factor
        for module, before in layers:
            module.scaling.update({name: scale * factor for name, scale in before.items()})
        for dora, trained, module, name in lengths:
            dora.weight.data = _interpolate_lengths(factor, trained, module, name)
        yield
    finally:
        for adapter in attached:
            adapter.strength = 1.0
        for module, before in layers:
            module.scaling.update(before)
        for dora, trained, _, _ in lengths:
            dora.weight.data = trained


def _interpolate_lengths(factor: float, trained: Tensor, module: Any, adapter: str) -> Tensor:
    """Return DoRA's magnitudes between the weight's own row lengths (factor 0) and the trained ones (1)."""
    a, b = (half[adapter].weight for half in (module.lora_A, module.lora_B))
    own = kinds.compute_row_lengths(module.get_base_layer(), a, b, 0.0).view(trained.shape)
    return (own + factor * (trained.float() - own)).to(trained.dtype)
