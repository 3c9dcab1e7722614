"""Submit a config to the queue, from the page or a program, after checking that every path is below an allowed folder.

A config names folders that a training reads and writes. On the command line these are the user's own business; from a
browser they are limited to the same folders as everything else (sanitize.py).
"""

import os
from collections.abc import Iterator
from typing import Any

from lora_fp8 import config, jobs, settings
from lora_fp8.errors import Message, UserError, UserErrors
from lora_fp8.families import sources

from . import sanitize
from .context import Place

PATHS = (
    *("output_dir", "model.path", "model.components", "model.files", "dataset.cache_dir", "adapter.init_from"),
    "model.training_adapter",
    *("dataset.folders.path", "dataset.folders.control", "dataset.folders.mask", "preview.controls"),
)
"""Settings that name a file or folder. tests/test_page_submit.py finds those that are missing here."""


def check_config(place: Place, text: str) -> settings.Job:
    """Load the job of a TOML text. Relative paths start at the page's home and become absolute.

    Raises:
        UserErrors: everything that `config.loads` finds wrong, or every path that is not allowed.
    """
    check_presets(place, text)
    job = config.loads(text, folder=place.home)
    data = job.model_dump()
    problems = []
    for key, table, name in _list_paths(data):
        given = table[name]
        if not given or (key in ("model.path", "model.components") and _is_not_local(place, given)):
            continue
        if name == "mask" and not settings.names_a_folder_of_masks(given):
            continue
        try:
            table[name] = str(place.resolve(str(place.home / os.path.expanduser(given))))
        except UserError as error:
            problems.append(Message("{key}: {line}", key=key, line=str(error)))
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


def _list_paths(data: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key for people, table or list, name or index in it) of each path in a job."""
    for path in PATHS:
        *parts, name = path.split(".")
        tables: list[tuple[str, Any]] = [("", data)]
        for part in parts:
            inner = [(f"{key}{part}.", table[part]) for key, table in tables]
            tables = [
                entry
                for key, value in inner
                for entry in (
                    [(f"{key}{i}.", item) for i, item in enumerate(value)]
                    if isinstance(value, list)
                    else [(key, value)]
                )
            ]
        for key, table in tables:
            if isinstance(table[name], list):
                yield from ((f"{key}{name}.{i}", table[name], i) for i in range(len(table[name])))
            elif isinstance(table[name], dict):
                yield from ((f"{key}{name}.{part}", table[name], part) for part in list(table[name]))
            else:
                yield f"{key}{name}", table, name


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
            line = Message("no preset {name}", name=repr(sanitize.shorten(name)))
            raise UserErrors([Message("{key}: {line}", key="preset", line=line)], "config")
