"""What quantization costs: figures against float64, planted faults found and moved, and "auto" the same on resume."""

import copy
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_fp8 import cli, config, families, precision, train
from lora_fp8.config import find_unused_settings
from lora_fp8.distributed import processes
from lora_fp8.errors import UserError
from lora_fp8.plan import plan as planning
from lora_fp8.precision import Format, report
from lora_fp8.run import Run
from lora_fp8.settings import Job, Quantize, parse_lines
from lora_fp8.stages import cache, load, measure
from lora_fp8.stages.session import Session, UnwrittenRun
from lora_fp8.training import checkpoint, memory

DTYPE = torch.bfloat16
FORMS = {
    "fp8 row": {},
    "fp8 tensor": {"scale": "tensor"},
    "fp8 none": {"scale": "none"},
    "int8 row": {"storage": "int8", "scale": "row"},
    "int8 1x128": {"storage": "int8"},
    "nf4": {"storage": "nf4"},
}


class Net(nn.Module):
    """Four layers in a row, and one that nobody calls."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(3)
        for name in "abcd":
            setattr(self, name, nn.Linear(width, width))
        self.unused = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        for name in "abcd":
            x = nn.functional.silu(getattr(self, name)(x)) + x
        return x


def plant(net: Net, name: str, fault: str) -> Net:
    """Spoil one layer in a way that one of the storages does not bear."""
    weight = getattr(net, name).weight.data
    if fault == "outliers":
        chosen = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0)) < 0.005
        weight[chosen] *= 60
    elif fault == "tiny":
        weight *= 1e-2
    elif fault == "row x1e5":
        weight[7] *= 1e5
    return net


def held(net: nn.Module, **settings: Any) -> nn.Module:
    denoiser = copy.deepcopy(net)
    precision.quantize_(denoiser, Quantize(**settings), (), DTYPE)
    return denoiser


def stream(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return iter(net.state_dict().items())


def inputs_of(denoiser: nn.Module, tokens: int = 200) -> list[Callable[[], Any]]:
    x_MK = torch.randn(2, tokens // 2, 128, generator=torch.Generator().manual_seed(5)).to(DTYPE)
    return [lambda: denoiser(x_MK)]


def measured(net: nn.Module, bound: float = math.inf, **settings: Any) -> list[report.LayerError]:
    denoiser = held(net, **settings)
    captured = report.capture_inputs(denoiser, inputs_of(denoiser))
    return report.measure_layer_errors(denoiser, stream(net), captured, DTYPE, bound)


def by_hand(net: Net, denoiser: nn.Module) -> dict[str, dict[str, float]]:
    """The same figures from numpy in float64, the inputs from a loop of its own."""
    x = torch.randn(2, 100, 128, generator=torch.Generator().manual_seed(5)).to(DTYPE)
    found = {}
    for name in "abcd":
        layer = getattr(denoiser, name)
        inputs = x.reshape(-1, 128).double().numpy()
        plain = getattr(net, name).weight.detach().to(DTYPE).double().numpy()
        kept = layer.weight.double().numpy()
        expected, got = inputs @ plain.T, inputs @ kept.T
        sizes = np.linalg.norm(expected, axis=0)
        # torch's median of an even number is the lower of the two in the middle.
        floor = np.sort(sizes)[(len(sizes) - 1) // 2]
        each = np.linalg.norm(got - expected, axis=0) / np.maximum(sizes, floor)
        found[name] = {
            "weight_error": np.linalg.norm(kept - plain) / np.linalg.norm(plain),
            "output_error": np.linalg.norm(got - expected) / np.linalg.norm(expected),
            "feature_error": np.sqrt(np.mean(each**2)),
            "flushed": np.sum((kept == 0) & (plain != 0)) / np.sum(plain != 0),
        }
        x = nn.functional.silu(layer(x)) + x
    return found


@pytest.mark.parametrize("form", FORMS)
def test_errors_agree_with_float64(form: str) -> None:
    net = plant(Net(), "b", "tiny")
    found = {one.name: one for one in measured(net, **FORMS[form])}
    expected = by_hand(net, held(net, **FORMS[form]))
    for name, figures in expected.items():
        assert found[name].storage == form and found[name].num_inputs == 200
        for key, value in figures.items():
            assert getattr(found[name], key) == pytest.approx(value, rel=1e-9), (name, key)
        assert found[name].damage == max(found[name].output_error, found[name].feature_error)
    assert form != "fp8 none" or found["b"].flushed > 0.1  # 0 == 0 would prove nothing
    unused = found["unused"]
    assert (unused.num_inputs, unused.output_error, unused.damage) == (0, None, unused.weight_error)
    assert 0 < unused.weight_error < 0.15


@pytest.mark.parametrize(
    ("fault", "form"), [("outliers", "int8 row"), ("tiny", "fp8 none"), ("row x1e5", "fp8 tensor")]
)
@pytest.mark.parametrize("name", ["a", "c"])
def test_the_planted_layer_is_first_and_the_only_one_to_move(name: str, fault: str, form: str) -> None:
    clean = measured(Net(), **FORMS[form])
    errors = measured(plant(Net(), name, fault), bound=1.2 * clean[0].damage, **FORMS[form])
    assert errors[0].name == name and errors[0].damage > 1.5 * errors[1].damage
    assert errors == sorted(errors, key=lambda one: -one.damage)
    assert [one.name for one in errors if one.better] == [name]
    assert errors[0].better in ("int8 1x128", "bf16")
    assert errors[0].better_damage <= 1.2 * clean[0].damage


def test_one_huge_row_does_not_hide_the_others() -> None:
    """All others lose a fifth, which neither the weights' nor the outputs' sum of squares shows."""
    worst = measured(plant(Net(), "c", "row x1e5"), **FORMS["fp8 tensor"])[0]
    assert worst.name == "c" and worst.extreme_rows == 1
    assert worst.output_error < 0.04 and worst.weight_error < 0.04 < 0.15 < worst.feature_error


def test_the_better_storage_is_the_cheapest_that_holds_the_bound() -> None:
    net = plant(Net(), "c", "tiny")
    for bound, better in ((1.5, ""), (0.02, "int8 1x128"), (0.001, "bf16")):
        found = next(one for one in measured(net, bound=bound, **FORMS["fp8 none"]) if one.name == "c")
        assert found.better == better, bound
        if better:
            assert found.override == {"^c": better}
            again = {one.name: one for one in measured(net, override=found.override, **FORMS["fp8 none"])}
            if better == "bf16":
                assert "c" not in again and found.better_bytes == 2 * 128 * 128
            else:  # what was promised is what then is there
                assert again["c"].storage == better and again["c"].num_bytes == found.better_bytes
                assert again["c"].damage == found.better_damage <= bound


def test_ladder() -> None:
    assert report.list_alternatives(Format("fp8", "row"), (64, 256)) == [Format("int8", "1x128"), None]
    assert report.list_alternatives(Format("nf4", "64"), (64, 192)) == [Format("int8", "1x64"), None]
    assert report.list_alternatives(Format("fp8", "none"), (64, 48)) == [Format("int8", "row"), None]
    assert report.list_alternatives(Format("int8", "row"), (64, 256)) == [Format("int8", "1x128"), None]
    assert report.list_alternatives(Format("int8", "row"), (64, 128)) == [None]  # one block is one row
    assert report.list_alternatives(Format("int8", "row"), (64, 48)) == [None]
    assert report.list_alternatives(Format("int8", "1x128"), (64, 256)) == [None]
    assert report.list_alternatives(Format("int8", "1x64"), (64, 256)) == [None]  # 1x128 would be a step down


# -- what is not a number like others ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_zero_denormal_and_huge_rows_give_finite_figures(form: str) -> None:
    net = Net()
    net.b.weight.data[:5] = 0
    net.c.weight.data[:3] = 1e-39
    net.c.weight.data[3, 0] = -1e-40
    net.c.weight.data[4] *= 1e20
    net.d.weight.data.zero_()
    net.a.weight.data[0] = 1e36
    # Of a sound net: huge weights overflow in bf16 when they are multiplied one after the other.
    sound = held(Net())
    inputs = report.capture_inputs(sound, inputs_of(sound))
    errors = report.measure_layer_errors(held(net, **FORMS[form]), stream(net), inputs, DTYPE, 1e-6)
    found = {one.name: one for one in errors}
    for one in found.values():
        values = (one.damage, one.weight_error, one.better_damage, one.flushed)
        assert all(math.isfinite(value) for value in values), one
    counts = {name: (one.zero_rows, one.denormal_rows, one.extreme_rows) for name, one in found.items()}
    assert counts["b"] == (5, 0, 0) and counts["c"] == (0, 3, 1) and counts["d"] == (128, 0, 0)
    assert counts["a"] == (0, 0, 1) and counts["unused"] == (0, 0, 0)
    assert found["d"].damage == 0 and found["d"].better == ""
    json.dumps([one.__dict__ for one in found.values()], allow_nan=False)


def test_inputs_of_zero_are_no_error() -> None:
    net = Net()
    denoiser = held(net)
    zeros = {name: torch.zeros(4, 128, dtype=DTYPE) for name in "abcd"}
    assert {
        one.damage for one in report.measure_layer_errors(denoiser, stream(net), zeros, DTYPE) if one.num_inputs
    } == {0.0}


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_an_error_that_names_the_layer(bad: float) -> None:
    net = Net()
    denoiser = held(net)
    captured = report.capture_inputs(denoiser, inputs_of(denoiser))
    captured["b"][3, 7] = bad
    with pytest.raises(ValueError, match=r"^b: its input has NaN or infinity"):
        report.measure_layer_errors(denoiser, stream(net), captured, DTYPE)
    net.c.weight.data[5, 9] = bad
    with pytest.raises(ValueError, match=r"^c: the weight has NaN or infinity"):
        report.measure_layer_errors(denoiser, stream(net), {}, DTYPE)
    with pytest.raises(ValueError, match=r"^c: the weight has NaN or infinity"):
        held(net)


def test_a_stream_without_a_layer_is_an_error() -> None:
    net = Net()
    lacking = [(name, tensor) for name, tensor in stream(net) if name != "b.weight"]
    with pytest.raises(ValueError, match=r"lacks 1 quantized layers \(first: b\)"):
        report.measure_layer_errors(held(net), lacking, {}, DTYPE)


# -- what is measured on -----------------------------------------------------------------------------------------------


def test_inputs_are_few_evenly_spaced_and_those_of_decoded_weights() -> None:
    x_MK = torch.randn(1000, 128).to(DTYPE)
    denoiser = held(Net())
    captured = report.capture_inputs(denoiser, [lambda: denoiser(x_MK), lambda: denoiser(-x_MK)], num_inputs=50)
    assert captured.keys() == set("abcd") and {tuple(rows.shape) for rows in captured.values()} == {(50, 128)}
    rows = x_MK[torch.arange(25) * 40]
    assert torch.equal(captured["a"], torch.cat([rows, -rows]))
    assert not any(layer._forward_pre_hooks for layer in precision.find_frozen_layers(denoiser).values())
    in_fp8 = held(Net(), compute="fp8", fp8_min_features=0)
    again = report.capture_inputs(in_fp8, [lambda: in_fp8(x_MK), lambda: in_fp8(-x_MK)], num_inputs=50)
    assert all(torch.equal(captured[name], again[name]) for name in captured)


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_the_fp8_matmul_adds_the_rounding_of_its_input(recipe: str) -> None:
    plain = {one.name: one for one in measured(Net())}
    for one in measured(Net(), compute="fp8", recipe=recipe, fp8_min_features=0):
        if one.num_inputs:  # two errors of about 2.6 %, at right angles
            assert one.output_error == plain[one.name].output_error and plain[one.name].multiplied_error is None
            assert 1.2 * one.output_error < one.multiplied_error < 2 * one.output_error


def test_twice_the_same() -> None:
    for form in FORMS.values():
        assert measured(Net(), bound=0.01, **form) == measured(Net(), bound=0.01, **form)


def test_for_people() -> None:
    errors = measured(plant(Net(), "c", "tiny"), bound=0.2, **FORMS["fp8 none"])
    lines = report.format_table(errors, limit=2)
    assert lines[0].split() == ["layer", "storage", "output", "feature", "weight", "to", "zero"]
    assert lines[1].startswith("c ") and lines[-1] == "... and 3 layers with smaller errors; --json lists them all"
    assert report.format_totals(errors)[0].startswith("fp8 none: 5 layers, 0.1 MB")
    said = "\n".join(report.format_advice(errors, 0.2, {"a": "bf16"}))
    assert '[quantize.override]\n"^c" = "int8 1x128"\n"a" = "bf16"' in said
    assert report.format_advice(measured(Net(), bound=0.2), 0.2) == [
        "no layer is above quantize.sensitivity_bound = 0.2: there is nothing to do"
    ]


# -- a whole job -------------------------------------------------------------------------------------------------------

PLANTED = {"sd15": "mid_block.attentions.0.transformer_blocks.0.ff.net.2", "flux": "transformer_blocks.0.ff.net.2"}
AUTO = ("quantize.scale=none", "quantize.sensitivity=auto", "quantize.sensitivity_bound=0.2")


@pytest.fixture(scope="module")
def spoiled(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """spoiled("sd15"): the setting of a miniature in which one layer's weights are too small for fp8 without scales."""

    def spoil(family: str) -> str:
        folder = tmp_path_factory.mktemp("spoiled") / family
        shutil.copytree(tiny(family), folder)
        path = next((folder / families.get(family).denoiser_name).glob("*.safetensors"))
        tensors = load_file(path)
        tensors[f"{PLANTED[family]}.weight"] *= 1e-2
        save_file(tensors, path, {"format": "pt"})
        return f"model.path='{folder}'"

    return spoil


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["event"] == kind]


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_report_of_a_job(job, spoiled, family: str) -> None:
    mine = job("quantize.scale=none", "quantize.sensitivity_bound=0.2", spoiled(family), family=family)
    told: list[dict[str, Any]] = []
    found = measure.measure_precision(mine, num_pictures=2, echo=told.append)
    assert found.layers[0].name == PLANTED[family] and found.layers[0].better.startswith("int8")
    assert [one.name for one in found.layers if one.better] == [PLANTED[family]]
    assert found.pictures == 2 and found.moved == [] and found.multiplied == {}
    assert found.to_json() == measure.measure_precision(mine, num_pictures=2).to_json()  # and again
    assert not Path(mine.output_dir).exists()
    assert {event["event"] for event in told} >= {"stage", "cache", "data"}
    json.dumps(found.to_json(), allow_nan=False)
    assert f'"^{PLANTED[family]}" = "int8' in "\n".join(found.format_lines())

    # The predictions once more, by diffusers' own model: the plain one, and one with the weights as they are held.
    session = cached(mine)
    loaded = session.family
    asked = measure.make_questions(session, 2)
    plain = loaded.make_empty_denoiser().to_empty(device="cpu").to(DTYPE).eval()
    plain.load_state_dict(dict(loaded.read_denoiser_tensors()))
    rounded = copy.deepcopy(plain)
    for layer in session.plan.layers.quantized:
        weight = dict(loaded.read_denoiser_tensors())[f"{layer.name}.weight"]
        matrix = precision.round_trip(weight.flatten(1), layer.form, DTYPE)
        rounded.get_submodule(layer.name).weight.data = matrix.view(weight.shape)
    for label, error in found.prediction.items():
        before, after = (
            torch.cat([one.ask(loaded, model).flatten() for one in asked if one.label == label]).double()
            for model in (plain, rounded)
        )
        assert len([one for one in asked if one.label == label]) == 2
        assert error == pytest.approx(((after - before).norm() / before.norm()).item(), rel=1e-6)
        assert 0 < error < 0.3


def test_noise_levels_are_the_objectives_own(job) -> None:
    for family, expected in (("sd15", [100, 300, 500, 699, 899]), ("flux", [0.1, 0.3, 0.5, 0.7, 0.9])):
        mine = job(family=family)
        loaded = families.get(family)(mine.model, device="cpu", dtype=DTYPE)
        objective = loaded.get_objective_type()(loaded.read_scheduler_config(), mine.objective)
        t = [objective.convert_level(level)[0] for level in measure.LEVELS]
        assert torch.cat(t).tolist() == pytest.approx(expected)
        clean, noise = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
        left = [objective.add_noise(clean, noise, one).item() for one in t]
        assert left == sorted(left, reverse=True) and left[0] > 0.85 and left[-1] < 0.15


def test_report_with_fp8_matmuls_and_without_the_whole(job) -> None:
    found = measure.measure_precision(job("quantize.compute=fp8", "quantize.fp8_min_features=0"), num_pictures=1)
    assert found.multiplied.keys() == found.prediction.keys() and len(found.prediction) == 5
    assert all(found.multiplied[label] > found.prediction[label] for label in found.prediction)
    assert any(one.multiplied_error for one in found.layers)
    torch.backends.cuda.enable_cudnn_sdp(True)
    alone = measure.measure_precision(job(), num_pictures=1, whole=False)
    assert not torch.backends.cuda.cudnn_sdp_enabled(), "a training does without it"
    assert alone.prediction == {} and alone.layers
    with pytest.raises(UserError, match="no layer is quantized"):
        measure.measure_precision(job("quantize.storage=none"))


def test_the_command(job, tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "job.toml"
    file.write_text(config.dumps(job()), encoding="utf-8")
    arguments = ["lora-fp8", "precision", str(file), "--pictures", "1", "--layers-only"]
    monkeypatch.setattr("sys.argv", [*arguments, "--json"])
    cli.main()
    told = json.loads(capsys.readouterr().out)
    assert told["layers"][0]["damage"] >= told["layers"][-1]["damage"] > 0
    monkeypatch.setattr("sys.argv", arguments)
    cli.main()
    assert told["layers"][0]["name"] in capsys.readouterr().out


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_auto_moves_the_planted_layer_and_the_bound_holds(job, spoiled, monkeypatch, family: str) -> None:
    """The same job with the layer written into quantize.override by hand trains to the same losses."""
    base, shares = spoiled(family), []
    monkeypatch.setattr(measure, "load_base", lambda *given: shares.append(given[2:]) or load.load_base(*given))
    monkeypatch.setattr(memory, "find_problem", lambda *_: "")  # a CPU has nowhere else to put them
    monkeypatch.setattr(memory, "count_free_bytes", lambda _: 1)  # a GPU on which the plain base has no room
    told = ("export.verify=true", "train.steps=2", "memory.offload=0.5")
    done = train.run(job(*AUTO, base, *told, family=family), progress=False).run
    assert set(shares) == {(0.5,)}  # what does not fit to be trained does not fit to be measured
    (event,) = events(done, "sensitivity")
    (line,) = event["moved"]
    ((name, held),) = parse_lines([line]).items()
    storage, scale = held.split(" ")
    assert name == f"^{PLANTED[family]}" and storage == "int8"
    assert event["worst_before"] > 0.2 >= event["worst"] and event["added_bytes"] > 0
    assert f" in int8 {scale}" in events(done, "model")[0]["storage"]
    assert all(event["ok"] for event in events(done, "verify"))
    assert any("are compared on the CPU" in event["text"] for event in events(done, "warning"))
    assert checkpoint.read_latest(done.checkpoints)[0].state["moved"] == [line]

    by_hand = ("quantize.scale=none", f"quantize.override={{'{name}' = '{held}'}}", "name=hand", "train.steps=2", base)
    written = train.run(job(*by_hand, family=family), progress=False).run
    losses = [[event["loss"] for event in events(run, "step")] for run in (done, written)]
    assert losses[0] == losses[1]
    found = measure.measure_precision(job(*by_hand, "quantize.sensitivity_bound=0.2", family=family), num_pictures=4)
    assert found.layers[0].damage == event["worst"] and not any(one.better for one in found.layers)


def test_auto_on_resume_moves_the_same_and_measures_nothing(job, spoiled, tree_hash, monkeypatch) -> None:
    base = spoiled("sd15")
    whole = train.run(job(*AUTO, base, "name=whole"), progress=False).run
    train.run(job(*AUTO, base, "train.steps=4"), progress=False)

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(report, "capture_inputs", forbidden)
    resumed = train.run(job(*AUTO, base), resume=True, progress=False).run
    assert len(events(resumed, "sensitivity")) == 1  # of the first start
    storages = [event["storage"] for event in events(resumed, "model")]
    assert storages[0] == storages[1] == events(whole, "model")[0]["storage"]
    moved = [checkpoint.read_latest(run.checkpoints)[0].state["moved"] for run in (whole, resumed)]
    assert moved[0] == moved[1] and len(moved[0]) == 1
    adapters = [checkpoint.read_latest(run.checkpoints)[0].adapter for run in (whole, resumed)]
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])
    with pytest.raises(UserError, match=r"quantize\.sensitivity_bound: was 0\.2, is 0\.3"):
        train.run(job(*AUTO, base, "quantize.sensitivity_bound=0.3", "train.steps=8"), resume=True, progress=False)


def cached(mine: Job) -> Session:
    """A session of the job without a folder, whose images and captions are in the cache."""
    session = Session(planning.make(mine), UnwrittenRun(None), processes.Processes())
    cache.cache(session)
    return session


class Other:
    """A process beside others; what the main one says comes from the test."""

    device = torch.device("cpu")

    def __init__(self, is_main: bool, said: list[str] | None = None) -> None:
        self.is_main, self.said = is_main, said

    def gather(self, mine: list[str]) -> list[list[str]]:
        return [mine] if self.is_main else [self.said, mine]


def test_other_processes_take_the_main_ones_decision(job, spoiled, monkeypatch) -> None:
    session = cached(job(*AUTO, spoiled("sd15")))
    lines = measure.find_layers_to_move(replace(session, processes=Other(True)), resume=False)
    assert len(lines) == 1
    monkeypatch.setattr(report, "capture_inputs", None)  # the others measure nothing
    assert measure.find_layers_to_move(replace(session, processes=Other(False, lines)), resume=False) == lines


def test_what_the_user_set_stays_and_is_told(job, spoiled) -> None:
    session = cached(job(*AUTO, spoiled("sd15"), "quantize.override={'ff.net.2' = 'fp8 none'}"))
    told: list[dict[str, Any]] = []
    session = replace(session, run=UnwrittenRun(told.append), processes=Other(True))
    assert measure.find_layers_to_move(session, resume=False) == []
    (warned,) = [event["text"] for event in told if event["event"] == "warning"]
    assert PLANTED["sd15"] in warned and "as quantize.override requires" in warned


def test_a_bound_below_the_storage_itself_is_told(job) -> None:
    bound = ("quantize.storage=nf4", "quantize.sensitivity=auto", "quantize.sensitivity_bound=0.03", "train.steps=1")
    done = train.run(job(*bound), progress=False).run
    assert any("is below the error of nf4 itself" in event["text"] for event in events(done, "warning"))
    assert events(done, "sensitivity")[0]["worst"] <= 0.03


@pytest.mark.parametrize(
    ("settings", "unused"),
    [
        (("sensitivity_bound=0.1",), {"sensitivity_bound"}),
        (("sensitivity_bound=0.1", "sensitivity=auto"), set()),
        (("sensitivity=auto", "storage=none"), {"sensitivity"}),
    ],
)
def test_what_has_no_effect_is_found(job, settings: tuple[str, ...], unused: set[str]) -> None:
    mine = job(*(f"quantize.{one}" for one in settings))
    named = " ".join(re.split(r" ha(?:s|ve) no effect", warning)[0] for warning in find_unused_settings(mine))
    assert set(re.findall(r"quantize\.(\w+)", named)) == unused
