"""The component that the workbench is drawn in."""

import functools
import hashlib
import json
from typing import Any

import gradio as gr

from .. import image_folders, translations
from ..context import Ui
from . import routes, uploading

PREFIX = "images."
MOUNT = """
const given = %s;
if (!document.getElementById('images-style')) {
  const style = document.createElement('link');
  Object.assign(style, {id: 'images-style', rel: 'stylesheet', href: given.style});
  document.head.append(style);
}
import(given.script).then(module => module.mount(element, trigger, given));
"""


def make_panel(ui: Ui, page: str, per_page: int, **given: Any) -> gr.HTML:
    """Make the component for a page.

    Its events: `upload` when a folder was filled, `delete` when a folder is to be taken out of the draft, and `select`
    when the filter or the selection has changed. Each carries data-like values, see `live_panel.read_click`.

    Args:
        ui: the language.
        page: "new", whose folders are those of the draft, or "dataset", whose folder is in the address.
        per_page: images of one page of the grid.
    """
    texts = {
        key.removeprefix(PREFIX) + form: values[ui.language + form]
        for key, values in translations.load_catalogue().items()
        for form in ("", "-one")
        if key.startswith(PREFIX) and ui.language + form in values
    }
    version = _hash_files()
    settings = {
        "page": page,
        "language": ui.language,
        "perPage": per_page,
        "texts": texts,
        "taken": [*image_folders.TAKEN, *uploading.ARCHIVES],
        "ignored": list(uploading.IGNORED),
        "script": f"/images/images.js?{version}",
        "style": f"/images/images.css?{version}",
    }
    return gr.HTML(
        '<div class="workbench"></div>', js_on_load=MOUNT % json.dumps(settings), apply_default_css=False, **given
    )


@functools.cache
def _hash_files() -> str:
    """Return a hash of script and style, so that browsers load a new version after an update."""
    content = b"".join((routes.STATIC / name).read_bytes() for name in routes.FILES)
    return hashlib.sha256(content).hexdigest()[:12]
