"""The commands that begin a training: `lora-fp8 new | recipes`; commands.py adds them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from ..common.messages import get_language, translate
from ..common.shell import quote_path
from ..errors import Message, Plural, UserError, UserErrors, cannot_write
from .options import JSON, print_json, print_lines

if TYPE_CHECKING:
    from ..config.dataset_recipe import Pictures
    from ..config.short_config import Wishes

T = TypeVar("T")
ASSUMED_CARD = 24
"""GB, where no GPU is found."""


def add_to(app: typer.Typer) -> None:
    """Add these commands to `lora-fp8`."""
    for command in (new, recipes):
        app.command()(command)


def new(
    path: Path | None = typer.Argument(
        None,
        help="Config file to write (.toml is added if missing). In a terminal, omit it to be asked question by "
        "question.",
    ),
    family: str = typer.Option("", help="Architecture, such as sdxl, flux or qwen_image. Default: from --base."),
    base: str = typer.Option(
        "", help="Base model: Hugging Face id, folder or file. Default: the architecture's usual one."
    ),
    images: list[Path] = typer.Option([], help="Folder of images with captions, which are counted. Repeatable."),
    controls: Path | None = typer.Option(None, help="For editing models: folder with the images before the edit."),
    trigger: str = typer.Option("", help="Trigger word."),
    goal: str = typer.Option("", help="What to train: character, style, concept, object or edit."),
    card: int = typer.Option(0, help="GB of GPU memory: 8, 12, 16, 24, 48 or 80. Default: as on this machine."),
    preset: list[str] = typer.Option([], help="Further preset; goals and cards are presets too. Repeatable."),
    from_lora: Path | None = typer.Option(None, metavar="FILE", help="LoRA file whose settings to copy."),
    everything: bool = typer.Option(False, "--all", help="Write every setting that has an effect, with its bounds."),
    force: bool = typer.Option(False, help="Replace an existing file."),
) -> None:
    """Write a config. In a terminal, without arguments, it asks and offers to start."""
    from ..config import format_with_comments, loads

    if path is None:
        given = family, base, images, controls, trigger, goal, card, preset, from_lora, everything, force
        if any(given) or not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise UserError(
                Message("new: no config file is given; name the file to write, such as `lora-fp8 new my.toml`")
            )
        _ask_everything()
        return
    path = _with_suffix(path)
    _refuse_existing(path, force)
    if from_lora:
        others: dict[str, object] = {
            "--family": family,
            "--base": base,
            "--images": images,
            "--controls": controls,
            "--trigger": trigger,
        }
        others |= {"--goal": goal, "--card": card, "--preset": preset}
        text = _copy_settings(path, from_lora, [option for option, value in others.items() if value])
    else:
        problems: list[str] = []
        with _collect(problems):
            wishes = _make_wishes(path.stem, family, base, goal, card, preset)
        with _collect(problems):
            folders, pictures = _count(images)
        if problems:
            raise UserErrors(problems, "new")
        wishes = replace(wishes, folders=folders, control=str(controls or ""), trigger=trigger)
        text = _write_short(wishes, pictures)
        if everything:
            text = format_with_comments(loads(text, where="new").model_copy(update={"preset": []}))
        print_lines(*_describe(wishes, pictures))
    _save(path, text)
    command = f"lora-fp8 check {quote_path(path)}"
    if images or from_lora:
        print_lines(Message("{path} written; next: {command}", path=path, command=command))
    else:
        print_lines(
            Message(
                "{path} written; fill in your base model and image folder, then run: {command}",
                path=path,
                command=command,
            )
        )


def recipes(
    family: str = typer.Argument("", help="Architecture, such as sdxl. Default: list all."),
    goal: str = typer.Option("", help="What to train: character, style, concept, object or edit."),
    card: int = typer.Option(0, help="GB of GPU memory: 8, 12, 16, 24, 48 or 80. Default: as on this machine."),
    images: list[Path] = typer.Option([], help="Folder of images, for the number of steps. Repeatable."),
    as_json: bool = JSON,
) -> None:
    """List the recipes, or explain one: each value with its reason."""
    from ..config import dataset_recipe
    from ..config import recipes as rules

    if not family:
        _list_recipes(goal, card, images, as_json)
        return
    problems: list[str] = []
    with _collect(problems):
        wishes = _make_wishes("my-lora", family, "", goal, card, [])
    with _collect(problems):
        _, pictures = _count(images)
    if problems:
        raise UserErrors(problems, "recipes")
    chosen = []
    if images:
        chosen = dataset_recipe.choose_values(wishes.goal, family, pictures, card=wishes.card)
    frames = rules.find_longest_clip(next((value.value for value in chosen if value.key == "dataset.frames"), []))
    recipe = rules.make_recipe(wishes.goal, family, wishes.card, frames=frames)
    values = {value.key: value for value in (*recipe.values, *chosen)}
    if as_json:
        print_json(recipe.to_json() | {"settings": [value.to_json() for value in values.values()]})
        return
    from ..config import format_toml_value

    for value in values.values():
        print_lines(
            Message("{key} = {value}: {why}", key=value.key, value=format_toml_value(value.value), why=value.why)
        )
    fit = recipe.fit
    if fit.peak and not fit.problem:
        print_lines(
            Message(
                "At most {peak} GiB, estimated for {base}; a job can use {usable} GiB.",
                peak=rules.format_gib(fit.peak),
                base=_find_usual_base(family),
                usable=rules.format_gib(fit.usable),
            )
        )
    print_lines(*filter(None, (fit.problem, fit.note)))
    print_lines(Message("In a config: preset = {presets}", presets=format_toml_value(recipe.presets)))


def _list_recipes(goal: str, card: int, images: Sequence[Path], as_json: bool) -> None:
    """Print, for each family that takes the goal and fits the card, its goals and what each GPU allows.

    Raises:
        UserErrors: a goal or card that no recipe has, or images without a family.
    """
    from .. import families
    from ..config import recipes as rules

    problems = [
        *_find_wrong_goal(goal, Message("a recipe"), rules.GOALS),
        *_find_wrong_card(card),
        *(
            [Message("--images: the architecture is not given, but the number of steps depends on it; name it as well")]
            if images
            else []
        ),
    ]
    if problems:
        raise UserErrors(problems, "recipes")
    rows = []
    for family in families.list_families():
        fits = {size: rules.fit_card(family, size) for size in rules.CARDS}
        goals = rules.find_goals(family)
        if (not goal or goal in goals) and not (card and fits[card].problem):
            rows.append((family, goals, fits))
    if as_json:
        content = [
            {
                "family": family,
                "goals": list(goals),
                "cards": {str(card): {"fits": not fit.problem, "peak_mib": fit.peak} for card, fit in fits.items()},
            }
            for family, goals, fits in rows
        ]
        print_json({"recipes": content})
        return
    print_lines(Message("architecture, smallest GPU memory (GB) that can train it, and its goals:"))
    for family, goals, fits in rows:
        least = next((card for card, fit in fits.items() if not fit.problem), 0)
        print(f"  {family:22}{least or '-':>3}  {', '.join(goals)}")  # names only
    print_lines(Message("To explain one: lora-fp8 recipes sdxl --goal character --card 16"))


def _find_wrong_goal(goal: str, title: str, known: Sequence[str]) -> list[str]:
    if not goal or goal in known:
        return []
    return [
        Message(
            "--goal {goal}: there is no such goal for {title}; accepted: {known}",
            goal=goal,
            title=title,
            known=" | ".join(known),
        )
    ]


def _find_wrong_card(card: int) -> list[str]:
    from ..config import recipes as rules

    if not card or card in rules.CARDS:
        return []
    return [
        Message(
            "--card {card}: there is no recipe for this size; accepted: {names} GB",
            card=card,
            names=" | ".join(map(str, rules.CARDS)),
        )
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Steps of `new`


def _make_wishes(name: str, family: str, base: str, goal: str, card: int, presets: Sequence[str]) -> Wishes:
    """Complete the arguments by the family's usual base, the goal and card among the presets, and this machine's card.

    Raises:
        UserErrors: everything that is wrong with them.
    """
    from .. import families
    from ..config import list_preset_names, make_example
    from ..config import recipes as rules
    from ..config.short_config import Wishes

    problems: list[str] = []
    with _collect(problems):
        family = family or _recognize(base)
        make_example(name, family, presets)
    goals = [preset for preset in presets if preset in rules.GOALS]
    cards = [gb for preset in presets if (gb := rules.parse_card(preset))]
    others = [preset for preset in presets if preset not in rules.list_names()]
    known = rules.find_goals(family) if family in families.list_families() else rules.GOALS
    goal = goal or next(iter(goals), known[0])
    title = families.get(family).title if family in families.list_families() else family or Message("a recipe")
    problems += _find_wrong_goal(goal, title, known)
    card = card or next(iter(cards), 0) or (0 if base == "demo" else detect_card())
    problems += _find_wrong_card(card)
    if base == "demo":
        others = [*others, f"demo_{family}"] if f"demo_{family}" in list_preset_names() else others
    if problems:
        raise UserErrors(problems, "new")
    return Wishes(name, family, base or _find_usual_base(family), goal, card, presets=others)


def _find_usual_base(family: str) -> str:
    from .. import families

    return families.get(family).example_base


def _recognize(base: str) -> str:
    """Return the family of a base model; default: sd15.

    Raises:
        UserError: there is no such model, or no family here trains it.
    """
    from .. import families

    if base in ("", "demo"):
        return "sd15"
    what, family = families.recognize(base)
    if not family:
        raise UserError(
            Message(
                "--base {path}: {what}. If it is a base model, name its architecture with --family",
                path=base,
                what=what or families.UNKNOWN,
            )
        )
    return family


def detect_card() -> int:
    """Return the largest card of the recipes that is not larger than this machine's GPU, or `ASSUMED_CARD`."""
    from ..common.gpu import read_gpus
    from ..config.recipes import choose_card

    largest = max((gpu.total or 0 for gpu in read_gpus()), default=0)
    return choose_card(largest) if largest else ASSUMED_CARD


def _count(images: Sequence[Path]) -> tuple[list[tuple[str, int]], Pictures]:
    """Return the folders of images, each with its repeats, and what is in them.

    Raises:
        UserErrors: all folders that cannot be read.
    """
    from ..config import dataset_recipe

    problems: list[str] = []
    folders: list[tuple[Path, int]] = []
    pictures = dataset_recipe.Pictures()
    for path in images:
        with _collect(problems):
            folders += dataset_recipe.expand_folder(path)
    with _collect(problems):
        pictures = dataset_recipe.scan_folders(folders)
    if problems:
        raise UserErrors(problems, "new")
    return [(str(path), repeats) for path, repeats in folders], pictures


@contextlib.contextmanager
def _collect(problems: list[str]) -> Iterator[None]:
    """Add the problems of a UserError in the block to the list, instead of raising it."""
    try:
        yield
    except UserError as error:
        problems += error.problems


def _write_short(wishes: Wishes, pictures: Pictures) -> str:
    from ..config import loads, short_config

    text = short_config.format_config(wishes, pictures, _translate)
    loads(text, where="new")  # a preset, a name or a base that is wrong is reported here
    return text


def _translate(text: str) -> str:
    return translate(get_language(), text)


def _describe(wishes: Wishes, pictures: Pictures) -> list[str]:
    from ..config import short_config

    return list(short_config.describe_plan(wishes, pictures))


def _copy_settings(path: Path, file: Path, others: list[str]) -> str:
    """Return the settings with which a LoRA file was trained, as a config for another run.

    Args:
        path: the config to write.
        file: the LoRA file.
        others: options that were given and would have no effect.
    """
    from ..config import Override, format_with_comments, loads
    from ..lora_files.export_metadata import read_config

    if others:
        names = ", ".join(others)
        raise UserError(
            Message(
                "--from-lora copies all settings of the file. Remove {options}, and edit the config that is written",
                options=names,
            )
        )
    return format_with_comments(loads(read_config(file), [Override("name", path.stem)], where=str(file)))


def _with_suffix(path: Path) -> Path:
    """Return a config's path with .toml at its end. The name of an existing file stays, to be refused or replaced."""
    names_something = path.name in ("", "..") or (os.path.lexists(path) and not path.is_dir())
    return path if names_something or path.suffix.lower() == ".toml" else path.with_name(f"{path.name}.toml")


def _refuse_existing(path: Path, force: bool) -> None:
    if os.path.lexists(path) and not force:
        raise UserError(
            Message("{path}: the file exists already; choose another name, or add --force to replace it", path=path)
        )


def _save(path: Path, text: str) -> None:
    from ..common.writing import atomic_write

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path.resolve(), text.encode())
    except OSError as error:
        raise cannot_write(path, error) from None


# ---------------------------------------------------------------------------------------------------------------------
# Questions


def _ask_everything() -> None:
    """Ask for goal, base, images and card, show the plan, write the config, and offer to start."""
    from .. import families
    from ..config import recipes as rules
    from .training import train_or_resume

    goals = dict(zip(rules.GOALS, _list_goal_titles(), strict=True))
    goal = _choose(Message("What do you want to train?"), goals, "character")
    titles = {name: families.get(name).title for name in families.list_families() if goal in rules.find_goals(name)}
    family = _choose(Message("Which base model?"), titles, next(iter(titles)) if goal == "edit" else "sdxl")
    base = _ask(Message("Its Hugging Face id, folder or file"), _find_usual_base(family))
    detected = detect_card()
    cards = {str(gb): f"{gb} GB" for gb in rules.CARDS}
    card = int(_choose(Message("How much GPU memory?"), cards, str(detected))) if base != "demo" else 0
    wishes = _make_wishes("my-lora", family, base, goal, card, [])
    controls = None
    if wishes.edits:
        controls = _ask_again(Message("Folder with the images before the edit"), _parse_image_folder)
    question = Message("Folder with the images")
    folder = _ask_again(question, _parse_image_folder)
    trigger = (
        "" if goal == "edit" else _ask(Message("Trigger word that the base model does not know yet (Enter: none)"), "")
    )
    folders, pictures = _count([folder])
    path = _ask_again(Message("Config file to write"), _parse_new_file, "my-lora.toml")
    wishes = replace(wishes, name=path.stem, folders=folders, control=str(controls or ""), trigger=trigger)
    print_lines("", *_describe(wishes, pictures))
    _save(path, _write_short(wishes, pictures))
    print_lines(Message("{path} written", path=path))
    if typer.confirm(_translate(Message("Start the training now?")), default=False):
        train_or_resume(path, [], resume=False, as_json=False)
    else:
        print_lines(Message("Later: lora-fp8 check {path}, then lora-fp8 train {path}", path=quote_path(path)))


def _list_goal_titles() -> tuple[str, ...]:
    return (
        Message("a character or person"),
        Message("a style"),
        Message("a concept: pose, clothing, effect"),
        Message("an object"),
        Message("an edit: image in, image out"),
    )


def _choose(question: str, choices: dict[str, str], default: str) -> str:
    """Ask for one of some choices, by its number or its name."""
    print_lines("", question)
    names = list(choices)
    for number, name in enumerate(names, 1):
        print(f"  {number:2}  {name:22}{_translate(choices[name])}")

    def read(text: str) -> str:
        if text in choices:
            return text
        if text.isdecimal() and 0 < int(text) <= len(names):
            return names[int(text) - 1]
        raise UserError(
            Message(
                "{text}: this is neither a number from 1 to {most} nor a name; enter one of them",
                text=text,
                most=len(names),
            )
        )

    return _ask_again(Message("Number or name"), read, default)


def _ask_again(question: str, read: Callable[[str], T], default: str | None = None) -> T:
    """Ask until `read` accepts the answer."""
    while True:
        try:
            return read(_ask(question, default))
        except UserError as error:
            print_lines(str(error))


def _ask(question: str, default: str | None) -> str:
    """Ask a question; Enter takes the default. None: an answer is needed."""
    answer: str = typer.prompt(_translate(question), default=default)
    return answer.strip()


def _parse_image_folder(text: str) -> Path:
    from ..config import dataset_recipe

    path = Path(text.strip("'\""))
    pictures = dataset_recipe.scan_folders(dataset_recipe.expand_folder(path))
    if not pictures.files:
        raise UserError(Message("{path}: there are no images in this folder", path=path))
    print_lines(Plural("{count} image", "{count} images")(count=pictures.files))
    return path


def _parse_new_file(text: str) -> Path:
    path = _with_suffix(Path(text))
    _refuse_existing(path, force=False)
    return path
