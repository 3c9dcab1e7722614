"""Config entries of released VAEs, text encoders and schedulers, for base models that come as files without configs.

Sizes are those of the released models; a file's header overrides them (`_part_files.read_config`). Entries that equal
the defaults of diffusers or transformers are left out, except where the defaults changed between versions.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import ModelFamily

Config = dict[str, Any]

# -- text encoders -----------------------------------------------------------------------------------------------------
# The published configs say eos_token_id = 2, with which transformers pools at the largest token: <|endoftext|>.
_CLIP: Config = {"vocab_size": 49408, "max_position_embeddings": 77, "layer_norm_eps": 1e-05}
_CLIP |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}

CLIP_L = _CLIP | {
    "hidden_act": "quick_gelu",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
}
CLIP_G = _CLIP | {
    "hidden_act": "gelu",
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
}
CLIP_H = _CLIP | {
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "projection_dim": 512,
}
_T5: Config = {
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-06,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "tie_word_embeddings": False,
}
T5_XXL = _T5 | {"vocab_size": 32128}
UMT5_XXL = _T5 | {"vocab_size": 256384}

QWEN25_VL_7B: Config = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": False,
    "text_config": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 128000,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "hidden_act": "silu",
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}

# -- VAEs --------------------------------------------------------------------------------------------------------------
_KL: Config = {
    "_class_name": "AutoencoderKL",
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "act_fn": "silu",
}
SD_VAE = _KL | {"latent_channels": 4, "scaling_factor": 0.18215, "sample_size": 512}
SDXL_VAE = _KL | {"latent_channels": 4, "scaling_factor": 0.13025, "sample_size": 1024, "force_upcast": True}
_KL_16 = _KL | {"latent_channels": 16, "sample_size": 1024, "use_quant_conv": False, "use_post_quant_conv": False}
FLUX_VAE = _KL_16 | {"scaling_factor": 0.3611, "shift_factor": 0.1159}
SD3_VAE = _KL_16 | {"scaling_factor": 1.5305, "shift_factor": 0.0609}

_WAN: Config = {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": []}
_WAN |= {"temperal_downsample": [False, True, True], "dropout": 0.0}


def make_wan_vae_config(statistics: Config) -> Config:
    """Return the config of Wan 2.1's VAE with these statistics of its latents."""
    return {"_class_name": "AutoencoderKLWan", **_WAN, **statistics}


def make_qwen_vae_config(statistics: Config) -> Config:
    """Return the config of Qwen-Image's VAE with these statistics of its latents."""
    return {"_class_name": "AutoencoderKLQwenImage", **_WAN, **statistics}


_WAN22: Config = {"base_dim": 160, "decoder_base_dim": 256, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "z_dim": 48}
_WAN22 |= {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16}


# diffusers scripts/convert_dcae_to_diffusers.py: dc-ae-f32c32-sana-1.0
_SANA_BLOCKS = ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3
_SANA_SCALES: list[list[int]] = [[], [], [], [5], [5], [5]]
_SANA: Config = {"latent_channels": 32, "downsample_block_type": "conv", "upsample_block_type": "interpolate"}
_SANA |= {"encoder_block_types": _SANA_BLOCKS, "decoder_block_types": _SANA_BLOCKS}
_SANA |= {"encoder_qkv_multiscales": _SANA_SCALES, "decoder_qkv_multiscales": _SANA_SCALES}
_SANA |= {"encoder_layers_per_block": [2, 2, 2, 3, 3, 3], "decoder_layers_per_block": [3] * 6}


def find_released_vae(Family: type[ModelFamily]) -> Config:
    """Return the sizes of a family's released VAE, for estimates; where it is published, its whole config.

    diffusers' defaults of a class are the sizes of the first model that was released with it, except for Sana's VAE.
    """
    if "vae" in Family.published:
        return Family.published["vae"]
    marks = {name: mark for name, mark in Family.vae_marks.items() if mark is not None}
    config = marks | {"_class_name": Family.vae_class}
    if Family.vae_class == "AutoencoderKL":
        import diffusers

        default = inspect.signature(getattr(diffusers, Family.denoiser_class)).parameters["in_channels"].default
        channels = Family.count_latent_channels({"in_channels": default, **Family.reference_config})
        return config | (SDXL_VAE if channels == 4 else FLUX_VAE | {"latent_channels": channels})
    return config | {"wan22_5b": _WAN22, "sana": _SANA}.get(Family.name, {})


# -- schedulers --------------------------------------------------------------------------------------------------------
_BETAS: Config = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "steps_offset": 1,
}
SD15_SCHEDULER = _BETAS | {"_class_name": "PNDMScheduler", "skip_prk_steps": True, "set_alpha_to_one": False}
SD2_SCHEDULER = _BETAS | {
    "_class_name": "DDIMScheduler",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "prediction_type": "v_prediction",
}
SDXL_SCHEDULER = _BETAS | {
    "_class_name": "EulerDiscreteScheduler",
    "interpolation_type": "linear",
    "prediction_type": "epsilon",
    "timestep_spacing": "leading",
    "use_karras_sigmas": False,
}
_FLOW: Config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000}
_LINE: Config = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}
FLUX_SCHEDULER = _FLOW | _LINE | {"shift": 3.0, "use_dynamic_shifting": True}
SCHNELL_SCHEDULER = _FLOW | _LINE | {"shift": 1.0, "use_dynamic_shifting": False}
SD3_SCHEDULER = _FLOW | {"shift": 3.0}
QWEN_SCHEDULER = _FLOW | {
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
WAN_SCHEDULER: Config = {
    "_class_name": "UniPCMultistepScheduler",
    "flow_shift": 3.0,
    "use_flow_sigmas": True,
    "prediction_type": "flow_prediction",
    "num_train_timesteps": 1000,
}


def choose_scheduler(objective: str) -> Config:
    """Return a scheduler of this kind of noising process, for estimates, in which its numbers have no effect."""
    return SDXL_SCHEDULER if objective == "Diffusion" else _FLOW


# -- tokenizers --------------------------------------------------------------------------------------------------------
SDXL_TOKENIZER = "stabilityai/stable-diffusion-xl-base-1.0/tokenizer"
T5_TOKENIZER = "lodestones/Chroma1-HD/tokenizer"
FLUX_TOKENIZERS = {"tokenizer": (SDXL_TOKENIZER,), "tokenizer_2": (T5_TOKENIZER,)}
SD3_TOKENIZERS = {
    "tokenizer": (SDXL_TOKENIZER,),
    "tokenizer_2": (f"{SDXL_TOKENIZER}_2",),
    "tokenizer_3": (T5_TOKENIZER,),
}

FLUX_FILES = {"vae": r"^(ae|flux[-_.]?(1[-_.]?)?(ae|vae))"}
"""Usual names of FLUX.1's VAE, whose header equals that of Stable Diffusion 3's; see the fact `file_names`."""
