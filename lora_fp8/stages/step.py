"""One training step up to its gradient: corrupt, predict, compare, backward."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import adapters
from ..data.loader import Batch
from ..errors import Joined, Message, RunFailure
from ..families.base import ModelFamily
from ..objectives import Objective
from ..training.cuda_graphs import Recorder
from ..training.text_encoders import TextEncoders
from .cache import Data
from .load import Loaded
from .prior import Noised, make_class_pass, prepare_inputs, with_prior_targets
from .resume import describe_last_checkpoint
from .session import Session
from .turns import NO_PASSES, OtherFailed, Passes, draw_turn

REQUESTS = ("stop", "save", "preview", "prompts", "sample")
"""Requests that are acted on at the end of a step; "prompts" and "sample" are those of `live_previews`."""


def add_noise(
    family: ModelFamily,
    denoiser: nn.Module,
    objective: Objective,
    batch: Batch,
    guidance: float,
    text: TextEncoders | None = None,
) -> Noised:
    """Draw the timesteps of a batch, and add noise to its latents; the arguments are those of `compute_loss`."""
    device = next(denoiser.parameters()).device
    batch = batch.to(device)
    latents, noise = batch.latents_BCHW, batch.noise_BCHW
    quantiles = batch.quantiles if objective.section.even_timesteps else None
    t_B = objective.sample_t(batch.t_generators, family.count_image_tokens(tuple(latents.shape[2:])), quantiles)
    t_B = t_B.to(device, non_blocking=True)  # otherwise the CPU waits for the batch before
    noise = objective.shape_noise(noise, batch.t_generators)
    noisy = objective.add_noise(latents, objective.perturb_noise(noise, batch.t_generators), t_B).to(family.dtype)
    cond = batch.cond if text is None else text.encode(batch.captions, batch.cond)
    inputs = family.prepare(denoiser, noisy, t_B, cond, guidance)
    return Noised(inputs, noisy, objective.compute_target(latents, noise, t_B), t_B, batch.mask_BHW)


def predict_and_compare(family: ModelFamily, denoiser: nn.Module, objective: Objective, noised: Noised) -> Tensor:
    """Return the loss of each sample, (B,) float32."""
    prediction = family.predict_prepared(denoiser, noised.inputs, noised.noisy_BCHW)
    losses_B = objective.compute_loss(prediction, noised.target_BCHW, noised.t_B, noised.mask_BHW)
    if noised.base_BCHW is not None and noised.mask_BHW is not None:
        outside_BHW = 1 - noised.mask_BHW
        outside_B = objective.compute_loss(prediction, noised.base_BCHW, noised.t_B, outside_BHW, unmasked_weight=0.0)
        losses_B = losses_B + objective.section.prior_outside_masks * outside_B
    return losses_B


def compute_loss(
    family: ModelFamily,
    denoiser: nn.Module,
    objective: Objective,
    batch: Batch,
    guidance: float,
    text: TextEncoders | None = None,
) -> Tensor:
    """Add noise to the latents, let the denoiser predict, and compare: the one loss of every family.

    Args:
        family: of the denoiser.
        denoiser: with its adapters.
        objective: draws timesteps, adds noise, and compares.
        batch: latents, noise, conditioning, and masks if there are any.
        guidance: guidance scale, for models that take it as an input.
        text: trained text encoders, which encode the captions anew; None uses the cached conditioning.

    Returns:
        Loss of each sample, (B,) float32.
    """
    noised = add_noise(family, denoiser, objective, batch, guidance, text)
    return predict_and_compare(family, denoiser, objective, noised)


def backward_(
    session: Session,
    loaded: Loaded,
    batch: Batch,
    recorder: Recorder | None,
    dropped: Passes = NO_PASSES,
    is_own: bool = True,
) -> Tensor:
    """Run a batch forward and backward, and add its gradients to `loaded.exchange.gradients`.

    Args:
        session, loaded: of the run.
        batch: latents, noise and conditioning.
        recorder: replays the pass, from the second with the same shapes on; None runs it each time.
        dropped, is_own: see `turns.Turn`; the gradients of another process's batch are dropped.

    Returns:
        The loss of each sample times the weight of its folder, (B,) float32. With a class word, that of the second
        pass is added; see `prior`.
    """
    family, section = session.family, session.job.objective
    denoiser, objective, gradients = loaded.denoiser, loaded.objective, loaded.exchange.gradients
    weights_B = torch.tensor(batch.weights).to(session.processes.device, non_blocking=True)

    def run(given: tuple[Noised, Tensor], counts: bool = is_own) -> Tensor:
        losses_B = predict_and_compare(family, denoiser, objective, given[0]) * given[1]
        losses_B.sum().backward()
        if counts:
            gradients.collect_()
        else:
            gradients.drop_()
        return losses_B.detach()

    noised = add_noise(family, denoiser, objective, batch, section.guidance, loaded.text)
    if dropped.prior:
        _predict_for_others(family, loaded, noised)
    noised = with_prior_targets(family, loaded, section, batch, noised)
    losses_B = run((noised, weights_B)) if recorder is None else recorder.run(run, (noised, weights_B))
    again = make_class_pass(family, loaded, section, batch, noised)
    if again is not None:
        losses_B = losses_B + (run(again) if recorder is None else recorder.run(run, again))
    if dropped.class_word:
        _predict_for_others(family, loaded, noised)
        # A backward pass has freed what the trained text encoders keep for it, so they encode anew.
        inputs = noised.inputs
        if loaded.text is not None:
            inputs = prepare_inputs(family, loaded, noised, batch.captions, batch.cond, section.guidance)
        run((noised._replace(inputs=inputs), weights_B), counts=False)
    return losses_B


@torch.no_grad()
def _predict_for_others(family: ModelFamily, loaded: Loaded, noised: Noised) -> None:
    """Make a pass without gradient that another process needs; see `Processes.lockstep`.

    Without adapters, as `predict_base`: their dropout would draw the random numbers of this process's own pass.
    """
    with adapters.disabled(loaded.adapted):
        family.predict_prepared(loaded.denoiser, noised.inputs, noised.noisy_BCHW)


@dataclass(frozen=True)
class Gradient:
    """Facts about a step whose gradient is in `Loaded.exchange.gradients`."""

    loss: float
    """mean over the samples of all processes"""
    num_samples: int
    sent: int
    """bytes that this process sent to the others"""
    requests: frozenset[str]
    """requests to any process for the end of this step, of REQUESTS"""
    faults: list[str]
    """the micro-batches of this process whose loss is not finite, by their files"""


def compute_gradient_(
    session: Session, data: Data, loaded: Loaded, step: int, requests: Callable[[], frozenset[str]]
) -> Gradient:
    """Compute the mean gradient over the samples of a step, on all processes.

    The processes exchange sums, which are divided by the number of samples at the end: each sample of a short batch
    counts as much as any other.

    Args:
        session, data, loaded: of the run.
        step: number of the step, from 1.
        requests: returns the requests to this process; they are sent with the gradient.
    """
    processes, accumulate = session.processes, session.job.train.accumulate
    positions = range((step - 1) * accumulate, step * accumulate)
    num_samples = sum(map(data.loader.count_samples, positions))
    loss_sum, failure = 0.0, None
    faults: list[str] = []
    try:
        loss_sum, faults = _accumulate_(session, data, loaded, step, positions)
    except Exception as error:  # the other processes wait for the sums, which bring them the failure
        if processes.is_cut_off:
            raise
        failure = error
    sent_before = processes.sent
    asked = requests()
    flags = {name: name in asked for name in REQUESTS}
    sums = loaded.exchange.average_(num_samples, loss=loss_sum, failed=failure is not None, **flags)
    sent = processes.sent - sent_before
    if sums["failed"]:
        with session.together():
            if failure is not None:
                raise failure
    return Gradient(sums["loss"] / num_samples, num_samples, sent, frozenset(n for n in flags if sums[n]), faults)


def _accumulate_(session: Session, data: Data, loaded: Loaded, step: int, positions: range) -> tuple[float, list[str]]:
    """Sum the gradients of this process's share of the micro-batches into `loaded.exchange.gradients`.

    Returns:
        Sum of the losses of its samples, and a line for each micro-batch whose loss is not finite.
    """
    job, processes, gradients = session.job, session.processes, loaded.exchange.gradients
    gradients.zero_()
    own: list[tuple[Batch, Tensor]] = []
    for micro, position in enumerate(positions):
        try:
            turn = draw_turn(session, data.loader, step, position)
        except OtherFailed:
            return 0.0, []
        if turn is None:
            continue  # a short batch, which other processes have
        if job.adapter.is_random:
            # Dropout draws from torch's global generator, as inside peft: keyed here, so that resuming draws the same.
            torch.manual_seed(_make_seed(f"dropout|{job.seed}|{step}|{micro}|{processes.rank}"))
        with processes.passing():
            losses_B = backward_(session, loaded, turn.batch, loaded.recorder, turn.dropped, turn.is_own)
        if turn.is_own:
            own.append((turn.batch, losses_B))
    if step < job.train.steps:
        data.loader.prepare(step + 1, positions.stop, processes.rank, processes.world)  # while a GPU still works
    if not own:
        return 0.0, []
    micro_losses = torch.stack([losses_B.sum() for _, losses_B in own]).tolist()  # waits for the device
    faults = [
        name_files_not_finite(batch, losses_B)
        for (batch, losses_B), loss in zip(own, micro_losses, strict=True)
        if not math.isfinite(loss)
    ]
    return sum(micro_losses), faults


def require_finite(session: Session, step: int, gradient: Gradient, norm: float) -> None:
    """Check that loss and gradient of a step are finite, before anything is updated.

    Raises:
        RunFailure: they are not; on all processes, with the files of all of them.
    """
    if math.isfinite(gradient.loss) and math.isfinite(norm):
        return
    with session.together():
        faults = [fault for process_faults in session.processes.gather(gradient.faults) for fault in process_faults]
        quantity = Message("loss {value}", value=gradient.loss)
        if math.isfinite(gradient.loss):
            quantity = Message("gradient norm {value}", value=norm)
        raise RunFailure(
            Message(
                "step {step}: {quantity} is not finite; {culprits}; nothing was updated; {line}. Try a lower "
                "optimizer.lr",
                step=step,
                quantity=quantity,
                culprits=Joined("; ", faults or [Message("no single file is the cause (the gradient overflowed)")]),
                line=describe_last_checkpoint(session.run),
            )
        )


def name_files_not_finite(batch: Batch, losses_B: Tensor) -> str:
    """Name the files of a batch whose loss is not finite."""
    losses = losses_B.tolist()
    paths = (str(path) for path, loss in zip(batch.paths, losses, strict=True) if not math.isfinite(loss))
    return Message("files: {names}", names=", ".join(paths))


def _make_seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
