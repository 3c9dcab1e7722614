"""Tell people that a job has ended: in the browser, and at a webhook.

static/notify.js asks /ended every few seconds while a page is open and notifications are switched on, which only a
button does. The webhook is told by the worker (lora_fp8.jobs.webhook), also while no page is open.
"""

import time
from typing import Any

import gradio as gr
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from lora_fp8.errors import Message, UserError
from lora_fp8.jobs import ENDED, JobView, webhook
from lora_fp8.jobs.worker import read_settings

from . import live_panel, run_cards, run_monitor, translations
from .context import Place, Ui
from .sanitize import escape

MOST = 20
"""Jobs in one answer, newest first."""


def add_routes(app: FastAPI, place: Place) -> None:
    """Add /ended to the site: the jobs that ended after a time, and the time now."""

    @app.get("/ended")
    def ended(after: float = 0.0, language: str = "en") -> Response:
        ui = Ui(language if language in translations.LANGUAGES else "en", place)
        now = time.time()
        try:
            views = run_monitor.get_monitor(place).views()
        except UserError:  # a damaged queue, which the page of the queue describes
            views = []
        news = [_describe(ui, view) for view in list_news(views, after)] if after else []
        return JSONResponse({"now": now, "jobs": news}, headers={"Cache-Control": "no-store"})


def list_news(views: list[JobView], after: float) -> list[JobView]:
    """List the jobs that ended after a time and are news to somebody who does not watch them, newest first."""
    news = [
        view
        for view in views
        if view.state in ENDED
        and view.state != "cancelled"
        and view.ended > after
        and view.command[:1] not in [(command,) for command in webhook.QUIET]
    ]
    return sorted(news, key=lambda view: -view.ended)[:MOST]


def _describe(ui: Ui, view: JobView) -> dict[str, Any]:
    state = ui.say(f"state.{view.state}")
    return {
        "id": str(view.id),
        "ended": view.ended,
        "title": f"{run_cards.translate_title(ui, view)} · {state}",
        "body": run_cards.translate_sentence(ui, view.sentence)[:300],
        "link": ui.make_link("run", run=str(view.id)) if view.kind == "train" else ui.make_link(""),
    }


def render_button(ui: Ui) -> str:
    """Render the button that switches the browser's notifications on and off; static/notify.js answers it."""
    texts = {name: ui.say(f"notify.{name}") for name in ("on", "off", "denied", "unable")}
    data = "".join(f' data-{name}="{escape(text)}"' for name, text in texts.items())
    return (
        f'<div class="notify"><button type="button" id="notify" aria-pressed="false"{data}>{escape(texts["off"])}'
        '</button><span class="note" role="status"></span></div>'
    )


class WebhookSection:
    """The part of the Settings page that sets the webhook: its address, a test message, and how the last one went."""

    def __init__(self, ui: Ui):
        self.ui = ui
        gr.Markdown(ui.say("notify.webhook_about"))
        self.status = gr.HTML(padding=False, elem_id="webhook-status")
        with gr.Row():
            self.address = gr.Textbox(
                label=ui.say("notify.webhook"), placeholder="https://", scale=4, max_lines=1, elem_id="webhook"
            )
            self.save = gr.Button(ui.say("notify.save"), elem_id="webhook-save", elem_classes="beside")
        with gr.Row():
            self.test = gr.Button(ui.say("notify.test"), elem_id="webhook-test", size="sm")
            self.remove = gr.Button(ui.say("notify.remove"), elem_id="webhook-remove", size="sm")
        self.note = gr.HTML(padding=False, visible=False)

    @property
    def components(self) -> list[Any]:
        """Return what `update_components` returns values for."""
        return [self.status, self.test, self.remove]

    def bind_events(self) -> None:
        """Bind the buttons."""
        quiet = live_panel.make_private_event(queue=False)
        outputs = [self.note, self.address, *self.components]
        gr.on([self.save.click, self.address.submit], self.save_address, [self.address], outputs, **quiet)
        self.remove.click(self.remove_address, None, outputs, **quiet)
        self.test.click(self.announce_test, None, [self.note], **quiet).then(self.send_test, None, outputs, **quiet)

    def update_components(self) -> list[Any]:
        """Return values for `components`."""
        try:
            address = read_settings(self.ui.place.home).webhook
        except UserError as error:
            status = f'<p class="wrong">{escape(self.ui.translate(str(error)))}</p>'
            return [status, *[gr.update(visible=False)] * 2]
        result = webhook.read_result(self.ui.place.home)
        line = self.ui.say("notify.set", host=webhook.get_host(address)) if address else self.ui.say("notify.unset")
        status = f"<p>{escape(line)}</p>"
        if address and result and result["host"] == webhook.get_host(address):
            when, problem = run_cards.format_time(result["t"]), self.ui.translate(result["problem"])
            line = self.ui.say("notify.failed" if problem else "notify.delivered", when=when, problem=problem)
            status += f'<p class="{"wrong" if problem else "note"}">{escape(line)}</p>'
        return [status, *[gr.update(visible=bool(address))] * 2]

    def save_address(self, address: str) -> list[Any]:
        """Handle a new address. It is not shown again, as whoever has it may post."""
        try:
            self._write(_require_address(address))
        except UserError as error:
            return [self._show_message(self.ui.translate(str(error)), wrong=True), gr.skip(), *self.update_components()]
        return [self._show_message(self.ui.say("notify.saved")), "", *self.update_components()]

    def remove_address(self) -> list[Any]:
        """Handle the button that switches the webhook off."""
        try:
            self._write("")
        except UserError as error:
            return [self._show_message(self.ui.translate(str(error)), wrong=True), gr.skip(), *self.update_components()]
        return [self._show_message(self.ui.say("notify.removed")), gr.skip(), *self.update_components()]

    def announce_test(self) -> Any:
        """Say that a message is being sent: a server may take seconds to answer."""
        return self._show_message(self.ui.say("notify.sending"))

    def send_test(self) -> list[Any]:
        """Handle the button that sends a message now."""
        try:
            address = _require_address(read_settings(self.ui.place.home).webhook)
            about = {"job": 0, "name": "lora_fp8", "kind": "test", "state": "done"}
            now = time.time()
            webhook.post(address, webhook.make_body(about, self.ui.say("notify.hello"), launched=now, ended=now))
        except webhook.Undelivered as error:
            webhook.write_result(self.ui.place.home, address, str(error))
            return [self._show_message(self.ui.translate(str(error)), wrong=True), gr.skip(), *self.update_components()]
        except UserError as error:
            return [self._show_message(self.ui.translate(str(error)), wrong=True), gr.skip(), *self.update_components()]
        webhook.write_result(self.ui.place.home, address, "")
        return [self._show_message(self.ui.say("notify.sent")), gr.skip(), *self.update_components()]

    def _write(self, address: str) -> None:
        place = self.ui.place
        if place.fixed:
            raise UserError(
                Message(
                    "this page is open to other machines: set `webhook` in {path} on the computer that trains",
                    path=place.home / "worker.toml",
                )
            )
        webhook.write_address(place.home, address)

    def _show_message(self, line: str, wrong: bool = False) -> Any:
        return gr.update(value=live_panel.render_toast(escape(line), " wrong" if wrong else ""), visible=True)


def _require_address(address: str) -> str:
    if not address.strip():
        raise UserError(Message("`webhook`: the address is missing. Paste it, or choose Remove."))
    return address
