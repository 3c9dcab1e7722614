#!/usr/bin/env python3
"""Build the documentation site from README.md, docs/ and the pages for developers: `make docs`.

The pages are written to be read in the repository. For the site they are collected in build/docs, where README.md is
the front page, and links between them are adapted. Links to files that are no pages (code, presets) become plain text.
Then mkdocs builds build/site, and a link that leads nowhere is an error.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STAGED = ROOT / "build" / "docs"
CHINESE, CHINESE_ON_SITE = ".zh-CN.md", ".zh.md"
"""Endings of Chinese pages; the theme calls the language zh."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
LANGUAGE_LINE = re.compile(r"^(English · \[|\[English\]\().*\n\n?", re.MULTILINE)
"""The line that leads from a page to its translation and home; the site has a menu for that."""
WIDE = "---\nhide: [navigation]\n---\n"
"""In front of pages that are a tab of their own: the menu beside them would hold one line, and tables need the room."""
FOR_DEVELOPERS = ("training-step", "contributing", "adding-a-family", "notes", "changelog")
STYLE = ".md-grid { max-width: 76rem; }\n.md-typeset table:not([class]) code { word-break: normal; }\n"


def list_pages() -> dict[Path, str]:
    """Return the file of each page -> its name on the site."""
    pages = {ROOT / "README.md": "index.md", ROOT / "README.zh-CN.md": f"index{CHINESE_ON_SITE}"}
    pages |= {path: path.name.replace(CHINESE, CHINESE_ON_SITE) for path in sorted((ROOT / "docs").glob("*.md"))}
    for name in ("CONTRIBUTING.md", "NOTES.md", "CHANGELOG.md"):
        pages[ROOT / name] = name.lower()
    pages |= {path: f"benchmarks-{path.name}" for path in sorted((ROOT / "benchmarks").glob("*.md"))}
    pages[ROOT / "lora_fp8" / "families" / "README.md"] = "adding-a-family.md"
    return pages


def adapt(text: str, path: Path, pages: dict[Path, str]) -> str:
    """Return a page's text with its links as they are on the site."""

    def replace(match: re.Match[str]) -> str:
        image, label, target = match.groups()
        address, _, anchor = target.partition("#")
        if not address or ":" in address:
            return match[0]
        file = Path(os.path.normpath(path.parent / address))
        if image:
            return f"![{label}]({file.name.replace('.zh-CN.', '.')})"
        if file not in pages:
            if not file.exists():
                raise SystemExit(f"{path.relative_to(ROOT)}: {target} does not exist")
            return label
        # The site keeps the reader's language, so that links name the page only.
        name = pages[file].replace(CHINESE_ON_SITE, ".md")
        return f"[{label}]({name}{'#' if anchor else ''}{anchor})"

    return LINK.sub(replace, LANGUAGE_LINE.sub("", text, count=1))


def stage() -> None:
    """Collect all pages and images in build/docs."""
    shutil.rmtree(STAGED, ignore_errors=True)
    STAGED.mkdir(parents=True)
    pages = list_pages()
    for path, name in pages.items():
        text = adapt(path.read_text(encoding="utf-8"), path, pages)
        text = text if name.startswith(FOR_DEVELOPERS) else WIDE + text
        (STAGED / name).write_text(text, encoding="utf-8")
    (STAGED / "site.css").write_text(STYLE, encoding="utf-8")
    for path in (ROOT / "docs").iterdir():
        if path.suffix in (".png", ".svg", ".ipynb"):
            shutil.copy(path, STAGED / path.name.replace(".zh-CN.", ".zh."))


def main() -> int:
    """Collect the pages and build the site."""
    stage()
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    # The theme prints an advertisement for its successor at each start.
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
