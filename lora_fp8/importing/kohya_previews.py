"""kohya's previews: prompt files (.txt with flags, .json, .toml), prompts in the settings, or a page's fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import Message
from . import common_values, preview_settings, remarks
from .import_draft import Draft
from .source_files import decoded, read_source

PROMPT_FLAGS = {"n": "negative", "w": "width", "h": "height", "d": "seed", "s": "steps", "l": "scale", "g": "guide"}
PROMPT_FLAGS |= {"f": "frames", "ci": "controls"}


def set_previews(draft: Draft) -> None:
    """Set preview.* from a prompt file, prompts in the settings, or the page's fields."""
    fields = ["positive_prompts", "negative_prompts", "sample_width", "sample_height", "sample_cfg", "sample_seed"]
    fields += ["sample_steps"]
    keys = [key for key in ("sample_prompts", *fields) if draft.has(key)]
    pictures: list[dict[str, Any]] = []
    notes: list[str] = []
    off = draft.has("enable_preview") and not common_values.on(draft.given["enable_preview"])
    draft.mapped("enable_preview", {}, Message("preview.prompts says it"))
    if draft.has("sample_prompts"):
        pictures, notes = read_prompts(draft, str(draft.given["sample_prompts"]))
    elif draft.has("positive_prompts"):
        names = ("negative", "width", "height", "scale", "seed", "steps")
        values = {name: draft.get(key) for name, key in zip(names, fields[1:], strict=True)}
        pictures = [{"prompt": draft.given["positive_prompts"], **values}]
    if off:
        draft.none([*keys, "sample_every_n_steps", "sample_every_n_epochs"], remarks.PREVIEWS_OFF, off=True)
    elif pictures:
        notes += [guide(draft, pictures)]
        note = remarks.join(notes)
        own = ("prompts", "negative", "width", "height", "guidance", "seed", "steps")
        by_key = dict(zip(fields, own, strict=True))
        preview_settings.set_previews(draft, {key: by_key.get(key, "") for key in keys}, pictures, note)
        first = common_values.on(draft.get("sample_at_first"))
        draft.mapped("sample_at_first", {"preview.at_start": first})
        if not draft.has("sample_at_first"):
            draft.set("preview.at_start", False, remarks.TOOLS_DEFAULT(tool=draft.tool.name))
    elif keys:
        draft.none(keys, Message("the prompts are not here"))
    draft.none([*fields, "sample_prompts", "sample_at_first"], remarks.NOT_PROMPTED, off=True)
    if not pictures or off:
        draft.settings.pop("preview.every", None)


def read_prompts(draft: Draft, given: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Read the prompts of a .txt, .json or .toml file, or of the text itself; return them, and remarks about them."""
    lines = given.splitlines()
    if len(lines) == 1 and re.search(r"\.(txt|json|toml)$", given.strip(), re.IGNORECASE):
        place = draft.find(given.strip())
        if place is None:
            draft.notes.append(
                Message(
                    "{key} = {path} is not here: put it beside {file}",
                    key="sample_prompts",
                    path=repr(given),
                    file=draft.source.path.name,
                )
            )
            return [], []
        if place.suffix.lower() == ".txt":
            lines = decoded(place).splitlines()
        else:
            return _prompt_tables(read_source(place).data), []
    pictures, left = [], []
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            picture, unknown = parse_prompt(line)
            pictures.append(picture)
            left += unknown
    return pictures, [Message("{names} mean nothing here", names=", ".join(dict.fromkeys(left)))] if left else []


def parse_prompt(line: str, known: Mapping[str, str] = PROMPT_FLAGS) -> tuple[dict[str, Any], list[str]]:
    """Parse a line of a prompt file; return its values, and its flags that mean nothing here.

    Args:
        line: the line.
        known: flag -> our name for its value; "controls" may occur several times.
    """
    head, *flags = re.split(r"\s--(?=[a-z][a-z0-9_]*\s)", " " + line.strip())
    picture: dict[str, Any] = {"prompt": head.strip()}
    left = []
    for flag in flags:
        name, _, value = flag.partition(" ")
        if known.get(name) == "controls":
            picture.setdefault("controls", []).append(value.strip())
        elif name in known:
            picture[known[name]] = value.strip()
        else:
            left.append(f"--{name}")
    return picture, left


def _prompt_tables(data: Any) -> list[dict[Any, Any]]:
    """Read kohya's prompts from tables: a list of them, or [prompt] with [[prompt.subset]]."""
    if isinstance(data, dict):
        common = dict(data.get("prompt", {}))
        data = [{**common, **subset} for subset in common.pop("subset", [{}])]
    names: dict[Any, str] = {"negative_prompt": "negative", "sample_steps": "steps", "guidance_scale": "guide"}
    return [{names.get(key, key): value for key, value in dict(table).items()} for table in data]


def guide(draft: Draft, pictures: list[dict[str, Any]]) -> str:
    """Set each preview's guidance from --l (classifier-free) or --g (embedded), whichever applies; return a remark."""
    embedded = draft.family in ("flux", "flux_kontext", "flux2")
    note = ""
    for picture in pictures:
        scale, inner = picture.pop("scale", None), picture.pop("guide", None)
        picture["guidance"] = inner if embedded else scale
        if embedded and scale not in (None, "1", "1.0", 1, 1.0):
            note = Message("--l (classifier-free guidance) is not used for this model here, only --g")
    return note
