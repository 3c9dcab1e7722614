"""What Lumina 2 and Sana share: an instruction before the prompt, Gemma 2 as text encoder, and its miniatures.

Only positive prompts are preceded by the instruction. A negative prompt has none. Neither has a dropped caption, which
is encoded as the empty negative prompt that the pipelines use if none is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .base import Cond, ModelFamily

if TYPE_CHECKING:
    from PIL import Image
    from transformers import Gemma2Model, GemmaTokenizer

AVOIDED = "\0"
"""Marks, in front of a prompt, that it is a negative prompt."""


def negative_text(family: ModelFamily, prompt: str) -> str:
    """Mark a negative prompt: see `ModelFamily.negative_text`."""
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
        options = {"device": family.device, **family.encoding_options()}
        if family.max_sequence_length:
            options["max_sequence_length"] = family.max_sequence_length
        found = []
        for prompt in prompts:
            negative, text = is_negative(prompt), prompt.removeprefix(AVOIDED)
            answer = family.text_pipeline.encode_prompt(
                [text], do_classifier_free_guidance=negative, negative_prompt=[text], **options
            )
            embeds_BLD, mask_BL = answer[2:] if negative else answer[:2]
            found.append({"prompt_embeds": embeds_BLD[0, mask_BL[0].bool()].to(family.dtype)})
        return found


# -- miniatures -------------------------------------------------------------------------------------------------------
def tokenizer(known: str) -> GemmaTokenizer:
    """Return a byte-pair tokenizer with byte fallback and <bos> in front, as Gemma's: <pad> 0, <eos> 1, <bos> 2.

    Args:
        known: a text whose words become one token each.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import GemmaTokenizer

    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(33, 127)]
    merges: dict[tuple[str, str], None] = {}
    for word in dict.fromkeys(known.split()):
        whole = "▁"
        for letter in word:
            merges[whole, letter] = None
            whole += letter
    pairs: list[Any] = list(merges)  # transformers' annotation of `merges` says strings, and means pairs too
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, *map("".join, merges)]))}
    tokenizer = GemmaTokenizer(vocab=vocab, merges=pairs, padding_side="right")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    return tokenizer


def text(vocab: GemmaTokenizer, *, width: int = 32) -> Gemma2Model:
    """Return a Gemma 2 of two layers."""
    from transformers import Gemma2Config, Gemma2Model

    settings = Gemma2Config(
        vocab_size=len(vocab),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        initializer_range=0.3,  # as after training: at the default, prompts hardly differ after so few layers
        pad_token_id=vocab.pad_token_id,
        bos_token_id=vocab.bos_token_id,
        eos_token_id=vocab.eos_token_id,
    )
    return Gemma2Model(settings)
