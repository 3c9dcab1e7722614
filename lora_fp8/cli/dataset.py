"""The commands for images and captions: `lora-fp8 dataset ...`; commands.py adds them to `lora-fp8`."""

import fnmatch
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from ..data.captions import Repair
    from ..data.image_edits import Box
    from ..families.sources.description import BaseDescription

from ..common.shell import quote_path
from ..errors import Joined, Message, Plural, UserError, first_few
from .help import Group, Program
from .options import FOLDER, JSON, SET, load_config, print_json, print_lines


class _Dataset(Group):
    """A group whose default command is `look`: `dataset FOLDER` is `dataset look FOLDER`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] != "--help":
            args = ["look", *args]
        return super().parse_args(ctx, args)


dataset_app = Program(
    cls=_Dataset,
    no_args_is_help=True,
    help="Examine a dataset (`dataset FOLDER`), or edit what is in it.",
)


@dataset_app.command()
def look(
    target: Path = typer.Argument(..., metavar="FOLDER|CONFIG", help="Folder of images, or a job's config."),
    overrides: list[str] = SET,
    family: str = typer.Option(
        "", help="Architecture, for a folder: its resolution and text limit are used. Default: sdxl."
    ),
    resolution: int = typer.Option(
        0, min=0, help="Side of the training square, in pixels. 0: the config's, or the architecture's."
    ),
    trigger: str = typer.Option("", help="Trigger word, for a folder."),
    mask: str = typer.Option("", help="Masks of a folder: a folder or a name pattern, as in dataset.folders."),
    as_json: bool = JSON,
) -> None:
    """List facts and problems of a dataset. It covers sizes, buckets, crops, duplicates, tags and anything unusual."""
    from .. import config, errors, families, settings
    from ..common.progress import show_images
    from ..data import doctor, look_memory

    if not target.exists():
        raise errors.UserError(
            errors.looked_for(target, Message("{path}: there is no folder or config file of this name", path=target))
        )
    if target.is_dir():
        if unknown := [text for text in overrides if not re.match(r"dataset\.(?!folders)", text)]:
            raise errors.UserError(
                Message("--set {key}: for a folder, only settings of [dataset] have an effect", key=unknown[0])
            )
        family = family or "sdxl"
        control = {"control": "."} if any(families.get(family).controls) else {}
        folder_settings = {"path": ".", "trigger": trigger, "mask": mask, **control}
        lines = ["[model]", config.format_toml_line("family", family), "path='demo'", "[[dataset.folders]]"]
        job = config.loads(
            "\n".join(lines + [config.format_toml_line(*item) for item in folder_settings.items()]), overrides
        )
        folder = settings.Folder(path=str(target), trigger=trigger, mask=mask)
        section = job.dataset.model_copy(update={"folders": [folder]})
    else:
        if family or trigger or mask:
            raise errors.UserError(
                Message(
                    "--family, --trigger, --mask: the config already contains these settings; remove the "
                    "options, or give a folder"
                )
            )
        job = load_config(target, overrides)
        section, family = job.dataset, job.model.family
    purpose = doctor.Target.from_job(job, families.get(family))
    if resolution:
        purpose = replace(purpose, resolution=resolution)
    show = _print_progress if as_json else show_images()
    report = doctor.examine(section, purpose, remember=look_memory.find_default_folder(), progress=show)
    if as_json:
        print_json(report.to_json())
    else:
        print_lines(*report.format_lines())
    if not report.ok:
        sys.exit(2)


def _print_progress(done: int, total: int) -> None:
    print(json.dumps({"event": "progress", "done": done, "total": total}), file=sys.stderr, flush=True)


@dataset_app.command()
def edit(
    folder: Path = FOLDER,
    recode: str = typer.Option(
        "", metavar="ENCODING", help="Encoding of captions that are not UTF-8; they become UTF-8."
    ),
    text: str | None = typer.Option(None, "--set", help="New caption, in place of the old one."),
    replace: tuple[str, str] = typer.Option(("", ""), metavar="FIND BY", help="Text to replace, and its replacement."),
    pattern: tuple[str, str] = typer.Option(
        ("", ""), metavar="FIND BY", help="Regular expression to replace, and its replacement."
    ),
    rename_tag: tuple[str, str] = typer.Option(("", ""), metavar="OLD NEW", help="Tag to rename, and its new name."),
    remove_tag: list[str] = typer.Option([], metavar="TAG", help="Tag to remove. Repeatable."),
    add_tag: list[str] = typer.Option([], metavar="TAG", help="Tag to add where it is missing. Repeatable."),
    first: bool = typer.Option(False, help="Put tags of --add-tag first, not last."),
    dedupe: bool = typer.Option(False, help="Remove duplicate tags."),
    sort: bool = typer.Option(False, help="Sort the tags."),
    keep: int = typer.Option(0, min=0, help="Number of first tags that --sort leaves in place."),
    prepend: str = typer.Option("", metavar="TEXT", help="Text to put in front, without a separator."),
    append: str = typer.Option("", metavar="TEXT", help="Text to put at the end, without a separator."),
    trigger: str = typer.Option("", metavar="WORD", help="Trigger word to put in front where it is missing."),
    separator: str = typer.Option(",", help="Separator of tags."),
    only: str = typer.Option("", metavar="GLOB", help="Name pattern of the images to edit, such as 'deep/*'."),
    mask: str = typer.Option(
        "", help="Name pattern of masks beside the images, such as '*-masklabel'; masks have no caption."
    ),
    having: list[str] = typer.Option([], metavar="TAG", help="Edit only captions with this tag. Repeatable."),
    lacking: list[str] = typer.Option([], metavar="TAG", help="Edit only captions without this tag. Repeatable."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Show the changes, and write nothing."),
    as_json: bool = JSON,
) -> None:
    """Edit captions. Options apply in the order of this list; `dataset undo` restores every byte."""
    from ..data import caption_operations, captions

    options = caption_operations.EditOptions(
        recode=recode, text=text, replace=replace, pattern=pattern, rename_tag=rename_tag, remove_tag=remove_tag,
        add_tag=add_tag, first=first, dedupe=dedupe, sort=sort, keep=keep, prepend=prepend, append=append,
        trigger=trigger, separator=separator,
    )  # fmt: skip
    operations = options.list_operations()
    if not operations:
        raise UserError(Message("no edit was given. `lora-fp8 dataset edit --help` lists the edits"))
    chosen = captions.select(folder, glob=only, having=having, lacking=lacking, separator=separator, mask=mask)
    preview = captions.preview(folder, operations, chosen)
    entry = captions.apply(folder, preview) if preview.changes and not dry_run else None
    changes = [{"file": change.file, "before": texts[0], "after": texts[1]}
               for change in preview.changes for texts in [change.decode_texts()]]  # fmt: skip
    if as_json:
        content = {"title": preview.title, "changes": changes, "problems": preview.problems}
        print_json(content | {"edit": entry.id if entry else None})
        return
    for change in changes if dry_run else []:
        print(f"{change['file']}\n- {change['before']}\n+ {change['after']}")
    for line in preview.problems:
        print_lines(Message("not changed: {line}", line=line))
    counts = {"path": folder, "count": len(changes), "total": len(chosen)}
    if dry_run:
        print_lines(Message("{path}: {count} of {total} captions would change", **counts))
    elif entry:
        print_lines(
            Message("{path}: {count} of {total} captions changed; `lora-fp8 dataset undo` undoes it", **counts),
        )
    else:
        print_lines(Message("{path}: {count} of {total} captions changed", **counts))


@dataset_app.command()
def images(
    folder: Path = FOLDER,
    only: str = typer.Option("", metavar="GLOB", help="Name pattern of the images, such as 'deep/*'. '*' is all."),
    exclude: bool = typer.Option(False, "--exclude", help="Leave the images out of training."),
    include: bool = typer.Option(False, "--include", help="Include excluded images again."),
    turn: int = typer.Option(0, metavar="DEGREES", help="Turn clockwise by 90, 180 or 270 degrees."),
    crop: tuple[float, float, float, float] | None = typer.Option(
        None,
        metavar="LEFT TOP RIGHT BOTTOM",
        help="Part of the turned image to train on, as fractions of its width and height. 0 0 1 1 is all of it.",
    ),
    as_json: bool = JSON,
) -> None:
    """Exclude, turn or crop images for training, or list what is changed. The image files stay as they are."""
    from ..data import image_changes, image_edits

    root = folder.expanduser()
    chosen = [name for name in image_changes.list_images(root) if not only or fnmatch.fnmatchcase(name, only)]
    if only and not chosen:
        raise UserError(Message("--only {glob}: no image of {path} has such a name", glob=repr(only), path=folder))
    changes = [exclude, include, turn != 0, crop is not None].count(True)
    if changes:
        if changes > 1:
            raise UserError(Message("--exclude, --include, --turn, --crop: give only one of them"))
        if not only:
            raise UserError(Message("--only GLOB: no images are named; give a name pattern, or '*' for all images"))
        if exclude or include:
            change = image_changes.ImageChange(exclude=exclude)
        elif turn:
            change = image_changes.ImageChange(turn=turn)
        else:
            change = image_changes.ImageChange(crop=_read_crop(crop or ()))
        edit = image_changes.change_images(root, chosen, change)
        if not as_json:
            title = edit.title if edit.changes else Message("nothing to change")
            print_lines(Message("{path}: {line}", path=folder, line=title))
    known = image_edits.read(root)
    edits = {name: known[name] for name in chosen if known.get(name, image_edits.NOTHING) != image_edits.NOTHING}
    if as_json:
        print_json({name: vars(edit) for name, edit in edits.items()})
    elif not changes:
        print_lines(
            *(f"{name}: {', '.join(image_edits.list_settings(edit))}" for name, edit in edits.items()),
            Message(
                "{path}: {count} of {total} images are excluded, turned or cropped",
                path=folder,
                count=len(edits),
                total=len(chosen),
            ),
        )


@dataset_app.command("import")
def import_dataset(
    source: str = typer.Argument(
        ...,
        metavar="SOURCE",
        help="Folder or file (metadata.jsonl or .csv, parquet, tar, JSON of captions), or OWNER/NAME on Hugging Face.",
    ),
    folder: Path | None = typer.Argument(
        None, metavar="[FOLDER]", help="New or empty folder to write into. Default: captions go beside SOURCE's images."
    ),
    caption: str = typer.Option("", metavar="COLUMN", help="Column with the captions. Default: the usual names."),
    limit: int = typer.Option(0, min=0, help="Number of images to take. 0: all."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Also replace captions that are there, without FOLDER."),
    files: str = typer.Option("", metavar="PATTERN", help="On Hugging Face: only these files, such as 'data/train-*'."),
    revision: str = typer.Option("", help="On Hugging Face: branch, tag or commit."),
    as_json: bool = JSON,
) -> None:
    """Import a dataset in another form, such as one from Hugging Face. The result is images with .txt captions."""
    from ..common.progress import CountProgress
    from ..data import dataset_import, foreign_datasets
    from ..tools import hub_dataset

    fetched = _fetch_dataset(source, revision, files, folder, is_shown=not as_json)
    place = Path(source) if fetched is None or fetched.folder is None else fetched.folder
    known = foreign_datasets.find_source(place, caption, plain=fetched is not None)
    if folder is None:
        if limit:
            raise UserError(Message("--limit: the option needs a new FOLDER to import into"))
        report = dataset_import.import_captions(known, overwrite=overwrite)
    else:
        if overwrite:
            raise UserError(
                Message("--overwrite: the option applies to captions beside the images; in FOLDER, nothing is replaced")
            )
        count = CountProgress(Message("images"))
        report = dataset_import.import_images(known, folder, limit=limit, progress=count.show)
    if fetched and not limit:
        hub_dataset.forget(fetched)
    if as_json:
        print_json(vars(report))
        return
    place = folder or known.root
    lines = [
        Plural(
            "{path}: {count} image, {number} of them without a caption",
            "{path}: {count} images, {number} of them without a caption",
        )(path=place, count=report.images, number=report.uncaptioned)
    ]
    if report.kept:
        text = Plural(
            "{count} caption existed already and was kept; --overwrite replaces it",
            "{count} captions existed already and were kept; --overwrite replaces them",
        )
        lines.append(text(count=report.kept))
    for text, problems in (
        (
            Plural(
                "warning: {count} record or file was skipped: {lines}",
                "warning: {count} records or files were skipped: {lines}",
            ),
            report.problems,
        ),
        (
            Plural(
                "warning: {count} caption could not be used: {lines}",
                "warning: {count} captions could not be used: {lines}",
            ),
            report.caption_problems,
        ),
    ):
        if problems:
            lines.append(text(count=len(problems), lines=Joined("; ", problems[:5])))
    print_lines(*lines, Message("next: {command}", command=f"lora-fp8 dataset {quote_path(place)}"))


def _fetch_dataset(
    source: str, revision: str, files: str, folder: Path | None, *, is_shown: bool
) -> "BaseDescription | None":
    """Download a dataset from Hugging Face; None for what is on this machine."""
    from ..data import dataset_import
    from ..families.sources import download as downloading
    from ..families.sources.reference import parse_dataset
    from ..run import StopSignal
    from ..stages.progress import DownloadProgress
    from ..tools import hub_dataset

    reference = None if os.path.lexists(os.path.expanduser(source)) else parse_dataset(source)
    if reference is None:
        if revision or files:
            raise UserError(Message("--files, --revision: these options apply to datasets on Hugging Face only"))
        return None
    if folder is None:
        raise UserError(
            Message(
                "{name}: there is no file or folder of this name here. For a dataset on Hugging Face, also give a "
                "FOLDER to write into",
                name=reference.name,
            )
        )
    known = hub_dataset.describe(reference, revision, files)
    if known.missing:
        dataset_import.require_empty(folder)  # an import begins when all is here
        if is_shown:
            print_lines(*known.lines)
    stop = StopSignal()
    stop.at_once = downloading.STOPPED
    with stop.watching(), DownloadProgress(reference.name, is_shown=is_shown) as bar:
        hub_dataset.fetch(known, bar.update)
    return known


@dataset_app.command()
def undo(folder: Path = FOLDER) -> None:
    """Undo the last edit of captions or images. It restores every byte, and stops if a file was changed since."""
    from ..data import captions

    entry = captions.undo(folder)
    text = Plural("{path}: undone in {count} file: {line}", "{path}: undone in {count} files: {line}")
    print_lines(text(path=folder, count=entry.files, line=entry.title))


@dataset_app.command()
def redo(folder: Path = FOLDER) -> None:
    """Redo the edit that was undone last."""
    from ..data import captions

    entry = captions.redo(folder)
    text = Plural("{path}: redone in {count} file: {line}", "{path}: redone in {count} files: {line}")
    print_lines(text(path=folder, count=entry.files, line=entry.title))


@dataset_app.command()
def repair(
    folder: Path = FOLDER,
    dry_run: bool = typer.Option(False, "--dry-run", help="Show the repairs, and write nothing."),
    as_json: bool = JSON,
) -> None:
    """Repair captions after a crash. Undo an incomplete edit, restore damaged files, and delete temporary ones."""
    from ..data import captions

    repair_report = captions.repair(folder, dry_run)
    if as_json:
        print_json(vars(repair_report))
        return
    lines = _list_repairs(repair_report, dry_run)
    print_lines(
        *(Message("{key}: {line}", key=folder, line=line) for line in lines or [Message("no caption needs repair")])
    )


@dataset_app.command()
def history(folder: Path = FOLDER, as_json: bool = JSON) -> None:
    """List the edits of captions and images that can be undone or redone."""
    from ..data import captions

    entries = captions.read_history(folder)
    if as_json:
        print_json([vars(entry) for entry in entries])
        return
    for entry in entries:
        template = Plural("{time}  {count} file  {line}", "{time}  {count} files  {line}")
        if entry.half_done:
            template = Plural(
                "{time}  {count} file  {line}  (incomplete; `lora-fp8 dataset repair` undoes it)",
                "{time}  {count} files  {line}  (incomplete; `lora-fp8 dataset repair` undoes it)",
            )
        elif not entry.done:
            template = Plural("{time}  {count} file  {line}  (undone)", "{time}  {count} files  {line}  (undone)")
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.t))
        print_lines(template(time=when, count=entry.files, line=entry.title))


def _read_crop(crop: Sequence[float]) -> "Box":
    from ..data import image_edits

    try:
        return image_edits.read_edit({"crop": list(crop)}).crop
    except ValueError as error:
        raise UserError(Message("--crop: {line}", line=error.args[0])) from None


def _list_repairs(report: "Repair", dry_run: bool) -> list[Message]:
    lines = []
    about = {"count": len(report.taken_back), "line": report.title}
    if report.title and dry_run:
        text = Plural("would be undone in {count} file: {line}", "would be undone in {count} files: {line}")
        lines.append(text(**about))
    elif report.title:
        text = Plural(
            "undone in {count} file: {line}; `lora-fp8 dataset history` lists it",
            "undone in {count} files: {line}; `lora-fp8 dataset history` lists it",
        )
        lines.append(text(**about))
    if files := report.restored:
        about = {"count": len(files), "names": first_few(files)}
        if dry_run:
            text = Plural(
                "{count} damaged caption would be restored: {names}",
                "{count} damaged captions would be restored: {names}",
            )
            lines.append(text(**about))
        else:
            text = Plural("{count} damaged caption restored: {names}", "{count} damaged captions restored: {names}")
            lines.append(text(**about))
    if files := report.swept:
        about = {"count": len(files), "names": first_few(files)}
        if dry_run:
            text = Plural(
                "{count} temporary file would be deleted: {names}", "{count} temporary files would be deleted: {names}"
            )
            lines.append(text(**about))
        else:
            text = Plural("{count} temporary file deleted: {names}", "{count} temporary files deleted: {names}")
            lines.append(text(**about))
    if files := report.others:
        lines.append(
            Plural(
                "{count} caption was not changed, because another program edited it: {names}",
                "{count} captions were not changed, because another program edited them: {names}",
            )(count=len(files), names=first_few(files))
        )
    return lines
