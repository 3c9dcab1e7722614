"""Objectives against diffusers' schedulers: a sampler step with the true target walks back along the noising path."""

import math

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift

from lora_fp8 import settings
from lora_fp8.errors import UserError
from lora_fp8.objectives import Diffusion, FlowMatching

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
FLUX = {"use_dynamic_shifting": True, "shift": 3.0, "base_shift": 0.5, "max_shift": 1.15}
SD3 = {"shift": 3.0}


def pair(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, 8, 12, generator=generator), torch.randn(2, 4, 8, 12, generator=generator)


def generators(num: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(num)]


def test_alphas_are_those_of_the_papers_schedule():
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    abar = torch.cumprod(1 - betas, 0)
    objective = Diffusion(SD, settings.Objective())
    x0, noise = pair()
    t = torch.tensor([3, 871])
    expected = abar[t].sqrt().view(-1, 1, 1, 1) * x0 + (1 - abar[t]).sqrt().view(-1, 1, 1, 1) * noise
    torch.testing.assert_close(objective.add_noise(x0, noise, t), expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_a_ddim_step_with_the_true_target_stays_on_the_noising_path(prediction_type):
    objective = Diffusion({**SD, "prediction_type": prediction_type}, settings.Objective())
    sampler = DDIMScheduler(**SD, prediction_type=prediction_type, clip_sample=False, timestep_spacing="trailing")
    sampler.set_timesteps(20)
    x0, noise = pair()
    for t, before in [(999, 949), (499, 449), (99, 49)]:
        t_B, before_B = torch.full((2,), t), torch.full((2,), before)
        x_t = objective.add_noise(x0, noise, t_B)
        stepped = sampler.step(objective.compute_target(x0, noise, t_B), t, x_t).prev_sample
        torch.testing.assert_close(stepped, objective.add_noise(x0, noise, before_B), rtol=1e-4, atol=1e-4)


def test_schedulers_of_other_samplers_give_the_same_noise():
    # A model's scheduler_config.json is written for its sampler; extra keys must neither fail nor change the process.
    other = {**SD, "_class_name": "PNDMScheduler", "skip_prk_steps": True, "steps_offset": 1, "set_alpha_to_one": False}
    plain, odd = Diffusion(SD, settings.Objective()), Diffusion(other, settings.Objective())
    assert torch.equal(plain.scheduler.alphas_cumprod, odd.scheduler.alphas_cumprod)


def test_a_prediction_type_that_is_not_known_is_refused():
    with pytest.raises(UserError, match="prediction_type = 'sample'"):
        Diffusion({**SD, "prediction_type": "sample"}, settings.Objective())


@pytest.mark.parametrize(
    ("Objective", "name"),
    [
        (Diffusion, "FlowMatchEulerDiscreteScheduler"),
        (Diffusion, "EDMEulerScheduler"),
        (FlowMatching, "EulerDiscreteScheduler"),
    ],
)
def test_a_scheduler_of_another_process_is_refused(Objective, name):
    with pytest.raises(UserError, match=name):
        Objective({"_class_name": name}, settings.Objective())


def test_diffusion_timesteps_are_uniform_integers():
    t_B = Diffusion(SD, settings.Objective()).sample_t(generators(4000), seq_len=64)
    assert t_B.dtype == torch.int64 and t_B.shape == (4000,)
    assert 0 <= t_B.min() <= 3 and 996 <= t_B.max() <= 999
    share = torch.histc(t_B.float(), 4, 0, 1000) / 4000
    torch.testing.assert_close(share, torch.full((4,), 0.25), atol=0.03, rtol=0)


@pytest.mark.parametrize("objective", [Diffusion(SD, settings.Objective()), FlowMatching(FLUX, settings.Objective())])
def test_t_belongs_to_the_sample_and_not_to_its_place_in_the_batch(objective):
    t_B = objective.sample_t(generators(4), seq_len=96)
    backwards = objective.sample_t(generators(4)[::-1], seq_len=96)
    assert torch.equal(t_B, backwards.flip(0))
    assert len(t_B.unique()) == 4
    # One draw per sample: what a generator gives next must not depend on the batch either.
    one, another = generators(1)[0], generators(1)[0]
    objective.sample_t([one], seq_len=96)
    objective.sample_t([another, *generators(3)], seq_len=96)
    assert torch.equal(torch.randn(3, generator=one), torch.randn(3, generator=another))


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_min_snr_weighs_the_error_of_x0_with_the_clamped_snr(prediction_type):
    """Hang et al. 2023: whatever is predicted, the loss equals min(SNR, gamma) times the squared error of x_0."""
    section = settings.Objective(min_snr_gamma=5.0)
    objective = Diffusion({**SD, "prediction_type": prediction_type}, section)
    x0, noise = pair()
    guess_x0 = x0 + 0.1 * pair(1)[0]
    for t in (10, 400, 990):
        t_B = torch.full((2,), t)
        abar = objective.scheduler.alphas_cumprod[t].double()
        a, s = abar.sqrt(), (1 - abar).sqrt()
        x_t = a * x0.double() + s * noise.double()
        guess_noise = (x_t - a * guess_x0.double()) / s
        guess = guess_noise if prediction_type == "epsilon" else a * guess_noise - s * guess_x0.double()
        loss_B = objective.compute_loss(guess, objective.compute_target(x0.double(), noise.double(), t_B), t_B)
        expected = torch.clamp(abar / (1 - abar), max=5.0) * (guess_x0 - x0).double().square().mean((1, 2, 3))
        torch.testing.assert_close(loss_B.double(), expected, rtol=2e-3, atol=1e-7)


def test_min_snr_is_finite_where_no_signal_is_left():
    objective = Diffusion({**SD, "rescale_betas_zero_snr": True}, settings.Objective(min_snr_gamma=5.0))
    assert objective.compute_snr(torch.tensor([999])) < 1e-6
    assert objective.compute_weight(torch.tensor([999, 998])).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("config_", [FLUX, SD3])
def test_an_euler_step_with_the_true_target_stays_on_the_line(config_):
    objective = FlowMatching(config_, settings.Objective())
    sampler = FlowMatchEulerDiscreteScheduler.from_config(config_)
    sampler.set_timesteps(8, mu=0.7)
    x0, noise = pair()
    for i in (0, 3, 7):
        here, there = (sigma.expand(2) for sigma in sampler.sigmas[i : i + 2])
        x_t = objective.add_noise(x0, noise, here)
        expected = sampler.scale_noise(x0, sampler.timesteps[i].expand(2), noise)
        sampler._step_index = i
        stepped = sampler.step(objective.compute_target(x0, noise, here), sampler.timesteps[i], x_t).prev_sample
        torch.testing.assert_close(stepped, objective.add_noise(x0, noise, there), rtol=1e-5, atol=1e-5)
        sampler._step_index = None
        torch.testing.assert_close(x_t, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("time_shift_type", ["exponential", "linear"])
@pytest.mark.parametrize("seq_len", [96, 256, 1024, 4096])
def test_the_dynamic_shift_is_the_samplers(seq_len, time_shift_type):
    scheduler_config = {**FLUX, "time_shift_type": time_shift_type, "base_shift": 0.6, "max_shift": 1.3}
    sampler = FlowMatchEulerDiscreteScheduler.from_config(scheduler_config)
    objective = FlowMatching(scheduler_config, settings.Objective())
    mu = calculate_shift(seq_len, 256, 4096, 0.6, 1.3)
    assert objective.compute_mu(seq_len) == pytest.approx(mu)
    plain = torch.linspace(1.0, 0.1, 10)
    sampler.set_timesteps(sigmas=plain.tolist(), mu=mu)
    torch.testing.assert_close(objective.warp(plain, seq_len), sampler.sigmas[:-1])


def test_the_fixed_shift_is_the_samplers_and_a_number_overrides_it():
    plain = torch.linspace(1.0, 0.1, 10)
    sampler = FlowMatchEulerDiscreteScheduler.from_config(SD3)
    sampler.set_timesteps(sigmas=plain.tolist())
    torch.testing.assert_close(FlowMatching(SD3, settings.Objective()).warp(plain, 1024), sampler.sigmas[:-1])
    for scheduler_config in (FLUX, SD3):
        by_hand = FlowMatching(scheduler_config, settings.Objective(shift=2.0))
        torch.testing.assert_close(by_hand.warp(plain, 1024), 2 * plain / (1 + plain))


def test_flow_timesteps_follow_their_density():
    count, plain = 4000, {"shift": 1.0}
    t_B = FlowMatching(plain, settings.Objective()).sample_t(generators(count), seq_len=1024)
    assert t_B.shape == (count,) and 0 < t_B.min() and t_B.max() < 1
    logits = t_B.logit()
    assert abs(logits.mean()) < 0.06 and abs(logits.std() - 1) < 0.05  # logit-normal(0, 1)
    uniform_B = FlowMatching(plain, settings.Objective(timesteps="uniform")).sample_t(generators(count), seq_len=1024)
    share = torch.histc(uniform_B, 4, 0, 1) / count
    torch.testing.assert_close(share, torch.full((4,), 0.25), atol=0.03, rtol=0)
    # The shift moves the median from 1/2 to s / (1 + s).
    s = math.exp(FlowMatching(FLUX, settings.Objective()).compute_mu(1024))
    shifted_B = FlowMatching(FLUX, settings.Objective()).sample_t(generators(count), seq_len=1024)
    assert shifted_B.median().item() == pytest.approx(s / (1 + s), abs=0.02)


@pytest.mark.parametrize("objective", [Diffusion(SD, settings.Objective()), FlowMatching(FLUX, settings.Objective())])
def test_the_loss_is_one_float32_mean_per_sample(objective):
    pred, target = (x.bfloat16() for x in pair())
    t_B = objective.sample_t(generators(2), seq_len=96)
    loss_B = objective.compute_loss(pred, target, t_B)
    expected = torch.stack(
        [torch.nn.functional.mse_loss(p.float(), t.float()) for p, t in zip(pred, target, strict=True)]
    )
    assert loss_B.dtype == torch.float32
    torch.testing.assert_close(loss_B, expected)
    assert not (pred - target).abs().le(0.7).all()  # both sides of the delta
    pred.requires_grad_(True)
    mask = torch.rand(2, *pred.shape[2:], generator=torch.Generator().manual_seed(1))
    judges = {
        "huber": lambda p, t: torch.nn.functional.huber_loss(p, t, reduction="none", delta=0.7),
        "smooth_l1": lambda p, t: torch.nn.functional.smooth_l1_loss(p, t, reduction="none", beta=0.7),
    }
    for kind, judge in judges.items():
        section = settings.Objective(loss=kind, huber_delta=0.7, min_snr_gamma=1.0, unmasked_weight=0.25)
        ours = type(objective)(SD if isinstance(objective, Diffusion) else FLUX, section)
        counts = 0.25 + 0.75 * mask[:, None]
        wanted = (2 * judge(pred.float(), target.float()) * counts).flatten(1).mean(1) * ours.compute_weight(t_B)
        torch.testing.assert_close(ours.compute_loss(pred, target, t_B, mask), wanted)
        near = target + 1e-3 * torch.sign(pred.detach() - target).float()  # below the delta: the square, for huber
        scale = 1.0 if kind == "huber" else 1 / 0.7
        small = ours.compute_loss(near, target, t_B) / (
            objective.compute_loss(near, target, t_B) * ours.compute_weight(t_B)
        )
        torch.testing.assert_close(small, torch.full_like(small, scale), rtol=1e-3, atol=0)


@pytest.mark.parametrize("schedule", ["constant", "exponential", "snr"])
def test_the_huber_schedules_are_those_of_sd_scripts(schedule: str) -> None:
    """Each sample by itself, in plain numbers, with the alphas of diffusers' DDIM scheduler."""
    abar, c, scale = DDIMScheduler(**SD).alphas_cumprod.tolist(), 0.2, 1.5
    pred, target = pair()
    t_B = torch.tensor([37, 871])
    for kind, torchs in (("huber", "huber_loss"), ("smooth_l1", "smooth_l1_loss"), ("pseudo_huber", ""),
                         ("pseudo_smooth_l1", "")):  # fmt: skip
        section = settings.Objective(loss=kind, huber_delta=c, huber_schedule=schedule, huber_scale=scale)
        loss_B = Diffusion(SD, section).compute_loss(pred, target, t_B)
        for i, t in enumerate(t_B.tolist()):
            sigma = math.sqrt((1 - abar[t]) / abar[t])
            d = {"constant": c, "exponential": scale * math.exp(math.log(c) * t / 1000)}.get(
                schedule, (1 - c) / (1 + sigma) ** 2 + c
            )
            error = (pred[i] - target[i]).double()
            if torchs:
                judge = getattr(torch.nn.functional, torchs)
                wanted = 2 * judge(error, torch.zeros_like(error), **{"delta" if kind == "huber" else "beta": d})
            else:
                wanted = 2 * ((error**2 + d**2).sqrt() - d).mean() * (d if kind == "pseudo_huber" else 1)
            assert loss_B[i].item() == pytest.approx(wanted.item(), rel=1e-5)


def test_a_flow_has_the_exponential_huber_schedule_by_its_own_time() -> None:
    section = settings.Objective(loss="pseudo_huber", huber_delta=0.2, huber_schedule="exponential")
    delta_B = FlowMatching(FLUX, section).compute_huber_delta(torch.tensor([0.0, 0.5, 1.0]))
    torch.testing.assert_close(delta_B, torch.tensor([1.0, 0.2**0.5, 0.2]))


def test_the_noise_offset_is_one_normal_number_for_each_channel_of_a_sample():
    _, noise = pair()
    objective = Diffusion(SD, settings.Objective(noise_offset=0.1))
    drawn = generators(2)
    t_B = objective.sample_t(drawn, seq_len=24)
    shaped = objective.shape_noise(noise, drawn)
    offset = (shaped - noise).flatten(2)
    torch.testing.assert_close(offset, offset[:, :, :1].expand_as(offset), atol=1e-6, rtol=0)
    assert len(offset[:, :, 0].unique()) == 8
    # It is part of what is added and of what is asked for, as in the paper's loss.
    latents, _ = pair(1)
    torch.testing.assert_close(objective.compute_target(latents, shaped, t_B), shaped)
    many = objective.shape_noise(torch.zeros(1, 4, 1, 1).expand(4000, 4, 1, 1), generators(4000))
    assert many.std().item() == pytest.approx(0.1, rel=0.03) and many.mean().item() == pytest.approx(0, abs=0.003)
    assert Diffusion(SD, settings.Objective()).shape_noise(noise, generators(2)) is noise


@pytest.mark.parametrize("timesteps", ["uniform", "logit_normal"])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_range_of_noise_is_the_same_density_cut_off(timesteps: str, shift: float) -> None:
    """Against draws of the whole range, thrown away outside of it."""
    scheduler = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    whole = FlowMatching(scheduler, settings.Objective(timesteps=timesteps, shift=shift))
    part = FlowMatching(scheduler, settings.Objective(timesteps=timesteps, shift=shift, t_min=0.4, t_max=0.875))
    generators = [torch.Generator().manual_seed(seed) for seed in range(6000)]
    drawn, kept = part.sample_t(generators, 256), whole.sample_t(generators, 256)
    kept = kept[(kept >= 0.4) & (kept <= 0.875)]
    assert drawn.dtype == torch.float32 and 0.4 <= drawn.min() < 0.41 and 0.86 < drawn.max() <= 0.875
    levels = torch.linspace(0.05, 0.95, 19)
    torch.testing.assert_close(drawn.quantile(levels), kept.quantile(levels), atol=0.02, rtol=0)


def test_a_range_of_noise_of_a_diffusion_model() -> None:
    section = settings.Objective(t_min=0.25, t_max=0.5)
    drawn = Diffusion({"num_train_timesteps": 1000}, section).sample_t(
        [torch.Generator().manual_seed(seed) for seed in range(4000)], 64
    )
    assert drawn.min() == 250 and drawn.max() == 499
    one = Diffusion({"num_train_timesteps": 1000}, settings.Objective(t_min=0.9999, t_max=1.0))
    assert one.sample_t([torch.Generator()], 64).tolist() == [999]
