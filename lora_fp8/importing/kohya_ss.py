"""The settings page kohya_ss (JSON), which runs sd-scripts and renames some keys. Facts: kohya_ss 26.0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import Message
from . import model_settings, remarks, sd_scripts
from .import_draft import Draft, Tool
from .kohya_data import read_datasets
from .kohya_table import NO_PART, SD_SCRIPTS_RULES
from .rules import JOINT, Rule, map_idle, map_none
from .source_files import Source, flatten_tables, parse_options

OF_OTHERS = "of another architecture."
PAGE_RULES: dict[str, Rule] = {
    "sdxl": JOINT,
    "sd3_checkbox": JOINT,
    "flux1_checkbox": JOINT,
    "flux_checkbox": JOINT,
    "LoRA_type": JOINT,
    "lr_warmup": JOINT,
    "additional_parameters": JOINT,
    "model_list": map_idle(Message("this is the page's list of models")),
    "save_as_bool": map_idle(remarks.OF_PAGE),
    "train_on_input": map_idle(remarks.OF_PAGE),
    f"{OF_OTHERS}**": map_idle(remarks.OTHER_ARCHITECTURE),
    "unit": map_none(remarks.BELONGS_TO(key="DyLoRA"), 1),
    "stop_text_encoder_training": map_none(remarks.TEXT_TO_THE_END),
    "stop_text_encoder_training_pct": map_none(remarks.TEXT_TO_THE_END),
    "noise_offset_type": map_idle(Message("this setting chooses which noise settings are used")),
    "no_token_padding": map_none(remarks.PADDING),
    "LyCORIS_preset": JOINT,
    "use_wandb": map_idle(remarks.LOGGING),
    "extra_accelerate_launch_args": map_none(
        Message("pass these arguments to `accelerate launch train_lora.py` yourself")
    ),
    **dict.fromkeys(("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio"), JOINT),
    **dict.fromkeys(
        ("bypass_mode", "constrain", "decompose_both", "dora_wd", "factor", "full_matrix", "rescaled", "train_norm")
        + ("use_cp", "use_scalar", "use_tucker", "rank_dropout_scale"),
        JOINT,
    ),
    **dict.fromkeys(
        ("conv_block_alphas", "conv_block_dims", "conv_alphas", "conv_dims")
        + ("block_lr_zero_threshold",)
        + ("down_lr_weight", "mid_lr_weight", "up_lr_weight", "train_single_block_indices")
        + ("train_double_block_indices", "img_attn_dim", "img_mlp_dim", "img_mod_dim", "single_dim", "txt_attn_dim")
        + ("txt_mlp_dim", "txt_mod_dim", "single_mod_dim", "in_dims", "split_qkv", "train_t5xxl", "t5xxl_lr"),
        map_none(NO_PART),
    ),
    "block_dims": map_none(NO_PART),
    "block_alphas": map_none(NO_PART),
    "rank_dropout": JOINT,
    "module_dropout": JOINT,
    "conv_dim": JOINT,
    "conv_alpha": JOINT,
}

CHECKBOXES = {"flux1": "flux1_checkbox", "sd3": "sd3_checkbox", "sdxl": "sdxl"}
"""Prefix of the settings of one architecture -> the page's checkbox for it."""
PAGE_NAMES = {
    "optimizer": "optimizer_type",
    "max_resolution": "resolution",
    "flux1_cache_text_encoder_outputs": "cache_text_encoder_outputs",
    "flux1_cache_text_encoder_outputs_to_disk": "cache_text_encoder_outputs_to_disk",
    "sdxl_cache_text_encoder_outputs": "cache_text_encoder_outputs",
    "sd3_cache_text_encoder_outputs": "cache_text_encoder_outputs",
    "sdxl_no_half_vae": "no_half_vae",
    "flux1_clip_l": "clip_l",
    "flux1_t5xxl": "t5xxl",
    "lora_network_weights": "network_weights",
    "caption_extention": "caption_extension",
}


def flatten(draft: Draft) -> Iterable[tuple[str, str, Any]]:
    """Yield the page's fields, then the options in additional_parameters, then the dataset file."""
    data = draft.source.data
    chosen = next((kind for kind in ("flux1", "sd3", "sdxl") if data.get(CHECKBOXES[kind])), "")
    rows = []
    for key, value in flatten_tables(data):
        # The page saves the settings of every architecture; those of the others are not read.
        kind = key.partition("_")[0]
        unread = key in PAGE_NAMES and kind in CHECKBOXES and kind != chosen
        rows.append((key, f"{OF_OTHERS}{key}" if unread else key, value))
    extra = data.get("additional_parameters")
    if extra:
        options = parse_options(str(extra).replace('"', "").split())  # the page drops the quotation marks too
        rows += [(f"additional_parameters: {name}", name, value) for name, value in options.items()]
    yield from rows
    yield from read_datasets(draft, rows)


def recognise(source: Source) -> str:
    """Recognise JSON with LoRA_type, or an older file by two field names that only the page uses."""
    data = source.data
    if source.kind != "json" or not isinstance(data, dict):
        return ""
    if "LoRA_type" in data:
        return Message("LoRA_type, a setting of the kohya_ss page")
    keys = ("max_resolution", "train_batch_size")
    return remarks.BOTH(first=keys[0], second=keys[1]) if data.keys() >= set(keys) else ""


def combine(draft: Draft) -> None:
    """Convert as for sd-scripts, whose command the page writes."""
    if draft.has("num_vectors_per_token") or draft.has("token_string"):
        model_settings.refuse(draft, remarks.EMBEDDING)
    if not draft.has("LoRA_type") and not draft.has("network_dim"):
        model_settings.set_whole_model(
            draft,
            Message(
                "the file has no LoRA_type, so kohya_ss trains the whole model; this trainer trains a LoRA instead"
            ),
        )
    sd_scripts.combine(draft)
    draft.report_mapped("additional_parameters", {}, Message("these arguments were read as options of sd-scripts"))


TOOL = Tool(
    "kohya_ss",
    Message("kohya_ss settings page 26"),
    SD_SCRIPTS_RULES | PAGE_RULES,
    {"keep_tokens": 0},
    recognise,
    flatten,
    combine,
    PAGE_NAMES,
    loose=True,
)
