"""The components of the page: three views of one draft, and beside them summary, Start button and files."""

import functools
import json
from typing import Any

import gradio as gr

from lora_fp8 import config

from ... import form, live_panel, sanitize, translations
from ...context import Ui
from ...images import make_panel
from .base_section import BaseParts
from .draft_reader import DraftReader
from .preset_cards import get_title
from .preset_section import STYLE as PRESET_STYLE
from .preset_section import PresetParts
from .questions import CLIPS, make_id
from .styles import STYLE

IMAGES_PER_PAGE = 24
PRESETS = "presets"
"""The section of the presets, which is not a table of the config."""


class Layout:
    """The components of one language.

    `parts` holds the fields by view and setting, `keys` the setting of each field by the field's id.
    """

    def __init__(self, ui: Ui, reader: DraftReader):
        self.ui, self.reader = ui, reader
        self.parts: dict[str, dict[str, Any]] = {"simple": {}, "all": {}}
        self.keys: dict[str, str] = {}  # of the parts, by their ids
        self.tabs: dict[str, gr.Tab] = {}
        self.presets = PresetParts()
        say = ui.say
        gr.HTML(STYLE + PRESET_STYLE, elem_classes="style-only")
        self.marks = gr.HTML(elem_classes="style-only")
        # What the window shows, which may differ from what it was sent last: the window reports it.
        self.seen = gr.Textbox(visible="hidden", elem_id="new-seen")
        self.address = gr.Textbox(visible="hidden", elem_id="new-address")
        self.touched = gr.Textbox(visible="hidden", elem_id="new-touched")
        self.view = gr.Textbox("simple", visible="hidden", elem_id="new-view")
        with gr.Row():
            with gr.Column(scale=5, min_width=320):
                with gr.Tabs(elem_id="new-views"):
                    with gr.Tab(say("new.view.simple"), id="simple") as self.tabs["simple"]:
                        self._lay_out_simple()
                    with gr.Tab(say("new.view.all"), id="all") as self.tabs["all"]:
                        self._lay_out_all()
                    with gr.Tab(say("new.view.toml"), id="toml") as self.tabs["toml"]:
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
                with gr.Column(elem_id="new-start-box"):
                    self.state = gr.HTML(elem_id="new-state")
                    self.start = gr.Button(say("new.start"), variant="primary", elem_id="new-start")
                self.summary = gr.HTML(elem_id="new-summary")
                self._lay_out_files()
                with gr.Accordion(say("new.changes"), open=False):
                    self.changes = live_panel.make_panel(elem_id="new-changes")

    def _lay_out_simple(self) -> None:
        """Lay out the four steps of the simple view."""
        steps = (
            ("base", self._lay_out_base),
            ("pictures", self._lay_out_images),
            ("goal", self._lay_out_goal),
            ("previews", self._lay_out_previews),
        )
        for name, lay_out in steps:
            with gr.Column(elem_id=f"new-step-{name}", elem_classes="step"):
                gr.Markdown(f"## {self.ui.say(f'new.step.{name}')}")
                lay_out()

    def _lay_out_base(self) -> None:
        self.base = BaseParts(self.ui, functools.partial(self._add_field, "simple"))

    def _lay_out_images(self) -> None:
        say = self.ui.say
        self.images = make_panel(self.ui, "new", IMAGES_PER_PAGE, elem_id="new-images", elem_classes="setting")
        with gr.Column(elem_id="new-folders"):  # a button of the workbench shows it
            self._add_field("simple", "dataset.folders")
            gr.Markdown(say("new.pictures.columns"), elem_classes="note")
        self._add_field("simple", "dataset.trigger")
        self._add_field("simple", "dataset.missing_caption")
        with gr.Row(elem_id="new-clips"):
            for key in CLIPS:
                self._add_field("simple", key)

    def _lay_out_goal(self) -> None:
        self.presets.add("simple")
        self.recipe = gr.HTML(elem_id="new-recipe")
        self._add_field("simple", "train.steps")
        self._add_field("simple", "name")

    def _lay_out_previews(self) -> None:
        self._add_field("simple", "preview.prompts")

    def _lay_out_all(self) -> None:
        say = self.ui.say
        with gr.Row(equal_height=True):
            self.search = gr.Textbox(
                label=say("new.search"), info=say("new.search.info"), elem_id="new-search", scale=3
            )
            self.everything = gr.Checkbox(label=say("new.search.everything"), elem_id="new-everything", scale=1)
        gr.HTML(self._render_index(), elem_classes="note")
        with gr.Column(elem_id=make_id("section", PRESETS), elem_classes="setting-group"):
            gr.Markdown(f"## {say('new.presets')}\n{say('new.presets.info')}")
            self.presets.add("all")
            self._add_field("all", "preset")
        for section in form.collect_sections():
            key = f"section.{section}" if section else "section"
            title = translations.get_label(self.ui.language, key)
            text = translations.get_help(self.ui.language, key, form.collect_sections()[section]).strip()
            with gr.Column(elem_id=make_id("section", section), elem_classes="setting-group"):
                gr.Markdown(f"## {title}{f' `[{section}]`' if section else ''}\n{text}")
                if section == "optimizer":
                    self.find_rate = gr.Button(say("new.rate"), size="sm", elem_id="new-find-rate")
                members = [setting for setting in _list_members(section) if setting.key != "preset"]
                for setting in (setting for setting in members if setting.kind == "table"):
                    self._add_field("all", setting.key)
                    gr.HTML(self._render_column_help(setting))
                for setting in (setting for setting in members if setting.kind != "table"):
                    self._add_field("all", setting.key)

    def _render_index(self) -> str:
        """Render what static/search.js searches, and links to the sections."""
        language = self.ui.language
        texts = {
            make_id("section", section): {
                make_id("set", setting.key): _get_search_text(setting) for setting in _list_members(section)
            }
            for section in form.collect_sections()
        }
        of_preset = texts[make_id("section", "")].pop(make_id("set", "preset"))
        titles = " ".join(map(functools.partial(get_title, self.ui), config.list_preset_names())).lower()
        texts[make_id("section", PRESETS)] = {make_id("set", "preset"): f"{of_preset} {titles}"}
        nothing, index = self.ui.say("new.search.nothing", text="{text}"), json.dumps(texts, ensure_ascii=False)
        headings = {PRESETS: self.ui.say("new.presets")} | {
            section: translations.get_label(language, f"section.{section}" if section else "section")
            for section in form.collect_sections()
        }
        links = "".join(
            f"<button type='button' data-section='{make_id('section', section)}'>{sanitize.escape(title)}</button>"
            for section, title in headings.items()
        )
        return (
            f"<nav id='new-sections' aria-label='{sanitize.escape(self.ui.say('new.sections'))}'>{links}</nav>"
            f"<p id='new-index' role='status' data-nothing='{sanitize.escape(nothing)}' "
            f"data-texts='{sanitize.escape(index)}'></p>"
        )

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
        with gr.Accordion(say("new.files.import"), open=False, elem_id="new-foreign"):
            gr.Markdown(say("new.files.import_info"), elem_classes="note")
            self.foreign = gr.File(
                label=say("new.import.file"), file_count="multiple", height=170, elem_id="new-import"
            )
            self.imported = gr.HTML()
        with gr.Accordion(say("new.files"), open=False, elem_id="new-files"):
            self.source = gr.Dropdown(
                [], value=None, allow_custom_value=True, label=say("new.files.load"), info=say("new.files.load_info")
            )
            self.load = gr.Button(say("new.files.load_button"), size="sm")
            self.preset_name = gr.Textbox(
                label=say("new.files.preset_name"), info=say("new.files.preset_info"), elem_id="new-preset-name"
            )
            self.save = gr.Button(say("new.files.preset_save"), size="sm", elem_id="new-preset-save")
            self.reset = gr.Button(say("new.files.reset"), size="sm", variant="stop", elem_id="new-reset")
            gr.Markdown(say("new.files.reset_info"), elem_classes="note")
            self.back = gr.Button(say("new.files.back"), size="sm", visible=False, elem_id="new-back")

    def _add_field(self, view: str, key: str) -> None:
        setting = form.collect_settings()[key]
        language = self.ui.language
        info = translations.get_help(language, key, setting.description)
        bounds = self.ui.say("new.accepts", bounds=self.ui.translate(setting.accepts)) if setting.accepts else ""
        common: dict[str, Any] = {
            "label": translations.get_label(language, key),
            "info": f"{info} {bounds} `{key}`" if view == "all" else info,
            "elem_id": make_id("set" if view == "all" else "new", key),
            "elem_classes": ["setting"],
            "interactive": True,
        }
        choices = [(translations.get_choice_label(language, key, word), word) for word in setting.choices]
        part: Any
        if key == "model.family":
            part = gr.Dropdown([(title, name) for name, title in self.reader.families.items()], value=None, **common)
        elif key == "preset":
            part = gr.Dropdown([], value=None, multiselect=True, allow_custom_value=True, **common)
        elif key == "model.path" and view == "simple":
            common["info"] = self.ui.say("new.base.path_info")
            part = gr.Dropdown([], value=None, allow_custom_value=True, **common)
        elif key == "model.components" and view == "simple":
            part = gr.Dropdown([], value=None, allow_custom_value=True, visible=False, **common)
        elif setting.kind == "flag":
            part = gr.Checkbox(**common)
        elif setting.kind in ("choice", "switch"):
            part = gr.Dropdown(choices, value=None, allow_custom_value=key == "optimizer.name", **common)
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


def _list_members(section: str) -> list[form.Setting]:
    return [setting for setting in form.collect_settings().values() if setting.section == section]


def _get_search_text(setting: form.Setting) -> str:
    """Return what a search looks at: a setting's names, in both languages and in other trainers, and its help."""
    texts = translations.load_setting_texts().get(setting.key, {})
    names = [texts.get("en", ""), texts.get("zh-CN", ""), texts.get("help", "")]
    words = " ".join([setting.key, setting.description, *names, *setting.also.values()])
    return words.lower().replace("_", " ")
