"""The two names of a denoiser's layers: diffusers' own, and those that the model was first published with.

ComfyUI, InvokeAI and kohya's tools call layers as the original code does, and single-file checkpoints hold them so.
One table of a family, `native_layers`, says how the two belong together, and everything else follows from it: reading
single files, and the layouts of LoRA files.

A row is (original, diffusers). It names a layer, a tensor, or a module with everything below it; "#" stands for a
number, the same on both sides. Where the original holds several layers as one, the right side lists them with blanks
between, in the order of the rows of the fused weight; such a row names layers and nothing below. The first row that
fits wins, so that the particular comes before the general:

    ("blocks.#.attn.qkv", "layers.#.attn.to_q layers.#.attn.to_k layers.#.attn.to_v")
    ("blocks.#", "layers.#")

Families write them as a text, which `table` reads.

Pure functions of names and shapes; no torch.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

Row = tuple[str, str]
Shape = tuple[int, ...]
KINDS = ("weight", "bias")
"""The last part of the names of a fused layer's tensors."""


def table(text: str) -> tuple[Row, ...]:
    """Rows from a text: a line each, the original's name, "=", and those of diffusers; or one name for both.

    Commas stand between rows on one line; behind one, the line may go on below. Lines that stand further in continue
    the names of the line above them, which is no row itself; if there are several on it, those of each:

        blocks.# = layers.#
            attn.qkv = attn.to_q attn.to_k attn.to_v
            self_attn = attn1, cross_attn = attn2
                o = to_out.0
        img_in = x_embedder

    Raises:
        ValueError: a line is not of this form, or the sides of a row differ in their numbers.
    """
    text = re.sub(r",\s*\n\s*", ", ", text)
    lines = [(len(line) - len(line.lstrip()), line.split(",")) for line in text.splitlines() if line.strip()]
    rows: list[Row] = []
    above = [(-1, [("", "")])]
    for (depth, entries), (next_depth, _) in zip(lines, [*lines[1:], (0, [])], strict=True):
        while above[-1][0] >= depth:
            above.pop()
        found = [_row(entry, *before) for entry in entries for before in above[-1][1]]
        if next_depth <= depth:
            rows += found
        elif any(" " in ours for _, ours in found):
            raise ValueError(f"{','.join(entries).strip()!r}: there is nothing below a fused layer")
        else:
            above.append((depth, [(f"{native}.", f"{ours}.") for native, ours in found]))
    return tuple(rows)


def _row(entry: str, native_above: str, ours_above: str) -> Row:
    native, equals, ours = (part.strip() for part in entry.partition("="))
    names = ours.split() if equals else [native]
    if not names or len(native.split()) != 1 or any(name.count("#") != native.count("#") for name in names):
        raise ValueError(f"{entry.strip()!r} is not 'original = diffusers', with as many # on both sides")
    return native_above + native, " ".join(ours_above + name for name in names)


@cache
def _pattern(side: str) -> re.Pattern[str]:
    """Matches a name that is `side` or lies below it; the groups are the numbers, and what comes below."""
    return re.compile(re.escape(side).replace(r"\#", r"(\d+)") + r"((?:\..+)?)")


def _filled(side: str, numbers: Sequence[str]) -> str:
    parts = side.split("#")
    return "".join(part + number for part, number in zip(parts, [*numbers, ""], strict=True))


def to_native(rows: Sequence[Row], name: str) -> tuple[str, tuple[str, ...]] | None:
    """The original name of a layer (or tensor) of diffusers, and all diffusers names that the original one stands for.

    None where no row fits.
    """
    for native, ours in rows:
        members = ours.split()
        for member in members:
            found = _pattern(member).fullmatch(name)
            if found is None:
                continue
            *numbers, below = found.groups()
            if len(members) > 1 and below.removeprefix(".") not in ("", *KINDS):
                continue
            return _filled(native, numbers) + below, tuple(_filled(one, numbers) + below for one in members)
    return None


def from_native(rows: Sequence[Row], name: str) -> tuple[str, ...] | None:
    """The diffusers names of a layer (or tensor) of the original, several where it is fused. None where no row fits."""
    for native, ours in rows:
        found = _pattern(native).fullmatch(name)
        if found is None:
            continue
        *numbers, below = found.groups()
        members = ours.split()
        if len(members) > 1 and below.removeprefix(".") not in ("", *KINDS):
            continue
        return tuple(_filled(one, numbers) + below for one in members)
    return None


def conversion(
    rows: Sequence[Row], header: Mapping[str, Shape], shapes: Mapping[str, Shape], prefix: str = ""
) -> Iterator[tuple[str, str, tuple[int, int] | None]]:
    """Where a denoiser's tensors are in a file of the original naming.

    Args:
        header: names and shapes in the file.
        shapes: of the denoiser's tensors in diffusers.
        prefix: what all names of the denoiser begin with in the file.

    Yields:
        (diffusers name, name in the file, None or the first and last + 1 of its rows there). What no row names comes
        under the name that it has, so that whoever fills the denoiser tells of it.
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
