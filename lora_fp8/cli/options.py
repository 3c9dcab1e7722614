"""Arguments and options that several commands share."""

import json
from typing import Any

import typer

from ..common.messages import add_translations

CONFIG = typer.Argument(..., metavar="CONFIG", help="Config file of the job.")
RUN = typer.Argument(..., metavar="RUN", help="Run folder.")
SET = typer.Option([], "--set", metavar="KEY=VALUE", help="Setting to override, such as train.steps=500. Repeatable.")
JSON = typer.Option(False, "--json", help="Print JSON.")
DTYPE = typer.Option("", help="Dtype of the output: bf16, fp16 or fp32. Default: that of the files.")
FOLDER = typer.Argument(..., metavar="FOLDER", help="Folder of images with captions beside them.")


def print_json(content: Any) -> None:
    """Print the answer of --json. Its messages are English, with their translations beside them."""
    print(json.dumps(add_translations(content) if isinstance(content, dict) else content, ensure_ascii=False, indent=1))
