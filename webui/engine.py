"""Run commands that need torch in processes of their own; arguments are a list, answers are JSON."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_fp8.common.messages import LANGUAGE, MESSAGE, read_message, restore
from lora_fp8.errors import Message, UserError

SECONDS = 600


@contextlib.contextmanager
def prepare_environment() -> Iterator[tuple[dict[str, str], Path]]:
    """Yield the environment for a command whose answer a program reads, and the file that its message comes in."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "message.json")
        yield {**os.environ, "PYTHONUTF8": "1", LANGUAGE: "en", MESSAGE: str(file)}, file


def run_command(command: str, arguments: Sequence[str], seconds: float = SECONDS, verdicts: bool = False) -> Any:
    """Run `lora-fp8 COMMAND --json ARGUMENTS` and return its answer.

    Args:
        verdicts: exit code 3 with an answer is an answer: verify found a failed check.

    Raises:
        UserError: it refused or failed (with its message), or it took too long.
    """
    line = [sys.executable, "-m", "lora_fp8", command, "--json", *arguments]
    with prepare_environment() as (environment, file):
        try:
            done = subprocess.run(
                line,
                capture_output=True,
                timeout=seconds,
                stdin=subprocess.DEVNULL,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                Message(
                    "lora-fp8 {command}: not finished after {seconds} s and ended",
                    command=command,
                    seconds=f"{seconds:g}",
                )
            ) from None
        message = read_message(file)
    if done.returncode and not (verdicts and done.returncode == 3 and done.stdout.strip()):
        raise UserError(message or describe_crash(done.stderr, done.returncode))
    try:
        return restore(json.loads(done.stdout))
    except ValueError:
        raise UserError(Message("lora-fp8 {command}: the output is not JSON", command=command)) from None


def describe_crash(output: bytes | str, code: int) -> str:
    """Return what is known of a command that ended without a message: its last line of output, or its exit code."""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else Message("exited with code {code}", code=code)
