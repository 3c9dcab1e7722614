"""Page: dataset."""

import gradio as gr

from ..context import Ui


def build(ui: Ui) -> None:
    """Lay the page out."""
    gr.Markdown(f"## {ui.say('page.dataset')}")
