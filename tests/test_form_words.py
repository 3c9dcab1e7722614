"""What settings are called, and the engine's messages in Chinese: complete, and about nothing that is not there.

Messages that are data (`errors.Message`) are test_messages.py's; here are those that are plain text still.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from lora_fp8 import families, importing, settings
from lora_fp8.config import loading, relations, validation
from lora_fp8.data import scan_notes
from lora_fp8.data.caption_style import warn_of_sentences
from webui import form, translations

CHINESE = re.compile("[\u4e00-\u9fff]")
ADVICE = (
    "write it in webui/texts/settings.toml: a label in English (`en`), label and help in Chinese (`zh-CN`, `help`), "
    "and `choices` for words that say nothing by themselves"
)
UNTOLD = {
    "{key}: {item['msg']}, got {given}",  # pydantic's own words, for a kind of mistake that no setting has today
    "{name} = {toml_value(value)}  # {field.description}{choices and f' ({choices})'}",  # a file's line
    "a layer's name = {accepted(layer_field)}",  # in such a line
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
        "_in_words(field)": "at least 1",
        "limit": "at least 1",
        "where": "config",
        "_suggest(location)": "",
    }
    files = (module.__file__ for module in (loading, relations, validation))
    found = sorted({text for file in files for text in messages(Path(file))} - UNTOLD)
    untold = []
    for text in found:
        line = re.sub(r"\{((?:[^{}]|\{[^{}]*\})+)\}", lambda place: samples.get(place[1], "7"), text)
        line = f"x.y: unknown setting{line}" if line.startswith((", did", "; here")) else line
        told = translations.translate("zh-CN", line)
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
    told = [translations.translate("zh-CN", problem.line) for problem in form.find_problems(text)]
    assert [line for line in told if not CHINESE.search(line)] == []
    assert "adapter.rank：必须在 1 到 1024 之间，实际为 0" in told
    assert "train.step：没有这个设置，是不是想写 train.steps？" in told
    assert "train.steps：应为整数，实际为 1.5" in told
    assert "optimizer.lr_scale：应为 auto | none 或数字，实际为 'much'" in told
    assert any(line.startswith("preset：没有预设 'nope'") for line in told)
    required = next(line for line in told if line.startswith("model.path："))
    assert required == "model.path：必须填写。" + translations.load_setting_texts()["model.path"]["help"]


def test_a_layer_of_a_table_may_have_any_name() -> None:
    for name in ("attn2", "^mid_block.0", "*attn*", "attn 4"):
        told = translations.translate("zh-CN", f"adapter.ranks.{name}: must be at least 0 and at most 1024, got -1")
        assert told == f"adapter.ranks.{name}：必须在 0 到 1024 之间，实际为 -1"


def test_what_is_around_a_message_is_told_too_and_the_unknown_is_left_alone() -> None:
    line = "adapter.rank: must be at least 1, got 0 (from preset mine)"
    assert translations.translate("zh-CN", line) == "adapter.rank：不能小于 1，实际为 0（来自预设 mine）"
    assert translations.translate("zh-CN", "config: 2 problems\n  model.path: is empty").endswith(
        "\n  model.path：不能为空"
    )
    for same in ("nothing that the engine says", "x: nothing that it says"):
        assert translations.translate("zh-CN", same) == same
    assert translations.translate("en", line) == line


PROSE = re.compile("[a-z]{3,}[,;:]? [a-z]{2,}[,;:]? [a-z]{2,}")
"""Three English words in a row: what is left of a message that was told in part."""


def test_what_an_import_tells_has_its_chinese() -> None:
    """What is to do and to know, and what became of a key of another trainer's file; remarks are joined by "; "."""
    found = {rule.note for tool in importing.TOOLS.values() for rule in tool.rules.values() if rule.kind != "idle"} - {
        ""
    }
    for path in Path(importing.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            texts: list[ast.AST] = []
            if isinstance(node, ast.Call) and not any(one.arg == "off" for one in node.keywords):  # of those nothing
                called = ast.unparse(node.func)
                if re.search(r"(told|notes|todo)\.append$|Unfit$|\.need$|\.(none|differs|mapped)$", called):
                    texts = node.args
                texts = [*texts, *(one.value for one in node.keywords if one.arg in ("note", "why", "warmup_note"))]
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                names = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
                texts = [node.value] if names in ("told", "note", "why", "notes") else []
            found |= {text for one in texts for text in _texts(one) if re.search("[a-z]{3,}[,;:]? [a-z]", text)}
    untold = []
    for line in found:
        # What stands before a colon may be a setting or a path.
        told = [
            translations.translate_joined("zh-CN", re.sub(r"^7\b", name, line))
            for name in ("dataset.folders.0", "/a/b")
        ]
        told = [re.sub("`.*?`", "", one) for one in told]
        if all(PROSE.search(one) or not CHINESE.search(one) for one in told):
            untold.append(line)
    assert untold == []


def test_joined_remarks_are_told_one_by_one() -> None:
    one, two = "one resolution here, the largest; theirs were 512, 1024", "one seed for all previews here"
    told = translations.translate_joined("zh-CN", f"preview.seed: {one}; {two}; {one}")
    parts = [
        translations.translate("zh-CN", one),
        translations.translate("zh-CN", two),
        translations.translate("zh-CN", one),
    ]
    assert told == "preview.seed：" + "；".join(parts) and not PROSE.search(told)
    assert translations.translate_joined("zh-CN", f"Nobody knows this; {two}") == f"Nobody knows this；{parts[1]}"
    assert (
        translations.translate_joined("en", f"{one}; {two}") == f"{one}; {two}"
        and translations.translate_joined("zh-CN", "") == ""
    )


WARNERS = (
    *("stages/resume", "stages/cache", "stages/load", "stages/previews", "stages/validate", "plan/resolve"),
    *("plan/placement", "plan/disk_budget", "training/checkpoint", "families/base", "precision/plan"),
)


def test_what_the_trainer_warns_of_has_its_chinese() -> None:
    found: set[str] = {note(count=3, files="a.png") for note in scan_notes._NOTES.values()}
    prose = ["A dog runs over the wet grass, and a cat looks on."]
    for section in (settings.Dataset(shuffle_tags=True), settings.Dataset(tag_dropout=0.5)):
        (line,) = warn_of_sentences(prose, section)
        assert CHINESE.search(translations.translate("zh-CN", line)), line
    engine = Path(importing.__file__).parent.parent
    for name in WARNERS:
        tree = ast.parse((engine / f"{name}.py").read_text(encoding="utf-8"))
        found |= {_filled(one) for one in ast.walk(tree) if isinstance(one, ast.Constant | ast.JoinedStr)}
    begun = re.compile(
        r"\S.* ha[sd] no effect(:| with) .|no preview at step 7|changed since.*: 7|the held-out loss.* finite$"
        r"|the disk is .* 7"
    )
    found = {line for line in found if begun.match(line)} | set(settings.FACTS.values())
    assert [line for line in found if not CHINESE.search(translations.translate("zh-CN", line))] == []


def test_advice_about_distilled_models_has_its_chinese() -> None:
    advice = {
        name: family.distilled_advice
        for name in families.available()
        if hasattr(family := families.get(name), "distilled_advice")
    }
    assert len(advice) >= 8, sorted(advice)
    for name, line in advice.items():
        told = translations.translate("zh-CN", line)
        assert CHINESE.search(told) and not PROSE.search(told), (name, told)
        assert "训练" in told and "出图" in told, (name, told)


ENDINGS = (
    "run/disk_space",
    "stages/resume",
    "training/checkpoint",
    "train",
    "run/folder",
    "run/signals",
    "plan/resolve",
    "plan/placement",
    "plan/plan",
    "plan/check",
    "plan/start",
    "stages/milestones",
    "stages/preflight",
    "stages/session",
    "stages/step",
    "stages/cache",
    "stages/load",
    "distributed/processes",
    "training/memory",
    "stages/measure",
    "stages/finish",
    "data/captioner",
    "data/images",
    "data/decoding",
    "data/buckets",
    "data/cache",
    "data/loader",
    "data/clips",
    "training/text_encoders",
    "objectives/objective",
    "training/optim",
    "adapters/injection",
    "families/_checks",
    "families/_encoders",
    "families/_files",
    "families/_weights",
    "families/base",
    "lora_files/export",
    "adapters/kinds",
    "lora_files/layouts",
    "tools/files",
    "tools/pairs",
    "precision/plan",
    "precision/backends",
    "precision/choose",
    "precision/linear",
    "precision/backend_te",
)
"""Modules whose UserErrors, RunFailures and Stoppeds end a job, and whose problems stand in one."""
PARTS = {
    "where": "adapter.init_from = '/a/x'",
    "folder": "/a",
    "what": "no caption (b.txt)",
    "told": "set dataset.frames to the lengths that they are to be trained at, or take them out",
    "onnx": "",
    "more": "",
    "hint": ", did you mean 'flux'?",
    "hint(target, adaptable)": "did you mean 'to_q'?",
    "advice": "; set model.family = 'flux' for FLUX.1",
    "section.folders[index].mask": "7",
    "reasons[layout]": "nothing reads LoKr of Flux under these names",
    "instead": "set export.formats = ['diffusers']",
    "files": "files: a.png",
    "culprits": "files: a.png",
    "quantity": "gradient norm inf",
    "last_good": "last good checkpoint: step-000002",
    "ADVICE": "give the same model in bf16 or fp16, or in fp8 as ComfyUI or kohya's programs write it",
    "room": "",
    "look.error": "is empty (0 bytes)",
    "text": "has no control picture b.png (or another extension) in c",
    "foreign": "vae/config.json says scaling_factor = 1, expected 2",
    "kind": "mask",
    "parts": "1 MiB of checkpoints; 2 MiB of LoRA files; 3 MiB of previews; 4 MiB of cached pictures and captions",
}
SAID = {
    "it has {what}": "it has tensors without values",
    "{path}: {problem}": "{path}: is cut short",
    "LoRA of the {parts}": "LoRA of the unet, text_encoder",
    "in a file {why}": "in a file where others have one",
    "{kind} folder {root} {what}": "mask folder /a is a file, not a folder",
    "is {size[0]} x": "/a/b.png is {size[0]} x",
}
FOR_PROGRAMMERS = {"dataset.fps = 'auto' needs clip_rate", "--dtype 7: accepted are 7"}


def test_what_ends_a_job_has_its_chinese() -> None:
    """The reason in a job's card: every message of these modules that is raised, or listed as a problem."""
    engine, untold = Path(importing.__file__).parent.parent, []
    for name in ENDINGS:
        for node in ast.walk(ast.parse((engine / f"{name}.py").read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            of = ast.unparse(node.func)
            if called in ("UserError", "RunFailure", "Stopped") or of.endswith(("problems.append", "skipped.append")):
                texts = [literal(one) for one in node.args]
            elif called == "UserErrors" and len(node.args) > 1:
                texts = [f"{text}: 2 problems" for text in (literal(one) for one in node.args[1:]) if text]
            elif called in ("ImageError", "ClipError", "Looked"):
                texts = [f"/a/b.png {text}" for text in (literal(one) for one in node.args) if text]
            elif called in ("_problem", "_refuse"):
                some = f"/a/b.safetensors: x.weight{' (and 2 more)' if called == '_problem' else ''}"
                texts = [f"{some} {text}; {PARTS['ADVICE']}" for text in map(literal, node.args[1:]) if text]
            else:
                continue
            for text in filter(None, texts):
                for one, other in SAID.items():
                    text = text.replace(one, other)
                line = re.sub(r"\{((?:[^{}]|\{[^{}]*\})+)\}", lambda place: PARTS.get(place[1], "7"), text)
                if not re.search("[a-z]{3,}[,;:]? [a-z]", line) or line in FOR_PROGRAMMERS:
                    continue
                told = re.sub("`.*?`|可用：.*", "", translations.translate("zh-CN", line))
                if not CHINESE.search(told) or PROSE.search(told):
                    untold.append(f"{name}: {line}")
    assert untold == []


def test_a_reason_of_several_parts_is_told_whole() -> None:
    full = "/runs/a/checkpoints/step-000010: the checkpoint could not be written (No space left on device); it needs "
    full += "3.0 MiB, 0.1 MiB are free; nothing was saved before it"
    told = translations.translate("zh-CN", full)
    assert told.startswith("/runs/a/checkpoints/step-000010：断点无法写入（磁盘已满）") and "没有保存任何内容" in told
    refused = (
        "runs/a/checkpoints/step-000010 cannot go on with another: 2 problems\n  adapter.rank: was 4, is 8\n  seed: "
    )
    told = translations.translate("zh-CN", refused + "was 1, is 2").split("\n")
    assert "无法以不同的设置继续：2 个问题" in told[0] and told[1:] == [
        "  adapter.rank：原为 4，现为 8",
        "  seed：原为 1，现为 2",
    ]
    assert translations.translate("zh-CN", "~/a b/events.jsonl: Permission denied") == "~/a b/events.jsonl：没有权限"


def _filled(node: ast.AST) -> str:
    """A text of the source with a 7 for each value in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    parts = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(part.value if isinstance(part, ast.Constant) else "7" for part in parts)


def _texts(node: ast.AST) -> list[str]:
    """Every text that an expression of the source may become."""
    if isinstance(node, ast.IfExp):
        return _texts(node.body) + _texts(node.orelse)
    if isinstance(node, ast.List | ast.Tuple):
        return [text for one in node.elts for text in _texts(one)]
    if isinstance(node, ast.BinOp):
        return [one + two for one in _texts(node.left) or ["7"] for two in _texts(node.right) or ["7"]]
    return [_filled(node)] if isinstance(node, ast.Constant | ast.JoinedStr) else []
