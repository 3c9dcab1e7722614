"""The base model on New training, in the browser and against a hub: cards, search, download, gate and token."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_server import TOKEN, HubServer
from playwright.sync_api import Page, expect

from tests.ui import conftest as ui
from tests.ui.conftest import Site
from webui import form, translations
from webui.draft import Draft

XL = "stabilityai/stable-diffusion-xl-base-1.0"


@pytest.fixture
def hub_site(
    hub: HubServer, tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    """A page of its own, whose Hugging Face is the test's hub, with a base of somebody's own in its folder."""
    hub.add(XL, tiny("sdxl"), card={"license": "openrail++"})
    hub.add("org/tiny", tiny("flux"), card={"license": "apache-2.0"})
    hub.add("org/gated", tiny("sd15"), gated="auto", card={"license": "other", "license_name": "strict"})
    for name, value in hub.environment(tmp_path / "hf", XDG_CACHE_HOME=str(tmp_path / "memory")).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "600")  # a file that stalls is not asked for again
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    shutil.copytree(tiny("sd15"), tmp_path / "root" / "my own base")
    site = ui.start(tmp_path / "home", tmp_path / "root")
    yield site
    ui.stop(site)


def values(site: Site) -> dict[str, object]:
    return form.read_values(Draft(site.home).text(), site.home)


def test_a_base_is_found_chosen_downloaded_and_unlocked(
    hub_site: Site,
    hub: HubServer,
    visit: Callable[..., Page],
    picture_of: Callable[[Page, str], None],
    tmp_path: Path,
) -> None:
    def say(key: str, **given: object) -> str:
        return translations.say("en", key, **given)

    page = visit("new", site=hub_site)
    state, cards = page.locator("#new-base-state"), page.locator("#new-base-cards .choice-card:visible")
    search = page.locator("#new-base-search")
    expect(state).to_contain_text(say("base.state.none"))
    picture_of(page, "base_1_empty")

    # Groups and search are instant: nothing is asked of the server.
    page.click("#new-base-head [data-group=video]")
    expect(cards.filter(has_text="Wan 2.1 T2V 14B")).to_be_visible()
    expect(page.locator("#new-demo-sd15")).to_be_hidden()
    page.click("#new-base-head [data-group=mine]")
    expect(cards).to_have_count(1)
    expect(cards).to_contain_text("my own base")
    search.fill("klein 9b")
    expect(cards).to_have_count(1)
    expect(cards).to_contain_text("FLUX.2 klein base 9B")

    # By keyboard alone: the first match, then what was misspelt, mended by a button.
    search.fill("sdxl 1.0")
    search.press("Enter")
    expect(state.locator(".chosen")).to_contain_text("Stable Diffusion XL 1.0")
    expect(state.locator("[data-do=download]")).to_be_visible()
    expect(page.locator(f'#new-base-cards [data-key="{XL}"]')).to_have_attribute("aria-pressed", "true")
    assert (values(hub_site)["model.path"], values(hub_site)["model.family"]) == (XL, "sdxl")
    search.fill("stabilityai/stable-difusion-xl-base-9.9")
    search.press("Enter")
    expect(state.locator(".problems")).to_contain_text("did you mean")
    picture_of(page, "base_2_misspelt")
    state.locator("[data-do=choose]").focus()
    page.keyboard.press("Enter")
    expect(state.locator("[data-do=download]")).to_be_visible()
    expect(search).to_have_value("")

    # A pasted link; its architecture is told by the hub. The download shows its progress, is cancelled and continued.
    tiny_flux = hub.repositories["org/tiny"]
    tiny_flux.faults.stall_after = 200_000
    search.fill("https://huggingface.co/org/tiny/tree/main")
    page.click("#new-base-head [data-use]")
    expect(state.locator(".chosen")).to_contain_text("FLUX.1")
    assert values(hub_site)["model.family"] == "flux"
    state.locator("[data-do=download]").click()
    bar = state.get_by_role("progressbar")
    expect(bar).not_to_have_attribute("aria-valuenow", "0")
    picture_of(page, "base_3_progress")
    other = visit("new", language="zh-CN", dark=True, site=hub_site)
    expect(other.locator("#new-base-state [role=progressbar]")).to_be_visible()
    page.reload()
    expect(bar).to_be_visible()
    state.locator("[data-do=cancel]").click()
    expect(state).to_contain_text(say("base.download.cancelled"))
    tiny_flux.faults.stall_after = None
    tiny_flux.faults.released.set()
    state.locator("[data-do=download]").click()
    expect(state).to_contain_text(say("base.state.complete"))
    expect(other.locator("#new-base-state")).to_contain_text(translations.say("zh-CN", "base.state.complete"))
    other.close()

    # A gate: the licence's link, a wrong token, the right one.
    search.fill("org/gated")
    search.press("Enter")
    expect(state.get_by_role("link", name=say("base.gate.accept"))).to_have_attribute(
        "href", "https://huggingface.co/org/gated"
    )
    token = page.locator("#new-base-token input")
    assert token.get_attribute("type") == "password"
    token.fill("hf_wrong_token")
    page.click("#new-base-token-save")
    expect(page.locator("#new-base-told")).to_contain_text(say("base.token.wrong"))
    expect(token).to_have_value("")
    picture_of(page, "base_4_gate")
    token.fill(TOKEN)
    token.press("Enter")
    expect(state.locator("[data-do=download]")).to_be_visible()
    expect(token).to_have_count(0)
    assert values(hub_site)["model.family"] == "sd15"
    assert (tmp_path / "hf" / "token").read_text(encoding="utf-8") == TOKEN
    written = [path for path in hub_site.home.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert written == []


def test_a_slow_hub_leaves_the_form_free(hub_site: Site, hub: HubServer, visit: Callable[..., Page]) -> None:
    faults = hub.repositories["org/tiny"].faults
    faults.delay = 5  # of each answer; a client that waits longer gives up
    page = visit("new", language="zh-CN", phone=True, site=hub_site)
    page.locator("#new-base-search").fill("org/tiny")
    page.locator("#new-base-search").press("Enter")
    expect(page.locator("#new-base-state .busy")).to_be_visible()
    page.locator("#new-name input, #new-name textarea").first.fill("while waiting")
    expect(page.locator("#new-base-state .busy")).to_be_visible()
    page.wait_for_function("document.querySelector('#new-summary')")
    faults.delay = 0
    expect(page.locator("#new-base-state [data-do=download]")).to_be_visible()
    assert values(hub_site)["name"] == "while waiting"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
