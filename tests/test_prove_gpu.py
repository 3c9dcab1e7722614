"""scripts/prove_gpu.py: all stages at toy size on the CPU, whatever ends one of them; and it finds planted errors."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import forked
import pytest
import torch

from lora_fp8.precision import formats, matmul
from lora_fp8.training import optim

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture(scope="module")
def proof() -> Iterator[SimpleNamespace]:
    """The script and its stages, imported as the script itself imports them."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        import prove_gpu
        from gpu_proof import numerics, record

        yield SimpleNamespace(script=prove_gpu, numerics=numerics, record=record)
    finally:
        sys.path.remove(str(SCRIPTS))


def fork_but(killed: str, script: Any) -> Callable[..., Any]:
    """Return what starts the stages in forked processes, whose imports are done, and one as the script does: dead."""
    real = script.start

    def start(stage: str, args: argparse.Namespace, out: Path, limit: float) -> Any:
        if stage == killed:
            process = real(stage, args, out, limit)
            os.killpg(process.pid, signal.SIGKILL)
            return process
        (out / f"{stage}.log").touch()
        command = [script.__file__, "--stage", stage, "--limit", str(limit), "--out", str(out), "--toy"]
        return forked.start([*command, "--device", "cpu"], cwd=script.ROOT, env={"PYTHONPATH": str(script.ROOT)})

    return start


@pytest.mark.parametrize("left_out", [(), ("demo", "models")], ids=["all", "all but the longest"])
def test_every_stage_reports_though_one_is_killed(
    proof: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: tuple[str, ...]
) -> None:
    monkeypatch.setattr(proof.script, "start", fork_but("rates", proof.script))
    stages = [stage for stage in proof.script.STAGES if stage not in left_out]
    given = ["--toy", "--device", "cpu", "--minutes", "60", "--out", str(tmp_path), "--stages", *stages]
    assert proof.script.main(given) == 1  # a killed stage is a wrong row
    rows = proof.record.read_rows(tmp_path / "results.jsonl")
    wrong = [(row["stage"], row["name"], row["note"]) for row in rows if row["ok"] is False]
    assert [stage for stage, *_ in wrong] == ["rates"] and "signal 9" in wrong[0][2], wrong
    right = {stage: sum(row["stage"] == stage and row["ok"] is True for row in rows) for stage in stages}
    assert right["numerics"] >= 15 and right.get("demo", 2) == 2 and right["processes"] == 1
    steps = [row for row in rows if row.get("unit") == "s/step"]
    assert {row["stage"] for row in steps} == {"models", "peers"} - {*left_out}
    assert all(row["value"] > 0 for row in steps)
    predicted = [row["value"] > 0 for row in rows if row["stage"] == "predict"]
    assert predicted == [True] * (3 if "models" in stages else 0)
    # What needs a GPU says so, and is not counted as right.
    not_asked = [row["name"] for row in rows if "needs a CUDA GPU" in row.get("note", "")]
    assert len(not_asked) >= 9 and any(name.startswith("offload") for name in not_asked)

    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert all(row["name"] in text for row in rows if row["stage"] not in ("facts", "predict", "rates"))
    bars = [one for one in ElementTree.parse(tmp_path / "step.svg").iter() if one.tag.endswith("rect")]
    assert len(bars) == 1 + len(steps)


def test_a_stage_that_hangs_is_ended_with_all_that_it_started(
    proof: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof.script, "GRACE", 0.0)
    (tmp_path / "demo.log").write_text("", encoding="utf-8")
    child = tmp_path / "child"
    process = subprocess.Popen(
        ["sh", "-c", f"sleep 1000 & echo $! > {child}.tmp; mv {child}.tmp {child}; wait"], start_new_session=True
    )
    while not child.exists():
        time.sleep(0.01)
    proof.script.wait_for(process, "demo", 0.01, tmp_path / "results.jsonl")
    (row,) = proof.record.read_rows(tmp_path / "results.jsonl")
    assert row["ok"] is False and "not done after" in row["note"]
    with contextlib.suppress(ProcessLookupError):
        while Path(f"/proc/{int(child.read_text())}/stat").read_text().split(") ")[1][0] != "Z":
            os.kill(int(child.read_text()), 0)
            time.sleep(0.01)


def plant_a_wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    real = formats.decode
    monkeypatch.setattr(
        formats, "decode", lambda parts, *how: real((parts[0], parts[1] * (1 + 2**-20), *parts[2:]), *how)
    )


def plant_a_rough_product(monkeypatch: pytest.MonkeyPatch) -> None:
    real = matmul.multiply_unscaled
    monkeypatch.setattr(matmul, "multiply_unscaled", lambda *args: real(*args) * 1.05)


def plant_a_biased_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "round_stochastically", lambda values, generator: values.to(torch.bfloat16))


def plant_a_forgotten_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim.AdapterOptimizer, "load_state", lambda self, tensors, facts: None)


def plant_a_kept_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(x: torch.Tensor, bias: Any, storage: str, *parts: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, formats.decode(parts, storage, x.dtype), bias)

    monkeypatch.setattr(matmul.UpcastLinear, "apply", forward)


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (plant_a_wrong_scale, "decode: all 254"),
        (plant_a_rough_product, "_scaled_mm: unit scales against float64, precise"),
        (plant_a_biased_rounding, "stochastic rounding: the mean"),
        (plant_a_forgotten_state, "bitsandbytes AdamW8bit: saved, loaded"),
        (plant_a_kept_weight, "upcast: bytes kept"),
    ],
)
def test_planted_errors_are_found(
    proof: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: Any, words: str
) -> None:
    (name,) = (name for name in proof.numerics.QUESTIONS if name.startswith(words))
    context = proof.record.Context(torch.device("cpu"), True, float("inf"), tmp_path)
    record = proof.record.Record(tmp_path / "results.jsonl", "numerics")
    record.ask(name, lambda: proof.numerics.QUESTIONS[name](context))
    plant(monkeypatch)
    record.ask(name, lambda: proof.numerics.QUESTIONS[name](context))
    before, after = proof.record.read_rows(tmp_path / "results.jsonl")
    assert before["ok"] is True and after["ok"] is False


def test_an_exception_is_a_row_and_the_next_question_is_asked(proof: SimpleNamespace, tmp_path: Path) -> None:
    record = proof.record.Record(tmp_path / "results.jsonl", "numerics")
    record.ask("broken", lambda: {}["nothing"])
    record.ask("whole", lambda: {"ok": True, "value": 1.0})
    first, second = proof.record.read_rows(tmp_path / "results.jsonl")
    assert first["ok"] is False and "KeyError" in first["note"] and second["ok"] is True
