"""Every sentence of the page, in English and Chinese.

`texts/*.toml` holds one table per sentence, an entry per language:

    ["runs.stop"]
    en = "Stop and save"
    zh-CN = "保存并停止"

The page is laid out once per language (`/en/`, `/zh-CN/`), so that labels and what the server says later come from the
same place and never disagree. Places for values are named: "{step} of {steps}".

What the engine says (a wrong setting, how a job ended) is English; `tell` puts it into the page's language by the
patterns of `texts/engine.toml`, and leaves a line that no pattern knows as it is.

`texts/settings.toml` holds what the settings of a training are called (`label`, `meaning`, `choice`).
"""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from . import form

FOLDER = Path(__file__).resolve().parent / "texts"
LANGUAGES = {"en": "English", "zh-CN": "中文"}
SETTINGS = "settings.toml"


@cache
def catalogue() -> dict[str, dict[str, str]]:
    """Every sentence by its key; each has every language."""
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
    """The sentence of this key.

    Raises:
        KeyError: no such key, or no such value: a mistake in the page, which its tests look for.
    """
    return catalogue()[key][language].format(**values)


def preferred(accepted: str) -> str:
    """The first language of an Accept-Language header that the page has; English otherwise."""
    for entry in accepted.split(","):
        tag = entry.split(";")[0].strip().lower()
        for language in LANGUAGES:
            if tag and tag.split("-")[0] == language.split("-")[0].lower():
                return language
    return "en"


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Engine lines: what the English one looks like, and the key of it; what stands around others first, then the
    pattern that says most."""
    found = []
    for key, texts in catalogue().items():
        if key.startswith("engine."):
            parts = re.split(r"\{(\w+)\}", texts["en"])
            pattern = "".join(f"(?P<{part}>.+?)" if i % 2 else re.escape(_plain(part)) for i, part in enumerate(parts))
            said = sum(map(len, parts[::2])) + (1000 if key.startswith("engine.in.") else 0)
            found.append((said, re.compile(pattern + r"\Z", re.DOTALL), key))
    return [(pattern, key) for _, pattern, key in sorted(found, key=lambda one: -one[0])]


def _plain(part: str) -> str:
    return part.replace("{{", "{").replace("}}", "}")


KEYED = re.compile(r"(?P<key>[\w.-]+|[^\s:]*/[^:\n]*): (?P<line>.+)", re.DOTALL)
"""The setting or the path that most lines begin with."""
FILED = re.compile(r"(?P<key>.+?\.\w{2,5}) (?P<line>(?:is|has|cannot|does) .+)", re.DOTALL)
"""The file that others begin with: what is wrong with a picture may be said of a mask or an upload, too."""


def tell(language: str, line: str) -> str:
    """A line of the engine in the page's language; several lines, each by itself."""
    if language == "en":
        return line
    if "\n" in line:
        return "\n".join(
            part[: len(part) - len(part.lstrip())] + tell(language, part.lstrip()) for part in line.split("\n")
        )
    for pattern, key in _patterns():
        if match := pattern.match(line):
            return _filled(language, key, match.groupdict())
    for pattern, between in ((KEYED, "："), (FILED, " ")):
        if (match := pattern.fullmatch(line)) and (told := tell(language, match["line"])) != match["line"]:
            return f"{match['key']}{between}{told}"
    return line


def tell_joined(language: str, line: str) -> str:
    """Remarks that the engine has joined by "; ", each by itself in the page's language."""
    if language == "en":
        return line
    if (match := KEYED.fullmatch(line)) and "." in match["key"]:
        told = tell_joined(language, match["line"])
        if told == match["line"] and (said := next(_alone(language, line), None)) is not None:
            return said  # what is in front is a part of the sentence
        return f"{match['key']}：{told}"
    parts, told = line.split("; "), []
    while parts:
        # The longest beginning that is one remark: it may have semicolons of its own, but not among its values.
        for end in range(len(parts), 0, -1):
            one = "; ".join(parts[:end])
            said = next(_alone(language, one), None)
            if said is not None or end == 1:
                told.append(one if said is None else said)
                parts = parts[end:]
                break
    return "；".join(told)


def _alone(language: str, line: str) -> Iterator[str]:
    """What the patterns make of the line of which no value holds a further remark."""
    for pattern, key in _patterns():
        if (match := pattern.match(line)) and not any("; " in value for value in match.groupdict().values()):
            yield _filled(language, key, match.groupdict())


def _filled(language: str, key: str, parts: dict[str, str]) -> str:
    """The sentence of this key; messages and descriptions of settings among its values are told, too."""
    parts |= {name: tell(language, parts[name]) for name in ("line", "why", "where") if name in parts}
    if "lines" in parts:
        parts["lines"] = tell_joined(language, parts["lines"])
    if "what" in parts:
        parts["what"] = _meanings(language).get(parts["what"], parts["what"])
    return catalogue()[key][language].format(**parts)


# ---------------------------------------------------------------------------------------------------------------------
# Settings


@cache
def named() -> dict[str, dict[str, Any]]:
    """What settings.toml says of each setting; tables of the config are "section" and "section.adapter"."""
    return tomllib.loads((FOLDER / SETTINGS).read_text(encoding="utf-8"))


def label(language: str, key: str) -> str:
    """What a setting is called; its key where settings.toml has no name for it yet."""
    return named().get(key, {}).get(language, key)


def meaning(language: str, key: str, description: str) -> str:
    """What a setting is for: its description, in the page's language, or what the page says better beside its form."""
    return named().get(key, {}).get("help-en" if language == "en" else "help", description)


def choice(language: str, key: str, word: str) -> str:
    """How a word that a setting accepts is shown."""
    return named().get(key, {}).get("choices-en" if language == "en" else "choices", {}).get(word, word)


@cache
def _meanings(language: str) -> dict[str, str]:
    """The engine's descriptions of settings in the page's language."""
    known = {f"section.{name}" if name else "section": text for name, text in form.sections().items()}
    for one in form.settings().values():
        known |= {column.key: column.description for column in one.columns} | {one.key: one.description}
    return {text.strip(): meaning(language, key, text) for key, text in known.items()}
