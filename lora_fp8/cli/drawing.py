"""The command that draws with a LoRA: `lora-fp8 draw`; commands.py adds it."""

from pathlib import Path
from typing import Any

import typer

from ..errors import Message
from .options import JSON, SET, print_json, print_lines


def add_to(app: typer.Typer) -> None:
    """Add this command to `lora-fp8`."""
    app.command()(draw)


def draw(
    sources: list[Path] = typer.Argument(
        None, metavar="[RUN | FILE...]", help="Run folders and LoRA files. Default: only the base model."
    ),
    out: Path = typer.Option(..., metavar="DIR", help="Folder to write, new or empty."),
    prompt: str = typer.Option("", help="Prompt. Default: the run's first preview prompt."),
    negative: str | None = typer.Option(None, help="Negative prompt. Default: as in the run's previews."),
    seed: int | None = typer.Option(None, help="Seed of every image. Default: as in the run's previews."),
    width: int | None = typer.Option(None, help="Width in pixels. Default: as in the run's previews."),
    height: int | None = typer.Option(None, help="Height in pixels. Default: as in the run's previews."),
    steps: int | None = typer.Option(None, help="Number of denoising steps. Default: as in the run's previews."),
    guidance: float | None = typer.Option(None, help="Guidance scale (CFG). Default: as in the run's previews."),
    strengths: list[float] = typer.Option([1.0], "--strength", help="Strength of the LoRA, 0 to 4. Repeatable."),
    checkpoints: list[int] = typer.Option(
        [0],
        "--step",
        help="Step of a run's checkpoint; 0: the newest. Repeatable; each checkpoint is drawn at each strength.",
    ),
    with_base: bool = typer.Option(True, "--base/--no-base", help="Draw the base model, too."),
    model: str = typer.Option("", help="Base model: path, hub id or 'demo'. Default: the first run's."),
    family: str = typer.Option("", help="Architecture of --model. Default: read from the first file."),
    control: str = typer.Option("", help="Control image of an editing model. Default: the run's first control image."),
    device: str = typer.Option("auto", help="Device: auto, cpu or cuda. auto: a GPU if there is one."),
    overrides: list[str] = SET,
    as_json: bool = JSON,
) -> None:
    """Draw a prompt with LoRAs at several strengths.

    The base model is drawn for comparison; running trainings are not affected.
    """
    from ..tools import draw as tool

    given = {"negative": negative, "seed": seed, "width": width, "height": height, "steps": steps, "guidance": guidance}
    request = tool.Request(
        sources=tuple(sources or ()),
        steps=tuple(dict.fromkeys(checkpoints)),
        strengths=tuple(dict.fromkeys(strengths)),
        with_base=with_base,
        model=model,
        family=family,
        device=device,
        overrides=(*overrides, *tool.make_overrides(prompt, control, **given)),
    )

    def report(record: dict[str, Any]) -> None:
        if not as_json:
            path = out / record["images"][-1]["file"]
            print_lines(Message("{done} of {total}: {path}", done=record["done"], total=record["total"], path=path))

    record = tool.draw(request, out, report)
    if as_json:
        print_json(record | {"folder": str(out)})
    else:
        print_lines(Message("{path} written", path=out / str(record["grid"])))
