#!/usr/bin/env python3
"""Show the tasks that are written for SkyPilot to SkyPilot's own parser.

    python scripts/check_sky_task.py                       installs SkyPilot into a temporary environment first (460 MB)
    python scripts/check_sky_task.py --python VENV/bin/python    one that has it

SkyPilot brings about 90 packages, and so it is in no set that this project installs. Nothing is rented: its parser and
its schema read each task, and the script compares what they made of it. Exit code 1 if they refuse one or differ.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lora_fp8.jobs.remote.script import RemoteJob, check, render_task

VERSION = "0.14.1"
JOBS = (
    RemoteJob("my-lora", "runs/my-lora", "sky", accelerator="L40S", install=("pip install x",)),
    RemoteJob('小猫 it\'s "$HOME"', "runs/x", "sky", gpus=8, accelerator="H100", install=("a 'b'", "c: d # e")),
    RemoteJob("on a CPU", "runs/x", "sky", gpus=0, install=("pip install x",)),
)
PARSE = """
import json, sys, sky
task = sky.Task.from_yaml(sys.argv[1])
[resources] = task.resources
print(json.dumps([task.name, task.workdir, task.num_nodes, task.setup, task.run, resources.accelerators]))
"""


def main() -> int:
    """Parse each task with SkyPilot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="Python that has SkyPilot")
    python = parser.parse_args().python
    with tempfile.TemporaryDirectory() as folder:
        if python is None:
            venv.create(f"{folder}/venv", with_pip=True)
            python = f"{folder}/venv/bin/python"
            subprocess.run([python, "-m", "pip", "install", "--quiet", f"skypilot=={VERSION}"], check=True)
        wrong = 0
        for number, job in enumerate(JOBS):
            check(job)
            file = Path(folder, f"{number}.yaml")
            file.write_text(render_task(job, folder), encoding="utf-8")
            done = subprocess.run([python, "-c", PARSE, str(file)], capture_output=True, text=True, check=False)
            parsed = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-2000:]
            install = "\n".join(job.install) + "\n"
            gpus = {job.accelerator: job.gpus} if job.gpus else None
            expected = [parsed[0], folder, 1, install, "exec bash -l job.sh >> log.txt 2>&1\n", gpus]
            wrong += parsed != expected
            print(f"{'accepted' if parsed == expected else 'WRONG'}: {job.name}: {parsed}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
