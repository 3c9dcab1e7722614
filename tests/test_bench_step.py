"""scripts/bench_step.py: its table has what was asked for, and what it calculates agrees with other ways to count."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "bench_step.py"
META = torch.device("meta")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_step"] = module  # where dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def named(bench: ModuleType, title: str):
    return next(one for one in bench.list_candidates() if one.title == title)


def table_rows(text: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {cells[0]: cells[1:] for cells in lines[1:]}


def test_two_rows_and_a_reason(bench, tmp_path):
    wanted = ["ours bf16", "ours fp8 row upcast"]
    asked = [*wanted, r"ours bf16 \+ compile \+ CUDA graphs"]
    small = ["--models", "flux", "--size", "tiny", "--rounds", "2", "--repeats", "1", "--warmup", "1"]
    bench.main([*small, "--candidates", *asked, "--machine", "A Machine", "--out", str(tmp_path)])
    rows = table_rows((tmp_path / "step_a-machine.md").read_text(encoding="utf-8"))
    assert list(rows) == [*wanted, "ours bf16 + compile + CUDA graphs"]
    for name in wanted:
        cells = [cell.rstrip("%") for cell in rows[name] if " - " not in cell]
        assert len(cells) == 11 and all(math.isfinite(float(cell)) for cell in cells)
    assert "has no CUDA graphs" in rows["ours bf16 + compile + CUDA graphs"][0]

    (result,) = json.loads((tmp_path / "step_a-machine.json").read_text(encoding="utf-8"))["results"]
    bf16, fp8, refused = result["rows"]
    assert refused["error"] and "median" not in refused
    for row in (bf16, fp8):
        assert len(row["turns"]) == len(row["beside"]) == 2
        assert row["floor"] > 0 and row["peak_bytes"] > row["held_bytes"] > 0
        assert row["gemms"] == 2 * 17 - 3  # of 17 layers with adapters; text's q, k, v get no gradient for their input
        assert row["decoded_bytes"] == 0
    assert fp8["held_bytes"] < 0.8 * bf16["held_bytes"]
    assert bf16["weight_error"] == 0 and 0.02 < fp8["weight_error"] < 0.03


def test_what_a_decoding_layer_keeps_and_a_needless_gradient_are_seen(bench):
    """The two figures that set the peers apart: kohya's cast keeps decoded weights, torchao's conversion multiplies
    three times."""
    found = {}
    for name in ("ours fp8 row upcast", "kohya unscaled cast", "torchao float8 training"):
        row = bench.Row(named(bench, name))
        bench.inspect(bench.Trainer(row.candidate, "flux", 64, "tiny", CPU), row, "flux", "tiny")
        found[name] = row
    ours, kohya, torchao = found.values()
    assert kohya.decoded_bytes > 5e5 and ours.decoded_bytes == 0
    assert torchao.gemms > ours.gemms


@pytest.mark.parametrize("model", ["flux", "sdxl"])
def test_floor_equals_an_independent_count(bench, model):
    """Forward and backward on the meta device, attention as plain matrix products, counted by torch."""
    work = bench.measure_work(model, 64, "tiny")
    denoiser = bench.build_plain(model, "tiny", META).requires_grad_(False)
    given = bench.make_inputs(model, 64, "tiny", META)
    for key in ("hidden_states", "encoder_hidden_states", "pooled_projections", "sample"):
        if key in given:
            given[key].requires_grad_()
    if model == "sdxl":
        given["added_cond_kwargs"]["text_embeds"].requires_grad_()
    counter = FlopCounterMode(display=False)

    def counted() -> dict[str, int]:
        return {str(key).split(".")[1]: value for key, value in counter.get_flop_counts()["Global"].items()}

    with counter:
        answer = denoiser(**given, return_dict=False)[0]
        forward = counted()
        answer.sum().backward()
        both = counted()
    # What only timesteps go through has no gradient to give.
    ends = ("timestep_embedder.linear_1", "timestep_embedder.linear_2", "time_embedding.linear_1")
    ends += ("guidance_embedder.linear_1", "guidance_embedder.linear_2", "time_embedding.linear_2")
    without = [one for name, one in denoiser.named_modules() if name.endswith(ends)]
    assert all(isinstance(one, nn.Linear) for one in without) and len(without) == (4 if model == "flux" else 2)
    missing = sum(2 * one.weight.numel() for one in without)

    def linear(flops: dict[str, int]) -> int:
        return flops.get("mm", 0) + flops.get("addmm", 0)

    assert work.linear == linear(forward)
    assert work.attention == forward["bmm"]
    assert work.convolution == forward.get("convolution", 0)
    rate = {"gemm_bf16": 1.0, "gemm_fp8": 1.0, "attention_forward": math.inf, "attention_backward": math.inf}
    rate["bytes"] = math.inf
    convolutions = forward.get("convolution", 0) + both.get("convolution_backward", 0)
    assert bench.compute_floor("bf16", 2.0, False, work, rate) == linear(both) + missing + convolutions
    # The plain products' backward has four GEMMs for two; the fused kernel's a fifth, which makes the scores again.
    assert both["bmm"] == 3 * work.attention
    rate |= {"gemm_bf16": math.inf, "attention_forward": 1.0, "attention_backward": 1.0}
    assert bench.compute_floor("bf16", 2.0, False, work, rate) == 3.5 * work.attention


def test_floor_of_bytes_and_of_fp8(bench):
    work = bench.Work(linear=100.0, convolution=0.0, attention=0.0, parameters=7)
    endless = dict.fromkeys(("gemm_bf16", "gemm_fp8", "attention_forward", "attention_backward"), math.inf)
    moved = {
        rule: [
            bench.compute_floor(rule, 1.0, checkpointing, work, endless | {"bytes": 7.0})
            for checkpointing in (False, True)
        ]
        for rule in ("bf16", "upcast", "kept", "fp8", "fp8_forward", "cast")
    }
    assert moved == {
        "bf16": [0, 0],
        "upcast": [10, 15],
        "kept": [7, 12],
        "fp8": [2, 2],
        "fp8_forward": [5, 5],
        "cast": [6, 9],
    }
    rate = endless | {"bytes": math.inf, "gemm_fp8": 2.0, "gemm_bf16": 1.0}
    assert bench.compute_floor("fp8", 1.0, False, work, rate) == 100
    assert bench.compute_floor("fp8_forward", 1.0, True, work, rate) == 200
    assert bench.compute_floor("fp8", 1.0, False, work, rate | {"gemm_fp8": 0.0}) is None


STEP = """
import torch
def step():
    one = torch.ones(2**24)
    two = one + one
    del one
    torch.ones(2**23).add_(two[: 2**23])
"""
KERNEL = """
from lora_fp8.training import memory
cpu = torch.device("cpu")
step()  # what the first call loads stays resident
memory.reset_peak(cpu)
before = memory.read_peak_gib(cpu)
step()
print((memory.read_peak_gib(cpu) - before) * 2**30)
"""


def test_peak_is_what_the_kernel_says(bench):
    names = {}
    exec(STEP, names)
    peak = 2 * 4 * 2**24
    assert bench.measure_cpu_peak(names["step"]) == peak
    # In a process of its own: this one holds the garbage of other tests, and may free it while the step runs.
    done = subprocess.run([sys.executable, "-c", STEP + KERNEL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("name", ["ours bf16", "ours fp8 row upcast", "ours fp8 row upcast + checkpointing"])
def test_a_dry_step_takes_the_bytes_of_a_real_one(bench, name):
    one = named(bench, name)
    dry = bench.run_dry_step(one, "flux", 256, "tiny")
    trainer = bench.Trainer(one, "flux", 256, "tiny", CPU)
    trainer.step()
    assert dry["held_bytes"] == trainer.count_held_bytes()
    real = trainer.count_held_bytes() + trainer.count_optimizer_bytes() + bench.measure_cpu_peak(trainer.step)
    assert dry["peak_bytes"] == pytest.approx(real, rel=0.1)


def test_plan_shows_a_peer_that_fails_beside_ours(bench, tmp_path):
    asked = [r"ours fp8 row fp8 \+ checkpointing", r"diffusers layerwise casting \+ checkpointing"]
    arguments = ["--plan", "RTX 4090", "--models", "sdxl", "--size", "tiny", "--candidates", *asked]
    bench.main([*arguments, "--out", str(tmp_path)])
    rows = table_rows((tmp_path / "step_plan_rtx-4090.md").read_text(encoding="utf-8"))
    ours, peer = rows.values()
    assert ours[3] == "yes" and all(float(cell) >= 0 for cell in (*ours[:3], *ours[4:]))
    assert peer[0].startswith("CheckpointError")


def test_a_candidate_that_does_not_exist_is_an_error(bench, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main(["--candidates", "ours bf61", "--out", str(tmp_path)])
    assert stopped.value.code == 2 and "'ours bf61' matches none of: ours bf16," in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
