"""What is known of the chosen base model: what it is, what is wrong with it, its licence, and its download."""

from typing import Any

from lora_fp8 import families
from lora_fp8.errors import UserError
from lora_fp8.families import sources
from lora_fp8.families.sources import known_bases, places
from lora_fp8.families.sources.reference import suggest

from ... import base_models, downloads, hub_login, sanitize
from ...context import Ui
from .base_rendering import format_seconds, format_size, render_link
from .cards import render_button
from .draft_reader import DraftReader
from .problems import Problems

HOSTS = {"hub": "Hugging Face", "modelscope": "ModelScope", "civitai": "Civitai"}
TOKENS = "https://huggingface.co/settings/tokens"


class BaseState:
    """Renders the state of the draft's base model in one language."""

    def __init__(self, ui: Ui, reader: DraftReader, problems: Problems):
        self.ui, self.reader, self.problems = ui, reader, problems
        self.downloads = downloads.Downloads(ui.place.home)
        self.login = hub_login.HubLogin()

    def describe(self, values: dict[str, Any]) -> sources.BaseDescription | None:
        """Return what the hub answers about the base, with the files that are here now; None if there is no answer."""
        described = self.reader.describe_base(values)
        return places.with_local_files(described) if described else None

    def needs_token(self, values: dict[str, Any]) -> bool:
        """Return True if the base is gated on Hugging Face and this machine may not read it."""
        described = self.describe(values)
        return bool(described and described.reference.kind == "hub" and _is_closed(described))

    def render(self, values: dict[str, Any]) -> str:
        """Render the state."""
        path, family = str(values["model.path"] or ""), str(values["model.family"])
        if not path:
            return self._wrap(self._render_paragraph("base.state.none"))
        if not base_models.is_remote(path):
            key = "base.state.demo" if path == "demo" else "base.state.local"
            recognized = family if path == "demo" else self.reader.inspect_base(path).family
            state = self._render_problems(values, None) or self._render_paragraph(key, "yes")
            return self._wrap(self._render_title(path, recognized), state)
        described, known = self.describe(values), known_bases.get(path)
        title = self._render_title(path, find_family(described) or (known.family if known else ""))
        if described is None:
            host = HOSTS[sources.parse(path).kind]
            return self._wrap(title, self._render_paragraph("base.state.looking", "busy", host=host))
        return self._wrap(title, self._render_remote(values, described))

    def _render_remote(self, values: dict[str, Any], described: sources.BaseDescription) -> str:
        """Render what a hub says of a base: its gate, what is wrong with it, or its download."""
        again = render_button(self.ui, "again", "base.again")
        if _is_closed(described):
            return self._render_gate(described, again)
        licence = self._render_licence(described)
        if wrong := self._render_problems(values, described):
            return licence + wrong
        if described.unanswered:
            why = self.ui.translate(described.unanswered)
            return licence + self._render_paragraph("base.state.unknown", why=why) + self._wrap_buttons(again)
        notes = "".join(f'<p class="note">{sanitize.escape(self.ui.translate(line))}</p>' for line in described.notes)
        return licence + self._render_download(values, described) + notes

    def _render_title(self, path: str, family: str) -> str:
        known = known_bases.get(path)
        titles = self.reader.families
        name = known.title if known else sanitize.shorten(path, 90)
        facts = []
        if family in titles:
            if path == "demo":
                name = self.ui.say("base.card.demo", title=titles[family])
            else:
                facts = [titles[family]] if titles[family] != name else []
            size = None if path == "demo" else families.get(family).native_resolution
            facts += [self.ui.say("base.state.pixels", pixels=size)] if size else []
        rest = "".join(f"<span>{sanitize.escape(fact)}</span>" for fact in facts)
        return f'<p class="chosen"><strong>{sanitize.escape(name)}</strong>{rest}</p>'

    def _render_licence(self, described: sources.BaseDescription) -> str:
        if described.licence is None:
            return ""
        name = render_link(described.licence.link, described.licence.name)
        return f'<p class="note">{sanitize.escape(self.ui.say("base.state.licence"))}: {name}</p>'

    def _render_problems(self, values: dict[str, Any], described: sources.BaseDescription | None) -> str:
        """Render everything that is wrong with the base, and buttons that mend it; "" if nothing is."""
        lines = [line for key, line in self.problems.list_base_problems(values) if line]
        if not lines:
            return ""
        sentences = (line.removeprefix("model.path = ").removeprefix("model.path: ") for line in dict.fromkeys(lines))
        items = "".join(f"<li>{sanitize.escape(sentence)}</li>" for sentence in sentences)
        buttons = ""
        path, family = str(values["model.path"] or ""), str(values["model.family"])
        recognized = described.family if described else self.reader.inspect_base(path).family
        if recognized and not base_models.fits_family(base_models.Base(recognized), family):
            title = self.reader.families[recognized]
            buttons += render_button(self.ui, "adopt", "base.adopt", "main", family=recognized, title=title)
        elif meant := _find_meant(path, recognized):
            buttons += render_button(self.ui, "choose", "base.use", "main", base=meant, name=meant)
        if described:
            buttons += render_button(self.ui, "again", "base.again")
        return f'<ul class="problems" role="alert">{items}</ul>{self._wrap_buttons(buttons)}'

    def _render_gate(self, described: sources.BaseDescription, again: str) -> str:
        """Render what a gated model asks for. The field for the token stands below, as a component of its own."""
        if described.gate is None or described.reference.kind != "hub":
            return "".join(f'<p class="wrong">{sanitize.escape(self.ui.translate(p))}</p>' for p in described.problems)
        key = "base.gate.stranger" if described.gate.has_token else "base.gate.about"
        licence = self._render_licence(described)
        links = render_link(described.gate.link, self.ui.say("base.gate.accept"), "choice-button main")
        links += render_link(TOKENS, self.ui.say("base.gate.tokens"), "choice-button")
        return f'{licence}<p class="gate">{sanitize.escape(self.ui.say(key))}</p>{self._wrap_buttons(links + again)}'

    def render_login(self) -> str:
        """Render what became of the token that was given."""
        login = self.login.login
        if not login.state:
            return ""
        why = self.ui.translate(login.why)
        kind = {"checking": "busy", "saved": "yes"}.get(login.state, "wrong")
        text = self.ui.say(f"base.token.{login.state}", name=login.name, why=why)
        return f'<p class="{kind}" role="status">{sanitize.escape(text)}</p>'

    def _render_download(self, values: dict[str, Any], described: sources.BaseDescription) -> str:
        """Render that the base is complete, what is missing, or how far its download is."""
        if not described.missing:
            return self._render_paragraph("base.state.complete", "yes")
        download = self.downloads.read(described.reference.name, str(values["model.revision"] or ""))
        if download and download.state in ("running", "cancelling"):
            return self._render_progress(download)
        html = ""
        if download and download.state == "cancelled":
            html = self._render_paragraph("base.download.cancelled")
        elif download and download.state == "failed":
            why = self.ui.translate(download.error) or self.ui.say("base.download.ended")
            html = self._render_paragraph("base.download.failed", "wrong", why=why)
        missing = places.count_missing_bytes(described)
        key = "base.download.again" if download and download.state != "done" else "base.download"
        button = render_button(self.ui, "download", key, "main")
        free = format_size(described.free_bytes or 0)
        html += self._render_paragraph("base.state.missing", missing=format_size(missing), free=free)
        return html + self._wrap_buttons(button)

    def _render_progress(self, download: downloads.Download) -> str:
        say, escape = self.ui.say, sanitize.escape
        if not download.total:
            text, share = say("base.download.starting"), 0.0
        else:
            share = min(1.0, download.done / download.total)
            done, total = format_size(download.done), format_size(download.total)
            facts = [say("base.download.progress", done=done, total=total)]
            if download.waiting:
                facts.append(self.ui.translate(download.waiting))
            else:
                facts.append(say("base.download.speed", speed=format_size(download.speed)))
                facts += (
                    [say("base.download.eta", time=format_seconds(download.eta))] if download.eta is not None else []
                )
            text = " · ".join(facts)
        button, note = render_button(self.ui, "cancel", "base.download.cancel"), say("base.download.closing")
        if download.state == "cancelling":
            button, note = "", say("base.download.cancelling")
        return (
            f'<div class="bar" role="progressbar" aria-label="{escape(say("base.download.label"))}" aria-valuemin="0" '
            f'aria-valuemax="100" aria-valuenow="{100 * share:.0f}"><i style="width: {100 * share:.1f}%"></i></div>'
            f'<p class="figures">{escape(text)}</p><p class="note">{escape(note)}</p>{self._wrap_buttons(button)}'
        )

    def _render_paragraph(self, key: str, kind: str = "", **values: Any) -> str:
        return f'<p class="{kind}">{sanitize.escape(self.ui.say(key, **values))}</p>'

    @staticmethod
    def _wrap_buttons(buttons: str) -> str:
        return f'<div class="base-buttons">{buttons}</div>' if buttons else ""

    @staticmethod
    def _wrap(*parts: str) -> str:
        return f'<div class="base-state">{"".join(parts)}</div>'


def find_family(described: sources.BaseDescription | None) -> str:
    """Return the architecture that a base's files tell; "" if they do not, or are behind a gate."""
    return "" if described is None or _is_closed(described) else described.family


def _is_closed(described: sources.BaseDescription) -> bool:
    return described.gate is not None and described.gate.is_open is False


def _find_meant(path: str, recognized: str) -> str:
    """Return the known base that a misspelt name probably means; "" if there is none, or the base exists."""
    if recognized:
        return ""
    try:
        reference = sources.parse(path)
    except UserError:
        return ""
    return suggest(reference) or "" if reference.kind in ("hub", "path") and "\\" not in path else ""
