"""musubi-tuner: TOML files (section names have no meaning), dataset TOML and commands. Facts: musubi-tuner 0.3.4."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import PureWindowsPath
from typing import Any

from ..errors import Message, UserError
from . import (
    common_values,
    dataset_settings,
    kohya_data,
    kohya_previews,
    kohya_table,
    kohya_training,
    memory_settings,
    model_settings,
    remarks,
    sd_scripts,
    tracker_settings,
)
from .import_draft import Draft, Folder, Tool
from .readers import read_flag, read_list, read_positive, read_string, read_whole
from .rules import JOINT, Rule, map_idle, map_immaterial, map_near, map_none
from .source_files import Source, flatten_tables, read_source

NO_VIDEO = remarks.NO_FIRST_FRAME
FRAMES_OF_PARTS = Message(
    "this setting is for other ways to cut clips; this trainer takes the head, middle or chunks (dataset.clip)"
)
SQUEEZED = Message(
    "musubi-tuner squeezes the distribution into the range, unless preserve_distribution_shape is set; this trainer "
    "cuts it off"
)
NO_CONTROL = Message("control images are used as in the model's pipeline; see also dataset.control_resolution")
ONE_EXPERT = Message("a job trains one expert of Wan 2.2; see objective.t_min and objective.t_max")

RULES: dict[str, Rule] = kohya_table.SD_SCRIPTS_RULES | {
    "dit": JOINT,
    "task": JOINT,
    "model_version": JOINT,
    "edit": JOINT,
    "edit_plus": JOINT,
    "dit_high_noise": map_none(ONE_EXPERT),
    "text_encoder1": JOINT,
    "text_encoder2": JOINT,
    "t5": JOINT,
    "clip": JOINT,
    "image_encoder": JOINT,
    "fp8_t5": map_idle(remarks.TEXT_FREED),
    "fp8_llm": map_idle(remarks.TEXT_FREED),
    "fp8_text_encoder": map_idle(remarks.TEXT_FREED),
    "vae": JOINT,
    "vae_dtype": map_idle(),
    "vae_tiling": map_idle(),
    "vae_chunk_size": map_idle(),
    "vae_spatial_tile_sample_min_size": map_idle(),
    "vae_cache_cpu": map_idle(),
    "dit_dtype": map_none(remarks.DTYPE, "bfloat16"),
    "flash_attn": kohya_table.SD_SCRIPTS_RULES["sdpa"],
    "flash3": kohya_table.SD_SCRIPTS_RULES["sdpa"],
    "sage_attn": kohya_table.SD_SCRIPTS_RULES["sdpa"],
    "block_swap_ring_size": map_idle(remarks.BELONGS_TO(key="blocks_to_swap")),
    "use_pinned_memory_for_block_swap": map_idle(remarks.BELONGS_TO(key="blocks_to_swap")),
    "gradient_checkpointing_cpu_offload": map_none(remarks.RECOMPUTED),
    "img_in_txt_in_offloading": map_none(remarks.NO_SWAP),
    "num_timestep_buckets": map_none(remarks.EACH_TIMESTEP),
    "min_timestep": map_near("objective.t_min", common_values.read_thousandths, SQUEEZED),
    "max_timestep": map_near("objective.t_max", common_values.read_thousandths, SQUEEZED),
    "preserve_distribution_shape": map_immaterial(
        Message("objective.t_min and objective.t_max cut off the distribution, as this setting does")
    ),
    "show_timesteps": map_idle(Message("this setting only shows the timesteps, and trains nothing")),
    "compile": JOINT,
    "compile_backend": map_idle(Message("torch.compile uses inductor")),
    "compile_mode": map_idle(remarks.ONE_COMPILE_MODE),
    "compile_dynamic": map_idle(),
    "compile_fullgraph": map_idle(),
    "image_directory": JOINT,
    "image_jsonl_file": map_none(remarks.CAPTION_FILES),
    "cache_directory": map_none(remarks.OTHER_CACHE),
    "multiple_target": map_none(remarks.NOT_HERE),
    **dict.fromkeys(
        ("fp_latent_window_size", "fp_1f_clean_indices", "fp_1f_target_index"),
        map_none(NO_VIDEO),
    ),
    **dict.fromkeys(("video_directory", "target_frames", "frame_extraction"), JOINT),
    **dict.fromkeys(("frame_stride", "frame_sample", "max_frames"), map_none(FRAMES_OF_PARTS)),
    "video_jsonl_file": map_none(Message("this trainer reads captions from .txt or .caption files beside the clips")),
    "source_fps": map_immaterial(
        Message(
            "the frame rate follows from the clip's timestamps, and dataset.fps is the rate that it is converted to"
        )
    ),
    "control_directory": JOINT,
    **dict.fromkeys(
        ("control_resolution", "no_resize_control", "flux_kontext_no_resize_control")
        + ("qwen_image_edit_no_resize_control", "qwen_image_edit_control_resolution"),
        map_none(NO_CONTROL),
    ),
    **dict.fromkeys(
        ("one_frame", "latent_padding", "fp_1f_no_post", "remove_first_image_from_target"), map_none(NO_VIDEO)
    ),
    **dict.fromkeys(("num_layers", "force_v2_1_time_embedding"), map_none(remarks.NOT_HERE)),
    **dict.fromkeys(
        ("cuda_allow_tf32", "cuda_cudnn_benchmark", "fp8_te", "text_encoder_dtype", "compile_cache_size_limit")
        + ("disable_numpy_memmap_loading", "architecture"),
        map_idle(),
    ),
    **dict.fromkeys(
        ("metadata_reso", "metadata_arch"), map_idle(Message("size and architecture are read from the model file"))
    ),
    **dict.fromkeys(("offload_inactive_dit", "timestep_boundary"), map_none(ONE_EXPERT)),
    "base_weights": map_none(remarks.MERGE_BEFOREHAND),
}

SCRIPTS = {
    "flux_kontext": "flux_kontext",
    "flux_2": "flux2",
    "qwen_image": "qwen_image",
    "zimage": "z_image",
    "wan": "wan",
    "hv_1_5": "hunyuan_video_1_5",
    "hv": "hunyuan_video",
    "fpack": "framepack",
    "kandinsky5": "kandinsky5",
    "krea2": "krea2",
    "ernie_image": "ernie_image",
    "hidream_o1": "hidream_o1",
    "ideogram4": "ideogram4",
    "qwen_image_21": "qwen_image_21",
    "mage_flow": "mage_flow",
}
"""Training scripts, without `_train_network.py` -> architecture."""
MODULES = {
    "lora_flux": "flux_kontext",
    "lora_flux_2": "flux2",
    "lora_qwen_image": "qwen_image",
    "lora_zimage": "z_image",
    "lora_wan": "wan",
    "lora_hv_1_5": "hunyuan_video_1_5",
    "lora_framepack": "framepack",
    "lora_kandinsky": "kandinsky5",
    "lora_krea2": "krea2",
    "lora_hidream_o1": "hidream_o1",
    "lora_ideogram4": "ideogram4",
}


def flatten(draft: Draft) -> Iterable[tuple[str, str, Any]]:
    """Yield all settings, whatever their section, and those of the dataset file."""
    source = draft.source
    if not isinstance(source.data, dict):
        raise UserError(remarks.NO_TABLE(path=source.path))
    if "datasets" in source.data:
        yield from kohya_data.flatten_dataset(source.data)
        return
    rows = list(kohya_data.flatten_sections(source.data))
    yield from rows
    for _, key, value in rows:
        if key == "dataset_config" and value:
            file = draft.find(str(value))
            if file is None or not file.is_file():
                draft.refer(key, str(value))
                continue
            yield from kohya_data.flatten_dataset(read_source(file).data, PureWindowsPath(str(value)).name)


def combine(draft: Draft) -> None:
    """Convert all settings of a job."""
    if kohya_data.has_only_images(draft):
        kohya_data.set_only_pictures(draft, list_tables(draft))
        _set_folders(draft)
        _set_pictures(draft)
        return
    _set_model(draft)
    kohya_training.set_network(draft)
    kohya_training.set_precision(draft)
    _set_folders(draft)
    _set_pictures(draft)
    kohya_training.set_length_and_rate(draft)
    tracker_settings.set_trackers(draft, "log_with", "log_tracker_name", "wandb_run_name")
    kohya_training.set_noise(draft)
    kohya_previews.set_previews(draft)
    common_values.set_seed(draft, "seed")
    common_values.set_name(draft, "output_name")
    compiled = common_values.is_on(draft.get("compile")) or str(draft.get("dynamo_backend") or "no").lower() not in (
        "no",
        "none",
    )
    keys = ["compile", "dynamo_backend", "torch_compile"]
    if compiled:
        draft.report_different(keys, {"memory.compile": "blocks"}, remarks.COMPILED)
    draft.report_unmatched(keys, remarks.OFF, off=True)
    memory_settings.set_swap(draft, "blocks_to_swap")


def _set_model(draft: Draft) -> None:
    script = draft.source.script
    module = str(draft.get("network_module") or "").split(".")[-1]
    if script and not script.endswith("_train_network.py"):
        model_settings.set_whole_model(draft, remarks.TRAINS_ALL(name=script))
    elif not module:
        model_settings.set_whole_model(draft, kohya_table.NO_MODULE)
    name = re.sub(r"_train(_network)?\.py$", "", script)
    kind, why = SCRIPTS.get(name, name), script
    if not kind and module in MODULES:
        kind, why = MODULES[module], f"network_module = {module!r}"
    kind, why = model_settings.refine_kind(*_find_variant(draft, kind, why), [draft.get("dit")])
    keys = ["task", "model_version", "edit", "edit_plus"]
    model_settings.set_family(draft, keys, kind, why if kind else remarks.BY_SCRIPT(tool=draft.tool.name))
    draft.report_unmatched(keys, Message("model.family names the architecture"), off=True)
    model_settings.set_model_path(draft, "dit", Message("this is the denoiser's own file"))
    kinds = {"vae": "vae", "t5": "t5", "text_encoder": "any|llm", "text_encoder1": "t5|llm", "text_encoder2": "clip"}
    model_settings.set_part_files(draft, kinds)
    draft.report_unmatched(("clip", "image_encoder"), NO_VIDEO)


def _find_variant(draft: Draft, kind: str, why: str) -> tuple[str, str]:
    """Return the variant of an architecture that the version, the task or a switch selects, and what shows it."""
    version = common_values.normalize_name(draft.get("model_version") or "")
    if kind == "flux2" and "klein" in version:
        kind, why = "flux2_klein", f"model_version = {draft.get('model_version')!r}"
    if kind == "qwen_image" and "edit" in version:
        kind = "qwen_image_edit_plus" if re.search("plus|25", version) else "qwen_image_edit"
        why = f"model_version = {draft.get('model_version')!r}"
    if kind in model_settings.CLIPS_FROM_PICTURES and "i2v" in (task := str(draft.get("task") or "")).lower():
        kind, why = f"{kind}_i2v", f"task = {task!r}"
    for key, edited in (("edit", "qwen_image_edit"), ("edit_plus", "qwen_image_edit_plus")):
        if kind == "qwen_image" and common_values.is_on(draft.get(key)):
            kind, why = edited, remarks.IS_ON(name=key)
    return kind, why


def list_tables(draft: Draft) -> list[str]:
    """Return the prefixes of the datasets' keys: datasets.0."""
    prefixes = {m[0] for key in draft.given if (m := re.match(r"datasets\.\d+\.", key))}
    return sorted(prefixes, key=lambda key: int(key.split(".")[1]))


def _set_folders(draft: Draft) -> None:
    for table in list_tables(draft):
        kind = "image_directory" if draft.has(f"{table}image_directory") else "video_directory"
        path = draft.get(f"{table}{kind}", read_string)
        if not path:
            continue
        repeats = read_positive(kohya_data.read_effective(draft, table, "num_repeats") or 1)
        folder = dataset_settings.count_images(draft, Folder(path, repeats), deep=False)
        draft.report_mapped(f"{table}{kind}", {}, remarks.SETS(setting=f"dataset.folders.{len(draft.folders)}.path"))
        draft.report_mapped(
            f"{table}num_repeats", {}, remarks.SETS(setting=f"dataset.folders.{len(draft.folders)}.repeats = {repeats}")
        )
        dataset_settings.set_control(
            draft, f"{table}control_directory", folder, f"dataset.folders.{len(draft.folders)}"
        )
        draft.folders.append(folder)
    draft.report_mapped(kohya_data.find_all_keys(draft, "num_repeats"), {}, remarks.IN_EACH_FOLDER)
    draft.report_mapped("dataset_config", {}, remarks.READ_TOO if list_tables(draft) else remarks.FILE_NOT_FOUND)
    if draft.has("dataset_config") and not list_tables(draft):
        kohya_data.set_absent_dataset(draft)


SMALL_ONES = Message(
    "musubi-tuner keeps the aspect ratio of small images and crops them to their bucket; this trainer limits it "
    "with dataset.max_aspect and scales images to their bucket"
)
STEP = 16
"""Step of musubi-tuner's buckets, in pixels."""


def _set_aspect(draft: Draft) -> None:
    """Set dataset.max_aspect to the widest of musubi-tuner's buckets, whose short side is half the resolution."""
    side = draft.settings.get("dataset.resolution")
    if not draft.settings.get("dataset.buckets") or not side:
        return
    short = max(STEP, side // 2 // STEP * STEP)
    widest = float(f"{side * side // short // STEP * STEP / short:.4g}")
    draft.assume(
        "dataset.max_aspect", common_values.clamp("dataset.max_aspect", widest), "enable_bucket", remarks.WIDEST_BUCKET
    )


def _set_pictures(draft: Draft) -> None:
    places = list_tables(draft)
    named = [place for place in places if draft.has(f"{place}image_directory") or draft.has(f"{place}video_directory")]
    keys, values = kohya_data.collect_values(draft, "resolution", named)
    if any(values):
        dataset_settings.set_resolutions(draft, keys, values)
    switches, chosen = kohya_data.collect_values(draft, "enable_bucket", places)
    dataset_settings.set_shared(draft, switches, chosen, "dataset.buckets", read_flag)
    kohya_data.set_upscale(draft, places, SMALL_ONES)
    _set_aspect(draft)
    lengths, given = kohya_data.collect_values(draft, "target_frames", places)
    parts, ways = kohya_data.collect_values(draft, "frame_extraction", places)
    named_ways = {str(way) for way in ways if way} or {"head"}
    dataset_settings.set_clips(
        draft,
        lengths,
        [read_whole(length) for value in given if value for length in read_list(value)],
        parts,
        {"head": "head", "chunk": "chunks"}.get(named_ways.pop()) if len(named_ways) == 1 else None,
        Message(
            "the lengths apply to every folder. musubi-tuner takes a piece of each length from a clip; this trainer "
            "takes the longest that fits"
        ),
    )
    keys = kohya_data.find_all_keys(draft, "caption_extension")
    if keys and all(str(draft.given[key]).lstrip(".").lower() in ("txt", "caption", "") for key in keys):
        draft.report_mapped(keys, {}, remarks.CAPTIONS_READ)
    elif keys:
        draft.report_unmatched(keys, remarks.RENAME_CAPTIONS)
        draft.todo.append(remarks.CAPTION_SUFFIX(suffix=draft.given[keys[0]]))


def recognise(source: Source) -> str:
    """Recognise a file by `dit`, by one of the tool's network modules or scripts, or by datasets without subsets."""
    data = source.data
    if source.kind not in ("toml", "command") or not isinstance(data, Mapping):
        return ""
    if source.kind == "command":
        return Message("the script {script} with --dit", script=source.script) if "dit" in data else ""
    if isinstance(data.get("datasets"), list):
        inner = {key.rsplit(".", 1)[-1] for key, _ in flatten_tables(data)}
        marks = inner & {"image_directory", "video_directory", "image_jsonl_file", "video_jsonl_file"}
        return remarks.TABLE_WITH(table="[[datasets]]", key=sorted(marks)[0]) if marks else ""
    keys = {key for _, key, _ in kohya_data.flatten_sections(data)}
    if "dit" in keys:
        return "dit"
    module = sd_scripts.find_module_name(data)
    if "pretrained_model_name_or_path" in keys or "model_train_type" in keys or "data" in data:
        return ""
    if module in MODULES and module not in kohya_training.MODULES:
        return f"network_module = {module}"
    if module in ("", "lora") and "network_dim" in keys:
        return remarks.BOTH(first="network_dim", second="learning_rate")
    return ""


TOOL = Tool(
    "musubi-tuner",
    "musubi-tuner 0.3",
    RULES,
    {
        "network_dim": 4,
        "network_alpha": 1.0,
        "learning_rate": 2e-6,
        "optimizer_type": "AdamW",
        "lr_scheduler": "constant",
        "max_train_steps": 1600,
        "batch_size": 1,
        "resolution": [960, 544],
        "enable_bucket": False,
        "gradient_checkpointing": False,
        "timestep_sampling": "sigma",
        "discrete_flow_shift": 1.0,
        "weighting_scheme": "none",
    },
    recognise,
    flatten,
    combine,
    loose=True,
)
