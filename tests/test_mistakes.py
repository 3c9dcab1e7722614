"""Mistakes that people make in settings, and the one message that each is answered with, in both languages."""

import json
import shlex
import time
from pathlib import Path

import pytest
from PIL import Image

from lora_fp8 import cli, config
from lora_fp8.errors import UserError, UserErrors

JOB = "[model]\nfamily = 'sd15'\npath = 'demo'\n"
FOLDER = f"{JOB}[[dataset.folders]]\n"

MISTAKES: dict[str, tuple[str, str, str]] = {
    "Windows path in double quotes": (
        FOLDER + r'path = "C:\Users\me\pics"',
        r"line 5: in double quotes, \ begins an escape. Use single quotes or /: path = 'C:\Users\me\pics'",
        r"第 5 行：双引号里的 \ 是转义符。请用单引号或 /：path = 'C:\Users\me\pics'",
    ),
    "Windows path whose escapes are valid": (
        FOLDER + r'path = "C:\new\train"',
        r"Use single quotes or /: path = 'C:\new\train'",
        r"请用单引号或 /：path = 'C:\new\train'",
    ),
    "Windows path that ends in a backslash": (
        FOLDER + r'path = "D:\pics\"',
        r"Use single quotes or /: path = 'D:\pics'",
        r"请用单引号或 /：path = 'D:\pics'",
    ),
    "path without quotation marks": (
        FOLDER + "path = C:/my pics  # mine",
        "line 5: text needs quotation marks. Write path = 'C:/my pics'",
        "第 5 行：文字要加引号。请写 path = 'C:/my pics'",
    ),
    "variable in a path": (
        FOLDER + "path = '$HOME/no such pics'",
        "dataset.folders.0.path: $HOME is not expanded here. Write '~/no such pics'",
        "dataset.folders.0.path：这里不会展开 $HOME。请写 '~/no such pics'",
    ),
    "variable that nobody set": (
        FOLDER + "path = '%NO_SUCH_VARIABLE%/pics'",
        "%NO_SUCH_VARIABLE% is not expanded here. Write the path itself",
        "这里不会展开 %NO_SUCH_VARIABLE%。请直接写路径",
    ),
    "web address as a base": (
        JOB.replace("demo", "https://example.com/my/model.safetensors") + "[[dataset.folders]]\npath = 'pics'",
        "not from 'https://example.com/my/model.safetensors'. Download the file and give its path",
        "不能从 'https://example.com/my/model.safetensors' 下载。请先下载文件，再填写它的路径",
    ),
    "one bracket": (
        f"{JOB}[dataset.folders]\npath = 'pics'",
        "dataset.folders: write [[dataset.folders]] with two brackets",
        "dataset.folders：请写成 [[dataset.folders]]，两边各两个方括号",
    ),
    "key of another trainer": (
        f"network_dim = 32\n{FOLDER}path = 'pics'\n[train]\nlearning_rate = 1e-4",
        "network_dim: unknown setting; use adapter.rank",
        "network_dim：没有这个设置；请改用 adapter.rank",
    ),
    "TOML of another trainer": (
        "pretrained_model_name_or_path = 'x'\nnetwork_module = 'networks.lora'\nnetwork_dim = 8",
        "this is a settings file of another trainer. Convert it: lora-fp8 import-config ",
        "这是其他训练器的配置文件。请转换：lora-fp8 import-config ",
    ),
    "JSON of another trainer": (
        json.dumps({"LoRA_type": "Standard", "network_dim": 8, "pretrained_model_name_or_path": "x"}),
        "this is a settings file of another trainer. Convert it: lora-fp8 import-config ",
        "这是其他训练器的配置文件。请转换：lora-fp8 import-config ",
    ),
    "JSON of an unknown program": ('{"a": 1}', "this is JSON, not TOML", "这是 JSON，不是 TOML"),
    "YAML": ("job: x\nconfig:\n  a: 1", "this is YAML, not TOML", "这是 YAML，不是 TOML"),
    "script": ("#!/bin/sh\npython x.py", "this is a script, not TOML", "这是脚本，不是 TOML"),
    "many images without captions": (
        FOLDER + "path = 'pics'",
        "20 images have no caption: pics/00.png, pics/01.png, pics/02.png and 17 more. Write captions",
        "20 张图片没有标注：pics/00.png",
    ),
    "Python's True": (
        f"{FOLDER}path = 'pics'\n[memory]\ngradient_checkpointing = True",
        "line 7: True is not a TOML value. Write gradient_checkpointing = true",
        "第 7 行：True 不是 TOML 的值。请写 gradient_checkpointing = true",
    ),
    "curly quotation marks": (
        FOLDER + "path = “pics”",
        "line 5: TOML does not accept curly quotation marks. Write path = 'pics'",
        "第 5 行：TOML 不认识弯引号。请写 path = 'pics'",
    ),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a space and Chinese in its name, in which twenty images have no caption."""
    folder = tmp_path / "我的 训练"
    (folder / "pics").mkdir(parents=True)
    for number in range(20):
        Image.new("RGB", (64, 64), (number * 9, 0, 0)).save(folder / f"pics/{number:02}.png")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    return folder


def ask(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], language: str, *words: str
) -> tuple[int, str]:
    monkeypatch.setenv("LORA_FP8_LANG", language)
    monkeypatch.setattr("sys.argv", ["lora-fp8", *words])
    capfd.readouterr()
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0), capfd.readouterr().err


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_has_one_message(
    mistake: str, language: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text, *expected = MISTAKES[mistake]
    file = Path("my job.json" if text.startswith("{") else "my job.toml")
    file.write_text(text, encoding="utf-8")
    code, told = ask(monkeypatch, capfd, language, "check", str(file))
    assert code == 2 and expected[language == "zh"] in told
    assert told.count("\n") <= 3, "one or two sentences"


@pytest.mark.parametrize("language", ["en", "zh"])
def test_a_wrong_folder_for_dataset(
    language: str, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, told = ask(monkeypatch, capfd, language, "dataset", "pcis")
    assert code == 2 and str(place) in told
    assert {"en": "pcis: there is no folder or config file of this name", "zh": "pcis：没有这个文件夹或配置文件"}[
        language
    ] in told


def test_the_place_is_that_of_relative_paths(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An absolute path says itself where it was looked for."""
    for start, is_relative in (("", True), (f"{place}/", False), ("~/", False)):
        folder = f"[[dataset.folders]]\npath = '{start}pcis'\nmask = '{start}masks'\n"
        Path("job.toml").write_text(JOB + folder.replace(f"{start}pcis", "pics"), encoding="utf-8")
        texts = [ask(monkeypatch, capfd, "en", "check", "job.toml")[1]]
        Path("job.toml").write_text(JOB + folder, encoding="utf-8")
        texts += [
            ask(monkeypatch, capfd, "en", *words)[1] for words in (("check", "job.toml"), ("check", f"{start}no"))
        ]
        texts += [
            ask(monkeypatch, capfd, "en", "dataset", *words)[1] for words in ((f"{start}no",), ("import", f"{start}no"))
        ]
        assert all(("(looked in " in text) == is_relative for text in texts), texts


def test_what_is_printed_for_copying_can_be_pasted(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A shell splits the command into the words that were meant."""
    Path("other trainer.json").write_text(MISTAKES["JSON of another trainer"][0], encoding="utf-8")
    for words, command in (
        (("check", "other trainer.json"), ["lora-fp8", "import-config", "other trainer.json"]),
        (("check", "no such.toml"), ["lora-fp8", "new", "no such.toml"]),
    ):
        told = ask(monkeypatch, capfd, "en", *words)[1]
        begin = told.index("lora-fp8 ")
        assert shlex.split(told[begin:].split("`")[0])[:3] == command
    monkeypatch.setattr("sys.argv", ["lora-fp8", "new", "角色 一.toml"])
    cli.main()
    assert shlex.split(capfd.readouterr().out)[-1] == "角色 一.toml"


@pytest.mark.parametrize(
    "text",
    [
        r'path = "C:\\Users\\me"',
        r"path = 'C:\Users\me'",
        'path = "C:/Users/me"',
        'path = "a#b"  # C:\\new',
        "path = 'cost $5 and 50%'",
    ],
)
def test_right_paths_are_left_alone(text: str) -> None:
    assert config.loads(FOLDER + text).dataset.folders[0].path


def test_a_prompt_may_begin_with_a_letter_and_a_colon() -> None:
    text = f'{FOLDER}path = "pics"\n[preview]\nprompts = ["A:\\new"]\nnegative = "Q:\\nA"'
    assert config.loads(text).preview.prompts == ["A:\new"]


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("lr = 0,0001  # mine", "the decimal separator is a point. Write lr = 0.0001"),
        ("lr = 1,5e-4", "the decimal separator is a point. Write lr = 1.5e-4"),
        ("steps = 1,500", "a number cannot contain a comma. Write steps = 1500, or with a decimal point steps = 1.500"),
    ],
)
def test_a_number_with_a_comma(given: str, advice: str) -> None:
    with pytest.raises(UserErrors) as caught:
        config.loads(f"{JOB}[optimizer]\n{given}")
    assert caught.value.problems == [f"line 5: {advice}"]


def test_an_error_that_only_the_parser_knows_names_its_place() -> None:
    with pytest.raises(UserError, match=r"not valid TOML: .*line 2, column .*, in 'lr = 1e-4 5'$"):
        config.loads("a = 1\r\n  lr = 1e-4 5\r\n")
    with pytest.raises(UserError, match=r"characters\)$"):
        config.loads(f"lr = 1 {'x' * 1000}")
    with pytest.raises(ValueError, match=r"line 1, column \d+: [^']*$"):  # the queue's settings hold an address
        config.read_toml("webhook = 'https://a.example/secret' x")


@pytest.mark.parametrize(
    "text",
    [
        f"seed = 0.{'9' * 10**6}",
        f"a = {' ' * 10**5}x",
        f'path = "C:\\n{" " * 10**5}',
        f"{'a' * 10**5}",
        f"a.b{' ' * 10**5}= 3 4",
        f"{'-' * 10**5}=",
        f"{'=' * 10**5}",
        'x = "C:\\q"\n' * 10**4,
    ],
    ids=["number", "spaces", "open string", "word", "spaces before", "dashes", "equals", "many"],
)
def test_long_lines_are_read_in_time(text: str) -> None:
    """In hundredths of a second; a search that starts at each letter took minutes."""
    before = time.process_time()
    with pytest.raises(UserError):
        config.loads(text)
    assert time.process_time() - before < 20
