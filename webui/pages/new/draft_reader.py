"""What a draft refers to on this machine: the base model's files, folders of images, and the clips in them."""

import os
import re
from pathlib import Path
from typing import Any

from lora_fp8 import families
from lora_fp8.errors import UserError
from lora_fp8.families import sources
from lora_fp8.families.sources.reference import translate_windows_path

from ... import base_models, dataset_folder, image_folders
from ...context import Ui


class DraftReader:
    """Reads the files and folders that a draft names, as far as the page may read them."""

    def __init__(self, ui: Ui):
        self.ui = ui
        self.descriptions = base_models.Descriptions()
        self.counted: dict[tuple[Path, str], image_folders.Count] = {}
        self.families = {name: families.get(name).title for name in families.list_families()}

    def inspect_base(self, path: str) -> base_models.Base:
        """Inspect a base model of the draft. Returns an empty `Base` for a path that the page may not read."""
        if not path or path == "demo" or base_models.is_remote(path):
            return base_models.Base()
        try:
            return base_models.inspect_base(self.ui.resolve_path(self.resolve_local(path)))
        except UserError:
            return base_models.Base()

    def describe_base(self, values: dict[str, Any]) -> sources.BaseDescription | None:
        """Return what the hub answers about the draft's base model; None for a local one, and while it is asked."""
        path, revision, family = (str(values[f"model.{name}"] or "") for name in ("path", "revision", "family"))
        if not base_models.is_remote(path):
            return None
        return self.descriptions.get(path, revision, family if family in self.families else "")

    def resolve_local(self, path: str) -> Path:
        """Resolve a path of the draft. Relative paths start at the page's home, as in the job.

        A Windows path, for example of an imported config, is not relative: in WSL it is translated, elsewhere it stays.
        """
        path = translate_windows_path(path)
        return Path(path) if re.match(r"[A-Za-z]:[\\/]", path) else self.ui.place.home / os.path.expanduser(path)

    def count_folders(self, values: dict[str, Any]) -> list[tuple[Path, image_folders.Count, float, str]]:
        """Return (folder, its contents, its repeats, where its masks are) for every folder of the draft."""
        rows = values["dataset.folders"] if isinstance(values["dataset.folders"], list) else []
        counts = []
        for row in rows:
            path = row.get("path") if isinstance(row, dict) else None
            repeats = row.get("repeats", 1) if isinstance(row, dict) else 1
            if isinstance(path, str) and path and isinstance(repeats, (int, float)):
                try:
                    folder = self.ui.resolve_path(self.resolve_local(path))
                except UserError:
                    continue  # reported by the check of paths
                if folder.is_dir():
                    mask = row["mask"] if isinstance(row.get("mask"), str) else ""
                    counts.append((folder, image_folders.count_files(folder, mask), repeats, mask))
        return counts

    def examine(self, values: dict[str, Any], folder: Path, mask: str) -> dataset_folder.Examination | None:
        """Examine a folder in a process of its own if videos in it may be cut into clips; return None otherwise."""
        cut = dataset_folder.list_clip_settings(
            str(values["model.family"]), *(values[f"dataset.{name}"] for name in dataset_folder.CUT)
        )
        if not cut:
            return None
        family, side = str(values["model.family"]), values["dataset.resolution"]
        side = side if isinstance(side, int) else families.get(family).native_resolution
        now = image_folders.count_files(folder, mask)
        again = self.counted.get((folder, mask), now) != now  # files were added or removed since
        self.counted[folder, mask] = now
        purpose = dataset_folder.Purpose(family, side, cut, mask if "*" in mask else "")
        return dataset_folder.examine(folder, purpose, again)
