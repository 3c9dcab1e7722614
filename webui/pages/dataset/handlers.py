"""Handlers of the page's events: each returns values for the components that change, in the order of `events`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from lora_fp8 import families
from lora_fp8.data import caption_operations, captions
from lora_fp8.errors import Message, UserError

from ... import dataset_folder, image_folders, live_panel, run_monitor, sanitize
from ...images.training_settings import TrainingSettings
from ...sanitize import escape
from .open_folder import PER_PAGE
from .operations import OPERATIONS
from .rendering import Renderer

PROGRESS = gr.Progress()  # Gradio recognizes it as a parameter's default
_unwritten: dict[Path, dict[str, tuple[str, str]]] = {}
"""Captions that could not be written, for example on a full disk: folder -> image -> (text as loaded, text as typed).
They are kept while the page's process runs, and appear in the editor of whoever opens the folder.
"""


class Handlers:
    """Handles the events of the components of one language."""

    def __init__(self, renderer: Renderer, training: TrainingSettings):
        self.ui, self.say, self.opened = renderer.ui, renderer.say, renderer.opened
        self.renderer, self.training = renderer, training

    def show_clip_settings(self, family: str) -> Any:
        """Show the clip settings for families that train on clips."""
        return gr.update(visible=families.traits(family)["clips"])

    def change_clip_settings(self, at: dict[str, Any], **held: Any) -> dict[str, Any]:
        """Keep changed clip settings; the next tick shows the result."""
        return {**at, "cut": held} if at else at

    def open(self, request: gr.Request) -> list[Any]:
        """Handle the opening of the page: show the folder that its address names."""
        trained = self.training.list_folders()  # of New training: most people come from there
        given = dict(request.query_params).get("folder", "") or (str(trained[0]) if trained else "")
        offered = [str(path) for path in image_folders.find_folders(self.ui.place.roots)]
        choices = gr.update(choices=[*dict.fromkeys([*offered, *([given] if given else [])])], value=given or None)
        folder, mask, tags, problem = None, "", [], ""
        try:
            if given:
                folder = self.ui.path(given)
                mask, tags = self.training.find_mask(folder), self.training.list_tag_settings(folder)
                dataset_folder.open_folder(folder, fresh=True, mask=mask)
        except UserError as error:
            problem = self.renderer.render_error(error)
        family, resolution, cut = self.training.choose_examination(folder)
        held = [family, resolution, self.show_clip_settings(family), *cut.values()]
        if not given:
            empty = self.say("dataset.none" if not offered else "dataset.choose")
            nothing = [{}, f'<p class="empty">{escape(empty)}</p>', "", "", "", "", ""]
            return [choices, gr.update(visible=False), *held, *nothing]
        if problem or folder is None:
            return [choices, gr.update(visible=False), *held, {}, problem, "", "", "", "", ""]
        at = {"folder": str(folder), "query": "", "showing": "all", "page": 0, "picked": "", "chosen": []}
        at |= {"mask": mask, "finding": "", "cut": cut, "tags": tags, "unsaved": dict(_unwritten.get(folder, {}))}
        shown_now = [*self.renderer.render_all(at, family, resolution), *self.renderer.fill_editor("", "", "")]
        return [choices, gr.update(visible=True), *held, *shown_now]

    def press(
        self, event: gr.EventData, at: dict[str, Any], family: str, resolution: float, caption: str, editing: str
    ) -> list[Any]:
        """Handle a button in the grid, the tags or the findings."""
        click = live_panel.read_click(event)
        do, name = click.get("do", ""), click.get("name", "")
        rest = [gr.skip()] * 5
        note, editor = gr.update(visible=False), [gr.skip()] * 2
        try:
            dataset = self.opened.get_dataset(at)
            at = dict(at)
            if do == "page":
                at["page"] = max(0, int(click.get("to", "0")))
            elif do in ("pick", "look") and name in dataset.files:
                if do == "look":
                    note = self.renderer.show_note(self.say("dataset.looked", file=name))
                left, was = _parse_editing(editing)
                at["unsaved"] = _drop_name(at["unsaved"], left)
                if left in dataset.files and not _is_unchanged(caption, was):
                    at["unsaved"][left] = (was, caption)
                    if left != name:
                        note = self.renderer.show_note(self.say("dataset.unsaved", file=left))
                at["picked"], editor = name, self.renderer.fill_editor(name, *self.opened.find_texts(at, dataset, name))
            elif do == "choose" and name in dataset.files:
                at["chosen"] = [other for other in at["chosen"] if other != name] + [name] * (name not in at["chosen"])
            elif do == "choose_all":
                at["chosen"] = list(dict.fromkeys([*at["chosen"], *self.opened.filter_names(at, dataset)]))
            elif do == "choose_none":
                at["chosen"] = []
            elif do == "tag":
                at |= {"query": f"[{name}]", "page": 0, "finding": ""}
                note = self.renderer.show_note(self.say("dataset.filtered", what=name))
            elif do == "finding":
                at |= {
                    "finding": name,
                    "page": 0,
                    "query": "",
                    "only": self.opened.list_files(at, name, family, resolution),
                }
                note = self.renderer.show_note(self.say("dataset.filtered", what=self.say(f"dataset.kind.{name}")))
            elif do == "repair":
                note = self._repair(at, dataset, family, resolution)
                left, was = _parse_editing(editing)
                if left in dataset.files and _is_unchanged(caption, was):
                    text = dataset.texts[left]
                    editor = self.renderer.fill_editor(left, text, text)
            elif do == "clear":
                at |= {"query": "", "finding": "", "showing": "all", "page": 0}
            elif do in ("remove", "rename"):
                edit = None
                if do == "remove":
                    edit = captions.preview(dataset.folder, [caption_operations.RemoveTag(name)], mask=dataset.mask)
                note = self.renderer.show_note(self.say("dataset.prepared"))
                rest = [do, name, "", edit, self.renderer.render_changes(edit) if edit else ""]
        except (UserError, ValueError) as error:
            return [self.renderer.show_error(error), *_skip_everything(), *rest]
        return [note, *self.renderer.render_all(at, family, resolution), *editor, *rest]

    def _repair(self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder, family: str, resolution: float) -> Any:
        """Repair caption edits that a crash interrupted, and read the folder again."""
        repair = captions.repair(dataset.folder)
        dataset_folder.open_folder(dataset.folder, fresh=True, mask=at["mask"])
        self.opened.examine(at, dataset, family, resolution, again=True)
        counts = {"taken_back": len(repair.taken_back), "restored": len(repair.restored), "swept": len(repair.swept)}
        lines = [self.say("dataset.repaired", **counts)]
        lines += [self.say("dataset.repaired.others", files=", ".join(repair.others[:8]))] if repair.others else []
        return self.renderer.show_note(" ".join(lines), wrong=bool(repair.others))

    def add_uploads(
        self, at: dict[str, Any], family: str, resolution: float, files: list[str] | None, name: str
    ) -> list[Any]:
        """Handle dropped files: add them to the open folder, or to a new folder of the page, which is then opened."""
        try:
            if not name.strip() and not at:
                raise UserError(self.say("dataset.upload.where"))
            own = self.ui.place.home / "datasets" / sanitize.check_name(name) if name.strip() else None
            folder = own or self.opened.get_dataset(at).folder
            count, refused = image_folders.add_uploads(files or [], folder)
        except UserError as error:
            return [None, gr.skip(), self.renderer.show_error(error)]
        lines = [self.say("new.pictures.taken", count=count, folder=folder.name)]
        if refused:
            reasons = "; ".join(map(self.ui.translate, refused[:8])) + (" …" if len(refused) > 8 else "")
            lines.append(self.say("new.pictures.refused", lines=reasons))
        note = self.renderer.show_note(" ".join(lines), wrong=bool(refused))
        if at and str(folder) == at["folder"]:
            dataset = dataset_folder.open_folder(folder, fresh=True, mask=at["mask"])
            self.opened.examine(at, dataset, family, resolution, again=True)
        return [None, str(folder) if own and not refused else gr.skip(), note]

    def filter_grid(self, at: dict[str, Any], family: str, resolution: float, query: str, showing: str) -> list[Any]:
        """Handle a changed search or filter."""
        if (query, showing) == (at.get("query"), at.get("showing")) or not at:
            return [gr.skip(), gr.skip()]
        at = {**at, "query": query, "showing": showing, "page": 0, "finding": ""}
        return [at, self.renderer.render_grid(at, self.opened.get_dataset(at), family, resolution)]

    def save(
        self, step: int, at: dict[str, Any], family: str, resolution: float, caption: str, editing: str
    ) -> list[Any]:
        """Write the editor's caption, and go on to the next image if `step` is 1."""
        name, loaded = _parse_editing(editing)
        try:
            dataset = self.opened.get_dataset(at)
            if name not in dataset.files:
                raise UserError(self.say("dataset.pick_first"))
            at = {**at, "picked": name, "unsaved": _drop_name(at["unsaved"], name)}
            if dataset.reread_caption(name) != loaded:
                complaint = self.renderer.show_note(self.say("dataset.changed_meanwhile", file=name), wrong=True)
                text = dataset.texts[name]
                return [
                    complaint,
                    *self.renderer.render_all(at, family, resolution),
                    *self.renderer.fill_editor(name, text, text),
                ]
            edit = captions.assign(
                dataset.folder, {dataset.files[name]: caption}, Message("caption of {name}", name=name)
            )
            if edit.problems:
                raise UserError(edit.problems[0])
            if edit.changes:
                try:
                    captions.apply(dataset.folder, edit)
                except UserError:
                    _unwritten.setdefault(dataset.folder, {})[name] = (loaded, caption)
                    raise
            _unwritten.get(dataset.folder, {}).pop(name, None)
            note = self.renderer.show_note(
                self.say("dataset.saved" if edit.changes else "dataset.unchanged", file=name)
            )
            dataset.reread_caption(name)
            names = self.opened.filter_names(at, dataset)
            if step and name in names and names.index(name) + 1 < len(names):
                name = names[names.index(name) + 1]
            at["picked"], editor = name, self.renderer.fill_editor(name, *self.opened.find_texts(at, dataset, name))
            if name in names:
                at["page"] = names.index(name) // PER_PAGE
        except UserError as error:
            return [self.renderer.show_error(error), *_skip_everything()]
        return [note, *self.renderer.render_all(at, family, resolution), *editor]

    def reload(self, at: dict[str, Any], family: str, resolution: float, caption: str, editing: str) -> list[Any]:
        """Read all captions again. Unsaved input in the editor stays."""
        name, was = _parse_editing(editing)
        try:
            dataset = dataset_folder.open_folder(self.opened.get_dataset(at).folder, fresh=True, mask=at["mask"])
            editor = [gr.skip()] * 2
            if name in dataset.files and _is_unchanged(caption, was):
                editor = self.renderer.fill_editor(name, dataset.texts[name], dataset.texts[name])
            return [*self.renderer.render_all(at, family, resolution), *editor]
        except UserError:  # reported by the handler before this one
            return _skip_everything()

    def preview(self, at: dict[str, Any], operation: str, first: str, second: str, scope: str) -> list[Any]:
        """Preview an edit of many captions."""
        try:
            dataset = self.opened.get_dataset(at)
            count, make = OPERATIONS[operation]
            only = None
            if scope != "all":
                only = (
                    self.opened.filter_names(at, dataset)
                    if scope == "filter"
                    else [n for n in at["chosen"] if n in dataset.files]
                )
                if not only:
                    raise UserError(self.say("dataset.none_chosen"))
            edit = captions.preview(dataset.folder, [make(*(first, second)[:count])], only, dataset.mask)
        except UserError as error:
            return [self.renderer.show_error(error), None, ""]
        return [gr.update(visible=False), edit, self.renderer.render_changes(edit)]

    def apply(self, at: dict[str, Any], edit: captions.Edit | None, progress: gr.Progress = PROGRESS) -> list[Any]:
        """Apply the previewed edit."""
        try:
            if edit is None or not edit.changes:
                raise UserError(self.say("dataset.preview_first"))
            folder = self.opened.get_dataset(at).folder
            entry = captions.apply(folder, edit, progress=self._count_progress(progress))
        except UserError as error:
            return [self.renderer.show_error(error), None, ""]
        return [self.renderer.show_note(self.say("dataset.applied", count=entry.files)), None, ""]

    def _count_progress(self, progress: gr.Progress) -> Callable[[int, int], Any]:
        return lambda done, total: progress((done, total), unit=self.say("dataset.captions"))

    def undo_or_redo(
        self, what: Callable[..., captions.Entry], at: dict[str, Any], progress: gr.Progress = PROGRESS
    ) -> dict[str, Any]:
        """Undo or redo an edit; `what` is captions.undo or captions.redo."""
        try:
            entry = what(self.opened.get_dataset(at).folder, progress=self._count_progress(progress))
        except UserError as error:
            return self.renderer.show_error(error)
        return self.renderer.show_note(
            self.say("dataset.redone" if entry.done else "dataset.undone", count=entry.files)
        )

    def examine_again(self, at: dict[str, Any], family: str, resolution: float) -> dict[str, int]:
        """Examine the folder again. Unchanged files are not decoded again."""
        if at:
            self.opened.examine(at, self.opened.get_dataset(at), family, resolution, again=True)
        return {}

    def start_captioning(
        self, at: dict[str, Any], model: str, kind: str, prompt: str, trigger: str, overwrite: bool
    ) -> list[Any]:
        """Queue a captioning job."""
        try:
            dataset = self.opened.get_dataset(at)
            wanted = dataset_folder.Captioning(model, kind, prompt, trigger, overwrite, dataset.mask)
            number = dataset_folder.submit_captioning(self.ui.place, dataset.folder, wanted)
        except UserError as error:
            return [self.renderer.show_error(error), gr.skip()]
        run_monitor.get_monitor(self.ui.place).views.invalidate()
        return [self.renderer.show_note(self.say("dataset.auto.queued", number=number)), {}]

    def press_job(self, event: gr.EventData) -> Any:
        """Handle a button of a captioning job."""
        click = live_panel.read_click(event)
        try:
            return self.renderer.show_note(run_monitor.run_action(self.ui, click.get("do", ""), click.get("id", "")))
        except UserError as error:
            return self.renderer.show_error(error)

    def paint(self, at: dict[str, Any], family: str, resolution: float, seen: dict[str, int]) -> list[Any]:
        """Handle a tick: paint the doctor's progress or report, captioning jobs, and clips in the grid."""
        if not at:
            return [gr.skip()] * 6
        grid = gr.skip()
        painted: float | None = seen.get("told")
        try:
            dataset = dataset_folder.open_cached(self.ui.path(at["folder"]), at["mask"])
            examination = self.opened.examine(at, dataset, family, resolution)
            if examination.report is not None and painted != examination.begun:
                painted = examination.begun
                if dataset.videos or examination.report["counts"]["clips"]:
                    grid = self.renderer.render_grid(at, dataset, family, resolution)
            view = self.renderer.render_view(at, dataset, family, resolution)
            panels = [
                self.renderer.render_findings(examination),
                self.renderer.render_buckets(examination, family),
                self.renderer.render_jobs(dataset.folder),
                view,
            ]
        except UserError as error:
            panels = [self.renderer.render_error(error), "", "", ""]
        sent, seen = live_panel.skip_unchanged(panels, seen)
        return [*sent, grid, {**seen, "told": painted}]


def _skip_everything() -> list[Any]:
    """Return values that leave `Events.everything` as it is."""
    return [gr.skip() for _ in range(7)]


def _parse_editing(editing: str) -> tuple[str, str]:
    """Return the image whose caption is in the editor and the text that was loaded; ("", "") if there is none."""
    try:
        name, loaded = json.loads(editing or '["", ""]')
    except (ValueError, TypeError, RecursionError):  # not sent by our page
        return "", ""
    return str(name), str(loaded)


def _drop_name(unsaved: dict[str, Any], name: str) -> dict[str, Any]:
    return {other: texts for other, texts in unsaved.items() if other != name}


def _is_unchanged(typed: str, loaded: str) -> bool:
    """Return True if nothing was typed. Browsers use line ends of their own."""
    return typed.strip().splitlines() == loaded.strip().splitlines()
