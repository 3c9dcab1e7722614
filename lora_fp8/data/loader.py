"""The loader: which samples each step trains on, and everything random about them.

There is no iterator and no state: everything is a function of (seed, micro-batch number). A resumed run needs only its
step number to continue bit for bit, and any process can compute any other's share.

An *item* is one use of an example in an epoch: with repeats = 3 an example has three. An *epoch* trains on each item
once: items are shuffled inside their bucket, cut into batches of one bucket (the last one of a bucket may be smaller;
none is dropped), and the batches are shuffled. Repeats that are no whole numbers give an example more items in some
epochs than in others, see repeats.py.

What is drawn for a sample (noise, timestep, mirroring, caption dropout, tag shuffle) comes from a separate generator,
keyed by purpose, seed, epoch and item. An item comes once per epoch, so no draw is ever used twice; and since neither
the batch nor the process is in the key, a sample gets the same noise whatever the batch size, the gradient accumulation
or the number of processes. (The optimizer step would be no safe key: with a small dataset, an item can come twice in
one step.)

With several processes, a micro-batch is split: rank r of n takes items[r::n]. A rank may get none.

Shape legend: B batch, C channels, H height, W width (of latents; those of clips have frames before H).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import settings
from ..errors import Message, UserError
from . import derive_seed, make_permutation
from .buckets import Bucket, Placed, Size
from .cache import Cache
from .caption_text import with_class_word
from .caption_variants import draw_caption_variant
from .image_variants import draw_variant
from .repeats import EPOCHS, Share, average_epochs, count_batches, find_period, share_out

GOLDEN = (math.sqrt(5) - 1) / 2
"""The fractions of its multiples fill (0, 1) evenly, however many there are."""


def make_generator(seed: int, purpose: str, when: int, uid: str) -> torch.Generator:
    """Return the CPU generator of one purpose for one sample, seeded from the SHA-256 of "purpose|seed|when|uid".

    Args:
        seed: the job's seed.
        purpose: what is drawn, for example "noise".
        when: distinguishes uses of the same sample; the loader passes the epoch.
        uid: the sample.
    """
    return torch.Generator().manual_seed(derive_seed(purpose, seed, when, uid))


@dataclass(frozen=True)
class Item:
    """One use of an example in an epoch."""

    placed: Placed
    repeat: int

    @property
    def uid(self) -> str:
        """Return the unique name of this use in the epoch: the example's, and which of its repeats it is."""
        return f"{self.placed.example.uid}#{self.repeat}"


@dataclass
class Batch:
    """One process's share of a micro-batch: images of one bucket.

    Attributes:
        latents_BCHW: float32.
        noise_BCHW: float32, standard normal, drawn on the CPU (so it is the same on every device).
        t_generators: one per sample, for `Objective.sample_t`.
        quantiles: where in the timestep density each sample lies with `objective.even_timesteps`, from 0 to 1.
        cond: conditioning, from `family.collate`.
        uids, paths, captions: of the samples; captions as trained (shuffled, or "" when dropped).
        flipped: whether each is mirrored.
        bucket_wh: pixels.
        weights: factor of each sample's loss, from its folder.
        total: number of samples of the whole micro-batch over all processes, which the loss is divided by.
        step, micro_index, epoch: position in the training.
        mask_BHW: loss mask of each image, float32 in [0, 1]; None if no image has one.
        regularization: whether each is a regularization image.
        class_captions, class_cond: the captions with dataset.class_word for the trigger, and their conditioning; None
            if there is no class word, or no caption has a trigger.
    """

    latents_BCHW: Tensor
    noise_BCHW: Tensor
    t_generators: list[torch.Generator]
    cond: dict[str, Tensor]
    uids: list[str]
    paths: list[Path]
    captions: list[str]
    flipped: list[bool]
    bucket_wh: Size
    weights: list[float]
    total: int
    step: int
    micro_index: int
    epoch: int
    mask_BHW: Tensor | None = None
    quantiles: list[float] = field(default_factory=list)
    regularization: list[bool] = field(default_factory=list)
    class_captions: list[str] = field(default_factory=list)
    class_cond: dict[str, Tensor] | None = None

    def __len__(self) -> int:
        return len(self.uids)

    @property
    def latent_hw(self) -> tuple[int, ...]:
        """Return the latents' size for `family.count_image_tokens`: (height, width), or (frames, height, width)."""
        return tuple(self.latents_BCHW.shape[2:])

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on a device. A GPU copies pinned ones when it gets there."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, from which a GPU copies while the CPU goes on."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        return replace(
            self,
            latents_BCHW=function(self.latents_BCHW),
            noise_BCHW=function(self.noise_BCHW),
            mask_BHW=None if self.mask_BHW is None else function(self.mask_BHW),
            cond={name: function(tensor) for name, tensor in self.cond.items()},
            class_cond=None if self.class_cond is None else {n: function(t) for n, t in self.class_cond.items()},
        )


def make_epoch_batches(
    items_by_bucket: Mapping[tuple[int, ...], Sequence[Any]], batch_size: int, seed: int, epoch: int
) -> list[list[Any]]:
    """Return the batches of an epoch in order, as a pure function of the arguments.

    Every item is in exactly one batch, each batch has items of one bucket, and the number of batches does not depend on
    the epoch and the seed.
    """
    batches = []
    for bucket in sorted(items_by_bucket):
        items = items_by_bucket[bucket]
        shuffled = [items[i] for i in make_permutation(len(items), "items", seed, epoch, *bucket)]
        batches += [shuffled[start : start + batch_size] for start in range(0, len(shuffled), batch_size)]
    return [batches[i] for i in make_permutation(len(batches), "batches", seed, epoch)]


class Loader:
    """Batches of a filled cache.

    Args:
        buckets: examples by bucket, from `buckets.group`.
        cache: filled with these examples and with the prompts of `Cache.list_prompts`.
        family: image_conditioning and collate are used.
        section: `[dataset]`: flip, caption_dropout, the folders' weights, and the settings of the variants of images
            and captions.
        seed: the job's seed; the same that `Cache.list_prompts` was given.
        batch_size: images per micro-batch over all processes.
    """

    def __init__(
        self,
        buckets: Mapping[Bucket, Sequence[Placed]],
        cache: Cache,
        family: Any,
        section: settings.Dataset,
        seed: int,
        batch_size: int,
    ):
        self.cache, self.family, self.section, self.seed, self.batch_size = cache, family, section, seed, batch_size
        # The control images of a batch have one size as well, so buckets are split by the sizes of the control images.
        self.images: dict[tuple[int, ...], list[tuple[Placed, Share]]] = {}
        shares = share_out((image.example for placed in buckets.values() for image in placed), seed)
        for bucket, placed in buckets.items():
            for image in placed:
                sides = [side for control in cache.list_control_crops(image) for side in control.size]
                self.images.setdefault((*bucket, *sides), []).append((image, shares[image.example.uid]))
        if not shares:
            raise UserError(Message("dataset: there are no examples to train on"))
        self._shares = {key: [share for _, share in members] for key, members in self.images.items()}
        self.samples_per_epoch, self.batches_per_epoch = average_epochs(self._shares.values(), batch_size)
        self._period = find_period(shares.values())
        self._first_batches = [0]  # of each epoch, as far as they were asked for
        self._epochs: dict[int, list[list[Item]]] = {}
        self._starts: dict[int, list[int]] = {}  # samples of the training before each batch of an epoch
        drawn = torch.rand((), generator=make_generator(seed, "even_timesteps", 0, ""), dtype=torch.float64)
        self._first_quantile = drawn.item()
        self._prepared: dict[tuple[int, ...], Batch | None] = {}  # one at most

    def count_epoch_batches(self, epoch: int) -> int:
        """Return the number of micro-batches of an epoch."""
        return count_batches(self._shares.values(), self.batch_size, epoch)

    def find_position(self, micro_index: int) -> tuple[int, int]:
        """Return (epoch, batch within it) of a micro-batch, both from 0."""
        if self._period == 1:
            return divmod(micro_index, int(self.batches_per_epoch))
        first = self._first_batches
        while first[-1] <= micro_index:
            first.append(first[-1] + self.count_epoch_batches(len(first) - 1))
        epoch = bisect.bisect_right(first, micro_index) - 1  # of epochs that begin there, all but the last are empty
        return epoch, micro_index - first[epoch]

    def group_items(self, epoch: int) -> dict[tuple[int, ...], list[Item]]:
        """Return what an epoch trains on, by bucket and sizes of the control images."""
        items = {
            key: [Item(image, repeat) for image, share in members for repeat in range(share.count_in_epoch(epoch))]
            for key, members in self.images.items()
        }
        return {key: members for key, members in items.items() if members}

    def find_heaviest(self, count_pixels: Callable[[Placed], int]) -> int:
        """Return the micro-batch of the most pixels; with repeats that are no whole numbers, of the first 100 epochs.

        Args:
            count_pixels: pixels of one image and of its control images.
        """

        def weigh(items: Sequence[Item]) -> int:
            return len(items) * count_pixels(items[0].placed)

        each = {key: count_pixels(members[0][0]) for key, members in self.images.items()}

        def weigh_epoch(epoch: int) -> int:
            counts = {key: sum(share.count_in_epoch(epoch) for share in shares) for key, shares in self._shares.items()}
            return max(min(count, self.batch_size) * each[key] for key, count in counts.items())

        heaviest = max(range(min(self._period, EPOCHS)), key=weigh_epoch)
        first = sum(map(self.count_epoch_batches, range(heaviest)))
        return max(
            range(first, first + self.count_epoch_batches(heaviest)),
            key=lambda micro: weigh(self.list_batch_items(micro)),
        )

    def list_batch_items(self, micro_index: int) -> list[Item]:
        """Return the items of a micro-batch over all processes. `micro_index` counts from the start of the training."""
        epoch, index = self.find_position(micro_index)
        if epoch not in self._epochs:
            if len(self._epochs) > 1:
                self._starts.pop(oldest := next(iter(self._epochs)))
                self._epochs.pop(oldest)
            self._epochs[epoch] = make_epoch_batches(self.group_items(epoch), self.batch_size, self.seed, epoch)
            before = sum(share.count_before(epoch) for shares in self._shares.values() for share in shares)
            self._starts[epoch] = list(itertools.accumulate(map(len, self._epochs[epoch]), initial=before))
        return self._epochs[epoch][index]

    def count_samples(self, micro_index: int) -> int:
        """Return the number of samples of a micro-batch over all processes, also for a rank that gets none of them."""
        return len(self.list_batch_items(micro_index))

    def prepare(self, step: int, micro_index: int, rank: int = 0, world: int = 1) -> None:
        """Make the batch that `micro` will be asked for next, in page-locked memory where there is a GPU."""
        self._prepared.clear()
        batch = self._make(step, micro_index, rank, world)
        if batch is not None and torch.cuda.is_available():
            batch = batch.pin_memory()
        self._prepared = {(step, micro_index, rank, world): batch}

    def take_batch(self, step: int, micro_index: int, rank: int = 0, world: int = 1) -> Batch | None:
        """Return this process's share of a micro-batch, on the CPU; None if it has no sample in it.

        Args:
            step: the optimizer step that it belongs to; only recorded in the batch.
            micro_index: number of the micro-batch from the start of the training: step * accumulate + i.
            rank, world: index of this process, and the number of processes.
        """
        key = (step, micro_index, rank, world)
        # A batch is given once: its generators are drawn from.
        return self._prepared.pop(key) if key in self._prepared else self._make(*key)

    def _make(self, step: int, micro_index: int, rank: int, world: int) -> Batch | None:
        items = self.list_batch_items(micro_index)
        mine = items[rank::world]
        if not mine:
            return None
        epoch, index = self.find_position(micro_index)
        first = self._starts[epoch][index]
        latents, noise, conds, captions, flips, masks, variants = [], [], [], [], [], [], []
        for item in mine:
            flipped = self._is_flipped(epoch, item.uid)
            caption = self._choose_caption(epoch, item)
            variant = self._choose_variant(epoch, item)
            latents_CHW = self.cache.read_latents(variant, flipped).to(torch.float32)
            draw = make_generator(self.seed, "noise", epoch, item.uid)
            latents.append(latents_CHW)
            noise.append(torch.randn(latents_CHW.shape, generator=draw, dtype=torch.float32))
            conds.append(self._collect_cond(variant, caption, flipped))
            captions.append(caption)
            flips.append(flipped)
            masks.append(self.cache.read_mask(variant, flipped))
            variants.append(variant)
        class_captions, class_cond = self._make_class_part(variants, captions, flips)
        return Batch(
            latents_BCHW=torch.stack(latents),
            noise_BCHW=torch.stack(noise),
            t_generators=[make_generator(self.seed, "timestep", epoch, item.uid) for item in mine],
            quantiles=[(self._first_quantile + n * GOLDEN) % 1 for n in range(first + rank, first + len(items), world)],
            cond=self.family.collate(conds),
            uids=[item.uid for item in mine],
            paths=[item.placed.example.path for item in mine],
            captions=captions,
            flipped=flips,
            bucket_wh=mine[0].placed.placement.bucket_wh,
            weights=[self.section.folders[item.placed.example.folder_index].weight for item in mine],
            total=len(items),
            step=step,
            micro_index=micro_index,
            epoch=epoch,
            mask_BHW=_stack_masks(masks, latents[0].shape[-2:]),
            regularization=[self.section.folders[item.placed.example.folder_index].regularization for item in mine],
            class_captions=class_captions,
            class_cond=class_cond,
        )

    def _make_class_part(
        self, images: Sequence[Placed], captions: Sequence[str], flips: Sequence[bool]
    ) -> tuple[list[str], dict[str, Tensor] | None]:
        """Return the captions with the class word, and their conditioning; None if it changes none of them."""
        triggers, word = self.section.triggers, self.section.class_word
        replaced = [with_class_word(caption, triggers, word) for caption in captions]
        if replaced == list(captions):
            return replaced, None
        used = zip(images, replaced, flips, strict=True)
        return replaced, self.family.collate(
            [self._collect_cond(image, text, flipped) for image, text, flipped in used]
        )

    def _draw_chance(self, purpose: str, epoch: int, uid: str) -> float:
        """Draw a uniform number in [0, 1)."""
        return torch.rand((), generator=make_generator(self.seed, purpose, epoch, uid), dtype=torch.float64).item()

    def _is_flipped(self, epoch: int, uid: str) -> bool:
        return self.section.flip and self._draw_chance("flip", epoch, uid) < 0.5

    def _choose_variant(self, epoch: int, item: Item) -> Placed:
        if not self.section.varies_images:
            return item.placed
        number = int(self._draw_chance("image_variant", epoch, item.uid) * self.section.image_variants)
        return draw_variant(item.placed, self.section, number) if number else item.placed

    def _choose_caption(self, epoch: int, item: Item) -> str:
        caption = item.placed.example.caption
        if self._draw_chance("caption_dropout", epoch, item.uid) < self.section.caption_dropout:
            return ""
        if not self.section.varies_captions:
            return draw_caption_variant(caption, 0, self.section, self.seed)
        variant = int(self._draw_chance("shuffle_variant", epoch, item.uid) * self.section.caption_variants)
        return draw_caption_variant(caption, variant, self.section, self.seed)

    def _collect_cond(self, placed: Placed, caption: str, flipped: bool) -> dict[str, Tensor]:
        """Return the caption's conditioning and, if the family has it, the image's: sizes, crop and control images."""
        place = placed.placement
        crop = place.flipped_crop_top_left if flipped else place.crop_top_left
        cond = self.cache.read_cond(self.cache.make_prompt(caption, self.cache.list_control_crops(placed), flipped))
        image_cond = self.family.make_image_conditioning(place.original_hw, crop, place.target_hw)
        image_cond = image_cond | self.cache.read_controls(placed, flipped)
        if twice := cond.keys() & image_cond.keys():
            raise ValueError(f"family {self.family.name}: {sorted(twice)} come from both the prompt and the image")
        return cond | image_cond


def _stack_masks(masks: Sequence[Tensor | None], size: torch.Size) -> Tensor | None:
    """Stack masks to (B, H, W), with ones for an image without a mask; return None if no image has one."""
    if all(mask is None for mask in masks):
        return None
    return torch.stack([torch.ones(size) if mask is None else mask.to(torch.float32) for mask in masks])
