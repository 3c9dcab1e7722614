"""The Tools page without a browser: what the engine is called with, and what its answer looks like."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

import gradio as gr
import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_fp8.common.messages import add_translations, restore
from lora_fp8.errors import Message, UserError
from lora_fp8.verify.report import Report
from webui import drawings, json_table
from webui.context import Place, Ui
from webui.pages import tools

LAYER = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
CANARIES = ["; touch {0}", "$(touch {0})", "`touch {0}`", "| touch {0}", "\ntouch {0}", "--output={0}", "-rf", "%PATH%"]
CANARIES += ["../../{0}", "{0}\0", "<script>alert(1)</script>", "${{IFS}}", "a b'c\"d", "\u202e{0}"]


@pytest.fixture
def ui(tmp_path: Path) -> Ui:
    root = tmp_path / "data"
    root.mkdir()
    rng = np.random.default_rng(0)
    pair = {f"{LAYER}.lora_A.weight": rng.normal(size=(4, 320)), f"{LAYER}.lora_B.weight": rng.normal(size=(320, 4))}
    metadata = {"ss_output_name": "<img src=x onerror=alert(1)>"}
    save_file({name: value.astype("float32") for name, value in pair.items()}, root / "a;b.safetensors", metadata)
    (root / "x.txt").touch()
    return Ui("en", Place(tmp_path / "home", [root]))


def given(ui: Ui, **changed: Any) -> dict[str, Any]:
    file = str(ui.place.given[0] / "a;b.safetensors")
    usual = {"file": file, "base": "", "layout": "kohya", "rank": 2, "energy": 0, "sources": f"{file}:0.5", "dtype": ""}
    return usual | {"output": "new"} | changed


@pytest.mark.parametrize("tool", tools.TOOLS)
def test_the_line_has_our_options_and_resolved_paths(ui: Ui, tool: str) -> None:
    line, target = tools.build_arguments(ui, tool, **given(ui))
    before, after = line[: line.index("--")], line[line.index("--") + 1 :]
    assert all(re.fullmatch(r"--[a-z]+", option) for option in before[::2])
    (subject,) = after
    assert subject.startswith(str(ui.place.given[0])) and (target is None) == (tool not in tools.WRITING)
    if tool != "merge":
        with pytest.raises(UserError, match="choose a LoRA file first"):
            tools.build_arguments(ui, tool, **given(ui, file=" "))
    if target:
        assert target == ui.place.home / "tools/new.safetensors"


@pytest.mark.parametrize("tool", tools.TOOLS)
def test_canaries_are_refused_or_stay_names(ui: Ui, tmp_path: Path, tool: str) -> None:
    """No text of a browser becomes an option, a second argument, or a path that is not below a root."""
    known, _ = tools.build_arguments(ui, tool, **given(ui))
    fields = ("tool", "file", "base", "layout", "sources", "output", "dtype")
    for field, canary in itertools.product(fields, CANARIES):
        text = canary.format(tmp_path / "canary")
        where = (field, canary)
        try:
            line, target = tools.build_arguments(ui, **({"tool": tool} | given(ui) | {field: text}))
        except UserError as error:
            assert "\n" not in str(error), where
            continue
        assert len(line) == len(known), where
        changed = [(a, b) for a, b in zip(known, line, strict=True) if a != b]
        assert not changed or [(str(ui.place.home / "tools/new.safetensors"), str(target))] == changed, where
        assert target is None or target.parent == ui.place.home / "tools", where
    assert not (tmp_path / "canary").exists()


def test_a_file_is_inspected_and_resized(ui: Ui) -> None:
    """The engine itself, in its own process; what a file says about itself is shown as text."""
    answer = tools._render_answer(ui, lambda: tools._run(ui, "inspect", **given(ui)))
    assert "sd15" in answer and "attn1.to_q" in answer and "&lt;img src=x onerror" in answer and "<img" not in answer
    answer = tools._render_answer(ui, lambda: tools._run(ui, "resize", **given(ui)))
    assert 'href="/download?path=' in answer and (ui.place.home / "tools/new.safetensors").is_file()
    again = tools._render_answer(ui, lambda: tools._run(ui, "resize", **given(ui)))
    assert "exists already" in again and 'class="wrong"' in again


@pytest.mark.parametrize("ok", [True, False])
def test_what_verify_found_is_told_and_what_it_asks(ui: Ui, monkeypatch: pytest.MonkeyPatch, ok: bool) -> None:
    report = Report("a")
    report.add("finite", ok, Message("no NaN, no infinity") if ok else Message("NaN or infinity in {names}", names="a"))
    answered = restore(json.loads(json.dumps(add_translations(report.to_json()))))  # as from the command
    monkeypatch.setattr(tools.engine, "run_command", lambda *_, **__: answered)
    answer = tools._render_answer(chinese := Ui("zh-CN", ui.place), lambda: tools._run(chinese, "verify", **given(ui)))
    assert ("全部检查通过" in answer) == ok and ("属于其他底模" in answer) != ok
    assert ("没有 NaN" if ok else "含 NaN 或无穷大") in answer and "infinity" not in answer


def test_what_the_engine_refuses_is_told_in_its_line(ui: Ui) -> None:
    wrong = ui.place.given[0] / "b.safetensors"
    wrong.write_bytes(b"no header")
    answer = tools._render_answer(ui, lambda: tools._run(ui, "inspect", **given(ui, file=str(wrong))))
    assert 'class="wrong"' in answer and "b.safetensors" in answer and "Traceback" not in answer


def test_a_file_with_the_short_ending_is_offered_and_read(ui: Ui) -> None:
    """Files of fluxgym end in .sft."""
    file = (ui.place.given[0] / "a;b.safetensors").rename(ui.place.given[0] / "a.SFT")
    assert tools.find_loras(ui) == [str(file)]
    assert drawings.list_sources(ui) == [("a.SFT", str(file))] and drawings.find_source(ui, str(file)) == file
    arguments, _ = tools.build_arguments(ui, "inspect", **given(ui, file=str(file)))
    assert str(file) in arguments


def test_tables_hold_text_only() -> None:
    evil = "<script>alert(1)</script>"
    html = json_table.render_object(
        {evil: evil, "list": [{evil: evil, "b": 1.23456789}], "deep": {evil: {evil: [evil]}}, "ok": True}
    )
    assert "<script" not in html and html.count("&lt;script") >= 6 and "1.2346" in html and "✓" in html


def test_another_tools_answer_does_not_stay(ui: Ui) -> None:
    with gr.Blocks() as page:
        tools.build(ui)
    (change,) = [fn for fn in page.fns.values() if fn.fn is not None and fn.fn.__name__ == "choose"]
    (number,) = [i for i, part in enumerate(change.outputs) if part.elem_id == "tool-result"]
    assert change.fn("merge")[number] == "" and len(change.fn("merge")) == len(change.outputs)
