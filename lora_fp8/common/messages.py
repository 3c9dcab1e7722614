"""The translations of messages: one gettext catalogue a language, `zh_CN.po`, with the English template as key.

    translate("zh-CN", Message("folder {path} does not exist", path="/data"))    文件夹 /data 不存在

`python scripts/messages.py` brings the catalogue up to date with the templates in the source; tests/test_messages.py
finds what is missing, and what nothing says any more.
"""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Message

if TYPE_CHECKING:
    from babel.messages.catalog import Message as Entry

FOLDER = Path(__file__).resolve().parent
CATALOGUES = {"zh-CN": "zh_CN.po"}


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


def translate(language: str, text: str) -> str:
    """Translate a message. Other text, and a message without a translation, is returned as it is."""
    if not isinstance(text, Message) or language not in CATALOGUES:
        return text
    catalogue = load(language)
    return text.fill(lambda template: catalogue.get(template, template))
