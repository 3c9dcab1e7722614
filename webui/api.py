"""Six functions for programs. docs/api.md describes them for people.

They are the only public endpoints of the English site, `gradio_client.Client("http://127.0.0.1:7860/en/")`, and tools
of `mcp`, which needs no page. Answers are plain JSON; a wrong request gets the error that the command line prints.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_fp8 import config, jobs
from lora_fp8.errors import UserError
from lora_fp8.jobs import JobView

from . import submission as entry
from .context import Place, Ui
from .run_monitor import require_run_folder


def add_endpoints(ui: Ui) -> None:
    """Add the endpoints to the site that is being laid out."""
    import gradio as gr  # `mcp` takes the functions alone

    for name, function in make_endpoints(ui.place, Ui("en", ui.place).make_download_link).items():
        gr.api(
            convert_errors(function, functools.partial(gr.Error, print_exception=False)),
            api_name=name,
            concurrency_limit=None,
        )


def make_endpoints(place: Place, link: Callable[[Path], str] | None = None) -> dict[str, Callable[..., Any]]:
    """Make the endpoints, by name, for this place's queue.

    Args:
        link: returns the address that sends a file; None where there is no page.
    """
    queue = jobs.Queue(place.home)

    def find_job(id: str) -> JobView:
        return queue.get_job(int(id) if id.isascii() and id.isdecimal() and len(id) < 15 else str(place.resolve(id)))

    def find_run(id: str) -> tuple[JobView, Any]:
        view = find_job(id)
        return view, place.resolve(require_run_folder(view))

    def submit(config: str, priority: int = 0, gpus: str = "") -> dict:
        """Queue a training. config: TOML text, its paths below the page's folders. Returns {"id"}."""
        return {"id": entry.submit_training(place, config, jobs.Scheduling(priority, gpus))}

    def list_jobs() -> list[dict]:
        """List the jobs of the queue: running jobs, waiting jobs in their order, then ended jobs."""
        return [view.to_json() for view in queue.list_jobs(shell=False)]

    def status(id: str) -> dict:
        """Return the state of a job, given its number, or of a run, given the path of its folder."""
        return find_job(id).to_json()

    def events(id: str, offset: int = 0) -> dict:
        """Return a run's events after this byte of its log: {"events", "offset"}. Continue with the new offset."""
        view, _ = find_run(id)
        new_events, behind = queue.read_events(view.id, max(0, offset))
        return {"events": new_events, "offset": behind}

    def stop(id: str) -> dict:
        """Save and stop a running job, or cancel a waiting one. Returns the job's status."""
        queue.stop(find_job(id).id)
        return find_job(id).to_json()

    def export(id: str, formats: list[str] = []) -> dict:  # noqa: B006 - Gradio shows the default
        """List a run's LoRA files, and where each is. With formats, also queue a job that exports them again: "job"."""
        _, folder = find_run(id)
        job = None
        if formats:
            config.load(folder / "config.toml", [f"export.formats={json.dumps(formats)}"])
            wanted = [part for layout in formats for part in ("--format", layout)]
            job = queue.submit_command("export", [*wanted, "--", str(folder)], name=f"export {folder.name}")
            jobs.ensure_worker(place.home)
        # Those of the end in front, then those of earlier steps.
        files = sorted((folder / "export").rglob("*.safetensors"), key=lambda file: (len(file.parts), file))
        at = (lambda file: {"download": link(file)}) if link else (lambda file: {"file": str(file)})
        return {
            "job": job,
            "files": [
                # not "path": Gradio's client takes what has one for a file of Gradio's, and tries to fetch it
                {"name": file.relative_to(folder / "export").as_posix(), "bytes": file.stat().st_size, **at(file)}
                for file in files
            ],
        }

    return {"submit": submit, "list": list_jobs, "status": status, "events": events, "stop": stop, "export": export}


def convert_errors(function: Callable[..., Any], error: Callable[[str], Exception]) -> Callable[..., Any]:
    """Wrap a function so that its UserErrors become the errors that the client expects."""

    @functools.wraps(function)
    def call_converted(*given: Any, **named: Any) -> Any:
        try:
            return function(*given, **named)
        except UserError as mistake:
            raise error(str(mistake)) from None

    return call_converted
