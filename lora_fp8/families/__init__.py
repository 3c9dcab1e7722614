"""The registry of model families: one file in this folder is one architecture. `README.md` here says how to add one.

Importing this room or a family file does not import torch, so that the settings page and `--help` can read the
families' facts at once.
"""

from __future__ import annotations

from pathlib import Path

from ..errors import Message
from ._files import Header, check_kind, count_marks, read_header
from ._registry import get, get_traits, list_families, read_family_name

__all__ = [
    "UNKNOWN",
    "list_families",
    "describe",
    "get",
    "describe_file",
    "read_family_name",
    "recognize",
    "get_traits",
]

UNKNOWN = Message("not a checkpoint of a known kind")


def describe(header: Header) -> tuple[str, str]:
    """Return what a single file with these tensors is, in words, and its family or ""; ("", "") if nothing tells."""
    if any("lora_" in key for key in header):
        return Message("a LoRA, not a base model"), ""
    fitting = [name for name in list_families() if get(name).recognises(header)]
    if fitting:  # of two sizes of one structure, the one that states the size is meant
        name = max(fitting, key=lambda name: count_marks(get(name).single_file))
        return get(name).title, name
    if any(k.startswith(("down_blocks.0.", "transformer_blocks.0.")) for k in header):
        return Message(
            "a denoiser in diffusers' naming (it belongs into unet/ or transformer/ of a diffusers folder, as "
            "diffusion_pytorch_model.safetensors)"
        ), ""
    return "", ""


def describe_file(path: Path) -> tuple[str, str]:
    """Describe a single file by its header, as `describe` does.

    Raises:
        UserError: it is of a format that is not opened, or damaged.
    """
    check_kind(str(path))
    return describe(read_header(path))


def recognize(base: str) -> tuple[str, str]:
    """Return what a base model is, in words, and its family; ("", "") if nothing tells.

    A known base is told by its id; any other one on a hub is asked for its configs and headers, which takes seconds.

    Args:
        base: a value of `model.path`.

    Raises:
        UserError: there is no such model, it is not accessible, or it is of a format that is not opened.
    """
    from ._files import locate
    from .sources import describe as describe_base
    from .sources import known_bases, parse

    reference = parse(base)
    known = known_bases.get(reference.repo) if reference.kind == "hub" and not reference.file else None
    if known:
        return known.title, known.family
    described = describe_base(base)
    if described.family:
        return get(described.family).title, described.family
    place = locate(base, "", family="", base=described)
    return describe(read_header(place.checkpoint, place.absent)) if place.checkpoint else ("", "")
