"""The components of the page: the folder, and a tab each for images, tags, findings and buckets."""

from pathlib import Path
from typing import Any

import gradio as gr

from lora_fp8 import families

from ... import dataset_folder, form, live_panel, translations
from ...context import Ui
from ...images import make_panel
from .operations import OPERATIONS

STYLE = (Path(__file__).parent.parent.parent / "dataset.css").read_text(encoding="utf-8")
PER_PAGE = 60


def make_styled_panel(**given: Any) -> gr.HTML:
    """Make a panel like live_panel.make_panel, with the styles of this page."""
    return gr.HTML(
        "", css_template=live_panel.STYLE + STYLE, js_on_load=live_panel.CLICKS, apply_default_css=False, **given
    )


class Layout:
    """The components of one language.

    `at` is what the window's workbench shows: folder, filter (query, showing, finding), chosen images, and how clips
    are cut (frames, fps, clip); {} before a folder is open. `purpose` tells the workbench which folder to show, and
    what for: an object in JSON.
    """

    def __init__(self, ui: Ui):
        self.ui, self.say = ui, ui.say
        say = self.say
        self.at, self.edit, self.seen = gr.State({}), gr.State(None), gr.State({})
        self.purpose = gr.Textbox(visible="hidden", elem_id="dataset-purpose")
        with gr.Row():
            self.folder = gr.Dropdown(
                label=say("dataset.folder"), choices=[], allow_custom_value=True, elem_id="dataset-folder", scale=5
            )
            self.go = gr.Button(say("dataset.open"), elem_id="dataset-open", elem_classes="beside", size="md", scale=1)
        self.head = make_styled_panel(elem_id="dataset-head", elem_classes="note")
        self.message = make_styled_panel(elem_id="dataset-said", visible=False)
        with gr.Tabs(elem_id="dataset-tabs") as self.tabs:
            with gr.Tab(say("dataset.tab.pictures"), id="pictures"):
                self.many = gr.Accordion(say("dataset.many"), open=False, visible=False, elem_id="dataset-many")
                with self.many:
                    self._lay_out_edits()
                self.images = make_panel(ui, "dataset", PER_PAGE, elem_id="dataset-images")
            with gr.Tab(say("dataset.tab.tags"), id="tags", visible=False) as self.tags_tab:
                self.tags = make_styled_panel(elem_id="dataset-tags")
            with gr.Tab(say("dataset.tab.findings"), id="findings", visible=False) as self.findings_tab:
                self._lay_out_findings()
            with gr.Tab(say("dataset.tab.buckets"), id="buckets", visible=False) as self.buckets_tab:
                self.buckets = make_styled_panel(elem_id="dataset-buckets")
        self.of_folder = [self.many, self.tags_tab, self.findings_tab, self.buckets_tab]

    def _lay_out_edits(self) -> None:
        say = self.say
        with gr.Row():
            self.operation = gr.Dropdown(
                [(say(f"dataset.do.{name}"), name) for name in OPERATIONS],
                value="add_first",
                label=say("dataset.operation"),
                elem_id="dataset-operation",
            )
            self.first = gr.Textbox(label=say("dataset.first"), max_lines=1, elem_id="dataset-first")
            self.second = gr.Textbox(label=say("dataset.second"), max_lines=1, elem_id="dataset-second", visible=False)
            self.scope = gr.Dropdown(
                [(say(f"dataset.scope.{name}"), name) for name in ("all", "filter", "chosen")],
                value="all",
                label=say("dataset.scope"),
                elem_id="dataset-scope",
            )
        with gr.Row():
            self.preview = gr.Button(say("dataset.preview"), elem_id="dataset-preview", size="md")
            self.apply = gr.Button(say("dataset.apply"), variant="primary", elem_id="dataset-apply", size="md")
        self.changes = make_styled_panel(elem_id="dataset-changes")

    def _lay_out_findings(self) -> None:
        say = self.say
        with gr.Row():
            self.family = gr.Dropdown(
                [(families.get(name).title, name) for name in families.list_families()],
                value="sdxl",
                label=say("dataset.family"),
                elem_id="dataset-family",
            )
            self.resolution = gr.Number(
                0, precision=0, minimum=0, label=say("dataset.resolution"), elem_id="dataset-resolution"
            )
            self.again = gr.Button(say("dataset.again"), elem_id="dataset-again", elem_classes="beside", size="md")
        with gr.Row(visible=False) as self.cutting:
            self.cut = {name: self._make_field(f"dataset.{name}") for name in dataset_folder.CUT}
        self.findings = make_styled_panel(elem_id="dataset-findings")

    def _make_field(self, key: str) -> Any:
        """Make a field for a training setting."""
        setting, language = form.collect_settings()[key], self.ui.language
        given = {
            "label": translations.get_label(language, key),
            "value": form.to_component(setting, setting.default),
            "elem_id": f"dataset-{setting.name}",
        }
        if setting.kind == "choice":
            return gr.Dropdown(
                [(translations.get_choice_label(language, key, word), word) for word in setting.choices], **given
            )
        return gr.Textbox(info=translations.get_help(language, key, setting.description), max_lines=1, **given)
