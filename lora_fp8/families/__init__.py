"""The registry of model families: one file in this folder is one architecture. `README.md` here says how to add one.

Importing this room or a family file does not import torch, so that the settings page and `--help` can read the
families' facts at once.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Message, UserError
from ._files import Header, check_kind, count_marks, read_header

if TYPE_CHECKING:
    from .base import ModelFamily


def available() -> list[str]:
    """Return the names of the families, from the folder's file names, without importing any of them."""
    return list(_names())


@cache  # called many times by each check of a config
def _names() -> tuple[str, ...]:
    modules = pkgutil.iter_modules(__path__)
    return tuple(sorted(m.name for m in modules if not (m.ispkg or m.name == "base" or m.name.startswith("_"))))


def get(name: str) -> type[ModelFamily]:
    """Return the class `Family` of the file `name`.py, importing that one file.

    Its facts are attributes of the class: `get("sdxl").native_resolution`. They are there without torch, which the
    methods import when they are called.

    Raises:
        UserError: there is no family of this name.
    """
    _known(name)
    family: type[ModelFamily] = importlib.import_module(f"{__name__}.{name}").Family
    return family


def traits(name: str) -> dict[str, Any]:
    """Return the facts that decide which settings have an effect with a family.

    Returns:
        objective: "Diffusion" or "FlowMatching".
        text_encoder: True if text encoders can be trained.
        controls: True if it takes control images.
        clips: True if it generates clips.
        guidance: True if its denoiser may take the guidance scale as an input.
        negative: True if previews can use a negative prompt.
        captions: "tags", "sentences" or "instructions".

    Raises:
        UserError: there is no family of this name.
    """
    family = get(name)
    return {
        "objective": family.objective,
        "text_encoder": bool(family.trained_text),
        "controls": any(family.controls),
        "clips": any(family.clips),
        "guidance": family.embeds_guidance,
        "negative": family.uses_negative,
        "captions": family.captions,
    }


UNKNOWN = Message("not a checkpoint of a kind that is known")


def describe(header: Header) -> tuple[str, str]:
    """Return what a single file with these tensors is, in words, and its family or ""; ("", "") if nothing tells."""
    if any("lora_" in key for key in header):
        return Message("a LoRA, not a base model"), ""
    fitting = [name for name in available() if get(name).recognises(header)]
    if fitting:  # of two sizes of one structure, the one that states the size is meant
        name = max(fitting, key=lambda name: count_marks(get(name).single_file))
        return get(name).title, name
    if any(k.startswith(("down_blocks.0.", "transformer_blocks.0.")) for k in header):
        place = "unet/ or transformer/ of a diffusers folder, as diffusion_pytorch_model.safetensors"
        return Message("a denoiser in diffusers' naming (it belongs into {place})", place=place), ""
    return "", ""


def of_file(path: Path) -> tuple[str, str]:
    """Describe a single file by its header, as `describe` does.

    Raises:
        UserError: it is of a format that is not opened, or damaged.
    """
    check_kind(str(path))
    return describe(read_header(path))


def _known(name: str) -> None:
    names = available()
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(f"model.family = {name!r} is not known{hint}; available: {', '.join(names)}")
