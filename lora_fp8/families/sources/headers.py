"""Read headers of safetensors files, also of files that are elsewhere, by range requests.

A header is a few hundred kilobytes at the start of a file of gigabytes, and has the name, dtype and shape of every
tensor. huggingface_hub can read headers too, but where a server ignores ranges (some mirrors and proxies do) it takes
the whole file into memory, and it does not compare the header with the file's size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...common.json_files import parse_json
from ...errors import Message, UserError

FIRST_BYTES = 1 << 17
"""Bytes of the first request; most headers are smaller."""
MOST_BYTES = 100 << 20
"""Maximum size of a header, as the safetensors library has it."""
ATTEMPTS = 3


class Header(NamedTuple):
    """The header of a safetensors file: (name, dtype, shape) of its tensors, and its metadata."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    metadata: Mapping[str, str]


def parse(content: bytes, size: int, where: str) -> Header:
    """Parse a header, and compare the size of its file with it.

    Args:
        content: the header's JSON.
        size: of the whole file, in bytes.
        where: the file, for messages.

    Raises:
        UserError: it is no header, or the file has another size than it says.
    """
    try:
        entries = parse_json(content)
        metadata = entries.pop("__metadata__", None) or {}
        end = 8 + len(content) + max((e["data_offsets"][1] for e in entries.values()), default=0)
        tensors = tuple((name, e["dtype"], tuple(e["shape"])) for name, e in entries.items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise make_unreadable_error(where) from error
    if end != size:
        raise UserError(
            Message(
                "{path} is damaged: the file has {size} bytes, but its header says {end}; download it again",
                path=where,
                size=size,
                end=end,
            )
        )
    return Header(tensors, metadata)


def make_unreadable_error(where: str) -> UserError:
    """Return the error for a file whose beginning is no header."""
    return UserError(Message("{path} is not a safetensors file (its header cannot be read)", path=where))


def require_length(length: int, size: int, where: str) -> None:
    """Check the length that the first 8 bytes of a safetensors file state for its header.

    Raises:
        UserError: no file of this size has such a header.
    """
    if size < 8 or not 2 <= length <= size - 8:
        # A safetensors file starts with its header's length in 8 bytes; any other file has nonsense there.
        raise UserError(
            Message(
                "{path} is not a complete safetensors file ({size} bytes; its header alone would take {length})",
                path=where,
                size=size,
                length=length,
            )
        )


def fetch(address: str, fields: Mapping[str, str], size: int, where: str) -> Header:
    """Fetch the header of a remote safetensors file; no more of the file is transferred than that.

    Args:
        address: of the file.
        fields: header fields of the request, such as the token.
        size: of the file, in bytes.
        where: the file, for messages.

    Raises:
        UserError: it is no safetensors file, or is damaged.
        HfHubHTTPError, httpx2.TransportError: the server does not give it.
    """
    content = _fetch_range(address, fields, 0, min(FIRST_BYTES, size))
    length = int.from_bytes(content[:8], "little")
    require_length(length, size, where)
    if length > MOST_BYTES:
        raise make_unreadable_error(where)
    if len(content) < 8 + length:
        content += _fetch_range(address, fields, len(content), 8 + length)
    return parse(content[8 : 8 + length], size, where)


def _fetch_range(address: str, fields: Mapping[str, str], begin: int, end: int) -> bytes:
    """Fetch the bytes from `begin` to before `end`; the connection is closed as soon as they are here."""
    from huggingface_hub import constants
    from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

    asked = {**fields, "Range": f"bytes={begin}-{end - 1}", "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with http_stream_backoff("GET", address, headers=asked, timeout=timeout, max_retries=ATTEMPTS) as response:
        hf_raise_for_status(response)
        skipped = 0 if response.status_code == 206 else begin  # a server without ranges begins at the start
        content = b""
        for block in response.iter_raw(1 << 16):
            content += block
            if len(content) >= skipped + end - begin:
                break
    return content[skipped : skipped + end - begin]
