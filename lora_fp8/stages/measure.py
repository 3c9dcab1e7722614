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

from .. import precision, settings
from ..data.loader import Loader
from ..distributed.processes import Processes
from ..errors import RunFailure, UserError
from ..families.base import Cond, ModelFamily
from ..plan import plan as planning
from ..precision import report as layerwise
from ..run import Run
from ..settings import Job
from ..training import checkpoint
from .cache import Data, cache
from .load import base, with_moved
from .session import Session

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
    override: dict[str, str]
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
    plan = planning.make(job, processes.device)
    if not plan.layers.quantized:
        raise UserError(
            f"quantize.storage = {job.quantize.storage!r}: no layer is quantized, so there is nothing to measure; "
            "give a storage, such as --set quantize.storage=fp8"
        )
    session = Session(plan, _Unwritten(echo), processes)
    for text in [*plan.images.warnings, *plan.warnings]:
        session.warn(text)
    data = cache(session)
    moved = moved_layers(session, data, resume=False)
    try:
        return _measure(session, data, moved, num_pictures, whole)
    except torch.cuda.OutOfMemoryError:
        raise RunFailure(
            "out of memory; --layers-only needs the quantized base only, without the unquantized one"
            if whole
            else "out of memory; use --pictures 1, or a smaller dataset.resolution"
        ) from None


def moved_layers(session: Session, data: Data, resume: bool) -> list[str]:
    """Return the lines that quantize.sensitivity = "auto" adds to quantize.override; none with "off".

    A run that goes on takes the lines of its checkpoint and measures nothing. Of several processes the main one
    measures, and all get its lines.

    Raises:
        ValueError: NaN or infinity in a layer, naming it.
        RunFailure: a prediction is not finite; the measurement failed on the main process.
    """
    run, processes = session.run, session.processes
    if session.job.quantize.sensitivity == "off":
        return []
    if resume and (found := checkpoint.latest(run.checkpoints)[0]) is not None:
        return found.state.get("moved", [])
    lines: list[str] = []
    if processes.is_main and session.plan.layers.quantized:
        run.log_event("stage", stage="sensitivity")
        lines = _lines(_settle(session, data))
    return processes.gather(lines)[0]


def questions(session: Session, data: Data, num_pictures: int = NUM_PICTURES) -> list[Question]:
    """Take the first images of epoch 0, one by one (so that the batch size changes nothing), at each noise level."""
    job, family = session.job, session.family
    objective = family.make_objective(job.objective)
    loader = Loader(session.plan.images.buckets, session.plan.cache, family, job.dataset, seed=job.seed, batch_size=1)
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


def _settle(session: Session, data: Data) -> dict[str, str]:
    """Return layer -> the storage that it needs for the bound to hold; what quantize.override sets stays.

    Measured again after each round of moves, so that the bound holds for the base as it will be trained: inputs change
    a little with the layers before. A round moves at least one layer up the ladder, which has two steps.
    """
    job, family = session.job, session.family
    section, asked = job.quantize, questions(session, data)
    storages: dict[str, str] = {}
    added: dict[str, int] = {}
    before: list[layerwise.LayerError] = []
    while True:
        errors = _held_errors(family, with_moved(section, _lines(storages)), job.memory.offload, asked)
        before = before or errors
        fixed, movable = _above_bound(errors, section)
        if not movable:
            break
        if stuck := [one.name for one in movable if storages.get(one.name) == one.better]:
            raise RuntimeError(f"{stuck[0]} was moved to {storages[stuck[0]]} and is not held so")
        storages |= {one.name: one.better for one in movable}
        added |= {one.name: one.better_bytes for one in movable}
    storages = {one.name: storages[one.name] for one in before if one.name in storages}  # the worst first
    session.run.log_event(
        "sensitivity",
        bound=section.sensitivity_bound,
        layers=len(before),
        worst_before=before[0].damage,
        worst=max((one.damage for one in errors), default=0.0),  # a layer in bf16 is not among them: its error is 0
        moved=_lines(storages),
        added_bytes=sum(added[one.name] - one.num_bytes for one in before if one.name in storages),
    )
    _warn_of_moves(session.run, section, fixed, len(storages), len(before))
    return storages


def _above_bound(
    errors: Sequence[layerwise.LayerError], section: settings.Quantize
) -> tuple[list[layerwise.LayerError], list[layerwise.LayerError]]:
    """Return the layers above the bound: those whose storage the user set, and those that may be moved."""
    over = [one for one in errors if one.better]
    fixed = [one for one in over if any(precision.name_matches(one.name, entry) for entry in section.override)]
    return fixed, [one for one in over if one not in fixed]


def _warn_of_moves(
    run: Run, section: settings.Quantize, fixed: Sequence[layerwise.LayerError], num_moved: int, num_layers: int
) -> None:
    """Warn of layers that stay above the bound, and of a bound that moves most layers.

    Args:
        run: takes the warnings.
        section: the job's `[quantize]` table.
        fixed: layers above the bound whose storage the user set.
        num_moved, num_layers: how many layers were moved, and how many there are.
    """
    for one in fixed:
        run.log_event(
            "warning",
            text=f"{one.name} stays {one.storage} as quantize.override says, though its error of {one.damage:.3g} is "
            f"above quantize.sensitivity_bound = {section.sensitivity_bound:g}",
        )
    if num_moved > num_layers / 2:
        run.log_event(
            "warning",
            text=f"quantize.sensitivity moved {num_moved} of {num_layers} layers: quantize.sensitivity_bound = "
            f"{section.sensitivity_bound:g} is below what {section.storage} itself costs; raise it, or hold the base "
            "in quantize.storage = 'int8'",
        )


def _lines(storages: dict[str, str]) -> list[str]:
    return [f"^{name} = {storage}" for name, storage in storages.items()]


def _held_errors(
    family: ModelFamily, section: settings.Quantize, offload: float, asked: Sequence[Question]
) -> list[layerwise.LayerError]:
    """Load the base as training holds it, measure its layers, free it."""
    denoiser, *_ = base(family, section, offload)
    errors = _layer_errors(family, denoiser.eval(), section, asked)
    del denoiser
    _collect(family.device)
    return errors


def _layer_errors(
    family: ModelFamily, denoiser: nn.Module, section: settings.Quantize, asked: Sequence[Question]
) -> list[layerwise.LayerError]:
    inputs = layerwise.capture_inputs(denoiser, [partial(one.ask, family, denoiser) for one in asked])
    tensors = family.denoiser_tensors()
    return layerwise.layer_errors(denoiser, tensors, inputs, family.dtype, section.sensitivity_bound)


def _measure(session: Session, data: Data, moved: list[str], num_pictures: int, whole: bool) -> Report:
    job, family, run = session.job, session.family, session.run
    asked = questions(session, data, num_pictures)
    expected: list[Tensor] = []
    if whole:
        run.log_event("stage", stage="the unquantized base")
        plain, *_ = base(family, settings.Quantize(storage="none"))
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
