"""Judge a series of held-out losses: which step is best, whether the loss has turned, and whether training still helps.

Every validation measures the same images with the same noise at the same noise levels. Two validations are therefore
compared in pairs, image by image, and what the images do not have in common is the uncertainty of their difference.

    d[i, l] = loss of image i at noise level l at one validation - the same at the other
    rise    = mean of d over images and levels
    error   = square root of (a + 2 w)

    a  uncertainty from the few images: the larger of two squared standard errors of the rise. The first takes the
       losses of an image as one value, as its levels share content and noise. The second takes all values as
       independent, and removes the mean of each level, as the levels are chosen and not drawn. With two images the
       first alone is often small by chance.
    w  variance of one validation that all images share: the weights move with every step, and the curve moves with
       them. It is estimated from the curve's n second differences: on a straight line they have a variance of 6 w, and
       their mean absolute value is the square root of 12 w / pi. Squares would give the turn itself too much weight.
       An estimate from few differences is often too small, and is raised by the factor 1 + 2 / n. The measurement
       before the first step is left out, since most of the fall comes right after it.

A rise counts if it is larger than `RISE` errors at the newest validation and at the one before, out of at least
`LEAST`. The best step is itself chosen among noisy values, so three errors are asked and two validations must agree.
tests/test_verdict.py measures how often noise alone is called a turn by somebody who looks after each of ten
validations: in one run of twenty at most if all images waver together, and in one of fifty if they do not.
An improvement counts if it is larger than `IMPROVEMENT` errors below the last one that counted: ending a training
early costs more than one more validation. Small improvements add up, as the reference stays until one counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

RISE = 3.0
IMPROVEMENT = 1.0
LEAST = 6
"""Validations, with that before the first step, before a rise is judged; the fewest that give three differences."""


@dataclass(frozen=True)
class Measurement:
    """The held-out losses of one validation.

    Attributes:
        step: optimizer steps done.
        losses: by image, then by noise level.
        has_lora: False if nothing was trained yet: before the first step, and as long as the learning rate was 0.
    """

    step: int
    losses: tuple[tuple[float, ...], ...]
    has_lora: bool = True

    @cached_property
    def mean(self) -> float:
        """Mean over images and noise levels."""
        return fmean(map(fmean, self.losses))


@dataclass(frozen=True)
class Verdict:
    """What a series of held-out losses says at its newest validation.

    Attributes:
        best: step of the lowest loss.
        loss: that loss.
        rise: how far the newest loss is above it.
        error: standard error of the rise.
        risen_since: step since which all validations are above the best one by more than noise; None without one.
        stale: number of newest validations without an improvement that is larger than noise.
    """

    best: int
    loss: float
    rise: float
    error: float
    risen_since: int | None
    stale: int


def find_best(series: Sequence[Measurement]) -> Measurement:
    """Return the measurement of the lowest loss, the earliest of equal ones."""
    return min(series, key=lambda measurement: (measurement.mean, measurement.step))


def find_best_lora(series: Sequence[Measurement]) -> Measurement | None:
    """Return the measurement of the best trained LoRA; None if there is none."""
    trained = [measurement for measurement in series if measurement.has_lora]
    return find_best(trained) if trained else None


def judge(series: Sequence[Measurement]) -> Verdict:
    """Judge a series of at least one measurement of the same images, by rising steps."""
    best, newest, shared = find_best(series), series[-1], list_shared_variances(series)[-1]
    since: int | None = None
    later = series[series.index(best) + 1 :]
    risen = [compare(now, best, shared) > RISE for now in later]
    if len(series) >= LEAST and risen[-2:] == [True, True]:
        length = next((i for i, has_risen in enumerate(reversed(risen)) if not has_risen), len(risen))
        since = later[-length].step
    return Verdict(
        best=best.step,
        loss=best.mean,
        rise=newest.mean - best.mean,
        error=estimate_error(newest, best, shared),
        risen_since=since,
        stale=_count_stale(series),
    )


def _count_stale(series: Sequence[Measurement]) -> int:
    """Count the newest measurements without an improvement. Each is judged by what was known when it was made."""
    reference, stale = series[0], 0
    for now, shared in zip(series[1:], list_shared_variances(series)[1:], strict=True):
        if compare(reference, now, shared) > IMPROVEMENT:
            reference, stale = now, 0
        else:
            stale += 1
    return stale


def compare(higher: Measurement, lower: Measurement, shared: float) -> float:
    """Return how many errors one loss lies above the other; `shared` is from `list_shared_variances`."""
    rise, error = higher.mean - lower.mean, estimate_error(higher, lower, shared)
    return rise / error if error else math.copysign(math.inf, rise) if rise else 0.0


def estimate_error(first: Measurement, second: Measurement, shared: float) -> float:
    """Return the standard error of the difference of two losses; of a single image, without that of the images."""
    differences = [
        [a - b for a, b in zip(*levels, strict=True)] for levels in zip(first.losses, second.losses, strict=True)
    ]
    images, levels = len(differences), len(differences[0])
    if images == 1:
        return math.sqrt(2 * shared)
    image_means = list(map(fmean, differences))
    level_means = [fmean(row[level] for row in differences) for level in range(levels)]
    mean = fmean(image_means)
    between_images = sum((value - mean) ** 2 for value in image_means) / (images - 1) / images
    residuals = sum((row[level] - level_means[level]) ** 2 for row in differences for level in range(levels))
    of_all_values = residuals / (levels * (images - 1)) / (images * levels)
    return math.sqrt(max(between_images, of_all_values) + 2 * shared)


def list_shared_variances(series: Sequence[Measurement]) -> list[float]:
    """Estimate the variance of one loss around a smooth curve, as known at each measurement; 0.0 of too few.

    The measurements are taken as equally far apart; the last one may be nearer.
    """
    variances: list[float] = []
    means: list[float] = []
    total = 0.0
    for measurement in series:
        means += [measurement.mean] if measurement.step else []
        count = len(means) - 2
        if measurement.step and count > 0:
            total += abs(means[-3] - 2 * means[-2] + means[-1])
        variances.append((total / count) ** 2 * math.pi / 12 * (1 + 2 / count) if count > 0 else 0.0)
    return variances
