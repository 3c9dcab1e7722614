"""Writes and reads LoRA files: bytes, metadata and file names. `layouts` decides the names of the tensors.

The writer is our own (30 lines) because `safetensors.torch.save_file` writes metadata in random order; here the same
run gives the same bytes. A file contains no date, absolute path or user name. File names are
`<slug>_<layout>.safetensors`, where the slug is the ASCII part of the job's name without characters that are special in
prompts and shells; the metadata keep the full name. Sources: ModelSpec 1.0.1 (Stability AI), kohya-ss/sd-scripts'
metadata, the safetensors format.
"""

import hashlib
import json
import math
import os
import re
import struct
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import tomlkit
import torch
from torch import Tensor

from .. import __version__, settings
from ..adapters import kinds
from ..common.reading import open_regular
from ..common.text import first_few, is_utf8, shown
from ..common.writing import atomic_write, make_folder
from ..errors import Message, RunFailure, UserError
from ..precision.dtypes import DTYPES
from . import header as adapter_header
from .layouts import (
    in_our_words,
    to_layout,
)

SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
KEPT_WIDE = (".alpha", ".lora_magnitude_vector")
"""Suffixes of tensors that are float32 in every file. alpha is a setting; DoRA's magnitudes scale whole rows of the
base, which bf16 would change by 0.4 %."""
MAX_TAGS = 200  # per folder in ss_tag_frequency: clients show two dozen, and headers must stay small
MAX_TAG_BYTES = 256 << 10  # for all folders: whole sentences count as tags, and SDXL's layers take 0.5 MB of the header
MAX_HEADER = 1 << 20  # bytes; hosts refuse large headers, ours are far smaller
MOST_HEADER = 100_000_000  # bytes; the safetensors library's own limit
LEGACY_WINDOW = (0x100000, 0x10000)  # offset and size of the bytes that A1111's old hash covers


# -- facts about the run


@dataclass(frozen=True)
class FolderFacts:
    """A dataset folder, as the file's metadata describe it.

    Attributes:
        name: path of the folder; only its last part is written.
        num_images: images used, not counting repeats.
        repeats: how often each image is used per epoch.
        tags: tag -> number of captions that contain it.
    """

    name: str
    num_images: int
    repeats: int = 1
    tags: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def count(cls, name: str, captions: Iterable[str], repeats: int = 1, separator: str = ",") -> "FolderFacts":
        """Return the facts of a folder, counting the tags of its captions (one caption per image)."""
        captions = list(captions)
        tags = Counter(tag.strip() for caption in captions for tag in caption.split(separator) if tag.strip())
        return cls(name, len(captions), repeats, dict(tags))


@dataclass(frozen=True)
class ExportFacts:
    """Facts about a run for the file's metadata. All of them are written into a file that is meant to be published.

    Attributes:
        name: the job's name; gives the file name, and the title if the config has none.
        steps: optimizer steps done.
        rank: LoRA rank.
        alpha: LoRA alpha, as in the config (before any scaling).
        learning_rate: learning rate of the training, after scaling.
        text_encoder_lr: learning rate of the text encoders' adapters; None if they were not trained.
        learning_rate_factor: factor on the configured learning rate for the base's storage.
        seed: the job's seed.
        resolution: (width, height) in pixels.
        folders: the dataset.
        batch_size: images per optimizer step, accumulation included.
        optimizer, schedule, warmup_steps: as in the config.
        storage: storage of the frozen base ("fp8", "none", ...).
        mixed_precision: "bf16" or "no".
        base_name: the base model; of a path, only the last part is written.
        base_hash: sha256 hex over the base's denoiser files.
        kind: kind of adapter: "lora", "dora", "lokr", "loha".
        kind_settings: entries of `ss_network_args` about the kind.
        prediction_type: "epsilon" or "v_prediction"; None for flow matching.
        trigger: the trigger word.
        tags: ModelSpec tags.
        dropout, min_snr_gamma, noise_offset, max_grad_norm, caption_dropout: as in the config.
        buckets: {(width, height): images}.
        config_toml: the resolved config; of absolute paths, only the last part is written.
    """

    name: str
    steps: int
    rank: int
    alpha: float
    learning_rate: float
    seed: int
    resolution: tuple[int, int]
    learning_rate_factor: float = 1.0
    text_encoder_lr: float | None = None
    kind: str = "lora"
    kind_settings: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[FolderFacts, ...] = ()
    batch_size: int = 1
    optimizer: str = ""
    schedule: str = ""
    warmup_steps: int = 0
    storage: str = ""
    mixed_precision: str = "bf16"
    base_name: str = ""
    base_hash: str = ""
    prediction_type: str | None = None
    trigger: str = ""
    tags: tuple[str, ...] = ()
    dropout: float = 0.0
    min_snr_gamma: float = 0.0
    noise_offset: float = 0.0
    max_grad_norm: float = 0.0
    caption_dropout: float = 0.0
    buckets: Mapping[tuple[int, int], int] = field(default_factory=dict)
    config_toml: str = ""


# -- writing and reading


@dataclass(frozen=True)
class Adapter:
    """A trained adapter.

    Attributes:
        state: tensors in internal naming (see `layouts`).
        scaling: alpha / rank, one for all modules or `{module path: scaling}`.
    """

    state: Mapping[str, Tensor]
    scaling: Mapping[str, float] | float = 1.0


def write(
    adapter: Adapter,
    family: Any,
    denoiser_config: Mapping[str, Any],
    section: settings.Export,
    facts: ExportFacts,
    folder: Path,
) -> list[Path]:
    """Write the trained adapter, one file per layout in `section.formats`.

    Args:
        adapter: the adapter.
        family: the ModelFamily or its class (its naming and identifiers are read).
        denoiser_config: the denoiser's diffusers config.
        section: the job's `[export]` table.
        facts: facts about the run for the metadata.
        folder: created if it is missing; files of the same name are replaced as a whole.

    Returns:
        The files, in the order of `section.formats`.

    Raises:
        RunFailure: the adapter holds NaN or infinity, was never trained (B is zero), or does not fit fp16.
        UserError: the kohya layout has no name for a trained module.
    """
    _refuse_broken(adapter.state, "the trained adapter")
    make_folder(folder)
    contents = {}
    for layout in dict.fromkeys(section.formats):  # all layouts are prepared before any is written
        tensors = to_layout(adapter.state, adapter.scaling, family, denoiser_config, layout)
        dtype = DTYPES[section.dtype]
        contents[layout] = {k: v if k.endswith(KEPT_WIDE) else v.to(dtype) for k, v in tensors.items()}
        _refuse_broken(contents[layout], f"the {layout} file in {section.dtype}")
    paths = []
    for layout, tensors in contents.items():
        path = folder / f"{slug(facts.name)}_{layout}.safetensors"
        write_file(path, tensors, metadata(family, section, facts, layout), hashes=True)
        paths.append(path)
    return paths


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], *, hashes: bool = False) -> str:
    """Write a safetensors file atomically; its bytes depend on nothing but its content.

    Metadata keys are sorted. Tensors are sorted by element size, then by name, as in the safetensors library: sorted by
    name alone, a float32 tensor after an odd number of bf16 values would not be aligned. The header is padded with
    spaces so that the data begins at a multiple of 8.

    Args:
        path: the file.
        tensors: tensors by name.
        metadata: metadata; values must be strings.
        hashes: add `sshs_model_hash` and `modelspec.hash_sha256` (of all bytes after the header) and
            `sshs_legacy_hash`.

    Returns:
        sha256 hex of all bytes after the header.
    """
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise TypeError(f"metadata {key!r} is a {type(value).__name__}: safetensors metadata are strings")
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    data, entries = bytearray(), {}
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        begin = len(data)
        data += tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = SAFETENSORS_DTYPES[tensor.dtype]
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [begin, len(data)]}
    sha = hashlib.sha256(data).hexdigest()
    written = dict(metadata)
    if hashes:
        written["sshs_model_hash"] = sha
        written["modelspec.hash_sha256"] = "0x" + sha
        # The header's length does not depend on the hash's value, so a placeholder is enough to find the window. Unlike
        # kohya's, this is the hash that A1111 computes from the file; a file that ends before the window gets none.
        written["sshs_legacy_hash"] = "0" * 8
        offset, size = LEGACY_WINDOW
        begin = offset - len(_header(entries, written))
        if 0 <= begin < len(data):
            written["sshs_legacy_hash"] = hashlib.sha256(data[begin : begin + size]).hexdigest()[:8]
        else:
            del written["sshs_legacy_hash"]
    atomic_write(path, _header(entries, written) + data)
    return sha


def _header(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    content = {"__metadata__": dict(sorted(metadata.items())), **entries} if metadata else dict(entries)
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True)
class Header:
    """A safetensors header: metadata, tensors (dtype, shape, data_offsets), and the offset where the data begins."""

    metadata: dict[str, str]
    entries: dict[str, dict[str, Any]]
    data_begin: int


def read_header(path: Path) -> Header:
    """Read and check a safetensors header: the file must hold exactly the bytes that the header describes.

    Raises:
        UserError: there is no such file; it is not a safetensors file, is truncated, or has bytes that belong to no
            tensor; or its names occur twice or are not UTF-8.
    """

    def unique(named: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(named)
        if len(found) < len(named):
            twice = next(name for name, count in Counter(name for name, _ in named).items() if count > 1)
            raise UserError(Message("{path}: its header names {name} twice", path=path, name=shown(twice)))
        return found

    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
            if not 2 <= length <= size - 8:
                raise UserError(
                    Message(
                        "{path}: not a whole safetensors file (its header would end outside of the file)", path=path
                    )
                )
            if length > MOST_HEADER:
                raise UserError(
                    Message(
                        "{path}: its header takes {length} bytes, and at most {most} are read",
                        path=path,
                        length=length,
                        most=MOST_HEADER,
                    )
                )
            content = json.loads(file.read(length), object_pairs_hook=unique)
    except OSError as error:
        raise UserError(Message("{path}: cannot be read ({why})", path=path, why=error.strerror)) from None
    except (ValueError, RecursionError):  # JSON and UTF-8 errors, or brackets nested a thousand deep
        raise UserError(Message("{path}: not a safetensors file (its header is not JSON)", path=path)) from None
    if not isinstance(content, dict):
        raise UserError(Message("{path}: not a safetensors file (its header is not a JSON object)", path=path))
    metadata = _take_metadata(content, path)
    size_by_header = 8 + length + _data_size(content, path)
    if size_by_header != size:
        problem = "is cut short" if size < size_by_header else "has bytes that belong to no tensor"
        raise UserError(
            Message(
                "{path}: {problem}: {said} bytes by its header, {size} in the file",
                path=path,
                problem=problem,
                said=size_by_header,
                size=size,
            )
        )
    return Header(metadata, content, 8 + length)


def _take_metadata(content: dict[str, Any], path: Path) -> dict[str, str]:
    """Remove the metadata from a header's content, and return them.

    Raises:
        UserError: they are not text by name, or a name or text is not UTF-8.
    """
    found = content.pop("__metadata__", None) or {}
    if not isinstance(found, dict):
        raise UserError(Message("{path}: not a safetensors file (its metadata are not a JSON object)", path=path))
    wrong = [key for key, value in found.items() if not isinstance(value, str)]
    if wrong:
        raise UserError(
            Message("{path}: metadata that are not text: {names}", path=path, names=", ".join(sorted(wrong)))
        )
    if wrong := [text for text in (*found, *found.values(), *content) if not is_utf8(text)]:
        raise UserError(
            Message("{path}: its header has text that is not UTF-8: {name}", path=path, name=shown(wrong[0]))
        )
    return found


def _data_size(entries: dict[str, Any], path: Path) -> int:
    """Return the bytes of all tensors by their `data_offsets`.

    Raises:
        UserError: a tensor has none, or they overlap or leave a gap.
    """
    end = 0
    try:
        for begin, stop in sorted(entry["data_offsets"] for entry in entries.values()):
            if begin != end or stop < begin:
                raise UserError(Message("{path}: tensors overlap or leave a gap at byte {end}", path=path, end=end))
            end = stop
    except (KeyError, TypeError, ValueError):
        raise UserError(Message("{path}: not a safetensors file (a tensor has no data_offsets)", path=path)) from None
    return end


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a safetensors file.

    Returns:
        Tensors on the CPU, and the metadata.

    Raises:
        UserError: see `read_header`.
    """
    header = read_header(path)
    try:
        return safetensors.torch.load_file(path), header.metadata
    except (safetensors.SafetensorError, AttributeError, KeyError) as error:  # a dtype that this torch does not have
        raise UserError(Message("{path}: not a safetensors file ({why})", path=path, why=error)) from None
    except OSError as error:
        raise UserError(Message("{path}: cannot be read ({why})", path=path, why=error.strerror or error)) from None


UNREAD = (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)
"""Dtypes of scales and of packed weights, with which torch cannot compute."""


def read_adapter(path: Path, *, sound: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read a file that should be an adapter, as `read` does.

    alpha in the header (see `header`) becomes tensors and is removed from the metadata: code that writes these tensors
    again writes alpha with them, or has multiplied it into the weights.

    Args:
        path: the file.
        sound: refuse an adapter that has no effect or is broken. False: only describe the file, accept broken ones.

    Raises:
        UserError: also if tensors cannot belong to an adapter: they are empty, of integers, an alpha that is not a
            single number, or have unprintable names. With `sound`, also for NaN, infinity, and an alpha of 0 in all
            layers.
    """
    tensors, metadata = read(path)
    words = {in_our_words(name): tensor for name, tensor in tensors.items()}
    try:
        tensors |= adapter_header.alphas_of(words, metadata, kinds.ALL_PARTS)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    metadata.pop(adapter_header.KEY, None)
    for what, wrong in _unusable(tensors).items():
        if wrong:
            raise UserError(
                Message(
                    "{path}: not a LoRA that can be used, it has {what}: {names}",
                    path=path,
                    what=what,
                    names=shown(first_few(sorted(wrong))),
                )
            )
    if sound:
        _check_sound(tensors, path)
    return tensors, metadata


def _unusable(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Return the names of the tensors that cannot belong to an adapter, by what is wrong with them."""
    alphas = {name: tensor for name, tensor in tensors.items() if name.endswith(".alpha")}
    weights = {name: tensor for name, tensor in tensors.items() if name not in alphas}
    return {
        "names that cannot be printed": [name for name in tensors if not name.isprintable()],
        "tensors without values": [name for name, tensor in tensors.items() if not tensor.numel()],
        "an alpha that is not one number": [n for n, one in alphas.items() if one.numel() > 1 or one.is_complex()],
        "whole or complex numbers": [name for name, one in weights.items() if not one.is_floating_point()],
        "numbers of a type that is not read": [name for name, one in tensors.items() if one.dtype in UNREAD],
    }


def _check_sound(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Check that an adapter has an effect.

    Raises:
        UserError: it holds NaN or infinity, or alpha is 0 in all layers.
    """
    if wrong := not_finite(tensors):
        raise UserError(
            Message(
                "{path}: not a LoRA that can be used, it has NaN or infinity: {names}",
                path=path,
                names=shown(first_few(wrong)),
            )
        )
    alphas = [tensor for name, tensor in tensors.items() if name.endswith(".alpha")]
    if alphas and not any(map(float, alphas)):
        raise UserError(Message("{path}: alpha is 0 in all layers, so that the file does nothing", path=path))


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the sorted names of the tensors that hold NaN or infinity."""
    # torch.isfinite does not support every float8 dtype.
    wide = ((name, one.float() if one.dtype.itemsize == 1 else one) for name, one in tensors.items())
    return sorted(name for name, tensor in wide if not torch.isfinite(tensor).all())


def payload_hash(path: Path) -> str:
    """Return the sha256 hex of all bytes after the header: the right `sshs_model_hash`, and Civitai's AutoV3."""
    begin = read_header(path).data_begin
    with open(path, "rb") as file:
        file.seek(begin)
        return hashlib.file_digest(file, "sha256").hexdigest()


def slug(name: str) -> str:
    """Return a file name that every shell, host and prompt syntax accepts: ASCII letters, digits, `.`, `_`, `-`."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-._")[:80].strip("-._")
    # a name in another script may have no ASCII part; the hash keeps two such names apart
    return plain or "lora-" + hashlib.sha256(name.encode()).hexdigest()[:8]


def _refuse_broken(tensors: Mapping[str, Tensor], what: str) -> None:
    if wrong := not_finite(tensors):
        advice = "; write it in bf16 or fp32 (export.dtype)" if what.endswith("fp16") else ""
        raise RunFailure(
            Message("{name} has NaN or infinity in {names}", name=what, names=f"{first_few(wrong)}{advice}")
        )
    is_up = (".lora_up.weight", *(f".{part}" for part in kinds.ZERO_AT_START))
    wrong = sorted(name for name, tensor in tensors.items() if name.endswith(is_up) and not tensor.any())
    if wrong:
        raise RunFailure(
            Message(
                "{name} is zero in {names}: never trained, the file would do nothing there",
                name=what,
                names=first_few(wrong),
            )
        )
    if not any(name.endswith(is_up) for name in tensors):
        raise RunFailure(Message("{name} is empty: there is nothing to write", name=what))


# -- metadata

COMFYUI = "https://github.com/comfyanonymous/ComfyUI"
IMPLEMENTATIONS = {  # kohya naming -> ModelSpec's identifier for the source of the module names
    "native": COMFYUI,
    "diffusers_underscored": "diffusers",
    "sgm_unet": "https://github.com/Stability-AI/generative-models",
    "bfl_flux": "https://github.com/black-forest-labs/flux",
}


def implementation(family: Any, layout: str) -> str:
    """Return ModelSpec's identifier for the source of the module names in a file of this layout."""
    return {"diffusers": "diffusers", "comfy": COMFYUI}.get(layout) or IMPLEMENTATIONS[family.kohya_naming]


def network_module(family: Any, kind: str) -> str:
    """Return kohya's name of the module that trains this kind of adapter."""
    if kind in ("lokr", "loha"):
        return "lycoris.kohya"
    return family.kohya_module


def baked(layout: str, kind: str) -> bool:
    """Return True if alpha / rank is multiplied into the weights of such a file, which then has no alpha."""
    return layout == "diffusers" or (layout == "comfy" and kind not in ("lokr", "loha"))


LOADING = (  # what a program needs to recognize the file and use it
    *("format", "modelspec.sai_model_spec", "modelspec.architecture", "modelspec.implementation", "modelspec.title"),
    *("modelspec.resolution", "modelspec.prediction_type", "ss_network_module", "ss_network_dim", "ss_network_alpha"),
    *("ss_base_model_version", "ss_v2", "lora_fp8_layout"),
)
OWN_WORDS = (  # what authors write about the LoRA, and the base; nothing about images and settings
    *("modelspec.implementation_version", "modelspec.author", "modelspec.description", "modelspec.license"),
    *("modelspec.trigger_phrase", "modelspec.tags", "ss_network_args", "ss_output_name", "ss_sd_model_name"),
    *("ss_resolution", "ss_training_comment", "lora_fp8_version", "lora_fp8_alpha", "lora_fp8_base_hash"),
)
LEVELS = {"none": LOADING, "private": (*LOADING, *OWN_WORDS)}


def metadata(family: Any, section: settings.Export, facts: ExportFacts, layout: str) -> dict[str, str]:
    """Return a file's metadata: ModelSpec, the `ss_*` keys of kohya that clients read, and the config.

    There is no date, path or user name in it. `section.metadata` decides how much is written; `write_file` adds the
    hashes at every level.
    """
    width, height = facts.resolution
    tags = [*facts.tags, *(tag for tag in dict.fromkeys(("lora", facts.kind)) if tag not in facts.tags)]
    epoch_size = sum(folder.num_images * folder.repeats for folder in facts.folders)
    epochs = math.ceil(facts.steps * facts.batch_size / epoch_size) if epoch_size else 0
    folders = _folder_names(facts.folders)
    written: dict[str, Any] = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": f"{family.modelspec_architecture}/lora",
        "modelspec.implementation": implementation(family, layout),
        "modelspec.implementation_version": f"lora_fp8/{__version__}",
        "modelspec.title": section.title or facts.name,
        "modelspec.resolution": f"{width}x{height}",
        "modelspec.author": section.author,
        "modelspec.description": section.description,
        "modelspec.license": section.license,
        "modelspec.trigger_phrase": facts.trigger,
        "modelspec.tags": ", ".join(tags),
        "modelspec.prediction_type": (facts.prediction_type or "").replace("v_prediction", "v"),
        "ss_network_module": network_module(family, facts.kind),
        "ss_network_dim": facts.rank,
        # If the scaling is multiplied into the weights, the file behaves as with alpha = rank: a program that reads
        # alpha here must not scale a second time.
        "ss_network_alpha": float(facts.rank) if baked(layout, facts.kind) else facts.alpha,
        "ss_network_args": _json(facts.kind_settings),
        "ss_network_dropout": facts.dropout,
        "ss_base_model_version": family.kohya_base_version,
        "ss_v2": str(family.kohya_base_version.startswith("sd_v2")),  # A1111 sorts by it
        "ss_output_name": slug(facts.name),
        "ss_sd_model_name": basename(facts.base_name),
        "ss_learning_rate": facts.learning_rate,
        "ss_unet_lr": facts.learning_rate,
        "ss_text_encoder_lr": "" if facts.text_encoder_lr is None else facts.text_encoder_lr,
        "ss_optimizer": facts.optimizer,
        "ss_lr_scheduler": facts.schedule,
        "ss_lr_warmup_steps": facts.warmup_steps,
        "ss_steps": facts.steps,
        "ss_max_train_steps": facts.steps,
        "ss_epoch": epochs,
        "ss_num_epochs": epochs,
        "ss_num_train_images": epoch_size,
        "ss_total_batch_size": facts.batch_size,
        "ss_resolution": f"({width}, {height})",
        "ss_seed": facts.seed,
        "ss_mixed_precision": facts.mixed_precision,
        "ss_fp8_base": str(facts.storage == "fp8"),
        "ss_max_grad_norm": facts.max_grad_norm,
        "ss_min_snr_gamma": facts.min_snr_gamma or "None",
        "ss_noise_offset": facts.noise_offset or "",
        "ss_caption_dropout_rate": facts.caption_dropout,
        "ss_training_comment": section.description,
        "ss_dataset_dirs": _json(
            {name: {"n_repeats": f.repeats, "img_count": f.num_images} for name, f in folders.items()}
        ),
        "ss_tag_frequency": _tag_frequency(folders),
        "ss_bucket_info": _json(
            {
                "buckets": {
                    str(i): {"resolution": list(size), "count": count}
                    for i, (size, count) in enumerate(sorted(facts.buckets.items()))
                }
            }
        ),
        "ss_enable_bucket": str(bool(facts.buckets)),
        "lora_fp8_version": __version__,
        "lora_fp8_layout": layout,
        "lora_fp8_storage": facts.storage,
        "lora_fp8_alpha": facts.alpha,
        "lora_fp8_learning_rate_factor": facts.learning_rate_factor,
        "lora_fp8_base_hash": facts.base_hash,
        "lora_fp8_config": without_paths(facts.config_toml),
    }
    told = LEVELS.get(section.metadata, tuple(written))
    return {key: str(value) for key, value in written.items() if value != "" and key in told}


def config_of(path: Path) -> str:
    """Return the config that a LoRA file was trained with, as TOML; of paths only the last part is left.

    Raises:
        UserError: it is not a safetensors file, or holds no config.
    """
    found = read_header(path).metadata.get("lora_fp8_config")
    if not found:
        raise UserError(
            Message("{path}: holds no config (it is another program's, or export.metadata was not public)", path=path)
        )
    return found


def _folder_names(folders: tuple[FolderFacts, ...]) -> dict[str, FolderFacts]:
    """Return the folders by the last part of their path; a second folder of the same name gets a number."""
    named: dict[str, FolderFacts] = {}
    for folder in folders:
        name, number = basename(folder.name), 2
        while name in named:
            name, number = f"{basename(folder.name)} ({number})", number + 1
        named[name] = folder
    return named


def _tag_frequency(folders: Mapping[str, FolderFacts]) -> str:
    """Return as many of each folder's most frequent tags as fit, as JSON; "" if not even one each fits."""
    most = MAX_TAGS
    while most:
        text = _json({name: _frequent(folder.tags, most) for name, folder in folders.items()})
        if len(text.encode()) <= MAX_TAG_BYTES:
            return text
        most //= 2
    return ""


def _frequent(tags: Mapping[str, int], most: int) -> dict[str, int]:
    return dict(sorted(tags.items(), key=lambda item: (-item[1], item[0]))[:most])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=False)


HOMES = re.compile(r"(?:(?:/home|/Users|[A-Za-z]:[\\/]Users)[\\/][^\\/]+|~[^\\/]*)[\\/]*")
"""Matches home folders, whose last part is a user's name."""


def basename(path: str) -> str:
    """Return the last part of any system's path, "~" for a home folder; a hub id `owner/name` loses its owner."""
    if HOMES.fullmatch(path) or (path and os.path.abspath(os.path.expanduser(path)) == os.path.expanduser("~")):
        return "~"
    return re.split(r"[\\/]", path.rstrip("\\/"))[-1] if path.rstrip("\\/") else ""


def without_paths(toml: str) -> str:
    """Return a config without comments, in which paths outside the job's folder are reduced to their last part.

    Absolute paths of any system, `~/...`, file URLs and `../...` reveal the machine and often its owner.
    """

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        if isinstance(value, list):
            return [clean(item) for item in value]
        if isinstance(value, str) and "\n" not in value:
            leads_out = re.match(r"/|~|[A-Za-z]:[\\/]|\\\\|file:", value) or ".." in re.split(r"[\\/]", value)
            return basename(value) if leads_out else value
        return value

    return tomlkit.dumps(clean(tomlkit.parse(toml).unwrap())) if toml else ""
