"""FLUX.2-dev: a 32 B double- and single-stream DiT, conditioned on Mistral Small 3.2, trained with rectified flow.

Black Forest Labs 2025 (https://github.com/black-forest-labs/flux2). Guidance-distilled as FLUX.1-dev: the guidance
scale is an input, and one pass replaces the two of classifier-free guidance. The conditioning is the hidden states of
Mistral's layers 10, 20 and 30 for the prompt in a chat with a system message. It is always 512 tokens long, and padding
is attended to.

The timestep is drawn with the shift of the scheduler's config, FLUX.1's line from 256 to 4096 tokens, as in
musubi-tuner. In the limit of many steps the pipeline samples with that line too; with few steps it shifts further
towards noise (mu 2.02 instead of 1.15 at 1024 x 1024 and 50 steps) to make up for their length. Training has no steps
to make up for.
"""

from __future__ import annotations

from . import _flux2
from .base import ModelFamily


class Family(ModelFamily):
    name = "flux2"
    title = "FLUX.2-dev"
    example_base = "black-forest-labs/FLUX.2-dev"
    pipeline_class = "Flux2Pipeline"
    denoiser_class = "Flux2Transformer2DModel"
    # The released folder names PixtralProcessor, which also takes images and so needs torchvision. Its tokenizer has
    # the same chat template, and the pipeline passes it nothing but text here.
    text_widths = {"joint_attention_dim": "3 * text_encoder.hidden_size"}
    text_millions = (24011, 671)  # Mistral Small 3.1 24B
    text_parts = {"tokenizer": "AutoTokenizer", "text_encoder": "Mistral3ForConditionalGeneration"}
    prompt_tokens = 512  # with the template's; flux2 src/flux2/text_encoder.py: MAX_LENGTH
    text_shapes = {"prompt_embeds": ("tokens", "joint_attention_dim")}
    vae_class = "AutoencoderKLFlux2"
    other_vaes = _flux2.OTHER_VAES
    adapter_targets = _flux2.ADAPTER_TARGETS
    keep_precise = _flux2.KEEP_PRECISE
    modulation = _flux2.MODULATION
    bucket_multiple = 16
    latents_as = "BSD"
    native_resolution = 1024  # Flux2Pipeline: 128 latents of 8 pixels
    default_guidance = 4.0  # model card
    uses_negative = False
    embeds_guidance = True
    modelspec_architecture = "Flux.2-dev"
    kohya_base_version = "flux_2_dev"
    kohya_naming = "native"
    kohya_module = "networks.lora_flux_2"  # musubi-tuner
    layouts = ("comfy", "diffusers", "kohya")
    lokr_of_diffusers = True
    native_layers = _flux2.LAYERS
    swapped_halves = (_flux2.LAST_NORM,)
    no_adapter = (_flux2.LAST_NORM,)  # a LoRA on it would differ between the original naming and diffusers'
    reference_config = {
        "num_layers": 8,
        "num_single_layers": 48,
        "num_attention_heads": 48,
        "joint_attention_dim": 15360,
    }
    sizes_from = _flux2.SIZES
    single_file = {
        "has": (
            "double_stream_modulation_img.lin.weight",
            "single_blocks.0.linear1.weight",
            "guidance_in.in_layer.weight",
        ),
        "in_is_out": ("img_in.weight", "final_layer.linear.weight"),
    }

    make_inputs = _flux2.make_inputs

    def as_read(self, prompt: str) -> tuple[str, str]:
        from diffusers.pipelines.flux2.pipeline_flux2 import format_input

        # The end is cut off first, and the template's text after the prompt is at the end. <s> is a special token.
        tokenizer = self.load_tokenizer("tokenizer")
        (text,) = tokenizer.apply_chat_template(format_input(["\0"]), tokenize=False)
        before, _, _ = text.partition("\0")
        return before.removeprefix(tokenizer.bos_token), prompt.replace("[IMG]", "")  # as the pipeline does
