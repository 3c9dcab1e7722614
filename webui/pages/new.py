"""The New training page: one draft in three views (simple, all settings, TOML), with a summary and the Start button."""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block

from lora_fp8 import config, families
from lora_fp8.config import recipes
from lora_fp8.data import clips
from lora_fp8.errors import Message, UserError, UserErrors
from lora_fp8.families import sources
from lora_fp8.families.sources import known_bases

from .. import (
    base_models,
    dataset_folder,
    estimate_panel,
    form,
    image_folders,
    importer,
    live_panel,
    run_cards,
    sanitize,
    submission,
    translations,
)
from ..context import Ui
from ..draft import Draft

GOALS = recipes.GOALS
"""Presets for what the LoRA is to learn."""
SIMPLE = (
    "model.family",
    "model.path",
    "model.components",
    "dataset.folders",
    "dataset.trigger",
    "dataset.missing_caption",
    "dataset.frames",
    "dataset.fps",
    "dataset.clip",
    "train.steps",
    "preview.prompts",
    "name",
)
"""Settings of the simple view. Its other questions (goal, GPU memory) write to `preset`."""
CLIPS = ("dataset.frames", "dataset.fps", "dataset.clip")
NEXT_STEPS = {
    "is empty; give a Hugging Face id, a diffusers folder, a .safetensors file or 'demo'": "new.base.missing",
    "no picture folder given; add a [[dataset.folders]] table with a path": "new.pictures.missing",
}
"""Messages about an untouched form: the engine says what to write into a file, the page says what to do here."""
KINDS = {"model.path": "file or folder", "preview.controls": "file or folder", "adapter.init_from": "file"}
"""Settings that name a file or either. Every other setting with a path names a folder."""
SECONDS = 2.0
QUIET: dict[str, Any] = {
    "show_progress": "hidden",
    "queue": False,
    "concurrency_limit": None,
    "api_visibility": "private",
    "trigger_mode": "always_last",
}
QUEUED = QUIET | {"queue": True}
"""For handlers that may show a message: gr.Info and gr.Warning reach the browser only through the queue."""
SLOW = QUIET | {"queue": True, "show_progress": "minimal", "trigger_mode": "once"}
OPENING = "(...inputs) => { window.opening(); return inputs; }"
OPENED = "() => window.opened()"
"""Wraps handlers that repaint a whole view, so that input typed meanwhile is not lost."""
CHOOSING = "(...inputs) => { window.choosing(); return inputs; }"
CHOSEN = "() => window.chosen()"
"""Wraps handlers that may change other settings than their own."""
STYLE = """
<style>
#new-views .form {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(260px, 100%), 1fr));
  background: var(--block-background-fill);
}
.setting code { font-size: 11px; color: var(--body-text-color) !important; }
.setting:last-child:has(textarea[rows="3"]) { grid-column: 1 / -1; }
.setting:has(> .table-container) { container-type: inline-size; }
.setting :is(.header-table, .virtual-body) { table-layout: fixed !important; width: 100% !important; }
.setting .header-cell { font-size: 12px; text-align: left !important; }
.setting .header-cell * { word-break: keep-all !important; overflow-wrap: normal !important; }
/* Sorts and filters, of no use; and what selects a row or column, which a second click on a cell would hit. */
.setting :is(.header-cell .cell-menu-button, .toolbar, .selection-button) { display: none !important; }
[role="menuitem"][aria-label$=" column"], [role="menuitem"][aria-label*=" column to the "] { display: none !important; }
.setting .select-all-checkbox { display: none; }
.setting :is(.header-cell, .body-cell) {
  width: var(--share) !important; min-width: 0 !important; max-width: none !important;
  flex: 0 0 var(--share) !important; font-family: var(--font) !important;
}
.setting [data-editable]:empty::before { color: var(--body-text-color-subdued); }
.setting > .container { height: auto !important; }
.setting::after { display: block; white-space: pre-wrap; font-size: 13px; padding-top: 4px; color: #b91c1c; }
.dark .setting::after { color: #f87171; }
.setting-group { margin-bottom: 18px; }
.style-only { display: none !important; }
#new-side { align-self: flex-start; }
@media (min-width: 900px) { #new-side { position: sticky; top: 12px; } }
#new-summary ul { margin: 4px 0 10px; padding-left: 18px; }
#new-summary li { margin: 3px 0; overflow-wrap: anywhere; }
#new-summary p { margin: 6px 0; }
#new-side table.facts code { font-size: 11px; }
#new-side table.facts.wide :is(th, td) { overflow-wrap: break-word; padding-right: 8px !important; }
#new-side table.facts.wide td:nth-child(3) { overflow-wrap: anywhere; }
#new-files table.facts td:first-child { width: 42%; }
#new-toml .cm-editor { font-family: var(--font-mono); font-size: 13px; }
</style>
"""

LISTED = ("preset", "model.path", "model.components")
"""Settings whose choices depend on other settings."""
WIDE = {"path": 4, "repeats": 1.3, "trigger": 2, "regularization": 2.1, "resolution": 1.6, "weight": 1.1}
PATH = 3
WIDE |= {"control": PATH, "mask": PATH}
"""Columns of the table of folders that need more room than the others."""
UNIT = 62
"""Width in pixels of a normal column, enough for the longest word of its title."""
STACKED = """@container (max-width: {width}px) {{
  {table} .virtual-table-viewport {{ max-height: none !important; }}
  {table} .header-table {{ position: absolute; visibility: hidden; }}
  {table} .virtual-row {{ flex-wrap: wrap; border-bottom: 1px solid var(--border-color-primary); }}
  {table} .body-cell {{ display: block; width: auto !important; flex: 1 1 88px !important; border: 0 !important; }}
  {table} .body-cell::before {{
    display: block; padding: 6px 8px 0; font-size: 12px; color: var(--body-text-color-subdued);
  }}
  {table} .cell-wrap {{ height: auto !important; min-height: 30px !important; padding: 0 8px 4px; }}
  {table} .virtual-row:has([aria-colindex="1"] [data-editable]:empty) [aria-colindex]:not([aria-colindex="1"]) {{
    display: none;
  }}
  {cells}
}}"""
"""Style for a narrow table of folders: each folder becomes a block, with each value below its title."""


def build(ui: Ui) -> None:
    """Lay the page out."""
    _Page(ui).lay_out()


class _Page:
    """The components of one language and their handlers.

    `parts` holds the fields by view and setting, `keys` the setting of each field by the field's id.
    """

    def __init__(self, ui: Ui):
        self.ui = ui
        self.draft = Draft(ui.place.home)
        self.estimates = estimate_panel.Estimates(ui.place.home)
        self.descriptions = base_models.Descriptions()
        self.parts: dict[str, dict[str, Any]] = {"simple": {}, "all": {}}
        self.counted: dict[tuple[Path, str], image_folders.Count] = {}
        self.keys: dict[str, str] = {}  # of the parts, by their ids
        self.families = {name: families.get(name).title for name in families.available()}

    # ------------------------------------------------------------------------------------------------------- layout

    def lay_out(self) -> None:
        say = self.ui.say
        gr.HTML(STYLE, elem_classes="style-only")
        self.marks, self.match_style = (gr.HTML(elem_classes="style-only") for _ in range(2))
        # What the window shows, which may differ from what it was sent last: the window reports it.
        self.seen = gr.Textbox(visible="hidden", elem_id="new-seen")
        self.address = gr.Textbox(visible="hidden", elem_id="new-address")
        self.touched = gr.Textbox(visible="hidden", elem_id="new-touched")
        with gr.Row():
            with gr.Column(scale=5, min_width=320):
                with gr.Tabs(elem_id="new-views"):
                    with gr.Tab(say("new.view.simple"), id="simple") as simple:
                        self._lay_out_simple()
                    with gr.Tab(say("new.view.all"), id="all") as every:
                        self._lay_out_all()
                    with gr.Tab(say("new.view.toml"), id="toml") as toml:
                        gr.Markdown(say("new.toml.info"), elem_classes="note")
                        self.code = gr.Code(
                            language=None,
                            interactive=True,
                            lines=20,
                            max_lines=40,
                            label=say("new.view.toml"),
                            show_label=False,
                            elem_id="new-toml",
                        )
                        self.keys["new-toml"] = ""
            with gr.Column(scale=3, min_width=300, elem_id="new-side"):
                self.summary = gr.HTML(elem_id="new-summary")
                self.start = gr.Button(say("new.start"), variant="primary", elem_id="new-start")
                self._lay_out_files()
                with gr.Accordion(say("new.changes"), open=False):
                    self.changes = gr.HTML()
        self._bind_events(simple, every, toml)

    def _lay_out_simple(self) -> None:
        say = self.ui.say
        gr.Markdown(f"## {say('new.goal')}")
        self.goal = gr.Radio(
            [*((say(f"new.goal.{name}"), name) for name in GOALS), (say("new.goal.none"), "")],
            label=say("new.goal"),
            show_label=False,
            container=False,
            elem_id="new-goal",
        )
        gr.Markdown(f"## {say('new.base')}")
        with gr.Row(equal_height=True):
            self.demos = {
                name: gr.Button(say("new.base.demo", title=self.families[name]), size="sm", elem_id=f"new-demo-{name}")
                for name in base_models.list_demo_families()
            }
        gr.Markdown(say("new.base.demo_help"), elem_classes="note")
        self._add_field("simple", "model.family")
        self._add_field("simple", "model.path")
        self._add_field("simple", "model.components")
        self.base_note = gr.HTML(elem_classes="note")
        gr.Markdown(f"## {say('new.pictures')}")
        with gr.Row():
            with gr.Column(min_width=260):
                kinds = [*image_folders.TAKEN]
                self.drop = gr.File(
                    file_count="multiple",
                    file_types=kinds,
                    label=say("new.pictures.drop"),
                    height=170,
                    elem_id="new-drop",
                )
                self.set_name = gr.Textbox(
                    "pictures", label=say("new.pictures.set"), info=say("new.pictures.set_info"), elem_id="new-set"
                )
            with gr.Column(min_width=260):
                self.folder = gr.Dropdown(
                    [], value=None, allow_custom_value=True, label=say("new.pictures.folder"), elem_id="new-folder"
                )
                self.add = gr.Button(say("new.pictures.add"), size="sm", elem_id="new-add")
        self._add_field("simple", "dataset.folders")
        gr.Markdown(say("new.pictures.columns"), elem_classes="note")
        self.taken = gr.HTML(elem_id="new-taken")
        self._add_field("simple", "dataset.trigger")
        self._add_field("simple", "dataset.missing_caption")
        with gr.Row(elem_id="new-clips"):
            for key in CLIPS:
                self._add_field("simple", key)
        gr.Markdown(f"## {say('new.card')}")
        cards = [(say("new.card.gb", gb=recipes.card_of(name)), name) for name in base_models.list_vram_presets()]
        self.card = gr.Radio(
            [*cards, (say("new.card.none"), "")],
            label=say("new.card"),
            show_label=False,
            container=False,
            elem_id="new-card",
        )
        gr.Markdown(f"## {say('new.length')}")
        for key in ("train.steps", "name", "preview.prompts"):
            self._add_field("simple", key)

    def _lay_out_all(self) -> None:
        say = self.ui.say
        with gr.Row(equal_height=True):
            self.search = gr.Textbox(
                label=say("new.search"), info=say("new.search.info"), elem_id="new-search", scale=3
            )
            self.everything = gr.Checkbox(label=say("new.search.everything"), elem_id="new-everything", scale=1)
        self.nothing = gr.HTML(elem_id="new-nothing", elem_classes="note")
        for section in form.sections():
            key = f"section.{section}" if section else "section"
            title = translations.get_label(self.ui.language, key)
            text = translations.get_help(self.ui.language, key, form.sections()[section]).strip()
            with gr.Column(elem_id=_make_id("section", section), elem_classes="setting-group"):
                gr.Markdown(f"## {title}{f' `[{section}]`' if section else ''}\n{text}")
                members = [setting for setting in form.settings().values() if setting.section == section]
                for setting in (setting for setting in members if setting.kind == "table"):
                    self._add_field("all", setting.key)
                    gr.HTML(self._render_column_help(setting))
                for setting in (setting for setting in members if setting.kind != "table"):
                    self._add_field("all", setting.key)

    def _render_column_help(self, table: form.Setting) -> str:
        """Render the help of the columns of a table, collapsed."""
        language = self.ui.language
        help_rows = (
            (
                translations.get_label(language, column.key),
                translations.get_help(language, column.key, column.description),
            )
            for column in table.columns
        )
        rows = "".join(
            f"<tr><th>{sanitize.escape(title)}</th><td>{sanitize.escape(text)}</td></tr>" for title, text in help_rows
        )
        summary = sanitize.escape(self.ui.say("new.pictures.meanings"))
        return f"<details><summary>{summary}</summary><table class='facts'>{rows}</table></details>"

    def _lay_out_files(self) -> None:
        say = self.ui.say
        with gr.Accordion(say("new.files"), open=False, elem_id="new-files"):
            self.source = gr.Dropdown(
                [], value=None, allow_custom_value=True, label=say("new.files.load"), info=say("new.files.load_info")
            )
            self.load = gr.Button(say("new.files.load_button"), size="sm")
            gr.Markdown(say("new.files.import_info"), elem_classes="note")
            self.foreign = gr.File(
                label=say("new.files.import"), file_count="multiple", height=130, elem_id="new-import"
            )
            self.imported = gr.HTML()
            self.preset_name = gr.Textbox(
                label=say("new.files.preset_name"), info=say("new.files.preset_info"), elem_id="new-preset-name"
            )
            self.save = gr.Button(say("new.files.preset_save"), size="sm", elem_id="new-preset-save")
            self.reset = gr.Button(say("new.files.reset"), size="sm", variant="stop", elem_id="new-reset")
            gr.Markdown(say("new.files.reset_info"), elem_classes="note")
            self.back = gr.Button(say("new.files.back"), size="sm", visible=False, elem_id="new-back")

    def _add_field(self, view: str, key: str) -> None:
        setting = form.settings()[key]
        language = self.ui.language
        info = translations.get_help(language, key, setting.description)
        bounds = f" ({setting.bounds})" if setting.bounds else ""
        common: dict[str, Any] = {
            "label": translations.get_label(language, key),
            "info": f"{info}{bounds} `{key}`" if view == "all" else info,
            "elem_id": _make_id("set" if view == "all" else "new", key),
            "elem_classes": ["setting"],
            "interactive": True,
        }
        choices = [(translations.get_choice_label(language, key, word), word) for word in setting.choices]
        part: Any
        if key == "model.family":
            part = gr.Dropdown([(title, name) for name, title in self.families.items()], value=None, **common)
        elif key == "preset":
            part = gr.Dropdown([], value=None, multiselect=True, allow_custom_value=True, **common)
        elif key == "model.path" and view == "simple":
            common["info"] = self.ui.say("new.base.path_info")
            part = gr.Dropdown([], value=None, allow_custom_value=True, **common)
        elif key == "model.components" and view == "simple":
            part = gr.Dropdown([], value=None, allow_custom_value=True, visible=False, **common)
        elif setting.kind == "flag":
            part = gr.Checkbox(**common)
        elif setting.kind == "choice":
            part = gr.Dropdown(choices, value=None, **common)
        elif setting.kind == "mixed":
            part = gr.Dropdown(choices, value=None, allow_custom_value=True, **common)
        elif setting.kind == "choices":
            part = gr.Dropdown(choices, value=None, multiselect=True, **common)
        elif setting.kind == "table":
            del common["info"]
            part = gr.Dataframe(
                headers=[translations.get_label(language, column.key) for column in setting.columns],
                datatype=["bool" if column.kind == "flag" else "str" for column in setting.columns],
                type="array",
                column_count=len(setting.columns),
                row_count=1,
                wrap=True,
                buttons=[],
                **(common | {"label": translations.get_label(language, f"section.{key}")}),
            )
        else:
            lines = 3 if setting.kind in ("lines", "entries") or setting.name == "description" else 1
            part = gr.Textbox(lines=lines, max_lines=12 if lines > 1 else 1, **common)
        self.parts[view][key] = part
        self.keys[part.elem_id] = key

    # ------------------------------------------------------------------------------------------------------- wiring

    def _bind_events(self, simple: gr.Tab, every: gr.Tab, toml: gr.Tab) -> None:
        side = [self.summary, self.marks, self.changes, self.seen, self.back]
        window: dict[str, Block] = {"everything": self.everything}
        rows = [
            self.parts["simple"]["dataset.folders"],
            self.folder,
        ]  # only these, because people may be typing elsewhere
        views: dict[str, list[Any]] = {
            "simple": [*self.parts["simple"].values(), self.goal, self.card, self.folder, self.base_note],
            "all": list(self.parts["all"].values()),
            "toml": [self.code],
        }
        for view, parts in self.parts.items():
            for key, part in parts.items():
                repaint = key in ("preset", "model.family", "model.path", "model.components")
                changed = part.input(
                    functools.partial(self._change, view, key, repaint),
                    inputs_kwargs={"held": part, **window},
                    outputs=[*side, *(views[view] if repaint else [])],
                    js=CHOOSING if repaint else None,
                    **(QUEUED if repaint else QUIET),
                )
                if repaint:
                    changed.then(None, js=CHOSEN)
        for part, names in ((self.goal, GOALS), (self.card, base_models.list_vram_presets())):
            part.input(
                functools.partial(self._choose_preset, tuple(names)),
                inputs_kwargs={"name": part, **window},
                outputs=[*side, *views["simple"]],
                js=CHOOSING,
                **QUEUED,
            ).then(None, js=CHOSEN)
        for name, button in self.demos.items():
            button.click(
                functools.partial(self._choose_demo, name),
                inputs_kwargs=window,
                outputs=[*side, *views["simple"]],
                js=CHOOSING,
                **QUEUED,
            ).then(None, js=CHOSEN)
        self.code.input(self._write_text, inputs_kwargs={"text": self.code, **window}, outputs=side, **QUIET)
        held = {part.elem_id: part for parts in views.values() for part in parts if part.elem_id in self.keys}
        tables = [
            id for id, part in held.items() if isinstance(part, gr.Dataframe)
        ]  # Gradio fails without a table's value
        typed = {"touched": self.touched, **window, **held}
        # Other fields are sent only if they were touched: a field may hold a value that is not among its choices, which
        # Gradio would refuse with a message of its own.
        script = f"""(_, everything, ...values) => {{
            const ids = {json.dumps(list(held))}, touched = %s;
            const sent = [...touched, ...{json.dumps(tables)}];
            return [touched.join(" "), everything, ...values.map((v, i) => sent.includes(ids[i]) ? v : null)];
        }}"""
        for tab, view in ((simple, "simple"), (every, "all"), (toml, "toml")):
            tab.select(
                functools.partial(self._switch_view, view),
                inputs_kwargs=typed,
                outputs=[*side, *views[view]],
                js=script % "window.leftSettings()",
                **QUIET,
            ).then(None, js=OPENED)
        everywhere = [part for parts in views.values() for part in parts]
        live_panel.get_load_event()(
            functools.partial(self._repaint, "", offers=True),
            inputs_kwargs=window,
            outputs=[*side, *everywhere, self.source],
            js=OPENING,
            **QUIET,
        ).then(None, js=OPENED)
        self.search.input(
            self._search, inputs_kwargs={"text": self.search}, outputs=[self.match_style, self.nothing], **QUIET
        )
        self.everything.input(self._paint_side, inputs_kwargs=window, outputs=side, **QUIET)
        self.drop.upload(
            self._add_uploads,
            inputs_kwargs={"files": self.drop, "name": self.set_name, **window},
            outputs=[self.drop, self.taken, *side, *rows],
            **SLOW,
        )
        self.add.click(
            self._add_folder,
            inputs_kwargs={"folder": self.folder, **window},
            outputs=[self.taken, *side, *rows],
            **QUEUED,
        )
        self.load.click(
            self._load,
            inputs_kwargs={"source": self.source, **window},
            outputs=[*side, *everywhere],
            js=OPENING,
            **QUEUED,
        ).then(None, js=OPENED)
        self.foreign.upload(
            self._import,
            inputs_kwargs={"files": self.foreign, **window},
            outputs=[self.foreign, self.imported, *side, *everywhere],
            js=OPENING,
            **SLOW,
        ).then(None, js=OPENED)
        self.save.click(
            self._save, inputs_kwargs={"name": self.preset_name}, outputs=[self.parts["all"]["preset"]], **QUEUED
        )
        once = QUIET | {"trigger_mode": "once"}  # restoring twice would undo itself
        for button, what in ((self.reset, self._reset), (self.back, self._bring_back)):
            button.click(what, inputs_kwargs=window, outputs=[*side, *everywhere], js=OPENING, **once).then(
                None, js=OPENED
            )
        self.start.click(
            self._start,
            inputs_kwargs=typed,
            outputs=[self.address, *side],
            js=script % "window.touchedSettings()",
            **SLOW,
        )
        self.address.change(None, [self.address], None, js="address => { if (address) location.assign(address); }")
        gr.Timer(SECONDS).tick(self._tick, inputs_kwargs={"seen": self.seen, **window}, outputs=side, **QUIET)

    # ------------------------------------------------------------------------------------------------------- events

    def _change(self, view: str, key: str, repaint: bool, held: Any, everything: bool) -> dict[Any, Any]:
        """Handle a changed field: write its setting to the draft; repaint the view if other fields depend on it."""
        value = form.from_component(form.settings()[key], held)
        if address := key in ("model.path", "model.components") and base_models.read_address(value):
            value = address

        def put() -> None:
            before = self.draft.text()
            after = self.draft.put(key, value)
            if key == "model.family":
                self._drop_old_base(before, after)
            elif key == "model.path":
                self._recognize_base()

        done = self._change_draft(put)
        return self._paint_side(everything) | (self._paint(view, done, but="" if address else key) if repaint else {})

    def _drop_old_base(self, before: str, after: str) -> None:
        """Clear a base model that was chosen from the previous architecture's list."""
        path = form.read_values(before, self.draft.home)["model.path"]
        old, new = (form.read_values(text, self.draft.home)["model.family"] for text in (before, after))
        if old != new and path in base_models.list_usual_bases(old):
            self.draft.put("model.path", "")
            self._set_preset(base_models.list_demo_presets(), "")

    def _recognize_base(self) -> None:
        """Set the architecture that the base model's files show, and the preset of a demo base."""
        values = form.read_values(self.draft.text(), self.draft.home)
        path, family = str(values["model.path"] or ""), str(values["model.family"])
        described = self._describe_base(values)
        known = base_models.Base(described.family) if described else self._inspect_base(path)
        if not base_models.fits_family(known, family):
            self.draft.put("model.family", known.family)
            gr.Info(self.ui.say("new.base.is_other", title=self.families[known.family]))
        demo = f"demo_{family}" if path == "demo" else ""
        self._set_preset(base_models.list_demo_presets(), demo if demo in base_models.list_demo_presets() else "")

    def _inspect_base(self, path: str) -> base_models.Base:
        """Inspect a base model of the draft. Returns an empty `Base` for a path that the page may not read."""
        if not path or path == "demo" or base_models.is_remote(path):
            return base_models.Base()
        try:
            return base_models.inspect_base(self.ui.path(self._resolve_local(path)))
        except UserError:
            return base_models.Base()

    def _describe_base(self, values: dict[str, Any]) -> sources.BaseDescription | None:
        """Return what the hub answers about the draft's base model; None for a local one, and while it is asked."""
        path, revision, family = (str(values[f"model.{name}"] or "") for name in ("path", "revision", "family"))
        if not base_models.is_remote(path):
            return None
        return self.descriptions.get(path, revision, family if family in self.families else "")

    def _choose_demo(self, family: str, everything: bool) -> dict[Any, Any]:
        def choose() -> None:
            self.draft.put("model.family", family)
            self.draft.put("model.path", "demo")
            self._recognize_base()

        done = self._change_draft(choose)
        return self._paint_side(everything) | self._paint("simple", done)

    def _choose_preset(self, names: tuple[str, ...], name: str, everything: bool) -> dict[Any, Any]:
        """Handle a chosen goal or GPU size: replace the preset of this kind in the draft."""
        done = self._change_draft(lambda: self._set_preset(names, name))
        return self._paint_side(everything) | self._paint("simple", done)

    def _set_preset(self, among: tuple[str, ...], name: str) -> None:
        """Name this preset instead of the others `among` its kind. Demo presets come last: the last one wins."""
        given = form.read_values(self.draft.text(), self.draft.home)["preset"]
        kept = [preset for preset in given if preset not in among] if isinstance(given, list) else []
        kept += [name] if name else []
        last = [preset for preset in kept if preset in base_models.list_demo_presets()]
        self.draft.put("preset", [preset for preset in kept if preset not in last] + last)

    def _write_text(self, text: str, everything: bool) -> dict[Any, Any]:
        """Handle input in the TOML view."""
        self.draft.write(text or "")
        return self._paint_side(everything)

    def _repaint(self, view: str, everything: bool, offers: bool = False) -> dict[Any, Any]:
        """Return values for all fields of a view ("" is every view) and the summary; with `offers` also the configs."""
        painted = self._paint_side(everything)
        for painted_view in (view,) if view else ("simple", "all", "toml"):
            painted |= self._paint(painted_view)
        if offers:
            painted[self.source] = gr.update(choices=self._list_sources())
        return painted

    def _add_uploads(self, files: list[str] | None, name: str, everything: bool) -> dict[Any, Any]:
        """Handle dropped files: add them to a folder of the page and that folder to the draft."""
        lines: list[str] = []

        def take() -> None:
            folder = self.ui.place.home / "datasets" / sanitize.check_name(name or "")
            count, refused = image_folders.add_uploads(files or [], folder)
            lines.append(self.ui.say("new.pictures.taken", count=count, folder=folder.name))
            if refused:
                reasons = "; ".join(map(self.ui.translate, refused[:8])) + (" …" if len(refused) > 8 else "")
                lines.append(self.ui.say("new.pictures.refused", lines=reasons))
            if image_folders.count_files(folder).files:
                self._put_folder(folder)

        guarded = self._warn_on_error(take)
        taken = "".join(f"<p class='note'>{sanitize.escape(line)}</p>" for line in lines)
        painted = {self.drop: None, self.taken: taken} | guarded
        return painted | self._paint_side(everything) | self._paint_folders()

    def _paint_folders(self) -> dict[Any, Any]:
        """Return values for the table and the menu of folders in the simple view."""
        painted = self._paint("simple")
        return {
            part: painted[part] for part in (self.parts["simple"]["dataset.folders"], self.folder) if part in painted
        }

    def _add_folder(self, folder: str, everything: bool) -> dict[Any, Any]:
        def add() -> None:
            path = self.ui.path(folder or "")
            sanitize.require_folder(path, folder)
            self._put_folder(path)

        return {self.taken: ""} | self._warn_on_error(add) | self._paint_side(everything) | self._paint_folders()

    def _put_folder(self, folder: Path) -> None:
        given = form.read_values(self.draft.text(), self.draft.home)["dataset.folders"]
        rows = [row for row in given if isinstance(row, dict)] if isinstance(given, list) else []
        if str(folder) not in (row.get("path") for row in rows):
            self.draft.put("dataset.folders", [*rows, {"path": str(folder)}])

    def _load(self, source: str, everything: bool) -> dict[Any, Any]:
        def load() -> None:
            path = self.ui.path(source or "")
            path = path / "config.toml" if path.is_dir() else path
            text = importer.decoded(path)
            form.read_values(text, self.draft.home)  # raises if it is not TOML
            self.draft.replace(text)

        return self._warn_on_error(load) | self._repaint("", everything)

    def _import(self, files: list[str] | None, everything: bool) -> dict[Any, Any]:
        painted = {self.imported: "", self.foreign: None}

        def take() -> None:
            text, painted[self.imported] = importer.import_files(self.ui, map(Path, files or []))
            self.draft.replace(text)

        return self._warn_on_error(take) | painted | self._repaint("", everything)

    def _save(self, name: str) -> dict[Any, Any]:
        def save() -> None:
            stem = sanitize.check_name(name or "")
            path = base_models.save_preset(self.draft.home, stem, self.draft.text())
            gr.Info(self.ui.say("new.files.preset_saved", name=path.stem))

        self._warn_on_error(save)
        return {self.parts["all"]["preset"]: gr.update(choices=self._list_presets())}

    def _reset(self, everything: bool) -> dict[Any, Any]:
        self.draft.replace(form.START)
        return self._repaint("", everything)

    def _bring_back(self, everything: bool) -> dict[Any, Any]:
        self.draft.restore_earlier()
        return self._repaint("", everything)

    def _start(self, touched: str, everything: bool, **held: Any) -> dict[Any, Any]:
        """Submit the draft to the queue and go to the page of the new run."""
        address: dict[Any, Any] = {}

        def start() -> None:
            self._apply_touched(touched, held)
            text = self.draft.text()
            if not self._find_problems(text):
                id = submission.submit_training(self.ui.place, text)
                address[self.address] = self.ui.link("run", run=str(id))
                gr.Info(self.ui.say("new.start.queued", id=id))

        return self._warn_on_error(start) | address | self._paint_side(everything)

    def _switch_view(self, view: str, touched: str, everything: bool, **held: Any) -> dict[Any, Any]:
        """Handle a change of the view."""
        return self._warn_on_error(lambda: self._apply_touched(touched, held)) | self._repaint(view, everything)

    def _apply_touched(self, touched: str, held: dict[str, Any]) -> None:
        """Write fields into the draft that were changed and have not been sent yet.

        Args:
            touched: ids of the fields that were changed in this window.
            held: the value of each field by its id.
        """
        for id in (touched or "").split():
            if id == self.code.elem_id:
                self.draft.write(held[id] or "")
            elif id in held:
                key = self.keys[id]
                self.draft.put(key, form.from_component(form.settings()[key], held[id]))

    def _tick(self, seen: str, everything: bool) -> dict[Any, Any]:
        """Repaint the summary if it differs from what the window shows, since answers may arrive in another order."""
        self.draft.save()
        painted = self._paint_side(everything)
        return {self.seen: gr.skip()} if painted[self.seen] == seen else painted

    def _search(self, text: str) -> tuple[str, str]:
        """Return a style that hides settings without a match, and a message if nothing matches."""
        wanted = _normalize(text)
        if not wanted:
            return "", ""
        hidden = [key for key, setting in form.settings().items() if wanted not in self._get_search_text(key, setting)]
        matching = {setting.section for key, setting in form.settings().items() if key not in hidden}
        ids = [f"#{_make_id('set', key)}" for key in hidden]
        ids += [f"#{_make_id('section', section)}" for section in form.sections() if section not in matching]
        nothing = (
            "" if matching else f"<p role='status'>{sanitize.escape(self.ui.say('new.search.nothing', text=text))}</p>"
        )
        return f"<style>{', '.join(ids)} {{ display: none !important; }}</style>" if ids else "", nothing

    def _get_search_text(self, key: str, setting: form.Setting) -> str:
        texts = translations.load_setting_texts().get(key, {})
        names = [texts.get("en", ""), texts.get("zh-CN", ""), texts.get("help", "")]
        return _normalize(" ".join([key, setting.description, *names, *setting.also.values()]))

    def _warn_on_error(self, action: Callable[[], None]) -> dict[Any, Any]:
        """Run an action, and show its UserError as a warning."""
        try:
            action()
        except UserError as error:
            gr.Warning(sanitize.escape(self.ui.translate(str(error))))
        return {}

    def _change_draft(self, action: Callable[[], None]) -> tuple[str, str]:
        """Run an action with the draft locked. Returns the text before and after it."""
        with self.draft.lock():
            before = self.draft.text()
            self._warn_on_error(action)
            return before, self.draft.text()

    # ------------------------------------------------------------------------------------------------------- telling

    def _paint(self, view: str, done: tuple[str, str] | None = None, but: str = "") -> dict[Any, Any]:
        """Return values for the fields of a view, or nothing if the text is not TOML.

        Args:
            done: the draft before and after a change. Fields whose value is the same in both are left alone, as
                somebody
                may be typing there.
            but: a setting whose field is left alone.
        """
        before, text = done or (None, self.draft.text())
        if view == "toml":
            return {self.code: text}
        try:
            values = form.read_values(text, self.draft.home)
        except UserError:
            return {}
        try:
            old = {} if before is None else form.read_values(before, self.draft.home)
        except UserError:
            old = {}
        painted: dict[Any, Any] = {}
        for key, part in self.parts[view].items():
            kept = key not in LISTED and key in old and form.is_same_value(old[key], values[key])
            if key != but and not kept:
                painted[part] = self._paint_setting(view, key, part, values)
        if view == "simple":
            named = values["preset"] if isinstance(values["preset"], list) else []
            painted[self.goal] = self._offer_goals(str(values["model.family"]), named)
            painted[self.card] = next((name for name in named if name in base_models.list_vram_presets()), "")
            painted[self.folder] = gr.update(
                choices=[str(path) for path in image_folders.find_folders(self.ui.place.roots)]
            )
            painted[self.base_note] = self._render_base_note(values)
        return painted

    def _offer_goals(self, family: str, named: list[Any]) -> Any:
        """Return the goals that this family can be trained for, and the one among these presets."""
        chosen = next((name for name in named if name in GOALS), "")
        known = recipes.find_goals(family) if family in self.families else GOALS
        offered = [name for name in GOALS if name in (*known, chosen)]
        say = self.ui.say
        choices = [*((say(f"new.goal.{name}"), name) for name in offered), (say("new.goal.none"), "")]
        return gr.update(choices=choices, value=chosen)

    def _explain(self, key: str, origin: str, values: dict[str, Any]) -> str:
        """Return why a recipe's preset gives a setting its value, as HTML; "" for other presets."""
        family = str(values["model.family"])
        settings = recipes.preset(
            origin, family if family in self.families else "", draws=bool(values["preview.prompts"])
        )
        why = next((value.why for value in settings or [] if value.key == key), "")
        return f"<br><small>{sanitize.escape(self.ui.translate(why))}</small>" if why else ""

    def _paint_setting(self, view: str, key: str, part: Any, values: dict[str, Any]) -> Any:
        setting, value = form.settings()[key], values[key]
        held = form.to_component(setting, value)
        if key == "preset":
            names = [str(name) for name in value] if isinstance(value, list) else []
            return gr.update(choices=self._list_presets(names), value=names)
        if key == "model.path" and view == "simple":
            usual = [
                (self._label_base(name), name) for name in base_models.list_usual_bases(str(values["model.family"]))
            ]
            return _offer([*usual, *base_models.find_base_models(self.ui.place.models, self.ui.place.roots)], held)
        if key == "model.components" and view == "simple":
            if not held and not self._inspect_base(str(values["model.path"] or "")).single:
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
            known = list(self.families) if key == "model.family" else list(setting.choices)
            strange = [word for word in (held if isinstance(held, list) else [held]) if word and word not in known]
            titles = self.families if key == "model.family" else {}
            labels = [
                (titles.get(w) or translations.get_choice_label(self.ui.language, key, w), w)
                for w in [*known, *strange]
            ]
            return gr.update(choices=labels, value=held or None)
        return gr.update(value=held)

    def _paint_side(self, everything: bool = False) -> dict[Any, Any]:
        """Return values for the summary, the problems beside the settings, and the list of changed settings."""
        text = self.draft.text()
        findings = self._find_problems(text)
        summary, marks, changes = (
            self._render_summary(findings),
            self._style_settings(text, findings, everything),
            self._render_changes(text),
        )
        replaced = self.draft.has_earlier()
        return {
            self.summary: summary,
            self.marks: marks,
            self.changes: changes,
            self.back: gr.update(visible=replaced),
            self.seen: hashlib.sha256(repr((summary, marks, changes, replaced)).encode()).hexdigest(),
        }

    def _find_problems(self, text: str) -> list[tuple[str, str]]:
        """Return (setting, message in the page's language) for everything that prevents a start."""
        home = self.draft.home
        try:
            submission.check_presets(self.ui.place, text)
        except UserErrors as error:
            return [("preset", self.ui.translate(line)) for line in error.problems]
        problems = [(problem.key, self._translate_problem(problem)) for problem in form.find_problems(text, home)]
        try:
            values = form.read_values(text, home)
        except UserError:
            return problems
        reported = {key for key, _ in problems}
        for key, path in base_models.list_paths(values):
            if key in reported:
                continue
            try:
                self._check_path(key, path)
            except UserError as error:
                problems.append((key, self.ui.translate(str(error))))
        problems += [
            (key, line) for key, line in self._find_base_problems(values) if key not in {key for key, _ in problems}
        ]
        if "dataset.folders" not in {key for key, _ in problems}:
            counts = self._count_folders(values)
            for folder, contents, *_ in counts:
                if not contents.files:
                    problems.append(("dataset.folders", self.ui.say("new.pictures.none", folder=folder.name)))
            if not reported & {"model.family", "dataset.frames", "dataset.fps", "dataset.clip"}:
                problems += self._find_clip_problems(values, counts)
            without = sum(contents.without_caption for _, contents, *_ in counts)
            if without and values["dataset.missing_caption"] == "error":
                problems.append(("dataset.missing_caption", self.ui.say("new.pictures.uncaptioned", count=without)))
        return problems

    def _find_base_problems(self, values: dict[str, Any]) -> Iterable[tuple[str, str]]:
        """Yield (setting, message) for base models that the engine will refuse."""
        say, family = self.ui.say, str(values["model.family"])
        path, components = str(values["model.path"] or ""), str(values["model.components"] or "")
        for key, location in (("model.path", path), ("model.components", components)):
            known, name = self._inspect_base(location), sanitize.shorten(Path(location).name)
            if known.wrong:
                yield key, say("new.base.strange", file=name, what=self.ui.translate(known.wrong))
            elif family in self.families and not base_models.fits_family(known, family):
                file_says, form_says = self.families[known.family], self.families[family]
                yield key, say("new.base.differs", file=name, found=file_says, title=form_says)
        described = self._describe_base(values)
        if described and not described.unanswered:
            yield from (("model.path", self.ui.translate(line)) for line in described.problems)
        if path == "demo" and family in self.families and family not in base_models.list_demo_families():
            line = Message(
                "there is no demo base for {family}; bundled are: {names}",
                family=repr(family),
                names=", ".join(base_models.list_demo_families()),
            )
            yield "model.path", self.ui.translate(line)
        if not components and self._inspect_base(path).single:
            yield "model.components", self.ui.say("new.base.components")

    def _find_clip_problems(
        self, values: dict[str, Any], counts: list[tuple[Path, image_folders.Count, int, str]]
    ) -> Iterable[tuple[str, str]]:
        """Yield (setting, message) for videos that the engine will refuse."""
        say, family = self.ui.say, str(values["model.family"])
        for folder, contents, _, mask in counts:
            numbers = {"folder": folder.name, "count": contents.videos}
            if contents.videos and not families.traits(family)["clips"]:
                yield "dataset.folders", say("new.clips.refused", title=self.families[family], **numbers)
            elif contents.videos and not clips.can_read_videos():
                yield "dataset.folders", f"{folder.name}: {self.ui.translate(clips.NEEDED)}"
            elif contents.videos and not values["dataset.frames"]:
                yield "dataset.frames", say("new.clips.unset", **numbers)
            elif examined := self._examine(values, folder, mask):
                short = examined.list_files("clip_short")
                damaged = {
                    name: why
                    for name, why in examined.list_files("unreadable").items()
                    if dataset_folder.is_video(name)
                }
                for key, files in (("dataset.frames", short), ("dataset.folders", damaged)):
                    lines = [f"{name} ({self.ui.translate(why)})" for name, why in list(files.items())[:4]]
                    if lines:
                        what = say(f"dataset.kind.{'clip_short' if files is short else 'unreadable'}")
                        yield key, f"{folder.name}: {what}: {', '.join(lines)}{' …' if len(files) > 4 else ''}"

    def _examine(self, values: dict[str, Any], folder: Path, mask: str) -> dataset_folder.Examination | None:
        """Examine a folder in a process of its own if videos in it may be cut into clips; return None otherwise."""
        cut = dataset_folder.list_clip_settings(
            str(values["model.family"]), *(values[f"dataset.{name}"] for name in dataset_folder.CUT)
        )
        if not cut:
            return None
        family, side = str(values["model.family"]), values["dataset.resolution"]
        side = side if isinstance(side, int) else families.get(family).native_resolution
        now = image_folders.count_files(folder, mask)
        again = self.counted.get((folder, mask), now) != now  # files were added or removed since
        self.counted[folder, mask] = now
        return dataset_folder.examine(self.ui.place, folder, family, side, cut, again, mask if "*" in mask else "")

    def _translate_problem(self, problem: form.Problem) -> str:
        """Translate a problem without its setting's key, since it is shown at that setting."""
        line = problem.line
        if isinstance(line, Message) and line.template == "{key}: {line}":
            line = line.values["line"]
        else:
            line = line.removeprefix(f"{problem.key}: ")
        if line in NEXT_STEPS:
            return self.ui.say(NEXT_STEPS[line])
        return self.ui.translate(line)

    def _label_problem(self, key: str, line: str) -> str:
        """Put the setting's name before a problem, for a list of several."""
        label = translations.get_label(
            self.ui.language, f"section.{key}" if form.settings()[key].kind == "table" else key
        )
        return f"{label} ({key}): {line}" if self.ui.language == "en" else f"{label}（{key}）：{line}"

    def _resolve_local(self, path: str) -> Path:
        """Resolve a path of the draft. Relative paths start at the page's home, as in the job."""
        return self.ui.place.home / os.path.expanduser(path)

    def _check_path(self, key: str, path: str) -> None:
        """Raise UserError if the page may not use the path, or it is missing, or is not a file or folder as needed."""
        if (
            key == "dataset.cache_dir"
            and not (os.path.isabs(path) or path.startswith("~"))
            and ".." not in Path(path).parts
        ):
            return  # below the page's home
        full = self.ui.path(self._resolve_local(path))
        if key in ("output_dir", "dataset.cache_dir"):
            return  # created if missing
        kind = KINDS.get(key, "folder")
        if not full.exists():
            if kind == "folder":
                sanitize.require_folder(full, path)
            if kind == "file":
                raise UserError(Message("{text}: there is no such file", text=sanitize.shorten(path)))
            raise UserError(Message("{text}: there is no such file or folder", text=sanitize.shorten(path)))
        if kind == "folder" and not full.is_dir():
            raise UserError(Message("{text}: this is a file; give a folder", text=sanitize.shorten(path)))
        if kind == "file" and not full.is_file():
            raise UserError(Message("{text}: this is a folder; give a file", text=sanitize.shorten(path)))

    def _count_folders(self, values: dict[str, Any]) -> list[tuple[Path, image_folders.Count, int, str]]:
        """Return (folder, its contents, its repeats, where its masks are) for every folder of the draft."""
        rows = values["dataset.folders"] if isinstance(values["dataset.folders"], list) else []
        counts = []
        for row in rows:
            path = row.get("path") if isinstance(row, dict) else None
            repeats = row.get("repeats", 1) if isinstance(row, dict) else 1
            if isinstance(path, str) and path and isinstance(repeats, int):
                try:
                    folder = self.ui.path(self._resolve_local(path))
                except UserError:
                    continue  # reported by the check of paths
                if folder.is_dir():
                    mask = row["mask"] if isinstance(row.get("mask"), str) else ""
                    counts.append((folder, image_folders.count_files(folder, mask), repeats, mask))
        return counts

    def _render_summary(self, findings: list[tuple[str, str]] | None = None) -> str:
        say, escape = self.ui.say, sanitize.escape
        text = self.draft.text()
        findings = self._find_problems(text) if findings is None else findings
        parts = []
        if findings:
            lines = [self._label_problem(key, line) if key else line for key, line in findings]
            items = "".join(f"<li>{escape(line)}</li>" for line in lines)
            parts.append(f"<p><strong>{escape(say('new.summary.open'))}</strong></p><ul class='problems'>{items}</ul>")
        else:
            parts.append(f"<p><strong class='ready'>{escape(say('new.summary.ready'))}</strong></p>")
        try:
            values = form.read_values(text, self.draft.home)
        except UserError:
            return parts[0]
        counts = self._count_folders(values)
        for folder, contents, *_ in counts:
            amounts = {"folder": folder.name, "count": contents.pictures, "without": contents.without_caption}
            line = (
                say("new.clips.count", videos=contents.videos, **amounts)
                if contents.videos
                else say("new.pictures.count", **amounts)
            )
            parts.append(f"<p>{escape(line)}</p>")
            if contents.masks:
                line = say("new.pictures.masks", folder=folder.name, mask=contents.mask, count=contents.masks)
                parts.append(f"<p class='wrong'>{escape(line)}</p>")
        skipping = values["dataset.missing_caption"] == "skip"
        examined = [] if findings else [self._examine(values, folder, mask) for folder, *_, mask in counts]
        samples = files = 0
        for (folder, contents, times, _), examination in zip(counts, examined or [None] * len(counts), strict=True):
            if examination is None:
                number = contents.files - (contents.without_caption if skipping else 0)
            elif examination.report is not None:
                number = estimate_panel.count_examples(examination.report, skipping)
                if made := examination.report["counts"]["clips"]:
                    line = say("new.clips.cut", folder=folder.name, clips=made, examples=number)
                    parts.append(f"<p>{escape(line)}</p>")
            else:
                number = 0
                if examination.problem:
                    parts.append(f"<p class='wrong'>{escape(self.ui.translate(examination.problem))}</p>")
            samples, files = samples + times * number, files + number
        held = values["validation.pictures"]
        if isinstance(held, int) and 0 < held < files:
            samples -= round(samples * held / files)  # the seed decides which ones
        waiting = [examination for examination in examined if examination is not None and examination.running]
        reckoned = estimate_panel.count_epochs(samples, values)
        if waiting:
            line = say("dataset.examining", done=waiting[0].done, total=waiting[0].total)
            parts.append(f"<p>{escape(line)}</p>")
        elif reckoned is None:
            parts += [] if samples else [f"<p>{escape(say('new.summary.none'))}</p>"]
        else:
            line = say(
                "new.summary.epochs",
                samples=reckoned.samples,
                per_step=reckoned.per_step,
                steps=run_cards.digits(reckoned.steps),
                total=values["train.steps"],
                epochs=run_cards.digits(reckoned.epochs),
            )
            parts.append(f"<p>{escape(line)}</p>")
        if not findings:
            known = self.estimates.get(text)
            parts += [f"<p>{escape(line)}</p>" for line in (self._estimate_time(values), *self._render_memory(known))]
            if isinstance(known, dict):
                problems, warnings = estimate_panel.check_disk_space(known)
                parts += [f"<p class='wrong'>{escape(self.ui.translate(line))}</p>" for line in problems]
                parts += [f"<p>{escape(self.ui.translate(line))}</p>" for line in [*known["notes"], *warnings]]
        return "".join(parts)

    def _estimate_time(self, values: dict[str, Any]) -> str:
        say = self.ui.say
        folders = [self.ui.place.home / "runs", *self.ui.place.roots]
        known = estimate_panel.find_pace(dict.fromkeys(folders), str(values["model.family"]))
        if known is None:
            return say("new.summary.no_time")
        seconds, run = known
        minutes = seconds * values["train.steps"] / 60
        name, count = ("new.time.minutes", minutes) if minutes < 90 else ("new.time.hours", minutes / 60)
        return say(
            "new.summary.time",
            time=say(name, count=run_cards.digits(max(count, 1))),
            seconds=run_cards.digits(seconds),
            run=run,
        )

    def _render_memory(self, known: dict[str, Any] | str | None) -> list[str]:
        """Format the estimate: memory, cache and file sizes."""
        say = self.ui.say
        if known is None:
            return [say("new.summary.estimating")]
        if isinstance(known, str):
            return [say("new.summary.no_estimate", why=self.ui.translate(known))] if known else []

        def size(num: int | None) -> str:
            if num is None:
                return say("new.summary.unknown")
            return f"{num / 2**30:.2f} GiB" if num >= 2**28 else f"{num / 2**20:.1f} MiB"

        lines = [
            say(
                "new.summary.memory",
                peak=size(known["peak_bytes"]),
                base=size(known["base_bytes"]),
                adapter=size(known["adapter_bytes"]),
                optimizer=size(known["optimizer_bytes"]),
                step=size(known["step_bytes"]),
            ),
            say("new.summary.memory_cpu", process=size(known["process_bytes"]))
            if known["process_bytes"]
            else say("new.summary.memory_gpu"),
        ]
        files = ", ".join(f"{layout} {size(num)}" for layout, num in known["file_bytes"].items())
        return [*lines, say("new.summary.files", file=files, cache=size(known["cache_bytes"]))]

    def _style_settings(self, text: str, findings: list[tuple[str, str]], everything: bool) -> str:
        """Return a style that hides settings without effect and shows each problem under its setting."""
        rules: list[str] = []
        try:
            values = form.read_values(text, self.draft.home)
            set_here = form.find_origins(text, self.draft.home)
        except UserError:
            return ""
        wrong: dict[str, list[str]] = {}
        for key, line in findings:
            wrong.setdefault(key, []).append(line)
        for view in ("new", "set"):
            rules += self._style_table(_share_columns(values, everything, view), view)
        if not everything:
            hidden = [
                key
                for key in form.find_unused(values)
                # A setting with a value stays visible: training will warn that it has no effect.
                if key not in wrong
                and set_here.get(key) != ""
                and form.is_same_value(values[key], form.settings()[key].default)
            ]
            if hidden:
                rules.append(f"{_select_ids('set', hidden)} {{ display: none; }}")
        if unasked := [key for key in form.find_unused(values) if key in SIMPLE and key not in wrong]:
            row = ", #new-clips" if set(CLIPS) <= set(unasked) else ""  # hides its frame too
            rules.append(f"{_select_ids('new', unasked)}{row} {{ display: none; }}")
        for key, lines in wrong.items():
            if key:
                ids = f"#{_make_id('set', key)}::after, #{_make_id('new', key)}::after"
                rules.append(f"{ids} {{ content: {_quote_css(chr(10).join(lines))}; }}")
        return f"<style>{' '.join(rules)}</style>" if rules else ""

    def _style_table(self, shares: dict[str, float], view: str) -> Iterable[str]:
        """Yield style rules for the table of folders in a view: its columns, or blocks if it is too narrow."""
        yield from _style_columns(shares, view)
        table, cells = f"#{_make_id(view, 'dataset.folders')}", []
        for number, column in enumerate(form.settings()["dataset.folders"].columns, 1):
            cell = f'{table} .body-cell[aria-colindex="{number}"]'
            cells.append(
                f"{cell}::before {{ content: {_quote_css(translations.get_label(self.ui.language, column.key))}; }}"
            )
            if WIDE.get(column.name, 1) >= PATH:
                cells.append(f"{cell} {{ flex-basis: 100% !important; }}")
        empty = f'{table} .body-cell[aria-colindex="1"] [data-editable]:empty::before'
        yield f"{empty} {{ content: {_quote_css(self.ui.say('new.pictures.row'))}; }}"
        width = round(UNIT * sum(shares.values())) - 1
        yield STACKED.format(table=table, width=width, cells=" ".join(cells))

    def _render_changes(self, text: str) -> str:
        say = self.ui.say
        try:
            values, origins = form.read_values(text, self.draft.home), form.find_origins(text, self.draft.home)
        except UserError as error:
            return f"<p class='wrong'>{sanitize.escape(self.ui.translate(str(error)))}</p>"
        rows = []
        for key, setting in form.settings().items():
            if key in origins and key != "preset" and not form.is_same_value(values[key], setting.default):
                label = translations.get_label(self.ui.language, f"section.{key}" if setting.kind == "table" else key)
                before, now = (_shorten(_display(setting, value)) for value in (setting.default, values[key]))
                origin = origins[key] and Path(origins[key]).stem or say("new.changes.own")
                cells = "".join(f"<td>{sanitize.escape(cell)}</td>" for cell in (before, now))
                cells += f"<td>{sanitize.escape(origin)}{self._explain(key, origins[key], values)}</td>"
                code = sanitize.escape(key).replace(".", ".<wbr>")
                rows.append(f"<tr><td>{sanitize.escape(label)}<br><code>{code}</code></td>{cells}</tr>")
        if not rows:
            return f"<p class='note'>{sanitize.escape(say('new.changes.none'))}</p>"
        heads = "".join(
            f"<th>{sanitize.escape(say(f'new.changes.{name}'))}</th>" for name in ("setting", "default", "now", "from")
        )
        return f"<table class='facts wide'><tr>{heads}</tr>{''.join(rows)}</table>"

    def _render_base_note(self, values: dict[str, Any]) -> str:
        say, path, family = self.ui.say, str(values["model.path"] or ""), str(values["model.family"])
        title = self.families.get(family, family)
        if not path:
            return ""
        if path == "demo" and family in base_models.list_demo_families():
            return sanitize.escape(say("new.base.demo_is", title=title))
        size = families.get(family).native_resolution if family in self.families else None
        lines, described = [], self._describe_base(values)
        if known := described.family if described else self._inspect_base(path).family:
            lines.append(say("new.base.is", title=self.families[known]))
        if base_models.is_remote(path):
            lines.append(self._note_base(described) if described else say("new.base.looking", path=path))
        if size:
            lines.append(say("new.base.size", pixels=size))
        return sanitize.escape(" ".join(lines))

    def _label_base(self, name: str) -> str:
        """Return what the list of bases says of a known one: its id, and what it is good for."""
        known = known_bases.get(name)
        return f"{name} · {self.ui.translate(known.purpose)}" if known else name

    def _note_base(self, described: sources.BaseDescription) -> str:
        """Say what a person should know of a base on a hub: what is to be downloaded, licence and gate."""
        lines = [*described.lines, *(described.problems if described.unanswered else ())]
        if not lines and not described.problems:
            return self.ui.say("new.base.complete")
        return " · ".join(map(self.ui.translate, lines))

    # ------------------------------------------------------------------------------------------------------- offers

    def _list_presets(self, named: list[str] | None = None) -> list[tuple[str, str]]:
        own = [(path.stem, str(path)) for path in base_models.list_own_presets(self.draft.home)]
        known = [*((name, name) for name in config.preset_names()), *own]
        return known + [(Path(name).stem, name) for name in named or [] if name not in {value for _, value in known}]

    def _list_sources(self) -> list[tuple[str, str]]:
        return [(label, str(path)) for label, path in base_models.find_configs(self.ui.place.roots)]


def _normalize(text: str) -> str:
    """Normalize text for the search, so that "network dim" finds network_dim."""
    return text.strip().lower().replace("_", " ")


def _select_ids(prefix: str, keys: Iterable[str]) -> str:
    """Return a CSS selector of the fields of these settings."""
    return ", ".join(f"#{_make_id(prefix, key)}" for key in sorted(keys))


def _make_id(prefix: str, key: str) -> str:
    return f"{prefix}-{key.replace('.', '-') or 'job'}"


def _share_columns(values: dict[str, Any], everything: bool, view: str) -> dict[str, float]:
    """Return the relative width of each visible column of the table of folders.

    A column is visible if a row sets it. Control images are also visible where the model is shown them. Regularization,
    weight, resolution and mask are always visible in the view of all settings ("set"), not in the simple one ("new").
    """
    rows = values["dataset.folders"] if isinstance(values["dataset.folders"], list) else []
    wanted = dict.fromkeys(("regularization", "weight", "resolution", "mask"), view == "set")
    wanted |= {"control": "dataset.control_resolution" not in form.find_unused(values)}
    return {
        column.name: WIDE.get(column.name, 1)
        for column in form.settings()["dataset.folders"].columns
        if everything
        or wanted.get(column.name, True)
        or any(isinstance(row, dict) and row.get(column.name, column.default) != column.default for row in rows)
    }


def _style_columns(shares: dict[str, float], view: str) -> Iterable[str]:
    """Yield a style rule for each column of the table of folders in a view."""
    for number, column in enumerate(form.settings()["dataset.folders"].columns, 1):
        share = f"--share: {100 * shares.get(column.name, 0) / sum(shares.values()):.1f}%"
        style = share if column.name in shares else "display: none !important"
        yield f'#{_make_id(view, "dataset.folders")} [aria-colindex="{number}"] {{ {style}; }}'


def _offer(choices: list[tuple[str, str]], held: Any, **given: Any) -> Any:
    """Update a dropdown whose value need not be among its choices."""
    strange = [(str(held), held)] if held and held not in {value for _, value in choices} else []
    return gr.update(choices=[*choices, *strange], value=held or None, **given)


def _display(setting: form.Setting, value: Any) -> Any:
    """Return a setting's value as its field shows it; of a table the first column."""
    rows = form.to_component(setting, value)
    return ", ".join(str(row[0]) for row in rows) if setting.kind == "table" and isinstance(rows, list) else rows


def _shorten(held: Any) -> str:
    text = json.dumps(held, ensure_ascii=False) if not isinstance(held, str) else held
    return sanitize.shorten(text, 80)


def _quote_css(text: str) -> str:
    """Quote text as a CSS string inside HTML. Nothing in it ends the string or the style sheet."""
    return (
        '"'
        + "".join(c if c.isalnum() or c in " .,:;-_=()" else f"\\{ord(c):x} " for c in sanitize.strip_unseen(text))
        + '"'
    )
