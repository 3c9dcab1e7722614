"""LoRA through peft: dtypes, start values, targets, names, and what stays frozen."""

import math

import pytest
import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lokr.layer import factorization
from torch import nn
from torch.nn import functional as F

from lora_fp8 import adapters, precision, settings
from lora_fp8.adapters import kinds
from lora_fp8.errors import UserError
from lora_fp8.precision.names import name_matches


def flux(storage: str = "none", dtype: torch.dtype = torch.float32) -> FluxTransformer2DModel:
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    )
    precision.quantize_(model, settings.Quantize(storage=storage), (), dtype)
    return model


def stack(storage: str, dtype: torch.dtype, sides: int = 128) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(sides, sides), nn.Linear(sides, sides))
    precision.quantize_(model, settings.Quantize(storage=storage), (), dtype)
    return model


@pytest.mark.parametrize("storage", ["fp8", "none"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_dtype_and_start_values(storage, dtype):
    model = stack(storage, torch.bfloat16)
    adapters.inject(model, settings.Adapter(rank=16, dtype=dtype), ["0", "1"], seed=3)
    held = dict(adapters.list_trained_parameters(model))
    assert list(held) == [f"{i}.lora_{half}.weight" for i in (0, 1) for half in "AB"]
    for name, parameter in held.items():
        assert parameter.dtype == adapters.DTYPES[dtype] and parameter.requires_grad
        if "lora_B" in name:
            assert not parameter.any()
            continue
        assert parameter.numel() == 2048
        # A uniform draw in bf16 has several hundred values in 2,048; one that has been through e4m3 has fewer than 130.
        assert parameter.detach().float().unique().numel() > 500
        assert parameter.detach().float().to(torch.float8_e4m3fn).float().unique().numel() < 130
        bound = 1 / math.sqrt(128)
        assert 0.95 * bound < parameter.abs().max() <= bound * 1.004
        assert parameter.float().var().item() == pytest.approx(bound**2 / 3, rel=0.1)


def test_start_is_peft_s_distribution_scaled_the_same():
    mine, theirs = stack("none", torch.float32), stack("none", torch.float32)
    adapters.inject(mine, settings.Adapter(rank=16, dtype="fp32"), ["0"], seed=0)
    inject_adapter_in_model(LoraConfig(r=16, target_modules=["0"]), theirs)
    a, b = mine[0].lora_A["default"].weight, theirs[0].lora_A["default"].weight
    assert a.shape == b.shape
    assert a.abs().max().item() == pytest.approx(b.abs().max().item(), rel=0.02)
    assert a.std().item() == pytest.approx(b.std().item(), rel=0.05)


def test_start_depends_on_seed_and_name_only():
    def start(targets, seed):
        model = flux("fp8", torch.bfloat16)
        adapters.inject(model, settings.Adapter(rank=4), targets, seed)
        return adapters.copy_state(model)

    few, many, other = start(["to_q"], 1), start(["to_v", "to_q", "proj_mlp"], 1), start(["to_q"], 2)
    assert few and few.keys() < many.keys()
    for name, tensor in few.items():
        assert torch.equal(tensor, many[name])
        if "lora_A" in name:
            assert not torch.equal(tensor, other[name])
    first = [tensor for name, tensor in few.items() if "lora_A" in name]
    assert not any(torch.equal(first[0], tensor) for tensor in first[1:])  # no two layers start alike


def test_global_random_state_is_untouched():
    model = flux("fp8", torch.bfloat16)
    before = torch.get_rng_state()
    adapters.inject(model, settings.Adapter(rank=4, dropout=0.1), ["to_q"], seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_adapters_train_and_the_base_does_not_move():
    model = flux("fp8", torch.bfloat16)
    before = dict(precision.dequantize_tensors(model))
    report = adapters.inject(model, settings.Adapter(rank=4), ["to_q", "proj_out"], seed=0)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable and all(".lora_A.default." in name or ".lora_B.default." in name for name in trainable)
    assert report.num_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert report.num_modules == len(report.names) == len(adapters.find_adapted_layers(model))
    assert len(trainable) == 2 * report.num_modules == len(adapters.list_trained_parameters(model))
    after = dict(precision.dequantize_tensors(model))
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(("compute", "dtype"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16"), ("fp32", "fp32")])
@pytest.mark.parametrize("storage", ["fp8", "none"])
def test_forward_is_base_plus_scaled_update(compute, dtype, storage):
    model = stack(storage, adapters.DTYPES[compute])
    adapters.inject(model, settings.Adapter(rank=8, alpha=4, dtype=dtype), ["0"], seed=0)
    layer = model[0]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    b.data.normal_(std=0.3)
    x = torch.randn(5, 128, dtype=adapters.DTYPES[compute])
    base = layer.get_base_layer()
    got = layer(x)
    expected = (
        F.linear(x.double(), base.weight.double(), base.bias.double())
        + 0.5 * (x.double() @ a.double().T) @ b.double().T
    )
    assert got.dtype == x.dtype
    tolerance = 1e-5 if (compute, dtype) == ("fp32", "fp32") else 0.02
    assert (got.double() - expected).norm() / expected.norm() < tolerance
    got.square().sum().backward()
    assert a.grad.dtype == a.dtype and a.grad.any() and b.grad.any()
    assert adapters.read_scalings(model) == {"0": 0.5}


def test_disabled_is_the_base_alone():
    model = stack("fp8", torch.bfloat16)
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    base = model(x)
    adapters.inject(model, settings.Adapter(rank=8), ["0", "1"], seed=0)
    assert torch.equal(model(x), base)  # B is zero
    for name, parameter in adapters.list_trained_parameters(model):
        if "lora_B" in name:
            parameter.data.normal_()
    frozen = adapters.list_trained_parameters(model)[0][1].requires_grad_(False)
    adapted = model(x)
    assert not torch.equal(adapted, base)
    with adapters.disabled(model):
        assert torch.equal(model(x), base)
        with adapters.disabled(model):
            pass
        assert torch.equal(model(x), base)
    with pytest.raises(KeyError), adapters.disabled(model):
        raise KeyError
    assert torch.equal(model(x), adapted)
    assert [p.requires_grad for _, p in adapters.list_trained_parameters(model)] == [False, True, True, True]
    assert not frozen.requires_grad


def test_targets_are_endings_of_names():
    model = flux()
    report = adapters.inject(
        model, settings.Adapter(rank=2), ["ff.net.0.proj", "to_out.0", "single_transformer_blocks.1.proj_mlp"], 0
    )
    assert report.names == (
        "transformer_blocks.0.attn.to_out.0",
        "transformer_blocks.0.ff.net.0.proj",
        "single_transformer_blocks.1.proj_mlp",
    )
    assert report.warnings == ()


def test_a_full_name_means_that_layer():
    section = settings.Adapter(rank=2, targets=["transformer_blocks.0.attn.to_q"])
    report = adapters.inject(flux(), section, ["to_v"], 0)  # the user's own targets go before the family's
    # "single_transformer_blocks.0.attn.to_q" ends in the same letters, but not in the same names.
    assert report.names == ("transformer_blocks.0.attn.to_q",)


def test_other_kinds_of_layers_are_left_alone():
    model = nn.ModuleDict({"emb": nn.Linear(8, 8), "sub": nn.ModuleDict({"emb": nn.Embedding(4, 8)})})
    assert adapters.inject(model, settings.Adapter(rank=2), ["emb"], 0).names == ("emb",)
    assert type(model["sub"]["emb"]) is nn.Embedding


def test_matches_what_peft_matches():
    targets = ["to_q", "to_k", "ff.net.2", "proj_out"]
    mine, theirs = flux(), flux()
    report = adapters.inject(mine, settings.Adapter(rank=2), targets, 0)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=targets), theirs)
    assert set(report.names) == set(adapters.find_adapted_layers(theirs)) and "proj_out" in report.names


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("to_qq", "did you mean 'to_q'"),
        ("to_out", "did you mean 'to_out.0'"),
        ("zzz", "the layers of this model end in "),
        ("o_q", "to_q"),
    ],
)
def test_targets_that_match_nothing(target, hint):
    model = flux()
    with pytest.raises(UserError, match=rf"'{target}' matches no layer.*{hint}"):
        adapters.inject(model, settings.Adapter(rank=2, targets=["to_q", target]), [], 0)
    assert not adapters.find_adapted_layers(model)


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "loha"])
def test_ranks_of_layers_are_peft_s_and_scaled_alike(kind):
    entries = {"single_transformer_blocks.0.attn": 3, "attn.to_q": 6, "^transformer_blocks": 2}
    single = "single_transformer_blocks"
    wanted = {"transformer_blocks.0.attn.to_q": 6, "transformer_blocks.0.attn.to_k": 2}
    wanted |= {f"{single}.0.attn.to_q": 3, f"{single}.0.attn.to_k": 3, f"{single}.1.attn.to_q": 6}
    wanted |= {f"{single}.1.attn.to_k": 4}
    mine = flux()
    section = settings.Adapter(type=kind, rank=4, alpha=2.0, ranks=entries, factor=2)
    adapters.inject(mine, section, ["to_q", "to_k"], seed=0)
    layers = kinds.group_by_layer(adapters.copy_state(mine))
    assert {name: kinds.read_rank(parts) for name, parts in layers.items()} == wanted
    assert set(adapters.read_scalings(mine).values()) == {0.5}
    if kind == "lora":
        theirs = flux()
        patterns = {"rank_pattern": wanted, "alpha_pattern": {name: rank / 2 for name, rank in wanted.items()}}
        inject_adapter_in_model(LoraConfig(r=4, lora_alpha=2, target_modules=list(wanted), **patterns), theirs)
        for name in wanted:
            one, other = mine.get_submodule(name), theirs.get_submodule(name)
            assert one.scaling == other.scaling
            assert one.lora_A["default"].weight.shape == other.lora_A["default"].weight.shape


def test_ranks_that_mean_nothing():
    names = ["blocks.0.attn.to_q", "blocks.0.attn.to_k", "blocks.1.ff"]
    for entry, hint in (("to_w", "did you mean 'to_q' or 'to_k'"), ("^attn", "did you mean 'attn.to_")):
        with pytest.raises(UserError, match=f"matches no trained layer; {hint}"):
            adapters.assign_ranks(settings.Adapter(ranks={entry: 3}), names)
    found, notes = adapters.assign_ranks(settings.Adapter(rank=5, ranks={"attn": 2, "to_q": 3}), names)
    assert found == dict(zip(names, (2, 2, 5), strict=True)) and "'to_q' adds nothing" in notes[0]


def test_a_layer_of_rank_0_has_no_adapter():
    mine, theirs = flux(), flux()
    section = settings.Adapter(rank=4, ranks={"single_transformer_blocks": 0, "*q": 2, "^transformer_blocks.0": 0})
    report = adapters.inject(mine, section, ["to_q", "to_k"], seed=0)
    kept = [name for name, _ in theirs.named_modules() if name.endswith((".to_q", ".to_k"))]
    kept = [name for name in kept if name.startswith("transformer_blocks") and name.count(".") == 3]
    kept = [name for name in kept if not name.startswith("transformer_blocks.0.") or name.endswith("to_q")]
    assert kept and list(report.names) == kept == list(adapters.find_adapted_layers(mine))
    with pytest.raises(UserError, match="adapter.ranks: no layer is left to train"):
        adapters.inject(flux(), settings.Adapter(ranks={"*": 0}), ["to_q"], seed=0)


@pytest.mark.parametrize(
    ("entry", "meant"),
    [
        ("*", ["down.0.attn1.to_q", "down.0.ff.net.0", "mid.attn2.to_k"]),
        ("*attn*", ["down.0.attn1.to_q", "mid.attn2.to_k"]),
        ("attn*", ["down.0.attn1.to_q", "mid.attn2.to_k"]),
        ("attn", []),
        ("^*.attn*.to_k", ["mid.attn2.to_k"]),
        ("*wn.0.a*", ["down.0.attn1.to_q"]),
        ("0.*.to_q", ["down.0.attn1.to_q"]),
        ("^d*", ["down.0.attn1.to_q", "down.0.ff.net.0"]),
        ("^0.*", []),
    ],
)
def test_a_star_stands_for_part_of_a_segment(entry: str, meant: list[str]):
    names = ["down.0.attn1.to_q", "down.0.ff.net.0", "mid.attn2.to_k"]
    assert [name for name in names if name_matches(name, entry)] == meant


def test_no_targets_and_second_injection():
    model = flux()
    with pytest.raises(UserError, match="nothing to train"):
        adapters.inject(model, settings.Adapter(rank=2), [], 0)
    adapters.inject(model, settings.Adapter(rank=2), ["to_q"], 0)
    with pytest.raises(ValueError, match="adapters already"):
        adapters.inject(model, settings.Adapter(rank=2), ["to_k"], 0)


def test_warnings():
    report = adapters.inject(
        flux(), settings.Adapter(rank=64), ["attn.to_q", "to_q", "transformer_blocks.0.attn.to_q"], 0
    )
    wide = [note for note in report.warnings if "adapter.rank 64 exceeds" in note]
    assert len(wide) == 1 and "layers, such as transformer_blocks.0.attn.to_q (32)" in wide[0]
    assert any("'transformer_blocks.0.attn.to_q' adds nothing" in note for note in report.warnings)


@pytest.mark.parametrize(("kind", "rank", "told"), [("lora", 4, "multiple of 8"), ("loha", 8, "only 'lora' can train")])
def test_convolutions_in_groups_that_peft_cannot_adapt(kind, rank, told):
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8))
    with pytest.raises(UserError, match=told):
        adapters.inject(model, settings.Adapter(type=kind, rank=rank), ["0"], seed=0)
    adapters.inject(model, settings.Adapter(rank=8), ["0"], seed=0)
    assert model(torch.randn(1, 8, 4, 4)).shape == (1, 8, 2, 2)


def test_convolutions_where_named():
    model = UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )
    precision.quantize_(model, settings.Quantize(storage="fp8"), (), torch.bfloat16)
    report = adapters.inject(model, settings.Adapter(rank=4), ["to_q", "conv1"], seed=0)
    kinds = {type(layer.get_base_layer()) for layer in adapters.find_adapted_layers(model).values()}
    assert kinds == {precision.FrozenLinear, precision.FrozenConv2d}
    assert sum(name.endswith("conv1") for name in report.names) == sum(
        name.endswith("conv1") for name, _ in UNet2DConditionModel.named_modules(model) if "base_layer" not in name
    )
    noisy = torch.randn(1, 4, 8, 8, dtype=torch.bfloat16)
    model(noisy, torch.tensor([5]), torch.randn(1, 3, 16, dtype=torch.bfloat16), return_dict=False)[0].sum().backward()
    for name, parameter in adapters.list_trained_parameters(model):
        if "lora_B" in name:
            assert parameter.grad is not None and parameter.grad.any(), name


def test_state_round_trip_and_errors():
    model, other = flux("fp8", torch.bfloat16), flux("fp8", torch.bfloat16)
    for each, seed in ((model, 1), (other, 2)):
        adapters.inject(each, settings.Adapter(rank=4), ["to_q"], seed)
    for _, parameter in adapters.list_trained_parameters(model):
        parameter.data.normal_()
    saved = adapters.copy_state(model)
    adapters.load_state_(other, saved)
    assert all(torch.equal(parameter, saved[name]) for name, parameter in adapters.list_trained_parameters(other))
    first = next(iter(saved))
    saved[first].zero_()
    assert dict(adapters.list_trained_parameters(model))[first].any()  # a copy, not the parameter

    wrong = dict(saved)
    del wrong[first]
    wrong["nowhere.lora_A.weight"] = torch.zeros(1)
    last = list(saved)[-1]
    wrong[last] = torch.zeros(3, 3)
    before = adapters.copy_state(other)
    with pytest.raises(UserError) as error:
        adapters.load_state_(other, wrong)
    assert f"{first} is missing" in str(error.value)
    assert "nowhere.lora_A.weight is not part" in str(error.value)
    assert f"{last} has shape [3, 3], expected [32, 4]" in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapters.copy_state(other).items())


def test_dropout_acts_in_training_only():
    model = stack("fp8", torch.bfloat16)
    adapters.inject(model, settings.Adapter(rank=8, dropout=0.5), ["0"], seed=0)
    model[0].lora_B["default"].weight.data.normal_()
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    assert not torch.equal(model.train()(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


# -- shapes without peft


def odd_layers() -> nn.Sequential:
    """Linear layers and convolutions whose sides are prime, square, equal, and in groups."""
    return nn.Sequential(
        nn.Linear(12, 97),
        nn.Linear(144, 40, bias=False),
        nn.Conv2d(24, 30, 3, padding=1),
        nn.Conv2d(36, 64, 1),
        nn.Conv2d(16, 16, (3, 5), groups=4),
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "more",
    [
        *({"type": kind} for kind in ("lora", "dora", "lokr", "loha", "oft")),
        *({"type": kind, "freeze_a": True} for kind in ("lora", "dora")),
        *({"type": "lokr", "decompose_both": True, "factor": factor} for factor in (0, 6)),
    ],
    ids=str,
)
def test_the_planned_tensors_are_those_that_peft_adds(more, dtype):
    for rank, ranks in ((4, {}), (4, {"1": 12, "3": 0}), (32, {})):
        section = settings.Adapter(rank=rank, ranks=ranks, dtype=dtype, block_size=16, **more)
        names = ["0", "1", "2", "3", "4"]
        if section.type == "oft":
            names.remove("0")  # 97 is prime, and has no blocks
        if section.type != "lora":
            names.remove("4")  # groups are for LoRA alone
        model = odd_layers()
        planned = adapters.plan_tensors(model, section, names, called="model.{}".format)
        assert not adapters.find_adapted_layers(model)
        adapters.inject(model, section, names, seed=0)
        added = adapters.list_tensors(model)
        described = [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in planned]
        assert described == [(f"model.{n}", t.shape, t.dtype, t.requires_grad) for n, t in added]
        assert all(tensor.is_meta for _, tensor in planned)


def test_sides_are_split_as_peft_splits_them():
    for factor in (0, 1, 2, 4, 5, 8, 16, 100, 1000):
        for side in range(1, 1300):
            assert kinds.split_side(side, factor) == factorization(side, factor or -1), (side, factor)


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_planning_refuses_what_injecting_refuses(kind):
    section = settings.Adapter(type=kind, rank=4)
    for targets in (["9"], [], ["4"] if kind == "lokr" else ["1", "9"]):
        with pytest.raises(UserError) as planned:
            adapters.plan_tensors(odd_layers(), section, targets)
        with pytest.raises(UserError) as injected:
            adapters.inject(odd_layers(), section, targets, seed=0)
        assert str(planned.value) == str(injected.value)
