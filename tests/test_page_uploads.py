"""Files that a call names, tried against every function of the built site through the routes that a program can use.

Each function is tried with each way to name a file that is none of its window's uploads, in each of its values. The
private files hold a word of their own, and it is looked for in what comes back and in everything that was written.
"""

import contextlib
import http.server
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import gradio as gr
import httpx
import pytest
import uvicorn
from gradio.data_classes import FileData
from PIL import Image
from test_page_guard import Served
from waiting import LONG_SECONDS

from lora_fp8 import jobs
from webui import app, error_boundary
from webui.context import Place
from webui.guard import Guard
from webui.login import FREE_FAILURES, Login
from webui.server import listen
from webui.uploads import HEADER

SECRET = b"the-private-word-of-somebody"
WINDOW, OTHER = "a" * 32, "b" * 32
META = {"_type": "gradio.FileData"}
TAKE_FILES = {"new-import"}
PARTS = {
    *(
        "button",
        "checkbox",
        "checkboxgroup",
        "code",
        "dataframe",
        "dropdown",
        "file",
        "html",
        "json",
        "markdown",
        "number",
        "radio",
    ),
    *("slider", "state", "tab", "tabitem", "textbox", "timer", "api"),
}
"""Kinds of components that may be inputs; of these `file` alone takes files, as `test_only_files_take_files` sees."""


class Site:
    """The site on a real port, and what it has written to its log."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.place = folder, Place(folder / "home", [folder / "data"])
        self.uploads = folder / "uploads"
        site = app.build(self.place)
        self.pages: dict[str, gr.Blocks] = {
            route.path.strip("/"): route.app.get_blocks() for route in site.routes if hasattr(route, "routes")
        }
        self.server = uvicorn.Server(uvicorn.Config(site, log_level="error", timeout_graceful_shutdown=1))
        self.socket = listen("127.0.0.1", 0)
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.02)
        self.client = httpx.Client(base_url=self.address, timeout=LONG_SECONDS)

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.thread.join(10)

    def upload(self, name: str, data: bytes, window: str = WINDOW, language: str = "en") -> str:
        answer = self.client.post(
            f"/{language}/gradio_api/upload", files=[("files", (name, data))], headers={HEADER: window}
        )
        (path,) = answer.raise_for_status().json()
        return path

    def written(self) -> dict[str, bytes]:
        """Every file that the page has, or could serve, and its bytes."""
        return {
            str(path): path.read_bytes()
            for folder in (self.place.home, self.uploads)
            for path in folder.rglob("*")
            if path.is_file()
        }


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("uploads_site")
    for name in ("data/set", "private", "uploads", "empty"):
        (folder / name).mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(folder / "data/set/a.png")
    for name in ("private.png", "private.txt", "private.svg", "private.toml"):
        (folder / "private" / name).write_bytes(SECRET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(folder / "uploads"))
        patch.setattr(jobs, "ensure_worker", lambda home: None)
        patch.chdir(folder / "empty")
        made = Site(folder, patch)
        yield made
        made.close()


@pytest.fixture
def asked() -> Iterator[list[str]]:
    """Paths that somebody asked of a server on this machine; the page must ask it for none."""
    seen: list[str] = []

    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(SECRET)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    seen.append(f"http://127.0.0.1:{server.server_port}")
    yield seen
    server.shutdown()
    thread.join(10)


def functions(pages: gr.Blocks) -> list[Any]:
    """Every function that a call can name, of Gradio's own making included."""
    return [fn for fn in pages.fns.values() if fn.fn is not None]


def takes_files(part: Any) -> bool:
    """Return True if a component's values have descriptions of files in them, by what Gradio parses them into."""
    model = getattr(part, "data_model", None)
    return model is not None and ("FileData" in json.dumps(model.model_json_schema()) or issubclass(model, FileData))


def test_only_files_take_files(site: Site) -> None:
    """A component of a new kind, or another one that takes files, is looked at here first."""
    for pages in site.pages.values():
        inputs = {part for fn in functions(pages) for part in fn.inputs}
        assert {part.get_block_name() for part in inputs} <= PARTS
        assert {part.elem_id for part in inputs if takes_files(part)} == TAKE_FILES
        assert all(isinstance(part, gr.File) for part in inputs if takes_files(part))
        assert not any(fn.batch or fn.renderable for fn in functions(pages))
        assert not any(name for part in pages.blocks.values() for name in getattr(part, "server_fns", ()) or ())


def attacks(site: Site, address: str) -> dict[str, Any]:
    """Ways to name a file that is no upload of this window; a value for a function that takes a list of them."""
    outside = site.folder / "private"
    link = site.uploads / ("c" * 64)
    link.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (link / "link.png").symlink_to(outside / "private.png")
        (site.uploads / ("d" * 64)).symlink_to(outside)
    (link / "left.png").write_bytes(SECRET[::-1])  # in the folder, but nobody has uploaded it
    ours = Path(site.upload("ours.txt", b"a caption"))

    def one(path: Any, **more: Any) -> dict[str, Any]:
        return {"path": str(path), "meta": META, **more}

    return {
        "foreign": [one(outside / "private.png")],
        "foreign caption": [one(outside / "private.txt")],
        "foreign settings": [one(outside / "private.toml")],
        "system": [one("/etc/passwd")],
        "process": [one("/proc/self/environ")],
        "below a root": [one(site.folder / "data/set/a.png")],
        "queue": [one(site.place.home / "queue.db")],
        "link": [one(link / "link.png")],
        "link in the way": [one(site.uploads / ("d" * 64) / "private.png")],
        "never uploaded": [one(link / "left.png")],
        "up": [one(f"{ours.parent}/../../private/private.png")],
        "up and back": [one(f"{ours.parent}/../{ours.parent.name}/{ours.name}")],
        "relative": [one("../private/private.png")],
        "home": [one("~/private.png")],
        "folder": [one(ours.parent)],
        "nothing": [one("")],
        "NUL": [one(f"{ours}\0.png")],
        "address": [one(f"{address}/x.png")],
        "file address": [one(f"file://{outside}/private.png")],
        "data address": [one("data:image/png;base64,iVBORw0KGgo=")],
        "svg": [one(outside / "private.svg")],
        "own svg": [one(site.upload("own.svg", b"<svg onload='alert(1)'/>"))],
        "of another window": [one(site.upload("theirs.txt", b"another caption", OTHER))],
        "stream": [one(outside / "private.png", is_stream=True)],
        "no meta": [{"path": str(outside / "private.png")}],
        "meta is a word": [{"path": str(outside / "private.png"), "meta": "gradio.FileData"}],
        "other meta": [{"path": str(outside / "private.png"), "meta": {"_type": "x"}}],
        "no path": [{"meta": META}],
        "path is a list": [{"path": [str(outside)], "meta": META}],
        "one for a list": one(outside / "private.png"),
        "own, one for a list": one(ours),
        "list in a list": [[one(outside / "private.png")]],
        "in a dict": {"value": one(outside / "private.png")},
        "in a table": {"headers": ["a"], "data": [[one(outside / "private.png")]], "metadata": None},
        "text": str(outside / "private.png"),
        "texts": [str(outside / "private.png")],
        "number": 1,
        "deep": json.loads("[" * 400 + "]" * 400),
    }


PLAIN = ("text", "texts", "number", "deep")
"""Attacks that are no description of a file: values like others, where no files are taken."""


def send(site: Site, language: str, fn: Any, data: list[Any], route: str, session: str) -> str:
    """What a call is answered, as text."""
    body = {"fn_index": fn._id, "data": data, "session_hash": session, "event_data": None}
    if route == "queue":
        begun = site.client.post(f"/{language}/gradio_api/queue/join", json=body, headers={HEADER: WINDOW})
        if begun.status_code != 200:
            return begun.text
        with site.client.stream("GET", f"/{language}/gradio_api/queue/data?session_hash={session}") as stream:
            return "".join(stream.iter_text())
    return site.client.post(f"/{language}/gradio_api/{route}/x", json=body, headers={HEADER: WINDOW}).text


def test_the_english_pages_have_every_function_of_the_chinese_ones(site: Site) -> None:
    """So that what is tried on the English ones, which have those of the API besides, holds for both."""
    english, chinese = (
        Counter((fn.name, len(fn.inputs)) for fn in functions(site.pages[name])) for name in ("en", "zh-CN")
    )
    assert not chinese - english and english.total() > 100


def test_no_function_reads_a_file_that_its_window_did_not_upload(
    site: Site, asked: list[str], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """All functions, all values, all attacks: a function that Gradio runs is noted, and files never get that far."""
    language, reached = "en", []
    pages = site.pages[language]
    tried = attacks(site, asked.pop())
    before = site.written()
    originals = {fn: fn.fn for fn in functions(pages)}
    sent = 0
    for fn in originals:  # judged without what a function does: it must not be called at all
        fn.fn = _noting(fn.fn, reached)
    try:
        for number, fn in enumerate(originals):
            places = [i for i, part in enumerate(fn.inputs) if not part.stateful]
            files = [i for i in places if takes_files(fn.inputs[i])]
            for place in places:
                for name, value in tried.items():
                    if name in PLAIN and place not in files:
                        continue
                    data = [None] * len(fn.inputs)
                    data[place] = value
                    with pytest.raises(gr.Error) as refused:  # each value of each function, without a server
                        pages._check_files(fn, data, WINDOW)
                    assert not refused.value.print_exception
            # And through the server: everything where files are taken, elsewhere a few of them in turn.
            routes = ("queue", "run", "api") if files else ("run",)
            names = list(tried) if files else [list(tried)[(3 * number + i) % len(tried)] for i in range(3)]
            for name in names if places else ():
                if name in PLAIN and not files:
                    continue
                data = [None] * len(fn.inputs)
                data[files[0] if files else places[number % len(places)]] = tried[name]
                for route in routes:
                    told = send(site, language, fn, data, route, f"s{sent}")
                    sent += 1
                    assert not reached, (fn.name, name, route)
                    assert '"error"' in told and SECRET.decode() not in told, (fn.name, name, route, told[:300])
    finally:
        for fn, original in originals.items():
            fn.fn = original
    assert asked == [], "the page asked another host"
    assert sent > len(originals)
    after = site.written()
    assert after.keys() == before.keys()
    assert not [path for path, data in after.items() if SECRET in data and path not in before]
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


def _noting(function: Callable[..., Any], reached: list[Any]) -> Callable[..., Any]:
    import functools

    @functools.wraps(function)
    def noted(*given: Any, **named: Any) -> Any:
        reached.append(function)
        raise AssertionError("was called")

    return noted


def test_an_address_beside_an_upload_is_not_asked(site: Site, asked: list[str]) -> None:
    address = asked.pop()
    path = site.upload("k.toml", b'network_module = "networks.lora"\n')
    (fn,) = [fn for fn in functions(site.pages["en"]) if any(part.elem_id == "new-import" for part in fn.inputs)]
    given = {"path": path, "url": f"{address}/x", "orig_name": "k.toml", "is_stream": True, "meta": META}
    data = [[given] if takes_files(part) else None for part in fn.inputs]
    told = send(site, "en", fn, data, "run", "beside")
    assert "networks.lora" in told and asked == []


def test_uploads_of_the_window_are_taken_in(site: Site) -> None:
    """What the page itself sends still works, and through every route; a second time, too."""
    path = site.upload("kept.toml", b'network_module = "networks.lora"\n')
    (fn,) = [fn for fn in functions(site.pages["en"]) if any(part.elem_id == "new-import" for part in fn.inputs)]
    data = [[{"path": path, "meta": META}] if takes_files(part) else None for part in fn.inputs]
    for number, route in enumerate(("queue", "run", "api")):
        told = send(site, "en", fn, data, route, f"taken{number}")
        assert "networks.lora" in told, told[:300]
    # By another window it is refused, whatever it says it is.
    answer = site.client.post(
        "/en/gradio_api/run/x",
        json={"fn_index": fn._id, "data": data, "session_hash": "taken0"},
        headers={HEADER: OTHER},
    )
    assert answer.status_code == 500 and "was not uploaded in this window" in answer.json()["error"]


TAKES_VALUES = "a function that takes values"
MALFORMED = {
    "no such function": ("run/x", {"fn_index": 99999, "data": []}),
    "no such name": ("call/nothing", {"data": []}),
    "no such name, v2": ("call/v2/nothing", {}),
    "no values": ("run/x", {"fn_index": TAKES_VALUES, "data": []}),
    "too few, in the queue": ("queue/join", {"fn_index": TAKES_VALUES, "data": [], "session_hash": "m"}),
    "no function, in the queue": ("queue/join", {"fn_index": 99999, "data": [], "session_hash": "m"}),
    "no session": ("queue/join", {"fn_index": TAKES_VALUES, "data": []}),
    "component": ("component_server", {"session_hash": "m", "component_id": 99999, "fn_name": "x", "data": 1}),
    "component's method": ("component_server", {"session_hash": "m", "component_id": 1, "fn_name": "postprocess"}),
    "trigger": ("run/x", {"fn_index": TAKES_VALUES, "data": [], "trigger_id": 99999}),
    "cancel": ("cancel", {"session_hash": "m", "fn_index": TAKES_VALUES, "event_id": "x"}),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_call_is_one_line(
    site: Site, what: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    route, body = MALFORMED[what]
    if body.get("fn_index") == TAKES_VALUES:
        body = {**body, "fn_index": next(fn._id for fn in functions(site.pages["en"]) if fn.inputs)}
    error_boundary._logged.clear()
    with caplog.at_level(logging.WARNING):
        answer = site.client.post(f"/en/gradio_api/{route}", json=body)
    if '"event_id"' in answer.text:
        with site.client.stream("GET", "/en/gradio_api/queue/data?session_hash=m") as stream:
            assert "error" in "".join(stream.iter_text())
    told = caplog.text + "".join(capfd.readouterr())
    assert "Traceback" not in told and len(told.strip().splitlines()) <= 1, told
    assert "Traceback" not in answer.text


def test_every_function_answers_every_wrong_type_in_a_line(
    site: Site, some: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Values of kinds that no page sends: whatever a function makes of them, it is no traceback."""
    for number, fn in enumerate(some(functions(site.pages["en"]), 0, of=3)):
        value = ({"a": 1}, [[1]], 1e308, "x", True)[number % 5]
        body = {"fn_index": fn._id, "data": [value] * len(fn.inputs), "session_hash": "w", "event_data": value}
        answer = site.client.post("/en/gradio_api/run/x", json=body)
        assert answer.status_code in (200, 500) and "Traceback" not in answer.text
        assert answer.status_code == 200 or answer.json()["error"], (fn.name, value)
    assert "Traceback" not in caplog.text + "".join(capfd.readouterr())


# --------------------------------------------------------------------------------------------------- the login


def test_held_bodies_are_judged_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many forms whose last byte is held back, sent at once: as many are judged as an address has free attempts."""
    password, many = "correct horse battery", 40
    monkeypatch.setattr("webui.login.time", SimpleNamespace(monotonic=lambda: 1000.0, time=time.time))  # nobody waits

    async def inside(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody is in")

    served = Served(Guard(inside, login=Login("me", password, tmp_path / "sessions.json")))
    held = []

    def hold(given: str) -> None:
        body = urlencode({"username": "me", "password": given}).encode()
        connection = HTTPConnection("127.0.0.1", served.port, timeout=LONG_SECONDS)
        connection.putrequest("POST", "/en/login")
        connection.putheader("content-length", str(len(body)))
        connection.endheaders(body[:-1])
        held.append((connection, body[-1:]))

    try:
        for number in range(many):
            hold(f"guess {number}")
        hold(password)  # asked for when nobody had to wait yet, and judged when the others were
        for connection, last in held[:-1]:
            connection.send(last)
        answers = [connection.getresponse().status for connection, _ in held[:-1]]
        held[-1][0].send(held[-1][1])
        right = held[-1][0].getresponse().status
    finally:
        for connection, _ in held:
            connection.close()
        served.close()
    assert (answers.count(401), answers.count(429), right) == (FREE_FAILURES, many - FREE_FAILURES, 429)
