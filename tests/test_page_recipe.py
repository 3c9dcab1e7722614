"""New training follows its recipe: values that depend on the images change with them, and what a person set stays."""

import html
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from PIL import Image

from lora_fp8 import config
from lora_fp8.common.gpu import Gpu
from lora_fp8.config import dataset_recipe, recipes
from webui import form, image_folders, importer, translations
from webui.context import Place, Ui
from webui.pages import new
from webui.pages.new import recipe as recipe_module
from webui.pages.new.preset_choice import KINDS

SDXL = '[model]\nfamily = "sdxl"\npath = "stabilityai/stable-diffusion-xl-base-1.0"\n'


def add_images(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
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
    return tomllib.loads(page.draft.load_text())


def choose(page: new.Page, goal: str) -> dict[str, Any]:
    """Choose a goal, and return the fields that are repainted, by their ids."""
    painted = page.presets["simple"].choose("goal", goal, False)
    return {part.elem_id: value for part, value in painted.items()}


def pressed(cards: str) -> set[str]:
    """The presets whose cards are pressed."""
    return set(re.findall(r'data-name="([^"]+)"[^>]*aria-pressed="true"', cards))


def use(page: new.Page, folder: Path) -> dict[Any, Any]:
    """Add a folder of images to the draft, as the images' part of the page does."""
    event = SimpleNamespace(_data={"do": "use", "folder": str(folder)})
    return page.handlers.use_folder(event, False)  # type: ignore[arg-type]


def proposal(goal: str, folder: Path, trigger: str = "") -> dict[str, Any]:
    """What `lora-fp8 new` writes for these images."""
    pictures = dataset_recipe.scan_folders([(folder, 1)])
    return {value.key: value.value for value in dataset_recipe.choose_values(goal, "sdxl", pictures, trigger)}


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


def test_repeats_of_kohyas_folder_names_are_taken(page: new.Page, tmp_path: Path) -> None:
    train = tmp_path / "train"
    inner = [add_images(train / name, 2) for name in ("10_zibo", "3_style")]
    for folder in (train, inner[0]):
        use(page, folder)
    rows = settings_of(page)["dataset"]["folders"]
    assert rows == [{"path": str(inner[0]), "repeats": 10}, {"path": str(inner[1]), "repeats": 3}]

    page.draft.write(SDXL)
    add_images(train / "others", 1)  # which would be left out
    image_folders._counted.clear()
    use(page, train)
    assert settings_of(page)["dataset"]["folders"] == [{"path": str(train)}]


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
    page.recipe.gpus = [Gpu("NVIDIA GeForce RTX 4090", total=25757220864), Gpu("NVIDIA GB10")]
    painted = choose(page, "style")
    assert settings_of(page)["preset"] == ["style", "vram_24gb"]
    assert pressed(painted["new-presets"]) == {"style", "vram_24gb"}
    assert "RTX 4090, 24 GB" in painted["new-recipe"]
    page.presets["simple"].choose("card", "vram_12gb", False)
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
    monkeypatch.setattr(recipe_module.dataset_recipe, "scan_folders", looked.append)
    page.recipe.render()
    page.recipe.render()
    assert looked == []


CHOSEN = SDXL + "[adapter]\nrank = 5\n"


@pytest.mark.parametrize("base", [CHOSEN, CHOSEN.replace("stabilityai/stable-diffusion-xl-base-1.0", "demo")])
def test_a_card_says_what_its_press_changes(page: new.Page, tmp_path: Path, base: str) -> None:
    """Also where the steps follow the images, and where a value of the draft wins over the preset."""
    page.draft.write(base)
    use(page, add_images(tmp_path / "set", 20))
    text, kept = page.draft.load_text(), set()
    before = form.read_values(text, page.draft.home)
    presets = [(kind, name) for kind in KINDS for name in page.painter.choice.list_names(kind, before)]
    assert {("goal", "style"), ("card", "vram_8gb"), ("bundled", "precision_o2")} <= set(presets)
    for kind, name in presets:
        page.draft.write(text)
        effect = page.painter.choice.find_effect(text, kind, name)
        page.presets["all"].choose(kind, name, False)
        after = form.read_values(page.draft.load_text(), page.draft.home)
        changed = {key: value for key, value in after.items() if not form.is_same_value(value, before[key])}
        assert changed.pop("preset") == [name]
        assert changed == effect.values, name
        kept |= {(name, key) for key in effect.kept}
    assert ("style", "adapter.rank") in kept and ("vram_8gb", "adapter.rank") not in kept


def test_presets_that_are_chosen_in_any_order_give_the_same_training(page: new.Page) -> None:
    """A GPU's preset sets the storage that a precision level replaces; levels replace each other."""
    for kind, name in (
        ("bundled", "precision_o0"),
        ("goal", "style"),
        ("bundled", "precision_o2"),
        ("card", "vram_8gb"),
    ):
        page.presets["all"].choose(kind, name, False)
    assert settings_of(page)["preset"] == ["style", "vram_8gb", "precision_o2"]
    job = config.loads(page.draft.load_text() + '[[dataset.folders]]\npath = "p"\n')
    assert (job.quantize.storage, job.model.dtype) == ("bf16", "bf16")
    page.presets["all"].choose("bundled", "precision_o2", False, False)
    page.presets["all"].choose("goal", "", False)
    assert settings_of(page)["preset"] == ["vram_8gb"]
    page.presets["all"].choose("own", "/etc/hosts.toml", False)
    assert settings_of(page)["preset"] == ["vram_8gb"], "only what is offered"


def test_a_press_is_undone_to_the_byte_until_something_else_changes(page: new.Page, tmp_path: Path) -> None:
    use(page, add_images(tmp_path / "set", 20))
    before = page.draft.load_text()
    painted = page.presets["all"].choose("goal", "style", False)
    panel = page.layout.presets.panels["all"]
    assert page.draft.load_text() != before and 'data-do="undo"' in painted[panel]
    assert 'data-do="undo"' not in page.presets["all"].undo(False)[panel]
    assert page.draft.load_text() == before
    page.presets["all"].choose("goal", "style", False)
    page.draft.put("name", "cat")
    after = page.draft.load_text()
    assert 'data-do="undo"' not in page.painter.update_cards("all")[panel]
    page.presets["all"].undo(False)
    assert page.draft.load_text() == after


def test_cards_of_gpus_say_what_fits(page: new.Page) -> None:
    page.draft.write('[model]\nfamily = "flux2"\npath = "a/b"\n')
    cards = dict(
        re.findall(
            r'data-name="vram_(\d+)gb".*?<span class="purpose">(.*?)</span>',
            page.painter.update_cards("all")[page.layout.presets.panels["all"]],
        )
    )
    fits = {gb: recipes.fit_card("flux2", gb) for gb in recipes.CARDS}
    assert {fit.problem != "" for fit in fits.values()} == {True, False}
    for gb, fit in fits.items():
        assert (html.escape(fit.problem) if fit.problem else f"{recipes.format_gib(fit.peak)} of") in cards[str(gb)]


def test_cards_name_no_architecture_until_a_base_is_chosen(page: new.Page) -> None:
    panel = page.layout.presets.panels["all"]
    page.draft.write('[model]\nfamily = "flux2"\npath = ""\n')
    assert (
        "FLUX.2" not in page.painter.update_cards("all")[panel] and "GiB" not in page.painter.update_cards("all")[panel]
    )
    page.draft.write('[model]\nfamily = "flux2"\npath = "a/b"\n')
    assert "FLUX.2" in page.painter.update_cards("all")[panel]


@pytest.mark.parametrize("language", translations.LANGUAGES)
def test_epochs_of_an_import_become_steps_when_images_come(language: str, page: new.Page, tmp_path: Path) -> None:
    """The page's own reading of the line that the import left open, in either language; a number by hand stays."""
    file = tmp_path / "k.toml"
    theirs = "max_train_epochs = 10\ntrain_batch_size = 2\nnetwork_dim = 7\n"
    file.write_text(f'pretrained_model_name_or_path = "m"\nnetwork_module = "networks.lora_flux"\n{theirs}')
    text, _ = importer.import_files(Ui(language, page.ui.place), [file])
    page.draft.write(text)
    assert settings_of(page)["train"]["steps"] == "TODO" and "10" not in page.recipe.render()
    page.draft.put("dataset.folders", [])
    few, many = add_images(tmp_path / "few", 5), add_images(tmp_path / "10_many", 4)
    use(page, few)
    assert settings_of(page)["train"]["steps"] == 10 * 3
    assert "10 epochs x 3 steps (5 samples per epoch)" in page.recipe.render()
    use(page, many)
    assert settings_of(page)["train"]["steps"] == 10 * 23, "5 images, and 4 that are repeated 10 times"
    for folder in (few, many):
        event = SimpleNamespace(_data={"do": "remove", "folder": str(folder)})
        page.handlers.remove_folder(event, False)  # type: ignore[arg-type]
    assert settings_of(page)["train"]["steps"] == "TODO"
    page.draft.put("train.steps", 77)
    use(page, few)
    assert settings_of(page)["train"]["steps"] == 77
