"""Miniature taggers as ONNX files: each score is a linear function of the pixels, which a test can compute by hand.

An ONNX file is a protobuf message, and the few fields of one are written here, so that no library is needed for it;
onnxruntime reads the file as it reads any other. The numbers of the fields are those of onnx.proto (onnx 1.19).
"""

from pathlib import Path

import numpy as np

from lora_fp8.tools import wd_tagger

SIZE = 4
TAGS = (
    # name, category, (channel, row, column) of the pixels that are averaged: None stands for all
    ("general", 9, (2, 0, None)),  # red of the first row
    ("explicit", 9, (0, None, None)),  # blue
    ("1girl", 0, (2, None, None)),  # red
    ("long_hair", 0, (0, None, None)),  # blue
    ("^_^", 0, (1, None, None)),  # green
    ("upper_row", 0, (0, 0, None)),  # blue of the first row
    ("second_row", 0, (0, 1, None)),
    ("left_column", 0, (1, None, 0)),
    ('say_"hello"', 0, (2, 3, 3)),  # red of the last pixel
    ("hatsune_miku", 4, (2, None, None)),
)
HEADER = "tag_id,name,category,count"


def write_tagger(
    folder: Path,
    shape: tuple[int | str, ...] = ("batch_size", SIZE, SIZE, 3),
    scale: float = 1 / 255,
    tags: int = len(TAGS),
) -> Path:
    """Write `model.onnx` and `selected_tags.csv`, in the form that WD taggers are published in.

    Args:
        folder: where to; it is made.
        shape: of the input; the size is always SIZE.
        scale: the score of a region that has 1 in each pixel.
        tags: number of outputs.
    """
    folder.mkdir(parents=True)
    weights = np.zeros((SIZE, SIZE, 3, len(TAGS)), np.float32)
    for number, (_, _, (channel, row, column)) in enumerate(TAGS):
        region = np.s_[:] if row is None else row, np.s_[:] if column is None else column
        weights[(*region, channel, number)] = 1
    weights = weights.reshape(-1, len(TAGS))
    weights = (weights / weights.sum(axis=0) * scale)[:, :tags]
    (folder / wd_tagger.MODEL).write_bytes(_model(weights, shape))
    rows = [HEADER]
    for number, (name, category, _) in enumerate(TAGS):
        quoted = '"' + name.replace('"', '""') + '"' if '"' in name else name
        rows.append(f"{number},{quoted},{category},{99 - number}")
    (folder / wd_tagger.TAGS).write_text("\n".join([*rows, ""]), encoding="utf-8")
    return folder


def _model(weights: np.ndarray, shape: tuple[int | str, ...]) -> bytes:
    """Return a model that flattens each image and multiplies it with the weights."""
    axis = _field(5, _field(1, "axis") + _field(3, 1) + _field(20, 2))
    flatten = _field(1, "input") + _field(2, "flat") + _field(4, "Flatten") + axis
    multiply = _field(1, "flat") + _field(1, "weights") + _field(2, "output") + _field(4, "MatMul")
    dims = b"".join(_field(1, size) for size in weights.shape)
    tensor = dims + _field(2, 1) + _field(8, "weights") + _field(9, weights.astype("<f4").tobytes())
    graph = _field(1, flatten) + _field(1, multiply) + _field(2, "tagger") + _field(5, tensor)
    graph += _field(11, _value("input", shape)) + _field(12, _value("output", (shape[0], weights.shape[1])))
    return _field(1, 8) + _field(7, graph) + _field(8, _field(1, "") + _field(2, 17))


def _value(name: str, shape: tuple[int | str, ...]) -> bytes:
    """Return the description of a float32 input or output; a dimension without a number has a name."""
    dims = b"".join(_field(1, _field(1 if isinstance(size, int) else 2, size)) for size in shape)
    return _field(1, name) + _field(2, _field(1, _field(1, 1) + _field(2, dims)))


def _field(number: int, value: int | str | bytes) -> bytes:
    """Return a field of a protobuf message: an integer, or anything else with its length in front."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    content = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    """Return an integer in groups of seven bits, the lowest first."""
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])
