"""The site: one Gradio app per language, one route per page, behind one server and one guard.

    /            redirects to the browser's language, as /new and other pages without a language do; /zh/... to Chinese
    /en/...      /zh-CN/...      runs (start page), new, dataset, run, draw, compare, tools, settings
    /picture     /download       files below the allowed folders (file_routes.py)
    /report                      the report of a run (report_route.py)

A page is laid out once per language when the site is built. Everything that changes is painted by ticks, which read the
queue and the run folders.
"""

import importlib
import json
from collections.abc import Iterable
from pathlib import Path

import gradio as gr
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response
from gradio.routes import App
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import api, file_routes, gradio_sessions, notifications, plain_page, report_route, startup, tour, translations
from .context import Place, Ui
from .error_boundary import Boundary, Pages
from .guard import Guard
from .images import routes as image_routes
from .login import Login

PAGES = ("runs", "new", "dataset", "run", "draw", "compare", "tools", "settings")
"""Files in pages/ and paths of the site; the first is the start page."""
UNLISTED = ("run",)  # a run is reached from the list of runs
STATIC = Path(__file__).resolve().parent / "static"
MOST_UPLOAD_SIZE = "256mb"  # of one file
FONTS = ("system-ui", "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", "sans-serif")
MONO = ("ui-monospace", "SFMono-Regular", "Consolas", "Noto Sans Mono CJK SC", "monospace")
ICONS = {
    "system": '<rect x="2" y="3" width="12" height="8" rx="1"/><path d="M6 14h4"/>',
    "light": '<circle cx="8" cy="8" r="3"/>'
    '<path d="M8 1v1M8 14v1M1 8h1M14 8h1M3 3l.7.7M12.3 12.3l.7.7M13 3l-.7.7M3.7 12.3 3 13"/>',
    "dark": '<path d="M13.5 9.5A6 6 0 1 1 6.5 2.5 4.7 4.7 0 0 0 13.5 9.5Z"/>',
}


def build_blocks(ui: Ui) -> gr.Blocks:
    """Lay out all pages of a language. Gradio's own navigation has no room for the switches; style.css hides it."""
    hour, day = 3600, 86400
    with Pages(
        ui, title=ui.say("site.title"), analytics_enabled=False, fill_width=True, delete_cache=(hour, day)
    ) as site:
        _lay_out_page(PAGES[0], ui)
        if ui.language == "en":
            api.add_endpoints(ui)
    for name in PAGES[1:]:
        with site.route(ui.say(f"page.{name}"), f"/{name}"):
            _lay_out_page(name, ui)
    return site


def _lay_out_page(name: str, ui: Ui) -> None:
    gr.HTML(_render_header(name, ui), elem_id="site-header", padding=False)
    importlib.import_module(f".pages.{name}", __package__).build(ui)


def _render_header(name: str, ui: Ui) -> str:
    """Render site name, links to the pages, language and theme switches."""

    def make_path(page: str) -> str:
        return "" if page == PAGES[0] else page

    here = ' aria-current="page"'
    pages = "".join(
        f'<a href="{ui.make_link(make_path(page))}"{here if page == name else ""}>{ui.say(f"page.{page}")}</a>'
        for page in PAGES
        if page not in UNLISTED
    )
    languages = "".join(
        f'<a href="/{language}/{make_path(name)}" lang="{language}" data-language="{language}">{title}</a>'
        for language, title in translations.LANGUAGES.items()
        if language != ui.language
    )
    themes = "".join(
        f'<button type="button" data-theme="{theme}" aria-pressed="false" title="{ui.say(f"theme.{theme}")}" '
        f'aria-label="{ui.say(f"theme.{theme}")}"><svg viewBox="0 0 16 16" fill="none" stroke="currentColor" '
        f'stroke-width="1.4" stroke-linecap="round" aria-hidden="true">{icon}</svg></button>'
        for theme, icon in ICONS.items()
    )
    return (
        f'<h1 class="unseen">{ui.say(f"page.{name}")}</h1>'
        f'<header class="site-header"><a class="brand" href="{ui.make_link("")}"><img src="/icon.svg" alt="">'
        f'{ui.say("site.title")}</a><nav aria-label="{ui.say("site.pages")}">{pages}</nav>'
        f'<div class="switches">{languages}{themes}</div></header>'
    )


def build(place: Place, *, login: Login | None = None, names: Iterable[str] = (), addresses: bool = False) -> FastAPI:
    """Build the whole site.

    Args:
        place: where it reads and writes.
        login, names, addresses: who may use it; see `guard.Guard`.
    """
    place.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Boundary)  # inside the guard
    app.add_middleware(Guard, names=names, addresses=addresses, login=login)

    plain_page.answer_unknown_addresses(app, PAGES[0])
    _add_redirects(app)

    icon = (STATIC / "icon.svg").read_bytes()

    @app.get("/icon.svg")
    @app.get("/favicon.ico")
    @app.get("/{language}/favicon.ico")
    def favicon(language: str = "") -> Response:
        return Response(icon, media_type="image/svg+xml", headers={"Cache-Control": "max-age=86400"})

    file_routes.add_routes(app, place)
    image_routes.add_routes(app, place)
    report_route.add_routes(app, place)
    notifications.add_routes(app, place)
    for language in translations.LANGUAGES:
        with startup.skip_servers():
            pages = build_blocks(Ui(language, place))
        gr.mount_gradio_app(
            app,
            pages,
            path=f"/{language}",
            run_history=False,
            footer_links=[],
            max_file_size=MOST_UPLOAD_SIZE,
            theme=_make_theme(),
            css_paths=STATIC / "style.css",
            # Read out by screen readers when an action has ended; Gradio itself has no text for it.
            i18n=gr.I18n(**{language: {"common.complete": translations.say(language, "site.complete")}}),
        )
        mounted = _find_mounted(app)
        plain_page.answer_unknown_addresses(mounted, PAGES[0])
        gradio_sessions.limit_sessions(mounted, pages)
        gradio_sessions.poll_less(pages)
        mounted.user_middleware.append(
            Middleware(_HeadInserter, html=_render_head(language).encode())
        )  # inside the compression
        mounted.user_middleware.append(Middleware(Boundary, language=language))
    return app


def _add_redirects(app: FastAPI) -> None:
    """Lead addresses without a language, and those with a short name for Chinese, to the page that they mean."""

    def add(path: str, page: str, language: str = "") -> None:
        @app.get(path)
        def redirect(request: Request) -> Response:
            kept = request.cookies.get("lora_fp8_language", "")
            accepted = translations.choose_language(request.headers.get("accept-language", ""))
            chosen = language or (kept if kept in translations.LANGUAGES else accepted)
            query = f"?{request.url.query}" if request.url.query else ""
            return RedirectResponse(f"/{chosen}/{page}{query}")

    for page in ("", *PAGES[1:]):
        add(f"/{page}", page)
        for name, language in translations.SHORT.items():
            add(f"/{name}/{page}", page, language)


def _find_mounted(app: FastAPI) -> App:
    """Return the app that Gradio mounted last."""
    route = app.routes[-1]
    if not isinstance(route, Mount) or not isinstance(route.app, App):
        raise RuntimeError("gr.mount_gradio_app mounted no app of its own")
    return route.app


def _make_theme() -> gr.themes.Base:
    """Make Gradio's theme, with every colour below a contrast of 4.5 (WCAG AA) one shade darker."""
    theme = gr.themes.Default(primary_hue="indigo", neutral_hue="slate", font=FONTS, font_mono=MONO)
    return theme.set(
        body_background_fill="*neutral_50",
        body_text_color_subdued="*neutral_500",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
        checkbox_border_color="*neutral_400",
        checkbox_border_color_dark="*neutral_400",
        checkbox_border_color_hover="*neutral_500",
        checkbox_border_color_hover_dark="*neutral_300",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        button_cancel_background_fill="#dc2626",
        button_cancel_background_fill_hover="#b91c1c",
        link_text_color_dark="*primary_400",
        link_text_color_active_dark="*primary_400",
        link_text_color_visited="*secondary_700",
        link_text_color_visited_dark="*primary_400",
    )


class _HeadInserter:
    """ASGI middleware that inserts HTML right after <head> in each page.

    Gradio inserts its own `head` argument too late, after a script has asked the browser for its language.
    """

    def __init__(self, app: ASGIApp, html: bytes):
        self.app, self.html = app, html

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: list[Message] = []  # the answer's headers, until its length is known

        async def send_with_head(message: Message) -> None:
            if message["type"] == "http.response.start":
                if MutableHeaders(scope=message).get("content-type", "").startswith("text/html"):
                    begun.append(message)
                    return
            elif begun:
                headers, body = MutableHeaders(scope=begun[0]), message["body"]
                message["body"] = body.replace(b"<head>", b"<head>" + self.html, 1)
                if length := headers.get("content-length"):
                    headers["content-length"] = str(int(length) + len(message["body"]) - len(body))
                await send(begun.pop())
            await send(message)

        await self.app(scope, receive, send_with_head)


def _render_head(language: str) -> str:
    script = "".join(
        (STATIC / name).read_text(encoding="utf-8")
        for name in ("ask.js", "loading.js", "head.js", "notify.js", "tour.js", "search.js")
    )
    theirs = [texts for key, texts in translations.load_catalogue().items() if key.startswith("gradio.")]
    given = {
        "LANGUAGE": language,
        "LOST": translations.say(language, "site.lost", time="{time}"),
        "DISMISS": translations.say(language, "site.dismiss"),
        "LOADING": {
            "now": translations.say(language, "site.loading"),
            "slow": translations.say(language, "site.slow"),
            "failed": translations.say(language, "site.script", what="{what}"),
        },
        "TOUR": tour.list_texts(language),
        "GRADIO": {} if language == "en" else {texts["en"]: texts[language] for texts in theirs},
    }
    constants = ", ".join(f"{name} = {json.dumps(value)}" for name, value in given.items())
    return (
        '<link rel="icon" href="/icon.svg" type="image/svg+xml">'
        f"<script>(() => {{ const {constants};\n"
        f"{script}}})();</script>"
    )
