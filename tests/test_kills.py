"""Two hundred SIGKILLs at random moments of a training: always the bytes of the run that was never killed.

KILLS=2000 in the environment makes it two thousand.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lora_fp8 import config

ROOT = Path(__file__).parent.parent
KILLS = int(os.environ.get("KILLS", "200"))
SETTINGS = (
    "train.steps=12",
    "adapter.rank=16",
    "adapter.targets=['attn1.to_q', 'attn2.to_k', 'ff.net.0.proj']",
    "adapter.dropout=0.1",
    "dataset.flip=true",
    "dataset.caption_dropout=0.2",
    "dataset.resolution=32",
)


def kill(job, folder: Path, kills: int, *more: str) -> dict[str, Any]:
    """What kill_server.py tells of so many kills."""
    mine = job(*SETTINGS, f"dataset.cache_dir='{folder / 'cache'}'")
    (folder / "job.toml").write_text(config.dumps(mine), encoding="utf-8")
    script = [sys.executable, str(ROOT / "tests" / "kill_server.py"), str(folder / "job.toml"), str(folder / "kills")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*script, str(kills), "1", *more], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    told = json.loads(done.stdout.splitlines()[-1])
    print(
        f"\n{told['kills']} kills over {told['completed']} runs of {told['run_s']} s in {told['seconds']} s; "
        f"{told['in_save']} in the middle of a save; by stage: {told['stages']}"
    )
    return told


@pytest.mark.timeout(max(900, 4 * KILLS))
def test_killed_at_random_moments_it_ends_with_the_same_bytes(job, tmp_path, capsys):
    with capsys.disabled():
        told = kill(job, tmp_path, KILLS)
    assert told["faults"] == []
    assert told["kills"] >= KILLS and told["completed"] >= KILLS / 15 and told["differing"] == 0
    assert told["in_save"] >= 1 and told["stages"]["train"] > KILLS / 4


def test_a_naive_way_of_saving_is_found_out(job, tmp_path):
    """The same loop over a saver that writes in place: were nothing found here, the test above would prove nothing."""
    told = kill(job, tmp_path, 16, "naive")
    assert any(fault.startswith("unloadable") for fault in told["faults"])
