"""Requests about the previews of a run that trains: an image at once, and other prompts from now on.

    control/sample-1732526400000000000.json   one image, drawn at the end of the current step; deleted when it is read
    previews.json                             what replaces settings of `[preview]` until it is changed again

Both hold settings of the job's `[preview]` table, those in KEYS. previews.json stays, so that a resumed run goes on
with the same prompts. Neither ever changes config.toml: the run stays the run of its config.

Standard library only: the web page makes these requests without torch.
"""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..common.json_files import read_json, write_json
from ..errors import Message, UserError, needs_repair, reason
from . import ownership
from .folder import Run

KEYS = ("prompts", "negative", "seed", "steps", "guidance", "width", "height")
"""Settings of `[preview]` that may be changed while a run trains."""
MOST_SAMPLES = 100
"""Requests for an image that may wait in a run folder."""


def request_sample(run: Run, changes: Mapping[str, Any]) -> Path:
    """Ask the trainer for one image at the end of its current step.

    Args:
        run: the run, which should be training.
        changes: settings of `[preview]`; the others are those that the run's previews have.

    Returns:
        The request. The trainer deletes it when it reads it.

    Raises:
        UserError: the folder is not a run's, cannot be written, or has too many such requests already.
    """
    if len(list_samples(run)) >= MOST_SAMPLES:
        raise UserError(
            Message("{path}: {count} images are already waiting to be drawn", path=run.control, count=MOST_SAMPLES)
        )
    ownership.require_ours(run.path)
    number = time.time_ns()
    while (path := run.control / f"sample-{number:019d}.json").exists():
        number += 1
    try:
        run.control.mkdir(exist_ok=True)
        write_json(path, dict(changes), indent=None)
    except OSError as error:
        raise _make_request_error(path, error) from None
    return path


def list_samples(run: Run) -> list[Path]:
    """List the requests for an image that the trainer has not read yet, oldest first."""
    try:
        names = sorted(path.name for path in run.control.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [run.control / name for name in names if re.fullmatch(ownership.SAMPLE_REQUEST, name)]


def take_samples(run: Run) -> list[dict[str, Any]]:
    """Read the requests for an image, oldest first, and delete them. One that is no JSON object is {}."""
    requests = []
    for path in list_samples(run):
        try:
            content = read_json(path)
        except (OSError, ValueError):
            content = {}
        requests.append(content if isinstance(content, dict) else {})
        path.unlink(missing_ok=True)
    return requests


def write_changes(run: Run, changes: Mapping[str, Any]) -> None:
    """Change the previews of a run from now on; {} goes back to those of its config.

    Raises:
        UserError: the folder is not a run's, or cannot be written.
    """
    ownership.require_ours(run.path)
    try:
        if changes:
            write_json(run.previews_file, dict(changes))
        else:
            run.previews_file.unlink(missing_ok=True)
    except OSError as error:
        raise _make_request_error(run.previews_file, error) from None


def read_changes(run: Run) -> dict[str, Any]:
    """Return the settings of `[preview]` that were changed since the run began; {} if none were.

    Raises:
        UserError: previews.json cannot be read, or is no JSON object.
    """
    try:
        content = read_json(run.previews_file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise needs_repair(run.previews_file, reason(error)) from None
    if not isinstance(content, dict):
        raise needs_repair(run.previews_file, Message("the content is not a JSON object"))
    return content


def read_version(run: Run) -> tuple[int, ...]:
    """Return a value that differs whenever previews.json was written; () if there is none."""
    try:
        status = run.previews_file.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size


def _make_request_error(path: Path, error: OSError) -> UserError:
    return UserError(
        Message(
            "{path}: the file cannot be written ({why}); use the account of the user who trains",
            path=path,
            why=reason(error),
        )
    )
