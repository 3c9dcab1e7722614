"""The commands about pictures and captions: `lora-fp8 dataset ...`; added to `lora-fp8` by commands.py."""

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import typer

from .options import FOLDER, JSON, SET


class _Dataset(typer.core.TyperGroup):
    """`dataset FOLDER` is `dataset look FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["look", *args]
        return super().parse_args(ctx, args)


dataset_app = typer.Typer(
    cls=_Dataset,
    no_args_is_help=True,
    help="Look at a dataset (`dataset FOLDER`), edit its captions, undo, redo and repair.",
)


@dataset_app.command()
def look(
    target: Path = typer.Argument(..., metavar="FOLDER|CONFIG", help="A folder of pictures, or a job's config."),
    overrides: list[str] = SET,
    family: str = typer.Option("", help="Whose resolution and text limit count; a config says it."),
    resolution: int = typer.Option(0, min=0, help="Side of the square with the training area; 0 is the family's."),
    trigger: str = typer.Option("", help="Trigger word, where no config says it."),
    mask: str = typer.Option("", help="Where the masks are, where no config says it; as in dataset.folders."),
    remember: Path | None = typer.Option(None, metavar="FILE", help="Keep what was measured here, to be quick again."),
    as_json: bool = JSON,
) -> None:
    """Tell all about the pictures and captions: sizes, buckets and crops, copies, tags, and everything that is odd."""
    from .. import config, errors, families, settings
    from ..data import doctor

    if remember and remember.exists() and not doctor.is_remembered(remember):
        raise errors.UserError(f"--remember: {remember} exists already and holds no measurements. Name another file")
    if target.is_dir():
        if wrong := [text for text in overrides if not re.match(r"dataset\.(?!folders)", text)]:
            raise errors.UserError(f"--set {wrong[0]}: of a folder, settings of [dataset] alone have an effect")
        family = family or "sdxl"
        needed = {"control": "."} if any(families.facts(family).get("controls", ())) else {}
        given = {"path": ".", "trigger": trigger, "mask": mask, **needed}
        lines = ["[model]", config.toml_line("family", family), "path='demo'", "[[dataset.folders]]"]
        job = config.loads("\n".join(lines + [config.toml_line(*one) for one in given.items()]), overrides)
        folder = settings.Folder(path=str(target), trigger=trigger, mask=mask)
        section = job.dataset.model_copy(update={"folders": [folder]})
    else:
        if family or trigger or mask:
            raise errors.UserError("--family, --trigger, --mask: the config says it; leave them out, or give a folder")
        job = config.load(target, overrides)
        section, family = job.dataset, job.model.family
    if not resolution:
        auto = section.resolution == "auto"
        resolution = families.facts(family)["native_resolution"] if auto else section.resolution
    found = doctor.examine(
        section,
        resolution=resolution,
        step=doctor.BUCKET_STEP if section.bucket_step == "auto" else section.bucket_step,
        family=family,
        clip_rate=families.facts(family).get("clips", (0, 0))[1],
        unmasked_weight=job.objective.unmasked_weight,
        remember=remember,
        progress=_look_progress if as_json else None,
    )
    print(json.dumps(found.to_json(), ensure_ascii=False) if as_json else "\n".join(found.lines()))
    if not found.ok:
        sys.exit(2)


def _look_progress(done: int, total: int) -> None:
    print(json.dumps({"event": "progress", "done": done, "total": total}), file=sys.stderr, flush=True)


@dataset_app.command()
def edit(
    folder: Path = FOLDER,
    recode: str = typer.Option("", metavar="ENCODING", help="Read what is no UTF-8 in this encoding, write UTF-8."),
    text: str | None = typer.Option(None, "--set", help="The whole caption."),
    replace: tuple[str, str] = typer.Option(("", ""), metavar="FIND BY", help="Replace a text."),
    pattern: tuple[str, str] = typer.Option(("", ""), metavar="FIND BY", help="Replace by a regular expression."),
    rename_tag: tuple[str, str] = typer.Option(("", ""), metavar="OLD NEW", help="Rename a tag."),
    remove_tag: list[str] = typer.Option([], metavar="TAG", help="Take a tag out. Repeatable."),
    add_tag: list[str] = typer.Option([], metavar="TAG", help="Add a tag where it lacks. Repeatable."),
    first: bool = typer.Option(False, help="--add-tag puts it first, not last."),
    dedupe: bool = typer.Option(False, help="Leave the first of equal tags."),
    sort: bool = typer.Option(False, help="Sort the tags."),
    keep: int = typer.Option(0, min=0, help="--sort leaves the first N in place."),
    prepend: str = typer.Option("", metavar="TEXT", help="Put a text in front, as it is."),
    append: str = typer.Option("", metavar="TEXT", help="Put a text behind, as it is."),
    trigger: str = typer.Option("", metavar="WORD", help="Put a trigger word in front where it lacks."),
    separator: str = typer.Option(",", help="What separates tags."),
    only: str = typer.Option("", metavar="GLOB", help="Only pictures whose name in the folder fits, as 'deep/*'."),
    mask: str = typer.Option("", help="What masks beside the pictures are called, as '*-masklabel': they get none."),
    having: list[str] = typer.Option([], metavar="TAG", help="Only captions with this tag. Repeatable."),
    lacking: list[str] = typer.Option([], metavar="TAG", help="Only captions without this tag. Repeatable."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would change, and write nothing."),
    as_json: bool = JSON,
) -> None:
    """Edit captions; several options are done in the order of this list. `dataset undo` takes it back, to the byte."""
    from ..data import captions

    options = captions.EditOptions(
        recode=recode, text=text, replace=replace, pattern=pattern, rename_tag=rename_tag, remove_tag=remove_tag,
        add_tag=add_tag, first=first, dedupe=dedupe, sort=sort, keep=keep, prepend=prepend, append=append,
        trigger=trigger, separator=separator,
    )  # fmt: skip
    operations = options.operations()
    chosen = captions.select(folder, glob=only, having=having, lacking=lacking, separator=separator, mask=mask)
    found = captions.preview(folder, operations, chosen)
    entry = captions.apply(folder, found) if found.changes and not dry_run else None
    changes = [{"file": change.file, "before": texts[0], "after": texts[1]}
               for change in found.changes for texts in [change.texts()]]  # fmt: skip
    if as_json:
        told = {"title": found.title, "changes": changes, "problems": found.problems}
        print(json.dumps(told | {"edit": entry.id if entry else None}, ensure_ascii=False, indent=1))
        return
    for change in changes if dry_run else []:
        print(f"{change['file']}\n- {change['before']}\n+ {change['after']}")
    for line in found.problems:
        print(f"left as it is: {line}")
    done = "would change" if dry_run else "changed; `lora-fp8 dataset undo` takes it back" if entry else "changed"
    print(f"{folder}: {len(changes)} of {len(chosen)} captions {done}")


@dataset_app.command()
def undo(folder: Path = FOLDER) -> None:
    """Take the last caption edit back, to the byte; refused where somebody else has changed a caption since."""
    from ..data import captions

    entry = captions.undo(folder)
    print(f"{folder}: taken back in {entry.files} captions: {entry.title}")


@dataset_app.command()
def redo(folder: Path = FOLDER) -> None:
    """Do again the caption edit that was undone last."""
    from ..data import captions

    entry = captions.redo(folder)
    print(f"{folder}: done again in {entry.files} captions: {entry.title}")


@dataset_app.command()
def repair(
    folder: Path = FOLDER,
    dry_run: bool = typer.Option(False, "--dry-run", help="Show what would be repaired, and write nothing."),
    as_json: bool = JSON,
) -> None:
    """Repair captions after a crash: take back a half-done edit, restore damaged files, delete temporary ones."""
    from ..data import captions

    found = captions.repair(folder, dry_run)
    if as_json:
        print(json.dumps(vars(found), ensure_ascii=False, indent=1))
        return
    would = "would be " if dry_run else ""
    lines = []
    if found.title:
        again = "" if dry_run else "; `lora-fp8 dataset history` lists it"
        lines.append(f"{would}taken back in {len(found.taken_back)} captions: {found.title}{again}")
    for what, files in (
        ("damaged captions {would}restored", found.restored),
        ("temporary files {would}deleted", found.swept),
        ("captions left as they are, because somebody else has changed them", found.others),
    ):
        more = f" and {len(files) - 3} more" if len(files) > 3 else ""
        lines += [f"{len(files)} {what.format(would=would)}: {', '.join(files[:3])}{more}"] if files else []
    print("\n".join(f"{folder}: {line}" for line in lines or ["no caption needs repair"]))


@dataset_app.command()
def history(folder: Path = FOLDER, as_json: bool = JSON) -> None:
    """List the caption edits that can be undone and redone."""
    from ..data import captions

    entries = captions.history(folder)
    if as_json:
        print(json.dumps([vars(entry) for entry in entries], ensure_ascii=False, indent=1))
        return
    for entry in entries:
        state = "  (half done; `lora-fp8 dataset repair` takes it back)" if entry.half_done else ""
        state = state or ("" if entry.done else "  (undone)")
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.t))
        print(f"{when}  {entry.files} captions  {entry.title}{state}")
