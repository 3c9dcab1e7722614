"""The images of a report: previews by step, and drawings by strength, reduced and inlined within a limit."""

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from ...common.reading import open_regular
from ...run import Run, drawings
from ...run.run_log import RunLog

SIDE = 512
"""Pixels of the longer side of an inlined image."""
SMALL = 160
"""Pixels up to which an image is inlined without loss: of a miniature every pixel is seen."""
MOST_STEPS = 8
MOST_PROMPTS = 12
MOST_BYTES = 16 * 2**20
"""Bytes of all images of a report, as they are inlined."""


@dataclass(frozen=True)
class Preview:
    """The previews of one prompt: step -> image file."""

    prompt: str
    files: dict[int, Path]


@dataclass
class Album:
    """Images as data URLs, within `MOST_BYTES` together.

    Attributes:
        omitted: number of images that the limit left out.
        unreadable: number of images that cannot be read.
    """

    omitted: int = 0
    unreadable: int = 0
    _urls: dict[Path, tuple[str, int, int]] = field(default_factory=dict)
    _num_bytes: int = 0

    def add(self, paths: Iterable[Path]) -> None:
        """Inline images, the most important ones first."""
        for path in paths:
            if path in self._urls:
                continue
            try:
                with open_regular(path) as file, Image.open(file) as image:
                    image.thumbnail((SIDE, SIDE))
                    data = _encode(image.convert("RGB"))
                    width, height = image.size
            except (OSError, ValueError, Image.DecompressionBombError):
                self.unreadable += 1
                continue
            if self._num_bytes + len(data) > MOST_BYTES:
                self.omitted += 1
                continue
            self._num_bytes += len(data)
            self._urls[path] = (f"data:image/webp;base64,{data}", width, height)

    def get(self, path: Path) -> tuple[str, int, int] | None:
        """Return the address, width and height of an image; None if it was left out."""
        return self._urls.get(path)


def _encode(image: Image.Image) -> str:
    target = io.BytesIO()
    image.save(target, "WEBP", quality=85, lossless=max(image.size) <= SMALL, method=4)
    return base64.b64encode(target.getvalue()).decode("ascii")


def list_previews(run: Run, log: RunLog) -> list[Preview]:
    """List the previews by prompt, those of the newest step first: prompts may be changed while a run trains."""
    by_prompt: dict[tuple[str, int], dict[int, Path]] = {}
    for step, event in sorted(log.facts.previews.items(), reverse=True):
        images, prompts = event.get("images"), event.get("prompts")
        if not isinstance(images, list) or not isinstance(prompts, list):
            continue
        seen: dict[str, int] = {}
        for image, prompt in zip(images, map(str, prompts), strict=False):
            number = seen[prompt] = seen.get(prompt, -1) + 1  # a prompt may be drawn twice, with two seeds
            path = run.path / str(image)
            if path.parent == run.samples:  # a log could name any file
                by_prompt.setdefault((prompt, number), {})[step] = path
    return [Preview(prompt, dict(sorted(files.items()))) for (prompt, _), files in by_prompt.items()]


def choose_steps(steps: Sequence[int], best: int | None, most: int = MOST_STEPS) -> list[int]:
    """Choose the steps to show: the first, the last, the best, and others evenly between them."""
    if len(steps) <= most:
        return list(steps)
    fixed = {steps[0], steps[-1]} | {step for step in steps if step == best}
    others = [step for step in steps if step not in fixed]
    count = most - len(fixed)
    evenly = {others[round((number + 0.5) * len(others) / count - 0.5)] for number in range(count)}
    return sorted(fixed | evenly)


def order_by_weight(previews: Sequence[Preview], steps: Sequence[int]) -> Iterable[Path]:
    """Yield the images, the last step first, then the first one, then those between."""
    for step in [*steps[-1:], *steps[:1], *reversed(steps[1:-1])]:
        for preview in previews:
            if step in preview.files:
                yield preview.files[step]


@dataclass(frozen=True)
class Strengths:
    """A drawing: one prompt at several strengths.

    Attributes:
        columns: the strengths, 0 first for the base model.
        rows: name of a LoRA, and its image by strength.
    """

    prompt: str
    columns: list[float]
    rows: list[tuple[str, dict[float, Path]]]


def read_drawing(folder: Path) -> Strengths | None:
    """Read a drawing of `lora-fp8 draw`; None if it has no image."""
    record = drawings.read(folder)
    images, loras = record.get("images"), record.get("loras")
    entries = [entry for entry in images if isinstance(entry, dict)] if isinstance(images, list) else []
    names = [str(lora.get("name")) for lora in loras if isinstance(lora, dict)] if isinstance(loras, list) else []
    base: dict[float, Path] = {}
    rows: dict[int, dict[float, Path]] = {}
    for entry in entries:
        number, strength, path = entry.get("lora"), entry.get("strength"), folder / str(entry.get("file"))
        if path.parent != folder or not isinstance(strength, int | float):
            continue
        if number is None:
            base[0.0] = path
        elif isinstance(number, int) and 0 <= number < len(names):
            rows.setdefault(number, {})[float(strength)] = path
    named = [(names[number], base | files) for number, files in sorted(rows.items())]
    columns = sorted({strength for _, files in named for strength in files})
    return Strengths(str(record.get("prompt", "")), columns, named) if named else None


def find_drawings(run: Run, given: Sequence[Path]) -> list[Path]:
    """Return the drawings to show: those that are named, and those that lie in the run folder."""
    inside = [path for path in sorted(run.path.iterdir()) if path.is_dir() and drawings.is_drawing(path)]
    return list(dict.fromkeys([*given, *inside]))
