"""Which tests `make test` leaves to `make test-all`: further cases of a question that it asks already.

short.toml names, by file and function, the cases that stay; what it does not list stays whole. A case is the id of its
parameters, as pytest prints it in brackets, or a pattern with * for any text.
"""

import tomllib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES: dict[str, dict[str, list[str]]] = tomllib.loads((HERE / "short.toml").read_text(encoding="utf-8"))


def split(items: Iterable[pytest.Function]) -> tuple[list[pytest.Function], list[pytest.Function]]:
    """Return the items that stay, and those that are left out.

    Raises:
        pytest.UsageError: short.toml names a test or a case that does not exist in a file of the items.
    """
    kept, left = [], []
    files, matched = set(), set()
    for item in items:
        file = item.path.relative_to(HERE).as_posix()
        files.add(file)
        patterns = CASES.get(file, {}).get(item.originalname)
        case = item.callspec.id if hasattr(item, "callspec") else ""
        fitting = {pattern for pattern in patterns or () if fnmatchcase(case, pattern.replace("[", "[[]"))}
        matched |= {(file, item.originalname, pattern) for pattern in fitting}
        (kept if patterns is None or fitting else left).append(item)
    wanted = {
        (file, test, pattern)
        for file, tests in CASES.items()
        for test, patterns in tests.items()
        for pattern in patterns
        if file in files
    }
    if stale := sorted(wanted - matched):
        lines = "\n".join(f"{file}::{test}[{pattern}]" for file, test, pattern in stale)
        raise pytest.UsageError(f"tests/short.toml names cases that do not exist:\n{lines}")
    return kept, left
