"""Every sentence of the page exists in both languages, with the same places for values, and is used."""

import ast
import re
import string
import sys
import tomllib
from pathlib import Path

import gradio
import pytest

from lora_fp8.common import messages
from webui import translations

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from messages import extract

WEBUI = Path(translations.__file__).parent
CODE = [*WEBUI.rglob("*.py")]
OWN_TABLES = ("settings.toml",)  # labels of settings, by their key; tests of the form hold them against config


def sentences() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for file in sorted((WEBUI / "texts").glob("*.toml")):
        if file.name not in OWN_TABLES:
            found |= tomllib.loads(file.read_text(encoding="utf-8"))
    return found


def places(text: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}


@pytest.mark.parametrize("language", translations.LANGUAGES)
def test_every_sentence_is_there_and_is_not_empty(language: str) -> None:
    assert len(sentences()) > 100
    assert [key for key, texts in sentences().items() if not texts.get(language, "").strip()] == []


def test_both_languages_have_the_same_places() -> None:
    """The engine's English has words that Chinese leaves out (a plural's s): none may come on top."""
    different = {
        key: {language: sorted(places(text)) for language, text in texts.items()}
        for key, texts in sentences().items()
        if places(texts["zh-CN"]) - places(texts["en"])
        or (places(texts["en"]) - places(texts["zh-CN"]) and not key.startswith("engine."))
    }
    assert different == {}


def test_a_count_of_one_has_its_own_text() -> None:
    """No text counts "1 images": an English noun behind `count` is in the plural, so there is a text for 1."""
    unsaid = [
        key
        for key, texts in sentences().items()
        if re.search(r"\{count\} (less frequent |unreadable |base )?[a-z]+s\b", texts["en"]) and "en-one" not in texts
    ]
    assert unsaid == ["images.upload.many"]  # a number above a limit
    for key, texts in sentences().items():
        for language in translations.LANGUAGES:
            assert places(texts.get(f"{language}-one", "")) <= places(texts[language]) - {"count"}, key
    assert translations.say("en", "images.counts", count=1, without=1) == "1 image, 1 without a caption"
    assert translations.say("en", "run.images", count="1") == "1 image"
    assert translations.say("zh-CN", "new.state.open", count=1, first="名称") == "还差一项：名称"
    assert translations.say("zh-CN", "images.counts", count=1, without=0) == "1 张图片，其中 0 张没有标注"


def test_chinese_sentences_are_chinese() -> None:
    """A sentence that was copied instead of translated has no Chinese character; names and units have none, either."""
    same = [
        key
        for key, texts in sentences().items()
        if len(re.findall(r"[A-Za-z]{2,}", re.sub(r"\{[^}]*\}", "", texts["en"]))) > 3
        and not re.search(r"[\u4e00-\u9fff]", texts["zh-CN"])
    ]
    assert same == []


def spoken() -> tuple[dict[str, str], list[re.Pattern[str]]]:
    """Keys that the code says as they stand, with where; and patterns of those that it puts together."""
    plain: dict[str, str] = {}
    made: list[re.Pattern[str]] = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                plain.setdefault(node.value, f"{path.name}:{node.lineno}")
            elif isinstance(node, ast.JoinedStr):
                parts = [re.escape(p.value) if isinstance(p, ast.Constant) else r".+" for p in node.values]
                if isinstance(node.values[0], ast.Constant) and re.match(r"[a-z]+\.", node.values[0].value):
                    made.append(re.compile("".join(parts)))
    # The workbench's script is given the texts of "images." without that beginning.
    script = (WEBUI / "static" / "images.js").read_text(encoding="utf-8")
    plain |= {f"images.{text}": "images.js" for text in re.findall(r'"([\w.]+)"', script)}
    made += [re.compile(rf"images\.{re.escape(beginning)}.+") for beginning in re.findall(r"`([\w.]+\.)\$\{", script)]
    return plain, made


def test_every_sentence_is_used() -> None:
    plain, made = spoken()
    unused = [
        key
        for key in sentences()
        # The engine's messages are looked up by their patterns (translations.translate), the sentences of a job's
        # state by their own keys, and Gradio's texts by their English.
        if not key.startswith(("engine.", "job.", "gradio."))
        and key not in plain
        and not any(pattern.fullmatch(key) for pattern in made)
    ]
    assert unused == []


def test_every_key_that_is_said_exists() -> None:
    """Calls of say with a key as it stands: say("runs.stop"), say(language, "login.title")."""
    said = set()
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "say":
                said |= {
                    (argument.value, f"{path.name}:{node.lineno}")
                    for argument in node.args
                    if isinstance(argument, ast.Constant) and "." in str(argument.value)
                }
    script = (WEBUI / "static" / "images.js").read_text(encoding="utf-8")
    said |= {(f"images.{key}", "images.js") for key in re.findall(r'\bsay\("([\w.]+)"', script)}
    assert len(said) > 50
    known = sentences()
    assert [where for where in sorted(said) if where[0] not in known] == []


def test_words_of_gradio_are_gradios() -> None:
    """What stands in texts/gradio.toml is put in the place of Gradio's own words, which may change."""
    folder = Path(gradio.__file__).parent / "templates/frontend/assets"
    words_ = [texts["en"] for key, texts in sentences().items() if key.startswith("gradio.")]
    scripts = b"".join(file.read_bytes() for file in folder.glob("*.js"))
    assert len(words_) > 10 and [word for word in words_ if word.encode() not in scripts] == []


WRONG_CHINESE = {
    r"(?<!梯度)检查点": "断点",
    "词元": "token",
    "留出集|保留集|留出图片的": "验证集",
    "取整后的权重": "量化后的权重",
    r"结果一位不变|逐位(一致|重现)|(结果|训练)逐字节(相同|一致)": "逐比特一致",
    "装得下吗": "显存够不够",
    "页面自己的": "程序自带",
    "再训练一份": "再训练一次",
    "底模下载自": "底模下载源",
    r"尝试 \d|第 \{?\w+\}? 次尝试": "第 2 次运行",
    "基础模型|底座": "底模",
    "布局": "格式",
    "训练损失|集损失|验证损失": "loss",
    "流水线": "管线",
    "正则图": "正则化图片",
    "运行文件夹": "训练文件夹",
    "接受(它的)?许可": "同意许可协议",
    "主副本": "主权重",
    "噪声(水平|强度)": "噪声级别",
    "矩阵乘(?!法)": "矩阵乘法",
    "Hugging Face 名称|Hub (名称|ID|id)": "Hugging Face 模型名",
    "自动标注": "自动打标",
    "提前停止": "早停",
    "您": "你",
}
"""Words that are not the community's, as patterns, and the word that is used instead."""


def find_chinese_lines(pattern: str) -> list[str]:
    """The lines of all Chinese texts that match, with where they stand."""
    root = Path(translations.__file__).parents[1]
    files = [*root.glob("webui/texts/*.toml"), *root.glob("docs/*.zh-CN.md"), root / "README.zh-CN.md"]
    files += [*root.glob("lora_fp8/tools/hosts/*.toml"), root / "lora_fp8/tools/kit.py"]
    files += [root / "lora_fp8/common/zh_CN.po", *root.glob("configs/*.toml"), *root.glob("presets/*.toml")]
    return [
        f"{file.name}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]


@pytest.mark.parametrize("pattern", WRONG_CHINESE)
def test_chinese_uses_the_words_of_the_glossary(pattern: str) -> None:
    assert find_chinese_lines(pattern) == [], f"write {WRONG_CHINESE[pattern]}"


TYPED = (
    "时:分:秒",
    "“键: 值”",
    "[左, 上, 右, 下]",
    "(图片数, 边长, 边长, 3)",
    "文件:权重",
    "modelscope:作者/模型",
    "半角逗号 , 分隔",
    "lora-scripts (秋叶)",
)
"""What is typed or printed so, with Chinese in the places of values."""


def test_chinese_has_chinese_punctuation() -> None:
    """A comma, colon or parenthesis of ASCII beside a Chinese character; code and links are left out."""
    beside = r"[\u4e00-\u9fff] ?[,;:!?()]|[,;:!?()] ?[\u4e00-\u9fff]"
    wrong = []
    for line in find_chinese_lines(beside):
        text = re.sub(r"`[^`]*`|\]\([^)]*\)|\w\(\)", "", line.partition(": ")[2])
        for typed in TYPED:
            text = text.replace(typed, "")
        wrong += [line] if re.search(beside, text) else []
    assert wrong == []
    separators = {separator for separator in extract() if re.fullmatch(r"[,;:.] ", separator)}
    assert ", " in separators and sorted(separators - messages.load("zh-CN").keys()) == [], "separators of lists"
