"""What training leaves to compare a file with: the adapter, a probe, previews and the base that it saw.

Shapes: B batch, C channels, H height, W width (latents)."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import precision
from ..adapters.attach import without_attached
from ..lora_files import export, safetensors_file
from ..training.text_encoders import encode_batch
from .report import Check

Tensors = Iterable[tuple[str, precision.Weight]]
Base = Mapping[str, Tensor] | Callable[[], Tensors]  # a whole state dict, or a function that streams one


@dataclass(frozen=True)
class Probe:
    """Inputs of the denoiser and the training model's prediction for them, on the CPU.

    Attributes:
        noisy_BCHW, t_B, cond, guidance: arguments of `family.predict`.
        prediction_BCHW: the training model's prediction, with the adapter and without dropout.
        captions: captions that the trained text encoders turned into `cond`; () if none was trained.
    """

    noisy_BCHW: Tensor
    t_B: Tensor
    cond: dict[str, Tensor]
    prediction_BCHW: Tensor
    guidance: float = 1.0
    captions: tuple[str, ...] = ()


def make_probe(
    family: Any, denoiser: nn.Module, objective: Any, batch: Any, guidance: float = 1.0, text: Any = None
) -> Probe:
    """Add noise to a batch and record the training denoiser's prediction, as in a training step.

    Args:
        family: family of the model.
        denoiser: the training model, with its adapter; it is called in eval mode, which is reset after.
        objective: the job's objective.
        batch: `data.loader.Batch`, or an object with its latents_BCHW, noise_BCHW, t_generators and cond (collated).
            Its generators are drawn from, so pass one that training does not use.
        guidance: guidance scale of the training.
        text: the trained `TextEncoders`, which encode the batch's captions; None if none is trained.
    """
    latents_BCHW, noise_BCHW = batch.latents_BCHW.cpu(), batch.noise_BCHW.cpu()
    t_B = objective.sample_t(batch.t_generators, family.count_image_tokens(tuple(latents_BCHW.shape[2:])))
    noisy_BCHW = objective.add_noise(latents_BCHW, noise_BCHW, t_B)
    cond = {name: tensor.detach().cpu() for name, tensor in batch.cond.items()}
    captions: tuple[str, ...] = ()
    if text is not None:
        captions = tuple(batch.captions)
        cond = encode_batch(family, text.pipeline, captions, cond)
    with without_attached(denoiser):
        prediction_BCHW = _predict(family, denoiser, noisy_BCHW, t_B, cond, guidance)
    return Probe(noisy_BCHW, t_B, cond, prediction_BCHW, guidance, captions)


def predict(family: Any, denoiser: nn.Module, probe: Probe) -> Tensor:
    """Return a denoiser's prediction for the probe's inputs: (B, C, H, W) on the CPU."""
    return _predict(family, denoiser, probe.noisy_BCHW, probe.t_B, probe.cond, probe.guidance)


def _predict(
    family: Any, denoiser: nn.Module, noisy: Tensor, t: Tensor, cond: dict[str, Tensor], guidance: float
) -> Tensor:
    device = next(denoiser.parameters()).device
    was_training = denoiser.training
    denoiser.eval()
    try:
        with torch.no_grad():
            moved = {name: tensor.to(device) for name, tensor in cond.items()}
            return family.predict(denoiser, noisy.to(device), t.to(device), moved, guidance).detach().cpu()
    finally:
        denoiser.train(was_training)


def save_probe(probe: Probe, path: Path) -> None:
    """Write a probe as safetensors, so that other programs can be tested with its inputs and prediction."""
    tensors = {"noisy": probe.noisy_BCHW, "t": probe.t_B, "prediction": probe.prediction_BCHW}
    tensors |= {f"cond.{name}": tensor for name, tensor in probe.cond.items()}
    about = {"guidance": repr(float(probe.guidance))}
    if probe.captions:
        about["captions"] = json.dumps(probe.captions)
    safetensors_file.write_file(path, tensors, about)


@dataclass(frozen=True)
class Previews:
    """Previews made while training, and how to make them with another pipeline.

    Attributes:
        images: PIL images, or uint8 arrays (H, W, 3), of the training model at the exported step.
        render: makes the same previews (prompts, seeds, settings) with the pipeline that it is given.
    """

    images: Sequence[Any]
    render: Callable[[Any], Sequence[Any]]


@dataclass(frozen=True)
class Reference:
    """What training leaves to compare a file with. What is None is not compared.

    Attributes:
        adapter: the trained adapter, for `delta`.
        probe: stored inputs and the training model's prediction, for `prediction`.
        previews: previews of the training model, for `preview`.
        base: the weights that training used, dequantized (FP8 storage). None: training used the published weights in
            the family's dtype, so these are judged and there is no second measurement.
        on_check: called with each result as soon as it is known.
    """

    adapter: export.Adapter | None = None
    probe: Probe | None = None
    previews: Previews | None = None
    base: Base | None = None
    on_check: Callable[[Check], None] = lambda check: None


def compute_psnr(image: Any, other: Any) -> float:
    """Return the peak signal-to-noise ratio of two 8-bit images in dB; infinity if they are identical.

    Raises:
        ValueError: the images differ in size.
    """
    a, b = (np.asarray(x).astype(np.float64) for x in (image, other))
    if a.shape != b.shape:
        raise ValueError(f"pictures of {a.shape} and {b.shape} cannot be compared")
    error = np.mean((a - b) ** 2)
    return math.inf if error == 0 else float(10 * np.log10(255.0**2 / error))


def measure_preview_psnr(previews: Previews, pipeline: Any) -> float:
    """Return the PSNR in dB of the worst preview, compared with the same one made by `pipeline`.

    Raises:
        ValueError: the number or size of the images differs.
    """
    return find_worst_psnr(previews.images, list(previews.render(pipeline)))


def find_worst_psnr(images: Sequence[Any], others: Sequence[Any]) -> float:
    """Return the lowest PSNR in dB of pairs of images; infinity if all are identical."""
    return min((compute_psnr(a, b) for a, b in zip(images, others, strict=True)), default=math.inf)
