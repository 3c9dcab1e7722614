"""What several training processes do together: sum gradients, exchange messages, and end together.

They are started by `accelerate launch`. There is no DistributedDataParallel wrapper: only the adapters' gradients are
exchanged, once per step, as one flat float32 vector (or in fewer bytes: `exchange`). So the frozen base is never
broadcast, hooked or bucketed, and gradient accumulation and checkpointing need no special mode.

A process that fails alone would leave the others waiting (on GPUs a collective cannot be interrupted), and the launcher
kills all others as soon as one exits, even the main one in the middle of a save. So an error of one process inside
`together` is sent to all before any of them exits, and the main process reports it to the user.
"""

import contextlib
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from accelerate import PartialState
from torch import Tensor

from ..errors import Message, RunFailure, Stopped, UserError

T = TypeVar("T")

PATIENCE = timedelta(days=1)
"""How long a process waits for the others. The libraries' defaults (10 minutes on GPUs, 30 on CPUs) are meant for
training steps, but here the others also wait while one fills the cache. It does not end a job whose process died: the
launcher does."""


def find_unused_gpus() -> list[str]:
    """Return a sentence for a GPU that this program cannot use, if the machine has one and no other."""
    if torch.cuda.is_available() or not torch.backends.mps.is_available():
        return []
    return [
        Message("the GPU of this Mac (MPS) is not used, because PyTorch has no FP8 on it: training runs on the CPU")
    ]


class Elsewhere(RunFailure):
    """Another process of this job failed or exited."""


class Processes:
    """This process among the others.

    Attributes:
        rank, world: number of this process, counted from 0, and number of processes.
        is_first_here: True in one process of each machine.
        device: the GPU that accelerate assigned, or the CPU.
        all_know: True when every process knows the error that ends the job.
        lockstep: True if the processes share the base (see `sharding`), so that each pass of the denoiser gathers from
            all of them. Then all must make the same passes in the same order.
        is_cut_off: True after an error in lockstep that the others were not told of; see `passing`.
        when_left: called after the process group was left, to forget it where nothing else does. The threads of a group
            that something keeps run until the process exits, and gloo's have aborted it then (exit code 134).
        undisturbed: a context in which no signal raises; otherwise the others would be left in half an exchange.
        sent: bytes of tensors that this process has sent to others so far, counted for the ring algorithm, which sends
            the least; messages of `gather` and `wait` are not counted.
    """

    def __init__(self) -> None:
        # accelerate forms a CPU process group only if it is told to use the CPU.
        # torch for Windows has no NCCL; gloo sends tensors of GPUs through RAM.
        on_gpu, distributed = torch.cuda.is_available(), torch.distributed.is_available()
        options = {"backend": "gloo"} if on_gpu and distributed and not torch.distributed.is_nccl_available() else {}
        with _explain_meeting():
            state = PartialState(cpu=not on_gpu, timeout=PATIENCE, **options)
        self.rank, self.world = state.process_index, state.num_processes
        self.is_first_here = state.is_local_main_process
        self.device = torch.device("cpu") if state.device.type == "cpu" else state.device
        self.all_know = False
        self.lockstep = self.is_cut_off = False
        self.when_left: list[Callable[[], object]] = []
        self.sent = 0
        self.undisturbed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @property
    def is_main(self) -> bool:
        """Return True in the process that writes files and reports to the user."""
        return self.rank == 0

    def sum_(self, vector: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.world > 1:
            with _translate_errors():
                torch.distributed.all_reduce(vector)
            self.sent += 2 * vector.nbytes * (self.world - 1) // self.world
        return vector

    def gather_(self, all_WN: Tensor, mine_N: Tensor) -> None:
        """Gather each process's tensor, by rank, into `all_WN` on every process."""
        with _translate_errors():
            torch.distributed.all_gather(list(all_WN), mine_N)
        self.sent += mine_N.nbytes * (self.world - 1)

    def swap_(self, received_WN: Tensor, parts_WN: Tensor) -> None:
        """Send part r of `parts_WN` to process r, and receive each process's part, by rank, into `received_WN`."""
        with _translate_errors():
            torch.distributed.all_to_all_single(received_WN, parts_WN)
        self.sent += parts_WN.nbytes * (self.world - 1) // self.world

    def broadcast_(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor with the main process's, in place."""
        if self.world > 1:
            with _translate_errors():
                torch.distributed.broadcast(tensor.view(torch.uint8), 0)
            self.sent += tensor.nbytes * self.is_main

    def to_main(self, mine: Tensor) -> list[Tensor]:
        """Return each process's tensor, by rank, in the main process's RAM; [] on the others.

        They are sent one after the other, so that a GPU holds only one more at a time.
        """
        with _translate_errors():
            if not self.is_main:
                torch.distributed.send(mine.contiguous(), 0)
                return []
            tensors, buffer = [mine.to("cpu", copy=True)], torch.empty_like(mine)
            for rank in range(1, self.world):
                torch.distributed.recv(buffer, rank)
                tensors.append(buffer.to("cpu", copy=True))
            return tensors

    def reduce_max_(self, tensor: Tensor) -> Tensor:
        """Take the largest value of each element over all processes, in place."""
        if self.world > 1:
            with _translate_errors():
                torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
        return tensor

    def select_share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this process's share of the items: every `world`-th, starting at number `rank`."""
        return items[self.rank :: self.world]

    def take_turns(
        self, items: Sequence[T], kind_of: Callable[[T], Hashable] = lambda item: None
    ) -> list[tuple[T, bool]]:
        """Return this process's share of the items, each with True.

        In lockstep each process gets as many of each kind as the others: where its share is shorter, the first item of
        the kind comes again with False, and its result is to be dropped.

        Args:
            items: what the processes share.
            kind_of: returns the kind of an item; those of a kind make as many passes of the denoiser.
        """
        if not self.lockstep:
            return [(item, True) for item in self.select_share(items)]
        kinds: dict[Hashable, list[T]] = {}
        for item in items:
            kinds.setdefault(kind_of(item), []).append(item)
        turns = []
        for alike in kinds.values():
            own = self.select_share(alike)
            turns += [(item, True) for item in own]
            turns += [(alike[0], False)] * (len(own) * self.world < len(alike))
        return turns

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Run passes of the denoiser, which in lockstep exchange tensors with the other processes.

        A process that fails between two exchanges cannot tell the others, which wait for the tensors of the next one.
        So it raises its error without them, exits, and the launcher ends the others.

        Raises:
            Elsewhere: another process exited meanwhile.
        """
        if not self.lockstep:
            yield
            return
        with self.undisturbed():
            try:
                yield
            except Exception as error:
                self.is_cut_off = True
                if _is_lost_connection(error):
                    raise _make_elsewhere(error) from error
                raise

    def gather(self, mine: T) -> list[T]:
        """Return a small object of each process, by rank, on every process.

        Raises:
            Elsewhere, Stopped: another process failed, or was told to stop.
        """
        return self._meet(mine, None)

    def wait(self) -> None:
        """Wait until every process is here; raises as `gather` does."""
        self._meet(None, None)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Run a block that all processes enter and leave together: an error of one is raised on each.

        A `gather` or `wait` inside it learns of an error elsewhere; exchanges of tensors do not.
        """
        try:
            yield
        except Exception as error:
            if not self.all_know and not self.is_cut_off and not isinstance(error, Elsewhere):
                # A process with an error of its own raises that one, whatever the others report.
                with contextlib.suppress(Elsewhere, Stopped):
                    self._meet(None, error)
            raise
        self.wait()

    def leave(self) -> None:
        """Leave the process group, all at the same time; no other process waits for what one does afterwards.

        Without it, the exit code of a finished run depends on which process exits first.
        """
        if self.is_cut_off:
            return  # the others may still wait for it in an exchange: only its exit ends that
        if self.world > 1 and torch.distributed.is_initialized():
            if self.all_know:  # wait until the main process has reported the error, before the launcher sees an exit
                with contextlib.suppress(Elsewhere):
                    self.wait()
            torch.distributed.destroy_process_group()
            for forget in self.when_left:
                forget()

    def _meet(self, mine: T, problem: Exception | None) -> list[T]:
        results: list[Any] = [(mine, None)] * self.world
        if self.world > 1:
            ending = None if problem is None else (isinstance(problem, Stopped), _format_error(problem))
            with self.undisturbed(), _translate_errors():
                torch.distributed.all_gather_object(results, (mine, ending))
        elif problem is not None:
            self.all_know = True
        for rank, (_, ending) in enumerate(results):
            if ending is not None:
                self.all_know = True
                stopped, text = ending
                if rank != self.rank:
                    raise (
                        Stopped(text)
                        if stopped
                        else Elsewhere(
                            Message("process {rank} of {world}: {line}", rank=rank, world=self.world, line=text)
                        )
                    )
        return [what for what, _ in results]


@contextlib.contextmanager
def _explain_meeting() -> Iterator[None]:
    """Turn the error of a first process that cannot listen, or of one that does not reach it, into a message."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.distributed.DistError):
            raise
        place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise RunFailure(
            Message(
                "the processes cannot meet at {place}: {why}. If another program uses this port, give the launcher "
                "another one: `--main_process_port` of accelerate, `--master-port` of torchrun",
                place=place,
                why=str(error).splitlines()[0],
            )
        ) from error


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn the error that a collective raises when another process exited into a message."""
    try:
        yield
    except RuntimeError as error:
        raise _make_elsewhere(error) from error


def _make_elsewhere(error: Exception) -> Elsewhere:
    why = (str(error).splitlines() or [type(error).__name__])[0]
    return Elsewhere(Message("another process of this job exited; see its message above ({why})", why=why))


def _is_lost_connection(error: Exception) -> bool:
    """Return True for what a collective raises when another process exited. gloo's errors have no type of their own."""
    return isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _format_error(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, UserError | RunFailure | Stopped) else f"{type(error).__name__}: {text}"
