"""How often each image is trained in each epoch, where `repeats` need not be a whole number.

With repeats = 2.5, every image of a folder is trained twice or three times in an epoch: half of the folder three times
in one epoch, the other half in the next. After any number of epochs, an image has been trained `epochs * repeats` times
to within one, and a folder of n images `epochs * n * repeats` times to within one. With whole repeats, every epoch is
alike.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from . import make_permutation
from .examples import Example

EPOCHS = 100
"""Number of epochs over which batches are counted, if their pattern is not shorter. `repeats` is at least
1 / EPOCHS, so every image comes up in them."""


@dataclass(frozen=True)
class Share:
    """The uses of one image: (`epoch` * `rate` + `start`) // `unit` of them before an epoch, all of them integers."""

    rate: int
    start: int
    unit: int

    def count_before(self, epoch: int) -> int:
        """Count the uses in all epochs before this one."""
        return (epoch * self.rate + self.start) // self.unit

    def count_in_epoch(self, epoch: int) -> int:
        """Count the uses in this epoch."""
        return self.count_before(epoch + 1) - self.count_before(epoch)

    @property
    def repeats(self) -> Fraction:
        """Return the average number of uses in an epoch."""
        return Fraction(self.rate, self.unit)


def share_out(examples: Iterable[Example], seed: int) -> dict[str, Share]:
    """Return the share of each example by its uid; which images of a folder come first is drawn from the seed."""
    folders: dict[tuple[int, float], list[Example]] = defaultdict(list)
    for example in examples:
        folders[example.folder_index, example.repeats].append(example)
    shares = {}
    for (folder, given), members in folders.items():
        members.sort(key=lambda example: example.uid)
        repeats = Fraction(str(given))
        whole = repeats.denominator == 1
        places = range(len(members)) if whole else make_permutation(len(members), "repeats", seed, folder)
        unit = 2 * len(members) * repeats.denominator
        for example, place in zip(members, places, strict=True):
            # The starts of a folder lie evenly in the unit: about the same number of its images have an extra use in
            # every epoch.
            shares[example.uid] = Share(
                2 * len(members) * repeats.numerator, (2 * place + 1) * repeats.denominator, unit
            )
    return shares


def find_period(shares: Iterable[Share]) -> int:
    """Return after how many epochs the numbers of uses repeat; 1 if every epoch is alike."""
    return math.lcm(*{share.repeats.denominator for share in shares})


def count_batches(groups: Collection[Sequence[Share]], batch_size: int, epoch: int) -> int:
    """Count the batches of an epoch; the images of a group share batches."""
    return sum(-(-sum(share.count_in_epoch(epoch) for share in group) // batch_size) for group in groups)


def average_epochs(groups: Collection[Sequence[Share]], batch_size: int) -> tuple[float, float]:
    """Return the average numbers of samples and of batches in an epoch; integers where every epoch has as many."""
    shares = [share for group in groups for share in group]
    samples = sum((share.repeats for share in shares), Fraction(0))
    epochs = min(find_period(shares), EPOCHS)
    batches = Fraction(sum(count_batches(groups, batch_size, epoch) for epoch in range(epochs)), epochs)
    return _as_number(samples), _as_number(batches)


def _as_number(number: Fraction) -> float:
    return int(number) if number.denominator == 1 else float(number)
