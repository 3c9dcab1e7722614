"""Finds the mask of each image: in a separate folder, beside the images, or in their own transparency."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import settings
from ..errors import Message, Plural
from .buckets import Placed, has_same_shape
from .decoding import BLACK, Light, Looked
from .examples import Mask, ScanReport
from .image_files import MASKS, find_edits_beside, find_masked_stem, list_beside, walk
from .look_memory import GREYS, LookMemory
from .scan_notes import list_names, to_warnings


def warn_of_outside_masks(placed: Sequence[Placed]) -> list[str]:
    """Return a warning about images whose mask has white only where the crop removes it; [] if there are none.

    Masks that are black all over are not counted: they have a warning of their own.
    """
    names = [
        str(image.example.path)
        for image in placed
        if (mask := image.example.mask) and mask.white and any(mask.white) and not image.placement.shows(mask.white)
    ]
    return to_warnings({"outside": list(dict.fromkeys(names))})


@dataclass(frozen=True)
class Seen:
    """The properties of an image that its mask is checked against.

    Attributes:
        size: width and height of the upright image, before it is edited.
        sha256: its identity, as in `decoding.Looked`.
        clip: the file is a clip.
        opacity: range of its opacity; None if it has no transparency, or if transparency was not asked for.
    """

    size: tuple[int, int]
    sha256: str
    clip: bool
    opacity: Light | None = None


def from_look(look: Looked) -> Seen | None:
    """Return what is known of an image that was decoded; None if it could not be."""
    if look.error:
        return None
    return Seen(look.whole, look.sha256, look.timeline is not None, look.measured)


def find_masks(
    section: settings.Dataset,
    unmasked_weight: float,
    entries: Sequence[tuple[int, Path, Path, Path | None]],
    seen: Sequence[Seen | None],
    report: ScanReport,
    memory: LookMemory,
) -> list[Mask | None]:
    """Find the mask of each image; problems and warnings are added to the report.

    Args:
        section: the `[dataset]` section.
        unmasked_weight: as in `scan`.
        entries: from `list_folder`, folder by folder.
        seen: properties of each found image; None for one that cannot be used.
        report: takes the problems and warnings; has the images' edits.
        memory: decodes the mask files.

    Returns:
        One entry per found image; None if it has no mask.
    """
    answers: list[Mask | None] = []
    notes: dict[str, list[str]] = defaultdict(list)
    by_folder: dict[int, list[tuple[Path, Path, Seen | None]]] = defaultdict(list)
    for (number, root, path, _), seen_image in zip(entries, seen, strict=True):
        by_folder[number].append((root, path, seen_image))
    for index, folder in enumerate(section.folders):
        images = by_folder[index]
        if not folder.mask:
            answers += [None] * len(images)
        elif folder.mask == "alpha":
            answers += _find_masks_by_opacity(images, folder.path, index, notes, report)
        else:
            answers += _find_masks_by_file(images, memory, index, notes, report)
    if not unmasked_weight:
        report.problems += [
            Message(
                "the mask of {path} is black all over, so with objective.unmasked_weight = 0 the image teaches "
                "nothing; remove the image, or draw the part to be trained in white",
                path=path,
            )
            for path in notes.pop("black", [])
        ]
    report.warnings += to_warnings(notes)
    return answers


def _find_masks_by_opacity(
    images: list[tuple[Path, Path, Seen | None]],
    folder: str,
    index: int,
    notes: dict[str, list[str]],
    report: ScanReport,
) -> list[Mask | None]:
    answers: list[Mask | None] = []
    if moving := [str(path) for _, path, seen in images if seen is not None and seen.clip]:
        report.problems.append(
            Plural(
                "folder {path} has {count} clip, which has no transparency to use as a mask; set {key} to a folder "
                "of masks: {names}",
                "folder {path} has {count} clips, which have no transparency to use as masks; set {key} to a folder "
                "of masks: {names}",
            )(
                path=folder,
                count=len(moving),
                key=f"dataset.folders.{index}.mask",
                names=list_names(moving),
            )
        )
    for _, path, seen in images:
        answers.append(None)
        if seen is None or seen.clip:
            continue
        if seen.opacity is None or seen.opacity.least == 255:
            notes["unmasked"].append(str(path))
            continue
        answers[-1] = Mask(path, seen.sha256, alpha=True, white=seen.opacity.white, edit=report.edits[path])
        if seen.opacity.most <= BLACK:
            notes["black"].append(str(path))
    return answers


def _find_masks_by_file(
    images: list[tuple[Path, Path, Seen | None]],
    memory: LookMemory,
    index: int,
    notes: dict[str, list[str]],
    report: ScanReport,
) -> list[Mask | None]:
    section = memory.section
    folder = section.folders[index]
    if folder.mask_folder:
        files = list_beside(MASKS, Path(os.path.expanduser(folder.mask)), section, report)
    else:
        files = _list_among(Path(os.path.expanduser(folder.path)), folder.mask)
    if files is None:
        return [None] * len(images)
    stems = [path.relative_to(root).with_suffix("").as_posix() for root, path, _ in images]
    edits = find_edits_beside(
        {path: files.get(stem, []) for stem, (_, path, _) in zip(stems, images, strict=True)}, report
    )
    used = sorted(edits)
    looks = dict(zip(used, memory.inspect_all(used, GREYS, edits), strict=True))
    report.problems += [
        Message("mask {path} cannot be used: {line}", path=path, line=look.error)
        for path, look in looks.items()
        if look.error
    ]
    answers: list[Mask | None] = []
    for stem, (_, path, seen) in zip(stems, images, strict=True):
        candidates = files.get(stem, [])
        answers.append(None)
        if not candidates:
            notes["unmasked"].append(str(path))
        elif len(candidates) > 1:
            names = ", ".join(candidate.name for candidate in candidates)
            report.problems.append(
                Message("{path} has several candidates for its mask, {names}; keep one of them", path=path, names=names)
            )
        elif seen is not None and not (look := looks[candidates[0]]).error:
            if not has_same_shape(seen.size, look.whole):
                report.problems.append(
                    Message(
                        "the mask {path} has {size} pixels, but its image has {other}, with another aspect ratio; "
                        "draw the mask on the image",
                        path=candidates[0],
                        size=f"{look.whole[0]} x {look.whole[1]}",
                        other=f"{seen.size[0]} x {seen.size[1]}",
                    )
                )
            if look.measured.most <= BLACK:
                notes["black"].append(str(path))
            answers[-1] = Mask(candidates[0], look.sha256, white=look.measured.white, edit=edits[candidates[0]])
    excluded = report.excluded.get(Path(os.path.expanduser(folder.path)), set())
    others = [path for stem, members in files.items() if stem not in excluded for path in members]
    notes["strange"] += sorted(str(path) for path in others if path not in looks)
    return answers


def _list_among(root: Path, mask: str) -> dict[str, list[Path]]:
    """List the masks that lie beside the images, by the image's path inside the folder without extension.

    A folder that cannot be read is skipped: `list_folder` has already reported it.
    """
    files: dict[str, list[Path]] = defaultdict(list)
    with contextlib.suppress(OSError):
        for folder, names in walk(root):
            for name in names:
                if stem := find_masked_stem(mask, name):
                    files[(folder / stem).relative_to(root).as_posix()].append(folder / name)
    return files
