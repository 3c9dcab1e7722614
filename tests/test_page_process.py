"""`lora-fp8 ui` as a process: what it takes, what it refuses, what it leaves running."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from waiting import LONG_SECONDS, end_worker, wait_until

from lora_fp8 import jobs
from webui.server import listen

ROOT = Path(__file__).resolve().parent.parent
MOST_RESIDENT = 300e6  # bytes of the page's own process; 206e6 where this was written


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "lora_fp8", "ui", *options]


def surroundings(home: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "LORA_FP8_HOME": str(home), **more}


def refused(tmp_path: Path, *options: str, **environment: str) -> str:
    """The one line that it ends with, exit code 2."""
    done = subprocess.run(
        command(*options),
        env=surroundings(tmp_path, **environment),
        capture_output=True,
        text=True,
        timeout=LONG_SECONDS,
    )
    assert done.returncode == 2 and done.stdout == "", done
    (line,) = done.stderr.strip().splitlines()
    return line


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[psutil.Process, str, Path]]:
    """A page with a login: its process, its address and its home."""
    home = tmp_path_factory.mktemp("home")
    process = subprocess.Popen(
        command("--port", "0", "--user", "me"),
        env=surroundings(home, LORA_FP8_PASSWORD="a long password"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"http://\S+/", line):
            break
    else:
        raise AssertionError(lines)
    yield psutil.Process(process.pid), found[0], home
    if process.poll() is None:
        process.kill()
    end_worker(home)


def wait_for_worker(home: Path) -> psutil.Process:
    """The worker; not the process that starts it and ends."""

    def working() -> jobs.Info | None:
        worker = jobs.find_worker(home)
        return worker if worker and worker.pid and worker.heartbeat > worker.since else None

    return psutil.Process(wait_until(working, lambda: "no worker").pid)


def test_the_page_is_small_and_has_no_torch(page: tuple[psutil.Process, str, Path]) -> None:
    process, _, _ = page
    assert process.memory_info().rss < MOST_RESIDENT
    maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
    assert "multiarray" in maps  # numpy, which Gradio brings: what is looked for would be seen
    assert not re.search(r"/(torch|bitsandbytes|torchao|tokenizers)/", maps)


def test_it_runs_in_an_empty_folder_of_its_own(page: tuple[psutil.Process, str, Path]) -> None:
    process, _, home = page
    assert Path(process.cwd()) == home / "empty" and os.listdir(home / "empty") == []
    for folder in (home / "empty", home / "uploads"):
        assert folder.stat().st_mode & 0o077 == 0


def test_what_it_starts_does_not_know_the_password(page: tuple[psutil.Process, str, Path]) -> None:
    worker = wait_for_worker(page[2])
    assert "LORA_FP8_HOME" in worker.environ() and "LORA_FP8_PASSWORD" not in worker.environ()
    assert not any("password" in part for part in [*worker.cmdline(), *page[0].cmdline()])
    assert "a long password" not in str(page[0].environ().values()), "/proc shows what a process began with"


def test_a_taken_port_is_told_with_its_holder(page: tuple[psutil.Process, str, Path], tmp_path: Path) -> None:
    process, address, _ = page
    port = address.rstrip("/").rpartition(":")[2]
    line = refused(tmp_path, "--port", port)
    assert f"--port {port}: the address is used by process {process.pid}" in line and "choose another port" in line


def test_others_need_a_password(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", socket.gethostname()):
        assert f"--host {host}: other machines could" in refused(tmp_path, "--host", host, "--port", "0")
    assert "LORA_FP8_PASSWORD is not set" in refused(tmp_path, "--user", "me", "--port", "0")
    assert "--user NAME is not given" in refused(tmp_path, "--port", "0", LORA_FP8_PASSWORD="a long password")
    short = refused(tmp_path, "--user", "me", "--port", "0", LORA_FP8_PASSWORD="short")
    assert "10 characters" in short


def test_an_answer_is_sent_at_once() -> None:
    """Else its second part waits until the first was acknowledged: 40 ms for each answer of the page."""

    async def accept() -> int:
        accepted: asyncio.Queue[int] = asyncio.Queue()

        def note(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.put_nowait(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = listen("127.0.0.1", 0)
        async with await asyncio.start_server(note, sock=listener):
            await asyncio.open_connection(*listener.getsockname())
            return await accepted.get()

    with ThreadPoolExecutor(1) as thread:  # in this one a browser test may have left its event loop running
        assert thread.submit(asyncio.run, accept()).result() == 1


def test_a_root_that_is_none_and_a_host_that_is_none(tmp_path: Path) -> None:
    assert "--root" in refused(tmp_path, "--root", str(tmp_path / "nowhere"), "--port", "0")


def test_ctrl_c_ends_the_page_alone(page: tuple[psutil.Process, str, Path]) -> None:
    process, address, home = page
    worker = wait_for_worker(home)
    process.send_signal(signal.SIGINT)
    assert process.wait(LONG_SECONDS) in (0, None)
    assert worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", int(address.rstrip("/").rpartition(":")[2])), timeout=2)


def test_opening_the_page_writes_into_no_package() -> None:
    """Gradio would write a .pyi file beside each of its classes, for half of the time that its import takes."""
    script = (
        "import sys; opened = []\n"
        "sys.addaudithook(lambda event, of: opened.append(of[0]) if event == 'open' else None)\n"
        "import webui.app\n"
        "print(sum(str(path).endswith('.pyi') for path in opened), 'gradio.components.image' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True"]


def test_a_server_is_made_once_for_each_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gradio.routes import App

    from webui import app, context, translations

    made = []
    create = App.create_app
    monkeypatch.setattr(App, "create_app", lambda *given, **named: made.append(given[0]) or create(*given, **named))
    app.build(context.Place(tmp_path, [tmp_path], fixed=False))
    assert len(made) == len(translations.LANGUAGES)
    for pages in made:
        assert len(pages.config["page"]) == len(app.PAGES) and pages.config["dependencies"] and pages.exited
        hidden = [one for one in pages.config["dependencies"] if one["show_progress"] == "hidden" and one["targets"]]
        assert len(hidden) > 100
        assert all(one["show_progress_on"] == [] for one in hidden if one["backend_fn"]), "see make_private_event"
