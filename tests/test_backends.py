"""Other libraries' layers under `quantize.backend`: torchao against torchao itself, TransformerEngine by a stand-in.

TransformerEngine needs a CUDA machine. What is tested here is what this project does with it: which of its names are
called with what, and what is refused before anything is loaded.
"""

import gc
import importlib.machinery
import importlib.util
import sys
import types
from contextlib import contextmanager
from pathlib import Path

import diffusers
import pytest
import torch
from safetensors.torch import load_file
from test_convert import peak_bytes
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
    PerGroup,
    PerRow,
    PerTensor,
    quantize_,
)

from lora_fp8 import adapters, cli, config, families, precision, train
from lora_fp8.config import find_unused_settings
from lora_fp8.errors import Stopped, UserError, UserErrors
from lora_fp8.precision import backends
from lora_fp8.precision.quantized import Quantized
from lora_fp8.settings import Adapter, Job, Quantize
from lora_fp8.stages import load, measure

BF16 = torch.bfloat16
FORMS = {
    "fp8 row": Float8WeightOnlyConfig(granularity=PerRow(), set_inductor_config=False),
    "fp8 tensor": Float8WeightOnlyConfig(granularity=PerTensor(), set_inductor_config=False),
    "fp8 1x64": Float8WeightOnlyConfig(granularity=PerGroup(64), set_inductor_config=False),
    "fp8 1x128": Float8WeightOnlyConfig(granularity=PerGroup(128), set_inductor_config=False),
    "int8 row": Int8WeightOnlyConfig(granularity=PerRow(), set_inductor_config=False),
    "int8 1x64": Int8WeightOnlyConfig(granularity=PerGroup(64), set_inductor_config=False),
    "int8 1x128": Int8WeightOnlyConfig(granularity=PerGroup(128), set_inductor_config=False),
}
TE = ("quantize.backend=te", "quantize.compute=fp8", "quantize.fp8_min_features=0")


SMALL = ("adapter.rank=16", "adapter.targets=['attn1.to_q', 'attn2.to_k', 'ff.net.0.proj']")


def losses(of) -> list[float]:
    return [one["loss"] for one in of.read_events() if one["event"] == "step"]


def stopped_at_2_and_resumed(job: Job) -> train.Result:
    folder = Path(job.output_dir) / job.name

    def stop(event):
        if event["event"] == "step" and event["step"] == 2:
            (folder / "control").mkdir(exist_ok=True)
            (folder / "control" / "stop").touch()

    with pytest.raises(Stopped):
        train.run(job, progress=False, echo=stop)
    return train.run(job, resume=True, progress=False)


def held_tensors(weight: Tensor) -> dict[str, Tensor]:
    """What a torchao tensor consists of, bytes as integers."""
    tensors = {name: getattr(weight, name) for name in weight.__tensor_flatten__()[0]}
    return {name: one.view(torch.uint8) if one.is_floating_point() and one.itemsize == 1 else one
            for name, one in tensors.items()}  # fmt: skip


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Two torchao tensors are the same to the bit."""
    assert type(got) is type(expected) and got.dtype == expected.dtype
    ours, theirs = held_tensors(got), held_tensors(expected)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def filled(source: nn.Module, section: Quantize, keep: tuple[str, ...] = ()) -> tuple[nn.Module, precision.Plan]:
    """The model of `source`, built on the meta device and filled from its tensors one by one."""
    with torch.device("meta"):
        empty = nn.Sequential(*[nn.Linear(one.in_features, one.out_features) for one in source])
    plan = precision.quantize_(empty, section, keep, BF16)
    with torch.no_grad():  # as a caller may: what trains later must not depend on it
        precision.fill_(empty, source.state_dict().items(), BF16)
    return empty, plan


# -- torchao -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_torchao_layers_are_torchaos_own(form):
    storage, scale = form.split()
    source = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 256))
    section = Quantize(storage=storage, scale=scale, backend="torchao")
    before = inductor.coordinate_descent_tuning, torch.get_float32_matmul_precision()
    model, plan = filled(source, section)
    originals = {str(index): one.weight.detach().clone() for index, one in enumerate(source)}
    expected = source.to(BF16).requires_grad_(False)
    quantize_(expected, FORMS[form])
    results = []
    for one in (model, expected):
        x = torch.ones(3, 5, 256, dtype=BF16).mul_(torch.arange(256) / 256).requires_grad_()
        y = one(x)
        y.float().square().sum().backward()
        results.append((y, x.grad))
    for layer, theirs in zip(model, expected, strict=True):
        assert_same(layer.qweight, theirs.weight)
        assert torch.equal(layer.weight, theirs.weight.dequantize()) and torch.equal(layer.bias, theirs.bias)
        # Its bytes mean what our own decoding makes of them, so that both bases can be compared.
        assert torch.equal(precision.decode(layer.get_parts(), storage, BF16), layer.weight)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    # torchao's defaults have all of the process tuned otherwise; older versions lowered float32 matmuls too.
    assert (inductor.coordinate_descent_tuning, torch.get_float32_matmul_precision()) == before
    # What the proof of an exported file takes for the base is what was trained on.
    for layer, planned in zip(model, plan.layers, strict=True):
        assert torch.equal(precision.as_held(originals[planned.name], planned, section, BF16), layer.weight)
    # What the plan says it weighs, and whose layer it says it is.
    weights = [one for layer in model for one in held_tensors(layer.qweight).values()]
    assert plan.num_bytes == sum(one.nbytes for one in [*weights, *(layer.bias for layer in model)])
    assert {layer.backend for layer in plan.layers} == {
        "torchao"
    } and f"2 in {form} by torchao" in plan.format_summary()
    decoded = dict(precision.dequantize_tensors(model))
    assert decoded.keys() == source.state_dict().keys() and torch.equal(decoded["0.weight"], model[0].weight)


@pytest.mark.parametrize("backend", ["own", "torchao"])
def test_layers_are_built_in_fp8_unpadded_and_the_output_layer_stays_precise(backend):
    """No layer is built in bf16 and converted afterwards, and a side that is no multiple of 16 is not padded."""
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"to_q": nn.Linear(64, 96), "odd": nn.Linear(72, 2256 + 8), "proj_out": nn.Linear(64, 16)}
        )
    precision.quantize_(model, Quantize(backend=backend), ("^proj_out",), BF16)
    for _ in range(2):  # before there is a weight, and with it
        assert type(model["proj_out"]) is nn.Linear and model["proj_out"].weight.dtype == BF16
        for layer in (model["to_q"], model["odd"]):
            codes, scale = layer.get_parts()
            assert codes.shape == (layer.out_features, layer.in_features) and codes.itemsize == 1
            assert scale.shape == (layer.out_features, 1) and scale.dtype == torch.float32
            assert not any(one.dtype == BF16 and one.ndim == 2 for one in held_by(layer))
        if codes.device.type == "meta":
            sizes = {"to_q": (96, 64), "odd": (2264, 72), "proj_out": (16, 64)}
            stream = [(f"{name}.weight", torch.randn(*size)) for name, size in sizes.items()]
            stream += [(f"{name}.bias", torch.randn(size[0])) for name, size in sizes.items()]
            precision.fill_(model, stream, BF16)
    assert codes.device.type == "cpu" and model["odd"](torch.ones(3, 72, dtype=BF16)).shape == (3, 2264)


def held_by(layer: nn.Module) -> list[Tensor]:
    """The plain tensors that a layer consists of."""
    tensors = [*layer.parameters(), *layer.buffers()]
    return [part for one in tensors for part in (held_tensors(one).values() if hasattr(one, "qdata") else [one])]


def test_torchao_is_filled_one_weight_at_a_time():
    sides, depth = 1024, 8
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(sides, sides, bias=False) for _ in range(depth)])
    precision.quantize_(model, Quantize(backend="torchao"), (), BF16)
    stream = ((f"{index}.weight", torch.full((sides, sides), 0.5)) for index in range(depth))
    peak = peak_bytes(lambda: precision.fill_(model, stream, BF16))
    held = sum(tensor.nbytes for layer in model for tensor in held_by(layer))
    assert depth * sides**2 < held < 1.01 * depth * sides**2
    # Beside what is held, a few copies of one weight in float32: torchao works on the whole of it at once.
    assert peak < held + 5 * 4 * sides**2, (peak - held) / (4 * sides**2)


def test_torchao_layers_follow_a_change_of_dtype():
    model, _ = filled(nn.Sequential(nn.Linear(64, 32)), Quantize(backend="torchao"))
    before = model[0].weight
    model.to(torch.float32)
    assert model[0].weight.dtype == model[0].bias.dtype == model(torch.ones(2, 64)).dtype == torch.float32
    assert torch.equal(model[0].weight.to(BF16), before)
    assert model.to(torch.float16)(torch.ones(2, 64, dtype=torch.float16)).dtype == torch.float16
    with pytest.raises(RuntimeError, match="float16 but was given"):
        model(torch.ones(2, 64))


def test_torchao_layers_compile_as_one_graph():
    model, _ = filled(nn.Sequential(nn.Linear(64, 32)), Quantize(backend="torchao"))
    adapters.inject(model, Adapter(rank=4, alpha=4), ["0"], seed=0)
    results = []
    for one in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        x = torch.arange(128, dtype=BF16).view(2, 64).div(64).requires_grad_()
        y = one(x)
        y.float().square().sum().backward()
        results.append((y, x.grad))
    assert all(torch.equal(eager, compiled) for eager, compiled in zip(*results, strict=True))


@pytest.mark.parametrize("form", ["fp8 row", "fp8 tensor", "fp8 1x64"])
def test_torchao_holds_zeros_and_refuses_nan(form):
    source = nn.Sequential(nn.Linear(128, 32))
    scale = form.split()[1]
    with torch.no_grad():
        source[0].weight[...] = 0 if scale == "tensor" else source[0].weight
        source[0].weight[7] = 0
    model, _ = filled(source, Quantize(scale=scale, backend="torchao"))
    assert model[0].weight.isfinite().all() and (model[0].weight[7] == 0).all()
    with torch.no_grad():
        source[0].weight[3, 4] = float("nan")
    with pytest.raises(UserError, match="0: the weight has NaN or infinity"):
        filled(source, Quantize(scale=scale, backend="torchao"))


def test_torchao_keeps_the_bytes_of_a_quantized_file():
    codes = torch.randn(32, 64).to(torch.float8_e4m3fn)
    weight = Quantized(codes, torch.rand(32, 1) + 0.5)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 32, bias=False))
    precision.quantize_(model, Quantize(backend="torchao"), (), BF16)
    precision.fill_(model, [("0.weight", weight)], BF16)
    held = model[0].qweight
    assert torch.equal(held.qdata.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(held.scale, weight.scale)
    assert torch.equal(held.dequantize(), weight.dequantize(BF16))
    x = torch.ones(2, 64, dtype=BF16, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None


def kept_for_backward(model: nn.Module, sides: set[int]) -> int:
    """Bytes of decoded weights that autograd keeps from forward to backward."""
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        if set(tensor.shape) == sides and tensor.itemsize > 1:
            kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(torch.ones(1, 1024, dtype=BF16, requires_grad=True))
    return sum(tensor.nbytes for tensor in kept.values())


def test_torchao_keeps_the_decoded_weights_and_ours_does_not():
    """Why backend = "own" is the default: 8 MiB of fp8 weights cost torchao 16 MiB more from forward to backward."""
    source = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
    found = {}
    for backend in ("own", "torchao"):
        model, plan = filled(source, Quantize(backend=backend))
        assert 8 * 2**20 <= plan.num_bytes < 8.1 * 2**20
        found[backend] = kept_for_backward(model, {1024})
    assert found == {"own": 0, "torchao": 16 * 2**20}


class Gemms(TorchDispatchMode):
    """Matmuls that have the base's own sides, 96 and 160, among those of their operands."""

    NAMES = ("mm", "addmm", "_scaled_mm")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name.removeprefix("aten::") in self.NAMES:
            sides = {side for arg in args if isinstance(arg, Tensor) for side in arg.shape}
            self.count += {96, 160} <= sides
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gemms_of_a_step_ours_and_those_of_torchaos_conversion(recipe):
    """A frozen layer needs two. torchao's training conversion computes a third, the weight's gradient, and drops it."""
    source = nn.Sequential(nn.Linear(96, 160), nn.Linear(160, 96)).to(BF16).requires_grad_(False)
    own, _ = filled(source, Quantize(compute="fp8", fp8_min_features=0))
    # The recipe's own settings, computed without FP8 hardware; emulate cannot be set afterwards.
    made = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(made, "emulate", True)
    theirs = convert_to_float8_training(nn.Sequential(*source), config=made)
    assert not any(parameter.requires_grad for parameter in theirs.parameters())
    counts = []
    for model in (own, theirs):
        x = torch.ones(16, 96, dtype=BF16, requires_grad=True)
        with Gemms() as step:
            model(x).float().square().sum().backward()
        counts.append(step.count)
    assert counts == [2 * 2, 3 * 2]


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_a_base_held_by_torchao_is_its_quantize_of_the_same_model(job, family):
    mine = job("quantize.backend=torchao", family=family)
    loaded = families.get(family)(mine.model, device="cpu", dtype=BF16)
    denoiser, plan, _ = load.load_base(loaded, mine.quantize)
    path = Path(mine.model.path) / type(loaded).denoiser_name
    theirs = getattr(diffusers, type(loaded).denoiser_class).from_pretrained(path, torch_dtype=BF16)
    held = [layer for layer in plan.quantized if layer.backend == "torchao"]  # convolutions are our own
    for form in {str(layer.form) for layer in held}:
        names = {layer.name for layer in held if str(layer.form) == form}
        quantize_(theirs, FORMS[form], filter_fn=lambda module, name, names=names: name in names)
    frozen = precision.find_frozen_layers(denoiser)
    layers = {name: layer for name, layer in frozen.items() if layer.backend == "torchao"}
    assert len(layers) == len(held) > 30 and len(frozen) == len(plan.quantized)
    for name, layer in layers.items():
        assert_same(layer.qweight, theirs.get_submodule(name).weight)


def test_a_job_on_torchao_is_trained_resumed_and_verified(job):
    settings = ("quantize.backend=torchao", *SMALL, "train.steps=4")
    whole = train.run(job(*settings, "export.verify=true"), progress=False)
    assert len(whole.reports) == 2 and all(report.ok for report in whole.reports)
    assert (
        "40 in fp8 row by torchao" in next(one for one in whole.run.read_events() if one["event"] == "model")["storage"]
    )
    resumed = stopped_at_2_and_resumed(job(*settings, "name=again"))
    assert losses(resumed.run) == losses(whole.run) and len(set(losses(whole.run))) == 4
    for name in ("lora_diffusers.safetensors", "lora_kohya.safetensors"):
        before = load_file(whole.run.export / name)
        after = load_file(resumed.run.export / name.replace("lora_", "again_"))
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_plan_and_precision_show_torchaos_layers(job, tmp_path, capsys, monkeypatch):
    mine = job("quantize.backend=torchao")
    path = tmp_path / "job.toml"
    path.write_text(config.dumps(mine), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["lora-fp8", "plan", str(path)])
    cli.main()
    assert "fp8 row by torchao" in capsys.readouterr().out
    report = measure.measure_precision(mine, num_pictures=1, whole=False)
    linear = [one for one in report.layers if one.storage == "fp8 row"]
    assert len(linear) == 40 and 0.02 < max(one.output_error for one in linear) < 0.05


REFUSED = [
    (("compute=fp8",), "quantize.compute: torchao.*'upcast', or quantize.backend = 'own'"),
    (("compute=auto",), "quantize.compute: torchao"),
    (("recipe=block",), "quantize.recipe: torchao.*'current', or quantize.backend = 'own'"),
    (("storage=nf4",), "quantize.storage: torchao.*'fp8' or 'int8', or quantize.backend = 'own'"),
    (("modulation=nf4",), "quantize.modulation: torchao.*'fp8' or 'int8'"),
    (("override={'to_q' = 'nf4'}",), "quantize.override: torchao.*'fp8' or 'int8'"),
    (("scale=128x128",), "quantize.scale: torchao has no fp8 with scale '128x128'; accepted: row | tensor | 1x64"),
    (("scale=none",), "quantize.scale: torchao has no fp8 with scale 'none'"),
    (("override={'to_q' = 'fp8 none'}",), "quantize.override: torchao has no fp8 with scale 'none'"),
    (("sensitivity=auto",), "quantize.sensitivity: 'auto' needs quantize.backend = 'own'"),
    (("kernels=triton",), "quantize.kernels: 'triton' works with this program's own layers only; use 'torch'"),
]


@pytest.mark.parametrize(("settings", "expected"), REFUSED, ids=[one[0][0] for one in REFUSED])
def test_what_torchao_cannot_is_refused_in_one_line(job, settings, expected):
    with pytest.raises(UserErrors, match=expected) as told:
        job("quantize.backend=torchao", *(f"quantize.{one}" for one in settings))
    assert len(told.value.problems) == 1 and "\n" not in told.value.problems[0]


def test_torchao_that_is_not_installed(job, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else real(name))
    with pytest.raises(
        UserError, match=r"torchao is not installed; run pip install 'lora-fp8\[torchao\]', or use quantize"
    ):
        train.run(job("quantize.backend=torchao"), progress=False)


def test_a_backend_that_has_nothing_to_hold_is_told(job):
    mine = job("quantize.backend=torchao", "quantize.storage=none")
    line = "quantize.backend has no effect without quantize.storage = 'fp8' or 'int8' or 'nf4'"
    assert line in find_unused_settings(mine)


# -- TransformerEngine, by a stand-in ----------------------------------------------------------------------------------


class Recipe:
    def __init__(self, **settings):
        self.settings = settings


def recipe_class(name: str) -> type[Recipe]:
    return type(name, (Recipe,), {})


class HeldWeight(nn.Parameter):
    """What a layer built under `quantized_model_init` holds: e4m3 values under a scale that its recipe sets."""

    def copy_(self, source):
        scale = self.fixed_scale[1] if self.fixed_scale is not None else 448 / source.abs().amax().float()
        self.data.copy_((source.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale)
        self.copies += 1
        return self

    def dequantize(self, *, dtype=None):
        return self.detach().to(dtype or self.dtype)


class StandInLinear(nn.Module):
    """`te.Linear` as far as it is used: refuses what the real one refuses, multiplies with the last step's scale."""

    made: list["StandInLinear"] = []

    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        assert in_features % 16 == out_features % 16 == 0 and not bias and torch.is_grad_enabled()
        self.built_with, self.contexts, self.rows = STATE["init"], [], []
        delayed = type(self.built_with).__name__ == "DelayedScaling"
        self.fp8_meta = {
            key: types.SimpleNamespace(scale=torch.ones(count), amax_history=torch.zeros(16, count))
            for key, count in (("scaling_fwd", 3), ("scaling_bwd", 2))
        }
        self.weight = HeldWeight(torch.randn(out_features, in_features, dtype=params_dtype, device=device))
        self.weight.fixed_scale = self.fp8_meta["scaling_fwd"].scale if delayed else None
        self.weight.copies = 0
        StandInLinear.made.append(self)

    def forward(self, x_MK):
        assert STATE["depth"] and len(x_MK) % 8 == 0 and STATE["recipe"] is self.built_with
        assert not self.weight.requires_grad and self.weight.copies == 1
        self.contexts.append((STATE["depth"], type(self.built_with).__name__))
        self.rows.append(len(x_MK))
        scale = 448 / x_MK.detach().abs().amax().float()
        if self.weight.fixed_scale is not None:
            scale = self.fp8_meta["scaling_fwd"].scale[0].clone()
        self.fp8_meta["scaling_fwd"].amax_history[0, 0] = x_MK.detach().abs().amax()
        rounded = (x_MK.detach().float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale
        return F.linear(x_MK + (rounded.to(x_MK.dtype) - x_MK.detach()), self.weight)


STATE = {"init": None, "recipe": None, "depth": 0}


@contextmanager
def quantized_model_init(enabled=True, recipe=None):
    STATE["init"] = recipe if enabled else None
    yield
    STATE["init"] = None


@contextmanager
def te_autocast(enabled=True, recipe=None):
    before = STATE["recipe"]
    STATE["depth"], STATE["recipe"] = STATE["depth"] + 1, recipe
    yield
    STATE["depth"], STATE["recipe"] = STATE["depth"] - 1, before
    if STATE["depth"] == 0 and torch.is_grad_enabled():  # where the real one moves its histories on
        for one in StandInLinear.made:
            meta = one.fp8_meta["scaling_fwd"]
            known = meta.amax_history[:, 0].amax()
            if known > 0:
                meta.scale[0] = 448 / known
            meta.amax_history.copy_(meta.amax_history.roll(1, 0))
            meta.amax_history[0] = 0


@pytest.fixture
def te(monkeypatch):
    """The stand-in in place of TransformerEngine, on a machine that seems to have it and a Hopper card."""
    names = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling")
    modules = {
        "transformer_engine": {},
        "transformer_engine.pytorch": dict(
            Linear=StandInLinear, autocast=te_autocast, quantized_model_init=quantized_model_init
        ),
        "transformer_engine.common": {},
        "transformer_engine.common.recipe": {name: recipe_class(name) for name in names},
    }
    made = {}
    for name, contents in modules.items():
        made[name] = types.ModuleType(name)
        made[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(made[name]).update(contents)
        monkeypatch.setitem(sys.modules, name, made[name])
    made["transformer_engine"].pytorch = made["transformer_engine.pytorch"]
    monkeypatch.delitem(sys.modules, "lora_fp8.precision.backend_te", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100")
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    StandInLinear.made = []
    yield made
    sys.modules.pop("lora_fp8.precision.backend_te", None)
    StandInLinear.made = []
    gc.collect()


def te_section(**settings) -> Quantize:
    return Quantize(backend="te", compute="fp8", **{"fp8_min_features": 0} | settings)


@pytest.mark.parametrize(
    ("recipe", "name", "storage", "rows"),
    [
        ("current", "Float8CurrentScaling", "fp8 tensor", 16),
        ("delayed", "DelayedScaling", "fp8 tensor", 16),
        ("block", "Float8BlockScaling", "fp8 128x128", 16),
        ("mxfp8", "MXFP8BlockScaling", "fp8 1x32", 32),
    ],
)
def test_te_layers_are_built_in_fp8_filled_and_frozen(te, recipe, name, storage, rows):
    source = nn.Sequential(nn.Linear(96, 160), nn.Linear(160, 96))
    model, plan = filled(source, te_section(recipe=recipe))
    assert [str(layer.form) for layer in plan.layers] == [storage] * 2
    assert {layer.backend for layer in plan.layers} == {"te"} and f"2 in {storage} by te" in plan.format_summary()
    # Two layouts of a byte each, and the scales, which are few.
    assert 2 * 2 * 96 * 160 < plan.num_bytes < 2 * 2 * 96 * 160 * 1.05 + 2 * 256
    assert len(StandInLinear.made) == 2 and all(type(one.built_with).__name__ == name for one in StandInLinear.made)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    adapters.inject(model, Adapter(rank=4, alpha=4), ["0", "1"], seed=0)
    x = torch.randn(3, 5, 96, dtype=BF16, requires_grad=True)  # 15 tokens: no multiple of 8
    y = model(x)
    assert y.shape == (3, 5, 96)
    y.float().sum().backward()
    trained = [parameter for _, parameter in adapters.list_trained_parameters(model)]
    assert all(one.grad is not None for one in [x, *trained])
    assert [key for key, one in model.named_parameters() if one.grad is not None and "lora_" not in key] == []
    assert all(one.contexts == [(1, name)] and one.rows == [rows] for one in StandInLinear.made)
    # The weights are what an fp8 tensor can hold of the file's, under the plain model's names.
    decoded = dict(precision.dequantize_tensors(model))
    assert decoded.keys() == source.state_dict().keys()
    for key, tensor in source.state_dict().items():
        error = (decoded[key].double() - tensor.double()).norm() / tensor.double().norm()
        assert error < (0.03 if "weight" in key else 0.003)
    held = precision.as_held(source[0].weight.detach(), plan.layers[0], te_section(recipe=recipe), BF16)
    assert torch.equal(held, decoded["0.weight"]) and StandInLinear.made.pop().contexts == []
    # Decoded, it answers as a program without TransformerEngine, and nothing of it is called.
    with torch.no_grad(), precision.decoded_compute(model):
        expected = F.linear(F.linear(x, decoded["0.weight"], decoded["0.bias"]), decoded["1.weight"], decoded["1.bias"])
        assert torch.equal(model(x), expected)
    assert all(len(one.contexts) == 1 for one in StandInLinear.made)


def test_te_with_small_weights_under_the_delayed_recipe(te):
    """Its history begins at scale 1, at which weights of 1e-4 would be held as zero."""
    source = nn.Sequential(nn.Linear(64, 64))
    source[0].weight.data.mul_(1e-3)
    model, _ = filled(source, te_section(recipe="delayed"))
    error = (model[0].weight.double() - source[0].weight.double()).norm() / source[0].weight.double().norm()
    assert error < 0.03


def test_what_te_does_not_multiply_is_ours_or_bf16(te):
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.odd, self.after = nn.Linear(64, 72), nn.Linear(64, 64)  # neighbours: the odd one ends nothing
            self.mod, self.small, self.left, self.moved = (nn.Linear(64, out) for out in (128, 32, 64, 64))
            self.kept = nn.Linear(64, 64)

    section = te_section(fp8_min_features=64, fp8_exclude=["left"], override={"moved": "int8"}, keep=["kept"])
    with torch.device("meta"):
        plan = precision.decide(Small(), section, (), BF16, ("mod",))
    found = {
        one.name: (str(one.form or one.storage), one.backend, one.compute_reason or one.reason) for one in plan.layers
    }
    assert found == {
        "odd": ("bf16", "", "a side is not a multiple of 16, which TransformerEngine needs"),
        "after": ("fp8 tensor", "te", ""),
        "mod": ("int8 1x64", "own", "sees one row per image"),
        "small": ("fp8 row", "own", "a side is below quantize.fp8_min_features = 64"),
        "left": ("fp8 row", "own", "'left' in quantize.fp8_exclude"),
        "moved": ("int8 1x64", "own", "int8 has no FP8 matmul"),
        "kept": ("bf16", "", "'kept' in quantize.keep"),
    }
    with torch.device("meta"):
        mxfp8 = precision.decide(nn.Sequential(nn.Linear(64, 48)), te_section(recipe="mxfp8"), (), BF16)
    assert mxfp8.layers[0].reason == "a side is not a multiple of 32, which TransformerEngine needs"


def test_a_job_on_te_is_trained_and_verified(te, job, monkeypatch):
    monkeypatch.setattr(backends, "find_problem", lambda section, device, world=1: "")
    result = train.run(job(*TE, *SMALL, "train.steps=2", "export.verify=true"), progress=False)
    assert len(result.reports) == 2 and all(report.ok for report in result.reports)
    assert (
        "40 in fp8 tensor by te" in next(one for one in result.run.read_events() if one["event"] == "model")["storage"]
    )
    assert {depth for one in StandInLinear.made for depth, _ in one.contexts} == {1}


def test_the_delayed_recipes_history_is_saved_and_previews_leave_no_trace_in_it(te, job, monkeypatch):
    """Without it the resumed run would begin with other scales."""
    monkeypatch.setattr(backends, "find_problem", lambda section, device, world=1: "")
    settings = (*TE, *SMALL, "quantize.recipe=delayed", "train.steps=4")
    whole = train.run(job(*settings), progress=False)
    # One around the whole forward, at whose end the histories move on, and each layer's inside of it.
    assert {depth for one in StandInLinear.made for depth, _ in one.contexts} == {2}
    histories = load_file(whole.run.checkpoints / "step-000004" / "optimizer.safetensors")
    histories = {name: one for name, one in histories.items() if name.startswith("amax.")}
    assert len(histories) == 40 * 4
    newest = histories["amax.mid_block.attentions.0.transformer_blocks.0.attn1.to_q.scaling_fwd.amax_history"]
    assert newest.shape == (16, 3) and (newest[1:5, 0] > 0).all() and (newest[5:, 0] == 0).all()  # no preflight in it
    StandInLinear.made.clear()
    drawn = job(*settings, "name=drawn", "preview.prompts=['a cat']", "preview.every=1")
    resumed = stopped_at_2_and_resumed(drawn)
    assert losses(resumed.run) == losses(whole.run) and len(set(losses(whole.run))) == 4


def test_te_refuses_a_checkpoint_without_its_history(te, job, monkeypatch):
    model, _ = filled(nn.Sequential(nn.Linear(64, 64)), te_section(recipe="delayed"))
    amax = precision.make_amax_history(model)
    tensors = amax.copy_tensors()
    assert sorted(tensors) == [
        f"amax.0.scaling_{way}.{kind}" for way in ("bwd", "fwd") for kind in ("amax_history", "scale")
    ]
    with pytest.raises(UserError, match="lacks 1 amax histories"):
        amax.load_({name: one for name, one in tensors.items() if "fwd.scale" not in name})


CONFIG_REFUSALS = [
    (
        ("quantize.storage=int8",),
        "quantize.storage: TransformerEngine stores FP8 only, not 'int8'; use 'fp8', or quant",
    ),
    (("quantize.storage=nf4",), "quantize.storage: TransformerEngine stores FP8 only, not 'nf4'"),
    (
        ("quantize.compute=upcast",),
        "quantize.compute: TransformerEngine multiplies in FP8, not 'upcast'; use 'fp8', or",
    ),
    (("quantize.compute=fp8_forward",), "quantize.compute: TransformerEngine multiplies in FP8, not 'fp8_forward'"),
    (("quantize.scale=row",), "quantize.scale: quantize.recipe decides TransformerEngine's scales; use 'auto', or"),
    (("quantize.fast_accum=false",), "quantize.fast_accum: TransformerEngine decides"),
    (("quantize.sensitivity=auto",), "quantize.sensitivity: 'auto' needs quantize.backend = 'own'"),
    (("quantize.kernels=triton",), "quantize.kernels: 'triton' works with this program's own layers only; use 'torch'"),
    (
        ("memory.compile=blocks",),
        "memory.compile: 'blocks' does not work with quantize.backend = 'te'; use 'off', or quantize.b",
    ),
    (
        ("memory.compile=blocks", "quantize.recipe=delayed"),
        "memory.compile: 'blocks' does not work with quantize.backend = 'te'",
    ),
    (
        ("memory.gradient_checkpointing=true", "quantize.recipe=delayed"),
        "memory.gradient_checkpointing: gradient checkpointing does not work with quantize.recipe = 'delayed'",
    ),
]


@pytest.mark.parametrize(("settings", "expected"), CONFIG_REFUSALS, ids=[one[0][-1] for one in CONFIG_REFUSALS])
def test_what_te_cannot_is_refused_in_one_line(job, settings, expected):
    with pytest.raises(UserErrors, match=expected) as told:
        job(*TE, *settings)
    assert len(told.value.problems) == 1 and "\n" not in told.value.problems[0]


def test_mxfp8_is_for_te_only(job):
    with pytest.raises(
        UserErrors, match="quantize.recipe: 'mxfp8' needs quantize.backend = 'te'; use that, or 'current'"
    ):
        job("quantize.recipe=mxfp8", "quantize.compute=fp8")


MACHINES = [
    ("current", (8, 9), "12.4", ""),
    (
        "current",
        (8, 6),
        "12.9",
        "has compute capability 8.6, but FP8 needs 8.9; use quantize.backend = 'own' with quantize.comp",
    ),
    ("delayed", (8, 0), "12.9", "has compute capability 8.0, but FP8 needs 8.9"),
    (
        "block",
        (8, 9),
        "12.9",
        "has compute capability 8.9, but recipe 'block' needs 9.0; use quantize.recipe = 'current', or quant",
    ),
    ("block", (9, 0), "12.8", "runs CUDA 12.8, but recipe 'block' needs 12.9; use quantize.recipe = 'current'"),
    ("block", (9, 0), "12.9", ""),
    ("block", (9, 0), "13.0", ""),
    (
        "mxfp8",
        (9, 0),
        "12.9",
        "has compute capability 9.0, but recipe 'mxfp8' needs 10.x; use quantize.recipe = 'current'",
    ),
    ("mxfp8", (10, 0), "12.9", ""),
    ("mxfp8", (12, 0), "13.0", "has compute capability 12.0, but recipe 'mxfp8' needs 10.x"),
]


@pytest.mark.parametrize(("recipe", "capability", "cuda", "expected"), MACHINES)
def test_what_te_needs_of_a_machine(te, monkeypatch, recipe, capability, cuda, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    text = precision.find_problem(te_section(recipe=recipe), torch.device("cuda"))
    assert expected in text and bool(text) == bool(expected) and "\n" not in text


def test_te_that_is_not_there_or_cannot_be_imported(job, te, monkeypatch):
    with pytest.raises(UserError, match="needs a CUDA GPU, but this job runs on a cpu; use quantize.backend = 'own'"):
        train.run(job(*TE), progress=False)
    cuda = torch.device("cuda")
    assert "delayed' trains in one process only, not in 2" in precision.find_problem(
        te_section(recipe="delayed"), cuda, 2
    )
    assert precision.find_problem(te_section(recipe="delayed"), cuda) == ""

    def broken(name):
        raise OSError("libtransformer_engine.so: undefined symbol\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", broken)
        text = precision.find_problem(te_section(), cuda)
    assert "cannot be imported (OSError: libtransformer_engine.so: undefined symbol); use quantize" in text
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "TransformerEngine is not installed; run pip install" in precision.find_problem(te_section(), cuda)
