"""What is shipped works as it is shipped: every config and preset loads, and what READMEs and docs/ say exists.

Presets and documentation rot silently; here they cannot.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import typer.main
import yaml
from packaging.specifiers import SpecifierSet

from lora_fp8 import cli, config, families, settings
from lora_fp8.config import find_unused_settings, recipes
from lora_fp8.errors import RunFailure, Stopped
from lora_fp8.families.sources import hosts

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
PRESETS = sorted((ROOT / "presets").glob("*.toml"))
GOALS = (*recipes.GOALS, "fp8_kohya_like")
DEMOS = ("demo_sd15", "demo_flux")
CARDS = tuple(map(recipes.format_card_name, recipes.CARDS))
LEVELS = {  # model.dtype, quantize.storage, quantize.compute, adapter.dtype
    "precision_o0": ("fp32", "none", "upcast", "fp32"),
    "precision_o1": ("bf16", "fp8", "auto", "bf16"),
    "precision_o2": ("bf16", "bf16", "upcast", "bf16"),
}
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
PAGES = [*READMES, *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]


def names(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


# ------------------------------------------------------------------------------------------------- configs and presets


def test_nothing_is_missing() -> None:
    assert {"debug", *families.list_families()} <= set(names(CONFIGS)), "a config for each family, and debug.toml"
    assert set(names(PRESETS)) == {"fp8_kohya_like", *DEMOS, *LEVELS}
    assert set(config.list_preset_names()) == {*names(PRESETS), *GOALS, *CARDS}


@pytest.mark.parametrize("path", CONFIGS, ids=names(CONFIGS))
def test_every_config_is_a_whole_job(path: Path) -> None:
    job = config.load(path)
    assert job.name and job.dataset.folders and job.export.verify
    if path.stem == "debug":
        assert job.model.family == "sd15"
    else:
        assert job.model.family == path.stem
        assert job.model.path == families.get(path.stem).example_base, "as `lora-fp8 new` writes it"
    # What is written for this model has an effect on it.
    Family = families.get(job.model.family)
    assert find_unused_settings(job) == []
    assert Family.uses_negative or not job.preview.negative
    resolution, multiple = job.dataset.resolution, Family.bucket_multiple
    assert resolution == "auto" or resolution % multiple == 0
    assert config.loads(config.dumps(job)).model_dump(exclude={"preset"}) == job.model_dump(exclude={"preset"})


def test_debug_needs_nothing_that_is_not_here() -> None:
    job = config.load(ROOT / "configs" / "debug.toml")
    assert job.model.path == "demo" and job.preset == []
    for folder in job.dataset.folders:
        assert list((ROOT / folder.path).glob("*.txt")), folder.path


@pytest.mark.parametrize("path", PRESETS, ids=names(PRESETS))
def test_every_preset_lies_under_a_config(path: Path) -> None:
    partial = tomllib.loads(path.read_text(encoding="utf-8"))
    assert not {"name", "output_dir", "preset", "preview.prompts"} & partial.keys()
    under = config.load(ROOT / "configs" / "debug.toml", [f'preset=["{path.stem}"]'])
    own = tomllib.loads((ROOT / "configs" / "debug.toml").read_text(encoding="utf-8"))
    of_kind = partial.pop("for", {})
    for table in (partial, *(of_kind.get(kind, {}) for kind in ("tags", "diffusion"))):  # it is of sd15
        for section, key in ((section, key) for section, values in table.items() for key in values):
            value = table[section][key]
            expected = own.get(section, {}).get(key, value)  # the config wins over the preset
            assert getattr(getattr(under, section), key) == expected, f"{section}.{key}"


@pytest.mark.parametrize("name", DEMOS)
def test_a_demo_preset_has_the_demos_own_values(name: str) -> None:
    demo = tomllib.loads((ROOT / "lora_fp8/demo" / f"{name.removeprefix('demo_')}.toml").read_text(encoding="utf-8"))
    found = tomllib.loads((ROOT / "presets" / f"{name}.toml").read_text(encoding="utf-8"))
    del demo["model"], demo["dataset"]["folders"], demo["dataset"]["flip"], demo["preview"]["prompts"]
    assert found["schedule"].pop("warmup") * demo["train"]["steps"] == demo["schedule"].pop("warmup")
    for section, values in demo.items():
        assert values.items() <= found[section].items(), section


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("goal", GOALS)
def test_every_goal_goes_with_every_card(goal: str, card: str) -> None:
    """In either order the same: what is learned and what it may cost do not overlap."""
    debug = ROOT / "configs" / "debug.toml"
    one, other = (config.load(debug, [f"preset={list(pair)}"]) for pair in ((goal, card), (card, goal)))
    assert one.model_dump(exclude={"preset"}) == other.model_dump(exclude={"preset"})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("before", ["", *CARDS, *LEVELS, "fp8_kohya_like"])
def test_a_precision_level_is_what_it_says(level: str, before: str) -> None:
    """Whatever preset it is named after: of how exactly it is computed, nothing is left over from that."""
    base = "model = {family = 'sd15', path = 'demo'}\ndataset = {folders = [{path = 'p'}]}"
    job = config.loads(base, [f"preset={[name for name in dict.fromkeys((before, level)) if name]}"])
    found = (job.model.dtype, job.quantize.storage, job.quantize.compute, job.adapter.dtype)
    assert found == LEVELS[level] and job.quantize.scale == job.quantize.modulation == "auto"


@pytest.mark.parametrize("path", [*CONFIGS, *PRESETS], ids=names([*CONFIGS, *PRESETS]))
def test_every_shipped_file_is_explained_in_both_languages(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# ") and re.search("[一-鿿]", "\n".join(lines[:4])), "a head saying for whom, in both"
    if path in PRESETS:
        given = False
        for line in lines:
            if re.match(r"\w+ = ", line):
                assert "  # " in line or (given and line.startswith("height")), f"no reason: {line}"
                given = True
    else:
        sections = [i for i, line in enumerate(lines) if re.match(r"\[\w+\]", line)]
        explained = [i for i in sections if re.search("[一-鿿]", lines[i - 1])]
        assert len(explained) >= len(sections) - 2, "a line of Chinese above (nearly) every section"


# ------------------------------------------------------------------------------------------------------------- READMEs


def fences(path: Path, language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```(?:{language})\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def command_lines(path: Path) -> list[list[str]]:
    """Every command in the shell blocks, as words, and every `lora-fp8 ...` and `make ...` between backticks."""
    lines = [line for block in fences(path, "sh|bash|shell|console") for line in block.splitlines()]
    lines += re.findall(r"`((?:lora-fp8|make|accelerate launch)\b[^`\n]*)`", path.read_text(encoding="utf-8"))
    return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


def test_every_page_is_in_both_languages_and_found_from_the_readme() -> None:
    pages = {path.name.removesuffix(".md").removesuffix(".zh-CN") for path in PAGES}
    for readme, suffix in zip(READMES, ("", ".zh-CN"), strict=True):
        text, models = (path.read_text(encoding="utf-8") for path in (readme, ROOT / f"docs/models{suffix}.md"))
        assert all(f"](docs/{name}{suffix}.md)" in text for name in pages - {"README"}), readme.name
        for family in families.list_families():
            assert f"`{family}`" in text and f"\n| `{family}` |" in models, f"{family} is not in {readme.name} and docs"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_commands_of_the_pages_exist(path: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    lines = command_lines(path)
    told = [words for words in lines if words[0] in ("lora-fp8", "make", "accelerate")]
    # Options before the command, such as --lang zh, are those of all commands.
    told = [words[:1] + words[3:] if words[1:2] == ["--lang"] else words for words in told]
    assert len(told) >= 6 or path not in READMES, "the README shows how to use it"
    for words in told:
        said = " ".join(words)
        if words[1:2] == ["--lang"]:
            words = [words[0], *words[3:]]
        if words == ["lora-fp8", "--help"]:
            continue
        if words[0] == "make":
            assert set(w for w in words[1:] if "=" not in w) <= set(targets), said
        elif "-m" in words:
            module, command = words[words.index("-m") + 1 :][:2]
            assert words[1] == "launch" and module == "lora_fp8" and command in COMMANDS, said
        elif words[0] == "accelerate" and len(words) > 2:
            assert words[1] == "launch" and any((ROOT / word).is_file() for word in words if word.endswith(".py")), said
        elif words[0] == "lora-fp8" and len(words) > 1 and not words[1].startswith(("<", "--help")):
            assert words[1] in COMMANDS, f"{said}: no such command"
            command, rest = COMMANDS[words[1]], words[2:]
            if rest and rest[0] in getattr(command, "commands", {}):  # a group, such as `jobs` or `dataset`
                command, rest = command.commands[rest[0]], rest[1:]
            elif words[1] == "dataset" and rest and not rest[0].startswith("-"):  # `dataset FOLDER`
                command = command.commands["look"]
            options = [option for parameter in command.params for option in parameter.opts]
            assert {w.split("=")[0] for w in rest if w.startswith("--")} <= {*options, "--help"}, said


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_settings_and_presets_on_the_pages_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for block in fences(path, "toml"):
        given = tomllib.loads(block)
        base = "model = {family = 'sd15', path = 'demo'}\ndataset = {folders = [{path = 'p'}]}"
        flat = [f"{k}.{n}" for k, v in given.items() for n in (v if isinstance(v, dict) else ())]
        for key in flat:
            section, name = key.split(".", 1)
            assert name in type(getattr(config.loads(base), section)).model_fields, key
    sections = "|".join(name for name, field in settings.Job.model_fields.items() if field.annotation is not None)
    for section, name in re.findall(rf"`({sections})\.(\w+)\b[^`]*`", text):
        if name in ("py", "toml", "md") or (ROOT / f"{section}.{name}").exists():
            continue
        fields = getattr(settings.Job.model_fields[section].annotation, "model_fields", {})
        assert name in fields, f"`{section}.{name}` is no setting"
    for preset in re.findall(r"`(vram_\w+|fp8_\w+like)`", text):
        assert preset in config.list_preset_names(), preset
    if path.name.startswith("training."):
        assert all(f"`{name}`" in text for name in config.list_preset_names()), "the page names every preset"


@pytest.mark.parametrize(
    "path", [ROOT / "docs/training.md", ROOT / "docs/training.zh-CN.md"], ids=lambda path: path.name
)
def test_the_table_of_layouts_is_what_auto_writes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| ((?:kohya|diffusers|comfy)[^|]*) \|$", text, re.MULTILINE)
    told = {name: set(re.split(" and | 和 ", to)) for cell, to in rows for name in re.findall(r"`(\w+)`", cell)}
    (others,) = [{to} for cell, to in rows if "`" not in cell]
    for family in families.list_families():
        assert told.get(family, others) == set(families.get(family).choose_layouts()), family


def test_compose_passes_on_what_the_container_reads() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]["lora-fp8"]
    script, dockerfile = ((ROOT / name).read_text(encoding="utf-8") for name in ("scripts/container.sh", "Dockerfile"))
    tokens = {"HF_TOKEN", hosts.ModelScope.variable, hosts.Civitai.variable}
    read = set(re.findall(r"\$\{(LORA_FP8_\w+)", script)) - {"LORA_FP8_STOP_SECONDS"}
    assert read | tokens | {"LORA_FP8_PASSWORD", "HF_ENDPOINT"} == set(service["environment"])
    assert set(service["build"]["args"]) == set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE)) - {"BASE"}
    assert all(".env" in (ROOT / name).read_text(encoding="utf-8") for name in (".gitignore", ".dockerignore"))


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_the_map_has_every_room(path: Path) -> None:
    """The map has each folder and file at the first level of lora_fp8/, and names nothing that is not there."""
    (block,) = [b for b in fences(path, r"\w*") if "\nlora_fp8/" in f"\n{b}"]
    on_map, top = set(), ""
    for line in block.splitlines():
        indent, names = re.match(r"( *)((?:[\w.]+(?:/|\.py) *)+)", line).groups()
        top = "" if not indent else top
        on_map |= {top + name for name in names.split()}
        top = top or names.split()[0]
    for name in on_map:
        assert (ROOT / name).exists(), f"on the map, but not there: {name}"
    there = [one for one in (ROOT / "lora_fp8").iterdir() if one.suffix == ".py" or list(one.glob("*.py"))]
    rooms = {f"lora_fp8/{one.name}{'/' * one.is_dir()}" for one in there if not one.name.startswith("__")}
    assert not rooms - on_map, f"not on the map: {sorted(rooms - on_map)}"
    assert {"train_lora.py", "webui/", "configs/", "presets/", "scripts/", "tests/", "docs/", "benchmarks/"} <= on_map


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/training-step*.md")), ids=lambda path: path.name)
def test_the_files_and_functions_of_a_step_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    files = re.findall(r"`([\w/]+\.py)`", text)
    assert len(files) > 15 and all((ROOT / "lora_fp8" / name).is_file() for name in files)
    named = re.findall(r"`([\w/]+\.py)`(?:: |：| 的 )((?:`[\w.]+`(?:, |、)?)+)", text)
    assert len(named) > 15
    for file, functions in named:
        tree = ast.parse((ROOT / "lora_fp8" / file).read_text(encoding="utf-8"))
        inner = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
        there = {node.name for node in tree.body if hasattr(node, "name")}
        there |= {f"{name}.{node.name}" for name, body in inner.items() for node in body if hasattr(node, "name")}
        there |= {node.name for body in inner.values() for node in body if hasattr(node, "name")}
        missing = set(re.findall(r"`([\w.]+)`", functions)) - there
        assert not missing, f"{path.name}: {file} has no {missing}"


def test_every_module_says_what_it_is() -> None:
    """The map ends at the rooms: the first line of a file tells what it has."""
    modules = [*(ROOT / "lora_fp8").rglob("*.py"), *(ROOT / "webui").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    silent = [path.relative_to(ROOT) for path in modules if not ast.get_docstring(ast.parse(path.read_bytes()))]
    assert silent == []


@pytest.mark.parametrize("path", [path for path in PAGES if ".zh-CN" in path.name], ids=lambda path: path.name)
def test_no_line_of_chinese_ends_within_a_phrase(path: Path) -> None:
    """A browser shows the end of a line as a space, which Chinese has none of between two characters."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"^(?!#|\|).*[一-鿿]\n *[一-鿿].{0,10}", text, re.MULTILINE) == []


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "NOTES.md"], ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in link:
            assert (path.parent / link).exists(), f"{path.name} links to {link}"


@pytest.mark.parametrize("path", READMES, ids=lambda path: path.name)
def test_the_readme_tells_the_exit_codes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    line = next((line for line in text.splitlines() if "75" in line and "2" in line and "3" in line), "")
    assert re.search(r"\b0\b.*\b2\b.*\b3\b.*\b75\b", line), "0, 2, 3 and 75 on one line"
    assert issubclass(RunFailure, Exception) and issubclass(Stopped, Exception)


def test_what_is_installed_has_every_file(tmp_path: Path) -> None:
    """A wheel, made as pip makes it, and used where there is no checkout."""
    copy, installed = tmp_path / "copy", tmp_path / "installed"
    for name in ("lora_fp8", "webui", "presets", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):  # the build leaves out what git ignores
        shutil.copy(ROOT / name, copy)
    wanted = {path.relative_to(copy) for name in ("lora_fp8", "webui") for path in (copy / name).rglob("*.*")}
    wanted |= {
        Path("lora_fp8") / path.relative_to(copy) for name in ("presets", "configs") for path in (copy / name).iterdir()
    }
    build = "import hatchling.build as build; print(build.build_wheel('..'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, encoding="utf-8")
    assert done.returncode == 0 and not done.stderr, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(installed)
    assert wanted - {path.relative_to(installed) for path in installed.rglob("*.*")} == set()
    new = [sys.executable, "-m", "lora_fp8", "new", "a.toml", "--preset", "vram_8gb", "--preset", "character"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(new, cwd=tmp_path, env=environment, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr


def test_every_pinned_version_runs_on_the_oldest_python() -> None:
    """Debian 12 has Python 3.11.2: a pin that needs a later one ends `make demo` there before it begins."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    names = [line.partition("==")[0] for line in lines if "==" in line and not line.startswith("#")]
    needs = {}
    for name in names:
        try:
            needs[name] = metadata.metadata(name).get("Requires-Python", "")
        except metadata.PackageNotFoundError:
            continue  # of an extra, or of another system
    assert len(needs) > 80
    late = {name: text for name, text in needs.items() if not SpecifierSet(text).contains("3.11.0")}
    assert not late
