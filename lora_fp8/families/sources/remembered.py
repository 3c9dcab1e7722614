"""Remember what hubs answered about bases, so that a base is known without a connection.

One JSON file per base in the program's own cache, by endpoint, id and revision. It holds the list of the repository's
files, its licence and gate, and the headers of the weights that training needs; no secrets, and nothing that cannot be
asked again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...common.json_files import read_json, write_json
from ...common.messages import get_language, translate
from ...common.system import find_cache_folder
from ...errors import Message, reason
from .headers import Header

SCHEMA = 1


class RemoteFile(NamedTuple):
    """A file of a repository: its path, size in bytes, and SHA-256 where the place states it."""

    path: str
    size: int
    sha256: str | None


@dataclass(frozen=True)
class Answer:
    """What a hub answers about a repository.

    Attributes:
        revision: the commit.
        files: all of its files.
        licence, licence_link: as the model states them; "" if it does not.
        gated: its licence must be accepted first.
        title: the model's name for people; "" if it is its id.
        headers: path -> header, of the weights that were looked at.
    """

    revision: str
    files: tuple[RemoteFile, ...]
    licence: str = ""
    licence_link: str = ""
    gated: bool = False
    title: str = ""
    headers: Mapping[str, Header] = field(default_factory=dict)


def compute_digest(content: Any) -> str:
    """Return a name of 40 hexadecimal digits for content of plain JSON types, as commits have."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:40]


def find_file(endpoint: str, name: str, revision: str) -> Path:
    """Return the file that remembers a base."""
    return find_cache_folder() / "bases" / f"{compute_digest([endpoint.rstrip('/'), name, revision])}.json"


def read(path: Path) -> Answer | None:
    """Read a remembered answer; None if there is none, or it is of another version."""
    try:
        content = read_json(path)
        if content["schema"] != SCHEMA:
            return None
        headers = {name: _read_header(entry) for name, entry in content["headers"].items()}
        files = tuple(RemoteFile(str(path), int(size), sha256) for path, size, sha256 in content["files"])
        texts = {name: str(content[name]) for name in ("revision", "licence", "licence_link", "title")}
        return Answer(files=files, gated=bool(content["gated"]), headers=headers, **texts)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # asked again, or not known offline
        return None


def write(path: Path, answer: Answer) -> None:
    """Remember an answer. A disk that cannot be written is logged and does no harm."""
    headers = {
        name: {"tensors": header.tensors, "metadata": header.metadata} for name, header in answer.headers.items()
    }
    texts = {name: getattr(answer, name) for name in ("revision", "licence", "licence_link", "title")}
    content = {"schema": SCHEMA, **texts, "gated": answer.gated, "files": answer.files, "headers": headers}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content, indent=None)
    except OSError as error:
        warning = Message(
            "{path} cannot be written ({why}): the model will be unknown when there is no connection",
            path=path,
            why=reason(error),
        )
        logging.getLogger(__name__).warning("%s", translate(get_language(), warning))


def _read_header(entry: dict[str, Any]) -> Header:
    tensors = tuple((str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in entry["tensors"])
    return Header(tensors, {str(key): str(value) for key, value in entry["metadata"].items()})
