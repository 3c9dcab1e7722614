"""Where a run begins: at the base itself, at a LoRA file, or at what a checkpoint holds of it. Between the loop in
`train` and the bundles in `checkpoint`.
"""

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from . import adapters, checkpoint, export, kinds, layouts, writes
from .config import Job, UserError, UserErrors
from .families.base import ModelFamily
from .prepare import Data, Loaded
from .processes import Processes
from .run import Run, RunFailure


@dataclass
class State:
    """What moves while training; with the tensors of adapter, optimizer and exchange it is the whole checkpoint."""

    step: int = 0
    compute: str = ""  # the matmul that quantize.compute = "auto" has settled on


def save_checkpoint(
    job: Job,
    family: ModelFamily,
    data: Data,
    loaded: Loaded,
    state: State,
    residuals: dict[str, Tensor],
    run: Run,
) -> None:
    """One whole bundle at this step.

    Raises:
        RunFailure: the disk refused, or the update left a value that is not finite; earlier bundles are untouched.
        FileNotFoundError: the run folder has gone, and is not made anew.
    """
    run.check_place()
    tensors, scalars = loaded.optimizer.state()
    adapter = adapters.state(loaded.adapted)
    for name, tensor in (adapter | tensors).items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise RunFailure(
                f"step {state.step}: the update left {name} not finite, so nothing was saved; {last_good(run)}. "
                "Try a lower optimizer.lr or optimizer.weight_decay, or a larger optimizer.eps"
            )
    tensors |= loaded.amax.tensors() | residuals
    content = {
        "step": state.step,
        "compute": state.compute,
        "moved": loaded.moved,
        "optimizer": scalars,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    content |= checkpoint.remember(job, family.base_identity(), data.fingerprint)
    path, gone = checkpoint.save(run.checkpoints, adapter, tensors, content, keep=job.checkpoint.keep)
    for line in gone:
        run.log_event("warning", text=line)
    run.log_event("checkpoint", step=state.step, path=str(path.relative_to(run.path)))


def start_values(job: Job, family: ModelFamily) -> dict[str, Tensor]:
    """The tensors of `adapter.init_from` under our names, float32, at the job's alpha / rank; {} where it is empty.

    Raises:
        UserError: no such file, or one of another base, kind, rank or set of layers.
    """
    section = job.adapter
    if not section.init_from:
        return {}
    path = Path(os.path.expanduser(section.init_from))
    where = f"adapter.init_from = {str(path)!r}"
    if not path.is_file():
        raise UserError(f"{where}: no such file (looked in {Path.cwd()})")
    try:
        held, scaling = layouts.from_layout(export.read_adapter(path)[0], family, family.denoiser_config())
        layers = kinds.grouped(held)
        found = {kinds.kind_of(parts, layer) for layer, parts in layers.items()}
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix(f'{path}: ')}") from None
    if found != {section.type}:
        kind = " and ".join(sorted(found))
        raise UserError(f"{where}: is a {kind}, and adapter.type is {section.type!r}; set adapter.type = {kind!r}")
    names = family.adapter_names(family.empty_denoiser(), section.targets)
    wanted = adapters.ranks(section, names)[0]
    held_ranks = {layer: kinds.rank_of(parts) for layer, parts in layers.items() if kinds.has_rank(parts)}
    wrong = {layer: rank for layer, rank in held_ranks.items() if rank != wanted.get(layer, section.rank)}
    if wrong and section.ranks:
        layer, rank = next(iter(wrong.items()))
        raise UserError(
            f"{where}: has rank {rank} in {layer}, and adapter.rank and adapter.ranks ask for "
            f"{wanted.get(layer, section.rank)}; {len(wrong)} layers differ"
        )
    if ranks := sorted(set(wrong.values())):
        raise UserError(
            f"{where}: has rank {', '.join(map(str, ranks))}, and adapter.rank is {section.rank}; set adapter.rank to "
            f"it, or bring the file to one rank with `lora-fp8 resize FILE --rank {section.rank} --uniform`"
        )
    others = [layer for layer in layers if layer not in wanted]
    if section.text_encoder:  # those are judged when the encoders are there
        others = [layer for layer in others if not layouts.text_encoder_of(layer, family)]
    if others:
        raise UserError(
            f"{where}: has layers that are not trained here, {export.first_few(others)}, and they would be lost; leave "
            "adapter.targets and adapter.ranks empty, or set adapter.text_encoder = true for those of text encoders"
        )
    own = kinds.scalings(held, section.alpha, section.rank)
    values = {
        f"{layer}.{part}": tensor.float() * (scaling[layer] / own[layer] if part in kinds.ZERO_AT_START else 1)
        for layer, parts in layers.items()
        for part, tensor in parts.items()
    }
    shapes = {name: parameter.shape for name, parameter in writes.trained(job, family)}
    strange = [name for name, value in values.items() if shapes.get(name) != value.shape]
    if strange:
        raise UserError(
            f"{where}: does not fit this base: {len(strange)} tensors have no place here, or another shape, "
            f"{export.first_few(strange)}"
        )
    return values


def _begin(job: Job, family: ModelFamily, loaded: Loaded, run: Run) -> State:
    """At step 0, with the adapter at the base itself or as the file has it."""
    if values := start_values(job, family):
        fresh = adapters.state(loaded.adapted)
        adapters.load_state_(loaded.adapted, fresh | values)
        loaded.optimizer.start_at(values)
        if left := sorted(kinds.grouped(fresh).keys() - kinds.grouped(values).keys()):
            text = (
                f"adapter.init_from has not all layers; {len(left)} begin at the base itself: {export.first_few(left)}"
            )
            run.log_event("warning", text=text)
    return State()


def take_up(job: Job, family: ModelFamily, data: Data, loaded: Loaded, run: Run, resume: bool) -> State:
    """Where to begin: at 0, or where the newest whole checkpoint ends."""
    if not resume:
        return _begin(job, family, loaded, run)
    found, skipped = checkpoint.latest(run.checkpoints)
    for line in skipped:
        run.log_event("warning", text=line)
    if found is None:
        run.log_event("warning", text="there is no checkpoint yet; training begins at step 0")
        return _begin(job, family, loaded, run)
    now = checkpoint.remember(job, family.base_identity(), data.fingerprint)
    refused, told = checkpoint.compare(found.state, now)
    if refused:
        raise UserErrors(refused, f"{found.path} cannot go on with another")
    if job.adapter.init_from != _begun_from(run):
        told.append("adapter.init_from has no effect: the run goes on from its own checkpoint")
    for text in told:
        run.log_event("warning", text=text)
    if found.step > job.train.steps:
        raise UserError(
            f"{found.path} is at step {found.step}, but train.steps is {job.train.steps}; raise train.steps to go on"
        )
    adapters.load_state_(loaded.adapted, found.adapter)
    tensors = dict(found.optimizer)
    loaded.amax.load_({name: tensors.pop(name) for name in list(tensors) if name.startswith("amax.")})
    residuals = {name: tensors.pop(name) for name in list(tensors) if name.startswith("residual.")}
    for text in loaded.exchange.load_(residuals):
        run.log_event("warning", text=text)
    loaded.optimizer.load_state(tensors, found.state["optimizer"])
    run.log_event("resume", step=found.step, checkpoint=found.path.name)
    return State(found.step, found.state.get("compute", ""))


def _begun_from(run: Run) -> str:
    """adapter.init_from as the run folder's config has it, which is that of the start until this one is accepted."""
    written = tomllib.loads(run.config_file.read_text(encoding="utf-8"))
    return written.get("adapter", {}).get("init_from", "")


def same_step(state: State, run: Run, processes: Processes) -> None:
    """That all processes begin at one step.

    Raises:
        RunFailure: they see different checkpoints.
    """
    steps = processes.gather(state.step)
    if len(set(steps)) > 1:
        raise RunFailure(
            f"the processes would begin at different steps ({', '.join(map(str, steps))}): not all of them see the "
            f"checkpoints in {run.path.resolve()}; put output_dir on a disk that all machines share"
        )


def last_good(run: Run) -> str:
    """Words for the newest whole checkpoint."""
    newest = checkpoint.newest(run.checkpoints)
    return f"last good checkpoint: {newest.name}" if newest else "no checkpoint yet"
