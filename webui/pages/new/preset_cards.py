"""Presets and recipes as cards: what each is for, whether it fits a GPU, and what it changes in the draft."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_fp8 import families
from lora_fp8.config import recipes
from lora_fp8.config.recipes import Fit
from lora_fp8.errors import UserError

from ... import base_models, form, sanitize, setting_values, translations
from ...context import Ui
from .cards import render_button, render_card
from .preset_choice import KINDS, Effect, PresetChoice, find_kind
from .recipe import Recipe

SIMPLE = ("goal", "card")
"""The kinds that the simple view asks for; all settings show all kinds."""
MOST_NAMED = 4
"""A card names this many settings, and counts the others."""
TITLES = {"goal": "new.goal", "card": "new.card", "bundled": "new.presets.bundled", "own": "new.presets.own"}
NONE = {"goal": "new.goal.none", "card": "new.card.none"}


def get_title(ui: Ui, name: str) -> str:
    """Return what people call a preset."""
    if gb := recipes.parse_card(name):
        return ui.say("new.card.gb", gb=gb)
    if name in recipes.GOALS:
        return ui.say(f"new.goal.{name}")
    if name in base_models.list_demo_presets():
        return ui.say("base.card.demo", title=families.get(name.removeprefix("demo_")).title)
    return ui.say(f"new.preset.{name}") if find_kind(name) == "bundled" else Path(name).stem


class PresetCards:
    """Renders the cards of a draft in one language."""

    def __init__(self, ui: Ui, choice: PresetChoice, recipe: Recipe):
        self.ui, self.choice, self.recipe, self.reader = ui, choice, recipe, recipe.reader
        self._known: tuple[Any, dict[str, str]] = (None, {})
        self._lock = threading.Lock()

    def render(self, view: str, text: str, undo: str = "") -> str:
        """Render the cards of a view, "simple" or "all"; "" if the text is not TOML.

        Args:
            text: the draft.
            undo: the kind of the choice that can be undone, or "".
        """
        home = self.choice.draft.home
        try:
            values = form.read_values(text, home)
        except UserError:
            return ""
        own = [(path, path.stat().st_mtime_ns) for path in base_models.list_own_presets(home)]
        key = text, undo, own, [(folder, contents) for folder, contents, *_ in self.reader.count_folders(values)]
        with self._lock:
            if self._known[0] != key:
                self._known = key, {kind: self._render_kind(kind, text, values, undo) for kind in KINDS}
            groups = self._known[1]
        return "".join(groups[kind] for kind in (SIMPLE if view == "simple" else KINDS))

    def _render_kind(self, kind: str, text: str, values: dict[str, Any], undo: str) -> str:
        title = sanitize.escape(self.ui.say(TITLES[kind]))
        names = self.choice.list_names(kind, values)
        named = self.choice.read_named(values)
        cards = [self._render_card(kind, name, text, values) for name in names]
        if kind in NONE:
            is_chosen = not any(name in named for name in names)
            effect = Effect() if is_chosen else self.choice.find_effect(text, kind, "")
            lines = [("effect", "" if is_chosen else self._describe_change(effect))]
            cards.append(render_card(self.ui.say(NONE[kind]), lines, [], is_chosen, _make_button_data(kind, "")))
        elif not cards:
            cards.append(f'<p class="note">{sanitize.escape(self.ui.say("new.presets.none"))}</p>')
        back = f"<p>{render_button(self.ui, 'undo', 'new.presets.undo')}</p>" if undo == kind else ""
        return (
            f'<h3>{title}</h3><div class="choice-cards {kind}" role="group" aria-label="{title}">{"".join(cards)}</div>'
            f"{back}"
        )

    def _render_card(self, kind: str, name: str, text: str, values: dict[str, Any]) -> str:
        is_chosen = name in self.choice.read_named(values)
        effect = self.choice.find_effect(text, kind, name)
        fit = self._find_fit(name, values)
        purpose = self._describe(kind, name, values, fit)
        changes = self._describe_values(effect) if is_chosen else self._describe_change(effect)
        if kind == "card" and (not values["model.path"] or (values["model.path"] == "demo" and not effect.values)):
            changes = ""  # what fits depends on the base model; a demo model fits anywhere
        kept = self._list_labels(effect.kept)
        lines = [("purpose", purpose), ("effect", changes)]
        lines.append(("kept", self.ui.say("new.preset.kept", names=kept) if kept else ""))
        data = _make_button_data(kind, name, "off" if is_chosen and kind not in NONE else "on")
        return render_card(get_title(self.ui, name), lines, self._list_badges(kind, name, values, fit), is_chosen, data)

    def _find_fit(self, name: str, values: dict[str, Any]) -> Fit | None:
        """Return how the base model fits a GPU of this size; None for other presets, no base and a demo base."""
        family, gb = str(values["model.family"]), recipes.parse_card(name)
        if not gb or family not in recipes.read_sizes() or values["model.path"] in (None, "", "demo"):
            return None
        frames = recipes.find_longest_clip(values["dataset.frames"])
        dropout = recipes.is_dropout(values["adapter.dropout"])
        return recipes.fit_card(family, gb, frames, dropout, str(values["model.path"]))

    def _describe(self, kind: str, name: str, values: dict[str, Any], fit: Fit | None) -> str:
        """Return what a preset is for, in a sentence."""
        say = self.ui.say
        if kind == "card":
            if fit is None:
                return say("new.card.demo" if values["model.path"] == "demo" else "new.card.purpose")
            if fit.problem:
                return self.ui.translate(fit.problem)
            if fit.peak is None or fit.note:
                return self.ui.translate(fit.note)
            return say("new.card.fits", peak=recipes.format_gib(fit.peak), usable=recipes.format_gib(fit.usable))
        if kind == "own":
            is_saved = Path(name) in base_models.list_own_presets(self.choice.draft.home)
            return say("new.preset.saved" if is_saved else "new.preset.file")
        if name in base_models.list_demo_presets():
            return say("new.preset.demo.purpose")
        return say(f"new.goal.{name}.purpose" if kind == "goal" else f"new.preset.{name}.purpose")

    def _list_badges(self, kind: str, name: str, values: dict[str, Any], fit: Fit | None) -> list[tuple[str, str]]:
        """List (style, text) of the architecture that a recipe is for, and of the VRAM that it takes."""
        family, say = str(values["model.family"]), self.ui.say
        badges: list[tuple[str, str]] = []
        if kind == "card":
            if fit is not None and fit.problem:
                badges.append(("gate", say("new.card.small")))
            if name == self.recipe.choose_card():
                badges.append(("yes", say("new.card.mine")))
        if kind == "goal" and values["model.path"] and family in self.reader.families:
            badges.append(("", self.reader.families[family]))
            frames = recipes.find_longest_clip(values["dataset.frames"])
            if values["model.path"] != "demo" and (least := _find_least_card(family, frames, name, values)):
                badges.append(("", say("base.card.vram", gb=least)))
        return badges

    def _describe_change(self, effect: Effect) -> str:
        """Return what choosing a preset changes: "Changes 6 settings: Rank 32, Alpha 16 and 4 more"."""
        if not effect.values:
            return self.ui.say("new.preset.same")
        return self._list_values("new.preset.changes", effect)

    def _describe_values(self, effect: Effect) -> str:
        """Return what a chosen preset gives its value."""
        return self._list_values("new.preset.sets", effect) if effect.values else self.ui.say("new.preset.idle")

    def _list_values(self, key: str, effect: Effect) -> str:
        language, count = self.ui.language, len(effect.values)
        named = [
            f"{translations.get_label(language, name)} {self._shorten(name, value)}"
            for name, value in list(effect.values.items())[:MOST_NAMED]
        ]
        text = self.ui.say("new.preset.and").join(named)
        if more := count - len(named):
            text = self.ui.say("new.preset.more", named=text, count=more)
        return self.ui.say(key, count=count, values=text)

    def _shorten(self, key: str, value: Any) -> str:
        return sanitize.shorten(setting_values.format_value(self.ui, key, value), 40)

    def _list_labels(self, keys: Sequence[str]) -> str:
        labels = [translations.get_label(self.ui.language, key) for key in keys[:MOST_NAMED]]
        text = self.ui.say("new.preset.and").join(labels)
        more = len(keys) - len(labels)
        return self.ui.say("new.preset.more", named=text, count=more) if more else text


def _make_button_data(kind: str, name: str, to: str = "on") -> dict[str, str]:
    """Return what the press of a card sends. It says what is wanted, so that a double press wants the same twice."""
    return {"do": "choose", "id": kind, "name": name, "to": to}


def _find_least_card(family: str, frames: int, goal: str, values: dict[str, Any]) -> int:
    """Return the GB of the smallest GPU that trains a base for a goal; 0 if none does or it was not estimated."""
    if family not in recipes.read_sizes():
        return 0
    more = frames, recipes.has_dropout(goal), str(values["model.path"])
    return next((gb for gb in recipes.CARDS if not recipes.fit_card(family, gb, *more).problem), 0)
