"""The command that downloads base models; commands.py adds it."""

from typing import Any

import typer

from ..errors import Message, combine
from .events import print_json_line
from .options import JSON, print_lines
from .streams import works


def add_to(app: typer.Typer) -> None:
    """Add this command to `lora-fp8`."""
    app.command()(download)


@works
def download(
    model: str = typer.Argument(
        ...,
        metavar="MODEL",
        help="Base model: Hugging Face id (OWNER/NAME) or address, modelscope:OWNER/NAME, or a Civitai page.",
    ),
    family: str = typer.Option("", help="Architecture, to compare the model with. Default: detected from its files."),
    revision: str = typer.Option("", help="Branch, tag or commit. Default: the newest."),
    as_json: bool = JSON,
) -> None:
    """Download a base model, or continue an interrupted download. Other programs find it in the same cache."""
    from ..families.sources import describe
    from ..families.sources import download as downloading
    from ..run import StopSignal
    from ..stages.progress import DownloadProgress

    base = describe(model, revision, family)
    if base.problems:
        raise combine(base.problems)
    name = base.reference.name
    if base.folder is None or not base.reference.is_remote:
        print_lines(Message("{name} is already on this machine; there is nothing to download", name=name))
        return
    if as_json:
        print_json_line({"event": "base", **_summarize(base)})
    else:
        print_lines(*base.lines)

    def report(progress: downloading.Progress) -> None:
        if as_json:
            print_json_line({"event": "download", **progress.to_json()})

    stop = StopSignal()
    stop.at_once = downloading.STOPPED
    with stop.watching(), DownloadProgress(name, is_shown=not as_json, report=report) as bar:
        base = downloading.download(base, bar.update)
    if as_json:
        print_json_line({"event": "done", **_summarize(base)})
    else:
        print_lines(Message("{name} is complete: {folder}", name=name, folder=base.folder))


def _summarize(base: Any) -> dict[str, Any]:
    """Return a description as plain JSON types."""
    return {
        "name": base.reference.name,
        "revision": base.revision,
        "family": base.family,
        "folder": str(base.folder),
        "files": [{"path": file.path, "bytes": file.size, "sha256": file.sha256} for file in base.files],
        "bytes": base.total_bytes,
        "missing_bytes": base.missing_bytes,
        "licence": base.licence.name if base.licence else "",
    }
