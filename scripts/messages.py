#!/usr/bin/env python3
"""Bring the catalogues of messages up to date with the templates in the source.

    python scripts/messages.py            add new templates, without a translation; remove what is none any more
    python scripts/messages.py --check    only list both; exit code 1 if there is anything

Lines of tests that have words of a removed template and of no other are listed too: they may expect the old message.
Translations are then written into lora_fp8/common/zh_CN.po by hand, or with any gettext editor.
"""

import argparse
import ast
import re
import sys
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lora_fp8.cli import app, help
from lora_fp8.common import messages
from lora_fp8.config import validation
from lora_fp8.families.sources import known_bases

CALLS = {"Message": 1, "Joined": 1, "Template": 1, "Plural": 2}
"""Calls whose first arguments are templates -> how many of them are."""


def extract() -> set[str]:
    """Return every template that is written in the source, and every text that becomes a `Phrase`."""
    # Not with babel's extraction, which passes over calls in the arguments of other calls.
    found: set[str] = set()
    for folder in ("lora_fp8", "webui"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                    first = [ast.literal_eval(text) for text in node.args[: CALLS.get(name, 0)] if is_text(text)]
                    found |= set(first)
    phrases = {base.purpose.template for base in known_bases.read()} | help.list_texts(app)
    return found | phrases | validation.list_required()


def is_text(node: ast.expr) -> bool:
    """Return True for a text that is written out."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def update(catalogue: Catalog, templates: set[str]) -> tuple[list[str], list[str]]:
    """Add and remove entries. Returns the new and the removed templates."""
    there = {str(entry.id) for entry in catalogue if entry.id}
    worded = {text for text in templates if re.search("[A-Za-z]", text)}  # not the separators of joined messages
    new, gone = sorted(worded - there), sorted(there - templates)
    for text in new:
        catalogue.add(text)
    for text in gone:
        del catalogue[text]
    return new, gone


def list_words(text: str) -> set[str]:
    """Return every three words of a text that follow each other."""
    words = re.findall("[A-Za-z]+", text)
    return {" ".join(words[start : start + 3]) for start in range(len(words) - 2)}


def find_expectations(gone: list[str], templates: set[str]) -> list[str]:
    """Return the places in tests that may still expect removed templates."""
    old = set().union(*map(list_words, gone)) - set().union(*map(list_words, templates))
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if old & list_words(line)
    ]


def main() -> int:
    """Update each catalogue, or only compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")

    options = parser.parse_args()
    templates, changed = extract(), False
    for file in messages.CATALOGUES.values():
        with open(messages.FOLDER / file, "rb") as source:
            catalogue = read_po(source)
        new, gone = update(catalogue, templates)
        for sign, texts in (("+", new), ("-", gone)):
            print("".join(f"{sign} {text!r}\n" for text in texts), end="")
        print("".join(f"  {line}\n" for line in find_expectations(gone, templates)), end="")
        changed |= bool(new or gone)
        if not options.check:
            with open(messages.FOLDER / file, "wb") as target:
                write_po(target, catalogue, width=0)
    return int(options.check and changed)


if __name__ == "__main__":
    sys.exit(main())
