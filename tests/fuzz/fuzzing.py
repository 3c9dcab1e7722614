"""Broken and hostile files, made by the thousand: each is used, or refused in words; nothing hangs or fills the memory.

    python tests/fuzz/fuzzing.py loras --count 20000 [--seed 0] [--first 0] [--keep FOLDER]

A case is made from its seed and number alone, so that one that fails can be made again: `--first N --count 1`. Its
files are kept below `--keep`, beside what went wrong with it. The kinds:

    settings   the shipped configs and presets, mutated as text: loaded, and written and loaded again
    loras      adapters of every kind, mutated as tensors and as bytes: inspected, verified, converted, resized, merged,
               averaged, continued
    images     pictures of every mode and format, mutated as bytes: scanned, and looked at by the doctor
    imports    the other trainers' files of tests/data/import, mutated as values and as text: imported and written

What a case may raise is a `UserError` or a `RunFailure`, which the command line tells in words. Anything else is a
failure; so are more than 5 s of CPU time in one case (of this process: a busy machine fails nothing), and more than
2 GB of memory in all.
"""

import argparse
import faulthandler
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lora_fp8.errors import RunFailure, UserError
from lora_fp8.training.memory import read_peak_gib

KINDS = ("settings", "loras", "images", "imports", "remote")
CPU_SECONDS = 5.0
MOST_MEMORY = 2 << 30


class Hang(BaseException):
    """A case took more than CPU_SECONDS."""


@dataclass
class Outcome:
    """What became of some cases of one kind.

    Attributes:
        answers: how often a case was used, or refused.
        failures: what went wrong, with the folder of the case.
        longest: CPU seconds of the slowest case, and its number.
        memory: bytes that the process had at its peak.
    """

    kind: str
    cases: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    longest: tuple[float, int] = (0.0, -1)
    memory: int = 0

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "answers": dict(self.answers), "failures": self.failures[:3]}


@contextmanager
def bounded() -> Iterator[None]:
    """Raise Hang when the block has used up its CPU time."""

    def ring(*_: Any) -> None:
        raise Hang(f"more than {CPU_SECONDS:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def allowed(action: Callable[[], Any], answers: Counter[str]) -> Any:
    """Do it; an error that is told in words is an answer. Raises what is not."""
    try:
        found = action()
    except (UserError, RunFailure) as error:
        assert str(error).strip(), "an error without words"
        answers["refused"] += 1
        return None
    answers["used"] += 1
    return found


def fuzz(kind: str, seed: int, first: int, count: int, keep: Path) -> Outcome:
    """Make and use cases `first` to `first + count - 1` of a kind.

    The module `KIND_cases` has `Cases(work)`, with `make(random, folder)`, which writes the files of a case, and
    `use(folder, allowed)`, which does with them what a person would.
    """
    outcome = Outcome(kind)
    keep.mkdir(parents=True, exist_ok=True)
    running = keep / f"running-{kind}.txt"
    with tempfile.TemporaryDirectory(prefix=f"fuzz-{kind}-") as work:
        cases = import_module(f"{kind}_cases").Cases(Path(work))
        for number in range(first, first + count):
            folder = Path(work) / "case"
            folder.mkdir()
            running.write_text(f"{kind}, seed {seed}, case {number}", encoding="utf-8")  # for a crash of the process
            problem = ""
            begun = time.process_time()
            try:
                cases.make(random.Random(f"{kind}|{seed}|{number}"), folder)
                begun = time.process_time()
                with bounded():
                    cases.use(folder, lambda action: allowed(action, outcome.answers))
            except Hang as error:
                problem = str(error)
            except Exception:
                problem = traceback.format_exc()
            seconds = time.process_time() - begun
            if not problem and seconds > CPU_SECONDS:
                problem = f"{seconds:.1f} s of CPU time"
            outcome.longest = max(outcome.longest, (round(seconds, 2), number))
            outcome.cases += 1
            if problem:
                place = keep / f"{kind}-{seed}-{number}"
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(folder, place, symlinks=True)
                (place / "problem.txt").write_text(problem, encoding="utf-8")
                outcome.failures.append(f"{kind}, seed {seed}, case {number}, kept in {place}:\n{problem}")
                print(outcome.failures[-1], file=sys.stderr, flush=True)
            shutil.rmtree(folder)
    running.unlink(missing_ok=True)
    outcome.memory = round(read_peak_gib(torch.device("cpu")) * 2**30)
    if outcome.memory > MOST_MEMORY:
        outcome.failures.append(f"{kind}: {outcome.memory / 2**20:.0f} MiB of memory")
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--count", type=int, default=100, help="cases of each kind")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="where failing cases are kept")
    given = parser.parse_args()
    faulthandler.enable()
    failed = 0
    for kind in given.kinds:
        outcome = fuzz(kind, given.seed, given.first, given.count, given.keep)
        print(json.dumps(outcome.to_json()), flush=True)
        failed += len(outcome.failures)
    return int(bool(failed))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
