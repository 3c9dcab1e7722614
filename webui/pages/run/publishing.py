"""The part of a run's page that publishes its LoRA: a package to download, and an upload to the Hugging Face Hub."""

from typing import Any

import gradio as gr
from gradio.blocks import Block

from lora_fp8.errors import Message, UserError
from lora_fp8.tools import hub

from ... import hub_uploads, live_panel, run_monitor
from ...context import Ui
from ...sanitize import escape
from .. import runs

FIELDS = {"--trigger": "run.kit_trigger", "--license": "run.kit_licence", "--description": "run.kit_description"}
"""Options of `lora-fp8 kit` -> the fields in their place."""


def describe_note(ui: Ui, note: str) -> str:
    """Describe a note of `lora-fp8 kit` in the page's language: with fields in place of options."""
    option = note.rpartition(" ")[2]
    if option in FIELDS:
        return ui.say("run.kit_missing", field=ui.say(FIELDS[option]))
    return ui.say("run.kit_no_base") if option == "--base-model" else ui.translate(note)


REFUSALS: dict[str, tuple[str, str]] = {
    hub.EXISTS: ("push.exists", "push.update"),
    hub.NOT_THERE: ("push.not_there", "push.update"),
    hub.STAYS_PRIVATE: ("push.stays_private", "push.public"),
}
"""Messages that name an option of `lora-fp8 push` -> what the page says, and the box in the option's place."""


def describe_refusal(ui: Ui, error: UserError) -> str:
    """Describe why nothing is uploaded: with the page's boxes in place of options."""
    lines = []
    for line in error.problems:
        template = line.template if isinstance(line, Message) else ""
        if isinstance(line, Message) and template in REFUSALS:
            key, box = REFUSALS[template]
            lines.append(ui.say(key, field=ui.say(box), **line.values))
        else:
            lines.append(ui.translate(line))
    return "\n".join(lines)


class Publishing:
    """Components and handlers of one language. `make_kit` is the handler of the package."""

    def __init__(self, ui: Ui):
        self.ui = ui
        say = ui.say
        with gr.Accordion(say("run.kit"), open=False, elem_id="publish"):
            gr.Markdown(say("run.kit_about"))
            with gr.Row():
                self.title = gr.Textbox(label=say("run.kit_title"), max_lines=1)
                self.trigger = gr.Textbox(label=say("run.kit_trigger"), max_lines=1)
                self.licence = gr.Textbox(label=say("run.kit_licence"), max_lines=1, placeholder="apache-2.0")
            self.description = gr.Textbox(label=say("run.kit_description"), lines=2)
            self.make = gr.Button(say("run.kit_make"), elem_id="kit")
            self.made = live_panel.make_panel(elem_id="made", visible=False)
            gr.Markdown(f"### Hugging Face\n\n{say('push.about')}")
            self.repo = gr.Textbox(
                label=say("push.repo"),
                info=say("push.repo_info"),
                placeholder="my-lora",
                max_lines=1,
                elem_id="push-repo",
            )
            with gr.Row():
                self.public = gr.Checkbox(label=say("push.public"), value=False, elem_id="push-public")
                self.update = gr.Checkbox(label=say("push.update"), value=False, elem_id="push-update")
            self.push = gr.Button(say("push.push"), variant="primary", elem_id="push")
            self.note = live_panel.make_panel(elem_id="push-note", visible=False)
            self.pushed = live_panel.make_panel(elem_id="pushed")

    def bind(self, find: Any, write_kit: Any) -> None:
        """Bind the buttons.

        Args:
            find: returns the run that a request names, as `handlers.find_run`.
            write_kit: the handler that makes the package.
        """
        self.find = find
        texts: dict[str, Block] = {
            "title": self.title,
            "trigger": self.trigger,
            "licence": self.licence,
            "description": self.description,
        }
        working = live_panel.make_private_event(show_progress="minimal", concurrency_limit=2)
        announcing = live_panel.make_private_event(queue=False)
        self.make.click(self.announce_kit, outputs=[self.made], **announcing).then(
            write_kit, inputs_kwargs=texts, outputs=[self.made], **working
        )
        target: dict[str, Block] = {"repo": self.repo, "public": self.public, "update": self.update}
        self.push.click(self.start_push, inputs_kwargs={**target, **texts}, outputs=[self.note], **working)

    def announce_kit(self) -> Any:
        """Say that the package is being made, which takes some seconds."""
        return gr.update(value=f'<p class="dim">{escape(self.ui.say("run.kit_making"))}</p>', visible=True)

    def start_push(self, request: gr.Request, repo: str, public: bool, update: bool, **texts: str) -> Any:
        """Handle the button that uploads: what is missing is said before anything is queued."""
        if not repo.strip():
            return runs.show_notice(self.ui.say("push.no_repo"), wrong=True)
        try:
            view, _ = self.find(self.ui, request)
            folder = run_monitor.get_run_folder(self.ui, view)
            texts["license"] = texts.pop("licence", "")
            target = hub_uploads.start(self.ui, folder, repo, texts, public=public, update=update)
        except UserError as error:
            return runs.show_notice(describe_refusal(self.ui, error), wrong=True)
        return runs.show_notice(self.ui.say("push.queued", repo=target.repo))
