"""Mistral's text encoder and tokenizer, as in FLUX.2-dev and ERNIE-Image, in miniature."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import Mistral3Config, PreTrainedTokenizerFast

# Includes the words of FLUX.2's system message, which would otherwise use up most of the miniature's token limit.
_INNER = (
    "a photo of cat dog red blue the are an AI that reasons about image descriptions You give structured responses "
    "focusing on object relationships and actions without speculation"
).split()
_MARKS = ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ message.content[0].text }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{{ message.content[0].text }}[/INST]{% endif %}{% endfor %}"
)


def tokenizer(num_tokens: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with a few merges, Mistral's chat markers, and <s> before every text."""
    pieces = sorted(ByteLevel.alphabet())
    merges: list[tuple[str, str]] = []
    for word in (f"Ġ{word}" for word in _INNER):
        for end in range(2, len(word) + 1):
            if word[:end] not in pieces:
                merges.append((word[: end - 1], word[end - 1]))
                pieces.append(word[:end])
    backend = Tokenizer(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens(["<s>"])
    first = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[first])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=_MARKS,
        model_max_length=num_tokens,
        chat_template=_CHAT,
    )


def mistral3(vocab: PreTrainedTokenizerFast, *, num_layers: int, width: int = 16) -> Mistral3Config:
    """Return the config of a Mistral 3: a language model, and a vision tower that nothing here uses."""
    text = {
        "model_type": "mistral",
        "vocab_size": len(vocab),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,  # with transformers' 0.02 and so few features, prompts would hardly differ
    }
    eye: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    eye |= {"model_type": "pixtral", "head_dim": 16, "image_size": 32, "patch_size": 16}
    picture = vocab.convert_tokens_to_ids("[IMG]")
    assert isinstance(picture, int)
    return Mistral3Config(text_config=text, vision_config=eye, image_token_index=picture)
