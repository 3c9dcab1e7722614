"""Decides, layer by layer, how a denoiser is stored and multiplied, before a byte of it is read.

`decide` looks at names and shapes only, so it works on the meta device and takes a moment for the largest model.
`convert.quantize_` carries its result out, and `lora-fp8 plan` prints it.

The rules, in order; the first that applies wins:

    storage   quantize.keep; quantize.override; the family's `keep_precise`; modules that the class keeps in float32;
              not a plain layer; quantize.convolutions; the family's modulation; quantize.storage
    compute   a convolution; few rows (modulation); a storage without FP8 matmul; quantize.fp8_exclude; sides that are
              no multiples of 16 (never padded: padding costs more than it gains); small; quantize.compute
    backend   quantize.backend; a layer that TransformerEngine cannot multiply in FP8 is our own, or bf16 if a side is
              no multiple of 16

Layers in `keep_precise`, the output layer among them, are not quantized at all.
"""

import difflib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import settings
from ..common.numbers import format_bytes
from ..errors import Joined, Message, Template, UserErrors
from ..settings import SCALES
from .backends import TE_SCALE, choose_te_alignment, count_bytes
from .conv import find_conv_problem
from .formats import Format
from .frozen import FrozenLayer
from .linear import FrozenLinear
from .names import name_matches

ALIGNMENT = 16  # FP8 tensor cores need multiples of it for both sides of a weight
PLAIN = ("bf16", "none")
Layer = nn.Linear | nn.Conv2d
"""A layer that can be frozen."""


@dataclass(frozen=True)
class LayerPlan:
    """What is decided for one linear layer or convolution."""

    name: str
    shape: tuple[int, int]
    """(output features, input features); of a convolution the inputs of a filter, channels x height x width."""
    storage: str
    """"fp8", "int8", "nf4"; or "bf16", "fp16", "fp32" if it is not quantized."""
    scale: str
    """Block that shares a scale, see `formats.Format`; "" if it is not quantized."""
    compute: str
    """"upcast", "fp8", "fp8_forward"; "plain" if it is not quantized."""
    reason: str
    """Reason for its storage."""
    compute_reason: str
    """Reason for its matmul."""
    num_bytes: int
    """Bytes of weight, scales and bias."""
    backend: str = ""
    """Library of the layer: "own", "torchao", "te"; "" if it is not quantized."""
    kind: str = "linear"
    """"linear" or "convolution"."""
    rule: str = ""
    """The rule that chose its storage, if it is "override" or "modulation"."""

    @property
    def form(self) -> Format | None:
        """Return the storage format; None if the layer is not quantized."""
        return Format(self.storage, self.scale) if self.scale else None


@dataclass(frozen=True)
class Plan:
    """The decisions for every linear layer and convolution of a denoiser, and the bytes of the whole."""

    storage: str
    """`quantize.storage` of the job."""
    layers: tuple[LayerPlan, ...]
    num_bytes: int
    """Bytes of all parameters and buffers as planned."""
    plain_num_bytes: int
    """The same, if every parameter were stored in the compute dtype."""
    warnings: tuple[str, ...] = ()

    @property
    def facts(self) -> dict[str, bool]:
        """Return those of `settings.FACTS` that the layers decide."""
        return {
            "layers.fp8": any(layer.compute.startswith("fp8") for layer in self.layers),
            "layers.modulation": any(layer.rule == "modulation" for layer in self.layers),
            "layers.convolutions": any(layer.kind == "convolution" for layer in self.layers),
        }

    @property
    def quantized(self) -> tuple[LayerPlan, ...]:
        """Return the layers that are quantized."""
        return tuple(layer for layer in self.layers if layer.scale)

    @property
    def kept(self) -> tuple[LayerPlan, ...]:
        """Return the layers that are not quantized."""
        return tuple(layer for layer in self.layers if not layer.scale)

    def format_summary(self) -> str:
        """Return a few lines for the log: totals, then the layers that differ from what was asked, and why."""
        held = Counter(str(layer.form) + _format_backend(layer.backend) for layer in self.quantized)
        what = Joined(", ", [Message("{count} in {form}", count=count, form=form) for form, count in held.items()])
        kinds = Counter(layer.kind for layer in self.layers)
        template = Template("{total} linear layers: {what}; {size} in total, {plain} without quantization")
        if kinds["convolution"]:
            template = Template(
                "{total} linear layers and {convolutions} convolutions: {what}; {size} in total, {plain} without "
                "quantization"
            )
        lines: list[str] = [
            template(
                total=kinds["linear"],
                convolutions=kinds["convolution"],
                what=what or Message("none quantized"),
                size=format_bytes(self.num_bytes),
                plain=format_bytes(self.plain_num_bytes),
            )
        ]
        if self.storage not in PLAIN:
            for reason, count in Counter(layer.reason for layer in self.kept).items():
                lines.append(Message("  not quantized: {count} x {line}", count=count, line=reason))
        how = Counter(layer.compute for layer in self.quantized)
        if set(how) - {"upcast"}:
            counts = ", ".join(f"{count} {compute}" for compute, count in how.items())
            lines.append(Message("  compute: {counts}", counts=counts))
            for reason, count in Counter(
                layer.compute_reason for layer in self.quantized if layer.compute_reason
            ).items():
                lines.append(Message("  upcast: {count} x {line}", count=count, line=reason))
        return Joined("\n", lines)

    def format_table(self) -> str:
        """Return one aligned line per layer, and the totals."""
        rows = [
            (layer.name, f"{layer.shape[0]}x{layer.shape[1]}", " ".join(filter(None, (layer.storage, layer.scale))) +
             _format_backend(layer.backend), layer.compute)
            for layer in self.layers
        ]  # fmt: skip
        reasons = [Joined("; ", filter(None, (layer.reason, layer.compute_reason))) for layer in self.layers]
        head = ("layer", "shape", "storage", "compute")
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines: list[str] = []
        for row, reason in zip((head, *rows), (Message("reason"), *reasons), strict=True):
            cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append(Message("{cells}  {line}", cells=cells, line=reason) if reason else cells.rstrip())
        warnings = (Message("warning: {line}", line=line) for line in self.warnings)
        return Joined("\n", [*lines, "", self.format_summary(), *warnings])

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data, with totals in bytes and GB (10^9 bytes)."""
        data = asdict(self)
        return data | {"gb": self.num_bytes / 1e9, "plain_gb": self.plain_num_bytes / 1e9}

    def with_compute(self, compute: str) -> "Plan":
        """Return a copy with another matmul for the layers that are multiplied in FP8."""
        layers = [
            replace(layer, compute=compute) if layer.compute.startswith("fp8") else layer for layer in self.layers
        ]
        return replace(self, layers=tuple(layers))


def decide(
    denoiser: nn.Module,
    section: settings.Quantize,
    keep: Iterable[str],
    dtype: torch.dtype,
    modulation: Sequence[str] = (),
    file_scale: str = "",
) -> Plan:
    """Decide how `section` applies to this denoiser (its weights may be on the meta device).

    Args:
        denoiser: the unquantized or partly quantized denoiser.
        section: the job's `[quantize]` table.
        keep: the family's precise layers, in the syntax of `names.name_matches`. Entries that match nothing are allowed
            here, because one architecture has variants with and without some modules.
        dtype: compute dtype, and storage of what is not quantized.
        modulation: the family's layers that see one row per image, and no tokens.
        file_scale: block that shares a scale in the base's file, if that is FP8 already; "" if it has no such blocks.
            quantize.scale = "auto" keeps it, so that the file's own bytes are stored.

    Raises:
        UserErrors: entries of the section match no linear layer, or a scale does not divide a layer.
    """
    rules = _Rules(section, tuple(keep), tuple(modulation), file_scale)
    places = find_layer_names(denoiser)
    names = [name for several in places.values() for name in several]
    problems = _find_unknown_entries(section, names)
    layers: dict[str, LayerPlan] = {}
    misfits: dict[tuple[str, Format], list[tuple[str, tuple[int, int]]]] = {}
    for layer, several in places.items():
        form, reason, rule = _choose_form(rules, denoiser, layer, several)
        shape, kind = compute_matrix_shape(layer), "convolution" if isinstance(layer, nn.Conv2d) else "linear"
        if form is not None and form.find_problem(shape) and form.scale != _choose_te_scale(section):
            setting = "quantize.override" if rule == "override" else "quantize.scale"
            misfits.setdefault((setting, form), []).append((several[0], shape))
        compute, why = _choose_compute(several, form, shape, section, modulation)
        backend = _choose_backend(form, compute, section)
        if kind == "convolution" and form is not None:
            compute, backend = "upcast", "own"
            why = Message("a convolution") if section.compute != "upcast" else ""
        held = choose_held_dtype(denoiser, several[0], dtype)
        size = _count_layer_bytes(layer, form, held, dtype, backend)
        for name in several:
            layers[name] = LayerPlan(
                name=name,
                shape=shape,
                storage=form.storage if form else _shorten_dtype(held),
                scale=form.scale if form else "",
                compute=compute,
                reason=reason,
                compute_reason=why,
                num_bytes=size,
                backend=backend,
                kind=kind,
                rule=rule,
            )
    problems += [_describe_misfit(setting, form, affected) for (setting, form), affected in misfits.items()]
    if problems:
        raise UserErrors(problems, "quantize")

    counted: dict[nn.Module, int] = {layer: layers[several[0]].num_bytes for layer, several in places.items()}
    plain = sum(_count_plain_weights(module) for module in denoiser.modules()) * dtype.itemsize
    planned = tuple(layers[name] for name in names)
    warnings = tuple(_warn_of_rounding(planned, file_scale))
    return Plan(section.storage, planned, _count_total_bytes(denoiser, counted, dtype), plain, warnings)


def find_layer_names(denoiser: nn.Module) -> dict[Layer, list[str]]:
    """Return each linear layer and convolution with all names under which the model has it, in the model's order."""
    places: dict[Layer, list[str]] = {}
    for name, module in denoiser.named_modules(remove_duplicate=False):
        if name and isinstance(module, Layer):
            places.setdefault(module, []).append(name)
    return places


def compute_matrix_shape(layer: Layer) -> tuple[int, int]:
    """Return (N, K) of a layer's weight; that of a convolution is the matrix of its flattened filters."""
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    return layer.out_channels, layer.in_channels // layer.groups * math.prod(layer.kernel_size)


# -- the rules ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Rules:
    """What decides about a layer: the job's settings, and the facts of its family and file; see `decide`."""

    section: settings.Quantize
    keep: tuple[str, ...]
    modulation: tuple[str, ...]
    file_scale: str


class _Verdict(NamedTuple):
    """The storage that a rule chooses for a layer."""

    form: Format | None
    """None: not quantized"""
    reason: str = ""
    """for people; "" if quantize.storage decides"""
    rule: str = ""
    """as in `LayerPlan`"""


def _choose_form(rules: _Rules, denoiser: nn.Module, layer: Layer, names: Sequence[str]) -> _Verdict:
    """Return the storage of a layer.

    Args:
        rules: what decides.
        denoiser: the model.
        layer: the layer.
        names: the names under which the model has it.
    """
    verdicts = [_choose_storage(rules, denoiser, name, layer, names) for name in names]
    # A layer at two places is stored as the more careful of the two verdicts says.
    verdict = next((verdict for verdict in verdicts if verdict.form is None), verdicts[0])
    is_default = not verdict.reason or verdict.rule == "modulation"
    is_fp8 = verdict.form is not None and verdict.form.storage == "fp8"
    if is_fp8 and is_default and rules.file_scale and _can_keep_scale(rules.section):
        own = Format("fp8", rules.file_scale)
        if not own.find_problem(compute_matrix_shape(layer)):
            return verdict._replace(form=own)
    return verdict


def _choose_storage(rules: _Rules, denoiser: nn.Module, name: str, layer: Layer, names: Sequence[str]) -> _Verdict:
    """Apply the rules for storage to a layer under one of its names; arguments and result as in `_choose_form`."""
    section, shape = rules.section, compute_matrix_shape(layer)
    not_plain = _explain_not_plain(layer)
    if section.storage in PLAIN:
        return _Verdict(None, Message("quantize.storage is {storage}", storage=section.storage))
    if (entry := _find_first_match(name, section.keep)) is not None:
        return _Verdict(None, _explain_listed("keep", entry))
    if not not_plain and (entry := _find_first_match(name, section.override)) is not None:
        return _Verdict(_make_override(section.override[entry], shape), _explain_listed("override", entry), "override")
    if (entry := _find_first_match(name, rules.keep)) is not None:
        return _Verdict(None, Message("{entry} is kept in high precision for this architecture", entry=repr(entry)))
    if choose_held_dtype(denoiser, name, torch.bfloat16) is torch.float32:
        return _Verdict(None, Message("the model's own code keeps it in float32"))
    if not_plain:
        return _Verdict(None, not_plain)
    if isinstance(layer, FrozenLayer):
        return _Verdict(layer.form, Message("is already quantized"))
    if isinstance(layer, nn.Conv2d):
        # No GPU multiplies a convolution in FP8, so it can have the format with the least error.
        kind = "int8" if section.convolutions == "auto" else section.convolutions
        if kind in PLAIN:
            return _Verdict(None, Message("quantize.convolutions is bf16"))
        asked = Format(kind, section.scale) if kind == section.storage and section.scale != "auto" else None
        return _Verdict(asked if asked and not asked.find_problem(shape) else _choose_fitting(kind, shape))
    if _find_first_match(name, rules.modulation) is not None:
        # Multiplied once per image it takes no time, so it can have the format with the least error.
        kind = "int8" if section.modulation == "auto" else section.modulation
        if kind in PLAIN:
            return _Verdict(None, Message("quantize.modulation is bf16"), "modulation")
        return _Verdict(_choose_fitting(kind, shape), Message("modulation"), "modulation")
    return _choose_asked_storage(section, names, shape)


def _explain_not_plain(layer: Layer) -> str:
    """Return why a layer cannot be replaced by a frozen one; "" if it can."""
    if isinstance(layer, nn.Conv2d):
        return find_conv_problem(layer)
    if type(layer) not in (nn.Linear, FrozenLinear):
        # Such as the projection of nn.MultiheadAttention, whose weight is read without calling the layer.
        return Message("{name} is not a plain nn.Linear", name=type(layer).__name__)
    return ""


def _explain_listed(setting: str, entry: str) -> Message:
    return Message("{entry} in {key}", entry=repr(entry), key=f"quantize.{setting}")


def _make_override(text: str, shape: tuple[int, int]) -> Format | None:
    """Return the format of a value of quantize.override; None: not quantized."""
    storage, scale = settings.parse_storage(text)
    if storage in PLAIN:
        return None
    return Format(storage, scale) if scale else _choose_fitting(storage, shape)


def _choose_asked_storage(section: settings.Quantize, names: Sequence[str], shape: tuple[int, int]) -> _Verdict:
    """Return the storage that quantize.storage, quantize.scale and quantize.backend give."""
    if section.backend == "te" and not _explain_not_multiplied(names, shape, section):
        needed = choose_te_alignment(section)
        if any(side % needed for side in shape):
            return _Verdict(
                None, Message("a side is not a multiple of {needed}, which TransformerEngine needs", needed=needed)
            )
        return _Verdict(Format("fp8", TE_SCALE[section.recipe]))
    if section.scale != "auto":
        return _Verdict(Format(section.storage, section.scale))
    return _Verdict(_choose_fitting(section.storage, shape))


def _find_first_match(name: str, entries: Iterable[str]) -> str | None:
    """Return the first of the entries that matches the layer; None if none does."""
    return next((entry for entry in entries if name_matches(name, entry)), None)


def _choose_fitting(storage: str, shape: tuple[int, int]) -> Format:
    """Return the storage with the first of its scales that divides this layer."""
    forms = [Format(storage, scale) for scale in SCALES[storage]]
    return next((form for form in forms if not form.find_problem(shape)), forms[0])


def _choose_compute(
    names: Sequence[str],
    form: Format | None,
    shape: tuple[int, int],
    section: settings.Quantize,
    modulation: Sequence[str],
) -> tuple[str, str]:
    if form is None:
        return "plain", ""
    if section.compute == "upcast":
        return "upcast", ""
    if any(name_matches(name, entry) for name in names for entry in modulation):
        return "upcast", Message("sees one row per image")
    if form.storage != "fp8":
        return "upcast", Message("{storage} has no FP8 matmul", storage=form.storage)
    if section.backend == "te":
        if reason := _explain_not_multiplied(names, shape, section):
            return "upcast", reason
        if form.scale != TE_SCALE[section.recipe]:
            return "upcast", Message(
                "TransformerEngine has no matmul for scale {scale} with recipe {recipe}",
                scale=form.scale,
                recipe=section.recipe,
            )
        return "fp8", ""
    needed = ("128x128",) if section.recipe == "block" else ("row", "tensor")
    if form.scale not in needed:
        return "upcast", Message(
            "scale {scale} has no FP8 matmul with recipe {recipe}", scale=form.scale, recipe=section.recipe
        )
    if reason := _explain_excluded(names, section):
        return "upcast", reason
    if any(side % ALIGNMENT for side in shape):
        return "upcast", Message("a side is not a multiple of {needed}", needed=ALIGNMENT)
    if reason := _explain_not_multiplied(names, shape, section):
        return "upcast", reason
    return ("fp8" if section.compute == "auto" else section.compute), ""


def _explain_excluded(names: Sequence[str], section: settings.Quantize) -> str:
    entries = (entry for entry in section.fp8_exclude if any(name_matches(name, entry) for name in names))
    return next((_explain_listed("fp8_exclude", entry) for entry in entries), "")


def _explain_not_multiplied(names: Sequence[str], shape: tuple[int, int], section: settings.Quantize) -> str:
    """Return why the section stores this layer in FP8 but does not multiply in it; "" if it does."""
    if excluded := _explain_excluded(names, section):
        return excluded
    if min(shape) < section.fp8_min_features:
        return Message("a side is below quantize.fp8_min_features = {least}", least=section.fp8_min_features)
    return ""


def _choose_te_scale(section: settings.Quantize) -> str:
    return TE_SCALE[section.recipe] if section.backend == "te" else ""


def _choose_backend(form: Format | None, compute: str, section: settings.Quantize) -> str:
    if form is None:
        return ""
    return "own" if section.backend == "te" and compute != "fp8" else section.backend


def _can_keep_scale(section: settings.Quantize) -> bool:
    """Return True if the file's own blocks may be kept: no other scale is set, and no FP8 matmul needs one."""
    asked = section.storage == "fp8" and section.scale == "auto" and section.backend == "own"
    return asked and section.compute == "upcast"


def _warn_of_rounding(layers: Sequence[LayerPlan], file_scale: str) -> list[str]:
    """Return a warning if weights that are FP8 in the file are rounded to FP8 a second time."""
    own = Format("fp8", file_scale) if file_scale else None
    again = [
        layer
        for layer in layers
        if layer.storage == "fp8" and layer.form != own and not (own and own.find_problem(layer.shape))
    ]
    if own is None or not again:
        return []
    scales = ", ".join(sorted({layer.scale for layer in again}))
    return [
        Message(
            "the base model's file is FP8 with {own} scales, but {count} layers are rounded a second time, to scale "
            "{scales}, which adds about 2.4 % of error; quantize.scale = 'auto' with quantize.compute = 'upcast' "
            "keeps the file's own bytes",
            own=file_scale,
            count=len(again),
            scales=scales,
        )
    ]


def _describe_misfit(setting: str, form: Format, affected: Sequence[tuple[str, tuple[int, int]]]) -> str:
    name, shape = affected[0]
    others = [Format(form.storage, scale) for scale in SCALES[form.storage] if scale not in (form.scale, "none")]
    fitting = [other.scale for other in others if not any(other.find_problem(shape) for _, shape in affected)]
    instead = "quantize.storage = 'fp8'"
    if fitting:
        instead = Message("scale {names}", names=Joined(" or ", map(repr, fitting)))
    template = Template("{key}: {line} ({name}); use {instead}, or list such layers in quantize.keep")
    if len(affected) > 1:
        template = Template(
            "{key}: {line} ({name} and {count} more layers); use {instead}, or list such layers in quantize.keep"
        )
    return template(key=setting, line=form.find_problem(shape), name=name, count=len(affected) - 1, instead=instead)


def _find_unknown_entries(section: settings.Quantize, names: Sequence[str]) -> list[str]:
    """Return a problem for each entry of the section that matches none of the layers."""
    entries = {
        "quantize.keep": section.keep,
        "quantize.fp8_exclude": section.fp8_exclude,
        "quantize.override": section.override,
    }
    problems = [_describe_unknown(setting, entry, names) for setting, listed in entries.items() for entry in listed]
    return [problem for problem in problems if problem]


def _describe_unknown(setting: str, entry: str, names: Sequence[str]) -> str:
    if any(name_matches(name, entry) for name in names):
        return ""
    parts = {part for name in names for part in name.split(".") if not part.isdigit()}
    parts |= {".".join(name.split(".")[-2:]) for name in names}
    near = difflib.get_close_matches(entry.removeprefix("^"), sorted(parts), n=3)
    template = Template("{key}: {entry} matches no layer of this model; `lora-fp8 plan` lists the layers")
    if near:
        template = Template("{key}: {entry} matches no layer of this model; did you mean {names}?")
    return template(key=setting, entry=repr(entry), names=" or ".join(map(repr, near)))


# -- sizes -------------------------------------------------------------------------------------------------------------


def choose_held_dtype(denoiser: nn.Module, name: str, dtype: torch.dtype) -> torch.dtype:
    """Return `dtype`, or float32 if the model's class keeps this module in it (`_keep_in_fp32_modules`)."""
    precise = getattr(denoiser, "_keep_in_fp32_modules", None) or ()
    return torch.float32 if any(part in precise for part in name.split(".")) else dtype


def _count_total_bytes(denoiser: nn.Module, counted: Mapping[nn.Module, int], dtype: torch.dtype) -> int:
    """Return the bytes of all parameters and buffers as planned.

    Args:
        denoiser: the model.
        counted: bytes of the layers that have a plan.
        dtype: compute dtype, as in `decide`.
    """
    total, seen = 0, set()
    for name, module in denoiser.named_modules():
        if module in counted:
            total += counted[module]
            continue
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            casts = tensor.is_floating_point() and not _is_computed(module, tensor)
            total += tensor.numel() * (choose_held_dtype(denoiser, name, dtype) if casts else tensor.dtype).itemsize
    return total


def _is_computed(module: nn.Module, tensor: torch.Tensor) -> bool:
    """Return True for a non-persistent buffer, which keeps the precision that its constructor computed."""
    return any(module._buffers.get(key) is tensor for key in module._non_persistent_buffers_set)


def _count_layer_bytes(layer: Layer, form: Format | None, held: torch.dtype, dtype: torch.dtype, backend: str) -> int:
    shape = compute_matrix_shape(layer)
    bias = 0 if layer.bias is None else shape[0] * (held if form is None else dtype).itemsize
    return bias + (count_bytes(backend, form, shape) if form is not None else shape[0] * shape[1] * held.itemsize)


def _count_plain_weights(module: nn.Module) -> int:
    if isinstance(module, FrozenLayer):
        return module.matrix_shape[0] * (module.matrix_shape[1] + (module.bias is not None))
    return sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None)


def _shorten_dtype(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(dtype, str(dtype))


def _format_backend(backend: str) -> str:
    return f" by {backend}" if backend not in ("", "own") else ""
