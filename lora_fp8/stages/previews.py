"""Draw previews while training, with the diffusers pipeline around the training denoiser and always the same seeds.

The noise of a preview comes from its own CPU generator, not from the random numbers of the training. A run with
previews and one without therefore end with the same bytes.

With preview.frames above 1 a preview is a clip: its first frame is a PNG like any preview, and a WebP beside it has all
frames, at the model's frame rate.
"""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, PngImagePlugin
from torch import nn

from .. import settings
from ..adapters.attach import without_attached
from ..common.writing import atomic_write
from ..distributed.processes import Processes
from ..errors import Message, RunFailure
from ..families.base import ModelFamily
from ..plan.resolve import get_resolution
from ..run import Run
from .cache import PreviewPrompts
from .progress import StageProgress
from .session import Session


class StoppedDrawing(Exception):
    """A stop was requested before all previews of a step were drawn; none of them was written."""


class _Rounds:
    """The rounds in which the processes draw, one preview each. They agree before each whether to stop.

    Args:
        processes: those of the job.
        is_stopped: see `draw`; the same in all processes if None.
        count: rounds of the process with the most previews.
    """

    def __init__(self, processes: Processes, is_stopped: Callable[[], bool] | None, count: int) -> None:
        self._processes, self._is_stopped = processes, is_stopped
        self._left, self.are_stopped = count, False

    def begin(self) -> bool:
        """Begin a round, together with the other processes. Return False if one of them was told to stop."""
        if self._is_stopped is not None:
            self.are_stopped = any(self._processes.gather(self._is_stopped()))
        self._left -= 1
        return not self.are_stopped

    def follow(self) -> None:
        """Take part in the decisions of the rounds in which this process draws nothing."""
        while self._left > 0 and not self.are_stopped:
            self.begin()


def render(family: ModelFamily, pipeline: Any, prompts: PreviewPrompts, side: int) -> list[Image.Image]:
    """Draw one image per prompt: the first frame of each clip of `draw_clips`, whose arguments it has."""
    return [frames[0] for frames in draw_clips(family, pipeline, prompts, side)]


@torch.no_grad()
def draw_clips(
    family: ModelFamily,
    pipeline: Any,
    prompts: PreviewPrompts,
    side: int,
    numbers: Sequence[int] | None = None,
) -> list[list[Image.Image]]:
    """Draw one clip per prompt with a diffusers pipeline of the family. An image is a clip of one frame.

    Args:
        family: of the pipeline.
        pipeline: the diffusers pipeline.
        prompts: encoded prompts and negative prompts, each with its `[preview]` table.
        side: pixels, for a width or height of 0.
        numbers: which of them to draw, counted from 0; None draws all. Each has its own seed, so leaving out some does
            not change the others.

    Returns:
        The frames of each clip.
    """
    pipeline.set_progress_bar_config(disable=True)
    drawn = []
    for i in range(len(prompts.conds)) if numbers is None else numbers:
        table = prompts.tables[i]
        generator = torch.Generator("cpu").manual_seed(table.seed)
        inputs = family.make_pipeline_inputs(prompts.conds[i], prompts.negatives[i])
        output = pipeline(**inputs, **make_pipeline_settings(family, table, side), generator=generator)
        drawn.append(family.extract_frames(output))
    return drawn


def draw(
    session: Session,
    denoiser: nn.Module,
    section: settings.Preview,
    prompts: PreviewPrompts,
    step: int,
    is_stopped: Callable[[], bool] | None = None,
) -> list[Image.Image]:
    """Draw the previews of this step into the run's samples/.

    A failing preview is a warning, and the run continues: the LoRA does not depend on previews.

    Args:
        session: of the run.
        denoiser: with its adapters.
        section: the `[preview]` table in force, which a user may have changed since the run began.
        prompts: its prompts, encoded.
        step: of the adapters.
        is_stopped: asked before each preview; True, in any process, ends the drawing in all. None in all of them: they
            draw without waiting for each other.

    Returns:
        The images on the main process (of clips, the first frames), none on the others or where one failed.

    Raises:
        StoppedDrawing: `is_stopped` was True. All processes raise it, at the same preview.
    """
    run = session.run
    paths = [get_path(run.samples, step, i) for i in range(len(prompts.conds))]
    if not _draw_into(paths, session, denoiser, prompts, step, is_stopped) or not session.processes.is_main:
        return []
    run.log_event(
        "preview", step=step, **_name_files(run, paths, section), prompts=section.prompts, **_describe(section)
    )
    return [read(path) for path in paths]


def draw_now(
    session: Session, denoiser: nn.Module, section: settings.Preview, prompts: PreviewPrompts, step: int
) -> None:
    """Draw images that a user asked for at this step, beside its previews; the arguments are those of `draw`."""
    run, first = session.run, 0
    while get_path(run.samples, step, f"now-{first}").exists():
        first += 1
    session.processes.wait()  # until all have seen the same files
    paths = [get_path(run.samples, step, f"now-{first + i}") for i in range(len(prompts.conds))]
    if _draw_into(paths, session, denoiser, prompts, step):
        files = _name_files(run, paths, section)
        run.log_event("sample", step=step, **files, prompts=section.prompts, **_describe(section))


def _draw_into(
    paths: Sequence[Path],
    session: Session,
    denoiser: nn.Module,
    prompts: PreviewPrompts,
    step: int,
    is_stopped: Callable[[], bool] | None = None,
) -> bool:
    """Draw each prompt into a file; the processes share them. Return False if one failed, which is a warning."""
    family, processes = session.family, session.processes
    turns = processes.take_turns(range(len(prompts.conds)), lambda number: _describe_passes(prompts.tables[number]))
    numbers = [number for number, is_own in turns if is_own]
    # Turns in lockstep are as many in each process; otherwise the first process has the most.
    most = len(turns) if processes.lockstep else -(-len(paths) // processes.world)
    rounds = _Rounds(processes, is_stopped, most)
    problem, was_training, side = None, denoiser.training, get_resolution(session.job)
    denoiser.eval()  # no dropout
    drawn: list[list[Image.Image]] = []
    progress = StageProgress(session.run, "previews")
    progress.begin(len(numbers))
    try:
        with processes.passing(), without_attached(denoiser):
            pipeline = family.make_pipeline(denoiser, tiled=session.tiles_previews) if turns else None
            for number, is_own in turns:
                if not rounds.begin():
                    break
                clips = draw_clips(family, pipeline, prompts, side, [number])
                if is_own:
                    drawn += clips
                progress.update(len(drawn), len(numbers))
    except (RuntimeError, ValueError) as error:  # out of memory is a RuntimeError too
        if processes.is_cut_off:
            raise RunFailure(
                Message(
                    "the previews at step {step} failed: {line}. With memory.shard_base, the other processes cannot "
                    "continue without this one. Resume with preview.prompts = [], or with memory.shard_base = false",
                    step=step,
                    line=(str(error).splitlines() or [type(error).__name__])[0],
                )
            ) from error
        problem = (str(error).splitlines() or [type(error).__name__])[0]
    finally:
        denoiser.train(was_training)
    rounds.follow()
    if rounds.are_stopped:
        raise StoppedDrawing
    if problem is None:
        save(drawn, [paths[number] for number in numbers], family.clips[1])
    problems = [text for text in processes.gather(problem) if text is not None]
    if problems:
        session.warn(Message("the preview at step {step} failed: {line}", step=step, line=problems[0]))
    return not problems


def _describe_passes(table: settings.Preview) -> tuple[Any, ...]:
    """Return what decides how many passes of the denoiser a pipeline makes for a prompt with this table."""
    return table.steps, table.guidance, bool(table.negative)


def _name_files(run: Run, paths: Sequence[Path], section: settings.Preview) -> dict[str, list[str]]:
    """Return the files of previews, relative to the run: images, and clips if there are any."""
    files = {"images": [str(path.relative_to(run.path)) for path in paths]}
    if section.frames > 1:
        files["clips"] = [str(path.with_suffix(".webp").relative_to(run.path)) for path in paths]
    return files


def _describe(section: settings.Preview) -> dict[str, Any]:
    """Return what previews were drawn with besides their prompts, as the run's log has it."""
    return section.model_dump(include={"negative", "seed", "steps", "guidance"})


def make_pipeline_settings(family: ModelFamily, section: settings.Preview, side: int) -> dict[str, Any]:
    """Make the arguments of the pipeline call that do not depend on the prompt."""
    return {
        **family.call_options,
        **({"num_frames": section.frames} if section.frames > 1 else {}),
        **family.make_guidance_inputs(family.choose_guidance() if section.guidance == "auto" else section.guidance),
        "num_inference_steps": section.steps,
        **family.make_size_inputs(section.width or side, section.height or side),
    }


def get_path(folder: Path, step: int, number: int | str) -> Path:
    """Return the path of the preview of a prompt."""
    return folder / f"step-{step:06d}-{number}.png"


def save(drawn: Sequence[list[Image.Image]], paths: Sequence[Path], fps: int) -> None:
    """Write previews, each file completely or not at all.

    Args:
        drawn: the frames of each preview.
        paths: the file of each; its folder is created if missing.
        fps: frames per second of clips.
    """
    for (first, *rest), path in zip(drawn, paths, strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        webp = io.BytesIO()
        write_png(first, path)
        if rest:
            first.save(webp, "WEBP", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0, quality=90)
            atomic_write(path.with_suffix(".webp"), webp.getvalue())


def write_png(image: Image.Image, path: Path, pnginfo: PngImagePlugin.PngInfo | None = None) -> None:
    """Write an image as PNG, completely or not at all."""
    png = io.BytesIO()
    image.save(png, "PNG", pnginfo=pnginfo)
    atomic_write(path, png.getvalue())


def read(path: Path) -> Image.Image:
    """Read an image into memory."""
    with Image.open(path) as image:
        return image.copy()


def draw_contact_sheet(
    rows: dict[str, Sequence[Image.Image]], columns: Sequence[str] = (), scale: int = 1
) -> Image.Image:
    """Draw rows of images into one image, each row under its label: base model above, LoRA below, same seeds.

    Args:
        rows: label -> images.
        columns: captions above the columns.
        scale: whole-number enlargement (nearest neighbour), for tiny images.
    """
    sizes = [image.size for images in rows.values() for image in images]
    width, height = (scale * max(sides) for sides in zip(*sizes, strict=True))
    margin, text_height = 6, 16
    num_columns = max(map(len, rows.values()))
    head = text_height if columns else 0
    sheet = Image.new(
        "RGB",
        (margin + num_columns * (width + margin), margin + head + len(rows) * (text_height + height + margin)),
        "white",
    )
    draw = ImageDraw.Draw(sheet)
    for i, text in enumerate(columns):
        draw.text((margin + i * (width + margin), margin), _shorten(draw, text, width), fill="black")
    y = margin + head
    for label, images in rows.items():
        draw.text((margin, y), label, fill="black")
        for i, image in enumerate(images):
            sheet.paste(
                image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST),
                (margin + i * (width + margin), y + text_height),
            )
        y += text_height + height + margin
    return sheet


def _shorten(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    text = " ".join(text.split())  # Pillow cannot measure the width of several lines
    if draw.textlength(text) <= width:
        return text
    while text and draw.textlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
