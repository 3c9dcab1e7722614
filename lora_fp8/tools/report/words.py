"""The names of settings for people, in the words of the page.

They are data of the package `webui`, which is installed with this one. The file is read without importing that package,
which would need Gradio: a report is written where there is no page, too.
"""

import importlib.util
import tomllib
from functools import cache
from pathlib import Path

from ...common.messages import translate
from ...config.validation import find_model
from ...errors import Phrase


@cache
def _load() -> dict[str, dict[str, str]]:
    spec = importlib.util.find_spec("webui")
    if spec is None or spec.origin is None:
        return {}
    try:
        return tomllib.loads((Path(spec.origin).with_name("texts") / "settings.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # installed without its data
        return {}


def get_title(key: str, language: str) -> str:
    """Return the title of a setting; "" if there is none."""
    return str(_load().get(key, {}).get(language, ""))


def get_meaning(key: str, language: str) -> str:
    """Return what a setting is, in one or two sentences: those of the page, else its declaration's."""
    texts = _load().get(key, {})
    section, _, name = key.rpartition(".")
    model = find_model((section,) if section else ())
    field = model.model_fields.get(name) if model else None
    declared = translate(language, Phrase(field.description)) if field is not None and field.description else ""
    return str(texts.get("help-en" if language == "en" else "help") or declared)
