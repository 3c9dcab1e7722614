"""The blocks that a denoiser repeats, and their offloaded weights, which are fetched a whole block at a time.

Compiled code cannot fetch single weights, as `stream.fetch_parts` is Python. So all offloaded weights of a compiled
block are
copied to the GPU before its code runs: before its forward, and again before its backward, which reads the same places
and recomputes the block where activations are not kept. While a block computes, the weights of the next one are copied.
Two places are enough for that, used in turn. A block always has the same one, as its backward refers to it.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .frozen import FrozenLayer, strip_base_layer
from .stream import ALIGNED, Order

PLACES = 2
"""Places for the weights of a block: for the one that computes, and for the next one's copies."""


def find_blocks(denoiser: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that a denoiser repeats, by their names in the plain model, in its order.

    They are those of diffusers' own lists: the one of its regional compilation, or else the blocks that must not be
    split. A block in a block is not one of them.
    """
    kinds = getattr(denoiser, "_repeated_blocks", None) or getattr(denoiser, "_no_split_modules", None) or ()
    blocks: dict[str, nn.Module] = {}
    last = None
    for name, module in denoiser.named_modules():
        if type(module).__name__ in kinds and (last is None or not name.startswith(f"{last}.")):
            blocks[strip_base_layer(name)], last = module, name
    return blocks


class BlockStream:
    """Fetches the offloaded weights of blocks.

    Attributes:
        late, early: number of fetches whose copy had not been started before, and had been.
    """

    def __init__(self, denoiser: nn.Module):
        waiting = {block: _list_waiting(block) for block in find_blocks(denoiser).values()}
        self._layers = [layers for layers in waiting.values() if layers]
        self._numbers = {block: number for number, block in enumerate(block for block in waiting if waiting[block])}
        self._places: list[_Place] = []
        self._given: _Place | None = None
        self._order = Order()
        self._copying: torch.cuda.Stream | None = None
        self.late = self.early = 0

    def __contains__(self, block: nn.Module) -> bool:
        """Return True if the block has offloaded weights."""
        return block in self._numbers

    @contextlib.contextmanager
    def fetched(self, block: nn.Module) -> Iterator[None]:
        """Give the layers of a block their weights on the GPU, inside this context."""
        number = self._numbers[block]
        here = self._fetch(number)
        away = [layer.qweight for layer in self._layers[number]]
        _set_weights(self._layers[number], here)
        try:
            yield
        finally:
            _set_weights(self._layers[number], away)

    def fetch_before_backward(self, block: nn.Module, results: Any) -> None:
        """Fetch the weights of a block again before the gradients of its results go into it."""
        number = self._numbers[block]

        def fetch(gradient: Tensor) -> None:
            self._fetch(number)

        for result in _list_tensors(results):
            if result.requires_grad:
                result.register_hook(fetch)

    def _fetch(self, number: int) -> list[Tensor]:
        """Return the weights of a block on the GPU. Those of the block before may be overwritten from now on."""
        if not self._places:
            self._make_places()
            for place in self._places:  # whose memory may be that of a tensor which was freed before it was computed
                place.used = self._mark(place.device)
        place = self._find_place(number)
        if place is self._given and place.number == number:  # as for the second result of a block
            return place.split(self._layers[number])
        if self._given is not None:
            self._given.used = self._mark(self._given.device)  # all that reads it has been launched
        self._order.record_use(number)
        if place.number == number:
            self.early += 1
        else:
            self.late += 1
            self._copy(number)
        if place.copied is not None:
            torch.cuda.current_stream(place.device).wait_event(place.copied)
        self._given = place
        for following in self._order.predict_next(1):
            if self._find_place(following) is not place and self._find_place(following).number != following:
                self._copy(following)
        return place.split(self._layers[number])

    def _copy(self, number: int) -> None:
        """Start to copy the weights of a block to its place, when what was computed with its last ones is done."""
        place, layers = self._find_place(number), self._layers[number]
        place.number = number
        with contextlib.nullcontext() if self._copying is None else torch.cuda.stream(self._copying):
            if self._copying is not None and place.used is not None:
                self._copying.wait_event(place.used)
            for layer, target in zip(layers, place.split(layers), strict=True):
                # .data: for autograd, a saved weight that is copied again has not changed.
                target.data.copy_(layer.qweight, non_blocking=True)
        if self._copying is not None:
            place.copied = torch.cuda.Event()
            place.copied.record(self._copying)

    def _find_place(self, number: int) -> "_Place":
        return self._places[number % PLACES]

    def _make_places(self) -> None:
        device = self._layers[0][0].device
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None
        num_bytes = max(count_place([layer.qweight.nbytes for layer in layers]) for layers in self._layers)
        self._places = [_Place(torch.empty(num_bytes, dtype=torch.uint8, device=device)) for _ in range(PLACES)]

    def _mark(self, device: torch.device) -> "torch.cuda.Event | None":
        """Record an event after everything that has been launched on the GPU so far; None on a CPU."""
        if self._copying is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event


def count_place(sizes: list[int]) -> int:
    """Count the bytes that weights of these sizes take beside each other."""
    return sum(-(-size // ALIGNED) * ALIGNED for size in sizes)


class _Place:
    """GPU memory for the offloaded weights of a block.

    Attributes:
        number: of the block whose weights are there or being copied; -1: none.
        copied, used: events for the end of the copies, and of what used the memory before them; None on a CPU.
    """

    def __init__(self, room: Tensor):
        self.bytes, self.device = room, room.device
        self.number = -1
        self.copied: torch.cuda.Event | None = None
        self.used: torch.cuda.Event | None = None

    def split(self, layers: list[FrozenLayer]) -> list[Tensor]:
        """Return the parts for the weights of these layers, in their shapes."""
        parts, at = [], 0
        for weight in (layer.qweight for layer in layers):
            parts.append(self.bytes[at : at + weight.nbytes].view(weight.dtype).view(weight.shape))
            at += count_place([weight.nbytes])
        return parts


def _list_waiting(block: nn.Module) -> list[FrozenLayer]:
    return [layer for layer in block.modules() if isinstance(layer, FrozenLayer) and layer.waits]


def _set_weights(layers: Sequence[FrozenLayer], weights: Sequence[Tensor]) -> None:
    for layer, weight in zip(layers, weights, strict=True):
        vars(layer)["qweight"] = weight


def _list_tensors(results: Any) -> list[Tensor]:
    """Return the tensors among the results of a block: one, or a tuple or table of them."""
    if isinstance(results, Tensor):
        return [results]
    inner = results.values() if isinstance(results, dict) else results if isinstance(results, tuple | list) else ()
    return [tensor for result in inner for tensor in _list_tensors(result)]
