"""The miniature of FLUX.1 Kontext, whose network is FLUX.1's."""

from .flux import CONFIG, make_parts

__all__ = ["CONFIG", "make_parts"]
