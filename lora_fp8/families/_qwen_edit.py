"""What Qwen-Image-Edit and -Plus share: a text encoder that sees the pictures to edit, and what diffusers leaves out.

Qwen2.5-VL reads one conversation of pictures and instruction, and its answers for both are the denoiser's conditioning;
so that is another for every picture. The pipelines bring the pictures to a size of their own first, and the model's
processor to whole patches of 28 x 28 pixels.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from PIL import Image
from torch import nn
from transformers import Qwen2Tokenizer, Qwen2VLImageProcessorPil, Qwen2VLProcessor

from . import _qwen
from .base import Cond, ModelFamily

MARKER = "__index_timestep_zero__"
"""A tensor by which ComfyUI's files of 2511 tell it from 2509, with which it shares all others."""

TEMPLATE_END = 5
"""Tokens behind the prompt: the end of the user's turn and the beginning of the assistant's."""
PATCH = 28
"""Pixels that a token of a picture is wide, for the text encoder."""


class Processor(Qwen2VLProcessor):
    """transformers' own, without the part for videos, which it can make with torchvision only.

    A processor asks for the parts that its `__init__` names.
    """

    def __init__(self, image_processor: Qwen2VLImageProcessorPil, tokenizer: Qwen2Tokenizer):
        super().__init__(image_processor, tokenizer)


def tokenizer(family: ModelFamily, name: str) -> Any:
    """As `ModelFamily.tokenizer`, with the processor put together from its parts."""
    if name == "processor" and name not in family._tokenizers:
        pictures = Qwen2VLImageProcessorPil.from_pretrained(family.folder / name, local_files_only=True)
        family._tokenizers[name] = Processor(pictures, family.tokenizer("tokenizer"))
    return ModelFamily.tokenizer(family, name)


def mend_(pipeline: diffusers.DiffusionPipeline) -> None:
    """See `ModelFamily.mend_`: diffusers' issue 14194.

    Its pipelines do not hand on which tokens are a picture's, which transformers 5 wants to be told; without it, a
    picture's tokens are counted like words, and not by row and column, as the model was trained.
    """
    if pipeline.text_encoder is not None:
        pipeline.text_encoder.register_forward_pre_hook(_tell_pictures, with_kwargs=True)


def _tell_pictures(encoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if kwargs.get("image_grid_thw") is not None and kwargs.get("mm_token_type_ids") is None:
        kwargs["mm_token_type_ids"] = (kwargs["input_ids"] == encoder.config.image_token_id).int()
    return args, kwargs


def encode_prompts(
    family: ModelFamily,
    prompts: Sequence[str],
    pictures: Sequence[Sequence[Image.Image]],
    sizes: Sequence[Sequence[tuple[int, int]]],
) -> list[Cond]:
    """What the pipeline makes of each prompt and its pictures, one after the other: the tokens of the pictures (and
    their numbers) and those of the prompt, without the instructions before them.

    Args:
        sizes: (width, height) of each picture, for the text encoder.
    """
    pipeline, found = family.text_pipeline, []
    for prompt, seen, seen_sizes in zip(prompts, pictures, sizes, strict=True):
        resized = [
            pipeline.image_processor.resize(picture, height, width)
            for picture, (width, height) in zip(seen, seen_sizes, strict=True)
        ]
        with torch.no_grad():
            embeds_BLD, _ = pipeline.encode_prompt([_read(family, prompt)], image=resized, device=family.device)
        found.append({"prompt_embeds": embeds_BLD[0].to(family.dtype).clone()})
    return found


def _read(family: ModelFamily, prompt: str) -> str:
    """The pipelines read prompts of any length; here they end where `overlong` says, as memory is reckoned by that."""
    cut = family.cut_by("tokenizer", [prompt]).get(prompt)
    return prompt[: len(prompt) - len(cut.lost)] if cut else prompt


def longest_prompt(family: ModelFamily, side: int, num: int) -> int:
    """Tokens of so many pictures with the area of a square of this side, of any shape, and of the longest prompt."""
    most = (side // PATCH + 2) ** 2 + 8  # marks at both ends, and "Picture 1: "
    return num * most + family.token_limit("tokenizer") + TEMPLATE_END


def control_size(size: tuple[int, int], resolution: int | None, multiple: int) -> tuple[int, int]:
    """The pipeline's size (width, height) of a picture, brought to the area of a square of this side."""
    if resolution is None:
        return size
    scale = resolution / (size[0] * size[1]) ** 0.5
    width, height = (max(multiple, round(side * scale / multiple) * multiple) for side in size)
    return width, height


def family_of_name(family: ModelFamily) -> str:
    """Which of the two families the name of a single file says, "" where it says neither."""
    if not family.file_is_called(r"(?<![a-z])edit(?![a-z])"):
        return ""
    return "qwen_image_edit_plus" if family.file_is_called(r"plus|25(09|11)") else "qwen_image_edit"


def caveats(family: ModelFamily) -> list[str]:
    """What the name of a single file says against the family."""
    named = family_of_name(family)
    if not family.checkpoint or named == family.name:
        return []
    if named:
        return [f"{family.checkpoint.name} is another model by its name: set model.family = {named!r} if it is"]
    return [
        f"{family.checkpoint.name} does not have Edit in its name, and nothing in the file tells it from Qwen-Image: "
        "is it the model that edits pictures?"
    ]


# -- miniatures -------------------------------------------------------------------------------------------------------
_WORDS = (
    "key features input color texture objects background then explain how user text instruction should alter or modify "
    "image Generate new that meets requirements while maintaining consistency with original where appropriate Picture "
    "'s ),"
).split()


def wake_(denoiser: nn.Module) -> None:
    """See `ModelFamily.wake_`: random attention says little, and tests must see whether pictures are looked at."""
    with torch.no_grad():
        for block in denoiser.transformer_blocks:
            for layer in (block.attn.to_v, block.attn.to_out[0]):
                layer.weight.mul_(3)


def tiny_parts() -> dict[str, Any]:
    """See `ModelFamily.tiny_parts`."""
    vocab = _qwen.tokenizer(_WORDS, ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>"))
    return {
        "scheduler": _qwen.scheduler(),
        "vae": _qwen.vae(),
        "text_encoder": _qwen.qwen25_vl(vocab),
        "tokenizer": vocab,
        "processor": None,
    }


def save_tiny(family: type[ModelFamily], parts: dict[str, Any], folder: Path) -> None:
    """See `ModelFamily.save_tiny`: with a processor as released."""
    family.pipeline_type()(**parts).save_pretrained(folder, safe_serialization=True)
    for part in (Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 16384), parts["tokenizer"]):
        part.save_pretrained(folder / "processor")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index["processor"] = ["transformers", "Qwen2VLProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
