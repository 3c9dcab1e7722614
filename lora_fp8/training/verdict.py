"""Judge a series of held-out losses: which step is best, whether the loss has turned, and whether training still helps.

Every validation measures the same images with the same noise at the same noise levels. Two validations are therefore
compared in pairs, image by image, and what the images do not have in common is the uncertainty of their difference.
Differences are relative, as losses of images differ many times over, and a loss wavers the more the higher it is:

    d[i, l] = (loss of image i at level l at one validation - the same at the other) / scale[i]
    rise    = mean of d over images and levels
    error   = square root of (a + 2 w)

    scale   logarithmic mean of the image's two losses, (x - y) / (ln x - ln y), x and y being its means over levels.
            The mean of d over levels is then ln (x / y): a rise of 0.1 is one by a tenth, as nearly as matters.
    a  uncertainty from the few images: the larger of two squared standard errors of the rise. The first takes the
       losses of an image as one value, as its levels share content and noise. The second takes all values as
       independent, and removes the mean of each level, as the levels are chosen and not drawn. With two images the
       first alone is often small by chance.
    w  variance of one validation that all images share: the weights move with every step, and the curve moves with
       them. It is estimated from the n second differences of the mean of ln x: on a straight line they have a variance
       of 6 w, and their mean absolute value is the square root of 12 w / pi. Squares would give the turn itself too
       much weight. An estimate from few differences is often too small, and is raised by the factor 1 + 4 / n. The
       measurement before the first step is left out, since most of the fall comes right after it.

The loss has turned if the mean of the two newest validations lies more than `RISE` errors above the best one, and each
of the two more than `EACH`, out of at least `LEAST`; the error of a mean of two has 1.5 w in place of 2 w. So many
errors are asked because the best step is itself chosen among noisy values. The loss has risen since the first of the
validations that all, up to the newest, lie more than `CHANGE` errors above the best one. tests/test_verdict.py measures
how often noise alone is called a turn by somebody who looks after each of ten validations: in one run of twenty at most
if all images waver together, and in one of a hundred if they do not.
An improvement counts if it is larger than `CHANGE` errors below the last one that counted: ending a training early
costs more than one more validation. Small improvements add up, as the reference stays until one counts.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

RISE = 3.0
EACH = 2.5
CHANGE = 1.0
LEAST = 6
"""Validations, with that before the first step, before a rise is judged; the fewest that give three differences."""
TINY = 1e-30
"""What stands for a loss of 0, which has no logarithm."""


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
        """Return the mean over images and noise levels."""
        return fmean(self.image_means)

    @cached_property
    def image_means(self) -> list[float]:
        """Return the mean of each image over noise levels."""
        return list(map(fmean, self.losses))

    @cached_property
    def log_mean(self) -> float:
        """Return the mean over images of the logarithm of their mean."""
        return fmean(math.log(max(mean, TINY)) for mean in self.image_means)


@dataclass(frozen=True)
class Verdict:
    """What a series of held-out losses says at its newest validation.

    Attributes:
        best: step of the lowest loss.
        loss: that loss.
        rise: how far the mean of the newest two after it lies above it, relative: 0.1 is a tenth.
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
    best, shared = find_best(series), list_shared_variances(series)[-1]
    later = series[series.index(best) + 1 :]
    rise = error = 0.0
    since: int | None = None
    if later:
        newest = _average(later[-2:])
        rise = newest.log_mean - best.log_mean
        error = estimate_error(newest, best, (1 + 1 / len(later[-2:])) * shared)
    both_rose = len(later) > 1 and all(compare(now, best, shared) > EACH for now in later[-2:])
    if len(series) >= LEAST and both_rose and rise > RISE * error:
        tail = itertools.takewhile(lambda now: compare(now, best, shared) > CHANGE, reversed(later))
        since = min(measurement.step for measurement in tail)
    return Verdict(best.step, best.mean, rise, error, since, _count_stale(series))


def _average(measurements: Sequence[Measurement]) -> Measurement:
    """Return the mean of each loss over the measurements, at the step of the last one."""
    rows = zip(*(measurement.losses for measurement in measurements), strict=True)
    means = (tuple(map(fmean, zip(*images, strict=True))) for images in rows)
    return Measurement(measurements[-1].step, tuple(means))


def _count_stale(series: Sequence[Measurement]) -> int:
    """Count the newest measurements without an improvement. Each is judged by what was known when it was made."""
    reference, stale = series[0], 0
    for now, shared in zip(series[1:], list_shared_variances(series)[1:], strict=True):
        if compare(reference, now, shared) > CHANGE:
            reference, stale = now, 0
        else:
            stale += 1
    return stale


def compare(higher: Measurement, lower: Measurement, shared: float) -> float:
    """Return how many errors one loss lies above the other; `shared` is from `list_shared_variances`."""
    rise, error = higher.log_mean - lower.log_mean, estimate_error(higher, lower, 2 * shared)
    return rise / error if error else math.copysign(math.inf, rise) if rise else 0.0


def estimate_error(first: Measurement, second: Measurement, wavering: float) -> float:
    """Return the standard error of a relative difference of two losses; of a single image, without the images' part.

    Args:
        first, second: what is compared.
        wavering: variance of the difference from what all images share.
    """
    differences = [
        [(a - b) / scale for a, b in zip(*pair, strict=True)]
        for *pair, scale in zip(first.losses, second.losses, _list_scales(first, second), strict=True)
    ]
    images, levels = len(differences), len(differences[0])
    if images == 1:
        return math.sqrt(wavering)
    image_means = list(map(fmean, differences))
    level_means = [fmean(row[level] for row in differences) for level in range(levels)]
    mean = fmean(image_means)
    between_images = sum((value - mean) ** 2 for value in image_means) / (images - 1) / images
    residuals = sum((row[level] - level_means[level]) ** 2 for row in differences for level in range(levels))
    of_all_values = residuals / (levels * (images - 1)) / (images * levels)
    return math.sqrt(max(between_images, of_all_values) + wavering)


def _list_scales(first: Measurement, second: Measurement) -> list[float]:
    """Return the logarithmic mean of each image's two losses."""
    scales = []
    for a, b in zip(first.image_means, second.image_means, strict=True):
        a, b = max(a, TINY), max(b, TINY)
        # Of nearly equal values both differences cancel, and the arithmetic mean is the same.
        scales.append((a - b) / math.log(a / b) if abs(a - b) > 1e-6 * a else (a + b) / 2)
    return scales


def list_shared_variances(series: Sequence[Measurement]) -> list[float]:
    """Estimate the relative variance of a loss around a smooth curve, as known at each measurement; 0.0 of too few.

    The measurements are taken as equally far apart; the last one may be nearer.
    """
    variances: list[float] = []
    means: list[float] = []
    total = 0.0
    for measurement in series:
        means += [measurement.log_mean] if measurement.step else []
        count = len(means) - 2
        if measurement.step and count > 0:
            total += abs(means[-3] - 2 * means[-2] + means[-1])
        variances.append((total / count) ** 2 * math.pi / 12 * (1 + 4 / count) if count > 0 else 0.0)
    return variances
