"""The CPU path without POSIX: training, resuming, the queue, the page and caption edits, as far as Linux can show it.

Every process here has `like_windows/sitecustomize.py` on its path, which takes from our own code what Windows lacks and
makes a few calls behave as they do there. Libraries keep what they have, and paths, consoles and file systems stay
those of Linux: that it runs on a Windows machine is not shown here.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from types import SimpleNamespace

import psutil
import pytest
from PIL import Image
from waiting import LONG_SECONDS, wait_until

from lora_fp8 import jobs
from lora_fp8.common import locks, messages, system
from lora_fp8.errors import UserError
from lora_fp8.jobs import worker
from webui import decoder, sanitize

ROOT = Path(__file__).resolve().parent.parent
STOP_AT, STEPS = 2, 4

JOB = f"""
name = "ring"
output_dir = "runs"
[model]
family = "sd15"
path = "demo"
[adapter]
rank = 16
alpha = 16.0
targets = ["attn2.to_k", "ff.net.0.proj"]
[dataset]
resolution = 64
bucket_step = 16
[[dataset.folders]]
path = "IMAGES"
[train]
steps = {STEPS}
[optimizer]
lr = 1e-3
[memory]
gradient_checkpointing = false
[preview]
every = 0
[export]
verify = false
"""

TRAIN_AND_STOP = f"""
import os, signal, sys
from lora_fp8 import config, train
from lora_fp8.errors import Stopped

train.run(config.load("job.toml"), progress=False)
os.rename("runs", "whole")  # the file has its output_dir in it

def press_ctrl_break(event):
    if event["event"] == "step" and event["step"] == {STOP_AT - 1}:
        os.kill(os.getpid(), signal.SIGUSR2)

try:
    train.run(config.load("job.toml"), progress=False, echo=press_ctrl_break)
except Stopped:
    sys.exit(75)
"""

EDIT = """
from pathlib import Path
from lora_fp8.data import caption_journal, captions
from lora_fp8.data.caption_operations import RenameTag

folder = Path("words")

def read():
    return {path.name: path.read_bytes() for path in folder.glob("*.txt")}

def rename(old, new):
    return captions.apply(folder, captions.preview(folder, [RenameTag(old, new)]))

first = read()
rename("cat", "dog")
second = read()
assert second["a.txt"] == b"a, dog\\r\\n" and second["b.txt"] == b"dog", second
captions.undo(folder)
assert read() == first
captions.redo(folder)
assert read() == second
caption_journal.JOURNAL_BYTES = 1  # the next edit shortens the journal: the file is replaced
with captions.open_journal(folder) as journal:
    edit = captions.preview(folder, [RenameTag("dog", "bird")])
    captions.apply(folder, edit, journal=journal)
    captions.apply(folder, captions.preview(folder, [RenameTag("bird", "fish")]), journal=journal)
assert read()["a.txt"] == b"a, fish\\r\\n"
captions.undo(folder)
print(read()["b.txt"], len(captions.read_history(folder)))
"""

PROBE = """
import builtins, sys

def what(action, name="lora_fp8.probe"):
    try:
        exec(action, {"__name__": name, "__builtins__": builtins})
    except BaseException as error:
        return type(error).__name__
    return "done"

for action in sys.argv[1:]:
    print(what(action), what(action, "another.library"))
"""


@pytest.fixture
def windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which processes see what Windows has; the queue's home is in it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests/like_windows"), str(ROOT)]))
    monkeypatch.setenv("LORA_FP8_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LORA_FP8_LANG", "en")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    if jobs.find_worker(tmp_path / "home"):
        read_worker(tmp_path / "home").terminate()


def run(*arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, encoding="utf-8", timeout=LONG_SECONDS
    )
    assert done.returncode == code, (done.returncode, done.stdout[-2000:], done.stderr[-3000:])
    return done.stdout


def test_our_code_sees_windows_and_libraries_see_linux(windows: Path) -> None:
    expected = {
        "import fcntl": "ModuleNotFoundError done",
        "import resource": "ModuleNotFoundError done",
        "import os; os.fork": "AttributeError done",
        "import os; os.O_NOFOLLOW": "AttributeError done",
        "import signal; signal.SIGKILL": "AttributeError done",
        "from signal import SIGHUP": "ImportError done",
        "from pathlib import Path; Path('/proc/self/stat').read_bytes()": "FileNotFoundError done",
        "import os; os.scandir('/proc')": "FileNotFoundError done",
        "import os; os.open('.', os.O_RDONLY)": "AssertionError done",
        "import os; os.open('.', getattr(os, 'O_BINARY', 0))": "PermissionError done",
        "import os; os.kill(os.getppid(), 0)": "AssertionError done",
        "f = open('kept', 'w'); import os; os.replace('kept', 'other')": "PermissionError done",
        "import ctypes; ctypes.CDLL(None)": "TypeError done",
        "import os; os.stat('.'); os.environ['HOME']; os.path.join('a', 'b')": "done done",
    }
    assert run("-c", PROBE, *expected).splitlines() == list(expected.values())


def read_worker(home: Path) -> psutil.Process:
    """Return the worker. `find_worker` gives it no id in this process, which tells a start by Linux's clock."""
    return psutil.Process(json.loads((home / "worker.json").read_bytes())["pid"])


def test_it_trains_stops_resumes_in_the_queue_and_the_page_answers(windows: Path) -> None:
    images = windows / "images"
    images.mkdir()
    for number in range(1, 4):
        for path in (ROOT / "lora_fp8/demo/dataset").glob(f"zibo_{number:02}.*"):
            (images / path.name).write_bytes(path.read_bytes())
    (windows / "job.toml").write_text(JOB.replace("IMAGES", str(images)), encoding="utf-8")
    (windows / "stop.py").write_text(TRAIN_AND_STOP, encoding="utf-8")
    run("stop.py", code=75)
    bundles = [path.name for path in (windows / "runs/ring/checkpoints").glob("step-*")]
    assert bundles == [f"step-{STOP_AT:06}"]

    # The queue takes the stopped run to its end, in a worker that has no fork and sees no /proc.
    run("-m", "lora_fp8", "submit", "runs/ring")
    queue = jobs.Queue(windows / "home")
    wait_until(lambda: queue.store.read_row(1).phase == "ended", lambda: queue.get_job(1))
    assert queue.get_job(1).state == "done", (queue.get_job(1), queue.read_log_tail(1, 30))
    last = f"checkpoints/step-{STEPS:06}"
    for folder in ("export", last):
        whole, resumed = (windows / run / "ring" / folder for run in ("whole", "runs"))
        names = sorted(path.name for path in whole.iterdir() if path.is_file())
        assert names and [name for name in names if (whole / name).read_bytes() != (resumed / name).read_bytes()] == []

    # A job that is cancelled is asked by the file, as a signal would kill it, and saves.
    run("-m", "lora_fp8", "submit", "job.toml", "--set", "train.steps=100000", "--set", "output_dir='cancelled'")
    log = windows / "cancelled/ring/events.jsonl"
    wait_until(lambda: log.exists() and '"event": "step"' in log.read_text(encoding="utf-8"), lambda: queue.get_job(2))
    run("-m", "lora_fp8", "jobs", "cancel", "2")
    wait_until(lambda: queue.store.read_row(2).phase == "ended", lambda: queue.get_job(2))
    assert queue.get_job(2).state == "stopped" and queue.get_job(2).saved_step, (
        queue.get_job(2),
        queue.read_log_tail(2, 30),
    )
    assert read_worker(windows / "home").is_running()

    page = subprocess.Popen(
        [sys.executable, "-m", "lora_fp8", "ui", "--port", "0", "--root", str(images)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        lines = iter(page.stdout or ())
        address = next(found[0] for line in lines if (found := re.search(r"http://\S+/", line)))
        with urllib.request.urlopen(address, timeout=LONG_SECONDS) as answer:
            assert answer.status == 200 and b"lora_fp8" in answer.read()
        # Paths are those of Linux here, which no Windows has, so that the page can only refuse one.
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(f"{address}picture?path={images / 'zibo_01.png'}", timeout=LONG_SECONDS)
        assert b"write the full path, beginning with C:" in refusal.value.read()
    finally:
        page.kill()
        page.wait()


def test_images_are_decoded_in_a_child(windows: Path) -> None:
    Image.new("RGB", (64, 32), "red").save("red.png")
    code = (
        "from pathlib import Path; from webui import decoder; print(decoder.Decoders(1).encode_webp(Path('red.png')))"
    )
    code = code.replace("'red.png'", repr(str(windows / "red.png")))
    assert run("-c", code).startswith("b'RIFF")


def test_captions_are_edited_and_undone(windows: Path) -> None:
    (windows / "words").mkdir()
    for name, text in {"a": b"a, cat\r\n", "b": b"cat", "c": b"nothing"}.items():
        Image.new("RGB", (8, 8)).save(windows / f"words/{name}.png")
        (windows / f"words/{name}.txt").write_bytes(text)
    (windows / "edit.py").write_text(EDIT, encoding="utf-8")
    assert run("edit.py").split() == ["b'bird'", "1"]


# --------------------------------------------------------------------------------------------------------- by itself


@pytest.mark.parametrize("has_fcntl", [True, False])
def test_a_lock_names_its_holder_and_readers_do_not_disturb_each_other(
    has_fcntl: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_fcntl:
        monkeypatch.setattr(locks, "fcntl", None)
    path = tmp_path / "lock"
    path.write_text("process 4711", encoding="utf-8")
    code = (
        "import sys; from lora_fp8.common import locks\n"
        + ("" if has_fcntl else "locks.fcntl = None\n")
        + f"file = open({str(path)!r}, 'a+'); print(locks.try_lock(file)); locks.write_holder(file)\n"
        "sys.stdout.flush(); sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"True\n"
        wait_until(lambda: locks.read_holder(path) == holder.pid)
        with open(path, "rb") as file:
            assert not locks.try_lock(file, shared=True) and not locks.try_lock(file)
        holder.kill()
    with open(path, "rb") as reader:
        assert locks.try_lock(reader, shared=True), "the lock outlived its process"
        if not has_fcntl:  # then a reader holds the exclusive lock, for an instant
            threading.Timer(0.01, reader.close).start()
        with open(path, "rb") as other:
            assert locks.try_lock(other, shared=True)
    assert path.read_text(encoding="utf-8") == f"process {holder.pid}", "the lock changed the file"


@pytest.mark.parametrize(
    ("number", "environment", "language"),
    [(0x0804, {}, "zh-CN"), (0x0407, {}, "en"), (0x0804, {"LANG": "en_US.UTF-8"}, "en"), (0x0409, {}, "en")],
)
def test_commands_speak_the_language_of_windows(
    number: int, environment: dict[str, str], language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers as Microsoft lists them: 0x0804 is Chinese (China), 0x0407 German, 0x0409 English (United States)."""
    for name in (messages.LANGUAGE, "LC_ALL", "LC_MESSAGES", "LANG"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert messages.get_language() == "en"
    dll = SimpleNamespace(kernel32=SimpleNamespace(GetUserDefaultUILanguage=lambda: number))
    monkeypatch.setattr(ctypes, "windll", dll, raising=False)
    monkeypatch.setattr(sys, "platform", "win32")
    assert messages.get_language() == language


def test_a_rename_waits_for_readers_and_then_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "WINDOWS", True)
    refusals = [PermissionError(13, "busy")] * 3
    real = os.replace

    def refuse(source: str, target: str) -> None:
        if refusals:
            raise refusals.pop()
        real(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    (tmp_path / "new").write_text("new", encoding="utf-8")
    system.replace(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text(encoding="utf-8") == "new" and not refusals
    monkeypatch.setattr(system, "BUSY_SECONDS", 0.05)
    refusals[:] = [PermissionError(13, "busy")] * 10_000
    with pytest.raises(PermissionError):
        system.replace(tmp_path / "old", tmp_path / "new")


def test_the_page_takes_paths_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: r"C:\Users\me")
    for given, path in {
        r"C:\Users\me\pics": r"C:\Users\me\pics",
        "d:/吐司/set 1/": r"d:\吐司\set 1",
        "~/pics": r"C:\Users\me\pics",
        "C:\\": "C:\\",
    }.items():
        assert sanitize.write_windows_path(given) == path
    hostile = (
        r"\\server\share",
        "//server/share",
        r"\\?\C:\x",
        r"\\.\PhysicalDrive0",
        "C:pics",
        "pics",
        r"\pics",
        "/pics",
    )
    hostile += (r"C:\a\CON", r"C:\nul.txt\b", r"C:\file.txt:hidden", r"C:\secret.", r"C:\secret \a", r"C:\a*", "COM1")
    assert [given for given in hostile if sanitize.write_windows_path(given) is not None] == []
    monkeypatch.setattr(system, "WINDOWS", True)
    with pytest.raises(UserError, match=r"write the full path, beginning with C:"):
        sanitize.resolve_path(r"\\server\share")


def test_the_home_folder_of_windows_is_hidden_however_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "WINDOWS", True)
    monkeypatch.setattr(os.path, "expanduser", lambda _: r"C:\Users\me")
    monkeypatch.setattr(messages, "Path", PureWindowsPath)
    for text in (r"C:\Users\me\a.png", "C:/Users/me/a.png", r"c:\users\ME\a.png", r"'C:\\Users\\me\\a.png'"):
        assert "~" in messages.without_home(text) and "users" not in messages.without_home(text).lower()
    assert messages.without_home(r"C:\Users\metoo\a.png") == r"C:\Users\metoo\a.png"


def test_a_decoder_without_a_limit_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    monkeypatch.setattr(system, "CAN_LIMIT_MEMORY", False)
    decoders = decoder.Decoders(1)
    assert decoders.encode_webp(tmp_path / "a.png")
    monkeypatch.setattr(decoder, "MOST_MEMORY", 2**20)  # which any process exceeds
    monkeypatch.setattr(decoder, "WATCH_SECONDS", 0.0)
    Image.effect_noise((4000, 4000), 50).save(tmp_path / "large.png")
    with pytest.raises(UserError, match="its decoder crashed"):
        decoders.encode_webp(tmp_path / "large.png")


def test_gpus_are_counted_where_there_are_no_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in WSL2 and on Windows: without this, the queue would train on the CPU there."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA (UUID: 1)'\necho 'GPU 1: NVIDIA (UUID: 2)'\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(worker.glob, "glob", lambda pattern: [])
    assert worker.parse_groups([]) == ("0", "1")
    program.write_text("#!/bin/sh\necho 'driver not loaded'\nexit 9\n", encoding="utf-8")
    assert worker.parse_groups([]) == ("cpu",)
    monkeypatch.setattr(worker.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    assert worker.parse_groups([]) == ("0",)
