"""Pages of the site that need no script: the login, and the answer to an address that has none."""

import base64
import html
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException

from . import translations

ICON = base64.b64encode((Path(__file__).parent / "static" / "icon.svg").read_bytes()).decode()
STYLE = """
:root{color-scheme:light dark;background:Canvas;color:CanvasText}
body{font:16px/1.5 system-ui,sans-serif;max-width:22rem;margin:12vh auto;padding:0 1rem}
label{display:block;margin:.8rem 0 .2rem} button{margin-top:1.2rem;cursor:pointer} .wrong{color:#c33}
input,button{font:inherit;width:100%;box-sizing:border-box;padding:.5rem .6rem}
input,button{border:1px solid #8888;border-radius:.4rem}
@media(prefers-color-scheme:dark){.wrong{color:#f87171}}
"""


def render_page(language: str, title: str, body: str) -> str:
    """Render a page; `title` is text and `body` HTML.

    It has no <head> tag, which HTML allows: the scripts of the site are inserted after one.
    """
    return f"""<!doctype html><html lang="{language}"><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>
<link rel="icon" href="data:image/svg+xml;base64,{ICON}"><style>{STYLE}</style>
<body><main><h1>{html.escape(translations.say(language, "site.title"))}</h1>{body}</main></body></html>"""


def choose_language(path: str, accepted: str) -> str:
    """Return the language of an address, else the first of the Accept-Language header that the page has."""
    first = path.split("/")[1] if "/" in path else ""
    first = translations.SHORT.get(first, first)
    return first if first in translations.LANGUAGES else translations.choose_language(accepted)


def answer_unknown_addresses(app: FastAPI, start: str) -> None:
    """Answer people who ask for an address without a page with a page, and programs as before.

    Args:
        app: the site, or the mounted app of a language.
        start: the page that is named first, which has no path of its own.
    """

    @app.exception_handler(404)
    async def answer(request: Request, error: HTTPException) -> Response:
        path = request.scope["path"]
        person = request.method == "GET" and "text/html" in request.headers.get("accept", "")
        if not person or "/gradio_api/" in path:
            return await http_exception_handler(request, error)
        language = choose_language(path, request.headers.get("accept-language", ""))
        links = "".join(
            f'<li><a href="/{language}/{"" if page == start else page}">'
            f"{html.escape(translations.say(language, f'page.{page}'))}</a></li>"
            for page in (start, "new")
        )
        what = html.escape(translations.say(language, "site.unknown"))
        page = render_page(language, translations.say(language, "site.unknown"), f"<p>{what}</p><ul>{links}</ul>")
        return HTMLResponse(page, status_code=404, headers={"Cache-Control": "no-store"})
