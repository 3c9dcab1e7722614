"""The adapters' values in flat vectors, so that a step needs one operation for all adapters instead of one for each.

A LoRA of FLUX has 836 matrices. On an H100 the operations of an update by matrix, 5,024 of them, kept the GPU waiting
for 0.11 s of a step of 0.67 s, of which it worked 0.02 s (benchmarks/gpu_nvidia-h100-80gb-hbm3).

Parameters with the same dtype and learning rate are a `Part` of the vector. Each parameter begins at a multiple of 256,
the block whose values share a scale in bitsandbytes' 8-bit moments: so every block holds values of one parameter, and
the moments are the same to the bit as if each parameter were updated alone. The gradient is zero in the gaps between
them, so their moments never set the scale of a block.
"""

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

ALIGNMENT = 256
LONGEST = 2**30
"""Elements of a part, at most: bitsandbytes counts them in 32 bits."""


@dataclass(frozen=True)
class Segment:
    """The place of a parameter in a part.

    Attributes:
        name: of the parameter.
        start: first element, counted from the beginning of the part.
        shape: of the parameter.
    """

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """Return the element after the last one."""
        return self.start + self.shape.numel()

    def select_from(self, part: Tensor) -> Tensor:
        """Return the parameter's elements of a vector of the part, as a view in the parameter's shape."""
        return part[self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class Part:
    """Parameters that are updated together.

    Attributes:
        key: what they have in common.
        segments: the parameters, in order.
        start, stop: the part's elements of the whole vector.
    """

    key: Hashable
    segments: tuple[Segment, ...]
    start: int
    stop: int

    def select_from(self, flat: Tensor) -> Tensor:
        """Return the part's elements of the whole vector, as a view."""
        return flat[self.start : self.stop]


class Layout:
    """Where each parameter is in the flat vector.

    Attributes:
        parts: in order, without gaps between them.
        size: elements of the vector.
        names: of the parameters, in the order in which they were given.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], keys: Mapping[str, Hashable] | None = None) -> None:
        """Arrange the parameters by their keys, in the order in which the keys first come; without keys as they are."""
        self.names = [name for name, _ in named]
        by_key: dict[Hashable, list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in named:
            by_key.setdefault(None if keys is None else keys[name], []).append((name, parameter))
        self.parts: list[Part] = []
        self.size = 0
        for key, members in by_key.items():
            segments: list[Segment] = []
            length = 0
            for name, parameter in members:
                if segments and length + parameter.numel() > LONGEST:
                    self._add(key, segments, length)
                    segments, length = [], 0
                segments.append(Segment(name, length, parameter.shape))
                length += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
            self._add(key, segments, length)

    def _add(self, key: Hashable, segments: list[Segment], length: int) -> None:
        self.parts.append(Part(key, tuple(segments), self.size, self.size + length))
        self.size += length

    def make_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Return each parameter's elements of the vector by name, as views in the parameters' shapes."""
        return {
            segment.name: segment.select_from(part.select_from(flat))
            for part in self.parts
            for segment in part.segments
        }

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return a new float32 vector with these values of every parameter.

        Raises:
            ValueError: a parameter is missing or unknown.
        """
        if differing := sorted(set(self.names) ^ tensors.keys()):
            raise ValueError(f"values and parameters differ: {differing[:8]}")
        device = next(iter(tensors.values())).device
        flat = torch.zeros(self.size, dtype=torch.float32, device=device)
        for name, view in self.make_views(flat).items():
            view.copy_(tensors[name].detach())
        return flat

    def without_gaps(self, flat: Tensor) -> Tensor:
        """Return a copy of a vector's values in the order of `names`, without gaps: what a checkpoint holds."""
        views = self.make_views(flat)
        return torch.cat([views[name].reshape(-1) for name in self.names])

    def fill_with_gaps_(self, flat: Tensor, values: Tensor) -> None:
        """Set a vector to what `without_gaps` returned, in place; the gaps become zero."""
        flat.zero_()
        views = self.make_views(flat)
        sizes = [views[name].numel() for name in self.names]
        for name, piece in zip(self.names, values.to(flat.device).split(sizes), strict=True):
            views[name].copy_(piece.view(views[name].shape))


class Gradients:
    """Float32 sums of the adapters' gradients in one flat vector.

    The bf16 gradients of micro-batches are summed in float32; a bf16 sum would lose up to 4e-3 of them.

    Attributes:
        flat: the vector, and eight values after it that carry figures of the run, so that a step needs one exchange.
        values: the vector alone, a view.
        named: each parameter's elements by name, views.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], layout: Layout | None = None) -> None:
        self.parameters = dict(named)
        self.layout = layout = layout or Layout(named)
        self.size = layout.size
        device = named[0][1].device
        self.flat = torch.zeros(self.size + 8, dtype=torch.float32, device=device)
        self.values = self.flat[: self.size]
        self.named = layout.make_views(self.values)
        self._zeros: dict[torch.dtype, Tensor] = {}

    def zero_(self) -> None:
        """Set all sums to zero, before a step, and drop what a backward pass that failed left in `.grad`."""
        self.flat.zero_()
        self.drop_()

    def drop_(self) -> None:
        """Drop the gradients that backward left in `.grad`."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def collect_(self) -> None:
        """Add the gradients that backward left in `.grad`, and clear those."""
        for part in self.layout.parts:
            pieces = list(self._iterate_pieces(part))
            part.select_from(self.values).add_(torch.cat(pieces))  # float32 += bf16: exact conversion, float32 sum
            for segment in part.segments:
                self.parameters[segment.name].grad = None

    def _iterate_pieces(self, part: Part) -> Iterator[Tensor]:
        """Yield the gradients of a part and the gaps between them, flat."""
        end = 0
        for segment in part.segments:
            parameter = self.parameters[segment.name]
            if segment.start > end:
                yield self._make_zeros(segment.start - end, parameter)
            yield (
                self._make_zeros(parameter.numel(), parameter) if parameter.grad is None else parameter.grad.reshape(-1)
            )
            end = segment.stop
        if part.stop - part.start > end:
            yield self._make_zeros(part.stop - part.start - end, parameter)

    def _make_zeros(self, length: int, like: Tensor) -> Tensor:
        """Return zeros in the dtype and on the device of a parameter."""
        have = self._zeros.get(like.dtype)
        if have is None or len(have) < length:
            have = self._zeros[like.dtype] = torch.zeros(length, dtype=like.dtype, device=like.device)
        return have[:length]

    def scale_(self, factor: float) -> None:
        """Multiply the gradients by a factor, such as 1 / number of samples."""
        self.flat.mul_(factor)
