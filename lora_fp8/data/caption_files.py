"""Write caption files safely: many change as one, and an acknowledged change survives a crash or a power cut.

    swap = Swap({path: (bytes now, bytes wanted), ...})
    swap.stage(); swap.place()          on an error: swap.take_back(); always at the end: swap.discard()

All new files are first written and synced under temporary names, so that a full disk is noticed before anything has
changed. The old bytes are kept under temporary names too: reverting only renames files, and needs no free disk space.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ..common import system
from ..common.reading import NOT_REGULAR
from ..common.writing import sync_files, sync_folder
from ..errors import Message, UserError
from . import caption_text, image_edits

PROGRESS_EVERY = 50
TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d{1,10})(\.old)?\.tmp", re.DOTALL)
"""Names of our temporary files: `.a.txt.4711.tmp` has the new bytes of a.txt, `.a.txt.4711.old.tmp` the old ones."""

_staged: set[Path] = set()
"""Temporary files that threads of this process are using."""


def find_target(folder: Path, name: str) -> Path:
    """Return the path to read and write for a relative name. Links are followed inside the folder.

    The name is not trusted, as a journal may come with a dataset.

    Raises:
        UserError: the name is not that of a caption inside the folder, nor of the folder's image edits.
    """
    root = os.path.realpath(os.path.expanduser(folder))
    real = Path(os.path.realpath(os.path.join(root, name)))
    if name == image_edits.FILE and real == Path(root, name):
        return real
    if (
        os.path.splitext(name)[1].lower() not in caption_text.CAPTIONS
        or real.suffix.lower() not in caption_text.CAPTIONS
    ):
        raise UserError(Message("this is not the name of a caption file"))
    if not real.is_relative_to(root):
        raise UserError(Message("this link leads out of the folder; edit the file that it points to"))
    return real


def read_bytes(path: Path) -> bytes | None:
    """Read a regular file; return None if it does not exist.

    Raises:
        OSError: it cannot be read.
        UserError: it is not a regular file, such as a pipe, on which a reader would wait forever.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for its writer.
        descriptor = os.open(path, system.combine_flags("O_RDONLY", "O_NONBLOCK"))
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise UserError(NOT_REGULAR)
        return file.read()


class Swap:
    """New contents for many files: either all of them get theirs, or none does.

    Args:
        files: for each file its bytes now and the bytes wanted; None stands for no file.
    """

    def __init__(self, files: Mapping[Path, tuple[bytes | None, bytes | None]]):
        self.files = files
        self.folders = sorted({path.parent for path in files})
        self.changing = {path: sides for path, sides in files.items() if sides[0] != sides[1]}
        self.placed: list[Path] = []
        self.done = False
        """All files have their new bytes, durably."""

    def stage(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Write old and new bytes under temporary names, durably. No caption changes.

        Args:
            progress: called now and then with the number of staged files and the number of all.

        Raises:
            OSError: the disk is full, or writing is not permitted.
        """
        _staged.update(path for path_of in self.changing for path in (_make_new_path(path_of), _make_old_path(path_of)))
        for count, (path, sides) in enumerate(self.changing.items(), start=1):
            mode = stat.S_IMODE(os.stat(path).st_mode) if sides[0] is not None else None
            for temporary, raw in zip((_make_old_path(path), _make_new_path(path)), sides, strict=True):
                if raw is not None:
                    _write(temporary, raw, mode)
            if progress and count % PROGRESS_EVERY == 0:
                progress(count, len(self.changing))
        # The old bytes are not synced: only this process needs them. After a crash the journal has them.
        sync_files([_make_new_path(path) for path, sides in self.changing.items() if sides[1] is not None])

    def place(self) -> None:
        """Give the files their new bytes, durably.

        Raises:
            OSError: a rename failed, and `take_back` must be called.
        """
        for path, (_, raw) in self.changing.items():
            self.placed.append(path)  # before the rename: an interruption may come right after it
            if raw is None:
                path.unlink(missing_ok=True)
            else:
                system.replace(_make_new_path(path), path)
        for folder in self.folders:
            sync_folder(folder)
        self.done = True

    def take_back(self) -> int:
        """Restore the old bytes of the files that were placed. Return how many may still have the new ones."""
        stuck, placed = 0, len(self.placed)
        while self.placed:
            path = self.placed.pop()
            try:
                if self.changing[path][0] is None:
                    path.unlink(missing_ok=True)
                else:
                    sync_files([_make_old_path(path)])
                    system.replace(_make_old_path(path), path)
            except OSError:
                stuck += not self._has_old(path)
        try:
            for folder in self.folders if placed else ():
                sync_folder(folder)
        except OSError:
            return placed
        return stuck

    def _has_old(self, path: Path) -> bool:
        try:
            return read_bytes(path) == self.changing[path][0]
        except (OSError, UserError):
            return False

    def discard(self) -> None:
        """Delete the temporary files; `sweep` deletes those that cannot be deleted now."""
        for path in self.changing:
            for temporary in (_make_new_path(path), _make_old_path(path)):
                with contextlib.suppress(OSError):
                    temporary.unlink(missing_ok=True)
        self.forget()

    def forget(self) -> None:
        """Release the temporary files, so that `sweep` may delete them."""
        _staged.difference_update(
            path for path_of in self.changing for path in (_make_new_path(path_of), _make_old_path(path_of))
        )


def _make_new_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _make_old_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.old.tmp")


def _write(path: Path, raw: bytes, mode: int | None) -> None:
    path.unlink(missing_ok=True)  # left by an earlier process that had this process id
    # O_EXCL does not follow a link of this name, which may come with a dataset.
    descriptor = os.open(path, system.combine_flags("O_WRONLY", "O_CREAT", "O_EXCL"), 0o666)
    try:
        write_all(descriptor, raw)
        if mode is not None and hasattr(os, "fchmod"):
            os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, raw: bytes) -> None:
    """Write all bytes, as one call to os.write may write only some of them."""
    left = memoryview(raw)
    while left:
        left = left[os.write(descriptor, left) :]


def find_leftovers(folder: Path, names: tuple[str, ...] = ()) -> list[Path]:
    """Find temporary files of killed edits: regular files named by our pattern whose process has exited.

    Args:
        folder: searched with its subfolders; links are not followed.
        names: names of other files, besides captions, whose temporary files count.
    """
    return sorted(path for path in _find_temporaries(folder, names) if path not in _staged)


def _find_temporaries(folder: Path, names: tuple[str, ...]) -> Iterator[Path]:
    for here, _, file_names in os.walk(os.path.realpath(os.path.expanduser(folder))):
        for name in file_names:
            match = TEMPORARY.fullmatch(name)
            if match is None or not _is_ours(match["name"], names) or _is_alive(int(match["pid"])):
                continue
            path = Path(here, name)
            with contextlib.suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode):
                    yield path


def _is_ours(name: str, names: tuple[str, ...]) -> bool:
    return os.path.splitext(name)[1].lower() in caption_text.CAPTIONS or name in names


def _is_alive(pid: int) -> bool:
    """Return True if another process has this id: it may be editing a folder that contains this one, or lies in it."""
    return pid != os.getpid() and system.process_exists(pid)


def sweep(leftovers: list[Path]) -> list[Path]:
    """Delete the files that `find_leftovers` found. Return those that were deleted."""
    swept = []
    for path in leftovers:
        with contextlib.suppress(OSError):
            path.unlink()
            swept.append(path)
    return swept
