"""Page: settings. Which folders the page may use, which tokens there are, and what this machine is."""

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import gradio as gr
import psutil

from lora_fp8.config import UserError

from .. import live, safe, watch
from ..context import Ui

TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "WANDB_API_KEY", "SWANLAB_API_KEY")
LIBRARIES = ("torch", "diffusers", "transformers", "peft", "bitsandbytes", "accelerate", "safetensors", "gradio")
GIB = 2**30


def build(ui: Ui) -> None:
    """Lay the page out."""
    say = ui.say
    gr.Markdown(f"## {say('page.settings')}")
    gr.Markdown(f"### {say('place.folders')}\n\n{say('place.folders.about')}")
    folders = gr.HTML(padding=False)
    wrong = gr.HTML(padding=False, visible=False)
    with gr.Row():
        path = gr.Textbox(label=say("place.path"), placeholder="~/pictures", scale=4, elem_id="root-path")
        add = gr.Button(say("place.add"), elem_id="root-add", elem_classes="beside")
    with gr.Row(visible=False) as taking_back:
        removing = gr.Dropdown(label=say("place.removing"), choices=[], scale=4)
        remove = gr.Button(say("place.remove"), elem_classes="beside")
    gr.Markdown(f"### {say('place.language')}\n\n{say('place.language.about')}")
    gr.Markdown(f"### {say('place.secrets')}\n\n{say('place.secrets.about')}")
    secrets = gr.HTML(padding=False)
    gr.Markdown(f"### {say('place.about')}")
    about = gr.HTML(elem_id="about", padding=False)
    quiet = {"api_visibility": "private", "show_progress": "hidden", "concurrency_limit": None}

    def listed(error: str = "", text: str = "") -> list[Any]:
        added = [str(root) for root in ui.place.added]
        said = f'<p class="wrong" role="alert">{safe.shown(ui.tell(error))}</p>' if error else ""
        offered = gr.update(choices=added, value=added[0] if added else None)
        return [_folders(ui), gr.update(value=said, visible=bool(said)), text, offered, gr.update(visible=bool(added))]

    def adding(text: str) -> list[Any]:
        try:
            ui.place.add_root(text)
        except UserError as error:
            return listed(str(error), text)
        return listed()

    def taking(text: str | None) -> list[Any]:
        try:
            if text:
                ui.place.remove_root(text)
        except UserError as error:
            return listed(str(error))
        return listed()

    shown = [folders, wrong, path, removing, taking_back]
    gr.on([add.click, path.submit], adding, path, shown, **quiet)
    remove.click(taking, removing, shown, **quiet)
    live.opened()(lambda: [*listed(), _secrets(ui), _about(ui)], None, [*shown, secrets, about], **quiet)


def _table(rows: list[tuple[str, str]]) -> str:
    """Rows of (title, value), both plain text, as HTML."""
    cells = "".join(f"<tr><th>{safe.shown(title)}</th><td>{safe.shown(value)}</td></tr>" for title, value in rows)
    return f'<table class="facts">{cells}</table>'


def _folders(ui: Ui) -> str:
    place = ui.place
    rows = []
    for root in place.roots:
        kind = "given" if root in place.given else "added" if root in place.added else "own"
        gone = "" if root.is_dir() or kind == "own" else f" · {ui.say('place.gone')}"
        rows.append((str(root), ui.say(f"place.{kind}") + gone))
    cells = "".join(f"<tr><td>{safe.shown(path)}</td><td>{safe.shown(kind)}</td></tr>" for path, kind in rows)
    return f'<table class="facts" id="roots">{cells}</table>'


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
