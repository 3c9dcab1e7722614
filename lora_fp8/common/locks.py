"""A lock on an open file that ends with its holder: flock, or one locked byte on Windows, which has not been tested."""

import os
from typing import IO, Any

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]  # tested before each use
    import msvcrt

FAR = 1 << 40  # beyond the end of the file, as Windows keeps others from reading the locked byte


def try_lock(file: int | IO[Any], *, shared: bool = False) -> bool:
    """Lock a file if nobody else has locked it. Closing the file, or the end of the process, releases the lock.

    Args:
        file: an open file, or its descriptor.
        shared: allow others to hold a shared lock at the same time. On Windows the lock is never shared.

    Returns:
        True if the file is locked now.

    Raises:
        OSError: the file system does not support locks.
    """
    if fcntl is None:
        descriptor = file if isinstance(file, int) else file.fileno()
        before = os.lseek(descriptor, 0, os.SEEK_CUR)
        os.lseek(descriptor, FAR, os.SEEK_SET)
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            return True
        except PermissionError:
            return False
        finally:
            os.lseek(descriptor, before, os.SEEK_SET)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
