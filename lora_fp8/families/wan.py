"""Wan 2.1 text-to-video, 1.3 B and 14 B, trained on clips, and on pictures as clips of one frame.

Wan Team 2025, "Wan: Open and Advanced Large-Scale Video Generative Models". A DiT that attends to all patches of all
frames and, in cross-attention, to UMT5's tokens, padded with zeros to 512 that are attended to as well. Flow matching,
drawn with UniPC. Latents are normalised channel by channel, as in Qwen-Image, which has taken over this autoencoder.

Wan 2.2 A14B is two denoisers of this architecture, one for much noise and one for little. One job trains one denoiser
over all noise levels: give the expert that is wanted as a single file. Its diffusers folder is refused, as a pipeline
with half of it could not draw. Wan 2.2 5B has an autoencoder of its own, with 48 channels, and is refused by that.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from PIL import Image
from torch import Tensor, nn
from transformers import UMT5Config, UMT5EncoderModel

from lora_fp8.config import UserError
from lora_fp8.objectives import FlowMatching

from . import _files, _miniature, _qwen
from ._files import native_header
from .base import Cond, ModelFamily, as_clip, as_picture

ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "o": "to_out.0", "norm_q": "norm_q", "norm_k": "norm_k"}


class Family(ModelFamily):
    name = "wan"
    title = "Wan 2.1"
    example_base = "Wan-AI/Wan2.1-T2V-14B-Diffusers"
    pipeline_class = "WanPipeline"
    denoiser_class = "WanTransformer3DModel"
    denoiser_name = "transformer"
    text_parts = {"tokenizer": "T5TokenizerFast", "text_encoder": "UMT5EncoderModel"}
    objective = FlowMatching
    adapter_targets = (
        *(f"{attn}.{proj}" for attn in ("attn1", "attn2") for proj in ("to_q", "to_k", "to_v", "to_out.0")),
        *("ffn.net.0.proj", "ffn.net.2"),
    )
    keep_precise = ("patch_embedding", "condition_embedder", "^proj_out")
    bucket_multiple = 16
    native_resolution = 640  # the area of 480p, which both sizes are trained at; 14B knows that of 720p (960) as well
    default_guidance = 5.0
    clips = (4, 16)
    text_shapes = {"prompt_embeds": ("tokens", "text_dim")}
    vae_class = "AutoencoderKLWan"
    vae_marks = _qwen.VAE_MARKS
    modelspec_architecture = "wan2.1"
    kohya_base_version = "wan2.1"
    kohya_naming = "native"
    kohya_module = "networks.lora_wan"
    layouts = ("comfy", "diffusers", "kohya")
    call_options = {"num_frames": 1}
    reference_config = {"num_layers": 40, "num_attention_heads": 40, "ffn_dim": 13824}
    native_layers = (
        ("patch_embedding", "patch_embedding"),
        *(
            (f"{theirs}.{i}", f"condition_embedder.{ours}.linear_{1 + i // 2}")
            for theirs, ours in (("time_embedding", "time_embedder"), ("text_embedding", "text_embedder"))
            for i in (0, 2)
        ),
        ("time_projection.1", "condition_embedder.time_proj"),
        *(
            (f"blocks.#.{theirs}.{part}", f"blocks.#.{ours}.{name}")
            for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
            for part, name in ATTENTION.items()
        ),
        ("blocks.#.norm3", "blocks.#.norm2"),  # before cross-attention, which diffusers counts second
        ("blocks.#.ffn.0", "blocks.#.ffn.net.0.proj"),
        ("blocks.#.ffn.2", "blocks.#.ffn.net.2"),
        ("blocks.#.modulation", "blocks.#.scale_shift_table"),
        ("head.head", "proj_out"),
        ("head.modulation", "scale_shift_table"),
    )
    tiny_hw = (32, 48)
    # Image-to-video takes more channels than it gives or has keys for the image; VACE has blocks of its own.
    single_file = {
        "has": ("blocks.0.self_attn.q.weight",),
        "shapes": {"patch_embedding.weight": (None, None, None, None, None)},
        "in_is_out": ("patch_embedding.weight", "head.head.weight"),
        "lacks": ("blocks.0.cross_attn.k_img.", "vace_blocks."),
    }

    @torch.no_grad()
    def encode_images(self, pixels_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("encode_images before load_encoders")
        return _qwen.encode(self.vae, pixels_BCHW.to(self.device, torch.float32))

    @torch.no_grad()
    def decode_latents(self, latents_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("decode_latents before load_vae")
        return _qwen.decode(self.vae, latents_BCHW.to(self.device, torch.float32))

    def as_read(self, prompt: str) -> tuple[str, str]:
        return "", prompt_clean(prompt)

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        with torch.no_grad():
            embeds_BLD, _ = self.text_pipeline.encode_prompt(
                prompts,
                do_classifier_free_guidance=False,
                max_sequence_length=self.max_sequence_length,
                device=self.device,
            )
        # Zeros stand behind the prompt's tokens, and a token's own embedding is never zero throughout.
        return [{"prompt_embeds": row_LD[row_LD.any(-1)].to(self.dtype)} for row_LD in embeds_BLD]

    def token_limit(self, name: str) -> int:
        return min(512, self.tokenizer(name).model_max_length)

    @property
    def max_sequence_length(self) -> int:
        """UMT5 tokens that a prompt is padded or cut to; what the pipeline calls so."""
        return self.token_limit("tokenizer")

    def _padded(self, embeds_LD: Tensor) -> Tensor:
        return nn.functional.pad(embeds_LD, (0, 0, 0, self.max_sequence_length - len(embeds_LD)))

    def collate(self, conds: list[Cond]) -> Cond:
        return {"prompt_embeds": torch.stack([self._padded(cond["prompt_embeds"]) for cond in conds])}

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        device = noisy_BCHW.device
        answer = denoiser(
            hidden_states=self.pack(noisy_BCHW).to(self.dtype),
            timestep=t_B.to(device) * 1000,
            encoder_hidden_states=cond["prompt_embeds"].to(device, self.dtype),
            return_dict=False,
        )[0]
        return self.unpack(answer, tuple(noisy_BCHW.shape[-2:]))

    def pack(self, latents_BCHW: Tensor) -> Tensor:
        return as_clip(latents_BCHW)

    def unpack(self, packed: Tensor, latent_hw: tuple[int, int]) -> Tensor:
        return as_picture(packed)

    def pictures(self, output: Any) -> list[Image.Image]:
        return [VaeImageProcessor.numpy_to_pil(frames)[0] for frames in output.frames]

    def frames(self, output: Any) -> list[Image.Image]:
        return VaeImageProcessor.numpy_to_pil(output.frames[0])

    def seq_len(self, latent_hw: tuple[int, ...]) -> int:
        *num_frames, height, width = latent_hw
        return math.prod(num_frames) * (height // 2) * (width // 2)

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        inputs = {"prompt_embeds": cond, "negative_prompt_embeds": negative}
        return {
            name: self._padded(one["prompt_embeds"])[None].to(self.device, self.dtype)
            for name, one in inputs.items()
            if one is not None
        }

    def denoiser_config(self) -> dict[str, Any]:
        found = ModelFamily.denoiser_config(self)
        if self.checkpoint:  # 1.3 B and 14 B have the same encoders, and the file knows which it is
            native = native_header(self._header)
            width, _ = native["blocks.0.self_attn.q.weight"]
            found["num_attention_heads"] = width // found.get("attention_head_dim", 128)
            found["ffn_dim"] = native["blocks.0.ffn.0.weight"][0]
            found["num_layers"] = sum(key.endswith(".self_attn.q.weight") for key in native)
        return found

    def empty_denoiser(self) -> nn.Module:
        with torch.device("meta"):
            denoiser = WanTransformer3DModel.from_config(self.denoiser_config())
        rope = denoiser.rope  # computes its frequencies when it is made, and no file holds them
        denoiser.rope = type(rope)(rope.attention_head_dim, rope.patch_size, rope.max_seq_len)
        return denoiser

    def caveats(self) -> list[str]:
        index = self.folder / "model_index.json"
        if not self.checkpoint and any(_files.read_json(index).get("transformer_2") or ()):
            raise UserError(
                f"{self.folder} is Wan 2.2 A14B, two denoisers that draw together, and a job trains one: give the one "
                "for little or for much noise as a single .safetensors in model.path, and a folder of Wan 2.1 in "
                "model.components"
            )
        if self.checkpoint:
            channels = native_header(self._header)["patch_embedding.weight"][1]
            given = _files.read_json(self.folder / "vae" / "config.json").get("z_dim", 16)
            if channels != given:
                other = ", as that of Wan 2.2 TI2V-5B" if channels == 48 else ""
                raise UserError(
                    f"{self.checkpoint} takes latents of {channels} channels{other}, and the VAE in {self.folder} "
                    f"gives {given}: {self.title} has 16"
                )
        if self.file_is_called(r"wan[-_. ]?2[._]?2|(high|low)[-_. ]?noise"):
            return [
                f"{self.checkpoint.name} is an expert of Wan 2.2 by its name, which draws at a part of the noise "
                "levels: objective.t_min = 0.875 trains the high-noise expert on these, t_max = 0.875 the low-noise one"
            ]
        return []

    @classmethod
    def _tiny_pipeline(cls) -> WanPipeline:
        tokenizer = _miniature.t5_tokenizer()
        text = UMT5Config(
            vocab_size=len(tokenizer),
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=1,
            num_heads=2,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        return WanPipeline(
            tokenizer=tokenizer,
            text_encoder=UMT5EncoderModel(text),
            vae=AutoencoderKLWan(base_dim=4, dim_mult=[1, 1, 2, 2], num_res_blocks=1),
            scheduler=UniPCMultistepScheduler(
                flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction", final_sigmas_type="zero"
            ),
            transformer=WanTransformer3DModel(
                num_attention_heads=4,
                attention_head_dim=16,
                text_dim=32,
                freq_dim=32,
                ffn_dim=128,
                num_layers=2,
                rope_max_seq_len=32,
            ),
        )
