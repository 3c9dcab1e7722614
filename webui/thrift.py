"""What Gradio 6.31 does again and again on the way to an open page: here once, or not at all.

Measured in seconds of one core: the import 1.3 instead of 2.2, laying out both languages 0.8 instead of 2.3.
"""

import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

STUBS = "gradio.component_meta"
"""Writes a .pyi file for each component class, beside its source, whenever it is imported."""


class _NoStubs(importlib.machinery.PathFinder):
    """Takes the writing out of that one module: half of the import's time, and it changes an installed package."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != STUBS or not (spec := super().find_spec(name, path, target)):
            return None
        run = spec.loader.exec_module

        def run_without(module: ModuleType) -> None:
            run(module)
            module.create_or_modify_pyi = lambda component_class, class_name, events: None

        spec.loader.exec_module = run_without
        return spec


def import_without_stubs() -> None:
    """To be called before Gradio is first imported; it changes nothing when that has been."""
    if _NoStubs not in sys.meta_path:
        sys.meta_path.insert(0, _NoStubs)


@contextmanager
def one_server() -> Iterator[None]:
    """While pages are laid out, Gradio makes no server and no description of the site.

    It would make both, whole, at the end of each page and throw the last ones away; mounting makes those that serve.
    """
    import gradio as gr

    class Later:
        create_app = staticmethod(lambda *_, **__: None)

    with patch("gradio.blocks.App", Later), patch.object(gr.Blocks, "get_config_file", lambda _: {}):
        yield
