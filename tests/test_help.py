"""What `--help` shows, and what a mistake in a command line is answered, in both languages."""

import re
import unicodedata

import pytest
import typer.main
from typer.testing import CliRunner

from lora_fp8 import cli
from lora_fp8.cli import help

COMMAND = typer.main.get_command(cli.app)
INNER = [("dataset", name) for name in COMMAND.commands["dataset"].commands]  # type: ignore[attr-defined]
INNER += [("jobs", name) for name in COMMAND.commands["jobs"].commands]  # type: ignore[attr-defined]
INNER += [("remote", name) for name in COMMAND.commands["remote"].commands]  # type: ignore[attr-defined]
ALL = [(), *((name,) for name in COMMAND.commands), *INNER]  # type: ignore[attr-defined]


def shown(language: str, *words: str) -> str:
    result = CliRunner().invoke(cli.app, [*words, "--help"], env={"LORA_FP8_LANG": language}, prog_name="lora-fp8")
    assert result.exit_code == 0, result.output
    return result.output


def columns(line: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in line)


def test_every_command_is_in_one_group() -> None:
    names = [name for group in help.GROUPS.values() for name in group]
    assert len(names) == len(set(names))
    assert set(COMMAND.commands) <= set(names), "a new command goes into a group of cli/help.py"  # type: ignore[attr-defined]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_commands_fit_on_a_screen_and_each_has_a_whole_sentence(language: str) -> None:
    lines = shown(language).splitlines()
    assert len(lines) <= 59
    rows = [line for line in lines if re.match(r"  [a-z][a-z-]+ +\S", line) and line.split()[0] in COMMAND.commands]  # type: ignore[attr-defined]
    assert [row.split()[0] for row in rows] == [
        name
        for group in help.GROUPS.values()
        for name in group
        if name in COMMAND.commands  # type: ignore[attr-defined]
    ]
    assert all(row.endswith("." if language == "en" else "。") and "..." not in row for row in rows)
    assert language == "en" or all(re.search("[一-鿿]", row) for row in rows)


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_every_help_keeps_to_its_width_in_both_languages(words: tuple[str, ...]) -> None:
    english, chinese = (shown(language, *words) for language in ("en", "zh"))
    for text in (english, chinese):
        assert not [line for line in text.splitlines() if columns(line) > help.WIDTH and line.strip().count(" ") > 2]
    for option in re.findall(r"^  (--[\w-]+)", english.partition("\nOptions:")[2], re.MULTILINE):
        assert f"  {option}" in chinese
    assert re.search("[一-鿿]", chinese)
    assert not re.search("[一-鿿]", english)
    assert not re.search(r"[（“\[]$|^ *[，。；：、）”\]]", chinese, re.MULTILINE), "a line is broken inside brackets"
    assert not re.search(r"(?:default:|required|Options|Arguments|Show this)", chinese), chinese


def test_an_option_keeps_its_bounds_and_defaults() -> None:
    card = next(line for line in shown("en", "recipes").split("--")[1:] if line.startswith("card"))
    assert " ".join(card.split()).endswith("Default: as on this machine."), "and not a 0 that nobody may give"
    assert "[default: 7860; 0<=x<=65535]" in " ".join(shown("en", "ui").split())
    assert "[默认：7860; 0<=x<=65535]" in " ".join(shown("zh", "ui").split())
    assert re.search(r"--set KEY=VALUE +\S", shown("en", "train"))


MISTAKES = {
    "chek x": ("there is no command 'chek', did you mean 'check'?", "没有命令 'chek'，是不是 'check'？"),
    "check": ("lora-fp8 check: CONFIG is missing (Config file of the job)", "缺少 CONFIG（任务的配置文件）"),
    "check my pictures.toml": ("too many arguments: pictures.toml. A path with spaces", "含空格的路径要加引号"),
    "train --config a.toml": (
        "there is no option --config. Write the value without it: `lora-fp8 train CONFIG`.",
        "没有选项 --config。请直接写值，不写选项：`lora-fp8 train CONFIG`。",
    ),
    "check a.toml --jsn": ("there is no option --jsn, did you mean --json?", "没有选项 --jsn，是不是 --json？"),
    "jobs show 3 --lang zh": (
        "--lang is written before the command: `lora-fp8 --lang LANGUAGE jobs show`.",
        "--lang 要写在命令前面：`lora-fp8 --lang LANGUAGE jobs show`。",
    ),
    "train a.toml --network_dim 4": ("write --set adapter.rank=VALUE", "请写 --set adapter.rank=值"),
    "train a.toml --train.steps 4": ("write --set train.steps=VALUE", "请写 --set train.steps=值"),
    "train a.toml --max_train_steps 4": ("write --set train.steps=VALUE", "请写 --set train.steps=值"),
    "worker --idle soon": ("lora-fp8 worker: --idle: expected a number.", "--idle：应为数字"),
    "ui --port 99999": ("--port: expected a number <= 65535", "--port：应为 <= 65535 的数字"),
    "merge a.safetensors:1": ("--output is missing", "缺少 --output"),
    "jobs list": ("lora-fp8 jobs: there is no command 'list'", "没有命令 'list'"),
    "caption pics --model": ("--model needs a value", "--model 需要一个值"),
}


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_in_a_command_line_is_explained(
    line: str, language: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LORA_FP8_LANG", language)
    monkeypatch.setattr("sys.argv", ["lora-fp8", *line.split()])
    with pytest.raises(SystemExit) as end:
        cli.main()
    told = capsys.readouterr()
    assert end.value.code == 2 and not told.out
    assert MISTAKES[line][language == "zh"] in told.err and told.err.count("\n") == 1 and "--help`" in told.err
