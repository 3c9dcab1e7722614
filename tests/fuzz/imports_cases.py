"""The other trainers' files, mutated as nested values and as text."""

import copy
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mutations
import tomlkit
import yaml
from PIL import Image

from lora_fp8 import importing
from lora_fp8.errors import UserError
from lora_fp8.importing import source_files

EXAMPLES = Path(__file__).resolve().parents[1] / "data" / "import"
TEXT = (
    "0",
    "-1",
    "nan",
    "[]",
    "{}",
    "null",
    "~",
    '""',
    "'",
    "9" * 400,
    "1e999",
    "&a [*a]",
    "!!python/object:x",
    "| x",
    "中",
)


class Cases:
    """A case is one file among the others that it may name, and sometimes the tool that it is said to be of."""

    def __init__(self, work: Path) -> None:
        self.beside = work / "beside"
        shutil.copytree(EXAMPLES, self.beside)
        for name in ("10_zibo cat", "plain", "reg"):
            (folder := self.beside / "pictures" / name).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (8, 8)).save(folder / f"{number}.png")
        self.paths = sorted(path for path in EXAMPLES.iterdir() if path.suffix != ".txt")
        self.sources = {path: source_files.read_source(path) for path in self.paths}

    def make(self, draw: random.Random, folder: Path) -> None:
        path = draw.choice(self.paths)
        text = path.read_text(encoding="utf-8")
        data: Any = self.sources[path].data
        suffix = path.suffix
        if draw.random() < 0.02:
            text = mutations.deep(draw, draw.choice((1000, 100_000, 900_000)))
            suffix = draw.choice((".toml", ".json", ".yaml", ".sh"))
        elif draw.random() < 0.6 and suffix != ".sh":
            data = mutations.values_of(draw, copy.deepcopy(data))
            suffix, text = self._written(suffix, data)
        else:
            text = mutations.text_of(draw, text, TEXT)
        raw = text.encode("utf-8", "surrogatepass")
        if draw.random() < 0.1:
            raw = mutations.bytes_of(draw, raw)
        (folder / f"given{suffix}").write_bytes(raw)
        if draw.random() < 0.3:
            (folder / "tool.txt").write_text(draw.choice(list(importing.TOOLS)), encoding="utf-8")

    def _written(self, suffix: str, data: Any) -> tuple[str, str]:
        try:
            if suffix == ".toml":
                return suffix, tomlkit.dumps(data)
            if suffix in (".yaml", ".yml"):
                return suffix, yaml.safe_dump(data)
        except Exception:  # TOML has no null, and PyYAML no numbers of 5,000 digits
            suffix = ".json"
        return ".json", json.dumps(data)

    def use(self, folder: Path, allowed: Callable[[Callable[[], Any]], Any]) -> None:
        given = next(folder.glob("given.*"))
        path = self.beside / given.name
        shutil.copyfile(given, path)
        tool = (folder / "tool.txt").read_text(encoding="utf-8") if (folder / "tool.txt").exists() else ""
        try:
            made = allowed(lambda: importing.import_file(path, tool))
            if made is not None:
                importing.report(made), importing.to_toml(made), importing.find_problems(made)
                json.dumps(importing.to_json(made))
        except UserError as error:
            raise AssertionError("told after the import") from error
        finally:
            path.unlink()
