"""Preview prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import families
from ..data.decoding import EXTENSIONS
from ..errors import Message
from ..settings.preview_prompts import OPTIONS
from . import remarks
from .import_draft import Draft
from .readers import number, text, whole

VALUES: dict[str, Callable[[Any], Any]] = {
    "negative": text,
    "width": whole,
    "height": whole,
    "seed": whole,
    "steps": whole,
    "guidance": number,
}
"""What a prompt may have of its own, and how it is read."""


def set_previews(draft: Draft, keys: Mapping[str, str], pictures: Sequence[Mapping[str, Any]], note: str = "") -> None:
    """Set preview.* from a list of {"prompt", "negative", "width", "height", "steps", "guidance", "seed"}.

    What is the same for all becomes a setting; the rest becomes an option of its prompt.

    Args:
        draft: the import.
        keys: the tool's key -> the preview settings of ours that it holds, such as "width height"; "" for all of them.
        pictures: one table per preview.
        note: the difference in meaning, if there is one.
    """
    pictures = [picture for picture in pictures if picture.get("prompt")]
    options: list[dict[str, Any]] = [{} for _ in pictures]
    notes = [note] if note else []
    settings: dict[str, Any] = {"preview.prompts": []}
    settings |= _preview_controls(draft, pictures, notes) | _preview_frames(draft, pictures, notes)
    for name, read in VALUES.items():
        values = [read(picture[name]) if picture.get(name) not in (None, "") else None for picture in pictures]
        settings |= _share_values(name, values, options, notes)
    prompts = [str(picture["prompt"]) for picture in pictures]
    settings["preview.prompts"] = list(map(_write_options, prompts, options))
    in_prompts = {name for own in options for name in own}
    account = draft.differs if notes else draft.mapped
    for key, names in keys.items():
        held = set(names.split()) | ({"prompts"} if in_prompts.intersection(names.split()) else set())
        own = {name: value for name, value in settings.items() if name.removeprefix("preview.") in held}
        account(key, own if names else settings, remarks.join(notes))
    for name, value in settings.items():
        draft.settings.setdefault(name, value)


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
        notes.append(Message("a negative seed means a random one there; previews here keep theirs"))
    if name in ("width", "height"):
        rounded = [None if value is None else round(value / 16) * 16 for value in values]
        if rounded != values:
            notes.append(Message("{name} is a multiple of 16 here", name=name))
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
    """Return a prompt with its options."""
    letters = {name: letter for letter, name in reversed(OPTIONS.items())}
    return " ".join([prompt, *(f"--{letters[name]} {value}" for name, value in values.items())])


def _preview_controls(draft: Draft, pictures: Sequence[Mapping[str, Any]], notes: list[str]) -> dict[str, Any]:
    """Return preview.controls, one image per prompt, if the family takes control images."""
    given = [picture.get("controls") or [] for picture in pictures]
    if not any(given):
        return {}
    if draft.family not in families.available() or not any(families.get(draft.family).controls):
        notes.append(Message("previews are shown no control images here"))
        return {}
    if not all(given):
        notes.append(Message("one control image for each prompt here, and some of theirs have none"))
        draft.need("preview.controls", Message("a control image for each prompt, or none at all"))
        return {}
    written = [_one_control(draft, [text(image) for image in images]) for images in given]
    if several := [" + ".join(map(text, images)) for images, path in zip(given, written, strict=True) if not path]:
        notes.append(Message("several control images of one prompt are a folder here, and none was written"))
        images = ", ".join(several[:3]) + (" ..." if len(several) > 3 else "")
        draft.need(
            "preview.controls",
            Message(
                "prompts with several control images ({images}): put those of each into a folder that holds just "
                "them, and name the folders here",
                images=images,
            ),
        )
        return {}
    return {"preview.controls": written}


def _one_control(draft: Draft, images: list[str]) -> str:
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


def _preview_frames(draft: Draft, pictures: Sequence[Mapping[str, Any]], notes: list[str]) -> dict[str, Any]:
    """Return preview.frames, rounded down to a length that the model draws."""
    step, _ = families.get(draft.family).clips if draft.family in families.available() else (0, 0)
    lengths = [whole(picture["frames"]) for picture in pictures if picture.get("frames") not in (None, "")]
    if not step or max(lengths, default=1) <= 1:
        return {}
    if len(set(lengths)) > 1:
        notes.append(Message("one length for all previews here"))
    return {"preview.frames": (lengths[0] - 1) // step * step + 1}
