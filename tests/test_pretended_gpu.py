"""A training whose tensors are on a GPU: each is where the others are. The GPU is pretended, see `pretended/gpu.py`."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_fp8 import config, settings, train

pytestmark = pytest.mark.skipif(
    torch.version.cuda is not None, reason="PyTorch with CUDA has hooks of its own, which cannot be replaced"
)
HERE = Path(__file__).resolve().parent
SHORT = ("preview.prompts=[]", "preview.steps=1")
JOBS: dict[str, tuple[str, ...]] = {
    "sd15": ("export.verify=true", "preview.prompts=['a cat']", "validation.pictures=1", "validation.every=2"),
    "flux": (*SHORT, "quantize.compute=fp8", "memory.gradient_checkpointing=true", "memory.keep_attention=true"),
    "sdxl": (*SHORT, "adapter.text_encoder=true", "objective.min_snr_gamma=5.0", "memory.offload=0.5"),
    "sd3": (*SHORT, "adapter.init=pissa"),
    "qwen_image": (*SHORT, "adapter.type=dora", "export.formats=['diffusers']", "optimizer.ema_decay=0.9"),
    "flux2": (*SHORT, "quantize.storage=nf4"),
    "wan": (*SHORT, "adapter.type=lokr", "export.formats=['comfy']"),
    "hidream": (*SHORT, "optimizer.name=prodigy", "optimizer.lr='auto'"),
    "z_image": (*SHORT, "quantize.storage=int8", "optimizer.name=muon"),
    "lumina2": (*SHORT, "optimizer.name=adafactor"),
    "chroma": (*SHORT, "optimizer.name=lion8bit"),
}
"""Family -> settings of its job."""


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> set[str]:
    """Families that this run of pytest asks."""
    return {item.callspec.params["family"] for item in request.session.items if item.path == request.path}  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def jobs(
    make_job: Callable[..., settings.Job], asked: set[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, settings.Job]:
    made = {}
    for family in sorted(asked):
        folder = tmp_path_factory.mktemp(family)
        given = ("train.steps=2", "checkpoint.every=100")
        # A cache of its own: encoders run on the GPU, too.
        own = ("memory.offload=0", f"dataset.cache_dir='{folder / 'cache'}'")
        made[family] = make_job(folder, *given, *own, *JOBS[family], family=family)
    return made


@pytest.fixture(scope="module")
def answers(jobs: dict[str, settings.Job], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Answers of one process, which trains all jobs."""
    folder = tmp_path_factory.mktemp("gpu")
    files = [folder / f"{family}.toml" for family in jobs]
    for file, job in zip(files, jobs.values(), strict=True):
        file.write_text(config.dumps(job.model_copy(update={"name": "on_gpu"})), encoding="utf-8")
    command = [sys.executable, str(HERE / "pretended/gpu.py"), str(folder), *map(str, files)]
    env = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == len(files), done.stderr[-3000:]
    return dict(zip(jobs, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("family", JOBS)
def test_a_training_on_a_gpu_meets_no_tensor_of_the_cpu(
    family: str, jobs: dict[str, settings.Job], answers: dict[str, dict[str, Any]]
) -> None:
    answer = answers[family]
    assert "error" not in answer, f"{answer['error']}\n{answer['traceback']}"
    assert answer["device"] == "cuda:0" and all(answer["ok"])
    assert bool(answer["ok"]) == jobs[family].export.verify
    job, losses = jobs[family], []
    in_ram = {"name": "on_cpu", "memory": job.memory.model_copy(update={"offload": 0.0})}
    train.run(
        job.model_copy(update=in_ram),
        progress=False,
        echo=lambda event: losses.append(event["loss"]) if event["event"] == "step" else None,
    )
    assert answer["losses"] == pytest.approx(losses, rel=2e-2)
