"""Trainings on other machines, on the start page. The other machine is a folder here, with a real script in it."""

import contextlib
import json
import os
import re
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_remote import local_job
from typer.testing import CliRunner
from waiting import wait_until

from lora_fp8 import cli
from lora_fp8.errors import UserError
from lora_fp8.jobs import BESIDE, Queue
from lora_fp8.jobs.remote import control, handle, script
from webui import remote_jobs
from webui.context import Place, Ui
from webui.pages import runs

SETUP = 'lora-fp8() { echo "$@" >> words; sleep 1000; }'


@pytest.fixture
def ui(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ui:
    (tmp_path / "here").mkdir()
    remote_jobs.get_jobs.cache_clear()
    monkeypatch.setattr(remote_jobs.jobs, "ensure_worker", lambda home: None)
    return Ui("en", Place(tmp_path / "home", [tmp_path / "here"]))


def press(ui: Ui, do: str, name: str = "x") -> str:
    event = SimpleNamespace(_data={"do": do, "id": name})
    return str(runs._Handlers(ui).handle_remote_button(event)[0]["value"])


def list_buttons(text: str) -> list[str]:
    return re.findall(r'data-do="(\w+)"', text)


def test_a_job_is_started_again_stopped_and_fetched(ui: Ui, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert remote_jobs.render(ui) == ""
    monkeypatch.setattr(remote_jobs, "FRESH_SECONDS", 0.0)
    local_job(tmp_path, monkeypatch, SETUP)
    file = tmp_path / "job" / script.JOB
    file.write_text(file.read_text(encoding="utf-8").replace("exec lora-fp8", "lora-fp8"), encoding="utf-8")
    answers, real = threading.Event(), control.fetch_view
    with monkeypatch.context() as patch:
        patch.setattr(control, "fetch_view", lambda job: answers.wait() and real(job))
        first = remote_jobs.render(ui)
    assert "On other machines" in first and "Asking its machine" in first and list_buttons(first) == []
    answers.set()
    wait_until(lambda: "interrupted" in remote_jobs.render(ui), lambda: remote_jobs.render(ui))
    assert list_buttons(remote_jobs.render(ui)) == ["resume", "fetch"]

    monkeypatch.setattr(remote_jobs, "ENDED_SECONDS", 0.0)
    assert "is being started again" in press(ui, "resume")
    words = tmp_path / "job" / "words"
    wait_until(words.exists)
    group = os.getpgid(int((tmp_path / "job" / "pid").read_text()))
    try:
        (tmp_path / "job/runs/x/status.json").write_text(
            json.dumps({"state": "train", "step": 3, "steps": 8, "loss": 0.25})
        )
        wait_until(lambda: "3 / 8" in remote_jobs.render(ui), lambda: remote_jobs.render(ui))
        card = remote_jobs.render(ui)
        assert "0.2500" in card and "width:37.5%" in card and list_buttons(card) == ["cancel"]
        press(ui, "cancel")
        wait_until((tmp_path / "job" / "exit").exists)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    wait_until(lambda: "Stopped at step 3" in remote_jobs.render(ui), lambda: remote_jobs.render(ui))
    assert words.read_text(encoding="utf-8").splitlines() == ["train config.toml"]

    assert "its files are being fetched" in press(ui, "fetch")
    (queued,) = Queue(tmp_path / "home").list_jobs()
    assert queued.gpus == BESIDE and queued.command == ("remote", "fetch", "--", "x")
    assert "Fetch x from the other machine" in runs.render_board(ui, "all", 0)
    assert 'href="/en/run' not in remote_jobs.render(ui) and "not here yet" in press(ui, "forget")
    done = CliRunner().invoke(cli.app, list(queued.command))
    assert done.exception is None, done.exception
    assert 'href="/en/run' in remote_jobs.render(ui) and (tmp_path / "here/x/events.jsonl").is_file()
    wait_until(lambda: list_buttons(remote_jobs.render(ui)) == ["resume", "fetch", "forget"])
    press(ui, "forget")
    assert remote_jobs.render(ui) == "" and (tmp_path / "here/x/events.jsonl").is_file()
    assert (tmp_path / "job/runs/x/events.jsonl").is_file()


def test_what_goes_wrong_stays_on_the_card(ui: Ui, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that does not answer, a button that comes too late, and a folder that the page may not write into."""
    job = local_job(tmp_path, monkeypatch)
    (tmp_path / "job/exit").write_text("0", encoding="utf-8")
    wait_until(lambda: "Its files are on that machine" in remote_jobs.render(ui), lambda: remote_jobs.render(ui))
    assert list_buttons(remote_jobs.render(ui)) == ["fetch"]
    press(ui, "cancel")
    wait_until(lambda: "x is not running" in remote_jobs.render(ui), lambda: remote_jobs.render(ui))
    assert "Its files are on" not in remote_jobs.render(ui) and list_buttons(remote_jobs.render(ui)) == ["fetch"]

    def lost(job: handle.Handle) -> control.View:
        raise UserError("<b>no route</b>")

    with monkeypatch.context() as patch:
        patch.setattr(remote_jobs, "FRESH_SECONDS", 0.0)
        patch.setattr(control, "fetch_view", lost)
        wait_until(lambda: "&lt;b&gt;no route&lt;/b&gt;" in remote_jobs.render(ui), lambda: remote_jobs.render(ui))
    handle.update(job, output=str(tmp_path / "elsewhere" / "x"))
    assert 'class="toast wrong"' in press(ui, "fetch") and Queue(tmp_path / "home").list_jobs() == []
    for do, name in (("delete", "x"), ("fetch", "../x"), ("fetch", "y" * 300), ("cancel", "a\0b")):
        assert 'class="toast wrong"' in press(ui, do, name)
