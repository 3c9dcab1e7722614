"""Stage 6: two processes on two GPUs (or, as a toy, on the CPU) train one job through `accelerate launch`."""

import subprocess
import sys
from typing import Any

import torch

from .demo import ROOT, UPCAST, compute_export_hash, write_config
from .record import Context, NotHere, Record


def run(record: Record, context: Context) -> None:
    """Launch one short job."""
    record.ask("two processes train one job to its end", lambda: launch(context))


def launch(context: Context) -> dict[str, Any]:
    """Run `accelerate launch train_lora.py` with two processes and look at the exit code and the export."""
    if context.device.type == "cuda" and torch.cuda.device_count() < 2:
        raise NotHere("needs two GPUs")
    folder = write_config(context.out / "two_processes", UPCAST, 4 if context.toy else 20, context)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    command += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--cpu"] if context.device.type == "cpu" else ["--multi_gpu"]
    command += ["--main_process_port", "0", "train_lora.py", "--config", str(folder.with_suffix(".toml"))]
    log = context.out / "two_processes.log"
    with open(log, "wb") as file:
        code = subprocess.run(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=max(5.0, context.seconds_left + 10)
        ).returncode
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    ok = code == 0 and compute_export_hash(folder) != ""
    return {"ok": ok, "note": "" if ok else f"exit code {code}: {''.join(last)[:300]}"}
