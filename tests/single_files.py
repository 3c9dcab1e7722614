"""Miniatures of released models as the files that people have: one checkpoint, or ComfyUI's component files.

Unlike the miniatures of `Family.tiny`, these agree with the released models in all that no header states: numbers of
heads of CLIP, widths of heads, groups of norms, schedulers, activations. So the diffusers folder of the same weights,
loaded by diffusers and transformers, is the authority for what a file without configs must become.
"""

import json
import shutil
from pathlib import Path

import diffusers
import torch
import transformers
from miniatures import _parts as _miniature
from miniatures import _qwen
from original_code import bfl_tensors, ldm_names, ldm_vae, open_clip, wan_transformer, wan_umt5, wan_vae
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from lora_fp8 import families
from lora_fp8.families import _qwen as _qwen_facts

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def save(family, folder, parts):
    """Save a pipeline with these parts, all of whose weights are random, in bf16 as released."""
    generator = torch.Generator().manual_seed(0)
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            for parameter in part.parameters():
                values = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.data = values.to(torch.bfloat16).to(torch.float32)
    families.get(family).get_pipeline_type()(**parts).save_pretrained(folder, safe_serialization=True)
    return folder


def clip(cls, tokenizer, *, heads, act, width, projection=768):
    return cls(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=heads,
            hidden_act=act,
            projection_dim=projection,
            max_position_embeddings=77,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=1,
        )
    )


def kl(channels, **settings):
    return diffusers.AutoencoderKL(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=channels,
        **settings,
    )


def sd15(folder):
    """Stable Diffusion 1.5 in diffusers' layout."""
    tokenizer = _miniature.clip_tokenizer()
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=48,
        attention_head_dim=8,
    )
    parts = {"unet": unet, "vae": kl(4, scaling_factor=0.18215), "tokenizer": tokenizer}
    parts |= {"text_encoder": clip(CLIPTextModel, tokenizer, heads=12, act="quick_gelu", width=48)}
    parts |= {"scheduler": diffusers.PNDMScheduler(**BETAS, skip_prk_steps=True), "safety_checker": None}
    return save("sd15", folder, parts | {"feature_extractor": None, "requires_safety_checker": False})


def sd2(folder):
    """Stable Diffusion 2.1, which predicts v, in diffusers' layout."""
    tokenizer = _miniature.clip_tokenizer()
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(64, 128),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=48,
        attention_head_dim=(1, 2),
        use_linear_projection=True,
        upcast_attention=True,
    )
    parts = {"unet": unet, "vae": kl(4, scaling_factor=0.18215), "tokenizer": tokenizer}
    parts |= {"text_encoder": clip(CLIPTextModel, tokenizer, heads=16, act="gelu", width=48, projection=512)}
    scheduler = diffusers.DDIMScheduler(
        **BETAS, clip_sample=False, set_alpha_to_one=False, prediction_type="v_prediction"
    )
    parts |= {"scheduler": scheduler, "safety_checker": None, "feature_extractor": None}
    return save("sd2", folder, parts | {"requires_safety_checker": False})


def sdxl(folder):
    """Stable Diffusion XL in diffusers' layout."""
    tokenizer = _miniature.clip_tokenizer()
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(64, 128),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        transformer_layers_per_block=(1, 2),
        cross_attention_dim=48 + 40,
        attention_head_dim=(1, 2),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=6 * 256 + 32,
    )
    second = clip(CLIPTextModelWithProjection, tokenizer, heads=20, act="gelu", width=40, projection=32)
    scheduler = diffusers.EulerDiscreteScheduler(**BETAS, timestep_spacing="leading")
    parts = {
        "unet": unet,
        "vae": kl(4, scaling_factor=0.13025, force_upcast=True),
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer,
        "text_encoder": clip(CLIPTextModel, tokenizer, heads=12, act="quick_gelu", width=48),
        "text_encoder_2": second,
        "scheduler": scheduler,
        "add_watermarker": False,
    }
    return save("sdxl", folder, parts)


def flux(folder):
    """FLUX.1-dev in diffusers' layout."""
    clip_words, t5_words = _miniature.clip_tokenizer(), _miniature.t5_tokenizer()
    denoiser = diffusers.FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        num_attention_heads=1,
        joint_attention_dim=64,
        pooled_projection_dim=48,
        guidance_embeds=True,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    parts = {
        "transformer": denoiser,
        "vae": kl(16, scaling_factor=0.3611, shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False),
        "tokenizer": clip_words,
        "text_encoder": clip(CLIPTextModel, clip_words, heads=12, act="quick_gelu", width=48),
        "tokenizer_2": t5_words,
        "text_encoder_2": _miniature.t5_text(t5_words, width=64),
        "scheduler": scheduler,
    }
    return save("flux", folder, parts)


def video_vae(cls):
    return cls(base_dim=4, z_dim=16, **_qwen_facts.VAE_MARKS)


def qwen_image(folder):
    """Qwen-Image in diffusers' layout."""
    words = _qwen.tokenizer()
    denoiser = diffusers.QwenImageTransformer2DModel(
        num_layers=2, num_attention_heads=1, joint_attention_dim=256, in_channels=64, out_channels=16
    )
    text = {
        "vocab_size": len(words),
        "hidden_size": 256,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False,
    }
    eyes = {"depth": 1, "hidden_size": 64, "intermediate_size": 32, "num_heads": 16, "out_hidden_size": 256}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=eyes, tie_word_embeddings=False)
    parts = {
        "transformer": denoiser,
        "vae": video_vae(diffusers.AutoencoderKLQwenImage),
        "tokenizer": words,
        "text_encoder": transformers.Qwen2_5_VLForConditionalGeneration(config),
        "scheduler": _qwen.scheduler(),
    }
    return save("qwen_image", folder, parts)


def wan(folder):
    """Wan 2.1 in diffusers' layout."""
    words = _miniature.t5_tokenizer()
    denoiser = diffusers.WanTransformer3DModel(
        num_layers=2, num_attention_heads=1, attention_head_dim=128, ffn_dim=96, text_dim=64, freq_dim=64
    )
    parts = {
        "transformer": denoiser,
        "vae": video_vae(diffusers.AutoencoderKLWan),
        "tokenizer": words,
        "text_encoder": _miniature.umt5_text(words, width=64, feed_forward_proj="gated-gelu"),
        "scheduler": _miniature.flow_unipc(),
    }
    return save("wan", folder, parts)


FOLDERS = {"sd15": sd15, "sd2": sd2, "sdxl": sdxl, "flux": flux, "qwen_image": qwen_image, "wan": wan}


def weights(folder, part):
    return load_file(next((folder / part).glob("*.safetensors")))


def with_text_model(text):
    """CLIP's tensors as files of any age have them: below `text_model.`."""
    return {f"text_model.{name.removeprefix('text_model.')}": tensor for name, tensor in text.items()}


def one_file(family, folder):
    """The model in `folder` as the one checkpoint that Civitai has: sd15, sd2, sdxl."""
    unet, text = weights(folder, "unet"), weights(folder, "text_encoder")
    names = ldm_names(unet, layers_per_block=1)
    tensors = {names[name]: tensor for name, tensor in unet.items()} | ldm_vae(weights(folder, "vae"))
    if family == "sd2":
        # The original has one more layer, whose output is not read, and a projection.
        last = {name: tensor for name, tensor in text.items() if ".layers.1." in f".{name}"}
        more = {name.replace("layers.1.", "layers.2."): torch.randn_like(tensor) for name, tensor in last.items()}
        whole = text | more | {"text_projection.weight": torch.randn(512, 48)}
        return tensors | open_clip(whole, "cond_stage_model.model.")
    first = {"sd15": "cond_stage_model.", "sdxl": "conditioner.embedders.0."}[family]
    tensors |= {f"{first}transformer.{name}": tensor for name, tensor in with_text_model(text).items()}
    if family == "sdxl":
        tensors |= open_clip(weights(folder, "text_encoder_2"))
    return tensors


def component_files(family, folder):
    """The model in `folder` as ComfyUI's files: {path below models/: tensors}."""
    denoiser, vae, text = (weights(folder, part) for part in ("transformer", "vae", "text_encoder"))
    if family == "flux":
        return {
            "diffusion_models/flux1-dev.safetensors": bfl_tensors(denoiser),
            "vae/ae.safetensors": ldm_vae(vae, ""),
            "text_encoders/clip_l.safetensors": with_text_model(text),
            "clip/t5xxl_fp16.safetensors": weights(folder, "text_encoder_2"),
        }
    if family == "qwen_image":
        # Names of Qwen2.5-VL's first release, before transformers moved the language model.
        old = {
            name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
            for name, tensor in text.items()
        }
        return {
            "diffusion_models/qwen_image_bf16.safetensors": denoiser,
            "vae/qwen_image_vae.safetensors": wan_vae(vae),
            "text_encoders/qwen_2.5_vl_7b.safetensors": old,
        }
    return {
        "unet/wan2.1_t2v.safetensors": wan_transformer(denoiser),
        "vae/wan_2.1_vae.safetensors": wan_vae(vae),
        "text_encoders/umt5_xxl.safetensors": text | {"spiece_model": torch.zeros(7, dtype=torch.uint8)},
    }


def write(root, files):
    """Write {path: tensors} below a folder; returns the first path."""
    for path, tensors in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, root / path)
    return root / next(iter(files))


def fill_hub_cache(cache, family, folder):
    """Put the tokenizers of `folder` into a cache of the hub, as if the released model's had been downloaded."""
    snapshot = cache / f"models--{families.get(family).example_base.replace('/', '--')}" / "snapshots" / ("0" * 40)
    for part in folder.glob("*tokenizer*"):
        shutil.copytree(part, snapshot / part.name, dirs_exist_ok=True)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text("0" * 40, encoding="utf-8")


def read_config(folder: Path, part: str) -> dict:
    name = "scheduler_config.json" if part == "scheduler" else "config.json"
    return json.loads((folder / part / name).read_text(encoding="utf-8"))


ORIGINAL_UMT5 = wan_umt5
