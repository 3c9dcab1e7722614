"""An `Import` as TOML for the trainer, as lines for people, and as JSON for programs."""

from __future__ import annotations

from typing import Any

import tomlkit

from lora_fp8 import config

from .base import Entry, Import


def to_toml(made: Import) -> str:
    """Our file: what was set, where each line comes from, and every TODO at its line."""
    lines = [f"# From {made.source.name}, a file of {made.tool.title}, by `lora-fp8 import-config`."]
    lines += ["# Only what it says is set; `lora-fp8 new` writes every setting with its meaning."]
    if made.todo:
        lines.append("# Lines marked TODO are yours to fill in or to check.")
    lines += [f"# TODO: {text}" for text in _unplaced(made)]

    def line(name: str, value: Any, setting: str) -> None:
        comment = made.comments.get(setting, "")
        comment = " ".join(comment.split())
        lines.append(f"{name} = {tomlkit.item(value).as_string()}" + (f"  # {comment}" if comment else ""))

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
    """TODOs that no line of the file shows."""
    shown = "; ".join(made.comments.values())
    return [text for text in made.todo if text.partition(": ")[2] not in shown]


def problems(made: Import) -> list[str]:
    """What keeps our file from loading; empty when it loads."""
    try:
        config.loads(to_toml(made), where=made.source.name)
    except config.UserError as error:
        return list(getattr(error, "problems", [str(error)]))
    return []


def _untold(made: Import) -> list[str]:
    """Problems of our file that no TODO speaks of."""
    told = {text.partition(": ")[0] for text in made.todo}
    return [line for line in problems(made) if line.partition(": ")[0] not in told]


def report(made: Import) -> list[str]:
    """The account of every key, for people."""
    lines = [f"{made.source}: {made.tool.title} ({made.why})"]

    def block(title: str, entries: list[Entry], show: Any) -> None:
        if entries:
            lines.append(f"{title} ({len(entries)})")
            lines.extend(show(entry) for entry in entries)

    def mapped(entry: Entry) -> str:
        told = f" -> {entry.to}" if entry.to else ""
        return f"  {entry.key} = {entry.value}{told}" + (f"  ({entry.note})" if entry.note else "")

    def explained(entry: Entry) -> str:
        return f"  {entry.key} = {entry.value}{f' -> {entry.to}' if entry.to else ''}\n      {entry.note}"

    block("mapped", made.mapped, mapped)
    block("differs in meaning", made.differs, explained)
    block("no counterpart", [entry for entry in made.no_counterpart if not entry.off], explained)
    off = [entry.key for entry in made.no_counterpart if entry.off]
    if off:
        lines += [f"no counterpart and none needed: off, empty or without effect ({len(off)})", f"  {', '.join(off)}"]
    block("not known to this tool's table", made.unknown, lambda entry: f"  {entry.key} = {entry.value}")
    block(f"not in the file, so {made.tool.name}'s own was written", made.defaults, mapped)
    block_notes = [f"  {text}" for text in made.notes]
    if block_notes:
        lines += [f"to know ({len(block_notes)})", *block_notes]
    todo = [*made.todo, *_untold(made)]
    if todo:
        lines += [f"to do ({len(todo)})", *(f"  {text}" for text in todo)]
    return lines


def to_json(made: Import) -> dict[str, Any]:
    """The same for programs."""

    def rows(entries: list[Entry]) -> list[dict[str, Any]]:
        return [
            {"key": e.key, "value": e.value, "to": e.to, "note": e.note} | ({"off": True} if e.off else {})
            for e in entries
        ]

    found = problems(made)
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
        "loads": not found,
        "problems": found,
        "settings": made.settings,
    }
