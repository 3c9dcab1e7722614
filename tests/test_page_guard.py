"""The guard in front of the page: what a hostile page in the same browser, or a stranger on the network, can try.

Judged on a real server over real sockets: what a browser would send is written out by hand.
"""

import io
import json
import os
import re
import signal
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import quote, urlencode

import psutil
import pytest
import uvicorn
from PIL import Image
from waiting import LONG_SECONDS

from lora_fp8.errors import UserError
from webui import app, decoder, translations
from webui.context import Place
from webui.guard import CLOSED, Guard
from webui.login import COOKIE, Login, parse_basic_auth
from webui.server import listen

PASSWORD = "correct horse 电池"


class Answer:
    """Status, headers (lower case; a list each) and body."""

    def __init__(self, status: int, headers: list[tuple[str, str]], body: bytes):
        self.status, self.body = status, body
        self.headers: dict[str, list[str]] = {}
        for name, value in headers:
            self.headers.setdefault(name.lower(), []).append(value)

    def one(self, name: str) -> str:
        (value,) = self.headers[name]
        return value


class Served:
    """An ASGI app on a free port."""

    def __init__(self, asgi) -> None:
        self.socket = listen("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        self.server = uvicorn.Server(uvicorn.Config(asgi, log_level="error", timeout_graceful_shutdown=1))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()
        while not self.server.started:
            assert self.thread.is_alive()
            time.sleep(0.02)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str | list[str]) -> Answer:
        """Send exactly these headers; Host is ours unless given, None leaves it out."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=LONG_SECONDS)
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        given = {"host": f"127.0.0.1:{self.port}", **{name.replace("_", "-"): value for name, value in headers.items()}}
        for name, value in given.items():
            for one in value if isinstance(value, list) else [value]:
                connection.putheader(name, one)
        if body is not None:
            connection.putheader("content-length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        found = Answer(
            answer.status, answer.getheaders(), answer.read() if "event-stream" not in str(answer.headers) else b""
        )
        connection.close()
        return found

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("page")
    (folder / "data").mkdir()
    Image.new("RGB", (300, 200), "red").save(folder / "data/a.png")
    (folder / "data/x.html").write_text("<script>alert(1)</script>", encoding="utf-8")
    (folder / "data/lora.safetensors").write_bytes(b"12345")
    (folder / "data/猫 \u202e.txt").write_text("caption", encoding="utf-8")
    return Place(folder / "home", [folder / "data"])


@pytest.fixture(scope="module")
def site(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The page without a login."""
    uploads = tmp_path_factory.mktemp("uploads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(uploads))
        served = Served(app.build(place))
        served.uploads = uploads
        yield served
        served.close()


@pytest.fixture(scope="module")
def locked(site: Served, place: Place) -> Iterator[Served]:
    """The same pages behind a login, on another port."""
    inner = site.server.config.app
    served = Served(Guard(inner, login=Login("me", PASSWORD, place.home / "sessions.json")))
    served.inner = inner
    yield served
    served.close()


@pytest.fixture(autouse=True)
def forgiven(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wrong passwords of one test must not slow the next."""
    yield
    if "locked" in request.fixturenames:
        request.getfixturevalue("locked").server.config.app.login._failures.clear()


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


MULTIPART = (
    b'--b\r\nContent-Disposition: form-data; name="files"; filename="evil.html"\r\nContent-Type: text/html\r\n\r\n'
    b"<script>alert(1)</script>\r\n--b--\r\n"
)
CALL = json.dumps({"data": [], "fn_index": 0, "session_hash": "x"}).encode()
EVIL = "http://evil.example"
REFUSED = {
    "another name": ("GET", "/en/", None, {"host": "evil.example"}),
    "another name on our port": ("GET", "/en/", None, {"host": "evil.example:{port}"}),
    "rebinding: their name as Host and as Origin": (
        "POST",
        "/en/gradio_api/queue/join",
        CALL,
        {"host": "evil.example:{port}", "origin": "http://evil.example:{port}", "content_type": "application/json"},
    ),
    "our name with theirs behind": ("GET", "/en/", None, {"host": "127.0.0.1.evil.example"}),
    "user part": ("GET", "/en/", None, {"host": "127.0.0.1@evil.example"}),
    "a path in the Host (BadHost)": ("GET", "/en/config", None, {"host": "127.0.0.1/en/login?x="}),
    "no Host": ("GET", "/en/", None, {"host": []}),
    "empty Host": ("GET", "/en/", None, {"host": ""}),
    "two Hosts": ("GET", "/en/", None, {"host": ["127.0.0.1", "evil.example"]}),
    "another address": ("GET", "/en/", None, {"host": "10.1.2.3:{port}"}),
    "decimal address": ("GET", "/en/", None, {"host": "2130706433"}),
    "all interfaces": ("GET", "/en/", None, {"host": "0.0.0.0:{port}"}),
    "cross-origin JSON": (
        "POST",
        "/en/gradio_api/queue/join",
        CALL,
        {"origin": EVIL, "content_type": "application/json"},
    ),
    "cross-origin text": ("POST", "/en/gradio_api/queue/join", CALL, {"origin": EVIL, "content_type": "text/plain"}),
    "cross-origin call": (
        "POST",
        "/en/gradio_api/call/submit",
        CALL,
        {"origin": EVIL, "content_type": "application/json"},
    ),
    "cross-origin upload": (
        "POST",
        "/en/gradio_api/upload",
        MULTIPART,
        {"origin": EVIL, "content_type": "multipart/form-data; boundary=b"},
    ),
    "cross-origin upload, Chinese pages": (
        "POST",
        "/zh-CN/gradio_api/upload",
        MULTIPART,
        {"origin": EVIL, "content_type": "multipart/form-data; boundary=b"},
    ),
    "upload from a sandboxed frame": (
        "POST",
        "/en/gradio_api/upload",
        MULTIPART,
        {"origin": "null", "content_type": "multipart/form-data; boundary=b"},
    ),
    "another port of this machine": ("POST", "/en/gradio_api/queue/join", CALL, {"origin": "http://127.0.0.1:8188"}),
    "two Origins": ("POST", "/en/gradio_api/queue/join", CALL, {"origin": ["http://127.0.0.1:{port}", EVIL]}),
    "preflight": (
        "OPTIONS",
        "/en/gradio_api/queue/join",
        None,
        {"origin": EVIL, "access_control_request_method": "POST"},
    ),
    "picture in another site's page": (
        "GET",
        "/picture?path=x",
        None,
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"},
    ),
    "picture in a page on another port": (
        "GET",
        "/picture?path=x",
        None,
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "image"},
    ),
    "report asked for by another site": (
        "GET",
        "/report?run=x",
        None,
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "iframe"},
    ),
    "script in another site's page": (
        "GET",
        "/en/config",
        None,
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors", "sec_fetch_dest": "script"},
    ),
    "frame in another site's page": (
        "GET",
        "/en/",
        None,
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "iframe"},
    ),
    "form of another site, old browser": (
        "POST",
        "/en/gradio_api/upload",
        MULTIPART,
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"},
    ),
    "link to a download": (
        "GET",
        "/download?path=x",
        None,
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"},
    ),
    "events of another site's page": ("GET", "/en/gradio_api/queue/data?session_hash=x", None, {"origin": EVIL}),
    "heartbeat of another site's page": ("GET", "/en/gradio_api/heartbeat/x", None, {"host": "evil.example"}),
    "cancel": ("POST", "/en/gradio_api/cancel", b"{}", {"origin": EVIL}),
    "logout": ("POST", "/logout", b"", {"origin": EVIL}),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("login", [False, True])
def test_what_other_sites_send_is_refused_and_nothing_is_written(
    site: Served, locked: Served, what: str, login: bool
) -> None:
    served = locked if login else site
    method, path, body, headers = REFUSED[what]
    if login:  # even with the cookie, which another site's page never has under SameSite=Strict
        headers = {**headers, "cookie": f"{COOKIE}={session(locked)}"}

    def ported(value):
        return (
            [one.format(port=served.port) for one in value]
            if isinstance(value, list)
            else value.format(port=served.port)
        )

    before = files_below(site.uploads)
    answer = served.ask(method, path, body, **{name: ported(value) for name, value in headers.items()})
    assert answer.status in (400, 403), (answer.status, answer.body[:200])
    assert "access-control-allow-origin" not in answer.headers
    assert files_below(site.uploads) == before


_sessions: dict[int, str] = {}


def session(locked: Served) -> str:
    """A cookie of somebody who logged in."""
    if locked.port not in _sessions:
        _sessions[locked.port] = log_in(locked)
    return _sessions[locked.port]


def log_in(locked: Served, user: str = "me", password: str = PASSWORD) -> str:
    form = urlencode({"username": user, "password": password}).encode()
    answer = locked.ask("POST", "/en/login", form, content_type="application/x-www-form-urlencoded")
    assert answer.status == 200, (answer.status, answer.body)
    cookie = answer.one("set-cookie")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    return re.match(rf"{COOKIE}=([^;]+)", cookie)[1]


def test_what_the_page_itself_sends_is_answered(site: Served) -> None:
    ours = f"http://127.0.0.1:{site.port}"
    browser = {"origin": ours, "sec_fetch_site": "same-origin", "sec_fetch_mode": "cors", "sec_fetch_dest": "empty"}
    assert site.ask("GET", "/en/").status == 200
    assert site.ask("GET", "/zh-CN/settings", host=f"localhost:{site.port}").status == 200
    assert site.ask("GET", "/en/", host=f"[::1]:{site.port}").status == 200
    assert site.ask("GET", "/en/config", **browser).status == 200
    sent = {"content_type": "multipart/form-data; boundary=b", **browser}
    answer = site.ask("POST", "/en/gradio_api/upload", MULTIPART, **sent)
    assert answer.status == 200
    assert [path.read_bytes() for path in files_below(site.uploads)] == [b"<script>alert(1)</script>"]
    # A link on another site opens the page, and only that.
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert site.ask("GET", "/en/new", **link).status == 200
    assert site.ask("GET", "/", accept_language="zh-TW,zh;q=0.9", **link).one("location") == "/zh-CN/"
    # An address without a language, or with a short one, leads to its page and nowhere else.
    for asked, answered in {
        "/new": "/en/new",
        "/run?run=a%20b": "/en/run?run=a%20b",
        "/zh/": "/zh-CN/",
        "/cn/dataset": "/zh-CN/dataset",
        "/zh-cn/new?page=//evil.example&language=x": "/zh-CN/new?page=//evil.example&language=x",
    }.items():
        assert site.ask("GET", asked).one("location") == answered


@pytest.mark.parametrize(
    ("path", "language"), [("/zh-CN/xyz", "zh-CN"), ("/en/run/12", "en"), ("/xyz", "zh-CN"), ("/zh/xyz", "zh-CN")]
)
def test_an_address_without_a_page_is_told_to_people(site: Served, path: str, language: str) -> None:
    person = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8", "accept_language": "zh-CN,zh;q=0.9"}
    answer = site.ask("GET", path, **person)
    assert answer.status == 404 and answer.one("content-type").startswith("text/html")
    assert translations.say(language, "site.unknown") in answer.body.decode() and b"<script" not in answer.body
    links = re.findall(r'href="(/[^"]+)"', answer.body.decode())
    assert links == [f"/{language}/", f"/{language}/new"]
    assert all(site.ask("GET", link).status == 200 for link in links)
    for_programs = site.ask("GET", path)
    assert for_programs.status == 404 and "detail" in json.loads(for_programs.body)


def test_a_name_that_was_allowed_is_answered() -> None:
    wide = Guard(None, names=["Studio.lan"], addresses=True)
    hosts = ["studio.lan", "STUDIO.lan:7860", "192.168.1.20:7860", "[fe80::1]:7860", "localhost"]
    assert all(wide._is_own_host(host) for host in hosts)
    assert not any(
        wide._is_own_host(host) for host in ["evil.example", "studio.lan.evil.example", "192.168.1.20.evil.example", ""]
    )


def test_headers_on_every_answer(site: Served) -> None:
    for path in ("/en/", "/en/config", "/en/theme.css", "/picture?path=x", "/nothing", "/icon.svg"):
        answer = site.ask("GET", path)
        assert "frame-ancestors 'none'" in answer.one("content-security-policy") or path == "/picture?path=x"
        assert answer.one("x-content-type-options") == "nosniff" and answer.one("x-frame-options") == "DENY"
        assert answer.one("referrer-policy") == "same-origin"
        assert answer.one("cross-origin-resource-policy") == "same-origin"
    policy = site.ask("GET", "/en/").one("content-security-policy")
    assert not re.search(r"https?:|\*", policy)  # nothing may be loaded from, or sent to, another host


def test_large_requests_are_refused(site: Served) -> None:
    assert site.ask("POST", "/en/gradio_api/queue/join", None, content_length=str(17 * 2**20)).status == 413
    assert site.ask("POST", "/en/gradio_api/upload", None, content_length=str(3 * 2**30)).status == 413
    assert site.ask("POST", "/en/gradio_api/queue/join", None, content_length="-1").status in (400, 413)


def every_route(asgi) -> Iterator[tuple[str, str]]:
    """(method, path with something in each place) of all routes, those of mounted apps too."""

    def walk(routes, prefix: str):
        for route in routes:
            path = prefix + getattr(route, "path", "")
            if inner := getattr(route, "routes", None) or getattr(
                getattr(route, "original_router", None), "routes", None
            ):
                yield from walk(inner, path)
            else:
                for method in getattr(route, "methods", None) or ("GET",):
                    yield method, re.sub(r"\{[^}]*\}", "x", path)

    while isinstance(asgi, Guard):
        asgi = asgi.app
    yield from walk(asgi.routes, "")


def test_without_the_password_only_the_login_page_answers(locked: Served) -> None:
    routes = sorted(set(every_route(locked.inner)))
    assert len(routes) > 150
    for method, path in [*routes, ("GET", "/nothing"), ("GET", "/en/static/x"), ("GET", "/docs"), ("GET", "/EN/login")]:
        answer = locked.ask(method, path, b"" if method == "POST" else None)
        if re.fullmatch(r"/(en|zh-CN)/login/?", path):
            assert answer.status == (200 if method == "GET" else 401), path
        elif path == "/logout":
            assert answer.status == 303
        else:
            assert answer.status == 404 if CLOSED.fullmatch(path) else answer.status == 401, (method, path)
            assert b"lora" not in answer.body.lower()


def test_the_health_check_of_a_container_is_answered_without_the_password(locked: Served) -> None:
    dockerfile = (Path(__file__).resolve().parent.parent / "Dockerfile").read_text(encoding="utf-8")
    (path,) = re.findall(r"http://127\.0\.0\.1:7860(/[^']*)", dockerfile)
    assert locked.ask("GET", path).status == 200


def test_a_browser_without_the_password_is_led_to_the_form_and_back(locked: Served) -> None:
    html = {"accept": "text/html,*/*"}
    answer = locked.ask("GET", "/zh-CN/run?run=a%20b", **html)
    assert (answer.status, answer.one("location")) == (303, "/zh-CN/login?next=%2Fzh-CN%2Frun%3Frun%3Da%2520b")
    form = locked.ask("GET", answer.one("location"), **html)
    assert form.status == 200 and '<html lang="zh-CN">' in form.body.decode() and "<script" not in form.body.decode()
    assert b'<link rel="icon" href="data:image/svg+xml;base64,' in form.body  # a browser asks for no favicon.ico then
    wrong = locked.ask("POST", answer.one("location"), b"username=me&password=wrong", **html)
    assert wrong.status == 401 and "set-cookie" not in wrong.headers and "密码" in wrong.body.decode()
    right = locked.ask(
        "POST", answer.one("location"), urlencode({"username": "me", "password": PASSWORD}).encode(), **html
    )
    assert (right.status, right.one("location")) == (303, "/zh-CN/run?run=a%20b")


@pytest.mark.parametrize(
    "after", ["//evil.example", "https://evil.example", "/\\evil.example", "evil", "/%0d%0aX:y\r\n", ""]
)
def test_the_login_leads_to_no_other_site(locked: Served, after: str) -> None:
    answer = locked.ask("GET", f"/en/login?next={quote(after)}", cookie=f"{COOKIE}={session(locked)}")
    assert answer.one("location") == "/en/"
    assert "x" not in answer.headers


def test_sessions_and_passwords(locked: Served, place: Place) -> None:
    cookie = f"other=1; {COOKIE}={log_in(locked)}"
    assert locked.ask("GET", "/en/config", cookie=cookie).status == 200

    def by(user: str, password: str) -> int:
        given = b64encode(f"{user}:{password}".encode()).decode()
        return locked.ask("GET", "/en/config", authorization=f"Basic {given}").status

    assert by("me", PASSWORD) == 200
    assert (by("me", "wrong"), by("you", PASSWORD)) == (401, 401)
    for broken in ("Basic", "Basic !!!", "Bearer x", "Basic " + b64encode(b"\xff:").decode()):
        assert locked.ask("GET", "/en/config", authorization=broken).status == 401
    # What is on the disk lets nobody in, and nobody else reads it.
    file = place.home / "sessions.json"
    kept = file.read_text(encoding="utf-8")
    assert cookie.partition(f"{COOKIE}=")[2] not in kept and PASSWORD not in kept and file.stat().st_mode & 0o077 == 0
    # The session outlives a restart, not a change of the password, and not logging out.
    token = cookie.partition(f"{COOKIE}=")[2]
    assert Login("me", PASSWORD, file).has_session(token)
    assert not Login("me", PASSWORD + "2", file).has_session(token)
    assert locked.ask("POST", "/logout", b"", cookie=cookie).status == 303
    assert locked.ask("GET", "/en/config", cookie=cookie).status == 401
    assert not Login("me", PASSWORD, file).has_session(token)


def test_guessing_is_slowed_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("webui.login.time.monotonic", lambda: clock[0])
    login = Login("me", PASSWORD, tmp_path / "sessions.json")
    tried = 0
    while clock[0] < 1000 + 3600:
        clock[0] += login.get_wait("10.0.0.9") + 0.01
        assert login.check_password("me", f"guess {tried}", "10.0.0.9") == (False, 0)
        tried += 1
    assert tried < 40
    assert login.get_wait("10.0.0.8") == 0  # others are not locked out
    clock[0] += 301
    assert login.check_password("me", PASSWORD, "10.0.0.9") == (True, 0) and login.get_wait("10.0.0.9") == 0


def test_a_waiting_address_is_told_so(locked: Served) -> None:
    cookie = f"{COOKIE}={session(locked)}"
    locked.server.config.app.login._failures["127.0.0.1"] = (20, time.monotonic() + 60)
    answer = locked.ask("POST", "/en/login", b"username=me&password=x")
    assert answer.status == 429 and int(answer.one("retry-after")) > 50
    assert locked.ask("GET", "/en/config", authorization="Basic bWU6eA==").status == 429
    assert locked.ask("GET", "/en/config", cookie=cookie).status == 200


@pytest.mark.parametrize(("user", "password"), [("", PASSWORD), ("me", ""), ("me", "short")])
def test_a_weak_login_is_refused(tmp_path: Path, user: str, password: str) -> None:
    with pytest.raises(UserError, match="password of at least 10"):
        Login(user, password, tmp_path / "sessions.json")


def test_basic_credentials_are_read_as_the_rfc_says() -> None:
    assert parse_basic_auth("Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ==") == ("Aladdin", "open sesame")  # RFC 7617, section 2
    assert parse_basic_auth("basic dGVzdDoxMjPCow==") == ("test", "123£")  # RFC 7617, section 2.1


def test_websockets_are_guarded_too(locked: Served) -> None:
    """No page of ours opens one; a route that some library adds must not be open for that."""
    key = "dGhlIHNhbXBsZSBub25jZQ=="
    upgrade = {"connection": "Upgrade", "upgrade": "websocket", "sec_websocket_version": "13", "sec_websocket_key": key}
    assert locked.ask("GET", "/en/gradio_api/queue/join", **upgrade).status in (401, 403)
    assert locked.ask("GET", "/en/gradio_api/queue/join", origin=EVIL, **upgrade).status == 403


# ---------------------------------------------------------------------------------------------- pictures and downloads


def ask_file(site: Served, route: str, path: Path | str, **more: str) -> Answer:
    headers = {"if_none_match": more.pop("tag")} if "tag" in more else {}
    return site.ask("GET", f"{route}?{urlencode({'path': str(path), **more})}", **headers)


def test_pictures_are_encoded_anew(site: Served, place: Place, make_picture: Callable[..., Path]) -> None:
    root = place.given[0]
    answer = ask_file(site, "/picture", root / "a.png", width="96")
    picture = Image.open(io.BytesIO(answer.body))
    assert (answer.status, answer.one("content-type"), picture.format) == (200, "image/webp", "WEBP")
    assert picture.size == (96, 64) and picture.convert("RGB").getpixel((10, 10))[0] > 240
    assert "default-src 'none'" in answer.one("content-security-policy")
    assert ask_file(site, "/picture", root / "a.png", width="96", tag=answer.one("etag")).status == 304
    assert Image.open(io.BytesIO(ask_file(site, "/picture", root / "a.png").body)).size == (300, 200)
    # What hides in a file does not come along, and a changed file is seen.
    hiding = make_picture(root / "b.jpg", comment=b"<script>alert(1)</script>")
    first = ask_file(site, "/picture", hiding)
    assert first.status == 200 and b"script" not in first.body
    make_picture(hiding, colour="blue")
    assert ask_file(site, "/picture", hiding).body != first.body


@pytest.fixture
def make_picture() -> Callable[..., Path]:
    def make(path: Path, size: tuple[int, int] = (64, 64), colour: str = "red", **options) -> Path:
        Image.new("RGB", size, colour).save(path, **options)
        return path

    return make


def test_what_is_no_picture_is_told_and_the_next_one_is_shown(site: Served, place: Place, tmp_path: Path) -> None:
    root = place.given[0]
    good = (root / "a.png").read_bytes()
    bomb = tmp_path / "bomb.png"
    Image.new("1", (20000, 20000)).save(bomb)
    cases = {
        "empty.png": b"",
        "text.png": b"hello",
        "torn.png": good[: len(good) // 2],
        "bomb.png": bomb.read_bytes(),
        "page.svg": b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>',
        "ps.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    }
    for name, data in cases.items():
        (root / name).write_bytes(data)
        answer = ask_file(site, "/picture", root / name)
        assert answer.status == 404 and name in answer.body.decode() and b"Traceback" not in answer.body, name
        assert answer.one("content-type").startswith("text/plain")
    for path in (root, root / "none.png", "/etc/passwd", root / "../home/queue.db", "a.png", ""):
        assert ask_file(site, "/picture", path).status == 404
    assert ask_file(site, "/picture", root / "a.png", width="640").status == 200


def test_a_decoder_that_dies_takes_nothing_with_it(place: Place) -> None:
    """A child that is killed, as by a crash or the system's memory watch: told, and the next one works."""
    decoders, picture = decoder.Decoders(count=1), place.given[0] / "a.png"
    assert decoders.encode_webp(picture, 96)
    child = decoders._free.get()
    child.process.kill()
    child.process.wait()
    with pytest.raises(decoder._Ended, match="its decoder crashed"):
        child.ask({"do": "show", "path": str(picture), "width": 96}, 30)
    decoders._free.put(child)
    assert decoders.encode_webp(picture, 96)[:4] == b"RIFF"


def test_a_decoder_that_takes_too_long_is_ended(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    path = place.given[0] / "a.png"
    decoders = decoder.Decoders(count=1)
    decoders.encode_webp(path)
    child = decoders._free.get()
    assert child is not None
    os.kill(child.process.pid, signal.SIGSTOP)  # it never answers again
    decoders._free.put(child)
    monkeypatch.setattr(decoder, "MOST_SECONDS", 1)
    with pytest.raises(UserError, match="a.png: decoding did not finish within 1 s"):
        decoders.encode_webp(path)
    assert child.process.poll() == -signal.SIGKILL
    monkeypatch.undo()
    assert decoders.encode_webp(path)  # by a new child


def test_a_pipe_is_no_picture(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.png")  # opening it would wait for ever
    with pytest.raises(UserError, match="a.png"):
        decoder.Decoders(count=1).encode_webp(tmp_path / "a.png")


def test_a_decoder_may_take_only_so_much_memory(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    child = decoder._Child()
    assert child.ask({"do": "show", "path": str(place.given[0] / "a.png"), "width": 96}, 30)
    assert psutil.Process(child.process.pid).rlimit(psutil.RLIMIT_AS) == (decoder.MOST_MEMORY, decoder.MOST_MEMORY)
    pid = child.process.pid
    child.process.stdin.close()  # as when the page ends
    assert child.process.wait(LONG_SECONDS) == 0 and not psutil.pid_exists(pid)


def test_downloads_are_saved_and_never_opened(site: Served, place: Place) -> None:
    root = place.given[0]
    answer = ask_file(site, "/download", root / "lora.safetensors")
    assert (answer.status, answer.body) == (200, b"12345")
    assert answer.one("content-disposition") == 'attachment; filename="lora.safetensors"'
    assert answer.one("content-type") == "application/octet-stream" and "sandbox" in answer.one(
        "content-security-policy"
    )
    for path in (
        root / "x.html",
        root,
        root / "none.json",
        place.home / "settings.toml",
        "/etc/hostname",
        "/etc/passwd",
    ):
        assert ask_file(site, "/download", path).status == 404


def test_gradios_own_file_route_gives_nothing_of_ours(site: Served, place: Place) -> None:
    root = place.given[0]
    for path in (root / "a.png", "/etc/passwd", place.home / "sessions.json", Path.cwd() / "pyproject.toml"):
        assert site.ask("GET", f"/en/gradio_api/file={path}").status in (403, 404)
    for path in ("file=http://127.0.0.1:1/x", "file=https://evil.example/x", "proxy=https://evil.example/x"):
        assert site.ask("GET", f"/en/gradio_api/{path}").status == 404
