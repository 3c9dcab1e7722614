"""Decide which folders and files are ours, for everything that writes, replaces or deletes in a run folder.

* A folder is ours if it has the marker `.lora-fp8-run`, which is written first, into a folder that was absent or empty.
  A run of an earlier version, which wrote no marker, counts as ours when it is resumed, and gets the marker then.
* A file in it is ours if it has a name that this program uses. Only such files are ever replaced or deleted.
* Our folders and files are never links: a run folder from somebody else must not lead elsewhere. The path to the run
  folder may contain links.

Standard library only: the queue and the web page use this module too.
"""

import contextlib
import errno
import json
import os
import re
import stat
import time
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..common.locks import try_lock
from ..common.shell import quote_path
from ..errors import Message, UserError, reason

MARKER = ".lora-fp8-run"
VERSION = 1
FOLDERS = ("checkpoints", "samples", "export", "control")
REQUESTS = ("stop", "save", "preview")
SAMPLE_REQUEST = r"sample-\d{19}\.json"
"""Names of requests for an image (`preview_requests`)."""

_STEP = r"step-\d{6,}"
_BUNDLE = r"(step|best)-\d{6,}"
_STAGED = rf"\.tmp-{_BUNDLE}-(\d+|old)"
_LORA = r"(?:[A-Za-z0-9._-]|[^\x00-\x7f\s])+_(diffusers|comfy|kohya)\.safetensors"
"""Letters of every script, as in `lora_files.export_metadata.make_slug`."""
_REPLACED = re.compile(
    r"(config\.toml|status\.json|log\.txt|verify\.json|validation\.json|probe\.safetensors|demo\.json|report\.html|contact_sheet\.png"
    rf"|previews\.json|tracking\.json|control/{SAMPLE_REQUEST}"
    rf"|samples/({_STEP}-(now-)?\d+\.(png|webp)|contact_sheet\.png)"
    rf"|export/(({_STEP}|average)/)?{_LORA})"
)
"""Names of files that are written under a temporary name and then renamed."""
_OTHERS = re.compile(
    rf"({re.escape(MARKER)}|lock|events\.jsonl|log\.\d+\.txt|tensorboard/events\.out\.tfevents\.[\w.-]+|control/({'|'.join(REQUESTS)})"
    rf"|checkpoints/({_BUNDLE}|{_STAGED})/(adapter\.safetensors|optimizer\.safetensors|state\.json|manifest\.json))"
)
_TEMPORARY = re.compile(r"((?:.*/)?)\.([^/]+)\.\d+\.tmp")
_INNER = re.compile(rf"({'|'.join(FOLDERS)}|tensorboard|checkpoints/({_BUNDLE}|{_STAGED})|export/({_STEP}|average))")
_KEPT_TO_THE_END = ("events.jsonl", "config.toml", MARKER)
"""Files that are deleted last, so that an interrupted removal can be repeated."""


def is_run(folder: Path) -> bool:
    """Return True if a folder is ours, of this version or an earlier one."""
    return _is_marked(folder) or _is_of_an_earlier_version(folder)


def require_new(folder: Path) -> None:
    """Refuse a folder in which a new run cannot start. Writes nothing.

    Raises:
        UserError: the folder is neither empty nor ours; or it has a run already; or see `require_ours`.
    """
    if not (names := _list_names(folder)):
        return
    if not is_run(folder):
        raise UserError(
            Message(
                "{path}: a new run needs a new or empty folder, but this one contains {entries}. Choose another "
                "name or output_dir (--set name=...)",
                path=folder,
                entries=format_entries(names),
            )
        )
    require_ours(folder)
    if not _is_marked(folder) or has_results(folder):
        raise UserError(
            Message(
                "{path}: this folder already contains a run; continue it with `{command}`, or choose another name "
                "(--set name=...)",
                path=folder,
                command=f"lora-fp8 resume {quote_path(folder)}",
            )
        )


def require_ours(folder: Path) -> None:
    """Refuse to write into a folder that is not a run folder, or in which a link has the name of one of our files.

    Raises:
        UserError: the folder is refused.
    """
    if not is_run(folder):
        names = _list_names(folder)
        raise UserError(
            Message(
                "{path}: this is not a run folder of this program (it contains {entries}); nothing was written. "
                "Give a run folder",
                path=folder,
                entries=format_entries(names),
            )
        )
    if wrong := _find_displaced(folder):
        raise UserError(
            Message(
                "{path}: parts of the run folder are links, or differ from their names ({entries}); nothing was "
                "written. Replace them with the files themselves",
                path=folder,
                entries=format_entries(wrong),
            )
        )


def require_startable(folder: Path, *, resume: bool = False) -> None:
    """Refuse a folder that `claim` would refuse. Writes nothing.

    Raises:
        UserError: see `require_new`; when resuming, see `require_ours`.
    """
    if not resume:
        require_new(folder)
    elif _list_names(folder):
        require_ours(folder)


def claim(folder: Path, *, resume: bool = False) -> None:
    """Create and mark the folder of a run, unless it is marked already.

    Args:
        folder: the run folder.
        resume: continue the run that is in the folder.

    Raises:
        UserError: see `require_startable`.
        OSError: the folder cannot be created.
    """
    require_startable(folder, resume=resume)
    folder.mkdir(parents=True, exist_ok=True)
    about = json.dumps({"id": uuid.uuid4().hex, "version": VERSION}) + "\n"
    # Not through a temporary file: another process that starts here would find that file and refuse the folder. The
    # marker counts as soon as it exists, whatever it contains.
    with contextlib.suppress(FileExistsError), open(folder / MARKER, "x", encoding="utf-8") as file:
        file.write(about)
        file.flush()
        os.fsync(file.fileno())


def has_results(folder: Path) -> bool:
    """Return True if a run folder has checkpoints or LoRA files, which a new run would mix with its own."""
    return any((folder / "checkpoints").glob("step-*")) or any((folder / "export").glob("*.safetensors"))


def require_folders(folder: Path) -> None:
    """Check that the folders of a run in training are still folders; a missing one is created when needed.

    Raises:
        NotADirectoryError: something else, such as a link, is in the place of a folder.
    """
    for name in FOLDERS:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(os.lstat(folder / name).st_mode):
                line = Message("this was a folder of the run, but is now a link or a file")
                raise NotADirectoryError(errno.ENOTDIR, line, str(folder / name))


def sweep(folder: Path) -> None:
    """Delete temporary files of killed processes, and requests that were made to them. Requires the lock of the run."""
    for relative, entry in list(_iterate_entries(folder)):
        in_place = relative.removeprefix("checkpoints/")
        if entry.is_dir(follow_symlinks=False):
            if in_place != relative and re.fullmatch(_STAGED, in_place):
                remove_bundle(Path(entry.path))
        elif _is_temporary(relative) or re.fullmatch(rf"control/({'|'.join(REQUESTS)}|{SAMPLE_REQUEST})", relative):
            os.unlink(entry.path)


def split_bundle(bundle: Path) -> tuple[list[str], list[str]]:
    """Return the names of our files in the folder of a checkpoint, manifest first, and those of all others."""
    ours: list[str] = []
    others: list[str] = []
    with contextlib.suppress(FileNotFoundError), os.scandir(bundle) as entries:
        for entry in entries:
            mine = is_ours(f"checkpoints/{bundle.name}/{entry.name}") and entry.is_file(follow_symlinks=False)
            (ours if mine else others).append(entry.name)
    return sorted(ours, key=lambda name: (name != "manifest.json", name)), sorted(others)


def remove_bundle(bundle: Path) -> list[str]:
    """Delete our files of a checkpoint, and its folder if nothing else is left in it.

    The manifest is deleted first, so that an interrupted removal does not leave a valid checkpoint.

    Returns:
        The names that are not ours and were left.

    Raises:
        OSError: one of our files cannot be deleted.
    """
    ours, others = split_bundle(bundle)
    for name in ours:
        (bundle / name).unlink(missing_ok=True)
    if not others:
        with contextlib.suppress(FileNotFoundError):
            bundle.rmdir()
    return others


def remove(folder: Path) -> list[str]:
    """Delete what a run has written, and its folder if nothing else is left in it.

    Returns:
        What is not the run's and was left, relative to the folder; names of folders end with a slash.

    Raises:
        UserError: the folder is a link or not ours, or a run is training there.
    """
    if folder.is_symlink() or not is_run(folder):
        raise UserError(
            Message("{path}: this does not look like a run that was trained here; delete it by hand", path=folder)
        )
    with _locked(folder):
        files, folders, left = [], [], []
        for relative, entry in _iterate_entries(folder):
            if entry.is_dir(follow_symlinks=False):
                folders += [relative] if _INNER.fullmatch(relative) else []
                left += [] if _INNER.fullmatch(relative) else [f"{relative}/"]
            elif entry.is_file(follow_symlinks=False) and is_ours(relative):
                files.append(relative)
            else:
                left.append(relative)
        for relative in sorted(files, key=lambda name: (name in _KEPT_TO_THE_END, _rank_last(name))):
            (folder / relative).unlink(missing_ok=True)
        for place in [*(folder / name for name in reversed(folders)), folder]:
            with contextlib.suppress(OSError):  # not empty: the caller is told what is left
                place.rmdir()
    return left


def is_ours(relative: str) -> bool:
    """Return True if this program uses this file name (relative to the run folder, with forward slashes)."""
    return bool(_REPLACED.fullmatch(relative) or _OTHERS.fullmatch(relative)) or _is_temporary(relative)


def _rank_last(name: str) -> int:
    return _KEPT_TO_THE_END.index(name) if name in _KEPT_TO_THE_END else 0


def _is_temporary(relative: str) -> bool:
    match = _TEMPORARY.fullmatch(relative)
    return bool(match and _REPLACED.fullmatch(match[1] + match[2]))


def _list_names(folder: Path) -> list[str]:
    """Return the names in a folder; [] if it does not exist or is not a folder."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise make_unusable_error(folder, error) from None


def make_unusable_error(folder: Path, error: OSError) -> UserError:
    """Return the error for a run folder that cannot be made, listed or written."""
    return UserError(
        Message("{path}: the run folder cannot be created or written ({why})", path=folder, why=reason(error))
    )


def format_entries(names: list[str]) -> str:
    """Return the number of names, and the first five."""
    if not names:
        return Message("nothing")
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    if len(names) == 1:
        return Message("1 entry: {names}", names=listed)
    return Message("{count} entries: {names}", count=len(names), names=listed)


def _is_marked(folder: Path) -> bool:
    return _is_file(folder / MARKER)


def _is_file(path: Path) -> bool:
    """Return True if there is a regular file that is not a link."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _is_of_an_earlier_version(folder: Path) -> bool:
    """Return True if this is a run without a marker: a log that begins as ours do, beside a job's settings."""
    log, settings = folder / "events.jsonl", folder / "config.toml"
    if not (_is_file(log) and _is_file(settings)):
        return False
    try:
        with open(log, "rb") as file:
            first = json.loads(file.readline(1 << 16))
        job = tomllib.loads(settings.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(first, dict) and {"t", "event"} <= first.keys() and isinstance(job.get("model"), dict)


def _iterate_entries(folder: Path, inside: str = "") -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """Yield what a run folder contains, including what is in our folders inside it; links are not followed."""
    try:
        with os.scandir(folder / inside) as unsorted:
            entries = sorted(unsorted, key=lambda entry: entry.name)
    except FileNotFoundError:  # a trainer has renamed or deleted it meanwhile
        return
    for entry in entries:
        relative = inside + entry.name
        yield relative, entry
        if _INNER.fullmatch(relative) and entry.is_dir(follow_symlinks=False):
            yield from _iterate_entries(folder, f"{relative}/")


def _find_displaced(folder: Path) -> list[str]:
    """Return the paths that have one of our names but are links, or a folder instead of a file or vice versa."""
    wrong = []
    for relative, entry in _iterate_entries(folder):
        is_folder = entry.is_dir(follow_symlinks=False)
        if _INNER.fullmatch(relative):
            wrong += [] if is_folder else [relative]
        elif is_ours(relative) and not entry.is_file(follow_symlinks=False):
            wrong.append(relative)
    return wrong


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Any]:
    """Hold the lock of a run, so that nobody starts training there."""
    if not _is_file(folder / "lock"):
        yield
        return
    with open(folder / "lock", "rb") as file:
        for attempt in range(10):
            if try_lock(file):
                break
            if attempt < 9:  # a call to `Run.is_locked` holds a shared lock for an instant
                time.sleep(0.02)
        else:
            raise UserError(Message("{folder}: a training is running in this folder; stop it first", folder=folder))
        yield
