"""Parts of a base model from a Hugging Face repository: configs and tokenizers, and single parts with their weights.

They complete a base model that is a single file. A whole base model on a hub is described and downloaded by `sources`.
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


def fetch(repo: str, parts: Iterable[str], *, small: Iterable[str] = ()) -> Path:
    """Download parts of a hub repository. Returns the local snapshot.

    Args:
        repo: "owner/name".
        parts: subfolders to download.
        small: subfolders of which only configs and tokenizers are needed, and no weights.

    Raises:
        UserError: the hub is not reachable, or the model is not there or not accessible; says what to do.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    parts = list(parts)
    allowed = ["model_index.json", "modular_model_index.json"]
    for part in parts:
        allowed += [f"{part}/*.{suffix}" for suffix in (*SMALL, "safetensors")]
    allowed += [f"{part}/*.{suffix}" for part in small for suffix in SMALL]
    try:
        # Repositories often hold the same weights two or three times. The full-precision ones are requested first, and
        # a half-precision copy only if there is nothing else.
        ignored = ["*.fp16*", "*.bf16*", "*.non_ema*"]
        root = Path(snapshot_download(repo, allow_patterns=allowed, ignore_patterns=ignored))
        bare = [p for p in parts if (root / p / "config.json").is_file() and not [*(root / p).glob("*.safetensors")]]
        if bare:
            allowed = [f"{p}/*.safetensors" for p in bare] + [f"{p}/*.index*.json" for p in bare]
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
