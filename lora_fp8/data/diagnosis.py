"""What the doctor finds in a dataset, and how it reads: kinds of findings, and the report.

A *finding* is one kind of observation with the files that it applies to, what it means, and what to do about it: a
*problem* prevents training, a *warning* costs quality, a *note* is good to know."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import Message
from .examples import ScanReport

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
    "cmyk": (
        "note",
        Message("made for {name}", name="print (CMYK)"),
        "colours are converted to sRGB; look at the result",
    ),
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
        lines = [f"  {file}: {self.what(detail)}" if file else f"  {detail}" for file, detail in self.files[:most]]
        more = len(self.files) - most
        lines += [f"  and {more} more"] if more > 0 else []
        return [f"{self.level}, {len(self.files)}:", *lines, f"  -> {KINDS[self.kind][2]}"]


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
                f"  {bucket['size']}: {bucket['count']} {'clips' if bucket['size'].count('x') > 1 else 'pictures'}, "
                f"crops leave out {bucket['cut']:.0%} on average, at most {bucket['most_cut']:.0%}"
                + (f", {bucket['enlarged']} enlarged" if bucket["enlarged"] else "")
                for bucket in self.buckets
            ]
        if self.tags:
            lines.append("tags " + ", ".join(f"{tag}: {count}" for tag, count in self.tags.most_common(20)))
        for finding in self.findings:
            lines += finding.lines()
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
        keys = sorted(self._files, key=lambda key: (LEVELS.index(key[0]), order.index(key[1])))
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


SHAPES = (("2:1", 2), ("16:9", 16 / 9), ("3:2", 1.5), ("4:3", 4 / 3), ("5:4", 1.25), ("1:1", 1))


def _shapes(pictures: list[dict[str, Any]]) -> dict[str, int]:
    """Count the images nearest to each common aspect ratio, by its name, most frequent first."""
    named = [*SHAPES, *((":".join(reversed(name.split(":"))), 1 / ratio) for name, ratio in SHAPES if ratio > 1)]
    counts: Counter[str] = Counter()
    for picture in pictures:
        ratio = picture["width"] / picture["height"]
        counts[min(named, key=lambda shape: abs(np.log(ratio / shape[1])))[0]] += 1
    return dict(counts.most_common())
