"""The New training page: one draft in three views (simple, all settings, TOML), with a summary and the Start button.

`layout` makes the components, and `events` binds them to `handlers`, which change the draft. `painting` turns the draft
into values for the components, with the help of `problems`, `summary` and `styles`. `draft_reader` looks at the files
that the draft names. `recipe` proposes values. `questions` lists what the simple view asks. `base_section` is the part
of the base model, which `base_state` and `base_rendering` render; `preset_section` that of the presets, with
`preset_choice` and `preset_cards`. `cards` has the look that both share.
"""

from ...context import Ui
from ...draft import Draft
from .base_section import BaseHandlers
from .draft_reader import DraftReader
from .events import Events
from .handlers import Handlers
from .layout import Layout
from .painting import Painter
from .preset_section import PresetHandlers
from .problems import Problems
from .recipe import Recipe
from .styles import Styles
from .summary import Summary


class Page:
    """The page in one language."""

    def __init__(self, ui: Ui):
        self.ui, self.draft, self.reader = ui, Draft(ui.place.home), DraftReader(ui)
        self.problems = Problems(ui, self.draft, self.reader)
        self.summary = Summary(ui, self.draft, self.reader, self.problems)
        self.styles = Styles(ui, self.draft)
        self.recipe = Recipe(ui, self.draft, self.reader)

    def lay_out(self) -> None:
        """Make the components and bind their events, inside of a gr.Blocks."""
        self.layout = Layout(self.ui, self.reader)
        self.painter = Painter(self.layout, self.problems, self.summary, self.styles, self.recipe)
        self.handlers = Handlers(self.painter)
        self.base = BaseHandlers(self.layout.base, self.handlers)
        self.presets = {view: PresetHandlers(self.handlers, view) for view in self.layout.presets.panels}
        Events(self.layout, self.handlers, self.base, [*self.presets.values()]).bind()


def build(ui: Ui) -> None:
    """Lay the page out."""
    Page(ui).lay_out()
