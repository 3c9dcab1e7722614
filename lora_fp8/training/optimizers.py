"""The libraries' optimizers: what each is made with, what it updates as one tensor, and what it keeps.

Two kinds differ in what they get. AdamW and Lion treat every element alike: all parameters of one dtype and learning
rate are one flat vector (see `flat`). The others look at a matrix as a matrix (Adafactor, CAME, Muon), sum over
parameters (Prodigy), or are not known to be indifferent: they get each parameter in its own shape.

    adamw               torch.optim.AdamW.
    adamw8bit           bitsandbytes' AdamW8bit (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization").
                        For a parameter below 4,096 elements the moments stay in float32.
    lion8bit            bitsandbytes' Lion8bit (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms").
    prodigy             prodigyopt's Prodigy (Mishchenko and Defazio 2024, "Prodigy: An Expeditiously Adaptive
                        Parameter-Free Learner"): multiplies the learning rate by its own estimate d, one for all.
    adafactor           transformers' Adafactor (Shazeer and Stern 2018), with `relative_step` and `scale_parameter`
                        off, as sd-scripts advises: then the learning rate is ours. torch.optim.Adafactor always
                        multiplies it by the size of the parameter. LoRA's second matrix starts at zero and would
                        hardly move.
    adamw_schedulefree  schedulefree's AdamWScheduleFree (Defazio et al. 2024). It trains at one point and evaluates at
                        another; see `AdapterOptimizer.evaluation`.
    came                came_pytorch's CAME (Luo et al. 2023).
    muon                torch.optim.Muon (Jordan et al. 2024) for matrices, with the step scaled to AdamW's size
                        ("match_rms_adamw"), so that one learning rate serves both; torch.optim.AdamW for the rest.
    ademamix8bit        bitsandbytes' AdEMAMix8bit (Pagliardini et al. 2024).
"""

import importlib.util
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import Message, UserError
from ..settings import Optimizer, is_class
from . import foreign
from .flat import ALIGNMENT, Segment

EIGHT_BIT = ("adamw8bit", "lion8bit")
FLAT = (*EIGHT_BIT, "adamw")
"""Optimizers that update all parameters of a kind as one vector."""
BY_KEYS = (*FLAT, "prodigy")
"""Optimizers whose state `optim` knows key by key; the state of the others is saved as it is."""
BITSANDBYTES = (*EIGHT_BIT, "ademamix8bit")
AUTO_LR = {
    "adamw8bit": 1e-4,
    "adamw": 1e-4,
    "lion8bit": 2e-5,
    "prodigy": 1.0,
    "adafactor": 1e-4,
    "adamw_schedulefree": 1e-4,
    "came": 1e-4,
    "muon": 1e-4,
    "ademamix8bit": 1e-4,
}
"""Optimizer -> the learning rate of optimizer.lr = "auto". Lion changes every element by the learning rate, so 3 to 10
times less is usual (Chen et al., sect. 5)."""
PACKAGES = {"adamw_schedulefree": ("schedulefree", "schedulefree"), "came": ("came_pytorch", "came-pytorch")}
"""Optimizer -> (module, package) that the extra "optimizers" installs."""
TENSORS = {"adafactor": 3, "adamw_schedulefree": 2, "came": 6, "muon": 1, "ademamix8bit": 4}
"""Optimizer -> tensors of a parameter in its state, where the state is saved as it is."""
SMALLEST_8BIT = 4096
"""Elements of the smallest parameter whose moments bitsandbytes keeps in 8 bits."""


class Kind(NamedTuple):
    """What parameters have in common that are updated as one tensor."""

    of_text: bool
    ratio: float
    """learning rate as a multiple of the denoiser's"""
    dtype: torch.dtype
    is_small: bool
    """True if bitsandbytes keeps the moments in float32"""


@dataclass(eq=False)
class Unit:
    """What the library updates as one tensor: a part of the layout, or a single parameter; see `FLAT`.

    Attributes:
        kind: what its parameters have in common.
        segments: the parameters, at their places in the unit.
        start: first element of the flat vector.
        values: the parameters' own memory, flat.
        stepped: the tensor that the library updates and keys its state by: the values, or a float32 copy of them.
        direct: True if it is the values.
        flat: False for single parameters, which keep their shapes.
        optimizer: the library's.
        shape: of `stepped`.
    """

    kind: Kind
    segments: tuple[Segment, ...]
    start: int
    values: Tensor
    stepped: nn.Parameter
    direct: bool
    flat: bool
    optimizer: torch.optim.Optimizer = field(init=False)
    shape: torch.Size = field(init=False)

    def __post_init__(self) -> None:
        self.shape = self.stepped.shape  # kept, because stochastic rounding frees `stepped` between steps

    @property
    def master(self) -> Tensor:
        """Return what the library updates, flat."""
        return self.stepped.detach().view(-1)


def resolve_beta2(section: Optimizer) -> float:
    """Return `optimizer.beta2` as a number: "auto" is 0.999, or 0.99 with Lion, as in its paper."""
    if section.beta2 != "auto":
        return float(section.beta2)
    return 0.99 if section.name == "lion8bit" else 0.999


def require_package(section: Optimizer) -> None:
    """Check that the optimizer's package is installed; a class of another package is imported.

    Raises:
        UserError: it is not, or the class is unknown or does not take `optimizer.arguments`.
    """
    if is_class(section.name):
        foreign.check_arguments(section, foreign.find_class(section))
        return
    module, package = PACKAGES.get(section.name, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise UserError(
            Message(
                "optimizer.name = {name} needs the package {package}, which is not installed; run `{command}`",
                name=repr(section.name),
                package=package,
                command="pip install 'lora-fp8[optimizers]'",
            )
        )


def make(section: Optimizer, units: list[Unit], lr: float) -> list[torch.optim.Optimizer]:
    """Return the library's optimizers that update the units.

    Raises:
        UserError: the name is unknown, or its package is missing or does not load.
    """
    require_package(section)
    if section.name == "muon":
        matrices = [unit for unit in units if is_matrix(unit.shape)]
        others = [unit for unit in units if not is_matrix(unit.shape)]
        settings = {"lr": lr, "momentum": section.beta1, "adjust_lr_fn": "match_rms_adamw"}
        return [
            *_make_grouped(torch.optim.Muon, settings, matrices, section.weight_decay),
            *_make_grouped(torch.optim.AdamW, {"lr": lr}, others, section.weight_decay),
        ]
    if is_class(section.name):
        return _make_grouped(foreign.find_class(section), {"lr": lr, **foreign.make_arguments(section)}, units)
    maker, settings = _find_maker(section)
    made = []
    for is_small in (False, True):
        # Small parameters together are no longer small, but their moments stay in float32.
        own = settings | ({"min_8bit_size": 2**62} if is_small else {})
        members = [unit for unit in units if unit.kind.is_small == is_small]
        made += _make_grouped(maker, {"lr": lr, **own}, members, section.weight_decay)
    return made


def is_matrix(shape: torch.Size) -> bool:
    """Return True if Muon updates a parameter of this shape."""
    return len(shape) == 2


def _find_maker(section: Optimizer) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Return the library's class of an optimizer and what it is made with, besides rate and weight decay."""
    betas = (section.beta1, resolve_beta2(section))
    if section.name in BITSANDBYTES:
        return _find_bitsandbytes(section, betas)
    if section.name == "adamw":
        return torch.optim.AdamW, {"betas": betas, "eps": section.eps}
    if section.name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor, {"relative_step": False, "scale_parameter": False, "warmup_init": False}
    if section.name == "adamw_schedulefree":
        from schedulefree import AdamWScheduleFree

        return AdamWScheduleFree, {"betas": betas, "eps": section.eps}
    if section.name == "came":
        from came_pytorch import CAME

        return CAME, {"betas": (*betas, 0.9999)}
    if section.name == "prodigy":
        from prodigyopt import Prodigy

        return Prodigy, {
            "betas": betas,
            "eps": section.eps,
            "d0": section.d0,
            "d_coef": section.d_coef,
            "growth_rate": math.inf if section.growth_rate == "unlimited" else section.growth_rate,
            "decouple": section.decouple,
            "safeguard_warmup": section.safeguard_warmup,
            "use_bias_correction": section.use_bias_correction,
        }
    raise UserError(
        Message(
            "{key}: {given} is not available; accepted: {names}",
            key="optimizer.name",
            given=repr(section.name),
            names=", ".join(AUTO_LR),
        )
    )


def _find_bitsandbytes(
    section: Optimizer, betas: tuple[float, float]
) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    try:
        import bitsandbytes
    except Exception as error:  # it loads a native library, which raises differently by platform
        raise UserError(
            Message(
                "optimizer.name = {name} needs bitsandbytes, which cannot be loaded ({why}); use 'adamw'",
                name=repr(section.name),
                why=error,
            )
        ) from error
    if section.name == "lion8bit":
        return bitsandbytes.optim.Lion8bit, {"betas": betas}  # Lion takes the sign and divides by nothing
    if section.name == "ademamix8bit":
        return bitsandbytes.optim.AdEMAMix8bit, {"betas": (*betas, 0.9999), "eps": section.eps}
    return bitsandbytes.optim.AdamW8bit, {"betas": betas, "eps": section.eps}


def _make_grouped(
    maker: Callable[..., torch.optim.Optimizer],
    settings: dict[str, Any],
    units: list[Unit],
    weight_decay: float | None = None,
) -> list[torch.optim.Optimizer]:
    """Return an optimizer of these units, with a group for each learning rate; none without units."""
    groups: dict[tuple[bool, float], list[Unit]] = {}
    for unit in units:
        groups.setdefault((unit.kind.of_text, unit.kind.ratio), []).append(unit)
    if not groups:
        return []
    # The denoiser's come first, whatever the parameters' order: Prodigy sums over groups in their order.
    by_ratio = [
        # As an argument, Prodigy prints the weight decay to stdout.
        {"params": [unit.stepped for unit in members], "ratio": ratio}
        | ({} if weight_decay is None else {"weight_decay": weight_decay})
        for (_, ratio), members in sorted(groups.items(), key=lambda group: group[0][0])
    ]
    made = maker(by_ratio, **settings)
    for unit in units:
        unit.optimizer = made
    return [made]


def estimate_state_bytes(params: Iterable[nn.Parameter], section: Optimizer) -> int:
    """Return what `AdapterOptimizer.count_bytes` will be for these parameters, which may be on meta.

    bitsandbytes keeps moments in float32 for tensors below 4096 elements; otherwise one byte per element and a float32
    per block of 256, plus a shared code book of 256 float32 for each kind of moment. Prodigy keeps four tensors; one of
    them is a single number for parameters that start as zeros, which this estimate ignores. A class of another package
    is counted as two moments.
    """
    total, some_in_8bit = 0, False
    for param in params:
        num, direct = param.numel(), param.dtype == torch.float32 or section.rounding == "nearest"
        if section.name in BITSANDBYTES:
            moments = {"lion8bit": 1, "ademamix8bit": 3}.get(section.name, 2)
            total += moments * (4 * num if num < SMALLEST_8BIT else num + 4 * math.ceil(num / ALIGNMENT))
            some_in_8bit |= num >= SMALLEST_8BIT
        else:
            total += _count_bytes(section.name, param.shape, param.itemsize if direct else 4)
        if section.rounding == "master" and not direct:
            total += 4 * num
        total += 4 * num if section.ema_decay else 0
    if some_in_8bit:
        total += (1 if section.name == "lion8bit" else 2) * 4 * 256
    return total


def count_list_entries(section: Optimizer) -> int:
    """Return how many entries for each parameter a checkpoint has in its lists, beyond those of any optimizer."""
    listed = TENSORS.get(section.name, 2 if is_class(section.name) else 0)
    return (listed + 1 if listed else 0) + (2 if section.ema_decay else 0)


def _count_bytes(name: str, shape: torch.Size, itemsize: int) -> int:
    """Return the bytes that an optimizer other than bitsandbytes' keeps for a parameter, updated in this item size."""
    num = shape.numel()
    halves = num // shape[-1] + num // shape[-2] if len(shape) > 1 else num  # sums over rows and over columns
    match name:
        case "prodigy":
            return 4 * num * itemsize
        case "adafactor":  # in float32 whatever the parameter's dtype, and the size of the parameter as one number
            return 4 * halves + 4
        case "came":
            return 4 * (num + (2 * halves if len(shape) > 1 else num)) + itemsize
        case "muon":
            return num * itemsize if is_matrix(shape) else 2 * num * itemsize + 4
    return 2 * num * itemsize
