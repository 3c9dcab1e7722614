"""Kill workers, jobs and launchers at random moments, stop jobs in every stage, and check what the queue shows.

    python scripts/soak_jobs.py [--times 50] [--seed 0] [SCENARIO...]

Each scenario runs `--times` times, each with a job at another moment of its life. It checks that `Queue.list_jobs` is
true within 3 seconds, that no process of an ended job is left, that nothing blocks the next job, and that an
interrupted job continues from its checkpoint. Prints one line per scenario, and exits with 1 if a check failed.

The trainer is a stand-in that writes a run folder like the real one and learns nothing. The launcher is one that turns
every exit code but 0 into 1, like accelerate's. So a round takes seconds. tests/test_jobs_soak.py runs a few rounds of
each, and one real training through `accelerate launch`.
"""

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

from lora_fp8.errors import Stopped, UserError
from lora_fp8.jobs import ENDED, JobView, Queue, Worker, find_worker, job_endings, procs
from lora_fp8.run import Run, StopSignal

TRUE_WITHIN_S = 3.0
CONFIG = """
name = "{name}"
output_dir = "{home}/runs"
[model]
family = "sd15"
path = "demo"
[dataset]
cache_dir = "{home}/cache"
folders = [{{path = "{home}/pictures"}}]
[train]
steps = {steps}
[checkpoint]
every = 5
[export]
description = '{plan}'
"""
PLAN = {"cache": 0.3, "load": 0.2, "step": 0.04, "export": 0.3, "deaf": False}


# ---------------------------------------------------------------------------------------------------------------------
# stand-ins


def train(command: str, path: str) -> int:
    """Act as a trainer that only writes its run folder. Returns its exit code."""
    file = Path(path) / "config.toml" if command == "resume" else Path(path)
    text = file.read_text(encoding="utf-8")
    job = tomllib.loads(text)
    plan = json.loads(job["export"]["description"])
    run = Run.create(Path(job["output_dir"]) / job["name"], text, resume=command == "resume")
    stop = StopSignal()
    try:
        with stop.watching():
            if plan["deaf"]:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _train(job, plan, run, stop)
    except Stopped as stopped:
        run.log_event("stopped", text=str(stopped))
        return 75
    finally:
        run.close()
    return 0


def _train(job: dict, plan: dict, run: Run, stop: StopSignal) -> None:
    run.log_event("start", name=job["name"])
    for stage in ("cache", "load"):
        run.log_event("stage", stage=stage)
        time.sleep(plan[stage])
        if run.take_request("stop") and not plan["deaf"]:
            raise Stopped("before the first step")
    saved = sorted(run.checkpoints.glob("step-*"))
    step, steps = int(saved[-1].name[5:]) if saved else 0, job["train"]["steps"]
    if saved:
        run.log_event("resume", checkpoint=saved[-1].name)
    run.log_event("stage", stage="train", step=step, steps=steps)
    stop.at_once = None
    while step < steps:
        time.sleep(plan["step"])
        step += 1
        run.log_event("step", step=step, loss=1 / step)
        stopping = (stop.requested or run.take_request("stop")) and not plan["deaf"]
        if stopping or step % job["checkpoint"]["every"] == 0 or step == steps:
            (run.checkpoints / f"step-{step:06d}").mkdir(exist_ok=True)
            run.log_event("checkpoint", step=step)
        if stopping and step < steps:
            raise Stopped(f"saved at step {step}")
    stop.at_once = "all steps are done"
    run.log_event("stage", stage="export")
    time.sleep(plan["export"])
    file = run.export / f"{job['name']}.safetensors"
    file.write_bytes(b"")
    run.verify_file.write_text(json.dumps({file.name: {"ok": True}}), encoding="utf-8")
    run.log_event("done", step=step, files=[f"export/{file.name}"])


def launch(command: list[str]) -> int:
    """Act as a launcher that turns every exit code but 0 into 1."""
    return int(subprocess.run(command, check=False).returncode != 0)


class StandIn(Worker):
    """A worker with the stand-ins in place of accelerate and the trainer."""

    def make_command(self, row, group, attempt):
        """Return the queue's command with the stand-in in place of the trainer."""
        command = super().make_command(row, group, attempt)
        own = [sys.executable, __file__]
        keeper, module = command.index("lora_fp8.jobs.keeper"), command.index("lora_fp8")
        return [*own, "launch", sys.executable, "-m", *command[keeper : module - 2], *own, *command[module + 1 :]]


# ---------------------------------------------------------------------------------------------------------------------
# the field: one home, one worker, jobs in it


class Field:
    """A home folder with a queue, in which workers are started and killed."""

    def __init__(self, home: Path, seed: int = 0):
        self.home, self.random = home, random.Random(seed)
        home.mkdir(parents=True, exist_ok=True)
        (home / "worker.toml").write_text("patience_s = 2\nkill_after_s = 1.5\n", encoding="utf-8")
        self.queue = Queue(home)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.count = 0

    def start_worker(self) -> subprocess.Popen[bytes]:
        """Start a worker with the stand-ins, and return when it has the lock."""
        worker = self.spawn_worker()
        self.wait_until(lambda: (found := find_worker(self.home)) is not None and found.pid == worker.pid, 20)
        return worker

    def spawn_worker(self) -> subprocess.Popen[bytes]:
        """Start a worker in a session of its own."""
        with open(self.home / "worker.log", "ab") as log:
            worker = subprocess.Popen(
                [sys.executable, __file__, "worker", str(self.home)], stdout=log, stderr=log, start_new_session=True
            )
        self.workers.append(worker)
        return worker

    def kill_worker(self) -> None:
        """Send SIGKILL, as the kernel does when memory runs out."""
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.workers.clear()

    def close(self) -> None:
        """Kill the worker and all processes of its jobs."""
        self.kill_worker()
        for row in self.queue.store.read_rows("token <> ''"):
            procs.send(procs.find_members(row.token), signal.SIGKILL)

    def submit(self, steps: int = 30, **plan: object) -> int:
        """Submit a stand-in job of `steps` steps with this plan. Returns its id."""
        self.count += 1
        given = json.dumps({**PLAN, **plan})
        name = f"job-{self.count}-{self.random.randrange(10**6)}"
        return self.queue.submit(CONFIG.format(home=self.home, name=name, steps=steps, plan=given))

    def view_job(self, id: int) -> JobView:
        """Return the queue's view of a job."""
        return self.queue.get_job(id)

    def read_token(self, id: int) -> str:
        """Return the token that marks a job's processes."""
        return self.queue.store.read_row(id).token

    def list_members(self, id: int) -> list[int]:
        """Return the ids of a job's processes."""
        return procs.find_members(self.read_token(id))

    def find_roles(self, id: int) -> dict[str, int]:
        """Return the processes of a job by role: keeper, launcher, inner, trainer."""
        pids = self.list_members(id)
        first = next((pid for pid in pids if procs.find_parent(pid) not in pids), 0)
        chain = [first]
        while child := next((pid for pid in pids if procs.find_parent(pid) == chain[-1]), 0):
            chain.append(child)
        return dict(zip(("keeper", "launcher", "inner", "trainer"), chain, strict=False))

    def wait_until(self, fulfilled: Callable[[], bool], seconds: float, what: object = "") -> float:
        """Wait for a condition. Returns how long it took."""
        begun = time.monotonic()
        while not fulfilled():
            if time.monotonic() - begun > seconds:
                raise AssertionError(f"not within {seconds} s: {what() if callable(what) else what}")
            time.sleep(0.02)
        return time.monotonic() - begun

    def wait_until_running(self, id: int) -> None:
        """Wait until the trainer has the run, then for a random moment."""
        self.wait_until(lambda: self.view_job(id).state == "running", 30, lambda: self.view_job(id))
        time.sleep(self.random.uniform(0, 1.5))

    def wait_until_ended(self, id: int, state: str, seconds: float = 30) -> JobView:
        """Wait until the job has ended in this state, with no process left."""
        self.wait_until(lambda: self.view_job(id).state in ENDED, seconds, lambda: self.view_job(id))
        found = self.view_job(id)
        assert found.state == state, found
        assert not self.list_members(id), f"left over: {self.list_members(id)}"
        return found


# ---------------------------------------------------------------------------------------------------------------------
# scenarios: each gets a field with a living worker and leaves one


def worker_killed(field: Field) -> None:
    """Kill the worker alone: the job continues, is taken over, and its end is recorded, also without a worker."""
    id = field.submit()
    field.wait_until_running(id)
    field.kill_worker()
    field.wait_until(
        lambda: (field.view_job(id).state == "running") == bool(field.list_members(id)), TRUE_WITHIN_S, "state"
    )
    if field.random.random() < 0.5:
        field.wait_until(lambda: not field.list_members(id), 20)
        # Without a worker it is looked up by who asks.
        field.wait_until(lambda: field.view_job(id).state == "done", TRUE_WITHIN_S, lambda: field.view_job(id))
    field.start_worker()
    assert field.wait_until_ended(id, "done").attempts == 1


def job_killed(field: Field) -> None:
    """Kill all processes of the job: another attempt continues from the checkpoint."""
    id = field.submit()
    field.wait_until_running(id)
    before, done = field.read_token(id), field.view_job(id).state == "done"
    procs.send(field.list_members(id), signal.SIGKILL)
    if not done:
        _check_after_death(field, id, before)
    _check_continued(field, id)


def trainer_killed(field: Field) -> None:
    """Kill the trainer alone, as the kernel does when memory runs out: its keeper knows how it ended."""
    id = field.submit()
    field.wait_until_running(id)
    if victim := field.find_roles(id).get("trainer"):
        before = field.read_token(id)
        procs.send([victim], signal.SIGKILL)
        _check_after_death(field, id, before)
        row = field.queue.store.read_row(id)
        assert row.crashes == 0 or row.exit_code in (-9, None) or row.attempts > 1, row
    _check_continued(field, id)


def launcher_killed(field: Field) -> None:
    """Kill the launcher alone: the processes that it started are ended before another attempt begins."""
    id = field.submit()
    field.wait_until_running(id)
    before = field.read_token(id)
    if victim := field.find_roles(id).get("launcher"):
        procs.send([victim], signal.SIGKILL)
        field.wait_until(
            lambda: field.read_token(id) != before or field.view_job(id).state in ENDED, 15, lambda: field.view_job(id)
        )
    assert not (field.read_token(id) != before and procs.find_members(before)), "two attempts at once"
    _check_continued(field, id)


def keeper_killed(field: Field) -> None:
    """Kill the outer keeper alone: the job continues and is watched."""
    id = field.submit()
    field.wait_until_running(id)
    if victim := field.find_roles(id).get("keeper"):
        procs.send([victim], signal.SIGKILL)
        field.wait_until(
            lambda: (field.view_job(id).state == "running") == bool(field.list_members(id)), TRUE_WITHIN_S, "state"
        )
    assert field.wait_until_ended(id, "done").attempts == 1


def both_killed(field: Field) -> None:
    """Kill worker and job, as a power loss does: the job is lost until a worker comes, then it continues."""
    id = field.submit()
    field.wait_until_running(id)
    pids = field.list_members(id)
    field.kill_worker()
    procs.send(pids, signal.SIGKILL)
    field.wait_until(
        lambda: field.view_job(id).state in ("lost", "done", "failed"), TRUE_WITHIN_S, lambda: field.view_job(id)
    )
    assert field.view_job(id).state in ("lost", "done") or field.view_job(id).exit_code == -9, field.view_job(id)
    field.start_worker()
    _check_continued(field, id)


def rebooted(field: Field) -> None:
    """Simulate a reboot with the process id reused: the job is lost and continues; the other process is left alone."""
    id = field.submit()
    field.wait_until_running(id)
    pids = field.list_members(id)
    field.kill_worker()
    procs.send(pids, signal.SIGKILL)
    # A killed trainer is no member any more while it exits, and may still hold its lock for seconds.
    field.wait_until(lambda: not job_endings.is_alive(field.queue.store.read_row(id)), 30)
    done = field.view_job(id).state == "done"
    stranger = subprocess.Popen(["sleep", "120"])
    try:
        other = procs.identify(stranger.pid)
        assert other is not None
        boot = "another" if field.random.random() < 0.5 else other.boot
        field.queue.store.update(id, pid=other.pid, start=other.start if boot == "another" else 1, boot=boot)
        seen = field.view_job(id)
        assert done or boot != "another" or seen.sentence.args["cause"]["key"] == "reboot", seen
        assert seen.state not in ("running", "stopping", "starting"), seen
        field.start_worker()
        _check_continued(field, id)
        assert stranger.poll() is None, "the worker has killed a stranger"
    finally:
        stranger.kill()
        stranger.wait()


def stopped(field: Field) -> None:
    """Stop in any stage: the job ends as asked, in time, with nothing left. Resubmitted, it runs to the end."""
    id = field.submit()
    field.wait_until(lambda: field.view_job(id).state != "queued", 20)
    time.sleep(field.random.uniform(0, 4))
    if field.view_job(id).state not in ENDED:
        try:
            field.queue.stop(id)
        except UserError:
            assert field.view_job(id).state in ENDED  # it ended in this very moment
        else:
            assert field.view_job(id).state in ("stopping", *ENDED), field.view_job(id)
        field.wait_until(lambda: field.view_job(id).state in ENDED, 12, lambda: field.view_job(id))
        assert not field.list_members(id), "left over"
        if field.view_job(id).state != "done":
            assert field.view_job(id).state == "stopped", field.view_job(id)
            field.wait_until(lambda: field.queue.store.read_row(id).phase == "ended", TRUE_WITHIN_S)
            field.queue.requeue(id)
    assert field.wait_until_ended(id, "done").state == "done"


def deaf(field: Field) -> None:
    """Stop a trainer that ignores the request and SIGTERM: every step is reported, and then it is killed."""
    id = field.submit(steps=2000, deaf=True)
    field.wait_until_running(id)
    field.queue.stop(id)
    told: list[str] = []

    def is_over() -> bool:
        seen = field.view_job(id)
        if seen.state == "stopping" and seen.sentence.key not in told:
            told.append(seen.sentence.key)
        return seen.state in ENDED

    field.wait_until(is_over, 15, lambda: field.view_job(id))
    assert told[:2] == ["stop_asked", "stop_term"], told
    assert field.wait_until_ended(id, "stopped").sentence.key.startswith("stopped_hard")
    field.queue.delete(id)


def cancelled(field: Field) -> None:
    """Cancel a waiting job and a running one."""
    first, second = field.submit(), field.submit()
    field.wait_until(lambda: field.view_job(first).state != "queued", 20)
    field.queue.cancel(second)
    assert field.view_job(second).state == "cancelled"
    time.sleep(field.random.uniform(0, 2))
    if field.view_job(first).state not in ENDED:
        field.queue.cancel(first)
        field.wait_until(lambda: field.view_job(first).state in ENDED, 10, lambda: field.view_job(first))
    assert not field.list_members(first) and field.view_job(second).attempts == 0


def two_workers(field: Field) -> None:
    """Start five workers at once: one stays, and no job is started twice."""
    field.kill_worker()
    ids = [field.submit(steps=3) for _ in range(2)]
    several = [field.spawn_worker() for _ in range(5)]
    field.wait_until(lambda: sum(worker.poll() is None for worker in several) == 1, 30, "one worker")
    assert all(worker.returncode == 2 for worker in several if worker.poll() is not None)
    for id in ids:
        assert field.wait_until_ended(id, "done").attempts == 1
    starts = [event["event"] for id in ids for event in field.queue.read_events(id)[0]].count("start")
    assert starts == len(ids), starts
    field.workers = [worker for worker in several if worker.poll() is None]


def _check_after_death(field: Field, id: int, before: str) -> None:
    """Check that within 3 seconds nothing reports the killed attempt as running."""
    field.wait_until(
        lambda: field.read_token(id) != before or field.view_job(id).state not in ("running", "stopping"),
        TRUE_WITHIN_S,
        lambda: field.view_job(id),
    )


def _check_continued(field: Field, id: int) -> None:
    """Check that the job ends well, and that each later attempt began at a checkpoint."""
    field.wait_until_ended(id, "done", 60)
    events, _ = field.queue.read_events(id)
    saved = 0
    for event in events:
        if event["event"] == "checkpoint":
            saved = event["step"]
        if event["event"] == "stage" and event["stage"] == "train":
            assert event["step"] == saved, (event, saved)


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(worker_killed, job_killed, trainer_killed, launcher_killed, keeper_killed, both_killed, rebooted),
        *(stopped, deaf, cancelled, two_workers),
    )
}


def soak(name: str, times: int, seed: int, home: Path) -> list[str]:
    """Run one scenario several times in one home. Returns what was wrong."""
    field, wrong = Field(home, seed), []
    try:
        field.start_worker()
        for number in range(times):
            try:
                SCENARIOS[name](field)
            except Exception as error:  # the next rounds still tell something
                wrong.append(f"{name} {number}: {type(error).__name__}: {error}")
                if not field.workers or field.workers[-1].poll() is not None:
                    field.start_worker()
        if not wrong:
            field.wait_until(
                lambda: not field.queue.store.read_rows("phase <> 'ended'"), TRUE_WITHIN_S, "the queue is empty"
            )
    finally:
        field.close()
    return wrong


def main() -> None:
    """Run the scenarios, or play the part that the first argument names."""
    if sys.argv[1:2] == ["worker"]:
        try:
            StandIn(Path(sys.argv[2]), report=lambda line: print(time.strftime("%T"), line, flush=True)).run()
        except UserError as error:
            print(error)
            sys.exit(2)
        return
    if sys.argv[1:2] == ["launch"]:
        sys.exit(launch(sys.argv[2:]))
    if sys.argv[1:2] in (["train"], ["resume"]):
        sys.exit(train(*sys.argv[1:3]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    root, failed = Path(tempfile.mkdtemp(prefix="soak-jobs-")), False
    for name in given.scenarios or SCENARIOS:
        begun = time.monotonic()
        wrong = soak(name, given.times, given.seed, root / name)
        failed |= bool(wrong)
        print(f"{name:16} {given.times - len(wrong)}/{given.times}  {time.monotonic() - begun:.0f} s", flush=True)
        print("".join(f"  {line}\n" for line in wrong), end="", flush=True)
    if failed:
        sys.exit(f"what happened is in {root}")
    shutil.rmtree(root)


if __name__ == "__main__":
    main()
