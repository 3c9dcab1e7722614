"""Held-out loss: how well the denoiser predicts pictures that are kept out of training, at fixed noise levels.

The training loss jumps with every draw of picture, timestep and noise. Here all three are the same each time: the same
pictures with their captions, the same noise for each, the same levels between clean and noise. So the curve is smooth,
and its turn upwards is over-fitting and not chance. It is the squared error whatever `objective.loss` trains with, so
that runs can be compared; weights of noise levels and masks are training's. Nothing is drawn from any generator of the
training, and dropout is off: a run with validation and one without end with the same bytes, if the same pictures are
kept out.
"""

import math

import torch

from .cache import Data
from .load import Loaded
from .session import Session

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Shares of the way from clean to noise, or of objective.t_min to t_max; a band of the curve each."""


def measure(session: Session, data: Data, loaded: Loaded, step: int) -> dict[str, float]:
    """Measure the mean squared error on the held-out images; the main process logs it.

    The work is shared out among the processes; all get the answer.

    Returns:
        Noise level in words -> mean over the pictures. Empty where one is not finite, which is a warning.
    """
    job, run, processes = session.job, session.run, session.processes
    loader, low, high = data.held_out, job.objective.t_min, job.objective.t_max
    assert loader is not None
    levels = [loaded.objective.at_level(low + (high - low) * level) for level in LEVELS]
    tasks = [(picture, level) for picture in range(loader.batches_per_epoch) for level in range(len(levels))]
    mine = processes.share(tasks)
    models = [loaded.denoiser, *(loaded.text.encoders.values() if loaded.text else [])]
    for model in models:
        model.eval()
    try:
        losses = [_loss(session, data, loaded, picture, levels[level][0]) for picture, level in mine]
    finally:
        for model in models:
            model.train()
    found = dict(pair for told in processes.gather(list(zip(mine, losses, strict=True))) for pair in told)
    if not all(map(math.isfinite, found.values())):
        session.warn(f"the held-out loss at step {step} is not finite")
        return {}
    pictures = range(loader.batches_per_epoch)
    bands = {
        words: sum(found[picture, level] for picture in pictures) / len(pictures)
        for level, (_, words) in enumerate(levels)
    }
    mean = sum(bands.values()) / len(bands)
    run.log_event("validation", step=step, loss=mean, bands=bands, pictures=len(pictures))
    return bands


@torch.no_grad()
def _loss(session: Session, data: Data, loaded: Loaded, picture: int, t_B: torch.Tensor) -> float:
    """Return the loss of one image at one noise level."""
    assert data.held_out is not None
    batch = data.held_out.micro(0, picture)  # epoch 0 each time: the same noise
    assert batch is not None
    device, objective = next(loaded.denoiser.parameters()).device, loaded.objective
    batch, t_B = batch.to(device), t_B.to(device)
    noisy = objective.add_noise(batch.latents_BCHW, batch.noise_BCHW, t_B)
    cond = loaded.text.cond(batch.captions, batch.cond) if loaded.text else batch.cond
    family, guidance = session.family, session.job.objective.guidance
    answer = family.predict(loaded.denoiser, noisy.to(family.dtype), t_B, cond, guidance)
    target = objective.target(batch.latents_BCHW, batch.noise_BCHW, t_B)
    return objective.loss(answer, target, t_B, batch.mask_BHW, kind="mse").item()
