"""LTX-Video 0.9.0 and 0.9.1: a 2 B DiT on latents with a 32nd of the sides and an eighth of the frames.

HaCohen et al. 2024, "LTX-Video: Realtime Video Latent Diffusion". Each latent, of 128 channels, is a token. T5-XXL
encodes the prompt, and cross-attention masks its padding. Positions are in pixels and seconds, so the denoiser knows
the frame rate. From 0.9.1 on, the autoencoder's decoder does the last denoising step, at a timestep of its own.

0.9.5 and later have another autoencoder, and take the time of a frame after the first from its beginning instead of its
end. diffusers generates with them in a pipeline of its own (LTXConditionPipeline), and they are refused here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import Message, UserError
from ..lora_files import naming
from . import _files
from ._latents import as_clip, as_picture
from .base import Cond, Inputs, ModelFamily

if TYPE_CHECKING:
    from torch import Tensor, nn

PIXELS = 32
"""Side of a latent in pixels."""
DECODED_AT = {"decode_timestep": 0.05, "decode_noise_scale": 0.025}
"""The makers' settings if the decoder does the last step: its timestep, and the noise added to the latents before."""


class Family(ModelFamily):
    name = "ltx_video"
    title = "LTX-Video"
    example_base = "Lightricks/LTX-Video"
    pipeline_class = "LTXPipeline"
    denoiser_class = "LTXVideoTransformer3DModel"
    text_widths = {"caption_channels": "text_encoder.d_model"}
    text_millions = (4762, 132)  # T5-XXL
    text_parts = {"tokenizer": "T5TokenizerFast", "text_encoder": "T5EncoderModel"}
    prompt_tokens = 128  # LTXPipeline
    text_answers = ("prompt_embeds", "mask")
    text_arguments = {"mask": "prompt_attention_mask"}
    text_shapes = {"prompt_embeds": ("tokens", "caption_channels")}
    prompts_vary = True
    adapter_targets = (
        *(f"{attn}.{proj}" for attn in ("attn1", "attn2") for proj in ("to_q", "to_k", "to_v", "to_out.0")),
        *("ff.net.0.proj", "ff.net.2"),
    )
    keep_precise = ("^proj_in", "time_embed", "caption_projection", "^proj_out")
    bucket_multiple = 32
    latents_as = "BSD"
    native_resolution = 640  # about the area of 768 x 512; README of Lightricks/LTX-Video
    default_guidance = 3.0  # LTXPipeline; inference.py
    clips = (8, 25)  # VAE of 32 x 32 x 8; inference.py: frame_rate 25
    vae_class = "AutoencoderKLLTXVideo"
    modelspec_architecture = "ltx-video"
    kohya_base_version = "ltx-video"
    kohya_naming = ""
    layouts = ("comfy", "diffusers")
    call_options = {"num_frames": 1, "frame_rate": 25, **DECODED_AT}
    reference_config = {"num_layers": 28}
    sizes_from = {
        "num_layers": "transformer_blocks.#.attn1.to_q.weight",
        "caption_channels": "caption_projection.linear_1.weight[1]",
    }
    native_layers = naming.parse_table("""
        patchify_proj = proj_in
        adaln_single = time_embed
        caption_projection, scale_shift_table, proj_out
        transformer_blocks.#
            attn1, attn2
                q_norm = norm_q
                k_norm = norm_k
        transformer_blocks.#
    """)
    # LTX-2 has the same blocks, and more for audio; models of 13 B have 48 blocks.
    single_file = {
        "has": ("adaln_single.linear.weight", "transformer_blocks.0.attn2.q_norm.weight"),
        "in_is_out": ("patchify_proj.weight", "proj_out.weight"),
        "lacks": ("audio_", "av_ca_", "transformer_blocks.28."),
    }

    def make_inputs(self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        num_frames, height, width = as_clip(noisy_BCHW).shape[2:]
        frames, rate = self.clips
        return {
            "hidden_states": self.pack(noisy_BCHW),
            "timestep": t_B * 1000,
            "encoder_hidden_states": cond["prompt_embeds"],
            "encoder_attention_mask": cond["prompt_embeds_mask"],
            "num_frames": num_frames,
            "height": height,
            "width": width,
            "rope_interpolation_scale": (frames / rate, PIXELS, PIXELS),
        }

    def normalise(self, latents: Tensor) -> Tensor:
        from diffusers import LTXPipeline

        return as_picture(LTXPipeline._normalize_latents(as_clip(latents), *self._get_numbers()))

    def denormalise(self, latents: Tensor) -> Tensor:
        from diffusers import LTXPipeline

        return as_picture(LTXPipeline._denormalize_latents(as_clip(latents), *self._get_numbers()))

    def _get_numbers(self) -> tuple[Tensor, Tensor, float]:
        # The VAE stores them as buffers, not in its config.
        return self.vae.latents_mean, self.vae.latents_std, self.vae.config.scaling_factor

    def decode_plain(self, vae: Any, latents: Tensor) -> Tensor:
        import torch

        timestep_B = None
        if vae.config.timestep_conditioning:
            timestep_B = torch.full((len(latents),), DECODED_AT["decode_timestep"], device=latents.device)
        return vae.decode(latents, timestep_B, return_dict=False)[0]

    def list_caveats(self) -> list[str]:
        caveats = ModelFamily.list_caveats(self)
        if not self.checkpoint:
            return caveats
        # diffusers recognizes the version by the same tensor; files without the autoencoder have only their name.
        newer = self._header.get("vae.encoder.conv_out.conv.weight", ())[1:2] == (2048,)
        if newer or self.is_file_called(r"0[._]9[._][5-9]"):
            raise UserError(
                Message(
                    "{path} is LTX-Video 0.9.5 or later, which has another VAE and other positions in time; give "
                    "0.9.0 or 0.9.1",
                    path=self.checkpoint,
                )
            )
        beside = bool(_files.read_json(self.folder / "vae" / "config.json").get("timestep_conditioning"))
        inside = "vae.decoder.last_scale_shift_table" in self._header
        if "vae.encoder.conv_out.conv.weight" in self._header and inside != beside:
            caveats.append(
                Message(
                    "{name} contains another VAE than {folder}, and the VAE of {folder} is used; to use the other "
                    "one, put its vae/ there",
                    name=self.checkpoint.name,
                    folder=self.folder,
                )
            )
        return caveats
