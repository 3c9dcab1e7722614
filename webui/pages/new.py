"""Page: new. One draft, three views of it: simple, all settings, TOML; beside them what it comes to, and Start."""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.context import Context

from lora_fp8 import config, families
from lora_fp8.config import UserError, UserErrors
from lora_fp8.data import clips

from .. import album, bases, form, importer, outlook, pictures, safe, shows, submit, words
from ..context import Ui
from ..draft import Draft

GOALS = ("character", "style", "concept", "object")
"""Presets that say what is learned."""
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
"""Settings of the simple view; what it asks beside them goes into `preset`."""
CLIPS = ("dataset.frames", "dataset.fps", "dataset.clip")
NEXT_STEPS = {"engine.base.empty": "new.base.missing", "engine.folders.none": "new.pictures.missing"}
"""What an untouched form lacks: the engine tells what to write into a file, the page what to do here."""
KINDS = {"model.path": "file or folder", "preview.controls": "file or folder", "adapter.init_from": "file"}
"""What these settings name; all others that name a path name a folder."""
SECONDS = 2.0
QUIET: dict[str, Any] = {
    "show_progress": "hidden",
    "queue": False,
    "concurrency_limit": None,
    "api_visibility": "private",
    "trigger_mode": "always_last",
}
TOLD = QUIET | {"queue": True}
"""Of what may have something to say: messages of gr.Info and gr.Warning reach the browser through the queue alone."""
SLOW = QUIET | {"queue": True, "show_progress": "minimal", "trigger_mode": "once"}
OPENING = "(...inputs) => { window.opening(); return inputs; }"
OPENED = "() => window.opened()"
"""Around what paints a whole view: what was typed before it came would be gone."""
CHOOSING = "(...inputs) => { window.choosing(); return inputs; }"
CHOSEN = "() => window.chosen()"
"""Around what may change other settings than its own."""
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
"""Settings whose parts offer what other settings allow."""
WIDE = {"path": 4, "repeats": 1.3, "trigger": 2, "regularization": 2.1, "resolution": 1.6, "weight": 1.1}
PATH = 3
WIDE |= {"control": PATH, "mask": PATH}
"""Columns of the table of folders that need more room than the others."""
UNIT = 62
"""Pixels of a column that needs no more, as its title's longest word has it."""
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
"""The table of folders where its columns have no room: each folder a block, each cell below its title."""


def build(ui: Ui) -> None:
    """Lay the page out."""
    _Page(ui).lay_out()


class _Page:
    def __init__(self, ui: Ui):
        self.ui = ui
        self.draft = Draft(ui.place.home)
        self.estimates = outlook.Estimates(ui.place.home)
        self.parts: dict[str, dict[str, Any]] = {"simple": {}, "all": {}}
        self.counted: dict[tuple[Path, str], pictures.Count] = {}
        self.keys: dict[str, str] = {}  # of the parts, by their ids
        self.families = {name: families.facts(name)["title"] for name in families.available()}

    # ------------------------------------------------------------------------------------------------------- layout

    def lay_out(self) -> None:
        say = self.ui.say
        gr.HTML(STYLE, elem_classes="style-only")
        self.marks, self.found = (gr.HTML(elem_classes="style-only") for _ in range(2))
        # What the window holds, and not what it was last sent: it says so itself.
        self.seen = gr.Textbox(visible="hidden", elem_id="new-seen")
        self.address = gr.Textbox(visible="hidden", elem_id="new-address")
        self.touched = gr.Textbox(visible="hidden", elem_id="new-touched")
        with gr.Row():
            with gr.Column(scale=5, min_width=320):
                with gr.Tabs(elem_id="new-views"):
                    with gr.Tab(say("new.view.simple"), id="simple") as simple:
                        self._simple()
                    with gr.Tab(say("new.view.all"), id="all") as every:
                        self._all()
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
                self._files()
                with gr.Accordion(say("new.changes"), open=False):
                    self.changes = gr.HTML()
        self._wire(simple, every, toml)

    def _simple(self) -> None:
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
                for name in bases.demos()
            }
        gr.Markdown(say("new.base.demo_help"), elem_classes="note")
        self._field("simple", "model.family")
        self._field("simple", "model.path")
        self._field("simple", "model.components")
        self.base_note = gr.HTML(elem_classes="note")
        gr.Markdown(f"## {say('new.pictures')}")
        with gr.Row():
            with gr.Column(min_width=260):
                kinds = [*pictures.TAKEN]
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
        self._field("simple", "dataset.folders")
        gr.Markdown(say("new.pictures.columns"), elem_classes="note")
        self.taken = gr.HTML(elem_id="new-taken")
        self._field("simple", "dataset.trigger")
        self._field("simple", "dataset.missing_caption")
        with gr.Row(elem_id="new-clips"):
            for key in CLIPS:
                self._field("simple", key)
        gr.Markdown(f"## {say('new.card')}")
        cards = [(say("new.card.gb", gb=bases.card(name)), name) for name in bases.cards()]
        self.card = gr.Radio(
            [*cards, (say("new.card.none"), "")],
            label=say("new.card"),
            show_label=False,
            container=False,
            elem_id="new-card",
        )
        gr.Markdown(f"## {say('new.length')}")
        for key in ("train.steps", "name", "preview.prompts"):
            self._field("simple", key)

    def _all(self) -> None:
        say = self.ui.say
        with gr.Row(equal_height=True):
            self.search = gr.Textbox(
                label=say("new.search"), info=say("new.search.info"), elem_id="new-search", scale=3
            )
            self.everything = gr.Checkbox(label=say("new.search.everything"), elem_id="new-everything", scale=1)
        for section in form.sections():
            key = f"section.{section}" if section else "section"
            title = words.label(self.ui.language, key)
            text = words.meaning(self.ui.language, key, form.sections()[section]).strip()
            with gr.Column(elem_id=_id("section", section), elem_classes="setting-group"):
                gr.Markdown(f"## {title}{f' `[{section}]`' if section else ''}\n{text}")
                members = [one for one in form.settings().values() if one.section == section]
                for one in (one for one in members if one.kind == "table"):
                    self._field("all", one.key)
                    gr.HTML(self._meanings(one))
                for one in (one for one in members if one.kind != "table"):
                    self._field("all", one.key)

    def _meanings(self, table: form.Setting) -> str:
        """What the columns of a table mean, folded up."""
        language = self.ui.language
        told = (
            (words.label(language, one.key), words.meaning(language, one.key, one.description)) for one in table.columns
        )
        rows = "".join(f"<tr><th>{safe.shown(title)}</th><td>{safe.shown(text)}</td></tr>" for title, text in told)
        summary = safe.shown(self.ui.say("new.pictures.meanings"))
        return f"<details><summary>{summary}</summary><table class='facts'>{rows}</table></details>"

    def _files(self) -> None:
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

    def _field(self, view: str, key: str) -> None:
        one = form.settings()[key]
        language = self.ui.language
        info = words.meaning(language, key, one.description)
        bounds = f" ({one.bounds})" if one.bounds else ""
        common: dict[str, Any] = {
            "label": words.label(language, key),
            "info": f"{info}{bounds} `{key}`" if view == "all" else info,
            "elem_id": _id("set" if view == "all" else "new", key),
            "elem_classes": ["setting"],
            "interactive": True,
        }
        choices = [(words.choice(language, key, word), word) for word in one.choices]
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
        elif one.kind == "flag":
            part = gr.Checkbox(**common)
        elif one.kind == "choice":
            part = gr.Dropdown(choices, value=None, **common)
        elif one.kind == "mixed":
            part = gr.Dropdown(choices, value=None, allow_custom_value=True, **common)
        elif one.kind == "choices":
            part = gr.Dropdown(choices, value=None, multiselect=True, **common)
        elif one.kind == "table":
            del common["info"]
            part = gr.Dataframe(
                headers=[words.label(language, column.key) for column in one.columns],
                datatype=["bool" if column.kind == "flag" else "str" for column in one.columns],
                type="array",
                column_count=len(one.columns),
                row_count=1,
                wrap=True,
                buttons=[],
                **(common | {"label": words.label(language, f"section.{key}")}),
            )
        else:
            lines = 3 if one.kind == "lines" or one.name == "description" else 1
            part = gr.Textbox(lines=lines, max_lines=12 if lines > 1 else 1, **common)
        self.parts[view][key] = part
        self.keys[part.elem_id] = key

    # ------------------------------------------------------------------------------------------------------- wiring

    def _wire(self, simple: gr.Tab, every: gr.Tab, toml: gr.Tab) -> None:
        told = [self.summary, self.marks, self.changes, self.seen, self.back]
        shown = {"everything": self.everything}
        rows = [self.parts["simple"]["dataset.folders"], self.folder]  # no more, for people type on meanwhile
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
                    inputs_kwargs={"held": part, **shown},
                    outputs=[*told, *(views[view] if repaint else [])],
                    js=CHOOSING if repaint else None,
                    **(TOLD if repaint else QUIET),
                )
                if repaint:
                    changed.then(None, js=CHOSEN)
        for part, names in ((self.goal, GOALS), (self.card, bases.cards())):
            part.input(
                functools.partial(self._choose, tuple(names)),
                inputs_kwargs={"name": part, **shown},
                outputs=[*told, *views["simple"]],
                js=CHOOSING,
                **TOLD,
            ).then(None, js=CHOSEN)
        for name, button in self.demos.items():
            button.click(
                functools.partial(self._demo, name),
                inputs_kwargs=shown,
                outputs=[*told, *views["simple"]],
                js=CHOOSING,
                **TOLD,
            ).then(None, js=CHOSEN)
        self.code.input(self._write, inputs_kwargs={"text": self.code, **shown}, outputs=told, **QUIET)
        held = {part.elem_id: part for parts in views.values() for part in parts if part.elem_id in self.keys}
        tables = [id for id, part in held.items() if isinstance(part, gr.Dataframe)]  # Gradio fails without their value
        typed = {"touched": self.touched, **shown, **held}
        # Of the others only what was touched is sent: a part may hold what is not among its choices, and Gradio refuses
        # that in words of its own.
        script = f"""(_, everything, ...values) => {{
            const ids = {json.dumps(list(held))}, touched = %s;
            const sent = [...touched, ...{json.dumps(tables)}];
            return [touched.join(" "), everything, ...values.map((v, i) => sent.includes(ids[i]) ? v : null)];
        }}"""
        for tab, view in ((simple, "simple"), (every, "all"), (toml, "toml")):
            tab.select(
                functools.partial(self._turn, view),
                inputs_kwargs=typed,
                outputs=[*told, *views[view]],
                js=script % "window.leftSettings()",
                **QUIET,
            ).then(None, js=OPENED)
        everywhere = [part for parts in views.values() for part in parts]
        Context.root_block.load(
            functools.partial(self._open, "", offers=True),
            inputs_kwargs=shown,
            outputs=[*told, *everywhere, self.source],
            js=OPENING,
            **QUIET,
        ).then(None, js=OPENED)
        self.search.input(self._search, inputs_kwargs={"text": self.search}, outputs=[self.found], **QUIET)
        self.everything.input(self._tell, inputs_kwargs=shown, outputs=told, **QUIET)
        self.drop.upload(
            self._take_in,
            inputs_kwargs={"files": self.drop, "name": self.set_name, **shown},
            outputs=[self.drop, self.taken, *told, *rows],
            **SLOW,
        )
        self.add.click(
            self._add_folder,
            inputs_kwargs={"folder": self.folder, **shown},
            outputs=[self.taken, *told, *rows],
            **TOLD,
        )
        self.load.click(
            self._load,
            inputs_kwargs={"source": self.source, **shown},
            outputs=[*told, *everywhere],
            js=OPENING,
            **TOLD,
        ).then(None, js=OPENED)
        self.foreign.upload(
            self._import,
            inputs_kwargs={"files": self.foreign, **shown},
            outputs=[self.foreign, self.imported, *told, *everywhere],
            js=OPENING,
            **SLOW,
        ).then(None, js=OPENED)
        self.save.click(
            self._save, inputs_kwargs={"name": self.preset_name}, outputs=[self.parts["all"]["preset"]], **TOLD
        )
        once = QUIET | {"trigger_mode": "once"}  # brought back twice is where it was
        for button, what in ((self.reset, self._reset), (self.back, self._bring_back)):
            button.click(what, inputs_kwargs=shown, outputs=[*told, *everywhere], js=OPENING, **once).then(
                None, js=OPENED
            )
        self.start.click(
            self._start,
            inputs_kwargs=typed,
            outputs=[self.address, *told],
            js=script % "window.touchedSettings()",
            **SLOW,
        )
        self.address.change(None, [self.address], None, js="address => { if (address) location.assign(address); }")
        gr.Timer(SECONDS).tick(self._tick, inputs_kwargs={"seen": self.seen, **shown}, outputs=told, **QUIET)

    # ------------------------------------------------------------------------------------------------------- events

    def _change(self, view: str, key: str, repaint: bool, held: Any, everything: bool) -> dict[Any, Any]:
        """A setting was changed in a view."""
        value = form.read(form.settings()[key], held)

        def put() -> None:
            before = self.draft.text()
            after = self.draft.put(key, value)
            if key == "model.family":
                self._settle_base(before, after)
            elif key == "model.path":
                self._recognise()

        done = self._done(put)
        return self._tell(everything) | (self._painted(view, done, but=key) if repaint else {})

    def _settle_base(self, before: str, after: str) -> None:
        """Another architecture: a base that was chosen from the old one's list is not one of the new one's."""
        path = form.values(before, self.draft.home)["model.path"]
        old, new = (form.values(text, self.draft.home)["model.family"] for text in (before, after))
        if old != new and path in bases.usual(old):
            self.draft.put("model.path", "")
            self._name_presets(bases.demo_presets(), "")

    def _recognise(self) -> None:
        """The base tells its architecture, and the demo bases bring their preset."""
        found = form.values(self.draft.text(), self.draft.home)
        path, family = str(found["model.path"] or ""), str(found["model.family"])
        known = self._look(path)
        if not bases.fits(known, family):
            self.draft.put("model.family", known.family)
            gr.Info(self.ui.say("new.base.is_other", title=self.families[known.family]))
        demo = f"demo_{family}" if path == "demo" else ""
        self._name_presets(bases.demo_presets(), demo if demo in bases.demo_presets() else "")

    def _look(self, path: str) -> bases.Base:
        """What a path of the draft is as a base model; nothing is known of one that the page may not read."""
        if not path or path == "demo" or bases.on_the_hub(path):
            return bases.Base()
        try:
            return bases.look(self.ui.path(self._local(path)))
        except UserError:
            return bases.Base()

    def _demo(self, family: str, everything: bool) -> dict[Any, Any]:
        def choose() -> None:
            self.draft.put("model.family", family)
            self.draft.put("model.path", "demo")
            self._recognise()

        done = self._done(choose)
        return self._tell(everything) | self._painted("simple", done)

    def _choose(self, names: tuple[str, ...], name: str, everything: bool) -> dict[Any, Any]:
        """A goal or a card: the one of these presets that is laid under the draft."""
        done = self._done(lambda: self._name_presets(names, name))
        return self._tell(everything) | self._painted("simple", done)

    def _name_presets(self, among: tuple[str, ...], name: str) -> None:
        """Name this preset instead of the others of its kind; demo presets come last, for they win."""
        given = form.values(self.draft.text(), self.draft.home)["preset"]
        kept = [one for one in given if one not in among] if isinstance(given, list) else []
        kept += [name] if name else []
        last = [one for one in kept if one in bases.demo_presets()]
        self.draft.put("preset", [one for one in kept if one not in last] + last)

    def _write(self, text: str, everything: bool) -> dict[Any, Any]:
        """The TOML view was typed in."""
        self.draft.write(text or "")
        return self._tell(everything)

    def _open(self, view: str, everything: bool, offers: bool = False) -> dict[Any, Any]:
        painted = self._tell(everything)
        for one in (view,) if view else ("simple", "all", "toml"):
            painted |= self._painted(one)
        if offers:
            painted[self.source] = gr.update(choices=self._sources())
        return painted

    def _take_in(self, files: list[str] | None, name: str, everything: bool) -> dict[Any, Any]:
        """Pictures were dropped."""
        lines: list[str] = []

        def take() -> None:
            folder = self.ui.place.home / "datasets" / safe.name(name or "")
            count, refused = pictures.take_in(files or [], folder)
            lines.append(self.ui.say("new.pictures.taken", count=count, folder=folder.name))
            if refused:
                told = "; ".join(self.ui.tell(line) for line in refused[:8]) + (" …" if len(refused) > 8 else "")
                lines.append(self.ui.say("new.pictures.refused", lines=told))
            if pictures.count(folder).files:
                self._put_folder(folder)

        guarded = self._guarded(take)
        taken = "".join(f"<p class='note'>{safe.shown(line)}</p>" for line in lines)
        told = {self.drop: None, self.taken: taken} | guarded
        return told | self._tell(everything) | self._rows()

    def _rows(self) -> dict[Any, Any]:
        """The folders of the simple view, after one more."""
        painted = self._painted("simple")
        return {
            part: painted[part] for part in (self.parts["simple"]["dataset.folders"], self.folder) if part in painted
        }

    def _add_folder(self, folder: str, everything: bool) -> dict[Any, Any]:
        def add() -> None:
            path = self.ui.path(folder or "")
            if not path.is_dir():
                raise UserError(f"{safe.shorter(folder)}: there is no such folder")
            self._put_folder(path)

        return {self.taken: ""} | self._guarded(add) | self._tell(everything) | self._rows()

    def _put_folder(self, folder: Path) -> None:
        given = form.values(self.draft.text(), self.draft.home)["dataset.folders"]
        rows = [row for row in given if isinstance(row, dict)] if isinstance(given, list) else []
        if str(folder) not in (row.get("path") for row in rows):
            self.draft.put("dataset.folders", [*rows, {"path": str(folder)}])

    def _load(self, source: str, everything: bool) -> dict[Any, Any]:
        def load() -> None:
            path = self.ui.path(source or "")
            path = path / "config.toml" if path.is_dir() else path
            text = importer.decoded(path)
            form.values(text, self.draft.home)  # TOML at all
            self.draft.replace(text)

        return self._guarded(load) | self._open("", everything)

    def _import(self, files: list[str] | None, everything: bool) -> dict[Any, Any]:
        told = {self.imported: "", self.foreign: None}

        def take() -> None:
            text, told[self.imported] = importer.account(self.ui, map(Path, files or []))
            self.draft.replace(text)

        return self._guarded(take) | told | self._open("", everything)

    def _save(self, name: str) -> dict[Any, Any]:
        def save() -> None:
            stem = safe.name(name or "")
            path = bases.save_preset(self.draft.home, stem, self.draft.text())
            gr.Info(self.ui.say("new.files.preset_saved", name=path.stem))

        self._guarded(save)
        return {self.parts["all"]["preset"]: gr.update(choices=self._presets())}

    def _reset(self, everything: bool) -> dict[Any, Any]:
        self.draft.replace(form.START)
        return self._open("", everything)

    def _bring_back(self, everything: bool) -> dict[Any, Any]:
        self.draft.bring_back()
        return self._open("", everything)

    def _start(self, touched: str, everything: bool, **held: Any) -> dict[Any, Any]:
        """Into the queue, as it stands now; the page goes on to the run."""
        address: dict[Any, Any] = {}

        def start() -> None:
            self._keep(touched, held)
            text = self.draft.text()
            if not self._findings(text):
                id = submit.train(self.ui.place, text)
                address[self.address] = self.ui.link("run", run=str(id))
                gr.Info(self.ui.say("new.start.queued", id=id))

        return self._guarded(start) | address | self._tell(everything)

    def _turn(self, view: str, touched: str, everything: bool, **held: Any) -> dict[Any, Any]:
        """To another view of the draft."""
        return self._guarded(lambda: self._keep(touched, held)) | self._open(view, everything)

    def _keep(self, touched: str, held: dict[str, Any]) -> None:
        """What was typed last may not have become part of the draft yet.

        Args:
            touched: ids of the parts that were changed in this window.
            held: what each part holds, by its id.
        """
        for id in (touched or "").split():
            if id == self.code.elem_id:
                self.draft.write(held[id] or "")
            elif id in held:
                key = self.keys[id]
                self.draft.put(key, form.read(form.settings()[key], held[id]))

    def _tick(self, seen: str, everything: bool) -> dict[Any, Any]:
        """Whatever is told otherwise than it was: time passes, and of two answers the older may come last."""
        told = self._tell(everything)
        return {self.seen: gr.skip()} if told[self.seen] == seen else told

    def _search(self, text: str) -> str:
        """Hide what a search does not find."""
        wanted = text.strip().lower()
        if not wanted:
            return ""
        hidden = [key for key, one in form.settings().items() if wanted not in self._searched(key, one)]
        found = {one.section for key, one in form.settings().items() if key not in hidden}
        ids = [f"#{_id('set', key)}" for key in hidden]
        ids += [f"#{_id('section', section)}" for section in form.sections() if section not in found]
        return f"<style>{', '.join(ids)} {{ display: none !important; }}</style>" if ids else ""

    def _searched(self, key: str, one: form.Setting) -> str:
        texts = words.named().get(key, {})
        return " ".join(
            [key, one.description, texts.get("en", ""), texts.get("zh-CN", ""), texts.get("help", "")]
        ).lower()

    def _guarded(self, action: Callable[[], None]) -> dict[Any, Any]:
        """Do it, or say in a message why it cannot be done."""
        try:
            action()
        except UserError as error:
            gr.Warning(safe.shown(self.ui.tell(str(error))))
        return {}

    def _done(self, action: Callable[[], None]) -> tuple[str, str]:
        """Do it as `_guarded`; the draft before and after, with nothing between that was typed meanwhile."""
        with self.draft.alone():
            before = self.draft.text()
            self._guarded(action)
            return before, self.draft.text()

    # ------------------------------------------------------------------------------------------------------- telling

    def _painted(self, view: str, done: tuple[str, str] | None = None, but: str = "") -> dict[Any, Any]:
        """What every part of a view holds now; nothing where the text is not TOML.

        Args:
            done: the draft before and after what was done; parts are left alone whose value that has not changed, for
                somebody may be typing there.
            but: a setting whose part is left alone.
        """
        before, text = done or (None, self.draft.text())
        if view == "toml":
            return {self.code: text}
        try:
            found = form.values(text, self.draft.home)
        except UserError:
            return {}
        try:
            old = {} if before is None else form.values(before, self.draft.home)
        except UserError:
            old = {}
        painted: dict[Any, Any] = {}
        for key, part in self.parts[view].items():
            kept = key not in LISTED and key in old and form.same(old[key], found[key])
            if key != but and not kept:
                painted[part] = self._held(view, key, part, found)
        if view == "simple":
            named = found["preset"] if isinstance(found["preset"], list) else []
            painted[self.goal] = next((name for name in named if name in GOALS), "")
            painted[self.card] = next((name for name in named if name in bases.cards()), "")
            painted[self.folder] = gr.update(choices=[str(path) for path in pictures.folders(self.ui.place.roots)])
            painted[self.base_note] = self._base_note(found)
        return painted

    def _held(self, view: str, key: str, part: Any, found: dict[str, Any]) -> Any:
        one, value = form.settings()[key], found[key]
        held = form.shown(one, value)
        if key == "preset":
            names = [str(name) for name in value] if isinstance(value, list) else []
            return gr.update(choices=self._presets(names), value=names)
        if key == "model.path" and view == "simple":
            usual = [(name, name) for name in bases.usual(str(found["model.family"]))]
            return _offering([*usual, *bases.nearby(self.ui.place.models, self.ui.place.roots)], held)
        if key == "model.components" and view == "simple":
            if not held and not self._look(str(found["model.path"] or "")).single:
                return gr.update(value=None, visible=False)
            place = self.ui.place
            return _offering(bases.parts(place.models, place.roots, str(found["model.family"])), held, visible=True)
        if one.kind == "table":
            empty = [form.shown(column, column.default) for column in one.columns]
            return [*held, empty]
        if one.kind in ("choice", "choices") or key == "model.family":
            known = list(self.families) if key == "model.family" else list(one.choices)
            strange = [word for word in (held if isinstance(held, list) else [held]) if word and word not in known]
            titles = self.families if key == "model.family" else {}
            labels = [(titles.get(w) or words.choice(self.ui.language, key, w), w) for w in [*known, *strange]]
            return gr.update(choices=labels, value=held or None)
        return gr.update(value=held)

    def _tell(self, everything: bool = False) -> dict[Any, Any]:
        """Summary, marks beside the settings, and what differs from the defaults."""
        text = self.draft.text()
        findings = self._findings(text)
        summary, marks, changes = self._summary(findings), self._marks(text, findings, everything), self._changes(text)
        replaced = self.draft.replaced()
        return {
            self.summary: summary,
            self.marks: marks,
            self.changes: changes,
            self.back: gr.update(visible=replaced),
            self.seen: hashlib.sha256(repr((summary, marks, changes, replaced)).encode()).hexdigest(),
        }

    def _findings(self, text: str) -> list[tuple[str, str]]:
        """(setting, line in the page's language) of everything that keeps the draft from being started."""
        home = self.draft.home
        try:
            submit.check_presets(self.ui.place, text)
        except UserErrors as error:
            return [("preset", self.ui.tell(line)) for line in error.problems]
        found = [(one.key, self._told(one)) for one in form.problems(text, home)]
        try:
            values = form.values(text, home)
        except UserError:
            return found
        told = {key for key, _ in found}
        for key, path in bases.paths(values):
            if key in told:
                continue
            try:
                self._allowed(key, path)
            except UserError as error:
                found.append((key, self.ui.tell(str(error))))
        found += [(key, line) for key, line in self._wrong_bases(values) if key not in {key for key, _ in found}]
        if "dataset.folders" not in {key for key, _ in found}:
            counts = self._counts(values)
            for folder, one, *_ in counts:
                if not one.files:
                    found.append(("dataset.folders", self.ui.say("new.pictures.none", folder=folder.name)))
            if not told & {"model.family", "dataset.frames", "dataset.fps", "dataset.clip"}:
                found += self._wrong_clips(values, counts)
            without = sum(one.without_caption for _, one, *_ in counts)
            if without and values["dataset.missing_caption"] == "error":
                found.append(("dataset.missing_caption", self.ui.say("new.pictures.uncaptioned", count=without)))
        return found

    def _wrong_bases(self, values: dict[str, Any]) -> Iterable[tuple[str, str]]:
        """(setting, line) of base models that the engine will refuse for what they are."""
        say, family = self.ui.say, str(values["model.family"])
        path, components = str(values["model.path"] or ""), str(values["model.components"] or "")
        for key, one in (("model.path", path), ("model.components", components)):
            known, name = self._look(one), safe.shorter(Path(one).name)
            if known.wrong:
                yield key, say("new.base.strange", file=name, what=self.ui.tell(known.wrong))
            elif family in self.families and not bases.fits(known, family):
                found, form_says = self.families[known.family], self.families[family]
                yield key, say("new.base.differs", file=name, found=found, title=form_says)
        if path == "demo" and family in self.families and family not in bases.demos():
            line = f"there is no demo base for {family!r}; bundled are: {', '.join(bases.demos())}"
            yield "model.path", self.ui.tell(line)
        if not components and self._look(path).single:
            yield "model.components", self.ui.say("new.base.components")

    def _wrong_clips(
        self, values: dict[str, Any], counts: list[tuple[Path, pictures.Count, int, str]]
    ) -> Iterable[tuple[str, str]]:
        """(setting, line) of videos that the engine will refuse."""
        say, family = self.ui.say, str(values["model.family"])
        for folder, one, _, mask in counts:
            told = {"folder": folder.name, "count": one.videos}
            if one.videos and not families.traits(family)["clips"]:
                yield "dataset.folders", say("new.clips.refused", title=self.families[family], **told)
            elif one.videos and not clips.can_read_videos():
                yield "dataset.folders", f"{folder.name}: {self.ui.tell(clips.NEEDED)}"
            elif one.videos and not values["dataset.frames"]:
                yield "dataset.frames", say("new.clips.unset", **told)
            elif examined := self._examined(values, folder, mask):
                short = examined.files("clip_short")
                damaged = {name: why for name, why in examined.files("unreadable").items() if album.is_video(name)}
                for key, files in (("dataset.frames", short), ("dataset.folders", damaged)):
                    lines = [f"{name} ({self.ui.tell(why)})" for name, why in list(files.items())[:4]]
                    if lines:
                        what = say(f"dataset.kind.{'clip_short' if files is short else 'unreadable'}")
                        yield key, f"{folder.name}: {what}: {', '.join(lines)}{' …' if len(files) > 4 else ''}"

    def _examined(self, values: dict[str, Any], folder: Path, mask: str) -> album.Examination | None:
        """What is in a folder, which is looked at in a process of its own, where clips may be cut; None elsewhere."""
        cut = album.cutting(str(values["model.family"]), *(values[f"dataset.{name}"] for name in album.CUT))
        if not cut:
            return None
        family, side = str(values["model.family"]), values["dataset.resolution"]
        side = side if isinstance(side, int) else int(families.facts(family)["native_resolution"])
        now = pictures.count(folder, mask)
        again = self.counted.get((folder, mask), now) != now  # files have come or gone since
        self.counted[folder, mask] = now
        return album.examination(self.ui.place, folder, family, side, cut, again, mask if "*" in mask else "")

    def _told(self, problem: form.Problem) -> str:
        """The line in the page's language, without the key of its setting, which is told by where it stands."""
        line = problem.line.removeprefix(f"{problem.key}: ")
        for theirs, ours in NEXT_STEPS.items():
            if line == words.catalogue()[theirs]["en"]:
                return self.ui.say(ours)
        return self.ui.tell(line)

    def _named(self, key: str, line: str) -> str:
        """A line with its setting, for a list of several."""
        label = words.label(self.ui.language, f"section.{key}" if form.settings()[key].kind == "table" else key)
        return f"{label} ({key}): {line}" if self.ui.language == "en" else f"{label}（{key}）：{line}"

    def _local(self, path: str) -> Path:
        """Where a path of the draft leads; relative ones begin at the page's home, as the job's do."""
        return self.ui.place.home / os.path.expanduser(path)

    def _allowed(self, key: str, path: str) -> None:
        """Raises UserError for a path that the page may not use, or where there is nothing, or not what is needed."""
        if key == "dataset.cache_dir" and not path.startswith(("/", "~")) and ".." not in Path(path).parts:
            return  # the page's own, below its home
        full = self.ui.path(self._local(path))
        if key in ("output_dir", "dataset.cache_dir"):
            return  # made where it is missing
        kind = KINDS.get(key, "folder")
        if not full.exists():
            raise UserError(f"{safe.shorter(path)}: there is no such {kind}")
        if kind == "folder" and not full.is_dir():
            raise UserError(f"{safe.shorter(path)}: this is a file; give a folder")
        if kind == "file" and not full.is_file():
            raise UserError(f"{safe.shorter(path)}: this is a folder; give a file")

    def _counts(self, values: dict[str, Any]) -> list[tuple[Path, pictures.Count, int, str]]:
        """Folder, what is in it, its repeats, and where its masks are."""
        rows = values["dataset.folders"] if isinstance(values["dataset.folders"], list) else []
        found = []
        for row in rows:
            path = row.get("path") if isinstance(row, dict) else None
            repeats = row.get("repeats", 1) if isinstance(row, dict) else 1
            if isinstance(path, str) and path and isinstance(repeats, int):
                try:
                    folder = self.ui.path(self._local(path))
                except UserError:
                    continue  # told by the check of paths
                if folder.is_dir():
                    mask = row["mask"] if isinstance(row.get("mask"), str) else ""
                    found.append((folder, pictures.count(folder, mask), repeats, mask))
        return found

    def _summary(self, findings: list[tuple[str, str]] | None = None) -> str:
        say, shown = self.ui.say, safe.shown
        text = self.draft.text()
        findings = self._findings(text) if findings is None else findings
        parts = []
        if findings:
            lines = [self._named(key, line) if key else line for key, line in findings]
            items = "".join(f"<li>{shown(line)}</li>" for line in lines)
            parts.append(f"<p><strong>{shown(say('new.summary.open'))}</strong></p><ul class='problems'>{items}</ul>")
        else:
            parts.append(f"<p><strong class='ready'>{shown(say('new.summary.ready'))}</strong></p>")
        try:
            values = form.values(text, self.draft.home)
        except UserError:
            return parts[0]
        counts = self._counts(values)
        for folder, one, *_ in counts:
            told = {"folder": folder.name, "count": one.pictures, "without": one.without_caption}
            line = (
                say("new.clips.count", videos=one.videos, **told) if one.videos else say("new.pictures.count", **told)
            )
            parts.append(f"<p>{shown(line)}</p>")
            if one.masks:
                line = say("new.pictures.masks", folder=folder.name, mask=one.mask, count=one.masks)
                parts.append(f"<p class='wrong'>{shown(line)}</p>")
        skipping = values["dataset.missing_caption"] == "skip"
        examined = [] if findings else [self._examined(values, folder, mask) for folder, *_, mask in counts]
        samples = files = 0
        for (folder, one, times, _), found in zip(counts, examined or [None] * len(counts), strict=True):
            if found is None:
                number = one.files - (one.without_caption if skipping else 0)
            elif found.report is not None:
                number = outlook.examples(found.report, skipping)
                if made := found.report["counts"]["clips"]:
                    line = say("new.clips.cut", folder=folder.name, clips=made, examples=number)
                    parts.append(f"<p>{shown(line)}</p>")
            else:
                number = 0
                if found.problem:
                    parts.append(f"<p class='wrong'>{shown(self.ui.tell(found.problem))}</p>")
            samples, files = samples + times * number, files + number
        held = values["validation.pictures"]
        if isinstance(held, int) and 0 < held < files:
            samples -= round(samples * held / files)  # which ones the seed says
        waiting = [one for one in examined if one is not None and one.running]
        reckoned = outlook.epochs(samples, values)
        if waiting:
            line = say("dataset.examining", done=waiting[0].done, total=waiting[0].total)
            parts.append(f"<p>{shown(line)}</p>")
        elif reckoned is None:
            parts += [] if samples else [f"<p>{shown(say('new.summary.none'))}</p>"]
        else:
            line = say(
                "new.summary.epochs",
                samples=reckoned.samples,
                per_step=reckoned.per_step,
                steps=shows.digits(reckoned.steps),
                total=values["train.steps"],
                epochs=shows.digits(reckoned.epochs),
            )
            parts.append(f"<p>{shown(line)}</p>")
        if not findings:
            known = self.estimates.of(text)
            parts += [f"<p>{shown(line)}</p>" for line in (self._time(values), *self._memory(known))]
            if isinstance(known, dict):
                problems, warnings = outlook.room(known)
                parts += [f"<p class='wrong'>{shown(self.ui.tell(line))}</p>" for line in problems]
                parts += [f"<p>{shown(self.ui.tell(line))}</p>" for line in warnings]
        return "".join(parts)

    def _time(self, values: dict[str, Any]) -> str:
        say = self.ui.say
        folders = [self.ui.place.home / "runs", *self.ui.place.roots]
        known = outlook.pace(dict.fromkeys(folders), str(values["model.family"]))
        if known is None:
            return say("new.summary.no_time")
        seconds, run = known
        minutes = seconds * values["train.steps"] / 60
        name, count = ("new.time.minutes", minutes) if minutes < 90 else ("new.time.hours", minutes / 60)
        return say(
            "new.summary.time",
            time=say(name, count=shows.digits(max(count, 1))),
            seconds=shows.digits(seconds),
            run=run,
        )

    def _memory(self, known: dict[str, Any] | str | None) -> list[str]:
        """What the engine answered."""
        say = self.ui.say
        if known is None:
            return [say("new.summary.estimating")]
        if isinstance(known, str):
            return [say("new.summary.no_estimate", why=self.ui.tell(known))] if known else []

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
            )
        ]
        files = ", ".join(f"{layout} {size(num)}" for layout, num in known["file_bytes"].items())
        return [*lines, say("new.summary.files", file=files, cache=size(known["cache_bytes"]))]

    def _marks(self, text: str, findings: list[tuple[str, str]], everything: bool) -> str:
        """Style that hides settings without effect and puts each problem under its setting."""
        rules = []
        try:
            found = form.values(text, self.draft.home)
            set_here = form.origins(text, self.draft.home)
        except UserError:
            return ""
        wrong: dict[str, list[str]] = {}
        for key, line in findings:
            wrong.setdefault(key, []).append(line)
        for view in ("new", "set"):
            rules += self._table(_shares(found, everything, view), view)
        if not everything:
            hidden = [
                key
                for key in form.idle(found)
                # What has a value is shown: the training will say that it has no effect.
                if key not in wrong and set_here.get(key) != "" and form.same(found[key], form.settings()[key].default)
            ]
            if hidden:
                rules.append(f"{_ids('set', hidden)} {{ display: none; }}")
        if unasked := [key for key in form.idle(found) if key in SIMPLE and key not in wrong]:
            row = ", #new-clips" if set(CLIPS) <= set(unasked) else ""  # its frame would stay
            rules.append(f"{_ids('new', unasked)}{row} {{ display: none; }}")
        for key, lines in wrong.items():
            if key:
                ids = f"#{_id('set', key)}::after, #{_id('new', key)}::after"
                rules.append(f"{ids} {{ content: {_css_text(chr(10).join(lines))}; }}")
        return f"<style>{' '.join(rules)}</style>" if rules else ""

    def _table(self, shares: dict[str, float], view: str) -> Iterable[str]:
        """Style for the table of folders in a view: its columns, or blocks where it is too narrow for them."""
        yield from _columns(shares, view)
        table, cells = f"#{_id(view, 'dataset.folders')}", []
        for number, column in enumerate(form.settings()["dataset.folders"].columns, 1):
            cell = f'{table} .body-cell[aria-colindex="{number}"]'
            cells.append(f"{cell}::before {{ content: {_css_text(words.label(self.ui.language, column.key))}; }}")
            if WIDE.get(column.name, 1) >= PATH:
                cells.append(f"{cell} {{ flex-basis: 100% !important; }}")
        empty = f'{table} .body-cell[aria-colindex="1"] [data-editable]:empty::before'
        yield f"{empty} {{ content: {_css_text(self.ui.say('new.pictures.row'))}; }}"
        width = round(UNIT * sum(shares.values())) - 1
        yield STACKED.format(table=table, width=width, cells=" ".join(cells))

    def _changes(self, text: str) -> str:
        say = self.ui.say
        try:
            found, origins = form.values(text, self.draft.home), form.origins(text, self.draft.home)
        except UserError as error:
            return f"<p class='wrong'>{safe.shown(self.ui.tell(str(error)))}</p>"
        rows = []
        for key, one in form.settings().items():
            if key in origins and key != "preset" and not form.same(found[key], one.default):
                label = words.label(self.ui.language, f"section.{key}" if one.kind == "table" else key)
                before, now = (_brief(_listed(one, value)) for value in (one.default, found[key]))
                origin = origins[key] and Path(origins[key]).stem or say("new.changes.own")
                cells = "".join(f"<td>{safe.shown(cell)}</td>" for cell in (before, now, origin))
                code = safe.shown(key).replace(".", ".<wbr>")
                rows.append(f"<tr><td>{safe.shown(label)}<br><code>{code}</code></td>{cells}</tr>")
        if not rows:
            return f"<p class='note'>{safe.shown(say('new.changes.none'))}</p>"
        heads = "".join(
            f"<th>{safe.shown(say(f'new.changes.{name}'))}</th>" for name in ("setting", "default", "now", "from")
        )
        return f"<table class='facts wide'><tr>{heads}</tr>{''.join(rows)}</table>"

    def _base_note(self, found: dict[str, Any]) -> str:
        say, path, family = self.ui.say, str(found["model.path"] or ""), str(found["model.family"])
        title = self.families.get(family, family)
        if not path:
            return ""
        if path == "demo" and family in bases.demos():
            return safe.shown(say("new.base.demo_is", title=title))
        size = families.facts(family).get("native_resolution") if family in self.families else None
        lines = []
        known = self._look(path)
        if known.family:
            lines.append(say("new.base.is", title=self.families[known.family]))
        elif bases.on_the_hub(path):
            lines.append(say("new.base.hub", path=path))
        if size:
            lines.append(say("new.base.size", pixels=size))
        return safe.shown(" ".join(lines))

    # ------------------------------------------------------------------------------------------------------- offers

    def _presets(self, named: list[str] | None = None) -> list[tuple[str, str]]:
        own = [(path.stem, str(path)) for path in bases.own_presets(self.draft.home)]
        known = [*((name, name) for name in config.preset_names()), *own]
        return known + [(Path(name).stem, name) for name in named or [] if name not in {value for _, value in known}]

    def _sources(self) -> list[tuple[str, str]]:
        return [(label, str(path)) for label, path in bases.configs(self.ui.place.roots)]


def _ids(prefix: str, keys: Iterable[str]) -> str:
    """A selector of the parts of these settings."""
    return ", ".join(f"#{_id(prefix, key)}" for key in sorted(keys))


def _id(prefix: str, key: str) -> str:
    return f"{prefix}-{key.replace('.', '-') or 'job'}"


def _shares(found: dict[str, Any], everything: bool, view: str) -> dict[str, float]:
    """The room of each column of the table of folders in a view ("new" is the simple one, "set" all settings): control
    pictures only where they are shown to the model, in the simple view the first three, each where one is set."""
    rows = found["dataset.folders"] if isinstance(found["dataset.folders"], list) else []
    wanted = dict.fromkeys(("regularization", "weight", "resolution", "mask"), view == "set")
    wanted |= {"control": "dataset.control_resolution" not in form.idle(found)}
    return {
        column.name: WIDE.get(column.name, 1)
        for column in form.settings()["dataset.folders"].columns
        if everything
        or wanted.get(column.name, True)
        or any(isinstance(row, dict) and row.get(column.name, column.default) != column.default for row in rows)
    }


def _columns(shares: dict[str, float], view: str) -> Iterable[str]:
    """Style for each column of the table of folders in a view."""
    for number, column in enumerate(form.settings()["dataset.folders"].columns, 1):
        share = f"--share: {100 * shares.get(column.name, 0) / sum(shares.values()):.1f}%"
        style = share if column.name in shares else "display: none !important"
        yield f'#{_id(view, "dataset.folders")} [aria-colindex="{number}"] {{ {style}; }}'


def _offering(choices: list[tuple[str, str]], held: Any, **given: Any) -> Any:
    """An update of a dropdown whose value need not be among what it offers."""
    strange = [(str(held), held)] if held and held not in {value for _, value in choices} else []
    return gr.update(choices=[*choices, *strange], value=held or None, **given)


def _listed(one: form.Setting, value: Any) -> Any:
    """What a setting holds, as its part shows it; of a table the first column."""
    rows = form.shown(one, value)
    return ", ".join(str(row[0]) for row in rows) if one.kind == "table" and isinstance(rows, list) else rows


def _brief(held: Any) -> str:
    text = json.dumps(held, ensure_ascii=False) if not isinstance(held, str) else held
    return safe.shorter(text, 80)


def _css_text(text: str) -> str:
    """Text as a string of a style sheet that stands in HTML: nothing in it ends the string or the sheet."""
    return '"' + "".join(c if c.isalnum() or c in " .,:;-_=()" else f"\\{ord(c):x} " for c in safe.plain(text)) + '"'
