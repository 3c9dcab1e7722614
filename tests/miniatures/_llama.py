"""Llama 3 and its tokenizer, and the tokenizer of Llama 2, in miniature."""

from __future__ import annotations

import string
from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizerFast, PreTrainedTokenizerFast

TOKENS = 64
"""Token limit of the miniature, lower than the real one for speed; families take the tokenizer's limit."""


def tokenizer(known: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer as Llama 3's, with <|begin_of_text|> in front.

    Args:
        known: words that become one token each after a space; of other words only the first letter joins the space.
    """
    letters, space = sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġ"
    merges = {(space, letter): None for letter in letters}
    for word in known:
        for end in range(1, len(word)):
            merges[space + word[:end], word[end]] = None
    pieces = [*letters, *map("".join, merges), "<|begin_of_text|>", "<|end_of_text|>"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", vocab["<|begin_of_text|>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
        pad_token="<|end_of_text|>",
        model_max_length=TOKENS,
        padding_side="right",
    )


def text(vocab: PreTrainedTokenizerFast, *, width: int = 32, layers: int = 2) -> LlamaForCausalLM:
    """Return a Llama 3 of a few layers."""
    settings = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.15,  # as after training: at the default, prompts hardly differ after so few layers
        bos_token_id=vocab.bos_token_id,
        eos_token_id=vocab.eos_token_id,
    )
    return LlamaForCausalLM(settings)


def llama2_tokenizer(num_tokens: int) -> LlamaTokenizerFast:
    """Return a BPE tokenizer with byte fallback, as Llama 2's and Pile-T5's."""
    pieces = ["<pad>", "</s>", "<unk>", "<s>", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += string.ascii_letters + string.digits + string.punctuation
    merges: list[tuple[str, str]] = []
    for word in ("▁a", "▁photo", "▁of", "▁cat", "▁dog", "▁red", "▁blue", "▁the"):
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                merges.append((word[: end - 1], word[end - 1]))
                pieces.append(word[:end])
    marks = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    vocab = {piece: i for i, piece in enumerate(pieces)}
    return LlamaTokenizerFast(vocab=vocab, merges=merges, model_max_length=num_tokens, **marks)
