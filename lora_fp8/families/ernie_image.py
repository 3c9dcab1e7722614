"""ERNIE-Image: an 8 B single-stream DiT, conditioned on Ministral 3 3B, trained with rectified flow.

Baidu 2026 (https://github.com/baidu/ernie-image). Latents are FLUX.2's, normalized by a batch norm with another
epsilon. One linear turns the timestep into scales and shifts for all blocks. Prompts keep their length: the transformer
masks padding, and places the image after the text on the first axis of its position ids. ERNIE-Image-Turbo is this
model, distilled to 8 steps without guidance. The model that rewrites prompts before generation (`pe`) is not loaded,
because captions are to be trained as they are written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import Message
from ..lora_files import naming
from . import _flux2
from .base import Cond, Inputs, ModelFamily

if TYPE_CHECKING:
    from torch import Tensor, nn


class Family(ModelFamily):
    name = "ernie_image"
    title = "ERNIE-Image"
    example_base = "baidu/ERNIE-Image"
    pipeline_class = "ErnieImagePipeline"
    denoiser_class = "ErnieImageTransformer2DModel"
    text_widths = {"text_in_dim": "text_encoder.hidden_size"}
    text_millions = (3849, 403)  # Ministral 3 3B
    text_parts = {"tokenizer": "AutoTokenizer", "text_encoder": "Mistral3Model"}
    text_shapes = {"prompt_embeds": ("tokens", "text_in_dim")}
    prompts_vary = True
    vae_class = "AutoencoderKLFlux2"
    other_vaes = _flux2.OTHER_VAES
    batch_norm_eps = 1e-5  # hard-coded in the pipeline; config.json has the one that FLUX.2 was trained with
    adapter_targets = (
        *(f"self_attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
        *(f"mlp.{layer}" for layer in ("gate_proj", "up_proj", "linear_fc2")),
    )
    keep_precise = ("x_embedder", "text_proj", "time_embedding", "final_norm", "final_linear")
    modulation = ("adaLN_modulation",)
    bucket_multiple = 16
    native_resolution = 1024  # ErnieImagePipeline
    default_guidance = 4.0  # ErnieImagePipeline
    train_shift = 4.0  # musubi-tuner docs/ernie_image.md; diffusion-pipe has 3
    modelspec_architecture = "ERNIE-Image"
    kohya_base_version = "ernie_image"
    kohya_naming = ""  # kohya's musubi-tuner trains it, but nothing else reads its names
    kohya_module = "networks.lora_ernie_image"  # musubi-tuner
    layouts = ("comfy", "diffusers")
    # diffusers kept the original names.
    sizes_from = {"num_layers": "layers.#.self_attention.to_q.weight", "text_in_dim": "text_proj.weight[1]"}
    native_layers = naming.parse_table("""
        x_embedder, text_proj, time_embedding, adaLN_modulation, layers.#, final_norm, final_linear
    """)
    reference_config = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_layers": 36,
        "ffn_hidden_size": 12288,
        "text_in_dim": 3072,
    }
    single_file = {"has": ("layers.0.adaLN_sa_ln.weight", "layers.0.mlp.linear_fc2.weight")}
    distilled_advice = Message(
        "the name of this model, or its config.json, suggests ERNIE-Image-Turbo: plain training undoes the "
        "distillation, and images of 8 steps become soft; train on ERNIE-Image and generate with Turbo"
    )

    def is_distilled(self) -> bool:
        # Turbo's config has an unused entry that ERNIE-Image's has not; a single file has only its name.
        if self.is_distilled_by_name() is False:
            return False
        named = self.is_called("ernie.?image.?turbo")
        return named or (not self.checkpoint and "use_lora" in self.read_denoiser_config())

    def call_encode_prompt(self, pipeline: Any, prompts: list[str]) -> dict[str, Any]:
        return {"prompt_embeds": pipeline.encode_prompt(prompts, self.device)}  # it returns the embeddings only

    def make_inputs(self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        return {
            "hidden_states": noisy_BCHW,
            "timestep": (t_B * 1000).to(self.dtype),
            "text_bth": cond["prompt_embeds"],
            "text_lens": cond["prompt_embeds_mask"].sum(1),
        }
