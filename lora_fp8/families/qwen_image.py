"""Qwen-Image: a 20 B double-stream DiT, conditioned on Qwen2.5-VL 7B, trained with rectified flow.

Qwen team 2025, "Qwen-Image Technical Report". The prompt is put into a chat template, whose first 34 tokens are always
the same and are dropped after encoding. The rest keeps its length, and the transformer masks the padding of a batch.
Latents of a video VAE are packed in 2 x 2 patches, with position ids that count rows and columns from the middle.
"""

from __future__ import annotations

from typing import Any

from ..errors import Message
from ..lora_files import naming
from . import _published, _qwen, _qwen_edit
from .base import ModelFamily


class Family(ModelFamily):
    name = "qwen_image"
    title = "Qwen-Image"
    example_base = "Qwen/Qwen-Image"
    pipeline_class = "QwenImagePipeline"
    denoiser_class = "QwenImageTransformer2DModel"
    text_widths = {"joint_attention_dim": "text_encoder.hidden_size"}
    text_millions = (8292, 545)  # Qwen2.5-VL-7B
    text_parts = {"tokenizer": "Qwen2Tokenizer", "text_encoder": "Qwen2_5_VLForConditionalGeneration"}
    prompt_tokens = 512  # with the end of the template; QwenImagePipeline's call
    text_answers = ("prompt_embeds", "mask")
    text_arguments = {"mask": "prompt_embeds_mask"}
    text_shapes = {"prompt_embeds": ("tokens", "joint_attention_dim")}
    prompts_vary = True
    vae_class = "AutoencoderKLQwenImage"
    vae_marks = _qwen.VAE_MARKS
    adapter_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *(f"{mlp}.net.{layer}" for mlp in ("img_mlp", "txt_mlp") for layer in ("0.proj", "2")),
    )
    keep_precise = ("img_in", "txt_in", "time_text_embed", "norm_out", "proj_out")
    modulation = ("img_mod", "txt_mod")  # 6.8 of the 20.4 B parameters
    further_layers = {"blocks": ("img_mod.1", "txt_mod.1")}
    bucket_multiple = 16
    patch = 2
    latents_as = "BSD"
    native_resolution = 1024  # the pipeline's default; trained up to 1328, which fits no coarse grid of buckets
    default_guidance = 4.0  # model card: true_cfg_scale
    guidance_argument = "true_cfg_scale"
    modelspec_architecture = "Qwen-Image"
    kohya_base_version = "qwen_image"
    kohya_naming = "native"
    kohya_module = "networks.lora_qwen_image"  # musubi-tuner
    layouts = ("comfy", "diffusers", "kohya")
    native_layers = naming.parse_table("""
        transformer_blocks.#, img_in, txt_in, txt_norm, time_text_embed, norm_out, proj_out
    """)
    # Nothing reads the last block's output for the text.
    no_adapter = tuple(
        f"transformer_blocks.-1.{layer}"
        for layer in ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
    )
    computed = {"pos_embed": ("theta", "axes_dim", "scale_rope")}
    # Edit 2511 and Layered share the class: the former has `zero_cond_t`, the latter an additional condition.
    config_marks = {"guidance_embeds": False, "use_additional_t_cond": False, "zero_cond_t": False}
    reference_config = {"in_channels": 64, "out_channels": 16, "num_layers": 60, "joint_attention_dim": 3584}
    sizes_from = _qwen.SIZES
    published = {
        "scheduler": _published.QWEN_SCHEDULER,
        "vae": _published.make_qwen_vae_config(_qwen.VAE_MARKS),
        "text_encoder": _published.QWEN25_VL_7B,
    }
    file_names = {"vae": "qwen"}
    # Layered has one more embedding; ComfyUI puts a marker into its files of Edit 2511.
    single_file = {
        "has": ("transformer_blocks.0.img_mod.1.weight", "txt_norm.weight"),
        "lacks": ("time_text_embed.addition_t_embedding.weight", "__index_timestep_zero__"),
    }

    def call_encode_prompt(self, pipeline: Any, prompts: list[str]) -> dict[str, Any]:
        # Tokens after the limit do not reach the transformer, and the encoder is causal, so it need not read them.
        pipeline.tokenizer_max_length = self.max_sequence_length
        return ModelFamily.call_encode_prompt(self, pipeline, prompts)

    make_inputs = _qwen.make_inputs

    def list_caveats(self) -> list[str]:
        # 2511 has a marker; Edit and 2509 have the same tensors as Qwen-Image.
        editing = _qwen_edit.find_family_by_name(self)
        if not editing:
            return []
        return [
            Message(
                "the name of {name} suggests Qwen-Image-Edit, an editing model, but model.family = 'qwen_image' "
                "trains without control images; to use them, set model.family = {family}",
                name=self.get_base_name(),
                family=f"'{editing}'",
            )
        ]
