"""From a folder of pictures to batches: images (scan and decode), buckets (sizes and crops), cache (encoded examples on
disk), loader (which samples a step sees).

Everything random here is a pure function of names and numbers: a SHA-256 of the words that say what is being drawn
seeds a generator of its own, so that nothing depends on what was drawn before, on the number of processes, or on
global state.
"""

import hashlib
import random


def keyed_seed(*words: object) -> int:
    """A seed of 63 bits from SHA-256 of the words joined by "|"."""
    return int.from_bytes(hashlib.sha256("|".join(map(str, words)).encode()).digest()[:8], "big") >> 1


def permutation(length: int, *words: object) -> list[int]:
    """The permutation of range(length) that belongs to the words.

    Made by sorting random() values, whose sequence Python promises to keep between versions (that of shuffle() it does
    not).
    """
    rng = random.Random(keyed_seed(*words))
    draws = [rng.random() for _ in range(length)]
    return sorted(range(length), key=draws.__getitem__)
