"""Timesteps, losses and noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import Message
from . import remarks
from .common_values import normalize_name
from .import_draft import Draft
from .model_settings import predicts_noise
from .readers import read_number

NO_NOISE = Message("this trainer uses plain Gaussian noise")


ONE_LOSS = Message("objective.loss offers mse, huber, smooth_l1, pseudo_huber and pseudo_smooth_l1")


def set_huber(draft: Draft) -> None:
    """Set objective.loss and its delta from loss_type and huber_c, as kohya's scripts and SimpleTuner define them."""
    kind = normalize_name(draft.get("loss_type") or "l2")
    more = ["huber_c", "huber_scale", "huber_schedule"]
    flow = bool(draft.family) and not predicts_noise(draft.family)
    if kind in ("huber", "smoothl1") and flow and draft.tool.name == "simpletuner":
        draft.report_unmatched(
            ["loss_type", *more],
            Message("SimpleTuner trains flow-matching models with the squared error, whatever loss_type is"),
        )
    elif kind in ("huber", "smoothl1"):
        schedule = str(draft.get("huber_schedule") or "snr")
        delta = 0.1 if draft.get("huber_c") is None else draft.get("huber_c", read_number)
        scale = 1.0 if draft.get("huber_scale") is None else draft.get("huber_scale", read_number)
        ours: dict[str, Any] = {"objective.loss": "pseudo_huber" if kind == "huber" else "pseudo_smooth_l1"}
        if schedule == "constant":
            draft.report_mapped(["loss_type", *more], ours | {"objective.huber_delta": delta * scale})
        elif schedule == "exponential":
            ours |= {"objective.huber_delta": delta, "objective.huber_schedule": schedule}
            draft.report_mapped(["loss_type", *more], ours | ({"objective.huber_scale": scale} if scale != 1 else {}))
        elif schedule == "snr" and not flow:
            draft.report_unmatched("huber_scale", remarks.UNUSED_BESIDE(key="huber_schedule = snr"), off=True)
            ours |= {"objective.huber_delta": delta, "objective.huber_schedule": schedule}
            draft.report_mapped(["loss_type", *more], ours)
        else:
            note = Message(
                "huber_schedule = {schedule} does not apply to flow-matching models in either trainer; constant "
                "was written",
                schedule=schedule,
            )
            draft.report_different(["loss_type", *more], ours | {"objective.huber_delta": delta * scale}, note)
    draft.report_unmatched("loss_type", ONE_LOSS, off=kind in ("l2", "mse"))
    draft.report_unmatched(more, Message("this setting is used only by the Huber loss"), off=True)


# ---------------------------------------------------------------------------------------------------------------------
# Timesteps and previews


def set_timesteps(
    draft: Draft,
    keys: Sequence[str],
    shape: str | dict[str, Any],
    shift: float | str,
    note: str = "",
    exact: bool = True,
) -> None:
    """Set objective.timesteps and shift of a flow-matching family.

    Args:
        draft: the import.
        keys: the tool's keys.
        shape: objective.timesteps, or that with the settings of its shape, by their keys.
        shift: objective.shift; "auto" is the sampler's.
        note: a remark.
        exact: the meaning is the same in both tools.
    """
    if predicts_noise(draft.family):
        note = Message("{family} draws timesteps uniformly and does not use this setting", family=draft.family)
        draft.report_unmatched(keys, note, off=True)
        return
    account = draft.report_mapped if exact else draft.report_different
    shift = "scheduler" if shift == "auto" else shift  # the sampler's; our "auto" may differ
    ours = {"objective.timesteps": shape} if isinstance(shape, str) else shape
    account(keys, ours | {"objective.shift": shift}, note)


def make_logit_normal(mean: float | None = None, std: float | None = None) -> dict[str, Any]:
    """Return the settings of a logit-normal density; None and the usual values are left out."""
    ours: dict[str, Any] = {"objective.timesteps": "logit_normal"}
    ours |= {"objective.logit_mean": mean} if mean else {}
    return ours | ({"objective.logit_std": std} if std not in (None, 1.0) else {})


def set_of_diffusion(
    draft: Draft, keys: str | Sequence[str], ours: dict[str, Any], note: str = "", exact: bool = True
) -> None:
    """Set a setting that only families that predict noise have.

    Args:
        draft: the import.
        keys: the tool's keys.
        ours: our settings; {} if the keys are off.
        note: a remark.
        exact: the meaning is the same in both tools.
    """
    if not ours:
        draft.report_unmatched(keys, remarks.OFF, off=True)
    elif draft.family and not predicts_noise(draft.family):
        note = Message(
            "flow-matching models such as {family} do not use this setting in either trainer", family=draft.family
        )
        draft.report_unmatched(keys, note, off=True)
    else:
        (draft.report_mapped if exact else draft.report_different)(keys, ours, note)


def set_min_snr(draft: Draft, key: str, weight: float | None = None) -> None:
    """Set objective.min_snr_gamma, for families that have it."""
    gamma = draft.get(key, read_number) if weight is None else weight
    set_of_diffusion(draft, key, {"objective.min_snr_gamma": float(gamma)} if gamma else {})


def set_debiased(draft: Draft, key: str, chosen: bool) -> None:
    """Set objective.weighting = "debiased"; the other tools have other formulas for v prediction."""
    different = draft.settings.get("objective.prediction") == "v"
    note = Message(
        "for v prediction, this trainer weights the loss by sqrt(SNR) / (SNR + 1); the other trainer has another "
        "formula"
    )
    ours = {"objective.weighting": "debiased"} if chosen else {}
    set_of_diffusion(draft, key, ours, note if different else "", exact=not different)


def set_prediction(draft: Draft, key: str, predicts: str) -> None:
    """Set objective.prediction, for families of which some models predict noise and some v.

    Args:
        draft: the import.
        key: the tool's key.
        predicts: "epsilon" or "v"; "" if the key is off.
    """
    set_of_diffusion(draft, key, {"objective.prediction": predicts} if predicts else {})


def set_noise_offset(draft: Draft, key: str, heeded: bool = True) -> None:
    """Set objective.noise_offset, for families that have it.

    Args:
        draft: the import.
        key: the tool's key.
        heeded: the other tool shifts the noise of flow-matching models too.
    """
    offset = draft.get(key, read_number)
    if offset and heeded and draft.family and not predicts_noise(draft.family):
        draft.report_unmatched(key, NO_NOISE)
    else:
        set_of_diffusion(draft, key, {"objective.noise_offset": float(offset)} if offset else {})
