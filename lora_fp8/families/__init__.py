"""The registry of model families: one file in this folder is one architecture. `README.md` here says how to add one.

Nothing here imports torch, so that the settings page and `--help` can list the families at once.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ._files import Header, check_kind, fits, native_header, read_header

if TYPE_CHECKING:
    from .base import ModelFamily


def available() -> list[str]:
    """Return the names of the families, from the folder's file names, without importing any of them."""
    return list(_names())


@cache  # called many times by each check of a config
def _names() -> tuple[str, ...]:
    modules = pkgutil.iter_modules(__path__)
    return tuple(sorted(m.name for m in modules if m.name != "base" and not m.name.startswith("_")))


def facts(name: str) -> dict[str, Any]:
    """Return the attributes that a family's class states as literals, such as title and example_base.

    They are read from the source without importing it, so computed values and defaults of `base` are not included.

    Raises:
        UserError: there is no family of this name.
    """
    _known(name)
    return dict(_stated(name))


def traits(name: str) -> dict[str, Any]:
    """Return the facts that decide which settings have an effect with a family, without importing it.

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
    stated, classes = facts(name), _classes(name)
    objective = next((node.value.id for node in _assigned(name) if node.targets[0].id == "objective"), "FlowMatching")
    while objective in classes:  # a class of the family's file: follow it to its base
        objective = classes[objective].bases[0].id
    return {
        "objective": objective,
        "text_encoder": any(node.targets[0].id == "trained_text" for node in _assigned(name)),
        "controls": any(stated.get("controls", ())),
        "clips": any(stated.get("clips", ())),
        "guidance": stated.get("embeds_guidance", False),
        "negative": stated.get("uses_negative", True),
        "captions": stated.get("captions", "sentences"),
    }


@cache
def _stated(name: str) -> dict[str, Any]:
    found = {}
    for node in _assigned(name):
        try:
            found[node.targets[0].id] = ast.literal_eval(node.value)
        except ValueError:
            continue  # not a literal
    return found


@cache
def _classes(name: str) -> dict[str, Any]:
    tree = ast.parse((Path(__path__[0]) / f"{name}.py").read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _assigned(name: str) -> list[Any]:
    body = _classes(name)["Family"].body
    return [node for node in body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]


UNKNOWN = "not a checkpoint of a kind that is known"


def describe(header: Header) -> tuple[str, str]:
    """Return what a single file with these tensors is, in words, and its family or ""; ("", "") if nothing tells."""
    if any("lora_" in key for key in header):
        return "a LoRA, not a base model", ""
    native = native_header(header)
    for name in available():
        if fits(facts(name).get("single_file", {}), native):
            return facts(name)["title"], name
    if any(k.startswith(("down_blocks.0.", "transformer_blocks.0.")) for k in header):
        place = "unet/ or transformer/ of a diffusers folder, as diffusion_pytorch_model.safetensors"
        return f"a denoiser in diffusers' naming (it belongs into {place})", ""
    return "", ""


def of_file(path: Path) -> tuple[str, str]:
    """Describe a single file by its header, as `describe` does.

    Raises:
        UserError: it is of a format that is not opened, or damaged.
    """
    check_kind(str(path))
    return describe(read_header(path))


def get(name: str) -> type[ModelFamily]:
    """Return the class `Family` of the file `name`.py, importing that one file.

    Raises:
        UserError: there is no family of this name.
    """
    _known(name)
    return importlib.import_module(f"{__name__}.{name}").Family


def _known(name: str) -> None:
    names = available()
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(f"model.family = {name!r} is not known{hint}; available: {', '.join(names)}")
