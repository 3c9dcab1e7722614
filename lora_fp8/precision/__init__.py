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
from .backends import amax_history
from .blocks import BlockStream, find_blocks
from .choose import OUT_OF_MEMORY, candidates, chosen, fastest, missing_c_compiler, problem
from .conv import FrozenConv2d
from .convert import as_held, decoded_state_dict, decoded_tensors, fill_, quantize_, set_compute_
from .formats import FP8_ROW, Format, decode, encode, round_trip
from .frozen import FrozenLayer, decoded_compute, frozen_layers, offload_, whole
from .linear import AmaxHistory, FrozenLinear
from .names import name_matches
from .plan import LayerPlan, Plan, decide
from .quantized import Quantized, Weight, parts_in, plain

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
    "Weight",
    "amax_history",
    "as_held",
    "OUT_OF_MEMORY",
    "candidates",
    "chosen",
    "decide",
    "decode",
    "decoded_compute",
    "decoded_state_dict",
    "decoded_tensors",
    "encode",
    "fastest",
    "fill_",
    "find_blocks",
    "frozen_layers",
    "name_matches",
    "offload_",
    "parts_in",
    "plain",
    "missing_c_compiler",
    "problem",
    "quantize_",
    "round_trip",
    "set_compute_",
    "whole",
]

cpu.install()
