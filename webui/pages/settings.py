"""Page: settings. Which folders the page may use, which tokens there are, and what this machine is."""

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

from lora_fp8.config import UserError

from .. import bases, live, safe, watch
from ..context import Ui

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "SWANLAB_API_KEY")
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "bitsandbytes", "accelerate", "safetensors", "gradio")
GIB = 2**30
EXAMPLES = {"root": "~/pictures", "models": "~/models"}
QUIET: dict[str, Any] = {"api_visibility": "private", "show_progress": "hidden", "queue": False}


def build(ui: Ui) -> None:
    """Lay the page out."""
    say, place = ui.say, ui.place
    gr.Markdown(f"## {say('place.folders')}\n\n{say('place.folders.about')}")
    roots = _Folders(ui, "root", lambda: place.added, place.add_root, place.remove_root, lambda: _roots(ui))
    gr.Markdown(f"## {say('place.models')}\n\n{say('place.models.about')}")
    models = _Folders(ui, "models", lambda: place.models, place.add_models, place.remove_models, lambda: _models(ui))
    gr.Markdown(f"## {say('place.language')}\n\n{say('place.language.about')}")
    gr.Markdown(f"## {say('place.secrets')}\n\n{say('place.secrets.about')}")
    secrets = gr.HTML(padding=False)
    gr.Markdown(f"## {say('place.about')}")
    about = gr.HTML(elem_id="about", padding=False)
    for one in (roots, models):
        one.wire([roots, models])
    live.opened()(
        lambda: [*roots.listed(), *models.listed(), _secrets(ui), _about(ui)],
        None,
        [*roots.shown, *models.shown, secrets, about],
        **QUIET,
    )


class _Folders:
    """A list of folders to which one can be added, and from which those that were added can be taken back.

    Args:
        name: begins the ids of its parts.
        added, add, remove: of the place.
        told: the list as HTML.
    """

    def __init__(
        self,
        ui: Ui,
        name: str,
        added: Callable[[], Sequence[Path]],
        add: Callable[[str], object],
        remove: Callable[[str], None],
        told: Callable[[], str],
    ):
        self.ui, self.added, self.told = ui, added, told
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
        self.shown = [self.list, wrong, self.path, self.removing, row]

    def wire(self, all_: Sequence["_Folders"]) -> None:
        """Bind the buttons; what they change is shown in all the lists, for a folder for models is a root, too."""
        outputs = [part for one in all_ for part in one.shown]

        def changed(what: str, text: str | None) -> list[Any]:
            error = ""
            try:
                if text or what == "add":
                    self.do[what](text or "")
            except UserError as caught:
                error = str(caught)
            mine = self.listed(error, done=what == "add" and not error)
            # What is typed or chosen beside the other list is somebody's next step.
            others = {one: [one.told(), *[gr.skip()] * (len(one.shown) - 1)] for one in all_}
            return [part for parts in (others | {self: mine}).values() for part in parts]

        gr.on([self.add.click, self.path.submit], partial(changed, "add"), self.path, outputs, **QUIET)
        self.remove.click(partial(changed, "remove"), self.removing, outputs, **QUIET)

    def listed(self, error: str = "", done: bool = False) -> list[Any]:
        """What its parts hold now, in the order of `shown`; what is typed stays unless that was `done`."""
        added = [str(path) for path in self.added()]
        said = f'<p class="wrong" role="alert">{safe.shown(self.ui.tell(error))}</p>' if error else ""
        offered = gr.update(choices=added, value=added[0] if added else None)
        typed = "" if done else gr.skip()
        return [self.told(), gr.update(value=said, visible=bool(said)), typed, offered, gr.update(visible=bool(added))]


def _table(rows: list[tuple[str, str]]) -> str:
    """Rows of (title, value), both plain text, as HTML."""
    cells = "".join(f"<tr><th>{safe.shown(title)}</th><td>{safe.shown(value)}</td></tr>" for title, value in rows)
    return f'<table class="facts">{cells}</table>'


def _roots(ui: Ui) -> str:
    place = ui.place
    kinds = {"given": place.given, "added": place.added, "models": place.models}
    rows = []
    for root in place.roots:
        kind = next((kind for kind, those in kinds.items() if root in those), "own")
        told = ui.say("place.for_models" if kind == "models" else f"place.{kind}")
        rows.append((root, told + (_gone(ui, root) if kind != "own" else "")))
    return _listed("roots", rows)


def _models(ui: Ui) -> str:
    """Each folder for models and how many are found in it."""
    counts = [(folder, len(bases.nearby([folder], []))) for folder in ui.place.models]
    rows = [(folder, ui.say("place.models.found", count=count) + _gone(ui, folder)) for folder, count in counts]
    return _listed("models", rows, ui.say("place.models.none"))


def _gone(ui: Ui, folder: Path) -> str:
    return "" if folder.is_dir() else f" · {ui.say('place.gone')}"


def _listed(id: str, rows: list[tuple[Path, str]], empty: str = "") -> str:
    cells = "".join(f"<tr><td>{safe.shown(path)}</td><td>{safe.shown(told)}</td></tr>" for path, told in rows)
    cells = cells or f'<tr><td class="note">{safe.shown(empty)}</td></tr>'
    return f'<table class="facts" id="{id}">{cells}</table>'


def _secrets(ui: Ui) -> str:
    """Names and whether they are there; a value is never read further than that."""
    login = Path(os.environ.get("HF_TOKEN_PATH") or _hub_home() / "token").is_file()
    found = [(name, bool(os.environ.get(name))) for name in TOKENS]
    found.append((ui.say("place.secrets.login"), login))
    return _table([(name, ui.say("place.present" if there else "place.absent")) for name, there in found])


def _hub_home() -> Path:
    """As huggingface_hub finds its folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()


def _hub_host() -> str:
    """Where huggingface_hub asks; never a name and password that stand in the address."""
    given = os.environ.get("HF_ENDPOINT")
    try:
        return urlsplit(given).hostname or "HF_ENDPOINT" if given else "huggingface.co"
    except ValueError:  # not an address: jobs will say so
        return "HF_ENDPOINT"


def _about(ui: Ui) -> str:
    say, home = ui.say, ui.place.home
    libraries = [_version(name) for name in LIBRARIES]
    memory, disk = psutil.virtual_memory().total / GIB, psutil.disk_usage(str(home))
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    cards = [f"{card['name']} ({card['total'] / GIB:.1f} GiB)" for card in watch.gpus()]
    return _table(
        [
            (say("place.version"), _version("lora-fp8")),
            (say("place.python"), platform.python_version()),
            (say("place.libraries"), ", ".join(libraries)),
            (say("place.machine"), say("place.machine.value", system=system, cores=os.cpu_count(), memory=memory)),
            (say("place.cards"), "; ".join(cards) or say("place.cards.none")),
            (say("place.hub"), say("place.hub.value", host=_hub_host())),
            (say("place.home"), str(home)),
            (say("place.disk"), say("place.disk.value", free=disk.free / GIB, total=disk.total / GIB)),
        ]
    )


def _version(package: str) -> str:
    """ "torch 2.13.0"; a dash where it is not installed, as of a checkout that is run in place."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} –"
