"""`lora-fp8 merge`: merges several LoRAs into one, or LoRAs into the weights of a base model.

LoRAs are merged without loss: the A's are stacked, and the B's, each multiplied by its weight and scale, are put side
by side. So B @ A is the weighted sum of the deltas, and the rank is the sum of the ranks. Averaging the A's and B's of
different LoRAs, as some tools do, would multiply one LoRA's A by the other's B.

Merging into a base model is streamed: the new file has the old one's header (names, dtypes, order). Each tensor is
copied, or gets its delta in float32 and is rounded once. No more than one tensor is in memory.
"""

import contextlib
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import families, settings, verify
from ..adapters import kinds
from ..common import system
from ..common.numbers import format_shape
from ..common.writing import sync_files, sync_folder, sync_folders, write_synced
from ..errors import Message, UserError, cannot_write, exists_already, first_few, reason
from ..families import _files
from ..lora_files import export, layer_names, layouts, safetensors_file
from ..lora_files.layer_names import find_text_encoder
from . import pairs, resize
from .pairs import STALE, Lora, Pair

PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def parse_weighted(text: str) -> tuple[Path, float]:
    """Parse `file:0.7` into a file and its weight, which is 1 if none is given.

    Raises:
        UserError: the weight is not a finite number, or is 0.
    """
    if Path(text).exists():
        return Path(text), 1.0
    name, colon, number = text.rpartition(":")
    try:
        weight = float(number) if colon and name else 1.0
    except ValueError:
        if not Path(name).is_file():
            return Path(text), 1.0  # the colon is part of the name; reading the file reports that it does not exist
        weight = math.nan
    if not math.isfinite(weight) or weight == 0:
        raise UserError(
            Message(
                "{text}: the weight is not a finite number other than 0; write it as in {name}:0.7",
                text=text,
                name=name,
            )
        )
    return Path(name if colon and name else text), weight


def concatenate(loras: Sequence[Lora], weights: Sequence[float]) -> dict[str, Pair]:
    """Return float32 pairs whose deltas are the weighted sums of the LoRAs' deltas.

    Raises:
        UserError: a layer's shape differs between them.
    """
    parts: dict[str, list[tuple[Pair, float]]] = {}
    for lora, weight in zip(loras, weights, strict=True):
        for module, pair in lora.pairs.items():
            parts.setdefault(module, []).append((pair, weight))
    merged = {}
    for module, weighted_pairs in parts.items():
        shapes = {pair.shape for pair, _ in weighted_pairs}
        if len(shapes) > 1:
            both_shapes = " and ".join(format_shape(shape) for shape in sorted(shapes))
            raise UserError(
                Message("{name} is {told}: these LoRAs have different architectures", name=module, told=both_shapes)
            )
        a = torch.cat([pair.a.float() for pair, _ in weighted_pairs])
        b = torch.cat([pair.b.float() * (pair.scale * weight) for pair, weight in weighted_pairs], 1)
        merged[module] = Pair(a, b)
    return merged


def merge(
    sources: Sequence[tuple[Path, float]], output: Path, *, rank: int, energy: float, dtype: str
) -> resize.Report | None:
    """Write the weighted sum of LoRA files as one LoRA.

    Args:
        sources: files and their weights.
        output: the file to write.
        rank, energy: resize the sum, as `resize.shrink` does; 0 and 0 keep it exact, at the sum of the ranks.
        dtype: "bf16", "fp16" or "fp32"; empty: the widest of the files.

    Returns:
        The report of resizing, or None.

    Raises:
        UserError: there are fewer than two files, their layouts or shapes differ, or the output exists.
    """
    if len(sources) < 2:
        raise UserError(
            Message(
                "merging needs at least two LoRA files; give them with weights, such as a.safetensors:0.7 "
                "b.safetensors:0.5"
            )
        )
    loras = [pairs.read(path) for path, _ in sources]
    require_same_naming([path for path, _ in sources], loras)
    widest = max((lora.dtype for lora in loras), key=lambda held: torch.finfo(held).bits)
    held = pairs.parse_dtype(dtype, widest)
    merged_pairs = concatenate(loras, [weight for _, weight in sources])
    report = None
    if rank or energy:
        pairs.check_size(rank, energy)
        merged_pairs, report = resize.shrink(merged_pairs, rank, energy, uniform=False)
    origin = ", ".join(f"{path.name}:{weight:g}" for path, weight in sources)
    about = {**pairs.make_name_metadata(output), "modelspec.merged_from": origin, "lora_fp8_tool": f"merge of {origin}"}
    whole = replace(loras[0], pairs=merged_pairs, metadata=find_common_metadata(loras))
    pairs.write(whole, output, held, about)
    return report


def require_same_naming(paths: Sequence[Path], loras: Sequence[Lora]) -> None:
    """Check that files use the same names for layers and for the two matrices, and that their headers agree.

    Raises:
        UserError: there are two architectures, two layouts, or no names in common.
    """
    _refuse_two_architectures(paths, loras)
    for path, lora in zip(paths[1:], loras[1:], strict=True):
        # A LoRA of the text encoder alone and one of the denoiser share no layer but may have the same layout.
        alike = {_find_prefix(module) for module in loras[0].pairs} & {_find_prefix(module) for module in lora.pairs}
        if lora.halves != loras[0].halves or not alike:
            ours, theirs = next(iter(loras[0].pairs)), next(iter(lora.pairs))
            raise UserError(
                Message(
                    "{one} has layers such as {ours}, but {two} has layers such as {theirs}: only files with the "
                    "same layout can be merged; convert one of them",
                    one=paths[0].name,
                    ours=f"{ours}{loras[0].halves[0]}",
                    two=path.name,
                    theirs=f"{theirs}{lora.halves[0]}",
                )
            )


def _refuse_two_architectures(paths: Sequence[Path], loras: Sequence[Lora]) -> None:
    """Refuse files whose headers name architectures with other layers. Their sum would be a file for neither."""
    named = [(path.name, verify.read_family_name(lora.metadata)) for path, lora in zip(paths, loras, strict=True)]
    known = [(name, families.get(family)) for name, family in named if family]
    for name, family in known[1:]:
        first_name, first = known[0]
        # A UNet has its architecture's own blocks and widths; other classes are shared by models and their variants.
        same = family.denoiser_class == first.denoiser_class and (first.denoiser_name != "unet" or family is first)
        if not same:
            raise UserError(
                Message(
                    "{one} is for {ours}, but {two} is for {theirs}: only LoRAs of one architecture can be merged",
                    one=first_name,
                    ours=first.title,
                    two=name,
                    theirs=family.title,
                )
            )


def _find_prefix(module: str) -> str:
    """Return the start of a layer's name: "lora" for kohya's, else the part before the first dot."""
    return "lora" if module.startswith("lora_") else module.partition(".")[0]


def find_common_metadata(loras: Sequence[Lora]) -> dict[str, str]:
    """Return the metadata that are equal in all files, and so still hold for a merged file."""
    first, *others = (lora.metadata for lora in loras)
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


# -- into a base model


@dataclass(frozen=True)
class Merged:
    """The result of merging into a base: number of changed layers, and the files written."""

    layers: int
    files: list[Path]


def merge_into_base(
    sources: Sequence[tuple[Path, float]], base: str, output: Path, *, family_name: str = "", components: str = ""
) -> Merged:
    """Write a base model with the LoRAs merged into its weights.

    Args:
        sources: LoRA files and their weights.
        base: diffusers folder or hub id (the output is a whole diffusers folder), or a single .safetensors file.
        output: folder or file to write.
        family_name: architecture; empty: take it from the first LoRA's metadata.
        components: as `model.components`, for a single file.

    Raises:
        UserError: the architectures differ, the base is quantized or lacks a layer, or the output exists.
    """
    if output.exists():
        raise exists_already(output)
    loras = [export.read_adapter(path) for path, _ in sources]
    family_name = family_name or verify.read_family_name(loras[0][1])
    if not family_name:
        accepted = " | ".join(families.list_families())
        raise UserError(
            Message(
                "{path} does not name its architecture; give it with --family ({names})",
                path=sources[0][0],
                names=accepted,
            )
        )
    section = settings.Model(family=family_name, path=base, components=components)
    family = families.get(family_name)(section, device="cpu", dtype=torch.float32)
    family.fetch_weights()
    adapters = [(tensors, weight) for (tensors, _), (_, weight) in zip(loras, sources, strict=True)]
    deltas = _collect_changes(adapters, family)
    places = _find_places(family)
    if any(find_text_encoder(name, family) for name in deltas):
        places |= _find_text_places(family)
    _check_places(deltas, places, base)
    # A text encoder that no LoRA changes is copied unchanged.
    parts = {find_text_encoder(name, family) for name in deltas} | {""}
    files = sorted({place.file for name, place in places.items() if find_text_encoder(name, family) in parts})
    for path in files:
        _refuse_quantized(path)

    changes: dict[Path, dict[str, list[tuple[_Place, list[_Change]]]]] = {path: {} for path in files}
    for name, layer_changes in deltas.items():
        place = places[name]
        changes[place.file].setdefault(place.key, []).append((place, layer_changes))
    origin = ", ".join(f"{path.name}:{weight:g}" for path, weight in sources)
    about = {"modelspec.merged_from": origin}
    if family.checkpoint:
        _make_folder(output.parent)
        _rewrite(family.checkpoint, output, changes[family.checkpoint], about)
        return Merged(len(deltas), [output])
    copied = [family.folder / (part or family.denoiser_name) for part in parts]
    with _making_folder(output) as folder:
        _copy_without_weights(family.folder, copied, folder)
        for source in files:
            _rewrite(source, folder / source.relative_to(family.folder), changes[source], about)
    return Merged(len(deltas), [output / source.relative_to(family.folder) for source in files])


@dataclass(frozen=True)
class _Change:
    """An adapter of any kind on one layer: its tensors, alpha / rank, and the weight that the user gave it."""

    parts: dict[str, Tensor]
    scaling: float
    strength: float

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the layer's weight as a matrix."""
        return kinds.infer_weight_shape(self.parts)

    def compute_delta(self, weight: Tensor) -> Tensor:
        """Return the change of the weight. DoRA's depends on the weight; several add up, as in other programs."""
        return kinds.compute_weight_change(weight, self.parts, self.scaling, self.strength)


@dataclass(frozen=True)
class _Place:
    """Where a diffusers tensor is stored: file, name there, shape in diffusers, and selection of the rows there."""

    file: Path
    key: str
    shape: tuple[int, ...]
    rows: Callable[[Tensor], Tensor] | None = None


@contextlib.contextmanager
def _making_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder beside a new one, which it becomes at the end: half a model would look like a whole one."""
    hidden = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    _make_folder(folder.parent)
    try:
        yield hidden
        try:
            sync_files([path for path in hidden.rglob("*") if path.is_file()])
            sync_folders(hidden)
            system.rename(hidden, folder)
            sync_folder(folder.parent)
        except OSError as error:
            raise cannot_write(error.filename or folder, error) from None
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def _collect_changes(adapters: Sequence[tuple[Mapping[str, Tensor], float]], family: Any) -> dict[str, list[_Change]]:
    """Return the changes of each weight of the base.

    Args:
        adapters: tensors of each LoRA file, and the weight that the user gave it.
        family: the base.

    Raises:
        UserError: a file is for another architecture, or holds half a pair.
    """
    deltas: dict[str, list[_Change]] = {}
    for tensors, weight in adapters:
        state, scaling = layouts.from_layout(tensors, family, family.read_denoiser_config())
        layouts.list_modules(state)  # raises UserError for half a pair
        for module, parts in kinds.group_by_layer(state).items():
            deltas.setdefault(f"{module}.weight", []).append(_Change(parts, scaling[module], weight))
    return deltas


def _check_places(deltas: Mapping[str, list[_Change]], places: Mapping[str, _Place], base: str) -> None:
    """Check that the base has each changed weight, in the same shape.

    Raises:
        UserError: it has not.
    """
    if lost := sorted(name.removesuffix(".weight") for name in deltas.keys() - places.keys()):
        raise UserError(
            Message("{path} has no layer {names}, so the LoRA is for another model", path=base, names=first_few(lost))
        )
    for name, layer_changes in deltas.items():
        rows, *columns = places[name].shape
        if wrong := next(
            (change.shape for change in layer_changes if not kinds.fits_shape(change.parts, (rows, *columns))), None
        ):
            raise UserError(
                Message(
                    "{name} is {rows} x {columns} in {base}, but {other_rows} x {other_columns} in the LoRA, which "
                    "is for another model",
                    name=name,
                    rows=rows,
                    columns=math.prod(columns),
                    base=base,
                    other_rows=wrong[0],
                    other_columns=wrong[1],
                )
            )


def _find_places(family: Any) -> dict[str, _Place]:
    shapes = {name: tuple(tensor.shape) for name, tensor in family.outline.state_dict().items()}
    if family.checkpoint:
        header = _files.read_header(family.checkpoint)
        made = family.convert_checkpoint(header)
        return {
            name: _Place(family.checkpoint, key, shapes[name], rows)
            for name, (key, rows) in made.items()
            if name in shapes
        }
    paths = _files.find_weight_files(family.folder / family.denoiser_name, "diffusion_pytorch_model")
    return {name: _Place(path, name, shape) for path in paths for name, shape in _files.read_header(path).items()}


OPEN_CLIP = {"self_attn.out_proj": "attn.out_proj", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
"""CLIP's layers -> their names in OpenCLIP, in single files; OpenCLIP's attn.in_proj_weight holds q, k and v."""


def _find_text_places(family: Any) -> dict[str, _Place]:
    """Return the places, as `_find_places` does, of the weights that LoRAs of text encoders change.

    Raises:
        UserError: a single file does not contain its text encoders.
    """
    places: dict[str, _Place] = {}
    header = _files.read_header(family.checkpoint) if family.checkpoint else {}
    for encoder in family.trained_text:
        prefix = family.checkpoint_text.get(encoder, "")
        if not family.checkpoint:
            for path in _files.find_weight_files(family.folder / encoder, "model"):
                for name, shape in _files.read_header(path).items():
                    places[layer_names.make_text_layer_name(encoder, name)] = _Place(path, name, shape)
            continue
        own = {key.removeprefix(prefix): shape for key, shape in header.items() if prefix and key.startswith(prefix)}
        if not own:
            raise UserError(
                Message(
                    "{path} has no {encoder}, but the LoRA changes it too; merge into a diffusers folder",
                    path=family.checkpoint,
                    encoder=encoder,
                )
            )
        for key, shape in own.items():
            for layer, place in _find_text_layers(key, prefix, shape, family.checkpoint):
                places[layer_names.make_text_layer_name(encoder, f"{layer}.weight")] = place
    return places


def _find_text_layers(key: str, prefix: str, shape: tuple[int, ...], file: Path) -> Iterator[tuple[str, _Place]]:
    """Yield (path of a layer in transformers, place of its weight) for the layers in a single file's tensor."""
    if match := re.search(r"text_model\.(encoder\.layers\.\d+\..+)\.weight$", key):
        yield match[1], _Place(file, prefix + key, shape)
    elif match := re.search(r"resblocks\.(\d+)\.attn\.in_proj_weight$", key):
        width = shape[0] // 3
        for i, name in enumerate(("q_proj", "k_proj", "v_proj")):
            rows = partial(_slice, i * width, (i + 1) * width)
            yield f"encoder.layers.{match[1]}.self_attn.{name}", _Place(file, prefix + key, (width, *shape[1:]), rows)
    elif match := re.search(r"resblocks\.(\d+)\.(.+)\.weight$", key):
        for ours, theirs in OPEN_CLIP.items():
            if match[2] == theirs:
                yield f"encoder.layers.{match[1]}.{ours}", _Place(file, prefix + key, shape)


def _slice(begin: int, end: int, tensor: Tensor) -> Tensor:
    return tensor[begin:end]


def _refuse_quantized(path: Path) -> None:
    entries, _ = _files.read_entries(path)
    wrong = {name: entry.dtype for name, entry in entries.items() if entry.dtype not in PLAIN}
    weights = sorted(name for name, kind in wrong.items() if kind not in ("I64", "I32", "BOOL"))
    if weights:
        raise UserError(
            Message(
                "{path} stores {name} in {dtype}, which would round away the small changes of a LoRA; merge into "
                "the same model in bf16, fp16 or fp32, and quantize the result",
                path=path,
                name=weights[0],
                dtype=wrong[weights[0]],
            )
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            Message("{path}: the folder cannot be created ({why})", path=folder, why=reason(error))
        ) from None


def _copy_without_weights(folder: Path, parts: Sequence[Path], output: Path) -> None:
    """Copy a diffusers folder without the weights of these parts, including unused variants of them."""

    def find_left_out(place: str, names: list[str]) -> list[str]:
        weights = (".safetensors", ".bin", ".ckpt", ".pt", ".pth")
        return [name for name in names if Path(place) in parts and name.endswith(weights)]

    try:
        shutil.copytree(folder, output, ignore=find_left_out)
    except OSError as error:
        raise cannot_write(output, error) from None


def _rewrite(
    source: Path,
    target: Path,
    changes: Mapping[str, Sequence[tuple[_Place, Sequence[_Change]]]],
    about: Mapping[str, str],
) -> None:
    """Copy a safetensors file tensor by tensor and add the deltas, atomically."""
    header = safetensors_file.read_header(source)
    metadata = {key: value for key, value in header.metadata.items() if key not in STALE} | dict(about)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(source, "rb") as read, write_synced(temporary) as write:
            write.write(safetensors_file.make_header(header.entries, metadata))
            for name, entry in sorted(header.entries.items(), key=lambda item: item[1]["data_offsets"]):
                begin, end = entry["data_offsets"]
                read.seek(header.data_begin + begin)
                if name not in changes:
                    _copy(read, write, end - begin)
                    continue
                data = bytearray(read.read(end - begin))
                held = torch.frombuffer(data, dtype=PLAIN[entry["dtype"]]).reshape(entry["shape"])
                for place, weight_changes in changes[name]:
                    _add_(held, place, weight_changes)
                write.write(data)
        system.replace(temporary, target)
    except OSError as error:
        raise cannot_write(target, error) from None
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(target.parent)


def _copy(read: Any, write: Any, size: int) -> None:
    for begin in range(0, size, 1 << 24):
        write.write(read.read(min(1 << 24, size - begin)))


def _add_(held: Tensor, place: _Place, weight_changes: Sequence[_Change]) -> None:
    """Add the deltas to a tensor as the file stores it, in float32; a fused tensor gets them in the right rows."""
    wide = torch.promote_types(held.dtype, torch.float32)
    rows: Any = slice(None)
    if place.rows is not None:
        # The family's function selects and reorders rows; applied to row numbers, it shows which and in what order.
        numbers = torch.arange(held.shape[0]).reshape(-1, *(1 for _ in held.shape[1:]))
        rows = place.rows(numbers).flatten()
    weight = held[rows].to(wide)
    total = sum(change.compute_delta(weight) for change in weight_changes)
    assert isinstance(total, Tensor)
    held[rows] = (weight + total).to(held.dtype)
