"""Every recipe (goal x family x GPU) loads, uses what it sets and fits; `new` writes what a person must look at."""

import json
import logging
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit
from PIL import Image
from waiting import LONG_SECONDS

from lora_fp8 import cli, config, families
from lora_fp8.config import dataset_recipe, find_unused_settings, recipes, short_config
from lora_fp8.config.dataset_recipe import Pictures
from lora_fp8.data import image_edits
from lora_fp8.errors import Message, UserError
from lora_fp8.families.sources import known_bases
from lora_fp8.plan.check import check
from lora_fp8.settings import Job
from webui import image_folders

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
FAMILIES = families.list_families()
GIB = 2**30


def load(family: str, presets: list[str], **sections: dict[str, object]) -> Job:
    """Load a job with these presets on a family's usual base, with previews."""
    folder = {"path": "pictures"} | ({"control": "before"} if any(families.get(family).controls) else {})
    data = {"preset": presets, "model": {"family": family, "path": families.get(family).example_base}}
    data |= {"dataset": {"folders": [folder]}, "preview": {"prompts": ["a"]}}
    if "control" in folder:
        data["preview"] = {"prompts": ["a"], "controls": ["before/a.png"]}
    for name, section in sections.items():
        data[name] = {**data.get(name, {}), **section}  # type: ignore[dict-item]
    return config.loads(tomlkit.dumps(data))


def value_of(job: Job, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(job, section), name)


# ------------------------------------------------------------------------------------------------- goal x family x GPU


@pytest.mark.parametrize("family", FAMILIES)
def test_every_recipe_loads_uses_what_it_sets_and_fits(family: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for goal in recipes.find_goals(family):
        for card in recipes.CARDS:
            recipe = recipes.make_recipe(goal, family, card)
            job = load(family, recipe.presets)
            assert find_unused_settings(job) == [], (goal, card)
            assert {value.key: value.value for value in recipe.values} == {
                value.key: value_of(job, value.key) for value in recipe.values
            }
            assert all(isinstance(value.why, Message) and value.why.endswith(".") for value in recipe.values)
            assert len({value.key for value in recipe.values}) == len(recipe.values), "a setting has one reason"
            assert job.train.batch_size * job.train.accumulate == recipes.IMAGES_PER_STEP
            if recipe.fit.problem:
                assert f"{card} GB" in recipe.fit.problem
            else:
                assert recipe.fit.peak is not None and recipe.fit.peak <= recipe.fit.usable < card * 1024 - 1024
    assert not caplog.records
    # Without previews, nothing is set that only they use.
    for card in recipes.CARDS:
        assert (
            find_unused_settings(
                load(family, [recipes.format_card_name(card)], preview={"prompts": [], "controls": []})
            )
            == []
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_larger_gpu_is_never_slower_and_a_refusal_names_one_that_would_do(family: str) -> None:
    cost = {}
    for card in recipes.CARDS:
        job, fit = load(family, [recipes.format_card_name(card)]), recipes.fit_card(family, card)
        area = job.dataset.resolution
        native = families.get(family).native_resolution
        less = native - (native if area == "auto" else area)
        cost[card] = (
            bool(fit.problem),
            less,
            job.memory.share_in_ram,
            job.memory.gradient_checkpointing,
            job.train.accumulate,
        )
        if fit.problem:
            named = re.search(r"A GPU of (\d+) GB is enough", fit.problem)
            larger = [other for other in recipes.CARDS if other > card and not recipes.fit_card(family, other).problem]
            assert (int(named[1]) if named else None) == (larger[0] if larger else None)
    assert [cost[card] for card in recipes.CARDS] == sorted(cost.values(), reverse=True)
    assert not cost[80][0], "an 80 GB card trains every family"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_estimates_are_of_todays_family(family: str) -> None:
    sizes, Family = recipes.read_sizes()[family], families.get(family)
    assert (sizes.base, sizes.sides[0]) == (Family.example_base, Family.native_resolution)
    assert all(side % Family.bucket_multiple == 0 for side in sizes.sides)
    assert bool(sizes.steps) == (family != "hidream"), "its experts are chosen by the activations"


@pytest.mark.parametrize(("family", "card"), [("sd15", 8)])
def test_the_real_estimate_of_a_recipe_is_the_one_that_is_stored(family: str, card: int, tmp_path: Path) -> None:
    """scripts/measure_memory.py is to be run again for this family if this fails."""
    import measure_memory

    from lora_fp8.plan import estimate

    fit, sizes = recipes.fit_card(family, card), recipes.read_sizes()[family]
    chosen = {value.key: value.value for value in fit.values}
    if chosen["dataset.resolution"] == "auto":
        chosen["dataset.resolution"] = sizes.sides[0]
    estimated = estimate.estimate(measure_memory.make_plan(family, tmp_path, chosen), "cuda")
    checkpointed = " checkpointed" if chosen["memory.gradient_checkpointing"] else ""
    stored = {
        "base": sizes.weights[f"{chosen.get('memory.offload', 0):g}"][0],
        "trained": sizes.trained,
        "step": sizes.steps[f"{chosen['dataset.resolution']} x{chosen['train.batch_size']}{checkpointed}"],
        "text": sizes.text[chosen["model.text_storage"]],
        "vae": sizes.vae,
        "encode": sizes.encode[str(chosen["dataset.resolution"])],
    }
    assert estimated.step_bytes and estimated.vae_encode_bytes and estimated.peak_bytes
    found = {
        "base": estimated.base_bytes,
        "trained": estimated.adapter_bytes + estimated.optimizer_bytes,
        "step": estimated.step_bytes,
        "text": estimated.text_bytes,
        "vae": estimated.vae_bytes,
        "encode": estimated.vae_encode_bytes,
    }
    assert {name: size / 2**20 for name, size in found.items()} == pytest.approx(stored, rel=0.005, abs=2)
    assert estimated.peak_bytes / 2**20 <= (fit.peak or 0) + 2 <= fit.usable


def test_a_base_of_another_size_has_estimates_of_its_own() -> None:
    """The config knows the base by its name only; one that is not known counts as the usual one of its family."""
    usual, large = "black-forest-labs/FLUX.2-klein-base-4B", "black-forest-labs/FLUX.2-klein-base-9B"
    sizes = {base: recipes.find_sizes("flux2_klein", base) for base in (usual, large, "", "me/mine", f"{large}-x")}
    assert sizes[usual] == sizes[""] == sizes["me/mine"] == sizes[f"{large}-x"] != sizes[large]
    known = known_bases.get(large)
    assert known is not None and sizes[large] is not None and sizes[large].base == large
    # bf16 in the file, FP8 in memory, in which a few layers stay as they are.
    assert 0.5 < sizes[large].weights["0"][0] * 2**20 / (known.gigabytes["transformer"] * 10**9) < 0.6
    assert 0.97 < sizes[large].text["none"] * 2**20 / (known.gigabytes["text_encoder"] * 10**9) < 1.03
    assert recipes.find_sizes("flux", large) == recipes.read_sizes()["flux"]  # of another family
    assert recipes.find_sizes("sdxl", "Laxhar/noobai-XL-1.1") == recipes.read_sizes()["sdxl"]

    text = '[model]\nfamily = "flux2_klein"\npath = "{}"\n[[dataset.folders]]\npath = "p"\n'
    batches = {}
    for base in (usual, large):
        job = config.loads('name = "a"\npreset = ["character", "vram_16gb"]\n' + text.format(base))
        batches[base] = (job.train.batch_size, job.train.accumulate, job.model.text_storage)
    assert batches == {usual: (2, 1, "none"), large: (1, 2, "fp8")}
    problem = str(recipes.fit_card("sd3", 8, 1, True, "stabilityai/stable-diffusion-3.5-large").problem)
    assert not problem or "3.5 large" in problem


@pytest.mark.parametrize("name", ["ltx_video", "sana", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers"])
def test_the_stored_sizes_are_those_of_the_released_model(name: str, tmp_path: Path) -> None:
    """scripts/measure_memory.py is to be run again for this family or base if this fails."""
    import measure_memory

    known, sizes = known_bases.get(name), recipes.read_sizes()[name]
    model = measure_memory.Released(known.family if known else name, tmp_path, name if known else "")
    found = model.count_weights()
    for share, pair in sizes.weights.items():
        assert found[share] == pytest.approx(pair, rel=0.005, abs=2), share
    assert model.count_trained() / 2**20 == pytest.approx(sizes.trained, rel=0.005, abs=2)
    side = sizes.sides[0]
    model.measure_step(side, 1)  # the first step fills buffers, as in the script
    model.denoiser.enable_gradient_checkpointing()
    step = model.measure_step(side, 1)
    assert step is not None and step / 2**20 == pytest.approx(sizes.steps[f"{side} x1 checkpointed"], rel=0.01)
    if sizes.clips:  # a length between two that are stored
        step, stored = model.measure_step(side, 1, 65), sizes.with_clips(65)
        assert step is not None and step / 2**20 == pytest.approx(stored.steps[f"{side} x1 checkpointed"], rel=0.03)


def test_presets_of_recipes_know_the_family_and_the_config_wins() -> None:
    assert load("sdxl", ["character"]).dataset.shuffle_tags and not load("flux", ["character"]).dataset.shuffle_tags
    assert load("sdxl", ["style"]).objective.min_snr_gamma == 5 and load("flux", ["style"]).objective.min_snr_gamma == 0
    small, large = (load("flux", [name]).memory for name in ("vram_12gb", "vram_80gb"))
    assert small.share_in_ram > 0 and large.share_in_ram == 0 and small.gradient_checkpointing
    assert load("flux", ["vram_12gb"], memory={"offload": 0.0}).memory.offload == 0
    job = config.loads(
        'preset = ["vram_12gb"]\nmodel = {family = "sd15", path = "demo"}\ndataset = {folders = [{path = "p"}]}',
        ["model.family=flux"],
    )
    assert job.memory.offload == small.offload, "the family of --set counts"


@pytest.mark.parametrize("family", ["sdxl", "flux", "wan"])
def test_a_card_counts_the_dropout_that_a_goal_or_a_person_sets(family: str) -> None:
    """Dropout keeps the inputs of adapters a second time: 1.1 to 1.5 times the memory of a step, by the estimate."""
    for card in recipes.CARDS:
        with_dropout = {value.key: value.value for value in recipes.fit_card(family, card, 1, True).values}
        name = recipes.format_card_name(card)
        for job in (
            load(family, ["concept", name]),
            load(family, [name, "concept"]),
            load(family, [name], adapter={"dropout": 0.2}),
        ):
            assert {key: value_of(job, key) for key in with_dropout} == with_dropout
    without = recipes.fit_card(family, 24), recipes.fit_card(family, 24, 1, True)
    assert without[0].values != without[1].values and recipes.has_dropout("concept")
    job = load(family, ["concept", recipes.format_card_name(24)], adapter={"dropout": 0.0})
    assert {value.key: value_of(job, value.key) for value in without[0].values} == {
        value.key: value.value for value in without[0].values
    }


CLIPS = [family for family in FAMILIES if any(families.get(family).clips)]


@pytest.mark.parametrize("family", CLIPS)
def test_a_card_counts_the_frames_of_clips(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Longer clips need more memory, and the settings for them fit: nothing gets faster, and 17 frames fit any card."""
    caplog.set_level(logging.WARNING)
    for card in recipes.CARDS:
        slower: list[tuple[object, ...]] = []
        peaks: list[int] = []
        for frames in (1, 17, 25, 81, 161):
            job = load(family, [recipes.format_card_name(card)], dataset={"frames": [1, frames][frames == 1 :]})
            fit = recipes.fit_card(family, card, frames)
            assert find_unused_settings(job) == []
            assert {value.key: value.value for value in fit.values} == {
                value.key: value_of(job, value.key) for value in fit.values
            }
            area = job.dataset.resolution
            side = families.get(family).native_resolution if area == "auto" else area
            memory = job.memory
            slower.append((bool(fit.problem), -side, memory.share_in_ram, memory.gradient_checkpointing))
            peaks += [fit.peak] if fit.peak else []
            assert fit.problem or (fit.peak and fit.peak <= fit.usable)
            # HunyuanVideo's VAE masks each pair of positions: `new` proposes 9 frames for small cards.
            assert frames > 17 or not fit.problem or (family == "hunyuan_video" and card <= 12)
            assert not fit.problem or f"clips of {frames} frames" in fit.problem
        assert slower == sorted(slower), card
    assert not caplog.records
    # The frames of `--set` count, and what is no list of lengths is left to the check.
    name = recipes.format_card_name(24)
    text = (
        f'preset = ["{name}"]\nmodel = {{family = "{family}", path = "a/b"}}\ndataset = {{folders = [{{path = "p"}}]}}'
    )
    job, fit = config.loads(text, ["dataset.frames=[81]"]), recipes.fit_card(family, 24, 81)
    assert {value.key: value_of(job, value.key) for value in fit.values if not value.drawn} == {
        value.key: value.value for value in fit.values if not value.drawn
    }
    for wrong in ('"many"', '["a"]', "[true]", "[-3]", "81"):
        with pytest.raises(UserError, match="dataset.frames"):
            config.loads(text, [f"dataset.frames={wrong}"])


# --------------------------------------------------------------------------------------------------------- the images


def values_of(goal: str, family: str, pictures: Pictures, trigger: str = "") -> dict[str, object]:
    return {value.key: value.value for value in dataset_recipe.choose_values(goal, family, pictures, trigger)}


def test_steps_follow_from_the_images_and_the_arithmetic_is_shown() -> None:
    pictures = Pictures(images=25, samples=50)
    steps = next(iter(dataset_recipe.choose_values("character", "sdxl", pictures)))
    # 25 - 2 (a tenth, rounded to even) = 23; 23 * 80 / 2 = 920, to the next fifty; 900 * 2 / 46 samples of an epoch.
    assert (steps.key, steps.value) == ("train.steps", 900)
    assert steps.why == "23 images x 80 times / 2 a step = 920: 39.1 epochs of 46 samples."
    few, many = (dataset_recipe.choose_values("style", "flux", Pictures(num, num))[0] for num in (5, 1000))
    assert (few.value, many.value) == (800, 5000) and "kept within 800 and 5000" in few.why
    none = dataset_recipe.choose_values("object", "flux", Pictures())
    assert [(value.key, value.value) for value in none] == [("train.steps", 1000)]


@pytest.mark.parametrize(("images", "held_out"), [(1, 0), (14, 0), (15, 2), (40, 4), (1000, 8)])
def test_validation_is_on_where_there_are_enough_images(images: int, held_out: int) -> None:
    found = values_of("concept", "sdxl", Pictures(images, images))
    assert found.get("validation.pictures", 0) == held_out
    assert ("validation.every" in found) == (held_out > 0)
    job = load("sdxl", ["concept"], validation={k.split(".")[1]: v for k, v in found.items() if "validation" in k})
    assert find_unused_settings(job) == []


TAGS, SENTENCES = "1girl, red hair, park, smile", "A girl with red hair sits in the park, and she smiles at a dog."


@pytest.mark.parametrize(
    ("family", "caption", "goal", "shuffled"),
    [
        ("sdxl", TAGS, "character", True),
        ("sdxl", SENTENCES, "character", False),
        ("flux", SENTENCES, "character", False),
        ("flux", TAGS, "character", True),
        ("qwen_image_edit", TAGS, "edit", False),
        ("qwen_image_edit", SENTENCES, "edit", False),
    ],
)
def test_tags_are_shuffled_and_sentences_and_instructions_never(
    family: str, caption: str, goal: str, shuffled: bool, tmp_path: Path
) -> None:
    for number in range(3):
        Image.new("RGB", (32, 32)).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(caption, encoding="utf-8")
    pictures = dataset_recipe.scan_folders([(tmp_path, 1)])
    assert pictures.style == ("tags" if caption == TAGS else "sentences") and pictures.images == 3
    wishes = short_config.Wishes("x", family, "a/b", goal, 24, [(str(tmp_path), 1)])
    assert config.loads(short_config.format_config(wishes, pictures)).dataset.shuffle_tags is shuffled


def test_images_are_counted_as_training_lists_them(tmp_path: Path) -> None:
    """Masks beside the images and excluded images do not count, and a caption may end with .TXT."""
    for number in range(4):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
        Image.new("L", (8, 8)).save(tmp_path / f"{number}-masklabel.png")
        Image.new("L", (8, 8)).save(tmp_path / f"{number}_m.png")
        (tmp_path / f"{number}.TXT").write_text(f"dog {number}", encoding="utf-8")
    (tmp_path / image_edits.FILE).write_text('["0.png"]\nexclude = true\n', encoding="utf-8")
    pictures = dataset_recipe.scan_folders([(tmp_path, 2)], {tmp_path: "*_m"})
    assert (pictures.images, pictures.samples, pictures.uncaptioned) == (3, 6, 0)
    assert pictures.captions == ["dog 1", "dog 2", "dog 3"]
    counted = image_folders.count_files(tmp_path, "*_m")
    assert (counted.pictures, counted.without_caption) == (3, 0)
    pairs = dataset_recipe.find_pairs(tmp_path, tmp_path)
    assert pairs == [(f"dog {number}", tmp_path / f"{number}.png") for number in (1, 2)]


def test_folders_are_counted_with_repeats_and_missing_captions(tmp_path: Path) -> None:
    for name, number in (("10_zibo dog", 3), ("2_other", 5)):
        folder = tmp_path / "img" / name
        folder.mkdir(parents=True)
        for index in range(number):
            Image.new("RGB", (8, 8)).save(folder / f"{index}.PNG")
        (folder / "0.txt").write_text("a dog", encoding="utf-8")
        (folder / "notes.md").write_text("x", encoding="utf-8")
    (tmp_path / "img" / "2_other" / "clip.mp4").write_bytes(b"")
    folders = dataset_recipe.expand_folder(tmp_path / "img")
    assert [(path.name, repeats) for path, repeats in folders] == [("10_zibo dog", 10), ("2_other", 2)]
    pictures = dataset_recipe.scan_folders(folders)
    assert (pictures.images, pictures.videos, pictures.samples) == (8, 1, 3 * 10 + 6 * 2)
    assert pictures.uncaptioned == 7 and pictures.captions == ["a dog", "a dog"] and pictures.style == ""
    assert values_of("object", "sdxl", pictures, "zibo")["dataset.missing_caption"] == "trigger"
    assert "dataset.missing_caption" not in values_of("object", "sdxl", pictures)
    assert "dataset.frames" not in values_of("object", "sdxl", pictures)
    assert values_of("object", "wan", pictures)["dataset.frames"] == [17]
    wishes = short_config.Wishes("x", "wan", "a/b", "object", 24, [(str(path), 1) for path, _ in folders])
    job, fit = config.loads(short_config.format_config(wishes, pictures)), recipes.fit_card("wan", 24, 17)  # no dropout
    assert {value.key: value_of(job, value.key) for value in fit.values if not value.drawn} == {
        value.key: value.value for value in fit.values if not value.drawn
    }
    for card, frames in {8: [5], 12: [9], 16: [17]}.items():
        small = {
            value.key: value for value in dataset_recipe.choose_values("object", "hunyuan_video", pictures, card=card)
        }
        assert small["dataset.frames"].value == frames, card
        assert (f"because 17 frames do not fit a GPU of {card} GB" in small["dataset.frames"].why) == (frames != [17])
    described = "\n".join(short_config.describe_plan(wishes, pictures))
    assert f"on 24 GB, with clips of 17 frames: {recipes.format_gib(fit.peak or 0)} GiB at most" in described
    for wrong in (tmp_path / "none", tmp_path / "img" / "2_other" / "0.PNG"):
        with pytest.raises(UserError):
            dataset_recipe.expand_folder(wrong)


# -------------------------------------------------------------------------------------------------------------- `new`


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """ask("new", ...): (exit code, output, errors) of a command in this process."""

    def ask(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lora-fp8", *map(str, arguments)])
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capfd.readouterr()

    return ask


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen images of 96 x 96 pixels with captions of tags, and control images in `before`."""
    folder = tmp_path_factory.mktemp("images")
    for name in ("after", "before"):
        (folder / name).mkdir()
        for number in range(16):
            Image.new("RGB", (96, 96), (number * 9, 40, len(name) * 9)).save(folder / name / f"{number:02}.png")
    for number in range(16):
        (folder / "after" / f"{number:02}.txt").write_text(f"zibo, red, number {number}", encoding="utf-8")
    return folder


def test_new_lists_all_wrong_options_at_once(ask: Callable, tmp_path: Path) -> None:
    absent = [tmp_path / "no1", tmp_path / "no2"]
    folders = ["--images", absent[0], "--images", absent[1]]
    code, _, err = ask("new", tmp_path / "x.toml", *folders, "--card", 10, "--goal", "foo", "--base", "no.safetensors")
    assert code == 2 and err.startswith("new: 5 problems\n") and not (tmp_path / "x.toml").exists()
    assert all(f"folder {path} does not exist" in err for path in absent)
    assert all(
        text in err
        for text in ("--card 10", "--goal foo: there is no such goal for a recipe", "'no.safetensors' does not exist")
    )
    code, _, err = ask("recipes", "sdxl", *folders, "--card", 10)
    assert code == 2 and err.startswith("recipes: 3 problems\n")


@pytest.mark.parametrize("family", FAMILIES)
def test_new_is_short_and_checks_clean_for_every_family(
    family: str,
    tiny: Callable[[str], Path],
    images: Path,
    ask: Callable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    edits = ["--controls", images / "before"] if families.get(family).controls[0] else []
    code, out, err = ask("new", "角色 一.toml", "--family", family, "--images", images / "after", "--card", 24, *edits)
    assert (code, err) == (0, "") and "16 images (captions are tags)" in out
    text = Path("角色 一.toml").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 50 and max(map(len, text.splitlines())) <= 160
    written = tomlkit.parse(text)
    keys = [key for name, part in written.items() for key in (part if isinstance(part, dict) else (name,))]
    for key in {*keys, *(key for folder in written["dataset"]["folders"] for key in folder)} - {"folders"}:
        assert re.search(rf"^(# [^\n]+\n{key} = [^\n]+|{key} = [^\n]+  # [^\n]+)$", text, re.MULTILINE), key
    job = config.load("角色 一.toml")
    assert job.name == "角色 一" and job.model.path == families.get(family).example_base
    assert job.validation.pictures == 2 and job.preview.prompts and job.preview.every
    assert len(job.preview.controls) == (2 if edits else 0)
    result = check(config.load("角色 一.toml", [f"model.path={tiny(family)}", "dataset.resolution=64"]))
    assert result.problems == []
    assert not [line for line in result.warnings if "no effect" in line or "sentences" in line], result.warnings


def test_new_without_images_has_a_placeholder_and_says_what_it_assumed(ask: Callable, tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    code, out, _ = ask("new", path, "--trigger", "zibo", "--goal", "style", "--family", "flux", "--card", 16)
    job = config.load(path)
    assert code == 0 and (job.name, job.preset) == ("my", ["style", "vram_16gb"]) and job.train.steps == 2000
    assert job.dataset.trigger == "zibo" and all("zibo" in prompt for prompt in job.preview.prompts)
    assert "2000 steps: For 100 images" in out and job.dataset.folders[0].path == "my_pictures"
    code, out, _ = ask("new", path, "--force", "--base", "demo", "--trigger", "zibo")
    job = config.load(path)
    assert code == 0 and job.preset == ["character", "demo_sd15"] and job.train.batch_size == 6


def test_new_adds_toml_and_names_the_file_that_it_wrote(
    ask: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    for given, written in {"character": "character.toml", "sub": "sub.toml", "角色 v1.5": "角色 v1.5.toml"}.items():
        code, out, err = ask("new", given, "--base", "demo")
        assert (code, err) == (0, "") and f"{written} written; " in out and not Path(given).is_file()
        assert config.load(written).name == given
    assert ask("new", "character", "--base", "demo")[0] == 2, "it exists"
    (tmp_path / "notes.txt").touch()
    assert ask("new", "notes.txt", "--base", "demo")[0] == 2, "of another kind, perhaps by mistake"
    assert ask("new", "..", "--base", "demo")[0] == 2 and not (tmp_path / "...toml").exists()


def test_new_refuses_what_cannot_be(ask: Callable, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    wrong = {
        (
            "--goal",
            "edit",
            "--family",
            "sdxl",
        ): "--goal edit: there is no such goal for Stable Diffusion XL; accepted: character | style |",
        ("--goal", "character", "--family", "qwen_image_edit"): "accepted: edit",
        ("--card", "10"): "--card 10: there is no recipe for this size; accepted: 8 | 12 | 16 | 24 | 48 | 80 GB",
        ("--images", str(tmp_path / "none")): "does not exist",
        ("--base", str(ROOT / "README.md")): "README.md",
    }
    for arguments, message in wrong.items():
        code, out, err = ask("new", path, *arguments)
        assert code == 2 and message in err and not out and not path.exists(), (arguments, err)


def test_recipes_explains_each_value(ask: Callable, images: Path) -> None:
    code, out, _ = ask("recipes")
    assert code == 0 and all(f"  {family} " in out for family in FAMILIES)
    listed = json.loads(ask("recipes", "--json")[1])["recipes"]
    assert [row["family"] for row in listed] == FAMILIES and set(listed[0]["cards"]) == set(map(str, recipes.CARDS))
    code, out, _ = ask("recipes", "flux", "--goal", "character", "--card", "16")
    assert code == 0 and "memory.offload = 0.25: " in out and 'preset = ["character", "vram_16gb"]' in out
    found = json.loads(
        ask("recipes", "flux", "--goal", "style", "--card", "24", "--images", images / "after", "--json")[1]
    )
    rows = {row["key"]: row for row in found["settings"]}
    assert found["fits"] and rows["train.steps"]["value"] == 800 and rows["dataset.shuffle_tags"]["value"] is True
    assert found["peak_mib"] < found["usable_mib"] < 24 * 1024
    assert ask("recipes", "fluks")[0] == 2 and ask("recipes", "sdxl", "--goal", "edit")[0] == 2


def test_the_list_of_recipes_heeds_goal_and_card(ask: Callable) -> None:
    rows = {row["family"]: row for row in json.loads(ask("recipes", "--json")[1])["recipes"]}
    small = json.loads(ask("recipes", "--goal", "edit", "--card", "8", "--json")[1])["recipes"]
    assert [row["family"] for row in small] == [
        name for name, row in rows.items() if "edit" in row["goals"] and row["cards"]["8"]["fits"]
    ]
    assert 0 < len(small) < sum("edit" in row["goals"] for row in rows.values())
    code, out, err = ask("recipes", "--goal", "x", "--card", "7", "--images", "pictures")
    assert code == 2 and not out and err.startswith("recipes: 3 problems\n")
    assert (
        "--goal x: there is no such goal for a recipe; accepted: character | style" in err
        and "--card 7: " in err
        and "--images: " in err
    )
    assert ask("recipes", "sdxl", "--goal", "x")[2].startswith("recipes: 1 problem\n")


# ---------------------------------------------------------------------------------------------------------- questions


class Terminal:
    """`lora-fp8 new` in a terminal of its own."""

    def __init__(self, folder: Path):
        self.own, theirs = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "COLUMNS": "200", "LANG": "C.UTF-8"}
        command = [sys.executable, "-m", "lora_fp8", "new"]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True
        )
        os.close(theirs)
        self.seen = ""

    def wait(self, text: str) -> str:
        """Read until this text; return what came before it."""
        deadline = time.monotonic() + LONG_SECONDS
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen!r}"
            if select.select([self.own], [], [], 1)[0]:
                try:
                    self.seen += os.read(self.own, 4096).decode()
                except OSError:  # the process has ended
                    assert text in self.seen, self.seen
        before, _, self.seen = self.seen.partition(text)
        return before

    def answer(self, question: str, text: str) -> str:
        before = self.wait(question)
        os.write(self.own, f"{text}\n".encode())
        return before


def test_new_asks_in_a_terminal_shows_the_plan_and_offers_to_start(images: Path, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    try:
        offered = terminal.answer("Number or name [character]:", "nonsense")
        assert "What do you want to train?" in offered and "edit" in offered
        assert "nonsense: this is neither a number from 1 to 5" in terminal.answer("Number or name [character]:", "2")
        offered = terminal.answer("Number or name [sdxl]:", "flux")
        assert "FLUX.1" in offered and "Qwen-Image-Edit" not in offered, "families that cannot learn a style"
        terminal.answer("Its Hugging Face id, folder or file [black-forest-labs/FLUX.1-dev]:", "")
        assert "80 GB" in terminal.answer("Number or name [24]:", "16")
        terminal.answer("Folder with the images:", "not here")
        assert "folder not here does not exist" in terminal.answer("Folder with the images:", str(images / "after"))
        assert "16 images" in terminal.answer(
            "Trigger word that the base model does not know yet (Enter: none) []:", "zibo"
        )
        terminal.answer("Config file to write [my-lora.toml]:", "画风")
        plan = terminal.answer("Start the training now? [y/N]:", "n")
        assert "800 steps: 14 images x 40 times / 2 a step = 280" in plan and "FLUX.1 on 16 GB: " in plan
        terminal.wait("Later: lora-fp8 check")
        assert terminal.process.wait(timeout=LONG_SECONDS) == 0
    finally:
        terminal.process.kill()
        os.close(terminal.own)
    job = config.load(tmp_path / "画风.toml")
    assert (job.name, job.preset, job.model.family) == ("画风", ["style", "vram_16gb"], "flux")
    assert job.dataset.trigger == "zibo" and job.dataset.folders[0].path == str(images / "after")


def test_new_asks_nothing_where_nobody_can_answer(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lora_fp8", "new"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=LONG_SECONDS,
    )
    assert done.returncode == 2 and done.stdout == "" and "lora-fp8 new my.toml" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("gib", "card"), [([], 24), ([5.9], 8), ([7.99], 8), ([23.99], 24), ([31.8], 24), ([8, 79.6], 80), ([15.7], 16)]
)
def test_the_card_of_this_machine(gib: list[float], card: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_fp8.cli import new
    from lora_fp8.common import gpu

    monkeypatch.setattr(gpu, "read_gpus", lambda: [gpu.Gpu("NVIDIA", total=int(size * GIB)) for size in gib])
    assert new.detect_card() == card
