"""The commands that start a demo, the page or an MCP server; commands.py adds them."""

import importlib.util
import sys
from pathlib import Path

import typer

from ..errors import Message
from .events import print_event, print_json_line
from .options import JSON, print_json, print_lines
from .streams import works


def add_to(app: typer.Typer) -> None:
    """Add these commands to `lora-fp8`."""
    for command in (doctor, demo, ui, mcp):
        app.command()(command)


def doctor(
    output_dir: str = typer.Option("runs", help="Folder of your runs: output_dir of your config."),
    cache_dir: str = typer.Option("cache", help="Cache folder: dataset.cache_dir of your runs."),
    as_json: bool = JSON,
) -> None:
    """Check this machine: versions, GPU, precisions, disk and hub. The exit code is 0 if a training can run, else 2."""
    from ..plan import machine

    result = machine.examine(machine.get_folders(output_dir, cache_dir))
    if as_json:
        print_json(result.to_json())
    else:
        print_lines(*result.format_lines())
    if result.problems:
        sys.exit(2)


@works
def demo(
    family: str = typer.Option("sd15", help="Architecture: sd15 (UNet) or flux (DiT)."),
    out: Path = typer.Option(Path("runs"), help="Folder for the run folder."),
    as_json: bool = JSON,
) -> None:
    """Train a LoRA on the bundled miniature model. Draw previews before and after, and measure the difference."""
    from ..demo import show

    result = show.run(family, out, echo=print_json_line if as_json else print_event)
    if as_json:
        print_json(result.to_json())
    else:
        print_lines(*result.format_lines())
    if not result.ok:
        sys.exit(3)


@works
def ui(
    host: str = typer.Option(
        "127.0.0.1",
        help="Address to listen on. Addresses other than this machine's own (127.0.0.1) need a login (--user).",
    ),
    port: int = typer.Option(7860, min=0, max=65535, help="Port. 0: any free one."),
    root: list[Path] = typer.Option([], metavar="FOLDER", help="Folder that the page may read and write. Repeatable."),
    user: str = typer.Option("", help="Account that may log in; its password is $LORA_FP8_PASSWORD."),
    name: list[str] = typer.Option([], help="Host name of this machine behind a proxy. Repeatable."),
    open_browser: bool = typer.Option(False, "--open", help="Open the page in the browser."),
) -> None:
    """Start the web page. You start trainings in it, and see datasets, the queue and running jobs."""
    _require_packages("ui", "gradio", "psutil")
    from webui import server

    server.run(host, port, [path.absolute() for path in root], user, name, open_browser)


def mcp(
    root: list[Path] = typer.Option([], metavar="FOLDER", help="Folder that jobs may use. Repeatable."),
) -> None:
    """Start a Model Context Protocol server.

    It offers template, check, submit, list, status, events, stop and export.
    """
    _require_packages("mcp", "mcp", "psutil")
    from webui import mcp as tools

    tools.run([path.absolute() for path in root])


def _require_packages(extra: str, *packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        from .. import errors

        names = ", ".join(missing)
        raise errors.UserError(
            Message("this command needs {names}: pip install 'lora-fp8[{extra}]'", names=names, extra=extra)
        )
