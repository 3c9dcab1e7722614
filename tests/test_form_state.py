"""The form's one text: what every view shows comes from it, what every view changes goes into it, nothing is lost.

The authority for what a text means is `config.loads`; for what stands in it, `tomllib`.
"""

import random
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import tomlkit

from lora_fp8 import config, families, settings
from lora_fp8.errors import UserError
from lora_fp8.settings import FACTS, Job
from webui import form

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(ROOT.glob("configs/*.toml"))
PRESETS = sorted(ROOT.glob("presets/*.toml"))
NAMED = '[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "pictures"\n'


def passed_through(text: str) -> str:
    """The text after every setting was shown in its component, read back and put."""
    for key, value in form.read_values(text).items():
        setting = form.collect_settings()[key]
        text = form.put(text, key, form.from_component(setting, form.to_component(setting, value)))
    return text


def least(text: str) -> str:
    """A text with what every job must name."""
    data = tomllib.loads(text)
    data["model"] = {"family": "sd15", "path": "demo"} | data.get("model", {})
    data.setdefault("dataset", {}).setdefault("folders", [{"path": "pictures"}])
    return tomlkit.dumps(data)


def test_every_setting_of_the_declarations_is_in_the_table() -> None:
    declared = set()
    for name, field in Job.model_fields.items():
        inner = [a for a in (field.annotation, *get_args(field.annotation)) if hasattr(a, "model_fields")]
        declared |= {f"{name}.{one}" for one in inner[0].model_fields} if inner else {name}
    assert set(form.collect_settings()) == declared
    folder = form.collect_settings()["dataset.folders"]
    assert folder.kind == "table" and [one.name for one in folder.columns] == list(settings.Folder.model_fields)
    # Arguments of any class are a TOML table in a text field; another setting gets a component of its own.
    assert [key for key, one in form.collect_settings().items() if one.kind == "toml"] == ["optimizer.arguments"]


def test_an_untouched_form_is_the_default_job() -> None:
    text = form.put(form.START, "model.path", "demo")
    text = form.put(text, "dataset.folders", [{"path": "pictures"}])
    assert config.loads(text) == config.loads(NAMED)
    assert passed_through(text) == text
    assert passed_through(form.START) == form.START
    assert {problem.key for problem in form.find_problems(form.START)} == {"model.path", "dataset.folders"}


@pytest.mark.parametrize("path", [*FILES, *PRESETS], ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_nothing_of_a_shipped_file_is_lost(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    whole = text if path in FILES else least(text.partition("\n[for.")[0] + "\n")  # tables that a config cannot have
    after = passed_through(whole)
    assert config.loads(after, folder=path.parent) == config.loads(whole, folder=path.parent)
    if path in FILES:
        changed = [line for line in form.put(text, "seed", 7).splitlines() if line]
        before = [line for line in text.splitlines() if line and not line.startswith("seed =")]
        assert [line for line in changed if not line.startswith("seed =")] == before, "not a comment moves"


def random_job(draw: random.Random) -> dict[str, Any]:
    """Tables of a job in which about half the settings are at a value that is accepted."""
    tables: dict[str, Any] = {"model": {"family": draw.choice(families.list_families()), "path": "demo"}}
    for key, one in form.collect_settings().items():
        section, _, name = key.rpartition(".")
        if key in ("model.family", "model.path") or draw.random() < 0.5:
            continue
        home = tables.setdefault(section, {}) if section else tables
        home[name] = random_value(draw, one)
    tables.setdefault("dataset", {})["folders"] = [random_row(draw) for _ in range(draw.randint(1, 4))]
    tables["preset"] = draw.sample(config.list_preset_names(), draw.randint(0, 2))
    return tables


def random_row(draw: random.Random) -> dict[str, Any]:
    row = {"path": "pictures " + odd(draw)}
    for column in form.collect_settings()["dataset.folders"].columns:
        if column.name != "path" and draw.random() < 0.5:
            row[column.name] = random_value(draw, column)
    return row


def odd(draw: random.Random) -> str:
    return "".join(draw.choices("ab ,.#=[]{}'\"\\%$\n\t中文\u2028é", k=draw.randint(0, 8)))


def random_value(draw: random.Random, one: form.Setting) -> Any:
    number = draw.choice([1, 3, 16]) if one.whole and draw.random() < 0.5 else draw.choice([0.5, 1e-8, 0.125, 1.0])
    return {
        "flag": lambda: draw.random() < 0.5,
        "choice": lambda: draw.choice(one.choices),
        "switch": lambda: draw.choice(["auto", True, False]),
        "mixed": lambda: draw.choice([*one.choices, number]),
        "number": lambda: draw.choice([number, one.default]),
        "text": lambda: odd(draw),
        "lines": lambda: [odd(draw) for _ in range(draw.randint(0, 3))],
        "numbers": lambda: draw.choice([[], [17, 33], [5], [-1, 0], [odd(draw), 1.5], odd(draw)]),
        "entries": lambda: draw.choice(
            [{}, {"ff.net.2": 8}, {"b": 1.5, "a": 2}, {"a": "int8 1x128", "*q": "bf16"}, {odd(draw): 3}, odd(draw)]
        ),
        "toml": lambda: draw.choice([{}, {"betas": [0.9, 0.5], "on": True}, odd(draw)]),
        "choices": lambda: draw.sample(one.choices, draw.randint(1, len(one.choices))),
        "table": lambda: [],
    }[one.kind]()


def test_nothing_of_random_jobs_is_lost(some: Callable[..., list[int]]) -> None:
    draw, accepted = random.Random(20261121), 0
    for _ in some(range(20), 0, of=3):
        text = tomlkit.dumps(random_job(draw))
        try:
            before = config.loads(text)
        except UserError:
            before = None
        after = passed_through(text)
        values = form.read_values(after)
        # Compared as values too, since most random jobs contradict themselves somewhere.
        assert all(
            form.is_same_value(values[key], value) or one_number(values[key], value)
            for key, value in form.read_values(text).items()
            if key != "dataset.folders"
        ), text
        if before is not None:
            accepted += 1
            assert config.loads(after) == before
    for text in (tomlkit.dumps({**tomllib.loads(NAMED), "train": {"steps": n}}) for n in (1, 2)):
        assert config.loads(passed_through(text)) == config.loads(text)


def one_number(one: Any, other: Any) -> bool:
    """16 and 16.0, where only numbers with a point are meant: the file may hold either."""
    return not isinstance(one, bool) and isinstance(one, int | float) and one == other


def test_a_change_keeps_comments_and_order_and_leaves_with_its_reason() -> None:
    text = (
        '# mine\nname = "x"  # the name\npreset = ["character"]\n\n[train]\n# how long\nsteps = 700  # enough\n' + NAMED
    )
    changed = form.put(text, "train.steps", 800)
    assert changed == text.replace("700", "800")
    assert "steps" not in form.put(changed, "train.steps", 1200), "what the preset says anyway needs no line"
    assert form.put(text, "adapter.rank", 16) == text, "the default, and the preset's"
    assert "rank = 8" in form.put(text, "adapter.rank", 8)
    back = form.put(form.put(text, "adapter.rank", 8), "adapter.rank", 16)
    assert back.strip() == text.strip(), "an emptied table leaves too"
    assert form.find_origins(text)["train.steps"] == "" and form.find_origins(text)["adapter.rank"] == "character"


@pytest.mark.parametrize(
    "text",
    [
        'train.steps = 5\nmodel.family = "sd15"\nmodel.path = "demo"\ndataset.folders = [{path = "a"}]\n',
        'model = {family = "sd15", path = "demo"}\ndataset = {folders = [{path = "a"}], flip = true}\n',
        '[dataset]\nflip = true\n[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "a"\n',
        '[model]\nfamily = "sd15"\n[dataset]\n[[dataset.folders]]\npath = "a"\n[train]\n[model.x]\n',
    ],
    ids=["dotted", "inline", "taken up again", "with an unknown table"],
)
def test_every_layout_of_a_file_can_be_changed(text: str) -> None:
    data = tomllib.loads(text)
    rows = [{"path": "b", "repeats": 2}, {"path": "c"}]
    for key, value in (("train.steps", 9), ("dataset.folders", rows), ("name", "n"), ("dataset.flip", False)):
        text = form.put(text, key, value)
        section, _, name = key.rpartition(".")
        home = data.setdefault(section, {}) if section else data
        home[name] = value
        if key == "dataset.flip":
            del home[name]
        assert tomllib.loads(text) == data
    assert form.read_values(text)["dataset.folders"] == rows


def test_wrong_values_are_kept_and_told_each_with_its_setting() -> None:
    rank, steps = form.collect_settings()["adapter.rank"], form.collect_settings()["train.steps"]
    text = form.put(NAMED, "adapter.rank", form.from_component(rank, "0"))
    text = form.put(text, "train.steps", form.from_component(steps, "many"))
    text = form.put(text, "dataset.folders", [{"path": "a", "repeats": "b"}])
    assert form.to_component(steps, form.read_values(text)["train.steps"]) == "many"
    assert [problem.key for problem in form.find_problems(text)] == ["adapter.rank", "dataset.folders", "train.steps"]
    assert form.find_problems("x = [") and form.find_problems("x = [")[0].key == ""
    chosen = ["character", "/a/my preset.toml"]  # what a list of choices holds is no text of several lines
    assert form.from_component(form.collect_settings()["preset"], chosen) == chosen


def test_rules_of_relevance_name_settings_and_values_that_exist() -> None:
    for key, one in form.collect_settings().items():
        rules = []
        for others, accepted in one.when.items():
            names = others.split(" | ")
            asked = [form.collect_settings()[name] for name in names] if len(names) > 1 else []
            # Of several settings, each has some of the values.
            known = {value for each in asked for value in ((True, False) if each.kind == "flag" else each.choices)}
            assert not asked or set(accepted) <= known, key
            rules += [(name, () if asked else accepted) for name in names]
        for other, accepted in rules:
            if other.startswith("family."):
                there = {families.get_traits(name)[other.removeprefix("family.")] for name in families.list_families()}
                assert set(accepted) < there, f"{key}: of every family, or of none"
                continue
            if other in FACTS:
                continue
            columns = {one.key: one for one in form.collect_settings()["dataset.folders"].columns}
            asked = (form.collect_settings() | columns)[other]
            more = {settings.CLASS} if other == "optimizer.name" else set()
            assert asked.kind != "choice" or set(accepted) <= {*asked.choices, *more}, key
            assert asked.kind != "flag" or set(accepted) <= {True, False}, key
            assert asked.default is not None, key


def test_settings_without_effect_are_told() -> None:
    found = form.read_values(NAMED)
    assert {"quantize.recipe", "preview.steps", "dataset.keep_tokens", "schedule.min_lr"} <= form.find_unused(found)
    assert not {"quantize.scale", "quantize.compute", "dataset.max_aspect", "adapter.rank"} & form.find_unused(found)
    text = form.put(form.put(NAMED, "quantize.storage", "nf4"), "preview.prompts", ["a"])
    assert {"quantize.scale", "quantize.compute"} <= form.find_unused(form.read_values(text))
    assert "preview.steps" not in form.find_unused(form.read_values(text))
    of_tags = {"dataset.keep_tokens", "dataset.tag_separator"}
    for key, value, works in (
        ("shuffle_tags", True, {*of_tags, "dataset.caption_variants"}),
        ("tag_dropout", 0.1, {*of_tags, "dataset.caption_variants"}),
        ("wildcards", True, {"dataset.caption_variants"}),
        ("caption_lines", "one", {"dataset.caption_variants"}),
    ):
        assert (
            form.find_unused(found) - form.find_unused(form.read_values(form.put(NAMED, f"dataset.{key}", value)))
            == works
        )
    masked = form.put(NAMED, "dataset.folders", [{"path": "a"}, {"path": "b", "mask": "alpha"}])
    assert "objective.unmasked_weight" in form.find_unused(found) - form.find_unused(form.read_values(masked))


def test_settings_of_other_architectures_are_told() -> None:
    """Against what the engine's warnings and refusals say of each (see test_families)."""
    of = {
        "sd15": {"objective.min_snr_gamma", "adapter.text_encoder", "preview.negative"},
        "flux": {"objective.shift", "objective.guidance", "adapter.text_encoder"},
        "qwen_image": {"objective.shift", "preview.negative"},
        "ideogram4": {"objective.shift"},
        "wan": {"objective.shift", "preview.negative", "dataset.frames", "preview.frames"},
        "flux_kontext": {
            *("objective.shift", "objective.guidance", "adapter.text_encoder"),
            *("dataset.control_resolution", "preview.controls"),
        },
    }
    every = set().union(*of.values())
    for family, theirs in of.items():
        text = form.put(form.put(NAMED, "model.family", family), "preview.prompts", ["a"])
        assert every - form.find_unused(form.read_values(text)) == theirs, family
    text = form.put(form.put(NAMED, "model.family", "sdlx"), "preview.prompts", ["a"])
    assert not every & form.find_unused(form.read_values(text)), "of a family that there is not nothing is hidden"


def test_a_table_of_layers_is_a_line_each_whose_order_counts() -> None:
    ranks = form.collect_settings()["adapter.ranks"]

    def read(text: str) -> Any:
        return form.from_component(ranks, text)

    def shown(text: str) -> Any:
        return form.to_component(ranks, form.read_values(text)["adapter.ranks"])

    old = NAMED + "[adapter]\nranks = ['attn2 = 8', 'ff.net.2 = 0']  # mine\nrank = 4\n"
    assert ranks.kind == "entries" and shown(old) == "attn2 = 8\nff.net.2 = 0"
    assert form.put(old, "adapter.ranks", read(shown(old))) == old, "the same in the older form"
    text = form.put(old, "adapter.ranks", read("ff.net.2 = 0\nattn2 = 8"))
    assert 'ranks = {"ff.net.2" = 0, attn2 = 8} # mine' in text.replace("  #", " #"), text
    assert list(config.loads(text).adapter.ranks.items()) == [("ff.net.2", 0), ("attn2", 8)]
    assert config.loads(form.put(text, "adapter.rank", 8)).adapter.ranks == {"ff.net.2": 0, "attn2": 8}
    table = NAMED + "[adapter.ranks]  # here\nff.net.2 = 0\n"
    assert form.read_values(table)["adapter.ranks"] == {"ff.net.2": 0}
    assert form.put(table, "adapter.ranks", read("ff.net.2 = 0")) == table
    both = form.put(table, "adapter.ranks", read("ff.net.2 = 0\n^a.b = 3"))
    assert config.loads(both).adapter.ranks == {"ff.net.2": 0, "^a.b": 3}
    assert "ranks" not in form.put(both, "adapter.ranks", read(" \n"))
    wrong = form.put(NAMED, "adapter.ranks", read("attn2 = many\nattn"))
    assert [problem.key for problem in form.find_problems(wrong)] == ["adapter.ranks"] * 2
    assert shown(wrong) == "attn2 = many\nattn = "
