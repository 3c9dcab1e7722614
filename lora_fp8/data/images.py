"""Scan datasets: find the images, captions, control images and masks, and report every problem before a model loads.

`scan` walks the folders of a `[dataset]` section, decodes every image completely, reads every caption, and returns the
examples together with *problems* (training must not start) and *warnings* (it may). Nothing is guessed: a caption that
is neither UTF-8 nor UTF-16 with a byte-order mark is a problem that names the file and the byte offset. The scan never
writes into the user's folders.

An empty caption counts as missing. How a caption is read: `caption_text`.

Control images, which editing models take beside the noise, are in a separate folder (`control`), under the image's name
with any of the extensions: `name.jpg` for `name.png`, with the same subfolders. Several control images of one image are
`name_1`, `name_2` and so on. They are decoded like images and have no captions.

Masks (`mask`) say which part of an image is trained: white in full, black with the weight objective.unmasked_weight.
The grey values count as stored, without a colour profile. A mask has the shape of its image; the mask of a clip applies
to all of its frames. Masks are in a separate folder, as control images are, or beside the images under a name such as
`*_mask` (such files are then not images), or the image's own transparency is its mask. Transparent parts of a mask
count as black. Files named as OneTrainer names masks and conditioning images (`name-masklabel.png` and
`name-condlabel.png`) are not images where they lie beside the image that they belong to.

With `dataset.frames`, video files are examples too, and animations (GIF, WebP, PNG) are clips, of which otherwise only
the first frame is used: see `clips`. Each piece of a clip is an example, with the clip's caption.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from .. import settings
from ..common.numbers import format_digits
from ..errors import Joined, Message, Plural, about, first_few, reason
from . import clips
from .buckets import has_same_shape
from .caption_style import warn_of_sentences
from .caption_text import find_choice, make_trained_caption, read_lines, with_trigger
from .control_files import find_controls, find_preview_controls
from .decoding import EXTENSIONS, Looked
from .examples import Control, Example, ScanReport
from .image_files import list_folder, warn_of_nested
from .look_memory import OPACITY, LookMemory
from .mask_files import find_masks, from_look
from .scan_notes import to_warnings


def scan(
    section: settings.Dataset,
    num_controls: tuple[int, int] | None = None,
    previews: settings.Preview | None = None,
    clip_rate: int | None = None,
    unmasked_weight: float = settings.Objective().unmasked_weight,
    memory: LookMemory | None = None,
) -> ScanReport:
    """Check every image, caption, control image and mask of the dataset.

    Args:
        section: the `[dataset]` section; folder paths are used as they are given. If its resolution is "auto", the
            caller has to call `warn_of_sizes` to get the warnings about small images.
        num_controls: smallest and largest number of control images that the model takes for one image; None skips the
            check.
        previews: the `[preview]` section, whose control images are checked too.
        clip_rate: frames per second of the clips that the model draws, 0 if it draws none; None skips the check.
        unmasked_weight: the job's `objective.unmasked_weight`; if it is 0, a mask that is black all over is a problem.
        memory: decodes the files, and knows those that were decoded before; None decodes all of them.

    Returns:
        The report. Faulty files never raise: all problems are reported together. Examples are in the order of the
        folders in the config, then sorted by path.
    """
    report = ScanReport()
    memory = memory or LookMemory(section)
    if not section.folders:
        report.problems.append(
            Message("dataset.folders: no image folder is given yet; add a [[dataset.folders]] table with path = '...'")
        )
    warn_of_nested(section, report)
    entries: list[tuple[int, Path, Path, Path | None]] = []
    for index in range(len(section.folders)):
        entries += list_folder(index, section, report, clip_rate)
    transparent = any(folder.mask == "alpha" for folder in section.folders)
    paths = [path for _, _, path, _ in entries]
    looks = memory.inspect_all(paths, OPACITY if transparent else None, report.edits)
    controls = find_controls(section, entries, num_controls, report, memory)
    masks = find_masks(section, unmasked_weight, entries, [from_look(look) for look in looks], report, memory)
    notes: dict[str, list[str]] = defaultdict(list)
    for (index, root, path, caption_path), look, given, mask in zip(entries, looks, controls, masks, strict=True):
        folder = section.folders[index]
        if look.error:
            report.problems.append(about(path, look.error))
        caption = _read_trained_caption(path, caption_path, index, section, report)
        if look.error or caption is None or given is None:
            continue
        _note_oddities(path, look, given, notes)
        if not section.wildcards and (choice := find_choice(caption)):
            notes["choices"].append(f"{path} ({choice})")
        report.counts["controls"] += len(given)
        report.counts["masked"] += mask is not None
        report.counts["converted"] += look.converted
        report.examples += [
            Example(
                path=path,
                caption=caption,
                folder_index=index,
                relative=path.relative_to(root).as_posix(),
                repeats=folder.repeats,
                width=look.width,
                height=look.height,
                image_sha256=look.sha256,
                controls=given,
                frames=frames,
                begins=look.timeline.find_unique_start(frames[0]) if frames and look.timeline else None,
                mask=mask,
                edit=report.edits[path],
            )
            for frames in _cut_pieces(path, look.timeline, section, clip_rate, report, notes)
        ]
    _sum_up_uncaptioned(report, section)
    _note_copies(report, notes)
    _sum_up(report, notes, section)
    if previews is not None:
        report.problems += find_preview_controls(previews, section, num_controls, memory)[1]
    _sum_up_skipped(report)
    return report


def _sum_up_skipped(report: ScanReport) -> None:
    """Warn of the images that are skipped for having no caption."""
    if skipped := report.counts["skipped"]:
        report.warnings.append(
            Plural(
                "{count} image without a caption was skipped (missing_caption = 'skip')",
                "{count} images without a caption were skipped (missing_caption = 'skip')",
            )(count=skipped)
        )
        if not report.examples and not report.problems:
            report.problems.append(
                Message("dataset: every image was skipped, because none has a caption (missing_caption = 'skip')")
            )


def _sum_up(report: ScanReport, notes: dict[str, list[str]], section: settings.Dataset) -> None:
    """Count the examples, and turn the notes into warnings."""
    report.counts["images"] = len(report.examples)
    report.counts["copies"] = len(notes["copies"])
    report.warnings += to_warnings(notes)
    report.warnings += warn_of_sentences(list_file_captions(report.examples), section)
    if isinstance(section.resolution, int):
        warn_of_sizes(report, section, section.resolution)


def list_file_captions(examples: Sequence[Example]) -> list[str]:
    """Return the caption of each file once, however many pieces are cut out of it."""
    return [example.caption for example in {example.file_uid: example for example in examples}.values()]


def _cut_pieces(
    path: Path,
    timeline: clips.Timeline | None,
    section: settings.Dataset,
    clip_rate: int | None,
    report: ScanReport,
    notes: dict[str, list[str]],
) -> list[tuple[int, ...]]:
    """Return the frame numbers of each example of a file: an empty tuple for an image, a tuple per piece of a clip."""
    if timeline is None:
        return [()]
    rate = clip_rate if section.fps == "auto" else section.fps
    if not rate:
        raise ValueError("dataset.fps = 'auto' needs clip_rate")
    numbers = clips.resample(timeline, rate)
    pieces = clips.cut_pieces(numbers, section.frames, section.clip)
    if not pieces:
        least = min(section.frames)
        report.problems.append(
            Message(
                "{path} has {count} frames at {rate} a second, but the smallest of dataset.frames is {least}; add a "
                "smaller length, or remove the video",
                path=path,
                count=len(numbers),
                rate=f"{rate:g}",
                least=least,
            )
        )
        return []
    if len(pieces[0]) < max(section.frames):
        notes["shorter"].append(
            Message("{path} ({count} of {total})", path=path, count=len(pieces[0]), total=len(numbers))
        )
    if len(set(numbers)) < len(numbers):
        notes["slower"].append(
            Message("{path} ({count} for {total})", path=path, count=len(timeline.starts), total=len(numbers))
        )
    report.counts["clips"] += 1
    report.counts["clip_frames"] += len(numbers)
    return pieces


def warn_of_sizes(report: ScanReport, section: settings.Dataset, resolution: int) -> None:
    """Add warnings about images that are small or narrow for this resolution.

    `scan` calls this itself unless the resolution is "auto".
    """
    notes: dict[str, list[str]] = defaultdict(list)
    for example in {example.file_uid: example for example in report.examples}.values():
        width, height = example.width, example.height
        side = section.folders[example.folder_index].resolution or resolution
        if width * height < side**2:
            if 4 * width * height < side**2:
                notes["tiny"].append(f"{example.path} ({width} x {height})")
            notes["upscaled" if section.upscale else "small"].append(f"{example.path} ({width} x {height})")
        aspect = max(width, height) / min(width, height)
        if section.buckets and aspect > section.max_aspect:
            notes["wide"].append(f"{example.path} ({aspect:.2f})")
    report.counts["upscaled"] = len(notes["upscaled"])
    report.warnings += to_warnings(notes)


def _note_oddities(path: Path, look: Looked, controls: Sequence[Control], notes: dict[str, list[str]]) -> None:
    """Note what is unusual about an image file and its control images, although they can be read."""
    if look.format and look.format != EXTENSIONS[path.suffix.lower()]:
        notes["extension"].append(f"{path} ({look.format})")
    if look.profile_problem:
        notes["profile"].append(Message("{path} ({line})", path=path, line=look.profile_problem))
    if look.frames > 1 and look.timeline is None:
        notes["animated"].append(f"{path} ({look.frames})")
    for control in controls:
        if not has_same_shape((look.width, look.height), (control.width, control.height)):
            notes["shapes"].append(f"{control.path} ({control.width} x {control.height})")


def _note_copies(report: ScanReport, notes: dict[str, list[str]]) -> None:
    """Note images with equal bytes.

    A file that is reached through two folder entries is not a copy: `warn_of_nested` reports it.
    """
    first: dict[str, Path] = {}
    for example in report.examples:
        original = first.setdefault(example.image_sha256, example.path)
        if original != example.path and os.path.realpath(original) != os.path.realpath(example.path):
            notes["copies"].append(f"{example.path} (of {original})")


def _read_trained_caption(
    path: Path, caption_path: Path | None, index: int, section: settings.Dataset, report: ScanReport
) -> str | None:
    """Return the caption to train with; None if there is none, and the report then says why."""
    trigger, folder = section.find_trigger(index), section.folders[index]
    lines: list[str] = []
    if caption_path is not None:
        try:
            lines = read_lines(caption_path, section.caption_lines)
        except OSError as error:
            report.problems.append(Message("{path} cannot be read: {why}", path=caption_path, why=reason(error)))
            return None
        except ValueError as error:
            report.problems.append(about(caption_path, error))
            return None
    if lines:
        report.counts["triggered"] += any(with_trigger(line, trigger) != line for line in lines)
        return "\n".join(make_trained_caption(line, trigger, folder.prefix, folder.suffix) for line in lines)
    what = Message("no caption ({file})", file=f"{path.stem}.txt")
    if caption_path:
        what = Message("an empty caption ({file})", file=caption_path.name)
    if section.missing_caption == "skip":
        report.counts["skipped"] += 1
        return None
    if section.missing_caption == "trigger" and trigger.strip():
        report.counts["no_caption"] += 1
        return make_trained_caption(trigger.strip(), trigger, folder.prefix, folder.suffix)
    if section.missing_caption == "trigger":
        line = Message(
            "{path} has {what}; write a caption, because this folder has no trigger word to replace it",
            path=path,
            what=what,
        )
    else:
        line = Message(
            "{path} has {what}; write a caption, or set dataset.missing_caption to 'trigger' or 'skip'",
            path=path,
            what=what,
        )
    report.uncaptioned.append((path, line))
    return None


def _sum_up_uncaptioned(report: ScanReport, section: settings.Dataset) -> None:
    """Make one problem of all images without a caption."""
    if len(report.uncaptioned) < 2:
        report.problems += [line for _, line in report.uncaptioned]
        return
    values = {"count": len(report.uncaptioned), "files": first_few([str(path) for path, _ in report.uncaptioned])}
    if section.missing_caption == "trigger":
        line = Message(
            "{count} images have no caption, and their folder has no trigger word to replace it: {files}. Write "
            "captions (`lora-fp8 caption`), or set dataset.trigger",
            **values,
        )
    else:
        line = Message(
            "{count} images have no caption: {files}. Write captions (`lora-fp8 caption`), or set "
            "dataset.missing_caption to 'trigger' or 'skip'",
            **values,
        )
    report.problems.append(line)


def describe(report: ScanReport) -> list[str]:
    """Return lines of figures about a scan, for people to read; warnings and problems are not among them."""
    counts, examples = report.counts, report.examples
    per_epoch = sum(example.repeats for example in examples)
    lines: list[str] = [
        Plural(
            "{count} image, {per_epoch} per epoch with repeats",
            "{count} images, {per_epoch} per epoch with repeats",
        )(
            count=len(examples),
            per_epoch=format_digits(per_epoch),
        )
    ]
    if examples:
        small = min(examples, key=lambda example: example.width * example.height)
        large = max(examples, key=lambda example: example.width * example.height)
        smallest, largest = f"{small.width} x {small.height}", f"{large.width} x {large.height}"
        lines.append(Message("sizes from {smallest} to {largest}", smallest=smallest, largest=largest))
        different = len({example.caption for example in examples})
        lines.append(Plural("{count} caption for all", "{count} different captions")(count=different))
    for name, template in COUNTED.items():
        if name == "clips" and counts["clips"]:
            lengths = Counter(len(example.frames) for example in examples if example.frames)
            lines.append(
                template(
                    count=counts["clips"],
                    lines=Joined(
                        ", ",
                        [
                            Message("{number} of {length} frames", number=number, length=length)
                            for length, number in sorted(lengths.items())
                        ],
                    ),
                    used=sum(length * number for length, number in lengths.items()),
                    frames=counts["clip_frames"],
                )
            )
        elif counts[name]:
            lines.append(template(count=counts[name]))
    return lines


COUNTED = {
    "converted": Plural(
        "{count} image converted from its colour profile to sRGB",
        "{count} images converted from their colour profile to sRGB",
    ),
    "controls": Plural("{count} control image", "{count} control images"),
    "masked": Plural("{count} image with a mask", "{count} images with a mask"),
    "excluded": Plural("{count} image excluded from training", "{count} images excluded from training"),
    "edited": Plural("{count} image turned or cropped", "{count} images turned or cropped"),
    "clips": Plural(
        "{count} clip: {lines}, {used} of {frames} frames at dataset.fps",
        "{count} clips: {lines}, {used} of {frames} frames at dataset.fps",
    ),
    "triggered": Plural(
        "{count} caption had the trigger word added at the start",
        "{count} captions had the trigger word added at the start",
    ),
    "no_caption": Plural(
        "{count} image without a caption uses the trigger word as caption",
        "{count} images without a caption use the trigger word as caption",
    ),
}
"""Counts of a scan that are reported where they are not 0."""
