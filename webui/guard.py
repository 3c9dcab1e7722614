"""ASGI middleware in front of the whole site: who is answered, what is refused unread, and the security headers.

Every site that is open in the same browser can reach a page on 127.0.0.1. So every request, also to Gradio's own
routes, must name this page as its Host (this stops DNS rebinding, where another name points here), must not come from
another site's page (Origin, Sec-Fetch-Site), and must be logged in if there is a login. No path is exempt by its
beginning. The path is the server's own (`scope["path"]`), never what the Host header makes of it.
"""

import asyncio
import html
import ipaddress
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, quote

from lora_fp8.errors import Message

from . import plain_page, translations
from .login import COOKIE, SESSION_SECONDS, Login, parse_basic_auth

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MOST_BODY = 16 * 2**20  # bytes of a request other than an upload: a caption, a config, a chart's cursor
MOST_UPLOAD = 2 * 2**30
UPLOADS = re.compile(r".*/gradio_api/upload/?|/images/(en|zh-CN)/upload")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
CLOSED = re.compile(
    r"/(en|zh-CN)/(openapi\.json|monitoring.*|svelte/.*|pwa_icon.*|gradio_api/(openapi\.json|deep_link|user|token|runs"
    r"|login_check|dev/.*|custom_component/.*|proxy=.*|file=https?:.*|stream/.*|process_recording|vibe-.*"
    r"|undo-vibe-edit))/?"
)
"""Gradio's routes that this page does not use: other servers' files, editing the page, recordings."""
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
    "referrer-policy": "same-origin",  # with "no-referrer" forms send the Origin "null", and nobody could log in
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
}
"""Embedded in the login page, because /favicon.ico is refused without a login."""
log = logging.getLogger("lora_fp8.page")


class Guard:
    """ASGI middleware around the site.

    Args:
        app: the site.
        names: accepted Host names beside 127.0.0.1, localhost and [::1], without ports.
        addresses: also accept any IP address as Host, for a page that listens to other machines. A name that somebody
            pointed here is never an address.
        login: who may log in; None admits everybody who reaches the page.
    """

    def __init__(self, app: Any, names: Iterable[str] = (), addresses: bool = False, login: Login | None = None):
        self.app, self.login, self.addresses = app, login, addresses
        self.names = {*LOOPBACK, *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or refuse it."""
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        refusal = self._find_refusal(scope, headers)
        if refusal is None and self.login is not None:
            header = dict(headers)
            if _parse_login_language(scope["path"]):
                return await self._serve_login(self.login, scope, header, receive, send)
            if scope["path"] == "/logout":
                return await self._serve_logout(self.login, header, scope, send)
            known, waits = self._authenticate(self.login, header, scope)
            if not known:
                refusal = 401, Message("log in first")
                if waits:
                    refusal = 429, Message("too many wrong passwords; try again in {seconds} s", seconds=waits)
                if not waits and scope["type"] == "http" and "text/html" in header.get("accept", ""):
                    wanted = quote(_get_requested_url(scope), safe="")
                    start = f"/{_choose_language(scope['path'], header)}/login?next={wanted}"
                    return await _send_answer(send, 303, "", {"location": start})
        if refusal is not None:
            return await _refuse(scope, receive, send, *refusal)
        return await self.app(scope, _limit_body(receive, scope), _add_headers(send))

    # -- whom it answers

    def _find_refusal(self, scope: Scope, headers: list[tuple[str, str]]) -> tuple[int, Message] | None:
        """Return status and reason if this request is refused, else None."""
        hosts = [value for name, value in headers if name == "host"]
        origins = [value for name, value in headers if name == "origin"]
        if len(hosts) != 1 or not self._is_own_host(hosts[0]):
            return 403, Message("the address in your browser does not belong to this page (see lora-fp8 ui --name)")
        if len(origins) > 1 or any(origin.partition("://")[2].lower() != hosts[0].lower() for origin in origins):
            return 403, OF_ANOTHER_SITE
        header = dict(headers)
        if header.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            # A link on another site may open a page here, and nothing else.
            opens = header.get("sec-fetch-mode") == "navigate" and header.get("sec-fetch-dest") == "document"
            if scope["type"] != "http" or scope["method"] != "GET" or not opens or not _is_page(scope["path"]):
                return 403, OF_ANOTHER_SITE
        if CLOSED.fullmatch(scope["path"]):
            return 404, Message("there is nothing here")
        length = header.get("content-length", "0")
        if not length.isdigit() or int(length) > _get_max_body_size(scope["path"]):
            return 413, Message("the request is too large")
        return None

    def _is_own_host(self, host: str) -> bool:
        match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", host)
        if match is None:
            return False
        name = match[1].lower()
        return name in self.names or (self.addresses and _is_address(name))

    # -- who is in

    def _authenticate(self, login: Login, headers: dict[str, str], scope: Scope) -> tuple[bool, int]:
        """Return whether this request is logged in, and the seconds until a password from this address is checked.

        Sessions stay valid meanwhile, except in a request that also sends a password.
        """
        given = parse_basic_auth(headers.get("authorization", ""))
        if headers.get("authorization") and (wait := login.get_wait(_get_client_address(scope))):
            return False, wait
        if login.has_session(_read_cookie(headers)):
            return True, 0
        return (False, 0) if given is None else self._check_password(login, *given, scope)

    def _check_password(self, login: Login, user: str, password: str, scope: Scope) -> tuple[bool, int]:
        right, wait = login.check_password(user, password, _get_client_address(scope))
        if not right and not wait:
            log.warning("a wrong user or password from %s", _get_client_address(scope))
        return right, wait

    async def _serve_login(
        self, login: Login, scope: Scope, headers: dict[str, str], receive: Receive, send: Send
    ) -> None:
        """Answer GET with the form, and POST with a cookie: browsers go on to the wanted page, programs get 200."""
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD", "POST"):
            return await _refuse(scope, receive, send, 405, Message("only GET and POST are accepted"))
        language = _parse_login_language(scope["path"])
        query = parse_qs(scope["query_string"].decode("latin-1"))
        after = _check_local_path(query.get("next", [""])[0]) or f"/{language}/"
        person = "text/html" in headers.get("accept", "")
        if scope["method"] != "POST":
            if login.has_session(_read_cookie(headers)):
                return await _send_answer(send, 303, "", {"location": after})
            return await _send_answer(
                send, 200, _render_login_form(language, after, ""), {"content-type": "text/html; charset=utf-8"}
            )
        form = parse_qs((await _read_body(receive, 8192)).decode("latin-1"), encoding="utf-8")
        right, wait = self._check_password(login, form.get("username", [""])[0], form.get("password", [""])[0], scope)
        if right:
            secure = "; Secure" if scope.get("scheme") == "https" else ""
            token = login.start_session()
            cookie = f"{COOKIE}={token}; Path=/; HttpOnly; SameSite=Strict; Max-Age={SESSION_SECONDS}{secure}"
            if person:
                return await _send_answer(send, 303, "", {"location": after, "set-cookie": cookie})
            answer_headers = {"content-type": "application/json", "set-cookie": cookie}
            return await _send_answer(send, 200, json.dumps({"success": True}), answer_headers)
        await asyncio.sleep(0.3)
        text = (
            translations.say(language, "login.wait", seconds=wait)
            if wait
            else translations.say(language, "login.wrong")
        )
        status, more = (429, {"retry-after": str(wait)}) if wait else (401, {})
        if person:
            more |= {"content-type": "text/html; charset=utf-8"}
            return await _send_answer(send, status, _render_login_form(language, after, text), more)
        await _send_answer(send, status, json.dumps({"detail": text}), more | {"content-type": "application/json"})

    async def _serve_logout(self, login: Login, headers: dict[str, str], scope: Scope, send: Send) -> None:
        if scope.get("method") == "POST":
            login.end_session(_read_cookie(headers))
        gone = f"{COOKIE}=; Path=/; HttpOnly; SameSite=Strict; Max-Age=0"
        await _send_answer(send, 303, "", {"location": f"/{_choose_language('', headers)}/login", "set-cookie": gone})


# -------------------------------------------------------------------------------------------------------------- pieces


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_page(path: str) -> bool:
    return re.fullmatch(r"/|/(en|zh-CN)(/[a-z]*)?/?", path) is not None


def _get_max_body_size(path: str) -> int:
    return MOST_UPLOAD if UPLOADS.fullmatch(path) else MOST_BODY


def _parse_login_language(path: str) -> str:
    match = re.fullmatch(r"/(en|zh-CN)/login/?", path)
    return match[1] if match else ""


def _choose_language(path: str, headers: dict[str, str]) -> str:
    return plain_page.choose_language(path, headers.get("accept-language", ""))


def _get_requested_url(scope: Scope) -> str:
    query = scope["query_string"].decode("latin-1")
    return quote(scope["path"], safe="/") + (f"?{query}" if query else "")


def _check_local_path(path: str) -> str:
    """Return the path if it is one of this site, else "": an open redirect would lend our name to others."""
    return path if re.fullmatch(r"/(?![/\\])[\x21-\x5b\x5d-\x7e]*", path) else ""


def _read_cookie(headers: dict[str, str]) -> str:
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return cookie.value if cookie else ""


def _get_client_address(scope: Scope) -> str:
    return (scope.get("client") or ("",))[0]


async def _read_body(receive: Receive, most: int) -> bytes:
    """Read a request's body, cut at `most` bytes."""
    data, more = b"", True
    while more and len(data) <= most:
        message = await receive()
        if message["type"] != "http.request":
            break
        data, more = data + message.get("body", b""), message.get("more_body", False)
    return data[:most]


def _limit_body(receive: Receive, scope: Scope) -> Receive:
    """Wrap `receive` so that a body without a length, sent in chunks, ends when it is too long."""
    if scope["type"] != "http":
        return receive
    seen, most = 0, _get_max_body_size(scope["path"])

    async def receive_limited() -> MutableMapping[str, Any]:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        return {"type": "http.disconnect"} if seen > most else message

    return receive_limited


def _add_headers(send: Send) -> Send:
    """Wrap `send` to add our headers to every answer that lacks them, and to remove CORS headers."""

    async def send_with_headers(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            own = [(n, v) for n, v in message.get("headers", []) if not n.lower().startswith(b"access-control-")]
            has = {name.lower() for name, _ in own}
            own += [(n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in has]
            message = {**message, "headers": own}
        await send(message)

    return send_with_headers


async def _send_answer(send: Send, status: int, text: str, headers: dict[str, str]) -> None:
    body = text.encode()
    sent = {"cache-control": "no-store", "content-length": str(len(body)), **headers}
    fields = [(name.encode(), value.encode("latin-1")) for name, value in sent.items()]
    await _add_headers(send)({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


OF_ANOTHER_SITE = Message("the request came from a page of another site")


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, why: Message) -> None:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    reason = translations.translate(_choose_language(scope["path"], headers), why)
    if scope["type"] == "websocket":
        await receive()
        return await send({"type": "websocket.close", "code": 1008, "reason": reason})
    await _send_answer(send, status, json.dumps({"detail": reason}), {"content-type": "application/json"})


def _render_login_form(language: str, after: str, wrong: str) -> str:
    """Render the login page, without scripts or anything from other places."""

    def say(key: str) -> str:
        return html.escape(translations.say(language, key))

    others = " · ".join(
        f'<a href="/{other}/login?next={quote(after, safe="")}" lang="{other}">{title}</a>'
        for other, title in translations.LANGUAGES.items()
        if other != language
    )
    message = f'<p class="wrong" role="alert">{html.escape(wrong)}</p>' if wrong else ""
    form = f"""{message}
<form method="post" action="/{language}/login?next={quote(after, safe="")}">
<label for="u">{say("login.user")}</label><input id="u" name="username" autocomplete="username" autofocus required>
<label for="p">{say("login.password")}</label>
<input id="p" name="password" type="password" autocomplete="current-password" required>
<button>{say("login.go")}</button></form><p>{others}</p>"""
    return plain_page.render_page(language, translations.say(language, "login.title"), form)
