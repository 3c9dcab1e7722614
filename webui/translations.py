"""Every text of the page in English and Chinese.

`texts/*.toml` holds one table per text, with an entry per language:

    ["runs.stop"]
    en = "Stop and save"
    zh-CN = "保存并停止"

The page is laid out once per language (`/en/`, `/zh-CN/`), so that labels and later answers of the server have the same
source and never disagree. Placeholders are named: "{step} of {steps}".

Messages of the engine (a wrong setting, how a job ended) are English; `lora_fp8.common.messages` has their
translations. `translate` looks them up by their templates. A message that came as plain text, from a file or another
process, is recognised by the patterns of the same templates, and one without a pattern is left as it is.

`texts/settings.toml` holds the names of the training settings (`get_label`, `get_help`, `get_choice_label`).
"""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from lora_fp8.common import messages
from lora_fp8.errors import Joined, Message

from . import form

FOLDER = Path(__file__).resolve().parent / "texts"
LANGUAGES = {"en": "English", "zh-CN": "中文"}
SETTINGS = "settings.toml"


@cache
def load_catalogue() -> dict[str, dict[str, str]]:
    """Load every text by key; each has every language."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(FOLDER.glob("*.toml")):
        if file.name == SETTINGS:
            continue
        for key, texts in tomllib.loads(file.read_text(encoding="utf-8")).items():
            if key in found:
                raise ValueError(f"{file.name}: {key!r} stands in another file of texts/, too")
            found[key] = texts
    return found


def say(language: str, key: str, **values: Any) -> str:
    """Return the text of this key, filled in.

    Raises:
        KeyError: there is no such key or value: a mistake in the page, which its tests look for.
    """
    return load_catalogue()[key][language].format(**values)


def choose_language(accepted: str) -> str:
    """Return the first language of an Accept-Language header that the page has; English otherwise."""
    for entry in accepted.split(","):
        tag = entry.split(";")[0].strip().lower()
        for language in LANGUAGES:
            if tag and tag.split("-")[0] == language.split("-")[0].lower():
                return language
    return "en"


@cache
def _compile_patterns(language: str) -> list[tuple[re.Pattern[str], str]]:
    """Compile a pattern for each template of a language's catalogue, with its translation.

    Templates that surround another message come first, then those with the most fixed text.
    """
    found = []
    for entry in messages.read(language):
        english = str(entry.id)
        parts = re.split(r"\{(\w+)\}", english)
        pattern = "".join(
            (f"(?P={part})" if part in parts[1:i:2] else f"(?P<{part}>.+?)")
            if i % 2
            else re.escape(_unescape_braces(part))
            for i, part in enumerate(parts)
        )
        weight = sum(map(len, parts[::2])) + (1000 if "surrounds another message" in entry.auto_comments else 0)
        if re.search("[A-Za-z]", "".join(parts[::2])):
            found.append((weight, re.compile(pattern + r"\Z", re.DOTALL), str(entry.string)))
    return [(pattern, translation) for _, pattern, translation in sorted(found, key=lambda one: -one[0])]


def _unescape_braces(part: str) -> str:
    return part.replace("{{", "{").replace("}}", "}")


KEYED = re.compile(
    r"(?P<key>[\w.-]+|(?:adapter\.ranks|optimizer\.lrs|quantize\.override)\.[^:\n]+|[^\s:]*/[^:\n]*): (?P<line>.+)",
    re.DOTALL,
)
"""Most messages begin with a setting or a path."""
FILED = re.compile(r"(?P<key>.+?\.\w{2,5}) (?P<line>(?:is|has|cannot|does) .+)", re.DOTALL)
"""Others begin with a file: what is wrong with an image can also be wrong with a mask or an upload."""


def translate(language: str, line: str) -> str:
    """Translate an engine message, line by line."""
    if language == "en":
        return line
    if isinstance(line, Message):
        return _translate_message(language, line)
    if "\n" in line:
        return "\n".join(
            part[: len(part) - len(part.lstrip())] + translate(language, part.lstrip()) for part in line.split("\n")
        )
    for pattern, translation in _compile_patterns(language):
        if match := pattern.match(line):
            return _fill_in(language, translation, match.groupdict())
    for pattern, between in ((KEYED, "："), (FILED, " ")):
        if (match := pattern.fullmatch(line)) and (translated := translate(language, match["line"])) != match["line"]:
            return f"{match['key']}{between}{translated}"
    return line


def _translate_message(language: str, message: Message) -> str:
    """Translate by the template. Values that came as plain text are recognised as `translate` does."""
    catalogue = messages.load(language)
    if isinstance(message, Joined):
        return catalogue.get(message.template, message.template).join(translate(language, p) for p in message.parts)
    values = {
        name: _translate_message(language, value) if isinstance(value, Message) else value
        for name, value in message.values.items()
    }
    plain = {name: value for name, value in values.items() if type(value) is str}
    return catalogue.get(message.template, message.template).format(**values | _recognise(language, plain))


def translate_joined(language: str, line: str) -> str:
    """Translate remarks that the engine has joined with "; ", each by itself."""
    if language == "en":
        return line
    if (match := KEYED.fullmatch(line)) and "." in match["key"]:
        translated = translate_joined(language, match["line"])
        if translated == match["line"] and (remark := next(_translate_alone(language, line), None)) is not None:
            return remark  # the part before the colon belongs to the sentence
        return f"{match['key']}：{translated}"
    parts = line.split("; ")
    remarks: list[str] = []
    while parts:
        # Take the longest beginning that is one remark. It may contain semicolons, but not in its values.
        for end in range(len(parts), 0, -1):
            one = "; ".join(parts[:end])
            remark = next(_translate_alone(language, one), None)
            if remark is not None or end == 1:
                remarks.append(one if remark is None else remark)
                parts = parts[end:]
                break
    return "；".join(remarks)


def _translate_alone(language: str, line: str) -> Iterator[str]:
    """Yield the translations of a line in which no value holds a further remark."""
    for pattern, translation in _compile_patterns(language):
        if (match := pattern.match(line)) and not any("; " in value for value in match.groupdict().values()):
            yield _fill_in(language, translation, match.groupdict())


def _fill_in(language: str, translation: str, parts: dict[str, str]) -> str:
    """Fill in a translation. Messages and descriptions of settings among its values are translated too."""
    return translation.format(**parts | _recognise(language, parts))


def _recognise(language: str, parts: dict[str, str]) -> dict[str, str]:
    """Translate those of these plain values whose names say that they are messages."""
    known: dict[str, str] = {
        name: translate(language, parts[name]) for name in ("line", "why", "where") if name in parts
    }
    if "lines" in parts:
        known["lines"] = translate_joined(language, parts["lines"])
    if "what" in parts:
        known["what"] = _map_descriptions(language).get(parts["what"], parts["what"])
    return known


# ---------------------------------------------------------------------------------------------------------------------
# Settings


@cache
def load_setting_texts() -> dict[str, dict[str, Any]]:
    """Load settings.toml: the texts of each setting. Tables of the config are "section" and "section.adapter"."""
    return tomllib.loads((FOLDER / SETTINGS).read_text(encoding="utf-8"))


def get_label(language: str, key: str) -> str:
    """Return the label of a setting, or its key if settings.toml has none yet."""
    return load_setting_texts().get(key, {}).get(language, key)


def get_help(language: str, key: str, description: str) -> str:
    """Return the help of a setting: its description, translated, or the page's own text for it."""
    return load_setting_texts().get(key, {}).get("help-en" if language == "en" else "help", description)


def get_choice_label(language: str, key: str, word: str) -> str:
    """Return the label of a word that a setting accepts."""
    return load_setting_texts().get(key, {}).get("choices-en" if language == "en" else "choices", {}).get(word, word)


@cache
def _map_descriptions(language: str) -> dict[str, str]:
    """Map the engine's descriptions of settings to their translations."""
    known = {f"section.{name}" if name else "section": text for name, text in form.sections().items()}
    for one in form.settings().values():
        known |= {column.key: column.description for column in one.columns} | {one.key: one.description}
    return {text.strip(): get_help(language, key, text) for key, text in known.items()}
