"""Write the config of `lora-fp8 new`: what a person must look at; the rest comes from the recipe."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import families
from ..errors import Message, Plural
from . import dataset_recipe, recipes
from .dataset_recipe import Pictures
from .loading import format_toml_value
from .recipes import Value

PICTURES, CONTROLS = "my_pictures", "my_control_pictures"
"""Placeholders for folders that were not given."""
WIDEST = 120


@dataclass(frozen=True)
class Wishes:
    """What `lora-fp8 new` was told.

    Attributes:
        name: name of the run.
        family: a known family.
        base: the base model.
        goal: one of `recipes.find_goals(family)`.
        card: one of `recipes.CARDS`; 0 for the demo base, which has a preset of its own.
        folders: the image folders with their repeats; empty: a placeholder.
        control: the folder of control images, or "".
        trigger: the trigger word, or "".
        presets: further presets, laid over the recipe.
    """

    name: str
    family: str
    base: str
    goal: str
    card: int
    folders: Sequence[tuple[str, int]] = ()
    control: str = ""
    trigger: str = ""
    presets: Sequence[str] = field(default=())

    @property
    def all_presets(self) -> list[str]:
        """Return the names for `preset`: the recipe, then the others."""
        card = [recipes.format_card_name(self.card)] if self.card else []
        return [self.goal, *card, *self.presets]

    @property
    def edits(self) -> bool:
        """Return True if the images have control images."""
        return self.goal == "edit" or families.get(self.family).controls[0] > 0


def format_config(wishes: Wishes, pictures: Pictures, say: Callable[[str], str] = str) -> str:
    """Return the config as TOML, each setting with one line of help.

    Args:
        wishes: what was asked for.
        pictures: what is in the image folders.
        say: translates a message.
    """
    tables: dict[str, list[Value]] = {}
    for value in list_values(wishes, pictures):
        tables.setdefault(value.key.rpartition(".")[0], []).append(value)
    title = families.get(wishes.family).title
    command = f"lora-fp8 recipes {wishes.family} --goal {wishes.goal}" + (
        f" --card {wishes.card}" if wishes.card else ""
    )
    heads = (
        Message(
            "A LoRA for {title}. The presets below set everything else and give a reason for each value:", title=title
        ),
        f"  {command}",
        Message(
            "Settings in this file take precedence over the presets. `lora-fp8 new FILE --all` lists every setting."
        ),
    )
    lines = [*(f"# {say(head)}" for head in heads), ""]
    for section in ("", "model", "dataset", "dataset.folders", *(name for name in tables if name not in FIRST)):
        if section not in tables:
            continue
        if section:
            lines += ["", f"[[{section}]]" if section == "dataset.folders" else f"[{section}]"]
        for value in tables[section]:
            lines += _format_setting(value, say)
        if section == "dataset.folders":
            for extra, repeats in wishes.folders[1:]:
                lines += ["", "[[dataset.folders]]", f"path = {format_toml_value(extra)}"]
                lines += [f"repeats = {repeats}"] if repeats > 1 else []
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


FIRST = ("", "model", "dataset", "dataset.folders")


def _format_setting(value: Value, say: Callable[[str], str]) -> list[str]:
    """Return a setting with its help behind it, or above it if the line would be too wide."""
    line, why = f"{value.key.rpartition('.')[2]} = {format_toml_value(value.value)}", say(value.why)
    return [f"{line}  # {why}"] if len(line) + len(why) < WIDEST - 4 else [f"# {why}", line]


def list_values(wishes: Wishes, pictures: Pictures) -> list[Value]:
    """Return the settings of the short config, each with its help or its reason."""
    goals = " | ".join(recipes.find_goals(wishes.family))
    cards = " | ".join(map(recipes.format_card_name, recipes.CARDS))
    values = [
        Value("name", wishes.name, Message("Name of the run folder and of the LoRA file.")),
        Value("preset", wishes.all_presets, Message("Goal: {goals}. GPU memory: {cards}.", goals=goals, cards=cards)),
        Value("model.family", wishes.family, Message("Architecture of the base model.")),
        Value(
            "model.path", wishes.base, Message("Base model: Hugging Face id, diffusers folder or .safetensors file.")
        ),
        Value("dataset.trigger", wishes.trigger, _explain_trigger(wishes)),
    ]
    chosen = dataset_recipe.choose_values(wishes.goal, wishes.family, pictures, wishes.trigger, wishes.card)
    if wishes.base == "demo":
        why = Message("The same training as `lora-fp8 demo`: a few minutes on a CPU.")
        chosen = [Value("train.steps", 1000, why), *(value for value in chosen if value.key != "train.steps")]
    values += [value for value in chosen if value.key.startswith("dataset.")]
    folder, repeats = wishes.folders[0] if wishes.folders else (PICTURES, 1)
    values.append(Value("dataset.folders.path", folder, Message("Folder with images and a .txt caption for each.")))
    if repeats > 1:
        values.append(Value("dataset.folders.repeats", repeats, Message("From the name of the folder.")))
    if wishes.edits:
        why = Message("Folder with the images before the edit, under the same file names.")
        values.append(Value("dataset.folders.control", wishes.control or CONTROLS, why))
    values += [value for value in chosen if not value.key.startswith("dataset.")]
    steps = next(value.value for value in chosen if value.key == "train.steps")
    return [*values, *_choose_preview_values(wishes, pictures, steps)]


def _explain_trigger(wishes: Wishes) -> Message:
    if wishes.goal == "edit":
        return Message("Trigger word, added to captions that lack it. Edit instructions need none.")
    return Message("Trigger word, which the base model does not know yet. It is added to captions that lack it.")


PROMPTS = Message("Previews drawn while training, always with the same seed.")


def _choose_preview_values(wishes: Wishes, pictures: Pictures, steps: int) -> list[Value]:
    prompts = dataset_recipe.propose_prompts(wishes.goal, wishes.family, pictures, wishes.trigger)
    controls: list[str] = []
    if wishes.edits:
        prompts, controls = _pair_controls(wishes)
    values = [Value("preview.prompts", prompts, PROMPTS)]
    if controls:
        values.append(Value("preview.controls", controls, Message("The control image of each prompt.")))
    if prompts:
        every = max(dataset_recipe.ROUND, round(steps / dataset_recipe.PREVIEWS / 50) * 50)
        values.append(Value("preview.every", every, Message("Preview interval, in steps.")))
    return values


def _pair_controls(wishes: Wishes) -> tuple[list[str], list[str]]:
    """Return instructions of the images with the control image of each; both empty if there are none."""
    if not (wishes.folders and wishes.control):
        return [], []
    pairs = dataset_recipe.find_pairs(Path(wishes.folders[0][0]), Path(wishes.control))
    return [caption for caption, _ in pairs], [str(control) for _, control in pairs]


def _describe_files(pictures: Pictures) -> Message:
    """Return the number of images and videos, with the kind of their captions."""
    kinds = {"tags": Message("captions are tags"), "sentences": Message("captions are sentences")}
    unknown = Message("captions are single phrases") if pictures.captions else Message("no captions")
    captions = kinds.get(pictures.style, unknown)
    if pictures.videos:
        return Message(
            "{images} images and {videos} videos ({captions}), {missing} without a caption",
            images=pictures.images,
            videos=pictures.videos,
            captions=captions,
            missing=pictures.uncaptioned,
        )
    return Plural(
        "{count} image ({captions}), {missing} without a caption",
        "{count} images ({captions}), {missing} without a caption",
    )(
        count=pictures.images,
        captions=captions,
        missing=pictures.uncaptioned,
    )


def describe_plan(wishes: Wishes, pictures: Pictures) -> Iterator[str]:
    """Yield the plan in a few lines: images, length, memory, and what does not fit."""
    title = families.get(wishes.family).title
    if pictures.files:
        yield _describe_files(pictures)
    values: dict[str, Any] = {value.key: value for value in list_values(wishes, pictures)}
    yield Message("{steps} steps: {why}", steps=values["train.steps"].value, why=values["train.steps"].why)
    if "validation.pictures" in values:
        held_out = Plural("{count} image held out for validation", "{count} images held out for validation")
        yield held_out(count=values["validation.pictures"].value)
    elif pictures.files:
        yield Plural(
            "no validation: {count} image is too few; it needs at least {least}",
            "no validation: {count} images are too few; it needs at least {least}",
        )(
            count=pictures.files,
            least=dataset_recipe.HELD_OUT_FROM,
        )
    if not wishes.card:
        return
    frames = recipes.find_longest_clip(values["dataset.frames"].value) if "dataset.frames" in values else 1
    fit = recipes.fit_card(wishes.family, wishes.card, frames, recipes.has_dropout(wishes.goal), wishes.base)
    if fit.problem:
        yield fit.problem
    elif fit.peak:
        numbers = {"title": title, "gb": wishes.card, "peak": recipes.format_gib(fit.peak)}
        sizes = recipes.find_sizes(wishes.family, wishes.base)
        numbers["base"] = sizes.base if sizes else families.get(wishes.family).example_base
        if frames > 1:
            yield Message(
                "{title} on {gb} GB, with clips of {frames} frames: {peak} GiB at most, estimated for {base}",
                **numbers,
                frames=frames,
            )
        else:
            yield Message("{title} on {gb} GB: {peak} GiB at most, estimated for {base}", **numbers)
    if fit.note:
        yield fit.note
