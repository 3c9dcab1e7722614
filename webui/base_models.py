"""Find what a training can start from: base models, presets and configs near the allowed folders."""

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import tomlkit

from lora_fp8 import config, demo, families, settings
from lora_fp8.common.writing import atomic_write, make_folder
from lora_fp8.config import recipes
from lora_fp8.errors import Message, UserError
from lora_fp8.families import sources
from lora_fp8.families.sources import known_bases
from lora_fp8.families.sources.description import find_family
from lora_fp8.families.sources.selection import INDEXES

from . import form

LARGE = 512 * 2**20
"""Files of at least this many bytes are no LoRAs."""
DEEP = 3
MOST_FOUND = 200
FRESH_SECONDS = 60.0
"""An answer of a hub counts this long; a licence may be accepted meanwhile, and a disk emptied."""
LONGEST_SECONDS = 60.0
"""A hub that has not answered after this long is asked again."""
OPEN = ("name", "output_dir", "preset", "model.path", "model.components", "model.revision", "dataset.folders")
"""Settings that belong to one job; presets leave them out."""


@cache
def list_demo_families() -> tuple[str, ...]:
    """List the families with a bundled demo model."""
    bundled = Path(demo.__file__).parent / "base"
    return tuple(name for name in families.list_families() if (bundled / name / "model_index.json").is_file())


def list_demo_presets() -> tuple[str, ...]:
    """List the presets of the bundled demo models."""
    return tuple(name for name in config.list_preset_names() if name.startswith("demo_"))


@cache
def list_vram_presets() -> tuple[str, ...]:
    """List the presets for GPU memory sizes, smallest first."""
    return tuple(map(recipes.format_card_name, recipes.CARDS))


def list_usual_bases(family: str) -> list[str]:
    """List the base models that a family is usually trained on."""
    known = [base.id for base in known_bases.list_of_family(family) if base.kind != "distilled"]
    return [*(["demo"] if family in list_demo_families() else []), *known]


def is_remote(path: str) -> bool:
    """Return True if this names a base on Hugging Face, ModelScope or Civitai."""
    try:
        return sources.parse(path).is_remote
    except UserError:
        return False


def read_address(text: object) -> str:
    """Return how `model.path` names the base at an address that was copied from a browser; "" for anything else."""
    try:
        reference = sources.parse(str(text))
    except UserError:
        return ""
    return reference.name if reference.is_remote and reference.name != str(text) else ""


@dataclass
class _Question:
    begun: float
    answered: float = 0.0
    answer: sources.BaseDescription | None = None


class Descriptions:
    """What hubs answer about base models; a thread of its own asks each, so that a slow hub never holds a page."""

    def __init__(self) -> None:
        self._questions: dict[tuple[str, str, str], _Question] = {}
        self._lock = threading.Lock()

    def get(self, path: str, revision: str, family: str) -> sources.BaseDescription | None:
        """Return the description of a base elsewhere; None while the hub is asked, and if it takes too long.

        An answer counts for `FRESH_SECONDS`; meanwhile the last one is returned.
        """
        key, now = (path, revision, family), time.monotonic()
        with self._lock:
            question = self._questions.get(key)
            is_asked = question is not None and not question.answered and now - question.begun < LONGEST_SECONDS
            is_fresh = question is not None and question.answered and now - question.answered < FRESH_SECONDS
            if question is None or not (is_asked or is_fresh):
                if len(self._questions) > MOST_FOUND:
                    self._questions.clear()
                question = self._questions[key] = _Question(now, answer=question.answer if question else None)
                threading.Thread(target=self._ask, args=(key, question), daemon=True, name="base").start()
            return question.answer

    def forget(self) -> None:
        """Ask everything again: an account has logged in, or somebody wants to know how it is now."""
        with self._lock:
            self._questions.clear()

    def _ask(self, key: tuple[str, str, str], question: _Question) -> None:
        try:
            question.answer = sources.describe(*key)
        finally:  # an unexpected error is in the log of the thread, and the question is asked again
            question.answered = time.monotonic()


class Base(NamedTuple):
    """What is known of a base model on this machine.

    Attributes:
        family: its architecture; "" if unknown.
        wrong: the engine's message why it cannot be a base, such as "a LoRA, not a base model"; or "".
        single: it is a single file, which needs `model.components` beside it.
    """

    family: str = ""
    wrong: str = ""
    single: bool = False


def find_base_models(models: Iterable[Path], roots: Iterable[Path]) -> list[tuple[str, str]]:
    """Find diffusers folders and single files near these folders. Returns (name and architecture, path).

    Below `roots` only single files of at least `LARGE` bytes are listed; below `models` all files of a known
    architecture.
    """
    labels: dict[str, str] = {}
    for tops, least in ((list(models), 0), (list(roots), LARGE)):
        for path in _walk_files(tops):
            base = path.parent if path.name in INDEXES else path
            if str(base) in labels or (
                base == path and (path.suffix not in sources.WEIGHT_ENDINGS or _lies_in_diffusers_folder(path))
            ):
                continue
            if base == path and path.stat().st_size < least:
                continue
            known = inspect_base(base)
            if known.family or (least and not known.wrong):
                title = families.get(known.family).title if known.family else ""
                top = next(top for top in tops if base.is_relative_to(top))
                name = base.name if base == top else base.relative_to(top).as_posix()
                labels[str(base)] = " · ".join(filter(None, (name, title)))
    return [(label, path) for path, label in labels.items()]


def _lies_in_diffusers_folder(path: Path) -> bool:
    return any((folder / name).exists() for folder in path.parents[:2] for name in INDEXES)


def _walk_files(roots: Iterable[Path]) -> Iterator[Path]:
    """Yield files near the roots, without hidden ones. At most MOST_FOUND folders are read."""
    looked = 0
    for root in roots:
        waiting = [(root, 0)]
        while waiting and looked < MOST_FOUND:
            folder, depth = waiting.pop(0)
            looked += 1
            try:
                entries = sorted(folder.iterdir())
            except OSError:
                continue  # deleted or not readable: not offered
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_file():
                    yield entry
                elif depth < DEEP and entry.is_dir():
                    waiting.append((entry, depth + 1))


def inspect_base(path: Path) -> Base:
    """Inspect a path as a base model. Returns an empty `Base` for a path that does not exist."""
    if path.is_dir():
        return Base(find_family(path))
    try:
        stat = path.stat()
    except OSError:
        return Base()
    return _inspect_file(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=4096)
def _inspect_file(path: Path, changed: int, size: int) -> Base:
    """Inspect a file by its header, which is in the first megabytes."""
    try:
        what, family = families.describe_file(path)
    except (UserError, OSError) as error:
        return Base(wrong=str(error), single=True)
    return Base(family, "" if family else what or families.UNKNOWN, single=True)


def fits_family(base: Base, family: str) -> bool:
    """Return True if `family` can use this base. Some families' files have exactly the tensors of a relative's."""
    relative = families.get(family).same_tensors_as if family in families.list_families() else None
    return base.family in ("", family) or (base.single and base.family == relative)


def find_component_folders(models: Iterable[Path], roots: Iterable[Path], family: str) -> list[tuple[str, str]]:
    """Find (name, path) of diffusers folders of this family. They have the components that a single file lacks."""
    return [(name, path) for name, path in find_base_models(models, roots) if inspect_base(Path(path)) == Base(family)]


def list_paths(values: dict[str, Any]) -> list[tuple[str, str]]:
    """List (setting, path) of everything in a draft that names a file or folder of this machine."""
    data: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (data.setdefault(section, {}) if section else data)[name] = value
    paths = []
    for named in settings.find_path_places(data):
        path = named.path
        if not isinstance(path, str) or not path:
            continue
        if named.setting in settings.WORDS and (path == settings.WORDS[named.setting] or is_remote(path)):
            continue
        if named.setting == "dataset.folders.mask" and not settings.is_mask_folder(path):
            continue
        row = named.setting.startswith("dataset.folders.")
        paths.append(("dataset.folders" if row else named.setting, path))
    return paths


def list_own_presets(home: Path) -> list[Path]:
    """List the presets that were saved on the page."""
    return sorted((home / "presets").glob("*.toml"))


def save_preset(home: Path, name: str, text: str) -> Path:
    """Save the resolved settings of a draft as a preset, without those that belong to one job.

    Raises:
        UserError: the draft is not TOML, or a preset of this name exists.
    """
    path = home / "presets" / f"{name}.toml"
    if path.exists() or name in config.list_preset_names():
        raise UserError(Message("{name}: a preset of this name exists already; choose another name", name=name))
    values, origins = form.read_values(text, home), form.find_origins(text, home)
    tables: dict[str, Any] = {}
    for key in origins:
        if key not in OPEN and key != "model.family":
            section, _, last = key.rpartition(".")
            (tables.setdefault(section, {}) if section else tables)[last] = values[key]
    make_folder(path.parent, 0o700)
    atomic_write(path, tomlkit.dumps(tables).encode())
    return path


def find_configs(roots: Iterable[Path]) -> list[tuple[str, Path]]:
    """Find runs and configs near the roots. Returns (name, path)."""
    configs = []
    for path in _walk_files(roots):
        if path.name == "config.toml" and (path.parent / "events.jsonl").exists():
            configs.append((path.parent.name, path))
        elif path.suffix == ".toml" and path.name != "config.toml" and path.parent.name != "presets":
            configs.append((path.name, path))
    return configs
