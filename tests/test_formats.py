"""Bytes that stand for weights: errors against float64, every code, extreme and non-finite values."""

import pytest
import torch
from torch import Tensor, nn

from lora_fp8 import precision, settings
from lora_fp8.precision import FP8_ROW, Format, Quantized, decode, encode, formats, round_trip

FP8 = settings.Quantize(storage="fp8")


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


# -- the other formats -------------------------------------------------------------------------------------------------

FORMS = [
    Format(storage, scale)
    for storage, scale in [
        *(("fp8", scale) for scale in ("row", "tensor", "1x64", "1x128", "128x128", "none")),
        *(("int8", scale) for scale in ("1x128", "1x64", "row")),
        ("nf4", "64"),
    ]
]
# Relative rms error in percent: (bell-shaped weights, spread 0.02; the same with 0.1 % of them 30 times as large), as
# an interval, because an error below what a format can have would mean that nothing was rounded.
ERRORS = {
    "fp8 row": ((2.4, 2.7), (1.8, 2.2)),
    "fp8 tensor": ((2.5, 2.7), (2.5, 2.7)),
    "fp8 1x64": ((2.2, 2.5), (1.5, 1.9)),
    "fp8 1x128": ((2.3, 2.6), (1.6, 2.0)),
    "fp8 128x128": ((2.5, 2.7), (2.0, 2.6)),
    "fp8 none": ((3.0, 3.5), (2.6, 3.3)),
    "int8 1x128": ((0.55, 0.70), (1.3, 2.2)),
    "int8 1x64": ((0.50, 0.65), (1.0, 1.7)),
    "int8 row": ((0.75, 0.95), (5.5, 8.0)),
    "nf4": ((8.9, 9.5), (11.0, 14.0)),
}


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_errors_of_the_formats(form):
    weight = torch.randn(1536, 3072) * 0.02
    outliers = torch.where(torch.rand(weight.shape) < 0.001, weight * 30, weight)
    for each, (low, high) in zip((weight, outliers), ERRORS[str(form)], strict=True):
        assert low <= 100 * relative(round_trip(each, form, torch.float32), each) <= high


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_pieces_that_can_be_encoded_apart_have_the_bytes_of_the_whole(form):
    """Processes that share a base do it."""
    weight = torch.randn(6 * 128, 256, dtype=torch.bfloat16) * torch.rand(6 * 128, 1)
    whole = encode(weight, form)
    apart = {rows for rows in (100, 128, 256, 384) if form.can_encode_apart((768, 256), rows, (1, 1))}
    of_blocks = {128, 256, 384} if form.scale == "128x128" else {100, 128, 256, 384}
    assert apart == (set() if form.storage == "nf4" or form.scale in ("tensor", "none") else of_blocks)
    for rows in apart:
        pieces = [encode(piece, form) for piece in weight.split(rows)]
        assert all(
            torch.equal(torch.cat(parts), one) for parts, one in zip(zip(*pieces, strict=True), whole, strict=True)
        )


@pytest.mark.parametrize(
    ("scale", "file_scale", "apart"),
    [
        ("row", (1, 1), True),
        ("row", (768, 1), True),
        ("1x128", (768, 1), True),
        ("1x64", (768, 4), True),
        ("1x64", (6, 2), True),
        ("row", (768, 4), False),  # the file's bytes can be kept if its scales are equal along every row
        ("1x128", (768, 4), False),
        ("128x128", (1, 1), True),
        ("128x128", (768, 1), False),
    ],
)
def test_rows_of_a_quantized_file_are_encoded_apart_where_only_shapes_decide(scale, file_scale, apart):
    """Whether the bytes of the file are kept is the same for each piece as for the whole."""
    form = Format("fp8", scale)
    assert form.can_encode_apart((768, 256), 384, file_scale) == apart
    codes = torch.randn(768, 256).to(torch.float8_e4m3fn)
    scales = torch.ones(file_scale) if not apart else torch.rand(file_scale) + 0.5
    whole = Quantized(codes, scales)
    per_row = scales if len(scales) == 1 else scales.repeat_interleave(768 // len(scales), dim=0)
    parts = [
        Quantized(codes[rows], per_row if len(per_row) == 1 else per_row[rows]).make_parts(form)
        for rows in (slice(384), slice(384, None))
    ]
    held = whole.make_parts(form)
    assert held is not None and None not in parts
    assert all(torch.equal(torch.cat(pair), one) for pair, one in zip(zip(*parts, strict=True), held, strict=True))


@pytest.mark.parametrize(("std", "error"), [(0.02, 0.033), (0.005, 0.113), (0.001, 0.56)])
def test_the_unscaled_cast_is_what_kohyas_fp8_base_does(std, error):
    weight = torch.randn(256, 256) * std
    weight[0, 0] = 1e4  # beyond e4m3: kept at its largest value, as torch's cast does since 2.12
    decoded = round_trip(weight, Format("fp8", "none"), torch.float32)
    assert decoded[0, 0] == 448
    assert torch.equal(decoded.flatten()[1:], weight.to(torch.float8_e4m3fn).to(torch.float32).flatten()[1:])
    lost = relative(decoded.flatten()[1:], weight.flatten()[1:])
    assert lost == pytest.approx(error, rel=0.03)  # docs/fp8.md
    assert relative(round_trip(weight[1:], FP8_ROW, torch.float32), weight[1:]) < 0.027


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_tensors_have_the_shapes_and_bytes_that_are_announced(form):
    weight = torch.randn(256, 384)
    parts = encode(weight, form)
    announced = form.describe_tensors((256, 384))
    assert [(tuple(part.shape), part.dtype) for part in parts] == list(announced.values())
    assert form.count_bytes((256, 384)) == sum(part.nbytes for part in parts)
    empty = encode(weight.to("meta"), form)
    assert [(p.shape, p.dtype) for p in empty] == [(p.shape, p.dtype) for p in parts]
    for dtype in (torch.float32, torch.bfloat16):
        decoded = decode(parts, form.storage, dtype)
        assert decoded.dtype == dtype and decoded.shape == weight.shape
        # Rounded once: bf16 of the float32 result, except in nf4, where bitsandbytes decides.
        if form.storage != "nf4":
            assert torch.equal(decoded, decode(parts, form.storage, torch.float32).to(dtype))


@pytest.mark.parametrize("form", [form for form in FORMS if form.storage == "int8"], ids=str)
def test_int8_is_the_nearest_step(form):
    weight = torch.randn(64, 256) * torch.logspace(-5, 3, 64)[:, None]
    qweight, scale = encode(weight, form)
    rows, columns = form.get_block((64, 256))
    blocks = weight.double().view(64 // rows, rows, 256 // columns, columns)
    amax = blocks.abs().amax(dim=(1, 3))
    assert torch.allclose(scale.double(), amax / 127, rtol=3e-7, atol=0)
    steps = (blocks / (amax / 127)[:, None, :, None]).view(64, 256)
    assert (qweight.view(torch.int8).double() - steps).abs().max() <= 0.5 + 1e-5


@pytest.mark.parametrize("form", [form for form in FORMS if "x" in form.scale], ids=str)
def test_a_block_does_not_touch_the_others(form):
    weight = torch.randn(256, 384) * 0.02
    plain = round_trip(weight, form, torch.float32)
    rows, columns = form.get_block((256, 384))
    weight[rows : 2 * rows, columns : 2 * columns] *= 1000
    decoded = round_trip(weight, form, torch.float32)
    changed = decoded != plain
    assert changed[rows : 2 * rows, columns : 2 * columns].any()
    changed[rows : 2 * rows, columns : 2 * columns] = False
    assert not changed.any()


def test_nf4_refuses_weights_that_would_be_nan():
    with pytest.raises(ValueError, match="a.layer: the weight is too large for nf4"):
        encode(torch.full((64, 64), 3e38), Format("nf4", "64"), "a.layer")
    assert round_trip(torch.full((64, 64), 1e30), Format("nf4", "64"), torch.float32).isfinite().all()


def test_nf4_is_bitsandbytes_own():
    from bitsandbytes import functional

    weight = torch.randn(192, 256) * 0.02
    quantized, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=True, quant_type="nf4")
    theirs = functional.dequantize_4bit(quantized, state)
    assert torch.equal(round_trip(weight, Format("nf4", "64"), torch.float32), theirs)


@pytest.mark.parametrize("columns", [64, 96, 160, 320])
def test_nf4_is_nf4_where_a_block_crosses_rows(columns):
    from bitsandbytes.functional import get_4bit_type

    weight = torch.randn(64, columns) * 0.02 * torch.logspace(-1, 1, 64)[:, None]
    decoded = round_trip(weight, Format("nf4", "64"), torch.float32)
    levels = get_4bit_type("nf4", device="cpu").double()
    blocks = weight.double().view(-1, 64)
    amax = blocks.abs().amax(dim=1, keepdim=True)
    nearest = levels[((blocks / amax)[..., None] - levels).abs().argmin(dim=-1)] * amax
    assert relative(decoded.view(-1, 64), nearest) < 0.03  # what its 8-bit scales add
    assert 0.08 < relative(decoded, weight) < 0.12


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_extreme_values_in_every_format(form):
    weight = torch.randn(128, 256) * 0.02
    weight[3] = 0.0
    weight[5] *= 1e-39 if form.storage != "nf4" else 1e-3
    weight[7] *= 1e30 if form.storage != "nf4" else 1e3
    decoded = round_trip(weight, form, torch.float32)
    assert decoded.isfinite().all() and torch.equal(decoded[3], torch.zeros(256))
    for bad in (float("nan"), float("inf"), float("-inf")):
        weight[9, 1] = bad
        with pytest.raises(ValueError, match=r"^some\.layer: the weight has NaN or infinity"):
            encode(weight, form, "some.layer")


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        (Format("fp8", "1x64"), (8, 96)),
        (Format("int8", "1x128"), (8, 64)),
        (Format("fp8", "128x128"), (64, 128)),
        (Format("nf4", "64"), (3, 21)),
    ],
    ids=str,
)
def test_a_shape_that_does_not_fit_is_refused(form, shape):
    assert form.find_problem(shape)
    with pytest.raises(ValueError, match=r"^layer: .*"):
        encode(torch.randn(shape), form, "layer")
    assert not form.find_problem((256, 256))


def test_every_scale_of_the_config_is_a_format():
    declared = {Format(storage, scale) for storage, scales in settings.SCALES.items() for scale in scales}
    assert declared == set(FORMS)
    assert all(settings.SCALES[form.storage] and form.describe_tensors((128, 128)) for form in FORMS)


@pytest.mark.parametrize(
    "form",
    [Format("fp8", scale) for scale in ("row", "tensor", "none", "1x64", "128x128")]
    + [Format("int8", scale) for scale in ("row", "1x128")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_in_pieces_is_decoding_by_the_definition(form, dtype, monkeypatch):
    qweight, scale = encode(torch.randn(384, 256), form)
    codes = torch.arange(256, dtype=torch.uint8)
    qweight[:2] = codes[torch.randperm(256)]  # every code there is
    qweight[-1] = codes
    values = qweight.view(torch.int8 if form.storage == "int8" else torch.float8_e4m3fn).float()
    rows, columns = form.get_block((384, 256))
    factors = scale.repeat_interleave(rows, dim=0).repeat_interleave(columns, dim=1)
    expected = (values * factors).to(dtype)
    finite = values.isfinite()  # e4m3's two NaNs are never written: encode refuses what is not finite
    for elements in (1, 1000, 200 * 256, 10**6):  # less than a row, several pieces with a rest, one
        monkeypatch.setattr(formats, "CHUNK_ELEMENTS", elements)
        assert torch.equal(decode((qweight, scale), form.storage, dtype)[finite], expected[finite])
