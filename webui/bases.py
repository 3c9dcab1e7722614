"""What a training can start from: base models, presets and configs near the roots, and which paths a draft names."""

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit

from lora_fp8 import config, demo, families
from lora_fp8.config import UserError
from lora_fp8.run import atomic_write

from . import form

INDEXES = ("model_index.json", "modular_model_index.json")
"""Files that say which pipeline a diffusers folder is made for."""
LARGE = 512 * 2**20
"""Bytes from which a single file is no LoRA."""
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


class Base(NamedTuple):
    """What a base model on this machine is.

    Attributes:
        family: its architecture; "" where nothing tells.
        wrong: the engine's words for what keeps it from being a base, such as "a LoRA, not a base model"; or "".
        single: it is one file, which needs `model.components` beside it.
    """

    family: str = ""
    wrong: str = ""
    single: bool = False


def nearby(models: Iterable[Path], roots: Iterable[Path]) -> list[tuple[str, str]]:
    """(name and architecture, path) of diffusers folders and single files near these folders.

    Below the roots single files are offered that are `LARGE`; below folders for models all that are of a known
    architecture.
    """
    found: dict[str, str] = {}
    for tops, least in ((list(models), 0), (list(roots), LARGE)):
        for path in _walk(tops):
            base = path.parent if path.name in INDEXES else path
            if str(base) in found or (base == path and (path.suffix != ".safetensors" or _in_model(path))):
                continue
            if base == path and path.stat().st_size < least:
                continue
            known = look(base)
            if known.family or (least and not known.wrong):
                title = families.facts(known.family)["title"] if known.family else ""
                top = next(top for top in tops if base.is_relative_to(top))
                name = base.name if base == top else base.relative_to(top).as_posix()
                found[str(base)] = " · ".join(filter(None, (name, title)))
    return [(label, path) for path, label in found.items()]


def _in_model(path: Path) -> bool:
    return any((folder / name).exists() for folder in path.parents[:2] for name in INDEXES)


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


def look(path: Path) -> Base:
    """What a path is as a base model; nothing is said of one that does not exist."""
    if path.is_dir():
        return Base(_family_of_folder(path))
    try:
        stat = path.stat()
    except OSError:
        return Base()
    return _of_file(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4096)
def _of_file(path: Path, changed: int, size: int) -> Base:
    """Of a file by its header: the first megabytes of however many."""
    try:
        what, family = families.of_file(path)
    except (UserError, OSError) as error:
        return Base(wrong=str(error), single=True)
    return Base(family, "" if family else what or families.UNKNOWN, single=True)


def fits(base: Base, family: str) -> bool:
    """Whether a form that says `family` may have this base: some have the very tensors of a relative's files."""
    relative = families.facts(family).get("same_tensors_as") if family in families.available() else None
    return base.family in ("", family) or (base.single and base.family == relative)


def parts(models: Iterable[Path], roots: Iterable[Path], family: str) -> list[tuple[str, str]]:
    """(name, path) of diffusers folders of this family, which have what a single file lacks."""
    return [(name, path) for name, path in nearby(models, roots) if look(Path(path)) == Base(family)]


def _family_of_folder(path: Path) -> str:
    """The family of a diffusers folder, by what its index says; "" where it does not say."""
    try:
        index = next(file for name in INDEXES if (file := path / name).is_file())
        pipeline = json.loads(index.read_text(encoding="utf-8")).get("_class_name")
    except (OSError, ValueError, AttributeError, StopIteration):
        return ""
    fitting = [name for name in families.available() if families.facts(name).get("pipeline_class") == pipeline]
    if len(fitting) > 1:
        fitting = [name for name in fitting if _marked(path, families.facts(name))]
    return fitting[0] if len(fitting) == 1 else ""


def _marked(path: Path, facts: dict[str, Any]) -> bool:
    """Whether the denoiser's config has what tells this family from its relatives."""
    try:
        part = facts.get("denoiser_name", "transformer")
        told = json.loads((path / part / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return all(told.get(key, False) == value for key, value in facts.get("config_marks", {}).items())


def paths(values: dict[str, Any]) -> list[tuple[str, str]]:
    """(setting, path) of everything in a draft that names a place of this machine."""
    found = [(key, values[key]) for key in ("output_dir", "dataset.cache_dir", "model.components", "adapter.init_from")]
    base = values["model.path"]
    if isinstance(base, str) and base != "demo" and not on_the_hub(base):
        found.append(("model.path", base))
    rows = values["dataset.folders"] if isinstance(values["dataset.folders"], list) else []
    for row in rows:
        names = [row.get(name) for name in ("path", "control", "mask")] if isinstance(row, dict) else []
        if names and not (isinstance(names[-1], str) and config.names_a_folder_of_masks(names[-1])):
            del names[-1]
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
