"""What the New training page says of a folder: architecture, resolution, clips, masks and tags."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from lora_fp8 import families
from lora_fp8.errors import UserError
from lora_fp8.settings import is_mask_folder

from .. import dataset_folder, form, run_monitor
from ..context import Ui
from ..draft import Draft


class TrainingSettings:
    """Reads the draft of New training, or the newest training."""

    def __init__(self, ui: Ui):
        self.ui = ui

    def _read_training_values(self) -> dict[str, Any]:
        """Return the settings of New training; if that form is untouched, those of the newest training."""
        home = self.ui.place.home
        text = Draft(home).load_text()
        if text == form.START:
            trainings = [
                view
                for view in run_monitor.get_monitor(self.ui.place).views()
                if view.kind == "train" and type(view.id) is int
            ]
            if trainings:
                text = run_monitor.get_monitor(self.ui.place).queue.read_config(
                    max(trainings, key=lambda training: training.created).id
                )
        return form.read_values(text, home)

    def choose_examination(self, folder: Path | None) -> tuple[str, int, dict[str, Any]]:
        """Return what to examine a folder for: family, resolution (0 is the family's), clip settings."""
        settings = {name: form.collect_settings()[f"dataset.{name}"] for name in dataset_folder.CUT}
        usual = {name: form.to_component(setting, setting.default) for name, setting in settings.items()}
        try:
            values = self._read_training_values()
        except UserError:  # New training and the list of runs report it
            values = {}
        family, side = str(values.get("model.family")), values.get("dataset.resolution")
        if family not in families.list_families():
            return "sdxl", 0, usual
        rows = self._find_rows(values, folder) if folder else []
        side = (rows and rows[0].get("resolution")) or side
        cut = {name: form.to_component(setting, values[f"dataset.{name}"]) for name, setting in settings.items()}
        return family, side if type(side) is int else 0, cut if families.get_traits(family)["clips"] else usual

    def _find_rows(self, values: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
        """Return the entries of dataset.folders whose path is this folder."""
        rows, own_rows = values["dataset.folders"], []
        for row in rows if isinstance(rows, list) else []:
            path = row.get("path") if isinstance(row, dict) else None
            if isinstance(path, str) and path:
                with contextlib.suppress(UserError):  # New training reports what is wrong with a path
                    if self.ui.resolve_path(self.ui.place.home / os.path.expanduser(path)) == folder:
                        own_rows.append(row)
        return own_rows

    def list_folders(self) -> dict[str, Path | None]:
        """List the folders of New training, each once: as written -> its place; None if missing or not allowed."""
        home = self.ui.place.home
        try:
            rows = form.read_values(Draft(home).load_text(), home)["dataset.folders"]
        except UserError:  # New training reports what is wrong with it
            return {}
        folders: dict[str, Path | None] = {}
        for row in rows if isinstance(rows, list) else []:
            path = row.get("path") if isinstance(row, dict) else None
            if isinstance(path, str) and path:
                folder = None
                with contextlib.suppress(UserError):  # New training reports what is wrong with a path
                    folder = self.ui.resolve_path(home / os.path.expanduser(path))
                if folder is None or not folder.is_dir():
                    folders[path] = None
                elif folder not in folders.values():
                    folders[path] = folder
        return folders

    def find_mask(self, folder: Path) -> str:
        """Return where New training has the masks of a folder, as in dataset.folders; "" if it names none."""
        home = self.ui.place.home
        for row in self._find_draft_rows(folder):
            mask = row.get("mask")
            if isinstance(mask, str) and mask:
                with contextlib.suppress(UserError):
                    return str(self.ui.resolve_path(home / os.path.expanduser(mask))) if is_mask_folder(mask) else mask
        return ""

    def list_tag_settings(self, folder: Path) -> list[str]:
        """Return what New training does to the tags of a folder, as `--set` of the doctor; [] if nothing."""
        if not self._find_draft_rows(folder):
            return []
        values = form.read_values(Draft(self.ui.place.home).load_text(), self.ui.place.home)
        if not (values["dataset.shuffle_tags"] is True or values["dataset.tag_dropout"]):
            return []
        return [f"dataset.{name}={json.dumps(values[f'dataset.{name}'])}" for name in dataset_folder.TAGS]

    def read_bucket_settings(self) -> dict[str, Any]:
        """Return the settings by which this training places images in buckets, where they are changed and valid."""
        try:
            values = self._read_training_values()
        except UserError:  # New training and the list of runs report it
            return {}
        step, aspect = values["dataset.bucket_step"], values["dataset.max_aspect"]
        given = {"bucket_step": step} if type(step) is int and 8 <= step <= 512 else {}
        given |= {"max_aspect": aspect} if type(aspect) in (int, float) and 1 <= aspect <= 8 and aspect != 2 else {}
        given |= {"follow_mask": True} if values["dataset.follow_mask"] is True else {}
        return given | {name: False for name in ("buckets", "upscale") if values[f"dataset.{name}"] is False}

    def _find_draft_rows(self, folder: Path) -> list[dict[str, Any]]:
        """Return the rows of dataset.folders in which New training names this folder."""
        home = self.ui.place.home
        try:
            return self._find_rows(form.read_values(Draft(home).load_text(), home), folder)
        except UserError:  # New training reports what is wrong with it
            return []
