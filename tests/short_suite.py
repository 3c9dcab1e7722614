"""Which tests `make test` leaves to `make test-all`: further cases of a question that it asks already.

short.toml names, by file and function, the cases that stay, or says that each n-th stays; what it does not list stays
whole. A case is the id of its parameters, as pytest prints it in brackets, or a pattern with * for any text.
"""

import tomllib
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CASES: dict[str, dict[str, list[str] | int]] = tomllib.loads((HERE / "short.toml").read_text(encoding="utf-8"))


def split(items: Iterable[pytest.Function]) -> tuple[list[pytest.Function], list[pytest.Function]]:
    """Return the items that stay, and those that are left out.

    Raises:
        pytest.UsageError: short.toml names a test or a case that does not exist in a file of the items.
    """
    kept, left = [], []
    collected: dict[str, set[str]] = {}
    matched = set()
    numbers: Counter[tuple[str, str]] = Counter()
    for item in items:
        file = item.path.relative_to(HERE).as_posix()
        collected.setdefault(file, set()).add(item.originalname)
        cases = CASES.get(file, {}).get(item.originalname)
        case = item.callspec.id if hasattr(item, "callspec") else ""
        if isinstance(cases, int):
            stays = numbers[file, item.originalname] % cases == 0
            numbers[file, item.originalname] += 1
            matched |= {(file, item.originalname, "")}
        else:
            fitting = {pattern for pattern in cases or () if fnmatchcase(case, pattern.replace("[", "[[]"))}
            stays = cases is None or bool(fitting)
            matched |= {(file, item.originalname, pattern) for pattern in fitting}
        (kept if stays else left).append(item)
    wanted = {
        (file, test, pattern)
        for file, tests in CASES.items()
        for test, cases in tests.items()
        for pattern in ([""] if isinstance(cases, int) else cases)
        if test in collected.get(file, ())
    }
    unknown = {
        (file, test, "")
        for file in collected
        for test in CASES.get(file, {})
        if f"def {test}(" not in (HERE / file).read_text(encoding="utf-8")
    }
    if stale := sorted((wanted - matched) | unknown):
        lines = "\n".join(f"{file}::{test}[{pattern}]" for file, test, pattern in stale)
        raise pytest.UsageError(f"tests/short.toml names cases that do not exist:\n{lines}")
    return kept, left
