"""`lora-fp8 draw`: one prompt, drawn at several strengths of several LoRAs, beside the base model.

All images have the same seed, so that they differ by the LoRA alone. The base model is stored as in the run's training
(`quantize.storage`) and dequantized at each matmul, so that an image at strength 1 equals the run's preview. The
finished images and `drawing.json` are in the folder from the first one on, and a grid of all at the end.

A drawing has a process of its own and only reads run folders, so that a training beside it is not disturbed.
"""

import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from .. import config, precision
from ..adapters.attach import attached
from ..data.cache import Cache
from ..errors import Message, RunFailure, UserError, combine
from ..families.base import ModelFamily
from ..families.sources import describe
from ..lora_files import layer_names
from ..plan.memory_choice import choose_for_drawing
from ..plan.resolve import get_resolution, make_family, resolve_auto
from ..precision.dtypes import DTYPES
from ..run import drawings
from ..settings import Job, Quantize, split_preview
from ..stages import previews
from ..stages.cache import PreviewPrompts, list_texts, read_preview_prompts
from ..stages.load import add_moved_layers, load_base
from ..training import memory
from ..training.text_encoders import Adapted, encode_each
from .draw_sources import Lora, load_job, load_loras

MOST_STRENGTH = 4.0
MOST_IMAGES = 400
GRID_PIXELS = 4096
"""Largest width of the grid; its images are reduced to fit."""
WRITTEN_EVERY = 0.5
"""Seconds between two updates of the progress in drawing.json."""

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Request:
    """What to draw.

    Attributes:
        sources: run folders and LoRA files; () draws the base model alone.
        steps: checkpoints of each run folder; 0 is the newest.
        strengths: strengths of each LoRA. 0 is the base model.
        with_base: draw the base model, too.
        model, family: base model and its architecture; "" takes those of the first run.
        device: "auto" (a GPU if there is one), "cpu" or "cuda".
        overrides: settings as for `--set`; those of `[preview]` say what is drawn and how.
    """

    sources: tuple[Path, ...]
    steps: tuple[int, ...] = (0,)
    strengths: tuple[float, ...] = (1.0,)
    with_base: bool = True
    model: str = ""
    family: str = ""
    device: str = "auto"
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One image: the number of a LoRA and its strength; None and 0 for the base model."""

    lora: int | None
    strength: float


def draw(request: Request, folder: Path, report: Report = lambda record: None) -> dict[str, Any]:
    """Draw everything that is asked for into a new folder.

    Args:
        request: what to draw.
        folder: absent or empty.
        report: called with the record whenever an image is finished.

    Returns:
        The record, as in drawing.json.

    Raises:
        UserError: something given is wrong; nothing is written then.
        RunFailure: the model does not fit into memory, or a download failed.
    """
    drawings.require_free(folder)
    _check_numbers(request)
    device = _choose_device(request.device)
    job = load_job(request.sources, request.model, request.family, request.overrides)
    _require_prompt(job.preview.prompts)
    job = job.model_copy(update={"preview": split_preview(job.preview)[0]})
    base = describe(job.model.path, job.model.revision, job.model.family)
    if base.problems:
        raise combine(base.problems)
    family = make_family(job, device, base)
    job = resolve_auto(job, type(family))
    family.check_parts()
    if job.preview.guidance != "auto":
        family.make_guidance_inputs(job.preview.guidance)
    loras = load_loras(request.sources, request.steps, family)
    drawing = _Drawing(job, family, loras, _list_cells(loras, request), folder, report)
    drawings.create(folder)
    try:
        return drawing.run()
    except torch.OutOfMemoryError as error:
        raise RunFailure(
            Message(
                "out of memory on {device}: draw smaller images (--width, --height), keep a part of the weights in RAM "
                "(--set memory.offload=0.5), or draw on the CPU (--device cpu)",
                device=device,
            )
        ) from error


class _Drawing:
    """A drawing that is being made."""

    def __init__(
        self,
        job: Job,
        family: ModelFamily,
        loras: list[Lora],
        cells: list[Cell],
        folder: Path,
        report: Report,
    ) -> None:
        self.job, self.family, self.loras, self.cells = job, family, loras, cells
        self.folder, self.report = folder, report
        self.record = self._describe()
        self._written = 0.0

    def run(self) -> dict[str, Any]:
        """Encode, load, and draw."""
        self._enter("download")
        self.family.fetch_weights()
        self._enter("encode")
        prompts = self._encode()
        self._enter("load")
        job, family = self.job, self.family
        section = add_moved_layers(job.quantize, [line for lora in self.loras for line in lora.moved])
        # Only this library's own layers compute on every device.
        section = section.model_copy(update={"compute": "upcast", "backend": "own", "kernels": "torch"})
        share, tiled = self._choose_memory(section)
        denoiser, layers, _ = load_base(family, section, share)
        precision.set_compute_(denoiser, layers.with_compute("upcast"), section)
        denoiser.requires_grad_(False).eval()
        pipeline = family.make_pipeline(denoiser, tiled=tiled)
        pipeline.scheduler.step = self._count_steps(pipeline.scheduler.step)
        self._enter("draw")
        images = []
        for cell in self.cells:
            images.append(self._draw_cell(cell, denoiser, pipeline, prompts[cell]))
        previews.write_png(self._make_grid(images), self.folder / drawings.GRID)
        self.record |= {"grid": drawings.GRID, "state": "done", "stage": ""}
        self._write()
        return self.record

    def _choose_memory(self, section: Quantize) -> tuple[float, bool]:
        """Return the share of the base to offload, and whether to decode in tiles; on a CPU nothing is offloaded."""
        job, record = self.job.model_copy(update={"quantize": section}), self.record
        free = memory.count_free_bytes(self.family.device)
        share, tiled = choose_for_drawing(job, self.family, (record["width"], record["height"]), free)
        return (0.0 if free is None else share), tiled

    def _describe(self) -> dict[str, Any]:
        """Make the record of a drawing before anything is drawn."""
        job, family, preview = self.job, self.family, self.job.preview
        guidance = family.choose_guidance() if preview.guidance == "auto" else preview.guidance
        return {
            "version": 1,
            "t": round(time.time(), 3),
            "state": "drawing",
            "stage": "",
            "prompt": preview.prompts[0],
            "negative": preview.negative,
            "seed": preview.seed,
            "steps": preview.steps,
            "guidance": guidance,
            "width": preview.width or get_resolution(job),
            "height": preview.height or get_resolution(job),
            "family": job.model.family,
            "base": job.model.path,
            "storage": job.quantize.storage,
            "device": str(family.device),
            "loras": [{"name": lora.name, "place": str(lora.place), "step": lora.step} for lora in self.loras],
            "total": len(self.cells),
            "done": 0,
            "step": 0,
            "images": [],
        }

    def _encode(self) -> dict[Cell, PreviewPrompts]:
        """Encode the prompt, for each cell whose LoRA changes text encoders anew."""
        job, family = self.job, self.family
        with ExitStack() as stack:
            root = Path(job.dataset.cache_dir).expanduser()
            if not root.is_dir():  # the cache of a run, if it is here; no folder is made for a drawing
                root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lora-fp8-")))
            store = Cache(root, family, job.dataset, DTYPES[job.model.dtype])
            store.fill([], list_texts(job.preview, store))
            plain = read_preview_prompts(job.preview, store)
        changed = [lora for lora in self.loras if layer_names.has_text(lora.adapter.state, family)]
        if not changed:
            return dict.fromkeys(self.cells, plain)
        pipeline = family.make_trained_text_pipeline()
        encoders = {name: getattr(pipeline, name) for name in family.trained_text}
        layers = dict(Adapted(nn.Module(), encoders).named_modules())
        prompts = {}
        for cell in self.cells:
            with self._attach(cell, layers, text=True):
                prompts[cell] = plain.encode(functools.partial(encode_each, family, pipeline))
        return prompts

    def _draw_cell(self, cell: Cell, denoiser: nn.Module, pipeline: Any, prompts: PreviewPrompts) -> Image.Image:
        started, number = time.monotonic(), len(self.record["images"])
        self.record["step"] = 0
        with self._attach(cell, dict(denoiser.named_modules())):
            frames = previews.draw_clips(self.family, pipeline, prompts, get_resolution(self.job))
        path = self.folder / f"{number:03d}.png"
        previews.save(frames, [path], self.family.clips[1])
        width, height = frames[0][0].size
        seconds = round(time.monotonic() - started, 2)
        image = {"lora": cell.lora, "strength": cell.strength, "file": path.name, "seconds": seconds}
        image |= {"clip": path.with_suffix(".webp").name} if len(frames[0]) > 1 else {}
        self.record["images"].append(image)
        self.record |= {"width": width, "height": height, "done": number + 1}
        self._write()
        self.report(self.record)
        return frames[0][0]

    @contextmanager
    def _attach(self, cell: Cell, layers: Mapping[str, nn.Module], text: bool = False) -> Iterator[None]:
        """Add a cell's LoRA to the denoiser, or to the text encoders."""
        if cell.lora is None:
            yield
            return
        adapter = self.loras[cell.lora].adapter
        state = {
            name: tensor
            for name, tensor in adapter.state.items()
            if bool(layer_names.find_text_encoder(name, self.family)) == text
        }
        assert isinstance(adapter.scaling, Mapping)  # as `load_loras` makes it
        with attached(layers, state, adapter.scaling, cell.strength, self.family.device):
            yield

    def _count_steps(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a scheduler's `step`, so that drawing.json shows the progress of an image."""

        @functools.wraps(step)  # pipelines look at its parameters
        def count_step(*arguments: Any, **named: Any) -> Any:
            self.record["step"] += 1
            if time.monotonic() - self._written >= WRITTEN_EVERY:
                self._write()
            return step(*arguments, **named)

        return count_step

    def _make_grid(self, images: Sequence[Image.Image]) -> Image.Image:
        """Draw all images into one: a row for each LoRA, a column for each strength, the base model first."""
        strengths = sorted({cell.strength for cell in self.cells})
        largest = max(64, GRID_PIXELS // len(strengths))
        by_cell = dict(zip(self.cells, images, strict=True))
        reduced = {cell: image.copy() for cell, image in by_cell.items()}
        for image in reduced.values():
            image.thumbnail((largest, largest))
        base = reduced.get(Cell(None, 0.0))
        rows: dict[str, Sequence[Image.Image]] = {}
        for number, lora in enumerate(self.loras):
            row = [reduced[cell] for cell in self.cells if cell.lora == number]
            rows[f"{number + 1}. {lora.name}"] = [base, *row] if base is not None else row
        if not rows:
            rows["base"] = list(reduced.values())
        columns = [f"{strength:g}" if strength else "base" for strength in strengths]
        scale = max(1, 192 // next(iter(reduced.values())).width)
        return previews.draw_contact_sheet(rows, columns, scale)

    def _enter(self, stage: str) -> None:
        self.record["stage"] = stage
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        drawings.write(self.folder, self.record)


def _list_cells(loras: Sequence[Lora], request: Request) -> list[Cell]:
    strengths = sorted({strength for strength in request.strengths if strength})
    cells = [Cell(number, strength) for number in range(len(loras)) for strength in strengths]
    if request.with_base or not cells or 0 in request.strengths:
        cells.insert(0, Cell(None, 0.0))
    if len(cells) > MOST_IMAGES:
        raise UserError(
            Message(
                "{count} images are too many for one drawing; the limit is {most}", count=len(cells), most=MOST_IMAGES
            )
        )
    return cells


def _check_numbers(request: Request) -> None:
    wrong = [strength for strength in request.strengths if not 0 <= strength <= MOST_STRENGTH]
    if wrong:
        raise UserError(
            Message(
                "--strength {given}: must be at least {least} and at most {most}",
                given=f"{wrong[0]:g}",
                least="0",
                most=f"{MOST_STRENGTH:g}",
            )
        )


def _require_prompt(prompts: Sequence[str]) -> None:
    """Check that there is one prompt.

    Raises:
        UserError: there is none, or there are several.
    """
    if len(prompts) > 1:
        raise UserError(Message("preview.prompts: a drawing has one prompt, but {count} are given", count=len(prompts)))
    if not prompts or not prompts[0].strip():
        raise UserError(Message("there is no prompt to draw; give one with --prompt"))


def _choose_device(name: str) -> torch.device:
    """Choose where to draw.

    Raises:
        UserError: there is no such device.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(
            Message(
                "--device {given}: there is no such device; accepted: {names}",
                given=repr(name),
                names="auto, cpu, cuda",
            )
        )
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            Message("--device cuda: torch finds no GPU on this machine; run `lora-fp8 doctor` to find out why")
        )
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def make_overrides(prompt: str, control: str, **given: Any) -> tuple[str, ...]:
    """Return the settings of `[preview]` for a request.

    Args:
        prompt: "" takes that of the run's first preview.
        control: control image of an editing model, or folder of several; "" takes that of the run's first preview.
        given: negative, seed, steps, guidance, width, height; None takes the run's.
    """
    overrides = [
        config.Override(f"preview.{name}", value, f"--{name}") for name, value in given.items() if value is not None
    ]
    overrides += [config.Override("preview.prompts", [prompt], "--prompt")] if prompt else []
    overrides += [config.Override("preview.controls", [control], "--control")] if control else []
    return tuple(overrides)
