"""What a scan finds: examples with their captions, control images and masks, and what is wrong with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from ..errors import Message, UserErrors
from .image_edits import NOTHING, Box, ImageEdit


@dataclass(frozen=True)
class Control:
    """One control image: pixels of the upright image, edited as the image that it belongs to; its identity.

    `width`, `height` and `sha256` are as in `decoding.Looked`.
    """

    path: Path
    width: int
    height: int
    sha256: str
    edit: ImageEdit = NOTHING


@dataclass(frozen=True)
class Mask:
    """The mask of an image: which part of it is trained.

    Attributes:
        path: the mask file, or the image itself if `alpha`.
        sha256: identity of the mask, as in `decoding.Looked`.
        alpha: the mask is the image's own transparency, not the grey values of a file.
        white: box around everything that is not black, as in `Light`.
        edit: of its image; the mask is turned and cropped along.
    """

    path: Path
    sha256: str
    alpha: bool = False
    white: Box | None = None
    edit: ImageEdit = NOTHING


@dataclass(frozen=True)
class Example:
    """One image and its caption.

    Attributes:
        path: the image file.
        caption: as trained, with the trigger word prepended where needed.
        folder_index: which of `[[dataset.folders]]`, from 0.
        relative: path inside that folder, with forward slashes.
        repeats: how often it is trained in an epoch, on average.
        width, height: pixels of the upright image, turned and cropped by its edit.
        image_sha256: identity of the image, as in `decoding.Looked`.
        controls: its control images, in order.
        frames: for a clip, the numbers of the file's frames that it consists of, in order; () for an image.
        begins: second of the file at which the first of these frames is shown; None if unknown, or if another frame
            has the same time.
        mask: which part of it is trained; None means all of it.
        edit: how the image is turned and cropped.
    """

    path: Path
    caption: str
    folder_index: int
    relative: str
    repeats: float
    width: int
    height: int
    image_sha256: str
    controls: tuple[Control, ...] = ()
    frames: tuple[int, ...] = ()
    begins: Fraction | None = None
    mask: Mask | None = None
    edit: ImageEdit = NOTHING

    @property
    def file_uid(self) -> str:
        """Return the key of the file inside the dataset, shared by all pieces of a clip."""
        return f"{self.folder_index}/{self.relative}"

    @property
    def uid(self) -> str:
        """Return the key of the example inside the dataset, which does not change when the dataset is moved."""
        return f"{self.file_uid}@{self.frames[0]}" if self.frames else self.file_uid


@dataclass
class ScanReport:
    """The result of a scan.

    `counts` has images, triggered, no_caption, skipped, upscaled, copies, controls, converted (to sRGB), clips (files),
    clip_frames (at the frame rate of training), masked (images), excluded and edited (images, by the folder's edits).
    """

    examples: list[Example] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    uncaptioned: list[tuple[Path, Message]] = field(default_factory=list)
    """images without a caption, each with its message, which `images.scan` sums up in one problem"""
    counts: Counter[str] = field(default_factory=Counter)
    edits: dict[Path, ImageEdit] = field(default_factory=dict)
    """edit of each listed image"""
    excluded: dict[Path, set[str]] = field(default_factory=dict)
    """by folder: the images that its edits exclude, as paths inside it without extension"""

    def require(self) -> list[Example]:
        """Return the examples; raise `errors.UserErrors` with all problems if there are any."""
        if self.problems:
            raise UserErrors(self.problems, where="dataset")
        return self.examples
