"""`lora-fp8 report`: one HTML file about a run, for people who do not have the run.

It holds everything that it shows: no request leaves it, and it opens from a file system without a network. It reads the
run folder only, at any time: of a run that is going, was stopped, or failed, it says so.

The browser is told to load nothing and to run no script but the one of the charts (Content-Security-Policy), so that
text in a run that got past the escaping could still do nothing.
"""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from ... import __version__
from ...common import chart
from ...common.messages import choose_language
from ...common.writing import atomic_write
from ...errors import Message, UserError, cannot_write
from ...run import Run, drawings
from . import pictures, sections
from .contents import Contents
from .page import Page, format_time

NAME = "report.html"
"""Name of the file in the run folder."""
BEGIN = b"<!doctype html>\n<!-- lora_fp8 report -->\n"
"""How a report begins; no other file is replaced."""
SCRIPT = f"for (const element of document.querySelectorAll('figure.chart')) {{{chart.SCRIPT}}}"
HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{HASH}'"


def write(folder: Path, output: Path | None = None, language: str = "en", drawn: Sequence[Path] = ()) -> Path:
    """Write the report of a run.

    Args:
        folder: of the run.
        output: file to write; None is `NAME` in the run folder.
        language: as for `choose_language`.
        drawn: folders of `lora-fp8 draw` to show as a grid of strengths, beside those in the run folder.

    Returns:
        The file.

    Raises:
        UserError: there is no run, or the file is there and is no report, or cannot be written.
    """
    run = Run.open(folder)
    for place in drawn:
        if not drawings.is_drawing(place):
            raise UserError(Message("--drawing {path}: this is not a folder of `lora-fp8 draw`", path=place))
    target = output or folder / NAME
    _require_free(target)
    text = render(run, choose_language(language), drawn)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, text.encode())
    except OSError as error:
        raise cannot_write(target, error) from None
    return target


def _require_free(target: Path) -> None:
    """Refuse a file that is no report of this program.

    Raises:
        UserError: it is there and something else, or a link.
    """
    try:
        if target.is_symlink():
            begin = b""
        else:
            with open(target, "rb") as file:
                begin = file.read(len(BEGIN))
    except FileNotFoundError:
        return
    except OSError as error:
        raise cannot_write(target, error) from None
    if begin != BEGIN:
        raise UserError(Message("--output {path}: this file is not a report. Choose another name.", path=target))


def render(run: Run, language: str, drawn: Sequence[Path] = ()) -> str:
    """Render the report of a run.

    Args:
        run: its folder.
        language: "en" or "zh-CN".
        drawn: see `write`.
    """
    contents, page = Contents(run), Page(language)
    report = _collect(contents, page, drawn)
    body = "".join(render_section(report) for render_section in sections.SECTIONS)
    title = Message("Training report: {name}", name=contents.name)
    footer = Message(
        "Written by lora_fp8 {version} from the files of the run, as of {time}.",
        version=__version__,
        time=format_time(contents.newest),
    )
    css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    return (
        f'{BEGIN.decode()}<html lang="{language}">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f"<title>{page.say(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        f"{sections.render_head(report)}\n{body}\n<footer>{page.render_paragraph(footer)}</footer>\n</main>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _collect(contents: Contents, page: Page, drawn: Sequence[Path]) -> sections.Report:
    """Choose the images that the report shows, and inline them."""
    run, best = contents.run, contents.best
    every = pictures.list_previews(run, contents.log)
    previews = every[: pictures.MOST_PROMPTS]
    steps = sorted({step for preview in previews for step in preview.files})
    steps = pictures.choose_steps(steps, best[0] if best else None)
    strengths = [grid for place in pictures.find_drawings(run, drawn) if (grid := pictures.read_drawing(place))]
    album = pictures.Album()
    album.add(pictures.order_by_weight(previews, steps))
    album.add(path for grid in strengths for _, files in grid.rows for path in files.values())
    return sections.Report(contents, page, previews, len(every), steps, strengths, album)
