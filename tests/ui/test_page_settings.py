"""Settings and Tools, as somebody uses them."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.ui.test_form_path import opened
from webui.pages import settings

BASE = Path(__file__).resolve().parent.parent.parent / "lora_fp8/demo/base/sd15"


@pytest.mark.parametrize("kind", ["root", "models"])
def test_a_folder_is_added_and_taken_back(visit: Callable[..., Page], tmp_path: Path, kind: str) -> None:
    page = visit("settings", language="zh-CN")
    roots = page.locator("#roots")
    expect(roots).to_contain_text("启动时指定")
    page.fill(f"#{kind}-path textarea, #{kind}-path input", "/etc")
    page.click(f"#{kind}-add")
    expect(page.locator(".wrong")).to_contain_text("/etc：这是整个磁盘或系统文件夹")
    shutil.copytree(BASE, tmp_path / "mini")
    page.fill(f"#{kind}-path textarea, #{kind}-path input", str(tmp_path))
    page.click(f"#{kind}-add")
    expect(roots).to_contain_text(str(tmp_path))
    page.reload()  # it is kept
    expect(roots).to_contain_text(str(tmp_path))
    if kind == "models":  # and what is in it is offered as a base
        expect(page.locator("#models")).to_contain_text("底模 1 个")
        new = visit("new", language="zh-CN")
        opened(new)
        new.locator("#new-base-head [data-group=mine]").click()
        card = new.locator("#new-base-cards .choice-card:visible", has_text="mini")
        expect(card).to_contain_text("Stable Diffusion 1.5")
        new.close()
    page.click(f"#{kind}-remove")
    expect(roots).not_to_contain_text(str(tmp_path))
    assert tmp_path.is_dir()


def test_tokens_are_told_by_name_only(visit: Callable[..., Page]) -> None:
    page = visit("settings")
    expect(page.locator("table.facts", has_text="HF_TOKEN").last).to_contain_text(re.compile("set"))
    expect(page.locator("#about")).to_contain_text("gradio 6.")


@pytest.mark.parametrize(
    ("language", "told"), [("en", "the page may not use this path"), ("zh-CN", "页面无权使用该路径")]
)
def test_a_tool_tells_what_is_wrong_in_the_pages_language(visit: Callable[..., Page], language: str, told: str) -> None:
    page = visit("tools", language=language)
    field = page.get_by_label("LoRA file" if language == "en" else "LoRA 文件")
    field.fill("/etc/passwd.safetensors")
    field.press("Enter")
    page.get_by_role("button", name="Run" if language == "en" else "立即执行", exact=True).click()
    expect(page.locator("#tool-result .wrong")).to_contain_text(told)


def test_where_models_come_from_is_told_without_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, host in (
        ("", "huggingface.co"),
        ("https://me:secret@mirror.example/hub", "mirror.example"),
        ("http://[x", "HF_ENDPOINT"),
    ):
        monkeypatch.setenv("HF_ENDPOINT", given)
        assert settings._find_hub_host() == host
