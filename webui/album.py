"""A folder of pictures and videos as the Dataset page needs it: captions and tags, the doctor's report, captioning.

Captions are read from disk whenever it has changed, so that edits from elsewhere show. What has to decode pictures runs
as a program of its own (`lora-fp8 dataset`), one at a time; what it measured is kept below home by the files' sizes and
times.
"""

import contextlib
import hashlib
import json
import os
import posixpath
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_fp8 import families, jobs
from lora_fp8.config import UserError
from lora_fp8.data import captions, clips, images

from . import pictures
from .context import Place

FRESH_SECONDS = 10.0
"""Listing 5,000 pictures takes half a second; the caption in the editor is read anew whenever it matters."""
KEPT = 8
"""Folders that are held in memory, those used last."""
FOLDERS = ("mask", "masks", "masklabel", "masklabels")
"""Names of folders that hold masks."""
KEPT_EXAMINATIONS = 64
"""Reports; a training of more folders of clips would have them made again and again."""
_one_at_a_time = threading.Semaphore(1)
_lock = threading.Lock()


@dataclass
class Album:
    """Pictures and videos of a folder by relative name, each with its caption file, its text, and why there is none.

    Attributes:
        given: where masks are, as in dataset.folders, if somebody has said so.
        mask: the same, or what masks beside the pictures are called by the looks of them, which are no pictures then.
        masks: how many of those there are.
        inside: a folder in it that looks like one of masks.
    """

    folder: Path
    given: str = ""
    mask: str = ""
    masks: int = 0
    inside: str = ""
    files: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    read_at: float = -1.0
    _seen: dict[str, tuple[tuple[int, int], str, str]] = field(default_factory=dict)

    @property
    def videos(self) -> list[str]:
        """Names of the videos."""
        return [name for name in self.files if is_video(name)]

    def tags(self, names: list[str] | None = None) -> Counter[str]:
        """How many captions have each tag."""
        counted: Counter[str] = Counter()
        for name in self.files if names is None else names:
            counted.update(set(captions.split_tags(" ".join(self.texts[name].splitlines()))))
        return counted

    def reread(self, name: str) -> str:
        """The caption of one picture as it is now; of others that share it, too. Raises UserError."""
        text = captions.read(self.folder, self.files[name])
        for other, file in self.files.items():
            if file == self.files[name]:
                self.texts[other] = text
        return text

    def refresh(self) -> None:
        """Read what has changed on disk. Raises UserError."""
        listed = captions.listed(self.folder)
        root = Path(os.path.expanduser(self.folder))
        self.masks = sum(os.path.exists(root / f"{os.path.splitext(name)[0]}-masklabel.png") for name in listed)
        self.mask = self.given or (pictures.LABEL if self.masks else "")
        self.mask = self.mask or pictures.likely_masks(listed, lambda name: listed[name].exists())[0]
        if self.mask != pictures.LABEL:  # those are not listed anyway
            masks = {name for name in listed if images.masked_stem(self.mask, posixpath.basename(name))}
            listed, self.masks = {name: path for name, path in listed.items() if name not in masks}, len(masks)
        self.inside = "" if self.given else _likely_folder(listed)
        files = {name: path.relative_to(root).as_posix() for name, path in listed.items()}
        texts, wrong = {}, {}
        for name, path in listed.items():
            try:
                status = path.stat()
                stamp = (status.st_mtime_ns, status.st_size)
            except OSError:
                stamp = (0, 0)
            known = self._seen.get(files[name])
            if known is None or known[0] != stamp:
                text = why = ""
                try:
                    text = captions.read(self.folder, files[name])
                except UserError as error:
                    why = str(error)
                known = self._seen[files[name]] = (stamp, text, why)
            texts[name] = known[1]
            if known[2]:
                wrong[name] = known[2]
        self.files, self.texts, self.wrong, self.read_at = files, texts, wrong, time.monotonic()


def is_video(name: str) -> bool:
    """Whether it is a video, by its name."""
    return os.path.splitext(name)[1].lower() in clips.VIDEOS


def _likely_folder(listed: Mapping[str, Path]) -> str:
    """A folder called masks or the like whose pictures are named as those above it; "" where there is none."""
    stems = {os.path.splitext(name)[0] for name in listed}
    for name, caption in listed.items():
        parts = name.split("/")
        for at, part in enumerate(parts[:-1]):
            above = posixpath.join(*parts[:at], *parts[at + 1 :])
            if part.lower() in FOLDERS and os.path.splitext(above)[0] in stems and not caption.exists():
                return "/".join(parts[: at + 1])
    return ""


_albums: dict[tuple[Path, str], Album] = {}


def album(folder: Path, fresh: bool = False, mask: str = "") -> Album:
    """The pictures of a folder, at most `FRESH_SECONDS` old; `fresh` reads now; `mask` is Album's `given`.

    Raises:
        UserError: it cannot be read.
    """
    key = (folder, mask)
    with _lock:
        found = _albums.pop(key, None) or Album(folder, mask)
        _albums[key] = found
        while len(_albums) > KEPT:
            _albums.pop(next(iter(_albums)))
        if fresh or time.monotonic() - found.read_at > FRESH_SECONDS:
            found.refresh()
        return found


def seen_last(folder: Path, mask: str = "") -> Album:
    """The pictures of a folder as somebody saw them last, for ticks: reads nothing that was read before."""
    with _lock:
        found = _albums.get((folder, mask))
    return album(folder, mask=mask) if found is None else found


# --------------------------------------------------------------------------------------------------------- the doctor


class Examination:
    """`lora-fp8 dataset FOLDER` at work, or done: `report` is its JSON, `problem` why there is none."""

    def __init__(
        self, place: Place, folder: Path, family: str, resolution: int, settings: Sequence[str] = (), mask: str = ""
    ):
        self.report: dict[str, Any] | None = None
        self.problem = ""
        self.done = self.total = 0
        self.begun = time.monotonic()
        key = hashlib.blake2b(str(folder).encode(errors="surrogateescape"), digest_size=12).hexdigest()
        self._command = [sys.executable, "-m", "lora_fp8", "dataset", "look", str(folder), "--json"]
        self._command += ["--family", family, "--resolution", str(resolution), f"--mask={mask}"]
        self._command += ["--remember", str(place.home / "examined" / f"{key}.json")]
        self._command += [part for setting in settings for part in ("--set", setting)]
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def running(self) -> bool:
        return self.report is None and not self.problem

    def _run(self) -> None:
        with _one_at_a_time, tempfile.TemporaryFile() as answer:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONUTF8": "1"},
            )
            said = []
            for line in process.stderr or ():
                try:
                    told = json.loads(line)
                    self.done, self.total = int(told["done"]), int(told["total"])
                except (ValueError, KeyError, TypeError):
                    said.append(line.decode(errors="replace").strip())
            process.wait()
            answer.seek(0)
            try:
                self.report = json.loads(answer.read())
            except ValueError:
                self.problem = "\n".join(said[-5:]) or f"ended with exit code {process.returncode}"

    def files(self, *kinds: str) -> dict[str, str]:
        """The files that findings of these kinds name, and the detail of each; {} before there is a report."""
        found = (self.report or {}).get("findings", ())
        return {one["file"]: one["detail"] for each in found if each["kind"] in kinds for one in each["files"]}


CUT = ("frames", "fps", "clip")
"""Settings of [dataset] that say how clips are cut."""


def cutting(family: str, frames: Any, fps: Any, clip: Any) -> tuple[str, ...]:
    """How clips are cut, as settings of `lora-fp8 dataset look --set`; none where the family draws no clips."""
    if not frames or family not in families.available() or not families.traits(family)["clips"]:
        return ()
    given = {"frames": frames, "fps": fps, "clip": clip}
    return tuple(f"dataset.{name}={json.dumps(value)}" for name, value in given.items())


_examinations: dict[tuple[Any, ...], Examination] = {}


def examination(
    place: Place,
    folder: Path,
    family: str,
    resolution: int,
    settings: tuple[str, ...] = (),
    again: bool = False,
    mask: str = "",
) -> Examination:
    """The examination of a folder for a family at a resolution; begun where there is none, or it is wanted again.

    `settings` as of `cutting`; `mask` as in dataset.folders.
    """
    key = (folder, family, resolution, settings, mask)
    with _lock:
        found = _examinations.pop(key, None)
        if found is None or (again and not found.running):
            found = Examination(place, folder, family, resolution, settings, mask)
        _examinations[key] = found
        while len(_examinations) > KEPT_EXAMINATIONS:
            _examinations.pop(next(iter(_examinations)))
        return found


# -------------------------------------------------------------------------------------------------- captioning as a job


def submit_captioning(
    place: Place, folder: Path, *, model: str, kind: str, prompt: str, overwrite: bool, trigger: str, mask: str = ""
) -> int:
    """Queue `lora-fp8 caption` for a folder, and see that somebody works on the queue. -> the job's number

    `mask` is an album's.

    Raises:
        UserError: the model is neither a folder that the page may use nor the id of one on the hub.
    """
    model = model.strip()
    if model.startswith(("/", "~")):
        model = str(place.inside(model))
    elif not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model, re.ASCII):
        raise UserError(f"{model or 'no model'}: give a folder from / or ~/ on, or a Hugging Face id (OWNER/NAME)")
    arguments = [str(folder), "--json", f"--model={model}", f"--kind={'tags' if kind == 'tags' else 'text'}"]
    arguments += [f"--prompt={prompt.strip()}"] if prompt.strip() else []
    arguments += [f"--trigger={trigger.strip()}"] if trigger.strip() else []
    arguments += [f"--mask={mask}"] if "*" in mask else []
    arguments += ["--overwrite"] if overwrite else []
    number = jobs.Queue(place.home).submit_command("caption", arguments, folder=folder, name=f"caption {folder.name}")
    jobs.ensure_worker(place.home)
    return number


def progress(lines: list[str]) -> tuple[int, int]:
    """(done, of all) by the newest line of a captioning's log that tells it; (0, 0) before there is one."""
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            told = json.loads(line)
            if told.get("event") == "caption":
                return int(told["done"]), int(told["total"])
    return 0, 0
