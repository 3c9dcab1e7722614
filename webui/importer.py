"""Import settings of other trainers into the form: our text, and a report on each key for people.

Several files come at once: the settings and the files that they refer to. Each is copied under its own name into one
folder, where the engine finds the others as it would beside the settings. Other files are read only if the page may.
"""

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from lora_fp8 import importing
from lora_fp8.errors import Joined, Message, UserError
from lora_fp8.importing.import_draft import Entry, Import
from lora_fp8.importing.source_files import UnreadableSettings, read_text_file

from . import form, sanitize

if TYPE_CHECKING:
    from .context import Ui

__all__ = ["read_text_file", "import_files"]
FAR = 40
"""Entries of a list that are shown."""
MOST_FILES, LARGEST = 20, 1 << 20
"""Files at once, and the bytes of each."""


def import_files(ui: "Ui", files: Iterable[Path]) -> tuple[str, str]:
    """Return our TOML, and HTML that reports on every key and file.

    Their output folder, which people do not think of, is left out if the page may not write there.

    Raises:
        UserError: none of the files has settings of a known trainer, or they are of several trainings.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        given, unused = _copy_files(files, folder)
        made, wrong = _choose_settings(ui, folder, given, unused)
    read = [file.name for file in made.files if file.parent == folder]
    left = [name for name in given if name not in (made.source.name, *read)]
    lines = [ui.translate(line) for line in unused]
    lines += [
        ui.translate(wrong[name]) if name in wrong else ui.say("new.import.unnamed", name=name, file=made.source.name)
        for name in left
    ]
    tool = ui.translate(made.tool.title)
    title = ui.say("new.import.done", file=made.source.name, tool=tool, count=len(made.mapped))
    parts = [f"<p>{sanitize.escape(title)}</p>"]
    if read:
        parts.append(f"<p>{sanitize.escape(ui.say('new.import.read', files=', '.join(read)))}</p>")
    parts += [f"<p class='wrong'>{sanitize.escape(ui.say('new.import.unused', line=line))}</p>" for line in lines]
    text, theirs, home = importing.to_toml(made, ui.translate), str(made.settings.get("output_dir", "")), ui.place.home
    try:
        if theirs:
            ui.resolve_path(home / os.path.expanduser(theirs))
    except UserError:
        text = form.put(text, "output_dir", form.collect_settings()["output_dir"].default, home)
        parts.append(f"<p>{sanitize.escape(ui.say('new.import.output_dir', path=theirs))}</p>")
    for name, lines in {"todo": made.todo, "know": made.notes}.items():
        if lines:
            items = "".join(f"<li>{sanitize.escape(ui.translate(line))}</li>" for line in lines[:FAR])
            parts.append(f"<p><strong>{sanitize.escape(ui.say(f'new.import.{name}'))}</strong></p><ul>{items}</ul>")
    lists = {"differs": made.differs, "none": made.no_counterpart, "unknown": made.unknown, "mapped": made.mapped}
    for name, entries in {**lists, "defaults": made.defaults}.items():
        listed = [entry for entry in entries if not entry.off]
        if listed:
            rows = "".join(_render_row(ui, group) for group in importing.group_by_note(listed[:FAR]))
            heading = ui.say(f"new.import.{name}", tool=tool)
            heading = ui.translate(Message("{title} ({count})", title=heading, count=len(listed)))
            table = f"<table class='facts'>{rows}</table>"
            parts.append(f"<details><summary>{sanitize.escape(heading)}</summary>{table}</details>")
    parts.append(f"<p><strong>{sanitize.escape(_summarize(ui, made))}</strong></p>")
    return text, "".join(parts)


def _summarize(ui: "Ui", made: Import) -> str:
    """Say in one line whether it is the same training, and if not, why."""
    differences = importing.list_differences(made)
    if not differences:
        return ui.say("new.import.same")
    reasons = [
        ui.say(f"new.import.unlike.{kind}", count=len(names), names=ui.translate(importing.format_few(names)))
        for kind, names in differences.items()
    ]
    return ui.say("new.import.unlike", reasons=ui.say("new.import.unlike.and").join(reasons))


def _copy_files(files: Iterable[Path], folder: Path) -> tuple[list[str], list[str]]:
    """Copy the text files into the folder. Returns their names, and a message for each other file."""
    given, refused = [], []
    files = list(files)
    if len(files) > MOST_FILES:
        raise UserError(
            Message(
                "{count} files were chosen; import at most {most}: the settings of one training and the files that "
                "they refer to",
                count=len(files),
                most=MOST_FILES,
            )
        )
    for file in files:
        try:
            name = sanitize.check_name(file.name)
            if (size := file.stat().st_size) > LARGEST:
                raise UserError(
                    Message(
                        "{file}: the file has {size} bytes; the limit for a settings file is {most}",
                        file=name,
                        size=size,
                        most=LARGEST,
                    )
                )
            if name in given:
                raise UserError(Message("{file}: another file has the same name", file=name))
            (folder / name).write_text(read_text_file(file), encoding="utf-8")
            given.append(name)
        except UserError as error:
            refused.append(_without_folder(str(error), file.parent))
    return given, refused


def _choose_settings(ui: "Ui", folder: Path, given: list[str], refused: list[str]) -> tuple[Import, dict[str, str]]:
    """Return the settings that none of the other files refers to, and what is wrong with other files."""

    def can_reach(path: Path) -> bool:
        where = path.resolve()
        try:
            return where.is_relative_to(folder) or bool(ui.resolve_path(where))
        except UserError:
            return False

    imports, wrong, unreadable = {}, {}, []
    for name in given:
        try:
            imports[name] = importing.import_file(folder / name, reach=can_reach)
        except UserError as error:
            wrong[name] = _without_folder(str(error), folder)
            if isinstance(error, UnreadableSettings):
                unreadable.append(name)
    named = {file.name for name, made in imports.items() for file in made.files if file != folder / name}
    first = [made for name, made in imports.items() if name not in named] or [*imports.values()]
    first = [made for made in first if not made.only_pictures] or first
    if len(first) > 1:
        names = ", ".join(made.source.name for made in first)
        raise UserError(
            Message(
                "{names}: each of these is a training of its own; import one, with the files that it refers to",
                names=names,
            )
        )
    if not first:
        lines = dict.fromkeys([*refused, *wrong.values()])
        raise UserError(Joined("\n", lines) if lines else Message("no file is given"))
    return first[0], {name: wrong[name] for name in unreadable}


def _without_folder(line: str, folder: Path) -> str:
    """Return a message with the names of the files in a folder instead of their paths."""

    def shorten(text: str) -> str:
        return text.replace(f"{folder}{os.sep}", "")

    return line.map(shorten) if isinstance(line, Message) else shorten(line)


def _render_row(ui: "Ui", group: list[Entry]) -> str:
    """Render a group of their keys, and beside them ours with the remark that the group shares."""
    keys = [f"{entry.key} = {ui.translate(entry.value)}" if entry.value else entry.key for entry in group]
    theirs = "<br>".join(map(sanitize.escape, keys))
    lines = [*dict.fromkeys(entry.to for entry in group), group[0].note]
    ours = "<br>".join(sanitize.escape(ui.translate(text)) for text in lines if text)
    return f"<tr><td>{theirs}</td><td>{ours}</td></tr>"
