"""Configs and tokenizers of released models, which complete a base model that is a single file.

They come from Hugging Face (or its mirror in HF_ENDPOINT) and, where that cannot be reached, from ModelScope, whose
copies have the same owner or the owner of its mirrors. A file that itself comes from ModelScope is completed from there
first. HF_HOME, HF_TOKEN and HF_HUB_OFFLINE have their usual effect. Weights are described and downloaded by `sources`.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ..errors import Joined, Message, UserError, UserErrors
from .sources import Reference, description, parse
from .sources.hosts import NoAnswer, is_offline

SMALL = ("json", "txt", "jinja", "model")
"""Suffixes of configs and tokenizers."""
MODELSCOPE_MIRRORS = "AI-ModelScope"
"""The owner of ModelScope's copies of models whose makers publish them on Hugging Face only."""


class Unreachable(UserError):
    """The hub cannot be reached; another one may have the same files."""


def find_cached(repo: str, folder: str) -> Path | None:
    """Return a folder of configs of a released model if it is on this machine, from either hub."""
    if cached := _find_in_hub_cache(repo, folder):
        return cached
    root = _find_copy(repo, [folder])
    return root / folder if root else None


def _find_copy(repo: str, folders: Collection[str]) -> Path | None:
    """Return the local folder of what ModelScope's copy of a model gave before; None unless all is here."""
    roots = (description.find_configs(copy, folders) for copy in _list_copies(repo))
    return next((root for root in roots if root and any((root / folder).is_dir() for folder in folders)), None)


def _find_in_hub_cache(repo: str, folder: str) -> Path | None:
    from huggingface_hub import snapshot_download

    patterns = [f"{folder}/*.{suffix}" for suffix in SMALL]
    try:
        root = Path(snapshot_download(repo, allow_patterns=patterns, local_files_only=True))
    except Exception:  # not in the cache; huggingface_hub raises many types
        return None
    return root / folder if any((root / folder).glob("*.json")) else None


def _list_copies(repo: str) -> list[Reference]:
    """Return where ModelScope may have a model of Hugging Face."""
    owner, _, name = repo.partition("/")
    return [parse(f"modelscope:{who}/{name}") for who in dict.fromkeys((owner, MODELSCOPE_MIRRORS))]


def fetch_released(repo: str, folders: Collection[str], *, prefers_modelscope: bool = False) -> Path:
    """Download configs and tokenizers of a released model from the hub that can be reached. Returns the local folder.

    Args:
        repo: "owner/name" on Hugging Face.
        folders: subfolders to download.
        prefers_modelscope: ask ModelScope first.

    Raises:
        UserError: no hub gives them; says what to do.
    """
    if root := _find_copy(repo, folders):
        return root
    if prefers_modelscope:
        try:
            return fetch_copy(repo, folders)
        except UserError as error:
            problem = error
        try:
            return fetch(repo, folders)
        except UserError as error:
            raise UserError(Joined("; ", [str(problem), str(error)])) from error
    try:
        return fetch(repo, folders)
    except Unreachable as error:
        try:
            return fetch_copy(repo, folders)
        except UserError as other:
            problems = [str(error)] if is_offline() else [str(error), str(other)]
            raise UserError(Joined("; ", problems)) from error


def fetch_copy(repo: str, folders: Collection[str]) -> Path:
    """Download configs and tokenizers from ModelScope's copy of a model of Hugging Face. Returns the local folder.

    Raises:
        Unreachable: ModelScope cannot be asked.
        UserError: it has no copy.
    """
    copies = _list_copies(repo)
    for copy in copies:
        try:
            root = description.fetch_configs(copy, folders)
        except NoAnswer as error:
            raise Unreachable(Message("ModelScope cannot be reached: {why}", why=error)) from error
        except UserError:
            continue
        if any((root / folder).is_dir() for folder in folders):
            return root
    names = ", ".join(copy.repo for copy in copies)
    raise UserError(Message("ModelScope has no copy of it (names tried: {names})", names=names))


def fetch_given(given: str, folders: Collection[str]) -> Path:
    """Download configs and tokenizers of the repository that a person names. Returns the local folder.

    Args:
        given: "owner/name", or "modelscope:owner/name".
        folders: subfolders to download.

    Raises:
        UserError: the hub is not reachable, or the model is not there or not accessible; says what to do.
    """
    reference = parse(given)
    if reference.kind == "hub":
        return fetch(reference.repo, folders, reference.revision)
    try:
        return description.fetch_configs(reference, folders)
    except NoAnswer as error:
        raise _make_unreachable_error(given, str(error)) from error
    except UserError as error:
        raise UserErrors([str(error)], f"model.components = {given!r}") from error


def fetch(repo: str, folders: Collection[str], revision: str = "") -> Path:
    """Download configs and tokenizers of a Hugging Face repository, and no weights. Returns the local snapshot.

    Args:
        repo: "owner/name".
        folders: subfolders to download.
        revision: branch, tag or commit; "" for the default.

    Raises:
        Unreachable: the hub cannot be reached; says why.
        UserError: the model is not there or not accessible; says what to do.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    allowed = ["model_index.json", "modular_model_index.json"]
    allowed += [f"{folder}/*.{suffix}" for folder in folders for suffix in SMALL]
    try:
        root = Path(snapshot_download(repo, revision=revision or None, allow_patterns=allowed))
    except GatedRepoError as error:
        raise UserError(
            Message(
                "{repo} is gated. Accept its licence at https://huggingface.co/{repo}, then run `{command}`",
                repo=repo,
                command="hf auth login",
            )
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            Message(
                "{repo} was not found on Hugging Face. Check the spelling, or run `{command}` if it is private",
                repo=repr(repo),
                command="hf auth login",
            )
        ) from error
    except Exception as error:  # no network, offline mode, a full disk: huggingface_hub raises many types
        why = next(iter(str(error).splitlines()), "")[:200]
        raise _make_unreachable_error(repo, f"{type(error).__name__}{why and f': {why}'}") from error
    return root


def _make_unreachable_error(repo: str, why: str) -> Unreachable:
    return Unreachable(
        Message(
            "{repo} is not on this machine and could not be downloaded from Hugging Face ({why})",
            repo=repr(repo),
            why=why,
        )
    )
