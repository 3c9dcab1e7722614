"""Pictures, videos and captions: a grid, an editor, edits of many with undo, findings, buckets, captioning.

`?folder=` names the folder, so that a reload and a second window show the same. Captions are read from disk at every
look; what the doctor says comes from a program of its own that decodes the pictures.
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

from lora_fp8 import families
from lora_fp8.config import UserError, names_a_folder_of_masks
from lora_fp8.data import buckets, captions, clips

from .. import album as room
from .. import form, live, pictures, safe, shows, watch, words
from ..context import Ui
from ..draft import Draft
from ..safe import shown

PER_PAGE = 60
MOST_TAGS, MOST_FILES, MOST_CHANGES = 300, 200, 40
STYLE = (Path(__file__).parent.parent / "dataset.css").read_text(encoding="utf-8")
OPERATIONS: dict[str, tuple[int, Callable[..., captions.Operation]]] = {
    # what is done: how many fields it has, and what does it
    "add_last": (1, captions.AddTag),
    "add_first": (1, partial(captions.AddTag, first=True)),
    "remove": (1, captions.RemoveTag),
    "rename": (2, captions.RenameTag),
    "replace": (2, captions.Replace),
    "pattern": (2, captions.ReplacePattern),
    "trigger": (1, captions.Trigger),
    "prepend": (1, captions.Prepend),
    "append": (1, captions.Append),
    "dedupe": (0, captions.DedupeTags),
    "sort": (0, captions.SortTags),
    "recode": (1, captions.Recode),
}
PROGRESS = gr.Progress()  # Gradio looks for it among the defaults
SHOWING = ("all", "uncaptioned", "chosen")
NOW: dict[str, Any] = live.quiet(queue=False)
"""Of what changes where somebody is: one after the other, as ask.js has it, so that a button acts on what is shown."""
OPENING = "(...inputs) => { window.opening(); return inputs; }"
OPENED = "() => window.opened()"
"""Around what may put another caption into the editor."""
GO = "(folder) => { location.search = '?' + new URLSearchParams({folder: folder || ''}); }"


def build(ui: Ui) -> None:
    """Lay the page out."""
    page = _Page(ui)
    page.lay_out()


def panel(**given: Any) -> gr.HTML:
    """As live.panel, with what this page shows."""
    return gr.HTML("", css_template=live.STYLE + STYLE, js_on_load=live.CLICKS, apply_default_css=False, **given)


class _Page:
    """The components of one language, and what happens when they are used.

    `at` is where somebody is: folder, filters, page of the grid, picked picture, chosen pictures, captions that were
    typed and not saved, how clips are cut (frames, fps, clip), and where New training has the masks. `editing` is kept
    in the browser, beside the editor: whose caption that is, and its text as it was loaded.
    """

    def __init__(self, ui: Ui):
        self.ui, self.say = ui, ui.say
        self.families = {name: str(families.facts(name)["title"]) for name in families.available()}

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
        self.here = {"at": self.at, "family": self.family, "resolution": self.resolution}
        self.cut = {name: self._setting(f"dataset.{name}") for name in room.CUT}
        with gr.Row():
            self.folder = gr.Dropdown(
                label=say("dataset.folder"), choices=[], allow_custom_value=True, elem_id="dataset-folder", scale=5
            )
            go = gr.Button(say("dataset.open"), elem_id="dataset-open", elem_classes="beside", size="md", scale=1)
        with gr.Accordion(say("dataset.upload"), open=False, elem_id="dataset-upload"):
            with gr.Row():
                self.drop = gr.File(
                    file_count="multiple",
                    file_types=[*pictures.TAKEN],
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
        self.said = panel(elem_id="dataset-said", visible=False)
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
        opened = [self.folder, self.tabs, self.family, self.cutting, *self.cut.values(), *self.everything]
        live.opened()(self.open, outputs=opened, js=OPENING, **NOW).then(None, js=OPENED)
        go.click(None, inputs=[self.folder], js=GO, api_visibility="private")
        self.folder.select(None, inputs=[self.folder], js=GO, api_visibility="private")
        for clickable in (self.grid, self.view, self.tags, self.findings, self.head):
            live.on_press(
                clickable,
                self.press,
                OPENED,
                inputs_kwargs=self.here | self.editor,
                outputs=[self.said, *self.everything, self.operation, self.first, self.second, self.edit, self.changes],
                js=OPENING,
            )
        address = gr.Textbox(visible="hidden", elem_id="dataset-address")
        self.drop.upload(
            self.take_in,
            inputs_kwargs=self.here | {"files": self.drop, "name": self.new_set},
            outputs=[self.drop, address, self.said],
            **live.quiet(show_progress="minimal", show_progress_on=[self.drop]),
        ).then(**self.afterwards)
        address.change(None, inputs=[address], js=GO, api_visibility="private")
        timer = gr.Timer(live.SECONDS)
        gr.on(
            [timer.tick, self.family.input, self.resolution.submit],
            self.paint,
            inputs_kwargs=self.here | {"seen": self.seen},
            outputs=[self.findings, self.buckets, self.job, self.view, self.grid, self.seen],
            trigger_mode="always_last",
            **NOW,
        )
        self.family.input(self.takes_clips, inputs=[self.family], outputs=[self.cutting], **NOW)
        for part in self.cut.values():
            for event in (part.submit, part.blur) if isinstance(part, gr.Textbox) else (part.input,):
                event(
                    self.recut,
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
                self.narrow,
                inputs_kwargs=self.here | {"query": self.query, "showing": self.showing},
                outputs=[self.at, self.grid],
                **NOW,
            )
        self.editor = {"caption": self.caption, "editing": self.editing}
        self.everything = [self.at, self.head, self.grid, self.view, self.tags, *self.editor.values()]
        # What takes long and tells how far it is needs the queue; what is shown then comes in its turn.
        self.afterwards = {"fn": self.reload, "inputs_kwargs": self.here | self.editor, **NOW}
        self.afterwards["outputs"] = self.everything
        for button, step in ((save, 0), (following, 1)):
            button.click(
                partial(self.save, step),
                inputs_kwargs=self.here | self.editor,
                outputs=[self.said, *self.everything],
                js=OPENING,
                **NOW,
            ).then(None, js=OPENED)
        self.operation.change(
            lambda name: [gr.update(visible=OPERATIONS[name][0] > number) for number in range(2)],
            self.operation,
            [self.first, self.second],
            **NOW,
        )
        given = {"at": self.at, "operation": self.operation, "first": self.first, "second": self.second}
        look.click(
            self.preview,
            inputs_kwargs=given | {"scope": self.scope},
            outputs=[self.said, self.edit, self.changes],
            **NOW,
        )
        apply.click(
            self.apply,
            inputs_kwargs={"at": self.at, "edit": self.edit},
            outputs=[self.said, self.edit, self.changes],
            **live.quiet(show_progress="full", show_progress_on=[self.changes]),
        ).then(**self.afterwards)
        for button, what in ((undo, captions.undo), (redo, captions.redo)):
            button.click(
                partial(self.step, what),
                inputs_kwargs={"at": self.at},
                outputs=[self.said],
                **live.quiet(show_progress="full", show_progress_on=[self.changes]),
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
        live.on_press(self.job, self.press_job, outputs=[self.said])
        begin.click(
            self.begin,
            inputs_kwargs={
                "at": self.at,
                "model": model,
                "kind": kind,
                "prompt": prompt,
                "trigger": trigger,
                "overwrite": overwrite,
            },
            outputs=[self.said, self.seen],
            **NOW,
        )

    def _setting(self, key: str) -> Any:
        """A field for a setting of the training, not laid out yet."""
        one, language = form.settings()[key], self.ui.language
        given = {
            "label": words.label(language, key),
            "value": form.shown(one, one.default),
            "elem_id": f"dataset-{one.name}",
            "render": False,
        }
        if one.kind == "choice":
            return gr.Dropdown([(words.choice(language, key, word), word) for word in one.choices], **given)
        return gr.Textbox(info=words.meaning(language, key, one.description), max_lines=1, **given)

    # -- what happens

    def takes_clips(self, family: str) -> Any:
        """How clips are cut is asked of families that draw clips."""
        return gr.update(visible=families.traits(family)["clips"])

    def recut(self, at: dict[str, Any], **held: Any) -> dict[str, Any]:
        """How clips are cut has changed; the next tick shows what comes of it."""
        return {**at, "cut": held} if at else at

    def _drafted(self) -> tuple[str, dict[str, Any]]:
        """The family that New training is at, and how it cuts clips, if it draws clips."""
        home = self.ui.place.home
        usual = {name: form.shown(one := form.settings()[f"dataset.{name}"], one.default) for name in room.CUT}
        try:
            values = form.values(Draft(home).text(), home)
        except UserError:
            return "sdxl", usual
        family = str(values["model.family"])
        if family not in self.families or not families.traits(family)["clips"]:
            return "sdxl", usual
        return family, {
            name: form.shown(form.settings()[f"dataset.{name}"], values[f"dataset.{name}"]) for name in room.CUT
        }

    def _drafted_mask(self, folder: Path) -> str:
        """Where New training has the masks of a folder, as in dataset.folders; "" where it names neither."""
        home = self.ui.place.home
        try:
            rows = form.values(Draft(home).text(), home)["dataset.folders"]
        except UserError:
            return ""
        for row in rows if isinstance(rows, list) else []:
            path, mask = (row.get(name) for name in ("path", "mask")) if isinstance(row, dict) else ("", "")
            if not (isinstance(path, str) and isinstance(mask, str) and path and mask):
                continue
            with contextlib.suppress(UserError):  # New training tells what is wrong with a path
                if self.ui.path(home / os.path.expanduser(path)) == folder:
                    return str(self.ui.path(home / os.path.expanduser(mask))) if names_a_folder_of_masks(mask) else mask
        return ""

    def open(self, request: gr.Request) -> list[Any]:
        """The page is opened: the folder that its address names."""
        given = dict(request.query_params).get("folder", "")
        offered = [str(path) for path in pictures.folders(self.ui.place.roots)]
        choices = gr.update(choices=[*dict.fromkeys([*offered, *([given] if given else [])])], value=given or None)
        family, cut = self._drafted()
        held = [family, self.takes_clips(family), *cut.values()]
        if not given:
            empty = self.say("dataset.none" if not offered else "dataset.choose")
            nothing = [{}, f'<p class="empty">{shown(empty)}</p>', "", "", "", "", ""]
            return [choices, gr.update(visible=False), *held, *nothing]
        try:
            folder = self.ui.path(given)
            mask = self._drafted_mask(folder)
            room.album(folder, fresh=True, mask=mask)
        except UserError as error:
            return [choices, gr.update(visible=False), *held, {}, self._wrong(error), "", "", "", "", ""]
        at = {"folder": str(folder), "query": "", "showing": "all", "page": 0, "picked": "", "chosen": []}
        at |= {"mask": mask, "finding": "", "cut": cut, "unsaved": {}}
        return [choices, gr.update(visible=True), *held, *self._shown(at, family, 0), *self._into_editor("", "", "")]

    def press(
        self, event: gr.EventData, at: dict[str, Any], family: str, resolution: float, caption: str, editing: str
    ) -> list[Any]:
        """A button in the grid, a tag or a finding."""
        told = live.clicked(event)
        do, name = told.get("do", ""), told.get("name", "")
        rest = [gr.skip()] * 5
        said, editor = gr.update(visible=False), [gr.skip()] * 2
        try:
            album = self._album(at)
            at = dict(at)
            if do == "page":
                at["page"] = max(0, int(told.get("to", "0")))
            elif do in ("pick", "look") and name in album.files:
                if do == "look":
                    said = self._note(self.say("dataset.looked", file=name))
                left, was = _edited(editing)
                at["unsaved"] = _without(at["unsaved"], left)
                if left in album.files and not _same(caption, was):
                    at["unsaved"][left] = (was, caption)
                    if left != name:
                        said = self._note(self.say("dataset.unsaved", file=left))
                at["picked"], editor = name, self._into_editor(name, *self._waiting(at, album, name))
            elif do == "choose" and name in album.files:
                at["chosen"] = [one for one in at["chosen"] if one != name] + [name] * (name not in at["chosen"])
            elif do == "choose_all":
                at["chosen"] = list(dict.fromkeys([*at["chosen"], *self._filtered(at, album)]))
            elif do == "choose_none":
                at["chosen"] = []
            elif do == "tag":
                at |= {"query": f"[{name}]", "page": 0, "finding": ""}
                said = self._note(self.say("dataset.filtered", what=name))
            elif do == "finding":
                at |= {"finding": name, "page": 0, "query": "", "only": self._files_of(at, name, family, resolution)}
                said = self._note(self.say("dataset.filtered", what=self.say(f"dataset.kind.{name}")))
            elif do == "clear":
                at |= {"query": "", "finding": "", "showing": "all", "page": 0}
            elif do in ("remove", "rename"):
                edit = None
                if do == "remove":
                    edit = captions.preview(album.folder, [captions.RemoveTag(name)], mask=album.mask)
                said = self._note(self.say("dataset.prepared"))
                rest = [do, name, "", edit, self._diff(edit) if edit else ""]
        except (UserError, ValueError) as error:
            return [self._complaint(error), *([gr.skip()] * len(self.everything)), *rest]
        return [said, *self._shown(at, family, resolution), *editor, *rest]

    def take_in(
        self, at: dict[str, Any], family: str, resolution: float, files: list[str] | None, name: str
    ) -> list[Any]:
        """Pictures were dropped: into the open folder, or into a set of the page's own, which is then opened."""
        try:
            if not name.strip() and not at:
                raise UserError(self.say("dataset.upload.where"))
            own = self.ui.place.home / "datasets" / safe.name(name) if name.strip() else None
            folder = own or self._album(at).folder
            count, refused = pictures.take_in(files or [], folder)
        except UserError as error:
            return [None, gr.skip(), self._complaint(error)]
        lines = [self.say("new.pictures.taken", count=count, folder=folder.name)]
        if refused:
            told = "; ".join(map(self.ui.tell, refused[:8])) + (" …" if len(refused) > 8 else "")
            lines.append(self.say("new.pictures.refused", lines=told))
        said = self._note(" ".join(lines), wrong=bool(refused))
        if at and str(folder) == at["folder"]:
            album = room.album(folder, fresh=True, mask=at["mask"])
            self._examined(at, album, family, resolution, again=True)
        return [None, str(folder) if own and not refused else gr.skip(), said]

    def narrow(self, at: dict[str, Any], family: str, resolution: float, query: str, showing: str) -> list[Any]:
        """The search or the choice of what is shown has changed."""
        if (query, showing) == (at.get("query"), at.get("showing")) or not at:
            return [gr.skip(), gr.skip()]
        at = {**at, "query": query, "showing": showing, "page": 0, "finding": ""}
        return [at, self._grid(at, self._album(at), family, resolution)]

    def save(
        self, step: int, at: dict[str, Any], family: str, resolution: float, caption: str, editing: str
    ) -> list[Any]:
        """Write the editor's caption, and go on to the next picture."""
        name, loaded = _edited(editing)
        try:
            album = self._album(at)
            if name not in album.files:
                raise UserError(self.say("dataset.pick_first"))
            at = {**at, "picked": name, "unsaved": _without(at["unsaved"], name)}
            if album.reread(name) != loaded:
                complaint = self._note(self.say("dataset.changed_meanwhile", file=name), wrong=True)
                text = album.texts[name]
                return [complaint, *self._shown(at, family, resolution), *self._into_editor(name, text, text)]
            edit = captions.assign(album.folder, {album.files[name]: caption}, f"caption of {name}")
            if edit.problems:
                raise UserError(edit.problems[0])
            if edit.changes:
                captions.apply(album.folder, edit)
            said = self._note(self.say("dataset.saved" if edit.changes else "dataset.unchanged", file=name))
            album.reread(name)
            names = self._filtered(at, album)
            if step and name in names and names.index(name) + 1 < len(names):
                name = names[names.index(name) + 1]
            at["picked"], editor = name, self._into_editor(name, *self._waiting(at, album, name))
            if name in names:
                at["page"] = names.index(name) // PER_PAGE
        except UserError as error:
            return [self._complaint(error), *([gr.skip()] * len(self.everything))]
        return [said, *self._shown(at, family, resolution), *editor]

    def reload(self, at: dict[str, Any], family: str, resolution: float, caption: str, editing: str) -> list[Any]:
        """Show what many captions are now. What was typed in the editor and not saved stays there."""
        name, was = _edited(editing)
        try:
            album = room.album(self._album(at).folder, fresh=True, mask=at["mask"])
            editor = [gr.skip()] * 2
            if name in album.files and _same(caption, was):
                editor = self._into_editor(name, album.texts[name], album.texts[name])
            return [*self._shown(at, family, resolution), *editor]
        except UserError:  # told by what was done before
            return [gr.skip()] * len(self.everything)

    def preview(self, at: dict[str, Any], operation: str, first: str, second: str, scope: str) -> list[Any]:
        """Show what an edit of many would do."""
        try:
            album = self._album(at)
            count, make = OPERATIONS[operation]
            only = None
            if scope != "all":
                only = self._filtered(at, album) if scope == "filter" else [n for n in at["chosen"] if n in album.files]
                if not only:
                    raise UserError(self.say("dataset.none_chosen"))
            edit = captions.preview(album.folder, [make(*(first, second)[:count])], only, album.mask)
        except UserError as error:
            return [self._complaint(error), None, ""]
        return [gr.update(visible=False), edit, self._diff(edit)]

    def apply(self, at: dict[str, Any], edit: captions.Edit | None, progress: gr.Progress = PROGRESS) -> list[Any]:
        """Do what was previewed."""
        try:
            if edit is None or not edit.changes:
                raise UserError(self.say("dataset.preview_first"))
            folder = self._album(at).folder
            entry = captions.apply(folder, edit, told=self._counting(progress))
        except UserError as error:
            return [self._complaint(error), None, ""]
        return [self._note(self.say("dataset.applied", count=entry.files)), None, ""]

    def _counting(self, progress: gr.Progress) -> Callable[[int, int], Any]:
        return lambda done, total: progress((done, total), unit=self.say("dataset.captions"))

    def step(
        self, what: Callable[..., captions.Entry], at: dict[str, Any], progress: gr.Progress = PROGRESS
    ) -> dict[str, Any]:
        """Undo or redo."""
        try:
            entry = what(self._album(at).folder, told=self._counting(progress))
        except UserError as error:
            return self._complaint(error)
        return self._note(self.say("dataset.redone" if entry.done else "dataset.undone", count=entry.files))

    def examine_again(self, at: dict[str, Any], family: str, resolution: float) -> dict[str, int]:
        """Look at everything once more; what did not change is remembered."""
        if at:
            self._examined(at, self._album(at), family, resolution, again=True)
        return {}

    def begin(self, at: dict[str, Any], model: str, kind: str, prompt: str, trigger: str, overwrite: bool) -> list[Any]:
        """Queue the captioning."""
        try:
            album = self._album(at)
            number = room.submit_captioning(
                self.ui.place,
                album.folder,
                model=model,
                kind=kind,
                prompt=prompt,
                overwrite=overwrite,
                trigger=trigger,
                mask=album.mask,
            )
        except UserError as error:
            return [self._complaint(error), gr.skip()]
        watch.watch(self.ui.place).views.forget()
        return [self._note(self.say("dataset.auto.queued", number=number)), {}]

    def press_job(self, event: gr.EventData) -> Any:
        """Stop, or go on with, a captioning."""
        told = live.clicked(event)
        try:
            return self._note(watch.act(self.ui, told.get("do", ""), told.get("id", "")))
        except UserError as error:
            return self._complaint(error)

    def paint(self, at: dict[str, Any], family: str, resolution: float, seen: dict[str, int]) -> list[Any]:
        """The tick: the doctor's progress or report, captioning, and what the report says of clips in the grid."""
        if not at:
            return [gr.skip()] * 6
        told, grid = seen.get("told"), gr.skip()
        try:
            album = room.seen_last(self.ui.path(at["folder"]), at["mask"])
            found = self._examined(at, album, family, resolution)
            if found.report is not None and told != found.begun:
                told = found.begun
                if album.videos or found.report["counts"]["clips"]:
                    grid = self._grid(at, album, family, resolution)
            view = self._view(at, album, family, resolution)
            panels = [self._findings(found), self._buckets(found, family), self._job(album.folder), view]
        except UserError as error:
            panels = [self._wrong(error), "", "", ""]
        sent, seen = live.changed(panels, seen)
        return [*sent, grid, {**seen, "told": told}]

    # -- what is shown

    def _album(self, at: dict[str, Any]) -> room.Album:
        """The folder that somebody is at, which the page may still use. Raises UserError."""
        if not at.get("folder"):
            raise UserError(self.say("dataset.choose"))
        return room.album(self.ui.path(at["folder"]), mask=at["mask"])

    def _resolution(self, family: str, given: float) -> int:
        return int(given or 0) or int(families.facts(family)["native_resolution"])

    def _examined(
        self, at: dict[str, Any], album: room.Album, family: str, resolution: float, again: bool = False
    ) -> room.Examination:
        held = {name: form.read(form.settings()[f"dataset.{name}"], at["cut"][name]) for name in room.CUT}
        settings = room.cutting(family, **held)
        side = self._resolution(family, resolution)
        return room.examination(self.ui.place, album.folder, family, side, settings, again, album.mask)

    def _shown(self, at: dict[str, Any], family: str, resolution: float) -> list[Any]:
        """at, head, grid, view, tags"""
        album = self._album(at)
        view, grid = (show(at, album, family, resolution) for show in (self._view, self._grid))
        return [at, self._head(album), grid, view, self._tags(at, album)]

    def _waiting(self, at: dict[str, Any], album: room.Album, name: str) -> tuple[str, str]:
        """The caption of a picture as it was loaded, and as it stood in the editor when it was left."""
        text = "" if name in album.wrong else album.reread(name)
        return at["unsaved"].get(name, (text, text))

    def _into_editor(self, name: str, loaded: str, text: str) -> list[Any]:
        """The editor with this text for the caption of a picture, which is `loaded` now, and whose it is."""
        return [gr.update(value=text, interactive=bool(name)), json.dumps([name, loaded])]

    def _filtered(self, at: dict[str, Any], album: room.Album) -> list[str]:
        """Names that the filters let through. "[tag]" in the search is a tag, other words are parts of name or text."""
        query = at["query"].strip()
        names = list(album.files)
        if at.get("finding"):
            only = set(at.get("only", ()))
            names = [name for name in names if name in only]
        if at["showing"] == "uncaptioned":
            names = [name for name in names if not album.texts[name].strip()]
        if at["showing"] == "chosen":
            names = [name for name in names if name in at["chosen"]]
        if match := re.fullmatch(r"\[(.+)\]", query):
            return [name for name in names if match[1] in captions.split_tags(" ".join(album.texts[name].splitlines()))]
        wanted = query.casefold().split()
        return [name for name in names if all(w in f"{name} {album.texts[name]}".casefold() for w in wanted)]

    def _head(self, album: room.Album) -> str:
        without = sum(not text.strip() for text in album.texts.values())
        videos = len(album.videos)
        parts = [self.say("dataset.count", count=len(album.files) - videos)]
        parts += [self.say("dataset.videos", count=videos)] if videos else []
        parts += [self.say("dataset.without", count=without)] if without else []
        parts += [self.say("dataset.masks", count=album.masks, mask=album.mask)] if album.masks else []
        try:
            history = captions.history(album.folder)
        except UserError as error:
            return self._wrong(error)
        last = [entry for entry in history if entry.done][-1:]
        parts += [self.say("dataset.last", title=self.ui.tell(entry.title), count=entry.files) for entry in last]
        parts += [self.say("dataset.unreadable", count=len(album.wrong))] if album.wrong else []
        told = []
        if album.masks and not album.given:
            told.append(self.say("dataset.masks.guessed", count=album.masks, mask=album.mask))
            told += [self.say("dataset.masks.trained")] if album.mask in pictures.MASKS else []
        if album.inside:
            told.append(self.say("dataset.masks.inside", folder=album.inside))
        notes = f"<p>{shown(' '.join(told))}</p>" if told else ""
        return f'<p class="dim"><b>{shown(album.folder.name)}</b> · {" · ".join(map(shown, parts))}</p>{notes}'

    def _grid(self, at: dict[str, Any], album: room.Album, family: str, resolution: float) -> str:
        names = self._filtered(at, album)
        pages = max(1, math.ceil(len(names) / PER_PAGE))
        page = min(at["page"], pages - 1)
        chosen = set(at["chosen"])
        known = self._of_clips(at, album, family, resolution)
        cells = "".join(
            self._cell(album, name, name == at["picked"], name in chosen, known.get(name, {}))
            for name in names[page * PER_PAGE : (page + 1) * PER_PAGE]
        )
        bar = f"<span>{self.say('dataset.shown', count=len(names), of=len(album.files))}</span>"
        if chosen:
            bar += f"<span>{self.say('dataset.chosen', count=len(chosen))}</span>"
        bar += shows.button("choose_all", self.say("dataset.choose_all"))
        bar += shows.button("choose_none", self.say("dataset.choose_none")) if chosen else ""
        if at["query"] or at.get("finding") or at["showing"] != "all":
            bar += shows.button("clear", self.say("dataset.clear"))
        turn = ""
        if pages > 1:
            back = shows.button("page", self.say("dataset.back"), to=str(page - 1)) if page else ""
            on = shows.button("page", self.say("dataset.on"), to=str(page + 1)) if page + 1 < pages else ""
            here = self.say("dataset.page", page=page + 1, pages=pages)
            turn = f'<div class="tools">{back}<span>{here}</span>{on}</div>'
        empty = "" if names else f'<p class="empty">{self.say("dataset.nothing")}</p>'
        return f'<div class="tools">{bar}</div><div class="thumbs">{cells}</div>{empty}{turn}'

    def _of_clips(
        self, at: dict[str, Any], album: room.Album, family: str, resolution: float
    ) -> dict[str, dict[str, Any]]:
        """What the report, if there is one, says of each clip: its entry among the pictures, or {"error": line}."""
        if not album.videos and not at["cut"]["frames"]:
            return {}
        found = self._examined(at, album, family, resolution)
        known = {one["file"]: one for one in (found.report or {}).get("pictures", ()) if "seconds" in one}
        return known | {name: {"error": why} for name, why in found.files("unreadable").items() if room.is_video(name)}

    def _clip(self, one: dict[str, Any]) -> list[str]:
        """Figures of a clip: seconds, rate, and how many pieces of how many frames are trained."""
        told = [self.say("dataset.clip.seconds", seconds=shows.digits(one["seconds"]))]
        told.append(self.say("dataset.clip.rate", rate=shows.digits(one["fps"])))
        if one["pieces"]:
            told.append(self.say("dataset.clip.pieces", count=one["pieces"], length=one["length"]))
        return told

    def _cell(self, album: room.Album, name: str, picked: bool, chosen: bool, clip: dict[str, Any]) -> str:
        text = album.texts[name]
        source = shown(self.ui.picture(album.folder / name, 192))
        label, tick = shown(name), shown(self.say("dataset.choose_one", file=name))
        line = shown(text[:90]) if text.strip() else f'<em class="wrong">{self.say("dataset.no_caption")}</em>'
        image, about = f'<img src="{source}" alt="{label}" loading="lazy" decoding="async">', ""
        if room.is_video(name) and not clips.can_read_videos():
            image = f'<span class="wrong">{shown(self.ui.tell(clips.NEEDED))}</span>'
        elif "error" in clip:
            image = f'<span class="wrong">{shown(self.ui.tell(clip["error"]))}</span>'
        elif clip:
            image += f'<i class="length">▶ {shown(self._clip(clip)[0])}</i>'
            figures = [f"{clip['width']} × {clip['height']}", *self._clip(clip)[1:]]
            about = f'<p class="dim">{shown(" · ".join(figures))}</p>'
        elif room.is_video(name):
            image += '<i class="length">▶</i>'
        return (
            f'<div class="thumb{" picked" if picked else ""}{" chosen" if chosen else ""}">'
            f'<button type="button" data-do="pick" data-name="{label}" title="{label}">'
            f"{image}</button>"
            f'<button type="button" class="tick" data-do="choose" data-name="{label}" '
            f'aria-pressed="{str(chosen).lower()}" aria-label="{tick}"></button>{about}<p>{line}</p></div>'
        )

    def _view(self, at: dict[str, Any], album: room.Album, family: str, resolution: float) -> str:
        name = at["picked"]
        if name not in album.files:
            return f'<p class="empty">{self.say("dataset.pick")}</p>'
        side = self._resolution(family, resolution)
        found = self._examined(at, album, family, resolution)
        size = next((one for one in (found.report or {}).get("pictures", ()) if one["file"] == name), None)
        crop, told = "", [shown(name)]
        if size is not None:
            try:
                place = buckets.place((size["width"], size["height"]), side, 64)
            except UserError as error:
                told.append(shown(self.ui.tell(str(error))))
            else:
                (width, height), (left, top), (w, h) = place.resized_wh, place.crop_xy, place.bucket_wh
                style = f"left:{left / width:.3%};top:{top / height:.3%};width:{w / width:.3%};height:{h / height:.3%}"
                crop = f'<i class="crop" data-bucket="{w}x{h}" style="{style}"></i>'
                told.append(f"{size['width']} × {size['height']}")
                told.append(self.say("dataset.crop", bucket=f"{w} × {h}", cut=f"{1 - w * h / (width * height):.0%}"))
                told.append(shown(self.families[family]))
            if "seconds" in size:
                told += map(shown, self._clip(size))
        odd = [album.wrong[name]] if name in album.wrong else []
        source = shown(self.ui.picture(album.folder / name, 1280))
        picture = f'<div class="large"><img src="{source}" alt="{shown(name)}">{crop}</div>'
        if room.is_video(name) and not clips.can_read_videos():
            picture, odd = "", [*odd, clips.NEEDED]
        elif room.is_video(name) and (why := found.files("unreadable").get(name)):
            picture, odd = "", [*odd, why]
        wrong = "".join(f'<p class="wrong">{shown(self.ui.tell(line))}</p>' for line in odd)
        return f'{picture}<p class="dim">{" · ".join(told)}</p>{wrong}'

    def _tags(self, at: dict[str, Any], album: room.Album) -> str:
        counted = album.tags(self._filtered(at, album) if at["query"] or at.get("finding") else None)
        if not counted:
            return f'<p class="empty">{self.say("dataset.no_tags")}</p>'
        rows = []
        for tag, count in counted.most_common(MOST_TAGS):
            buttons = "".join(
                shows.button(do, self.say(f"dataset.tag.{do}"), name=tag) for do in ("tag", "rename", "remove")
            )
            rows.append([shown(tag), str(count), f'<div class="tools">{buttons}</div>'])
        more = len(counted) - len(rows)
        rest = f'<p class="dim">{self.say("dataset.more_tags", count=more)}</p>' if more > 0 else ""
        return shows.table([self.say("dataset.tag"), self.say("dataset.captions"), ""], rows) + rest

    def _diff(self, edit: captions.Edit) -> str:
        head = self.say("dataset.would", count=len(edit.changes))
        rows = []
        for change in edit.changes[:MOST_CHANGES]:
            rows.append(f"<dt>{shown(change.file)}</dt><dd>{_marked(*change.texts())}</dd>")
        more = len(edit.changes) - len(rows)
        rest = f'<p class="dim">{self.say("dataset.more", count=more)}</p>' if more > 0 else ""
        wrong = "".join(f'<p class="wrong">{shown(self.ui.tell(line))}</p>' for line in edit.problems[:20])
        return f'<p><b>{head}</b></p>{wrong}<dl class="diff">{"".join(rows)}</dl>{rest}'

    def _progress(self, found: room.Examination) -> str:
        if found.problem:
            return f'<p class="wrong">{shown(self.ui.tell(found.problem))}</p>'
        share = f"{100 * found.done / found.total:.0f}%" if found.total else "0%"
        told = self.say("dataset.examining", done=found.done, total=found.total)
        return f'<p class="dim" role="status">{told}</p><div class="bar"><i style="width:{share}"></i></div>'

    def _findings(self, found: room.Examination) -> str:
        if found.report is None:
            return self._progress(found)
        counts, sizes = found.report["counts"], found.report["sizes"]
        head = self.say(
            "dataset.figures", **{name: counts[name] for name in ("readable", "pictures", "different_captions")}
        )
        if sizes:
            head += " " + self.say("dataset.sizes", smallest=sizes["smallest"], largest=sizes["largest"])
        if counts["clips"]:
            head += " " + self.say("dataset.clips", clips=counts["clips"], pieces=counts["pieces"])
        made = [f'<p class="dim">{shown(head)}</p>']
        if not found.report["findings"]:
            made.append(f'<p class="empty">{self.say("dataset.all_well")}</p>')
        for finding in found.report["findings"]:
            kind, files = finding["kind"], finding["files"]
            rows = "".join(self._file_row(kind, one) for one in files[:MOST_FILES])
            more = len(files) - MOST_FILES
            rows += f'<li class="dim">{self.say("dataset.more", count=more)}</li>' if more > 0 else ""
            level = self.say(f"dataset.level.{finding['level']}")
            shown_only = any(one["file"] for one in files) and kind not in ("kohya_folder",)
            button = shows.button("finding", self.say("dataset.show_these"), name=kind) if shown_only else ""
            made.append(
                f'<details class="finding {finding["level"]}" data-kind="{kind}"><summary>'
                f'<span class="level">{level}</span>'
                f'<b>{self.say(f"dataset.kind.{kind}")}</b> <span class="dim">{len(files)}</span></summary>'
                f'<p>{self.say(f"dataset.advice.{kind}")}</p><div class="tools">{button}</div><ul>{rows}</ul></details>'
            )
        return "".join(made)

    def _file_row(self, kind: str, one: dict[str, str]) -> str:
        detail = self.ui.tell(one["detail"]) if one["detail"] else ""
        if not one["file"] or kind == "kohya_folder":
            return f"<li>{shown(' '.join(filter(None, (one['file'], detail))))}</li>"
        button = shows.button("look", one["file"], "plain", name=one["file"])
        return f'<li>{button} <span class="dim">{shown(detail)}</span></li>'

    def _files_of(self, at: dict[str, Any], kind: str, family: str, resolution: float) -> list[str]:
        return list(self._examined(at, self._album(at), family, resolution).files(kind))

    def _buckets(self, found: room.Examination, family: str) -> str:
        if found.report is None:
            return self._progress(found)
        report = found.report
        title = shown(self.families[family])
        head = self.say("dataset.buckets", title=title, resolution=report["resolution"], step=report["bucket_step"])
        most = max((one["count"] for one in report["buckets"]), default=1)
        rows = []
        for one in report["buckets"]:
            width, height, *frames = map(int, one["size"].split("x"))
            scale = 36 / max(width, height)
            shape = f'<i class="shape" style="width:{width * scale:.0f}px;height:{height * scale:.0f}px"></i>'
            bar = f'<div class="bar"><i style="width:{100 * one["count"] / most:.0f}%"></i></div>'
            cut = f"{one['cut']:.0%} / {one['most_cut']:.0%}"
            size = f"{width}\u00a0×\u00a0{height}"
            size += "".join(f" · {self.say('dataset.clip.frames', count=number)}" for number in frames)
            rows.append([shape, size, f"{one['count']}{bar}", cut, str(one["enlarged"])])
        names = ("", "bucket", "pictures", "cut", "enlarged")
        columns = [self.say(f"dataset.column.{name}") if name else "" for name in names]
        return f'<p class="dim">{head}</p>{shows.table(columns, rows)}'

    def _job(self, folder: Path) -> str:
        """The captionings of this folder that are in the queue, the newest first."""
        watching = watch.watch(self.ui.place)
        views = [view for view in watching.views() if view.command[:2] == ("caption", str(folder))]
        made = []
        for view in sorted(views, key=lambda view: -int(view.id))[:3]:
            lines = watching.queue.log_tail(view.id)
            done, total = room.progress(lines)
            bar = f'<div class="bar"><i style="width:{100 * done / total:.0f}%"></i></div>' if total else ""
            told = f"{done} / {total}" if total else ""
            failed = lines and view.state == "failed"
            last = f'<pre tabindex="0">{shown(lines[-1])}</pre>' if failed else ""
            name = shown(shows.title(self.ui, view))
            made.append(
                f'<section class="card" data-job="{shown(view.id)}"><div class="row"><h2>{name}</h2>'
                f'{shows.state(self.ui, view)}<span class="dim">{told}</span></div>'
                f'<p class="said">{shown(shows.sentence(self.ui, view.sentence))}</p>'
                f"{last}{bar}{shows.buttons(self.ui, view)}</section>"
            )
        return f'<div class="cards">{"".join(made)}</div>'

    def _note(self, line: str, wrong: bool = False) -> Any:
        kind = "toast wrong" if wrong else "toast"
        return gr.update(value=f'<p class="{kind}" role="status">{shown(line)}</p>', visible=True)

    def _complaint(self, error: Exception) -> Any:
        return self._note(self.ui.tell(str(error)), wrong=True)

    def _wrong(self, error: Exception) -> str:
        return f'<p class="wrong" role="status">{shown(self.ui.tell(str(error)))}</p>'


def _edited(editing: str) -> tuple[str, str]:
    """The picture whose caption is in the editor, and the text that was loaded; "" and "" where there is none."""
    try:
        name, loaded = json.loads(editing or '["", ""]')
    except (ValueError, TypeError, RecursionError):  # no page of ours sends such a thing
        return "", ""
    return str(name), str(loaded)


def _without(unsaved: dict[str, Any], name: str) -> dict[str, Any]:
    return {one: texts for one, texts in unsaved.items() if one != name}


def _same(typed: str, loaded: str) -> bool:
    """Whether nothing was typed; a browser has line ends of its own."""
    return typed.strip().splitlines() == loaded.strip().splitlines()


def _marked(before: str, after: str) -> str:
    """The text after an edit, with what is gone struck out and what is new marked."""
    one, other = (re.findall(r"\w+|\s+|[^\w\s]", text) for text in (before, after))
    if len(one) * len(other) > 250_000:  # two books: shown side by side
        return f"<del>{shown(before[:500])}</del> <ins>{shown(after[:500])}</ins>"
    made = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if kind == "equal":
            made.append(shown("".join(one[a:b])))
            continue
        made.append(f"<del>{shown(''.join(one[a:b]))}</del>" if b > a else "")
        made.append(f"<ins>{shown(''.join(other[c:d]))}</ins>" if d > c else "")
    return "".join(made)
