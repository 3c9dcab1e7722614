"""What several commands share: arguments, options, and how they print."""

import contextlib
import functools
import gc
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from ..common.messages import add_translations, get_language, translate
from ..common.shell import quote_path
from ..errors import Message, UserError

if TYPE_CHECKING:
    from ..run import Run
    from ..settings import Job


def _refuse_contradictions(overrides: list[str]) -> list[str]:
    """Return the values of --set.

    Raises:
        UserError: a setting has two different values.
    """
    values: dict[str, str] = {}
    for override in overrides:
        key, value = (part.strip() for part in override.partition("=")[::2])
        if (first := values.setdefault(key, value)) != value:
            raise UserError(
                Message(
                    "--set {key}: the setting is given twice, as {first} and as {value}. Keep one",
                    key=key,
                    first=first,
                    value=value,
                )
            )
    return overrides


CONFIG = typer.Argument(..., metavar="CONFIG", help="Config file of the job.")
RUN = typer.Argument(..., metavar="RUN", help="Run folder.")
SET = typer.Option(
    [],
    "--set",
    metavar="KEY=VALUE",
    help="Setting to override, such as train.steps=500. Repeatable.",
    callback=_refuse_contradictions,
)
JSON = typer.Option(False, "--json", help="Print JSON.")
DTYPE = typer.Option("", help="Dtype of the output: bf16, fp16 or fp32. Default: as in the files.")
FOLDER = typer.Argument(..., metavar="FOLDER", help="Folder of images with captions beside them.")


def load_config(path: Path, overrides: list[str]) -> "Job":
    """Load a job's config, as `config.load` does.

    Raises:
        UserError: with every problem of the file. For a file of another trainer it is the command that converts it.
    """
    from .. import config

    try:
        return config.load(path, overrides)
    except UserError:
        if command := _find_importer(path):
            raise UserError(
                Message(
                    "{path}: this is a settings file of another trainer. Convert it: {command}",
                    path=path,
                    command=command,
                )
            ) from None
        raise


def _find_importer(path: Path) -> str:
    """Return the command that imports a file of another trainer; "" if it is none."""
    from .. import importing

    try:
        source = importing.read_source(path)
        if isinstance(source.data, dict) and {"family", "path"} & set(source.data.get("model") or ()):
            return ""  # a config with mistakes in it
        importing.recognise(source)
    except (UserError, OSError, TypeError):
        return ""
    return f"lora-fp8 import-config {quote_path(path)}"


def open_run(folder: Path) -> "Run":
    """Open a run folder.

    Raises:
        UserError: there is no run in it. For a config file it names the folder of its run.
    """
    from ..run import Run

    if folder.is_file():
        raise UserError(_describe_file(folder))
    return Run.open(folder)


def _describe_file(path: Path) -> Message:
    """Return what to say of a file in place of a run folder."""
    from .. import config

    try:
        run = config.load(path).run_folder
    except UserError:
        return Message("{path}: this is a file; give a run folder", path=path)
    if (run / "config.toml").is_file():
        return Message("{path}: this is a config; give its run folder: {run}", path=path, run=quote_path(run))
    return Message(
        "{path}: this is a config, and its run folder {run} does not exist yet. `{command}` starts the run",
        path=path,
        run=quote_path(run),
        command=f"lora-fp8 train {quote_path(path)}",
    )


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Keep the garbage collector off while libraries are imported.

    It would go through all objects of torch and diffusers again and again: a fifth of the time of `check`.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def answers(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command that prints an answer and changes nothing: its process ends as soon as the answer is out."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        global _has_answered
        _has_answered = True
        with without_collection():
            command(*arguments, **options)

    return run


_has_answered = False
"""True once this process runs a command that is decorated with `answers`."""


def end_process(code: object) -> None:
    """End this process with an exit code, at once if it only had to answer.

    Python would first take apart the million objects of torch and diffusers: a quarter of the time of `check`.
    """
    is_alone = threading.active_count() == 1 and not multiprocessing.active_children()
    if _has_answered and is_alone and isinstance(code, int | None):
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:  # nobody reads: Python says so itself
            sys.exit(code)
        os._exit(code or 0)
    sys.exit(code)  # type: ignore[arg-type]  # whatever SystemExit held


def print_lines(*lines: str, file: TextIO | None = None) -> None:
    """Print lines for people, in their language."""
    language = get_language()
    for line in lines:
        print(translate(language, line), file=file or sys.stdout, flush=True)


def print_json(content: Any) -> None:
    """Print the answer of --json. Its messages are English, with their translations beside them."""
    content = add_translations(content) if isinstance(content, dict) else content
    print(json.dumps(content, ensure_ascii=False, indent=1), flush=True)
