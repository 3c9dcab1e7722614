"""Completes a base model that comes as a single file: where its VAE, text encoders, configs and tokenizers are.

Each part is taken from the first of these that has it: the file that `model.files` names; the single file itself;
`model.components`, if that is a folder or a repository on Hugging Face or ModelScope. With `components = "auto"`, parts
that are still missing are searched in the folders of ComfyUI around the single file, by their headers, and a folder of
configs and tokenizers is put together in the user's cache. Its configs are those that were published (`_published`),
with the sizes that the headers state; families without published configs get them from the repository of the released
model (`_hub_parts`), together with the tokenizers. That takes a few MB once, and no weights.

The folder's name is the hash of its content, so that a folder, once written, never changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import settings
from ..common.writing import sync_files, sync_folders
from ..errors import Message, UserError, UserErrors, combine, first_few, reason
from . import _files, _hub_parts, _part_files
from ._files import Header
from .sources import WEIGHT_ENDINGS, BaseDescription, describe, parse
from .sources.selection import STEMS, list_parts

if TYPE_CHECKING:
    from .base import ModelFamily

AUTO = "auto"
DENOISER_FOLDERS = ("diffusion_models", "unet", "checkpoints", "diffusion_model", "Stable-diffusion")
"""Folders of ComfyUI, and of A1111, that hold denoisers or whole models."""
PART_FOLDERS = {"vae": ("vae", "VAE"), "text": ("text_encoders", "clip", "text_encoder")}
"""Folders beside them that hold the parts."""
_SMALL = (".json", ".txt", ".jinja", ".model")


class Parts(NamedTuple):
    """Where all parts of a base model are.

    Attributes:
        folder: a diffusers folder, for what is in neither `checkpoint` nor `files`.
        checkpoint: the single file with the denoiser, if there is one.
        files: part -> file of its weights.
        notes: sentences about files that were found without being named.
        absent: weight files that are not downloaded yet.
        bases: the descriptions of what is on a hub: the base model, and the repository in `model.components`.
    """

    folder: Path
    checkpoint: Path | None
    files: dict[str, Path]
    notes: list[str]
    absent: _files.Absentees = {}
    bases: tuple[BaseDescription, ...] = ()


def find(family: type[ModelFamily], model: settings.Model, base: BaseDescription | None = None) -> Parts:
    """Find all parts of the base model that a job names. Reads headers and configs only.

    Raises:
        UserErrors: files that do not exist or are of another kind; parts of which there are none or several files.
    """
    place = _files.locate(model.path, model.revision or "", family=family.name, base=base)
    named = _check_named_files(family, model.files)
    on_hub = place.absent, (place.base,) if place.base else ()
    if place.checkpoint is None:
        return Parts(place.folder, None, named, [], *on_hub)
    header = _files.read_header(place.checkpoint, place.absent)
    if not _is_of(family, header):
        return Parts(place.checkpoint.parent, place.checkpoint, named, [], *on_hub)  # refused by `check_architecture`
    inside = {
        part: prefix for part in list_weight_parts(family) if (prefix := find_prefix(family, part, header)) is not None
    }
    missing = [part for part in list_weight_parts(family) if part not in inside and part not in named]
    if model.components not in (AUTO, ""):
        folder, components = _find_given_folder(family, model.components, missing)
        absent = _files.list_absent(components) if components else {}
        bases = (*on_hub[1], *([components] if components else []))
        return Parts(folder, place.checkpoint, named, [], {**place.absent, **absent}, bases)
    beside = _find_files_beside(family, place.checkpoint, header, missing)
    sources = {part: _files.read_header(path) for part, path in (named | beside).items()}
    sources |= {part: _part_files.select_below(header, prefix) for part, prefix in inside.items() if part not in named}
    notes: list[str] = []
    if beside:
        taken = ", ".join(f"{part} = {path}" for part, path in sorted(beside.items()))
        notes.append(
            Message("these components were found beside {file}: {parts}", file=place.checkpoint.name, parts=taken)
        )
    is_from_modelscope = bool(place.base and place.base.reference.kind == "modelscope")
    folder = _assemble_folder(family, header, sources, is_from_modelscope)
    return Parts(folder, place.checkpoint, named | beside, notes, *on_hub)


def list_weight_parts(family: type[ModelFamily]) -> list[str]:
    """Return the names of the parts that have weights, beside the denoiser."""
    return ["vae", *(name for name in family.text_parts if not is_tokenizer(name))]


def is_tokenizer(name: str) -> bool:
    """Return True if a part of `text_parts` has no weights: a tokenizer, or the processor of images."""
    return "tokenizer" in name or name == "processor"


def get_part_class(family: type[ModelFamily], part: str) -> str:
    """Return the class name of a part with weights."""
    return family.vae_class if part == "vae" else family.text_parts[part].rpartition(".")[2]


def find_prefix(family: type[ModelFamily], part: str, header: Header) -> str | None:
    """Return the prefix of a part's tensors in a single-file checkpoint, None if it does not hold the part."""
    if part == "vae":
        return _part_files.find_vae_prefix(header)
    prefixes = family.checkpoint_text.get(part, ())
    prefixes = (prefixes,) if isinstance(prefixes, str) else prefixes
    return next((prefix for prefix in prefixes if any(name.startswith(prefix) for name in header)), None)


def _is_of(family: type[ModelFamily], header: Header) -> bool:
    from . import get

    relative = get(family.same_tensors_as) if family.same_tensors_as else family
    return family.recognises(header) or relative.recognises(header)


def _check_named_files(family: type[ModelFamily], files: Mapping[str, str]) -> dict[str, Path]:
    """Return the files of `model.files`, each checked to hold its part."""
    problems: list[str] = []
    checked: dict[str, Path] = {}
    for part, name in files.items():
        path = Path(os.path.expanduser(name))
        where = f"model.files.{part}"
        if part not in list_weight_parts(family):
            names = ", ".join(f"{known} ({get_part_class(family, known)})" for known in list_weight_parts(family))
            problems.append(
                Message(
                    "{key}: {title} has no such component; its components are {names}",
                    key=where,
                    title=family.title,
                    names=names,
                )
            )
        elif not path.is_file():
            problems.append(Message("{key}: {path} is not a file", key=where, path=repr(name)))
        else:
            try:
                _files.check_kind(name, where)
                problems += _find_unlike_problem(family, part, path, where)
                checked[part] = path
            except UserError as error:
                problems += error.problems
    if problems:
        raise combine(problems)
    return checked


def _find_unlike_problem(family: type[ModelFamily], part: str, path: Path, where: str) -> list[str]:
    """Return the problem of a file that does not hold a part of this class, if a header can tell."""
    kind = get_part_class(family, part)
    if kind not in _part_files.list_readable() or _part_files.read_config(
        kind, _strip_prefix(part, _files.read_header(path))
    ):
        return []
    return [Message("{key}: the header of {path} is not that of a {kind}", key=where, path=path, kind=kind)]


def _strip_prefix(part: str, header: Header) -> Header:
    """Return a part's file without the prefix that some programs give its tensors."""
    prefix = _part_files.find_vae_prefix(header) if part == "vae" else None
    return _part_files.select_below(header, prefix) if prefix else header


def _find_given_folder(
    family: type[ModelFamily], components: str, missing: list[str]
) -> tuple[Path, BaseDescription | None]:
    """Return the folder that `model.components` names, and the weights that are still to be downloaded into it.

    Of a repository, configs and tokenizers are fetched, and the weights of the missing parts described.
    """
    folder = Path(os.path.expanduser(components))
    if folder.is_dir():
        return folder, None
    if _is_repository(components):
        folder = _hub_parts.fetch_given(components, list_parts(family))
        bare = tuple(f"{part}/" for part in missing if not _has_weights(folder / part))
        if not bare:
            return folder, None
        base = describe(components)
        if base.problems:
            raise UserErrors(base.problems, f"model.components = {components!r}")
        files = tuple(file for file in base.files if file.path.startswith(bare))
        return base.folder or folder, replace(base, files=files)
    raise UserError(
        Message(
            "model.components = {path} is not a folder; give a diffusers folder, a Hugging Face id such as "
            "{example}, modelscope:owner/name, or 'auto'",
            path=repr(components),
            example=repr(family.example_base),
        )
    )


def _is_repository(components: str) -> bool:
    """Return True if this names a whole repository, and no file or page of one model."""
    try:
        reference = parse(components)
    except UserError:
        return False
    return reference.kind in ("hub", "modelscope") and not reference.is_single_file


def _has_weights(folder: Path) -> bool:
    try:
        return any(_files.find_weight_files(folder, stem) for stem in STEMS)
    except UserError:  # shards are missing
        return False


# -- ComfyUI's folders -------------------------------------------------------------------------------------------------
def _find_files_beside(
    family: type[ModelFamily], checkpoint: Path, header: Header, missing: list[str]
) -> dict[str, Path]:
    """Return the files of the missing parts in the folders of ComfyUI around a file.

    Raises:
        UserErrors: parts of which there is no file, or several.
    """
    root = next((parent.parent for parent in checkpoint.absolute().parents if parent.name in DENOISER_FOLDERS), None)
    files: dict[str, Path] = {}
    problems: list[str] = []
    unfound: list[str] = []
    for part in missing:
        candidates = _find_candidates(family, part, root, checkpoint, header) if root else []
        if len(candidates) == 1:
            files[part] = candidates[0]
        elif candidates:
            problems.append(
                Message(
                    "model.files.{part}: several files beside {file} could be this component: {names}. Name one of "
                    "them",
                    part=part,
                    file=checkpoint.name,
                    names=", ".join(map(str, candidates)),
                )
            )
        else:
            unfound.append(part)
    if unfound:
        problems.insert(
            0,
            Message(
                "{path} has no {parts}. Name their files in [model.files], put them into ComfyUI's folders beside "
                "it, or set model.components to a diffusers folder or a Hugging Face id such as {example}",
                path=checkpoint,
                parts=", ".join(f"{part} ({get_part_class(family, part)})" for part in unfound),
                example=repr(family.example_base),
            ),
        )
    if problems:
        raise combine(problems)
    return files


def _find_candidates(family: type[ModelFamily], part: str, root: Path, checkpoint: Path, header: Header) -> list[Path]:
    """Return the files that can be this part by their headers; where several can, those whose names fit better."""
    folders = PART_FOLDERS["vae" if part == "vae" else "text"]
    inside = [path for name in folders if (root / name).is_dir() for path in (root / name).rglob("*")]
    paths = [path for path in inside if path.suffix in WEIGHT_ENDINGS]
    denoiser = dict(family.reference_config)
    denoiser |= family.infer_denoiser_sizes(_files.make_native_header(header), denoiser, checkpoint)
    by_target: dict[Path, Path] = {}
    for path in sorted(paths):
        if path.is_file() and path.resolve() not in by_target and _can_be(family, part, path, denoiser):
            by_target[path.resolve()] = path
    candidates = list(by_target.values())
    pattern = family.file_names.get(part)
    called = [path for path in candidates if pattern and re.search(pattern, path.name, re.IGNORECASE)]
    return called if len(candidates) > 1 and called else candidates


def _can_be(family: type[ModelFamily], part: str, path: Path, denoiser: Mapping[str, Any]) -> bool:
    """Return True if a file holds this part, in the sizes that the denoiser needs."""
    try:
        entries = _part_files.read_config(get_part_class(family, part), _strip_prefix(part, _files.read_header(path)))
    except (UserError, OSError):  # no file for this job; one that is named is reported
        return False
    if entries is None:
        return False
    if part == "vae":
        channels = entries.get("latent_channels") or entries.get("z_dim")
        return not channels or family.count_latent_channels(denoiser) in (None, channels)
    widths = []
    for taken, sum_of_widths in family.text_widths.items():
        times, _, given = sum_of_widths.rpartition(" * ")
        if "+" not in sum_of_widths and given.startswith(f"{part}.") and taken in denoiser:
            widths.append((denoiser[taken], int(times or 1) * entries.get(given.rpartition(".")[2], 0)))
    if widths:
        return all(taken == given for taken, given in widths)
    published = family.published.get(part, {})
    return all(published.get(key, entries[key]) == entries[key] for key in ("hidden_size", "d_model") if key in entries)


# -- configs and tokenizers --------------------------------------------------------------------------------------------
def _assemble_folder(
    family: type[ModelFamily], header: Header, sources: Mapping[str, Header], is_from_modelscope: bool
) -> Path:
    """Return a folder with the configs and tokenizers of a model without weights; written if it is not there.

    Args:
        family: of the model.
        header: of the single file.
        sources: part -> header of its weights.
        is_from_modelscope: the single file comes from ModelScope, so that what it lacks is looked for there first.
    """
    published = family.choose_published_parts(_files.make_native_header(header))
    configs: dict[str, dict[str, Any]] = {}
    copied: dict[str, Path] = {}
    wanted = ["scheduler", *list_weight_parts(family)]
    fetched = None
    if not all(part in published for part in wanted):
        folders = list_parts(family)
        fetched = _hub_parts.fetch_released(family.example_base, folders, prefers_modelscope=is_from_modelscope)
    if fetched:
        configs[family.index_name] = _files.read_json(fetched / family.index_name)
        denoiser = fetched / family.denoiser_name / "config.json"
        if denoiser.is_file():
            configs[f"{family.denoiser_name}/config.json"] = _files.read_json(denoiser)
    else:
        configs[family.index_name] = {"_class_name": family.pipeline_class, **published.get("index", {})}
    for part in wanted:
        name = f"{part}/{'scheduler_config' if part == 'scheduler' else 'config'}.json"
        config = dict(published[part]) if part in published else _files.read_json(fetched / name)  # type: ignore[operator]
        if part in sources:
            entries = _part_files.read_config(get_part_class(family, part), _strip_prefix(part, sources[part]))
            config = _part_files.with_stated(config, entries or {})
        configs[name] = config
    for part in family.text_parts:
        if is_tokenizer(part):
            folder = fetched / part if fetched else _find_tokenizer(family, part, is_from_modelscope)
            copied |= {f"{part}/{path.name}": path for path in sorted(folder.iterdir()) if path.suffix in _SMALL}
    return write_configs(family.name, configs, copied)


def write_configs(family: str, configs: Mapping[str, Any], copied: Mapping[str, Path]) -> Path:
    """Write a folder of configs into the user's cache, or return the one with this content that is there.

    Args:
        family: its name, which the folder's name begins with.
        configs: path in the folder -> content.
        copied: path in the folder -> file to copy.
    """
    texts = {name: json.dumps(config, indent=2, sort_keys=True) for name, config in configs.items()}
    digest = hashlib.sha256(json.dumps([texts, _files.compute_digest(copied.items())]).encode()).hexdigest()
    folder = _files.hash_book().parent / "components" / f"{family}-{digest[:16]}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            made = Path(temporary) / "made"
            for name, text in texts.items():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                (made / name).write_text(text, encoding="utf-8")
            for name, path in copied.items():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, made / name)
            # A folder that is there is never written again: a power loss must not leave empty files in it.
            sync_files([made / name for name in (*texts, *copied)])
            sync_folders(made)
            try:
                made.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process wrote the same
                    raise
    except OSError as error:
        raise UserError(Message("{path} cannot be written ({why})", path=folder.parent, why=reason(error))) from error
    return folder


def _find_tokenizer(family: type[ModelFamily], part: str, is_from_modelscope: bool) -> Path:
    """Return the folder of a tokenizer: from this machine, or downloaded.

    Raises:
        UserError: none of the repositories that have it is in the cache or can be reached.
    """
    places = [(family.example_base, part), *(_place(source) for source in family.tokenizers_from.get(part, ()))]
    for repo, folder in places:
        if cached := _hub_parts.find_cached(repo, folder):
            return cached
    problems = []
    for repo, folder in places[1:] + places[:1]:  # the released model itself may be gated
        try:
            root = _hub_parts.fetch_released(repo, [folder], prefers_modelscope=is_from_modelscope)
        except UserError as error:
            problems.append(str(error))
            continue
        if any((root / folder).glob("*")):
            return root / folder
        problems.append(Message("{repo} has no {folder}/", repo=repo, folder=folder))
    raise UserError(
        Message(
            "the {part} of {title} (a few MB) is not on this machine and could not be downloaded: {why}. Connect "
            "once, or set model.components to a diffusers folder of {title}",
            part=part,
            title=family.title,
            why=first_few(problems),
        )
    )


def _place(text: str) -> tuple[str, str]:
    """Return (repository, folder) of "owner/name/folder"."""
    owner, name, folder = text.split("/", 2)
    return f"{owner}/{name}", folder
