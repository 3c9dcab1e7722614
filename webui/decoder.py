"""Decode images and videos from strangers in child processes with limits on memory and time.

A file that crashes a decoder or exhausts memory ends a child and not the page. The child reads requests from standard
input, one JSON object per line, and answers with a line of JSON followed by the given number of bytes. When the page
ends, its input ends, and so does the child.
"""

import contextlib
import io
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lora_fp8.common import reading, system
from lora_fp8.common.messages import add_translations, restore
from lora_fp8.data import image_edits
from lora_fp8.data.clips import VIDEOS
from lora_fp8.errors import Message, Template, UserError

MOST_PIXELS = 128 * 2**20
MOST_MEMORY = 3 * 2**30  # address space; an image of MOST_PIXELS takes 384 MiB per copy, and there are a few copies
WATCH_SECONDS = 0.02  # between looks at a child's memory, where the system cannot limit it
MOST_SECONDS = 30
MOST_VIDEO_SECONDS = 120  # for a whole video with every frame decoded
MOST_FRAMES = 513  # of an animated preview
LONGEST_SIDE = 4096


class Decoders:
    """A few child processes, started when first needed."""

    def __init__(self, count: int = 2):
        self.count = count
        self._free: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(None)

    def encode_webp(
        self, path: Path, width: int = 0, moving: bool = False, edit: image_edits.ImageEdit = image_edits.NOTHING
    ) -> bytes:
        """Return an image, or the first frame of a video, as WebP, upright and in sRGB as training sees it.

        Args:
            width: maximum of the longer side; 0 is `LONGEST_SIDE`.
            moving: return an animation; a still image is an error then.
            edit: how a still image is turned and cropped.

        Raises:
            UserError: it is not an image or video, it is too large, or decoding it crashed or took too long.
        """
        width = min(width or LONGEST_SIDE, LONGEST_SIDE)
        request: dict[str, Any] = {"do": "move" if moving else "show", "width": width}
        if not moving:
            request |= {"rotate": edit.rotate, "crop": edit.crop}
        return self._request(path, request, MOST_SECONDS)

    def decode_whole(self, path: Path) -> None:
        """Decode a whole image or video as training does. Raises UserError as `encode_webp`."""
        video = path.suffix.lower() in VIDEOS
        self._request(path, {"do": "check"}, MOST_VIDEO_SECONDS if video else MOST_SECONDS)

    def _request(self, path: Path, request: dict[str, Any], seconds: float) -> bytes:
        child = self._free.get()
        try:
            if child is None or child.process.poll() is not None:
                child = _Child()
            return child.ask(request | {"path": str(path)}, seconds)
        except _Ended as ended:
            child = None
            raise UserError(Message("{file}: {line}", file=path.name, line=ended)) from None
        finally:
            self._free.put(child)


class _Ended(Exception):
    """The child has exited, with the reason."""


class _Child:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "webui.decoder"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": _make_python_path()},
            **system.make_detach_options(),  # Ctrl-C in the terminal is for the page
        )
        assert self.process.stdin is not None and self.process.stdout is not None  # both are pipes
        self._requests, self._answers = self.process.stdin, self.process.stdout

    def ask(self, request: dict[str, Any], seconds: float) -> bytes:
        late = threading.Event()

        def kill() -> None:
            late.set()
            self.process.kill()

        timer = threading.Timer(seconds, kill)
        timer.start()
        answered = threading.Event()
        if not system.CAN_LIMIT_MEMORY:
            threading.Thread(target=self._watch_memory, args=(answered,), daemon=True).start()
        try:
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
            head = self._answers.readline()
            answer = json.loads(head) if head.endswith(b"\n") else {}
            data = self._answers.read(answer.get("bytes", 0))
        except OSError:
            answer, data = {}, b""
        finally:
            timer.cancel()
            answered.set()
        if not answer or len(data) != answer.get("bytes", 0):
            self.process.kill()
            self.process.wait()
            line = Message("its decoder crashed")
            if late.is_set():
                line = Message("decoding did not finish within {seconds} s", seconds=f"{seconds:g}")
            raise _Ended(line)
        if "error" in answer:
            raise UserError(restore(answer)["error"])
        return data

    def _watch_memory(self, answered: threading.Event) -> None:
        while not answered.wait(WATCH_SECONDS):
            if system.read_memory(self.process.pid) > MOST_MEMORY:
                self.process.kill()


def _make_python_path() -> str:
    """Return a PYTHONPATH with which the child, started in another folder, finds this webui."""
    here = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))


def encode_still(path: str, width: int, rotate: int = 0, crop: Sequence[float] = image_edits.WHOLE) -> bytes:
    """Return an image, or the first frame of a video, as WebP. Raises ValueError or OSError with the reason.

    This and everything below runs in the child.
    """
    picture = image_edits.read_edit({"rotate": rotate, "crop": list(crop)}).apply(_open_picture(path))
    picture.thumbnail((width, width))
    out = io.BytesIO()
    picture.save(out, "WEBP", quality=82, method=2)
    return out.getvalue()


def encode_animation(path: str, width: int) -> bytes:
    """Return an animation as an endlessly looping animated WebP. Raises as `encode_still`."""
    from PIL import Image

    frames, durations = [], []
    with _open_header(path) as image:
        if not 1 < getattr(image, "n_frames", 1) <= MOST_FRAMES:
            raise ValueError(f"{getattr(image, 'n_frames', 1)} frames; shown moving are 2 to {MOST_FRAMES}")
        for number in range(image.n_frames):
            image.seek(number)
            image.load()
            durations.append(int(image.info.get("duration") or 0))
            frame = image.convert("RGB")
            frame.thumbnail((width, width), Image.Resampling.BILINEAR)
            frames.append(frame)
    out = io.BytesIO()
    options = {"save_all": True, "append_images": frames[1:], "duration": durations, "loop": 0}
    frames[0].save(out, "WEBP", quality=80, method=0, **options)
    return out.getvalue()


def check(path: str) -> bytes:
    """Decode a whole file and return nothing. Raises as `encode_still`."""
    from lora_fp8.data import clips

    if os.path.splitext(path)[1].lower() in clips.VIDEOS:
        clips.decode_video(Path(path), MOST_PIXELS)
    else:
        _open_picture(path)
    return b""


def _open_picture(path: str) -> Any:
    from lora_fp8.data import clips, decoding

    if os.path.splitext(path)[1].lower() in clips.VIDEOS:
        return clips.read_first_frame(Path(path), MOST_PIXELS)
    with _open_header(path):
        return decoding.open_image(path)


@contextlib.contextmanager
def _open_header(path: str) -> Iterator[Any]:
    """Yield the image with only its header read, if it is not too large."""
    from PIL import Image, UnidentifiedImageError

    from lora_fp8.data import decoding

    with reading.open_regular(path) as file:
        try:
            opened = Image.open(file, formats=decoding.list_formats())
        except UnidentifiedImageError:  # Pillow names a file object, which tells nobody anything
            empty = os.fstat(file.fileno()).st_size == 0
            raise decoding.NoImage(decoding.EMPTY if empty else decoding.NOT_READABLE) from None
        with opened as image:
            if image.width * image.height > MOST_PIXELS:
                raise ValueError(f"{image.width}x{image.height} pixels; shown are up to {MOST_PIXELS // 2**20} million")
            yield image


def _serve() -> None:
    commands: dict[str, Callable[..., bytes]] = {"show": encode_still, "move": encode_animation, "check": check}
    system.limit_memory(MOST_MEMORY)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            data = commands[request.pop("do")](**request)
            answer: dict[str, Any] = {"bytes": len(data)}
        except Exception as error:  # Pillow's decoders raise SyntaxError, RuntimeError and what not on broken files
            name, data = os.path.basename(request["path"]), b""
            template = Template("{file}: the image cannot be read ({line})")
            if os.path.splitext(name)[1].lower() in VIDEOS:
                template = Template("{file}: the video cannot be read ({line})")
            answer = add_translations({"error": template(file=name, line=str(error) or type(error).__name__)})
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + data)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
