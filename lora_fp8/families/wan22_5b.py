"""Wan 2.2 TI2V-5B, trained text to video: on clips, and on images as clips of one frame.

Wan Team 2025 (https://github.com/Wan-Video/Wan2.2). The transformer is Wan 2.1's with other sizes. Its autoencoder is
another one: 48 channels at a sixteenth of the image's sides, so that a token stands for 32 x 32 pixels. The pipeline
gives the timestep of each token, because a first frame that is given (image to video) has none; without such a frame
all are the same, and one timestep per sample means the same at a fraction of the memory.
"""

from __future__ import annotations

from typing import Any

from . import wan
from .base import ModelFamily

VAE_MARKS: dict[str, Any] = {
    "latents_mean": [
        *(-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891),
        *(0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502),
        *(-0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723),
        *(-0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
    ],
    "latents_std": [
        *(0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901),
        *(0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659),
        *(0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944),
        *(0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
    ],
}
"""The released VAE's normalization (Wan2.2 wan/modules/vae2_2.py), which its config.json repeats."""


class Family(ModelFamily):
    name = "wan22_5b"
    title = "Wan 2.2 TI2V-5B"
    example_base = "Wan-AI/Wan2.2-TI2V-5B-Diffusers"
    pipeline_class = "WanPipeline"
    denoiser_class = "WanTransformer3DModel"
    config_marks = {"in_channels": 48}
    text_widths = wan.Family.text_widths
    text_millions = wan.Family.text_millions
    text_parts = wan.Family.text_parts
    prompt_tokens = 512  # Wan2.2 wan/configs/shared_config.py: text_len
    timestep_unit = 1000
    text_shapes = wan.Family.text_shapes
    adapter_targets = wan.Family.adapter_targets
    keep_precise = wan.Family.keep_precise
    bucket_multiple = 32
    patch = 2
    latents_as = "BCFHW"
    native_resolution = 960  # the area of 1280 x 704
    default_guidance = 5.0  # wan_ti2v_5B.py: sample_guide_scale
    train_shift = 5.0  # ai-toolkit wan22_5b_model.py: shift 5, as the model samples with
    clips = (4, 24)  # wan_ti2v_5B.py: vae_stride, sample_fps
    vae_class = "AutoencoderKLWan"
    vae_marks = VAE_MARKS
    modelspec_architecture = "wan2.2-ti2v-5b"
    kohya_base_version = "wan_2.2_5b"  # ai-toolkit wan22_5b_model.py; musubi-tuner does not train this model
    kohya_naming = "native"
    converter_blocks = wan.Family.converter_blocks
    kohya_module = "networks.lora_wan"  # musubi-tuner's of Wan; it does not train this size
    layouts = wan.Family.layouts
    call_options = {"num_frames": 1}
    pipeline_options = {"expand_timesteps": True}
    reference_config = {"num_layers": 30, "num_attention_heads": 24, "ffn_dim": 14336}
    reference_config |= {"attention_head_dim": 128, "in_channels": 48, "out_channels": 48}
    native_layers = wan.Family.native_layers
    computed = wan.Family.computed
    # Wan 2.1's names; the channels of the latents tell the two apart.
    single_file = {
        **wan.Family.single_file,
        "shapes": {"patch_embedding.weight": (None, 48, None, None, None)},
    }

    as_read = wan.Family.as_read
    call_encode_prompt = wan.Family.call_encode_prompt
    collate = wan.Family.collate
    sizes_from = wan.Family.sizes_from
