"""Weights in prompts for CLIP (`model.prompt_weights`), in the notation of A1111: "a (red:1.3) cat, [dog], \\(text\\)".

(x:1.3) multiplies the weight of x by 1.3, (x) by 1.1, and [x] divides it by 1.1; they may be nested, and one that is
not closed reaches to the end. A backslash makes the next bracket text. As in sd-scripts (`weighted_captions`;
library/strategy_base.py, strategy_sd.py), each piece of a prompt is tokenized by itself, and what CLIP returns for a
token is multiplied by the token's weight. BOS, EOS and padding keep a weight of 1, and so does SDXL's pooled embedding.
A1111 then scales the result back to its former mean; sd-scripts does not, and neither does this.
"""

from __future__ import annotations

import contextlib
import math
import re

ROUND = 1.1
"""Factor of round brackets without a number; square ones divide by it."""
MOST_DEPTH = 20
"""Brackets inside of each other; further ones are text, so that no caption takes long to read."""
LARGE_WEIGHT = 10
"""Weights above it are hardly meant, such as that of (12:30)."""
_PIECE = re.compile(
    r"\\([()\[\]\\])"  # an escaped bracket or backslash
    r"|:\s*([+-]?[.\d]+)\s*\)"  # the weight and end of a round bracket
    r"|[()\[\]:\\]|[^()\[\]:\\]+"
)
_WEIGHT = re.compile(r"(?<!\\)\([^()]+:\s*[+-]?[.\d]+\s*\)")


def parse_weights(prompt: str) -> list[tuple[str, float]]:
    """Split a prompt into pieces of one weight each, without the notation; at least one, which may be empty."""
    texts: list[str] = []
    weights: list[float] = []
    open_round: list[int] = []
    open_square: list[int] = []

    def multiply(start: int, factor: float) -> None:
        weights[start:] = [weight * factor for weight in weights[start:]]

    for match in _PIECE.finditer(prompt):
        text, escaped, number = match[0], match[1], match[2]
        factor = None
        with contextlib.suppress(ValueError, TypeError):  # "1.2.3" is text
            factor = float(number)
        if factor is not None and not math.isfinite(factor):
            factor = None
        if text == "(" and len(open_round) < MOST_DEPTH:
            open_round.append(len(texts))
        elif text == "[" and len(open_square) < MOST_DEPTH:
            open_square.append(len(texts))
        elif open_round and (text == ")" or factor is not None):
            multiply(open_round.pop(), ROUND if factor is None else factor)
        elif open_square and text == "]":
            multiply(open_square.pop(), 1 / ROUND)
        else:
            texts.append(escaped or text)
            weights.append(1.0)
    for start in open_round:
        multiply(start, ROUND)
    for start in open_square:
        multiply(start, 1 / ROUND)
    pieces: list[tuple[str, float]] = []
    for text, weight in zip(texts, weights, strict=True):
        if pieces and pieces[-1][1] == weight:
            text = pieces.pop()[0] + text
        pieces.append((text, weight))
    return pieces or [("", 1.0)]


def remove_weights(prompt: str) -> str:
    """Return the text of a prompt without the notation."""
    return "".join(text for text, _ in parse_weights(prompt))


def has_weights(prompt: str) -> bool:
    """Return True if a prompt has a weight in numbers, such as (smile:1.2); brackets alone may be text."""
    return _WEIGHT.search(prompt) is not None


def find_largest_weight(prompt: str) -> float:
    """Return the largest weight of a piece of a prompt, without its sign."""
    return max(abs(weight) for _, weight in parse_weights(prompt))


def splits_bracket(prompt: str, separator: str) -> bool:
    """Return True if a bracket reaches over a separator, so that its parts are not what was weighted."""
    for part in prompt.split(separator):
        num_open = 0
        for match in _PIECE.finditer(part):
            if match[0] in ("(", "["):
                num_open += 1
            elif match[0] in (")", "]") or match[2]:
                num_open = max(num_open - 1, 0)
        if num_open:
            return True
    return False
