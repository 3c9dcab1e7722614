"""What is remembered here of jobs on other machines: one JSON file a job, in the home folder of the queue.

$LORA_FP8_HOME/remote/NAME/handle.json      where the job is, and what was brought back
$LORA_FP8_HOME/remote/NAME/fetch.lock       locked while its run is fetched
$LORA_FP8_HOME/remote/NAME/job/             the folder that SkyPilot sends
"""

import hashlib
import os
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ...common.json_files import MOST_JSON, write_json
from ...common.reading import read_bytes
from ...common.shell import quote_path
from ...common.text import quote
from ...common.writing import make_folder
from ...errors import Message, UserError, cannot_write, needs_repair, reason
from .. import find_home
from .machine import Machine

FILE, VERSION = "handle.json", 1
FETCH_LOCK = "fetch.lock"
"""File beside the handle that is locked while the job's run is fetched."""


@dataclass(frozen=True)
class Handle:
    """A job on another machine.

    Attributes:
        name: the job's name, and that of its run.
        kind: "slurm", "ssh" or "sky".
        address: host for ssh; "" is this machine.
        folder: the job's folder there.
        run: the run folder, relative to it.
        output: the run folder here, into which it is fetched.
        slurm: number of the Slurm job; "" if it is none, or did not arrive. The one in the job's folder there counts.
        places: path in the config there -> path here.
        fetched: file of the run folder -> SHA-256 of what was written here; "there/FILE" -> of the file there then;
            "coming/FILE" -> of what a fetch was about to write.
        created: unix seconds.
        secrets: names of environment variables here that are passed on to the job; their values are nowhere.
    """

    name: str
    kind: str
    address: str
    folder: str
    run: str
    output: str
    slurm: str = ""
    places: dict[str, str] = field(default_factory=dict)
    fetched: dict[str, str] = field(default_factory=dict)
    created: float = 0
    secrets: tuple[str, ...] = ()

    @property
    def machine(self) -> Machine:
        """Return the machine that has the job's folder."""
        return Machine(self.address)

    @property
    def arrivals(self) -> Path:
        """Return the folder here, beside the run folder, in which a fetch collects files; a killed one leaves it."""
        # Not of the run's name, which may be as long as a name can be; of the job, so that the next fetch finds it.
        mark = hashlib.sha256(f"{self.where}\n{self.folder}\n{self.created:.6f}".encode()).hexdigest()[:32]
        return Path(self.output).parent / f".{mark}.fetch"

    @property
    def where(self) -> str:
        """Return the place, as people read it."""
        return f"{self.kind}:{self.address}" if self.address else self.kind


def find_remote_home() -> Path:
    """Return the folder with all handles; it may not exist yet."""
    return find_home() / "remote"


def save(handle: Handle) -> None:
    """Remember a job.

    Raises:
        UserError: the file cannot be written.
    """
    folder = find_remote_home() / handle.name
    try:
        make_folder(folder)
        write_json(folder / FILE, {"version": VERSION, **asdict(handle)})
    except OSError as error:
        raise cannot_write(folder / FILE, error) from None


def update(handle: Handle, **changes: Any) -> Handle:
    """Remember what has changed about a job, and return it."""
    changed = replace(handle, **changes)
    save(changed)
    return changed


def load(name: str) -> Handle:
    """Return a job by its name.

    Raises:
        UserError: there is none, or its file is damaged.
    """
    file = find_remote_home() / name / FILE
    names = [handle.name for handle in load_all()]
    if name not in names and not (name and name == os.path.basename(name) and os.path.lexists(file)):
        raise UserError(
            Message(
                "there is no job {name} on another machine; the jobs are: {names}",
                name=name,
                names=", ".join(names) or Message("none"),
            )
        )
    return _read(file)


def load_all() -> list[Handle]:
    """Return all jobs, the newest first. Damaged ones are left out."""
    handles = []
    for file in find_remote_home().glob(f"*/{FILE}"):
        try:
            handles.append(_read(file))
        except UserError:
            continue
    return sorted(handles, key=lambda handle: (-handle.created, handle.name))


def require_new(name: str) -> None:
    """Refuse the name of a job that is remembered already.

    Raises:
        UserError: there is such a job.
    """
    if os.path.lexists(find_remote_home() / name / FILE):
        raise UserError(
            Message(
                "another machine already has a job {name}; choose another name (--set name=...), or remove it from "
                "the list with `{command}`",
                name=name,
                command=f"lora-fp8 remote delete {quote_path(name)}",
            )
        )


def delete(handle: Handle) -> None:
    """Forget a job, and delete what was kept of it here. Its run folder here stays."""
    folder = find_remote_home() / handle.name
    remove_arrivals(handle)
    shutil.rmtree(folder / "job", ignore_errors=True)
    (folder / FILE).unlink(missing_ok=True)
    (folder / FETCH_LOCK).unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def remove_arrivals(handle: Handle) -> None:
    """Delete what a fetch that was killed has left."""
    if not handle.arrivals.is_symlink():
        shutil.rmtree(handle.arrivals, ignore_errors=True)


def _read(file: Path) -> Handle:
    try:
        handle = _ADAPTER.validate_json(read_bytes(file, MOST_JSON), strict=True)
    except OSError as error:
        raise needs_repair(file, reason(error)) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise needs_repair(file, f"{place}: {first['msg']}" if place else first["msg"]) from None
    if handle.name != file.parent.name:
        raise needs_repair(file, Message("it belongs to the job {name}", name=quote(handle.name)))
    return handle


_ADAPTER = TypeAdapter(Handle)
