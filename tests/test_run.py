"""The run folder: whole files, one holder, a log that survives a kill, and liveness that no kill can fake."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import struct
import time
from pathlib import Path

import pytest
from waiting import wait_until

from lora_fp8.common import locks
from lora_fp8.common.writing import atomic_write
from lora_fp8.errors import Stopped, UserError
from lora_fp8.run import Run, StopSignal

CONFIG = 'name = "x"\n'


def child(work) -> int:
    """Fork; the child does `work` and leaves without running anything of pytest's."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = work() or 0
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_events_do_not_tell_whose_home_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/canary")
    run = Run.create(tmp_path / "r", CONFIG)
    run.log_event("warning", text="/home/canary/a.png (2): /data/home/canary/b.png, '/home/canary/c', /home/canary2/d")
    assert list(run.read_events())[-1]["text"] == "~/a.png (2): /data/home/canary/b.png, '~/c', /home/canary2/d"
    monkeypatch.setenv("HOME", "/")
    run.log_event("warning", text="/home/x")
    assert list(run.read_events())[-1]["text"] == "/home/x"


# -- whole files


def test_atomic_write_replaces_the_whole_file(tmp_path):
    path = tmp_path / "status.json"
    for data in (b"first, longer content", b"", b"second"):
        atomic_write(path, data)
        assert path.read_bytes() == data
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_write_leaves_the_old_file_and_no_leftover(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError) as error:
        atomic_write(path, b"new")
    assert error.value.errno == errno.ENOSPC and (call == "replace" or error.value.filename == str(tmp_path))
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_reader_never_sees_a_part(tmp_path):
    """Two contents of very different lengths, written in turn by a process that is killed in the end."""
    path = tmp_path / "file"
    contents = [b"a" * 3_000_000, b"b" * 10]
    atomic_write(path, contents[0])

    def write_on():
        while True:
            for data in reversed(contents):
                atomic_write(path, data)

    pid = child(write_on)
    seen = set()
    try:

        def read() -> bool:
            for _ in range(100):
                data = path.read_bytes()
                assert data in contents
                seen.add(data)
            return len(seen) == 2

        wait_until(read)
    finally:
        os.kill(pid, signal.SIGKILL)
        exit_code(pid)
    assert len(seen) == 2 and path.read_bytes() in contents


def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        atomic_write(tmp_path / "file", b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


# -- the lock


def test_a_second_start_is_refused_and_names_the_holder(tmp_path):
    run = Run.create(tmp_path / "r", CONFIG)
    for resume in (False, True):
        with pytest.raises(UserError, match=rf"process {os.getpid()} is training in this folder.*lora-fp8 stop"):
            Run.create(tmp_path / "r", 'name = "other"\n', resume=resume)
    assert (tmp_path / "r" / "config.toml").read_text(encoding="utf-8") == CONFIG  # the refused one has changed nothing
    run.log_event("step", step=1, loss=0.5)
    run.close()
    Run.create(tmp_path / "r", CONFIG).close()


def test_of_two_that_race_exactly_one_wins(tmp_path, some):
    """Folders; two processes start on each at the same instant, and the winner stays until both have tried."""
    for i in some(range(20), 0, of=4):
        folder = tmp_path / str(i)
        start_reader, start_writer = os.pipe()
        done_reader, done_writer = os.pipe()

        def race(folder=folder, start=(start_reader, start_writer), done=(done_reader, done_writer)):
            os.close(start[1])
            os.read(start[0], 1)  # returns for all at once, when the parent closes its end
            try:
                run = Run.create(folder, CONFIG)
            except UserError:
                os.write(done[1], b"l")
                return 7
            run.log_event("start", pid=os.getpid())
            os.write(done[1], b"w")
            time.sleep(0.05)
            while not os.path.exists(folder / "both"):
                time.sleep(0.005)
            return 0

        pids = [child(race), child(race)]
        for end in (start_reader, start_writer, done_writer):
            os.close(end)
        told = b""
        while len(told) < 2 and (data := os.read(done_reader, 2)):
            told += data
        (folder / "both").touch()
        codes = [exit_code(pid) for pid in pids]
        os.close(done_reader)
        assert sorted(told) == sorted(b"lw") and sorted(codes) == [0, 7]
        assert len(Run.open(folder).read_events()) == 1


def test_alive_is_derived_from_the_lock(tmp_path):
    folder = tmp_path / "r"
    ready_reader, ready_writer = os.pipe()

    def hold():
        run = Run.create(folder, CONFIG)
        os.write(ready_writer, b"x")
        time.sleep(600)
        run.close()

    pid = child(hold)
    os.read(ready_reader, 1)
    run = Run.open(folder)
    try:
        assert run.is_locked() and run.is_locked()  # asking takes nothing away
        with pytest.raises(UserError, match=f"process {pid} "):
            Run.create(folder, CONFIG)
    finally:
        os.kill(pid, signal.SIGKILL)
        exit_code(pid)
    assert not run.is_locked() and (folder / "lock").exists()
    Run.create(folder, CONFIG).close()
    assert not run.is_locked()


def test_asking_whether_a_run_is_alive_never_refuses_a_start(tmp_path):
    """The question holds the lock for an instant (a web page asks all the time); a start must not take it for a run."""
    Run.create(tmp_path / "r", CONFIG).close()

    def ask():
        while True:
            Run.open(tmp_path / "r").is_locked()

    pid = child(ask)
    try:
        for _ in range(50):
            Run.create(tmp_path / "r", CONFIG).close()
    finally:
        os.kill(pid, signal.SIGKILL)
        exit_code(pid)


def test_a_folder_without_a_lock_is_not_alive(tmp_path):
    (tmp_path / "config.toml").write_text(CONFIG, encoding="utf-8")
    assert not Run.open(tmp_path).is_locked()


def test_what_this_user_may_not_read_is_not_taken_for_dead(tmp_path, no_privilege):
    with contextlib.closing(Run.create(tmp_path / "r", CONFIG)) as run:
        run.lock_file.chmod(0)
        with pytest.raises(
            UserError, match=r"r/lock: the file cannot be read \(Permission denied\); use the account of the user"
        ):
            Run.open(tmp_path / "r").is_locked()
        run.path.chmod(0)
        with pytest.raises(
            UserError, match=r"r: the file cannot be read \(Permission denied\); use the account of the user"
        ):
            Run.open(tmp_path / "r")
        run.path.chmod(0o700)


def test_without_flock_a_byte_is_locked(tmp_path, monkeypatch):
    """Windows' way, on Linux' nearest thing to its locks: of one open file, exclusive, gone when it is closed."""

    class Stand:
        LK_NBLCK = 2

        @staticmethod
        def locking(descriptor, mode, count):
            kind = fcntl.F_WRLCK if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_RDWR else fcntl.F_RDLCK
            try:
                fcntl.fcntl(descriptor, 37, struct.pack("hhqqi", kind, os.SEEK_CUR, 0, count, 0))  # F_OFD_SETLK
            except BlockingIOError:
                raise PermissionError(13, "Permission denied") from None

    monkeypatch.setattr(locks, "fcntl", None)
    monkeypatch.setattr(locks, "msvcrt", Stand, raising=False)
    run = Run.create(tmp_path / "r", CONFIG)
    assert Run.open(tmp_path / "r").is_locked() and Run.open(tmp_path / "r").is_locked()
    with pytest.raises(UserError, match=f"process {os.getpid()} is training in this folder"):
        Run.create(tmp_path / "r", CONFIG)
    run.close()
    assert not Run.open(tmp_path / "r").is_locked() and run.lock_file.stat().st_size < 100
    Run.create(tmp_path / "r", CONFIG).close()


def test_an_old_lock_of_a_recycled_pid_blocks_nothing(tmp_path):
    Run.create(tmp_path / "r", CONFIG).close()
    (tmp_path / "r" / "lock").write_text("process 1", encoding="utf-8")  # alive, and not ours
    run = Run.create(tmp_path / "r", CONFIG)
    assert (tmp_path / "r" / "lock").read_text(encoding="utf-8") == f"process {os.getpid()}"
    run.close()


# -- what is there already


@pytest.mark.parametrize("what", ["checkpoints/step-000002", "export/lora.safetensors"])
def test_a_finished_run_is_not_started_over(tmp_path, what):
    Run.create(tmp_path / "r", CONFIG).close()
    (tmp_path / "r" / what).parent.mkdir(exist_ok=True)
    (tmp_path / "r" / what).mkdir() if "step" in what else (tmp_path / "r" / what).touch()
    with pytest.raises(UserError, match="lora-fp8 resume"):
        Run.create(tmp_path / "r", CONFIG)
    Run.create(tmp_path / "r", CONFIG, resume=True).close()


def test_a_run_that_got_nowhere_may_be_started_again(tmp_path):
    Run.create(tmp_path / "r", CONFIG).close()
    Run.create(tmp_path / "r", 'name = "y"\n').close()
    assert (tmp_path / "r" / "config.toml").read_text(encoding="utf-8") == 'name = "y"\n'


def test_a_place_that_cannot_be_a_folder_is_the_users_mistake(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="cannot be created"):
        Run.create(tmp_path / "file" / "r", CONFIG)
    with pytest.raises(UserError, match="not a run folder"):
        Run.open(tmp_path / "absent")


def test_what_a_killed_atomic_write_left_is_cleared_at_the_next_start(tmp_path):
    Run.create(tmp_path / "r", CONFIG).close()
    names = (".config.toml.77.tmp", "export/.x_kohya.safetensors.77.tmp", "samples/.step-000000-0.png.77.tmp")
    leftovers = [tmp_path / "r" / name for name in (*names, "export/step-000002/.x_comfy.safetensors.77.tmp")]
    leftovers[-1].parent.mkdir()
    for path in leftovers:
        path.write_bytes(b"half")
    leftovers.append(tmp_path / "r" / "checkpoints" / ".tmp-step-000006-77")  # of a save
    leftovers[-1].mkdir()
    (leftovers[-1] / "state.json").write_bytes(b"half")
    Run.create(tmp_path / "r", CONFIG, resume=True).close()
    assert not any(path.exists() for path in leftovers)


# -- the log


def test_events_are_json_lines_in_order(tmp_path):
    run = Run.create(tmp_path / "r", CONFIG)
    seen = []
    run.echo = seen.append
    run.log_event("start", name="naïve 猫")
    run.log_event("step", step=1, loss=0.25)
    run.log_event("warning", text="two\nlines")
    assert [e["event"] for e in run.read_events()] == ["start", "step", "warning"]
    assert run.read_events() == seen
    run.log_event("warning", text="a name that is no text: \udcff.png")
    assert run.read_events().pop()["text"] == "a name that is no text: ?.png" and seen.pop()
    assert run.read_events()[0]["name"] == "naïve 猫" and run.read_events()[2]["text"] == "two\nlines"
    lines = (tmp_path / "r" / "events.jsonl").read_bytes().splitlines()
    assert len(lines) == 4 and all(json.loads(line)["t"] > 1e9 for line in lines)
    run.close()


def test_status_tells_the_newest_state(tmp_path):
    run = Run.create(tmp_path / "r", CONFIG)
    run.log_event("stage", stage="train", step=0, steps=9)
    run.log_event("step", step=3, loss=0.5)
    run.log_event("stopped", text="")
    status = json.loads((tmp_path / "r" / "status.json").read_text(encoding="utf-8"))
    assert status["state"] == "stopped" and status["step"] == 3 and status["steps"] == 9
    assert status["loss"] == 0.5 and status["pid"] == os.getpid()
    run.close()


def test_the_torn_last_line_of_a_killed_process_is_left_out_and_mended(tmp_path):
    run = Run.create(tmp_path / "r", CONFIG)
    run.log_event("step", step=1, loss=0.5)
    run.close()
    with open(tmp_path / "r" / "events.jsonl", "ab") as file:
        file.write('{"t": 1, "event": "step", "name": "猫'.encode()[:-1])  # cut inside a character too
    assert [e["step"] for e in Run.open(tmp_path / "r").read_events()] == [1]
    run = Run.create(tmp_path / "r", CONFIG)
    run.log_event("step", step=2, loss=0.4)
    assert [e["step"] for e in run.read_events()] == [1, 2]  # the new line is not glued to the torn one
    run.close()


def test_a_caption_may_hold_what_unicode_calls_a_line_end(tmp_path):
    run = Run.create(tmp_path / "r", CONFIG)
    texts = ["a\u2028b", "a\u2029b", "a\x85b", "a\x0bb", "a\x1cb", "a\r\nb"]
    for text in texts:
        run.log_event("warning", text=text)
    assert [event["text"] for event in run.read_events()] == texts
    run.close()


def test_status_moves_on_when_the_clock_jumps_back(tmp_path, monkeypatch):
    run = Run.create(tmp_path / "r", CONFIG)
    run.log_event("step", step=1, loss=0.5)
    clock, since = time.time() - 7200, time.monotonic() + 5
    monkeypatch.setattr(time, "time", lambda: clock)
    monkeypatch.setattr(time, "monotonic", lambda: since)
    run.log_event("step", step=2, loss=0.4)
    assert json.loads((tmp_path / "r" / "status.json").read_text(encoding="utf-8"))["step"] == 2
    assert [event["step"] for event in run.read_events()] == [1, 2]  # in the order of the file, whatever the clock says
    run.close()


@pytest.mark.parametrize(
    "error", [BrokenPipeError(errno.EPIPE, "Broken pipe"), OSError(errno.EIO, os.strerror(errno.EIO))]
)
def test_a_run_outlives_whoever_reads_what_it_prints(tmp_path, error):
    run = Run.create(tmp_path / "r", CONFIG)

    def gone(event):
        raise error

    run.echo = gone
    run.log_event("step", step=1, loss=0.5)
    run.log_event("step", step=2, loss=0.4)
    told = run.read_events()
    assert [event["event"] for event in told] == ["step", "warning", "step"] and error.strerror in told[1]["text"]
    run.close()


# -- places that cannot be written


@pytest.fixture
def read_only(monkeypatch):
    """read_only(folder): from now on the kernel's answer to whoever writes below it (tests may run as root)."""
    real_open, real_mkdir, real_touch = open, os.mkdir, Path.touch

    def make(folder):
        def refuse(path):
            if str(path).startswith(str(folder)):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

        def checked_open(path, mode="r", *more, **given):
            if set(mode) & set("wa+"):
                refuse(path)
            return real_open(path, mode, *more, **given)

        monkeypatch.setattr("builtins.open", checked_open)
        monkeypatch.setattr(os, "mkdir", lambda path, *more, **given: (refuse(path), real_mkdir(path, *more, **given)))
        monkeypatch.setattr(Path, "touch", lambda path, *more, **given: (refuse(path), real_touch(path, *more)))

    return make


def test_a_read_only_place_is_the_users_mistake_and_readers_still_read(tmp_path, read_only):
    run = Run.create(tmp_path / "old", CONFIG)
    run.log_event("step", step=1, loss=0.5)
    run.close()
    read_only(tmp_path)
    for name, resume in (("new", False), ("old", True)):
        with pytest.raises(
            UserError, match=f"{name}: the run folder cannot be created or written .Read-only file system"
        ):
            Run.create(tmp_path / name, CONFIG, resume=resume)
    run = Run.open(tmp_path / "old")
    assert [event["step"] for event in run.read_events()] == [1] and not run.is_locked()
    with pytest.raises(UserError, match="control/stop: the file cannot be written .Read-only file system"):
        run.request("stop")


# -- signals


def signalled(stop: StopSignal, number: int) -> None:
    signal.raise_signal(number)  # of this thread: the handler runs before the next line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_training_stops_at_once_and_only_once(number):
    stop = StopSignal()
    with stop.watching():
        with pytest.raises(Stopped, match="before the first step"):
            signalled(stop, number)
        signalled(stop, signal.SIGTERM)  # while the stop is being written down
        signalled(stop, signal.SIGINT)  # passed on by a launcher within the second


def test_a_signal_while_training_is_kept_for_the_end_of_the_step(monkeypatch):
    stop = StopSignal()
    stop.at_once = None
    with stop.watching():
        signalled(stop, signal.SIGINT)
        signalled(stop, signal.SIGINT)  # the same Ctrl-C, from a launcher
        assert stop.requested
        since = time.monotonic() + 2
        monkeypatch.setattr(time, "monotonic", lambda: since)
        with pytest.raises(KeyboardInterrupt):
            signalled(stop, signal.SIGINT)  # somebody means it


def test_a_stop_that_is_taken_for_another_error_is_a_stop():
    """As a check does that reads a config of a library: any error there means that the file is wrong."""
    stop = StopSignal()
    with pytest.raises(Stopped, match="before the first step"), stop.watching():
        try:
            signalled(stop, signal.SIGINT)
        except Exception as error:
            raise UserError(f"config.json does not describe a model ({error})") from error
    with pytest.raises(UserError, match="wrong"), StopSignal().watching():
        raise UserError("wrong")


def test_a_signal_does_not_cut_an_exchange_in_two():
    stop = StopSignal()
    done = []
    with stop.watching():
        with pytest.raises(Stopped):
            with stop.held():
                signalled(stop, signal.SIGTERM)
                done.append("the rest of the exchange")
    assert done


# -- requests


def test_requests_are_seen_and_save_and_preview_are_cleared_by_it(tmp_path):
    run = Run.create(tmp_path / "r", CONFIG)
    reader = Run.open(tmp_path / "r")
    assert not any(run.take_request(what) for what in ("stop", "save", "preview"))
    for what in ("stop", "save", "preview"):
        reader.request(what)
    assert [run.take_request("save"), run.take_request("save")] == [True, False]
    assert [run.take_request("preview"), run.take_request("preview")] == [True, False]
    assert [run.take_request("stop"), run.take_request("stop")] == [True, True]
    run.close()


def test_a_request_to_an_earlier_process_does_not_stop_the_next(tmp_path):
    run = Run.create(tmp_path / "r", CONFIG)
    run.request("stop")
    run.close()
    run = Run.create(tmp_path / "r", CONFIG, resume=True)
    assert not run.take_request("stop")
    run.close()
