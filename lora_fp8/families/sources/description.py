"""Describe a base model before a weight of it is transferred: what it is, what it needs, what is in the way.

`describe` asks the place where the model is kept (Hugging Face, ModelScope, Civitai): one request for the list of
files, then the configs and tokenizers (a few MB, kept where they belong), and the headers of the weights by range
requests. The answer is remembered; without a connection it takes what was remembered, then what is in the cache, and
then the published sizes of known bases.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...common.json_files import read_json
from ...common.numbers import format_bytes
from ...errors import Message, UserError
from ...run import disk_space
from .._registry import get, list_families
from . import hosts, known_bases, places, remembered, selection
from .headers import Header
from .hosts import Host, NoAnswer
from .reference import Reference, is_here, parse, suggest
from .remembered import Answer, RemoteFile

__all__ = ["BaseDescription", "BaseFile", "Gate", "Header", "Licence", "describe"]


class BaseFile(NamedTuple):
    """A file that training needs.

    Attributes:
        path: its place in the repository, such as "vae/config.json".
        size: in bytes.
        sha256: of its content; None if the place does not state it.
        local: where it is on this machine, complete; None if it must be transferred.
    """

    path: str
    size: int
    sha256: str | None
    local: Path | None


class Licence(NamedTuple):
    """The licence of a model; `name` is the identifier that the hub gives, `link` the address of its text, or ""."""

    name: str
    link: str = ""


class Gate(NamedTuple):
    """The gate of a model whose licence must be accepted first.

    Attributes:
        link: the page on which it is accepted.
        has_token: a token of the hub is on this machine.
        is_open: the token's account has accepted it; None if it is not known.
    """

    link: str
    has_token: bool
    is_open: bool | None


Origin = Literal["local", "asked", "remembered", "published", "unknown"]
"""How something is known: from the files of this machine, from the hub now, from an earlier answer of the hub, from the
published sizes of a known base, or not at all."""


@dataclass(frozen=True)
class BaseDescription:
    """What is known of a base model without its weights.

    Attributes:
        reference: what was described.
        revision: the commit; "" where there is none.
        branch: the branch, tag or commit that was asked for; "" for the default.
        family: the architecture by its files; "" if they do not tell.
        files: the files that training needs, configs and tokenizers too.
        folder: where the files are put, and where those that are here already are; None if that is not known.
        headers: path in the repository -> header, of the weights that are not on this machine.
        licence: None if the model states none.
        gate: None for an open model.
        free_bytes: free space on the disk of `folder`; None if unknown.
        origin: how all of this is known.
        problems: why training cannot start with it, one sentence each.
        notes: what else a person should know, one sentence each.
        unanswered: why the host could not be asked, if nothing else tells of the base either; "" if it could.
    """

    reference: Reference
    revision: str = ""
    branch: str = field(default="", kw_only=True)
    family: str = ""
    files: tuple[BaseFile, ...] = ()
    folder: Path | None = None
    headers: Mapping[str, Header] = field(default_factory=dict)
    licence: Licence | None = None
    gate: Gate | None = None
    free_bytes: int | None = None
    origin: Origin = "unknown"
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unanswered: str = ""

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all files that training needs."""
        return sum(file.size for file in self.files)

    @property
    def missing(self) -> list[BaseFile]:
        """Return the files that must still be transferred."""
        return [file for file in self.files if file.local is None]

    @property
    def missing_bytes(self) -> int:
        """Return the bytes that must still be transferred."""
        return sum(file.size for file in self.missing)

    @property
    def lines(self) -> list[str]:
        """Return what a person should know of a base that is not a local path: one line each."""
        lines: list[str] = []
        if self.missing and self.free_bytes is not None:
            lines.append(
                Message(
                    "download: {missing} of {total} missing; {free} are free on that disk",
                    missing=format_bytes(self.missing_bytes),
                    total=format_bytes(self.total_bytes),
                    free=format_bytes(self.free_bytes),
                )
            )
        if self.licence and self.licence.name and self.missing:
            if self.licence.link:
                lines.append(Message("licence: {name}, {link}", name=self.licence.name, link=self.licence.link))
            else:
                lines.append(Message("licence: {name}", name=self.licence.name))
        return [*lines, *self.notes]


def describe(path: str, revision: str = "", family: str = "") -> BaseDescription:
    """Describe the base model that `model.path` names. Nothing large is transferred.

    Args:
        path: `model.path`.
        revision: `model.revision`.
        family: `model.family`, to compare with; "" compares nothing.

    Returns:
        The description; nothing is raised for a wrong base.
    """
    try:
        reference = parse(path)
    except UserError as error:
        return BaseDescription(Reference("path", path), problems=_list_problems(error))
    if reference.kind == "demo" or (reference.kind == "path" or is_here(reference)):
        return _describe_local(reference)
    host = hosts.make_host(reference, revision)
    try:
        answer, origin, notes = _ask(host)
        description = _describe_answer(host, answer, origin, family)
    except UserError as error:
        return BaseDescription(reference, problems=_list_problems(error))
    except NoAnswer as error:
        return _describe_unasked(host, family, str(error))
    return _with_disk(dataclasses.replace(description, notes=(*notes, *description.notes)))


def count_files(path: str, family: str) -> tuple[int, int] | None:
    """Count a base's files by what this machine knows of it; no host is asked.

    Args:
        path: `model.path` of a repository on a hub.
        family: its architecture.

    Returns:
        Bytes of the files that training needs, and of those that are not here; None if its host was never asked and
        the cache has no complete copy.
    """
    host = hosts.make_host(parse(path))
    if (answer := remembered.read(_find_memory_file(host))) is not None:
        chosen = selection.select(answer.files, get(family), path)
        files = (*chosen.small, *chosen.weights)
        missing = sum(file.size for file in files if host.find(answer.revision, file) is None)
        return sum(file.size for file in files), missing
    if isinstance(host, hosts.HuggingFace) and (commit := host.find_commit()):
        if cached := _select_cached(host.get_folder(commit), family, path):
            return sum(file.size for file in (*cached.small, *cached.weights)), 0
    return None


def describe_files(
    reference: Reference, revision: str, choose: Callable[[Collection[str]], Collection[str]]
) -> BaseDescription:
    """Describe some files of a repository that is no base model, such as a captioning model. Nothing is transferred.

    Without a connection, what was remembered of the repository is used, and then what is in the cache.

    Args:
        reference: the repository.
        revision: branch, tag or commit; "" for the default.
        choose: returns the wanted files, given the paths of all files in the repository; may raise UserError.

    Raises:
        UserError: there is no such repository, or it is not accessible.
        NoAnswer: its host cannot be asked now, and nothing of it is on this machine.
    """
    host = hosts.make_host(reference, revision)
    try:
        answer, origin, _ = _ask(host)
    except NoAnswer:
        commit = host.find_commit() if isinstance(host, hosts.HuggingFace) else ""
        if not commit:
            raise
        answer, origin = Answer(commit, tuple(_list_files(host.get_folder(commit)))), "local"
    if answer.gated and origin == "asked" and not host.may_read():
        raise UserError(host.describe_gate())
    wanted = set(choose([file.path for file in answer.files]))
    chosen = [file for file in answer.files if file.path in wanted]
    if isinstance(host, hosts.HuggingFace):
        host.link(answer.revision, chosen)
    if origin == "asked":
        remembered.write(_find_memory_file(host), answer)
    files = tuple(BaseFile(*file, host.find(answer.revision, file)) for file in chosen)
    folder = host.get_folder(answer.revision)
    return BaseDescription(reference, answer.revision, branch=host.revision, files=files, folder=folder, origin=origin)


def _list_files(folder: Path) -> Iterator[RemoteFile]:
    """List the files of a snapshot in the cache."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield RemoteFile(path.relative_to(folder).as_posix(), path.stat().st_size, None)


def fetch_configs(reference: Reference, folders: Iterable[str]) -> Path:
    """Fetch the configs and tokenizers in these folders of a repository, and no weights. Returns the local folder.

    Without a connection, what was fetched before is used.

    Raises:
        UserError: there is no such model, or it is not accessible.
        NoAnswer: its host cannot be asked now, and not all of these files are here.
    """
    host = hosts.make_host(reference)
    answer, origin, _ = _ask(host)
    host.fetch_small(answer.revision, _select_configs(answer, folders))
    if origin == "asked":
        remembered.write(_find_memory_file(host), answer)
    return host.get_folder(answer.revision)


def find_configs(reference: Reference, folders: Iterable[str]) -> Path | None:
    """Return the local folder of configs and tokenizers that were fetched before; None unless all are here."""
    host = hosts.make_host(reference)
    answer = remembered.read(_find_memory_file(host))
    files = _select_configs(answer, folders) if answer else []
    if answer is None or not files or any(host.find(answer.revision, file) is None for file in files):
        return None
    return host.get_folder(answer.revision)


def _select_configs(answer: Answer, folders: Iterable[str]) -> list[RemoteFile]:
    """Select the index of a repository, and the small files in these folders of it."""
    wanted = set(folders)
    return [
        file
        for file in answer.files
        if file.path in selection.INDEXES
        or (os.path.dirname(file.path) in wanted and file.path.endswith(selection.SMALL))
    ]


def _list_problems(error: UserError) -> tuple[str, ...]:
    return tuple(error.problems)


# ---------------------------------------------------------------------------------------------------------------------
# Bases on this machine


def _describe_local(reference: Reference) -> BaseDescription:
    """Describe a folder, a file or the demo base; the family's own checks look into it."""
    path = Path(os.path.expanduser(reference.name))
    if reference.kind == "demo":
        return BaseDescription(reference, origin="local")
    if path.is_dir():
        return BaseDescription(reference, family=find_family(path), folder=path, origin="local")
    if path.is_file():
        file = BaseFile(path.name, path.stat().st_size, None, path)
        return BaseDescription(reference, files=(file,), folder=path.parent, origin="local")
    if meant := suggest(reference):
        problem = Message(
            "model.path = {path} does not exist; did you mean {meant}?", path=repr(path), meant=repr(meant)
        )
    else:
        problem = selection.NOT_HERE(path=repr(reference.name))
    return BaseDescription(reference, problems=(problem,))


def find_family(folder: Path) -> str:
    """Return the family of a diffusers folder by its configs; "" if they do not tell."""
    candidates = find_candidates(folder)
    if len(candidates) > 1:
        candidates = [name for name in candidates if _has_marks(folder, name)]
    return candidates[0] if len(candidates) == 1 else ""


def find_candidates(folder: Path) -> list[str]:
    """Return the families whose pipeline a diffusers folder's index names."""
    pipeline = read_pipeline(folder)
    return [name for name in list_families() if get(name).pipeline_class == pipeline]


def read_pipeline(folder: Path) -> str:
    """Return the pipeline class that a diffusers folder's index names; "" without one."""
    for name in selection.INDEXES:
        if (folder / name).is_file():
            return str(_read_json(folder / name).get("_class_name") or "")
    return ""


def _has_marks(folder: Path, name: str) -> bool:
    """Return True if the configs of denoiser and VAE have what tells this family from its relatives.

    A missing entry has its default, "no" or "none"; a missing config says nothing.
    """
    family = get(name)
    expected = {family.denoiser_name: family.config_marks | {"_class_name": family.denoiser_class}}
    expected["vae"] = family.vae_marks | {"_class_name": family.vae_class}
    for part, marks in expected.items():
        path = folder / part / "config.json"
        config = {"_class_name": marks["_class_name"], **_read_json(path)} if path.is_file() else marks
        if any((config.get(key) or None) != (value or None) for key, value in marks.items()):
            return False
    return True


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = read_json(path)
    except (OSError, ValueError):  # the checks of the family report it
        return {}
    return content if isinstance(content, dict) else {}


# ---------------------------------------------------------------------------------------------------------------------
# Bases elsewhere


def _ask(host: Host) -> tuple[Answer, Origin, tuple[str, ...]]:
    """Ask the host for the files of a base, or take its last answer if it cannot be asked.

    Raises:
        UserError: there is no such model, or it is not accessible.
        NoAnswer: it cannot be asked, and has never been.
    """
    kept = remembered.read(_find_memory_file(host))
    if kept is not None and kept.revision == host.revision:  # the files of a commit never change
        return kept, "remembered", ()
    try:
        answer = host.ask()
    except NoAnswer as error:
        if kept is None:
            raise
        note = Message("{why}; the previous answer is used (commit {commit})", why=error, commit=kept.revision[:12])
        return kept, "remembered", (note,)
    if kept is not None and kept.revision == answer.revision:
        answer = dataclasses.replace(answer, headers=kept.headers)
    return answer, "asked", ()


def _find_memory_file(host: Host) -> Path:
    return remembered.find_file(host.endpoint, host.reference.name, host.revision)


def _describe_answer(host: Host, answer: Answer, origin: Origin, family: str) -> BaseDescription:
    """Describe a base by its host's answer; configs and headers are fetched as far as they are not here."""
    commit, reference = answer.revision, host.reference
    gate = None
    if answer.gated:
        is_open = host.may_read() if origin == "asked" else None
        gate = Gate(host.page, host.has_token(), is_open)
    description = BaseDescription(
        reference,
        commit,
        branch=host.revision,
        folder=host.get_folder(commit),
        licence=Licence(answer.licence, answer.licence_link) if answer.licence else None,
        gate=gate,
        origin=origin,
    )
    is_closed = gate is not None and gate.is_open is False
    recognised, chosen = _select(host, answer, family, is_closed)
    problems = (host.describe_gate(),) if is_closed else chosen.problems
    headers: dict[str, Header] = {}
    if not problems:
        if isinstance(host, hosts.HuggingFace):
            host.link(commit, [*chosen.small, *chosen.weights])
        host.fetch_small(commit, chosen.small)
        absent = [file for file in chosen.weights if host.find(commit, file) is None]
        asked = [file for file in absent if file.path not in answer.headers]
        headers = {**answer.headers, **host.fetch_headers(commit, asked)}
        if origin == "asked":
            for revision in {host.revision, commit}:  # the next job may name the commit
                at = dataclasses.replace(host, revision=revision)
                remembered.write(_find_memory_file(at), dataclasses.replace(answer, headers=headers))
        headers = {file.path: headers[file.path] for file in absent}
    files = tuple(BaseFile(*file, host.find(commit, file)) for file in (*chosen.small, *chosen.weights))
    return dataclasses.replace(description, family=recognised, files=files, headers=headers, problems=tuple(problems))


def _select(host: Host, answer: Answer, family: str, is_closed: bool) -> tuple[str, selection.Selection]:
    """Select the files of a base that training needs, with what is wrong with it.

    Args:
        family: `model.family`, or "".
        is_closed: its files cannot be read, so that its architecture cannot be told.

    Returns:
        The architecture or "", and the files.
    """
    reference = host.reference
    if reference.is_single_file:
        weights = tuple(file for file in answer.files if file.path == (reference.file or file.path))
        if not weights:
            raise UserError(
                Message(
                    "model.path: there is no file {file} in {repo}",
                    file=repr(reference.file),
                    repo=repr(reference.repo),
                )
            )
        return "", selection.Selection((), weights)
    if not any(file.path in selection.INDEXES for file in answer.files):
        return "", selection.Selection(problems=(_describe_no_diffusers(reference, answer),))
    if is_closed:
        known = known_bases.get(reference.repo)
        usual = known.family if known else family
        return usual, selection.select(answer.files, get(usual), reference.name) if usual else selection.Selection()
    recognised, candidates = _recognise(host, answer)
    problem = _find_family_problem(host, answer, recognised or (family if family in candidates else ""), family)
    wanted = recognised or (family if family in candidates else "")
    chosen = selection.select(answer.files, get(wanted), reference.name) if wanted else selection.Selection()
    return recognised, dataclasses.replace(chosen, problems=(*filter(None, [problem]), *chosen.problems))


def _recognise(host: Host, answer: Answer) -> tuple[str, list[str]]:
    """Fetch the configs that tell the architecture. Returns the family or "", and those with the same pipeline."""
    commit = answer.revision
    folder = host.get_folder(commit)
    host.fetch_small(commit, [file for file in answer.files if file.path in selection.INDEXES])
    candidates = find_candidates(folder)
    if len(candidates) > 1:
        paths = {"vae/config.json", *(f"{get(name).denoiser_name}/config.json" for name in candidates)}
        host.fetch_small(commit, [file for file in answer.files if file.path in paths])
    return find_family(folder), candidates


def _find_family_problem(host: Host, answer: Answer, recognised: str, family: str) -> str:
    """Return the problem of a repository of no family here, or of another than the job's; "" if there is none."""
    name = repr(host.reference.name)
    if not recognised:
        pipeline = read_pipeline(host.get_folder(answer.revision)) or "?"
        return Message(
            "model.path = {name} is made for {pipeline}, which this program cannot train", name=name, pipeline=pipeline
        )
    if not family or recognised == family:
        return ""
    return Message(
        "model.path = {name} is {title}, and model.family is {family} ({own}). Set model.family = {other}, or choose "
        "another base",
        name=name,
        title=get(recognised).title,
        family=repr(family),
        own=get(family).title,
        other=repr(recognised),
    )


def _describe_no_diffusers(reference: Reference, answer: Answer) -> str:
    """Return the problem of a repository that is not in diffusers' layout, with what to give instead."""
    name = repr(reference.name)
    if meant := suggest(reference):
        return Message(
            "model.path = {name} is not a diffusers repository (it has no model_index.json); did you mean {meant}?",
            name=name,
            meant=repr(meant),
        )
    if single := selection.list_single_files(answer.files):
        file = dataclasses.replace(reference, file=single[0])
        return Message(
            "model.path = {name} is not a diffusers repository (it has no model_index.json). To use the single file "
            "in it, give {address}",
            name=name,
            address=repr(make_file_address(file)),
        )
    return Message(
        "model.path = {name} is not a diffusers repository (it has no model_index.json). Choose one with that file, "
        "or a single .safetensors file",
        name=name,
    )


def make_file_address(reference: Reference) -> str:
    """Return what `model.path` says for a file of a repository."""
    if reference.kind == "modelscope":
        return f"modelscope:{reference.repo}@{reference.revision or 'master'}/{reference.file}"
    return f"https://huggingface.co/{reference.repo}/resolve/{reference.revision or 'main'}/{reference.file}"


def _describe_unasked(host: Host, family: str, why: str) -> BaseDescription:
    """Describe a base whose host cannot be asked and never was: from the cache, or by published sizes."""
    reference, known = host.reference, known_bases.get(host.reference.repo)
    if isinstance(host, hosts.HuggingFace) and not reference.is_single_file and (commit := host.find_commit()):
        folder = host.get_folder(commit)
        recognised = find_family(folder)
        usual = recognised or family
        if usual and (chosen := _select_cached(folder, usual, reference.name)):
            files = tuple(BaseFile(*file, folder / file.path) for file in (*chosen.small, *chosen.weights))
            return BaseDescription(reference, commit, recognised, files, folder, origin="local")
    notes: tuple[str, ...] = ()
    files = ()
    if known and get(known.family):
        files = tuple(
            BaseFile(f"{part}/*.safetensors", round(size * known_bases.GIGABYTE), None, None)
            for part, size in known.gigabytes.items()
        )
        size = format_bytes(known.total_bytes)
        notes = (
            Message(
                "{title} takes about {size} (from the published sizes, without a connection)",
                title=known.title,
                size=size,
            ),
        )
        if known.gated:
            notes = (*notes, Message("accept its licence first, at {page}", page=host.page))
    problem = Message(
        "model.path = {name} is not on this machine, and cannot be looked up: {why}", name=repr(reference.name), why=why
    )
    if host.endpoint == "https://huggingface.co" and why.startswith("no connection to "):
        problem = Message("{line}. In mainland China, set HF_ENDPOINT=https://hf-mirror.com", line=problem)
    return BaseDescription(
        reference,
        family=known.family if known else "",
        files=files,
        licence=Licence(known.licence, known.licence_link) if known else None,
        gate=Gate(host.page, host.has_token(), None) if known and known.gated else None,
        origin="published" if known else "unknown",
        problems=(problem,),
        notes=notes,
        unanswered=why,
    )


def _select_cached(folder: Path, family: str, name: str) -> selection.Selection | None:
    """Select the files of a snapshot in the cache; None unless every part that has a config has its weights."""
    chosen = selection.select(list(_list_files(folder)), get(family), name)
    if selection.lacks_shards(chosen):
        return None
    weighed = {file.path.rpartition("/")[0] for file in chosen.weights}
    needed = {"vae", get(family).denoiser_name, *(part for part in get(family).text_parts if part.startswith("text_"))}
    return chosen if needed <= weighed else None


def _with_disk(description: BaseDescription) -> BaseDescription:
    """Return the description with the free space on its disk, and with the problem if the download does not fit."""
    if description.folder is None:
        return description
    problem = places.find_disk_problem(description)
    problems = (*description.problems, *filter(None, [problem]))
    free = disk_space.find_free(description.folder)
    return dataclasses.replace(description, free_bytes=free, problems=problems)
