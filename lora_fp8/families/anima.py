"""Anima: a 2 B DiT for illustrations, conditioned on Qwen3 0.6B and T5's tokens, trained with rectified flow.

CircleStone Labs 2026 (https://huggingface.co/circlestone-labs/Anima). The network is NVIDIA's Cosmos Predict 2, and the
VAE is Qwen-Image's. A small transformer, the conditioner, comes with the weights: in it, T5's tokens of the prompt
attend to Qwen3's hidden states of the same prompt. It is not trained here and counts as a text encoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import Message
from ..lora_files import naming
from . import _files, _part_files, _qwen
from ._files import PREFIXES
from ._prompts import Overlong
from .base import Cond, Inputs, ModelFamily

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

CONDITIONER = "llm_adapter"
"""Name of the conditioner in single files, which hold it together with the transformer."""


class Family(ModelFamily):
    name = "anima"
    title = "Anima"
    example_base = "circlestone-labs/Anima-Base-v1.0-Diffusers"
    pipeline_class = "AnimaModularPipeline"
    index_name = "modular_model_index.json"
    denoiser_class = "CosmosTransformer3DModel"
    text_widths = {
        "text_embed_dim": "text_conditioner.target_dim",
        "text_conditioner.source_dim": "text_encoder.hidden_size",
    }
    text_millions = (596, 156)  # Qwen3-0.6B
    text_parts = {
        "tokenizer": "Qwen2Tokenizer",
        "text_encoder": "Qwen3Model",
        "t5_tokenizer": "T5TokenizerFast",
        "text_conditioner": "AnimaTextConditioner",
    }
    judge_length_by = ("tokenizer", "t5_tokenizer")
    prompt_tokens = 512  # for each tokenizer; sd-scripts anima_train_network.py
    text_shapes = {"prompt_embeds": ("tokens", "text_embed_dim")}
    vae_class = "AutoencoderKLQwenImage"
    vae_marks = _qwen.VAE_MARKS
    adapter_targets = (
        *(f"attn{i}.{layer}" for i in (1, 2) for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *("ff.net.0.proj", "ff.net.2"),
    )
    keep_precise = ("patch_embed", "time_embed", "norm_out", "proj_out")
    modulation = ("norm1", "norm2", "norm3")
    further_layers = {"blocks": tuple(f"norm{i}.linear_{j}" for i in (1, 2, 3) for j in (1, 2))}
    bucket_multiple = 16
    patch = 2
    native_resolution = 1024  # model card: about 1 megapixel
    default_guidance = 4.0  # diffusers modular_pipelines/anima/denoise.py; model card: 4 to 5
    captions = "tags"  # its model card: trained on booru tags, and on sentences as well
    train_shift = 1.0  # sd-scripts docs/anima_train_network.md (sigmoid), diffusion-pipe; not the scheduler's 3
    modelspec_architecture = "anima-preview"
    kohya_base_version = "anima"
    kohya_naming = "native"
    kohya_module = "networks.lora_anima"  # sd-scripts
    layouts = ("comfy", "diffusers", "kohya")
    layouts_of_diffusers = ("diffusers", "comfy")
    distilled_name = r"anima[^/]*turbo|turbo[^/]*anima"  # anima-turbo-v1.1.safetensors: 8 steps, no guidance
    distilled_advice = Message(
        "the name of this model suggests Anima Turbo: plain training undoes the distillation, and images of 8 steps "
        "become soft; train on Anima base and generate with Turbo"
    )
    native_layers = naming.parse_table("""
        blocks.# = transformer_blocks.#
            self_attn = attn1, cross_attn = attn2
                q_proj = to_q
                k_proj = to_k
                v_proj = to_v
                output_proj = to_out.0
                q_norm = norm_q
                k_norm = norm_k
            mlp.layer1 = ff.net.0.proj
            mlp.layer2 = ff.net.2
            adaln_modulation_self_attn = norm1, adaln_modulation_cross_attn = norm2, adaln_modulation_mlp = norm3
                1 = linear_1
                2 = linear_2
        x_embedder.proj.1 = patch_embed.proj
        t_embedder.1 = time_embed.t_embedder
        t_embedding_norm = time_embed.norm
        final_layer.adaln_modulation.1 = norm_out.linear_1
        final_layer.adaln_modulation.2 = norm_out.linear_2
        final_layer.linear = proj_out
    """)
    checkpoint_text = {"text_conditioner": tuple(f"{prefix}{CONDITIONER}." for prefix in PREFIXES)}
    sizes_from = {
        "num_layers": "blocks.#.self_attn.q_proj.weight",
        "text_embed_dim": "blocks.0.cross_attn.k_proj.weight[1]",
    }
    beside_denoiser = (CONDITIONER, "pos_embedder")  # the first is loaded as a text encoder; the second is computed
    config_marks = {"extra_pos_embed_type": None, "use_crossattn_projection": False, "img_context_dim_in": None}
    reference_config = {
        "in_channels": 16,
        "out_channels": 16,
        "num_attention_heads": 16,
        "attention_head_dim": 128,
        "num_layers": 28,
        "text_embed_dim": 1024,
        "adaln_lora_dim": 256,
        "rope_scale": [1.0, 4.0, 4.0],
        "concat_padding_mask": True,
        "extra_pos_embed_type": None,
    }
    # Cosmos Predict 2 itself has no conditioner for Qwen3, and uses another T5.
    single_file = {"has": ("blocks.0.adaln_modulation_self_attn.1.weight", "llm_adapter.embed.weight")}

    @classmethod
    def get_pipeline_type(cls) -> Any:
        from . import _anima

        return _anima.AnimaPipeline

    def encode_prompts(self, prompts: list[str], pictures: Sequence[Sequence[Image.Image]] = ()) -> list[Cond]:
        # One by one: an empty prompt has no token at all, so in a batch it would consist of padding only.
        texts = [self.text_pipeline.encode_prompt(prompt, self.max_sequence_length)[0] for prompt in prompts]
        return [{"prompt_embeds": embeds_LD.to(self.dtype, copy=True)} for embeds_LD in texts]

    def find_overlong(self, prompts: Sequence[str]) -> list[Overlong]:
        # A part that one tokenizer cuts off still has an effect if the other reads further.
        first, other = (self.find_cuts(name, prompts) for name in self.judge_length_by)
        return [min(first[p], other[p], key=lambda cut: len(cut.lost)) for p in first if p in other]

    def make_inputs(self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        from . import _anima

        return _anima.make_inputs(noisy_BCHW, t_B, cond["prompt_embeds"])

    def convert_output(self, denoiser: nn.Module, output: Any, noisy_BCHW: Tensor) -> Tensor:
        return output[:, :, 0]

    def make_empty_denoiser(self) -> nn.Module:
        from . import _anima

        denoiser: Any = ModelFamily.make_empty_denoiser(self)
        return _anima.expect_border_mask_(denoiser)

    def _convert_text(self, cls: Any, name: str, source: _part_files.Source) -> nn.Module:
        if name != "text_conditioner":
            return ModelFamily._convert_text(self, cls, name, source)
        conditioner = _files.build_from_config(cls, self.folder / name / "config.json")
        conditioner.load_state_dict(source.read_tensors())
        return conditioner
