"""Preview prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import families
from ..common.text import quote
from ..data.decoding import EXTENSIONS
from ..errors import Message
from ..settings.preview_prompts import OPTIONS, has_options, neutralize_options
from . import common_values, remarks
from .import_draft import Draft
from .readers import Unfit, read_number, read_string, read_whole

VALUES: dict[str, Callable[[Any], Any]] = {
    "negative": read_string,
    "width": read_whole,
    "height": read_whole,
    "seed": read_whole,
    "steps": read_whole,
    "guidance": read_number,
}
"""Options of a single prompt -> how each is read."""


def set_previews(draft: Draft, keys: Mapping[str, str], pictures: Sequence[Mapping[str, Any]], note: str = "") -> None:
    """Set preview.* from a list of {"prompt", "negative", "width", "height", "steps", "guidance", "seed"}.

    What is the same for all becomes a setting; the rest becomes an option of its prompt.

    Args:
        draft: the import.
        keys: the tool's key -> the preview settings of ours that it holds, such as "width height"; "" for all of them.
        pictures: one table per preview; with "where", its place in the other tool's files, and "flags", its options as
            they are written there by our names, for remarks.
        note: the difference in meaning, if there is one.
    """
    pictures = [picture for picture in pictures if picture.get("prompt")]
    options: list[dict[str, Any]] = [{} for _ in pictures]
    notes = [note] if note else []
    settings: dict[str, Any] = {"preview.prompts": []}
    settings |= _make_preview_controls(draft, pictures, notes) | _make_preview_frames(draft, pictures, notes)
    for name, read in VALUES.items():
        settings |= _share_values(name, _read_values(name, read, pictures, notes), options, notes)
    prompts = [str(picture["prompt"]) for picture in pictures]
    settings["preview.prompts"] = list(map(_write_options, prompts, options))
    own_texts = [*prompts, *(str(own.get("negative", "")) for own in options)]
    if marked := [value for value in own_texts if has_options(value)]:
        notes.append(
            Message(
                "{prompt}: {tool} reads a word after -- as text, but this trainer reads it as a prompt option; "
                "one hyphen was removed",
                prompt=quote(marked[0]),
                tool=draft.tool.name,
            )
        )
    in_prompts = {name for own in options for name in own}
    account = draft.report_different if notes else draft.report_mapped
    for key, names in keys.items():
        held = set(names.split()) | ({"prompts"} if in_prompts.intersection(names.split()) else set())
        own = {name: value for name, value in settings.items() if name.removeprefix("preview.") in held}
        account(key, own if names else settings, remarks.join(notes))
    for name, value in settings.items():
        draft.settings.setdefault(name, value)


def _read_values(
    name: str, read: Callable[[Any], Any], pictures: Sequence[Mapping[str, Any]], notes: list[str]
) -> list[Any]:
    """Return the value of each preview, None where it has none; one that cannot be used is left out and reported.

    Args:
        name: of the setting.
        read: converts the tool's value to ours.
        pictures: one table per preview.
        notes: get a line for each value that was left out.
    """
    values: list[Any] = []
    for place, picture in enumerate(pictures, 1):
        value = picture.get(name)
        try:
            values.append(None if value in (None, "") else _require_bounds(name, read(value)))
        except Unfit as error:
            values.append(None)
            notes.append(
                Message(
                    "{where}: {option} was left out: {line}",
                    where=picture.get("where") or Message("prompt {number}", number=place),
                    option=picture.get("flags", {}).get(name, name),
                    line=error,
                )
            )
    return values


def _require_bounds(name: str, value: Any) -> Any:
    """Return a value that our setting accepts; a negative seed, which means a random one, is left to the caller."""
    if isinstance(value, str):
        return value
    least, most = common_values.find_bounds(f"preview.{name}")
    if most is not None and value > most:
        raise Unfit(remarks.AT_MOST(most=most))
    if least is not None and value < least and name != "seed":
        raise Unfit(remarks.AT_LEAST(least=f"{least:g}"))
    return value


def _share_values(name: str, values: list[Any], options: Sequence[dict[str, Any]], notes: list[str]) -> dict[str, Any]:
    """Return the setting for one value of all previews, or add the values to the options of their prompts.

    Args:
        name: of the setting.
        values: of each preview; None where it has none.
        options: of each prompt, by the name of the setting; changed.
        notes: get a line where a value had to be changed.
    """
    if name == "seed" and any(value is not None and value < 0 for value in values):
        values = [None if value is None or value < 0 else value for value in values]
        notes.append(
            Message("a negative seed is random in the other trainer; previews of this trainer keep their seed")
        )
    if name in ("width", "height"):
        rounded = [None if value is None else round(value / 16) * 16 for value in values]
        if rounded != values:
            notes.append(Message("{name} was rounded to a multiple of 16", name=name))
        values = rounded
    if not values or all(value is None for value in values):
        return {}
    # Our previews count seeds up from the first one.
    first, counts_up = values[0], name == "seed"
    if first is not None and values == [first + number if counts_up else first for number in range(len(values))]:
        return {f"preview.{name}": first}
    for own, value in zip(options, values, strict=True):
        own |= {} if value is None else {name: value}
    return {}


def _write_options(prompt: str, values: Mapping[str, Any]) -> str:
    """Return a prompt with its options; text that looks like an option is changed so that it stays text."""
    letters = {name: letter for letter, name in reversed(OPTIONS.items())}
    own = (f"--{letters[name]} {neutralize_options(str(value))}" for name, value in values.items())
    return " ".join([neutralize_options(prompt), *own])


def _make_preview_controls(draft: Draft, pictures: Sequence[Mapping[str, Any]], notes: list[str]) -> dict[str, Any]:
    """Return preview.controls, one image per prompt, if the family takes control images."""
    given = [picture.get("controls") or [] for picture in pictures]
    if not any(given):
        return {}
    known = draft.family in families.list_families()
    if draft.family and not (known and any(families.get(draft.family).controls)):
        notes.append(Message("this trainer draws previews of this model without control images"))
        return {}
    if not all(given):
        notes.append(
            Message("this trainer needs a control image for each prompt, and some prompts of the file have none")
        )
        draft.add_todo("preview.controls", Message("give every prompt a control image, or remove all control images"))
        return {}
    written = [_find_one_control(draft, [read_string(image) for image in images]) for images in given]
    if several := [
        " + ".join(map(read_string, images)) for images, path in zip(given, written, strict=True) if not path
    ]:
        notes.append(Message("several control images of one prompt must be in a folder, so none was written"))
        images = ", ".join(several[:3]) + (" ..." if len(several) > 3 else "")
        draft.add_todo(
            "preview.controls",
            Message(
                "some prompts have several control images ({images}). Put those of each prompt into a folder of "
                "their own, and list the folders here",
                images=images,
            ),
        )
        return {}
    return {"preview.controls": written}


def _find_one_control(draft: Draft, images: list[str]) -> str:
    """Return the only image, or the folder that contains exactly these images in order of their names, or ""."""
    if len(images) == 1:
        return images[0]
    parents = {os.path.dirname(image) for image in images}
    place = draft.find(parent) if len(parents) == 1 and (parent := parents.pop()) else None
    try:
        held = sorted(path.name for path in place.iterdir()) if place is not None else []
    except OSError:  # no folder, or unreadable: the user has to name its images
        return ""
    held = [name for name in held if os.path.splitext(name)[1].lower() in EXTENSIONS and not name.startswith(".")]
    return os.path.dirname(images[0]) if held == [os.path.basename(image) for image in images] else ""


def _make_preview_frames(draft: Draft, pictures: Sequence[Mapping[str, Any]], notes: list[str]) -> dict[str, Any]:
    """Return preview.frames, rounded down to a length that the model draws."""
    step, _ = families.get(draft.family).clips if draft.family in families.list_families() else (0, 0)
    step = step if draft.family else 1  # of an unknown family, the length is kept as it is
    lengths = [length for length in _read_values("frames", read_whole, pictures, notes) if length is not None]
    if not step or max(lengths, default=1) <= 1:
        return {}
    if len(set(lengths)) > 1:
        notes.append(Message("all previews have the same length in this trainer; that of the first was written"))
    return {"preview.frames": (lengths[0] - 1) // step * step + 1}
