"""The prompts' half of `ModelFamily`: what text encoders make of one, how much of it is read, and who is given it how.

What the pipeline's own `encode_prompt` answers is cached, one unbatched Cond per prompt; `collate` makes a batch of
several, and `pipeline_inputs` arguments of the pipeline's call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import diffusers
import torch
from torch import Tensor, nn

Cond = dict[str, Tensor]
"""Conditioning by name: of ONE image (no batch dimension), or of a batch after `collate`."""


@dataclass(frozen=True)
class Overlong:
    """A prompt that its text encoder does not read to the end.

    Attributes:
        prompt: the whole text.
        lost: its end, which is not read.
        num_lost: tokens in `lost`.
        limit: tokens that are read, without those that mark beginning and end.
    """

    prompt: str
    lost: str
    num_lost: int
    limit: int


class Prompts:
    """Defaults for a family whose pipeline has `encode_prompt`, and takes what that answers as arguments."""

    device: torch.device
    dtype: torch.dtype
    text_pipeline: diffusers.DiffusionPipeline
    tokenizer: Callable[[str], Any]

    judge_length_by: ClassVar[tuple[str, ...]] = ("tokenizer",)
    """Those of the tokenizers whose limit decides what of a prompt is lost."""
    prompt_tokens: ClassVar[int] = 0
    """Tokens that a prompt is padded or cut to, those of its template included, unless those tokenizers say less: what
    pipelines call `max_sequence_length`. 0 where the pipeline leaves it to the tokenizers."""
    text_answers: ClassVar[tuple[str, ...]] = ("prompt_embeds",)
    """What the pipeline's `encode_prompt` answers, in its order, without what comes behind: names in `Cond`; "" for
    what is not kept; "mask" for what tells a prompt's own tokens, which alone are then kept of `prompt_embeds`."""
    text_options: ClassVar[dict[str, Any]] = {}
    """Arguments that `encode_prompt` needs beside the usual ones."""
    text_shapes: ClassVar[dict[str, tuple[int | str, ...]]]
    """What `encode_prompts` makes of a prompt that is as long as it is read: name -> shape. A word is an entry of the
    denoiser's config.json, "tokens" is `longest_prompt`, and "tokens+77" a sum."""
    prompts_vary: ClassVar[bool] = False
    """Whether `prompt_embeds` are as long as the prompt. Those of a batch are padded, with a mask beside them."""
    padded_in_front: ClassVar[bool] = False
    """Whether the shorter of them are padded in front, and not behind."""
    chat: ClassVar[tuple[dict[str, Any], ...]] = ()
    """Messages that the pipeline makes of a prompt, "\0" here, for its tokenizer's chat template; () for none."""
    end_counts: ClassVar[bool] = False
    """Whether what that has behind a prompt is always read, as the pipeline refuses what is too long; else that is cut
    off first."""
    text_arguments: ClassVar[dict[str, str]] = {}
    """Name in `Cond` -> argument of the pipeline's call, where it is another; "mask" for that of a mask. A pipeline for
    prompts that vary takes them in a list if it has none."""
    uses_negative: ClassVar[bool] = True
    """Whether the pipeline guides away from a negative prompt at its usual settings."""

    # -- what is read ---------------------------------------------------------------------------------------------
    @property
    def max_sequence_length(self) -> int | None:
        """`prompt_tokens` of the given model, None where there is no such argument."""
        limits = (self.tokenizer(name).model_max_length for name in self.judge_length_by)
        return min(self.prompt_tokens, *limits) if self.prompt_tokens else None

    def token_limit(self, name: str) -> int:
        """Tokens of a prompt that the encoder of this tokenizer reads, those that mark beginning and end included."""
        limit = self.max_sequence_length or self.tokenizer(name).model_max_length
        return limit - self.num_tokens(self.around_prompt()[1]) if self.end_counts else limit

    def as_read(self, prompt: str) -> tuple[str, str]:
        """What the tokenizers are given for a prompt: the words that the pipeline puts before it, and its own."""
        return self.around_prompt()[0] if self.chat else "", prompt

    def around_prompt(self) -> tuple[str, str]:
        """What the template of `chat` has before a prompt, and behind it."""
        messages, (name, *_) = list(self.chat), self.judge_length_by
        text = self.tokenizer(name).apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        before, _, behind = text.partition("\0")
        return before, behind

    def num_tokens(self, text: str) -> int:
        """Tokens of a text, without those that mark beginning and end."""
        return len(self.tokenizer(self.judge_length_by[0])(text, add_special_tokens=False)["input_ids"])

    def overlong(self, prompts: Sequence[str]) -> list[Overlong]:
        """The prompts of which `encode_prompts` cuts off the end. Needs the tokenizers only, which it loads itself."""
        found: dict[str, Overlong] = {}
        for name in self.judge_length_by:
            for prompt, cut in self.cut_by(name, prompts).items():
                if prompt not in found or cut.num_lost > found[prompt].num_lost:
                    found[prompt] = cut
        return list(found.values())

    def cut_by(self, name: str, prompts: Sequence[str]) -> dict[str, Overlong]:
        """The prompts of which the encoder of this tokenizer does not read the end."""
        if not prompts:
            return {}
        tokenizer = self.tokenizer(name)
        limit = self.token_limit(name) - tokenizer.num_special_tokens_to_add()
        read = [self.as_read(prompt) for prompt in prompts]
        texts = [before + text for before, text in read]
        tokens = tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        found: dict[str, Overlong] = {}
        for prompt, (before, _), text, spans in zip(prompts, read, texts, tokens["offset_mapping"], strict=True):
            if len(spans) > limit:
                own = limit - sum(end <= len(before) for _, end in spans)
                lost = text[max(len(before), spans[limit][0]) :]
                found[prompt] = Overlong(text.removeprefix(before), lost, len(spans) - limit, own)
        return found

    @property
    def longest_prompt(self) -> int:
        """Tokens of conditioning that a prompt makes at most."""
        return self.max_sequence_length or min(map(self.token_limit, self.judge_length_by))

    def longest_cond(self, denoiser_config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Shapes of what `encode_prompts` gives for the longest prompt, to reckon memory before anything is encoded."""
        sizes = {**denoiser_config, "tokens": self.longest_prompt}

        def size(words: int | str) -> int:
            return sum(int(word) if str(word).isdecimal() else sizes[word] for word in str(words).split("+"))

        return {name: tuple(map(size, shape)) for name, shape in self.text_shapes.items()}

    # -- what is made of it ---------------------------------------------------------------------------------------
    @torch.no_grad()
    def encode_prompts(self, prompts: list[str]) -> list[Cond]:
        """What the pipeline's own `encode_prompt` gives, one unbatched Cond per prompt, in the model's dtype.

        With `prompts_see_controls` there is a second argument: for each prompt its control pictures, RGB, not resized.
        """
        answers = self.text_answer(self.text_pipeline, prompts)
        masks = answers.pop("mask", None)
        found = []
        for i in range(len(prompts)):
            one = {name: rows[i] for name, rows in answers.items()}
            if masks is not None:
                one["prompt_embeds"] = one["prompt_embeds"][masks[i].bool()]
            found.append({name: tensor.to(self.dtype, copy=True) for name, tensor in one.items()})
        return found

    def text_answer(self, pipeline: diffusers.DiffusionPipeline, prompts: list[str]) -> dict[str, Any]:
        """What the pipeline's `encode_prompt` answers for these prompts, by the names of `text_answers`."""
        usual = {"device": self.device, "num_images_per_prompt": 1, "do_classifier_free_guidance": False}
        usual["max_sequence_length"] = self.max_sequence_length
        known = inspect.signature(pipeline.encode_prompt).parameters
        options = {name: value for name, value in usual.items() if name in known} | self.text_options
        answers = pipeline.encode_prompt(list(prompts), **options)  # a list of its own, as some write into it
        return {name: answer for name, answer in zip(self.text_answers, answers, strict=False) if name}

    def encode_with(self, pipeline: diffusers.DiffusionPipeline, prompts: list[str], cond: Cond) -> Cond:
        """The conditioning of a batch of prompts with what `pipeline`'s text encoders say of them, with its gradient.

        For families with `trained_text`; `pipeline` holds at least these encoders and their tokenizers.

        Args:
            cond: collated conditioning of the same prompts, for all that these encoders do not say.
        """
        answers = self.text_answer(pipeline, prompts)
        return {**cond, **{name: rows.to(self.dtype) for name, rows in answers.items()}}

    def negative_text(self, prompt: str) -> str:
        """What to give to `encode_prompts` for a prompt to guide away from, where the pipeline encodes it otherwise."""
        return prompt

    def without_negative(self, empty: Cond) -> Cond | None:
        """What the pipeline takes where nobody gives a negative prompt, for `pipeline_inputs`.

        Args:
            empty: the encoded empty text.
        """
        return empty

    # -- who is given it ------------------------------------------------------------------------------------------
    def collate(self, conds: list[Cond]) -> Cond:
        """Unbatched conditionings -> one batch; for `prompts_vary` see `padded`."""
        batch = padded(conds, "prompt_embeds", self.padded_in_front) if self.prompts_vary else {}
        return batch | {key: torch.stack([cond[key] for cond in conds]) for key in conds[0] if key not in batch}

    def pipeline_inputs(self, cond: Cond, negative: Cond | None) -> dict[str, Any]:
        """Arguments with which `pipeline()(...)` draws this conditioning of one image.

        `negative` is needed where classifier-free guidance is wanted (guidance > 1), as no text encoder is loaded then.
        """
        given = {"": cond} if negative is None or not self.uses_negative else {"": cond, "negative_": negative}
        names = [name for name in self.text_answers if name not in ("", "mask")]
        texts = [{name: one[name].to(self.device, self.dtype) for name in names} for one in given.values()]
        if self.prompts_vary and "mask" not in self.text_arguments:
            pairs = zip(given, texts, strict=True)
            return {f"{prefix}prompt_embeds": [text["prompt_embeds"]] for prefix, text in pairs}
        batch = self.collate(texts)  # both prompts of one length, which some pipelines insist on
        if "mask" in self.text_arguments:
            every = torch.ones(batch["prompt_embeds"].shape[:2], dtype=torch.bool, device=self.device)
            batch["mask"] = batch.pop("prompt_embeds_mask", every)
        return {
            prefix + self.text_arguments.get(name, name): rows[i : i + 1]
            for i, prefix in enumerate(given)
            for name, rows in batch.items()
        }


def padded(conds: Sequence[Cond], name: str, in_front: bool = False) -> Cond:
    """One entry of several conditionings in a batch, when prompts differ in length.

    Returns:
        `name`: (B, L, ...) with zeros behind the shorter ones, or `in_front` of them; `name`_mask: bool (B, L), True
        where there is a token.
    """
    rows = [cond[name] for cond in conds]
    lengths = torch.tensor([len(row) for row in rows], device=rows[0].device)
    mask_BL = torch.arange(int(lengths.max()), device=lengths.device) < lengths[:, None]
    side = "left" if in_front else "right"
    rows_BLD = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    return {name: rows_BLD, f"{name}_mask": mask_BL.flip(1) if in_front else mask_BL}
