"""Measures how much of a LoRA is left after merging it into a base that is then stored in FP8."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import precision
from ..adapters import kinds
from ..errors import Template
from ..lora_files import layer_names, layouts
from .report import Report

MERGED_FORMATS = {"unscaled": precision.Format("fp8", "none"), "row-scaled": precision.FP8_ROW}
KEPT = Template("cosine similarity to the intended change: median over the layers {median}, lowest {worst} in {layer}")
LOST = Template(
    "cosine similarity to the intended change: median over the layers {median}, lowest {worst} in {layer}; most of "
    "the change is rounding error: do not merge, load the LoRA file instead"
)
MOSTLY_LOST = 0.7  # cosine at which half of the change of the weights is rounding


def measure_survival(weight_NK: Tensor, delta_NK: Tensor, form: precision.Format) -> float:
    """Measure what is left of a LoRA after merging it into a weight that is then stored in `form`.

    Returns the cosine of the angle between the wanted change and the actual one, which is the rounded sum minus the
    rounded weight. At 1 everything is left; its square is the share of the change that is not rounding; 0 means that
    nothing changes.
    """
    weight_NK, delta_NK = weight_NK.float(), delta_NK.float()
    before = precision.round_trip(weight_NK, form, torch.float32)
    change = precision.round_trip(weight_NK + delta_NK, form, torch.float32) - before
    norms = float(change.double().norm() * delta_NK.double().norm())
    return float((change.double() * delta_NK.double()).sum()) / norms if norms else 0.0


def measure_merged(family: Any, tensors: Mapping[str, Tensor], report: Report) -> None:
    """Measure how much of the LoRA is left in each layer, and report the median and the worst."""
    state, scaling = layouts.from_layout(tensors, family, family.read_denoiser_config())
    layers = kinds.group_by_layer(state)
    # Only the denoiser is stored in FP8, so a file of text encoders alone has nothing to measure.
    wanted = {f"{module}.weight": module for module in layers if not layer_names.find_text_encoder(module, family)}
    if not wanted:
        return
    left: dict[str, dict[str, float]] = {name: {} for name in MERGED_FORMATS}
    for name, weight in family.read_denoiser_tensors():
        if module := wanted.get(name):
            weight_NK = precision.to_plain(weight).to(family.device).flatten(1).float()
            parts = {part: tensor.to(family.device) for part, tensor in layers[module].items()}
            delta = kinds.compute_weight_change(weight_NK, parts, scaling[module])
            for form_name, form in MERGED_FORMATS.items():
                left[form_name][module] = measure_survival(weight_NK, delta, form)
    for name, survivals in left.items():
        median = report.measure(f"merged_{name}", float(np.median(list(survivals.values()))))
        worst = min(survivals, key=lambda module: survivals[module])
        template = LOST if median < MOSTLY_LOST else KEPT
        detail = template(median=f"{median:.3f}", worst=f"{survivals[worst]:.3f}", layer=worst)
        report.add(f"merged, {name} e4m3", True, detail, judged=False)
