"""Frozen bytes that wait in main memory and come to the GPU for each use.

One way only: nothing of the base ever changes, so nothing is copied back. What waits is the `qweight` of some layers,
spread evenly over the model, so that one is copied while its neighbours compute; scales, biases and adapters stay. A
layer hands the waiting bytes to `matmul`, which asks `here` for them where it needs them, in the forward, in the
recomputation and in the backward: autograd keeps no copy of them.

The order of use is learned in the first two steps, which the third repeats. So the next ones are under way before they
are asked for, on a stream of their own, from page-locked memory, into a few buffers that are used in turn. A copy waits
until what was computed from its buffer is done, on the GPU's clock and not on the CPU's, which is far ahead.
"""

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

AHEAD = 2
"""Layers that are on their way while one computes."""
BUFFERS = AHEAD + 2
"""Theirs, that of the layer that computes, and that of the one before it, which may still be at it."""
SLAB = 2**28
"""Page-locked bytes that are taken at once: torch rounds each request up to a power of two, at worst to twice as many.
"""
ALIGNED = 512
REMEMBERED = 2**14
"""Uses that are looked through for where the present ones are repeated from: several steps of the largest models."""
CONTEXT = 64
"""As many uses before two equal ones are compared at most."""


def chosen(sizes: Mapping[str, int], share: float) -> list[str]:
    """The layers whose bytes wait: about `share` of all bytes, spread evenly over the model's order.

    Args:
        sizes: bytes by layer, in the order of use.
        share: 0 to 1.
    """
    names, owed = [], 0.0
    for name, size in sizes.items():
        owed += share * size
        if owed >= size / 2 and share:
            names.append(name)
            owed -= size
    return names


def put_away(tensor: Tensor) -> Tensor:
    """A copy of it in main memory, page-locked where there is a GPU to copy it to."""
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


def here(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a weight is held in, all of it where its scales are; bytes that wait are good until the next ones are asked
    for."""
    waiting, device = parts[0], parts[1].device
    if _is_at(waiting, device):
        return parts
    if device not in _couriers:
        _couriers[device] = Courier(device)
    return _couriers[device].fetch(waiting), *parts[1:]


def _is_at(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device == device


class Courier:
    """Brings waiting bytes to one device.

    Attributes:
        late, early: how often bytes were asked for that were not, or were, on their way already.
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
        """The bytes on this device, in their shape; the next call may write over them."""
        if self._given is not None:
            self._given.used = self._mark(current=True)  # everything that reads it has been launched by now
        key = waiting.data_ptr()
        known = self._waiting.get(key)
        if known is None or known() is None:
            self._waiting[key] = weakref.ref(waiting)
            for one in self._buffers:
                one.key *= one.key != key  # of what was at this address before
        self._make_room(waiting.nbytes)
        self._order.note(key)
        buffer = next((one for one in self._buffers if one.key == key), None)
        if buffer is None:
            self.late += 1
            buffer = self._copy(waiting, spared={key})
        else:
            self.early += 1
        if buffer.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.copied)
        self._given = buffer
        self._look_ahead(key)
        buffer.turn = self._turn()
        return buffer.bytes[: waiting.nbytes].view(waiting.dtype).view(waiting.shape)

    def _look_ahead(self, now: int) -> None:
        """Have the next ones copied, as far as their order is known."""
        wanted = self._order.next(AHEAD)
        for key in wanted:
            tensor = self._waiting[key]()
            if tensor is not None and all(one.key != key for one in self._buffers):
                self._copy(tensor, spared={now, *wanted})

    def _copy(self, waiting: Tensor, spared: set[int]) -> "_Buffer":
        """Into the buffer that was given out longest ago, and is not to be `spared`."""
        buffer = min((one for one in self._buffers if one.key not in spared), key=lambda one: one.turn)
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
            torch.cuda.synchronize(self.device)  # the old buffers may be being filled or read; this is rare
        self._given, self._buffers = None, []  # gone before the new ones come
        self._buffers = [_Buffer(torch.empty(num_bytes, dtype=torch.uint8, device=self.device)) for _ in range(BUFFERS)]

    def _mark(self, current: bool) -> "torch.cuda.Event | None":
        """What the device has to do until now, as far as it was asked to."""
        if self.copying is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device) if current else self.copying)
        return event

    def _turn(self) -> int:
        return 1 + max((one.turn for one in self._buffers), default=0)


class Order:
    """In what order things are used, and so what comes next: what came next where the same was used before.

    A layer alone does not tell: at the end of a block the forward goes on to the next block, and the recomputation
    turns back. So a repetition is followed from where it began, for as long as it is one.
    """

    def __init__(self) -> None:
        self._used: list[int] = []
        self._seen: set[int] = set()
        self._at = -1  # where the last use is repeated from; -1: nowhere

    def note(self, key: int) -> None:
        """This is used now."""
        if len(self._used) >= 2 * REMEMBERED:
            del self._used[:REMEMBERED]
            self._at = max(self._at - REMEMBERED, -1)
        now = len(self._used)
        self._used.append(key)
        if self._at >= 0 and self._used[self._at + 1] == key and self._at + 1 < now:
            self._at += 1
        else:
            self._at = self._longest(now) if key in self._seen else -1
        self._seen.add(key)

    def next(self, num: int) -> list[int]:
        """What will be used next, as many as are known and at most so many."""
        return self._used[self._at + 1 : self._at + 1 + num] if self._at >= 0 else []

    def _longest(self, now: int) -> int:
        """Where this was used before after the most of the same uses, at last if in several places."""
        best, found = 0, -1
        for place in range(now - 1, -1, -1):
            length = 0
            while length < min(CONTEXT, place + 1) and self._used[place - length] == self._used[now - length]:
                length += 1
            if length > best:
                best, found = length, place
        return found


class _Buffer:
    """Room for the bytes of one layer.

    Attributes:
        key: whose bytes are in it, or on their way to it.
        turn: counts up with each use.
        copied, used: when its bytes are there, and when what was computed from it is done; None on a CPU.
    """

    def __init__(self, room: Tensor):
        self.bytes = room
        self.key = self.turn = 0
        self.copied: torch.cuda.Event | None = None
        self.used: torch.cuda.Event | None = None


_couriers: dict[torch.device, Courier] = {}
_slab: Tensor | None = None
_used = 0
