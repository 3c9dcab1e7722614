"""Apply the changes that were made to the previews of a run that trains (`run.preview_requests`)."""

from collections.abc import Mapping
from typing import Any

from .. import settings
from ..errors import Message, UserError
from ..run.preview_requests import KEYS
from .loading import Override, dumps, loads


def apply_preview_changes(job: settings.Job, changes: Mapping[str, Any]) -> settings.Preview:
    """Return the job's `[preview]` table with these changes, checked as the settings of a config are.

    Args:
        job: of the run.
        changes: new values by the names of settings, of KEYS.

    Raises:
        UserErrors: the values that are not accepted, one line each.
        UserError: a setting cannot be changed while a run trains.
    """
    for name, value in changes.items():
        if name not in KEYS:
            raise UserError(
                Message(
                    "preview.{name}: cannot be changed while a run trains; these can: {names}",
                    name=repr(name)[1:-1],
                    names=", ".join(KEYS),
                )
            )
        if not isinstance(value, str | int | float) and not _is_text_list(value):
            raise UserError(Message("preview.{name}: the value is neither text nor a number", name=name))
    if not changes:
        return job.preview
    overrides = tuple(Override(f"preview.{name}", value) for name, value in changes.items())
    return loads(dumps(job), overrides, where="preview").preview


def _is_text_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)
