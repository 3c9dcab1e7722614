"""A folder of images and videos for the Dataset page: captions and tags, the doctor's report, captioning jobs.

Captions are read from disk whenever it has changed, so that edits by other programs show. Everything that decodes
images runs in a process of its own (`lora-fp8 dataset`), one at a time. It remembers what it found, so that
the next time is quick.
"""

import contextlib
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_fp8 import families, jobs
from lora_fp8.common.messages import read_message, restore
from lora_fp8.data import caption_operations, captions, clips, image_edits, image_files
from lora_fp8.errors import Joined, Message, UserError, UserErrors, combine

from . import engine, image_folders
from .context import Place

FRESH_SECONDS = 10.0
"""Listing 5,000 images takes half a second. The caption in the editor is read again whenever it matters."""
KEPT = 8
"""Most recently used folders that are kept in memory."""
FOLDERS = ("mask", "masks", "masklabel", "masklabels")
"""Names of folders that hold masks."""
KEPT_EXAMINATIONS = 64
"""Reports kept in memory. A training with more folders of clips would examine them again and again."""
_one_at_a_time = threading.Semaphore(1)
_lock = threading.Lock()


@dataclass
class DatasetFolder:
    """Images and videos of a folder by relative name, with caption file, text, and the error if it cannot be read.

    Attributes:
        given: where masks are, as in dataset.folders, if it is set.
        mask: `given`, or the name pattern of files that look like masks, which are then not listed as images.
        masks: number of masks.
        inside: a folder in it that looks like a folder of masks.
        problem: why no image is listed, for example because there is none; "" if there are images.
        edits: how images are turned and cropped, and which are excluded and therefore not in `files`.
        unusable: why the folder's list of edits cannot be used; "" if it can.
    """

    folder: Path
    given: str = ""
    mask: str = ""
    masks: int = 0
    inside: str = ""
    problem: str = ""
    edits: dict[str, image_edits.ImageEdit] = field(default_factory=dict)
    unusable: str = ""
    files: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    read_at: float = -1.0
    _seen: dict[str, tuple[tuple[int, int], str, str]] = field(default_factory=dict)

    @property
    def videos(self) -> list[str]:
        """Return the names of the videos."""
        return [name for name in self.files if is_video(name)]

    def list_uncaptioned(self) -> list[str]:
        """List the images without a caption. One that cannot be read is a caption, and has a problem of its own."""
        return [name for name, text in self.texts.items() if not text.strip() and name not in self.wrong]

    def count_tags(self, names: list[str] | None = None) -> Counter[str]:
        """Count the captions that have each tag."""
        counted: Counter[str] = Counter()
        for name in self.files if names is None else names:
            counted.update(set(caption_operations.split_tags(" ".join(self.texts[name].splitlines()))))
        return counted

    def reread_caption(self, name: str) -> str:
        """Read the caption of an image again, also for other images with the same caption file. Raises UserError."""
        text = captions.read(self.folder, self.files[name])
        for other, file in self.files.items():
            if file == self.files[name]:
                self.texts[other] = text
        return text

    def refresh(self) -> None:
        """Read everything that has changed on disk. Raises UserError if the folder does not exist."""
        root = Path(os.path.expanduser(self.folder))
        try:
            listed, self.problem = captions.list_caption_files(self.folder), ""
        except UserErrors as error:
            if not root.is_dir():
                raise
            listed, self.problem = {}, Joined("; ", error.problems)
        try:
            self.edits, self.unusable = image_edits.read(root), ""
        except UserError as error:
            self.edits, self.unusable = {}, str(error)
        start = os.path.join(root, "")
        self.masks = sum(os.path.exists(f"{start}{os.path.splitext(name)[0]}-masklabel.png") for name in listed)
        self.mask = self.given or (image_folders.LABEL if self.masks else "")
        self.mask = self.mask or image_folders.find_likely_masks(listed, lambda name: listed[name].exists())[0]
        if self.mask != image_folders.LABEL:  # masks of this name are never listed
            masks = {name for name in listed if image_files.find_masked_stem(self.mask, posixpath.basename(name))}
            listed, self.masks = {name: path for name, path in listed.items() if name not in masks}, len(masks)
        self.inside = "" if self.given else _find_mask_folder(listed)
        files = {name: image_files.make_relative_name(path, root) for name, path in listed.items()}
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
    """Return True if the name is that of a video."""
    return os.path.splitext(name)[1].lower() in clips.VIDEOS


def _find_mask_folder(listed: Mapping[str, Path]) -> str:
    """Find a folder named "masks" or similar whose images are named like those above it; "" if there is none."""
    stems = {os.path.splitext(name)[0] for name in listed}
    for name, caption in listed.items():
        parts = name.split("/")
        for at, part in enumerate(parts[:-1]):
            above = posixpath.join(*parts[:at], *parts[at + 1 :])
            if part.lower() in FOLDERS and os.path.splitext(above)[0] in stems and not caption.exists():
                return "/".join(parts[: at + 1])
    return ""


_albums: dict[tuple[Path, str], DatasetFolder] = {}


def open_folder(folder: Path, fresh: bool = False, mask: str = "") -> DatasetFolder:
    """Return a folder as it was at most `FRESH_SECONDS` ago; `fresh` reads it now. `mask`: as `DatasetFolder.given`.

    Raises:
        UserError: it does not exist.
    """
    key = (folder, mask)
    with _lock:
        dataset = _albums.pop(key, None) or DatasetFolder(folder, mask)
        _albums[key] = dataset
        while len(_albums) > KEPT:
            _albums.pop(next(iter(_albums)))
        if fresh or time.monotonic() - dataset.read_at > FRESH_SECONDS:
            dataset.refresh()
        return dataset


def open_cached(folder: Path, mask: str = "") -> DatasetFolder:
    """Return a folder as it was read last, for ticks. It is read only if it never was."""
    with _lock:
        cached = _albums.get((folder, mask))
    return open_folder(folder, mask=mask) if cached is None else cached


# --------------------------------------------------------------------------------------------------------- the doctor


@dataclass(frozen=True)
class Purpose:
    """What a folder is examined for.

    Attributes:
        family, resolution: the training's architecture and resolution.
        settings: further settings, as of `list_clip_settings`.
        mask: as in dataset.folders.
    """

    family: str
    resolution: int
    settings: tuple[str, ...] = ()
    mask: str = ""


class Examination:
    """A running or finished `lora-fp8 dataset look`.

    Attributes:
        report: its JSON; None before it has ended.
        problem: its error; "" if there is none.
        done, total: progress.
        files: names of the folder's files, and their edits, when it was started, if they are known.
        begun, began_at: when it was started, by the monotonic clock and by that of file times.
    """

    def __init__(self, folder: Path, purpose: Purpose):
        self.report: dict[str, Any] | None = None
        self.problem = ""
        self.done = self.total = 0
        self.files: tuple[Any, ...] | None = None
        self.begun, self.began_at = time.monotonic(), time.time()
        self._command = [sys.executable, "-m", "lora_fp8", "dataset", "look", str(folder), "--json"]
        self._command += ["--family", purpose.family, "--resolution", str(purpose.resolution)]
        self._command += [f"--mask={purpose.mask}"]
        self._command += [part for setting in purpose.settings for part in ("--set", setting)]
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def running(self) -> bool:
        """Return True until there is a report or a problem."""
        return self.report is None and not self.problem

    def _run(self) -> None:
        with _one_at_a_time, tempfile.TemporaryFile() as answer, engine.prepare_environment() as (environment, file):
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=subprocess.PIPE,
                env=environment,
            )
            output = b""
            for line in process.stderr or ():
                try:
                    progress = json.loads(line)
                    self.done, self.total = int(progress["done"]), int(progress["total"])
                except (ValueError, KeyError, TypeError):
                    output += line
            process.wait()
            answer.seek(0)
            try:
                self.report = restore(json.loads(answer.read()))
            except ValueError:
                self.problem = read_message(file) or engine.describe_crash(output, process.returncode)

    def list_files(self, *kinds: str) -> dict[str, str]:
        """Return the files that findings of these kinds name, with the detail of each; {} before there is a report."""
        findings = (self.report or {}).get("findings", ())
        return {
            file["file"]: file["detail"]
            for finding in findings
            if finding["kind"] in kinds
            for file in finding["files"]
        }


CUT = ("frames", "fps", "clip")
"""Settings of [dataset] for cutting clips."""
TAGS = ("shuffle_tags", "tag_dropout", "tag_separator")
"""Settings of [dataset] that decide whether the doctor reports captions that are sentences."""


def list_clip_settings(family: str, frames: Any, fps: Any, clip: Any) -> tuple[str, ...]:
    """List the settings for cutting clips for `lora-fp8 dataset look --set`; () if the family trains on no clips."""
    if not frames or family not in families.list_families() or not families.get_traits(family)["clips"]:
        return ()
    given = {"frames": frames, "fps": fps, "clip": clip}
    return tuple(f"dataset.{name}={json.dumps(value)}" for name, value in given.items())


_examinations: dict[tuple[Any, ...], Examination] = {}


def examine(folder: Path, purpose: Purpose, again: bool = False) -> Examination:
    """Return the examination of a folder for a purpose. Starts one if there is none, or if `again`."""
    key = (folder, purpose)
    with _lock:
        examination = _examinations.pop(key, None)
        if examination is None or (again and not examination.running):
            examination = Examination(folder, purpose)
        _examinations[key] = examination
        while len(_examinations) > KEPT_EXAMINATIONS:
            _examinations.pop(next(iter(_examinations)))
        return examination


def find_unreadable(folder: Path) -> dict[str, str]:
    """Return the images that the newest finished examination could not read, with the reason of each.

    Files that were changed, deleted or excluded since are left out. Nothing is examined for this.
    """
    with _lock:
        finished = [done for (where, _), done in _examinations.items() if where == folder and done.report is not None]
    if not finished:
        return {}
    newest = max(finished, key=lambda done: done.begun)
    unreadable = newest.list_files("unreadable")
    try:
        excluded = {name for name, edit in image_edits.read(folder).items() if edit.exclude} if unreadable else set()
    except UserError:  # reported where the images are
        excluded = set()
    return {
        name: why
        for name, why in unreadable.items()
        if name not in excluded and not is_video(name) and not _has_changed(folder / name, newest.began_at)
    }


def find_undecodable_captions(folder: Path, mask: str) -> list[str]:
    """Return the caption files that are not UTF-8, or cannot be read, as of a few seconds ago. `mask`: as given."""
    try:
        dataset = open_folder(folder, mask=mask)
    except UserError:  # the folder has just been deleted
        return []
    return list(dict.fromkeys(dataset.files[name] for name in dataset.wrong))


def _has_changed(file: Path, since: float) -> bool:
    try:
        return file.stat().st_mtime > since
    except OSError:
        return True


# -------------------------------------------------------------------------------------------------- captioning as a job


@dataclass(frozen=True)
class Captioning:
    """How a model captions a folder.

    Attributes:
        model: Hugging Face id, or a folder.
        kind: "tags", or "text", which a tagger understands as tags.
        prompt, trigger: "" for none.
        overwrite: also caption images that have a caption.
        append: add tags to captions that are there.
        mask: as `DatasetFolder.mask`.
        threshold, character_threshold: numbers from 0 to 1; "" for the usual ones.
        exclude: tags to leave out, separated by commas.
        rating, keep_underscores: as for `lora-fp8 caption`.
    """

    model: str
    kind: str
    prompt: str
    trigger: str
    overwrite: bool
    mask: str = ""
    threshold: str = ""
    character_threshold: str = ""
    exclude: str = ""
    rating: bool = False
    keep_underscores: bool = False
    append: bool = False


def submit_captioning(place: Place, folder: Path, wanted: Captioning) -> int:
    """Queue `lora-fp8 caption` for a folder and start a worker if there is none. Returns the job number.

    Raises:
        UserError: the model is neither an allowed folder nor a Hugging Face id, or a threshold is no probability.
    """
    model = wanted.model.strip()
    if os.path.isabs(model) or model.startswith("~"):
        model = str(place.resolve(model))
    elif not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model, re.ASCII):
        raise UserError(
            Message(
                "{text}: this is neither a folder nor a Hugging Face id; give a folder from / or ~/ on, or OWNER/NAME",
                text=model or Message("no model is chosen"),
            )
        )
    arguments = [str(folder), "--json", f"--model={model}", *(["--kind=tags"] if wanted.kind == "tags" else [])]
    arguments += [f"--prompt={wanted.prompt.strip()}"] if wanted.prompt.strip() else []
    arguments += [f"--trigger={wanted.trigger.strip()}"] if wanted.trigger.strip() else []
    arguments += [f"--mask={wanted.mask}"] if "*" in wanted.mask else []
    arguments += ["--overwrite"] if wanted.overwrite else []
    arguments += ["--append"] if wanted.append else []
    arguments += _list_tagger_options(wanted)
    number = jobs.Queue(place.home).submit_command("caption", arguments, folder=folder, name=f"caption {folder.name}")
    jobs.ensure_worker(place.home)
    return number


def _list_tagger_options(wanted: Captioning) -> list[str]:
    arguments, problems = [], []
    for name in ("threshold", "character_threshold"):
        if text := getattr(wanted, name).strip():
            if not _is_probability(text):
                option = f"--{name.replace('_', '-')}"
                problems.append(Message("{option}: {text} is not a number from 0 to 1", option=option, text=repr(text)))
            arguments.append(f"--{name.replace('_', '-')}={text}")
    if problems:
        raise combine(problems)
    arguments += [f"--exclude={tag.strip()}" for tag in wanted.exclude.split(",") if tag.strip()]
    arguments += ["--rating"] if wanted.rating else []
    return arguments + (["--keep-underscores"] if wanted.keep_underscores else [])


def _is_probability(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def parse_download(lines: list[str]) -> dict[str, Any] | None:
    """Return the newest event of a captioning log if the model is being downloaded; else None."""
    for line in reversed(lines):
        with contextlib.suppress(ValueError, AttributeError):
            event = json.loads(line)
            numbers = [event.get(name) for name in ("bytes", "total", "speed")]
            is_download = event.get("event") == "download" and all(type(number) is int for number in numbers)
            return event if is_download else None
    return None


def parse_progress(lines: list[str]) -> tuple[int, int]:
    """Return (done, total) of the newest progress line in a captioning log; (0, 0) before there is one."""
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            event = json.loads(line)
            if event.get("event") == "caption":
                return int(event["done"]), int(event["total"])
    return 0, 0
