"""Storage formats for frozen weights: FP8 and INT8 with scales, and bitsandbytes' NF4.

| storage | a weight is | scale, float32 | rms error on bell-shaped weights |
|---|---|---|---|
| fp8 | e4m3, 3 bits of mantissa | per tensor, row, 1x64, 1x128 or 128x128 | 2.65 % (1x64: 2.5 %) |
| fp8 none | e4m3 without a scale, as kohya's `fp8_base` | none | 3.3 % at a standard deviation of 0.02, 56 % at 0.001 |
| int8 | an integer, -127 to 127 | per row, 1x64 or 1x128 | 0.85 % (row), 0.65 % (1x128) |
| nf4 | one of 16 quantiles, QLoRA (Dettmers et al. 2023) | per 64 weights, itself in 8 bits | 9.2 % |

For fp8 a finer scale makes the format robust against outliers but not more precise: the error comes from the mantissa.
For int8 it makes the format more precise, because the steps are of equal size.

The bytes are uint8 in every format: `module.to(bf16)` and `load_state_dict` would convert a float8 tensor to bf16
without its scale, and gloo cannot send it.

Shapes: N output features (rows), K input features (columns); a block of r x c weights shares one scale.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import Message

E4M3_MAX = 448.0
INT8_MAX = 127.0
NF4_BLOCK = 64
NF4_NESTED_BLOCK = 256
# A scale below float32's smallest normal number would be denormal, and GPUs may flush it to zero. Rows of zeros get
# this scale too.
MIN_SCALE = 2.0**-126
# Weights are encoded in pieces of about this many elements, so that the float32 working copy stays small.
CHUNK_ELEMENTS = 1 << 18
# A GPU needs larger pieces: it spends about 10 microseconds on each operation, however small.
GPU_CHUNK_ELEMENTS = 1 << 22

_BLOCKS = {"row": (1, 0), "tensor": (0, 0), "none": (0, 0), "1x64": (1, 64), "1x128": (1, 128), "128x128": (128, 128)}
_BLOCKS |= {"1x32": (1, 32)}  # MXFP8, which only TransformerEngine stores
_LIMITS = {"fp8": E4M3_MAX, "int8": INT8_MAX}


@dataclass(frozen=True)
class Format:
    """A storage format: the storage, and the block of weights that shares a scale."""

    storage: str
    scale: str

    def __str__(self) -> str:
        return "nf4" if self.storage == "nf4" else f"{self.storage} {self.scale}"

    def get_block(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns that share one scale in a weight of this shape (N, K)."""
        rows, columns = _BLOCKS[self.scale]
        return rows or shape[0], columns or shape[1]

    def find_problem(self, shape: tuple[int, int]) -> str:
        """Return why a weight of this shape (N, K) cannot be stored in this format, or "" if it can."""
        if self.storage == "nf4":
            odd = shape[0] * shape[1] % NF4_BLOCK or shape[1] % 2
            return (
                Message(
                    "nf4 needs a multiple of {count} weights, but {rows} x {columns} is not",
                    count=NF4_BLOCK,
                    rows=shape[0],
                    columns=shape[1],
                )
                if odd
                else ""
            )
        rows, columns = self.get_block(shape)
        if shape[0] % rows or shape[1] % columns:
            return Message(
                "scale {scale} does not divide {rows} x {columns}", scale=self.scale, rows=shape[0], columns=shape[1]
            )
        return ""

    def can_encode_apart(self, shape: tuple[int, int], num_rows: int, file_scale: tuple[int, int]) -> bool:
        """Return True if pieces of `num_rows` rows have the bytes and scales that they have in the whole weight.

        So they have if the scales of a piece depend on no other row. One scale of the whole weight does, and nf4's
        offset. Whether a block of 128 rows, or a row, can take over several scales of a file depends on all of them.

        Args:
            shape: (N, K) of the whole weight.
            num_rows: rows of each piece; the last one may be shorter.
            file_scale: (rows, columns) of the scales that the file has for the weight; (1, 1) if it is not quantized.
        """
        if self.storage == "nf4" or self.find_problem(shape):
            return False
        rows, columns = self.get_block(shape)
        if file_scale != (1, 1) and (rows > 1 or (shape[1] // columns) % file_scale[1]):
            return False
        return num_rows % rows == 0

    def describe_tensors(self, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return {name: (shape, dtype)} of the tensors that store a weight of this shape (N, K), the bytes first."""
        if self.storage == "nf4":
            blocks = shape[0] * shape[1] // NF4_BLOCK
            return {
                "qweight": ((shape[0], shape[1] // 2), torch.uint8),
                "scale": ((blocks,), torch.uint8),
                "nested_scale": ((-(-blocks // NF4_NESTED_BLOCK),), torch.float32),
                "offset": ((), torch.float32),
            }
        rows, columns = self.get_block(shape)
        return {
            "qweight": (shape, torch.uint8),
            "scale": ((shape[0] // rows, shape[1] // columns), torch.float32),
        }

    def count_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes that a weight of this shape (N, K) takes, with its scales."""
        sizes = self.describe_tensors(shape).values()
        return sum(torch.Size(size).numel() * dtype.itemsize for size, dtype in sizes)


FP8_ROW = Format("fp8", "row")


def encode(weight_NK: Tensor, form: Format = FP8_ROW, name: str = "weight") -> tuple[Tensor, ...]:
    """Quantize a weight to the tensors of `form.describe_tensors`, computed in float32 and rounded to nearest.

    Args:
        weight_NK: any floating dtype; the result is on its device (meta: shapes only).
        form: storage format.
        name: name of the layer, for errors.

    Raises:
        ValueError: the weight holds NaN or infinity, or the format cannot store this shape. Finiteness is checked here
            because torch's cast to e4m3 turns infinities into 448.
    """
    shape = (weight_NK.shape[0], weight_NK.shape[1])
    if problem := form.find_problem(shape):
        raise ValueError(f"{name}: {problem}")
    if weight_NK.device.type == "meta":
        return tuple(
            torch.empty(size, dtype=kind, device="meta") for size, kind in form.describe_tensors(shape).values()
        )
    if form.storage == "nf4":
        return _encode_nf4(weight_NK, name)
    return _encode_scaled(weight_NK, form, name)


def decode(parts: tuple[Tensor, ...], storage: str, dtype: torch.dtype) -> Tensor:
    """Dequantize the tensors of `encode`. Returns the weight (N, K) in `dtype`, rounded once from float32."""
    if storage == "nf4":
        qweight, scale, nested_scale, offset = parts
        return _decode_nf4(qweight, scale, nested_scale, offset, dtype)
    qweight_NK, scale = parts
    on_cpu = qweight_NK.device.type == "cpu"
    if on_cpu and not torch.compiler.is_compiling():
        return _decode_in_pieces(qweight_NK, scale, storage, dtype)
    if on_cpu and storage == "fp8":
        return apply_scale_(_decode_e4m3_on_cpu(qweight_NK), scale * 256.0).to(dtype)
    codes_NK = qweight_NK.view(torch.int8 if storage == "int8" else torch.float8_e4m3fn)
    # Every code is exact in bf16 and fp16. The product with a float32 scale is computed in float32 and rounded on the
    # way out, without a float32 copy in memory.
    return apply_scale_(codes_NK.to(dtype), scale)


def decode_rows(parts: tuple[Tensor, ...], storage: str, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the weight of `decode` in pieces, equal bit for bit: (slice of rows, their weights in `dtype`)."""
    qweight, scale = parts[:2]
    num_rows, num_columns = qweight.shape[0], qweight.shape[1] * (2 if storage == "nf4" else 1)
    # Rows that share a scale stay together. In nf4, scales cross row ends, so a piece holds whole nested blocks.
    nested = NF4_BLOCK * NF4_NESTED_BLOCK
    together = nested // math.gcd(nested, num_columns) if storage == "nf4" else num_rows // scale.shape[0]
    step = max(1, _choose_chunk(qweight) // num_columns)
    if together < num_rows or storage == "nf4":
        step = max(together, step - step % together)
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        if storage == "nf4":
            first, last = (row * num_columns // NF4_BLOCK for row in (rows.start, rows.stop))
            inner = slice(first // NF4_NESTED_BLOCK, -(-last // NF4_NESTED_BLOCK))
            own: tuple[Tensor, ...] = (scale[first:last], parts[2][inner], parts[3])
        else:
            own = (scale if scale.shape[0] == 1 else scale[rows.start // together : rows.stop // together],)
        yield rows, decode((qweight[rows], *own), storage, dtype)


def _choose_chunk(weight: Tensor) -> int:
    """Return the number of elements of a piece of this weight."""
    return CHUNK_ELEMENTS if weight.device.type == "cpu" else GPU_CHUNK_ELEMENTS


def compute_scales(limit: float, amax: Tensor) -> Tensor:
    """Return the float32 scales that map these largest values to `limit`."""
    return (amax.to(torch.float32) / make_constant(limit, amax)).clamp_(min=MIN_SCALE)


def make_constant(value: float, like: Tensor) -> Tensor:
    """Return a float32 scalar on the device of `like`, the same one at every call.

    Dividing a CUDA tensor by a Python number multiplies it by the rounded reciprocal (torch 2.11), which differs from
    the CPU and from the Triton kernels in the last bit. Dividing by a tensor divides.
    """
    if torch.compiler.is_compiling() or type(like) is not Tensor:  # a fake tensor must not be kept
        return torch.full((), value, dtype=torch.float32, device=like.device)
    key = (value, like.device)
    if key not in _constants:
        _constants[key] = torch.full((), value, dtype=torch.float32, device=like.device)
    return _constants[key]


_constants: dict[tuple[float, torch.device], Tensor] = {}


def round_trip(weight_NK: Tensor, form: Format, dtype: torch.dtype) -> Tensor:
    """Quantize and dequantize a weight: what a layer with this format computes with."""
    return decode(encode(weight_NK, form), form.storage, dtype)


def apply_scale_(values_NK: Tensor, scale: Tensor) -> Tensor:
    """Multiply every block by its scale, in place; the block size follows from the shapes."""
    num_rows, num_columns = values_NK.shape
    rows, columns = num_rows // scale.shape[0], num_columns // scale.shape[1]
    if columns == num_columns and rows in (1, num_rows):
        return values_NK.mul_(scale)
    blocks = values_NK.view(scale.shape[0], rows, scale.shape[1], columns)
    return blocks.mul_(scale[:, None, :, None]).view(num_rows, num_columns)


# -- scaled bytes ------------------------------------------------------------------------------------------------------


def _encode_scaled(weight_NK: Tensor, form: Format, name: str) -> tuple[Tensor, Tensor]:
    num_rows, num_columns = shape = (weight_NK.shape[0], weight_NK.shape[1])
    rows, columns = form.get_block(shape)
    limit = _LIMITS[form.storage]
    whole = rows == num_rows and columns == num_columns  # a single scale, known only after all pieces were seen
    chunk = _choose_chunk(weight_NK)
    step = max(1, chunk // max(1, num_columns)) if whole else max(rows, chunk // num_columns)
    step -= 0 if whole else step % rows
    pieces = [slice(start, start + step) for start in range(0, num_rows, step)]

    if whole:
        amax = torch.stack([weight_NK[piece].abs().amax() for piece in pieces]).amax().to(torch.float32).view(1, 1)
        _check_finite(amax, rows, name)
        scale = torch.ones_like(amax) if form.scale == "none" else compute_scales(limit, amax)
    else:
        scale = weight_NK.new_empty(num_rows // rows, num_columns // columns, dtype=torch.float32)
    qweight_NK = torch.empty(shape, dtype=torch.uint8, device=weight_NK.device)
    for piece in pieces:
        blocks = weight_NK[piece].to(torch.float32, copy=True).view(-1, 1 if whole else rows, scale.shape[1], columns)
        own = scale if whole else scale[piece.start // rows : piece.stop // rows]
        if not whole:
            own.copy_(compute_scales(limit, blocks.abs().amax(dim=(1, 3))))
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
    # amax / (amax / limit) may exceed the limit by rounding, and older torch turns values above 464 into NaN.
    return (blocks / scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _to_e4m3_best(blocks: Tensor, scale: Tensor) -> Tensor:
    """Quantize to e4m3 with `scale`, or with a scale half an octave larger where that has the smaller squared error.

    The better scale of each block is written into `scale`. The scale shifts the e4m3 grid relative to the weights. A
    scale that maps the largest weight to 448 puts this one weight on a grid point, instead of most others: with 0.1 %
    of weights 30 times as large, choosing lowers the error from 2.2 to 2.1 %.
    """
    other = scale * 2**0.5
    codes, shifted = _to_e4m3(blocks, scale), _to_e4m3(blocks, other)
    better = 2 * _compute_squared_error(shifted, other, blocks) < _compute_squared_error(codes, scale, blocks)
    scale.copy_(torch.where(better, other, scale))
    return torch.where(better[:, None, :, None], shifted.view(torch.uint8), codes.view(torch.uint8))


def _compute_squared_error(codes: Tensor, scale: Tensor, blocks: Tensor) -> Tensor:
    """Return the squared error per block in units of its scale; in the weights' units float32 could overflow."""
    values = (
        _decode_e4m3_on_cpu(codes.view(torch.uint8)) * 256 if codes.device.type == "cpu" else codes.to(torch.float32)
    )
    return (values - blocks / scale[:, None, :, None]).square_().sum(dim=(1, 3))


def _check_finite(scale: Tensor, rows: int, name: str) -> None:
    finite = torch.isfinite(scale).all(dim=1)
    if not finite.all():
        bad = (~finite).nonzero()[:, 0].tolist()
        values = {"name": name, "count": len(bad), "total": len(finite), "first": bad[0], "rows": rows}
        if rows == 1:
            raise ValueError(
                Message(
                    "{name}: the weight has NaN or infinity in {count} of {total} rows (first: row {first})", **values
                )
            )
        raise ValueError(
            Message(
                "{name}: the weight has NaN or infinity in {count} of {total} blocks of {rows} rows (first: block "
                "{first})",
                **values,
            )
        )


def _decode_in_pieces(qweight_NK: Tensor, scale: Tensor, storage: str, dtype: torch.dtype) -> Tensor:
    """Dequantize as `decode` does, a few rows at a time, so that intermediate values stay in the CPU's cache.

    All at once, each of the four steps allocates new memory, which took 30 times as long for 3072 x 3072 (129 ms
    instead of 4).
    """
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
        values = codes.view(torch.int8).to(torch.float32) if storage == "int8" else _decode_e4m3_on_cpu(codes)
        weight_NK[piece] = apply_scale_(values, own)
    return weight_NK


def _decode_e4m3_on_cpu(qweight_NK: Tensor) -> Tensor:
    """Return the e4m3 values times 1/256, in float32.

    torch's CPU cast from e4m3 converts one value at a time. e4m3 is fp16 with fewer bits: shifted into fp16's place,
    the bits mean exactly 1/256 of the value (the exponent biases are 7 and 15), subnormals included.
    """
    bits = qweight_NK.view(torch.int8).to(torch.int16)  # sign-extended: after the shift, the sign is in bits 15 and 14
    half_NK = bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)
    return half_NK.to(torch.float32)


# -- NF4 ---------------------------------------------------------------------------------------------------------------


def load_bitsandbytes() -> None:
    """Import bitsandbytes without TorchInductor, which takes a seventh of all of training's import time.

    On import, bitsandbytes wraps operations that it has no kernels for in torch.compile. On CUDA, and on CPUs with its
    native library, this is a single case, NF4 with an odd number of columns, which then runs uncompiled.
    """
    compile_ = torch.compile
    torch.compile = lambda model=None, **_: model or (lambda function: function)  # type: ignore[assignment]  # a decorator
    try:
        with contextlib.suppress(ImportError):  # reported where bitsandbytes is needed
            import bitsandbytes  # noqa: F401
    finally:
        torch.compile = compile_


def make_nonfinite_error(name: str) -> ValueError:
    """Return the error for a weight that cannot be quantized."""
    return ValueError(Message("{name}: the weight has NaN or infinity", name=name))


def _encode_nf4(weight_NK: Tensor, name: str) -> tuple[Tensor, ...]:
    """Quantize with bitsandbytes' NF4 and double quantization: 4 bits a weight, and 8.1 bits per 64 weights' scale."""
    from bitsandbytes import functional

    if not weight_NK.abs().amax().isfinite():
        raise make_nonfinite_error(name)
    quantized, state = functional.quantize_4bit(
        weight_NK.contiguous(), blocksize=NF4_BLOCK, compress_statistics=True, quant_type="nf4"
    )
    # bitsandbytes sums the scales in float32. Near the end of its range their mean overflows, and all would be NaN.
    if not (state.offset.isfinite() and state.state2.absmax.isfinite().all()):
        largest = f"{float(weight_NK.abs().amax()):.1g}"
        raise ValueError(
            Message("{name}: the weight is too large for nf4 (up to {largest})", name=name, largest=largest)
        )
    packed = quantized.view(weight_NK.shape[0], weight_NK.shape[1] // 2)
    return packed, state.absmax, state.state2.absmax, state.offset.to(torch.float32)


def _decode_nf4(qweight: Tensor, scale: Tensor, nested_scale: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    import bitsandbytes  # noqa: F401  registers the operators
    from bitsandbytes.functional import create_dynamic_map

    operators = torch.ops.bitsandbytes
    code = _get_code(create_dynamic_map, scale.device)
    absmax = operators.dequantize_blockwise.default(scale, nested_scale, code, NF4_NESTED_BLOCK, torch.float32) + offset
    # Passed as rows of one block each: with the weight's own shape, bitsandbytes (0.50.2) misplaces the scales on a CPU
    # if a row is no multiple of a block, an error of 25 % instead of 9.
    shape = [absmax.numel(), NF4_BLOCK]
    blocks = operators.dequantize_4bit.default(qweight.view(-1, 1), absmax, NF4_BLOCK, "nf4", shape, dtype)
    return blocks.view(qweight.shape[0], 2 * qweight.shape[1])


_codes: dict[torch.device, Tensor] = {}


def _get_code(make: Callable[[], Tensor], device: torch.device) -> Tensor:
    """Return the 256 values that an NF4 scale can take, before it is multiplied by its nested scale."""
    if device not in _codes:
        _codes[device] = make().to(device)
    return _codes[device]
