"""Lists the entries of a cache folder with their last use, and deletes unused ones."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import Message, UserError

DAY = 86400
_ENTRY = re.compile(r"(latents|conds)/([0-9a-f]{2})/\2[0-9a-f]{62}\.safetensors")


@dataclass(frozen=True)
class Stored:
    """One entry on disk.

    Attributes:
        path: the file.
        bytes: its size.
        used: time of last use, in seconds since 1970.
    """

    path: Path
    bytes: int
    used: float


def list_entries(root: Path) -> list[Stored]:
    """Return all entries of a cache folder, least recently used first; other files in it are left out.

    Raises:
        UserError: the folder does not exist.
    """
    if not root.is_dir():
        raise UserError(
            Message("{key}: there is no such folder; give the cache folder (dataset.cache_dir) of your runs", key=root)
        )
    entries = []
    for path in root.glob("*/*/*.safetensors"):
        if _ENTRY.fullmatch(path.relative_to(root).as_posix()):
            with contextlib.suppress(FileNotFoundError):  # another prune may delete it now
                status = path.stat()
                entries.append(Stored(path, status.st_size, status.st_mtime))
    return sorted(entries, key=lambda entry: (entry.used, entry.path))


def shrink(root: Path, size: float) -> list[Stored]:
    """Delete the entries that were unused for longest until the others have at most this many bytes, and return them.

    None that was used in the last 24 hours is deleted, for the reason that `prune` gives, so more bytes may be left.

    Raises:
        UserError: the folder does not exist.
    """
    entries = list_entries(root)
    before, left = time.time() - DAY, sum(entry.bytes for entry in entries)
    deleted = []
    for entry in entries:
        if left <= size or entry.used >= before:
            break
        entry.path.unlink(missing_ok=True)
        deleted.append(entry)
        left -= entry.bytes
    return deleted


def prune(root: Path, days: float) -> list[Stored]:
    """Delete the entries that have not been used for this many days, and return them.

    This is safe while others use the cache: the entries that a run needs were used when it started, and are used again
    whenever they do not fit into its RAM. The next run encodes an entry again that was deleted too early.

    Raises:
        UserError: the folder does not exist, or `days` is less than 1, which a run that is training could notice.
    """
    if days < 1:
        raise UserError(
            Message("{days} days: a run that is training may be using the entries; give at least 1", days=f"{days:g}")
        )
    before = time.time() - days * DAY
    old = [entry for entry in list_entries(root) if entry.used < before]
    for entry in old:
        entry.path.unlink(missing_ok=True)
    return old
