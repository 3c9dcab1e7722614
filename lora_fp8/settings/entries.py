"""Convert tables of values by name: adapter.ranks, optimizer.lrs and quantize.override name layers, schedule.points
places in the training.

Older files have lists of 'NAME = VALUE' texts instead; checkpoints still do, because JSON does not keep the order.
"""

from collections.abc import Iterable, Mapping
from typing import Any

TABLES = ("adapter.ranks", "optimizer.lrs", "quantize.override", "schedule.points")


def parse_lines(lines: Iterable[str]) -> dict[str, Any]:
    """Convert "NAME = VALUE" texts to a table. The first of several lines with a name counts, as it always did."""
    table: dict[str, Any] = {}
    for line in lines:
        name, _, value = line.partition("=")
        table.setdefault(name.strip(), _parse_value(" ".join(value.split())))
    return table


def format_table(table: Mapping[str, Any]) -> list[str]:
    """Convert a table to "NAME = VALUE" texts, always with the same text for the same value."""
    return [f"{name} = {value if isinstance(value, str) else _format_number(value)}" for name, value in table.items()]


def flatten_table(table: Mapping[str, Any]) -> dict[str, Any]:
    """Join the keys of tables in a table: the unquoted `ff.net.2 = 8` of TOML means the layer "ff.net.2"."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= {f"{name}.{inner}": setting for inner, setting in flatten_table(value).items()}
        else:
            flat[name] = value
    return flat


def parse_storage(text: str) -> tuple[str, str]:
    """Split a storage such as "int8 1x128" into (storage, scale); scale "" is the storage's own."""
    storage, _, scale = text.partition(" ")
    return storage, scale


def _parse_value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _format_number(number: float) -> str:
    return str(int(number)) if number == int(number) else repr(number)
