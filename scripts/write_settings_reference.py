"""Write docs/settings.md and docs/settings.zh-CN.md: every setting, from its declaration and the page's texts.

    python scripts/write_settings_reference.py            write both files
    python scripts/write_settings_reference.py --check    exit with 1 if they are not what this writes

A test compares the files with what `reference` returns. Change a setting in lora_fp8/settings/declarations.py and its
Chinese help in webui/texts/settings.toml, then run this.
"""

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lora_fp8 import config
from lora_fp8.settings import Except
from webui import form, translations

FILES = {"en": ROOT / "docs/settings.md", "zh-CN": ROOT / "docs/settings.zh-CN.md"}
Texts = dict[str, str]


def _make_texts(english: str, chinese: str) -> Texts:
    return {"en": english, "zh-CN": chinese}


HEAD = _make_texts(
    """# All settings

English · [简体中文](settings.zh-CN.md) · [home](../README.md)

Every setting of a job's TOML file, one table per section. `lora-fp8 new my.toml --all` writes all that have an effect,
with their defaults and help, but a config needs only the settings that it changes. A changed setting that has no effect
causes a warning. An unknown name or a value out of range is an error. The column *elsewhere* lists the names in other
trainers, with the conversion of the value where one is needed. kohya stands for sd-scripts, kohya_ss, lora-scripts and
musubi-tuner.

<!-- Written by scripts/write_settings_reference.py; do not edit by hand. -->
""",
    """# 全部设置

[English](settings.md) · 简体中文 · [首页](../README.zh-CN.md)

任务 TOML 文件的全部设置，每个小节一张表。`lora-fp8 new my.toml --all` 会写出所有起作用的设置及其默认值和说明；
配置文件只需写要改的项。在当前设置下不起作用的改动会给出警告；名称不存在或数值超出范围则报错。“其他训练器”一栏是它在别处的名称，需要换算时一并写出；
kohya 指 sd-scripts、kohya_ss、lora-scripts 和 musubi-tuner。

<!-- 由 scripts/write_settings_reference.py 生成，请勿手工修改。 -->
""",
)
COLUMNS = {
    "en": ("setting", "accepts", "default", "effect only with", "elsewhere", "help"),
    "zh-CN": ("设置", "可用的值", "默认值", "起作用的条件", "其他训练器", "说明"),
}
KINDS = {
    "flag": _make_texts("`true`, `false`", "`true`、`false`"),
    "text": _make_texts("text", "文字"),
    "lines": _make_texts("list of texts", "文字列表"),
    "numbers": _make_texts("list of whole numbers", "整数列表"),
    "table": _make_texts("tables, see below", "表，见下"),
    "toml": _make_texts("table, an argument = its value", "表，参数名 = 值"),
}
NUMBER = {True: _make_texts("whole number", "整数"), False: _make_texts("number", "数字")}
REQUIRED = _make_texts("required", "必填")
LIST_OF = _make_texts("list of ", "列表：")
TABLE_OF = _make_texts("table, a layer's name = ", "表，层名 = ")
TABLES_OF = {"schedule.points": _make_texts("table, a step or share = ", "表，步数或比例 = ")}
PARTS = _make_texts("table, a part's name = a path", "表，部件名 = 路径")
OR = _make_texts(" or ", " 或 ")
SET = _make_texts(" set", " 已设置")
BETWEEN = _make_texts("; ", "；")
NEEDS: dict[str, dict[Any, Texts]] = {
    "family.objective": {
        "Diffusion": _make_texts("models that predict epsilon or v", "预测 epsilon 或 v 的模型"),
        "FlowMatching": _make_texts("flow-matching models", "流匹配模型"),
    },
    "family.text_encoder": {True: _make_texts("a trainable text encoder", "文本编码器可训练的架构")},
    "family.long_captions": {True: _make_texts("SD 1.5, SD 2, SDXL", "SD 1.5、SD 2、SDXL")},
    "family.clip_skip": {True: _make_texts("SD 1.5", "SD 1.5")},
    "family.controls": {True: _make_texts("editing models", "编辑模型")},
    "family.clips": {True: _make_texts("video models", "视频模型")},
    "family.guidance": {True: _make_texts("guidance-distilled models", "引导蒸馏模型")},
    "family.negative": {True: _make_texts("models that use a negative prompt", "可用负面提示词的模型")},
    "base.single_file": {True: _make_texts("a single file as base model", "单文件底模")},
    "base.on_hub": {True: _make_texts("a base model on Hugging Face", "Hugging Face 上的底模")},
    "base.guidance": {True: _make_texts("a base model with a guidance embedding", "有引导值输入的底模")},
    "layers.fp8": {True: _make_texts("layers that support FP8 matmul", "有支持 FP8 矩阵乘法的层")},
    "layers.modulation": {True: _make_texts("modulation layers", "有调制层")},
    "run.several_processes": {True: _make_texts("several processes", "多个进程")},
}
"""Conditions of a `when` that are not settings."""
MEASURED = _make_texts(" [Measured](../benchmarks/defaults.md).", "[实测](../benchmarks/defaults.md)。")


@functools.cache
def _list_measured() -> frozenset[str]:
    """List the settings that scripts/bench_defaults.py has trained with. Its factor on the rate is `lr_scale`."""
    cells = (
        json.loads(line)
        for file in sorted((ROOT / "benchmarks/defaults").glob("*.jsonl"))
        for line in file.open(encoding="utf-8")
    )
    return frozenset("optimizer.lr_scale" if key == "rate" else key for cell in cells for key in cell["settings"])


def render_reference(language: str) -> str:
    """Return the reference in a language, as Markdown."""
    parts = [HEAD[language]]
    for section, meaning in form.collect_sections().items():
        settings = [one for one in form.collect_settings().values() if one.section == section]
        parts += _render_table(language, section, f"[{section}]" if section else "", meaning, settings)
        for one in settings:
            if one.columns:
                meaning = translations.get_help(language, f"section.{one.key}", one.description)
                parts += _render_table(language, one.key, f"[[{one.key}]]", meaning, list(one.columns))
    return "\n".join(parts)


def _render_table(language: str, section: str, title: str, meaning: str, settings: list[form.Setting]) -> list[str]:
    key = f"section.{section}" if section else "section"
    label = translations.load_setting_texts()[key][language]
    if language != "en":
        meaning = translations.get_help(language, key, meaning)
    rows = [COLUMNS[language], ("---",) * len(COLUMNS[language])]
    rows += [tuple(_escape_cell(text) for text in _make_row(language, one)) for one in settings]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"## {label}{f' `{title}`' if title else ''}\n", f"{meaning.strip()}\n", *lines, ""]


def _make_row(language: str, one: form.Setting) -> tuple[str, ...]:
    needs = BETWEEN[language].join(_format_need(language, *rule) for rule in one.when.items())
    elsewhere = BETWEEN[language].join(
        f"{tool}: `{'`, `'.join(names.split(', '))}`" for tool, names in one.also.items()
    )
    default = REQUIRED[language] if one.default is None else f"`{config.format_toml_value(one.default)}`"
    key = f"section.{one.key}" if one.columns else one.key
    description = one.description if language == "en" else translations.get_help(language, key, one.description)
    if one.key in _list_measured():
        description += MEASURED[language]
    return f"`{one.name}`", _format_accepted(language, one), default, needs, elsewhere, description


def _format_accepted(language: str, one: form.Setting) -> str:
    if one.kind in KINDS:
        return KINDS[one.kind][language]
    if one.key == "model.files":
        return PARTS[language]
    words = ", ".join(f"`{word}`" for word in one.choices)
    if one.kind in ("choice", "choices", "switch"):
        return LIST_OF[language] * (one.kind == "choices") + words
    table_of = TABLES_OF.get(one.key, TABLE_OF)[language]
    if one.kind == "entries" and words:
        return table_of + words
    number = NUMBER[one.whole and "." not in one.bounds][language] + (f" `{one.bounds}`" if one.bounds else "")
    return table_of * (one.kind == "entries") + OR[language].join(filter(None, [words, number]))


def _format_need(language: str, keys: str, accepted: tuple[Any, ...]) -> str:
    if keys in NEEDS:
        return ", ".join(NEEDS[keys][value][language] for value in accepted)
    if not accepted or " | " in keys:
        return OR[language].join(f"`{key}`" for key in keys.split(" | ")) + SET[language]
    values = ", ".join(config.format_toml_value(value) for value in accepted)
    return f"`{keys} {'!=' if isinstance(accepted, Except) else '='} {values}`"


def _escape_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if the files are not up to date"
    )
    check = parser.parse_args().check
    for language, path in FILES.items():
        text = render_reference(language)
        if not check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path.relative_to(ROOT)} is out of date; run python scripts/write_settings_reference.py")


if __name__ == "__main__":
    main()
