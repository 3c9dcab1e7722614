"""How few bytes stand for a frozen weight: FP8 and INT8 with scales, and bitsandbytes' NF4.

| storage | a weight is | scale, float32 | rms error on bell-shaped weights |
|---|---|---|---|
| fp8 | e4m3, 3 bits of mantissa | per tensor, row, 1x64, 1x128 or 128x128 | 2.65 % (1x64: 2.5 %) |
| fp8 none | e4m3 without a scale, what kohya's `fp8_base` does | none | 3.3 % at a spread of 0.02, 56 % at 0.001 |
| int8 | a whole number, -127 to 127 | per row, 1x64 or 1x128 | 0.85 % (row), 0.65 % (1x128) |
| nf4 | one of 16 quantiles, QLoRA (Dettmers et al. 2023) | per 64 weights, itself in 8 bits | 9.2 % |

For fp8 a finer scale buys robustness against outliers and no precision: the error is that of the mantissa. For int8 it
buys precision, since the steps are of equal size.

Bytes are uint8 whatever they mean: a float8 tensor is turned to bf16, without its scale, by `module.to(bf16)` and by
`load_state_dict`, and gloo cannot send it.

Shapes: N output features (rows), K input features (columns); a block of r x c weights shares one scale.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_MAX = 448.0
INT8_MAX = 127.0
NF4_BLOCK = 64
NF4_NESTED_BLOCK = 256
# Below float32's smallest normal number a scale would itself be denormal, which GPUs may flush to zero. A zero row gets
# this too.
MIN_SCALE = 2.0**-126
# Weights are encoded in pieces of about this many elements, so that the float32 working copy stays small beside them.
CHUNK_ELEMENTS = 1 << 18

_BLOCKS = {"row": (1, 0), "tensor": (0, 0), "none": (0, 0), "1x64": (1, 64), "1x128": (1, 128), "128x128": (128, 128)}
_BLOCKS |= {"1x32": (1, 32)}  # MXFP8, which only TransformerEngine holds
_LIMITS = {"fp8": E4M3_MAX, "int8": INT8_MAX}


@dataclass(frozen=True)
class Format:
    """A storage and what shares a scale in it."""

    storage: str
    scale: str

    def __str__(self) -> str:
        return "nf4" if self.storage == "nf4" else f"{self.storage} {self.scale}"

    def block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that share one scale in a weight of this shape (N, K)."""
        rows, columns = _BLOCKS[self.scale]
        return rows or shape[0], columns or shape[1]

    def problem(self, shape: tuple[int, int]) -> str:
        """Why a weight of this shape (N, K) cannot be held so, or "" where it can."""
        if self.storage == "nf4":
            odd = shape[0] * shape[1] % NF4_BLOCK or shape[1] % 2
            return f"nf4 needs a multiple of {NF4_BLOCK} weights, {shape[0]} x {shape[1]} is none" if odd else ""
        rows, columns = self.block(shape)
        if shape[0] % rows or shape[1] % columns:
            return f"scale {self.scale} does not divide {shape[0]} x {shape[1]}"
        return ""

    def tensors(self, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of each tensor that a weight of this shape (N, K) is held in, the bytes first."""
        if self.storage == "nf4":
            blocks = shape[0] * shape[1] // NF4_BLOCK
            return {
                "qweight": ((shape[0], shape[1] // 2), torch.uint8),
                "scale": ((blocks,), torch.uint8),
                "nested_scale": ((-(-blocks // NF4_NESTED_BLOCK),), torch.float32),
                "offset": ((), torch.float32),
            }
        rows, columns = self.block(shape)
        return {
            "qweight": (shape, torch.uint8),
            "scale": ((shape[0] // rows, shape[1] // columns), torch.float32),
        }

    def num_bytes(self, shape: tuple[int, int]) -> int:
        """What a weight of this shape (N, K) takes, scales included."""
        sizes = self.tensors(shape).values()
        return sum(torch.Size(size).numel() * dtype.itemsize for size, dtype in sizes)


FP8_ROW = Format("fp8", "row")


def encode(weight_NK: Tensor, form: Format = FP8_ROW, name: str = "weight") -> tuple[Tensor, ...]:
    """The tensors of `form.tensors` for this weight, computed in float32 and rounded to nearest.

    Args:
        weight_NK: any floating dtype, on the device where the result shall be (meta: shapes only).
        name: the layer, for the errors.

    Raises:
        ValueError: the weight holds NaN or infinity. Checked here because torch's cast to e4m3 turns infinities into
        448. Or the form cannot hold this shape.
    """
    shape = (weight_NK.shape[0], weight_NK.shape[1])
    if problem := form.problem(shape):
        raise ValueError(f"{name}: {problem}")
    if weight_NK.device.type == "meta":
        return tuple(torch.empty(size, dtype=kind, device="meta") for size, kind in form.tensors(shape).values())
    if form.storage == "nf4":
        return _encode_nf4(weight_NK, name)
    return _encode_scaled(weight_NK, form, name)


def decode(parts: tuple[Tensor, ...], storage: str, dtype: torch.dtype) -> Tensor:
    """The weight (N, K) that the tensors of `encode` stand for, in `dtype`, rounded once from float32."""
    if storage == "nf4":
        return _decode_nf4(*parts, dtype)
    qweight_NK, scale = parts
    on_cpu = qweight_NK.device.type == "cpu"
    if on_cpu and not torch.compiler.is_compiling():
        return _decode_in_pieces(qweight_NK, scale, storage, dtype)
    if storage == "int8":
        values_NK = qweight_NK.view(torch.int8).to(torch.float32)
    elif on_cpu:
        values_NK, scale = _e4m3_on_cpu(qweight_NK), scale * 256.0
    else:
        values_NK = qweight_NK.view(torch.float8_e4m3fn).to(torch.float32)
    return apply_scale_(values_NK, scale).to(dtype)


def decode_rows(parts: tuple[Tensor, ...], storage: str, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The weight of `decode`, some rows at a time: (which rows, their weights in `dtype`), bit for bit the same."""
    qweight, scale = parts[:2]
    num_rows, num_columns = qweight.shape[0], qweight.shape[1] * (2 if storage == "nf4" else 1)
    # Rows that share a scale stay together; of nf4, where scales run on over the rows, those of a whole nested block.
    nested = NF4_BLOCK * NF4_NESTED_BLOCK
    together = nested // math.gcd(nested, num_columns) if storage == "nf4" else num_rows // scale.shape[0]
    chunk = CHUNK_ELEMENTS if qweight.device.type == "cpu" else 64 * CHUNK_ELEMENTS  # a GPU likes more at once
    step = max(1, chunk // num_columns)
    if together < num_rows or storage == "nf4":
        step = max(together, step - step % together)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        if storage == "nf4":
            first, last = (row * num_columns // NF4_BLOCK for row in (rows.start, rows.stop))
            inner = slice(first // NF4_NESTED_BLOCK, -(-last // NF4_NESTED_BLOCK))
            own = (scale[first:last], parts[2][inner], parts[3])
        else:
            own = (scale if scale.shape[0] == 1 else scale[rows.start // together : rows.stop // together],)
        yield rows, decode((qweight[rows], *own), storage, dtype)


def round_trip(weight_NK: Tensor, form: Format, dtype: torch.dtype, name: str = "weight") -> Tensor:
    """The weight as a layer held in `form` computes with it."""
    return decode(encode(weight_NK, form, name), form.storage, dtype)


def apply_scale_(values_NK: Tensor, scale: Tensor) -> Tensor:
    """Multiplies every block by its scale, in place; the block's size follows from the shapes."""
    num_rows, num_columns = values_NK.shape
    rows, columns = num_rows // scale.shape[0], num_columns // scale.shape[1]
    if columns == num_columns and rows in (1, num_rows):
        return values_NK.mul_(scale)
    blocks = values_NK.view(scale.shape[0], rows, scale.shape[1], columns)
    return blocks.mul_(scale[:, None, :, None]).view(num_rows, num_columns)


# -- scaled bytes ------------------------------------------------------------------------------------------------------


def _encode_scaled(weight_NK: Tensor, form: Format, name: str) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = shape = (weight_NK.shape[0], weight_NK.shape[1])
    rows, columns = form.block(shape)
    limit = _LIMITS[form.storage]
    whole = rows == num_rows and columns == num_columns  # one scale, which is known only when all was seen
    step = max(1, CHUNK_ELEMENTS // max(1, num_columns)) if whole else max(rows, CHUNK_ELEMENTS // num_columns)
    step -= 0 if whole else step % rows
    pieces = [slice(start, start + step) for start in range(0, num_rows, step)]

    if whole:
        amax = torch.stack([weight_NK[piece].abs().amax() for piece in pieces]).amax().to(torch.float32).view(1, 1)
        _check_finite(amax, rows, name)
        scale = torch.ones_like(amax) if form.scale == "none" else (amax / limit).clamp_(min=MIN_SCALE)
    else:
        scale = weight_NK.new_empty(num_rows // rows, num_columns // columns, dtype=torch.float32)
    qweight_NK = torch.empty(shape, dtype=torch.uint8, device=weight_NK.device)
    for piece in pieces:
        blocks = weight_NK[piece].to(torch.float32, copy=True).view(-1, 1 if whole else rows, scale.shape[1], columns)
        own = scale if whole else scale[piece.start // rows : piece.stop // rows]
        if not whole:
            torch.div(blocks.abs().amax(dim=(1, 3)), limit, out=own)
            own.clamp_(min=MIN_SCALE)
        if form.storage == "int8":
            codes = blocks.div_(own[:, None, :, None]).round_().clamp_(-limit, limit).to(torch.int8)
        elif whole:
            codes = _to_e4m3(blocks, own)
        else:
            codes = _to_e4m3_best(blocks, own)
        qweight_NK[piece] = codes.view(torch.uint8).view(-1, num_columns)
    _check_finite(scale, rows, name)
    return qweight_NK, scale


def _to_e4m3(blocks: Tensor, scale: Tensor) -> Tensor:
    # amax / (amax / limit) may come out a hair above the limit, and older torch turns what is above 464 into NaN.
    return (blocks / scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _to_e4m3_best(blocks: Tensor, scale: Tensor) -> Tensor:
    """e4m3 under `scale` or a half octave above it, per block whichever has the smaller squared error; sets `scale`.

    A scale moves the steps of the grid over the weights. One that maps the largest weight to 448 puts that weight, and
    not the many, on a step: with 0.1 % of weights 30 times as large the error falls from 2.2 to 2.1 %.
    """
    other = scale * 2**0.5
    codes, shifted = _to_e4m3(blocks, scale), _to_e4m3(blocks, other)
    better = 2 * _squared_error(shifted, other, blocks) < _squared_error(codes, scale, blocks)
    scale.copy_(torch.where(better, other, scale))
    return torch.where(better[:, None, :, None], shifted.view(torch.uint8), codes.view(torch.uint8))


def _squared_error(codes: Tensor, scale: Tensor, blocks: Tensor) -> Tensor:
    """Per block, in units of its scale squared: in the weights' own units it could leave float32's range."""
    values = _e4m3_on_cpu(codes.view(torch.uint8)) * 256 if codes.device.type == "cpu" else codes.to(torch.float32)
    return (values - blocks / scale[:, None, :, None]).square_().sum(dim=(1, 3))


def _check_finite(scale: Tensor, rows: int, name: str) -> None:
    finite = torch.isfinite(scale).all(dim=1)
    if not finite.all():
        bad = (~finite).nonzero()[:, 0].tolist()
        where = "row" if rows == 1 else f"block of {rows} rows"
        raise ValueError(
            f"{name}: weight has NaN or infinity in {len(bad)} of {len(finite)} {where}s (first: {where} {bad[0]})"
        )


def _decode_in_pieces(qweight_NK: Tensor, scale: Tensor, storage: str, dtype: torch.dtype) -> Tensor:
    """As `decode`, a few rows at a time: what lies between bytes and result stays in the processor's cache. All at once
    it is new memory for each of four steps, which took 30 times as long for 3072 x 3072 (129 ms, so 4)."""
    num_rows, num_columns = qweight_NK.shape
    rows = num_rows // scale.shape[0]
    step = max(1, CHUNK_ELEMENTS // num_columns)
    step = step if scale.shape[0] == 1 else max(rows, step - step % rows)
    if storage != "int8":
        scale = scale * 256.0
    weight_NK = torch.empty(qweight_NK.shape, dtype=dtype)
    for start in range(0, num_rows, step):
        piece = slice(start, start + step)
        own = scale if scale.shape[0] == 1 else scale[start // rows : (start + step) // rows]
        codes = qweight_NK[piece]
        values = codes.view(torch.int8).to(torch.float32) if storage == "int8" else _e4m3_on_cpu(codes)
        weight_NK[piece] = apply_scale_(values, own)
    return weight_NK


def _e4m3_on_cpu(qweight_NK: Tensor) -> Tensor:
    """The e4m3 values times 1/256, in float32.

    torch's CPU cast from e4m3 takes one value at a time. e4m3 is fp16 with fewer bits: moved to fp16's place, the bits
    mean exactly 1/256 of the value (the exponent biases are 7 and 15), subnormals included.
    """
    bits = qweight_NK.view(torch.int8).to(torch.int16)  # the sign is repeated upwards: after the shift in 15 and 14
    half_NK = bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
    return half_NK.to(torch.float32)


# -- NF4 ---------------------------------------------------------------------------------------------------------------


def _encode_nf4(weight_NK: Tensor, name: str) -> tuple[Tensor, ...]:
    """bitsandbytes' own NF4 with double quantization: 4 bits a weight, and 8.1 bits for each 64 weights' scale."""
    from bitsandbytes import functional

    if not weight_NK.abs().amax().isfinite():
        raise ValueError(f"{name}: weight has NaN or infinity")
    quantized, state = functional.quantize_4bit(
        weight_NK.contiguous(), blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4"
    )
    packed = quantized.view(weight_NK.shape[0], weight_NK.shape[1] // 2)
    return packed, state.absmax, state.state2.absmax, state.offset.to(torch.float32)


def _decode_nf4(qweight: Tensor, scale: Tensor, nested_scale: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    import bitsandbytes  # noqa: F401  registers the operators
    from bitsandbytes.functional import create_dynamic_map

    operators = torch.ops.bitsandbytes
    code = _code(create_dynamic_map, scale.device)
    absmax = operators.dequantize_blockwise.default(scale, nested_scale, code, NF4_NESTED_BLOCK, torch.float32) + offset
    # As rows of one block each: given the weight's own shape, bitsandbytes (0.50.2) misplaces the scales on a CPU where
    # a row is no multiple of a block, an error of 25 % and not 9.
    shape = [absmax.numel(), NF4_BLOCK]
    blocks = operators.dequantize_4bit.default(qweight.view(-1, 1), absmax, NF4_BLOCK, "nf4", shape, dtype)
    return blocks.view(qweight.shape[0], 2 * qweight.shape[1])


_codes: dict[torch.device, Tensor] = {}


def _code(make, device: torch.device) -> Tensor:
    """The 256 values that a scale of NF4 can take, times its nested scale."""
    if device not in _codes:
        _codes[device] = make().to(device)
    return _codes[device]
