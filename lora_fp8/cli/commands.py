"""`lora-fp8 <command>`: each command is a few lines over a library function, which it imports only when it is run.

Exit codes: 0 done; 2 the user's input is wrong (a message, no traceback); 3 it failed while running; 75 stopped early
and can be resumed.
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
from typing import Any

import typer

from . import dataset, jobs
from .options import DTYPE, FOLDER, JSON, SET

app = typer.Typer(
    help="Train LoRAs for diffusion models on a base frozen in FP8, and prove that the files work.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
"""What the system says of a path that cannot be meant; anything else may be right the next time."""


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from .. import __version__

        print(f"lora-fp8 {__version__}")
        raise typer.Exit


@app.callback()
def _read_options(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    """Run the command line: the entry point of `lora-fp8`."""
    guarded(app)


def guarded(action: Callable[[], Any]) -> None:
    """Run it; turn what went wrong into one clear message and the exit code that belongs to it."""
    from ..errors import UserError

    # The libraries' notices (no torchvision, no optional kernel, keys of encoders that no one trained) tell our users
    # nothing. Whoever wants them sets these variables.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # Where torchao is installed, peft imports it, and it tells of kernels that it has for other machines.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character must not end a training
            stream.reconfigure(errors="backslashreplace")
    try:
        action()
    except UserError as error:
        _fail(str(error), 2)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        from ..errors import RunFailure, Stopped

        if isinstance(error, Stopped):
            _fail(str(error), 75)
        if isinstance(error, RunFailure):
            _fail(str(error), 3)
        if isinstance(error, OSError) and error.filename is not None:  # the machine refused: a right, a full disk
            _fail(f"{os.fsdecode(error.filename)}: {error.strerror}", 2 if error.errno in REFUSED else 3)
        raise


@app.command()
def new(
    path: Path = typer.Argument(..., help="The file to write."),
    family: str = typer.Option("", help="Architecture, such as sd15 (the default), sdxl, flux or qwen_image."),
    preset: list[str] = typer.Option([], help="Presets to start from; their values are written out. Repeatable."),
    from_lora: Path | None = typer.Option(None, metavar="FILE", help="Take the settings that a LoRA file tells of."),
    force: bool = typer.Option(False, help="Replace an existing file."),
) -> None:
    """Write a config file with every setting, its meaning and what it accepts."""
    from .. import config, errors
    from ..common.writing import atomic_write
    from ..config import example

    if os.path.lexists(path) and not force:
        raise errors.UserError(f"{path}: exists already; choose another name, or --force to replace it")
    if from_lora:
        from ..lora_files.export import config_of

        if preset or family:
            raise errors.UserError("--from-lora: the file says family and settings; leave out --family and --preset")
        job = config.loads(config_of(from_lora), [config.toml_line("name", path.stem)], where=str(from_lora))
    else:
        job = example(path.stem, family or "sd15", preset)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path.resolve(), config.commented(job.model_copy(update={"preset": []})).encode())
    except OSError as error:
        raise errors.UserError(f"{path}: cannot be written ({error.strerror})") from None
    print(f"{path} written; put your base model and picture folder in, then: lora-fp8 check {path}")


@app.command()
def check(
    config_file: Path = typer.Argument(..., metavar="CONFIG"), overrides: list[str] = SET, as_json: bool = JSON
) -> None:
    """Check a config, its pictures and its base model's files, completely, without loading any model."""
    from .. import config, errors
    from ..plan.check import Check
    from ..plan.check import check as check_job

    try:
        found = check_job(config.load(config_file, overrides))
    except errors.UserError as error:
        if not as_json:
            raise
        found = Check(getattr(error, "problems", [str(error)]))
    if as_json:
        print(json.dumps(found.to_json(), ensure_ascii=False, indent=1))
        sys.exit(2 if found.problems else 0)
    for line in found.lines:
        print(line)
    if found.problems:
        raise errors.UserErrors(found.problems, str(config_file))
    print(f"{config_file}: all right")


@app.command()
def import_config(
    file: Path = typer.Argument(..., metavar="FILE", help="TOML, JSON, YAML, or a script with the training command."),
    tool: str = typer.Option("", "--from", metavar="TOOL", help="Whose file it is; empty looks at the file."),
    family: str = typer.Option("", help="Architecture, where the file does not say."),
    output: Path | None = typer.Option(None, help="The file to write; FILE's name with .lora-fp8.toml, here."),
    verbose: bool = typer.Option(False, help="List what became of every key."),
    as_json: bool = JSON,
) -> None:
    """Write the settings file of another trainer as ours, and list what differs."""
    from .. import errors, importing
    from ..common.writing import atomic_write

    path = output or Path(f"{file.stem}.lora-fp8.toml")
    if os.path.lexists(path):
        raise errors.UserError(f"{path}: exists already; choose another name with --output")
    made = importing.import_file(file, tool, family)
    importing.relocate(made, Path.cwd())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, importing.to_toml(made).encode())
    except OSError as error:
        raise errors.UserError(f"{path}: cannot be written ({error.strerror})") from None
    if as_json:
        print(json.dumps(importing.to_json(made) | {"output": str(path)}, ensure_ascii=False, indent=1))
        return
    print("\n".join([*importing.report(made, verbose), f"{path.resolve()} written; next: lora-fp8 check {path}"]))


@app.command()
def plan(
    config_file: Path = typer.Argument(..., metavar="CONFIG"), overrides: list[str] = SET, as_json: bool = JSON
) -> None:
    """Show how each layer of the base will be held and multiplied, and what that takes; reads no weights."""
    from .. import config

    job = config.load(config_file, overrides)
    from ..config import find_unused_settings
    from ..plan import resolve
    from ..plan.plan import plan_layers

    family = resolve.make_family(job)
    found = plan_layers(job, family)
    unused = find_unused_settings(job, family.facts_of_base() | found.facts)
    notes = [f"warning: {line}" for line in unused if "quantize." in line]
    if job.quantize.sensitivity == "auto" and found.quantized:
        notes.append(
            "quantize.sensitivity = 'auto': a training first measures these layers on its pictures, and holds those "
            f"above {job.quantize.sensitivity_bound:g} in int8 or bf16; `lora-fp8 precision {config_file}` measures now"
        )
    if as_json:
        print(json.dumps(found.to_json() | {"notes": notes}, ensure_ascii=False, indent=1))
    else:
        print("\n".join([found.table(), *notes]))


@app.command()
def estimate(
    config_file: Path = typer.Argument(..., metavar="CONFIG"), overrides: list[str] = SET, as_json: bool = JSON
) -> None:
    """Reckon memory, steps, cache and file size of a job before it starts; reads no weights and encodes nothing."""
    from .. import config

    job = config.load(config_file, overrides)
    from ..families import _files

    base = job.model
    if _files.is_hub_id(base.path) and not os.path.exists(os.path.expanduser(base.path)):
        os.environ["HF_HUB_OFFLINE"] = "1"  # what is in the hub's cache is looked at, and nothing downloaded for this
    import torch

    from ..plan import plan as planning
    from ..plan import resolve
    from ..plan.estimate import estimate as estimate_plan
    from ..run import ownership

    folder = resolve.get_run_folder(job)
    if not ownership.is_run(folder):  # of a run that is there, its figures may still be asked for
        ownership.require_new(folder)
    found = estimate_plan(planning.make(job), "cuda" if torch.cuda.is_available() else "cpu")
    print(json.dumps(found.to_json(), ensure_ascii=False, indent=1) if as_json else "\n".join(found.lines()))


@app.command()
def precision(
    config_file: Path = typer.Argument(..., metavar="CONFIG"),
    overrides: list[str] = SET,
    pictures: int = typer.Option(4, min=1, help="How many of the job's pictures to measure on."),
    layers_only: bool = typer.Option(False, help="Leave out the prediction, which needs the unquantized base whole."),
    as_json: bool = JSON,
) -> None:
    """Measure what quantization costs on the config's own pictures: in each layer, and in the prediction."""
    from .. import config

    job = config.load(config_file, overrides)
    from ..stages import measure

    found = measure.report(job, num_pictures=pictures, whole=not layers_only, echo=None if as_json else _say)
    print(json.dumps(found.to_json(), ensure_ascii=False, indent=1) if as_json else "\n".join(found.lines()))


@app.command()
def train(
    config_file: Path = typer.Argument(..., metavar="CONFIG"), overrides: list[str] = SET, as_json: bool = JSON
) -> None:
    """Train a LoRA from a config file."""
    train_or_resume(config_file, overrides, resume=False, as_json=as_json)


@app.command()
def resume(folder: Path = typer.Argument(..., metavar="RUN"), overrides: list[str] = SET, as_json: bool = JSON) -> None:
    """Go on with a run from its newest checkpoint, to the same bytes as if it had never stopped."""
    from ..config import toml_line
    from ..run import Run

    run = Run.open(folder)
    # The folder may have been moved or renamed since: where it is now counts.
    here = folder.resolve()
    place = [toml_line("name", here.name), toml_line("output_dir", str(here.parent))]
    train_or_resume(run.config_file, [*place, *overrides], resume=True, as_json=as_json)


@app.command()
def export(
    folder: Path = typer.Argument(..., metavar="RUN"),
    overrides: list[str] = SET,
    step: int = typer.Option(0, help="Checkpoint step; 0 is the newest."),
    formats: list[str] = typer.Option([], "--format", help="Key layout: auto, diffusers, comfy, kohya. Repeatable."),
    kit: Path | None = typer.Option(
        None, metavar="DIR", help="Make a folder for publishing too, as the command kit does; new or empty."
    ),
    preview_metadata: bool = typer.Option(False, help="Write nothing; tell what the files would tell (see --json)."),
    as_json: bool = JSON,
) -> None:
    """Write the LoRA files of a checkpoint again, for example in another dtype (--set export.dtype=fp16)."""
    from .. import errors
    from ..stages import finish
    from ..tools import kit as room

    if kit and preview_metadata:
        raise errors.UserError("--preview-metadata writes nothing, and --kit writes a folder: give one of them")
    if kit:
        room.check_free(kit)

    overrides = [*overrides, *([f"export.formats={json.dumps(formats)}"] if formats else [])]
    if preview_metadata:
        found = finish.compute_metadata(folder, overrides, step)
        lines = [f"{layout}: {key} = {value}" for layout, told in found.items() for key, value in told.items()]
        print(json.dumps(found, ensure_ascii=False, indent=1) if as_json else "\n".join(lines))
        return
    written = finish.export_run(folder, overrides, step)
    paths = [str(path) for path in written]
    if not kit:
        print(json.dumps(paths, ensure_ascii=False) if as_json else "\n".join(paths))
        return
    file, job, pictures = room.from_run(folder, among=written, step=step)
    made = room.make(file, kit, room.facts_of(file, {}, job), pictures)
    if as_json:
        told = {"files": paths, "kit": [str(path) for path in made.files], "notes": made.notes}
        print(json.dumps(told, ensure_ascii=False, indent=1))
        return
    print("\n".join([*paths, *map(str, made.files), *(f"note: {note}" for note in made.notes)]))


@app.command()
def verify(
    file: Path = typer.Argument(..., metavar="FILE", help="A LoRA .safetensors file."),
    base: str = typer.Option(
        "", help="Base model to load it into (path, hub id or 'demo'); empty checks the file alone."
    ),
    family: str = typer.Option("", help="Architecture; empty reads it from the file."),
    as_json: bool = JSON,
) -> None:
    """Check a LoRA file: header, hash, pairs, values, and that diffusers takes every key of it."""
    from .. import verify as room

    report = room.check_file(file, base=base, family_name=family)
    print(json.dumps(report.to_json(), indent=1) if as_json else "\n".join(report.lines()))
    if not report.ok:
        sys.exit(3)


@app.command()
def inspect(
    file: Path = typer.Argument(..., metavar="FILE", help="A LoRA .safetensors file of any program."),
    as_json: bool = JSON,
) -> None:
    """Tell what a LoRA file is: layout, architecture, rank, alpha, dtype, each layer's norm, metadata, hashes."""
    from ..tools import files

    about = files.inspect(file)
    print(json.dumps(about.to_json(), ensure_ascii=False, indent=1) if as_json else "\n".join(about.lines()))


@app.command()
def convert(
    file: Path = typer.Argument(..., metavar="FILE", help="A LoRA .safetensors file of any program."),
    layout: str = typer.Option(..., "--format", help="diffusers, comfy or kohya."),
    output: Path | None = typer.Option(None, help="The file to write; FILE's name with the layout, beside it."),
    family: str = typer.Option("", help="Architecture; empty reads it from the file."),
    base: str = typer.Option("", help="The base model, where its sizes are not the released model's."),
    dtype: str = DTYPE,
    as_json: bool = JSON,
) -> None:
    """Write a LoRA with the layer names that other programs read."""
    from ..tools import files

    output = output or file.with_name(f"{file.stem}_{layout}.safetensors")
    layers = files.convert(file, output, layout, family=family, base=base, dtype=dtype)
    if as_json:
        print(json.dumps({"output": str(output), "layers": layers}, ensure_ascii=False, indent=1))
        return
    print(f"{output} written: {layers} layers in the {layout} layout")


@app.command()
def resize(
    file: Path = typer.Argument(..., metavar="FILE", help="A LoRA .safetensors file of any program."),
    output: Path | None = typer.Option(None, help="The file to write; FILE's name with -resized, beside it."),
    rank: int = typer.Option(0, help="Rank of each layer, at most; 0 leaves it to --energy."),
    energy: float = typer.Option(0.0, help="Share of each layer's squared norm to keep, such as 0.98."),
    uniform: bool = typer.Option(False, help="All layers at the largest rank that one of them needs."),
    dtype: str = DTYPE,
    as_json: bool = JSON,
) -> None:
    """Write a LoRA at a smaller rank, each layer the nearest to the old one that there is, and tell what is kept."""
    from ..tools import resize as room

    output = output or file.with_name(f"{file.stem}-resized.safetensors")
    report = room.resize(file, output, rank=rank, energy=energy, uniform=uniform, dtype=dtype)
    if as_json:
        print(json.dumps(report.to_json() | {"output": str(output)}, ensure_ascii=False, indent=1))
        return
    print("\n".join([*report.lines(), f"{output} written"]))


@app.command()
def merge(
    files: list[str] = typer.Argument(..., metavar="FILE:WEIGHT...", help="LoRA files, such as a.safetensors:0.7."),
    output: Path = typer.Option(..., help="The file (or, for a diffusers folder, the folder) to write."),
    into: str = typer.Option("", metavar="BASE", help="Write a base model with the LoRAs in it: folder, file, hub id."),
    family: str = typer.Option("", help="Architecture of BASE; empty reads it from the first LoRA."),
    components: str = typer.Option("", help="Diffusers folder beside BASE, where that is a single file."),
    rank: int = typer.Option(0, help="Resize the merged LoRA to this rank; 0 keeps it exact, at the sum of the ranks."),
    energy: float = typer.Option(0.0, help="Resize the merged LoRA to this share of each layer's squared norm."),
    dtype: str = DTYPE,
    as_json: bool = JSON,
) -> None:
    """Add up LoRAs into one LoRA, or into the weights of a base model."""
    from .. import errors
    from ..tools import merge as room

    sources = [room.weighted(text) for text in files]
    if into:
        if rank or energy or dtype:
            raise errors.UserError("--rank, --energy and --dtype are about a merged LoRA; with --into there is none")
        done = room.into(sources, into, output, family_name=family, components=components)
        if as_json:
            told = {"layers": done.layers, "files": [str(path) for path in done.files]}
            print(json.dumps(told, ensure_ascii=False, indent=1))
            return
        print("\n".join([f"{done.layers} layers changed", *(f"{path} written" for path in done.files)]))
        return
    if family or components:
        raise errors.UserError("--family and --components are about a base model; name it with --into BASE")
    report = room.merge(sources, output, rank=rank, energy=energy, dtype=dtype)
    if as_json:
        told = (report.to_json() if report else {}) | {"output": str(output)}
        print(json.dumps(told, ensure_ascii=False, indent=1))
        return
    print("\n".join([*(report.lines() if report else []), f"{output} written"]))


@app.command()
def extract(
    base: str = typer.Argument(..., metavar="BASE", help="The model before: diffusers folder, single file, hub id."),
    tuned: str = typer.Argument(..., metavar="TUNED", help="The model after, of the same architecture."),
    output: Path = typer.Option(..., help="The LoRA file to write."),
    family: str = typer.Option(..., help="Architecture of both."),
    components: str = typer.Option("", help="Diffusers folder beside single files."),
    rank: int = typer.Option(0, help="Rank of each layer, at most; 0 leaves it to --energy."),
    energy: float = typer.Option(0.0, help="Share of each layer's squared difference to keep, such as 0.95."),
    layers: list[str] = typer.Option([], help="Endings of layers' names, or all; none: what a LoRA is trained on."),
    layout: str = typer.Option("", help="Key layout of the file; empty is what most programs read."),
    dtype: str = typer.Option("bf16", help="bf16, fp16 or fp32."),
    as_json: bool = JSON,
) -> None:
    """Write the difference of two models as a LoRA."""
    from ..tools import extract as room

    report = room.extract(
        base,
        tuned,
        output,
        family_name=family,
        components=components,
        rank=rank,
        energy=energy,
        layers=layers,
        layout=layout,
        dtype=dtype,
        progress=lambda line: print(line, file=sys.stderr),
    )
    if as_json:
        print(json.dumps(report.to_json() | {"output": str(output)}, ensure_ascii=False, indent=1))
        return
    print("\n".join([*report.lines(), f"{output} written"]))


@app.command()
def ema(
    sources: list[Path] = typer.Argument(..., metavar="RUN | FILE...", help="A run, or LoRA files, oldest first."),
    average: str = typer.Option(
        "factors",
        help="factors: the mean of A and of B, for saves of one run, which share a basis. delta: the mean of what the "
        "files do, resized to their rank; for files of different runs.",
    ),
    half_life: float = typer.Option(0.0, help="Steps (files: places) after which one weighs half; 0 weighs all alike."),
    last: int = typer.Option(0, help="Of a run: only so many of the newest checkpoints; 0 is all that it kept."),
    rank: int = typer.Option(0, help="Of files, with --average delta: the rank; 0 is theirs."),
    output: Path | None = typer.Option(None, help="Of files: the file to write. A run's go to export/average/."),
    dtype: str = DTYPE,
) -> None:
    """Average a run's checkpoints, or LoRA files, after training."""
    from .. import errors
    from ..tools import average as room

    if len(sources) == 1:
        if rank or dtype or output:
            raise errors.UserError("--rank, --dtype and --output are of files; a run's average is written as its files")
        by_step, paths = room.run(sources[0], what=average, half_life=half_life, last=last)
        print("\n".join([*(f"{share:7.2%}  step {step}" for step, share in by_step.items()), *map(str, paths)]))
        return
    if last or output is None:
        raise errors.UserError("files: --output says where to write; --last is of a run, name fewer files instead")
    shares, report = room.files(sources, output, what=average, half_life=half_life, rank=rank, dtype=dtype)
    lines = [f"{share:7.2%}  {path}" for share, path in zip(shares, sources, strict=True)]
    print("\n".join([*lines, *(report.lines()[-1:] if report else []), f"{output} written"]))


@app.command()
def kit(
    source: Path = typer.Argument(..., metavar="RUN | FILE", help="A run folder, or a LoRA .safetensors file."),
    out: Path = typer.Option(..., help="The folder to write, new or empty."),
    title: str = typer.Option("", help="Name for people; empty is the file's."),
    trigger: str = typer.Option("", help="Trigger words; empty is the file's."),
    description: str = typer.Option("", help="Text for people; empty is the file's."),
    license: str = typer.Option("", help="Licence, in the Hub's words such as apache-2.0; empty is the file's."),
    base_model: str = typer.Option("", help="Id on the Hub of what it was trained on; empty is the run's."),
    strength: float = typer.Option(1.0, help="Strength to recommend."),
    family: str = typer.Option("", help="Architecture, where a file does not say."),
    layout: str = typer.Option("", help="Of a run: which of its files; empty is what most programs read."),
    with_captions: bool = typer.Option(False, help="Leave captions' tags, folder names and the config in the header."),
    push: str = typer.Option("", metavar="OWNER/NAME", help="Send it to the Hugging Face Hub; new ones are private."),
    as_json: bool = JSON,
) -> None:
    """Make a folder for publishing a LoRA: sidecars, model card, samples, and what to paste into each host's form."""
    from .. import errors
    from ..tools import kit as room

    if source.is_dir():
        if family:
            raise errors.UserError("--family is of a file; a run knows its own")
        file, job, pictures = room.from_run(source, layout)
    else:
        if layout:
            raise errors.UserError("--layout is of a run; a file has the one that it has")
        file, job, pictures = source, None, []
    given = {"title": title, "trigger": trigger, "description": description, "license": license}
    given |= {"base_model": base_model, "family": family}
    facts = room.facts_of(file, given, job, strength)
    made = room.make(file, out, facts, pictures, captions=with_captions)
    address = room.push(out, push) if push else ""
    if as_json:
        told = {"files": [str(path) for path in made.files], "notes": made.notes, "address": address}
        print(json.dumps(told, ensure_ascii=False, indent=1))
        return
    print("\n".join([*map(str, made.files), *(f"note: {note}" for note in made.notes), *filter(None, [address])]))


@app.command()
def cache(
    folder: Path = typer.Argument(Path("cache"), help="The cache folder: dataset.cache_dir of your runs."),
    prune_unused_days: float | None = typer.Option(None, metavar="N", help="Delete what no run used for N days."),
    as_json: bool = JSON,
) -> None:
    """Tell how large the cache of encoded pictures is and when it was used; delete what is no longer used."""
    from ..data import cache as room

    pruning = prune_unused_days is not None
    deleted = room.prune(folder, prune_unused_days) if pruning else []
    entries = room.stored(folder)
    told = {
        "folder": str(folder),
        "entries": len(entries),
        "bytes": sum(entry.bytes for entry in entries),
        "oldest_use": entries[0].used if entries else None,
        "newest_use": entries[-1].used if entries else None,
        "deleted": len(deleted),
        "deleted_bytes": sum(entry.bytes for entry in deleted),
    }
    if as_json:
        print(json.dumps(told, ensure_ascii=False, indent=1))
        return
    if pruning:
        print(f"{folder}: {len(deleted)} entries deleted, {told['deleted_bytes'] / 2**20:.1f} MiB")
    print(f"{folder}: {len(entries)} entries, {told['bytes'] / 2**20:.1f} MiB")
    if entries:
        ages = [(time.time() - entry.used) / 86400 for entry in (entries[0], entries[-1])]
        print(f"last used between {ages[0]:.0f} and {ages[1]:.0f} days ago")


@app.command()
def caption(
    folder: Path = FOLDER,
    model: str = typer.Option(..., help="Captioning model: folder or Hugging Face id (OWNER/NAME)."),
    kind: str = typer.Option("text", help="text or tags."),
    prompt: str = typer.Option("", help="What the model is asked; empty is a question that fits the kind."),
    overwrite: bool = typer.Option(
        False, "--overwrite/--only-missing", help="Also pictures that have a caption, or only those without."
    ),
    trigger: str = typer.Option("", help="Trigger word, put in front."),
    mask: str = typer.Option("", help="What masks beside the pictures are called, as '*-masklabel': they get none."),
    threshold: float = typer.Option(0.35, min=0, max=1, help="Of a tagger: probability from which a tag counts."),
    exclude: list[str] = typer.Option([], metavar="TAG", help="Leave this tag out. Repeatable."),
    max_tokens: int = typer.Option(300, min=1, help="Longest answer."),
    batch_size: int = typer.Option(1, min=1, max=256, help="Pictures at once."),
    dtype: str = typer.Option("", help="bf16, fp16 or fp32; empty: bf16 on a GPU, else fp32."),
    revision: str = typer.Option("", help="Branch, tag or commit on the hub."),
    as_json: bool = JSON,
) -> None:
    """Have a model write captions beside the pictures; goes on where it was stopped; `dataset undo` takes it back."""
    from ..errors import UserError

    if kind not in ("text", "tags"):
        raise UserError(f"--kind {kind!r}: accepted are text, tags")
    from ..data import captioner

    settings = captioner.Settings(
        model, kind, prompt, overwrite, trigger, max_tokens, threshold, tuple(exclude), batch_size, dtype, revision
    )
    result = captioner.run(folder, settings, echo=_json_line if as_json else _say, mask=mask)
    captioner.problems(result, folder)
    if not as_json:
        print(f"{folder}: {result.written} captions written, {result.kept} were there")


@app.command()
def demo(
    family: str = typer.Option("sd15", help="sd15 (UNet) or flux (DiT)."),
    out: Path = typer.Option(Path("runs"), help="Where the run folder is made."),
    as_json: bool = JSON,
) -> None:
    """Train a LoRA on the bundled miniature base, draw before and after, and measure both from the pixels."""
    from ..demo import show

    result = show.run(family, out, echo=_json_line if as_json else _say)
    print(json.dumps(result.to_json(), indent=1) if as_json else "\n".join(result.lines()))
    if not result.ok:
        sys.exit(3)


@app.command()
def ui(
    host: str = typer.Option("127.0.0.1", help="Address to listen on; any but this machine's own needs a login."),
    port: int = typer.Option(7860, min=0, max=65535, help="Port; 0 takes a free one."),
    root: list[Path] = typer.Option([], metavar="FOLDER", help="Folder that the page may use. Repeatable."),
    user: str = typer.Option("", help="Who may log in; the password is that of $LORA_FP8_PASSWORD."),
    name: list[str] = typer.Option([], help="Name that browsers call this machine by, behind a proxy. Repeatable."),
    open_browser: bool = typer.Option(False, "--open", help="Show it in the browser."),
) -> None:
    """Open the web page: new trainings, pictures, the queue, running jobs."""
    _needs("ui", "gradio", "psutil")
    from webui import server

    server.run(host, port, [path.absolute() for path in root], user, name, open_browser)


@app.command()
def mcp(
    root: list[Path] = typer.Option([], metavar="FOLDER", help="Folder that jobs may name. Repeatable."),
) -> None:
    """Answer a program that speaks the Model Context Protocol: submit, list, status, events, stop, export."""
    _needs("mcp", "mcp", "psutil")
    from webui import mcp as tools

    tools.run([path.absolute() for path in root])


def _needs(extra: str, *packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        from .. import errors

        raise errors.UserError(f"this needs {' and '.join(missing)}: pip install 'lora-fp8[{extra}]'")


app.add_typer(dataset.dataset_app, name="dataset")
jobs.add_to(app)


def train_or_resume(config_file: str | Path, overrides: list[str], *, resume: bool, as_json: bool) -> None:
    """Load the config and run the job, for `train`, `resume` and train_lora.py."""
    from .. import config

    job = config.load(config_file, overrides)  # a wrong file is told before torch is loaded
    from .. import train as story

    result = story.run(job, resume=resume, progress=not as_json, echo=_json_line if as_json else _say)
    if not as_json:
        for path in result.files:
            print(path)


def _json_line(event: dict[str, Any]) -> None:
    print(json.dumps(event, ensure_ascii=False), flush=True)


def _say(event: dict[str, Any]) -> None:
    """An event of the run as a line for people; steps are told by the progress bar."""
    from tqdm import tqdm

    from ..common.text import digits

    kind = event["event"]
    text = {
        "stage": lambda e: f"== {e['stage']}",
        "warning": lambda e: f"warning: {e['text']}",
        "progress": lambda e: f"  {e['done']} of {e['total']}",
        "cache": lambda e: f"cache: {e['encoded']} encoded, {e['reused']} reused",
        "data": lambda e: (
            f"data: {e['images']} images, "
            + (f"{e['masked']} of them with a mask, " if e["masked"] else "")
            + f"{e['samples_per_epoch']} samples and {digits(e['steps_per_epoch'])} steps "
            "per epoch; buckets " + ", ".join(f"{size}: {n}" for size, n in e["buckets"].items())
        ),
        "model": lambda e: (
            f"base: {e['base']}, {e['storage']}\n"
            f"adapters: {e['adapters']} modules, {e['trainable']:,} parameters\n"
            f"learning rate: {e['lr']:g} x {e['lr_factor']:g} = {e['lr_effective']:g}"
        ),
        "compute": lambda e: (
            f"compute: {e['chosen']}, the fastest of "
            + ", ".join(f"{mode} {seconds:.3g} s" for mode, seconds in e["seconds"].items())
        ),
        "sensitivity": lambda e: (
            f"sensitivity: {len(e['moved'])} of {e['layers']} layers moved, {e['added_bytes'] / 1e6:.2f} MB more; "
            f"largest error of a layer {e['worst_before']:.3g} before, {e['worst']:.3g} now, bound {e['bound']:g}"
            + "".join(f"\n  {line}" for line in e["moved"])
        ),
        "preflight": lambda e: (
            f"preflight: peak memory {e['peak_gib']:.2f} GiB"
            + (f"; {e['fused']} adapters computed together with their layer" if "fused" in e else "")
        ),
        "exchange": lambda e: (
            f"gradients travel in {e['kind']}: {e['bytes_per_step'] / 1e6:.3g} MB sent per process and step, "
            f"{e['of_fp32']:.3g} of float32"
        ),
        "validation": lambda e: (
            f"held-out loss at step {e['step']}: {e['loss']:.4g} ("
            + ", ".join(f"{band}: {loss:.4g}" for band, loss in e["bands"].items())
            + ")"
        ),
        "resume": lambda e: f"resuming from {e['checkpoint']}",
        "caption": lambda e: f"{e['done']} of {e['total']} {e['file']}: {e['text']}",
        "verify": lambda e: "\n".join(
            [f"verify {e['file']}: {'all right' if e['ok'] else 'FAILED'}", *(f"  {line}" for line in e["lines"])]
        ),
    }.get(kind)
    if text is not None:
        tqdm.write(text(event), file=sys.stdout)


def _fail(message: str, code: int) -> None:
    # Several processes of one job find the same mistake, and stop together: one of them says it. What fails while
    # running may fail in one process alone.
    rank = os.environ.get("RANK", "0")
    if rank == "0" and (place := os.environ.get("LORA_FP8_MESSAGE")):  # set by the queue, to tell why a job failed
        from ..common.text import without_home

        with contextlib.suppress(OSError):  # a full disk must not change the exit code
            Path(place).write_text(without_home(message), encoding="utf-8", errors="backslashreplace")
    if rank == "0":
        print(message, file=sys.stderr)
    elif code == 3:
        print(f"process {rank}: {message}", file=sys.stderr)
    sys.exit(code)
