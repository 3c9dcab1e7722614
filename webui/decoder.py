"""Strangers' pictures are decoded in child processes that may take little memory and little time.

A picture that makes a decoder crash, or eat all memory, ends a child and not the page. The child reads requests from
its standard input, one JSON object a line, and answers with a line of JSON and then so many bytes; when the page ends,
its input ends, and so does the child.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from lora_fp8.config import UserError

MOST_PIXELS = 128 * 2**20
MOST_MEMORY = 3 * 2**30  # of addresses; a picture of MOST_PIXELS takes 384 MiB a copy, and there are a few
MOST_SECONDS = 30
LONGEST_SIDE = 4096


class Decoders:
    """A few child processes, started when they are first needed."""

    def __init__(self, count: int = 2):
        self.count = count
        self._free: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(count):
            self._free.put(None)

    def webp(self, path: Path, width: int = 0) -> bytes:
        """The picture as WebP, upright and in sRGB as training sees it, no side longer than `width`.

        Raises:
            UserError: it is no picture, too large, or its decoder ended or took too long.
        """
        child = self._free.get()
        try:
            if child is None or child.process.poll() is not None:
                child = _Child()
            return child.ask({"path": str(path), "width": min(width or LONGEST_SIDE, LONGEST_SIDE)})
        except _Ended as ended:
            child = None
            raise UserError(f"{path.name}: {ended}") from None
        finally:
            self._free.put(child)


class _Ended(Exception):
    """The child is gone; says why."""


class _Child:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "webui.decoder"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": _python_path()},
            start_new_session=True,  # Ctrl-C in the terminal is for the page
        )

    def ask(self, request: dict[str, Any]) -> bytes:
        late = threading.Event()

        def kill() -> None:
            late.set()
            self.process.kill()

        timer = threading.Timer(MOST_SECONDS, kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            head = self.process.stdout.readline()
            answer = json.loads(head) if head.endswith(b"\n") else {}
            data = self.process.stdout.read(answer.get("bytes", 0))
        except OSError:
            answer, data = {}, b""
        finally:
            timer.cancel()
        if not answer or len(data) != answer.get("bytes", 0):
            self.process.kill()
            self.process.wait()
            raise _Ended(f"not decoded within {MOST_SECONDS} s" if late.is_set() else "its decoder ended on it")
        if "error" in answer:
            raise UserError(answer["error"])
        return data


def _python_path() -> str:
    """So that the child, which starts in another folder, finds this same webui."""
    here = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))


def encode(path: str, width: int) -> bytes:
    """What a child does: the picture at this path as WebP. Raises ValueError or OSError with the reason."""
    import io

    from PIL import Image

    from lora_fp8.data import images

    with Image.open(path, formats=images.FORMATS) as image:  # the header only
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"{image.width}x{image.height} pixels; shown are up to {MOST_PIXELS // 2**20} million")
    picture = images.open_image(path)
    picture.thumbnail((width, width))
    out = io.BytesIO()
    picture.save(out, "WEBP", quality=82, method=2)
    return out.getvalue()


def _serve() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            data = encode(request["path"], request["width"])
            answer = {"bytes": len(data)}
        except Exception as error:  # Pillow's decoders raise SyntaxError, RuntimeError and what not on broken files
            name, data = os.path.basename(request["path"]), b""
            answer = {"error": f"{name}: not a picture that can be shown ({error or type(error).__name__})"}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n" + data)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
