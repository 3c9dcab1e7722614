"""What the denoiser is asked to predict: the noising process, its target and its weight.

Two processes are enough for today's models:

Diffusion      x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise        t is an integer, 0 (clean) .. T-1 (noise)
               target: noise (epsilon; Ho et al. 2020, eq. 14) or v = sqrt(abar_t) noise - sqrt(1 - abar_t) x_0
               (Salimans & Ho 2022, sect. 4). The numbers abar_t are those of diffusers' own DDPMScheduler, built from
               the scheduler config that came with the model, so that training and sampling cannot disagree about them.
FlowMatching   x_t = (1 - t) x_0 + t noise                            t (= sigma) is a float, 0 (clean) .. 1 (noise)
               target: noise - x_0, the constant velocity of that line (Liu et al. 2022; Lipman et al. 2023). t is drawn
               from the logit-normal density and pushed towards noise by the resolution-dependent shift of Esser et al.
               2024 (sect. 3.1 and 5.3.2), as diffusers' FlowMatchEulerDiscreteScheduler does when it samples. Its
               shift_terminal (0.02 in Qwen-Image), which stretches the steps of one drawing so that the last is at that
               sigma, has no part here: training draws t from all of (0, 1).

An objective is built from `Objective(scheduler_config, section)` and holds no state that changes. Everything random
comes from the generators it is given, one per sample and on the CPU: the t of an image then depends on that image's
generator only, never on its place in the batch, on the batch size, or on the number of processes.

Shape suffixes: B batch, C channels, H height, W width (of the latents; those of clips have frames before H).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from diffusers import DDPMScheduler
from torch import Tensor

from lora_fp8 import config
from lora_fp8.config import UserError


class Objective(ABC):
    """The common part of every objective. `section` is the job's `[objective]` table.

    Subclasses give `sample_t`, `add_noise`, `target` and `weight`; `loss` is the same for all.
    """

    section: config.Objective

    @abstractmethod
    def __init__(self, scheduler_config: dict[str, Any], section: config.Objective):
        """Built from the pipeline's scheduler config and the job's section."""

    @abstractmethod
    def sample_t(self, generator_per_sample: list[torch.Generator], seq_len: int) -> Tensor:
        """One t per sample, each drawn from that sample's own CPU generator. -> (B,) on the CPU.

        `seq_len` is the number of image tokens the denoiser sees (`family.seq_len`); it moves the shift of flow
        matching.
        """

    @abstractmethod
    def add_noise(self, latents_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """The noised latents x_t, in the latents' dtype (give float32)."""

    def shaped(self, noise_BCHW: Tensor, generator_per_sample: list[torch.Generator]) -> Tensor:
        """The noise that training adds, of plain Gaussian noise; asked after `sample_t`, with the same generators."""
        return noise_BCHW

    @abstractmethod
    def target(self, latents_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """What a perfect denoiser answers at x_t."""

    @abstractmethod
    def weight(self, t_B: Tensor) -> Tensor:
        """The factor of each sample's error. -> (B,) float32, on t's device."""

    @abstractmethod
    def at_level(self, level: float) -> tuple[Tensor, str]:
        """A share of the way from clean (0) to noise (1) as t (1,), and in words."""

    def loss(
        self,
        pred_BCHW: Tensor,
        target_BCHW: Tensor,
        t_B: Tensor,
        mask_BHW: Tensor | None = None,
        *,
        kind: str | None = None,
    ) -> Tensor:
        """Weighted mean error of each sample over C, H and W, computed in float32. -> (B,)

        `kind` is the error of each value, by default `objective.loss`: "mse" its square; "huber" twice torch's
        huber_loss, and "smooth_l1" twice its smooth_l1_loss, so that the first is the square below the delta, and
        the second grows as 2 |e| above it (Huber 1964; the factor is that of kohya's and diffusers' scripts).
        "pseudo_huber" is 2 d (sqrt(e^2 + d^2) - d), and "pseudo_smooth_l1" that divided by d: what those scripts
        call huber and smooth_l1 (Charbonnier et al. 1997; sd-scripts, `conditional_loss`). d is `delta`.

        With masks, 0 to 1, an error counts from `unmasked_weight` outside to 1 inside. The mean is over all of the
        picture still: the smaller the part that is trained, the less the sample counts.
        """
        pred_BCHW, target_BCHW, kind = pred_BCHW.float(), target_BCHW.float(), kind or self.section.loss
        errors_BCHW = pred_BCHW - target_BCHW
        if kind == "mse":
            errors_BCHW = errors_BCHW.square()
        else:
            delta_B = self.delta(t_B).to(errors_BCHW)
            errors_BCHW = _robust(errors_BCHW, delta_B.view(-1, *[1] * (errors_BCHW.ndim - 1)), kind)
        if mask_BHW is not None:
            counts_BHW = 1 - (1 - self.section.unmasked_weight) * (1 - mask_BHW)
            batch, *between, height, width = errors_BCHW.shape
            errors_BCHW = errors_BCHW * counts_BHW.view(batch, *[1] * len(between), height, width)
        return errors_BCHW.flatten(1).mean(1) * self.weight(t_B).to(errors_BCHW.device)

    def delta(self, t_B: Tensor) -> Tensor:
        """The error from which a Huber loss counts in proportion, by `huber_schedule` and each sample's noise. -> (B,)

        "exponential" is huber_scale * huber_delta^(share of all noise), "snr" is of diffusion models alone; both as
        sd-scripts has them (`get_huber_threshold_if_needed`).
        """
        delta, schedule = self.section.huber_delta, self.section.huber_schedule
        if schedule == "constant":
            return torch.full(t_B.shape, delta, dtype=torch.float32, device=t_B.device)
        if schedule == "exponential":
            return self.section.huber_scale * delta ** self.share(t_B).float()
        return self._delta_by_snr(t_B)

    def _delta_by_snr(self, t_B: Tensor) -> Tensor:
        raise NotImplementedError("a flow-matching model has no such ratio; rules.py refuses it")

    @abstractmethod
    def share(self, t_B: Tensor) -> Tensor:
        """t as a share of all noise, 0 (clean) to 1. -> (B,)"""

    def unused_settings(self) -> list[str]:
        """One sentence per setting of the section that has no effect here; the trainer warns with them."""
        return []


def _robust(errors: Tensor, delta: Tensor, kind: str) -> Tensor:
    """The losses of `Objective.loss` that grow in proportion for large errors; `delta` broadcasts."""
    size = errors.abs()
    if kind == "huber":
        return torch.where(size < delta, size.square(), delta * (2 * size - delta))
    if kind == "smooth_l1":
        return torch.where(size < delta, size.square() / delta, 2 * size - delta)
    rounded = 2 * (torch.hypot(size, delta) - delta)
    return rounded * delta if kind == "pseudo_huber" else rounded


def _is_flow(scheduler_config: dict[str, Any]) -> bool:
    """Whether this scheduler samples a flow: by its class, or as multistep solvers (DPM++, UniPC) that can do both."""
    get = scheduler_config.get
    multistep = get("use_flow_sigmas", False) or get("prediction_type") == "flow_prediction"
    return "FlowMatch" in str(get("_class_name", "")) or bool(multistep)


def _check_scheduler(scheduler_config: dict[str, Any], *, flow: bool) -> None:
    # A fine-tune can turn one process into another and keep the network; only its scheduler tells.
    name = str(scheduler_config.get("_class_name", ""))
    if name and (_is_flow(scheduler_config) != flow or name.startswith("EDM")):
        kind = "flow matching" if flow else "diffusion (epsilon or v)"
        raise UserError(f"the model's scheduler is {name}, but this architecture is trained with {kind} here")


class Diffusion(Objective):
    """DDPM noising with an epsilon or v target; optional min-SNR weighting (Hang et al. 2023)."""

    def __init__(self, scheduler_config: dict[str, Any], section: config.Objective):
        self.section = section
        _check_scheduler(scheduler_config, flow=False)
        # Only what describes the noising process is taken over: the rest of a config belongs to the sampler that wrote
        # it (PNDM, Euler, DPM++ ...) and DDPM would rightly complain about it.
        known = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type")
        taken = {k: scheduler_config[k] for k in (*known, "rescale_betas_zero_snr") if k in scheduler_config}
        self.scheduler = DDPMScheduler.from_config({**taken, "clip_sample": False})
        self.prediction_type: str = self.scheduler.config.prediction_type
        if self.prediction_type not in ("epsilon", "v_prediction"):
            raise UserError(
                f"the model's scheduler_config.json says prediction_type = {self.prediction_type!r}; "
                "this trainer knows 'epsilon' and 'v_prediction'"
            )
        self.num_timesteps: int = self.scheduler.config.num_train_timesteps

    def sample_t(self, generator_per_sample: list[torch.Generator], seq_len: int) -> Tensor:
        """Uniform integers in [0, T), or in the part of it that t_min and t_max name. -> (B,) int64"""
        low = math.floor(self.section.t_min * self.num_timesteps)
        high = max(math.ceil(self.section.t_max * self.num_timesteps), low + 1)
        draws = [torch.randint(low, high, (1,), generator=g) for g in generator_per_sample]
        return torch.cat(draws)

    def shaped(self, noise_BCHW: Tensor, generator_per_sample: list[torch.Generator]) -> Tensor:
        """With noise_offset: plus one number for each channel of a sample, normal with that deviation (Guttenberg
        2023, "Diffusion with offset noise")."""
        if not self.section.noise_offset:
            return noise_BCHW
        shape = (noise_BCHW.shape[1], *[1] * (noise_BCHW.ndim - 2))
        offset_BC11 = torch.stack([torch.randn(shape, generator=g) for g in generator_per_sample]).to(noise_BCHW)
        return noise_BCHW + self.section.noise_offset * offset_BC11

    def at_level(self, level: float) -> tuple[Tensor, str]:
        step = round(level * (self.num_timesteps - 1))
        return torch.tensor([step]), f"t = {step} of {self.num_timesteps}"

    def add_noise(self, latents_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        return self.scheduler.add_noise(latents_BCHW, noise_BCHW, t_B.to(latents_BCHW.device))

    def target(self, latents_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        if self.prediction_type == "v_prediction":
            return self.scheduler.get_velocity(latents_BCHW, noise_BCHW, t_B.to(latents_BCHW.device))
        return noise_BCHW

    def share(self, t_B: Tensor) -> Tensor:
        return t_B / self.num_timesteps

    def _delta_by_snr(self, t_B: Tensor) -> Tensor:
        """(1 - huber_delta) / (1 + sigma)^2 + huber_delta, where sigma^2 = 1 / SNR."""
        delta = self.section.huber_delta
        return (1 - delta) / (1 + self.snr(t_B).rsqrt()).square() + delta

    def snr(self, t_B: Tensor) -> Tensor:
        """Signal-to-noise ratio abar_t / (1 - abar_t). -> (B,) float32"""
        abar = self.scheduler.alphas_cumprod.to(device=t_B.device, dtype=torch.float32)[t_B]
        return abar / (1 - abar)

    def weight(self, t_B: Tensor) -> Tensor:
        """1, or the min-SNR-gamma weight: min(SNR, gamma) / SNR for epsilon, min(SNR, gamma) / (SNR + 1) for v.

        Both are the same weight min(SNR, gamma) on the error of x_0 (Hang et al. 2023, sect. 3.4).
        """
        gamma = self.section.min_snr_gamma
        if not gamma:
            return torch.ones(t_B.shape, dtype=torch.float32, device=t_B.device)
        snr = self.snr(t_B)
        if self.prediction_type == "v_prediction":
            return snr.clamp(max=gamma) / (snr + 1)
        # Written so that SNR = 0 (zero-terminal-SNR schedules) gives 1 and not 0/0.
        return (gamma / snr).clamp(max=1.0)

    def unused_settings(self) -> list[str]:
        unused = []
        if self.section.timesteps not in ("auto", "uniform"):
            unused.append(
                f"objective.timesteps = {self.section.timesteps!r} has no effect: "
                "a diffusion model draws its timesteps uniformly"
            )
        if self.section.shift != "auto":
            unused.append(f"objective.shift = {self.section.shift} has no effect: only flow-matching models shift t")
        return unused


class FlowMatching(Objective):
    """Rectified flow: a straight line from data to noise, and the shift that moves training towards the noisy end.

    A model that was trained with another density is a subclass, with its own `deviation` and `model_shift`.
    """

    deviation: ClassVar[float] = 1.0
    """Scale of the logit-normal density that objective.timesteps = "auto" draws from."""

    def __init__(self, scheduler_config: dict[str, Any], section: config.Objective):
        self.section = section
        _check_scheduler(scheduler_config, flow=True)
        get = scheduler_config.get
        # Defaults are those of diffusers' FlowMatchEulerDiscreteScheduler and FluxPipeline.
        self.fixed_shift: float = get("flow_shift", get("shift", 1.0))  # multistep solvers call it flow_shift
        self.dynamic: bool = get("use_dynamic_shifting", False)
        self.time_shift_type: str = get("time_shift_type", "exponential")
        self.seq_lens: tuple[int, int] = (get("base_image_seq_len", 256), get("max_image_seq_len", 4096))
        self.mus: tuple[float, float] = (get("base_shift", 0.5), get("max_shift", 1.15))
        self.num_timesteps: int = get("num_train_timesteps", 1000)

    def mu(self, seq_len: int) -> float:
        """The resolution-dependent shift parameter: a line from (base length, shift) to (max length, shift)."""
        (short, long), (low, high) = self.seq_lens, self.mus
        return low + (high - low) * (seq_len - short) / (long - short)

    def shift(self, seq_len: int) -> float:
        """The factor s in t -> s t / (1 + (s - 1) t). The setting, if it is a number."""
        return self.model_shift(seq_len) if self.section.shift == "auto" else float(self.section.shift)

    def model_shift(self, seq_len: int) -> float:
        """The factor that the model's scheduler has at this resolution.

        diffusers' "exponential" shift e^mu / (e^mu + (1/t - 1)) is this with s = e^mu, its "linear" one with s = mu.
        """
        if not self.dynamic:
            return self.fixed_shift
        mu = self.mu(seq_len)
        return math.exp(mu) if self.time_shift_type == "exponential" else mu

    def warp(self, t_B: Tensor, seq_len: int) -> Tensor:
        """Move t towards 1 by the shift, as the sampler's schedule is moved (Esser et al. 2024, eq. 23)."""
        s = self.shift(seq_len)
        return s * t_B / (1 + (s - 1) * t_B)

    def sample_t(self, generator_per_sample: list[torch.Generator], seq_len: int) -> Tensor:
        """Logit-normal (location 0, scale 1 or the model's own) or uniform, then shifted. -> (B,) float32 in (0, 1)

        With t_min or t_max: the same density, cut off there; t is as the sampler counts it, after the shift.
        """
        if (self.section.t_min, self.section.t_max) != (0.0, 1.0):
            return self._sample_between(generator_per_sample, seq_len)
        if self.section.timesteps == "uniform":
            t_B = torch.cat([torch.rand(1, generator=g) for g in generator_per_sample])
        else:
            normal_B = torch.cat([torch.randn(1, generator=g) for g in generator_per_sample])
            t_B = (self._scale() * normal_B).sigmoid()
        return self.warp(t_B, seq_len)

    def _scale(self) -> float:
        return self.deviation if self.section.timesteps == "auto" else 1.0

    def _sample_between(self, generator_per_sample: list[torch.Generator], seq_len: int) -> Tensor:
        """By the inverse of the distribution function, in float64: every draw counts, none is thrown away."""
        ends = torch.tensor([self.section.t_min, self.section.t_max], dtype=torch.float64)
        s, uniform = self.shift(seq_len), self.section.timesteps == "uniform"
        unshifted = ends / (s - (s - 1) * ends)
        low, high = unshifted if uniform else torch.special.ndtr(unshifted.logit() / self._scale())
        u_B = torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generator_per_sample])
        quantile_B = low + (high - low) * u_B
        t_B = quantile_B if uniform else (self._scale() * torch.special.ndtri(quantile_B)).sigmoid()
        return self.warp(t_B, seq_len).clamp(*ends.tolist()).float()

    def at_level(self, level: float) -> tuple[Tensor, str]:
        return torch.tensor([level]), f"t = {level:g}"

    def share(self, t_B: Tensor) -> Tensor:
        return t_B

    def add_noise(self, latents_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        t_B111 = t_B.to(latents_BCHW).view(-1, *[1] * (latents_BCHW.ndim - 1))
        return (1 - t_B111) * latents_BCHW + t_B111 * noise_BCHW

    def target(self, latents_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        return noise_BCHW - latents_BCHW

    def weight(self, t_B: Tensor) -> Tensor:
        """1: the logit-normal density already weighs the middle of the line (Esser et al. 2024, sect. 3.1)."""
        return torch.ones(t_B.shape, dtype=torch.float32, device=t_B.device)

    def unused_settings(self) -> list[str]:
        given = [("min_snr_gamma", "has no such weight"), ("noise_offset", "is trained on plain noise")]
        return [
            f"objective.{key} = {getattr(self.section, key)} has no effect: a flow-matching model {why}"
            for key, why in given
            if getattr(self.section, key)
        ]
