"""The components of the page: what to draw on the left, the newest drawing beside it, and the earlier ones below."""

from pathlib import Path

import gradio as gr

from lora_fp8.common.gpu import read_gpus

from ... import live_panel
from ...context import Ui
from ...drawings import STRENGTHS, WHERE

VIEWER = (Path(__file__).parents[2] / "static" / "viewer.js").read_text(encoding="utf-8")
STYLE = (Path(__file__).parents[2] / "draw.css").read_text(encoding="utf-8")


class Layout:
    """The components of one language.

    `chosen` is the id of the drawing that is open ("" opens the newest), `doomed` that which a question is about, and
    `seen` what the window shows.
    """

    def __init__(self, ui: Ui):
        self.ui = ui
        say = ui.say
        self.chosen, self.doomed, self.seen = gr.State(""), gr.State(""), gr.State({})
        with gr.Row(elem_id="draw-page"):
            with gr.Column(scale=2, min_width=300, elem_id="draw-form"):
                self._lay_out_form()
            with gr.Column(scale=3, min_width=300):
                self.note = live_panel.make_panel(elem_id="draw-note", visible=False)
                with gr.Group(visible=False, elem_classes="ask") as self.confirm:
                    self.question = gr.Markdown(say("draw.ask_delete"))
                    with gr.Row():
                        self.keep = gr.Button(say("runs.keep"))
                        self.delete = gr.Button(say("runs.do.delete"), variant="stop", elem_id="draw-delete")
                script = live_panel.CLICKS + live_panel.SLIDER + VIEWER
                style = live_panel.STYLE + STYLE
                self.drawing = gr.HTML(
                    "", css_template=style, js_on_load=script, apply_default_css=False, elem_id="drawing"
                )
        self.history = gr.HTML(
            "",
            css_template=live_panel.STYLE + STYLE,
            js_on_load=live_panel.CLICKS,
            apply_default_css=False,
            elem_id="drawings",
        )

    def _lay_out_form(self) -> None:
        say = self.ui.say
        self.source = gr.Dropdown(
            label=say("draw.source"),
            info=say("draw.source.info"),
            choices=[],
            allow_custom_value=True,
            elem_id="draw-source",
        )
        self.steps = gr.Dropdown(
            label=say("draw.steps"), choices=[], multiselect=True, visible=False, elem_id="draw-steps"
        )
        self.base = gr.Textbox(
            label=say("draw.base"), info=say("draw.base.info"), max_lines=1, visible=False, elem_id="draw-base"
        )
        self.prompt = gr.Textbox(label=say("draw.prompt"), info=say("draw.prompt.info"), lines=3, elem_id="draw-prompt")
        self.strengths = gr.CheckboxGroup(
            list(STRENGTHS), value=["0.5", "1"], label=say("draw.strengths"), elem_id="draw-strengths"
        )
        self.with_base = gr.Checkbox(label=say("draw.with_base"), value=True, elem_id="draw-with-base")
        with gr.Accordion(say("draw.more"), open=False):
            self.negative = gr.Textbox(label=say("draw.negative"), lines=2, elem_id="draw-negative")
            with gr.Row():
                # Text fields: one for numbers shows 0 where nothing was given.
                self.seed = gr.Textbox(label=say("draw.seed"), max_lines=1, min_width=110)
                self.sampling_steps = gr.Textbox(label=say("draw.sampling_steps"), max_lines=1, min_width=110)
                self.guidance = gr.Textbox(label=say("draw.guidance"), max_lines=1, min_width=110)
            with gr.Row():
                self.width = gr.Textbox(label=say("draw.width"), max_lines=1, min_width=110)
                self.height = gr.Textbox(label=say("draw.height"), max_lines=1, min_width=110)
            gr.Markdown(say("draw.more.info"), elem_classes="note")
        turn = "turn" if read_gpus() else "machine"
        titles = {"turn": say(f"draw.where.{turn}"), "beside": say("draw.where.beside")}
        self.where = gr.Radio(
            [(titles[name], name) for name in WHERE],
            value=WHERE[0],
            label=say("draw.where"),
            info=say("draw.where.info"),
            elem_id="draw-where",
        )
        self.start = gr.Button(say("draw.start"), variant="primary", elem_id="draw-start")
