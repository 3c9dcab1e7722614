"""Random models, small and complete, of each family's architecture: what the tests and some scripts train.

One file here is one family's miniature. It has

* `CONFIG`: the config of its denoiser. The sides of its linears are multiples of 16, as FP8 kernels need them.
* `make_parts()`: the other parts, by the pipeline's names. They are random and small, and work: a tokenizer reads any
  text. Making and saving all of them takes about a second.
* `HW`, where it is not 16 x 24: its image size in pixels, (height, width). Not square, so that swapping the two shows.
* `wake_(denoiser)`, where a new denoiser has zeros that hide all other layers: fills them, in place.
* `save(parts, folder)`, where the pipeline's own `save_pretrained` does not write the folder as released.

Importing this package imports neither torch nor diffusers.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import Any


def available() -> list[str]:
    """Return the names of the families that have a miniature: all of them."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def save(name: str, folder: Path, seed: int = 0) -> None:
    """Save the miniature of a family in the diffusers layout. The same seed gives the same weights."""
    import diffusers

    from lora_fp8 import families

    from ._parts import seeded

    family, miniature = families.get(name), _get(name)
    with seeded(seed):
        denoiser = getattr(diffusers, family.denoiser_class)(**miniature.CONFIG)
        if hasattr(miniature, "wake_"):
            miniature.wake_(denoiser)
        parts = {family.denoiser_name: denoiser, **miniature.make_parts()}
        if hasattr(miniature, "save"):
            miniature.save(parts, folder)
        else:
            family.get_pipeline_type()(**parts).save_pretrained(folder, safe_serialization=True)


def get_config(name: str) -> dict[str, Any]:
    """Return the config of the denoiser of a family's miniature."""
    config: dict[str, Any] = _get(name).CONFIG
    return config


def get_hw(name: str) -> tuple[int, int]:
    """Return the image size (height, width) in pixels that a family's miniature is used with."""
    return getattr(_get(name), "HW", (16, 24))


def _get(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
