"""The strict way from TOML to a Job: every mistake is told, all at once, a readable line each, never a traceback.

The authority for what a file says is `tomllib`; for what is accepted, the declarations in settings.py themselves, which
are walked here, so that a new setting is covered on the day that it is added.
"""

import copy
import math
import random
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import tomlkit
from pydantic_core import PydanticUndefined

from lora_fp8 import config, errors, families
from lora_fp8.errors import UserError, UserErrors
from lora_fp8.settings import Adapter, Job, Section
from webui import translations

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = sorted(ROOT.glob("configs/*.toml")) + sorted(ROOT.glob("presets/*.toml"))
LEAST = 'model = {family = "sd15", path = "demo"}\ndataset = {folders = [{path = "pictures"}]}\n'
DIGITS = 4300  # what Python turns into a number without being asked twice


def problems(text: str, *overrides: str, **options: Any) -> list[str]:
    """The lines that loading this text gives; [] when it loads."""
    try:
        config.loads(text, overrides, **options)
    except UserErrors as error:
        assert str(error).splitlines()[1:] == [f"  {line}" for line in error.problems]
        return error.problems
    except UserError as error:
        return [str(error)]
    return []


def settings(model: type[Section] = Job, where: str = "") -> Iterator[tuple[str, Any]]:
    """Every ("section.name", field) that can be set."""
    for name, field in model.model_fields.items():
        inner = [a for a in (field.annotation, *get_args(field.annotation)) if isinstance(a, type)]
        sections = [a for a in inner if issubclass(a, Section)]
        key = f"{where}{name}"
        if sections:
            yield from settings(sections[0], f"{key}.0." if get_origin(field.annotation) is list else f"{key}.")
        else:
            yield key, field


SETTINGS = dict(settings())


def leaves(annotation: Any) -> list[Any]:
    """The plain types and literals of an annotation."""
    if get_origin(annotation) in (None, Literal):
        return [annotation]
    if get_origin(annotation) in (list, dict):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return leaves(get_args(annotation)[0])
    return [leaf for argument in get_args(annotation) for leaf in leaves(argument)]


def ranges(field: Any) -> list[tuple[type, dict[str, Any]]]:
    """The types of number that a field accepts, each with its bounds, such as (float, {"gt": 0})."""
    arms = (
        [field.annotation]
        if field.metadata or get_origin(field.annotation) is dict
        else list(get_args(field.annotation) or [field.annotation])
    )
    found = []
    for arm in arms:
        kind, info = get_args(arm)[:2] if get_origin(arm) is Annotated else (arm, field)
        if kind in (int, float):
            names = ("ge", "gt", "le", "lt", "multiple_of")
            found.append((kind, {n: getattr(m, n) for m in info.metadata for n in names if hasattr(m, n)}))
    return found


# ------------------------------------------------------------------------------------------------ all mistakes at once


EIGHT = """
preset = ["charactr"]
[model]
family = "sdx1"
path = "demo"
[adaptor]
rank = 8
[adapter]
rnak = 8
[dataset]
missing_caption = "trigger"
[[dataset.folders]]
path = "pictures"
[train]
steps = "500"
[optimizer]
name = "adamw8bits"
lr = 30.0
"""


def test_eight_mistakes_are_eight_lines() -> None:
    found = problems(EIGHT, where="job.toml")
    expected = {
        "adapter.rnak": "unknown setting, did you mean adapter.rank?",
        "adaptor": "unknown setting, did you mean adapter?",
        "train.steps": "expected a whole number, got '500'",
        "optimizer.name": "| muon | ademamix8bit, got 'adamw8bits', did you mean 'adamw8bit'?",
        "optimizer.lr": "must be above 0 and at most 10, got 30",
        "preset": "no preset 'charactr', did you mean 'character'?",
        "model.family": "unknown architecture 'sdx1', did you mean 'sdxl'?",
        "dataset.missing_caption": "'trigger' needs dataset.trigger or a trigger in every folder",
    }
    assert len(found) == 8, found
    for key, text in expected.items():
        assert [line for line in found if line.startswith(f"{key}: ") and text in line], (key, found)


def test_the_message_names_the_file_and_counts(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(EIGHT, encoding="utf-8")
    with pytest.raises(UserErrors) as caught:
        config.load(path)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{path}: 8 problems" and len(lines) == 8 and all(line.startswith("  ") for line in lines)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[adapter]\nsteps = 5", "adapter.steps: unknown setting, did you mean train.steps?"),
        ("[train]\nlearning_rate = 1e-4", "train.learning_rate: unknown setting; use optimizer.lr (kohya"),
        ("[train]\nseed = 1", "train.seed: unknown setting here; move `seed` before the first [section]"),
        ("[adapter]\nname = 'a'", "adapter.name: unknown setting here; move `name` before the first [section]"),
        ("[adapter]\nstep = 5", "adapter.step: unknown setting, did you mean train.steps?"),
        ("rank = 4", "rank: unknown setting, did you mean adapter.rank?"),
        ("train = 5", "train: expected a table, got 5"),
        ("[quantize]\nkeep = 'norm'", "quantize.keep: expected a list in [ ], got 'norm'"),
        ("[quantize]\nkeep = [1]", "quantize.keep.0: expected text in quotes, got 1"),
        ("[export]\nformats = 'kohya'", "export.formats: expected a list in [ ], got 'kohya'"),
        ("[export]\nformats = ['komfy']", "export.formats.0: expected auto | diffusers | comfy | kohya, got 'komfy'"),
        ("[export]\nformats = []", "export.formats: the list is empty"),
        (
            "[export]\nformats = ['auto', 'kohya']",
            "export.formats: auto chooses the layouts itself and cannot be combined",
        ),
        ("[export]\nformats = ['kohya', 'kohya']", "export.formats: a layout is listed twice"),
        ("[memory]\ngradient_checkpointing = 1", "memory.gradient_checkpointing: expected auto | true | false, got 1"),
        ("[adapter]\nrank = 0", "adapter.rank: must be at least 1 and at most 1024, got 0"),
        ("[adapter]\nranks = {attn = -1}", "adapter.ranks.attn: must be at least 0 and at most 1024, got -1"),
        ("[optimizer]\nlrs = {attn = 0}", "optimizer.lrs.attn: must be above 0 and at most 100, got 0"),
        ("[optimizer]\nlrs = ['attn']", "optimizer.lrs.attn: expected a number, got ''"),
        ("[optimizer]\nlrs = ['attn = 1e9']", "optimizer.lrs.attn: must be above 0 and at most 100, got 1000000000.0"),
        ("[optimizer]\nname = 'prodigy'\nlrs = {attn = 2}", "optimizer.lrs: 'prodigy' finds one learning rate"),
        ("[optimizer]\nname = 'prodigy'\nloraplus_lr_ratio = 2.0", "optimizer.loraplus_lr_ratio: 'prodigy' finds"),
        (
            "[optimizer]\nloraplus_lr_ratio = 2.0\n[adapter]\ntype = 'lokr'",
            "loraplus_lr_ratio: LoRA+ needs the two matrices",
        ),
        ("[optimizer]\ngrowth_rate = 1.0", "optimizer.growth_rate: must be above 1 and at most 1000, got 1"),
        ("[adapter]\nranks = ['attn 4']", "adapter.ranks.attn 4: expected a whole number, got ''"),
        ("[adapter]\nranks = {attn = 1.5}", "adapter.ranks.attn: expected a whole number, got 1.5"),
        ("[adapter]\nranks = 4", "adapter.ranks: expected a table, got 4"),
        ("[adapter]\nranks = [4]", "adapter.ranks: expected a table, got [4]"),
        ("[quantize]\noverride = {a = 'fp8 5x5'}", "quantize.override.a: expected bf16 | fp8 | fp8 row | fp8 tensor"),
        ("[quantize]\noverride = {a = 8}", "quantize.override.a: expected bf16 | fp8 | fp8 row | fp8 tensor"),
        ("[optimizer]\nname = 'prodigy'\nlr = 1e-4", "optimizer.lr: 0.0001 would train almost nothing"),
        ("[optimizer]\nname = 'prodigy'\ntext_encoder_lr = 1e-4", "optimizer.text_encoder_lr: 'prodigy' finds one"),
        ("[optimizer]\nlr = 1.0", "optimizer.lr: must be below 1, got 1; values from 1 on are a factor"),
        ("[optimizer]\nbeta2 = 1.0", "optimizer.beta2: must be at least 0 and below 1, got 1"),
        ("[adapter]\nalpha = 0", "adapter.alpha: must be above 0, got 0"),
        ("[dataset2]", "dataset2: unknown setting, did you mean dataset?"),
        ("[optimizer]\nlr_scale = 'outo'", "optimizer.lr_scale: expected auto | none | a number, got 'outo', did you"),
        ("[optimizer]\nlr_scale = 0.0", "optimizer.lr_scale: must be above 0"),
        ("[optimizer]\nlr_scale = 200", "optimizer.lr_scale: must be above 0 and at most 100, got 200"),
        ("[objective]\nshift = 0", "objective.shift: must be above 0, got 0"),
        ("[preview]\nguidance = -1.0", "preview.guidance: must be at least 0, got -1"),
        ("[preview]\nwidth = 500", "preview.width: must be 0 to 8192, and a multiple of 16, got 500"),
        ("[schedule]\nwarmup = 1500", "schedule.warmup: the warm-up has 1500 steps, but train.steps is 1500"),
        ("[schedule]\nwarmup = 1.5", "of at least 0, or a fraction of at least 0 and below 1, got 1.5"),
        ("[checkpoint]\nkeep = 1", "checkpoint.keep: must be at least 2, got 1"),
        ("name = 'a/b'", "name: 'a/b' is not a valid folder name"),
        (f"name = '{'名' * 81}'", "name: too long for a folder name: 243 bytes, at most 240"),
        ("name = '..'", "name: '..' is not a valid folder name"),
        ('name = "a\\tb"', "is not a valid folder name"),
        ('output_dir = "a\\u0000b"', "output_dir: 'a\\x00b' is not a valid path"),
        ("preset = ['style', 'style']", "preset: a preset is listed twice"),
        ("preset = 'style'", "preset: expected a list in [ ], got 'style'"),
        ("preset = [3]", "preset.0: expected text in quotes, got 3"),
        ("seed = -1", "seed: must be at least 0 and at most 4294967295, got -1"),
        ("seed = 99999999999999999999", "must be at least 0 and at most 4294967295, got 99999999999999999999"),
    ],
)
def test_one_mistake_is_one_line(text: str, words: str) -> None:
    whole = LEAST + text
    found = problems(whole)
    assert len(found) == 1 and words in found[0], found


@pytest.mark.parametrize(
    ("family", "prediction", "problem"),
    [
        ("sdxl", "flow", "'flow': Stable Diffusion XL predicts epsilon or v; use 'auto'"),
        ("flux", "v", "'v': FLUX.1 is trained with flow matching; use 'auto'"),
        ("flux", "epsilon", "'epsilon': FLUX.1 is trained with flow matching; use 'auto'"),
        ("sdxl", "v", ""),
        ("flux", "flow", ""),
    ],
)
def test_a_prediction_that_the_family_cannot_have(family: str, prediction: str, problem: str) -> None:
    found = problems(LEAST.replace("sd15", family) + f"objective = {{prediction = '{prediction}'}}")
    assert found == ([f"objective.prediction: {problem}"] if problem else [])


def test_a_flow_has_no_huber_schedule_by_the_signal_to_noise_ratio() -> None:
    text = LEAST + "objective = {loss = 'huber', huber_schedule = 'snr'}"
    assert not problems(text)
    [found] = problems(text.replace("sd15", "flux"))
    assert found.startswith("objective.huber_schedule: 'snr' needs a diffusion model's signal-to-noise ratio")
    assert not problems(text.replace("sd15", "flux").replace("'huber'", "'mse'"))


def test_a_folder_for_regularization_needs_no_trigger() -> None:
    folders = "dataset.folders=[{path='p', trigger='zibo'}, {path='q', regularization=true}]"
    assert problems(LEAST, folders, "dataset.missing_caption=trigger") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[dataset]\nbackground = 'white'", "dataset.background: expected a colour such as #ffffff, got 'white'"),
        ("[dataset]\nresolution = '512'", "dataset.resolution: expected auto | a number, got '512'"),
        ("[dataset]\nresolution = 8", "dataset.resolution: must be at least 16 and at most 8192, got 8"),
        ("[dataset]\nbucket_step = 1", "dataset.bucket_step: must be at least 8 and at most 512, got 1"),
        ("[dataset]\ntag_separator = ''", "dataset.tag_separator: must be at least 1 characters long, got ''"),
        ("[dataset]\ncaption_dropout = 1.01", "dataset.caption_dropout: must be at least 0 and at most 1, got 1.01"),
    ],
)
def test_one_mistake_in_the_dataset(text: str, words: str) -> None:
    found = problems(f'model = {{family = "sd15", path = "demo"}}\n{text}\n[[dataset.folders]]\npath = "p"')
    assert len(found) == 1 and words in found[0], found


def test_what_is_required_is_said_with_what_it_is() -> None:
    assert problems("dataset = {folders = [{path = 'p'}]}") == ["model: required. The frozen base model."]
    assert [line.split(". ")[0] for line in problems("model = {}\ndataset = {folders = [{path = 'p'}]}")] == [
        "model.family: required",
        "model.path: required",
    ]
    folder = problems(LEAST.replace('path = "pictures"', "repeats = 2"))
    assert len(folder) == 1 and folder[0].startswith("dataset.folders.0.path: required. Folder with images")
    assert "no image folder is given" in problems("model = {family = 'sd15', path = 'demo'}")[0]


def test_a_contradiction_is_told_beside_a_mistake_but_not_because_of_one() -> None:
    """A misspelt key must not hide a contradiction elsewhere; a setting that is wrong already is not judged twice."""
    beside = problems(LEAST + "s = 1\n[schedule]\nwarmup = 1500")
    assert [line.split(":")[0] for line in beside] == ["s", "schedule.warmup"]
    # 2,000 of (what was meant as) 5,000 steps is fine: no complaint about the default of 1,500.
    assert [line.split(":")[0] for line in problems(LEAST + "train.steps = '5000'\nschedule.warmup = 2000")] == [
        "train.steps"
    ]
    text = 'model = {family = "sd15", path = "demo"}\n[dataset]\nmissing_caption = "trigger"\ntrigger = 5\n'
    assert [line.split(":")[0] for line in problems(text + "[[dataset.folders]]\npath = 'p'")] == ["dataset.trigger"]
    # A folder that lacks its path does not keep the others from being looked at.
    text = "model = {family = 'sd15', path = 'demo'}\nexport.formats = []\n"
    text += "dataset.folders = [{repeats = 2}, 7, {path = ''}]"
    keys = [line.split(":")[0] for line in problems(text)]
    assert (
        keys[:2] == ["dataset.folders.0.path", "dataset.folders.1"] and keys[-1] == "export.formats" and len(keys) == 4
    )


def test_a_long_value_is_cut_and_an_odd_key_stays_on_its_line() -> None:
    found = problems(LEAST + f"name = '{'x' * 5000}'\n\"a\\nb\" = 1\n")
    assert len(found) == 2 and all("\n" not in line and len(line) < 300 for line in found), found


# ------------------------------------------------------------------------------------------------------------- numbers


NEXT = {"ge": -1, "gt": 0, "le": 1, "lt": 0}
"""How far beside a bound the nearest whole number is that it forbids."""


def test_a_number_beyond_a_bound_is_told_with_the_whole_range_in_both_languages() -> None:
    count = 0
    for key, field in SETTINGS.items():
        for kind, bounds in ranges(field):
            for bound, limit in bounds.items():
                if bound in NEXT and not (bounds.get("ge") == bounds.get("le") != None):  # noqa: E711
                    found = problems(LEAST, f"{key}={kind(limit + NEXT[bound])!r}")
                    (line,) = [one for one in found if "must be" in one]
                    assert all(re.search(rf" {limit:g}\b| {limit}\b", line) for limit in bounds.values()), line
                    told = translations.translate("zh-CN", line).removesuffix("（来自 --set）")
                    assert re.search("不能|必须", told) and "must" not in told and "least" not in told, told
                    assert line.startswith(f"{key}: must be ") and len(found) == 1, found
                    count += 1
    assert count > 90


def test_no_guessing_between_types() -> None:
    """Checked at every setting: text for a number, true for a number, a number for text, a float for an int."""
    wrong: dict[Any, list[Any]] = {
        int: ["8", True, 8.0, [8]],
        float: ["0.5", True, [0.5]],
        bool: ["true", 1],
        str: [5, True],
    }
    for key, field in SETTINGS.items():
        kinds = leaves(field.annotation)
        for kind, values in wrong.items():
            for value in values:
                accepted = any(isinstance(value, k) and type(value) is k for k in kinds if isinstance(k, type))
                if kind not in kinds or accepted:
                    continue
                found = problems(LEAST, f"{key}={tomlkit.item(value).as_string()}")
                assert len(found) == 1 and found[0].startswith(f"{key}: expected "), (key, value, found)


FROM_ABOVE_0_TO_1 = ("objective.t_max", "objective.pyramid_discount")
"""Settings that accept 1 and not 0."""


def test_a_whole_number_is_a_number() -> None:
    for key, field in SETTINGS.items():
        kinds = leaves(field.annotation)
        if float in kinds and int not in kinds:
            limits = [limit for _, bounds in ranges(field) for a, limit in bounds.items() if a in ("lt", "le")]
            number = 0 if limits and min(limits) <= 1 and key not in FROM_ABOVE_0_TO_1 else 1
            if key in ("optimizer.lr", "optimizer.text_encoder_lr", "optimizer.beta2", "optimizer.d0"):
                continue  # between 0 and 1 without both: no whole number is accepted
            number = 2 if key == "optimizer.growth_rate" else number
            value: Any = config.loads(LEAST, [f"{key}={number}"])
            for part in key.split("."):
                value = value[int(part)] if part.isdigit() else getattr(value, part)
            assert value == number and type(value) is float, key


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "+nan"])
def test_what_is_no_finite_number_is_refused_everywhere(number: str) -> None:
    for key, field in SETTINGS.items():
        if {int, float} & {kind for kind in leaves(field.annotation) if isinstance(kind, type)}:
            found = problems(LEAST, f"{key}={number}")
            assert len(found) == 1 and found[0].startswith(f"{key}: "), (key, found)


def test_every_default_keeps_its_own_rules_and_every_setting_is_described() -> None:
    assert len(SETTINGS) > 70
    job = config.loads(LEAST)
    for key, field in SETTINGS.items():
        assert field.description and len(field.description) > 8 and field.description.strip()[-1] in ".)", key
        assert "\n" not in field.description, key
        if field.default is PydanticUndefined:
            continue
        assert not problems(LEAST, config.format_toml_line(key, field.default)), key
        for rule in field.metadata:
            for bound, holds in (("ge", "__ge__"), ("gt", "__gt__"), ("le", "__le__"), ("lt", "__lt__")):
                if hasattr(rule, bound) and not isinstance(field.default, str):
                    assert getattr(float(field.default), holds)(float(getattr(rule, bound))), key
    with pytest.raises(Exception, match="frozen"):
        job.train.steps = 3  # type: ignore[misc]


# ---------------------------------------------------------------------------------------------------------- precedence


def test_defaults_then_presets_in_order_then_config_then_set(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text(
        "[adapter]\nrank = 2\nalpha = 2\n[train]\nsteps = 2\nbatch_size = 2", encoding="utf-8"
    )
    (tmp_path / "two.toml").write_text("[adapter]\nrank = 3\n[train]\nsteps = 3\naccumulate = 3", encoding="utf-8")
    path = tmp_path / "job.toml"
    path.write_text('preset = ["one.toml", "two.toml"]\n' + LEAST + "[train]\nsteps = 4\nthreads = 4", encoding="utf-8")
    job = config.load(path, ["train.threads=5"])
    assert (job.optimizer.name, job.checkpoint.every) == ("adamw8bit", 250)  # defaults
    assert (job.adapter.alpha, job.train.batch_size) == (2, 2)  # the first preset
    assert (job.adapter.rank, job.train.accumulate) == (3, 3)  # the second over the first
    assert job.train.steps == 4  # the file over both
    assert job.train.threads == 5  # --set over all
    turned = config.load(path, ['preset=["two.toml", "one.toml"]'])
    assert (turned.adapter.rank, turned.train.accumulate, turned.train.steps) == (2, 3, 4)
    assert config.load(path, ["preset=[]"]).adapter.rank == Adapter().rank
    assert config.load(path, ["preset=one.toml"]).adapter.rank == 2


def test_what_is_wrong_in_a_preset_or_on_the_command_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[adapter]\nrnak = 2\n[train]\nsteps = 0", encoding="utf-8")
    text = 'preset = ["mine.toml"]\n' + LEAST
    assert problems(text, folder=tmp_path) == [
        "adapter.rnak: unknown setting, did you mean adapter.rank? (from preset mine.toml)",
        "train.steps: must be at least 1, got 0 (from preset mine.toml)",
    ]
    assert problems(text + "[train]\nsteps = -1", folder=tmp_path)[1] == "train.steps: must be at least 1, got -1"
    assert problems(LEAST, "train.steps=-1") == ["train.steps: must be at least 1, got -1 (from --set)"]


def test_a_wrong_value_of_an_option_names_the_option() -> None:
    steps, width = config.Override("preview.steps", 0, "--steps"), config.Override("preview.width", 8)
    assert problems(LEAST, steps, width) == [
        "preview.steps: must be at least 1 and at most 500, got 0 (from --steps)",
        "preview.width: must be 0 to 8192, and a multiple of 16, got 8",
    ]
    assert problems(LEAST, steps, "preview.steps=-1") == [
        "preview.steps: must be at least 1 and at most 500, got -1 (from --set)"
    ]


def test_a_preset_says_what_is_only_for_some_families(tmp_path: Path) -> None:
    """The tables of a kind are laid on the preset itself: before the next preset, the config and --set."""
    of_kinds = "[for.tags.dataset]\nkeep_tokens = 2\n[for.flow.dataset]\nflip = false\n"
    text = "dataset = {flip = true, keep_tokens = 5}\n" + of_kinds
    (tmp_path / "one.toml").write_text(text, encoding="utf-8")
    whole = 'preset = ["one.toml"]\n' + LEAST

    def given(family: str, *overrides: str) -> tuple[int, bool]:
        section = config.loads(whole.replace("sd15", family), overrides, folder=tmp_path).dataset
        return section.keep_tokens, section.flip

    assert given("sdxl") == (2, True) and given("flux") == (5, False) and given("anima") == (2, False)
    assert given("sdxl", "model.family=flux") == (5, False), "the family of --set counts"
    assert given("sdxl", "dataset.keep_tokens=3") == (3, True)
    for name, tables in config.read_layers(whole.replace("sd15", "flux"), folder=tmp_path):
        assert "for" not in tables and (name != "one.toml" or tables["dataset"]["flip"] is False)
    (tmp_path / "one.toml").write_text("[for.tgas.dataset]\nflip = true", encoding="utf-8")
    (line,) = problems(whole, folder=tmp_path)
    assert line.startswith("preset one.toml: for.tgas names no kind of architectures; accepted: tags | ")


@pytest.mark.parametrize("family", families.list_families())
@pytest.mark.parametrize("goal", ["character", "style", "concept", "object", "fp8_kohya_like"])
def test_goals_shuffle_tags_only_and_weigh_by_snr_only_what_has_one(goal: str, family: str) -> None:
    known = families.get_traits(family)
    folder = '"pictures", control = "before"' if known["controls"] else '"pictures"'
    job = config.loads(f'preset = ["{goal}"]\n' + LEAST.replace("sd15", family).replace('"pictures"', folder))
    assert job.dataset.shuffle_tags is (known["captions"] == "tags")
    assert job.objective.min_snr_gamma == (5.0 if known["objective"] == "Diffusion" and goal != "fp8_kohya_like" else 0)
    assert config.loads(config.dumps(job)) == job.model_copy(update={"preset": []})


def test_presets_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "torn.toml").write_text("[adapter\nrank = 2", encoding="utf-8")
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9")
    (tmp_path / "nested.toml").write_text("preset = ['style']", encoding="utf-8")
    for name, words in {
        "torn.toml": "preset torn.toml: not valid TOML",
        "latin.toml": "preset latin.toml: the text is not UTF-8 (byte 5)",
        "nested.toml": "preset nested.toml: a preset cannot name presets",
        "absent.toml": "no preset 'absent.toml'",
        "": "no preset ''",
        "x" * 400: "no preset",
    }.items():
        found = problems(f"preset = ['{name}']\n" + LEAST, folder=tmp_path)
        assert len(found) == 1 and words in found[0], (name, found)


# --------------------------------------------------------------------------------------------------------------- --set


@pytest.mark.parametrize(
    "value",
    ["😀\x7f\u202e\n\t\"'\\", "'" * 3, [{"path": "x", "deep": {"a": [1, "b"]}}], {}, [], True, 1e-5, [[1], ["a"]]],
)
def test_a_line_comes_back_as_it_was(value: Any) -> None:
    line = config.format_toml_line("train.steps", value)
    assert config.read_toml(line) == {"train": {"steps": value}} and "\n" not in line


def test_set_takes_toml_and_bare_words() -> None:
    job = config.loads(
        LEAST,
        [
            "model.family=flux",
            "model.path=black-forest-labs/FLUX.1-dev",
            "train.steps=500",
            "optimizer.lr=2e-4",
            "dataset.flip=true",
            "quantize.keep=['norm1', \"norm2\"]",
            "dataset.trigger=zi bo",
            "preview.negative=",
            "export.author='5'",
            "dataset.folders.0.repeats=7",
        ],
    )
    assert (job.model.family, job.model.path) == ("flux", "black-forest-labs/FLUX.1-dev")
    assert (job.train.steps, job.optimizer.lr, job.dataset.flip) == (500, 2e-4, True)
    assert job.quantize.keep == ["norm1", "norm2"]
    assert (job.dataset.trigger, job.preview.negative, job.export.author) == ("zi bo", "", "5")
    assert (job.dataset.folders[0].path, job.dataset.folders[0].repeats) == ("pictures", 7)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps", "expected key=value"),
        ("=5", "expected key=value"),
        ("train.steps=many", "train.steps: expected a whole number, got 'many'"),
        ("train.stepz=5", "train.stepz: unknown setting, did you mean train.steps?"),
        ("train=5", "train: expected a table, got 5"),
        ("train.=5", "train.: the key is incomplete"),
        ("train.steps.more=5", "unknown"),
        ("name.first=5", "name: expected text in quotes"),
        ("dataset.folders.1.repeats=2", "dataset.folders has 1 entries, counted from 0"),
        ("dataset.folders.².repeats=2", "dataset.folders has 1 entries, counted from 0"),
        ("dataset.folders.x.repeats=2", "dataset.folders has 1 entries"),
        ("dataset.folders.0=pictures", "the setting of the entry is missing"),
        ("preset.0=style", "the setting of the entry is missing"),
        ("train.steps=" + "9" * (DIGITS + 1), "train.steps: expected a whole number"),
        ("quantize.keep=" + "[" * 3000, "quantize.keep: expected a list"),
        ("name=caf\udce9", "name: expected text in UTF-8, got 'caf\\udce9'"),
        ("dataset.folders.0.path=caf\udce9", "dataset.folders.0.path: expected text in UTF-8, got 'caf\\udce9'"),
        ("preview.prompts=['a', '\udce9']", "preview.prompts.1: expected text in UTF-8, got '\\udce9'"),
    ],
)
def test_a_wrong_set_is_one_line(override: str, words: str) -> None:
    text = LEAST + ("preset = ['character']\n" if override.startswith("preset") else "")
    if override == "train.steps.more=5":
        found, words = problems(text + "[train]\nsteps = 3", override), "train.steps is a value, not a table"
    else:
        found = problems(text, override)
    assert len(found) == 1 and words in found[0], found


# --------------------------------------------------------------------------------------------------------------- files


def test_files_as_editors_and_mistakes_leave_them(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(b"\xef\xbb\xbf" + LEAST.replace("\n", "\r\n").encode())
    assert config.load(path).dataset.folders[0].path == "pictures"  # Notepad's mark and line ends

    def refused(content: bytes | None) -> str:
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            config.load(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        return str(caught.value)

    assert "the text is not UTF-8 (byte 7)" in refused(
        b'name = "caf\xe9"'.replace(b"caf", b""[:0]).replace(b'= "', b'="')
    )
    assert "not valid TOML" in refused(b"name = 'a'\n[train\n") and "line 2" in refused(None)
    assert "not valid TOML" in refused(b"seed = 1\nseed = 2")
    assert "Cannot declare train twice" in refused(b"[train]\n[train]")
    assert "not valid TOML" in refused(b"seed = " + b"9" * (DIGITS + 1))
    assert "not valid TOML" in refused(b"seed = 0x" + b"f" * DIGITS)
    assert "not valid TOML" in refused(b"name = " + b"[" * 5000)
    assert "not valid TOML: tables are nested more than 20 deep" in refused(b"name = " + b"[" * 25 + b"]" * 25)
    assert "not valid TOML: a key has more than 20 parts" in refused(b".".join([b"a"] * 2000) + b" = 1")
    assert problems(LEAST, f"{'a.' * 2000}a=1", f"seed=0x{'f' * DIGITS}")[0].startswith("--set 'a.a.")
    assert "not valid TOML" in refused(b"\0")
    path.unlink()
    assert "this config file does not exist" in refused(None)
    path.mkdir()
    assert "a folder" in refused(None)


KOHYA = """
[model_arguments]
pretrained_model_name_or_path = "./sd-models/model.safetensors"
v2 = false
[additional_network_arguments]
network_module = "networks.lora"
network_dim = 32
network_alpha = 16
[optimizer_arguments]
learning_rate = 1e-4
optimizer_type = "AdamW8bit"
[dataset_arguments]
resolution = "512,512"
shuffle_caption = true
[training_arguments]
fp8_base = true
max_train_epochs = 10
"""
LORA_SCRIPTS = """
model_train_type = "sd-lora"
pretrained_model_name_or_path = "./sd-models/model.safetensors"
train_data_dir = "./train/aki"
resolution = "512,512"
network_dim = 32
learning_rate = 0.0001
optimizer_type = "AdamW8bit"
"""
AI_TOOLKIT = """
job = "extension"
[config]
name = "my_first_flux_lora_v1"
[[config.process]]
type = "sd_trainer"
training_folder = "output"
[config.process.network]
type = "lora"
linear = 16
"""


@pytest.mark.parametrize("text", [KOHYA, LORA_SCRIPTS, AI_TOOLKIT], ids=["sd-scripts", "lora-scripts", "ai-toolkit"])
def test_another_trainers_file_is_answered_with_a_list(text: str) -> None:
    found = problems(text)
    unknown = [line.split(": unknown setting")[0] for line in found if ": unknown setting" in line]
    assert set(unknown) == tomllib.loads(text).keys()
    assert any(line.startswith("model: required") for line in found)
    assert all(len(line) < 300 and "\n" not in line for line in found)


# ---------------------------------------------------------------------------------------------------------- round trip


def random_value(field: Any, rng: random.Random) -> Any:
    """A value that the declaration of a setting accepts."""
    kind = rng.choice(leaves(field.annotation))
    bounds = rng.choice([bounds for arm, bounds in ranges(field) if arm is kind] or [{}])
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if get_origin(kind) is Literal:
        return rng.choice(get_args(kind))
    if get_origin(kind) is list:
        inner = get_args(kind)[0]
        if get_origin(inner) is Literal:
            return rng.sample(get_args(inner), rng.randint(1, len(get_args(inner))))
        return [random_text(rng) for _ in range(rng.randint(0, 3))]
    if kind is bool:
        return rng.random() < 0.5
    if kind is int:
        return rng.randint(math.ceil(low or 0), int(min(high if high is not None else 9999, 9999)))
    if kind is float:
        low, high = float(low or 0), float(high if high is not None else 50)
        return rng.choice([low + (high - low) * rng.uniform(1e-6, 0.999), (low + high) / 2])
    return random_text(rng)


def random_text(rng: random.Random) -> str:
    alphabet = "abc xyz,.-_'\"#=[]{}\\\t\n\r/触发词é🦊\u0085\u2028\x7f\x1b$%"
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 12)))


def random_job(rng: random.Random) -> Job:
    """Return a valid job with random values at many of its settings; what excludes another setting is left out."""
    never = ("preset", "model.family", "dataset.folders.0.control", "preview.controls")  # the last two: not of wan
    chosen = [key for key in SETTINGS if rng.random() < 0.7 and key not in never]
    fixed = {"dataset.background": f"#{rng.randrange(1 << 24):06x}", "name": f"名字 {rng.randrange(99)}"}
    fixed |= {key: rng.randrange(9) * 16 for key in ("preview.width", "preview.height")}
    fixed |= {
        "preview.frames": 1 + 4 * rng.randrange(9),
        "dataset.frames": rng.sample([1, 5, 17, 81], rng.randint(0, 3)),
        "model.files": rng.choice([{}, {"vae": "触发词/ae.safetensors"}]),
        "quantize.override": rng.choice([{}, {"触发词.to_q": "int8 row", "x": "bf16"}]),
        "adapter.ranks": rng.choice([{}, {"attn2": 32, "触发词.to_q": 0}]),
        "optimizer.lrs": rng.choice([{}, {"attn2": 0.5, "触发词.to_q": 2}]),
        "optimizer.name": rng.choice(["adamw", "lion8bit", "muon", "torch.optim.NAdam"]),
        "optimizer.arguments": rng.choice([{}, {"betas": [0.5, 0.9], "触发词": {"a": True}}]),
        "schedule.points": rng.choice([{}, {"0": 0.5, "0.25": 1.0}]),
        "optimizer.lr": rng.uniform(1e-6, 0.9),  # from 1 on it is of prodigy alone
        "train.steps": 10_000,
    }
    values = {key: fixed[key] if key in fixed else random_value(SETTINGS[key], rng) for key in chosen}
    text = tomlkit.dumps({"model": {"family": "wan", "path": "demo"}, "dataset": {"folders": [{"path": "p"}]}})
    written = {key: config.format_toml_line(key, value) for key, value in values.items()}
    while found := problems(text, *written.values()):
        assert all(": expected" not in line for line in found), found
        for line in found:
            if named := sorted(key for key in written if key in line):
                del written[rng.choice(named)]
    return config.loads(text, [*written.values()])


def test_a_job_written_out_and_read_back_is_the_same_job() -> None:
    rng = random.Random(1)
    seen = set()
    for _ in range(60):
        job = random_job(rng)
        assert config.loads(config.dumps(job)) == job
        assert config.loads(config.format_with_comments(job)) == job
        seen.add(job.model_dump_json())
    assert len(seen) > 50


def test_the_commented_file_explains_every_setting_that_has_an_effect() -> None:
    job = config.loads(LEAST)
    lines = config.format_with_comments(job).splitlines()
    left_out = set()
    for key, field in SETTINGS.items():
        name = key.rsplit(".", 1)[-1]
        if not [line for line in lines if line.startswith(f"{name} = ") and field.description in line]:
            left_out.add(key.replace(".0.", "."))
    # The bundled SD 1.5 without previews, masks and clips; with AdamW, LoRA, FP8 that is dequantized, tags as they are.
    for group in ("model.components model.revision", "quantize.sensitivity_bound quantize.recipe quantize.fp8_exclude"):
        assert set(group.split()) <= left_out
    for group in ("adapter.factor adapter.decompose_both optimizer.d0 optimizer.d_coef", "quantize.kernels"):
        assert set(group.split()) <= left_out
    for group in ("dataset.frames dataset.fps dataset.keep_tokens dataset.folders.control", "preview.every"):
        assert set(group.split()) <= left_out
    assert {"objective.shift", "objective.huber_delta", "objective.guidance", "schedule.min_lr"} <= left_out
    always = {key for key, when in config.list_conditions().items() if not when} - {"dataset.folders.control"}
    assert not left_out & always
    for text, key in (("optimizer.d0=1e-5", "d0 = 1e-05"), ("optimizer.name=prodigy", "d0 = 1e-06")):
        assert key in config.format_with_comments(config.loads(LEAST, [text])), (
            "what is set stays, and what has an effect"
        )
    assert "(bf16 | fp32)" in next(line for line in lines if line.startswith("dtype"))
    assert ">= 1, <= 1024" in next(line for line in lines if line.startswith("rank"))


TABLES = """
[adapter]
ranks = {"^mid_block" = 4, "ff.net.2" = 0}
[optimizer]
lrs = {attn2 = 0.5}
[quantize]
override = {"ff.net.2" = "int8 1x128", to_q = "bf16"}
"""
LINES = """
[adapter]
ranks = ["^mid_block = 4", "ff.net.2=0"]
[optimizer]
lrs = ["attn2 = 0.5"]
[quantize]
override = ["ff.net.2 =  int8 1x128", "to_q = bf16"]
"""


def test_tables_of_layers_and_the_lists_of_older_files_are_the_same(caplog: pytest.LogCaptureFixture) -> None:
    job = config.loads(LEAST + TABLES)
    assert not caplog.messages and job.adapter.ranks == {"^mid_block": 4, "ff.net.2": 0}
    assert config.loads(LEAST + LINES, where="old.toml") == job
    assert caplog.messages == [
        "old.toml: adapter.ranks is a list of strings, as in older versions; write it as a table: "
        'ranks = {"^mid_block" = 4, "ff.net.2" = 0}',
        (
            "old.toml: optimizer.lrs is a list of strings, as in older versions; write it as a table: lrs = "
            "{attn2 = 0.5}"
        ),
        "old.toml: quantize.override is a list of strings, as in older versions; write it as a table: "
        'override = {"ff.net.2" = "int8 1x128", to_q = "bf16"}',
    ]
    assert config.loads(LEAST + LINES, where="old.toml") == job and len(caplog.messages) == 3, "once"
    config.loads(LEAST + "[adapter]\nranks = ['a = 1', 'a = 2']", where="twice.toml")
    assert caplog.messages[-1].endswith("ranks = {a = 1}; if a name occurs twice, its first line counts")
    assert "ranks = {" in config.dumps(job) and config.loads(config.dumps(job)) == job


def test_a_name_with_dots_needs_no_quotes_and_the_order_is_kept() -> None:
    given = ["adapter.ranks={b=1, ff.net.2=8, a=2}", "adapter.ranks.ff.net.2=4", "adapter.ranks.to_q=3"]
    found = config.loads(LEAST, given).adapter.ranks
    assert list(found.items()) == [("b", 1), ("ff.net.2", 4), ("a", 2), ("to_q", 3)]
    in_sections = config.loads(LEAST + "[adapter.ranks]\nb = 1\nff.net.2 = 8")
    assert list(in_sections.adapter.ranks.items()) == [("b", 1), ("ff.net.2", 8)]


def test_a_table_of_layers_replaces_that_of_a_preset(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text("[adapter]\nranks = ['a = 1', 'b = 2']\nalpha = 3.0", encoding="utf-8")
    text = "preset = ['one.toml']\n" + LEAST
    assert config.loads(text, folder=tmp_path).adapter.ranks == {"a": 1, "b": 2}
    own = config.loads(text + "[adapter]\nranks = {c = 3}", folder=tmp_path).adapter
    assert own.ranks == {"c": 3} and own.alpha == 3
    more = config.loads(text, ["adapter.ranks.c=3"], folder=tmp_path).adapter.ranks
    assert list(more) == ["a", "b", "c"]


def test_a_run_can_be_repeated_from_its_own_file() -> None:
    """What is frozen into the run folder names no preset: a preset that changes later cannot change the run."""
    job = config.loads("preset = ['character', 'vram_8gb']\n" + LEAST)
    again = config.loads(config.dumps(job))
    assert again.preset == [] and again == job.model_copy(update={"preset": []})


# ---------------------------------------------------------------------------------------------------------------- fuzz

ODD: list[Any] = [0, -1, 1, 7, 10**30, -0.5, 0.5, 1e300, float("nan"), float("inf"), True, False, "", "auto", "8", "x"]
ODD += [
    "a\nb\0c",
    "🦊" * 300,
    "x" * 5000,
    [],
    [1],
    ["auto"],
    [[]],
    {},
    {"path": "p"},
    [{"path": "p"}],
    [{}],
    {"a": {"b": 1}},
]
ODD_KEYS = ["rnak", "", "a b", "a\nb", "0", "model", "类型", "x" * 200, "steps", "__class__", "model_fields"]


def places(node: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [here] if here else []
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return found + [place for key, value in entries for place in places(value, (*here, key))]


def mutated(data: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A copy with one entry replaced, removed, renamed, added or moved."""
    data = copy.deepcopy(data)
    place = rng.choice(places(data))
    node: Any = data
    for part in place[:-1]:
        node = node[part]
    key = place[-1]
    what = rng.choice(["replace", "replace", "remove", "rename", "add", "move"])
    if what == "remove":
        del node[key]
    elif what == "rename" and isinstance(node, dict):
        letters = list(key)
        letters[rng.randrange(len(letters))] = rng.choice("abcxyz_")
        node["".join(letters) if rng.random() < 0.7 else rng.choice(ODD_KEYS)] = node.pop(key)
    elif what == "add" and isinstance(node, dict):
        node[rng.choice(ODD_KEYS)] = rng.choice(ODD)
    elif what == "move":
        value = node[key]
        if isinstance(node, dict):
            del node[key]
        data[str(key)] = value
    else:
        node[key] = copy.deepcopy(rng.choice(ODD))
    return data


def as_toml(value: Any) -> str:
    """An inline TOML value; written here, because tomlkit refuses to write some of what tomllib reads."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in value) + '"'
    if isinstance(value, list):
        return f"[{', '.join(map(as_toml, value))}]"
    return f"{{{', '.join(f'{as_toml(k)} = {as_toml(v)}' for k, v in value.items())}}}"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_changed_file_loads_or_is_explained(path: Path) -> None:
    """2,000 single changes of all shipped files: each is a job, or a few readable lines (tests/fuzz makes more)."""
    rng = random.Random(path.name)
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    if path.parent.name == "presets":
        data.pop("for", None)  # tables that a config cannot have
        data |= {"name": "x", "model": {"family": "sd15", "path": "demo", **data.get("model", {})}}
        data["dataset"] = {"folders": [{"path": "p"}], **data.get("dataset", {})}
    assert not problems(as_document(data))
    refused = 0
    for _ in range(-(-2000 // len(SHIPPED))):
        change = mutated(data, rng)
        text = as_document(change)
        assert tomllib.loads(text).keys() == change.keys()
        found = problems(text, folder=path.parent)
        refused += bool(found)
        assert len(found) <= 6, (text, found)
        for line in found:
            assert "\n" not in line and len(line) < 600, line
            assert "pydantic" not in line.lower() and "http" not in line and "ValidationError" not in line, line
            assert not any(word in line for word in ("Input should", "literal[", "function-", "type=")), line
    assert refused > 2000 / len(SHIPPED) / 3


def as_document(data: dict[str, Any]) -> str:
    return "".join(f"{as_toml(key)} = {as_toml(value)}\n" for key, value in data.items())


@pytest.mark.parametrize("text", ["".join(f"k{i} = 1\n" for i in range(20_000)), "[[dataset.folders]]\n" * 20_000])
def test_of_very_many_problems_the_first_are_listed_and_the_rest_counted(text: str) -> None:
    with pytest.raises(errors.UserErrors) as caught:
        config.loads(text)
    assert len(caught.value.problems) == config.MOST_PROBLEMS + 1
    left = re.fullmatch(r"(\d+) more problems are not listed", caught.value.problems[-1])
    assert left and int(left[1]) >= 20_000 - config.MOST_PROBLEMS


def test_very_many_presets_are_counted_and_not_looked_for() -> None:
    with pytest.raises(errors.UserErrors, match="at most 20 presets, got 50000"):
        config.loads(f"preset = {['nobody'] * 50_000}")
