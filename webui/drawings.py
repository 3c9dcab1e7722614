"""Drawings of the page: what can be drawn with, the jobs that draw, and the folders that they draw into.

A drawing is a `lora-fp8 draw` in the queue. Its folder is home/drawings/<number>; drawing.json says what is in it.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_fp8 import jobs
from lora_fp8.errors import Message, UserError
from lora_fp8.families.sources import WEIGHT_ENDINGS
from lora_fp8.jobs import JobView
from lora_fp8.run import drawings
from lora_fp8.settings import read_options

from . import run_monitor, sanitize
from .context import Place, Ui

STRENGTHS = ("0.25", "0.5", "0.75", "1", "1.25", "1.5")
WHERE = ("turn", "beside")
"""Where to draw: on the next free GPU, or at once on the CPU."""
LONGEST_PROMPT = 4000
MOST_SOURCES = 300
LARGEST_LORA = 4 * 2**30
"""Bytes from which on a safetensors file is taken for a base model."""
BEFORE_TRAININGS = 1
"""Priority of a drawing that waits for a GPU: it takes a minute, and goes before trainings that wait."""
NUMBERS = {"seed": int, "width": int, "height": int, "steps": int, "guidance": float}


@dataclass(frozen=True)
class Drawing:
    """A drawing of the page.

    Attributes:
        id: name of its folder.
        folder: where it is.
        record: content of drawing.json; {} before its job has started.
        job: the job that draws; None if it was deleted from the queue.
    """

    id: str
    folder: Path
    record: dict[str, Any]
    job: JobView | None

    @property
    def state(self) -> str:
        """Return the state of its job; of a drawing without one "done" or "stopped"."""
        if self.job is not None:
            return self.job.state
        return "done" if self.record.get("state") == "done" else "stopped"

    @property
    def images(self) -> list[dict[str, Any]]:
        """Return the finished images; what is no image is left out."""
        images = self.record.get("images")
        return [image for image in images if is_image(image)] if isinstance(images, list) else []


def is_image(image: Any) -> bool:
    """Return True if an entry of a record has the form of an image of ours."""
    return (
        isinstance(image, dict)
        and re.fullmatch(r"\d{3,}\.png", str(image.get("file"))) is not None
        and isinstance(image.get("strength"), int | float)
        and isinstance(image.get("lora"), int | None)
    )


def get_folder(place: Place) -> Path:
    """Return the folder of all drawings."""
    return place.home / "drawings"


def list_drawings(ui: Ui, most: int = 60) -> list[Drawing]:
    """List the newest drawings, newest first."""
    by_folder = _find_jobs(ui)
    try:
        names = [entry.name for entry in os.scandir(get_folder(ui.place)) if entry.name.isdecimal() and entry.is_dir()]
    except FileNotFoundError:
        return []
    found_drawings = []
    for name in sorted(names, key=int, reverse=True)[:most]:
        folder = get_folder(ui.place) / name
        job = by_folder.get(str(folder))
        if job is not None or drawings.is_drawing(folder):
            found_drawings.append(Drawing(name, folder, drawings.read(folder), job))
    return found_drawings


def find_drawing(ui: Ui, id: str) -> Drawing:
    """Find a drawing. Raises UserError if there is none."""
    for drawing in list_drawings(ui, 100_000):
        if drawing.id == id:
            return drawing
    raise UserError(Message("{name}: there is no such drawing", name=sanitize.shorten(id)))


def _find_jobs(ui: Ui) -> dict[str, JobView]:
    """Return the jobs that draw, by their folder."""
    try:
        views = run_monitor.get_monitor(ui.place).views()
    except UserError:
        return {}
    by_folder = {}
    for view in views:
        if view.command[:1] == ("draw",):
            out = next((word.removeprefix("--out=") for word in view.command if word.startswith("--out=")), "")
            by_folder[out] = view
    return by_folder


def delete(ui: Ui, id: str) -> None:
    """Delete a drawing with its images. Raises UserError if it is being drawn."""
    drawing = find_drawing(ui, id)
    if drawing.job is not None and drawing.state not in jobs.ENDED:
        raise UserError(Message("the drawing is still in progress; stop it first"))
    if drawings.is_drawing(drawing.folder):
        drawings.remove(drawing.folder)
    else:
        drawing.folder.rmdir()  # its job ended before it began
    if drawing.job is not None:
        queue = run_monitor.get_monitor(ui.place).queue
        queue.delete(drawing.job.id)
        run_monitor.get_monitor(ui.place).views.invalidate()


# -- what can be drawn with


def list_sources(ui: Ui) -> list[tuple[str, str]]:
    """List the runs and LoRA files to draw with, newest first, as (label, path)."""
    try:
        views = run_monitor.get_monitor(ui.place).views()
    except UserError:
        views = []
    runs = {str(view.folder): view for view in views if view.kind == "train" and view.folder is not None}
    sources = []
    for folder, view in runs.items():
        if list_steps(Path(folder)):
            sources.append((ui.say("draw.run", name=view.name), folder))
    newest = find_lora_files([ui.place.home / "tools", *ui.place.roots])
    return [*sources, *((path.name, str(path)) for path in newest)][:MOST_SOURCES]


def find_lora_files(folders: Iterable[Path]) -> list[Path]:
    """Find the safetensors files in these folders that are small enough for a LoRA, newest first."""
    files = {path for folder in folders for path in folder.glob("*") if path.suffix.lower() in WEIGHT_ENDINGS}
    loras = [path for path in files if path.stat().st_size < LARGEST_LORA]
    return sorted(loras, key=lambda path: -path.stat().st_mtime)


def list_steps(folder: Path) -> list[int]:
    """List the steps of a run whose LoRA can be drawn with, newest first."""
    paths = [*folder.glob("checkpoints/*-*"), *folder.glob("export/step-*")]
    steps = {int(match[1]) for path in paths if (match := re.fullmatch(r"(?:step|best)-(\d{6,})", path.name))}
    return sorted(steps, reverse=True)


def find_source(ui: Ui, text: str) -> Path | None:
    """Return the run folder or LoRA file that was chosen; None for none.

    Raises:
        UserError: it is not allowed, or neither.
    """
    if not text.strip():
        return None
    path = ui.resolve_path(text)
    if path.is_dir() or (path.suffix.lower() in WEIGHT_ENDINGS and path.is_file()):
        return path
    raise UserError(
        Message("{text}: this is neither a run folder nor a .safetensors file", text=sanitize.shorten(text))
    )


# -- starting a drawing


def start(ui: Ui, given: dict[str, Any]) -> str:
    """Queue a drawing, and return its id.

    Args:
        given: source, steps (of checkpoints), base, prompt, negative, seed, width, height, sampling_steps, guidance,
            strengths, with_base and where, as the page's fields have them.

    Raises:
        UserError: a value is missing, or is not accepted.
    """
    arguments, subject = build_arguments(ui, given)
    beside = sanitize.require_choice(given["where"], WHERE) == "beside"
    queue = run_monitor.get_monitor(ui.place).queue
    folder = _reserve_folder(ui.place)
    scheduling = jobs.Scheduling(0 if beside else BEFORE_TRAININGS, jobs.BESIDE if beside else "", 1)
    line = [f"--out={folder}", *arguments]
    try:
        queue.submit_command("draw", line, folder=ui.place.home, name=subject, scheduling=scheduling)
    except UserError:
        folder.rmdir()
        raise
    run_monitor.get_monitor(ui.place).views.invalidate()
    jobs.ensure_worker(queue.home)
    return folder.name


def build_arguments(ui: Ui, given: dict[str, Any]) -> tuple[list[str], str]:
    """Return the command's arguments, each checked or our own, and a name for the job."""
    source = find_source(ui, str(given["source"] or ""))
    prompt = str(given["prompt"] or "").strip()
    negative = str(given["negative"] or "").strip()
    for text in (prompt, negative):
        check_length(text)
    read_options(prompt)
    line = [f"--prompt={prompt}"] if prompt else []
    line += [f"--negative={negative}"] if negative else []
    for name, kind in NUMBERS.items():
        value = given["sampling_steps" if name == "steps" else name]
        if str(value or "").strip():
            line.append(f"--{name}={check_number(value, kind, name)}")
    strengths = [sanitize.require_choice(strength, STRENGTHS) for strength in given["strengths"] or ()]
    line += [f"--strength={strength}" for strength in strengths]
    line.append("--base" if given["with_base"] or not (strengths and source) else "--no-base")
    if source is None or source.is_file():
        line += _build_base(ui, str(given["base"] or "").strip(), source)
    else:
        line += [f"--step={check_number(step, int, 'step')}" for step in given["steps"] or [0]]
    if source is not None:
        line += ["--", str(source)]
    return line, sanitize.shorten(prompt, 60) or (source.name if source else "draw")


def check_length(prompt: str) -> None:
    """Check that a prompt is not absurdly long. Raises UserError."""
    if len(prompt) > LONGEST_PROMPT:
        raise UserError(Message("the prompt is too long; the limit is {count} characters", count=LONGEST_PROMPT))


def _build_base(ui: Ui, base: str, source: Path | None) -> list[str]:
    """Return the argument for the base model of a file; none was given for a file in a run's export/."""
    if not base:
        if source is None:
            raise UserError(Message("there is nothing to draw with; choose a run or a LoRA file, or name a base model"))
        return []
    if base == "demo" or re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", base):
        return [f"--model={base}"]
    return [f"--model={ui.resolve_path(base)}"]


def _reserve_folder(place: Place) -> Path:
    """Make an empty folder with the next number."""
    folder = get_folder(place)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    number = max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=0)
    while True:
        number += 1
        try:
            (folder / f"{number:06d}").mkdir()
        except FileExistsError:  # of another window
            continue
        return folder / f"{number:06d}"


def check_number(value: Any, kind: type, name: str) -> int | float:
    """Return what was typed as a number of this kind. Raises UserError if it is none, or negative."""
    try:
        number = kind(str(value).strip())
        if not 0 <= number < 2**64:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise UserError(Message("{name}: {text} is not a number", name=name, text=sanitize.shorten(value))) from None
    return number
