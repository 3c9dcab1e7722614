"""Messages: a template and its values, which survive what errors do with them; a catalogue without gaps."""

import ast
import contextlib
import copy
import json
import pickle
import re
import string
import sys
from pathlib import Path

import pytest

from lora_fp8.common import messages
from lora_fp8.common.json_files import parse_json
from lora_fp8.common.messages import without_home
from lora_fp8.common.text import quote
from lora_fp8.config import read_toml
from lora_fp8.errors import Joined, Message, UserError, UserErrors
from lora_fp8.jobs import Sentence
from lora_fp8.run import Run

ROOT = Path(__file__).resolve().parent.parent
CODE = sorted(path for folder in ("lora_fp8", "webui") for path in (ROOT / folder).rglob("*.py"))
sys.path.insert(0, str(ROOT / "scripts"))

import messages as script  # noqa: E402  scripts/messages.py


def names(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def test_a_message_is_its_english_text() -> None:
    message = Message("folder {path} does not exist", path=Path("/a/{b}"))
    assert message == "folder /a/{b} does not exist" and isinstance(message, str)
    assert messages.translate("zh-CN", "folder /a does not exist") == "folder /a does not exist", "plain text stays"
    assert messages.translate("en", message) == message


def test_a_value_that_was_cut_says_so_in_the_language_of_its_message() -> None:
    line = Message("expected text in UTF-8, got {given}", given=quote("x" * 100))
    assert line.endswith("xxx ... (102 characters)") and messages.translate("zh-CN", line).endswith("（102 个字符）")


def test_an_error_keeps_its_message_and_its_problems() -> None:
    line = Message("{path}: a training is running in this folder", path="runs/{a}")
    assert str(UserError(line)) is line
    errors = UserErrors([line, "plain"], "config.toml")
    assert str(errors) == "config.toml: 2 problems\n  runs/{a}: a training is running in this folder\n  plain"
    told = messages.translate("zh-CN", str(errors))
    assert told.split("\n") == ["config.toml：2 个问题", "  " + messages.translate("zh-CN", line), "  plain"]
    assert "{a}" in told and "training" not in told


@pytest.mark.parametrize("through", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_are_messages_too(through) -> None:
    inner = Message("{path}: a training is running in this folder", path="{x}")
    for message in (inner, Joined("; ", [inner, "plain {y}"]), Message("{key}: {line}", key="a", line=inner)):
        again = through(message)
        assert again == message and type(again) is type(message)
        assert messages.translate("zh-CN", again) == messages.translate("zh-CN", message) != message


def test_json_has_the_translations_beside_the_english_text() -> None:
    inner = Message("{path}: a training is running in this folder", path="~/{x}")
    content = {"problems": [inner, "plain"], "more": {"line": Joined("; ", [inner, inner])}, "count": 3}
    written = json.loads(json.dumps(messages.add_translations(content), ensure_ascii=False))
    assert written["problems"] == ["~/{x}: a training is running in this folder", "plain"], (
        "whoever reads no Chinese reads on as before"
    )
    read = messages.restore(written)
    assert read == content and messages.FIELD not in read
    for before, after in ((inner, read["problems"][0]), (content["more"]["line"], read["more"]["line"])):
        assert messages.translate("zh-CN", after) == messages.translate("zh-CN", before) != before
    again = json.loads(json.dumps(messages.add_translations(read)))
    assert again == written, "what was read can be written again"
    for other in ([1], "text", {"a": 1}, {"translations": 3}, {"translations": {"zh-CN": [1]}, "a": "b"}):
        messages.restore(other)
    assert messages.add_translations({"a": "plain"}) == {"a": "plain"}


def test_a_run_and_a_job_keep_their_messages(tmp_path: Path) -> None:
    line = Message("{path}: a training is running in this folder", path=Path.home() / "runs")
    with contextlib.closing(Run.create(tmp_path / "run", "")) as run:
        run.log_event("warning", text=line)
    (event,) = [event for event in Run(tmp_path / "run").read_events() if event["event"] == "warning"]
    assert event["text"] == "~/runs: a training is running in this folder", "no home folder in logs"
    assert messages.translate("zh-CN", event["text"]) == messages.translate("zh-CN", line.map(without_home))
    sentence = Sentence.parse(json.dumps(Sentence("failure", {"message": event["text"]}).to_json()))
    assert messages.translate("zh-CN", sentence.args["message"]).startswith("~/runs")
    assert "training" not in messages.translate("zh-CN", sentence.args["message"])


def test_the_catalogue_has_every_template_with_the_same_values() -> None:
    catalogue, templates = messages.load("zh-CN"), script.extract()
    assert len(templates) > 800
    worded = {text for text in templates if re.search("[A-Za-z]{2}", re.sub(r"\{\w+\}", "", text))}
    missing = sorted(worded - catalogue.keys())
    assert missing == [], "run scripts/messages.py, and translate what it adds in lora_fp8/common/zh_CN.po"
    assert sorted(catalogue.keys() - templates) == [], "no such template any more: run scripts/messages.py"
    foreign = {text: names(there) - names(text) for text, there in catalogue.items() if names(there) - names(text)}
    assert foreign == {}, "values that the English template does not have"


def test_tests_that_expect_a_removed_message_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    lines = ("assert 'it is none of .mp4' in line", "assert 'cannot be decoded: its' in line", "of none is it")
    (tmp_path / "tests/test_clips.py").write_text("\n".join(lines), encoding="utf-8")
    gone, there = ["cannot be decoded: it is none of {formats}"], {"cannot be decoded: its content is no video"}
    assert script.find_expectations(gone, there) == [f"tests/test_clips.py:1: {lines[0]}"]
    assert script.find_expectations([], there) == []


def test_calls_in_the_arguments_of_calls_are_extracted() -> None:
    """What `train` prints of the model is a message of messages."""
    assert {"base: {base}, {storage}", "adapters: {count} modules, {parameters} parameters"} <= script.extract()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"a": ,}',
        '{"a": 1,}',
        "[1 2]",
        '"a',
        '"\\q"',
        "[1] 2",
        "a = = 1",
        "a",
        "a = 1\na = 2",
        "[a",
        "x = [",
        "= 1",
    ],
)
def test_what_parsers_say_is_translated_with_its_place(text: str) -> None:
    """Python's own sentences would stand in English in a Chinese one."""
    parse = parse_json if text[0] in '{["' and text != "[a" else read_toml
    with pytest.raises(ValueError) as caught:
        parse(text)
    line = str(caught.value)
    chinese = messages.translate("zh-CN", line)
    assert re.match(r"(line \d+, column \d+|at the end): ", line) and not re.search("[A-Za-z]{4}", chinese)


def test_bytes_that_are_no_utf8_are_no_json() -> None:
    with pytest.raises(ValueError, match=r"the text is not UTF-8 \(byte 7\)"):
        parse_json('{"a": "\u4e2d"}'.encode("gbk"))


def test_templates_are_written_out() -> None:
    """A template that is computed is in no catalogue, and an f-string would be taken for one."""
    wrong = []
    for path in CODE:
        if path.name == "errors.py":  # which makes messages of messages
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Message", "Joined", "Template"):
                first = node.args[0]
                if not (isinstance(first, ast.Constant) and isinstance(first.value, str)):
                    wrong.append(f"{path.name}:{node.lineno}: {ast.unparse(node)[:80]}")
                elif ast.unparse(node.func) == "Message" and not any(one.arg is None for one in node.keywords):
                    if names(first.value) != (given := {one.arg for one in node.keywords}):
                        wrong.append(f"{path.name}:{node.lineno}: {names(first.value) ^ given}")
    assert wrong == []


ERRORS = ("UserError", "UserErrors", "RunFailure", "Stopped", "Damaged", "StoreError", "HomeGone", "Elsewhere")
ERRORS += (
    "ImageError",
    "ClipError",
    "ProfileError",
    "BadEntry",
    "Unfit",
    "NoAnswer",
    "Undecided",
    "UnreadableSettings",
)
LISTS = re.compile(r"(^|[._])(problems|warnings|notes|todo|facts|lines|refused|skipped|reasons|told)\.(append|extend)$")
CALLS = re.compile(r"(^|\.)(warn|add_problem|print_lines|none|idle|differs|need)$")


def test_no_message_is_plain_text() -> None:
    """What people read is a message when it is made: plain English would stay English in every language."""
    plain = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            name = called.rpartition(".")[2]
            if not (name in ERRORS or LISTS.search(called) or CALLS.search(called)):
                continue
            given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg in ("note", "why"))]
            for argument in given:
                for text in find_plain(argument):
                    plain.append(f"{path.relative_to(ROOT)}:{node.lineno}: {called}: {text}")
    assert plain == []


def find_plain(node: ast.AST) -> list[str]:
    """Return the English sentences among the texts that an expression may become, but not in its calls."""
    if isinstance(node, ast.Constant):
        parts = [node.value] if isinstance(node.value, str) else []
    elif isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
    elif isinstance(node, ast.IfExp | ast.BinOp | ast.BoolOp | ast.List | ast.Tuple | ast.Starred):
        return [text for inner in ast.iter_child_nodes(node) for text in find_plain(inner)]
    else:
        return []
    text = "".join(map(str, parts))
    return [text] if re.search(r"[A-Za-z]{3,}[,;:)]? [a-z]{2,}", text) and "<" not in text else []


def test_no_sentence_stands_in_two_places() -> None:
    """Two copies of a template drift apart; from five words on, a sentence has one place."""
    places: dict[str, list[str]] = {}
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Message", "Template"):
                template = ast.literal_eval(node.args[0]) if isinstance(node.args[0], ast.Constant) else ""
                if len(re.findall(r"[A-Za-z']+", re.sub(r"\{\w+\}", "", template))) >= 5:
                    places.setdefault(template, []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 800
    assert {template: found for template, found in places.items() if len(found) > 1} == {}
