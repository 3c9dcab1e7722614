"""Prompts in `ModelFamily`: encoding them, finding those that are too long, and passing them to the pipeline.

The results of the pipeline's own `encode_prompt` are cached, one unbatched Cond per prompt. `collate` makes a batch of
several, and `make_pipeline_inputs` the arguments of the pipeline's call.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _clip
from ._encoders import Encoders
from ._prompt_weights import remove_weights

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

Cond = dict[str, "Tensor"]
"""Conditioning by name: of one image (no batch dimension), or of a batch after `collate`."""


@dataclass(frozen=True)
class Overlong:
    """A prompt whose end its text encoder does not read.

    Attributes:
        prompt: the whole prompt.
        lost: the end that is not read.
        num_lost: number of tokens in `lost`.
        limit: number of tokens that are read, without the special tokens at the beginning and end.
        caption_tokens: the `model.caption_tokens` that reads more of it; 0 if there is none.
    """

    prompt: str
    lost: str
    num_lost: int
    limit: int
    caption_tokens: int = 0


class Prompts(Encoders):
    """Defaults for a family whose pipeline has `encode_prompt` and takes its results as arguments."""

    # -- token limits ----------------------------------------------------------------------------------------------
    @property
    def max_sequence_length(self) -> int | None:
        """Return the trained length, or less if a tokenizer reads less; None if the pipeline has no such argument."""
        limits = (self.load_tokenizer(name).model_max_length for name in self.judge_length_by)
        length = self.get_trained_length()
        return min(length, *limits) if length else None

    def get_trained_length(self) -> int:
        """Return the `prompt_tokens` of the given model."""
        return self.prompt_tokens

    def get_encoding_options(self) -> dict[str, Any]:
        """Return the `text_options` of the given model."""
        return self.text_options

    def compute_token_limit(self, name: str) -> int:
        """Return how many tokens of a prompt this tokenizer's encoder reads, with its special tokens."""
        limit = self.max_sequence_length or self.load_tokenizer(name).model_max_length
        limit += (self.num_chunks - 1) * (limit - 2)  # BOS and EOS are counted once
        return limit - self.count_tokens(self.split_chat_template()[1]) if self.end_counts else limit

    def as_read(self, prompt: str) -> tuple[str, str]:
        """Return the text that the pipeline puts before a prompt, and the prompt as the tokenizers read it."""
        read = remove_weights(prompt) if self.prompt_weights else prompt
        return self.split_chat_template()[0] if self.chat else "", read

    def split_chat_template(self) -> tuple[str, str]:
        """Return the text that the template of `chat` puts before a prompt, and the text after it."""
        messages, (name, *_) = list(self.chat), self.judge_length_by
        text = self.load_tokenizer(name).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        before, _, behind = text.partition("\0")
        return before, behind

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text, without special tokens at the beginning and end."""
        return len(self.load_tokenizer(self.judge_length_by[0])(text, add_special_tokens=False)["input_ids"])

    def find_overlong(self, prompts: Sequence[str]) -> list[Overlong]:
        """Return the prompts whose ends `encode_prompts` cuts off. Loads the tokenizers and nothing else."""
        longest_cuts: dict[str, Overlong] = {}
        for name in self.judge_length_by:
            for prompt, cut in self.find_cuts(name, prompts).items():
                if prompt not in longest_cuts or cut.num_lost > longest_cuts[prompt].num_lost:
                    longest_cuts[prompt] = cut
        return list(longest_cuts.values())

    def find_cuts(self, name: str, prompts: Sequence[str]) -> dict[str, Overlong]:
        """Return the prompts whose ends the encoder of this tokenizer does not read."""
        if not prompts:
            return {}
        tokenizer = self.load_tokenizer(name)
        limit = self.compute_token_limit(name) - tokenizer.num_special_tokens_to_add()
        read = [self.as_read(prompt) for prompt in prompts]
        texts = [before + text for before, text in read]
        tokens = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        cuts: dict[str, Overlong] = {}
        for prompt, (before, _), text, spans in zip(prompts, read, texts, tokens["offset_mapping"], strict=True):
            if len(spans) > limit:
                own = limit - sum(end <= len(before) for _, end in spans)
                lost = text[max(len(before), spans[limit][0]) :]
                setting = self._choose_caption_tokens(len(spans), limit)
                cuts[prompt] = Overlong(text.removeprefix(before), lost, len(spans) - limit, own, setting)
        return cuts

    def _choose_caption_tokens(self, num_tokens: int, limit: int) -> int:
        """Return the `model.caption_tokens` that reads so many tokens, or most of them; 0 if no other reads more."""
        chunks = min(math.ceil(num_tokens / (limit // self.num_chunks)), _clip.MOST_CHUNKS)
        return chunks * _clip.CHUNK_TOKENS if self.long_captions and chunks > self.num_chunks else 0

    @property
    def longest_prompt(self) -> int:
        """Return the most tokens that a prompt has in the conditioning."""
        return self.max_sequence_length or min(map(self.compute_token_limit, self.judge_length_by))

    def estimate_longest_cond(self, denoiser_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the longest prompt's conditioning, to estimate memory before anything is encoded."""
        entries = {**denoiser_config, "tokens": self.longest_prompt}
        return {
            name: tuple(_evaluate_side(side, entries) for side in shape) for name, shape in self.text_shapes.items()
        }

    # -- encoding --------------------------------------------------------------------------------------------------
    def encode_prompts(self, prompts: list[str], pictures: Sequence[Sequence[Image.Image]] = ()) -> list[Cond]:
        """Encode prompts with the pipeline's own `encode_prompt`.

        Returns one unbatched Cond per prompt, in the model's dtype.

        Args:
            prompts: the prompts.
            pictures: each prompt's control images, RGB, not resized; empty unless `prompts_see_controls`.
        """
        import torch

        with torch.no_grad():
            answers = self.call_encode_prompt(self.text_pipeline, prompts)
            masks = answers.pop("mask", None)
            conds = []
            for i in range(len(prompts)):
                rows_of_prompt = {name: rows[i] for name, rows in answers.items()}
                if masks is not None:
                    rows_of_prompt["prompt_embeds"] = rows_of_prompt["prompt_embeds"][masks[i].bool()]
                conds.append({name: tensor.to(self.dtype, copy=True) for name, tensor in rows_of_prompt.items()})
            return conds

    def call_encode_prompt(self, pipeline: Any, prompts: list[str]) -> dict[str, Any]:
        """Return the results of the pipeline's `encode_prompt` for these prompts, by the names in `text_answers`."""
        usual = {"device": self.device, "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
        usual["max_sequence_length"] = self.max_sequence_length
        known = inspect.signature(pipeline.encode_prompt).parameters
        options = {name: value for name, value in usual.items() if name in known} | self.get_encoding_options()
        with ExitStack() as stack:
            if self.clip_skip > 1:
                options["clip_skip"] = self.clip_skip - 1
                stack.enter_context(_clip.with_text_model(pipeline.text_encoder))
            asked = list(prompts)  # a copy, as some pipelines write into the list
            if self.num_chunks > 1 or self.prompt_weights:
                tokenizers = [name for name in self.text_parts if self._is_tokenizer(name)]
                stack.enter_context(_clip.chunked(pipeline, tokenizers, self.num_chunks, self.prompt_weights))
                asked = [prompt for prompt in prompts for _ in range(self.num_chunks)]
            answers = pipeline.encode_prompt(asked, **options)
        named = {name: answer for name, answer in zip(self.text_answers, answers, strict=False) if name}
        if self.num_chunks > 1:
            named = {name: _clip.join(answer, self.num_chunks) for name, answer in named.items()}
        if self.prompt_weights:
            # SDXL's two tokenizers have the same tokens.
            weights_BL = _clip.make_weights(self.load_tokenizer(self.judge_length_by[0]), prompts, self.num_chunks)
            states_BLD = named["prompt_embeds"]
            named["prompt_embeds"] = states_BLD * weights_BL.to(states_BLD)[..., None]
        return named

    def encode_with(self, pipeline: Any, prompts: list[str], cond: Cond) -> Cond:
        """Replace in a batch's conditioning what `pipeline`'s text encoders return, and keep its gradient.

        For families with `trained_text`.

        Args:
            pipeline: holds at least the trained encoders and their tokenizers.
            prompts: the prompts of the batch.
            cond: collated conditioning of the same prompts; entries that these encoders do not return are kept.
        """
        answers = self.call_encode_prompt(pipeline, prompts)
        return {**cond, **{name: rows.to(self.dtype) for name, rows in answers.items()}}

    def make_negative_text(self, prompt: str) -> str:
        """Return what to pass to `encode_prompts` for a negative prompt, if the pipeline encodes it differently."""
        return prompt

    def make_default_negative(self, empty: Cond) -> Cond | None:
        """Return the pipeline's conditioning if no negative prompt is given, for `make_pipeline_inputs`.

        Args:
            empty: the encoded empty prompt.
        """
        return empty

    # -- batches and pipeline arguments ----------------------------------------------------------------------------
    def collate(self, conds: list[Cond]) -> Cond:
        """Collate unbatched conditionings into a batch; for `prompts_vary` see `_pad_conds`."""
        import torch

        batch = _pad_conds(conds, self.padded_in_front) if self.prompts_vary else {}
        return batch | {key: torch.stack([cond[key] for cond in conds]) for key in conds[0] if key not in batch}

    def make_pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        """Return the arguments with which `make_pipeline()(...)` generates from one image's conditioning.

        Args:
            cond: the conditioning.
            negative: conditioning of the negative prompt; needed for guidance > 1, as no text encoder is loaded then.
        """
        import torch

        given = {"": cond} if negative is None or not self.uses_negative else {"": cond, "negative_": negative}
        names = [name for name in self.text_answers if name not in ("", "mask")]
        texts = [{name: side[name].to(self.device, self.dtype) for name in names} for side in given.values()]
        if self.prompts_vary and "mask" not in self.text_arguments:
            pairs = zip(given, texts, strict=True)
            return {f"{prefix}prompt_embeds": [text["prompt_embeds"]] for prefix, text in pairs}
        batch = self.collate(texts)  # pads both prompts to one length, which some pipelines require
        if "mask" in self.text_arguments:
            every = torch.ones(batch["prompt_embeds"].shape[:2], dtype=torch.bool, device=self.device)
            batch["mask"] = batch.pop("prompt_embeds_mask", every)
        return {
            prefix + self.text_arguments.get(name, name): rows[i : i + 1]
            for i, prefix in enumerate(given)
            for name, rows in batch.items()
        }


def _evaluate_side(side: int | str, entries: Mapping[str, Any]) -> int:
    """Evaluate a side in `text_shapes`, such as "tokens + 77", "width - 6 * each" or "channels.1"."""
    total = 0
    for term in str(side).replace(" - ", " + -").split(" + "):
        times, _, name = term.rpartition(" * ")
        entry, _, number = name.partition(".")
        value: Any = int(name) if name.isdecimal() else entries[entry]
        total += int(times or 1) * (value[int(number)] if number else value)
    return total


def _pad_conds(conds: Sequence[Cond], in_front: bool) -> Cond:
    """Batch the embeddings of several prompts that differ in length.

    Returns:
        prompt_embeds: (B, L, ...), padded with zeros behind the shorter prompts, or before them if `in_front`.
        prompt_embeds_mask: bool (B, L), True for tokens.
    """
    import torch

    rows = [cond["prompt_embeds"] for cond in conds]
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    mask_BL = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    side = "left" if in_front else "right"
    rows_BLD = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    return {"prompt_embeds": rows_BLD, "prompt_embeds_mask": mask_BL.flip(1) if in_front else mask_BL}
