"""What the recipe of a draft proposes from its goal, base model, GPU and images, and how the draft follows it.

A goal and a GPU are presets, which the config resolves itself. What depends on the images (steps, validation,
shuffling, prompts) has to stand in the draft. When the images, the goal or the trigger word change, each such value is
proposed again; a value that a person has set to something else stays.
"""

import threading
from pathlib import Path
from typing import Any

from lora_fp8 import importing
from lora_fp8.common.gpu import read_gpus
from lora_fp8.config import dataset_recipe, recipes, short_config
from lora_fp8.config.recipes import Value
from lora_fp8.config.validation import STILL_OPEN, TODO
from lora_fp8.errors import Message, UserError

from ... import form, sanitize, setting_values, translations
from ...context import Ui
from ...draft import Draft
from .draft_reader import DraftReader

NEVER_PROPOSED = ("dataset.missing_caption", "dataset.frames")
"""The page asks for these itself: images can be captioned first, and frames depend on the clips."""

MOST_KEPT = 20


class Recipe:
    """Proposes values for a draft, and explains them."""

    def __init__(self, ui: Ui, draft: Draft, reader: DraftReader):
        self.ui, self.draft, self.reader = ui, draft, reader
        self.gpus = read_gpus()
        self._looked: dict[Any, dataset_recipe.Pictures] = {}
        self._lock = threading.Lock()

    def propose(self, text: str) -> dict[str, Value]:
        """Return what the images of this draft ask for, by setting; {} without goal or images, and for a demo base.

        The epochs of an imported config give its steps, with and without a goal.
        """
        try:
            values = form.read_values(text, self.draft.home)
        except UserError:
            return {}
        return self._propose_for_goal(values) | self._convert_epochs(text, values)

    def _propose_for_goal(self, values: dict[str, Any]) -> dict[str, Value]:
        goal, family = self._find_goal(values), str(values["model.family"])
        if not goal or values["model.path"] == "demo":
            return {}  # a demo's preset has all values
        pictures = self._count_images(values)
        if not pictures.files:
            return {}
        trigger = str(values["dataset.trigger"] or "")
        proposed = {value.key: value for value in dataset_recipe.choose_values(goal, family, pictures, trigger)}
        prompts = [] if goal == "edit" else dataset_recipe.propose_prompts(goal, family, pictures, trigger)
        if prompts:
            steps = proposed["train.steps"].value
            every = max(dataset_recipe.ROUND, round(steps / dataset_recipe.PREVIEWS / 50) * 50)
            proposed["preview.prompts"] = Value("preview.prompts", prompts, short_config.PROMPTS)
            proposed["preview.every"] = Value("preview.every", every, Message("Preview interval, in steps."))
        return {key: value for key, value in proposed.items() if key not in NEVER_PROPOSED}

    def _convert_epochs(self, text: str, values: dict[str, Any]) -> dict[str, Value]:
        """Return the steps of the epochs that an import left open; "TODO" as long as there are no images."""
        epochs = importing.find_epochs(text)
        batch, accumulate = values["train.batch_size"], values["train.accumulate"]
        if not epochs or not all(isinstance(number, int) and number > 0 for number in (batch, accumulate)):
            return {}
        samples = self._count_images(values).samples
        if not samples:
            return {"train.steps": Value("train.steps", TODO, STILL_OPEN)}
        return {"train.steps": Value("train.steps", *importing.convert_epochs(epochs, samples, batch, accumulate))}

    def follow(self, before: dict[str, Value]) -> None:
        """Write into the draft what is proposed differently than `before`, unless a person has set it otherwise.

        Args:
            before: what was proposed for the draft before a change.
        """
        with self.draft.lock():
            for key, value in self.find_changes(self.draft.load_text(), before).items():
                self.draft.put(key, value)

    def find_changes(self, text: str, before: dict[str, Value]) -> dict[str, Any]:
        """Return the settings of a draft that would follow what is proposed for it, with their new values.

        Args:
            text: the draft.
            before: what was proposed for the draft before a change.

        Raises:
            UserError: the text is not TOML.
        """
        after = self.propose(text)
        changed = [
            key
            for key in {**before, **after}
            if key not in before or key not in after or before[key].value != after[key].value
        ]
        if not changed:
            return {}
        values, origins = form.read_values(text, self.draft.home), form.find_origins(text, self.draft.home)
        changes: dict[str, Any] = {}
        for key in changed:
            is_own = origins.get(key) == ""
            if is_own and not (key in before and form.is_same_value(values[key], before[key].value)):
                continue
            if key in after:
                changes[key] = after[key].value
            elif is_own:
                changes[key] = form.collect_settings()[key].default
        return changes

    def choose_card(self) -> str:
        """Return the preset of this computer's GPU; "" if it has none that is known."""
        largest = max((gpu.total or 0 for gpu in self.gpus), default=0)
        return recipes.format_card_name(recipes.choose_card(largest)) if largest else ""

    def render(self) -> str:
        """Render the recipe of the draft: the GPU that was found, a sentence, and the reason of each value."""
        escape = sanitize.escape
        parts = [f"<p>{escape(line)}</p>" for line in self._describe_gpus()]
        text = self.draft.load_text()
        try:
            values = form.read_values(text, self.draft.home)
            origins = form.find_origins(text, self.draft.home)
        except UserError:
            return "".join(parts)
        goal, family = self._find_goal(values), str(values["model.family"])
        if not goal or family not in self.reader.families:
            return "".join(parts) + self._render_imported_steps(text, values)
        card = next((gb for name in values["preset"] if (gb := recipes.parse_card(name))), 0)
        chosen = {value.key: value for value in recipes.list_goal_values(goal, family)}
        if card:
            frames, dropout = (
                recipes.find_longest_clip(values["dataset.frames"]),
                recipes.is_dropout(values["adapter.dropout"]),
            )
            fit = recipes.fit_card(family, card, frames, dropout, str(values["model.path"] or ""))
            chosen |= {value.key: value for value in fit.values if values["preview.prompts"] or not value.drawn}
            notes = [line for line in (fit.problem, fit.note) if line]
            parts += [f"<p>{escape(self.ui.translate(line))}</p>" for line in notes]
        chosen |= self.propose(text)
        followed = [
            value
            for key, value in chosen.items()
            if key in origins and form.is_same_value(values[key], value.value) and not value.key.startswith("preset")
        ]
        if followed:
            title = self.ui.say("new.recipe", goal=self.ui.say(f"new.goal.{goal}"), title=self.reader.families[family])
            rows = "".join(self._render_value(value) for value in followed)
            parts.append(
                f"<details><summary>{escape(title)}</summary><table class='facts wide recipe'>{rows}</table></details>"
            )
        return "".join(parts)

    def _render_imported_steps(self, text: str, values: dict[str, Any]) -> str:
        """Render the steps that an import's epochs gave, with the arithmetic; "" if the draft has others."""
        proposed = self._convert_epochs(text, values).get("train.steps")
        if not proposed or proposed.value == TODO or values["train.steps"] != proposed.value:
            return ""
        return f"<table class='facts wide recipe'>{self._render_value(proposed)}</table>"

    def _render_value(self, value: Value) -> str:
        """Render a value of the recipe as a row: the setting, its value, and why."""
        label = translations.get_label(self.ui.language, value.key)
        display = setting_values.format_value(self.ui, value.key, value.value)
        texts = (label, sanitize.shorten(display, 60), self.ui.translate(value.why))
        name, number, why = map(sanitize.escape, texts)
        return f"<tr><th>{name}</th><td><strong>{number}</strong><br>{why}</td></tr>"

    def _describe_gpus(self) -> list[str]:
        names = [f"{gpu.name}, {round(gpu.total / 2**30)} GB" for gpu in self.gpus if gpu.total]
        return [self.ui.say("new.card.found", names=", ".join(names))] if names else []

    def _find_goal(self, values: dict[str, Any]) -> str:
        """Return the goal of the draft; "" without one, or if the family cannot be trained for it."""
        family, named = str(values["model.family"]), values["preset"]
        if family not in self.reader.families or not isinstance(named, list):
            return ""
        return next((name for name in named if name in recipes.find_goals(family)), "")

    def _count_images(self, values: dict[str, Any]) -> dataset_recipe.Pictures:
        """Count the images of the draft's folders. Captions are read again only after files have come or gone."""
        counts = self.reader.count_folders(values)
        key = tuple(counts)
        with self._lock:
            if key not in self._looked:
                if len(self._looked) >= MOST_KEPT:
                    self._looked.clear()
                folders: list[tuple[Path, float]] = [(folder, repeats) for folder, _, repeats, _ in counts]
                masks = {folder: mask for folder, _, _, mask in counts}
                try:
                    self._looked[key] = dataset_recipe.scan_folders(folders, masks)
                except UserError:
                    return dataset_recipe.Pictures()  # the check of the draft says why
            return self._looked[key]
