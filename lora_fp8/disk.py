"""Room on the disks: what will be written where, held against what is free, before hours go into making it.

Standard library only (layer 0): the web page asks as well. What a job writes is reckoned in `writes`.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .config import UserError, UserErrors


@dataclass(frozen=True)
class Need:
    """What comes into a folder.

    Attributes:
        folder: need not exist yet; then its disk is that of the nearest one above it that does.
        what: for people, such as "checkpoints".
        sure: bytes that it takes at least.
        likely: bytes that it may take, where that cannot be known before; not below `sure`.
    """

    folder: Path
    what: str
    sure: int
    likely: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"folder": os.path.abspath(self.folder)}

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> "Need":
        return cls(**told | {"folder": Path(told["folder"])})


def shortages(needs: Iterable[Need]) -> tuple[list[str], list[str]]:
    """What does not fit, a line for each disk: where not even what is sure does, and where what is likely does not.

    Folders on one filesystem share its room. What a quota leaves to a user is not seen here.
    """
    disks: dict[int, list[Need]] = {}
    for need in needs:
        disks.setdefault(_device(_nearest(need.folder, os.path.exists)), []).append(need)
    problems, warnings = [], []
    for found in disks.values():
        place = ", ".join(dict.fromkeys(str(need.folder) for need in found))
        room = shutil.disk_usage(_nearest(found[0].folder, os.path.exists)).free
        free = amount(room)
        for size_of in (lambda need: need.sure, lambda need: need.likely):
            sizes: dict[str, int] = {}
            for need in found:  # processes that fill one cache have a share each
                sizes[need.what] = sizes.get(need.what, 0) + size_of(need)
            if sum(sizes.values()) <= room:
                continue
            parts = "; ".join(f"{amount(size)} of {what}" for what, size in sizes.items() if size)
            total = amount(sum(sizes.values()))
            if sum(need.sure for need in found) <= room:
                warnings.append(
                    f"{place}: the disk may become full: this job writes up to {total} ({parts}), and {free} are free"
                )
                continue
            problems.append(
                f"{place}: the disk has no room for this job: it writes {total} ({parts}), and {free} are free; free "
                "some, name another output_dir or dataset.cache_dir, or keep fewer checkpoints (checkpoint.keep)"
            )
            break
    return problems, warnings


def require(needs: Iterable[Need]) -> list[str]:
    """The warnings of `shortages`.

    Raises:
        UserErrors: a disk has no room for what is sure.
    """
    problems, warnings = shortages(needs)
    if problems:
        raise UserErrors(problems) if len(problems) > 1 else UserError(problems[0])
    return warnings


def amount(num: int) -> str:
    """Bytes for people."""
    return f"{num / 2**30:.2f} GiB" if num >= 2**30 else f"{num / 2**20:.1f} MiB"


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written there, in the system's words; None where it can. Leaves nothing behind.

    A folder that is not there yet is made when it is needed: asked is the one that it will be made in.
    """
    there = _nearest(folder, os.path.lexists)  # a link that leads nowhere is in the way
    try:
        tempfile.TemporaryFile(dir=there).close()  # without a name, where the system has that
    except OSError as error:
        why = error.strerror or type(error).__name__
        return why if there == Path(os.path.abspath(folder)) else f"{there}: {why}"
    return None


def _device(path: Path) -> int:
    return os.stat(path).st_dev


def _nearest(folder: Path, is_there: Callable[[Path], bool]) -> Path:
    """The folder itself, or the first above it that is there."""
    folder = Path(os.path.abspath(folder))
    return next(path for path in (folder, *folder.parents) if is_there(path))
