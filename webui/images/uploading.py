"""Take uploaded images, videos and captions, one file at a time, and archives of them.

Every file is checked before it is kept: its name, its kind, and by a child process with limits that it can be decoded.
An archive is unpacked by a task, file by file, within limits that count what is really unpacked.
"""

import contextlib
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from lora_fp8.errors import Message, UserError, cannot_write

from .. import image_folders, sanitize
from ..context import Ui
from . import tasks

MOST_FILE = 256 * 2**20
"""Largest image, video or caption, in bytes; also inside an archive."""
MOST_ARCHIVE = 2 * 2**30
"""Largest archive, in bytes."""
MOST_UNPACKED = 8 * 2**30
"""Largest total of an archive's files, in bytes."""
SPARE = 2**30
"""Disk space that an archive leaves free, in bytes."""
ARCHIVES = (".zip",)
IGNORED = ("__MACOSX", "Thumbs.db", "desktop.ini")
"""Files that systems add to folders, which nobody means to upload; beside all hidden ones."""
UTF8 = 0x800
ENCRYPTED = 0x1
PIECE = 2**20


def find_target(ui: Ui, folder: str, name: str) -> Path:
    """Return the folder that an upload goes to: an allowed one, or the page's dataset of a name.

    Raises:
        UserError: the folder is not allowed, or the name is none.
    """
    if folder:
        path = ui.resolve_path(folder)
        sanitize.require_folder(path, folder)
        return path
    return ui.place.home / "datasets" / sanitize.check_name(name)


async def receive(pieces: AsyncIterator[bytes], name: str) -> Path:
    """Write an upload into a folder of its own, which the caller deletes. Returns the file.

    Raises:
        UserError: the name is no file name, or the upload is too large.
    """
    own = sanitize.check_name(name.rsplit("/", 1)[-1], sanitize.LONGEST_IMAGE_NAME)
    most = MOST_ARCHIVE if is_archive(own) else MOST_FILE
    folder = Path(tempfile.mkdtemp(prefix="images-"))
    size = 0
    try:
        with open(folder / own, "wb") as file:
            async for piece in pieces:
                size += len(piece)
                if size > most:
                    raise UserError(_make_size_message(own, most))
                file.write(piece)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder / own


def discard(file: Path) -> None:
    """Delete an upload and its folder."""
    shutil.rmtree(file.parent, ignore_errors=True)


def is_archive(name: str) -> bool:
    """Return True for the name of an archive."""
    return Path(name).suffix.lower() in ARCHIVES


def start_unpacking(ui: Ui, file: Path, folder: Path) -> tasks.Task:
    """Start to unpack an uploaded archive into a folder; the upload is deleted at the end.

    Raises:
        UserError: it is no archive, it has too much in it, or another task is at work on the folder.
    """
    with contextlib.ExitStack() as undone:
        undone.callback(discard, file)
        entries = _list_entries(file)

        def work(task: tasks.Task, progress: tasks.Progress) -> None:
            try:
                _unpack(ui, file, folder, task, progress)
            finally:
                discard(file)

        task = tasks.start(folder, work, ui.language)
        task.total = len(entries)
        undone.pop_all()
    return task


def _list_entries(file: Path) -> list[tuple[zipfile.ZipInfo, str]]:
    """List the files of an archive, with their names. Raises UserError if it is not one, or has too much in it."""
    name = file.name
    try:
        with zipfile.ZipFile(file) as archive:
            entries = [(entry, _read_name(entry)) for entry in archive.infolist() if not entry.is_dir()]
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile) as error:
        raise UserError(Message("{name}: this is not a readable zip archive ({why})", name=name, why=error)) from None
    entries = [(entry, path) for entry, path in entries if not is_ignored(path) and not path.endswith("/")]
    if len(entries) > image_folders.MOST_UPLOADED:
        raise UserError(
            Message(
                "{name}: the archive has {count} files; the limit is {most}",
                name=name,
                count=len(entries),
                most=image_folders.MOST_UPLOADED,
            )
        )
    room = max(0, shutil.disk_usage(file.parent).free - SPARE)
    total = sum(entry.file_size for entry, _ in entries)
    if total > min(room, MOST_UNPACKED):
        raise UserError(_make_size_message(name, min(room, MOST_UNPACKED)))
    return entries


def _read_name(entry: zipfile.ZipInfo) -> str:
    """Return the name of an entry, with / between folders, for which PowerShell writes a backslash."""
    return (entry.filename if entry.flag_bits & UTF8 else _decode_name(entry.filename)).replace("\\", "/")


def _decode_name(name: str) -> str:
    """Return a name that claims to be in CP437, in which archives made on Chinese Windows have names in GB 18030."""
    with contextlib.suppress(UnicodeEncodeError):
        raw = name.encode("cp437")
        for encoding in ("utf-8", "gb18030"):
            with contextlib.suppress(UnicodeDecodeError):
                return raw.decode(encoding)
    return name


def is_ignored(path: str) -> bool:
    """Return True for files that systems add to folders, and for hidden ones."""
    return any(part in IGNORED or (part.startswith(".") and part.strip(".")) for part in path.split("/"))


def _unpack(ui: Ui, file: Path, folder: Path, task: tasks.Task, progress: tasks.Progress) -> None:
    entries = _list_entries(file)
    common = _find_common_folder([path for _, path in entries])
    added, left = Counter[str](), MOST_UNPACKED
    with zipfile.ZipFile(file) as archive:
        for number, (entry, path) in enumerate(entries, 1):
            name = path.removeprefix(common)
            try:
                with _extract(archive, entry, name, left) as unpacked:
                    left -= unpacked.stat().st_size
                    added[image_folders.add_file(unpacked, folder, name)] += 1
            except UserError as error:
                task.refused.append(ui.translate(str(error)))
            except OSError as error:
                raise cannot_write(folder, error) from None
            progress(number, len(entries))
    task.lines.append(ui.say("images.upload.taken", count=added["taken"], folder=folder.name))
    task.lines += [ui.say(f"images.upload.{kind}", count=added[kind]) for kind in ("captions", "there") if added[kind]]


def _find_common_folder(paths: list[str]) -> str:
    """Return the folder that everything in an archive lies in, with a "/" behind; "" if there is none."""
    first = {path.partition("/")[0] for path in paths}
    return f"{first.pop()}/" if len(first) == 1 and all("/" in path for path in paths) else ""


@contextlib.contextmanager
def _extract(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str, left: int) -> Iterator[Path]:
    """Unpack a file of an archive for as long as this lasts.

    Raises:
        UserError: it is a link, encrypted, damaged or too large, or its name is none.
    """
    own = sanitize.check_name(name.rsplit("/", 1)[-1], sanitize.LONGEST_IMAGE_NAME)
    if entry.flag_bits & ENCRYPTED:
        raise UserError(Message("{name}: the file is encrypted; make an archive without a password", name=own))
    if stat.S_ISLNK(entry.external_attr >> 16):
        raise UserError(Message("{name}: this is a link; put the file itself into the archive", name=own))
    with tempfile.TemporaryDirectory(prefix="images-") as folder:
        target = Path(folder) / own
        try:
            with archive.open(entry) as packed, open(target, "wb") as unpacked:
                _copy_limited(packed, unpacked, min(MOST_FILE, left), own)  # type: ignore[arg-type]
        except (ValueError, NotImplementedError, zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise UserError(
                Message("{name}: the file is damaged in the archive ({why})", name=own, why=error)
            ) from None
        yield target


def _copy_limited(source: BinaryIO, target: BinaryIO, most: int, name: str) -> None:
    """Copy at most `most` bytes. What the archive says of a file's size is not trusted."""
    size = 0
    while piece := source.read(PIECE):
        size += len(piece)
        if size > most:
            raise UserError(_make_size_message(name, most))
        target.write(piece)


def _make_size_message(name: str, most: int) -> Message:
    return Message(
        "{name}: the file is too large; the limit is {size} MiB", name=sanitize.shorten(name), size=most // 2**20
    )
