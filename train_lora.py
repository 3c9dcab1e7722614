"""Train a LoRA: `accelerate launch train_lora.py --config configs/debug.toml`.

This script is `lora-fp8 train` for `accelerate launch` (one process, or several with `--multi_gpu --num_processes N`,
which on a machine without a GPU makes N CPU processes). It holds no logic.

accelerate's launcher turns every exit code but 0 into 1. The run folder records how a run ended: "state" in status.json
is "done", "stopped" (saved; --resume continues) or "error" (see the last line of events.jsonl).
"""

import argparse
import os

from lora_fp8.cli.commands import run_guarded
from lora_fp8.cli.training import train_or_resume
from lora_fp8.common.messages import LANGUAGE

parser = argparse.ArgumentParser(
    description="Train a LoRA from a TOML config.",
    epilog="Exit codes: 0 done, 2 wrong input, 3 failed, 75 stopped. "
    "accelerate launch turns all but 0 into 1: see the state in the run's status.json.",
)
parser.add_argument("--config", required=True, help="TOML config. With --resume its run folder must exist.")
parser.add_argument(
    "--set",
    action="append",
    default=[],
    metavar="KEY=VALUE",
    help="Setting to override, such as train.steps=500. Repeatable.",
)
parser.add_argument("--resume", action="store_true", help="Resume the config's run from its newest checkpoint.")
parser.add_argument("--lang", help="Language of messages: en or zh. Default: that of LANG.")
parser.add_argument("--json", action="store_true", help="Print events as JSON lines.")

if __name__ == "__main__":
    arguments = parser.parse_args()
    if arguments.lang:
        os.environ[LANGUAGE] = arguments.lang
    run_guarded(
        lambda: train_or_resume(arguments.config, arguments.set, resume=arguments.resume, as_json=arguments.json)
    )
