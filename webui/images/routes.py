"""The routes of the workbench. Each takes a JSON object and answers with one; static/images.js calls them.

    POST /images/<language>/<action>      see ACTIONS
    POST /images/<language>/upload        the bytes of one file; ?folder= or ?name= says where it goes, ?file= its name
    GET  /images/<name>                   the workbench's script and style

The guard in front of the site has checked that the request comes from this page. JSON and not the address holds
names, since a file's name may have bytes that are not UTF-8.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.responses import Response

from lora_fp8.errors import UserError
from lora_fp8.families.sources.reference import translate_windows_path

from .. import dataset_folder, image_folders, sanitize, translations
from ..context import Place, Ui
from ..error_boundary import describe_error
from . import captioning, captions, edits, tasks, uploading
from .listing import SHOWING, Filter, FolderView, list_draft_folders

STATIC = Path(__file__).resolve().parent.parent / "static"
FILES = {"images.js": "text/javascript", "images.css": "text/css"}

Answer = dict[str, Any]


class Given:
    """What a request gives. Values of another type than expected count as not given: no page of ours sends them."""

    def __init__(self, values: Any):
        self.values = values if isinstance(values, dict) else {}

    def get_text(self, name: str, usual: str = "") -> str:
        """Return a text."""
        value = self.values.get(name)
        return value if isinstance(value, str) else usual

    def get_number(self, name: str, usual: int = 0) -> int:
        """Return a whole number that is not negative."""
        value = self.values.get(name)
        return value if type(value) is int and 0 <= value < 2**31 else usual

    def get_flag(self, name: str) -> bool:
        """Return True if the value is true."""
        return self.values.get(name) is True

    def get_table(self, name: str) -> dict[str, str]:
        """Return texts by name."""
        value = self.values.get(name)
        return {key: text for key, text in value.items() if isinstance(text, str)} if isinstance(value, dict) else {}

    def get_texts(self, name: str) -> tuple[str, ...]:
        """Return a list of texts."""
        value = self.values.get(name)
        return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()


def _open(ui: Ui, given: Given) -> FolderView:
    purpose = given.get_text("family"), given.get_number("resolution"), given.get_table("cut")
    return FolderView(ui, given.get_text("folder"), *purpose, fresh=given.get_flag("fresh"))


def list_images(ui: Ui, given: Given) -> Answer:
    """List images of a folder that match a filter."""
    showing = given.get_text("showing", "all")
    wanted = Filter(
        given.get_text("query"),
        showing if showing in SHOWING else "all",
        given.get_texts("chosen"),
        given.get_text("finding"),
    )
    return _open(ui, given).list_rows(wanted, given.get_number("offset"), given.get_number("count", 48))


def list_names(ui: Ui, given: Given) -> Answer:
    """List the names of all images that match a filter."""
    showing = given.get_text("showing", "all")
    wanted = Filter(given.get_text("query"), showing if showing in SHOWING else "all", (), given.get_text("finding"))
    return {"names": _open(ui, given).filter_names(wanted)}


def describe_state(ui: Ui, given: Given) -> Answer:
    """Describe what changes while a window looks at a folder, and list the folders of New training."""
    answer: Answer = {"folders": list_draft_folders(ui)} if given.get_flag("draft") else {}
    return answer | (_open(ui, given).describe_state() if given.get_text("folder") else {})


def save_caption(ui: Ui, given: Given) -> Answer:
    """Save a caption, and say how many images have none now."""
    view = _open(ui, given)
    dataset = view.dataset
    saved = captions.save(ui, dataset, given.get_text("name"), given.get_text("loaded"), given.get_text("caption"))
    without = len(dataset.list_uncaptioned())
    history = captions.describe_history(ui, dataset.folder)
    return saved | {"without": without, "history": history, "stamp": view.make_stamp()}


def edit_images(ui: Ui, given: Given) -> Answer:
    """Exclude, include, turn or crop images."""
    view = _open(ui, given)
    change = {name: given.values[name] for name in ("exclude", "turn", "crop") if name in given.values}
    known = {*view.dataset.files, *view.list_excluded()}
    return {"message": edits.change(ui, view.folder, known, given.get_texts("names"), change)}


def describe_task(ui: Ui, given: Given) -> Answer:
    """Describe the newest task of a folder, which need not have images yet."""
    task = tasks.find(ui.resolve_path(given.get_text("folder")))
    return {"task": vars(task) if task else None}


def undo_edit(ui: Ui, given: Given) -> Answer:
    """Start to undo or redo the last edit of a folder."""
    return {"task": vars(captions.start_undo(ui, ui.resolve_path(given.get_text("folder")), given.get_text("what")))}


def find_folder(ui: Ui, given: Given) -> Answer:
    """Resolve the path of a folder that was typed or pasted."""
    text = _read_path(given)
    path = ui.resolve_path(text)
    sanitize.require_folder(path, text)
    return {"folder": str(path)}


def ask_to_allow(ui: Ui, given: Given) -> Answer:
    """Say whether a folder that was refused can be allowed."""
    return {"allowable": ui.place.may_add_root(_read_path(given))}


def allow_folder(ui: Ui, given: Given) -> Answer:
    """Allow a folder, as the Settings page does, and resolve its path."""
    text = _read_path(given)
    if ui.place.may_add_root(text):
        ui.place.add_root(text)
    return find_folder(ui, given)


def _read_path(given: Given) -> str:
    """Return a typed path without the quotes with which Windows copies it, or from a drive of Windows in WSL."""
    text = given.get_text("folder").strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    return translate_windows_path(text)


def list_folders(ui: Ui, given: Given) -> Answer:
    """List folders of images that lie near the allowed folders."""
    return {"folders": [str(path) for path in image_folders.find_folders(ui.place.roots)]}


def list_models(ui: Ui, given: Given) -> Answer:
    """List captioning models, and the usual thresholds of taggers."""
    return {"models": captioning.list_models(ui), "thresholds": captioning.THRESHOLDS}


def start_captioning(ui: Ui, given: Given) -> Answer:
    """Queue a captioning job."""
    view = _open(ui, given)
    wanted = dataset_folder.Captioning(
        given.get_text("model"),
        given.get_text("kind", "text"),
        given.get_text("prompt"),
        given.get_text("trigger"),
        given.get_flag("overwrite"),
        view.dataset.mask,
        threshold=given.get_text("threshold"),
        character_threshold=given.get_text("character_threshold"),
        exclude=given.get_text("exclude"),
        rating=given.get_flag("rating"),
        keep_underscores=given.get_flag("keep_underscores"),
        append=given.get_flag("append"),
    )
    number = captioning.start(ui, view.dataset, wanted)
    return {
        "message": ui.say("dataset.auto.queued", number=number),
        "job": captioning.describe_job(ui, view.folder),
    }


def stop_captioning(ui: Ui, given: Given) -> Answer:
    """Stop the captioning job of a folder."""
    return {"message": captioning.stop_job(ui, ui.resolve_path(given.get_text("folder")))}


ACTIONS: dict[str, Callable[[Ui, Given], Answer]] = {
    "list": list_images,
    "names": list_names,
    "state": describe_state,
    "save": save_caption,
    "edit": edit_images,
    "task": describe_task,
    "undo": undo_edit,
    "folder": find_folder,
    "ask_to_allow": ask_to_allow,
    "allow": allow_folder,
    "folders": list_folders,
    "models": list_models,
    "caption": start_captioning,
    "stop": stop_captioning,
}


def add_routes(app: FastAPI, place: Place) -> None:
    """Add the routes to the site."""
    languages = {language: Ui(language, place) for language in translations.LANGUAGES}

    @app.get("/images/{name}")
    def file(name: str) -> Response:
        if name not in FILES:
            return _answer({"error": "there is nothing here"}, 404)
        content = (STATIC / name).read_bytes()
        return Response(content, media_type=FILES[name], headers={"Cache-Control": "private, max-age=86400"})

    @app.post("/images/{language}/upload")
    async def upload(request: Request, language: str, folder: str = "", name: str = "", file: str = "") -> Response:
        ui = languages.get(language) or languages["en"]
        try:
            target = uploading.find_target(ui, folder, name)
            received = await uploading.receive(request.stream(), file)
            return _answer(await anyio.to_thread.run_sync(_accept_upload, ui, received, target, file))
        except (UserError, OSError) as error:
            return _answer_error(ui, error)

    @app.post("/images/{language}/{action}")
    async def act(request: Request, language: str, action: str) -> Response:
        ui = languages.get(language) or languages["en"]
        if action not in ACTIONS:
            return _answer({"error": "there is nothing here"}, 404)
        try:
            given = Given(json.loads(await request.body()))
        except (ValueError, RecursionError):
            return _answer({"error": "not JSON"}, 400)
        try:
            return _answer(await anyio.to_thread.run_sync(ACTIONS[action], ui, given))
        except (UserError, OSError) as error:
            return _answer_error(ui, error)


def _accept_upload(ui: Ui, received: Path, target: Path, file: str) -> Answer:
    """Check and keep an upload, or start to unpack it."""
    if uploading.is_archive(received.name):
        return {"folder": str(target), "task": vars(uploading.start_unpacking(ui, received, target))}
    try:
        added = image_folders.add_file(received, target, file)
    finally:
        uploading.discard(received)
    return {"folder": str(target), "added": added}


def _answer(content: Answer, status: int = 200) -> Response:
    # Escaped to ASCII: a name may have bytes that are not UTF-8.
    return Response(json.dumps(content), status, {"Cache-Control": "no-store"}, "application/json")


def _answer_error(ui: Ui, error: Exception) -> Response:
    return _answer({"error": describe_error(ui.language, error)}, 400 if isinstance(error, UserError) else 507)
