"""Upload a folder to a model repository of the Hugging Face Hub.

`check` finds out first whether there is a token, whether it may write, and whether the name is free. It reports
everything that is wrong at once, and nothing is sent before. `upload` then sends all files as one commit: a repository
is never half new. huggingface_hub handles the token (its own store, or HF_TOKEN); it is never an argument and is in no
message. No torch.
"""

import contextlib
import io
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import Message, Template, UserError, cannot_read, combine, reason
from ..families.sources import hosts, parse
from ..families.sources.download import Progress

NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?")
"""Name of an account or of a repository, as the Hub takes them."""
TOKENS_PAGE = "https://huggingface.co/settings/tokens"
WRITERS = ("admin", "write", "contributor")
"""Roles in an organization that may create repositories."""
SPEED_SECONDS = 5.0
"""Seconds over which the speed is measured."""
EXISTS = Template("{repo} exists already. Choose another name, or update it (--update).")
NOT_THERE = Template("{repo} does not exist, so it cannot be updated. Remove --update.")
STAYS_PRIVATE = Template(
    "{repo} exists, and an update cannot make it public. Remove that option, or change it on {page}."
)

Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Target:
    """Where an upload goes.

    Attributes:
        repo: OWNER/NAME.
        account: the account of the token.
        exists: the repository is there already, and is updated.
        page: its address.
    """

    repo: str
    account: str
    exists: bool
    page: str


def check(repo: str, *, public: bool = False, update: bool = False) -> Target:
    """Check that this machine's token may upload to a repository. One without an owner is the account's own.

    Args:
        repo: OWNER/NAME or NAME.
        public: a new repository shall be public.
        update: an existing repository is wanted.

    Raises:
        UserError: everything that is wrong.
    """
    import huggingface_hub

    owner, _, name = repo.strip().rpartition("/")
    if not all(NAME.fullmatch(part) and ".." not in part and "--" not in part for part in (owner or "me", name)):
        raise UserError(
            Message(
                "{repo} is not a valid repository name. Give OWNER/NAME of letters, digits, -, _ and ., at most 96 "
                "characters each.",
                repo=repr(repo),
            )
        )
    if huggingface_hub.get_token() is None:
        raise UserError(
            Message(
                "this machine has no Hugging Face token. Create one with write access at {page}, then run `hf auth "
                "login`.",
                page=TOKENS_PAGE,
            )
        )
    hub = huggingface_hub.HfApi()
    with _explained(f"{owner or 'me'}/{name}"):
        account = hub.whoami()
        owner = owner or str(account["name"])
        exists = _exists(hub, f"{owner}/{name}")
    problems = _find_problems(account, f"{owner}/{name}")
    if exists and not update and not problems:
        problems.append(EXISTS(repo=f"{owner}/{name}"))
    if update and not exists and not problems:
        problems.append(NOT_THERE(repo=f"{owner}/{name}"))
    if exists and update and public:
        page = f"{hub.endpoint}/{owner}/{name}/settings"
        problems.append(STAYS_PRIVATE(repo=f"{owner}/{name}", page=page))
    if problems:
        raise combine(problems, f"{owner}/{name}")
    return Target(f"{owner}/{name}", str(account["name"]), exists, f"{hub.endpoint}/{owner}/{name}")


def _exists(hub: Any, repo: str) -> bool:
    from huggingface_hub import errors

    try:
        hub.model_info(repo, timeout=hosts.TIMEOUT)
    except errors.GatedRepoError:
        return True
    except errors.RepositoryNotFoundError:
        return False
    return True


def _find_problems(account: dict[str, Any], repo: str) -> list[Message]:
    """List why an account, or its token, may not write to a repository."""
    name, (owner, _) = str(account["name"]), repo.split("/")
    roles = {name: "admin"} | {str(org.get("name")): str(org.get("roleInOrg", "write")) for org in account["orgs"]}
    problems = []
    if roles.get(owner) not in WRITERS:
        writable = ", ".join(owner for owner, role in roles.items() if role in WRITERS)
        problems.append(
            Message(
                "the account {name} has no write access to {owner}. Choose one of: {names}.",
                name=name,
                owner=owner,
                names=writable,
            )
        )
    token = (account.get("auth") or {}).get("accessToken") or {}
    if not _may_write(token, repo):
        problems.append(
            Message(
                "the token of this machine has no write access to {repo}. Create one with write access at {page}, "
                "then run `hf auth login`.",
                repo=repo,
                page=TOKENS_PAGE,
            )
        )
    return problems


def _may_write(token: dict[str, Any], repo: str) -> bool:
    """Return True if a token may write to a repository: by its role, or by one of its fine-grained scopes."""
    if token.get("role") == "read":
        return False
    if token.get("role") != "fineGrained":
        return True
    scopes = token.get("fineGrained") or {}
    allowed = set(scopes.get("global") or ())
    for scope in scopes.get("scoped") or ():
        if (scope.get("entity") or {}).get("name") in (repo, repo.split("/")[0]):
            allowed |= set(scope.get("permissions") or ())
    return "repo.write" in allowed


def upload(
    folder: Path, target: Target, *, public: bool = False, ignore: Collection[str] = (), report: Report | None = None
) -> str:
    """Upload all files of a folder as one commit. Returns the repository's address.

    Args:
        folder: the folder.
        target: from `check`.
        public: make a new repository public; otherwise it is private. An existing one stays as it is.
        ignore: names of files that stay here.
        report: called with the progress, several times a second.

    Raises:
        UserError: the Hub refuses, or cannot be reached; or a file cannot be read.
    """
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars, logging

    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in ignore)
    if not files:
        raise UserError(Message("{path}: there is no file to upload", path=folder))
    disable_progress_bars()  # they would break into ours
    logging.set_verbosity_error()
    hub = huggingface_hub.HfApi()
    with contextlib.ExitStack() as opened, _explained(target.repo):
        counter = _Counter(sum(path.stat().st_size for path in files), report or (lambda progress: None))
        operations = []
        for path in files:
            file = opened.enter_context(_CountedFile(path, counter))
            operations.append(huggingface_hub.CommitOperationAdd(path.relative_to(folder).as_posix(), file))
            file.is_counted = True  # until here it was read for its hash
        if not target.exists:
            hub.create_repo(target.repo, private=not public)
        hub.create_commit(target.repo, operations, commit_message="Upload LoRA")
        counter.finish()
    return target.page


class _Counter:
    """Adds up what was read of the files, and reports it a few times a second."""

    def __init__(self, total: int, report: Report):
        self.total, self.report = total, report
        self._done: dict[Path, int] = {}
        self._seen: list[tuple[float, int]] = []
        self._last = 0.0

    def add(self, path: Path, position: int) -> None:
        """Note how far a file was read. A file that is sent again does not go back."""
        self._done[path] = max(position, self._done.get(path, 0))
        now = time.monotonic()
        if now - self._last >= 0.2:
            self._last = now
            self._report_progress(now)

    def finish(self) -> None:
        """Report the end; files that the Hub has already are not read."""
        self.report(Progress(self.total, self.total))

    def _report_progress(self, now: float) -> None:
        done = sum(self._done.values())
        self._seen = [(at, count) for at, count in self._seen if now - at <= SPEED_SECONDS] + [(now, done)]
        (begun, first), (at, last) = self._seen[0], self._seen[-1]
        speed = (last - first) / (at - begun) if at > begun else 0.0
        self.report(Progress(done, self.total, speed, (self.total - done) / speed if speed else None))


class _CountedFile(io.BufferedReader):
    """A file that counts what is read of it, once `is_counted` is set."""

    def __init__(self, path: Path, counter: _Counter):
        try:
            super().__init__(io.FileIO(path), 1 << 20)
        except OSError as error:
            raise cannot_read(path, error) from None
        self.path, self.counter, self.is_counted = path, counter, False

    def read(self, size: int | None = -1, /) -> bytes:
        """Read, and count."""
        content = super().read(size)
        if self.is_counted:
            self.counter.add(self.path, self.tell())
        return content


@contextlib.contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one sentence without the token."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(_hide_tokens(_explain(repo, error))) from None


def _explain(repo: str, error: Exception) -> str:
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # huggingface_hub's threads wrap what they raise
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status == 401:
        return Message("Hugging Face does not accept the token of this machine. Run `hf auth login` again.")
    if status == 403:
        return Message("the account of this machine's token has no write access to {repo}.", repo=repo)
    if status == 409:
        return EXISTS(repo=repo)
    explained = hosts.make_host(parse(repo)).explain(error)
    if isinstance(explained, hosts.NoAnswer):
        return Message("{repo} was not uploaded: {why}", repo=repo, why=str(explained))
    why = (reason(error) or type(error).__name__).strip().splitlines()[0][:200]
    return Message("{repo} was not uploaded: {why}", repo=repo, why=f"{type(error).__name__}: {why}")


def _hide_tokens(line: str) -> str:
    """Replace the token of this machine, should an error of a library hold it."""
    import huggingface_hub

    secrets = [secret for secret in (huggingface_hub.get_token(), os.environ.get("HF_TOKEN")) if secret]

    def hide(text: str) -> str:
        for secret in secrets:
            text = text.replace(secret, "***")
        return text

    return line.map(hide) if isinstance(line, Message) else hide(line)
