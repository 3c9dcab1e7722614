"""Every text of the page in English and Chinese.

`texts/*.toml` holds one table per text, with an entry per language:

    ["runs.stop"]
    en = "Stop and save"
    zh-CN = "保存并停止"

The page is laid out once per language (`/en/`, `/zh-CN/`), so that labels and later answers of the server have the same
source and never disagree. Placeholders are named: "{step} of {steps}". `en-one` (or `zh-CN-one`) is the text for a
`count` of 1, where it is another one.

Messages of the engine (a wrong setting, how a job ended) are English; `lora_fp8.common.messages` has their
translations.

`texts/settings.toml` holds the names of the training settings (`get_label`, `get_help`, `get_choice_label`).
"""

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from lora_fp8.common import messages

FOLDER = Path(__file__).resolve().parent / "texts"
LANGUAGES = {"en": "English", "zh-CN": "中文"}
SHORT = {"zh": "zh-CN", "zh-cn": "zh-CN", "cn": "zh-CN"}
"""What people type in an address -> the language that they mean."""
SETTINGS = "settings.toml"


@cache
def load_catalogue() -> dict[str, dict[str, str]]:
    """Load every text by key; each has every language."""
    catalogue: dict[str, dict[str, str]] = {}
    for file in sorted(FOLDER.glob("*.toml")):
        if file.name == SETTINGS:
            continue
        for key, texts in tomllib.loads(file.read_text(encoding="utf-8")).items():
            if key in catalogue:
                raise ValueError(f"{file.name}: {key!r} stands in another file of texts/, too")
            catalogue[key] = texts
    return catalogue


def say(language: str, key: str, **values: Any) -> str:
    """Return the text of this key, filled in.

    Raises:
        KeyError: there is no such key or value: a mistake in the page, which its tests look for.
    """
    texts = load_catalogue()[key]
    text = texts.get(f"{language}-one", texts[language]) if str(values.get("count")) == "1" else texts[language]
    return text.format(**values)


def choose_language(accepted: str) -> str:
    """Return the first language of an Accept-Language header that the page has; English otherwise."""
    for entry in accepted.split(","):
        tag = entry.split(";")[0].strip().lower()
        for language in LANGUAGES:
            if tag and tag.split("-")[0] == language.split("-")[0].lower():
                return language
    return "en"


def translate(language: str, line: str) -> str:
    """Translate a message of the engine. Plain text, such as a name, is returned as it is."""
    return messages.translate(language, line)


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
