"""Writes and reads safetensors files: bytes, header and hashes.

The writer is our own (30 lines) because `safetensors.torch.save_file` writes metadata in random order; here the same
run gives the same bytes."""

import hashlib
import json
import os
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ..common.reading import open_regular
from ..common.text import is_utf8, quote
from ..common.writing import atomic_write
from ..errors import Message, UserError, cannot_read

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
MOST_HEADER = 100_000_000  # bytes; the safetensors library's own limit
LEGACY_WINDOW = (0x100000, 0x10000)  # offset and size of the bytes that A1111's old hash covers


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
        begin = offset - len(make_header(entries, written))
        if 0 <= begin < len(data):
            written["sshs_legacy_hash"] = hashlib.sha256(data[begin : begin + size]).hexdigest()[:8]
        else:
            del written["sshs_legacy_hash"]
    atomic_write(path, make_header(entries, written) + data)
    return sha


def make_header(entries: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes in front of the data: the header's length, and the header, padded to eight bytes.

    Args:
        entries: dtype, shape and data_offsets of each tensor, by name.
        metadata: texts, written in alphabetical order.
    """
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

    def require_unique(named: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(named)
        if len(entries) < len(named):
            twice = next(name for name, count in Counter(name for name, _ in named).items() if count > 1)
            raise UserError(Message("{path}: the header lists {name} twice", path=path, name=quote(twice)))
        return entries

    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8))[0] if size >= 8 else size
            if not 2 <= length <= size - 8:
                raise UserError(
                    Message(
                        "{path}: the safetensors file is incomplete (its header would end after the end of the file)",
                        path=path,
                    )
                )
            if length > MOST_HEADER:
                raise UserError(
                    Message(
                        "{path}: the header takes {length} bytes, but at most {most} are read",
                        path=path,
                        length=length,
                        most=MOST_HEADER,
                    )
                )
            content = json.loads(file.read(length), object_pairs_hook=require_unique)
    except OSError as error:
        raise cannot_read(path, error) from None
    except (ValueError, RecursionError):  # JSON and UTF-8 errors, or brackets nested a thousand deep
        raise UserError(Message("{path}: this is not a safetensors file (its header is not JSON)", path=path)) from None
    if not isinstance(content, dict):
        raise UserError(Message("{path}: this is not a safetensors file (its header is not a JSON object)", path=path))
    metadata = _take_metadata(content, path)
    size_by_header = 8 + length + _compute_data_size(content, path)
    if size_by_header != size:
        problem = Message("the file has bytes that belong to no tensor")
        if size < size_by_header:
            problem = Message("the file is incomplete")
        raise UserError(
            Message(
                "{path}: {problem}: {said} bytes according to its header, {size} in the file",
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
    metadata = content.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise UserError(
            Message("{path}: this is not a safetensors file (its metadata is not a JSON object)", path=path)
        )
    wrong = [key for key, value in metadata.items() if not isinstance(value, str)]
    if wrong:
        raise UserError(
            Message("{path}: these metadata entries are not text: {names}", path=path, names=", ".join(sorted(wrong)))
        )
    if wrong := [text for text in (*metadata, *metadata.values(), *content) if not is_utf8(text)]:
        raise UserError(
            Message("{path}: the header contains text that is not UTF-8: {name}", path=path, name=quote(wrong[0]))
        )
    return metadata


def _compute_data_size(entries: dict[str, Any], path: Path) -> int:
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
        raise UserError(
            Message("{path}: this is not a safetensors file (a tensor has no data_offsets)", path=path)
        ) from None
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
        raise UserError(Message("{path}: this is not a safetensors file ({why})", path=path, why=error)) from None
    except OSError as error:
        raise cannot_read(path, error) from None


def hash_payload(path: Path) -> str:
    """Return the sha256 hex of all bytes after the header: the right `sshs_model_hash`, and Civitai's AutoV3."""
    begin = read_header(path).data_begin
    with open(path, "rb") as file:
        file.seek(begin)
        return hashlib.file_digest(file, "sha256").hexdigest()
