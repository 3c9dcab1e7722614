"""Wan 2.1 text-to-video, 1.3 B and 14 B, trained on clips, and on images as clips of one frame.

Wan Team 2025, "Wan: Open and Advanced Large-Scale Video Generative Models". A DiT attends to all patches of all frames
and, in cross-attention, to UMT5's tokens; these are padded with zeros to 512, which are attended to as well. The model
is trained with flow matching and sampled with UniPC. Latents are normalized per channel, as in Qwen-Image, which uses
this autoencoder.

Wan 2.2 A14B consists of two denoisers of this architecture, one for high and one for low noise levels. One job trains
one denoiser over all noise levels: give the wanted one as a single file. The diffusers folder is refused, because a
pipeline with one of the two could not generate. Wan 2.2 TI2V-5B is the family `wan22_5b`.
"""

from __future__ import annotations

from typing import Any

from ..errors import Message, Template, UserError
from ..lora_files import naming
from . import _published, _qwen
from .base import Cond, ModelFamily


class Family(ModelFamily):
    name = "wan"
    title = "Wan 2.1"
    example_base = "Wan-AI/Wan2.1-T2V-14B-Diffusers"
    pipeline_class = "WanPipeline"
    denoiser_class = "WanTransformer3DModel"
    text_widths = {"text_dim": "text_encoder.d_model"}
    text_millions = (5681, 1050)  # UMT5-XXL
    text_parts = {"tokenizer": "T5TokenizerFast", "text_encoder": "UMT5EncoderModel"}
    prompt_tokens = 512  # Wan-Video/Wan2.1 wan/configs/shared_config.py: text_len
    timestep_unit = 1000
    text_shapes = {"prompt_embeds": ("tokens", "text_dim")}
    adapter_targets = (
        *(f"{attn}.{proj}" for attn in ("attn1", "attn2") for proj in ("to_q", "to_k", "to_v", "to_out.0")),
        *("ffn.net.0.proj", "ffn.net.2"),
    )
    keep_precise = ("patch_embedding", "condition_embedder", "^proj_out")
    bucket_multiple = 16
    patch = 2
    latents_as = "BCFHW"
    native_resolution = 640  # the area of 480p, at which both sizes are trained; 14B also knows 720p (960)
    default_guidance = 5.0  # wan/configs/wan_t2v_14B.py, generate.py: sample_guide_scale
    train_shift = 3.0  # musubi-tuner docs/wan.md, whatever flow_shift (3, 5 or 12) the scheduler samples with
    clips = (4, 16)  # vae_stride (4, 8, 8); sample_fps
    vae_class = "AutoencoderKLWan"
    vae_marks = _qwen.VAE_MARKS
    modelspec_architecture = "wan2.1"
    kohya_base_version = "wan2.1"
    kohya_naming = "native"
    converter_blocks = (  # diffusers 0.42, loaders/lora_conversion_utils.py: _convert_musubi_wan_lora_to_diffusers
        *(f"{attention}.{name}" for attention in ("attn1", "attn2") for name in ("to_q", "to_k", "to_v", "to_out.0")),
        *("ffn.net.0.proj", "ffn.net.2"),
    )
    kohya_module = "networks.lora_wan"  # musubi-tuner
    layouts = ("comfy", "diffusers", "kohya")
    call_options = {"num_frames": 1}
    reference_config = {"num_layers": 40, "num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824}
    native_layers = naming.parse_table("""
        patch_embedding
        time_embedding.0 = condition_embedder.time_embedder.linear_1
        time_embedding.2 = condition_embedder.time_embedder.linear_2
        text_embedding.0 = condition_embedder.text_embedder.linear_1
        text_embedding.2 = condition_embedder.text_embedder.linear_2
        time_projection.1 = condition_embedder.time_proj
        blocks.#
            self_attn = attn1, cross_attn = attn2
                q = to_q
                k = to_k
                v = to_v
                o = to_out.0
                norm_q, norm_k
            norm3 = norm2
            ffn.0 = ffn.net.0.proj
            ffn.2 = ffn.net.2
            modulation = scale_shift_table
        head.head = proj_out
        head.modulation = scale_shift_table
    """)
    computed = {"rope": ("attention_head_dim", "patch_size", "max_seq_len")}
    # 1.3 B and 14 B have the same encoders.
    sizes_from = {
        "num_attention_heads": "blocks.0.self_attn.q.weight[0] // attention_head_dim",
        "ffn_dim": "blocks.0.ffn.0.weight[0]",
        "num_layers": "blocks.#.self_attn.q.weight",
        "text_dim": "text_embedding.0.weight[1]",
        "freq_dim": "time_embedding.0.weight[1]",
        "in_channels": "patch_embedding.weight[1]",
    }
    published = {
        "scheduler": _published.WAN_SCHEDULER,
        "vae": _published.make_wan_vae_config(_qwen.VAE_MARKS),
        "text_encoder": _published.UMT5_XXL,
    }
    file_names = {"vae": "wan"}
    # Image-to-video takes more channels than it returns, or has keys for the image; VACE has blocks of its own.
    single_file = {
        "has": ("blocks.0.self_attn.q.weight",),
        "shapes": {"patch_embedding.weight": (None, None, None, None, None)},
        "in_is_out": ("patch_embedding.weight", "head.head.weight"),
        "lacks": ("blocks.0.cross_attn.k_img.", "vace_blocks."),
    }
    caveats_by_name = {
        r"wan[-_. ]?2[._]?2|(high|low)[-_. ]?noise": Template(
            "the name of {name} suggests an expert of Wan 2.2, which is used at a part of the noise levels: train "
            "the high-noise expert with objective.t_min = 0.875, the low-noise expert with t_max = 0.875"
        )
    }

    def as_read(self, prompt: str) -> tuple[str, str]:
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        return "", prompt_clean(prompt)

    def call_encode_prompt(self, pipeline: Any, prompts: list[str]) -> dict[str, Any]:
        answer = ModelFamily.call_encode_prompt(self, pipeline, prompts)
        # Zeros follow the prompt's tokens, and no token's embedding is all zeros.
        return answer | {"mask": answer["prompt_embeds"].any(-1)}

    def collate(self, conds: list[Cond]) -> Cond:
        import torch
        from torch import nn

        length = self.longest_prompt
        rows = [
            nn.functional.pad(cond["prompt_embeds"], (0, 0, 0, length - len(cond["prompt_embeds"]))) for cond in conds
        ]
        return {"prompt_embeds": torch.stack(rows)}

    def list_caveats(self) -> list[str]:
        if not self.checkpoint and any(self.read_index().get("transformer_2") or ()):
            raise UserError(
                Message(
                    "{path} is Wan 2.2 A14B, which has two denoisers, and a job trains one of them: give the "
                    "low-noise or the high-noise one as a single .safetensors file in model.path, and a folder of "
                    "Wan 2.1 in model.components",
                    path=self.folder,
                )
            )
        return ModelFamily.list_caveats(self)
