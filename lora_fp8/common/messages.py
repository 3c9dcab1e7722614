"""The translations of messages: one gettext catalogue a language, `zh_CN.po`, with the English template as key.

    translate("zh-CN", Message("folder {path} does not exist", path="/data"))    文件夹 /data 不存在

`python scripts/messages.py` brings the catalogue up to date with the templates in the source; tests/test_messages.py
finds what is missing.

JSON keeps only the English text of a message. `add_translations` writes the others beside it, `restore` reads them.
"""

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Joined, Message, Translated
from . import system

if TYPE_CHECKING:
    from babel.messages.catalog import Message as Entry

FOLDER = Path(__file__).resolve().parent
CATALOGUES = {"zh-CN": "zh_CN.po"}
FIELD = "translations"
"""Field of a JSON object: language -> English text -> its translation."""


@cache
def read(language: str) -> list["Entry"]:
    """Read a language's catalogue. English has none."""
    if language not in CATALOGUES:
        return []
    from babel.messages.pofile import read_po  # 30 ms, which an English command need not wait

    with open(FOLDER / CATALOGUES[language], "rb") as file:
        return [entry for entry in read_po(file) if entry.id and entry.string]


@cache
def load(language: str) -> dict[str, str]:
    """Return the translated templates by their English ones."""
    return {str(entry.id): str(entry.string) for entry in read(language)}


def choose_language(wanted: str) -> str:
    """Return the language for "zh", "zh_CN.UTF-8" or another tag: one that has a catalogue, or "en"."""
    tag = re.split("[-_.@]", wanted.strip().lower())[0]
    return next((language for language in CATALOGUES if language.split("-")[0] == tag), "en")


def translate(language: str, text: str, known: Mapping[str, str] | None = None) -> str:
    """Translate a message. What has no translation is returned as it is.

    Args:
        known: translations of further texts that messages quote, such as the descriptions of settings.
    """
    return _Translator(language, known or {}).translate(text) if language in CATALOGUES else text


def translate_joined(language: str, text: str, known: Mapping[str, str] | None = None) -> str:
    """Translate remarks that were joined with "; ", each by itself."""
    return _Translator(language, known or {}).translate_joined(text) if language in CATALOGUES else text


# ---------------------------------------------------------------------------------------------------------------------
# In JSON


def without_home(text: str) -> str:
    """Replace the home folder by `~` in all paths of a text. A message stays one."""
    if isinstance(text, Message):
        return text.map(without_home)
    home = os.path.expanduser("~")
    if len(Path(home).parts) < 2:  # "/", or unknown
        return text
    pattern, flags = re.escape(home), re.NOFLAG
    if system.WINDOWS:  # with either kind of separator, in any case, and doubled where a text quotes it
        pattern, flags = r"[\\/]+".join(map(re.escape, re.split(r"[\\/]+", home))), re.IGNORECASE
    return re.sub(rf"(?<![\w./~-]){pattern}(?=[/\\])", "~", text, flags=flags)


def add_translations(content: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with the translations of the messages anywhere in it, if it has any."""
    translations: dict[str, dict[str, str]] = {}
    for message in _messages_in(content):
        for language in CATALOGUES:
            if (translated := translate(language, message)) != message:
                translations.setdefault(language, {})[str.__str__(message)] = translated
    return {**content, FIELD: translations} if translations else content


def _messages_in(content: Any) -> Iterator[Message]:
    if isinstance(content, Message):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from _messages_in(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _messages_in(value)


def restore(content: Any) -> Any:
    """Return a JSON object with its texts that have translations as messages. Other content is returned as it is."""
    table = content.get(FIELD) if isinstance(content, dict) else None
    if not isinstance(table, dict):
        return content
    texts: dict[str, dict[str, str]] = {}
    for language, known in table.items():
        for text, translated in known.items() if isinstance(known, dict) else ():
            if isinstance(translated, str):
                texts.setdefault(text, {})[language] = translated
    return _restore({key: value for key, value in content.items() if key != FIELD}, texts)


def _restore(content: Any, texts: dict[str, dict[str, str]]) -> Any:
    if isinstance(content, str):
        return Translated(content, texts[content]) if content in texts else content
    if isinstance(content, dict):
        return {key: _restore(value, texts) for key, value in content.items()}
    return [_restore(value, texts) for value in content] if isinstance(content, list) else content


# ---------------------------------------------------------------------------------------------------------------------
# Texts that are not messages yet are recognised by the templates; this part goes with the last of them.

KEYED = re.compile(
    r"(?P<key>[\w.-]+|(?:adapter\.ranks|optimizer\.lrs|quantize\.override)\.[^:\n]+|[^\s:]*/[^:\n]*): (?P<line>.+)",
    re.DOTALL,
)
"""Most messages begin with a setting or a path."""
FILED = re.compile(r"(?P<key>.+?\.\w{2,5}) (?P<line>(?:is|has|cannot|does) .+)", re.DOTALL)
"""Others begin with a file: what is wrong with an image can also be wrong with a mask or an upload."""


TOO_GENERAL = ("{path} written", "{count} images", "note: {line}", "warning: {line}", "job {id}: {line}")
"""Templates that would be found in other sentences."""


@cache
def _compile_patterns(language: str) -> list[tuple[re.Pattern[str], str]]:
    """Compile a pattern for each template of a language's catalogue, with its translation.

    Templates that surround another message come first, then those with the most fixed text.
    """
    weighted = []
    for entry in read(language):
        parts = re.split(r"\{(\w+)\}", str(entry.id))
        pattern = "".join(
            (f"(?P={part})" if part in parts[1:i:2] else f"(?P<{part}>.+?)")
            if i % 2
            else re.escape(part.replace("{{", "{").replace("}}", "}"))
            for i, part in enumerate(parts)
        )
        weight = sum(map(len, parts[::2])) + (1000 if "surrounds another message" in entry.auto_comments else 0)
        if re.search("[A-Za-z]", "".join(parts[::2])) and entry.id not in TOO_GENERAL:
            weighted.append((weight, re.compile(pattern + r"\Z", re.DOTALL), str(entry.string)))
    return [(pattern, translation) for _, pattern, translation in sorted(weighted, key=lambda entry: -entry[0])]


class _Translator:
    def __init__(self, language: str, known: Mapping[str, str]):
        self.language, self.known = language, known
        self.catalogue, self.patterns = load(language), _compile_patterns(language)

    def translate(self, line: str) -> str:
        """Translate a message by its template, and other text line by line."""
        if isinstance(line, Translated):
            return line.translations.get(self.language, line)
        if isinstance(line, Message):
            return self._translate_message(line)
        if "\n" in line:
            return "\n".join(
                part[: len(part) - len(part.lstrip())] + self.translate(part.lstrip()) for part in line.split("\n")
            )
        for pattern, translation in self.patterns:
            if match := pattern.match(line):
                return self._fill_in(translation, match.groupdict())
        for pattern, between in ((KEYED, "："), (FILED, " ")):
            if (match := pattern.fullmatch(line)) and (translated := self.translate(match["line"])) != match["line"]:
                return f"{match['key']}{between}{translated}"
        return line

    def _translate_message(self, message: Message) -> str:
        template = self.catalogue.get(message.template, message.template)
        if isinstance(message, Joined):
            return template.join(map(self.translate, message.parts))
        values = {
            name: self.translate(value) if isinstance(value, Message) else value
            for name, value in message.values.items()
        }
        plain = {name: value for name, value in values.items() if type(message.values[name]) is str}
        return template.format(**values | self._recognise(plain))

    def translate_joined(self, line: str) -> str:
        if isinstance(line, Message):
            return self.translate(line)
        if (match := KEYED.fullmatch(line)) and "." in match["key"]:
            translated = self.translate_joined(match["line"])
            if translated == match["line"] and (remark := next(self._translate_alone(line), None)) is not None:
                return remark  # the part before the colon belongs to the sentence
            return f"{match['key']}：{translated}"
        parts = line.split("; ")
        remarks: list[str] = []
        while parts:
            # Take the longest beginning that is one remark. It may contain semicolons, but not in its values.
            for end in range(len(parts), 0, -1):
                beginning = "; ".join(parts[:end])
                remark = next(self._translate_alone(beginning), None)
                if remark is not None or end == 1:
                    remarks.append(beginning if remark is None else remark)
                    parts = parts[end:]
                    break
        return "；".join(remarks)

    def _translate_alone(self, line: str) -> Iterator[str]:
        """Yield the translations of a line in which no value holds a further remark."""
        for pattern, translation in self.patterns:
            if (match := pattern.match(line)) and not any("; " in value for value in match.groupdict().values()):
                yield self._fill_in(translation, match.groupdict())

    def _fill_in(self, translation: str, parts: dict[str, str]) -> str:
        return translation.format(**parts | self._recognise(parts))

    def _recognise(self, parts: dict[str, str]) -> dict[str, str]:
        """Translate those of these plain values whose names say that they are messages."""
        nested: dict[str, str] = {
            name: self.translate(parts[name]) for name in ("line", "why", "where") if name in parts
        }
        if "lines" in parts:
            nested["lines"] = self.translate_joined(parts["lines"])
        if "what" in parts:
            nested["what"] = self.known.get(parts["what"], parts["what"])
        return nested
