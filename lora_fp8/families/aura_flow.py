"""AuraFlow: a 6.8 B transformer with joint first blocks, conditioned on Pile-T5-XL, trained with rectified flow.

fal 2024 (https://blog.fal.ai/auraflow). Prompts are padded to 256 tokens. The encoder's outputs for padding are
replaced by zeros, and the transformer attends to all tokens. Its learned positions form a square of patches, of which
an image takes the middle; version 0.3 has more of them than earlier ones, for images that are not square.
"""

from __future__ import annotations

from ..errors import Message, UserError
from ..lora_files import naming
from . import _files
from .base import ModelFamily


class Family(ModelFamily):
    name = "aura_flow"
    title = "AuraFlow"
    example_base = "fal/AuraFlow-v0.3"
    pipeline_class = "AuraFlowPipeline"
    denoiser_class = "AuraFlowTransformer2DModel"
    text_widths = {"joint_attention_dim": "text_encoder.d_model"}
    text_millions = (1224, 66)  # UMT5 with Pile-T5-XL's sizes
    text_parts = {"tokenizer": "LlamaTokenizerFast", "text_encoder": "UMT5EncoderModel"}
    prompt_tokens = 256  # AuraFlowPipeline
    text_arguments = {"mask": "prompt_attention_mask"}  # the pipeline requires it and ignores it: padding is zeros
    text_shapes = {"prompt_embeds": ("tokens", "joint_attention_dim")}
    adapter_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *(f"{ff}.{layer}" for ff in ("ff", "ff_context") for layer in ("linear_1", "linear_2", "out_projection")),
    )
    keep_precise = ("^pos_embed", "context_embedder", "time_step_proj", "norm_out", "proj_out")
    modulation = ("norm1.linear", "norm1_context.linear")
    further_layers = {"blocks": modulation}
    bucket_multiple = 16
    patch = 2
    native_resolution = 1024
    default_guidance = 3.5  # model card of AuraFlow-v0.3
    modelspec_architecture = "auraflow-v1"
    kohya_base_version = "auraflow"
    kohya_naming = ""  # kohya's tools do not train this model
    layouts = ("diffusers", "comfy")
    split_names_in_comfy = True
    layouts_of_diffusers = ("diffusers",)
    reference_config = {"sample_size": 64, "pos_embed_max_size": 9216}  # 0.3
    sizes_from = {
        "pos_embed_max_size": "positional_encoding[1]",  # 0.1 and 0.3 differ in it
        "num_mmdit_layers": "double_layers.#.attn.w1q.weight",
        "num_single_dit_layers": "single_layers.#.attn.w1q.weight",
        "joint_attention_dim": "cond_seq_linear.weight[1]",
    }
    native_layers = naming.parse_table("""
        double_layers.# = joint_transformer_blocks.#
            attn.w2q = attn.to_q
            attn.w2k = attn.to_k
            attn.w2v = attn.to_v
            attn.w2o = attn.to_out.0
            attn.w1q = attn.add_q_proj
            attn.w1k = attn.add_k_proj
            attn.w1v = attn.add_v_proj
            attn.w1o = attn.to_add_out
            mlpX.c_fc1 = ff.linear_1
            mlpX.c_fc2 = ff.linear_2
            mlpX.c_proj = ff.out_projection
            mlpC.c_fc1 = ff_context.linear_1
            mlpC.c_fc2 = ff_context.linear_2
            mlpC.c_proj = ff_context.out_projection
            modX.1 = norm1.linear
            modC.1 = norm1_context.linear
        single_layers.# = single_transformer_blocks.#
            attn.w1q = attn.to_q
            attn.w1k = attn.to_k
            attn.w1v = attn.to_v
            attn.w1o = attn.to_out.0
            mlp.c_fc1 = ff.linear_1
            mlp.c_fc2 = ff.linear_2
            mlp.c_proj = ff.out_projection
            modCX.1 = norm1.linear
        t_embedder.mlp.0 = time_step_proj.linear_1
        t_embedder.mlp.2 = time_step_proj.linear_2
        cond_seq_linear = context_embedder
        init_x_linear = pos_embed.proj
        positional_encoding = pos_embed.pos_embed
        register_tokens
        final_linear = proj_out
        modF.1 = norm_out.linear
    """)
    swapped_halves = ("norm_out.linear",)
    no_adapter = swapped_halves  # a LoRA on it would differ between the original naming and diffusers'
    single_file = {
        "has": ("double_layers.0.attn.w1q.weight", "positional_encoding"),
        "in_is_out": ("init_x_linear.weight", "final_linear.weight"),
    }

    def check_bucket(self, width: int, height: int) -> None:
        side = int(self.read_denoiser_config().get("pos_embed_max_size", 1024) ** 0.5)
        patch = 2 ** len(_files.read_json(self.folder / "vae" / "config.json")["block_out_channels"])  # 2 x 2 latents
        if max(width, height) > patch * side:  # diffusers would take positions from the wrong end of the table
            raise UserError(
                Message(
                    "dataset.resolution: this {title} accepts up to {side} pixels a side, but a bucket is {width} x "
                    "{height}; set a smaller resolution, or dataset.buckets = false",
                    title=self.title,
                    side=patch * side,
                    width=width,
                    height=height,
                )
            )
