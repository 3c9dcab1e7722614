"""Reads the weights of one safetensors file, quantized ones with their scales, and refuses unknown formats.

An FP8 weight is its code times a scale. These layouts are known, each from the program that writes it:

| layout | scale of `<layer>.weight` | also in the file |
|---|---|---|
| ComfyUI, older | `<layer>.scale_weight`, one value | a tensor `scaled_fp8`, whose dtype is that of the codes |
| ComfyUI, newer | `<layer>.weight_scale`, one value or one per row | JSON: `<layer>.comfy_quant`, as bytes, or \
`_quantization_metadata` of all layers in the header |
| convert_to_quant | the newer names; per row, or per square block | the same |
| musubi-tuner, sd-scripts `fp8_scaled` | `<layer>.scale_weight`: (N, K / 64, 1), (N, 1) or one value | |
| sd-scripts `fp8_base`, many published files | none: the code is the weight | |

Nothing is guessed. An FP8 weight without a scale is read unscaled only if no tensor of the file has a scale. Integer
weights, and formats or companion tensors that are not in this table, are errors.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ..common.numbers import format_shape
from ..errors import Message, Template, UserErrors
from ..precision import Quantized, Weight
from . import _files

ADVICE = Message("give the same model in bf16 or fp16, or in fp8 as ComfyUI or kohya's tools write it")

_PLAIN = ("F64", "F32", "F16", "BF16")
_FP8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
_FORMATS = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fn_rowwise": torch.float8_e4m3fn,
    "float8_e4m3fn_blockwise": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_MARKERS = {**_FP8, "F32": torch.float8_e4m3fn}  # ComfyUI takes a float32 marker for e4m3
_SCALES = (".scale_weight", ".weight_scale")
# Scales of the activations in ComfyUI's FP8 matmul; they do not change the weight.
_OF_INPUTS = (".scale_input", ".input_scale")
# Entries of a layer's description that do not change what the weight is.
_HARMLESS = {"format", "full_precision_matrix_mult", "group_size", "block_size", "orig_dtype", "orig_shape"}
UNREAD = Template("is quantized as {kind}, which is not supported")
GPTQ = Message("GPTQ or AWQ")
_FOREIGN = {
    ".weight_scale_2": "NVFP4",
    ".weight_scalar": "MXFP8",
    ".weight_scale_inv": Message("FP8 with weight_scale_inv"),
    ".pre_quant_scale": Message("a format with pre_quant_scale"),
    ".weight_zero": "AWQ",
    ".weight_zeros": "AWQ",
    ".weight_s_rel": "W4A8",
    ".weight.quant_state.bitsandbytes__nf4": "bitsandbytes' NF4",
    ".weight.quant_state.bitsandbytes__fp4": "bitsandbytes' FP4",
    ".weight.absmax": Message("bitsandbytes' 4 bits"),
    ".SCB": "bitsandbytes' int8",
    ".weight._data": "quanto",
    "._weight_qdata": "torchao",
    ".wscales": Message("nunchaku's 4 bits"),
    ".qzeros": GPTQ,
    ".qweight": GPTQ,
}
_DIFFUSION_MODEL = "model.diffusion_model."
_SMALL = 2**16
"""Number of weights up to which a tensor is small: all small ones of a model take some MB."""
_SAMPLED = (16, 64)
"""(tensors, rows of each) that are sampled to estimate how much of a file is zero."""


class WeightFile:
    """A safetensors file. Opening it reads its header and the descriptions of quantized layers, but no weights.

    Args:
        path: the file.
        absent: files that are not on this machine yet: of those only the header is known, and reading is an error.

    Attributes:
        path: the file.
        header: names and shapes of its tensors, without the companions of quantized ones.
        scaled: True if any of its weights has a scale.
        metadata: text entries of its header.

    Raises:
        UserErrors: it is not a complete safetensors file, or holds weights that would be read wrongly. Each kind of
            problem is listed once, with the first tensor's name.
    """

    def __init__(self, path: Path, absent: _files.Absentees = MappingProxyType({})):
        self.path = path
        self._problems: dict[str, list[str]] = {}
        entries, metadata = _files.read_entries(path, absent)
        self._entries, self.metadata = entries, metadata
        companions = {name for name in entries if name.endswith((*_SCALES, *_OF_INPUTS, ".comfy_quant"))}
        markers = {name for name in entries if name == "scaled_fp8" or name.endswith(".scaled_fp8")}
        self.header = {name: entry.shape for name, entry in entries.items() if name not in companions | markers}

        formats = self._read_formats(metadata)
        self._scale_of = self._find_scales()
        self.scaled = bool(self._scale_of)
        self._fp8 = self._find_codes(formats)
        self._blocks = {weight: self._find_block(weight) for weight in self._scale_of if weight in self._fp8}
        self._check_scales(markers, formats)
        if self._problems:
            raise UserErrors([_describe(path, names, what) for what, names in self._problems.items()])

    @property
    def is_here(self) -> bool:
        """Return True if the file is on this machine."""
        return self.path.is_file()

    def read(self, name: str) -> Weight:
        """Read a tensor of `header`. FP8 matrices are returned as `Quantized`, other FP8 tensors as float32.

        Raises:
            UserErrors: the codes hold NaN or infinity, or the scales do or are negative.
        """
        ((_, weight),) = self.read_all([name])
        return weight

    def read_all(
        self, names: Iterable[str], rows: Iterable[slice | None] = itertools.repeat(None)
    ) -> Iterator[tuple[str, Weight]]:
        """Yield (name, tensor) of tensors of `header`, one at a time, as `read` returns them.

        Args:
            names: of the tensors.
            rows: the rows to read of each; None: all.
        """
        _files.require_here(self.path)
        # A file of its own for each large tensor: pages that were read count as memory until the file is closed and no
        # tensor of it is held, so that one bias would keep gigabytes.
        with safe_open(self.path, framework="pt") as shared:
            for name, own in zip(names, rows, strict=False):
                if math.prod(self.header[name]) <= _SMALL:
                    yield name, self._read(shared, name, own)
                else:
                    with safe_open(self.path, framework="pt") as file:
                        weight = self._read(file, name, own)
                    yield name, weight
                    del weight

    def _read(self, file: Any, name: str, rows: slice | None) -> Weight:
        tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        if name not in self._fp8:
            return tensor
        scale = torch.ones(1, 1)
        if name in self._scale_of:
            scale = file.get_tensor(self._scale_of[name]).to(torch.float32).reshape(self._blocks[name])
        if not (scale.isfinite() & (scale >= 0)).all():
            self._refuse(
                self._scale_of[name], Message("contains NaN, infinity or numbers below zero, so the file is damaged")
            )
        if rows is not None and len(scale) > 1:
            scale = scale.repeat_interleave(self.header[name][0] // len(scale), dim=0)[rows]
        codes = tensor.view(self._fp8[name])
        if tensor.numel() and _has_nonfinite(codes):
            self._refuse(name, Message("contains NaN or infinity, so the file is damaged"))
        if codes.ndim == 2:
            return Quantized(codes, scale)
        if not codes.numel():
            return codes.to(torch.float32)
        return (
            Quantized(codes.reshape(codes.shape[0] if codes.ndim else 1, -1), scale).dequantize().reshape(codes.shape)
        )

    def read_dequantized(self, name: str) -> Tensor:
        """Read a tensor as `read` does, but dequantize what is quantized to float32."""
        weight = self.read(name)
        return weight.dequantize() if isinstance(weight, Quantized) else weight

    def get_scale_shape(self, name: str) -> tuple[int, int]:
        """Return (rows, columns) of the scales of a tensor of `header`; (1, 1) if it has one or none."""
        return self._blocks.get(name, (1, 1))

    def list_block_scales(self) -> list[str]:
        """List the block that shares a scale in each blockwise e4m3 matrix: "1x64", "1x128" or "128x128"."""
        blocks = []
        for name, (rows, columns) in self._blocks.items():
            shape = self.header[name]
            if len(shape) == 2 and columns > 1 and self._fp8[name] == torch.float8_e4m3fn:
                blocks.append(f"{shape[0] // rows}x{shape[1] // columns}")
        return [block for block in blocks if block in ("1x64", "1x128", "128x128")]

    def list_notes(self) -> list[str]:
        """Return what users must know before training on this file; reads a few rows."""
        names = [name for name in self._fp8 if len(self.header[name]) == 2]
        if not names or self.scaled or not self.is_here:
            return []
        num, rows = _SAMPLED
        with safe_open(self.path, framework="pt") as file:
            taken = [file.get_slice(name)[:rows].view(torch.uint8) for name in names[:: -(-len(names) // num)]]
        zeros = sum(int((codes.bitwise_and(0x7F) == 0).sum()) for codes in taken) / sum(
            codes.numel() for codes in taken
        )
        return [
            Message(
                "{path} is fp8 without scales, so small weights are rounded coarsely or to zero: about {share} % of "
                "a sample are zero; a bf16, fp16 or scaled fp8 file of this model is more precise",
                path=self.path,
                share=f"{100 * zeros:.1f}",
            )
        ]

    # -- formats that the file states ------------------------------------------------------------------------------
    def _read_formats(self, metadata: dict[str, str]) -> dict[str, torch.dtype]:
        """Return weight -> dtype of its codes, for the layers that the file describes as quantized."""
        described: dict[str, Any] = {}
        if "_quantization_metadata" in metadata:
            content = _parse_json(metadata["_quantization_metadata"])
            layers = content.get("layers")
            if not isinstance(layers, dict):
                self._add_problem("_quantization_metadata", Message("cannot be read"))
            for layer, description in layers.items() if isinstance(layers, dict) else ():
                whole = layer if f"{layer}.weight" in self._entries else f"{_DIFFUSION_MODEL}{layer}"
                described[whole] = description
        names = [name for name in self._entries if name.endswith(".comfy_quant")]
        if names and self.is_here:  # before the download, the scales and dtypes alone say what is quantized
            with safe_open(self.path, framework="pt") as file:
                for name in names:
                    described[name.removesuffix(".comfy_quant")] = _parse_json(bytes(file.get_tensor(name).tolist()))
        formats = {}
        for layer, description in described.items():
            weight = f"{layer}.weight"
            kind = description.get("format") if isinstance(description, dict) else None
            odd = sorted(key for key, value in description.items() if value and key not in _HARMLESS) if kind else []
            if kind not in _FORMATS:
                self._add_problem(weight, UNREAD(kind=kind or Message("an unnamed format")))
            elif odd:
                self._add_problem(
                    weight,
                    Message("is quantized as {kind} with {odd}, which is not supported", kind=kind, odd=", ".join(odd)),
                )
            elif weight not in self._entries:
                self._add_problem(weight, Message("is described as quantized, but is not in the file"))
            else:
                formats[weight] = _FORMATS[kind]
        return formats

    def _find_scales(self) -> dict[str, str]:
        """Return weight -> name of its scale."""
        scales: dict[str, str] = {}
        for name in self._entries:
            suffix = next((suffix for suffix in _SCALES if name.endswith(suffix)), None)
            if suffix is None:
                continue
            weight = name.removesuffix(suffix) + ".weight"
            if weight not in self._entries:
                self._add_problem(name, Message("is a scale without its weight"))
            elif weight in scales:
                self._add_problem(weight, Message("has two scales"))
            else:
                scales[weight] = name
        return scales

    def _find_codes(self, formats: dict[str, torch.dtype]) -> dict[str, torch.dtype]:
        """Return tensor -> dtype of its codes for all FP8 tensors; notes a problem for other quantized weights."""
        reported = {name for names in self._problems.values() for name in names}
        for name in self.header:
            suffix = next((suffix for suffix in _FOREIGN if name.endswith(suffix)), None)
            weight = f"{name.removesuffix(suffix)}.weight" if suffix else ""
            if suffix and weight not in reported:
                reported.add(weight)
                self._add_problem(weight, UNREAD(kind=_FOREIGN[suffix]))
        codes = {}
        for name in self.header:
            kind = self._entries[name].dtype
            if name in reported:
                continue
            if kind in _FP8 and formats.get(name, _FP8[kind]) == _FP8[kind]:
                codes[name] = _FP8[kind]
            elif kind == "U8" and name in formats:  # early files of ComfyUI's newer layout store the codes as bytes
                codes[name] = formats[name]
            elif name in formats:
                self._add_problem(
                    name,
                    Message(
                        "is {kind}, but its description says {told}", kind=kind, told=_shorten_dtype(formats[name])
                    ),
                )
            elif kind not in _PLAIN and name.endswith(".weight"):
                self._add_problem(
                    name, Message("is stored in {kind}, a quantized type that is not supported", kind=kind)
                )
            elif name in self._scale_of:
                self._add_problem(name, Message("is {kind} and has a scale, which is not supported", kind=kind))
        return codes

    def _find_block(self, weight: str) -> tuple[int, int]:
        """Return the shape (rows, columns) of a weight's scale, with one value per block of the weight."""
        shape, scale = self._entries[weight].shape, self._entries[self._scale_of[weight]]
        size = torch.Size(scale.shape).numel()
        if scale.dtype not in _PLAIN:
            self._add_problem(
                weight, Message("has a scale of dtype {kind} (MXFP8?), which is not supported", kind=scale.dtype)
            )
        elif size == 1:
            return 1, 1
        elif shape and scale.shape[:1] == shape[:1] and size == shape[0]:
            return shape[0], 1
        elif len(shape) == 2 and len(scale.shape) in (2, 3) and scale.shape[2:] in ((), (1,)):
            rows, columns = scale.shape[:2]
            if rows and columns and shape[0] % rows == 0 and shape[1] % columns == 0:
                return rows, columns
            self._add_problem(
                weight,
                Message(
                    "has the shape {shape}, which the shape of its scale, {scale}, does not divide",
                    shape=format_shape(shape),
                    scale=format_shape(scale.shape),
                ),
            )
        else:
            self._add_problem(
                weight,
                Message(
                    "has the shape {shape} and a scale of shape {scale}, which is not supported",
                    shape=format_shape(shape),
                    scale=format_shape(scale.shape),
                ),
            )
        return 1, 1

    def _check_scales(self, markers: set[str], formats: dict[str, torch.dtype]) -> None:
        """Check that no FP8 tensor lacks its scale, and that the markers match the codes."""
        expected: dict[str, torch.dtype | None] = {}
        for marker in markers:
            stored = self._entries[marker].dtype
            if stored not in _MARKERS:
                self._add_problem(
                    marker, Message("marks scaled fp8, but is {kind}, which is not supported", kind=stored)
                )
            prefix = marker.removesuffix("scaled_fp8")
            expected |= {name: _MARKERS.get(stored) for name in self._fp8 if name.startswith(prefix)}
        for name, kind in self._fp8.items():
            if (marked := expected.get(name, kind)) not in (kind, None):
                self._add_problem(
                    name,
                    Message(
                        "is {kind}, but scaled_fp8 says {told}", kind=_shorten_dtype(kind), told=_shorten_dtype(marked)
                    ),
                )
            if name not in self._scale_of and (name in expected or name in formats or self._scale_of):
                what = Message("lacks its scale, although other weights in the file have one")
                if name in expected:
                    what = Message("lacks its scale, although scaled_fp8 says that it has one")
                elif name in formats:
                    what = Message("lacks its scale, although the file describes it as quantized")
                self._add_problem(name, what)

    def _add_problem(self, name: str, what: str) -> None:
        self._problems.setdefault(what, []).append(name)

    def _refuse(self, name: str, what: str) -> None:
        raise UserErrors([_describe(self.path, [name], what)])


def _has_nonfinite(codes: Tensor) -> bool:
    # e4m3 has one NaN: all bits but the sign set. e5m2 has infinity and NaN where all exponent bits are set.
    first = 0xFF if codes.dtype == torch.float8_e4m3fn else 0xFC
    return int(codes.view(torch.uint8).bitwise_or(0x80).max()) >= first


def _parse_json(text: str | bytes) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError:  # an empty description becomes an error that names the layer
        return {}
    return content if isinstance(content, dict) else {}


def _shorten_dtype(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _describe(path: Path, names: list[str], what: str) -> Message:
    """Return the line about a problem of some tensors of a file: the first one's name, and how many others have it."""
    about = what if len(names) == 1 else Message("(and {count} more) {line}", count=len(names) - 1, line=what)
    return Message("{path}: {name} {line}; {advice}", path=path, name=names[0], line=about, advice=ADVICE)
