"""Skip work that Gradio 6.31 repeats while the site starts.

Measured in seconds of one core: the import takes 1.3 instead of 2.2, laying out both languages 0.8 instead of 2.3.
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
    """Keeps that module from writing, which takes half of the import and changes an installed package."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: ModuleType | None = None) -> Any:
        if name != STUBS or not (spec := super().find_spec(name, path, target)) or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_without(module: ModuleType) -> None:
            run(module)
            vars(module)["create_or_modify_pyi"] = lambda component_class, class_name, events: None

        spec.loader.exec_module = run_without  # type: ignore[method-assign]  # of this one loader
        return spec


def import_without_stubs() -> None:
    """Install the import hook. Call it before the first import of Gradio; later it has no effect."""
    if _NoStubs not in sys.meta_path:
        sys.meta_path.insert(0, _NoStubs)


@contextmanager
def skip_servers() -> Iterator[None]:
    """While pages are laid out, keep Gradio from making a server and a description of the site.

    It would make both in full at the end of each page and discard them. Mounting makes those that serve.
    """
    import gradio as gr

    class Later:
        create_app = staticmethod(lambda *_, **__: None)

    with patch("gradio.blocks.App", Later), patch.object(gr.Blocks, "get_config_file", lambda _: {}):
        yield
