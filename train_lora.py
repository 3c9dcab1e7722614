"""Train a LoRA: `accelerate launch train_lora.py --config configs/debug.toml`.

The same as `lora-fp8 train`, as a script for `accelerate launch` (one process, or several with
`--multi_gpu --num_processes N`, which on a machine without a GPU makes N CPU processes). It holds no logic.

accelerate's launcher turns every exit code but 0 into 1. How a run ended then stands in its folder: "state" in
status.json is "done", "stopped" (saved; --resume goes on) or "error" (the last line of events.jsonl says which).
"""

import argparse

from lora_fp8.cli.commands import guarded, train_or_resume

parser = argparse.ArgumentParser(
    description="Train a LoRA from a TOML config.",
    epilog="Exit codes: 0 done, 2 wrong input, 3 failed, 75 stopped. "
    "accelerate launch makes 1 of all but 0: how a run ended is the state in its status.json.",
)
parser.add_argument("--config", required=True, help="TOML config; with --resume, its run folder must exist")
parser.add_argument(
    "--set", action="append", default=[], metavar="KEY=VALUE", help="override one setting, such as train.steps=500"
)
parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of this config's run")
parser.add_argument("--json", action="store_true", help="print events as JSON lines instead of text")

if __name__ == "__main__":
    arguments = parser.parse_args()
    guarded(lambda: train_or_resume(arguments.config, arguments.set, resume=arguments.resume, as_json=arguments.json))
