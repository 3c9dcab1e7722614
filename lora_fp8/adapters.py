"""LoRA beside the frozen layers. The only place that imports peft.

peft wraps the layers, adds the two small matrices and does the forward pass; what it leaves to chance is decided here:

* Dtype. peft gives adapters the dtype of the base weight, and with an FP8 base that has made people train in FP8 (about
  49 distinct values in a fresh A). Here they end in `section.dtype`, whatever the base is held in.
* Start values. A is drawn in float32 from a generator keyed by the seed and the layer's name, then cast; B is zero. So
  the start does not depend on the order of layers, on which other layers are adapted, or on the global random state,
  which stays untouched.
* Names. Outside this file a parameter is called "<diffusers module path>.lora_A.weight"; peft's "base_layer" and
  "default" stay inside.
* One pass. Where a frozen layer multiplies with the Triton kernels, they add its LoRA in their last pass over the
  result (`FusedLora`); everywhere else peft does.
* Targets. A target that matches nothing is an error, not a smaller adapter.

LoRA: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models". y = W x + (alpha / rank) B A x.
"""

import contextlib
import difflib
import hashlib
import math
import re
import warnings as python_warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners import lora
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from . import config
from .precision import FrozenLinear, frozen_layers

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


def inject(
    denoiser: nn.Module,
    section: config.Adapter,
    targets: Sequence[str],
    seed: int,
    called: Callable[[str], str] = str,
) -> InjectReport:
    """Puts a LoRA beside every targeted layer, in place; afterwards only the adapters require gradients.

    Args:
        targets: the family's choice, used when `section.targets` is empty. Each is a name or the end of one: "to_q" is
            every layer called to_q, "ff.net.0.proj" only those. `nn.Linear` (FP8 ones too) and `nn.Conv2d` can be
            adapted.
        seed: with the layer's name, keys the start values.
        called: what a layer is called outside, where that is not its name in this model.

    Raises:
        config.UserError: a target matches no layer that can be adapted.
        ValueError: the denoiser has adapters already.
    """
    if modules(denoiser):
        raise ValueError("inject: this denoiser has adapters already")
    setting = "adapter.targets" if section.targets else "targets"
    names, notes = _match(denoiser, list(section.targets or targets), setting)
    for name in names:
        layer = denoiser.get_submodule(name)
        is_conv = isinstance(layer, nn.Conv2d)
        narrow = min((layer.in_channels, layer.out_channels) if is_conv else (layer.in_features, layer.out_features))
        if section.rank > narrow:
            notes.append(f"adapter.rank {section.rank} is more than {name} can use ({narrow})")
    dtype = DTYPES[section.dtype]
    settings = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        lora_dropout=section.dropout,
        # One pattern over whole names: a list is matched by endings, and would take an embedding of that name too.
        target_modules="|".join(map(re.escape, names)),
        init_lora_weights=False,
        bias="none",
    )
    if any(layer.kernels == "triton" for layer in frozen_layers(denoiser).values()):
        settings._register_custom_module({FrozenLinear: FusedLora})
    # On meta (low_cpu_mem_usage) peft's own start values cost nothing; the fork keeps the global random state all the
    # same.
    with torch.random.fork_rng(devices=[]), python_warnings.catch_warnings(record=True) as caught:
        python_warnings.simplefilter("always")
        inject_adapter_in_model(settings, denoiser, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    notes += [str(warning.message) for warning in caught]

    found = modules(denoiser)
    if list(found) != names:
        raise RuntimeError(f"peft adapted other layers than asked for: {sorted(set(found) ^ set(names))[:8]}")
    denoiser.requires_grad_(False)
    num_parameters = 0
    for name, layer in found.items():
        device = _device(layer.get_base_layer())
        a, b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
        a.weight = nn.Parameter(_kaiming(a.weight.shape, seed, called(name)).to(device=device, dtype=dtype))
        b.weight = nn.Parameter(torch.zeros(b.weight.shape, device=device, dtype=dtype))
        num_parameters += a.weight.numel() + b.weight.numel()
    return InjectReport(len(names), num_parameters, tuple(names), tuple(notes))


def modules(denoiser: nn.Module) -> dict[str, LoraLayer]:
    """The adapted layers by their diffusers names, in the model's order."""
    return {name: module for name, module in denoiser.named_modules() if isinstance(module, LoraLayer)}


def parameters(denoiser: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The adapters' parameters by name ("<diffusers module path>.lora_A.weight"), in the model's order, A before B."""
    return [
        (f"{name}.lora_{half}.weight", getattr(layer, f"lora_{half}")[ADAPTER].weight)
        for name, layer in modules(denoiser).items()
        for half in "AB"
    ]


def num_fused(denoiser: nn.Module) -> int:
    """How many adapters are computed together with their layer, as the layers multiply now."""
    return sum(isinstance(layer, FusedLora) and layer.fuses for layer in modules(denoiser).values())


def scalings(denoiser: nn.Module) -> dict[str, float]:
    """alpha / rank of each adapted layer, by its diffusers name."""
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
                f"{setting}: {target!r} matches no layer that can be adapted; {_hint(target, adaptable)}"
            )
        if matched <= chosen:
            notes.append(f"{setting}: {target!r} adds nothing: the targets before it name all of its layers")
        chosen |= matched
    return [name for name in adaptable if name in chosen], notes


def _hint(target: str, adaptable: dict[str, nn.Module]) -> str:
    ends: dict[str, None] = {}  # every ending of every name that starts with a word, shortest first
    for length in (1, 2, 3, 4):
        for name in adaptable:
            parts = name.split(".")[-length:]
            if not parts[0].isdigit():
                ends[".".join(parts)] = None
    inside = [end for end in ends if f".{end}.".startswith(f".{target}.")]  # "to_out" is a list: mean "to_out.0"
    near = inside[:3] or difflib.get_close_matches(target, ends, n=3)
    return (
        f"did you mean {' or '.join(map(repr, near))}?" if near else f"layers here end in {', '.join(list(ends)[:8])}"
    )


def _kaiming(shape: torch.Size, seed: int, name: str) -> Tensor:
    """A's start: uniform within 1 / sqrt(fan in), as in peft and Hu et al.'s code (kaiming uniform with a = sqrt 5)."""
    key = int.from_bytes(hashlib.sha256(f"{seed}|{name}".encode()).digest()[:8], "big", signed=True)
    generator = torch.Generator().manual_seed(key)
    return nn.init.kaiming_uniform_(torch.empty(shape, dtype=torch.float32), a=math.sqrt(5), generator=generator)


def _device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device  # not layer.weight, which an FP8 layer would decode for it
