"""Parse what a person gives as `model.path`: an id, an address copied from a browser, a path, or "demo".

    parse("https://huggingface.co/owner/name/tree/main")   Reference("hub", "owner/name", repo="owner/name")

Parsing looks at the text only, never at the disk or a network. `Reference.name` is the normal form, which the config
keeps, so that the rest of the program sees one spelling.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qs, unquote, urlsplit

from ...errors import Message, UserError
from . import known_bases

Kind = Literal["demo", "path", "hub", "modelscope", "civitai", "dataset"]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
"""Matches the id of a repository, on Hugging Face and on ModelScope."""
HUB = "https://huggingface.co"
"""Address of Hugging Face. References keep it, whatever HF_ENDPOINT says: a config must not depend on the machine."""
HUB_HOSTS = ("huggingface.co", "hf.co", "hf-mirror.com")
WEIGHT_ENDINGS = (".safetensors", ".sft")
"""Endings of safetensors files: Black Forest Labs and fluxgym have the short one."""
FILE_ENDINGS = (*WEIGHT_ENDINGS, ".ckpt", ".pt", ".pth", ".bin", ".gguf")
"""Endings of single-file models; those that are not opened are refused by name, and not taken for ids."""
MODELSCOPE_HOSTS = ("modelscope.cn", "modelscope.ai", "modelscope.com")
CIVITAI_HOSTS = ("civitai.com", "civitai.green", "civitai.red")
_OTHER_REPOSITORIES = ("datasets", "spaces", "collections", "papers", "docs", "blog", "kernels", "buckets")
_QUOTES = "\"'`“”‘’«»<>\u200b\ufeff"


@dataclass(frozen=True)
class Reference:
    """A base model as `model.path` names it.

    Attributes:
        kind: "demo"; "path" for a folder or file of this machine; "hub" (Hugging Face), "modelscope" or "civitai";
            "dataset" for images and captions on Hugging Face, which no base model is.
        name: the normal form, which `model.path` keeps.
        repo: "owner/name" of a repository.
        revision: branch, tag or commit that an address names; "" if it names none.
        file: path of a single file in the repository; "" for the whole repository.
        model: number of a Civitai model; "" if only its version is known.
        version: number of a Civitai version; "" stands for the newest.
        settings: names of the settings that hold the path and the revision, for messages.
    """

    kind: Kind
    name: str
    repo: str = ""
    revision: str = ""
    file: str = ""
    model: str = ""
    version: str = ""
    settings: tuple[str, str] = ("model.path", "model.revision")

    @property
    def is_remote(self) -> bool:
        """Return True if the base is downloaded, unless a local path has the same name."""
        return self.kind in ("hub", "modelscope", "civitai", "dataset")

    @property
    def is_single_file(self) -> bool:
        """Return True if it names one file and no folder. A local path is judged by its ending."""
        return bool(self.file) or self.kind == "civitai" or self.name.lower().endswith(WEIGHT_ENDINGS)


def parse(text: str) -> Reference:
    """Parse a `model.path`.

    Raises:
        UserError: it is an address from which no base model can be taken; says what to give instead.
    """
    given = clean(text)
    if given == "demo":
        return Reference("demo", given)
    if reference := _parse_short(given):
        return reference
    if _find_host(given):
        return _parse_address(given)
    if HUB_ID.fullmatch(given) and not given.lower().endswith(FILE_ENDINGS):
        return Reference("hub", given, repo=given)
    return Reference("path", translate_windows_path(given))


def parse_dataset(text: str) -> Reference | None:
    """Parse the name of a dataset on Hugging Face; None for anything else, such as a path.

    parse_dataset("https://huggingface.co/datasets/owner/name")    Reference("dataset", "owner/name", ...)
    parse_dataset("owner/name@v1")                                 the same, with a revision
    """
    given = clean(text)
    match = re.fullmatch(r"(?:hf|huggingface):(?://)?datasets/(.+)", given)
    parts = match[1].split("/") if match else []
    if not match and _find_host(given):
        address = urlsplit(given if "://" in given else f"https://{given}")
        parts = [unquote(part) for part in address.path.split("/") if part]
        if parts[:1] != ["datasets"]:
            return None
        parts = parts[1:]
    elif not match:
        parts = given.split("/")
    name, _, revision = "/".join(parts[:2]).partition("@")
    if not HUB_ID.fullmatch(name) or (len(parts) > 2 and not (match or _find_host(given))):
        return None
    _, named, _ = _split_rest(parts[2:])
    revision = revision or ("" if named == "main" else named)
    return Reference("dataset", name, repo=name, revision=revision, settings=("SOURCE", "--revision"))


def clean(text: str) -> str:
    """Return what a person gave without quotation marks and white space around it, as copying adds them."""
    given = text.strip()
    while given != (bare := given.strip(_QUOTES).strip()):
        given = bare
    if given.startswith("file://"):
        given = unquote(given.removeprefix("file://"))
        given = given[1:] if re.match(r"/[A-Za-z]:", given) else given
    return given


def suggest(reference: Reference) -> str | None:
    """Return the id of the known base that a misspelt reference probably means; None if none is similar."""
    if reference.kind == "dataset":
        return None
    return known_bases.find_similar(reference.repo or reference.name)


def is_here(reference: Reference) -> bool:
    """Return True if a local folder or file has this name; it takes precedence over a repository of the same name."""
    return os.path.exists(os.path.expanduser(reference.name))


def _parse_short(given: str) -> Reference | None:
    """Parse "hf://owner/name", "modelscope:owner/name[/file]" and "civitai:[MODEL@]VERSION"; None for anything else."""
    if match := re.fullmatch(r"(?:hf|huggingface):(?://)?(.+)", given):
        return _parse_repository("hub", match[1].split("/"), given)
    if match := re.fullmatch(r"(?:modelscope|ms):(?://)?(.+)", given):
        return _parse_repository("modelscope", match[1].split("/"), given)
    if match := re.fullmatch(r"(?:urn:air:.+:)?civitai:(?://)?(?:(\d+)@)?(\d+)", given):
        return Reference("civitai", f"civitai:{match[2]}", model=match[1] or "", version=match[2])
    if re.match(r"(?:urn:air|civitai):", given):
        raise UserError(
            Message(
                "model.path: {given} names no version of a Civitai model. Give civitai:VERSION, or the address of the "
                "model's page",
                given=repr(given),
            )
        )
    return None


def _find_host(given: str) -> str:
    """Return the host of a web address, also of one without "https://"; "" if this is none."""
    if re.match(r"[a-z][a-z0-9+.-]*://", given, re.IGNORECASE):
        return (urlsplit(given).hostname or "?").removeprefix("www.")
    head = given.partition("/")[0].lower().removeprefix("www.")
    return head if head in (*HUB_HOSTS, *MODELSCOPE_HOSTS, *CIVITAI_HOSTS) else ""


def _parse_address(given: str) -> Reference:
    host = _find_host(given)
    address = urlsplit(given if "://" in given else f"https://{given}")
    parts = [unquote(part) for part in address.path.split("/") if part]
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or HUB)
    if host in HUB_HOSTS or (address.netloc and address.netloc == endpoint.netloc):
        return _parse_repository("hub", parts, given)
    if host in MODELSCOPE_HOSTS:
        return _parse_repository("modelscope", parts[1:] if parts[:1] == ["models"] else parts, given)
    if host in CIVITAI_HOSTS:
        return _parse_civitai(parts, parse_qs(address.query), given)
    raise UserError(
        Message(
            "model.path: base models are downloaded from Hugging Face, ModelScope and Civitai only, not from "
            "{given}. Download the file and give its path",
            given=repr(given),
        )
    )


def _parse_repository(kind: Kind, parts: list[str], given: str) -> Reference:
    """Parse what follows the host: owner/name, then for example tree/REVISION or resolve/REVISION/FILE."""
    if kind == "hub" and parts[:1] and parts[0] in _OTHER_REPOSITORIES:
        raise UserError(
            Message(
                "model.path: {given} is not a model on Hugging Face. Give a model's page or id (owner/name)",
                given=repr(given),
            )
        )
    owner_and_name, rest = parts[:2], parts[2:]
    if len(owner_and_name) == 2 and "@" in owner_and_name[1]:
        name, _, revision = owner_and_name[1].partition("@")
        owner_and_name, rest = [owner_and_name[0], name], ["resolve", revision, *rest]
    repo = "/".join(owner_and_name).removesuffix(".git")
    if len(owner_and_name) < 2 or not HUB_ID.fullmatch(repo) or ".." in rest:
        raise UserError(
            Message(
                "model.path: {given} names no model. Give its id, such as {example}",
                given=repr(given),
                example=known_bases.EXAMPLE,
            )
        )
    prefix = "" if kind == "hub" else f"{kind}:"
    place, revision, file = _split_rest(rest)
    if file and not file.lower().endswith(FILE_ENDINGS):
        file = ""  # a folder of the repository, or its README
    if not file:
        # "main" and "master" are what the hubs show when nobody asked for a revision.
        revision = "" if revision in ("main", "master") else revision
        return Reference(kind, f"{prefix}{repo}", repo=repo, revision=revision)
    revision = revision or ("main" if kind == "hub" else "master")
    name = f"{HUB}/{repo}/resolve/{revision}/{file}" if kind == "hub" else f"{prefix}{repo}@{revision}/{file}"
    return Reference(kind, name, repo=repo, revision=revision, file=file)


def _split_rest(rest: list[str]) -> tuple[str, str, str]:
    """Split what follows owner/name into (tree, blob, resolve or "", revision, path of a file)."""
    if rest[:2] == ["file", "view"]:  # ModelScope's pages of files
        return "blob", rest[2] if len(rest) > 2 else "", "/".join(rest[3:])
    if rest[:1] and rest[0] in ("tree", "blob", "resolve", "raw", "commit"):
        number = 4 if rest[1:2] == ["refs"] else 2  # refs/pr/7
        return rest[0], "/".join(rest[1:number]), "/".join(rest[number:])
    return "", "", "/".join(rest)


def _parse_civitai(parts: list[str], query: dict[str, list[str]], given: str) -> Reference:
    version = (query.get("modelVersionId") or [""])[0]
    if parts[:3] == ["api", "download", "models"] or parts[:3] == ["api", "v1", "model-versions"]:
        version, model = (parts + [""] * 4)[3], ""
    elif parts[:1] == ["models"] and len(parts) > 1 and parts[1].isdigit():
        model = parts[1]
    else:
        model = version = ""
    if version.isdigit():
        return Reference("civitai", f"civitai:{version}", model=model, version=version)
    if model:
        return Reference("civitai", f"https://civitai.com/models/{model}", model=model)
    raise UserError(
        Message(
            "model.path: {given} is not the page of a Civitai model. Its address has the form "
            "https://civitai.com/models/NUMBER",
            given=repr(given),
        )
    )


def translate_windows_path(given: str) -> str:
    """Return a path as it is, but a Windows path inside WSL as the path under which WSL shows that drive."""
    if (match := re.match(r"([A-Za-z]):[\\/](.*)", given, re.DOTALL)) and os.name != "nt":
        mounted = Path("/mnt") / match[1].lower()
        if mounted.is_dir() and "microsoft" in _read_kernel().lower():
            return str(mounted / match[2].replace("\\", "/"))
    return given


def _read_kernel() -> str:
    return os.uname().release if hasattr(os, "uname") else ""
