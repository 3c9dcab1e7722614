"""kohya's previews: prompt files (.txt with flags, .json, .toml), prompts in the settings, or a page's fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import Message
from . import common_values, model_settings, preview_settings, remarks
from .import_draft import Draft
from .source_files import read_source, read_text_file

PROMPT_FLAGS = {"n": "negative", "w": "width", "h": "height", "d": "seed", "s": "steps", "l": "scale", "g": "guide"}
PROMPT_FLAGS |= {"f": "frames", "ci": "controls"}


def set_previews(draft: Draft) -> None:
    """Set preview.* from a prompt file, prompts in the settings, or the page's fields."""
    fields = ["positive_prompts", "negative_prompts", "sample_width", "sample_height", "sample_cfg", "sample_seed"]
    fields += ["sample_steps"]
    keys = [key for key in ("sample_prompts", *fields) if draft.has(key)]
    pictures: list[dict[str, Any]] = []
    notes: list[str] = []
    off = draft.has("enable_preview") and not common_values.is_on(draft.given["enable_preview"])
    draft.report_mapped("enable_preview", {}, Message("preview.prompts switches previews on"))
    if draft.has("sample_prompts"):
        pictures, notes = read_prompts(draft, str(draft.given["sample_prompts"]))
    elif draft.has("positive_prompts"):
        names = ("negative", "width", "height", "scale", "seed", "steps")
        values = {name: draft.get(key) for name, key in zip(names, fields[1:], strict=True)}
        pictures = [{"prompt": draft.given["positive_prompts"], **values}]
    if off:
        draft.report_unmatched([*keys, "sample_every_n_steps", "sample_every_n_epochs"], remarks.PREVIEWS_OFF, off=True)
    elif pictures:
        notes += [set_guidance(draft, pictures)]
        note = remarks.join(notes)
        own = ("prompts", "negative", "width", "height", "guidance", "seed", "steps")
        by_key = dict(zip(fields, own, strict=True))
        preview_settings.set_previews(draft, {key: by_key.get(key, "") for key in keys}, pictures, note)
        first = common_values.is_on(draft.get("sample_at_first"))
        draft.report_mapped("sample_at_first", {"preview.at_start": first})
        if not draft.has("sample_at_first"):
            draft.set("preview.at_start", False, remarks.TOOLS_DEFAULT(tool=draft.tool.name))
    elif keys:
        draft.report_unmatched(keys, Message("the prompt file was not found"))
    draft.report_unmatched([*fields, "sample_prompts", "sample_at_first"], remarks.NOT_PROMPTED, off=True)
    if not pictures or off:
        draft.settings.pop("preview.every", None)


def read_prompts(draft: Draft, given: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Read the prompts of a .txt, .json or .toml file, or of the text itself; return them, and remarks about them."""
    lines, file = given.splitlines(), "sample_prompts"
    if len(lines) == 1 and re.search(r"\.(txt|json|toml)$", given.strip(), re.IGNORECASE):
        place = draft.find(given.strip())
        if place is None:
            draft.notes.append(remarks.PUT_BESIDE(key="sample_prompts", path=repr(given), file=draft.source.path.name))
            return [], []
        file = place.name
        if place.suffix.lower() != ".txt":
            return _read_prompt_tables(read_source(place).data, file)
        lines = read_text_file(place).splitlines()
    pictures: list[dict[str, Any]] = []
    left: list[str] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            picture, unknown = parse_prompt(line, any_case=True)
            pictures.append(picture | {"where": Message("{file}, line {number}", file=file, number=number)})
            left += unknown
    return pictures, name_unknown_flags(left)


def name_unknown_flags(flags: Iterable[str]) -> list[str]:
    """Return the remark that names the unknown flags of prompts; [] if there are none."""
    names = ", ".join(dict.fromkeys(flags))
    return [Message("this trainer does not use these prompt options: {names}", names=names)] if names else []


def parse_prompt(
    line: str, known: Mapping[str, str] = PROMPT_FLAGS, any_case: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Parse a line of a prompt file; return its values, and its unknown flags.

    Whatever begins with -- is no text of the prompt in these tools, misspelt flags such as --w=64 neither.

    Args:
        line: the line.
        known: flag -> our name for its value; "controls" may occur several times.
        any_case: flags are matched whatever their case, as sd-scripts does.

    Returns:
        The values by our names, with "flags", the flag of each by the same names; and the flags that are not known.
    """
    head, *parts = re.split(r"\s--(?=[^\s-])", " " + line.strip())
    picture: dict[str, Any] = {"prompt": head.strip()}
    flags: dict[str, str] = {}
    left = []
    for part in parts:
        flag, *rest = part.split(None, 1)
        value = rest[0].strip() if rest else ""
        name = known.get(flag.lower() if any_case else flag)
        if name == "controls":
            picture.setdefault("controls", []).append(value)
        elif name:
            picture[name], flags[name] = value, f"--{flag}"
        else:
            left.append(f"--{flag}")
    return picture | ({"flags": flags} if flags else {}), left


def _read_prompt_tables(data: Any, file: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Read kohya's prompts from tables: a list of them or of lines, or [prompt] with [[prompt.subset]]."""
    if isinstance(data, dict) and isinstance(data.get("prompt"), dict):
        common = dict(data["prompt"])
        subsets = common.pop("subset", [{}])
        rows = [{**common, **row} if isinstance(row, dict) else row for row in _as_list(subsets)]
    else:
        rows = _as_list(data)
    pictures: list[dict[str, Any]] = []
    left: list[str] = []
    notes: list[str] = []
    for number, row in enumerate(rows, 1):
        where = Message("{file}, prompt {number}", file=file, number=number)
        if isinstance(row, str):
            picture, unknown = parse_prompt(row, any_case=True)
            left += unknown
        elif isinstance(row, dict):
            picture = {PROMPT_KEYS.get(key, key): value for key, value in row.items()}
            picture["flags"] = {PROMPT_KEYS.get(key, key): key for key in row}
        else:
            notes.append(Message("{where} is not a prompt and was left out", where=where))
            continue
        pictures.append(picture | {"where": where})
    return pictures, notes + name_unknown_flags(left)


PROMPT_KEYS = {"negative_prompt": "negative", "sample_steps": "steps", "guidance_scale": "guide"}
"""Keys of kohya's tables of prompts -> our names, where they differ."""


def _as_list(data: Any) -> list[Any]:
    return data if isinstance(data, list) else [data]


def set_guidance(draft: Draft, pictures: list[dict[str, Any]]) -> str:
    """Set each preview's guidance from --l (classifier-free) or --g (embedded), whichever applies; return a remark."""
    embedded = model_settings.embeds_guidance(draft.family)
    note = ""
    for picture in pictures:
        scale, inner = picture.pop("scale", None), picture.pop("guide", None)
        if not draft.family and None not in (scale, inner):
            note = Message("the architecture decides whether --l or --g applies; --l was written")
        picture["guidance"] = inner if embedded or not draft.family and scale is None else scale
        flags = picture.get("flags", {})
        picture["flags"] = flags | {
            "guidance": flags.get("guide" if picture["guidance"] is inner else "scale", "guidance")
        }
        if embedded and scale not in (None, "1", "1.0", 1, 1.0):
            note = Message("previews of this model use --g only, not --l (classifier-free guidance)")
    return note
