"""Tag images with a WD tagger of SmilingWolf, or another tagger that is published in the same form, by onnxruntime.

Such a model is two files: the network `model.onnx`, and `selected_tags.csv`, which has one row for each of its outputs.
The form is that of the makers' own demonstration (the space SmilingWolf/wd-tagger):

* The image is padded to a white square, in the middle, and then resized bicubically to the size of the input.
* The input is float32 of shape (images, height, width, 3), blue first and red last, from 0 to 255.
* The outputs are probabilities. Column `category` of the tags is Danbooru's: 0 general, 4 character, 9 rating.

A tagger with another input is refused: its scores would be those of a different image.
"""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from ..common.reading import read_bytes
from ..errors import Message, UserError, cannot_read

MODEL, TAGS = "model.onnx", "selected_tags.csv"
CHARACTER, RATING = 4, 9
GENERAL_THRESHOLD, CHARACTER_THRESHOLD = 0.35, 0.85
"""Least probabilities of tags and of names of characters, as in the makers' demonstration."""
MOST_TAGS = 64 << 20
"""Largest file of tags, in bytes; the released ones have 300 kB."""
PROVIDERS = {
    "CUDAExecutionProvider": "CUDA",
    "ROCMExecutionProvider": "ROCm",
    "MIGraphXExecutionProvider": "MIGraphX",
    "DmlExecutionProvider": "DirectML",
    "CPUExecutionProvider": "CPU",
}
"""What onnxruntime may compute with, best first. TensorRT is left out, as it would compile each model for minutes."""


def is_tagger(names: Collection[str]) -> bool:
    """Return True if a folder or repository with these files is a tagger."""
    return MODEL in names and TAGS in names


def find_obstacle() -> Message | None:
    """Return why this machine cannot run a tagger, with what to do; None if it can."""
    if importlib.util.find_spec("onnxruntime") is not None:
        return None
    return Message("WD taggers need onnxruntime; run pip install 'lora-fp8[tagger]'")


def require_runtime(model: str) -> None:
    """Raise UserError if this machine cannot run a tagger."""
    if obstacle := find_obstacle():
        raise UserError(Message("{model}: {why}", model=model, why=obstacle))


class Tag(NamedTuple):
    """A tag that the model knows: its name, with underscores, and Danbooru's category."""

    name: str
    category: int


@dataclass(frozen=True)
class Limits:
    """Which tags are taken.

    Attributes:
        general: least probability of a tag.
        character: least probability of the name of a character.
        rating: also take the most probable rating.
    """

    general: float
    character: float
    rating: bool


class WdTagger:
    """A loaded tagger.

    Args:
        folder: where the two files are.
        name: of the model, for messages.

    Attributes:
        device: what it computes with.
        warnings: what a person should know, one sentence each.

    Raises:
        UserError: onnxruntime is not installed, or a file is damaged or of another form.
    """

    def __init__(self, folder: Path, name: str) -> None:
        require_runtime(name)
        self.name = name
        self.tags = read_tags(folder / TAGS)
        self.session = _open_session(folder / MODEL)
        self._input, *other_inputs = self.session.get_inputs()
        self._batch, self._size = self._check_form(self._input, other_inputs)
        wanted, used = _list_providers()[0], self.session.get_providers()[0]
        self.device = PROVIDERS.get(used, used)
        self.warnings: list[Message] = []
        if wanted != used:
            self.warnings.append(
                Message(
                    "onnxruntime has {wanted} but could not use it; the tagger runs on {used}. The log above says why",
                    wanted=PROVIDERS[wanted],
                    used=self.device,
                )
            )

    def _check_form(self, given: Any, others: Sequence[Any]) -> tuple[int | None, int]:
        """Return the fixed number of images at once (None: any number) and the size of the square input."""
        shape = given.shape
        is_known = len(shape) == 4 and shape[3] == 3 and isinstance(shape[1], int) and shape[1] == shape[2]
        if others or not is_known or given.type != "tensor(float)":
            raise UserError(
                Message(
                    "{model}: the input of this tagger differs from that of WD taggers: {type} {shape}, not "
                    "tensor(float) of (images, size, size, 3). Choose a WD tagger, such as {example}",
                    model=self.name,
                    type=given.type,
                    shape=list(shape),
                    example="SmilingWolf/wd-swinv2-tagger-v3",
                )
            )
        return (shape[0] if isinstance(shape[0], int) else None), shape[1]

    def choose_tags(self, images: Sequence[Image.Image], limits: Limits) -> list[list[str]]:
        """Return the names of each image's tags, most probable first; the rating, if it is wanted, comes last."""
        return [self._choose(scores, limits) for scores in self.score(images)]

    def score(self, images: Sequence[Image.Image]) -> np.ndarray:
        """Return the (images, tags) probabilities of RGB images.

        Raises:
            UserError: the model gives other numbers than one probability for each tag.
        """
        pixels = np.stack([prepare(image, self._size) for image in images])
        at_once = self._batch or len(pixels)
        rows = []
        for start in range(0, len(pixels), at_once):
            part = pixels[start : start + at_once]
            filler = np.zeros((at_once - len(part), *part.shape[1:]), part.dtype)
            outputs = self.session.run(None, {self._input.name: np.concatenate([part, filler])})
            rows.append(outputs[0][: len(part)])
        scores = np.concatenate(rows)
        if scores.shape != (len(images), len(self.tags)):
            raise UserError(
                Message(
                    "{model}: {file} has {count} tags, but the model returns {shape} numbers. The two files belong "
                    "to different models; download both again",
                    model=self.name,
                    file=TAGS,
                    count=len(self.tags),
                    shape=list(scores.shape),
                )
            )
        if not (scores >= 0).all() or not (scores <= 1).all():
            raise UserError(
                Message(
                    "{model}: this tagger returns numbers outside 0 to 1, which are not probabilities. Choose a WD "
                    "tagger, such as {example}",
                    model=self.name,
                    example="SmilingWolf/wd-swinv2-tagger-v3",
                )
            )
        return scores

    def _choose(self, scores: np.ndarray, limits: Limits) -> list[str]:
        chosen, ratings = [], []
        for index in np.argsort(-scores, kind="stable"):
            name, category = self.tags[index]
            if category == RATING:
                ratings.append(name)
            elif scores[index] >= (limits.character if category == CHARACTER else limits.general):
                chosen.append(name)
        return chosen + (ratings[:1] if limits.rating else [])


def prepare(image: Image.Image, size: int) -> np.ndarray:
    """Turn an RGB image into the (size, size, 3) input of a tagger."""
    side = max(image.size)
    square = Image.new("RGB", (side, side), "white")
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    if side != size:
        square = square.resize((size, size), Image.Resampling.BICUBIC)
    return np.asarray(square, dtype=np.float32)[:, :, ::-1]


def read_tags(path: Path) -> list[Tag]:
    """Read the tags of a model, one for each of its outputs.

    Raises:
        UserError: the file cannot be read, or is of another form.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(read_bytes(path, MOST_TAGS).decode("utf-8-sig"))))
        tags = [Tag(row["name"].strip(), int(row["category"])) for row in rows]
        if not tags:
            raise ValueError
        return tags
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise cannot_read(path, error) from None
    except (KeyError, TypeError, ValueError, AttributeError):
        raise UserError(
            Message(
                "{path}: this is not a list of tags with the columns name and category. Download it again", path=path
            )
        ) from None


def _list_providers() -> list[str]:
    """Return what the installed onnxruntime may compute with, best first."""
    import onnxruntime

    available = onnxruntime.get_available_providers()
    return [provider for provider in PROVIDERS if provider in available]


def _open_session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors; its warnings are about details of the graph
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=_list_providers())
    except Exception as error:  # onnxruntime has a type of its own for each of its many problems
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise UserError(
            Message("{path}: onnxruntime cannot load it ({why}). Download it again", path=path, why=why)
        ) from error
