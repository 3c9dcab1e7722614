"""What several commands share: arguments, options, and how they print."""

import json
import os
import sys
from typing import Any, TextIO

import typer

from ..common.messages import add_translations, choose_language, translate

CONFIG = typer.Argument(..., metavar="CONFIG", help="Config file of the job.")
RUN = typer.Argument(..., metavar="RUN", help="Run folder.")
SET = typer.Option([], "--set", metavar="KEY=VALUE", help="Setting to override, such as train.steps=500. Repeatable.")
JSON = typer.Option(False, "--json", help="Print JSON.")
DTYPE = typer.Option("", help="Dtype of the output: bf16, fp16 or fp32. Default: that of the files.")
FOLDER = typer.Argument(..., metavar="FOLDER", help="Folder of images with captions beside them.")


LANGUAGE = "LORA_FP8_LANG"
"""Environment variable that --lang sets. It decides before LC_ALL, LC_MESSAGES and LANG."""


def get_language() -> str:
    """Return the language of what the commands print: that of --lang, else of the environment."""
    names = (LANGUAGE, "LC_ALL", "LC_MESSAGES", "LANG")
    return choose_language(next((value for name in names if (value := os.environ.get(name))), ""))


def print_lines(*lines: str, file: TextIO | None = None) -> None:
    """Print lines for people, in their language."""
    language = get_language()
    for line in lines:
        print(translate(language, line), file=file or sys.stdout, flush=True)


def print_json(content: Any) -> None:
    """Print the answer of --json. Its messages are English, with their translations beside them."""
    print(json.dumps(add_translations(content) if isinstance(content, dict) else content, ensure_ascii=False, indent=1))
