"""Averages gradients over the processes of a job: in float32, or as e4m3 bytes with error feedback.

`train.gradient_exchange = "fp8"` sends a quarter of the bytes. Each process adds the residual, which earlier rounding
left out of its gradient, to this step's gradient. It rounds the sum to e4m3 with one power of two per 256 values, sends
the bytes, and keeps the new rest. So nothing is lost, only delayed (error feedback: Seide et al. 2014, "1-Bit
Stochastic Gradient Descent"; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes"). All processes add up the same bytes in float32 in the order of the ranks, so their results are bit-identical.

Bytes that each process sends, relative to a float32 all-reduce of the same vector, and how often a value is rounded:

| processes | 2 | 3 | 4 | 8 | rounded |
|---|---|---|---|---|---|
| "gather": all to all, each process adds up everything | 0.25 | 0.38 | 0.50 | 1.00 | once |
| "scatter": each process adds up a share, then all-gather | 0.25 | 0.25 | 0.25 | 0.25 | twice |

So two processes gather, which costs the same there and has the smaller error, and more processes scatter. The second
rounding has feedback too: its rest is added to the residual of the process that rounded.

Shapes: B blocks, E = 256 values of a block, W processes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import Message
from ..precision import formats
from ..training.flat import Gradients
from .processes import Processes

BLOCK = 256
ROW = 1 + BLOCK
"""Bytes of a block as it is sent: the exponent of its scale, then its values."""
CHUNK_BLOCKS = 1 << 12
"""Blocks that are rounded or added up at a time, so that the float32 copies stay small compared with the gradient."""

_INFINITE = 255  # float32's exponent of infinity and NaN
_E4M3_TOP, _E4M3_TOP_FRACTION = 8, 0x600000  # 448 = 2**8 * 1.75, and .75 as float32's mantissa bits


def encode(values_BE: Tensor) -> Tensor:
    """Encode float32 (B, 256) as uint8 (B, 257), rounded to nearest.

    The scale is the smallest power of two, at least 2**-126, with which the block fits into e4m3. It is sent as
    float32's own exponent: one byte, by which multiplication is exact. It is as precise as any other scale, because
    e4m3's error is relative. A block with NaN or infinity has the exponent of infinity, so that no value of it arrives
    finite.
    """
    bits_B = values_BE.abs().amax(dim=1).view(torch.int32)
    exponent_B = (bits_B >> 23) - _E4M3_TOP + ((bits_B & 0x7FFFFF) > _E4M3_TOP_FRACTION)
    finite_B = torch.isfinite(bits_B.view(torch.float32))
    exponent_B = torch.where(finite_B, exponent_B.clamp_(min=1), _INFINITE)
    codes_BE = (values_BE / _make_scale(exponent_B)).to(torch.float8_e4m3fn)
    return torch.cat([exponent_B.to(torch.uint8)[:, None], codes_BE.view(torch.uint8)], dim=1)


def decode(rows: Tensor) -> Tensor:
    """Decode the bytes of `encode` exactly: uint8 (B, 257) to float32 (B, 256)."""
    return formats.decode((rows[:, 1:], _make_scale(rows[:, 0])), "fp8", torch.float32)


def _make_scale(exponent_B: Tensor) -> Tensor:
    """Return 2 ** (exponent - 127) as float32 (B, 1), built from the bits; 255 is infinity."""
    return (exponent_B.to(torch.int32) << 23).view(torch.float32)[:, None]


class Exchange:
    """Averages the gradients of all processes over the samples of a step, in float32.

    Attributes:
        gradients: this process's gradient sums, and then the mean.
        processes: the processes of the job.
        kind: value of `train.gradient_exchange`.
    """

    kind = "fp32"

    def __init__(self, gradients: Gradients, processes: Processes) -> None:
        self.gradients, self.processes = gradients, processes

    def average_(self, num_samples: int, **figures: float) -> dict[str, float]:
        """Average the gradients of all processes over the step's samples, in place.

        Args:
            num_samples: samples of all processes together.
            figures: numbers of this process, at most 8.

        Returns:
            The sums of the figures over all processes.
        """
        if self.processes.world == 1:  # nothing to wait for
            self.gradients.scale_(1 / num_samples)
            return {name: float(figure) for name, figure in figures.items()}
        flat, size = self.gradients.flat, self.gradients.size
        mine = torch.tensor([float(figure) for figure in figures.values()], dtype=torch.float32)
        flat[size : size + len(mine)] = mine
        self.processes.sum_(flat)
        sums = dict(zip(figures, flat[size:].tolist(), strict=False))
        self.gradients.scale_(1 / num_samples)
        return sums

    def describe_cost(self, sent: int) -> dict[str, Any]:
        """Return how the run reports `sent` bytes of a step, compared with a float32 all-reduce."""
        world = self.processes.world
        plain = 2 * self.gradients.flat.nbytes * (world - 1) / world
        return {"kind": self.kind, "bytes_per_step": sent, "of_fp32": round(sent / plain, 4)}

    def collect(self) -> dict[str, Tensor]:
        """Return the tensors for a checkpoint, on the main process; all processes must call this together."""
        return {}

    def load_(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Restore what `collect` returned. Returns warnings about what has changed since."""
        if not tensors:
            return []
        return [
            Message(
                "the rounding residuals of {count} processes in the checkpoint are dropped, because gradients are "
                "no longer exchanged in fp8; the rounding error of one step is lost",
                count=len(tensors),
            )
        ]


class Fp8Exchange(Exchange):
    """Sends gradients as e4m3 bytes with error feedback; takes about 7 bytes of memory per trained value.

    Attributes:
        residual_BE: what rounding has left out of this process's mean gradient so far, float32. Zeros at its end give
            each process the same number of blocks to add up.
        way: "gather" or "scatter".
    """

    kind = "fp8"

    def __init__(self, gradients: Gradients, processes: Processes, way: str = "") -> None:
        super().__init__(gradients, processes)
        world, device = processes.world, gradients.flat.device
        self.way = way or ("gather" if world == 2 else "scatter")
        share = -(-gradients.size // (BLOCK * world))  # blocks that each process adds up, with scatter
        self.residual_BE = torch.zeros(world * share, BLOCK, device=device)
        # Allocated once and now: a process without memory for them must fail here, not while the others wait.
        blocks = share if self.way == "scatter" else world * share
        self._mine = torch.empty(blocks * ROW + 8 * 8, dtype=torch.uint8, device=device)
        self._all = self._mine.new_empty(world, len(self._mine))
        self._rows = self._mine[: -8 * 8].view(-1, ROW)
        if self.way == "scatter":
            self._rows = self._mine.new_empty(world * share, ROW)
            self._parts = self._mine.new_empty(world, share, ROW)
        self._own = slice(processes.rank * share, (processes.rank + 1) * share)

    @torch.no_grad()
    def average_(self, num_samples: int, **figures: float) -> dict[str, float]:
        """Average as `Exchange.average_` does. The figures are sent in full, as float64."""
        # The mean is taken first, so that a residual counts the same in a step of few samples.
        self.gradients.scale_(1 / num_samples)
        flat, world = self.gradients.values, self.processes.world
        self.residual_BE.view(-1)[: len(flat)] += flat
        for piece in _split_pieces(len(self._rows)):
            self._rows[piece] = encode(self.residual_BE[piece])
            self.residual_BE[piece] -= decode(self._rows[piece])

        if self.way == "scatter":
            self.processes.swap_(self._parts, self._rows.view(self._parts.shape))
            sums, rest_BE = self._mine[: -8 * 8].view(-1, ROW), self.residual_BE[self._own]
            for piece in _split_pieces(len(sums)):
                total_BE = _sum_rows(self._parts[:, piece])
                sums[piece] = encode(total_BE)
                rest_BE[piece] += total_BE - decode(sums[piece])
        sums_8 = torch.tensor([*map(float, figures.values()), *[0.0] * (8 - len(figures))], dtype=torch.float64)
        self._mine[-8 * 8 :] = sums_8.view(torch.uint8)
        self.processes.gather_(self._all, self._mine)

        rows, start = self._all[:, : -8 * 8].view(world, -1, ROW), 0
        for part in rows.split(1) if self.way == "scatter" else [rows]:  # with scatter, each row is a finished sum
            for piece in _split_pieces(part.shape[1]):
                values = _sum_rows(part[:, piece]).view(-1)
                into = flat[start : start + len(values)]  # the last one is shorter, without the zeros
                into.copy_(values[: len(into)])
                start += len(values)
        sums_8 = self._all[:, -8 * 8 :].contiguous().cpu().view(torch.float64).sum(dim=0)
        return dict(zip(figures, sums_8.tolist(), strict=False))

    def collect(self) -> dict[str, Tensor]:
        """Return {"residual.<rank>": float32 (values,)} on the main process."""
        flat = self.gradients.layout.without_gaps(self.residual_BE.view(-1)[: self.gradients.size])
        return {f"residual.{rank}": residual for rank, residual in enumerate(self.processes.to_main(flat))}

    def load_(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Restore as `Exchange.load_` does; if the number of processes changed, the first one takes all residuals."""
        world, rank = self.processes.world, self.processes.rank
        self.residual_BE.zero_()
        if not tensors:
            return []
        flat, layout = self.residual_BE.view(-1)[: self.gradients.size], self.gradients.layout
        if len(tensors) == world:
            layout.fill_with_gaps_(flat, tensors[f"residual.{rank}"])
            return []
        if rank == 0:
            added = tensors["residual.0"].clone()
            for before in range(1, len(tensors)):
                added += tensors[f"residual.{before}"]
            layout.fill_with_gaps_(flat, added)
        return [
            Message(
                "the checkpoint has {count} processes, this run has {now}: the rounding residuals of their "
                "gradients are added up and given to process 0",
                count=len(tensors),
                now=world,
            )
        ]


def build(kind: str, gradients: Gradients, processes: Processes) -> Exchange:
    """Return the exchange of `train.gradient_exchange` for these gradients; a single process sends nothing."""
    return (Fp8Exchange if kind == "fp8" and processes.world > 1 else Exchange)(gradients, processes)


def _sum_rows(rows_WB: Tensor) -> Tensor:
    """Sum uint8 (W, B, 257) to float32 (B, 256) in the order of the ranks, so that every process gets the same bits."""
    total_BE = decode(rows_WB[0])
    for rows in rows_WB[1:]:
        total_BE += decode(rows)
    return total_BE


def _split_pieces(blocks: int) -> Iterator[slice]:
    for start in range(0, blocks, CHUNK_BLOCKS):
        yield slice(start, min(start + CHUNK_BLOCKS, blocks))
