"""Splits the frozen base among the processes of a job (`memory.shard_base`), so that together they hold it once.

torch's `fully_shard` (FSDP2) splits each parameter by rows. A block is gathered before its forward and its backward
pass, and freed after each. So a process holds its part of the base, the block that computes with the buffer of the next
one, which is gathered ahead, and the layers outside the blocks while the model runs. The gathered bytes are those that
a process without sharding holds, so the results are the same bits.

* The model is split before it has weights. They are read and quantized one at a time, and a process reads only the rows
  that it keeps (`PartKeeper`). So it never holds more than its part and one weight while it loads.
* A weight is read whole if its rows cannot be quantized apart (`Format.can_encode_apart`: nf4, and one scale for all),
  or if they are not consecutive in the file.
* Adapters are added afterwards. `fully_shard` does not know them: they stay whole, and `exchange` averages their
  gradients.
* Scales and other buffers stay whole in each process; they are small.
* Processes that gather must make the same passes in the same order: see `Processes.lockstep`.
"""

import warnings

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ..precision import FrozenLayer
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
    # torch's caches keep the mesh until the process exits, and from torch 2.13 at the latest the mesh keeps the group.
    processes.when_left.append(getattr(mesh, "_pg_registry", {}).clear)
    for block in find_shared_blocks(denoiser):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    # True for the outermost module too: previews and validation make no backward pass that would free its layers.
    fully_shard(denoiser, mesh=mesh, reshard_after_forward=True)
    processes.lockstep = True


class PartKeeper:
    """Keeps this process's rows of each parameter of a denoiser that `shard_` has split.

    Args:
        denoiser: after `shard_`.
        processes: those among which it is split.
    """

    def __init__(self, denoiser: nn.Module, processes: Processes) -> None:
        self._processes = processes
        self._split: dict[tuple[nn.Module, str], DTensor] = {}
        self._places: dict[str, tuple[nn.Module, str]] = {}  # by the names that the parameters have in a file
        for path, module in denoiser.named_modules():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    self._split[module, name] = parameter
                    in_file = "weight" if isinstance(module, FrozenLayer) and name == "qweight" else name
                    self._places[f"{path}.{in_file}" if path else in_file] = module, name

    def choose_rows(self, name: str, shape: tuple[int, ...], file_scale: tuple[int, int]) -> slice | None:
        """Return the rows to read of a file's tensor, or None for all of them; see `ModelFamily.read_denoiser_rows`."""
        if name not in self._places:
            return None
        module, attribute = self._places[name]
        rows = _find_rows(shape[0], self._processes)
        if isinstance(module, FrozenLayer) and attribute == "qweight":
            most = -(-shape[0] // self._processes.world)
            fits = shape == tuple(module.weight_shape)  # otherwise `fill_` reports the whole tensor
            fits = fits and module.form.can_encode_apart(module.matrix_shape, most, file_scale)
        else:
            fits = shape == tuple(self._split[module, attribute].shape)
        return rows if fits and rows.start < rows.stop else None

    def __call__(self, module: nn.Module) -> None:
        """Replace the parameters of a module, which were set last, with this process's rows.

        Those with fewer rows than the whole parameter are its rows already.
        """
        for name, parameter in module._parameters.items():
            split = self._split.get((module, name))
            if parameter is None or split is None or isinstance(parameter, DTensor):
                continue
            part = parameter.detach()
            if part.shape == split.shape:
                part = part[_find_rows(len(part), self._processes)].clone()
            rows = DTensor.from_local(
                part,
                split.device_mesh,
                split.placements,
                run_check=False,
                shape=split.shape,
                stride=split.stride(),
            )
            module._parameters[name] = nn.Parameter(rows, requires_grad=False)

    def share_scales_(self) -> None:
        """Give every process the scales of all rows. Call it when all weights are set, in all processes together.

        Raises:
            Elsewhere: another process failed to load its part.
        """
        self._processes.wait()
        with self._processes.passing():
            for module, name in self._split:
                if name == "qweight" and isinstance(module, FrozenLayer) and module.form.storage != "nf4":
                    self._processes.reduce_max_(module.scale)  # zeros stand for the rows that were not read


def count_local_bytes(denoiser: nn.Module) -> tuple[int, int]:
    """Count the bytes of a denoiser's frozen parameters and buffers: in this process, and of the whole."""
    local = whole = 0
    for tensor in (*denoiser.parameters(), *denoiser.buffers()):
        if not tensor.requires_grad:
            whole += tensor.nbytes
            local += tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes
    return local, whole


def _find_rows(num_rows: int, processes: Processes) -> slice:
    """Return the rows of this process, as `fully_shard` splits them; the last processes may have none."""
    most = -(-num_rows // processes.world)
    return slice(min(processes.rank * most, num_rows), min((processes.rank + 1) * most, num_rows))
