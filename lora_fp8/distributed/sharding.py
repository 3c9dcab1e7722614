"""Splits the frozen base among the processes of a job (`memory.shard_base`), so that together they hold it once.

torch's `fully_shard` (FSDP2) splits each parameter by rows. A block is gathered before its forward and its backward
pass, and freed after each. So a process holds its part of the base, the block that computes with the buffer of the next
one, which is gathered ahead, and the layers outside the blocks while the model runs. The gathered bytes are those that
a process without sharding holds, so the results are the same bits.

* The model is split before it has weights. They are read and quantized one at a time, and a process keeps its rows of
  each (`PartKeeper`). So it never holds more than its part and one weight while it loads.
* Adapters are added afterwards. `fully_shard` does not know them: they stay whole, and `exchange` averages their
  gradients.
* Scales and other buffers stay whole in each process; they are small.
* Processes that gather must make the same passes in the same order: see `Processes.lockstep`.
"""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ..training.shared_blocks import find_shared_blocks
from .processes import Processes


def shard_(denoiser: nn.Module, processes: Processes) -> None:
    """Split a denoiser on the meta device among the processes, in place; then fill it with a `PartKeeper`.

    Args:
        denoiser: with its frozen layers, without weights and adapters.
        processes: of the job; they are in lockstep from here on.
    """
    # It warns of views, which may lose their hooks if something writes into them: no denoiser of ours does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
    mesh = init_device_mesh(processes.device.type, (processes.world,))
    for block in find_shared_blocks(denoiser):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    # True for the outermost module too: previews and validation make no backward pass that would free its layers.
    fully_shard(denoiser, mesh=mesh, reshard_after_forward=True)
    processes.lockstep = True


class PartKeeper:
    """Keeps this process's rows of each parameter of a denoiser that `shard_` has split.

    Args:
        denoiser: after `shard_`.
    """

    def __init__(self, denoiser: nn.Module) -> None:
        self._split: dict[tuple[nn.Module, str], Any] = {
            (module, name): parameter
            for module in denoiser.modules()
            for name, parameter in module._parameters.items()
            if isinstance(parameter, DTensor)
        }

    def __call__(self, module: nn.Module) -> None:
        """Replace the whole parameters of a module, which were set last, with this process's rows."""
        for name, parameter in module._parameters.items():
            split = self._split.get((module, name))
            if parameter is None or split is None or isinstance(parameter, DTensor):
                continue
            part = _take_rows(parameter.detach(), split.device_mesh.get_local_rank(), split.device_mesh.size())
            rows = DTensor.from_local(
                part,
                split.device_mesh,
                split.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            module._parameters[name] = nn.Parameter(rows, requires_grad=False)


def count_local_bytes(denoiser: nn.Module) -> tuple[int, int]:
    """Count the bytes of a denoiser's frozen parameters and buffers: in this process, and of the whole."""
    local = whole = 0
    for tensor in (*denoiser.parameters(), *denoiser.buffers()):
        if not tensor.requires_grad:
            whole += tensor.nbytes
            local += tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes
    return local, whole


def _take_rows(whole: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """Return a copy of a process's rows, as `fully_shard` splits them; the last processes may have none."""
    rows = whole.chunk(world)
    return rows[rank].clone() if rank < len(rows) else whole.new_empty(0, *whole.shape[1:])
