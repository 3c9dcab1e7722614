"""Bring the run folder of a job back. Every file is compared with its SHA-256 there before it counts.

The machine there is not trusted: only regular files with names that a run writes are taken, and only those that were
asked for. They arrive in a folder of their own beside the run folder, and are moved into it when all are there and
right. A file that was changed here since it was fetched is never replaced.
"""

import hashlib
import os
import shlex
import tarfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ... import config, settings
from ...common import system
from ...common.locks import try_lock
from ...common.numbers import format_bytes
from ...common.writing import atomic_write, make_folder, sync_folder, sync_folders
from ...errors import Message, RunFailure, UserError, cannot_write, first_few
from ...run import disk_space, ownership
from . import control
from . import handle as handles
from .handle import Handle
from .machine import NO_FOLDER, enter, require_success
from .package import CONFIG, hash_file

STAYS = ("lock", "status.json")
CHUNK = 1 << 20
MOST_DIGITS = 18
"""Most digits of a file's size that is believed."""


@dataclass
class Fetched:
    """What was brought back.

    Attributes:
        folder: the run folder here.
        files: number of files that arrived.
        size: their bytes.
        same: number of files that were here already.
        left: files there that the run did not write, which stay there.
        notes: what else to know.
    """

    folder: Path
    files: int = 0
    size: int = 0
    same: int = 0
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**self.__dict__, "folder": str(self.folder)}


@dataclass(frozen=True)
class Entry:
    """A file of the run there: its bytes and SHA-256."""

    size: int
    sha256: str


def fetch(job: Handle, progress: Callable[[int, int], None] | None = None) -> Fetched:
    """Bring the run folder of a job that has ended into its place here, which is new or was fetched before.

    Args:
        job: the job.
        progress: called with (bytes received, bytes in all).

    Raises:
        UserError: it runs; or the folder here is another's, or a file in it was changed here.
        RunFailure: something arrived that was not asked for, or with other bytes.
    """
    view = control.fetch_view(job)
    if not view.has_ended:
        raise UserError(Message("{name} has not ended yet: {line}", name=job.name, line=view.sentence))
    lock_file = handles.find_remote_home() / job.name / handles.FETCH_LOCK
    try:
        make_folder(lock_file.parent)
        with open(lock_file, "ab") as lock:
            if not try_lock(lock):
                raise UserError(Message("another command is already fetching {name}", name=job.name))
            return _fetch(handles.load(job.name), progress)
    except OSError as error:
        raise cannot_write(error.filename or lock_file, error) from None


def _fetch(job: Handle, progress: Callable[[int, int], None] | None) -> Fetched:
    """Fetch while no other command does; see `fetch`."""
    there, left = _list(job)
    result = Fetched(Path(job.output), left=left)
    wanted, same = _choose(job, result, there)
    result.files, result.size = len(wanted), sum(entry.size for entry in wanted.values())
    result.same = len(there) - len(wanted)
    make_folder(result.folder.parent)
    handles.remove_arrivals(job)
    _require_room(result.folder.parent, result.size)
    job.arrivals.mkdir()
    try:
        _receive(job, wanted, job.arrivals, progress)
        _place(job, result, wanted, same)
    finally:
        handles.remove_arrivals(job)
    return result


def _list(job: Handle) -> tuple[dict[str, Entry], list[str]]:
    """Return the files of the run there that are to come, and the names of those that stay.

    Raises:
        RunFailure: the answer is not a list of files.
    """
    find = r"find . -type f ! -path './control/*'"
    script = (
        f"{enter(job.folder)}\ncd -- {shlex.quote(job.run)} || exit {NO_FOLDER}\n"
        f"{find} -printf '%s %p\\0'; echo; {find} -print0 | xargs -0 -r sha256sum -z --"
    )
    answer = require_success(job.machine, job.machine.run(script))
    sizes_part, _, sums_part = answer.text.partition("\0\n") if "\0\n" in answer.text else ("", "", "")
    sizes, sums = _read_records(sizes_part, " "), _read_records(sums_part, "  ")
    entries: dict[str, Entry] = {}
    left: list[str] = []
    for path, size in sizes.items():
        if not size.isdecimal() or len(size) > MOST_DIGITS:
            raise RunFailure(Message("{host}: the list of the run's files cannot be read there", host=job.machine))
        if path not in sums:
            continue  # written or deleted between the two lists
        name = path.removeprefix("./")
        if not ownership.is_ours(name):
            left.append(name)
        elif name not in STAYS and not os.path.basename(name).endswith(".tmp"):
            entries[name] = Entry(int(size), sums[path])
    return dict(sorted(entries.items())), sorted(left)


def _read_records(text: str, separator: str) -> dict[str, str]:
    """Return name -> value of records "value, separator, name", each of which ends with a zero byte."""
    records = [record.partition(separator) for record in text.split("\0") if record]
    return {name: value for value, _, name in records}


def _choose(job: Handle, result: Fetched, there: dict[str, Entry]) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Return the files that are not here yet, and those whose bytes here are the same as there.

    Raises:
        UserError: the folder here is not that of this run, or somebody changed a file in it.
    """
    folder = result.folder
    if ownership.MARKER not in there:
        raise UserError(
            Message("{name}: there is no run folder on that machine yet; nothing was trained", name=job.name)
        )
    if _is_new(folder):
        return there, {}
    if folder.is_symlink() or hash_file(folder / ownership.MARKER) != there[ownership.MARKER].sha256:
        ownership.require_new(folder)  # says what is there
        raise UserError(
            Message(
                "{folder}: this is the folder of another run; move it away and fetch again. Nothing was written",
                folder=folder,
            )
        )
    ownership.require_ours(folder)
    wanted, same, changed = {}, {}, []
    for name, entry in there.items():
        if not os.path.lexists(folder / name):
            wanted[name] = entry
        elif job.fetched.get(f"there/{name}") == entry.sha256:
            continue  # it has not changed there; what somebody made of it here stays
        elif (here := hash_file(folder / name)) != entry.sha256:
            is_as_written = here in (job.fetched.get(name), job.fetched.get(f"coming/{name}"))
            if name == CONFIG and not is_as_written:
                continue
            wanted[name] = entry
            changed += [] if is_as_written else [name]
        else:
            same[name] = entry  # of a fetch that was killed before it had remembered this
    if changed:
        raise UserError(
            Message(
                "{folder}: {names} changed on both machines since the last fetch; move the folder away and fetch again",
                folder=folder,
                names=first_few(changed),
            )
        )
    return wanted, same


def _is_new(folder: Path) -> bool:
    """Return True if a folder is absent or empty."""
    return not os.path.lexists(folder) or (folder.is_dir() and not folder.is_symlink() and not os.listdir(folder))


def _require_room(parent: Path, size: int) -> None:
    if (free := disk_space.find_free(parent)) < size:
        raise UserError(
            Message(
                "{path}: the disk is too full for the run: {size} are to be fetched, and {free} are free",
                path=parent,
                size=format_bytes(size),
                free=format_bytes(free),
            )
        )


def _receive(
    job: Handle, wanted: dict[str, Entry], staging: Path, progress: Callable[[int, int], None] | None = None
) -> None:
    """Receive files into an empty folder and compare them.

    Raises:
        RunFailure: see `unpack`; or one is missing.
    """
    total = sum(entry.size for entry in wanted.values())
    script = (
        f"{enter(job.folder)}\ncd -- {shlex.quote(job.run)} || exit {NO_FOLDER}\n"
        'names=$(mktemp) && trap \'rm -f "$names"\' EXIT && cat > "$names" || exit 1\n'
        'tar -cf - --hard-dereference --no-recursion --null --verbatim-files-from -T "$names"'
    )

    def give(stream: IO[bytes]) -> None:
        stream.write(b"".join(f"{name}\0".encode() for name in wanted))

    arrived: set[str] = set()
    broken: list[str] = []

    def take(stream: IO[bytes]) -> None:
        try:
            unpack(stream, wanted, staging, arrived, (lambda done: progress(done, total)) if progress else None)
        except (tarfile.TarError, EOFError) as error:  # the reason may be a lost connection, which comes first
            broken.append(str(error))

    require_success(job.machine, job.machine.run(script, give=give, take=take))
    if broken or (missing := sorted(wanted.keys() - arrived)):
        why = broken[0] if broken else Message("missing: {names}", names=first_few(missing))
        raise RunFailure(Message("{host}: the run arrived incomplete ({why})", host=job.machine, why=why))


def unpack(
    stream: IO[bytes],
    wanted: dict[str, Entry],
    folder: Path,
    arrived: set[str],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Unpack a tar archive of another machine: regular files that were asked for, with the bytes that were promised.

    Args:
        stream: the archive.
        wanted: name -> what is expected of it. Every name is one that a run writes, so that it leads nowhere else.
        folder: an empty folder.
        arrived: gets the names of the files that are there and right.
        progress: called with the bytes received so far.

    Raises:
        RunFailure: anything else is in it.
        tarfile.TarError: it is no archive, or cut short.
    """
    done = 0
    with tarfile.open(fileobj=stream, mode="r|", encoding="utf-8") as archive:
        for entry in archive:
            name = entry.name
            if name not in wanted or name in arrived or not entry.isreg() or entry.issparse():
                kind = Message("a link or a special file") if not entry.isreg() else Message("a file")
                raise RunFailure(
                    Message(
                        "the other machine sent {kind} that was not requested ({name}); nothing was kept",
                        kind=kind,
                        name=repr(name),
                    )
                )
            if entry.size != wanted[name].size:
                raise RunFailure(_describe_mismatch(name))
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            source, digest = archive.extractfile(entry), hashlib.sha256()
            assert source is not None
            with open(folder / name, "xb") as file:
                while data := source.read(CHUNK):
                    file.write(data)
                    digest.update(data)
                    done += len(data)
                    if progress:
                        progress(done)
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != wanted[name].sha256:
                raise RunFailure(_describe_mismatch(name))
            arrived.add(name)


def _describe_mismatch(name: str) -> Message:
    return Message(
        "{name} arrived damaged: its bytes differ from those on the other machine. Nothing was kept; fetch again",
        name=name,
    )


def _place(job: Handle, result: Fetched, wanted: dict[str, Entry], same: dict[str, Entry]) -> None:
    """Give the config the paths of this machine, and move the files into the run folder.

    Args:
        job: the job, whose `arrivals` has the files.
        result: gets the notes.
        wanted, same: see `_choose`.
    """
    folder, staging = result.folder, job.arrivals
    written = {name: entry.sha256 for name, entry in wanted.items()}
    if CONFIG in wanted:
        result.notes += _localize(job, staging / CONFIG)
        written[CONFIG] = hash_file(staging / CONFIG)
    remembered = {name: digest for name, digest in job.fetched.items() if not name.startswith("coming/")}
    # If this is killed, some files will be new: they are not to be taken for changed ones by the next fetch.
    job = handles.update(job, fetched=remembered | {f"coming/{name}": digest for name, digest in written.items()})
    remembered |= {name: entry.sha256 for name, entry in same.items()} | written
    remembered |= {f"there/{name}": entry.sha256 for name, entry in (wanted | same).items()}
    if _is_new(folder):
        for name in ownership.FOLDERS:
            (staging / name).mkdir(exist_ok=True)
        sync_folders(staging)
        if os.path.lexists(folder):
            folder.rmdir()
        system.rename(staging, folder)
        sync_folder(folder.parent)
    else:
        _move(wanted, staging, folder)
    handles.update(job, fetched=remembered)


def _move(wanted: dict[str, Entry], staging: Path, folder: Path) -> None:
    """Move files into a run folder that is here already, while nobody can train in it."""
    with open(folder / "lock", "ab") as lock:
        if not try_lock(lock):
            raise UserError(Message("{folder}: the run is still training; stop it first", folder=folder))
        ownership.require_ours(folder)
        for name in wanted:
            make_folder((folder / name).parent)
            system.replace(staging / name, folder / name)
        for parent in {(place / name).parent for name in wanted for place in (folder, staging)}:
            sync_folder(parent)


def _localize(job: Handle, file: Path) -> list[str]:
    """Replace the paths in a run's config by those of this machine. Return a note if it cannot be read."""
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        output = Path(job.output)
        for named in settings.find_path_places(data):
            if isinstance(named.path, str) and named.path in job.places:
                named.table[named.name] = job.places[named.path]
        data |= {"name": output.name, "output_dir": str(output.parent)}
        atomic_write(file, config.dumps(settings.Job(**data)).encode())
    except (ValueError, TypeError, UserError) as error:
        return [Message("the config still has the paths of the other machine ({why})", why=str(error).splitlines()[0])]
    return []
