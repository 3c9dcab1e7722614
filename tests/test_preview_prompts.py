"""Options at the end of preview prompts: each prompt is drawn with its own size, seed, steps, guidance and negative.

Judged by: diffusers' own pipelines, called with these values; kohya's rules for its prompt files.
"""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from lora_fp8 import config, importing, train
from lora_fp8.config import dataset_recipe
from lora_fp8.errors import UserError, UserErrors
from lora_fp8.settings import Preview, has_options, read_options, split_preview
from lora_fp8.settings.preview_prompts import neutralize_options
from lora_fp8.stages import previews
from lora_fp8.tools import draw_sources, kit

DRAWN = ("train.steps=1", "preview.steps=2", "preview.width=64", "preview.height=64", "preview.at_start=false")


@pytest.mark.parametrize(
    ("line", "text", "values"),
    [
        ("a cat", "a cat", {}),
        (" two  spaces ", " two  spaces ", {}),
        ("a well-known -- dash --", "a well-known -- dash --", {}),
        ("a cat --w 512 --h 768", "a cat", {"width": 512, "height": 768}),
        ("a cat --d 7 --s 30 --l 7.5", "a cat", {"seed": 7, "steps": 30, "guidance": 7.5}),
        (
            "a cat --g 4 --n blurry, low-quality --d 0",
            "a cat",
            {"guidance": 4, "negative": "blurry, low-quality", "seed": 0},
        ),
        ("a cat\n--n", "a cat", {"negative": ""}),
        ("--w 64", "", {"width": 64}),
        ("a cat --w wide", "a cat", {"width": "wide"}),
        ("a cat --w ６４ --h 6_4 --g nan", "a cat", {"width": "６４", "height": "6_4", "guidance": "nan"}),
        ("a cat --l .5 --d -1", "a cat", {"guidance": 0.5, "seed": -1}),
    ],
)
def test_options_of_a_prompt(line: str, text: str, values: dict) -> None:
    assert read_options(line) == (text, values)


def test_each_prompt_has_a_table_of_its_own() -> None:
    section = Preview(
        prompts=["a", "b --d 3 --w 128", "c --n bad --g 2", "d"], seed=10, negative="blurry", controls=list("1234")
    )
    tables = split_preview(section)
    assert [table.prompts for table in tables] == [["a"], ["b"], ["c"], ["d"]]
    assert [table.seed for table in tables] == [10, 3, 12, 13]  # those without one count on as before
    assert [table.width for table in tables] == [0, 128, 0, 0]
    assert [table.negative for table in tables] == ["blurry", "blurry", "bad", "blurry"]
    assert [table.guidance for table in tables] == ["auto", "auto", 2.0, "auto"]
    assert [table.controls for table in tables] == [["1"], ["2"], ["3"], ["4"]]
    assert [split_preview(table)[0] for table in tables] == tables


def test_options_that_cannot_be_used_are_refused_all_at_once(job: Callable) -> None:
    prompts = [
        "fine --w 512",
        "a --w 100 --s 0 --d x",
        "b --ar 16:9",
        "c --d 1 --d 2",
        "d --w",
        "e --g hot",
        "f --l 2 --g 3",
    ]
    with pytest.raises(UserErrors) as caught:
        job(f"preview.prompts={json.dumps(prompts)}")
    lines = [line for line in caught.value.problems if line.startswith("preview.prompts.")]
    assert [line.split(":")[0] for line in lines] == [f"preview.prompts.{i}" for i in (1, 1, 1, 2, 3, 4, 5, 6)]
    for part in (
        "width must be 0 to 8192, and a multiple of 16, got 100",
        "steps must be",
        "seed expected a whole number",
    ):
        assert any(part in line for line in lines), (part, lines)
    assert "a prompt has no option --ar; the options are: --n, --w, --h, --d, --s, --g, --l" in lines[3]
    assert "seed is given twice" in lines[4] and "--w needs a value" in lines[5] and "auto | a number" in lines[6]


def test_options_of_one_prompt_are_refused_all_at_once(job: Callable) -> None:
    with pytest.raises(UserErrors) as caught:
        job(f"preview.prompts={json.dumps(['a cat --w 65 --s 0 --q 3 --d 1 --d 2'])}")
    lines = [line for line in caught.value.problems if line.startswith("preview.prompts.0")]
    parts = ("width must be", "steps must be", "a prompt has no option --q", "seed is given twice")
    assert len(lines) == 4 and all(any(part in line for line in lines) for part in parts)
    with pytest.raises(UserError, match="a prompt has no option --q.*; --d: seed is given twice"):
        read_options("a cat --q 3 --d 1 --d 2")


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--w=64", "--w 64"),
        ("--n: x", "--n;"),
        ("--W 64", "--w;"),
        ("--ｗ 64", "--w;"),
        ("--d＝7", "--d 7"),
        ("--neg-prompt x", ""),
        ("--w64", ""),
        ("--width=64", ""),
    ],
)
def test_a_misspelt_option_is_refused_and_not_drawn_as_text(job: Callable, option: str, meant: str) -> None:
    with pytest.raises(UserErrors) as caught:
        job(f"preview.prompts={json.dumps(['a cat', f'a cat {option}'])}")
    (line,) = [line for line in caught.value.problems if line.startswith("preview.prompts.1")]
    assert f"a prompt has no option {option.split()[0]}" in line and ("Write " in line) == bool(meant)
    assert not meant or f"Write {meant}" in line
    assert not has_options(neutralize_options(f"a cat {option}"))


@pytest.mark.parametrize("value", ["６４", "6_4", "0x40", "64 px", "1e2", "8", "-16"])
def test_a_size_has_the_bounds_of_its_setting(job: Callable, value: str) -> None:
    with pytest.raises(UserErrors):
        job(f"preview.prompts={json.dumps([f'a cat --w {value}'])}")


def test_an_option_without_effect_is_told(job: Callable) -> None:
    quiet = config.find_unused_settings(job("model.family='flux'", "preview.prompts=['a']"))
    told = config.find_unused_settings(job("model.family='flux'", "preview.prompts=['a --n blurry']"))
    assert [line for line in told if line not in quiet and "preview.negative" in line]


OPTIONS = "--w 96 --h 48 --d 5 --s 3 --g 2.5 --n blurry"
SETTINGS = (
    *("preview.width=96", "preview.height=48", "preview.seed=5", "preview.steps=3", "preview.guidance=2.5"),
    "preview.negative='blurry'",
)


def test_previews_are_those_of_the_settings(job: Callable, tmp_path: Path) -> None:
    """A prompt with options is drawn as with these settings for all; its neighbours are as without it."""
    given = (*DRAWN, "preview.guidance=4.0", "checkpoint.every=1")
    prompts = ["a dog", f"a red dog {OPTIONS}", "a dog"]
    run = train.run(job("name='a'", *given, f"preview.prompts={json.dumps(prompts)}"), progress=False).run
    others = {
        "b": [*given, *SETTINGS, "preview.prompts=['a red dog']"],
        "c": [*given, "preview.prompts=['a dog', 'x', 'a dog']"],
    }
    alone, plain = (
        train.run(job(f"name='{name}'", *overrides), progress=False).run for name, overrides in others.items()
    )
    drawn = [previews.get_path(run.samples, 1, number) for number in range(3)]
    assert drawn[1].read_bytes() == previews.get_path(alone.samples, 1, 0).read_bytes()
    for number in (0, 2):
        assert drawn[number].read_bytes() == previews.get_path(plain.samples, 1, number).read_bytes()
    assert [Image.open(path).size for path in drawn] == [(64, 64), (96, 48), (64, 64)]
    (event,) = [event for event in run.read_events() if event["event"] == "preview"]
    assert event["prompts"] == prompts  # two of one text are told apart by their options

    # What is published with an image is what it was drawn with.
    _, _, pictures = kit.collect_from_run(run.path)
    seed = Preview().seed
    assert [(image.prompt, image.negative, image.seed, image.steps, image.guidance) for image in pictures] == [
        ("a dog", "", seed, 2, 4.0),
        ("a red dog", "blurry", 5, 3, 2.5),
        ("a dog", "", seed + 2, 2, 4.0),
    ]


def test_the_contact_sheet_holds_images_of_several_sizes() -> None:
    images = [Image.new("RGB", (20, 60), "red"), Image.new("RGB", (90, 10), "blue")]
    sheet = previews.draw_contact_sheet({"base": images, "LoRA": images[::-1]}, ["a", "b"])
    colours = dict((colour, count) for count, colour in sheet.getcolors(1 << 20))
    assert colours[255, 0, 0] == 2 * 20 * 60 and colours[0, 0, 255] == 2 * 90 * 10


def test_a_drawing_begins_with_the_first_prompt_and_what_is_given_counts(job: Callable, tmp_path: Path) -> None:
    wanted = job("train.steps=1", f"preview.prompts=['a dog {OPTIONS}', 'x']", "preview.every=0")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(config.dumps(wanted), encoding="utf-8")
    preview = draw_sources.load_job([tmp_path / "run"], "", "", ["preview.seed=9"]).preview
    assert preview.prompts == ["a dog"] and preview.seed == 9
    assert (preview.width, preview.height, preview.steps, preview.guidance) == (96, 48, 3, 2.5)


def test_kohyas_prompt_file_keeps_what_each_prompt_has(tmp_path: Path) -> None:
    lines = ["# previews", "a cat --w 832 --h 1216 --d 1 --l 5 --n blurry", "a dog --w 1200 --h 832 --d 1 --s 9 --l 5"]
    (tmp_path / "prompts.txt").write_text("\n".join(lines), encoding="utf-8")
    text = (
        'pretrained_model_name_or_path = "stabilityai/stable-diffusion-xl-base-1.0"\nsample_prompts = "prompts.txt"\n'
    )
    (tmp_path / "kohya.toml").write_text(text + 'network_module = "networks.lora"\n', encoding="utf-8")
    preview = tomllib.loads(importing.to_toml(importing.import_file(tmp_path / "kohya.toml")))["preview"]
    assert preview["guidance"] == 5.0
    assert preview["prompts"] == [
        "a cat --n blurry --w 832 --h 1216 --d 1",
        "a dog --w 1200 --h 832 --d 1 --s 9",
    ]
    assert [table.seed for table in split_preview(Preview(**preview))] == [1, 1]


def test_captions_that_look_like_options_are_not_proposed(tmp_path: Path) -> None:
    """Captions of Midjourney's images end with its own options, which are none here."""
    for name, caption in {"a": "a cat --ar 16:9", "b": "a dog", "c": "a bird --v 6"}.items():
        Image.new("RGB", (64, 64)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(caption, encoding="utf-8")
    pictures = dataset_recipe.scan_folders([(tmp_path, 1)])
    assert dataset_recipe.propose_prompts("style", "flux", pictures, "") == ["a dog"]
    assert dataset_recipe.propose_prompts("style", "flux", pictures, "a --w") == []
    assert dataset_recipe.find_pairs(tmp_path, tmp_path) == [("a dog", tmp_path / "b.png")]
