"""The Triton kernels in Triton's interpreter, against torch in float64 and against peft. `test_kernels.py` runs this
file in a process of its own, because TRITON_INTERPRET must be set before anything imports triton.

Two traits of the interpreter (3.9) shape what is compared. Its cast to e4m3 loses a carry: what should round up to a
power of two comes out as half of it, one value in forty. So values are compared code by code with that one exception,
and whole layers with the values that the kernel gave. Its cast to bf16 cuts off instead of rounding.
"""

import os

import pytest
import torch
from peft.tuners import lora
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from lora_fp8 import adapters, precision, settings
from lora_fp8.precision import Format, FrozenLinear, kernels, matmul, stream

assert os.environ.get("TRITON_INTERPRET") == "1", "run tests/test_kernels.py"

E4M3 = torch.float8_e4m3fn
IN, OUT, RANK, SCALING = 160, 272, 5, 0.7  # no multiples of a tile
FUSED = adapters.FusedLora


@pytest.fixture(autouse=True)
def fresh():
    """No quantized input from before, no code compiled before."""
    torch.manual_seed(0)
    matmul.forget_shared()
    torch._dynamo.reset()
    counters.clear()


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


# -- rows to e4m3 ------------------------------------------------------------------------------------------------------


def quantized_in_float64(x_MK: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    product = x_MK.double() if factor is None else (x_MK.double() * factor.double().view(1, -1)).float().double()
    scale = (product.abs().amax(dim=1, keepdim=True) / 448).float().clamp(min=2.0**-126)
    return (product / scale.double()).clamp(-448, 448).float().to(E4M3), scale


def codes_apart(values: Tensor, expected: Tensor) -> Tensor:
    """Steps between two e4m3 tensors where they differ otherwise than by a lost carry."""
    got, wanted = values.view(torch.uint8).int(), expected.view(torch.uint8).int()
    lost_carry = (wanted % 8 == 0) & (got == wanted - 8)
    return torch.where(lost_carry, 0, (got - wanted).abs())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (9, 640), (3, 3072)])
@pytest.mark.parametrize("factor", ["none", "row", "tensor"])
def test_rows_have_the_scales_and_values_of_float64(dtype, shape, factor):
    x = torch.randn(shape).mul(torch.logspace(-3, 3, shape[0])[:, None]).to(dtype)
    by = {"none": None, "row": torch.rand(shape[1], 1) + 0.1, "tensor": torch.full((1, 1), 0.3)}[factor]
    values, scale = kernels.quantize_rows(x, by)
    expected, expected_scale = quantized_in_float64(x, by)
    assert values.dtype == E4M3 and values.shape == shape and torch.equal(scale, expected_scale)
    apart = codes_apart(values, expected)
    assert apart.max() <= 1 and apart.float().mean() < 1e-2  # at ties, and where a quotient is a hair off


def test_rows_of_any_strides():
    wide = torch.randn(6, 20)
    for x in (wide[:, 4:17], wide[::2], wide.t(), wide[:1].expand(4, 20)):
        values, scale = kernels.quantize_rows(x)
        same, same_scale = kernels.quantize_rows(x.clone(memory_format=torch.contiguous_format))
        assert values.is_contiguous() and torch.equal(values.view(torch.uint8), same.view(torch.uint8))
        assert torch.equal(scale, same_scale)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("folded", [False, True])
def test_a_row_that_is_not_finite_is_nan_as_in_torch(bad, folded):
    x, factor = torch.randn(5, 64), torch.rand(64) if folded else None
    x[1, 3], x[3, 63] = bad, bad
    x[3, 0] = 1e30  # a maximum that looks fine
    values, scale = kernels.quantize_rows(x, factor)
    of_torch, torch_scale = matmul.quantize(x if factor is None else x * factor)
    got, expected = values.float() * scale, of_torch.float() * torch_scale
    assert torch.equal(got.isnan(), expected.isnan()) and got.isnan().sum() == 2 * 64
    assert scale.isfinite().flatten().tolist() == [True, False, True, False, True]


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("columns", [64, 65, 128, 300])
def test_a_row_read_in_parts_is_as_one_read_whole(monkeypatch, columns, folded):
    x, factor = torch.randn(6, columns), torch.rand(columns) + 0.1 if folded else None
    x[1, -1], x[2, 0], x[3, -1], x[4] = 1e5, float("nan"), float("inf"), 0.0
    values, scale = kernels.quantize_rows(x, factor)
    monkeypatch.setattr(kernels, "_WIDEST", 32)
    in_parts, scale_in_parts = kernels.quantize_rows(x, factor)
    assert torch.equal(scale.view(torch.int32), scale_in_parts.view(torch.int32))
    assert torch.equal(values.view(torch.uint8), in_parts.view(torch.uint8))


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e30])
def test_extreme_rows(size):
    x = torch.randn(3, 64) * size
    values, scale = kernels.quantize_rows(x)
    assert torch.equal(scale, quantized_in_float64(x, None)[1]) and (values.float() * scale).isfinite().all()
    assert values.float().abs().max() == (448 if size > 1e-38 else 0)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (128, 128), (129, 257), (640, 33)])
def test_bytes_are_transposed(shape):
    original = torch.randint(0, 256, shape, dtype=torch.uint8)
    transposed = kernels.transpose_bytes(original)
    assert torch.equal(transposed, original.t()) and transposed.is_contiguous()


# -- epilogue ----------------------------------------------------------------------------------------------------------


def parts_of_epilogue(rows: int, columns: int, rank: int, dtype: torch.dtype) -> dict:
    return {
        "a_scale": torch.rand(rows, 1) + 0.1,
        "w_scale": torch.rand(columns, 1) + 0.1,
        "bias_N": torch.randn(columns).to(dtype),
        "h_MR": torch.randn(rows, rank).to(dtype),
        "b_NR": torch.randn(columns, rank).to(dtype),
    }


def epilogue_in_float64(sums: Tensor, a_scale, w_scale, bias_N, h_MR, b_NR, scaling: float) -> Tensor:
    y = sums.double() * a_scale.double()
    y = y if w_scale is None else y * w_scale.double().view(1, -1)
    y = y if bias_N is None else y + bias_N.double()
    return y if h_MR is None else y + scaling * h_MR.double() @ b_NR.double().T


@pytest.mark.parametrize("rank", [1, 4, 16, 65, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_epilogue_equals_float64(rank, dtype):
    rows, columns = 70, 145
    parts = parts_of_epilogue(rows, columns, rank, dtype)
    sums = torch.randn(rows, columns).to(torch.float32 if dtype == torch.float16 else dtype)
    expected = epilogue_in_float64(sums, **parts, scaling=SCALING)
    y = kernels.apply_epilogue(sums, **parts, scaling=SCALING, dtype=dtype)
    assert y.dtype == dtype and (y.data_ptr() == sums.data_ptr()) == (y.dtype == sums.dtype)
    # One rounding: half a step of fp16, a step of bf16 where the interpreter cuts off.
    step = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}[dtype]
    assert ((y.double() - expected).abs() <= step * expected.abs() + 1e-5 * rank**0.5).all()


@pytest.mark.parametrize("left_out", [("w_scale",), ("bias_N",), ("h_MR", "b_NR"), ("w_scale", "bias_N")])
def test_epilogue_without_some_parts(left_out):
    parts = parts_of_epilogue(66, 130, 4, torch.float32) | dict.fromkeys(left_out)
    sums = torch.randn(66, 130)
    expected = epilogue_in_float64(sums, **parts, scaling=SCALING)
    assert relative(kernels.apply_epilogue(sums, **parts, scaling=SCALING, dtype=torch.float32), expected) < 1e-6


def test_epilogue_takes_a_transposed_factor_and_one_scale():
    parts = parts_of_epilogue(66, 130, 20, torch.float32)
    parts |= {"b_NR": torch.randn(20, 130).t(), "w_scale": torch.full((1, 1), 0.3)}
    sums = torch.randn(66, 130)
    expected = epilogue_in_float64(sums, **parts, scaling=SCALING)
    assert relative(kernels.apply_epilogue(sums, **parts, scaling=SCALING, dtype=torch.float32), expected) < 1e-6


def test_nothing_is_written_beside_the_result():
    rows, columns = 70, 145
    memory = torch.full((rows * columns + 2 * 16384,), 7.0)  # more than a tile beyond the last row
    sums = memory[16384:-16384].view(rows, columns)
    sums.normal_()
    kernels.apply_epilogue(sums, **parts_of_epilogue(rows, columns, 4, torch.float32), scaling=1.0, dtype=torch.float32)
    assert (memory[:16384] == 7).all() and (memory[-16384:] == 7).all() and not (sums == 7).any()


# -- a layer and its adapter -------------------------------------------------------------------------------------------


def layer_of(compute: str, dtype: torch.dtype, scale: str = "row") -> FrozenLinear:
    linear = nn.Linear(IN, OUT)
    with torch.no_grad():
        linear.weight.mul_(torch.logspace(-1, 1, OUT)[:, None])  # rows of unlike size: a scale that is misplaced shows
    layer = FrozenLinear.from_linear(linear, dtype, form=Format("fp8", scale))
    layer.set_compute_(compute)
    layer.kernels = "triton"
    return layer


@pytest.mark.parametrize(
    ("compute", "scale", "adapted"),
    [("fp8", "row", True), ("fp8", "tensor", True), ("fp8", "row", False), ("fp8_forward", "row", True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_result_and_gradients_equal_a_float64_reference(compute, scale, adapted, dtype):
    layer = layer_of(compute, dtype, scale)
    layer.bias.requires_grad_()
    x = torch.randn(2, 3, IN).to(dtype).requires_grad_()
    grad_y = torch.randn(2, 3, OUT).mul(torch.logspace(1, -1, 3)[:, None]).to(dtype)
    a = torch.randn(RANK, IN).to(dtype).requires_grad_()
    b = torch.randn(OUT, RANK).to(dtype).requires_grad_()
    y = layer(x, (a, b, SCALING) if adapted else None)
    got = torch.autograd.grad(y, [x, layer.bias, *([a, b] if adapted else [])], grad_y)

    weight = precision.decode(layer.get_parts(), "fp8", torch.float32).double()
    flat_x, flat_grad = x.detach().double().view(-1, IN), grad_y.double().view(-1, OUT)
    a64, b64 = (SCALING * a.double(), b.double()) if adapted else (torch.zeros(1, IN), torch.zeros(OUT, 1))
    a64, b64 = a64.detach().double(), b64.detach().double()
    values, x_scale = kernels.quantize_rows(x.detach().view(-1, IN))
    expected = values.double() * x_scale.double() @ weight.T + layer.bias.double() + flat_x @ a64.T @ b64.T
    if compute == "fp8":
        values, grad_scale = kernels.quantize_rows(grad_y.view(-1, OUT), layer.scale)
        base = values.double() * grad_scale.double() @ (weight / layer.scale.double().view(-1, 1))
    else:
        base = flat_grad @ weight.to(dtype).double()
    wanted = [base + flat_grad @ b64 @ a64, flat_grad.sum(0)]
    if adapted:
        wanted += [SCALING * (flat_grad @ b64).T @ flat_x, flat_grad.T @ (flat_x @ a64.T)]
    allowed = 1e-2 if dtype is torch.bfloat16 else 1e-6
    assert relative(y.view(-1, OUT), expected) < allowed and y.shape == (2, 3, OUT)
    for one, other in zip(got, wanted, strict=True):
        assert relative(one.view(other.shape), other) < allowed and one.dtype == dtype


def test_only_a_layer_with_the_kernels_takes_a_lora():
    layer = layer_of("fp8", torch.float32)
    assert layer.takes_lora
    layer.compute = "upcast"
    with pytest.raises(ValueError, match="takes_lora"):
        layer(torch.randn(2, IN), (torch.randn(4, IN), torch.randn(OUT, 4), 1.0))
    assert relative(layer(torch.randn(2, IN)), torch.zeros(1)) > 0  # without one it decodes, as ever


def stack(
    compute: str = "fp8", dtype: torch.dtype = torch.float32, kind: str = "triton", dropout: float = 0.0
) -> nn.Sequential:
    """256 -> 128 -> 256 with a LoRA beside each layer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 256))
    section = settings.Quantize(compute=compute, kernels=kind, fp8_min_features=0)
    precision.quantize_(model, section, (), dtype)
    adapter = settings.Adapter(rank=4, alpha=6, dropout=dropout, dtype="fp32" if dtype == torch.float32 else "bf16")
    adapters.inject(model, adapter, ["0", "1"], seed=0)
    for name, parameter in adapters.list_trained_parameters(model):
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def answers(model: nn.Module, called=None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    x = torch.randn(2, 4, 256, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    model.zero_grad()
    y = (called or model)(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *[parameter.grad for _, parameter in adapters.list_trained_parameters(model)]]


@pytest.mark.parametrize("compute", ["fp8", "fp8_forward"])
def test_an_adapter_and_its_gradients_are_those_of_peft(compute, monkeypatch):
    model = stack(compute)
    assert adapters.count_fused(model) == 2
    fused = answers(model)
    monkeypatch.setattr(FUSED, "fuses", False)
    calls = []
    monkeypatch.setattr(lora.Linear, "forward", _counting(lora.Linear.forward, calls))
    apart = answers(model)
    assert len(calls) == 2
    # The same bits where nothing but the order of additions differs, until one of them is next to a rounding to e4m3.
    assert all(relative(one, other) < 1e-2 for one, other in zip(fused, apart, strict=True))
    assert relative(fused[0], apart[0]) < 1e-5


def _counting(function, calls):
    return lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs)


def test_adapters_that_cannot_be_fused_are_left_to_peft(monkeypatch):
    x = torch.randn(2, 256)
    plain = stack(dropout=0.5)
    assert adapters.count_fused(plain) == 0
    plain.train()
    assert not torch.equal(plain(x), plain(x))  # it drops
    assert adapters.count_fused(stack(kind="torch")) == 0
    model = stack()
    base = [layer.base_layer for layer in adapters.find_adapted_layers(model).values()]
    with adapters.disabled(model):
        alone = model(x)
    expected = x
    for layer in base:
        expected = layer(expected)
    assert torch.equal(alone, expected) and not torch.equal(alone, model(x))
    with precision.decoded_compute(model):
        assert adapters.count_fused(model) == 0
        decoded = model(x)
    assert torch.equal(decoded, stack(compute="upcast", kind="torch")(x))


def test_layers_that_share_an_input_quantize_it_once(monkeypatch):
    calls = []
    monkeypatch.setattr(kernels, "quantize_rows", _counting(kernels.quantize_rows, calls))
    layers = [layer_of("fp8", torch.float32) for _ in "qkv"]
    x = torch.randn(4, IN)
    outputs = [layer(x, (torch.randn(4, IN), torch.randn(OUT, 4), 1.0)) for layer in layers]
    assert len(calls) == 1 and not torch.equal(outputs[0], outputs[1])
    layers[0].kernels = "torch"
    layers[0](x)  # is not given what the kernel made
    assert matmul._last[2] == ("current", None)


def test_nothing_but_input_and_rank_is_kept_for_backward():
    model = stack()
    owned = {tensor.data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept = []

    def pack(tensor):
        if tensor.data_ptr() not in owned:
            kept.append(tuple(tensor.shape))
        return tensor

    x = torch.randn(8, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    assert sorted(kept) == sorted([(8, 256), (8, 4), (8, 128), (8, 4)])


def test_checkpointing_changes_no_bit():
    model = stack(dtype=torch.bfloat16)

    def checkpointed(x):
        for layer in model:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    plain = answers(model, dtype=torch.bfloat16)
    assert all(map(torch.equal, plain, answers(model, checkpointed, torch.bfloat16)))


@pytest.mark.parametrize("compute", ["fp8", "fp8_forward"])
def test_offloaded_bytes_are_fetched_and_change_no_bit(compute, as_if_on_a_gpu):
    plain = answers(stack(compute))
    model = stack(compute)
    precision.offload_(model, 1.0)
    stream._couriers.clear()  # of what looked at the weights so far
    assert all(map(torch.equal, plain, answers(model)))
    assert as_if_on_a_gpu[-1].early + as_if_on_a_gpu[-1].late == 4  # two layers, forward and backward


# -- compiled ----------------------------------------------------------------------------------------------------------


def test_compiled_it_is_one_graph_and_answers_as_torch_does():
    """Compiled, rows are quantized by torch's operations, which round as they should."""
    model = stack()
    owned = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept = []
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        got = answers(model, compiled)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert not [one for one in kept if one.untyped_storage().data_ptr() not in owned and one.numel() >= 256 * 128]
    expected = answers(stack(kind="torch"))
    assert all(relative(one, other) < 1e-2 for one, other in zip(got, expected, strict=True))
    assert relative(got[0], expected[0]) < 1e-5
