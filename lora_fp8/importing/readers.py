"""Convert values of other trainers: numbers, flags, lists. Secrets are hidden."""

from __future__ import annotations

import math
import re
from typing import Any

from ..common.text import quote
from ..errors import Message
from . import remarks

NOTHING: tuple[Any, ...] = (None, "", (), [], {})
"""Values that mean "not set" in every tool: settings pages write them for empty fields."""
SECRET_KEY = re.compile(
    r"(^|[._-])(?:token|passw(?:or)?d|secret|credentials?|access_key(?:_id)?|webhook(?:_url|_config)?)$"
    r"|(?:hf|hub|huggingface|access|auth|bot|api|wandb|github|civitai|user|session)_?(?:api_?)?(?:token|key)$|secret",
    re.IGNORECASE,
)
SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bAKIA[0-9A-Z]{16}"
    r"|^[0-9a-f]{40}$|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
SECRET_ASSIGNMENT = re.compile(
    r"((?:token|api[_-]?key|secret|passw(?:or)?d)(?:\s*=\s*|[\"']\s*:\s*)[\"']?)[^\s\"',}]+"
    r"|(--[\w-]*(?:token|api[_-]?key|secret|passw(?:or)?d)\s+)\S+",
    re.IGNORECASE,
)
HIDDEN = Message("(not shown)")
MOST_NUMBER = 1e20
"""Largest number in a setting: above every 64-bit seed, and two of them can still be multiplied."""


class Unfit(Exception):
    """A value that our setting does not accept; the message says why, and what was done instead."""


def hide(text: str) -> str:
    """Return the text without tokens, API keys and passwords in URLs. A message stays one."""
    if isinstance(text, Message):
        return text.map(hide)
    return SECRET_ASSIGNMENT.sub(lambda m: (m[1] or m[2]) + HIDDEN, SECRET_VALUE.sub(HIDDEN, text))


def keep_value(value: Any) -> Any:
    """Return the value unchanged."""
    return value


def read_string(value: Any) -> str:
    """Return the value as text."""
    if isinstance(value, dict | list):
        raise Unfit(Message("the value is not text"))
    return str(value)


def read_number(value: Any) -> float:
    """Read a number, which settings pages and YAML (1e-4 without a point) may store as text."""
    if isinstance(value, bool):
        raise Unfit(remarks.NO_NUMBER(value=value))
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        raise Unfit(remarks.NO_NUMBER(value=quote(value))) from None
    except OverflowError:
        parsed = math.inf
    if not abs(parsed) <= MOST_NUMBER:  # NaN fails this comparison too
        raise Unfit(
            Message("the number is too large") if math.isfinite(parsed) else Message("the value is not a finite number")
        )
    return parsed


def read_whole(value: Any) -> int:
    """Read a whole number, which may be stored as text or with a decimal point."""
    parsed = read_number(value)
    if parsed != int(parsed):
        raise Unfit(Message("{value} is not a whole number", value=quote(value)))
    return int(parsed)


def read_positive(value: Any) -> int:
    """Read a whole number of at least 1."""
    parsed = read_whole(value)
    if parsed < 1:
        raise Unfit(Message("{value} is less than 1", value=quote(value)))
    return parsed


def read_flag(value: Any) -> bool:
    """Read true or false, which may be stored as text or as 0 and 1."""
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    parsed = words.get(str(value).strip().lower())
    if parsed is None:
        raise Unfit(Message("{value} is neither true nor false", value=quote(value)))
    return parsed


def read_list(value: Any) -> list[Any]:
    """Return a list; a single value becomes a list of one."""
    if isinstance(value, bool | dict):
        raise Unfit(Message("{value} is not a list", value=quote(value)))
    return list(value) if isinstance(value, list | tuple) else [value]


def read_pair(value: Any) -> tuple[float, float]:
    """Read a list of two numbers."""
    sides = read_list(value)
    if len(sides) != 2:
        raise Unfit(Message("{value} are not two numbers", value=quote(value)))
    return read_number(sides[0]), read_number(sides[1])


def is_off(value: Any) -> bool:
    """Return True if a value switches its key off: empty, false, zero or "none"."""
    return (
        value in NOTHING or value is False or str(value).strip().lower() in ("0", "0.0", "false", "none", "no", "off")
    )
