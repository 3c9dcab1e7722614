"""Formats numbers and shapes for messages."""

from collections.abc import Iterable
from decimal import Decimal


def digits(number: float) -> str:
    """Format a number for people: three significant digits, all digits before the point, and never an exponent."""
    return str(round(number)) if abs(number) >= 100 else format(Decimal(f"{number:.3g}"), "f")


def sides(shape: Iterable[int]) -> str:
    """Format a tensor's shape: "320 x 64"."""
    return " x ".join(map(str, shape)) or "1"
