"""Problems of a draft: everything that prevents a start, at the setting that it is about."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lora_fp8 import families, settings
from lora_fp8.config.relations import NO_BASE, NO_FOLDER
from lora_fp8.config.validation import STILL_OPEN, TODO
from lora_fp8.data import clips
from lora_fp8.errors import Message, UserError, UserErrors
from lora_fp8.families.sources import selection
from lora_fp8.run import disk_space

from ... import base_models, dataset_folder, form, image_folders, run_monitor, sanitize, setting_values, submission
from ...context import Ui
from ...draft import Draft
from .draft_reader import DraftReader

NEXT_STEPS: dict[str, str] = {
    NO_BASE: "new.base.missing",
    NO_FOLDER: "new.pictures.missing",
}
"""Messages about an untouched form: the engine says what to write into a file, the page says what to do here."""


class Problems:
    """Finds what prevents a start, in the page's language."""

    def __init__(self, ui: Ui, draft: Draft, reader: DraftReader):
        self.ui, self.draft, self.reader = ui, draft, reader

    def find(self, text: str, has_run: bool = True) -> list[tuple[str, str]]:
        """Return (setting, message in the page's language) for everything that prevents a start.

        Args:
            text: TOML of the draft.
            has_run: True for a training, which needs a run folder of its own.
        """
        home = self.draft.home
        try:
            submission.check_presets(self.ui.place, text)
        except UserErrors as error:
            return [("preset", self.ui.translate(setting_values.remove_key(line))) for line in error.problems]
        problems = [(problem.key, self._translate_problem(problem)) for problem in form.find_problems(text, home)]
        try:
            values = form.read_values(text, home)
        except UserError:
            return problems
        invalid = {key for key, _ in problems}
        problems += self._find_path_problems(values, invalid)
        reported = {key for key, _ in problems}
        problems += [(key, line) for key, line in self._find_base_problems(values) if key not in reported]
        reported = {key for key, _ in problems}
        has_folder = has_run and not reported & {"name", "output_dir"}
        if has_folder and (free := self.find_free_name(values)):
            problems.append(("name", self.ui.say("new.name.taken", name=values["name"], free=free)))
        if "dataset.folders" not in reported:
            problems += self._find_folder_problems(values, invalid)
        return problems

    def _find_path_problems(self, values: dict[str, Any], invalid: set[str]) -> Iterable[tuple[str, str]]:
        """Yield (setting, message) for paths that cannot be used, of settings whose values are not invalid already."""
        for key, path in base_models.list_paths(values):
            if key not in invalid:
                try:
                    self._check_path(key, path)
                except UserError as error:
                    yield key, self.ui.translate(str(error))

    def _find_folder_problems(self, values: dict[str, Any], invalid: set[str]) -> Iterable[tuple[str, str]]:
        """Yield (setting, message) for image folders: empty ones, unreadable files, clips, missing captions."""
        counts = self.reader.count_folders(values)
        for folder, contents, _, mask in counts:
            if not contents.files:
                yield "dataset.folders", self.ui.say("new.pictures.none", folder=folder.name)
            elif unreadable := dataset_folder.find_unreadable(folder):
                files = self._list_files(unreadable)
                yield "dataset.folders", self.ui.say("new.pictures.unreadable", folder=folder.name, files=files)
            elif undecodable := dataset_folder.find_undecodable_captions(folder, mask):
                files = self._join(undecodable[:4]) + " …" * (len(undecodable) > 4)
                yield "dataset.folders", self.ui.say("new.captions.undecodable", folder=folder.name, files=files)
        if not invalid & {"model.family", "dataset.frames", "dataset.fps", "dataset.clip"}:
            yield from self._find_clip_problems(values, counts)
        without = sum(contents.without_caption for _, contents, *_ in counts)
        if without and values["dataset.missing_caption"] == "error":
            yield "dataset.missing_caption", self.ui.say("new.pictures.uncaptioned", count=without)

    def find_free_name(self, values: dict[str, Any]) -> str:
        """Return a name that a new training can have, if it cannot have that of the draft; "" if it can."""
        try:
            folder = self.ui.resolve_path(self.reader.resolve_local(str(values["output_dir"]))) / str(values["name"])
            queue = run_monitor.get_monitor(self.ui.place).queue
        except UserError:  # the page of the queue reports a damaged queue
            return ""
        try:
            queue.require_new(folder)
        except UserError:
            return queue.find_free_name(folder)
        return ""

    def list_base_problems(self, values: dict[str, Any]) -> list[tuple[str, str]]:
        """Return (setting, message) for everything that is wrong with the draft's base model."""
        for key, path in base_models.list_paths(values):
            if key in ("model.path", "model.components"):
                try:
                    self._check_path(key, path)
                except UserError as error:
                    return [(key, self.ui.translate(str(error)))]
        return list(self._find_base_problems(values))

    def _find_base_problems(self, values: dict[str, Any]) -> Iterable[tuple[str, str]]:
        """Yield (setting, message) for base models that the engine will refuse."""
        say, family = self.ui.say, str(values["model.family"])
        path, components = str(values["model.path"] or ""), str(values["model.components"] or "")
        for key, location in (("model.path", path), ("model.components", components)):
            known, name = self.reader.inspect_base(location), sanitize.shorten(Path(location).name)
            if known.wrong:
                yield key, say("new.base.strange", file=name, what=self.ui.translate(known.wrong))
            elif family in self.reader.families and not base_models.fits_family(known, family):
                file_says, form_says = self.reader.families[known.family], self.reader.families[family]
                yield key, say("new.base.differs", file=name, found=file_says, title=form_says)
        described = self.reader.describe_base(values)
        if described and not described.unanswered:
            yield from (("model.path", self.ui.translate(line)) for line in described.problems)
        if path == "demo" and family in self.reader.families and family not in base_models.list_demo_families():
            line = selection.NO_DEMO(family=repr(family), names=", ".join(base_models.list_demo_families()))
            yield "model.path", self.ui.translate(line)

    def _find_clip_problems(
        self, values: dict[str, Any], counts: list[tuple[Path, image_folders.Count, float, str]]
    ) -> Iterable[tuple[str, str]]:
        """Yield (setting, message) for videos that the engine will refuse."""
        say, family = self.ui.say, str(values["model.family"])
        for folder, contents, _, mask in counts:
            numbers = {"folder": folder.name, "count": contents.videos}
            if contents.videos and not families.get_traits(family)["clips"]:
                yield "dataset.folders", say("new.clips.refused", title=self.reader.families[family], **numbers)
            elif contents.videos and not clips.can_read_videos():
                yield "dataset.folders", f"{folder.name}: {self.ui.translate(clips.NEEDED)}"
            elif contents.videos and not values["dataset.frames"]:
                yield "dataset.frames", say("new.clips.unset", **numbers)
            elif examined := self.reader.examine(values, folder, mask):
                short = examined.list_files("clip_short")
                damaged = {
                    name: why
                    for name, why in examined.list_files("unreadable").items()
                    if dataset_folder.is_video(name)
                }
                for key, files in (("dataset.frames", short), ("dataset.folders", damaged)):
                    if files:
                        what = say(f"dataset.kind.{'clip_short' if files is short else 'unreadable'}")
                        yield key, f"{folder.name}: {what}: {self._list_files(files)}"

    def _list_files(self, files: dict[str, str]) -> str:
        """List the first few files, each with its reason."""
        brackets = " ({})" if self.ui.language == "en" else "（{}）"
        lines = [name + brackets.format(self.ui.translate(why)) for name, why in list(files.items())[:4]]
        return f"{self._join(lines)}{' …' if len(files) > 4 else ''}"

    def _join(self, names: list[str]) -> str:
        """Join the parts of a list as the page's language does."""
        return (", " if self.ui.language == "en" else "、").join(names)

    def _translate_problem(self, problem: form.Problem) -> str:
        """Translate a problem for its setting; an untouched form is told what to do here, and not what to write."""
        if step := NEXT_STEPS.get(setting_values.remove_key(problem.line).removeprefix(f"{problem.key}: ")):
            return self.ui.say(step)
        return setting_values.translate_problem(self.ui, problem.key, problem.line)

    def _check_path(self, key: str, path: str) -> None:
        """Raise UserError if the page may not use the path, or it is missing, or is not a file or folder as needed."""
        if path == TODO:  # an import left it open
            raise UserError(STILL_OPEN)
        if (
            key == "dataset.cache_dir"
            and not (os.path.isabs(path) or path.startswith("~"))
            and ".." not in Path(path).parts
        ):
            return  # below the page's home
        full = self.ui.resolve_path(self.reader.resolve_local(path))
        if key in ("output_dir", "dataset.cache_dir"):  # created if missing
            if why := disk_space.find_write_obstacle(full):
                raise UserError(disk_space.NOT_WRITABLE(path=sanitize.shorten(path), why=why))
            return
        kind = settings.PATHS.get(key, "folder")
        if not full.exists():
            if kind == "folder":
                sanitize.require_folder(full, path)
            if kind == "file":
                raise sanitize.make_missing_file_error(path)
            raise UserError(Message("{text}: there is no such file or folder", text=sanitize.shorten(path)))
        if kind == "folder" and not full.is_dir():
            raise UserError(Message("{text}: this is a file; give a folder", text=sanitize.shorten(path)))
        if kind == "file" and not full.is_file():
            raise UserError(Message("{text}: this is a folder; give a file", text=sanitize.shorten(path)))
