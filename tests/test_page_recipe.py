"""New training follows its recipe: values that depend on the images change with them, and what a person set stays."""

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from PIL import Image

from lora_fp8.config import dataset_recipe, recipes
from webui.context import Place, Ui
from webui.pages import new
from webui.pages.new import questions
from webui.pages.new import recipe as recipe_module

SDXL = '[model]\nfamily = "sdxl"\npath = "stabilityai/stable-diffusion-xl-base-1.0"\n'


def add_images(folder: Path, count: int) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        Image.new("RGB", (64, 64), "red").save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text("woman, red hair, park", encoding="utf-8")
    return folder


@pytest.fixture
def page(tmp_path: Path) -> new.Page:
    with gr.Blocks():
        made = new.Page(Ui("en", Place(tmp_path / "home", [tmp_path])))
        made.lay_out()
    made.draft.write(SDXL)
    return made


def settings_of(page: new.Page) -> dict[str, Any]:
    return tomllib.loads(page.draft.text())


def choose(page: new.Page, goal: str) -> dict[str, Any]:
    """Choose a goal, and return the fields that are repainted, by their ids."""
    painted = page.handlers.choose_preset(questions.GOALS, goal, False)
    return {part.elem_id: value for part, value in painted.items()}


def use(page: new.Page, folder: Path) -> dict[Any, Any]:
    """Add a folder of images to the draft, as the images' part of the page does."""
    event = SimpleNamespace(_data={"do": "use", "folder": str(folder)})
    return page.handlers.use_folder(event, False)  # type: ignore[arg-type]


def proposal(goal: str, folder: Path, trigger: str = "") -> dict[str, Any]:
    """What `lora-fp8 new` writes for these images."""
    pictures = dataset_recipe.look([(folder, 1)])
    return {value.key: value.value for value in dataset_recipe.values(goal, "sdxl", pictures, trigger)}


def test_steps_and_validation_follow_goal_and_images_until_they_are_set_by_hand(page: new.Page, tmp_path: Path) -> None:
    choose(page, "character")
    assert "train" not in settings_of(page), "no images, so nothing to count"
    few, many = add_images(tmp_path / "few", 20), add_images(tmp_path / "many", 60)
    painted = use(page, few)
    wanted = proposal("character", few)
    assert settings_of(page)["train"]["steps"] == wanted["train.steps"]
    assert settings_of(page)["validation"]["pictures"] == wanted["validation.pictures"] == 2
    steps = page.layout.parts["simple"]["train.steps"]
    assert str(wanted["train.steps"]) in str(painted[steps]), "the field shows it"

    choose(page, "style")
    assert settings_of(page)["train"]["steps"] == proposal("style", few)["train.steps"] != wanted["train.steps"]

    page.handlers.change("simple", "train.steps", False, "1234", False)
    use(page, many)
    assert settings_of(page)["train"]["steps"] == 1234, "set by hand"
    assert settings_of(page)["validation"]["pictures"] == 8, "still proposed"


def test_prompts_follow_the_trigger_word_and_stay_when_they_were_typed(page: new.Page, tmp_path: Path) -> None:
    choose(page, "character")
    use(page, add_images(tmp_path / "set", 4))
    trigger = page.layout.parts["simple"]["dataset.trigger"]
    prompts = page.layout.parts["simple"]["preview.prompts"]
    painted = page.handlers.change("simple", "dataset.trigger", False, "zibo", False)
    assert trigger not in painted, "somebody types there"
    shown = settings_of(page)["preview"]["prompts"]
    assert all("zibo" in prompt for prompt in shown) and all(prompt in str(painted[prompts]) for prompt in shown)
    page.handlers.change("simple", "preview.prompts", False, "my own", False)
    page.handlers.change("simple", "dataset.trigger", False, "zib", False)
    assert settings_of(page)["preview"]["prompts"] == ["my own"]
    page.handlers.change("simple", "preview.prompts", False, "", False)
    page.handlers.change("simple", "name", False, "cat", False)
    assert "prompts" not in settings_of(page).get("preview", {}), "taken out, and not brought back by another field"


def test_without_a_goal_and_on_a_demo_base_nothing_is_proposed(page: new.Page, tmp_path: Path) -> None:
    folder = add_images(tmp_path / "set", 20)
    use(page, folder)
    assert "train" not in settings_of(page)
    page.base.choose("demo", "sd15", False)
    choose(page, "character")
    assert "train" not in settings_of(page), "a demo's preset has all values"


def test_the_gpu_that_is_found_is_chosen_with_the_goal_and_named(
    page: new.Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.recipe.gpus = [("NVIDIA GeForce RTX 4090", 25757220864)]
    painted = choose(page, "style")
    assert settings_of(page)["preset"] == ["style", "vram_24gb"] and painted["new-card"] == "vram_24gb"
    assert "RTX 4090, 24 GB" in painted["new-recipe"]
    page.handlers.choose_preset(tuple(recipes.card_name(gb) for gb in recipes.CARDS), "vram_12gb", False)
    choose(page, "character")
    assert set(settings_of(page)["preset"]) == {"character", "vram_12gb"}, "a card that was chosen stays"
    reasons = recipes.fit_card("sdxl", 12).values
    shown = page.recipe.render()
    assert sum(page.ui.translate(value.why)[:30] in shown.replace("&#x27;", "'") for value in reasons) >= 2


def test_captions_are_read_once_while_the_files_stay(
    page: new.Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The side is painted every two seconds."""
    choose(page, "character")
    use(page, add_images(tmp_path / "set", 4))
    page.recipe.render()
    looked: list[object] = []
    monkeypatch.setattr(recipe_module.dataset_recipe, "look", looked.append)
    page.recipe.render()
    page.recipe.render()
    assert looked == []
