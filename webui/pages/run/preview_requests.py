"""The part of a run's page that asks for previews while it trains: an image at once, and other prompts from now on."""

from typing import Any

import gradio as gr
from gradio.blocks import Block

from lora_fp8 import config
from lora_fp8.errors import Message, UserError
from lora_fp8.jobs import JobView
from lora_fp8.run import Run, preview_requests
from lora_fp8.run.run_log import RunLog

from ... import drawings, live_panel, run_monitor, setting_values
from ...context import Ui
from ...sanitize import escape, shorten
from .. import runs

MOST_PROMPTS = 20
SIDE = 640


class PreviewRequests:
    """Components and handlers of one language."""

    def __init__(self, ui: Ui):
        self.ui = ui
        say = ui.say
        with gr.Row(elem_id="preview-requests"):
            with gr.Accordion(say("previews.now"), open=False, elem_id="sample-now"):
                self.prompt = gr.Textbox(label=say("draw.prompt"), lines=2, elem_id="sample-prompt")
                self.negative = gr.Textbox(label=say("draw.negative"), max_lines=1)
                self.seed = gr.Textbox(label=say("draw.seed"), max_lines=1)
                self.ask = gr.Button(say("previews.draw"), variant="primary", elem_id="sample-ask")
            with gr.Accordion(say("previews.change"), open=False, elem_id="change-prompts"):
                self.prompts = gr.Textbox(
                    label=say("previews.prompts"), info=say("previews.prompts.info"), lines=4, elem_id="new-prompts"
                )
                self.new_negative = gr.Textbox(label=say("draw.negative"), max_lines=1)
                with gr.Row():
                    self.load = gr.Button(say("previews.load"), elem_id="load-prompts")
                    self.apply = gr.Button(say("previews.apply"), variant="primary", elem_id="apply-prompts")
        self.note = live_panel.make_panel(elem_id="previews-note", visible=False)

    def bind(self, find: Any) -> None:
        """Bind the buttons.

        Args:
            find: returns the run that a request names, as `handlers.find_run`.
        """
        self.find = find
        now = live_panel.make_private_event(queue=False)
        sample: dict[str, Block] = {"prompt": self.prompt, "negative": self.negative, "seed": self.seed}
        self.ask.click(self.request_sample, inputs_kwargs=sample, outputs=[self.note], **now)
        self.load.click(self.load_prompts, outputs=[self.prompts, self.new_negative], **now)
        changes: dict[str, Block] = {"prompts": self.prompts, "negative": self.new_negative}
        self.apply.click(self.change_prompts, inputs_kwargs=changes, outputs=[self.note], **now)

    def request_sample(self, request: gr.Request, prompt: str, negative: str, seed: str) -> Any:
        """Handle the button that draws an image at once."""
        try:
            run, _ = self._open(request)
            changes: dict[str, Any] = {"prompts": [_check_prompt(prompt)]}
            changes |= {"negative": _check_prompt(negative)} if str(negative or "").strip() else {}
            changes |= {"seed": drawings.check_number(seed, int, "seed")} if str(seed or "").strip() else {}
            self._check(run, {**preview_requests.read_changes(run), **changes})
            preview_requests.request_sample(run, changes)
        except UserError as error:
            return self._show_problems(error)
        return runs.show_notice(self.ui.say("previews.asked"))

    def load_prompts(self, request: gr.Request) -> list[Any]:
        """Handle the button that shows the prompts in force."""
        try:
            run, _ = self._open(request, must_train=False)
            preview = self._check(run, preview_requests.read_changes(run))
        except UserError:
            return [gr.skip(), gr.skip()]
        return ["\n".join(" ".join(prompt.split()) for prompt in preview.prompts), preview.negative]

    def change_prompts(self, request: gr.Request, prompts: str, negative: str) -> Any:
        """Handle the button that changes the preview prompts from now on."""
        try:
            run, _ = self._open(request)
            lines = [_check_prompt(line) for line in str(prompts or "").splitlines() if line.strip()]
            if not 0 < len(lines) <= MOST_PROMPTS:
                raise UserError(Message("give 1 to {count} prompts, one per line", count=MOST_PROMPTS))
            changes = {**preview_requests.read_changes(run), "prompts": lines, "negative": str(negative or "").strip()}
            self._check(run, changes)
            preview_requests.write_changes(run, changes)
        except UserError as error:
            return self._show_problems(error)
        return runs.show_notice(self.ui.say("previews.changed"))

    def _show_problems(self, error: UserError) -> Any:
        lines = [setting_values.describe_problem(self.ui, line) for line in error.problems]
        return runs.show_notice(("; " if self.ui.language == "en" else "；").join(lines), wrong=True)

    def _open(self, request: gr.Request, must_train: bool = True) -> tuple[Run, JobView]:
        view, log = self.find(self.ui, request)
        run = Run.open(run_monitor.get_run_folder(self.ui, view))
        if must_train and not (run.is_locked() and log.facts.stage == "train"):
            raise UserError(Message("the run is not training now; draw with it on the page “Try it”"))
        return run, view

    def _check(self, run: Run, changes: dict[str, Any]) -> Any:
        """Return the `[preview]` table with these changes. Raises UserError where the trainer would refuse them."""
        job = config.load(run.config_file, [])
        controls = job.preview.controls[: len(changes.get("prompts") or ())] if "prompts" in changes else None
        if controls is not None:
            job = job.model_copy(update={"preview": job.preview.model_copy(update={"controls": controls})})
        return config.apply_preview_changes(job, changes)


def _check_prompt(text: str | None) -> str:
    prompt = str(text or "").strip()
    if not prompt:
        raise UserError(Message("write a prompt first"))
    drawings.check_length(prompt)
    return prompt


def render_samples(ui: Ui, view: JobView, log: RunLog) -> str:
    """Render the images that were asked for, newest first, and how many are waiting."""
    folder = run_monitor.get_run_folder(ui, view)
    waiting = len(preview_requests.list_samples(Run(folder)))
    note = f'<p class="dim" role="status">{ui.say("previews.waiting", count=waiting)}</p>' if waiting else ""
    cards = ""
    for event in reversed(log.facts.samples):
        names, prompts = event.get("images"), event.get("prompts")
        if not (isinstance(names, list) and names and isinstance(prompts, list) and prompts):
            continue
        path = folder / str(names[0])
        if path.parent != folder / "samples":  # a log could name any file
            continue
        text = escape(shorten(prompts[0], 200))
        about = f"{ui.say('run.at', step=event['step'])} · {ui.say('draw.seed')} {escape(event.get('seed', '?'))}"
        cards += (
            f'<figure><img src="{escape(ui.make_picture_link(path, SIDE))}" alt="{text}" loading="lazy">'
            f'<figcaption>{text}<br><span class="dim">{about}</span></figcaption></figure>'
        )
    title = f"<h3>{ui.say('previews.samples')}</h3>" if cards else ""
    return f'{note}{title}<div class="samples">{cards}</div>' if note or cards else ""
