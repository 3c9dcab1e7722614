"""What Qwen-Image-Edit and -Plus share: a text encoder that sees the images to edit, and fixes for diffusers.

Qwen2.5-VL reads the images and the instruction as one conversation, and its outputs for both are the denoiser's
conditioning; so the conditioning differs from image to image. The pipelines first resize the images to sizes of their
own, and the model's processor then resizes them to whole patches of 28 x 28 pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image

from ..errors import Message
from .base import Cond, ModelFamily

MARKER = "__index_timestep_zero__"
"""A tensor by which ComfyUI tells files of release 2511 from 2509; all other tensors have the same names."""

TEMPLATE_END = 5
"""Tokens after the prompt: the end of the user's turn and the beginning of the assistant's."""
PATCH = 28
"""Side in pixels of the patch that is one image token of the text encoder."""


def load_tokenizer(family: ModelFamily, name: str) -> Any:
    """Return a tokenizer as `ModelFamily.load_tokenizer` does; the processor is put together from its parts."""
    if name == "processor" and name not in family._tokenizers:
        from transformers import Qwen2VLImageProcessorPil

        from ._qwen_processor import Processor

        pictures = Qwen2VLImageProcessorPil.from_pretrained(family.folder / name, local_files_only=True)
        family._tokenizers[name] = Processor(pictures, family.load_tokenizer("tokenizer"))
    return ModelFamily.load_tokenizer(family, name)


def fix_pipeline_(pipeline: Any) -> None:
    """Work around diffusers' issue 14194; see `ModelFamily.mend_`.

    Its pipelines do not pass on which tokens belong to an image, which transformers 5 needs. Without it, image tokens
    get the position ids of text instead of rows and columns, unlike in training.
    """
    if pipeline.text_encoder is not None:
        pipeline.text_encoder.register_forward_pre_hook(_mark_image_tokens, with_kwargs=True)


def _mark_image_tokens(encoder: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if kwargs.get("image_grid_thw") is not None and kwargs.get("mm_token_type_ids") is None:
        kwargs["mm_token_type_ids"] = (kwargs["input_ids"] == encoder.config.image_token_id).int()
    return args, kwargs


def encode_prompts(
    family: ModelFamily,
    prompts: Sequence[str],
    pictures: Sequence[Sequence[Image.Image]],
    sizes: Sequence[Sequence[tuple[int, int]]],
) -> list[Cond]:
    """Encode each prompt with its images, one after the other, as the pipeline does.

    Args:
        family: the family whose text pipeline is loaded.
        prompts: the instructions.
        pictures: the control images of each prompt.
        sizes: (width, height) in pixels of each image for the text encoder.

    Returns:
        For each prompt the embeddings of its images (with their labels) and its text, without the system message.
    """
    import torch

    pipeline, conds = family.text_pipeline, []
    for prompt, seen, seen_sizes in zip(prompts, pictures, sizes, strict=True):
        resized = [
            pipeline.image_processor.resize(picture, height, width)
            for picture, (width, height) in zip(seen, seen_sizes, strict=True)
        ]
        with torch.no_grad():
            embeds_BLD, _ = pipeline.encode_prompt([_read(family, prompt)], image=resized, device=family.device)
        conds.append({"prompt_embeds": embeds_BLD[0].to(family.dtype).clone()})
    return conds


def _read(family: ModelFamily, prompt: str) -> str:
    """Cut a prompt where `find_overlong` says, as memory estimates rely on it; the pipelines read any length."""
    cut = family.find_cuts("tokenizer", [prompt]).get(prompt)
    return prompt[: len(prompt) - len(cut.lost)] if cut else prompt


def compute_longest_prompt(family: ModelFamily, side: int, num: int) -> int:
    """Return the most tokens of `num` images with the area of a `side` x `side` square and of the longest prompt."""
    most = (side // PATCH + 2) ** 2 + 8  # + 8: the markers at both ends, and "Picture 1: "
    return num * most + family.compute_token_limit("tokenizer") + TEMPLATE_END


def compute_control_size(size: tuple[int, int], resolution: int | None, multiple: int) -> tuple[int, int]:
    """Return the pipeline's size (width, height), scaled to the area of a square with side `resolution`."""
    if resolution is None:
        return size
    scale = resolution / (size[0] * size[1]) ** 0.5
    width, height = (max(multiple, round(side * scale / multiple) * multiple) for side in size)
    return width, height


def find_family_by_name(family: ModelFamily) -> str:
    """Return the family that a single file's name indicates: one of the two, or ""."""
    if not family.is_file_called(r"(?<![a-z])edit(?![a-z])"):
        return ""
    return "qwen_image_edit_plus" if family.is_file_called(r"plus|25(09|11)") else "qwen_image_edit"


def list_caveats(family: ModelFamily) -> list[str]:
    """Return warnings where a single file's name contradicts the family."""
    named = find_family_by_name(family)
    if not family.checkpoint or named == family.name:
        return []
    if named:
        return [
            Message(
                "the name of {name} suggests another model; if it is that model, set model.family = {family}",
                name=family.checkpoint.name,
                family=repr(named),
            )
        ]
    return [family.warn_of_missing_word("Edit", "Qwen-Image")]
