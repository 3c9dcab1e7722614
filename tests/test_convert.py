"""Whole diffusers models into their storage: what is held how, streamed filling, memory while filling."""

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

from lora_fp8 import adapters, precision, settings
from lora_fp8.errors import UserError
from lora_fp8.precision import FrozenLinear

FP8 = settings.Quantize(storage="fp8")


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


def test_report_and_what_is_kept():
    model = flux()
    linears = {name: m.weight.shape for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    section = settings.Quantize(storage="fp8", keep=["attn.to_out"])
    report = precision.quantize_(model, section, ("norm1", "^proj_out", "not_in_this_variant"), torch.bfloat16)
    assert {layer.name: torch.Size(layer.shape) for layer in report.layers} == linears
    kept = {layer.name: layer.reason for layer in report.kept}
    assert kept == {
        "proj_out": "'^proj_out' is kept in high precision for this architecture",
        "transformer_blocks.0.norm1.linear": "'norm1' is kept in high precision for this architecture",
        "transformer_blocks.0.attn.to_out.0": "'attn.to_out' in quantize.keep",
    }
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert isinstance(module, FrozenLinear) == (name not in kept), name
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.uint8, torch.bfloat16}
    assert report.num_bytes == sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert report.num_bytes < 0.62 * report.plain_num_bytes
    assert "fp8" in report.format_summary() and "1 x 'norm1'" in report.format_summary()


def test_meta_and_real_quantization_report_the_same():
    with torch.device("meta"):
        empty = flux()
    assert precision.quantize_(empty, FP8, ("norm",), torch.bfloat16) == precision.quantize_(
        flux(), FP8, ("norm",), torch.bfloat16
    )


def test_storage_none_swaps_nothing():
    model = flux()
    report = precision.quantize_(model, settings.Quantize(storage="none", keep=["to_q"]), (), torch.bfloat16)
    assert not report.quantized and report.num_bytes == report.plain_num_bytes
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_keep_that_matches_nothing():
    with pytest.raises(UserError, match=r"'to_qq' matches no layer.*did you mean 'to_q'"):
        precision.quantize_(flux(), settings.Quantize(storage="fp8", keep=["to_qq"]), (), torch.bfloat16)


def test_quantizing_after_adapters_is_refused():
    model = flux()
    adapters.inject(model, settings.Adapter(rank=2), ["to_q"], 0)
    with pytest.raises(ValueError, match="before adapters.inject"):
        precision.quantize_(model, FP8, (), torch.bfloat16)


def test_a_shared_layer_stays_shared_and_attention_stays_whole():
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"a": shared, "b": shared, "attn": nn.MultiheadAttention(16, 2)})
    report = precision.quantize_(model, FP8, (), torch.float32)
    assert model["a"] is model["b"] and isinstance(model["a"], FrozenLinear)
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
    plain.load_state_dict(dict(precision.dequantize_tensors(model)))  # strict
    with torch.no_grad():
        got, exact, unquantized = model(**inputs)[0], plain(**inputs)[0], source(**inputs)[0]
    assert torch.equal(got, exact)
    assert 0 < relative(got, unquantized) < 0.1


def test_decoded_state_dict_with_adapters():
    model = flux()
    names = list(model.state_dict())
    precision.quantize_(model, FP8, (), torch.bfloat16)
    before = dict(precision.dequantize_tensors(model))
    adapters.inject(model, settings.Adapter(rank=2), ["to_q", "proj_mlp"], 0)
    after = dict(precision.dequantize_tensors(model))
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
    with pytest.raises(UserError) as error:
        precision.fill_(empty, stream, torch.bfloat16)
    text = str(error.value)
    assert f"{len(removed)} missing: " in text and f"and {len(removed) - 8} more" in text
    assert text.count(".attn.") == 8
    assert "1 do not belong to this model: extra.weight" in text
    assert "1 occur twice: proj_out.bias" in text
    assert "x_embedder.weight is [3, 3], expected [32, 16]" in text


def test_filling_refuses_non_finite_weights_by_name():
    tensors = flux().state_dict()
    tensors["transformer_blocks.0.attn.to_q.weight"][0, 0] = float("inf")
    with torch.device("meta"):
        empty = flux()
    precision.quantize_(empty, FP8, (), torch.bfloat16)
    with pytest.raises(UserError, match=r"broken: transformer_blocks\.0\.attn\.to_q: "):
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
    with pytest.raises(UserError, match=rf"{lost}.*init_empty_weights"):
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
