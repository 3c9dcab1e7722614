"""What New training says of a base on a hub, before anything is started."""

import threading
from collections.abc import Callable
from pathlib import Path

import gradio as gr
import pytest
from hub_server import HubServer
from waiting import LONG_SECONDS, wait_until

from lora_fp8.families import sources
from webui import base_models, form
from webui.context import Place, Ui
from webui.pages import new
from webui.pages.new import base_rendering

CARD = {"license": "apache-2.0"}


@pytest.fixture
def page(hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pictures: Path) -> Callable[..., object]:
    """page("org/tiny"): the problems of the base model and the note on it, once the hub has answered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "memory"))
    hub.use(monkeypatch, tmp_path / "home")

    def ask(path: str, language: str = "en") -> tuple[list[str], str]:
        shown = new.Page(Ui(language, Place(tmp_path / "page", [pictures])))
        with gr.Blocks():
            shown.lay_out()
        shown.draft.write(
            f"name = 'cat'\n[model]\nfamily = 'sd15'\npath = '{path}'\n[[dataset.folders]]\npath = '{pictures}'\n"
        )
        values = form.read_values(shown.draft.load_text(), shown.draft.home)
        if base_models.is_remote(path):
            wait_until(lambda: shown.reader.describe_base(values) is not None)
        problems = [line for key, line in shown.problems.find(shown.draft.load_text()) if key == "model.path"]
        return problems, shown.base.state.render(values)

    return ask


def test_the_page_says_what_a_base_takes(hub: HubServer, page, tiny: Callable[[str], Path]) -> None:
    offered = hub.add("org/tiny", tiny("sd15"), card=CARD)
    problems, note = page("org/tiny")
    assert problems == [] and "Licence: apache-2.0" in note and "<span>Stable Diffusion 1.5</span>" in note
    size = base_rendering.format_size(sum(file.size for file in offered.files.values()))
    assert f"{size} to download; " in note and " free on that disk" in note and 'data-do="download"' in note
    assert f"还需下载 {size}，" in page("org/tiny", "zh-CN")[1]
    assert hub.downloads() == [] and offered.weights > 0


def test_the_page_says_what_is_wrong_with_a_base(hub: HubServer, page, tiny: Callable[[str], Path]) -> None:
    hub.add("org/gated", tiny("sd15"), gated="auto")
    hub.add("org/other", tiny("flux"))
    for path, words, chinese in (
        ("org/gated", "Accept its licence at https://huggingface.co/org/gated, then log in", "需要授权"),
        ("org/other", "is FLUX.1, and model.family is 'sd15'", "而 model.family 是"),
        (
            "stabilityai/stable-difusion-xl-base-9.9",
            "did you mean 'stabilityai/stable-diffusion-xl-base-1.0'?",
            "是不是",
        ),
    ):
        (problem,), _ = page(path)
        assert words in problem
        (problem,), _ = page(path, "zh-CN")
        assert chinese in problem
    (problem,), _ = page("https://example.com/owner/name")
    assert "Download the file and give its path" in problem


def test_a_hub_that_is_away_does_not_prevent_a_start(
    page, hub: HubServer, monkeypatch: pytest.MonkeyPatch, tiny: Callable[[str], Path]
) -> None:
    """The queue may start the job later, when it is back."""
    hub.add("org/tiny", tiny("sd15")).faults.broken = 99
    problems, note = page("org/tiny")
    assert problems == [] and "answered with status 500" in note and "Start tries again" in note


def test_a_slow_hub_holds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked, go_on = [], threading.Event()

    def describe(*given: str) -> sources.BaseDescription:
        asked.append(given)
        assert go_on.wait(LONG_SECONDS)
        return sources.BaseDescription(sources.parse(given[0]), family="sd15")

    monkeypatch.setattr(sources, "describe", describe)
    shown = new.Page(Ui("en", Place(tmp_path, [tmp_path])))
    with gr.Blocks():
        shown.lay_out()
    values = form.read_values(form.START) | {"model.path": "org/tiny", "model.revision": "v3"}
    assert "Looking it up on Hugging Face" in shown.base.state.render(values)
    assert shown.problems.list_base_problems(values) == []
    descriptions = base_models.Descriptions()
    assert [descriptions.get("org/tiny", "", "sd15") for _ in range(5)] == [None] * 5
    assert descriptions.get("org/tiny", "v2", "sd15") is None
    go_on.set()
    wait_until(lambda: descriptions.get("org/tiny", "", "sd15") is not None)
    described = descriptions.get("org/tiny", "", "sd15")
    assert described is not None and described.family == "sd15"
    assert sorted(asked) == [("org/tiny", revision, "sd15") for revision in ("", "v2", "v3")], "each is asked once"
    monkeypatch.setattr(base_models, "FRESH_SECONDS", 0.0)
    assert descriptions.get("org/tiny", "", "sd15") is not None, "the last answer is shown while it is asked again"


def test_addresses_are_read_where_they_are_pasted() -> None:
    assert base_models.read_address("https://hf-mirror.com/owner/name/tree/main") == "owner/name"
    assert base_models.read_address("https://civitai.com/models/1?modelVersionId=2") == "civitai:2"
    assert base_models.read_address("owner/name") == base_models.read_address("/models/x") == ""
    usual = base_models.list_usual_bases("flux")
    assert usual[:2] == ["demo", "black-forest-labs/FLUX.1-dev"] and "black-forest-labs/FLUX.1-schnell" not in usual
