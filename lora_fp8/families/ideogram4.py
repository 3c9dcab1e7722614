"""Ideogram 4: a 9 B single-stream DiT, conditioned on thirteen layers of Qwen3-VL 8B, trained with rectified flow.

Ideogram 2026. Text and image are one sequence, padded in front. Time runs from 0 (noise) to 1 (image) and the velocity
points to the image; this module reverses both. The VAE is FLUX.2's, but the batch norm that normalizes its latents has
Ideogram's own statistics and another order of a patch's channels: it must be the VAE of Ideogram's diffusers folder.
The model was trained on JSON captions, with `high_level_description`, `style_description` and
`compositional_deconstruction`. Guidance comes from a second transformer of the same size that never saw text. A LoRA
does not change it and it is not loaded, so previews have no guidance.

The pipeline takes prompts as text only: `mend_` lets it take encoded ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import Message, Template, UserError
from ..lora_files import naming
from .base import Cond, Inputs, ModelFamily

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from ..objectives import Objective


class Family(ModelFamily):
    name = "ideogram4"
    title = "Ideogram 4"
    example_base = "models/ideogram4_fp8_scaled.safetensors"
    pipeline_class = "Ideogram4Pipeline"
    denoiser_class = "Ideogram4Transformer2DModel"
    text_widths = {"llm_features_dim": "13 * text_encoder.hidden_size"}
    text_millions = (8145, 622)  # Qwen3-VL-8B without its output layer
    text_parts = {"tokenizer": "AutoTokenizer", "text_encoder": "Qwen3VLModel"}
    prompt_tokens = 2048  # with the template's; Ideogram4Pipeline
    chat = ({"role": "user", "content": [{"type": "text", "text": "\0"}]},)
    end_counts = True
    prompts_vary = True
    padded_in_front = True
    text_shapes = {"prompt_embeds": ("tokens", "llm_features_dim")}
    vae_class = "AutoencoderKLFlux2"
    other_vaes = {"FLUX.2": (-0.0676, -0.0715, -0.0753, -0.0745)}
    patch_channels = "22C"
    towards_image = True
    adapter_targets = (
        *(f"attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"feed_forward.{layer}" for layer in ("w1", "w2", "w3")),
    )
    keep_precise = ("input_proj", "llm_cond_proj", "t_embedding", "adaln_proj", "final_layer")
    modulation = ("adaln_modulation",)
    # One by one, because the final layer's has this name too.
    further_layers = {"blocks": tuple(f"^layers.{i}.adaln_modulation" for i in range(34))}
    bucket_multiple = 16
    latents_as = "BSD"
    native_resolution = 1024  # up to 2048
    default_guidance = 1.0
    uses_negative = False
    modelspec_architecture = "Ideogram-4"
    kohya_base_version = "ideogram4"
    kohya_naming = ""  # only musubi-tuner's own converter reads its names
    kohya_module = "networks.lora_ideogram4"  # musubi-tuner
    layouts = ("comfy", "diffusers")
    sizes_from = {"num_layers": "layers.#.attention.qkv.weight", "llm_features_dim": "llm_cond_proj.weight[1]"}
    native_layers = naming.parse_table("""
        layers.#.attention.qkv = layers.#.attention.to_q layers.#.attention.to_k layers.#.attention.to_v
        layers.#.attention.o = layers.#.attention.to_out.0
        layers.#
        input_proj, llm_cond_norm, llm_cond_proj, t_embedding, adaln_proj, embed_image_indicator, final_layer
    """)
    computed = {"rotary_emb": ("attention_head_dim", "rope_theta", "mrope_section")}
    reference_config = {"num_layers": 34, "num_attention_heads": 18, "attention_head_dim": 256}
    single_file = {"has": ("layers.0.attention.qkv.weight", "embed_image_indicator.weight")}
    caveats_by_name = {
        "uncond": Template(
            "the name of {name} suggests the transformer for guidance; LoRAs are trained on the other one"
        )
    }

    def call_encode_prompt(self, pipeline: Any, prompts: list[str]) -> dict[str, Any]:
        # One by one, each at its own length; the pipeline refuses prompts that are too long, so they are cut here.
        lost = {cut.prompt: cut.lost for cut in self.find_overlong(prompts)}
        before, behind = self.split_chat_template()
        rows = []
        for prompt in (prompt.removesuffix(lost.get(prompt, "")) for prompt in prompts):
            num_tokens = self.count_tokens(before + prompt + behind)
            packed_BSD, *_ = pipeline.encode_prompt([prompt], 1, 1, num_tokens, self.device)
            rows.append(packed_BSD[0, :num_tokens])
        return {"prompt_embeds": rows}

    def list_caption_caveats(self, captions: Sequence[str]) -> list[str]:
        written = [caption for caption in captions if caption.strip()]
        plain = sum(not caption.lstrip().startswith("{") for caption in written)
        if not plain:
            return []
        return [
            Message(
                "{count} of {total} captions are not JSON, but {title} was trained on JSON captions: it can read "
                "yours, but knows them less well; configs/ideogram4.toml shows the form",
                count=plain,
                total=len(written),
                title=self.title,
            )
        ]

    def make_inputs(self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        from diffusers import Ideogram4Pipeline
        from torch import nn

        text_BLD, image_BSC = cond["prompt_embeds"], self.pack(noisy_BCHW)
        (height, width), num_text, num_image = noisy_BCHW.shape[2:], text_BLD.shape[1], image_BSC.shape[1]
        lengths = cond["prompt_embeds_mask"].sum(1).tolist()
        ids = Ideogram4Pipeline._prepare_ids(lengths, height, width, num_text, noisy_BCHW.device)
        return {
            "hidden_states": nn.functional.pad(image_BSC, (0, 0, num_text, 0)),
            "timestep": (1 - t_B).to(self.dtype),
            "encoder_hidden_states": nn.functional.pad(text_BLD, (0, 0, 0, num_image)),
            **dict(zip(("position_ids", "segment_ids", "indicator"), ids, strict=True)),
        }

    def convert_output(self, denoiser: nn.Module, output: Any, noisy_BCHW: Tensor) -> Tensor:
        num_image = self.count_image_tokens(tuple(noisy_BCHW.shape[2:]))  # the image follows the text
        return self.unpack(output[:, -num_image:], tuple(noisy_BCHW.shape[2:]))

    def make_guidance_inputs(self, guidance: float) -> dict[str, Any]:
        if guidance != 1.0:
            raise UserError(
                Message(
                    "preview.guidance = {guidance}: {title} needs a second transformer for guidance, which is not "
                    "loaded here; accepted: 1.0 or 'auto'",
                    guidance=guidance,
                    title=self.title,
                )
            )
        return {"guidance_scale": guidance, "guidance_schedule": None}

    def make_pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        embeds_LD = cond["prompt_embeds"].to(self.device, self.dtype)
        return {"prompt": [embeds_LD], "max_sequence_length": len(embeds_LD)}

    @classmethod
    def get_objective_type(cls) -> type[Objective]:
        from . import _ideogram4

        return _ideogram4.Flow

    @classmethod
    def mend_(cls, pipeline: Any) -> None:
        from diffusers import Ideogram4Pipeline
        from torch import nn

        from . import _ideogram4

        encode = pipeline.encode_prompt

        def encode_or_take(
            prompt: Any, grid_h: int, grid_w: int, max_sequence_length: int, device: torch.device
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            if isinstance(prompt, str) or isinstance(prompt[0], str):
                return encode(prompt, grid_h, grid_w, max_sequence_length, device)
            (text_LD,) = prompt
            ids = Ideogram4Pipeline._prepare_ids([len(text_LD)], grid_h, grid_w, max_sequence_length, device)
            return nn.functional.pad(text_LD[None], (0, 0, 0, grid_h * grid_w)), *ids

        pipeline.encode_prompt = encode_or_take
        if pipeline.unconditional_transformer is None:
            pipeline.unconditional_transformer = _ideogram4.Unguided()
