"""What the grid shows of a folder: each image with its caption, problems, size and the crop that training takes."""

import contextlib
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_fp8 import families
from lora_fp8.common.numbers import format_digits
from lora_fp8.data import buckets, caption_journal, caption_operations, clips, image_changes
from lora_fp8.data.image_edits import NOTHING, WHOLE
from lora_fp8.errors import UserError

from .. import dataset_folder, form, image_folders, sanitize
from ..context import Ui
from . import captioning, captions
from .training_settings import TrainingSettings

SHOWING = ("all", "uncaptioned", "chosen", "excluded")
MOST_ROWS = 120
"""Images of one answer."""
THUMBNAIL, LARGE = 320, 1280
BADGES = ("problem", "warning")
"""Levels of findings that are shown at an image."""
UNBADGED = ("caption_missing",)
"""Findings that the empty caption box shows already."""


@dataclass(frozen=True)
class Filter:
    """Which images a window shows.

    Attributes:
        query: "[tag]" searches a tag; other words are each a part of the name or caption.
        showing: one of SHOWING.
        chosen: the images that are selected in the window.
        finding: kind of a finding whose images are shown; "" for all.
    """

    query: str = ""
    showing: str = "all"
    chosen: tuple[str, ...] = ()
    finding: str = ""


class FolderView:
    """A folder as New training would use it.

    Args:
        ui: language and place.
        folder: its path, as the window sends it.
        family, resolution, cut: what to examine it for, `cut` as the fields of `dataset_folder.CUT` hold it; "", 0 and
            None take those of New training.
        fresh: read it from disk now. Otherwise it is as it was read last, since listing 10,000 images takes a second;
            captions that are shown or saved are read again in any case.

    Raises:
        UserError: the page may not use the folder, or it cannot be read.
    """

    def __init__(
        self,
        ui: Ui,
        folder: str,
        family: str = "",
        resolution: int = 0,
        cut: dict[str, Any] | None = None,
        fresh: bool = False,
    ):
        self.ui, self.say = ui, ui.say
        self.folder = ui.resolve_path(folder)
        self.training = TrainingSettings(ui)
        mask = self.training.find_mask(self.folder)
        read = dataset_folder.open_folder(self.folder, fresh=True, mask=mask) if fresh else None
        self.dataset = read or dataset_folder.open_cached(self.folder, mask)
        usual, side, usual_cut = self.training.choose_examination(self.folder)
        self.cut = usual_cut | {name: value for name, value in (cut or {}).items() if name in usual_cut}
        self.family = family if family in families.list_families() else usual
        native = families.get(self.family).native_resolution
        self.resolution = resolution or (side if self.family == usual else 0) or native
        self.buckets = self.training.read_bucket_settings() if self.family == usual else {}

    def examine(self, again: bool = False) -> dataset_folder.Examination:
        """Return the examination of the folder for this training.

        One is started if there is none, if `again`, and if the folder has other files or edits since the last one.
        """
        held = {
            name: form.from_component(form.collect_settings()[f"dataset.{name}"], value)
            for name, value in self.cut.items()
        }
        settings = dataset_folder.list_clip_settings(self.family, **held)
        settings = (*settings, *self.training.list_tag_settings(self.folder))
        settings = (*settings, *(f"dataset.{name}={json.dumps(value)}" for name, value in self.buckets.items()))
        purpose = dataset_folder.Purpose(self.family, self.resolution, settings, self.dataset.mask)
        examination = dataset_folder.examine(self.folder, purpose, again)
        names = (*self.dataset.files, *sorted((name, repr(edit)) for name, edit in self.dataset.edits.items() if edit))
        if examination.files not in (None, names) and not examination.running:
            examination = dataset_folder.examine(self.folder, purpose, again=True)
        if examination.files is None:
            examination.files = names
        return examination

    def filter_names(self, wanted: Filter) -> list[str]:
        """List the images that match."""
        if wanted.showing == "excluded":
            return self.list_excluded()
        names = list(self.dataset.files)
        if wanted.finding:
            only = self.examine().list_files(wanted.finding)
            names = [name for name in names if name in only]
        if wanted.showing == "uncaptioned":
            without = {*self.dataset.list_uncaptioned()}
            names = [name for name in names if name in without]
        if wanted.showing == "chosen":
            chosen = set(wanted.chosen)
            names = [name for name in names if name in chosen]
        if match := re.fullmatch(r"\[(.+)\]", wanted.query.strip()):
            return [name for name in names if match[1] in self._split_tags(name)]
        words = wanted.query.casefold().split()
        texts = self.dataset.texts
        return [name for name in names if all(word in f"{name} {texts[name]}".casefold() for word in words)]

    def list_excluded(self) -> list[str]:
        """List the images that are excluded from training."""
        return image_changes.list_excluded(self.folder, self.dataset.edits)

    def _split_tags(self, name: str) -> list[str]:
        return caption_operations.split_tags(" ".join(self.dataset.texts[name].splitlines()))

    def list_rows(self, wanted: Filter, offset: int, count: int) -> dict[str, Any]:
        """Return a part of the matching images, and the figures of the whole folder."""
        names = self.filter_names(wanted)
        examination = self.examine()
        facts = {entry["file"]: entry for entry in (examination.report or {}).get("pictures", ())}
        findings = self._collect_findings(examination)
        offset = max(0, min(offset, len(names) - 1))
        page_names = names[offset : offset + max(1, min(count, MOST_ROWS))]
        texts = self.dataset.texts
        return {
            "folder": str(self.folder),
            "name": sanitize.strip_unseen(self.folder.name),
            "offset": offset,
            "matching": len(names),
            "total": len(texts),
            "without": len(self.dataset.list_uncaptioned()),
            "problem": self.ui.translate(self.dataset.problem),
            "excluded": len(self.list_excluded()),
            "rows": [
                self._describe(name, facts.get(name), findings.get(name, []))
                if name in self.dataset.files
                else self._describe_excluded(name)
                for name in page_names
            ],
            "history": captions.describe_history(self.ui, self.folder),
            "stamp": self.make_stamp(examination),
        }

    def _collect_findings(self, examination: dataset_folder.Examination) -> dict[str, list[dict[str, str]]]:
        """Collect the problems and warnings of each image."""
        collected: dict[str, list[dict[str, str]]] = {}
        for finding in (examination.report or {}).get("findings", ()):
            if finding["level"] in BADGES and finding["kind"] not in UNBADGED:
                title = self.say(f"dataset.kind.{finding['kind']}")
                for file in finding["files"]:
                    detail = self.ui.translate(file["detail"]) if file["detail"] else ""
                    badge = {"level": finding["level"], "title": title, "detail": detail}
                    collected.setdefault(file["file"], []).append(badge)
        return collected

    def _describe_excluded(self, name: str) -> dict[str, Any]:
        """Describe an image that is excluded: it is shown as it would be trained, and its caption cannot be edited."""
        return self._start_row(name) | {
            "excluded": True,
            "badges": [{"level": "quiet", "title": self.say("images.excluded"), "detail": ""}],
        }

    def _start_row(self, name: str) -> dict[str, Any]:
        """Return what is known of an image without its caption and its examination."""
        path, edit = self.folder / name, self.dataset.edits.get(name, NOTHING)
        return {
            "name": name,
            "label": sanitize.strip_unseen(name),
            "caption": "",
            "typed": None,
            "unreadable": "",
            "thumbnail": self.ui.make_picture_link(path, THUMBNAIL, edit=edit),
            "large": self.ui.make_picture_link(path, LARGE, edit=edit),
            "uncropped": self.ui.make_picture_link(path, LARGE, edit=replace(edit, crop=WHOLE)),
            "cut": list(edit.crop),
            "video": dataset_folder.is_video(name),
            "excluded": False,
            "badges": [],
            "figures": [],
        }

    def _describe(self, name: str, fact: dict[str, Any] | None, badges: list[dict[str, str]]) -> dict[str, Any]:
        dataset = self.dataset
        with contextlib.suppress(UserError):  # `wrong` has it
            dataset.reread_caption(name)
        loaded, typed = captions.unwritten.get(self.folder, {}).get(name, (dataset.texts[name], None))
        row = self._start_row(name) | {"caption": loaded, "typed": typed, "badges": badges}
        row["unreadable"] = self.ui.translate(dataset.wrong[name]) if name in dataset.wrong else ""
        if row["video"] and not clips.can_read_videos():
            problem = {"level": "problem", "title": self.ui.translate(clips.NEEDED), "detail": ""}
            row |= {"thumbnail": "", "large": "", "badges": [problem, *badges]}
        if fact is None:
            if any(badge["level"] == "problem" for badge in badges):  # it was examined, and cannot be read
                row |= {"thumbnail": "", "large": ""}
            return row
        row["size"] = [fact["width"], fact["height"]]
        row["figures"].append(f"{fact['width']} × {fact['height']}")
        try:
            size, given = (fact["width"], fact["height"]), dict(self.buckets)
            step = given.pop("bucket_step", families.get(self.family).bucket_step)
            white = fact.get("white") if given.pop("follow_mask", False) else None
            place = buckets.follow(buckets.place(size, self.resolution, step, **given), white)
        except UserError:  # the doctor reports it
            return row
        (width, height), (left, top), (w, h) = place.resized_wh, place.crop_xy, place.bucket_wh
        row["crop"] = {"left": left / width, "top": top / height, "width": w / width, "height": h / height}
        cut = f"{1 - w * h / (width * height):.0%}"
        row["figures"].append(self.say("dataset.crop", bucket=f"{w} × {h}", cut=cut))
        if "seconds" in fact:
            row["figures"] += self._describe_clip(fact)
        return row

    def _describe_clip(self, fact: dict[str, Any]) -> list[str]:
        figures = [self.say("dataset.clip.seconds", seconds=format_digits(fact["seconds"]))]
        figures.append(self.say("dataset.clip.rate", rate=format_digits(fact["fps"])))
        if fact["pieces"]:
            figures.append(self.say("dataset.clip.pieces", count=fact["pieces"], length=fact["length"]))
        return figures

    def make_stamp(self, examination: dataset_folder.Examination | None = None) -> str:
        """Return a text that changes when images, captions or findings may have changed."""
        examination = examination or self.examine()
        parts = [examination.begun if examination.report is not None else 0.0]
        for path in (self.folder, self.folder / caption_journal.JOURNAL):
            try:
                status = path.stat()
                parts += [status.st_mtime_ns, status.st_size]
            except OSError:
                parts.append(0)
        return "-".join(map(str, parts))

    def describe_state(self) -> dict[str, Any]:
        """Return what changes while a window looks at the folder: its examination and its captioning job."""
        examination = self.examine()
        return {
            "stamp": self.make_stamp(examination),
            "examining": {"done": examination.done, "total": examination.total} if examination.running else None,
            "problem": self.ui.translate(
                self.dataset.unusable or ("" if self.dataset.problem else examination.problem)
            ),
            "job": captioning.describe_job(self.ui, self.folder),
        }


def list_draft_folders(ui: Ui) -> list[dict[str, Any]]:
    """List the folders of New training: path, name, whether nothing is in them, and whether they are missing."""
    listed = []
    for given, folder in TrainingSettings(ui).list_folders().items():
        place = folder or Path(given)
        empty = folder is not None and not image_folders.count_files(folder).files
        name = sanitize.shorten(place.name or given, 60)
        listed.append({"path": str(folder or given), "name": name, "empty": empty, "missing": folder is None})
    return listed
