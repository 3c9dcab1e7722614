"""Save and resume: everything a run needs to go on, in one bundle that is whole or absent.

    checkpoints/step-000500/  adapter.safetensors  optimizer.safetensors  state.json
                              manifest.json (SHA-256 of the others)

A bundle is staged in a hidden folder beside its place, every file is written through our own descriptor and fsynced,
the folder is fsynced, renamed into place, and the parent is fsynced: only then is the save acknowledged. A kill or a
power cut at any moment leaves the previous bundle valid. `latest` trusts nothing it has not hashed: it walks from the
newest bundle to the oldest and takes the first whose manifest agrees; if bundles exist and none is whole, that is an
error, never a fresh start.

No pickle: tensors are safetensors, the rest is JSON. The bundle needs no RNG states and no data position: the data
order is a function of (seed, epoch), the position of the step, and every random draw comes from a generator that is
keyed by what it is for.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from .config import Job, UserError
from .run import RunFailure, sync_folder, write_synced

SCHEMA = 1
FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the system says of a disk without room."""
NAME = re.compile(r"step-(\d{6,})$")


@dataclass(frozen=True)
class Checkpoint:
    """One whole bundle, read and verified.

    Attributes:
        adapter: adapter tensors by internal name.
        optimizer: optimizer tensors (moments, masters) by name.
        state: what state.json holds: step, optimizer scalars, fingerprints of config, data and base.
    """

    path: Path
    adapter: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.state["step"]


def save(
    folder: Path, adapter: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any], keep: int
) -> tuple[Path, list[str]]:
    """Write the bundle of `state["step"]`, verify it, then prune to the newest `keep`.

    Where the disk is full, the oldest bundles go before it and not after it, as long as a whole one is left.

    Returns:
        Where it is, and a line for each bundle that went so.

    Raises:
        RunFailure: the disk refused (the newest bundle before it is untouched).
    """
    final = folder / f"step-{state['step']:06d}"
    staged = folder / f".tmp-{final.name}-{os.getpid()}"
    files = {
        "adapter.safetensors": safetensors.torch.save(_plain(adapter)),
        "optimizer.safetensors": safetensors.torch.save(_plain(optimizer)),
        "state.json": json.dumps({"schema": SCHEMA, **state}, indent=1, sort_keys=True).encode(),
    }
    manifest = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    files["manifest.json"] = json.dumps(manifest, indent=1, sort_keys=True).encode()
    gone: list[str] = []
    while True:
        try:
            _write(staged, final, files)
            break
        except OSError as error:
            shutil.rmtree(staged, ignore_errors=True)
            spare = _spare(final) if error.errno in FULL else None
            if spare is not None:
                with contextlib.suppress(OSError):
                    _remove(spare)
                if not spare.exists():
                    gone.append(f"the disk is full: {spare.name} was removed before {final.name} was saved")
                    continue
            free = shutil.disk_usage(folder).free / 2**20 if folder.exists() else 0
            need = sum(map(len, files.values())) / 2**20
            raise RunFailure(
                f"{final}: the checkpoint could not be written ({error.strerror}); it needs {need:.1f} MiB, "
                f"{free:.1f} MiB are free; {_before(final)}"
            ) from None
    if problem := _broken(final):
        raise RunFailure(f"{final}: what was read back is not what was written ({problem}); {_before(final)}")
    try:
        _prune(folder, keep)
    except OSError as error:
        raise RunFailure(f"{final} is saved, but older checkpoints could not be removed ({error.strerror})") from None
    return final, gone


def latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole bundle and a line for each newer one that was passed over. Only reads: a run may be training.

    Raises:
        RunFailure: there are bundles and none is whole.
    """
    skipped: list[str] = []
    candidates = _candidates(folder)
    for path in candidates:
        problem = _broken(path)
        if problem is None:
            return _read(path), skipped
        skipped.append(f"{path.name} passed over: {problem}")
    if candidates:
        raise RunFailure(
            f"{folder}: {len(candidates)} checkpoint(s) and none is whole ({'; '.join(skipped)}); "
            "nothing was overwritten. Restore one from a copy, or remove the folder to start again"
        )
    return None, skipped


def read(path: Path) -> Checkpoint:
    """One named bundle.

    Raises:
        UserError: it is not there.
        RunFailure: it is not whole.
    """
    if not path.is_dir():
        others = ", ".join(p.name for p in reversed(_candidates(path.parent))) or "none"
        raise UserError(f"{path}: no such checkpoint; there are: {others}")
    if problem := _broken(path):
        raise RunFailure(f"{path} is not whole: {problem}")
    return _read(path)


def newest(folder: Path) -> Path | None:
    """The bundle with the highest step, whole or not, or None."""
    return next(iter(_candidates(folder)), None)


def count(folder: Path) -> int:
    """How many bundles there are, whole or not."""
    return len(_candidates(folder))


def step_of(path: Path) -> int:
    """The step of a bundle, by its name."""
    return int(path.name.removeprefix("step-"))


# What a run may not change when it goes on, and what of the rest does not tell how it trains: where things are (a run
# may be moved to another machine with its pictures and its base), and how much is logged.
PINNED = (
    "model.family",
    "quantize.storage",
    "quantize.recipe",
    "quantize.sensitivity",
    "quantize.sensitivity_bound",
    "adapter.type",
    "adapter.rank",
    "adapter.ranks",
    "adapter.factor",
    "adapter.decompose_both",
    "adapter.alpha",
    "adapter.targets",
    "adapter.dtype",
    "adapter.text_encoder",
    "optimizer.name",
    "optimizer.rounding",
    "optimizer.d0",
    "seed",
)
WATCHED = (
    "train.",
    "optimizer.",
    "schedule.",
    "objective.",
    "quantize.",
    "adapter.",
    "dataset.",
    "model.dtype",
    "memory.compile",
)
ASIDE = ("dataset.folders", "dataset.cache_dir", "train.log_every", "adapter.init_from")


def remember(job: Job, base: str, data: str) -> dict[str, Any]:
    """What a bundle keeps of the job, to be held against the job that goes on with it.

    Args:
        base: identity of the base model's files.
        data: fingerprint of the pictures, captions and buckets.
    """
    flat = {
        f"{name}.{key}": value
        for name, section in job.model_dump().items()
        if isinstance(section, dict)
        for key, value in section.items()
    }
    flat["seed"] = job.seed
    settings = {k: v for k, v in flat.items() if k.startswith(WATCHED) and k not in PINNED + ASIDE}
    return {"pinned": {key: flat[key] for key in PINNED}, "settings": settings, "base": base, "data": data}


def compare(before: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What changed between two `remember`s: lines that forbid to go on, and lines to warn with."""
    was = {key: before[group].get(key, _default(key)) for group in ("pinned", "settings") for key in now[group]}
    refused = [f"{key}: was {was[key]}, is {value}" for key, value in now["pinned"].items() if was[key] != value]
    told = [
        f"changed since the checkpoint, applies from now on: {key}: {was[key]} -> {value}"
        for key, value in now["settings"].items()
        if was[key] != value
    ]
    if before.get("base") != now["base"]:
        told.append("the base model's files are not those that the checkpoint was trained on")
    if before["data"] != now["data"]:
        told.append(
            "the pictures, captions or buckets changed since the checkpoint, and the order of samples with them"
        )
    return refused, told


def _default(key: str) -> Any:
    """What a setting was of which a bundle does not tell: the version that saved it had none. None for no setting."""
    section, _, name = key.partition(".")
    model = Job.model_fields[section].annotation
    return model.model_fields[name].default if name in getattr(model, "model_fields", {}) else None


def _candidates(folder: Path) -> list[Path]:
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := NAME.match(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _broken(path: Path) -> str | None:
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        for name in ("adapter.safetensors", "optimizer.safetensors", "state.json"):
            if hashlib.sha256((path / name).read_bytes()).hexdigest() != manifest[name]:
                return f"{name} does not match its hash"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"unreadable ({type(error).__name__})"
    return None


def _before(final: Path) -> str:
    """Words for what is left where this bundle could not be saved."""
    whole = next((path for path in _candidates(final.parent) if path != final and _broken(path) is None), None)
    return f"the newest before it, {whole.name}, is intact" if whole else "nothing was saved before it"


KINDS = {"step": int, "optimizer": dict, "pinned": dict, "settings": dict, "data": str}
"""What is always in a state.json."""
MAY_BE = {"base": str, "compute": str, "moved": list}


def _read(path: Path) -> Checkpoint:
    """A bundle whose hashes agree.

    Raises:
        RunFailure: they are of something else than a checkpoint of this version.
    """
    try:
        state = json.loads((path / "state.json").read_bytes())
    except ValueError as error:
        raise RunFailure(f"{path / 'state.json'} cannot be read as JSON ({error})") from None
    if not isinstance(state, dict):
        raise RunFailure(f"{path / 'state.json'} should hold a JSON object, but holds a {type(state).__name__}")
    if state.get("schema") != SCHEMA:
        raise RunFailure(f"{path}: written by another version (schema {state.get('schema')}, this one reads {SCHEMA})")
    wrong = [key for key, kind in KINDS.items() if type(state.get(key)) is not kind]
    wrong += [key for key, kind in MAY_BE.items() if type(state.get(key, kind())) is not kind]
    if wrong or state["step"] < 0 or not all(isinstance(line, str) for line in state.get("moved", [])):
        what = ", ".join(wrong) or "step or moved"
        raise RunFailure(f"{path / 'state.json'} is not what a checkpoint has, though its hash agrees: {what}")
    tensors = []
    for name in ("adapter.safetensors", "optimizer.safetensors"):
        try:
            tensors.append(safetensors.torch.load((path / name).read_bytes()))
        except safetensors.SafetensorError as error:
            raise RunFailure(f"{path / name} is not a safetensors file ({error})") from None
    return Checkpoint(path, *tensors, state)


def _prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` whole bundles; a broken one never counts as kept."""
    whole = 0
    for path in _candidates(folder):
        if whole >= keep:
            _remove(path)
        elif _broken(path) is None:
            whole += 1


def _write(staged: Path, final: Path, files: dict[str, bytes]) -> None:
    """Files into a hidden folder, and that into its place."""
    final.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()
    for name, data in files.items():
        with write_synced(staged / name) as file:
            file.write(data)
    sync_folder(staged)
    if final.exists():  # a rerun of this step: `latest` would have resumed from it, had it been whole
        shutil.rmtree(final)
    os.rename(staged, final)
    sync_folder(final.parent)


def _spare(final: Path) -> Path | None:
    """The oldest bundle, if a whole one is left without it."""
    others = [path for path in _candidates(final.parent) if path != final]
    *newer, oldest = others or [None]
    return oldest if any(_broken(path) is None for path in newer) else None


def _remove(path: Path) -> None:
    """Remove a bundle. Raises OSError where its name stays."""
    # Renamed first: a kill in the middle of removing leaves a hidden folder, not half a bundle.
    doomed = path.with_name(f".tmp-{path.name}-old")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _plain(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # Cloned: safetensors refuses tensors that share memory, and a bundle must not depend on how they were laid out.
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
