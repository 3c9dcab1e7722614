"""The few things that several training processes do together: sum a vector, wait for each other.

Started by `accelerate launch` (or alone). There is no DistributedDataParallel wrapper: only adapter gradients are
exchanged, once per step, as one flat float32 vector, so the frozen base is never broadcast, hooked or bucketed, and
gradient accumulation and checkpointing need no special mode.
"""

import torch
import torch.distributed
from accelerate import PartialState
from torch import Tensor


class Processes:
    """This process among the others.

    Attributes:
        rank, world: this one's number, counted from 0, and how many there are.
        device: the GPU that accelerate assigned, or the CPU.
    """

    def __init__(self) -> None:
        # accelerate forms a CPU process group only when told that CPU is meant.
        state = PartialState(cpu=not torch.cuda.is_available())
        self.rank, self.world = state.process_index, state.num_processes
        self.device = torch.device("cpu") if state.device.type == "cpu" else state.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_(self, vector: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.world > 1:
            torch.distributed.all_reduce(vector)
        return vector

    def max_(self, tensor: Tensor) -> Tensor:
        """The largest value of each element over all processes, in place."""
        if self.world > 1:
            torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
        return tensor

    def wait(self) -> None:
        """Until every process is here."""
        if self.world > 1:
            torch.distributed.barrier()

    def close(self) -> None:
        """Leave the group; without it the exit code of a finished run depends on who leaves first."""
        if self.world > 1:
            torch.distributed.destroy_process_group()
