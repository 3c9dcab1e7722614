"""Values for the components: what the fields, the menus and the texts beside them show of the draft."""

import hashlib
from pathlib import Path
from typing import Any

import gradio as gr

from lora_fp8 import config
from lora_fp8.config import recipes
from lora_fp8.errors import UserError
from lora_fp8.families.sources import known_bases

from ... import base_models, form, sanitize, setting_values, translations
from .layout import Layout
from .preset_cards import PresetCards, get_title
from .preset_choice import PresetChoice
from .problems import Problems
from .questions import PROPOSED
from .recipe import Recipe
from .styles import Styles
from .summary import Summary

LISTED = ("preset", "model.path", "model.components")
"""Settings whose choices depend on other settings."""


class Painter:
    """Turns the draft into values for the components."""

    def __init__(self, layout: Layout, problems: Problems, summary: Summary, styles: Styles, recipe: Recipe):
        self.ui, self.draft, self.reader = layout.ui, problems.draft, layout.reader
        self.layout, self.problems, self.summary, self.styles = layout, problems, summary, styles
        self.recipe = recipe
        self.choice = PresetChoice(self.draft, recipe)
        self.cards = PresetCards(self.ui, self.choice, recipe)
        self.last_choice = ("", "", "")
        """The draft after the last choice of a preset, the draft before it, and the preset's kind."""

    def update_all(self, view: str, everything: bool, offers: bool = False) -> dict[Any, Any]:
        """Return values for all fields of a view ("" is every view) and the summary; with `offers` also the configs."""
        painted = self.update_side(everything)
        for painted_view in (view,) if view else ("simple", "all", "toml"):
            painted |= self.update_view(painted_view)
        if offers:
            painted[self.layout.source] = gr.update(choices=self._list_sources())
        return painted

    def update_view(self, view: str, done: tuple[str, str] | None = None, but: str = "") -> dict[Any, Any]:
        """Return values for the fields and the presets' cards of a view; see `update_fields`."""
        return self.update_fields(view, done, but) | self.update_cards(view)

    def update_cards(self, *views: str) -> dict[Any, Any]:
        """Return values for the presets' cards of these views; nothing for a view without cards."""
        text = self.draft.load_text()
        after, _, kind = self.last_choice
        panels = self.layout.presets.panels
        return {
            panels[view]: self.cards.render(view, text, kind if text == after else "")
            for view in views
            if view in panels
        }

    def update_fields(self, view: str, done: tuple[str, str] | None = None, but: str = "") -> dict[Any, Any]:
        """Return values for the fields of a view, or nothing if the text is not TOML.

        Args:
            done: the draft before and after a change. Fields whose value is the same in both are left alone, as
                somebody may be typing there.
            but: a setting whose field is left alone.
        """
        before, text = done or (None, self.draft.load_text())
        if view == "toml":
            return {self.layout.code: text}
        try:
            values = form.read_values(text, self.draft.home)
        except UserError:
            return {}
        try:
            old = {} if before is None else form.read_values(before, self.draft.home)
        except UserError:
            old = {}
        painted: dict[Any, Any] = {}
        for key, part in self.layout.parts[view].items():
            kept = key not in LISTED and key in old and form.is_same_value(old[key], values[key])
            if key != but and not kept:
                painted[part] = self._update_setting(view, key, values)
        return painted

    def _explain(self, key: str, origin: str, values: dict[str, Any]) -> str:
        """Return why a recipe's preset gives a setting its value, as HTML; "" for other presets."""
        family = str(values["model.family"])
        settings = recipes.find_preset_values(
            origin,
            family if family in self.reader.families else "",
            draws=bool(values["preview.prompts"]),
            frames=recipes.find_longest_clip(values["dataset.frames"]),
            dropout=recipes.is_dropout(values["adapter.dropout"]),
            base=str(values["model.path"] or ""),
        )
        why = next((value.why for value in settings or [] if value.key == key), "")
        return f"<br><small>{sanitize.escape(self.ui.translate(why))}</small>" if why else ""

    def _update_setting(self, view: str, key: str, values: dict[str, Any]) -> Any:
        setting, value = form.collect_settings()[key], values[key]
        held = form.to_component(setting, value)
        if key == "preset":
            names = [str(name) for name in value] if isinstance(value, list) else []
            return gr.update(choices=self.list_presets(names), value=names)
        if key == "model.path" and view == "simple":
            usual = [
                (self._label_base(name), name) for name in base_models.list_usual_bases(str(values["model.family"]))
            ]
            return _offer([*usual, *base_models.find_base_models(self.ui.place.models, self.ui.place.roots)], held)
        if key == "model.components" and view == "simple":
            if held in (None, "", "auto") and not self.reader.inspect_base(str(values["model.path"] or "")).single:
                return gr.update(value=None, visible=False)
            place = self.ui.place
            return _offer(
                base_models.find_component_folders(place.models, place.roots, str(values["model.family"])),
                held,
                visible=True,
            )
        if setting.kind == "table":
            empty = [form.to_component(column, column.default) for column in setting.columns]
            return [*held, empty]
        if setting.kind in ("choice", "choices") or key == "model.family":
            known = list(self.reader.families) if key == "model.family" else list(setting.choices)
            strange = [word for word in (held if isinstance(held, list) else [held]) if word and word not in known]
            titles = self.reader.families if key == "model.family" else {}
            labels = [
                (titles.get(w) or translations.get_choice_label(self.ui.language, key, w), w)
                for w in [*known, *strange]
            ]
            return gr.update(choices=labels, value=held or None)
        return gr.update(value=held)

    def update_side(self, everything: bool = False) -> dict[Any, Any]:
        """Return values for the summary, the problems beside the settings, and the list of changed settings."""
        text = self.draft.load_text()
        findings = self.problems.find(text)
        state, summary, marks, changes = (
            self.summary.render_state(findings),
            self.summary.render(findings),
            self.styles.style_settings(text, findings, everything),
            self._render_changes(text),
        )
        replaced, recipe = self.draft.has_earlier(), self.recipe.render()
        return {
            self.layout.state: state,
            self.layout.summary: summary,
            self.layout.marks: marks,
            self.layout.recipe: recipe,
            self.layout.changes: changes,
            self.layout.back: gr.update(visible=replaced),
            self.layout.seen: hashlib.sha256(
                repr((state, summary, marks, changes, recipe, replaced)).encode()
            ).hexdigest(),
        }

    def update_images(self, done: tuple[str, str]) -> dict[Any, Any]:
        """Return values for the table of folders in the simple view, and for what a change proposed."""
        painted, table = self.update_fields("simple"), self.layout.parts["simple"]["dataset.folders"]
        return ({table: painted[table]} if table in painted else {}) | self.update_proposed(done)

    def update_proposed(self, done: tuple[str, str]) -> dict[Any, Any]:
        """Return values for the fields of the simple view that the recipe has changed, the draft before and after."""
        painted = self.update_fields("simple", done)
        fields = (self.layout.parts["simple"][key] for key in PROPOSED)
        return {part: painted[part] for part in fields if part in painted}

    def _render_changes(self, text: str) -> str:
        say = self.ui.say
        try:
            values, origins = form.read_values(text, self.draft.home), form.find_origins(text, self.draft.home)
        except UserError as error:
            return f"<p class='wrong'>{sanitize.escape(self.ui.translate(str(error)))}</p>"
        rows = []
        for key, setting in form.collect_settings().items():
            if key in origins and key != "preset" and not form.is_same_value(values[key], setting.default):
                label = translations.get_label(self.ui.language, f"section.{key}" if setting.kind == "table" else key)
                before, now = (self._display(setting, value) for value in (setting.default, values[key]))
                origin = origins[key] and Path(origins[key]).stem or say("new.changes.own")
                cells = "".join(f"<td>{sanitize.escape(cell)}</td>" for cell in (before, now))
                cells += f"<td>{sanitize.escape(origin)}{self._explain(key, origins[key], values)}"
                if not origins[key] and setting.default is not None:
                    cells += f"<br>{self._render_default_button(key, label)}"
                cells += "</td>"
                code = sanitize.escape(key).replace(".", ".<wbr>")
                rows.append(f"<tr><td>{sanitize.escape(label)}<br><code>{code}</code></td>{cells}</tr>")
        if not rows:
            return f"<p class='note'>{sanitize.escape(say('new.changes.none'))}</p>"
        heads = "".join(
            f"<th>{sanitize.escape(say(f'new.changes.{name}'))}</th>" for name in ("setting", "default", "now", "from")
        )
        return f"<table class='facts wide'><tr>{heads}</tr>{''.join(rows)}</table>"

    def _display(self, setting: form.Setting, value: Any) -> str:
        """Return a setting's value as people read it; of a table the first column."""
        if setting.kind == "table" and isinstance(value, list):
            rows = form.to_component(setting, value)
            return sanitize.shorten(", ".join(str(row[0]) for row in rows) or "–", 80)
        return sanitize.shorten(setting_values.format_value(self.ui, setting.key, value), 80)

    def _render_default_button(self, key: str, label: str) -> str:
        """Render the button that takes a setting out of the draft."""
        escape, say = sanitize.escape, self.ui.say
        title = escape(say("new.changes.undo_title", setting=label))
        return (
            f"<button type='button' data-do='default' data-key='{escape(key)}' aria-label='{title}'>"
            f"{escape(say('new.changes.undo'))}</button>"
        )

    def _label_base(self, name: str) -> str:
        """Return what the list of bases says of a known one: its id, and what it is good for."""
        known = known_bases.get(name)
        return f"{name} · {self.ui.translate(known.purpose)}" if known else name

    def list_presets(self, named: list[str] | None = None) -> list[tuple[str, str]]:
        """List presets as (label, name): the bundled ones, those of the user, and others that are `named`."""
        own = [(path.stem, str(path)) for path in base_models.list_own_presets(self.draft.home)]
        known = [*((f"{get_title(self.ui, name)} · {name}", name) for name in config.list_preset_names()), *own]
        return known + [(Path(name).stem, name) for name in named or [] if name not in {value for _, value in known}]

    def _list_sources(self) -> list[tuple[str, str]]:
        return [(label, str(path)) for label, path in base_models.find_configs(self.ui.place.roots)]


def _offer(choices: list[tuple[str, str]], held: Any, **given: Any) -> Any:
    """Update a dropdown whose value need not be among its choices."""
    strange = [(str(held), held)] if held and held not in {value for _, value in choices} else []
    return gr.update(choices=[*choices, *strange], value=held or None, **given)
