"""Where a base model's files are and whether they are whole: folders, single files, the hub, headers, hashes.

Only safetensors are read: a pickle (.bin, .ckpt, .pt) runs code when it is opened. Every file's header is checked
against its size before it is mapped, because a mapped file that ends early kills the process with SIGBUS instead of an
error.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from lora_fp8.config import UserError
from lora_fp8.run import atomic_write

Header = dict[str, tuple[int, ...]]
"""Tensor name -> shape, as a safetensors file's header gives them."""

_PICKLES = (".bin", ".ckpt", ".pt", ".pth")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "model.", "")
"""What the denoiser's names begin with in single files, by who wrote them."""


def checkpoint_prefix(header: Header) -> str:
    """The one of `PREFIXES` that a single file has."""
    return next(prefix for prefix in PREFIXES if any(key.startswith(prefix) for key in header))


def native_header(header: Header) -> Header:
    """Names and shapes of a single file's denoiser, without what they all begin with."""
    prefix = checkpoint_prefix(header) if header else ""
    return {key.removeprefix(prefix): shape for key, shape in header.items() if key.startswith(prefix)}


def fits(marks: dict[str, Any], native: Header) -> bool:
    """Whether a single file with this `native_header` has the marks of a family, see `ModelFamily.single_file`."""
    first, last = marks.get("in_is_out", ("", ""))
    shapes = marks.get("shapes", {})
    if not marks or not all(name in native for name in (*marks.get("has", ()), *shapes, *filter(None, (first, last)))):
        return False
    if any(name.startswith(tuple(marks.get("lacks", ()))) for name in native):
        return False
    for name, shape in shapes.items():
        found = native[name]
        if len(found) != len(shape) or any(side not in (None, n) for side, n in zip(shape, found, strict=True)):
            return False
    return not first or math.prod(native[first][1:]) == native[last][0]


def blocks_with(native: Header, name: str) -> list[int]:
    """Numbers of the blocks that have this tensor, in order; "#" stands for the number in its name."""
    pattern = re.compile(re.escape(name).replace(r"\#", r"(\d+)"))
    return sorted(int(found[1]) for key in native if (found := pattern.fullmatch(key)))


def is_hub_id(path: str) -> bool:
    """Whether a `model.path` that is nothing on this machine has the form of a Hugging Face id."""
    return bool(_HUB_ID.fullmatch(path)) and not path.endswith(".safetensors")


class Entry(NamedTuple):
    """What a safetensors file's header tells of one tensor; the dtype in the format's own words, such as "F8_E4M3"."""

    dtype: str
    shape: tuple[int, ...]


class Place(NamedTuple):
    """Where a base model lies. `folder` is a diffusers folder; with `checkpoint` set, it only complements that file."""

    folder: Path
    checkpoint: Path | None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. UserError when it is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} should hold a JSON object, but holds a {type(content).__name__}")
    return content


def in_short(error: Exception) -> str:
    """The kind of an error of a library, and what it says first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}{lines and ': ' or ''}{' '.join(lines)[:200]}"


def built(cls: Any, path: Path, told: dict[str, Any] | None = None) -> Any:
    """What diffusers makes of a config: `cls.from_config`.

    Args:
        path: its file.
        told: its entries, where they are not that file's alone.

    Raises:
        UserError: an entry makes no sense.
    """
    told = read_json(path) if told is None else told
    for key, parameter in inspect.signature(cls.__init__).parameters.items():
        # Not all of these are looked at when it is made.
        if parameter.annotation in (int, float) and isinstance(told.get(key), str | list | dict):
            raise UserError(f"{path} says {key} = {told[key]!r}, which should be a number")
    try:
        return cls.from_config(told)
    except Exception as error:  # diffusers checks few entries, and fails in many ways
        if isinstance(error, MemoryError):
            raise
        raise UserError(f"{path} does not describe a {cls.__name__} ({in_short(error)})") from error


def read_header(path: Path) -> Header:
    """Names and shapes of a safetensors file; see `read_entries`."""
    return {name: entry.shape for name, entry in read_entries(path)[0].items()}


def read_entries(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Tensors and metadata of a safetensors file, read from its first bytes; its length is checked against them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= size - 8:
            # The first eight bytes of a safetensors file are its header's length; anything else gives nonsense here.
            raise UserError(f"{path} is not a whole safetensors file ({size} bytes, its header would take {length})")
        try:
            entries = json.loads(file.read(length))
            metadata = entries.pop("__metadata__", None) or {}
            end = 8 + length + max((e["data_offsets"][1] for e in entries.values()), default=0)
            header = {name: Entry(e["dtype"], tuple(e["shape"])) for name, e in entries.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is not a safetensors file (its header cannot be read)") from error
    if end != size:
        raise UserError(f"{path} is damaged: the file has {size} bytes, its header says {end}; download it again")
    return header, metadata


def weight_files(folder: Path, stem: str) -> list[Path]:
    """The safetensors files of one model in a diffusers folder: sharded or not, full precision before fp16 and bf16.

    `stem` is "diffusion_pytorch_model" for diffusers' models and "model" for those of transformers. Returns [] when
    there are no weights at all; raises UserError when shards are missing or when there are only pickles.
    """
    for variant in ("", ".fp16", ".bf16"):
        for name in (f"{stem}.safetensors.index{variant}.json", f"{stem}{variant}.safetensors.index.json"):
            index = folder / name
            if index.is_file():
                names = sorted({Path(n).name for n in read_json(index).get("weight_map", {}).values()})
                missing = [n for n in names if not (folder / n).is_file()]
                if missing:
                    raise UserError(f"{folder} lacks {', '.join(missing)}, which {index.name} names")
                return [folder / n for n in names]
        single = folder / f"{stem}{variant}.safetensors"
        if single.is_file():
            return [single]
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in _PICKLES)
    if pickles:
        raise UserError(
            f"{folder} holds only {pickles[0]}: pickles can run code and are not opened; "
            f"save the model as safetensors ({stem}.safetensors) or choose a revision that has it"
        )
    return []


def variant(files: list[Path]) -> str | None:
    """The `variant` argument with which from_pretrained finds these files ("fp16", "bf16" or None)."""
    return next((v for v in ("fp16", "bf16") if files and f".{v}" in files[0].name), None)


def locate(path: str, components: str, revision: str, *, family: str, parts: Iterable[str]) -> Place:
    """Find what `model.path` names: "demo", a folder, a .safetensors file, or a hub id (downloaded here, if need be).

    Args:
        parts: the subfolders that are needed of a hub repository.
    """
    if path == "demo":
        bundled = Path(__file__).parent.parent / "demo" / "base"
        if not (bundled / family / "model_index.json").is_file():
            have = sorted(p.parent.name for p in bundled.glob("*/model_index.json"))
            raise UserError(f"there is no demo base for {family!r}; bundled are: {', '.join(have) or 'none'}")
        return Place(bundled / family, None)

    local = Path(os.path.expanduser(path))  # Path's own way raises where there is no such user
    if local.is_dir():
        return Place(local, None)
    if local.is_file():
        check_kind(path)
        if not components:
            raise UserError(
                f"model.path = {path!r} is a single file, which holds no tokenizer and no configuration: set "
                f"model.components to a diffusers folder of a {family} model (it needs no denoiser weights)"
            )
        folder = Path(os.path.expanduser(components))
        if not folder.is_dir():
            raise UserError(f"model.components = {components!r} is not a folder")
        return Place(folder, local)
    if is_hub_id(path):
        return Place(download(path, revision, parts), None)
    raise UserError(
        f"model.path = {path!r} does not exist; give a diffusers folder, a .safetensors file, "
        "a Hugging Face id such as 'name/model', or 'demo'"
    )


def check_kind(path: str) -> None:
    """That this single file is of a kind that is opened. Raises UserError."""
    suffix = Path(path).suffix
    if suffix == ".gguf":
        raise UserError(
            f"model.path = {path!r}: GGUF is a format for drawing, and its few bits are not read; give the same "
            "model in bf16, fp16 or fp8 as a .safetensors file or a diffusers folder"
        )
    if suffix != ".safetensors":
        raise UserError(f"model.path = {path!r}: only .safetensors checkpoints are opened (pickles can run code)")


def download(repo: str, revision: str, parts: Iterable[str]) -> Path:
    """The local snapshot of a hub repository with just the needed files.

    HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE work as everywhere.

    Raises:
        UserError: not reachable, not allowed or not there; names the id and what to do.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    parts = list(parts)
    allowed = ["model_index.json", "modular_model_index.json"]
    for part in parts:
        allowed += [f"{part}/*.{suffix}" for suffix in ("json", "txt", "jinja", "model", "safetensors")]
    try:
        # A repository often holds the same weights two or three times: the full ones are asked for first, and a
        # half-precision copy only where a repository has nothing else.
        ignored = ["*.fp16*", "*.bf16*", "*.non_ema*"]
        root = Path(snapshot_download(repo, revision=revision or None, allow_patterns=allowed, ignore_patterns=ignored))
        bare = [p for p in parts if (root / p / "config.json").is_file() and not [*(root / p).glob("*.safetensors")]]
        if bare:
            allowed = [f"{p}/*.safetensors" for p in bare] + [f"{p}/*.index*.json" for p in bare]
            root = Path(snapshot_download(repo, revision=revision or None, allow_patterns=allowed))
    except GatedRepoError as error:
        raise UserError(
            f"model.path = {repo!r}: the hub wants you to accept this model's licence first; "
            f"do so on its page, then `hf auth login`"
        ) from error
    except RevisionNotFoundError as error:
        raise UserError(f"model.revision = {revision!r} does not exist in {repo!r} on the hub") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"model.path = {repo!r} is neither a local path nor a model that the hub shows you; check the spelling, "
            "or log in (`hf auth login`) if it is private"
        ) from error
    except Exception as error:  # no network, offline mode, a full disk: huggingface_hub raises many kinds
        why = next(iter(str(error).splitlines()), "")[:200]
        raise UserError(
            f"model.path = {repo!r} is not on this machine and could not be fetched from the hub "
            f"({type(error).__name__}{why and f': {why}'}); connect, or download it elsewhere and give the folder"
        ) from error
    return root


WORTH_KEEPING = 16 << 20
"""Bytes from which a file's hash is kept between processes; smaller ones are read in no time."""

SETTLED = 2.0
"""Seconds that a file must have lain unchanged before it is read: within one tick of the file system's clock it could
be written again without a sign."""

MOST_KEPT = 200

_Stamp = tuple[int, int, int, int]


def hash_book() -> Path:
    """The file that keeps the hashes of large files: a base of 24 GB takes minutes to read, and seldom changes."""
    default = os.environ.get("LOCALAPPDATA") or "~/.cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or default).expanduser() / "lora_fp8" / "hashes.json"


def _stamp(path: Path) -> _Stamp:
    """What changes when a file does. With the time of its last change of any kind, which no tool sets back."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _read_book(book: Path) -> dict[str, Any]:
    """{path: {"stamp": [...], "sha256": ...}}; empty where there is none, or one that cannot be read."""
    try:
        content = json.loads(book.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # nothing is lost but the time of hashing once more
        return {}
    return content if isinstance(content, dict) else {}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@lru_cache(maxsize=256)
def _file_digest(path: Path, stamp: _Stamp) -> str:
    """SHA-256 of a file with this stamp: from the book, or by reading it."""
    if stamp[0] < WORTH_KEEPING:
        return _sha256(path)
    book = hash_book()
    kept = _read_book(book).get(str(path))
    if isinstance(kept, dict) and kept.get("stamp") == list(stamp):
        if re.fullmatch(r"[0-9a-f]{64}", str(kept.get("sha256"))):
            return kept["sha256"]
    settled = time.time() - max(stamp[1], stamp[2]) / 1e9 > SETTLED
    sha = _sha256(path)
    if settled and _stamp(path) == stamp:
        content = {key: value for key, value in _read_book(book).items() if key != str(path)}
        content[str(path)] = {"stamp": list(stamp), "sha256": sha}
        try:
            book.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(book, json.dumps(dict([*content.items()][-MOST_KEPT:]), indent=1).encode())
        except OSError as error:
            message = "%s cannot be written (%s): the base model is read once more by each run"
            logging.getLogger(__name__).warning(message, book, error.strerror)
    return sha


def digest(files: Iterable[tuple[str, Path]]) -> str:
    """SHA-256 over the names and contents of files, in the order of their names.

    Each file is read once per process, and a large one not again until it changes (see `hash_book`).
    """
    total = hashlib.sha256()
    for name, path in sorted(files):
        path = path.resolve()
        total.update(f"{name}\0{_file_digest(path, _stamp(path))}\n".encode())
    return total.hexdigest()
