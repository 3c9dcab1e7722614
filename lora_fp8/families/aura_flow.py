"""AuraFlow: a 6.8 B transformer, joint in its first blocks, conditioned on Pile-T5-XL, trained with rectified flow.

fal 2024 (https://blog.fal.ai/auraflow). Prompts are padded to 256 tokens, with zeros in place of what the encoder says
of padding, and the transformer attends to all of them. Its learned positions are a square of patches, of which an image
takes the middle; 0.3 has more of them than its predecessors, for images that are not square.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import Any

import torch
from diffusers import AuraFlowPipeline, AuraFlowTransformer2DModel, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from transformers import LlamaTokenizerFast, UMT5Config, UMT5EncoderModel

from lora_fp8.config import UserError
from lora_fp8.objectives import FlowMatching

from . import _files, _miniature
from ._files import Header, native_header
from .base import Cond, Conversion, ModelFamily


class Family(ModelFamily):
    name = "aura_flow"
    title = "AuraFlow"
    example_base = "fal/AuraFlow-v0.3"
    pipeline_class = "AuraFlowPipeline"
    denoiser_class = "AuraFlowTransformer2DModel"
    denoiser_name = "transformer"
    text_parts = {"tokenizer": "LlamaTokenizerFast", "text_encoder": "UMT5EncoderModel"}
    objective = FlowMatching
    adapter_targets = (
        *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
        *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
        *(f"{ff}.{layer}" for ff in ("ff", "ff_context") for layer in ("linear_1", "linear_2", "out_projection")),
    )
    keep_precise = ("^pos_embed", "context_embedder", "time_step_proj", "norm_out", "proj_out")
    modulation = ("norm1.linear", "norm1_context.linear")
    bucket_multiple = 16
    native_resolution = 1024
    default_guidance = 3.5
    text_shapes = {"prompt_embeds": ("tokens", "joint_attention_dim")}
    modelspec_architecture = "auraflow-v1"
    kohya_base_version = "auraflow"
    kohya_naming = ""  # kohya's tools do not train it
    layouts = ("diffusers", "comfy")
    split_names_in_comfy = True
    layouts_of_diffusers = ("diffusers",)
    reference_config = {"sample_size": 64, "pos_embed_max_size": 9216}  # 0.3
    native_layers = (
        *(
            (f"{blocks}_layers.#.{attn}", f"{ours}_transformer_blocks.#.{layer}")
            for blocks, ours, stream, of_text in (("double", "joint", "w2", "w1"), ("single", "single", "w1", ""))
            for attn, layer in (
                *((f"attn.{stream}{one}", f"attn.to_{one}") for one in "qkv"),
                (f"attn.{stream}o", "attn.to_out.0"),
                *((f"attn.{of_text}{one}", f"attn.add_{one}_proj") for one in "qkv" if of_text),
                *([(f"attn.{of_text}o", "attn.to_add_out")] if of_text else []),
            )
        ),
        *(
            (f"{blocks}.{native}", f"{ours}.{layer}")
            for blocks, ours, mlp, ff in (
                ("double_layers.#", "joint_transformer_blocks.#", "mlpX", "ff"),
                ("double_layers.#", "joint_transformer_blocks.#", "mlpC", "ff_context"),
                ("single_layers.#", "single_transformer_blocks.#", "mlp", "ff"),
            )
            for native, layer in (
                (f"{mlp}.c_fc1", f"{ff}.linear_1"),
                (f"{mlp}.c_fc2", f"{ff}.linear_2"),
                (f"{mlp}.c_proj", f"{ff}.out_projection"),
            )
        ),
        ("double_layers.#.modX.1", "joint_transformer_blocks.#.norm1.linear"),
        ("double_layers.#.modC.1", "joint_transformer_blocks.#.norm1_context.linear"),
        ("single_layers.#.modCX.1", "single_transformer_blocks.#.norm1.linear"),
        ("t_embedder.mlp.0", "time_step_proj.linear_1"),
        ("t_embedder.mlp.2", "time_step_proj.linear_2"),
        ("cond_seq_linear", "context_embedder"),
        ("init_x_linear", "pos_embed.proj"),
        ("positional_encoding", "pos_embed.pos_embed"),
        ("register_tokens", "register_tokens"),
        ("final_linear", "proj_out"),
        ("modF.1", "norm_out.linear"),
    )
    single_file = {
        "has": ("double_layers.0.attn.w1q.weight", "positional_encoding"),
        "in_is_out": ("init_x_linear.weight", "final_linear.weight"),
    }

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        with torch.no_grad():
            embeds_BLD, *_ = self.text_pipeline.encode_prompt(
                prompts,
                device=self.device,
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_sequence_length,
            )
        return [{"prompt_embeds": embeds_LD.clone()} for embeds_LD in embeds_BLD.to(self.dtype)]

    def token_limit(self, name: str) -> int:
        return min(256, self.tokenizer(name).model_max_length)

    @property
    def max_sequence_length(self) -> int:
        """Tokens that a prompt is padded or cut to; what the pipeline calls so."""
        return self.token_limit("tokenizer")

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        return denoiser(
            noisy_BCHW.to(self.dtype),
            encoder_hidden_states=cond["prompt_embeds"].to(noisy_BCHW.device, self.dtype),
            timestep=t_B.to(noisy_BCHW.device),  # sigma in [0, 1]: the transformer multiplies by 1000 itself
            return_dict=False,
        )[0]

    def check_bucket(self, width: int, height: int) -> None:
        side = int(self.denoiser_config().get("pos_embed_max_size", 1024) ** 0.5)
        patch = 2 ** len(_files.read_json(self.folder / "vae" / "config.json")["block_out_channels"])  # 2 x 2 latents
        if max(width, height) > patch * side:  # diffusers would count positions from the wrong end
            raise UserError(
                f"dataset.resolution: this {self.title} has positions for {patch * side} pixels a side, and a bucket "
                f"is {width} x {height}; set a smaller one, or dataset.buckets = false"
            )

    def seq_len(self, latent_hw: tuple[int, int]) -> int:
        return (latent_hw[0] // 2) * (latent_hw[1] // 2)

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        inputs = {}
        for prefix, one in (("", cond), ("negative_", negative)):
            if one is not None:
                inputs[f"{prefix}prompt_embeds"] = one["prompt_embeds"][None].to(self.device, self.dtype)
                # asked for, and not used: padding is zeros already
                inputs[f"{prefix}prompt_attention_mask"] = torch.ones(1, len(one["prompt_embeds"]), device=self.device)
        return inputs

    @classmethod
    def without_adapter(cls, denoiser: nn.Module) -> set[str]:
        # The original gives (shift, scale) there and diffusers (scale, shift): a LoRA of one is none of the other.
        return {"norm_out.linear"}

    @classmethod
    def halves_swapped(cls, denoiser_config: Mapping[str, Any]) -> set[str]:
        return {"norm_out.linear"}

    def denoiser_config(self) -> dict[str, Any]:
        found = ModelFamily.denoiser_config(self)
        if self.checkpoint:  # what 0.1 and 0.3 differ in
            found["pos_embed_max_size"] = native_header(self._header)["positional_encoding"][1]
        return found

    def convert_checkpoint(self, header: Header) -> Conversion:
        conversion = ModelFamily.convert_checkpoint(self, header)
        name = "norm_out.linear.weight"
        return conversion | {name: (conversion[name][0], _halves_swapped)}

    @classmethod
    def _tiny_pipeline(cls) -> AuraFlowPipeline:
        tokenizer = _tiny_tokenizer()
        settings = UMT5Config(
            vocab_size=len(tokenizer),
            d_model=48,
            d_kv=16,
            d_ff=96,
            num_layers=1,
            num_heads=2,
            feed_forward_proj="gated-gelu",
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        transformer = AuraFlowTransformer2DModel(
            sample_size=16,
            num_mmdit_layers=1,
            num_single_dit_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=48,
            caption_projection_dim=32,
            pos_embed_max_size=1024,
        )
        for name, parameter in transformer.named_parameters():
            if ".norm1" in name:  # random gates are almost shut, and nothing of the prompt comes through
                parameter.data *= 8
        return AuraFlowPipeline(
            tokenizer=tokenizer,
            text_encoder=UMT5EncoderModel(settings),
            vae=_miniature.vae(scaling_factor=0.13025),
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.73),
        )


def _tiny_tokenizer() -> LlamaTokenizerFast:
    """BPE with bytes to fall back on, as Llama's and Pile-T5's."""
    pieces = ["<pad>", "</s>", "<unk>", "<s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += string.ascii_letters + string.digits + string.punctuation
    merges: list[tuple[str, str]] = []
    for word in ("▁a", "▁photo", "▁of", "▁cat", "▁dog", "▁red", "▁blue", "▁the"):
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                merges.append((word[: end - 1], word[end - 1]))
                pieces.append(word[:end])
    marks = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return LlamaTokenizerFast(vocab=vocab, merges=merges, model_max_length=_miniature.T5_TOKENS, **marks)


def _halves_swapped(tensor: Tensor) -> Tensor:
    return torch.cat(tensor.chunk(2)[::-1])
