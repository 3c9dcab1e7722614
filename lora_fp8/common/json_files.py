"""Read and write JSON files. Another program may have written them, so reading refuses too large and too deep ones."""

import json
from pathlib import Path
from typing import Any

from ..errors import Message
from .parsing import describe_parser_error
from .reading import MIB, read_bytes
from .writing import atomic_write

MOST_JSON = 64 * MIB
"""Maximum for a file that another program wrote, such as the index of a model's weights, in bytes."""

TOO_DEEP = Message("it is nested too deeply")


def parse_json(data: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(describe_parser_error(error)) from None


def read_json(path: Path, most: int | None = MOST_JSON) -> Any:
    """Read a JSON file.

    Args:
        most: maximum number of bytes; None for no limit.

    Raises:
        OSError: as for `read_bytes`.
        ValueError: as for `parse_json`.
    """
    return parse_json(read_bytes(path, most))


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object, of at most MOST_JSON bytes.

    Raises:
        OSError: as for `read_bytes`.
        ValueError: the file holds something else; the message names it.
    """
    try:
        content = read_json(path)
    except ValueError as error:
        raise ValueError(Message("{path} cannot be read as JSON ({why})", path=path, why=error)) from error
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ValueError(Message("{path} should contain a JSON object, but contains a {kind}", path=path, kind=kind))
    return content


def write_json(path: Path, content: Any, indent: int | None = 1) -> None:
    """Write a JSON file with `atomic_write`.

    Args:
        indent: spaces of each level; None for one line.
    """
    # ASCII, as a file name in it may hold bytes that are no text, which UTF-8 cannot write.
    atomic_write(path, (json.dumps(content, indent=indent) + "\n").encode())
