"""What somebody may type into New training and Dataset stays text, in every field of both pages.

The fields are those that the site itself tells a browser of, and each is filled through the route that a browser uses.
Afterwards nothing has been run, nothing lies where it should not, and no program has an option that was typed.
"""

import itertools
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit
from PIL import Image
from starlette.testclient import TestClient

from lora_fp8 import jobs
from lora_fp8.settings import PATHS
from webui import app, form
from webui.context import Place
from webui.images import routes

PAGES = ("new", "dataset")
TEXT = {"textbox", "code", "dataframe"}
"""Kinds of components that hold what is typed; and a dropdown that takes more than its choices."""
OTHER = {"accordion", "button", "checkbox", "column", "dropdown", "file", "form", "html", "markdown", "number", "radio"}
OTHER |= {"row", "state", "tabitem", "tabs", "timer"}
IN_THE_ADDRESS = {"dataset-folder", "dataset-purpose", "new-address", "new-search"}
"""Fields that no function of the page is given: a script puts them into the browser's address, searches by them, or
tells the image workbench."""
FITTING = {"new-set": "pictures"}
"""What the other fields of a form hold, so that it is not refused because of them; elsewhere "x"."""
PAYLOADS = (
    '"></style></textarea><script>window.canary=1</script><img src=x onerror=window.canary=1>{{{{7*7}}}}${{7*7}}',
    "; touch {0} | touch {0} && $(touch {0}) `touch {0}`",
    "--config=/etc/passwd",
    "../../../../../../../../..{0}",
    "/etc/passwd\0.png\x1b[2J\u202egnp.exe\u2066",
    "A" * 5000,
)
WORKBENCH = ("folder", "family", "query", "showing", "finding", "name", "loaded", "caption", "what", "model", "kind")
WORKBENCH += ("prompt", "trigger")
"""What the requests of the image workbench hold as text."""
START = '[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "{}"\n'


class Site:
    """The site in this process, as a browser's requests see it; what it would start is noted, and `false` runs."""

    def __init__(self, folder: Path):
        self.folder, self.canary = folder, folder / "outside" / "canary"
        self.pictures = folder / "data" / "set"
        self.place = Place(folder / "home", [folder / "data"])
        self.started: list[list[str]] = []
        self.client = TestClient(app.build(self.place), base_url="http://127.0.0.1:7860")
        told = self.client.get("/en/config").json()
        self.parts = {one["id"]: one for one in told["components"]}
        of_pages = {id for page in PAGES for id in told["page"][page]["dependencies"]}
        self.calls = [one for one in told["dependencies"] if one["id"] in of_pages]
        self.shown = [self.parts[id] for page in PAGES for id in told["page"][page]["components"]]

    def fields(self) -> list[int]:
        """Ids of what takes text."""
        return [
            one["id"]
            for one in self.shown
            if one["type"] in TEXT or (one["type"] == "dropdown" and one["props"].get("allow_custom_value"))
        ]

    def name(self, id: int) -> str:
        return self.parts[id]["props"].get("elem_id") or str(self.parts[id]["props"].get("label"))

    def calls_with(self, id: int) -> list[dict[str, Any]]:
        return [call for call in self.calls if call["backend_fn"] and id in call["inputs"]]

    def call(self, call: dict[str, Any], texts: dict[int, str], event: Any = None, query: str = "") -> list[Any]:
        """What the page answers; every piece of HTML in it is looked at."""
        data = [self._held(id, texts.get(id)) for id in call["inputs"]]
        answer = self.client.post(
            "/en/gradio_api/run/predict",
            params={"folder": query} if query else {},
            json={"fn_index": call["id"], "session_hash": "one", "data": data, "event_data": event},
        )
        assert answer.status_code == 200, (call["api_name"], texts, answer.text[:500])
        assert "root:x:0" not in answer.text
        assert "problem" not in answer.json(), (call["api_name"], texts, answer.json()["problem"])
        told = answer.json()["data"]
        for id, value in zip(call["outputs"], told, strict=True):
            if self.parts[id]["type"] == "html":
                _harmless(value.get("value", "") if isinstance(value, dict) else value)
        return told

    def _held(self, id: int, text: str | None) -> Any:
        part = self.parts[id]
        fitting = FITTING.get(self.name(id), "x")
        if part["type"] == "dataframe":
            width = len(part["props"]["headers"])
            return {"headers": [""] * width, "data": [[text or ""] * width], "metadata": None}
        if part["type"] == "dropdown" and part["props"].get("multiselect"):
            return [text] if text else []
        if self.name(id) == "new-touched":  # a script's list of what was changed last
            return json.dumps([text] if text else [])
        if part["type"] in ("textbox", "code"):
            return fitting if text is None else text
        return part["props"].get("value") if text is None else text

    def ask(self, action: str, **values: Any) -> None:
        """Ask the image workbench's routes. What they refuse is a sentence."""
        given = {"folder": str(self.pictures), "model": "nobody/nothing", "name": "a.png"}
        given |= {"loaded": "a cat", "caption": "a cat"}
        answer = self.client.post(f"/images/en/{action}", json=given | values)
        assert answer.status_code in (200, 400), (action, values, answer.text[:500])
        assert "root:x:0" not in answer.text and "Traceback" not in answer.text

    def find(self, target: str, event: str) -> dict[str, Any]:
        """The function behind an event of a component."""
        (id,) = [one["id"] for one in self.shown if one["props"].get("elem_id") == target]
        return next(call for call in self.calls if call["backend_fn"] and [id, event] in call["targets"])

    def opened(self, folder: str = "") -> None:
        """New training, or the Dataset page at this folder."""
        loads = [call for call in self.calls if any(what == "load" for _, what in call["targets"])]
        for call in loads:
            if bool(call["inputs"]) != bool(folder):  # New training's is told of a checkbox
                self.call(call, {}, query=folder)

    def lines(self) -> list[list[str]]:
        """What was started, and what the worker would start for what is in the queue."""
        worker = jobs.Worker(self.place.home, report=lambda line: None)
        found = list(self.started)
        for row in worker.store.read_rows():
            attempt = worker.store.get_folder(row.id) / "attempt-1"
            attempt.mkdir(parents=True, exist_ok=True)
            found.append(worker.make_command(row, "cpu", attempt))
        return found


class _Tags(HTMLParser):
    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag != "script" and not any(name.startswith("on") for name, _ in attributes), (tag, attributes)
        assert not any("javascript:" in (value or "") for _, value in attributes), attributes


def _harmless(html: Any) -> None:
    if isinstance(html, str):
        reader = _Tags()
        reader.feed(html)
        reader.close()
        assert "\u202e" not in html and "\0" not in html and "<%= 49" not in html and "{{49" not in html


def options(lines: list[list[str]]) -> set[str]:
    """Names of all options in these command lines."""
    found = set()
    for line in lines:
        given = itertools.takewhile(lambda part: part != "--", line[1:])
        found |= {part.partition("=")[0] for part in given if part.startswith("-")}
    return found


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("canaries")
    for name in ("data/set", "outside", "empty", "home", "uploads"):
        (folder / name).mkdir(parents=True)
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(folder / "data/set/a.png")
    (folder / "data/set/a.txt").write_text("a cat", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder / "uploads"))
        patch.setattr(jobs, "ensure_worker", lambda home: None)
        patch.chdir(folder / "empty")
        made = Site(folder)

        class Noted(subprocess.Popen):
            def __init__(self, line: list[str], *rest: Any, **given: Any):
                assert isinstance(line, list) and not given.get("shell"), line
                made.started.append([str(part) for part in line])
                super().__init__(["false"], *rest, **given)

        patch.setattr(subprocess, "Popen", Noted)
        yield made


def test_every_field_is_known_and_reaches_a_function(site: Site) -> None:
    """A field of a new kind, or one that goes by another way, is looked at here first."""
    assert {one["type"] for one in site.shown} <= TEXT | OTHER
    assert len(site.fields()) > 80
    assert {site.name(id) for id in site.fields() if not site.calls_with(id)} == IN_THE_ADDRESS


def test_what_is_typed_into_any_field_stays_text(site: Site, some: Callable[..., list[Any]]) -> None:
    site.opened(str(site.pictures))
    site.place.home.joinpath("drafts").mkdir(exist_ok=True)
    draft = site.place.home / "drafts/new.toml"
    draft.write_text(START.format(site.pictures), encoding="utf-8")
    site.ask("list")
    site.ask("caption", model="nobody/nothing", prompt="plain", trigger="plain")
    site.call(site.find("new-start", "click"), {})
    before, known = files(site.folder), options(site.lines())
    assert {"--model", "--prompt", "--trigger"} <= known and len(jobs.Queue(site.place.home).list_jobs()) == 2

    payloads = [text.format(site.canary) for text in PAYLOADS]
    settings = {f"{view}-{key.replace('.', '-')}" for key in form.collect_settings() for view in ("set", "new")}
    start = site.find("new-start", "click")
    (touched,) = [id for id in site.fields() if site.name(id) == "new-touched"]
    # No browser sends this: every part was changed and has no value, and so were parts that there are not.
    site.call(start, {touched: " ".join(["set-nothing", *map(site.name, start["inputs"]), "__class__"])})
    for number, id in enumerate(site.fields()):
        # The settings share one way: one payload each here, and all of them below; every other field gets all.
        is_setting = site.name(id) in settings
        share = some([payloads[number % len(payloads)]] if is_setting else payloads, number, of=4 if is_setting else 3)
        calls = [call for call in site.calls_with(id) if id == touched or call is not start]  # it is given every field
        for call, text in itertools.product(calls, share):
            draft.write_text(START.format(site.pictures), encoding="utf-8")
            site.call(call, {id: text})
    for text in some(payloads, 0, of=3):
        site.opened(text)
        for event in ({"do": text, "name": text}, {"do": "rename", "name": text}, {"do": "remove", "name": text}):
            site.call(site.find("dataset-tags", "click"), {}, event)
        shown = {"query": text, "showing": text, "finding": text, "chosen": text}
        site.call(site.find("dataset-images", "select"), {}, shown)
    for number, (action, field) in enumerate(itertools.product(sorted(routes.ACTIONS), WORKBENCH)):
        # A caption that is saved gets all: what it leaves is looked at below.
        for text in payloads if action == "save" else [payloads[number % len(payloads)]]:
            site.ask(action, **{field: text})

    # In all: shown in every view, and started with those that take it. Not 5,000 letters in each: that tests tomlkit.
    for number, text in enumerate(text[:300] for text in payloads):
        tables = tomlkit.parse(START.format(site.pictures)).unwrap() | {"name": f"n{number}"}
        for key, one in form.collect_settings().items():
            if one.kind in ("text", "lines", "entries") and key not in ("name", "model.path", "model.family"):
                section, _, name = key.rpartition(".")
                (tables.setdefault(section, {}) if section else tables)[name] = {
                    "lines": [text],
                    "entries": {text: text},
                }.get(one.kind, text)
        draft.write_text(tomlkit.dumps(tables), encoding="utf-8")
        site.opened()
        while True:
            draft.write_text(tomlkit.dumps(tables), encoding="utf-8")
            site.call(site.find("new-start", "click"), {})
            wrong = {one.key for one in form.find_problems(draft.read_text(encoding="utf-8"), site.place.home)}
            left = [
                key
                for key in sorted(PATHS.keys() - {"model.path"})
                if not key.startswith("dataset.folders.") and _take(tables, key)
            ]
            if not [key for key in wrong if _take(tables, key)] and not left:
                break
    queued = [job for job in jobs.Queue(site.place.home).list_jobs() if job.kind == "train"]
    assert len(queued) > len(payloads) / 2, "some payloads are fit to be prompts"
    assert all(job.folder.is_relative_to(site.place.home / "runs") for job in queued)

    assert not site.canary.exists() and os.listdir(site.folder / "empty") == [] == os.listdir(site.folder / "outside")
    assert options(site.lines()) <= known
    new = {
        name
        for name in files(site.folder) - before
        if not re.match(r"home/(presets|history|jobs|lr-find|drafts)(/|$)", name)
    }
    assert new == {"data/set/.lora_fp8_captions.jsonl"}, "written where nothing belongs"  # captions can be undone


def test_an_import_reads_what_came_with_it_and_nothing_outside(site: Site) -> None:
    foreign, secret = site.folder / "foreign", "the words of somebody else"
    (foreign / "7_hidden name").mkdir(parents=True)
    (foreign / "prompts.txt").write_text(secret, encoding="utf-8")
    (foreign / "data.toml").write_text(
        f'[[datasets]]\n[[datasets.subsets]]\nimage_dir = "{secret}"\n', encoding="utf-8"
    )
    theirs = 'network_module = "networks.lora"\npretrained_model_name_or_path = "m"\n'
    theirs += 'sample_prompts = "{0}/prompts.txt"\ndataset_config = "{0}/data.toml"\nreg_data_dir = "{0}"\n'
    call = site.find("new-import", "upload")
    (id,) = [id for id in call["inputs"] if site.parts[id]["type"] == "file"]

    def imported(*files: tuple[str, str]) -> str:
        sent = [("files", (name, text.encode())) for name, text in files]
        paths = site.client.post("/en/gradio_api/upload", files=sent).json()
        given = [{"path": path, "meta": {"_type": "gradio.FileData"}} for path in paths]
        return json.dumps(site.call(call, {id: given}))  # type: ignore[dict-item]

    for way in (str(foreign), "../" * 12 + str(foreign)[1:], os.path.relpath(foreign)):
        told = imported(("k.toml", theirs.format(way)))
        assert "networks.lora" in told and secret not in told and "hidden name" not in told, way
    told = imported(("k.toml", theirs.format(foreign)), ("prompts.txt", secret))
    assert secret in told and "Also read: prompts.txt" in told
    inside = site.folder / "data" / "settings"
    inside.mkdir()
    (inside / "prompts.txt").write_text(secret, encoding="utf-8")
    assert secret in imported(("k.toml", theirs.format(inside)))


def _take(tables: dict[str, Any], key: str) -> bool:
    """Take a setting out. -> whether it was there"""
    section, _, name = key.rpartition(".")
    home = tables.get(section, {}) if section else tables
    return isinstance(home, dict) and home.pop(name, None) is not None
