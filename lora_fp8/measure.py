"""How close the base that a job trains on is to the one that was published, and which layers need a better storage.

    report(job)         the figures of `lora-fp8 precision`
    moved_layers(...)   what quantize.sensitivity = "auto" decides at the start of a job

Both look at the job's own pictures and captions as training shows them (the first few of epoch 0, with their noise), at
five noise levels. The unquantized base and the quantized one are loaded one after the other, never together, and "auto"
does not need the unquantized one at all: a card that holds the quantized base holds the measurement.

Why the bound of "auto" is on single layers: the error of the prediction, which it would better be on, needs the
unquantized base whole in memory, which who quantizes may not have. A layer's own error needs its weights only; it does
not depend on the order of moving, so each layer takes the cheapest storage that holds the bound, and no more layers
move than are above it. `report` tells what that means for the prediction.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import checkpoint, config, families, precision
from .config import Job, UserError, UserErrors
from .data.loader import Loader
from .families.base import Cond, ModelFamily
from .precision import report as layerwise
from .prepare import DTYPES, Data, base, cache, plan, resolve_auto, scan, with_moved
from .processes import Processes
from .run import Run, RunFailure

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Noise levels, as shares of the way from clean to noise."""
NUM_PICTURES = 4


@dataclass(frozen=True)
class Question:
    """One picture at one noise level, as the training step shows it to the denoiser."""

    label: str
    noisy_BCHW: Tensor
    t_B: Tensor
    cond: Cond
    guidance: float

    def ask(self, family: ModelFamily, denoiser: nn.Module) -> Tensor:
        """The prediction, float32 on the CPU.

        Raises:
            RunFailure: it is not finite.
        """
        noisy, t, cond = self.noisy_BCHW, self.t_B, self.cond
        device = next(denoiser.parameters()).device
        cond = {name: tensor.to(device) for name, tensor in cond.items()}
        with torch.no_grad():
            answer = family.predict(denoiser, noisy.to(device, family.dtype), t.to(device), cond, self.guidance)
        if not answer.isfinite().all():
            raise RunFailure(f"the denoiser's prediction is not finite at {self.label}; is the base model whole?")
        return answer.float().cpu()


@dataclass(frozen=True)
class Report:
    """What `lora-fp8 precision` tells. All errors are relative rms; 0.03 is 3 %."""

    base: str
    storage: str
    """summary of the plan"""
    bound: float
    """quantize.sensitivity_bound"""
    override: list[str]
    """quantize.override, with what was moved"""
    moved: list[str]
    """the lines of it that quantize.sensitivity = "auto" has added"""
    pictures: int
    layers: list[layerwise.LayerError]
    """the worst first"""
    prediction: dict[str, float]
    """noise level -> error of the prediction against the unquantized base, decoded weights multiplied"""
    multiplied: dict[str, float]
    """the same with FP8 matmuls; empty where the job has none"""

    def to_json(self) -> dict[str, Any]:
        layers = [asdict(one) | {"damage": one.damage} for one in self.layers]
        return {key: getattr(self, key) for key in self.__dataclass_fields__} | {"layers": layers}

    def lines(self) -> list[str]:
        """The report for people."""
        lines = [f"{self.base}: {self.storage}", f"measured on {self.pictures} pictures at {len(LEVELS)} noise levels"]
        if self.moved:
            lines += [f"quantize.sensitivity = 'auto' moved {len(self.moved)} layers: {'; '.join(self.moved)}"]
        lines += ["", "error of each layer, and of all layers of a storage:"]
        lines += [*layerwise.table(self.layers), *layerwise.totals(self.layers)]
        for what, errors in (("", self.prediction), (" with FP8 matmuls", self.multiplied)):
            if errors:
                lines += ["", f"error of the prediction{what}, against the unquantized base:"]
                lines += ["  ".join(f"{label}: {100 * error:.3g} %" for label, error in errors.items())]
        return [*lines, "", *layerwise.advice(self.layers, self.bound, self.override)]


def report(
    job: Job,
    *,
    num_pictures: int = NUM_PICTURES,
    whole: bool = True,
    echo: Callable[[dict[str, Any]], None] | None = None,
) -> Report:
    """Measure the base as this job would hold it; writes nothing but the cache of pictures and captions.

    Args:
        whole: compare predictions too, for which the unquantized base has to fit into memory.
        echo: is shown each event.

    Raises:
        UserError: something given is wrong, or nothing is quantized.
        RunFailure: a prediction is not finite, or the memory is too small.
    """
    processes = Processes()
    Family = families.get(job.model.family)
    family = Family(job.model, device=processes.device, dtype=DTYPES[job.model.dtype])
    if text := precision.problem(job.quantize, processes.device):
        raise UserError(text)
    if not plan(job, family).quantized:
        raise UserError(
            f"quantize.storage = {job.quantize.storage!r}: no layer is quantized, so there is nothing to measure; "
            "give a storage, such as --set quantize.storage=fp8"
        )
    job = resolve_auto(job, Family)
    scanned = scan(job, Family)
    if scanned.problems:
        raise UserErrors(scanned.problems, "dataset")
    run = _Unwritten(echo)
    for text in [*scanned.warnings, *family.warnings]:
        run.log_event("warning", text=text)
    data = cache(job, family, scanned.examples, run, processes)
    moved = moved_layers(job, family, data, run, processes, resume=False)
    try:
        return _measured(job, family, data, moved, run, num_pictures, whole)
    except torch.cuda.OutOfMemoryError:
        raise RunFailure(
            "out of memory; --layers-only needs the quantized base only, without the unquantized one"
            if whole
            else "out of memory; use --pictures 1, or a smaller dataset.resolution"
        ) from None


def moved_layers(job: Job, family: ModelFamily, data: Data, run: Run, processes: Processes, resume: bool) -> list[str]:
    """The lines that quantize.sensitivity = "auto" adds to quantize.override; none with "off".

    A run that goes on takes the lines of its checkpoint and measures nothing. Of several processes the main one
    measures, and all get its lines.

    Raises:
        ValueError: NaN or infinity in a layer, naming it.
        RunFailure: a prediction is not finite; the measurement failed on the main process.
    """
    if job.quantize.sensitivity == "off":
        return []
    if resume and (found := checkpoint.latest(run.checkpoints)[0]) is not None:
        return found.state.get("moved", [])
    lines: list[str] = []
    if processes.is_main and plan(job, family).quantized:
        run.log_event("stage", stage="sensitivity")
        lines = _lines(_settle(job, family, data, run))
    return processes.gather(lines)[0]


def questions(job: Job, family: ModelFamily, data: Data, num_pictures: int = NUM_PICTURES) -> list[Question]:
    """The first pictures of epoch 0, one by one (so that the batch size changes nothing), at each noise level."""
    objective = family.objective(family.scheduler_config(), job.objective)
    loader = Loader(data.buckets, data.loader.cache, family, job.dataset, seed=job.seed, batch_size=1)
    found = []
    for index in range(min(num_pictures, loader.batches_per_epoch)):
        batch = loader.micro(0, index)
        assert batch is not None  # one process, which has every sample
        for level in LEVELS:
            t_B, label = objective.at_level(level)
            noisy = objective.add_noise(batch.latents_BCHW, batch.noise_BCHW, t_B)
            found.append(Question(label, noisy, t_B, batch.cond, job.objective.guidance))
    return found


# -- inside ------------------------------------------------------------------------------------------------------------


class _Unwritten(Run):
    """A run without a folder: its events are shown and not written."""

    def __init__(self, echo: Callable[[dict[str, Any]], None] | None) -> None:
        super().__init__(Path())
        self.echo = echo

    def log_event(self, event: str, **fields: Any) -> None:
        if self.echo is not None:
            self.echo({"event": event, **fields})


def _settle(job: Job, family: ModelFamily, data: Data, run: Run) -> dict[str, str]:
    """Layer -> the storage that it needs for the bound to hold; what the user has set in quantize.override stays.

    Measured again after each round of moves, so that the bound holds for the base as it will be trained: inputs change
    a little with the layers before. A round moves at least one layer up the ladder, which has two steps.
    """
    section, asked = job.quantize, questions(job, family, data)
    set_by_user = [parsed[0] for parsed in map(config.parse_override, section.override) if parsed]
    storages: dict[str, str] = {}
    taken: dict[str, int] = {}
    before: list[layerwise.LayerError] = []
    while True:
        errors = _held_errors(family, with_moved(section, _lines(storages)), job.memory.offload, asked)
        before = before or errors
        over = [one for one in errors if one.better]
        fixed = [one for one in over if any(precision.name_matches(one.name, entry) for entry in set_by_user)]
        movable = [one for one in over if one not in fixed]
        if not movable:
            break
        if stuck := [one.name for one in movable if storages.get(one.name) == one.better]:
            raise RuntimeError(f"{stuck[0]} was moved to {storages[stuck[0]]} and is not held so")
        storages |= {one.name: one.better for one in movable}
        taken |= {one.name: one.better_bytes for one in movable}
    was = {one.name: one for one in before}
    storages = {name: storages[name] for name in was if name in storages}  # the worst first
    run.log_event(
        "sensitivity",
        bound=section.sensitivity_bound,
        layers=len(before),
        worst_before=before[0].damage,
        worst=max((one.damage for one in errors), default=0.0),  # a layer in bf16 is not among them: its error is 0
        moved=_lines(storages),
        added_bytes=sum(taken[name] - was[name].num_bytes for name in storages),
    )
    for one in fixed:
        run.log_event(
            "warning",
            text=f"{one.name} stays {one.storage} as quantize.override says, though its error of {one.damage:.3g} is "
            f"above quantize.sensitivity_bound = {section.sensitivity_bound:g}",
        )
    if len(storages) > len(before) / 2:
        run.log_event(
            "warning",
            text=f"quantize.sensitivity moved {len(storages)} of {len(before)} layers: quantize.sensitivity_bound = "
            f"{section.sensitivity_bound:g} is below what {section.storage} itself costs; raise it, or hold the base "
            "in quantize.storage = 'int8'",
        )
    return storages


def _lines(storages: dict[str, str]) -> list[str]:
    return [f"^{name} = {storage}" for name, storage in storages.items()]


def _held_errors(
    family: ModelFamily, section: config.Quantize, offload: float, asked: Sequence[Question]
) -> list[layerwise.LayerError]:
    """Load the base as training holds it, measure its layers, free it."""
    denoiser, *_ = base(family, section, offload)
    errors = _layer_errors(family, denoiser.eval(), section, asked)
    del denoiser
    _collect(family.device)
    return errors


def _layer_errors(
    family: ModelFamily, denoiser: nn.Module, section: config.Quantize, asked: Sequence[Question]
) -> list[layerwise.LayerError]:
    inputs = layerwise.capture_inputs(denoiser, [partial(one.ask, family, denoiser) for one in asked])
    tensors = family.denoiser_tensors()
    return layerwise.layer_errors(denoiser, tensors, inputs, family.dtype, section.sensitivity_bound)


def _measured(
    job: Job, family: ModelFamily, data: Data, moved: list[str], run: Run, num_pictures: int, whole: bool
) -> Report:
    asked = questions(job, family, data, num_pictures)
    expected: list[Tensor] = []
    if whole:
        run.log_event("stage", stage="the unquantized base")
        plain, *_ = base(family, config.Quantize(storage="none"))
        expected = [one.ask(family, plain.eval()) for one in asked]
        del plain
        _collect(family.device)
    run.log_event("stage", stage="the quantized base")
    section = with_moved(job.quantize, moved)
    denoiser, held, _ = base(family, section, job.memory.offload)
    errors = _layer_errors(family, denoiser.eval(), section, asked)
    prediction, multiplied = {}, {}
    if whole:
        with precision.decoded_compute(denoiser):
            prediction = _by_level(asked, expected, [one.ask(family, denoiser) for one in asked])
        if any(layer.compute != "upcast" for layer in held.quantized):
            multiplied = _by_level(asked, expected, [one.ask(family, denoiser) for one in asked])
    return Report(
        base=family.title,
        storage=held.summary(),
        bound=section.sensitivity_bound,
        override=section.override,
        moved=moved,
        pictures=len(asked) // len(LEVELS),
        layers=errors,
        prediction=prediction,
        multiplied=multiplied,
    )


def _by_level(asked: Sequence[Question], expected: Sequence[Tensor], got: Sequence[Tensor]) -> dict[str, float]:
    """Noise level -> relative error over all pictures together."""
    labels = [question.label for question in asked]

    def of(label: str, answers: Sequence[Tensor]) -> Tensor:
        return torch.cat([answer.flatten() for answer, one in zip(answers, labels, strict=True) if one == label])

    return {label: layerwise.relative(of(label, got), of(label, expected)) for label in dict.fromkeys(labels)}


def _collect(device: torch.device) -> None:
    """Give back the memory of a denoiser that nothing refers to any more; its modules refer to each other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
