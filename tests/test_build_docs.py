"""The documentation site: all pages in both languages, no dead link, and a search that finds words of both."""

import importlib.util
import json
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("build_docs", ROOT / "scripts/build_docs.py")
assert spec and spec.loader
build_docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build_docs)


@pytest.fixture(scope="module")
def site() -> Path:
    assert build_docs.main() == 0  # mkdocs is strict: a link that leads nowhere ends it
    return ROOT / "build" / "site"


def test_every_page_is_there_in_both_languages(site: Path) -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        stem = "index" if path.name.startswith("README") else path.name.split(".")[0]
        for folder in (site, site / "zh"):
            assert (folder / f"{stem}.html").is_file(), f"{stem} in {folder.name}"
    title = re.compile("<h1[^>]*>(.*?)<", re.DOTALL)
    titles = [title.findall((folder / "settings.html").read_text(encoding="utf-8")) for folder in (site, site / "zh")]
    assert titles == [["All settings"], ["全部设置"]]


def test_every_page_is_in_the_menu() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    menu = json.dumps(yaml.unsafe_load(text)["nav"])  # a tag names the function that makes anchors
    for path in (ROOT / "docs").glob("*.md"):
        assert f'"{path.name.split(".")[0]}.md"' in menu, path.name


def test_a_link_to_a_heading_leads_to_it(site: Path) -> None:
    """In both languages: mkdocs compares no anchors of pages that the plugin for languages makes."""
    for folder in (site, site / "zh"):
        texts = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.html")}
        links = {
            (name or own, unquote(anchor))
            for own, text in texts.items()
            for name, anchor in re.findall(r'href="([\w.-]+\.html)?#([^"]+)"', text)
        }
        assert len(links) > 200
        for name, anchor in links:
            assert f'id="{anchor}"' in texts[name], f"{folder.name}/{name}#{anchor}"


def test_the_search_index_has_the_words_of_both_languages(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    words = {word for page in index["docs"] for word in re.split(index["config"]["separator"], page["text"])}
    assert {"quantize", "dequantized", "显存", "学习"} <= words


def test_a_link_to_a_missing_file_ends_the_build() -> None:
    page = ROOT / "README.md"
    with pytest.raises(SystemExit, match="docs/none.md does not exist"):
        build_docs.adapt("see [this](docs/none.md)", page, build_docs.list_pages())
    adapted = build_docs.adapt(
        "[a](docs/fp8.zh-CN.md#x) [b](presets) ![c](docs/run.zh-CN.png)", page, build_docs.list_pages()
    )
    assert adapted == "[a](fp8.md#x) b ![c](run.png)"
