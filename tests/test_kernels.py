"""The Triton kernels: their logic in Triton's interpreter, their rounding on a GPU, and how a job asks for them."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lora_fp8 import adapters, config, precision, train
from lora_fp8.errors import RunFailure, UserError, UserErrors
from lora_fp8.precision import choose, kernels, matmul
from lora_fp8.settings import Adapter, Job, Quantize
from lora_fp8.stages import preflight
from lora_fp8.training import memory

IN_FP8 = ("quantize.compute=fp8", "quantize.fp8_min_features=0")
TRITON = "quantize.kernels=triton"


def test_in_tritons_interpreter():
    """In a process of its own: the interpreter is chosen when triton is imported, for all of a process's kernels."""
    tests = Path(__file__).with_name("kernels_interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", str(tests), "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 60


# -- a job that asks for them ------------------------------------------------------------------------------------------


@pytest.fixture
def in_torch(monkeypatch):
    """As on a machine that runs the kernels, with the same results from torch; the list tells which were called."""
    called: list[str] = []

    def quantize_rows(x, factor=None):
        called.append("quantize_rows")
        return matmul.quantize(x if factor is None else x * factor.view(1, -1))

    def transpose_bytes(qweight):
        called.append("transpose_bytes")
        return qweight.t().contiguous()

    def apply_epilogue(sums, a_scale, w_scale, bias, h, b, scaling, dtype):
        called.append("epilogue")
        y = sums.float() * a_scale * (1.0 if w_scale is None else w_scale.view(1, -1))
        y = y if bias is None else y + bias.float()
        return (y if h is None else y + scaling * h.float() @ b.float().t()).to(dtype)

    for one in (quantize_rows, transpose_bytes, apply_epilogue):
        monkeypatch.setattr(kernels, one.__name__, one)
    monkeypatch.setattr(choose, "_find_kernels_problem", lambda device: "")
    return called


def events_of(job: Job, resume: bool = False) -> dict[str, list[dict]]:
    seen: dict[str, list[dict]] = {}
    train.run(job, resume=resume, progress=False, echo=lambda event: seen.setdefault(event["event"], []).append(event))
    return seen


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_a_job_trains_with_the_kernels_as_without(family, job, in_torch):
    settings = (*IN_FP8, "train.steps=2", "model.dtype=fp32", "adapter.dtype=fp32")
    plain = events_of(job(*settings, "name=plain", family=family))
    assert not in_torch and "fused" not in plain["preflight"][0]
    seen = events_of(job(*settings, TRITON, family=family))
    assert set(in_torch) == {"quantize_rows", "transpose_bytes", "epilogue"}
    # Every adapted layer that is multiplied in FP8; a UNet's convolutions and narrow layers are not.
    assert 0 < seen["preflight"][0]["fused"] <= seen["model"][0]["adapters"]
    losses, expected = ([event["loss"] for event in one["step"]] for one in (seen, plain))
    assert losses == pytest.approx(expected, rel=1e-4)


def test_dropout_leaves_adapters_to_peft(job, in_torch):
    seen = events_of(job(*IN_FP8, TRITON, "train.steps=1", "adapter.dropout=0.1"))
    assert seen["preflight"][0]["fused"] == 0 and "epilogue" in in_torch  # the base has its kernels all the same


def test_auto_tries_matmuls_with_and_without_them(job, in_torch, monkeypatch):
    tried: list[str] = []
    real = precision.time_modes

    def fastest(modes, switch, step, device):
        def watched(mode: str) -> None:
            switch(mode)
            in_torch.clear()
            tried.append(mode)

        def checked() -> None:
            step()
            assert bool(in_torch) == tried[-1].endswith("triton")

        seconds, failed = real(modes, watched, checked, device, repeats=1)
        return seconds | {"fp8 with triton": 0.0}, failed

    monkeypatch.setattr(precision, "time_modes", fastest)
    seen = events_of(job(*IN_FP8, "quantize.compute=auto", TRITON, "train.steps=1"))
    assert tried == ["upcast", "fp8_forward", "fp8", "fp8_forward with triton", "fp8 with triton"]
    assert seen["compute"][0]["chosen"] == "fp8 with triton" and list(seen["compute"][0]["seconds"]) == tried
    assert seen["preflight"][0]["fused"] > 0
    monkeypatch.setattr(precision, "list_candidates", lambda *_: ("upcast",))  # moved to a machine without FP8
    tried.clear()
    moved = events_of(job(*IN_FP8, "quantize.compute=auto", TRITON, "train.steps=2"), resume=True)
    assert tried == ["upcast"] and moved["compute"][-1]["chosen"] == "upcast"
    assert any("fp8 with triton, does not exist on this machine" in one["text"] for one in moved["warning"])
    monkeypatch.setattr(precision, "list_candidates", choose.list_candidates)
    tried.clear()
    events_of(job(*IN_FP8, "quantize.compute=auto", "train.steps=1", "name=without"))
    assert tried == ["upcast", "fp8_forward", "fp8"]


def test_auto_goes_on_without_what_fails(job, monkeypatch):
    """A compiler that is missing, an operator that torch lacks: said with the reason, and the next one is taken."""
    broken = {"fp8_forward", "fp8"}
    switch = preflight.switch_compute

    def fails(session, loaded, mode):
        if mode in broken:
            raise RuntimeError(f"no kernel for {mode}")
        switch(session, loaded, mode)

    peaks, reset = [], memory.reset_peak
    monkeypatch.setattr(memory, "reset_peak", lambda device: peaks.append(device) or reset(device))
    monkeypatch.setattr(preflight, "switch_compute", fails)
    seen = events_of(job(*IN_FP8, "quantize.compute=auto", "train.steps=1"))
    assert seen["compute"][0]["chosen"] == "upcast" and list(seen["compute"][0]["seconds"]) == ["upcast"]
    told = [event["text"] for event in seen["warning"] if "is not used" in event["text"]]
    assert [any(f"{mode} failed" in text and "no kernel" in text for text in told) for mode in broken] == [True, True]
    assert len(peaks) == 2  # the peak that is told is that of the one that is taken
    broken.add("upcast")
    with pytest.raises(RunFailure, match="no matmul works on this machine") as caught:
        events_of(job(*IN_FP8, "quantize.compute=auto", "train.steps=1", "name=none"))
    assert "\n" not in str(caught.value) and str(caught.value).count("no kernel") == 3


def test_a_run_that_goes_on_takes_only_kernels_that_are_asked_for():
    asked, not_asked = Quantize(compute="auto", kernels="triton"), Quantize(compute="auto")
    compute, section = choose.split_mode("fp8_forward with triton", asked)
    assert (compute, section.kernels) == ("fp8_forward", "triton")
    assert choose.split_mode("fp8", asked)[1].kernels == "torch"
    assert choose.split_mode("fp8 with triton", not_asked) == ("fp8", not_asked)


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_a_machine_that_cannot_run_them_says_so_before_loading(job, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for compute in ("fp8", "auto"):
        with pytest.raises(UserError, match=r"^quantize\.kernels = 'triton': these kernels .*'torch'$"):
            train.run(job(*IN_FP8, f"quantize.compute={compute}", TRITON), progress=False)
    cuda, section = torch.device("cuda"), Quantize(compute="auto", kernels="triton")
    assert precision.find_problem(section, cuda) == ""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert precision.find_problem(section, torch.device("cpu")) == ""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton is not installed" in precision.find_problem(section, cuda)
    assert precision.find_problem(section.model_copy(update={"compute": "upcast"}), cuda) == ""


def test_a_recipe_without_kernels_is_refused(job):
    with pytest.raises(UserErrors, match="'triton' has no recipe 'delayed'; use quantize.recipe = 'current'"):
        job(*IN_FP8, TRITON, "quantize.recipe=delayed")


def test_another_librarys_layers_have_no_kernels_of_ours(job):
    with pytest.raises(UserErrors, match="'triton' works with this program's own layers only; use 'torch'"):
        job(*IN_FP8, TRITON, "quantize.backend=te")


def test_without_effect_is_a_warning():
    given = [*IN_FP8[:1], TRITON, "quantize.fp8_min_features=9999"]
    mine = config.loads("model = {family = 'sd15', path = 'demo'}\ndataset = {folders = [{path = 'p'}]}", given)
    plan = precision.decide(nn.Sequential(nn.Linear(32, 32)), mine.quantize, (), torch.bfloat16)
    (line,) = config.find_unused_settings(mine, plan.facts)
    assert line == "quantize.compute, quantize.kernels have no effect: no layer can use an FP8 matmul"


def test_a_dry_step_on_the_meta_device_runs_none(monkeypatch):
    monkeypatch.setattr(kernels, "quantize_rows", None)
    model = nn.Sequential(nn.Linear(32, 32, device="meta"))
    section = Quantize(compute="fp8", fp8_min_features=0, kernels="triton")
    precision.quantize_(model, section, (), torch.float32)
    adapters.inject(model, Adapter(rank=4, dtype="fp32"), ["0"], seed=0)
    x = torch.empty(4, 32, device="meta", requires_grad=True)
    model(x).sum().backward()
    assert x.grad.shape == (4, 32) and adapters.count_fused(model) == 0


def test_without_them_the_adapters_are_pefts_own():
    for kind, fused in (("torch", False), ("triton", True)):
        model = nn.Sequential(nn.Linear(32, 32))
        precision.quantize_(model, Quantize(compute="fp8", fp8_min_features=0, kernels=kind), (), torch.float32)
        adapters.inject(model, Adapter(rank=4), ["0"], seed=0)
        assert isinstance(model[0], adapters.FusedLora) == fused and adapters.count_fused(model) == fused


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 33), (70, 640), (300, 3072), (8, 15360)])
def test_rounding_is_torchs_to_the_bit(dtype, shape):
    x = torch.randn(shape, device="cuda").mul(torch.logspace(-3, 3, shape[0], device="cuda")[:, None]).to(dtype)
    x[1, 3], x[2, 4] = float("nan"), float("inf")
    for factor in (None, torch.rand(shape[1], 1, device="cuda") + 0.1):
        values, scale = kernels.quantize_rows(x, factor)
        expected, expected_scale = matmul.quantize(x if factor is None else x * factor.view(1, -1))
        good = scale.isfinite().flatten()
        assert torch.equal(good, expected_scale.isfinite().flatten()) and good.sum() == shape[0] - 2
        assert torch.equal(scale[good], expected_scale[good])
        assert torch.equal(values.view(torch.uint8)[good], expected.view(torch.uint8)[good])


@pytest.mark.gpu
def test_bytes_and_epilogue_on_a_gpu():
    original = torch.randint(0, 256, (3000, 1111), dtype=torch.uint8, device="cuda")
    assert torch.equal(kernels.transpose_bytes(original), original.t())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rank in (1, 16, 100):
            sums, a_scale, w_scale = (torch.randn(shape, device="cuda") for shape in ((300, 1000), (300, 1), (1000, 1)))
            sums, bias = sums.to(torch.float32 if dtype == torch.float16 else dtype), torch.randn(1000, device="cuda")
            h, b = torch.randn(300, rank, device="cuda").to(dtype), torch.randn(1000, rank, device="cuda").to(dtype)
            expected = sums.double() * a_scale.double() * w_scale.double().T + bias.double() + h.double() @ b.double().T
            y = kernels.apply_epilogue(sums, a_scale, w_scale, bias, h, b, 1.0, dtype)
            step = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
            assert ((y.double() - expected).abs() <= step * expected.abs() + 1e-4).all()


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp8", "fp8_forward"])
@pytest.mark.parametrize("compiled", [False, True])
def test_layers_on_a_gpu_answer_as_without_the_kernels(compute, compiled):
    results = []
    for kind in ("torch", "triton"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda()
        section = Quantize(compute=compute, kernels=kind, fp8_min_features=0)
        precision.quantize_(model, section, (), torch.bfloat16)
        adapters.inject(model, Adapter(rank=16, alpha=16), ["0", "2"], seed=0)
        for name, parameter in adapters.list_trained_parameters(model):
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator("cuda").manual_seed(0))
        x = torch.randn(3, 100, 256, device="cuda").bfloat16().requires_grad_()
        y = (torch.compile(model, fullgraph=True) if compiled and kind == "triton" else model)(x)
        y.float().square().sum().backward()
        results.append(
            [y.detach(), x.grad, *[parameter.grad for _, parameter in adapters.list_trained_parameters(model)]]
        )
    for expected, got in zip(*results, strict=True):
        assert (got - expected).float().norm() < 0.03 * expected.float().norm()
