"""A person's project folder survives every function of the page and every tool of `lora-fp8 mcp`, byte for byte.

Every function that the built page can call is called with values that point into the project: its path, files in it,
jobs whose folder it is. A function that is not listed here fails a test, so that whoever adds one looks at what it may
be given. The buttons whose work it is to edit captions may change them, and nothing else, and undo brings them back.
"""

import asyncio
import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from gradio.state_holder import SessionState
from test_page_uploads import functions
from test_users_files import LORA, SETTINGS, P, R, compare, queued, snapshot, work  # noqa: F401 - a fixture
from typer.testing import CliRunner

from lora_fp8 import cli, jobs
from lora_fp8.data import caption_operations, captions
from lora_fp8.data.caption_journal import JOURNAL
from lora_fp8.errors import UserError
from lora_fp8.run import ownership
from webui import app, dataset_folder, engine, estimate_panel, mcp, startup
from webui.context import Place, Ui
from webui.draft import Draft

CUT = {"frames": "", "fps": "auto", "clip": "chunks"}
TOOLS = ("inspect", "verify", "convert", "resize", "merge")
READING = {
    *("compare.refresh", "compare.open_page", "dataset._bind_edits.<lambda>", "dataset.examine_again"),
    *("dataset.change_purpose", "dataset.open", "dataset.refresh", "dataset.preview", "dataset.select"),
    *("new.update_side", "new.update_all", "new.refresh"),
    *("run._bind_buttons.<lambda>", "run.choose_preview"),
    *(
        "notifications.announce_test",
        "run.announce_export",
        "run.announce_kit",
        "run.end_run",
        "run.refresh",
        "run.pair_up",
        "run.redraw",
        "runs._bind_answers.<lambda>",
        "runs.choose_kind",
        "runs.refresh",
        "settings.<lambda>",
    ),
    *("draw.bind.<lambda>", "draw.choose_source", "draw.list_sources", "draw.open_page", "draw.refresh"),
    "run.load_prompts",
    *("tools.<lambda>", "tools.choose", "api.events", "api.list_jobs", "api.status"),
}
"""Functions that show something: module and name. They are called as all others are."""
Cases = list[dict[str, Any]]
TWO = f"{{work}}/{LORA}:1\n{{work}}/{LORA}:2"
WRITING: dict[str, Cases] = {
    "api.export": [{"2nd": ["kohya"]}],
    "api.stop": [],
    "api.submit": [{"1st": SETTINGS}],
    "dataset.apply": [],
    "dataset.handle_button": [],
    "notifications.save_address": [{"webhook": "{work}/project"}],
    "notifications.send_test": [],
    "notifications.remove_address": [],
    "new.use_folder": [],
    "new.remove_folder": [],
    "new.handle_button": [],
    "new.save_token": [{"new-base-token": "{work}/project"}],
    "new.restore_draft": [],
    "new.change": [],
    "new.handle_preset_button": [],
    "new.import_settings": [],
    "new.load": [{"Start from an existing config": place}
                  for place in ("{work}/project", "{work}/received/config.toml")],
    "new.reset": [],
    "new.save_preset": [{"new-preset-name": name}
                        for name in ("config", "../../data/project/config", "{work}/project/x")],
    "new.start": [{"draft": SETTINGS}, {"draft": SETTINGS.replace('"project"', '"received"')}],
    "new.find_rate": [{"draft": SETTINGS}],
    "new.set_default": [],
    "new.switch_view": [],
    "new.write_text": [{"new-toml": SETTINGS}],
    "draw.delete": [],
    "draw.handle_button": [],
    "draw.start": [{"draw-source": source, "draw-base": base}
                   for source in ("{work}/project", "{work}/received", f"{{work}}/{LORA}")
                   for base in ("demo", "{work}/project")],
    "run.change_prompts": [{"query": name, "new-prompts": "a ball"} for name in ("{work}/project", "{work}/received")],
    "run.request_sample": [{"query": name, "sample-prompt": "a ball"}
                           for name in ("{work}/project", "{work}/received", "1", "2")],
    "run.write_kit": [{"query": name} for name in ("{work}/project", "{work}/received", "1", "2")],
    "run.start_push": [{"query": name, "push-repo": "owner/name"} for name in ("{work}/project", "{work}/received")],
    "run.handle_button": [],
    "runs.handle_remote_button": [],
    "run.write_export": [{"query": name} for name in ("{work}/project", "{work}/received", "1", "2")],
    "runs.delete": [{"typed-name": name, "Also delete its folder: LoRA files, checkpoints, previews": True}
                    for name in ("project-job", "received-job", P, R)],
    "runs.end_run": [],
    "runs.handle_button": [],
    "settings.change_list": [{"root-path": "{work}/project", "models-path": "{work}/project"}],
    "tools.run_now": [{"Tool": tool, "LoRA file": f"{{work}}/{LORA}", "New file name": name,
                   "Files and weights": TWO, "Maximum rank": 2, "Energy to keep": 0,
                   "Base model": "{work}/project"}
                  for tool in TOOLS for name in (f"{{work}}/{LORA}", "../../data/project/lock", "mine_diffusers")],
    "tools.submit_job": [{"Tool": tool, "LoRA file": f"{{work}}/{LORA}", "New file name": name,
                      "Files and weights": TWO} for tool in TOOLS for name in (P, f"{{work}}/{LORA}")],
}  # fmt: skip
"""Functions that may write: what each is given in particular, by the name or label of a component; besides, `query` is
the run or folder of the page's address, and `draft` is in New training."""
EDITS_CAPTIONS = {"dataset.apply", "dataset.handle_button"}


def name_of(fn: Any) -> str:
    """Page (or module) and name of what a dependency calls, such as "dataset.save"."""
    function = inspect.unwrap(fn.fn)
    while isinstance(function, functools.partial):
        function = function.func
    name = re.sub(r"(build|bind_events|make_endpoints)\.<locals>\.|<locals>\.|^_?[A-Z]\w+\.", "", function.__qualname__)
    module = function.__module__.split(".")
    return f"{module[module.index('pages') + 1] if 'pages' in module else module[-1]}.{name}"


@pytest.fixture
def pages(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> app.Pages:  # noqa: F811
    """The page in English. What it would start in a process of its own is done in this one, or is tested elsewhere."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    monkeypatch.setattr(jobs, "ensure_worker", lambda *_: None)
    monkeypatch.setattr(estimate_panel.Estimates, "_start", lambda self, text: None)
    examined = SimpleNamespace(
        report=None, problem="", running=True, done=0, total=0, begun=0, files=None, list_files=lambda *_: {}
    )
    monkeypatch.setattr(dataset_folder, "examine", lambda *_: examined)
    monkeypatch.setattr(engine, "run_command", ask)
    place = Place(queued(work).home, [work])
    with startup.skip_servers():
        return app.build_blocks(Ui("en", place))


def in_a_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a thread: in this one a browser test of the same process has left its event loop running."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def ask(command: str, arguments: list[str], *_: Any, **__: Any) -> Any:
    result = CliRunner().invoke(cli.app, [command, "--json", *arguments])
    if result.exit_code:
        raise UserError(str(result.exception))
    return json.loads(result.stdout)


def upload(pages: app.Pages, work: Path, name: str) -> dict[str, Any]:  # noqa: F811
    """A description of an upload of this window: a picture, or settings that name the project."""
    path = work.parent / "uploads" / ("e" * 64) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    source = work / "project/control/a.png" if name.endswith(".png") else work / "project/config.toml"
    path.write_bytes(source.read_bytes())
    pages.upload_file_set.update([str(path)])
    return {"path": str(path), "meta": {"_type": "gradio.FileData"}}


def value_of(part: Any, number: int, place: Path, pages: app.Pages) -> Any:
    """A value for a component, another for each number; texts point into the project."""
    texts = [place / P, place / R, place / LORA, place / P / "config.toml", P, "1", "../project", "~"]
    kind, choices = part.get_block_name(), getattr(part, "choices", None)
    if isinstance(part, gr.File):
        one = upload(pages, place, "a.png" if ".png" in (part.file_types or ()) else "config.toml")
        return one if part.file_count == "single" else [one]
    if kind in ("checkbox",):
        return bool(number % 2)
    if kind in ("number", "slider"):
        return (part.minimum or 0) + number % 2
    if kind == "dataframe":
        return {"headers": ["path"], "data": [[str(place / P / "photos")]], "metadata": None}
    if choices and not getattr(part, "allow_custom_value", False):
        chosen = choices[number % len(choices)][1]
        return [chosen] if kind == "checkboxgroup" or getattr(part, "multiselect", False) else chosen
    return str(texts[number % len(texts)])


def held(part: gr.State, number: int, place: Path) -> Any:
    """What a session holds: where somebody is on the Dataset page, and whom the question of another one is about."""
    newest = [str(row.id) for row in jobs.Queue().store.read_rows()][-2:]
    folder = place / P / ("photos" if number % 2 else "")
    if part.value == {}:
        at = {"folder": str(folder), "query": "", "showing": "all", "finding": "", "chosen": ["a.png"], "cut": CUT}
        return at | {"do": "delete", "id": (*newest, str(place / P), str(place / R))[number % 4]}
    if part.value is None:
        return captions.preview(place / P / "photos", [caption_operations.AddTag("new")])
    return part.value


@functools.cache
def session(pages: app.Pages) -> SessionState:
    """The session of all calls: to make one takes long. What it holds is set before each call."""
    return SessionState(pages)


def call(pages: app.Pages, fn: Any, place: Path, number: int, given: dict[str, Any], told: dict[str, str]) -> Any:
    """Call a function as the routes do. Returns what it answers; a refusal as text."""
    at = {key: value.format(work=place) if isinstance(value, str) else value for key, value in given.items()}
    if "draft" in at:
        Draft(pages.ui.place.home).write(at["draft"])
    state, values = session(pages), []
    for i, part in enumerate(fn.inputs):
        if part.stateful:
            state[part._id] = held(part, number, place)
            values.append(None)
            continue
        names = (part.elem_id, getattr(part, "label", None))
        mine = next((at[name] for name in names if name in at), None)
        values.append(value_of(part, number + i, place, pages) if mine is None else mine)
    run = at.get("query") or (str(place / P), str(place / R), "1", "2")[number % 4]
    request = SimpleNamespace(
        headers={}, query_params={"run": run, "folder": run, "runs": run}, username=None, session_hash="s"
    )
    target = pages.blocks.get(fn.targets[0][0]) if fn.targets else None
    event = gr.EventData(target, told)
    try:
        return in_a_loop(pages.process_api(fn, values, state=state, request=request, event_data=event))["data"]
    except gr.Error as error:
        return str(error)


def presses(fn: Any) -> Iterator[dict[str, str]]:
    """Every button of the page, about every job and picture, if a function takes buttons; else nothing, once."""
    if "event" not in inspect.signature(inspect.unwrap(fn.fn)).parameters:
        yield {}
        return
    source = "".join(path.read_text(encoding="utf-8") for path in Path(app.__file__).parent.rglob("*.py"))
    buttons = set(re.findall(r'"(\w+)"', "".join(re.findall(r"\bdo (?:==|in) .*", source))))
    buttons |= {"choose", "adopt", "download", "cancel", "again"}  # of New training's base model, a table of functions
    assert {"stop", "kill", "delete", "repair", "rerun", "remove"} <= buttons
    for do in sorted(buttons):
        for id, name in {"1": "a.png", "2": "../README.md", "{work}/project": "", "{work}/received": "x"}.items():
            yield {"do": do, "id": id, "name": name, "to": "1", "step": "0", "base": id, "family": name}


def without_removed(before: dict[str, Any], place: Path) -> dict[str, Any]:
    """Leave out what deleting the received run with its folder may remove: the files and folders that we wrote."""
    received = place / R
    ours = {
        str(path)
        for path in map(Path, before)
        if path == received
        or (received in path.parents and not path.is_symlink())
        and (path.name in ownership.FOLDERS or ownership.is_ours(path.relative_to(received).as_posix()))
    }
    return {name: what for name, what in before.items() if name not in ours or os.path.lexists(name)}


def test_every_function_of_the_page_is_known(pages: app.Pages) -> None:
    """A new one is listed above: whether it may write, and what could make it write into a project."""
    assert {name_of(fn) for fn in functions(pages)} == {*READING, *WRITING}
    labels = {name for fn in functions(pages) for part in fn.inputs for name in (part.elem_id, part.label)}
    listed = {name for cases in WRITING.values() for case in cases for name in case}
    assert listed - {"query", "draft"} <= labels, "components of these names are no more"


def test_a_project_survives_every_function_of_the_page(
    pages: app.Pages,
    work: Path,  # noqa: F811
    some: Callable[..., list[Any]],
) -> None:
    before, called, photos = snapshot(work), set(), work / P / "photos"
    for fn in sorted(functions(pages), key=lambda fn: name_of(fn) == "runs.delete"):
        name = name_of(fn)
        # The same function at another event: once.
        is_new, rounds = name not in called, 1 if name in called else len(some(range(4), 0, of=3))
        called.add(name)
        cases = [{}] * rounds + WRITING.get(name, [])
        for number, given in enumerate(cases):
            for told in some([*presses(fn)], len(called), of=5) if is_new and number == 1 else ({},):
                told = {key: value.format(work=work) for key, value in told.items()}
                if name == "runs.delete":
                    queued(work)  # those of the last call are gone
                call(pages, fn, work, number, given, told)
                if name in EDITS_CAPTIONS:
                    for folder in (photos, work / P):
                        while any(entry.done for entry in captions.read_history(folder)):
                            captions.undo(folder)
                        (folder / JOURNAL).unlink(missing_ok=True)
                if name == "runs.delete":
                    before = without_removed(before, work)
                compare(before, work)
    assert called == {*READING, *WRITING}


def test_the_buttons_do_something(pages: app.Pages, work: Path) -> None:  # noqa: F811
    """Else the test above would pass for nothing: what is changed where it may be, and is asked for what."""
    found: dict[str, Any] = {}
    for fn in functions(pages):
        found.setdefault(name_of(fn), fn)
    call(pages, found["dataset.apply"], work, 1, {}, {})
    assert "new" in (work / "project/photos/b.txt").read_text(encoding="utf-8")
    call(pages, found["new.save_preset"], work, 0, WRITING["new.save_preset"][0], {})
    assert [path.name for path in (pages.ui.place.home / "presets").iterdir()] == ["config.toml"]
    merge = next(case for case in WRITING["tools.run_now"] if set(case.values()) >= {"merge", "mine_diffusers"})
    answer = call(pages, found["tools.run_now"], work, 0, merge, {})
    assert [path.name for path in (pages.ui.place.home / "tools").iterdir()] == ["mine_diffusers.safetensors"], answer
    call(pages, found["settings.change_list"], work, 0, WRITING["settings.change_list"][0], {})
    assert pages.ui.place.added == (work / "project",)
    number = max(row.id for row in queued(work).store.read_rows())
    call(pages, found["runs.delete"], work, 1, WRITING["runs.delete"][1], {})
    assert number not in [row.id for row in jobs.Queue().store.read_rows()]


# ----------------------------------------------------------------------------------------------------------------- mcp

ASKED: dict[str, list[dict[str, Any]]] = {
    "template": [{"presets": ["{work}/project/config.toml"]}, {"family": "{work}/project"}],
    "check": [{"text": SETTINGS}],
    "submit": [{"config": SETTINGS}, {"config": SETTINGS.replace('"project"', '"received"')}],
    "list": [{}],
    "status": [{"id": id} for id in ("{work}/project", "{work}/received", "1", "2")],
    "events": [{"id": id} for id in ("{work}/project", "{work}/received", "1", "2")],
    "stop": [{"id": id} for id in ("{work}/project", "{work}/received", "1", "2")],
    "export": [
        {"id": id, "formats": formats}
        for id in ("{work}/project", "{work}/received", "1", "2")
        for formats in ([], ["kohya"], ["../../project/config"])
    ],
}


def test_a_project_survives_every_tool_of_mcp(
    work: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "ensure_worker", lambda *_: None)
    server = mcp.make_server(Place(queued(work).home, [work]))
    before = snapshot(work)

    async def ask_all() -> None:
        assert {tool.name for tool in await server.list_tools()} == {*ASKED}, "a new tool is tried here, too"
        for name, cases in ASKED.items():
            answered = 0
            for case in cases:
                given = {key: value.format(work=work) if isinstance(value, str) else
                         [one.format(work=work) for one in value] for key, value in case.items()}  # fmt: skip
                try:
                    await server.call_tool(name, given)
                    answered += 1
                except mcp.ToolError:
                    pass
                compare(before, work)
            refused = ("template", "check", "submit", "stop")  # settings whose run folder it is; nobody trains there
            assert answered or name in refused, f"{name} refuses all, and is not tried"

    in_a_loop(ask_all())
