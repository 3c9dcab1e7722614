"""Recognises numbers in data that may be anything, and formats numbers and shapes for messages."""

import sys
from collections.abc import Iterable
from decimal import Decimal
from typing import Any, TypeGuard


def format_digits(number: float) -> str:
    """Format a number for people: three significant digits, all digits before the point, and never an exponent."""
    return str(round(number)) if abs(number) >= 100 else format(Decimal(f"{number:.3g}"), "f")


def format_count(number: float) -> str:
    """Format a count for people: "79,104" or "12.3 M"."""
    return f"{number:,.0f}" if number < 1e6 else f"{format_digits(number / 1e6)} M"


def format_bytes(number: float) -> str:
    """Format bytes in powers of 1024: "1.3 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{format_digits(number)} TiB"


def format_shape(shape: Iterable[int]) -> str:
    """Format a tensor's shape: "320 x 64"."""
    return " x ".join(map(str, shape)) or "1"


def is_finite_number(value: Any) -> TypeGuard[int | float]:
    """Return True for an int or float that is not infinite, NaN, a bool, or too large for a float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
