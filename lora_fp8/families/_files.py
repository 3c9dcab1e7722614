"""Finds a base model's files and checks that they are complete: folders, single files, the hub, headers, hashes.

Only safetensors files are read: opening a pickle (.bin, .ckpt, .pt) runs code. Each file's header is compared with the
file's size before it is mapped, because reading a mapped file that is too short kills the process with SIGBUS instead
of raising an error.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..common import json_files
from ..common.messages import get_language, translate
from ..common.reading import open_regular
from ..common.stamps import FileStamp, is_settled, read_stamp
from ..common.system import find_cache_folder
from ..errors import Message, UserError, cannot_read, combine, reason
from .sources import WEIGHT_ENDINGS, BaseDescription, BaseFile, describe, headers, parse, selection

Header = dict[str, tuple[int, ...]]
"""Tensor name -> shape, as a safetensors file's header gives them."""

_PICKLES = (".bin", ".ckpt", ".pt", ".pth")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "model.", "")
"""Prefixes of the denoiser's tensor names in single files; they differ between the programs that write them."""


def find_checkpoint_prefix(header: Header) -> str:
    """Return the prefix of `PREFIXES` that a single file uses."""
    return next(prefix for prefix in PREFIXES if any(key.startswith(prefix) for key in header))


def make_native_header(header: Header) -> Header:
    """Return the names, without their prefix, and shapes of a single file's denoiser."""
    prefix = find_checkpoint_prefix(header) if header else ""
    return {key.removeprefix(prefix): shape for key, shape in header.items() if key.startswith(prefix)}


def matches_marks(marks: dict[str, Any], native: Header) -> bool:
    """Return True if a `make_native_header` matches the marks of a family (see `ModelFamily.single_file`)."""
    first, last = marks.get("in_is_out", ("", ""))
    shapes = marks.get("shapes", {})
    if not marks or not all(name in native for name in (*marks.get("has", ()), *shapes, *filter(None, (first, last)))):
        return False
    if any(name.startswith(tuple(marks.get("lacks", ()))) for name in native):
        return False
    for name, shape in shapes.items():
        actual = native[name]
        if len(actual) != len(shape) or any(side not in (None, n) for side, n in zip(shape, actual, strict=True)):
            return False
    return not first or math.prod(native[first][1:]) == native[last][0]


def count_marks(marks: dict[str, Any]) -> int:
    """Return how many tensors, prefixes and sides the marks of a family state; the more, the closer is what fits."""
    sides = sum(side is not None for shape in marks.get("shapes", {}).values() for side in shape)
    return sum(len(marks.get(kind, ())) for kind in ("has", "lacks", "shapes", "in_is_out")) + sides


def list_blocks(native: Header, name: str) -> list[int]:
    """Return the sorted numbers of the blocks that have this tensor; "#" in `name` stands for the number."""
    pattern = re.compile(re.escape(name).replace(r"\#", r"(\d+)"))
    return sorted(int(match[1]) for key in native if (match := pattern.fullmatch(key)))


def read_sizes(places: Mapping[str, str], native: Header, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config entries that a file's tensors state (see the fact `sizes_from`).

    Args:
        places: entry -> where it is: "blocks.#.name" counts the blocks that have this tensor, "name[1]" is a side of
            its shape, and "name[1] // entry" that side divided by another entry.
        native: see `make_native_header`.
        config: config entries for what no tensor states.
    """
    entries: dict[str, Any] = {}
    for entry, place in places.items():
        place, _, divisor = place.partition(" // ")
        name, _, side = place.removesuffix("]").partition("[")
        if not side:
            if count := len(list_blocks(native, name)):
                entries[entry] = count
        elif name in native and len(native[name]) > int(side):
            divided = entries.get(divisor) or config.get(divisor) or 0
            if not divisor:
                entries[entry] = native[name][int(side)]
            elif divided:
                entries[entry] = native[name][int(side)] // divided
    return entries


def is_hub_id(path: str) -> bool:
    """Return True if a `model.path` that is no local path has the form of a Hugging Face id."""
    return bool(_HUB_ID.fullmatch(path)) and not path.endswith(WEIGHT_ENDINGS)


class Entry(NamedTuple):
    """A tensor as a safetensors header describes it; `dtype` is the format's own name, such as "F8_E4M3"."""

    dtype: str
    shape: tuple[int, ...]


class Absent(NamedTuple):
    """A weight file that is not on this machine yet: what its host says about it, and its header."""

    file: BaseFile
    header: headers.Header


Absentees = Mapping[Path, Absent]
"""Where a weight file will be -> what is known of it."""


class Place(NamedTuple):
    """Where a base model is: a diffusers folder, or a single file in this folder."""

    folder: Path
    checkpoint: Path | None
    absent: Absentees = MappingProxyType({})
    """the weights that are still to be downloaded"""
    base: BaseDescription | None = None
    """the description of a base on a hub"""


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        UserError: the file cannot be read, or holds something else.
    """
    try:
        return json_files.read_object(path)
    except OSError as error:
        raise cannot_read(path, error) from error
    except ValueError as error:
        raise UserError(str(error)) from error


def shorten_error(error: Exception) -> str:
    """Return the type of a library's error and the start of its message, up to 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}{lines and ': ' or ''}{' '.join(lines)[:200]}"


def find_scheduler(path: Path | str, config: Mapping[str, Any]) -> Any:
    """Return the class of diffusers that a scheduler's config names; `path` is for messages.

    Raises:
        UserError: diffusers has no such class.
    """
    import diffusers

    name = config.get("_class_name")
    if isinstance(name, str) and hasattr(diffusers, name):
        return getattr(diffusers, name)
    raise UserError(Message("{path}: diffusers has no scheduler named {name}", path=path, name=repr(name)))


def build_from_config(cls: Any, path: Path, config: dict[str, Any] | None = None) -> Any:
    """Build a diffusers object from a config, with `cls.from_config`.

    Args:
        cls: class of the object.
        path: the config file, which error messages name.
        config: entries of the config; None: those of the file.

    Raises:
        UserError: an entry makes no sense.
    """
    config = read_json(path) if config is None else config
    for key, parameter in inspect.signature(cls.__init__).parameters.items():
        # The constructor does not look at all of its arguments.
        if parameter.annotation in (int, float) and isinstance(config.get(key), str | list | dict):
            raise UserError(
                Message(
                    "{path} says {key} = {value}, which should be a number", path=path, key=key, value=repr(config[key])
                )
            )
    try:
        return cls.from_config(config)
    except Exception as error:  # diffusers validates few entries, so many kinds of errors arise
        if isinstance(error, MemoryError):
            raise
        raise UserError(
            Message("{path} does not describe a {kind} ({why})", path=path, kind=cls.__name__, why=shorten_error(error))
        ) from error


def read_header(path: Path, absent: Absentees = MappingProxyType({})) -> Header:
    """Return names and shapes of a safetensors file's tensors; see `read_entries`."""
    return {name: entry.shape for name, entry in read_entries(path, absent)[0].items()}


def read_entries(path: Path, absent: Absentees = MappingProxyType({})) -> tuple[dict[str, Entry], dict[str, str]]:
    """Read the tensors' descriptions and the metadata of a safetensors file, and compare its size with them.

    Args:
        path: the file.
        absent: files of which only the header is known; the file on this machine is preferred.

    Raises:
        UserError: the file is no safetensors file, or is damaged.
    """
    if path in absent and not path.is_file():
        header = absent[path].header
    else:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            headers.require_length(length, size, str(path))
            header = headers.parse(file.read(length), size, str(path))
    return {name: Entry(dtype, shape) for name, dtype, shape in header.tensors}, dict(header.metadata)


def find_weight_files(folder: Path, stem: str, absent: Absentees = MappingProxyType({})) -> list[Path]:
    """Return the safetensors files of a model in a diffusers folder, sharded or not.

    Full precision is preferred to fp16, and fp16 to bf16.

    Args:
        folder: subfolder of the model.
        stem: "diffusion_pytorch_model" for diffusers' models, "model" for those of transformers.
        absent: files that count as if they were here.

    Returns:
        The files; [] if the folder has no weights at all.

    Raises:
        UserError: shards are missing, or there are only pickles.
    """
    for variant in ("", ".fp16", ".bf16"):
        for name in (f"{stem}.safetensors.index{variant}.json", f"{stem}{variant}.safetensors.index.json"):
            index = folder / name
            if index.is_file():
                names = sorted({Path(n).name for n in read_json(index).get("weight_map", {}).values()})
                missing = [n for n in names if not ((folder / n).is_file() or folder / n in absent)]
                if missing:
                    raise UserError(
                        Message(
                            "{path} lacks {names}, which {index} lists",
                            path=folder,
                            names=", ".join(missing),
                            index=index.name,
                        )
                    )
                return [folder / n for n in names]
        single = folder / f"{stem}{variant}.safetensors"
        if single.is_file() or single in absent:
            return [single]
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in _PICKLES)
    if pickles:
        raise UserError(selection.HOLDS_PICKLES(path=folder, file=pickles[0], name=f"{stem}.safetensors"))
    return []


def require_here(path: Path) -> None:
    """Check that a weight file is on this machine before it is loaded.

    Raises:
        UserError: only its header is known so far.
    """
    if not path.exists():
        raise UserError(Message("{path} is not downloaded yet; only its header is known", path=path))


def find_variant(files: list[Path]) -> str | None:
    """Return the `variant` argument with which from_pretrained finds these files: "fp16", "bf16" or None."""
    return next((v for v in ("fp16", "bf16") if files and f".{v}" in files[0].name), None)


def locate(path: str, revision: str, *, family: str, base: BaseDescription | None = None) -> Place:
    """Find what `model.path` names: "demo", a folder, a .safetensors file, or a base on a hub.

    Of a base on a hub, configs and tokenizers are fetched, and weights only described. `_components.find` finds the
    parts that a single file lacks.

    Args:
        path: `model.path`.
        revision: `model.revision`, or "".
        family: name of the family, which selects the demo base.
        base: the description of a base on a hub, if it was asked for already.

    Raises:
        UserError: there is no such model, or it is of a format that is not opened.
    """
    if path == "demo":
        bundled = Path(__file__).parent.parent / "demo" / "base"
        if not (bundled / family / "model_index.json").is_file():
            have = sorted(p.parent.name for p in bundled.glob("*/model_index.json"))
            raise UserError(selection.NO_DEMO(family=repr(family), names=", ".join(have) or Message("none")))
        return Place(bundled / family, None)

    local = Path(os.path.expanduser(path))  # Path.expanduser raises if there is no such user
    absent: Absentees = {}
    if local.exists() or not parse(path).is_remote:
        base = None
    else:
        base = base or describe(path, revision, family)
        if base.problems or base.folder is None:
            raise combine(base.problems)
        absent = list_absent(base)
        if not base.reference.is_single_file:
            return Place(base.folder, None, absent, base)
        local = base.folder / base.files[0].path
    if local.is_dir():
        return Place(local, None)
    if local.is_file() or local in absent:
        check_kind(str(local))
        return Place(local.parent, local, absent, base)
    raise UserError(selection.NOT_HERE(path=repr(path)))


def list_absent(base: BaseDescription) -> Absentees:
    """Return the weights of a base on a hub that are still to be downloaded, by the place where they will be."""
    if base.folder is None:
        return {}
    return {base.folder / file.path: Absent(file, base.headers[file.path]) for file in base.missing}


def check_kind(path: str, key: str = "model.path") -> None:
    """Check that a single file's format can be opened; `key` is the setting that names it.

    Raises:
        UserError: it is GGUF, or a pickle.
    """
    suffix = Path(path).suffix
    if suffix == ".gguf":
        raise UserError(
            Message(
                "{key} = {path}: GGUF is a low-bit format for generating images and cannot be trained on; give the "
                "same model in bf16, fp16 or fp8, as a .safetensors file or a diffusers folder",
                key=key,
                path=repr(path),
            )
        )
    if suffix not in WEIGHT_ENDINGS:
        raise UserError(
            Message(
                "{key} = {path}: only .safetensors checkpoints are opened (pickles can run code)",
                key=key,
                path=repr(path),
            )
        )


WORTH_KEEPING = 16 << 20
"""Size in bytes from which a file's hash is kept between processes; smaller files are hashed in no time."""

MOST_KEPT = 200
"""Number of hashes that the file keeps."""


def hash_book() -> Path:
    """Return the file that keeps the hashes of large files: reading a base of 24 GB takes minutes."""
    return find_cache_folder() / "hashes.json"


def _read_book(book: Path) -> dict[str, Any]:
    """Return {path: {"stamp": [...], "sha256": ...}}, or {} if the file is missing or unreadable."""
    try:
        content = json_files.read_json(book)
    except (OSError, ValueError):  # the only loss is the time to hash again
        return {}
    return content if isinstance(content, dict) else {}


def _hash_file(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=256)
def _compute_file_digest(path: Path, stamp: FileStamp) -> str:
    """Return the SHA-256 of a file with this stamp, from the kept hashes or by reading it."""
    if stamp[0] < WORTH_KEEPING:
        return _hash_file(path)
    book = hash_book()
    kept = _read_book(book).get(str(path))
    if isinstance(kept, dict) and kept.get("stamp") == list(stamp):
        if re.fullmatch(r"[0-9a-f]{64}", str(kept.get("sha256"))):
            return kept["sha256"]
    settled = is_settled(stamp)
    sha = _hash_file(path)
    if settled and read_stamp(path) == stamp:
        content = {key: value for key, value in _read_book(book).items() if key != str(path)}
        content[str(path)] = {"stamp": list(stamp), "sha256": sha}
        try:
            book.parent.mkdir(parents=True, exist_ok=True)
            json_files.write_json(book, dict([*content.items()][-MOST_KEPT:]))
        except OSError as error:
            warning = Message(
                "{path} cannot be written ({why}): each run has to read the base model again",
                path=book,
                why=reason(error),
            )
            logging.getLogger(__name__).warning("%s", translate(get_language(), warning))
    return sha


def compute_digest(files: Iterable[tuple[str, Path]], absent: Absentees = MappingProxyType({})) -> str:
    """Return the SHA-256 of the names and contents of files, sorted by name.

    Each file is read once per process, and a large one only again when it changes (see `hash_book`). Of a file that is
    not here, the SHA-256 that its host states counts, so that the digest is the same before and after the download.
    """
    total = hashlib.sha256()
    for name, path in sorted(files):
        if path in absent and not path.is_file():
            total.update(f"{name}\0{absent[path].file.sha256}\n".encode())
            continue
        path = path.resolve()
        total.update(f"{name}\0{_compute_file_digest(path, read_stamp(path))}\n".encode())
    return total.hexdigest()
