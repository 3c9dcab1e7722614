"""Prompts with control images, as the text encoders of editing models see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .buckets import Size
from .examples import Control

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Shown:
    """A control image as the denoiser gets it: the part inside `box` (left, top, right, bottom), resized to `size`."""

    control: Control
    box: tuple[int, int, int, int]
    size: Size


def whole(controls: Sequence[Control]) -> tuple[Shown, ...]:
    """Return the control images of a preview, uncropped and at their own size: the pipeline resizes them."""
    return tuple(Shown(one, (0, 0, one.width, one.height), (one.width, one.height)) for one in controls)


@dataclass(frozen=True)
class Prompt:
    """A text with the control images that its encoder sees, mirrored or not: see `Cache.prompt`."""

    text: str
    seen: tuple[Shown, ...]
    flipped: bool


def text_of(prompt: str | Prompt) -> str:
    """Return the text of a prompt without its control images."""
    return prompt if isinstance(prompt, str) else prompt.text
