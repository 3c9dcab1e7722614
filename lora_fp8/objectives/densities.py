"""Timestep densities: how often each noise level is trained.

A density is given by its quantile function, which turns a number q in (0, 1) into the noise level t below which a share
q of the draws lies, and by the inverse of that. Everything is in float64; the shift of flow matching comes afterwards.

    uniform       t = q
    logit_normal  t = sigmoid(mean + std * z), z the standard normal quantile (Esser et al. 2024, sect. 3.1)
    mode          t = 1 - u - s (cos^2(pi u / 2) - 1 + u), u = 1 - q: more of the middle for s > 0, more of both ends
                  for s < 0 (the same, "mode sampling with heavy tails")
    cosmap        the density 2 / (pi - 2 pi t + 2 pi t^2) (the same, "CosMap")
    beta          the beta distribution
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..settings import Objective

GRID = 2**14
"""Points of the table of a beta distribution."""


@dataclass(frozen=True)
class Density:
    """The distribution of noise levels, before any shift."""

    quantile: Callable[[Tensor], Tensor]
    """q in (0, 1) -> t, float64"""
    cdf: Callable[[Tensor], Tensor]
    """t -> share of the draws below it, float64"""


def make(section: Objective, *, auto: str, auto_std: float = 1.0) -> Density:
    """Build the density of a job's `[objective]` table.

    Args:
        section: the table.
        auto: what `objective.timesteps = "auto"` means, "uniform" or "logit_normal".
        auto_std: standard deviation of that "logit_normal".
    """
    chosen = section.timesteps
    if chosen == "auto":
        return UNIFORM if auto == "uniform" else make_logit_normal(0.0, auto_std)
    if chosen == "logit_normal":
        return make_logit_normal(section.logit_mean, section.logit_std)
    if chosen == "mode":
        return make_mode(section.mode_scale)
    if chosen == "beta":
        return make_beta(section.beta_alpha, section.beta_beta)
    return {"uniform": UNIFORM, "cosmap": COSMAP}[chosen]


def make_logit_normal(mean: float, std: float) -> Density:
    """Return the distribution of sigmoid(x), x normal."""
    return Density(
        lambda q: (mean + std * torch.special.ndtri(q)).sigmoid(),
        lambda t: torch.special.ndtr((t.logit() - mean) / std),
    )


def make_mode(scale: float) -> Density:
    """Return the distribution of mode sampling.

    Args:
        scale: s of the formula, from -1 to 2 / (pi - 2); beyond, the quantile function would fall.
    """

    def quantile(q: Tensor) -> Tensor:
        return q - scale * ((math.pi / 2 * (1 - q)).cos().square() - q)

    return Density(quantile, lambda t: _invert(quantile, t))


def make_beta(alpha: float, beta: float) -> Density:
    """Return the beta distribution, from a table of the integral of its density.

    With t = sin^2(a), the density t^(alpha - 1) (1 - t)^(beta - 1) becomes 2 sin^(2 alpha - 1)(a) cos^(2 beta - 1)(a),
    which is finite at both ends for alpha and beta of 0.5 and more.
    """
    middles = (torch.arange(GRID, dtype=torch.float64) + 0.5) * (math.pi / 2 / GRID)
    log_density = (2 * alpha - 1) * middles.sin().log() + (2 * beta - 1) * middles.cos().log()
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), (log_density - log_density.max()).exp().cumsum(0)])
    shares = sums / sums[-1]
    angles = torch.linspace(0, math.pi / 2, GRID + 1, dtype=torch.float64)
    return Density(
        lambda q: _interpolate(q, shares, angles).sin().square(),
        lambda t: _interpolate(t.clamp(0, 1).sqrt().asin(), angles, shares),
    )


def _invert(rising: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """Return q in [0, 1] with `rising(q)` = values, by bisection to the last bit."""
    low, high = torch.zeros_like(values), torch.ones_like(values)
    for _ in range(60):
        middle = (low + high) / 2
        below = rising(middle) < values
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def _interpolate(x: Tensor, xs: Tensor, ys: Tensor) -> Tensor:
    """Interpolate linearly between points of which `xs` rises."""
    after = torch.searchsorted(xs, x).clamp(1, len(xs) - 1)
    x0, x1, y0, y1 = xs[after - 1], xs[after], ys[after - 1], ys[after]
    return y0 + (y1 - y0) * ((x - x0) / (x1 - x0).clamp_min(1e-300)).clamp(0, 1)


UNIFORM = Density(lambda q: q, lambda t: t)
COSMAP = Density(
    lambda q: 1 - 1 / ((math.pi / 2 * q).tan() + 1),
    lambda t: (t / (1 - t)).atan() * (2 / math.pi),
)
