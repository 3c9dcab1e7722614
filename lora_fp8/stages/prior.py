"""What the base itself predicts, as a target: it keeps what the LoRA should not change.

The base is the same model with its adapters off, so no second copy is loaded; its prediction costs a forward pass
without gradient. There are three uses (`[objective]`):

    prior_for_regularization   the target of regularization images, instead of their own noise: they need not look like
                               what the base draws, and cannot teach anything themselves
    prior_outside_masks        a second loss outside the masks, where training has no target of its own
    dataset.class_word         a second pass with the class word for the trigger in the caption: "a photo of sks dog"
                               may change, "a photo of dog" should not (called differential output preservation)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .. import adapters
from ..data.loader import Batch
from ..families.base import Inputs, ModelFamily
from ..settings import Objective
from .load import Loaded


class Noised(NamedTuple):
    """A batch with noise, as the denoiser and the loss get it; all tensors are on the denoiser's device.

    Attributes:
        inputs: arguments of the denoiser.
        noisy_BCHW: noisy latents.
        target_BCHW: what the denoiser should predict.
        t_B: timesteps.
        mask_BHW: loss masks, if there are any.
        base_BCHW: what it should predict outside of the masks, if that has a loss of its own.
    """

    inputs: Inputs
    noisy_BCHW: Tensor
    target_BCHW: Tensor
    t_B: Tensor
    mask_BHW: Tensor | None
    base_BCHW: Tensor | None = None


def replaces_targets(section: Objective, batch: Batch) -> bool:
    """Return True if regularization images of this batch get the base's prediction as their target."""
    return section.prior_for_regularization and any(batch.regularization)


def constrains_outside_masks(section: Objective, mask_BHW: Tensor | None) -> bool:
    """Return True if the area outside these masks gets a loss against the base's prediction."""
    return section.prior_outside_masks > 0 and mask_BHW is not None


def prepare_inputs(
    family: ModelFamily, loaded: Loaded, noised: Noised, captions: list[str], cond: dict[str, Tensor], guidance: float
) -> Inputs:
    """Return the arguments of another pass over the same noisy latents; trained text encoders encode the captions.

    Args:
        family: of the denoiser.
        loaded: denoiser and trained text encoders.
        noised: noisy latents and timesteps.
        captions, cond: captions and their cached conditioning, on any device.
        guidance: guidance scale, for models that take it as an input.
    """
    if loaded.text is not None:
        device = noised.noisy_BCHW.device
        cond = loaded.text.encode(captions, {name: tensor.to(device) for name, tensor in cond.items()})
    return family.prepare(loaded.denoiser, noised.noisy_BCHW, noised.t_B, cond, guidance)


@torch.no_grad()
def predict_base(
    family: ModelFamily, loaded: Loaded, noised: Noised, captions: list[str], cond: dict[str, Tensor], guidance: float
) -> Tensor:
    """Return the base's prediction for noisy latents, with all adapters off; float32.

    A training adapter beneath the adapters stays on: it belongs to the base that is trained. The arguments are those of
    `prepare_inputs`.
    """
    with adapters.disabled(loaded.adapted):
        inputs = prepare_inputs(family, loaded, noised, captions, cond, guidance)
        return family.predict_prepared(loaded.denoiser, inputs, noised.noisy_BCHW).float()


def with_prior_targets(family: ModelFamily, loaded: Loaded, section: Objective, batch: Batch, noised: Noised) -> Noised:
    """Put the base's prediction into the targets of a batch: for its regularization images, and outside its masks.

    Args:
        family, loaded: of the run.
        section: the job's `[objective]` table.
        batch: on any device.
        noised: the batch with noise.
    """
    replaces = replaces_targets(section, batch)
    constrains = constrains_outside_masks(section, noised.mask_BHW)
    if not replaces and not constrains:
        return noised
    base_BCHW = predict_base(family, loaded, noised, batch.captions, batch.cond, section.guidance)
    target_BCHW = noised.target_BCHW
    if replaces:
        chosen_B = torch.tensor(batch.regularization, device=base_BCHW.device)
        target_BCHW = torch.where(chosen_B.view(-1, *[1] * (base_BCHW.ndim - 1)), base_BCHW, target_BCHW.float())
    return noised._replace(target_BCHW=target_BCHW, base_BCHW=base_BCHW if constrains else None)


def make_class_pass(
    family: ModelFamily, loaded: Loaded, section: Objective, batch: Batch, noised: Noised
) -> tuple[Noised, Tensor] | None:
    """Return a second pass over the same noisy latents, with the class word in the captions and the base's targets.

    Returns:
        The pass and the weight (B,) of each sample in it: 0 for a sample whose caption has no trigger. None if no
        sample has one, or no class word is set.
    """
    if batch.class_cond is None:
        return None
    captions, guidance = batch.class_captions, section.guidance
    base_BCHW = predict_base(family, loaded, noised, captions, batch.class_cond, guidance)
    inputs = prepare_inputs(family, loaded, noised, captions, batch.class_cond, guidance)
    weights = []
    for caption, class_caption, weight in zip(batch.captions, captions, batch.weights, strict=True):
        has_trigger = caption != class_caption
        weights.append(section.prior_for_class * weight if has_trigger else 0.0)
    again = Noised(inputs, noised.noisy_BCHW, base_BCHW, noised.t_B, None)
    return again, torch.tensor(weights, device=noised.noisy_BCHW.device)
