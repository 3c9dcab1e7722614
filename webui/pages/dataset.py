"""The Dataset page: a grid of images and videos, a caption editor, batch edits with undo, findings and buckets.

`?folder=` names the folder, so that a reload and a second window show the same. Captions are read from disk every time;
findings come from `lora-fp8 dataset look`, a process of its own that decodes the images.
"""

import contextlib
import difflib
import json
import math
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block

from lora_fp8 import families
from lora_fp8.data import buckets, caption_operations, captions, clips
from lora_fp8.errors import Message, UserError
from lora_fp8.settings import names_a_folder_of_masks

from .. import dataset_folder, form, image_folders, live_panel, run_cards, run_monitor, sanitize, translations
from ..context import Ui
from ..draft import Draft
from ..sanitize import escape

PER_PAGE = 60
MOST_TAGS, MOST_FILES, MOST_CHANGES = 300, 200, 40
STYLE = (Path(__file__).parent.parent / "dataset.css").read_text(encoding="utf-8")
OPERATIONS: dict[str, tuple[int, Callable[..., caption_operations.Operation]]] = {
    # name: number of text fields, operation
    "add_last": (1, caption_operations.AddTag),
    "add_first": (1, partial(caption_operations.AddTag, first=True)),
    "remove": (1, caption_operations.RemoveTag),
    "rename": (2, caption_operations.RenameTag),
    "replace": (2, caption_operations.Replace),
    "pattern": (2, caption_operations.ReplacePattern),
    "trigger": (1, caption_operations.Trigger),
    "prepend": (1, caption_operations.Prepend),
    "append": (1, caption_operations.Append),
    "dedupe": (0, caption_operations.DedupeTags),
    "sort": (0, caption_operations.SortTags),
    "recode": (1, caption_operations.Recode),
}
PROGRESS = gr.Progress()  # Gradio recognizes it as a parameter's default
SHOWING = ("all", "uncaptioned", "chosen")
REPAIRED = ("caption_damaged", "caption_half_done", "caption_leftover")
"""Findings that `captions.repair` resolves."""
_unwritten: dict[Path, dict[str, tuple[str, str]]] = {}
"""Captions that could not be written, for example on a full disk: folder -> image -> (text as loaded, text as typed).
They are kept while the page's process runs, and appear in the editor of whoever opens the folder.
"""
NOW: dict[str, Any] = live_panel.private_event(queue=False)
"""For events that change what the window shows: they run in order (ask.js), so that a button acts on what is shown."""
OPENING = "(...inputs) => { window.opening(); return inputs; }"
OPENED = "() => window.opened()"
"""Wraps handlers that may put another caption into the editor."""
GO = "(folder) => { location.search = '?' + new URLSearchParams({folder: folder || ''}); }"


def build(ui: Ui) -> None:
    """Lay the page out."""
    page = _Page(ui)
    page.lay_out()


def panel(**given: Any) -> gr.HTML:
    """Make a panel like live_panel.panel, with the styles of this page."""
    return gr.HTML(
        "", css_template=live_panel.STYLE + STYLE, js_on_load=live_panel.CLICKS, apply_default_css=False, **given
    )


class _Page:
    """The components of one language and their handlers.

    `at` is what a window shows: folder, filters, page of the grid, picked image, chosen images, captions that were
    typed
    and not saved, how clips are cut (frames, fps, clip), and where the masks are by the New training page. `editing` is
    kept in the browser beside the editor: the image whose caption it holds, and the text as it was loaded.
    """

    def __init__(self, ui: Ui):
        self.ui, self.say = ui, ui.say
        self.families = {name: families.get(name).title for name in families.available()}

    def lay_out(self) -> None:
        say = self.say
        self.at, self.edit, self.seen = gr.State({}), gr.State(None), gr.State({})
        self.editing = gr.Textbox(visible="hidden", elem_id="dataset-editing")
        self.family = gr.Dropdown(
            [(title, name) for name, title in self.families.items()],
            value="sdxl",
            label=say("dataset.family"),
            elem_id="dataset-family",
            render=False,
        )
        self.resolution = gr.Number(
            0,
            precision=0,
            minimum=0,
            label=say("dataset.resolution"),
            elem_id="dataset-resolution",
            render=False,
        )
        self.tags = panel(elem_id="dataset-tags", render=False)
        self.here: dict[str, Block] = {"at": self.at, "family": self.family, "resolution": self.resolution}
        self.cut = {name: self._make_field(f"dataset.{name}") for name in dataset_folder.CUT}
        with gr.Row():
            self.folder = gr.Dropdown(
                label=say("dataset.folder"), choices=[], allow_custom_value=True, elem_id="dataset-folder", scale=5
            )
            go = gr.Button(say("dataset.open"), elem_id="dataset-open", elem_classes="beside", size="md", scale=1)
        with gr.Accordion(say("dataset.upload"), open=False, elem_id="dataset-upload"):
            with gr.Row():
                self.drop = gr.File(
                    file_count="multiple",
                    file_types=[*image_folders.TAKEN],
                    label=say("dataset.upload.drop"),
                    height=130,
                    scale=3,
                    elem_id="dataset-drop",
                )
                self.new_set = gr.Textbox(
                    label=say("dataset.upload.set"),
                    info=say("dataset.upload.set_info"),
                    max_lines=1,
                    scale=2,
                    elem_id="dataset-new-set",
                )
        self.head = panel(elem_id="dataset-head")
        self.message = panel(elem_id="dataset-said", visible=False)
        with gr.Tabs(visible=False, elem_id="dataset-tabs") as self.tabs:
            with gr.Tab(say("dataset.tab.pictures"), id="pictures"):
                self._lay_out_pictures()
            with gr.Tab(say("dataset.tab.tags"), id="tags"):
                self.tags.render()
            with gr.Tab(say("dataset.tab.findings"), id="findings"):
                with gr.Row():
                    self.family.render()
                    self.resolution.render()
                    again = gr.Button(say("dataset.again"), elem_id="dataset-again", elem_classes="beside", size="md")
                with gr.Row(visible=False) as self.cutting:
                    for part in self.cut.values():
                        part.render()
                self.findings = panel(elem_id="dataset-findings")
            with gr.Tab(say("dataset.tab.buckets"), id="buckets"):
                self.buckets = panel(elem_id="dataset-buckets")
            with gr.Tab(say("dataset.tab.caption"), id="caption"):
                self._lay_out_captioning()
        trained = [self.family, self.resolution, self.cutting, *self.cut.values()]
        opened = [self.folder, self.tabs, *trained, *self.everything]
        live_panel.get_load_event()(self.open, outputs=opened, js=OPENING, **NOW).then(None, js=OPENED)
        go.click(None, inputs=[self.folder], js=GO, api_visibility="private")
        self.folder.select(None, inputs=[self.folder], js=GO, api_visibility="private")
        for clickable in (self.grid, self.view, self.tags, self.findings, self.head):
            live_panel.on_press(
                clickable,
                self.press,
                OPENED,
                inputs_kwargs=self.here | self.editor,
                outputs=[
                    self.message,
                    *self.everything,
                    self.operation,
                    self.first,
                    self.second,
                    self.edit,
                    self.changes,
                ],
                js=OPENING,
            )
        address = gr.Textbox(visible="hidden", elem_id="dataset-address")
        self.drop.upload(
            self.add_uploads,
            inputs_kwargs=self.here | {"files": self.drop, "name": self.new_set},
            outputs=[self.drop, address, self.message],
            **live_panel.private_event(show_progress="minimal", show_progress_on=[self.drop]),
        ).then(**self.afterwards)
        address.change(None, inputs=[address], js=GO, api_visibility="private")
        timer = gr.Timer(live_panel.SECONDS)
        gr.on(
            [timer.tick, self.family.input, self.resolution.submit],
            self.paint,
            inputs_kwargs=self.here | {"seen": self.seen},
            outputs=[self.findings, self.buckets, self.job, self.view, self.grid, self.seen],
            trigger_mode="always_last",
            **NOW,
        )
        self.family.input(self.show_clip_settings, inputs=[self.family], outputs=[self.cutting], **NOW)
        for part in self.cut.values():
            for event in (part.submit, part.blur) if isinstance(part, gr.Textbox) else (part.input,):
                event(
                    self.change_clip_settings,
                    inputs_kwargs={"at": self.at, **self.cut},
                    outputs=[self.at],
                    trigger_mode="always_last",
                    **NOW,
                )
        again.click(
            self.examine_again,
            inputs_kwargs=self.here,
            outputs=[self.seen],
            **NOW,
        )

    def _lay_out_pictures(self) -> None:
        say = self.say
        with gr.Row():
            self.query = gr.Textbox(label=say("dataset.search"), max_lines=1, elem_id="dataset-search", scale=3)
            self.showing = gr.Dropdown(
                [(say(f"dataset.showing.{kind}"), kind) for kind in SHOWING], value="all", label=say("dataset.showing")
            )
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                self.grid = panel(elem_id="dataset-grid")
            with gr.Column(scale=2, min_width=300):
                self.view = panel(elem_id="dataset-view")
                self.caption = gr.Textbox(
                    label=say("dataset.caption"), lines=5, max_lines=14, elem_id="dataset-caption"
                )
                with gr.Row():
                    save = gr.Button(say("dataset.save"), elem_id="dataset-save", size="md")
                    following = gr.Button(
                        say("dataset.save_next"), variant="primary", elem_id="dataset-next", size="md"
                    )
        with gr.Accordion(say("dataset.many"), open=True, elem_id="dataset-many"):
            with gr.Row():
                self.operation = gr.Dropdown(
                    [(say(f"dataset.do.{name}"), name) for name in OPERATIONS],
                    value="add_first",
                    label=say("dataset.operation"),
                    elem_id="dataset-operation",
                )
                self.first = gr.Textbox(label=say("dataset.first"), max_lines=1, elem_id="dataset-first")
                self.second = gr.Textbox(
                    label=say("dataset.second"), max_lines=1, elem_id="dataset-second", visible=False
                )
                self.scope = gr.Dropdown(
                    [(say(f"dataset.scope.{name}"), name) for name in ("all", "filter", "chosen")],
                    value="all",
                    label=say("dataset.scope"),
                    elem_id="dataset-scope",
                )
            with gr.Row():
                look = gr.Button(say("dataset.preview"), elem_id="dataset-preview", size="md")
                apply = gr.Button(say("dataset.apply"), variant="primary", elem_id="dataset-apply", size="md")
                undo = gr.Button(say("dataset.undo"), elem_id="dataset-undo", size="md")
                redo = gr.Button(say("dataset.redo"), elem_id="dataset-redo", size="md")
            self.changes = panel(elem_id="dataset-changes")
        for event in (self.query.submit, self.query.blur, self.showing.input):
            event(
                self.filter_grid,
                inputs_kwargs=self.here | {"query": self.query, "showing": self.showing},
                outputs=[self.at, self.grid],
                **NOW,
            )
        self.editor: dict[str, Block] = {"caption": self.caption, "editing": self.editing}
        self.everything = [self.at, self.head, self.grid, self.view, self.tags, *self.editor.values()]
        # Long handlers with a progress bar need Gradio's queue; repainting follows in order.
        self.afterwards = {"fn": self.reload, "inputs_kwargs": self.here | self.editor, **NOW}
        self.afterwards["outputs"] = self.everything
        for button, step in ((save, 0), (following, 1)):
            button.click(
                partial(self.save, step),
                inputs_kwargs=self.here | self.editor,
                outputs=[self.message, *self.everything],
                js=OPENING,
                **NOW,
            ).then(None, js=OPENED)
        self.operation.change(
            lambda name: [gr.update(visible=OPERATIONS[name][0] > number) for number in range(2)],
            self.operation,
            [self.first, self.second],
            **NOW,
        )
        given: dict[str, Block]
        given = {"at": self.at, "operation": self.operation, "first": self.first, "second": self.second}
        look.click(
            self.preview,
            inputs_kwargs=given | {"scope": self.scope},
            outputs=[self.message, self.edit, self.changes],
            **NOW,
        )
        apply.click(
            self.apply,
            inputs_kwargs={"at": self.at, "edit": self.edit},
            outputs=[self.message, self.edit, self.changes],
            **live_panel.private_event(show_progress="full", show_progress_on=[self.changes]),
        ).then(**self.afterwards)
        for button, what in ((undo, captions.undo), (redo, captions.redo)):
            button.click(
                partial(self.undo_or_redo, what),
                inputs_kwargs={"at": self.at},
                outputs=[self.message],
                **live_panel.private_event(show_progress="full", show_progress_on=[self.changes]),
            ).then(**self.afterwards)

    def _lay_out_captioning(self) -> None:
        say = self.say
        gr.Markdown(say("dataset.auto.about"))
        with gr.Row():
            model = gr.Textbox(
                label=say("dataset.auto.model"),
                placeholder="florence-community/Florence-2-large-ft",
                max_lines=1,
                elem_id="auto-model",
            )
            kind = gr.Radio(
                [(say(f"dataset.auto.{name}"), name) for name in ("text", "tags")],
                value="text",
                label=say("dataset.auto.kind"),
            )
        with gr.Row():
            prompt = gr.Textbox(label=say("dataset.auto.prompt"), max_lines=3)
            trigger = gr.Textbox(label=say("dataset.auto.trigger"), max_lines=1, elem_id="auto-trigger")
        overwrite = gr.Checkbox(label=say("dataset.auto.overwrite"), value=False)
        begin = gr.Button(say("dataset.auto.begin"), variant="primary", elem_id="auto-begin", size="md")
        self.job = panel(elem_id="dataset-job")
        live_panel.on_press(self.job, self.press_job, outputs=[self.message])
        begin.click(
            self.start_captioning,
            inputs_kwargs={
                "at": self.at,
                "model": model,
                "kind": kind,
                "prompt": prompt,
                "trigger": trigger,
                "overwrite": overwrite,
            },
            outputs=[self.message, self.seen],
            **NOW,
        )

    def _make_field(self, key: str) -> Any:
        """Make a field for a training setting, to be rendered later."""
        setting, language = form.settings()[key], self.ui.language
        given = {
            "label": translations.get_label(language, key),
            "value": form.to_component(setting, setting.default),
            "elem_id": f"dataset-{setting.name}",
            "render": False,
        }
        if setting.kind == "choice":
            return gr.Dropdown(
                [(translations.get_choice_label(language, key, word), word) for word in setting.choices], **given
            )
        return gr.Textbox(info=translations.get_help(language, key, setting.description), max_lines=1, **given)

    # -- what happens

    def show_clip_settings(self, family: str) -> Any:
        """Show the clip settings for families that train on clips."""
        return gr.update(visible=families.traits(family)["clips"])

    def change_clip_settings(self, at: dict[str, Any], **held: Any) -> dict[str, Any]:
        """Keep changed clip settings; the next tick shows the result."""
        return {**at, "cut": held} if at else at

    def _read_training_values(self) -> dict[str, Any]:
        """Return the settings of New training; if that form is untouched, those of the newest training."""
        home = self.ui.place.home
        text = Draft(home).text()
        if text == form.START:
            trainings = [
                view
                for view in run_monitor.get_monitor(self.ui.place).views()
                if view.kind == "train" and type(view.id) is int
            ]
            if trainings:
                text = run_monitor.get_monitor(self.ui.place).queue.config(
                    max(trainings, key=lambda training: training.created).id
                )
        return form.read_values(text, home)

    def _choose_examination(self, folder: Path | None) -> tuple[str, int, dict[str, Any]]:
        """Return what to examine a folder for: family, resolution (0 is the family's), clip settings."""
        settings = {name: form.settings()[f"dataset.{name}"] for name in dataset_folder.CUT}
        usual = {name: form.to_component(setting, setting.default) for name, setting in settings.items()}
        try:
            values = self._read_training_values()
        except UserError:  # New training and the list of runs report it
            values = {}
        family, side = str(values.get("model.family")), values.get("dataset.resolution")
        if family not in self.families:
            return "sdxl", 0, usual
        rows = self._find_rows(values, folder) if folder else []
        side = (rows and rows[0].get("resolution")) or side
        cut = {name: form.to_component(setting, values[f"dataset.{name}"]) for name, setting in settings.items()}
        return family, side if type(side) is int else 0, cut if families.traits(family)["clips"] else usual

    def _find_rows(self, values: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
        """Return the entries of dataset.folders whose path is this folder."""
        rows, own_rows = values["dataset.folders"], []
        for row in rows if isinstance(rows, list) else []:
            path = row.get("path") if isinstance(row, dict) else None
            if isinstance(path, str) and path:
                with contextlib.suppress(UserError):  # New training reports what is wrong with a path
                    if self.ui.path(self.ui.place.home / os.path.expanduser(path)) == folder:
                        own_rows.append(row)
        return own_rows

    def _find_draft_mask(self, folder: Path) -> str:
        """Return where New training has the masks of a folder, as in dataset.folders; "" if it names none."""
        home = self.ui.place.home
        for row in self._find_draft_rows(folder):
            mask = row.get("mask")
            if isinstance(mask, str) and mask:
                with contextlib.suppress(UserError):
                    return str(self.ui.path(home / os.path.expanduser(mask))) if names_a_folder_of_masks(mask) else mask
        return ""

    def _list_draft_tag_settings(self, folder: Path) -> list[str]:
        """Return what New training does to the tags of a folder, as `--set` of the doctor; [] if nothing."""
        if not self._find_draft_rows(folder):
            return []
        values = form.read_values(Draft(self.ui.place.home).text(), self.ui.place.home)
        if not (values["dataset.shuffle_tags"] is True or values["dataset.tag_dropout"]):
            return []
        return [f"dataset.{name}={json.dumps(values[f'dataset.{name}'])}" for name in dataset_folder.TAGS]

    def _find_draft_rows(self, folder: Path) -> list[dict[str, Any]]:
        """Return the rows of dataset.folders in which New training names this folder."""
        home = self.ui.place.home
        try:
            return self._find_rows(form.read_values(Draft(home).text(), home), folder)
        except UserError:  # New training reports what is wrong with it
            return []

    def open(self, request: gr.Request) -> list[Any]:
        """Handle the opening of the page: show the folder that its address names."""
        given = dict(request.query_params).get("folder", "")
        offered = [str(path) for path in image_folders.find_folders(self.ui.place.roots)]
        choices = gr.update(choices=[*dict.fromkeys([*offered, *([given] if given else [])])], value=given or None)
        folder, mask, tags, problem = None, "", [], ""
        try:
            if given:
                folder = self.ui.path(given)
                mask, tags = self._find_draft_mask(folder), self._list_draft_tag_settings(folder)
                dataset_folder.open_folder(folder, fresh=True, mask=mask)
        except UserError as error:
            problem = self._render_error(error)
        family, resolution, cut = self._choose_examination(folder)
        held = [family, resolution, self.show_clip_settings(family), *cut.values()]
        if not given:
            empty = self.say("dataset.none" if not offered else "dataset.choose")
            nothing = [{}, f'<p class="empty">{escape(empty)}</p>', "", "", "", "", ""]
            return [choices, gr.update(visible=False), *held, *nothing]
        if problem or folder is None:
            return [choices, gr.update(visible=False), *held, {}, problem, "", "", "", "", ""]
        at = {"folder": str(folder), "query": "", "showing": "all", "page": 0, "picked": "", "chosen": []}
        at |= {"mask": mask, "finding": "", "cut": cut, "tags": tags, "unsaved": dict(_unwritten.get(folder, {}))}
        shown_now = [*self._render_all(at, family, resolution), *self._fill_editor("", "", "")]
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
            dataset = self._get_dataset(at)
            at = dict(at)
            if do == "page":
                at["page"] = max(0, int(click.get("to", "0")))
            elif do in ("pick", "look") and name in dataset.files:
                if do == "look":
                    note = self._show_note(self.say("dataset.looked", file=name))
                left, was = _parse_editing(editing)
                at["unsaved"] = _drop_name(at["unsaved"], left)
                if left in dataset.files and not _is_unchanged(caption, was):
                    at["unsaved"][left] = (was, caption)
                    if left != name:
                        note = self._show_note(self.say("dataset.unsaved", file=left))
                at["picked"], editor = name, self._fill_editor(name, *self._find_texts(at, dataset, name))
            elif do == "choose" and name in dataset.files:
                at["chosen"] = [other for other in at["chosen"] if other != name] + [name] * (name not in at["chosen"])
            elif do == "choose_all":
                at["chosen"] = list(dict.fromkeys([*at["chosen"], *self._filter_names(at, dataset)]))
            elif do == "choose_none":
                at["chosen"] = []
            elif do == "tag":
                at |= {"query": f"[{name}]", "page": 0, "finding": ""}
                note = self._show_note(self.say("dataset.filtered", what=name))
            elif do == "finding":
                at |= {"finding": name, "page": 0, "query": "", "only": self._list_files(at, name, family, resolution)}
                note = self._show_note(self.say("dataset.filtered", what=self.say(f"dataset.kind.{name}")))
            elif do == "repair":
                note = self._repair(at, dataset, family, resolution)
                left, was = _parse_editing(editing)
                if left in dataset.files and _is_unchanged(caption, was):
                    text = dataset.texts[left]
                    editor = self._fill_editor(left, text, text)
            elif do == "clear":
                at |= {"query": "", "finding": "", "showing": "all", "page": 0}
            elif do in ("remove", "rename"):
                edit = None
                if do == "remove":
                    edit = captions.preview(dataset.folder, [caption_operations.RemoveTag(name)], mask=dataset.mask)
                note = self._show_note(self.say("dataset.prepared"))
                rest = [do, name, "", edit, self._render_changes(edit) if edit else ""]
        except (UserError, ValueError) as error:
            return [self._show_error(error), *([gr.skip()] * len(self.everything)), *rest]
        return [note, *self._render_all(at, family, resolution), *editor, *rest]

    def _repair(self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder, family: str, resolution: float) -> Any:
        """Repair caption edits that a crash interrupted, and read the folder again."""
        repair = captions.repair(dataset.folder)
        dataset_folder.open_folder(dataset.folder, fresh=True, mask=at["mask"])
        self._examine(at, dataset, family, resolution, again=True)
        counts = {"taken_back": len(repair.taken_back), "restored": len(repair.restored), "swept": len(repair.swept)}
        lines = [self.say("dataset.repaired", **counts)]
        lines += [self.say("dataset.repaired.others", files=", ".join(repair.others[:8]))] if repair.others else []
        return self._show_note(" ".join(lines), wrong=bool(repair.others))

    def add_uploads(
        self, at: dict[str, Any], family: str, resolution: float, files: list[str] | None, name: str
    ) -> list[Any]:
        """Handle dropped files: add them to the open folder, or to a new folder of the page, which is then opened."""
        try:
            if not name.strip() and not at:
                raise UserError(self.say("dataset.upload.where"))
            own = self.ui.place.home / "datasets" / sanitize.check_name(name) if name.strip() else None
            folder = own or self._get_dataset(at).folder
            count, refused = image_folders.add_uploads(files or [], folder)
        except UserError as error:
            return [None, gr.skip(), self._show_error(error)]
        lines = [self.say("new.pictures.taken", count=count, folder=folder.name)]
        if refused:
            reasons = "; ".join(map(self.ui.translate, refused[:8])) + (" …" if len(refused) > 8 else "")
            lines.append(self.say("new.pictures.refused", lines=reasons))
        note = self._show_note(" ".join(lines), wrong=bool(refused))
        if at and str(folder) == at["folder"]:
            dataset = dataset_folder.open_folder(folder, fresh=True, mask=at["mask"])
            self._examine(at, dataset, family, resolution, again=True)
        return [None, str(folder) if own and not refused else gr.skip(), note]

    def filter_grid(self, at: dict[str, Any], family: str, resolution: float, query: str, showing: str) -> list[Any]:
        """Handle a changed search or filter."""
        if (query, showing) == (at.get("query"), at.get("showing")) or not at:
            return [gr.skip(), gr.skip()]
        at = {**at, "query": query, "showing": showing, "page": 0, "finding": ""}
        return [at, self._render_grid(at, self._get_dataset(at), family, resolution)]

    def save(
        self, step: int, at: dict[str, Any], family: str, resolution: float, caption: str, editing: str
    ) -> list[Any]:
        """Write the editor's caption, and go on to the next image if `step` is 1."""
        name, loaded = _parse_editing(editing)
        try:
            dataset = self._get_dataset(at)
            if name not in dataset.files:
                raise UserError(self.say("dataset.pick_first"))
            at = {**at, "picked": name, "unsaved": _drop_name(at["unsaved"], name)}
            if dataset.reread_caption(name) != loaded:
                complaint = self._show_note(self.say("dataset.changed_meanwhile", file=name), wrong=True)
                text = dataset.texts[name]
                return [complaint, *self._render_all(at, family, resolution), *self._fill_editor(name, text, text)]
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
            note = self._show_note(self.say("dataset.saved" if edit.changes else "dataset.unchanged", file=name))
            dataset.reread_caption(name)
            names = self._filter_names(at, dataset)
            if step and name in names and names.index(name) + 1 < len(names):
                name = names[names.index(name) + 1]
            at["picked"], editor = name, self._fill_editor(name, *self._find_texts(at, dataset, name))
            if name in names:
                at["page"] = names.index(name) // PER_PAGE
        except UserError as error:
            return [self._show_error(error), *([gr.skip()] * len(self.everything))]
        return [note, *self._render_all(at, family, resolution), *editor]

    def reload(self, at: dict[str, Any], family: str, resolution: float, caption: str, editing: str) -> list[Any]:
        """Read all captions again. Unsaved input in the editor stays."""
        name, was = _parse_editing(editing)
        try:
            dataset = dataset_folder.open_folder(self._get_dataset(at).folder, fresh=True, mask=at["mask"])
            editor = [gr.skip()] * 2
            if name in dataset.files and _is_unchanged(caption, was):
                editor = self._fill_editor(name, dataset.texts[name], dataset.texts[name])
            return [*self._render_all(at, family, resolution), *editor]
        except UserError:  # reported by the handler before this one
            return [gr.skip()] * len(self.everything)

    def preview(self, at: dict[str, Any], operation: str, first: str, second: str, scope: str) -> list[Any]:
        """Preview an edit of many captions."""
        try:
            dataset = self._get_dataset(at)
            count, make = OPERATIONS[operation]
            only = None
            if scope != "all":
                only = (
                    self._filter_names(at, dataset)
                    if scope == "filter"
                    else [n for n in at["chosen"] if n in dataset.files]
                )
                if not only:
                    raise UserError(self.say("dataset.none_chosen"))
            edit = captions.preview(dataset.folder, [make(*(first, second)[:count])], only, dataset.mask)
        except UserError as error:
            return [self._show_error(error), None, ""]
        return [gr.update(visible=False), edit, self._render_changes(edit)]

    def apply(self, at: dict[str, Any], edit: captions.Edit | None, progress: gr.Progress = PROGRESS) -> list[Any]:
        """Apply the previewed edit."""
        try:
            if edit is None or not edit.changes:
                raise UserError(self.say("dataset.preview_first"))
            folder = self._get_dataset(at).folder
            entry = captions.apply(folder, edit, progress=self._count_progress(progress))
        except UserError as error:
            return [self._show_error(error), None, ""]
        return [self._show_note(self.say("dataset.applied", count=entry.files)), None, ""]

    def _count_progress(self, progress: gr.Progress) -> Callable[[int, int], Any]:
        return lambda done, total: progress((done, total), unit=self.say("dataset.captions"))

    def undo_or_redo(
        self, what: Callable[..., captions.Entry], at: dict[str, Any], progress: gr.Progress = PROGRESS
    ) -> dict[str, Any]:
        """Undo or redo an edit; `what` is captions.undo or captions.redo."""
        try:
            entry = what(self._get_dataset(at).folder, progress=self._count_progress(progress))
        except UserError as error:
            return self._show_error(error)
        return self._show_note(self.say("dataset.redone" if entry.done else "dataset.undone", count=entry.files))

    def examine_again(self, at: dict[str, Any], family: str, resolution: float) -> dict[str, int]:
        """Examine the folder again. Unchanged files are not decoded again."""
        if at:
            self._examine(at, self._get_dataset(at), family, resolution, again=True)
        return {}

    def start_captioning(
        self, at: dict[str, Any], model: str, kind: str, prompt: str, trigger: str, overwrite: bool
    ) -> list[Any]:
        """Queue a captioning job."""
        try:
            dataset = self._get_dataset(at)
            number = dataset_folder.submit_captioning(
                self.ui.place,
                dataset.folder,
                model=model,
                kind=kind,
                prompt=prompt,
                overwrite=overwrite,
                trigger=trigger,
                mask=dataset.mask,
            )
        except UserError as error:
            return [self._show_error(error), gr.skip()]
        run_monitor.get_monitor(self.ui.place).views.invalidate()
        return [self._show_note(self.say("dataset.auto.queued", number=number)), {}]

    def press_job(self, event: gr.EventData) -> Any:
        """Handle a button of a captioning job."""
        click = live_panel.read_click(event)
        try:
            return self._show_note(run_monitor.run_action(self.ui, click.get("do", ""), click.get("id", "")))
        except UserError as error:
            return self._show_error(error)

    def paint(self, at: dict[str, Any], family: str, resolution: float, seen: dict[str, int]) -> list[Any]:
        """Handle a tick: paint the doctor's progress or report, captioning jobs, and clips in the grid."""
        if not at:
            return [gr.skip()] * 6
        grid = gr.skip()
        painted: float | None = seen.get("told")
        try:
            dataset = dataset_folder.open_cached(self.ui.path(at["folder"]), at["mask"])
            examination = self._examine(at, dataset, family, resolution)
            if examination.report is not None and painted != examination.begun:
                painted = examination.begun
                if dataset.videos or examination.report["counts"]["clips"]:
                    grid = self._render_grid(at, dataset, family, resolution)
            view = self._render_view(at, dataset, family, resolution)
            panels = [
                self._render_findings(examination),
                self._render_buckets(examination, family),
                self._render_jobs(dataset.folder),
                view,
            ]
        except UserError as error:
            panels = [self._render_error(error), "", "", ""]
        sent, seen = live_panel.skip_unchanged(panels, seen)
        return [*sent, grid, {**seen, "told": painted}]

    # -- what is shown

    def _get_dataset(self, at: dict[str, Any]) -> dataset_folder.DatasetFolder:
        """Return the open folder, if the page may still use it. Raises UserError."""
        if not at.get("folder"):
            raise UserError(self.say("dataset.choose"))
        return dataset_folder.open_folder(self.ui.path(at["folder"]), mask=at["mask"])

    def _choose_resolution(self, family: str, given: float) -> int:
        return int(given or 0) or families.get(family).native_resolution

    def _examine(
        self,
        at: dict[str, Any],
        dataset: dataset_folder.DatasetFolder,
        family: str,
        resolution: float,
        again: bool = False,
    ) -> dataset_folder.Examination:
        held = {
            name: form.from_component(form.settings()[f"dataset.{name}"], at["cut"][name])
            for name in dataset_folder.CUT
        }
        settings = (*dataset_folder.list_clip_settings(family, **held), *at["tags"])
        side = self._choose_resolution(family, resolution)
        return dataset_folder.examine(self.ui.place, dataset.folder, family, side, settings, again, dataset.mask)

    def _render_all(self, at: dict[str, Any], family: str, resolution: float) -> list[Any]:
        """Return values for at, head, grid, view and tags."""
        dataset = self._get_dataset(at)
        view, grid = (show(at, dataset, family, resolution) for show in (self._render_view, self._render_grid))
        return [at, self._render_head(dataset), grid, view, self._render_tags(at, dataset)]

    def _find_texts(self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder, name: str) -> tuple[str, str]:
        """Return an image's caption as it was loaded, and as it was when the editor left it."""
        text = "" if name in dataset.wrong else dataset.reread_caption(name)
        return at["unsaved"].get(name, (text, text))

    def _fill_editor(self, name: str, loaded: str, text: str) -> list[Any]:
        """Return values for the editor: this text for the caption of an image, and which caption was loaded."""
        return [gr.update(value=text, interactive=bool(name)), json.dumps([name, loaded])]

    def _filter_names(self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder) -> list[str]:
        """List the names that match the filters. "[tag]" searches a tag, other words a part of the name or text."""
        query = at["query"].strip()
        names = list(dataset.files)
        if at.get("finding"):
            only = set(at.get("only", ()))
            names = [name for name in names if name in only]
        if at["showing"] == "uncaptioned":
            names = [name for name in names if not dataset.texts[name].strip()]
        if at["showing"] == "chosen":
            names = [name for name in names if name in at["chosen"]]
        if match := re.fullmatch(r"\[(.+)\]", query):
            return [
                name
                for name in names
                if match[1] in caption_operations.split_tags(" ".join(dataset.texts[name].splitlines()))
            ]
        wanted = query.casefold().split()
        return [name for name in names if all(w in f"{name} {dataset.texts[name]}".casefold() for w in wanted)]

    def _render_head(self, dataset: dataset_folder.DatasetFolder) -> str:
        without = sum(not text.strip() for text in dataset.texts.values())
        videos = len(dataset.videos)
        parts = [self.say("dataset.count", count=len(dataset.files) - videos)]
        parts += [self.say("dataset.videos", count=videos)] if videos else []
        parts += [self.say("dataset.without", count=without)] if without else []
        parts += [self.say("dataset.masks", count=dataset.masks, mask=dataset.mask)] if dataset.masks else []
        try:
            history = captions.history(dataset.folder)
        except UserError as error:
            return self._render_error(error)
        last = [entry for entry in history if entry.done][-1:]
        parts += [self.say("dataset.last", title=self.ui.translate(entry.title), count=entry.files) for entry in last]
        parts += [self.say("dataset.unreadable", count=len(dataset.wrong))] if dataset.wrong else []
        remarks = []
        if dataset.masks and not dataset.given:
            remarks.append(self.say("dataset.masks.guessed", count=dataset.masks, mask=dataset.mask))
            remarks += [self.say("dataset.masks.trained")] if dataset.mask in image_folders.MASKS else []
        if dataset.inside:
            remarks.append(self.say("dataset.masks.inside", folder=dataset.inside))
        notes = f"<p>{escape(' '.join(remarks))}</p>" if remarks else ""
        if any(entry.half_done for entry in history):
            button = run_cards.render_button("repair", self.say("dataset.repair"))
            notes += f'<p class="wrong">{escape(self.say("dataset.half_done"))} {button}</p>'
        return f'<p class="dim"><b>{escape(dataset.folder.name)}</b> · {" · ".join(map(escape, parts))}</p>{notes}'

    def _render_grid(
        self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder, family: str, resolution: float
    ) -> str:
        names = self._filter_names(at, dataset)
        pages = max(1, math.ceil(len(names) / PER_PAGE))
        page = min(at["page"], pages - 1)
        chosen = set(at["chosen"])
        known = self._list_clips(at, dataset, family, resolution)
        cells = "".join(
            self._render_cell(dataset, name, name == at["picked"], name in chosen, known.get(name, {}))
            for name in names[page * PER_PAGE : (page + 1) * PER_PAGE]
        )
        bar = f"<span>{self.say('dataset.shown', count=len(names), of=len(dataset.files))}</span>"
        if chosen:
            bar += f"<span>{self.say('dataset.chosen', count=len(chosen))}</span>"
        bar += run_cards.render_button("choose_all", self.say("dataset.choose_all"))
        bar += run_cards.render_button("choose_none", self.say("dataset.choose_none")) if chosen else ""
        if at["query"] or at.get("finding") or at["showing"] != "all":
            bar += run_cards.render_button("clear", self.say("dataset.clear"))
        turn = ""
        if pages > 1:
            back = run_cards.render_button("page", self.say("dataset.back"), to=str(page - 1)) if page else ""
            on = run_cards.render_button("page", self.say("dataset.on"), to=str(page + 1)) if page + 1 < pages else ""
            here = self.say("dataset.page", page=page + 1, pages=pages)
            turn = f'<div class="tools">{back}<span>{here}</span>{on}</div>'
        empty = "" if names else f'<p class="empty">{self.say("dataset.nothing")}</p>'
        return f'<div class="tools">{bar}</div><div class="thumbs">{cells}</div>{empty}{turn}'

    def _list_clips(
        self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder, family: str, resolution: float
    ) -> dict[str, dict[str, Any]]:
        """Return what the report says of each clip: its entry among the images, or {"error": message}."""
        if not dataset.videos and not at["cut"]["frames"]:
            return {}
        examination = self._examine(at, dataset, family, resolution)
        known = {clip["file"]: clip for clip in (examination.report or {}).get("pictures", ()) if "seconds" in clip}
        return known | {
            name: {"error": why}
            for name, why in examination.list_files("unreadable").items()
            if dataset_folder.is_video(name)
        }

    def _describe_clip(self, clip: dict[str, Any]) -> list[str]:
        """Describe a clip: seconds, frames per second, and how many pieces of how many frames are trained."""
        figures = [self.say("dataset.clip.seconds", seconds=run_cards.digits(clip["seconds"]))]
        figures.append(self.say("dataset.clip.rate", rate=run_cards.digits(clip["fps"])))
        if clip["pieces"]:
            figures.append(self.say("dataset.clip.pieces", count=clip["pieces"], length=clip["length"]))
        return figures

    def _render_cell(
        self, dataset: dataset_folder.DatasetFolder, name: str, picked: bool, chosen: bool, clip: dict[str, Any]
    ) -> str:
        text = dataset.texts[name]
        source = escape(self.ui.picture(dataset.folder / name, 192))
        label, tick = escape(name), escape(self.say("dataset.choose_one", file=name))
        line = escape(text[:90]) if text.strip() else f'<em class="wrong">{self.say("dataset.no_caption")}</em>'
        if name in dataset.wrong:  # a caption that cannot be read
            line = f'<em class="wrong">{escape(self.ui.translate(dataset.wrong[name]))}</em>'
        image, about = f'<img src="{source}" alt="{label}" loading="lazy" decoding="async">', ""
        if dataset_folder.is_video(name) and not clips.can_read_videos():
            image = f'<span class="wrong">{escape(self.ui.translate(clips.NEEDED))}</span>'
        elif "error" in clip:
            image = f'<span class="wrong">{escape(self.ui.translate(clip["error"]))}</span>'
        elif clip:
            image += f'<i class="length">▶ {escape(self._describe_clip(clip)[0])}</i>'
            figures = [f"{clip['width']} × {clip['height']}", *self._describe_clip(clip)[1:]]
            about = f'<p class="dim">{escape(" · ".join(figures))}</p>'
        elif dataset_folder.is_video(name):
            image += '<i class="length">▶</i>'
        return (
            f'<div class="thumb{" picked" if picked else ""}{" chosen" if chosen else ""}">'
            f'<button type="button" data-do="pick" data-name="{label}" title="{label}">'
            f"{image}</button>"
            f'<button type="button" class="tick" data-do="choose" data-name="{label}" '
            f'aria-pressed="{str(chosen).lower()}" aria-label="{tick}"></button>{about}<p>{line}</p></div>'
        )

    def _render_view(
        self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder, family: str, resolution: float
    ) -> str:
        name = at["picked"]
        if name not in dataset.files:
            return f'<p class="empty">{self.say("dataset.pick")}</p>'
        side = self._choose_resolution(family, resolution)
        examination = self._examine(at, dataset, family, resolution)
        size = next(
            (picture for picture in (examination.report or {}).get("pictures", ()) if picture["file"] == name), None
        )
        crop, figures = "", [escape(name)]
        if size is not None:
            try:
                place = buckets.place((size["width"], size["height"]), side, 64)
            except UserError as error:
                figures.append(escape(self.ui.translate(str(error))))
            else:
                (width, height), (left, top), (w, h) = place.resized_wh, place.crop_xy, place.bucket_wh
                style = f"left:{left / width:.3%};top:{top / height:.3%};width:{w / width:.3%};height:{h / height:.3%}"
                crop = f'<i class="crop" data-bucket="{w}x{h}" style="{style}"></i>'
                figures.append(f"{size['width']} × {size['height']}")
                figures.append(self.say("dataset.crop", bucket=f"{w} × {h}", cut=f"{1 - w * h / (width * height):.0%}"))
                figures.append(escape(self.families[family]))
            if "seconds" in size:
                figures += map(escape, self._describe_clip(size))
        odd = [dataset.wrong[name]] if name in dataset.wrong else []
        source = escape(self.ui.picture(dataset.folder / name, 1280))
        picture = f'<div class="large"><img src="{source}" alt="{escape(name)}">{crop}</div>'
        if dataset_folder.is_video(name) and not clips.can_read_videos():
            picture, odd = "", [*odd, clips.NEEDED]
        elif dataset_folder.is_video(name) and (why := examination.list_files("unreadable").get(name)):
            picture, odd = "", [*odd, why]
        wrong = "".join(f'<p class="wrong">{escape(self.ui.translate(line))}</p>' for line in odd)
        return f'{picture}<p class="dim">{" · ".join(figures)}</p>{wrong}'

    def _render_tags(self, at: dict[str, Any], dataset: dataset_folder.DatasetFolder) -> str:
        counted = dataset.count_tags(self._filter_names(at, dataset) if at["query"] or at.get("finding") else None)
        if not counted:
            return f'<p class="empty">{self.say("dataset.no_tags")}</p>'
        rows = []
        for tag, count in counted.most_common(MOST_TAGS):
            buttons = "".join(
                run_cards.render_button(do, self.say(f"dataset.tag.{do}"), name=tag)
                for do in ("tag", "rename", "remove")
            )
            rows.append([escape(tag), str(count), f'<div class="tools">{buttons}</div>'])
        more = len(counted) - len(rows)
        rest = f'<p class="dim">{self.say("dataset.more_tags", count=more)}</p>' if more > 0 else ""
        return run_cards.render_table([self.say("dataset.tag"), self.say("dataset.captions"), ""], rows) + rest

    def _render_changes(self, edit: captions.Edit) -> str:
        head = self.say("dataset.would", count=len(edit.changes))
        rows = []
        for change in edit.changes[:MOST_CHANGES]:
            rows.append(f"<dt>{escape(change.file)}</dt><dd>{_render_diff(*change.texts())}</dd>")
        more = len(edit.changes) - len(rows)
        rest = f'<p class="dim">{self.say("dataset.more", count=more)}</p>' if more > 0 else ""
        wrong = "".join(f'<p class="wrong">{escape(self.ui.translate(line))}</p>' for line in edit.problems[:20])
        return f'<p><b>{head}</b></p>{wrong}<dl class="diff">{"".join(rows)}</dl>{rest}'

    def _render_progress(self, examination: dataset_folder.Examination) -> str:
        if examination.problem:
            return f'<p class="wrong">{escape(self.ui.translate(examination.problem))}</p>'
        share = f"{100 * examination.done / examination.total:.0f}%" if examination.total else "0%"
        line = self.say("dataset.examining", done=examination.done, total=examination.total)
        return f'<p class="dim" role="status">{line}</p><div class="bar"><i style="width:{share}"></i></div>'

    def _render_findings(self, examination: dataset_folder.Examination) -> str:
        if examination.report is None:
            return self._render_progress(examination)
        counts, sizes = examination.report["counts"], examination.report["sizes"]
        head = self.say(
            "dataset.figures", **{name: counts[name] for name in ("readable", "pictures", "different_captions")}
        )
        if sizes:
            head += " " + self.say("dataset.sizes", smallest=sizes["smallest"], largest=sizes["largest"])
        if counts["clips"]:
            head += " " + self.say("dataset.clips", clips=counts["clips"], pieces=counts["pieces"])
        made = [f'<p class="dim">{escape(head)}</p>']
        if not examination.report["findings"]:
            made.append(f'<p class="empty">{self.say("dataset.all_well")}</p>')
        for finding in examination.report["findings"]:
            kind, files = finding["kind"], finding["files"]
            rows = "".join(self._render_file(kind, file) for file in files[:MOST_FILES])
            more = len(files) - MOST_FILES
            rows += f'<li class="dim">{self.say("dataset.more", count=more)}</li>' if more > 0 else ""
            level = self.say(f"dataset.level.{finding['level']}")
            shown_only = any(file["file"] for file in files) and kind not in ("kohya_folder",)
            button = run_cards.render_button("finding", self.say("dataset.show_these"), name=kind) if shown_only else ""
            button += run_cards.render_button("repair", self.say("dataset.repair")) if kind in REPAIRED else ""
            made.append(
                f'<details class="finding {finding["level"]}" data-kind="{kind}"><summary>'
                f'<span class="level">{level}</span>'
                f'<b>{self.say(f"dataset.kind.{kind}")}</b> <span class="dim">{len(files)}</span></summary>'
                f'<p>{self.say(f"dataset.advice.{kind}")}</p><div class="tools">{button}</div><ul>{rows}</ul></details>'
            )
        return "".join(made)

    def _render_file(self, kind: str, finding: dict[str, str]) -> str:
        detail = self.ui.translate(finding["detail"]) if finding["detail"] else ""
        if not finding["file"] or kind == "kohya_folder":
            return f"<li>{escape(' '.join(filter(None, (finding['file'], detail))))}</li>"
        button = run_cards.render_button("look", finding["file"], "plain", name=finding["file"])
        return f'<li>{button} <span class="dim">{escape(detail)}</span></li>'

    def _list_files(self, at: dict[str, Any], kind: str, family: str, resolution: float) -> list[str]:
        return list(self._examine(at, self._get_dataset(at), family, resolution).list_files(kind))

    def _render_buckets(self, examination: dataset_folder.Examination, family: str) -> str:
        if examination.report is None:
            return self._render_progress(examination)
        report = examination.report
        title = escape(self.families[family])
        head = self.say("dataset.buckets", title=title, resolution=report["resolution"], step=report["bucket_step"])
        most = max((bucket["count"] for bucket in report["buckets"]), default=1)
        rows = []
        for bucket in report["buckets"]:
            width, height, *frames = map(int, bucket["size"].split("x"))
            scale = 36 / max(width, height)
            shape = f'<i class="shape" style="width:{width * scale:.0f}px;height:{height * scale:.0f}px"></i>'
            bar = f'<div class="bar"><i style="width:{100 * bucket["count"] / most:.0f}%"></i></div>'
            cut = f"{bucket['cut']:.0%} / {bucket['most_cut']:.0%}"
            size = f"{width}\u00a0×\u00a0{height}"
            size += "".join(f" · {self.say('dataset.clip.frames', count=number)}" for number in frames)
            rows.append([shape, size, f"{bucket['count']}{bar}", cut, str(bucket["enlarged"])])
        names = ("", "bucket", "pictures", "cut", "enlarged")
        columns = [self.say(f"dataset.column.{name}") if name else "" for name in names]
        return f'<p class="dim">{head}</p>{run_cards.render_table(columns, rows)}'

    def _render_jobs(self, folder: Path) -> str:
        """Render the captioning jobs of this folder, newest first."""
        watching = run_monitor.get_monitor(self.ui.place)
        views = [view for view in watching.views() if view.command[:2] == ("caption", str(folder))]
        made = []
        for view in sorted(views, key=lambda view: -int(view.id))[:3]:
            lines = watching.queue.log_tail(view.id)
            done, total = dataset_folder.parse_progress(lines)
            bar = f'<div class="bar"><i style="width:{100 * done / total:.0f}%"></i></div>' if total else ""
            count = f"{done} / {total}" if total else ""
            failed = lines and view.state == "failed"
            last = f'<pre tabindex="0">{escape(lines[-1])}</pre>' if failed else ""
            name = escape(run_cards.translate_title(self.ui, view))
            made.append(
                f'<section class="card" data-job="{escape(view.id)}"><div class="row"><h2>{name}</h2>'
                f'{run_cards.render_state(self.ui, view)}<span class="dim">{count}</span></div>'
                f'<p class="said">{escape(run_cards.translate_sentence(self.ui, view.sentence))}</p>'
                f"{last}{bar}{run_cards.render_buttons(self.ui, view)}</section>"
            )
        return f'<div class="cards">{"".join(made)}</div>'

    def _show_note(self, line: str, wrong: bool = False) -> Any:
        return gr.update(value=live_panel.render_toast(escape(line), " wrong" if wrong else ""), visible=True)

    def _show_error(self, error: Exception) -> Any:
        return self._show_note(self.ui.translate(str(error)), wrong=True)

    def _render_error(self, error: Exception) -> str:
        return f'<p class="wrong" role="status">{escape(self.ui.translate(str(error)))}</p>'


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


def _render_diff(before: str, after: str) -> str:
    """Render the text after an edit, with removed parts struck out and new parts marked."""
    old, other = (re.findall(r"\w+|\s+|[^\w\s]", text) for text in (before, after))
    if len(old) * len(other) > 250_000:  # very long texts: shown one after the other
        return f"<del>{escape(before[:500])}</del> <ins>{escape(after[:500])}</ins>"
    made = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, old, other, autojunk=False).get_opcodes():
        if kind == "equal":
            made.append(escape("".join(old[a:b])))
            continue
        made.append(f"<del>{escape(''.join(old[a:b]))}</del>" if b > a else "")
        made.append(f"<ins>{escape(''.join(other[c:d]))}</ins>" if d > c else "")
    return "".join(made)
