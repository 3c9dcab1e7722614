"""What stands in front of the whole site, in ASGI: whom it answers, what it refuses to read, and its headers.

A page on 127.0.0.1 is reached by every site that the same browser has open. So each request, also those to Gradio's own
routes, must name this page as its Host (another site's name that points here is refused: DNS rebinding), must not come
from another site's page (Origin, Sec-Fetch-Site), and must be logged in where there is a login. Nothing is exempt by
the beginning of its path. The path is the server's own reading (`scope["path"]`), never what the Host header makes of
it.
"""

import asyncio
import base64
import html
import ipaddress
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote

from . import words
from .login import COOKIE, SESSION_SECONDS, Login, basic

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MOST_BODY = 16 * 2**20  # bytes of a request that is no upload: a caption, a config, a chart's cursor
MOST_UPLOAD = 2 * 2**30
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
CLOSED = re.compile(
    r"/(en|zh-CN)/(openapi\.json|monitoring.*|svelte/.*|pwa_icon.*|gradio_api/(openapi\.json|deep_link|user|token|runs"
    r"|login_check|dev/.*|custom_component/.*|proxy=.*|file=https?:.*|stream/.*|process_recording|vibe-.*"
    r"|undo-vibe-edit))/?"
)
"""Routes that Gradio brings and this page does not use: other servers' files, editing the page, recordings."""
POLICY = "; ".join(
    [
        "default-src 'self'",
        # Gradio's page starts with inline scripts, and its HTML component compiles its templates.
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "media-src 'self' blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with "no-referrer" a form is sent as of Origin "null": nobody could log in
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
}
ICON = base64.b64encode((Path(__file__).parent / "static" / "icon.svg").read_bytes()).decode()
"""In the login page itself: a browser would ask for /favicon.ico, which nobody gets who is not in."""
log = logging.getLogger("lora_fp8.page")


class Guard:
    """ASGI middleware around the site.

    Args:
        app: the site.
        names: Host names that it answers to beside 127.0.0.1, localhost and [::1], without ports.
        addresses: it also answers to any IP address as its Host; for a page that listens to other machines. A name that
            was pointed here by somebody else is never an address.
        login: who may in; None lets in whoever reaches the page.
    """

    def __init__(self, app: Any, names: Iterable[str] = (), addresses: bool = False, login: Login | None = None):
        self.app, self.login, self.addresses = app, login, addresses
        self.names = {*LOOPBACK, *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        refusal = self._refused(scope, headers)
        if refusal is None and self.login is not None:
            found = dict(headers)
            if _login_language(scope["path"]):
                return await self._login_page(scope, found, receive, send)
            if scope["path"] == "/logout":
                return await self._logout(found, scope, send)
            if (waits := self._waits(found, scope)) or not await self._known(found, scope):
                refusal = (429, f"too many wrong passwords; try again in {waits} s") if waits else (401, "log in first")
                if not waits and scope["type"] == "http" and "text/html" in found.get("accept", ""):
                    start = f"/{_language(scope['path'], found)}/login?next={quote(_asked(scope), safe='')}"
                    return await _answer(send, 303, "", {"location": start})
        if refusal is not None:
            return await _refuse(scope, receive, send, *refusal)
        return await self.app(scope, _bounded(receive, scope), _with_headers(send))

    # -- whom it answers

    def _refused(self, scope: Scope, headers: list[tuple[str, str]]) -> tuple[int, str] | None:
        """Status and reason, if this request is not for us."""
        hosts = [value for name, value in headers if name == "host"]
        origins = [value for name, value in headers if name == "origin"]
        if len(hosts) != 1 or not self._ours(hosts[0]):
            return 403, "the address in your browser is none of this page's (see lora-fp8 ui --name)"
        if len(origins) > 1 or any(origin.partition("://")[2].lower() != hosts[0].lower() for origin in origins):
            return 403, "asked by a page of another site"
        found = dict(headers)
        if found.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            # A link on another site may lead here, as long as it only opens a page.
            opens = found.get("sec-fetch-mode") == "navigate" and found.get("sec-fetch-dest") == "document"
            if scope["type"] != "http" or scope["method"] != "GET" or not opens or not _is_page(scope["path"]):
                return 403, "asked by a page of another site"
        if CLOSED.fullmatch(scope["path"]):
            return 404, "there is nothing here"
        length = found.get("content-length", "0")
        if not length.isdigit() or int(length) > _most(scope["path"]):
            return 413, "too large"
        return None

    def _ours(self, host: str) -> bool:
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", host)
        if match is None:
            return False
        name = match[1].lower()
        return name in self.names or (self.addresses and _is_address(name))

    # -- who is in

    async def _known(self, headers: dict[str, str], scope: Scope) -> bool:
        if self.login.knows(_cookie(headers)):
            return True
        given = basic(headers.get("authorization", ""))
        return given is not None and self._right(*given, scope)

    def _right(self, user: str, password: str, scope: Scope) -> bool:
        right = self.login.right(user, password, _address(scope))
        if not right:
            log.warning("a wrong user or password from %s", _address(scope))
        return right

    def _waits(self, headers: dict[str, str], scope: Scope) -> int:
        """Seconds that this address has to wait before a password of it is looked at; sessions go on."""
        return self.login.wait(_address(scope)) if headers.get("authorization") else 0

    async def _login_page(self, scope: Scope, headers: dict[str, str], receive: Receive, send: Send) -> None:
        """GET: the form. POST: a cookie, and on to the page that was asked for (a browser) or 200 (a program)."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD", "POST"):
            return await _refuse(scope, receive, send, 405, "GET or POST")
        language = _login_language(scope["path"])
        query = parse_qs(scope["query_string"].decode("latin-1"))
        after = _local(query.get("next", [""])[0]) or f"/{language}/"
        person = "text/html" in headers.get("accept", "")
        if scope["method"] != "POST":
            if self.login.knows(_cookie(headers)):
                return await _answer(send, 303, "", {"location": after})
            return await _answer(send, 200, _form(language, after, ""), {"content-type": "text/html; charset=utf-8"})
        wait = self.login.wait(_address(scope))
        form = {} if wait else parse_qs((await _body(receive, 8192)).decode("latin-1"), encoding="utf-8")
        if not wait and self._right(form.get("username", [""])[0], form.get("password", [""])[0], scope):
            secure = "; Secure" if scope.get("scheme") == "https" else ""
            cookie = (
                f"{COOKIE}={self.login.begin()}; Path=/; HttpOnly; SameSite=Strict; Max-Age={SESSION_SECONDS}{secure}"
            )
            if person:
                return await _answer(send, 303, "", {"location": after, "set-cookie": cookie})
            told = {"content-type": "application/json", "set-cookie": cookie}
            return await _answer(send, 200, json.dumps({"success": True}), told)
        await asyncio.sleep(0.3)
        text = words.say(language, "login.wait", seconds=wait) if wait else words.say(language, "login.wrong")
        status, more = (429, {"retry-after": str(wait)}) if wait else (401, {})
        if person:
            more |= {"content-type": "text/html; charset=utf-8"}
            return await _answer(send, status, _form(language, after, text), more)
        await _answer(send, status, json.dumps({"detail": text}), more | {"content-type": "application/json"})

    async def _logout(self, headers: dict[str, str], scope: Scope, send: Send) -> None:
        if scope.get("method") == "POST":
            self.login.end(_cookie(headers))
        gone = f"{COOKIE}=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0"
        await _answer(send, 303, "", {"location": f"/{_language('', headers)}/login", "set-cookie": gone})


# -------------------------------------------------------------------------------------------------------------- pieces


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_page(path: str) -> bool:
    return re.fullmatch(r"/|/(en|zh-CN)(/[a-z]*)?/?", path) is not None


def _most(path: str) -> int:
    return MOST_UPLOAD if path.rstrip("/").endswith("/gradio_api/upload") else MOST_BODY


def _login_language(path: str) -> str:
    match = re.fullmatch(r"/(en|zh-CN)/login/?", path)
    return match[1] if match else ""


def _language(path: str, headers: dict[str, str]) -> str:
    first = path.split("/")[1] if "/" in path else ""
    return first if first in words.LANGUAGES else words.preferred(headers.get("accept-language", ""))


def _asked(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    return quote(scope["path"], safe="/") + (f"?{query}" if query else "")


def _local(path: str) -> str:
    """The path, if it is one of this site: an open redirect would lend our name to another."""
    return path if re.fullmatch(r"/(?![/\\])[\x21-\x5b\x5d-\x7e]*", path) else ""


def _cookie(headers: dict[str, str]) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def _address(scope: Scope) -> str:
    return (scope.get("client") or ("",))[0]


async def _body(receive: Receive, most: int) -> bytes:
    """A request's body, as far as it is not longer than `most`; longer ones are cut, and then fit nothing."""
    data, more = b"", True
    while more and len(data) <= most:
        message = await receive()
        if message["type"] != "http.request":
            break
        data, more = data + message.get("body", b""), message.get("more_body", False)
    return data[:most]


def _bounded(receive: Receive, scope: Scope) -> Receive:
    """A body without a length, in chunks, ends where it is too long."""
    if scope["type"] != "http":
        return receive
    seen, most = 0, _most(scope["path"])

    async def counted() -> MutableMapping[str, Any]:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return {"type": "http.disconnect"} if seen > most else message

    return counted


def _with_headers(send: Send) -> Send:
    """Our headers on every answer, but for those that it has itself; none that let other sites read it."""

    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = [(n, v) for n, v in message.get("headers", []) if not n.lower().startswith(b"access-control-")]
            has = {name.lower() for name, _ in own}
            own += [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in has]
            message = {**message, "headers": own}
        await send(message)

    return sent


async def _answer(send: Send, status: int, text: str, headers: dict[str, str]) -> None:
    body = text.encode()
    sent = {"cache-control": "no-store", "content-length": str(len(body)), **headers}
    fields = [(name.encode(), value.encode("latin-1")) for name, value in sent.items()]
    await _with_headers(send)({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, reason: str) -> None:
    if scope["type"] == "websocket":
        await receive()
        return await send({"type": "websocket.close", "code": 1008, "reason": reason})
    await _answer(send, status, json.dumps({"detail": reason}), {"content-type": "application/json"})


def _form(language: str, after: str, wrong: str) -> str:
    """The login page: no script, nothing from anywhere."""

    def say(key: str) -> str:
        return html.escape(words.say(language, key))

    others = " · ".join(
        f'<a href="/{other}/login?next={quote(after, safe="")}" lang="{other}">{title}</a>'
        for other, title in words.LANGUAGES.items()
        if other != language
    )
    told = f'<p class="wrong" role="alert">{html.escape(wrong)}</p>' if wrong else ""
    return f"""<!doctype html><html lang="{language}"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{say("login.title")}</title>
<link rel="icon" href="data:image/svg+xml;base64,{ICON}"><style>
:root{{color-scheme:light dark;background:Canvas;color:CanvasText}}
body{{font:16px/1.5 system-ui,sans-serif;max-width:22rem;margin:12vh auto;padding:0 1rem}}
label{{display:block;margin:.8rem 0 .2rem}} button{{margin-top:1.2rem;cursor:pointer}} .wrong{{color:#c33}}
input,button{{font:inherit;width:100%;box-sizing:border-box;padding:.5rem .6rem}}
input,button{{border:1px solid #8888;border-radius:.4rem}}
@media(prefers-color-scheme:dark){{.wrong{{color:#f87171}}}}
</style></head><body><main><h1>{say("site.title")}</h1>{told}
<form method="post" action="/{language}/login?next={quote(after, safe="")}">
<label for="u">{say("login.user")}</label><input id="u" name="username" autocomplete="username" autofocus required>
<label for="p">{say("login.password")}</label>
<input id="p" name="password" type="password" autocomplete="current-password" required>
<button>{say("login.go")}</button></form><p>{others}</p></main></body></html>"""
