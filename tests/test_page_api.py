"""The functions for programs: as endpoints, through gradio_client over a real server, with the login; and as tools,
through the client of the mcp library over a real process."""

import asyncio
import json
import os
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gradio as gr
import httpx
import pytest
import uvicorn
from gradio_client import Client
from gradio_client.exceptions import AppError, AuthenticationError
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from lora_fp8 import jobs
from webui import app
from webui.context import Place
from webui.login import Login
from webui.server import listen

PASSWORD = "a long password"
NAMES = {"/submit", "/list", "/status", "/events", "/stop", "/export"}
CONFIG = """
name = "{name}"
[model]
family = "sd15"
path = "demo"
[[dataset.folders]]
path = "{folder}"
"""


class Address(str):
    """Where a site is, and the site."""

    def __new__(cls, text: str, site: Any) -> "Address":
        made = super().__new__(cls, text)
        made.site = site
        return made


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("api")
    run = folder / "data/shell"
    (run / "export/step-000200").mkdir(parents=True)
    (run / "config.toml").write_text(CONFIG.format(name="shell", folder="x"), encoding="utf-8")
    lines = [
        {"t": 1.0, "event": "stage", "stage": "cache"},
        {"t": 2.0, "event": "step", "step": 1, "steps": 9, "loss": 0.5},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (run / "export/shell_kohya.safetensors").write_bytes(b"12345")
    (run / "export/step-000200/shell_kohya.safetensors").write_bytes(b"1234")
    (folder / "data/pictures").mkdir()
    return Place(folder / "home", [folder / "data"])


@pytest.fixture(scope="module")
def address(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A page with a login whose queue nobody works on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("uploads")))
        patch.setattr(jobs, "ensure_worker", lambda home: None)
        place.home.mkdir()
        site = app.build(place, login=Login("me", PASSWORD, place.home / "sessions.json"))
        server = uvicorn.Server(uvicorn.Config(site, log_level="error", timeout_graceful_shutdown=1))
        with listen("127.0.0.1", 0) as listening:
            thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
            thread.start()
            while not server.started:
                assert thread.is_alive()
                time.sleep(0.05)
            yield Address(f"http://127.0.0.1:{listening.getsockname()[1]}", site)
            server.should_exit = True
            thread.join(10)


@pytest.fixture(scope="module")
def client(address: str, tmp_path_factory: pytest.TempPathFactory) -> Client:
    folder = tmp_path_factory.mktemp("downloads")
    return Client(
        f"{address}/en/", auth=("me", PASSWORD), verbose=False, download_files=folder, analytics_enabled=False
    )


def test_without_the_password_nothing_is_told(address: str) -> None:
    for auth in (None, ("me", "wrong password")):
        with pytest.raises((AuthenticationError, ValueError)):
            Client(f"{address}/en/", auth=auth, verbose=False, analytics_enabled=False)


def test_the_public_functions_are_these_six_and_all_others_are_private(client: Client, address: str) -> None:
    told = client.view_api(return_format="dict", print_info=False)
    assert set(told["named_endpoints"]) == NAMES and told["unnamed_endpoints"] == {}
    assert "TOML text" in told["named_endpoints"]["/submit"]["description"]
    chinese = Client(f"{address}/zh-CN/", auth=("me", PASSWORD), verbose=False, analytics_enabled=False)
    assert chinese.view_api(return_format="dict", print_info=False)["named_endpoints"] == {}


def test_a_job_is_submitted_seen_and_stopped(client: Client, place: Place) -> None:
    id = client.predict(CONFIG.format(name="cat", folder=f"{place.given[0]}/pictures"), 3, api_name="/submit")["id"]
    (row,) = [job for job in client.predict(api_name="/list") if job["id"] == id]
    assert (row["name"], row["priority"], row["state"]) == ("cat", 3, "queued")
    # The queue itself, as the command line sees it.
    assert jobs.Queue(place.home).get_job(id).name == "cat"
    assert client.predict(str(id), api_name="/stop")["state"] in jobs.ENDED
    assert client.predict(str(id), api_name="/status")["state"] in jobs.ENDED


def test_events_are_read_on_from_an_offset(client: Client, place: Place) -> None:
    run = place.given[0] / "shell"
    first = client.predict(str(run), api_name="/events")
    assert [event["event"] for event in first["events"]] == ["stage", "step"]
    assert client.predict(str(run), first["offset"], api_name="/events")["events"] == []
    with open(run / "events.jsonl", "a", encoding="utf-8") as file:
        file.write('{"t": 3.0, "event": "step", "step": 2, "loss": 0.25}\n')
    then = client.predict(str(run), first["offset"], api_name="/events")
    assert [event["step"] for event in then["events"]] == [2]


def test_files_are_exported_and_downloaded(client: Client, place: Place, address: str) -> None:
    run = place.given[0] / "shell"
    told = client.predict(str(run), [], api_name="/export")
    assert told["job"] is None and [(file["name"], file["bytes"]) for file in told["files"]] == [
        ("shell_kohya.safetensors", 5),
        ("step-000200/shell_kohya.safetensors", 4),
    ]
    got = httpx.get(address + told["files"][0]["download"], auth=("me", PASSWORD))
    assert (got.status_code, got.content) == (200, b"12345")
    assert httpx.get(address + told["files"][0]["download"]).status_code == 401
    id = client.predict(str(run), ["comfy"], api_name="/export")["job"]
    assert jobs.Queue(place.home).get_job(id).command == ("export", "--format", "comfy", "--", str(run))
    with pytest.raises(AppError, match="export.formats"):
        client.predict(str(run), ["zip"], api_name="/export")


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("/submit", ("nonsense = [",), "not valid TOML"),
        ("/submit", (CONFIG.format(name="x", folder="/etc"),), "dataset.folders.0.path: /etc: the page may not use"),
        ("/submit", (CONFIG.format(name="../x", folder="datasets/a"),), "name"),
        ("/status", ("999",), "999"),
        ("/status", ("/etc",), "the page may not use"),
        ("/events", ("/etc/../etc",), "without .."),
        ("/stop", ("; reboot",), "not a path"),
        ("/export", ("1e3", []), "not a path"),
    ],
)
def test_what_is_wrong_is_told_in_the_engines_words(client: Client, name: str, given: tuple, told: str) -> None:
    with pytest.raises(AppError) as error:
        client.predict(*given, api_name=name)
    assert told in str(error.value) and "Traceback" not in str(error.value)


def test_an_open_page_takes_little_memory(address: str, client: Client) -> None:
    """Gradio's own bookkeeping takes more than a megabyte for each page that somebody opens or reloads."""
    (mounted,) = [route.app for route in address.site.routes if getattr(route, "path", "") == "/en"]
    held = []
    tracemalloc.start()
    for number in range(8):
        session = mounted.state_holder[f"page {number}"]
        for component in list(session.blocks_config.blocks)[:10]:  # as when a handler's answer is noted
            session._update_value_in_config(component, "x" * 1000)
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert (held[-1] - held[3]) / 4 < 300_000
    assert len(mounted.state_holder.session_data) >= 8


def test_a_page_that_nobody_looks_at_sleeps(address: str) -> None:
    """Gradio's queue wakes up 1000 times a second; if it names its intervals otherwise one day, this says so."""
    names = ("sleep_when_free", "progress_update_sleep_when_free")
    assert set(names) <= vars(gr.Blocks()._queue).keys()
    queues = [route.app.get_blocks()._queue for route in address.site.routes if hasattr(route.app, "get_blocks")]
    assert len(queues) == 2 and all(getattr(queue, name) >= 0.02 for queue in queues for name in names)


IDLE = """
import sys
from lora_fp8 import cli
from lora_fp8 import jobs

def no_worker(home):
    assert not {"torch", "gradio"} & set(sys.modules)

jobs.ensure_worker = no_worker
sys.argv[0] = "lora-fp8"
cli.main()
"""
"""The command, light, with a queue that nobody works on."""


def test_the_same_functions_are_tools_of_an_mcp_server(place: Place) -> None:
    root = place.given[0]
    environment = {**os.environ, "LORA_FP8_HOME": str(place.home)}
    server = StdioServerParameters(
        command=sys.executable, args=["-c", IDLE, "mcp", "--root", str(root)], env=environment, cwd=root
    )

    async def talk() -> None:
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            tools = {tool.name: tool for tool in (await session.list_tools()).tools}
            assert set(tools) == {"template", "check", *(name.strip("/") for name in NAMES)}
            assert tools["submit"].input_schema["required"] == ["config"]

            async def ask(tool: str, **given: Any) -> tuple[bool, str]:
                answer = await session.call_tool(tool, given)
                return bool(answer.is_error), answer.content[0].text

            wrong, text = await ask("template", family="flux", presets=["character"])
            assert not wrong and str(root) in text and 'family = "flux"' in text
            wrong, told = await ask("check", text=text)
            assert wrong and "my_pictures: the page may not use" in told  # the folder that is yet to be named
            text = text.replace("my_pictures", f"{root}/pictures").replace("my-lora", "by-mcp")
            wrong, told = await ask("check", text=text)
            assert not wrong and told.startswith("accepted: ") and "by-mcp" in told
            wrong, told = await ask("submit", config=text.replace(f"{root}/pictures", "/etc"))
            assert wrong and "dataset.folders.0.path: /etc: the page may not use" in told and "Traceback" not in told
            wrong, told = await ask("submit", config=text)
            id = json.loads(told)["id"]
            assert jobs.Queue(place.home).get_job(id).name == "by-mcp"
            assert json.loads((await ask("stop", id=str(id)))[1])["state"] in jobs.ENDED
            wrong, told = await ask("events", id=str(root / "shell"), offset=0)
            assert json.loads(told)["events"][0]["event"] == "stage"
            wrong, told = await ask("export", id=str(root / "shell"))
            file, _ = json.loads(told)["files"]
            assert file == {
                "name": "shell_kohya.safetensors",
                "bytes": 5,
                "file": str(root / "shell/export/shell_kohya.safetensors"),
            }
            assert (await ask("template", presets=["/etc/passwd.toml"]))[0]

    # In a thread of its own: the browser tests that ran before leave this one with a loop.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, asyncio.wait_for(talk(), 120)).result()
