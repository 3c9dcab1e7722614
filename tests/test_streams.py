"""Standard streams that are closed, full, or read by nobody; a current folder that is gone."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lora_fp8.cli import streams

ROOT = Path(__file__).resolve().parent.parent
FULL = Path("/dev/full")
"""A device of Linux that every write to fails as on a full disk."""


def run(words: str, redirection: str, home: Path, **env: str) -> tuple[int, str]:
    """Run a command in a shell. Returns its exit code and what it wrote to stderr."""
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m lora_fp8 {words} {redirection}', sys.executable],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LORA_FP8_HOME": str(home), "LORA_FP8_LANG": "en", **env},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which only Linux has")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["jobs", "jobs --json", "--version"])
def test_an_answer_that_cannot_be_written_fails_in_a_line(words: str, unbuffered: str, tmp_path: Path) -> None:
    code, said = run(words, f">{FULL}", tmp_path, PYTHONUNBUFFERED=unbuffered)
    assert (code, said) == (3, "<stdout>: No space left on device\n")


@pytest.mark.parametrize(
    ("words", "redirection", "expected"),
    [
        ("jobs", ">&-", 0),
        ("jobs", "<&-", 0),
        ("jobs", "2>&-", 0),
        ("new", "<&-", 2),  # it asks on a terminal only
        ("check missing.toml", "2>&-", 2),
        pytest.param("check missing.toml", f"2>{FULL}", 2, marks=pytest.mark.skipif(not FULL.exists(), reason="Linux")),
    ],
)
def test_a_stream_that_is_closed_or_full_changes_no_exit_code(
    words: str, redirection: str, expected: int, tmp_path: Path
) -> None:
    code, said = run(words, redirection, tmp_path)
    assert code == expected and "Traceback" not in said


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps the folder of a process")
@pytest.mark.parametrize("words", ["jobs", "check missing.toml"])
def test_a_current_folder_that_was_deleted_is_named(words: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f'rmdir ../gone && "$0" -m lora_fp8 {words}'
    env = {**os.environ, "PYTHONPATH": str(ROOT), "LORA_FP8_HOME": str(tmp_path), "LORA_FP8_LANG": "en"}
    done = subprocess.run(["sh", "-c", command, sys.executable], cwd=gone, env=env, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (2, b"the current folder was deleted; change to another one (cd)\n")


def test_work_goes_on_without_a_reader_and_says_later_what_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    output = streams._Output(writing, "<stdout>")
    text = io.TextIOWrapper(io.BufferedWriter(output), "utf-8", line_buffering=True)
    monkeypatch.setattr(sys, "stdout", text)
    os.set_blocking(reading, False)
    other = os.dup(writing)
    closed, _ = os.pipe()

    @streams.works
    def command() -> None:
        print("seen")
        os.dup2(closed, writing)  # the end of a pipe that cannot be written to
        print("lost")
        print("lost too")
        os.dup2(other, writing)
        print("seen again")

    command()
    assert os.read(reading, 1000).decode() == f"seen\n{streams.LOST.decode()}seen again\n"
    os.dup2(closed, writing)
    with pytest.raises(OSError, match="<stdout>"):  # what is no work fails
        print("an answer")
    text.flush()  # once


def test_an_answer_that_nobody_waits_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page reads the progress of `dataset look` from its stderr: when it is gone, the command must not go on."""
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(streams._Output(2, "<stderr>"), write_through=True))
    real = os.dup(2)
    os.dup2(writing, 2)
    try:
        with pytest.raises(BrokenPipeError):
            print("progress", file=sys.stderr, flush=True)
    finally:
        os.dup2(real, 2)


def test_commands_whose_result_is_a_file_go_on() -> None:
    from lora_fp8.cli import base_models, images, jobs, programs, training

    commands = (training.train_or_resume, programs.demo, programs.ui, jobs.worker, images.caption, base_models.download)
    assert all(hasattr(command, "__wrapped__") for command in commands)
