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

import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from .. import settings
from ..common.numbers import format_digits
from ..errors import Message, UserError, about, reason
from . import buckets, caption_operations, caption_text, captions, clips, decoding, image_files, mask_files
from .caption_style import find_sentences_used_as_tags
from .caption_variants import shorten, unify_separators
from .diagnosis import Diagnosis, Findings
from .examples import Mask, ScanReport
from .look_memory import LookMemory
from .measurements import PIXELS, Facts, to_facts

SAME_BITS = 10
"""Largest number of differing bits, of 256, between near-duplicates."""

LITTLE_DETAIL = 20.0
"""Variance of the Laplacian of 8-bit greys below which an image is reported."""

MUCH_CUT = 0.2
"""Fraction of an image that a crop may cut off without being reported."""


WIDE_COMMAS = "，、"
"""Marks that separate tags in Chinese, but not in training."""
CLIP_TOKENS = 75
"""Tokens of a caption that CLIP's text encoders read."""

_IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"


def estimate_tokens(caption: str) -> int:
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
    def from_job(cls, job: settings.Job, Family: Any) -> Target:
        """Return a job's target, with the family's numbers where the config says "auto"."""
        section = job.dataset
        models = [name for name in Family.text_parts.values() if not name.endswith("Tokenizer")]
        tokens = job.model.caption_tokens if Family.long_captions else CLIP_TOKENS
        return cls(
            resolution=Family.native_resolution if section.resolution == "auto" else section.resolution,
            bucket_step=Family.bucket_step if section.bucket_step == "auto" else section.bucket_step,
            # Beside CLIP, other families have an encoder that reads longer captions.
            caption_tokens=tokens if all(name.startswith("CLIPText") for name in models) else 0,
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
        remember: folder that keeps what was measured, so that the next examination of the same images is quick; None
            keeps nothing.
        progress: called with (images done, images in all).

    Raises:
        UserError: the bucket numbers contradict each other.
    """
    findings = Findings()
    images, names, listed = _list_images(section, findings)
    memory = LookMemory(section, remember, progress)
    facts = [to_facts(look) for look in memory.inspect_all([path for _, _, path, _ in images], PIXELS, listed.edits)]
    of_masks = ScanReport(edits=listed.edits, excluded=listed.excluded)
    masks = _find_masks(target.unmasked_weight, images, facts, memory, of_masks)
    findings.add_report("mask", of_masks)
    own = _find_first_names(images, names)
    damaged = _check_edits(section, images, names, findings)
    whole = [i for i, name in enumerate(names) if name not in damaged]
    texts = _check_captions(
        section, [images[i] for i in whole], [names[i] for i in whole], own, findings, target.caption_tokens
    )
    usable = [i for i, fact in enumerate(facts) if not fact.error]
    cut = _check_files(section, images, names, facts, target.clip_rate, findings)
    _report_copies([(names[i], facts[i]) for i in usable if names[i] in own], findings)
    sides = [section.folders[index].resolution or target.resolution for index, *_ in images]
    entries = [(names[i], facts[i], sides[i], masks[i]) for i in usable]
    placed = _check_buckets(entries, cut, section, target.bucket_step, findings)
    _check_balance(section, images, usable, findings)
    clip_names = [names[i] for i in usable if _is_clip(facts[i], section)]
    repeats = [section.folders[index].repeats for index, *_ in images]
    return Diagnosis(
        pictures=[_describe(names[i], facts[i], cut[names[i]], masks[i]) for i in usable],
        findings=findings.list_by_severity(),
        buckets=placed,
        tags=_count_tags((unify_separators(text, section) for text in texts.values()), section.tag_separator),
        counts={
            "pictures": len(images),
            "readable": len(usable),
            "clips": len(clip_names),
            "masked": sum(mask is not None for mask in masks),
            "pieces": sum(len(cut[name]) for name in clip_names),
            "shown": round(sum(n * len(cut.get(name, [1])) for n, name in zip(repeats, names, strict=True))),
            **_count_captions(texts.values()),
        },
        resolution=target.resolution,
        step=target.bucket_step,
    )


def _list_images(section: settings.Dataset, findings: Findings) -> tuple[list[Any], list[str], ScanReport]:
    """Return the entries of `images.list_folder` for all folders, the name of each in the dataset, and the edits."""
    report = ScanReport()
    image_files.warn_of_nested(section, report)
    images = [
        entry
        for index in range(len(section.folders))
        for entry in image_files.list_folder(index, section, report, videos=True)
    ]
    findings.add_report("folder", report)
    names = [path.relative_to(root).as_posix() for _, root, path, _ in images]
    if len(section.folders) > 1:
        names = [f"{index}/{name}" for (index, *_), name in zip(images, names, strict=True)]
    return images, names, report


def _find_first_names(images: list[Any], names: list[str]) -> set[str]:
    """Return the first name of each file.

    A folder may be listed twice, to be trained at two sizes: its files are not copies of themselves.
    """
    first: dict[str, str] = {}
    for name, (_, _, path, _) in zip(names, images, strict=True):
        first.setdefault(os.path.realpath(path), name)
    return set(first.values())


def _count_tags(texts: Iterable[str], separator: str) -> Counter[str]:
    """Return the number of captions that have each tag."""
    return Counter(tag for text in texts for tag in dict.fromkeys(caption_operations.split_tags(text, separator)))


def _count_captions(texts: Collection[str]) -> dict[str, int]:
    """Return the figures about captions: how many there are, how many differ, and their lengths in words."""
    words = [len(text.split()) for text in texts]
    return {
        "captions": len(texts),
        "different_captions": len(set(texts)),
        "shortest_words": min(words, default=0),
        "longest_words": max(words, default=0),
    }


def _describe(name: str, fact: Facts, cut: list[int], mask: Mask | None) -> dict[str, Any]:
    row: dict[str, Any] = {"file": name, "width": fact.width, "height": fact.height}
    if mask is not None and mask.white and any(mask.white):
        row["white"] = list(mask.white)
    if fact.seconds:
        seconds = float(Fraction(fact.seconds))
        rate = fact.frames / seconds if seconds else 0.0  # a single frame may have no duration
        row |= {"seconds": round(seconds, 3), "fps": round(rate, 3), "frames": fact.frames}
        row |= {"pieces": len(cut), "length": max(cut, default=0)}
    return row


def _is_clip(fact: Facts, section: settings.Dataset) -> bool:
    return bool(section.frames and fact.seconds)


def _check_clip(
    name: str, fact: Facts, section: settings.Dataset, clip_rate: int | None, findings: Findings
) -> list[int]:
    """Return the number of frames of each example in the file: [1] for an image."""
    if not fact.seconds:
        return [1]
    seconds = Fraction(fact.seconds)
    if not section.frames:  # an animation would be read as its first frame here, without seconds: this is a video
        findings.add("clip_refused" if clip_rate == 0 else "clip_unset", name, f"{float(seconds):.3g} s")
        return []
    rate = clip_rate if section.fps == "auto" else section.fps
    if not rate:
        raise ValueError("dataset.fps = 'auto' needs clip_rate")
    count = clips.count_resampled(seconds, rate)
    cut = [len(piece) for piece in clips.cut_pieces(range(count), section.frames, section.clip)]
    detail = Message("{count} frames at {rate} a second", count=count, rate=f"{rate:g}")
    if not cut:
        findings.add("clip_short", name, detail)
    elif cut[0] < max(section.frames):
        findings.add("clip_shorter", name, detail)
    if fact.frames < count:
        findings.add(
            "clip_slower", name, Message("has {count} frames, but needs {wanted}", count=fact.frames, wanted=count)
        )
    return cut


def _find_masks(
    unmasked_weight: float,
    images: list[Any],
    facts: list[Facts],
    memory: LookMemory,
    report: ScanReport,
) -> list[Mask | None]:
    """Find the mask of each image. The report, which has the edits, takes the problems exactly as in training."""
    seen = [
        None if fact.error else mask_files.Seen(fact.whole, fact.sha256, _is_clip(fact, memory.section), fact.opacity)
        for fact in facts
    ]
    return mask_files.find_masks(memory.section, unmasked_weight, images, seen, report, memory)


def _check_files(
    section: settings.Dataset,
    images: list[Any],
    names: list[str],
    facts: list[Facts],
    clip_rate: int | None,
    findings: Findings,
) -> dict[str, list[int]]:
    """Report what is odd about each file. Returns what `_check_clip` does for each file that can be read, by name."""
    cut = {}
    for (index, *_), name, fact in zip(images, names, facts, strict=True):
        _check_image(name, fact, findings, _is_clip(fact, section), section.folders[index].mask)
        if not fact.error:
            cut[name] = _check_clip(name, fact, section, clip_rate, findings)
    return cut


def _check_image(name: str, fact: Facts, findings: Findings, clip: bool, mask: str) -> None:
    if fact.error:
        findings.add("unreadable", name, fact.error)
        return
    if fact.frames > 1 and not clip:
        findings.add("animated", name, str(fact.frames))
    if fact.opacity is not None and fact.opacity.least < 255 and mask != "alpha":
        findings.add("transparent", name)
    if fact.mode == "CMYK":
        findings.add("cmyk", name)
    if fact.orientation in range(2, 9):
        findings.add("turned", name, str(fact.orientation))
    if fact.profile_problem:
        findings.add("profile", name, fact.profile_problem)
    if fact.format and fact.format != decoding.EXTENSIONS[os.path.splitext(name)[1].lower()]:
        findings.add("extension", name, fact.format)
    if fact.detail < LITTLE_DETAIL:
        findings.add("little_detail", name, f"{fact.detail:.1f}")


def _check_edits(section: settings.Dataset, images: list[Any], names: list[str], findings: Findings) -> set[str]:
    """Report what crashes and killed caption edits left behind. Return the images whose captions are damaged."""
    of_stem = {
        (index, path.relative_to(root).with_suffix("").as_posix()): name
        for name, (index, root, path, _) in zip(names, images, strict=True)
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
            findings.add("caption_damaged", name, os.path.basename(file))
        if repair.title:
            findings.add("caption_half_done", "", repair.title)
        for file in repair.swept:
            findings.add("caption_leftover", "", file)
    return damaged


def _check_captions(
    section: settings.Dataset, images: list[Any], names: list[str], own: set[str], findings: Findings, limit: int
) -> dict[str, str]:
    """Read all captions and report problems with them.

    Args:
        section: `[dataset]`.
        images: entries of `images.list_folder`.
        names: the image of each entry.
        own: names that no other entry of the same file has; only these count as repeated captions.
        findings: takes the findings.
        limit: `caption_tokens` of the target.

    Returns:
        {image: caption} for the captions that can be read and are not empty.
    """
    texts: dict[str, str] = {}
    for name, (index, _, path, caption_path) in zip(names, images, strict=True):
        trigger = section.find_trigger(index).strip()
        helped = section.missing_caption == "skip" or section.missing_caption == "trigger" and trigger
        level = "warning" if helped else "problem"
        if caption_path is None:
            findings.add("caption_missing", name, f"{path.stem}.txt", level=level)
            continue
        try:
            lines = caption_text.read_lines(caption_path, section.caption_lines)
        except OSError as error:
            line = about(caption_path.name, clips.CANNOT_BE_READ(why=reason(error)))
            findings.add("caption_unreadable", name, line)
            continue
        except ValueError as error:
            findings.add("caption_encoding", name, about(caption_path.name, error))
            continue
        if not lines:
            findings.add("caption_empty", name, caption_path.name, level=level)
            continue
        texts[name] = text = "\n".join(lines)
        if any(caption_text.with_trigger(line, trigger) != line for line in lines):
            findings.add("trigger_missing", name, repr(trigger))
        if not section.wildcards and (choice := caption_text.find_choice(text)):
            findings.add("choice_unused", name, choice)
        if limit and (tokens := max(estimate_tokens(_as_trained(line, section, index)) for line in lines)) > limit:
            findings.add("caption_long", name, str(tokens))
    times = Counter(text for name, text in texts.items() if name in own)
    for name, text in texts.items():
        if name in own and times[text] > 1:
            findings.add("caption_repeated", name, str(times[text] - 1))
    _report_sentences(section, images, names, texts, findings)
    return texts


def _as_trained(text: str, section: settings.Dataset, index: int) -> str:
    """Return a caption as it is trained, before its tags are shuffled."""
    folder = section.folders[index]
    caption = caption_text.make_trained_caption(text, section.find_trigger(index), folder.prefix, folder.suffix)
    return unify_separators(caption, section)


def _report_sentences(
    section: settings.Dataset, images: list[Any], names: list[str], texts: dict[str, str], findings: Findings
) -> None:
    """Report sentences that training would change as if they were tags, and tags that it cannot tell apart.

    Each caption is judged with its trigger word.
    """
    trained = {
        name: _as_trained(texts[name], section, index)
        for name, (index, *_) in zip(names, images, strict=True)
        if name in texts
    }
    prose = set(find_sentences_used_as_tags(list(trained.values()), section))
    for name, caption in trained.items():
        if caption in prose:
            findings.add(
                "sentences_shuffled" if section.shuffle_tags else "sentences_cut", name, repr(shorten(texts[name], 80))
            )
    if section.shuffle_tags or section.tag_dropout:
        for name, text in texts.items():
            if "," not in text and (wide := next((comma for comma in WIDE_COMMAS if comma in text), "")):
                findings.add("wide_commas", name, wide)


def _report_copies(entries: list[tuple[str, Facts]], findings: Findings) -> None:
    """Report copies and images that look alike, each once, with the first image that it resembles."""
    first: dict[str, str] = {}
    rest: list[tuple[str, Facts]] = []
    for name, fact in entries:
        if fact.sha256 in first:
            findings.add("duplicate", name, first[fact.sha256])
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
            findings.add("near_duplicate", rest[i][0], rest[int(np.argmax(alike))][0])


def _check_buckets(
    entries: list[tuple[str, Facts, int, Mask | None]],
    examples: dict[str, list[int]],
    section: settings.Dataset,
    step: int,
    findings: Findings,
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
                findings.add("unreadable", name, str(error))
                continue
            raise
        place = buckets.follow(place, buckets.find_subject(mask, section.follow_mask))
        cut = 1 - (place.bucket_wh[0] * place.bucket_wh[1]) / (place.resized_wh[0] * place.resized_wh[1])
        for length in examples[name]:
            bucket: buckets.Bucket = (*place.bucket_wh, length) if length > 1 else place.bucket_wh
            groups[bucket].append((name, cut, place.upscaled))
        if cut > MUCH_CUT:
            findings.add("cut", name, f"{cut:.0%}")
        if mask and mask.white and any(mask.white) and not place.shows(mask.white):
            findings.add("mask_outside", name)
        size_text = f"{size[0]} x {size[1]}"
        if 4 * size[0] * size[1] < resolution**2:
            findings.add("tiny", name, size_text)
        elif place.upscaled:
            findings.add("small", name, size_text)
    rows = []
    for bucket, members in sorted(groups.items()):
        cuts = [cut for _, cut, _ in members]
        rows.append(
            {
                "size": buckets.format_bucket(bucket),
                "count": len(members),
                "cut": round(sum(cuts) / len(cuts), 4),
                "most_cut": round(max(cuts), 4),
                "enlarged": sum(enlarged for *_, enlarged in members),
            }
        )
        if len(members) == 1 and len(entries) > 1:
            findings.add("lonely_bucket", members[0][0], buckets.format_bucket(bucket))
    return rows


def _check_balance(section: settings.Dataset, images: list[Any], usable: list[int], findings: Findings) -> None:
    """Report folders of the config (with repeats), or subfolders of a single one, that are trained far more often."""
    seen: dict[str, float] = defaultdict(float)
    kohya: dict[str, str] = {}
    for i in usable:
        index, root, path, _ = images[i]
        folder = section.folders[index]
        below = path.relative_to(root).parts
        inner = below[0] if len(below) > 1 else "."
        seen[folder.path if len(section.folders) > 1 else inner] += folder.repeats
        for part in (root.name, *below[:-1]):
            if match := re.fullmatch(r"(\d+)_.+", part):
                kohya[part] = match[1]
    if len(seen) > 1 and max(seen.values()) >= 4 * min(seen.values()):
        shares = ", ".join(
            f"{name}: {format_digits(count)}" for name, count in sorted(seen.items(), key=lambda item: -item[1])[:8]
        )
        findings.add(
            "uneven",
            "",
            Message(
                "the numbers of images per epoch of the folders differ by a factor of four or more: {shares}",
                shares=shares,
            ),
        )
    for part, repeats in kohya.items():
        findings.add("kohya_folder", part, repeats)
