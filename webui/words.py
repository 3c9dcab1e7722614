"""Every sentence of the page, in English and Chinese.

`texts/*.toml` holds one table per sentence, an entry per language:

    ["runs.stop"]
    en = "Stop and save"
    zh-CN = "保存并停止"

The page is laid out once per language (`/en/`, `/zh-CN/`), so that labels and what the server says later come from the
same place and never disagree. Places for values are named: "{step} of {steps}".

What the engine says (a wrong setting, how a job ended) is English; `tell` puts it into the page's language by the
patterns of `texts/engine.toml`, and leaves a line that no pattern knows as it is.
"""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "texts"
LANGUAGES = {"en": "English", "zh-CN": "中文"}


@cache
def catalogue() -> dict[str, dict[str, str]]:
    """Every sentence by its key; each has every language."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted(FOLDER.glob("*.toml")):
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


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Engine lines: what the English one looks like, and the key of it."""
    found = []
    for key, texts in catalogue().items():
        if key.startswith("engine."):
            parts = re.split(r"\{(\w+)\}", texts["en"])
            pattern = "".join(f"(?P<{part}>.+?)" if i % 2 else re.escape(part) for i, part in enumerate(parts))
            found.append((re.compile(pattern + r"\Z", re.DOTALL), key))
    return found


def tell(language: str, line: str) -> str:
    """A line of the engine in the page's language."""
    if language == "en":
        return line
    for pattern, key in _patterns():
        if match := pattern.match(line):
            return catalogue()[key][language].format(**match.groupdict())
    return line
