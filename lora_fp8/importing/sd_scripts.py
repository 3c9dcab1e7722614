"""sd-scripts: TOML (whose section names have no meaning), dataset TOML and commands. Facts: sd-scripts 0.10.1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import Message, UserError
from . import common_values, memory_settings, model_settings, objective_settings, remarks, tracker_settings
from .import_draft import Draft, Tool
from .kohya_data import (
    flatten_dataset,
    flatten_sections,
    has_only_images,
    list_subsets,
    read_datasets,
    set_folders,
    set_only_pictures,
    set_pictures,
)
from .kohya_previews import set_previews
from .kohya_table import NO_MODULE, SD_SCRIPTS_RULES
from .kohya_training import (
    MODULES,
    SCRIPTS,
    WHOLE_MODEL,
    find_other_job,
    set_compile,
    set_length_and_rate,
    set_model,
    set_network,
    set_noise,
    set_precision,
)
from .source_files import Source, flatten_tables, read_source


def flatten(draft: Draft) -> Iterable[tuple[str, str, Any]]:
    """Yield all settings, whatever their section, and those of the files that a command and its settings name."""
    source = draft.source
    if not isinstance(source.data, dict):
        raise UserError(remarks.NO_TABLE(path=source.path))
    if "datasets" in source.data:
        yield from flatten_dataset(source.data)
        return
    rows = list(flatten_sections(source.data))
    inner = source.data.get("config_file")
    if source.kind == "command" and isinstance(inner, str):
        # The command's options override those of the file that it names.
        named = draft.find(inner) or draft.find(f"{inner}.toml")
        if named is None or not named.is_file():
            draft.notes.append(
                Message(
                    "--config_file {path} was not found. Put the file beside {file}, and import again",
                    path=inner,
                    file=source.path.name,
                )
            )
        else:
            rows = [(f"{named.name}: {s}", k, v) for s, k, v in flatten_sections(read_source(named).data)] + rows
    yield from rows
    yield from read_datasets(draft, rows)


def combine(draft: Draft) -> None:
    """Convert all settings of a job; the settings pages use this function too."""
    if has_only_images(draft):
        set_only_pictures(draft, list_subsets(draft))
        set_folders(draft)
        set_pictures(draft)
        return
    if what := find_other_job(draft.source.script):
        model_settings.refuse(draft, what)
    set_model(draft)
    set_network(draft)
    if draft.source.script in WHOLE_MODEL:
        model_settings.set_whole_model(draft, remarks.TRAINS_ALL(name=draft.source.script))
    elif draft.tool.name == "sd-scripts" and not draft.has("network_module"):
        model_settings.set_whole_model(draft, NO_MODULE)
    model_settings.set_caption_tokens(draft)
    model_settings.set_prompt_weights(draft)
    model_settings.set_clip_skip(draft, "clip_skip")
    set_precision(draft)
    set_folders(draft)
    set_pictures(draft)
    set_length_and_rate(draft)
    tracker_settings.set_trackers(draft, "log_with", "log_tracker_name", "wandb_run_name")
    set_noise(draft)
    objective_settings.set_huber(draft)
    set_previews(draft)
    set_compile(draft)
    memory_settings.set_swap(draft, "blocks_to_swap")
    common_values.set_seed(draft, "seed")
    common_values.set_name(draft, "output_name")


def recognise(source: Source) -> str:
    """Recognise a file by a script, a network module, the model's key, or datasets with subsets."""
    data = source.data
    if not isinstance(data, dict) or source.kind not in ("toml", "command"):
        return ""
    if source.kind == "command":
        return _recognise_command(source.script, data)
    if isinstance(data.get("datasets"), list):
        inner = [key for key, _ in flatten_tables(data) if key.endswith((".image_dir", ".metadata_file"))]
        mark = remarks.TABLE_WITH(table="[[datasets.subsets]]", key="image_dir")
        return mark if any(".subsets." in key for key in inner) else ""
    keys = {key for _, key, _ in flatten_sections(data)}
    if "model_train_type" in keys or {"metadata", "data"} <= data.keys() or not _is_not_musubi(keys):
        return ""
    if "pretrained_model_name_or_path" in keys:
        return Message("{key} at the top or in a section", key="pretrained_model_name_or_path")
    if find_module_name(data) in MODULES:
        return f"network_module = {find_module_name(data)}"
    if {"network_dim", "network_module"} & keys:
        return remarks.BOTH(first="network_dim", second="learning_rate")
    return ""


def _recognise_command(script: str, options: Mapping[str, Any]) -> str:
    """Recognise a command by the script that it runs."""
    known = script in SCRIPTS or script in WHOLE_MODEL or find_other_job(script)
    runs = known or "train_network" in script and _is_not_musubi(options)
    return Message("the script {script}", script=script) if runs else ""


def find_module_name(data: Mapping[str, Any]) -> str:
    """Return the last part of network_module, in whatever section it is; "" if there is none."""
    modules = [str(value) for _, key, value in flatten_sections(data) if key == "network_module"]
    return modules[-1].split(".")[-1] if modules else ""


def _is_not_musubi(keys: Any) -> bool:
    return "dit" not in keys and "dit_high_noise" not in keys


TOOL = Tool(
    "sd-scripts",
    "sd-scripts 0.10",
    SD_SCRIPTS_RULES,
    {
        "network_dim": 4,
        "network_alpha": 1.0,
        "learning_rate": 2e-6,
        "optimizer_type": "AdamW",
        "lr_scheduler": "constant",
        "max_train_steps": 1600,
        "train_batch_size": 1,
        "enable_bucket": False,
        "min_bucket_reso": 256,
        "max_bucket_reso": 1024,
        "keep_tokens": 0,
        "gradient_checkpointing": False,
        "timestep_sampling": "sigma",
        "discrete_flow_shift": 3.0,
        "training_shift": 1.0,
        "weighting_scheme": "uniform",
        "model_prediction_type": "sigma_scaled",
        "guidance_scale": 3.5,
    },
    recognise,
    flatten,
    combine,
    loose=True,
)
