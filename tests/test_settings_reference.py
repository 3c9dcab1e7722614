"""docs/settings.md is what the declarations say, and the names of other trainers are names that their files have."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from lora_fp8 import config, importing
from lora_fp8.config.validation import list_foreign_names
from lora_fp8.errors import UserErrors
from webui import form, translations

ROOT = Path(__file__).resolve().parent.parent
TRAINERS = {
    "kohya": ("sd-scripts", "kohya_ss", "lora-scripts", "musubi-tuner"),
    "ai-toolkit": ("ai-toolkit",),
    "OneTrainer": ("onetrainer",),
    "SimpleTuner": ("simpletuner",),
    "diffusion-pipe": ("diffusion-pipe",),
}
LEAST = 'model = {family = "sd15", path = "demo"}\ndataset = {folders = [{path = "p"}]}\n'


def settings() -> dict[str, form.Setting]:
    """Every setting by its key, those of folders too."""
    found = dict(form.collect_settings())
    for one in form.collect_settings().values():
        found |= {column.key: column for column in one.columns}
    return found


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts/write_settings_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_the_files_are_what_the_script_writes(script: ModuleType, language: str) -> None:
    written = script.FILES[language].read_text(encoding="utf-8")
    assert written == script.render_reference(language), "run python scripts/write_settings_reference.py"
    for key, one in settings().items():
        (row,) = re.findall(rf"^\| `{one.name}` \|.*$", section_of(written, language, key), re.MULTILINE)
        assert all(f"`{name}`" in row for names in one.also.values() for name in names.split(", ")), key
        assert all(limit in row.replace("\\|", "|") for limit in one.bounds.split(", ") if one.bounds), key


def section_of(text: str, language: str, key: str) -> str:
    section = key.rpartition(".")[0]
    title = translations.load_setting_texts()[f"section.{section}" if section else "section"][language]
    heads = (title, f"{title} `[{section}]`", f"{title} `[[{section}]]`")
    return next(part for part in text.split("\n## ") if part.partition("\n")[0] in heads)


def test_names_of_other_trainers_are_in_their_files_and_mean_the_same() -> None:
    """Against the tables of `importing`, made from the trainers' own sources."""
    count = 0
    for key, one in settings().items():
        for trainer, names in one.also.items():
            rules = [importing.TOOLS[tool].rules for tool in TRAINERS[trainer]]
            for name in names.split(", "):
                name = name.split(" ")[0]
                found = [rule for table in rules for theirs, rule in table.items() if theirs.split(".")[-1] == name]
                assert found, f"{key}: no key {name} in the files of {trainer}"
                ours = {rule.to for rule in found if rule.to}
                plain = "dataset.folders" not in key  # folders are converted together
                assert not ours or key in ours or not plain, f"{key}: {trainer}'s {name} becomes {ours}"
                count += 1
    assert count > 130


def test_whatever_is_converted_by_itself_is_answered_by_its_name() -> None:
    for trainer, tools in TRAINERS.items():
        for tool in tools:
            for theirs, rule in importing.TOOLS[tool].rules.items():
                name = theirs.split(".")[-1]
                if rule.to and name != rule.to.split(".")[-1]:
                    assert trainer in list_foreign_names()[name][rule.to], (tool, theirs, rule.to)


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("adapter.network_dim=8", "adapter.rank (kohya: network_dim)"),
        ("network_alpha=8", "adapter.alpha (kohya: network_alpha)"),
        ("optimizer.learning_rate=1e-4", "optimizer.lr (kohya, OneTrainer, SimpleTuner: learning_rate)"),
        ("objective.min_timestep=200", "objective.t_min (kohya: min_timestep / 1000)"),
        ("train.max_train_epochs=3", "train.steps (kohya: max_train_epochs * steps_per_epoch)"),
        ("adapter.linear=8", "adapter.rank (ai-toolkit: linear)"),
        (
            "preview.guidance_scale=3",
            "objective.guidance (kohya: guidance_scale), preview.guidance (ai-toolkit: guidance_scale)",
        ),
        (
            "dataset.folders.0.num_repeats=3",
            "dataset.folders.repeats (kohya, ai-toolkit, diffusion-pipe: num_repeats)",
        ),
    ],
)
def test_a_name_of_another_trainer_is_answered_with_ours(override: str, ours: str) -> None:
    with pytest.raises(UserErrors) as caught:
        config.loads(LEAST, [override])
    (line,) = caught.value.problems
    key = override.split("=")[0]
    assert line == f"{key}: unknown setting; use {ours} (from --set)"
    assert translations.translate("zh-CN", line) == f"{key}：没有这个设置；请改用 {ours}（来自 --set）"
