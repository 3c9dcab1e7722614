"""What `--help` prints: commands in groups and whole sentences, in English and Chinese; and mistakes in a command line.

Texts are written where a command is declared (its docstring, and `help=` of its options) and are the keys of their
translations, which `scripts/messages.py` collects with `list_texts`.
"""

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

import typer
import typer.core
import typer.main

from ..common.messages import get_language, load, translate
from ..common.text import find_similar
from ..errors import Message

WIDTH = 80
"""Columns of the help, whatever the terminal has: longer lines are harder to read."""
GROUPS = {
    Message("Train"): (
        "new",
        "recipes",
        "check",
        "estimate",
        "timesteps",
        "lr-find",
        "train",
        "resume",
        "export",
        "report",
        "demo",
    ),
    Message("Queue"): ("submit", "jobs", "stop", "worker", "remote"),
    Message("Images and captions"): ("dataset", "caption", "cache"),
    Message("LoRA files"): (
        "verify",
        "inspect",
        "convert",
        "resize",
        "merge",
        "extract",
        "average",
        "kit",
        "push",
        "draw",
    ),
    Message("Base model and precision"): ("download", "plan", "precision"),
    Message("This machine, page and other programs"): ("doctor", "ui", "mcp", "import-config"),
}
"""Title of a group -> its commands, in the order of the help."""
FIXED = {
    "Show this message and exit.": Message("Show this message and exit."),
    "required": Message("required"),
    "default: ": Message("default: "),
}
"""Texts of typer itself that appear in a help."""

TYPE = re.compile(r"<(?:list\[)?(\w+)(?: range)?\]?>")
"""Matches how typer writes a type behind an option."""
OPENING, CLOSING = "（“[", "，。；：、）”]"
"""Characters after which, and in front of which, a line is not broken."""
KINDS = {"str": "TEXT", "int": "N", "float": "NUMBER"}
"""What stands behind an option of a type."""


class Command(typer.core.TyperCommand):
    """A command whose help is in the user's language."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        formatter.write("\n".join(_format_lines(self, ctx)) + "\n")


class Group(typer.core.TyperGroup):
    """A group of commands whose help is in the user's language."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help, with the commands in the groups of `GROUPS` if they are those of `lora-fp8`."""
        lines = _format_lines(self, ctx)
        commands = {name: command for name, command in self.commands.items() if not command.hidden}
        grouped = GROUPS if ctx.parent is None else {}
        rows = {title: [name for name in names if name in commands] for title, names in grouped.items()}
        rows[Message("Commands") if not grouped else Message("More")] = [
            name for name in commands if not any(name in names for names in grouped.values())
        ]
        indent = max(map(len, commands)) + 4
        for title, names in rows.items():
            lines += ["", _format_title(title)] if names else []
            for name in names:
                first = _split_help(commands[name])[0]
                lines += _format_columns(name, translate_help(first), indent)
        formatter.write("\n".join(lines) + "\n")


class Program(typer.Typer):
    """A typer application whose commands have this help."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"cls": Group, "rich_markup_mode": None, **options})

    def command(self, name: str | None = None, **options: Any) -> Any:
        """Add a command, as typer does."""
        return super().command(name, **{"cls": Command, **options})


def translate_help(text: str) -> str:
    """Return a text of the help in the user's language."""
    return load(get_language()).get(text, text)


def list_texts(program: Program) -> set[str]:
    """Return every text of the help of a program and its commands."""
    return set(_collect_texts(typer.main.get_command(program)))


def _collect_texts(command: Any) -> Iterator[str]:
    yield from _split_help(command)
    for parameter in command.params:
        if parameter.help:
            yield parameter.help
    for inner in getattr(command, "commands", {}).values():
        yield from _collect_texts(inner)


def _split_help(command: Any) -> list[str]:
    """Return the first sentence of a command's help, which lists of commands show, and the rest if there is one."""
    whole = " ".join((command.help or "").split())
    first, stop, rest = whole.partition(". ")
    return [first + "." * bool(stop), rest] if rest else [whole]


def _format_lines(command: Any, ctx: Any) -> list[str]:
    """Return usage, description, arguments and options."""
    language = get_language()
    usage = f"{ctx.command_path} {' '.join(command.collect_usage_pieces(ctx))}"
    between = "" if language != "en" else " "
    lines = [translate(language, Message("Usage: {usage}", usage=usage)), ""]
    lines += [f"  {line}" for line in _wrap(between.join(map(translate_help, _split_help(command))), WIDTH - 2)]
    rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    for parameter in command.get_params(ctx):
        if record := parameter.get_help_record(ctx):
            name = TYPE.sub(lambda kind: KINDS.get(kind[1], kind[1].upper()), record[0])
            rows[parameter.param_type_name].append((name, _describe(parameter, record[1])))
    for title, records in zip((Message("Arguments"), Message("Options")), rows.values(), strict=True):
        indent = min(max((len(name) for name, _ in records), default=0), 26) + 4
        lines += ["", _format_title(title)] if records else []
        for name, text in records:
            lines += _format_columns(name, text, indent)
    return lines


def _format_title(title: str) -> str:
    return translate(get_language(), title) + (":" if get_language() == "en" else "：")


def _describe(parameter: Any, text: str) -> str:
    """Translate an option's help; what typer appends to it (its default, that it is required) follows."""
    given = parameter.help or ""
    rest = text.removeprefix(given).strip() if given and text.startswith(given) else ""
    if "Default: " in given and rest.startswith("[default: "):  # the text says what the value stands for
        rest = ""
    for english, message in FIXED.items():
        rest = rest.replace(english, translate(get_language(), message))
    known = {english: translate(get_language(), message) for english, message in FIXED.items()}
    return " ".join(filter(None, (translate_help(known.get(given, given) if rest or given else text), rest)))


def _format_columns(name: str, text: str, indent: int) -> list[str]:
    """Return a name with its text beside it; below it if the name is too long."""
    lines = _wrap(text, WIDTH - indent) or [""]
    if len(name) + 4 > indent:
        return [f"  {name}", *(" " * indent + line for line in lines)]
    return [f"  {name}".ljust(indent) + lines[0], *(" " * indent + line for line in lines[1:])]


def _wrap(text: str, width: int) -> list[str]:
    """Break a text into lines of at most `width` columns; Chinese may be broken between any two characters."""
    words: list[str] = []
    for word in text.split(" "):
        part = ""
        for character in word:
            if (
                part
                and (_count_columns(character) == 2 or _count_columns(part[-1]) == 2)
                and character not in CLOSING
                and part[-1] not in OPENING
            ):
                words.append(part)
                part = ""
            part += character
        words.append(f"{part} ")
    lines = [""]
    for word in words:
        if lines[-1] and _count_columns(lines[-1]) + _count_columns(word.rstrip()) > width:
            lines.append("")
        lines[-1] += word
    return [line.rstrip() for line in lines if line.strip()]


def _count_columns(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)


# ---------------------------------------------------------------------------------------------------------------------
# Mistakes in a command line


def explain(error: Any) -> Message:
    """Return the message for a mistake in a command line: what is wrong, and what to do.

    Args:
        error: typer's UsageError, a class that typer does not export.
    """
    command = error.ctx.command_path if error.ctx is not None else "lora-fp8"
    match type(error).__name__:
        case "MissingParameter" if error.param is not None:
            what = translate_help(error.param.help or "").rstrip(".。")
            line = Message("{name} is missing ({what}).", name=_format_name(error.param), what=what)
        case "NoSuchOption":
            line = _explain_option(error)
        case "BadOptionUsage":
            line = Message("{option} needs a value.", option=error.option_name)
        case "BadParameter" if error.param is not None:
            line = Message("{name}: {line}.", name=_format_name(error.param), line=_explain_value(error.message))
        case _:
            line = _explain_words(error)
    return Message("{command}: {line} See `{command} --help`", command=command, line=line)


def _format_name(parameter: Any) -> str:
    """Return the name of an option or an argument as the help shows it."""
    return parameter.opts[0] if parameter.param_type_name == "option" else parameter.metavar or parameter.name.upper()


def _explain_option(error: Any) -> Message:
    """Explain an option that does not exist: an argument written as one, a setting, or a typing mistake."""
    from ..config.validation import find_settings

    name = error.option_name
    parameters = error.ctx.command.params
    options = [option for parameter in parameters if parameter.param_type_name == "option" for option in parameter.opts]
    for parameter in parameters:
        words = parameter.name.split("_")
        if parameter.param_type_name == "argument" and name.lstrip("-").replace("-", "_") in (*words, parameter.name):
            usage = f"{error.ctx.command_path} {_format_name(parameter)}"
            return Message(
                "there is no option {option}. Write the value without it: `{usage}`.", option=name, usage=usage
            )
    if "--set" in options and (keys := find_settings(name.lstrip("-").replace("-", "_"))):
        return Message(
            "there is no option {option}. It is a setting: write --set {key}=VALUE, or {key} in the config.",
            option=name,
            key=keys[0],
        )
    if name == "--lang":
        usage = error.ctx.command_path.replace(" ", " --lang LANGUAGE ", 1)
        return Message("--lang is written before the command: `{usage}`.", usage=usage)
    if near := find_similar(name.lstrip("-"), [option.lstrip("-") for option in options]):
        return Message("there is no option {option}, did you mean {meant}?", option=name, meant=f"--{near}")
    return Message("there is no option {option}.", option=name)


def _explain_value(text: str) -> Message:
    """Explain a value of a wrong type or out of range, by typer's text."""
    if "valid integer" in text:
        return Message("expected a whole number")
    if "valid number" in text:
        return Message("expected a number")
    if match := re.search(r"(greater|less) than( or equal to)? (\S+)", text):
        sign = {"greater": ">", "less": "<"}[match[1]] + "=" * bool(match[2])
        return Message("expected a number {sign} {limit}", sign=sign, limit=match[3])
    return Message("{text}", text=text.rstrip("."))


def _explain_words(error: Any) -> Message:
    """Explain words that are too many, or a command that does not exist, by typer's text."""
    text: str = error.message
    if text.startswith("No such command") and error.ctx is not None:
        given = text.split("'")[1] if "'" in text else ""
        if near := find_similar(given, list(error.ctx.command.commands)):
            return Message("there is no command {given}, did you mean {meant}?", given=repr(given), meant=repr(near))
        return Message("there is no command {given}.", given=repr(given))
    if match := re.search(r"extra argument\S* \((.+)\)", text):
        return Message("too many arguments: {words}. A path with spaces needs quotation marks.", words=match[1])
    return Message("{text}.", text=text.rstrip("."))
