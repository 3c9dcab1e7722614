"""Uploads to the Hugging Face Hub, by the real huggingface_hub against the hub of the tests."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hub_server import NARROW, STRANGER, TOKEN, WRITER, HubServer, use_endpoint
from PIL import Image
from safetensors.torch import load_file

from lora_fp8 import config, jobs
from lora_fp8.errors import Message, Template, UserError, combine
from lora_fp8.families.sources.download import Progress
from lora_fp8.lora_files import safetensors_file
from lora_fp8.run import Run
from lora_fp8.tools import hub as uploads
from lora_fp8.tools import kit
from tests.test_kit import ask  # noqa: F401
from webui import hub_uploads, run_cards
from webui.context import Place, Ui
from webui.pages.run.publishing import REFUSALS, describe_note, describe_refusal

SENDING = ("POST", "PUT")


@pytest.fixture
def login(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """login(token): this machine has the token in the hub's own store; None: it has none."""
    hub.use(monkeypatch, tmp_path / "hf")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the client waits before it tries again

    def login(token: str | None) -> None:
        (tmp_path / "hf").mkdir(exist_ok=True)
        (tmp_path / "hf" / "token").write_text(token or "", encoding="utf-8")

    return login


@pytest.fixture
def run(job: Callable, tmp_path: Path) -> Path:
    """A run as it is when it is done: its file, its config and its last previews."""
    told = job("preview.prompts=['zibo in snow']", "preview.seed=7", "dataset.trigger=zibo", "model.path=owner/base")
    run = Run.create(tmp_path / "runs" / "zibo", config.dumps(told))
    run.samples.mkdir(exist_ok=True)
    Image.new("RGB", (32, 32), "red").save(run.samples / "step-000004-0.png")
    run.log_event("preview", step=4, images=["samples/step-000004-0.png"], prompts=["zibo in snow"])
    state = {"lora_unet_a.lora_down.weight": torch.ones(2, 8), "lora_unet_a.lora_up.weight": torch.ones(8, 2)}
    metadata = {"modelspec.title": "Zibo", "modelspec.trigger_phrase": "zibo", "modelspec.license": "apache-2.0"}
    run.export.mkdir(exist_ok=True)
    file = run.export / "zibo_kohya.safetensors"
    safetensors_file.write_file(file, state, metadata, hashes=True)
    run.close()
    return run.path


def test_a_run_becomes_a_private_repository_with_card_and_samples(
    ask: Callable,  # noqa: F811
    hub: HubServer,
    login: Callable,
    run: Path,
    tmp_path: Path,
) -> None:
    login(WRITER)
    code, said, wrong = ask("push", run, "zibo", "--json")
    assert code == 0, wrong
    events = [json.loads(line) for line in said.splitlines()]
    assert events[-1]["event"] == "done" and events[-1]["address"] == f"{hub.endpoint}/ada/zibo"
    sent = [event for event in events if event["event"] == "upload"]
    assert sent[-1]["bytes"] == sent[-1]["total"] > 0
    repository = hub.repositories["ada/zibo"]
    assert repository.private
    assert set(repository.files) == {
        *("README.md", "Zibo.safetensors", "Zibo.json", "Zibo.png", "images/Zibo-1.png"),
    }, "the pages to paste from stay here"
    (path,) = (run / "export").iterdir()
    arrived = load_file(repository.folder / "Zibo.safetensors")
    assert all(torch.equal(tensor, arrived[name]) for name, tensor in load_file(path).items())
    card = huggingface_hub.ModelCard.load("ada/zibo")
    assert card.data.base_model == "owner/base" and card.data.license == "apache-2.0"
    assert card.data.instance_prompt == "zibo" and "load_lora_weights('ada/zibo'" in card.text
    assert card.data.widget[0]["output"] == {"url": "images/Zibo-1.png"}
    assert WRITER not in said + wrong
    assert not [request for request in hub.seen() if request.site == "cdn" and request.token], "no token leaves the hub"

    # The name is taken now; an update is one more commit, of the files that have changed.
    hub.forget()
    code, _, wrong = ask("push", run, "ada/zibo")
    assert code == 2 and "ada/zibo exists already" in wrong and "--update" in wrong
    assert not [request for request in hub.seen() if request.method in SENDING], "nothing is sent before"
    code, _, wrong = ask("push", run, "ada/zibo", "--update", "--description", "Draws a fox.")
    assert code == 0, wrong
    assert "Draws a fox." in (repository.folder / "README.md").read_text(encoding="utf-8") and repository.private
    assert not [request for request in hub.seen() if request.method == "PUT"], "the weights are there"

    # A kit whose card somebody has written is sent as it is.
    kit = tmp_path / "kit"
    assert ask("kit", run, "--out", kit)[0] == 0
    (kit / "README.md").write_text("mine", encoding="utf-8")
    assert ask("push", kit, "club/fox", "--public")[0] == 0
    fox = hub.repositories["club/fox"]
    assert not fox.private and (fox.folder / "README.md").read_text(encoding="utf-8") == "mine"
    code, _, wrong = ask("push", kit, "club/fox", "--title", "x", "--update")
    assert code == 2 and "title" in wrong


@pytest.mark.parametrize(
    ("token", "repo", "words"),
    [
        (None, "ada/x", ["no Hugging Face token", "settings/tokens", "hf auth login"]),
        ("hf_wrong", "ada/x", ["does not accept the token"]),
        (TOKEN, "ada/x", ["no write access to ada/x", "write access"]),
        (
            TOKEN,
            "eve/x",
            ["no write access to ada/x".replace("ada", "eve"), "has no write access to eve.", "ada, club"],
        ),
        (WRITER, "eve/x", ["has no write access to eve.", "Choose one of: ada, club"]),
        (WRITER, "press/x", ["has no write access to press."]),
        (NARROW, "ada/x", ["token of this machine has no write access to ada/x"]),
        (NARROW, "club/x", []),
        (WRITER, "club/taken", ["club/taken exists already"]),
        (STRANGER, "x", []),
        (WRITER, "a b", ["is not a valid repository name"]),
        (WRITER, "a/b/c", ["is not a valid repository name"]),
        (WRITER, "../x", ["is not a valid repository name"]),
    ],
)
def test_what_is_missing_is_said_before_anything_is_sent(
    token: str | None, repo: str, words: list[str], hub: HubServer, login: Callable, run: Path
) -> None:
    login(token)
    hub.add("club/taken", run / "export")
    if words:
        with pytest.raises(UserError) as told:
            uploads.check(repo)
        assert all(word in str(told.value) for word in words), told.value
        assert "Traceback" not in str(told.value) and (token or "hf_") not in str(told.value)
    else:
        assert uploads.check(repo).repo == {"x": "bob/x"}.get(repo, repo)
    assert not [request for request in hub.seen() if request.method in SENDING]


def test_no_option_is_left_unheeded(ask: Callable, hub: HubServer, login: Callable, run: Path, tmp_path: Path) -> None:  # noqa: F811
    login(WRITER)
    hub.add("bob/taken", run / "export")
    with pytest.raises(UserError, match="cannot make it public"):
        uploads.check("bob/taken", public=True, update=True)
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit/README.md").write_text("a card", encoding="utf-8")
    code, _, wrong = ask("push", tmp_path / "kit", "bob/new", "--strength", "0.8", "--title", "x")
    assert code == 2 and "remove title, strength" in wrong
    assert not [request for request in hub.seen() if request.method in SENDING]


def test_what_breaks_off_is_one_sentence_and_no_half_repository(
    ask: Callable,  # noqa: F811
    hub: HubServer,
    login: Callable,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    login(WRITER)
    target = uploads.check("ada/x")
    folder = run / "export"
    begin = hub.add

    def broken(*given: object, **named: object) -> object:
        repository = begin(*given, **named)
        repository.faults.broken = -1
        return repository

    monkeypatch.setattr(hub, "add", broken)
    with pytest.raises(UserError, match="ada/x was not uploaded: 127.0.0.1:.* answered with status 500"):
        uploads.upload(folder, target)
    assert hub.repositories["ada/x"].files == {}
    monkeypatch.setattr(hub, "add", begin)
    del hub.repositories["ada/x"]
    # Somebody was faster with the name.
    hub.add("ada/x", folder)
    with pytest.raises(UserError, match="ada/x exists already"):
        uploads.upload(folder, target)
    use_endpoint(monkeypatch, "http://127.0.0.1:1", tmp_path / "hf")
    code, _, wrong = ask("push", run, "ada/y")
    assert code == 2 and "no connection to 127.0.0.1" in wrong and WRITER not in wrong
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE"):
        uploads.check("ada/y")


def test_progress_rises_to_the_size_of_all_files(hub: HubServer, login: Callable, tmp_path: Path) -> None:
    login(WRITER)
    folder = tmp_path / "kit"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(bytes(4 << 20))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    told: list[Progress] = []
    uploads.upload(folder, uploads.check("ada/x"), report=told.append)
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert [one.done for one in told] == sorted(one.done for one in told)
    assert all(one.total == size and one.done <= size for one in told) and told[-1].done == size and len(told) > 1


@pytest.mark.parametrize("language", ["en", "zh-CN"])
def test_the_page_checks_first_and_shows_the_upload_of_its_run(
    language: str, hub: HubServer, login: Callable, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ui = Ui(language, Place(tmp_path / "home", [run.parent]))
    ui.place.home.mkdir()
    monkeypatch.setattr(jobs, "ensure_worker", lambda home: None)
    options = {"public": False, "update": False}
    texts = {"title": "--json", "trigger": "", "description": "a\nb", "license": ""}
    login(TOKEN)
    with pytest.raises(UserError, match="no write access"):
        hub_uploads.start(ui, run, "zibo", texts, **options)
    assert hub_uploads.render_newest(ui, run) == "", "nothing was queued"
    login(WRITER)
    hub_uploads.start(ui, run, "zibo", texts, **options)
    upload = hub_uploads.find_newest(ui, run)
    assert upload.command == ("push", str(run), "ada/zibo", "--title=--json", "--description=a\nb", "--json")
    assert upload.gpus == jobs.BESIDE
    shown = hub_uploads.render_newest(ui, run)
    assert ui.say("state.queued") in shown and ui.say("runs.command.push", rest="ada/zibo") in shown
    tail = ['{"event": "upload", "bytes": 1048576, "total": 4194304, "speed": 100, "eta": 30}', "note <b>"]
    view, lines, address = hub_uploads.read_progress(replace(upload, state="running"), tail)
    assert lines == ["note <b>"] and address == "" and "width:25.0%" in run_cards.render_progress(view)
    figures = run_cards.render_figures(ui, replace(view, assigned=jobs.BESIDE))
    assert "GPU" not in figures
    assert ui.say("runs.uploaded") in figures and "1 MiB / 4 MiB" in figures
    tail = [json.dumps({"event": "done", "address": "https://hub/ada/zibo", "notes": []})]
    assert 'href="https://hub/ada/zibo"' in hub_uploads.render_link(ui, hub_uploads.read_progress(upload, tail)[2])
    tail = [json.dumps({"event": "done", "address": "javascript:alert(1)"})]
    assert hub_uploads.read_progress(upload, tail)[2] == ""


def test_the_page_names_its_fields_where_the_shell_names_options(tmp_path: Path) -> None:
    ui = Ui("zh-CN", Place(tmp_path / "home", [tmp_path]))
    lines = [describe_note(ui, line) for line in kit._list_missing(kit.Facts("sd15", "fox"))]
    assert lines[0] == "“触发词”没有填写，文件里也没有。" and len(set(lines)) == 4
    assert not any("--" in line for line in lines)


def test_the_page_names_its_boxes_where_a_refusal_names_options() -> None:
    ui, page = Ui("zh-CN", Place(Path("/nowhere"))), "https://hub/ada/x/settings"
    for template in map(Template, REFUSALS):
        told = describe_refusal(ui, combine([template(repo="ada/x", page=page), Message("{a} <b>", a=1)]))
        first, second = told.split("\n")
        assert "ada/x" in first and "勾选“" in first and "--" not in first and second == "1 <b>"
