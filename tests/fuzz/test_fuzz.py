"""A few hundred cases of each kind of fuzzing.py, in a process of their own; `make fuzz` has all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHORT = {"settings": 400, "loras": 500, "images": 120, "imports": 300, "remote": 1000}
FULL = {"settings": 20_000, "loras": 20_000, "images": 5_000, "imports": 5_000, "remote": 20_000}
SEED = 0


@pytest.mark.parametrize("kind", SHORT)
def test_broken_files_are_used_or_refused_in_words(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    full = bool(os.environ.get("FUZZ"))
    count = FULL[kind] if full else SHORT[kind] // (4 if request.config.getoption("short") else 1)
    keep = HERE.parents[1] / "fuzz-failures" if full else tmp_path
    command = [sys.executable, HERE / "fuzzing.py", kind, "--count", str(count), "--seed", str(SEED), "--keep", keep]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parents[1]), os.getenv("PYTHONPATH")]))
    }
    environment |= {"OMP_NUM_THREADS": "1", "LORA_FP8_HOME": str(tmp_path / "home")}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    crashed = "".join(path.read_text(encoding="utf-8") for path in Path(keep).glob(f"running-{kind}.txt"))
    assert done.stdout.strip(), f"crashed in {crashed or 'the beginning'}:\n{done.stderr[-4000:]}"
    outcome = json.loads(done.stdout.splitlines()[-1])
    print(outcome)
    assert not outcome["failures"], "\n".join(outcome["failures"])[:8000]
    assert done.returncode == 0, done.stderr[-4000:]
    assert outcome["cases"] == count
    # Mutations that are all refused at the door would test nothing behind it.
    assert outcome["answers"].get("used", 0) > count / 20 and outcome["answers"].get("refused", 0) > count / 20
