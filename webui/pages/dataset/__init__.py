"""The Dataset page: a grid of images and videos, a caption editor, batch edits with undo, findings and buckets.

`?folder=` names the folder, so that a reload and a second window show the same. Captions are read from disk every time;
findings come from `lora-fp8 dataset look`, a process of its own that decodes the images.

`layout` makes the components, and `events` binds them to `handlers`. `open_folder` reads what a window shows of its
folder, `rendering` makes the HTML of it. `images.training_settings` reads what New training says of it.
`operations` lists the edits of many captions.
"""

from ...context import Ui
from ...images.training_settings import TrainingSettings
from .events import Events
from .handlers import Handlers
from .layout import Layout
from .open_folder import OpenFolder
from .rendering import Renderer


class Page:
    """The page in one language."""

    def __init__(self, ui: Ui):
        self.ui, self.opened = ui, OpenFolder(ui)
        self.renderer, self.training = Renderer(self.opened), TrainingSettings(ui)
        self.handlers = Handlers(self.renderer, self.training)

    def lay_out(self) -> None:
        """Make the components and bind their events, inside of a gr.Blocks."""
        self.layout = Layout(self.ui, self.opened.families)
        Events(self.layout, self.handlers).bind()


def build(ui: Ui) -> None:
    """Lay the page out."""
    Page(ui).lay_out()
