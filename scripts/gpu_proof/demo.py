"""Stage 5: train a whole job on the bundled miniature, also stopped and resumed to the same bytes."""

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .record import Context, Record

ROOT = Path(__file__).resolve().parent.parent.parent
STOPPED = 75
CONFIG = """
name = "{name}"
output_dir = {folder}

[model]
family = "sd15"
path = "demo"

[quantize]
compute = "{compute}"

[adapter]
targets = ["attn1.to_q", "attn2.to_v", "conv1"]

[dataset]
resolution = 64
bucket_step = 16

[[dataset.folders]]
path = {images}

[train]
steps = {steps}
batch_size = 2

[checkpoint]
every = {every}

[preview]
prompts = ["a zibo on a green background"]
steps = 4
"""


def run(record: Record, context: Context) -> None:
    """Train the demo base with decoded and with FP8 matmuls."""
    steps = 6 if context.toy else 60
    for compute in ("upcast",) if context.toy else ("upcast", "fp8"):
        if context.seconds_left <= 0:
            record.write(f"{compute}: a job trained through", None, note="not asked: no time left")
            continue
        record.ask(f"{compute}: a job trained through, verified", lambda c=compute: train_through(c, steps, context))
        record.ask(
            f"{compute}: stopped and resumed, the same bytes", lambda c=compute: stop_and_resume(c, steps, context)
        )


def train_through(compute: str, steps: int, context: Context) -> dict[str, Any]:
    """Run the job to its end and check the verification of its exported file."""
    folder = write_config(f"through_{compute}", compute, steps, context)
    started = time.perf_counter()
    code, words = command(["train", str(folder.with_suffix(".toml"))], context)
    verified = (folder / "verify.json").is_file()
    ok = code == 0 and verified and export_hash(folder) != ""
    seconds = time.perf_counter() - started
    return {"ok": ok, "value": seconds, "unit": "s", "note": "" if ok else f"exit code {code}: {words}"}


def stop_and_resume(compute: str, steps: int, context: Context) -> dict[str, Any]:
    """Ask a second run of the same job to stop at half of its steps, resume it, and compare the exported tensors."""
    folder = write_config(f"stopped_{compute}", compute, steps, context)
    with open(context.out / f"stopped_{compute}.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lora_fp8", "train", str(folder.with_suffix(".toml"))],
            cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        while process.poll() is None and newest_step(folder) < steps // 2 and context.seconds_left > 0:
            time.sleep(0.02)
        if process.poll() is None and newest_step(folder) == 0:
            process.kill()
            process.wait()
            return {"ok": False, "note": f"no step within the time; see stopped_{compute}.log"}
        if process.poll() is None:
            (folder / "control" / "stop").touch()
        code = process.wait()
    stopped_at = newest_step(folder)
    if code not in (0, STOPPED):
        return {"ok": False, "note": f"exit code {code}; see stopped_{compute}.log"}
    if code == STOPPED:
        code, words = command(["resume", str(folder)], context)
        if code != 0:
            return {"ok": False, "note": f"resume: exit code {code}: {words}"}
    one, other = export_hash(folder), export_hash(context.out / f"through_{compute}")
    how = (
        f"stopped after step {stopped_at} of {steps}"
        if stopped_at < steps
        else "it was done before it could be stopped"
    )
    return {"ok": bool(one) and one == other, "note": f"{how}; {one[:12]} and {other[:12]}"}


def write_config(name: str, compute: str, steps: int, context: Context) -> Path:
    """Write a job beside its run folder. Return the folder."""
    settings = {"name": name, "compute": compute, "steps": steps, "every": max(2, steps // 3)}
    places = {"folder": json.dumps(str(context.out)), "images": json.dumps(str(ROOT / "lora_fp8/demo/dataset"))}
    (context.out / f"{name}.toml").write_text(CONFIG.format(**settings, **places), encoding="utf-8")
    return context.out / name


def command(arguments: list[str], context: Context) -> tuple[int, str]:
    """Run a command of `lora-fp8`. Return its exit code and its last lines."""
    done = subprocess.run(
        [sys.executable, "-m", "lora_fp8", *arguments],
        cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=max(5.0, context.seconds_left + 10),
    )  # fmt: skip
    return done.returncode, " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])[:300]


def newest_step(folder: Path) -> int:
    """Return the step that status.json names."""
    try:
        return int(json.loads((folder / "status.json").read_text(encoding="utf-8")).get("step") or 0)
    except (OSError, ValueError):  # not there yet, or being replaced
        return 0


def export_hash(folder: Path) -> str:
    """Return the SHA-256 of all tensors of the exported LoRA files; "" where there are none."""
    files = sorted((folder / "export").glob("*.safetensors"))
    digest = hashlib.sha256()
    for path in files:
        with safe_open(path, "pt") as file:
            for key in sorted(file.keys()):
                tensor = file.get_tensor(key).contiguous()
                digest.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if files else ""
