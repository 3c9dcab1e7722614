"""Offloads frozen weights to RAM and copies them to the GPU for each use.

Copies go one way only: the base never changes, so nothing is copied back. The `qweight` of some layers is offloaded,
spread evenly over the model, so that one is copied while its neighbours compute; scales, biases and adapters stay on
the GPU. A layer passes the offloaded bytes to `matmul`, which calls `fetch_parts` where it needs them: in the forward,
in the recomputation and in the backward. So autograd keeps no copy of them.

The order of use is learned in the first two steps; later steps repeat it. So the next weights are copied before they
are needed, on a stream of their own, from page-locked memory, into a few buffers that are used in turn. A copy waits
until the computation that read its buffer is done. It waits on the GPU and not on the CPU, which runs far ahead.
"""

import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

AHEAD = 2
"""Number of layers whose weights are being copied while one computes."""
BUFFERS = AHEAD + 2
"""Buffers for those, for the layer that computes, and for the one before it, which may not have finished."""
SLAB = 2**28
"""Page-locked bytes that are allocated at once: torch rounds each request up to a power of two, at worst to twice as
many."""
ALIGNED = 512
REMEMBERED = 2**14
"""Number of past uses that are searched for a repetition of the present ones: several steps of the largest models."""
CONTEXT = 64
"""Most preceding uses that are compared when two equal uses are matched."""


def choose_offloaded(sizes: Mapping[str, int], share: float, blocks: Iterable[str] = ()) -> list[str]:
    """Return the layers to offload: about `share` of all bytes, spread evenly over the model's order.

    Args:
        sizes: bytes by layer, in the order of use.
        share: 0 to 1.
        blocks: names of blocks whose layers are chosen for each block by itself. So the same ones are in blocks that
            are alike, which then can have the same compiled code.
    """
    names = {name for group in split_by_block(sizes, blocks).values() for name in _spread(group, share)}
    return [name for name in sizes if name in names]


def split_by_block(sizes: Mapping[str, int], blocks: Iterable[str]) -> dict[str, dict[str, int]]:
    """Split a table of layers by the block that they are in; those in none are under ""."""
    groups: dict[str, dict[str, int]] = {}
    known = set(blocks)
    for name, size in sizes.items():
        parts = name.split(".")
        around = (".".join(parts[:end]) for end in range(1, len(parts)))
        groups.setdefault(next((block for block in around if block in known), ""), {})[name] = size
    return groups


def _spread(sizes: Mapping[str, int], share: float) -> list[str]:
    names, owed = [], 0.0
    for name, size in sizes.items():
        owed += share * size
        if owed >= size / 2 and share:
            names.append(name)
            owed -= size
    return names


def copy_to_ram(tensor: Tensor) -> Tensor:
    """Copy a tensor to RAM, page-locked if there is a GPU to copy it to."""
    global _slab, _used
    if tensor.device.type == "meta":
        return tensor
    if not torch.cuda.is_available():
        return tensor.to("cpu", copy=True)
    if _slab is None or _used + tensor.nbytes > _slab.nbytes:
        _slab, _used = torch.empty(max(SLAB, tensor.nbytes), dtype=torch.uint8, pin_memory=True), 0
    place = _slab[_used : _used + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    _used += -(-tensor.nbytes // ALIGNED) * ALIGNED
    return place.copy_(tensor)


def fetch_parts(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return the tensors of a weight on the device of its scales.

    Offloaded bytes are fetched; they stay valid until the next ones are fetched.
    """
    waiting, device = parts[0], parts[1].device
    if _is_at(waiting, device):
        return parts
    if device not in _couriers:
        _couriers[device] = Courier(device)
    return _couriers[device].fetch(waiting), *parts[1:]


def _is_at(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device == device


class Courier:
    """Copies offloaded bytes to one device.

    Attributes:
        late, early: number of fetches whose copy had not been started before, and had been.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.copying = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.late = self.early = 0
        self._buffers: list[_Buffer] = []
        self._given: _Buffer | None = None
        self._waiting: dict[int, weakref.ref[Tensor]] = {}
        self._order = Order()

    def fetch(self, waiting: Tensor) -> Tensor:
        """Return the bytes on this device, in their shape; the next call may overwrite them."""
        if self._given is not None:
            self._given.used = self._mark(current=True)  # everything that reads it has been launched by now
        key = waiting.data_ptr()
        known = self._waiting.get(key)
        if known is None or known() is None:
            self._waiting[key] = weakref.ref(waiting)
            for buffer_of_key in self._buffers:
                buffer_of_key.key *= buffer_of_key.key != key  # forget the tensor that was at this address before
        self._make_room(waiting.nbytes)
        self._order.record_use(key)
        buffer = next((candidate for candidate in self._buffers if candidate.key == key), None)
        if buffer is None:
            self.late += 1
            buffer = self._copy(waiting, spared={key})
        else:
            self.early += 1
        if buffer.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.copied)
        self._given = buffer
        self._prefetch(key)
        buffer.turn = self._turn()
        return buffer.bytes[: waiting.nbytes].view(waiting.dtype).view(waiting.shape)

    def _prefetch(self, now: int) -> None:
        """Start copying the next weights, as far as their order is known."""
        wanted = self._order.predict_next(AHEAD)
        for key in wanted:
            tensor = self._waiting[key]()
            if tensor is not None and all(buffer.key != key for buffer in self._buffers):
                self._copy(tensor, spared={now, *wanted})

    def _copy(self, waiting: Tensor, spared: set[int]) -> "_Buffer":
        """Copy into the buffer that was used longest ago and does not hold one of `spared`."""
        buffer = min(
            (candidate for candidate in self._buffers if candidate.key not in spared),
            key=lambda candidate: candidate.turn,
        )
        buffer.key, buffer.turn = waiting.data_ptr(), self._turn()
        place = buffer.bytes[: waiting.nbytes].view(waiting.dtype).view(waiting.shape)
        if self.copying is None:
            place.copy_(waiting)
            return buffer
        with torch.cuda.stream(self.copying):
            if buffer.used is not None:
                self.copying.wait_event(buffer.used)
            place.copy_(waiting, non_blocking=True)
        buffer.copied = self._mark(current=False)
        return buffer

    def _make_room(self, num_bytes: int) -> None:
        if self._buffers and self._buffers[0].bytes.nbytes >= num_bytes:
            return
        if self.copying is not None:
            torch.cuda.synchronize(self.device)  # the old buffers may still be written or read; this is rare
        self._given, self._buffers = None, []  # freed before the new ones are allocated
        self._buffers = [_Buffer(torch.empty(num_bytes, dtype=torch.uint8, device=self.device)) for _ in range(BUFFERS)]

    def _mark(self, current: bool) -> "torch.cuda.Event | None":
        """Record an event after everything that has been launched on the device so far; None on a CPU."""
        if self.copying is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device) if current else self.copying)
        return event

    def _turn(self) -> int:
        return 1 + max((buffer.turn for buffer in self._buffers), default=0)


class Order:
    """Predicts the next use from the order of past uses: what followed the last time the same was used.

    A layer alone does not determine the next one: at the end of a block, the forward goes on to the next block and the
    recomputation turns back. So a repetition is followed from its beginning for as long as it lasts.
    """

    def __init__(self) -> None:
        self._used: list[int] = []
        self._seen: set[int] = set()
        self._at = -1  # index of the past use that the last use repeats; -1: none

    def record_use(self, key: int) -> None:
        """Record that `key` is used now."""
        if len(self._used) >= 2 * REMEMBERED:
            del self._used[:REMEMBERED]
            self._at = max(self._at - REMEMBERED, -1)
        now = len(self._used)
        self._used.append(key)
        if self._at >= 0 and self._used[self._at + 1] == key and self._at + 1 < now:
            self._at += 1
        else:
            self._at = self._find_longest(now) if key in self._seen else -1
        self._seen.add(key)

    def predict_next(self, num: int) -> list[int]:
        """Return the predicted next uses: at most `num`, fewer or none if unknown."""
        return self._used[self._at + 1 : self._at + 1 + num] if self._at >= 0 else []

    def _find_longest(self, now: int) -> int:
        """Return the index of the past use with the longest equal history, the latest if there are several."""
        best, best_place = 0, -1
        for place in range(now - 1, -1, -1):
            length = 0
            while length < min(CONTEXT, place + 1) and self._used[place - length] == self._used[now - length]:
                length += 1
            if length > best:
                best, best_place = length, place
        return best_place


class _Buffer:
    """GPU memory for the bytes of one layer.

    Attributes:
        key: address of the offloaded tensor whose bytes are in it or being copied to it; 0: none.
        turn: increases with each use, so that the smallest is the oldest.
        copied, used: events for the end of the copy and of the computation that reads it; None on a CPU.
    """

    def __init__(self, room: Tensor):
        self.bytes = room
        self.key = self.turn = 0
        self.copied: torch.cuda.Event | None = None
        self.used: torch.cuda.Event | None = None


_couriers: dict[torch.device, Courier] = {}
_slab: Tensor | None = None
_used = 0
