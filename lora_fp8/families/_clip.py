"""CLIP text encoders as trainers of anime models use them: captions in several chunks, and an earlier hidden layer.

`model.caption_tokens`: CLIP reads 75 tokens between the first (BOS) and the last (EOS). A longer caption is cut into
chunks of 75 tokens; each is encoded by itself, as a whole prompt: BOS, its tokens, EOS, and the tokenizer's padding.
A caption always has as many chunks as the setting says, the last of which may be empty, so that all conditionings of a
job have one length. The rule follows sd-scripts (`max_token_length`; library/strategy_sd.py, strategy_sdxl.py), with
which Illustrious, NoobAI and most anime LoRAs were trained:

* Of the chunks' states, the first BOS, the 75 states of each chunk, and the state at the end of the last chunk are
  kept: 152 states for 150 tokens, 227 for 225. A1111 and ComfyUI keep BOS and EOS of every chunk (154, 231), and
  diffusers' lpw_stable_diffusion does either (`no_boseos_middle`). A LoRA is trained here on what its base model was
  trained on.
* SDXL's pooled embedding is that of the first chunk, in all of them.
* Chunks are cut after 75 tokens wherever that is, as in sd-scripts; A1111 prefers the last comma before it.
* Weights in prompts (`_prompt_weights`) multiply the states that are kept.
* A chunk of 75 tokens always ends with EOS. sd-scripts leaves the padding there if the 75th token is "!", which is the
  padding token of SDXL's second tokenizer.

`model.clip_skip` counts as sd-scripts and A1111 do: 1 is the last layer, 2 the one before, and the encoder's final
layer norm follows. diffusers counts the layers that are left out (its `clip_skip` 1 is our 2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ._prompt_weights import parse_weights

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_TOKENS = 75
"""Tokens of a chunk without BOS and EOS; tokenizers with another limit have chunks of another size."""
MOST_CHUNKS = 3


class ChunkTokenizer:
    """Takes the place of a CLIP tokenizer in a pipeline that is given each prompt `num_chunks` times in a row."""

    def __init__(self, tokenizer: Any, num_chunks: int, weighted: bool) -> None:
        self.tokenizer, self.num_chunks, self.weighted = tokenizer, num_chunks, weighted

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, prompts: Sequence[str], **options: Any) -> Any:
        """Return the token ids of chunk i % num_chunks of each prompt i; the options are those of all pipelines."""
        import torch
        from transformers import BatchEncoding

        rows = [
            row
            for prompt in prompts[:: self.num_chunks]
            for row in split(self.tokenizer, tokenize(self.tokenizer, prompt, self.weighted)[0], self.num_chunks)
        ]
        ids, masks = zip(*rows, strict=True)
        return BatchEncoding({"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(masks)})


def tokenize(tokenizer: Any, prompt: str, weighted: bool) -> tuple[list[int], list[float]]:
    """Return the token ids of a prompt, without BOS and EOS, and the weight of each."""
    ids: list[int] = []
    weights: list[float] = []
    for text, weight in parse_weights(prompt) if weighted else [(prompt, 1.0)]:
        own = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids += own
        weights += [weight] * len(own)
    return ids, weights


def make_weights(tokenizer: Any, prompts: Sequence[str], num_chunks: int) -> Tensor:
    """Return the weight of each state that `join` keeps (B, num_chunks * (L - 2) + 2)."""
    import torch

    size = num_chunks * (tokenizer.model_max_length - tokenizer.num_special_tokens_to_add())
    rows = []
    for prompt in prompts:
        weights = tokenize(tokenizer, prompt, weighted=True)[1][:size]
        rows.append([1.0, *weights, *[1.0] * (size + 1 - len(weights))])
    return torch.tensor(rows)


def split(tokenizer: Any, tokens: Sequence[int], num_chunks: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (token ids, attention mask) of each chunk of a prompt's tokens, all of the tokenizer's length."""
    length = tokenizer.model_max_length
    size = length - tokenizer.num_special_tokens_to_add()
    for number in range(num_chunks):
        chunk = tokens[number * size : (number + 1) * size]
        ids = [tokenizer.bos_token_id, *chunk, tokenizer.eos_token_id]
        missing = length - len(ids)
        yield ids + [tokenizer.pad_token_id] * missing, [1] * len(ids) + [0] * missing


def join(answer: Tensor, num_chunks: int) -> Tensor:
    """Join what an encoder returns for all chunks of the prompts, in order.

    Args:
        answer: (B * num_chunks, L, D) states, or (B * num_chunks, D) pooled embeddings.
        num_chunks: chunks of a prompt.

    Returns:
        (B, num_chunks * (L - 2) + 2, D), or (B, D).
    """
    import torch

    if answer.ndim == 2:
        return answer[::num_chunks]
    chunks_BNLD = answer.unflatten(0, (-1, num_chunks))
    inner_BLD = chunks_BNLD[:, :, 1:-1].flatten(1, 2)
    return torch.cat([chunks_BNLD[:, 0, :1], inner_BLD, chunks_BNLD[:, -1, -1:]], dim=1)


@contextmanager
def chunked(pipeline: Any, tokenizers: Sequence[str], num_chunks: int, weighted: bool) -> Iterator[None]:
    """Let a pipeline's tokenizers return chunks inside this context; see `ChunkTokenizer`."""
    parts = vars(pipeline)  # a pipeline's own __setattr__ would note the class in its config
    before = {name: parts[name] for name in tokenizers}
    try:
        parts.update({name: ChunkTokenizer(tokenizer, num_chunks, weighted) for name, tokenizer in before.items()})
        yield
    finally:
        parts.update(before)


@contextmanager
def with_text_model(encoder: Any) -> Iterator[None]:
    """Give a CLIPTextModel the attribute `text_model` inside this context.

    Some versions of transformers 5 have no such level any more, and diffusers 0.42 takes the final layer norm from it.
    """
    missing = not hasattr(encoder, "text_model")
    try:
        if missing:
            vars(encoder)["text_model"] = encoder  # not a submodule, which would be one of itself
        yield
    finally:
        if missing:
            del vars(encoder)["text_model"]
