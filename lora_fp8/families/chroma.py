"""Chroma1: an 8.9 B model made from FLUX.1-schnell and retrained, conditioned on T5-XXL alone.

Lodestone Rock 2025 (https://huggingface.co/lodestones/Chroma1-HD). FLUX's modulation layers are gone: one small
network, `distilled_guidance_layer`, computes all scales and shifts from the timestep. Guidance uses a negative prompt.
The transformer sees a prompt's tokens and one padding token after them.

diffusers 0.42 passes its mask as numbers, which attention adds to the logits instead of masking (its issue 13619), and
drops it in the single-stream blocks under gradient checkpointing. Here prompts come without padding, and the mask for a
batch of different lengths is boolean everywhere, as in the model's own code and in ComfyUI.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import Message
from ..lora_files import naming
from . import _files, _flux, _published
from .base import Cond, Inputs, ModelFamily

if TYPE_CHECKING:
    from torch import Tensor, nn


class Family(ModelFamily):
    name = "chroma"
    title = "Chroma1"
    example_base = "lodestones/Chroma1-HD"
    pipeline_class = "ChromaPipeline"
    denoiser_class = "ChromaTransformer2DModel"
    is_recordable = False  # its timestep embedding makes a tensor on the CPU
    text_widths = {"joint_attention_dim": "text_encoder.d_model"}
    text_millions = (4762, 132)  # T5-XXL
    text_parts = {"tokenizer": "T5TokenizerFast", "text_encoder": "T5EncoderModel"}
    prompt_tokens = 512  # ChromaPipeline
    text_answers = ("prompt_embeds", "", "mask")
    text_arguments = {"mask": "prompt_attention_mask"}
    text_shapes = {"prompt_embeds": ("tokens", "joint_attention_dim")}
    prompts_vary = True
    adapter_targets = _flux.ADAPTER_TARGETS
    adapter_exclude = (_flux.LAST_LAYER,)
    # The embedders, the output, and the network that computes the scales and shifts of all blocks.
    keep_precise = ("x_embedder", "context_embedder", "distilled_guidance_layer", "^proj_out")
    bucket_multiple = 16
    patch = 2
    latents_as = "BSD"
    native_resolution = 1024  # model card of Chroma1-HD
    default_guidance = 3.0  # model card and diffusers docs/source/en/api/pipelines/chroma.md
    train_shift = 1.0  # sd-scripts docs/flux_train_network.md recommends sigmoid for Chroma; ai-toolkit
    modelspec_architecture = "chroma"
    kohya_base_version = "chroma"
    kohya_naming = "bfl_flux"
    kohya_module = "networks.lora_flux"  # sd-scripts
    layouts = ("diffusers", "comfy", "kohya")
    layouts_of_diffusers = ("diffusers", "kohya")
    converter_width = 3072
    auto_layouts = ("diffusers", "kohya")  # Forge reads kohya's
    reference_config = {"in_channels": 64, "num_layers": 19, "num_single_layers": 38}
    sizes_from = _flux.SIZES
    file_names = _published.FLUX_FILES
    native_layers = _flux.LAYERS + naming.parse_table("""
        distilled_guidance_layer
            layers.#.in_layer = layers.#.linear_1
            layers.#.out_layer = layers.#.linear_2
            norms.#.scale = norms.#.weight
            in_proj, out_proj
    """)
    # Radiance works on pixels, and has no final layer of this form.
    single_file = {
        "has": ("distilled_guidance_layer.in_proj.weight",),
        "in_is_out": ("img_in.weight", "final_layer.linear.weight"),
    }
    distilled_name = r"chroma[^/]*flash(?![a-z])"  # its files have the same tensors as the others'
    distilled_advice = Message(
        "the name of this model suggests Chroma1-Flash, which generates in few steps without guidance; plain "
        "training undoes this: train on Chroma1-HD and generate with Flash"
    )

    def make_inputs(self, denoiser: nn.Module, noisy_BCHW: Tensor, t_B: Tensor, cond: Cond, guidance: float) -> Inputs:
        from torch import nn

        text_BL, mask_BS = cond["prompt_embeds_mask"], None
        if not text_BL.all():
            mask_BS = nn.functional.pad(text_BL, (0, self.count_image_tokens(tuple(noisy_BCHW.shape[2:]))), value=True)
        return {
            "hidden_states": self.pack(noisy_BCHW),
            "timestep": t_B,  # sigma in [0, 1]: the transformer multiplies by 1000 itself
            "encoder_hidden_states": cond["prompt_embeds"],
            **_flux.make_positions(noisy_BCHW, cond["prompt_embeds"]),
            "attention_mask": mask_BS,
        }

    def predict_prepared(self, denoiser: nn.Module, inputs: Inputs, noisy_BCHW: Tensor) -> Tensor:
        with _keep_mask(denoiser, inputs["attention_mask"]):
            return ModelFamily.predict_prepared(self, denoiser, inputs, noisy_BCHW)

    @classmethod
    def mend_(cls, pipeline: Any) -> None:
        extended = pipeline._prepare_attention_mask
        # A mask of 0 and 1 as numbers is added to the attention's logits and masks nothing.
        pipeline._prepare_attention_mask = lambda **given: _as_bool(extended(**given))

    def make_empty_denoiser(self) -> nn.Module:
        import diffusers
        import torch

        path, config = self.folder / self.denoiser_name / "config.json", self.read_denoiser_config()
        with torch.device("meta"):
            denoiser = _files.build_from_config(getattr(diffusers, self.denoiser_class), path, config)
        # The constructor computes this table, and no file stores it.
        lost = denoiser.time_text_embed
        denoiser.time_text_embed = type(lost)(lost.time_proj.num_channels, len(lost.mod_proj))
        return denoiser


def _as_bool(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask.bool()


@contextmanager
def _keep_mask(denoiser: Any, mask_BS: Tensor | None) -> Iterator[None]:
    """Pass the mask to checkpointed single-stream blocks inside this context, where diffusers drops it."""
    checkpointed: Callable[..., Any] | None = getattr(denoiser, "_gradient_checkpointing_func", None)
    if mask_BS is None or checkpointed is None:
        yield
        return
    singles = set(denoiser.single_transformer_blocks)

    def with_mask(block: nn.Module, *args: Any) -> Any:
        # diffusers passes hidden states, modulation and rotary embedding; the mask is the fourth argument
        return checkpointed(block, *args, *([mask_BS] if block in singles and len(args) == 3 else []))

    denoiser._gradient_checkpointing_func = with_mask
    try:
        yield
    finally:
        denoiser._gradient_checkpointing_func = checkpointed
