"""Submit a config to the queue, from the page or a program, after checking that every path is below an allowed folder.

A config names folders that a training reads and writes. On the command line these are the user's own business; from a
browser they are limited to the same folders as everything else (sanitize.py).
"""

import hashlib
import os

from lora_fp8 import config, jobs, settings
from lora_fp8.common.writing import atomic_write
from lora_fp8.errors import Message, UserError, UserErrors
from lora_fp8.families import sources

from . import sanitize
from .context import Place


def check_config(place: Place, text: str) -> settings.Job:
    """Load the job of a TOML text. Relative paths start at the page's home and become absolute.

    Raises:
        UserErrors: everything that `config.loads` finds wrong, or every path that is not allowed.
    """
    check_presets(place, text)
    job = config.loads(text, folder=place.home)
    data = job.model_dump()
    problems = []
    for named in settings.find_path_places(data):
        given = named.path
        if not given or (named.setting in settings.WORDS and _is_not_local(place, given)):
            continue
        if named.setting == "dataset.folders.mask" and not settings.is_mask_folder(given):
            continue
        try:
            named.table[named.name] = str(place.resolve(str(place.home / os.path.expanduser(given))))
        except UserError as error:
            problems.append(Message("{key}: {line}", key=named.key, line=str(error)))
    if problems:
        raise UserErrors(problems, "config")
    return settings.Job(**data)


def submit_training(place: Place, text: str, scheduling: jobs.Scheduling | None = None) -> int:
    """Queue a training, start a worker if there is none, and return the job's id.

    Raises:
        UserErrors: as `check_config`.
        UserError: the folder holds a run already, or the queue cannot be used.
    """
    job = check_config(place, text)
    source, scheduling = jobs.Source(folder=place.home), scheduling or jobs.Scheduling()
    id = jobs.Queue(place.home).submit(config.dumps(job), source=source, scheduling=scheduling)
    jobs.ensure_worker(place.home)
    return id


def submit_rate_test(place: Place, text: str) -> int:
    """Queue `lora-fp8 lr-find` for a config, start a worker if there is none, and return the job's id.

    Raises:
        UserErrors: as `check_config`.
        UserError: the queue cannot be used.
    """
    job = check_config(place, text)
    content = config.dumps(job).encode()
    file = place.home / "lr-find" / f"{hashlib.sha256(content).hexdigest()[:16]}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, content)
    name = f"lr-find {job.name}"
    id = jobs.Queue(place.home).submit_command("lr-find", ["--", str(file)], folder=place.home, name=name)
    jobs.ensure_worker(place.home)
    return id


def _is_not_local(place: Place, given: str) -> bool:
    """Return True if a base model or its components are bundled or on a hub, and no file of this machine."""
    try:
        reference = sources.parse(given)
    except UserError:
        return False
    is_word = reference.kind == "demo" or given == "auto"
    return is_word or (reference.is_remote and not (place.home / given).exists())


def check_presets(place: Place, text: str) -> None:
    """Check presets that are files before `config.loads` reads them.

    Raises:
        UserErrors: one is not below an allowed folder.
    """
    try:
        named = config.read_toml(text).get("preset", [])
    except ValueError:
        return  # `loads` reports it better
    for name in named if isinstance(named, list) else [named]:
        if isinstance(name, str) and name.endswith(".toml"):
            try:
                place.resolve(str(place.home / os.path.expanduser(name)))
            except UserError as error:
                raise UserErrors([Message("{key}: {line}", key="preset", line=str(error))], "config") from None
        elif isinstance(name, str) and ("/" in name or "\\" in name):
            line = Message("there is no preset {name}", name=repr(sanitize.shorten(name)))
            raise UserErrors([Message("{key}: {line}", key="preset", line=line)], "config")
