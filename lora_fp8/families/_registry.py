"""The names of the families and their classes, by the files of this folder."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import Message, UserError

if TYPE_CHECKING:
    from .base import ModelFamily


def list_families() -> list[str]:
    """Return the names of the families, from the folder's file names, without importing any of them."""
    return list(_list_names())


@cache  # called many times by each check of a config
def _list_names() -> tuple[str, ...]:
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return tuple(sorted(m.name for m in modules if not (m.ispkg or m.name == "base" or m.name.startswith("_"))))


def get(name: str) -> type[ModelFamily]:
    """Return the class `Family` of the file `name`.py, importing that one file.

    Its facts are attributes of the class: `get("sdxl").native_resolution`. They are there without torch, which the
    methods import when they are called.

    Raises:
        UserError: there is no family of this name.
    """
    _require_known(name)
    family: type[ModelFamily] = importlib.import_module(f"{__package__}.{name}").Family
    return family


def get_traits(name: str) -> dict[str, Any]:
    """Return the facts that decide which settings have an effect with a family.

    Returns:
        objective: "Diffusion" or "FlowMatching".
        text_encoder: True if text encoders can be trained.
        controls: True if it takes control images.
        clips: True if it generates clips.
        guidance: True if its denoiser may take the guidance scale as an input.
        negative: True if previews can use a negative prompt.
        long_captions: True if captions may be longer than its text encoders read.
        clip_skip: True if an earlier layer of its text encoder can be chosen.
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
        "long_captions": family.long_captions,
        "clip_skip": family.skips_layers,
        "captions": family.captions,
    }


def read_family_name(metadata: Mapping[str, str]) -> str:
    """Return the family that a LoRA file's header names; "" if it names none of ours."""
    named_family = metadata.get("ss_base_model_version")
    return next((name for name in list_families() if get(name).kohya_base_version == named_family), "")


def _require_known(name: str) -> None:
    names = list_families()
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        available_names = ", ".join(names)
        if close:
            raise UserError(
                Message(
                    "model.family: there is no architecture {name} (did you mean {meant}?); accepted: {names}",
                    name=repr(name),
                    meant=repr(close[0]),
                    names=available_names,
                )
            )
        raise UserError(
            Message(
                "model.family: there is no architecture {name}; accepted: {names}",
                name=repr(name),
                names=available_names,
            )
        )
