"""Find a learning rate: train a few steps while it grows from far too low to far too high (Smith 2017).

The loss of one step says little: it depends mostly on the image and the noise level that were drawn. So each step's
loss is divided by the frozen base's own loss for the same batch, the same noise and the same timesteps (adapters off).
That ratio is 1 at the start, falls while the rate is useful, and rises where it is too high. Noise levels are drawn as
in training, and the base is stored as in training, so that the rate belongs to the quantized base.

Nothing is written but cached images and captions.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .. import adapters
from ..common.progress import show_images
from ..distributed.processes import Processes
from ..errors import Joined, Message, RunFailure, UserError
from ..plan import plan as planning
from ..settings import Job
from ..training import optim
from ..training.torch_options import set_torch_options
from .cache import Data, cache
from .fit_memory import fit_memory
from .load import Loaded, load
from .measure import find_layers_to_move
from .preflight import preflight
from .prior import with_prior_targets
from .progress import Progress
from .resume import State
from .session import Session, UnwrittenRun, explain_errors
from .step import add_noise, compute_gradient_, predict_and_compare

STEPS = 120
LOWEST, HIGHEST = 1e-5, 1e-1
"""The range of learning rates, the factor of FP8 bases included."""
SMOOTHING = 0.9
"""Share of the steps before in the average of the losses: about the last ten steps count."""
END = 1.5
"""Ratio above which the test ends: the adapters make the base half again as bad."""
BELOW_LOWEST = 4.0
"""The suggestion is this much lower than the rate at the lowest ratio: the curve is some steps late, and a training of
many steps keeps its rate. Chosen on the bundled bases; benchmarks/learning_rate.md has what it gives."""
LEAST_FALL = 0.002
"""A ratio that never falls further than this shows nothing."""
ROWS, BAR = 24, 50


@dataclass(frozen=True)
class Point:
    """One step."""

    lr: float
    """learning rate of the step, the factor included"""
    loss: float
    base_loss: float
    """loss of the frozen base for the same draws"""
    ratio: float
    """smoothed loss over smoothed loss of the base"""


@dataclass(frozen=True)
class RateTest:
    """The result of a learning-rate test."""

    base: str
    storage: str
    factor: float
    """optimizer.lr_scale as a number"""
    present: float
    """optimizer.lr of the job"""
    points: tuple[Point, ...]

    @property
    def lowest(self) -> Point:
        """Return the point with the lowest ratio."""
        return min(self.points, key=lambda point: point.ratio)

    @property
    def suggestion(self) -> float | None:
        """Return the suggested `optimizer.lr`, rounded to one digit; None if the curve shows no minimum."""
        lowest = self.lowest
        if lowest.ratio > 1 - LEAST_FALL or self.still_falls:
            return None
        return float(f"{lowest.lr / self.factor / BELOW_LOWEST:.0e}")

    @property
    def still_falls(self) -> bool:
        """Return True if the ratio is lowest at the end, so that the highest rate was not high enough."""
        return self.lowest is self.points[-1]

    def to_json(self) -> dict[str, Any]:
        """Return the test as plain JSON types."""
        return asdict(self) | {"suggestion": self.suggestion}

    def format_lines(self) -> list[str]:
        """Return the curve, with a bar for each of about 24 rates, and the suggestion."""
        effective = self.present * self.factor
        rows = self.points[:: max(1, round(len(self.points) / ROWS))]
        least, most = min(point.ratio for point in rows), max(1.0, *(min(point.ratio, 1.1) for point in rows))
        present, lowest = _find_nearest(rows, effective), _find_nearest(rows, self.lowest.lr)
        lines: list[str] = [
            Message("{base}, {storage}", base=self.base, storage=self.storage),
            Message("learning rate   loss, as a fraction of the base model's for the same images, noise and timesteps"),
        ]
        for point in rows:
            length = BAR * (min(point.ratio, most) - least) / max(most - least, 1e-9)
            marks = [Message("lowest")] * (point is lowest) + [Message("this config")] * (point is present)
            mark = Joined(", ", marks)
            lines.append(f"{point.lr:>13.1e}   {point.ratio:>6.3f} {'#' * round(length):<{BAR}} {mark}".rstrip())
        return [*lines, "", *self._describe_suggestion()]

    def _describe_suggestion(self) -> list[str]:
        lowest, factor = self.lowest, f"{self.factor:g}"
        if lowest.ratio > 1 - LEAST_FALL:
            return [
                Message("No suggestion: the loss never fell. The base model may already be able to draw these images.")
            ]
        if self.still_falls:
            return [
                Message(
                    "No suggestion: the loss still falls at the highest rate, {rate}; give a higher one with --to",
                    rate=f"{lowest.lr:.1e}",
                )
            ]
        lines: list[str] = [
            Message("The loss is lowest at {rate}, and rises at higher rates.", rate=f"{lowest.lr:.1e}"),
            Message(
                "Suggestion: optimizer.lr = {rate}. It is a quarter of that learning rate, divided by "
                "optimizer.lr_scale ({factor}).",
                rate=f"{self.suggestion:g}",
                factor=factor,
            ),
            Message("This config has optimizer.lr = {rate}.", rate=f"{self.present:g}"),
        ]
        return lines


def _find_nearest(points: Sequence[Point], lr: float) -> Point:
    return min(points, key=lambda point: abs(math.log(point.lr / lr)))


def find_rate(
    job: Job,
    *,
    steps: int = STEPS,
    ends: tuple[float, float] = (LOWEST, HIGHEST),
    echo: Callable[[dict[str, Any]], None] | None = None,
    shows_progress: bool = False,
) -> RateTest:
    """Train a few steps with a growing learning rate, in one process.

    Args:
        job: with its config; its schedule is not used.
        steps: number of steps.
        ends: the range of learning rates, the factor of `optimizer.lr_scale` included.
        echo: called with each event.
        shows_progress: show a progress bar on stderr.

    Raises:
        UserError: the job has a problem, or its optimizer finds its rate itself.
        RunFailure: the memory or the disk is too small, or the base model is broken.
    """
    if job.optimizer.name == "prodigy":
        raise UserError(Message("optimizer.name = 'prodigy' finds its learning rate by itself"))
    # As many steps as there are: the batches are those of a training, of which this is the start.
    job = job.model_copy(update={"train": job.train.model_copy(update={"steps": steps})})
    processes = Processes()
    set_torch_options(job.train.threads, deterministic=job.train.deterministic)
    plan = planning.make(job, processes.device, progress=show_images() if shows_progress else None)
    plan.family.fetch_weights()
    session = Session(plan, UnwrittenRun(echo), processes, shows_progress=shows_progress)
    for text in [*plan.images.warnings, *plan.warnings]:
        session.warn(text)
    if job.adapter.init_from:
        session.warn(Message("adapter.init_from is not used here; the suggested learning rate is for a new adapter"))
    with explain_errors(session):
        data = cache(session)
        session = fit_memory(session)
        loaded = load(session, find_layers_to_move(session, resume=False))
        preflight(session, data, loaded, State())
        points = _measure(session, data, loaded, ends)
    if points and not any(point.base_loss for point in points):
        raise UserError(
            Message(
                "objective.prior_for_regularization: all images are regularization images, whose target is the base "
                "model's own prediction, so no learning rate can improve the loss"
            )
        )
    if not points:
        raise RunFailure(
            Message("the gradient of the first step is not finite; check that the base model file is complete")
        )
    factor = optim.resolve_lr_factor(job.optimizer, job.quantize.storage)
    return RateTest(
        plan.family.title,
        loaded.layers.format_summary().splitlines()[0],
        factor,
        optim.resolve_lr(job.optimizer),
        tuple(points),
    )


def _measure(session: Session, data: Data, loaded: Loaded, ends: tuple[float, float]) -> list[Point]:
    """Train with a rate that grows by the same factor each step, until the ratio is END."""
    job, gradients = session.job, loaded.exchange.gradients
    steps = job.train.steps
    points: list[Point] = []
    loss_sum = base_sum = 0.0
    with Progress(job.name, 0, steps, is_shown=session.shows_progress) as progress:
        for step in range(1, steps + 1):
            lr = ends[0] * (ends[1] / ends[0]) ** ((step - 1) / max(1, steps - 1))
            gradient = compute_gradient_(session, data, loaded, step, frozenset)
            norm = optim.clip_(gradients.values, job.train.max_grad_norm)
            if not (math.isfinite(gradient.loss) and math.isfinite(norm)):
                break
            base_loss = _measure_base(session, data, loaded, step)
            loaded.optimizer.step(gradients.values, lr, step)
            loaded.amax.end_step_(session.processes.reduce_max_)
            loss_sum = SMOOTHING * loss_sum + gradient.loss
            base_sum = SMOOTHING * base_sum + base_loss
            # A batch of regularization images alone, whose target is the base's prediction, has no loss of the base.
            points.append(Point(lr, gradient.loss, base_loss, loss_sum / base_sum if base_sum else 1.0))
            session.run.log_event("rate", step=step, **asdict(points[-1]))
            progress.update(step, gradient.loss, lr)
            if points[-1].ratio > END:
                break
    return points


@torch.no_grad()
def _measure_base(session: Session, data: Data, loaded: Loaded, step: int) -> float:
    """Return the base's mean loss for the batches of a step: the same images, noise, timesteps and targets.

    Where the base's own prediction is the target (see `prior`), its loss is 0; so the pass of a class word is left out.
    """
    job, family = session.job, session.family
    positions = range((step - 1) * job.train.accumulate, step * job.train.accumulate)
    total, count = 0.0, 0
    with adapters.disabled(loaded.adapted):
        for position in positions:
            batch = data.loader.take_batch(step, position)
            assert batch is not None  # one process, which has every sample
            noised = add_noise(family, loaded.denoiser, loaded.objective, batch, job.objective.guidance, loaded.text)
            noised = with_prior_targets(family, loaded, job.objective, batch, noised)
            losses_B = predict_and_compare(family, loaded.denoiser, loaded.objective, noised)
            total += (losses_B.cpu() * torch.tensor(batch.weights)).sum().item()
            count += batch.total
    return total / count
