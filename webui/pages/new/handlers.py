"""Handlers of the page's events: each changes the draft and returns values for the components that show it."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from lora_fp8.config.dataset_recipe import expand_folder
from lora_fp8.errors import UserError

from ... import base_models, form, image_folders, importer, live_panel, sanitize, submission
from .painting import Painter
from .questions import PROPOSING


class Handlers:
    """Handles the events of the components of one language."""

    def __init__(self, painter: Painter):
        self.ui, self.draft, self.reader = painter.ui, painter.draft, painter.reader
        self.layout, self.painter, self.problems = painter.layout, painter, painter.problems
        self.recipe = painter.recipe

    def change(self, view: str, key: str, repaint: bool, held: Any, everything: bool) -> dict[Any, Any]:
        """Handle a changed field: write its setting to the draft; repaint the view if other fields depend on it."""
        value = form.from_component(form.collect_settings()[key], held)
        if address := key in ("model.path", "model.components") and base_models.read_address(value):
            value = address

        def put() -> None:
            before = self.draft.load_text()
            after = self.draft.put(key, value)
            if key == "model.family":
                self._drop_old_base(before, after)
            elif key == "model.path":
                self.recognize_base()

        done = self.change_draft(put)
        painted = self.painter.update_side(everything)
        if repaint:
            return painted | self.painter.update_view(view, done, but="" if address else key)
        return painted | (self.painter.update_proposed(done) if view == "simple" and key in PROPOSING else {})

    def _drop_old_base(self, before: str, after: str) -> None:
        """Clear a base model that was chosen from the previous architecture's list."""
        path = form.read_values(before, self.draft.home)["model.path"]
        old, new = (form.read_values(text, self.draft.home)["model.family"] for text in (before, after))
        if old != new and path in base_models.list_usual_bases(old):
            self.draft.put("model.path", "")
            self.painter.choice.replace(base_models.list_demo_presets(), "")

    def recognize_base(self) -> None:
        """Set the architecture that the base model's files show, and the preset of a demo base."""
        values = form.read_values(self.draft.load_text(), self.draft.home)
        path, family = str(values["model.path"] or ""), str(values["model.family"])
        described = self.reader.describe_base(values)
        known = base_models.Base(described.family) if described else self.reader.inspect_base(path)
        if not base_models.fits_family(known, family):
            self.draft.put("model.family", known.family)
            gr.Info(self.ui.say("new.base.is_other", title=self.reader.families[known.family]))
        demo = f"demo_{family}" if path == "demo" else ""
        self.painter.choice.replace(
            base_models.list_demo_presets(), demo if demo in base_models.list_demo_presets() else ""
        )

    def write_text(self, text: str, everything: bool) -> dict[Any, Any]:
        """Handle input in the TOML view."""
        self.draft.write(text or "")
        return self.painter.update_side(everything)

    def use_folder(self, event: gr.EventData, everything: bool) -> dict[Any, Any]:
        """Handle a folder that the workbench has filled, or that was typed there: add it to the draft."""
        given = live_panel.read_click(event).get("folder", "")

        def add() -> None:
            path = self.ui.resolve_path(given)
            sanitize.require_folder(path, given)
            self._put_folder(path)

        done = self._change_images(add)
        return self.painter.update_side(everything) | self.painter.update_images(done)

    def remove_folder(self, event: gr.EventData, everything: bool) -> dict[Any, Any]:
        """Handle the button that takes a folder out of the draft. Its files stay."""
        removed = live_panel.read_click(event).get("folder", "")

        def remove() -> None:
            rows = [row for row in self._read_rows() if not self._names_folder(row, removed)]
            self.draft.put("dataset.folders", rows)

        done = self._change_images(remove)
        return self.painter.update_side(everything) | self.painter.update_images(done)

    def _put_folder(self, folder: Path) -> None:
        rows, added = self._read_rows(), []
        for path, repeats in _expand_folder(folder):
            if not any(self._names_folder(row, str(path)) for row in rows):
                added.append({"path": str(path), **({"repeats": repeats} if repeats != 1 else {})})
                if repeats != 1:
                    gr.Info(self.ui.say("new.folders.repeats", folder=path.name, count=repeats))
        if added:
            self.draft.put("dataset.folders", [*rows, *added])

    def _read_rows(self) -> list[dict[str, Any]]:
        given = form.read_values(self.draft.load_text(), self.draft.home)["dataset.folders"]
        return [row for row in given if isinstance(row, dict)] if isinstance(given, list) else []

    def _names_folder(self, row: dict[str, Any], folder: str) -> bool:
        """Return True if a row of the draft names this folder, however it writes the path."""
        path = row.get("path")
        if not isinstance(path, str) or not path:
            return False
        try:
            return path == folder or str(self.ui.resolve_path(self.reader.resolve_local(path))) == folder
        except UserError:
            return False

    def load(self, source: str, everything: bool) -> dict[Any, Any]:
        """Handle the button that replaces the draft by a config or the settings of a run."""

        def load() -> None:
            path = self.ui.resolve_path(source or "")
            path = path / "config.toml" if path.is_dir() else path
            text = importer.read_text_file(path)
            form.read_values(text, self.draft.home)  # raises if it is not TOML
            self.draft.replace(text)

        return self._warn_on_error(load) | self.painter.update_all("", everything)

    def import_settings(self, files: list[str] | None, everything: bool) -> dict[Any, Any]:
        """Handle settings of another trainer: convert them and replace the draft."""
        painted = {self.layout.imported: "", self.layout.foreign: None}

        def replace_draft() -> None:
            text, painted[self.layout.imported] = importer.import_files(self.ui, map(Path, files or []))
            self.draft.replace(text)
            gr.Info(self.ui.say("new.import.replaced"))

        return self._warn_on_error(replace_draft) | painted | self.painter.update_all("", everything)

    def save_preset(self, name: str) -> dict[Any, Any]:
        """Handle the button that saves the draft as a preset."""

        def save() -> None:
            stem = sanitize.check_name(name or "")
            path = base_models.save_preset(self.draft.home, stem, self.draft.load_text())
            gr.Info(self.ui.say("new.files.preset_saved", name=path.stem))

        self._warn_on_error(save)
        listed = gr.update(choices=self.painter.list_presets())
        return {self.layout.parts["all"]["preset"]: listed} | self.painter.update_cards("all")

    def reset(self, everything: bool) -> dict[Any, Any]:
        """Handle the button that empties the draft."""
        self.draft.replace(form.START)
        self._take_free_name()
        return self.painter.update_all("", everything)

    def set_default(self, event: gr.EventData, everything: bool) -> dict[Any, Any]:
        """Handle the button beside a changed setting: take it out of the draft, so that preset or default count."""
        key = live_panel.read_click(event).get("key", "")

        def unset() -> None:
            self.draft.change(lambda text: form.unset(text, key, self.draft.home))

        if key in form.collect_settings():
            self.change_draft(unset)
        return self.painter.update_all("", everything)

    def restore_draft(self, everything: bool) -> dict[Any, Any]:
        """Handle the button that restores the draft which was replaced last."""
        self.draft.restore_earlier()
        return self.painter.update_all("", everything)

    def start(self, touched: str, everything: bool, **held: Any) -> dict[Any, Any]:
        """Submit the draft to the queue and go to the page of the new run."""

        def submit(text: str) -> tuple[int, str]:
            id = submission.submit_training(self.ui.place, text)
            self._take_free_name()  # for the next training
            return id, self.ui.make_link("run", run=str(id))

        return self._submit(submit, self.problems.find, touched, everything, held)

    def _take_free_name(self) -> None:
        """Give the draft a name that a new training can have, if it cannot have the present one."""
        if free := self.problems.find_free_name(form.read_values(self.draft.load_text(), self.draft.home)):
            self.draft.put("name", free)

    def find_rate(self, touched: str, everything: bool, **held: Any) -> dict[Any, Any]:
        """Queue a learning-rate test of the draft and go to the queue."""
        return self._submit(
            lambda text: (submission.submit_rate_test(self.ui.place, text), self.ui.make_link("")),
            lambda text: self.problems.find(text, has_run=False),
            touched,
            everything,
            held,
        )

    def _submit(
        self,
        submit: Callable[[str], tuple[int, str]],
        find_problems: Callable[[str], list[tuple[str, str]]],
        touched: str,
        everything: bool,
        held: dict[str, Any],
    ) -> dict[Any, Any]:
        """Queue a job of the draft, unless it has problems, and go to an address.

        Args:
            submit: queues the job of a TOML text. Returns its id, and the address to go to.
            find_problems: finds what prevents that job.
            touched, everything, held: as the window sends them.
        """
        address: dict[Any, Any] = {}

        def submit_draft() -> None:
            self._apply_touched(touched, held)
            text = self.draft.load_text()
            if not find_problems(text):
                id, address[self.layout.address] = submit(text)
                gr.Info(self.ui.say("new.start.queued", id=id))

        return self._warn_on_error(submit_draft) | address | self.painter.update_side(everything)

    def switch_view(self, view: str, touched: str, everything: bool, **held: Any) -> dict[Any, Any]:
        """Handle a change of the view."""
        done = self._warn_on_error(lambda: self._apply_touched(touched, held))
        every_view = view not in self.layout.tabs  # the name comes from the browser, and may be anything
        return done | self.painter.update_all("" if every_view else view, everything)

    def _apply_touched(self, touched: str, held: dict[str, Any]) -> None:
        """Write fields into the draft that were changed and have not been sent yet.

        Args:
            touched: ids of the fields that were changed in this window.
            held: the value of each field by its id.
        """
        for id in (touched or "").split():
            if id == self.layout.code.elem_id:
                self.draft.write(held[id] or "")
            elif id in held:
                key = self.layout.keys[id]
                self.draft.put(key, form.from_component(form.collect_settings()[key], held[id]))

    def refresh(self, seen: str, everything: bool) -> dict[Any, Any]:
        """Repaint summary and cards if they differ from what the window shows: answers arrive in any order."""
        self.draft.save()
        painted, cards = self.painter.update_side(everything), self.painter.update_cards("simple", "all")
        digest = hashlib.sha256(repr((painted[self.layout.seen], *cards.values())).encode()).hexdigest()
        return {self.layout.seen: gr.skip()} if digest == seen else painted | cards | {self.layout.seen: digest}

    def _warn_on_error(self, action: Callable[[], None]) -> dict[Any, Any]:
        """Run an action, and show its UserError as a warning."""
        try:
            action()
        except UserError as error:
            gr.Warning(sanitize.escape(self.ui.translate(str(error))))
        return {}

    def change_draft(self, action: Callable[[], None]) -> tuple[str, str]:
        """Run an action with the draft locked. Returns the text before and after it."""
        with self.draft.lock():
            return self._change_images(action)

    def _change_images(self, action: Callable[[], None]) -> tuple[str, str]:
        """Run an action that may take long, and let the draft follow its recipe. Returns the text before and after."""
        before = self.draft.load_text()
        proposed = self.recipe.propose(before)
        self._warn_on_error(action)
        self._warn_on_error(lambda: self.recipe.follow(proposed))
        return before, self.draft.load_text()


def _expand_folder(folder: Path) -> list[tuple[Path, int]]:
    """Return a folder with its repeats; if all images are in folders such as kohya's `10_zibo`, those with theirs."""
    inner = expand_folder(folder)
    whole, parts = (sum(image_folders.count_files(path).files for path in paths) for paths in ([folder], dict(inner)))
    return inner if whole == parts else [(folder, 1)]
