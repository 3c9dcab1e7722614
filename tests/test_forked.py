"""A process of `forked` is what a test takes it for: exit code, streams, surroundings and end are its own."""

import os
import signal
from pathlib import Path

import forked
import pytest
from waiting import LONG_SECONDS


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("import sys; sys.exit(75)", 75, ""),
        ("import sys; sys.exit('no')", 1, "no\n"),
        ("raise ValueError('planted')", 1, "ValueError: planted\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(print, 'last', file=sys.stderr)", 0, "last\n"),
    ],
)
def test_exit_codes_and_last_words_are_pythons(tmp_path: Path, text: str, code: int, said: str) -> None:
    process = forked.start([script(tmp_path, text)], cwd=tmp_path, env={})
    stdout, stderr = process.communicate(timeout=LONG_SECONDS)
    assert (process.returncode, stdout) == (code, "") and stderr.endswith(said)


def test_arguments_folder_and_environment_are_its_own(tmp_path: Path) -> None:
    text = "import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['OF'], os.getpid(), 'torch' in sys.modules)"
    processes = [forked.start([script(tmp_path, text), "--a"], cwd=tmp_path, env={"OF": str(i)}) for i in range(2)]
    said = [process.communicate(timeout=LONG_SECONDS)[0].split() for process in processes]
    assert said == [["['--a']", str(tmp_path), str(i), str(process.pid), "True"] for i, process in enumerate(processes)]
    assert "OF" not in os.environ


def test_it_hears_signals_while_it_runs(tmp_path: Path) -> None:
    text = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); print('here', flush=True)\n"
    process = forked.start([script(tmp_path, text + "while True: signal.pause()")], cwd=tmp_path, env={})
    assert process.stdout.readline() == "here\n" and process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(LONG_SECONDS) == process.poll() == 7
