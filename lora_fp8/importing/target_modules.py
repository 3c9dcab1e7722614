"""The layers that other trainers adapt by default, where they are not those of our architectures.

A file without a word about layers trains the tool's own, so they are written as adapter.targets. Sources are named at
each table; an architecture without an entry has the layers of ours, or is not known to the tool.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .. import families
from ..errors import Message, Template
from . import remarks
from .import_draft import Draft
from .kohya_convolutions import BESIDE_THEM, CONVOLUTIONS, LYCORIS_BESIDE_THEM, LYCORIS_CONVOLUTIONS
from .readers import read_number

_QWEN = ("qwen_image", "qwen_image_edit", "qwen_image_edit_plus")
BLOCKS: tuple[str, ...] = ("blocks",)
"""The tool adapts every linear layer of the blocks. Words are keys of the family's `further_layers`."""
BLOCKS_OF_DIFFUSERS = dict.fromkeys(("flux", "flux_kontext", "sd3", "lumina2", "z_image", "hidream", *_QWEN), BLOCKS)
OF_SD_SCRIPTS = dict.fromkeys(("flux", "sd3", "lumina2"), BLOCKS)
"""networks/lora_flux.py, lora_sd3.py, lora_lumina.py: every linear layer of the classes of blocks they name. Its
lora_anima.py leaves the modulation out. LyCORIS' presets for whole blocks name the same classes (lycoris/config.py)."""
FURTHER_LAYERS: dict[str, dict[str, tuple[str, ...]]] = {
    # toolkit/lora_special.py: every linear layer whose name contains one of `get_transformer_block_names`. Krea 2's
    # "blocks" is part of the names of its text fusion too.
    "ai-toolkit": BLOCKS_OF_DIFFUSERS | {"ideogram4": BLOCKS, "krea2": ("refiners",)},
    # models/base.py, `get_target_modules`: every linear layer of the classes in a model's `adapter_target_modules`.
    "diffusion-pipe": BLOCKS_OF_DIFFUSERS
    | dict.fromkeys(("hunyuan_video", "aura_flow", "ideogram4", "anima"), BLOCKS)
    | {"z_image": ("blocks", "refiners")},
    # networks/lora_*.py: their patterns leave the modulation out, but that of lora_qwen_image.py, `.*(_mod_).*`,
    # matches no layer. lora_krea2.py takes every linear layer of the model.
    "musubi-tuner": dict.fromkeys(_QWEN, BLOCKS) | {"krea2": ("refiners", "outside")},
}
"""Tool -> architecture -> which of its `further_layers` the tool adapts; `OF_SD_SCRIPTS` for sd-scripts and its pages.

These are facts of the tools, so they are not in lora_fp8/families; which layers they stand for is a family's fact.
"""

WHOLE_BLOCKS = Template("{tool} adapts every linear layer of the blocks, those of the modulation too")
MORE_LAYERS = Template("{tool} adapts these layers by default")
FINAL_LAYER = Message("sd-scripts also adapts the output layer of Lumina, which has no counterpart in a LoRA file here")
LLM_ADAPTER = Message(
    "diffusion-pipe can also train Anima's LLM adapter (llm_adapter_lr); this trainer leaves it unchanged"
)
TEXT_PROJECTION = Message(
    "diffusion-pipe also adapts the text projection of the second text encoder; this trainer leaves it unchanged"
)
EVERYTHING = Message("with an empty layer_filter, OneTrainer adapts every layer of the model")
OUTSIDE_BLOCKS = Message(
    "with an empty layer_filter, OneTrainer adapts every layer of the model; this trainer adapts those of the blocks"
)
LAYERS = "target layers"
"""What a report calls the default; no tool has a key for it."""


def list_layers(family: str, places: Iterable[str] = BLOCKS) -> list[str]:
    """Return the adapter.targets of an architecture's own layers, and of its `further_layers` in these places."""
    Family = families.get(family)
    further = (target for place in places for target in Family.further_layers.get(place, ()))
    return [*Family.adapter_targets, *further]


def assume_tools_layers(draft: Draft) -> None:
    """Write the layers that the tool adapts by default, where they are not our own."""
    places = FURTHER_LAYERS.get(draft.tool.name, OF_SD_SCRIPTS).get(draft.family, ())
    if _is_of_another_kind(draft):
        return
    tool = draft.tool.title.partition(" ")[0]
    if places:
        note = WHOLE_BLOCKS(tool=tool) if places == BLOCKS else MORE_LAYERS(tool=tool)
        draft.assume("adapter.targets", list_layers(draft.family, places), LAYERS, note)
    if draft.family == "lumina2" and draft.tool.name not in FURTHER_LAYERS:
        draft.add_difference(LAYERS, FINAL_LAYER)


def assume_layers_of_diffusion_pipe(draft: Draft) -> None:
    """Write or report the layers that diffusion-pipe adapts by default; see `assume_tools_layers`."""
    assume_tools_layers(draft)
    report_fused(draft)
    if draft.family == "sdxl":  # models/sdxl.py, `configure_adapter`: linear layers of the blocks, and of both encoders
        note = MORE_LAYERS(tool="diffusion-pipe")
        draft.assume("adapter.targets", [*list_layers("sdxl"), "time_emb_proj"], LAYERS, note)
        if draft.get("model.text_encoder_2_lr", read_number) != 0:
            draft.add_difference(LAYERS, TEXT_PROJECTION)
    if draft.family == "anima" and draft.get("model.llm_adapter_lr", read_number) != 0:
        draft.add_difference(LAYERS, LLM_ADAPTER)
    draft.report_unmatched("model.llm_adapter_lr", remarks.BELONGS_TO(key="type = 'anima'"), off=True)


def assume_every_layer(draft: Draft) -> None:
    """Write every layer as OneTrainer's default: of a UNet with its convolutions, of a transformer those of the blocks.

    OneTrainer: modules/module/LoRAModule.py with an empty filter (the preset "full").
    """
    if not draft.family or _is_of_another_kind(draft):
        return
    targets = list_layers(draft.family, ("blocks", "refiners"))
    if families.get(draft.family).denoiser_class == "UNet2DConditionModel":
        beside = (*BESIDE_THEM, *LYCORIS_CONVOLUTIONS, *LYCORIS_BESIDE_THEM)
        targets += [*CONVOLUTIONS, *beside]
        if draft.family in ("sdxl", "kolors"):
            targets += ["add_embedding.linear_1", "add_embedding.linear_2"]
        draft.assume("adapter.targets", targets, LAYERS, EVERYTHING)
        return
    if families.get(draft.family).further_layers:
        draft.assume("adapter.targets", targets, LAYERS, OUTSIDE_BLOCKS)
    draft.add_difference(LAYERS, OUTSIDE_BLOCKS)


FUSED: dict[str, set[str]] = {
    "musubi-tuner": {"flux_kontext", "flux2", "flux2_klein", "hunyuan_video", "ideogram4"},
    "diffusion-pipe": {"hunyuan_video", "lumina2", "z_image", "chroma", "flux2", "flux2_klein", "ideogram4"},
    "ai-toolkit": {"chroma", "flux2", "flux2_klein", "ideogram4"},
}
"""Tool -> architectures whose blocks it runs as their makers wrote them, with q, k and v in one layer."""
FUSED_IN_SD_SCRIPTS = {"flux", "chroma", "sd3", "lumina2"}
ONE_LORA = Template(
    "{tool} trains q, k and v of a layer as one LoRA; this trainer gives each a LoRA of this rank, which can learn more"
)
SEPARATE = Message("q, k and v have a LoRA each")


def report_fused(draft: Draft, split: bool = False) -> None:
    """Report that the tool trains q, k and v as one layer; `split`: sd-scripts' split_qkv is on."""
    if split and draft.family in FUSED_IN_SD_SCRIPTS:
        draft.report_mapped("split_qkv", {}, SEPARATE)
    elif draft.family in FUSED.get(draft.tool.name, FUSED_IN_SD_SCRIPTS) and not _is_of_another_kind(draft):
        draft.add_difference(LAYERS, ONE_LORA(tool=draft.tool.title.partition(" ")[0]))


def report_fused_originals(draft: Draft) -> None:
    """Report that the tool trains as one LoRA what is one layer in the makers' code, for whatever architecture."""
    if draft.family in families.list_families() and not _is_of_another_kind(draft):
        rows = families.get(draft.family).native_layers
        if any("#" in ours and len(ours.split()) > 1 for _, ours in rows):
            draft.add_difference(LAYERS, ONE_LORA(tool=draft.tool.title.partition(" ")[0]))


def widen_for_filter(draft: Draft, words: list[str]) -> None:
    """Write the layers of whole blocks if a filter by parts of names may select those beside our own."""
    endings = families.get(draft.family).further_layers.get("blocks", ()) if draft.family else ()
    paths = [f"{blocks}.0.{ending}" for blocks in PATHS_OF_BLOCKS for ending in endings]
    if any(word in path for word in words for path in paths):
        draft.set("adapter.targets", list_layers(draft.family))


PATHS_OF_BLOCKS = ("transformer.transformer_blocks", "transformer.single_transformer_blocks", "transformer.layers")
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
    "ai-toolkit": (*_JOINT, *_FF, "norm1.linear", "norm1_context.linear", "norm.linear", "proj_mlp", "proj_out"),
    "fal": (*_JOINT, *_FF),
    "tiny": ("single_transformer_blocks.7.proj_out", "single_transformer_blocks.20.proj_out"),
    "nano": ("single_transformer_blocks.7.proj_out",),
}
"""Its flux_lora_target, for FLUX.1 and Chroma (simpletuner/helpers/models/flux/model.py, chroma/model.py)."""
FLUX2_TARGETS = ("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_qkv_mlp_proj")
CHECKED = {"sd15", "sd2", "sdxl", "kolors", "sd3", "z_image", "lumina2", "hidream", "aura_flow", "sana"}
CHECKED |= {"ernie_image", "wan", "wan22_5b", "ltx_video", *_QWEN}
"""Architectures whose DEFAULT_LORA_TARGET is `ATTENTION`, their own or that of the class they derive from."""
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
        draft.assume("adapter.targets", list(FLUX2_TARGETS), LAYERS, BY_SIMPLETUNER)
    elif family in CHECKED:
        draft.assume("adapter.targets", _match_endings(family, ATTENTION), LAYERS, BY_SIMPLETUNER)


def _match_endings(family: str, endings: tuple[str, ...]) -> list[str]:
    """Return the architecture's own targets that have one of these endings, and the endings that none of them has."""
    own = families.get(family).adapter_targets
    matched = {ending: [target for target in own if f".{target}".endswith(f".{ending}")] for ending in endings}
    others = [ending for ending, targets in matched.items() if not targets and ending not in ATTENTION]
    return [target for target in own if any(target in targets for targets in matched.values())] + others


def _is_of_another_kind(draft: Draft) -> bool:
    """Return True for OFT, whose layers these tools choose otherwise."""
    return draft.settings.get("adapter.type") == "oft"
