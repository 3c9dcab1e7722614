"""Pack a job for another machine: its config with the paths that it has there, and the files that go along.

The user's own config and files are only read. What a folder of images has beside them (captions, masks, the file of
their edits) goes along; hidden files do not, and a link is sent as the file that it leads to.
"""

import hashlib
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO, Any

from ... import config, settings
from ...common.reading import open_regular
from ...data.image_edits import FILE as EDITS
from ...data.image_files import walk
from ...errors import Message, UserError, cannot_read
from .. import make_paths_absolute
from .machine import MARKER

CONFIG, MANIFEST = "config.toml", "manifest.sha256"
DATA = "data"
TAKEN = {CONFIG, MARKER, MANIFEST, DATA, "job.sh", "task.yaml", "log.txt", "exit", "exit.new", "pid", "job.lock"}
TAKEN |= {"cancel", "started"}
"""Names in the job's folder there that no folder of the config can have."""
SMALL = 1 << 30
"""Bytes up to which a model goes along without being asked for."""
MODELS = ("model.path", "model.components", "model.files", "preview.score_model")


@dataclass(frozen=True)
class Options:
    """How a job is packed.

    Attributes:
        base: path of the base model there; "" keeps the config's.
        send_base: send the base model, however large.
    """

    base: str = ""
    send_base: bool = False


@dataclass(frozen=True)
class Package:
    """A job for another machine.

    Attributes:
        name: the job's name, and that of its folder there.
        run: its run folder there, relative to the job's folder.
        job: its config, in which what `places` names is relative to the job's folder there.
        files: name in the folder there -> file here.
        places: path in the job's folder there -> path here.
        needed: paths that have to exist there already.
        size: bytes of the files.
    """

    name: str
    run: str
    job: settings.Job
    files: dict[str, Path] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    needed: tuple[str, ...] = ()
    size: int = 0

    def render_config(self, folder: str = "") -> str:
        """Return the config for the job's folder there, as TOML; "" leaves its paths relative.

        Exported files hold the settings without the place of absolute paths, so that these leave their bytes alone.
        """
        data = self.job.model_dump()
        for named in settings.find_path_places(data):
            if folder and named.path in self.places:
                named.table[named.name] = f"{folder}/{named.path}"
        return config.dumps(settings.Job(**data))

    def list_places(self, folder: str = "") -> dict[str, str]:
        """Return path in the config there -> path here."""
        return {f"{folder}/{there}" if folder else there: here for there, here in self.places.items()}


def pack(job: settings.Job, options: Options = Options()) -> Package:  # frozen
    """Return the package of a job. Nothing is written.

    Args:
        job: with its config; relative paths start from the working directory.
        options: how the base model gets there.

    Raises:
        UserError: a file of the job cannot be read.
    """
    job = make_paths_absolute(job, Path.cwd())
    data = job.model_dump()
    written = _name_output_folders(job)
    files: dict[str, Path] = {}
    places: dict[str, str] = {}
    sent: dict[str, str] = {}
    needed = []
    for named in settings.find_path_places(data):
        here = named.path
        if named.setting in settings.WRITTEN:
            there = written[named.setting]
        elif named.setting == "model.path" and options.base:
            named.table[named.name] = options.base
            needed.append(options.base)
            continue
        elif not here or not _is_path(named.setting, here):
            continue
        elif named.setting in MODELS and not options.send_base and _measure(here, SMALL) > SMALL:
            needed.append(here)
            continue
        else:
            there = sent.get(here) or f"{DATA}/{len(sent) + 1}/{os.path.basename(here) or DATA}"
            if here not in sent:
                files |= {there + inner: path for inner, path in _list_files(here)}
            sent[here] = there
        named.table[named.name] = there
        places[there] = here
    size = sum(_read_status(path).st_size for path in files.values())
    run = f"{written['output_dir']}/{job.name}"
    return Package(job.name, run, settings.Job(**data), files, places, tuple(needed), size)


def _name_output_folders(job: settings.Job) -> dict[str, str]:
    """Return the names there of the folders that a training writes into: those that they have here.

    Exported files hold the settings with the last part of each path, and are to have the same bytes as here.
    """
    output = os.path.basename(job.output_dir) or "runs"
    output = f"{output}-" if output in TAKEN else output
    cache = os.path.basename(job.dataset.cache_dir) or "cache"
    while cache in TAKEN | {output}:
        cache += "-"
    return {"output_dir": output, "dataset.cache_dir": cache}


def _is_path(setting: str, value: str) -> bool:
    """Return True if a setting's value names a file or folder here, and is no word or Hugging Face id."""
    if setting in settings.WORDS:
        return value != settings.WORDS[setting] and os.path.exists(value)
    return setting != "dataset.folders.mask" or settings.is_mask_folder(value)


def _list_files(place: str) -> Iterator[tuple[str, Path]]:
    """Yield (name in the package after that of the place, file) of a file or of all files of a folder."""
    root = Path(place)
    try:
        if not root.is_dir():
            yield "", root
            return
        for folder, names in walk(root):
            names = [*names, *([EDITS] if (folder / EDITS).is_file() else [])]
            for name in names:
                if (folder / name).is_file():
                    yield f"/{(folder / name).relative_to(root).as_posix()}", folder / name
    except OSError as error:
        raise cannot_read(error.filename or place, error) from None


def _measure(place: str, most: int) -> int:
    """Return the bytes of a file or folder; no more are counted than exceed `most`."""
    size = 0
    for _, path in _list_files(place):
        size += _read_status(path).st_size
        if size > most:
            break
    return size


def _read_status(path: Path) -> os.stat_result:
    try:
        status = path.stat()
    except OSError as error:
        raise cannot_read(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(Message("{path}: this is not a regular file, so it cannot be sent", path=path))
    return status


# ---------------------------------------------------------------------------------------------------------------------
# Sending


class _Hashing:
    """A file that is hashed while it is read."""

    def __init__(self, file: IO[bytes]):
        self._file, self._hash = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        """Read, and hash what was read."""
        data = self._file.read(size)
        self._hash.update(data)
        return data

    @property
    def digest(self) -> str:
        """Return the SHA-256 of what was read so far."""
        return self._hash.hexdigest()


def write_archive(
    stream: IO[bytes],
    package: Package,
    texts: dict[str, str],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write a package as a tar archive, with the checksums of all its files as the last of them (`MANIFEST`).

    Args:
        stream: where it is written.
        package: the package.
        texts: name -> content of further files, the config among them.
        progress: called with (bytes written, bytes in all).

    Raises:
        UserError: a file cannot be read, or became shorter meanwhile.
    """
    lines, done = [], 0
    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, encoding="utf-8") as archive:
        for name, text in texts.items():
            lines.append(_add(archive, name, BytesIO(text.encode()), len(text.encode())))
        for name, path in package.files.items():
            size = _read_status(path).st_size
            try:
                with open_regular(path) as file:
                    lines.append(_add(archive, name, file, size))
            except BrokenPipeError:
                raise
            except OSError as error:
                raise cannot_read(path, error) from None
            done += size
            if progress:
                progress(done, package.size)
        text = "".join(lines)
        _add(
            archive,
            MANIFEST,
            BytesIO(text.encode(errors="surrogateescape")),
            len(text.encode(errors="surrogateescape")),
        )


def _add(archive: tarfile.TarFile, name: str, file: IO[bytes], size: int) -> str:
    """Add a file to an archive. Return its line for sha256sum."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    reader: Any = _Hashing(file)
    archive.addfile(entry, reader)
    escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if escaped == name else chr(92)}{reader.digest}  {escaped}\n"


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file; "" if it is no file."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
