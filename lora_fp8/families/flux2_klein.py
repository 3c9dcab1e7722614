"""FLUX.2 klein: FLUX.2's transformer with 4 or 9 B parameters, conditioned on Qwen3 4B or 8B, without guidance input.

Black Forest Labs 2026 (https://github.com/black-forest-labs/flux2). The base models are guided by a second pass with
the empty prompt; the models without "base" in their names are distilled to four steps without guidance, and only
model_index.json tells which one lies there, or the name of a single file. The text is what Qwen's layers 9, 18 and 27
say of the prompt as a message in a chat, always 512 tokens long; padding is attended to. How t is drawn: see
`flux2.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from lora_fp8.config import UserError
from lora_fp8.objectives import FlowMatching

from . import _files, _flux2, _qwen, flux2
from .base import Cond, ModelFamily


class Family(ModelFamily):
    name = "flux2_klein"
    title = "FLUX.2 klein"
    example_base = "black-forest-labs/FLUX.2-klein-base-4B"
    pipeline_class = "Flux2KleinPipeline"
    denoiser_class = "Flux2Transformer2DModel"
    denoiser_name = "transformer"
    text_parts = {"tokenizer": "Qwen2TokenizerFast", "text_encoder": "Qwen3ForCausalLM"}
    vae_class = "AutoencoderKLFlux2"
    objective = FlowMatching
    adapter_targets = _flux2.ADAPTER_TARGETS
    keep_precise = _flux2.KEEP_PRECISE
    modulation = _flux2.MODULATION
    bucket_multiple = 16
    native_resolution = 1024
    default_guidance = 4.0
    text_shapes = {"prompt_embeds": ("tokens", "joint_attention_dim")}
    kohya_base_version = "flux_2_klein"
    kohya_naming = "native"
    kohya_module = "networks.lora_flux_2"
    layouts = ("comfy", "diffusers", "kohya")
    lokr_of_diffusers = True
    native_layers = _flux2.LAYERS
    config_marks = {"guidance_embeds": False}
    reference_config = {
        "num_layers": 5,
        "num_single_layers": 20,
        "num_attention_heads": 24,
        "joint_attention_dim": 7680,
        "guidance_embeds": False,
    }
    single_file = {
        "has": ("double_stream_modulation_img.lin.weight", "single_blocks.0.linear1.weight"),
        "lacks": ("guidance_in.",),  # which dev takes as an input
        "in_is_out": ("img_in.weight", "final_layer.linear.weight"),
    }

    # As dev: the same VAE, the same way to hold latents, and the pipeline's own way to read prompts.
    encode_prompts = flux2.Family.encode_prompts
    max_sequence_length = flux2.Family.max_sequence_length
    token_limit = flux2.Family.token_limit
    encode_images = flux2.Family.encode_images
    decode_latents = flux2.Family.decode_latents
    pack = flux2.Family.pack
    unpack = flux2.Family.unpack
    convert_checkpoint = flux2.Family.convert_checkpoint

    def as_read(self, prompt: str) -> tuple[str, str]:
        # The end is cut off, and with it first what the template has behind the prompt.
        message = [{"role": "user", "content": "\0"}]
        text = self.tokenizer("tokenizer").apply_chat_template(message, tokenize=False)
        return text.partition("\0")[0], prompt

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        embeds_BLD = cond["prompt_embeds"].to(noisy_BCHW.device, self.dtype)
        return _flux2.answer(denoiser, noisy_BCHW.to(self.dtype), t_B, embeds_BLD, None)

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        inputs = {"prompt_embeds": cond["prompt_embeds"][None]}
        if negative is not None:
            inputs["negative_prompt_embeds"] = negative["prompt_embeds"][None]
        return {k: v.to(self.device, self.dtype) for k, v in inputs.items()}

    def usual_guidance(self) -> float:
        return 1.0 if self._is_distilled() else self.default_guidance

    def caveats(self) -> list[str]:
        if not self._is_distilled():
            return []
        return [
            "this is a distilled FLUX.2 klein, by the file's name or is_distilled in model_index.json: plain training "
            "undoes the distillation, and images of 4 steps become soft; train on FLUX.2-klein-base of the same size "
            "and draw with this model"
        ]

    def _is_distilled(self) -> bool:
        named = self.distilled_by_name()
        if named is None and self.file_is_called(r"flux[-_. ]?2[-_. ]?klein[-_. ]?\d+b"):
            named = True  # as its makers call it
        if named is not None:
            return named
        index = self.folder / "model_index.json"
        return index.is_file() and bool(_files.read_json(index).get("is_distilled", False))

    @property
    def pipeline_options(self) -> dict[str, Any]:
        """By it the pipeline leaves guidance out; the index may be that of the other model."""
        return {"is_distilled": self._is_distilled()}

    @property
    def modelspec_architecture(self) -> str:
        """Each size has a name of its own."""
        return f"Flux.2-klein-{'9b' if self.denoiser_config()['num_attention_heads'] > 24 else '4b'}"

    def denoiser_config(self) -> dict[str, Any]:
        found = ModelFamily.denoiser_config(self)
        if self.checkpoint:  # 4B and 9B differ in sizes only, and the file knows which it is
            found |= _flux2.sizes(self._header, found.get("attention_head_dim", 128))
            given = 3 * _files.read_json(self.folder / "text_encoder" / "config.json")["hidden_size"]
            if given != found["joint_attention_dim"]:
                raise UserError(
                    f"{self.checkpoint} takes {found['joint_attention_dim']} features of a token, the text encoder in "
                    f"{self.folder} gives {given}: set model.components to the FLUX.2 klein of the same size"
                )
        return found

    @classmethod
    def without_adapter(cls, denoiser: nn.Module) -> set[str]:
        return {_flux2.LAST_NORM}  # in the original naming its LoRA would be another one

    @classmethod
    def halves_swapped(cls, denoiser_config: Mapping[str, Any]) -> set[str]:
        return {_flux2.LAST_NORM}

    @classmethod
    def _tiny_pipeline(cls) -> Flux2KleinPipeline:
        tokenizer = _qwen.tokenizer()
        text = Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=27,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            initializer_range=0.1,  # with the usual 0.02 and so few features, prompts would hardly differ
        )
        return Flux2KleinPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift=3.0),
            vae=_flux2.vae(),
            text_encoder=Qwen3ForCausalLM(text),
            tokenizer=tokenizer,
            transformer=Flux2Transformer2DModel(**_flux2.TINY, guidance_embeds=False),
        )
