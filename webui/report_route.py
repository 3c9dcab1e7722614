"""The route that sends the report of a run: /report?run=FOLDER&language=zh-CN.

The report is written by `lora-fp8 report` in a process of its own, as it decodes images, and is sent as an attachment
that no browser opens in place. Nothing stays here.
"""

import re
import tempfile
from pathlib import Path
from urllib.parse import quote

import anyio
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, Response

from lora_fp8.errors import UserError
from lora_fp8.run import drawings as drawing_folder

from . import drawings, engine, translations
from .context import Place
from .file_routes import INERT

SECONDS = 120.0
MOST_DRAWINGS = 3
"""Newest drawings of the run that its report shows."""


def add_routes(app: FastAPI, place: Place) -> None:
    """Add /report to the site."""
    few = anyio.CapacityLimiter(2)

    @app.get("/report")
    async def report(run: str = "", language: str = "en") -> Response:
        try:
            folder = place.resolve(run)
            language = language if language in translations.LANGUAGES else "en"
            content = await anyio.to_thread.run_sync(_make, place, folder, language, limiter=few)
        except UserError as error:
            return PlainTextResponse(str(error), 404, INERT)
        name = re.sub(r"[^\w.-]+", "-", f"{folder.name}-report.html")
        disposition = f"attachment; filename=\"report.html\"; filename*=UTF-8''{quote(name, errors='replace')}"
        headers = {**INERT, "Cache-Control": "private, no-store", "Content-Disposition": disposition}
        return Response(content, media_type="application/octet-stream", headers=headers)


def _make(place: Place, folder: Path, language: str) -> bytes:
    """Write the report of a run, and return it. Raises UserError."""
    drawn = [word for path in find_drawings(place, folder) for word in ("--drawing", str(path))]
    with tempfile.TemporaryDirectory() as temporary:
        output = Path(temporary, "report.html")
        engine.run_command("report", [str(folder), "--output", str(output), "--lang", language, *drawn], SECONDS)
        return output.read_bytes()


def find_drawings(place: Place, folder: Path) -> list[Path]:
    """Return the newest drawings of the page that show a LoRA of a run, newest first."""
    try:
        paths = [path for path in drawings.get_folder(place).iterdir() if path.name.isdecimal()]
    except FileNotFoundError:
        return []
    chosen = []
    for path in sorted(paths, key=lambda path: int(path.name), reverse=True):
        loras = drawing_folder.read(path).get("loras") if drawing_folder.is_drawing(path) else None
        places = [lora.get("place") for lora in loras if isinstance(lora, dict)] if isinstance(loras, list) else []
        if any(Path(str(given)) == folder or folder in Path(str(given)).parents for given in places):
            chosen.append(path)
    return chosen[:MOST_DRAWINGS]
