"""Where a denoiser is cut when several processes share its base (`memory.shard_base`), and what a process then holds.

Shapes and bytes only, so that the estimate counts what training will hold.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ..errors import Message, UserError

GATHERED = 3
"""Most blocks whose bytes exist at one time: in the backward pass the one that computes, the buffer from which it was
copied, and the buffer of the next one, which is gathered ahead."""


def find_shared_blocks(denoiser: nn.Module) -> list[nn.Module]:
    """Return the blocks that are gathered one at a time, inner ones before those that contain them.

    They are the blocks that diffusers names, as far as they are repeated. A module that comes once, like the layers
    that embed patches, may be read outside of its own forward pass.

    Raises:
        UserError: diffusers names no repeated blocks of this model.
    """
    kinds = {
        *(getattr(denoiser, "_repeated_blocks", None) or ()),
        *(getattr(denoiser, "_no_split_modules", None) or ()),
    }
    blocks = [
        module
        for name, module in denoiser.named_modules()
        if type(module).__name__ in kinds and any(part.isdigit() for part in name.split("."))
    ]
    if not blocks:
        raise UserError(
            Message(
                "memory.shard_base = true: {name} has no list of repeated blocks; use memory.shard_base = false",
                name=type(denoiser).__name__,
            )
        )
    return blocks[::-1]


@dataclass(frozen=True)
class SharedBytes:
    """Bytes of a frozen base that several processes share."""

    part: int
    """what each process holds all the time: its rows of the parameters, and the buffers"""
    gathered: int
    """what it holds beside that while the model runs: the layers outside the blocks, and `GATHERED` blocks"""


def count_shared_bytes(denoiser: nn.Module, world: int) -> SharedBytes:
    """Count what each of `world` processes holds of a denoiser's frozen tensors, on the meta device."""
    groups: dict[nn.Module, int] = {}
    counted: set[nn.Parameter] = set()
    part = sum(buffer.nbytes for buffer in denoiser.buffers() if not buffer.requires_grad)
    for module in (*find_shared_blocks(denoiser), denoiser):
        own = [parameter for parameter in module.parameters() if parameter not in counted]
        counted.update(own)
        frozen = [parameter for parameter in own if not parameter.requires_grad]
        groups[module] = sum(parameter.nbytes for parameter in frozen)
        part += sum(_count_part(parameter, world) for parameter in frozen)
    outside = groups.pop(denoiser)
    return SharedBytes(part, outside + sum(sorted(groups.values())[-GATHERED:]))


def _count_part(parameter: torch.Tensor, world: int) -> int:
    """Count the bytes of the first process's rows, which are never fewer than another's."""
    rows = -(-len(parameter) // world)
    return parameter.nbytes // len(parameter) * rows
