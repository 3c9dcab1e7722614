"""`lora-fp8 mcp`: the functions of `api` as tools of a Model Context Protocol server, on standard input and output.

The program that starts it is the only one that can ask: it listens nowhere. It works on the queue itself, with or
without the page, and names files below the same roots. Protocol: https://modelcontextprotocol.io.
"""

from collections.abc import Sequence
from pathlib import Path

import tomlkit
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from lora_fp8 import config, families, jobs
from lora_fp8.config import UserError

from . import api, submit
from .context import Place
from .serve import DEMO

ABOUT = """Trains LoRAs for diffusion models on a base that is frozen in FP8, one job after another for each GPU.
Begin with `template`, fill in name, base model and picture folders, `check` it, `submit`. `events` tells losses."""


def run(roots: Sequence[Path] = (), home: Path | None = None) -> None:
    """Answer on standard input and output until it is closed.

    Args:
        roots: folders that jobs may name, beside ./runs, the demo's files and those of the page's settings.
        home: None is the queue's, `jobs.home_folder()`.

    Raises:
        UserError: a root is no folder, or no worker can be started.
    """
    for root in roots:
        if not root.is_dir():
            raise UserError(f"--root {root}: there is no such folder")
    place = Place((home or jobs.home_folder()).resolve(), [*roots, Path("runs"), DEMO])
    jobs.ensure_worker(place.home)
    server(place).run()


def server(place: Place) -> MCPServer:
    """The tools, on this place's queue."""
    found = MCPServer("lora_fp8", instructions=ABOUT, log_level="ERROR")

    def template(family: str = "sd15", presets: list[str] = []) -> str:  # noqa: B006 - shown as the default
        """A config as TOML text: every setting, its meaning, what it accepts. Says which folders may be named."""
        submit.check_presets(place, tomlkit.dumps({"preset": presets}))
        text = config.commented(families.example("my-lora", family, presets))
        return f"# Files and folders must lie below: {', '.join(map(str, place.roots))}\n{text}"

    def check(text: str) -> str:
        """Whether a config (TOML text) would be accepted; else all that is wrong with it. Does not look at pictures."""
        job = submit.checked(place, text)
        return f"accepted: {job.train.steps} steps of {job.model.family} into {Path(job.output_dir) / job.name}"

    for name, function in {"template": template, "check": check, **api.functions(place)}.items():
        found.add_tool(api.told(function, ToolError), name=name, structured_output=False)
    return found
