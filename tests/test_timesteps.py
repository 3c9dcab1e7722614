"""Timestep densities, even timesteps, and what is done to noise and its weights, against their papers and peers."""

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import miniatures
import mpmath
import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling

from lora_fp8 import cli, settings
from lora_fp8.distributed import processes
from lora_fp8.errors import UserError
from lora_fp8.objectives import Diffusion, FlowMatching, densities
from lora_fp8.plan import plan as planning
from lora_fp8.plan import timesteps
from lora_fp8.stages import cache, load
from lora_fp8.stages.session import Session, UnwrittenRun
from lora_fp8.stages.step import add_noise

FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
SD = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
ZERO = {**SD, "rescale_betas_zero_snr": True}
V = {**SD, "prediction_type": "v_prediction"}
LEVELS = torch.linspace(0.02, 0.98, 25)
SHAPES: list[dict[str, Any]] = [
    {"timesteps": "logit_normal", "logit_mean": -0.7, "logit_std": 1.6},
    {"timesteps": "mode", "mode_scale": 1.29},
    {"timesteps": "mode", "mode_scale": -0.8},
    {"timesteps": "cosmap"},
    {"timesteps": "beta", "beta_alpha": 0.5, "beta_beta": 3.0},
    {"timesteps": "beta", "beta_alpha": 2.0, "beta_beta": 2.0},
]


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(count)]


def peers_draws(shape: dict[str, Any], count: int) -> torch.Tensor:
    """Draws of diffusers' training scripts, of torch's beta distribution, or by CosMap's own density."""
    torch.manual_seed(0)
    if shape["timesteps"] == "beta":
        return torch.distributions.Beta(shape["beta_alpha"], shape["beta_beta"]).sample((count,))
    if shape["timesteps"] == "cosmap":  # Esser et al. 2024, eq. 21, as weights of a grid, as OneTrainer draws it
        t = (torch.arange(20000) + 0.5) / 20000
        return t[torch.multinomial(2 / (math.pi - 2 * math.pi * t + 2 * math.pi * t**2), count, replacement=True)]
    more = (shape.get("logit_mean"), shape.get("logit_std"), shape.get("mode_scale"))
    return compute_density_for_timestep_sampling(shape["timesteps"], count, *more)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_matching_draws_as_the_peers(shape: dict[str, Any], shift: float) -> None:
    drawn = FlowMatching(FLOW, settings.Objective(**shape, shift=shift)).sample_t(generators(8000), 1024)
    theirs = peers_draws(shape, 200_000)
    theirs = shift * theirs / (1 + (shift - 1) * theirs)
    assert drawn.dtype == torch.float32 and 0 <= drawn.min() and drawn.max() <= 1
    torch.testing.assert_close(drawn.quantile(LEVELS), theirs.quantile(LEVELS), atol=0.025, rtol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_diffusion_model_draws_integers_of_the_same_density(shape: dict[str, Any]) -> None:
    drawn = Diffusion(SD, settings.Objective(**shape)).sample_t(generators(8000), 64)
    assert drawn.dtype == torch.int64 and 0 <= drawn.min() and drawn.max() <= 999
    theirs = peers_draws(shape, 200_000)
    torch.testing.assert_close((drawn / 1000).quantile(LEVELS), theirs.quantile(LEVELS), atol=0.025, rtol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_range_of_noise_cuts_the_density_off(shape: dict[str, Any]) -> None:
    theirs = peers_draws(shape, 400_000)
    kept = theirs[(theirs >= 0.3) & (theirs < 0.7)]
    section = settings.Objective(**shape, shift=1.0, t_min=0.3, t_max=0.7)
    flow, diffusion = FlowMatching(FLOW, section), Diffusion(SD, section)
    for drawn in (flow.sample_t(generators(6000), 64), diffusion.sample_t(generators(6000), 64) / 1000):
        assert 0.3 <= drawn.min() and drawn.max() <= 0.7
        torch.testing.assert_close(drawn.quantile(LEVELS), kept.quantile(LEVELS), atol=0.015, rtol=0)


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (0.6, 2.0), (2.0, 2.0), (7.0, 1.0), (100.0, 60.0)])
def test_the_table_of_a_beta_distribution_against_mpmath(alpha: float, beta: float) -> None:
    density = densities.make_beta(alpha, beta)
    for t in (0.001, 0.1, 0.37, 0.5, 0.63, 0.9, 0.999):
        wanted = float(mpmath.betainc(alpha, beta, 0, t, regularized=True))
        assert density.cdf(torch.tensor([t], dtype=torch.float64)).item() == pytest.approx(wanted, abs=2e-6)


@pytest.mark.parametrize("shape", [{"timesteps": "uniform"}, *SHAPES], ids=str)
def test_cdf_and_quantile_are_inverse(shape: dict[str, Any]) -> None:
    density = densities.make(settings.Objective(**shape), auto="uniform")
    t = torch.linspace(0.01, 0.99, 99, dtype=torch.float64)
    torch.testing.assert_close(density.quantile(density.cdf(t)), t, atol=1e-6, rtol=0)
    ends = density.quantile(torch.tensor([0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(ends, torch.tensor([0.0, 1.0], dtype=torch.float64), atol=2e-5, rtol=0)


@pytest.mark.parametrize("Objective", [Diffusion, FlowMatching])
def test_even_timesteps_have_the_density_and_hardly_vary(Objective: Any) -> None:
    """Of 64 in a row each quarter of the density gets 16 and at most one more or less; by chance 16 +- 7."""
    section = settings.Objective(timesteps="logit_normal", shift=1.0, even_timesteps=True)
    objective = Objective(SD if Objective is Diffusion else FLOW, section)
    scale = 1000 if Objective is Diffusion else 1
    for start in range(0, 960, 64):
        places = [(0.123 + n * (math.sqrt(5) - 1) / 2) % 1 for n in range(start, start + 64)]
        t = objective.sample_t(generators(64), 64, places) / scale
        quarters = torch.special.ndtr(torch.logit(t.double().clamp(1e-6, 1 - 1e-6))) * 4
        counts = torch.bincount(quarters.floor().long().clamp(0, 3), minlength=4)
        assert counts.min() >= 15 and counts.max() <= 17


def test_the_command_draws_the_density(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the density's own distribution function, with the shift."""
    miniatures.save("flux", tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    config = "name = 'x'\n[model]\nfamily = 'flux'\npath = 'base'\n[[dataset.folders]]\npath = '.'\n[objective]\n"
    config += "timesteps = 'logit_normal'\nlogit_mean = 0.4\nlogit_std = 0.8\nshift = 2.5\n"
    Path("job.toml").write_text(config, encoding="utf-8")

    def ask(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["lora-fp8", "timesteps", "job.toml", *arguments])
        cli.main()
        return capsys.readouterr().out

    rows = json.loads(ask("--json"))["rows"]
    ends = torch.linspace(0, 1, 11, dtype=torch.float64)
    below = torch.special.ndtr((torch.logit(ends / (2.5 - 1.5 * ends)) - 0.4) / 0.8)
    torch.testing.assert_close(torch.tensor(rows[0]["shares"]).double(), below.diff(), atol=1e-3, rtol=0)
    assert len(rows) == 7 and all(sum(row["shares"]) == pytest.approx(1) for row in rows)
    bars = {line[:11].strip(): line.count("#") for line in ask().splitlines() if " - " in line}
    assert len(bars) == 10 and max(bars, key=bars.__getitem__) == f"{below.diff().argmax() / 10:.1f} - 0.9"
    assert max(bars.values()) == 40


def test_bands_of_integers_are_even() -> None:
    assert timesteps.measure(Diffusion(SD, settings.Objective()), 64) == pytest.approx((0.1,) * 10)


def weigh(config: dict[str, Any], t: int, **section: Any) -> float:
    objective = Diffusion(config, settings.Objective(**section))
    return objective.compute_weight(torch.tensor([t])).item()


@pytest.mark.parametrize("t", [0, 10, 300, 700, 999])
def test_weights_are_those_of_the_papers_on_the_error_of_x0(t: int) -> None:
    abar = Diffusion(SD, settings.Objective()).scheduler.alphas_cumprod[t].item()
    snr, gamma = abar / (1 - abar), 5.0
    of_x0 = {"min_snr": min(snr, gamma), "soft_min_snr": 1 / (1 / snr + 1 / gamma), "debiased": math.sqrt(snr)}
    for kind, weight in of_x0.items():
        ours = {"weighting": kind, "min_snr_gamma": gamma if kind != "debiased" else 0.0}
        assert weigh(SD, t, **ours) == pytest.approx(weight / snr, rel=1e-4)
        assert weigh(V, t, **ours) == pytest.approx(weight / (snr + 1), rel=1e-4)
    assert weigh(SD, t, weighting="soft_min_snr") == 1.0  # no gamma, no weight


def test_no_weight_is_infinite_where_no_signal_is_left() -> None:
    for kind in ("min_snr", "soft_min_snr", "debiased"):
        assert math.isfinite(weigh({**ZERO, "prediction_type": "v_prediction"}, 999, weighting=kind, min_snr_gamma=5.0))
    assert weigh(ZERO, 999, weighting="soft_min_snr", min_snr_gamma=5.0) == 1.0
    with pytest.raises(UserError, match="objective.weighting = 'debiased'"):
        weigh(ZERO, 999, weighting="debiased")
    with pytest.raises(UserError, match="objective.zero_terminal_snr"):
        weigh(SD, 0, zero_terminal_snr=True)


def test_pyramid_noise_is_sd_scripts() -> None:
    """Its rule (custom_train_functions.pyramid_noise_like), with each image's own draws and deviation."""
    objective = Diffusion(SD, settings.Objective(pyramid_noise=6, pyramid_discount=0.8))
    noise = torch.stack([torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(100 + i)) for i in range(3)])
    shaped = objective.shape_noise(noise, generators(3))
    for image, generator, mine in zip(noise, generators(3), shaped, strict=True):
        upsample = torch.nn.Upsample(size=(24, 16), mode="bilinear")
        wanted = image.clone()
        for i in range(6):
            r = torch.rand((), generator=generator).item() * 2 + 2
            h, w = max(1, int(24 / r**i)), max(1, int(16 / r**i))
            wanted += upsample(torch.randn(1, 4, h, w, generator=generator))[0] * 0.8**i
            if h == 1 or w == 1:
                break
        torch.testing.assert_close(mine, wanted / wanted.std())
    # Neighbours are alike now, and were not.
    assert _correlation(noise) == pytest.approx(0, abs=0.05) and _correlation(shaped) > 0.1


def _correlation(images: torch.Tensor) -> float:
    left, right = images[..., :-1].flatten().numpy(), images[..., 1:].flatten().numpy()
    return float(np.corrcoef(left, right)[0, 1])


def test_input_noise_is_seen_and_not_asked_for() -> None:
    objective = Diffusion(SD, settings.Objective(input_noise=0.1))
    noise = torch.zeros(4000, 2, 2, 2)
    assert objective.shape_noise(noise, generators(4000)) is noise  # the target keeps it
    more = objective.perturb_noise(noise, generators(4000))
    assert more.std().item() == pytest.approx(0.1, rel=0.03) and more.mean().item() == pytest.approx(0, abs=0.002)
    assert Diffusion(SD, settings.Objective()).perturb_noise(noise, generators(4000)) is noise


def test_a_samples_noise_is_its_own_whatever_the_batch() -> None:
    section = settings.Objective(noise_offset=0.1, pyramid_noise=4, input_noise=0.2, timesteps="mode")
    objective = Diffusion(SD, section)

    def drawn(images: torch.Tensor, chosen: list[torch.Generator]) -> Iterator[torch.Tensor]:
        yield objective.sample_t(chosen, 64)
        shaped = objective.shape_noise(images, chosen)
        yield shaped
        yield objective.perturb_noise(shaped, chosen)

    noise = torch.stack([torch.randn(4, 8, 8, generator=torch.Generator().manual_seed(50 + i)) for i in range(3)])
    for together, alone in zip(drawn(noise, generators(3)), drawn(noise[2:], generators(3)[2:]), strict=True):
        assert torch.equal(together[2:], alone)


def test_a_step_compares_with_the_noise_that_is_not_perturbed(job: Callable[..., settings.Job]) -> None:
    """Of a real batch: the target is the shaped noise, and what the denoiser sees is made with more."""
    mine = job("objective.input_noise=0.3", "objective.noise_offset=0.1", "model.dtype=fp32", "quantize.storage=none")
    session = Session(planning.make(mine), UnwrittenRun(None), processes.Processes())
    data = cache.cache(session)
    one, same = (data.loader.take_batch(0, 0) for _ in range(2))
    assert one is not None and same is not None
    loaded = load.load(session)
    objective = loaded.objective
    noised = add_noise(session.family, loaded.denoiser, objective, one, 1.0)
    t_B = objective.sample_t(same.t_generators, 64)
    shaped = objective.shape_noise(same.noise_BCHW, same.t_generators)
    assert torch.equal(noised.t_B, t_B) and torch.equal(noised.target_BCHW, shaped)
    plain = objective.add_noise(same.latents_BCHW, shaped, t_B)
    share = (1 - objective.scheduler.alphas_cumprod[t_B]).sqrt().view(-1, 1, 1, 1)
    assert ((noised.noisy_BCHW - plain) / share).std().item() == pytest.approx(0.3, rel=0.15)
