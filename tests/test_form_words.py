"""What settings are called, and real messages of the engine in Chinese. Templates are test_messages.py's."""

import errno
import re
from pathlib import Path

import pytest

from lora_fp8 import config, families, importing
from lora_fp8.errors import Message, Phrase, UserErrors, reason
from lora_fp8.importing import remarks
from lora_fp8.settings import Model
from webui import form, translations

CHINESE = re.compile("[\u4e00-\u9fff]")
ADVICE = (
    "write it in webui/texts/settings.toml: a label in English (`en`), label and help in Chinese (`zh-CN`, `help`), "
    "and `choices` for words that say nothing by themselves"
)
PROSE = re.compile("[a-z]{3,}[,;:]? [a-z]{2,}[,;:]? [a-z]{2,}")
"""Three English words in a row: what is left of a message that was told in part."""


def declared() -> dict[str, form.Setting]:
    """Every setting, those of a folder too."""
    found = dict(form.collect_settings())
    for one in form.collect_settings().values():
        found |= {column.key: column for column in one.columns}
    return {key: one for key, one in found.items() if one.kind != "table"}


def test_every_setting_has_its_words() -> None:
    tables = {"section", "section.dataset.folders"} | {f"section.{name}" for name in form.collect_sections() if name}
    wanted = tables | set(declared())
    missing, stale = wanted - set(translations.load_setting_texts()), set(translations.load_setting_texts()) - wanted
    assert not missing, f"{', '.join(sorted(missing))}: new on the page; {ADVICE}"
    assert not stale, f"{', '.join(sorted(stale))}: no such setting any more; take it out of webui/texts/settings.toml"
    for key, texts in translations.load_setting_texts().items():
        assert texts.keys() - {"choices", "choices-en", "help-en"} == {"en", "zh-CN", "help"}, f"{key}: {ADVICE}"
        assert all(texts.values()) and CHINESE.search(texts["help"]), f"{key}: {ADVICE}"
        if key in declared():
            for words_of in ("choices", "choices-en"):
                assert texts.get(words_of, {}).keys() <= set(declared()[key].choices), key
            assert texts["en"] != declared()[key].description, f"{key}: a label, not the description again"


def test_real_messages_in_chinese() -> None:
    text = """
        preset = ["character", "nope"]
        [model]
        family = "sdlx"
        [adapter]
        rank = 0
        dtype = "fp8"
        [train]
        step = 5
        steps = 1.5
        [optimizer]
        lr_scale = "much"
        [quantize]
        recipe = "mxfp8"
    """
    told = [translations.translate("zh-CN", problem.line) for problem in form.find_problems(text)]
    assert [line for line in told if not CHINESE.search(line)] == []
    assert "adapter.rank：必须在 1 到 1024 之间，实际为 0" in told
    assert "train.step：没有这个设置，是不是想写 train.steps？" in told
    assert "train.steps：应为整数，实际为 1.5" in told
    assert "optimizer.lr_scale：应为 auto | none 或数字，实际为 'much'" in told
    assert any(line.startswith("preset：没有预设 'nope'") for line in told)
    required = next(line for line in told if line.startswith("model.path："))
    assert required == "model.path：必须填写。" + translations.translate(
        "zh-CN", Phrase(Model.model_fields["path"].description or "")
    )
    assert not PROSE.search(required)


def test_a_layer_of_a_table_may_have_any_name() -> None:
    for name in ("attn2", "^mid_block.0", "*attn*", "attn 4"):
        text = f'model.family = "sd15"\nmodel.path = "a"\nadapter.ranks = {{"{name}" = -1}}'
        told = [translations.translate("zh-CN", problem.line) for problem in form.find_problems(text)]
        assert any(line.startswith(f"adapter.ranks.{name}：必须在 0 到 1024 之间，实际为 -1") for line in told), told


def test_what_is_around_a_message_is_told_too() -> None:
    with pytest.raises(UserErrors) as caught:
        config.loads('[model]\nfamily = "sd15"\npath = "a"', ["adapter.rank=0"])
    told = translations.translate("zh-CN", str(caught.value)).split("\n")
    assert told[0].startswith("config：") and "  adapter.rank：必须在 1 到 1024 之间，实际为 0（来自 --set）" in told
    assert translations.translate("en", str(caught.value)) == str(caught.value)


def test_what_an_import_tells_is_a_message() -> None:
    """The remark of every rule, whatever file it is used for."""
    rules = {f"{tool.name}: {key}": rule for tool in importing.TOOLS.values() for key, rule in tool.rules.items()}
    assert len(rules) > 1000
    assert [key for key, rule in rules.items() if rule.note and not isinstance(rule.note, Message)] == []


def test_joined_remarks_are_told_one_by_one() -> None:
    one, two = Message("{name} was rounded to a multiple of 16", name="width"), remarks.ONE_CAPTION
    joined = Message("{key}: {line}", key="preview.width", line=remarks.join([one, "", two, one, "a.png"]))
    told = translations.translate("zh-CN", joined)
    parts = [translations.translate("zh-CN", part) for part in (one, two)]
    assert told == f"preview.width：{parts[0]}；{parts[1]}；a.png" and not PROSE.search(told)


def test_advice_about_distilled_models_has_its_chinese() -> None:
    advice = {
        name: family.distilled_advice
        for name in families.list_families()
        if hasattr(family := families.get(name), "distilled_advice")
    }
    assert len(advice) >= 8, sorted(advice)
    for name, line in advice.items():
        told = translations.translate("zh-CN", line)
        assert CHINESE.search(told) and not PROSE.search(told), (name, told)
        assert "训练" in told and "出图" in told, (name, told)


def test_the_words_of_the_system_have_their_chinese(tmp_path: Path) -> None:
    for error in (FileNotFoundError(errno.ENOENT, "whatever Windows says", "a"), OSError(errno.ENOSPC, "x")):
        assert CHINESE.search(translations.translate("zh-CN", reason(error))), error
    assert reason(OSError(errno.ENOSPC, "x")) == "No space left on device"
    assert reason(OSError(12345, "what only this system knows")) == "what only this system knows"
    own = Message("this was a folder of the run, but is now a link or a file")
    assert reason(NotADirectoryError(errno.ENOTDIR, own, "a")) is own
    assert reason(ValueError("broken")) == "broken"
