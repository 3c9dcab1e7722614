"""Maps a denoiser's layer names between diffusers and the model's original code.

ComfyUI, InvokeAI and kohya's tools use the layer names of the original code, and so do single-file checkpoints. A
family's table `native_layers` relates the two; reading single files and the layouts of LoRA files follow from it.

A row is (original, diffusers). It names a layer, a tensor, or a module with everything below it; "#" stands for a
number, the same on both sides. If the original has several layers fused into one, the right side lists them, separated
by spaces, in the order of the rows of the fused weight; such a row names layers and nothing below them. The first row
that matches applies, so specific rows come before general ones:

    ("blocks.#.attn.qkv", "layers.#.attn.to_q layers.#.attn.to_k layers.#.attn.to_v")
    ("blocks.#", "layers.#")

Families write the table as text, which `parse_table` parses.

This module has pure functions of names and shapes, without torch.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

Row = tuple[str, str]
Shape = tuple[int, ...]
KINDS = ("weight", "bias")
"""The last parts of the names of a fused layer's tensors."""


def parse_table(text: str) -> tuple[Row, ...]:
    """Parse rows from text: each line is "original = diffusers", or one name if both are the same.

    Commas separate rows on one line; after a comma, a row may continue on the next line. Indented lines continue the
    names of the line above them, which then is no row itself; if that line has several rows, they continue each of
    them:

        blocks.# = layers.#
            attn.qkv = attn.to_q attn.to_k attn.to_v
            self_attn = attn1, cross_attn = attn2
                o = to_out.0
        img_in = x_embedder

    Raises:
        ValueError: a line does not have this form, or the sides of a row differ in their number of "#".
    """
    text = re.sub(r",\s*\n\s*", ", ", text)
    lines = [(len(line) - len(line.lstrip()), line.split(",")) for line in text.splitlines() if line.strip()]
    rows: list[Row] = []
    above = [(-1, [("", "")])]
    for (depth, entries), (next_depth, _) in zip(lines, [*lines[1:], (0, [])], strict=True):
        while above[-1][0] >= depth:
            above.pop()
        new_rows = [_parse_row(entry, *before) for entry in entries for before in above[-1][1]]
        if next_depth <= depth:
            rows += new_rows
        elif any(" " in ours for _, ours in new_rows):
            raise ValueError(f"{','.join(entries).strip()!r}: there is nothing below a fused layer")
        else:
            above.append((depth, [(f"{native}.", f"{ours}.") for native, ours in new_rows]))
    return tuple(rows)


def _parse_row(entry: str, native_above: str, ours_above: str) -> Row:
    native, equals, ours = (part.strip() for part in entry.partition("="))
    names = ours.split() if equals else [native]
    if not names or len(native.split()) != 1 or any(name.count("#") != native.count("#") for name in names):
        raise ValueError(f"{entry.strip()!r} is not 'original = diffusers', with as many # on both sides")
    return native_above + native, " ".join(ours_above + name for name in names)


@cache
def _compile_pattern(side: str) -> re.Pattern[str]:
    """Return a pattern for names that are `side` or below it; its groups are the numbers, and the part below."""
    return re.compile(re.escape(side).replace(r"\#", r"(\d+)") + r"((?:\..+)?)")


def _fill_numbers(side: str, numbers: Sequence[str]) -> str:
    parts = side.split("#")
    return "".join(part + number for part, number in zip(parts, [*numbers, ""], strict=True))


def list_names(form: str, *parts: Iterable[str]) -> tuple[str, ...]:
    """Fill every combination of parts into a name: list_names("{}.{}", "ab", "12") is a.1, a.2, b.1, b.2."""
    return tuple(form.format(*combination) for combination in itertools.product(*parts))


def to_native(rows: Sequence[Row], name: str) -> tuple[str, tuple[str, ...]] | None:
    """Return the original name of a diffusers layer (or tensor), and all diffusers names that it stands for.

    None if no row matches.
    """
    for native, ours in rows:
        members = ours.split()
        for member in members:
            match = _compile_pattern(member).fullmatch(name)
            if match is None:
                continue
            *numbers, below = match.groups()
            if len(members) > 1 and below.removeprefix(".") not in ("", *KINDS):
                continue
            return _fill_numbers(native, numbers) + below, tuple(
                _fill_numbers(pattern, numbers) + below for pattern in members
            )
    return None


def from_native(rows: Sequence[Row], name: str) -> tuple[str, ...] | None:
    """Return the diffusers names of an original layer (or tensor), several if it is fused; None if no row matches."""
    for native, ours in rows:
        match = _compile_pattern(native).fullmatch(name)
        if match is None:
            continue
        *numbers, below = match.groups()
        members = ours.split()
        if len(members) > 1 and below.removeprefix(".") not in ("", *KINDS):
            continue
        return tuple(_fill_numbers(pattern, numbers) + below for pattern in members)
    return None


def locate_tensors(
    rows: Sequence[Row], header: Mapping[str, Shape], shapes: Mapping[str, Shape], prefix: str = ""
) -> Iterator[tuple[str, str, tuple[int, int] | None]]:
    """Yield where a denoiser's tensors are in a file with original names.

    Args:
        rows: the family's table.
        header: names and shapes in the file.
        shapes: shapes of the denoiser's tensors by diffusers name.
        prefix: prefix of all names of the denoiser in the file.

    Yields:
        (diffusers name, name in the file, None or the tensor's rows there as (first, last + 1)). A tensor that no row
        names keeps its name, so that the code that fills the denoiser reports it.
    """
    for key in header:
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        members = from_native(rows, name) or (name,)
        if len(members) == 1:
            yield members[0], key, None
            continue
        begin = 0
        for member in members:
            end = begin + shapes[member][0] if member in shapes else begin
            yield member, key, (begin, end)
            begin = end
