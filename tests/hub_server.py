"""A model hub on the loopback: speaks the real protocol to the real huggingface_hub, fails on request, counts bytes.

    with HubServer() as hub:
        repository = hub.add("org/tiny", folder, card={"license": "apache-2.0"})
        repository.faults.cut_after = 1 << 20
        subprocess.run(command, env=hub.environment(home))       # a process of its own
        hub.use(monkeypatch, home)                                # or this process
        assert hub.downloads() == ["unet/diffusion_pytorch_model.safetensors"] and hub.bytes_sent() < 1 << 20

One port is the hub, another is its CDN, so that a redirect changes the origin as it does in life (the client sends its
token to the first only). Three sites share the hub's port, since their paths differ:

Hugging Face. Read from huggingface_hub 2.4.0, which is the client of the tests:
    GET  /api/models/ID[/revision/REV]   ?blobs=true adds sizes and LFS hashes, ?expand= selects properties
    GET  /api/datasets/ID, and /datasets/ID/resolve/REV/FILE: the same of a dataset, added as "datasets/OWNER/NAME"
    GET  /api/models/ID/tree/REV[/PATH]  pages of `tree_page` entries with a Link header; ?recursive=
    POST /api/models/ID/paths-info/REV   GET /api/models/ID/auth-check   GET /api/whoami-v2
    HEAD, GET /ID/resolve/REV/FILE       weights: 302 to the CDN; small files: 307 to /api/resolve-cache on the hub
    Errors carry X-Error-Code (RepoNotFound, RevisionNotFound, EntryNotFound, GatedRepo) and X-Error-Message. A missing
    or private repository is 401 without a token and 404 with one; a gate is 401 without a token and 403 with one that
    was not granted access (both seen in users' reports). Information about a gated repository is public.
    POST /api/repos/create                    409 where there is one, 403 without the right
    POST /api/validate-yaml                   the card of an upload; anything is accepted
    POST /api/models/ID/preupload/REV         which files go to the large storage
    POST /ID.git/info/lfs/objects/batch       where to; PUT there, without the token
    POST /api/models/ID/commit/REV            one commit of all files, as JSON lines; 400 if a large file is missing
    Not here: Xet transfer, which needs its own storage service (`environment` and `use` switch it off in the client).

ModelScope. Confirmed from the sources of the modelscope package and of other clients:
    GET /api/v1/models/ID/repo/files?Revision=&Recursive=    Data.Files: Path, Name, Type, Size, Sha256, IsLFS, Revision
    GET /api/v1/models/ID/repo?Revision=&FilePath=           the file; Range works. Also /models/ID/resolve/REV/FILE
    The default revision is "master". Whatever is not accessible is a 404 with a Code: 10010205001 not found,
    10010200001 no access, 10990101004 no such revision.
    Assumed: the fields of /api/v1/models/ID beyond Name, Path and License, and that downloads do not redirect.

Civitai. Confirmed from developer.civitai.com and users' reports:
    GET /api/v1/model-versions/ID        files[]: name, type, sizeKB (KiB), metadata, hashes.SHA256 (upper case),
                                         primary, downloadUrl; baseModel, model.name, model.type
    GET /api/v1/models/ID                modelVersions[]
    GET /api/download/models/ID          307 to a signed address; 401 with {"error", "message"} if its creator asks for
                                         a login and neither a bearer token nor ?token= is given
    Assumed: the wording of its 404.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest

LFS_SUFFIXES = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".gguf", ".model", ".msgpack", ".h5", ".onnx")
LFS_SUFFIXES += (".parquet", ".tar")
CHUNK = 1 << 14
TOKEN = "hf_accepted"
"""The token of a person who was granted access to every gated and private repository."""
STRANGER = "hf_stranger"
"""A valid token of a person who was granted nothing."""
WRITER = "hf_writer"
"""A token of the person of TOKEN that may write; TOKEN itself may only read."""
NARROW = "hf_narrow"
"""A fine-grained token of this person that may write to one organization."""
ORGANIZATIONS = [{"name": "club", "roleInOrg": "write"}, {"name": "press", "roleInOrg": "read"}]
"""Those of this person."""
SCOPES = {"global": [], "scoped": [{"entity": {"type": "org", "name": "club"}, "permissions": ["repo.write"]}]}
ACCOUNTS: dict[str, tuple[str, dict[str, Any]]] = {
    TOKEN: ("ada", {"role": "read"}),
    WRITER: ("ada", {"role": "write"}),
    NARROW: ("ada", {"role": "fineGrained", "fineGrained": SCOPES}),
    STRANGER: ("bob", {"role": "write"}),
}
OF_ADA = (TOKEN, WRITER, NARROW)


@dataclasses.dataclass(frozen=True)
class File:
    """A file of a repository: its content and the names that the hub gives to it."""

    path: str
    source: Path
    size: int
    sha256: str
    oid: str
    is_lfs: bool

    @classmethod
    def read(cls, folder: Path, source: Path) -> File:
        content = source.read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        is_lfs = source.name.endswith(LFS_SUFFIXES)
        path = source.relative_to(folder).as_posix()
        return cls(
            path, source, len(content), digest, git_blob(pointer(digest, content) if is_lfs else content), is_lfs
        )

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.oid


def pointer(sha256: str, content: bytes) -> bytes:
    """The text that git holds instead of a large file."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n".encode()


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclasses.dataclass
class Faults:
    """What goes wrong with a repository. Numbers of times count down; the rest holds until it is changed.

    Attributes:
        rate_limited: number of requests that are answered with 429.
        retry_after: its Retry-After and RateLimit headers, in seconds; None: it has neither.
        broken: number of requests that are answered with a plain 500.
        delay: seconds before each answer; requests that wait heed a change.
        bytes_per_second: the most that one file is sent with; 0: no limit.
        cut_after: the connection closes after so many bytes of a weight file's download; None: never.
        cuts: number of bodies that are cut; -1: each.
        stall_after: a weight file's download stops after so many bytes until `released` is set; None: never.
        wrong_bytes: paths of files whose last byte arrives changed.
        no_range: Range is ignored, and the whole file is sent with 200.
    """

    rate_limited: int = 0
    retry_after: int | None = 1
    broken: int = 0
    delay: float = 0.0
    bytes_per_second: int = 0
    cut_after: int | None = None
    cuts: int = -1
    stall_after: int | None = None
    wrong_bytes: set[str] = dataclasses.field(default_factory=set)
    no_range: bool = False
    stalled: threading.Event = dataclasses.field(default_factory=threading.Event)
    released: threading.Event = dataclasses.field(default_factory=threading.Event)


@dataclasses.dataclass
class Repository:
    """A repository made from a folder. Change its attributes and `faults` at any time."""

    id: str
    folder: Path
    card: dict[str, Any]
    gated: bool | str = False  # False, "auto" or "manual"
    private: bool = False
    login: bool = False  # Civitai: its creator asks for a login
    revisions: set[str] = dataclasses.field(default_factory=lambda: {"main", "master"})
    only: str = "*"  # pattern of the files that it has
    civitai: dict[str, Any] | None = None
    faults: Faults = dataclasses.field(default_factory=Faults)
    files: dict[str, File] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.reread()

    def reread(self) -> None:
        """Take the folder's present content, as a new commit if it differs."""
        found = [File.read(self.folder, p) for p in sorted(self.folder.rglob(self.only)) if p.is_file()]
        self.files = {file.path: file for file in found}

    @property
    def sha(self) -> str:
        listing = [[file.path, file.oid] for file in self.files.values()]
        return hashlib.sha1(json.dumps([self.id, listing]).encode()).hexdigest()

    def has(self, revision: str) -> bool:
        return revision in self.revisions or revision == self.sha

    @property
    def weights(self) -> int:
        """Size of all weight files in bytes."""
        return sum(file.size for file in self.files.values() if file.is_lfs)


@dataclasses.dataclass
class Request:
    """A request as the server saw it; `sent` counts the bytes of the body that went out."""

    site: str  # "hub" or "cdn"
    method: str
    path: str
    range: str
    token: str
    agent: str
    repo: str = ""
    file: str = ""
    is_lfs: bool = False
    status: int = 0
    sent: int = 0

    @property
    def is_download(self) -> bool:
        """True for a body that was to go to the end of a weight file, unlike a header that is read by range."""
        return self.method == "GET" and self.is_lfs and self.status in (200, 206) and not self.range.rpartition("-")[2]


class HubServer:
    """The server; a context manager. See the module's docstring.

    Attributes:
        endpoint: address of the hub, for HF_ENDPOINT.
        requests: all requests so far, in the order in which they came.
        repositories: by id. Civitai's are also found by their version's number.
        tree_page: number of entries on a page of a tree.
        received: large files that were uploaded, by hash.
        uploads: the folder of repositories that were created.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.repositories: dict[str, Repository] = {}
        self.tree_page = 1000
        self.received: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._servers: list[ThreadingHTTPServer] = []

    def __enter__(self) -> HubServer:
        self.uploads = tempfile.TemporaryDirectory()
        for site in ("hub", "cdn"):
            handler = type(f"{site}Handler", (_Handler,), {"hub": self, "site": site})
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
            self._servers.append(server)
        self.endpoint, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)
        return self

    def __exit__(self, *error: object) -> None:
        for repository in self.repositories.values():
            repository.faults.released.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()
        self.uploads.cleanup()

    def add(self, repo: str, folder: Path, card: dict[str, Any] | None = None, **attributes: Any) -> Repository:
        """Offer a folder's files under an id such as "org/tiny". See `Repository` for its attributes."""
        self.repositories[repo] = Repository(repo, folder, dict(card or {}), **attributes)
        return self.repositories[repo]

    def add_civitai(self, version: int, file: Path, base_model: str, model: int = 1, **attributes: Any) -> Repository:
        """Offer a file, alone in its folder, as a version of a Civitai model."""
        about = {"version": version, "model": model, "base_model": base_model}
        return self.add(f"civitai/{version}", file.parent, only=file.name, civitai=about, **attributes)

    # -- what the tests ask ------------------------------------------------------------------------------------------

    def seen(self, repo: str | None = None) -> list[Request]:
        with self._lock:
            return [request for request in self.requests if repo in (None, request.repo)]

    def downloads(self, repo: str | None = None) -> list[str]:
        """Names of the weight files whose content was requested to its end, in order; a resumed one appears again."""
        return [request.file for request in self.seen(repo) if request.is_download]

    def bytes_sent(self, repo: str | None = None, file: str | None = None) -> int:
        """Bytes of weight files that went out, headers that were read by range included."""
        return sum(r.sent for r in self.seen(repo) if r.is_lfs and file in (None, r.file))

    def bytes_downloaded(self, repo: str | None = None) -> int:
        """The same without the headers that were read by range."""
        return sum(request.sent for request in self.seen(repo) if request.is_download)

    def forget(self) -> None:
        """Start the log anew."""
        with self._lock:
            self.requests.clear()

    # -- how clients find it -----------------------------------------------------------------------------------------

    def environment(self, home: Path, token: str | None = None, **more: str) -> dict[str, str]:
        """Environment of a process that takes this server for the hub and `home` for HF_HOME."""
        unwanted = r"HF_.*|HUGGING.*|TRANSFORMERS_OFFLINE|.*_proxy|MODELSCOPE.*|CIVITAI.*"
        clean = {k: v for k, v in os.environ.items() if not re.fullmatch(unwanted, k, re.IGNORECASE)}
        return {**clean, **list_settings(self.endpoint, home), **({"HF_TOKEN": token} if token else {}), **more}

    def use(self, monkeypatch: pytest.MonkeyPatch, home: Path, token: str | None = None) -> None:
        """Make this process take this server for the hub and `home` for HF_HOME, until the test ends."""
        use_endpoint(monkeypatch, self.endpoint, home, token)


def list_settings(endpoint: str, home: Path) -> dict[str, str]:
    """Return the variables that make a process take an endpoint for the hub."""
    switches = ("HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_TELEMETRY")
    return {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"} | dict.fromkeys(switches, "1")


def use_endpoint(monkeypatch: pytest.MonkeyPatch, endpoint: str, home: Path, token: str | None = None) -> None:
    """Make this process take an endpoint for the hub; see `HubServer.use`.

    huggingface_hub reads the environment when it is imported, but looks its constants up at each call.
    """
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import close_session

    for name in [name for name in os.environ if re.fullmatch(r"HF_.*|TRANSFORMERS_OFFLINE", name)]:
        monkeypatch.delenv(name)
    for name, value in (list_settings(endpoint, home) | ({"HF_TOKEN": token} if token else {})).items():
        monkeypatch.setenv(name, value)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    paths = {"HF_HOME": home, "HF_HUB_CACHE": home / "hub", "HUGGINGFACE_HUB_CACHE": home / "hub"}
    paths |= {"HF_TOKEN_PATH": home / "token", "HF_STORED_TOKENS_PATH": home / "stored_tokens"}
    for name, value in {
        "ENDPOINT": endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        **{name: str(path) for name, path in paths.items()},
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
    close_session()  # its connections are those of another server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else the second part of each answer waits 40 ms for an acknowledgement
    hub: HubServer
    site: str

    def log_message(self, *args: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client went away
            super().handle()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_PUT(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        self.query = {key: values for key, values in parse_qs(address.query).items()}
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        self.request_log = Request(
            self.site,
            self.command,
            self.path,
            self.headers.get("Range", ""),
            bearer,
            self.headers.get("User-Agent", ""),
        )
        with self.hub._lock:
            self.hub.requests.append(self.request_log)
        self._route(unquote(address.path))

    def _route(self, path: str) -> None:
        routes = (
            ("hub", r"/api/whoami-v2", self._whoami),
            ("hub", r"/api/repos/create", self._create),
            ("hub", r"/api/validate-yaml", self._validate_yaml),
            ("hub", r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", self._preupload),
            ("hub", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._lfs_batch),
            ("hub", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", self._commit),
            ("cdn", r"/upload/([^/]+/[^/]+)/([0-9a-f]{64})", self._receive),
            ("hub", r"/api/(?:models/|(?=datasets/))((?:datasets/)?[^/]+/[^/]+)(?:/revision/(.+))?", self._info),
            ("hub", r"/api/models/([^/]+/[^/]+)/auth-check()", self._auth_check),
            ("hub", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?(.*)", self._tree),
            ("hub", r"/api/models/([^/]+/[^/]+)/paths-info/([^/]+)", self._paths_info),
            ("hub", r"/api/resolve-cache/(?:models/)?((?:datasets/)?[^/]+/[^/]+)/([^/]+)/(.+)", self._small_file),
            ("hub", r"/api/v1/models/([^/]+/[^/]+)()", self._modelscope_info),
            ("hub", r"/api/v1/models/([^/]+/[^/]+)/repo/files()", self._modelscope_files),
            ("hub", r"/api/v1/models/([^/]+/[^/]+)/repo()()", self._modelscope_file),
            ("hub", r"/models/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._modelscope_file),
            ("hub", r"/api/v1/model-versions/(\d+)", self._civitai_version),
            ("hub", r"/api/v1/models/(\d+)", self._civitai_model),
            ("hub", r"/api/download/models/(\d+)", self._civitai_download),
            ("hub", r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
            ("cdn", r"/((?:datasets/)?[^/]+/[^/]+)/([0-9a-f]{64})", self._cdn),
        )
        for site, pattern, route in routes:
            if site == self.site and (match := re.fullmatch(pattern, path)):
                return route(*(group or "" for group in match.groups()))
        return self._error(404, "", f"Cannot {self.command} {path}")

    # -- answers -----------------------------------------------------------------------------------------------------

    def _head(self, status: int, headers: dict[str, str], length: int) -> None:
        self.request_log.status = status
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self._head(status, headers or {}, len(content))
        if self.command != "HEAD":
            self.wfile.write(content)
            self.request_log.sent += len(content)

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _error(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._json({"error": message}, status, headers)

    def _fails(self, repository: Repository) -> bool:
        """Answer with what the faults of the repository say, if anything."""
        self.request_log.repo, faults = repository.id, repository.faults
        asked = time.monotonic()
        while time.monotonic() < asked + faults.delay:
            time.sleep(0.02)
        if self._count_down(faults, "broken"):
            self._answer(500, b"Internal Server Error", {"Content-Type": "text/plain"})
            return True
        if self._count_down(faults, "rate_limited"):
            wait, headers = faults.retry_after, {}
            if wait is not None:
                headers = {"Retry-After": str(wait), "RateLimit": f'"api";r=0;t={wait}'}
                headers["RateLimit-Policy"] = '"fixed window";"api";q=500;w=300'
            self._json({"error": "We had to rate limit your IP."}, 429, headers)
            return True
        return False

    def _count_down(self, faults: Faults, name: str) -> bool:
        with self.hub._lock:
            left = getattr(faults, name)
            if left > 0:
                setattr(faults, name, left - 1)
        return left != 0

    def _send_file(self, repository: Repository, file: File, headers: dict[str, str]) -> None:
        """Send a file, or the range that is asked for, with the repository's faults."""
        faults, log = repository.faults, self.request_log
        log.repo, log.file, log.is_lfs = repository.id, file.path, file.is_lfs
        start, end, status = 0, file.size, 200
        if (match := re.fullmatch(r"bytes=(\d+)-(\d*)", log.range)) and not faults.no_range:
            start, end, status = int(match[1]), min(int(match[2] or file.size) + bool(match[2]), file.size), 206
            if start >= file.size:
                return self._answer(416, b"", {"Content-Range": f"bytes */{file.size}"})
            headers = headers | {"Content-Range": f"bytes {start}-{end - 1}/{file.size}"}
        self._head(
            status, {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"} | headers, end - start
        )
        if self.command == "HEAD":
            return None
        is_wrong = file.path in faults.wrong_bytes
        begun = time.monotonic()
        with file.source.open("rb") as stream:
            stream.seek(start)
            while log.sent < end - start:
                most = min(CHUNK, end - start - log.sent)
                if log.is_download:
                    for limit in (faults.cut_after, faults.stall_after):
                        most = most if limit is None or limit <= log.sent else min(most, limit - log.sent)
                    if (
                        faults.stall_after is not None
                        and log.sent >= faults.stall_after
                        and not faults.released.is_set()
                    ):
                        faults.stalled.set()
                        faults.released.wait()
                    if (
                        faults.cut_after is not None
                        and log.sent >= faults.cut_after
                        and self._count_down(faults, "cuts")
                    ):
                        self.close_connection = True
                        self.connection.shutdown(socket.SHUT_RDWR)
                        return None
                content = stream.read(most)
                if is_wrong and start + log.sent + len(content) == file.size:
                    content = content[:-1] + bytes([content[-1] ^ 0xFF])
                self.wfile.write(content)
                log.sent += len(content)
                if faults.bytes_per_second:
                    time.sleep(max(0.0, log.sent / faults.bytes_per_second - (time.monotonic() - begun)))

    # -- Hugging Face ------------------------------------------------------------------------------------------------

    def _whoami(self) -> None:
        if (token := self.request_log.token) not in ACCOUNTS:
            return self._error(401, "", "Invalid credentials in Authorization header")
        name, access = ACCOUNTS[token]
        organizations = ORGANIZATIONS if token in OF_ADA else []
        auth = {"accessToken": {"displayName": "a token", **access}}
        return self._json({"type": "user", "name": name, "orgs": organizations, "auth": auth})

    # -- uploads to Hugging Face

    def _may_write(self, owner: str) -> bool:
        token = self.request_log.token
        return owner in {WRITER: ("ada", "club"), NARROW: ("club",), STRANGER: ("bob",)}.get(token, ())

    def _create(self) -> None:
        wanted = json.loads(self.body)
        owner = wanted.get("organization") or ACCOUNTS.get(self.request_log.token, ("", {}))[0]
        repo = f"{owner}/{wanted['name']}"
        self.request_log.repo = repo
        if not self._may_write(owner):
            return self._error(403, "", f"You don't have the rights to create a model under the namespace {owner!r}")
        if repo in self.hub.repositories:
            return self._error(409, "", "You already created this model repo")
        folder = Path(self.hub.uploads.name, repo)
        folder.mkdir(parents=True)
        self.hub.add(repo, folder, private=wanted.get("visibility", "public") == "private")
        return self._json({"url": f"{self.hub.endpoint}/{repo}", "id": repo})

    def _validate_yaml(self) -> None:
        self._json({"errors": [], "warnings": []})

    def _writable(self, repo: str) -> Repository | None:
        """Find a repository that may be written to, or answer what is wrong."""
        self.request_log.repo = repo
        repository = self.hub.repositories.get(repo)
        if repository is None:
            self._error(404, "RepoNotFound", "Repository not found")
        elif not self._may_write(repo.split("/")[0]):
            self._error(403, "", "Forbidden: you must use a write token to upload to a repository.")
        elif not self._fails(repository):
            return repository
        return None

    def _preupload(self, repo: str, _: str) -> None:
        if repository := self._writable(repo):
            files = json.loads(self.body)["files"]
            known = {path: file.etag for path, file in repository.files.items()}
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(LFS_SUFFIXES) else "regular",
                    "shouldIgnore": False,
                    "oid": known.get(file["path"]),
                }
                for file in files
            ]
            self._json({"files": modes})

    def _lfs_batch(self, repo: str) -> None:
        if self._writable(repo):
            objects = []
            for asked in json.loads(self.body)["objects"]:
                href = f"{self.hub.cdn}/upload/{repo}/{asked['oid']}?Signature=abc"
                is_new = asked["oid"] not in self.hub.received
                objects.append({**asked, **({"actions": {"upload": {"href": href}}} if is_new else {})})
            self._json({"transfer": "basic", "objects": objects})

    def _receive(self, repo: str, oid: str) -> None:
        repository = self.hub.repositories[repo]
        if self._fails(repository):
            return
        if self.request_log.token or hashlib.sha256(self.body).hexdigest() != oid:
            self._answer(400, b"<Error><Code>BadDigest</Code></Error>", {"Content-Type": "application/xml"})
            return
        self.hub.received[oid] = self.body
        self._answer(200, b"")

    def _commit(self, repo: str, _: str) -> None:
        if not (repository := self._writable(repo)):
            return None
        files = {}
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                if value["oid"] not in self.hub.received:
                    return self._error(400, "", f"{value['path']}: the large file was not uploaded")
                files[value["path"]] = self.hub.received[value["oid"]]
        for path, content in files.items():
            target = repository.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        repository.reread()
        page = f"{self.hub.endpoint}/{repo}/commit/{repository.sha}"
        return self._json({"success": True, "commitOid": repository.sha, "commitUrl": page, "hookOutput": ""})

    @contextlib.contextmanager
    def _repository(self, repo: str, revision: str, *, gate: bool = True) -> Iterator[Repository | None]:
        """Find what is asked for, or answer what is wrong and yield None."""
        repository, token = self.hub.repositories.get(repo), self.request_log.token
        if token and token not in ACCOUNTS:
            self._error(401, "", "Invalid credentials in Authorization header")
        elif repository is None or (repository.private and token not in OF_ADA):
            self.request_log.repo = repo
            self._error(404 if token else 401, "RepoNotFound", "Repository not found")
        elif self._fails(repository):
            pass
        elif gate and repository.gated and token not in OF_ADA:
            restricted = f"Access to model {repo} is restricted"
            if token:
                why = f"{restricted} and you are not in the authorized list. Visit https://huggingface.co/{repo} to ask"
                self._error(403, "GatedRepo", f"{why} for access.")
            else:
                why = f"{restricted}. You must have access to it and be authenticated to access it. Please log in."
                self._error(401, "GatedRepo", why)
        elif not repository.has(revision or "main"):
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            yield repository
            return
        yield None

    def _info(self, repo: str, revision: str) -> None:
        with self._repository(repo, revision, gate=False) as repository:
            if repository is None:
                return None
            siblings: list[dict[str, Any]] = [{"rfilename": path} for path in repository.files]
            if self.query.get("blobs", [""])[0].lower() == "true":
                for sibling, file in zip(siblings, repository.files.values(), strict=True):
                    sibling |= {"size": file.size, "blobId": file.oid}
                    if file.is_lfs:
                        sibling["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": 134}
            index = repository.folder / "model_index.json"
            pipeline = json.loads(index.read_bytes()).get("_class_name") if index.is_file() else None
            tags = [*(["diffusers", f"diffusers:{pipeline}"] if pipeline else [])]
            if licence := repository.card.get("license"):
                tags.append(f"license:{licence}")
            info = {
                "_id": hashlib.sha1(repo.encode()).hexdigest()[:24],
                "id": repo,
                "modelId": repo,
                "author": repo.split("/")[0],
                "sha": repository.sha,
                "lastModified": "2025-01-01T00:00:00.000Z",
                "createdAt": "2024-01-01T00:00:00.000Z",
                "private": repository.private,
                "gated": repository.gated,
                "disabled": False,
                "downloads": 1,
                "likes": 1,
                "tags": tags,
                "library_name": "diffusers" if pipeline else None,
                "config": {"diffusers": {"_class_name": pipeline}} if pipeline else {},
                "cardData": repository.card,
                "siblings": siblings,
                "spaces": [],
                "usedStorage": sum(file.size for file in repository.files.values()),
            }
            if chosen := {*self.query.get("expand", ()), *self.query.get("expand[]", ())}:
                info = {key: value for key, value in info.items() if key in chosen | {"_id", "id", "modelId"}}
            return self._json(info)

    def _auth_check(self, repo: str, _: str) -> None:
        with self._repository(repo, "") as repository:
            if repository is not None:
                self._json({})

    def _entry(self, file: File) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "oid": file.oid, "size": file.size, "path": file.path}
        if file.is_lfs:
            entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 134}
        return entry

    def _tree(self, repo: str, revision: str, below: str) -> None:
        with self._repository(repo, revision, gate=False) as repository:
            if repository is None:
                return None
            start = below.rstrip("/") + "/" if below else ""
            entries: dict[str, dict[str, Any]] = {}
            for path, file in repository.files.items():
                if not path.startswith(start):
                    continue
                parts = path.removeprefix(start).split("/")
                for depth in range(1, len(parts)):
                    folder = start + "/".join(parts[:depth])
                    oid = hashlib.sha1(folder.encode()).hexdigest()
                    entries.setdefault(folder, {"type": "directory", "oid": oid, "size": 0, "path": folder})
                entries[path] = self._entry(file)
            if self.query.get("recursive", [""])[0].lower() not in ("true", "1"):
                entries = {path: entry for path, entry in entries.items() if "/" not in path.removeprefix(start)}
            if below and not entries:
                return self._error(404, "EntryNotFound", f"{below} does not exist on {revision!r}")
            first, most = int(self.query.get("cursor", ["0"])[0]), self.hub.tree_page
            headers = {}
            if first + most < len(entries):
                more = "&".join(f"{key}={quote(v)}" for key, vs in self.query.items() for v in vs if key != "cursor")
                path = urlsplit(self.path).path
                headers["Link"] = f'<{self.hub.endpoint}{path}?{more}&cursor={first + most}>; rel="next"'
            return self._json(list(entries.values())[first : first + most], headers=headers)

    def _paths_info(self, repo: str, revision: str) -> None:
        with self._repository(repo, revision, gate=False) as repository:
            if repository is None:
                return
            is_form = "json" not in self.headers.get("Content-Type", "")
            asked = parse_qs(self.body.decode())["paths"] if is_form else json.loads(self.body)["paths"]
            paths = asked if isinstance(asked, list) else [asked]
            self._json([self._entry(repository.files[path]) for path in paths if path in repository.files])

    def _resolve(self, repo: str, revision: str, path: str) -> None:
        with self._repository(repo, revision) as repository:
            if repository is None:
                return None
            file, sha = repository.files.get(path), repository.sha
            self.request_log.file = path
            if file is None:
                message = "Entry not found"
                headers = {"X-Error-Code": "EntryNotFound", "X-Error-Message": message, "X-Repo-Commit": sha}
                return self._answer(404, message.encode(), headers)
            headers = {"X-Repo-Commit": sha, "X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
            if file.is_lfs:
                headers |= {"Location": f"{self.hub.cdn}/{repo}/{file.sha256}?Expires=1&Signature=abc"}
                return self._answer(302, b"Found. Redirecting to the CDN", headers | {"Accept-Ranges": "bytes"})
            kept = repo if repo.startswith("datasets/") else f"models/{repo}"
            headers["Location"] = f"/api/resolve-cache/{kept}/{sha}/{quote(path)}?etag=%22{file.etag}%22"
            return self._answer(307, b"Temporary Redirect", headers)

    def _small_file(self, repo: str, revision: str, path: str) -> None:
        with self._repository(repo, revision) as repository:
            if repository is not None:
                file = repository.files[path]
                self._send_file(repository, file, {"X-Repo-Commit": repository.sha, "ETag": f'"{file.etag}"'})

    def _cdn(self, repo: str, sha256: str) -> None:
        repository = self.hub.repositories[repo]
        file = next((file for file in repository.files.values() if file.sha256 == sha256), None)
        if file is None:
            return self._answer(403, b"<Error><Code>AccessDenied</Code></Error>", {"Content-Type": "application/xml"})
        if self._fails(repository):
            return None
        disposition = f'attachment; filename="{file.source.name}";'
        return self._send_file(repository, file, {"ETag": f'"{sha256[:32]}"', "Content-Disposition": disposition})

    # -- ModelScope --------------------------------------------------------------------------------------------------

    def _modelscope(self, repo: str, revision: str) -> Repository | None:
        """Find a repository as ModelScope does, or answer what is wrong."""
        repository = self.hub.repositories.get(repo)
        self.request_log.repo = repo
        if repository is None:
            return self._modelscope_error(10010205001, "获取模型信息失败，信息：record not found")
        if (repository.private or repository.gated) and self.request_log.token != TOKEN:
            return self._modelscope_error(10010200001, "无权限访问该模型")
        if self._fails(repository):
            return None
        if not repository.has(revision or "master"):
            return self._modelscope_error(10990101004, "获取模型目录树失败，信息：revision not found")
        return repository

    def _modelscope_error(self, code: int, message: str) -> None:
        self._json({"Code": code, "Message": message, "RequestId": "0", "Success": False}, 404)

    def _modelscope_data(self, data: dict[str, Any]) -> None:
        self._json({"Code": 200, "Data": data, "Message": "success", "RequestId": "0", "Success": True})

    def _modelscope_info(self, repo: str, _: str) -> None:
        if repository := self._modelscope(repo, self.query.get("Revision", [""])[0]):
            owner, name = repo.split("/")
            size = sum(file.size for file in repository.files.values())
            data = {"Name": name, "Path": owner, "License": repository.card.get("license", ""), "StorageSize": size}
            self._modelscope_data(data | {"Revision": "master", "Visibility": 1 if repository.private else 5})

    def _modelscope_files(self, repo: str, _: str) -> None:
        if not (repository := self._modelscope(repo, self.query.get("Revision", [""])[0])):
            return
        entries, common = [], {"Revision": repository.sha, "CommittedDate": 1735689600, "CommitMessage": "add"}
        folders = {str(parent.as_posix()) for path in repository.files for parent in Path(path).parents} - {"."}
        for folder in sorted(folders):
            entries.append(
                {"Path": folder, "Name": Path(folder).name, "Type": "tree", "Size": 0, "Sha256": "", **common}
            )
        for file in repository.files.values():
            entry = {"Path": file.path, "Name": Path(file.path).name, "Type": "blob", "Size": file.size, **common}
            entries.append(entry | {"Sha256": file.sha256, "IsLFS": file.is_lfs, "Mode": "33188"})
        if self.query.get("Recursive", [""])[0].lower() != "true":
            root = self.query.get("Root", [""])[0].strip("/")
            entries = [e for e in entries if e["Path"].rpartition("/")[0] == root]
        self._modelscope_data({"Files": entries, "IsVisual": 0, "LatestCommitter": None})

    def _modelscope_file(self, repo: str, revision: str, path: str) -> None:
        path = path or self.query.get("FilePath", [""])[0]
        if not (repository := self._modelscope(repo, revision or self.query.get("Revision", [""])[0])):
            return
        self.request_log.file = path
        if path not in repository.files:
            self._modelscope_error(10010205001, "获取文件失败，信息：record not found")
        else:
            self._send_file(repository, repository.files[path], {"ETag": repository.files[path].sha256})

    # -- Civitai -----------------------------------------------------------------------------------------------------

    def _civitai(self, version: str, kind: str = "version") -> list[Repository]:
        """Find the versions with a number, or those of the model with it; answer 404 if there are none."""
        published = [r for r in self.hub.repositories.values() if r.civitai and r.civitai[kind] == int(version)]
        if not published:
            self._json({"error": f"No model with id {version}"}, 404)
        elif self._fails(published[0]):
            return []
        return published

    def _civitai_about(self, repository: Repository) -> dict[str, Any]:
        about, (file,) = repository.civitai or {}, repository.files.values()
        number = about["version"]
        url = f"{self.hub.endpoint}/api/download/models/{number}"
        digest = file.sha256.upper()
        described = {
            "id": number * 10,
            "name": file.source.name,
            "type": "Model",
            "sizeKB": file.size / 1024,
            "metadata": {"format": "SafeTensor", "size": "pruned", "fp": "fp16"},
            "pickleScanResult": "Success",
            "virusScanResult": "Success",
            "hashes": {"AutoV2": digest[:10], "SHA256": digest},
            "downloadUrl": url,
            "primary": True,
        }
        return {
            "id": number,
            "modelId": about["model"],
            "name": "v1.0",
            "baseModel": about["base_model"],
            "baseModelType": "Standard",
            "status": "Published",
            "availability": "Public",
            "model": {"name": file.source.stem, "type": "Checkpoint", "nsfw": False, "poi": False},
            "files": [described],
            "downloadUrl": url,
        }

    def _civitai_version(self, version: str) -> None:
        if published := self._civitai(version):
            self._json(self._civitai_about(published[0]))

    def _civitai_model(self, model: str) -> None:
        if published := self._civitai(model, "model"):
            versions = [self._civitai_about(repository) for repository in published]
            self._json({"id": int(model), "name": versions[0]["model"]["name"], "modelVersions": versions})

    def _civitai_download(self, version: str) -> None:
        if not (published := self._civitai(version)):
            return
        repository, (file,) = published[0], published[0].files.values()
        token = self.request_log.token or self.query.get("token", [""])[0]
        if repository.login and token != TOKEN:
            message = "The creator of this asset requires you to be logged in to download it"
            self._json({"error": "Unauthorized", "message": message}, 401)
            return
        self._answer(307, b"", {"Location": f"{self.hub.cdn}/{repository.id}/{file.sha256}?X-Amz-Signature=abc"})
