"""Examine a dataset: everything worth knowing about its images and captions before training on it.

`examine` decodes every image, reads every caption, and returns figures (sizes, aspect ratios, buckets and what their
crops cut off, tags, caption lengths) and findings. A *finding* is one kind of observation with the files that it
applies to, what it means, and what to do about it: a *problem* prevents training, a *warning* costs quality, a *note*
is good to know. Nothing is written into the user's folders.

Estimates are marked as such. Near-duplicates are images whose 256-bit difference hashes differ in few bits (a bit says
whether a cell of a 17 x 16 grey thumbnail is darker than its left neighbour); mirrored or strongly cropped copies are
not found. Fine detail is the variance of a Laplacian, at an area of at most 512 x 512: it is low for blurred images,
and for smooth ones too. Tokens are counted roughly, by words, punctuation marks and ideographs.

The first frame of a clip is examined as an image is, and the whole clip is decoded for its length.

This module does not import torch: the web page starts it as a separate program, which should answer at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .. import settings
from ..common.writing import atomic_write
from ..errors import UserError
from . import buckets, captions, clips, decoding, images
from .caption_style import find_sentences_used_as_tags, shorten

FACTS_VERSION = 4
"""Increase it when `_measure` or `decoding.light_of` changes: remembered facts of other versions are measured again."""

SAME_BITS = 10
"""Largest number of differing bits, of 256, between near-duplicates."""

LITTLE_DETAIL = 20.0
"""Variance of the Laplacian of 8-bit greys below which an image is reported."""

MUCH_CUT = 0.2
"""Fraction of an image that a crop may cut off without being reported."""

KINDS = {
    # kind: (level, what it is, what to do)
    "folder": ("warning", "{detail}", "look at the folder"),
    "mask": (
        "warning",
        "{detail}",
        "draw a mask for each picture, white where it is trained, of the picture's shape; see dataset.folders, mask",
    ),
    "mask_outside": (
        "warning",
        "its mask is white only where the crop cuts it off",
        "crop the picture and its mask yourself, or raise dataset.max_aspect",
    ),
    "unreadable": ("problem", "cannot be used: {detail}", "save the picture again, or take it out"),
    "caption_encoding": (
        "problem",
        "caption {detail}",
        "save it as UTF-8; `lora-fp8 dataset edit FOLDER --recode gb18030` does it for all in that encoding",
    ),
    "caption_missing": (
        "problem",
        "no caption ({detail})",
        "write one, run `lora-fp8 caption`, or set dataset.missing_caption to 'trigger' or 'skip'",
    ),
    "caption_empty": (
        "problem",
        "the caption {detail} is empty",
        "write one, run `lora-fp8 caption`, or set dataset.missing_caption to 'trigger' or 'skip'",
    ),
    "caption_damaged": (
        "problem",
        "the caption {detail} was damaged, as by a crash",
        "run `lora-fp8 dataset repair FOLDER`, which restores it from the journal of caption edits",
    ),
    "caption_half_done": (
        "warning",
        "{detail}",
        "a crash or a full disk left this edit half done; `lora-fp8 dataset repair FOLDER` takes it back",
    ),
    "caption_leftover": (
        "note",
        "{detail}",
        "temporary files of a caption edit that was killed; `lora-fp8 dataset repair FOLDER` deletes them",
    ),
    "clip_refused": ("problem", "a video of {detail}, and this model is trained on pictures", "take it out"),
    "clip_unset": (
        "problem",
        "a video of {detail}, and dataset.frames is empty",
        "set dataset.frames to the lengths that clips are to be trained at, or take it out",
    ),
    "clip_short": (
        "problem",
        "{detail}, fewer than the least of dataset.frames",
        "add a smaller length, or take it out",
    ),
    "clip_shorter": (
        "note",
        "{detail}: too short for the longest of dataset.frames, trained at a shorter length",
        "find a longer one if it is the movement that matters",
    ),
    "clip_slower": (
        "note",
        "{detail} by dataset.fps, so that some are shown twice",
        "nothing, or lower dataset.fps",
    ),
    "duplicate": ("warning", "the same file as {detail}", "take one out, or raise repeats if it should count more"),
    "near_duplicate": (
        "warning",
        "looks like {detail}",
        "look at both; keep the better one, as what is seen twice is learned twice",
    ),
    "tiny": (
        "warning",
        "{detail}: less than a quarter of the training's pixels",
        "find a larger one, or take it out; enlarged, it teaches blur",
    ),
    "small": (
        "note",
        "{detail}: fewer pixels than the training",
        "it is enlarged; set dataset.upscale = false to train it at its own size",
    ),
    "cut": ("warning", "the crop leaves out {detail}", "crop it yourself, or raise dataset.max_aspect"),
    "little_detail": (
        "note",
        "little fine detail ({detail}, a guess from edges): blurred, out of focus, or simply smooth",
        "look at it at full size",
    ),
    "animated": ("note", "{detail} frames or pages, of which the first is used", "save the one that you mean"),
    "transparent": ("note", "transparent", "it is laid on dataset.background; choose a colour that fits"),
    "cmyk": ("note", "made for print (CMYK)", "colours are converted to sRGB; look at the result"),
    "turned": ("note", "stored turned (EXIF orientation {detail})", "nothing: it is trained upright"),
    "profile": (
        "warning",
        "colour profile that cannot be used ({detail})",
        "it is read as sRGB; save it again as sRGB if the colours are off",
    ),
    "extension": ("note", "is a {detail}, whatever its name says", "nothing: it is read all the same"),
    "caption_repeated": (
        "note",
        "the caption is that of {detail} other pictures",
        "say what differs, or accept that nothing of it can be asked for by words",
    ),
    "caption_long": (
        "warning",
        "about {detail} tokens, and the text encoder reads 75 (a rough count)",
        "shorten it, or put what matters first; `lora-fp8 check CONFIG` counts exactly",
    ),
    "trigger_missing": (
        "note",
        "the caption lacks the trigger word {detail}",
        "training puts it in front; `lora-fp8 dataset edit FOLDER --trigger WORD` writes it into the file",
    ),
    "choice_unused": (
        "note",
        "the caption has the choice {detail}, and dataset.wildcards is off",
        "set dataset.wildcards = true to have one of its words drawn each time; else it is trained as it is written",
    ),
    "sentences_shuffled": (
        "warning",
        "the caption looks like sentences, and is shuffled at its commas: {detail}",
        "set dataset.shuffle_tags = false and dataset.tag_dropout = 0",
    ),
    "sentences_cut": (
        "warning",
        "the caption looks like sentences, and loses parts at its commas: {detail}",
        "set dataset.tag_dropout = 0",
    ),
    "uneven": (
        "warning",
        "{detail}",
        "set repeats so that every folder is seen about as often as it should count",
    ),
    "kohya_folder": (
        "note",
        "named as kohya's trainers have it, where {detail} would be its repeats",
        "here repeats are set in the config: dataset.folders, repeats",
    ),
    "lonely_bucket": (
        "note",
        "the only picture of bucket {detail}",
        "with a batch size above 1 it makes a batch of its own; crop it to the shape of others if that matters",
    ),
}
"""All kinds of findings. The web page has its own texts for them, in each of its languages."""

LEVELS = ("problem", "warning", "note")


@dataclass
class Finding:
    """One kind of finding, and the files that it applies to, each with the detail that completes its sentence."""

    kind: str
    level: str
    files: list[tuple[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, with the sentence of each file."""
        files = [{"file": file, "detail": detail, "what": self.what(detail)} for file, detail in self.files]
        return {"kind": self.kind, "level": self.level, "do": KINDS[self.kind][2], "files": files}

    def what(self, detail: str) -> str:
        """Return the sentence for a file, completed with its detail."""
        return KINDS[self.kind][1].format(detail=detail)

    def lines(self, most: int = 8) -> list[str]:
        """Return lines for people, with at most `most` files."""
        shown = [f"  {file}: {self.what(detail)}" if file else f"  {detail}" for file, detail in self.files[:most]]
        more = len(self.files) - most
        shown += [f"  and {more} more"] if more > 0 else []
        return [f"{self.level}, {len(self.files)}:", *shown, f"  -> {KINDS[self.kind][2]}"]


@dataclass(frozen=True)
class Facts:
    """The facts about one image or video file. If `error` is not empty, nothing else is valid.

    Attributes:
        mode: Pillow's mode of the file.
        opacity: see `decoding.opacity_of`; for a mask, see `decoding.light_of`.
        orientation: EXIF orientation, 1 to 8.
        look: the difference hash, as 64 hex digits.
        detail: variance of the Laplacian.
        grey: mean of the greys, 0 to 255.
        seconds: length of a clip, as a fraction; "" for an image.

    The others are as in `decoding.Looked`.
    """

    error: str = ""
    width: int = 0
    height: int = 0
    sha256: str = ""
    format: str = ""
    frames: int = 1
    profile_problem: str = ""
    mode: str = ""
    opacity: decoding.Light | None = None
    orientation: int = 1
    look: str = ""
    detail: float = 0.0
    grey: float = 0.0
    seconds: str = ""


@dataclass
class Diagnosis:
    """Figures and findings of a dataset.

    Attributes:
        pictures: file, width and height of each readable image; for clips also seconds, fps (on average), frames,
            pieces (how many are cut out of it) and length (frames of a piece).
        findings: most severe first.
        buckets: size, count, cut and most_cut (mean and largest fraction cut off) and enlarged (count) of each bucket.
        tags: number of captions with each tag.
        counts: other figures by name.
        resolution, step: what the buckets were computed with.
    """

    pictures: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    buckets: list[dict[str, Any]] = field(default_factory=list)
    tags: Counter[str] = field(default_factory=Counter)
    counts: dict[str, int] = field(default_factory=dict)
    resolution: int = 0
    step: int = 0

    @property
    def ok(self) -> bool:
        """True if training could start."""
        return not any(finding.level == "problem" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "ok": self.ok,
            "counts": self.counts,
            "resolution": self.resolution,
            "bucket_step": self.step,
            "sizes": _sizes(self.pictures),
            "shapes": _shapes(self.pictures),
            "buckets": self.buckets,
            "findings": [finding.to_json() for finding in self.findings],
            "tags": self.tags.most_common(),
            "pictures": self.pictures,
        }

    def lines(self) -> list[str]:
        """Return the report for people."""
        counts = self.counts
        lines = [
            f"{counts['pictures']} pictures, {counts['shown']} per epoch with repeats; {counts['captions']} captions, "
            f"{counts['different_captions']} different, {counts['shortest_words']} to {counts['longest_words']} words"
        ]
        if counts["clips"]:
            lines.append(f"{counts['clips']} of them clips, of which {counts['pieces']} pieces are cut")
        if counts["masked"]:
            lines.append(f"{counts['masked']} with a mask")
        if self.pictures:
            sizes, shapes = _sizes(self.pictures), _shapes(self.pictures)
            lines.append(f"sizes {sizes['smallest']} to {sizes['largest']}, median {sizes['median_megapixels']:.2f} MP")
            lines.append("shapes " + ", ".join(f"{shape}: {count}" for shape, count in shapes.items()))
            lines.append(f"buckets at {self.resolution} in steps of {self.step}:")
            lines += [
                f"  {one['size']}: {one['count']} {'clips' if one['size'].count('x') > 1 else 'pictures'}, "
                f"crops leave out {one['cut']:.0%} on average, at most {one['most_cut']:.0%}"
                + (f", {one['enlarged']} enlarged" if one["enlarged"] else "")
                for one in self.buckets
            ]
        if self.tags:
            lines.append("tags " + ", ".join(f"{tag}: {count}" for tag, count in self.tags.most_common(20)))
        for finding in self.findings:
            lines += finding.lines()
        return lines


# ------------------------------------------------------------------------------------------------------------- measure


def _measure(image: Image.Image, rgb: Image.Image) -> dict[str, Any]:
    """Measure what needs the pixels: `image` is as stored in the file, `rgb` as it is trained."""
    grey = rgb.convert("L")
    cells = np.asarray(grey.resize((17, 16), Image.Resampling.BOX), dtype=np.int16)
    small = grey
    if grey.width * grey.height > 512**2:
        scale = (512**2 / (grey.width * grey.height)) ** 0.5
        small = grey.resize((max(3, round(grey.width * scale)), max(3, round(grey.height * scale))), 3)
    values = np.asarray(small, dtype=np.float32)
    detail = 0.0
    if min(values.shape) >= 3:
        middle = values[1:-1, 1:-1]
        laplacian = 4 * middle - values[:-2, 1:-1] - values[2:, 1:-1] - values[1:-1, :-2] - values[1:-1, 2:]
        detail = float(laplacian.var())
    return {
        "mode": image.mode,
        "opacity": decoding.opacity_of(image, rgb),
        "orientation": int(image.getexif().get(0x0112, 1) or 1),
        "look": np.packbits(cells[:, 1:] < cells[:, :-1]).tobytes().hex(),
        "detail": round(detail, 2),
        "grey": round(float(cells.mean()), 2),
    }


def _facts(looked: decoding.Looked) -> Facts:
    if looked.error:
        return Facts(error=looked.error)
    known = {name: getattr(looked, name) for name in ("width", "height", "sha256", "format", "frames")}
    timeline = looked.timeline
    seconds = "" if timeline is None else str(timeline.end - timeline.starts[0])
    return Facts(**known, profile_problem=looked.profile_problem, seconds=seconds, **looked.measured)


def is_remembered(file: Path) -> bool:
    """Return True if the file is empty or begins as the `remember` files of `examine` do."""
    try:
        with open(file, "rb") as read:
            return read.read(len(_REMEMBERED)) in (_REMEMBERED, b"")
    except OSError:
        return False


_REMEMBERED = b'{"version": '


class _Memory:
    """The measured facts of images and masks, which are kept until a file's size or modification time changes.

    Args:
        file: where the facts are kept between runs; None keeps nothing.
        section: max_pixels, background and frames are read.
    """

    def __init__(self, file: Path | None, section: settings.Dataset) -> None:
        self.file, self.section = file, section
        self.kept: dict[str, Any] = {"version": FACTS_VERSION, "limits": [section.max_pixels, bool(section.frames)]}
        if file is not None:
            # A file that is missing, damaged or something else remembers nothing: all is measured again.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                stored = json.loads(file.read_text(encoding="utf-8"))
                self.kept = stored if all(stored[key] == value for key, value in self.kept.items()) else self.kept

    def facts(
        self,
        kind: str,
        paths: Sequence[Path],
        measure: Callable[[Image.Image, Image.Image], Any],
        progress: Callable[[int, int], None] | None = None,
    ) -> list[Facts]:
        """Return the facts of all files of one kind, in order; measure those that are not remembered.

        Args:
            kind: "pictures" or "masks"; a call replaces what is remembered of its kind.
            paths: all files of this kind.
            measure: see `decoding.look_all`; returns the fields of `Facts` that need pixels.
            progress: called with (files done, files in all).
        """
        known = self.kept.get(kind, {})
        stamps = []
        for path in paths:
            try:
                status = path.stat()
                stamps.append([status.st_size, status.st_mtime_ns])
            except OSError:
                stamps.append([])
        facts: dict[int, Facts] = {}
        for index, (path, stamp) in enumerate(zip(paths, stamps, strict=True)):
            entry = known.get(str(path))
            if entry is not None and entry[0] == stamp:
                with contextlib.suppress(TypeError):
                    facts[index] = _recalled(entry[1])
        missing = [index for index in range(len(paths)) if index not in facts]
        done = len(facts)
        looks = decoding.look_all([paths[i] for i in missing], self.section, measure)
        for index, looked in zip(missing, looks, strict=True):
            facts[index] = _facts(looked)
            done += 1
            if progress is not None:
                progress(done, len(paths))
        if missing:
            self.kept[kind] = {str(path): [stamps[i], asdict(facts[i])] for i, path in enumerate(paths)}
            self._save()
        return [facts[index] for index in range(len(paths))]

    def _save(self) -> None:
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self.file, json.dumps(self.kept).encode())
        except OSError as error:
            raise UserError(f"{self.file}: cannot be written ({error.strerror})") from None

    def masks(self, paths: Sequence[Path], section: settings.Dataset) -> list[decoding.Looked]:
        """Decode masks as `images.look_at_masks` does, with what is remembered of them."""
        facts = self.facts("masks", paths, lambda image, rgb: {"opacity": decoding.light_of(image, rgb)})
        return [
            decoding.Looked(fact.error, fact.width, fact.height, fact.sha256, measured=fact.opacity) for fact in facts
        ]


def _recalled(kept: dict[str, Any]) -> Facts:
    if kept["opacity"] is None:
        return Facts(**kept)
    least, most, white = kept["opacity"]
    return Facts(**kept | {"opacity": decoding.Light(least, most, tuple(white))})


# ------------------------------------------------------------------------------------------------------------- examine


CLIP_TOKENS = 75
"""Tokens of a caption that CLIP's text encoders read."""

_IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"


def rough_tokens(caption: str) -> int:
    """Estimate the number of tokens of a caption from its words (long ones count as several), marks and ideographs."""
    pieces = re.findall(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+|[^\w\s]", caption)
    return sum(1 + (len(piece) - 1) // 8 for piece in pieces)


@dataclass(frozen=True)
class Target:
    """What the images are for: numbers that come from the model or from other sections of the job.

    Attributes:
        resolution, bucket_step: numbers for the buckets, in pixels.
        caption_tokens: tokens of a caption that the text encoders read; 0 for no limit that is worth a finding.
        clip_rate, unmasked_weight: as in `images.scan`.
    """

    resolution: int
    bucket_step: int
    caption_tokens: int = 0
    clip_rate: int | None = None
    unmasked_weight: float = settings.Objective().unmasked_weight

    @classmethod
    def of(cls, job: settings.Job, Family: Any) -> Target:
        """Return a job's target, with the family's numbers where the config says "auto"."""
        section = job.dataset
        models = [name for name in Family.text_parts.values() if not name.endswith("Tokenizer")]
        return cls(
            resolution=Family.native_resolution if section.resolution == "auto" else section.resolution,
            bucket_step=Family.bucket_step if section.bucket_step == "auto" else section.bucket_step,
            # Beside CLIP, other families have an encoder that reads longer captions.
            caption_tokens=CLIP_TOKENS if all(name.startswith("CLIPText") for name in models) else 0,
            clip_rate=Family.clips[1],
            unmasked_weight=job.objective.unmasked_weight,
        )


def examine(
    section: settings.Dataset,
    target: Target,
    *,
    remember: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Diagnosis:
    """Examine every image and caption.

    Args:
        section: `[dataset]`.
        target: what the images are for.
        remember: file that keeps measured facts, so that the next examination of the same images is quick.
        progress: called with (images done, images in all).

    Raises:
        UserError: the bucket numbers contradict each other, or `remember` cannot be written.
    """
    told = _Told()
    found, names = _list_images(section, told)
    memory = _Memory(remember, section)
    facts = memory.facts("pictures", [path for _, _, path, _ in found], _measure, progress)
    masks = _look_at_masks(section, target.unmasked_weight, found, facts, memory, told)
    own = _own_names(found, names)
    damaged = _look_at_edits(section, found, names, told)
    whole = [i for i, name in enumerate(names) if name not in damaged]
    texts = _look_at_captions(
        section, [found[i] for i in whole], [names[i] for i in whole], own, told, target.caption_tokens
    )
    usable = [i for i, fact in enumerate(facts) if not fact.error]
    cut = _look_at_files(section, found, names, facts, target.clip_rate, told)
    _look_for_copies([(names[i], facts[i]) for i in usable if names[i] in own], told)
    sides = [section.folders[index].resolution or target.resolution for index, *_ in found]
    entries = [(names[i], facts[i], sides[i], masks[i]) for i in usable]
    placed = _look_at_buckets(entries, cut, section, target.bucket_step, told)
    _look_at_balance(section, found, usable, told)
    clip_names = [names[i] for i in usable if _is_clip(facts[i], section)]
    repeats = [section.folders[index].repeats for index, *_ in found]
    return Diagnosis(
        pictures=[_told_of(names[i], facts[i], cut[names[i]]) for i in usable],
        findings=told.findings(),
        buckets=placed,
        tags=_count_tags(texts.values(), section.tag_separator),
        counts={
            "pictures": len(found),
            "readable": len(usable),
            "clips": len(clip_names),
            "masked": sum(mask is not None for mask in masks),
            "pieces": sum(len(cut[name]) for name in clip_names),
            "shown": sum(n * len(cut.get(name, [1])) for n, name in zip(repeats, names, strict=True)),
            **_count_captions(texts.values()),
        },
        resolution=target.resolution,
        step=target.bucket_step,
    )


def _list_images(section: settings.Dataset, told: _Told) -> tuple[list[Any], list[str]]:
    """Return the entries of `images.list_folder` for all folders, and the name of each in the dataset."""
    report = images.ScanReport()
    images.warn_of_nested(section, report)
    found = [
        entry
        for index in range(len(section.folders))
        for entry in images.list_folder(index, section, report, videos=True)
    ]
    told.add_report("folder", report)
    names = [path.relative_to(root).as_posix() for _, root, path, _ in found]
    if len(section.folders) > 1:
        names = [f"{index}/{name}" for (index, *_), name in zip(found, names, strict=True)]
    return found, names


def _own_names(found: list[Any], names: list[str]) -> set[str]:
    """Return the first name of each file.

    A folder may be listed twice, to be trained at two sizes: its files are not copies of themselves.
    """
    first: dict[str, str] = {}
    for name, (_, _, path, _) in zip(names, found, strict=True):
        first.setdefault(os.path.realpath(path), name)
    return set(first.values())


def _count_tags(texts: Iterable[str], separator: str) -> Counter[str]:
    """Return the number of captions that have each tag."""
    return Counter(tag for text in texts for tag in dict.fromkeys(captions.split_tags(text, separator)))


def _count_captions(texts: Collection[str]) -> dict[str, int]:
    """Return the figures about captions: how many there are, how many differ, and their lengths in words."""
    words = [len(text.split()) for text in texts]
    return {
        "captions": len(texts),
        "different_captions": len(set(texts)),
        "shortest_words": min(words, default=0),
        "longest_words": max(words, default=0),
    }


class _Told:
    """Collects findings; a call adds one file to a kind."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)

    def __call__(self, kind: str, file: str, detail: str = "", level: str = "") -> None:
        self.found[level or KINDS[kind][0], kind].append((file, detail))

    def add_report(self, kind: str, report: images.ScanReport) -> None:
        """Add the problems and warnings of a scan as findings of one kind."""
        for line in report.problems:
            self(kind, "", line, level="problem")
        for line in report.warnings:
            self(kind, "", line)

    def findings(self) -> list[Finding]:
        """Return the findings, most severe first, then in the order of `KINDS`."""
        order = list(KINDS)
        keys = sorted(self.found, key=lambda key: (LEVELS.index(key[0]), order.index(key[1])))
        return [Finding(kind, level, self.found[level, kind]) for level, kind in keys]


def _told_of(name: str, fact: Facts, cut: list[int]) -> dict[str, Any]:
    told: dict[str, Any] = {"file": name, "width": fact.width, "height": fact.height}
    if fact.seconds:
        seconds = float(Fraction(fact.seconds))
        rate = fact.frames / seconds if seconds else 0.0  # a single frame may have no duration
        told |= {"seconds": round(seconds, 3), "fps": round(rate, 3), "frames": fact.frames}
        told |= {"pieces": len(cut), "length": max(cut, default=0)}
    return told


def _is_clip(fact: Facts, section: settings.Dataset) -> bool:
    return bool(section.frames and fact.seconds)


def _look_at_clip(name: str, fact: Facts, section: settings.Dataset, clip_rate: int | None, told: _Told) -> list[int]:
    """Return the number of frames of each example in the file: [1] for an image."""
    if not fact.seconds:
        return [1]
    seconds = Fraction(fact.seconds)
    if not section.frames:  # an animation would be read as its first frame here, without seconds: this is a video
        told("clip_refused" if clip_rate == 0 else "clip_unset", name, f"{float(seconds):.3g} s")
        return []
    rate = clip_rate if section.fps == "auto" else section.fps
    if not rate:
        raise ValueError("dataset.fps = 'auto' needs clip_rate")
    count = clips.num_resampled(seconds, rate)
    cut = [len(piece) for piece in clips.pieces(range(count), section.frames, section.clip)]
    detail = f"{count} frames at {rate:g} a second"
    if not cut:
        told("clip_short", name, detail)
    elif cut[0] < max(section.frames):
        told("clip_shorter", name, detail)
    if fact.frames < count:
        told("clip_slower", name, f"{fact.frames} frames for the {count} asked for")
    return cut


def _look_at_masks(
    section: settings.Dataset,
    unmasked_weight: float,
    found: list[Any],
    facts: list[Facts],
    memory: _Memory,
    told: _Told,
) -> list[images.Mask | None]:
    """Find the mask of each image, and report problems with masks exactly as training does."""
    report = images.ScanReport()
    seen = [
        None
        if fact.error
        else images.Seen((fact.width, fact.height), fact.sha256, _is_clip(fact, section), fact.opacity)
        for fact in facts
    ]
    masks = images.find_masks(section, unmasked_weight, found, seen, report, memory.masks)
    told.add_report("mask", report)
    return masks


def _look_at_files(
    section: settings.Dataset,
    found: list[Any],
    names: list[str],
    facts: list[Facts],
    clip_rate: int | None,
    told: _Told,
) -> dict[str, list[int]]:
    """Report what is odd about each file. Returns what `_look_at_clip` does for each file that can be read, by name."""
    cut = {}
    for (index, *_), name, fact in zip(found, names, facts, strict=True):
        _look_at_picture(name, fact, told, _is_clip(fact, section), section.folders[index].mask)
        if not fact.error:
            cut[name] = _look_at_clip(name, fact, section, clip_rate, told)
    return cut


def _look_at_picture(name: str, fact: Facts, told: _Told, clip: bool, mask: str) -> None:
    if fact.error:
        told("unreadable", name, fact.error)
        return
    if fact.frames > 1 and not clip:
        told("animated", name, str(fact.frames))
    if fact.opacity is not None and fact.opacity.least < 255 and mask != "alpha":
        told("transparent", name)
    if fact.mode == "CMYK":
        told("cmyk", name)
    if fact.orientation in range(2, 9):
        told("turned", name, str(fact.orientation))
    if fact.profile_problem:
        told("profile", name, fact.profile_problem)
    if fact.format and fact.format != decoding.EXTENSIONS[os.path.splitext(name)[1].lower()]:
        told("extension", name, fact.format)
    if fact.detail < LITTLE_DETAIL:
        told("little_detail", name, f"{fact.detail:.1f}")


def _look_at_edits(section: settings.Dataset, found: list[Any], names: list[str], told: _Told) -> set[str]:
    """Report what crashes and killed caption edits left behind. Return the images whose captions are damaged."""
    of_stem = {
        (index, path.relative_to(root).with_suffix("").as_posix()): name
        for name, (index, root, path, _) in zip(names, found, strict=True)
    }
    damaged = set()
    for index, folder in enumerate(section.folders):
        try:
            repair = captions.repair(Path(folder.path), dry_run=True)
        except UserError:  # no such folder, which is reported elsewhere, or an edit is running in it
            continue
        for file in repair.restored:
            name = of_stem.get((index, os.path.splitext(file)[0]), file)
            damaged.add(name)
            told("caption_damaged", name, os.path.basename(file))
        if repair.title:
            told("caption_half_done", "", repair.title)
        for file in repair.swept:
            told("caption_leftover", "", file)
    return damaged


def _look_at_captions(
    section: settings.Dataset, found: list[Any], names: list[str], own: set[str], told: _Told, limit: int
) -> dict[str, str]:
    """Read all captions and report problems with them.

    Args:
        section: `[dataset]`.
        found: entries of `images.list_folder`.
        names: the image of each entry.
        own: names that no other entry of the same file has; only these count as repeated captions.
        told: takes the findings.
        limit: `caption_tokens` of the target.

    Returns:
        {image: caption} for the captions that can be read and are not empty.
    """
    texts: dict[str, str] = {}
    for name, (index, _, path, caption_path) in zip(names, found, strict=True):
        trigger = section.trigger_of(index).strip()
        helped = section.missing_caption == "skip" or section.missing_caption == "trigger" and trigger
        level = "warning" if helped else "problem"
        if caption_path is None:
            told("caption_missing", name, f"{path.stem}.txt", level=level)
            continue
        try:
            text = images.read_caption(caption_path)
        except OSError as error:
            told("caption_encoding", name, f"cannot be read: {error.strerror}")
            continue
        except ValueError as error:
            told("caption_encoding", name, f"{caption_path.name} {error}")
            continue
        if not text:
            told("caption_empty", name, caption_path.name, level=level)
            continue
        texts[name] = text
        if images.with_trigger(text, trigger) != text:
            told("trigger_missing", name, repr(trigger))
        if not section.wildcards and (choice := images.choice_in(text)):
            told("choice_unused", name, choice)
        if limit and (tokens := rough_tokens(images.with_trigger(text, trigger))) > limit:
            told("caption_long", name, str(tokens))
    times = Counter(text for name, text in texts.items() if name in own)
    for name, text in texts.items():
        if name in own and times[text] > 1:
            told("caption_repeated", name, str(times[text] - 1))
    _look_for_sentences(section, found, names, texts, told)
    return texts


def _look_for_sentences(
    section: settings.Dataset, found: list[Any], names: list[str], texts: dict[str, str], told: _Told
) -> None:
    """Report sentences that training would change as if they were tags, judging each caption with its trigger word."""
    trained = {
        name: images.with_trigger(texts[name], section.trigger_of(index))
        for name, (index, *_) in zip(names, found, strict=True)
        if name in texts
    }
    prose = set(find_sentences_used_as_tags(list(trained.values()), section))
    for name, caption in trained.items():
        if caption in prose:
            told("sentences_shuffled" if section.shuffle_tags else "sentences_cut", name, repr(shorten(texts[name])))


def _look_for_copies(entries: list[tuple[str, Facts]], told: _Told) -> None:
    """Report copies and images that look alike, each once, with the first image that it resembles."""
    first: dict[str, str] = {}
    rest: list[tuple[str, Facts]] = []
    for name, fact in entries:
        if fact.sha256 in first:
            told("duplicate", name, first[fact.sha256])
        else:
            first[fact.sha256] = name
            rest.append((name, fact))
    if len(rest) < 2:
        return
    hashes = np.frombuffer(bytes.fromhex("".join(fact.look for _, fact in rest)), dtype=np.uint64).reshape(-1, 4)
    greys = np.array([fact.grey for _, fact in rest])
    bits = np.bitwise_count(hashes).sum(axis=1)
    for i in range(1, len(rest)):
        different = np.bitwise_count(hashes[:i] ^ hashes[i]).sum(axis=1)
        # A uniform area has no darker neighbours: its hash says nothing.
        alike = (different <= SAME_BITS) & (np.abs(greys[:i] - greys[i]) < 12) & (bits[:i] >= 16) & (bits[i] >= 16)
        if alike.any():
            told("near_duplicate", rest[i][0], rest[int(np.argmax(alike))][0])


def _look_at_buckets(
    entries: list[tuple[str, Facts, int, images.Mask | None]],
    examples: dict[str, list[int]],
    section: settings.Dataset,
    step: int,
    told: _Told,
) -> list[dict[str, Any]]:
    groups: dict[buckets.Bucket, list[tuple[str, float, bool]]] = defaultdict(list)
    for name, fact, resolution, mask in entries:
        if not examples[name]:
            continue
        size = (fact.width, fact.height)
        try:
            place = buckets.place(
                size, resolution, step, max_aspect=section.max_aspect, buckets=section.buckets, upscale=section.upscale
            )
        except UserError as error:
            if not section.upscale and min(size) < step <= resolution:
                told("unreadable", name, str(error))
                continue
            raise
        cut = 1 - (place.bucket_wh[0] * place.bucket_wh[1]) / (place.resized_wh[0] * place.resized_wh[1])
        for length in examples[name]:
            bucket: buckets.Bucket = (*place.bucket_wh, length) if length > 1 else place.bucket_wh
            groups[bucket].append((name, cut, place.upscaled))
        if cut > MUCH_CUT:
            told("cut", name, f"{cut:.0%}")
        if mask and mask.white and any(mask.white) and not place.shows(mask.white):
            told("mask_outside", name)
        shown = f"{size[0]} x {size[1]}"
        if 4 * size[0] * size[1] < resolution**2:
            told("tiny", name, shown)
        elif place.upscaled:
            told("small", name, shown)
    rows = []
    for bucket, members in sorted(groups.items()):
        cuts = [cut for _, cut, _ in members]
        rows.append(
            {
                "size": buckets.named(bucket),
                "count": len(members),
                "cut": round(sum(cuts) / len(cuts), 4),
                "most_cut": round(max(cuts), 4),
                "enlarged": sum(enlarged for *_, enlarged in members),
            }
        )
        if len(members) == 1 and len(entries) > 1:
            told("lonely_bucket", members[0][0], buckets.named(bucket))
    return rows


def _look_at_balance(section: settings.Dataset, found: list[Any], usable: list[int], told: _Told) -> None:
    """Report folders of the config (with repeats), or subfolders of a single one, that are trained far more often."""
    seen: Counter[str] = Counter()
    kohya: dict[str, str] = {}
    for i in usable:
        index, root, path, _ = found[i]
        folder = section.folders[index]
        below = path.relative_to(root).parts
        inner = below[0] if len(below) > 1 else "."
        seen[folder.path if len(section.folders) > 1 else inner] += folder.repeats
        for part in (root.name, *below[:-1]):
            if match := re.fullmatch(r"(\d+)_.+", part):
                kohya[part] = match[1]
    if len(seen) > 1 and max(seen.values()) >= 4 * min(seen.values()):
        shares = ", ".join(f"{name}: {count}" for name, count in seen.most_common(8))
        told("uneven", "", f"pictures shown per epoch differ fourfold or more: {shares}")
    for part, repeats in kohya.items():
        told("kohya_folder", part, repeats)


def _sizes(pictures: list[dict[str, Any]]) -> dict[str, Any]:
    if not pictures:
        return {}
    ordered = sorted(pictures, key=lambda one: one["width"] * one["height"])
    areas = [one["width"] * one["height"] for one in ordered]
    return {
        "smallest": f"{ordered[0]['width']} x {ordered[0]['height']}",
        "largest": f"{ordered[-1]['width']} x {ordered[-1]['height']}",
        "median_megapixels": round(float(np.median(areas)) / 1e6, 3),
    }


SHAPES = (("2:1", 2), ("16:9", 16 / 9), ("3:2", 1.5), ("4:3", 4 / 3), ("5:4", 1.25), ("1:1", 1))


def _shapes(pictures: list[dict[str, Any]]) -> dict[str, int]:
    """Count the images nearest to each common aspect ratio, by its name, most frequent first."""
    named = [*SHAPES, *((":".join(reversed(name.split(":"))), 1 / ratio) for name, ratio in SHAPES if ratio > 1)]
    found: Counter[str] = Counter()
    for one in pictures:
        ratio = one["width"] / one["height"]
        found[min(named, key=lambda shape: abs(np.log(ratio / shape[1])))[0]] += 1
    return dict(found.most_common())
