"""The planted bugs of tests/mutants.toml apply to the source as it is; `make mutants` tries them."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import mutants  # noqa: E402  # of scripts/


def test_every_planted_bug_applies() -> None:
    planted = mutants.read(ROOT / "tests" / "mutants.toml")
    assert mutants.find_stale(planted, ROOT) == []
    assert len({one.name for one in planted}) == len(planted) >= 60
    named = {path.partition("::")[0] for one in planted for path in one.tests if path.startswith("tests/")}
    assert all((ROOT / path).exists() for path in named)
