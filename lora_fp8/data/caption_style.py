"""Tell captions of sentences from captions of tags, so that sentences are not shuffled at their commas."""

import re
from collections.abc import Sequence

from .. import settings
from ..errors import Template
from .caption_operations import split_tags
from .caption_variants import shorten

LONG = 4.0
"""Words per part from which a caption counts as sentences; booru tags have 1.5 on average."""
LONG_WITH_STOP = 2.5
"""The same for captions with a full stop."""
LEAST_SHARE = 0.1
"""Smallest share of sentences among the captions that can be shuffled; fewer are odd tags."""
_IDEOGRAPHS = re.compile(r"[぀-ヿ㐀-䶿一-鿿가-힯]")
_STOP = re.compile(r"[。！？]|[.!?](?=\s|$)")


def looks_like_sentences(caption: str, separator: str = ",") -> bool:
    """Return True if a caption of several parts is prose: long parts, or fairly long parts and a full stop."""
    parts = split_tags(caption, separator)
    if len(parts) < 2:
        return False
    words = sum(map(_count_words, parts)) / len(parts)
    return words >= LONG or words >= LONG_WITH_STOP and _STOP.search(caption) is not None


def detect_style(captions: Sequence[str]) -> str:
    """Return "sentences" if a tenth of the captions that have several parts are prose, else "tags".

    Returns "" if no caption has several parts, so that nothing tells.
    """
    several = [caption for caption in captions if len(split_tags(caption)) > 1]
    prose = sum(map(looks_like_sentences, several))
    if not several:
        return ""
    return "sentences" if prose >= LEAST_SHARE * len(several) else "tags"


def find_sentences_used_as_tags(captions: Sequence[str], section: settings.Dataset) -> list[str]:
    """Return the captions that look like sentences and would be shuffled, or lose parts, as if they were tags.

    Empty if the section changes no tags, or if so few captions are sentences that they are probably odd tags.
    """
    if not (section.shuffle_tags or section.tag_dropout):
        return []
    separator = section.tag_separator
    several = [caption for caption in captions if len(split_tags(caption, separator)) > 1]
    prose = [caption for caption in several if looks_like_sentences(caption, separator)]
    return prose if len(prose) >= LEAST_SHARE * len(several) else []


SHUFFLED = Template(
    "dataset.shuffle_tags: {count} of {total} captions look like sentences, such as {example}, and are shuffled at "
    "their commas. Set it to false"
)
DROPPED = Template(
    "dataset.tag_dropout: {count} of {total} captions look like sentences, such as {example}, and lose parts at their "
    "commas. Set it to 0"
)


def warn_of_sentences(captions: Sequence[str], section: settings.Dataset) -> list[str]:
    """Return a warning about the captions of `find_sentences_used_as_tags`, with their number and an example."""
    prose = find_sentences_used_as_tags(captions, section)
    if not prose:
        return []
    warning = SHUFFLED if section.shuffle_tags else DROPPED
    return [warning(count=len(prose), total=len(captions), example=repr(shorten(prose[0], 80)))]


def _count_words(part: str) -> float:
    """Count the words of a part; two Chinese, Japanese or Korean characters count as one word."""
    ideographs = len(_IDEOGRAPHS.findall(part))
    return len(_IDEOGRAPHS.sub(" ", part).split()) + ideographs / 2
