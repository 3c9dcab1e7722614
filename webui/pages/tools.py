"""The Tools page: what can be done with LoRA files. Each tool is a `lora-fp8` command in a process of its own."""

import os
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.blocks import Block

from lora_fp8 import jobs
from lora_fp8.errors import Message, Template, UserError
from lora_fp8.families.sources import WEIGHT_ENDINGS

from .. import drawings, engine, json_table, live_panel, run_cards, sanitize
from ..context import Ui

TOOLS = ("inspect", "verify", "convert", "resize", "merge")
WRITING = ("convert", "resize", "merge")
QUEUED = ("verify", "resize", "merge")
LAYOUTS = ("kohya", "comfy", "diffusers")
DTYPES = ("", "bf16", "fp16", "fp32")
NO_TOOL = Template("{text}: there is no such tool")
MOST_SECONDS = 600
MOST_FILES = 300  # that are offered to choose from


def build(ui: Ui) -> None:
    """Lay the page out."""
    say = ui.say
    choices = [(say(f"tools.{name}"), name) for name in TOOLS]
    tool = gr.Radio(choices, value="inspect", label=say("tools.which"), show_label=False)
    about = gr.Markdown(say("tools.inspect.about"), elem_classes="note")
    file = gr.Dropdown(label=say("tools.file"), info=say("tools.file.info"), allow_custom_value=True, choices=[])
    with gr.Row(visible=False) as row_verify:
        base = gr.Textbox(label=say("tools.base"), info=say("tools.base.info"))
    with gr.Row(visible=False) as row_convert:
        layout = gr.Dropdown(LAYOUTS, value="kohya", label=say("tools.layout"))
    with gr.Row(visible=False) as row_merge:
        sources = gr.Textbox(lines=4, label=say("tools.sources"), info=say("tools.sources.info"))
    with gr.Row(visible=False) as row_resize:
        rank = gr.Number(0, precision=0, minimum=0, label=say("tools.rank"), info=say("tools.rank.info"))
        energy = gr.Number(0, minimum=0, maximum=1, label=say("tools.energy"), info=say("tools.energy.info"))
    with gr.Row(visible=False) as row_output:
        output = gr.Textbox(label=say("tools.output"), info=say("tools.output.info"))
        dtype = gr.Dropdown([(value or say("tools.dtype.same"), value) for value in DTYPES], label=say("tools.dtype"))
    with gr.Row():
        start = gr.Button(say("tools.start"), variant="primary")
        later = gr.Button(say("tools.later"), visible=False, elem_id="tools-later")
    result = live_panel.make_panel(elem_id="tool-result", padding=False)
    rows = {row_verify: ("verify",), row_convert: ("convert",), row_resize: ("resize", "merge")}
    rows |= {row_merge: ("merge",), row_output: WRITING}

    def choose(tool: str) -> list[Any]:
        known = tool if tool in TOOLS else TOOLS[0]
        visible_rows = [gr.update(visible=known in tools) for tools in rows.values()]
        return [
            say(f"tools.{known}.about"),
            gr.update(visible=known != "merge"),
            gr.update(visible=known in QUEUED),
            "",  # what another tool has answered
            *visible_rows,
        ]

    given: dict[str, Block]
    given = {"tool": tool, "file": file, "base": base, "layout": layout, "rank": rank, "energy": energy}
    given |= {"sources": sources, "output": output, "dtype": dtype}

    def run_now(**values: Any) -> str:
        return _render_answer(ui, lambda: _run(ui, **values))

    def submit_job(**values: Any) -> str:
        return _render_answer(ui, lambda: _queue(ui, **values))

    hidden = live_panel.make_private_event(queue=False)
    tool.change(choose, tool, [about, file, later, result, *rows], **hidden)
    gr.on([file.focus], lambda: gr.update(choices=find_loras(ui)), None, file, **hidden)
    answered: dict[str, Any] = {"outputs": result, "trigger_mode": "once", "api_visibility": "private"}
    start.click(run_now, inputs_kwargs=given, concurrency_limit=2, **answered)
    later.click(submit_job, inputs_kwargs=given, concurrency_limit=None, **answered)


def find_loras(ui: Ui) -> list[str]:
    """List the LoRA files of runs below the allowed folders and the tools' outputs, newest first."""
    places = [ui.place.home / "tools"]
    for root in ui.place.roots:
        places += [root, *root.glob("*/export"), *root.glob("runs/*/export")]
    return [str(path) for path in drawings.find_lora_files(places)[:MOST_FILES]]


def build_arguments(ui: Ui, tool: str, **given: Any) -> tuple[list[str], Path | None]:
    """Return the command's arguments and the file that it will write. Every argument is checked or our own.

    Raises:
        UserError: a path is not allowed, or a value is missing or not accepted by the tool.
    """
    if tool not in TOOLS:
        raise UserError(NO_TOOL(text=sanitize.shorten(tool)))
    line: list[str] = []
    if tool == "verify" and (base := str(given["base"] or "").strip()):
        line += ["--base", base if base == "demo" else str(ui.resolve_path(base))]
    if tool == "convert":
        line += ["--format", sanitize.require_choice(given["layout"], LAYOUTS)]
    if tool in ("resize", "merge"):
        line += ["--rank", str(int(given["rank"] or 0)), "--energy", str(float(given["energy"] or 0))]
    target = None
    if tool in WRITING:
        line += ["--dtype", sanitize.require_choice(given["dtype"] or "", DTYPES)]
        target = _make_target(ui, str(given["output"] or ""))
        line += ["--output", str(target)]
    if tool == "merge":
        weighted = [_check_weighted(ui, text) for text in str(given["sources"] or "").splitlines() if text.strip()]
        if not weighted:
            raise UserError(Message("no file is given"))
        return [*line, "--", *weighted], target
    return [*line, "--", str(_check_lora(ui, str(given["file"] or "")))], target


def _run(ui: Ui, tool: str, **given: Any) -> str:
    line, target = build_arguments(ui, tool, **given)
    answer = engine.run_command(tool, line, MOST_SECONDS, verdicts=tool == "verify")
    parts = []
    if tool == "verify":
        verdict, kind = ("tools.verify.fine", "yes") if answer["ok"] else ("tools.verify.asks", "wrong")
        parts = [
            f'<p class="{kind}">{sanitize.escape(ui.say(verdict))}</p>',
            run_cards.render_checks(ui, answer["checks"]),
        ]
        answer = {"file": answer["file"]}  # the checks say the rest
    titles = {key: ui.say(f"tools.key.{key}") for key in answer if key in KEYS}
    parts.append(json_table.render_object(answer, titles))
    if target is not None:
        link = f'<a href="{sanitize.escape(ui.make_download_link(target))}" download>{sanitize.escape(target.name)}</a>'
        parts.insert(0, f"<p>{sanitize.escape(ui.say('tools.written'))} {link}</p>")
    return "".join(parts)


def _queue(ui: Ui, tool: str, **given: Any) -> str:
    if tool not in QUEUED:
        raise UserError(NO_TOOL(text=sanitize.shorten(tool)))
    line, target = build_arguments(ui, tool, **given)
    subject = target.name if target else Path(line[-1]).name
    id = jobs.Queue(ui.place.home).submit_command(tool, line, folder=ui.place.home, name=f"{tool} {subject}")
    jobs.ensure_worker(ui.place.home)
    link = f'<a href="{ui.make_link("")}">{sanitize.escape(ui.say("page.runs"))}</a>'
    return f"<p>{sanitize.escape(ui.say('tools.queued', id=id))} {link}</p>"


KEYS = frozenset(
    [
        "file",
        "bytes",
        "kind",
        "layout",
        "families",
        "ranks",
        "alphas",
        "dtypes",
        "norms",
        "metadata",
        "hashes",
        "output",
    ]
    + ["layers", "kept", "dropped"]
)
"""Keys of the engine's answers that have a translation (tools.key.*)."""


def _render_answer(ui: Ui, do: Any) -> str:
    """Run `do` and render its answer as HTML, or the error."""
    try:
        return do()
    except UserError as error:
        return f'<p class="wrong" role="alert">{sanitize.escape(ui.translate(str(error)))}</p>'


def _check_lora(ui: Ui, text: str) -> Path:
    if not text.strip():
        raise UserError(Message("choose a LoRA file first"))
    path = ui.resolve_path(text)
    if path.suffix.lower() not in WEIGHT_ENDINGS or not path.is_file():
        raise UserError(Message("{text}: there is no such .safetensors file", text=sanitize.shorten(text)))
    return path


def _check_weighted(ui: Ui, text: str) -> str:
    """Check a line of the merge: a path, optionally with a colon and a weight. The default weight is 1."""
    name, colon, weight = text.strip().rpartition(":")
    try:
        number = float(weight) if colon else 1.0
    except ValueError:
        raise UserError(
            Message(
                "{text}: this is not a file with a weight; write the file, a colon and the weight, such as "
                "/a.safetensors:0.7",
                text=sanitize.shorten(text),
            )
        ) from None
    return f"{_check_lora(ui, name if colon else weight)}:{number}"


def _make_target(ui: Ui, text: str) -> Path:
    name = sanitize.check_name(
        text if text.strip().endswith(".safetensors") else f"{text.strip()}.safetensors" if text else text
    )
    folder = ui.place.home / "tools"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.path.lexists(folder / name):
        raise UserError(Message("{name}: the file exists already; choose another name", name=name))
    return folder / name
