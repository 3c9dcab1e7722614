"""Files that a user names or has lying about: only regular ones are opened, and only as much as can be used.

Judged by: pipes, devices and folders of this system; tracemalloc; Pillow's own pixels.
"""

import contextlib
import os
import signal
import sys
import threading
import tomllib
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lora_fp8 import cli, config, importing, jobs, settings
from lora_fp8.common import reading
from lora_fp8.data import caption_text, captions, clips, decoding, images
from lora_fp8.errors import UserError
from lora_fp8.families import _files
from lora_fp8.jobs import run_events, worker
from lora_fp8.lora_files import export
from lora_fp8.run import Run
from lora_fp8.tools import files

KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": lambda path: _socket(path),
    "folder": Path.mkdir,
}


def _socket(path: Path) -> None:
    import socket

    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as made:  # the path of one may have 107 bytes
        made.bind(path.name)


@pytest.fixture(autouse=True)
def _no_waiting() -> Iterator[None]:
    """What waits for a pipe would wait for ever: it fails here instead."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("waits for a file that is none"))
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def read_a_preset(path: Path) -> None:
    config.loads(f'preset = ["{path}"]', folder=path.parent)


def scan(path: Path) -> None:
    section = settings.Dataset(folders=[settings.Folder(path=str(path.parent))], missing_caption="skip", resolution=64)
    images.scan(section).require()


def read_progress(path: Path) -> None:
    assert run_events.follow(path, 0) == ([], 0) and run_events.read_tail(path) == []
    assert run_events.read_records(path.parent) == {}
    raise UserError("told nothing")


def list_events(path: Path) -> None:
    run = Run(path.parent)
    run.events_file = path
    run.read_events()


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "settings": ("a.toml", config.load),
    "preset": ("a.toml", read_a_preset),
    "settings of the worker": ("worker.toml", lambda path: worker.read_settings(path.parent)),
    "import source": ("a.toml", importing.import_file),
    "image": ("a.png", decoding.open_image),
    "mask": ("a.png", decoding.open_mask),
    "image in a folder": ("a.png", scan),
    "clip": ("a.mp4", lambda path: clips.decode_video(path, 1000)),
    "animation": ("a.gif", lambda path: decoding.read_clip(path, [0], "#ffffff")),
    "caption": ("a.txt", caption_text.read_caption),
    "caption to edit": ("a.txt", lambda path: captions.read(path.parent, path.name)),
    "LoRA": ("a.safetensors", export.read_adapter),
    "LoRA to look at": ("a.safetensors", files.inspect),
    "weights": ("a.safetensors", _files.read_entries),
    "config of a model": ("config.json", _files.read_json),
    "log": ("log.json", read_progress),
    "events": ("events.jsonl", list_events),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_is_told_and_not_waited_for(reader: str, kind: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    KINDS[kind](tmp_path / name)
    if reader == "image in a folder":
        Image.new("RGB", (64, 64)).save(tmp_path / "b.png")
        (tmp_path / "b.txt").write_text("b", encoding="utf-8")
        (tmp_path / "a.txt").write_text("a", encoding="utf-8")
        if kind == "folder":
            return scan(tmp_path / name)  # which is looked into
    with pytest.raises((OSError, ValueError, UserError)) as caught:
        read(tmp_path / name)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("reader", ["settings", "preset", "import source", "caption", "settings of the worker"])
def test_text_that_nobody_wrote_is_not_read_whole(reader: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    (tmp_path / name).write_bytes(b"# \n" * (reading.MOST_TEXT // 3 + 1))
    with pytest.raises((OSError, UserError), match="larger than 1 MiB"):
        read(tmp_path / name)


def test_a_folder_of_run_with_a_pipe_in_it_is_listed(tmp_path: Path) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    os.mkfifo(tmp_path / "runs" / "x" / "events.jsonl")
    os.mkfifo(tmp_path / "runs" / "x" / "status.json")
    assert jobs.Queue(tmp_path / "home", [tmp_path / "runs"]).list_jobs() == []


@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 50_000) + " = 1",
        "[" + ".".join(["a"] * 50_000) + "]",
        "[[" + " . ".join(['"a.b"'] * 25_000) + "]]",
        "x = {" + ".".join(["'a'"] * 25_000) + " = 1}",
        "\n".join(f"{'.'.join(['a'] * 25)}.b{number} = 1" for number in range(1000)),
        "x = " + "[" * 50_000,
        "x = " + "{a=" * 20_000,
    ],
    ids=lambda text: text[:12],
)
def test_keys_of_many_parts_are_refused_before_they_are_parsed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "[[" not in text[:8] and "{a=" not in text and "x = [" not in text:
        monkeypatch.setattr(tomllib, "loads", lambda text: pytest.fail("parsed, for minutes"))
    with pytest.raises(UserError, match="not valid TOML: (a key has more than 20 parts|.* nested)"):
        config.loads(text)


def test_dots_in_strings_and_comments_are_no_keys() -> None:
    dots = ".".join(["a"] * 100)
    text = f'# {dots}\nx = "{dots} \\" {dots}"\ny = \'{dots}\'\n'
    text += f'z = """{dots} "" {dots}\n{dots}\\""""\nw = \'\'\'{dots}\'\'\''
    assert config.read_toml(text)["x"] == f'{dots} " {dots}'


def test_pixels_in_flight_are_bounded_and_not_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(200, 200)] * 4 + [(900, 900)] * 2 + [(200, 200)] * 8 + [(900, 900)]
    for number, size in enumerate(sizes):
        Image.new("L", size).save(tmp_path / f"{number:02}.png")
    monkeypatch.setattr(decoding, "_in_flight", decoding._InFlight(100_000))
    at_a_time, lock, now = [], threading.Lock(), [0]

    def measured(image: Image.Image, rgb: Image.Image) -> None:
        with lock:
            now[0] += image.width * image.height
            at_a_time.append(now[0])
        threading.Event().wait(0.01)
        with lock:
            now[0] -= image.width * image.height

    looks = list(decoding.inspect_all(sorted(tmp_path.iterdir()), settings.Dataset(), measured))
    assert [(look.width, look.height) for look in looks] == sizes and not any(look.error for look in looks)
    assert max(at_a_time) == 810_000  # larger than the limit: decoded alone
    assert all(number in (40_000, 80_000, 810_000) for number in at_a_time)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_deep_greys_take_a_few_bytes_a_pixel_and_stay_what_they_were(dtype: Any) -> None:
    values = (np.arange(1 << 22) % 65536).astype(dtype).reshape(2048, 2048)
    image = Image.fromarray(values)
    tracemalloc.start()
    grey = decoding._convert_to_8_bits(image)[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 * values.size, f"{peak / values.size:.1f} bytes a pixel"
    assert (np.asarray(grey) == np.rint(values.astype(np.float64) * (255 / 65535)).astype(np.uint8)).all()


def test_a_pipe_as_settings_is_one_line_of_the_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "a.toml")
    monkeypatch.setattr(sys, "argv", ["lora-fp8", "check", str(tmp_path / "a.toml")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert "a.toml: the file cannot be read (this is not a regular file)" in capfd.readouterr().err
