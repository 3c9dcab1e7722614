"""Settings of other trainers, for the form: our text, and an account of each key for people."""

from pathlib import Path
from typing import TYPE_CHECKING

from lora_fp8 import importing
from lora_fp8.importing.base import Entry, decoded

from . import safe

if TYPE_CHECKING:
    from .context import Ui

__all__ = ["account", "decoded"]
FAR = 40
"""Entries of a list that are shown."""


def account(ui: "Ui", file: Path) -> tuple[str, str]:
    """(our TOML, HTML that tells what became of every key).

    Raises:
        UserError: no settings of a trainer that is known.
    """
    made = importing.import_file(file)
    title = ui.say("new.import.done", file=made.source.name, tool=made.tool.title, mapped=len(made.mapped))
    parts = [f"<p>{safe.shown(title)}</p>"]
    if made.todo:
        items = "".join(f"<li>{safe.shown(ui.tell(line))}</li>" for line in made.todo[:FAR])
        parts.append(f"<p><strong>{safe.shown(ui.say('new.import.todo'))}</strong></p><ul>{items}</ul>")
    lists = {"differs": made.differs, "none": made.no_counterpart, "unknown": made.unknown, "mapped": made.mapped}
    for name, entries in lists.items():
        told = [entry for entry in entries if not entry.off]
        if told:
            rows = "".join(_row(entry) for entry in told[:FAR])
            heading = f"{ui.say(f'new.import.{name}')} ({len(told)})"
            table = f"<table class='facts wide'>{rows}</table>"
            parts.append(f"<details><summary>{safe.shown(heading)}</summary>{table}</details>")
    return importing.to_toml(made), "".join(parts)


def _row(entry: Entry) -> str:
    cells = (f"{entry.key} = {entry.value}", entry.to, entry.note)
    return "<tr>" + "".join(f"<td>{safe.shown(cell)}</td>" for cell in cells) + "</tr>"
