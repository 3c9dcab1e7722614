"""What Lumina 2 and Sana share: an instruction before the prompt, and how Gemma 2 encodes prompts.

Only positive prompts are preceded by the instruction. A negative prompt has none. Neither has a dropped caption, which
is encoded as the empty negative prompt that the pipelines use if none is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .base import Cond, ModelFamily

if TYPE_CHECKING:
    from PIL import Image

AVOIDED = "\0"
"""Marks, in front of a prompt, that it is a negative prompt."""


def make_negative_text(family: ModelFamily, prompt: str) -> str:
    """Mark a negative prompt: see `ModelFamily.make_negative_text`."""
    return AVOIDED + prompt if prompt else ""


def is_negative(prompt: str) -> bool:
    """Return True if this text is encoded without the instruction."""
    return not prompt or prompt.startswith(AVOIDED)


def encode_prompts(
    family: ModelFamily, prompts: list[str], pictures: Sequence[Sequence[Image.Image]] = ()
) -> list[Cond]:
    """Encode prompts one by one, because their beginnings differ, and without padding.

    See `ModelFamily.encode_prompts`.
    """
    import torch

    with torch.no_grad():
        options = {"device": family.device, **family.get_encoding_options()}
        if family.max_sequence_length:
            options["max_sequence_length"] = family.max_sequence_length
        conds = []
        for prompt in prompts:
            negative, text = is_negative(prompt), prompt.removeprefix(AVOIDED)
            answer = family.text_pipeline.encode_prompt(
                [text], do_classifier_free_guidance=negative, negative_prompt=[text], **options
            )
            embeds_BLD, mask_BL = answer[2:] if negative else answer[:2]
            conds.append({"prompt_embeds": embeds_BLD[0, mask_BL[0].bool()].to(family.dtype)})
        return conds
