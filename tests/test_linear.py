"""The frozen layer: torch's own autograd as the judge, GEMMs counted, and what is kept for backward."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lora_fp8 import adapters, precision, settings
from lora_fp8.precision import FrozenLinear

FP8 = settings.Quantize(storage="fp8")


def test_a_layer_answers_as_its_linear_does():
    # Planted bug "the scale is forgotten" (in decode or in encode) turns this red: the answer is off by orders of
    # magnitude.
    linear = nn.Linear(96, 64)
    linear.weight.data.mul_(torch.logspace(-2, 1, 64)[:, None])
    x = torch.randn(5, 96)
    layer = FrozenLinear.from_linear(linear, torch.float32)
    expected, got = linear(x).detach(), layer(x)
    error = (got - expected).norm(dim=0) / expected.norm(dim=0)
    assert error.max() < 0.08  # each output feature has a scale of its own
    assert torch.equal(got, F.linear(x, layer.weight, layer.bias))


# -- gradients, GEMMs and what is kept for backward --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96,), (7, 96), (2, 5, 96)])
@pytest.mark.parametrize("bias", [True, False])
def test_gradient_equals_that_of_the_decoded_linear_to_the_bit(dtype, shape, bias):
    layer = FrozenLinear.from_linear(nn.Linear(96, 64, bias=bias), dtype)
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
    adapters.inject(model, settings.Adapter(rank=4, alpha=4), [str(index) for index in range(len(model))], seed=0)
    for name, parameter in adapters.list_trained_parameters(model):
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
    layer = FrozenLinear.from_linear(nn.Linear(96, 64), torch.float32)
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
        results[how] = [
            loss.detach(),
            here.grad,
            *[parameter.grad for _, parameter in adapters.list_trained_parameters(model)],
        ]
    for how in HOW[1:]:
        assert all(map(torch.equal, results["off"], results[how])), how


def test_autocast_and_wrong_input_dtype():
    layer = FrozenLinear.from_linear(nn.Linear(96, 64), torch.float32)
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
    model = nn.Sequential(FrozenLinear.from_linear(nn.Linear(96, 64), torch.float32))
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
    layer = FrozenLinear.from_linear(nn.Linear(96, 64), torch.bfloat16)
    assert isinstance(layer, nn.Linear)
    assert {name: p.requires_grad for name, p in layer.named_parameters()} == {"qweight": False, "bias": False}
    assert (layer.in_features, layer.out_features) == (96, 64)
    assert sum(tensor.nbytes for tensor in layer.state_dict().values()) == 96 * 64 + 4 * 64 + 2 * 64


def test_deepcopy_and_state_dict():
    layer = FrozenLinear.from_linear(nn.Linear(96, 64), torch.bfloat16)
    x = torch.randn(3, 96, dtype=torch.bfloat16)
    twin = copy.deepcopy(layer)
    other = FrozenLinear(96, 64, dtype=torch.bfloat16)
    other.load_state_dict(layer.state_dict())
    expected = layer(x)
    layer.qweight.data.zero_()
    assert torch.equal(twin(x), expected) and torch.equal(other(x), expected)
    with pytest.raises(ValueError, match="uint8"):
        other.load_state_dict(twin.state_dict() | {"qweight": twin.qweight.view(torch.float8_e4m3fn)})


def test_meta_construction_and_to_empty():
    layer = FrozenLinear(96, 64, device="meta", dtype=torch.bfloat16)
    assert layer.weight.device.type == "meta" and layer.weight.shape == (64, 96)
    assert layer(torch.empty(2, 96, device="meta", dtype=torch.bfloat16)).shape == (2, 64)
    layer.to(torch.float16).to_empty(device="cpu")
    assert layer.scale.dtype == torch.float32 and layer.scale.device.type == "cpu"
    assert layer.compute_dtype == torch.float16


def test_compiles_without_a_graph_break():
    layer = FrozenLinear.from_linear(nn.Linear(32, 16), torch.float32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 32, requires_grad=True)
    expected = torch.autograd.grad(layer(x).square().sum(), x)[0]
    assert torch.allclose(torch.autograd.grad(compiled(x).square().sum(), x)[0], expected)
