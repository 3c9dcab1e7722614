"""Which cases `make test` asks: those that tests/short.toml names, or each n-th."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import short_suite


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(short_suite, "HERE", tmp_path)
    (tmp_path / "test_x.py").write_text("def test_some(): ...\ndef test_more(): ...\n", encoding="utf-8")
    return tmp_path / "test_x.py"


def split(monkeypatch: pytest.MonkeyPatch, file: Path, test: str, cases: list[str] | int) -> list[str]:
    """Return the ids of ten cases that stay."""
    monkeypatch.setattr(short_suite, "CASES", {"test_x.py": {test: cases}})
    items: list[Any] = [
        SimpleNamespace(path=file, originalname="test_some", callspec=SimpleNamespace(id=f"{kind}-{number}"))
        for number in range(5)
        for kind in ("a", "b")
    ]
    kept, left = short_suite.split(items)
    assert sorted(map(id, kept + left)) == sorted(map(id, items))
    return [item.callspec.id for item in kept]


@pytest.mark.parametrize(
    ("cases", "kept"),
    [
        (["a-1", "*-3"], ["a-1", "a-3", "b-3"]),
        ([], []),
        (4, ["a-0", "a-2", "a-4"]),
    ],
)
def test_the_named_cases_stay(monkeypatch: pytest.MonkeyPatch, file: Path, cases: Any, kept: list[str]) -> None:
    assert split(monkeypatch, file, "test_some", cases) == kept


def test_tests_that_were_not_collected_are_no_mistake(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    assert len(split(monkeypatch, file, "test_more", ["a"])) == 10


@pytest.mark.parametrize(("test", "cases"), [("test_some", ["a-1", "c-*"]), ("test_renamed", 3)])
def test_what_does_not_exist_is_a_mistake(
    monkeypatch: pytest.MonkeyPatch, file: Path, test: str, cases: list[str] | int
) -> None:
    with pytest.raises(pytest.UsageError, match=f"cases that do not exist:\ntest_x.py::{test}"):
        split(monkeypatch, file, test, cases)
