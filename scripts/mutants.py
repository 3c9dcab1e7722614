#!/usr/bin/env python3
"""Plant the bugs of tests/mutants.toml one by one, and check that a test fails for each.

    make mutants                             all of them; writes benchmarks/mutants.md
    python scripts/mutants.py flux           those with "flux" in their name or file; writes nothing
    python scripts/mutants.py --short        with the cases that `make test` asks; writes nothing

The tests run on a copy of the checkout. Each bug has a forked process of its own, in which torch, diffusers,
transformers and peft are imported already and the library is not, so that it is imported with the bug. Exit code 1: a
bug survived, or no longer applies.
"""

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "benchmarks" / "mutants.md"
MOST_SECONDS = 600
"""A bug that lets the tests run longer than this counts as caught: a user would notice a training that hangs."""


@dataclass(frozen=True)
class Mutant:
    """A planted bug: see tests/mutants.toml."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """What the tests said of a bug. `caught_by` is the test that failed first, or "" if all passed."""

    mutant: Mutant
    caught_by: str
    seconds: float


def read(path: Path) -> list[Mutant]:
    """Read the bugs from their file."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def find_stale(mutants: list[Mutant], root: Path) -> list[str]:
    """Return a line for each bug whose text is not in its file exactly once."""
    counts = {mutant: (root / mutant.file).read_text(encoding="utf-8").count(mutant.old) for mutant in mutants}
    return [f"{one.name}: {one.file} has its line {count} times" for one, count in counts.items() if count != 1]


def copy_checkout(folder: Path) -> None:
    """Copy the files that git knows or would take, as they are now."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(mutant: Mutant, copy: Path, options: tuple[str, ...] = ()) -> str:
    """Run the bug's tests in a forked process. Returns the test that failed first, or "" if all passed."""
    result = copy / "caught"
    result.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(_test(mutant, copy, result, options))
        finally:
            os._exit(70)
    until = time.monotonic() + MOST_SECONDS
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return f"nothing within {MOST_SECONDS} s"
        time.sleep(0.05)
    if result.exists():
        return result.read_text(encoding="utf-8")
    code = os.waitstatus_to_exitcode(ended[1])
    # pytest ends with 4 for wrong arguments and 5 for no test at all, which with --short may be right: it survives.
    if code and not (code == 5 and "--short" in options):
        raise RuntimeError(f"{mutant.name}: pytest {' '.join(mutant.tests)} ended with {code}; see {copy}/output.txt")
    return ""


def _test(mutant: Mutant, copy: Path, result: Path, options: tuple[str, ...]) -> int:
    import pytest

    class Watch:
        def pytest_runtest_logreport(self, report: "pytest.TestReport") -> None:
            if report.failed and not result.exists():
                result.write_text(report.nodeid, encoding="utf-8")

        def pytest_collectreport(self, report: "pytest.CollectReport") -> None:
            if report.failed and not result.exists():
                result.write_text(f"{report.nodeid} (not collected)", encoding="utf-8")

    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:0] = [str(copy)]
    sys.dont_write_bytecode = True
    with (copy / "output.txt").open("w", encoding="utf-8") as output, redirect_stdout(output), redirect_stderr(output):
        return int(pytest.main([*mutant.tests, *options, "-x", "-q", "-p", "no:cacheprovider"], plugins=[Watch()]))


def try_mutant(mutant: Mutant, copy: Path, options: tuple[str, ...]) -> Outcome:
    """Plant a bug in the copy, run its tests, and take it out again."""
    file, started = copy / mutant.file, time.monotonic()
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        caught_by = run_tests(mutant, copy, options)
    finally:
        file.write_text(text, encoding="utf-8")
    if "::" in caught_by and run_tests(replace(mutant, tests=(caught_by,)), copy):
        raise RuntimeError(f"{caught_by} fails without a planted bug too")
    return Outcome(mutant, caught_by, time.monotonic() - started)


def render(outcomes: list[Outcome]) -> str:
    """Return the table as Markdown."""
    caught = sum(bool(one.caught_by) for one in outcomes)
    lines = [
        "# Planted bugs",
        "",
        f"`make mutants` changes one line of the library at a time and runs the tests that should notice: {caught} of "
        f"{len(outcomes)} are caught. The bugs are in [tests/mutants.toml](../tests/mutants.toml).",
        "",
        "| bug | file | the first test that failed |",
        "|---|---|---|",
    ]
    return "\n".join(
        [*lines, *(f"| {o.mutant.name} | {o.mutant.file} | {o.caught_by or '**none**'} |" for o in outcomes), ""]
    )


def main() -> int:
    """Try the bugs that the command line names. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only bugs with one of these words in their name or file")
    parser.add_argument("--short", action="store_true", help="with the cases that `make test` asks")
    given = parser.parse_args()
    words, options = given.words, ("--short",) if given.short else ()
    everything = read(ROOT / "tests" / "mutants.toml")
    mutants = [one for one in everything if not words or any(word in f"{one.name} {one.file}" for word in words)]
    if stale := find_stale(mutants, ROOT):
        print("\n".join(stale))
        return 1

    # Imported once, for all forks. Nothing of lora_fp8 may be there before the fork.
    for library in ("bitsandbytes", "diffusers", "peft", "transformers"):
        importlib.import_module(library)
    if "lora_fp8" in sys.modules:
        raise RuntimeError("lora_fp8 is imported already: the bugs would have no effect")
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        copy_checkout(Path(place))
        for number, mutant in enumerate(mutants, 1):
            outcome = try_mutant(mutant, Path(place), options)
            outcomes.append(outcome)
            told = outcome.caught_by or "SURVIVES"
            print(f"{number:3} of {len(mutants)}  {outcome.seconds:5.0f} s  {mutant.name}: {told}", flush=True)
    if not words and not options:
        TABLE.write_text(render(outcomes), encoding="utf-8")
    survivors = [one.mutant.name for one in outcomes if not one.caught_by]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} are caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
