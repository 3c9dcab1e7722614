"""Adds LoRA, DoRA, LoKr, LoHa and OFT adapters beside the frozen layers. No other module imports peft.

peft wraps the layers, adds the small matrices and runs LoRA's forward. This module decides the rest:

* Dtype. peft gives adapters the dtype of the base weight; with an FP8 base, this has made people train in FP8 (about 49
  distinct values in a new A). Here adapters get `section.dtype`, however the base is stored.
* Initial values (`starts`). A is drawn in float32 from a generator keyed by the seed and the layer's name, then cast; B
  is zero. So the initial values depend neither on the order of layers nor on which other layers are adapted nor on the
  global random state, which is left untouched. The tensors in `kinds.ZERO_AT_START` are zero: every kind starts as the
  base itself.
* The other kinds' forward. peft's DoRA computes the whole weight in the adapter's dtype. Its LoKr and LoHa compute the
  whole delta, keep it for the backward, and draw from the global random state. The versions here avoid all of this.
  `dropout` means the same for every kind: it applies to the adapter's input, never to the base's. Dropout of ranks and
  of whole adapters is in `dropout`.
* Names. Outside this module a parameter is called "<diffusers module path>.lora_A.weight", without peft's "base_layer"
  and "default".
* Fusion. Where a frozen layer multiplies with the Triton kernels, they add its LoRA in their last pass over the result
  (`FusedLora`); everywhere else peft does.
* Ranks. Layers may have different ranks (`section.ranks`); all are scaled by `section.alpha / section.rank`, unlike in
  peft, or with `section.rank_stabilized` by alpha and the root of their own rank.

What the kinds compute, and their sources, is in `kinds`; which layers get an adapter, in `targets`; and the shapes of
its tensors, known without peft, in `shapes`.
"""

import contextlib
import re
import warnings as python_warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import Joined, Message, UserError, first_few
from ..precision import FrozenLayer, FrozenLinear, find_frozen_layers, gather_whole
from ..precision.dtypes import DTYPES
from ..precision.formats import load_bitsandbytes
from ..settings import Adapter
from . import kinds, starts
from .dropout import NONE, Dropout
from .targets import choose_layers

load_bitsandbytes()  # before peft imports it

# isort: split
from peft import LoHaConfig, LoHaModel, LoKrConfig, LoKrModel, LoraConfig, inject_adapter_in_model  # noqa: E402
from peft.tuners import loha, lokr, lora  # noqa: E402
from peft.tuners.lora import LoraLayer  # noqa: E402
from peft.tuners.lycoris_utils import LycorisLayer  # noqa: E402
from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: E402

ADAPTER = "default"


@dataclass(frozen=True)
class InjectReport:
    """What `inject` added."""

    num_modules: int
    num_parameters: int
    names: tuple[str, ...]
    """diffusers names of the adapted layers, in the model's order."""
    warnings: tuple[str, ...] = ()


class FusedLora(lora.Linear):
    """peft's LoRA on a linear layer; the layer computes it in its own kernel if the result is the same."""

    @property
    def fuses(self) -> bool:
        """Return True if the layer can compute this LoRA in its kernel now, with the same result."""
        base = self.base_layer
        plain = isinstance(self.lora_dropout[ADAPTER], nn.Identity) and not self.lora_variant and not self.merged
        return isinstance(base, FrozenLinear) and base.takes_lora and plain and self.active_adapters == [ADAPTER]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer's output with its adapter: in one kernel where the frozen layer can, else as peft does."""
        if args or kwargs or self.disable_adapters or not self.fuses:
            return super().forward(x, *args, **kwargs)
        a_RK, b_NR = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        return self.base_layer(x, lora=(a_RK, b_NR, self.scaling[ADAPTER]))


class _Lora(nn.Module, LoraLayer):
    """peft's LoRA with dropout of ranks and of the whole adapter, or a start that is taken from the base's weight."""

    base_layer: nn.Linear | nn.Conv2d
    drops: Dropout = NONE
    start_A: Tensor  # A0 and B0 of `starts`, if there is a start; the parameters are then the change from them
    start_B: Tensor

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        if self.disable_adapters:
            return result
        drops = self.drops if self.training else NONE
        return (result + drops.drop_module(_compute_lora_update(self, x, drops))).to(result.dtype)


def _compute_lora_update(layer: LoraLayer, x: Tensor, drops: Dropout) -> Tensor:
    """Return a LoRA's update of the output, times alpha / rank."""
    a: Any = layer.lora_A[ADAPTER]  # layers of base_layer's kind, which the type of a ModuleDict does not say
    b: Any = layer.lora_B[ADAPTER]
    scaling, dim = layer.scaling[ADAPTER], 1 if isinstance(a, nn.Conv2d) else -1
    x = layer.lora_dropout[ADAPTER](x.to(a.weight.dtype))
    if not hasattr(layer, "start_A"):
        return b(drops.drop_ranks(a(x), dim)) * scaling
    both_a, both_b = _collect_saved_tensors(layer).values()
    if isinstance(a, nn.Conv2d):
        reduced = F.conv2d(x, both_a, None, a.stride, a.padding, a.dilation)
        return F.conv2d(drops.drop_ranks(reduced, dim, copies=2), both_b) * scaling
    return F.linear(drops.drop_ranks(F.linear(x, both_a), dim, copies=2), both_b) * scaling


class LoraLinear(_Lora, lora.Linear):
    """LoRA with own dropout or start on a linear layer."""


class LoraConv2d(_Lora, lora.Conv2d):
    """LoRA with own dropout or start on a convolution."""


class _Dora(nn.Module, LoraLayer):
    """peft's LoRA with a magnitude for each row of the weight, on a linear layer or a convolution."""

    base_layer: nn.Linear | nn.Conv2d
    magnitude: nn.Parameter  # (N), float32 whatever the adapter's dtype: bf16 would change whole rows by up to 0.4 %
    drops: Dropout = NONE

    def forward(self, x: Tensor) -> Tensor:
        base = self.base_layer
        result = base(x)
        if self.disable_adapters:
            return result
        drops = self.drops if self.training else NONE
        update = _compute_lora_update(self, x, drops)
        a: Any = self.lora_A[ADAPTER].weight
        b: Any = self.lora_B[ADAPTER].weight
        ratio = kinds.compute_length_ratio(base, a, b, self.scaling[ADAPTER], self.magnitude)
        without_bias = result
        if isinstance(base, nn.Conv2d):
            ratio = ratio.view(-1, 1, 1)
        if base.bias is not None:
            without_bias = result - base.bias.view(ratio.shape)
        # The ratio is near 1, where bf16 is coarse, so its difference from 1 is rounded instead.
        lengthened = (ratio - 1).to(result.dtype) * without_bias + ratio.to(update.dtype) * update
        return (result + drops.drop_module(lengthened)).to(result.dtype)


class DoraLinear(_Dora, lora.Linear):
    """DoRA on a linear layer."""


class DoraConv2d(_Dora, lora.Conv2d):
    """DoRA on a convolution."""


class _Product(nn.Module, LycorisLayer):
    """peft's LoKr or LoHa layer, with our own forward."""

    base_layer: nn.Linear | nn.Conv2d
    dropout = 0.0
    drops: Dropout = NONE

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        if self.disable_adapters:
            return result
        parts, scaling = _collect_parts(self), self.scaling[ADAPTER]
        dropped = F.dropout(x.to(next(iter(parts.values())).dtype), self.dropout, self.training)
        update = self.compute_update(dropped, parts, scaling).to(result.dtype)
        drops = self.drops if self.training else NONE
        return result + drops.drop_module(drops.drop_rows(update, 1 if isinstance(self.base_layer, nn.Conv2d) else -1))

    def compute_update(self, x: Tensor, parts: kinds.Parts, scaling: float) -> Tensor:
        """Compute a convolution's update from its whole delta, which is small compared with the feature map."""
        base = self.base_layer
        assert isinstance(base, nn.Conv2d)  # the classes of linear layers override this
        shape = base.out_channels, base.in_channels // base.groups, *base.kernel_size  # a frozen weight is dequantized
        weight = kinds.compute_delta(parts, scaling, x.dtype).view(shape)
        return F.conv2d(x, weight, None, base.stride, base.padding, base.dilation)


class KroneckerLinear(_Product, lokr.Linear):
    """LoKr on a linear layer."""

    def compute_update(self, x: Tensor, parts: kinds.Parts, scaling: float) -> Tensor:
        """Compute the update without forming the delta."""
        w1, w2 = kinds.compute_kronecker_factors(parts)
        return kinds.multiply_kronecker(x, w1 * scaling, w2)


class KroneckerConv2d(_Product, lokr.Conv2d):
    """LoKr on a convolution."""


class HadamardLinear(_Product, loha.Linear):
    """LoHa on a linear layer."""

    def compute_update(self, x: Tensor, parts: kinds.Parts, scaling: float) -> Tensor:
        """Compute the update; the delta is not kept for the backward."""
        factors = [parts[name] for name in kinds.PARTS["loha"]]
        y_MN = kinds.HadamardLinear.apply(x.reshape(-1, x.shape[-1]), *factors, scaling)
        return y_MN.view(*x.shape[:-1], y_MN.shape[-1])


class HadamardConv2d(_Product, loha.Conv2d):
    """LoHa on a convolution."""


class _Rotation(nn.Module, BaseTunerLayer):
    """OFT on a linear layer or a convolution: rotates the output features, so that W is not needed.

    Attributes:
        oft_blocks: by the adapter's name.
        scaling: 1, by the adapter's name.
    """

    adapter_layer_names = ("oft_blocks",)
    other_param_names = ()
    drops: Dropout = NONE

    def __init__(self, base_layer: nn.Linear | nn.Conv2d, most: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        rows = base_layer.out_channels if isinstance(base_layer, nn.Conv2d) else base_layer.out_features
        size = kinds.choose_block_size(rows, most)
        self.oft_blocks = nn.ParameterDict(
            {ADAPTER: nn.Parameter(torch.empty(rows // size, size, size, device="meta"))}
        )
        self.scaling = {ADAPTER: 1.0}

    def forward(self, x: Tensor) -> Tensor:
        base = self.base_layer
        result = base(x)
        if self.disable_adapters:
            return result
        dim = 1 if isinstance(base, nn.Conv2d) else -1
        without_bias = result
        if base.bias is not None:
            without_bias = result - (base.bias.view(-1, 1, 1) if dim == 1 else base.bias)
        turned = kinds.compute_rotation(self.oft_blocks[ADAPTER]).to(result.dtype)
        drops = self.drops if self.training else NONE
        return result + drops.drop_module(kinds.rotate_rows(turned, without_bias, dim))


class _KroneckerModel(LoKrModel):
    layers_mapping: dict[type[nn.Module], type[lokr.LoKrLayer]]
    layers_mapping = {nn.Linear: KroneckerLinear, nn.Conv2d: KroneckerConv2d}


class _HadamardModel(LoHaModel):
    layers_mapping: dict[type[nn.Module], type[loha.LoHaLayer]]
    layers_mapping = {nn.Linear: HadamardLinear, nn.Conv2d: HadamardConv2d}


def inject(
    denoiser: nn.Module,
    section: Adapter,
    targets: Sequence[str],
    seed: int,
    called: Callable[[str], str] = str,
) -> InjectReport:
    """Add an adapter beside every targeted layer, in place; afterwards only the adapters require gradients.

    Args:
        denoiser: the model to adapt.
        section: the job's `[adapter]` table.
        targets: the family's targets, used if `section.targets` is empty. Each is a layer's name or a suffix: "to_q"
            means every layer called to_q. `nn.Linear` (FP8 ones too) and `nn.Conv2d` can be adapted.
        seed: keys the initial values, together with the layer's name.
        called: maps a layer's name in this model to its name outside, if they differ.

    Raises:
        UserError: a target matches no layer that can be adapted, or one that this kind cannot adapt.
        ValueError: the denoiser has adapters already.
    """
    if find_adapted_layers(denoiser):
        raise ValueError("inject: this denoiser has adapters already")
    rank_of, notes = choose_layers(denoiser, section, targets)
    names = list(rank_of)
    dtype = DTYPES[section.dtype]
    # With low_cpu_mem_usage, peft creates its own initial values on meta, at no cost. The fork restores the global
    # random state in any case.
    with torch.random.fork_rng(devices=[]), python_warnings.catch_warnings(record=True) as caught:
        python_warnings.simplefilter("always")
        _wrap(denoiser, section, rank_of)
    notes += [str(warning.message) for warning in caught]

    adapted_layers = find_adapted_layers(denoiser)
    if list(adapted_layers) != names:
        raise RuntimeError(f"peft adapted other layers than asked for: {sorted(set(adapted_layers) ^ set(names))[:8]}")
    denoiser.requires_grad_(False)
    for name, adapted in adapted_layers.items():
        _initialize_(adapted, called(name), section, seed, dtype)
    if section.type == "lokr":
        notes += _find_unused_lokr_settings(section, [_collect_parts(adapted) for adapted in adapted_layers.values()])
    num_parameters = sum(parameter.numel() for _, parameter in list_trained_parameters(denoiser))
    return InjectReport(len(names), num_parameters, tuple(names), tuple(notes))


def _wrap(denoiser: nn.Module, section: Adapter, rank_of: dict[str, int]) -> None:
    """Let peft wrap each named layer, with the adapters' parameters on the meta device; OFT is our own."""
    if section.type == "oft":
        for name in rank_of:
            parent, _, child = name.rpartition(".")
            layer: Any = denoiser.get_submodule(name)
            setattr(denoiser.get_submodule(parent), child, _Rotation(layer, section.block_size))
        return
    # A pattern of whole names: peft matches a list by suffixes, and would include an embedding with such a name.
    pattern = "|".join(map(re.escape, rank_of))
    others = sorted(set(rank_of.values()) - {section.rank})
    by_rank = {rank: "|".join(re.escape(name) for name, own in rank_of.items() if own == rank) for rank in others}
    # \A, because peft prefixes each pattern with "anything, and a dot".
    rank_pattern = {rf"\A(?:{names})": rank for rank, names in by_rank.items()}
    if section.type in ("lokr", "loha"):
        settings: dict[str, Any] = {"r": section.rank, "alpha": section.alpha, "target_modules": pattern}
        settings["rank_pattern"] = rank_pattern
        if section.type == "lokr":
            settings |= {"decompose_both": section.decompose_both, "decompose_factor": section.factor or -1}
            _KroneckerModel(denoiser, LoKrConfig(**settings), ADAPTER, low_cpu_mem_usage=True)
        else:
            _HadamardModel(denoiser, LoHaConfig(**settings), ADAPTER, low_cpu_mem_usage=True)
        for layer in find_adapted_layers(denoiser).values():
            if isinstance(layer, _Product):
                layer.dropout = section.dropout
        return
    lora_settings = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # peft says int and takes any number
        lora_dropout=section.dropout,
        target_modules=pattern,
        rank_pattern=rank_pattern,
        init_lora_weights=False,
        bias="none",
    )
    if section.type == "dora":
        lora_settings._register_custom_module({nn.Linear: DoraLinear, nn.Conv2d: DoraConv2d})
    elif section.rank_dropout or section.module_dropout or section.doubles_rank:
        lora_settings._register_custom_module({nn.Linear: LoraLinear, nn.Conv2d: LoraConv2d})
    elif any(layer.kernels == "triton" for layer in find_frozen_layers(denoiser).values()):
        lora_settings._register_custom_module({FrozenLinear: FusedLora})
    inject_adapter_in_model(lora_settings, denoiser, adapter_name=ADAPTER, low_cpu_mem_usage=True)


def _initialize_(layer: BaseTunerLayer, name: str, section: Adapter, seed: int, dtype: torch.dtype) -> None:
    """Set the initial values of one layer's adapter, on the layer's device."""
    base = layer.get_base_layer()
    device, key = _find_device(base), f"{seed}|{name}"
    for part, parameter in _collect_parts(layer).items():
        if part in kinds.ZERO_AT_START or section.doubles_rank:
            value = torch.zeros(parameter.shape, device=device, dtype=dtype)
        else:
            value = starts.draw_start(part, parameter.shape, key, section.init).to(device=device, dtype=dtype)
        where = getattr(layer, part.removesuffix(".weight"))
        if isinstance(where, nn.ParameterDict):
            where[ADAPTER] = nn.Parameter(value)
        else:
            where[ADAPTER].weight = nn.Parameter(value)
    if section.freezes_a:
        vars(layer)["freezes_a"] = True
        _collect_parts(layer)["lora_A.weight"].requires_grad_(False)
    if isinstance(layer, _Lora | _Dora | _Product | _Rotation):
        layer.drops = Dropout.from_section(section)
    scaling = _get_scaling(layer)
    scaling[ADAPTER] = kinds.compute_scaling(section, kinds.read_rank(_collect_parts(layer)) or section.rank)
    if isinstance(layer, _Lora) and section.doubles_rank:
        _set_frozen_start_(layer, section, key)
    if isinstance(layer, _Dora):
        a, b = (_collect_parts(layer)[f"lora_{half}.weight"] for half in "AB")
        layer.magnitude = nn.Parameter(kinds.compute_row_lengths(base, a, b, scaling[ADAPTER]))
    if not kinds.has_rank(_collect_parts(layer)):
        scaling[ADAPTER] = 1.0


@torch.no_grad()
def _set_frozen_start_(layer: _Lora, section: Adapter, key: str) -> None:
    """Set a layer's frozen start, which is taken from the base's weight."""
    a, b = _collect_parts(layer).values()
    a_RK, b_NR = torch.empty_like(a), torch.empty_like(b)
    if a.device.type != "meta":
        weight: Any = layer.get_base_layer().weight  # dequantized here, for this layer alone
        start = starts.split_weight(
            gather_whole(weight.detach()).flatten(1), a.shape[0], layer.scaling[ADAPTER], section, key
        )
        a_RK.copy_(start[0].view(a.shape))
        b_NR.copy_(start[1].view(b.shape))
    layer.register_buffer("start_A", a_RK, persistent=False)
    layer.register_buffer("start_B", b_NR, persistent=False)


def _find_unused_lokr_settings(section: Adapter, layers: list[dict[str, nn.Parameter]]) -> list[str]:
    warnings: list[str] = []
    if not any(map(kinds.has_rank, layers)):
        warnings.append(
            Message(
                "{setting} have no effect: {line}",
                setting=Joined(" and ", [f"adapter.rank = {section.rank}", "adapter.alpha"]),
                line=Message(
                    "with adapter.factor = {factor}, the rank is at least half of every matrix's side, so every "
                    "matrix is trained whole",
                    factor=section.factor,
                ),
            )
        )
    if section.decompose_both and not any("lokr_w1_a" in parts for parts in layers):
        warnings.append(
            Message(
                "{setting} has no effect: {line}",
                setting="adapter.decompose_both",
                line=Message("no layer's first matrix is larger than twice the rank"),
            )
        )
    return warnings


def _collect_parts(layer: BaseTunerLayer) -> dict[str, nn.Parameter]:
    """Return the layer's parameters by the last part of their names, in the order of `kinds.PARTS`."""
    if isinstance(layer, LoraLayer):
        named_parts = {f"lora_{half}.weight": getattr(layer, f"lora_{half}")[ADAPTER].weight for half in "AB"}
        return named_parts | ({"lora_magnitude_vector": layer.magnitude} if hasattr(layer, "magnitude") else {})
    if isinstance(layer, _Rotation):
        return {"oft_blocks": layer.oft_blocks[ADAPTER]}
    names = kinds.PARTS["lokr" if isinstance(layer, lokr.LoKrLayer) else "loha"]
    return {name: getattr(layer, name)[ADAPTER] for name in names if ADAPTER in getattr(layer, name)}


def _collect_saved_tensors(layer: BaseTunerLayer) -> dict[str, Tensor]:
    """Return the layer's tensors as checkpoints and files hold them: the parameters, or with a start both ranks."""
    parts: dict[str, Tensor] = dict(_collect_parts(layer))
    if not isinstance(layer, _Lora) or not hasattr(layer, "start_A"):
        return parts
    a, b = parts.values()
    return {
        "lora_A.weight": torch.cat([layer.start_A + a, a]),
        "lora_B.weight": torch.cat([b, layer.start_B], dim=1),
    }


def _get_scaling(layer: BaseTunerLayer) -> dict[str, float]:
    """Return the layer's own table of alpha / rank by the adapters' names."""
    assert isinstance(layer, LoraLayer | LycorisLayer | _Rotation)  # peft's other kinds are never injected
    return layer.scaling


def find_adapted_layers(denoiser: nn.Module) -> dict[str, BaseTunerLayer]:
    """Return the adapted layers by their diffusers names, in the model's order."""
    return {name: module for name, module in denoiser.named_modules() if isinstance(module, BaseTunerLayer)}


def list_trained_parameters(denoiser: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) of what is trained ("<diffusers module path>.lora_A.weight"), in the model's order."""
    return [
        (f"{name}.{part}", parameter)
        for name, layer in find_adapted_layers(denoiser).items()
        for part, parameter in _collect_parts(layer).items()
        if not _is_frozen(layer, part)
    ]


def list_tensors(denoiser: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return `list_trained_parameters`, and the A of `adapter.freeze_a`, which requires no gradient."""
    return [
        (f"{name}.{part}", parameter)
        for name, layer in find_adapted_layers(denoiser).items()
        for part, parameter in _collect_parts(layer).items()
    ]


def _is_frozen(layer: BaseTunerLayer, part: str) -> bool:
    """Return True for the A of a layer with `adapter.freeze_a`; `disabled` changes requires_grad for a while."""
    return part == "lora_A.weight" and getattr(layer, "freezes_a", False)


def count_fused(denoiser: nn.Module) -> int:
    """Return how many adapters are now computed in their layer's kernel."""
    return sum(isinstance(layer, FusedLora) and layer.fuses for layer in find_adapted_layers(denoiser).values())


def read_scalings(denoiser: nn.Module) -> dict[str, float]:
    """Return alpha / rank of each adapted layer by its diffusers name; 1 for a LoKr layer of whole matrices."""
    return {name: float(_get_scaling(layer)[ADAPTER]) for name, layer in find_adapted_layers(denoiser).items()}


def copy_state(denoiser: nn.Module) -> dict[str, Tensor]:
    """Return copies of the adapters' tensors on the CPU, by the names of `list_tensors`.

    They are the parameters, or with a start that is taken from the base a LoRA of twice the rank; see `starts`.
    """
    return {
        f"{name}.{part}": tensor.detach().cpu().clone()
        for name, layer in find_adapted_layers(denoiser).items()
        for part, tensor in _collect_saved_tensors(layer).items()
    }


def find_frozen_starts(denoiser: nn.Module) -> dict[str, Tensor]:
    """Return the starts that are taken from the base, not copies of them; {} if there are none."""
    return {
        f"{name}.{part}.weight": tensor
        for name, layer in find_adapted_layers(denoiser).items()
        if isinstance(layer, _Lora) and hasattr(layer, "start_A")
        for part, tensor in (("lora_A", layer.start_A), ("lora_B", layer.start_B))
    }


@torch.no_grad()
def load_frozen_starts_(denoiser: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy starts of a checkpoint into the adapters, so that a resumed run does not depend on the decomposition.

    Raises:
        UserError: names are missing or unknown, or shapes differ.
    """
    held = find_frozen_starts(denoiser)
    wrong = sorted(held.keys() ^ values.keys())
    wrong += [name for name in held.keys() & values.keys() if held[name].shape != values[name].shape]
    if wrong:
        raise UserError(
            Message(
                "the checkpoint's initial values (adapter.init) do not fit this job: {names}", names=first_few(wrong)
            )
        )
    for name, tensor in held.items():
        tensor.copy_(values[name])


@torch.no_grad()
def load_state_(denoiser: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy tensors, named and shaped as `copy_state` returns them, into the adapters.

    Raises:
        UserError: names are missing or unknown, or shapes differ, all in one message. Then nothing is changed.
    """
    held = {
        f"{name}.{part}": t
        for name, layer in find_adapted_layers(denoiser).items()
        for part, t in _collect_saved_tensors(layer).items()
    }
    problems: list[str] = [Message("{name} is missing", name=name) for name in held if name not in values]
    problems += [Message("{name} is not part of this adapter", name=name) for name in values if name not in held]
    problems += [
        Message(
            "{name} has shape {shape}, expected {wanted}",
            name=name,
            shape=str(list(values[name].shape)),
            wanted=str(list(parameter.shape)),
        )
        for name, parameter in held.items()
        if name in values and values[name].shape != parameter.shape
    ]
    if problems:
        if len(problems) > 8:
            problems[8:] = [Message("{count} more", count=len(problems) - 8)]
        raise UserError(
            Message("the adapter file does not fit this job's adapters: {line}", line=Joined("; ", problems))
        )
    for name, parameter in list_tensors(denoiser):
        given = values[name]
        if given.shape != parameter.shape:  # with a start: the change of A comes after A, that of B before B0
            given = given[-parameter.shape[0] :] if name.endswith("lora_A.weight") else given[:, : parameter.shape[1]]
        parameter.copy_(given)


@contextlib.contextmanager
def disabled(denoiser: nn.Module) -> Iterator[None]:
    """Disable the adapters inside this context; afterwards everything, including `requires_grad`, is as before."""
    before = [(layer, layer.disable_adapters) for layer in find_adapted_layers(denoiser).values()]
    trainable = [(parameter, parameter.requires_grad) for _, parameter in list_tensors(denoiser)]
    try:
        for layer, _ in before:
            layer.enable_adapters(False)
        yield
    finally:
        for layer, was_disabled in before:
            layer.enable_adapters(not was_disabled)
        for parameter, required in trainable:
            parameter.requires_grad_(required)  # enable_adapters changes it


def _find_device(layer: nn.Module) -> torch.device:
    if isinstance(layer, FrozenLayer):
        return layer.device
    return next(layer.parameters()).device  # not layer.weight, for which an FP8 layer would dequantize
