"""Stage 5: train a whole job on the bundled miniature, also stopped and resumed to the same bytes."""

import hashlib
import json
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
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

[memory]
cuda_graphs = {recorded}

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


@dataclass(frozen=True)
class Kind:
    """A way to train: the matmul, and whether passes are recorded as CUDA graphs."""

    compute: str
    recorded: bool = False

    @property
    def name(self) -> str:
        """Return the name in the rows of results."""
        return self.compute + " recorded" * self.recorded


UPCAST = Kind("upcast")
KINDS = (UPCAST, Kind("upcast", recorded=True), Kind("fp8"))


def run(record: Record, context: Context) -> None:
    """Train the demo base in several ways, all at the same time: most of a short job is starting it."""
    steps = 6 if context.toy else 60
    kinds = [UPCAST] if context.device.type == "cpu" else KINDS
    with ThreadPoolExecutor(2 * len(kinds)) as threads:
        through = {kind: threads.submit(train_through, kind, steps, context) for kind in kinds}
        stopped = {kind: threads.submit(stop_and_resume, kind, steps, context) for kind in kinds}
    for kind in kinds:
        record.ask(f"{kind.name}: a job trained through, verified", through[kind].result)
        record.ask(f"{kind.name}: stopped and resumed, the same bytes", lambda kind=kind: compare(stopped[kind]))
        if kind.recorded:
            pair = [get_run_folder(one, "through", context) for one in (kind, replace(kind, recorded=False))]
            record.ask(f"{kind.name}: the same bytes as unrecorded", lambda pair=pair: compare_exports(*pair))


def get_run_folder(kind: Kind, how: str, context: Context) -> Path:
    """Return the run folder of a job."""
    return context.out / f"{how}_{kind.name.replace(' ', '_')}"


def train_through(kind: Kind, steps: int, context: Context) -> dict[str, Any]:
    """Run the job to its end and check the verification of its exported file."""
    folder = write_config(get_run_folder(kind, "through", context), kind, steps, context)
    started = time.perf_counter()
    code, words = run_command(["train", str(folder.with_suffix(".toml"))], context)
    verified = (folder / "verify.json").is_file()
    ok = code == 0 and verified and compute_export_hash(folder) != ""
    seconds = time.perf_counter() - started
    return {"ok": ok, "value": seconds, "unit": "s", "note": "" if ok else f"exit code {code}: {words}"}


def stop_and_resume(kind: Kind, steps: int, context: Context) -> tuple[str, Path]:
    """Ask a second run of the same job to stop at half of its steps, and resume it.

    Returns:
        How it went and the run folder.

    Raises:
        RuntimeError: it did not end as it should.
    """
    folder = write_config(get_run_folder(kind, "stopped", context), kind, steps, context)
    log_file = folder.with_suffix(".log")
    with open(log_file, "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "lora_fp8", "train", str(folder.with_suffix(".toml"))],
            cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        while process.poll() is None and read_newest_step(folder) < steps // 2 and context.seconds_left > 0:
            time.sleep(0.02)
        if process.poll() is None and read_newest_step(folder) == 0:
            process.kill()
            process.wait()
            raise RuntimeError(f"no step within the time; see {log_file.name}")
        if process.poll() is None:
            (folder / "control" / "stop").touch()
        code = process.wait()
    stopped_at = read_newest_step(folder)
    if code not in (0, STOPPED):
        raise RuntimeError(f"exit code {code}; see {log_file.name}")
    if code == 0:
        return "it was done before it could be stopped", folder
    code, words = run_command(["resume", str(folder)], context)
    if code != 0:
        raise RuntimeError(f"resume: exit code {code}: {words}")
    return f"stopped after step {stopped_at} of {steps}", folder


def compare(stopped: "Future[tuple[str, Path]]") -> dict[str, Any]:
    """Compare the exported tensors of a resumed run with those of the one that trained through."""
    how, folder = stopped.result()
    one, other = (
        compute_export_hash(folder),
        compute_export_hash(folder.with_name(folder.name.replace("stopped", "through"))),
    )
    return {"ok": bool(one) and one == other, "note": f"{how}; {one[:12]} and {other[:12]}"}


def compare_exports(one: Path, other: Path) -> dict[str, Any]:
    """Compare the exported tensors of two runs."""
    hashes = compute_export_hash(one), compute_export_hash(other)
    return {"ok": bool(hashes[0]) and hashes[0] == hashes[1], "note": " and ".join(word[:12] for word in hashes)}


def write_config(folder: Path, kind: Kind, steps: int, context: Context) -> Path:
    """Write a job beside its run folder. Return the folder."""
    settings = {"name": folder.name, "compute": kind.compute, "recorded": str(kind.recorded).lower()}
    settings |= {"steps": steps, "every": max(2, steps // 3)}
    places = {"folder": json.dumps(str(context.out)), "images": json.dumps(str(ROOT / "lora_fp8/demo/dataset"))}
    folder.with_suffix(".toml").write_text(CONFIG.format(**settings, **places), encoding="utf-8")
    return folder


def run_command(arguments: list[str], context: Context) -> tuple[int, str]:
    """Run a command of `lora-fp8`. Return its exit code and its last lines."""
    done = subprocess.run(
        [sys.executable, "-m", "lora_fp8", *arguments],
        cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=max(5.0, context.seconds_left + 10),
    )  # fmt: skip
    return done.returncode, " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])[:300]


def read_newest_step(folder: Path) -> int:
    """Return the step that status.json names."""
    try:
        return int(json.loads((folder / "status.json").read_text(encoding="utf-8")).get("step") or 0)
    except (OSError, ValueError):  # not there yet, or being replaced
        return 0


def compute_export_hash(folder: Path) -> str:
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
