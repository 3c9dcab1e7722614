"""The site: one Gradio app per language, every page a route of its own, behind one server.

    /            sends the browser to its language
    /en/...      /zh-CN/...      runs (first page), new, dataset, run, compare, tools, settings

A page is laid out once per language when the site is built; everything that changes comes from ticks that read the
queue and the run folders.
"""

import importlib

import gradio as gr
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response

from . import words
from .context import Place, Ui

PAGES = ("runs", "new", "dataset", "run", "compare", "tools", "settings")
"""The first is the start page; each is a file in pages/ and a path."""


def blocks(ui: Ui) -> gr.Blocks:
    """All pages of one language."""
    with gr.Blocks(title=ui.say("site.title"), analytics_enabled=False, fill_width=True) as site:
        _page(PAGES[0], ui)
    for name in PAGES[1:]:
        with site.route(ui.say(f"page.{name}"), f"/{name}"):
            _page(name, ui)
    return site


def _page(name: str, ui: Ui) -> None:
    gr.Navbar(main_page_name=ui.say(f"page.{PAGES[0]}"))
    importlib.import_module(f".pages.{name}", __package__).build(ui)


def build(place: Place) -> FastAPI:
    """The whole site."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/")
    def start(request: Request) -> Response:
        return RedirectResponse(f"/{_preferred(request.headers.get('accept-language', ''))}/")

    for language in words.LANGUAGES:
        ui = Ui(language, place)
        gr.mount_gradio_app(
            app,
            blocks(ui),
            path=f"/{language}",
            run_history=False,
            footer_links=[],
            ssr_mode=False,
            head=_speaks(language),
        )
    return app


def _preferred(accepted: str) -> str:
    """The first language of an Accept-Language header that the page has; English otherwise."""
    for entry in accepted.split(","):
        tag = entry.split(";")[0].strip().lower()
        for language in words.LANGUAGES:
            if tag and tag.split("-")[0] == language.split("-")[0].lower():
                return language
    return "en"


def _speaks(language: str) -> str:
    """For the words that Gradio itself brings ("Drop file here"): it asks the browser for its language."""
    return (
        f"<script>for (const [name, value] of [['language', '{language}'], ['languages', ['{language}']]]) "
        "Object.defineProperty(navigator, name, {get: () => value}); "
        f"document.documentElement.lang = '{language}';</script>"
    )
