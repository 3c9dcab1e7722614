"""A lock on an open file that ends with its holder: flock, or a locked byte on Windows.

The system releases it when the process exits, however it exits. The file's content, its holder's name, stays.
filelock's `lock_descriptor` does the work where there is no fcntl: the same exclusive lock, but none that is shared,
and on Windows the file's first byte cannot be read by others meanwhile.
"""

import contextlib
import errno
import os
import time
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]  # tested before each use

PROBES = 5
"""Attempts at a shared lock where there is none: another reader may hold the exclusive one for an instant."""


def try_lock(file: int | IO[Any], *, shared: bool = False) -> bool:
    """Lock a file if nobody else has locked it. Closing the file, or the end of the process, releases the lock.

    Args:
        file: an open file, or its descriptor.
        shared: allow others to hold a shared lock at the same time. Without fcntl, the lock is never shared, and a
            caller must close the file at once.

    Returns:
        True if the file is locked now.

    Raises:
        OSError: ENOLCK, the file system does not support locks.
    """
    try:
        return _try_lock(file, shared)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        path = () if isinstance(file, int) else (file.name,)
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), *path) from None


def _try_lock(file: int | IO[Any], shared: bool) -> bool:
    if fcntl is None:
        import filelock

        descriptor = file if isinstance(file, int) else file.fileno()
        for attempt in range(PROBES if shared else 1):
            if attempt:
                time.sleep(0.005)
            if filelock.lock_descriptor(descriptor, blocking=False):
                return True
        return False
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_holder(file: IO[str]) -> None:
    """Write this process's name into a file that it has locked."""
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()}")
    file.flush()


def read_holder(path: Path) -> int:
    """Return the id of the process that `write_holder` named; 0 if the file names none.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        file.seek(1)  # Windows refuses to read the first byte, which is the locked one
        name = file.read(100)
    with contextlib.suppress(ValueError):
        return int(name.rpartition(b" ")[2])
    return 0
