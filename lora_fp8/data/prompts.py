"""Prompts with control images, as the text encoders of editing models see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .buckets import UNCHANGED, Change, Size
from .examples import Control


@dataclass(frozen=True)
class ControlCrop:
    """A control image as the denoiser gets it: the part inside `box` (left, top, right, bottom), resized to `size`.

    `change` is that of the image whose shape it has.
    """

    control: Control
    box: tuple[int, int, int, int]
    size: Size
    change: Change = UNCHANGED


def make_whole_crops(controls: Sequence[Control]) -> tuple[ControlCrop, ...]:
    """Return the control images of a preview, uncropped and at their own size: the pipeline resizes them."""
    return tuple(
        ControlCrop(control, (0, 0, control.width, control.height), (control.width, control.height))
        for control in controls
    )


@dataclass(frozen=True)
class Prompt:
    """A text with the control images that its encoder sees, mirrored or not: see `Cache.make_prompt`."""

    text: str
    seen: tuple[ControlCrop, ...]
    flipped: bool


def get_text(prompt: str | Prompt) -> str:
    """Return the text of a prompt without its control images."""
    return prompt if isinstance(prompt, str) else prompt.text
