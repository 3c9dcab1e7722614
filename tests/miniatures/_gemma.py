"""Gemma 2 and its tokenizer, the text encoder of Lumina 2 and Sana, in miniature."""

from __future__ import annotations

from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer


def tokenizer(known: str) -> GemmaTokenizer:
    """Return a byte-pair tokenizer with byte fallback and <bos> in front, as Gemma's: <pad> 0, <eos> 1, <bos> 2.

    Args:
        known: a text whose words become one token each.
    """
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
