"""The commands as a person or a script meets them: what they print, what they leave on disk, and their exit codes.

What must start fast or load no torch is asked in a fresh process; the rest runs here, through the same entry point.
"""

import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors
import torch
from PIL import Image
from safetensors.torch import load_file

from lora_fp8 import cli, config, families, run, settings, train
from lora_fp8.cli import commands, events
from lora_fp8.errors import RunFailure, Stopped, UserError, UserErrors
from lora_fp8.jobs import job_state, run_events
from lora_fp8.run import run_log
from lora_fp8.stages import step

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (
    *("dataset", "caption"),
    *("new", "check", "import-config", "train", "resume", "stop", "export", "verify", "cache", "demo"),
    *("estimate", "inspect", "convert", "resize", "merge", "extract", "average", "kit", "push"),
    *("submit", "jobs", "worker", "ui", "mcp"),
)
HEAVY = ("torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes")
RUN = "import sys; sys.argv[0] = 'lora-fp8'; from lora_fp8.cli import main; main()"


@dataclass
class Answer:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """ask("check", "job.toml"): a command in this process, through `lora_fp8.cli.main`."""

    def ask(*arguments: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["lora-fp8", *map(str, arguments)])
        capfd.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return Answer(code, out, err)

    return ask


def fresh(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python in a new process, with the checkout importable."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )


@pytest.fixture
def job_file(job: Callable[..., settings.Job], tmp_path: Path) -> Callable[..., Path]:
    """job_file("train.steps=3"): a job of the shared fixtures, written as a file."""

    def write(*overrides: str, family: str = "sd15") -> Path:
        path = tmp_path / "job.toml"
        path.write_text(config.dumps(job(*overrides, family=family)), encoding="utf-8")
        return path

    return write


# ------------------------------------------------------------------------------------------------------ help, and speed


EACH_HELP = f"""
import contextlib, io, sys
from lora_fp8.cli import main

for command in sys.argv[1:]:
    sys.argv = ["lora-fp8", *command.split(), "--help"]
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main()
    print(command, len(text.getvalue()) > 100, sorted(set(sys.modules) & {set(HEAVY)}))
"""


def test_help_loads_no_torch_and_names_every_command() -> None:
    first = fresh(RUN, "--help")
    assert first.returncode == 0 and all(f"\n  {command} " in first.stdout for command in COMMANDS), first
    answer = fresh(EACH_HELP, *COMMANDS)
    assert answer.stdout.splitlines() == [f"{command} True []" for command in COMMANDS], answer


ANSWER = """
import atexit, sys, threading
from lora_fp8 import cli
from lora_fp8.cli import options

atexit.register(print, "taken apart")
if sys.argv[1] == "thread":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
@options.answers
def command():
    sys.stdout.write("x" * 100_000 + "\\n")  # more than a pipe holds
def other():
    print("done")
cli.commands.main = {"other": other}.get(sys.argv[1], command)
cli.run_program()
"""


@pytest.mark.parametrize(
    "how, expected", [("answer", "x" * 100_000), ("thread", "taken apart"), ("other", "taken apart")]
)
def test_only_a_process_that_had_to_answer_ends_at_once(how: str, expected: str) -> None:
    """All is printed. Where something still runs, or the command does more, Python ends the process as usual."""
    ended = fresh(ANSWER, how)
    assert (ended.returncode, ended.stdout.splitlines()[-1], ended.stderr) == (0, expected, "")


def test_help_answers_at_once() -> None:
    """Compared with what its libraries take to be imported, each time beside it: a slow machine slows both."""

    def cpu_seconds(script: str, *arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert fresh(script, *arguments).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    ratios = [cpu_seconds(RUN, "--help") / cpu_seconds("import typer, pydantic, tomlkit") for _ in range(3)]
    print(ratios)
    assert min(ratios) < 2


def test_an_unknown_command_or_option_is_the_users_mistake(ask: Callable[..., Answer]) -> None:
    assert ask("trian").code == 2
    assert ask("train", "--nonsense", "x.toml").code == 2
    assert ask("train").code == 2


# ----------------------------------------------------------------------------------------------------------- new, check


def test_new_writes_a_file_that_check_accepts(
    ask: Callable[..., Answer],
    tmp_path: Path,
    pictures: Path,
    tiny: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for family, preset in (("sd15", "character"), ("sdxl", "style"), ("flux", "concept")):
        path = tmp_path / "deeper" / f"{family}.toml"
        answer = ask("new", path, "--family", family, "--preset", preset, "--preset", "vram_12gb")
        assert answer.code == 0 and str(path) in answer.out and not answer.err
        missing = ask("check", path)
        assert missing.code == 2 and missing.err.startswith(f"{path}: 2 problems") and "my_pictures" in missing.err
        (tmp_path / "my_pictures").symlink_to(pictures)
        accepted = ask("check", path, "--set", f"model.path='{tiny(family)}'")
        assert accepted.code == 0 and "5 images" in accepted.out and accepted.out.endswith("no problems found\n"), (
            accepted
        )
        (tmp_path / "my_pictures").unlink()
        job = config.load(path)
        assert (job.name, job.model.family, job.preset) == (family, family, [preset, "vram_12gb"])
        assert job.train.batch_size * job.train.accumulate == 2
        # With --all, the presets' values are written out.
        assert ask("new", path, "--force", "--all", "--family", family, "--preset", preset, "--card", "12").code == 0
        assert config.load(path) == job.model_copy(update={"preset": []})


def test_new_knows_a_base_of_every_family(ask: Callable[..., Answer], tmp_path: Path) -> None:
    for family in families.list_families():
        path = tmp_path / f"{family}.toml"
        assert ask("new", path, "--family", family).code == 0
        model = config.load(path).model
        assert (model.family, model.path) == (family, config.load(ROOT / "configs" / f"{family}.toml").model.path)


def test_new_refuses_to_overwrite_and_to_guess(ask: Callable[..., Answer], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("precious", encoding="utf-8")
    answer = ask("new", path)
    assert answer.code == 2 and "exists already" in answer.err and path.read_text(encoding="utf-8") == "precious"
    assert ask("new", path, "--force").code == 0 and config.load(path).name == "mine"
    unknown = ask("new", tmp_path / "other.toml", "--family", "sdx1", "--preset", "charcter")
    assert unknown.code == 2 and "did you mean 'sdxl'?" in unknown.err and "did you mean 'character'?" in unknown.err
    assert not (tmp_path / "other.toml").exists()
    assert ask("new", path / "inside.toml").code == 2  # a file where a folder would have to be
    odd = tmp_path / "🦊 'x'.toml"
    assert ask("new", odd).code == 0 and config.load(odd).name == "🦊 'x'"


def test_names_that_are_no_utf8_work_or_are_one_line(
    ask: Callable[..., Answer], tmp_path: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files and folders that an old system, an archive or a camera has named."""
    monkeypatch.setenv("LORA_FP8_HOME", str(tmp_path / "home"))
    here = tmp_path / os.fsdecode(b"caf\xe9")
    here.mkdir()
    refused = ask("new", here.with_suffix(".toml"))
    assert refused.code == 2 and "name: expected text in UTF-8, got 'caf\\udce9'" in refused.err
    good = here / "good.toml"
    assert ask("new", good).code == 0
    given = ("--set", f"dataset.folders=[{{path='{pictures}'}}]", "--set", "model.path=demo")
    assert ask("check", good, *given).code == 0
    monkeypatch.chdir(here)
    placed = ask("submit", good, "--no-worker", *given)  # which writes down where the run will be
    assert placed.code == 2 and "the queue accepts UTF-8 text only" in placed.err and "\n" not in placed.err.strip()
    shutil.copytree(pictures, here / "pictures")
    assert ask("dataset", "edit", here / "pictures", "--add-tag", "new").code == 0
    (here / "config.toml").write_text("", encoding="utf-8")
    assert "no training is running in this folder" in ask("stop", here).out
    assert ask("jobs", "show", here).code == 0
    assert ask("jobs", "run", "verify", "--no-worker", "--", "x").code == 2  # that folder is where it would run
    monkeypatch.chdir(tmp_path)
    assert ask("jobs", "run", "verify", "--no-worker", "--", here).code == 0
    assert json.loads(ask("jobs", "--json").out)[0]["command"] == ["verify", str(here)]


def test_what_the_system_refuses_is_one_line(
    ask: Callable[..., Answer], tmp_path: Path, pictures: Path, no_privilege: None
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0)
    deep = tmp_path / ("x" * 300) / "new.toml"
    for path, reason in ((folder / "new.toml", "Permission denied"), (deep, "File name too long")):
        refused = ask("new", path)
        assert refused.code == 2 and refused.err == f"{path}: the file cannot be written ({reason})\n"


@pytest.fixture
def five_faults(tmp_path: Path) -> Path:
    """A folder with one good picture and five that each have something else wrong."""
    folder = tmp_path / "faulty"
    folder.mkdir()
    for name in ("good", "torn", "empty", "latin", "lonely", "text"):
        Image.radial_gradient("L").convert("RGB").save(folder / f"{name}.{'jpg' if name == 'torn' else 'png'}")
        if name != "lonely":
            (folder / f"{name}.txt").write_text(f"a picture, {name}", encoding="utf-8")
    whole = (folder / "torn.jpg").read_bytes()
    (folder / "torn.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "latin.txt").write_bytes("a café".encode("latin-1"))
    (folder / "text.png").write_bytes(b"This is no picture at all.")
    return folder


FAULTS = {
    "torn.jpg": "the file is truncated",
    "empty.png": "the file is empty (0 bytes)",
    "latin.txt": "the text is not UTF-8 at byte 5",
    "lonely.png": "has no caption (lonely.txt)",
    "text.png": "this is not a readable image",
}


def test_check_finds_all_five_faults_before_torch_is_even_loaded(
    five_faults: Path, tmp_path: Path, tiny: Callable
) -> None:
    path = tmp_path / "job.toml"
    text = f"model = {{family = 'sd15', path = '{tiny('sd15')}'}}\ndataset = {{folders = [{{path = '{five_faults}'}}]}}"
    path.write_text(text, encoding="utf-8")
    script = f"{RUN.replace('main()', '')}\ntry:\n    main()\nfinally:\n    print(set(sys.modules) & {set(HEAVY)})"
    for arguments in (["check", str(path)], ["check", str(path), "--json"]):
        answer = fresh(script, *arguments)
        assert answer.returncode == 2 and answer.stdout.endswith("set()\n"), answer
        assert "Traceback" not in answer.stdout + answer.stderr
        if "--json" in arguments:
            report = json.loads(answer.stdout.removesuffix("set()\n"))
            found = report["problems"]
            assert report["ok"] is False and not answer.stderr
        else:
            first, *found = answer.stderr.splitlines()
            assert first == f"{path}: 5 problems"
        assert len(found) == 5, found
        for name, words in FAULTS.items():
            assert [line for line in found if str(five_faults / name) in line and words in line], (name, found)


def test_check_lists_all_todos_and_looks_for_files_beside_wrong_settings(
    ask: Callable[..., Answer], tmp_path: Path
) -> None:
    """An import leaves TODOs; folders and the base are looked for where their own settings are valid."""
    path, nowhere = tmp_path / "job.toml", tmp_path / "nowhere"
    path.write_text(
        f"[model]\nfamily = 'sd15'\npath = 'TODO'\n[train]\nsteps = 'TODO'\n"
        f"[[dataset.folders]]\npath = 'TODO'\n[[dataset.folders]]\npath = '{nowhere}'\n",
        encoding="utf-8",
    )
    todos = [
        f"{key}: this setting must still be filled in (TODO)"
        for key in ("train.steps", "model.path", "dataset.folders.0.path")
    ]
    answer = ask("check", path)
    first, *lines = answer.err.splitlines()
    assert answer.code == 2 and first == f"{path}: 4 problems"
    assert (
        sorted(line.strip() for line in lines[:3]) == sorted(todos) and f"folder {nowhere} does not exist" in lines[3]
    )
    report = json.loads(ask("check", path, "--json", "--set", "train.steps=4").out)
    assert len(report["problems"]) == 3 and set(todos[1:]) < set(report["problems"])
    base = ask("check", path, "--set", "model.path=no.safetensors", "--set", "dataset.folders.0.repeats=x")
    assert "model.path = 'no.safetensors' does not exist" in base.err and "repeats" in base.err
    # The base is not looked for by a family that does not exist.
    other = ask("check", path, "--set", "model.path=no.safetensors", "--set", "model.family=sdx1")
    assert "unknown architecture 'sdx1'" in other.err and "'no.safetensors'" not in other.err


def test_check_names_the_file_of_targets_that_no_layer_has(
    ask: Callable[..., Answer], job_file: Callable[..., Path]
) -> None:
    path, line = job_file(), "adapter.targets: 'to_qq' is not the ending of any layer of Stable Diffusion 1.5"
    assert ask("check", path, "--set", 'adapter.targets=["to_qq"]').err == f"{path}: 1 problem\n  {line}\n"
    report = json.loads(ask("check", path, "--json", "--set", 'adapter.targets=["to_qq"]').out)
    assert report["problems"] == [line]
    assert ask("estimate", path, "--set", 'adapter.targets=["to_qq"]').err == f"{line}\n"


@pytest.mark.parametrize("command", ["check", "train", "submit", "dataset"])
def test_two_values_of_one_setting_are_refused(
    ask: Callable[..., Answer], job_file: Callable[..., Path], command: str
) -> None:
    answer = ask(command, job_file(), "--set", "train.steps=4", "--set", "train.steps = 5")
    assert answer.code == 2 and answer.err == "--set train.steps: the setting is given twice, as 4 and as 5. Keep one\n"
    again = ask("check", job_file(), "--set", "train.steps=4", "--set", "train.steps = 4")
    assert again.code == 0


def test_plan_tells_that_sensitivity_will_move_layers(
    ask: Callable[..., Answer], job_file: Callable[..., Path]
) -> None:
    plain, path = ask("plan", job_file()), job_file("quantize.sensitivity='auto'", "quantize.sensitivity_bound=0.02")
    assert plain.code == 0 and "sensitivity" not in plain.out
    assert "layers on its images, and stores those with an error above 0.02 in int8 or bf16" in ask("plan", path).out
    (note,) = json.loads(ask("plan", path, "--json").out)["notes"]
    assert f"lora-fp8 precision {path}" in note


def test_training_refuses_the_same_five_before_it_makes_a_run(
    ask: Callable[..., Answer], five_faults: Path, job_file: Callable[..., Path], tmp_path: Path
) -> None:
    answer = ask("train", job_file(f"dataset.folders=[{{path='{five_faults}'}}]"))
    assert answer.code == 2 and all(name in answer.err for name in FAULTS) and answer.err.startswith("dataset: 5 prob")
    assert not (tmp_path / "runs" / "lora").exists()


def test_check_tells_what_has_no_effect_and_what_the_base_predicts(
    ask: Callable[..., Answer], job_file: Callable[..., Path]
) -> None:
    idle = ("preview.prompts=[]", "preview.steps=7", "quantize.storage=none", "quantize.keep=['to_q']")
    answer = ask("check", job_file(), *(word for one in idle for word in ("--set", one)))
    assert answer.code == 0 and "predicts epsilon" in answer.out
    for line in (
        "preview.steps has no effect without preview.prompts",
        "quantize.keep has no effect without quantize.",
    ):
        assert f"warning: {line}" in answer.out, answer.out
        assert f"note: {line}" in ask("estimate", job_file(), *(w for one in idle for w in ("--set", one))).out
    facts = ("quantize.compute=fp8", "quantize.fp8_min_features=99999", "model.revision=v2")
    given = [word for one in facts for word in ("--set", one)]
    for line in (
        "quantize.compute has no effect: no layer can use an FP8 matmul",
        "model.revision has no effect: model.path is a local path",
    ):
        assert f"warning: {line}" in ask("check", job_file(), *given).out
        assert f"note: {line}" in ask("estimate", job_file(), *given).out
    assert "warning: quantize.compute has no effect: no layer" in ask("plan", job_file(), *given).out


def test_check_finds_what_would_stop_the_training_later(
    ask: Callable[..., Answer], job_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job_file()
    assert ask("check", path).code == 0
    for override, words in {
        "model.path=./not/here": "model.path = './not/here' does not exist",
        "model.path=model.safetensors": "does not exist",
        "model.path=~no-such-user/models/x": "does not exist",
        "model.path=models/misspelt.safetensors": "does not exist",
        "dataset.bucket_step=64": "dataset.resolution = 48 is smaller than the bucket step",
        "dataset.folders.0.path=nowhere": "folder nowhere does not exist",
        "dataset.max_pixels=4096": "more than dataset.max_pixels = 4,096",
        "train.stepz=4": "did you mean train.steps?",
    }.items():
        answer = ask("check", path, "--set", override)
        assert answer.code == 2 and words in answer.err, (override, answer)
        report = json.loads(ask("check", path, "--set", override, "--json").out)
        assert not report["ok"] and any(words in line for line in report["problems"])
    # Where it would write: tried, and nothing is left behind.
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    lost = ("output_dir", "dataset.cache_dir")
    places = ask("check", path, *(part for key in lost for part in ("--set", f"{key}={tmp_path / 'taken' / 'deeper'}")))
    assert places.code == 2 and places.err.count("cannot be written") == 2 and all(key in places.err for key in lost)
    assert sorted(tmp_path.rglob("*")) == before
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        for command in ("check", "train"):
            answer = ask(command, path)
            assert answer.code == 2 and "the disk is too full for this job" in answer.err, answer
        answer = ask("estimate", path)
        assert answer.code == 0 and "\nnote: " in answer.out and "the disk is too full for this job" in answer.out
    # What training refuses before it encodes anything, all of it at once.
    more = (
        "adapter.init_from=none.safetensors",
        "validation.pictures=5",
        "validation.every=1",
        "quantize.keep=['nope']",
    )
    later = ask("check", path, *(part for one in more for part in ("--set", one)))
    told = ("this file does not exist", "none of 5 images would be left", "quantize.keep")
    assert later.code == 2 and all(words in later.err for words in told), later
    # What the family alone knows: another architecture, sides that it cannot have, its own resolution for "auto".
    other = ask("check", path, "--set", "model.family=sdxl")
    assert other.code == 2 and "is Stable Diffusion 1.5" in other.err, other
    uneven = ask("check", job_file(family="flux"), "--set", "dataset.bucket_step=24")
    assert uneven.code == 2 and "needs a multiple of 16" in uneven.err, uneven
    path = job_file()
    auto = ask("check", path, "--set", "dataset.resolution=auto", "--set", "dataset.bucket_step=auto")
    assert auto.code == 0 and "5 images have less than a quarter of the pixels" in auto.out
    assert "buckets 320x640: 1, 512x512: 3, 640x320: 1" in auto.out, auto.out
    Image.new("RGB", (48, 48)).save(tmp_path / "long.png")
    (tmp_path / "long.txt").write_text("a photo of a red cat, " * 20 + "and the end", encoding="utf-8")
    long = ask("check", path, "--set", f"dataset.folders=[{{path='{tmp_path}'}}]")
    assert (
        long.code == 0
        and "warning: 1 of 1 captions and prompts exceed the limit of the text encoder, 75 tokens" in long.out
    ), long
    negative = f"preview.negative='{'blurry, ' * 60}'"
    drawn = ask("check", path, "--set", "preview.prompts=['a']", "--set", negative, "--set", "adapter.rank=600")
    assert drawn.code == 0 and "captions and prompts exceed the limit of the text encoder, 75 tokens" in drawn.out, (
        drawn
    )
    assert drawn.out.count("adapter.rank 600 exceeds") == 1 and "layers, such as" in drawn.out
    hub = ask("check", path, "--set", "model.path=somebody/something")
    assert hub.code == 2 and "cannot be looked up: HF_HUB_OFFLINE forbids connections" in hub.err
    fine = ask("check", path, "--json")
    report = json.loads(fine.out)
    assert fine.code == 0 and report["ok"] and report["problems"] == []
    assert report.keys() == {"ok", "problems", "lines", "translations"}
    assert report["translations"]["zh-CN"].keys() == set(report["lines"])  # the page shows them in Chinese


@pytest.mark.parametrize(
    "words", [["--lang", "xx", "jobs"], ["report", "run", "--lang", "xx"], ["--lang", "C", "jobs"]]
)
def test_a_language_that_there_is_not_is_refused(ask: Callable[..., Answer], words: list[str]) -> None:
    given = words[words.index("--lang") + 1]
    answer = ask(*words)
    assert (
        answer.code == 2 and f"--lang: there are no messages in the language '{given}'; accepted: en, zh" in answer.err
    )


def test_a_language_of_the_environment_may_be_any(ask: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("xx", "C", "de_DE.UTF-8"):
        monkeypatch.setenv("LORA_FP8_LANG", value)
        answer = ask("cache", "nowhere")
        assert answer.code == 2 and "no such folder" in answer.err
    for value in ("en", "zh", "zh_CN", "zh-CN", "en_US.UTF-8"):
        assert ask("--lang", value, "cache", "nowhere").code == 2
        assert os.environ["LORA_FP8_LANG"] == ("zh-CN" if value.startswith("zh") else "en")


# ---------------------------------------------------------------------------------------------------------------- cache


def test_the_cache_is_told_and_pruned(ask: Callable[..., Answer], tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    for i, (kind, days) in enumerate([("latents", 40), ("latents", 3), ("conds", 0)]):
        name = f"{i:02x}" + "0" * 62
        path = folder / kind / name[:2] / f"{name}.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * (1 << 20))
        os.utime(path, (0, time.time() - days * 86400))
    answer = ask("cache", folder)
    assert answer.code == 0 and answer.out.splitlines() == [
        f"{folder}: 3 entries, 3.0 MiB",
        "last used between 40 and 0 days ago",
    ]
    told = json.loads(ask("cache", folder, "--json").out)
    assert (told["entries"], told["bytes"], told["deleted"]) == (3, 3 << 20, 0)
    assert abs(time.time() - told["newest_use"]) < 86400 and told["newest_use"] - told["oldest_use"] > 39 * 86400
    pruned = json.loads(ask("cache", folder, "--prune-unused-days", "30", "--json").out)
    assert (pruned["entries"], pruned["deleted"], pruned["deleted_bytes"]) == (2, 1, 1 << 20)
    assert json.loads(ask("cache", folder, "--limit", "0.002", "--json").out)["deleted"] == 0  # 2 MiB are 0.00195 GiB
    pruned = ask("cache", folder, "--limit", "0.0019")
    assert pruned.out.startswith(f"{folder}: 1 entry deleted, 1.0 MiB\n{folder}: 1 entry, 1.0 MiB\n")
    for wrong in ("0", "-3", "0.5"):
        refused = ask("cache", folder, "--prune-unused-days", wrong)
        assert refused.code == 2 and "at least 1" in refused.err and len(list(folder.glob("*/*/*"))) == 1
    assert json.loads(ask("cache", folder, "--limit", "0", "--json").out)["deleted"] == 0  # used today
    assert "entries of the last 24 hours are kept" in ask("cache", folder, "--limit", "0").out
    assert "24 hours" not in pruned.out and pruned.out.endswith("last used 0 days ago\n")
    nowhere = ask("cache", tmp_path / "nowhere")
    assert nowhere.code == 2 and "no such folder" in nowhere.err
    empty = ask("cache", tmp_path)
    assert empty.code == 0 and empty.out == f"{tmp_path}: 0 entries, 0.0 MiB\n"


# ------------------------------------------------------------------------------------------------------------- training


def test_train_stop_resume_export_verify(
    ask: Callable[..., Answer], job_file: Callable[..., Path], tmp_path: Path, tree_hash: Callable
) -> None:
    path, folder = job_file("train.steps=4", "checkpoint.every=2", "export.every=2"), tmp_path / "runs" / "lora"
    trained = ask("train", path)
    midway = tree_hash(folder / "export" / "step-000002")
    assert trained.code == 0 and "== train" in trained.out
    files = sorted((folder / "export").glob("*.safetensors"))
    assert len(files) == 2 and all(str(file) in trained.out for file in files)

    again = ask("train", path)  # the name is taken: nothing is overwritten
    before = tree_hash(folder)
    assert again.code == 2 and "this folder already contains a run" in again.err and "lora-fp8 resume" in again.err

    idle = ask("stop", folder)
    assert idle.code == 0 and "no training is running in this folder" in idle.out
    assert tree_hash(folder) == before and not (folder / "control" / "stop").exists()

    # With another dtype: the same numbers, rounded differently, in the same files.
    full = load_file(ask_export(ask, folder, "fp32", tmp_path / "fp32"))
    half = load_file(ask_export(ask, folder, "fp16", tmp_path / "fp16"))
    assert full.keys() == half.keys() and {t.dtype for t in full.values()} == {torch.float32}
    for name, tensor in full.items():
        if not name.endswith(".alpha"):
            assert half[name].dtype == torch.float16 and torch.equal(tensor.to(torch.float16), half[name]), name
    early = ask("export", folder, "--step", "2")
    assert early.code == 0 and all("step-000002" in line for line in early.out.splitlines())
    assert tree_hash(folder / "export" / "step-000002") == midway and len(midway) == 2
    assert ask("export", folder, "--step", "3").code == 2
    assert ask("export", folder, "--set", "export.dtype=fp64").code == 2
    (kohya,) = json.loads(ask("export", folder, "--format", "kohya", "--json").out)
    before = tree_hash(folder)
    seen = json.loads(ask("export", folder, "--preview-metadata", "--format", "kohya", "--json").out)
    with safetensors.safe_open(kohya, framework="pt") as file:
        written = {key: value for key, value in file.metadata().items() if "hash" not in key or "base" in key}
    assert seen.keys() == {"kohya"} and seen["kohya"].keys() == written.keys() and tree_hash(folder) == before
    assert "comfy'" in ask("export", folder, "--format", "comfy").err
    again = tmp_path / "again 😀.toml"
    refused = ask("new", again, "--from-lora", files[0], "--preset", "style", "--trigger", "zibo", "--controls", folder)
    assert refused.code == 2 and "Remove --controls, --trigger, --preset" in refused.err and not again.exists()
    assert ask("new", again, "--from-lora", files[0]).code == 0
    assert config.load(again).train == config.load(folder / "config.toml").train
    assert config.load(again).name == "again 😀"

    checked = ask("verify", files[0], "--json")
    assert checked.code == 0 and json.loads(checked.out)["ok"] is True
    with open(files[0], "r+b") as file:  # one byte of a tensor
        file.seek(-3, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-3, os.SEEK_END)
        file.write(bytes([byte ^ 0xFF]))
    assert ask("verify", files[0]).code == 3

    # A resume that is refused leaves the run as it had ended for all who look.
    ended = job_state.view_shell_run(folder, run_events.Follower())
    assert (ended.state, ended.step, ended.steps) == ("done", 4, 4)
    for change, said in (("seed=7", "seed: was 0"), ("train.steps=2", "raise train.steps")):
        refused = ask("resume", folder, "--set", change)
        assert refused.code == 2 and said in refused.err
        assert run.Run.open(folder).read_events()[-1]["event"] == "refused"
        seen = job_state.view_shell_run(folder, run_events.Follower())
        assert (seen.state, seen.sentence, seen.step, seen.steps) == (ended.state, ended.sentence, 4, 4)
        assert run_log.RunLog(folder / "events.jsonl").read().facts.end["event"] == "done"
        assert ask("report", folder).code == 0
        assert str(tmp_path) not in (folder / "report.html").read_text(encoding="utf-8")
    for change in ("name=other", f"output_dir={tmp_path}"):
        refused = ask("resume", folder, "--set", change)
        assert (
            refused.code == 2
            and "a run keeps its settings and its folder" in refused.err
            and not (tmp_path / "other").exists()
        )

    # The folder is moved; more steps than before are wanted there.
    moved = tmp_path / "elsewhere 🦊"
    folder.rename(moved)
    longer = ask("resume", moved, "--set", "train.steps=6")
    assert longer.code == 0 and "resuming from step-000004" in longer.out, longer
    assert not folder.exists() and (moved / "checkpoints" / "step-000006").is_dir()


def ask_export(ask: Callable[..., Answer], folder: Path, dtype: str, keep: Path) -> Path:
    """Export in this dtype and keep one of the files."""
    answer = ask("export", folder, "--set", f"export.dtype={dtype}", "--set", 'export.formats=["kohya"]')
    assert answer.code == 0
    (written,) = answer.out.splitlines()
    with safetensors.safe_open(written, framework="pt") as file:
        assert file.metadata()
    return Path(written).rename(keep)


def test_a_terminal_that_lacks_a_character_ends_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", screen)
    commands.run_guarded(lambda: events.print_event({"event": "warning", "text": "a 猫"}))
    screen.flush()
    assert screen.buffer.getvalue() == b"warning: a \\u732b\n"
    monkeypatch.setenv("LORA_FP8_MESSAGE", str(tmp_path / "message"))
    with pytest.raises(SystemExit, match="2"):
        commands._fail("a name that is no text: \udcff", 2)
    assert json.loads((tmp_path / "message").read_bytes()) == {"text": "a name that is no text: \\udcff"}


def test_events_as_json_lines(ask: Callable[..., Answer], job_file: Callable[..., Path]) -> None:
    answer = ask("train", job_file("train.steps=2"), "--json")
    assert answer.code == 0
    events = [json.loads(line) for line in answer.out.splitlines()]
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2] and events[-1]["event"] == "done"


def test_a_config_in_place_of_its_run(
    ask: Callable[..., Answer], job_file: Callable[..., Path], tmp_path: Path
) -> None:
    path, run = job_file(), tmp_path / "runs" / "lora"
    for command in ("resume", "stop"):
        answer = ask(command, path)
        assert (
            answer.code == 2
            and f"its run folder {run} does not exist yet. `lora-fp8 train {path}` starts the run" in answer.err
        )
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    assert ask("resume", path).err == f"{path}: this is a config; give its run folder: {run}\n"
    path.write_text("no config", encoding="utf-8")
    assert ask("resume", path).err == f"{path}: this is a file; give a run folder\n"


@pytest.mark.parametrize("command", ["resume", "stop", "export"])
def test_a_folder_that_is_no_run(ask: Callable[..., Answer], tmp_path: Path, command: str) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        answer = ask(command, folder)
        assert answer.code == 2 and "not a run folder" in answer.err and answer.err.count("\n") == 1, answer
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_config_that_is_not_there(ask: Callable[..., Answer], tmp_path: Path, command: str) -> None:
    answer = ask(command, tmp_path / "absent.toml")
    assert answer.code == 2 and "this config file does not exist" in answer.err and answer.err.count("\n") == 1
    (tmp_path / "character.toml").touch()
    (tmp_path / "zibo.toml").touch()
    for given in ("character", "charcter.toml"):
        answer = ask(command, tmp_path / given)
        assert answer.code == 2 and f"did you mean {tmp_path / 'character.toml'}?" in answer.err
        assert answer.err.count("\n") == 1
    assert "`lora-fp8 new " in ask(command, tmp_path / "sketch.toml").err, "the ending alone makes no name similar"


def test_a_base_that_cannot_be_had_is_one_line(
    ask: Callable[..., Answer], job_file: Callable[..., Path], tmp_path: Path
) -> None:
    """The tests run with HF_HUB_OFFLINE=1: the hub cannot be reached."""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    path = job_file()
    for override, words in {
        "model.path=somebody/no-such-model": "'somebody/no-such-model' is not on this machine, and cannot be looked up",
        "model.path=/nowhere/model.safetensors": "does not exist",
        "model.family=sdxl": "model.family = 'sdxl'",
        "model.family=sd51": "unknown architecture 'sd51', did you mean 'sd15'?",
    }.items():
        answer = ask("train", path, "--set", override)
        assert answer.code == 2 and words in answer.err, (override, answer)
        assert len([line for line in answer.err.splitlines() if not line.endswith(": 1 problem")]) == 1, answer.err
    assert not (tmp_path / "runs" / "lora").exists()


def test_each_ending_has_its_code(
    ask: Callable[..., Answer], job_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = job_file()
    for error, code, words in (
        (UserError("wrong"), 2, "wrong"),
        (UserErrors(["a", "b"], "x"), 2, "x: 2 problems"),
        (RunFailure("failed"), 3, "failed"),
        (Stopped("saved"), 75, "saved"),
    ):
        monkeypatch.setattr(train, "run", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
        answer = ask("train", path)
        assert answer.code == code and words in answer.err and not answer.out, answer
        # In the second of several processes: what all of them find is said by the first.
        monkeypatch.setenv("RANK", "1")
        answer = ask("train", path)
        assert answer.code == code and answer.err == (f"process 1: {words}\n" if code == 3 else ""), answer
        monkeypatch.delenv("RANK")
    # A mistake of ours is not hidden: it keeps its traceback.
    monkeypatch.setattr(train, "run", lambda *_, **__: (_ for _ in ()).throw(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        ask("train", path)


def test_an_interrupt_that_a_library_makes_its_own_error_is_an_interrupt(
    ask: Callable[..., Answer], job_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers, interrupted while it imports a part, says that the part's requirements are not defined."""

    def run(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def hide(*_: object, **__: object) -> None:
        try:
            run()
        except KeyboardInterrupt:
            raise ModuleNotFoundError("Could not import module") from None

    for interrupted in (run, hide):
        monkeypatch.setattr(train, "run", interrupted)
        answer = ask("train", job_file())
        assert (answer.code, answer.err.strip()) == (130, "interrupted")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_asking_a_run_to_stop_ends_it_with_75_and_resume_finishes_it(
    ask: Callable[..., Answer], job_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lora-fp8 stop` while step 2 is being computed: step 2 is finished and saved."""
    folder = tmp_path / "runs" / "lora"
    original, asked = step.predict_and_compare, []

    def loss(*arguments: object) -> torch.Tensor:
        if len(asked) == 2:  # preflight, step 1, step 2
            other = run.Run.open(folder)
            assert other.is_locked()
            other.request("stop")
        asked.append(1)
        return original(*arguments)

    monkeypatch.setattr(step, "predict_and_compare", loss)
    stopped = ask("train", job_file("checkpoint.every=100"))
    assert stopped.code == 75 and f"lora-fp8 resume {folder}" in stopped.err, stopped
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-000002"]
    finished = ask("resume", folder)
    assert finished.code == 0 and "resuming from step-000002" in finished.out
    assert len(list((folder / "export").glob("*.safetensors"))) == 2


def test_the_script_for_accelerate_is_the_same_thing(job_file: Callable[..., Path], tmp_path: Path) -> None:
    path = job_file("train.steps=2", "preview.prompts=[]")
    script = str(ROOT / "train_lora.py")
    wrong = subprocess.run(
        [sys.executable, script, "--config", str(path), "--set", "train.stepz=2"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert wrong.returncode == 2 and "did you mean train.steps?" in wrong.stderr and "Traceback" not in wrong.stderr
    done = subprocess.run(
        [sys.executable, script, "--config", str(path), "--json"],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0 and json.loads(done.stdout.splitlines()[-1])["event"] == "done", done.stderr
    assert len(list((tmp_path / "runs" / "lora" / "export").iterdir())) == 2
