"""The command that writes the report of a run: `lora-fp8 report`; commands.py adds it."""

from pathlib import Path

import typer

from ..common.messages import get_language, require_language
from ..errors import Message
from .options import JSON, RUN, print_json, print_lines


def add_to(app: typer.Typer) -> None:
    """Add this command to `lora-fp8`."""
    app.command()(report)


def report(
    folder: Path = RUN,
    output: Path | None = typer.Option(None, metavar="FILE", help="HTML file to write. Default: report.html in RUN."),
    lang: str = typer.Option("", help="Language of the report: en or zh. Default: as for messages."),
    drawn: list[Path] = typer.Option(
        [], "--drawing", metavar="DIR", help="Folder of `lora-fp8 draw` to show as a grid of strengths. Repeatable."
    ),
    as_json: bool = JSON,
) -> None:
    """Write a run's report: one HTML file that needs no network. It also works before the run has ended."""
    from ..tools import report as tool

    language = require_language(lang, "--lang") if lang else get_language()
    path = tool.write(folder, output, language, drawn)
    if as_json:
        print_json({"file": str(path), "bytes": path.stat().st_size})
    else:
        print_lines(Message("{path} written", path=path))
