"""Select the files of a diffusers repository that training needs: each weight once, configs, tokenizers, no pickles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from ...errors import Template
from .reference import WEIGHT_ENDINGS
from .remembered import RemoteFile

if TYPE_CHECKING:
    from ..base import ModelFamily

INDEXES = ("model_index.json", "modular_model_index.json")
"""Files that name the pipeline of a diffusers repository or folder."""
SMALL = (".json", ".txt", ".jinja", ".model")
"""Endings of configs and tokenizers."""
VARIANTS = ("", ".fp16", ".bf16")
"""Precisions of which a repository may hold the same weights, the preferred one first: full precision."""
STEMS = ("diffusion_pytorch_model", "model")
"""Names of the weights of diffusers' models and of those of transformers."""
PICKLES = (".bin", ".ckpt", ".pt", ".pth")


@dataclass(frozen=True)
class Selection:
    """The files that training needs, and what is wrong with the repository.

    Attributes:
        small: configs, tokenizers and indexes of shards.
        weights: safetensors files.
        problems: parts that are there as pickles only; in words.
    """

    small: tuple[RemoteFile, ...] = ()
    weights: tuple[RemoteFile, ...] = ()
    problems: tuple[str, ...] = ()


def list_parts(family: type[ModelFamily]) -> tuple[str, ...]:
    """Return the subfolders that training a family needs."""
    return ("scheduler", "vae", family.denoiser_name, *family.text_parts)


def select(files: Sequence[RemoteFile], family: type[ModelFamily], name: str) -> Selection:
    """Select the files of a repository that training a family needs.

    Args:
        files: all files of the repository.
        family: its architecture.
        name: the base, for messages.
    """
    small = [file for file in files if file.path in INDEXES]
    weights: list[RemoteFile] = []
    problems: list[str] = []
    for part in list_parts(family):
        inside = {PurePosixPath(file.path).name: file for file in files if _get_folder(file) == part}
        chosen, index = _select_weights(inside)
        weights += [inside[file] for file in chosen]
        small += [inside[file] for file in inside if file.endswith(SMALL) and (".index" not in file or file == index)]
        pickles = sorted(file for file in inside if file.endswith(PICKLES))
        if pickles and not chosen:
            problems.append(HOLDS_PICKLES(path=f"{name}: {part}", file=pickles[0], name=f"{STEMS[0]}.safetensors"))
    return Selection(tuple(small), tuple(weights), tuple(problems))


HOLDS_PICKLES = Template(
    "{path} contains only {file}, a pickle file, which can run code and is not opened; save the model as "
    "safetensors ({name}), or choose a revision that has it"
)
NOT_HERE = Template(
    "model.path = {path} does not exist; give a diffusers folder, a .safetensors file, a Hugging Face id such as "
    "'name/model', or 'demo'"
)
NO_DEMO = Template("there is no demo base for {family}; accepted: {names}")
"""Why nothing can be selected: for folders here as for repositories."""


def _select_weights(names: dict[str, RemoteFile]) -> tuple[list[str], str]:
    """Return the weight files of one part, in the preferred precision, and the index of its shards or ""."""
    for variant in VARIANTS:
        for stem in STEMS:
            for index in (f"{stem}.safetensors.index{variant}.json", f"{stem}{variant}.safetensors.index.json"):
                shard = re.compile(rf"{stem}(?:{variant}-\d+-of-\d+|-\d+-of-\d+{variant})\.safetensors")
                shards = sorted(name for name in names if shard.fullmatch(name))
                if index in names and shards:
                    return shards, index
            if (single := f"{stem}{variant}.safetensors") in names:
                return [single], ""
    return [], ""


def lacks_shards(chosen: Selection) -> bool:
    """Return True if weights are split into more files than were selected, as their names state the number."""
    folders: dict[str, list[str]] = {}
    for file in chosen.weights:
        folders.setdefault(_get_folder(file), []).append(file.path)
    stated = {folder: re.search(r"-of-(\d+)", paths[0]) for folder, paths in folders.items()}
    return any(number and int(number[1]) > len(folders[folder]) for folder, number in stated.items())


def list_single_files(files: Sequence[RemoteFile]) -> list[str]:
    """Return the paths of the safetensors files at the top of a repository, which may be single-file models."""
    return [file.path for file in files if _get_folder(file) == "" and file.path.endswith(WEIGHT_ENDINGS)]


def _get_folder(file: RemoteFile) -> str:
    return "/".join(PurePosixPath(file.path).parts[:-1])
