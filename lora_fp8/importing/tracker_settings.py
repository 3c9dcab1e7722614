"""[tracking]: where other trainers send losses and previews. Tokens are never read."""

from __future__ import annotations

from typing import Any

from ..errors import Message
from . import common_values, remarks
from .import_draft import Draft
from .readers import read_flag, read_string

NONE = ("none", "false", "no", "off")
ALL = ["tensorboard", "wandb"]
"""What "all" is in sd-scripts and the trainers that share its names."""


def set_trackers(draft: Draft, key: str, project: str = "", run_name: str = "") -> None:
    """Set [tracking] from a key with names of trackers, and those of their project and run.

    Args:
        draft: of the import.
        key: the tool's setting with one name or several.
        project: its setting for the project; "" if it has none.
        run_name: its setting for the name of the run; "" if it has none.
    """
    value = draft.get(key)
    given = value if isinstance(value, list) else str(value or "").replace(",", " ").split()
    names = [name for name in (str(name).strip().lower() for name in given) if name not in NONE]
    known = common_values.list_accepted("tracking.to")
    taken = ALL if names == ["all"] else [name for name in names if name in known]
    _set(draft, key, taken, names, {project: "tracking.project", run_name: "tracking.run_name"})


def set_tracker(draft: Draft, key: str, name: str, project: str = "", run_name: str = "") -> None:
    """Set [tracking] from a key that switches one tracker on; the other arguments are those of `set_trackers`."""
    names = [name] if draft.has(key) and draft.get(key, read_flag) else []
    _set(draft, key, names, names, {project: "tracking.project", run_name: "tracking.run_name"})


def _set(draft: Draft, key: str, taken: list[str], names: list[str], texts: dict[str, str]) -> None:
    note = Message("this trainer can log to {names}", names=", ".join(common_values.list_accepted("tracking.to")))
    if taken:
        is_whole = set(names) in ({"all"}, set(taken))
        (draft.report_mapped if is_whole else draft.report_different)(
            key, {"tracking.to": taken}, "" if is_whole else note
        )
    elif draft.has(key):
        draft.report_unmatched(key, note if names else remarks.OFF, off=not names)
    for other, setting in texts.items():
        if not other or not draft.has(other):
            continue
        value: Any = draft.get(other, read_string).strip()[:120]
        if taken and value:
            draft.report_mapped(other, {setting: value})
        else:
            draft.report_unmatched(other, Message("no tracker is on"), off=True)
