"""The components of the page: the folder and uploads, and a tab each for images, tags, findings, buckets and jobs."""

from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block

from ... import dataset_folder, form, image_folders, live_panel, translations
from ...context import Ui
from .operations import OPERATIONS

STYLE = (Path(__file__).parent.parent.parent / "dataset.css").read_text(encoding="utf-8")
SHOWING = ("all", "uncaptioned", "chosen")


def panel(**given: Any) -> gr.HTML:
    """Make a panel like live_panel.panel, with the styles of this page."""
    return gr.HTML(
        "", css_template=live_panel.STYLE + STYLE, js_on_load=live_panel.CLICKS, apply_default_css=False, **given
    )


class Layout:
    """The components of one language.

    `at` is what a window shows: folder, filters, page of the grid, picked image, chosen images, captions that were
    typed and not saved, how clips are cut (frames, fps, clip), and where the masks are by the New training page.
    `editing` is kept in the browser beside the editor: the image whose caption it holds, and the text as it was loaded.
    """

    def __init__(self, ui: Ui, families: dict[str, str]):
        self.ui, self.say = ui, ui.say
        say = self.say
        self.at, self.edit, self.seen = gr.State({}), gr.State(None), gr.State({})
        self.editing = gr.Textbox(visible="hidden", elem_id="dataset-editing")
        self.family = gr.Dropdown(
            [(title, name) for name, title in families.items()],
            value="sdxl",
            label=say("dataset.family"),
            elem_id="dataset-family",
            render=False,
        )
        self.resolution = gr.Number(
            0,
            precision=0,
            minimum=0,
            label=say("dataset.resolution"),
            elem_id="dataset-resolution",
            render=False,
        )
        self.tags = panel(elem_id="dataset-tags", render=False)
        self.cut = {name: self._make_field(f"dataset.{name}") for name in dataset_folder.CUT}
        self._lay_out_folder()
        self.head = panel(elem_id="dataset-head")
        self.message = panel(elem_id="dataset-said", visible=False)
        with gr.Tabs(visible=False, elem_id="dataset-tabs") as self.tabs:
            with gr.Tab(say("dataset.tab.pictures"), id="pictures"):
                self._lay_out_pictures()
            with gr.Tab(say("dataset.tab.tags"), id="tags"):
                self.tags.render()
            with gr.Tab(say("dataset.tab.findings"), id="findings"):
                with gr.Row():
                    self.family.render()
                    self.resolution.render()
                    self.again = gr.Button(
                        say("dataset.again"), elem_id="dataset-again", elem_classes="beside", size="md"
                    )
                with gr.Row(visible=False) as self.cutting:
                    for part in self.cut.values():
                        part.render()
                self.findings = panel(elem_id="dataset-findings")
            with gr.Tab(say("dataset.tab.buckets"), id="buckets"):
                self.buckets = panel(elem_id="dataset-buckets")
            with gr.Tab(say("dataset.tab.caption"), id="caption"):
                self._lay_out_captioning()
        self.address = gr.Textbox(visible="hidden", elem_id="dataset-address")

    def _lay_out_folder(self) -> None:
        say = self.say
        with gr.Row():
            self.folder = gr.Dropdown(
                label=say("dataset.folder"), choices=[], allow_custom_value=True, elem_id="dataset-folder", scale=5
            )
            self.go = gr.Button(say("dataset.open"), elem_id="dataset-open", elem_classes="beside", size="md", scale=1)
        with gr.Accordion(say("dataset.upload"), open=False, elem_id="dataset-upload"):
            with gr.Row():
                self.drop = gr.File(
                    file_count="multiple",
                    file_types=[*image_folders.TAKEN],
                    label=say("dataset.upload.drop"),
                    height=130,
                    scale=3,
                    elem_id="dataset-drop",
                )
                self.new_set = gr.Textbox(
                    label=say("dataset.upload.set"),
                    info=say("dataset.upload.set_info"),
                    max_lines=1,
                    scale=2,
                    elem_id="dataset-new-set",
                )

    def _lay_out_pictures(self) -> None:
        say = self.say
        with gr.Row():
            self.query = gr.Textbox(label=say("dataset.search"), max_lines=1, elem_id="dataset-search", scale=3)
            self.showing = gr.Dropdown(
                [(say(f"dataset.showing.{kind}"), kind) for kind in SHOWING], value="all", label=say("dataset.showing")
            )
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                self.grid = panel(elem_id="dataset-grid")
            with gr.Column(scale=2, min_width=300):
                self.view = panel(elem_id="dataset-view")
                self.caption = gr.Textbox(
                    label=say("dataset.caption"), lines=5, max_lines=14, elem_id="dataset-caption"
                )
                with gr.Row():
                    self.save = gr.Button(say("dataset.save"), elem_id="dataset-save", size="md")
                    self.save_next = gr.Button(
                        say("dataset.save_next"), variant="primary", elem_id="dataset-next", size="md"
                    )
        with gr.Accordion(say("dataset.many"), open=True, elem_id="dataset-many"):
            self._lay_out_edits()

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
            self.undo = gr.Button(say("dataset.undo"), elem_id="dataset-undo", size="md")
            self.redo = gr.Button(say("dataset.redo"), elem_id="dataset-redo", size="md")
        self.changes = panel(elem_id="dataset-changes")

    def _lay_out_captioning(self) -> None:
        say = self.say
        gr.Markdown(say("dataset.auto.about"))
        self.captioning: dict[str, Block] = {}
        with gr.Row():
            self.captioning["model"] = gr.Textbox(
                label=say("dataset.auto.model"),
                placeholder="florence-community/Florence-2-large-ft",
                max_lines=1,
                elem_id="auto-model",
            )
            self.captioning["kind"] = gr.Radio(
                [(say(f"dataset.auto.{name}"), name) for name in ("text", "tags")],
                value="text",
                label=say("dataset.auto.kind"),
            )
        with gr.Row():
            self.captioning["prompt"] = gr.Textbox(label=say("dataset.auto.prompt"), max_lines=3)
            self.captioning["trigger"] = gr.Textbox(
                label=say("dataset.auto.trigger"), max_lines=1, elem_id="auto-trigger"
            )
        self.captioning["overwrite"] = gr.Checkbox(label=say("dataset.auto.overwrite"), value=False)
        self.begin = gr.Button(say("dataset.auto.begin"), variant="primary", elem_id="auto-begin", size="md")
        self.job = panel(elem_id="dataset-job")

    def _make_field(self, key: str) -> Any:
        """Make a field for a training setting, to be rendered later."""
        setting, language = form.settings()[key], self.ui.language
        given = {
            "label": translations.get_label(language, key),
            "value": form.to_component(setting, setting.default),
            "elem_id": f"dataset-{setting.name}",
            "render": False,
        }
        if setting.kind == "choice":
            return gr.Dropdown(
                [(translations.get_choice_label(language, key, word), word) for word in setting.choices], **given
            )
        return gr.Textbox(info=translations.get_help(language, key, setting.description), max_lines=1, **given)
