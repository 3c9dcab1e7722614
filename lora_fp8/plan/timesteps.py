"""Draw how often a job trains each noise level, beside the family's default and what other trainers draw.

The shares come from the job's own objective, at evenly spaced quantiles of its density: nothing is drawn by chance.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .. import families
from ..errors import Joined, Message, Template
from ..families.base import ModelFamily
from ..objectives import FlowMatching, Objective
from ..settings import Job
from ..settings import Objective as Section
from . import disk_budget, resolve

BANDS = 10
POINTS = 20_000
"""Quantiles that are computed; a multiple of the bands, so that a uniform density has equal shares."""
BAR = 40
"""Characters of the longest bar."""
PEERS: dict[str, dict[str, Any]] = {
    "ai-toolkit, diffusion-pipe": {"timesteps": "logit_normal", "shift": 1.0},
    "SimpleTuner": {"timesteps": "logit_normal", "shift": 3.0},
    "sd-scripts": {"timesteps": "uniform", "shift": 3.0},
    "musubi-tuner, OneTrainer": {"timesteps": "uniform", "shift": 1.0},
}
"""What other trainers draw for flow-matching models if their user chooses nothing. The defaults are those that
`importing` fills in; many of their examples say something else, such as `flux_shift`."""


@dataclass(frozen=True)
class Row:
    """One density."""

    title: str
    shape: str
    """the distribution and its shift, in words"""
    shares: tuple[float, ...]
    """share of the draws in each band of noise levels, from the image to noise"""


@dataclass(frozen=True)
class Timesteps:
    """How often noise levels are trained."""

    base: str
    resolution: int
    rows: tuple[Row, ...]
    """this job, the family's default, and others"""
    even: bool
    """timesteps are spread evenly over consecutive images"""

    def to_json(self) -> dict[str, Any]:
        """Return the densities as plain JSON types."""
        return asdict(self)

    def format_lines(self) -> list[str]:
        """Return a bar for each band of this job, and the shares of the others beside it."""
        titles = [Message("{number}: {title} ({shape})", number=i, title=row.title, shape=row.shape)
                  for i, row in enumerate(self.rows, 1)]  # fmt: skip
        lines: list[str] = [
            Message(
                "{base} at {side} x {side}: share of the images by noise level, from 0 (clean image) to 1 (noise)",
                base=self.base,
                side=self.resolution,
            ),
            *titles,
            "",
            "            " + "".join(f"{f'({i})':>8}" for i in range(1, len(self.rows) + 1)),
        ]
        most = max(self.rows[0].shares)
        for band in range(BANDS):
            shares = "".join(f"{row.shares[band]:>8.1%}" for row in self.rows)
            bar = "#" * round(BAR * self.rows[0].shares[band] / most)
            lines.append(f"{band / BANDS:>5.1f} - {(band + 1) / BANDS:.1f} {shares}  {bar}".rstrip())
        if self.even:
            lines += ["", Message("objective.even_timesteps: consecutive images are spread evenly over it")]
        return lines


def describe(job: Job) -> Timesteps:
    """Describe the timestep density of a job.

    Raises:
        UserError: see `plan.resolve`.
    """
    family = resolve.make_family(job, base=resolve.describe_for_estimate(job))
    job = resolve.resolve_auto(job, families.get(job.model.family))
    side = resolve.get_resolution(job)
    frames = [max(job.dataset.frames)] if job.dataset.frames else []
    latents = disk_budget.find_latents_shape(family, (side, side, *frames))
    seq_len = family.count_image_tokens(latents[1:]) if latents else side * side // 256
    own = job.objective
    chosen: dict[str, dict[str, Any]] = {Message("auto"): {}}
    if family.objective == "FlowMatching":
        chosen |= {Message("the model's sampler"): {"timesteps": "uniform", "shift": "scheduler"}} | PEERS
    else:
        chosen |= {Message("other trainers"): {"timesteps": "uniform"}}
    between = {"t_min": own.t_min, "t_max": own.t_max}
    rows = [(title, Section.model_validate(given | between)) for title, given in chosen.items()]
    made = [_make_row(family, title, section, seq_len) for title, section in [(Message("this config"), own), *rows]]
    return Timesteps(family.title, side, tuple(made), own.even_timesteps)


def _make_row(family: ModelFamily, title: str, section: Section, seq_len: int) -> Row:
    objective = family.make_objective(section)
    return Row(title, _describe_distribution(objective, section, seq_len), measure(objective, seq_len))


def measure(objective: Objective, seq_len: int, bands: int = BANDS) -> tuple[float, ...]:
    """Return the share of the draws in each band of noise levels, from 0 to 1."""
    quantiles = [(i + 0.5) / POINTS for i in range(POINTS)]
    levels = objective.compute_noise_level(objective.sample_t([], seq_len, quantiles)).double()
    counts = torch.bincount((levels * bands + 1e-6).floor().long().clamp(0, bands - 1), minlength=bands)
    return tuple((counts / POINTS).tolist())


def _describe_distribution(objective: Objective, section: Section, seq_len: int) -> str:
    """Return the distribution in words, with the settings of its shape."""
    flow = objective if isinstance(objective, FlowMatching) else None
    kind = section.timesteps if section.timesteps != "auto" else ("logit_normal" if flow else "uniform")
    of_kind: dict[str, Sequence[str]] = {
        "logit_normal": ("logit_mean", "logit_std"),
        "mode": ("mode_scale",),
        "beta": ("beta_alpha", "beta_beta"),
    }
    words: list[str] = [kind]
    if section.timesteps != "auto":
        words += [f"{name} {getattr(section, name):g}" for name in of_kind.get(kind, ())]
    elif flow and flow.deviation != 1.0:
        words.append(f"logit_std {flow.deviation:g}")
    words += [f"shift {flow.compute_shift(seq_len):.3g}"] if flow else []
    if (section.t_min, section.t_max) != (0.0, 1.0):
        between = Template("{low} to {high}")
        words.append(between(low=f"{section.t_min:g}", high=f"{section.t_max:g}"))
    return Joined(", ", words)
