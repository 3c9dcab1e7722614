"""The base model's part of New training: which cards there are, what they state, downloads, and the token."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from hub_server import STRANGER, TOKEN, HubServer
from waiting import LONG_SECONDS, wait_until

from lora_fp8.config import recipes
from lora_fp8.families.sources import description, known_bases
from webui import base_catalogue, downloads, form, hub_login
from webui.context import Place, Ui
from webui.pages import new
from webui.pages.new import base_rendering


@pytest.fixture
def home(tmp_path: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the page; this process and those that it starts take the test's hub for Hugging Face."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "memory"))
    hub.use(monkeypatch, tmp_path / "hf")
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "600")  # a file that stalls is not asked for again
    return tmp_path / "home"


@pytest.fixture
def make_page(home: Path, tmp_path: Path) -> Callable[..., Any]:
    """make_page("zh-CN"): New training in that language, on a folder that is empty."""

    def make(language: str = "en") -> Any:
        page = new.Page(Ui(language, Place(home, [tmp_path / "models"])))
        with gr.Blocks():
            page.lay_out()
        return page

    (tmp_path / "models").mkdir()
    return make


def press(page: Any, do: str, **data: str) -> dict[str, Any]:
    """Press a button; -> the values of the components, by their ids."""
    painted = page.base.handle_button(SimpleNamespace(_data={"do": do, **data}), False)
    return {part.elem_id: value for part, value in painted.items()}


def read(page: Any) -> dict[str, Any]:
    return form.read_values(page.draft.load_text(), page.draft.home)


def state(page: Any) -> str:
    """What the page says of the base, once the hub has answered."""
    page.base.refresh("", False)
    wait_until(lambda: "Looking it up" not in page.base.state.render(read(page)))
    page.base.refresh("", False)
    wait_until(lambda: "Looking it up" not in page.base.state.render(read(page)))
    return page.base.state.render(read(page))


# --------------------------------------------------------------------------------------------------------------- cards


def test_every_base_that_can_be_trained_has_a_card_in_a_group() -> None:
    cards = base_catalogue.list_released()
    assert {card.path for card in cards} == {"demo", *(b.id for b in known_bases.read() if b.kind != "distilled")}
    assert len({card.key for card in cards}) == len(cards)
    assert {group for card in cards for group in card.groups} == set(base_catalogue.GROUPS) - {"mine"}
    assert {known_bases.get(id).id for id in base_catalogue.SUGGESTED} == set(base_catalogue.SUGGESTED)
    groups = {card.family: card.groups[-1] for card in cards if card.path != "demo"}
    assert groups["sdxl"] == groups["sd3"] == "stable" and groups["flux"] == "flux" and groups["chroma"] == "others"
    assert groups["flux_kontext"] == groups["qwen_image_edit"] == "editing" and groups["wan"] == "video"


@pytest.mark.parametrize("name", sorted(recipes.read_sizes()))
def test_the_vram_of_a_card_is_the_least_that_the_recipes_fit(name: str) -> None:
    """fit_card is the judge: it trains on that card at the family's own resolution, and on no smaller one."""
    known = known_bases.get(name)
    family, base = (known.family, name) if known else (name, "")

    def trains(gb: int, offloads: bool) -> bool:
        fit = recipes.fit_card(family, gb, base=base)
        values = {value.key: value.value for value in fit.values}
        is_native = values["dataset.resolution"] == "auto"
        return not fit.problem and is_native and (offloads or not values.get("memory.offload"))

    whole, offloaded = recipes.find_least_cards(family, base)
    for least, offloads in ((whole, False), (offloaded, True)):
        assert [gb for gb in recipes.CARDS if trains(gb, offloads)] == [gb for gb in recipes.CARDS if gb >= least > 0]


def test_a_model_of_another_size_states_its_own_vram() -> None:
    vram = {card.path: base_catalogue.find_vram(card) for card in base_catalogue.list_released()}
    assert all(vram[path] != (0, 0) for path in vram if path != "demo")
    assert vram["stabilityai/stable-diffusion-3.5-large"] > vram["stabilityai/stable-diffusion-3.5-medium"]
    assert vram["black-forest-labs/FLUX.2-klein-base-9B"] > vram["black-forest-labs/FLUX.2-klein-base-4B"]
    assert vram["Wan-AI/Wan2.1-T2V-1.3B-Diffusers"] < vram["Wan-AI/Wan2.1-T2V-14B-Diffusers"]
    assert vram["Laxhar/noobai-XL-1.1"] == vram["stabilityai/stable-diffusion-xl-base-1.0"] == (8, 8)


def test_a_card_states_what_is_here_without_asking_anybody(
    home: Path, hub: HubServer, tiny: Callable[[str], Path]
) -> None:
    name = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    (card,) = [card for card in base_catalogue.list_released() if card.path == name]
    known = known_bases.get(name)
    assert base_catalogue.find_presence(card) == base_catalogue.Presence(known.total_bytes, known.total_bytes, True)
    hub.add(name, tiny("sd15"))
    described = description.describe(name, family="sd15")
    asked = len(hub.seen())
    presence = base_catalogue.find_presence(card)
    assert presence == base_catalogue.Presence(described.total_bytes, described.missing_bytes)
    assert 0 < presence.missing < presence.total, "configs are here, weights are not"
    import huggingface_hub

    huggingface_hub.snapshot_download(name)
    asked = len(hub.seen())
    assert base_catalogue.find_presence(card) == base_catalogue.Presence(described.total_bytes, 0)
    for file in (home.parent / "memory").rglob("*.json"):
        file.unlink()  # another program downloaded it
    assert base_catalogue.find_presence(card).missing == 0 and len(hub.seen()) == asked


def test_cards_hold_nothing_but_text(
    make_page: Callable[..., Any], tmp_path: Path, tiny: Callable[[str], Path]
) -> None:
    name = '"><img src=x onerror=alert(1)>'
    (tmp_path / "models" / name).symlink_to(tiny("sd15"))
    page = make_page()
    painted = press(page, "choose", base='"><script>alert(2)</script>', family="<b>")
    html = painted["new-base-cards"] + painted["new-base-state"]
    assert "&lt;img src=x" in html and "<img" not in html and "<script" not in html
    assert "javascript:" not in base_rendering.render_link("javascript:alert(1)", "text")


def test_a_file_of_mine_is_recognised_and_needs_no_components(make_page: Callable[..., Any], tmp_path: Path) -> None:
    from test_form_page import SDXL, write_header

    file = write_header(tmp_path / "models" / "pony.safetensors", SDXL)
    page = make_page()
    page.ui.place.add_models(str(tmp_path / "models"))
    page.draft.put("model.components", "/somewhere/else")
    painted = press(page, "choose", base=f'"{file}"')
    values = read(page)
    assert (values["model.path"], values["model.family"], values["model.components"]) == (str(file), "sdxl", "auto")
    assert re.search(r'data-base="[^"]*pony\.safetensors"[^>]*aria-pressed="true"', painted["new-base-cards"])
    assert "On this computer" in painted["new-base-state"]


# ------------------------------------------------------------------------------------------------- what the hub answers


def test_a_pasted_link_sets_the_architecture_as_soon_as_the_hub_answers(
    make_page: Callable[..., Any], hub: HubServer, tiny: Callable[[str], Path]
) -> None:
    hub.add("org/tiny", tiny("flux"))
    page = make_page()
    press(page, "choose", base=f"{hub.endpoint}/org/tiny/tree/main")
    assert (read(page)["model.path"], read(page)["model.family"]) == ("org/tiny", "sd15")
    assert "FLUX.1" in state(page) and read(page)["model.family"] == "flux"
    page.draft.put("model.family", "sdxl")  # chosen by hand: it is contradicted, and not changed
    assert 'data-do="adopt"' in state(page) and read(page)["model.family"] == "sdxl"
    press(page, "adopt", family="flux")
    assert read(page)["model.family"] == "flux" and 'data-do="download"' in state(page)


def test_a_misspelt_base_is_mended_by_a_button(make_page: Callable[..., Any], hub: HubServer) -> None:
    page = make_page()
    for given, meant in (
        ("stabilityai/stable-difusion-xl-base-9.9", "stabilityai/stable-diffusion-xl-base-1.0"),
        ("flux.1-dew", "black-forest-labs/FLUX.1-dev"),
    ):
        press(page, "choose", base=given)
        assert f'data-do="choose" data-base="{meant}"' in state(page), given
    press(page, "choose", base=meant)
    assert (read(page)["model.path"], read(page)["model.family"]) == (meant, "flux")


def test_a_gate_opens_with_a_token_that_only_the_hubs_own_file_holds(
    make_page: Callable[..., Any], hub: HubServer, tiny: Callable[[str], Path], tmp_path: Path, capfd: Any
) -> None:
    hub.add("org/gated", tiny("sd15"), gated="auto")
    page = make_page()
    press(page, "choose", base="org/gated")
    closed = state(page)
    assert 'href="https://huggingface.co/org/gated"' in closed and "Accept the licence" in closed
    assert page.base.update_components()[page.layout.base.login]["visible"] is True
    for token, told in (
        ("nonsense!", "malformed"),
        ("hf_unknown_token", "wrong"),
        (STRANGER, "saved"),
        (TOKEN, "saved"),
    ):
        answer = page.base.save_token(token)
        assert answer[page.layout.base.token] == "", "the field is emptied"
        wait_until(lambda: page.base.state.login.login.state != "checking")
        assert page.base.state.login.login.state == told, token
        if token == STRANGER:
            assert "the account of your token has no access yet" in state(page)
    assert 'data-do="download"' in state(page)
    assert page.base.update_components()[page.layout.base.login]["visible"] is False
    holders = {path for path in tmp_path.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()}
    assert holders == {tmp_path / "hf" / "token", tmp_path / "hf" / "stored_tokens"}
    assert TOKEN not in "".join(capfd.readouterr())


def test_a_token_of_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", STRANGER)
    login = hub_login.HubLogin()
    login.save(TOKEN)
    assert (login.login.state, login.login.name) == ("environment", "HF_TOKEN")


def test_a_hub_that_is_away_is_told_from_a_wrong_token(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", "http://127.0.0.1:9")
    login = hub_login.HubLogin()
    login.save(TOKEN)
    wait_until(lambda: login.login.state != "checking")
    assert login.login.state == "away" and "127.0.0.1" in login.login.why


# ------------------------------------------------------------------------------------------------------------ downloads


def test_a_download_outlives_the_page_and_is_cancelled_and_continued(
    make_page: Callable[..., Any], hub: HubServer, tiny: Callable[[str], Path], home: Path
) -> None:
    offered = hub.add("org/tiny", tiny("sd15"))
    offered.faults.stall_after = 200_000
    page = make_page()
    press(page, "choose", base="org/tiny")
    assert 'data-do="download"' in state(page)
    press(page, "download")
    assert offered.faults.stalled.wait(LONG_SECONDS)
    wait_until(lambda: 'role="progressbar"' in state(page) and " of " in state(page))
    other = downloads.Downloads(home)  # another page: the process, and not its parent, holds what is known
    wait_until(lambda: other.read("org/tiny", "").done > 0)
    seen = other.read("org/tiny", "")
    assert seen.state == "running" and 0 < seen.done < seen.total == offered.weights
    before = len(hub.downloads())
    press(page, "download")  # a second press starts nothing
    press(make_page("zh-CN"), "cancel")
    wait_until(lambda: other.read("org/tiny", "").state == "cancelled")
    assert len(hub.downloads()) == before and "The download was cancelled" in state(page)
    offered.faults.released.set()
    offered.faults.stall_after = None
    press(page, "download")
    wait_until(lambda: other.read("org/tiny", "").state == "done")
    assert "Complete on this computer" in state(page)
    assert hub.bytes_downloaded() < 2 * offered.weights, "it was continued"


def test_a_failed_download_says_why_in_the_pages_language(
    make_page: Callable[..., Any], hub: HubServer, tiny: Callable[[str], Path]
) -> None:
    offered = hub.add("org/tiny", tiny("sd15"))
    page = make_page("zh-CN")
    press(page, "choose", base="org/tiny")
    wait_until(lambda: 'data-do="download"' in page.base.state.render(read(page)))
    offered.gated = "manual"  # closed meanwhile
    press(page, "download")
    wait_until(lambda: page.base.state.downloads.read("org/tiny", "").state == "failed")
    told = page.base.state.render(read(page))
    assert "下载失败：" in told and "需要授权" in told


def test_what_is_named_is_no_option_and_no_shell(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, line: list[str], **given: Any):
            started.append(line)
            super().__init__([sys.executable, "-c", ""], **given)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    page_downloads = downloads.Downloads(home)
    page_downloads.start("--help", "; rm -rf /", "")
    (line,) = started
    assert line[-2:] == ["--", "--help"] and "--revision=; rm -rf /" in line
    wait_until(lambda: page_downloads.read("--help", "; rm -rf /").state == "failed")
    assert sorted(path.suffix for path in (home / "downloads").iterdir()) == [".json", ".jsonl"]
    if os.name == "posix":
        assert (home / "downloads").stat().st_mode & 0o77 == 0
    (note,) = (home / "downloads").glob("*.json")
    note.write_text(json.dumps({"process": "nonsense"}), encoding="utf-8")
    assert page_downloads.read("--help", "; rm -rf /") is None, "a damaged note is none"
