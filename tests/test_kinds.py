"""DoRA, LoKr and LoHa: their forward and backward in float64, peft's own layers, start values, dropout, compile."""

import math

import pytest
import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from lora_fp8 import adapters, precision
from lora_fp8.adapters import kinds
from lora_fp8.errors import UserError
from lora_fp8.lora_files import export
from lora_fp8.precision import formats
from lora_fp8.settings import Adapter, Quantize
from lora_fp8.tools import files, pairs

KINDS = ("dora", "lokr", "loha")
FORMS = ["fp8 row", "fp8 tensor", "fp8 1x64", "fp8 128x128", "int8 1x128", "nf4 64", "bf16"]


def linear(form, dtype, out=256, inner=128):
    """One layer in a storage, such as "fp8 row"."""
    layer = nn.Linear(inner, out)
    storage, _, scale = form.partition(" ")
    section = Quantize(storage=storage, scale=scale if storage in ("fp8", "int8") else "auto")
    model = nn.Sequential(layer)
    precision.quantize_(model, section, (), dtype)
    return model


def adapted(model, kind, seed=0, **settings):
    section = Adapter(**({"type": kind, "rank": 4, "alpha": 2.0, "factor": 4, "dtype": "fp32"} | settings))
    report = adapters.inject(model, section, ["0"], seed)
    return report


def trained_(model, std=0.3):
    """As after some training: what was zero no longer is, and DoRA's lengths have moved."""
    generator = torch.Generator().manual_seed(5)
    for name, parameter in adapters.list_trained_parameters(model):
        noise = torch.randn(parameter.shape, generator=generator)
        with torch.no_grad():
            parameter.copy_(parameter * (1 + 0.2 * noise) if "magnitude" in name else noise * std)


def lycoris_delta(parts, scale):
    """LyCORIS' delta (N, K), from the formulas of Yeh et al. 2023, index by index."""
    if "hada_w1_a" in parts:
        w1 = torch.einsum("nr,rk->nk", parts["hada_w1_a"], parts["hada_w1_b"])
        return scale * w1 * torch.einsum("nr,rk->nk", parts["hada_w2_a"], parts["hada_w2_b"])
    w1, w2 = (
        parts[s] if s in parts else torch.einsum("nr,rk->nk", parts[f"{s}_a"], parts[f"{s}_b"])
        for s in ("lokr_w1", "lokr_w2")
    )
    product = torch.einsum("ij,kl->ikjl", w1, w2.reshape(w2.shape[0], -1))
    return scale * product.reshape(w1.shape[0] * w2.shape[0], -1)


def double_leaves(model):
    """{part: float64 copy that gets gradients} of the only adapted layer."""
    return {
        name.partition(".")[2]: p.detach().double().requires_grad_(True)
        for name, p in adapters.list_trained_parameters(model)
    }


def expected_output(base, x, leaves, scale):
    """In float64; the norm of DoRA detached, as Liu et al. say in 4.3."""
    weight = base.weight.detach().double()
    flat = weight.flatten(1)
    if "lora_A.weight" in leaves:
        total = flat + scale * leaves["lora_B.weight"].flatten(1) @ leaves["lora_A.weight"].flatten(1)
        norm = total.detach().square().sum(1).sqrt()
        total = (leaves["lora_magnitude_vector"] / norm)[:, None] * total
    else:
        total = flat + lycoris_delta(leaves, scale)
    bias = None if base.bias is None else base.bias.detach().double()
    if isinstance(base, nn.Conv2d):
        return F.conv2d(x, total.reshape(weight.shape), bias, base.stride, base.padding)
    return F.linear(x, total, bias)


def compare(model, x, tolerance):
    """Forward and the gradients of input and parameters against float64."""
    layer = model[0]
    (scale,) = adapters.read_scalings(model).values()
    leaves = double_leaves(model)
    mine, theirs = x.clone().requires_grad_(True), x.double().requires_grad_(True)
    got, expected = model(mine), expected_output(layer.get_base_layer(), theirs, leaves, scale)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    got.backward(upstream.to(got.dtype))
    expected.backward(upstream)
    pairs = [(got, expected), (mine.grad, theirs.grad)]
    pairs += [(p.grad, leaves[name.partition(".")[2]].grad) for name, p in adapters.list_trained_parameters(model)]
    for ours, judge in pairs:
        assert (ours.double() - judge).norm() <= tolerance * judge.norm()


@pytest.mark.parametrize("form", FORMS)
def test_rows_decoded_in_pieces_are_those_decoded_at_once(form, monkeypatch):
    model = linear(form, torch.float32, out=384, inner=192 if form == "nf4 64" else 256)
    layer = model[0]
    if form == "bf16":
        assert type(layer) is nn.Linear
        return
    monkeypatch.setattr(formats, "CHUNK_ELEMENTS", 5000)
    whole = layer.weight
    seen = 0
    for rows, piece in formats.decode_rows(layer.get_parts(), layer.form.storage, torch.float32):
        assert rows.start == seen and torch.equal(piece, whole[rows])
        seen = rows.stop
    assert seen == 384


@pytest.mark.parametrize("form", FORMS)
def test_dora_is_that_of_liu_et_al(form):
    """Float32 arithmetic on the decoded weight, so that only the storage differs between the cases."""
    model = linear(form, torch.float32)
    adapted(model, "dora")
    trained_(model)
    compare(model, torch.randn(6, 128), 1e-5)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_convolutions(kind, kernel):
    model = nn.Sequential(nn.Conv2d(8, 12, kernel, padding=kernel // 2, stride=2))
    adapted(model, kind, rank=2)
    trained_(model)
    compare(model, torch.randn(2, 8, 6, 5), 1e-5)


@pytest.mark.parametrize(
    ("kind", "settings", "parts", "scale"),
    [
        ("lokr", {"rank": 4}, ["lokr_w1", "lokr_w2_a", "lokr_w2_b"], 0.5),
        ("lokr", {"rank": 512}, ["lokr_w1", "lokr_w2"], 1.0),
        ("lokr", {"rank": 2, "factor": 8, "decompose_both": True}, [f"lokr_w{i}_{h}" for i in "12" for h in "ab"], 1.0),
        ("lokr", {"rank": 4, "factor": 0}, ["lokr_w1", "lokr_w2_a", "lokr_w2_b"], 0.5),
        ("loha", {"rank": 4}, list(kinds.PARTS["loha"]), 0.5),
    ],
)
@pytest.mark.parametrize("form", ["fp8 row", "bf16"])
def test_lokr_and_loha_are_lycoris(form, kind, settings, parts, scale):
    model = linear(form, torch.float32)
    adapted(model, kind, **settings)
    assert [name.partition(".")[2] for name, _ in adapters.list_trained_parameters(model)] == parts
    assert adapters.read_scalings(model) == {"0": scale}
    assert kinds.compute_scalings(adapters.copy_state(model), Adapter(alpha=2.0, rank=settings["rank"])) == {"0": scale}
    trained_(model)
    compare(model, torch.randn(2, 3, 128), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kernel", [0, 3])
def test_peft_s_own_layer_gives_the_same(kind, kernel):
    """peft on a plain layer, given our tensors: what whoever loads them with peft has."""
    layer = nn.Conv2d(16, 32, kernel, padding=1) if kernel else nn.Linear(64, 96)
    mine, theirs = nn.Sequential(layer), nn.Sequential(layer)
    adapted(mine, kind, rank=2, alpha=1.0)
    trained_(mine)
    settings = {
        "dora": LoraConfig(r=2, lora_alpha=1, use_dora=True, target_modules=["0"]),
        "lokr": LoKrConfig(r=2, alpha=1, decompose_factor=4, target_modules=["0"]),
        "loha": LoHaConfig(r=2, alpha=1, target_modules=["0"]),
    }[kind]
    inject_adapter_in_model(settings, theirs)
    held = {name.replace(".default", ""): p for name, p in theirs.named_parameters() if "default" in name}
    for name, tensor in adapters.copy_state(mine).items():
        parameter = held.pop(name.replace("magnitude_vector", "magnitude_vector.weight"))
        parameter.data.copy_(tensor.reshape(parameter.shape))
    assert not held
    x = torch.randn(2, 16, 7, 7) if kernel else torch.randn(5, 64)
    torch.testing.assert_close(mine(x), theirs.eval()(x), rtol=1e-4, atol=1e-5)
    weight = mine[0].get_base_layer().weight.detach().clone()
    parts = kinds.group_by_layer(adapters.copy_state(mine))["0"]
    theirs[0].merge()
    torch.testing.assert_close(
        weight + kinds.compute_weight_change(weight, parts, 0.5), theirs[0].get_base_layer().weight.detach()
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["fp8 row", "int8 1x128", "bf16"])
def test_training_begins_at_the_base(kind, form):
    model = linear(form, torch.bfloat16)
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    before, weight = model(x), model[0].weight.detach().double()
    state = torch.get_rng_state()
    adapted(model, kind, dtype="bf16")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model(x), before)
    held = dict(adapters.list_trained_parameters(model))
    for name, parameter in held.items():
        assert parameter.requires_grad
        if "magnitude" in name:
            assert parameter.dtype == torch.float32
            torch.testing.assert_close(parameter.double(), weight.norm(dim=1), rtol=1e-6, atol=0)
        else:
            assert parameter.dtype == torch.bfloat16
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {
        n for n, p in model.named_parameters() if any(p is h for h in held.values())
    }
    model(x).square().sum().backward()
    zero = {name for name, p in held.items() if not p.grad.any()}
    # The first step moves what is zero, and DoRA's lengths; the others wait for it.
    moving = {"dora": {"lora_B.weight", "lora_magnitude_vector"}, "lokr": {"lokr_w2_b"}, "loha": {"hada_w2_a"}}[kind]
    assert {name.partition(".")[2] for name in held.keys() - zero} == moving


@pytest.mark.parametrize("kind", KINDS)
def test_start_depends_on_seed_and_name_only(kind):
    def start(targets, seed):
        model = nn.ModuleDict({name: nn.Linear(64, 64) for name in "ab"})
        adapters.inject(model, Adapter(type=kind, rank=4, factor=4), targets, seed)
        return adapters.copy_state(model)

    one, both, other = start(["b"], 1), start(["a", "b"], 1), start(["b"], 2)
    drawn = [name for name in one if name.partition(".")[2] not in (*kinds.ZERO_AT_START, "lora_magnitude_vector")]
    assert drawn and all(torch.equal(one[name], both[name]) for name in drawn)
    assert not any(torch.equal(one[name], other[name]) for name in drawn)
    assert not any(torch.equal(both[name], both["a" + name[1:]]) for name in drawn)


def test_loha_starts_with_lycoris_spread_and_lokr_with_kaiming():
    model = linear("bf16", torch.float32, 1024, 1024)
    adapted(model, "loha", rank=16)
    state = adapters.copy_state(model)
    assert state["0.hada_w1_a"].std().item() == pytest.approx(0.1, rel=0.05)
    assert state["0.hada_w1_b"].std().item() == pytest.approx(1.0, rel=0.05)
    model = linear("bf16", torch.float32, 1024, 1024)
    adapted(model, "lokr", rank=16, factor=16)
    first = adapters.copy_state(model)["0.lokr_w1"]
    assert first.shape == (16, 16) and 0.9 / math.sqrt(16) < first.abs().max() <= 1 / math.sqrt(16)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_drops_the_adapter_s_input_and_never_the_base_s(kind):
    model = linear("fp8 row", torch.float32)
    adapted(model, kind, dropout=0.5)
    trained_(model)
    (scale,) = adapters.read_scalings(model).values()
    base, leaves = model[0].get_base_layer(), double_leaves(model)
    x = torch.randn(4, 128)
    whole = model.eval()(x)
    assert torch.equal(whole, model(x))
    model.train()
    torch.manual_seed(3)
    got = model(x)
    torch.manual_seed(3)
    dropped = F.dropout(x, 0.5)
    zero = torch.zeros(1, 128, dtype=torch.float64)
    with torch.no_grad():
        if kind == "dora":
            total = base.weight.double() + scale * leaves["lora_B.weight"] @ leaves["lora_A.weight"]
            ratio = leaves["lora_magnitude_vector"] / total.norm(dim=1)
            update = scale * dropped.double() @ leaves["lora_A.weight"].T @ leaves["lora_B.weight"].T
            expected = ratio * (x.double() @ base.weight.double().T + update) + base.bias.double()
        else:
            update = dropped.double() @ lycoris_delta(leaves, scale).T
            expected = x.double() @ base.weight.double().T + base.bias.double() + update
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(got, whole) and model(zero.float()).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_disabled_is_the_base_alone(kind):
    model = linear("fp8 row", torch.bfloat16)
    x = torch.randn(5, 128, dtype=torch.bfloat16)
    base = model(x)
    adapted(model, kind)
    trained_(model)
    assert not torch.equal(model(x), base)
    with adapters.disabled(model):
        assert torch.equal(model(x), base)
    assert not torch.equal(model(x), base) and all(p.requires_grad for _, p in adapters.list_trained_parameters(model))


def test_rows_of_zeros_have_no_length_and_do_no_harm():
    model = nn.Sequential(nn.Linear(16, 8))
    model[0].weight.data[3] = 0
    adapted(model, "dora", rank=2)
    x = torch.randn(5, 16)
    y = model(x)
    y.square().sum().backward()
    assert y.isfinite().all() and all(p.grad.isfinite().all() for _, p in adapters.list_trained_parameters(model))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_base_is_kept_beside_it(kind):
    """What autograd holds from forward to backward is activations and the adapter, not a weight."""
    model = linear("fp8 row", torch.bfloat16, 512, 512)
    adapted(model, kind)
    held = []

    def pack(tensor):
        held.append(tensor)
        return tensor

    x = torch.randn(2, 512, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).sum()
    qweight = model[0].get_base_layer().qweight
    large = [tensor for tensor in held if tensor.numel() >= 512 * 512 and tensor.data_ptr() != qweight.data_ptr()]
    assert held and not large
    assert not [n for n, p in model.named_parameters() if p.numel() >= 512 * 512 and p is not qweight]


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_in_one_graph(kind):
    torch._dynamo.reset()
    model = linear("fp8 row", torch.bfloat16)
    adapted(model, kind, dtype="bf16")
    trained_(model)
    x = torch.randn(5, 128, dtype=torch.bfloat16, requires_grad=True)
    eager = model(x)
    (wanted,) = torch.autograd.grad(eager.sum(), x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = compiled(x)
    assert torch.equal(got, eager)
    assert torch.equal(torch.autograd.grad(got.sum(), x)[0], wanted)
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_convolutions_in_groups_are_refused(kind):
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=4))
    with pytest.raises(UserError, match=f"adapter.type = '{kind}': 0 is a grouped convolution .4 groups."):
        adapted(model, kind)
    assert not adapters.find_adapted_layers(model)


def test_settings_of_lokr_without_effect_are_told():
    model = linear("bf16", torch.float32)
    report = adapted(model, "lokr", rank=512, decompose_both=True)
    assert any("adapter.rank = 512 and adapter.alpha have no effect" in text for text in report.warnings)
    assert any("adapter.decompose_both has no effect" in text for text in report.warnings)
    assert adapted(linear("bf16", torch.float32), "lokr").warnings == ()


def test_a_layer_s_tensors_tell_their_kind():
    a, b, m = torch.zeros(2, 8), torch.zeros(4, 2), torch.zeros(4)
    assert kinds.detect_kind({"lora_A.weight": a, "lora_B.weight": b}, "x") == "lora"
    assert kinds.detect_kind({"lora_A.weight": a, "lora_B.weight": b, "lora_magnitude_vector": m}, "x") == "dora"
    for broken in (
        {"lora_A.weight": a},
        {"lokr_w1": a},
        {"lokr_w1": a, "lokr_w2_a": b},
        {"hada_w1_a": a, "lokr_w1": b},
    ):
        with pytest.raises(UserError, match="x: the"):
            kinds.detect_kind(broken, "x")
    with pytest.raises(UserError, match="x.oft_r: this tensor does not belong to a LoRA, DoRA, LoKr, LoHa or OFT"):
        kinds.group_by_layer({"x.oft_r": a})


T = torch.ones
UNFIT = {
    "loha of a tensor with three sides": {
        **{"hada_w1_a": T(4, 2, 2), "hada_w1_b": T(2, 6)},
        **{"hada_w2_a": T(4, 2), "hada_w2_b": T(2, 6)},
    },
    "loha of two sizes": {
        **{"hada_w1_a": T(4, 2), "hada_w1_b": T(2, 6)},
        **{"hada_w2_a": T(4, 2), "hada_w2_b": T(2, 5)},
    },
    "loha of two ranks": {
        **{"hada_w1_a": T(4, 2), "hada_w1_b": T(3, 6)},
        **{"hada_w2_a": T(4, 2), "hada_w2_b": T(2, 6)},
    },
    "lokr with a kernel in its first factor": {"lokr_w1": T(2, 2, 3, 3), "lokr_w2": T(2, 2)},
    "lokr with a kernel in a half": {"lokr_w1": T(2, 2), "lokr_w2_a": T(2, 2), "lokr_w2_b": T(2, 3, 3, 3)},
    "lokr of two ranks": {"lokr_w1": T(2, 2), "lokr_w2_a": T(2, 2), "lokr_w2_b": T(3, 3)},
    "lora with a kernel in B": {"lora_A.weight": T(2, 4, 3, 3), "lora_B.weight": T(4, 2, 3, 3)},
    "dora with another length": {"lora_A.weight": T(2, 4), "lora_B.weight": T(4, 2), "lora_magnitude_vector": T(3)},
    "a single number": {"lokr_w1": T(()), "lokr_w2": T(2, 2)},
}


@pytest.mark.parametrize("parts", UNFIT.values(), ids=UNFIT)
def test_parts_that_do_not_fit_are_refused_before_they_are_multiplied(parts, tmp_path):
    with pytest.raises(UserError, match="do not match"):
        kinds.detect_kind(parts, "a")
    save_file({f"lora_unet_a.{name}": tensor for name, tensor in parts.items()}, tmp_path / "a.safetensors")
    with pytest.raises(UserError):
        files.inspect(tmp_path / "a.safetensors")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e8m0fnu])
def test_an_alpha_of_a_type_that_is_no_number_is_refused(dtype, tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = {"lora_unet_a.lora_down.weight": T(2, 4), "lora_unet_a.lora_up.weight": T(4, 2)}
    save_file(tensors | {"lora_unet_a.alpha": T(()).to(dtype)}, path)
    for use in (files.inspect, pairs.read, export.read_adapter):
        with pytest.raises(UserError, match="cannot be used as a LoRA|not a safetensors file"):
            use(path)
