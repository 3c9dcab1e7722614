"""The commands for the image cache and for captions by a model; commands.py adds them."""

import time
from pathlib import Path
from typing import Literal, cast

import typer

from ..errors import Message, Plural, UserError
from .events import print_event, print_json_line
from .options import FOLDER, JSON, print_json, print_lines
from .streams import works


def add_to(app: typer.Typer) -> None:
    """Add these commands to `lora-fp8`."""
    for command in (cache, caption):
        app.command()(command)


def cache(
    folder: Path = typer.Argument(Path("cache"), help="Cache folder: dataset.cache_dir of your runs."),
    prune_unused_days: float | None = typer.Option(
        None, metavar="N", help="Days without use after which entries are deleted. Default: delete nothing."
    ),
    limit: float | None = typer.Option(
        None, min=0, metavar="GIB", help="Size to shrink the cache to. Entries used in the last 24 hours are kept."
    ),
    as_json: bool = JSON,
) -> None:
    """Show size and last use of the image cache. Delete entries that no run uses any more."""
    from ..data import cache_cleanup

    deleted = cache_cleanup.prune(folder, prune_unused_days) if prune_unused_days is not None else []
    deleted += cache_cleanup.shrink(folder, limit * 2**30) if limit is not None else []
    entries = cache_cleanup.list_entries(folder)
    held_bytes, deleted_bytes = (sum(entry.bytes for entry in listed) for listed in (entries, deleted))
    content = {
        "folder": str(folder),
        "entries": len(entries),
        "bytes": held_bytes,
        "oldest_use": entries[0].used if entries else None,
        "newest_use": entries[-1].used if entries else None,
        "deleted": len(deleted),
        "deleted_bytes": deleted_bytes,
    }
    if as_json:
        print_json(content)
        return
    if prune_unused_days is not None or limit is not None:
        size = f"{deleted_bytes / 2**20:.1f}"
        text = Plural("{path}: {count} entry deleted, {size} MiB", "{path}: {count} entries deleted, {size} MiB")
        print_lines(text(path=folder, count=len(deleted), size=size))
    size = f"{held_bytes / 2**20:.1f}"
    text = Plural("{path}: {count} entry, {size} MiB", "{path}: {count} entries, {size} MiB")
    print_lines(text(path=folder, count=len(entries), size=size))
    if limit is not None and held_bytes > limit * 2**30:
        print_lines(
            Message(
                "the cache is still larger than --limit: entries of the last 24 hours are kept, as a run may be "
                "using them"
            )
        )
    if entries:
        most, least = (f"{(time.time() - entry.used) / 86400:.0f}" for entry in (entries[0], entries[-1]))
        used = Message("last used between {most} and {least} days ago", most=most, least=least)
        print_lines(used if most != least else Message("last used {most} days ago", most=most))


@works
def caption(
    folder: Path = FOLDER,
    model: str = typer.Option(..., help="Captioning model: folder or Hugging Face id (OWNER/NAME)."),
    kind: str = typer.Option("", help="Kind of caption: text or tags. Default: tags for a tagger, else text."),
    prompt: str = typer.Option("", help="Prompt for the model. Default: one that fits the kind."),
    overwrite: bool = typer.Option(
        False, "--overwrite/--only-missing", help="Caption all images, or only those without a caption."
    ),
    append: bool = typer.Option(False, "--append", help="Add tags to captions that are there. For --kind tags."),
    trigger: str = typer.Option("", help="Trigger word to put in front."),
    mask: str = typer.Option(
        "", help="Name pattern of masks beside the images, such as '*-masklabel'; masks get no caption."
    ),
    threshold: float = typer.Option(0.35, min=0, max=1, help="Lowest probability of a tag, for a tagger."),
    character_threshold: float = typer.Option(
        0.85, min=0, max=1, help="Lowest probability of the name of a character, for a WD tagger."
    ),
    rating: bool = typer.Option(False, "--rating", help="Add the most probable rating last, for a WD tagger."),
    keep_underscores: bool = typer.Option(
        False, "--keep-underscores", help="Write long_hair instead of long hair, for a tagger."
    ),
    exclude: list[str] = typer.Option([], metavar="TAG", help="Tag to leave out. Repeatable."),
    max_tokens: int = typer.Option(300, min=1, help="Longest caption, in tokens."),
    batch_size: int = typer.Option(1, min=1, max=256, help="Batch size: images captioned at once."),
    dtype: str = typer.Option("", help="Dtype of the model: bf16, fp16 or fp32. Default: bf16 on a GPU, else fp32."),
    revision: str = typer.Option("", help="Branch, tag or commit on the hub."),
    as_json: bool = JSON,
) -> None:
    """Caption images with a model. A second call continues a stopped one; `dataset undo` restores the old captions."""
    if kind not in ("", "text", "tags"):
        raise UserError(Message("--kind {kind}: accepted are text, tags", kind=repr(kind)))
    from ..tools import captioner

    settings = captioner.Settings(
        model,
        cast(Literal["", "text", "tags"], kind),
        prompt,
        overwrite=overwrite,
        append=append,
        trigger=trigger,
        max_tokens=max_tokens,
        threshold=threshold,
        character_threshold=character_threshold,
        rating=rating,
        keep_underscores=keep_underscores,
        exclude=tuple(exclude),
        batch_size=batch_size,
        dtype=dtype,
        revision=revision,
    )
    echo = print_json_line if as_json else print_event
    result = captioner.run(folder, settings, echo=echo, mask=mask, shows_progress=not as_json)
    captioner.raise_problems(result, folder)
    if not as_json:
        print_lines(
            Plural(
                "{path}: {count} caption written, {kept} existed already",
                "{path}: {count} captions written, {kept} existed already",
            )(path=folder, count=result.written, kept=result.kept)
        )
