"""The released models of every family, as data: `known_bases.toml` beside this file says what each field means."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ...errors import Phrase

EXAMPLE = "stabilityai/stable-diffusion-xl-base-1.0"
"""The id that messages give as an example."""
GIGABYTE = 10**9


@dataclass(frozen=True)
class KnownBase:
    """A released model; the attributes are the fields of `known_bases.toml`."""

    id: str
    family: str
    title: str
    licence: str
    purpose: Phrase
    gigabytes: Mapping[str, float]
    names: tuple[str, ...] = ()
    licence_link: str = ""
    gated: bool | None = None
    kind: str = ""
    unconfirmed: frozenset[str] = field(default_factory=frozenset)
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of the weights that training needs, counted; see `gigabytes`."""
        return round(sum(self.gigabytes.values()) * GIGABYTE)


@cache
def read() -> tuple[KnownBase, ...]:
    """Return all known bases, in the order of the file: the usual ones of a family come first."""
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(
        KnownBase(
            **entry
            | {
                "purpose": Phrase(entry["purpose"]),
                "names": tuple(entry.get("names", ())),
                "unconfirmed": frozenset(entry.get("unconfirmed", ())),
            }
        )
        for entry in content["base"]
    )


def list_of_family(family: str) -> list[KnownBase]:
    """Return the known bases of a family, the usual one first."""
    return [base for base in read() if base.family == family]


def get(repo: str) -> KnownBase | None:
    """Return the known base with this id, whatever the case of its letters; None if there is none."""
    return _map_by_id().get(repo.lower())


@cache
def _map_by_id() -> dict[str, KnownBase]:
    return {base.id.lower(): base for base in read()}


def find_similar(text: str) -> str | None:
    """Return the id of the known base that a person probably means by a name or a misspelt id; None if unsure."""
    given = text.strip().lower()
    # Other ids of a model, such as the one it was moved from, count as its names.
    by_name = {name: base.id for base in reversed(read()) for name in _list_names(base)}
    if given in by_name:
        return by_name[given] if by_name[given] != text else None
    near = difflib.get_close_matches(given[:120], by_name, n=1, cutoff=0.75)
    if not near and "/" in given:  # the owner may be wrong, and the model right
        by_tail: dict[str, str] = {base.id.partition("/")[2].lower(): base.id for base in reversed(read())}
        tail = given.partition("/")[2]
        near_tail = difflib.get_close_matches(tail[:120], by_tail, n=1, cutoff=0.85)
        return by_tail[near_tail[0]] if near_tail else None
    return by_name[near[0]] if near else None


def _list_names(base: KnownBase) -> list[str]:
    return [base.id.lower(), base.title.lower(), *base.names]
