"""Kills a training again and again at random moments, resumes it, and compares what it ends with. Run by test_kills.py.

    python tests/kill_server.py CONFIG FOLDER KILLS SEED [naive]

A process of its own, because it forks: it imports everything once, does not train itself (no thread is started before
a fork), and each attempt is a forked child that calls train.run(job, resume=True), so that an attempt costs a fraction
of a second and not the ten of the imports. A kill is SIGKILL, after a delay drawn uniformly over the time that an
uninterrupted run takes. Prints one line of JSON.

With `naive`, checkpoints are written straight to where they belong, as many trainers do: what is looked for must then
be found.
"""

import collections
import gc
import hashlib
import json
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

torch.set_num_threads(1)

import bitsandbytes  # noqa: E402, F401
import diffusers  # noqa: E402
import transformers  # noqa: E402, F401

from lora_fp8 import checkpoint, config, families, train  # noqa: E402
from lora_fp8.run import Run, RunFailure  # noqa: E402


def naive_save(folder: Path, adapter: dict, optimizer: dict, state: dict, keep: int) -> tuple[Path, list[str]]:
    """What checkpoint.save is not: no staging, no sync. The files themselves are the same."""
    whole, gone = real_save(folder / "elsewhere", adapter, optimizer, state, keep)
    final = folder / whole.name
    final.mkdir(exist_ok=True)
    for source in sorted(whole.iterdir()):
        data = source.read_bytes()
        with open(final / source.name, "wb", buffering=0) as file:
            for begin in range(0, len(data), 4096):
                file.write(data[begin : begin + 4096])
                time.sleep(0.002)  # a model's adapter is larger than a miniature's and takes longer
    return final, gone


real_save = checkpoint.save


def start(job: config.Job) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        train.run(job, resume=True, progress=False)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # nothing of the parent's is run, flushed or removed


def ended_by_itself(pid: int, seconds: float) -> bool:
    descriptor = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(descriptor)


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def job_in(job: config.Job, folder: Path, cold: bool) -> config.Job:
    """The job in a folder of its own; the last parts of its paths, which are in the file's metadata, stay the same."""
    updates = {"output_dir": str(folder / "runs")}
    if cold:
        updates["dataset"] = job.dataset.model_copy(update={"cache_dir": str(folder / "cache")})
    return job.model_copy(update=updates)


def outcome(job: config.Job) -> dict[str, str]:
    """SHA-256 of the exported files and of the last checkpoint."""
    folder = Path(job.output_dir) / job.name
    files = [*(folder / "export").iterdir(), *(folder / "checkpoints" / f"step-{job.train.steps:06d}").iterdir()]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def examine(run: Run, faults: list[str]) -> str:
    """After a kill: every bundle that has its name is whole, none that was acknowledged is lost. -> stage it was in"""
    newest = 0
    for path in run.checkpoints.glob("step-*"):
        try:
            newest = max(newest, checkpoint.read(path).step)
        except RunFailure as failure:
            faults.append(f"unloadable: {failure}")
    events = run.events()
    acknowledged = max((event["step"] for event in events if event["event"] == "checkpoint"), default=0)
    if newest < acknowledged:
        faults.append(f"lost: step {acknowledged} was acknowledged, the newest is {newest}")
    if run.alive():
        faults.append("a killed run is said to be alive")
    return next((event["stage"] for event in reversed(events) if event["event"] == "stage"), "start")


def main(config_file: str, folder: Path, kills_wanted: int, seed: int, naive: bool) -> None:
    job = config.load(config_file)
    if naive:
        checkpoint.save = naive_save
    families.get(job.model.family)
    for name in ("AutoencoderKL", "UNet2DConditionModel", "StableDiffusionPipeline", "DDIMScheduler"):
        getattr(diffusers, name)  # imported on first use
    gc.freeze()  # what is imported is no garbage: children need not look through it
    rng = random.Random(seed)

    # A first uninterrupted run fills the cache; the second one is the reference and tells how long a run takes.
    for name in ("first", "reference"):
        reference = job_in(job, folder / name, cold=False)
        began = time.perf_counter()
        assert exit_code(start(reference)) == 0
        duration = time.perf_counter() - began
    expected = outcome(reference)

    began = time.perf_counter()
    kills, completed, in_save, differing, faults = 0, 0, 0, 0, []
    stages: collections.Counter[str] = collections.Counter()
    while kills < kills_wanted:
        place = folder / f"{completed:04d}"
        mine = job_in(job, place, cold=completed % 4 == 3)
        run = Run(Path(mine.output_dir) / mine.name)
        while True:
            pid = start(mine)
            if not ended_by_itself(pid, rng.uniform(0, duration)):
                os.kill(pid, signal.SIGKILL)
            code = exit_code(pid)
            if code == 0:
                break
            if code != -signal.SIGKILL:
                faults.append(f"an attempt ended with {code}")
                break
            kills += 1
            in_save += any(run.checkpoints.glob(".tmp-*"))
            stages[examine(run, faults)] += 1
        completed += 1
        same = code == 0 and outcome(mine) == expected
        differing += code == 0 and not same
        if same:
            shutil.rmtree(place)  # others stay, to look at
    told = {"kills": kills, "completed": completed, "differing": differing, "faults": faults, "in_save": in_save}
    told |= {"stages": stages, "run_s": round(duration, 2), "seconds": round(time.perf_counter() - began, 1)}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), "naive" in sys.argv[5:])
