"""Write files so that a crash or a power cut leaves the old content or the new, never a mixture."""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import system


def atomic_write(path: Path, data: bytes) -> None:
    """Write a whole file so that a reader, or a crash or power cut, finds the old content or the new, never a mixture.

    The bytes go to a temporary file in the same folder, written through Python's own file object (so that a full disk
    is an OSError with its number). That file is synced and renamed over the target, and the folder is synced so that
    the rename survives too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with write_synced(temporary) as file:
            file.write(data)
        system.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def write_synced(path: Path) -> Iterator[Any]:
    """Open a new binary file that is flushed and fsynced when the block ends; permissions follow the umask.

    Raises:
        OSError: if the system named no file (on a full disk), `filename` is the folder.
    """
    try:
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path.parent)
        raise


def make_folder(path: Path, mode: int = 0o777) -> None:
    """Create a folder and its missing parents, so that their names survive a power cut."""
    if not path.is_dir():
        make_folder(path.parent, mode)
        path.mkdir(mode, exist_ok=True)
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder durable.

    Raises:
        OSError: `filename` is the folder.
    """
    if not system.CAN_SYNC_FOLDERS:  # Windows cannot open a folder; NTFS logs renames itself
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Network and FUSE file systems that cannot sync a folder say so; PostgreSQL goes on there too (fd.c).
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP):
            error.filename = os.fspath(path)
            raise
    finally:
        os.close(descriptor)


def sync_folders(root: Path) -> None:
    """Make all names in a folder and in the folders below it durable."""
    for path, _, _ in os.walk(root):
        sync_folder(Path(path))


def sync_files(paths: list[Path]) -> None:
    """Make the contents of files durable. Call it after all are written, as a disk handles many at once."""
    for path in paths:
        # Windows flushes only what is open for writing.
        descriptor = os.open(path, system.combine_flags("O_RDWR" if system.WINDOWS else "O_RDONLY"))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
