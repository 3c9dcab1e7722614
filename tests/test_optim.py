"""Optimizers against torch and bitsandbytes, the schedule against transformers, and small updates against rounding."""

import importlib.util
import json
import time

import bitsandbytes
import came_pytorch
import prodigyopt
import pytest
import safetensors.torch
import schedulefree
import torch
import transformers
from diffusers.training_utils import EMAModel
from torch import Tensor, nn

from lora_fp8 import adapters, config, precision
from lora_fp8.errors import UserError
from lora_fp8.settings import Adapter, Optimizer, Quantize, Schedule, schedules
from lora_fp8.training import optim
from lora_fp8.training.flat import Layout

BITS = {
    "adamw": torch.optim.AdamW,
    "adamw8bit": bitsandbytes.optim.AdamW8bit,
    "lion8bit": bitsandbytes.optim.Lion8bit,
    "prodigy": prodigyopt.Prodigy,
    "adafactor": transformers.optimization.Adafactor,
    "adamw_schedulefree": schedulefree.AdamWScheduleFree,
    "came": came_pytorch.CAME,
    "muon": torch.optim.Muon,
    "ademamix8bit": bitsandbytes.optim.AdEMAMix8bit,
}
RATE = {"prodigy": 1.0}  # else 1e-3
MORE = {
    "adamw": {"betas": (0.9, 0.999), "eps": 1e-8},
    "adamw8bit": {"betas": (0.9, 0.999), "eps": 1e-8},
    "lion8bit": {},  # its own betas
    "prodigy": {"betas": (0.9, 0.99), "safeguard_warmup": True, "use_bias_correction": True},
    "adafactor": {"relative_step": False, "scale_parameter": False},
    "adamw_schedulefree": {"betas": (0.9, 0.999)},
    "came": {"betas": (0.9, 0.999, 0.9999)},
    "muon": {"momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"},
    "ademamix8bit": {"betas": (0.9, 0.999, 0.9999)},
}
OURS = {"prodigy": {"beta2": 0.99}}  # finds its rate in fewer steps than these tests have

SHAPES = {"a": (16, 300), "b": (7, 5), "c": (64, 64), "d": (3, 4, 2, 2)}


def make_params(dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (name, nn.Parameter((torch.randn(shape, generator=generator) * 0.05).to(dtype)))
        for name, shape in SHAPES.items()
    ]


def make_grads(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    same = torch.Generator().manual_seed(100)  # a direction that stays: Prodigy would find no rate without one
    found = {
        name: 3 * torch.randn(shape, generator=same) + torch.randn(shape, generator=generator)
        for name, shape in SHAPES.items()
    }
    return {name: grad * 0.01 for name, grad in found.items()}


def section(**settings) -> Optimizer:
    return Optimizer(**({"lr": 1e-3, "lr_scale": "none"} | settings))


def build(params, **settings) -> optim.AdapterOptimizer:
    settings = OURS.get(settings.get("name"), {}) | settings
    return optim.build(params, section(**settings), base_storage="none", seed=9)


class Several:
    """Several optimizers as one: Muon takes matrices only."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for one in optimizers for group in one.param_groups]

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


def raw(name: str, values: list[Tensor]) -> tuple[list[nn.Parameter], torch.optim.Optimizer | Several]:
    params = [nn.Parameter(value.detach().clone()) for value in values]
    given = {"lr": RATE.get(name, 1e-3), "weight_decay": 0.01}
    if name == "muon":
        matrices = [param for param in params if param.ndim == 2]
        others = [param for param in params if param.ndim != 2]
        return params, Several(torch.optim.Muon(matrices, **given, **MORE[name]), torch.optim.AdamW(others, **given))
    theirs = BITS[name](params, **given, **MORE[name])
    if name == "adamw_schedulefree":
        theirs.train()
    return params, theirs


# -- the optimizers are the real ones ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_equal_the_library_s_on_float32(name, dtype, capsys):
    params = make_params(dtype)
    mine = build(params, name=name)
    assert not capsys.readouterr().out  # Prodigy tells its weight decay there, where JSON may be asked for
    reference, theirs = raw(name, [param.float() for _, param in params])
    capsys.readouterr()
    found = []
    for step in range(12):
        grads, lr = make_grads(step), RATE.get(name, 1e-3) * (1 - step / 24)
        for param, grad in zip(reference, grads.values(), strict=True):
            param.grad = grad.clone()
        for group in theirs.param_groups:
            group["lr"] = lr
        found.append(mine.compute_effective_lr(lr) / lr)
        assert found[-1] == pytest.approx(theirs.param_groups[0].get("d", 1.0), rel=1e-12)
        theirs.step()
        mine.step(mine.layout.join(grads), lr, step)
        for (_, param), expected in zip(params, reference, strict=True):
            assert torch.equal(param.detach(), expected.detach().to(dtype))
    assert (found[-1] > 1.5 * found[0]) == (name == "prodigy")
    if dtype == torch.bfloat16:
        tensors, _ = mine.copy_state()
        for (own, _), expected in zip(params, reference, strict=True):
            assert torch.equal(tensors[f"{own}/master"], expected.detach())


def test_settings_reach_the_optimizer():
    params = make_params(torch.float32)
    mine = build(params, name="adamw", beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.3)
    reference = [nn.Parameter(param.detach().clone()) for _, param in params]
    theirs = torch.optim.AdamW(reference, lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.3)
    for step in range(3):
        for param, grad in zip(reference, make_grads(step).values(), strict=True):
            param.grad = grad
        theirs.step()
        mine.step(mine.layout.join(make_grads(step)), 0.01, step)
    assert all(torch.equal(param, expected) for (_, param), expected in zip(params, reference, strict=True))


def test_prodigy_s_own_settings_reach_it_and_it_has_one_rate_for_all():
    own = {"d_coef": 4.0, "safeguard_warmup": False, "use_bias_correction": False, "weight_decay": 0.3}
    own |= {"d0": 1e-5, "growth_rate": 1.5, "decouple": False}
    params = make_params(torch.float32)
    mine = optim.build(params, Optimizer(name="prodigy", **own), base_storage="fp8", seed=9, of_text=[params[0][0]])
    assert (mine.base_lr, mine.text_ratio) == (1.0, 1.0)
    reference = [nn.Parameter(param.detach().clone()) for _, param in params]
    theirs = prodigyopt.Prodigy(reference[1:] + reference[:1], **own)
    for step in range(6):
        for param, grad in zip(reference, make_grads(step).values(), strict=True):
            param.grad = grad
        theirs.step()
        mine.step(mine.layout.join(make_grads(step)), mine.base_lr, step)
    assert all(torch.equal(param, expected) for (_, param), expected in zip(params, reference, strict=True))
    assert mine.compute_effective_lr(1.0) == theirs.param_groups[0]["d"] > 2e-5


@pytest.mark.parametrize("name", sorted(BITS.keys() - {"prodigy"}))
def test_rates_by_layer_and_lora_plus_are_the_optimizers_own_groups(name: str) -> None:
    """Against the optimizer itself with a group for each rate, as peft's create_loraplus_optimizer makes them."""
    generator = torch.Generator().manual_seed(5)
    layers = ["mid.to_q", "down.0.to_q", "down.0.to_k", "text_encoder.fc1"]
    names = [f"{layer}.lora_{half}.weight" for layer in layers for half in "AB"]
    start = {one: torch.randn(8, 8, generator=generator) for one in names}
    given = section(name=name, lr=1e-2, lr_scale="none", text_encoder_lr=2e-3, loraplus_lr_ratio=4.0, weight_decay=0.1,
                    lrs={"down.0.to_k": 0.25, "^down": 0.5})  # fmt: skip
    ours = [(one, nn.Parameter(start[one].clone())) for one in names]
    mine = optim.build(ours, given, base_storage="none", seed=0, of_text=names[6:])
    rates = [1e-2, 4e-2, 5e-3, 2e-2, 2.5e-3, 1e-2, 2e-3, 8e-3]
    theirs = {one: nn.Parameter(start[one].clone()) for one in names}
    groups = [{"params": [theirs[one]], "lr": rate} for one, rate in zip(names, rates, strict=True)]
    more = MORE[name] | ({"betas": (0.9, 0.99)} if name == "lion8bit" else {})
    judge = BITS[name](groups, lr=1e-2, weight_decay=0.1, **more)
    if name == "adamw_schedulefree":
        judge.train()

    def step(number: int) -> None:
        drawn = torch.Generator().manual_seed(number)
        grads = {one: torch.randn(8, 8, generator=drawn) for one in names}
        for one, parameter in theirs.items():
            parameter.grad = grads[one].clone()
        for group, rate in zip(judge.param_groups, rates, strict=True):
            group["lr"] = rate / number
        judge.step()
        mine.step(mine.layout.join(grads), 1e-2 / number, number)

    step(1)
    step(2)
    # A resumed run goes on in the same groups.
    tensors, meta = mine.copy_state()
    resumed = [(one, nn.Parameter(parameter.detach().clone())) for one, parameter in ours]
    mine = optim.build(resumed, given, base_storage="none", seed=0, of_text=names[6:])
    mine.load_state(tensors, meta)
    step(3)
    for one, parameter in resumed:
        assert torch.equal(parameter, theirs[one]), one
    with pytest.raises(UserError, match="optimizer.lrs: 'up' matches no trained layer"):
        optim.build(ours, given.model_copy(update={"lrs": {"up": 2.0}}), base_storage="none", seed=0)


def test_the_weights_to_evaluate_are_the_library_s() -> None:
    """In evaluation the parameters are schedulefree's own; training continues from its own values, to the bit."""
    for dtype, rounding in [(torch.float32, "master"), (torch.bfloat16, "master"), (torch.bfloat16, "stochastic")]:
        params, other = make_params(dtype), make_params(dtype)
        mine = build(params, name="adamw_schedulefree", rounding=rounding)
        undisturbed = build(other, name="adamw_schedulefree", rounding=rounding)
        reference, theirs = raw("adamw_schedulefree", [param.float() for _, param in params])
        for step in range(6):
            for param, grad in zip(reference, make_grads(step).values(), strict=True):
                param.grad = grad.clone()
            theirs.step()
            gradient = mine.layout.join(make_grads(step))
            before = gradient.clone()
            mine.step(gradient, 1e-3, step)
            assert torch.equal(gradient, before)  # schedulefree writes into it
            undisturbed.step(undisturbed.layout.join(make_grads(step)), 1e-3, step)
            trained = [param.detach().clone() for _, param in params]
            saved = mine.copy_state()
            with mine.evaluation():
                evaluated = [param.detach().clone() for _, param in params]
                inside = mine.copy_state()
                with pytest.raises(RuntimeError, match="weights to evaluate"):
                    mine.step(gradient, 1e-3, step)
            assert inside[1] == saved[1] and all(torch.equal(inside[0][key], saved[0][key]) for key in saved[0])
            assert all(torch.equal(param, value) for (_, param), value in zip(params, trained, strict=True))
            if rounding == "master":
                theirs.eval()
                expected = [param.detach().to(dtype, copy=True) for param in reference]
                theirs.train()
                for (name, _), param in zip(params, reference, strict=True):
                    kept = saved[0].get(f"{name}/master", saved[0].get(f"{name}/trained"))
                    assert torch.allclose(param, kept, atol=1e-6)
                    param.data.copy_(kept)  # their way back is not exact: the judge goes on from a copy
                assert all(torch.equal(value, one) for value, one in zip(evaluated, expected, strict=True))
            assert step == 0 or not any(torch.equal(one, two) for one, two in zip(trained, evaluated, strict=True))
        for (_, param), (_, one) in zip(params, other, strict=True):
            assert torch.equal(param, one)
        # A checkpoint has the weights to evaluate in its adapter file, and those in training in the state.
        tensors, meta = on_disk(*mine.copy_state())
        again = make_params(dtype)
        resumed = build(again, name="adamw_schedulefree", rounding=rounding)
        for (_, param), value in zip(again, evaluated, strict=True):
            param.data.copy_(value)
        resumed.load_state(tensors, meta)
        assert all(torch.equal(param, value) for (_, param), value in zip(again, trained, strict=True))


def test_a_rate_of_zero_in_the_first_step_harms_no_optimizer() -> None:
    """A warm-up begins at 0, and LoRA's first matrix has no gradient in the first step."""
    for name in BITS:
        params = make_params(torch.bfloat16)
        mine = build(params, name=name)
        for step in range(3):
            grads = make_grads(step)
            grads["a"] = torch.zeros_like(grads["a"]) if step == 0 else grads["a"]
            mine.step(mine.layout.join(grads), 0.0 if step == 0 else RATE.get(name, 1e-3), step)
        assert all(torch.isfinite(param).all() for _, param in params), name


@pytest.mark.parametrize("name", ["adamw8bit", "prodigy", "came", "muon"])
@pytest.mark.parametrize("rounding", ["master", "stochastic", "nearest"])
def test_the_moving_average_is_diffusers(name: str, rounding: str) -> None:
    """Of what is trained, by diffusers' EMAModel; the training is the same without it, and resumed to the bit."""
    params, other = make_params(torch.bfloat16), make_params(torch.bfloat16)
    mine = build(params, name=name, rounding=rounding, ema_decay=0.6)
    plain = build(other, name=name, rounding=rounding)
    judge: EMAModel | None = None
    for step in range(1, 30):
        go(mine, range(step, step + 1))
        go(plain, range(step, step + 1))
        assert all(torch.equal(one, two) for (_, one), (_, two) in zip(params, other, strict=True))
        tensors, meta = on_disk(*mine.copy_state())
        key = "master" if rounding == "master" else "trained"
        trained = [nn.Parameter(tensors[f"{name_}/{key}"].float()) for name_ in SHAPES]
        judge = judge or EMAModel([nn.Parameter(value.detach().clone()) for value in trained], decay=0.6)
        judge.step(trained)
        for name_, wanted in zip(SHAPES, judge.shadow_params, strict=True):
            torch.testing.assert_close(tensors[f"{name_}/average"], wanted.detach(), rtol=1e-5, atol=1e-7)
        with mine.evaluation():
            values = {name_: param.detach().clone() for name_, param in params}
            assert all(torch.equal(values[key], tensors[f"{key}/average"].bfloat16()) for key in SHAPES)
            assert mine.copy_state()[0].keys() == tensors.keys()
            assert all(torch.equal(mine.copy_state()[0][key], tensors[key]) for key in tensors)
    again = make_params(torch.bfloat16)
    resumed = build(again, name=name, rounding=rounding, ema_decay=0.6)
    for key, param in again:
        param.data.copy_(values[key])  # an adapter file has the weights to evaluate
    resumed.load_state(tensors, meta)
    for optimizer in (mine, resumed):
        go(optimizer, range(30, 33))
    ends = [optimizer.copy_state()[0] for optimizer in (mine, resumed)]
    assert ends[0].keys() == ends[1].keys() and all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])
    assert all(torch.equal(one, two) for (_, one), (_, two) in zip(params, again, strict=True))
    for given, kept in ((0.0, mine), (0.6, plain)):
        with pytest.raises(UserError, match="moving average of the weights, but optimizer.ema_decay"):
            build(make_params(torch.bfloat16), name=name, rounding=rounding, ema_decay=given).load_state(
                *kept.copy_state()
            )


def test_a_schedule_free_optimizer_has_no_second_average() -> None:
    with pytest.raises(UserError, match="averages the weights itself"):
        build(make_params(torch.bfloat16), name="pytorch_optimizer.ScheduleFreeAdamW", ema_decay=0.9)
    with pytest.raises(UserError, match=r"optimizer.ema_decay.*averages the weights itself"):
        config.loads(
            "name = 'x'\nmodel = {family = 'sd15', path = 'b'}\ndataset = {folders = [{path = 'p'}]}\n"
            "optimizer = {name = 'adamw_schedulefree', ema_decay = 0.9}"
        )


def test_the_estimate_of_the_state_is_right() -> None:
    for name in BITS:
        for dtype, rounding, ema in [
            (torch.float32, "master", 0.0),
            (torch.bfloat16, "master", 0.9),
            (torch.bfloat16, "nearest", 0.9),
        ]:
            given = {"name": name, "rounding": rounding, "ema_decay": 0.0 if name == "adamw_schedulefree" else ema}
            params = make_params(dtype)
            mine = build(params, **given)
            go(mine, range(2))
            expected = optim.estimate_state_bytes([param for _, param in params], section(**given))
            assert mine.count_bytes() == expected, (name, dtype, rounding)


def test_muon_says_what_it_leaves_to_adamw() -> None:
    assert build(make_params(torch.float32), name="muon").format_lines() == [
        "Muon updates 3 matrices; AdamW updates 1 tensors that are not matrices: d"
    ]
    assert not build(make_params(torch.float32)[:3], name="muon").format_lines()
    assert not build(make_params(torch.float32), name="came").format_lines()


def test_a_missing_package_is_named(monkeypatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="'came' needs the package came-pytorch, .* `pip install 'lora-fp8"):
        optim.require_package(section(name="came"))
    optim.require_package(section(name="adamw"))


def test_eight_bit_state_is_eight_bit():
    mine = build(make_params(torch.bfloat16), name="adamw8bit")
    mine.step(mine.layout.join(make_grads(0)), 1e-3, 0)
    tensors, _ = mine.copy_state()
    assert {name: tensors[f"{name}/state1"].dtype for name in SHAPES} == {
        "a": torch.uint8,  # 4,800 elements
        "b": torch.float32,
        "c": torch.uint8,  # 4,096: the smallest that bitsandbytes holds in 8 bits
        "d": torch.float32,
    }


def test_gradients_must_fit():
    mine = build(make_params(torch.bfloat16), name="adamw")
    grads = make_grads(0)
    del grads["b"]
    with pytest.raises(ValueError, match=r"\['b'\]"):
        mine.layout.join(grads)
    with pytest.raises(ValueError, match="has shape"):
        mine.step(torch.zeros(7), 1e-3, 0)


def test_unknown_choices_and_factors():
    for settings in ({"name": "lion", "lr": 1e-3}, {"rounding": "up"}):
        with pytest.raises(UserError, match="accepted: "):
            optim.build(make_params(torch.float32), section().model_copy(update=settings), base_storage="none", seed=0)
    cases = {("auto", "fp8"): 1.4, ("auto", "none"): 1.0, ("none", "fp8"): 1.0, (1.2, "fp8"): 1.2, (1.2, "none"): 1.2}
    for (scale, storage), factor in cases.items():
        made = optim.build(make_params(torch.float32), section(lr_scale=scale), base_storage=storage, seed=0)
        assert made.lr_factor == factor and made.base_lr == pytest.approx(1e-3 * factor, rel=1e-12)
        assert made.copy_state()[1]["lr_factor"] == factor
    rates = dict.fromkeys(BITS, 1.4e-4) | {"lion8bit": 2.8e-5, "prodigy": 1.0}
    for name, rate in rates.items():
        made = optim.build(make_params(torch.float32), Optimizer(name=name), base_storage="fp8", seed=0)
        assert made.base_lr == pytest.approx(rate)
    assert "3 to 10 times smaller" in " ".join(optim.find_cautions(Optimizer(name="lion8bit", lr=1e-4)))
    assert not optim.find_cautions(Optimizer(name="lion8bit")) + optim.find_cautions(Optimizer(lr=1e-4))


# -- state -------------------------------------------------------------------------------------------------------------


def on_disk(tensors: dict[str, Tensor], meta: dict) -> tuple[dict[str, Tensor], dict]:
    return safetensors.torch.load(safetensors.torch.save(tensors)), json.loads(json.dumps(meta))


def go(opt: optim.AdapterOptimizer, steps: range) -> None:
    for step in steps:
        opt.step(opt.layout.join(make_grads(step)), RATE.get(opt.name, 1e-3), step)


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("rounding", ["master", "stochastic", "nearest"])
def test_resume_at_any_step_is_bitwise(name, rounding):
    whole = make_params(torch.bfloat16)
    opt = build(whole, name=name, rounding=rounding)
    saved = []
    for step in range(8):
        saved.append(({key: param.detach().clone() for key, param in whole}, *on_disk(*opt.copy_state())))
        go(opt, range(step, step + 1))
    end, end_meta = opt.copy_state()
    for at, (values, tensors, meta) in enumerate(saved):
        params = make_params(torch.bfloat16)
        resumed = build(params, name=name, rounding=rounding)
        go(resumed, range(90, 92))  # what it held before does not matter
        for key, param in params:
            param.data.copy_(values[key])
        resumed.load_state(tensors, meta)
        go(resumed, range(at, 8))
        for (key, param), (_, expected) in zip(params, whole, strict=True):
            assert torch.equal(param, expected), (at, key)
        got, got_meta = resumed.copy_state()
        assert got.keys() == end.keys() and all(torch.equal(got[key], end[key]) for key in end)
        assert got_meta == end_meta


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("rounding", ["master", "stochastic"])
def test_resume_without_the_state_differs(name, rounding):
    whole = make_params(torch.bfloat16)
    opt = build(whole, name=name, rounding=rounding)
    go(opt, range(4))
    params = [(key, nn.Parameter(param.detach().clone())) for key, param in whole]
    fresh = build(params, name=name, rounding=rounding)
    go(opt, range(4, 8))
    go(fresh, range(4, 8))
    assert not all(torch.equal(param, expected) for (_, param), (_, expected) in zip(params, whole, strict=True))


def test_losing_only_the_masters_differs():
    whole = make_params(torch.bfloat16)
    opt = build(whole, name="adamw")
    go(opt, range(4))
    tensors, meta = opt.copy_state()
    params = [(key, nn.Parameter(param.detach().clone())) for key, param in whole]
    resumed = build(params, name="adamw")
    rounded = {key: param.detach().float() for key, param in whole}
    resumed.load_state(tensors | {f"{key}/master": value for key, value in rounded.items()}, meta)
    go(opt, range(4, 8))
    go(resumed, range(4, 8))
    mine, theirs = resumed.copy_state()[0], opt.copy_state()[0]
    assert not any(torch.equal(mine[f"{key}/master"], theirs[f"{key}/master"]) for key in SHAPES)


def test_state_is_a_copy():
    opt = build(make_params(torch.bfloat16), name="adamw8bit")
    go(opt, range(2))
    tensors, _ = opt.copy_state()
    before = {key: value.clone() for key, value in tensors.items()}
    go(opt, range(2, 4))
    assert all(torch.equal(tensors[key], before[key]) for key in tensors)


@pytest.mark.parametrize("name", BITS)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(name):
    opt = build(make_params(torch.bfloat16), name=name)
    go(opt, range(3))
    tensors, meta = opt.copy_state()
    key = next(full for full in tensors if full.startswith("c/") and not full.endswith("master"))
    cases = [
        (tensors, meta | {"name": "sgd"}, "name is 'sgd'"),
        (tensors, meta | {"rounding": "nearest"}, "rounding is 'nearest'"),
        (tensors, meta | {"seed": 1}, "seed is 1"),
        ({full: tensor for full, tensor in tensors.items() if full != "a/master"}, meta, "a"),
        ({full: tensor for full, tensor in tensors.items() if full != key}, meta, key),
        (tensors | {key: torch.zeros(3)}, meta, key),
        (tensors | {"z/master": torch.zeros(3)}, meta, "z/master"),
    ]
    for given, about, words in cases:
        with pytest.raises(UserError, match=words):
            opt.load_state(given, about)
    after, _ = opt.copy_state()
    assert all(torch.equal(after[full], tensors[full]) for full in tensors)


# -- clipping and schedules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 1e6, 0.0])
def test_clipping_equals_torch(max_norm):
    grads = make_grads(0)
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads.values()]
    for param, grad in zip(params, grads.values(), strict=True):
        param.grad = grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(params, max_norm or float("inf"))
    layout = Layout([(name, nn.Parameter(grad)) for name, grad in grads.items()])
    flat = layout.join(grads)
    norm = optim.clip_(flat, max_norm)
    assert norm == pytest.approx(expected.item(), rel=1e-6)
    for param, grad in zip(params, layout.make_views(flat).values(), strict=True):
        assert torch.allclose(grad, param.grad, rtol=1e-5, atol=0)


def test_norm_is_exact_over_several_pieces():
    flat = torch.full((optim.PIECE + 1_000_000,), 1e-2)
    flat[-1] = 3.0e4
    ordinary = (flat.numel() - 1) * float(flat[0]) ** 2
    assert optim.clip_(flat, 0.0) == pytest.approx((9e8 + ordinary) ** 0.5, rel=1e-14)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_clipping_leaves_non_finite_gradients_for_the_caller(bad):
    flat = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    flat[17] = bad
    before = flat.clone()
    norm = optim.clip_(flat, 0.1)
    assert not torch.isfinite(torch.tensor(norm))
    assert torch.equal(flat.nan_to_num(), before.nan_to_num())


def their_schedule(name: str, warmup: int, min_lr: float, total: int) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2e-4)
    if name == "constant":
        schedule = transformers.get_constant_schedule_with_warmup(optimizer, warmup)
    elif name == "linear" and min_lr:
        schedule = transformers.get_polynomial_decay_schedule_with_warmup(
            optimizer, warmup, total, 2e-4 * min_lr, power=1.0
        )
    elif name == "linear":
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, warmup, total)
    elif name == "cosine_with_restarts":
        schedule = transformers.get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, warmup, total, 3)
    elif min_lr:
        schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, total, min_lr_rate=min_lr
        )
    else:
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, warmup, total)
    rates = []
    for _ in range(total + 1):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    if name == "cosine_with_restarts":  # theirs has no floor: lifted as their cosine with one is
        rates[warmup:] = [2e-4 * min_lr + (1 - min_lr) * rate for rate in rates[warmup:]]
    return rates


@pytest.mark.parametrize("name", ["constant", "cosine", "cosine_with_restarts", "linear"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 0), (7, 7), (0.1, 3), (0.25, 8), (29, 29)])
@pytest.mark.parametrize("min_lr", [0.0, 0.1])
def test_schedule_equals_transformers_at_every_step(name, warmup, steps, min_lr):
    mine = Schedule(name=name, warmup=warmup, min_lr=min_lr)
    got = [schedules.compute_learning_rate(step, mine, 2e-4, 30) for step in range(31)]
    assert got == pytest.approx(their_schedule(name, steps, min_lr, 30), rel=1e-9, abs=1e-18)


def test_cosine_equals_torch():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=1e-4)
    mine = Schedule(name="cosine", min_lr=0.1)
    for step in range(20):
        assert schedules.compute_learning_rate(step, mine, 1e-3, 20) == pytest.approx(
            schedule.get_last_lr()[0], rel=1e-6
        )
        optimizer.step()
        schedule.step()


# -- rounding ----------------------------------------------------------------------------------------------------------


def test_stochastic_rounding_is_unbiased_and_never_moves_a_whole_step():
    values = torch.cat(
        [torch.randn(200), torch.randn(50) * 1e-6, -torch.rand(50) * 1e4, torch.tensor([0.0, 1.0, -0.5])]
    )
    below = values.view(torch.int32).bitwise_and(-65536).view(torch.float32)  # towards zero
    above = (values.view(torch.int32).bitwise_and(-65536) + 65536).view(torch.float32)
    ulp = (above - below).abs()
    draws = 4000
    generator = torch.Generator().manual_seed(1)
    rounded = optim.round_stochastically(values.expand(draws, -1), generator)
    assert rounded.dtype == torch.bfloat16
    rounded = rounded.float()
    exact = values == below
    assert torch.equal(rounded[:, exact], values[exact].expand(draws, -1)) and exact.sum() >= 3
    assert ((rounded == below) | (rounded == above)).all()
    assert ((rounded - values).abs() < ulp).all()
    up = ((values - below).abs() / ulp).double()
    sigma = (up * (1 - up) / draws).sqrt() * ulp.double()
    miss = (rounded.double().mean(dim=0) - values.double()).abs()
    # 4 sigma for the mean over all values; a single one of 303 may stray a little further.
    assert (miss <= 5 * sigma + 1e-12 * values.abs()).all()
    scaled = ((rounded.double() - values.double()) / ulp).mean()
    assert abs(scaled) <= 4 * (up * (1 - up)).sum().sqrt() / (draws**0.5 * len(values))


def test_stochastic_rounding_of_non_finite_values():
    payload = torch.tensor([0x7F800001, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    values = torch.cat([torch.tensor([float("inf"), float("-inf"), float("nan")]), payload])
    rounded = optim.round_stochastically(values, torch.Generator().manual_seed(0))
    assert torch.equal(rounded[:2].float(), values[:2]) and rounded[2:].isnan().all()


def test_stochastic_rounding_is_keyed_by_seed_step_and_name():
    def after(seed, step):
        params = [(name, nn.Parameter(torch.full((64, 64), 0.05).bfloat16())) for name in "xy"]
        opt = optim.build(params, section(name="adamw", rounding="stochastic"), base_storage="none", seed=seed)
        opt.step(opt.layout.join({name: torch.ones(64, 64) for name in "xy"}), 1e-5, step)
        return [param.detach() for _, param in params]

    x, y = after(1, 0)
    assert not torch.equal(x, y)
    assert all(map(torch.equal, (x, y), after(1, 0)))
    assert not torch.equal(x, after(1, 1)[0]) and not torch.equal(x, after(2, 0)[0])


class Problem:
    """A frozen FP8 stack with LoRA already trained (B about 0.05), whose teacher differs by 0.014 in every adapter
    element.

    500 steps at 1e-5 can move an element by 0.005, a third of the way: enough to see, and what is left is far above the
    error of bf16 values. A bf16 number near 0.05 moves in steps of 0.00024, so a single update of 0.00001 is far below
    half a step.
    """

    def __init__(self, dtype: str):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))
        precision.quantize_(self.model, Quantize(storage="fp8"), (), torch.float32)
        adapters.inject(self.model, Adapter(rank=16, alpha=16, dtype=dtype), ["0", "2"], seed=0)
        self.params = adapters.list_trained_parameters(self.model)
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(64, 256, generator=generator)
        start = {}
        for name, param in self.params:
            start[name] = (torch.randn(param.shape, generator=generator) * 0.05).bfloat16()
            param.data = start[name].float()
            param.data += 0.014 * torch.randn(param.shape, generator=generator).sign()
        with torch.no_grad():
            self.y = self.model(self.x)
        for name, param in self.params:
            param.data = start[name].to(adapters.DTYPES[dtype])

    def loss(self) -> Tensor:
        return (self.model(self.x) - self.y).square().mean()

    def train(self, name: str, rounding: str, steps: int = 500) -> dict[str, float]:
        opt = build(self.params, name=name, rounding=rounding, weight_decay=0.0)
        first = self.loss().item()
        seconds = 0.0
        for step in range(steps):
            grads = torch.autograd.grad(self.loss(), [param for _, param in self.params])
            named = {key: grad.float() for (key, _), grad in zip(self.params, grads, strict=True)}
            begin = time.perf_counter()
            opt.step(opt.layout.join(named), 1e-5, step)
            seconds += time.perf_counter() - begin
        count = sum(param.numel() for _, param in self.params)
        held = opt.count_bytes() + sum(param.nbytes for _, param in self.params)
        return {"first": first, "last": self.loss().item(), "bytes": held / count, "ms": 1e3 * seconds / steps}


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_small_updates_reach_bf16_adapters(name, capsys):
    full = Problem("fp32").train(name, "master")
    results = {rounding: Problem("bf16").train(name, rounding) for rounding in ("master", "stochastic", "nearest")}
    with capsys.disabled():
        print(f"\n{name}: float32 adapters {full['first']:.6f} -> {full['last']:.6f}, {full['bytes']:.2f} bytes/param")
        for rounding, result in results.items():
            print(
                f"  bf16 {rounding:10} -> {result['last']:.6f} ({result['last'] / full['last'] - 1:+.2%}), "
                f"{result['bytes']:.2f} bytes/param, {result['ms']:.2f} ms/step"
            )
    assert full["last"] < 0.4 * full["first"]
    # The bar is 1 %, and masters, the default, meet it. Stochastic rounding adds noise of its own: over other data
    # seeds it ended up to 2.3 % away, so it is held to 3 %.
    assert abs(results["master"]["last"] / full["last"] - 1) < 0.01
    assert abs(results["stochastic"]["last"] / full["last"] - 1) < 0.03
    assert results["nearest"]["last"] > 1.5 * full["last"]  # updates are swallowed: it fails the same test by far
