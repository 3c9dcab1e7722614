"""sd-scripts (TOML, dataset TOML, commands), the kohya_ss settings page (JSON) and lora-scripts (TOML presets).

All three train with sd-scripts, so they share its table; the pages have other names for some keys, and defaults of
their own. Facts: sd-scripts 0.10.1, kohya_ss 26.0, lora-scripts of September 2025.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PureWindowsPath
from typing import Any

from lora_fp8.config import UserError

from . import words
from .base import (
    JOINT,
    Draft,
    Folder,
    Rule,
    Source,
    Tool,
    always,
    decoded,
    flag,
    flattened,
    idle,
    is_off,
    listed,
    none,
    number,
    parse_options,
    positive,
    read_source,
    text,
    to,
    whole,
)

NO_CONV = "convolutions are not adapted here, only linear layers"
NO_PART = "the layers of a family are adapted alike; adapter.targets names which"
NO_TAG = "single tags are not dropped here; dataset.caption_dropout drops whole captions"
NO_RATIO = "both matrices of an adapter have the same rate here"
NO_DROPOUT = "adapter.dropout drops inputs of the adapter"
NO_LYCORIS = "belongs to LyCORIS"
NO_VALIDATION = "say validation.every and validation.pictures, which are kept out of the folders"

SD_SCRIPTS_RULES: dict[str, Rule] = {
    # The model
    "pretrained_model_name_or_path": JOINT,
    "v2": JOINT,
    "model_type": JOINT,
    "clip_l": JOINT,
    "clip_g": JOINT,
    "t5xxl": JOINT,
    "ae": JOINT,
    "gemma2": JOINT,
    "text_encoder": JOINT,
    "byt5": JOINT,
    "vae": none("the base's own VAE is used, or that of model.components"),
    "v_parameterization": none("the model's scheduler_config.json says what it predicts"),
    "no_half_vae": always("the VAE never runs in float16"),
    "tokenizer_cache_dir": idle(),
    "disable_mmap_load_safetensors": idle(),
    # Precision
    "mixed_precision": JOINT,
    "fp8_base": JOINT,
    "fp8_base_unet": JOINT,
    "fp8_scaled": JOINT,
    "fp8_vl": idle("text encoders are freed before training here"),
    "full_bf16": none("adapters are bf16 with float32 masters here; optimizer.rounding = 'nearest' has none"),
    "full_fp16": none("float16 is not used here"),
    # The adapter
    "network_module": JOINT,
    "network_args": JOINT,
    "lycoris_algo": JOINT,
    "network_dim": to("adapter.rank", whole),
    "network_alpha": to("adapter.alpha", number),
    "network_dropout": to("adapter.dropout", number),
    "network_train_unet_only": JOINT,
    "network_train_text_encoder_only": none("the denoiser is always trained here"),
    "network_weights": to("adapter.init_from", text, words.START),
    "dim_from_weights": none("set adapter.rank and adapter.alpha to those of the file: `lora-fp8 inspect` tells them"),
    "base_weights": none("no LoRA is merged into the base; merge it beforehand"),
    "base_weights_multiplier": none("belongs to base_weights"),
    "scale_weight_norms": none("weights are not rescaled here"),
    "conv_dim": none(NO_CONV),
    "conv_alpha": none(NO_CONV),
    # The rate
    "optimizer_type": JOINT,
    "use_8bit_adam": JOINT,
    "use_lion_optimizer": JOINT,
    "optimizer_args": JOINT,
    "learning_rate": JOINT,
    "unet_lr": JOINT,
    "text_encoder_lr": JOINT,
    "lr_scheduler": JOINT,
    "lr_warmup_steps": JOINT,
    "lr_scheduler_num_cycles": JOINT,
    "lr_restart_cycles": JOINT,
    "lr_scheduler_power": JOINT,
    "lr_scheduler_min_lr_ratio": JOINT,
    "lr_scheduler_type": none("schedules of other packages are not loaded"),
    "lr_scheduler_args": none("schedules of other packages are not loaded"),
    "lr_scheduler_timescale": none("belongs to inverse_sqrt"),
    "lr_decay_steps": none("belongs to warmup_stable_decay"),
    "max_grad_norm": to("train.max_grad_norm", number),
    "fused_backward_pass": none("gradients are summed in float32 and stepped together here"),
    # Length
    "max_train_steps": JOINT,
    "max_train_epochs": JOINT,
    "epoch": JOINT,
    "train_batch_size": JOINT,
    "batch_size": JOINT,
    "num_processes": JOINT,
    "gradient_accumulation_steps": to("train.accumulate", whole),
    "gradient_checkpointing": to("memory.gradient_checkpointing", flag),
    "initial_epoch": none(words.RESUMES),
    "initial_step": none(words.RESUMES),
    "skip_until_initial_step": none(words.RESUMES),
    "seed": JOINT,
    # Pictures and captions
    "train_data_dir": JOINT,
    "dataset_config": JOINT,
    "image_dir": JOINT,
    "num_repeats": JOINT,
    "dataset_repeats": JOINT,
    "class_tokens": JOINT,
    "is_reg": JOINT,
    "reg_data_dir": JOINT,
    "prior_loss_weight": JOINT,
    "in_json": none("captions are .txt or .caption files beside the pictures here"),
    "metadata_file": none("captions are .txt or .caption files beside the pictures here"),
    "conditioning_data_dir": none("is for ControlNets, which are not trained here; with masked_loss it has masks"),
    "dataset_class": none("no code of other packages is loaded"),
    "cache_info": idle(),
    "resolution": JOINT,
    "enable_bucket": JOINT,
    "min_bucket_reso": JOINT,
    "max_bucket_reso": JOINT,
    "bucket_reso_steps": JOINT,
    "bucket_no_upscale": JOINT,
    "resize_interpolation": none("pictures are resized with Lanczos"),
    "network_multiplier": none("every folder counts the same; see repeats", 1, 1.0),
    "shuffle_caption": JOINT,
    "keep_tokens": JOINT,
    "caption_separator": JOINT,
    "caption_dropout_rate": JOINT,
    "flip_aug": JOINT,
    "caption_extension": JOINT,
    "caption_extention": JOINT,
    "caption_prefix": JOINT,
    "caption_suffix": none("nothing is put behind captions here"),
    "keep_tokens_separator": none("dataset.keep_tokens counts the tags that stay"),
    "secondary_separator": none("tags have one separator here"),
    "enable_wildcard": none("{a|b} in captions is not chosen from here"),
    "caption_dropout_every_n_epochs": none("captions are dropped by chance only: dataset.caption_dropout"),
    "caption_tag_dropout_rate": none(NO_TAG),
    "token_warmup_min": none("all tags are shown from the start", 1),
    "token_warmup_step": none("all tags are shown from the start"),
    "weighted_captions": none("brackets in captions are text here"),
    "custom_attributes": none(words.NOT_HERE),
    "color_aug": none("colours are not changed here"),
    "random_crop": none("pictures are cropped at the middle"),
    "face_crop_aug_range": none("pictures are cropped at the middle"),
    "alpha_mask": JOINT,
    "masked_loss": JOINT,
    "max_token_length": none(
        "captions are cut where the text encoder ends: at 75 tokens for CLIP; `check` tells which", 75
    ),
    "clip_skip": none("the text encoder's layer is the one the pipeline uses", 1),
    "t5xxl_max_token_length": none("the pipeline's own length is used", 512),
    "apply_t5_attn_mask": none("the pipeline's own attention is used"),
    "cache_latents": always(words.ALWAYS_CACHED),
    "cache_latents_to_disk": always(words.ALWAYS_CACHED),
    "cache_text_encoder_outputs": always(words.ALWAYS_CACHED),
    "cache_text_encoder_outputs_to_disk": always(words.ALWAYS_CACHED),
    "skip_cache_check": idle(),
    "vae_batch_size": idle(),
    "text_encoder_batch_size": idle(),
    "debug_dataset": idle(),
    "validation_split": none(NO_VALIDATION),
    "validation_seed": none(NO_VALIDATION),
    "validate_every_n_steps": none(NO_VALIDATION),
    "validate_every_n_epochs": none(NO_VALIDATION),
    "max_validation_steps": none(NO_VALIDATION),
    # Noise and loss
    "noise_offset": JOINT,
    "noise_offset_random_strength": none(words.NO_NOISE),
    "adaptive_noise_scale": none(words.NO_NOISE),
    "multires_noise_iterations": none(words.NO_NOISE),
    "multires_noise_discount": none("belongs to multires_noise_iterations", 0.3),
    "ip_noise_gamma": none(words.NO_NOISE),
    "ip_noise_gamma_random_strength": none(words.NO_NOISE),
    "zero_terminal_snr": none("the model's scheduler_config.json says how it noises"),
    "min_timestep": to("objective.t_min", words.thousandths),
    "max_timestep": to("objective.t_max", words.thousandths),
    "min_snr_gamma": JOINT,
    "loss_type": none("the loss is the mean squared error", "l2"),
    "huber_schedule": none("belongs to the Huber loss", "snr"),
    "huber_c": none("belongs to the Huber loss", 0.1),
    "huber_scale": none("belongs to the Huber loss", 1.0, 1),
    "debiased_estimation_loss": none("min_snr_gamma is the only weight here"),
    "scale_v_pred_loss_like_noise_pred": none("min_snr_gamma is the only weight here"),
    "v_pred_like_loss": none("min_snr_gamma is the only weight here"),
    "timestep_sampling": JOINT,
    "sigmoid_scale": JOINT,
    "discrete_flow_shift": JOINT,
    "training_shift": JOINT,
    "weighting_scheme": JOINT,
    "logit_mean": JOINT,
    "logit_std": JOINT,
    "mode_scale": none("belongs to weighting_scheme = mode", 1.29),
    "model_prediction_type": JOINT,
    "guidance_scale": JOINT,
    # Memory and speed
    "blocks_to_swap": none(words.NO_SWAP),
    "block_swap_h2d_only": none(words.NO_SWAP),
    "cpu_offload_checkpointing": none("activations are recomputed, not moved to main memory"),
    "split_mode": none("deprecated there; FP8 storage takes its place"),
    "train_blocks": none(NO_PART, "all"),
    "torch_compile": JOINT,
    "dynamo_backend": JOINT,
    "xformers": always(words.ATTENTION),
    "sdpa": always(words.ATTENTION),
    "mem_eff_attn": always(words.ATTENTION),
    "attn_mode": always(words.ATTENTION),
    "split_attn": idle(),
    # Saving
    "output_dir": to("output_dir", text, "a run folder of the job's name is made in it"),
    "output_name": JOINT,
    "save_model_as": none("files are always .safetensors", "safetensors"),
    "save_precision": to("export.dtype", words.FILE_DTYPE),
    "save_every_n_steps": JOINT,
    "save_every_n_epochs": JOINT,
    "save_n_epoch_ratio": none("checkpoint.every counts steps"),
    "save_last_n_steps": none("checkpoint.keep counts checkpoints"),
    "save_last_n_steps_state": none("checkpoint.keep counts checkpoints"),
    "save_last_n_epochs": none("checkpoint.keep counts checkpoints"),
    "save_last_n_epochs_state": none("checkpoint.keep counts checkpoints"),
    "save_state": always("every checkpoint holds the whole state"),
    "save_state_on_train_end": always("every checkpoint holds the whole state"),
    "resume": none(words.RESUMES),
    "no_metadata": none("metadata is always written"),
    "training_comment": none("export.description is the text in the file"),
    "metadata_title": to("export.title", text),
    "metadata_author": to("export.author", text),
    "metadata_description": to("export.description", text),
    "metadata_license": to("export.license", text),
    "metadata_tags": none("no tags are written into the file"),
    "metadata_usage_hint": none("export.description is the text in the file"),
    "metadata_thumbnail": none("no picture is written into the file"),
    "metadata_trigger_phrase": none("the trigger word is written into the file by itself"),
    # Previews
    "sample_prompts": JOINT,
    "sample_every_n_steps": JOINT,
    "sample_every_n_epochs": JOINT,
    "sample_at_first": JOINT,
    "sample_sampler": none(words.NO_SAMPLER),
    # Logs, uploads, the machine
    **dict.fromkeys(
        ("logging_dir", "log_with", "log_prefix", "log_tracker_name", "log_tracker_config", "wandb_run_name"),
        idle(words.LOGGING),
    ),
    "wandb_api_key": idle(words.LOGGING),
    "log_config": idle(words.LOGGING),
    **dict.fromkeys(
        ("huggingface_repo_id", "huggingface_repo_type", "huggingface_path_in_repo", "huggingface_token")
        + ("huggingface_repo_visibility", "async_upload", "save_state_to_huggingface", "resume_from_huggingface"),
        none(words.UPLOAD),
    ),
    **dict.fromkeys(
        ("lowram", "lowvram", "highvram", "max_data_loader_n_workers", "persistent_data_loader_workers")
        + ("ddp_timeout", "ddp_gradient_as_bucket_view", "ddp_static_graph", "num_cpu_threads_per_process")
        + ("num_machines", "machine_rank", "multi_gpu", "gpu_ids", "main_process_port", "main_process_ip")
        + ("same_network", "config_file", "output_config", "console_log_level", "console_log_file")
        + ("console_log_simple", "dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "rdzv_backend"),
        idle(),
    ),
    "deepspeed": none("processes hold the whole model each; see `accelerate launch`"),
}

PAGE_RULES: dict[str, Rule] = {
    "sdxl": JOINT,
    "sd3_checkbox": JOINT,
    "flux1_checkbox": JOINT,
    "flux_checkbox": JOINT,
    "LoRA_type": JOINT,
    "lr_warmup": JOINT,
    "additional_parameters": JOINT,
    "model_list": idle("the page's own list of models"),
    "save_as_bool": idle("the page's own"),
    "train_on_input": idle("the page's own"),
    "unit": none("belongs to DyLoRA", 1),
    "stop_text_encoder_training": none("text encoders are trained to the end"),
    "stop_text_encoder_training_pct": none("text encoders are trained to the end"),
    "noise_offset_type": idle("says which of the noise keys counts"),
    "no_token_padding": none("captions are padded as the pipeline does"),
    "LyCORIS_preset": JOINT,
    "use_wandb": idle(words.LOGGING),
    "extra_accelerate_launch_args": none("give them to `accelerate launch train_lora.py` yourself"),
    **dict.fromkeys(("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio"), JOINT),
    **dict.fromkeys(
        ("bypass_mode", "constrain", "decompose_both", "dora_wd", "factor", "full_matrix", "rescaled", "train_norm")
        + ("use_cp", "use_scalar", "use_tucker", "rank_dropout_scale"),
        JOINT,
    ),
    **dict.fromkeys(
        ("block_alphas", "block_dims", "conv_block_alphas", "conv_block_dims", "conv_alphas", "conv_dims")
        + ("block_lr_zero_threshold",)
        + ("down_lr_weight", "mid_lr_weight", "up_lr_weight", "train_single_block_indices")
        + ("train_double_block_indices", "img_attn_dim", "img_mlp_dim", "img_mod_dim", "single_dim", "txt_attn_dim")
        + ("txt_mlp_dim", "txt_mod_dim", "single_mod_dim", "in_dims", "split_qkv", "train_t5xxl"),
        none(NO_PART),
    ),
    "rank_dropout": none(NO_DROPOUT),
    "module_dropout": none(NO_DROPOUT),
    "conv_dim": JOINT,
    "conv_alpha": JOINT,
}

LORA_SCRIPTS_RULES: dict[str, Rule] = {
    "metadata.**": idle("tells about the preset"),
    "model_train_type": JOINT,
    "enable_preview": JOINT,
    "randomly_choice_prompt": none("prompts are drawn in order"),
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
    "enable_base_weight": none("no LoRA is merged into the base; merge it beforehand"),
    "enable_block_weights": none(NO_PART),
    "dylora_unit": none("belongs to DyLoRA"),
    "lokr_factor": JOINT,
    "train_norm": JOINT,
    "dropout": JOINT,
    "prodigy_d0": none("belongs to Prodigy"),
    "prodigy_d_coef": none("belongs to Prodigy"),
    "down_lr_weight": none(NO_PART),
    "mid_lr_weight": none(NO_PART),
    "up_lr_weight": none(NO_PART),
    "block_lr_zero_threshold": none(NO_PART),
}

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

SCRIPTS = {
    "train_network.py": "sd15",
    "sdxl_train_network.py": "sdxl",
    "flux_train_network.py": "flux",
    "sd3_train_network.py": "sd3",
    "lumina_train_network.py": "lumina2",
    "hunyuan_image_train_network.py": "hunyuan_image",
    "anima_train_network.py": "anima",
}
MODULES = {"lora_flux": "flux", "oft_flux": "flux", "lora_sd3": "sd3", "lora_lumina": "lumina2"} | {
    "lora_hunyuan_image": "hunyuan_image",
    "lora_anima": "anima",
}
TRAIN_TYPES = {
    "sdlora": "sd15",
    "sdxllora": "sdxl",
    "fluxlora": "flux",
    "chromalora": "chroma",
    "sd3lora": "sd3",
    "lumina2lora": "lumina2",
    "luminalora": "lumina2",
    "animalora": "anima",
}


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def sections(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """(shown, key, value) of a TOML whose section names mean nothing."""
    for name, value in data.items():
        if isinstance(value, dict):
            yield from sections(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", name, value


def dataset(data: Mapping[str, Any], file: str = "") -> Iterator[tuple[str, str, Any]]:
    """(shown, key, value) of a dataset TOML."""
    for key, value in flattened(data):
        yield f"{file}: {key}" if file else key, key, value


def _sd_scripts(draft: Draft) -> Iterable[tuple[str, str, Any]]:
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
    yield from _datasets_of(draft, rows)


def _datasets_of(draft: Draft, rows: list[tuple[str, str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for _, key, value in rows:
        if key == "dataset_config" and value:
            data = draft.refer(key, str(value))
            if isinstance(data, dict):
                yield from dataset(data, PureWindowsPath(str(value)).name)


def _page(draft: Draft) -> Iterable[tuple[str, str, Any]]:
    rows = [(key, key, value) for key, value in flattened(draft.source.data)]
    extra = draft.source.data.get("additional_parameters")
    if extra:
        options = parse_options(str(extra).split())
        rows += [(f"additional_parameters: {name}", name, value) for name, value in options.items()]
    yield from rows
    yield from _datasets_of(draft, rows)


def _lora_scripts(draft: Draft) -> Iterable[tuple[str, str, Any]]:
    data = draft.source.data
    for key, value in data.get("metadata", {}).items():
        yield f"metadata.{key}", "model_train_type" if key == "train_type" else f"metadata.{key}", value
    yield from sections({name: value for name, value in data.items() if name != "metadata"})
    custom = data.get("data", data).get("ui_custom_params")
    if custom:
        try:
            parsed = tomllib.loads(str(custom))
        except tomllib.TOMLDecodeError:
            draft.notes.append("ui_custom_params is not TOML and was not read")
        else:
            yield from ((f"ui_custom_params: {shown}", key, value) for shown, key, value in sections(parsed))


# ---------------------------------------------------------------------------------------------------------------------
# What takes more than one key


def everywhere(draft: Draft, name: str) -> list[str]:
    """All keys of this name: the argument's, and those of the dataset file."""
    inside = ("general.", "datasets.")
    return [key for key in draft.given if key == name or (key.startswith(inside) and key.endswith(f".{name}"))]


def subsets(draft: Draft) -> list[str]:
    """The dataset file's folders, as the beginnings of their keys: datasets.0.subsets.1."""
    found = {m[0] for key in draft.given if (m := re.match(r"datasets\.\d+\.subsets\.\d+\.", key))}
    return sorted(found, key=lambda key: [int(part) for part in re.findall(r"\d+", key)])


def counting(draft: Draft, subset: str, name: str) -> str:
    """The key that holds for a folder: its own, its dataset's, [general]'s, or the argument."""
    outer = ".".join(subset.split(".")[:2]) + "." if subset else ""
    keys = (f"{subset}{name}", f"{outer}{name}", f"general.{name}")
    return next((key for key in keys if draft.has(key)), name)


def effective(draft: Draft, subset: str, name: str) -> Any:
    """What holds for a folder, or the tool's default."""
    return draft.get(counting(draft, subset, name))


def each(draft: Draft, name: str, places: list[str]) -> tuple[list[str], list[Any]]:
    """The keys that hold for the folders, and the value for each. Keys that others override are accounted for."""
    keys = list(dict.fromkeys(counting(draft, place, name) for place in places or [""]))
    draft.none([key for key in everywhere(draft, name) if key not in keys], "overridden by a folder's own", off=True)
    return keys, [effective(draft, place, name) for place in places or [""]]


def only_pictures(draft: Draft) -> bool:
    """Whether the file is a dataset file alone, which says nothing of model and training."""
    return isinstance(draft.source.data, dict) and isinstance(draft.source.data.get("datasets"), list)


def set_only_pictures(draft: Draft, places: list[str]) -> None:
    """What there is to tell of a dataset file alone, beside folders and sizes."""
    kept = ("keep_tokens", "enable_bucket", "resolution")
    draft.defaults = {name: value for name, value in draft.defaults.items() if name in kept}
    words.set_family(draft, (), "", "the file holds only the pictures: import the training's file with this beside it")
    words.set_model_path(draft, "pretrained_model_name_or_path")
    words.share(draft, *each(draft, "batch_size", places), "train.batch_size", whole)


def combine(draft: Draft) -> None:
    """Everything of a job; also used for the pages."""
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
    set_previews(draft)
    set_compile(draft)
    words.set_seed(draft, "seed")
    words.set_name(draft, "output_name")


def _kind(draft: Draft) -> tuple[str, str, str]:
    """The architecture, what says so, and the key that does, if one does."""
    if draft.get("model_train_type"):
        name = draft.get("model_train_type", text)
        kind = TRAIN_TYPES.get(words.plain(name), "")
        why = f"model_train_type = {name!r}" if kind else f"{name!r} trains no LoRA that is known here"
        return kind, why, "model_train_type"
    if draft.get("model_type") == "chroma":
        return "chroma", "model_type = 'chroma'", "model_type"
    module = str(draft.get("network_module") or "").split(".")[-1]
    if module in MODULES:
        return MODULES[module], f"network_module = {module!r}", ""
    for key, kind in (("flux1_checkbox", "flux"), ("flux_checkbox", "flux"), ("sd3_checkbox", "sd3"), ("sdxl", "sdxl")):
        if words.on(draft.get(key)):
            return kind, f"{key} is on", key
    v2 = words.on(draft.get("v2"))
    script = draft.source.script
    if script in SCRIPTS and not (v2 and SCRIPTS[script] == "sd15"):
        return SCRIPTS[script], script, ""
    if v2:
        return "sd2", "v2 is on", "v2"
    if draft.has("t5xxl") and draft.has("ae"):
        flux = draft.has("clip_l")
        return ("flux", "t5xxl, ae and clip_l are FLUX's", "") if flux else ("chroma", "t5xxl and ae, no clip_l", "")
    if draft.has("sdxl"):
        return "sd15", "sdxl, v2 and the other families are off", "sdxl"
    return "", "the file does not say: sd-scripts takes it from the script that is run", ""


def set_model(draft: Draft) -> None:
    """model.family and model.path."""
    kind, why, key = _kind(draft)
    path = str(draft.get("pretrained_model_name_or_path") or "")
    named = words.family_of_name(path)
    if not kind and named and not draft.family:
        words.set_family(draft, (), named, "read from the name of the base model")
        draft.need("model.family", f"{draft.family} was read from the name {PureWindowsPath(path).name!r}: check it")
    else:
        words.set_family(draft, key or (), kind, why)
    keys = ["model_train_type", "model_type", "flux1_checkbox", "flux_checkbox", "sd3_checkbox", "sdxl", "v2"]
    draft.none(keys, "another family, or another key that says it", off=True)
    words.set_model_path(draft, "pretrained_model_name_or_path")
    for key in ("clip_l", "clip_g", "t5xxl", "ae", "gemma2", "text_encoder", "byt5"):
        draft.none(key, "model.components takes a diffusers folder, not single files of its parts")


def _no_argument(name: str) -> str:
    """Why an argument of the network has no counterpart."""
    if name.startswith("conv"):
        return NO_CONV
    if name.startswith("loraplus"):
        return NO_RATIO
    if name.endswith("dropout"):
        return NO_DROPOUT
    return NO_LYCORIS if name in ("factor", "preset", "decompose_both", "use_tucker", "train_norm") else NO_PART


def _set_lokr(draft: Draft, given: dict[str, str]) -> None:
    """What belongs to LoKr alone, taken out of the network's arguments."""
    keys = [key for key in ("lokr_factor", "factor") if draft.has(key)]
    factor = given.pop("factor", None) or (draft.get(keys[0]) if keys else -1)
    draft.mapped(keys, {"adapter.factor": words.lokr_factor(factor)}, "-1 there is 0 here")
    both = given.pop("decompose_both", "").lower() == "true" or words.on(draft.get("decompose_both"))
    draft.mapped("decompose_both", {"adapter.decompose_both": both})
    full = given.pop("full_matrix", "").lower() == "true" or words.on(draft.get("full_matrix"))
    rank = draft.get("network_dim", whole)
    if full or (rank or 0) > words.WHOLE_RANK:
        settings = {"adapter.rank": words.lokr_rank(rank or 1, full)}
        draft.mapped(["network_dim", "full_matrix"], settings, "whole matrices")


def set_network(draft: Draft) -> None:
    """adapter.type, and what belongs to it."""
    module = str(draft.get("network_module") or "")
    arguments = draft.get("network_args") or []
    arguments = arguments.split() if isinstance(arguments, str) else listed(arguments)
    custom = draft.get("network_args_custom", listed) or []
    given = dict(str(argument).partition("=")[::2] for argument in [*arguments, *custom])
    kind = words.plain(draft.get("LoRA_type") or "").removeprefix("kohya").removeprefix("lycoris")
    lycoris = "lycoris" in module or "lycoris" in words.plain(draft.get("LoRA_type") or "")
    algorithm = words.plain(draft.get("lycoris_algo") or given.pop("algo", "") or kind)
    algorithm = algorithm if algorithm not in ("", "standard", "flux1", "sd3", "locon", "lora") else "lora"
    other = module.split(".")[-1]
    if not lycoris and other in ("dylora", "oft", "oft_flux", "lora_fa"):
        algorithm = other
    decomposed = str(given.get("dora_wd", "")).lower() == "true" or words.on(draft.get("dora_wd"))
    if algorithm == "lora" or not decomposed:  # of LoKr and LoHa with lengths the lengths have no counterpart
        given.pop("dora_wd", None)
    if algorithm == "lora" and decomposed:
        algorithm = "dora"
    own = {words.plain(name): name for name in words.accepted("adapter.type")}
    keys = ["network_module", "LoRA_type", "lycoris_algo"]
    if algorithm in own:
        draft.mapped(keys, {"adapter.type": own[algorithm]})
        draft.set("adapter.type", own[algorithm])
    else:
        draft.none(keys, f"there is no {algorithm} here; a LoRA of this rank was written")
        draft.set("adapter.type", "lora")
        draft.need("adapter.type", f"{algorithm} has no counterpart: a LoRA learns otherwise; check rank and alpha")
    if algorithm == "lokr":
        _set_lokr(draft, given)
    parts = [f"{name}={value}" for name, value in given.items()]
    for key in ("network_args", "network_args_custom"):
        if parts:
            told = dict.fromkeys(_no_argument(name) for name in given)
            draft.none(key, f"{', '.join(parts)}: {'; '.join(told)}")
        else:
            draft.mapped(key, {}, "says only what [adapter] says")
    extras = ["conv_dim", "conv_alpha", "factor", "lokr_factor", "decompose_both", "use_tucker", "use_cp", "use_scalar"]
    extras += ["rescaled", "constrain", "bypass_mode", "full_matrix", "train_norm", "rank_dropout_scale", "dora_wd"]
    extras += ["LyCORIS_preset", "dropout", "loraplus_lr_ratio", "loraplus_unet_lr_ratio"]
    extras += ["loraplus_text_encoder_lr_ratio"]
    plain = not lycoris and kind in ("", "standard", "flux1", "sd3")
    for key in extras:
        used = draft.has(key) and not is_off(draft.given[key])
        if key.startswith("loraplus"):
            draft.none(key, NO_RATIO, off=not used)
        elif key in ("conv_dim", "conv_alpha"):
            # The page keeps them for every kind; only LoCon and LyCORIS use them.
            page = plain and draft.tool.name != "sd-scripts"
            draft.none(key, "not used by this kind of LoRA" if page else NO_CONV, off=page or not used)
        else:
            draft.none(key, "not used by this kind of LoRA" if plain else NO_LYCORIS, off=plain or not used)


def set_precision(draft: Draft) -> None:
    """model.dtype and quantize.storage."""
    words.set_dtype(draft, "mixed_precision")
    if not draft.get("mixed_precision"):
        draft.notes.append(
            "the file has no mixed_precision: theirs computes in float32 then, here in bf16 (model.dtype)"
        )
    scaled = words.on(draft.get("fp8_scaled"))
    cast = [key for key in ("fp8_base", "fp8_base_unet") if words.on(draft.get(key))]
    if scaled:
        draft.mapped(
            ["fp8_scaled", *cast],
            {"quantize.storage": "fp8", "quantize.scale": "1x64"},
            "a scale for each 64 weights of a row, as there; modulation is held in int8 (quantize.modulation), and "
            "scale = 'auto', one for each row, takes less and is nearly as exact",
        )
    elif cast:
        draft.differs(
            cast,
            {"quantize.storage": "fp8"},
            "kohya casts every weight without a scale, so that small ones become zero; here each row has a scale. "
            "quantize.scale = 'none' is the exact equivalent",
        )
    else:
        words.set_storage(draft, (), "bf16", "kohya")
        draft.comments["quantize.storage"] = ["not quantized there either; 'fp8' would halve the base's memory"]
    draft.none(["fp8_base", "fp8_base_unet", "fp8_scaled"], "off", off=True)


def _reads_captions(value: Any) -> bool:
    return str(value).strip().lower().lstrip(".") in ("txt", "caption")


def set_folders(draft: Draft) -> None:
    """dataset.folders from the dataset file, or from the subfolders of train_data_dir."""
    found = subsets(draft)
    for subset in found:
        path = draft.get(f"{subset}image_dir", text)
        if not path:
            draft.none(f"{subset}metadata_file", "captions are .txt or .caption files beside the pictures here")
            continue
        folder = words.look_into(
            draft, Folder(path, positive(effective(draft, subset, "num_repeats") or 1)), deep=False
        )
        draft.mapped(f"{subset}image_dir", {}, f"dataset.folders.{len(draft.folders)}.path")
        draft.mapped(f"{subset}num_repeats", {}, f"dataset.folders.{len(draft.folders)}.repeats = {folder.repeats}")
        tokens = effective(draft, subset, "class_tokens")
        if words.on(effective(draft, subset, "is_reg")):
            _regularize(draft, folder, str(tokens or ""))
        elif tokens:
            draft.differs(f"{subset}class_tokens", {}, words.caption_by_trigger(folder, str(tokens)))
        prefix = effective(draft, subset, "caption_prefix")
        if prefix and not folder.regularization:
            folder.trigger = str(prefix).strip().rstrip(",").strip()
        folder.mask = _mask_of(draft, subset, len(draft.folders))
        draft.folders.append(folder)
    used = [key for key in everywhere(draft, "is_reg") if words.on(draft.given[key])]
    draft.differs(used, {}, words.SHOWN_ALIKE)
    draft.none(everywhere(draft, "is_reg"), "off", off=True)
    draft.differs(
        everywhere(draft, "caption_prefix"), {}, "the folder's trigger: put in front only where it is missing"
    )
    for name in ("num_repeats", "class_tokens", "dataset_repeats"):
        draft.mapped(everywhere(draft, name), {}, "in each of the folders")
    draft.mapped("dataset_config", {}, "read as well" if found else "not here")
    root = draft.get("train_data_dir", text)
    if root and found:
        draft.none("train_data_dir", "dataset_config counts", off=True)
    elif root:
        _folders_by_name(draft, root)
    elif draft.get("dataset_config") and not found:
        draft.folders = [Folder("TODO")]
        draft.need("dataset.folders", f"the folders of {draft.get('dataset_config')}, which is not here")
    others = draft.get("reg_data_dir", text)
    if others and found:
        draft.none("reg_data_dir", "dataset_config counts", off=True)
    elif others:
        _folders_by_name(draft, others, "reg_data_dir")
    words.balance_regularization(draft)
    words.weigh_regularization(draft, "prior_loss_weight")
    if not found:
        for number, folder in enumerate(draft.folders):
            folder.mask = _mask_of(draft, "", number)
    words.set_unmasked(draft)
    if any(folder.mask for folder in draft.folders):
        draft.mapped("masked_loss", {}, "folders with a mask")
    draft.none([*everywhere(draft, "alpha_mask"), "masked_loss"], "off, or it names no masks", off=True)


def _mask_of(draft: Draft, subset: str, number: int) -> str:
    """Where the masks of a folder's pictures are: in a folder, or in their transparency; "" where they have none."""
    masks, alpha = (counting(draft, subset, name) for name in ("conditioning_data_dir", "alpha_mask"))
    if words.on(draft.get("masked_loss")) and (path := draft.get(masks, text)):
        draft.mapped(masks, {}, f"dataset.folders.{number}.mask")
        return words.as_mask_folder(path)
    if words.on(draft.get(alpha)):
        draft.mapped(alpha, {}, "mask = 'alpha' in each of these folders")
        return "alpha"
    return ""


def _regularize(draft: Draft, folder: Folder, words_of_it: str) -> None:
    """A folder of pictures without the subject."""
    folder.regularization = True
    if folder.captionless:
        given = f" ({words_of_it!r} there)" if words_of_it else ""
        draft.need("dataset.folders", f"{folder.path}: {folder.captionless} pictures need a caption file{given}")


def _folders_by_name(draft: Draft, root: str, key: str = "train_data_dir") -> None:
    """kohya's 10_name class folders: ten repeats, and "name class" as caption of what has none."""
    place = draft.find(root)
    separator = "\\" if "\\" in root and "/" not in root else "/"
    others = key == "reg_data_dir"
    if place is None or not place.is_dir():
        draft.folders.append(Folder(root, regularization=others))
        note = "kohya reads repeats from the names of its subfolders (10_name), and the folder is not here"
        draft.differs(key, {}, note)
        draft.need("dataset.folders", "one [[dataset.folders]] for each subfolder: 10_name becomes repeats = 10")
        return
    told = []
    for inner in sorted(p for p in place.iterdir() if p.is_dir()):
        match = re.match(r"(\d+)_(.*)$", inner.name)
        if not match:
            draft.notes.append(f"{root}{separator}{inner.name}: no number in front of its name, so kohya skips it too")
            continue
        folder = Folder(f"{root.rstrip('/' + chr(92))}{separator}{inner.name}", max(1, int(match[1])))
        words.look_into(draft, folder, deep=False)
        if others:
            _regularize(draft, folder, match[2])
        else:
            words.caption_by_trigger(folder, match[2])
        told.append(f"{inner.name}: repeats = {folder.repeats}" + (f", trigger {match[2]!r}" if folder.trigger else ""))
        draft.folders.append(folder)
    if not told:
        draft.folders.append(Folder(root, regularization=others))
        draft.differs(key, {}, "no subfolder is named 10_name there, so kohya would find no pictures")
        draft.need("dataset.folders", "check the folder and its repeats")
        return
    if others:
        draft.differs(key, {}, words.SHOWN_ALIKE)
        return
    draft.differs(
        key,
        {},
        f"repeats are written out here: {'; '.join(told)}. The words behind the number caption pictures without a "
        "caption there; here `check` asks for a caption or a trigger",
    )


def set_pictures(draft: Draft) -> None:
    """Sizes, buckets and captions; one value here for all folders."""
    places = subsets(draft)
    keys, values = each(draft, "resolution", places)
    if any(values):
        words.set_resolution(draft, keys, [value for value in values if value])
    shared = [
        ("enable_bucket", "dataset.buckets", flag),
        ("bucket_reso_steps", "dataset.bucket_step", whole),
        ("bucket_no_upscale", "dataset.upscale", lambda value: not flag(value)),
        ("flip_aug", "dataset.flip", flag),
        ("shuffle_caption", "dataset.shuffle_tags", flag),
        ("caption_dropout_rate", "dataset.caption_dropout", number),
        ("caption_separator", "dataset.tag_separator", text),
        ("keep_tokens", "dataset.keep_tokens", whole),
    ]
    for name, setting, read in shared:
        if name == "keep_tokens" and not draft.settings.get("dataset.shuffle_tags"):
            draft.none(everywhere(draft, name), "means nothing without shuffle_caption", off=True)
            continue
        words.share(draft, *each(draft, name, places), setting, read)
    _set_aspect(draft)
    for name in ("caption_extension", "caption_extention"):
        keys = everywhere(draft, name)
        if all(_reads_captions(draft.given[key]) for key in keys):
            draft.mapped(keys, {}, ".txt and .caption files are read by themselves")
        else:
            draft.none(keys, "captions are .txt or .caption files here; rename yours")
            draft.todo.append(f"captions end in {draft.given[keys[0]]} there; here in .txt or .caption")


def _set_aspect(draft: Draft) -> None:
    """dataset.max_aspect: the widest of kohya's buckets, which are all sides between two limits up to the area."""
    small, large = everywhere(draft, "min_bucket_reso"), everywhere(draft, "max_bucket_reso")
    side = draft.settings.get("dataset.resolution")
    if not draft.settings.get("dataset.buckets") or not side:
        draft.none([*small, *large], "means nothing without buckets", off=True)
        return
    if draft.settings.get("dataset.upscale") is False:
        draft.none([*small, *large], "means nothing with bucket_no_upscale", off=True)
        return
    first = (subsets(draft) or [""])[0]
    narrow = whole(effective(draft, first, "min_bucket_reso") or 256)
    wide = whole(effective(draft, first, "max_bucket_reso") or 1024)
    step = draft.settings.get("dataset.bucket_step", 64)
    tall = min(wide, side * side // narrow // step * step)
    draft.differs(
        [*small, *large] or ["min_bucket_reso", "max_bucket_reso"],
        {"dataset.max_aspect": min(8.0, max(1.0, tall / narrow))},
        f"the widest bucket there is {tall} x {narrow}; here buckets keep the whole area, and 8 is the limit",
    )


def _set_text_encoders(draft: Draft) -> None:
    """Theirs trains the CLIPs unless told not to, at learning_rate unless told another."""
    keys = ["network_train_unet_only"]
    off = any(words.on(draft.get(key)) for key in ("network_train_unet_only", "cache_text_encoder_outputs"))
    given = [number(one) for one in listed(draft.given["text_encoder_lr"])] if draft.has("text_encoder_lr") else []
    general = draft.get("learning_rate", number)
    names = {"sdxl": ("CLIP-L", "CLIP-G"), "sd3": ("CLIP-L", "CLIP-G")}.get(draft.family, ("CLIP",))
    found = given or ([general] if general else [])
    rates = {name: found[min(i, len(found) - 1)] for i, name in enumerate(names) if found}
    left_out = [name for name, rate in rates.items() if not rate]
    rates = {} if off else {name: rate for name, rate in rates.items() if rate}
    why = "theirs trains the text encoders too, unless their outputs are cached or network_train_unet_only is set"
    words.set_text_encoders(draft, keys, ["text_encoder_lr"], rates, why, left_out)


def set_length_and_rate(draft: Draft) -> None:
    """Steps, batch, rate and schedule; how often something is saved."""
    batch_keys, inner = each(draft, "batch_size", subsets(draft))
    outer = draft.get("train_batch_size")
    if all(inner):
        draft.none("train_batch_size", "the dataset's batch_size counts", off=True)
    batch_keys.append("train_batch_size")
    sizes = {positive(value or outer or 1) for value in inner}
    batch, processes = max(sizes), positive(draft.get("num_processes") or 1)
    note = f"over all processes together here: {batch} x {processes}" if processes > 1 else ""
    if len(sizes) > 1:
        note = f"one batch size here, the largest of {sorted(sizes)}"
    (draft.differs if note else draft.mapped)(
        [*batch_keys, "num_processes"], {"train.batch_size": batch * processes}, note
    )
    accumulate = positive(draft.get("gradient_accumulation_steps") or 1)
    per_epoch = words.steps_per_epoch(draft, batch, accumulate, processes)
    epochs, steps = whole(draft.get("max_train_epochs") or 0), whole(draft.get("max_train_steps") or 0)
    if epochs <= 0 and not draft.has("max_train_steps") and draft.get("epoch"):
        epochs = whole(draft.get("epoch"))
        words.set_steps_from_epochs(draft, "epoch", epochs, per_epoch, batch)
    elif epochs > 0:
        words.set_steps_from_epochs(draft, "max_train_epochs", epochs, per_epoch, batch)
        draft.none("max_train_steps", "max_train_epochs counts", off=True)
    elif steps > 0:
        draft.mapped("max_train_steps", {"train.steps": steps})
    elif draft.get("epoch"):
        words.set_steps_from_epochs(draft, "epoch", whole(draft.get("epoch")), per_epoch, batch)
    draft.none(["epoch", "max_train_epochs", "max_train_steps"], "another key counts", off=True)

    rate_key = "unet_lr" if draft.has("unet_lr") and number(draft.given["unet_lr"]) > 0 else "learning_rate"
    rate = draft.get(rate_key, number)
    name_key = "optimizer_type"
    if not draft.has("optimizer_type"):
        for key, name in (("use_8bit_adam", "AdamW8bit"), ("use_lion_optimizer", "Lion")):
            if words.on(draft.get(key)):
                draft.given[key], name_key = name, key
    words.set_optimizer(draft, name_key, [rate_key], rate)
    draft.none(["use_8bit_adam", "use_lion_optimizer"], "off", off=True)
    if draft.tool.name != "musubi-tuner":
        _set_text_encoders(draft)
    draft.none(["learning_rate", "unet_lr"], f"{rate_key} counts for the denoiser", off=True)
    for key in ("optimizer_args", "optimizer_args_custom"):
        if draft.has(key):
            words.set_optimizer_arguments(draft, key, draft.given[key])
        draft.none(key, "empty", off=True)

    warmup_key, warmup, told = "lr_warmup_steps", draft.get("lr_warmup_steps", number), ""
    if not warmup and draft.has("lr_warmup"):
        warmup_key, percent = "lr_warmup", number(draft.given["lr_warmup"])
        warmup, told = percent / 100, f"{percent:g} % of all steps"
    for key in ("lr_warmup_steps", "lr_warmup"):
        if key != warmup_key:
            draft.none(key, f"{warmup_key} counts", off=True)
    cycles = "lr_restart_cycles" if draft.has("lr_restart_cycles") else "lr_scheduler_num_cycles"
    words.set_schedule(
        draft,
        "lr_scheduler",
        warmup_key=warmup_key,
        warmup=warmup,
        warmup_note=told,
        cycles_key=cycles,
        power_key="lr_scheduler_power",
        floor_key="lr_scheduler_min_lr_ratio",
        floor=draft.get("lr_scheduler_min_lr_ratio", number),
    )
    draft.none(["lr_scheduler_num_cycles", "lr_restart_cycles"], "another key counts", off=True)

    words.set_every(draft, "checkpoint.every", "save_every_n_steps", "save_every_n_epochs", per_epoch, words.SAVED)
    words.set_every(draft, "preview.every", "sample_every_n_steps", "sample_every_n_epochs", per_epoch)
    draft.none("save_every_n_epochs", "save_every_n_steps counts", off=True)


def set_noise(draft: Draft) -> None:
    """Timesteps, their weights, and the guidance shown while training."""
    words.set_min_snr(draft, "min_snr_gamma")
    words.set_noise_offset(draft, "noise_offset")
    flow = ["timestep_sampling", "sigmoid_scale", "discrete_flow_shift", "training_shift", "weighting_scheme"]
    flow += ["logit_mean", "logit_std", "model_prediction_type", "guidance_scale"]
    if not draft.family:
        draft.none(flow, "depends on the family, which the file does not say")
        return
    if draft.family in words.DIFFUSION:
        draft.none(flow, "means nothing to a model that predicts noise", off=True)
        return
    method = str(draft.get("timestep_sampling") or "sigma")
    scheme = str(draft.get("weighting_scheme") or "uniform")
    shift_key = "training_shift" if draft.family in ("sd3", "sd35") else "discrete_flow_shift"
    shift = draft.get(shift_key, number) or 1.0
    told: list[str] = []
    if method == "sigma":
        shape = "logit_normal" if scheme == "logit_normal" else "uniform"
        if scheme in ("sigma_sqrt", "cosmap", "mode"):
            told.append(f"weighting_scheme = {scheme} has no counterpart")
        keys = ["timestep_sampling", "weighting_scheme", shift_key]
    elif method in ("uniform", "sigmoid"):
        shape, shift = ("uniform" if method == "uniform" else "logit_normal"), 1.0
        keys = ["timestep_sampling"]
    elif method == "shift":
        shape, keys = "logit_normal", ["timestep_sampling", shift_key]
    elif method.endswith("_shift"):
        shape, shift, keys = "logit_normal", "auto", ["timestep_sampling"]
        told += [] if method == "flux_shift" else [f"{method}: the shift of the model's own scheduler here"]
    else:
        shape, shift, keys = "logit_normal", "auto", ["timestep_sampling"]
        told.append(f"{method} has no counterpart; logit_normal was written")
        draft.need("objective.timesteps", f"choose one for {method!r}")
    scale = draft.get("sigmoid_scale", number)
    if scale not in (None, 1.0) and method not in ("uniform", "sigma"):
        told.append(f"sigmoid_scale = {scale:g} is always 1 here")
        keys.append("sigmoid_scale")
    for key, usual in (("logit_mean", 0.0), ("logit_std", 1.0)):
        value = draft.get(key, number)
        if scheme == "logit_normal" and value not in (None, usual):
            told.append(f"{key} = {value:g} is always {usual:g} here")
            keys.append(key)
    words.set_timesteps(draft, keys, shape, shift, "; ".join(told), exact=not told)
    draft.none(flow[:7], f"not used with timestep_sampling = {method}", off=True)
    prediction = draft.get("model_prediction_type")
    if prediction == "raw":
        draft.mapped("model_prediction_type", {}, "the velocity as the model gives it")
    elif draft.has("model_prediction_type"):
        draft.none("model_prediction_type", "the model's velocity is trained as it is, which they call raw")
    elif prediction:
        draft.notes.append(
            f"theirs is model_prediction_type = {prediction!r} by default; here it is what they call raw"
        )
    if draft.get("guidance_scale") is not None:
        draft.mapped("guidance_scale", {"objective.guidance": number(draft.get("guidance_scale"))})
    draft.none("guidance_scale", "empty", off=True)


PROMPT_FLAGS = {"n": "negative", "w": "width", "h": "height", "d": "seed", "s": "steps", "l": "scale", "g": "guide"}


def parse_prompt(line: str) -> tuple[dict[str, Any], list[str]]:
    """A line of a sample prompts file and the flags of it that mean nothing here."""
    head, *flags = re.split(r"\s--(?=[a-z]+\s)", " " + line.strip())
    picture: dict[str, Any] = {"prompt": head.strip()}
    left = []
    for one in flags:
        name, _, value = one.partition(" ")
        if name in PROMPT_FLAGS:
            picture[PROMPT_FLAGS[name]] = value.strip()
        else:
            left.append(f"--{name}")
    return picture, left


def guide(draft: Draft, pictures: list[dict[str, Any]]) -> str:
    """Choose among --l (classifier-free) and --g (embedded) what our preview.guidance is for this family."""
    embedded = draft.family in ("flux", "flux_kontext", "flux2")
    told = ""
    for picture in pictures:
        scale, inner = picture.pop("scale", None), picture.pop("guide", None)
        picture["guidance"] = inner if embedded else scale
        if embedded and scale not in (None, "1", "1.0", 1, 1.0):
            told = "--l (classifier-free guidance) is not used for this model here, only --g"
    return told


def set_previews(draft: Draft) -> None:
    """preview.* from a prompts file, prompts in the settings, or the page's fields."""
    fields = ["positive_prompts", "negative_prompts", "sample_width", "sample_height", "sample_cfg", "sample_seed"]
    fields += ["sample_steps"]
    keys = [key for key in ("sample_prompts", *fields) if draft.has(key)]
    pictures: list[dict[str, Any]] = []
    told: list[str] = []
    off = draft.has("enable_preview") and not words.on(draft.given["enable_preview"])
    draft.mapped("enable_preview", {}, "preview.prompts says it")
    if draft.has("sample_prompts"):
        pictures, told = read_prompts(draft, str(draft.given["sample_prompts"]))
    elif draft.has("positive_prompts"):
        names = ("negative", "width", "height", "scale", "seed", "steps")
        values = {name: draft.get(key) for name, key in zip(names, fields[1:], strict=True)}
        pictures = [{"prompt": draft.given["positive_prompts"], **values}]
    if off:
        draft.none([*keys, "sample_every_n_steps", "sample_every_n_epochs"], "previews are off", off=True)
    elif pictures:
        told += [guide(draft, pictures)]
        note = "; ".join(dict.fromkeys(filter(None, told)))
        own = ("prompts", "negative", "width", "height", "guidance", "seed", "steps")
        by_key = dict(zip(fields, own, strict=True))
        words.set_previews(draft, {key: by_key.get(key, "") for key in keys}, pictures, note)
        first = words.on(draft.get("sample_at_first"))
        draft.mapped("sample_at_first", {"preview.at_start": first})
        if not draft.has("sample_at_first"):
            draft.set("preview.at_start", False, f"not in the file: the default of {draft.tool.name}")
    elif keys:
        draft.none(keys, "the prompts are not here")
    draft.none([*fields, "sample_prompts", "sample_at_first"], "no prompts", off=True)
    if not pictures or off:
        draft.settings.pop("preview.every", None)


def read_prompts(draft: Draft, given: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Prompts of a .txt, .json or .toml file, or of the text itself; and what was told about them."""
    lines = given.splitlines()
    if len(lines) == 1 and re.search(r"\.(txt|json|toml)$", given.strip(), re.IGNORECASE):
        place = draft.find(given.strip())
        if place is None:
            draft.notes.append(f"sample_prompts = {given!r} is not here: put it beside {draft.source.path.name}")
            return [], []
        if place.suffix.lower() == ".txt":
            lines = decoded(place).splitlines()
        else:
            return _prompt_tables(read_source(place).data), []
    pictures, left = [], []
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            picture, unknown = parse_prompt(line)
            pictures.append(picture)
            left += unknown
    return pictures, [f"{', '.join(dict.fromkeys(left))} mean nothing here"] if left else []


def _prompt_tables(data: Any) -> list[dict[str, Any]]:
    """kohya's prompts as tables: a list of them, or [prompt] with [[prompt.subset]]."""
    if isinstance(data, dict):
        common = dict(data.get("prompt", {}))
        data = [{**common, **one} for one in common.pop("subset", [{}])]
    names = {"negative_prompt": "negative", "sample_steps": "steps", "guidance_scale": "guide"}
    return [{names.get(key, key): value for key, value in dict(one).items()} for one in data]


def set_compile(draft: Draft) -> None:
    """memory.compile from torch_compile or the backend of accelerate."""
    backend = draft.get("dynamo_backend")
    compiled = words.on(draft.get("torch_compile"))
    named = draft.has("dynamo_backend") and str(backend).lower() not in ("no", "none")
    if compiled or (named and draft.tool.name == "kohya_ss"):
        draft.differs(
            ["torch_compile", "dynamo_backend"], {"memory.compile": "blocks"}, "each repeated block is compiled, once"
        )
    draft.none(["torch_compile", "dynamo_backend"], "off", off=True)


# ---------------------------------------------------------------------------------------------------------------------
# The tools


def _looks_like_sd_scripts(source: Source) -> str:
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
    found = [str(value) for _, key, value in sections(data) if key == "network_module"]
    return found[-1].split(".")[-1] if found else ""


def _no_musubi(keys: Any) -> bool:
    return "dit" not in keys and "dit_high_noise" not in keys


def _looks_like_page(source: Source) -> str:
    data = source.data
    if source.kind != "json" or not isinstance(data, dict):
        return ""
    if "LoRA_type" in data:
        return "LoRA_type, which the page writes"
    return "max_resolution and train_batch_size" if {"max_resolution", "train_batch_size"} <= data.keys() else ""


def _looks_like_lora_scripts(source: Source) -> str:
    data = source.data
    if source.kind != "toml" or not isinstance(data, dict):
        return ""
    if isinstance(data.get("data"), dict) and isinstance(data.get("metadata"), dict):
        return "a preset with [metadata] and [data]"
    return "model_train_type" if "model_train_type" in {key for _, key, _ in sections(data)} else ""


def _combine_page(draft: Draft) -> None:
    combine(draft)
    draft.mapped("additional_parameters", {}, "read as options of sd-scripts")


def _combine_lora_scripts(draft: Draft) -> None:
    if "flux" in str(draft.get("model_train_type")):  # its pages start from other values
        draft.defaults |= {"network_dim": 2, "network_alpha": 16, "unet_lr": "5e-4", "resolution": "768,768"}
        draft.defaults |= {"max_train_epochs": 20, "optimizer_type": "PagedAdamW8bit", "bucket_reso_steps": 32}
        draft.defaults |= {"timestep_sampling": "sigmoid", "discrete_flow_shift": 1.0, "guidance_scale": 1.0}
        draft.defaults |= {"max_bucket_reso": 2048, "fp8_base": True, "save_precision": "bf16"}
        draft.defaults |= {"gradient_checkpointing": True, "model_prediction_type": "raw"}
    combine(draft)
    draft.mapped("ui_custom_params", {}, "read as settings")


SD_SCRIPTS = Tool(
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
    _looks_like_sd_scripts,
    _sd_scripts,
    combine,
    loose=True,
)
KOHYA_SS = Tool(
    "kohya_ss",
    "kohya_ss settings page 26",
    SD_SCRIPTS_RULES | PAGE_RULES,
    {"keep_tokens": 0},
    _looks_like_page,
    _page,
    _combine_page,
    PAGE_NAMES,
    loose=True,
)
LORA_SCRIPTS = Tool(
    "lora-scripts",
    "lora-scripts (SD-Trainer) of September 2025",
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
    },
    _looks_like_lora_scripts,
    _lora_scripts,
    _combine_lora_scripts,
    loose=True,
)
