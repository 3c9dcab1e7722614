"""Frozen layers in few bytes: how they are held, how they are multiplied, and what is decided for each.

Reading order: `formats` (bytes and scales), `quantized` (those that a file brings), `matmul` (the arithmetic),
`kernels` (its Triton kernels), `stream` (bytes that wait in main memory), `linear` (the layer), `backends` (other
libraries' layers), `plan` (which layer gets what), `convert` (a whole denoiser), `choose` (which matmul is fastest
here), `report` (what it costs).

Order of use: build the denoiser on the meta device, `quantize_` it, `fill_` it from a stream of tensors, then
`adapters.inject`. A denoiser that already has its weights needs no `fill_`.
"""

from .backends import amax_history
from .choose import candidates, chosen, fastest, problem
from .convert import as_held, decoded_state_dict, decoded_tensors, fill_, quantize_, set_compute_
from .formats import FP8_ROW, Format, decode, encode, round_trip
from .linear import AmaxHistory, FrozenLinear, decoded_compute, frozen_layers, offload_
from .names import name_matches
from .plan import LayerPlan, Plan, decide
from .quantized import Quantized, Weight, parts_in, plain

__all__ = [
    "FP8_ROW",
    "AmaxHistory",
    "Format",
    "FrozenLinear",
    "LayerPlan",
    "Plan",
    "Quantized",
    "Weight",
    "amax_history",
    "as_held",
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
    "frozen_layers",
    "name_matches",
    "offload_",
    "parts_in",
    "plain",
    "problem",
    "quantize_",
    "round_trip",
    "set_compute_",
]
