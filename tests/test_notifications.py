"""How people are told that a job has ended: the message at a webhook, and what the browser is given to show."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from waiting import LONG_SECONDS

from lora_fp8.errors import UserError
from lora_fp8.jobs import JobView, Queue, Sentence, job_view, webhook, worker
from webui import notifications, run_monitor
from webui.context import Place, Ui

CONFIG = '[model]\nfamily = "sd15"\npath = "demo"\n[dataset]\nfolders = [{path = "p"}]\n'


class Server:
    """A web server on the loopback. `codes` are the statuses of its next answers; then it answers 204."""

    def __init__(self) -> None:
        self.messages: list[tuple[str, str, dict[str, Any]]] = []
        self.codes: list[int] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.messages.append((self.path, self.headers["Content-Type"], body))
                code = server.codes.pop(0) if server.codes else 204
                self.send_response(code)
                if code == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def do_GET(self) -> None:
                server.messages.append((self.path, "GET", {}))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *given: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.host = f"127.0.0.1:{self._http.server_port}"
        self.address = f"http://{self.host}/hooks/secret"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(webhook, "PAUSES", (0.0, 0.0))
    made = Server()
    yield made
    made.close()


def end(queue: Queue, reported: list[str], id: int, ending: job_view.Ending) -> None:
    """What a worker does when it finds that this job has ended."""
    one = worker.Worker(queue.home, report=reported.append)
    queue.store.update(id, phase="launched", attempts=3, launched=time.time() - 60)
    one._end(queue.store.read_row(id), ending)
    one.sender.finish(60)


def test_a_worker_tells_the_webhook_how_each_job_ended(server: Server, tmp_path: Path) -> None:
    queue, reported = Queue(tmp_path / "home"), []
    webhook.write_address(queue.home, f" {server.address}\n")
    id = queue.submit('name = "cat"\n' + CONFIG)
    end(queue, reported, id, job_view.Ending("failed", Sentence("failure", {"message": "out of memory"}), 3))
    ((path, kind, body),) = server.messages
    assert path == "/hooks/secret" and kind.startswith("application/json")
    assert (body["job"], body["name"], body["kind"], body["state"]) == (id, "cat", "train", "failed")
    assert body["text"] == body["content"] == "cat: failed: out of memory"
    assert 59 < body["seconds"] < 60 + LONG_SECONDS and body["ended"] == pytest.approx(time.time(), abs=LONG_SECONDS)
    assert webhook.read_result(queue.home)["problem"] == ""
    # A job that is to be started again has not ended, and nobody is told of an image that is awaited on the page.
    again = queue.submit('name = "dog"\n' + CONFIG)
    one = worker.Worker(queue.home, report=reported.append)
    queue.store.update(again, phase="launched", attempts=1, launched=time.time())
    one._end(queue.store.read_row(again), job_view.Ending("lost", Sentence("vanished"), None, crash=True))
    drawn = queue.submit_command("draw", ["x"])
    end(queue, reported, drawn, job_view.Ending("done", Sentence("command_done"), 0))
    one.sender.finish(60)
    assert len(server.messages) == 1
    end(queue, reported, queue.submit_command("caption", ["p"]), job_view.Ending("done", Sentence("command_done"), 0))
    assert server.messages[1][2]["kind"] == "caption"


def test_the_message_has_what_the_held_out_losses_say(server: Server, tmp_path: Path) -> None:
    queue = Queue(tmp_path / "home")
    webhook.write_address(queue.home, server.address)
    id = queue.submit('name = "cat"\n' + CONFIG)
    folder = tmp_path / "runs" / "cat"
    folder.mkdir(parents=True)
    verdict = {"t": 1.0, "event": "verdict", "step": 9, "best": 5, "text": "Held-out loss was best at step 5 (0.5)."}
    (folder / "events.jsonl").write_text(json.dumps(verdict) + "\n", encoding="utf-8")
    queue.store.update(id, folder=str(folder))
    end(queue, [], id, job_view.Ending("done", Sentence("done", {"files": "cat.safetensors"}), 0))
    text = server.messages[0][2]["text"]
    assert text.startswith("cat: ") and text.endswith(". Held-out loss was best at step 5 (0.5).")
    (folder / "events.jsonl").unlink()
    (folder / "events.jsonl").mkdir()  # cannot be read: the message is sent all the same
    again = queue.submit('name = "cat"\n' + CONFIG)
    queue.store.update(again, folder=str(folder))
    end(queue, [], again, job_view.Ending("done", Sentence("done", {"files": "cat.safetensors"}), 0))
    assert "Held-out" not in server.messages[1][2]["text"] and "cat.safetensors" in server.messages[1][2]["text"]


@pytest.mark.parametrize(
    ("codes", "sent", "problem"),
    [([503, 503], 3, ""), ([503] * 3, 3, "503"), ([404], 1, "404"), ([302], 1, "points to another address")],
    ids=["heals", "out of order", "not found", "redirect"],
)
def test_a_message_that_is_not_delivered_fails_no_job_and_is_reported_without_the_address(
    codes: list[int], sent: int, problem: str, server: Server, tmp_path: Path
) -> None:
    queue, reported = Queue(tmp_path / "home"), []
    webhook.write_address(queue.home, server.address)
    server.codes = list(codes)
    id = queue.submit('name = "cat"\n' + CONFIG)
    end(queue, reported, id, job_view.Ending("done", Sentence("done", {"files": "a"}), 0))
    assert queue.store.read_row(id).state == "done" and len(server.messages) == sent
    result = webhook.read_result(queue.home)
    assert result["host"] == server.host and problem in result["problem"]
    assert ("webhook" in "\n".join(reported)) == bool(problem)
    kept = "".join(p.read_text() for p in queue.home.glob("*.json")) + "\n".join(reported)
    assert "secret" not in kept
    webhook.write_address(queue.home, f"{server.address}/new")  # of the same host, and nothing was sent there yet
    assert webhook.read_result(queue.home) == {}


def test_a_server_that_is_away_or_silent_is_waited_for_only_so_long(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.close()
    with pytest.raises(webhook.Undelivered, match="cannot be reached"):
        webhook.post(server.address, {})
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts and never answers
        monkeypatch.setattr(webhook, "SECONDS", 0.2)
        with pytest.raises(webhook.Undelivered, match="did not answer within 0.2 s"):
            webhook.post(f"http://127.0.0.1:{silent.getsockname()[1]}/secret", {})


@pytest.mark.parametrize(
    "address",
    ["file:///etc/passwd", "ftp://x/y", "hooks.example/x", "https://", "http://a b/", "http://[x", "http://x:y/",
     "https://user:pass@host/x", "javascript:alert(1)", "https://host/\nx"],
)  # fmt: skip
def test_only_addresses_of_web_servers_are_taken(address: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="`webhook`"):
        webhook.write_address(tmp_path, address)
    assert not any(tmp_path.iterdir())
    (tmp_path / "worker.toml").write_text(f"webhook = {json.dumps(address)}\n", encoding="utf-8")
    with pytest.raises(UserError, match="`webhook`"):
        worker.read_settings(tmp_path)


def test_the_other_settings_of_the_worker_stay(tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    file.write_text("# mine\npatience_s = 7  # long\n", encoding="utf-8")
    webhook.write_address(tmp_path, "https://hooks.example/x")
    settings = worker.read_settings(tmp_path)
    assert settings.webhook == "https://hooks.example/x" and settings.patience_s == 7
    assert file.stat().st_mode & 0o077 == 0, "the address is a secret"
    webhook.write_address(tmp_path, "")
    assert file.read_text(encoding="utf-8") == "# mine\npatience_s = 7  # long\n"
    file.write_text('webhook = "  "\n', encoding="utf-8")
    assert worker.read_settings(tmp_path).webhook == ""


def test_the_page_sets_tries_and_removes_the_webhook_and_shows_only_its_host(server: Server, tmp_path: Path) -> None:
    with gr.Blocks():
        section = notifications.WebhookSection(Ui("zh-CN", Place(tmp_path)))
    assert "尚未设置" in section.update_components()[0]
    note, typed, status, *_ = section.save_address("file:///x")
    assert "wrong" in note["value"] and "`webhook`" in note["value"] and not isinstance(typed, str)
    note, typed, status, test, _ = section.save_address(server.address)
    assert typed == "" and server.host in status and "secret" not in status and test["visible"]
    section.send_test()
    assert server.messages[0][2]["kind"] == "test" and "已送达" in section.update_components()[0]
    server.codes = [500]
    note, _, status, *_ = section.send_test()
    assert "500" in note["value"] and "500" in status and "secret" not in note["value"] + status
    section.remove_address()
    assert worker.read_settings(tmp_path).webhook == ""
    fixed = Place(tmp_path, fixed=True)
    with gr.Blocks():
        section = notifications.WebhookSection(Ui("en", fixed))
    assert "worker.toml" in section.save_address(server.address)[0]["value"]
    assert worker.read_settings(tmp_path).webhook == ""


def test_the_browser_is_given_what_ended_since_it_last_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, app = Place(tmp_path), FastAPI()
    notifications.add_routes(app, place)
    common: dict[str, Any] = {"kind": "train", "sentence": Sentence("failure", {"message": "out of <memory>"})}
    views = [
        JobView(id=1, name="old", state="done", ended=100.0, **common),
        JobView(id=2, name="cat", state="failed", ended=200.0, **common),
        JobView(id=3, name="gone", state="cancelled", ended=200.0, **common),
        JobView(id=4, name="now", state="running", **common),
        JobView(id=5, name="draw x", state="done", ended=200.0, command=("draw", "x"), **common | {"kind": "command"}),
    ]
    monitor = run_monitor.get_monitor(place)
    monkeypatch.setattr(monitor, "views", lambda: views)
    client = TestClient(app)
    (news,) = client.get("/ended", params={"after": 150.0, "language": "en"}).json()["jobs"]
    assert (news["id"], news["ended"], news["title"]) == ("2", 200.0, "cat · failed")
    assert "out of <memory>" in news["body"] and news["link"] == "/en/run?run=2"
    assert client.get("/ended", params={"after": 200.0}).json()["jobs"] == []
    begun = client.get("/ended").json()
    assert begun["jobs"] == [] and begun["now"] == pytest.approx(time.time(), abs=LONG_SECONDS), (
        "the first call sets the clock"
    )
