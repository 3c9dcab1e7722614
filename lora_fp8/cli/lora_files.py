"""The commands for LoRA files: `lora-fp8 export | verify | inspect | convert | ...`; commands.py adds them."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..errors import Message, UserError
from .events import print_json_line
from .options import DTYPE, JSON, RUN, SET, print_json, print_lines

if TYPE_CHECKING:
    from ..tools.kit import Facts, Picture

TITLE = typer.Option("", help="Display name. Default: from the file.")
TRIGGER = typer.Option("", help="Trigger words. Default: from the file.")
DESCRIPTION = typer.Option("", help="Description. Default: from the file.")
LICENSE = typer.Option("", help="Licence as the Hub names it, such as apache-2.0. Default: from the file.")
BASE_MODEL = typer.Option("", help="Base model's id on the Hub. Default: from the run.")
STRENGTH = typer.Option(1.0, help="Recommended strength.")
FAMILY = typer.Option("", help="Architecture, if the file does not name it.")
LAYOUT = typer.Option("", help="Layout of the run's file to use. Default: the one that most programs read.")


def add_to(app: typer.Typer) -> None:
    """Add these commands to `lora-fp8`."""
    for command in (export, verify, inspect, convert, resize, merge, extract, average, kit, push):
        app.command()(command)


def export(
    folder: Path = RUN,
    overrides: list[str] = SET,
    step: int = typer.Option(0, help="Step of the checkpoint. 0: the newest."),
    best: bool = typer.Option(False, "--best", help="Export the step with the lowest held-out loss, as NAME-best."),
    formats: list[str] = typer.Option(
        [], "--format", help="Layout: auto, diffusers, comfy (ComfyUI) or kohya (A1111, Forge). Repeatable."
    ),
    kit: Path | None = typer.Option(
        None, metavar="DIR", help="Folder for publishing, as `lora-fp8 kit` creates it; new or empty."
    ),
    preview_metadata: bool = typer.Option(False, help="Print the files' metadata, and write nothing."),
    as_json: bool = JSON,
) -> None:
    """Write the LoRA files of a checkpoint again. Another dtype, for example, is --set export.dtype=fp16."""
    from .. import errors
    from ..stages import finish
    from ..tools import kit as tool

    if kit and preview_metadata:
        raise errors.UserError(
            Message("--preview-metadata writes nothing, but --kit writes a folder; give only one of them")
        )
    if best and step:
        raise errors.UserError(Message("--best and --step each choose a step; give only one of them"))
    if kit:
        tool.check_free(kit)

    overrides = [*overrides, *([f"export.formats={json.dumps(formats)}"] if formats else [])]
    if preview_metadata:
        metadata = finish.compute_metadata(folder, overrides, step, best)
        lines = [f"{layout}: {key} = {value}" for layout, values in metadata.items() for key, value in values.items()]
        if as_json:
            print_json(metadata)
        else:
            print_lines(*lines)
        return
    written = finish.export_run(folder, overrides, step, best)
    paths = [str(path) for path in written]
    if not kit:
        if as_json:
            print_json(paths)
        else:
            print_lines(*paths)
        return
    file, job, pictures = tool.collect_from_run(folder, among=written, step=step)
    publishing_kit = tool.make(file, kit, tool.collect_facts(file, {}, job), pictures)
    if as_json:
        content = {"files": paths, "kit": [str(path) for path in publishing_kit.files], "notes": publishing_kit.notes}
        print_json(content)
        return
    print_lines(*paths, *map(str, publishing_kit.files), *_name_notes(publishing_kit.notes))


def verify(
    file: Path = typer.Argument(..., metavar="FILE", help="LoRA .safetensors file."),
    base: str = typer.Option(
        "", help="Base model to load it into: path, hub id or 'demo'. Default: check only the file."
    ),
    family: str = typer.Option("", help="Architecture. Default: read from the file."),
    as_json: bool = JSON,
) -> None:
    """Check a LoRA file: header, hash, pairs, values. It also checks that diffusers loads every key."""
    from .. import verify as tool

    report = tool.check_file(file, base=base, family_name=family)
    if as_json:
        print_json(report.to_json())
    else:
        print_lines(*report.format_lines())
    if not report.ok:
        sys.exit(3)


def inspect(
    file: Path = typer.Argument(..., metavar="FILE", help="LoRA .safetensors file of any program."),
    as_json: bool = JSON,
) -> None:
    """Show layout, architecture and rank of a LoRA file. It also lists alpha, dtype, norms, metadata and hashes."""
    from ..tools import files

    about = files.inspect(file)
    if as_json:
        print_json(about.to_json())
    else:
        print_lines(*about.format_lines())


def convert(
    file: Path = typer.Argument(..., metavar="FILE", help="LoRA .safetensors file of any program."),
    layout: str = typer.Option(..., "--format", help="Layout: diffusers, comfy (ComfyUI) or kohya (A1111, Forge)."),
    output: Path | None = typer.Option(
        None, help="File to write. Default: beside FILE, with the layout added to its name."
    ),
    family: str = typer.Option("", help="Architecture. Default: read from the file."),
    base: str = typer.Option("", help="Base model, if its layers differ in size from the released model's."),
    dtype: str = DTYPE,
    as_json: bool = JSON,
) -> None:
    """Convert a LoRA to another program's layout."""
    from ..tools import files

    output = output or file.with_name(f"{file.stem}_{layout}.safetensors")
    layers = files.convert(file, output, layout, family=family, base=base, dtype=dtype)
    if as_json:
        print_json({"output": str(output), "layers": layers})
        return
    print_lines(
        Message("{path} written: {count} layers in the {layout} layout", path=output, count=layers, layout=layout),
    )


def resize(
    file: Path = typer.Argument(..., metavar="FILE", help="LoRA .safetensors file of any program."),
    output: Path | None = typer.Option(
        None, help="File to write. Default: beside FILE, with -resized added to its name."
    ),
    rank: int = typer.Option(0, help="Largest rank of a layer (kohya: network_dim). 0: set by --energy."),
    energy: float = typer.Option(0.0, help="Share of each layer's squared norm to keep, such as 0.98."),
    uniform: bool = typer.Option(False, help="Use one rank for all layers: the largest that one of them needs."),
    dtype: str = DTYPE,
    as_json: bool = JSON,
) -> None:
    """Resize a LoRA to a smaller rank. Each layer is the best approximation; the share that is kept is listed."""
    from ..tools import resize as tool

    output = output or file.with_name(f"{file.stem}-resized.safetensors")
    report = tool.resize(file, output, rank=rank, energy=energy, uniform=uniform, dtype=dtype)
    if as_json:
        print_json(report.to_json() | {"output": str(output)})
        return
    print_lines(*report.format_lines(), Message("{path} written", path=output))


def merge(
    files: list[str] = typer.Argument(
        ..., metavar="FILE:WEIGHT...", help="LoRA files with weights, such as a.safetensors:0.7."
    ),
    output: Path = typer.Option(..., help="File to write, or folder for a diffusers folder."),
    into: str = typer.Option(
        "", metavar="BASE", help="Base model to merge into: folder, single file or hub id. Default: write one LoRA."
    ),
    family: str = typer.Option("", help="Architecture of BASE. Default: as for the first LoRA."),
    components: str = typer.Option("", help="Diffusers folder with the other components, if BASE is a single file."),
    rank: int = typer.Option(0, help="Rank of the merged LoRA. 0: exact, the sum of the ranks."),
    energy: float = typer.Option(0.0, help="Share of each layer's squared norm to keep in the merged LoRA. 0: all."),
    dtype: str = DTYPE,
    as_json: bool = JSON,
) -> None:
    """Merge LoRAs into one LoRA, or into a base model."""
    from .. import errors
    from ..tools import merge as tool

    sources = [tool.parse_weighted(text) for text in files]
    if into:
        if rank or energy or dtype:
            raise errors.UserError(
                Message("--rank, --energy and --dtype apply to a merged LoRA; --into writes none. Remove them")
            )
        merged = tool.merge_into_base(sources, into, output, family_name=family, components=components)
        if as_json:
            content = {"layers": merged.layers, "files": [str(path) for path in merged.files]}
            print_json(content)
            return
        files = [Message("{path} written", path=path) for path in merged.files]
        print_lines(Message("{count} layers changed", count=merged.layers), *files)
        return
    if family or components:
        raise errors.UserError(Message("--family and --components apply to a base model; name it with --into BASE"))
    report = tool.merge(sources, output, rank=rank, energy=energy, dtype=dtype)
    if as_json:
        content = (report.to_json() if report else {}) | {"output": str(output)}
        print_json(content)
        return
    print_lines(*(report.format_lines() if report else []), Message("{path} written", path=output))


def extract(
    base: str = typer.Argument(..., metavar="BASE", help="Original model: diffusers folder, single file or hub id."),
    tuned: str = typer.Argument(..., metavar="TUNED", help="Fine-tuned model of the same architecture."),
    output: Path = typer.Option(..., help="LoRA file to write."),
    family: str = typer.Option(..., help="Architecture of both models."),
    components: str = typer.Option("", help="Diffusers folder with the other components, for single files."),
    rank: int = typer.Option(0, help="Largest rank of a layer (kohya: network_dim). 0: set by --energy."),
    energy: float = typer.Option(0.0, help="Share of each layer's squared difference to keep, such as 0.95."),
    layers: list[str] = typer.Option(
        [], help="Target modules, by the ends of their names, or all. Default: those that a LoRA trains. Repeatable."
    ),
    layout: str = typer.Option("", help="Layout of the file. Default: the one that most programs read."),
    dtype: str = typer.Option("bf16", help="Dtype of the file: bf16, fp16 or fp32."),
    as_json: bool = JSON,
) -> None:
    """Extract the difference of two models as a LoRA."""
    from ..tools import extract as tool

    models = tool.Models(base, tuned, family, components)
    options = tool.Options(rank, energy, layers, layout, dtype)
    report = tool.extract(models, output, options, progress=lambda line: print_lines(line, file=sys.stderr))
    if as_json:
        print_json(report.to_json() | {"output": str(output)})
        return
    print_lines(*report.format_lines(), Message("{path} written", path=output))


def average(
    sources: list[Path] = typer.Argument(
        ..., metavar="RUN | FILE...", help="Run folder, or LoRA files with the oldest first."
    ),
    kind: str = typer.Option(
        "factors",
        "--average",
        help="Kind of average. factors: the mean of A and of B, for checkpoints of one run. delta: the mean of B x A, "
        "resized to the files' rank, for files of different runs.",
    ),
    half_life: float = typer.Option(0.0, help="Steps (for files: positions) that halve the weight. 0: equal weights."),
    last: int = typer.Option(0, help="Number of newest checkpoints of a run. 0: all."),
    rank: int = typer.Option(0, help="Rank of the average of files, with --average delta. 0: as in the files."),
    output: Path | None = typer.Option(
        None, help="File to write, for files. A run's average is written to export/average/."
    ),
    dtype: str = DTYPE,
) -> None:
    """Average a run's checkpoints, or LoRA files."""
    from .. import errors
    from ..tools import average as tool

    if len(sources) == 1:
        if rank or dtype or output:
            raise errors.UserError(
                Message(
                    "--rank, --dtype and --output apply to files; a run's average is written like its own "
                    "files. Remove them"
                )
            )
        by_step, paths = tool.average_run(sources[0], what=kind, half_life=half_life, last=last)
        weights = [Message("{share}  step {step}", share=f"{share:7.2%}", step=step) for step, share in by_step.items()]
        print_lines(*weights, *map(str, paths))
        return
    if last or output is None:
        raise errors.UserError(
            Message("LoRA files need --output, the file to write; --last applies to runs, so name fewer files instead")
        )
    shares, report = tool.average_files(sources, output, what=kind, half_life=half_life, rank=rank, dtype=dtype)
    lines = [f"{share:7.2%}  {path}" for share, path in zip(shares, sources, strict=True)]
    print_lines(*lines, *(report.format_lines()[-1:] if report else []), Message("{path} written", path=output))


def kit(
    source: Path = typer.Argument(..., metavar="RUN | FILE", help="Run folder, or a LoRA .safetensors file."),
    out: Path = typer.Option(..., help="Folder to write, new or empty."),
    title: str = TITLE,
    trigger: str = TRIGGER,
    description: str = DESCRIPTION,
    license: str = LICENSE,
    base_model: str = BASE_MODEL,
    strength: float = STRENGTH,
    family: str = FAMILY,
    layout: str = LAYOUT,
    with_captions: bool = typer.Option(
        False, help="Keep caption tags, folder names and the config in the file's header."
    ),
    as_json: bool = JSON,
) -> None:
    """Make a folder for publishing a LoRA. It has sidecars, model card, samples, and texts for each host's form."""
    from ..tools import kit as tool

    texts = {"title": title, "trigger": trigger, "description": description, "license": license}
    file, facts, pictures = _choose_file(source, layout, texts | {"base_model": base_model, "family": family}, strength)
    publishing_kit = tool.make(file, out, facts, pictures, captions=with_captions)
    if as_json:
        print_json({"files": [str(path) for path in publishing_kit.files], "notes": publishing_kit.notes})
        return
    print_lines(*map(str, publishing_kit.files), *_name_notes(publishing_kit.notes))


def push(
    source: Path = typer.Argument(
        ..., metavar="RUN | FILE | KIT", help="Run folder, a LoRA .safetensors file, or a folder that kit created."
    ),
    repo: str = typer.Argument(..., metavar="OWNER/NAME", help="Repository. NAME alone uses your own account."),
    title: str = TITLE,
    trigger: str = TRIGGER,
    description: str = DESCRIPTION,
    license: str = LICENSE,
    base_model: str = BASE_MODEL,
    strength: float = STRENGTH,
    family: str = FAMILY,
    layout: str = LAYOUT,
    public: bool = typer.Option(False, help="Make a new repository public. Default: private."),
    update: bool = typer.Option(False, help="Update a repository that exists."),
    check: bool = typer.Option(False, help="Only check token, permissions and name; upload nothing."),
    as_json: bool = JSON,
) -> None:
    """Upload a LoRA, its model card and samples to Hugging Face. Token and name are checked first."""
    from tempfile import TemporaryDirectory

    from ..tools import hub
    from ..tools import kit as tool

    texts = {"title": title, "trigger": trigger, "description": description, "license": license}
    texts |= {"base_model": base_model, "family": family}
    is_kit = (source / tool.CARD).is_file()
    options = {**texts, "layout": layout, "strength": strength != STRENGTH.default}
    if is_kit and (given := [name for name, value in options.items() if value]):
        raise UserError(
            Message("{path} already contains its model card; remove {names}", path=source, names=", ".join(given))
        )
    chosen = None if is_kit else _choose_file(source, layout, texts, strength)
    target = hub.check(repo, public=public, update=update)
    if check:
        _print_result(as_json, "checked", target.page, [])
        return
    with TemporaryDirectory() as temporary:
        folder, notes = source, list[str]()
        if chosen is not None:
            file, facts, pictures = chosen
            folder = Path(temporary, "kit")
            notes = tool.make(file, folder, facts, pictures, repo=target.repo).notes
        ignored = set(tool.LANGUAGES.values())
        with _show_upload(target.repo, as_json) as report:
            address = hub.upload(folder, target, public=public, ignore=ignored, report=report)
    _print_result(as_json, "done", address, notes)


def _choose_file(
    source: Path, layout: str, texts: dict[str, str], strength: float
) -> tuple[Path, "Facts", list["Picture"]]:
    """Return the file to publish of a run, or the file itself, with the facts about it and its samples."""
    from ..tools import kit as tool

    if source.is_dir():
        if texts["family"]:
            raise UserError(Message("--family applies to files; a run already has an architecture. Remove it"))
        file, job, pictures = tool.collect_from_run(source, layout)
    else:
        if layout:
            raise UserError(Message("`--layout` applies to runs only; a file keeps its layout. Remove it"))
        file, job, pictures = source, None, []
    return file, tool.collect_facts(file, texts, job, strength), pictures


@contextlib.contextmanager
def _show_upload(repo: str, as_json: bool) -> Iterator[Callable[[Any], None]]:
    """Yield what shows the progress of an upload: a bar, or events as JSON lines."""
    from ..stages.progress import DownloadProgress

    def report(progress: Any) -> None:
        if as_json:
            print_json_line({"event": "upload", **progress.to_json()})

    with DownloadProgress(repo, is_shown=not as_json, report=report) as bar:
        yield bar.update


def _print_result(as_json: bool, event: str, address: str, notes: list[str]) -> None:
    if as_json:
        print_json_line({"event": event, "address": address, "notes": notes})
    else:
        print_lines(*_name_notes(notes), address)


def _name_notes(notes: list[str]) -> list[Message]:
    return [Message("note: {line}", line=note) for note in notes]
