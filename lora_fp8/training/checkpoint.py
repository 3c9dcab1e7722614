"""Checkpoints: saves everything that a run needs to resume, in a folder (bundle) that is complete or absent.

    checkpoints/step-000500/  adapter.safetensors  optimizer.safetensors  state.json
                              manifest.json (SHA-256 of the others)
    checkpoints/best-000350/  the same without optimizer.safetensors: the LoRA with the lowest held-out loss

A bundle is written to a hidden folder beside its final place. Every file is written through our own descriptor and
fsynced, the folder is fsynced and renamed, and the parent is fsynced: only then does the save count. If the process is
killed or the power fails at any moment, the previous bundle stays valid. `read_latest` trusts nothing that it has not
hashed: it goes from the newest bundle to the oldest and takes the first that matches its manifest. If there are bundles
but none is complete, that is an error and never a fresh start.

No pickle: tensors are safetensors, the rest is JSON. A bundle needs no RNG states and no data position: the order of
the data is a function of (seed, epoch), its position follows from the step, and every random draw comes from a
generator keyed by its purpose.
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

from ..common import system
from ..common.json_files import read_json, read_object
from ..common.reading import read_bytes
from ..common.writing import sync_folder, write_synced
from ..errors import Joined, Message, Plural, RunFailure, Template, UserError, reason
from ..run import ownership
from ..settings import TABLES, Job, format_table, parse_lines

SCHEMA = 1
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of the system for a full disk."""
NAME = re.compile(r"step-(\d{6,})$")
BEST = re.compile(r"best-(\d{6,})$")


@dataclass(frozen=True)
class Checkpoint:
    """A complete bundle, read and verified.

    Attributes:
        path: its folder.
        adapter: adapter tensors by internal name.
        optimizer: optimizer tensors (moments, masters) by name; {} of the best LoRA.
        state: content of state.json: step, optimizer scalars, fingerprints of config, data and base.
    """

    path: Path
    adapter: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Return the optimizer steps done when it was saved."""
        return self.state["step"]


def save(
    folder: Path, adapter: dict[str, Tensor], optimizer: dict[str, Tensor], state: dict[str, Any], keep: int
) -> tuple[Path, list[str]]:
    """Write the bundle of `state["step"]`, verify it, then keep only the newest `keep` bundles.

    If the disk is full, the oldest bundles are removed before the save instead of after it, as long as a complete one
    is left.

    Args:
        folder: the run's checkpoint folder.
        adapter, optimizer: tensors by name.
        state: content of state.json.
        keep: number of bundles to keep.

    Returns:
        The bundle's path; and a line for each bundle that was removed because the disk is full, or whose folder stays
        because it holds files of others.

    Raises:
        RunFailure: the disk refused. The newest bundle before it is untouched.
    """
    final = folder / f"step-{state['step']:06d}"
    gone = _save(final, {"adapter.safetensors": adapter, "optimizer.safetensors": optimizer}, state)
    try:
        gone += _prune(folder, keep)
    except OSError as error:
        raise RunFailure(
            Message(
                "{path} is saved, but older checkpoints could not be removed ({why})", path=final, why=reason(error)
            )
        ) from None
    return final, gone


def save_best(folder: Path, adapter: dict[str, Tensor], state: dict[str, Any]) -> tuple[Path, list[str]]:
    """Write the LoRA of `state["step"]` as the best one so far, and verify it. Earlier ones stay: see `prune_best`.

    Args:
        folder: the run's checkpoint folder.
        adapter: tensors by name.
        state: content of state.json.

    Returns:
        The bundle's path; and a line for each checkpoint that was removed because the disk is full.

    Raises:
        RunFailure: the disk refused. Earlier bundles are untouched.
    """
    final = get_best_path(folder, state["step"])
    return final, _save(final, {"adapter.safetensors": adapter}, {"optimizer": {}, **state})


def get_best_path(folder: Path, step: int) -> Path:
    """Return the path of the bundle that `save_best` writes for a step."""
    return folder / f"best-{step:06d}"


def find_path(folder: Path, step: int) -> Path:
    """Return the path of a step's bundle: the checkpoint, or the best LoRA where only that is kept."""
    path, best = folder / f"step-{step:06d}", get_best_path(folder, step)
    return best if best.is_dir() and not path.is_dir() else path


def prune_best(folder: Path, step: int) -> list[str]:
    """Remove the bundles of `save_best` for all steps but this one. Returns lines as `save` does.

    Raises:
        RunFailure: the disk refused.
    """
    lines: list[str] = []
    for path in _list_best(folder):
        if path != get_best_path(folder, step) and not _is_a_remnant(path):
            try:
                lines += _remove(path)
            except OSError as error:
                text = Message("{path}: the checkpoint could not be removed ({why})", path=path, why=reason(error))
                raise RunFailure(text) from None
    return lines


def find_best(folder: Path) -> Path | None:
    """Return the newest complete bundle of `save_best`, or None."""
    return next((path for path in _list_best(folder) if _find_damage(path) is None), None)


def _list_best(folder: Path) -> list[Path]:
    """Return the bundles of `save_best`, the highest step first."""
    paths = [path for path in folder.glob("best-*") if BEST.match(path.name) and not path.is_symlink()]
    return sorted(paths, key=lambda path: -int(path.name.removeprefix("best-")))


def _save(final: Path, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> list[str]:
    """Write a bundle and verify it.

    Args:
        final: its folder.
        tensors: file name -> tensors by name.
        state: content of state.json.

    Returns:
        A line for each older bundle that was removed because the disk is full.

    Raises:
        RunFailure: the disk refused.
    """
    files = {name: safetensors.torch.save(_copy_to_cpu(content)) for name, content in tensors.items()}
    files["state.json"] = json.dumps({"schema": SCHEMA, **state}, indent=1, sort_keys=True).encode()
    manifest = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
    files["manifest.json"] = json.dumps(manifest, indent=1, sort_keys=True).encode()
    gone = _write_or_make_room(final, files)
    if problem := _find_damage(final):
        raise RunFailure(
            Message(
                "{key}: the file differs from what was written ({why}); {line}",
                key=final,
                why=problem,
                line=_describe_remaining(final),
            )
        )
    return gone


def _write_or_make_room(final: Path, files: dict[str, bytes]) -> list[str]:
    """Write a bundle. On a full disk, remove older bundles first, as long as a complete one is left.

    Returns:
        A line for each bundle that was removed.

    Raises:
        RunFailure: the disk refused.
    """
    folder = final.parent
    staged = folder / f".tmp-{final.name}-{os.getpid()}"
    gone: list[str] = []
    while True:
        try:
            _write(staged, final, files)
            return gone
        except OSError as error:
            with contextlib.suppress(OSError):
                ownership.remove_bundle(staged)
            spare = _choose_removable(final) if error.errno in FULL else None
            if spare is not None:
                left: list[str] = []
                with contextlib.suppress(OSError):
                    left = _remove(spare)
                if spare not in _list_bundles(folder):
                    gone.append(
                        Message(
                            "the disk is full: {name} was removed before {step} was saved",
                            name=spare.name,
                            step=final.name,
                        )
                    )
                    gone += left
                    continue
            free = shutil.disk_usage(folder).free / 2**20 if folder.exists() else 0
            need = sum(map(len, files.values())) / 2**20
            raise RunFailure(
                Message(
                    "{key}: the checkpoint could not be written ({why}); it needs {need} MiB, {free} MiB are "
                    "free; {line}",
                    key=final,
                    why=reason(error),
                    need=f"{need:.1f}",
                    free=f"{free:.1f}",
                    line=_describe_remaining(final),
                )
            ) from None


def read_latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest complete bundle, and a line for each newer one that was skipped.

    This only reads, because a run may be training.

    Raises:
        RunFailure: there are bundles, but none is complete.
    """
    skipped: list[str] = []
    candidates = _list_bundles(folder)
    for path in candidates:
        problem = _find_damage(path)
        if problem is None:
            return _read(path), skipped
        skipped.append(Message("{name} was skipped: {line}", name=path.name, line=problem))
    if candidates:
        raise RunFailure(
            Plural(
                "{path}: the only checkpoint ({count}) is incomplete ({why}); nothing was overwritten. Restore it "
                "from a copy, or remove the folder to start again",
                "{path}: all {count} checkpoints are incomplete ({why}); nothing was overwritten. Restore one from "
                "a copy, or remove the folder to start again",
            )(
                path=folder,
                count=len(candidates),
                why=Joined("; ", skipped),
            )
        )
    return None, skipped


def read(path: Path) -> Checkpoint:
    """Read a given bundle.

    Raises:
        UserError: it does not exist.
        RunFailure: it is not complete.
    """
    if not path.is_dir():
        others = ", ".join(p.name for p in reversed(_list_bundles(path.parent))) or Message("none")
        raise UserError(
            Message("{path}: there is no such checkpoint; the checkpoints are: {names}", path=path, names=others)
        )
    if problem := _find_damage(path):
        raise RunFailure(Message("{path} is incomplete: {why}", path=path, why=problem))
    return _read(path)


def find_newest(folder: Path) -> Path | None:
    """Return the bundle with the highest step, complete or not, or None."""
    return next(iter(_list_bundles(folder)), None)


def count_bundles(folder: Path) -> int:
    """Return the number of bundles, complete or not."""
    return len(_list_bundles(folder))


def parse_step(path: Path) -> int:
    """Return the step of a bundle, by its name."""
    return int(path.name.removeprefix("step-"))


# PINNED may not change when a run resumes. Of the other settings, those in WATCHED affect training, except for ASIDE:
# paths (a run may move to another machine with its images and its base) and how often it logs.
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
    "adapter.block_size",
    "adapter.decompose_both",
    "adapter.alpha",
    "adapter.rank_stabilized",
    "adapter.init",
    "adapter.freeze_a",
    "adapter.targets",
    "adapter.dtype",
    "adapter.text_encoder",
    "optimizer.name",
    "optimizer.rounding",
    "optimizer.d0",
    "objective.prediction",
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
    "model.text_storage",
    "model.caption_tokens",
    "model.prompt_weights",
    "model.clip_skip",
    "memory.compile",
)
BEFORE = {"quantize.convolutions": "bf16"}
"""What older versions did where there was no setting yet, if it differs from the setting's default now."""
ASIDE = ("dataset.folders", "dataset.cache_dir", "dataset.cache_limit", "train.log_every", "adapter.init_from")


def describe_job(job: Job, base: str, data: str, files: dict[str, str] | None = None) -> dict[str, Any]:
    """Return what a bundle stores of the job, to compare it with the job that resumes.

    Args:
        job: the job.
        base: identity of the base model's files.
        data: fingerprint of the images, captions and buckets.
        files: name in the dataset -> "IMAGE CAPTION", a hash of each.
    """
    flat = {
        f"{name}.{key}": value
        for name, section in job.model_dump().items()
        if isinstance(section, dict)
        for key, value in section.items()
    }
    flat |= {key: format_table(flat[key]) for key in TABLES}  # lists: JSON does not keep the order of a table
    flat["seed"] = job.seed
    settings = {k: v for k, v in flat.items() if k.startswith(WATCHED) and k not in PINNED + ASIDE}
    pinned = {key: flat[key] for key in PINNED}
    return {"pinned": pinned, "settings": settings, "base": base, "data": data, "files": files or {}}


def compare(before: dict[str, Any], now: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Compare two results of `describe_job`: returns lines that forbid to resume, and lines to warn with."""
    was = {
        key: before[group].get(key, _find_former_default(key)) for group in ("pinned", "settings") for key in now[group]
    }
    was |= {key: format_table(parse_lines(was[key])) for key in TABLES if key in was}  # as a user wrote them once
    refused: list[str] = [
        Message("{key}: was {before}, is {now}", key=key, before=was[key], now=value)
        for key, value in now["pinned"].items()
        if was[key] != value
    ]
    warnings: list[str] = [
        Message(
            "changed since the checkpoint and used from now on: {what_changed}",
            what_changed=f"{key}: {was[key]} -> {value}",
        )
        for key, value in now["settings"].items()
        if was[key] != value
    ]
    if before.get("base") != now["base"]:
        warnings.append(Message("the base model or its training adapter differs from the checkpoint's"))
    if before["data"] != now["data"]:
        warnings.append(
            Message(
                "the images, captions or buckets changed since the checkpoint, and with them the order of samples; "
                "from here on, the result is no longer bit-identical to that of an uninterrupted run"
            )
        )
        warnings += describe_changes(before.get("files") or {}, now["files"])
    return refused, warnings


def describe_changes(before: dict[str, str], now: dict[str, str]) -> list[str]:
    """List the files of a dataset that were removed, added or edited: a line per kind, with the first five names.

    Args:
        before, now: as `files` of `describe_job`; {} from an older version, about which nothing is said.
    """
    if not before or not now:
        return []
    images_edited: list[str] = []
    captions_edited: list[str] = []
    for name in before.keys() & now.keys():
        # The beginnings of two hashes: "image caption".
        image_before, _, caption_before = before[name].partition(" ")
        image_now, _, caption_now = now[name].partition(" ")
        if image_before != image_now:
            images_edited.append(name)
        if caption_before != caption_now:
            captions_edited.append(name)
    changes = [
        (Template("removed from the dataset since the checkpoint ({count}): {files}"), before.keys() - now.keys()),
        (Template("added to the dataset since the checkpoint ({count}): {files}"), now.keys() - before.keys()),
        (Template("image edited since the checkpoint ({count}): {files}"), images_edited),
        (Template("caption edited since the checkpoint ({count}): {files}"), captions_edited),
    ]
    # Names start with the number of their folder, which matters only if there are several.
    has_several_folders = {name.partition("/")[0] for name in (*before, *now)} != {"0"}
    lines: list[str] = []
    for template, names in changes:
        if names:
            first = [name if has_several_folders else name.partition("/")[2] for name in sorted(names)[:5]]
            files = ", ".join(first) + (", ..." if len(names) > 5 else "")
            lines.append(template(count=len(names), files=files))
    return lines


def _find_former_default(key: str) -> Any:
    """Return what a setting that older checkpoints did not record was; None if it no longer exists."""
    if key in BEFORE:
        return BEFORE[key]
    section, _, name = key.partition(".")
    fields = getattr(Job.model_fields[section].annotation, "model_fields", {})
    return fields[name].default if name in fields else None


def _list_bundles(folder: Path) -> list[Path]:
    places = (path for path in folder.glob("step-*") if not path.is_symlink() and not _is_a_remnant(path))
    numbered = [(int(match[1]), path) for path in places if (match := NAME.match(path.name))]
    return [path for _, path in sorted(numbered, reverse=True)]


def _is_a_remnant(path: Path) -> bool:
    """Return True if a bundle was removed and only files that others put there are left."""
    try:
        ours, others = ownership.split_bundle(path)
    except OSError:  # reported when the bundle is read
        return False
    return bool(others and not ours)


def _find_damage(path: Path) -> str | None:
    try:
        manifest = read_json(path / "manifest.json")
        for name in (*_list_tensor_files(path), "state.json"):
            if hashlib.sha256(read_bytes(path / name)).hexdigest() != manifest[name]:
                return Message("{name} does not match its hash", name=name)
    except FileNotFoundError as error:
        return Message("{name} is missing", name=Path(error.filename).name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Message("unreadable ({kind})", kind=type(error).__name__)
    return None


def _list_tensor_files(path: Path) -> tuple[str, ...]:
    """Return the names of the safetensors files of a bundle."""
    return ("adapter.safetensors",) if BEST.match(path.name) else ("adapter.safetensors", "optimizer.safetensors")


def _describe_remaining(final: Path) -> str:
    """Return words about the newest complete bundle that is left after a failed save."""
    whole = next((path for path in _list_bundles(final.parent) if path != final and _find_damage(path) is None), None)
    return (
        Message("the previous checkpoint, {name}, is intact", name=whole.name)
        if whole
        else Message("there is no earlier checkpoint")
    )


KINDS = {"step": int, "optimizer": dict, "pinned": dict, "settings": dict, "data": str}
"""Entries that every state.json has, and their types."""
MAY_BE = {"base": str, "compute": str, "moved": list, "files": dict}


def _read(path: Path) -> Checkpoint:
    """Read a bundle whose hashes match.

    Raises:
        RunFailure: the content is not a checkpoint of this version.
    """
    try:
        state = read_object(path / "state.json")
    except ValueError as error:
        raise RunFailure(str(error)) from None
    if state.get("schema") != SCHEMA:
        raise RunFailure(
            Message(
                "{path}: another version wrote this checkpoint (schema {schema}, this version reads {own})",
                path=path,
                schema=state.get("schema"),
                own=SCHEMA,
            )
        )
    wrong = [key for key, kind in KINDS.items() if type(state.get(key)) is not kind]
    wrong += [key for key, kind in MAY_BE.items() if type(state.get(key, kind())) is not kind]
    wrong += [] if wrong or all(isinstance(digest, str) for digest in state.get("files", {}).values()) else ["files"]
    if wrong or state["step"] < 0 or not all(isinstance(line, str) for line in state.get("moved", [])):
        what = ", ".join(wrong) or Message("step or moved")
        raise RunFailure(
            Message(
                "{path} does not have the contents of a checkpoint, although its hash matches: {names}",
                path=path / "state.json",
                names=what,
            )
        )
    tensors: list[dict[str, Tensor]] = []
    for name in _list_tensor_files(path):
        try:
            tensors.append(safetensors.torch.load(read_bytes(path / name)))
        except safetensors.SafetensorError as error:
            raise RunFailure(Message("{path} is not a safetensors file ({why})", path=path / name, why=error)) from None
    adapter, *optimizer = tensors
    return Checkpoint(path, adapter, optimizer[0] if optimizer else {}, state)


def _prune(folder: Path, keep: int) -> list[str]:
    """Remove all but the newest `keep` complete bundles; broken ones do not count. Returns lines as `_remove` does."""
    whole, lines = 0, []
    for path in _list_bundles(folder):
        if whole >= keep:
            lines += _remove(path)
        elif _find_damage(path) is None:
            whole += 1
    return lines


def _write(staged: Path, final: Path, files: dict[str, bytes]) -> None:
    """Write files to a hidden folder, and rename it to its final place."""
    final.parent.mkdir(parents=True, exist_ok=True)
    ownership.remove_bundle(staged)
    staged.mkdir(exist_ok=True)
    for name, data in files.items():
        with write_synced(staged / name) as file:
            file.write(data)
    sync_folder(staged)
    # The same step is saved again: `read_latest` would have resumed from this bundle if it were complete.
    if ownership.remove_bundle(final):
        # Others put files there, so ours are moved in one by one; the manifest comes last and completes the bundle.
        for name in files:
            system.replace(staged / name, final / name)
        sync_folder(final)
        staged.rmdir()
    else:
        system.rename(staged, final)
    sync_folder(final.parent)


def _choose_removable(final: Path) -> Path | None:
    """Return the oldest bundle if a complete one is left without it, else None."""
    others = [path for path in _list_bundles(final.parent) if path != final]
    if not others:
        return None
    *newer, oldest = others
    return oldest if any(_find_damage(path) is None for path in newer) else None


def _remove(path: Path) -> list[str]:
    """Remove the files of a bundle that we wrote. Returns a line if there are others, which stay.

    Raises:
        OSError: the bundle stays.
    """
    # Renamed first: if the process is killed while removing, a hidden folder is left and not half a bundle.
    doomed = path.with_name(f".tmp-{path.name}-old")
    with contextlib.suppress(OSError):
        ownership.remove_bundle(doomed)
    if ownership.split_bundle(path)[1] or doomed.exists():
        left = ownership.format_entries(others) if (others := ownership.remove_bundle(path)) else ""
        return (
            [
                Message(
                    "{name} was removed, except for files that this program did not write ({entries})",
                    name=path.name,
                    entries=left,
                )
            ]
            if left
            else []
        )
    system.rename(path, doomed)
    with contextlib.suppress(OSError):
        ownership.remove_bundle(doomed)
    return []


def _copy_to_cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # Cloned, because safetensors refuses tensors that share memory, and the bundle's bytes must not depend on layout.
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
