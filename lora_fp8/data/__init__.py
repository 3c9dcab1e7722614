"""From a folder of images to batches.

images scans and decodes, buckets chooses sizes and crops, cache stores encoded examples on disk, and loader chooses the
samples of each step.

Everything random here is a pure function of names and numbers: the SHA-256 of words that say what is being drawn seeds
a separate generator. Nothing depends on earlier draws, on the number of processes, or on global state.
"""

import hashlib
import random


def derive_seed(*words: object) -> int:
    """Return a 63-bit seed from the SHA-256 of the words joined by "|"."""
    return int.from_bytes(hashlib.sha256("|".join(map(str, words)).encode()).digest()[:8], "big") >> 1


def make_permutation(length: int, *words: object) -> list[int]:
    """Return the permutation of range(length) that belongs to the words.

    It is made by sorting random() values, as Python promises to keep their sequence between versions, but not that of
    shuffle().
    """
    rng = random.Random(derive_seed(*words))
    draws = [rng.random() for _ in range(length)]
    return sorted(range(length), key=draws.__getitem__)
