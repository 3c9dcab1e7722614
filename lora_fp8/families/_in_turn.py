"""Text encoders one at a time: while captions are encoded the memory holds the largest of them, and not all together.

A pipeline asks its encoders one after the other for each prompt, and loading them anew for each would take far longer
than encoding. So all prompts are asked as far as the first encoder leads, then that one leaves, the second comes, and
all are asked again. Each of them stands in the pipeline as a `Standin`, which gives the answers that it gave before,
computes a new one if its encoder is in memory, and ends the question with `Later` if it is not. The pipeline's own code
runs as it always does and knows nothing of it, so that the conditioning is the same bit for bit.

Of an answer only what the pipeline reads is kept, on the CPU: Llama hands out 33 layers of hidden states, of which one
is wanted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

KEPT_BYTES = 2 << 30
"""Answers of so many bytes are kept at a time; what is asked beyond that has its encoders loaded once more."""


class Later(Exception):
    """The text encoder `name` is asked and is not in memory."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Answer:
    """An encoder's output as the pipeline sees it, which keeps what is read of it."""

    def __init__(self, output: Any, device: torch.device) -> None:
        self.output, self.device, self.kept = output, device, {}

    def __getitem__(self, key: Any) -> Any:
        name = repr(key)  # slices are not hashable
        if name not in self.kept:
            if self.output is None:
                raise RuntimeError(f"{name} of a text encoder's answer is read after another encoder was asked")
            part = getattr(self.output, key) if isinstance(key, str) else self.output[key]
            # The hidden states of all layers: which of them is wanted shows in the same way.
            self.kept[name] = Answer(part, self.device) if isinstance(key, str) and isinstance(part, tuple) else part
        return _moved(self.kept[name], self.device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def rest(self) -> int:
        """Keep what was read, on the CPU, and nothing else. -> bytes"""
        self.output = None
        self.kept = {name: _moved(part, torch.device("cpu")) for name, part in self.kept.items()}
        return sum(map(_size, self.kept.values()))


def _moved(part: Any, device: torch.device) -> Any:
    if isinstance(part, tuple):
        return tuple(_moved(one, device) for one in part)
    return part.to(device) if isinstance(part, Tensor) else part


def _size(part: Any) -> int:
    if isinstance(part, Answer):
        return part.rest()
    if isinstance(part, tuple):
        return sum(map(_size, part))
    return part.nbytes if isinstance(part, Tensor) else 0


class Standin(nn.Module):
    """Stands for a text encoder in its pipeline."""

    def __init__(self, name: str, turns: Turns, dtype: torch.dtype) -> None:
        super().__init__()
        self.name, self.turns, self.dtype, self.device = name, turns, dtype, turns.device
        self.encoder: nn.Module | None = None
        self.register_buffer("place", torch.empty(0, dtype=dtype, device=turns.device))  # by which diffusers finds it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.turns.answer(self, args, kwargs)


class Turns:
    """All questions that are to be asked, and the answers that the encoders gave so far.

    Args:
        load: makes the encoder of this name.
        free: gives back the memory of the one that has left.
        device: where the encoders run.
        dtype: what a pipeline is told that they compute in.
    """

    def __init__(
        self,
        names: Sequence[str],
        load: Callable[[str], nn.Module],
        free: Callable[[], None],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.load, self.free, self.device = load, free, device
        self.standins = {name: Standin(name, self, dtype) for name in names}
        self.tapes: dict[int, list[Any]] = {}
        self.tape: list[Any] = []  # of the question that is being asked
        self.position = 0

    def answer(self, standin: Standin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What this encoder says: as before, or for the first time."""
        if self.position == len(self.tape):
            if standin.encoder is None:
                raise Later(standin.name)
            output = standin.encoder(*args, **kwargs)
            self.tape.append(output if isinstance(output, Tensor) else Answer(output, self.device))
        found = self.tape[self.position]
        self.position += 1
        return _moved(found, self.device)

    def ask(self, asks: Sequence[Callable[[], Any]]) -> Iterator[tuple[int, Any]]:
        """(number, what it returns) of each of these functions, which ask the pipeline with the `standins` in it.

        A function is called several times, and is ended by `Later` in all but the last.
        """
        todo = deque(range(len(asks)))
        while todo:
            waiting, name = todo, self._first(asks[todo[0]])
            while waiting:
                group: deque[int] = deque()
                needed, kept = "", 0
                self.standins[name].encoder = self.load(name)
                while waiting and (waiting is not todo or kept < KEPT_BYTES):
                    number = waiting.popleft()
                    self.tape, self.position = self.tapes.pop(number, []), 0
                    try:
                        found = asks[number]()
                    except Later as later:
                        needed = needed or later.name
                        kept += sum(map(_size, self.tape))
                        self.tapes[number] = [_moved(one, torch.device("cpu")) for one in self.tape]
                        group.append(number)
                    else:
                        yield number, found
                self.standins[name].encoder, self.tape = None, []
                self.free()
                waiting, name = group, needed

    def _first(self, ask: Callable[[], Any]) -> str:
        """The encoder that is asked first."""
        self.tape, self.position = [], 0
        try:
            ask()
        except Later as later:
            return later.name
        raise RuntimeError("a prompt was encoded without any text encoder")
