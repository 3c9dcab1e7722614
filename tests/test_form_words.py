"""What settings are called, and the engine's messages in Chinese: complete, and about nothing that is not there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from lora_fp8 import config, importing, rules, wording
from lora_fp8.data import images
from webui import form, words

CHINESE = re.compile("[\u4e00-\u9fff]")
ADVICE = (
    "write it in webui/texts/settings.toml: a label in English (`en`), label and help in Chinese (`zh-CN`, `help`), "
    "and `choices` for words that say nothing by themselves"
)
UNTOLD = {
    "{key}: {item['msg']}, got {given}",  # pydantic's own words, for a kind of mistake that no setting has today
    "{name} = {tomlkit.item(value).as_string()}  # {field.description}{choices and f' ({choices})'}",  # a file's line
    "{sign} {getattr(item, attribute)}",
    " (from --set)",
}


def declared() -> dict[str, form.Setting]:
    """Every setting, those of a folder too."""
    found = dict(form.settings())
    for one in form.settings().values():
        found |= {column.key: column for column in one.columns}
    return {key: one for key, one in found.items() if one.kind != "table"}


def test_every_setting_has_its_words() -> None:
    tables = {"section", "section.dataset.folders"} | {f"section.{name}" for name in form.sections() if name}
    wanted = tables | set(declared())
    missing, stale = wanted - set(words.named()), set(words.named()) - wanted
    assert not missing, f"{', '.join(sorted(missing))}: new on the page; {ADVICE}"
    assert not stale, f"{', '.join(sorted(stale))}: no such setting any more; take it out of webui/texts/settings.toml"
    for key, texts in words.named().items():
        assert texts.keys() - {"choices", "choices-en", "help-en"} == {"en", "zh-CN", "help"}, f"{key}: {ADVICE}"
        assert all(texts.values()) and CHINESE.search(texts["help"]), f"{key}: {ADVICE}"
        if key in declared():
            for words_of in ("choices", "choices-en"):
                assert texts.get(words_of, {}).keys() <= set(declared()[key].choices), key
            assert texts["en"] != declared()[key].description, f"{key}: a label, not the description again"


def literal(node: ast.AST) -> str | None:
    """A text of the source with the places of its values in braces."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(p) or f"{{{ast.unparse(p.value)}}}" for p in node.values)  # type: ignore[attr-defined]
    return None


def messages(path: Path) -> Iterator[str]:
    """Every message that this file of the engine can make."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        texts: list[ast.AST] = []
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            texts = node.args if name in ("say", "append", "UserError") else []
        elif isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
            texts = node.value.elts[1:2]
        elif isinstance(node, ast.Return) and node.value is not None:
            texts = [node.value]
        yield from (text for one in texts if (text := literal(one)) and " " in text.strip())


def test_every_message_of_the_check_has_its_chinese() -> None:
    own = "or quantize.backend = 'own'"  # how the rules about other libraries' layers end
    samples = {
        "own": own,
        "hint": "",
        "more": "",
        "words[kind]": "at least",
        "limit": "at least 1",
        "where": "config",
        "_suggest(location)": "",
    }
    files = (module.__file__ for module in (config, rules, wording))
    found = sorted({text for file in files for text in messages(Path(file))} - UNTOLD)
    assert len(found) > 60, "the messages are found no longer"
    untold = []
    for text in found:
        line = re.sub(r"\{((?:[^{}]|\{[^{}]*\})+)\}", lambda place: samples.get(place[1], "7"), text)
        line = f"x.y: unknown setting{line}" if line.startswith(", did") else line
        told = words.tell("zh-CN", line)
        if told == line or not CHINESE.search(told):
            untold.append(text)
    assert not untold, "no pattern in webui/texts/engine.toml for: " + " || ".join(untold)


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
    told = [words.tell("zh-CN", problem.line) for problem in form.problems(text)]
    assert [line for line in told if not CHINESE.search(line)] == []
    assert "adapter.rank：不能小于 1，实际为 0" in told
    assert "train.step：没有这个设置，是不是想写 train.steps？" in told
    assert "train.steps：应为整数，实际为 1.5" in told
    assert "optimizer.lr_scale：应为 auto | none 或数字，实际为 'much'" in told
    assert any(line.startswith("preset：没有预设 'nope'") for line in told)
    required = next(line for line in told if line.startswith("model.path："))
    assert required == "model.path：必须填写。" + words.named()["model.path"]["help"]


def test_what_is_around_a_message_is_told_too_and_the_unknown_is_left_alone() -> None:
    line = "adapter.rank: must be at least 1, got 0 (from preset mine)"
    assert words.tell("zh-CN", line) == "adapter.rank：不能小于 1，实际为 0（来自预设 mine）"
    assert words.tell("zh-CN", "config: 2 problems\n  model.path: is empty").endswith("\n  model.path：不能为空")
    for same in ("nothing that the engine says", "x: nothing that it says"):
        assert words.tell("zh-CN", same) == same
    assert words.tell("en", line) == line


def test_what_an_import_leaves_to_do_has_its_chinese() -> None:
    """And why a key of another trainer's file has no counterpart here."""
    found = {rule.note for tool in importing.TOOLS.values() for rule in tool.rules.values() if rule.kind != "idle"}
    for path in Path(importing.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            if re.search(r"\.need$|\.todo\.append$", name):
                found.add(_filled(node.args[-1]))
            # What became of a key; of one that is off nothing is shown.
            at = {"draft.none": 1, "draft.differs": 2, "draft.mapped": 2}.get(name, 9)
            if len(node.args) > at and not any(one.arg == "off" for one in node.keywords):
                found |= {text for text in [_filled(node.args[at])] if re.search("[a-z]{3} [a-z]", text)}
    found -= {"", "7", "7: 7"}
    assert len(found) > 150
    assert [line for line in found if not CHINESE.search(words.tell("zh-CN", line))] == []


def test_what_the_trainer_warns_of_has_its_chinese() -> None:
    found = {f"{note.format(n=3)}: a.png" for note in images._NOTES.values()}
    engine = Path(config.__file__).parent
    for name in ("resume", "prepare", "sample", "validate", "checkpoint", "objectives", "precision/plan"):
        tree = ast.parse((engine / f"{name}.py").read_text(encoding="utf-8"))
        found |= {_filled(one) for one in ast.walk(tree) if isinstance(one, ast.Constant | ast.JoinedStr)}
    begun = re.compile(r"\S.* ha[sd] no effect: .|no preview at step 7|changed since.*: 7|the held-out loss.* finite$")
    found = {line for line in found if begun.match(line)}
    assert len(found) > 15
    assert [line for line in found if not CHINESE.search(words.tell("zh-CN", line))] == []


def _filled(node: ast.AST) -> str:
    """A text of the source with a 7 for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(part.value if isinstance(part, ast.Constant) else "7" for part in parts)
