"""Preview prompts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import families
from ..data.decoding import EXTENSIONS
from ..errors import Message, Template
from . import remarks
from .import_draft import Draft
from .readers import number, text, whole


def set_previews(draft: Draft, keys: Mapping[str, str], pictures: Sequence[Mapping[str, Any]], note: str = "") -> None:
    """Set preview.* from a list of {"prompt", "negative", "width", "height", "steps", "guidance", "seed"}.

    Each preview has its own prompt; everything else has one value for all of them here.

    Args:
        draft: the import.
        keys: the tool's key -> the preview settings of ours that it holds, such as "width height"; "" for all of them.
        pictures: one table per preview.
        note: the difference in meaning, if there is one.
    """
    prompts = [str(picture["prompt"]) for picture in pictures if picture.get("prompt")]
    settings: dict[str, Any] = {"preview.prompts": prompts}
    notes = [note] if note else []
    settings |= _preview_controls(draft, pictures, notes) | _preview_frames(draft, pictures, notes)
    settings |= _preview_values(pictures, notes) | _preview_sides(pictures, notes)
    if settings.get("preview.seed", 0) < 0:
        del settings["preview.seed"]
        notes.append(Message("a negative seed means a random one there; previews here keep theirs"))
    account = draft.differs if notes else draft.mapped
    for key, names in keys.items():
        own = {name: value for name, value in settings.items() if name.removeprefix("preview.") in names.split()}
        account(key, own if names else settings, remarks.join(notes))
    for name, value in settings.items():
        draft.settings.setdefault(name, value)


def _given_values(pictures: Sequence[Mapping[str, Any]], name: str, read: Callable[[Any], Any]) -> list[Any]:
    """Return the values of one name in the previews that have it."""
    return [read(picture[name]) for picture in pictures if picture.get(name) not in (None, "")]


def _preview_values(pictures: Sequence[Mapping[str, Any]], notes: list[str]) -> dict[str, Any]:
    """Return preview.negative, steps, guidance and seed, each from the first preview that has it."""
    settings: dict[str, Any] = {}
    for name, read in (("negative", text), ("steps", whole), ("guidance", number), ("seed", whole)):
        values = _given_values(pictures, name, read)
        if not values:
            continue
        settings[f"preview.{name}"] = values[0]
        # Our previews count seeds up from the first one.
        expected = [values[0] + i for i in range(len(values))] if name == "seed" else [values[0]] * len(values)
        if values != expected:
            template = Template("one {name} for all previews here")
            if name == "seed":
                template = Template("one {name} for all previews here, counting up")
            notes.append(template(name=name))
    return settings


def _preview_sides(pictures: Sequence[Mapping[str, Any]], notes: list[str]) -> dict[str, Any]:
    """Return preview.width and height, each from the first preview that has it, as a multiple of 16."""
    settings: dict[str, Any] = {}
    for name in ("width", "height"):
        values = _given_values(pictures, name, whole)
        if values:
            settings[f"preview.{name}"] = round(values[0] / 16) * 16
            if len(set(values)) > 1 or values[0] % 16:
                notes.append(Message("one {name} for all previews here, a multiple of 16", name=name))
    return settings


def _preview_controls(draft: Draft, pictures: Sequence[Mapping[str, Any]], notes: list[str]) -> dict[str, Any]:
    """Return preview.controls, one image per prompt, if the family takes control images."""
    given = [picture.get("controls") or [] for picture in pictures if picture.get("prompt")]
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
