"""Frozen convolutions: torch's own convolution and autograd on the dequantized weight are the judge."""

from typing import Any

import diffusers
import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from torch.nn import functional as F

from lora_fp8 import adapters, families, precision
from lora_fp8.precision.conv import FrozenConv2d
from lora_fp8.precision.formats import Format
from lora_fp8.settings import Adapter, Quantize

FORMS = [Format("fp8", "row"), Format("fp8", "tensor"), Format("int8", "1x64"), Format("int8", "row"),
         Format("nf4", "64")]  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2, "padding": 1},
    {"kernel_size": 1},
    {"kernel_size": (3, 5), "padding": (2, 1), "dilation": (2, 1), "bias": False},
]
KEEP = ("time_embedding", "time_emb_proj", "conv_in", "conv_out", "conv_norm_out")


def make_unet(seed: int = 0) -> UNet2DConditionModel:
    torch.manual_seed(seed)
    return UNet2DConditionModel(
        sample_size=16, block_out_channels=(64, 128), layers_per_block=1, norm_num_groups=16, cross_attention_dim=64,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        attention_head_dim=32,
    ).eval()  # fmt: skip


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    image, text = torch.randn(2, 4, 16, 16, generator=generator), torch.randn(2, 7, 64, generator=generator)
    return image.to(dtype), torch.tensor([100, 700]), text.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS, ids=["3x3", "stride", "1x1", "odd"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_output_and_gradients_are_those_of_torch(form: Format, kind: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 32, **kind)
    frozen = FrozenConv2d.from_conv(conv, dtype, form=form)
    assert frozen.weight.shape == conv.weight.shape
    plain = nn.Conv2d(64, 32, **kind).to(dtype)
    with torch.no_grad():
        plain.weight.copy_(precision.round_trip(conv.weight.detach().flatten(1), form, dtype).view_as(conv.weight))
        if plain.bias is not None and conv.bias is not None:
            plain.bias.copy_(conv.bias)
    plain.requires_grad_(False)
    own, theirs = (torch.randn(2, 64, 9, 11).to(dtype).requires_grad_() for _ in range(2))
    theirs.data.copy_(own.data)
    y, wanted = frozen(own), plain(theirs)
    assert torch.equal(y, wanted)
    grad = torch.randn_like(y)
    y.backward(grad)
    wanted.backward(grad)
    assert own.grad is not None and torch.equal(own.grad, theirs.grad)


def test_nothing_is_kept_for_the_backward() -> None:
    layer = FrozenConv2d.from_conv(nn.Conv2d(64, 64, 3, padding=1), torch.float32)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda t: t):
        layer(torch.randn(1, 64, 8, 8, requires_grad=True))
    assert set(kept) == {layer.qweight.data_ptr(), layer.scale.data_ptr()}


def test_bias_gets_a_gradient_where_it_is_asked_for() -> None:
    layer = FrozenConv2d.from_conv(nn.Conv2d(64, 8, 3), torch.float32)
    layer.bias.requires_grad_(True)
    grad = torch.randn(2, 8, 4, 4)
    layer(torch.randn(2, 64, 6, 6)).backward(grad)
    assert torch.allclose(layer.bias.grad, grad.sum(dim=(0, 2, 3)))


def test_patches_are_what_the_filters_are_multiplied_by() -> None:
    """The precision report measures a convolution's error on rows, as a linear layer's."""
    conv = nn.Conv2d(64, 32, 3, stride=2, padding=1)
    layer = FrozenConv2d.from_conv(conv, torch.float32)
    x = torch.randn(2, 64, 9, 7)
    rows_MK = layer.make_input_rows(x)
    y = rows_MK @ layer.weight.flatten(1).T + layer.bias
    wanted = layer(x)
    assert torch.allclose(y, wanted.permute(0, 2, 3, 1).flatten(0, 2), atol=1e-4)


def test_what_cannot_be_frozen_stays() -> None:
    model = nn.Module()
    model.grouped = nn.Conv2d(64, 64, 3, groups=64)
    model.mirrored = nn.Conv2d(64, 64, 3, padding=1, padding_mode="reflect")
    model.same = nn.Conv2d(64, 64, 3, padding="same")
    model.plain = nn.Conv2d(64, 64, 3)
    plan = precision.quantize_(model, Quantize(), (), torch.bfloat16)
    assert [layer.name for layer in plan.quantized] == ["plain"]
    assert {type(layer) for layer in (model.grouped, model.mirrored, model.same)} == {nn.Conv2d}
    assert isinstance(model.plain, FrozenConv2d)


def test_settings_decide_the_storage() -> None:
    def storages(**section: Any) -> dict[str, str]:
        plan = precision.decide(make_unet(), Quantize(**section), KEEP, torch.bfloat16)
        return {layer.name: str(layer.form) for layer in plan.layers if layer.kind == "convolution"}

    inner = "down_blocks.0.resnets.0.conv1"
    whole = storages()
    assert whole[inner] == "int8 1x64" and whole["conv_in"] == whole["conv_out"] == "None"
    assert storages(convolutions="fp8")[inner] == "fp8 row"
    assert storages(convolutions="fp8", scale="none")[inner] == "fp8 none"  # a cast, as kohya's fp8_base
    assert storages(convolutions="nf4")[inner] == "nf4"
    assert set(storages(convolutions="bf16").values()) == {"None"} == set(storages(storage="none").values())
    assert storages(keep=["resnets"])[inner] == "None"
    assert storages(override={"resnets": "fp8 tensor"})[inner] == "fp8 tensor"
    fp8 = precision.decide(make_unet(), Quantize(compute="fp8", fp8_min_features=0), KEEP, torch.bfloat16)
    assert {layer.compute for layer in fp8.quantized if layer.kind == "convolution"} == {"upcast"}
    assert "fp8" in {layer.compute for layer in fp8.quantized}


@pytest.mark.parametrize("name", ["sd15", "sd2", "sdxl", "kolors", "sana"])
def test_a_released_base_takes_half_of_its_bf16_bytes(name: str) -> None:
    family = families.get(name)
    with torch.device("meta"):
        denoiser = getattr(diffusers, family.denoiser_class).from_config(dict(family.reference_config))
    plan = precision.decide(denoiser, Quantize(), family.keep_precise, torch.bfloat16, family.modulation)
    assert plan.num_bytes <= 0.55 * plan.plain_num_bytes
    convolutions = [layer for layer in plan.layers if layer.kind == "convolution"]
    assert all(layer.num_bytes <= 0.55 * 2 * layer.shape[0] * layer.shape[1] for layer in convolutions if layer.scale)


def prediction_and_gradients(dtype: torch.dtype, section: Quantize) -> tuple[Tensor, Tensor]:
    """The answer of a small UNet, and the gradients of adapters on all its linear layers and convolutions."""
    unet = make_unet()
    precision.quantize_(unet, section, KEEP, dtype)
    kind = {torch.float64: "fp32", torch.float32: "fp32"}.get(dtype, "bf16")
    targets = ["to_q", "to_k", "to_v", "to_out.0", "conv1", "conv2"]
    adapters.inject(unet, Adapter(rank=4, alpha=4, dtype=kind), targets, seed=0)
    named = adapters.list_trained_parameters(unet)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in named:
        if dtype is torch.float64:
            parameter.data = parameter.data.double()
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    image, time, text = inputs(dtype)
    y = unet(image, time, text).sample
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(6)).to(y.dtype)
    (y * weights).sum().backward()
    return y.detach().double(), torch.cat([p.grad.double().flatten() for _, p in named if p.grad is not None])


def test_unet_output_and_adapter_gradients_against_float64(capsys: pytest.CaptureFixture[str]) -> None:
    """Convolutions in int8 add less than the linear layers in FP8 make; in FP8 they would make most of the error."""
    exact, exact_grad = prediction_and_gradients(torch.float64, Quantize(storage="none"))

    def errors(**section: Any) -> tuple[float, float]:
        y, grad = prediction_and_gradients(torch.float32, Quantize(**section))
        return float((y - exact).norm() / exact.norm()), float((grad - exact_grad).norm() / exact_grad.norm())

    found = {kind: errors(convolutions=kind) for kind in ("bf16", "int8", "fp8", "nf4")}
    with capsys.disabled():
        print("\nprediction and gradient error:", {k: [f"{100 * v:.2f} %" for v in pair] for k, pair in found.items()})
    for linear, whole in zip(found["bf16"], found["int8"], strict=True):
        assert whole < 1.5 * linear + 0.005
    assert found["int8"][0] < found["fp8"][0] < found["nf4"][0] and found["int8"][1] < found["fp8"][1] < found["nf4"][1]
    assert found["fp8"][0] > 2 * found["int8"][0]


def test_filling_from_a_stream_equals_quantizing_in_place() -> None:
    whole, empty = make_unet(), make_unet()
    stream = list(whole.state_dict().items())
    precision.quantize_(whole, Quantize(), KEEP, torch.bfloat16)
    with torch.device("meta"):
        empty = make_unet()
    precision.quantize_(empty, Quantize(), KEEP, torch.bfloat16)
    precision.fill_(empty, stream, torch.bfloat16)
    own, theirs = empty.state_dict(), whole.state_dict()
    assert own.keys() == theirs.keys() and all(torch.equal(own[key], theirs[key]) for key in own)
    decoded = dict(precision.dequantize_tensors(empty))
    assert {name: tuple(tensor.shape) for name, tensor in decoded.items()} == {n: tuple(t.shape) for n, t in stream}
    plain = make_unet().to(torch.bfloat16)
    plain.load_state_dict(decoded)
    with torch.no_grad():
        answer, wanted = (model(*inputs(torch.bfloat16)).sample for model in (empty, plain))
    assert torch.equal(answer, wanted)


def test_what_verify_reads_is_what_training_held() -> None:
    unet = make_unet()
    weights = {name: tensor.clone() for name, tensor in unet.state_dict().items()}
    section = Quantize()
    plan = precision.quantize_(unet, section, KEEP, torch.bfloat16)
    decoded = dict(precision.dequantize_tensors(unet))
    for layer in plan.quantized:
        name = f"{layer.name}.weight"
        assert torch.equal(precision.as_held(weights[name], layer, section, torch.bfloat16), decoded[name])


def test_offloaded_convolutions_compute_the_same() -> None:
    unet, other = make_unet(), make_unet()
    for model in (unet, other):
        precision.quantize_(model, Quantize(), KEEP, torch.float32)
    assert precision.offload_(other, 1.0) == sum(p.nbytes for p in unet.parameters() if p.dtype == torch.uint8)
    with torch.no_grad():
        answers = [model(*inputs(torch.float32)).sample for model in (unet, other)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("kind", ["lokr", "loha"])
def test_an_adapter_does_not_dequantize_the_weight_to_know_its_shape(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would in each pass, and an offloaded weight would be fetched once more."""
    model = nn.Sequential(FrozenConv2d.from_conv(nn.Conv2d(16, 32, 3, padding=1), torch.float32))
    adapters.inject(model, Adapter(rank=4, alpha=4, type=kind), ["0"], seed=0)
    monkeypatch.setattr(FrozenConv2d, "weight", property(lambda layer: pytest.fail("the weight was asked for")))
    assert model(torch.randn(1, 16, 8, 8)).shape == (1, 32, 8, 8)


def test_weights_that_are_not_finite_are_named() -> None:
    unet = make_unet()
    unet.down_blocks[0].resnets[0].conv1.weight.data[3, 1, 0, 2] = torch.nan
    with pytest.raises(ValueError, match=r"down_blocks\.0\.resnets\.0\.conv1.*NaN"):
        precision.quantize_(unet, Quantize(), KEEP, torch.bfloat16)


def test_compiled_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FrozenConv2d.from_conv(nn.Conv2d(64, 32, 3, padding=1), torch.float32)
    x, other = (torch.randn(1, 64, 8, 8, requires_grad=True) for _ in range(2))
    other.data.copy_(x.data)
    layer(x).square().sum().backward()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(other).square().sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_autocast_computes_in_its_dtype() -> None:
    layer = FrozenConv2d.from_conv(nn.Conv2d(64, 32, 3), torch.float32)
    x = torch.randn(1, 64, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    weight = precision.decode(layer.get_parts(), "fp8", torch.bfloat16).view(layer.weight_shape)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, F.conv2d(x.bfloat16(), weight, layer.bias.bfloat16()))
    with pytest.raises(RuntimeError, match="FrozenConv2d computes in torch.float32 but was given torch.bfloat16"):
        layer(x.bfloat16())
