"""Turn whatever goes wrong while answering into one sentence for the user and one line in the log.

`Pages` wraps every handler of the pages and of the API, `Boundary` every other route. A failed handler changes nothing
on the page: its answer leaves every value as it is, and static/ask.js shows the sentence that comes with it. Gradio's
queue could show messages for some events only.
"""

import errno
import json
import logging
import time
import traceback
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.exceptions import InvalidPathError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lora_fp8.errors import UserError, reason

from . import sanitize, translations
from .context import Ui
from .uploads import HEADER, PAGE, Uploads

log = logging.getLogger("lora_fp8.page")
FULL = (errno.ENOSPC, errno.EDQUOT)
OURS = (Path(__file__).resolve().parent, Path(__file__).resolve().parent.parent / "lora_fp8")
AGAIN_S = 60.0
"""The same line is logged once in this time, because a failing tick fails every second."""
_logged: dict[str, float] = {}


class Pages(gr.Blocks):
    """The pages of one language. Every call passes `process_api`, whatever its route."""

    def __init__(self, ui: Ui, **given: Any):
        super().__init__(**given)
        self.ui = ui
        self.uploaded = Uploads()
        self.upload_file_set = self.temp_file_sets[0] = self.uploaded
        self.has_launched = True  # mounted, not launched: otherwise Gradio would not check the files that a value names

    async def process_api(  # type: ignore[override]  # what Gradio adds to these is passed on by name
        self,
        block_fn: Any,
        inputs: list[Any],
        state: Any = None,
        request: Any = None,
        iterator: Any = None,
        **given: Any,
    ) -> dict[str, Any]:
        """Answer a call.

        Raises:
            gr.Error: the call does not come from our page; or any error of a call by a program.
        """
        block_fn = self.fns[block_fn] if isinstance(block_fn, int) else block_fn
        try:
            if iterator is None:
                window = request.headers.get(HEADER, "") if request is not None else ""
                inputs = self._check_files(block_fn, inputs, window)
            return await super().process_api(block_fn, inputs, state=state, request=request, iterator=iterator, **given)
        except gr.Error as error:
            _log_error(_name_handler(self, block_fn), error)
            error.print_exception = False
            raise
        except Exception as error:  # the one place where any error becomes a sentence
            _log_error(_name_handler(self, block_fn), error)
            line = describe_error(self.ui.language, error)
            if block_fn.api_visibility == "public":
                raise gr.Error(sanitize.escape(line), print_exception=False) from None
            return {
                "data": [gr.skip()] * len(block_fn.outputs),
                "is_generating": False,
                "iterator": None,
                "duration": 0.0,
                "average_duration": None,
                "render_config": None,
                "changed_state_ids": [],
                "used_cache": None,
                "problem": line,
            }

    async def preprocess_data(self, *given: Any, **named: Any) -> list[Any]:
        """Convert the values of a call for its handler.

        Raises:
            gr.Error: the handler does not accept them.
        """
        try:
            return await super().preprocess_data(*given, **named)
        except gr.Error:
            raise
        except Exception as error:  # Gradio's parsing may raise anything
            raise self._make_refusal(error) from None

    def _check_files(self, block_fn: Any, inputs: list[Any], window: str) -> list[Any]:
        try:
            return self.uploaded.check(block_fn.inputs, inputs, window)
        except UserError as error:
            raise gr.Error(sanitize.escape(self.ui.translate(str(error))), print_exception=False) from None

    def _make_refusal(self, error: Exception) -> gr.Error:
        why = "" if isinstance(error, InvalidPathError) else f" ({type(error).__name__})"
        return gr.Error(sanitize.escape(self.ui.say("site.refused") + why), print_exception=False)


class Boundary:
    """ASGI middleware around routes: answers an exception with one sentence and logs one line."""

    def __init__(self, app: ASGIApp, language: str = ""):
        self.app, self.language = app, language

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or its exception."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        before = PAGE.set(headers.get(HEADER, ""))
        try:
            await self.app(scope, receive, send_and_note)
        except ClientDisconnect:
            pass  # nobody is waiting for the answer
        except Exception as error:  # see Pages
            _log_error(f"{scope['method']} {scope['path']}", error)
            if not begun:
                language = self.language or translations.choose_language(headers.get("accept-language", ""))
                await _send_error(send, _choose_status(scope["path"], error), describe_error(language, error))
        finally:
            PAGE.reset(before)


def describe_error(language: str, error: Exception) -> str:
    """Describe an error for people, and say that their input is kept; plain text."""
    if isinstance(error, UserError):
        return translations.translate(language, str(error))
    if isinstance(error, OSError) and error.errno in FULL:
        return translations.say(language, "site.full")
    if isinstance(error, OSError) and error.strerror:
        what = translations.translate(language, reason(error))
        if error.filename:
            what = f"{error.filename}: {what}"
        return translations.say(language, "site.io", what=sanitize.shorten(what, 200))
    return translations.say(language, "site.failed", what=sanitize.shorten(f"{type(error).__name__}: {error}", 200))


def _choose_status(path: str, error: Exception) -> int:
    """Return the HTTP status. Gradio's routes run no code of ours: an error there is a bad request or a full disk."""
    if isinstance(error, OSError):
        return 507 if error.errno in FULL else 500
    return 400 if "/gradio_api/" in path else 500


async def _send_error(send: Send, status: int, line: str) -> None:
    body = json.dumps({"error": line, "detail": line}, ensure_ascii=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send(
        {"type": "http.response.start", "status": status, "headers": [*headers, (b"cache-control", b"no-store")]}
    )
    await send({"type": "http.response.body", "body": body})


def _name_handler(pages: gr.Blocks, block_fn: Any) -> str:
    """Return the name of a handler in the log: "new-start.click"."""
    triggers = []
    for id, event in block_fn.targets[:1]:
        part = pages.blocks.get(id)
        triggers.append(f"{getattr(part, 'elem_id', None) or id}.{event}")
    return " ".join(triggers) or str(block_fn.api_name)


def _log_error(where: str, error: Exception) -> None:
    """Log one line: what failed, and its calls in our own code, innermost first."""
    frames = [
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
        for frame in reversed(traceback.extract_tb(error.__traceback__))
        if any(Path(frame.filename).is_relative_to(folder) for folder in OURS) and frame.filename != __file__
    ]
    line = f"{sanitize.shorten(where)}: {type(error).__name__}: {sanitize.shorten(error, 300)}"
    line += f" (at {', '.join(frames[:6])})" if frames else ""
    now = time.monotonic()
    if now - _logged.get(line, -AGAIN_S) < AGAIN_S:
        return
    if len(_logged) > 1000:
        _logged.clear()
    _logged[line] = now
    log.error("%s", line)
