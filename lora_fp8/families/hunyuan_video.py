"""HunyuanVideo: a 13 B double- and single-stream DiT, trained on clips, and on images as clips of one frame.

Kong et al. 2024, "HunyuanVideo: A Systematic Framework For Large Video Generative Models". Prompts are put into a
template and encoded by Llama 3 (the third layer from the end, without the template's tokens). They pass two refiner
blocks, and attention masks their padding; CLIP adds a pooled vector. The released model is guidance-distilled: the
guidance scale is an input, and one pass replaces the two of classifier-free guidance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import Template
from ..lora_files import naming
from . import _flux
from .base import Cond, Inputs, ModelFamily

if TYPE_CHECKING:
    from torch import Tensor


class Family(ModelFamily):
    name = "hunyuan_video"
    title = "HunyuanVideo"
    example_base = "hunyuanvideo-community/HunyuanVideo"
    pipeline_class = "HunyuanVideoPipeline"
    denoiser_class = "HunyuanVideoTransformer3DModel"
    text_widths = {"text_embed_dim": "text_encoder.hidden_size", "pooled_projection_dim": "text_encoder_2.hidden_size"}
    text_millions = (7505, 525)  # Llama 3 8B without its output layer
    text_parts = {
        # The released folder names LlamaTokenizerFast, which follows Llama 2's rules; the file has Llama 3's.
        "tokenizer": "PreTrainedTokenizerFast",
        "text_encoder": "LlamaModel",
        "tokenizer_2": "CLIPTokenizer",
        "text_encoder_2": "CLIPTextModel",
    }
    prompt_tokens = 256  # without the template's; Tencent/HunyuanVideo hyvideo/config.py: text_len
    text_answers = ("prompt_embeds", "pooled_prompt_embeds", "mask")
    text_arguments = {"mask": "prompt_attention_mask"}
    text_shapes = {
        "prompt_embeds": ("tokens", "text_embed_dim"),
        "pooled_prompt_embeds": ("pooled_projection_dim",),
    }
    prompts_vary = True
    adapter_targets = _flux.ADAPTER_TARGETS
    # The refiner is part of the text embedding; the output layer has the name of one in the single-stream blocks.
    adapter_exclude = ("context_embedder", _flux.LAST_LAYER)
    keep_precise = ("x_embedder", "context_embedder", "^time_text_embed", "^norm_out", "^proj_out")
    modulation = _flux.MODULATION
    further_layers = {"blocks": _flux.MODULATION}
    bucket_multiple = 16
    patch = 2
    latents_as = "BCFHW"
    native_resolution = 960  # the area of 720p
    default_guidance = 6.0  # hyvideo/config.py: embedded_cfg_scale
    clips = (4, 24)  # VAE "884-16c-hy"; README: 24 fps
    uses_negative = False  # it would need true_cfg_scale > 1, twice the time, on a model distilled to do without
    embeds_guidance = True
    vae_class = "AutoencoderKLHunyuanVideo"
    config_marks = {"image_condition_type": None}  # image-to-video has a pipeline of its own
    modelspec_architecture = "hunyuan-video"
    kohya_base_version = "hunyuan_video"
    # In kohya's layout ComfyUI expects the names of its own copy of the model, which has 0 and 2 for fc1 and fc2: a
    # file with the original names would lose the feed-forward of the double blocks there. diffusers reads none of it.
    kohya_naming = ""
    layouts = ("comfy", "diffusers")
    converter_mark = "transformer_blocks.*.attn.to_[qkv]"  # diffusers 0.42, loaders/lora_pipeline.py: "img_attn_qkv"
    converter_width = 3072
    call_options = {"num_frames": 1}
    reference_config = {"num_layers": 20, "num_single_layers": 40, "attention_head_dim": 128}
    sizes_from = {
        "num_layers": "double_blocks.#.img_attn_qkv.weight",
        "num_single_layers": "single_blocks.#.linear1.weight",
        "num_attention_heads": "img_in.proj.weight[0] // attention_head_dim",
        "text_embed_dim": "txt_in.input_embedder.weight[1]",
        "pooled_projection_dim": "vector_in.in_layer.weight[1]",
    }
    native_layers = naming.parse_table("""
        img_in = x_embedder
        time_in.mlp.0 = time_text_embed.timestep_embedder.linear_1
        time_in.mlp.2 = time_text_embed.timestep_embedder.linear_2
        guidance_in.mlp.0 = time_text_embed.guidance_embedder.linear_1
        guidance_in.mlp.2 = time_text_embed.guidance_embedder.linear_2
        vector_in.in_layer = time_text_embed.text_embedder.linear_1
        vector_in.out_layer = time_text_embed.text_embedder.linear_2
        txt_in = context_embedder
            input_embedder = proj_in
            t_embedder.mlp.0 = time_text_embed.timestep_embedder.linear_1
            t_embedder.mlp.2 = time_text_embed.timestep_embedder.linear_2
            c_embedder = time_text_embed.text_embedder
            individual_token_refiner.blocks.# = token_refiner.refiner_blocks.#
                self_attn_qkv = attn.to_q attn.to_k attn.to_v
                self_attn_proj = attn.to_out.0
                mlp.fc1 = ff.net.0.proj
                mlp.fc2 = ff.net.2
                adaLN_modulation.1 = norm_out.linear
                norm1, norm2
        double_blocks.# = transformer_blocks.#
            img_mod.linear = norm1.linear
            img_attn_qkv = attn.to_q attn.to_k attn.to_v
            img_attn_q_norm = attn.norm_q
            img_attn_k_norm = attn.norm_k
            img_attn_proj = attn.to_out.0
            img_mlp.fc1 = ff.net.0.proj
            img_mlp.fc2 = ff.net.2
            txt_mod.linear = norm1_context.linear
            txt_attn_qkv = attn.add_q_proj attn.add_k_proj attn.add_v_proj
            txt_attn_q_norm = attn.norm_added_q
            txt_attn_k_norm = attn.norm_added_k
            txt_attn_proj = attn.to_add_out
            txt_mlp.fc1 = ff_context.net.0.proj
            txt_mlp.fc2 = ff_context.net.2
        single_blocks.# = single_transformer_blocks.#
            linear1 = attn.to_q attn.to_k attn.to_v proj_mlp
            linear2 = proj_out
            modulation.linear = norm.linear
            q_norm = attn.norm_q
            k_norm = attn.norm_k
        final_layer.linear = proj_out
        final_layer.adaLN_modulation.1 = norm_out.linear
    """)
    swapped_halves = ("norm_out.linear",)
    # Image-to-video takes more channels than it returns.
    single_file = {
        "has": ("double_blocks.0.img_attn_qkv.weight", "vector_in.in_layer.weight"),
        "shapes": {"img_in.proj.weight": (None, None, None, None, None)},
        "in_is_out": ("img_in.proj.weight", "final_layer.linear.weight"),
    }
    # The second version of image-to-video has the same tensors as text-to-video.
    caveats_by_name = {
        r"i2v|image[-_. ]?to[-_. ]?video": Template(
            "the name of {name} suggests an image-to-video model, but this trainer trains without a first image; "
            "choose a text-to-video model"
        )
    }

    def as_read(self, prompt: str) -> tuple[str, str]:
        return get_text_before_prompt(), prompt

    def compute_token_limit(self, name: str) -> int:
        from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

        template: dict[str, Any] = DEFAULT_PROMPT_TEMPLATE
        cropped: int = template["crop_start"]  # tokens of the template, cut off the conditioning
        return cropped + self.max_sequence_length if name == "tokenizer" else self.load_tokenizer(name).model_max_length

    @property
    def max_sequence_length(self) -> int:
        """Return how many tokens of a prompt Llama reads beside the template: the pipeline's `max_sequence_length`."""
        return self.prompt_tokens

    def make_inputs(self, denoiser: Any, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        import torch

        guidance_B = torch.full(t_B.shape, guidance, device=t_B.device, dtype=self.dtype) * 1000.0
        return {
            "hidden_states": self.pack(noisy_BCHW),
            "timestep": t_B * 1000,
            "encoder_hidden_states": cond["prompt_embeds"],
            "encoder_attention_mask": cond["prompt_embeds_mask"].to(self.dtype),
            "pooled_projections": cond["pooled_prompt_embeds"],
            "guidance": guidance_B if denoiser.config.guidance_embeds else None,
        }


def get_text_before_prompt() -> str:
    """Return the text that the pipeline puts before a prompt."""
    from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

    return str(DEFAULT_PROMPT_TEMPLATE["template"]).partition("{}")[0]
