"""Sentences are not shuffled in silence: captions as people and taggers write them."""

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import tomlkit
from PIL import Image

from lora_fp8 import settings
from lora_fp8.cli import app
from lora_fp8.data import images
from lora_fp8.data.caption_style import looks_like_sentences, warn_of_sentences

TAGS = [
    "1girl, solo, long hair, looking at viewer, smile, red dress, simple background, holding flower, outdoors",
    "mychar, 1boy, short hair, arms behind back, school uniform, blue eyes, upper body, cowboy shot",
    "score_9, score_8_up, score_7_up, source_anime, 1girl, hatsune miku \\(vocaloid\\), twintails, detached sleeves",
    "masterpiece, best quality, newest, very aesthetic, absurdres, scenery, no humans, mountain, sky, cloud",
    "safe, anthro, canine, solo, looking back over shoulder, mr. fox, sitting, forest, 2020",
    "一个女孩, 长发, 蓝眼睛, 白色连衣裙, 看着观众, 户外",
    "zwx woman, photo, close-up, studio lighting",
]
SENTENCES = [
    "A woman in a red dress stands by a tall window, holding a cup of tea, while soft light falls from the left.",
    "mychar, a photograph of a man with short grey hair sitting at a wooden desk in a dim office",
    "The image shows a small dog. It has brown fur, a blue collar and floppy ears. The mood is calm.",
    "1girl, solo, long hair. A girl stands in a field of flowers, looking up at the evening sky.",
    "一位穿红裙的女子站在高大的窗边,手里端着一杯热茶,柔和的光线从左侧照进来。",
    "Replace the red car with a white horse, and keep the background and the light unchanged.",
    "In this watercolour painting, a lighthouse stands on a cliff above the stormy sea, lit by a low sun",
]
ONE_PART = ["zwx", "cat", "a photo of zwx woman standing in the rain", "一位穿红裙的女子站在窗边，手里端着茶。", ""]


@pytest.mark.parametrize("caption", TAGS)
def test_tags_are_tags(caption: str) -> None:
    assert not looks_like_sentences(caption)


@pytest.mark.parametrize("caption", SENTENCES)
def test_sentences_are_sentences(caption: str) -> None:
    assert looks_like_sentences(caption)


@pytest.mark.parametrize("caption", ONE_PART)
def test_a_caption_of_one_part_cannot_be_shuffled(caption: str) -> None:
    assert not looks_like_sentences(caption)


def test_the_warning_counts_and_names_an_example() -> None:
    shuffled, dropped = settings.Dataset(shuffle_tags=True), settings.Dataset(tag_dropout=0.2)
    (line,) = warn_of_sentences([*TAGS, *SENTENCES, *ONE_PART], shuffled)
    assert line.startswith("dataset.shuffle_tags: 7 of 19 captions look like sentences")
    assert "'A woman in a red dress" in line and line.endswith("Set it to false") and len(line) < 250
    (line,) = warn_of_sentences(SENTENCES, dropped)
    assert line.startswith("dataset.tag_dropout: 7 of 7") and line.endswith("Set it to 0")
    assert warn_of_sentences(SENTENCES, settings.Dataset()) == []
    assert warn_of_sentences(TAGS * 10 + SENTENCES[:1], shuffled) == [], "a single one among many tags is an odd tag"
    assert warn_of_sentences([], shuffled) == warn_of_sentences(ONE_PART, shuffled) == []
    assert warn_of_sentences([SENTENCES[0].replace(",", ";")], settings.Dataset(shuffle_tags=True, tag_separator=";"))


def test_scan_warns(tmp_path: Path) -> None:
    """What check prints and a run logs: the captions that lie on the disk, whatever the family."""
    for number, caption in enumerate(SENTENCES[:3]):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text(caption, encoding="utf-8")
    section = settings.Dataset(folders=[settings.Folder(path=str(tmp_path))], resolution=64, shuffle_tags=True)
    assert [line for line in images.scan(section).warnings if "look like sentences" in line]
    plain = section.model_copy(update={"shuffle_tags": False})
    assert not [line for line in images.scan(plain).warnings if "look like sentences" in line]


def test_check_estimate_and_the_doctor_say_the_same(
    tiny: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One function decides, and each program shows what it found: 3 of 5 captions, and none with the setting off."""
    folder, config_file = tmp_path / "set", tmp_path / "job.toml"
    folder.mkdir()
    for number, caption in enumerate([*SENTENCES[:3], *TAGS[:2]]):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(caption, encoding="utf-8")
    written = {
        "name": "x",
        "output_dir": str(tmp_path / "runs"),
        "model": {"family": "sd15", "path": str(tiny("sd15"))},
        "dataset": {"resolution": 64, "cache_dir": str(tmp_path / "cache"), "folders": [{"path": str(folder)}]},
    }
    config_file.write_text(tomlkit.dumps(written), encoding="utf-8")
    told = {}
    for shuffled in ("true", "false"):
        for command in (["check"], ["estimate"], ["dataset", "look"]):
            setting = f"dataset.shuffle_tags={shuffled}"
            with contextlib.suppress(SystemExit):
                app([*command, str(config_file), "--set", setting], standalone_mode=False)
            told[command[-1], shuffled] = capsys.readouterr().out
    line = "dataset.shuffle_tags: 3 of 5 captions look like sentences"
    assert line in told["check", "true"] and line in told["estimate", "true"]
    assert "warning, 3:" in told["look", "true"] and "looks like sentences" in told["look", "true"]
    assert all("like sentences" not in told[command, "false"] for command in ("check", "estimate", "look"))
