"""Jobs on other machines: what is remembered of them here, and what a machine answers."""

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mutations

from lora_fp8.common.messages import translate
from lora_fp8.jobs.remote import control, handle

NAME = "zibo"
HANDLE = handle.Handle(
    NAME,
    "slurm",
    "host",
    "/there/zibo",
    "runs/zibo",
    "/here/zibo",
    "17",
    places={"data/0": "/here/pictures"},
    fetched={"config.toml": "0" * 64},
    created=1.5,
)
STATUS = {"state": "train", "step": 3, "steps": 10, "loss": 0.25, "t": 1.5}
VALUES = (*mutations.NUMBERS, *mutations.WORDS, "-1", "[]", "{}", "RUNNING", "PENDING", "75", "9" * 5000)


class Cases:
    """A case is the file of a job, and the text that its machine prints when it is asked for the job's state."""

    def __init__(self, work: Path) -> None:
        self.home = handle.find_remote_home() / NAME
        self.home.mkdir(parents=True)

    def make(self, draw: random.Random, folder: Path) -> None:
        remembered, status = {"version": 1, **asdict(HANDLE)}, dict(STATUS)
        if draw.random() < 0.5:
            remembered = mutations.values_of(draw, remembered)
        if draw.random() < 0.5:
            status = mutations.values_of(draw, status)
        text = json.dumps(remembered)
        if draw.random() < 0.05:
            text = mutations.deep(draw, draw.choice((1000, 100_000)))
        raw = text.encode("utf-8", "surrogatepass")
        (folder / "handle.json").write_bytes(mutations.bytes_of(draw, raw) if draw.random() < 0.1 else raw)
        lines = {
            "alive": draw.choice(("", "RUNNING", "PENDING", "COMPLETED", *VALUES)),
            "exit": draw.choice(("", "0", "75", "1", *VALUES)),
            "status": json.dumps(status),
            "log": draw.choice(("", "== train", "\x1b[31mred\x1b[0m", *VALUES)),
        }
        answer = "\n".join(f"{name} {value}" for name, value in lines.items())
        if draw.random() < 0.2:
            answer = mutations.text_of(draw, answer)
        (folder / "answer.txt").write_text(answer, encoding="utf-8", errors="surrogatepass")

    def use(self, folder: Path, allowed: Callable[[Callable[[], Any]], Any]) -> None:
        shutil.copyfile(folder / "handle.json", self.home / handle.FILE)
        handle.load_all()
        job = allowed(lambda: handle.load(NAME)) or HANDLE
        answer = (folder / "answer.txt").read_text(encoding="utf-8", errors="surrogatepass")
        view = control.read_view(job, answer)
        assert view.state in ("waiting", "starting", "running", "done", "stopped", "failed", "lost")
        json.dumps(asdict(view)), translate("zh-CN", view.sentence), view.sentence.encode("utf-8", "surrogatepass")
