"""SimpleTuner: config.json and its data backends. Facts: SimpleTuner of August 2026."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .. import families
from ..common.text import quote
from ..errors import Message, Template
from . import (
    adapter_settings,
    common_values,
    dataset_settings,
    lycoris_classes,
    memory_settings,
    model_settings,
    objective_settings,
    optimizer_settings,
    preview_settings,
    remarks,
    target_modules,
    tracker_settings,
)
from .import_draft import Draft, Folder, Tool
from .readers import Unfit, read_flag, read_list, read_number, read_positive, read_string, read_whole
from .rules import JOINT, Rule, map_always, map_idle, map_immaterial, map_none, map_to
from .source_files import Source, flatten_tables

NO_VALIDATION = remarks.VALIDATION
STARTS = ("default", "gaussian", "pissa", "olora")
"""Initial values of a LoRA that ours has, which are peft's."""
NO_CONTROL = remarks.CONTROL_BY_HAND
BY_BACKENDS = Message("the data backends set this value")
NO_CLOUD = Message("this trainer reads images from folders on this machine")

RULES: dict[str, Rule] = {
    "model_type": JOINT,
    "model_family": JOINT,
    "model_flavour": JOINT,
    "pretrained_model_name_or_path": JOINT,
    "pretrained_transformer_model_name_or_path": JOINT,
    "pretrained_unet_model_name_or_path": JOINT,
    "pretrained_vae_model_name_or_path": JOINT,
    "pretrained_t5_model_name_or_path": map_none(remarks.OWN_ENCODERS),
    "revision": map_to("model.revision", read_string),
    "variant": map_idle(Message("this trainer prefers the files in full precision")),
    "prediction_type": JOINT,
    "base_model_precision": JOINT,
    "base_model_default_dtype": map_idle(remarks.DTYPE),
    "quantize_via": map_idle(),
    **{f"text_encoder_{i}_precision": map_idle(remarks.TEXT_FREED) for i in range(1, 5)},
    "mixed_precision": JOINT,
    "lora_type": JOINT,
    "lora_rank": JOINT,
    "lora_alpha": JOINT,
    "lora_dropout": map_to("adapter.dropout", read_number),
    "lora_init_type": map_to(
        "adapter.init",
        common_values.make_choice_reader(
            {name: name for name in STARTS}, Message("default, gaussian, pissa and olora")
        ),
    ),
    "lora_format": map_none(remarks.LAYOUTS, "diffusers"),
    "init_lora": map_to("adapter.init_from", read_string, remarks.START),
    "use_dora": JOINT,
    "lycoris_config": JOINT,
    "init_lokr_norm": map_none(remarks.BELONGS_TO(key="LoKr")),
    "peft_lora_mode": map_none(remarks.NOT_HERE, "standard"),
    "flux_lora_target": JOINT,
    "fuse_qkv_projections": map_idle(Message("q, k and v share one quantized input")),
    "controlnet": JOINT,
    "control": map_none(remarks.NO_CONTROLNET),
    "train_text_encoder": JOINT,
    "text_encoder_lr": JOINT,
    "optimizer": JOINT,
    "optimizer_config": JOINT,
    "optimizer_beta1": map_to("optimizer.beta1", read_number),
    "optimizer_beta2": map_to("optimizer.beta2", read_number),
    "adam_beta1": map_to("optimizer.beta1", read_number),
    "adam_beta2": map_to("optimizer.beta2", read_number),
    "adam_weight_decay": map_to("optimizer.weight_decay", read_number),
    "adam_epsilon": map_to("optimizer.eps", read_number),
    "adam_bfloat16": map_idle(remarks.ROUNDING),
    "optimizer_release_gradients": map_none(remarks.SUMMED),
    "optimizer_cpu_offload_method": map_none(Message("the optimizer state stays on the device of the LoRA"), "none"),
    "optimizer_offload_gradients": map_idle(),
    "fuse_optimizer": map_idle(),
    "learning_rate": JOINT,
    "lr_scale": JOINT,
    "lr_scale_sqrt": JOINT,
    "lr_scheduler": JOINT,
    "lr_warmup_steps": JOINT,
    "lr_num_cycles": JOINT,
    "lr_power": JOINT,
    "lr_end": JOINT,
    "max_grad_norm": JOINT,
    "grad_clip_method": JOINT,
    "max_train_steps": JOINT,
    "num_train_epochs": JOINT,
    "ignore_final_epochs": map_idle(remarks.END),
    "train_batch_size": JOINT,
    "num_processes": JOINT,
    "gradient_accumulation_steps": map_to("train.accumulate", read_whole),
    "gradient_checkpointing": map_to("memory.gradient_checkpointing", read_flag),
    "gradient_checkpointing_interval": map_none(Message("this trainer recomputes every block"), 1),
    "seed": JOINT,
    "seed_for_each_device": map_idle(Message("the noise depends on the sample, not on the process")),
    **dict.fromkeys(("use_ema", "ema_decay", "ema_update_interval"), JOINT),
    **dict.fromkeys(
        ("ema_device", "ema_cpu_only", "ema_foreach_disable", "ema_validation"),
        map_idle(remarks.BELONGS_TO(key="use_ema")),
    ),
    "snr_gamma": JOINT,
    "use_soft_min_snr": map_none(
        Message("SimpleTuner uses a formula of its own; see objective.weighting = 'soft_min_snr'")
    ),
    **dict.fromkeys(("loss_type", "huber_schedule", "huber_c"), JOINT),
    "noise_offset": map_none(objective_settings.NO_NOISE),
    "noise_offset_probability": map_idle(remarks.BELONGS_TO(key="noise_offset")),
    "offset_noise": map_none(
        Message("SimpleTuner uses it for a share of the samples, but objective.noise_offset applies to all samples")
    ),
    "conditioning_multidataset_sampling": map_none(NO_CONTROL, "random", "combined"),
    "input_perturbation": JOINT,
    "input_perturbation_steps": JOINT,
    "rescale_betas_zero_snr": JOINT,
    "disable_segmented_timestep_sampling": map_idle(remarks.EACH_TIMESTEP),
    "flow_schedule_shift": JOINT,
    "flow_schedule_auto_shift": JOINT,
    "flow_sigmoid_scale": JOINT,
    "flow_use_uniform_schedule": JOINT,
    **dict.fromkeys(("flow_use_beta_schedule", "flow_beta_schedule_alpha", "flow_beta_schedule_beta"), JOINT),
    "flux_fast_schedule": map_none(remarks.TIMESTEPS),
    "flux_guidance_mode": map_none(
        Message("this trainer trains with one guidance value: objective.guidance"), "constant"
    ),
    "flux_guidance_value": map_to("objective.guidance", read_number),
    "flux_guidance_min": map_idle(remarks.BELONGS_TO(key="flux_guidance_mode")),
    "flux_guidance_max": map_idle(remarks.BELONGS_TO(key="flux_guidance_mode")),
    "flux_attention_masked_training": map_none(remarks.OWN_ATTENTION),
    "t5_padding": map_none(remarks.PADDING),
    "tokenizer_max_length": map_none(remarks.PROMPT_LENGTH),
    "caption_dropout_probability": map_to("dataset.caption_dropout", read_number),
    "resolution": JOINT,
    "resolution_type": JOINT,
    "aspect_bucket_rounding": map_idle(remarks.BUCKET_STEP),
    "aspect_bucket_alignment": map_to("dataset.bucket_step", read_whole),
    "minimum_image_size": map_none(remarks.UPSCALE),
    "maximum_image_size": map_none(remarks.SCALED),
    "target_downsample_size": map_none(remarks.SCALED),
    "disable_bucket_pruning": map_always(Message("this trainer uses every image in every epoch")),
    "caption_strategy": JOINT,
    "instance_prompt": JOINT,
    "data_backend_config": JOINT,
    "data_backend_sampling": map_none(remarks.FOLDER_WEIGHTS, "auto-weighting"),
    "delete_unwanted_images": map_immaterial(remarks.NEVER_DELETED),
    "delete_problematic_images": map_immaterial(remarks.NEVER_DELETED),
    "output_dir": JOINT,
    "tracker_run_name": JOINT,
    "checkpoint_step_interval": JOINT,
    "checkpointing_steps": JOINT,
    "checkpoint_epoch_interval": JOINT,
    "checkpoints_total_limit": JOINT,
    "resume_from_checkpoint": map_none(Message("`lora-fp8 resume` continues only runs of this trainer"), "latest"),
    "validation_prompt": JOINT,
    "validation_prompt_library": map_none(remarks.PROMPTS_WRITTEN),
    "user_prompt_library": map_none(remarks.PROMPTS_WRITTEN),
    "validation_negative_prompt": JOINT,
    "validation_guidance": JOINT,
    "validation_guidance_real": map_none(
        Message("this trainer draws previews with one guidance value: preview.guidance"), 1, 1.0
    ),
    "validation_adapter_strength": map_none(remarks.PREVIEW_STRENGTH, 1.0),
    "validation_guidance_rescale": map_none(remarks.NO_RESCALE),
    "validation_num_inference_steps": JOINT,
    "validation_num_video_frames": JOINT,
    "validation_resolution": JOINT,
    "validation_seed": JOINT,
    "validation_steps": JOINT,
    "validation_step_interval": JOINT,
    "validation_epoch_interval": JOINT,
    "validation_on_startup": JOINT,
    "validation_disable": JOINT,
    "num_validation_images": map_none(Message("this trainer draws one preview per prompt"), 1),
    **dict.fromkeys(
        ("validation_torch_compile", "validation_torch_compile_mode", "validation_randomize", "validation_seed_source")
        + ("validation_disable_unconditional", "validation_noise_scheduler", "validation_using_datasets")
        + ("validation_method", "validation_preview", "validation_preview_steps")
        + ("validation_multigpu", "validation_no_cfg_until_timestep", "validation_adapter_path"),
        map_idle(Message("this setting is about how SimpleTuner draws previews")),
    ),
    **dict.fromkeys(
        ("num_eval_images", "eval_steps_interval", "eval_epoch_interval", "eval_timesteps", "eval_dataset_pooling")
        + ("eval_dataset_id", "evaluation_type", "pretrained_evaluation_model_name_or_path", "eval_loss_disable"),
        map_idle(NO_VALIDATION),
    ),
    **dict.fromkeys(
        ("logging_dir", "webhook_config", "webhook_reporting_interval")
        + ("disable_benchmark", "print_filenames", "print_sampler_statistics"),
        map_idle(remarks.LOGGING),
    ),
    **dict.fromkeys(("report_to", "tracker_project_name"), JOINT),
    "webhook_config.**": map_idle(remarks.LOGGING),
    **dict.fromkeys(
        ("push_to_hub", "push_checkpoints_to_hub", "hub_model_id", "hub_token", "push_to_hub_background")
        + ("model_card_private", "model_card_safe_for_work", "model_card_note", "publishing_config"),
        map_none(remarks.UPLOAD),
    ),
    "publishing_config.**": map_none(remarks.UPLOAD),
    **dict.fromkeys(("enable_group_offload", "ramtorch", "ramtorch_transformer_percent"), JOINT),
    "musubi_blocks_to_swap": JOINT,
    **dict.fromkeys(("offload_during_startup", "offload_during_save"), map_idle()),
    **dict.fromkeys(
        ("group_offload_type", "group_offload_blocks_per_group", "group_offload_use_stream", "ramtorch_target_modules")
        + ("group_offload_to_disk_path", "ramtorch_text_encoder", "ramtorch_vae"),
        map_idle(Message("this setting is used only by offloading")),
    ),
    "attention_mechanism": map_immaterial(remarks.ATTENTION),
    "sageattention_usage": map_idle(remarks.BELONGS_TO(key="attention_mechanism")),
    "dynamo_backend": JOINT,
    "dynamo_mode": map_idle(remarks.ONE_COMPILE_MODE),
    "dynamo_fullgraph": map_idle(),
    "dynamo_dynamic": map_idle(),
    "dynamo_use_regional_compilation": map_idle(Message("memory.compile = 'blocks' is regional compilation")),
    **dict.fromkeys(
        ("cache_dir", "cache_dir_text", "cache_dir_vae", "compress_disk_cache", "preserve_data_backend_cache")
        + ("vae_cache_ondemand", "vae_cache_scan_behaviour", "vae_cache_disable", "skip_file_discovery")
        + ("aspect_bucket_disable_rebuild", "override_dataset_config", "keep_vae_loaded", "ignore_missing_files"),
        map_idle(remarks.OTHER_CACHE),
    ),
    **dict.fromkeys(
        ("vae_batch_size", "vae_dtype", "vae_enable_tiling", "vae_enable_slicing", "vae_enable_patch_conv")
        + ("write_batch_size", "read_batch_size", "image_processing_batch_size", "enable_multiprocessing")
        + ("max_workers", "aws_max_pool_connections", "torch_num_threads", "dataloader_prefetch")
        + ("dataloader_prefetch_qlen", "aspect_bucket_worker_count", "metadata_update_interval", "allow_tf32")
        + ("disable_tf32", "set_grads_to_none", "i_know_what_i_am_doing", "accelerator_cache_clear_interval")
        + (
            "fully_unload_text_encoder",
            "save_text_encoder",
            "text_encoder_limit",
            "disable_accelerator",
            "num_machines",
        )
        + ("hub_download_timeout", "local_rank", "delete_model_after_load", "text_encoder_batch_size"),
        map_idle(),
    ),
    "data.*.id": map_idle(Message("this is the backend's name")),
    "data.*.type": JOINT,
    "data.*.dataset_type": JOINT,
    "data.*.default": map_idle(Message("this setting is used only by caches")),
    "data.*.disabled": JOINT,
    "data.*.disable": JOINT,
    "data.*.instance_data_dir": JOINT,
    "data.*.repeats": JOINT,
    "data.*.resolution": JOINT,
    "data.*.resolution_type": JOINT,
    "data.*.crop": JOINT,
    "data.*.crop_style": map_none(remarks.CENTER_CROP, "center", "centre"),
    "data.*.crop_aspect": JOINT,
    "data.*.crop_aspect_buckets": map_none(remarks.BUCKETS),
    "data.*.minimum_image_size": map_none(remarks.UPSCALE),
    "data.*.maximum_image_size": map_none(remarks.SCALED),
    "data.*.target_downsample_size": map_none(remarks.SCALED),
    "data.*.minimum_aspect_ratio": map_none(remarks.MAX_ASPECT),
    "data.*.maximum_aspect_ratio": map_none(remarks.MAX_ASPECT),
    "data.*.caption_strategy": JOINT,
    "data.*.instance_prompt": JOINT,
    "data.*.prepend_instance_prompt": JOINT,
    "data.*.only_instance_prompt": JOINT,
    "data.*.disable_multiline_split": JOINT,
    "data.*.caption_shuffle.enable": JOINT,
    "data.*.caption_shuffle.count": JOINT,
    "data.*.caption_shuffle.position_start": JOINT,
    "data.*.caption_shuffle.split_on": JOINT,
    "data.*.caption_shuffle.**": map_idle(Message("this trainer shuffles tags with the job's seed")),
    "data.*.probability": map_none(remarks.FOLDER_WEIGHTS, 1, 1.0),
    "data.*.metadata_backend": map_none(Message("this trainer reads the images themselves"), "discovery", "json"),
    "data.*.is_regularisation_data": JOINT,
    "data.*.is_regularization_data": JOINT,
    "data.*.conditioning_data": map_none(NO_CONTROL),
    "data.*.conditioning.**": map_none(NO_CONTROL),
    "data.*.conditioning_type": map_none(NO_CONTROL),
    "data.*.conditioning": map_none(NO_CONTROL),
    "data.*.video.**": map_none(dataset_settings.NO_CLIPS),
    "data.*.parquet.**": map_none(remarks.CAPTION_FILES),
    **{
        f"data.*.{name}": map_idle(remarks.OTHER_CACHE)
        for name in ("cache_dir", "cache_dir_vae", "vae_cache_clear_each_epoch", "write_batch_size", "text_embeds")
        + ("image_embeds", "preserve_data_backend_cache", "skip_file_discovery", "hash_filenames", "vae_cache_disable")
    },
    **{
        f"data.*.aws_{name}": map_none(NO_CLOUD)
        for name in ("bucket_name", "region_name", "endpoint_url", "access_key_id", "secret_access_key", "data_prefix")
    },
}

FAMILIES = {
    "sd1x": "sd15",
    "legacy": "sd15",
    "sd2x": "sd2",
    "sdxl": "sdxl",
    "sd3": "sd3",
    "flux": "flux",
    "flux2": "flux2",
    "qwen_image": "qwen_image",
    "z_image": "z_image",
    "chroma": "chroma",
    "lumina2": "lumina2",
    "krea2": "krea2",
    "kolors": "kolors",
    "hidream": "hidream",
    "sana": "sana",
    "auraflow": "auraflow",
    "anima": "anima",
    "ernie": "ernie_image",
    "wan": "wan",
    "ltxvideo": "ltx_video",
    "hunyuanvideo": "hunyuan_video_1_5",
}
DENOISERS = ("pretrained_transformer_model_name_or_path", "pretrained_unet_model_name_or_path")
"""Keys of a denoiser with a file of its own."""
BASES = {
    ("flux", ""): "black-forest-labs/FLUX.1-dev",
    ("flux", "dev"): "black-forest-labs/FLUX.1-dev",
    ("flux", "schnell"): "black-forest-labs/FLUX.1-schnell",
    ("sdxl", ""): "stabilityai/stable-diffusion-xl-base-1.0",
    ("sdxl", "base-1.0"): "stabilityai/stable-diffusion-xl-base-1.0",
}
"""What it downloads if a file names only the family and the flavour."""


def flatten(draft: Draft) -> Iterable[tuple[str, str, Any]]:
    """Yield the settings, and those of the data backends with the prefix `data.`."""
    data = draft.source.data
    if isinstance(data, list):
        yield from ((key, f"data.{key}", value) for key, value in flatten_tables(data))
        return
    yield from ((key, key, value) for key, value in flatten_tables(data))
    plain = {str(key).removeprefix("--"): value for key, value in data.items()}
    path = plain.get("data_backend_config")
    inner = draft.refer("data_backend_config", str(path)) if path else None
    if isinstance(inner, list):
        name = re.split(r"[/\\]", str(path))[-1]
        yield from ((f"{name}: {key}", f"data.{key}", value) for key, value in flatten_tables(inner))


def combine(draft: Draft) -> None:
    """Convert all settings of a job."""
    if draft.has("model_family") or isinstance(draft.source.data, dict):
        _set_model(draft)
        _set_adapter(draft)
        _set_precision(draft)
    else:
        model_settings.set_family(
            draft,
            (),
            "",
            Message("the file describes only the images; import {file} with this file beside it", file="config.json"),
        )
        model_settings.set_model_path(draft, "pretrained_model_name_or_path")
        draft.defaults.clear()
    _set_folders(draft)
    if draft.defaults:
        _set_length_and_rate(draft)
        _set_timesteps(draft)
        _set_previews(draft)
        common_values.set_seed(draft, "seed")
        _set_names(draft)
        tracker_settings.set_trackers(draft, "report_to", "tracker_project_name")


def _set_model(draft: Draft) -> None:
    if common_values.is_on(draft.get("controlnet")):
        model_settings.refuse(draft, remarks.CONTROLNET)
    kind = str(draft.get("model_family") or "")
    flavour = str(draft.get("model_flavour") or "")
    known = _find_variant(FAMILIES.get(kind, kind), flavour)
    why = f"model_family = {kind!r}" if kind else Message("the file has no model_family")
    model_settings.set_family(
        draft, "model_family", *model_settings.refine_kind(known, why, [draft.get("pretrained_model_name_or_path")])
    )
    if draft.get("model_type") in (None, "lora"):
        draft.report_mapped("model_type", {}, remarks.A_LORA)
    else:
        model_settings.set_whole_model(draft, "", "model_type")
    _set_path(draft, kind, flavour)
    draft.report_mapped("model_flavour", {}, Message("model.path names the model"))
    draft.report_unmatched("controlnet", remarks.OFF, off=True)
    draft.report_unmatched(DENOISERS, remarks.ANOTHER_PART, off=True)


def _find_variant(kind: str, flavour: str) -> str:
    """Return the variant of an architecture that a flavour selects, or the architecture itself."""
    if kind == "flux" and "kontext" in flavour:
        return "flux_kontext"
    if kind == "flux2" and "klein" in flavour:
        return "flux2_klein"
    if kind == "qwen_image" and "edit" in flavour:
        return "qwen_image_edit_plus" if re.search("v2|25(09|11)", flavour) else "qwen_image_edit"
    if kind in model_settings.CLIPS_FROM_PICTURES and "i2v" in flavour:
        return f"{kind}_i2v"
    return kind


def _set_path(draft: Draft, kind: str, flavour: str) -> None:
    """Set model.path and model.components; without a path, the model that SimpleTuner takes for the flavour."""
    denoiser = next((key for key in DENOISERS if draft.has(key)), "")
    whole_model = "pretrained_model_name_or_path"
    if denoiser:
        draft.report_mapped(whole_model, {"model.components": draft.get(whole_model, read_string) or ""})
        model_settings.set_model_path(draft, denoiser)
    elif draft.has(whole_model):
        model_settings.set_model_path(draft, whole_model)
    elif (kind, flavour) in BASES:
        draft.set("model.path", BASES[kind, flavour], Message("SimpleTuner uses this model if no path is given"))
    else:
        model_settings.set_model_path(draft, whole_model)
    model_settings.set_part_files(draft, {"pretrained_vae_model_name_or_path": "vae"})


NOT_CONVERTED = Template(
    "not converted: {names}. In this trainer all target modules share one kind of adapter and one factor; "
    "adapter.ranks sets their ranks"
)


def _set_lycoris(draft: Draft, keys: list[str], inner: dict[str, Any], kind: str) -> None:
    """Set the adapter from LyCORIS' own settings file, whose rank and alpha override the options."""
    full = inner.get("full_matrix", False)
    made: dict[str, Any] = {"adapter.type": kind}
    if kind == "lokr":
        made |= {
            "adapter.factor": adapter_settings.read_lokr_factor(inner.get("factor", -1)),
            "adapter.decompose_both": common_values.is_on(inner.get("decompose_both")),
        }
    rank = common_values.parse_whole("linear_dim", inner.get("linear_dim", 4))
    if kind == "oft":
        made["adapter.block_size"] = max(rank, 2)
    else:
        made["adapter.rank"] = adapter_settings.choose_lokr_rank(rank, full) if kind == "lokr" else rank
        made["adapter.alpha"] = float(common_values.parse_whole("linear_alpha", inner.get("linear_alpha", 1)))
    if common_values.is_on(inner.get("rs_lora")):
        made["adapter.rank_stabilized"] = True
    for name in ("rank_dropout", "module_dropout"):
        if share := common_values.parse_decimal(name, inner.get(name) or 0.0):
            made[f"adapter.{name}"] = share
    if (
        kind in ("lokr", "loha")
        and "adapter.rank_dropout" in made
        and common_values.is_on(inner.get("rank_dropout_scale"))
    ):
        made["adapter.rank_dropout_scale"] = True
    preset = lycoris_classes.convert_preset(draft.family, inner, kind)
    made |= preset.settings
    known = {"rank_dropout", "rank_dropout_scale", "module_dropout", "rs_lora", "apply_preset"}
    known |= {"algo", "full_matrix", "factor", "decompose_both", "linear_dim", "linear_alpha", "multiplier"}
    known.add("bypass_mode")  # how the same sum is computed
    if rest := sorted([*(inner.keys() - known), *preset.unread]):
        draft.report_different("lycoris_config", made, NOT_CONVERTED(names=", ".join(rest)))
    draft.report_mapped(keys, made)
    draft.report_unmatched(["use_dora", "lora_rank", "lora_alpha"], remarks.COUNTS(key="lycoris_config"), off=True)


def _set_adapter(draft: Draft) -> None:
    kind, lycoris = "lora", None
    if draft.get("lora_type") == "lycoris":
        inner = draft.get("lycoris_config", read_string)
        lycoris = draft.refer("lycoris_config", inner) if inner else None
        kind = common_values.normalize_name(lycoris.get("algo")) if isinstance(lycoris, dict) else "lycoris"
        kind = {"locon": "lora"}.get(kind, kind)
        if kind == "lora" and isinstance(lycoris, dict) and common_values.is_on(lycoris.pop("dora_wd", None)):
            kind = "dora"
    elif common_values.is_on(draft.get("use_dora")):
        kind = "dora"
    keys = ["lora_type", "lycoris_config"] + (["use_dora"] if kind == "dora" else [])
    if isinstance(lycoris, dict) and (own := adapter_settings.find_type(kind)):
        _set_lycoris(draft, keys, lycoris, own)
        return
    adapter_settings.set_type(draft, keys, kind)
    target_modules.set_simpletuner_targets(draft)
    draft.report_unmatched("flux_lora_target", remarks.TARGETS)
    draft.report_unmatched("use_dora", remarks.OFF, off=True)
    rank = draft.get("lora_rank", read_whole)
    draft.report_mapped("lora_rank", {"adapter.rank": rank})
    if draft.has("lora_alpha"):
        draft.report_mapped("lora_alpha", {"adapter.alpha": draft.get("lora_alpha", read_number)})
    else:
        draft.set("adapter.alpha", float(rank), Message("not in the file; alpha equals the rank, as in SimpleTuner"))


def _set_precision(draft: Draft) -> None:
    model_settings.set_dtype(draft, "mixed_precision")
    model_settings.set_storage(draft, ["base_model_precision"], draft.get("base_model_precision"), "SimpleTuner")
    backend = str(draft.get("dynamo_backend") or "no").lower()
    if backend not in ("no", "none"):
        draft.report_different("dynamo_backend", {"memory.compile": "blocks"}, remarks.COMPILED)
    draft.report_unmatched("dynamo_backend", remarks.OFF, off=True)
    _set_offload(draft)


def _set_offload(draft: Draft) -> None:
    """Set memory.offload from RamTorch, group offloading or swapped blocks, whichever is used."""
    if common_values.is_on(draft.get("ramtorch")):
        percent = draft.get("ramtorch_transformer_percent", read_number)
        share = 1.0 if not draft.has("ramtorch_transformer_percent") else percent / 100
        note = Message(
            "SimpleTuner offloads a share of the linear layers; this trainer offloads that share of the frozen weights"
        )
        memory_settings.set_offload(draft, ["ramtorch", "ramtorch_transformer_percent"], share, note)
    elif common_values.is_on(draft.get("enable_group_offload")):
        memory_settings.set_offload(
            draft,
            "enable_group_offload",
            1.0,
            Message("SimpleTuner offloads all blocks; this trainer offloads all frozen weights"),
        )
    else:
        memory_settings.set_swap(draft, "musubi_blocks_to_swap")
    rest = ["ramtorch", "ramtorch_transformer_percent", "enable_group_offload", "musubi_blocks_to_swap"]
    draft.report_unmatched(rest, Message("this setting is off, or another way of offloading is on"), off=True)


def _set_folders(draft: Draft) -> None:
    tables = sorted(
        {m[0] for key in draft.given if (m := re.match(r"data\.\d+\.", key))}, key=lambda key: int(key.split(".")[1])
    )
    conditioning = _find_conditioning(draft, tables)
    kept: list[str] = []
    for table in tables:
        if not _report_other(draft, table, conditioning):
            kept.append(table)
            _add_folder(draft, table, conditioning)
    dataset_settings.set_unmasked(draft)
    draft.report_mapped("data_backend_config", {}, remarks.READ_TOO if tables else remarks.FILE_NOT_FOUND)
    if draft.has("data_backend_config") and not tables:
        draft.folders = [Folder("TODO")]
        draft.add_todo(
            "dataset.folders",
            remarks.FOLDERS_OF(file=draft.get("data_backend_config")),
        )
    _set_sizes(draft, kept)
    _set_shuffling(draft, kept)
    draft.report_unmatched(["caption_strategy", "instance_prompt"], BY_BACKENDS, off=True)


@dataclass(frozen=True)
class _Conditioning:
    """The local backends of conditioning images.

    Attributes:
        tables: the prefix of each backend's keys, by its id.
        settings: that prefix -> our setting for its images, "mask" or "control", if there is one.
    """

    tables: dict[str, str]
    settings: dict[str, str]


def _find_conditioning(draft: Draft, tables: list[str]) -> _Conditioning:
    """Find the backends with masks, and those with control images if the family takes any."""
    by_type = {
        str(draft.get(f"{table}id")): table
        for table in tables
        if draft.get(f"{table}dataset_type") == "conditioning" and draft.get(f"{table}type") in (None, "local")
    }
    edits = not draft.family or draft.family in families.list_families() and any(families.get(draft.family).controls)
    settings: dict[str, str] = {}
    for table in by_type.values():
        kind = str(draft.get(f"{table}conditioning_type"))
        if kind == "mask":
            settings[table] = "mask"
        elif edits and kind.startswith("reference"):
            settings[table] = "control"
    return _Conditioning(by_type, settings)


def _report_other(draft: Draft, table: str, conditioning: _Conditioning) -> bool:
    """Report a backend that is no folder of images to train on; return False if it is one."""
    own = [key for key in draft.given if key.startswith(table)]
    kind = str(draft.get(f"{table}dataset_type") or "image")
    disabled = common_values.is_on(draft.get(f"{table}disabled")) or common_values.is_on(draft.get(f"{table}disable"))
    path = draft.get(f"{table}instance_data_dir", read_string)
    used_for = conditioning.settings.get(table)
    if kind in ("text_embeds", "image_embeds") or disabled:
        draft.report_unmatched(own, Message("this backend is off") if disabled else remarks.OTHER_CACHE, off=True)
    elif used_for == "mask":
        draft.report_mapped(own, {}, Message("these are the masks of the backends that name this one"))
    elif used_for == "control":
        draft.report_mapped(own, {}, Message("these are the control images of the backends that name this one"))
    elif kind != "image" or draft.get(f"{table}type") not in (None, "local") or not path:
        draft.report_unmatched(own, NO_CLOUD if kind == "image" else Message("only backends of images are converted"))
        draft.todo.append(
            Message("dataset.folders: the backend {name} was not converted", name=repr(draft.get(f"{table}id")))
        )
    else:
        return False
    return True


def _add_folder(draft: Draft, table: str, conditioning: _Conditioning) -> None:
    """Add a backend's folder to the draft, with its masks or control images, and report the backend's own keys."""
    at = f"dataset.folders.{len(draft.folders)}"
    # SimpleTuner counts repetitions after the first use: with 0, each image is used once.
    repeats = max(0, read_whole(draft.get(f"{table}repeats") or 0)) + 1
    folder = dataset_settings.count_images(
        draft, Folder(draft.get(f"{table}instance_data_dir", read_string), repeats), deep=True
    )
    draft.report_mapped(
        [f"{table}instance_data_dir", f"{table}type", f"{table}dataset_type"], {}, remarks.SETS(setting=f"{at}.path")
    )
    if draft.has(f"{table}repeats"):
        note = Message(
            "{at}.repeats = {repeats}: SimpleTuner counts repeats after the first use, and this trainer counts "
            "all uses",
            at=at,
            repeats=repeats,
        )
        draft.report_mapped(f"{table}repeats", {}, note)
    names = draft.get(f"{table}conditioning_data", read_list) or []
    named = conditioning.tables.get(str(names[0])) if len(names) == 1 else None
    setting = conditioning.settings.get(named) if named else None
    if setting and (path := draft.get(f"{named}instance_data_dir", read_string)):
        setattr(folder, setting, dataset_settings.as_mask_folder(path) if setting == "mask" else path)
        draft.report_mapped(f"{table}conditioning_data", {}, remarks.SETS(setting=f"{at}.{setting}"))
    reg = [f"{table}is_regularisation_data", f"{table}is_regularization_data"]
    if any(common_values.is_on(draft.get(key)) for key in reg):
        folder.regularization = True
        draft.report_mapped(reg, {"objective.prior_for_regularization": True}, remarks.BASE_AS_TARGET)
    draft.report_unmatched(reg, remarks.OFF, off=True)
    _set_captions(draft, table, folder, at)
    draft.report_unmatched([f"{table}disabled", f"{table}disable"], remarks.OFF, off=True)
    draft.folders.append(folder)


LINES = Message("each line of a caption file is one caption")


def _set_shuffling(draft: Draft, tables: list[str]) -> None:
    """Set dataset.shuffle_tags and what belongs to it, with one value for all backends."""
    keys, values = draft.collect("disable_multiline_split", tables)
    if any(value is not None for value in values):
        values = [False if value is None else value for value in values]
        dataset_settings.set_shared(
            draft, keys, values, "dataset.caption_lines", lambda value: "join" if read_flag(value) else "one"
        )
    elif tables:
        draft.assume("dataset.caption_lines", "one", "disable_multiline_split", LINES)
    dataset_settings.set_shared(
        draft, *draft.collect("caption_shuffle.enable", tables), "dataset.shuffle_tags", read_flag
    )
    for name, setting, read in (
        ("caption_shuffle.count", "dataset.caption_variants", read_whole),
        ("caption_shuffle.position_start", "dataset.keep_tokens", read_whole),
        ("caption_shuffle.split_on", "dataset.tag_separator", _read_separator),
    ):
        keys, values = draft.collect(name, tables)
        if draft.settings.get("dataset.shuffle_tags"):
            dataset_settings.set_shared(draft, keys, values, setting, read)
        draft.report_unmatched(keys, remarks.UNUSED_WITHOUT(key="caption_shuffle"), off=True)


def _read_separator(value: Any) -> str:
    separator = {"comma": ",", "space": " ", "period": "."}.get(str(value))
    if separator is None:
        raise Unfit(Message("{value} is not one of comma, space and period", value=quote(value)))
    return separator


def _set_captions(draft: Draft, table: str, folder: Folder, at: str) -> None:
    strategy = str(draft.get(f"{table}caption_strategy") or draft.get("caption_strategy") or "filename")
    prompt = str(draft.get(f"{table}instance_prompt") or draft.get("instance_prompt") or "")
    key = f"{table}caption_strategy"
    alone = strategy in ("instanceprompt", "instance_prompt") or common_values.is_on(
        draft.get(f"{table}only_instance_prompt")
    )
    if alone:
        folder.trigger, folder.trigger_is_caption = prompt, True
        note: str = Message(
            "{at}.trigger is the caption, with missing_caption = 'trigger'; caption files beside the images are "
            "still read",
            at=at,
        )
        draft.report_different([key, f"{table}instance_prompt", f"{table}only_instance_prompt"], {}, note)
    elif strategy == "textfile":
        draft.report_mapped(key, {}, Message("captions are .txt files beside the images"))
    else:
        draft.report_unmatched(
            key,
            Message(
                "SimpleTuner takes captions from {strategy}; this trainer reads .txt files beside the images",
                strategy=strategy,
            ),
        )
        draft.todo.append(
            Message(
                "{key}: write the captions as .txt files beside the images; SimpleTuner takes them from {strategy}",
                key=at,
                strategy=strategy,
            )
        )
    if common_values.is_on(draft.get(f"{table}prepend_instance_prompt")) and prompt:
        folder.trigger = prompt
        note = Message("{key}: this trainer adds it only to captions that lack it", key=f"{at}.trigger")
        draft.report_different([f"{table}prepend_instance_prompt", f"{table}instance_prompt"], {}, note)
    rest = [f"{table}{name}" for name in ("instance_prompt", "prepend_instance_prompt", "only_instance_prompt")]
    draft.report_unmatched(rest, Message("this setting is not used"), off=True)


def _set_sizes(draft: Draft, tables: list[str]) -> None:
    keys, sides = [], []
    notes: list[str] = []
    for table in tables or [""]:
        key = f"{table}resolution" if draft.has(f"{table}resolution") else "resolution"
        value = draft.get(key, read_number)
        kind = draft.get(f"{table}resolution_type") or draft.get("resolution_type") or "pixel_area"
        if not value:
            continue
        side, note = _compute_square_side(value, kind)
        keys.append(key)
        sides.append(side)
        notes += [note] if note else []
    if sides:
        dataset_settings.set_resolutions(draft, list(dict.fromkeys(keys)), sides, remarks.join(notes))
    kinds = ["resolution_type", *(f"{table}resolution_type" for table in tables)]
    draft.report_mapped(kinds, {}, Message("dataset.resolution is the side of the square with the training area"))
    draft.report_unmatched("resolution", BY_BACKENDS, off=True)
    _set_buckets(draft, tables)


def _compute_square_side(value: float, kind: Any) -> tuple[int, str]:
    """Return the side of the square with the area of a resolution, and a remark if the two are not the same number.

    Args:
        value: megapixels if `kind` is "area", else pixels.
        kind: the resolution's type.
    """
    if value < 0:
        raise Unfit(Message("{value} is not a resolution", value=f"{value:g}"))
    if kind == "area":
        side = round(math.sqrt(value * 1e6) / 64) * 64
        return side, Message(
            "{count} megapixels are the area of a square with side {side}", count=f"{value:g}", side=side
        )
    if kind == "pixel":
        return round(value), Message(
            "this is the shorter side in SimpleTuner, and the side of a square of the same area in this trainer"
        )
    return round(value), ""


def _set_buckets(draft: Draft, tables: list[str]) -> None:
    """Set dataset.buckets, which is off if every backend crops its images to squares."""
    keys = [f"{table}crop" for table in tables] + [f"{table}crop_aspect" for table in tables]
    square = [
        common_values.is_on(draft.get(f"{table}crop")) and (draft.get(f"{table}crop_aspect") or "square") == "square"
        for table in tables
    ]
    if all(square) and square:
        draft.report_mapped(keys, {"dataset.buckets": False})
    elif any(square):
        draft.report_different(keys, {"dataset.buckets": True}, remarks.FOR_ALL_FOLDERS)
    elif tables:
        note = Message(
            "this trainer crops images to their bucket, by less than one dataset.bucket_step where the bucket fits"
        )
        draft.report_different(keys, {"dataset.buckets": True}, note)
    if not all(square):
        dataset_settings.keep_aspects(draft, "crop")


def _set_length_and_rate(draft: Draft) -> None:
    batch, processes = read_positive(draft.get("train_batch_size") or 1), read_positive(draft.get("num_processes") or 1)
    note = remarks.BATCH_OF_ALL(batch=batch, processes=processes) if processes > 1 else ""
    (draft.report_different if note else draft.report_mapped)(
        ["train_batch_size", "num_processes"], {"train.batch_size": batch * processes}, note
    )
    accumulate = read_positive(draft.get("gradient_accumulation_steps") or 1)
    per_epoch = dataset_settings.count_steps_per_epoch(draft, batch, accumulate, processes)
    steps, epochs = read_whole(draft.get("max_train_steps") or 0), read_whole(draft.get("num_train_epochs") or 0)
    if steps > 0:
        draft.report_mapped("max_train_steps", {"train.steps": steps})
        draft.report_unmatched("num_train_epochs", remarks.COUNTS(key="max_train_steps"), off=True)
    elif epochs > 0:
        dataset_settings.set_steps_from_epochs(draft, "num_train_epochs", epochs, per_epoch, batch)
    draft.report_unmatched(["max_train_steps", "num_train_epochs"], remarks.OTHER_KEY, off=True)
    _set_rate(draft, batch, accumulate, processes)
    _set_clipping(draft)
    _set_intervals(draft, per_epoch)


def _set_rate(draft: Draft, batch: int, accumulate: int, processes: int) -> None:
    """Set the optimizer, its learning rates with their scale, and the schedule."""
    scale, note = 1.0, ""
    if common_values.is_on(draft.get("lr_scale")):
        factor = processes * accumulate * batch
        root = common_values.is_on(draft.get("lr_scale_sqrt"))
        scale = math.sqrt(factor) if root else float(factor)
        values = {"processes": processes, "accumulate": accumulate, "batch": batch}
        counts = Message("{processes} processes x {accumulate} accumulation steps x batch size {batch}", **values)
        note = Message("the learning rate is multiplied by {number}", number=counts)
        if root:
            note = remarks.TIMES_ROOT(number=counts)
    rate = draft.get("learning_rate", read_number)
    optimizer_settings.set_optimizer(draft, "optimizer", ["learning_rate"], rate, scale)
    own = draft.get("text_encoder_lr", read_number) or rate
    rates = {"CLIP": own * scale} if common_values.is_on(draft.get("train_text_encoder")) and own else {}
    optimizer_settings.set_text_encoders(draft, ["train_text_encoder"], ["text_encoder_lr"], rates)
    if scale != 1:
        draft.report_mapped(["lr_scale", "lr_scale_sqrt"], {"optimizer.lr_scale": scale}, note)
    draft.report_unmatched(["lr_scale", "lr_scale_sqrt"], remarks.OFF, off=True)
    if draft.has("optimizer_config"):
        optimizer_settings.set_optimizer_arguments(
            draft, "optimizer_config", str(draft.given["optimizer_config"]).split(",")
        )
    end = draft.get("lr_end", read_number)
    optimizer_settings.set_schedule(
        draft,
        optimizer_settings.ScheduleKeys(
            "lr_scheduler", warmup="lr_warmup_steps", cycles="lr_num_cycles", power="lr_power", floor="lr_end"
        ),
        warmup=draft.get("lr_warmup_steps", read_number),
        floor=min(1.0, end / rate) if end and rate and draft.has("lr_end") else None,
    )


def _set_clipping(draft: Draft) -> None:
    """Set train.max_grad_norm; SimpleTuner clips each gradient by its value unless the file says otherwise."""
    if draft.get("grad_clip_method") == "norm":
        draft.report_mapped("grad_clip_method", {}, Message("gradients are clipped by their norm"))
        draft.report_mapped("max_grad_norm", {"train.max_grad_norm": draft.get("max_grad_norm", read_number)})
        return
    note = Message(
        "SimpleTuner clips each gradient at this value; this trainer clips the norm of all gradients together, "
        "so its default is used"
    )
    draft.report_unmatched(["grad_clip_method", "max_grad_norm"], note)


def _set_intervals(draft: Draft, per_epoch: int | None) -> None:
    """Set how often checkpoints are saved and previews are drawn, and how many checkpoints are kept."""
    key = "checkpoint_step_interval" if draft.has("checkpoint_step_interval") else "checkpointing_steps"
    dataset_settings.set_every(draft, "checkpoint.every", (key, "checkpoint_epoch_interval"), per_epoch, remarks.SAVED)
    draft.report_unmatched(["checkpoint_step_interval", "checkpointing_steps"], remarks.OTHER_KEY, off=True)
    keep = draft.get("checkpoints_total_limit", read_whole)
    if keep:
        ours = common_values.clamp("checkpoint.keep", keep)
        note = remarks.AT_LEAST(least=ours) if ours > keep else ""
        (draft.report_different if note else draft.report_mapped)(
            "checkpoints_total_limit", {"checkpoint.keep": ours}, note
        )
    key = "validation_step_interval" if draft.has("validation_step_interval") else "validation_steps"
    dataset_settings.set_every(draft, "preview.every", (key, "validation_epoch_interval"), per_epoch)
    draft.report_unmatched(["validation_step_interval", "validation_steps"], remarks.OTHER_KEY, off=True)


def _set_timesteps(draft: Draft) -> None:
    objective_settings.set_min_snr(draft, "snr_gamma")
    predicts = {"vprediction": "v", "epsilon": "epsilon"}.get(
        common_values.normalize_name(draft.get("prediction_type") or ""), ""
    )
    objective_settings.set_prediction(draft, "prediction_type", predicts)
    objective_settings.set_huber(draft)
    _set_noise(draft)
    chosen = common_values.is_on(draft.get("use_ema"))
    optimizer_settings.set_ema(
        draft, "use_ema", "ema_decay", chosen=chosen, usual=0.995, interval_key="ema_update_interval"
    )
    keys = ["flow_schedule_shift", "flow_schedule_auto_shift"]
    shift: float | str = draft.get("flow_schedule_shift", read_number) or 1.0
    if common_values.is_on(draft.get("flow_schedule_auto_shift")):
        shift = "auto"
    of_beta = ["flow_use_beta_schedule", "flow_beta_schedule_alpha", "flow_beta_schedule_beta"]
    shape: dict[str, Any] = objective_settings.make_logit_normal(std=draft.get("flow_sigmoid_scale", read_number))
    used = ["flow_sigmoid_scale"]
    if common_values.is_on(draft.get("flow_use_uniform_schedule")):
        shape, used = {"objective.timesteps": "uniform"}, ["flow_use_uniform_schedule"]
    elif common_values.is_on(draft.get(of_beta[0])):
        alpha, beta = (draft.get(key, read_number) for key in of_beta[1:])
        shape = {
            "objective.timesteps": "beta",
            "objective.beta_alpha": alpha or 2.0,
            "objective.beta_beta": beta or 2.0,
        }
        used = of_beta
    objective_settings.set_timesteps(draft, [*keys, *used], shape, shift)
    draft.report_unmatched(["flow_sigmoid_scale", "flow_use_uniform_schedule", *of_beta], remarks.OFF, off=True)


def _set_noise(draft: Draft) -> None:
    """Set input noise and zero-terminal SNR."""
    share, last = draft.get("input_perturbation", read_number), draft.get("input_perturbation_steps", read_number)
    note = Message("SimpleTuner lowers it to 0 within input_perturbation_steps; this trainer keeps it")
    ours = {"objective.input_noise": share} if share else {}
    keys = ["input_perturbation", "input_perturbation_steps"]
    objective_settings.set_of_diffusion(draft, keys, ours, note if last else "", exact=not last)
    zero = common_values.is_on(draft.get("rescale_betas_zero_snr"))
    objective_settings.set_of_diffusion(
        draft, "rescale_betas_zero_snr", {"objective.zero_terminal_snr": True} if zero else {}
    )


def _set_previews(draft: Draft) -> None:
    fields = {"validation_negative_prompt": "negative", "validation_guidance": "guidance", "validation_seed": "seed"}
    fields |= {"validation_num_inference_steps": "steps", "validation_num_video_frames": "frames"}
    keys = ["validation_prompt", *fields, "validation_resolution"]
    prompt = draft.get("validation_prompt", read_string)
    if common_values.is_on(draft.get("validation_disable")) or not prompt:
        draft.report_mapped("validation_disable", {}, remarks.NO_PROMPTS)
        draft.report_unmatched([*keys, "validation_on_startup"], remarks.NOT_PREVIEWED, off=True)
        return
    picture = {"prompt": prompt} | {ours: draft.get(key) for key, ours in fields.items()}
    size = re.match(r"(\d+)x(\d+)$|(\d+)(?:\.0)?$", str(draft.get("validation_resolution") or ""))
    if size:
        picture |= {"width": size[1] or size[3], "height": size[2] or size[3]}
    note = ""
    if "," in str(draft.get("validation_resolution") or ""):
        note = Message("validation_resolution has several sizes; previews use the training resolution")
    own = fields | {"validation_prompt": "prompts", "validation_resolution": "width height"}
    preview_settings.set_previews(draft, {key: own[key] for key in keys}, [picture], note)
    first = common_values.is_on(draft.get("validation_on_startup"))
    draft.report_mapped("validation_on_startup", {"preview.at_start": first})
    draft.report_unmatched("validation_disable", remarks.OFF, off=True)


def _set_names(draft: Draft) -> None:
    path = str(draft.get("output_dir") or "")
    parent, _, last = path.rstrip("/\\").replace("\\", "/").rpartition("/")
    if draft.has("tracker_run_name"):
        common_values.set_name(draft, "tracker_run_name")
        draft.report_mapped("output_dir", {"output_dir": path or "runs"}, remarks.RUN_FOLDER)
    elif last:
        common_values.set_name(draft, "output_dir", last, Message("this is the last part of output_dir"))
        draft.set("output_dir", parent or ".", "output_dir")


def recognise(source: Source) -> str:
    """Recognise model_family with a backend config, or a list of data backends."""
    data = source.data
    if source.kind != "json":
        return ""
    if isinstance(data, dict):
        keys = {str(key).removeprefix("--") for key in data}
        return "model_family" if "model_family" in keys and keys & {"data_backend_config", "model_type"} else ""
    backends = (
        isinstance(data, list) and data and all(isinstance(backend, dict) and "id" in backend for backend in data)
    )
    return Message("a list of data backends") if backends and any("type" in backend for backend in data) else ""


TOOL = Tool(
    "simpletuner",
    Message("SimpleTuner of August 2026"),
    RULES,
    {
        "lora_rank": 16,
        "learning_rate": 4e-7,
        "lr_scheduler": "sine",
        "lr_warmup_steps": 500,
        "lr_power": 0.8,
        "train_batch_size": 4,
        "num_train_epochs": 1,
        "gradient_checkpointing": False,
        "base_model_precision": "no_change",
        "mixed_precision": "bf16",
        "flow_schedule_shift": 3.0,
        "max_grad_norm": 2.0,
        "resolution": 1024,
    },
    recognise,
    flatten,
    combine,
)
