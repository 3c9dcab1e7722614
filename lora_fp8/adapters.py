"""LoRA, DoRA, LoKr and LoHa beside the frozen layers. The only place that imports peft.

peft wraps the layers, adds the small matrices and does LoRA's forward pass; what it leaves to chance is decided here:

* Dtype. peft gives adapters the dtype of the base weight, and with an FP8 base that has made people train in FP8 (about
  49 distinct values in a fresh A). Here they end in `section.dtype`, whatever the base is held in.
* Start values. A is drawn in float32 from a generator keyed by the seed and the layer's name, then cast; B is zero. So
  the start does not depend on the order of layers, on which other layers are adapted, or on the global random state,
  which stays untouched. Of the other kinds, `kinds.ZERO_AT_START` is zero: every kind begins at the base itself.
* The other kinds' forward passes. peft's DoRA makes the whole weight anew in the adapter's dtype, its LoKr and LoHa
  make the whole delta, keep it for the backward, and draw from the global random state; here nothing of that is so.
  And dropout means the same for every kind: the adapter's input is dropped, the base's never.
* Names. Outside this file a parameter is called "<diffusers module path>.lora_A.weight"; peft's "base_layer" and
  "default" stay inside.
* One pass. Where a frozen layer multiplies with the Triton kernels, they add its LoRA in their last pass over the
  result (`FusedLora`); everywhere else peft does.
* Targets. A target that matches nothing is an error, not a smaller adapter; so is an entry of `ranks`.
* Ranks. Layers may differ in theirs (`section.ranks`); all are scaled by `section.alpha / section.rank`. A layer of
  rank 0 has no adapter.

What the kinds compute, and where they come from: `kinds`.
"""

import contextlib
import hashlib
import math
import re
import warnings as python_warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoHaConfig, LoHaModel, LoKrConfig, LoKrModel, LoraConfig, inject_adapter_in_model
from peft.tuners import loha, lokr, lora
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn import functional as F

from . import config, kinds
from .precision import FrozenLinear, frozen_layers
from .precision.names import by_name, hint

ADAPTER = "default"
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class InjectReport:
    """What `inject` did."""

    num_modules: int
    num_parameters: int
    names: tuple[str, ...]
    """the adapted layers, as diffusers names them, in the model's order"""
    warnings: tuple[str, ...] = ()


class FusedLora(lora.Linear):
    """peft's LoRA beside a linear layer, computed by the layer itself wherever that comes to the same thing."""

    @property
    def fuses(self) -> bool:
        base = self.base_layer
        plain = isinstance(self.lora_dropout[ADAPTER], nn.Identity) and not self.lora_variant and not self.merged
        return isinstance(base, FrozenLinear) and base.takes_lora and plain and self.active_adapters == [ADAPTER]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or self.disable_adapters or not self.fuses:
            return super().forward(x, *args, **kwargs)
        a_RK, b_NR = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        return self.base_layer(x, lora=(a_RK, b_NR, self.scaling[ADAPTER]))


class _Dora:
    """peft's LoRA with a length for each row of the weight, beside a linear layer or a convolution."""

    magnitude: nn.Parameter  # (N), float32 whatever the adapter's dtype: bf16 would move whole rows by up to 0.4 %

    def forward(self, x: Tensor) -> Tensor:
        base = self.base_layer
        result = base(x)
        if self.disable_adapters:
            return result
        a, b, scaling = self.lora_A[ADAPTER], self.lora_B[ADAPTER], self.scaling[ADAPTER]
        update = b(a(self.lora_dropout[ADAPTER](x.to(a.weight.dtype)))) * scaling
        ratio = kinds.length_ratio(base, a.weight, b.weight, scaling, self.magnitude)
        without_bias = result
        if isinstance(base, nn.Conv2d):
            ratio = ratio.view(-1, 1, 1)
        if base.bias is not None:
            without_bias = result - base.bias.view(ratio.shape)
        # The ratio is near 1, which bf16 has few values around: its distance from 1 is what is rounded.
        lengthened = (ratio - 1).to(result.dtype) * without_bias + ratio.to(update.dtype) * update
        return (result + lengthened).to(result.dtype)


class DoraLinear(_Dora, lora.Linear):
    pass


class DoraConv2d(_Dora, lora.Conv2d):
    pass


class _Product:
    """peft's LoKr or LoHa layer, with a forward pass of our own."""

    dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        if self.disable_adapters:
            return result
        parts, scaling = _parts(self), self.scaling[ADAPTER]
        dropped = F.dropout(x.to(next(iter(parts.values())).dtype), self.dropout, self.training)
        return result + self.update(dropped, parts, scaling).to(result.dtype)

    def update(self, x: Tensor, parts: dict[str, Tensor], scaling: float) -> Tensor:
        """Of a convolution: its delta has few values beside its picture."""
        base = self.base_layer
        weight = kinds.delta(parts, scaling, x.dtype).view(base.weight.shape)
        return F.conv2d(x, weight, None, base.stride, base.padding, base.dilation)


class KroneckerLinear(_Product, lokr.Linear):
    def update(self, x: Tensor, parts: dict[str, Tensor], scaling: float) -> Tensor:
        w1, w2 = kinds.kronecker_factors(parts)
        return kinds.kronecker_linear(x, w1 * scaling, w2)


class KroneckerConv2d(_Product, lokr.Conv2d):
    pass


class HadamardLinear(_Product, loha.Linear):
    def update(self, x: Tensor, parts: dict[str, Tensor], scaling: float) -> Tensor:
        factors = [parts[name] for name in kinds.PARTS["loha"]]
        y_MN = kinds.HadamardLinear.apply(x.reshape(-1, x.shape[-1]), *factors, scaling)
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])


class HadamardConv2d(_Product, loha.Conv2d):
    pass


class _KroneckerModel(LoKrModel):
    layers_mapping = {nn.Linear: KroneckerLinear, nn.Conv2d: KroneckerConv2d}


class _HadamardModel(LoHaModel):
    layers_mapping = {nn.Linear: HadamardLinear, nn.Conv2d: HadamardConv2d}


def inject(
    denoiser: nn.Module,
    section: config.Adapter,
    targets: Sequence[str],
    seed: int,
    called: Callable[[str], str] = str,
) -> InjectReport:
    """Puts an adapter beside every targeted layer, in place; afterwards only the adapters require gradients.

    Args:
        targets: the family's choice, used when `section.targets` is empty. Each is a name or the end of one: "to_q" is
            every layer called to_q, "ff.net.0.proj" only those. `nn.Linear` (FP8 ones too) and `nn.Conv2d` can be
            adapted.
        seed: with the layer's name, keys the start values.
        called: what a layer is called outside, where that is not its name in this model.

    Raises:
        config.UserError: a target matches no layer that can be adapted, or one that this kind cannot adapt.
        ValueError: the denoiser has adapters already.
    """
    if modules(denoiser):
        raise ValueError("inject: this denoiser has adapters already")
    setting = "adapter.targets" if section.targets else "targets"
    names, notes = _match(denoiser, list(section.targets or targets), setting)
    rank_of, told = ranks(section, names)
    notes, names = notes + told, list(rank_of)
    for name in names:
        layer = denoiser.get_submodule(name)
        is_conv = isinstance(layer, nn.Conv2d)
        narrow = min((layer.in_channels, layer.out_channels) if is_conv else (layer.in_features, layer.out_features))
        if section.type != "lora" and is_conv and layer.groups > 1:
            raise config.UserError(
                f"adapter.type = {section.type!r}: {name} is a convolution in {layer.groups} groups, which only 'lora' "
                "adapts; leave it out of adapter.targets"
            )
        if rank_of[name] > narrow and section.type != "lokr":
            notes.append(f"adapter.rank {rank_of[name]} is more than {name} can use ({narrow})")
    dtype = DTYPES[section.dtype]
    # On meta (low_cpu_mem_usage) peft's own start values cost nothing; the fork keeps the global random state all the
    # same.
    with torch.random.fork_rng(devices=[]), python_warnings.catch_warnings(record=True) as caught:
        python_warnings.simplefilter("always")
        _wrap(denoiser, section, rank_of)
    notes += [str(warning.message) for warning in caught]

    found = modules(denoiser)
    if list(found) != names:
        raise RuntimeError(f"peft adapted other layers than asked for: {sorted(set(found) ^ set(names))[:8]}")
    denoiser.requires_grad_(False)
    for name, layer in found.items():
        _start_(layer, called(name), section, seed, dtype)
    if section.type == "lokr":
        notes += _unused_by_lokr(section, [_parts(layer) for layer in found.values()])
    num_parameters = sum(parameter.numel() for _, parameter in parameters(denoiser))
    return InjectReport(len(names), num_parameters, tuple(names), tuple(notes))


def ranks(section: config.Adapter, names: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """The rank of each of these layers that gets an adapter, and warnings.

    The first entry of `section.ranks` that means a layer counts; rank 0 leaves the layer as it is.

    Raises:
        config.UserError: an entry that means none of them, or no layer is left.
    """
    entries = filter(None, map(config.parse_rank, section.ranks))  # the config has checked them
    found, notes = by_name("adapter.ranks", entries, names)
    of_all = {name: found.get(name, section.rank) for name in names}
    if names and not any(of_all.values()):
        raise config.UserError("adapter.ranks: leaves no layer to train; give one a rank above 0")
    return {name: rank for name, rank in of_all.items() if rank}, notes


def _wrap(denoiser: nn.Module, section: config.Adapter, rank_of: dict[str, int]) -> None:
    """peft's part: a layer of the kind around each named one, its parameters on the meta device."""
    # One pattern over whole names: a list is matched by endings, and would take an embedding of that name too.
    pattern = "|".join(map(re.escape, rank_of))
    others = sorted(set(rank_of.values()) - {section.rank})
    by_rank = {rank: "|".join(re.escape(name) for name, own in rank_of.items() if own == rank) for rank in others}
    # \A, because peft puts "anything, and a dot" in front of each pattern.
    rank_pattern = {rf"\A(?:{names})": rank for rank, names in by_rank.items()}
    if section.type in ("lokr", "loha"):
        settings: dict[str, Any] = {"r": section.rank, "alpha": section.alpha, "target_modules": pattern}
        settings["rank_pattern"] = rank_pattern
        if section.type == "lokr":
            settings |= {"decompose_both": section.decompose_both, "decompose_factor": section.factor or -1}
            _KroneckerModel(denoiser, LoKrConfig(**settings), ADAPTER, low_cpu_mem_usage=True)
        else:
            _HadamardModel(denoiser, LoHaConfig(**settings), ADAPTER, low_cpu_mem_usage=True)
        for layer in modules(denoiser).values():
            layer.dropout = section.dropout
        return
    lora_settings = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        target_modules=pattern,
        rank_pattern=rank_pattern,
        init_lora_weights=False,
        bias="none",
    )
    if section.type == "dora":
        lora_settings._register_custom_module({nn.Linear: DoraLinear, nn.Conv2d: DoraConv2d})
    elif any(layer.kernels == "triton" for layer in frozen_layers(denoiser).values()):
        lora_settings._register_custom_module({FrozenLinear: FusedLora})
    inject_adapter_in_model(lora_settings, denoiser, adapter_name=ADAPTER, low_cpu_mem_usage=True)


def _start_(layer: BaseTunerLayer, name: str, section: config.Adapter, seed: int, dtype: torch.dtype) -> None:
    """The start values of one layer, on its device."""
    base = layer.get_base_layer()
    device = _device(base)
    for part, parameter in _parts(layer).items():
        if part in kinds.ZERO_AT_START:
            value = torch.zeros(parameter.shape, device=device, dtype=dtype)
        else:
            value = _drawn(part, parameter.shape, seed, name).to(device=device, dtype=dtype)
        where = getattr(layer, part.removesuffix(".weight"))
        if isinstance(where, nn.ParameterDict):
            where[ADAPTER] = nn.Parameter(value)
        else:
            where[ADAPTER].weight = nn.Parameter(value)
    layer.scaling[ADAPTER] = section.alpha / section.rank  # peft's is alpha / its own rank
    if section.type == "dora":
        a, b = (layer_of[ADAPTER].weight for layer_of in (layer.lora_A, layer.lora_B))
        layer.magnitude = nn.Parameter(kinds.row_lengths(base, a, b, layer.scaling[ADAPTER]))
    if section.type == "lokr" and not kinds.has_rank(_parts(layer)):
        layer.scaling[ADAPTER] = 1.0


def _unused_by_lokr(section: config.Adapter, layers: list[dict[str, nn.Parameter]]) -> list[str]:
    found = []
    if not any(map(kinds.has_rank, layers)):
        found.append(
            f"adapter.rank = {section.rank} and adapter.alpha have no effect: the rank is at least half of every "
            f"matrix's side (adapter.factor = {section.factor}), so that all are whole"
        )
    if section.decompose_both and not any("lokr_w1_a" in parts for parts in layers):
        found.append("adapter.decompose_both has no effect: no layer's first matrix is larger than twice the rank")
    return found


def _parts(layer: BaseTunerLayer) -> dict[str, nn.Parameter]:
    """The layer's parameters by their part of the name, in the order of `kinds.PARTS`."""
    if isinstance(layer, LoraLayer):
        found = {f"lora_{half}.weight": getattr(layer, f"lora_{half}")[ADAPTER].weight for half in "AB"}
        return found | ({"lora_magnitude_vector": layer.magnitude} if hasattr(layer, "magnitude") else {})
    names = kinds.PARTS["lokr" if isinstance(layer, lokr.LoKrLayer) else "loha"]
    return {name: getattr(layer, name)[ADAPTER] for name in names if ADAPTER in getattr(layer, name)}


def modules(denoiser: nn.Module) -> dict[str, BaseTunerLayer]:
    """The adapted layers by their diffusers names, in the model's order."""
    return {name: module for name, module in denoiser.named_modules() if isinstance(module, BaseTunerLayer)}


def parameters(denoiser: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The adapters' parameters by name ("<diffusers module path>.lora_A.weight"), in the model's order, A before B."""
    return [
        (f"{name}.{part}", parameter)
        for name, layer in modules(denoiser).items()
        for part, parameter in _parts(layer).items()
    ]


def num_fused(denoiser: nn.Module) -> int:
    """How many adapters are computed together with their layer, as the layers multiply now."""
    return sum(isinstance(layer, FusedLora) and layer.fuses for layer in modules(denoiser).values())


def scalings(denoiser: nn.Module) -> dict[str, float]:
    """alpha / rank of each adapted layer, by its diffusers name; 1 for a LoKr of whole matrices."""
    return {name: float(layer.scaling[ADAPTER]) for name, layer in modules(denoiser).items()}


def state(denoiser: nn.Module) -> dict[str, Tensor]:
    """Copies of the adapters' parameters on the CPU, under the names of `parameters`."""
    return {name: parameter.detach().cpu().clone() for name, parameter in parameters(denoiser)}


@torch.no_grad()
def load_state_(denoiser: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copies tensors, named and shaped as `state` gives them, into the adapters.

    Raises:
        config.UserError: names that are missing or unknown, or other shapes; all of them in one message. Nothing is
        changed then.
    """
    held = dict(parameters(denoiser))
    problems = [f"{name} is missing" for name in held if name not in tensors]
    problems += [f"{name} is not part of this adapter" for name in tensors if name not in held]
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, expected {list(parameter.shape)}"
        for name, parameter in held.items()
        if name in tensors and tensors[name].shape != parameter.shape
    ]
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise config.UserError("the adapter file does not fit this job's adapters: " + "; ".join(problems[:8]) + more)
    for name, parameter in held.items():
        parameter.copy_(tensors[name])


@contextlib.contextmanager
def disabled(denoiser: nn.Module) -> Iterator[None]:
    """Inside, the denoiser answers as its base alone. Afterwards everything, `requires_grad` included, is as before."""
    before = [(layer, layer.disable_adapters) for layer in modules(denoiser).values()]
    trainable = [(parameter, parameter.requires_grad) for _, parameter in parameters(denoiser)]
    try:
        for layer, _ in before:
            layer.enable_adapters(False)
        yield
    finally:
        for layer, was_disabled in before:
            layer.enable_adapters(not was_disabled)
        for parameter, required in trainable:
            parameter.requires_grad_(required)  # enable_adapters sets it as peft sees fit


def _match(denoiser: nn.Module, targets: list[str], setting: str) -> tuple[list[str], list[str]]:
    """The names of the layers that `targets` mean, in the model's order, and warnings."""
    adaptable = {name: module for name, module in denoiser.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    chosen: set[str] = set()
    notes: list[str] = []
    if not targets:
        raise config.UserError(
            f"{setting}: empty, so there is nothing to train; name the layers to adapt, such as 'to_q'"
        )
    for target in targets:
        matched = {name for name in adaptable if f".{name}".endswith(f".{target}")}
        if not matched:
            raise config.UserError(
                f"{setting}: {target!r} matches no layer that can be adapted; {hint(target, adaptable)}"
            )
        if matched <= chosen:
            notes.append(f"{setting}: {target!r} adds nothing: the targets before it name all of its layers")
        chosen |= matched
    return [name for name in adaptable if name in chosen], notes


def _drawn(part: str, shape: torch.Size, seed: int, name: str) -> Tensor:
    """A start value in float32. Of LoRA, DoRA and LoKr uniform within 1 / sqrt(fan in), as in peft, LyCORIS and Hu et
    al.'s code (kaiming uniform with a = sqrt 5); of LoHa normal, as in LyCORIS, whose rates people know."""
    key = f"{seed}|{name}" if part == "lora_A.weight" else f"{seed}|{name}|{part}"
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big", signed=True)
    generator = torch.Generator().manual_seed(number)
    empty = torch.empty(shape, dtype=torch.float32)
    if part.startswith("hada_"):
        return nn.init.normal_(empty, std=0.1 if part == "hada_w1_a" else 1.0, generator=generator)
    return nn.init.kaiming_uniform_(empty, a=math.sqrt(5), generator=generator)


def _device(layer: nn.Module) -> torch.device:
    if isinstance(layer, FrozenLinear):
        return layer.device
    return next(layer.parameters()).device  # not layer.weight, which an FP8 layer would decode for it
