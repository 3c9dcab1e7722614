"""Tell whether a file has changed since something was found out about it, without reading it."""

import time
from pathlib import Path

FileStamp = tuple[int, int, int, int]
"""Size, time of last write, time of last change of any kind, and inode of a file."""
SETTLED = 2.0
"""Seconds for which a file must be unchanged before what was found of it is kept: within one tick of the file system's
clock, another write would leave the same times."""


def read_stamp(path: Path) -> FileStamp:
    """Return values that change when the file does. No tool can set back its time of last change. Raises OSError."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def is_settled(stamp: FileStamp) -> bool:
    """Return True if the file of a stamp that was just made has been unchanged for `SETTLED` seconds."""
    return time.time() - max(stamp[1], stamp[2]) / 1e9 > SETTLED
