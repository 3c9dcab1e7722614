"""`lora-fp8 resize`: writes a LoRA file at a smaller rank, with the best approximation of each layer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import Message, Plural, UserError, exists_already, first_few
from ..lora_files import export_metadata
from . import pairs
from .pairs import Pair

MOST_LISTED = 10
"""Layers that a report lists for people; its JSON has all."""


@dataclass(frozen=True)
class Row:
    """A layer: rank before and after, the share of its delta's energy (squared norm) that is kept, and that energy."""

    module: str
    before: int
    rank: int
    kept: float
    energy: float


@dataclass(frozen=True)
class Report:
    """The result of resizing.

    Attributes:
        rows: one per layer of the new file.
        dropped: layers that are left out because their delta is zero.
    """

    rows: list[Row]
    dropped: list[str]

    @property
    def kept(self) -> float:
        """Return the share of all layers' energy that is kept."""
        return sum(row.kept * row.energy for row in self.rows) / sum(row.energy for row in self.rows)

    def format_lines(self) -> list[str]:
        """Return a line for each of the layers that lose most, for the others together, and for the whole."""
        rows = sorted(self.rows, key=lambda row: (row.kept, row.module))
        lines: list[str] = [
            Message(
                "{kept}  rank {before} -> {rank}  {name}",
                kept=f"{row.kept:8.4%}",
                before=row.before,
                rank=row.rank,
                name=row.module,
            )
            for row in rows[:MOST_LISTED]
        ]
        if others := rows[MOST_LISTED:]:
            lines.append(
                Plural("{count} other layer keeps {least} or more", "{count} other layers keep {least} or more each")(
                    count=len(others), least=f"{others[0].kept:.4%}"
                )
            )
        if self.dropped:
            lines.append(
                Plural(
                    "{count} layer is not written, because its delta is zero: {names}",
                    "{count} layers are not written, because their deltas are zero: {names}",
                )(count=len(self.dropped), names=first_few(self.dropped))
            )
        ranks = sorted({row.rank for row in self.rows})
        span = Message("{least} to {most}", least=ranks[0], most=ranks[-1]) if len(ranks) > 1 else str(ranks[0])
        total = Message(
            "{count} layers at rank {span} keep {kept} of the energy",
            count=len(self.rows),
            span=span,
            kept=f"{self.kept:.4%}",
        )
        return [*lines, total]

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain JSON types."""
        return {"kept": self.kept, "layers": [vars(row) for row in self.rows], "dropped": self.dropped}


def shrink(layers: Mapping[str, Pair], rank: int, energy: float, uniform: bool) -> tuple[dict[str, Pair], Report]:
    """Return the best pairs of a smaller rank, and a report.

    Args:
        layers: pairs by layer.
        rank: maximum rank of a layer; 0: no limit. A layer of lower rank keeps it.
        energy: each layer gets the smallest rank that keeps this share of its energy; 0: only `rank` decides.
        uniform: give all layers the largest rank that one of them needs.

    Raises:
        UserError: all deltas are zero.
    """
    spectra = {module: pairs.compute_spectrum(pair) for module, pair in layers.items()}
    dropped = sorted(module for module, spectrum in spectra.items() if spectrum.energy == 0)
    ranks = {}
    for module, spectrum in spectra.items():
        if module not in dropped:
            needed = spectrum.find_rank(energy) if energy else len(spectrum.values)
            ranks[module] = min(needed, rank or needed)
    if not ranks:
        raise UserError(Message("every delta of the file is zero, so there is nothing to keep"))
    if uniform:
        ranks = {module: min(max(ranks.values()), len(spectra[module].values)) for module in ranks}
    made = {module: spectra[module].make_pair(wanted) for module, wanted in ranks.items()}
    rows = [
        Row(module, layers[module].rank, wanted, spectra[module].compute_kept(wanted), spectra[module].energy)
        for module, wanted in ranks.items()
    ]
    return made, Report(rows, dropped)


def resize(file: Path, output: Path, *, rank: int, energy: float, uniform: bool, dtype: str) -> Report:
    """Write `file` at a smaller rank; see `shrink`.

    Args:
        file: the LoRA file.
        output: the file to write.
        rank, energy, uniform: see `shrink`.
        dtype: "bf16", "fp16" or "fp32"; empty: the file's.

    Returns:
        The report of `shrink`.

    Raises:
        UserError: the file, a size, the dtype or the output cannot be used.
    """
    pairs.check_size(rank, energy)
    lora = pairs.read(file)
    held = pairs.parse_dtype(dtype, lora.dtype)
    if output.exists():
        raise exists_already(output)
    made, report = shrink(lora.pairs, rank, energy, uniform)
    wanted = " ".join([f"rank {rank}"] * bool(rank) + [f"energy {energy:g}"] * bool(energy))
    resized = replace(lora, pairs=made)
    # A name of its own: A1111 treats two files with one ss_output_name as the same.
    about = {"lora_fp8_tool": f"resize to {wanted}", "ss_output_name": export_metadata.make_slug(output.stem)}
    pairs.write(resized, output, held, about)
    return report
