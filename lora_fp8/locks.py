"""A lock on an open file that ends with whoever holds it: flock, and on Windows, where nobody has tried it, a byte."""

import os
from typing import IO, Any

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]
    import msvcrt

FAR = 1 << 40  # Windows keeps others from reading what is locked, so that it is a byte behind all content


def try_lock(file: int | IO[Any], *, shared: bool = False) -> bool:
    """Lock it if nobody else has it; closing it, or the end of the process, gives it back. -> whether it is locked now

    Args:
        file: an open file, or its descriptor.
        shared: others may have it shared, too. Windows' byte is never shared.

    Raises:
        OSError: this file system has no locks.
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
