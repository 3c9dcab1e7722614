"""The components of the page: the run's header, the question before it ends, and a tab each for what it has written."""

import gradio as gr

from ... import live_panel
from ...context import Ui
from ...translations import get_choice_label
from .preview_requests import PreviewRequests
from .publishing import Publishing

FORMATS = ("auto", "kohya", "comfy", "diffusers")
DTYPES = ("", "bf16", "fp16", "fp32")


class Layout:
    """The components of one language.

    `seen` is what the window shows, `steps` what its menus offer, and `newest` moves the right preview on.
    """

    def __init__(self, ui: Ui):
        self.ui = ui
        self.head = live_panel.make_panel(elem_id="head")
        self.note = live_panel.make_panel(elem_id="said", visible=False)
        with gr.Group(visible=False, elem_classes="ask") as self.confirm:
            self.question = gr.Markdown()
            with gr.Row():
                self.keep = gr.Button(ui.say("runs.keep"))
                self.force = gr.Button(ui.say("runs.do.force"), variant="stop")
        self.how = gr.State("force")
        with gr.Tabs(elem_id="run-tabs"):
            with gr.Tab(ui.say("run.tab.previews"), id="previews"):
                self._lay_out_previews()
            with gr.Tab(ui.say("run.tab.curves"), id="curves"):
                with gr.Row(elem_classes="run-options"):
                    self.amount = gr.Slider(0, 0.99, value=0.9, step=0.01, label=ui.say("run.smooth"))
                    self.log = gr.Checkbox(label=ui.say("run.log"), value=False)
                self.curves = live_panel.make_panel(elem_id="curves")
            with gr.Tab(ui.say("run.tab.files"), id="files"):
                self._lay_out_files()
            with gr.Tab(ui.say("run.tab.log"), id="log"):
                self.printed = live_panel.make_panel(elem_id="log")
            with gr.Tab(ui.say("run.tab.warnings"), id="warnings"):
                self.warned = live_panel.make_panel(elem_id="warnings")
            with gr.Tab(ui.say("run.tab.config"), id="config"):
                self.config = live_panel.make_panel(elem_id="config")
        self.seen, self.steps = gr.State({}), gr.State([])
        self.newest = gr.Textbox(visible="hidden", elem_id="newest")

    def _lay_out_previews(self) -> None:
        say = self.ui.say
        with gr.Row():
            with gr.Column(scale=3, min_width=300):
                self.pair = live_panel.make_panel(elem_id="pair")
                with gr.Row():
                    self.left = gr.Dropdown(label=say("run.left"), choices=[], elem_id="left")
                    self.right = gr.Dropdown(label=say("run.right"), choices=[], elem_id="right")
                    self.prompt = gr.Dropdown(label=say("run.prompt"), choices=[], elem_id="prompt")
                self.moving = gr.Checkbox(label=say("run.moving"), value=True, visible=False, elem_id="moving")
            with gr.Column(scale=2, min_width=300):
                self.loss = live_panel.make_panel(elem_id="loss")
        self.requests = PreviewRequests(self.ui)
        self.samples = live_panel.make_panel(elem_id="samples")
        self.grid = live_panel.make_panel(elem_id="grid")

    def _lay_out_files(self) -> None:
        say = self.ui.say
        self.files = live_panel.make_panel(elem_id="files")
        with gr.Row():
            formats = [(get_choice_label(self.ui.language, "export.formats", name), name) for name in FORMATS]
            self.step = gr.Dropdown(
                label=say("run.export_step"), info=say("run.export_step.info"), choices=[], elem_id="export-step"
            )
            self.format = gr.Dropdown(
                label=say("run.export_format"),
                info=say("run.export_format.info"),
                choices=formats,
                value=FORMATS[0],
            )
            self.dtype = gr.Dropdown(
                label=say("run.export_dtype"),
                info=say("run.export_dtype.info"),
                choices=[(name or say("run.as_set"), name) for name in DTYPES],
                value="",
            )
        self.export = gr.Button(say("run.export"), elem_id="export")
        self.exported = live_panel.make_panel(elem_id="exported", visible=False)
        self.publishing = Publishing(self.ui)
