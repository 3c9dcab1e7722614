"""OneTrainer: the JSON of a preset or of a saved configuration, with its concepts and samples.

Older configurations are flat, newer ones have the model's parts in tables. Facts: OneTrainer of August 2026,
configuration version 12.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from .. import families
from ..errors import Message, UserError
from ..families.sources import WEIGHT_ENDINGS
from ..settings import Adapter
from . import (
    adapter_settings,
    common_values,
    dataset_settings,
    layer_selection,
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
from .readers import Unfit, read_flag, read_number, read_positive, read_string, read_whole
from .rules import JOINT, Rule, map_idle, map_immaterial, map_none, map_to
from .source_files import Source, flatten_tables

NO_PART = remarks.TARGETS
NO_EMBEDDING = remarks.NO_EMBEDDINGS
PARTS_FREED = Message("this trainer frees text encoders and VAE before training")
NO_OFT = remarks.BELONGS_TO(key="OFT")
NO_LOKR = remarks.BELONGS_TO(key="LoKr")
NO_LOSS = remarks.ONE_LOSS
CONCEPT_OFF = Message("this concept is off")
NO_VALIDATION = remarks.VALIDATION
NO_COLOUR = remarks.NO_COLOURS
COLOURS = ("brightness", "contrast", "saturation")
COLOUR_SWITCHES = tuple(f"enable_random_{colour}" for colour in COLOURS)
COLOUR_LIMITS = tuple(f"random_{colour}_max_strength" for colour in COLOURS)
ROTATION = ("enable_random_rotate", "random_rotate_max_angle")
SWITCHES = ("enable_crop_jitter", ROTATION[0], *COLOUR_SWITCHES)
LIMITS = (ROTATION[1], *COLOUR_LIMITS)
"""Keys of a concept's image changes: what switches each on, and how far it goes."""
NO_VIDEO = dataset_settings.NO_CLIPS
SUBFOLDERS = Message("this trainer always searches subfolders")
WIDEST = 4.0
"""Aspect ratio of the widest of its buckets."""
PARTS = ("unet", "prior", "transformer")
TEXT_PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4")
OTHER_PARTS: tuple[str, ...]
OTHER_PARTS = ("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4", "vae", "effnet_encoder", "decoder")
OTHER_PARTS += ("decoder_text_encoder", "decoder_vqgan", "unconditional_transformer")

RULES: dict[str, Rule] = {
    "__version": map_idle(remarks.VERSION),
    "training_method": JOINT,
    "model_type": JOINT,
    "base_model_name": JOINT,
    "extra_model_name": map_none(Message("set model.components to a diffusers folder instead")),
    "debug_mode": map_idle(),
    "debug_dir": map_idle(),
    "workspace_dir": map_idle(Message("the run folder holds all files of a run")),
    "cache_dir": map_none(remarks.OTHER_CACHE),
    "tensorboard": JOINT,
    "tensorboard_expose": map_idle(remarks.LOGGING),
    "tensorboard_always_on": map_idle(remarks.LOGGING),
    "tensorboard_port": map_idle(remarks.LOGGING),
    "validation": map_none(NO_VALIDATION),
    "validate_after": map_idle(NO_VALIDATION),
    "validate_after_unit": map_idle(NO_VALIDATION),
    "continue_last_backup": map_none(remarks.RESUMES),
    "prevent_overwrites": map_immaterial(Message("this trainer never overwrites a run folder")),
    "include_train_config": map_idle(Message("the run folder holds the complete settings")),
    "multi_gpu": JOINT,
    "device_indexes": JOINT,
    **dict.fromkeys(
        ("gradient_reduce_precision", "fused_gradient_reduce", "async_gradient_reduce", "async_gradient_reduce_buffer"),
        map_idle(Message("train.gradient_exchange sets how processes exchange gradients")),
    ),
    "output_dtype": map_to("export.dtype", common_values.FILE_DTYPE),
    "output_model_format": map_none(remarks.FILE_FORMAT, "SAFETENSORS", "KOHYA"),
    "output_model_destination": JOINT,
    "async_offloading": map_idle(),
    "enable_async_offloading": map_idle(),
    "enable_activation_offloading": map_none(remarks.RECOMPUTED),
    "layer_offload_fraction": JOINT,
    "force_circular_padding": map_none(remarks.NOT_HERE),
    "compile": JOINT,
    "gradient_checkpointing": JOINT,
    "concept_file_name": JOINT,
    "circular_mask_generation": map_none(remarks.NO_MASK),
    "random_rotate_and_crop": map_none(remarks.CENTER_CROP),
    "aspect_ratio_bucketing": map_to("dataset.buckets", read_flag),
    "latent_caching": map_immaterial(remarks.ALWAYS_CACHED),
    "image_caching": map_immaterial(remarks.ALWAYS_CACHED),
    "text_caching": map_immaterial(remarks.ALWAYS_CACHED),
    "latent_caching_epochs": map_idle(),
    "clear_cache_before_training": map_idle(
        Message("the cache depends on content, so changed images and captions are encoded again")
    ),
    "learning_rate": JOINT,
    "learning_rate_scheduler": JOINT,
    "custom_learning_rate_scheduler": map_none(remarks.NO_OTHER_SCHEDULES),
    "scheduler_params": map_none(remarks.OF_CUSTOM_SCHEDULES),
    "scheduler_params.**": map_none(remarks.OF_CUSTOM_SCHEDULES),
    "learning_rate_warmup_steps": JOINT,
    "learning_rate_cycles": JOINT,
    "learning_rate_min_factor": JOINT,
    "learning_rate_scaler": JOINT,
    "epochs": JOINT,
    "batch_size": JOINT,
    "gradient_accumulation_steps": map_to("train.accumulate", read_whole),
    "clip_grad_norm": map_to("train.max_grad_norm", read_number),
    **dict.fromkeys(("ema", "ema_decay", "ema_update_step_interval"), JOINT),
    "non_ema_sampling": map_none(Message("previews use the EMA weights, as the LoRA files do")),
    **dict.fromkeys(
        ("dataloader_threads", "caching_threads", "prefetch_next_batch", "train_device", "temp_device")
        + ("enable_autocast_cache", "only_cache"),
        map_idle(),
    ),
    "train_dtype": JOINT,
    "fallback_train_dtype": map_idle(remarks.COUNTS(key="train_dtype")),
    "weight_dtype": JOINT,
    "resolution": JOINT,
    "frames": JOINT,
    "attention_mechanism": map_immaterial(remarks.ATTENTION),
    "mse_strength": map_none(NO_LOSS, 1, 1.0),
    "mae_strength": map_none(NO_LOSS),
    "log_cosh_strength": map_none(NO_LOSS),
    "huber_strength": map_none(NO_LOSS),
    "huber_delta": JOINT,
    "vb_loss_strength": map_idle(remarks.BELONGS_TO(key="PixArt")),
    "loss_weight_fn": JOINT,
    "loss_weight_strength": JOINT,
    "min_snr_gamma": JOINT,
    "loss_scaler": map_none(Message("this trainer does not scale the loss by the batch size"), "NONE"),
    "dropout_probability": map_to("adapter.dropout", read_number),
    "layer_filter": JOINT,
    "layer_filter_preset": JOINT,
    "layer_filter_regex": JOINT,
    "lora_layers": map_none(NO_PART),
    "lora_layer_preset": map_none(NO_PART, "full"),
    "offset_noise_weight": JOINT,
    "generalized_offset_noise": map_none(objective_settings.NO_NOISE),
    "perturbation_noise_weight": map_none(
        Message(
            "OneTrainer adds it to the target too, which only makes the noise stronger; objective.input_noise is "
            "not in the target"
        )
    ),
    "rescale_noise_scheduler_to_zero_terminal_snr": JOINT,
    "force_v_prediction": JOINT,
    "force_epsilon_prediction": JOINT,
    "timestep_distribution": JOINT,
    "min_noising_strength": JOINT,
    "max_noising_strength": JOINT,
    "noising_weight": JOINT,
    "noising_bias": JOINT,
    "timestep_shift": JOINT,
    "dynamic_timestep_shifting": JOINT,
    "cep_gamma": map_none(remarks.NOT_HERE),
    "k_noise_sampling": map_none(objective_settings.NO_NOISE, 1),
    "svd_dtype": map_none(Message("this trainer quantizes layers without a low-rank part"), "NONE"),
    "svd_rank": map_idle(remarks.BELONGS_TO(key="svd_dtype")),
    "quantization.layer_filter": map_none(remarks.LAYER_STORAGE),
    "quantization.layer_filter_preset": map_none(remarks.LAYER_STORAGE, "full", "blocks"),
    "quantization.**": map_none(remarks.LAYER_STORAGE),
    **{f"{part}.{name}": JOINT for part in PARTS for name in ("model_name", "train", "learning_rate", "weight_dtype")},
    **{f"{part}.{name}": JOINT for part in PARTS for name in ("gradient_checkpointing", "guidance_scale")},
    **{f"{part}.offload_fraction": JOINT for part in PARTS},
    **{f"{part}.**": map_none(Message("train.steps sets the length of training for all parts")) for part in PARTS},
    **{f"{part}.{name}": map_idle() for part in PARTS for name in ("include", "stop_training_after")},
    **{f"{part}.stop_training_after_unit": map_none(remarks.END, "NEVER", "EPOCH") for part in PARTS},
    **{
        f"{part}.{name}": map_idle(Message("this setting is for text encoders"))
        for part in PARTS
        for name in ("dropout_probability",)
    },
    **{f"{part}.{name}": map_idle(remarks.NO_EMBEDDINGS) for part in PARTS for name in ("train_embedding",)},
    **{f"{part}.attention_mask": map_none(remarks.OWN_ATTENTION) for part in PARTS},
    **{f"{part}.activation_offloading": map_none(remarks.NO_SWAP) for part in PARTS},
    **{f"{part}.{name}": JOINT for part in TEXT_PARTS for name in ("train", "learning_rate", "model_name")},
    "vae.model_name": JOINT,
    **{f"{part}.dropout_probability": map_none(remarks.DROPOUT_FOR_ALL) for part in OTHER_PARTS},
    **{f"{part}.**": map_idle(PARTS_FREED) for part in OTHER_PARTS},
    "text_encoder.dropout_probability": JOINT,
    "text_encoder_layer_skip": JOINT,
    **dict.fromkeys(
        ("text_encoder_2_layer_skip", "text_encoder_3_layer_skip", "text_encoder_4_layer_skip"),
        map_none(remarks.CLIP_SKIP),
    ),
    **dict.fromkeys(
        ("text_encoder_sequence_length", "text_encoder_2_sequence_length"),
        map_none(remarks.PROMPT_LENGTH, 77, 512),
    ),
    # Flat keys of older files
    "unet_weight_dtype": JOINT,
    "unet_learning_rate": JOINT,
    "prior_weight_dtype": JOINT,
    "prior_learning_rate": JOINT,
    "train_unet": map_none(remarks.DENOISER, True),
    "train_unet_epochs": map_idle(remarks.END),
    "train_prior": map_none(remarks.DENOISER, True),
    "train_prior_epochs": map_idle(remarks.END),
    "train_text_encoder": JOINT,
    "train_text_encoder_2": JOINT,
    "text_encoder_learning_rate": JOINT,
    "text_encoder_2_learning_rate": JOINT,
    **dict.fromkeys(
        ("train_text_encoder_epochs", "train_text_encoder_2_epochs")
        + ("text_encoder_weight_dtype", "text_encoder_2_weight_dtype")
        + ("vae_weight_dtype", "vae_model_name", "lora_weight_dtype_te"),
        map_idle(PARTS_FREED),
    ),
    **dict.fromkeys(("masked_training", "unmasked_weight", "normalize_masked_area_loss"), JOINT),
    "masked_prior_preservation_weight": JOINT,
    "unmasked_probability": map_idle(
        Message("this setting is for inpainting models, which this trainer does not train")
    ),
    "custom_conditioning_image": map_none(remarks.CONTROL_BY_HAND),
    **dict.fromkeys(
        ("embedding_learning_rate", "preserve_embedding_norm", "embedding.**", "embedding_weight_dtype")
        + ("token_count", "initial_embedding_text", "bundle_additional_embeddings"),
        map_idle(NO_EMBEDDING),
    ),
    "additional_embeddings": map_none(NO_EMBEDDING),
    "additional_embeddings.**": map_none(NO_EMBEDDING),
    "peft_type": JOINT,
    "lora_model_name": map_to("adapter.init_from", read_string, remarks.START),
    "lora_rank": map_to("adapter.rank", read_whole),
    "lora_alpha": map_to("adapter.alpha", read_number),
    "lora_decompose": JOINT,
    "lora_decompose_norm_epsilon": map_idle(remarks.BELONGS_TO(key="lora_decompose")),
    "lora_decompose_output_axis": map_idle(remarks.BELONGS_TO(key="lora_decompose")),
    "lora_weight_dtype": JOINT,
    **dict.fromkeys(
        (
            "oft_block_size",
            "oft_block_share",
            "oft_coft",
            "coft_eps",
            "dora_oft",
            "oft_scaled",
            "oft_clipped_norm",
            "oft_cans",
        ),
        map_idle(NO_OFT),
    ),
    **dict.fromkeys(("lokr_dim", "lokr_decompose_both", "lokr_decompose_factor", "lokr_full_matrix"), JOINT),
    **dict.fromkeys(("lokr_use_tucker", "lokr_weight_decompose"), JOINT),
    **dict.fromkeys(("lokr_dora_on_output", "lokr_vec_trick"), map_idle(NO_LOKR)),
    "optimizer": JOINT,
    "optimizer.optimizer": JOINT,
    "optimizer.weight_decay": map_to("optimizer.weight_decay", read_number),
    "optimizer.beta1": map_to("optimizer.beta1", read_number),
    "optimizer.beta2": map_to("optimizer.beta2", read_number),
    "optimizer.eps": map_to("optimizer.eps", read_number),
    **dict.fromkeys((f"optimizer.{name}" for name in optimizer_settings.OF_PRODIGY), JOINT),
    "optimizer.stochastic_rounding": map_idle(remarks.ROUNDING),
    "optimizer.fused_back_pass": map_none(remarks.SUMMED),
    "optimizer.**": map_none(remarks.NOT_AN_ARGUMENT),
    "optimizer_defaults.**": map_idle(remarks.OTHER_OPTIMIZERS),
    "optimizer_defaults": map_idle(remarks.OTHER_OPTIMIZERS),
    "optimizer_weight_decay": map_to("optimizer.weight_decay", read_number),
    "weight_decay": map_to("optimizer.weight_decay", read_number),
    "sample_definition_file_name": JOINT,
    "samples": JOINT,
    "samples.*.prompt": JOINT,
    "samples.*.negative_prompt": JOINT,
    "samples.*.width": JOINT,
    "samples.*.height": JOINT,
    "samples.*.seed": JOINT,
    "samples.*.diffusion_steps": JOINT,
    "samples.*.cfg_scale": JOINT,
    "samples.*.frames": JOINT,
    "samples.*.enabled": JOINT,
    "samples.*.random_seed": map_none(Message("previews always keep their seed")),
    "samples.*.noise_scheduler": map_none(remarks.NO_SAMPLER, "DDIM", "EULER"),
    "samples.*.**": map_idle(Message("this setting is for other models")),
    "samples.*.sample_inpainting": map_none(Message("this trainer does not draw inpainting previews")),
    "sample_after": JOINT,
    "sample_after_unit": JOINT,
    "sample_skip_first": JOINT,
    **dict.fromkeys(
        ("sample_image_format", "sample_video_format", "sample_audio_format", "samples_to_tensorboard"),
        map_idle(Message("previews are .png files in the run folder")),
    ),
    "cloud.**": map_idle(Message("training runs on the machine where it is started")),
    "secrets.**": map_idle(Message("this trainer uses no accounts")),
    "backup_after": JOINT,
    "backup_after_unit": JOINT,
    "rolling_backup": JOINT,
    "rolling_backup_count": JOINT,
    "backup_before_save": map_immaterial(Message("this trainer saves a checkpoint before each LoRA file")),
    "save_every": JOINT,
    "save_every_unit": JOINT,
    "save_after": JOINT,
    "save_after_unit": JOINT,
    "save_skip_first": map_idle(),
    "save_filename_prefix": map_none(Message("LoRA files are named after the job")),
    "concepts": JOINT,
    "concepts.*.path": JOINT,
    "concepts.*.enabled": JOINT,
    "concepts.*.repeats": JOINT,
    "concepts.*.balancing": JOINT,
    "concepts.*.balancing_strategy": JOINT,
    "concepts.*.include_subdirectories": JOINT,
    "concepts.*.text.prompt_source": JOINT,
    "concepts.*.text.prompt_path": map_none(remarks.CAPTION_FILES),
    "concepts.*.text.enable_tag_shuffling": JOINT,
    "concepts.*.text.keep_tags_count": JOINT,
    "concepts.*.text.tag_delimiter": JOINT,
    "concepts.*.text.tag_dropout_enable": JOINT,
    "concepts.*.text.tag_dropout_probability": JOINT,
    "concepts.*.text.tag_dropout_mode": JOINT,
    "concepts.*.text.tag_dropout_special_tags_mode": JOINT,
    "concepts.*.text.**": map_idle(Message("this setting is used only by tag dropout and random capitals")),
    "concepts.*.text.caps_randomize_enable": map_none(Message("this trainer does not change captions to capitals")),
    "concepts.*.image.enable_random_flip": JOINT,
    "concepts.*.image.enable_fixed_flip": map_none(Message("this trainer mirrors images at random or not at all")),
    "concepts.*.image.enable_crop_jitter": JOINT,
    "concepts.*.image.enable_random_rotate": JOINT,
    "concepts.*.image.random_rotate_max_angle": JOINT,
    "concepts.*.image.enable_fixed_rotate": map_none(remarks.NO_ROTATION),
    "concepts.*.image.enable_resolution_override": JOINT,
    "concepts.*.image.resolution_override": JOINT,
    **{f"concepts.*.image.enable_random_{what}": JOINT for what in COLOURS},
    **{f"concepts.*.image.random_{what}_max_strength": JOINT for what in COLOURS},
    **{f"concepts.*.image.enable_fixed_{what}": map_none(NO_COLOUR) for what in (*COLOURS, "hue")},
    "concepts.*.image.enable_random_hue": map_none(NO_COLOUR),
    "concepts.*.image.enable_random_circular_mask_shrink": map_none(remarks.NO_MASK),
    "concepts.*.image.enable_random_mask_rotate_crop": map_none(remarks.NO_MASK),
    "concepts.*.image.**": map_idle(Message("this setting is for a change of colours or angle that is off")),
    "concepts.*.validation_concept": map_none(NO_VALIDATION),
    "concepts.*.type": JOINT,
    "concepts.*.loss_weight": JOINT,
    "concepts.*.image_variations": JOINT,
    "concepts.*.text_variations": JOINT,
    "concepts.*.name": map_idle(Message("this is the concept's name")),
    "concepts.*.seed": map_idle(Message("this trainer uses the job's seed")),
    "concepts.*.__version": map_idle(remarks.VERSION),
    "concepts.*.concept_stats.**": map_idle(remarks.COUNTED),
    "concepts.*.concept_stats": map_idle(remarks.COUNTED),
}

MODELS = {
    "STABLE_DIFFUSION_15": "sd15",
    "STABLE_DIFFUSION_20": "sd2",
    "STABLE_DIFFUSION_20_BASE": "sd2",
    "STABLE_DIFFUSION_21": "sd2",
    "STABLE_DIFFUSION_21_BASE": "sd2",
    "STABLE_DIFFUSION_3": "sd3",
    "STABLE_DIFFUSION_35": "sd3",
    "STABLE_DIFFUSION_XL_10_BASE": "sdxl",
    "FLUX_DEV_1": "flux",
    "FLUX_2": "flux2",
    "QWEN": "qwen_image",
    "Z_IMAGE": "z_image",
    "CHROMA_1": "chroma",
    "HI_DREAM_FULL": "hidream",
    "SANA": "sana",
    "KREA_2": "krea2",
    "ANIMA": "anima",
    "ERNIE": "ernie_image",
    "HUNYUAN_VIDEO": "hunyuan_video",
}


OTHER_METHODS = {
    "EMBEDDING": remarks.EMBEDDING,
    "FINE_TUNE_VAE": Message("these settings train the VAE"),
}
"""Training methods that cannot be converted -> what they train."""


def flatten(draft: Draft) -> Iterable[tuple[str, str, Any]]:
    """Yield the settings, the concepts and the samples, each from this file or from their own file."""
    data = draft.source.data
    if not isinstance(data, dict):
        raise UserError(
            Message(
                "{path}: the file holds a list, not settings. Give the configuration instead of the list of concepts",
                path=draft.source.path,
            )
        )
    yield from ((key, key, value) for key, value in flatten_tables(data))
    for name, prefix in (("concept_file_name", "concepts"), ("sample_definition_file_name", "samples")):
        path = data.get(name)
        if path and not data.get(prefix):
            inner = draft.refer(name, str(path))
            if isinstance(inner, list):
                file = re.split(r"[/\\]", str(path))[-1]
                yield from ((f"{file}: {key}", f"{prefix}.{key}", value) for key, value in flatten_tables(inner))


def combine(draft: Draft) -> None:
    """Convert all settings of a job."""
    kind = str(draft.get("model_type") or "")
    paths = [draft.get("base_model_name"), *(draft.get(f"{part}.model_name") for part in PARTS)]
    model_settings.set_family(
        draft,
        "model_type",
        *model_settings.refine_kind(MODELS.get(kind, kind.lower()), f"model_type = {kind!r}", paths),
    )
    method = str(draft.get("training_method") or "LORA")
    if method == "LORA":
        draft.report_mapped("training_method", {}, remarks.A_LORA)
    elif method in OTHER_METHODS:
        model_settings.refuse(draft, OTHER_METHODS[method])
    else:
        model_settings.set_whole_model(draft, "", "training_method")
    part = _find_denoiser_part(draft)
    _set_path(draft, part)
    model_settings.set_clip_skip(draft, "text_encoder_layer_skip", from_zero=True)
    model_settings.set_dtype(draft, "train_dtype")
    _set_storage(draft, part)
    _set_adapter(draft)
    _set_folders(draft)
    tracker_settings.set_tracker(draft, "tensorboard", "tensorboard")
    per_epoch = _set_length_and_rate(draft, part)
    _set_loss_and_timesteps(draft, part)
    chosen = str(draft.get("ema") or "OFF") != "OFF"
    interval = "ema_update_step_interval"
    optimizer_settings.set_ema(draft, "ema", "ema_decay", chosen=chosen, usual=0.999, interval_key=interval)
    _set_memory(draft, part)
    _set_previews(draft, per_epoch)
    if draft.get("aspect_ratio_bucketing") is None or common_values.is_on(draft.get("aspect_ratio_bucketing")):
        draft.assume("dataset.max_aspect", WIDEST, "aspect_ratio_bucketing", remarks.WIDEST_BUCKET)
    destination = draft.get("output_model_destination", read_string)
    if destination:
        common_values.set_name(
            draft, "output_model_destination", common_values.get_stem(destination), Message("this is the file's name")
        )


def _find_denoiser_part(draft: Draft) -> str:
    """Return the name of the denoiser among the model's parts: unet, transformer, or (in older files) prior."""
    if model_settings.predicts_noise(draft.family):
        return "unet"
    return "transformer" if any(key.startswith("transformer.") for key in draft.given) else "prior"


def _set_path(draft: Draft, part: str) -> None:
    single = f"{part}.model_name"
    if draft.has(single):
        folder = draft.get("base_model_name", read_string)
        draft.report_mapped(
            "base_model_name", {"model.components": folder}, Message("the denoiser has a file of its own")
        )
        model_settings.set_model_path(draft, single)
    else:
        model_settings.set_model_path(draft, "base_model_name")
    _set_part_files(draft)
    for other in PARTS:
        draft.report_unmatched(f"{other}.model_name", remarks.ANOTHER_PART, off=True)


def _set_part_files(draft: Draft) -> None:
    """Set model.files from the parts' own files; OneTrainer names text encoders as diffusers does."""
    files = {part: path for part in ("vae", *TEXT_PARTS) if (path := draft.get(f"{part}.model_name", read_string))}
    single = {part: path for part, path in files.items() if path.lower().endswith(WEIGHT_ENDINGS)}
    draft.report_mapped([f"{part}.model_name" for part in single], {"model.files": single} if single else {})
    others = [f"{part}.model_name" for part in files if part not in single]
    draft.report_unmatched(others, remarks.ONLY_SAFETENSORS)


def _set_storage(draft: Draft, part: str) -> None:
    keys = [f"{part}.weight_dtype", f"{part}_weight_dtype", "weight_dtype"]
    used = next((key for key in keys if draft.has(key) and draft.given[key] != "NONE"), "")
    if used:
        model_settings.set_storage(draft, [used], draft.given[used], "OneTrainer")
    rest = [*keys, *(f"{other}.weight_dtype" for other in PARTS), "unet_weight_dtype", "prior_weight_dtype"]
    draft.report_unmatched(rest, remarks.COUNTS(key=used or part), off=True)


def _set_lokr(draft: Draft, kind: str) -> None:
    keys = ("lokr_dim", "lokr_decompose_both", "lokr_decompose_factor", "lokr_full_matrix")
    more = ("lokr_use_tucker", "lokr_weight_decompose")
    if kind != "lokr":
        draft.report_unmatched([*keys, *more], NO_LOKR, off=True)
        return
    rank, both, factor, full = (draft.get(key) for key in keys)
    if factor is not None:
        draft.report_mapped(
            "lokr_decompose_factor",
            {"adapter.factor": adapter_settings.read_lokr_factor(factor)},
            remarks.MINUS_ONE,
        )
    draft.report_mapped("lokr_decompose_both", {"adapter.decompose_both": common_values.is_on(both)})
    if rank is not None or common_values.is_on(full):
        settings = {
            "adapter.rank": adapter_settings.choose_lokr_rank(common_values.parse_whole("lokr_dim", rank or 1), full)
        }
        draft.report_mapped(["lokr_dim", "lokr_full_matrix"], settings)
        draft.report_unmatched("lora_rank", remarks.COUNTS(key="lokr_dim"), off=True)
    draft.report_unmatched("lokr_full_matrix", remarks.OFF, off=True)
    for key in more:
        draft.report_unmatched(
            key, Message("LoKr does not have this setting in this trainer"), off=not common_values.is_on(draft.get(key))
        )


def _set_adapter(draft: Draft) -> None:
    kind = common_values.normalize_name(draft.get("peft_type") or "lora")
    kind = "dora" if kind == "lora" and common_values.is_on(draft.get("lora_decompose")) else kind
    keys = ["peft_type", "lora_decompose"] if common_values.is_on(draft.get("lora_decompose")) else ["peft_type"]
    adapter_settings.set_type(draft, keys, kind)
    draft.report_unmatched("lora_decompose", remarks.OFF, off=True)
    _set_lokr(draft, kind)
    for part in PARTS:
        if draft.has(f"{part}.train") and read_flag(draft.given[f"{part}.train"]):
            draft.report_mapped(f"{part}.train", {}, remarks.DENOISER)
        draft.report_unmatched(f"{part}.train", remarks.DENOISER)
    dtype = draft.get("lora_weight_dtype")
    if dtype:
        ours = common_values.FILE_DTYPE(dtype)
        draft.report_mapped("lora_weight_dtype", {"adapter.dtype": "fp32" if ours == "fp32" else "bf16"})
    filters = ["layer_filter", "layer_filter_preset", "layer_filter_regex"]
    names = draft.get("layer_filter", read_string)
    if not names and ("layer_filter" in draft.given or draft.get("layer_filter_preset") == "full"):
        target_modules.assume_every_layer(draft)
    words = [name.strip() for name in (names or "").split(",") if name.strip()]
    if words:
        rank = draft.settings.get("adapter.rank") or draft.get("lora_rank", read_whole) or Adapter().rank
        is_regex = common_values.is_on(draft.get("layer_filter_regex"))
        if not _set_selected_layers(draft, filters, words, rank) and not is_regex:
            adapter_settings.set_filter(draft, filters, words, [], rank)
            target_modules.widen_for_filter(draft, words)
    draft.report_unmatched(filters, NO_PART, off=not names)
    if str(draft.get("output_model_format")).upper() in FUSED_FORMATS:
        target_modules.report_fused_originals(draft)


FUSED_FORMATS = ("ORIGINAL", "KOHYA", "COMFY")
"""Formats of a LoRA for which OneTrainer trains the layers that the makers' code fuses as one (FusedModule.py)."""


def _set_selected_layers(draft: Draft, keys: list[str], words: list[str], rank: int) -> bool:
    """Set adapter.targets and adapter.ranks to the layers that a filter selects, if these are in the blocks.

    OneTrainer: modules/module/ModuleFilter.py, a part of a layer's name or an expression that is found in it.

    Returns:
        False if the filter cannot be converted in this way, which needs the names of all layers.
    """
    is_regex = common_values.is_on(draft.get("layer_filter_regex"))
    if draft.family not in families.list_families() or not layer_selection.count_blocks(draft.family):
        return False
    if not all(layer_selection.names_blocks_only(draft.family, word) for word in words):
        return False
    try:
        patterns = layer_selection.compile_all([word if is_regex else re.escape(word) for word in words])
        settings = layer_selection.make_settings(
            draft.family, lambda name: any(pattern.search(name) for pattern in patterns), rank
        )
    except Unfit:
        return False
    draft.report_mapped(keys, settings)
    return True


def _set_masks(draft: Draft) -> None:
    keys = ["unmasked_weight", "normalize_masked_area_loss", "masked_prior_preservation_weight"]
    if common_values.is_on(draft.get("masked_training")):
        draft.report_mapped("masked_training", {}, Message("each folder has mask = '*-masklabel'"))
        weight = draft.get("unmasked_weight", read_number)
        note = Message(
            "this trainer reads grey as a share of the way from this weight to 1; OneTrainer raises darker grey to "
            "this weight"
        )
        draft.report_different(
            "unmasked_weight", {"objective.unmasked_weight": 0.1 if weight is None else weight}, note
        )
        if common_values.is_on(draft.get("normalize_masked_area_loss")):
            draft.report_mapped("normalize_masked_area_loss", {"objective.normalize_mask": True})
        if prior := draft.get("masked_prior_preservation_weight", read_number):
            draft.report_mapped("masked_prior_preservation_weight", {"objective.prior_outside_masks": float(prior)})
        draft.report_unmatched(keys[1:], remarks.OFF, off=True)
    draft.report_unmatched(["masked_training", *keys[:2]], remarks.OFF, off=True)
    if not common_values.is_on(draft.get("masked_training")):
        draft.report_unmatched(keys[2:], remarks.BELONGS_TO(key="masked_training"), off=True)


def _set_folders(draft: Draft) -> None:
    tables = sorted({m[0] for key in draft.given if (m := re.match(r"concepts\.\d+\.", key))})
    kept: list[str] = []
    for table in tables:
        if reason := _explain_left_out(draft, table):
            own = [key for key in draft.given if key.startswith(table)]
            draft.report_unmatched(own, reason, off=reason == CONCEPT_OFF)
        else:
            kept.append(table)
            _add_folder(draft, table)
    draft.report_mapped(["concept_file_name"], {}, remarks.READ_TOO if tables else remarks.FILE_NOT_FOUND)
    _set_masks(draft)
    draft.report_unmatched("concepts", remarks.EMPTY, off=True)
    if not kept and draft.has("concept_file_name"):
        draft.folders = [Folder("TODO")]
        draft.add_todo("dataset.folders", remarks.FOLDERS_OF(file=draft.get("concept_file_name")))
    if kept:
        _set_flip_and_tags(draft, kept)
        _set_variants(draft, kept)
    dropped = draft.get("text_encoder.dropout_probability", read_number)
    if dropped:
        draft.report_mapped("text_encoder.dropout_probability", {"dataset.caption_dropout": dropped})
    draft.report_unmatched("text_encoder.dropout_probability", remarks.OFF, off=True)
    _set_resolutions(draft, kept)
    _set_frames(draft)
    switches = [f"{table}image.enable_resolution_override" for table in kept]
    draft.report_unmatched(
        [*switches, *(f"{table}image.resolution_override" for table in kept)],
        remarks.COUNTS(key="resolution"),
        off=True,
    )


def _explain_left_out(draft: Draft, table: str) -> str:
    """Return why a concept is no folder of images to train on; "" if it is one."""
    kind = str(draft.get(f"{table}type") or "STANDARD")
    validation = common_values.is_on(draft.get(f"{table}validation_concept")) or kind == "VALIDATION"
    disabled = draft.has(f"{table}enabled") and not read_flag(draft.given[f"{table}enabled"])
    path = draft.get(f"{table}path", read_string)
    if disabled:
        return CONCEPT_OFF
    if validation:
        return NO_VALIDATION
    return "" if path else remarks.EMPTY


def _add_folder(draft: Draft, table: str) -> None:
    """Add a concept's folder to the draft, and report the concept's own keys."""
    at = f"dataset.folders.{len(draft.folders)}"
    counted = f"{table}balancing" if draft.has(f"{table}balancing") else f"{table}repeats"
    repeats = draft.get(counted, read_number) or 1.0
    by_samples = draft.get(f"{table}balancing_strategy") == "SAMPLES"
    deep = common_values.is_on(draft.get(f"{table}include_subdirectories"))
    masked = common_values.is_on(draft.get("masked_training"))
    folder = Folder(
        draft.get(f"{table}path", read_string), 1 if by_samples else repeats, mask="*-masklabel" if masked else ""
    )
    dataset_settings.count_images(draft, folder, deep=deep)
    draft.report_mapped(f"{table}path", {}, remarks.SETS(setting=f"{at}.path"))
    if by_samples and folder.images:
        folder.repeats = repeats / folder.images
        note = Message(
            "{at}.repeats = {repeats} gives {samples} samples per epoch from {images} images",
            at=at,
            repeats=f"{folder.repeats:.4g}",
            samples=f"{repeats:g}",
            images=folder.images,
        )
        draft.report_mapped([counted, f"{table}balancing_strategy"], {}, note)
    elif by_samples:
        note = Message(
            "the folder was not found; set {at}.repeats to {samples} samples per epoch divided by the number of images",
            at=at,
            samples=f"{repeats:g}",
        )
        draft.report_unmatched(counted, note)
    else:
        draft.report_mapped(counted, {}, remarks.SETS(setting=f"{at}.repeats = {repeats:g}"))
    draft.report_unmatched(f"{table}balancing_strategy", remarks.BELONGS_TO(key="balancing"), off=not by_samples)
    if deep:
        draft.report_mapped(f"{table}include_subdirectories", {}, SUBFOLDERS)
    elif draft.has(f"{table}include_subdirectories"):
        draft.report_different(f"{table}include_subdirectories", {}, SUBFOLDERS)
    _report_caption_source(draft, table, at)
    if draft.get(f"{table}type") == "PRIOR_PREDICTION":
        folder.regularization = True
        draft.report_mapped(f"{table}type", {"objective.prior_for_regularization": True}, remarks.BASE_AS_TARGET)
    for name in ("type", "enabled"):
        draft.report_mapped(f"{table}{name}", {}, Message("this trainer uses this concept"))
    dataset_settings.weigh(draft, f"{table}loss_weight", folder, at)
    draft.folders.append(folder)


def _report_caption_source(draft: Draft, table: str, at: str) -> None:
    """Report where a concept's captions come from; `at` is our name of its folder."""
    source = draft.get(f"{table}text.prompt_source") or "sample"
    if source == "sample":
        note = Message("captions are files beside the images; of several lines, one is drawn each time")
        if draft.has(f"{table}text.prompt_source"):
            draft.report_mapped(f"{table}text.prompt_source", {"dataset.caption_lines": "one"}, note)
        else:
            draft.assume("dataset.caption_lines", "one", "text.prompt_source", note)
    else:
        draft.report_unmatched(f"{table}text.prompt_source", remarks.CAPTION_FILES)
        draft.todo.append(
            Message(
                "{key}: OneTrainer takes captions from {source}; write them as .txt files beside the images",
                key=at,
                source=repr(source),
            )
        )


def _set_flip_and_tags(draft: Draft, tables: list[str]) -> None:
    """Set dataset.flip and the shuffling and dropout of tags, with one value for all concepts."""
    keys, values = draft.collect("image.enable_random_flip", tables)
    dataset_settings.set_shared(
        draft, keys, [True if value is None else value for value in values], "dataset.flip", read_flag
    )
    dataset_settings.set_shared(
        draft, *draft.collect("text.enable_tag_shuffling", tables), "dataset.shuffle_tags", read_flag
    )
    _set_tag_dropout(draft, tables)
    tags = draft.settings.get("dataset.shuffle_tags") or draft.settings.get("dataset.tag_dropout")
    for name, setting, read in (
        ("text.keep_tags_count", "dataset.keep_tokens", read_whole),
        ("text.tag_delimiter", "dataset.tag_separator", lambda value: str(value).strip() or " "),
        ("text.text_variations", "dataset.caption_variants", read_whole),
        ("text_variations", "dataset.caption_variants", read_whole),
    ):
        keys, values = draft.collect(name, tables)
        if tags:
            dataset_settings.set_shared(draft, keys, values, setting, read)
        draft.report_unmatched(keys, Message("this setting has no effect without tag shuffling"), off=True)


def _set_variants(draft: Draft, tables: list[str]) -> None:
    """Set the variants of images, if OneTrainer caches several versions of each."""
    keys, counts = draft.collect("image_variations", tables)
    if max([read_whole(count) for count in counts if count not in (None, "")], default=1) > 1:
        is_used = [_set_random_crop(draft, tables), _set_rotation(draft, tables), _set_color_jitter(draft, tables)]
        if any(is_used):
            dataset_settings.set_shared(
                draft, keys, counts, "dataset.image_variants", lambda count: min(64, read_whole(count))
            )
    for name in (*SWITCHES, *LIMITS):
        for key, value in zip(*draft.collect(f"image.{name}", tables), strict=True):
            is_on = name in SWITCHES and (value is None or read_flag(value))
            draft.report_unmatched(key, remarks.ONE_VERSION if is_on else remarks.OFF, off=not is_on)
    draft.report_unmatched(keys, remarks.OFF, off=True)


def _set_random_crop(draft: Draft, tables: list[str]) -> bool:
    """Set dataset.random_crop, which OneTrainer has on by default. Return True if a concept uses it."""
    keys, values = draft.collect("image.enable_crop_jitter", tables)
    switches = [True if value is None else value for value in values]
    dataset_settings.set_shared(draft, keys, switches, "dataset.random_crop", read_flag)
    return any(map(read_flag, switches))


def _set_rotation(draft: Draft, tables: list[str]) -> bool:
    """Set dataset.rotate to the largest angle. Return True if a concept uses it."""
    angles = [_read_limit(draft, f"{table}image.", "rotate", "angle") for table in tables]
    if not any(angles):
        return False
    keys = [f"{table}image.{name}" for table in tables for name in ROTATION]
    dataset_settings.set_shared(draft, keys, angles, "dataset.rotate", lambda angle: min(angle, 45.0))
    return True


def _set_color_jitter(draft: Draft, tables: list[str]) -> bool:
    """Set dataset.color_jitter to the largest strength of a concept's colours. Return True if a concept uses it."""
    strengths = [
        max(_read_limit(draft, f"{table}image.", colour, "strength") for colour in COLOURS) for table in tables
    ]
    if not any(strengths):
        return False
    keys = [f"{table}image.{name}" for table in tables for name in (*COLOUR_SWITCHES, *COLOUR_LIMITS)]
    note = Message("this trainer has one strength for brightness, contrast and saturation")
    dataset_settings.set_shared(
        draft, keys, strengths, "dataset.color_jitter", lambda strength: min(strength, 0.9), note
    )
    return True


def _read_limit(draft: Draft, table: str, what: str, unit: str) -> float:
    """Return the limit of a change that a concept has switched on; 0 if it has not."""
    if not read_flag(draft.get(f"{table}enable_random_{what}") or False):
        return 0.0
    return read_number(draft.get(f"{table}random_{what}_max_{unit}") or 0.0)


def _set_frames(draft: Draft) -> None:
    """Set dataset.frames, if the architecture is trained on clips."""
    lengths = [read_whole(part) for part in str(draft.get("frames") or "").split(",") if part.strip()]
    if draft.family in families.list_families() and any(families.get(draft.family).clips):
        dataset_settings.set_clips(
            draft,
            ["frames"],
            lengths,
            [],
            "head",
            Message("the lengths apply to every folder; this trainer takes the head of a clip (dataset.clip)"),
        )
    draft.report_unmatched("frames", NO_VIDEO, off=True)  # the page writes it for every model


def _set_resolutions(draft: Draft, tables: list[str]) -> None:
    """Set each concept's own resolution, and the general one for the others; of several in one text, the largest."""
    general, own = "resolution", {}
    for table in tables:
        if common_values.is_on(draft.get(f"{table}image.enable_resolution_override")):
            own[table] = f"{table}image.resolution_override"
    sizes = {key: re.split(r"\s*,\s*", str(draft.get(key) or "").strip()) for key in [general, *own.values()]}
    if several := [size for key in sizes for size in sizes[key] if len(sizes[key]) > 1 and size]:
        dataset_settings.set_resolution(draft, list(sizes), several)
    elif values := [sizes[own.get(table, general)][0] for table in tables]:
        dataset_settings.set_resolutions(draft, list(sizes), values)
    elif sizes[general][0]:
        dataset_settings.set_resolution(draft, [general], sizes[general])


def _set_text_encoders(draft: Draft, scale: float) -> None:
    """Set the text encoders: OneTrainer trains each of them, at learning_rate, unless the file says otherwise."""
    clips = max(1, model_settings.count_trained_text(draft.family))
    keys: list[str] = []
    rate_keys: list[str] = []
    rates: dict[str, float] = {}
    left_out, trained = [], True
    for part in TEXT_PARTS:
        switches = [key for key in (f"{part}.train", f"train_{part}") if key in draft.given]
        own = [key for key in (f"{part}.learning_rate", f"{part}_learning_rate") if key in draft.given]
        if part not in TEXT_PARTS[:clips]:
            on = any(common_values.is_on(draft.given[key]) for key in switches)
            draft.report_unmatched(
                [*switches, *own], Message("this trainer does not train T5 or language models"), off=not on
            )
            continue
        keys, rate_keys = [*keys, *switches], [*rate_keys, *own]
        used = next((key for key in own if draft.has(key)), "learning_rate")
        rate = draft.get(used, read_number)
        trained = all(common_values.is_on(draft.given[key]) for key in switches) if switches else trained
        if rate and trained:
            rates[part] = rate * scale
        else:
            left_out.append(part)
    why = "" if keys else Message("OneTrainer trains the text encoders too, unless the file says otherwise")
    optimizer_settings.set_text_encoders(draft, keys, rate_keys, rates, why, left_out)
    for part in rates if draft.settings.get("adapter.text_encoder") else ():
        _set_end_of_text_encoder(draft, part)


def _set_end_of_text_encoder(draft: Draft, part: str) -> None:
    """Add a TODO if OneTrainer stops training a text encoder before the end (after 30 epochs by default)."""
    keys = [f"{part}.stop_training_after", f"{part}.stop_training_after_unit", f"train_{part}_epochs"]
    own = keys[0] if draft.has(keys[0]) else keys[2]
    count = draft.get(own, read_number) if draft.has(own) else 30
    unit = str(draft.get(keys[1]) or "EPOCH")
    end = {"EPOCH": draft.get("epochs", read_number), "STEP": draft.settings.get("train.steps")}.get(unit)
    if unit == "NEVER" or isinstance(end, int | float) and count >= end:
        draft.report_unmatched(keys, Message("both trainers train text encoders until the end"), off=True)
        return
    draft.report_different(keys, {}, remarks.TEXT_TO_THE_END)
    what = Message(
        "OneTrainer stops training {part} after {count} {unit}s, but this trainer trains it until the end; "
        "choose a lower learning rate",
        part=part,
        count=f"{count:g}",
        unit=unit.lower(),
    )
    draft.add_todo("optimizer.text_encoder_lr", what)


def _set_length_and_rate(draft: Draft, part: str) -> int | None:
    """Set steps, batch size, learning rate and schedule; return the steps per epoch if they are known."""
    batch = read_positive(draft.get("batch_size") or 1)
    devices = [device for device in str(draft.get("device_indexes") or "").split(",") if device.strip()]
    processes = len(devices) if common_values.is_on(draft.get("multi_gpu")) and devices else 1
    if processes > 1:
        note = remarks.BATCH_OF_ALL(batch=batch, processes=processes)
        draft.report_different(
            ["batch_size", "multi_gpu", "device_indexes"], {"train.batch_size": batch * processes}, note
        )
    else:
        draft.report_mapped("batch_size", {"train.batch_size": batch})
    draft.report_unmatched(["multi_gpu", "device_indexes"], Message("the training has one process"), off=True)
    accumulate = read_positive(draft.get("gradient_accumulation_steps") or 1)
    per_epoch = dataset_settings.count_steps_per_epoch(draft, batch, accumulate, processes)
    dataset_settings.set_steps_from_epochs(draft, "epochs", read_positive(draft.get("epochs")), per_epoch, batch)
    scaler = str(draft.get("learning_rate_scaler") or "NONE")
    factors = {"BATCH": batch, "GRADIENT_ACCUMULATION": accumulate, "BOTH": batch * accumulate}
    scale = math.sqrt(factors.get(scaler, 1))
    rates = [f"{part}.learning_rate", f"{part}_learning_rate", "learning_rate"]
    used = next((key for key in rates if draft.has(key)), "learning_rate")
    name = "optimizer.optimizer" if draft.has("optimizer.optimizer") else "optimizer"
    optimizer_settings.set_optimizer(draft, name, [used], draft.get(used, read_number), scale)
    optimizer_settings.set_prodigy(draft, {name: f"optimizer.{name}" for name in optimizer_settings.OF_PRODIGY})
    if scale != 1:
        note = remarks.TIMES_ROOT(number=factors[scaler])
        draft.report_mapped("learning_rate_scaler", {"optimizer.lr_scale": scale}, note)
    draft.report_mapped("learning_rate_scaler", {}, Message("the learning rate is not scaled"))
    _set_text_encoders(draft, scale)
    others = [f"{other}.learning_rate" for other in PARTS] + ["unet_learning_rate", "prior_learning_rate"]
    draft.report_unmatched([*rates, *others], remarks.RATE_OF_DENOISER(rate_key=used), off=True)
    warmup = draft.get("learning_rate_warmup_steps", read_number)
    optimizer_settings.set_schedule(
        draft,
        optimizer_settings.ScheduleKeys(
            "learning_rate_scheduler",
            warmup="learning_rate_warmup_steps",
            cycles="learning_rate_cycles",
            floor="learning_rate_min_factor",
        ),
        warmup=warmup,
        floor=draft.get("learning_rate_min_factor", read_number),
        constant_warms_up=True,
    )
    backup = Message("this trainer saves a checkpoint to resume from, without the base model")
    _set_every(draft, "checkpoint.every", "backup_after", per_epoch, backup, False)
    done = False
    for key in ("save_every", "save_after"):
        done = (
            _set_every(draft, "export.every", key, per_epoch, Message("this trainer saves the LoRA files"), done)
            or done
        )
    keep = draft.get("rolling_backup_count", read_whole)
    if common_values.is_on(draft.get("rolling_backup")) and keep:
        draft.report_mapped(
            ["rolling_backup_count", "rolling_backup"],
            {"checkpoint.keep": common_values.clamp("checkpoint.keep", keep)},
        )
    draft.report_unmatched(
        ["rolling_backup_count", "rolling_backup"],
        Message("this trainer always keeps the newest checkpoints (checkpoint.keep)"),
        off=True,
    )
    return per_epoch


def _set_every(draft: Draft, setting: str, key: str, per_epoch: int | None, note: str, done: bool) -> bool:
    """Set one of our intervals, in steps, from a number and its unit. Return True if it was set.

    Args:
        draft: the import.
        setting: our setting.
        key: the tool's key with the number; its unit is in `{key}_unit`.
        per_epoch: steps per epoch; None if unknown.
        note: the difference in meaning, if there is one.
        done: another key has set it already.
    """
    unit_key = f"{key}_unit"
    count, unit = draft.get(key, read_number), str(draft.get(unit_key) or "NEVER")
    if not draft.has(key) and not draft.has(unit_key):
        return False
    if done or not count or unit in ("NEVER", "ALWAYS"):
        note = Message("another setting became {setting}", setting=setting) if done else remarks.OFF
        draft.report_unmatched([key, unit_key], note, off=True)
        return False
    if unit == "STEP":
        draft.report_different([key, unit_key], {setting: max(1, round(count))}, note)
        return True
    if unit == "EPOCH" and per_epoch:
        counted = remarks.EVERY_EPOCHS(epochs=f"{count:g}", steps=per_epoch)
        draft.report_different(
            [key, unit_key], {setting: max(1, round(count * per_epoch))}, remarks.join([counted, note])
        )
        return True
    draft.report_unmatched(
        [key, unit_key],
        Message("{setting} counts steps, not {unit}s; its default is used", setting=setting, unit=unit.lower()),
    )
    return False


def _set_tag_dropout(draft: Draft, tables: list[str]) -> None:
    """Set dataset.tag_dropout from the concepts that use it."""
    keys = [f"{t}text.tag_dropout_{key}" for t in tables for key in ("enable", "probability", "mode")]
    special = [f"{t}text.tag_dropout_special_tags_mode" for t in tables]
    chances = []
    for t in tables:
        on = common_values.is_on(draft.get(f"{t}text.tag_dropout_enable"))
        chances.append(draft.get(f"{t}text.tag_dropout_probability", read_number) if on else 0.0)
    modes = {
        str(draft.get(f"{t}text.tag_dropout_mode") or "FULL")
        for t, chance in zip(tables, chances, strict=True)
        if chance
    }
    if modes - {"RANDOM"}:
        draft.report_unmatched(
            keys, Message("this trainer drops each tag independently, as OneTrainer does with RANDOM")
        )
    elif modes:
        dataset_settings.set_shared(draft, keys, chances, "dataset.tag_dropout", read_number)
    draft.report_unmatched(keys, remarks.OFF, off=True)
    chosen = any(str(draft.get(key) or "NONE") != "NONE" for key in special)
    draft.report_unmatched(
        special,
        Message("this trainer always keeps the first keep_tokens tags and the trigger word"),
        off=not (modes and chosen),
    )


def _set_loss_and_timesteps(draft: Draft, part: str) -> None:
    for key, predicts in (("force_v_prediction", "v"), ("force_epsilon_prediction", "epsilon")):
        objective_settings.set_prediction(draft, key, predicts if common_values.is_on(draft.get(key)) else "")
    _set_loss(draft)
    objective_settings.set_noise_offset(draft, "offset_noise_weight")
    zero = "rescale_noise_scheduler_to_zero_terminal_snr"
    ours = {"objective.zero_terminal_snr": True} if common_values.is_on(draft.get(zero)) else {}
    objective_settings.set_of_diffusion(draft, zero, ours)
    _set_timesteps(draft)
    guidance = f"{part}.guidance_scale"
    if draft.has(guidance):
        draft.report_mapped(guidance, {"objective.guidance": read_number(draft.given[guidance])})
    draft.report_unmatched([f"{other}.guidance_scale" for other in PARTS], remarks.ANOTHER_PART, off=True)


def _set_loss(draft: Draft) -> None:
    """Set objective.loss, and the weight of the loss by noise level."""
    parts = {name: draft.get(f"{name}_strength", read_number) for name in ("mse", "mae", "log_cosh", "huber")}
    if parts["huber"] and parts["mse"] == 0 and not parts["mae"] and not parts["log_cosh"]:
        delta = draft.get("huber_delta", read_number)
        ours = {"objective.loss": "huber", "objective.huber_delta": 1.0 if delta is None else delta}
        keys = ["huber_strength", "huber_delta", "mse_strength"]
        draft.report_different(keys, ours, remarks.TWICE)
    draft.report_unmatched("huber_delta", remarks.BELONGS_TO(key="huber_strength"), off=True)
    weight, strength = str(draft.get("loss_weight_fn") or "CONSTANT"), draft.get("loss_weight_strength", read_number)
    if weight == "MIN_SNR_GAMMA":
        objective_settings.set_min_snr(draft, "loss_weight_strength", strength or 5.0)
        draft.report_mapped("loss_weight_fn", {}, Message("objective.min_snr_gamma sets this weighting"))
    elif weight == "DEBIASED_ESTIMATION":
        objective_settings.set_debiased(draft, "loss_weight_fn", True)
        draft.report_unmatched("loss_weight_strength", remarks.BELONGS_TO(key="MIN_SNR_GAMMA"), off=True)
    else:
        off = weight in ("CONSTANT", "NONE")
        draft.report_unmatched("loss_weight_fn", remarks.ONLY_MIN_SNR, off=off)
        draft.report_unmatched("loss_weight_strength", remarks.BELONGS_TO(key=weight), off=True)
    objective_settings.set_min_snr(draft, "min_snr_gamma")


def _set_timesteps(draft: Draft) -> None:
    """Set objective.timesteps, shift, t_min and t_max."""
    keys = ["timestep_distribution", "timestep_shift", "dynamic_timestep_shifting", "noising_weight", "noising_bias"]
    kind = str(draft.get("timestep_distribution") or "UNIFORM")
    notes: list[str] = []
    dynamic = common_values.is_on(draft.get("dynamic_timestep_shifting"))
    shift: float | str = "auto" if dynamic else draft.get("timestep_shift", read_number) or 1.0
    weight, bias = draft.get("noising_weight", read_number) or 0.0, draft.get("noising_bias", read_number) or 0.0
    shapes: dict[str, dict[str, Any]] = {
        "UNIFORM": {"objective.timesteps": "uniform"},
        "LOGIT_NORMAL": objective_settings.make_logit_normal(bias, weight + 1),
        "HEAVY_TAIL": {"objective.timesteps": "mode", "objective.mode_scale": weight},
        "COS_MAP": {"objective.timesteps": "cosmap"},
    }
    shape = shapes.get(kind)
    if shape is None:
        notes.append(remarks.LOGIT_NORMAL(method=kind))
        shape = objective_settings.make_logit_normal()
    _set_range(draft, kind, shift)
    if not model_settings.predicts_noise(draft.family):
        objective_settings.set_timesteps(draft, keys, shape, shift, remarks.join(notes), exact=not notes)
    elif kind != "UNIFORM" or shift != 1:
        if shift != 1:
            notes.append(Message("models that predict noise have no shift in this trainer"))
        (draft.report_different if notes else draft.report_mapped)(keys, shape, remarks.join(notes))
    draft.report_unmatched(keys, remarks.OFF, off=True)


def _set_range(draft: Draft, kind: str, shift: float | str) -> None:
    """Set objective.t_min and t_max; OneTrainer limits the range before the shift is applied."""
    for key, setting, end in (
        ("min_noising_strength", "objective.t_min", 0),
        ("max_noising_strength", "objective.t_max", 1),
    ):
        level = draft.get(key, read_number)
        if level is None or level == end:
            draft.report_unmatched(key, Message("this is the whole range"), off=True)
        elif kind != "UNIFORM":
            draft.report_different(
                key,
                {setting: level},
                Message("OneTrainer squeezes the distribution into the range; this trainer cuts it off"),
            )
        elif isinstance(shift, str):  # "auto"
            draft.report_different(
                key,
                {setting: level},
                Message(
                    "OneTrainer applies this limit before the shift, which depends on the image size; this trainer "
                    "applies it after the shift"
                ),
            )
        else:
            moved = shift * level / (1 + (shift - 1) * level)
            draft.report_mapped(
                key, {setting: round(moved, 6)}, "" if shift == 1 else Message("this is the value after the shift")
            )


def _set_memory(draft: Draft, part: str) -> None:
    used = f"{part}.gradient_checkpointing" if draft.has(f"{part}.gradient_checkpointing") else "gradient_checkpointing"
    value = draft.get(used)
    if draft.has(used):
        word = str(value).upper()
        if word == "CPU_OFFLOADED":
            note = remarks.RECOMPUTED
            draft.report_different(used, {"memory.gradient_checkpointing": True}, note)
        else:
            draft.report_mapped(used, {"memory.gradient_checkpointing": word in ("ON", "TRUE")})
    keys = ["gradient_checkpointing", *(f"{other}.gradient_checkpointing" for other in PARTS)]
    draft.report_unmatched(keys, remarks.ANOTHER_PART, off=True)
    if common_values.is_on(draft.get("compile")):
        draft.report_different("compile", {"memory.compile": "blocks"}, remarks.COMPILED)
    draft.report_unmatched("compile", remarks.OFF, off=True)
    shares = ["layer_offload_fraction", *(f"{other}.offload_fraction" for other in PARTS)]
    own = f"{part}.offload_fraction" if draft.has(f"{part}.offload_fraction") else "layer_offload_fraction"
    if own == "layer_offload_fraction" and str(value).upper() != "CPU_OFFLOADED":
        draft.report_unmatched(own, remarks.BELONGS_TO(key="gradient_checkpointing = CPU_OFFLOADED"), off=True)
    elif draft.has(own):
        memory_settings.set_offload(
            draft,
            own,
            draft.get(own, read_number),
            Message(
                "OneTrainer offloads a share of the layers; this trainer offloads that share of the frozen weights"
            ),
        )
    draft.report_unmatched(shares, remarks.ANOTHER_PART, off=True)


def _set_previews(draft: Draft, per_epoch: int | None) -> None:
    tables = sorted({m[0] for key in draft.given if (m := re.match(r"samples\.\d+\.", key))})
    pictures: list[dict[str, Any]] = []
    keys: dict[str, str] = {}
    for table in tables:
        if draft.has(f"{table}enabled") and not read_flag(draft.given[f"{table}enabled"]):
            draft.report_unmatched(
                [key for key in draft.given if key.startswith(table)], Message("this sample is off"), off=True
            )
            continue
        names = {"prompt": "prompt", "negative_prompt": "negative", "width": "width", "height": "height"}
        names |= {"seed": "seed", "diffusion_steps": "steps", "cfg_scale": "guidance", "frames": "frames"}
        pictures.append({ours: draft.get(f"{table}{name}") for name, ours in names.items()})
        keys |= {f"{table}{name}": ours.replace("prompt", "prompts") for name, ours in names.items()}
        draft.report_mapped(f"{table}enabled", {}, Message("this sample is on"))
    if pictures:
        preview_settings.set_previews(draft, keys, pictures)
        _set_every(draft, "preview.every", "sample_after", per_epoch, "", False)
        draft.set("preview.at_start", False, Message("OneTrainer draws the first preview after training has begun"))
    draft.report_mapped("sample_definition_file_name", {}, remarks.READ_TOO if tables else remarks.FILE_NOT_FOUND)
    rest = ["sample_after", "sample_after_unit", "sample_skip_first", "samples"]
    draft.report_unmatched(
        [*rest, *(key for key in draft.given if key.startswith("samples."))], remarks.NOT_PREVIEWED, off=True
    )


def recognise(source: Source) -> str:
    """Recognise JSON with training_method and model_type."""
    data = source.data
    if source.kind != "json" or not isinstance(data, dict):
        return ""
    keys = ("training_method", "model_type")
    return remarks.BOTH(first=keys[0], second=keys[1]) if data.keys() >= set(keys) else ""


TOOL = Tool(
    "onetrainer",
    Message("OneTrainer of August 2026"),
    RULES,
    {
        "lora_rank": 16,
        "lora_alpha": 1.0,
        "learning_rate": 3e-6,
        "optimizer": "ADAMW",
        "learning_rate_scheduler": "CONSTANT",
        "learning_rate_warmup_steps": 200,
        "epochs": 100,
        "batch_size": 1,
        "train_dtype": "FLOAT_16",
        "resolution": "512",
        "timestep_distribution": "UNIFORM",
        "timestep_shift": 1.0,
    },
    recognise,
    flatten,
    combine,
)
