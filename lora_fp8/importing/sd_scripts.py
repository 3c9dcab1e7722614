"""sd-scripts: TOML (sections mean nothing), dataset TOML and commands. Facts: sd-scripts 0.10.1."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lora_fp8.config import UserError

from . import words
from .base import Draft, Source, Tool, flattened, read_source
from .kohya_data import (
    dataset,
    datasets_of,
    only_pictures,
    sections,
    set_folders,
    set_only_pictures,
    set_pictures,
    subsets,
)
from .kohya_previews import set_previews
from .kohya_table import SD_SCRIPTS_RULES
from .kohya_training import (
    MODULES,
    SCRIPTS,
    set_compile,
    set_length_and_rate,
    set_model,
    set_network,
    set_noise,
    set_precision,
)


def flatten(draft: Draft) -> Iterable[tuple[str, str, Any]]:
    """Sections mean nothing; the files that a command and its settings name are read too."""
    source = draft.source
    if not isinstance(source.data, dict):
        raise UserError(f"{source.path}: expected tables")
    if "datasets" in source.data:
        yield from dataset(source.data)
        return
    rows = list(sections(source.data))
    inner = source.data.get("config_file")
    if source.kind == "command" and isinstance(inner, str):
        # Options of the command count more than those of the file that it names.
        named = draft.find(inner) or draft.find(f"{inner}.toml")
        if named is None or not named.is_file():
            draft.notes.append(f"--config_file {inner} is not here: put it beside {source.path.name} and import again")
        else:
            rows = [(f"{named.name}: {s}", k, v) for s, k, v in sections(read_source(named).data)] + rows
    yield from rows
    yield from datasets_of(draft, rows)


def combine(draft: Draft) -> None:
    """Everything of a job; the pages take it as it is."""
    if only_pictures(draft):
        set_only_pictures(draft, subsets(draft))
        set_folders(draft)
        set_pictures(draft)
        return
    set_model(draft)
    set_network(draft)
    set_precision(draft)
    set_folders(draft)
    set_pictures(draft)
    set_length_and_rate(draft)
    set_noise(draft)
    words.set_huber(draft)
    set_previews(draft)
    set_compile(draft)
    words.set_seed(draft, "seed")
    words.set_name(draft, "output_name")


def recognise(source: Source) -> str:
    """One of its scripts or network modules, the model's key, or datasets with subsets."""
    data = source.data
    if not isinstance(data, dict) or source.kind not in ("toml", "command"):
        return ""
    if source.kind == "command":
        script = source.script
        return f"it runs {script}" if script in SCRIPTS or "train_network" in script and _no_musubi(data) else ""
    if isinstance(data.get("datasets"), list):
        inner = [key for key, _ in flattened(data) if key.endswith((".image_dir", ".metadata_file"))]
        return "[[datasets.subsets]] with image_dir" if any(".subsets." in key for key in inner) else ""
    keys = {key for _, key, _ in sections(data)}
    if "model_train_type" in keys or {"metadata", "data"} <= data.keys() or not _no_musubi(keys):
        return ""
    if "pretrained_model_name_or_path" in keys:
        return "pretrained_model_name_or_path at the top or in a section"
    if module_name(data) in MODULES:
        return f"network_module = {module_name(data)}"
    return "network_dim and learning_rate" if {"network_dim", "network_module"} & keys else ""


def module_name(data: Mapping[str, Any]) -> str:
    """The last part of network_module, wherever it stands; "" without one."""
    found = [str(value) for _, key, value in sections(data) if key == "network_module"]
    return found[-1].split(".")[-1] if found else ""


def _no_musubi(keys: Any) -> bool:
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
