"""Two routes that send images and files below the allowed folders. There is no other way to get a file.

/picture?path=...&width=320     decoded in a child process and sent as WebP, never the file's own bytes; of a video
                                the first frame, and with &moving=1 all frames of an animation
/download?path=...              the file itself, of a few kinds, as an attachment that no browser opens in place
"""

import hashlib
import threading
from dataclasses import dataclass

import anyio
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, PlainTextResponse, Response

from lora_fp8.common import system
from lora_fp8.data import image_edits
from lora_fp8.data.image_edits import ImageEdit
from lora_fp8.errors import Message, UserError, reason

from . import sanitize
from .context import Place
from .decoder import Decoders

SENT = (".safetensors", ".json", ".jsonl", ".toml", ".txt", ".log", ".md", ".csv", ".png", ".webp", ".jpg", ".jpeg")
"""Suffixes of files that may be downloaded."""
MOST_THUMBNAIL_BYTES = 512 * 2**20
INERT = {"Content-Security-Policy": "default-src 'none'; sandbox"}


def add_routes(app: FastAPI, place: Place) -> None:
    """Add /picture and /download to the site."""
    decoders = Decoders()
    few = anyio.CapacityLimiter(decoders.count)  # waiting images must not occupy the threads of ticks

    @app.get("/picture")
    async def picture(
        request: Request, path: str = "", width: int = 0, moving: bool = False, rotate: int = 0, crop: str = ""
    ) -> Response:
        try:
            wanted = _Wanted(path, width, moving, _read_edit(rotate, crop))
            data, tag = await anyio.to_thread.run_sync(_load_picture, place, decoders, wanted, limiter=few)
        except UserError as error:
            return PlainTextResponse(str(error), 404, INERT)
        headers = {**INERT, "ETag": tag, "Cache-Control": "private, no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type="image/webp", headers=headers)

    @app.get("/download")
    async def download(path: str = "") -> Response:
        try:
            file = place.resolve(path)
            if not file.is_file():
                raise sanitize.make_missing_file_error(path)
            if file.suffix.lower() not in SENT:
                raise UserError(
                    Message(
                        "{name}: files of this kind cannot be downloaded here; accepted: {names}",
                        name=sanitize.shorten(path),
                        names=", ".join(SENT),
                    )
                )
        except UserError as error:
            return PlainTextResponse(str(error), 404, INERT)
        headers = {**INERT, "Cache-Control": "private, no-cache"}
        return FileResponse(file, media_type="application/octet-stream", filename=file.name, headers=headers)


@dataclass(frozen=True)
class _Wanted:
    """What a request asks for: see `Ui.make_picture_link`."""

    path: str
    width: int
    moving: bool
    edit: ImageEdit


def _read_edit(rotate: int, crop: str) -> ImageEdit:
    """Read how an image is to be turned and cropped. Raises UserError."""
    try:
        sides = {"crop": [float(side) for side in crop.split(",")]} if crop else {}
        return image_edits.read_edit({"rotate": rotate, **sides})
    except ValueError as error:
        raise UserError(Message("{path}: {line}", path="/picture", line=reason(error))) from None


def _load_picture(place: Place, decoders: Decoders, wanted: _Wanted) -> tuple[bytes, str]:
    """Return an image as WebP, from home/thumbnails if it was made before, and its ETag. Raises UserError."""
    text, moving, edit = wanted.path, wanted.moving, wanted.edit
    path = place.resolve(text)
    try:
        status = path.stat()
    except OSError:
        raise sanitize.make_missing_file_error(text) from None
    if not path.is_file():
        raise UserError(Message("{path}: this is not a file", path=sanitize.shorten(text)))
    width = next((size for size in (96, 192, 320, 640, 1280, 2048) if 0 < wanted.width <= size), 0)
    what = f"{path}\0{status.st_mtime_ns}\0{status.st_size}\0{status.st_ino}\0{width}{' moving' * moving}"
    what += f"\0{edit.identify('')}" if edit else ""
    key = hashlib.blake2b(what.encode(errors="surrogateescape"), digest_size=16).hexdigest()
    kept = place.home / "thumbnails" / key[:2] / f"{key}.webp"
    try:
        data = kept.read_bytes()
    except FileNotFoundError:
        data = decoders.encode_webp(path, width, moving, edit)
        part = kept.with_suffix(f".{threading.get_ident()}")
        try:
            kept.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_bytes(data)
            system.replace(part, kept)  # no fsync: after a power loss it is made again
        except OSError:  # a full disk: the image is sent, and decoded again the next time
            part.unlink(missing_ok=True)
    return data, f'"{key}"'


def prune_thumbnails(place: Place) -> None:
    """Delete the oldest thumbnails beyond MOST_THUMBNAIL_BYTES. Called when the page starts."""
    files = [(file.stat().st_mtime, file.stat().st_size, file) for file in (place.home / "thumbnails").glob("*/*.webp")]
    total = sum(size for _, size, _ in files)
    for _, size, file in sorted(files, key=lambda entry: entry[0]):
        if total <= MOST_THUMBNAIL_BYTES:
            break
        file.unlink(missing_ok=True)
        total -= size
