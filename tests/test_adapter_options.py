"""How adapters are scaled, started, dropped and limited: the options beside the kinds, from training to the file.

Judges: peft's own layers, diffusers' loader, and the rules of sd-scripts and LyCORIS written out here.
"""

import json
import math
import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file
from torch import nn
from waiting import LONG_SECONDS

from lora_fp8 import adapters, config, families, importing, precision, train
from lora_fp8.adapters import kinds, starts
from lora_fp8.errors import UserError, UserErrors
from lora_fp8.lora_files import layouts, safetensors_file
from lora_fp8.plan import disk_budget, estimate
from lora_fp8.plan import plan as planning
from lora_fp8.settings import Adapter, Optimizer, Quantize
from lora_fp8.tools import average, files
from lora_fp8.tools import resize as resize_tool
from lora_fp8.training import checkpoint, memory, optim
from lora_fp8.training.norm_cap import NormCap

torch.set_num_threads(1)
ROOT = Path(__file__).parent.parent
SMALL = ("adapter.targets=['attn1.to_q', 'attn2.to_k', 'ff.net.0.proj']", "optimizer.lr=1e-2")


def files_equal(one, other):
    one, other = load_file(one), load_file(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def pair_of(seed=0):
    """Two plain linear layers, for one with our adapter and one with peft's."""
    torch.manual_seed(seed)
    mine = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))
    theirs = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))
    theirs.load_state_dict(mine.state_dict())
    return mine, theirs


# -- rank-stabilized


def test_the_scale_is_that_of_peft_s_rslora_at_every_rank():
    mine, theirs = pair_of()
    adapters.inject(mine, Adapter(rank=4, alpha=3.0, ranks={"1": 9}, rank_stabilized=True, dtype="fp32"), ["0", "1"], 0)
    settings = {"r": 4, "lora_alpha": 3, "use_rslora": True, "rank_pattern": {"1": 9}, "target_modules": ["0", "1"]}
    inject_adapter_in_model(LoraConfig(**settings), theirs)
    state = adapters.copy_state(mine)
    for name, tensor in state.items():
        if "lora_B" in name:
            tensor.normal_()
    adapters.load_state_(mine, state)
    for name, parameter in theirs.named_parameters():
        if "lora" in name:
            parameter.data.copy_(state[name.replace(".default", "")])
    x = torch.randn(5, 64)
    torch.testing.assert_close(mine(x), theirs(x))
    assert adapters.read_scalings(mine) == {"0": 3 / 2, "1": 3 / 3}


def strength_in_kohyas(file, stem):
    """What every program computes of the file's tensors: up @ down * alpha / dim."""
    down, up = file[f"{stem}.lora_down.weight"].double(), file[f"{stem}.lora_up.weight"].double()
    return up.flatten(1) @ down.flatten(1) * (float(file[f"{stem}.alpha"]) / down.shape[0])


@pytest.mark.parametrize("family", ["sd15", "flux"])
def test_rank_stabilized_files_have_their_strength_in_every_program(make_job, tmp_path, family):
    """diffusers loads each file (export.verify), and kohya's rule gives the same from its alpha; ranks differ."""
    Family = families.get(family)
    name = {"sd15": "attn1.to_q", "flux": "attn.to_q"}[family]
    ranked = ("adapter.rank=4", "adapter.alpha=3.0", f"adapter.ranks={{'{name}' = 8}}", "adapter.rank_stabilized=true")
    settings = (f"export.formats={list(Family.layouts)}", "export.verify=true", "train.steps=2", "optimizer.lr=1e-2")
    exact = ("export.dtype=fp32", "adapter.dtype=fp32", "model.dtype=fp32", "quantize.storage=none")
    job = make_job(tmp_path, *ranked, *settings, *exact, family=family)
    result, sizes = train.run(job, progress=False), planning.make(job).family.read_denoiser_config()
    assert len(result.reports) == len(Family.layouts) and all(report.ok for report in result.reports)
    assert all(report.measured["delta_error"] < 1e-5 for report in result.reports)
    held = kinds.group_by_layer(checkpoint.read_latest(result.run.checkpoints)[0].adapter)
    for path in result.files:
        tensors = load_file(path)
        state, scaling = layouts.from_layout(tensors, Family, sizes)
        for layer, parts in kinds.group_by_layer(state).items():
            rank = kinds.read_rank(held[layer])
            assert rank == (8 if layer.endswith(name) else 4)
            wanted = kinds.compute_delta(held[layer], 3.0 / math.sqrt(rank), torch.float64)
            torch.testing.assert_close(
                kinds.compute_delta(parts, scaling[layer], torch.float64), wanted, rtol=1e-5, atol=1e-7
            )
        metadata = safetensors_file.read_header(path).metadata
        baked = "kohya" not in path.name
        assert float(metadata["ss_network_alpha"]) == (4.0 if baked else 6.0)
        assert metadata["lora_fp8_rank_stabilized"] == "True" and metadata["lora_fp8_alpha"] == "3.0"
        given = make_job(tmp_path / "next", *ranked, f"adapter.init_from='{path}'", family=family)
        for layer, parts in kinds.group_by_layer(planning.make(given).start).items():
            rank = kinds.read_rank(held[layer])
            wanted = kinds.compute_delta(held[layer], 3.0 / math.sqrt(rank))
            torch.testing.assert_close(kinds.compute_delta(parts, 3.0 / math.sqrt(rank)), wanted, rtol=1e-4, atol=1e-6)
    if family == "sd15":
        file = load_file(next(path for path in result.files if "kohya" in path.name))
        stems = {key.rpartition(".alpha")[0] for key in file if key.endswith(".alpha")}
        assert len({float(file[f"{stem}.alpha"]) for stem in stems}) == 1  # diffusers reads one alpha of a UNet
        layer = next(layer for layer in held if layer.endswith(name))
        wanted = kinds.compute_delta(held[layer], 3.0 / math.sqrt(8), torch.float64)
        got = strength_in_kohyas(file, "lora_unet_" + layer.replace(".", "_"))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "loha"])
def test_rank_stabilized_of_every_kind_is_verified_averaged_and_pinned(make_job, tmp_path, kind):
    settings = (*SMALL, f"adapter.type={kind}", "adapter.factor=4", "adapter.rank=4", "adapter.alpha=2.0")
    settings += ("adapter.rank_stabilized=true", "export.formats=['auto']", "export.dtype=fp32", "train.steps=4")
    exact = ("adapter.dtype=fp32", "model.dtype=fp32", "quantize.storage=none", "export.verify=true")
    result = train.run(make_job(tmp_path, *settings, *exact), progress=False)
    assert all(report.ok and report.measured["delta_error"] < 1e-5 for report in result.reports)
    for path in result.files:
        if "kohya" in path.name:  # LyCORIS writes alpha * sqrt(rank) too
            alphas = {float(tensor) for name, tensor in load_file(path).items() if name.endswith(".alpha")}
            assert alphas - {1.0} == {4.0}  # 1 where LoKr has whole matrices
    assert average.average_run(result.run.path, what="factors", half_life=0.0, last=2)[1]
    with pytest.raises(UserError, match="adapter.rank_stabilized: was True, is False"):
        job = make_job(tmp_path, *settings, *exact, "adapter.rank_stabilized=false", "train.steps=5")
        train.run(job, progress=False, resume=True)


def test_the_mean_of_rank_stabilized_checkpoints_is_that_of_their_effects(make_job, tmp_path):
    settings = (*SMALL, "adapter.rank=4", "adapter.alpha=2.0", "adapter.ranks={'attn1.to_q' = 2}")
    settings += ("adapter.rank_stabilized=true", "export.formats=['diffusers']", "export.dtype=fp32", "train.steps=4")
    result = train.run(make_job(tmp_path, *settings, "adapter.dtype=fp32"), progress=False)
    held = [checkpoint.read(path).adapter for path in sorted(result.run.checkpoints.glob("step-*"))[-2:]]
    _, (path,) = average.average_run(result.run.path, what="delta", half_life=0.0, last=2)
    state, scaling = layouts.from_layout(load_file(path), families.get("sd15"), {})
    for layer, parts in kinds.group_by_layer(state).items():
        deltas = [
            kinds.compute_delta(kinds.group_by_layer(one)[layer], 2.0 / math.sqrt(2 if "to_q" in layer else 4))
            for one in held
        ]
        got = kinds.compute_delta(parts, scaling[layer])
        assert (got - sum(deltas) / 2).norm() < 0.5 * got.norm()  # the mean brought to the rank; factors are exact


# -- dropout of ranks and modules

DROPS = ("adapter.dropout=0.1", "adapter.rank_dropout=0.3", "adapter.module_dropout=0.2")


def trained(kind, conv=False, **settings):
    """A layer with an adapter whose tensors are all random, in float32."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1) if conv else nn.Linear(64, 96))
    section = Adapter(**({"type": kind, "rank": 4, "alpha": 2.0, "factor": 4, "dtype": "fp32"} | settings))
    adapters.inject(model, section, ["0"], 0)
    state = adapters.copy_state(model)
    for name, tensor in state.items():
        if "magnitude" not in name:
            tensor.normal_()
    adapters.load_state_(model, state)
    return model, torch.randn(3, 8, 5, 5) if conv else torch.randn(3, 7, 64)


def update_of(model, x):
    """What the adapter adds to the base's output."""
    with adapters.disabled(model), torch.no_grad():
        base = model(x)
    return model(x) - base


@pytest.mark.parametrize("conv", [False, True])
def test_ranks_are_dropped_as_in_sd_scripts(conv):
    """A mask for each sample and rank, and the rest divided by 1 - p."""
    model, x = trained("lora", conv, rank_dropout=0.5)
    parts, layer = kinds.group_by_layer(adapters.copy_state(model))["0"], model[0].get_base_layer()
    model.train()
    torch.manual_seed(3)
    got = update_of(model, x)
    torch.manual_seed(3)
    mask = (torch.rand(3, 4) > 0.5).double()
    a, b = (parts[f"lora_{half}.weight"].double() for half in "AB")
    for sample in range(3):
        kept = torch.diag(mask[sample]) / (1 - 0.5)
        weight = (b.flatten(1) @ kept @ a.flatten(1) * 0.5).reshape(layer.weight.shape)
        one = x[sample : sample + 1].double()
        wanted = nn.functional.conv2d(one, weight, padding=1) if conv else nn.functional.linear(one, weight)
        torch.testing.assert_close(got[sample : sample + 1].double(), wanted, rtol=1e-4, atol=1e-4)
    assert 0 < mask.sum() < mask.numel()
    model.eval()
    torch.testing.assert_close(update_of(model, x), update_of(model, x), rtol=0, atol=0)


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_rows_are_dropped_as_in_lycoris(kind, scales, conv):
    """One mask for the rows of the delta, divided by its mean only with rank_dropout_scale."""
    model, x = trained(kind, conv, rank_dropout=0.5, rank_dropout_scale=scales)
    parts, layer = kinds.group_by_layer(adapters.copy_state(model))["0"], model[0].get_base_layer()
    (scale,) = adapters.read_scalings(model).values()
    model.train()
    torch.manual_seed(3)
    got = update_of(model, x)
    torch.manual_seed(3)
    drop = (torch.rand(layer.weight.shape[0]) > 0.5).double()
    drop = drop / drop.mean() if scales else drop
    weight = (kinds.compute_delta(parts, scale, torch.float64) * drop[:, None]).reshape(layer.weight.shape)
    wanted = nn.functional.conv2d(x.double(), weight, padding=1) if conv else nn.functional.linear(x.double(), weight)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-4)


def test_where_every_row_is_dropped_nothing_is_divided_by_zero():
    model, x = trained("loha", rank_dropout=0.999999, rank_dropout_scale=True)
    assert torch.equal(update_of(model.train(), x), torch.zeros(3, 7, 96))


@pytest.mark.parametrize("conv", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "loha"])
def test_a_dropped_module_is_the_base_alone(kind, conv):
    model, x = trained(kind, conv, module_dropout=0.25)
    whole = model.eval()(x)
    with adapters.disabled(model):
        base = model(x)
    model.train()
    outcomes = []
    for _ in range(200):
        got = model(x)
        outcomes.append(torch.equal(got, base))
        assert outcomes[-1] or torch.equal(got, whole)
    assert 0.15 < sum(outcomes) / 200 < 0.35


@pytest.mark.parametrize("compiled", [False, True])
def test_a_recomputation_drops_the_same(compiled):
    """Columns of B get a gradient exactly where the forward pass kept their rank; B shows which it kept."""
    model, _ = trained("lora", rank_dropout=0.5, module_dropout=0.3)
    with torch.no_grad():
        for name, parameter in adapters.list_trained_parameters(model):
            parameter.copy_(torch.eye(*parameter.shape)) if "lora_B" in name else parameter.abs_()
    recompute = memory._make_recompute((), is_random=True, has_policy=compiled)
    run = (lambda x: recompute(model, x)) if not compiled else None
    if compiled:
        torch._dynamo.reset()
        run = torch.compile(lambda x: recompute(model, x), backend="aot_eager", fullgraph=True)
    x, patterns = torch.rand(1, 1, 64) + 0.1, set()
    with adapters.disabled(model), torch.no_grad():
        base = model(x)
    for seed in range(12):
        torch.manual_seed(seed)
        got = run(x)
        kept = (got - base)[0, 0, :4].detach().abs() > 1e-4
        (b,) = (parameter for name, parameter in adapters.list_trained_parameters(model) if "lora_B" in name)
        b.grad = None
        got.sum().backward()
        assert torch.equal(b.grad.abs().sum(0) > 0, kept), seed
        patterns.add(tuple(kept.tolist()))
    assert len(patterns) > 4
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["lora", "dora", "loha"])
def test_resumed_with_dropout_is_the_same_to_the_bit(make_job, tmp_path, kind):
    drops = DROPS if kind == "lora" else DROPS[1:]  # rank and module dropout are keyed without `dropout`, too
    settings = (*SMALL, *drops, f"adapter.type={kind}", "export.formats=['auto']", "train.accumulate=2")
    settings += ("memory.gradient_checkpointing=true", "train.batch_size=2")
    settings += ("adapter.text_encoder=true", "export.formats=['kohya']") if kind == "lora" else ()
    whole = train.run(make_job(tmp_path / "a", *settings, "train.steps=4"), progress=False)
    train.run(make_job(tmp_path / "b", *settings, "train.steps=2"), progress=False)
    pieces = train.run(make_job(tmp_path / "b", *settings, "train.steps=4"), progress=False, resume=True)
    assert files_equal(whole.files[0], pieces.files[0])
    arguments = json.loads(safetensors_file.read_header(whole.files[0]).metadata["ss_network_args"])
    assert arguments["rank_dropout"] == "0.3" and arguments["module_dropout"] == "0.2"


def test_dropout_trains_the_same_with_and_without_recomputation(make_job, tmp_path):
    exact = ("adapter.dtype=fp32", "model.dtype=fp32", "quantize.storage=none", "export.dtype=fp32")
    settings = (*SMALL, "adapter.rank_dropout=0.5", "export.formats=['diffusers']", *exact, "train.steps=3")
    made = {}
    for recomputes in ("true", "false"):
        job = make_job(tmp_path / recomputes, *settings, f"memory.gradient_checkpointing={recomputes}")
        made[recomputes] = load_file(train.run(job, progress=False).files[0])
    for name, tensor in made["true"].items():
        torch.testing.assert_close(tensor, made["false"][name], rtol=1e-3, atol=1e-5)


# -- the limit of weight norms


def limited_as_in_sd_scripts(parts, scale, limit):
    """`apply_max_norm_regularization` of sd-scripts for a pair; of other kinds LyCORIS': each factor takes its root."""
    norm = kinds.compute_delta(parts, scale, torch.float64).norm()
    ratio = (norm.clamp(min=limit / 2).clamp(max=limit) / norm.clamp(min=limit / 2)).item()
    factors = [name for name in parts if "magnitude" not in name]
    return {n: t * ratio ** (1 / len(factors)) if n in factors else t for n, t in parts.items()}, ratio != 1


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "loha", "lora of groups"])
def test_norms_are_limited_as_in_sd_scripts_and_lycoris(kind):
    if kind == "lora of groups":
        torch.manual_seed(2)
        model = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1, groups=2))
        adapters.inject(model, Adapter(rank=4, alpha=2.0, dtype="fp32"), ["0"], 0)
        for _, parameter in adapters.list_trained_parameters(model):
            parameter.data.normal_()
    else:
        model, _ = trained(kind, decompose_both=kind == "lokr", rank=2)
    before, scaling = adapters.copy_state(model), adapters.read_scalings(model)
    if kind == "lora of groups":  # the update of such a convolution, from its own forward
        both = [
            part.unflatten(0, (2, -1)).flatten(2) for part in (before["0.lora_B.weight"], before["0.lora_A.weight"])
        ]
        norm = (torch.stack([b @ a for b, a in zip(*both, strict=True)]) * scaling["0"]).norm().item()
    else:
        norm = (kinds.compute_delta(kinds.group_by_layer(before)["0"], scaling["0"], torch.float64)).norm().item()
    for limit in (norm * 2, norm * 0.7):
        cap = NormCap(limit, dict(adapters.list_tensors(model)), scaling)
        values = {name: tensor.clone() for name, tensor in before.items()}
        cap(values)
        assert cap.collect_figures() == {
            "keys_scaled": int(limit < norm),
            "max_key_norm": pytest.approx(min(limit, norm)),
        }
        if kind == "lora of groups":
            root = min(1, limit / norm) ** 0.5
            wanted, scaled = {f"0.{n}": t * root for n, t in kinds.group_by_layer(before)["0"].items()}, limit < norm
        else:
            parts, scaled = limited_as_in_sd_scripts(kinds.group_by_layer(before)["0"], scaling["0"], limit)
            wanted = {f"0.{n}": t for n, t in parts.items()}
        assert scaled == (limit < norm)
        for name, tensor in values.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-5, atol=0)


@pytest.mark.parametrize("rounding", ["master", "stochastic", "nearest"])
def test_the_exact_weights_are_limited_after_each_update(rounding):
    """Against torch's AdamW on float32 tensors with sd-scripts' rule after each step; masters follow it exactly."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"0.lora_A.weight": (4, 40), "0.lora_B.weight": (24, 4)}
    start = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    ours = [(name, nn.Parameter(tensor.clone())) for name, tensor in start.items()]
    section = Optimizer(name="adamw", lr=0.05, weight_decay=0.0, rounding=rounding, ema_decay=0.5)
    made = optim.build(ours, section, base_storage="none", seed=0)
    cap = NormCap(5.0, dict(ours), {"0": 0.5})
    made.limit_with(cap)
    theirs = {name: nn.Parameter(tensor.float()) for name, tensor in start.items()}
    judge = torch.optim.AdamW(theirs.values(), lr=0.05, betas=(0.9, 0.999), eps=section.eps, weight_decay=0.0)
    for step in range(1, 13):
        gradients = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        made.step(made.layout.join(gradients), 0.05, step)
        for name, parameter in theirs.items():
            parameter.grad = gradients[name]
        judge.step()
        parts = {name[2:]: parameter.detach() for name, parameter in theirs.items()}
        for part, tensor in limited_as_in_sd_scripts(parts, 0.5, 5.0)[0].items():
            theirs[f"0.{part}"].data.copy_(tensor)
        held = {name[2:]: parameter.detach() for name, parameter in ours}
        assert kinds.compute_delta(held, 0.5).norm() < 5.0 * (1.001 if rounding == "master" else 1.03)
    assert cap.scaled == 1 and cap.largest == pytest.approx(5.0)
    if rounding == "master":
        tensors, _ = made.copy_state()
        for name, parameter in theirs.items():
            torch.testing.assert_close(tensors[f"{name}/master"], parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "loha"])
def test_a_limited_run_resumes_to_the_bit_and_logs_what_was_scaled(make_job, tmp_path, kind):
    """With the 8-bit optimizer and float32 masters, text encoders too; the file's own norms stay below the limit."""
    settings = (*SMALL, f"adapter.type={kind}", "adapter.scale_weight_norms=0.05", "export.dtype=fp32")
    settings += ("optimizer.name=adamw8bit", "export.formats=['kohya']", "train.log_every=1", "export.verify=true")
    settings += ("adapter.text_encoder=true", "optimizer.ema_decay=0.5") if kind == "lora" else ()
    whole = train.run(make_job(tmp_path / "a", *settings, "train.steps=6"), progress=False)
    train.run(make_job(tmp_path / "b", *settings, "train.steps=3"), progress=False)
    pieces = train.run(make_job(tmp_path / "b", *settings, "train.steps=6"), progress=False, resume=True)
    assert files_equal(whole.files[0], pieces.files[0]) and all(report.ok for report in whole.reports)
    for name in ("adapter", "optimizer"):
        assert files_equal(*(one.run.path / f"checkpoints/step-000006/{name}.safetensors" for one in (whole, pieces)))
    steps = [event for event in whole.run.read_events() if event["event"] == "step"]
    assert max(event["keys_scaled"] for event in steps) > 0
    assert max(event["max_key_norm"] for event in steps) == pytest.approx(0.05)
    about = files.inspect(whole.files[0])
    assert 0 < max(about.norms.values()) < 0.05 * 1.02
    assert safetensors_file.read_header(whole.files[0]).metadata["ss_scale_weight_norms"] == "0.05"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("adamw_schedulefree", "averages the weights itself, so their norm cannot be limited"),
        ("pytorch_optimizer.ScheduleFreeAdamW", "stores the weights a second time, and these cannot be limited"),
    ],
)
def test_weights_that_are_held_twice_cannot_be_limited(make_job, tmp_path, name, why):
    with pytest.raises(UserError, match=f"adapter.scale_weight_norms: .*{why}; leave it at 0"):
        planning.make(make_job(tmp_path, f"optimizer.name={name}", "adapter.scale_weight_norms=1.0"))


# -- initial values


def decaying(out, inner):
    """A weight whose singular values fall by a tenth each, so that the largest are told apart."""
    generator = torch.Generator().manual_seed(4)
    count = min(out, inner, 40)
    u, v = (torch.linalg.qr(torch.randn(side, count, generator=generator)).Q for side in (out, inner))
    return u @ torch.diag(3 * 0.9 ** torch.arange(count)) @ v.T


@pytest.mark.parametrize(("out", "inner"), [(24, 40), (300, 200)])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_starts_from_the_base_are_those_of_peft(init, out, inner):
    """Of a small weight, which is decomposed whole, and a large one."""
    mine, theirs = nn.Sequential(nn.Linear(inner, out)), nn.Sequential(nn.Linear(inner, out))
    mine[0].weight.data = decaying(out, inner)
    theirs[0].weight.data = mine[0].weight.data.clone()
    adapters.inject(mine, Adapter(rank=4, alpha=2.0, init=init, dtype="fp32"), ["0"], 0)
    settings = LoraConfig(r=4, lora_alpha=2, init_lora_weights=init, target_modules=["0"])
    inject_adapter_in_model(settings, theirs)
    held = adapters.find_frozen_starts(mine)
    peft_a, peft_b = (getattr(theirs[0], f"lora_{half}")["default"].weight.detach() for half in "AB")
    got = held["0.lora_B.weight"] @ held["0.lora_A.weight"]
    torch.testing.assert_close(got, peft_b @ peft_a, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(held["0.lora_A.weight"].norm(dim=1), peft_a.norm(dim=1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_training_from_such_a_start_is_peft_s(init):
    """peft writes W - s B0 A0 into the base and trains B and A; here the base stays and the change is trained."""
    mine, theirs = pair_of()
    targets, x = ["0", "1"], torch.randn(16, 64)
    whole = theirs(x).detach()
    adapters.inject(mine, Adapter(rank=4, alpha=2.0, init=init, dtype="fp32"), targets, 0)
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=2, init_lora_weights=init, target_modules=targets), theirs)
    assert torch.equal(mine(x), whole)
    theirs_named = [parameter for name, parameter in theirs.named_parameters() if "lora" in name]
    judges = [
        torch.optim.Adam(p, lr=1e-2) for p in ([p for _, p in adapters.list_trained_parameters(mine)], theirs_named)
    ]
    target = torch.randn(16, 32)
    for _ in range(15):
        for model, optimizer in zip((mine, theirs), judges, strict=True):
            optimizer.zero_grad()
            (model(x) - target).square().mean().backward()
            optimizer.step()
    assert (mine(x) - whole).norm() > 0.1 * whole.norm()
    torch.testing.assert_close(mine(x), theirs(x), rtol=2e-2, atol=2e-2)
    state, scaling = adapters.copy_state(mine), adapters.read_scalings(mine)
    plain, _ = pair_of()
    for layer, parts in kinds.group_by_layer(state).items():
        assert kinds.detect_kind(parts, layer) == "lora" and kinds.read_rank(parts) == 8
        plain[int(layer)].weight.data += kinds.compute_delta(parts, scaling[layer])
    torch.testing.assert_close(plain(x), mine(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("init", ["default", "gaussian", "orthogonal", "pissa", "olora"])
@pytest.mark.parametrize("form", ["fp8 row", "int8 1x128", "nf4 64", "torchao", "none", "conv"])
def test_every_start_is_the_base_itself(init, form):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 24, 3, padding=1, stride=2) if form == "conv" else nn.Linear(128, 256))
    storage, _, scale = form.partition(" ")
    if storage == "torchao":
        section = Quantize(storage="fp8", backend="torchao")
    else:
        name = "int8" if storage == "conv" else storage
        section = Quantize(storage=name, scale=scale if storage in ("fp8", "int8") else "auto")
    precision.quantize_(model, section, (), torch.bfloat16)
    if storage == "none":
        model.bfloat16()
    x = torch.randn(2, 16, 8, 8).bfloat16() if form == "conv" else torch.randn(5, 128).bfloat16()
    before, state = model(x), torch.get_rng_state()
    adapters.inject(model, Adapter(rank=4, alpha=3.0, init=init), ["0"], 0)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(model(x), before)
    model(x).square().sum().backward()
    named = dict(adapters.list_trained_parameters(model))
    moving = {name for name, parameter in named.items() if parameter.grad.any()}
    assert moving == (set(named) if init in ("pissa", "olora") else {"0.lora_B.weight"})
    a = named["0.lora_A.weight"].detach().flatten(1).float()
    if init == "orthogonal":
        torch.testing.assert_close(a @ a.T, torch.eye(4), atol=2e-2, rtol=0)
    if init in ("pissa", "olora"):
        start = adapters.find_frozen_starts(model)
        product = start["0.lora_B.weight"].flatten(1).float() @ start["0.lora_A.weight"].flatten(1).float() * 0.75
        weight = model[0].get_base_layer().weight.detach().float().flatten(1)
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
        best = u[:, :4] @ torch.diag(s[:4]) @ vh[:4]
        if init == "pissa":
            assert (product - best).norm() < 0.02 * best.norm()


def test_gaussian_is_that_of_peft():
    model = nn.Sequential(nn.Linear(4096, 8))
    adapters.inject(model, Adapter(rank=5, init="gaussian", dtype="fp32"), ["0"], 0)
    theirs = nn.Sequential(nn.Linear(4096, 8))
    inject_adapter_in_model(LoraConfig(r=5, init_lora_weights="gaussian", target_modules=["0"]), theirs)
    mine, other = adapters.copy_state(model)["0.lora_A.weight"], theirs[0].lora_A["default"].weight.detach()
    assert mine.std().item() == pytest.approx(other.std().item(), rel=0.03)
    assert mine.std().item() == pytest.approx(1 / 5, rel=0.03) and abs(mine.mean()) < 0.01


def test_a_rank_above_the_weight_s_own_is_filled_with_zeros():
    model = nn.Sequential(nn.Linear(6, 3))
    before, x = model[0].weight.detach().clone(), torch.randn(2, 6)
    report = adapters.inject(model, Adapter(rank=5, alpha=5.0, init="pissa", dtype="fp32"), ["0"], 0)
    start = adapters.find_frozen_starts(model)
    torch.testing.assert_close(start["0.lora_B.weight"] @ start["0.lora_A.weight"], before)
    assert "exceeds the largest rank of 0 (3)" in str(report.warnings[0]) and model(x).isfinite().all()


SPLIT = (*SMALL, "adapter.init=pissa", "adapter.rank=4", "adapter.alpha=3.0", "adapter.ranks={'attn1.to_q' = 2}")


def test_a_run_from_pissa_resumes_to_the_bit_without_its_decomposition(make_job, tmp_path, monkeypatch):
    """The frozen start is in the checkpoint: another machine may decompose the weight a little differently."""
    settings = (*SPLIT, "optimizer.ema_decay=0.5", "adapter.rank_dropout=0.2", "adapter.text_encoder=true")
    settings += ("export.formats=['kohya']", "memory.gradient_checkpointing=true")
    whole = train.run(make_job(tmp_path / "a", *settings, "train.steps=4"), progress=False)
    train.run(make_job(tmp_path / "b", *settings, "train.steps=2"), progress=False)
    split = starts.split_weight
    monkeypatch.setattr(starts, "split_weight", lambda *given: tuple(half * 1.5 for half in split(*given)))
    pieces = train.run(make_job(tmp_path / "b", *settings, "train.steps=4"), progress=False, resume=True)
    for name in ("adapter", "optimizer"):
        assert files_equal(*(one.run.path / f"checkpoints/step-000004/{name}.safetensors" for one in (whole, pieces)))
    assert files_equal(whole.files[0], pieces.files[0])
    with pytest.raises(UserError, match="adapter.init: was pissa, is default"):
        train.run(make_job(tmp_path / "b", *settings, "adapter.init=default"), progress=False, resume=True)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_files_of_such_a_start_are_loras_of_twice_the_rank(make_job, tmp_path, init, dtype):
    """diffusers loads them (export.verify) on the base as it is; they go on, and are brought back to the rank."""
    settings = (*SPLIT, f"adapter.init={init}", "export.formats=['diffusers', 'kohya']", "export.verify=true")
    settings += ("train.steps=4", f"export.dtype={dtype}", f"adapter.dtype={dtype}", "adapter.rank_stabilized=true")
    settings += ("validation.pictures=1", "validation.every=2", "preview.prompts=['a cat']")
    settings += ("model.dtype=fp32", "quantize.storage=fp8") if dtype == "fp32" else ()
    job = make_job(tmp_path, *settings)
    planned = estimate.estimate(planning.make(job))
    result = train.run(job, progress=False)
    assert all(report.ok for report in result.reports), [report.list_failures() for report in result.reports]
    assert all(report.measured["effect"] > 1e-4 for report in result.reports)
    if dtype == "fp32":
        assert all(report.measured["prediction_error"] < 1e-5 for report in result.reports)
    held = kinds.group_by_layer(checkpoint.read_latest(result.run.checkpoints)[0].adapter)
    assert {kinds.read_rank(parts) for parts in held.values()} == {4, 8}
    for path in result.files:
        metadata = safetensors_file.read_header(path).metadata
        assert metadata["ss_network_dim"] == "8"
        assert float(metadata["ss_network_alpha"]) == (8.0 if "diffusers" in path.name else 3.0 * 2 * 2)
        layout = "diffusers" if "diffusers" in path.name else "kohya"
        size = sum(tensor.nbytes for name, tensor in load_file(path).items() if not name.endswith(".alpha"))
        assert planned.file_bytes[layout] == size
        state, scaling = layouts.from_layout(load_file(path), families.get("sd15"), {})
        for layer, parts in kinds.group_by_layer(state).items():
            wanted = kinds.compute_delta(held[layer], 3.0 / math.sqrt(kinds.read_rank(held[layer]) / 2))
            got = kinds.compute_delta(parts, scaling[layer])
            assert (got - wanted).norm() < (1e-5 if dtype == "fp32" else 6e-3) * wanted.norm()
        smaller = tmp_path / f"{path.stem}-small.safetensors"
        resize_tool.resize(path, smaller, rank=4, energy=0.0, uniform=False, dtype="")
        small, small_scaling = layouts.from_layout(load_file(smaller), families.get("sd15"), {})
        for layer, parts in kinds.group_by_layer(small).items():
            exact = kinds.compute_delta(kinds.group_by_layer(state)[layer], scaling[layer])
            singular = torch.linalg.svdvals(exact.float())
            gap = (kinds.compute_delta(parts, small_scaling[layer]) - exact).norm()
            assert gap < singular[4:].norm() + 0.01 * singular.norm()
    doubled = ("adapter.rank=8", "adapter.alpha=6.0", "adapter.ranks={'attn1.to_q' = 4}", SMALL[0])
    follows = make_job(tmp_path / "next", *doubled, f"adapter.init_from='{result.files[0]}'")
    assert planning.make(follows).start.keys() == {f"{n}.{p}" for n, parts in held.items() for p in parts}
    assert average.average_run(result.run.path, what="delta", half_life=0.0, last=2)[1]
    saved = sum(file.stat().st_size for file in (result.run.checkpoints / "step-000004").iterdir())
    named = disk_budget.list_trainable(job, planning.make(job).family)
    assert disk_budget.count_checkpoint_bytes(job, named) == pytest.approx(saved, rel=0.35)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("adapter.init=pissa", "adapter.type=dora"), "'pissa' is not available with adapter.type = 'dora'"),
        (("adapter.init=olora", "adapter.scale_weight_norms=1.0"), "excludes adapter.scale_weight_norms"),
        (("adapter.init=gaussian", "adapter.init_from='a'"), "excludes adapter.init_from"),
        (("adapter.init=pissa", "adapter.freeze_a=true"), "excludes adapter.freeze_a"),
    ],
)
def test_starts_that_other_settings_exclude_are_refused(make_job, tmp_path, more, why):
    with pytest.raises(UserErrors, match=f"adapter.init: .*{why}"):
        make_job(tmp_path, *more)


def test_a_convolution_in_groups_has_no_such_start():
    with pytest.raises(UserError, match="adapter.init = 'pissa': 0 is a grouped convolution .4 groups."):
        adapters.inject(nn.Sequential(nn.Conv2d(8, 8, 3, groups=4)), Adapter(rank=4, init="pissa"), ["0"], 0)


# -- LoRA-FA


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_frozen_first_matrix_gets_no_gradient_and_keeps_no_input(kind):
    """The gradients of the rest are those of the same layer with both matrices trained."""
    made = {}
    for frozen in (False, True):
        model, x = trained(kind, freeze_a=frozen)
        parts, held = dict(adapters.list_tensors(model)), []
        adapters.load_state_(model, {n: torch.full_like(p, 0.01) if "lora_A" in n else p for n, p in parts.items()})
        x = x.requires_grad_(True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, held=held: held.append(t) or t, lambda t: t):
            y = model(x)
        y.square().sum().backward()
        made[frozen] = {name: parameter.grad for name, parameter in adapters.list_trained_parameters(model)}, held
    (both, kept), (rest, fewer) = made[False], made[True]
    assert both.keys() - rest.keys() == {"0.lora_A.weight"}
    for name, gradient in rest.items():
        torch.testing.assert_close(gradient, both[name])
    inputs = [[tensor for tensor in one if tensor.shape[-1] == 64 and tensor.ndim > 1] for one in (kept, fewer)]
    assert sum(t.numel() for t in inputs[1]) < sum(t.numel() for t in inputs[0])
    with adapters.disabled(model):
        pass
    assert not dict(adapters.list_tensors(model))["0.lora_A.weight"].requires_grad


def test_a_limited_norm_leaves_a_frozen_matrix():
    model, _ = trained("lora", freeze_a=True)
    before = adapters.copy_state(model)
    limit = kinds.compute_delta(kinds.group_by_layer(before)["0"], 0.5).norm().item() / 2
    cap = NormCap(limit, dict(adapters.list_tensors(model)), adapters.read_scalings(model))
    cap(dict(adapters.list_trained_parameters(model)))
    after = adapters.copy_state(model)
    assert torch.equal(after["0.lora_A.weight"], before["0.lora_A.weight"])
    assert kinds.compute_delta(kinds.group_by_layer(after)["0"], 0.5).norm().item() == pytest.approx(limit, rel=1e-4)


def test_lora_fa_trains_half_resumes_to_the_bit_and_goes_on_from_a_file(make_job, tmp_path):
    settings = (*SMALL, "adapter.freeze_a=true", "adapter.init=orthogonal", "optimizer.ema_decay=0.5")
    settings += ("adapter.scale_weight_norms=0.5", "adapter.text_encoder=true", "export.formats=['kohya']")
    settings += ("export.verify=true", "optimizer.loraplus_lr_ratio=4.0")
    job = make_job(tmp_path / "a", *settings, "train.steps=4")
    plan, plain = planning.make(job), planning.make(make_job(tmp_path / "a", *settings, "adapter.freeze_a=false"))
    ours, theirs = estimate.estimate(plan), estimate.estimate(plain)
    assert ours.optimizer_bytes < 0.7 * theirs.optimizer_bytes and ours.file_bytes == theirs.file_bytes
    whole = train.run(job, progress=False)
    assert all(report.ok for report in whole.reports)
    train.run(make_job(tmp_path / "b", *settings, "train.steps=2"), progress=False)
    pieces = train.run(make_job(tmp_path / "b", *settings, "train.steps=4"), progress=False, resume=True)
    for name in ("adapter", "optimizer"):
        assert files_equal(*(one.run.path / f"checkpoints/step-000004/{name}.safetensors" for one in (whole, pieces)))
    states = [load_file(whole.run.path / f"checkpoints/step-00000{step}/adapter.safetensors") for step in (2, 4)]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]) == ("lora_A" in name)
    moments = load_file(whole.run.path / "checkpoints/step-000004/optimizer.safetensors")
    assert moments and not any("lora_A" in name for name in moments)
    saved = sum(file.stat().st_size for file in (whole.run.path / "checkpoints/step-000004").iterdir())
    named = disk_budget.list_trainable(job, plan.family)
    assert disk_budget.count_checkpoint_bytes(job, named) == pytest.approx(saved, rel=0.35)
    more = ("adapter.init=default", "seed=7", f"adapter.init_from='{whole.files[0]}'", "train.steps=1")
    follows = train.run(make_job(tmp_path / "c", *settings, *more, "export.verify=false"), progress=False)
    after = load_file(follows.run.path / "checkpoints/step-000001/adapter.safetensors")
    for name in after:
        if "lora_A" in name:
            torch.testing.assert_close(after[name], states[1][name], rtol=2**-7, atol=1e-6)
    with pytest.raises(UserError, match="adapter.freeze_a: was True, is False"):
        train.run(make_job(tmp_path / "b", *settings, "adapter.freeze_a=false"), progress=False, resume=True)


# -- several processes


@pytest.mark.parametrize(
    "more",
    [
        ("adapter.init=pissa", "adapter.rank_stabilized=true"),
        ("adapter.freeze_a=true", "adapter.scale_weight_norms=0.3"),
    ],
    ids=["pissa", "limited lora-fa"],
)
def test_two_processes_train_what_one_trains(make_job, tmp_path, more):
    settings = (*SMALL, *more, "train.steps=2", "train.batch_size=2", "export.formats=['diffusers']")
    settings += ("model.dtype=fp32", "quantize.storage=none", "adapter.dtype=fp32", "optimizer.name=adamw")
    alone = train.run(make_job(tmp_path / "a", *settings), progress=False)
    shared, file = make_job(tmp_path / "b", *settings), tmp_path / "job.toml"
    file.write_text(config.dumps(shared), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
    command += ["--main_process_port", str(port), "--num_processes", "2", "--num_machines", "1"]
    command += ["--mixed_precision", "no", str(ROOT / "train_lora.py"), "--config", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG_SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    folder = Path(shared.output_dir) / shared.name
    for name in ("adapter", "optimizer"):
        saved = f"checkpoints/step-000002/{name}.safetensors"
        one, two = load_file(alone.run.path / saved), load_file(folder / saved)
        assert one.keys() == two.keys()
        for key in one if name == "adapter" else (key for key in one if key.startswith("start.")):
            assert (two[key] - one[key]).norm() <= 2e-3 * one[key].norm()


def import_of(folder, text, name="a.toml", tool="sd-scripts"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return importing.import_file(folder / name, family="sd15", tool=tool)


SD_SCRIPTS = "pretrained_model_name_or_path = 'v1-5.safetensors'\ntrain_data_dir = 'p'\nnetwork_dim = 16\n"


def test_lycoris_rs_lora_is_ours_and_sd_scripts_own_lora_has_none(tmp_path):
    lycoris = "network_module = 'lycoris.kohya'\nnetwork_args = ['algo=loha', 'rs_lora=True']\n"
    assert config.loads(importing.to_toml(import_of(tmp_path, SD_SCRIPTS + lycoris))).adapter.rank_stabilized
    plain = "network_module = 'networks.lora'\nnetwork_args = ['rs_lora=True']\n"
    made = import_of(tmp_path, SD_SCRIPTS + plain)
    assert not config.loads(importing.to_toml(made)).adapter.rank_stabilized
    assert any("rs_lora" in str(entry.note) for entry in made.no_counterpart)


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        ("networks.lora", ["rank_dropout=0.1", "module_dropout=0.2"], (0.1, 0.2, False)),
        ("networks.lora", ["rank_dropout=0", "module_dropout=0"], (0.0, 0.0, False)),
        ("lycoris.kohya", ["algo=loha", "rank_dropout=0.1", "rank_dropout_scale=True"], (0.1, 0.0, True)),
        ("lycoris.kohya", ["algo=locon", "rank_dropout=0.1", "rank_dropout_scale=True"], (0.1, 0.0, False)),
    ],
)
def test_dropout_of_sd_scripts_and_lycoris_is_ours(tmp_path, module, arguments, expected):
    made = import_of(tmp_path, f"{SD_SCRIPTS}network_module = '{module}'\nnetwork_args = {arguments}\n")
    found = config.loads(importing.to_toml(made)).adapter
    assert (found.rank_dropout, found.module_dropout, found.rank_dropout_scale) == expected
    told = any("drops rows of the update; this trainer" in line for line in importing.to_toml(made).splitlines())
    assert told == ("algo=locon" in arguments)


def test_dropout_of_the_kohya_page_is_ours(tmp_path):
    page = {"LoRA_type": "Standard", "pretrained_model_name_or_path": "v1-5.safetensors", "train_data_dir": "p"}
    page |= {"network_dim": 8, "rank_dropout": 0.1, "module_dropout": "0.2", "max_resolution": "512,512"}
    made = import_of(tmp_path, json.dumps(page), "a.json", "kohya_ss")
    found = config.loads(importing.to_toml(made)).adapter
    assert (found.rank_dropout, found.module_dropout) == (0.1, 0.2)


def test_sd_scripts_limit_of_norms_is_ours(tmp_path):
    made = import_of(tmp_path, f"{SD_SCRIPTS}network_module = 'networks.lora'\nscale_weight_norms = 1.0\n")
    assert config.loads(importing.to_toml(made)).adapter.scale_weight_norms == 1.0


@pytest.mark.parametrize(
    ("given", "expected"),
    [("default", "default"), ("gaussian", "gaussian"), ("pissa", "pissa"), ("olora", "olora"), ("loftq", "default")],
)
def test_the_start_of_simpletuner_is_ours(tmp_path, given, expected):
    content = {"model_family": "flux", "model_type": "lora", "lora_type": "standard", "lora_rank": 8}
    content |= {"max_train_steps": 10, "lora_init_type": given}
    (tmp_path / "a.json").write_text(json.dumps(content), encoding="utf-8")
    made = importing.import_file(tmp_path / "a.json", tool="simpletuner")
    assert Adapter(**tomllib.loads(importing.to_toml(made))["adapter"]).init == expected
    assert any("adapter.init" in line for line in made.todo) == (given == "loftq")


def test_a_lycoris_config_of_simpletuner_has_scale_and_dropout(tmp_path):
    (tmp_path / "config").mkdir()
    inner = {"algo": "loha", "linear_dim": 8, "linear_alpha": 4, "rs_lora": True, "rank_dropout": 0.1}
    inner |= {"module_dropout": 0.2, "rank_dropout_scale": True}
    (tmp_path / "config" / "lycoris_config.json").write_text(json.dumps(inner), encoding="utf-8")
    content = {"model_family": "flux", "model_type": "lora", "lora_type": "lycoris", "max_train_steps": 10}
    content |= {"lycoris_config": "config/lycoris_config.json"}
    (tmp_path / "a.json").write_text(json.dumps(content), encoding="utf-8")
    found = tomllib.loads(importing.to_toml(importing.import_file(tmp_path / "a.json", tool="simpletuner")))["adapter"]
    assert (found["rank_stabilized"], found["rank_dropout_scale"]) == (True, True)
    assert (found["rank_dropout"], found["module_dropout"]) == (0.1, 0.2)


def test_sd_scripts_lora_fa_is_ours(tmp_path):
    made = import_of(tmp_path, f"{SD_SCRIPTS}network_module = 'networks.lora_fa'\n")
    found = config.loads(importing.to_toml(made)).adapter
    assert (found.type, found.freeze_a) == ("lora", True) and not any("adapter" in line for line in made.todo)
    page = {"LoRA_type": "LoRA-FA", "pretrained_model_name_or_path": "v1-5.safetensors", "train_data_dir": "p"}
    page |= {"network_dim": 8, "max_resolution": "512,512"}
    found = config.loads(importing.to_toml(import_of(tmp_path, json.dumps(page), "a.json", "kohya_ss"))).adapter
    assert (found.type, found.freeze_a) == ("lora", True)
