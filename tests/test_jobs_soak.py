"""Whole lives of queued jobs: a round of what scripts/soak_jobs.py does many times, and a real training."""

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from waiting import end_worker, wait_until

from lora_fp8 import config, jobs, settings
from lora_fp8.jobs import Queue, procs
from lora_fp8.run import Run

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "scripts/soak_jobs.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak_jobs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


soak = load()


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.parametrize("name", soak.SCENARIOS)
def test_a_round(name: str, tmp_path: Path) -> None:
    """Kills and stops at moments that the seed decides; `scripts/soak_jobs.py` takes many seeds."""
    assert soak.soak(name, 1, seed=0, home=tmp_path / "home") == []


def test_a_real_training_is_stopped_goes_on_and_is_done(
    job: Callable[..., settings.Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `accelerate launch`, with a worker that is killed meanwhile, and a user's accelerate config in the way.

    What the run folder says is held against the queue's view; the file that comes out, against what verify says.
    """
    elsewhere = tmp_path / "huggingface/accelerate"
    elsewhere.mkdir(parents=True)
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 4\nmixed_precision: fp16\n"
    (elsewhere / "default_config.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
    monkeypatch.setenv("LORA_FP8_HOME", str(tmp_path / "home"))
    queue = Queue()
    one = job("train.steps=400", "checkpoint.every=100", "export.verify=true")
    id = queue.submit(config.dumps(one))
    wrong = queue.submit(config.dumps(job("name='wrong'", f"dataset.folders=[{{path='{tmp_path / 'none'}'}}]")))
    worker = jobs.ensure_worker(queue.home, idle_s=1)

    def until(fulfilled: Callable[[], bool]) -> None:
        wait_until(fulfilled, lambda: (queue.list_jobs(), queue.read_log_tail(id)))

    try:
        until(lambda: (queue.get_job(id).step or 0) >= 2)
        procs.send([worker.pid], signal.SIGKILL)
        until(lambda: not procs.identify(worker.pid))  # it holds its lock until it has ended
        assert queue.get_job(id).state == "running" and Run(queue.get_job(id).folder).is_locked()
        queue.stop(id)
        worker = jobs.ensure_worker(queue.home, idle_s=1)
        until(lambda: queue.get_job(id).state in jobs.ENDED)
        stopped = queue.get_job(id)
        last = queue.read_events(id)[0][-1]
        assert stopped.state == "stopped" and stopped.exit_code == 75 and stopped.resumable
        assert last["event"] == "stopped" and f"step {stopped.saved_step}" in last["text"]
        assert 2 <= stopped.saved_step < 400 and stopped.sentence.args == {"step": stopped.saved_step}
        assert procs.find_members(queue.store.read_row(id).token) == []
        until(lambda: queue.get_job(wrong).state in jobs.ENDED)
        refused = queue.get_job(wrong)
        assert (refused.state, refused.exit_code, refused.attempts) == ("failed", 2, 1)
        assert str(tmp_path / "none") in refused.sentence.text and refused.sentence.text in "\n".join(
            ["invalid settings or input: " + "\n".join(queue.read_log_tail(wrong))]
        )
        # So many steps as are left take too long for a test: the end comes sooner now.
        run = Run(stopped.folder)
        steps = stopped.saved_step + 3
        run.write_config(run.config_file.read_text(encoding="utf-8").replace("steps = 400", f"steps = {steps}"))
        queue.requeue(id)
        jobs.ensure_worker(queue.home, idle_s=1)
        until(lambda: queue.get_job(id).state in jobs.ENDED)
    finally:
        for row in queue.store.read_rows("token <> ''"):
            procs.send(procs.find_members(row.token), signal.SIGKILL)
        end_worker(queue.home)
    done = queue.get_job(id)
    assert done.state == "done" and done.step == steps and done.attempts == 2, queue.read_log_tail(id)
    assert (run.path / "log.1.txt").exists() and "resuming from" in (run.path / "log.txt").read_text(encoding="utf-8")
    assert all((run.path / file).exists() for file in queue.read_events(id)[0][-1]["files"])
