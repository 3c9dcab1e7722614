"""The Dataset page: the image workbench for a folder that exists, and beside it batch edits, tags, findings, buckets.

`?folder=` names the folder, so that a reload and a second window show the same; without it, the first folder of New
training is opened. The workbench (webui/images) has the images, their captions, uploads and automatic captions. It
tells this page what it shows and what is selected there, and this page tells it which folder to show, and what to
examine it for. Findings come from `lora-fp8 dataset look`, a process of its own that decodes the images.

`layout` makes the components, and `events` binds them to `handlers`. `rendering` makes the HTML. `operations` lists the
edits of many captions.
"""

from ...context import Ui
from .events import Events
from .handlers import Handlers
from .layout import Layout
from .rendering import Renderer


class Page:
    """The page in one language."""

    def __init__(self, ui: Ui):
        self.ui, self.renderer = ui, Renderer(ui)
        self.handlers = Handlers(self.renderer)

    def lay_out(self) -> None:
        """Make the components and bind their events, inside of a gr.Blocks."""
        self.layout = Layout(self.ui)
        Events(self.layout, self.handlers).bind()


def build(ui: Ui) -> None:
    """Lay the page out."""
    Page(ui).lay_out()
