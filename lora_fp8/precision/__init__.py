"""Quantized frozen layers: how they are stored, how they are multiplied, and what is decided for each layer.

Reading order: `formats` (storage formats and scales), `quantized` (weights that a file stores in FP8), `matmul` (the
arithmetic), `kernels` (its Triton kernels), `stream` (weights offloaded to RAM), `frozen` (a layer with such a weight),
`blocks` (offloaded weights of compiled blocks), `linear` and `conv` (the two kinds of layers), `backends` (other
libraries' layers), `plan` (which layer gets what), `convert` (a whole denoiser), `choose` (which matmul is fastest on
this machine), `report` (the errors that quantization causes), `cpu` (convolutions on CPUs without bf16).

Order of use: build the denoiser on the meta device, `quantize_` it, `fill_` it from a stream of tensors, then call
`adapters.inject`. A denoiser that already has its weights needs no `fill_`.
"""

from . import cpu
from .backends import make_amax_history
from .blocks import BlockStream, find_blocks
from .choose import OUT_OF_MEMORY, find_compiler_problem, find_problem, list_candidates, split_mode, time_modes
from .conv import FrozenConv2d
from .convert import as_held, dequantize_tensors, fill_, quantize_, set_compute_
from .formats import FP8_ROW, Format, decode, encode, round_trip
from .frozen import FrozenLayer, decoded_compute, find_frozen_layers, gather_whole, offload_, strip_base_layer
from .linear import AmaxHistory, FrozenLinear
from .names import name_matches
from .plan import LayerPlan, Plan, decide
from .quantized import Quantized, Rows, Weight, make_parts, to_plain

__all__ = [
    "FP8_ROW",
    "AmaxHistory",
    "BlockStream",
    "Format",
    "FrozenConv2d",
    "FrozenLayer",
    "FrozenLinear",
    "LayerPlan",
    "Plan",
    "Quantized",
    "Rows",
    "Weight",
    "make_amax_history",
    "as_held",
    "OUT_OF_MEMORY",
    "list_candidates",
    "split_mode",
    "strip_base_layer",
    "decide",
    "decode",
    "decoded_compute",
    "dequantize_tensors",
    "encode",
    "time_modes",
    "fill_",
    "find_blocks",
    "find_frozen_layers",
    "name_matches",
    "offload_",
    "make_parts",
    "to_plain",
    "find_compiler_problem",
    "find_problem",
    "quantize_",
    "round_trip",
    "set_compute_",
    "gather_whole",
]

cpu.install()
