"""Frozen layers in few bytes. `fp8` is the layer and its arithmetic, `convert` puts a whole denoiser into it.

Order of use: build the denoiser on the meta device, `quantize_` it (decides, per linear layer, what is held how),
`fill_` it from a stream of tensors, then `adapters.inject`. A denoiser that already has its weights needs no `fill_`.
"""

from .convert import LayerReport, QuantReport, decoded_state_dict, decoded_tensors, fill_, quantize_
from .fp8 import FrozenFp8Linear, decode, encode
from .names import name_matches

__all__ = [
    "FrozenFp8Linear",
    "LayerReport",
    "QuantReport",
    "decode",
    "decoded_state_dict",
    "decoded_tensors",
    "encode",
    "fill_",
    "name_matches",
    "quantize_",
]
