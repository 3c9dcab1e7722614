"""The folder that a window shows: its files, those that match the filters, its clips and its examination."""

import re
from typing import Any

from lora_fp8 import families
from lora_fp8.data import caption_operations
from lora_fp8.errors import UserError

from ... import dataset_folder, form
from ...context import Ui

PER_PAGE = 60


class OpenFolder:
    """Reads the folder of a window from what the window shows (`at`, see `Layout`)."""

    def __init__(self, ui: Ui):
        self.ui, self.say = ui, ui.say
        self.families = {name: families.get(name).title for name in families.available()}

    def get_dataset(self, at: dict[str, Any]) -> dataset_folder.DatasetFolder:
        """Return the open folder, if the page may still use it. Raises UserError."""
        if not at.get("folder"):
            raise UserError(self.say("dataset.choose"))
        return dataset_folder.open_folder(self.ui.path(at["folder"]), mask=at["mask"])

    def choose_resolution(self, family: str, given: float) -> int:
        """Return the resolution that is given; 0 is the family's."""
        return int(given or 0) or families.get(family).native_resolution

    def examine(
        self,
        at: dict[str, Any],
        dataset: dataset_folder.DatasetFolder,
        family: str,
        resolution: float,
        again: bool = False,
    ) -> dataset_folder.Examination:
        """Return the examination of the folder; starts one if there is none, or if `again`."""
        held = {
            name: form.from_component(form.settings()[f"dataset.{name}"], at["cut"][name])
            for name in dataset_folder.CUT
        }
        settings = (*dataset_folder.list_clip_settings(family, **held), *at["tags"])
        side = self.choose_resolution(family, resolution)
        purpose = dataset_folder.Purpose(family, side, settings, dataset.mask)
        return dataset_folder.examine(self.ui.place, dataset.folder, purpose, again)

    def find_texts(self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder, name: str) -> tuple[str, str]:
        """Return an image's caption as it was loaded, and as it was when the editor left it."""
        text = "" if name in dataset.wrong else dataset.reread_caption(name)
        return at["unsaved"].get(name, (text, text))

    def filter_names(self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder) -> list[str]:
        """List the names that match the filters. "[tag]" searches a tag, other words a part of the name or text."""
        query = at["query"].strip()
        names = list(dataset.files)
        if at.get("finding"):
            only = set(at.get("only", ()))
            names = [name for name in names if name in only]
        if at["showing"] == "uncaptioned":
            names = [name for name in names if not dataset.texts[name].strip()]
        if at["showing"] == "chosen":
            names = [name for name in names if name in at["chosen"]]
        if match := re.fullmatch(r"\[(.+)\]", query):
            return [
                name
                for name in names
                if match[1] in caption_operations.split_tags(" ".join(dataset.texts[name].splitlines()))
            ]
        wanted = query.casefold().split()
        return [name for name in names if all(w in f"{name} {dataset.texts[name]}".casefold() for w in wanted)]

    def list_clips(
        self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder, family: str, resolution: float
    ) -> dict[str, dict[str, Any]]:
        """Return what the report says of each clip: its entry among the images, or {"error": message}."""
        if not dataset.videos and not at["cut"]["frames"]:
            return {}
        examination = self.examine(at, dataset, family, resolution)
        known = {clip["file"]: clip for clip in (examination.report or {}).get("pictures", ()) if "seconds" in clip}
        return known | {
            name: {"error": why}
            for name, why in examination.list_files("unreadable").items()
            if dataset_folder.is_video(name)
        }

    def list_files(self, at: dict[str, Any], kind: str, family: str, resolution: float) -> list[str]:
        """List the files that findings of this kind name."""
        return list(self.examine(at, self.get_dataset(at), family, resolution).list_files(kind))
