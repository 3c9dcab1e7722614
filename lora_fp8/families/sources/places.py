"""Where the files of a base are put on this machine.

Files of Hugging Face lie in huggingface_hub's cache as it lays them out:

    models--OWNER--NAME/blobs/SHA256                  the content; SHA256.incomplete while it is transferred
    models--OWNER--NAME/snapshots/COMMIT/vae/...      links to it (the files themselves, where the system has no links)
    models--OWNER--NAME/refs/main                     the commit of a branch, for times without a connection

Those of ModelScope and Civitai lie as plain files in the folder that the description names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...common.numbers import format_bytes
from ...common.writing import atomic_write
from ...errors import Message
from ...run import disk_space

if TYPE_CHECKING:
    from .description import BaseDescription, BaseFile

DEFAULT_BRANCH = "main"


@dataclass(frozen=True)
class Place:
    """The place of a file.

    Attributes:
        target: the content when it is complete.
        incomplete: the content while it is transferred.
        lock: held by whoever transfers it.
        pointer: what becomes a link to `target`; `target` itself if no link is needed.
    """

    target: Path
    incomplete: Path
    lock: Path
    pointer: Path


def find_place(description: BaseDescription, file: BaseFile) -> Place:
    """Return the place of a file.

    Raises:
        ValueError: the description names no folder.
    """
    if description.folder is None:
        raise ValueError("the description names no folder")
    pointer = description.folder / file.path
    if description.reference.kind != "hub" or file.sha256 is None:
        incomplete = pointer.with_name(f"{pointer.name}.incomplete")
        return Place(pointer, incomplete, pointer.with_name(f".{pointer.name}.lock"), pointer)
    repository = description.folder.parent.parent
    blob = repository / "blobs" / file.sha256
    lock = repository.parent / ".locks" / repository.name / f"{file.sha256}.lock"
    target = blob if _has_links(repository.parent) else pointer
    return Place(target, blob.with_name(f"{blob.name}.incomplete"), lock, pointer)


def _has_links(folder: Path) -> bool:
    from huggingface_hub.file_download import are_symlinks_supported

    return are_symlinks_supported(folder)


def link(place: Place) -> None:
    """Make the pointer of a complete file, unless it is there."""
    if place.pointer == place.target or place.pointer.exists():
        return
    place.pointer.parent.mkdir(parents=True, exist_ok=True)
    place.pointer.unlink(missing_ok=True)  # a link to a file that was deleted
    with contextlib.suppress(FileExistsError):  # another process made it meanwhile
        place.pointer.symlink_to(os.path.relpath(place.target, place.pointer.parent))


def remember_branch(description: BaseDescription) -> None:
    """Write which commit a branch or tag is, so that huggingface_hub finds the base without a connection."""
    name = description.branch or DEFAULT_BRANCH
    if description.reference.kind != "hub" or description.folder is None or name == description.revision:
        return
    reference = description.folder.parent.parent / "refs" / name
    reference.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(reference, description.revision.encode())


def with_local_files(description: BaseDescription) -> BaseDescription:
    """Return the description with the local path of every file that is here now."""
    if description.folder is None:
        return description
    files = []
    for file in description.files:
        pointer = description.folder / file.path
        is_here = file.local is None and has_size(pointer, file.size)
        files.append(file._replace(local=pointer) if is_here else file)
    return dataclasses.replace(description, files=tuple(files))


def has_size(path: Path, size: int) -> bool:
    """Return True if a file with this size is at `path`."""
    try:
        return path.is_file() and path.stat().st_size == size
    except OSError:
        return False


def read_size(path: Path) -> int:
    """Return a file's size in bytes; 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def count_missing_bytes(description: BaseDescription) -> int:
    """Return the bytes that must still be transferred, without those that an interrupted download has left."""
    return sum(
        file.size - min(file.size, read_size(find_place(description, file).incomplete)) for file in description.missing
    )


def find_disk_problem(description: BaseDescription) -> str:
    """Return the problem of a download that has no room on its disk; "" if it has."""
    if description.folder is None:
        return ""
    missing, free = count_missing_bytes(description), disk_space.find_free(description.folder)
    if missing <= free:
        return ""
    return Message(
        "{folder}: the disk is too full for the download: {size} are still to be downloaded, and {free} are free. "
        "Free some space, or set {variable} to a folder on another disk",
        variable="HF_HOME" if description.reference.kind == "hub" else "XDG_CACHE_HOME",
        folder=description.folder,
        size=format_bytes(missing),
        free=format_bytes(free),
    )
