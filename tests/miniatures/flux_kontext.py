"""The miniature of FLUX.1 Kontext, whose network is FLUX.1's."""

from __future__ import annotations

from typing import Any

from . import _parts, flux

CONFIG = flux.CONFIG


def make_parts() -> dict[str, Any]:
    # Latents of half the image's sides, which the small control images of `editing.shrink` divide into whole tokens.
    return flux.make_parts() | {"vae": _parts.flux_vae()}
