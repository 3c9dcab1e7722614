"""Describe a base model before a weight of it is transferred: what it is, what it needs, what is in the way.

`describe` asks the place where the model is kept (Hugging Face, ModelScope, Civitai) and remembers the answer; without a
connection it takes what was remembered, and then what is known of released models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from .reference import Reference


class BaseFile(NamedTuple):
    """A file that training needs.

    Attributes:
        path: its place in the repository, such as "vae/config.json".
        size: in bytes.
        sha256: of its content; None if the place does not state it.
        local: where it is on this machine, complete; None if it must be transferred.
    """

    path: str
    size: int
    sha256: str | None
    local: Path | None


class Licence(NamedTuple):
    """The licence of a model; `name` is the identifier that the hub gives, `link` the address of its text, or ""."""

    name: str
    link: str = ""


class Gate(NamedTuple):
    """The gate of a model whose licence must be accepted first.

    Attributes:
        link: the page on which it is accepted.
        has_token: a token of the hub is on this machine.
        is_open: the token's account has accepted it; None if it is not known.
    """

    link: str
    has_token: bool
    is_open: bool | None


class Header(NamedTuple):
    """The header of a safetensors file: (name, dtype, shape) of its tensors, and its metadata."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    metadata: Mapping[str, str]


Origin = Literal["local", "asked", "remembered", "published", "unknown"]
"""How something is known: from the files of this machine, from the hub now, from an earlier answer of the hub, from the
published sizes of a known base, or not at all."""


@dataclass(frozen=True)
class BaseDescription:
    """What is known of a base model without its weights.

    Attributes:
        reference: what was described.
        revision: the commit; "" where there is none.
        family: the architecture by its files; "" if they do not tell.
        files: the files that training needs, configs and tokenizers too.
        folder: where the files are put, and where those that are here already are; None if that is not known.
        headers: path in the repository -> header, of the weights.
        licence: None if the model states none.
        gate: None for an open model.
        free_bytes: free space on the disk of `folder`; None if unknown.
        origin: how all of this is known.
        problems: why training cannot start with it, one sentence each.
        notes: what else a person should know, one sentence each.
    """

    reference: Reference
    revision: str = ""
    family: str = ""
    files: tuple[BaseFile, ...] = ()
    folder: Path | None = None
    headers: Mapping[str, Header] = field(default_factory=dict)
    licence: Licence | None = None
    gate: Gate | None = None
    free_bytes: int | None = None
    origin: Origin = "unknown"
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all files that training needs."""
        return sum(file.size for file in self.files)

    @property
    def missing_bytes(self) -> int:
        """Bytes that must still be transferred."""
        return sum(file.size for file in self.files if file.local is None)
