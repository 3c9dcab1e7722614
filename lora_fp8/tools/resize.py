"""`lora-fp8 resize`: a LoRA file at a smaller rank, layer by layer the nearest to the old one that there is."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import export
from ..config import UserError
from . import pairs
from .pairs import Pair


@dataclass(frozen=True)
class Row:
    """One layer: rank before and after, and the share of its delta's energy (squared norm) that is kept."""

    module: str
    before: int
    rank: int
    kept: float
    energy: float


@dataclass(frozen=True)
class Report:
    """What resizing did.

    Attributes:
        rows: one for each layer that the new file holds.
        dropped: layers whose delta is zero, which a file need not hold.
    """

    rows: list[Row]
    dropped: list[str]

    @property
    def kept(self) -> float:
        """Of the energy of all layers together."""
        return sum(row.kept * row.energy for row in self.rows) / sum(row.energy for row in self.rows)

    def lines(self) -> list[str]:
        """For people: each layer, worst first, and the whole."""
        rows = sorted(self.rows, key=lambda row: (row.kept, row.module))
        told = [f"{row.kept:8.4%}  rank {row.before} -> {row.rank}  {row.module}" for row in rows]
        told += [f"left out, its delta is zero: {module}" for module in self.dropped]
        ranks = sorted({row.rank for row in self.rows})
        span = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        return [*told, f"{len(self.rows)} layers at rank {span} keep {self.kept:.4%} of the energy"]

    def to_json(self) -> dict[str, Any]:
        return {"kept": self.kept, "layers": [vars(row) for row in self.rows], "dropped": self.dropped}


def shrink(found: Mapping[str, Pair], rank: int, energy: float, uniform: bool) -> tuple[dict[str, Pair], Report]:
    """The best pairs of a smaller rank.

    Args:
        rank: at most this; 0 is no bound. A layer of less keeps what it has.
        energy: each layer gets the smallest rank that keeps this share of its energy; 0 asks for `rank` alone.
        uniform: all layers get the largest rank that one of them needs.

    Raises:
        UserError: all deltas are zero.
    """
    spectra = {module: pairs.spectrum(pair) for module, pair in found.items()}
    dropped = sorted(module for module, spectrum in spectra.items() if spectrum.energy == 0)
    ranks = {}
    for module, spectrum in spectra.items():
        if module not in dropped:
            needed = spectrum.rank_for(energy) if energy else len(spectrum.values)
            ranks[module] = min(needed, rank or needed)
    if not ranks:
        raise UserError("every delta of the file is zero: there is nothing to keep")
    if uniform:
        ranks = {module: min(max(ranks.values()), len(spectra[module].values)) for module in ranks}
    made = {module: spectra[module].pair(wanted) for module, wanted in ranks.items()}
    rows = [
        Row(module, found[module].rank, wanted, spectra[module].kept(wanted), spectra[module].energy)
        for module, wanted in ranks.items()
    ]
    return made, Report(rows, dropped)


def resize(file: Path, output: Path, *, rank: int, energy: float, uniform: bool, dtype: str) -> Report:
    """Write `file` at a smaller rank; see `shrink`.

    Args:
        dtype: "bf16", "fp16", "fp32"; empty keeps the file's.

    Raises:
        UserError: the file, a size, the dtype or the output is not one that can be used.
    """
    pairs.check_size(rank, energy)
    lora = pairs.read(file)
    held = pairs.dtype_of(dtype, lora.dtype)
    if output.exists():
        raise UserError(f"{output}: exists already; choose another name with --output")
    made, report = shrink(lora.pairs, rank, energy, uniform)
    wanted = " ".join(filter(None, (rank and f"rank {rank}", energy and f"energy {energy:g}")))
    resized = replace(lora, pairs=made)
    # A name of its own: to A1111 two files of one ss_output_name are one.
    about = {"lora_fp8_tool": f"resize to {wanted}", "ss_output_name": export.slug(output.stem)}
    pairs.write(resized, output, held, about)
    return report
