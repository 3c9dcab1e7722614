"""lora-scripts (SD-Trainer; TOML presets), which runs sd-scripts with other defaults and a few keys of its own.

Facts: lora-scripts of September 2025.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .. import config
from ..errors import Message
from . import common_values, model_settings, optimizer_settings, remarks, sd_scripts
from .import_draft import Draft, Tool
from .kohya_data import flatten_sections
from .kohya_table import NO_PART, SD_SCRIPTS_RULES
from .rules import JOINT, Rule, map_idle, map_none
from .source_files import Source, get_table

LORA_SCRIPTS_RULES: dict[str, Rule] = {
    "metadata.**": map_idle(Message("this describes the preset")),
    "model_train_type": JOINT,
    "enable_preview": JOINT,
    "randomly_choice_prompt": map_none(Message("this trainer uses preview prompts in their order")),
    "positive_prompts": JOINT,
    "negative_prompts": JOINT,
    "sample_width": JOINT,
    "sample_height": JOINT,
    "sample_cfg": JOINT,
    "sample_seed": JOINT,
    "sample_steps": JOINT,
    "network_args_custom": JOINT,
    "optimizer_args_custom": JOINT,
    "ui_custom_params": JOINT,
    "enable_base_weight": map_none(remarks.MERGE_BEFOREHAND),
    "enable_block_weights": JOINT,
    "dylora_unit": map_none(remarks.BELONGS_TO(key="DyLoRA")),
    "lokr_factor": JOINT,
    "train_norm": JOINT,
    "dropout": JOINT,
    "prodigy_d0": JOINT,
    "prodigy_d_coef": JOINT,
    "down_lr_weight": map_none(NO_PART),
    "mid_lr_weight": map_none(NO_PART),
    "up_lr_weight": map_none(NO_PART),
    "block_lr_zero_threshold": map_none(NO_PART),
}


def flatten(draft: Draft) -> Iterable[tuple[str, str, Any]]:
    """Yield a preset's [metadata] and [data], or the settings at the top level; then those in ui_custom_params."""
    data = draft.source.data
    for key, value in get_table(data, "metadata").items():
        yield f"metadata.{key}", "model_train_type" if key == "train_type" else f"metadata.{key}", value
    yield from flatten_sections({name: value for name, value in data.items() if name != "metadata"})
    custom = (get_table(data, "data") or data).get("ui_custom_params")
    if custom:
        try:
            parsed = config.read_toml(str(custom))
        except ValueError:
            draft.notes.append(Message("ui_custom_params is not TOML and was not read"))
        else:
            yield from ((f"ui_custom_params: {label}", key, value) for label, key, value in flatten_sections(parsed))


def recognise(source: Source) -> str:
    """Recognise a preset, or a TOML with model_train_type."""
    data = source.data
    if source.kind != "toml" or not isinstance(data, dict):
        return ""
    if isinstance(data.get("data"), dict) and isinstance(data.get("metadata"), dict):
        return Message("a preset with [metadata] and [data]")
    return "model_train_type" if "model_train_type" in {key for _, key, _ in flatten_sections(data)} else ""


def combine(draft: Draft) -> None:
    """Convert as for sd-scripts, with the page's own defaults."""
    if "flux" in str(draft.get("model_train_type")):  # its FLUX pages have other defaults
        draft.defaults |= {"network_dim": 2, "network_alpha": 16, "unet_lr": "5e-4", "resolution": "768,768"}
        draft.defaults |= {"max_train_epochs": 20, "optimizer_type": "PagedAdamW8bit", "bucket_reso_steps": 32}
        draft.defaults |= {"timestep_sampling": "sigmoid", "discrete_flow_shift": 1.0, "guidance_scale": 1.0}
        draft.defaults |= {"max_bucket_reso": 2048, "fp8_base": True, "save_precision": "bf16"}
        draft.defaults |= {"gradient_checkpointing": True, "model_prediction_type": "raw"}
    kind = common_values.normalize_name(draft.get("model_train_type"))
    if kind.endswith(("finetune", "dreambooth")):
        model_settings.set_whole_model(draft, remarks.TRAINS_ALL(name=draft.get("model_train_type")))
    sd_scripts.combine(draft)
    optimizer_settings.set_prodigy(draft, {"d_coef": "prodigy_d_coef", "d0": "prodigy_d0"})
    draft.report_mapped("ui_custom_params", {}, Message("these lines were read as settings"))


TOOL = Tool(
    "lora-scripts",
    Message("lora-scripts (SD-Trainer) of September 2025"),
    SD_SCRIPTS_RULES | LORA_SCRIPTS_RULES,
    {
        "network_dim": 32,
        "network_alpha": 32,
        "unet_lr": "1e-4",
        "optimizer_type": "AdamW8bit",
        "lr_scheduler": "cosine_with_restarts",
        "lr_scheduler_num_cycles": 1,
        "train_batch_size": 1,
        "resolution": "512,512",
        "enable_bucket": True,
        "bucket_no_upscale": True,
        "min_bucket_reso": 256,
        "max_bucket_reso": 1024,
        "keep_tokens": 0,
        "max_train_epochs": 10,
        "gradient_checkpointing": False,
        "mixed_precision": "bf16",
        "seed": 1337,
        "save_precision": "fp16",
        "max_token_length": 255,
        "clip_skip": 2,
    },
    recognise,
    flatten,
    combine,
    loose=True,
)
