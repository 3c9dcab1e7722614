"""Open files that somebody else named or put there: only regular files, and no more bytes than a reader can use.

Opening a FIFO waits for a writer, forever if there is none, and `/dev/zero` never ends. Both are OSErrors here, so that
a caller that reports missing or forbidden files reports these too. This module imports little of ours.
"""

import errno
import os
import stat
from io import BufferedReader
from typing import IO

from ..errors import Message
from . import system

NOT_REGULAR = Message("this is not a regular file")

MIB = 1 << 20
MOST_TEXT = MIB
"""Maximum for a settings file, a caption or a prompt, in bytes: more than a person writes, and read in a moment."""


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading bytes.

    Raises:
        OSError: also if the path is a folder, a pipe, a socket or a device.
    """
    # Checked before opening, as opening a device may have effects, and again after it, as the file may be replaced.
    _refuse(os.stat(path).st_mode, path)
    descriptor = os.open(path, system.combine_flags("O_RDONLY", "O_NONBLOCK"))
    try:
        _refuse(os.fstat(descriptor).st_mode, path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Read a whole regular file.

    Args:
        most: maximum number of bytes; None for no limit.

    Raises:
        OSError: as for `open_regular`, or the file is larger than `most`.
    """
    with open_regular(path) as file:
        return read_rest(file, most)


def read_rest(file: IO[bytes], most: int | None = None) -> bytes:
    """Read an open file to its end.

    Raises:
        OSError: there are more than `most` bytes.
    """
    if most is None:
        return file.read()
    data = file.read(most + 1)
    if len(data) > most:
        raise OSError(
            errno.EFBIG, Message("the file is larger than {size} MiB", size=f"{most / MIB:g}"), str(file.name)
        )
    return data


def load_text(path: str | os.PathLike[str], most: int | None = MOST_TEXT, encoding: str = "utf-8-sig") -> str:
    """Read a text file, with every kind of line end converted to a line feed.

    Raises:
        OSError: as for `read_bytes`.
        UnicodeDecodeError: the bytes are in another encoding.
    """
    return read_bytes(path, most).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def _refuse(mode: int, path: str | os.PathLike[str]) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, NOT_REGULAR, os.fspath(path))
