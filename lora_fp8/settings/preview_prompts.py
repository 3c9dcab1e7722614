"""Options of a preview prompt, at its end as in kohya's prompt files: "a cat on a sofa --w 1216 --h 832 --d 7"."""

import re
import unicodedata
from typing import Any

from ..errors import Joined, Message, UserError
from .declarations import Preview

OPTIONS = {"n": "negative", "w": "width", "h": "height", "d": "seed", "s": "steps", "g": "guidance", "l": "guidance"}
"""Option -> the setting of `[preview]` that it replaces for its prompt. kohya calls classifier-free guidance l."""
_OPTION = re.compile(r"(?:^|\s)--([A-Za-zＡ-Ｚａ-ｚ]\S*)")  # misspelt ones too: --w=64, --n:, --ｗ
_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")  # int() takes 6_4 and full-width digits too
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


def has_options(text: str) -> bool:
    """Return True if a text would be read as a prompt with options, right or wrong ones."""
    return _OPTION.search(text) is not None


def neutralize_options(text: str) -> str:
    """Return a text in which nothing is read as an option: of "--w", one hyphen is left."""
    return _OPTION.sub(lambda match: match[0].replace("--", "-", 1), text)


def read_options(prompt: str) -> tuple[str, dict[str, Any]]:
    """Separate the text of a preview prompt from its options.

    Returns:
        The text, and the values by the names of settings in `[preview]`. They are not checked, and what should be a
        number and is none stays text. A prompt without options stays as it is.

    Raises:
        UserError: options are unknown, are given twice, or have no value.
    """
    text, values, problems = split_options(prompt)
    if problems:
        raise UserError(problems[0] if len(problems) == 1 else Joined("; ", problems))
    return text, values


def split_options(prompt: str) -> tuple[str, dict[str, Any], list[str]]:
    """Separate the text of a preview prompt from its options, as `read_options` does.

    Returns:
        The text, the values of the usable options, and what is wrong with the others, one line each.
    """
    text, *parts = _OPTION.split(prompt)
    if not parts:
        return prompt, {}, []
    values: dict[str, Any] = {}
    problems: list[str] = []
    for option, value in zip(parts[::2], map(str.strip, parts[1::2]), strict=True):
        name = OPTIONS.get(option, "")
        if not name:
            problems.append(_describe_unknown(option))
        elif name in values:
            problems.append(Message("--{option}: {name} is given twice", option=option, name=name))
        elif not value and name != "negative":  # an empty negative prompt is one
            problems.append(Message("--{option} needs a value", option=option))
        else:
            values[name] = value if name == "negative" else _read_number(value)
    return text.strip(), values, problems


def _describe_unknown(option: str) -> Message:
    """Return why a word after -- is no option, with the spelling that was probably meant."""
    known = ", ".join(f"--{name}" for name in OPTIONS)
    name, *rest = re.split(r"\W+", unicodedata.normalize("NFKC", option), maxsplit=1)
    if name.lower() not in OPTIONS:
        return Message("a prompt has no option --{option}; the options are: {known}", option=option, known=known)
    meant = " ".join([f"--{name.lower()}", *rest]).rstrip()
    return Message(
        "a prompt has no option --{option}. Write {meant}; the options are: {known}",
        option=option,
        meant=meant,
        known=known,
    )


def _read_number(text: str) -> int | float | str:
    if _WHOLE.fullmatch(text):
        return int(text)
    return float(text) if _DECIMAL.fullmatch(text) else text


def split_preview(section: Preview) -> list[Preview]:
    """Return a `[preview]` table for each prompt of a table that was checked.

    Each has the prompt's text, its control images, its seed counted up from that of the table, and its options in place
    of the table's values.
    """
    tables = []
    for number, prompt in enumerate(section.prompts):
        text, options = read_options(prompt)
        checked = Preview.model_validate(options)
        own = {"prompts": [text], "seed": section.seed + number, "controls": section.controls[number : number + 1]}
        own |= {name: getattr(checked, name) for name in options}
        tables.append(section.model_copy(update=own))
    return tables
