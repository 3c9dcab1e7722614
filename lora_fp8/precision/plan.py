"""Decides, layer by layer, how a denoiser is held and multiplied, before a byte of it is read.

`decide` looks at names and shapes only, so it works on the meta device and takes a moment for the largest model. What
it says is what `convert.quantize_` does and what `lora-fp8 plan` prints.

The rules, in order; the first that speaks wins:

    storage   quantize.keep; quantize.override; the family's precise parts; what its class holds in float32;
              not a plain nn.Linear; the family's modulation; quantize.storage
    compute   few rows (modulation); a storage without FP8 matmul; quantize.fp8_exclude; sides that are no multiples
              of 16 (never padded: padding costs more than it brings); small; quantize.compute
    backend   quantize.backend; what TransformerEngine does not multiply in FP8 is our own layer, or bf16 where a side
              is no multiple of 16

The precise parts, the output layer among them, are not even quantized.
"""

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from .. import config
from ..config import SCALES
from .backends import TE_SCALE, num_bytes, te_alignment
from .formats import Format
from .linear import FrozenLinear
from .names import name_matches

ALIGNMENT = 16  # what FP8 tensor cores ask of both sides of a weight
PLAIN = ("bf16", "none")


@dataclass(frozen=True)
class LayerPlan:
    """What is decided for one linear layer."""

    name: str
    shape: tuple[int, int]
    """(output features, input features)"""
    storage: str
    """"fp8", "int8", "nf4"; or "bf16", "fp16", "fp32" where it is not quantized"""
    scale: str
    """what shares a scale, see `formats.Format`; "" where it is not quantized"""
    compute: str
    """"upcast", "fp8", "fp8_forward"; "plain" where it is not quantized"""
    reason: str
    """why it is held so"""
    compute_reason: str
    """why it is multiplied so"""
    num_bytes: int
    """weight, scales and bias"""
    backend: str = ""
    """whose layer: "own", "torchao", "te"; "" where it is not quantized"""

    @property
    def form(self) -> Format | None:
        return Format(self.storage, self.scale) if self.scale else None


@dataclass(frozen=True)
class Plan:
    """Every linear layer of a denoiser, and the bytes of the whole."""

    storage: str
    """`quantize.storage`"""
    layers: tuple[LayerPlan, ...]
    num_bytes: int
    """all parameters and buffers as planned"""
    plain_num_bytes: int
    """the same, had every parameter been held in the compute dtype"""
    warnings: tuple[str, ...] = ()

    @property
    def quantized(self) -> tuple[LayerPlan, ...]:
        return tuple(layer for layer in self.layers if layer.scale)

    @property
    def kept(self) -> tuple[LayerPlan, ...]:
        return tuple(layer for layer in self.layers if not layer.scale)

    def summary(self) -> str:
        """A few lines for the log: the totals, then what is held and multiplied otherwise than asked, and why."""
        held = Counter(str(layer.form) + _by(layer.backend) for layer in self.quantized)
        what = ", ".join(f"{count} in {form}" for form, count in held.items()) or "none quantized"
        lines = [
            f"of {len(self.layers)} linear layers {what}; "
            f"{_size(self.num_bytes)} held, {_size(self.plain_num_bytes)} without"
        ]
        if self.storage not in PLAIN:
            for reason, count in Counter(layer.reason for layer in self.kept).items():
                lines.append(f"  kept: {count} x {reason}")
        how = Counter(layer.compute for layer in self.quantized)
        if set(how) - {"upcast"}:
            lines.append("  compute: " + ", ".join(f"{count} {compute}" for compute, count in how.items()))
            for reason, count in Counter(one.compute_reason for one in self.quantized if one.compute_reason).items():
                lines.append(f"  upcast: {count} x {reason}")
        return "\n".join(lines)

    def table(self) -> str:
        """One line per linear layer, aligned, and the totals."""
        rows = [
            (one.name, f"{one.shape[0]}x{one.shape[1]}", " ".join(filter(None, (one.storage, one.scale))) +
             _by(one.backend), one.compute, "; ".join(filter(None, (one.reason, one.compute_reason))))
            for one in self.layers
        ]  # fmt: skip
        rows = [("layer", "shape", "storage", "compute", "reason"), *rows]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]).rstrip() for row in rows]
        return "\n".join([*lines, "", *self.summary().splitlines(), *(f"warning: {text}" for text in self.warnings)])

    def to_json(self) -> dict[str, Any]:
        """The plan as plain data, totals in bytes and GB (10^9 bytes)."""
        data = asdict(self)
        return data | {"gb": self.num_bytes / 1e9, "plain_gb": self.plain_num_bytes / 1e9}

    def with_compute(self, compute: str) -> "Plan":
        """The same with another matmul for the layers that are multiplied in FP8."""
        layers = [replace(one, compute=compute) if one.compute.startswith("fp8") else one for one in self.layers]
        return replace(self, layers=tuple(layers))


def decide(
    denoiser: nn.Module,
    section: config.Quantize,
    keep: Iterable[str],
    dtype: torch.dtype,
    modulation: Sequence[str] = (),
) -> Plan:
    """What `section` means for this denoiser (its weights may be on the meta device).

    Args:
        keep: the family's precise parts, in the terms of `names.name_matches`. Parts that match nothing are fine here:
            one architecture has variants with and without some modules.
        dtype: compute dtype, and storage of what is not quantized.
        modulation: the family's layers that see one row per image and no tokens.

    Raises:
        config.UserErrors: entries of the section that match no linear layer; a scale that does not divide a layer.
    """
    keep = tuple(keep)
    places = linear_places(denoiser)
    names = [name for several in places.values() for name in several]
    overrides = [one for one in map(config.parse_override, section.override) if one]  # the config has checked them
    asked = [("quantize.keep", entry) for entry in section.keep]
    asked += [("quantize.fp8_exclude", entry) for entry in section.fp8_exclude]
    asked += [("quantize.override", entry) for entry, _, _ in overrides]
    problems = [_unknown(setting, entry, names) for setting, entry in asked]
    layers: dict[str, LayerPlan] = {}
    misfits: dict[tuple[str, Format], list[tuple[str, tuple[int, int]]]] = {}
    for linear, several in places.items():
        verdicts = [_storage(denoiser, name, linear, section, overrides, keep, modulation, several) for name in several]
        # A layer that stands at two places is held as the more careful of the two asks.
        form, reason = next((one for one in verdicts if one[0] is None), verdicts[0])
        shape = (linear.out_features, linear.in_features)
        if form is not None and form.problem(shape) and form.scale != _te_scale(section):
            setting = "quantize.override" if "quantize.override" in reason else "quantize.scale"
            misfits.setdefault((setting, form), []).append((several[0], shape))
        compute, why = _compute(several, form, shape, section, modulation)
        held = held_dtype(denoiser, several[0], dtype)
        backend = _backend(form, compute, section)
        size = _num_bytes(linear, form, held, dtype, backend)
        for name in several:
            layers[name] = LayerPlan(
                name, shape, form.storage if form else _short(held), form.scale if form else "", compute, reason, why,
                size, backend,
            )  # fmt: skip
    problems += [_misfit(setting, form, affected) for (setting, form), affected in misfits.items()]
    if problems := [problem for problem in problems if problem]:
        raise config.UserErrors(problems, "quantize")

    counted = {linear: layers[several[0]].num_bytes for linear, several in places.items()}
    rest, seen = 0, set()
    for name, module in denoiser.named_modules():
        if module in counted:
            rest += counted[module]
            continue
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            casts = tensor.is_floating_point() and not _computed(module, tensor)
            rest += tensor.numel() * (held_dtype(denoiser, name, dtype) if casts else tensor.dtype).itemsize
    plain = sum(_plain_size(module) for module in denoiser.modules()) * dtype.itemsize
    planned = tuple(layers[name] for name in names)
    return Plan(section.storage, planned, rest, plain, tuple(_without_effect(section, planned)))


def linear_places(denoiser: nn.Module) -> dict[nn.Linear, list[str]]:
    """Each linear layer with the names of the places where it stands, in the model's order."""
    places: dict[nn.Linear, list[str]] = {}
    for name, module in denoiser.named_modules(remove_duplicate=False):
        if name and isinstance(module, nn.Linear):
            places.setdefault(module, []).append(name)
    return places


# -- the rules ---------------------------------------------------------------------------------------------------------


def _storage(
    denoiser: nn.Module,
    name: str,
    linear: nn.Linear,
    section: config.Quantize,
    overrides: Sequence[tuple[str, str, str]],
    keep: Sequence[str],
    modulation: Sequence[str],
    names: Sequence[str],
) -> tuple[Format | None, str]:
    shape = (linear.out_features, linear.in_features)
    if section.storage in PLAIN:
        return None, f"quantize.storage is {section.storage}"
    for entry in section.keep:
        if name_matches(name, entry):
            return None, f"{entry!r} in quantize.keep"
    plain = type(linear) in (nn.Linear, FrozenLinear)
    for entry, storage, scale in overrides:
        if name_matches(name, entry) and plain:
            reason = f"{entry!r} in quantize.override"
            if storage in PLAIN:
                return None, reason
            return (Format(storage, scale) if scale else _fitting(storage, shape)), reason
    for entry in keep:
        if name_matches(name, entry):
            return None, f"{entry!r} is precise in this family"
    if held_dtype(denoiser, name, torch.bfloat16) is torch.float32:
        return None, "float32 in this model's class"
    if not plain:
        # Such as the projection of nn.MultiheadAttention, whose weight is read and not called.
        return None, f"{type(linear).__name__} is not a plain nn.Linear"
    if isinstance(linear, FrozenLinear):
        return linear.form, "is quantized already"
    for entry in modulation:
        if name_matches(name, entry):
            kind = section.modulation
            if kind == "auto":
                # What is multiplied once per image costs no time, so that it can have the format with the least error.
                kind = "int8"
            if kind in PLAIN:
                return None, "quantize.modulation is bf16"
            return _fitting(kind, shape), "modulation"
    if section.backend == "te" and not _not_multiplied(names, shape, section):
        needed = te_alignment(section)
        if any(side % needed for side in shape):
            return None, f"a side is no multiple of {needed}, as TransformerEngine needs"
        return Format("fp8", TE_SCALE[section.recipe]), ""
    if section.scale != "auto":
        return Format(section.storage, section.scale), ""
    return _fitting(section.storage, shape), ""


def _fitting(storage: str, shape: tuple[int, int]) -> Format:
    """The storage under the first of its own scales that divides this layer."""
    forms = [Format(storage, scale) for scale in SCALES[storage]]
    return next((form for form in forms if not form.problem(shape)), forms[0])


def _compute(
    names: Sequence[str],
    form: Format | None,
    shape: tuple[int, int],
    section: config.Quantize,
    modulation: Sequence[str],
) -> tuple[str, str]:
    if form is None:
        return "plain", ""
    if section.compute == "upcast":
        return "upcast", ""
    if any(name_matches(name, entry) for name in names for entry in modulation):
        return "upcast", "sees one row per image"
    if form.storage != "fp8":
        return "upcast", f"{form.storage} has no FP8 matmul"
    if section.backend == "te":
        if reason := _not_multiplied(names, shape, section):
            return "upcast", reason
        if form.scale != TE_SCALE[section.recipe]:
            return "upcast", f"scale {form.scale} is not what TransformerEngine multiplies with recipe {section.recipe}"
        return "fp8", ""
    needed = ("128x128",) if section.recipe == "block" else ("row", "tensor")
    if form.scale not in needed:
        return "upcast", f"scale {form.scale} has no FP8 matmul with recipe {section.recipe}"
    if reason := _excluded(names, section):
        return "upcast", reason
    if any(side % ALIGNMENT for side in shape):
        return "upcast", f"a side is no multiple of {ALIGNMENT}"
    if reason := _not_multiplied(names, shape, section):
        return "upcast", reason
    return ("fp8" if section.compute == "auto" else section.compute), ""


def _excluded(names: Sequence[str], section: config.Quantize) -> str:
    entries = (entry for entry in section.fp8_exclude if any(name_matches(name, entry) for name in names))
    return next((f"{entry!r} in quantize.fp8_exclude" for entry in entries), "")


def _not_multiplied(names: Sequence[str], shape: tuple[int, int], section: config.Quantize) -> str:
    """Why the section has this layer held in FP8 and not multiplied in it, or ""."""
    small = min(shape) < section.fp8_min_features
    reason = f"a side is below quantize.fp8_min_features = {section.fp8_min_features}" if small else ""
    return _excluded(names, section) or reason


def _te_scale(section: config.Quantize) -> str:
    return TE_SCALE[section.recipe] if section.backend == "te" else ""


def _backend(form: Format | None, compute: str, section: config.Quantize) -> str:
    if form is None:
        return ""
    return "own" if section.backend == "te" and compute != "fp8" else section.backend


def _without_effect(section: config.Quantize, layers: Sequence[LayerPlan]) -> list[str]:
    """Settings that were given and change nothing here."""
    found = []
    bounded = section.sensitivity_bound != type(section)().sensitivity_bound
    if section.storage in PLAIN:
        given = {"keep": section.keep, "override": section.override, "compute": section.compute != "upcast"}
        given |= {"scale": section.scale != "auto", "modulation": section.modulation != "auto"}
        given |= {"kernels": section.kernels != "torch"}
        given |= {"sensitivity": section.sensitivity != "off", "sensitivity_bound": bounded}
        given |= {"backend": section.backend != "own"}
        why = f"quantize.storage is {section.storage!r}, so nothing is quantized"
        return [f"quantize.{key} had no effect: {why}" for key, value in given.items() if value]
    if section.compute == "upcast":
        fields = type(section).model_fields
        settings = ("recipe", "fp8_exclude", "fp8_min_features", "fast_accum", "kernels")
        given = [key for key in settings if getattr(section, key) != fields[key].default]
        found += [f"quantize.{key} had no effect: quantize.compute is 'upcast'" for key in given]
    elif not any(layer.compute.startswith("fp8") for layer in layers):
        found.append(f"quantize.compute = {section.compute!r} had no effect: no layer can be multiplied in FP8")
        if section.kernels != "torch":
            found.append("quantize.kernels had no effect: no layer can be multiplied in FP8")
    if bounded and section.sensitivity == "off":
        found.append("quantize.sensitivity_bound had no effect: quantize.sensitivity is 'off'")
    if section.modulation != "auto" and not any("modulation" in layer.reason for layer in layers):
        found.append("quantize.modulation had no effect: this model has no modulation layers")
    return found


def _misfit(setting: str, form: Format, affected: Sequence[tuple[str, tuple[int, int]]]) -> str:
    name, shape = affected[0]
    others = [Format(form.storage, scale) for scale in SCALES[form.storage] if scale not in (form.scale, "none")]
    fitting = [other.scale for other in others if not any(other.problem(shape) for _, shape in affected)]
    advice = f"use scale {' or '.join(map(repr, fitting))}" if fitting else "use quantize.storage = 'fp8'"
    many = f" and {len(affected) - 1} more layers" if len(affected) > 1 else ""
    return f"{setting}: {form.problem(shape)} ({name}{many}); {advice}, or name such layers in quantize.keep"


def _unknown(setting: str, entry: str, names: Sequence[str]) -> str:
    if any(name_matches(name, entry) for name in names):
        return ""
    parts = {part for name in names for part in name.split(".") if not part.isdigit()}
    parts |= {".".join(name.split(".")[-2:]) for name in names}
    near = difflib.get_close_matches(entry.removeprefix("^"), sorted(parts), n=3)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "`lora-fp8 plan` lists the layers"
    return f"{setting}: {entry!r} matches no linear layer of this model; {hint}"


# -- sizes -------------------------------------------------------------------------------------------------------------


def held_dtype(denoiser: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float32 where the model's class asks for it (diffusers' `_keep_in_fp32_modules`)."""
    precise = getattr(denoiser, "_keep_in_fp32_modules", None) or ()
    return torch.float32 if any(part in precise for part in name.split(".")) else dtype


def _computed(module: nn.Module, tensor: torch.Tensor) -> bool:
    """Whether a buffer has the precision its constructor computed it in, and keeps it."""
    return any(module._buffers.get(key) is tensor for key in module._non_persistent_buffers_set)


def _num_bytes(linear: nn.Linear, form: Format | None, held: torch.dtype, dtype: torch.dtype, backend: str) -> int:
    shape = (linear.out_features, linear.in_features)
    bias = 0 if linear.bias is None else linear.out_features * (held if form is None else dtype).itemsize
    return bias + (num_bytes(backend, form, shape) if form is not None else shape[0] * shape[1] * held.itemsize)


def _plain_size(module: nn.Module) -> int:
    if isinstance(module, FrozenLinear):
        return module.out_features * (module.in_features + (module.bias is not None))
    return sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)


def _short(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype, str(dtype))


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _by(backend: str) -> str:
    return f" by {backend}" if backend not in ("", "own") else ""
