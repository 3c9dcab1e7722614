"""What the doctor finds in a dataset, and how it reads: kinds of findings, and the report.

A *finding* is one kind of observation with the files that it applies to, what it means, and what to do about it: a
*problem* prevents training, a *warning* costs quality, a *note* is good to know."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import Message, Plural, Template
from .caption_variants import shorten
from .examples import ScanReport

CAPTION_IT = Message("write one, run `lora-fp8 caption`, or set dataset.missing_caption to 'trigger' or 'skip'")
KINDS = {
    # kind: (level, what it is, what to do)
    "folder": ("warning", Template("{detail}"), Message("check this folder")),
    "mask": (
        "warning",
        Template("{detail}"),
        Message(
            "draw a mask for each image, white where it is trained, with the image's aspect ratio; see "
            "dataset.folders, mask"
        ),
    ),
    "mask_outside": (
        "warning",
        Template("the white part of its mask lies outside the crop"),
        Message("set dataset.follow_mask = true, crop the image and its mask yourself, or raise dataset.max_aspect"),
    ),
    "unreadable": ("problem", Template("{detail}"), Message("save the image again, or remove it")),
    "caption_unreadable": (
        "problem",
        Template("caption {detail}"),
        Message("check that it is a file that you may read, and the disk; or write it again"),
    ),
    "caption_encoding": (
        "problem",
        Template("caption {detail}"),
        Message(
            "save it as UTF-8; `lora-fp8 dataset edit FOLDER --recode gb18030` converts all captions in that encoding"
        ),
    ),
    "caption_missing": (
        "problem",
        Template("there is no caption ({detail})"),
        CAPTION_IT,
    ),
    "caption_empty": (
        "problem",
        Template("the caption {detail} is empty"),
        CAPTION_IT,
    ),
    "caption_damaged": (
        "problem",
        Template("the caption {detail} is damaged, probably by a crash"),
        Message("run `lora-fp8 dataset repair FOLDER`, which restores it from the journal of caption edits"),
    ),
    "caption_half_done": (
        "warning",
        Template("{detail}"),
        Message("a crash or a full disk interrupted this edit; `lora-fp8 dataset repair FOLDER` undoes it"),
    ),
    "caption_leftover": (
        "note",
        Template("{detail}"),
        Message(
            "these are temporary files of an interrupted caption edit; `lora-fp8 dataset repair FOLDER` deletes them"
        ),
    ),
    "clip_refused": (
        "problem",
        Template("this is a video of {detail}, but this model trains on images only"),
        Message("remove it"),
    ),
    "clip_unset": (
        "problem",
        Template("this is a video of {detail}, but dataset.frames is empty"),
        Message("set dataset.frames to the lengths to train, or remove the video"),
    ),
    "clip_short": (
        "problem",
        Template("the video has {detail}, fewer than the smallest of dataset.frames"),
        Message("add a smaller length, or remove the video"),
    ),
    "clip_shorter": (
        "note",
        Template(
            "the video has {detail}, fewer than the largest of dataset.frames, and is trained at a smaller length"
        ),
        Message("if the motion matters, use a longer video"),
    ),
    "clip_slower": (
        "note",
        Template("the video has {detail} at dataset.fps, so some frames are repeated"),
        Message("nothing to do; or lower dataset.fps"),
    ),
    "duplicate": (
        "warning",
        Template("this is the same file as {detail}"),
        Message("remove one of them; to give the image more weight, raise its repeats"),
    ),
    "near_duplicate": (
        "warning",
        Template("this image looks like {detail}"),
        Message("compare both and keep the better one, because similar images count twice in training"),
    ),
    "tiny": (
        "warning",
        Template("the image has {detail}, less than a quarter of the pixels of the training resolution"),
        Message("use a larger image, or remove it; enlarging it teaches blur"),
    ),
    "small": (
        "note",
        Template("the image has {detail}, fewer pixels than the training resolution"),
        Message("it is enlarged; set dataset.upscale = false to train it at its own size"),
    ),
    "cut": (
        "warning",
        Template("the crop cuts off {detail}"),
        Message("crop it yourself, or raise dataset.max_aspect"),
    ),
    "little_detail": (
        "note",
        Template(
            "the image has little fine detail ({detail}, estimated from edges): it may be blurred, out of "
            "focus, or simply smooth"
        ),
        Message("look at it at full size"),
    ),
    "animated": (
        "note",
        Template("the file has {detail} frames or pages; only the first is used"),
        Message("to use another frame, save it as an image of its own"),
    ),
    "transparent": (
        "note",
        Template("the image has transparent areas"),
        Message("they are filled with dataset.background; choose a colour that fits"),
    ),
    "cmyk": (
        "note",
        Template("the image has print colours (CMYK)"),
        Message("its colours are converted to sRGB; check the result"),
    ),
    "turned": (
        "note",
        Template("the image is stored rotated (EXIF orientation {detail})"),
        Message("nothing to do: it is rotated upright for training"),
    ),
    "profile": (
        "warning",
        Template("its colour profile cannot be used ({detail})"),
        Message("it is read as sRGB; if its colours look wrong, save it again as sRGB"),
    ),
    "extension": (
        "note",
        Template("the file is a {detail}, despite its extension"),
        Message("nothing to do: the file is read by its content"),
    ),
    "caption_repeated": (
        "note",
        Template("other images with the same caption: {detail}"),
        Message("describe the differences; otherwise no prompt can tell these images apart"),
    ),
    "caption_long": (
        "warning",
        Template("the caption has about {detail} tokens, more than the text encoder reads (an estimate)"),
        Message(
            "raise model.caption_tokens, shorten it, or put what matters first; `lora-fp8 check CONFIG` counts exactly"
        ),
    ),
    "trigger_missing": (
        "note",
        Template("the caption lacks the trigger word {detail}"),
        Message("training adds it at the start; `lora-fp8 dataset edit FOLDER --trigger WORD` writes it into the file"),
    ),
    "choice_unused": (
        "note",
        Template("the caption has the wildcard {detail}, but dataset.wildcards is off"),
        Message(
            "set dataset.wildcards = true to pick one of its words at random each time; otherwise the caption is "
            "trained as written"
        ),
    ),
    "sentences_shuffled": (
        "warning",
        Template("the caption looks like sentences, but is shuffled at its commas: {detail}"),
        Message("set dataset.shuffle_tags = false and dataset.tag_dropout = 0"),
    ),
    "sentences_cut": (
        "warning",
        Template("the caption looks like sentences, but loses parts at its commas: {detail}"),
        Message("set dataset.tag_dropout = 0"),
    ),
    "wide_commas": (
        "warning",
        Template("the caption counts as one tag: it is separated by {detail}, but tags are separated by ,"),
        Message("replace the separators: `lora-fp8 dataset edit FOLDER --replace '，' ', '`"),
    ),
    "uneven": (
        "warning",
        Template("{detail}"),
        Message("balance the folders with repeats"),
    ),
    "kohya_folder": (
        "note",
        Template("the folder is named as in kohya's trainers, where {detail} would be its repeats"),
        Message("set the repeats in the config: dataset.folders, repeats"),
    ),
    "lonely_bucket": (
        "note",
        Template("this is the only image of bucket {detail}"),
        Message(
            "with a batch size above 1, it forms a batch of its own; to avoid this, crop it to the shape of other "
            "images"
        ),
    ),
}
"""All kinds of findings. The web page has its own texts for them, in each of its languages."""

LEVELS = {"problem": Message("problem"), "warning": Message("warning"), "note": Message("note")}
"""The words for levels, most severe first."""


@dataclass
class Finding:
    """One kind of finding, and the files that it applies to, each with the detail that completes its sentence."""

    kind: str
    level: str
    files: list[tuple[str, str]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, with the sentence of each file."""
        files = [{"file": file, "detail": detail, "what": self.describe_file(detail)} for file, detail in self.files]
        return {"kind": self.kind, "level": self.level, "do": KINDS[self.kind][2], "files": files}

    def describe_file(self, detail: str) -> str:
        """Return the sentence for a file, completed with its detail."""
        return KINDS[self.kind][1](detail=detail)

    def format_lines(self, most: int = 8) -> list[str]:
        """Return lines for people, with at most `most` files."""
        lines: list[str] = [
            Message("  {path}: {line}", path=file, line=self.describe_file(detail))
            if file
            else Message("  {line}", line=detail)
            for file, detail in self.files[:most]
        ]
        more = len(self.files) - most
        lines += [Message("  and {count} more", count=more)] if more > 0 else []
        heading = Message("{level}, {count}:", level=LEVELS[self.level], count=len(self.files))
        return [heading, *lines, Message("  -> {line}", line=KINDS[self.kind][2])]


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
        """Return True if training could start."""
        return not any(finding.level == "problem" for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "ok": self.ok,
            "counts": self.counts,
            "resolution": self.resolution,
            "bucket_step": self.step,
            "sizes": _summarize_sizes(self.pictures),
            "shapes": _count_shapes(self.pictures),
            "buckets": self.buckets,
            "findings": [finding.to_json() for finding in self.findings],
            "tags": self.tags.most_common(),
            "pictures": self.pictures,
        }

    def format_lines(self) -> list[str]:
        """Return the report for people."""
        counts = self.counts
        lines: list[str] = [
            Plural(
                "{count} image, {shown} per epoch with repeats; {captions} captions, {different} different, {shortest} "
                "to {longest} words",
                "{count} images, {shown} per epoch with repeats; {captions} captions, {different} different, "
                "{shortest} to {longest} words",
            )(
                count=counts["pictures"],
                shown=counts["shown"],
                captions=counts["captions"],
                different=counts["different_captions"],
                shortest=counts["shortest_words"],
                longest=counts["longest_words"],
            )
        ]
        if counts["clips"]:
            lines.append(
                Plural(
                    "{count} of them a video, cut into {pieces} clips",
                    "{count} of them videos, cut into {pieces} clips",
                )(
                    count=counts["clips"],
                    pieces=counts["pieces"],
                )
            )
        if counts["masked"]:
            lines.append(Message("{count} with a mask", count=counts["masked"]))
        if self.pictures:
            lines += self._describe_sizes()
        if self.tags:
            frequent = {shorten(tag): count for tag, count in self.tags.most_common(20)}
            lines.append(Message("tags {counts}", counts=_join_counts(frequent)))
        for finding in self.findings:
            lines += finding.format_lines()
        return lines

    def _describe_sizes(self) -> list[str]:
        """Return the lines about sizes, shapes and buckets."""
        sizes = _summarize_sizes(self.pictures)
        lines: list[str] = [
            Message(
                "sizes {smallest} to {largest}, median {median} MP",
                smallest=sizes["smallest"],
                largest=sizes["largest"],
                median=f"{sizes['median_megapixels']:.2f}",
            ),
            Message("shapes {counts}", counts=_join_counts(_count_shapes(self.pictures))),
            Message("buckets at {resolution} in steps of {step}:", resolution=self.resolution, step=self.step),
        ]
        for bucket in self.buckets:
            template = IMAGES_OF_BUCKET if bucket["size"].count("x") == 1 else CLIPS_OF_BUCKET
            line = template(
                size=bucket["size"],
                count=bucket["count"],
                mean=f"{bucket['cut']:.0%}",
                most=f"{bucket['most_cut']:.0%}",
            )
            if bucket["enlarged"]:
                line = Message("{line}, {count} enlarged", line=line, count=bucket["enlarged"])
            lines.append(line)
        return lines


class Findings:
    """Collects findings."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)

    def add(self, kind: str, file: str, detail: str = "", level: str = "") -> None:
        """Add a file to a kind of finding; `level` replaces the kind's own."""
        self._files[level or KINDS[kind][0], kind].append((file, detail))

    def add_report(self, kind: str, report: ScanReport) -> None:
        """Add the problems and warnings of a scan as findings of one kind."""
        for line in report.problems:
            self.add(kind, "", line, level="problem")
        for line in report.warnings:
            self.add(kind, "", line)

    def list_by_severity(self) -> list[Finding]:
        """Return the findings, most severe first, then in the order of `KINDS`."""
        order = list(KINDS)
        levels = list(LEVELS)
        keys = sorted(self._files, key=lambda key: (levels.index(key[0]), order.index(key[1])))
        return [Finding(kind, level, self._files[level, kind]) for level, kind in keys]


def _summarize_sizes(pictures: list[dict[str, Any]]) -> dict[str, Any]:
    if not pictures:
        return {}
    ordered = sorted(pictures, key=lambda picture: picture["width"] * picture["height"])
    areas = [picture["width"] * picture["height"] for picture in ordered]
    return {
        "smallest": f"{ordered[0]['width']} x {ordered[0]['height']}",
        "largest": f"{ordered[-1]['width']} x {ordered[-1]['height']}",
        "median_megapixels": round(float(np.median(areas)) / 1e6, 3),
    }


def _join_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items())


IMAGES_OF_BUCKET = Plural(
    "  {size}: {count} image, crops cut off {mean} on average, at most {most}",
    "  {size}: {count} images, crops cut off {mean} on average, at most {most}",
)
CLIPS_OF_BUCKET = Plural(
    "  {size}: {count} clip, crops cut off {mean} on average, at most {most}",
    "  {size}: {count} clips, crops cut off {mean} on average, at most {most}",
)
SHAPES = (("2:1", 2), ("16:9", 16 / 9), ("3:2", 1.5), ("4:3", 4 / 3), ("5:4", 1.25), ("1:1", 1))


def _count_shapes(pictures: list[dict[str, Any]]) -> dict[str, int]:
    """Count the images nearest to each common aspect ratio, by its name, most frequent first."""
    named = [*SHAPES, *((":".join(reversed(name.split(":"))), 1 / ratio) for name, ratio in SHAPES if ratio > 1)]
    counts: Counter[str] = Counter()
    for picture in pictures:
        ratio = picture["width"] / picture["height"]
        counts[min(named, key=lambda shape: abs(np.log(ratio / shape[1])))[0]] += 1
    return dict(counts.most_common())
