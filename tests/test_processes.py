"""Real processes: `accelerate launch` with two against one, and the exit codes of train_lora.py.

On a machine without a GPU, `--multi_gpu --num_processes 2` makes two CPU processes that exchange gradients through
gloo: the same code as on two GPUs, but for NCCL. Where the launcher itself does not matter, the processes are forked
from one that has imported torch already and told of each other as the launcher tells them (`forked.start_group`).

accelerate's launcher turns every nonzero exit code of its children into 1, with a traceback of its own. So 2, 3 and 75
can be relied on with `python train_lora.py` and `lora-fp8 train`; under `accelerate launch` only zero or not, and the
one line that says what is wrong stands above the launcher's.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import forked
import pytest
import torch
from safetensors.torch import load_file
from waiting import LONG_SECONDS

from lora_fp8 import config, train
from lora_fp8.cli import commands
from lora_fp8.common import messages
from lora_fp8.distributed import processes
from lora_fp8.errors import Stopped
from lora_fp8.run import Run

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "train_lora.py"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
SMALL = ("adapter.rank=16", "adapter.targets=['attn1.to_q', 'attn2.to_k', 'ff.net.0.proj']")

# Fifteen samples in batches of four, of three buckets: 9 -> 4, 4, 1 and 3 and 3. So there are full batches, batches
# that two processes share unequally, and one of which the second process has nothing. Ten steps are two epochs.
SHARED = (
    *SMALL,
    "train.steps=10",
    "train.batch_size=4",
    "checkpoint.every=5",
    "dataset.folders.0.repeats=3",
    "dataset.flip=true",
    "dataset.caption_dropout=0.2",
)
FLOAT32 = (
    "model.dtype=fp32",
    "quantize.storage=none",
    "adapter.dtype=fp32",
    "optimizer.name=adamw",
    "export.dtype=fp32",
)

SHOWN = (
    "preview.prompts=['a cat', 'a dog', 'a bird']",
    "preview.every=4",
    "export.verify=true",
    "tracking.to=['tensorboard']",
)

# train_lora.py, noting which samples each process takes, which previews it draws and what it trained.
RECORDING = f"""
import functools, hashlib, inspect, json, os, runpy
import torch
from lora_fp8.stages import previews
from lora_fp8.training import optim
from lora_fp8.data import loader

def note(kind, *what):
    with open(f"{{os.environ['SHARES']}}/{{os.environ['RANK']}}.{{kind}}", "a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\\n")

def noting(room, name, kind, what):
    real = getattr(room, name)
    @functools.wraps(real)
    def noted(*given, **more):
        result = real(*given, **more)
        note(kind, *what(result, *given, **more))
        return result
    setattr(room, name, noted)

def weights(_, optimizer, *more):
    digest = hashlib.sha256()
    for name, parameter in sorted(optimizer.params.items()):
        digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return [digest.hexdigest()]

def samples(batch, self, step, index, rank=0, world=1):
    return step, index, world, batch.uids if batch else []

def previewed(images, *given, **more):
    numbers = inspect.signature(previews.draw_clips.__wrapped__).bind(*given, **more).arguments.get("numbers")
    return [] if numbers is None else [list(numbers)]

os.environ.setdefault("RANK", "0")
noting(loader.Loader, "take_batch", "samples", samples)
noting(previews, "draw_clips", "previews", previewed)
noting(optim.AdapterOptimizer, "step", "weights", weights)
exec(os.environ["PLANTED"])
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def folder_of(job) -> Path:
    return Path(job.output_dir) / job.name


def write(job, folder: Path) -> Path:
    path = folder / "job.toml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(config.dumps(job), encoding="utf-8")
    return path


def start(job, folder: Path, number: int, *more: str, planted: str = "") -> subprocess.Popen:
    """accelerate launch [--multi_gpu] --num_processes N train_lora.py --config .. [more]; `planted` is run before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config_file = write(job, folder)
    (folder / "recording.py").write_text(RECORDING, encoding="utf-8")
    many = ["--multi_gpu", "--main_process_port", str(port)] if number > 1 else []
    accelerate = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *many]
    accelerate += ["--num_processes", str(number), "--num_machines", "1", "--mixed_precision", "no"]
    accelerate += ["--dynamo_backend", "no"]
    command = [*accelerate, str(folder / "recording.py"), "--config", str(config_file), "--json", *more]
    environment = ENVIRONMENT | {"SHARES": str(folder), "PLANTED": planted}
    pipe = subprocess.PIPE
    # A session of its own: a signal to its process group is what Ctrl-C in a terminal is.
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, encoding="utf-8", start_new_session=True
    )


def run_forked(
    job, folder: Path, number: int, *more: str, planted: str = "", machines: int = 1
) -> subprocess.CompletedProcess:
    """Run the same processes without a launcher. Returns what the first printed, and all exit codes if one is not 0."""
    config_file = write(job, folder)
    (folder / "recording.py").write_text(RECORDING, encoding="utf-8")
    args = [str(folder / "recording.py"), "--config", str(config_file), "--json", *more]
    environment = {"SHARES": str(folder), "PLANTED": planted}
    group = forked.start_group(args, number, cwd=folder, env=environment, machines=machines)
    try:
        said = [process.communicate(timeout=LONG_SECONDS) for process in group]
    finally:
        for process in group:
            process.kill()
    codes = [process.returncode for process in group]
    return subprocess.CompletedProcess(args, any(codes) and codes, said[0][0], "\n".join(err for _, err in said))


def wait_for_step(process: subprocess.Popen, number: int) -> None:
    for line in process.stdout:
        if line.startswith("{") and (event := json.loads(line))["event"] == "step" and event["step"] == number:
            return
    raise AssertionError(f"it ended before step {number}: {process.stderr.read()[-3000:]}")


def launch(job, folder: Path, number: int, *more: str, planted: str = "") -> subprocess.CompletedProcess:
    """As `start`, until it has ended."""
    process = start(job, folder, number, *more, planted=planted)
    try:
        stdout, stderr = process.communicate(timeout=LONG_SECONDS)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def left_over(folder: Path) -> list[str]:
    """Command lines of processes that `start` began in this folder and that are still there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"SHARES={folder}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # gone, or somebody else's
            continue
    return found


def noted(folder: Path, rank: int, kind: str) -> list[list]:
    return [json.loads(line) for line in (folder / f"{rank}.{kind}").read_text(encoding="utf-8").splitlines()]


def shares(folder: Path, rank: int) -> list[tuple[int, list[str]]]:
    """(micro-batch, samples) that a process trained on; step 0 is the preflight's."""
    return [(index, uids) for step, index, _, uids in noted(folder, rank, "samples") if step > 0]


def losses(job) -> list[float]:
    return [event["loss"] for event in Run.open(folder_of(job)).read_events() if event["event"] == "step"]


@pytest.fixture(scope="module")
def float32(make_job, tmp_path_factory):
    """The same job in float32, with two processes and with one: {processes: (job, folder, what was printed)}."""
    root = tmp_path_factory.mktemp("float32")
    runs = {}
    for number in (1, 2):
        folder = root / str(number)
        job = make_job(folder, *SHARED, *FLOAT32)
        done = run_forked(job, folder, number)
        assert not done.returncode, done.stderr[-3000:]
        runs[number] = job, folder, done
    return runs


def test_two_processes_end_with_the_weights_of_one(float32):
    last = [folder_of(float32[n][0]) / "checkpoints" / "step-000010" / "adapter.safetensors" for n in (1, 2)]
    one, two = map(load_file, last)
    assert one.keys() == two.keys() and len(one) == 2 * 12
    gaps = {name: float((two[name] - one[name]).norm()) for name in one}
    joint = sum(gap**2 for gap in gaps.values()) ** 0.5 / sum(float(t.norm()) ** 2 for t in one.values()) ** 0.5
    worst = max(gap / float(one[name].norm()) for name, gap in gaps.items())
    print(f"\ntwo processes against one: adapters differ by {joint:.1e}, the worst tensor by {worst:.1e}")
    assert joint < 1e-5 and worst < 1e-4
    assert all(torch.isfinite(tensor).all() and tensor.any() for tensor in two.values())
    assert losses(float32[2][0]) == pytest.approx(losses(float32[1][0]), rel=1e-5)


def test_every_sample_comes_as_often_as_repeats_say(float32):
    """Over both processes, each epoch; and the processes split the very batches that one would have had."""
    alone, first, second = shares(float32[1][1], 0), shares(float32[2][1], 0), shares(float32[2][1], 1)
    assert [index for index, _ in alone] == [index for index, _ in first] == [index for index, _ in second]
    assert [index for index, _ in alone] == list(range(10))
    for (_, whole), (_, mine), (_, yours) in zip(alone, first, second, strict=True):
        assert sorted(mine + yours) == sorted(whole) and len(mine) - len(yours) in (0, 1)
    for epoch in range(2):
        seen = Counter(uid for part in (first, second) for index, uids in part if index // 5 == epoch for uid in uids)
        assert len(seen) == 15 and set(seen.values()) == {1}
        assert set(Counter(uid.partition("#")[0] for uid in seen).values()) == {3}
    sizes = {(len(mine), len(yours)) for (_, mine), (_, yours) in zip(first, second, strict=True)}
    assert {(2, 2), (2, 1), (1, 0)} <= sizes  # the odd cases are there, a process with nothing among them


def test_the_run_is_written_by_one_process(float32):
    job, _, done = float32[2]
    events = Run.open(folder_of(job)).read_events()
    assert [event["processes"] for event in events if event["event"] == "start"] == [2]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 11))
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [5, 10]
    assert [event["event"] for event in events].count("done") == 1
    printed = [messages.restore(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]
    assert printed == events
    assert sorted(path.name for path in (folder_of(job) / "export").iterdir()) == [
        "lora_diffusers.safetensors",
        "lora_kohya.safetensors",
    ]


# Whoever has gone, the launcher ends the rest; a main process that writes slowly must have written by then.
SLOW = """
import time
from lora_fp8 import run
def slowly(room, name, when=lambda *given: True):
    real = getattr(room, name)
    def slow(*given, **more):
        if when(*given):
            time.sleep(3)
        return real(*given, **more)
    setattr(room, name, slow)
slowly(run.Run, "log_event", lambda self, event: event == "stopped")
"""


@pytest.fixture(scope="module")
def defaults(make_job, tmp_path_factory):
    """FP8, bf16 and 8-bit AdamW with two processes, previews and verification: (job, folder)."""
    folder = tmp_path_factory.mktemp("defaults")
    job = make_job(folder, *SHARED, *SHOWN)
    done = run_forked(job, folder, 2)
    assert not done.returncode, done.stderr[-3000:]
    return job, folder


def test_with_fp8_bf16_and_8_bit_the_loss_curves_agree(make_job, tmp_path, defaults):
    """One process here, in this process: that train.run and the script do the same is part of what is compared."""
    two = defaults[0]
    one = make_job(tmp_path / "1", *SHARED)
    train.run(one, progress=False)
    gaps = [abs(b - a) / a for a, b in zip(losses(one), losses(two), strict=True)]
    print(f"\nlargest relative gap of the loss at one of {len(gaps)} steps: {max(gaps):.1e}")
    assert len(gaps) == 10 and max(gaps) < 0.01


def test_two_processes_stopped_and_resumed_end_with_the_bytes_of_two_that_were_not(
    make_job, tmp_path, defaults, tree_hash
):
    """accelerate turns 75 into 1: that it stopped, and was not broken, stands in status.json and in events.jsonl."""
    job = make_job(tmp_path, *SHARED, *SHOWN)
    run = Run(folder_of(job))
    process = start(job, tmp_path, 2, planted=SLOW)
    wait_for_step(process, 2)
    run.request("stop")
    _, stderr = process.communicate(timeout=LONG_SECONDS)
    assert process.returncode == 1
    status = json.loads(run.status_file.read_text(encoding="utf-8"))
    at = status["step"]
    assert status["state"] == "stopped" and 3 <= at < 9
    assert run.read_events()[-1] == {
        **run.read_events()[-1],
        "event": "stopped",
        "text": f"saved at step {at}; `lora-fp8 resume {run.path}` continues",
    }
    assert stderr.count(f"saved at step {at}") == 1
    assert f"step-{at:06d}" in [path.name for path in run.checkpoints.iterdir()]
    assert not run.is_locked() and not any(run.export.iterdir()) and left_over(tmp_path) == []

    done = run_forked(job, tmp_path, 2, "--resume")
    assert not done.returncode, done.stderr[-3000:]
    assert json.loads(run.status_file.read_text(encoding="utf-8"))["state"] == "done"
    assert not run.is_locked()
    steps = [event["step"] for event in run.read_events() if event["event"] == "step"]
    assert steps == list(range(1, 11))
    told = json.loads(run.verify_file.read_text(encoding="utf-8"))
    assert [report["ok"] for report in told.values()] == [True, True]
    assert len([event for event in run.read_events() if event["event"] == "export"]) == 2  # two formats, by one process
    assert kept(job, tree_hash) == kept(defaults[0], tree_hash)
    assert len(kept(job, tree_hash)) == 2 + 4


def test_a_tracker_gets_each_step_once_from_the_main_process(defaults):
    """TensorBoard's own reader: a second process that logged too would leave a second file, or each step twice."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = list((folder_of(defaults[0]) / "tensorboard").iterdir())
    assert len(files) == 1
    reader = EventAccumulator(str(files[0]), size_guidance={"scalars": 0})
    reader.Reload()
    logged = [(entry.step, entry.value) for entry in reader.Scalars("train/loss")]
    assert logged == list(enumerate(map(pytest.approx, losses(defaults[0])), 1))


def test_both_processes_hold_the_same_weights_after_every_step(defaults):
    first, second = (noted(defaults[1], rank, "weights") for rank in (0, 1))
    assert len(first) == 10 and first == second and first[0] != first[-1]


def test_previews_are_shared_out_and_are_those_of_one_process(make_job, tmp_path, defaults):
    """Three prompts: two for the main process, one for the other, at steps 0, 4, 8 and 10. Nobody draws all."""
    job, folder = defaults
    assert noted(folder, 1, "previews") == [[[1]]] * 4
    mine = noted(folder, 0, "previews")
    assert mine[:8] == [[[0]], [[2]]] * 4 and all(all_of_them == [] for all_of_them in mine[8:])  # by verify
    names = sorted(path.name for path in (folder_of(job) / "samples").iterdir())
    assert names == ["contact_sheet.png", *(f"step-{n:06d}-{i}.png" for n in (0, 4, 8, 10) for i in range(3))]
    previews = [event for event in Run.open(folder_of(job)).read_events() if event["event"] == "preview"]
    assert [(event["step"], len(event["images"])) for event in previews] == [(0, 3), (4, 3), (8, 3), (10, 3)]
    alone = make_job(tmp_path, *SHARED, *SHOWN, "train.steps=1", "export.verify=false")
    train.run(alone, progress=False)
    for i in range(3):  # before the first step the adapters are the same to the bit, and so are the pictures
        name = f"samples/step-000000-{i}.png"
        assert (folder_of(alone) / name).read_bytes() == (folder_of(job) / name).read_bytes()


QUICK = (*SMALL, "train.steps=30", "train.batch_size=2", "checkpoint.every=20")


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        (
            "change(job.dataset.folders[0], 'repeats', 2)",
            "dataset.folders.0.repeats: process 1 has 2, and process 0 has 1.",
        ),
        (
            "plan.images.buckets.popitem()",
            "process 1 has other images or captions than process 0 (5 and 5 images). Put them on a disk that all",
        ),
        (
            "change(plan, 'base_identity', '0')",
            "process 1 has another base model than process 0. Put it on a disk that all",
        ),
        ("change(job.dataset.folders[0], 'path', '/elsewhere'); change(job.train, 'threads', 7)", "no difference"),
    ],
    ids=["settings", "images", "base", "its own"],
)
def test_processes_that_would_train_something_else_are_refused(make_job, tmp_path, planted, said):
    """A machine with another config or other files: each process would follow its own plan, and nobody would notice."""
    job = make_job(tmp_path, *QUICK)
    other = f"""
from lora_fp8 import train
real, change = train.require_same_job, object.__setattr__  # settings are frozen
def require_same_job(plan, processes):
    job = plan.job
    if os.environ["RANK"] == "1":
        {planted}
    real(plan, processes)
    raise train.UserError("no difference")
train.require_same_job = require_same_job
"""
    done = run_forked(job, tmp_path, 2, planted=other)
    assert done.returncode and done.returncode[0] == 2 and said in done.stderr, done.stderr[-3000:]
    assert not folder_of(job).exists()


def test_a_port_that_is_in_use_is_told_in_one_line(make_job, tmp_path):
    job = make_job(tmp_path)
    (tmp_path / "recording.py").write_text(RECORDING, encoding="utf-8")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(taken.getsockname()[1])}
        group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "SHARES": str(tmp_path), "PLANTED": ""}
        args = [str(tmp_path / "recording.py"), "--config", str(write(job, tmp_path))]
        process = forked.start(args, cwd=tmp_path, env=place | group)
        _, stderr = process.communicate(timeout=LONG_SECONDS)
    assert process.returncode == 3 and "Traceback" not in stderr
    assert f"the processes cannot meet at 127.0.0.1:{place['MASTER_PORT']}: " in stderr and "EADDRINUSE" in stderr


STOPPED_WHILE_DRAWING = """
import signal
from lora_fp8.run import Run
real_draw, drawn = previews.draw_clips, []
@functools.wraps(real_draw)
def draw_clips(family, pipeline, prompts, side, numbers=None):
    drawn.append(numbers)
    if len(drawn) == FIRST[int(os.environ["RANK"])]:  # the first preview of step 4
        if HOW == "signal" and os.environ["RANK"] == "1":
            signal.raise_signal(signal.SIGTERM)
        if HOW == "request" and os.environ["RANK"] == "0":
            Run(FOLDER).request("stop")
        if HOW == "request" and os.environ["RANK"] == "1":
            raise RuntimeError("it still has to take part in the decision")
    return real_draw(family, pipeline, prompts, side, numbers)
previews.draw_clips = draw_clips
"""


@pytest.mark.parametrize(
    ("how", "more"),
    [("signal", ()), ("request", ()), ("signal", ("memory.shard_base=true",))],
    ids=["signal", "request", "shared base"],
)
def test_two_processes_stop_between_two_previews_and_draw_them_when_resumed(
    make_job, tmp_path, defaults, tree_hash, how, more
):
    """Whichever was told to, and though the second has nothing to draw where they decide."""
    job = make_job(tmp_path, *SHARED, *SHOWN, *more)
    first = [3, 3] if more else [3, 2]  # with a shared base, a preview of step 0 stands in on the second process
    known = f"HOW, FOLDER, FIRST = {how!r}, Path({str(folder_of(job))!r}), {first}"
    planted = f"from pathlib import Path\n{known}\n{STOPPED_WHILE_DRAWING}"
    done = run_forked(job, tmp_path, 2, planted=planted)
    assert done.returncode and done.returncode[0] == 75 and "saved at step 4" in done.stderr, done.stderr[-3000:]
    run = Run.open(folder_of(job))
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == ["step-000004"]
    assert not list(run.samples.glob("step-000004-*")) and run.read_events()[-1]["event"] == "stopped"
    assert len(noted(tmp_path, 0, "previews")) == 3
    if how == "request" or more:
        return
    done = run_forked(job, tmp_path, 2, "--resume")
    assert not done.returncode, done.stderr[-3000:]
    assert tree_hash(run.samples) == tree_hash(folder_of(defaults[0]) / "samples")
    assert kept(job, tree_hash) == kept(defaults[0], tree_hash)


def test_ctrl_c_saves_and_stops_all(make_job, tmp_path):
    """The terminal gives SIGINT to its process group, and the launcher gives it to the processes that it started."""
    job = make_job(tmp_path, *QUICK)
    process = start(job, tmp_path, 2)
    wait_for_step(process, 2)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=LONG_SECONDS)
    assert process.returncode != 0
    run = Run.open(folder_of(job))
    last = run.read_events()[-1]
    assert last["event"] == "stopped" and last["text"].startswith("saved at step "), stderr[-3000:]
    at = json.loads(run.status_file.read_text(encoding="utf-8"))
    assert at["state"] == "stopped" and 2 <= at["step"] < 20
    assert [path.name for path in run.checkpoints.iterdir()] == [f"step-{at['step']:06d}"]
    assert left_over(tmp_path) == []


@pytest.mark.parametrize("what", ["an exception", "a picture", "a kill"])
def test_what_goes_wrong_on_another_process_is_told_by_the_main_one(make_job, tmp_path, what):
    """The other process's own words reach events.jsonl, at once; a kill leaves none, but an end there is."""
    planted = {
        "an exception": "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2 GiB')",
        "a picture": "batch.latents_BCHW.fill_(float('nan'))",
        "a kill": "os.kill(os.getpid(), 9)",
    }[what]
    job = make_job(tmp_path, *QUICK)
    run_both = launch if what == "a kill" else run_forked  # the launcher ends the rest when one is killed
    done = run_both(
        job,
        tmp_path,
        2,
        planted=f"""
real_take = loader.Loader.take_batch
def take_batch(self, step, *more):
    batch = real_take(self, step, *more)
    if os.environ["RANK"] == "1" and step >= 3 and batch is not None:
        {planted}
    return batch
loader.Loader.take_batch = take_batch
""",
    )
    assert done.returncode and left_over(tmp_path) == []
    run = Run.open(folder_of(job))
    last = run.read_events()[-1]
    assert last["event"] == "error" and not run.is_locked(), done.stderr[-3000:]
    assert {
        "an exception": "process 1 of 2: out of memory on cpu",
        "a picture": ": loss nan is not finite; files: ",
        "a kill": "another process of this job exited",
    }[what] in last["text"]
    if what == "a picture":
        assert (".png" in last["text"] or ".jpg" in last["text"]) and done.stderr.count("is not finite; files") == 1


def test_a_second_start_of_two_processes_is_refused_in_one_line(make_job, tmp_path):
    job = make_job(tmp_path, *QUICK)
    first = Run.create(folder_of(job), config.dumps(job))
    try:
        done = run_forked(job, tmp_path, 2)
    finally:
        first.close()
    assert done.returncode == [2, 0]  # the main process tells it, and the other goes without a word
    assert done.stderr.count(f"process {os.getpid()} is training in this folder") == 1
    assert "has gone" not in done.stderr


def test_the_others_wait_long_enough_for_one(monkeypatch):
    """The libraries' 10 and 30 minutes would end a job whose main process encodes a large dataset."""
    given = {}

    class State:
        process_index, num_processes, is_local_main_process, device = 0, 1, True, torch.device("cpu")

        def __init__(self, **more):
            given.update(more)

    monkeypatch.setattr(processes, "PartialState", State)
    processes.Processes()
    assert given["timeout"].total_seconds() >= 12 * 3600


@pytest.mark.parametrize("machines", [1, 2])
def test_a_batch_that_cannot_be_shared_is_one_clear_line(make_job, tmp_path, machines):
    done = run_forked(make_job(tmp_path, *SHARED, "train.batch_size=3"), tmp_path, 2, machines=machines)
    # The main process tells it, and the other goes without a word. A launcher of another machine, whose processes all
    # return 0, would wait five minutes for the first one's.
    assert done.returncode == ([2, 0] if machines == 1 else [2, 2])
    lines = [line for line in done.stderr.splitlines() if "train.batch_size" in line]
    assert len(lines) == 1 and "3 is divided among 2 processes; use a multiple of 2" in lines[0]


# -- exit codes of the script


def script(*arguments: str, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=LONG_SECONDS, **more)


def forked_script(*arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    process = forked.start([str(SCRIPT), *arguments], cwd=cwd, env={})
    stdout, stderr = process.communicate(timeout=LONG_SECONDS)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def test_exit_2_for_a_bad_config_with_all_problems_and_no_traceback(tmp_path):
    (tmp_path / "job.toml").write_text('[model]\nfamily = "sd51"\npath = "x"\n[train]\nstep = 3\n', encoding="utf-8")
    done = script("--config", str(tmp_path / "job.toml"), cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stdout == ""
    assert "did you mean 'sd15'?" in done.stderr and "did you mean train.steps?" in done.stderr
    assert not (tmp_path / "runs").exists()
    done = forked_script("--config", str(tmp_path / "absent.toml"), cwd=tmp_path)
    assert (
        done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "this config file does not exist" in done.stderr
    )


LONG = (*SMALL, "train.steps=40", "checkpoint.every=25", "dataset.flip=true", "adapter.dropout=0.1")


@pytest.fixture(scope="module")
def uninterrupted(make_job, tmp_path_factory, tree_hash):
    """Export and last checkpoint of the long job, trained in this process."""
    job = make_job(tmp_path_factory.mktemp("uninterrupted"), *LONG)
    train.run(job, progress=False)
    return kept(job, tree_hash)


def kept(job, tree_hash):
    found = tree_hash(folder_of(job))
    last = f"checkpoints/step-{job.train.steps:06d}/"
    return {name: value for name, value in found.items() if name.startswith(("export/", last))}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_with_75_and_resume_ends_with_0(make_job, tmp_path, uninterrupted, tree_hash, number):
    job = make_job(tmp_path, *LONG)
    config_file = write(job, tmp_path)
    arguments = [str(SCRIPT), "--config", str(config_file), "--json"]
    if number == signal.SIGTERM:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, *arguments], env=ENVIRONMENT, encoding="utf-8", stdout=pipe, stderr=pipe
        )
    else:
        process = forked.start(arguments, cwd=tmp_path, env={})
    try:
        wait_for_step(process, 3)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=LONG_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 75 and "Traceback" not in stderr, stderr
    run = Run.open(folder_of(job))
    stopped_at = [event["step"] for event in run.read_events() if event["event"] == "step"][-1]
    assert 3 <= stopped_at < 25
    assert [path.name for path in run.checkpoints.iterdir()] == [f"step-{stopped_at:06d}"]
    assert f"saved at step {stopped_at}" in stderr and "lora-fp8 resume" in stderr
    assert run.read_events()[-1]["event"] == "stopped" and not run.is_locked() and not any(run.export.iterdir())

    refused = cli_exit(lambda: train.run(job, progress=False))
    assert refused == 2  # starting over what is there needs to be said
    if number == signal.SIGTERM:
        done = forked_script("--config", str(config_file), "--resume", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert "lora_diffusers.safetensors" in done.stdout and f"resuming from step-{stopped_at:06d}" in done.stdout
    else:
        train.run(job, resume=True, progress=False)
    assert kept(job, tree_hash) == uninterrupted


def cli_exit(action) -> int:
    with pytest.raises(SystemExit) as left:
        commands.run_guarded(action)
    return left.value.code


def test_exit_3_when_no_checkpoint_is_whole(job, capsys):
    mine = job(*SMALL, "train.steps=4")
    with pytest.raises(Stopped):
        train.run(mine, progress=False, echo=lambda e: e["event"] == "step" and Run(folder_of(mine)).request("stop"))
    for path in folder_of(mine).glob("checkpoints/*/manifest.json"):
        path.unlink()
    assert cli_exit(lambda: train.run(mine, resume=True, progress=False)) == 3
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "manifest.json is missing" in told[0]


CURVE = """
from lora_fp8.stages import validate
from lora_fp8.training.verdict import Measurement
real = validate.measure
def measure(session, data, loaded, step):
    losses = real(session, data, loaded, step).losses
    assert len(losses) == 2 and len(set(map(str, session.processes.gather(losses)))) == 1
    curve = [1.0, 0.8, 0.6, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1]
    return Measurement(step, tuple(tuple(curve[step] + 0.001 * i for _ in losses[0]) for i in range(2)))
validate.measure = measure
"""


def test_two_processes_end_at_the_same_step_when_patience_is_exhausted(make_job, tmp_path):
    """Best at step 3, four validations without an improvement: step 7, on both; resumed, both see that it has ended."""
    job = make_job(
        *(tmp_path, *SHARED, "validation.pictures=2", "validation.every=1", "validation.patience=4"),
        *("train.steps=10", "dataset.folders.0.repeats=1"),
    )
    for more in ((), ("--resume",)):
        done = run_forked(job, tmp_path, 2, *more, planted=CURVE)
        assert done.returncode == 0, done.stderr[-3000:]
        events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert [event["step"] for event in events if event["event"] == "patience"] == [7]
        assert [event["step"] for event in events if event["event"] == "done"] == [7]
        steps = [event["step"] for event in events if event["event"] == "step"]
        assert steps == ([] if more else list(range(1, 8)))
    assert len(noted(tmp_path, 0, "weights")) == len(noted(tmp_path, 1, "weights")) == 7
    names = sorted(path.name for path in (folder_of(job) / "export").iterdir())
    assert names == [f"lora{kind}_{layout}.safetensors" for kind in ("-best", "") for layout in ("diffusers", "kohya")]
    assert (folder_of(job) / "checkpoints" / "best-000003").is_dir()
