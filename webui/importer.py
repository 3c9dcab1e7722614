"""Settings of other trainers, for the form: our text, and an account of each key for people.

Several files come at once: the settings, and what they refer to. Each is copied under its own name into one folder, and
the engine finds the others there as it would beside the settings; what else it may look at is what the page may.
"""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lora_fp8 import importing
from lora_fp8.config import UserError
from lora_fp8.importing.base import Entry, Import, decoded

from . import form, safe, words

if TYPE_CHECKING:
    from .context import Ui

__all__ = ["account", "decoded"]
FAR = 40
"""Entries of a list that are shown."""
MOST_FILES, LARGEST = 20, 1 << 20
"""Files at once, and the bytes of each."""


def account(ui: "Ui", files: Iterable[Path]) -> tuple[str, str]:
    """(our TOML, HTML that tells what became of every key, and of every file).

    Their folder for results, which people do not think of, is left out where the page may not write.

    Raises:
        UserError: no settings of a trainer that is known among the files, or those of several trainings.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        given, unused = _copied(files, folder)
        made, wrong = _chosen(ui, folder, given, unused)
    read = [file.name for file in made.files if file.parent == folder]
    left = [name for name in given if name not in (made.source.name, *read)]
    lines = [ui.tell(line) for line in unused]
    lines += [
        ui.tell(wrong[name]) if name in wrong else ui.say("new.import.unnamed", name=name, file=made.source.name)
        for name in left
    ]
    title = ui.say("new.import.done", file=made.source.name, tool=made.tool.title, mapped=len(made.mapped))
    parts = [f"<p>{safe.shown(title)}</p>"]
    if read:
        parts.append(f"<p>{safe.shown(ui.say('new.import.read', files=', '.join(read)))}</p>")
    parts += [f"<p class='wrong'>{safe.shown(ui.say('new.import.unused', line=line))}</p>" for line in lines]
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


def _copied(files: Iterable[Path], folder: Path) -> tuple[list[str], list[str]]:
    """Names of the text files among them, which are in the folder now, and the engine's line on each other one."""
    given, refused = [], []
    files = list(files)
    if len(files) > MOST_FILES:
        raise UserError(f"{len(files)} files at once; import at most {MOST_FILES}: one training's settings")
    for file in files:
        try:
            name = safe.name(file.name)
            if (size := file.stat().st_size) > LARGEST:
                raise UserError(f"{name}: {size} bytes, more than the {LARGEST} of a settings file")
            if name in given:
                raise UserError(f"{name}: another file of this name came with it")
            (folder / name).write_text(decoded(file), encoding="utf-8")
            given.append(name)
        except UserError as error:
            refused.append(str(error).replace(f"{file.parent}/", ""))
    return given, refused


def _chosen(ui: "Ui", folder: Path, given: list[str], refused: list[str]) -> tuple[Import, dict[str, str]]:
    """The settings among these files, which none of the others refers to, and what is wrong in others."""

    def reach(path: Path) -> bool:
        where = path.resolve()
        try:
            return where.is_relative_to(folder) or bool(ui.path(where))
        except UserError:
            return False

    found, wrong = {}, {}
    for name in given:
        try:
            found[name] = importing.import_file(folder / name, reach=reach)
        except UserError as error:
            wrong[name] = str(error).replace(f"{folder}/", "")
    named = {file.name for name, made in found.items() for file in made.files if file != folder / name}
    first = [made for name, made in found.items() if name not in named] or [*found.values()]
    first = [made for made in first if not made.only_pictures] or first
    if len(first) > 1:
        names = ", ".join(made.source.name for made in first)
        raise UserError(f"{names}: each is a training of its own; import one, with the files that it refers to")
    if not first:
        raise UserError("\n".join(dict.fromkeys([*refused, *wrong.values()])) or "no file given")
    return first[0], {name: line for name, line in wrong.items() if "not valid " in line}


def _row(ui: "Ui", entry: Entry) -> str:
    """Theirs; ours, and the remark below it."""
    ours = "<br>".join(safe.shown(text) for text in (entry.to, words.tell_joined(ui.language, entry.note)) if text)
    return f"<tr><td>{safe.shown(f'{entry.key} = {entry.value}')}</td><td>{ours}</td></tr>"
