"""Two hundred SIGKILLs at random moments of a training: always the bytes of the run that was never killed."""

import json
import subprocess
import sys
from pathlib import Path

from lora_fp8 import config

ROOT = Path(__file__).parent.parent
KILLS = 200


def test_killed_at_random_moments_it_ends_with_the_same_bytes(job, tmp_path, capsys):
    small = job(
        "train.steps=12",
        "adapter.rank=16",
        "adapter.targets=['attn1.to_q', 'attn2.to_k', 'ff.net.0.proj']",
        "adapter.dropout=0.1",
        "dataset.flip=true",
        "dataset.caption_dropout=0.2",
        "dataset.resolution=32",
        f"dataset.cache_dir='{tmp_path / 'cache'}'",
    )
    (tmp_path / "job.toml").write_text(config.dumps(small), encoding="utf-8")
    script = [sys.executable, str(ROOT / "tests" / "kill_server.py"), str(tmp_path / "job.toml"), str(tmp_path / "kills")]
    done = subprocess.run([*script, str(KILLS), "1"], cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        print(
            f"\n{told['kills']} kills over {told['completed']} runs of {told['run_s']} s in {told['seconds']} s; "
            f"{told['in_save']} in the middle of a save; by stage: {told['stages']}"
        )
    assert told["faults"] == [], done.stderr
    assert told["kills"] >= KILLS and told["completed"] >= 20 and told["differing"] == 0
    assert told["in_save"] >= 1 and told["stages"]["train"] > KILLS / 4
