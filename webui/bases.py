"""What a training can start from: base models, presets and configs near the roots, and which paths a draft names."""

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import tomlkit

from lora_fp8 import config, demo, families
from lora_fp8.config import UserError
from lora_fp8.run import atomic_write

from . import form

DEEP = 3
MOST_FOUND = 200
OPEN = ("name", "output_dir", "preset", "model.path", "model.components", "model.revision", "dataset.folders")
"""Settings that say which job this is; a preset has none of them."""


@cache
def demos() -> tuple[str, ...]:
    """Families with a bundled miniature."""
    bundled = Path(demo.__file__).parent / "base"
    return tuple(name for name in families.available() if (bundled / name / "model_index.json").is_file())


def demo_presets() -> tuple[str, ...]:
    """What the bundled miniatures learn with."""
    return tuple(name for name in config.preset_names() if name.startswith("demo_"))


@cache
def cards() -> tuple[str, ...]:
    """Presets for the memory of a card, the smallest first."""
    return tuple(sorted((name for name in config.preset_names() if card(name)), key=card))


def card(name: str) -> int:
    """GB of the card that a preset is for; 0 where it is for none."""
    found = re.fullmatch(r"vram_(\d+)gb", name)
    return int(found[1]) if found else 0


def usual(family: str) -> list[str]:
    """Bases that a family is usually trained on."""
    if family not in families.available():
        return []
    example = families.facts(family).get("example_base", "")
    return [*(["demo"] if family in demos() else []), *([example] if on_the_hub(example) else [])]


def on_the_hub(path: str) -> bool:
    """Whether this has the form of a Hugging Face id."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path)) and not path.endswith(".safetensors")


def nearby(roots: Iterable[Path]) -> list[str]:
    """Diffusers folders and large single files below the roots, not deep."""
    found: list[str] = []
    for path in _walk(roots):
        if path.name == "model_index.json":
            found.append(str(path.parent))
        elif path.suffix == ".safetensors" and not _in_model(path) and path.stat().st_size > 512 * 2**20:
            found.append(str(path))  # smaller ones are LoRAs
    return list(dict.fromkeys(found))


def _in_model(path: Path) -> bool:
    return any((folder / "model_index.json").exists() for folder in path.parents[:2])


def _walk(roots: Iterable[Path]) -> Iterator[Path]:
    """Files near the roots, hidden ones left out; at most so many folders are looked into."""
    looked = 0
    for root in roots:
        waiting = [(root, 0)]
        while waiting and looked < MOST_FOUND:
            folder, depth = waiting.pop(0)
            looked += 1
            try:
                entries = sorted(folder.iterdir())
            except OSError:
                continue  # gone, or not for us to read: not offered
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_file():
                    yield entry
                elif depth < DEEP and entry.is_dir():
                    waiting.append((entry, depth + 1))


def recognised(path: Path) -> str | None:
    """The family of a diffusers folder, by what its model_index.json says; None where it does not say."""
    try:
        told = json.loads((path / "model_index.json").read_text(encoding="utf-8"))
        pipeline = told.get("_class_name")
    except (OSError, ValueError, AttributeError):
        return None
    fitting = [name for name in families.available() if families.facts(name).get("pipeline_class") == pipeline]
    if len(fitting) > 1:
        fitting = [name for name in fitting if _marked(path, families.facts(name))]
    return fitting[0] if len(fitting) == 1 else None


def _marked(path: Path, facts: dict[str, Any]) -> bool:
    """Whether the denoiser's config has what tells this family from its relatives."""
    try:
        told = json.loads((path / facts["denoiser_name"] / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all(told.get(key, False) == value for key, value in facts.get("config_marks", {}).items())


def paths(values: dict[str, Any]) -> list[tuple[str, str]]:
    """(setting, path) of everything in a draft that names a place of this machine."""
    found = [(key, values[key]) for key in ("output_dir", "dataset.cache_dir", "model.components")]
    base = values["model.path"]
    if isinstance(base, str) and base != "demo" and not on_the_hub(base):
        found.append(("model.path", base))
    rows = values["dataset.folders"] if isinstance(values["dataset.folders"], list) else []
    for row in rows:
        names = [row.get(name) for name in ("path", "control")] if isinstance(row, dict) else []
        found += [("dataset.folders", name) for name in names]
    controls = values.get("preview.controls")
    found += [("preview.controls", one) for one in controls] if isinstance(controls, list) else []
    return [(key, path) for key, path in found if isinstance(path, str) and path]


def own_presets(home: Path) -> list[Path]:
    """Presets that were saved on the page."""
    return sorted((home / "presets").glob("*.toml"))


def save_preset(home: Path, name: str, text: str) -> Path:
    """Write what a draft comes to, but for what says which job it is, as a preset.

    Raises:
        UserError: the draft is not TOML, or there is a preset of this name already.
    """
    path = home / "presets" / f"{name}.toml"
    if path.exists() or name in config.preset_names():
        raise UserError(f"{name}: a preset of this name is there already; choose another name")
    values, origins = form.values(text, home), form.origins(text, home)
    tables: dict[str, Any] = {}
    for key in origins:
        if key not in OPEN and key != "model.family":
            section, _, last = key.rpartition(".")
            (tables.setdefault(section, {}) if section else tables)[last] = values[key]
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    atomic_write(path, tomlkit.dumps(tables).encode())
    return path


def configs(roots: Iterable[Path]) -> list[tuple[str, Path]]:
    """(what it is, where) of runs and configs near the roots."""
    found = []
    for path in _walk(roots):
        if path.name == "config.toml" and (path.parent / "events.jsonl").exists():
            found.append((path.parent.name, path))
        elif path.suffix == ".toml" and path.name != "config.toml" and path.parent.name != "presets":
            found.append((path.name, path))
    return found
