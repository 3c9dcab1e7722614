"""The base model on New training, in the browser and against a hub: cards, search, download, gate and token."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from hub_server import TOKEN, WRITER, HubServer
from huggingface_hub import ModelCard
from playwright.sync_api import Page, expect
from safetensors.torch import load_file
from waiting import wait_until

from lora_fp8 import config
from lora_fp8.lora_files import safetensors_file
from lora_fp8.run import Run
from tests.ui import conftest as ui
from tests.ui.conftest import Site
from webui import form, translations
from webui.draft import Draft

XL = "stabilityai/stable-diffusion-xl-base-1.0"


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    """The hub of all tests of this file."""
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def hub_site(hub: HubServer, tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A page of its own, whose Hugging Face is the test's hub, with a base of somebody's own in its folder."""
    folder = tmp_path_factory.mktemp("hub_site")
    hub.add(XL, tiny("sdxl"), card={"license": "openrail++"})
    hub.add("org/tiny", tiny("flux"), card={"license": "apache-2.0"})
    hub.add("org/slow", tiny("flux"), card={"license": "apache-2.0"})
    hub.add("org/gated", tiny("sd15"), gated="auto", card={"license": "other", "license_name": "strict"})
    shutil.copytree(tiny("sd15"), folder / "root" / "my own base")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in hub.environment(folder / "hf", XDG_CACHE_HOME=str(folder / "memory")).items():
            patch.setenv(name, value)
        patch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "600")  # a file that stalls is not asked for again
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
            patch.delenv(name, raising=False)
        site = ui.start(folder / "home", folder / "root")
        yield site
        ui.stop(site)


@pytest.fixture
def login(hub_site: Site) -> Iterator[Path]:
    """The file in which this machine's token is; empty before and after the test."""
    file = hub_site.home.parent / "hf" / "token"
    file.parent.mkdir(exist_ok=True)
    file.write_text("", encoding="utf-8")
    yield file
    file.write_text("", encoding="utf-8")


def values(site: Site) -> dict[str, object]:
    return form.read_values(Draft(site.home).load_text(), site.home)


def test_a_base_is_found_chosen_downloaded_and_unlocked(
    hub_site: Site,
    hub: HubServer,
    visit: Callable[..., Page],
    picture_of: Callable[[Page, str], None],
    login: Path,
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
    wait_until(lambda: values(hub_site)["model.family"] == "flux")  # written with the next answer
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
    assert login.read_text(encoding="utf-8") == TOKEN
    written = [path for path in hub_site.home.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert written == []


def test_a_slow_hub_leaves_the_form_free(hub_site: Site, hub: HubServer, visit: Callable[..., Page]) -> None:
    faults = hub.repositories["org/slow"].faults
    faults.delay = 5  # of each answer; a client that waits longer gives up
    page = visit("new", language="zh-CN", phone=True, site=hub_site)
    page.locator("#new-base-search").fill("org/slow")
    page.locator("#new-base-search").press("Enter")
    expect(page.locator("#new-base-state .busy")).to_be_visible()
    page.locator("#new-name input, #new-name textarea").first.fill("while waiting")
    expect(page.locator("#new-base-state .busy")).to_be_visible()
    page.wait_for_function("document.querySelector('#new-summary')")
    faults.delay = 0
    expect(page.locator("#new-base-state [data-do=download]")).to_be_visible()
    assert values(hub_site)["name"] == "while waiting"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_lora_is_published_after_all_that_is_missing_was_said(
    hub_site: Site, hub: HubServer, visit: Callable[..., Page], login: Path, picture_of: Callable[[Page, str], None]
) -> None:
    text = 'name = "zibo"\n[model]\nfamily = "sd15"\npath = "demo"\n[[dataset.folders]]\npath = "p"'
    run = Run.create(hub_site.root / "runs" / "zibo", config.dumps(config.loads(text)))
    weights = {"lora_unet_a.lora_down.weight": torch.ones(2, 8), "lora_unet_a.lora_up.weight": torch.ones(8, 2)}
    run.export.mkdir(exist_ok=True)
    safetensors_file.write_file(run.export / "zibo_kohya.safetensors", weights, {"modelspec.title": "Zibo"})
    run.close()
    page = visit(f"run?run={quote(str(run.path))}", site=hub_site)
    page.get_by_role("tab", name=translations.say("en", "run.tab.files")).click()
    form_of = page.locator("#publish")
    form_of.get_by_role("button").first.click()
    hub.forget()
    for label, text in (("kit_title", "Zibo the cat"), ("kit_trigger", "zibo"), ("kit_licence", "mit")):
        form_of.get_by_label(translations.say("en", f"run.{label}"), exact=True).fill(text)
    form_of.get_by_label(translations.say("en", "run.kit_description"), exact=True).fill("A cat.\nIt sits.")
    page.locator("#push-repo input, #push-repo textarea").fill("zibo")
    login.write_text(TOKEN, encoding="utf-8")
    page.click("#push")
    expect(page.locator("#push-note .wrong")).to_contain_text("has no write access")
    picture_of(page, "publish_1_refused")
    assert [request for request in hub.seen() if request.method in ("POST", "PUT")] == []

    login.write_text(WRITER, encoding="utf-8")
    page.click("#push")
    expect(page.locator("#push-note")).to_contain_text("ada/zibo")
    link = page.locator("#pushed").get_by_role("link", name=translations.say("en", "push.open"))
    expect(link).to_have_attribute("href", f"{hub.endpoint}/ada/zibo")
    picture_of(page, "publish_2_done")
    repository = hub.repositories["ada/zibo"]
    assert repository.private, "public was not ticked"
    (sent,) = repository.folder.glob("*.safetensors")
    arrived = load_file(sent)
    assert (
        all(torch.equal(weights[name], tensor) for name, tensor in arrived.items()) and arrived.keys() == weights.keys()
    )
    card = ModelCard.load(repository.folder / "README.md")
    assert (card.data.license, card.data.instance_prompt) == ("mit", "zibo")
    assert "# Zibo the cat" in card.text and "A cat.\nIt sits." in card.text
