"""Fetch the images and captions of a dataset on Hugging Face, for `lora-fp8 dataset import OWNER/NAME FOLDER`.

    known = describe(parse_dataset("owner/name"))       which files, and how many bytes; nothing is transferred
    folder = fetch(known, report)                       what `data.foreign_datasets` reads
    forget(known)

Of the forms that a dataset has, only one is fetched: tables often have the same images again.
"""

from __future__ import annotations

import fnmatch
import posixpath
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ..data.decoding import EXTENSIONS
from ..data.image_files import METADATA, TARS
from ..errors import Message, UserError, first_few
from ..families.sources import download, hosts
from ..families.sources.description import BaseDescription, BaseFile, Licence
from ..families.sources.reference import Reference
from ..families.sources.remembered import RemoteFile
from ..run import disk_space

TEXTS = (".txt", ".json", ".caption")
"""Endings of captions that lie beside images."""


def describe(reference: Reference, revision: str = "", only: str = "") -> BaseDescription:
    """Ask for the files of a dataset.

    Args:
        reference: the dataset; see `reference.parse_dataset`.
        revision: branch, tag or commit; "" for what the reference names.
        only: pattern that the paths of files must match, such as "data/train-*"; "" takes all.

    Raises:
        UserError: there is no such dataset, it is not accessible, it has no file that can be read, or the hub cannot
            be asked.
    """
    host = hosts.make_host(reference, revision)
    try:
        answer = host.ask()
    except hosts.NoAnswer as error:
        raise UserError(Message("SOURCE = {name}: {line}", name=repr(reference.name), line=error.args[0])) from error
    files = [file for file in answer.files if not only or fnmatch.fnmatchcase(file.path, only)]
    if outside := next((file.path for file in files if not _is_inside(file.path)), ""):
        raise UserError(
            Message(
                "SOURCE = {name}: it lists a file outside the dataset: {path}", name=repr(reference.name), path=outside
            )
        )
    chosen = choose_files(files)
    if not chosen:
        raise UserError(
            Message(
                "SOURCE = {name}: it has no images, tables (.parquet) or shards (.tar) to read; its files: {names}",
                name=repr(reference.name),
                names=first_few([file.path for file in files]),
            )
        )
    folder = host.get_folder(answer.revision)
    known = tuple(BaseFile(*file, host.find(answer.revision, file)) for file in chosen)
    return BaseDescription(
        reference,
        answer.revision,
        branch=revision,
        files=known,
        folder=folder,
        licence=Licence(answer.licence, answer.licence_link) if answer.licence else None,
        free_bytes=disk_space.find_free(folder),
        origin="asked",
    )


def _is_inside(path: str) -> bool:
    plain = PurePosixPath(path)
    return not plain.is_absolute() and ".." not in plain.parts and "\\" not in path and "\0" not in path


def choose_files(files: Sequence[RemoteFile]) -> list[RemoteFile]:
    """Choose the files of one form: a table that names images with them, else tables, else shards, else images."""
    images = [file for file in files if posixpath.splitext(file.path)[1].lower() in EXTENSIONS]
    tables = [file for file in files if posixpath.basename(file.path) in METADATA]
    if tables and images:
        return [*tables, *images]
    for endings in ((".parquet",), TARS):
        if fitting := [file for file in files if file.path.lower().endswith(endings)]:
            return fitting
    stems = {posixpath.splitext(file.path)[0] for file in images}
    texts = [file for file in files if file.path.endswith(TEXTS) and posixpath.splitext(file.path)[0] in stems]
    return [*texts, *images]


def fetch(known: BaseDescription, report: download.Report | None = None) -> Path:
    """Download what is missing, and return the folder.

    Raises:
        UserError, RunFailure, Stopped: as `download.download`.
    """
    download.download(known, report)
    assert known.folder is not None
    return known.folder


def forget(known: BaseDescription) -> None:
    """Delete what was fetched."""
    if known.folder is not None:
        shutil.rmtree(known.folder.parent)
