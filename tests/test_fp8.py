"""The frozen FP8 layer against float64 and torch's own autograd, and the filling of whole diffusers models."""

import copy
import gc

import accelerate
import peft
import pytest
import torch
from diffusers import (
    FluxTransformer2DModel,
    PixArtTransformer2DModel,
    QwenImageTransformer2DModel,
    UNet2DConditionModel,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lora_fp8 import adapters, config, precision
from lora_fp8.precision import FrozenFp8Linear, decode, encode, fp8

FP8 = config.Quantize(storage="fp8")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def flux() -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=16,
        axes_dims_rope=(4, 6, 6),
    )


def flux_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(1, 6, 16, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, 5, 32, dtype=dtype),
        "pooled_projections": torch.randn(1, 16, dtype=dtype),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(5, 3),
        "return_dict": False,
    }


def unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        norm_num_groups=8,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


# -- the arithmetic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [1.0, 0.02, 0.001, 1e-6])
def test_error_on_gaussian_weights(std):
    weight = torch.randn(512, 768) * std
    error = relative(decode(*encode(weight), torch.float32), weight)
    assert 0.020 < error <= 0.027  # a smaller error than e4m3 can have would mean that nothing was quantized


def test_outlier_row_does_not_touch_the_others():
    weight = torch.randn(64, 256) * 0.02
    plain = decode(*encode(weight), torch.float32)
    weight[7] *= 10_000
    weight[9, 3] = 50.0
    decoded = decode(*encode(weight), torch.float32)
    others = [row for row in range(64) if row not in (7, 9)]
    assert torch.equal(decoded[others], plain[others])
    assert relative(decoded[7], weight[7]) <= 0.035
    assert decoded[9, 3].item() == pytest.approx(50.0, rel=1e-6)


def test_every_value_is_the_nearest_that_e4m3_has():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    levels = codes[codes.isfinite()].unique()
    weight = torch.randn(32, 200) * torch.logspace(-6, 3, 32)[:, None]
    qweight, scale = encode(weight)
    exact_scale = weight.double().abs().amax(dim=1, keepdim=True) / 448
    assert torch.allclose(scale.double(), exact_scale, rtol=2e-7, atol=0)
    scaled = weight.double() / scale.double()
    nearest = (scaled[..., None] - levels).abs().amin(dim=-1)
    got = (scaled - decode(qweight, scale, torch.float32).double() / scale.double()).abs()
    assert (got <= nearest + 1e-4 * scaled.abs().clamp(min=1e-3)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_equals_torchs_cast_for_every_code(dtype):
    codes = torch.tensor([code for code in range(256) if code not in (0x7F, 0xFF)], dtype=torch.uint8)
    qweight = codes.expand(5, -1).contiguous()
    scale = torch.tensor([1.0, 0.37, 2.0**-20, 1e-3, 7.7]).unsqueeze(1)
    reference = (qweight.view(torch.float8_e4m3fn).to(torch.float32) * scale).to(dtype)
    got = decode(qweight, scale, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, reference)
    assert torch.equal(got.signbit(), reference.signbit())


def test_extreme_rows():
    weight = torch.randn(6, 128)
    weight[0] = 0.0
    weight[1] *= 1e-39  # denormal in float32
    weight[2] *= 1e37
    weight[3] *= 1e-30
    weight[4] = 0.0
    weight[4, 5] = -1e-45
    qweight, scale = encode(weight)
    decoded = decode(qweight, scale, torch.float32)
    assert torch.isfinite(decoded).all() and (scale > 0).all() and (scale >= 2.0**-126).all()
    assert torch.equal(decoded[0], torch.zeros(128))
    for row in (2, 3, 5):
        assert relative(decoded[row], weight[row]) < 0.035
    # Half an e4m3 step: a sixteenth of the value, or of the smallest step where that is larger.
    assert ((decoded[1] - weight[1]).abs() <= torch.clamp(weight[1].abs() / 16, min=2.0**-136) + 2e-45).all()
    assert decode(qweight, scale, torch.bfloat16).isfinite().all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_non_finite_weights_are_refused_by_name(bad, dtype):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16)).to(dtype)
    model[1].weight.data[11, 3] = bad
    with pytest.raises(ValueError, match=r"^1: .*row 11"):
        precision.quantize_(model, FP8, (), torch.bfloat16)


def test_encoding_in_pieces_changes_nothing(monkeypatch):
    weight = torch.randn(37, 64)
    whole = encode(weight)
    monkeypatch.setattr(fp8, "CHUNK_ELEMENTS", 5 * 64)
    assert all(map(torch.equal, encode(weight), whole))


def test_a_layer_answers_as_its_linear_does():
    # Planted bug "the scale is forgotten" (in decode or in encode) turns this red: the answer is off by orders of
    # magnitude.
    linear = nn.Linear(96, 64)
    linear.weight.data.mul_(torch.logspace(-2, 1, 64)[:, None])
    x = torch.randn(5, 96)
    layer = FrozenFp8Linear.from_linear(linear, torch.float32)
    expected, got = linear(x).detach(), layer(x)
    error = (got - expected).norm(dim=0) / expected.norm(dim=0)
    assert error.max() < 0.08  # each output feature has a scale of its own
    assert torch.equal(got, F.linear(x, layer.weight, layer.bias))


# -- gradients, GEMMs and what is kept for backward --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96,), (7, 96), (2, 5, 96)])
@pytest.mark.parametrize("bias", [True, False])
def test_gradient_equals_that_of_the_decoded_linear_to_the_bit(dtype, shape, bias):
    layer = FrozenFp8Linear.from_linear(nn.Linear(96, 64, bias=bias), dtype)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    y = torch.randn(*shape[:-1], 64, dtype=dtype)
    mine = layer(x)
    (mine_grad,) = torch.autograd.grad(mine, x, y)
    theirs = F.linear(x, layer.weight, layer.bias)
    (theirs_grad,) = torch.autograd.grad(theirs, x, y)
    assert torch.equal(mine, theirs)
    assert torch.equal(mine_grad, theirs_grad)


class Gemms(TorchDispatchMode):
    """Counts matrix products that have a base weight (of the given sides) as an operand."""

    def __init__(self, *sides: int):
        super().__init__()
        self.sides = set(sides)
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default):
            self.count += any(isinstance(arg, Tensor) and set(arg.shape) == self.sides for arg in args)
        return func(*args, **(kwargs or {}))


def stack(dtype: torch.dtype, depth: int = 3) -> nn.Sequential:
    """Linears 96 -> 64 -> 96 -> ... in FP8 with LoRA beside each."""
    sides = [96, 64] * depth
    model = nn.Sequential(*[nn.Linear(a, b) for a, b in zip(sides[:-1], sides[1:], strict=True)])
    precision.quantize_(model, FP8, (), dtype)
    adapters.inject(model, config.Adapter(rank=4, alpha=4), [str(index) for index in range(len(model))], seed=0)
    for name, parameter in adapters.parameters(model):
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def run(model: nn.Sequential, x: Tensor, how: str) -> Tensor:
    if how == "off":
        return model(x)
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=how == "reentrant")
    return x


HOW = ["off", "non-reentrant", "reentrant"]


@pytest.mark.parametrize("how", HOW)
def test_number_of_base_gemms(how):
    model = stack(torch.bfloat16)
    x = torch.randn(8, 96, dtype=torch.bfloat16, requires_grad=True)
    with Gemms(64, 96) as forward:
        loss = run(model, x, how).square().sum()
    with Gemms(64, 96) as backward:
        loss.backward()
    assert forward.count == len(model)
    # One for dX. Checkpointing computes the forward once more. Never a third for a gradient of the frozen weight.
    assert backward.count == len(model) * (1 if how == "off" else 2)


def test_no_backward_gemm_where_the_input_needs_no_gradient():
    model = stack(torch.bfloat16)
    with Gemms(64, 96) as gemms:
        run(model, torch.randn(8, 96, dtype=torch.bfloat16), "off").square().sum().backward()
    assert gemms.count == 2 * len(model) - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", HOW)
def test_no_decoded_weight_is_kept_for_backward(how, dtype):
    model = stack(dtype)
    owned = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept = []

    def pack(tensor):
        if tensor.data_ptr() not in owned:
            kept.append(tensor)
        return tensor

    x = torch.randn(8, 96, dtype=dtype, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run(model, x, how).square().sum()
        loss.backward()
    weights = [tensor for tensor in kept if set(tensor.shape) == {64, 96} or tensor.numel() >= 64 * 96]
    assert sum(tensor.nbytes for tensor in weights) == 0
    assert kept or how == "reentrant"  # the hooks saw something


def test_naive_decoding_would_be_caught_by_the_test_above():
    layer = FrozenFp8Linear.from_linear(nn.Linear(96, 64), torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        F.linear(torch.randn(2, 96, requires_grad=True), layer.weight)
    assert any(set(tensor.shape) == {64, 96} and tensor.is_floating_point() for tensor in kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing_changes_no_bit(dtype):
    model = stack(dtype)
    x = torch.randn(8, 96, dtype=dtype)
    results = {}
    for how in HOW:
        model.zero_grad()
        here = x.clone().requires_grad_()
        loss = run(model, here, how).float().square().sum()
        loss.backward()
        results[how] = [loss.detach(), here.grad, *[parameter.grad for _, parameter in adapters.parameters(model)]]
    for how in HOW[1:]:
        assert all(map(torch.equal, results["off"], results[how])), how


def test_autocast_and_wrong_input_dtype():
    layer = FrozenFp8Linear.from_linear(nn.Linear(96, 64), torch.float32)
    x = torch.randn(3, 96, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
        expected = F.linear(x, layer.weight, layer.bias)
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    y.float().sum().backward()
    assert x.grad.dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"torch.float32 but was given torch.bfloat16"):
        layer(x.bfloat16())


# -- a module among modules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cast", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.to("cpu", torch.float64)]
)
def test_casts_leave_bytes_and_scales_alone(cast):
    model = nn.Sequential(FrozenFp8Linear.from_linear(nn.Linear(96, 64), torch.float32))
    before = copy.deepcopy(model)
    cast(model)
    layer = model[0]
    assert layer.qweight.dtype == torch.uint8 and torch.equal(layer.qweight, before[0].qweight)
    assert layer.scale.dtype == torch.float32 and torch.equal(layer.scale, before[0].scale)
    assert layer.bias.dtype == layer.weight.dtype == layer.compute_dtype != torch.float32
    assert layer(torch.randn(2, 96, dtype=layer.compute_dtype)).dtype == layer.compute_dtype
    model.to(torch.float32)  # and back: what was lost is only the bias' precision
    assert torch.equal(layer.weight, before[0].weight)


def test_is_a_linear_and_is_frozen():
    layer = FrozenFp8Linear.from_linear(nn.Linear(96, 64), torch.bfloat16)
    assert isinstance(layer, nn.Linear)
    assert {name: p.requires_grad for name, p in layer.named_parameters()} == {"qweight": False, "bias": False}
    assert (layer.in_features, layer.out_features) == (96, 64)
    assert sum(tensor.nbytes for tensor in layer.state_dict().values()) == 96 * 64 + 4 * 64 + 2 * 64


def test_deepcopy_and_state_dict():
    layer = FrozenFp8Linear.from_linear(nn.Linear(96, 64), torch.bfloat16)
    x = torch.randn(3, 96, dtype=torch.bfloat16)
    twin = copy.deepcopy(layer)
    other = FrozenFp8Linear(96, 64, dtype=torch.bfloat16)
    other.load_state_dict(layer.state_dict())
    expected = layer(x)
    layer.qweight.data.zero_()
    assert torch.equal(twin(x), expected) and torch.equal(other(x), expected)
    with pytest.raises(ValueError, match="uint8"):
        other.load_state_dict(twin.state_dict() | {"qweight": twin.qweight.view(torch.float8_e4m3fn)})


def test_meta_construction_and_to_empty():
    layer = FrozenFp8Linear(96, 64, device="meta", dtype=torch.bfloat16)
    assert layer.weight.device.type == "meta" and layer.weight.shape == (64, 96)
    assert layer(torch.empty(2, 96, device="meta", dtype=torch.bfloat16)).shape == (2, 64)
    layer.to(torch.float16).to_empty(device="cpu")
    assert layer.scale.dtype == torch.float32 and layer.scale.device.type == "cpu"
    assert layer.compute_dtype == torch.float16


def test_compiles_without_a_graph_break():
    layer = FrozenFp8Linear.from_linear(nn.Linear(32, 16), torch.float32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 32, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), x)[0]
    assert torch.allclose(torch.autograd.grad(compiled(x).square().sum(), x)[0], expected)


# -- whole models ------------------------------------------------------------------------------------------------------


def test_report_and_what_is_kept():
    model = flux()
    linears = {name: m.weight.shape for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    section = config.Quantize(storage="fp8", keep=["attn.to_out"])
    report = precision.quantize_(model, section, ("norm1", "^proj_out", "not_in_this_variant"), torch.bfloat16)
    assert {layer.name: torch.Size(layer.shape) for layer in report.layers} == linears
    kept = {layer.name: layer.reason for layer in report.kept}
    assert kept == {
        "proj_out": "'^proj_out' is precise in this family",
        "transformer_blocks.0.norm1.linear": "'norm1' is precise in this family",
        "transformer_blocks.0.attn.to_out.0": "'attn.to_out' in quantize.keep",
    }
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert isinstance(module, FrozenFp8Linear) == (name not in kept), name
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.uint8, torch.bfloat16}
    assert report.num_bytes == sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert report.num_bytes < 0.62 * report.plain_num_bytes
    assert "fp8" in report.summary() and "1 x 'norm1'" in report.summary()


def test_meta_and_real_quantization_report_the_same():
    with torch.device("meta"):
        empty = flux()
    assert precision.quantize_(empty, FP8, ("norm",), torch.bfloat16) == precision.quantize_(
        flux(), FP8, ("norm",), torch.bfloat16
    )


def test_storage_none_swaps_nothing():
    model = flux()
    report = precision.quantize_(model, config.Quantize(storage="none", keep=["to_q"]), (), torch.bfloat16)
    assert not report.quantized and report.num_bytes == report.plain_num_bytes
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert "keep had no effect" in report.warnings[0]


def test_keep_that_matches_nothing():
    with pytest.raises(config.UserError, match=r"'to_qq' matches no linear layer.*did you mean 'to_q'"):
        precision.quantize_(flux(), config.Quantize(storage="fp8", keep=["to_qq"]), (), torch.bfloat16)


def test_quantizing_after_adapters_is_refused():
    model = flux()
    adapters.inject(model, config.Adapter(rank=2), ["to_q"], 0)
    with pytest.raises(ValueError, match="before adapters.inject"):
        precision.quantize_(model, FP8, (), torch.bfloat16)


def test_a_shared_layer_stays_shared_and_attention_stays_whole():
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": shared, "b": shared, "attn": nn.MultiheadAttention(16, 2)})
    report = precision.quantize_(model, FP8, (), torch.float32)
    assert model["a"] is model["b"] and isinstance(model["a"], FrozenFp8Linear)
    assert [layer.name for layer in report.kept] == ["attn.out_proj"]
    x = torch.randn(3, 1, 16)
    assert model["attn"](x, x, x)[0].shape == x.shape


def test_float32_parts_of_a_class_stay_float32():
    model = flux()
    model._keep_in_fp32_modules = ["time_text_embed"]
    precision.quantize_(model, FP8, (), torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert (parameter.dtype == torch.float32) == name.startswith("time_text_embed"), name


@pytest.mark.parametrize("make", [flux, unet])
def test_filling_equals_quantizing_what_is_there(make):
    model = make()
    stream = [(name, tensor.clone()) for name, tensor in model.state_dict().items()]
    with torch.device("meta"):
        empty = make()
    assert not [name for name, _ in empty.named_buffers()]  # nothing that only the constructor knows
    for each in (model, empty):
        precision.quantize_(each, FP8, ("proj_out",), torch.bfloat16)
    precision.fill_(empty, reversed(stream), torch.bfloat16)
    assert not any(parameter.requires_grad for parameter in empty.parameters())
    expected, got = model.state_dict(), empty.state_dict()
    assert expected.keys() == got.keys()
    for name in expected:
        assert expected[name].dtype == got[name].dtype and torch.equal(expected[name], got[name]), name


def test_filled_flux_answers_as_the_model_on_decoded_weights():
    with torch.device("meta"):
        model = flux()
    source = flux()
    precision.quantize_(model, FP8, ("norm_out",), torch.float32)
    precision.fill_(model, source.state_dict().items(), torch.float32)
    inputs = flux_inputs(torch.float32)
    plain = flux()
    plain.load_state_dict(precision.decoded_state_dict(model))  # strict
    with torch.no_grad():
        got, exact, unquantized = model(**inputs)[0], plain(**inputs)[0], source(**inputs)[0]
    assert torch.equal(got, exact)
    assert 0 < relative(got, unquantized) < 0.1


def test_decoded_state_dict_with_adapters():
    model = flux()
    names = list(model.state_dict())
    precision.quantize_(model, FP8, (), torch.bfloat16)
    before = precision.decoded_state_dict(model)
    adapters.inject(model, config.Adapter(rank=2), ["to_q", "proj_mlp"], 0)
    after = precision.decoded_state_dict(model)
    assert sorted(after) == sorted(names) and list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in names)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}


def test_filling_reports_every_problem():
    tensors = flux().state_dict()
    removed = [name for name in tensors if ".attn." in name]
    for name in removed:
        del tensors[name]
    tensors["extra.weight"] = torch.zeros(2)
    tensors["x_embedder.weight"] = torch.zeros(3, 3)
    with torch.device("meta"):
        empty = flux()
    precision.quantize_(empty, FP8, (), torch.bfloat16)
    stream = [*tensors.items(), ("proj_out.bias", tensors["proj_out.bias"])]
    with pytest.raises(config.UserError) as error:
        precision.fill_(empty, stream, torch.bfloat16)
    text = str(error.value)
    assert f"{len(removed)} are missing: " in text and f"and {len(removed) - 8} more" in text
    assert text.count(".attn.") == 8
    assert "1 is not part of this model: extra.weight" in text
    assert "1 is given twice: proj_out.bias" in text
    assert "x_embedder.weight [3, 3], expected [32, 16]" in text


def test_filling_refuses_non_finite_weights_by_name():
    tensors = flux().state_dict()
    tensors["transformer_blocks.0.attn.to_q.weight"][0, 0] = float("inf")
    with torch.device("meta"):
        empty = flux()
    precision.quantize_(empty, FP8, (), torch.bfloat16)
    with pytest.raises(ValueError, match=r"transformer_blocks\.0\.attn\.to_q: "):
        precision.fill_(empty, tensors.items(), torch.bfloat16)


def pixart() -> PixArtTransformer2DModel:
    return PixArtTransformer2DModel(
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        cross_attention_dim=16,
        caption_channels=16,
        sample_size=16,
    )


def qwen() -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel(
        num_layers=1, attention_head_dim=16, num_attention_heads=2, axes_dims_rope=(4, 6, 6), joint_attention_dim=32
    )


@pytest.mark.parametrize(("make", "lost"), [(pixart, "pos_embed.pos_embed"), (qwen, "pos_embed.pos_freqs")])
def test_tensors_computed_by_the_constructor(make, lost):
    source = make()
    stream = list(source.state_dict().items())
    with torch.device("meta"):
        empty = make()
    precision.quantize_(empty, FP8, (), torch.float32)
    with pytest.raises(config.UserError, match=rf"{lost}.*init_empty_weights"):
        precision.fill_(empty, stream, torch.float32)
    with accelerate.init_empty_weights():
        good = make()
    precision.quantize_(good, FP8, (), torch.float32)
    precision.fill_(good, stream, torch.float32)
    path, _, attribute = lost.partition(".")
    assert torch.equal(getattr(good.get_submodule(path), attribute), getattr(source.get_submodule(path), attribute))


def peak_bytes(work) -> int:
    """Most bytes that torch's CPU allocator held during `work` beyond what it held before, from the profiler."""
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    totals, waiting = [], list(profiler.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation and str(event.extra_fields.device) == "cpu":
            totals.append((event.start_time_ns, event.extra_fields.alloc_size))
    held = peak = 0
    for _, size in sorted(totals, key=lambda total: total[0]):
        held += size
        peak = max(peak, held)
    return peak


def test_peak_memory_while_filling(capsys):
    sides, depth = 1536, 8
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(sides, sides) for _ in range(depth)])
    precision.quantize_(model, FP8, (), torch.bfloat16)

    def stream():
        for index in range(depth):
            yield f"{index}.weight", torch.full((sides, sides), 0.5, dtype=torch.float32)
            yield f"{index}.bias", torch.zeros(sides, dtype=torch.float32)

    largest = sides * sides * 4
    peak = peak_bytes(lambda: precision.fill_(model, stream(), torch.bfloat16))
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    extra = (peak - held) / largest
    with capsys.disabled():
        print(f"\nfilling: peak {peak / 2**20:.1f} MiB = {held / 2**20:.1f} held + {extra:.2f} x the largest tensor")
    assert held < 1.01 * sides * sides * depth
    assert held < peak < held + 2 * largest
    # The measure itself: holding the whole model in bf16 on the way shows.
    assert peak_bytes(lambda: [tensor.bfloat16() for _, tensor in stream()]) > held + 2 * largest


def test_peft_sees_the_compute_dtype():
    model = nn.Sequential(nn.Linear(32, 32))
    precision.quantize_(model, FP8, (), torch.bfloat16)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["0"]), model)
    assert isinstance(model[0], peft.tuners.lora.Linear)
    assert {model[0].lora_A["default"].weight.dtype, model[0].lora_B["default"].weight.dtype} <= {
        torch.float32,
        torch.bfloat16,
    }
