"""Measure the held-out loss: the error of the denoiser on images kept out of training, at fixed noise levels.

The training loss varies with each draw of image, timestep and noise. Here all three are the same each time: the same
images with their captions, noise and noise levels. The curve is therefore smooth, and an upward turn means overfitting.
The loss is the squared error whatever `objective.loss` is, so that runs can be compared. Weights of noise levels and
masks are those of the training.

Validation draws nothing from the generators of the training, and dropout is off. A run with validation and one without
end with the same bytes if the same images are held out.
"""

import math

import torch

from ..errors import Message
from ..training.verdict import Measurement
from .cache import Data
from .load import Loaded
from .progress import StageProgress
from .session import Session

LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Noise levels, from 0 (objective.t_min) to 1 (objective.t_max); each is a band of the curve."""


def measure(session: Session, data: Data, loaded: Loaded, step: int) -> Measurement | None:
    """Measure the mean squared error on the held-out images; the main process logs it.

    The processes share the work, and all get the result.

    Returns:
        The loss of each image at each noise level; None, with a warning, if one is not finite.
    """
    job, run, processes = session.job, session.run, session.processes
    loader, low, high = data.held_out, job.objective.t_min, job.objective.t_max
    assert loader is not None
    levels = [loaded.objective.convert_level(low + (high - low) * level) for level in LEVELS]
    tasks = [(picture, level) for picture in range(loader.count_epoch_batches(0)) for level in range(len(levels))]
    turns = processes.take_turns(tasks)
    own_tasks = [task for task, is_own in turns if is_own]
    models = [loaded.denoiser, *(loaded.text.encoders.values() if loaded.text else [])]
    for model in models:
        model.eval()
    progress, own_losses = StageProgress(run, "validation"), []
    try:
        with processes.passing():
            for (picture, level), is_own in turns:
                loss = _measure_loss(session, data, loaded, picture, levels[level][0])
                if is_own:
                    own_losses.append(loss)
                progress.update(len(own_losses), len(own_tasks))
    finally:
        for model in models:
            model.train()
    losses = dict(
        pair
        for process_losses in processes.gather(list(zip(own_tasks, own_losses, strict=True)))
        for pair in process_losses
    )
    if not all(map(math.isfinite, losses.values())):
        session.warn(Message("the held-out loss at step {step} is not finite", step=step))
        return None
    pictures = range(loader.count_epoch_batches(0))
    bands = {
        label: sum(losses[picture, level] for picture in pictures) / len(pictures)
        for level, (_, label) in enumerate(levels)
    }
    mean = sum(bands.values()) / len(bands)
    run.log_event("validation", step=step, loss=mean, bands=bands, pictures=len(pictures))
    return Measurement(
        step, tuple(tuple(losses[picture, level] for level in range(len(levels))) for picture in pictures)
    )


@torch.no_grad()
def _measure_loss(session: Session, data: Data, loaded: Loaded, picture: int, t_B: torch.Tensor) -> float:
    """Return the loss of one image at one noise level."""
    assert data.held_out is not None
    batch = data.held_out.take_batch(0, picture)  # epoch 0 each time: the same noise
    assert batch is not None
    device, objective = next(loaded.denoiser.parameters()).device, loaded.objective
    batch, t_B = batch.to(device), t_B.to(device)
    noisy = objective.add_noise(batch.latents_BCHW, batch.noise_BCHW, t_B)
    cond = loaded.text.encode(batch.captions, batch.cond) if loaded.text else batch.cond
    family, guidance = session.family, session.job.objective.guidance
    answer = family.predict(loaded.denoiser, noisy.to(family.dtype), t_B, cond, guidance)
    target = objective.compute_target(batch.latents_BCHW, batch.noise_BCHW, t_B)
    return objective.compute_loss(answer, target, t_B, batch.mask_BHW, kind="mse").item()
