"""The settings that name files or folders of this machine, found in their declarations."""

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from .declarations import Job, Section


def _list_declared(model: type[Section], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (setting, what it names) of the settings of a section and of the sections in it."""
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("place"):
            yield f"{prefix}{name}", str(extra["place"])
        for inner in (field.annotation, *get_args(field.annotation)):
            if isinstance(inner, type) and issubclass(inner, Section):
                yield from _list_declared(inner, f"{prefix}{name}.")


PATHS: dict[str, str] = dict(_list_declared(Job))
"""Setting -> what it names: "file", "folder", "file or folder". Entries of lists and tables have no number in the name:
"dataset.folders.path", "preview.controls"."""
WORDS = {"model.path": "demo", "model.components": "auto", "preview.score_model": ""}
"""Those of them that may be a Hugging Face id, or this word, instead."""
WRITTEN = ("output_dir", "dataset.cache_dir")
"""Those of them that a training writes into."""


class PathPlace(NamedTuple):
    """Where a job's settings, as plain data, have a path."""

    setting: str
    """its name in PATHS"""
    place: tuple[str | int, ...]
    """with the numbers of entries: ("dataset", "folders", 0, "path")"""
    table: Any
    """the table or list that holds it"""
    name: str | int
    """its key or index there"""

    @property
    def path(self) -> Any:
        """Return the value, which is a text in the data of a valid job."""
        return self.table[self.name]

    @property
    def key(self) -> str:
        """Return the place as people read it: "dataset.folders.0.path"."""
        return ".".join(map(str, self.place))


def find_path_places(data: dict[str, Any]) -> list[PathPlace]:
    """Return where a job's data, which may lack settings, has paths: each can be read and replaced there."""
    return [place for setting in PATHS for place in _find_places(setting, setting.split("."), data, ())]


def _find_places(setting: str, parts: list[str], table: Any, place: tuple[str | int, ...]) -> Iterator[PathPlace]:
    if isinstance(table, list):
        for index, item in enumerate(table):
            yield from _find_places(setting, parts, item, (*place, index))
        return
    if not isinstance(table, dict) or parts[0] not in table:
        return
    name, value = parts[0], table[parts[0]]
    if len(parts) > 1:
        yield from _find_places(setting, parts[1:], value, (*place, name))
    elif isinstance(value, dict | list):
        for inner in list(value) if isinstance(value, dict) else range(len(value)):
            yield PathPlace(setting, (*place, name, inner), value, inner)
    else:
        yield PathPlace(setting, (*place, name), table, name)
