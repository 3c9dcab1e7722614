"""Krea 2: a 12.9 B single-stream DiT, conditioned on twelve layers of Qwen3-VL 4B, trained with rectified flow.

Krea 2026 (https://github.com/krea-ai/krea-2). The transformer takes the hidden states of twelve text encoder layers for
each token and fuses them in blocks of its own. Text has no positions, so the padding that the pipeline puts in the
middle of the chat template can be left out without a change. VAE and template are Qwen-Image's. One modulation of the
timestep serves all blocks. Krea 2 RAW is the model to train; Turbo is distilled from it to 8 steps without guidance
(`is_distilled` in model_index.json, or the name of a single file).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import Message
from ..lora_files import naming
from . import _qwen
from ._files import Header
from .base import Cond, Conversion, Inputs, ModelFamily

if TYPE_CHECKING:
    from torch import Tensor, nn

SUFFIX_TOKENS = 5
"""Tokens of the template after the prompt, which `max_sequence_length` includes."""
TURBO_MU = 1.15
"""Turbo's shift parameter mu at any resolution; hard-coded in `Krea2Pipeline`."""


class Family(ModelFamily):
    name = "krea2"
    title = "Krea 2"
    example_base = "krea/Krea-2-Raw"
    pipeline_class = "Krea2Pipeline"
    denoiser_class = "Krea2Transformer2DModel"
    text_widths = {"text_hidden_dim": "text_encoder.hidden_size"}
    text_millions = (4438, 389)  # Qwen3-VL-4B
    text_parts = {"tokenizer": "Qwen2Tokenizer", "text_encoder": "Qwen3VLModel"}
    vae_class = "AutoencoderKLQwenImage"
    vae_marks = _qwen.VAE_MARKS
    prompt_tokens = 512  # with the end of the template; Krea2Pipeline
    text_answers = ("prompt_embeds", "mask")
    text_arguments = {"mask": "prompt_embeds_mask"}
    text_shapes = {"prompt_embeds": ("tokens", "num_text_layers", "text_hidden_dim")}
    prompts_vary = True
    adapter_targets = (
        *(f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_gate", "to_out.0")),
        *(f"ff.{layer}" for layer in ("gate", "up", "down")),
    )
    adapter_exclude = ("text_fusion",)  # four blocks that see text only
    keep_precise = ("img_in", "txt_in", "time_embed", "text_fusion", "final_layer")
    modulation = ("time_mod_proj",)
    further_layers = {
        "refiners": naming.list_names("^text_fusion.{}_blocks.{}.{}", ("layerwise", "refiner"), "01", adapter_targets),
        "outside": (
            *("^img_in", "^txt_in.linear_1", "^txt_in.linear_2", "^time_embed.linear_1", "^time_embed.linear_2"),
            *("^time_mod_proj", "^text_fusion.projector", "^final_layer.linear"),
        ),
    }
    bucket_multiple = 16
    patch = 2
    latents_as = "BSD"
    native_resolution = 1024  # Krea2Pipeline
    default_guidance = 4.5  # 3.5 in the makers' convention, which adds that many times the difference
    plain_guidance = 0.0
    modelspec_architecture = "Krea-2"
    kohya_base_version = "krea2"
    kohya_naming = "native"
    kohya_module = "networks.lora_krea2"  # musubi-tuner
    layouts = ("comfy", "diffusers", "kohya")
    layouts_of_diffusers = ("diffusers", "comfy")
    sizes_from = {
        "in_channels": "first.weight[1]",
        "num_layers": "blocks.#.attn.wq.weight",
        "num_attention_heads": "blocks.0.attn.wq.weight[0] // attention_head_dim",
        "num_key_value_heads": "blocks.0.attn.wk.weight[0] // attention_head_dim",
        "text_hidden_dim": "txtmlp.1.weight[1]",
    }
    native_layers = naming.parse_table("""
        blocks.# = transformer_blocks.#,
        txtfusion.layerwise_blocks.# = text_fusion.layerwise_blocks.#,
        txtfusion.refiner_blocks.# = text_fusion.refiner_blocks.#
            attn.wq = attn.to_q
            attn.wk = attn.to_k
            attn.wv = attn.to_v
            attn.wo = attn.to_out.0
            attn.gate = attn.to_gate
            attn.qknorm.qnorm.scale = attn.norm_q.weight
            attn.qknorm.knorm.scale = attn.norm_k.weight
            prenorm.scale = norm1.weight
            postnorm.scale = norm2.weight
            mlp = ff
            mod.lin = scale_shift_table
        txtfusion.projector = text_fusion.projector
        first = img_in
        tmlp.0 = time_embed.linear_1
        tmlp.2 = time_embed.linear_2
        tproj.1 = time_mod_proj
        txtmlp.0.scale = txt_in.norm.weight
        txtmlp.1 = txt_in.linear_1
        txtmlp.3 = txt_in.linear_2
        last.linear = final_layer.linear
        last.norm.scale = final_layer.norm.weight
        last.modulation.lin = final_layer.scale_shift_table
    """)
    reference_config = {
        "in_channels": 64,
        "num_layers": 28,
        "attention_head_dim": 128,
        "num_attention_heads": 48,
        "num_key_value_heads": 12,
        "intermediate_size": 16384,
        "text_hidden_dim": 2560,
        "num_text_layers": 12,
    }
    single_file = {"has": ("txtfusion.projector.weight", "blocks.0.attn.wq.weight")}
    distilled_mark = ("index", "is_distilled", True)  # by which the pipeline chooses its shift
    distilled_advice = Message(
        "this is Krea 2 Turbo, distilled to 8 steps, and plain training undoes the distillation; its authors "
        "recommend to train on Krea 2 RAW and to generate with Turbo"
    )

    def compute_token_limit(self, name: str) -> int:
        return (self.max_sequence_length or self.prompt_tokens) - SUFFIX_TOKENS

    def make_inputs(self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        from diffusers import Krea2Pipeline

        embeds_BLND, mask_BL = cond["prompt_embeds"], cond["prompt_embeds_mask"]
        rows, columns = (side // self.patch for side in noisy_BCHW.shape[-2:])
        return {
            "hidden_states": self.pack(noisy_BCHW),
            "encoder_hidden_states": embeds_BLND,
            "timestep": t_B,  # sigma in [0, 1]: the transformer multiplies by 1000 itself
            "position_ids": Krea2Pipeline.prepare_position_ids(embeds_BLND.shape[1], rows, columns, t_B.device),
            "encoder_attention_mask": None if mask_BL.all() else mask_BL,
        }

    def read_scheduler_config(self) -> dict[str, Any]:
        config = ModelFamily.read_scheduler_config(self)
        return config | {"base_shift": TURBO_MU, "max_shift": TURBO_MU} if self.is_distilled() else config

    def convert_checkpoint(self, header: Header) -> Conversion:
        conversion = ModelFamily.convert_checkpoint(self, header)
        for name, (key, _) in conversion.items():  # six vectors in diffusers, one tensor in the original
            if name.startswith("transformer_blocks.") and name.endswith(".scale_shift_table"):
                conversion[name] = (key, lambda tensor: tensor.reshape(6, -1))
        return conversion
