"""What choosing a preset does to a draft: which presets it names then, and which settings change.

A goal and a GPU are chosen as one of their kind, or none. Other presets are named beside each other; the precision
levels and the demo bases' presets exclude each other. Later presets win over earlier ones: goal and GPU come first, the
others in the order in which they were chosen, and a demo base's preset last.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lora_fp8 import config
from lora_fp8.config import recipes

from ... import base_models, form
from ...draft import Draft
from .questions import GOALS
from .recipe import Recipe

KINDS = ("goal", "card", "bundled", "own")
"""In the order of the page: what is trained, VRAM, the other presets of the program, and those saved on this page."""
PRECISIONS = tuple(name for name in config.list_preset_names() if name.startswith("precision_"))


@dataclass(frozen=True)
class Effect:
    """What a preset does to the settings of a draft.

    Attributes:
        values: the settings that it gives their value, or that would change with it, by key.
        kept: settings that it has too, but whose values in the draft win.
    """

    values: dict[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()


def find_kind(name: str) -> str:
    """Return the kind of a preset, of `KINDS`; files are "own"."""
    if name in GOALS:
        return "goal"
    if recipes.parse_card(name):
        return "card"
    return "bundled" if name in config.list_preset_names() else "own"


class PresetChoice:
    """Names presets in a draft."""

    def __init__(self, draft: Draft, recipe: Recipe):
        self.draft, self.recipe = draft, recipe

    def read_named(self, values: dict[str, Any]) -> list[str]:
        """Return the presets that a draft names; none if its `preset` is not a list."""
        given = values["preset"]
        return [name for name in given if isinstance(name, str)] if isinstance(given, list) else []

    def list_names(self, kind: str, values: dict[str, Any]) -> list[str]:
        """List the presets of a kind that can be chosen for a draft, and those that it names."""
        named, family = self.read_named(values), str(values["model.family"])
        mine = [name for name in named if find_kind(name) == kind]
        if kind == "goal":
            known = recipes.find_goals(family) if family in self.recipe.reader.families else GOALS
            return [name for name in GOALS if name in (*known, *mine)]
        if kind == "card":
            return list(base_models.list_vram_presets())
        if kind == "own":
            return list(dict.fromkeys([*map(str, base_models.list_own_presets(self.draft.home)), *mine]))
        demo = f"demo_{family}" if values["model.path"] == "demo" else ""
        demos = base_models.list_demo_presets()
        bundled = (name for name in config.list_preset_names() if find_kind(name) == "bundled")
        return [name for name in bundled if name not in demos or name in (demo, *mine)]

    def choose(self, kind: str, name: str, is_on: bool = True) -> None:
        """Name a preset in the draft or take it out; of a goal or GPU "" is none. A goal also chooses a GPU."""
        values = form.read_values(self.draft.load_text(), self.draft.home)
        if name and name not in self.list_names(kind, values):
            return
        self.draft.put("preset", self._apply_choice(self.read_named(values), kind, name, is_on))

    def replace(self, among: Iterable[str], name: str) -> None:
        """Name this preset in the draft instead of those `among`; "" is none."""
        named = self.read_named(form.read_values(self.draft.load_text(), self.draft.home))
        self.draft.put("preset", _insert([other for other in named if other not in set(among)], name))

    def _apply_choice(self, named: list[str], kind: str, name: str, is_on: bool) -> list[str]:
        """Return the presets that a draft names after a choice."""
        kept = [other for other in named if other not in self._list_rivals(kind, name)]
        after = _insert(kept, name if is_on else "")
        has_card = any(map(recipes.parse_card, after))
        return _insert(after, self.recipe.choose_card()) if name in GOALS and not has_card else after

    def _list_rivals(self, kind: str, name: str) -> tuple[str, ...]:
        """List the presets that a choice replaces, the chosen one among them."""
        if kind in ("goal", "card"):
            return GOALS if kind == "goal" else base_models.list_vram_presets()
        for group in (PRECISIONS, base_models.list_demo_presets()):
            if name in group:
                return group
        return (name,)

    def find_effect(self, text: str, kind: str, name: str) -> Effect:
        """Find what a preset gives a draft that names it, or what choosing it would change; "" is none of its kind.

        Raises:
            UserError: the text is not TOML.
        """
        home = self.draft.home
        values, origins = form.read_values(text, home), form.find_origins(text, home)
        named = self.read_named(values)
        if name in named:
            given = form.find_preset_settings(text, name, home)
            mine = {key: values[key] for key in given if origins.get(key) == name}
        else:
            after = form.put(text, "preset", self._apply_choice(named, kind, name, True), home)
            # Only a goal proposes values that depend on the images.
            followed = self.recipe.find_changes(after, self.recipe.propose(text)) if kind == "goal" else {}
            changed = form.read_values(after, home) | followed
            mine = {
                key: changed[key]
                for key in form.collect_settings()
                if not form.is_same_value(changed[key], values[key])
            }
            mine.pop("preset", None)
            given = form.find_preset_settings(after, name, home) if name else {}
        kept = (key for key in given if origins.get(key) == "" and not form.is_same_value(values[key], given[key]))
        return Effect(mine, tuple(key for key in kept if key not in mine))


def _insert(named: list[str], name: str) -> list[str]:
    """Return the presets with this one before the first that has to come later."""
    if not name or name in named:
        return named
    place = next((i for i, other in enumerate(named) if _rank(other) > _rank(name)), len(named))
    return [*named[:place], name, *named[place:]]


def _rank(name: str) -> int:
    """Return where presets of this kind stand in a draft."""
    if name in base_models.list_demo_presets():
        return len(KINDS)
    return min(KINDS.index(find_kind(name)), KINDS.index("bundled"))
