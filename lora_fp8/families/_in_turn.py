"""Runs text encoders one at a time, so that memory holds the largest of them and not all together.

For each prompt, a pipeline calls its encoders one after the other. Loading them anew for each prompt would take far
longer than encoding. So all prompts are first run up to the second encoder's turn; then the first encoder is freed, the
second is loaded, and all prompts are run again. In the pipeline, a `Standin` takes each encoder's place. It replays the
outputs that it returned before, computes a new one if its encoder is in memory, and raises `Later` if it is not. The
pipeline's own code runs unchanged, so the conditioning is equal bit for bit.

Of an output, only what the pipeline reads is kept, on the CPU: Llama returns 33 layers of hidden states, of which one
is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

KEPT_BYTES = 2 << 30
"""Bytes of encoder outputs kept at a time. Prompts beyond that form the next group, which loads the encoders again."""


class Later(Exception):
    """Raised when the text encoder `name` is called and is not in memory."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Answer:
    """An encoder's output as the pipeline sees it; it keeps the parts that are read."""

    def __init__(self, output: Any, device: torch.device) -> None:
        self.output, self.device = output, device
        self.kept: dict[str, Any] = {}

    def __getitem__(self, key: Any) -> Any:
        name = repr(key)  # slices are not hashable
        if name not in self.kept:
            if self.output is None:
                raise RuntimeError(f"{name} of a text encoder's answer is read after another encoder was asked")
            part = getattr(self.output, key) if isinstance(key, str) else self.output[key]
            # `hidden_states` is a tuple of all layers' states: wrapping it records which of them are read.
            self.kept[name] = Answer(part, self.device) if isinstance(key, str) and isinstance(part, tuple) else part
        return _move(self.kept[name], self.device)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]

    def drop_unread(self) -> int:
        """Drop everything that was not read, and move the rest to the CPU. Returns the bytes kept."""
        self.output = None
        self.kept = {name: _move(part, torch.device("cpu")) for name, part in self.kept.items()}
        return sum(map(_drop_unread, self.kept.values()))


def _move(part: Any, device: torch.device) -> Any:
    if isinstance(part, tuple):
        return tuple(_move(inner, device) for inner in part)
    return part.to(device) if isinstance(part, Tensor) else part


def _drop_unread(part: Any) -> int:
    if isinstance(part, Answer):
        return part.drop_unread()
    if isinstance(part, tuple):
        return sum(map(_drop_unread, part))
    return part.nbytes if isinstance(part, Tensor) else 0


class Standin(nn.Module):
    """Takes the place of a text encoder in its pipeline."""

    def __init__(self, name: str, turns: Turns, dtype: torch.dtype) -> None:
        super().__init__()
        self.name, self.turns, self.dtype, self.device = name, turns, dtype, turns.device
        self.encoder: nn.Module | None = None
        self.register_buffer("place", torch.empty(0, dtype=dtype, device=turns.device))  # tells diffusers the device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.turns.answer(self, args, kwargs)


class Turns:
    """Runs encoding functions with one encoder in memory at a time, and keeps the encoders' outputs between runs.

    Args:
        names: names of the encoders in the pipeline.
        load: loads the encoder of a name.
        free: releases the memory of an encoder that was dropped.
        device: device on which the encoders run.
        dtype: dtype that the stand-ins report to the pipeline.
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
        self.tape: list[Any] = []  # outputs of the function that is running
        self.position = 0

    def answer(self, standin: Standin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return this encoder's next output: the recorded one, or a new one."""
        if self.position == len(self.tape):
            if standin.encoder is None:
                raise Later(standin.name)
            output = standin.encoder(*args, **kwargs)
            self.tape.append(output if isinstance(output, Tensor) else Answer(output, self.device))
        answer = self.tape[self.position]
        self.position += 1
        return _move(answer, self.device)

    def ask(self, asks: Sequence[Callable[[], Any]]) -> Iterator[tuple[int, Any]]:
        """Yield (index, result) of functions that call a pipeline with the `standins` in it.

        Each function is called several times; all calls but the last end with `Later`.
        """
        todo = deque(range(len(asks)))
        while todo:
            waiting, name = todo, self._find_first_encoder(asks[todo[0]])
            while waiting:
                group: deque[int] = deque()
                needed, kept = "", 0
                self.standins[name].encoder = self.load(name)
                while waiting and (waiting is not todo or kept < KEPT_BYTES):
                    number = waiting.popleft()
                    self.tape, self.position = self.tapes.pop(number, []), 0
                    try:
                        result = asks[number]()
                    except Later as later:
                        needed = needed or later.name
                        kept += sum(map(_drop_unread, self.tape))
                        self.tapes[number] = [_move(answer, torch.device("cpu")) for answer in self.tape]
                        group.append(number)
                    else:
                        yield number, result
                self.standins[name].encoder, self.tape = None, []
                self.free()
                waiting, name = group, needed

    def _find_first_encoder(self, ask: Callable[[], Any]) -> str:
        """Return the name of the encoder that is called first."""
        self.tape, self.position = [], 0
        try:
            ask()
        except Later as later:
            return later.name
        raise RuntimeError("a prompt was encoded without any text encoder")
