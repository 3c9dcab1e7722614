"""HiDream-I1: a sparse DiT of 17 B parameters, conditioned on two CLIPs, T5-XXL and every layer of Llama 3.1 8B.

Cai et al. 2025, "HiDream-I1: A High-Efficient Image Generative Foundation Model with Sparse Diffusion Transformer".
Double-stream blocks are followed by single-stream ones; each block reads T5 and one layer of Llama. The
feed-forward of image tokens is a mixture of experts: a shared one, and two of four routed ones per token. The denoiser
predicts the velocity towards the image, the negative of what the scheduler expects.

For training this means:

* Adapters are on attention, the feed-forward of text tokens and the shared experts. The routed experts get none: they
  are 10 of the 17 B parameters, and each sees only some of the tokens.
* Unless the model is in training mode, diffusers computes the routed experts without gradients. In training mode the
  model returns patches, which `convert_output` puts together. `force_inference_output` in the denoiser's config would
  stop the gradient, so it is overridden.
* An image that is not square is padded to the largest number of patches, as in diffusers' pipeline, so it costs as much
  as one of 1024 x 1024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import Message, Template, UserError
from ..lora_files import naming
from . import _files
from .base import Cond, Inputs, ModelFamily

if TYPE_CHECKING:
    from torch import Tensor


class Family(ModelFamily):
    name = "hidream"
    title = "HiDream-I1"
    example_base = "models/HiDream-I1-Full"
    pipeline_class = "HiDreamImagePipeline"
    denoiser_class = "HiDreamImageTransformer2DModel"
    is_recordable = False  # it copies the picture's size to the GPU
    text_widths = {
        "caption_channels.0": "text_encoder_3.d_model",
        "caption_channels.1": "text_encoder_4.hidden_size",
        "text_emb_dim": "text_encoder.projection_dim + text_encoder_2.projection_dim",
    }
    text_millions = (8030, 525)  # Llama 3.1 8B
    text_parts = {
        "tokenizer": "CLIPTokenizer",
        "text_encoder": "CLIPTextModelWithProjection",
        "tokenizer_2": "CLIPTokenizer",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "tokenizer_3": "T5TokenizerFast",
        "text_encoder_3": "T5EncoderModel",
        "tokenizer_4": "PreTrainedTokenizerFast",
        "text_encoder_4": "LlamaForCausalLM",
    }
    judge_length_by = ("tokenizer_4",)  # the largest vocabulary, so it reads furthest; the CLIPs give one vector
    prompt_tokens = 128  # padding is attended to; HiDream-I1 hi_diffusers/pipelines: max_sequence_length
    text_answers = ("t5_embeds", "", "prompt_embeds", "", "pooled_prompt_embeds")
    text_arguments = {"prompt_embeds": "prompt_embeds_llama3", "t5_embeds": "prompt_embeds_t5"}
    text_shapes = {
        "prompt_embeds": ("num_layers + num_single_layers", "tokens", "caption_channels.1"),
        "t5_embeds": ("tokens", "caption_channels.0"),
        "pooled_prompt_embeds": ("text_emb_dim",),
    }
    towards_image = True
    adapter_targets = (
        *(f"attn1.to_{x}{stream}" for stream in ("", "_t") for x in ("q", "k", "v", "out")),
        *(f"{ff}.{layer}" for ff in ("ff_t", "shared_experts") for layer in ("w1", "w2", "w3")),
    )
    keep_precise = ("x_embedder", "t_embedder", "p_embedder", "caption_projection", "final_layer")
    modulation = ("block.adaLN_modulation",)
    further_layers = {
        "blocks": (
            "block.adaLN_modulation.1",
            *(f"experts.{expert}.{layer}" for expert in range(4) for layer in ("w1", "w2", "w3")),
        )
    }
    bucket_multiple = 16
    patch = 2
    native_resolution = 1024  # HiDreamImagePipeline: 128 latents of 8 pixels
    default_guidance = 5.0  # HiDream-I1 inference.py, of Full
    train_shift = 3.0  # diffusers train_dreambooth_lora_hidream.py, with the scheduler of Full; that of Dev has 6
    modelspec_architecture = "hidream-i1"
    kohya_base_version = "hidream_i1"
    kohya_naming = ""
    layouts = ("diffusers", "comfy")
    reference_config = {
        "num_layers": 16,
        "num_single_layers": 32,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "caption_channels": [4096, 4096],
        "axes_dims_rope": [64, 32, 32],
        "llama_layers": [*range(32), *([31] * 16)],
    }
    # diffusers kept the original names.
    native_layers = naming.parse_table("""
        x_embedder, t_embedder, p_embedder, caption_projection
        double_stream_blocks, single_stream_blocks, final_layer
    """)
    single_file = {"has": ("double_stream_blocks.0.block.attn1.to_q_t.weight", "caption_projection.0.linear.weight")}
    caveats_by_name = {
        r"(?<![a-z])e1(?![a-z0-9])": Template(
            "the name of {name} suggests HiDream-E1, an editing model, but this trainer trains HiDream without "
            "control images; for text-to-image, choose HiDream-I1-Full"
        )
    }
    distilled_advice = Message(
        "this is HiDream-I1 Dev or Fast, which is distilled to few steps without guidance; plain training gradually "
        "undoes this: train on HiDream-I1-Full and generate with Dev or Fast, or train briefly at a low learning "
        "rate"
    )

    def read_denoiser_config(self) -> dict[str, Any]:
        return ModelFamily.read_denoiser_config(self) | {"force_inference_output": False}

    def call_encode_prompt(self, pipeline: Any, prompts: list[str]) -> dict[str, Any]:
        answer = ModelFamily.call_encode_prompt(self, pipeline, prompts)
        return answer | {"prompt_embeds": answer["prompt_embeds"].transpose(0, 1)}  # the layers are its first dimension

    def make_inputs(self, denoiser: Any, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        return {
            "hidden_states": noisy_BCHW,
            "timesteps": t_B * 1000,
            "encoder_hidden_states_t5": cond["t5_embeds"],
            "encoder_hidden_states_llama3": cond["prompt_embeds"].transpose(0, 1),
            "pooled_embeds": cond["pooled_prompt_embeds"],
        }

    def convert_output(self, denoiser: Any, output: Any, noisy_BCHW: Tensor) -> Tensor:
        if not denoiser.training:
            return output
        patch, (height, width) = denoiser.config.patch_size, noisy_BCHW.shape[-2:]
        rows, columns = height // patch, width // patch  # the output is (B, C, S, patch * patch), padded at the end
        output = output[:, :, : rows * columns].unflatten(3, (patch, patch)).unflatten(2, (rows, columns))
        return output.transpose(3, 4).reshape(noisy_BCHW.shape)

    def check_bucket(self, width: int, height: int) -> None:
        config = self.read_denoiser_config()
        patch, (most_rows, most_columns) = config.get("patch_size", 2), config.get("max_resolution", (128, 128))
        most = most_rows * most_columns // patch**2
        vae = _files.read_json(self.folder / "vae" / "config.json")
        rows, columns = (side // 2 ** (len(vae["block_out_channels"]) - 1) // patch for side in (height, width))
        if rows != columns and rows * columns > most:
            raise UserError(
                Message(
                    "dataset.resolution: a bucket of {title} that is not square can have at most {most} patches, "
                    "but {size} has {patches}; lower the resolution to {native}",
                    most=most,
                    title=self.title,
                    size=f"{width} x {height}",
                    patches=f"{rows} x {columns}",
                    native=self.native_resolution,
                )
            )

    def make_pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        inputs = ModelFamily.make_pipeline_inputs(self, cond, negative)
        return {name: rows.transpose(0, 1) if name.endswith("llama3") else rows for name, rows in inputs.items()}

    def is_distilled(self) -> bool:
        if self.is_file_called(r"(?<![a-z])(full|dev|fast)(?![a-z])"):  # the components may be another variant's
            return not self.is_file_called(r"(?<![a-z])full(?![a-z])")
        return "LCM" in str(self.read_scheduler_config().get("_class_name"))
