"""Settings of other trainers, for the form: our text, and an account of each key for people."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lora_fp8 import importing
from lora_fp8.config import UserError
from lora_fp8.importing.base import Entry, decoded

from . import form, safe, words

if TYPE_CHECKING:
    from .context import Ui

__all__ = ["account", "decoded"]
FAR = 40
"""Entries of a list that are shown."""


def account(ui: "Ui", file: Path) -> tuple[str, str]:
    """(our TOML, HTML that tells what became of every key).

    Their folder for results, which people do not think of, is left out where the page may not write.

    Raises:
        UserError: no settings of a trainer that is known.
    """
    made = importing.import_file(file)
    title = ui.say("new.import.done", file=made.source.name, tool=made.tool.title, mapped=len(made.mapped))
    parts = [f"<p>{safe.shown(title)}</p>"]
    text, theirs, home = importing.to_toml(made), str(made.settings.get("output_dir", "")), ui.place.home
    try:
        if theirs:
            ui.path(home / os.path.expanduser(theirs))
    except UserError:
        text = form.put(text, "output_dir", form.settings()["output_dir"].default, home)
        parts.append(f"<p>{safe.shown(ui.say('new.import.output_dir', path=theirs))}</p>")
    for name, lines in {"todo": made.todo, "know": made.notes}.items():
        if lines:
            items = "".join(f"<li>{safe.shown(words.tell_joined(ui.language, line))}</li>" for line in lines[:FAR])
            parts.append(f"<p><strong>{safe.shown(ui.say(f'new.import.{name}'))}</strong></p><ul>{items}</ul>")
    lists = {"differs": made.differs, "none": made.no_counterpart, "unknown": made.unknown, "mapped": made.mapped}
    for name, entries in {**lists, "defaults": made.defaults}.items():
        told = [entry for entry in entries if not entry.off]
        if told:
            rows = "".join(_row(ui, entry) for entry in told[:FAR])
            heading = f"{ui.say(f'new.import.{name}', tool=made.tool.title)} ({len(told)})"
            table = f"<table class='facts'>{rows}</table>"
            parts.append(f"<details><summary>{safe.shown(heading)}</summary>{table}</details>")
    return text, "".join(parts)


def _row(ui: "Ui", entry: Entry) -> str:
    """Theirs; ours, and the remark below it."""
    ours = "<br>".join(safe.shown(text) for text in (entry.to, words.tell_joined(ui.language, entry.note)) if text)
    return f"<tr><td>{safe.shown(f'{entry.key} = {entry.value}')}</td><td>{ours}</td></tr>"
