"""Finds the control images of editing models."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from .. import settings
from ..errors import Message, Plural, about
from .decoding import EXTENSIONS, Looked
from .examples import Control, ScanReport
from .image_edits import ImageEdit
from .image_files import CONTROLS, find_edits_beside, list_beside
from .look_memory import LookMemory
from .scan_notes import as_text, list_names


def find_controls(
    section: settings.Dataset,
    images: list[tuple[int, Path, Path, Path | None]],
    num_controls: tuple[int, int] | None,
    report: ScanReport,
    memory: LookMemory,
) -> list[tuple[Control, ...] | None]:
    """Return the control images of each found image; None where they have a problem, which is added to the report."""
    answers: list[tuple[Control, ...] | None] = []
    by_folder: dict[int, list[tuple[Path, Path]]] = defaultdict(list)
    for number, root, path, _ in images:
        by_folder[number].append((root, path))
    for index, folder in enumerate(section.folders):
        pictures = {path: path.relative_to(root).with_suffix("").as_posix() for root, path in by_folder[index]}
        excluded = report.excluded.get(Path(os.path.expanduser(folder.path)), set())
        answers += _find_folder_controls(folder.control, pictures, excluded, num_controls, report, memory)
    return answers


def _find_folder_controls(
    control: str,
    pictures: dict[Path, str],
    excluded: set[str],
    num_controls: tuple[int, int] | None,
    report: ScanReport,
    memory: LookMemory,
) -> Iterable[tuple[Control, ...] | None]:
    """Return the control images of each image of one folder entry, as `find_controls` does.

    Args:
        control: the entry's folder of control images; "" if there is none.
        pictures: the entry's images, and their paths in its folder without extension.
        excluded: such paths of the images that the entry's folder excludes, whose control images are not used.
        num_controls: as in `scan`.
        report: takes the problems and warnings.
        memory: decodes the files.
    """
    if not control:
        return [()] * len(pictures)
    files = list_beside(CONTROLS, Path(os.path.expanduser(control)), memory.section, report)
    stems = {*pictures.values(), *excluded}
    candidates = {stem: _find_candidates(stem, stems, files) for stem in stems}
    edits = find_edits_beside({path: list(chain(*candidates[stem])) for path, stem in pictures.items()}, report)
    paths = sorted(edits)
    looks = dict(zip(paths, memory.inspect_all(paths, edits=edits), strict=True))
    for path, look in looks.items():
        if look.error:
            report.problems.append(Message("control image {line}", line=about(path, look.error)))
    if files is None:
        return [None] * len(pictures)
    controls: list[tuple[Control, ...] | None] = []
    for path, stem in pictures.items():
        if problem := _describe_wrong_controls(candidates[stem], control, path.stem, num_controls):
            report.problems.append(about(path, problem))
            controls.append(None)
            continue
        chosen = [names[0] for names in candidates[stem]]  # there is one candidate for each control image
        if any(looks[name].error for name in chosen):
            controls.append(None)
        else:
            controls.append(tuple(_make_control(name, looks[name], edits[name]) for name in chosen))
    known = {*looks, *(name for stem in excluded for name in chain(*candidates[stem]))}
    if lonely := sorted(str(name) for names in files.values() for name in names if name not in known):
        report.warnings.append(
            Plural(
                "{count} control image has no matching image: {files}",
                "{count} control images have no matching image: {files}",
            )(count=len(lonely), files=list_names(lonely))
        )
    return controls


def _make_control(path: Path, look: Looked, edit: ImageEdit) -> Control:
    return Control(path, look.width, look.height, look.sha256, edit)


def _find_candidates(stem: str, stems: set[str], files: dict[str, list[Path]] | None) -> list[list[Path]]:
    """Return the candidate files for each control image of the image `stem`: `name`, else `name_1`, `name_2`, ..."""
    if not files:
        return []
    if stem in files:
        return [files[stem]]
    numbered: list[list[Path]] = []
    # An image called name_1 takes the control image of that name for itself.
    while (name := f"{stem}_{len(numbered) + 1}") in files and name not in stems:
        numbered.append(files[name])
    return numbered


def _describe_wrong_controls(
    members: list[list[Path]], folder: str, stem: str, num_controls: tuple[int, int] | None
) -> str:
    """Return what is wrong with the names or the number of an image's control images; "" if nothing is."""
    if not members:
        return Message(
            "there is no control image {name} (or another extension) in {folder}", name=f"{stem}.png", folder=folder
        )
    for candidates in members:
        if len(candidates) > 1:
            names = ", ".join(path.name for path in candidates)
            return Message("there are several candidates for one control image, {names}; keep one of them", names=names)
    if num_controls is not None and len(members) > num_controls[1]:
        return Message(
            "there are {count} control images, but this model accepts at most {most}",
            count=len(members),
            most=num_controls[1],
        )
    return ""


def find_preview_controls(
    section: settings.Preview,
    dataset: settings.Dataset,
    num_controls: tuple[int, int] | None,
    memory: LookMemory | None = None,
) -> tuple[list[tuple[Control, ...]], list[str]]:
    """Find the control images of each preview.

    Each entry of `preview.controls` is a file (one control image) or a folder (all images in it, sorted by name).
    `memory` decodes them.

    Returns:
        The control images of each preview, and the problems with them.
    """
    by_preview: list[tuple[Control, ...]] = []
    problems: list[str] = []
    for i, given in enumerate(section.controls):
        path = Path(os.path.expanduser(given))
        names = [path]
        if path.is_dir():
            seen = (name for name in path.iterdir() if not name.name.startswith("."))  # as `walk` does
            names = sorted(name for name in seen if name.suffix.lower() in EXTENSIONS)
        controls = []
        for name, look in zip(names, (memory or LookMemory(dataset)).inspect_all(names), strict=True):
            if look.error:
                problems.append(
                    Message("preview.controls.{number}: {line}", number=i, line=about(as_text(name), look.error))
                )
            controls.append(Control(name, look.width, look.height, look.sha256))
        if num_controls is not None and not num_controls[0] <= len(controls) <= num_controls[1]:
            between = " to ".join(str(number) for number in dict.fromkeys(num_controls))
            problems.append(
                Message(
                    "preview.controls.{number}: {path} has {count} images; this model accepts {between}",
                    number=i,
                    path=path,
                    count=len(controls),
                    between=between,
                )
            )
        by_preview.append(tuple(controls))
    return by_preview, problems
