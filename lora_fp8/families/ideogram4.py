"""Ideogram 4: a 9 B single-stream DiT, conditioned on thirteen layers of Qwen3-VL 8B, trained with rectified flow.

Ideogram 2026. Text and image are one sequence, padded in front; time runs from 0 (noise) to 1 (image) and the velocity
points to the image, so that both are turned around here. The VAE is FLUX.2's, but the batch norm that normalises its
latents holds Ideogram's own numbers, with the channels of a patch in another order: it must be the VAE of Ideogram's
diffusers folder. Captions were JSON when the model was trained, with `high_level_description`, `style_description` and
`compositional_deconstruction`. Guidance comes from a second transformer of the same size that never saw text; a LoRA
does not touch it and it is not loaded, so that previews are drawn without guidance.

The pipeline takes prompts in words only: `mend_` lets it take encoded ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Ideogram4Pipeline, Ideogram4Transformer2DModel
from torch import Tensor, nn

from lora_fp8.config import UserError
from lora_fp8.objectives import FlowMatching

from . import _files, _flux2, _qwen
from ._weights import WeightFile
from .base import Cond, ModelFamily

PATCH = 2
FLUX2_MEAN = (-0.0676, -0.0715, -0.0753, -0.0745)
"""How the means in the batch norm of FLUX.2's VAE begin; Ideogram's begin 0.0198, 0.1015, 0.2969, 0.2719."""
# As Qwen's own, where content is a list of parts.
_CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Flow(FlowMatching):
    """t as the pipeline places its steps: logit-normal around half the logarithm of the pixels over 512 x 512.

    The pipeline's scale of 1.5 is taken over where `objective.timesteps` is "auto".
    """

    def shift(self, seq_len: int) -> float:
        if self.section.shift != "auto":
            return float(self.section.shift)
        return math.sqrt(seq_len / 1024)  # 512 x 512 pixels are 1024 tokens

    def sample_t(self, generator_per_sample: list[torch.Generator], seq_len: int) -> Tensor:
        if self.section.timesteps != "auto":
            return FlowMatching.sample_t(self, generator_per_sample, seq_len)
        normal_B = torch.cat([torch.randn(1, generator=g) for g in generator_per_sample])
        return self.warp((1.5 * normal_B).sigmoid(), seq_len)


class _Unguided:
    """Stands where the pipeline wants its second transformer: at a guidance of 1, its answer is multiplied by 0."""

    dtype = torch.float32

    def __call__(self, hidden_states: Tensor, **inputs: Any) -> tuple[Tensor]:
        return (torch.zeros_like(hidden_states),)


class Family(ModelFamily):
    name = "ideogram4"
    title = "Ideogram 4"
    example_base = "models/ideogram4_fp8_scaled.safetensors"
    pipeline_class = "Ideogram4Pipeline"
    denoiser_class = "Ideogram4Transformer2DModel"
    denoiser_name = "transformer"
    text_parts = {"tokenizer": "AutoTokenizer", "text_encoder": "Qwen3VLModel"}
    vae_class = "AutoencoderKLFlux2"
    objective = Flow
    adapter_targets = (
        *(f"attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"feed_forward.{layer}" for layer in ("w1", "w2", "w3")),
    )
    keep_precise = ("input_proj", "llm_cond_proj", "t_embedding", "adaln_proj", "final_layer")
    modulation = ("adaln_modulation",)
    bucket_multiple = 16
    native_resolution = 1024  # up to 2048
    default_guidance = 1.0
    text_shapes = {"prompt_embeds": ("tokens", "llm_features_dim")}
    uses_negative = False
    modelspec_architecture = "Ideogram-4"
    kohya_base_version = "ideogram4"
    kohya_naming = ""  # musubi-tuner's names are read by nothing but its own converter
    kohya_module = "networks.lora_ideogram4"
    layouts = ("comfy", "diffusers")
    native_layers = (
        ("layers.#.attention.qkv", " ".join(f"layers.#.attention.to_{x}" for x in "qkv")),
        ("layers.#.attention.o", "layers.#.attention.to_out.0"),
        *(
            (name, name)
            for name in (
                *("input_proj", "llm_cond_norm", "llm_cond_proj", "t_embedding", "adaln_proj"),
                *("embed_image_indicator", "layers.#", "final_layer"),
            )
        ),
    )
    reference_config = {"num_layers": 34, "num_attention_heads": 18, "attention_head_dim": 256}
    single_file = {"has": ("layers.0.attention.qkv.weight", "embed_image_indicator.weight")}

    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        # The pipeline refuses prompts that are too long.
        lost = {cut.prompt: cut.lost for cut in self.overlong(prompts)}
        return [{"prompt_embeds": self._encoded(prompt.removesuffix(lost.get(prompt, "")))} for prompt in prompts]

    def _encoded(self, prompt: str) -> Tensor:
        tokenizer = self.tokenizer("tokenizer")
        num_tokens = len(tokenizer("".join(self._in_template(prompt)), add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            packed_BSD, *_ = self.text_pipeline.encode_prompt([prompt], 1, 1, num_tokens, self.device)
        return packed_BSD[0, :num_tokens].to(self.dtype, copy=True)

    def _in_template(self, prompt: str) -> tuple[str, str, str]:
        message = [{"role": "user", "content": [{"type": "text", "text": "\0"}]}]
        text = self.tokenizer("tokenizer").apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        before, _, after = text.partition("\0")
        return before, prompt, after

    def caption_caveats(self, captions: Sequence[str]) -> list[str]:
        written = [caption for caption in captions if caption.strip()]
        plain = sum(not caption.lstrip().startswith("{") for caption in written)
        if not plain:
            return []
        return [
            f"{plain} of {len(written)} captions are not JSON, which {self.title} was trained on: it reads them, but "
            "they are further from what it knows; configs/ideogram4.toml shows the form"
        ]

    def as_read(self, prompt: str) -> tuple[str, str]:
        return self._in_template(prompt)[:2]

    @property
    def max_sequence_length(self) -> int:
        """Tokens of a prompt in its template; what the pipeline calls so."""
        return min(2048, self.tokenizer("tokenizer").model_max_length)

    def token_limit(self, name: str) -> int:
        _, _, after = self._in_template("")
        return self.max_sequence_length - len(self.tokenizer(name)(after, add_special_tokens=False)["input_ids"])

    def collate(self, conds: list[Cond]) -> Cond:
        embeds, lengths = _front_padded([cond["prompt_embeds"] for cond in conds])
        return {"prompt_embeds": embeds, "prompt_lengths": torch.tensor(lengths)}

    def encode_images(self, pixels_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("encode_images before load_encoders")
        return _flux2.encode(self.vae, pixels_BCHW.to(self.device, torch.float32), self._eps, _patches)

    def decode_latents(self, latents_BCHW: Tensor) -> Tensor:
        if self.vae is None:
            raise RuntimeError("decode_latents before load_vae")
        return _flux2.decode(self.vae, latents_BCHW.to(self.device, torch.float32), self._eps, _whole)

    @property
    def _eps(self) -> float:
        return self.vae.config.batch_norm_eps

    def predict(
        self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float = 1.0
    ) -> Tensor:
        device, hw = noisy_BCHW.device, (noisy_BCHW.shape[2], noisy_BCHW.shape[3])
        text_BLD = cond["prompt_embeds"].to(device, self.dtype)
        image_BSC = self.pack(noisy_BCHW.to(self.dtype))
        num_text = text_BLD.shape[1]
        position_ids, segment_ids, indicator = Ideogram4Pipeline._prepare_ids(
            cond["prompt_lengths"].tolist(), *hw, num_text, device
        )
        answer_BSC = denoiser(
            hidden_states=nn.functional.pad(image_BSC, (0, 0, num_text, 0)),
            timestep=(1 - t_B).to(device, self.dtype),
            encoder_hidden_states=nn.functional.pad(text_BLD, (0, 0, 0, image_BSC.shape[1])),
            position_ids=position_ids,
            segment_ids=segment_ids,
            indicator=indicator,
            return_dict=False,
        )[0]
        return -self.unpack(answer_BSC[:, num_text:], hw)

    def pack(self, latents_BCHW: Tensor) -> Tensor:
        return latents_BCHW.flatten(2).transpose(1, 2)

    def unpack(self, packed: Tensor, latent_hw: tuple[int, int]) -> Tensor:
        return _flux2.unpack(packed, latent_hw)

    def guidance_inputs(self, guidance: float) -> dict[str, Any]:
        if guidance != 1.0:
            raise UserError(
                f"preview.guidance = {guidance}: {self.title} is guided by a second transformer, which is not loaded; "
                "accepted: 1.0 or 'auto'"
            )
        return {"guidance_scale": guidance, "guidance_schedule": None}

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        embeds_LD = cond["prompt_embeds"].to(self.device, self.dtype)
        return {"prompt": [embeds_LD], "max_sequence_length": len(embeds_LD)}

    @classmethod
    def mend_(cls, pipeline: Ideogram4Pipeline) -> None:
        encode = pipeline.encode_prompt

        def encode_or_take(
            prompt: Any, grid_h: int, grid_w: int, max_sequence_length: int, device: torch.device
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            if isinstance(prompt, str) or isinstance(prompt[0], str):
                return encode(prompt, grid_h, grid_w, max_sequence_length, device)
            text_BLD, lengths = _front_padded(prompt)
            ids = Ideogram4Pipeline._prepare_ids(lengths, grid_h, grid_w, max_sequence_length, device)
            return nn.functional.pad(text_BLD, (0, 0, 0, grid_h * grid_w)), *ids

        pipeline.encode_prompt = encode_or_take
        if pipeline.unconditional_transformer is None:
            pipeline.unconditional_transformer = _Unguided()

    def empty_denoiser(self) -> nn.Module:
        with torch.device("meta"):
            denoiser = Ideogram4Transformer2DModel.from_config(self.denoiser_config())
        config = denoiser.config  # its frequencies are computed, and in no file
        denoiser.rotary_emb = type(denoiser.rotary_emb)(
            config.attention_head_dim, config.rope_theta, config.mrope_section
        ).to(self.device)
        return denoiser

    def caveats(self) -> list[str]:
        for path in _files.weight_files(self.folder / "vae", "diffusion_pytorch_model"):
            file = WeightFile(path)
            if "bn.running_mean" in file.header:
                mean_C = file.decoded("bn.running_mean").float()
                if torch.allclose(mean_C[: len(FLUX2_MEAN)], torch.tensor(FLUX2_MEAN), rtol=0, atol=1e-3):
                    raise UserError(
                        f"{path} is FLUX.2's VAE, whose normalisation is not that of {self.title}: put the vae/ of "
                        "Ideogram 4's diffusers folder in its place"
                    )
        if "uncond" not in (self.checkpoint.name.lower() if self.checkpoint else ""):
            return []
        return [f"{self.checkpoint} is the transformer for guidance by its name; LoRAs belong to the other one"]

    @classmethod
    def _tiny_pipeline(cls) -> Ideogram4Pipeline:
        tokenizer = _qwen.tokenizer()
        tokenizer.chat_template = _CHAT
        conditional, unconditional = (
            Ideogram4Transformer2DModel(
                in_channels=16,
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=4,
                intermediate_size=128,
                adaln_dim=32,
                llm_features_dim=13 * 32,
                mrope_section=(4, 2, 2),
            )
            for _ in range(2)
        )
        return Ideogram4Pipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=_flux2.vae(),
            text_encoder=_qwen.qwen3_vl(tokenizer, layers=36),
            tokenizer=tokenizer,
            transformer=conditional,
            unconditional_transformer=unconditional,
        )


def _front_padded(rows: list[Tensor]) -> tuple[Tensor, list[int]]:
    """(B, L, D) with zeros in front of the shorter ones, and their lengths."""
    lengths = [len(row) for row in rows]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left"), lengths


def _patches(latents_BCHW: Tensor) -> Tensor:
    """2 x 2 patches become channels, those of one pixel side by side; FLUX.2 has those of one channel so."""
    patches = latents_BCHW.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))  # B C H/2 2 W/2 2
    return patches.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)


def _whole(patches_BCHW: Tensor) -> Tensor:
    """The inverse of `_patches`."""
    patches = patches_BCHW.unflatten(1, (PATCH, PATCH, -1))  # B 2 2 C H/2 W/2
    return patches.permute(0, 3, 4, 1, 5, 2).flatten(4, 5).flatten(2, 3)
