"""Compare what a job will write with the free disk space, before hours go into making it.

Standard library only: the web page uses this module too. What a job writes is estimated in `plan.disk_budget`.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..common.numbers import format_bytes
from ..errors import Joined, Message, Template, combine, reason

NOT_WRITABLE = Template("{path}: the folder cannot be written ({why}); name another folder")


@dataclass(frozen=True)
class Need:
    """Disk space that a job needs in a folder.

    Attributes:
        folder: may not exist yet; the nearest existing folder above it then decides which disk it is on.
        what: for people, a message such as "checkpoints".
        sure: bytes needed at least.
        likely: bytes needed at most, if that cannot be known beforehand; not below `sure`.
    """

    folder: Path
    what: str
    sure: int
    likely: int

    def to_json(self) -> dict[str, Any]:
        """Return the need as plain JSON types, with an absolute folder."""
        return asdict(self) | {"folder": os.path.abspath(self.folder)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Need":
        """Create a need from what `to_json` returned."""
        return cls(**fields | {"folder": Path(fields["folder"])})


def find_shortages(needs: Iterable[Need]) -> tuple[list[str], list[str]]:
    """Return what does not fit, one line per disk: problems if not even `sure` fits, warnings if `likely` does not.

    Folders on one filesystem share its free space. Quotas are not taken into account.
    """
    disks: dict[int, list[Need]] = {}
    for need in needs:
        disks.setdefault(_get_device(_find_nearest(need.folder, os.path.exists)), []).append(need)
    problems: list[str] = []
    warnings: list[str] = []
    for on_disk in disks.values():
        place = ", ".join(dict.fromkeys(str(need.folder) for need in on_disk))
        room = find_free(on_disk[0].folder)
        free = format_bytes(room)
        for size_of in (lambda need: need.sure, lambda need: need.likely):
            sizes: dict[str, int] = {}
            for need in on_disk:  # processes that fill one cache have a share each
                sizes[need.what] = sizes.get(need.what, 0) + size_of(need)
            if sum(sizes.values()) <= room:
                continue
            parts = Joined(
                "; ",
                [
                    Message("{size} of {what}", size=format_bytes(size), what=what)
                    for what, size in sizes.items()
                    if size
                ],
            )
            total = format_bytes(sum(sizes.values()))
            if sum(need.sure for need in on_disk) <= room:
                warnings.append(
                    Message(
                        "{key}: the disk may become full: this job writes up to {total} ({lines}), but {free} are free",
                        key=place,
                        total=total,
                        lines=parts,
                        free=free,
                    )
                )
                continue
            problems.append(
                Message(
                    "{key}: the disk is too full for this job, which writes {total} ({lines}), but {free} are free; "
                    "free some space, name another output_dir or dataset.cache_dir, or keep fewer checkpoints "
                    "(checkpoint.keep)",
                    key=place,
                    total=total,
                    lines=parts,
                    free=free,
                )
            )
            break
    return problems, warnings


def require_space(needs: Iterable[Need]) -> list[str]:
    """Return the warnings of `find_shortages`.

    Raises:
        UserError: a disk has no room for what is sure to be written.
    """
    problems, warnings = find_shortages(needs)
    if problems:
        raise combine(problems)
    return warnings


def find_free(folder: Path) -> int:
    """Return the free bytes on the disk of a folder, which may not exist yet."""
    return shutil.disk_usage(_find_nearest(folder, os.path.exists)).free


def find_write_obstacle(folder: Path) -> str | None:
    """Return why nothing can be written into a folder, in the system's words; None if it can. Leaves nothing behind.

    If the folder does not exist yet, the existing folder that it will be created in is checked.
    """
    there = _find_nearest(folder, os.path.lexists)  # a dangling link is an obstacle too
    try:
        tempfile.TemporaryFile(dir=there).close()  # an unnamed file, if the system has them
    except OSError as error:
        why = reason(error) or type(error).__name__
        return why if there == Path(os.path.abspath(folder)) else Message("{path}: {why}", path=there, why=why)
    return None


def _get_device(path: Path) -> int:
    return os.stat(path).st_dev


def _find_nearest(folder: Path, is_there: Callable[[Path], bool]) -> Path:
    """Return the folder itself, or the nearest one above it that is there."""
    folder = Path(os.path.abspath(folder))
    return next(path for path in (folder, *folder.parents) if is_there(path))
