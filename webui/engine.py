"""Run commands that need torch in processes of their own; arguments are a list, answers are JSON."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from lora_fp8.common.messages import restore
from lora_fp8.errors import Message, UserError

SECONDS = 600


def run_command(command: str, arguments: Sequence[str], seconds: float = SECONDS, verdicts: bool = False) -> Any:
    """Run `lora-fp8 COMMAND --json ARGUMENTS` and return its answer.

    Args:
        verdicts: exit code 3 with an answer is an answer: verify found a failed check.

    Raises:
        UserError: it refused or failed (with its message), or it took too long.
    """
    line = [sys.executable, "-m", "lora_fp8", command, "--json", *arguments]
    try:
        done = subprocess.run(
            line,
            capture_output=True,
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONUTF8": "1", "LORA_FP8_LANG": "en"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            Message(
                "lora-fp8 {command}: not ready after {seconds} s, and ended", command=command, seconds=f"{seconds:g}"
            )
        ) from None
    message = done.stderr.decode(errors="replace").strip()
    if done.returncode and not (verdicts and done.returncode == 3 and done.stdout.strip()):
        last = message.splitlines()[-1] if message else f"ended with exit code {done.returncode}"
        raise UserError(message if done.returncode in (2, 3) and len(message) < 2000 else last)
    try:
        return restore(json.loads(done.stdout))
    except ValueError:
        raise UserError(Message("lora-fp8 {command}: answered something else than JSON", command=command)) from None
