"""The few things that several training processes do together: sum gradients, tell each other, end together.

Started by `accelerate launch` (or alone). There is no DistributedDataParallel wrapper: only adapter gradients are
exchanged, once per step, as one flat float32 vector (or in fewer bytes: exchange.py), so the frozen base is never
broadcast, hooked or bucketed, and gradient accumulation and checkpointing need no special mode.

A process that fails alone would leave the others waiting for it (on GPUs a collective cannot be interrupted), and the
launcher kills all others as soon as one has gone, the main one in the middle of a save too. So what ends one process
inside `together` is told to all before anybody leaves, and the main process tells the user.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from accelerate import PartialState
from torch import Tensor, nn

from .config import UserError
from .run import RunFailure, Stopped

T = TypeVar("T")

PATIENCE = timedelta(days=1)
"""How long a process waits for the others. The defaults of the libraries (10 minutes on GPUs, 30 on CPUs) are meant for
training steps; here the others also wait while one fills the cache. It is not what ends a job of which one process has
died: the launcher does that."""


class Elsewhere(RunFailure):
    """Another process of this job failed, or has gone."""


class Processes:
    """This process among the others.

    Attributes:
        rank, world: this one's number, counted from 0, and how many there are.
        device: the GPU that accelerate assigned, or the CPU.
        all_know: what ends the job has been told to every process.
        undisturbed: a context in which no signal raises; half an exchange would leave the others with the other half.
        sent: bytes of tensors that this process has passed to others so far, where each passes on as little as can be
            (a ring); what is said with `gather` and `wait` is not counted.
    """

    def __init__(self) -> None:
        # accelerate forms a CPU process group only when told that CPU is meant.
        state = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
        self.rank, self.world = state.process_index, state.num_processes
        self.device = torch.device("cpu") if state.device.type == "cpu" else state.device
        self.all_know = False
        self.sent = 0
        self.undisturbed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum_(self, vector: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.world > 1:
            with _others():
                torch.distributed.all_reduce(vector)
            self.sent += 2 * vector.nbytes * (self.world - 1) // self.world
        return vector

    def gather_(self, all_WN: Tensor, mine_N: Tensor) -> None:
        """Each process's tensor, by rank, into `all_WN` on every one of them."""
        with _others():
            torch.distributed.all_gather(list(all_WN), mine_N)
        self.sent += mine_N.nbytes * (self.world - 1)

    def swap_(self, received_WN: Tensor, parts_WN: Tensor) -> None:
        """Part r of `parts_WN` goes to process r; what each process has for this one, by rank, into `received_WN`."""
        with _others():
            torch.distributed.all_to_all_single(received_WN, parts_WN)
        self.sent += parts_WN.nbytes * (self.world - 1) // self.world

    def to_main(self, mine: Tensor) -> list[Tensor]:
        """Each process's tensor, by rank, in the memory of the main process; nothing on the others.

        One after the other, so that a GPU holds one more at a time.
        """
        with _others():
            if not self.is_main:
                torch.distributed.send(mine.contiguous(), 0)
                return []
            found, buffer = [mine.to("cpu", copy=True)], torch.empty_like(mine)
            for rank in range(1, self.world):
                torch.distributed.recv(buffer, rank)
                found.append(buffer.to("cpu", copy=True))
            return found

    def max_(self, tensor: Tensor) -> Tensor:
        """The largest value of each element over all processes, in place."""
        if self.world > 1:
            with _others():
                torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
        return tensor

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """This process's part of some work: every `world`-th of the items, from number `rank` on."""
        return items[self.rank :: self.world]

    def gather(self, mine: T) -> list[T]:
        """What each process says (something small), by rank, on every one of them.

        Raises:
            Elsewhere, Stopped: a process came here because it failed, or was told to stop.
        """
        return self._meet(mine, None)

    def wait(self) -> None:
        """Until every process is here; raises as `gather` does."""
        self._meet(None, None)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What all processes do, and end, together: whatever ends it on one is raised on each.

        Inside, a `gather` or `wait` is met by a failure elsewhere; what sends tensors is not.
        """
        try:
            yield
        except Exception as error:
            if not self.all_know and not isinstance(error, Elsewhere):
                # Who has a failure of its own raises that one, whatever the others say.
                with contextlib.suppress(Elsewhere, Stopped):
                    self._meet(None, error)
            raise
        self.wait()

    def leave(self) -> None:
        """Leave the group, all at the same time; what one process does afterwards, no other waits for.

        Without it the exit code of a finished run depends on who leaves first.
        """
        if self.world > 1 and torch.distributed.is_initialized():
            if self.all_know:  # and the main one has written it down, before the launcher sees anybody go
                with contextlib.suppress(Elsewhere):
                    self.wait()
            torch.distributed.destroy_process_group()

    def _meet(self, mine: T, problem: Exception | None) -> list[T]:
        said: list[Any] = [(mine, None)] * self.world
        if self.world > 1:
            ending = None if problem is None else (isinstance(problem, Stopped), _words(problem))
            with self.undisturbed(), _others():
                torch.distributed.all_gather_object(said, (mine, ending))
        elif problem is not None:
            self.all_know = True
        for rank, (_, ending) in enumerate(said):
            if ending is not None:
                self.all_know = True
                stopped, text = ending
                if rank != self.rank:
                    raise Stopped(text) if stopped else Elsewhere(f"process {rank} of {self.world}: {text}")
        return [what for what, _ in said]


class Gradients:
    """Float32 sums of the adapters' gradients, one flat vector with a view per parameter.

    bf16 gradients of single micro-batches are added up in float32: adding them in bf16 loses up to 4e-3 of them.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]]):
        self.parameters = named
        self.size = sum(parameter.numel() for _, parameter in named)
        # A few figures travel behind the gradients, so that a step needs one exchange only.
        self.flat = torch.zeros(self.size + 8, dtype=torch.float32, device=named[0][1].device)
        views = torch.split(self.flat[: self.size], [parameter.numel() for _, parameter in named])
        self.named = {name: view.view(parameter.shape) for (name, parameter), view in zip(named, views, strict=True)}

    def zero_(self) -> None:
        self.flat.zero_()

    def collect_(self) -> None:
        """Add what backward left in `.grad` and clear it."""
        for name, parameter in self.parameters:
            if parameter.grad is not None:
                self.named[name].add_(parameter.grad)  # float32 += bf16: exact conversion, float32 sum
                parameter.grad = None

    def scale_(self, factor: float) -> None:
        self.flat.mul_(factor)

    def sum_(self, processes: Processes, **figures: float) -> dict[str, float]:
        """Sum the gradients over all processes, in place, and these figures (at most 8) with them. -> their sums"""
        mine = torch.tensor([float(figure) for figure in figures.values()], dtype=torch.float32)
        self.flat[self.size : self.size + len(mine)] = mine
        processes.sum_(self.flat)
        return dict(zip(figures, self.flat[self.size :].tolist(), strict=False))


@contextlib.contextmanager
def _others() -> Iterator[None]:
    """What a collective says when another process has gone, in words."""
    try:
        yield
    except RuntimeError as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise Elsewhere(f"another process of this job has gone; its own words stand above ({why})") from error


def _words(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, UserError | RunFailure | Stopped) else f"{type(error).__name__}: {text}"
