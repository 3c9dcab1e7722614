"""The entry point of `lora-fp8`, and how an error becomes a message and an exit code.

A command is a few lines over a library function, which it imports only when it runs; the files beside this one hold a
group of commands each.

Exit codes: 0 done; 2 wrong input (a message, no traceback); 3 failed while running; 75 stopped early, can be resumed.
"""

import contextlib
import errno
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from ..common.messages import LANGUAGE, MESSAGE, require_language, without_home, write_message
from ..errors import Message, UserError, reason
from . import base_models, dataset, drawing, images, jobs, lora_files, new, programs, remote, reports, training
from .events import escape
from .help import Program, explain
from .options import end_process, print_lines
from .streams import prepare_streams

app = Program(
    help="Train LoRAs for diffusion models on a base model frozen in FP8, and verify that the files work.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""typer's UsageError, which it does not export."""
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOLCK)
"""Errors that make a path wrong input; other errors of the system may not occur the next time."""


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from .. import __version__

        print(f"lora-fp8 {__version__}")
        raise typer.Exit


def _choose_language(lang: str) -> str:
    if lang:
        os.environ[LANGUAGE] = require_language(lang, "--lang")
    return lang


@app.callback()
def _read_options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
    lang: str = typer.Option(
        "",
        callback=_choose_language,
        is_eager=True,
        help="Language of messages: en or zh. Default: from the environment variable LORA_FP8_LANG or LANG, or the "
        "language of Windows.",
    ),
) -> None:
    pass


def run_program() -> None:
    """Run the command line as a process of its own: the entry point of `lora-fp8`."""
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    end_process(code)


def main() -> None:
    """Run the command line in `sys.argv`."""
    run_guarded(_run)


def _run() -> None:
    """Run a command, and turn a mistake in the command line into a message."""
    try:
        code = app(prog_name="lora-fp8", standalone_mode=False)
        sys.stdout.flush()  # or Python would do it at the end, and report what fails as ignored
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error, file=sys.stderr)
            sys.exit(2)
        raise UserError(explain(error)) from None
    if code == 130:  # what typer makes of Ctrl-C, without a word
        raise KeyboardInterrupt
    if isinstance(code, int):
        sys.exit(code)


def run_guarded(action: Callable[[], Any]) -> None:
    """Run an action, and turn an error into one clear message and its exit code."""
    # The notices of the libraries (no torchvision, no optional kernel, keys of untrained encoders) do not help our
    # users. They appear if these variables are set.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # peft imports torchao if it is installed, and torchao reports kernels that it has for other machines.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    prepare_streams()
    pressed: list[int] = []

    def interrupt(number: int, frame: Any) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(ValueError):  # not the main thread, which alone is interrupted
            signal.signal(signal.SIGINT, interrupt)
    try:
        action()
    except KeyboardInterrupt:
        _fail(Message("interrupted"), 130)
    except Exception as error:
        from ..errors import RunFailure, Stopped

        if pressed:  # a library that was being imported makes an error of its own of it
            _fail(Message("interrupted"), 130)
        if isinstance(error, UserError):
            _fail(str(error), 2)
        if isinstance(error, Stopped):
            _fail(str(error), 75)
        if isinstance(error, RunFailure):
            _fail(str(error), 3)
        if isinstance(error, FileNotFoundError) and error.filename is None and not _has_current_folder():
            _fail(Message("the current folder was deleted; change to another one (cd)"), 2)
        if isinstance(error, OSError) and error.filename is not None:  # no permission, a full disk
            message = Message("{path}: {why}", path=os.fsdecode(error.filename), why=reason(error))
            _fail(message, 2 if error.errno in REFUSED else 3)
        raise
    finally:
        if signal.getsignal(signal.SIGINT) is interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)


for group in (new, training, base_models, lora_files, drawing, reports, images, programs, jobs, remote):
    group.add_to(app)
app.add_typer(dataset.dataset_app, name="dataset")


def _has_current_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _fail(message: str, code: int) -> None:
    # All processes of a job find the same mistake and stop together, so only one reports it. A failure while running
    # may occur in one process alone.
    rank = os.environ.get("RANK", "0")
    if rank == "0" and (place := os.environ.get(MESSAGE)):  # set by the queue and the page, which show what is wrong
        text = without_home(message.strip() if type(message) is str else message)
        with contextlib.suppress(OSError):  # a full disk must not change the exit code
            write_message(Path(place), text.map(escape) if isinstance(text, Message) else escape(text))
    if rank == "0":
        print_lines(message, file=sys.stderr)
    elif code == 3:
        print_lines(Message("process {rank}: {line}", rank=rank, line=message), file=sys.stderr)
    sys.exit(code)
