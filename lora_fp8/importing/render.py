"""Write an `Import` as TOML for the trainer, as lines for people, and as JSON for programs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from .. import config
from ..errors import Message, UserError
from . import remarks
from .import_draft import Entry, Import


def to_toml(made: Import) -> str:
    """Return our config file: what was set, where each line comes from, and each TODO on its line."""
    lines = [f"# From {made.source.name}, a file of {made.tool.title}, by `lora-fp8 import-config`."]
    lines += ["# Only what it says is set; `lora-fp8 new` writes every setting with its meaning."]
    if made.todo:
        lines.append("# Lines marked TODO are yours to fill in or to check.")
    lines += [f"# TODO: {text}" for text in _unplaced(made)]

    def line(name: str, value: Any, setting: str) -> None:
        comment = made.comments.get(setting, "")
        comment = " ".join(comment.split())
        lines.append(f"{name} = {config.toml_value(value)}" + (f"  # {comment}" if comment else ""))

    lines.append("")
    for name, value in made.settings.items():
        if not isinstance(value, dict):
            line(name, value, name)
    for section, values in made.settings.items():
        if not isinstance(values, dict):
            continue
        plain = {name: value for name, value in values.items() if name != "folders"}
        if plain:
            lines += ["", f"[{section}]"]
            for name, value in plain.items():
                line(name, value, f"{section}.{name}")
        for folder in values.get("folders", []):
            todo = made.comments.get("dataset.folders", "")
            lines += ["", f"[[{section}.folders]]" + (f"  # {todo}" if todo else "")]
            for name, value in folder.items():
                line(name, value, "")
    return "\n".join(lines).strip() + "\n"


def _unplaced(made: Import) -> list[str]:
    """Return the TODOs that no line of the file shows."""
    comments = "; ".join(made.comments.values())
    return [text for text in made.todo if text.partition(": ")[2] not in comments]


def problems(made: Import) -> list[str]:
    """Return why our file would not load; [] if it would."""
    try:
        config.loads(to_toml(made), where=made.source.name)
    except UserError as error:
        return list(getattr(error, "problems", [str(error)]))
    return []


def _untold(made: Import) -> list[str]:
    """Return the problems of our file that no TODO mentions."""
    mentioned = {text.partition(": ")[0] for text in made.todo}
    return [line for line in problems(made) if line.partition(": ")[0] not in mentioned]


ALIKE = ("memory.", "checkpoint.", "export.", "preview.", "name", "output_dir", "train.steps", "train.batch_size")
ALIKE_NOTES = (
    "memory.",
    "checkpoint.",
    "export.",
    "preview.",
    remarks.UPLOAD,
    remarks.RESUMES,
    remarks.LOGGING,
    remarks.OTHER_CACHE,
    remarks.NO_SAMPLER,
    remarks.NO_SWAP,
)
"""Prefixes of settings and of reasons that affect how a training runs and what it saves, but not what it learns."""


def _alike(entry: Entry) -> bool:
    """Return True if an entry changes only settings that do not affect what is learned."""
    settings = re.findall(r"(?:^|, )([a-z_]+(?:\.[a-z_]+)?) = ", entry.to)
    return all(name.startswith(ALIKE) for name in settings) if settings else remarks.ATTENTION in entry.note


def differences(made: Import) -> dict[str, list[str]]:
    """Return why the training differs from the other tool's, as {kind: names}; {} if it learns the same.

    Kinds: "todo", "differs", "none" (no counterpart) and "unknown".
    """
    differs = [entry for entry in made.differs if not _alike(entry)]
    lost = [e for e in made.no_counterpart if not e.off and not e.note.startswith(ALIKE_NOTES)]
    reasons = {
        "todo": [text.partition(": ")[0] for text in [*made.todo, *_untold(made)]],
        "differs": [entry.key for entry in differs],
        "none": [entry.key for entry in lost],
        "unknown": [entry.key for entry in made.unknown],
    }
    return {kind: names for kind, names in reasons.items() if names}


def verdict(made: Import) -> str:
    """Return one line that says whether the training is the same as the other tool's, and why not."""
    names_by_kind = differences(made)
    if not names_by_kind:
        return "same training: yes"
    labels = {
        "todo": "to do",
        "differs": "differ in meaning",
        "none": "have no counterpart",
        "unknown": "are not known",
    }
    reasons = [f"{len(names)} {labels[kind]} ({few(names)})" for kind, names in names_by_kind.items()]
    return f"same training: no, because {', '.join(reasons)}"


def few(names: list[str], most: int = 3) -> str:
    """Return the first few names, each once, and the number of the others."""
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:most]) + (f" and {len(distinct) - most} more" if len(distinct) > most else "")


def grouped(entries: list[Entry]) -> list[list[Entry]]:
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
    lines = [f"{made.source}: {made.tool.title} ({made.why})"]

    def block(title: str, entries: list[Entry]) -> None:
        if entries:
            lines.append(f"{title} ({len(entries)})")
        for group in grouped(entries):
            lines.extend(f"  {entry.key} = {entry.value}" + (f" -> {entry.to}" if entry.to else "") for entry in group)
            lines.extend([f"      {group[0].note}"] if group[0].note else [])

    for title, texts in (("to do", [*made.todo, *_untold(made)]), ("to know", made.notes)):
        if texts:
            lines += [f"{title} ({len(texts)})", *(f"  {text}" for text in texts)]
    block("differs in meaning", made.differs)
    block("no counterpart", [entry for entry in made.no_counterpart if not entry.off])
    block("not known to this tool's table", made.unknown)
    defaults = f"not in the file, so {made.tool.name}'s own was written"
    off = [entry for entry in made.no_counterpart if entry.off]
    if verbose:
        block("mapped", made.mapped)
        block(defaults, made.defaults)
        block("no counterpart and none needed: off, empty or without effect", off)
        return [*lines, verdict(made)]
    if made.mapped:
        lines.append(f"mapped ({len(made.mapped)}): --verbose lists them")
    if made.defaults:
        lines += [f"{defaults} ({len(made.defaults)})", *(f"  {entry.to or entry.key}" for entry in made.defaults)]
    if off:
        lines.append(f"no counterpart and none needed ({len(off)}): off, empty or without effect; --verbose lists them")
    return [*lines, verdict(made)]


def to_json(made: Import) -> dict[str, Any]:
    """Return the report for programs."""

    def rows(entries: list[Entry]) -> list[dict[str, Any]]:
        return [
            {"key": e.key, "value": e.value, "to": e.to, "note": e.note} | ({"off": True} if e.off else {})
            for e in entries
        ]

    remaining = problems(made)
    return {
        "file": str(made.source),
        "tool": made.tool.name,
        "recognised_by": made.why,
        "mapped": rows(made.mapped),
        "differs": rows(made.differs),
        "no_counterpart": rows(made.no_counterpart),
        "unknown": rows(made.unknown),
        "defaults": rows(made.defaults),
        "notes": made.notes,
        "todo": made.todo,
        "loads": not remaining,
        "problems": remaining,
        "same_training": not differences(made),
        "verdict": verdict(made),
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

    def seen(path: Any) -> Any:
        if not isinstance(path, str) or not path or os.path.isabs(os.path.expanduser(path)):
            return path
        if (start / path).exists() or not (beside / path).exists():
            return path
        moved.append(path)
        place = Path(os.path.normpath(beside / path))
        return (place.relative_to(start) if place.is_relative_to(start) else place).as_posix()

    for section, names in PATHS.items():
        table = made.settings.get(section, {})
        for name in names:
            if name in table:
                table[name] = (
                    [seen(path) for path in table[name]] if isinstance(table[name], list) else seen(table[name])
                )
    files = made.settings.get("model", {}).get("files", {})
    files.update({part: seen(path) for part, path in files.items()})
    for folder in made.settings.get("dataset", {}).get("folders", []):
        for name in ("path", "control", "mask"):
            if name in folder:
                folder[name] = seen(folder[name])
    if moved:
        made.notes.append(
            Message(
                "relative paths begin at {folder} here: {names} stand beside {file}",
                folder=start,
                names=few(moved),
                file=made.source.name,
            )
        )


PATHS = {"model": ("path", "components"), "adapter": ("init_from",), "preview": ("controls",)}
"""Settings with paths of files and folders, besides those of the dataset."""
