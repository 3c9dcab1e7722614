"""FLUX.2 klein: FLUX.2's transformer with 4 or 9 B parameters, conditioned on Qwen3 4B or 8B, without guidance input.

Black Forest Labs 2026 (https://github.com/black-forest-labs/flux2). The base models use classifier-free guidance with
the empty prompt. The models without "base" in their names are distilled to four steps without guidance; only
model_index.json, or the name of a single file, tells the two apart. The conditioning is the hidden states of Qwen's
layers 9, 18 and 27 for the prompt as a chat message. It is always 512 tokens long, and padding is attended to. For the
timestep distribution see `flux2.py`.
"""

from __future__ import annotations

from ..errors import Message
from . import _flux2
from .base import ModelFamily


class Family(ModelFamily):
    name = "flux2_klein"
    title = "FLUX.2 klein"
    example_base = "black-forest-labs/FLUX.2-klein-base-4B"
    pipeline_class = "Flux2KleinPipeline"
    denoiser_class = "Flux2Transformer2DModel"
    text_widths = {"joint_attention_dim": "3 * text_encoder.hidden_size"}
    text_millions = (4022, 389)  # Qwen3-4B
    text_parts = {"tokenizer": "Qwen2TokenizerFast", "text_encoder": "Qwen3ForCausalLM"}
    chat = ({"role": "user", "content": "\0"},)
    prompt_tokens = 512  # with the template's; flux2 src/flux2/text_encoder.py: MAX_LENGTH
    text_shapes = {"prompt_embeds": ("tokens", "joint_attention_dim")}
    vae_class = "AutoencoderKLFlux2"
    other_vaes = _flux2.OTHER_VAES
    adapter_targets = _flux2.ADAPTER_TARGETS
    keep_precise = _flux2.KEEP_PRECISE
    modulation = _flux2.MODULATION
    bucket_multiple = 16
    latents_as = "BSD"
    native_resolution = 1024
    default_guidance = 4.0  # Flux2KleinPipeline, of the base models
    modelspec_architecture = "Flux.2-klein-4b"  # `get_architecture_name` tells 9b
    kohya_base_version = "flux_2_klein"
    kohya_naming = "native"
    kohya_module = "networks.lora_flux_2"  # musubi-tuner
    layouts = ("comfy", "diffusers", "kohya")
    lokr_of_diffusers = True
    native_layers = _flux2.LAYERS
    swapped_halves = (_flux2.LAST_NORM,)
    no_adapter = (_flux2.LAST_NORM,)  # a LoRA on it would differ between the original naming and diffusers'
    config_marks = {"guidance_embeds": False}
    reference_config = {
        "num_layers": 5,
        "num_single_layers": 20,
        "num_attention_heads": 24,
        "joint_attention_dim": 7680,
        "guidance_embeds": False,
    }
    sizes_from = _flux2.SIZES
    single_file = {
        "has": ("double_stream_modulation_img.lin.weight", "single_blocks.0.linear1.weight"),
        "lacks": ("guidance_in.",),  # dev's guidance input
        "in_is_out": ("img_in.weight", "final_layer.linear.weight"),
    }
    distilled_mark = ("index", "is_distilled", True)
    distilled_name = r"flux[-_. ]?2[-_. ]?klein[-_. ]?\d+b"  # the makers' name for the distilled model
    distilled_advice = Message(
        "the file's name, or is_distilled in model_index.json, suggests a distilled FLUX.2 klein: plain training "
        "undoes the distillation, and images of 4 steps become soft; train on FLUX.2-klein-base of the same size "
        "and generate with this model"
    )

    make_inputs = _flux2.make_inputs

    def get_architecture_name(self) -> str:
        """Return the architecture's ModelSpec name, which includes the size."""
        return f"Flux.2-klein-{'9b' if self.read_denoiser_config()['num_attention_heads'] > 24 else '4b'}"
