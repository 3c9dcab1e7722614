"""Bytes that stand for weights: errors against float64, every code, extreme and non-finite values."""

import pytest
import torch
from torch import Tensor, nn

from lora_fp8 import config, precision
from lora_fp8.precision import FP8_ROW, decode, encode, formats, round_trip

FP8 = config.Quantize(storage="fp8")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("std", [1.0, 0.02, 0.001, 1e-6])
def test_error_on_gaussian_weights(std):
    weight = torch.randn(512, 768) * std
    error = relative(round_trip(weight, FP8_ROW, torch.float32), weight)
    assert 0.020 < error <= 0.027  # a smaller error than e4m3 can have would mean that nothing was quantized


def test_outlier_row_does_not_touch_the_others():
    weight = torch.randn(64, 256) * 0.02
    plain = round_trip(weight, FP8_ROW, torch.float32)
    weight[7] *= 10_000
    weight[9, 3] = 50.0
    decoded = round_trip(weight, FP8_ROW, torch.float32)
    others = [row for row in range(64) if row not in (7, 9)]
    assert torch.equal(decoded[others], plain[others])
    assert relative(decoded[7], weight[7]) <= 0.035
    assert decoded[9, 3].item() == pytest.approx(50.0, rel=2**-4)


def test_every_value_is_the_nearest_that_e4m3_has():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    levels = codes[codes.isfinite()].unique()
    weight = torch.randn(32, 200) * torch.logspace(-6, 3, 32)[:, None]
    qweight, scale = encode(weight)
    # A scale maps the row's largest value to 448, or half an octave below where that is the better fit.
    steps = torch.log2(scale.double() / (weight.double().abs().amax(dim=1, keepdim=True) / 448))
    assert torch.minimum(steps.abs(), (steps - 0.5).abs()).max() < 3e-7
    assert (steps < 0.1).any() and (steps > 0.4).any()
    scaled = weight.double() / scale.double()
    nearest = (scaled[..., None] - levels).abs().amin(dim=-1)
    got = (scaled - decode((qweight, scale), "fp8", torch.float32).double() / scale.double()).abs()
    assert (got <= nearest + 1e-4 * scaled.abs().clamp(min=1e-3)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_equals_torchs_cast_for_every_code(dtype):
    codes = torch.tensor([code for code in range(256) if code not in (0x7F, 0xFF)], dtype=torch.uint8)
    qweight = codes.expand(5, -1).contiguous()
    scale = torch.tensor([1.0, 0.37, 2.0**-20, 1e-3, 7.7]).unsqueeze(1)
    reference = (qweight.view(torch.float8_e4m3fn).to(torch.float32) * scale).to(dtype)
    got = decode((qweight, scale), "fp8", dtype)
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
    decoded = decode((qweight, scale), "fp8", torch.float32)
    assert torch.isfinite(decoded).all() and (scale > 0).all() and (scale >= 2.0**-126).all()
    assert torch.equal(decoded[0], torch.zeros(128))
    for row in (2, 3, 5):
        assert relative(decoded[row], weight[row]) < 0.035
    # Half an e4m3 step: a sixteenth of the value, or half of the smallest step (under the larger of the two scales).
    assert ((decoded[1] - weight[1]).abs() <= torch.clamp(weight[1].abs() / 16, min=2.0**-135.5) + 2e-45).all()
    assert decode((qweight, scale), "fp8", torch.bfloat16).isfinite().all()


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
    monkeypatch.setattr(formats, "CHUNK_ELEMENTS", 5 * 64)
    assert all(map(torch.equal, encode(weight), whole))
