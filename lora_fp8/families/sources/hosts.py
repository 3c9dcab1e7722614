"""The places that base models are fetched from: Hugging Face, ModelScope and Civitai.

All requests go through huggingface_hub's session: HF_HUB_OFFLINE and the proxies (HTTPS_PROXY, NO_PROXY) have their
usual effect on all three, HF_ENDPOINT (a mirror such as https://hf-mirror.com) and HF_TOKEN on Hugging Face.
MODELSCOPE_DOMAIN and MODELSCOPE_API_TOKEN are those of ModelScope's own library; CIVITAI_TOKEN is an API key of a
Civitai account, and CIVITAI_ENDPOINT the address of a mirror.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import quote, urlsplit

from ...common.system import find_cache_folder
from ...common.writing import atomic_write
from ...errors import Message, UserError, reason
from . import headers, known_bases, remembered
from .headers import Header
from .places import has_size
from .reference import WEIGHT_ENDINGS, Reference, suggest
from .remembered import Answer, RemoteFile

T = TypeVar("T")

UNKNOWN_NAMES: dict[int, str] = {
    socket.EAI_NONAME: Message("Name or service not known"),
    socket.EAI_AGAIN: Message("Temporary failure in name resolution"),
}
"""What Linux says of names of hosts that it cannot look up, by number."""

WORKERS = 8
"""Number of small requests at the same time."""
TIMEOUT = 10.0
"""Seconds that a host may take to begin an answer."""
RETRIES = 1
"""Number of times that a request is repeated after a passing error."""


class NoAnswer(Exception):
    """The host cannot be asked now: no connection, too many requests, or an error of its own; the message says it."""


@dataclass(frozen=True)
class Host:
    """A base at the place where it is kept; a class for each place.

    Args:
        reference: what `model.path` names.
        revision: branch, tag or commit; "" for the default.
    """

    reference: Reference
    revision: str = ""

    @property
    def endpoint(self) -> str:
        """Return the address of the host."""
        raise NotImplementedError

    @property
    def page(self) -> str:
        """Return the address of the model's page, where a licence is accepted."""
        raise NotImplementedError

    @property
    def how_to_log_in(self) -> str:
        """Return what gives this machine a token of the host, for messages."""
        raise NotImplementedError

    def has_token(self) -> bool:
        """Return True if a token for this host is on this machine."""
        raise NotImplementedError

    def ask(self) -> Answer:
        """Ask for the files of the base, with their sizes.

        Raises:
            UserError: there is no such model, or it is not accessible.
            NoAnswer: the host cannot be asked now.
        """
        raise NotImplementedError

    def may_read(self) -> bool:
        """Return True if the account of this machine's token may read the files of a gated model."""
        return True

    def get_folder(self, commit: str) -> Path:
        """Return the folder for files of this commit."""
        raise NotImplementedError

    def make_address(self, commit: str, path: str) -> tuple[str, dict[str, str]]:
        """Return the address of a file, and the header fields of the request for it."""
        raise NotImplementedError

    def find(self, commit: str, file: RemoteFile) -> Path | None:
        """Return where a file is on this machine, complete; None if it is not."""
        path = self.get_folder(commit) / file.path
        return path if has_size(path, file.size) else None

    def fetch_small(self, commit: str, files: Sequence[RemoteFile]) -> None:
        """Fetch configs and tokenizers into `folder`; those that are there stay.

        Raises:
            UserError, NoAnswer: as for `ask`.
        """
        missing = [file for file in files if self.find(commit, file) is None]
        self._run_for_each(lambda file: self._fetch(commit, file), missing)

    def fetch_headers(self, commit: str, files: Sequence[RemoteFile]) -> dict[str, Header]:
        """Fetch the headers of weight files, by range requests.

        Raises:
            UserError, NoAnswer: as for `ask`, or a file is damaged.
        """

        def fetch(file: RemoteFile) -> tuple[str, Header]:
            address, fields = self.make_address(commit, file.path)
            where = f"{self.reference.name}: {file.path}"
            return file.path, headers.fetch(address, fields, file.size, where)

        return dict(self._run_for_each(fetch, files))

    def _fetch(self, commit: str, file: RemoteFile) -> None:
        from huggingface_hub.utils import hf_raise_for_status, http_backoff

        address, fields = self.make_address(commit, file.path)
        response = http_backoff("GET", address, headers=fields, timeout=TIMEOUT, max_retries=RETRIES)
        hf_raise_for_status(response)
        target = self.get_folder(commit) / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, response.content)

    def _run_for_each(self, action: Callable[[RemoteFile], T], files: Sequence[RemoteFile]) -> list[T]:
        """Run an action for each file on a few threads; the first error ends all, and is explained."""
        with ThreadPoolExecutor(WORKERS) as pool:
            futures = [pool.submit(action, file) for file in files]
            try:
                return [future.result() for future in futures]
            except Exception as error:
                for future in futures:
                    future.cancel()
                raise self.explain(error) from error

    def _get_json(self, address: str, fields: dict[str, str]) -> Any:
        from huggingface_hub.utils import hf_raise_for_status, http_backoff

        response = http_backoff("GET", address, headers=fields, timeout=TIMEOUT, max_retries=RETRIES)
        hf_raise_for_status(response)
        return response.json()

    def explain(self, error: Exception) -> Exception:
        """Return an error of huggingface_hub or of the network as a UserError or a NoAnswer.

        Returns:
            The error itself if it is none of them.
        """
        import httpx2
        from huggingface_hub import errors

        if isinstance(error, (errors.OfflineModeIsEnabled, errors.LocalEntryNotFoundError)) and is_offline():
            return NoAnswer(Message("HF_HUB_OFFLINE forbids connections"))
        if isinstance(error, errors.GatedRepoError):
            return UserError(self.describe_gate())
        if isinstance(error, errors.RevisionNotFoundError):
            return UserError(
                Message(
                    "{setting} = {revision} does not exist in {repo} on the hub",
                    setting=self.reference.settings[1],
                    revision=repr(self.revision),
                    repo=repr(self.reference.repo),
                )
            )
        if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
            return UserError(self.describe_missing())
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, httpx2.HTTPError | errors.HfHubHTTPError) and status is not None:
            return self._explain_status(status)
        if isinstance(error, httpx2.TransportError | errors.LocalEntryNotFoundError):
            host = urlsplit(self.endpoint).netloc
            return NoAnswer(Message("no connection to {host} ({why})", host=host, why=_find_innermost_reason(error)))
        return error

    def _explain_status(self, status: int) -> Exception:
        host = urlsplit(self.endpoint).netloc
        if status == 429:
            return NoAnswer(Message("{host} limits the number of requests (429); wait some minutes", host=host))
        if status == 404:
            return UserError(self.describe_missing())
        if status == 401 and self.has_token():
            return UserError(
                Message(
                    "{host} does not accept the token of this machine. Log in again: {how}",
                    host=host,
                    how=self.how_to_log_in,
                )
            )
        if status in (401, 403):
            return UserError(
                Message(
                    "{setting} = {name}: {host} refuses access (status {status}). Log in with an account that has "
                    "access: {how}",
                    setting=self.reference.settings[0],
                    name=repr(self.reference.name),
                    host=host,
                    status=status,
                    how=self.how_to_log_in,
                )
            )
        return NoAnswer(Message("{host} answered with status {status}", host=host, status=status))

    def describe_missing(self) -> Message:
        """Return the problem of a model that the host does not have, or does not show to this account."""
        name, host = repr(self.reference.name), urlsplit(self.endpoint).netloc
        setting = self.reference.settings[0]
        if meant := suggest(self.reference):
            return Message(
                "{setting} = {name} was not found, neither on this machine nor on {host}; did you mean {meant}?",
                setting=setting,
                name=name,
                host=host,
                meant=repr(meant),
            )
        return Message(
            "{setting} = {name} was not found, neither on this machine nor on {host}. Check the spelling; if it is "
            "private, log in: {how}",
            setting=setting,
            name=name,
            host=host,
            how=self.how_to_log_in,
        )

    def describe_gate(self) -> Message:
        """Return the problem of a gated model that this machine may not read."""
        if self.has_token():
            return Message(
                "{setting} = {name} is gated, and the account of your token has no access. Accept its licence at "
                "{page}, or log in with another account: {how}",
                setting=self.reference.settings[0],
                name=repr(self.reference.name),
                page=self.page,
                how=self.how_to_log_in,
            )
        return Message(
            "{setting} = {name} is gated. Accept its licence at {page}, then log in: {how}",
            setting=self.reference.settings[0],
            name=repr(self.reference.name),
            page=self.page,
            how=self.how_to_log_in,
        )


class HuggingFace(Host):
    """A repository on Hugging Face or a mirror of it."""

    @property
    def endpoint(self) -> str:
        """Return the address of the hub, or of the mirror in HF_ENDPOINT."""
        from huggingface_hub import constants

        return constants.ENDPOINT

    @property
    def page(self) -> str:
        """Return the model's page. Licences are accepted at Hugging Face itself, whatever the mirror."""
        return f"https://huggingface.co/{self.reference.repo}"

    @property
    def how_to_log_in(self) -> str:
        """Return the command that stores a token."""
        return "`hf auth login`"

    def has_token(self) -> bool:
        """Return True if huggingface_hub finds a token."""
        from huggingface_hub import get_token

        return get_token() is not None

    def ask(self) -> Answer:
        """Ask for the files of the repository; one request."""
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self.endpoint)
        ask = api.dataset_info if self.reference.kind == "dataset" else api.model_info
        try:
            info = ask(self.reference.repo, revision=self.revision or None, files_metadata=True, timeout=TIMEOUT)
        except Exception as error:
            raise self.explain(error) from error
        card = info.card_data
        files = tuple(
            RemoteFile(sibling.rfilename, sibling.size or 0, sibling.lfs.sha256 if sibling.lfs else None)
            for sibling in info.siblings or ()
        )
        licence = getattr(card, "license", None)
        named = getattr(card, "license_name", None) if licence == "other" else None
        link = str(getattr(card, "license_link", None) or "")
        if link and "://" not in link:  # a file of the repository
            link = f"{self.page}/blob/main/{link}"
        known = known_bases.get(self.reference.repo)
        return Answer(
            revision=info.sha or self.revision,
            files=files,
            licence=str(named or licence or (known.licence if known else "")),
            licence_link=link or (known.licence_link if known else ""),
            gated=bool(info.gated),
        )

    def may_read(self) -> bool:
        """Ask the hub whether the account of this machine's token may read a gated model."""
        from huggingface_hub import HfApi, errors

        if not self.has_token():
            return False
        try:
            HfApi(endpoint=self.endpoint).auth_check(self.reference.repo)
        except errors.GatedRepoError:
            return False
        except errors.HfHubHTTPError:  # mirrors may not know this question; the first file tells
            return True
        except Exception as error:
            raise self.explain(error) from error
        return True

    def get_folder(self, commit: str) -> Path:
        """Return the snapshot's folder in huggingface_hub's cache."""
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        name = repo_folder_name(repo_id=self.reference.repo, repo_type="model")
        return Path(constants.HF_HUB_CACHE) / name / "snapshots" / commit

    def find_commit(self) -> str:
        """Return the commit that the cache has for the revision; "" if it has none."""
        name = self.get_folder("").parent
        if (name / "snapshots" / (self.revision or "-")).is_dir():
            return self.revision
        try:
            return (name / "refs" / (self.revision or "main")).read_text(encoding="utf-8").strip()
        except (OSError, ValueError):
            return ""

    def make_address(self, commit: str, path: str) -> tuple[str, dict[str, str]]:
        """Return the address of a file, with the token if there is one."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        return hf_hub_url(self.reference.repo, path, revision=commit, endpoint=self.endpoint), build_hf_headers()

    def find(self, commit: str, file: RemoteFile) -> Path | None:
        """Return a file of the snapshot, or the content of the same file of another one."""
        if path := super().find(commit, file):
            return path
        blob = self.get_folder(commit).parent.parent / "blobs" / (file.sha256 or "-")
        return blob if has_size(blob, file.size) else None

    def link(self, commit: str, files: Sequence[RemoteFile]) -> None:
        """Link files into this snapshot whose content is here from another one; nothing is transferred."""
        here = [file for file in files if (path := self.find(commit, file)) and path.parent.name == "blobs"]
        for file in here:
            pointer = self.get_folder(commit) / file.path
            pointer.parent.mkdir(parents=True, exist_ok=True)
            pointer.unlink(missing_ok=True)
            blob = self.get_folder(commit).parent.parent / "blobs" / str(file.sha256)
            try:
                pointer.symlink_to(os.path.relpath(blob, pointer.parent))
            except OSError:  # Windows without the right to make links
                shutil.copyfile(blob, pointer)

    def _fetch(self, commit: str, file: RemoteFile) -> None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import tqdm

        class Silent(tqdm):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options | {"disable": True})

        hf_hub_download(
            self.reference.repo,
            file.path,
            revision=commit,
            endpoint=self.endpoint,
            etag_timeout=TIMEOUT,
            tqdm_class=Silent,
        )


class HuggingFaceDataset(HuggingFace):
    """A dataset on Hugging Face or a mirror of it. Its files are read once, and kept as plain files until then."""

    @property
    def page(self) -> str:
        """Return the dataset's page."""
        return f"https://huggingface.co/datasets/{self.reference.repo}"

    def get_folder(self, commit: str) -> Path:
        """Return a folder in the program's own cache."""
        owner, name = self.reference.repo.split("/")
        return find_cache_folder() / "datasets" / f"{owner}--{name}" / commit

    def make_address(self, commit: str, path: str) -> tuple[str, dict[str, str]]:
        """Return the address of a file, with the token if there is one."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        options: dict[str, Any] = {"repo_type": "dataset", "revision": commit, "endpoint": self.endpoint}
        return hf_hub_url(self.reference.repo, path, **options), build_hf_headers()

    def find(self, commit: str, file: RemoteFile) -> Path | None:
        """Return a file of the folder."""
        return Host.find(self, commit, file)


class _WithVariable(Host):
    """A host whose token is in an environment variable."""

    variable: ClassVar[str]

    @property
    def how_to_log_in(self) -> str:
        """Return the variable."""
        return self.variable

    def has_token(self) -> bool:
        """Return True if the variable is set."""
        return bool(os.environ.get(self.variable))

    def _make_fields(self) -> dict[str, str]:
        token = os.environ.get(self.variable)
        return {"Authorization": f"Bearer {token}"} if token else {}


class ModelScope(_WithVariable):
    """A repository on ModelScope."""

    variable = "MODELSCOPE_API_TOKEN"

    @property
    def endpoint(self) -> str:
        """Return the address of ModelScope, or of what MODELSCOPE_DOMAIN names."""
        domain = os.environ.get("MODELSCOPE_DOMAIN") or "www.modelscope.cn"
        return domain.rstrip("/") if "://" in domain else f"https://{domain}"

    @property
    def page(self) -> str:
        """Return the model's page."""
        return f"https://www.modelscope.cn/models/{self.reference.repo}"

    def ask(self) -> Answer:
        """Ask for the files of the repository, and for its licence; two requests."""
        revision = self.revision or "master"
        base = f"{self.endpoint}/api/v1/models/{self.reference.repo}"
        try:
            listing = self._get_json(
                f"{base}/repo/files?Revision={quote(revision)}&Recursive=true", self._make_fields()
            )
            about = self._get_json(f"{base}?Revision={quote(revision)}", self._make_fields())
        except Exception as error:
            raise self.explain(error) from error
        entries = [entry for entry in listing["Data"]["Files"] if entry.get("Type") == "blob"]
        files = tuple(RemoteFile(e["Path"], int(e["Size"]), e.get("Sha256") or None) for e in entries)
        # Each file has the commit that changed it last; together they stand for the state of the repository.
        commit = remembered.compute_digest([[file.path, file.size, file.sha256] for file in files])
        known = known_bases.get(self.reference.repo)
        licence = str((about.get("Data") or {}).get("License") or (known.licence if known else ""))
        return Answer(commit, files, licence=licence, licence_link=known.licence_link if known else "")

    def get_folder(self, commit: str) -> Path:
        """Return a folder in the program's own cache."""
        owner, name = self.reference.repo.split("/")
        return find_cache_folder() / "models" / f"modelscope--{owner}--{name}" / commit

    def make_address(self, commit: str, path: str) -> tuple[str, dict[str, str]]:
        """Return the address of a file at the revision that was asked for."""
        repo, revision = self.reference.repo, self.revision or "master"
        return f"{self.endpoint}/models/{repo}/resolve/{quote(revision)}/{quote(path)}", self._make_fields()


class Civitai(_WithVariable):
    """A version of a model on Civitai: one file."""

    variable = "CIVITAI_TOKEN"

    @property
    def how_to_log_in(self) -> str:
        """Return the variable for an API key."""
        return f"{self.variable} (an API key from https://civitai.com/user/account)"

    @property
    def endpoint(self) -> str:
        """Return the address of Civitai, or of the mirror in CIVITAI_ENDPOINT."""
        return (os.environ.get("CIVITAI_ENDPOINT") or "https://civitai.com").rstrip("/")

    @property
    def page(self) -> str:
        """Return the model's page; that of the version where the model's number is not known."""
        model, version = self.reference.model, self.reference.version
        return f"https://civitai.com/models/{model}" if model else f"https://civitai.com/model-versions/{version}"

    def ask(self) -> Answer:
        """Ask for the file of the version, or of the model's newest version; one request."""
        kind, number = (
            ("model-versions", self.reference.version) if self.reference.version else ("models", self.reference.model)
        )
        try:
            about = self._get_json(f"{self.endpoint}/api/v1/{kind}/{number}", self._make_fields())
        except Exception as error:
            raise self.explain(error) from error
        version = about if self.reference.version else next(iter(about.get("modelVersions") or ()), None)
        if version is None:
            raise UserError(self.describe_missing())
        model = about.get("model") or about
        kind = str(model.get("type") or "Checkpoint")
        if kind != "Checkpoint":
            raise UserError(
                Message(
                    "model.path = {name} is a {kind} on Civitai, not a base model (checkpoint)",
                    name=repr(self.reference.name),
                    kind=kind,
                )
            )
        models = [file for file in version.get("files") or () if file.get("type") in ("Model", "Pruned Model")]
        safe = [file for file in models if str(file.get("name")).lower().endswith(WEIGHT_ENDINGS)]
        if not safe:
            raise UserError(
                Message(
                    "model.path = {name} has no .safetensors file on Civitai, and pickles can run code. Choose another "
                    "version",
                    name=repr(self.reference.name),
                )
            )
        file = max(safe, key=lambda file: (bool(file.get("primary")), file.get("sizeKB") or 0))
        sha256 = str((file.get("hashes") or {}).get("SHA256") or "").lower() or None
        remote = RemoteFile(Path(file["name"]).name, round(float(file["sizeKB"]) * 1024), sha256)
        return Answer(str(version["id"]), (remote,), title=str(model.get("name") or ""))

    def get_folder(self, commit: str) -> Path:
        """Return a folder in the program's own cache."""
        return find_cache_folder() / "models" / f"civitai--{commit}"

    def make_address(self, commit: str, path: str) -> tuple[str, dict[str, str]]:
        """Return the address of the version's file."""
        return f"{self.endpoint}/api/download/models/{commit}", self._make_fields()


def make_host(reference: Reference, revision: str = "") -> Host:
    """Return the host of a remote reference; `revision` is `model.revision`, which an address may state too."""
    kinds = {"hub": HuggingFace, "modelscope": ModelScope, "civitai": Civitai, "dataset": HuggingFaceDataset}
    return kinds[reference.kind](reference, reference.revision or revision)


def is_offline() -> bool:
    """Return True if HF_HUB_OFFLINE, or what stands for it, forbids connections."""
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def _find_innermost_reason(error: BaseException) -> str:
    """Return the innermost reason of a failed connection, such as "Name or service not known"."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    if isinstance(error, socket.gaierror):  # its numbers are not those of other errors
        return UNKNOWN_NAMES.get(error.errno or 0, error.strerror or type(error).__name__)
    if isinstance(error, OSError) and error.strerror:
        return reason(error)
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:120]
