"""The Settings page: which folders the page may use, which tokens are set, and the versions on this machine."""

import os
import platform
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gradio as gr
import psutil

from lora_fp8.common.gpu import read_gpus
from lora_fp8.errors import UserError

from .. import base_models, live_panel, notifications, sanitize, tour
from ..context import Ui

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "SWANLAB_API_KEY")
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "bitsandbytes", "accelerate", "safetensors", "gradio")
GIB = 2**30
EXAMPLES = {"root": "~/pictures", "models": "~/models"}
QUIET = live_panel.make_private_event(queue=False)


def build(ui: Ui) -> None:
    """Lay the page out."""
    say, place = ui.say, ui.place
    gr.Markdown(f"## {say('place.folders')}\n\n{say('place.folders.about')}")
    roots = _Folders(ui, "root", lambda: place.added, place.add_root, place.remove_root, lambda: _render_roots(ui))
    gr.Markdown(f"## {say('place.models')}\n\n{say('place.models.about')}")
    models = _Folders(
        ui, "models", lambda: place.models, place.add_models, place.remove_models, lambda: _render_models(ui)
    )
    gr.Markdown(f"## {say('notify.title')}\n\n{say('notify.about')}")
    gr.HTML(notifications.render_button(ui), elem_classes="notify-box")
    hook = notifications.WebhookSection(ui)
    gr.Markdown(f"## {say('place.language')}\n\n{say('place.language.about')}")
    gr.HTML(tour.render_again(ui), elem_classes="notify-box")
    gr.Markdown(f"## {say('place.secrets')}\n\n{say('place.secrets.about')}")
    secrets = gr.HTML(padding=False)
    gr.Markdown(f"## {say('place.about')}")
    about = gr.HTML(elem_id="about", padding=False)
    for folders in (roots, models):
        folders.bind_events([roots, models])
    hook.bind_events()
    live_panel.get_load_event()(
        lambda: [*roots.render(), *models.render(), *hook.update_components(), _render_secrets(ui), _render_about(ui)],
        None,
        [*roots.components, *models.components, *hook.components, secrets, about],
        **QUIET,
    )


class _Folders:
    """A list of folders, with a field to add one and a menu to remove those that were added.

    Args:
        name: prefix of the elements' ids.
        added, add, remove: list, add and remove folders; methods of `Place`.
        render_list: returns the list as HTML.
    """

    def __init__(
        self,
        ui: Ui,
        name: str,
        added: Callable[[], Sequence[Path]],
        add: Callable[[str], object],
        remove: Callable[[str], None],
        render_list: Callable[[], str],
    ):
        self.ui, self.added, self.render_list = ui, added, render_list
        self.do = {"add": add, "remove": remove}
        self.list = gr.HTML(padding=False)
        wrong = gr.HTML(padding=False, visible=False)
        with gr.Row():
            self.path = gr.Textbox(
                label=ui.say("place.path"), placeholder=EXAMPLES[name], scale=4, elem_id=f"{name}-path"
            )
            self.add = gr.Button(ui.say("place.add"), elem_id=f"{name}-add", elem_classes="beside")
        with gr.Row(visible=False) as row:
            self.removing = gr.Dropdown(label=ui.say("place.removing"), choices=[], scale=4)
            self.remove = gr.Button(ui.say("place.remove"), elem_id=f"{name}-remove", elem_classes="beside")
        self.components = [self.list, wrong, self.path, self.removing, row]

    def bind_events(self, all_: Sequence["_Folders"]) -> None:
        """Bind the buttons. A change repaints every list, since a folder for models is also an allowed folder."""
        outputs = [part for folders in all_ for part in folders.components]

        def change_list(what: str, text: str | None) -> list[Any]:
            error = ""
            try:
                if text or what == "add":
                    self.do[what](text or "")
            except UserError as caught:
                error = str(caught)
            mine = self.render(error, done=what == "add" and not error)
            # Input beside the other list stays: it may be the user's next step.
            others = {
                folders: [folders.render_list(), *[gr.skip()] * (len(folders.components) - 1)] for folders in all_
            }
            return [part for parts in (others | {self: mine}).values() for part in parts]

        gr.on([self.add.click, self.path.submit], partial(change_list, "add"), self.path, outputs, **QUIET)
        self.remove.click(partial(change_list, "remove"), self.removing, outputs, **QUIET)

    def render(self, error: str = "", done: bool = False) -> list[Any]:
        """Return values for `components`. What was typed stays, unless adding it was `done`."""
        added = [str(path) for path in self.added()]
        message = f'<p class="wrong" role="alert">{sanitize.escape(self.ui.translate(error))}</p>' if error else ""
        offered = gr.update(choices=added, value=added[0] if added else None)
        typed = "" if done else gr.skip()
        return [
            self.render_list(),
            gr.update(value=message, visible=bool(message)),
            typed,
            offered,
            gr.update(visible=bool(added)),
        ]


def _render_table(rows: list[tuple[str, str]]) -> str:
    """Render rows of (title, value), both plain text, as HTML."""
    cells = "".join(
        f"<tr><th>{sanitize.escape(title)}</th><td>{sanitize.escape(value)}</td></tr>" for title, value in rows
    )
    return f'<table class="facts">{cells}</table>'


def _render_roots(ui: Ui) -> str:
    place = ui.place
    kinds = {"given": place.given, "added": place.added, "models": place.models}
    rows = []
    for root in place.roots:
        kind = next((kind for kind, those in kinds.items() if root in those), "own")
        origin = ui.say("place.for_models" if kind == "models" else f"place.{kind}")
        rows.append((root, origin + (_mark_missing(ui, root) if kind != "own" else "")))
    return _render_list("roots", rows)


def _render_models(ui: Ui) -> str:
    """List each folder for models with the number of models found in it."""
    counts = [(folder, len(base_models.find_base_models([folder], []))) for folder in ui.place.models]
    rows = [(folder, ui.say("place.models.found", count=count) + _mark_missing(ui, folder)) for folder, count in counts]
    return _render_list("models", rows, ui.say("place.models.none"))


def _mark_missing(ui: Ui, folder: Path) -> str:
    return "" if folder.is_dir() else f" · {ui.say('place.gone')}"


def _render_list(id: str, rows: list[tuple[Path, str]], empty: str = "") -> str:
    cells = "".join(f"<tr><td>{sanitize.escape(path)}</td><td>{sanitize.escape(note)}</td></tr>" for path, note in rows)
    cells = cells or f'<tr><td class="note">{sanitize.escape(empty)}</td></tr>'
    return f'<table class="facts" id="{id}">{cells}</table>'


def _render_secrets(ui: Ui) -> str:
    """List the names of tokens and whether each is set. No value is shown."""
    login = Path(os.environ.get("HF_TOKEN_PATH") or _find_hub_home() / "token").is_file()
    secrets = [(name, bool(os.environ.get(name))) for name in TOKENS]
    secrets.append((ui.say("place.secrets.login"), login))
    return _render_table([(name, ui.say("place.present" if there else "place.absent")) for name, there in secrets])


def _find_hub_home() -> Path:
    """Return huggingface_hub's folder, found as huggingface_hub finds it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()


def _find_hub_host() -> str:
    """Return huggingface_hub's endpoint without a user name and password that its address may hold."""
    given = os.environ.get("HF_ENDPOINT")
    try:
        return urlsplit(given).hostname or "HF_ENDPOINT" if given else "huggingface.co"
    except ValueError:  # not an address: jobs will say so
        return "HF_ENDPOINT"


def _render_about(ui: Ui) -> str:
    say, home = ui.say, ui.place.home
    libraries = [_format_version(name) for name in LIBRARIES]
    memory, disk = psutil.virtual_memory().total / GIB, psutil.disk_usage(str(home))
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    cards = [f"{gpu.name} ({gpu.total / GIB:.1f} GiB)" if gpu.total else gpu.name for gpu in read_gpus()]
    return _render_table(
        [
            (say("place.version"), _format_version("lora-fp8")),
            (say("place.python"), platform.python_version()),
            (say("place.libraries"), ", ".join(libraries)),
            (say("place.machine"), say("place.machine.value", system=system, cores=os.cpu_count(), memory=memory)),
            (say("place.cards"), "; ".join(cards) or say("place.cards.none")),
            (say("place.hub"), say("place.hub.value", host=_find_hub_host())),
            (say("place.home"), str(home)),
            (say("place.disk"), say("place.disk.value", free=disk.free / GIB, total=disk.total / GIB)),
        ]
    )


def _format_version(package: str) -> str:
    """Return "torch 2.13.0", or a dash if the package is not installed, as in a checkout that is run in place."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} –"
