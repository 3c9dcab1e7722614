"""What the doctor finds in a dataset, and how it reads: kinds of findings, and the report.

A *finding* is one kind of observation with the files that it applies to, what it means, and what to do about it: a
*problem* prevents training, a *warning* costs quality, a *note* is good to know."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import Message, Template
from .caption_variants import shorten
from .examples import ScanReport

CAPTION_IT = Message("write one, run `lora-fp8 caption`, or set dataset.missing_caption to 'trigger' or 'skip'")
KINDS = {
    # kind: (level, what it is, what to do)
    "folder": ("warning", Template("{detail}"), Message("look at the folder")),
    "mask": (
        "warning",
        Template("{detail}"),
        Message(
            "draw a mask for each picture, white where it is trained, of the picture's shape; see dataset.folders, mask"
        ),
    ),
    "mask_outside": (
        "warning",
        Template("its mask is white only where the crop cuts it off"),
        Message("set dataset.follow_mask = true, crop the picture and its mask yourself, or raise dataset.max_aspect"),
    ),
    "unreadable": ("problem", Template("cannot be used: {detail}"), Message("save the picture again, or take it out")),
    "caption_encoding": (
        "problem",
        Template("caption {detail}"),
        Message("save it as UTF-8; `lora-fp8 dataset edit FOLDER --recode gb18030` does it for all in that encoding"),
    ),
    "caption_missing": (
        "problem",
        Template("no caption ({detail})"),
        CAPTION_IT,
    ),
    "caption_empty": (
        "problem",
        Template("the caption {detail} is empty"),
        CAPTION_IT,
    ),
    "caption_damaged": (
        "problem",
        Template("the caption {detail} was damaged, as by a crash"),
        Message("run `lora-fp8 dataset repair FOLDER`, which restores it from the journal of caption edits"),
    ),
    "caption_half_done": (
        "warning",
        Template("{detail}"),
        Message("a crash or a full disk left this edit half done; `lora-fp8 dataset repair FOLDER` takes it back"),
    ),
    "caption_leftover": (
        "note",
        Template("{detail}"),
        Message("temporary files of a caption edit that was killed; `lora-fp8 dataset repair FOLDER` deletes them"),
    ),
    "clip_refused": (
        "problem",
        Template("a video of {detail}, and this model is trained on pictures"),
        Message("take it out"),
    ),
    "clip_unset": (
        "problem",
        Template("a video of {detail}, and dataset.frames is empty"),
        Message("set dataset.frames to the lengths that clips are to be trained at, or take it out"),
    ),
    "clip_short": (
        "problem",
        Template("{detail}, fewer than the least of dataset.frames"),
        Message("add a smaller length, or take it out"),
    ),
    "clip_shorter": (
        "note",
        Template("{detail}: too short for the longest of dataset.frames, trained at a shorter length"),
        Message("find a longer one if it is the movement that matters"),
    ),
    "clip_slower": (
        "note",
        Template("{detail} by dataset.fps, so that some are shown twice"),
        Message("nothing, or lower dataset.fps"),
    ),
    "duplicate": (
        "warning",
        Template("the same file as {detail}"),
        Message("take one out, or raise repeats if it should count more"),
    ),
    "near_duplicate": (
        "warning",
        Template("looks like {detail}"),
        Message("look at both; keep the better one, as what is seen twice is learned twice"),
    ),
    "tiny": (
        "warning",
        Template("{detail}: less than a quarter of the training's pixels"),
        Message("find a larger one, or take it out; enlarged, it teaches blur"),
    ),
    "small": (
        "note",
        Template("{detail}: fewer pixels than the training"),
        Message("it is enlarged; set dataset.upscale = false to train it at its own size"),
    ),
    "cut": (
        "warning",
        Template("the crop leaves out {detail}"),
        Message("crop it yourself, or raise dataset.max_aspect"),
    ),
    "little_detail": (
        "note",
        Template("little fine detail ({detail}, a guess from edges): blurred, out of focus, or simply smooth"),
        Message("look at it at full size"),
    ),
    "animated": (
        "note",
        Template("{detail} frames or pages, of which the first is used"),
        Message("save the one that you mean"),
    ),
    "transparent": (
        "note",
        Template("transparent"),
        Message("it is laid on dataset.background; choose a colour that fits"),
    ),
    "cmyk": ("note", Template("made for print (CMYK)"), Message("colours are converted to sRGB; look at the result")),
    "turned": (
        "note",
        Template("stored turned (EXIF orientation {detail})"),
        Message("nothing: it is trained upright"),
    ),
    "profile": (
        "warning",
        Template("colour profile that cannot be used ({detail})"),
        Message("it is read as sRGB; save it again as sRGB if the colours are off"),
    ),
    "extension": (
        "note",
        Template("is a {detail}, whatever its name says"),
        Message("nothing: it is read all the same"),
    ),
    "caption_repeated": (
        "note",
        Template("the caption is that of {detail} other pictures"),
        Message("say what differs, or accept that nothing of it can be asked for by words"),
    ),
    "caption_long": (
        "warning",
        Template("about {detail} tokens, more than the text encoder reads (a rough count)"),
        Message(
            "raise model.caption_tokens, shorten it, or put what matters first; `lora-fp8 check CONFIG` counts exactly"
        ),
    ),
    "trigger_missing": (
        "note",
        Template("the caption lacks the trigger word {detail}"),
        Message("training puts it in front; `lora-fp8 dataset edit FOLDER --trigger WORD` writes it into the file"),
    ),
    "choice_unused": (
        "note",
        Template("the caption has the choice {detail}, and dataset.wildcards is off"),
        Message(
            "set dataset.wildcards = true to have one of its words drawn each time; else it is trained as it is written"
        ),
    ),
    "sentences_shuffled": (
        "warning",
        Template("the caption looks like sentences, and is shuffled at its commas: {detail}"),
        Message("set dataset.shuffle_tags = false and dataset.tag_dropout = 0"),
    ),
    "sentences_cut": (
        "warning",
        Template("the caption looks like sentences, and loses parts at its commas: {detail}"),
        Message("set dataset.tag_dropout = 0"),
    ),
    "wide_commas": (
        "warning",
        Template("the caption is one tag: it has {detail} where tags are separated by ,"),
        Message("`lora-fp8 dataset edit FOLDER --replace '，' ', '` writes commas"),
    ),
    "uneven": (
        "warning",
        Template("{detail}"),
        Message("set repeats so that every folder is seen about as often as it should count"),
    ),
    "kohya_folder": (
        "note",
        Template("named as kohya's trainers have it, where {detail} would be its repeats"),
        Message("here repeats are set in the config: dataset.folders, repeats"),
    ),
    "lonely_bucket": (
        "note",
        Template("the only picture of bucket {detail}"),
        Message(
            "with a batch size above 1 it makes a batch of its own; crop it to the shape of others if that matters"
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
        files = [{"file": file, "detail": detail, "what": self.what(detail)} for file, detail in self.files]
        return {"kind": self.kind, "level": self.level, "do": KINDS[self.kind][2], "files": files}

    def what(self, detail: str) -> str:
        """Return the sentence for a file, completed with its detail."""
        return KINDS[self.kind][1](detail=detail)

    def lines(self, most: int = 8) -> list[str]:
        """Return lines for people, with at most `most` files."""
        lines: list[str] = [
            Message("  {path}: {line}", path=file, line=self.what(detail)) if file else Message("  {line}", line=detail)
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
        lines: list[str] = [
            Message(
                "{pictures} pictures, {shown} per epoch with repeats; {captions} captions, {different} different, "
                "{shortest} to {longest} words",
                pictures=counts["pictures"],
                shown=counts["shown"],
                captions=counts["captions"],
                different=counts["different_captions"],
                shortest=counts["shortest_words"],
                longest=counts["longest_words"],
            )
        ]
        if counts["clips"]:
            lines.append(
                Message(
                    "{count} of them clips, of which {pieces} pieces are cut",
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
            lines += finding.lines()
        return lines

    def _describe_sizes(self) -> list[str]:
        """Return the lines about sizes, shapes and buckets."""
        sizes = _sizes(self.pictures)
        lines: list[str] = [
            Message(
                "sizes {smallest} to {largest}, median {median} MP",
                smallest=sizes["smallest"],
                largest=sizes["largest"],
                median=f"{sizes['median_megapixels']:.2f}",
            ),
            Message("shapes {counts}", counts=_join_counts(_shapes(self.pictures))),
            Message("buckets at {resolution} in steps of {step}:", resolution=self.resolution, step=self.step),
        ]
        for bucket in self.buckets:
            template = Template("  {size}: {count} pictures, crops leave out {mean} on average, at most {most}")
            if bucket["size"].count("x") > 1:
                template = Template("  {size}: {count} clips, crops leave out {mean} on average, at most {most}")
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

    def in_order(self) -> list[Finding]:
        """Return the findings, most severe first, then in the order of `KINDS`."""
        order = list(KINDS)
        levels = list(LEVELS)
        keys = sorted(self._files, key=lambda key: (levels.index(key[0]), order.index(key[1])))
        return [Finding(kind, level, self._files[level, kind]) for level, kind in keys]


def _sizes(pictures: list[dict[str, Any]]) -> dict[str, Any]:
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


SHAPES = (("2:1", 2), ("16:9", 16 / 9), ("3:2", 1.5), ("4:3", 4 / 3), ("5:4", 1.25), ("1:1", 1))


def _shapes(pictures: list[dict[str, Any]]) -> dict[str, int]:
    """Count the images nearest to each common aspect ratio, by its name, most frequent first."""
    named = [*SHAPES, *((":".join(reversed(name.split(":"))), 1 / ratio) for name, ratio in SHAPES if ratio > 1)]
    counts: Counter[str] = Counter()
    for picture in pictures:
        ratio = picture["width"] / picture["height"]
        counts[min(named, key=lambda shape: abs(np.log(ratio / shape[1])))[0]] += 1
    return dict(counts.most_common())
