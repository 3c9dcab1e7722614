"""The page of one run: curves, previews, files, log, warnings and settings. `?run=` is a job number or a folder.

`layout` makes the components, and `events` binds them to `handlers`, which find the run that the address names.
`rendering` makes the HTML of its parts.
"""

from ...context import Ui
from .events import Events
from .handlers import Handlers
from .layout import Layout


def build(ui: Ui) -> None:
    """Lay the page out."""
    Events(Layout(ui), Handlers(ui)).bind()
