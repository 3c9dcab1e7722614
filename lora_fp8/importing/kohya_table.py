"""The rules for sd-scripts 0.10.1; its settings pages and musubi-tuner share the table and add their own rules."""

from __future__ import annotations

from ..errors import Message
from . import common_values, objective_settings, remarks
from .readers import read_flag, read_number, read_string, read_whole
from .rules import JOINT, Rule, map_idle, map_immaterial, map_none, map_to

NO_CONV = remarks.NO_CONV
NO_PART = remarks.TARGETS
NO_RATIO = Message("both matrices of the LoRA have the same learning rate")
NO_DROPOUT = Message("adapter.dropout drops inputs of the LoRA")
NO_LYCORIS = Message("this trainer has no counterpart of this LyCORIS setting")
NO_MODULE = Message(
    "the file names no network_module, so the other trainer trains the whole model, unless its command names "
    "one; this trainer trains a LoRA instead"
)
NO_VALIDATION = remarks.VALIDATION

SD_SCRIPTS_RULES: dict[str, Rule] = {
    # Model
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
    "vae": JOINT,
    "qwen3": JOINT,
    "v_parameterization": JOINT,
    "no_half_vae": map_immaterial(Message("the VAE never runs in float16")),
    "tokenizer_cache_dir": map_idle(),
    "disable_mmap_load_safetensors": map_idle(),
    # Precision
    "mixed_precision": JOINT,
    "fp8_base": JOINT,
    "fp8_base_unet": JOINT,
    "fp8_scaled": JOINT,
    "fp8_vl": map_idle(remarks.TEXT_FREED),
    "full_bf16": map_none(
        Message("LoRA weights are bf16 with float32 master weights; with optimizer.rounding = 'nearest' they have none")
    ),
    "full_fp16": map_none(Message("this trainer does not use float16")),
    # Adapter
    "network_module": JOINT,
    "network_args": JOINT,
    "lycoris_algo": JOINT,
    "network_dim": map_to("adapter.rank", read_whole),
    "network_alpha": map_to("adapter.alpha", read_number),
    "network_dropout": map_to("adapter.dropout", read_number),
    "network_train_unet_only": JOINT,
    "network_train_text_encoder_only": map_none(remarks.DENOISER),
    "network_weights": map_to("adapter.init_from", read_string, remarks.START),
    "dim_from_weights": map_none(
        Message("set adapter.rank and adapter.alpha to the values of that LoRA file (`lora-fp8 inspect` shows them)")
    ),
    "base_weights": map_none(remarks.MERGE_BEFOREHAND),
    "base_weights_multiplier": map_none(remarks.BELONGS_TO(key="base_weights")),
    "scale_weight_norms": map_to("adapter.scale_weight_norms", read_number),
    "conv_dim": map_none(NO_CONV),
    "conv_alpha": map_none(NO_CONV),
    # Learning rate
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
    "lr_scheduler_type": map_none(remarks.NO_OTHER_SCHEDULES),
    "lr_scheduler_args": map_none(remarks.NO_OTHER_SCHEDULES),
    "lr_scheduler_timescale": map_none(remarks.BELONGS_TO(key="inverse_sqrt")),
    "lr_decay_steps": JOINT,
    "max_grad_norm": map_to("train.max_grad_norm", read_number),
    "fused_backward_pass": map_none(remarks.SUMMED),
    # Length
    "max_train_steps": JOINT,
    "max_train_epochs": JOINT,
    "epoch": JOINT,
    "train_batch_size": JOINT,
    "batch_size": JOINT,
    "num_processes": JOINT,
    "gradient_accumulation_steps": map_to("train.accumulate", read_whole),
    "gradient_checkpointing": map_to("memory.gradient_checkpointing", read_flag),
    "initial_epoch": map_none(remarks.RESUMES),
    "initial_step": map_none(remarks.RESUMES),
    "skip_until_initial_step": map_none(remarks.RESUMES),
    "seed": JOINT,
    # Images and captions
    "train_data_dir": JOINT,
    "dataset_config": JOINT,
    "image_dir": JOINT,
    "num_repeats": JOINT,
    "dataset_repeats": JOINT,
    "class_tokens": JOINT,
    "is_reg": JOINT,
    "reg_data_dir": JOINT,
    "prior_loss_weight": JOINT,
    "in_json": map_none(remarks.CAPTION_FILES),
    "metadata_file": map_none(remarks.CAPTION_FILES),
    "conditioning_data_dir": map_none(
        Message("this folder is for ControlNets, which this trainer does not train; with masked_loss it holds masks")
    ),
    "dataset_class": map_none(Message("this trainer does not load code of other packages")),
    "cache_info": map_idle(),
    "resolution": JOINT,
    "enable_bucket": JOINT,
    "min_bucket_reso": JOINT,
    "max_bucket_reso": JOINT,
    "bucket_reso_steps": JOINT,
    "bucket_no_upscale": JOINT,
    "resize_interpolation": map_none(Message("this trainer resizes images with Lanczos")),
    "network_multiplier": map_none(remarks.FULL_STRENGTH, 1, 1.0),
    "shuffle_caption": JOINT,
    "keep_tokens": JOINT,
    "caption_separator": JOINT,
    "caption_dropout_rate": JOINT,
    "flip_aug": JOINT,
    "caption_extension": JOINT,
    "caption_extention": JOINT,
    "caption_prefix": JOINT,
    "caption_suffix": JOINT,
    "keep_tokens_separator": JOINT,
    "secondary_separator": map_none(Message("this trainer has one tag separator")),
    "enable_wildcard": JOINT,
    "caption_dropout_every_n_epochs": map_none(
        Message("this trainer drops captions only at random: dataset.caption_dropout")
    ),
    "caption_tag_dropout_rate": JOINT,
    "token_warmup_min": map_none(remarks.ALL_TAGS, 1),
    "token_warmup_step": map_none(remarks.ALL_TAGS),
    "weighted_captions": JOINT,
    "custom_attributes": map_none(remarks.NOT_HERE),
    "color_aug": JOINT,
    "random_crop": JOINT,
    "face_crop_aug_range": map_none(remarks.CENTER_CROP),
    "alpha_mask": JOINT,
    "masked_loss": JOINT,
    "max_token_length": JOINT,
    "clip_skip": JOINT,
    "t5xxl_max_token_length": map_none(remarks.PROMPT_LENGTH, 512),
    "apply_t5_attn_mask": map_none(remarks.OWN_ATTENTION),
    "cache_latents": map_immaterial(remarks.ALWAYS_CACHED),
    "cache_latents_to_disk": map_immaterial(remarks.ALWAYS_CACHED),
    "cache_text_encoder_outputs": map_immaterial(remarks.ALWAYS_CACHED),
    "cache_text_encoder_outputs_to_disk": map_immaterial(remarks.ALWAYS_CACHED),
    "skip_cache_check": map_idle(),
    "vae_batch_size": map_idle(),
    "text_encoder_batch_size": map_idle(),
    "debug_dataset": map_idle(),
    "validation_split": map_none(NO_VALIDATION),
    "validation_seed": map_none(NO_VALIDATION),
    "validate_every_n_steps": map_none(NO_VALIDATION),
    "validate_every_n_epochs": map_none(NO_VALIDATION),
    "max_validation_steps": map_none(NO_VALIDATION),
    # Noise and loss
    "noise_offset": JOINT,
    "noise_offset_random_strength": map_none(objective_settings.NO_NOISE),
    "adaptive_noise_scale": map_none(objective_settings.NO_NOISE),
    "multires_noise_iterations": JOINT,
    "multires_noise_discount": JOINT,
    "ip_noise_gamma": JOINT,
    "ip_noise_gamma_random_strength": map_none(Message("objective.input_noise always has the same strength")),
    "zero_terminal_snr": JOINT,
    "min_timestep": map_to("objective.t_min", common_values.read_thousandths),
    "max_timestep": map_to("objective.t_max", common_values.read_thousandths),
    "min_snr_gamma": JOINT,
    "loss_type": JOINT,
    "huber_schedule": JOINT,
    "huber_c": JOINT,
    "huber_scale": JOINT,
    "debiased_estimation_loss": JOINT,
    "scale_v_pred_loss_like_noise_pred": map_none(remarks.ONLY_MIN_SNR),
    "v_pred_like_loss": map_none(remarks.ONLY_MIN_SNR),
    "timestep_sampling": JOINT,
    "sigmoid_scale": JOINT,
    "discrete_flow_shift": JOINT,
    "training_shift": JOINT,
    "weighting_scheme": JOINT,
    "logit_mean": JOINT,
    "logit_std": JOINT,
    "mode_scale": JOINT,
    "model_prediction_type": JOINT,
    "guidance_scale": JOINT,
    # Memory and speed
    "blocks_to_swap": JOINT,
    "block_swap_h2d_only": map_idle(remarks.BELONGS_TO(key="blocks_to_swap")),
    "cpu_offload_checkpointing": map_none(remarks.RECOMPUTED),
    "split_mode": map_idle(Message("sd-scripts has deprecated this setting; FP8 storage replaces it")),
    "train_blocks": map_none(NO_PART, "all"),
    "torch_compile": JOINT,
    "dynamo_backend": JOINT,
    "xformers": map_immaterial(remarks.ATTENTION),
    "sdpa": map_immaterial(remarks.ATTENTION),
    "mem_eff_attn": map_immaterial(remarks.ATTENTION),
    "attn_mode": map_immaterial(remarks.ATTENTION),
    "split_attn": map_idle(),
    # Saving
    "output_dir": map_to("output_dir", read_string, remarks.RUN_FOLDER),
    "output_name": JOINT,
    "save_model_as": map_none(Message("files are always .safetensors"), "safetensors"),
    "save_precision": map_to("export.dtype", common_values.FILE_DTYPE),
    "save_every_n_steps": JOINT,
    "save_every_n_epochs": JOINT,
    "save_n_epoch_ratio": map_none(remarks.COUNTS_STEPS),
    "save_last_n_steps": map_none(remarks.COUNTS_CHECKPOINTS),
    "save_last_n_steps_state": map_none(remarks.COUNTS_CHECKPOINTS),
    "save_last_n_epochs": map_none(remarks.COUNTS_CHECKPOINTS),
    "save_last_n_epochs_state": map_none(remarks.COUNTS_CHECKPOINTS),
    "save_state": map_immaterial(remarks.WHOLE_STATE),
    "save_state_on_train_end": map_immaterial(remarks.WHOLE_STATE),
    "resume": map_none(remarks.RESUMES),
    "no_metadata": map_none(Message("metadata is always written")),
    "training_comment": map_none(remarks.DESCRIPTION),
    "metadata_title": map_to("export.title", read_string),
    "metadata_author": map_to("export.author", read_string),
    "metadata_description": map_to("export.description", read_string),
    "metadata_license": map_to("export.license", read_string),
    "metadata_tags": map_none(Message("this trainer does not write tags into the LoRA file")),
    "metadata_usage_hint": map_none(remarks.DESCRIPTION),
    "metadata_thumbnail": map_none(Message("this trainer does not write an image into the LoRA file")),
    "metadata_trigger_phrase": map_none(Message("this trainer writes the trigger word into the LoRA file by itself")),
    # Previews
    "sample_prompts": JOINT,
    "sample_every_n_steps": JOINT,
    "sample_every_n_epochs": JOINT,
    "sample_at_first": JOINT,
    "sample_sampler": map_none(remarks.NO_SAMPLER),
    # Logs, uploads and the machine
    **dict.fromkeys(
        ("logging_dir", "log_prefix", "log_tracker_config"),
        map_idle(remarks.LOGGING),
    ),
    **dict.fromkeys(("log_with", "log_tracker_name", "wandb_run_name"), JOINT),
    "wandb_api_key": map_idle(remarks.LOGGING),
    "log_config": map_idle(remarks.LOGGING),
    **dict.fromkeys(
        ("huggingface_repo_id", "huggingface_repo_type", "huggingface_path_in_repo", "huggingface_token")
        + ("huggingface_repo_visibility", "async_upload", "save_state_to_huggingface", "resume_from_huggingface"),
        map_none(remarks.UPLOAD),
    ),
    **dict.fromkeys(
        ("lowram", "lowvram", "highvram", "max_data_loader_n_workers", "persistent_data_loader_workers")
        + ("ddp_timeout", "ddp_gradient_as_bucket_view", "ddp_static_graph", "num_cpu_threads_per_process")
        + ("num_machines", "machine_rank", "multi_gpu", "gpu_ids", "main_process_port", "main_process_ip")
        + ("same_network", "config_file", "output_config", "console_log_level", "console_log_file")
        + ("console_log_simple", "dynamo_mode", "dynamo_use_fullgraph", "dynamo_use_dynamic", "rdzv_backend"),
        map_idle(),
    ),
    "deepspeed": map_none(remarks.SHARDED),
    **dict.fromkeys(
        ("zero_stage", "offload_optimizer_device", "offload_optimizer_nvme_path", "offload_param_device")
        + ("offload_param_nvme_path", "zero3_init_flag", "zero3_save_16bit_model")
        + ("fp16_master_weights_and_gradients",),
        map_idle(remarks.BELONGS_TO(key="deepspeed")),
    ),
    # Single architectures
    **dict.fromkeys(
        ("llm_adapter_path", "t5_tokenizer_path"),
        map_none(Message("this comes with the base model, or with model.components")),
    ),
    **dict.fromkeys(
        ("gemma2_max_token_length", "qwen3_max_token_length", "t5_max_token_length"),
        map_none(remarks.PROMPT_LENGTH),
    ),
    "apply_lg_attn_mask": map_none(remarks.OWN_ATTENTION),
    "system_prompt": map_none(
        Message("this trainer puts the system prompt of the model's pipeline in front of captions")
    ),
    **dict.fromkeys(
        ("clip_l_dropout_rate", "clip_g_dropout_rate", "t5_dropout_rate"),
        map_none(remarks.DROPOUT_FOR_ALL),
    ),
    **dict.fromkeys(("pos_emb_random_crop_rate", "enable_scaled_pos_embed"), map_none(remarks.NOT_HERE)),
    **dict.fromkeys(("use_flash_attn", "use_sage_attn"), map_immaterial(remarks.ATTENTION)),
    **dict.fromkeys(
        ("save_clip", "save_t5xxl", "t5xxl_device", "t5xxl_dtype", "text_encoder_cpu", "vae_chunk_size")
        + ("vae_disable_cache", "fused_optimizer_groups"),
        map_idle(),
    ),
    "blockwise_fused_optimizers": map_none(remarks.SUMMED),
    "controlnet_model_name_or_path": map_none(remarks.NO_CONTROLNET),
    "unsloth_offload_checkpointing": map_none(remarks.RECOMPUTED),
}
