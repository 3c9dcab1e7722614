"""The learning rate of each step: pure functions of the step, so that resuming needs no schedule state."""

import math

from ..errors import Message, UserError
from .declarations import Schedule


def count_warmup_steps(section: Schedule, total_steps: int) -> int:
    """Return the number of warm-up steps; a fraction is rounded up, as in transformers' Trainer."""
    return 0 if section.name == "points" else _count(section.warmup, total_steps)


def count_decay_steps(section: Schedule, total_steps: int) -> int:
    """Return the number of steps in which the schedule "wsd" falls at the end; a fraction is rounded up."""
    return _count(section.decay, total_steps)


def read_points(section: Schedule, total_steps: int) -> list[tuple[float, float]]:
    """Return `schedule.points` as (step, factor), in order of the steps.

    Raises:
        UserError: a name is no place in the training, two places are the same step, or there is no factor above 0.
    """
    points: dict[float, tuple[str, float]] = {}
    for name, factor in section.points.items():
        step = _find_step(name, total_steps)
        if step in points:
            raise UserError(
                Message(
                    "{first} and {second} are the same step; remove one", first=repr(points[step][0]), second=repr(name)
                )
            )
        points[step] = name, factor
    if not any(factor for _, factor in points.values()):
        raise UserError(Message("no factor is above 0; give at least one, such as in {example}",
                                example="{'0' = 0, '0.1' = 1, '1.0' = 0.1}"))  # fmt: skip
    return [(step, points[step][1]) for step in sorted(points)]


def compute_learning_rate(step: int, section: Schedule, base_lr: float, total_steps: int) -> float:
    """Return the learning rate of one optimizer step.

    The values equal transformers' `get_{constant,cosine,linear,polynomial_decay}_schedule_with_warmup`,
    `get_cosine_with_hard_restarts_schedule_with_warmup` and `get_wsd_schedule`: `base_lr * step / warmup` during
    warm-up, so the first step has learning rate 0; then down to `min_lr * base_lr` at `total_steps`. "rex" is the
    profile of Chen et al. 2021, "REX: Revisiting Budgeted Training with an Improved Schedule", with its 1/2 as `rex_d`.

    Args:
        step: steps taken before this one: 0 for the first.
        section: the job's `[schedule]` table. `warmup` counts steps, or is a fraction of `total_steps` if below 1 (see
            `warmup_steps`).
        base_lr: learning rate after warm-up.
        total_steps: steps of the whole training.
    """
    if section.name == "points":
        return base_lr * _interpolate(step, read_points(section, total_steps))
    warmup = count_warmup_steps(section, total_steps)
    if step < warmup:
        return base_lr * step / warmup
    shape = _compute_shape(section, step, warmup, total_steps)
    if section.name != "constant":
        shape = section.min_lr + (1.0 - section.min_lr) * shape
    return base_lr * shape


def _compute_shape(section: Schedule, step: int, warmup: int, total_steps: int) -> float:
    """Return the factor of a step after the warm-up, from 1 down to 0."""
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    match section.name:
        case "constant":
            return 1.0
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * progress))
        case "cosine_with_restarts":
            # After the last step the cycle has ended; it does not restart.
            turn = 1.0 if progress == 1 else section.cycles * progress % 1.0
            return 0.5 * (1.0 + math.cos(math.pi * turn))
        case "linear":
            return 1.0 - progress
        case "polynomial":
            return float((1.0 - progress) ** section.power)
        case "rex":
            return (1.0 - progress) / (1.0 - section.rex_d + section.rex_d * (1.0 - progress))
        case "wsd":
            decay = count_decay_steps(section, total_steps)
            fallen = min(1.0, max(0, step - (total_steps - decay)) / decay)
            if section.decay_shape == "linear":
                return 1.0 - fallen
            if section.decay_shape == "1-sqrt":
                return 1.0 - math.sqrt(fallen)
            return 0.5 * (1.0 + math.cos(math.pi * fallen))
    raise UserError(
        Message(
            "{key}: {given} is not available; accepted: {names}",
            key="schedule.name",
            given=repr(section.name),
            names="constant, cosine, cosine_with_restarts, linear, polynomial, wsd, rex, points",
        )
    )


def _count(length: float, total_steps: int) -> int:
    """Return a length in steps, which is given in steps or as a fraction of all; a fraction is rounded up."""
    steps = length if length >= 1 else length * total_steps
    return math.ceil(steps - 1e-9)  # 0.1 * 30 is 3.0000000000000004


def _find_step(name: str, total_steps: int) -> float:
    """Return the step that the name of a point means: "500" counts steps, "0.5" is a share of all steps."""
    try:
        if name.isdecimal():
            return float(int(name))
        if "." in name and 0 <= (share := float(name)) <= 1:
            return share * total_steps
    except (ValueError, OverflowError):
        pass
    raise UserError(
        Message(
            "{name} is not a position in the training; give a whole number of steps, or a fraction of all steps "
            "with a decimal point, from 0.0 to 1.0",
            name=repr(name),
        )
    )


def _interpolate(step: int, points: list[tuple[float, float]]) -> float:
    """Return the factor of a step: on the line between two points, and of the nearest point outside of them."""
    before = [point for point in points if point[0] <= step]
    after = [point for point in points if point[0] > step]
    if not before or not after:
        return (before or after)[-1 if before else 0][1]
    (start, first), (end, second) = before[-1], after[0]
    return first + (second - first) * (step - start) / (end - start)
