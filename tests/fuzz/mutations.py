"""Changes to bytes, to text and to nested values, drawn from a generator."""

import copy
import random
from typing import Any

NUMBERS = (
    "0",
    "-1",
    "1",
    "1e308",
    "-1e308",
    "1e-320",
    "nan",
    "inf",
    "-inf",
    "9" * 400,
    "0x" + "f" * 400,
    "1.5",
    "1_000",
)
WORDS = (
    "",
    "auto",
    "none",
    "true",
    "demo",
    "\u202e",
    "\x1b[2J",
    "a\0b",
    "../../x",
    "/dev/zero",
    "x" * 5000,
    "中文" * 40,
)
TOML = (
    *NUMBERS,
    *(f'"{word}"' for word in ("", "auto", "none", "x" * 3000, "中文")),
    "true",
    "[]",
    "{}",
    "[[[]]]",
    "{a={}}",
)
VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 10**400, -(10**30), 0.0, 1e308, 1e-320, float("nan"), float("inf"), 2**63, True, False, None),
    *("", "0", "1e-4", "9" * 400, "1e200,1e200", "nonsense", "a=b", "x" * 3000, "中文", "\0", "../..", "{}"),
    *([], [0], [[]], ["a", 1], [0, 0], {}, {"a": 0}, {"": {"": []}}),
)


def bytes_of(draw: random.Random, data: bytes) -> bytes:
    """Flip, cut, insert, repeat or drop some bytes, up to eight times."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        at = draw.randrange(len(changed) + 1)
        # The beginning of a file says most of what it is.
        at = at if draw.random() < 0.5 else min(at, draw.randrange(128))
        how = draw.randrange(6)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif how == 1 and at < len(changed):
            changed[at] = draw.choice((0, 1, 127, 128, 255, draw.randrange(256)))
        elif how == 2:
            del changed[at : at + draw.choice((1, 4, 64, 4096))]
        elif how == 3:
            changed[at:at] = draw.randbytes(draw.choice((1, 4, 64)))
        elif how == 4:
            piece = changed[at : at + draw.choice((1, 8, 256))]
            changed[at:at] = piece * draw.choice((1, 2, 50))
        else:
            del changed[at:]
    return bytes(changed)


def text_of(draw: random.Random, text: str, values: tuple[str, ...] = TOML) -> str:
    """Change lines: drop, repeat, move, cut, and put other values behind their `=` or `:`."""
    lines = text.split("\n")
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        at = draw.randrange(len(lines))
        how = draw.randrange(9)
        if how <= 3:
            for sign in ("=", ":"):
                if sign in lines[at]:
                    lines[at] = f"{lines[at].partition(sign)[0]}{sign} {draw.choice(values)}"
                    break
        elif how == 4:
            del lines[at]
            lines = lines or [""]
        elif how == 5:
            lines[at:at] = [lines[at]] * draw.choice((1, 2, 100))
        elif how == 6:
            lines.insert(at, lines.pop(draw.randrange(len(lines))))
        elif how == 7:
            lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]
        else:
            lines.insert(
                at, draw.choice(("[", "[[", "[a.b]", "=", '"""', "a = [", "\x00", "- " * 50, "\t", "{", "# 中"))
            )
    return "\n".join(lines)


def deep(draw: random.Random, size: int) -> str:
    """Text that is much in little: brackets in brackets, keys of many parts, one long value."""
    return draw.choice(
        (
            "x = " + "[" * size,
            "x = " + "[" * size + "]" * size,
            "x = " + "{a=" * (size // 3),
            ".".join(["a"] * (size // 2)) + " = 1",
            "[" + ".".join(["a"] * (size // 2)) + "]",
            "[[" + ".".join(['"a"'] * (size // 4)) + "]]",
            'name = "' + "x" * size + '"',
            "name = " + "'''" * (size // 3),
            "seed = " + "9" * size,
            "seed = 0." + "9" * size,
            "\n".join(f"a{number} = {number}" for number in range(size // 10)),
            "\n".join(f"[a{number}]" for number in range(size // 8)),
            "\n".join("[[dataset.folders]]" for _ in range(size // 20)),
            "a = [" + "{}," * (size // 3) + "]",
            "\x00" * size,
            "#" * size,
            "\n" * size,
        )
    )


def tables(data: Any) -> list[Any]:
    """Every dict and list in nested data."""
    found = [data] if isinstance(data, dict | list) else []
    for value in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        found += tables(value)
    return found


def values_of(draw: random.Random, data: Any) -> Any:
    """Change values of nested data in place: replace, drop, rename, nest."""
    for _ in range(draw.choice((1, 1, 2, 3, 8))):
        table = draw.choice(tables(data) or [[]])
        if not table:
            continue
        key = draw.choice(list(table)) if isinstance(table, dict) else draw.randrange(len(table))
        how = draw.randrange(6)
        if how <= 2:
            table[key] = copy.deepcopy(draw.choice(VALUES))
        elif how == 3 and isinstance(table, dict):
            table[draw.choice(("new", "", "a.b", str(key).upper(), "x" * 300))] = table.pop(key)
        elif how == 4:
            for _ in range(draw.choice((1, 3, 30))):
                table[key] = {"a": table[key]} if draw.random() < 0.5 else [table[key]]
        elif isinstance(table, dict):
            del table[key]
        else:
            table.insert(key, copy.deepcopy(draw.choice(VALUES)))
    return data
