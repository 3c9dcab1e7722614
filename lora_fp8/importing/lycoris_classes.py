"""LyCORIS' apply_preset, as SimpleTuner's lycoris_config has it: which classes of modules it adapts, and how each.

lycoris/wrapper.py: `target_module` and the keys of `module_algo_map` are names of classes, and every linear layer in a
module of such a class is adapted; `module_algo_map` overrides options for a class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import families
from . import adapter_settings, target_modules
from .common_values import is_on, normalize_name, parse_decimal, parse_whole

BY_DEFAULT = ("sdxl", "sd3", "flux", "flux_kontext", "lumina2", "aura_flow", "hidream", "wan", "wan22_5b")
"""Architectures whose DEFAULT_LYCORIS_TARGET is ["Attention"] in SimpleTuner."""
PARTS_OF_CLASS = {
    "Attention": ("attn", "attention"),
    "FeedForward": ("ff.net", "ff_context.net", "ffn.net", "img_mlp.net", "txt_mlp.net", "feed_forward.w"),
}
"""Class -> how our targets for the layers in its modules begin."""
BLOCK_CLASSES = {
    **dict.fromkeys(("flux", "flux_kontext"), ("FluxTransformerBlock", "FluxSingleTransformerBlock")),
    "sd3": ("JointTransformerBlock",),
    **dict.fromkeys(("qwen_image", "qwen_image_edit", "qwen_image_edit_plus"), ("QwenImageTransformerBlock",)),
    **dict.fromkeys(("wan", "wan22_5b"), ("WanTransformerBlock",)),
    **dict.fromkeys(("sd15", "sd2", "sdxl", "kolors"), ("Transformer2DModel",)),
}
"""Architecture -> the classes of its blocks, which hold all layers that we adapt, and those of the modulation."""
OPTIONS = ("algo", "factor", "full_matrix", "decompose_both", "dim", "alpha")
"""Options of a class that can be converted; `dim` and `alpha` are linear_dim and linear_alpha of the whole file."""


@dataclass
class Preset:
    """What a preset was converted to.

    Attributes:
        settings: our settings.
        unread: the parts of the file that have no counterpart.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def convert_preset(family: str, config: Mapping[str, Any], kind: str) -> Preset:
    """Convert the preset in a lycoris_config: adapter.targets, and what it says of each class.

    Args:
        family: the architecture; "" while unknown.
        config: the content of lycoris_config.
        kind: our adapter.type.
    """
    given = config.get("apply_preset")
    known = dict(given) if isinstance(given, dict) else {}
    classes, own_options = known.pop("target_module", None), known.pop("module_algo_map", None) or {}
    if classes is None and family in BY_DEFAULT:
        classes = ["Attention"]
    if not isinstance(classes, list) or not isinstance(own_options, dict) or not family:
        return Preset({}, ["apply_preset"] if given else [])
    names = dict.fromkeys([*map(str, classes), *own_options])
    if set(names) == set(BLOCK_CLASSES.get(family, ())):
        targets = dict.fromkeys(names, target_modules.list_layers(family))
    else:
        targets = {name: _list_targets(family, name) for name in names}
    if not all(targets.values()):
        return Preset({}, ["apply_preset"])
    chosen = {target for own in targets.values() for target in own}
    every = [target for target in target_modules.list_layers(family) if target in chosen]
    preset = _convert_options(config, own_options, kind, targets)
    return Preset({"adapter.targets": every} | preset.settings, [*preset.unread, *sorted(map(str, known))])


def _list_targets(family: str, name: str) -> list[str]:
    """Return our targets for the layers in modules of a class."""
    beginnings = PARTS_OF_CLASS.get(name, ())
    return [target for target in families.get(family).adapter_targets if target.startswith(tuple(beginnings))]


def _convert_options(
    config: Mapping[str, Any], own_options: Mapping[str, Any], kind: str, targets: Mapping[str, list[str]]
) -> Preset:
    """Convert what module_algo_map says of each class. The first class has the settings of the whole adapter."""
    preset = Preset()
    whole = {name: config.get({"dim": "linear_dim", "alpha": "linear_alpha"}.get(name, name)) for name in OPTIONS}
    options = {name: own_options.get(name) or {} for name in targets}
    first: dict[str, Any] = {}
    for name, own in options.items():
        where = f"module_algo_map.{name}"
        if not isinstance(own, dict):
            preset.unread.append(where)
            continue
        values = _read_options(whole | own, kind)
        if not first:
            first = values
            preset.settings |= _make_settings(values, kind) if own else {}
        differing = [key for key in ("algo", "factor", "decompose_both", "scale") if values[key] != first[key]]
        differing += ["algo"] if values["algo"] != _name_algorithm(whole["algo"]) else []
        differing += [key for key in own if key not in OPTIONS]
        preset.unread += [f"{where}.{key}" for key in dict.fromkeys(differing)]
        if values["rank"] != first["rank"] and targets[name] == next(iter(targets.values())):
            preset.unread.append(f"{where}.dim")  # of blocks with the same targets
        elif values["rank"] != first["rank"]:
            preset.settings.setdefault("adapter.ranks", {}).update(dict.fromkeys(targets[name], values["rank"]))
    return preset


def _name_algorithm(name: Any) -> str:
    """Return the name of an algorithm for comparisons; LyCORIS has two for LoRA."""
    word = normalize_name(name)
    return "lora" if word == "locon" else word


def _read_options(given: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a class's options in our units, and its scale."""
    rank = parse_whole("linear_dim", given["dim"] or 4)
    rank = adapter_settings.choose_lokr_rank(rank, given["full_matrix"]) if kind == "lokr" else rank
    alpha = parse_decimal("linear_alpha", given["alpha"] or 1)
    is_whole = kind == "lokr" and rank == adapter_settings.WHOLE_RANK
    return {
        "algo": _name_algorithm(given["algo"]),
        "factor": adapter_settings.read_lokr_factor(-1 if given["factor"] is None else given["factor"]),
        "decompose_both": is_on(given["decompose_both"]),
        "rank": rank,
        "alpha": alpha,
        "scale": 1.0 if is_whole else round(alpha / max(rank, 1), 9),
    }


def _make_settings(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the settings of the whole adapter that a class's options replace."""
    made = {"adapter.rank": values["rank"], "adapter.alpha": float(values["alpha"])} if kind != "oft" else {}
    if kind == "lokr":
        made |= {"adapter.factor": values["factor"], "adapter.decompose_both": values["decompose_both"]}
    return made
