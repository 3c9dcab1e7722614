"""The dataset's doctor: everything worth knowing about a folder of pictures before anything is trained on it.

`examine` decodes every picture, reads every caption, and gives figures (sizes, shapes, buckets and what their crops cut
off, tags, caption lengths) and findings. A *finding* is one kind of thing, with the files that it is true of, what it
is and what to do about it; a *problem* stops a training, a *warning* costs quality, a *note* is good to know. Nothing
is written into the user's folders.

What is estimated says so. Near-duplicates are pictures whose 256-bit difference hash (is each cell of a 17 x 16 grey
miniature darker than its neighbour?) differs in few bits; mirrored or strongly cropped copies are not found. Fine
detail is the variance of a Laplacian at the training's area: low for blurred pictures, and for smooth ones, too. Tokens
are counted by words, marks and ideographs, which is rough.

Of a clip the first frame is looked at as a picture is, and the whole is decoded for its length.

No torch here: the web page starts this as a program of its own, and it should answer at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lora_fp8 import config
from lora_fp8.config import UserError
from lora_fp8.data import buckets, captions, clips, decoding, images
from lora_fp8.run import atomic_write

FACTS_VERSION = 4
"""Raise it when `_measure` or `decoding.light_of` changes: remembered facts of another version are measured again."""

BUCKET_STEP = 64
"""families.base's default, where dataset.bucket_step is "auto"."""

SAME_BITS = 10
"""Near-duplicates differ in at most so many of 256 bits."""

LITTLE_DETAIL = 20.0
"""Variance of the Laplacian, of 8-bit greys, below which a picture is told of."""

MUCH_CUT = 0.2
"""Share of a picture beyond which a crop is told of."""

CLIP_TOKENS = 75
"""What CLIP's text encoders read of a caption."""

CLIP_FAMILIES = ("sd15", "sd2", "sdxl")

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
"""Every kind of finding. The page has the same sentences in its languages."""

LEVELS = ("problem", "warning", "note")


@dataclass
class Finding:
    """One kind of thing and the files that it is true of, each with the detail that its sentence names."""

    kind: str
    level: str
    files: list[tuple[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        files = [{"file": file, "detail": detail, "what": self.what(detail)} for file, detail in self.files]
        return {"kind": self.kind, "level": self.level, "do": KINDS[self.kind][2], "files": files}

    def what(self, detail: str) -> str:
        return KINDS[self.kind][1].format(detail=detail)

    def lines(self, most: int = 8) -> list[str]:
        shown = [f"  {file}: {self.what(detail)}" if file else f"  {detail}" for file, detail in self.files[:most]]
        more = len(self.files) - most
        shown += [f"  and {more} more"] if more > 0 else []
        return [f"{self.level}, {len(self.files)}:", *shown, f"  -> {KINDS[self.kind][2]}"]


@dataclass(frozen=True)
class Facts:
    """What one picture file is; `error` alone counts if it is not empty."""

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
    """opacity: see `decoding.opacity_of`; look: 64 hex digits of the difference hash; detail: variance of the
    Laplacian; grey: the mean, 0 to 255; seconds: how long a clip lasts, as a fraction"""


@dataclass
class Diagnosis:
    """Figures and findings of a dataset.

    `pictures` has file, width and height of each picture that can be read, and of a clip seconds, fps (on average),
    frames, pieces (how many are cut out of it) and length (frames of a piece).
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
        """Whether a training could start."""
        return not any(finding.level == "problem" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
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
    """Facts that need the pixels: `image` is as in the file, `rgb` as it is trained."""
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


class _Memory:
    """The facts of files, pictures and masks apart; those remembered of files with the same size and time are not
    measured again.

    Args:
        file: where they are kept; None keeps nothing.
        section: max_pixels, background and frames are read.
    """

    def __init__(self, file: Path | None, section: config.Dataset) -> None:
        self.file, self.section = file, section
        self.kept = {"version": FACTS_VERSION, "limits": [section.max_pixels, bool(section.frames)]}
        if file is not None:
            # Nothing remembered yet, or in a file that is torn or of something else: measured again.
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
        """Of each file of this kind, all of which are given at once. `progress` is called with (files done, of all)."""
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

    def masks(self, paths: Sequence[Path], section: config.Dataset) -> list[decoding.Looked]:
        """As `images.look_at_masks`."""
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


_IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"


def rough_tokens(caption: str) -> int:
    """About how many tokens a caption has: words (long ones count for more), marks, and ideographs one by one."""
    pieces = re.findall(rf"[{_IDEOGRAPHS}]|[^\W{_IDEOGRAPHS}]+|[^\w\s]", caption)
    return sum(1 + (len(piece) - 1) // 8 for piece in pieces)


def examine(
    section: config.Dataset,
    *,
    resolution: int,
    step: int = BUCKET_STEP,
    family: str = "",
    clip_rate: int | None = None,
    unmasked_weight: float = config.Objective().unmasked_weight,
    remember: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Diagnosis:
    """Look at every picture and caption.

    Args:
        section: `[dataset]`.
        resolution, step: numbers for the buckets; the section may leave them to the family.
        family: whose text encoder's limit counts; "" has none.
        clip_rate, unmasked_weight: as in `images.scan`.
        remember: a file for what was measured, so that the next look at the same pictures is quick.
        progress: is called with (pictures done, of all).

    Raises:
        UserError: bucket numbers that exclude each other, or `remember` cannot be written.
    """
    report = images.ScanReport()
    images.warn_of_nested(section, report)
    found = [
        entry
        for index in range(len(section.folders))
        for entry in images.list_folder(index, section, report, videos=True)
    ]
    several = len(section.folders) > 1
    names = [f"{index}/{path.relative_to(root).as_posix()}" if several else path.relative_to(root).as_posix()
             for index, root, path, _ in found]  # fmt: skip
    memory = _Memory(remember, section)
    facts = memory.facts("pictures", [path for _, _, path, _ in found], _measure, progress)
    told = _Told()
    for line in report.problems:
        told("folder", "", line, level="problem")
    for line in report.warnings:
        told("folder", "", line)
    masks = _look_at_masks(section, unmasked_weight, found, facts, memory, told)
    # A folder may be named twice, to be trained at two sizes: its files are no copies of themselves.
    first: dict[str, str] = {}
    for name, (_, _, path, _) in zip(names, found, strict=True):
        first.setdefault(os.path.realpath(path), name)
    own = set(first.values())
    texts = _look_at_captions(section, found, names, own, told, family)
    usable = [i for i, fact in enumerate(facts) if not fact.error]
    cut = {}
    for (index, *_), name, fact in zip(found, names, facts, strict=True):
        _look_at_picture(name, fact, told, _is_clip(fact, section), section.folders[index].mask)
        if not fact.error:
            cut[name] = _look_at_clip(name, fact, section, clip_rate, told)
    _look_for_copies([(names[i], facts[i]) for i in usable if names[i] in own], told)
    sides = [section.folders[index].resolution or resolution for index, *_ in found]
    entries = [(names[i], facts[i], sides[i], masks[i]) for i in usable]
    placed = _look_at_buckets(entries, cut, section, step, told)
    _look_at_balance(section, found, usable, told)
    words = [len(text.split()) for text in texts.values()]
    shown = [
        section.folders[index].repeats * (len(cut[name]) if name in cut else 1)
        for (index, *_), name in zip(found, names, strict=True)
    ]
    counts = {
        "pictures": len(found),
        "readable": len(usable),
        "clips": sum(_is_clip(facts[i], section) for i in usable),
        "masked": sum(mask is not None for mask in masks),
        "pieces": sum(len(cut[names[i]]) for i in usable if _is_clip(facts[i], section)),
        "shown": sum(shown),
        "captions": len(texts),
        "different_captions": len(set(texts.values())),
        "shortest_words": min(words, default=0),
        "longest_words": max(words, default=0),
    }
    return Diagnosis(
        pictures=[_told_of(names[i], facts[i], cut[names[i]]) for i in usable],
        findings=told.findings(),
        buckets=placed,
        tags=Counter(
            tag for text in texts.values() for tag in dict.fromkeys(captions.split_tags(text, section.tag_separator))
        ),
        counts=counts,
        resolution=resolution,
        step=step,
    )


class _Told:
    """Collects findings."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)

    def __call__(self, kind: str, file: str, detail: str = "", level: str = "") -> None:
        self.found[level or KINDS[kind][0], kind].append((file, detail))

    def findings(self) -> list[Finding]:
        """The gravest first, then in the order of `KINDS`."""
        order = list(KINDS)
        keys = sorted(self.found, key=lambda key: (LEVELS.index(key[0]), order.index(key[1])))
        return [Finding(kind, level, self.found[level, kind]) for level, kind in keys]


def _told_of(name: str, fact: Facts, cut: list[int]) -> dict[str, Any]:
    told: dict[str, Any] = {"file": name, "width": fact.width, "height": fact.height}
    if fact.seconds:
        seconds = float(Fraction(fact.seconds))
        rate = fact.frames / seconds if seconds else 0.0  # a single frame may stand for no time
        told |= {"seconds": round(seconds, 3), "fps": round(rate, 3), "frames": fact.frames}
        told |= {"pieces": len(cut), "length": max(cut, default=0)}
    return told


def _is_clip(fact: Facts, section: config.Dataset) -> bool:
    return bool(section.frames and fact.seconds)


def _look_at_clip(name: str, fact: Facts, section: config.Dataset, clip_rate: int | None, told: _Told) -> list[int]:
    """Frames of each example that the file gives: [1] for a picture."""
    if not fact.seconds:
        return [1]
    seconds = Fraction(fact.seconds)
    if not section.frames:  # an animation is its first frame, which has no seconds: this is a video
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
    section: config.Dataset,
    unmasked_weight: float,
    found: list[Any],
    facts: list[Facts],
    memory: _Memory,
    told: _Told,
) -> list[images.Mask | None]:
    """The mask of each picture; what is odd about them is told as a training tells it."""
    report = images.ScanReport()
    seen = [
        None
        if fact.error
        else images.Seen((fact.width, fact.height), fact.sha256, _is_clip(fact, section), fact.opacity)
        for fact in facts
    ]
    masks = images.find_masks(section, unmasked_weight, found, seen, report, memory.masks)
    for line in report.problems:
        told("mask", "", line, level="problem")
    for line in report.warnings:
        told("mask", "", line)
    return masks


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


def _look_at_captions(
    section: config.Dataset, found: list[Any], names: list[str], own: set[str], told: _Told, family: str
) -> dict[str, str]:
    """The captions that can be read, by picture; empty ones left out. `own`: names of which none is another's file."""
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
        if family in CLIP_FAMILIES and (tokens := rough_tokens(images.with_trigger(text, trigger))) > CLIP_TOKENS:
            told("caption_long", name, str(tokens))
    times = Counter(text for name, text in texts.items() if name in own)
    for name, text in texts.items():
        if name in own and times[text] > 1:
            told("caption_repeated", name, str(times[text] - 1))
    return texts


def _look_for_copies(entries: list[tuple[str, Facts]], told: _Told) -> None:
    """Copies by content, and pictures that look alike; each is told of once, with the first that it resembles."""
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
        # An even surface has no darker neighbours: its hash says nothing.
        alike = (different <= SAME_BITS) & (np.abs(greys[:i] - greys[i]) < 12) & (bits[:i] >= 16) & (bits[i] >= 16)
        if alike.any():
            told("near_duplicate", rest[i][0], rest[int(np.argmax(alike))][0])


def _look_at_buckets(
    entries: list[tuple[str, Facts, int, images.Mask | None]],
    examples: dict[str, list[int]],
    section: config.Dataset,
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
            bucket = (*place.bucket_wh, length) if length > 1 else place.bucket_wh
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


def _look_at_balance(section: config.Dataset, found: list[Any], usable: list[int], told: _Told) -> None:
    """Folders of the config (with repeats), or subfolders of a single one: is one seen far more than others?"""
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
    """How many pictures are nearest to each usual shape, by its name, the most frequent first."""
    named = [*SHAPES, *((":".join(reversed(name.split(":"))), 1 / ratio) for name, ratio in SHAPES if ratio > 1)]
    found: Counter[str] = Counter()
    for one in pictures:
        ratio = one["width"] / one["height"]
        found[min(named, key=lambda shape: abs(np.log(ratio / shape[1])))[0]] += 1
    return dict(found.most_common())
