"""The commands that take a config or a run: `lora-fp8 check | plan | train | ...`; commands.py adds them."""

import atexit
import gc
import os
import sys
from functools import partial
from pathlib import Path

import typer

from ..common.messages import get_language, translate
from ..common.shell import quote_path
from ..common.system import let_gpu_memory_grow
from ..errors import Message, UserError
from .events import print_event, print_json_line
from .options import (
    CONFIG,
    JSON,
    RUN,
    SET,
    answers,
    load_config,
    open_run,
    print_json,
    print_lines,
    without_collection,
)
from .streams import works


def add_to(app: typer.Typer) -> None:
    """Add these commands to `lora-fp8`."""
    for command in (check, import_config, plan, estimate, precision, timesteps, lr_find, train, resume):
        app.command()(command)


@answers
def check(config_file: Path = CONFIG, overrides: list[str] = SET, as_json: bool = JSON) -> None:
    """Check config, images and base model files. No model is loaded."""
    from .. import errors
    from ..common.progress import show_images
    from ..config import InvalidConfig
    from ..plan.check import Check, check_files
    from ..plan.check import check as check_job

    try:
        result = check_job(load_config(config_file, overrides), show_images())
    except InvalidConfig as error:
        result = Check([*error.problems, *(check_files(error.valid, error.wrong) if error.valid else [])])
    except errors.UserError as error:
        if not as_json:
            raise
        result = Check(error.problems)
    if as_json:
        print_json(result.to_json())
        sys.exit(2 if result.problems else 0)
    print_lines(*result.lines)
    if result.problems:
        raise errors.UserErrors(result.problems, str(config_file))
    print_lines(Message("{path}: no problems found", path=config_file))


def import_config(
    file: Path = typer.Argument(
        ...,
        metavar="FILE",
        help="Settings of another trainer: TOML, JSON, YAML, or a script with the training command.",
    ),
    tool: str = typer.Option(
        "", "--from", metavar="TOOL", help="Trainer that the file belongs to. Default: detected from the file."
    ),
    family: str = typer.Option("", help="Architecture, if the file does not name it."),
    output: Path | None = typer.Option(
        None, help="Config file to write. Default: FILE's name with .lora-fp8.toml, in the current folder."
    ),
    verbose: bool = typer.Option(False, help="List every key with its new setting."),
    as_json: bool = JSON,
) -> None:
    """Convert another trainer's settings, and list differences."""
    from .. import errors, importing
    from ..common.writing import atomic_write

    path = output or Path(f"{file.stem}.lora-fp8.toml")
    if os.path.lexists(path):
        raise errors.exists_already(path)
    imported = importing.import_file(file, tool, family)
    importing.relocate(imported, Path.cwd())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, importing.to_toml(imported, partial(translate, get_language())).encode())
    except OSError as error:
        raise errors.cannot_write(path, error) from None
    if as_json:
        print_json(importing.to_json(imported) | {"output": str(path)})
        return
    written = Message(
        "{file} written; next: {command}", file=path.resolve(), command=f"lora-fp8 check {quote_path(path)}"
    )
    print_lines(*importing.report(imported, verbose), written)


@answers
def plan(config_file: Path = CONFIG, overrides: list[str] = SET, as_json: bool = JSON) -> None:
    """Show storage, matmul and memory of each layer. No weights are read."""
    job = load_config(config_file, overrides)
    from ..config import find_unused_settings
    from ..plan import resolve
    from ..plan.plan import plan_layers

    family = resolve.make_family(job, base=resolve.describe_for_estimate(job))
    layers = plan_layers(job, family)
    unused = find_unused_settings(job, family.list_base_facts() | layers.facts)
    lines = [*family.warnings, *(line for line in unused if "quantize." in line)]
    notes: list[str] = [Message("warning: {line}", line=line) for line in lines]
    if job.quantize.sensitivity == "auto" and layers.quantized:
        notes.append(
            Message(
                "quantize.sensitivity = 'auto': a training first measures these layers on its images, and stores "
                "those with an error above {bound} in int8 or bf16; `{command}` measures them now",
                bound=f"{job.quantize.sensitivity_bound:g}",
                command=f"lora-fp8 precision {quote_path(config_file)}",
            )
        )
    if as_json:
        print_json(layers.to_json() | {"notes": notes})
    else:
        print_lines(layers.format_table(), *notes)


@answers
def estimate(
    config_file: Path = CONFIG,
    overrides: list[str] = SET,
    processes: int = typer.Option(1, min=1, help="Number of training processes. Memory is shown for one of them."),
    as_json: bool = JSON,
) -> None:
    """Estimate memory, steps, cache and file sizes. No weights are read, and nothing is encoded."""
    job = load_config(config_file, overrides)
    import torch

    from ..common.progress import show_images
    from ..plan import plan as planning
    from ..plan import resolve
    from ..plan.estimate import estimate as estimate_plan
    from ..run import ownership
    from ..training.memory import count_free_bytes

    if not ownership.is_run(job.run_folder):  # an existing run may be estimated again
        ownership.require_new(job.run_folder)
    plan = planning.make(job, base=resolve.describe_for_estimate(job), world=processes, progress=show_images())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    estimated = estimate_plan(plan, device.type, count_free_bytes(device), processes)
    if as_json:
        print_json(estimated.to_json())
    else:
        print_lines(*estimated.format_lines())


@answers
def timesteps(config_file: Path = CONFIG, overrides: list[str] = SET, as_json: bool = JSON) -> None:
    """Show how often each noise level is trained. It also shows the default and other trainers."""
    job = load_config(config_file, overrides)
    from ..plan.timesteps import describe

    described = describe(job)
    if as_json:
        print_json(described.to_json())
    else:
        print_lines(*described.format_lines())


def lr_find(
    config_file: Path = CONFIG,
    overrides: list[str] = SET,
    steps: int = typer.Option(120, min=60, help="Number of steps."),
    lowest: float = typer.Option(1e-5, "--from", min=1e-9, max=1.0, help="Learning rate of the first step."),
    highest: float = typer.Option(1e-1, "--to", min=1e-9, max=10.0, help="Learning rate of the last step."),
    as_json: bool = JSON,
) -> None:
    """Suggest a learning rate. It trains some steps while the learning rate rises, and saves nothing."""
    job = load_config(config_file, overrides)
    if lowest >= highest:
        raise UserError(Message("--from {low} is not below --to {high}", low=f"{lowest:g}", high=f"{highest:g}"))
    from ..stages.find_rate import find_rate

    let_gpu_memory_grow()
    echo = None if as_json else print_event
    test = find_rate(job, steps=steps, ends=(lowest, highest), echo=echo, shows_progress=not as_json)
    if as_json:
        print_json(test.to_json())
    else:
        print_lines(*test.format_lines())


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
    job = load_config(config_file, overrides)
    from ..stages import measure

    report = measure.measure_precision(
        job, num_pictures=pictures, whole=not layers_only, echo=None if as_json else print_event
    )
    if as_json:
        print_json(report.to_json())
    else:
        print_lines(*report.format_lines())


def train(config_file: Path = CONFIG, overrides: list[str] = SET, as_json: bool = JSON) -> None:
    """Train a LoRA from a config file."""
    train_or_resume(config_file, overrides, resume=False, as_json=as_json)


def resume(folder: Path = RUN, overrides: list[str] = SET, as_json: bool = JSON) -> None:
    """Resume a run from its newest checkpoint.

    The result has the same bytes as without the stop; on a GPU only with train.deterministic.
    """
    from ..config import Override

    run = open_run(folder)
    # The folder may have been moved or renamed: its current place counts.
    here = folder.resolve()
    for override in overrides:
        if (key := override.partition("=")[0].strip()) in ("name", "output_dir"):
            raise UserError(
                Message(
                    "--set {key}: a run keeps its settings and its folder; `lora-fp8 train {config} --set ...` "
                    "starts another run",
                    key=key,
                    config=quote_path(run.config_file),
                )
            )
    place = [Override("name", here.name), Override("output_dir", str(here.parent))]
    train_or_resume(run.config_file, [*place, *overrides], resume=True, as_json=as_json)


@works
def train_or_resume(config_file: str | Path, overrides: list[str], *, resume: bool, as_json: bool) -> None:
    """Load the config and run the job, for `train`, `resume` and train_lora.py."""
    job = load_config(Path(config_file), overrides)  # a wrong file is reported before torch is loaded
    let_gpu_memory_grow()
    with without_collection():
        from .. import train as training
    # The libraries stay for good. The collector would go through their million objects after each encoder.
    gc.freeze()
    atexit.register(gc.unfreeze)  # or Triton prints a list of what it finds alive at the end of the process
    result = training.run(job, resume=resume, progress=not as_json, echo=print_json_line if as_json else print_event)
    if not as_json:
        for path in result.files:
            print(path)
