"""What Lumina 2 and Sana share: prompts with an instruction before them, read by Gemma 2; and its miniatures.

The instruction precedes prompts that are followed. A negative prompt has none, and neither has a dropped caption, which
is what the pipelines guide away from where nobody gives a negative prompt.
"""

from __future__ import annotations

import torch
from tokenizers.processors import TemplateProcessing
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from .base import Cond, ModelFamily

AVOIDED = "\0"
"""In front of a prompt that is to be guided away from."""


def negative_text(family: ModelFamily, prompt: str) -> str:
    """See `ModelFamily.negative_text`."""
    return AVOIDED + prompt if prompt else ""


def is_negative(prompt: str) -> bool:
    """Whether this text is encoded without the instruction."""
    return not prompt or prompt.startswith(AVOIDED)


@torch.no_grad()
def encode_prompts(family: ModelFamily, prompts: list[str]) -> list[Cond]:
    """See `ModelFamily.encode_prompts`: one by one, as their beginnings differ; without padding."""
    options = {"device": family.device, **family.text_options}
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
    """Byte-pair encoding with bytes for what is not in the vocabulary, as in Gemma: <pad> 0, <eos> 1, <bos> 2 in front.

    Args:
        known: a text whose words are one token each.
    """
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(33, 127)]
    merges: dict[tuple[str, str], None] = {}
    for word in dict.fromkeys(known.split()):
        whole = "▁"
        for letter in word:
            merges[whole, letter] = None
            whole += letter
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, *map("".join, merges)]))}
    tokenizer = GemmaTokenizer(vocab=vocab, merges=list(merges), padding_side="right")
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    return tokenizer


def text(vocab: GemmaTokenizer, *, width: int = 32) -> Gemma2Model:
    """A two-layer Gemma 2."""
    settings = Gemma2Config(
        vocab_size=len(vocab),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        query_pre_attn_scalar=16,
        initializer_range=0.3,  # as large as after training: at the default, words hardly tell in so few layers
        pad_token_id=vocab.pad_token_id,
        bos_token_id=vocab.bos_token_id,
        eos_token_id=vocab.eos_token_id,
    )
    return Gemma2Model(settings)
