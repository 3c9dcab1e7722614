"""Write an `Import` as TOML for the trainer, as lines for people, and as JSON for programs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import config
from ..errors import Joined, Message, Plural, UserError, first_few
from ..settings import WRITTEN, find_path_places
from . import remarks
from .import_draft import Entry, Import


def to_toml(made: Import, say: Callable[[str], str] = str) -> str:
    """Return our config file: what was set, where each line comes from, and each TODO on its line.

    Args:
        made: the import.
        say: translates a message.
    """
    heads = [
        Message(
            "`lora-fp8 import-config` wrote this file from {file} ({tool}).",
            file=made.source.name,
            tool=made.tool.title,
        ),
        Message("This file holds only what that file sets; `lora-fp8 new` writes every setting with its meaning."),
    ]
    if made.todo:
        heads.append(Message("Complete or check the lines marked TODO."))
    heads += [Message("TODO: {line}", line=text) for text in _find_unplaced_todos(made)]
    lines = [f"# {_join_lines(say(head))}" for head in heads]

    def add_line(name: str, value: Any, setting: str) -> None:
        comment = _join_lines(say(made.comments.get(setting, "")))
        lines.append(f"{name} = {config.format_toml_value(value)}" + (f"  # {comment}" if comment else ""))

    lines.append("")
    for name, value in made.settings.items():
        if not isinstance(value, dict):
            add_line(name, value, name)
    for section, values in made.settings.items():
        if not isinstance(values, dict):
            continue
        plain = {name: value for name, value in values.items() if name != "folders"}
        if plain:
            lines += ["", f"[{section}]"]
            for name, value in plain.items():
                add_line(name, value, f"{section}.{name}")
        for folder in values.get("folders", []):
            todo = _join_lines(say(made.comments.get("dataset.folders", "")))
            lines += ["", f"[[{section}.folders]]" + (f"  # {todo}" if todo else "")]
            for name, value in folder.items():
                add_line(name, value, "")
    return "\n".join(lines).strip() + "\n"


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def _find_unplaced_todos(made: Import) -> list[str]:
    """Return the TODOs that no line of the file shows."""
    lines = {
        f"{section}.{name}" for section, table in made.settings.items() if isinstance(table, dict) for name in table
    }
    lines |= made.settings.keys()
    comments = "; ".join(comment for setting, comment in made.comments.items() if setting in lines)
    return [text for text in made.todo if text.partition(": ")[2] not in comments]


def find_problems(made: Import) -> list[str]:
    """Return why our file would not load; [] if it would."""
    try:
        config.loads(to_toml(made), where=made.source.name)
    except UserError as error:
        return error.problems
    return []


def _find_unmentioned_problems(made: Import) -> list[str]:
    """Return the problems of our file that no TODO mentions."""
    mentioned = {text.partition(": ")[0] for text in made.todo}
    return [line for line in find_problems(made) if line.partition(": ")[0] not in mentioned]


OF_THE_RUN = (
    *("memory.", "checkpoint.", "tracking.", "export.", "preview."),
    *("name", "output_dir", "train.steps", "train.batch_size"),
)
"""Beginnings of settings that affect how a training runs and what it saves, but not what it learns."""


def _is_immaterial(entry: Entry) -> bool:
    """Return True if an entry changes only settings that do not affect what is learned."""
    written = entry.to.parts if isinstance(entry.to, Joined) else ()
    settings = [part.values["key"] for part in written if isinstance(part, Message)]
    return bool(settings) and all(name.startswith(OF_THE_RUN) for name in settings)


def list_differences(made: Import) -> dict[str, list[str]]:
    """Return why the training differs from the other tool's, as {kind: names}; {} if it learns the same.

    Kinds: "todo", "differs", "none" (no counterpart) and "unknown".
    """
    differs = [entry for entry in made.differs if not _is_immaterial(entry)]
    lost = [e for e in made.no_counterpart if not e.off and not remarks.is_of_the_run(e.note)]
    reasons = {
        "todo": [text.partition(": ")[0] for text in [*made.todo, *_find_unmentioned_problems(made)]],
        "differs": [entry.key for entry in differs],
        "none": [entry.key for entry in lost],
        "unknown": [entry.key for entry in made.unknown],
    }
    return {kind: names for kind, names in reasons.items() if names}


def describe_verdict(made: Import) -> Message:
    """Return one line that says whether the training is the same as the other tool's, and why not."""
    names_by_kind = list_differences(made)
    if not names_by_kind:
        return Message("same training: yes")
    labels = {
        "todo": Plural(
            "{count} setting needs your attention ({names})", "{count} settings need your attention ({names})"
        ),
        "differs": Plural(
            "{count} setting differs in meaning ({names})", "{count} settings differ in meaning ({names})"
        ),
        "none": Plural(
            "{count} setting has no counterpart ({names})", "{count} settings have no counterpart ({names})"
        ),
        "unknown": Plural("{count} setting is unknown ({names})", "{count} settings are unknown ({names})"),
    }
    reasons = [labels[kind](count=len(names), names=format_few(names)) for kind, names in names_by_kind.items()]
    return Message("same training: no, because {lines}", lines=Joined(", ", reasons))


def format_few(names: list[str]) -> Message:
    """Return the first few names, each once, and the number of the others."""
    return first_few(list(dict.fromkeys(names)))


def group_by_note(entries: Sequence[Entry]) -> list[list[Entry]]:
    """Group entries that have the same note, in the order of each group's first entry."""
    groups: dict[str, list[Entry]] = {}
    for i, entry in enumerate(entries):
        groups.setdefault(entry.note or str(i), []).append(entry)
    return list(groups.values())


def report(made: Import, verbose: bool = False) -> list[str]:
    """Return the report on every key for people: what is to be done first, the verdict last.

    Args:
        made: the import.
        verbose: list all keys, not only those whose meaning differs here.
    """
    lines: list[str] = [
        Message("{path}: {tool} ({why})", path=made.source, tool=made.tool.title, why=made.why),
        *_list_texts(Message("to do"), [*made.todo, *_find_unmentioned_problems(made)]),
        *_list_texts(Message("notes"), made.notes),
        *_list_entries(Message("different meaning"), made.differs),
        *_list_entries(Message("no counterpart"), [entry for entry in made.no_counterpart if not entry.off]),
        *_list_entries(Message("unknown settings"), made.unknown),
    ]
    defaults = Message("defaults of {tool} that were written, because the file does not set them", tool=made.tool.name)
    off = [entry for entry in made.no_counterpart if entry.off]
    if verbose:
        needless = Message("no counterpart needed: off, empty or without effect")
        lines += _list_entries(Message("converted"), made.mapped)
        lines += [*_list_entries(defaults, made.defaults), *_list_entries(needless, off)]
        return [*lines, describe_verdict(made)]
    if made.mapped:
        lines.append(Message("converted ({count}); --verbose lists them", count=len(made.mapped)))
    # Two keys may become one setting.
    lines += _list_texts(defaults, list(dict.fromkeys(entry.to or entry.key for entry in made.defaults)))
    if off:
        lines.append(
            Message(
                "no counterpart needed ({count}): off, empty or without effect; --verbose lists them",
                count=len(off),
            )
        )
    return [*lines, describe_verdict(made)]


def _list_texts(title: Message, texts: Sequence[str]) -> list[Message]:
    """Return a title with the number of texts, and the texts below it; [] if there are none."""
    if not texts:
        return []
    return [
        Message("{title} ({count})", title=title, count=len(texts)),
        *(Message("  {line}", line=text) for text in texts),
    ]


def _list_entries(title: Message, entries: Sequence[Entry]) -> list[Message]:
    """Return a title with the number of entries, and below it each key, and each note once."""
    lines = [Message("{title} ({count})", title=title, count=len(entries))] if entries else []
    for group in group_by_note(entries):
        for entry in group:
            given = Message("{key} = {value}", key=entry.key, value=entry.value) if entry.value else entry.key
            line = Message("{line} -> {ours}", line=given, ours=entry.to) if entry.to else given
            lines.append(Message("  {line}", line=line))
        lines += [Message("      {line}", line=group[0].note)] if group[0].note else []
    return lines


def to_json(made: Import) -> dict[str, Any]:
    """Return the report for programs."""

    def make_rows(entries: list[Entry]) -> list[dict[str, Any]]:
        return [
            {"key": e.key, "value": e.value, "to": e.to, "note": e.note} | ({"off": True} if e.off else {})
            for e in entries
        ]

    remaining = find_problems(made)
    return {
        "file": str(made.source),
        "tool": made.tool.name,
        "recognised_by": made.why,
        "mapped": make_rows(made.mapped),
        "differs": make_rows(made.differs),
        "no_counterpart": make_rows(made.no_counterpart),
        "unknown": make_rows(made.unknown),
        "defaults": make_rows(made.defaults),
        "notes": made.notes,
        "todo": made.todo,
        "loads": not remaining,
        "problems": remaining,
        "same_training": not list_differences(made),
        "verdict": describe_verdict(made),
        "settings": made.settings,
    }


def relocate(made: Import, start: Path) -> None:
    """Rewrite relative paths that exist beside the other trainer's file so that they are valid from `start`.

    Args:
        made: changed in place; the rewritten paths are listed in its notes.
        start: the folder that trainings are started from, to which paths in our configs are relative.
    """
    beside = made.source.parent.resolve()
    start = start.resolve()
    moved: list[str] = []

    def rewrite_path(path: Any) -> Any:
        if not isinstance(path, str) or not path or os.path.isabs(os.path.expanduser(path)):
            return path
        if (start / path).exists() or not (beside / path).exists():
            return path
        moved.append(path)
        place = Path(os.path.normpath(beside / path))
        return (place.relative_to(start) if place.is_relative_to(start) else place).as_posix()

    for named in find_path_places(made.settings):
        if named.setting not in WRITTEN:
            named.table[named.name] = rewrite_path(named.path)
    if moved:
        made.notes.append(
            Message(
                "relative paths start at {folder} in this trainer, so paths to files beside {file} were changed: "
                "{names}",
                folder=start,
                names=format_few(moved),
                file=made.source.name,
            )
        )
