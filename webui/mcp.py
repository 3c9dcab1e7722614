"""`lora-fp8 mcp`: the functions of `api` as tools of a Model Context Protocol server on standard input and output.

It listens on no port: only the program that starts it can use it. It works on the queue itself, with or without the
page, and may name files below the same folders. Protocol: https://modelcontextprotocol.io.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tomlkit
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from lora_fp8 import config, jobs
from lora_fp8.config import make_example

from . import api, sanitize, submission
from .context import Place
from .server import DEMO

ABOUT = """Trains LoRAs for diffusion models on a base that is frozen in FP8, one job after another for each GPU.
Begin with `template`, fill in name, base model and image folders, `check` and `submit` it. `events` has the losses."""


def run(roots: Sequence[Path] = (), home: Path | None = None) -> None:
    """Serve on standard input and output until it is closed.

    Args:
        roots: folders that jobs may name, beside ./runs, the demo's files and those of the page's settings.
        home: None is the queue's, `jobs.find_home()`.

    Raises:
        UserError: a root is not a folder, or no worker can be started.
    """
    for root in roots:
        sanitize.require_folder(root, f"--root {root}")
    place = Place((home or jobs.find_home()).resolve(), [*roots, Path("runs"), DEMO])
    jobs.ensure_worker(place.home)
    make_server(place).run()


def make_server(place: Place) -> MCPServer:
    """Make the server with its tools, on this place's queue."""
    server = MCPServer("lora_fp8", instructions=ABOUT, log_level="ERROR")

    def template(family: str = "sd15", presets: list[str] = []) -> str:  # noqa: B006 - shown as the default
        """Return a config as TOML text: every setting, its meaning, what it accepts, and the folders it may name."""
        submission.check_presets(place, tomlkit.dumps({"preset": presets}))
        text = config.format_with_comments(make_example("my-lora", family, presets))
        return f"# Files and folders must lie below: {', '.join(map(str, place.roots))}\n{text}"

    def check(text: str) -> str:
        """Check a config (TOML text). Returns that it is accepted, or everything that is wrong. Reads no images."""
        job = submission.check_config(place, text)
        return f"accepted: {job.train.steps} steps of {job.model.family} into {Path(job.output_dir) / job.name}"

    tools: dict[str, Callable[..., Any]] = {"template": template, "check": check, **api.make_endpoints(place)}
    for name, function in tools.items():
        server.add_tool(api.convert_errors(function, ToolError), name=name, structured_output=False)
    return server
