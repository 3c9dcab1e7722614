"""What Gradio keeps of each open page: here only what handlers need.

For every page that is opened or reloaded, Gradio 6.31 keeps the description of every component of the whole site, for
ten thousand pages, so that links to a moment ("deep links") can be made. Ours come to more than 2 MB a page, and those
links are closed (guard.py). A test holds what a session takes.
"""

from types import SimpleNamespace
from typing import Any

import gradio as gr
from gradio.routes import App
from gradio.state_holder import SessionState, StateHolder

MOST_SESSIONS = 2000


class _Forgetful(dict):
    """Descriptions of components that nobody asks for: whatever is put in is gone."""

    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: object) -> dict[str, Any]:
        return {}

    def __setitem__(self, key: object, value: object) -> None:
        pass


class _Session(SessionState):
    def __init__(self, blocks: gr.Blocks):
        super().__init__(SimpleNamespace(default_config=blocks.default_config, blocks={}))
        self.config_values = _Forgetful()


class _Sessions(StateHolder):
    def __getitem__(self, session_id: str) -> SessionState:
        if session_id not in self.session_data:
            self.session_data[session_id] = _Session(self.blocks)
        return super().__getitem__(session_id)


def lighten(app: App, blocks: gr.Blocks) -> None:
    """Let this app, just mounted, keep little of each page that is open."""
    blocks.state_session_capacity = MOST_SESSIONS
    app.state_holder = _Sessions()
    app.state_holder.set_blocks(blocks)
