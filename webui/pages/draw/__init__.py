"""Try it: draw a prompt with a run's checkpoints or a LoRA file, at several strengths and beside the base model.

`?run=` chooses a run. `layout` makes the components, `events` binds them to `handlers`, and `rendering` makes the HTML
of a drawing. The images are drawn by jobs of the queue (`drawings`).
"""

from ...context import Ui
from .events import Events
from .handlers import Handlers
from .layout import Layout


def build(ui: Ui) -> None:
    """Lay the page out."""
    Events(Layout(ui), Handlers(ui)).bind()
