"""The layers that other trainers adapt by default, where they are not those of our architectures.

A file without a word about layers trains the tool's own, so they are written as adapter.targets. Sources are named at
each table; an architecture without an entry has the layers of ours, or is not known to the tool.
"""

from __future__ import annotations

from typing import Any

from .. import families
from ..errors import Message, Template
from .import_draft import Draft
from .kohya_convolutions import BESIDE_THEM, CONVOLUTIONS, LYCORIS_BESIDE_THEM, LYCORIS_CONVOLUTIONS

_OF_FLUX = ("norm1.linear", "norm1_context.linear", "norm.linear")
_OF_QWEN = ("img_mod.1", "txt_mod.1")
MODULATION: dict[str, tuple[str, ...]] = {
    "flux": _OF_FLUX,
    "flux_kontext": _OF_FLUX,
    "hunyuan_video": _OF_FLUX,
    "sd3": ("norm1.linear", "norm1_context.linear"),
    "lumina2": ("norm1.linear",),
    "z_image": ("adaLN_modulation.0",),
    "qwen_image": _OF_QWEN,
    "qwen_image_edit": _OF_QWEN,
    "qwen_image_edit_plus": _OF_QWEN,
}
"""Endings of the names of the layers that compute the modulation inside of blocks, by architecture."""

_QWEN = ("qwen_image", "qwen_image_edit", "qwen_image_edit_plus")
SD_SCRIPTS = {"flux", "sd3", "lumina2"}
"""networks/lora_flux.py, lora_sd3.py, lora_lumina.py: every linear layer of the classes of blocks they name. Its
lora_anima.py and all networks of musubi-tuner leave the modulation out."""
WHOLE_BLOCKS_OF: dict[str, set[str]] = {
    # toolkit/lora_special.py: every linear layer whose name contains that of the blocks.
    "ai-toolkit": {"flux", "flux_kontext", "sd3", "lumina2", "z_image", *_QWEN},
    # models/base.py, `configure_adapter`: every linear layer of the classes in a model's `adapter_target_modules`.
    "diffusion-pipe": {"flux", "flux_kontext", "sd3", "lumina2", "z_image", "hunyuan_video", *_QWEN},
    "musubi-tuner": set(),
}
"""Tool -> architectures of which it adapts whole blocks; `SD_SCRIPTS` for sd-scripts and its pages."""

WHOLE_BLOCKS = Template("{tool} adapts every linear layer of the blocks, those of the modulation too")
FINAL_LAYER = Message("sd-scripts also adapts the output layer of Lumina, which has no counterpart in a LoRA file here")
REFINERS = Message("diffusion-pipe also adapts the refiner blocks of Z-Image; this trainer adapts the main blocks only")
EVERYTHING = Message("with an empty layer_filter, OneTrainer adapts every layer of the model")
OUTSIDE_BLOCKS = Message(
    "with an empty layer_filter, OneTrainer adapts every layer of the model; this trainer adapts those of the blocks"
)
WHAT = "target layers"
"""What a report calls the default; no tool has a key for it."""


def list_layers_of_blocks(family: str) -> list[str]:
    """Return the endings of all linear layers in the blocks of an architecture."""
    return [*families.get(family).adapter_targets, *MODULATION.get(family, ())]


def assume_whole_blocks(draft: Draft) -> None:
    """Write the layers of whole blocks as the tool's default, where it adapts them."""
    if draft.family not in WHOLE_BLOCKS_OF.get(draft.tool.name, SD_SCRIPTS) or _is_of_another_kind(draft):
        return
    note = WHOLE_BLOCKS(tool=draft.tool.title.partition(" ")[0])
    draft.assume("adapter.targets", list_layers_of_blocks(draft.family), WHAT, note)
    if draft.family == "lumina2" and draft.tool.name not in WHOLE_BLOCKS_OF:
        draft.add_difference(WHAT, FINAL_LAYER)
    if draft.family == "z_image" and draft.tool.name == "diffusion-pipe":
        draft.add_difference(WHAT, REFINERS)


def assume_every_layer(draft: Draft) -> None:
    """Write every layer as OneTrainer's default: of a UNet with its convolutions, of a transformer those of the blocks.

    OneTrainer: modules/module/LoRAModule.py with an empty filter (the preset "full").
    """
    if not draft.family or _is_of_another_kind(draft):
        return
    targets = list_layers_of_blocks(draft.family)
    if families.get(draft.family).denoiser_class == "UNet2DConditionModel":
        beside = (*BESIDE_THEM, *LYCORIS_CONVOLUTIONS, *LYCORIS_BESIDE_THEM)
        targets += [*CONVOLUTIONS, *beside]
        if draft.family in ("sdxl", "kolors"):
            targets += ["add_embedding.linear_1", "add_embedding.linear_2"]
        draft.assume("adapter.targets", targets, WHAT, EVERYTHING)
        return
    if draft.family in MODULATION:
        draft.assume("adapter.targets", targets, WHAT, OUTSIDE_BLOCKS)
    draft.add_difference(WHAT, OUTSIDE_BLOCKS)


FUSED: dict[str, set[str]] = {
    "musubi-tuner": {"flux_kontext", "flux2", "flux2_klein", "hunyuan_video"},
    "diffusion-pipe": {"hunyuan_video"},
}
"""Tool -> architectures whose blocks it runs as their makers wrote them, with q, k and v in one layer."""
FUSED_IN_SD_SCRIPTS = {"flux", "chroma", "sd3", "lumina2"}
ONE_LORA = Template(
    "{tool} trains q, k and v of a layer as one LoRA; this trainer gives each a LoRA of this rank, which can learn more"
)
EACH = Message("q, k and v have a LoRA each")


def report_fused(draft: Draft, split: bool = False) -> None:
    """Report that the tool trains q, k and v as one layer; `split`: sd-scripts' split_qkv is on."""
    if split and draft.family in FUSED_IN_SD_SCRIPTS:
        draft.report_mapped("split_qkv", {}, EACH)
    elif draft.family in FUSED.get(draft.tool.name, FUSED_IN_SD_SCRIPTS) and not _is_of_another_kind(draft):
        draft.add_difference(WHAT, ONE_LORA(tool=draft.tool.title.partition(" ")[0]))


def widen_for_filter(draft: Draft, words: list[str]) -> None:
    """Write the layers of whole blocks if a filter by parts of names may select those of the modulation."""
    endings = MODULATION.get(draft.family, ())
    paths = [f"{blocks}.0.{ending}" for blocks in BLOCKS for ending in endings]
    if any(word in path for word in words for path in paths):
        draft.set("adapter.targets", list_layers_of_blocks(draft.family))


BLOCKS = ("transformer.transformer_blocks", "transformer.single_transformer_blocks", "transformer.layers")
"""Where the blocks of these architectures are, as OneTrainer and ai-toolkit write it."""

# ----------------------------------------------------------------------------------------------------- SimpleTuner

ATTENTION = ("to_k", "to_q", "to_v", "to_out.0")
"""DEFAULT_LORA_TARGET of its models (simpletuner/helpers/models/*/model.py)."""
_JOINT = (*ATTENTION, "add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
_CONTEXT = ("add_k_proj", "add_q_proj", "add_v_proj", "to_add_out")
_CONTEXT_FF = ("ff_context.net.0.proj", "ff_context.net.2")
_FF = ("ff.net.0.proj", "ff.net.2", *_CONTEXT_FF)
FLUX_TARGETS: dict[str, tuple[str, ...]] = {
    "mmdit": ATTENTION,
    "all": _JOINT,
    "context": _CONTEXT,
    "context+ffs": (*_CONTEXT, *_CONTEXT_FF),
    "all+ffs": (*_JOINT, *_FF, "proj_mlp", "proj_out"),
    "ai-toolkit": (*_JOINT, *_FF, *_OF_FLUX, "proj_mlp", "proj_out"),
    "fal": (*_JOINT, *_FF),
    "tiny": ("single_transformer_blocks.7.proj_out", "single_transformer_blocks.20.proj_out"),
    "nano": ("single_transformer_blocks.7.proj_out",),
}
"""Its flux_lora_target, for FLUX.1 and Chroma (simpletuner/helpers/models/flux/model.py, chroma/model.py)."""
FLUX2_TARGETS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj")
CHECKED = {"sd15", "sd2", "sdxl", "kolors", "sd3", "z_image", "lumina2", "hidream", "aura_flow", "sana"}
CHECKED |= {"ernie_image", "wan", "wan22_5b", "ltx_video", *_QWEN}
"""Architectures whose DEFAULT_LORA_TARGET is `ATTENTION`."""
BY_SIMPLETUNER = Message("SimpleTuner adapts only these layers by default")
LAST_LAYER = Message("SimpleTuner also adapts the output layer, which this trainer leaves out")


def set_simpletuner_targets(draft: Draft) -> None:
    """Set adapter.targets of a standard LoRA from flux_lora_target, or to what SimpleTuner adapts by default."""
    key, family = "flux_lora_target", draft.family
    if family in ("flux", "flux_kontext", "chroma"):
        chosen = str(draft.get(key) or "all")
        if chosen not in FLUX_TARGETS:
            return  # the rule of the key reports it
        settings: dict[str, Any] = {"adapter.targets": _match_endings(family, FLUX_TARGETS[chosen])}
        if not draft.has(key):
            draft.assume("adapter.targets", settings["adapter.targets"], key, BY_SIMPLETUNER)
        elif "proj_out" in FLUX_TARGETS[chosen]:
            draft.report_different(key, settings, LAST_LAYER)
        else:
            draft.report_mapped(key, settings)
    elif family in ("flux2", "flux2_klein"):
        draft.assume("adapter.targets", list(FLUX2_TARGETS), WHAT, BY_SIMPLETUNER)
    elif family in CHECKED:
        draft.assume("adapter.targets", _match_endings(family, ATTENTION), WHAT, BY_SIMPLETUNER)


LYCORIS_ATTENTION = ("sdxl", "flux", "flux_kontext", "lumina2", "aura_flow")
"""Architectures whose DEFAULT_LYCORIS_TARGET is ["Attention"], a class whose modules are called attn."""
PARTS_OF_CLASS = {"Attention": "attn", "FeedForward": "ff"}
"""Class in LyCORIS' target_module -> how the names of its modules begin."""


def set_lycoris_targets(draft: Draft, preset: Any) -> str:
    """Set adapter.targets from the `apply_preset` of SimpleTuner's lycoris_config, or to its default.

    Returns:
        The part of the preset that was not read; "" if there is none.
    """
    known = dict(preset) if isinstance(preset, dict) else {}
    classes = known.pop("target_module", None)
    if classes is None and draft.family in LYCORIS_ATTENTION:
        classes = ["Attention"]
    if not isinstance(classes, list) or not draft.family:
        return "apply_preset" if preset else ""
    parts = [PARTS_OF_CLASS.get(str(name), "") for name in classes]
    own = families.get(draft.family).adapter_targets
    targets = [name for name in own if any(part and name.startswith(part) for part in parts)]
    if not all(parts) or not targets:
        return "apply_preset"
    draft.set("adapter.targets", targets, Message("LyCORIS adapts {names}", names=", ".join(map(str, classes))))
    return f"apply_preset.{next(iter(known))}" if known else ""


def _match_endings(family: str, endings: tuple[str, ...]) -> list[str]:
    """Return the architecture's own targets that have one of these endings, and the endings that none of them has."""
    own = families.get(family).adapter_targets
    matched = {ending: [target for target in own if f".{target}".endswith(f".{ending}")] for ending in endings}
    others = [ending for ending, targets in matched.items() if not targets and ending not in ATTENTION]
    return [target for target in own if any(target in targets for targets in matched.values())] + others


def _is_of_another_kind(draft: Draft) -> bool:
    """Return True for OFT, whose layers these tools choose otherwise."""
    return draft.settings.get("adapter.type") == "oft"
