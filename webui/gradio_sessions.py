"""Limit what Gradio keeps in memory for each open page to what handlers need.

For every page that is opened or reloaded, Gradio 6.31 keeps the description of every component of the whole site, for
ten thousand pages, to support links to a moment ("deep links"). Ours come to more than 2 MB per page, and those links
are closed (guard.py). A test holds the size of a session.
"""

from types import SimpleNamespace
from typing import Any

import gradio as gr
from gradio.routes import App
from gradio.state_holder import SessionState, StateHolder

MOST_SESSIONS = 2000
POLL_SECONDS = 0.02
"""How often Gradio looks whether a page has asked for something. On Windows it does so 20 times a second, elsewhere
1000 times, which takes a twentieth of a core of a page that nobody looks at, and keeps a laptop awake."""


class _DiscardingDict(dict):
    """A dict for descriptions of components that nobody reads: it drops whatever is put in."""

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: object) -> dict[str, Any]:
        return {}

    def __setitem__(self, key: object, value: object) -> None:
        pass


class _Session(SessionState):
    def __init__(self, blocks: gr.Blocks):
        bare = SimpleNamespace(default_config=blocks.default_config, blocks={})
        super().__init__(bare)  # type: ignore[arg-type]  # it reads no other attribute of the blocks
        self.config_values = _DiscardingDict()


class _Sessions(StateHolder):
    def __getitem__(self, session_id: str) -> SessionState:
        if session_id not in self.session_data:
            self.session_data[session_id] = _Session(self.blocks)
        return super().__getitem__(session_id)


def limit_sessions(app: App, blocks: gr.Blocks) -> None:
    """Let this app, which was just mounted, keep little for each open page."""
    blocks.state_session_capacity = MOST_SESSIONS
    app.state_holder = _Sessions()
    app.state_holder.set_blocks(blocks)


def poll_less(blocks: gr.Blocks) -> None:
    """Let the queue of this site wake up only as often as a click needs."""
    blocks._queue.sleep_when_free = POLL_SECONDS
    blocks._queue.progress_update_sleep_when_free = 5 * POLL_SECONDS
