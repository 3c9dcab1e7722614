"""Configs and tokenizers from a Hugging Face repository, which complete a base model that is a single file.

Weights are described and downloaded by `sources`.
HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE have their usual effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ..errors import Message, UserError

SMALL = ("json", "txt", "jinja", "model")
"""Suffixes of configs and tokenizers."""


def find_cached(repo: str, folder: str) -> Path | None:
    """Return a folder of configs of a hub repository if it is in the hub's cache on this machine."""
    from huggingface_hub import snapshot_download

    patterns = [f"{folder}/*.{suffix}" for suffix in SMALL]
    try:
        root = Path(snapshot_download(repo, allow_patterns=patterns, local_files_only=True))
    except Exception:  # not in the cache; huggingface_hub raises many types
        return None
    return root / folder if any((root / folder).glob("*.json")) else None


def fetch(repo: str, folders: Iterable[str]) -> Path:
    """Download configs and tokenizers of a hub repository, and no weights. Returns the local snapshot.

    Args:
        repo: "owner/name".
        folders: subfolders to download.

    Raises:
        UserError: the hub is not reachable, or the model is not there or not accessible; says what to do.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    allowed = ["model_index.json", "modular_model_index.json"]
    allowed += [f"{folder}/*.{suffix}" for folder in folders for suffix in SMALL]
    try:
        root = Path(snapshot_download(repo, allow_patterns=allowed))
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
                "{repo} is no model that the hub shows you. Check the spelling, or run `{command}` if it is private",
                repo=repr(repo),
                command="hf auth login",
            )
        ) from error
    except Exception as error:  # no network, offline mode, a full disk: huggingface_hub raises many types
        why = next(iter(str(error).splitlines()), "")[:200]
        raise UserError(
            Message(
                "{repo} is not on this machine and could not be fetched from the hub ({why})",
                repo=repr(repo),
                why=f"{type(error).__name__}{why and f': {why}'}",
            )
        ) from error
    return root
