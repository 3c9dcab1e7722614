"""The captions as they are trained (tags shuffled and dropped, wildcards chosen), and what is cut off of them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .. import settings
from ..errors import Message, Template, first_few
from . import derive_seed, make_permutation
from .caption_operations import make_tag_glue, split_tags
from .caption_text import CHOICE, with_class_word, with_trigger
from .examples import Example

if TYPE_CHECKING:
    from ..families._prompts import Overlong


def shorten(text: str, most: int = 60) -> str:
    """Return the text on one line, cut to at most `most` characters."""
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 3] + "..."


def warn_of_truncation(truncated: Sequence[Overlong], num_texts: int, most: int = 3) -> list[str]:
    """Return one warning about all texts that are truncated, with what the first few lose; [] if there are none."""
    if not truncated:
        return []
    lost = [cut.num_lost for cut in truncated]
    limit = min(cut.limit for cut in truncated)
    examples = [
        Message("{lost} of {caption}", lost=repr(shorten(cut.lost)), caption=repr(shorten(cut.prompt, 40)))
        for cut in truncated
    ]
    template = Template(
        "{count} of {total} captions and prompts exceed the limit of the text encoder, {limit} tokens: up to {most} "
        "tokens at the end have no effect; shorten them, or put what matters first. Cut off: {what_lost}"
    )
    values: dict[str, Any] = {"count": len(lost), "total": num_texts, "limit": limit, "most": max(lost)}
    if tokens := max(cut.caption_tokens for cut in truncated):
        values["tokens"] = tokens
        template = Template(
            "{count} of {total} captions and prompts exceed the limit of the text encoder, {limit} tokens: up to "
            "{most} tokens at the end have no effect; set model.caption_tokens = {tokens}, shorten them, or put "
            "what matters first. Cut off: {what_lost}"
        )
    return [template(**values, what_lost=first_few(examples, most))]


def draw_caption_variant(caption: str, variant: int, section: settings.Dataset, seed: int) -> str:
    """Return variant number `variant` of a caption.

    Of a caption with several lines (`caption_lines = "one"`), one is drawn. With `wildcards`, one alternative is drawn
    for each `{a|b}`. The tags of `split_fixed` stay in place; of the others, `tag_dropout` leaves some out (never one
    that contains a trigger word), and `shuffle_tags` shuffles the rest.

    The result depends on the arguments alone, so that the loader asks for exactly the texts that were encoded.
    """
    lines = caption.split("\n")
    text = lines[0]
    if len(lines) > 1:
        text = lines[int(random.Random(derive_seed("line", seed, caption, variant)).random() * len(lines))]
    if section.wildcards:
        draw = random.Random(derive_seed("wildcards", seed, caption, variant)).random

        def choose_alternative(match: re.Match[str]) -> str:
            words = match[1].split("|")
            return words[int(draw() * len(words))]

        text = CHOICE.sub(choose_alternative, text)
    has_mark = bool(section.keep_separator) and section.keep_separator in text
    if not section.shuffle_tags and not section.tag_dropout and not has_mark:
        return text
    front, rest, end = split_fixed(text, section)
    if section.tag_dropout:
        draw = random.Random(derive_seed("tag_dropout", seed, caption, variant)).random
        kept_out = [draw() < section.tag_dropout for _ in rest]  # one draw per tag, whichever stay
        triggers = section.triggers
        bound = [any(with_trigger(tag, word) == tag for word in triggers) for tag in rest]
        rest = [tag for tag, out, stays in zip(rest, kept_out, bound, strict=True) if stays or not out]
    if section.shuffle_tags:
        rest = [rest[i] for i in make_permutation(len(rest), "shuffle", seed, caption, variant)]
    return make_tag_glue(section.tag_separator).join(front + rest + end)


def split_fixed(caption: str, section: settings.Dataset) -> tuple[list[str], list[str], list[str]]:
    """Return the tags of a caption that stay in front, those that may be shuffled, and those that stay at the end.

    In a caption with `keep_separator`, these are the parts before the first, between the two, and after the second of
    them; any further ones separate tags. In other captions, the first `keep_tokens` tags stay in front.
    """
    separator, mark = section.tag_separator, section.keep_separator
    if not mark or mark not in caption:
        tags = split_tags(caption, separator)
        return tags[: section.keep_tokens], tags[section.keep_tokens :], []
    front, middle, end = (caption.split(mark, 2) + [""])[:3]
    return (
        split_tags(front, separator),
        split_tags(middle, separator),
        split_tags(end.replace(mark, separator), separator),
    )


def unify_separators(caption: str, section: settings.Dataset) -> str:
    """Return a caption to count its tags in: `keep_separator` and line ends separate tags like any other separator."""
    marks = ("\n", section.keep_separator) if section.keep_separator else ("\n",)
    for mark in marks:
        caption = caption.replace(mark, section.tag_separator)
    return caption


def disable_caption_variants(section: settings.Dataset) -> settings.Dataset:
    """Return the section without caption augmentation, for validation: one variant, with a fixed choice of `{a|b}`."""
    off = {"caption_dropout": 0.0, "shuffle_tags": False, "tag_dropout": 0.0, "caption_variants": 1}
    return section.model_copy(update=off)


def list_dataset_captions(examples: Iterable[Example], section: settings.Dataset, seed: int) -> list[str]:
    """Return all texts that training and validation may ask for.

    These are the captions for validation, their variants, those with the class word, and "" if captions are dropped.
    """
    texts: dict[str, None] = {}
    plain = disable_caption_variants(section)
    for caption in dict.fromkeys(example.caption for example in examples):
        texts[draw_caption_variant(caption, 0, plain, seed)] = None
        if section.varies_captions:
            texts.update(
                (draw_caption_variant(caption, v, section, seed), None) for v in range(section.caption_variants)
            )
    triggers = section.triggers
    texts.update((with_class_word(text, triggers, section.class_word), None) for text in list(texts))
    if section.caption_dropout > 0:
        texts[""] = None
    return list(texts)
