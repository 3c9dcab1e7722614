"""Handlers of the page's events: each returns values for the components that change, in the order of `events`."""

import json
from pathlib import Path
from typing import Any

import gradio as gr

from lora_fp8 import families
from lora_fp8.data import caption_operations, captions
from lora_fp8.errors import UserError

from ... import image_folders, live_panel
from ...images.listing import SHOWING, Filter, FolderView
from ...images.training_settings import TrainingSettings
from ...sanitize import escape
from .operations import OPERATIONS
from .rendering import Renderer

PROGRESS = gr.Progress()  # Gradio recognizes it as a parameter's default


class Handlers:
    """Handles the events of the components of one language."""

    def __init__(self, renderer: Renderer):
        self.ui, self.say, self.renderer = renderer.ui, renderer.say, renderer

    def open_view(self, at: dict[str, Any], family: str = "", resolution: float = 0, fresh: bool = False) -> FolderView:
        """Return the open folder, if the page may still use it. Raises UserError."""
        if not at.get("folder"):
            raise UserError(self.say("dataset.choose"))
        side = _choose_resolution(family, resolution) if family in families.list_families() else 0
        return FolderView(self.ui, at["folder"], family, side, at["cut"], fresh)

    def open(self, request: gr.Request) -> list[Any]:
        """Handle the opening of the page: show the folder that its address names, or the first of New training."""
        training = TrainingSettings(self.ui)
        trained = [str(folder) for folder in training.list_folders().values() if folder]
        given = dict(request.query_params).get("folder", "") or (trained[0] if trained else "")
        offered = [*trained, *map(str, image_folders.find_folders(self.ui.place.roots))]
        choices = gr.update(choices=[*dict.fromkeys([*offered, *([given] if given else [])])], value=given or None)
        folder, head = None, f'<p class="empty">{escape(self.say("dataset.choose" if offered else "dataset.none"))}</p>'
        try:
            if given:
                folder = self.ui.resolve_path(given)
                view = FolderView(self.ui, given, fresh=True)
                head = self.renderer.render_head(view.dataset)
        except UserError as error:
            folder, head = None, self.renderer.render_error(error)
        family, resolution, cut = training.choose_examination(folder)
        at = _make_state(folder, cut) if folder else {}
        of_folder = [gr.update(visible=folder is not None)] * 4
        held = [family, resolution, self._show_clip_settings(family), *cut.values()]
        return [choices, *of_folder, *held, at, _describe_purpose(at, family, resolution), head]

    def _show_clip_settings(self, family: str) -> Any:
        """Show the clip settings for families that train on clips."""
        return gr.update(visible=families.get_traits(family)["clips"])

    def select(self, event: gr.EventData, at: dict[str, Any]) -> dict[str, Any]:
        """Keep what the workbench shows and what is selected in it."""
        given = live_panel.read_click(event)
        try:
            chosen = json.loads(given.get("chosen", "[]"))
        except (ValueError, RecursionError):  # not sent by our page
            chosen = []
        names = [name for name in chosen if isinstance(name, str)] if isinstance(chosen, list) else []
        filters = {name: given.get(name, "") for name in ("query", "showing", "finding")}
        return {**at, **filters, "chosen": names} if at else at

    def change_purpose(self, at: dict[str, Any], family: str, resolution: float, **cut: Any) -> list[Any]:
        """Examine the folder for another architecture or resolution, or for clips that are cut in another way."""
        at = {**at, "cut": cut} if at else at
        return [at, _describe_purpose(at, family, resolution), self._show_clip_settings(family)]

    def handle_button(self, event: gr.EventData, at: dict[str, Any], family: str, resolution: float) -> list[Any]:
        """Handle a button of the tags or the findings: prepare an edit of all captions, or repair them."""
        click = live_panel.read_click(event)
        do, name = click.get("do", ""), click.get("name", "")
        rest = [gr.skip()] * 7
        note = gr.update(visible=False)
        try:
            view = self.open_view(at, family, resolution)
            dataset = view.dataset
            if do == "repair":
                note = self._repair(dataset.folder)
                self.open_view(at, family, resolution, fresh=True).examine(again=True)
            elif do in ("remove", "rename"):
                edit = None
                if do == "remove":
                    edit = captions.preview(dataset.folder, [caption_operations.RemoveTag(name)], mask=dataset.mask)
                changes = self.renderer.render_changes(edit) if edit else ""
                rest = [gr.update(selected="pictures"), gr.update(open=True), do, name, "", edit, changes]
        except UserError as error:
            note = self.renderer.show_error(error)
        return [note, *rest]

    def _repair(self, folder: Path) -> Any:
        """Repair caption edits that a crash interrupted. Returns a message."""
        repair = captions.repair(folder)
        counts = {"taken_back": len(repair.taken_back), "restored": len(repair.restored), "swept": len(repair.swept)}
        lines = [self.say("dataset.repaired", **counts)]
        lines += [self.say("dataset.repaired.others", files=", ".join(repair.others[:8]))] if repair.others else []
        return self.renderer.show_note(" ".join(lines), wrong=bool(repair.others))

    def preview(self, at: dict[str, Any], operation: str, first: str, second: str, scope: str) -> list[Any]:
        """Preview an edit of many captions."""
        try:
            view = self.open_view(at)
            count, make = OPERATIONS[operation]
            only = None
            if scope != "all":
                chosen = [name for name in at["chosen"] if name in view.dataset.files]
                only = _list_shown(view, at) if scope == "filter" else chosen
                if not only:
                    raise UserError(self.say("dataset.none_chosen"))
            dataset = view.dataset
            edit = captions.preview(dataset.folder, [make(*(first, second)[:count])], only, dataset.mask)
        except UserError as error:
            return [self.renderer.show_error(error), None, ""]
        return [gr.update(visible=False), edit, self.renderer.render_changes(edit)]

    def apply(self, at: dict[str, Any], edit: captions.Edit | None, progress: gr.Progress = PROGRESS) -> list[Any]:
        """Apply the previewed edit."""

        def show_progress(done: int, total: int) -> None:
            progress((done, total), unit=self.say("dataset.captions"))

        try:
            if edit is None or not edit.changes:
                raise UserError(self.say("dataset.preview_first"))
            entry = captions.apply(self.open_view(at).folder, edit, progress=show_progress)
        except UserError as error:
            return [self.renderer.show_error(error), None, ""]
        return [self.renderer.show_note(self.say("dataset.applied", count=entry.files)), None, ""]

    def examine_again(self, at: dict[str, Any], family: str, resolution: float) -> dict[str, int]:
        """Examine the folder again. Unchanged files are not decoded again."""
        if at:
            self.open_view(at, family, resolution).examine(again=True)
        return {}

    def refresh(self, at: dict[str, Any], family: str, resolution: float, seen: dict[str, Any]) -> list[Any]:
        """Handle a tick: paint what has changed of the head, the tags and the examination."""
        if not at:
            return [gr.skip()] * 5
        try:
            view = self.open_view(at, family, resolution)
            examination, dataset = view.examine(), view.dataset
            now = [view.make_stamp(examination), dataset.read_at, examination.done, examination.problem, at, family]
            key = json.dumps([*now, resolution])
            if seen.get("key") == key:
                return [gr.skip()] * 5
            wanted = _read_filter(at)
            filtered = wanted.query.strip() or wanted.finding or wanted.showing != "all"
            panels = [
                self.renderer.render_head(dataset),
                self.renderer.render_tags(dataset.count_tags(_list_shown(view, at) if filtered else None)),
                self.renderer.render_findings(examination),
                self.renderer.render_buckets(examination, view.family),
            ]
        except UserError as error:
            key, panels = "", [self.renderer.render_error(error), "", "", ""]
        sent, seen = live_panel.skip_unchanged(panels, seen)
        return [*sent, {**seen, "key": key}]


def _make_state(folder: Path, cut: dict[str, Any]) -> dict[str, Any]:
    return {"folder": str(folder), "query": "", "showing": "all", "finding": "", "chosen": [], "cut": cut}


def _read_filter(at: dict[str, Any]) -> Filter:
    showing = at["showing"] if at["showing"] in SHOWING else "all"
    return Filter(at["query"], showing, tuple(at["chosen"]), at["finding"])


def _list_shown(view: FolderView, at: dict[str, Any]) -> list[str]:
    """List the images that match the window's filter and whose captions can be edited: not excluded ones."""
    return [name for name in view.filter_names(_read_filter(at)) if name in view.dataset.files]


def _choose_resolution(family: str, given: float) -> int:
    """Return the resolution that is given; 0 is the family's."""
    return int(given or 0) or families.get(family).native_resolution


def _describe_purpose(at: dict[str, Any], family: str, resolution: float) -> str:
    """Return what the workbench is to show, in JSON; "" for nothing."""
    if not at:
        return ""
    side = _choose_resolution(family, resolution)
    return json.dumps({"folder": at["folder"], "family": family, "resolution": side, "cut": at["cut"]})
