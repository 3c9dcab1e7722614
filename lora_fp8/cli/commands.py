"""The commands of `lora-fp8`: each is a few lines over a library function, which it imports only when it runs.

Exit codes: 0 done; 2 wrong input (a message, no traceback); 3 failed while running; 75 stopped early, can be resumed.
"""

import contextlib
import errno
import importlib.util
import io
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import typer

from ..common.messages import add_translations, translate, without_home
from ..common.numbers import digits
from ..errors import Joined, Message
from . import dataset, jobs
from .options import CONFIG, DTYPE, FOLDER, JSON, LANGUAGE, RUN, SET, get_language, print_json, print_lines

app = typer.Typer(
    help="Train LoRAs for diffusion models on a base model frozen in FP8, and verify that the files work.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""Errors that make a path wrong input; other errors of the system may not occur the next time."""


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from .. import __version__

        print(f"lora-fp8 {__version__}")
        raise typer.Exit


@app.callback()
def _read_options(
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
    ),
    lang: str = typer.Option("", help="Language of messages: en or zh. Default: that of the environment (LANG)."),
) -> None:
    if lang:
        os.environ[LANGUAGE] = lang


def main() -> None:
    """Run the command line: the entry point of `lora-fp8`."""
    guarded(app)


def guarded(action: Callable[[], Any]) -> None:
    """Run an action, and turn an error into one clear message and its exit code."""
    from ..errors import UserError

    # The notices of the libraries (no torchvision, no optional kernel, keys of untrained encoders) do not help our
    # users. They appear if these variables are set.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # peft imports torchao if it is installed, and torchao reports kernels that it has for other machines.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal lacks must not end a training
            stream.reconfigure(errors="backslashreplace")
    try:
        action()
    except UserError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail(Message("interrupted"), 130)
    except Exception as error:
        from ..errors import RunFailure, Stopped

        if isinstance(error, Stopped):
            _fail(str(error), 75)
        if isinstance(error, RunFailure):
            _fail(str(error), 3)
        if isinstance(error, OSError) and error.filename is not None:  # no permission, a full disk
            message = Message("{path}: {why}", path=os.fsdecode(error.filename), why=error.strerror)
            _fail(message, 2 if error.errno in REFUSED else 3)
        raise


@app.command()
def new(
    path: Path = typer.Argument(..., help="Config file to write."),
    family: str = typer.Option("", help="Architecture, such as sdxl, flux or qwen_image. Default: sd15."),
    preset: list[str] = typer.Option([], help="Preset to start from; its values are written out. Repeatable."),
    from_lora: Path | None = typer.Option(None, metavar="FILE", help="LoRA file whose settings to copy."),
    force: bool = typer.Option(False, help="Replace an existing file."),
) -> None:
    """Write a config with every setting explained."""
    from .. import config, errors
    from ..common.writing import atomic_write
    from ..config import example

    if os.path.lexists(path) and not force:
        raise errors.UserError(
            Message("{path}: exists already; choose another name, or --force to replace it", path=path)
        )
    if from_lora:
        from ..lora_files.export_metadata import config_of

        if preset or family:
            line = Message("--from-lora: the file says family and settings; leave out --family and --preset")
            raise errors.UserError(line)
        job = config.loads(config_of(from_lora), [config.toml_line("name", path.stem)], where=str(from_lora))
    else:
        job = example(path.stem, family or "sd15", preset)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path.resolve(), config.commented(job.model_copy(update={"preset": []})).encode())
    except OSError as error:
        raise errors.UserError(Message("{path}: cannot be written ({why})", path=path, why=error.strerror)) from None
    print_lines(
        Message("{path} written; put your base model and picture folder in, then: lora-fp8 check {path}", path=path)
    )


@app.command()
def check(config_file: Path = CONFIG, overrides: list[str] = SET, as_json: bool = JSON) -> None:
    """Check config, images and base model files. No model is loaded."""
    from .. import config, errors
    from ..plan.check import Check
    from ..plan.check import check as check_job

    try:
        result = check_job(config.load(config_file, overrides))
    except errors.UserError as error:
        if not as_json:
            raise
        result = Check(getattr(error, "problems", [str(error)]))
    if as_json:
        print_json(result.to_json())
        sys.exit(2 if result.problems else 0)
    print_lines(*result.lines)
    if result.problems:
        raise errors.UserErrors(result.problems, str(config_file))
    print_lines(Message("{path}: all right", path=config_file))


@app.command()
def import_config(
    file: Path = typer.Argument(
        ...,
        metavar="FILE",
        help="Settings of another trainer: TOML, JSON, YAML, or a script with the training command.",
    ),
    tool: str = typer.Option(
        "", "--from", metavar="TOOL", help="Trainer that the file is for. Default: detected from the file."
    ),
    family: str = typer.Option("", help="Architecture, if the file does not name it."),
    output: Path | None = typer.Option(
        None, help="Config file to write. Default: FILE's name with .lora-fp8.toml, here."
    ),
    verbose: bool = typer.Option(False, help="List every key with its new setting."),
    as_json: bool = JSON,
) -> None:
    """Convert another trainer's settings, and list differences."""
    from .. import errors, importing
    from ..common.writing import atomic_write

    path = output or Path(f"{file.stem}.lora-fp8.toml")
    if os.path.lexists(path):
        raise errors.UserError(Message("{path}: exists already; choose another name with --output", path=path))
    imported = importing.import_file(file, tool, family)
    importing.relocate(imported, Path.cwd())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, importing.to_toml(imported).encode())
    except OSError as error:
        raise errors.UserError(Message("{path}: cannot be written ({why})", path=path, why=error.strerror)) from None
    if as_json:
        print_json(importing.to_json(imported) | {"output": str(path)})
        return
    written = Message("{file} written; next: lora-fp8 check {path}", file=path.resolve(), path=path)
    print_lines(*importing.report(imported, verbose), written)


@app.command()
def plan(config_file: Path = CONFIG, overrides: list[str] = SET, as_json: bool = JSON) -> None:
    """Show storage, matmul and memory of each layer. No weights are read."""
    from .. import config

    job = config.load(config_file, overrides)
    from ..config import find_unused_settings
    from ..plan import resolve
    from ..plan.plan import plan_layers

    family = resolve.make_family(job)
    layers = plan_layers(job, family)
    unused = find_unused_settings(job, family.facts_of_base() | layers.facts)
    notes = [f"warning: {line}" for line in unused if "quantize." in line]
    if job.quantize.sensitivity == "auto" and layers.quantized:
        notes.append(
            Message(
                "quantize.sensitivity = 'auto': a training first measures these layers on its pictures, and "
                "holds those above {bound} in int8 or bf16; `lora-fp8 precision {path}` measures now",
                bound=f"{job.quantize.sensitivity_bound:g}",
                path=config_file,
            )
        )
    if as_json:
        print_json(layers.to_json() | {"notes": notes})
    else:
        print_lines(layers.table(), *notes)


@app.command()
def estimate(config_file: Path = CONFIG, overrides: list[str] = SET, as_json: bool = JSON) -> None:
    """Estimate memory, steps, cache and file sizes. No weights are read, and nothing is encoded."""
    from .. import config

    job = config.load(config_file, overrides)
    from ..families import _files

    base = job.model
    if _files.is_hub_id(base.path) and not os.path.exists(os.path.expanduser(base.path)):
        os.environ["HF_HUB_OFFLINE"] = "1"  # only the hub's cache is read; an estimate downloads nothing
    import torch

    from ..plan import plan as planning
    from ..plan import resolve
    from ..plan.estimate import estimate as estimate_plan
    from ..run import ownership

    folder = resolve.get_run_folder(job)
    if not ownership.is_run(folder):  # an existing run may be estimated again
        ownership.require_new(folder)
    estimated = estimate_plan(planning.make(job), "cuda" if torch.cuda.is_available() else "cpu")
    if as_json:
        print_json(estimated.to_json())
    else:
        print_lines(*estimated.lines())


@app.command()
def precision(
    config_file: Path = CONFIG,
    overrides: list[str] = SET,
    pictures: int = typer.Option(4, min=1, help="Number of the job's images to measure on."),
    layers_only: bool = typer.Option(
        False, help="Measure layers only; the unquantized base model need not fit into memory."
    ),
    as_json: bool = JSON,
) -> None:
    """Measure the quantization error on your images. It reports each layer, and the prediction."""
    from .. import config

    job = config.load(config_file, overrides)
    from ..stages import measure

    report = measure.report(job, num_pictures=pictures, whole=not layers_only, echo=None if as_json else _print_event)
    if as_json:
        print_json(report.to_json())
    else:
        print_lines(*report.lines())


@app.command()
def train(config_file: Path = CONFIG, overrides: list[str] = SET, as_json: bool = JSON) -> None:
    """Train a LoRA from a config file."""
    train_or_resume(config_file, overrides, resume=False, as_json=as_json)


@app.command()
def resume(folder: Path = RUN, overrides: list[str] = SET, as_json: bool = JSON) -> None:
    """Resume a run from its newest checkpoint. The result has the same bytes as without the stop."""
    from ..config import toml_line
    from ..run import Run

    run = Run.open(folder)
    # The folder may have been moved or renamed: its current place counts.
    here = folder.resolve()
    place = [toml_line("name", here.name), toml_line("output_dir", str(here.parent))]
    train_or_resume(run.config_file, [*place, *overrides], resume=True, as_json=as_json)


@app.command()
def export(
    folder: Path = RUN,
    overrides: list[str] = SET,
    step: int = typer.Option(0, help="Step of the checkpoint. 0: the newest."),
    formats: list[str] = typer.Option(
        [], "--format", help="Layout: auto, diffusers, comfy (ComfyUI) or kohya (A1111, Forge). Repeatable."
    ),
    kit: Path | None = typer.Option(
        None, metavar="DIR", help="Folder for publishing, as the command kit makes it; new or empty."
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
            Message("--preview-metadata writes nothing, and --kit writes a folder: give one of them")
        )
    if kit:
        tool.check_free(kit)

    overrides = [*overrides, *([f"export.formats={json.dumps(formats)}"] if formats else [])]
    if preview_metadata:
        metadata = finish.compute_metadata(folder, overrides, step)
        lines = [f"{layout}: {key} = {value}" for layout, values in metadata.items() for key, value in values.items()]
        if as_json:
            print_json(metadata)
        else:
            print_lines(*lines)
        return
    written = finish.export_run(folder, overrides, step)
    paths = [str(path) for path in written]
    if not kit:
        if as_json:
            print_json(paths)
        else:
            print_lines(*paths)
        return
    file, job, pictures = tool.from_run(folder, among=written, step=step)
    publishing_kit = tool.make(file, kit, tool.facts_of(file, {}, job), pictures)
    if as_json:
        content = {"files": paths, "kit": [str(path) for path in publishing_kit.files], "notes": publishing_kit.notes}
        print_json(content)
        return
    print_lines(*paths, *map(str, publishing_kit.files), *_name_notes(publishing_kit.notes))


@app.command()
def verify(
    file: Path = typer.Argument(..., metavar="FILE", help="LoRA .safetensors file."),
    base: str = typer.Option(
        "", help="Base model to load it into: path, hub id or 'demo'. Default: check the file alone."
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
        print_lines(*report.lines())
    if not report.ok:
        sys.exit(3)


@app.command()
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
        print_lines(*about.lines())


@app.command()
def convert(
    file: Path = typer.Argument(..., metavar="FILE", help="LoRA .safetensors file of any program."),
    layout: str = typer.Option(..., "--format", help="Layout: diffusers, comfy (ComfyUI) or kohya (A1111, Forge)."),
    output: Path | None = typer.Option(None, help="File to write. Default: FILE's name with the layout, beside it."),
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


@app.command()
def resize(
    file: Path = typer.Argument(..., metavar="FILE", help="LoRA .safetensors file of any program."),
    output: Path | None = typer.Option(None, help="File to write. Default: FILE's name with -resized, beside it."),
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
    print_lines(*report.lines(), Message("{path} written", path=output))


@app.command()
def merge(
    files: list[str] = typer.Argument(
        ..., metavar="FILE:WEIGHT...", help="LoRA files with weights, such as a.safetensors:0.7."
    ),
    output: Path = typer.Option(..., help="File to write, or folder for a diffusers folder."),
    into: str = typer.Option(
        "", metavar="BASE", help="Base model to merge into: folder, single file or hub id. Default: write one LoRA."
    ),
    family: str = typer.Option("", help="Architecture of BASE. Default: that of the first LoRA."),
    components: str = typer.Option("", help="Diffusers folder with the other components, if BASE is a single file."),
    rank: int = typer.Option(0, help="Rank of the merged LoRA. 0: exact, the sum of the ranks."),
    energy: float = typer.Option(0.0, help="Share of each layer's squared norm to keep in the merged LoRA. 0: all."),
    dtype: str = DTYPE,
    as_json: bool = JSON,
) -> None:
    """Merge LoRAs into one LoRA, or into a base model."""
    from .. import errors
    from ..tools import merge as tool

    sources = [tool.weighted(text) for text in files]
    if into:
        if rank or energy or dtype:
            raise errors.UserError(
                Message("--rank, --energy and --dtype are about a merged LoRA; with --into there is none")
            )
        merged = tool.into(sources, into, output, family_name=family, components=components)
        if as_json:
            content = {"layers": merged.layers, "files": [str(path) for path in merged.files]}
            print_json(content)
            return
        files = [Message("{path} written", path=path) for path in merged.files]
        print_lines(Message("{count} layers changed", count=merged.layers), *files)
        return
    if family or components:
        raise errors.UserError(Message("--family and --components are about a base model; name it with --into BASE"))
    report = tool.merge(sources, output, rank=rank, energy=energy, dtype=dtype)
    if as_json:
        content = (report.to_json() if report else {}) | {"output": str(output)}
        print_json(content)
        return
    print_lines(*(report.lines() if report else []), Message("{path} written", path=output))


@app.command()
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
    print_lines(*report.lines(), Message("{path} written", path=output))


@app.command()
def ema(
    sources: list[Path] = typer.Argument(
        ..., metavar="RUN | FILE...", help="Run folder, or LoRA files with the oldest first."
    ),
    average: str = typer.Option(
        "factors",
        help="Kind of average. factors: the mean of A and of B, for checkpoints of one run. delta: the mean of B x A, "
        "resized to the files' rank, for files of different runs.",
    ),
    half_life: float = typer.Option(0.0, help="Steps (for files: positions) that halve the weight. 0: equal weights."),
    last: int = typer.Option(0, help="Number of newest checkpoints of a run. 0: all."),
    rank: int = typer.Option(0, help="Rank of the average of files, with --average delta. 0: that of the files."),
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
                Message("--rank, --dtype and --output are of files; a run's average is written as its files")
            )
        by_step, paths = tool.run(sources[0], what=average, half_life=half_life, last=last)
        weights = [Message("{share}  step {step}", share=f"{share:7.2%}", step=step) for step, share in by_step.items()]
        print_lines(*weights, *map(str, paths))
        return
    if last or output is None:
        raise errors.UserError(
            Message("files: --output says where to write; --last is of a run, name fewer files instead")
        )
    shares, report = tool.files(sources, output, what=average, half_life=half_life, rank=rank, dtype=dtype)
    lines = [f"{share:7.2%}  {path}" for share, path in zip(shares, sources, strict=True)]
    print_lines(*lines, *(report.lines()[-1:] if report else []), Message("{path} written", path=output))


@app.command()
def kit(
    source: Path = typer.Argument(..., metavar="RUN | FILE", help="Run folder, or a LoRA .safetensors file."),
    out: Path = typer.Option(..., help="Folder to write, new or empty."),
    title: str = typer.Option("", help="Display name. Default: the file's."),
    trigger: str = typer.Option("", help="Trigger words. Default: the file's."),
    description: str = typer.Option("", help="Description. Default: the file's."),
    license: str = typer.Option("", help="Licence as the Hub names it, such as apache-2.0. Default: the file's."),
    base_model: str = typer.Option("", help="Base model's id on the Hub. Default: the run's."),
    strength: float = typer.Option(1.0, help="Recommended strength."),
    family: str = typer.Option("", help="Architecture, if the file does not name it."),
    layout: str = typer.Option("", help="Layout of the run's file to take. Default: the one that most programs read."),
    with_captions: bool = typer.Option(
        False, help="Keep caption tags, folder names and the config in the file's header."
    ),
    push: str = typer.Option(
        "", metavar="OWNER/NAME", help="Hugging Face repository to upload to; a new one is private."
    ),
    as_json: bool = JSON,
) -> None:
    """Make a folder for publishing a LoRA. It has sidecars, model card, samples, and texts for each host's form."""
    from .. import errors
    from ..tools import kit as tool

    if source.is_dir():
        if family:
            raise errors.UserError(Message("--family is of a file; a run knows its own"))
        file, job, pictures = tool.from_run(source, layout)
    else:
        if layout:
            raise errors.UserError(Message("`--layout` applies to runs only; a file keeps the layout that it has"))
        file, job, pictures = source, None, []
    texts = {"title": title, "trigger": trigger, "description": description, "license": license}
    texts |= {"base_model": base_model, "family": family}
    facts = tool.facts_of(file, texts, job, strength)
    publishing_kit = tool.make(file, out, facts, pictures, captions=with_captions)
    address = tool.push(out, push) if push else ""
    if as_json:
        content = {
            "files": [str(path) for path in publishing_kit.files],
            "notes": publishing_kit.notes,
            "address": address,
        }
        print_json(content)
        return
    print_lines(*map(str, publishing_kit.files), *_name_notes(publishing_kit.notes), *filter(None, [address]))


@app.command()
def cache(
    folder: Path = typer.Argument(Path("cache"), help="Cache folder: dataset.cache_dir of your runs."),
    prune_unused_days: float | None = typer.Option(
        None, metavar="N", help="Days without use after which entries are deleted. Default: delete nothing."
    ),
    as_json: bool = JSON,
) -> None:
    """Show size and last use of the image cache. Delete entries that no run uses any more."""
    from ..data import cache_cleanup

    deleted = cache_cleanup.prune(folder, prune_unused_days) if prune_unused_days is not None else []
    entries = cache_cleanup.stored(folder)
    held_bytes, deleted_bytes = (sum(entry.bytes for entry in each) for each in (entries, deleted))
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
    if prune_unused_days is not None:
        size = f"{deleted_bytes / 2**20:.1f}"
        print_lines(Message("{path}: {count} entries deleted, {size} MiB", path=folder, count=len(deleted), size=size))
    size = f"{held_bytes / 2**20:.1f}"
    print_lines(Message("{path}: {count} entries, {size} MiB", path=folder, count=len(entries), size=size))
    if entries:
        most, least = (f"{(time.time() - entry.used) / 86400:.0f}" for entry in (entries[0], entries[-1]))
        print_lines(Message("last used between {most} and {least} days ago", most=most, least=least))


@app.command()
def caption(
    folder: Path = FOLDER,
    model: str = typer.Option(..., help="Captioning model: folder or Hugging Face id (OWNER/NAME)."),
    kind: str = typer.Option("text", help="Kind of caption: text or tags."),
    prompt: str = typer.Option("", help="Prompt for the model. Default: one that fits the kind."),
    overwrite: bool = typer.Option(
        False, "--overwrite/--only-missing", help="Caption all images, or only those without a caption."
    ),
    trigger: str = typer.Option("", help="Trigger word to put in front."),
    mask: str = typer.Option(
        "", help="Name pattern of masks beside the images, such as '*-masklabel'; masks get no caption."
    ),
    threshold: float = typer.Option(0.35, min=0, max=1, help="Lowest probability of a tag, for a tagger."),
    exclude: list[str] = typer.Option([], metavar="TAG", help="Tag to leave out. Repeatable."),
    max_tokens: int = typer.Option(300, min=1, help="Longest caption, in tokens."),
    batch_size: int = typer.Option(1, min=1, max=256, help="Images at once."),
    dtype: str = typer.Option("", help="Dtype of the model: bf16, fp16 or fp32. Default: bf16 on a GPU, else fp32."),
    revision: str = typer.Option("", help="Branch, tag or commit on the hub."),
    as_json: bool = JSON,
) -> None:
    """Caption images with a model. A second call continues a stopped one; `dataset undo` restores the old captions."""
    from ..errors import UserError

    if kind not in ("text", "tags"):
        raise UserError(Message("--kind {kind}: accepted are text, tags", kind=repr(kind)))
    from ..data import captioner

    checked: Literal["text", "tags"] = "text" if kind == "text" else "tags"
    settings = captioner.Settings(
        model, checked, prompt, overwrite, trigger, max_tokens, threshold, tuple(exclude), batch_size, dtype, revision
    )
    result = captioner.run(folder, settings, echo=_json_line if as_json else _print_event, mask=mask)
    captioner.problems(result, folder)
    if not as_json:
        print_lines(
            Message(
                "{path}: {count} captions written, {kept} were there",
                path=folder,
                count=result.written,
                kept=result.kept,
            )
        )


@app.command()
def demo(
    family: str = typer.Option("sd15", help="Architecture: sd15 (UNet) or flux (DiT)."),
    out: Path = typer.Option(Path("runs"), help="Folder for the run folder."),
    as_json: bool = JSON,
) -> None:
    """Train a LoRA on the bundled miniature model. Draw previews before and after, and measure the difference."""
    from ..demo import show

    result = show.run(family, out, echo=_json_line if as_json else _print_event)
    if as_json:
        print_json(result.to_json())
    else:
        print_lines(*result.lines())
    if not result.ok:
        sys.exit(3)


@app.command()
def ui(
    host: str = typer.Option(
        "127.0.0.1", help="Address to listen on. Any address but this machine's own needs a login (--user)."
    ),
    port: int = typer.Option(7860, min=0, max=65535, help="Port. 0: any free one."),
    root: list[Path] = typer.Option([], metavar="FOLDER", help="Folder that the page may read and write. Repeatable."),
    user: str = typer.Option("", help="Account that may log in; its password is $LORA_FP8_PASSWORD."),
    name: list[str] = typer.Option([], help="Host name of this machine behind a proxy. Repeatable."),
    open_browser: bool = typer.Option(False, "--open", help="Open the page in the browser."),
) -> None:
    """Start the web page. It shows new trainings, datasets, the queue and running jobs."""
    _require_packages("ui", "gradio", "psutil")
    from webui import server

    server.run(host, port, [path.absolute() for path in root], user, name, open_browser)


@app.command()
def mcp(
    root: list[Path] = typer.Option([], metavar="FOLDER", help="Folder that jobs may use. Repeatable."),
) -> None:
    """Start a Model Context Protocol server. It offers submit, list, status, events, stop and export."""
    _require_packages("mcp", "mcp", "psutil")
    from webui import mcp as tools

    tools.run([path.absolute() for path in root])


def _require_packages(extra: str, *packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        from .. import errors

        names = ", ".join(missing)
        raise errors.UserError(Message("this needs {names}: pip install 'lora-fp8[{extra}]'", names=names, extra=extra))


app.add_typer(dataset.dataset_app, name="dataset")
jobs.add_to(app)


def train_or_resume(config_file: str | Path, overrides: list[str], *, resume: bool, as_json: bool) -> None:
    """Load the config and run the job, for `train`, `resume` and train_lora.py."""
    from .. import config

    job = config.load(config_file, overrides)  # a wrong file is reported before torch is loaded
    from .. import train as training

    result = training.run(job, resume=resume, progress=not as_json, echo=_json_line if as_json else _print_event)
    if not as_json:
        for path in result.files:
            print(path)


def _json_line(event: dict[str, Any]) -> None:
    print(json.dumps(event, ensure_ascii=False), flush=True)


def _print_event(event: dict[str, Any]) -> None:
    """Print an event of the run as text; the progress bar shows the steps."""
    from tqdm import tqdm

    kind = event["event"]
    text = {
        "stage": lambda e: Message("== {stage}", stage=e["stage"]),
        "warning": lambda e: Message("warning: {line}", line=e["text"]),
        "progress": lambda e: Message("  {done} of {total}", done=e["done"], total=e["total"]),
        "cache": lambda e: Message("cache: {count} encoded, {kept} reused", count=e["encoded"], kept=e["reused"]),
        "data": _describe_data,
        "model": lambda e: Joined(
            "\n",
            (
                Message("base: {base}, {storage}", base=e["base"], storage=e["storage"]),
                Message(
                    "adapters: {count} modules, {parameters} parameters",
                    count=e["adapters"],
                    parameters=f"{e['trainable']:,}",
                ),
                Message(
                    "learning rate: {rate} x {factor} = {product}",
                    rate=f"{e['lr']:g}",
                    factor=f"{e['lr_factor']:g}",
                    product=f"{e['lr_effective']:g}",
                ),
            ),
        ),
        "compute": lambda e: Message(
            "compute: {chosen}, the fastest of {times}",
            chosen=e["chosen"],
            times=", ".join(f"{mode} {seconds:.3g} s" for mode, seconds in e["seconds"].items()),
        ),
        "sensitivity": lambda e: Joined(
            "\n  ",
            (
                Message(
                    "sensitivity: {count} of {total} layers moved, {size} MB more; largest error of a layer {before} "
                    "before, {now} now, bound {bound}",
                    count=len(e["moved"]),
                    total=e["layers"],
                    size=f"{e['added_bytes'] / 1e6:.2f}",
                    before=f"{e['worst_before']:.3g}",
                    now=f"{e['worst']:.3g}",
                    bound=f"{e['bound']:g}",
                ),
                *e["moved"],
            ),
        ),
        "preflight": _describe_preflight,
        "exchange": lambda e: Message(
            "gradients travel in {kind}: {size} MB sent per process and step, {share} of float32",
            kind=e["kind"],
            size=f"{e['bytes_per_step'] / 1e6:.3g}",
            share=f"{e['of_fp32']:.3g}",
        ),
        "validation": lambda e: Message(
            "held-out loss at step {step}: {loss} ({bands})",
            step=e["step"],
            loss=f"{e['loss']:.4g}",
            bands=", ".join(f"{band}: {loss:.4g}" for band, loss in e["bands"].items()),
        ),
        "resume": lambda e: Message("resuming from {checkpoint}", checkpoint=e["checkpoint"]),
        "caption": lambda e: Message(
            "{done} of {total} {file}: {caption}", done=e["done"], total=e["total"], file=e["file"], caption=e["text"]
        ),
        "verify": lambda e: Joined(
            "\n",
            (
                Message("verify {file}: all right", file=e["file"])
                if e["ok"]
                else Message("verify {file}: FAILED", file=e["file"]),
                *(Message("  {line}", line=line) for line in e["lines"]),
            ),
        ),
    }.get(kind)
    if text is not None:
        tqdm.write(translate(get_language(), text(event)), file=sys.stdout)


def _describe_data(event: dict[str, Any]) -> Message:
    images = Message("{count} images", count=event["images"])
    if event["masked"]:
        images = Message("{count} images, {masked} of them with a mask", count=event["images"], masked=event["masked"])
    return Message(
        "data: {images}, {samples} samples and {steps} steps per epoch; buckets {buckets}",
        images=images,
        samples=event["samples_per_epoch"],
        steps=digits(event["steps_per_epoch"]),
        buckets=", ".join(f"{size}: {n}" for size, n in event["buckets"].items()),
    )


def _describe_preflight(event: dict[str, Any]) -> Message:
    peak = Message("preflight: peak memory {peak} GiB", peak=f"{event['peak_gib']:.2f}")
    if "fused" not in event:
        return peak
    return Message("{line}; {count} adapters computed together with their layer", line=peak, count=event["fused"])


def _escape(text: str) -> str:
    """Replace bytes of file names that are no UTF-8, which neither JSON nor a page can show."""
    return text.encode("utf-8", "backslashreplace").decode()


def _name_notes(notes: list[str]) -> list[Message]:
    return [Message("note: {line}", line=note) for note in notes]


def _fail(message: str, code: int) -> None:
    # All processes of a job find the same mistake and stop together, so only one reports it. A failure while running
    # may occur in one process alone.
    rank = os.environ.get("RANK", "0")
    if rank == "0" and (place := os.environ.get("LORA_FP8_MESSAGE")):  # set by the queue, which shows why a job failed
        text = without_home(message.strip() if type(message) is str else message)
        content = add_translations({"text": text.map(_escape) if isinstance(text, Message) else _escape(text)})
        with contextlib.suppress(OSError):  # a full disk must not change the exit code
            Path(place).write_text(json.dumps(content), encoding="utf-8")
    if rank == "0":
        print_lines(message, file=sys.stderr)
    elif code == 3:
        print_lines(Message("process {rank}: {line}", rank=rank, line=message), file=sys.stderr)
    sys.exit(code)
