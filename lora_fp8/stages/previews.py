"""Draw previews while training, with the diffusers pipeline around the training denoiser and always the same seeds.

The noise of a preview comes from its own CPU generator, not from the random numbers of the training. A run with
previews and one without therefore end with the same bytes.

With preview.frames above 1 a preview is a clip: its first frame is a PNG like any preview, and a WebP beside it has all
frames, at the model's frame rate.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, PngImagePlugin
from torch import nn

from .. import settings
from ..common.writing import atomic_write
from ..errors import Message
from ..families.base import ModelFamily
from ..plan.resolve import get_resolution
from .cache import PreviewPrompts
from .session import Session


def render(
    family: ModelFamily, pipeline: Any, prompts: PreviewPrompts, section: settings.Preview, side: int
) -> list[Image.Image]:
    """Draw one image per prompt: the first frame of each clip of `draw_clips`, whose arguments it has."""
    return [frames[0] for frames in draw_clips(family, pipeline, prompts, section, side)]


@torch.no_grad()
def draw_clips(
    family: ModelFamily,
    pipeline: Any,
    prompts: PreviewPrompts,
    section: settings.Preview,
    side: int,
    numbers: Sequence[int] | None = None,
) -> list[list[Image.Image]]:
    """Draw one clip per prompt with a diffusers pipeline of the family. An image is a clip of one frame.

    Args:
        family: of the pipeline.
        pipeline: the diffusers pipeline.
        prompts: encoded prompts and negative prompts.
        section: the job's `[preview]` table.
        side: pixels, for a width or height of 0.
        numbers: which of them to draw, counted from 0; None draws all. Each has its own seed, so leaving out some does
            not change the others.

    Returns:
        The frames of each clip.
    """
    pipeline.set_progress_bar_config(disable=True)
    drawn = []
    conds, negatives = prompts.conds, prompts.negatives
    for i in range(len(conds)) if numbers is None else numbers:
        generator = torch.Generator("cpu").manual_seed(section.seed + i)
        inputs = family.pipeline_inputs(conds[i], negatives[i] if negatives else None)
        output = pipeline(**inputs, **make_pipeline_settings(family, section, side), generator=generator)
        drawn.append(family.frames(output))
    return drawn


def draw(session: Session, denoiser: nn.Module, prompts: PreviewPrompts, step: int) -> list[Image.Image]:
    """Draw the previews of this step into the run's samples/. Process i % world draws prompt i.

    A failing preview is a warning, and the run continues: the LoRA does not depend on previews.

    Returns:
        The images on the main process (of clips, the first frames), none on the others or where one failed.
    """
    family, run, processes = session.family, session.run, session.processes
    section, side = session.job.preview, get_resolution(session.job)
    numbers = processes.share(range(len(prompts.conds)))
    problem, was_training = None, denoiser.training
    denoiser.eval()  # no dropout
    try:
        drawn = draw_clips(family, family.pipeline(denoiser), prompts, section, side, numbers) if numbers else []
    except (RuntimeError, ValueError) as error:  # out of memory is a RuntimeError too
        problem = (str(error).splitlines() or [type(error).__name__])[0]
    finally:
        denoiser.train(was_training)
    if problem is None:
        save(drawn, numbers, run.samples, step, family.clips[1])
    problems = [text for text in processes.gather(problem) if text is not None]
    if problems:
        session.warn(Message("no preview at step {step}: {line}", step=step, line=problems[0]))
        return []
    if not processes.is_main:
        return []
    paths = [get_path(run.samples, step, i) for i in range(len(prompts.conds))]
    paths_by_kind = {"images": [str(path.relative_to(run.path)) for path in paths]}
    if section.frames > 1:
        paths_by_kind["clips"] = [str(path.with_suffix(".webp").relative_to(run.path)) for path in paths]
    run.log_event("preview", step=step, **paths_by_kind, prompts=section.prompts)
    return [read(path) for path in paths]


def make_pipeline_settings(family: ModelFamily, section: settings.Preview, side: int) -> dict[str, Any]:
    """Make the arguments of the pipeline call that do not depend on the prompt."""
    return {
        **family.call_options,
        **({"num_frames": section.frames} if section.frames > 1 else {}),
        **family.guidance_inputs(family.usual_guidance() if section.guidance == "auto" else section.guidance),
        "num_inference_steps": section.steps,
        **family.size_inputs(section.width or side, section.height or side),
    }


def get_path(folder: Path, step: int, number: int) -> Path:
    """Return the path of the preview of a prompt."""
    return folder / f"step-{step:06d}-{number}.png"


def save(drawn: Sequence[list[Image.Image]], numbers: Sequence[int], folder: Path, step: int, fps: int) -> None:
    """Write the previews with these numbers, each file completely or not at all.

    Args:
        drawn: the frames of each preview.
        numbers: the prompt number of each.
        folder: the run's samples/, created if missing.
        step: for the file names.
        fps: frames per second of clips.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for i, (first, *rest) in zip(numbers, drawn, strict=True):
        path, webp = get_path(folder, step, i), io.BytesIO()
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


def contact_sheet(rows: dict[str, Sequence[Image.Image]], columns: Sequence[str] = (), scale: int = 1) -> Image.Image:
    """Draw rows of images into one image, each row under its label: base model above, LoRA below, same seeds.

    Args:
        rows: label -> images; all images of one size.
        columns: captions above the columns.
        scale: whole-number enlargement (nearest neighbour), for tiny images.
    """
    width, height = (side * scale for side in next(iter(rows.values()))[0].size)
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
                image.resize((width, height), Image.Resampling.NEAREST),
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
