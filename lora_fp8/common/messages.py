"""The translations of messages: one gettext catalogue a language, `zh_CN.po`, with the English template as key.

    translate("zh-CN", Message("folder {path} does not exist", path="/data"))    文件夹 /data 不存在

`python scripts/messages.py` brings the catalogue up to date with the templates in the source; tests/test_messages.py
finds what is missing.

JSON keeps only the English text of a message. `add_translations` writes the others beside it, `restore` reads them.
"""

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import Joined, Message, Phrase, Translated, UserError
from . import system
from .json_files import read_json

FOLDER = Path(__file__).resolve().parent
CATALOGUES = {"zh-CN": "zh_CN.po"}
LANGUAGE = "LORA_FP8_LANG"
"""Environment variable that --lang sets. It decides before LC_ALL, LC_MESSAGES and LANG."""
MESSAGE = "LORA_FP8_MESSAGE"
"""Environment variable with the file into which a command writes the message that it ends with: see `read_message`."""
FIELD = "translations"
"""Field of a JSON object: language -> English text -> its translation."""


@cache
def load(language: str) -> dict[str, str]:
    """Return the translated templates of a language's catalogue by their English ones. English has none."""
    if language not in CATALOGUES:
        return {}
    from babel.messages.pofile import read_po  # 30 ms, which an English command need not wait

    with open(FOLDER / CATALOGUES[language], "rb") as file:
        return {str(entry.id): str(entry.string) for entry in read_po(file) if entry.id and entry.string}


def choose_language(wanted: str) -> str:
    """Return the language for "zh", "zh_CN.UTF-8" or another tag: one that has a catalogue, or "en"."""
    return _find_language(wanted) or "en"


def require_language(wanted: str, option: str) -> str:
    """Return the language for a tag that an option has.

    Raises:
        UserError: it is none that messages exist in; the languages of an environment may be others.
    """
    language = _find_language(wanted)
    if not language:
        names = ", ".join(("en", *(name.split("-")[0] for name in CATALOGUES)))
        raise UserError(
            Message(
                "{option}: there are no messages in the language {given}; accepted: {names}",
                option=option,
                given=repr(wanted),
                names=names,
            )
        )
    return language


def _find_language(wanted: str) -> str:
    tag = re.split("[-_.@]", wanted.strip().lower())[0]
    return next((language for language in ("en", *CATALOGUES) if language.split("-")[0] == tag), "")


def get_language() -> str:
    """Return the language of what commands print: that of --lang, else of the environment, else of Windows."""
    names = (LANGUAGE, "LC_ALL", "LC_MESSAGES", "LANG")
    stated = next((value for name in names if (value := os.environ.get(name))), "")
    return choose_language(stated or system.find_ui_language())


def translate(language: str, text: str) -> str:
    """Return a message in a language; in English, where there is no translation. Plain text is returned as it is."""
    if not isinstance(text, Message) or language not in CATALOGUES:
        return text
    if isinstance(text, Translated):
        return text.translations.get(language, text)
    template = load(language).get(text.template, text.template)
    if isinstance(text, Joined):
        return template.join(translate(language, part) for part in text.parts)
    if isinstance(text, Phrase):
        return template
    return template.format(
        **{name: translate(language, value) if isinstance(value, str) else value for name, value in text.values.items()}
    )


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
    for message in _find_messages(content):
        for language in CATALOGUES:
            if (translated := translate(language, message)) != message:
                translations.setdefault(language, {})[str.__str__(message)] = translated
    return {**content, FIELD: translations} if translations else content


def write_message(file: Path, text: str) -> None:
    """Write a message for the process that started this one."""
    file.write_text(json.dumps(add_translations({"text": text})), encoding="utf-8")


def read_message(file: Path) -> str:
    """Return the message that a command ended with, from the file that `MESSAGE` named; "" if it left none."""
    try:
        return str(restore(read_json(file))["text"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _find_messages(content: Any) -> Iterator[Message]:
    if isinstance(content, Message):
        yield content
    elif isinstance(content, dict):
        for key, value in content.items():
            yield from _find_messages(key)
            yield from _find_messages(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from _find_messages(value)


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
        return {_restore(key, texts): _restore(value, texts) for key, value in content.items()}
    return [_restore(value, texts) for value in content] if isinstance(content, list) else content
