"""The one way from the page, or from a program, into the queue: a config whose every path lies below the roots.

A config names folders that a training reads and writes. On the command line they are the person's own business; from a
browser they are held to the same roots as everything else (safe.py).
"""

import os
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from lora_fp8 import config, jobs
from lora_fp8.config import UserError, UserErrors

from . import safe
from .context import Place

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
PATHS = (
    *("output_dir", "model.path", "model.components", "dataset.cache_dir", "adapter.init_from"),
    *("dataset.folders.path", "dataset.folders.control", "dataset.folders.mask", "preview.controls"),
)
"""Settings that name a file or folder; tests/test_page_submit.py finds those that are missing here."""


def checked(place: Place, text: str) -> config.Job:
    """The job of a TOML text, whose relative paths are below the page's home and become absolute.

    Raises:
        UserErrors: everything that is wrong with it, as `config.loads` tells it; or every path that lies outside.
    """
    check_presets(place, text)
    job = config.loads(text, folder=place.home)
    data = job.model_dump()
    problems = []
    for key, table, name in _paths(data):
        given = table[name]
        if not given or (key == "model.path" and _no_path(place, given)):
            continue
        if name == "mask" and not config.names_a_folder_of_masks(given):
            continue
        try:
            table[name] = str(place.inside(str(place.home / os.path.expanduser(given))))
        except UserError as error:
            problems.append(f"{key}: {error}")
    if problems:
        raise UserErrors(problems, "config")
    return config.Job(**data)


def train(place: Place, text: str, **options: Any) -> int:
    """Queue a training and see that a worker lives; the job's id. `options` as of `jobs.Queue.submit`.

    Raises:
        UserErrors: as `checked`.
        UserError: the folder has a run already, or the queue cannot be used.
    """
    job = checked(place, text)
    id = jobs.Queue(place.home).submit(config.dumps(job), folder=place.home, **options)
    jobs.ensure_worker(place.home)
    return id


def _paths(data: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(key for people, table or list, name or place in it) of each path in a job."""
    for path in PATHS:
        *parts, name = path.split(".")
        tables: list[tuple[str, Any]] = [("", data)]
        for part in parts:
            inner = [(f"{key}{part}.", table[part]) for key, table in tables]
            tables = [
                entry
                for key, value in inner
                for entry in (
                    [(f"{key}{i}.", one) for i, one in enumerate(value)] if isinstance(value, list) else [(key, value)]
                )
            ]
        for key, table in tables:
            if isinstance(table[name], list):
                yield from ((f"{key}{name}.{i}", table[name], i) for i in range(len(table[name])))
            else:
                yield f"{key}{name}", table, name


def _no_path(place: Place, given: str) -> bool:
    """Whether a base model is the bundled one or one of the hub, and no file of this machine."""
    return given == "demo" or (HUB_ID.fullmatch(given) is not None and not (place.home / given).exists())


def check_presets(place: Place, text: str) -> None:
    """Presets may be files; `config.loads` reads them, so they are looked at before.

    Raises:
        UserErrors: one lies outside the roots.
    """
    try:
        named = tomllib.loads(text).get("preset", [])
    except tomllib.TOMLDecodeError:
        return  # `loads` tells it better
    for name in named if isinstance(named, list) else [named]:
        if isinstance(name, str) and name.endswith(".toml"):
            try:
                place.inside(str(place.home / os.path.expanduser(name)))
            except UserError as error:
                raise UserErrors([f"preset: {error}"], "config") from None
        elif isinstance(name, str) and ("/" in name or "\\" in name):
            raise UserErrors([f"preset: no preset {safe.shorter(name)!r}"], "config")
