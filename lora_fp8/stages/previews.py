"""Previews while training: the real diffusers pipeline around the training denoiser, always from the same seeds.

A preview draws nothing from the training's random numbers (its noise comes from its own CPU generator), so that a run
with previews and one without end with the same bytes.

With preview.frames above 1 a preview is a clip: its first frame is a PNG as any preview, and beside it stands a WebP
with all of them, at the model's frame rate.
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
from ..families.base import Cond, ModelFamily
from .session import Session


def render(
    family: ModelFamily,
    pipeline: Any,
    conds: list[Cond],
    negatives: list[Cond] | None,
    section: settings.Preview,
    side: int,
) -> list[Image.Image]:
    """The first frame of each of `clips`: of a picture, the picture."""
    return [frames[0] for frames in clips(family, pipeline, conds, negatives, section, side)]


@torch.no_grad()
def clips(
    family: ModelFamily,
    pipeline: Any,
    conds: list[Cond],
    negatives: list[Cond] | None,
    section: settings.Preview,
    side: int,
    numbers: Sequence[int] | None = None,
) -> list[list[Image.Image]]:
    """Draw one clip (a picture is one of one frame) per conditioning with a diffusers pipeline of the family.

    Args:
        conds: encoded prompts, unbatched, in the order of `section.prompts`.
        negatives: for each the encoded negative prompt, for classifier-free guidance.
        side: pixels, for a width or height of 0.
        numbers: which of them to draw, counted from 0; None draws all. Each has its own seed, so the others do not
            matter to it.
    """
    pipeline.set_progress_bar_config(disable=True)
    drawn = []
    for i in range(len(conds)) if numbers is None else numbers:
        generator = torch.Generator("cpu").manual_seed(section.seed + i)
        inputs = family.pipeline_inputs(conds[i], negatives[i] if negatives else None)
        output = pipeline(**inputs, **pipeline_settings(family, section, side), generator=generator)
        drawn.append(family.frames(output))
    return drawn


def draw(
    session: Session, denoiser: nn.Module, conds: list[Cond], negatives: list[Cond] | None, step: int
) -> list[Image.Image]:
    """Draw the previews of this step into the run's samples/, shared out: prompt i is drawn by process i % world.

    A failing preview is reported as a warning and the run goes on: the pictures are not the product.

    Returns:
        The images on the main process (of clips, the first frames), none on the others or where one failed.
    """
    family, run, processes = session.family, session.run, session.processes
    section, side = session.job.preview, session.job.dataset.resolution
    numbers = processes.share(range(len(conds)))
    problem, was_training = None, denoiser.training
    denoiser.eval()  # no dropout
    try:
        drawn = clips(family, family.pipeline(denoiser), conds, negatives, section, side, numbers) if numbers else []
    except (RuntimeError, ValueError) as error:  # out of memory is a RuntimeError too
        problem = (str(error).splitlines() or [type(error).__name__])[0]
    finally:
        denoiser.train(was_training)
    if problem is None:
        save(drawn, numbers, run.samples, step, family.clips[1])
    problems = [text for text in processes.gather(problem) if text is not None]
    if problems:
        session.warn(f"no preview at step {step}: {problems[0]}")
        return []
    if not processes.is_main:
        return []
    paths = [path_of(run.samples, step, i) for i in range(len(conds))]
    told = {"images": [str(path.relative_to(run.path)) for path in paths]}
    if section.frames > 1:
        told["clips"] = [str(path.with_suffix(".webp").relative_to(run.path)) for path in paths]
    run.log_event("preview", step=step, **told, prompts=section.prompts)
    return [read(path) for path in paths]


def pipeline_settings(family: ModelFamily, section: settings.Preview, side: int) -> dict[str, Any]:
    """The arguments of the pipeline call that do not depend on the prompt."""
    return {
        **family.call_options,
        **({"num_frames": section.frames} if section.frames > 1 else {}),
        **family.guidance_inputs(family.usual_guidance() if section.guidance == "auto" else section.guidance),
        "num_inference_steps": section.steps,
        **family.size_inputs(section.width or side, section.height or side),
    }


def path_of(folder: Path, step: int, number: int) -> Path:
    """Where the preview of a prompt is."""
    return folder / f"step-{step:06d}-{number}.png"


def save(drawn: Sequence[list[Image.Image]], numbers: Sequence[int], folder: Path, step: int, fps: int) -> None:
    """Write the previews with these numbers, each file whole or not at all.

    Args:
        drawn: the frames of each.
        fps: frames a second of clips.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for i, (first, *rest) in zip(numbers, drawn, strict=True):
        path, webp = path_of(folder, step, i), io.BytesIO()
        write_png(first, path)
        if rest:
            first.save(webp, "WEBP", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0, quality=90)
            atomic_write(path.with_suffix(".webp"), webp.getvalue())


def write_png(image: Image.Image, path: Path, pnginfo: PngImagePlugin.PngInfo | None = None) -> None:
    """Write a picture, whole or not at all."""
    png = io.BytesIO()
    image.save(png, "PNG", pnginfo=pnginfo)
    atomic_write(path, png.getvalue())


def read(path: Path) -> Image.Image:
    """A preview, in memory."""
    with Image.open(path) as image:
        return image.copy()


def contact_sheet(rows: dict[str, Sequence[Image.Image]], columns: Sequence[str] = (), scale: int = 1) -> Image.Image:
    """One picture of several rows of images, each row under its label: base above, LoRA below, same seeds.

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
    text = " ".join(text.split())  # of several lines Pillow measures no width
    if draw.textlength(text) <= width:
        return text
    while text and draw.textlength(text + "...") > width:
        text = text[:-1]
    return text + "..."
