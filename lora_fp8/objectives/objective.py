"""Training objectives: how noise is added, what the denoiser should predict, and how its errors are weighted.

Two processes cover today's models:

Diffusion      x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) noise        t is an integer, 0 (clean) .. T-1 (noise)
               target: noise (epsilon; Ho et al. 2020, eq. 14) or v = sqrt(abar_t) noise - sqrt(1 - abar_t) x_0
               (Salimans & Ho 2022, sect. 4). abar_t comes from diffusers' own DDPMScheduler, built from the scheduler
               config of the model, so that training and sampling cannot disagree about it.
FlowMatching   x_t = (1 - t) x_0 + t noise                            t (= sigma) is a float, 0 (clean) .. 1 (noise)
               target: noise - x_0, the constant velocity of that line (Liu et al. 2022; Lipman et al. 2023). t is drawn
               from the logit-normal density and moved towards noise by the resolution-dependent shift of Esser et al.
               2024 (sect. 3.1 and 5.3.2), as in diffusers' FlowMatchEulerDiscreteScheduler when it samples. The
               scheduler's shift_terminal (0.02 in Qwen-Image) stretches the sampling steps so that the last is at that
               sigma. It is not used here: training draws t from all of (0, 1).

An objective is created as `Objective(scheduler_config, section)` and holds no state that changes. All randomness comes
from the generators that it is given, one per sample and on the CPU. So an image's t depends on that image's generator
only, never on its place in the batch, the batch size or the number of processes.

Shape suffixes: B batch, C channels, H height, W width (of the latents; those of clips have frames before H).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from diffusers import DDPMScheduler
from torch import Tensor

from .. import settings
from ..errors import Message, UserError
from . import densities

LEAST_AREA = 1e-3
"""Least mean weight of a mask that objective.normalize_mask divides by: a mask of a thousandth of the image."""
PREDICTION_TYPES = {"epsilon": "epsilon", "v": "v_prediction"}
"""`objective.prediction` -> `prediction_type` of diffusers' schedulers."""


class Objective(ABC):
    """The base class of objectives. `section` is the job's `[objective]` table.

    Subclasses implement `sample_t`, `add_noise`, `compute_target` and `compute_weight`; `compute_loss` is the same for
    all.
    """

    section: settings.Objective

    @abstractmethod
    def __init__(self, scheduler_config: dict[str, Any], section: settings.Objective):
        """Create the objective from the model's scheduler config and the job's section."""

    @abstractmethod
    def sample_t(
        self, generator_per_sample: list[torch.Generator], seq_len: int, quantiles: list[float] | None = None
    ) -> Tensor:
        """Draw one timestep per sample, each from that sample's own CPU generator.

        Args:
            generator_per_sample: the generators.
            seq_len: number of image tokens that the denoiser sees (`family.count_image_tokens`); flow matching's shift
                depends on it.
            quantiles: where in the density each sample's timestep lies, for `objective.even_timesteps`, which draws
                nothing.

        Returns:
            t (B,) on the CPU.
        """

    @abstractmethod
    def add_noise(self, latents_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """Return the noisy latents x_t, in the latents' dtype (pass float32)."""

    def shape_noise(self, noise_BCHW: Tensor, generator_per_sample: list[torch.Generator]) -> Tensor:
        """Return the noise that training adds, made from Gaussian noise.

        Call it after `sample_t`, with the same generators.
        """
        return noise_BCHW

    def perturb_noise(self, noise_BCHW: Tensor, generator_per_sample: list[torch.Generator]) -> Tensor:
        """Return the noise that goes into the noisy latents; the target keeps that of `shape_noise`.

        Call it after `shape_noise`, with the same generators.
        """
        return noise_BCHW

    @abstractmethod
    def compute_target(self, latents_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """Return what a perfect denoiser predicts at x_t."""

    @abstractmethod
    def compute_weight(self, t_B: Tensor) -> Tensor:
        """Return the weight of each sample's loss, (B,) float32 on t's device."""

    @abstractmethod
    def convert_level(self, level: float) -> tuple[Tensor, str]:
        """Convert a noise level from 0 (clean) to 1 (noise) to t (1,), and to words."""

    def compute_loss(
        self,
        pred_BCHW: Tensor,
        target_BCHW: Tensor,
        t_B: Tensor,
        mask_BHW: Tensor | None = None,
        *,
        kind: str | None = None,
        unmasked_weight: float | None = None,
    ) -> Tensor:
        """Return the weighted mean error of each sample over C, H and W, (B,) in float32.

        Args:
            pred_BCHW, target_BCHW: prediction and target.
            t_B: timesteps of the samples.
            mask_BHW: weights of the errors from 0 to 1: at 0 an error counts by `unmasked_weight`, at 1 fully. The mean
                is still over the whole image, so a sample counts less the smaller its trained part is, unless
                `objective.normalize_mask` divides by the mean weight.
            kind: the error function, by default `objective.loss`. "mse" is the square. "huber" is twice torch's
                huber_loss and "smooth_l1" twice its smooth_l1_loss, so that "huber" is the square below delta and
                "smooth_l1" grows as 2 |e| above it (Huber 1964; the factor is that of kohya's and diffusers' scripts).
                "pseudo_huber" is 2 d (sqrt(e^2 + d^2) - d), and "pseudo_smooth_l1" is that divided by d; those scripts
                call them huber and smooth_l1 (Charbonnier et al. 1997; sd-scripts, `conditional_loss`). d is the result
                of `compute_huber_delta`.
            unmasked_weight: by default `objective.unmasked_weight`.
        """
        pred_BCHW, target_BCHW, kind = pred_BCHW.float(), target_BCHW.float(), kind or self.section.loss
        errors_BCHW = pred_BCHW - target_BCHW
        if kind == "mse":
            errors_BCHW = errors_BCHW.square()
        else:
            delta_B = self.compute_huber_delta(t_B).to(errors_BCHW)
            errors_BCHW = _compute_robust_loss(errors_BCHW, delta_B.view(-1, *[1] * (errors_BCHW.ndim - 1)), kind)
        if mask_BHW is not None:
            outside = self.section.unmasked_weight if unmasked_weight is None else unmasked_weight
            counts_BHW = 1 - (1 - outside) * (1 - mask_BHW)
            if self.section.normalize_mask:
                counts_BHW = counts_BHW / counts_BHW.mean(dim=(-2, -1), keepdim=True).clamp_min(LEAST_AREA)
            batch, *between, height, width = errors_BCHW.shape
            errors_BCHW = errors_BCHW * counts_BHW.view(batch, *[1] * len(between), height, width)
        return errors_BCHW.flatten(1).mean(1) * self.compute_weight(t_B).to(errors_BCHW.device)

    def compute_huber_delta(self, t_B: Tensor) -> Tensor:
        """Return each sample's delta (B,): errors above it count linearly in a Huber loss.

        It follows `huber_schedule` and the noise level. "exponential" is huber_scale * huber_delta^(noise level); "snr"
        exists for diffusion models only; both as in sd-scripts (`get_huber_threshold_if_needed`).
        """
        delta, schedule = self.section.huber_delta, self.section.huber_schedule
        if schedule == "constant":
            return torch.full(t_B.shape, delta, dtype=torch.float32, device=t_B.device)
        if schedule == "exponential":
            return self.section.huber_scale * delta ** self.compute_noise_level(t_B).float()
        return self._compute_delta_by_snr(t_B)

    def _compute_delta_by_snr(self, t_B: Tensor) -> Tensor:
        raise NotImplementedError("a flow-matching model has no such ratio; config/relations.py refuses it")

    @abstractmethod
    def compute_noise_level(self, t_B: Tensor) -> Tensor:
        """Convert t to a noise level from 0 (clean) to 1 (noise), (B,)."""


def _compute_robust_loss(errors: Tensor, delta: Tensor, kind: str) -> Tensor:
    """Compute the losses of `Objective.compute_loss` that grow linearly for large errors; `delta` broadcasts."""
    size = errors.abs()
    if kind == "huber":
        return torch.where(size < delta, size.square(), delta * (2 * size - delta))
    if kind == "smooth_l1":
        return torch.where(size < delta, size.square() / delta, 2 * size - delta)
    rounded = 2 * (torch.hypot(size, delta) - delta)
    return rounded * delta if kind == "pseudo_huber" else rounded


def _is_flow(scheduler_config: dict[str, Any]) -> bool:
    """Return True if this scheduler samples a flow, by its class or, for DPM++ and UniPC, by its config."""
    get = scheduler_config.get
    multistep = get("use_flow_sigmas", False) or get("prediction_type") == "flow_prediction"
    return "FlowMatch" in str(get("_class_name", "")) or bool(multistep)


def _check_scheduler(scheduler_config: dict[str, Any], *, flow: bool) -> None:
    # A fine-tune can change the process and keep the network; only its scheduler shows it.
    name = str(scheduler_config.get("_class_name", ""))
    if name and (_is_flow(scheduler_config) != flow or name.startswith("EDM")):
        kind = Message("flow matching") if flow else Message("diffusion (epsilon or v)")
        raise UserError(
            Message(
                "the model's scheduler is {name}, but this architecture is trained with {kind}",
                name=name,
                kind=kind,
            )
        )


def _draw_quantiles(generator_per_sample: list[torch.Generator], quantiles: list[float] | None = None) -> Tensor:
    """Return the given quantiles, or draw one of each generator: (B,) float64 in (0, 1)."""
    if quantiles is not None:
        return torch.tensor(quantiles, dtype=torch.float64)
    return torch.cat([torch.rand(1, generator=g, dtype=torch.float64) for g in generator_per_sample])


class Diffusion(Objective):
    """DDPM noise with an epsilon or v target, and optional min-SNR weighting (Hang et al. 2023)."""

    def __init__(self, scheduler_config: dict[str, Any], section: settings.Objective):
        self.section = section
        _check_scheduler(scheduler_config, flow=False)
        # Only entries that describe the noising process are used. The rest belongs to the sampler that wrote the config
        # (PNDM, Euler, DPM++ ...), and DDPM would rightly warn about it.
        known = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type")
        taken = {k: scheduler_config[k] for k in (*known, "rescale_betas_zero_snr") if k in scheduler_config}
        self.scheduler = DDPMScheduler.from_config({**taken, "clip_sample": False})
        self.prediction_type: str = self.scheduler.config.prediction_type
        if self.prediction_type not in ("epsilon", "v_prediction"):
            raise UserError(
                Message(
                    "the model's scheduler_config.json has prediction_type = {type}; supported are 'epsilon' and "
                    "'v_prediction'",
                    type=repr(self.prediction_type),
                )
            )
        if PREDICTION_TYPES.get(section.prediction, self.prediction_type) != self.prediction_type:
            raise ValueError(f"the family was made without objective.prediction = {section.prediction!r}")
        self.num_timesteps: int = self.scheduler.config.num_train_timesteps
        self.density = densities.make(section, auto="uniform")
        if self.prediction_type == "epsilon" and (problem := self._find_division_by_zero()):
            raise UserError(problem)

    def sample_t(
        self, generator_per_sample: list[torch.Generator], seq_len: int, quantiles: list[float] | None = None
    ) -> Tensor:
        """Draw integers in [0, T), or between t_min and t_max, uniformly or from the density: (B,) int64."""
        total = self.num_timesteps
        low = math.floor(self.section.t_min * total)
        high = max(math.ceil(self.section.t_max * total), low + 1)
        if self.section.timesteps in ("auto", "uniform") and quantiles is None:
            return torch.cat([torch.randint(low, high, (1,), generator=g) for g in generator_per_sample])
        q_B = _draw_quantiles(generator_per_sample, quantiles)
        first, last = self.density.cdf(torch.tensor([low / total, high / total], dtype=torch.float64))
        level_B = self.density.quantile(first + (last - first) * q_B)
        return (level_B * total).floor().long().clamp(low, high - 1)

    def shape_noise(self, noise_BCHW: Tensor, generator_per_sample: list[torch.Generator]) -> Tensor:
        """Add noise_offset times a normal number per channel of a sample, then noise of lower resolutions, if set.

        Guttenberg 2023, "Diffusion with offset noise"; Whitaker 2023, "Multi-resolution noise".
        """
        if self.section.noise_offset:
            shape = (noise_BCHW.shape[1], *[1] * (noise_BCHW.ndim - 2))
            offset_BC11 = torch.stack([torch.randn(shape, generator=g) for g in generator_per_sample]).to(noise_BCHW)
            noise_BCHW = noise_BCHW + self.section.noise_offset * offset_BC11
        if self.section.pyramid_noise:
            pairs = zip(noise_BCHW, generator_per_sample, strict=True)
            noise_BCHW = torch.stack([self._add_pyramid(noise_CHW, g) for noise_CHW, g in pairs])
        return noise_BCHW

    def _find_division_by_zero(self) -> Message | None:
        """Return why the settings do not fit a model of epsilon prediction with no signal at the last timestep."""
        if self.section.zero_terminal_snr:
            return Message(
                "objective.zero_terminal_snr needs a model that predicts v; this one predicts epsilon, from which "
                "no image can be computed where no signal is left"
            )
        if self.section.weighting == "debiased" and self.scheduler.config.rescale_betas_zero_snr:
            return Message(
                "objective.weighting = 'debiased' is unbounded for this model, which predicts epsilon and has no "
                "signal at the last timestep; use 'min_snr' or 'soft_min_snr'"
            )
        return None

    def _add_pyramid(self, noise_CHW: Tensor, generator: torch.Generator) -> Tensor:
        """Add noise at falling resolutions, each weaker by pyramid_discount, and scale the sum to a deviation of 1.

        Level i is smaller by r^i, where r is drawn anew from [2, 4), until a side is one pixel; level 0 has the full
        size. That is sd-scripts' rule, but each image is scaled by its own deviation and not by that of its batch.
        """
        channels, height, width = noise_CHW.shape
        for level in range(self.section.pyramid_noise):
            divisor = (2 + 2 * torch.rand((), generator=generator).item()) ** level
            size = max(1, int(height / divisor)), max(1, int(width / divisor))
            coarse = torch.randn((1, channels, *size), generator=generator).to(noise_CHW)
            grown = torch.nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")[0]
            noise_CHW = noise_CHW + self.section.pyramid_discount**level * grown
            if 1 in size:
                break
        return noise_CHW / noise_CHW.std()

    def perturb_noise(self, noise_BCHW: Tensor, generator_per_sample: list[torch.Generator]) -> Tensor:
        """Add input_noise times new Gaussian noise, if it is set (Ning et al. 2023, "Input perturbation")."""
        if not self.section.input_noise:
            return noise_BCHW
        shape = noise_BCHW.shape[1:]
        more_BCHW = torch.stack([torch.randn(shape, generator=g) for g in generator_per_sample]).to(noise_BCHW)
        return noise_BCHW + self.section.input_noise * more_BCHW

    def convert_level(self, level: float) -> tuple[Tensor, str]:
        """Convert a noise level to the nearest integer timestep, and to words."""
        step = round(level * (self.num_timesteps - 1))
        return torch.tensor([step]), Message("t = {step} of {total}", step=step, total=self.num_timesteps)

    def add_noise(self, latents_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """Return sqrt(alpha_bar_t) * latents + sqrt(1 - alpha_bar_t) * noise, as diffusers' schedulers do."""
        return self.scheduler.add_noise(latents_BCHW, noise_BCHW, t_B.to(latents_BCHW.device))

    def compute_target(self, latents_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """Return the noise, or the velocity for a model of v prediction (Salimans and Ho 2022)."""
        if self.prediction_type == "v_prediction":
            return self.scheduler.get_velocity(latents_BCHW, noise_BCHW, t_B.to(latents_BCHW.device))
        return noise_BCHW

    def compute_noise_level(self, t_B: Tensor) -> Tensor:
        """Return t divided by the number of timesteps, (B,)."""
        return t_B / self.num_timesteps

    def _compute_delta_by_snr(self, t_B: Tensor) -> Tensor:
        """Return (1 - huber_delta) / (1 + sigma)^2 + huber_delta, where sigma^2 = 1 / SNR."""
        delta = self.section.huber_delta
        return (1 - delta) / (1 + self.compute_snr(t_B).rsqrt()).square() + delta

    def compute_snr(self, t_B: Tensor) -> Tensor:
        """Return the signal-to-noise ratio abar_t / (1 - abar_t), (B,) float32."""
        abar = self.scheduler.alphas_cumprod.to(device=t_B.device, dtype=torch.float32)[t_B]
        return abar / (1 - abar)

    def compute_weight(self, t_B: Tensor) -> Tensor:
        """Return the weight of each sample's loss by its signal-to-noise ratio.

        It is chosen for the error of x_0, and divided by the factor between that and the error of the prediction: SNR
        for epsilon, SNR + 1 for v. "min_snr": min(SNR, gamma) (Hang et al. 2023, sect. 3.4). "soft_min_snr": SNR gamma
        / (SNR + gamma), the same with a round corner (Crowson et al. 2024, sect. 4.1). "debiased": sqrt(SNR), which is
        1 / sqrt(SNR) for epsilon (Yu et al. 2023).
        """
        gamma, kind = self.section.min_snr_gamma, self.section.weighting
        if kind != "debiased" and not gamma:
            return torch.ones(t_B.shape, dtype=torch.float32, device=t_B.device)
        snr = self.compute_snr(t_B)
        if self.prediction_type == "v_prediction":
            of_x0 = snr.clamp(max=gamma) if kind == "min_snr" else snr.sqrt()
            return (snr * gamma / (snr + gamma) if kind == "soft_min_snr" else of_x0) / (snr + 1)
        # Divided by SNR before anything is multiplied, so that there is no 0/0 where no signal is left.
        if kind == "min_snr":
            return (gamma / snr).clamp(max=1.0)
        return gamma / (snr + gamma) if kind == "soft_min_snr" else snr.rsqrt()


class FlowMatching(Objective):
    """Rectified flow: a straight line from data to noise, and the shift that moves training towards noise.

    For a model that was trained with another density, derive a class with its own `deviation` and
    `compute_model_shift`.
    """

    deviation: ClassVar[float] = 1.0
    """Scale of the logit-normal density of objective.timesteps = "auto"."""

    def __init__(self, scheduler_config: dict[str, Any], section: settings.Objective):
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
        self.density = densities.make(section, auto="logit_normal", auto_std=self.deviation)

    def compute_mu(self, seq_len: int) -> float:
        """Return the resolution-dependent shift parameter: a line from (base length, shift) to (max length, shift)."""
        (short, long), (low, high) = self.seq_lens, self.mus
        return low + (high - low) * (seq_len - short) / (long - short)

    def compute_shift(self, seq_len: int) -> float:
        """Return the factor s in t -> s t / (1 + (s - 1) t): the setting if it is a number, else the scheduler's.

        `ModelFamily.make_objective` has replaced "auto" by the family's number, if the family has one.
        """
        shift = self.section.shift
        return self.compute_model_shift(seq_len) if isinstance(shift, str) else float(shift)

    def compute_model_shift(self, seq_len: int) -> float:
        """Return the shift factor of the model's scheduler at this resolution.

        diffusers' "exponential" shift e^mu / (e^mu + (1/t - 1)) is this with s = e^mu, its "linear" one with s = mu.
        """
        if not self.dynamic:
            return self.fixed_shift
        mu = self.compute_mu(seq_len)
        return math.exp(mu) if self.time_shift_type == "exponential" else mu

    def warp(self, t_B: Tensor, seq_len: int) -> Tensor:
        """Move t towards 1 by the shift, as the sampler's schedule is moved (Esser et al. 2024, eq. 23)."""
        s = self.compute_shift(seq_len)
        return s * t_B / (1 + (s - 1) * t_B)

    def sample_t(
        self, generator_per_sample: list[torch.Generator], seq_len: int, quantiles: list[float] | None = None
    ) -> Tensor:
        """Draw t from the density of `objective.timesteps`, and shift it.

        With t_min or t_max, the same density is truncated there; they limit t after the shift, as samplers count it.

        Returns:
            t (B,) float32 in (0, 1).
        """
        section = self.section
        whole = (section.t_min, section.t_max) == (0.0, 1.0)
        if quantiles is not None or not whole or section.timesteps not in ("auto", "uniform", "logit_normal"):
            return self._sample_between(_draw_quantiles(generator_per_sample, quantiles), seq_len)
        if section.timesteps == "uniform":
            t_B = torch.cat([torch.rand(1, generator=g) for g in generator_per_sample])
        else:
            auto = section.timesteps == "auto"
            mean, std = (0.0, self.deviation) if auto else (section.logit_mean, section.logit_std)
            normal_B = torch.cat([torch.randn(1, generator=g) for g in generator_per_sample])
            t_B = (mean + std * normal_B).sigmoid()
        return self.warp(t_B, seq_len)

    def _sample_between(self, q_B: Tensor, seq_len: int) -> Tensor:
        """Draw by inverting the distribution function in float64, so that no draw is rejected."""
        ends = torch.tensor([self.section.t_min, self.section.t_max], dtype=torch.float64)
        s = self.compute_shift(seq_len)
        low, high = self.density.cdf(ends / (s - (s - 1) * ends))
        t_B = self.density.quantile(low + (high - low) * q_B)
        return self.warp(t_B, seq_len).clamp(*ends.tolist()).float()

    def convert_level(self, level: float) -> tuple[Tensor, str]:
        """Return the level itself as t (1,), and words for it."""
        return torch.tensor([level]), Message("t = {level}", level=f"{level:g}")

    def compute_noise_level(self, t_B: Tensor) -> Tensor:
        """Return t, which is the noise level itself, (B,)."""
        return t_B

    def add_noise(self, latents_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """Interpolate linearly: (1 - t) * latents + t * noise."""
        t_B111 = t_B.to(latents_BCHW).view(-1, *[1] * (latents_BCHW.ndim - 1))
        return (1 - t_B111) * latents_BCHW + t_B111 * noise_BCHW

    def compute_target(self, latents_BCHW: Tensor, noise_BCHW: Tensor, t_B: Tensor) -> Tensor:
        """Return the velocity from the image to the noise: noise - latents."""
        return noise_BCHW - latents_BCHW

    def compute_weight(self, t_B: Tensor) -> Tensor:
        """Return 1: the logit-normal density already emphasizes the middle (Esser et al. 2024, sect. 3.1)."""
        return torch.ones(t_B.shape, dtype=torch.float32, device=t_B.device)
