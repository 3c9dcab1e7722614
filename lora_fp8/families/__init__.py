"""The folder is the registry: one file = one architecture. `README.md` beside this file says how to add one.

Nothing here imports torch, so that a settings form or `--help` can list the families in a blink.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomlkit

from lora_fp8 import config
from lora_fp8.config import UserError

from ._files import Header, check_kind, fits, native_header, read_header

if TYPE_CHECKING:
    from .base import ModelFamily


def available() -> list[str]:
    """Names of the families, read from the folder without importing any of them."""
    return list(_names())


@cache  # asked for many times by each check of a config
def _names() -> tuple[str, ...]:
    modules = pkgutil.iter_modules(__path__)
    return tuple(sorted(m.name for m in modules if m.name != "base" and not m.name.startswith("_")))


def facts(name: str) -> dict[str, Any]:
    """The facts that the class `Family` of this file states as plain values, read without importing it.

    Such as title and example_base. What is computed, or a default of `base`, is not among them.

    Raises:
        UserError: there is no such file.
    """
    _known(name)
    return dict(_stated(name))


def example(name: str, family: str, presets: Sequence[str] = ()) -> config.Job:
    """A job to begin with: the family's released base model, a folder of pictures that is yet to be named.

    Raises:
        UserErrors: all that is wrong with what was given.
    """
    known = family in available()  # else the config's check refuses it, with whatever else is wrong
    about = facts(family) if known else {}
    base = about.get("example_base", "put/the-base-model-here")
    given = {"name": name, "preset": list(presets), "model": {"family": family, "path": base}}
    needed = {"control": "my_control_pictures"} if about.get("controls", (0, 0))[0] else {}
    given["dataset"] = {"folders": [{"path": "my_pictures", **needed}]}
    return config.loads(tomlkit.dumps(given), where="new")


def traits(name: str) -> dict[str, Any]:
    """What decides which settings have an effect with this family, read without importing it.

    objective: "Diffusion" or "FlowMatching"; text_encoder: whether text encoders can be trained; controls: whether it
    is shown control pictures; clips: whether it draws clips; guidance: whether the denoiser may take it as an input;
    negative: whether previews can be guided away from a prompt.

    Raises:
        UserError: there is no such file.
    """
    stated, classes = facts(name), _classes(name)
    objective = next((node.value.id for node in _assigned(name) if node.targets[0].id == "objective"), "FlowMatching")
    while objective in classes:  # one of the family's own: what it is a kind of
        objective = classes[objective].bases[0].id
    return {
        "objective": objective,
        "text_encoder": any(node.targets[0].id == "trained_text" for node in _assigned(name)),
        "controls": any(stated.get("controls", ())),
        "clips": any(stated.get("clips", ())),
        "guidance": stated.get("embeds_guidance", False),
        "negative": stated.get("uses_negative", True),
    }


@cache
def _stated(name: str) -> dict[str, Any]:
    found = {}
    for node in _assigned(name):
        try:
            found[node.targets[0].id] = ast.literal_eval(node.value)
        except ValueError:
            continue  # computed
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
    """What a single file with these tensors is, in words, and its family or "". ("", "") where nothing tells."""
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
    """`describe` of a single file, by its header.

    Raises:
        UserError: it is of a kind that is not opened, or damaged.
    """
    check_kind(str(path))
    return describe(read_header(path))


def get(name: str) -> type[ModelFamily]:
    """The class `Family` of the file `name`.py; imports that one file.

    Raises:
        UserError: there is no such file.
    """
    _known(name)
    return importlib.import_module(f"{__name__}.{name}").Family


def _known(name: str) -> None:
    names = available()
    if name not in names:
        close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise UserError(f"model.family = {name!r} is not known{hint}; available: {', '.join(names)}")
