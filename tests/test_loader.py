"""The loader: conservation of samples, and that what a sample sees depends on itself, the epoch and the seed alone."""

import hashlib
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lora_fp8.data import buckets
from lora_fp8.data.caption_variants import draw_caption_variant, list_dataset_captions
from lora_fp8.data.loader import Loader, make_epoch_batches, make_generator
from lora_fp8.errors import UserError
from lora_fp8.settings import Dataset, Folder

SIZES = [(64, 64)] * 7 + [(128, 64)] * 4 + [(64, 130)] * 2


@dataclass(frozen=True)
class FakeExample:
    index: int
    width: int
    height: int
    repeats: int = 1
    frames: tuple[int, ...] = ()
    folder_index: int = 0
    mask: None = None

    @property
    def uid(self):
        return f"0/{self.index}.png"

    @property
    def path(self):
        return Path(f"{self.index}.png")

    @property
    def caption(self):
        return f"sks, one, two, three, four, image {self.index}"


class FakeCache:
    """Latents that say which image and which side they show, and conditioning that says which text."""

    def __init__(self, captions=()):
        self.captions = set(captions)

    def read_latents(self, placed, flipped):
        width, height = placed.placement.bucket_wh
        return torch.full((4, height // 8, width // 8), placed.example.index + (0.5 if flipped else 0.0))

    def read_cond(self, caption):
        assert not self.captions or caption in self.captions, f"{caption!r} was never encoded"
        return {"embeds": torch.tensor([float(len(caption)), float(hash(caption) % 1000)])}

    def list_control_crops(self, placed):
        return ()

    def make_prompt(self, text, shown, flipped):
        return text

    def read_controls(self, placed, flipped):
        return {}

    def read_mask(self, placed, flipped):
        return None


FAMILY = SimpleNamespace(
    name="fake",
    make_image_conditioning=lambda original, crop, target: {"time_ids": torch.tensor([*original, *crop, *target])},
    collate=lambda conds: {name: torch.stack([cond[name] for cond in conds]) for name in conds[0]},
)


def make(batch_size=2, seed=0, sizes=SIZES, repeats=(1,), cache=None, **settings):
    section = Dataset(folders=[Folder(path="set", weight=0.5)], **settings)
    examples = [FakeExample(i, w, h, repeats[i % len(repeats)]) for i, (w, h) in enumerate(sizes)]
    placed = buckets.group(buckets.assign(examples, section, resolution=64, step=8))
    return Loader(placed, cache or FakeCache(), FAMILY, section, seed, batch_size), examples


def seen(loader, epoch, world=1):
    """What each sample of an epoch sees, by uid, gathered from all ranks."""
    found = {}
    for micro in range(epoch * loader.batches_per_epoch, (epoch + 1) * loader.batches_per_epoch):
        for rank in range(world):
            batch = loader.take_batch(99, micro, rank, world)
            for i in range(len(batch) if batch else 0):
                assert batch.uids[i] not in found
                found[batch.uids[i]] = (
                    batch.latents_BCHW[i],
                    batch.noise_BCHW[i],
                    torch.rand(3, generator=batch.t_generators[i]),
                    batch.cond["embeds"][i],
                    batch.cond["time_ids"][i],
                    batch.captions[i],
                    batch.flipped[i],
                )
    return found


def same(one, other):
    return one.keys() == other.keys() and all(
        all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one[u], other[u], strict=True))
        for u in one
    )


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_sample_is_seen_its_repeats_an_epoch(batch_size, world):
    loader, examples = make(batch_size, repeats=(1, 3))
    expected = {example.uid: example.repeats for example in examples}
    for epoch in range(3):
        counts, totals = Counter(), 0
        for micro in range(epoch * loader.batches_per_epoch, (epoch + 1) * loader.batches_per_epoch):
            shares = [loader.take_batch(1, micro, rank, world) for rank in range(world)]
            sizes = [len(share) if share else 0 for share in shares]
            assert sum(sizes) == loader.count_samples(micro) <= batch_size and max(sizes) - min(sizes) <= 1
            totals += loader.count_samples(micro)
            for share in filter(None, shares):
                assert (
                    share.weights == [0.5] * len(share)
                    and share.total == loader.count_samples(micro)
                    and share.epoch == epoch
                    and share.micro_index == micro
                )
                counts.update(uid.split("#")[0] for uid in share.uids)
                assert len({latents_CHW.shape for latents_CHW in share.latents_BCHW}) == 1
                assert share.latent_hw == (share.bucket_wh[1] // 8, share.bucket_wh[0] // 8)
        assert counts == expected and totals == loader.samples_per_epoch == sum(expected.values())


def test_repeats_need_not_be_whole():
    """Each image as often as its repeats say, to within one; each epoch as long as the others, to within one sample."""
    sizes = SIZES * 3
    for repeats, batch_size in ((0.5, 2), (2.5, 3), (0.3, 1), (1.25, 100), (0.04, 2)):
        loader, examples = make(batch_size, sizes=sizes, repeats=(repeats,))
        counts, epochs, micro = Counter(), 100, 0
        lengths, ends = Counter(), []
        while (position := loader.find_position(micro))[0] < epochs:
            items = loader.list_batch_items(micro)
            assert 0 < len(items) <= batch_size and len({item.placed.bucket for item in items}) == 1
            epoch = position[0]
            uids = [item.uid for item in items]
            assert position == loader.find_position(micro) and len(set(uids)) == len(uids)
            counts.update(item.placed.example.uid for item in items)
            lengths[epoch] += len(items)
            ends.append(epoch)
            micro += 1
        assert ends == sorted(ends), "the epochs follow each other"
        exact = len(examples) * repeats
        assert all(exact - 1 < lengths[epoch] < exact + 1 for epoch in range(epochs))
        assert all(epochs * repeats - 1 < counts[example.uid] < epochs * repeats + 1 for example in examples)
        assert loader.samples_per_epoch == pytest.approx(exact)
        assert micro == pytest.approx(epochs * loader.batches_per_epoch), "the pattern repeats within 100 epochs"
        fresh = make(batch_size, sizes=sizes, repeats=(repeats,))[0]
        assert fresh.find_position(micro - 1) == loader.find_position(micro - 1), (
            "a resumed run finds its place at once"
        )
        assert fresh.list_batch_items(micro - 1) == loader.list_batch_items(micro - 1)
        other = make(batch_size, seed=1, sizes=sizes, repeats=(repeats,))[0]
        first = [{item.uid for items in part.group_items(0).values() for item in items} for part in (loader, other)]
        assert first[0] != first[1], "which images come first is drawn from the seed"


def test_the_heaviest_batch_is_found_in_whichever_epoch_it_is():
    loader, examples = make(4, sizes=[(64, 64)] * 9 + [(192, 64)], repeats=(1,) * 9 + (0.125,))
    wide = examples[-1].uid
    heaviest = loader.find_heaviest(lambda placed: 1000 if placed.example.uid == wide else 1)
    assert [item.placed.example.uid for item in loader.list_batch_items(heaviest)] == [wide]
    assert loader.find_position(heaviest)[0] == 3, "in the middle of its eight epochs"


def test_the_fewest_repeats_give_a_batch_now_and_then():
    loader, _ = make(2, sizes=[(64, 64)], repeats=(0.01,))
    assert loader.batches_per_epoch == 0.01 and loader.count_epoch_batches(0) == 0
    assert [loader.find_position(micro) for micro in range(2)] == [(49, 0), (149, 0)]
    assert loader.find_heaviest(lambda placed: 1) == 0 and len(loader.take_batch(1, 0)) == 1


def test_a_rank_without_samples_gets_none_and_still_knows_the_total():
    loader, _ = make(batch_size=1)
    assert loader.take_batch(1, 0, 0, 2) is not None and loader.take_batch(1, 0, 1, 2) is None
    assert loader.count_samples(0) == 1


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_what_a_sample_sees_depends_on_neither_batch_nor_process(batch_size, world):
    settings = {"repeats": (1, 2), "flip": True, "caption_dropout": 0.3, "shuffle_tags": True, "tag_dropout": 0.4}
    reference = seen(make(2, **settings)[0], epoch=1)
    assert same(reference, seen(make(batch_size, **settings)[0], epoch=1, world=world))


def test_what_a_sample_sees_does_not_depend_on_the_rest_of_the_dataset():
    settings = {"flip": True, "caption_dropout": 0.3, "shuffle_tags": True}
    all_of_them = seen(make(2, **settings)[0], epoch=0)
    fewer = seen(make(2, sizes=SIZES[:5], **settings)[0], epoch=0)
    assert len(fewer) == 5 and same(fewer, {uid: all_of_them[uid] for uid in fewer})


def test_any_micro_batch_can_be_asked_for_in_any_order():
    loader, _ = make(3, flip=True)
    last = 6 * loader.batches_per_epoch
    forward = [loader.take_batch(1, m) for m in range(last)]
    fresh, _ = make(3, flip=True)
    order = list(range(last))
    random.Random(0).shuffle(order)
    for micro in order:
        batch = fresh.take_batch(1, micro)
        assert batch.uids == forward[micro].uids and torch.equal(batch.noise_BCHW, forward[micro].noise_BCHW)
        assert fresh.find_position(micro) == divmod(micro, fresh.batches_per_epoch)


def test_a_prepared_batch_is_the_one_that_would_be_made_and_is_given_once(monkeypatch):
    loader, _ = make(3, flip=True)
    plain = loader.take_batch(2, 1)
    loader.prepare(2, 1)
    monkeypatch.setattr(loader.cache, "read_latents", lambda *_: pytest.fail("it was made already"))
    batch = loader.take_batch(2, 1)
    monkeypatch.undo()
    assert batch.uids == plain.uids and torch.equal(batch.noise_BCHW, plain.noise_BCHW)
    drawn = [torch.rand(3, generator=given.t_generators[0]) for given in (plain, batch, loader.take_batch(2, 1))]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])
    loader.prepare(2, 1)
    assert (
        loader.take_batch(2, 2).uids == make(3, flip=True)[0].take_batch(2, 2).uids
    )  # another one is asked for instead


def test_epochs_seeds_and_repeats_differ():
    loader, _ = make(2, repeats=(2,))
    first, second = seen(loader, 0), seen(loader, 1)
    other = seen(make(2, repeats=(2,), seed=1)[0], 0)
    noises = [value[1].flatten()[:4].tolist() for found in (first, second, other) for value in found.values()]
    times = [value[2].tolist() for found in (first, second, other) for value in found.values()]
    assert len({tuple(noise) for noise in noises}) == len(noises) == 3 * 26
    assert len({tuple(time) for time in times}) == len(times)
    orders = [
        [item.uid for m in range(9) for item in loader.list_batch_items(e * loader.batches_per_epoch + m)]
        for e in (0, 1)
    ]
    assert orders[0] != orders[1]


def test_a_dataset_of_one_never_sees_the_same_noise_twice():
    """With accumulation a small dataset shows one image several times within one optimizer step."""
    loader, _ = make(1, sizes=[(64, 64)])
    noises = [loader.take_batch(1, micro).noise_BCHW for micro in range(50)]
    assert len({tuple(noise.flatten()[:4].tolist()) for noise in noises}) == 50


def test_noise_is_standard_normal_and_purposes_are_independent():
    loader, _ = make(4, sizes=[(64, 64)] * 40)
    found = seen(loader, 0)
    noise = torch.cat([value[1].flatten() for value in found.values()])
    assert noise.dtype == torch.float32 and abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05
    draws = [
        torch.rand(1000, generator=make_generator(0, purpose, 0, "0/1.png#0")) for purpose in ("noise", "timestep")
    ]
    assert abs(torch.corrcoef(torch.stack(draws))[0, 1]) < 0.15


def test_generator_is_seeded_as_documented():
    seed = int.from_bytes(hashlib.sha256(b"noise|7|3|0/a.png#1").digest()[:8], "big") >> 1
    expected = torch.rand(5, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(torch.rand(5, generator=make_generator(7, "noise", 3, "0/a.png#1")), expected)


def test_flips_are_about_half_and_reach_latents_and_conditioning():
    loader, examples = make(4, sizes=[(66, 64)] * 30 + [(65, 64)] * 30, flip=True)
    found = {}
    for epoch in range(4):
        found |= {(epoch, uid): value for uid, value in seen(loader, epoch).items()}
    flips = [value[6] for value in found.values()]
    assert 80 < sum(flips) < 160
    for (_, uid), value in found.items():
        example = examples[int(uid.split("/")[1].split(".")[0])]
        assert value[0].unique().tolist() == [example.index + (0.5 if value[6] else 0.0)]
        # 65 wide is cut by one pixel on the right, which is the left one of its mirror image.
        left = 1 if (example.width == 66 or value[6]) else 0
        assert value[4].tolist() == [64, example.width, 0, left, 64, 64]
    assert not any(value[6] for value in seen(make(4)[0], 0).values())


def test_captions_are_dropped_and_shuffled_as_asked_and_always_encoded():
    settings = {"caption_dropout": 0.25, "shuffle_tags": True, "caption_variants": 5, "keep_tokens": 1}
    section = Dataset(folders=[Folder(path="set", weight=0.5)], **settings)
    sizes = [(64, 64)] * 60
    texts = list_dataset_captions([FakeExample(i, 64, 64) for i in range(60)], section, 3)
    loader, examples = make(4, seed=3, sizes=sizes, cache=FakeCache(texts), **settings)
    shown = [value[5] for epoch in range(5) for value in seen(loader, epoch).values()]
    assert 45 < shown.count("") < 105
    variants = Counter()
    for epoch in range(5):
        for uid, value in seen(loader, epoch).items():
            example = examples[int(uid.split("/")[1].split(".")[0])]
            options = [draw_caption_variant(example.caption, v, section, 3) for v in range(5)]
            if value[5]:
                variants[options.index(value[5])] += 1
    assert set(variants) == set(range(5)) and min(variants.values()) > 20
    assert {value[5] for value in seen(make(4, caption_dropout=1.0)[0], 0).values()} == {""}
    plain, examples = make(4)
    assert {value[5] for value in seen(plain, 0).values()} == {example.caption for example in examples}


def test_a_mark_around_fixed_tags_is_not_asked_for_where_nothing_is_shuffled(monkeypatch):
    monkeypatch.setattr(FakeExample, "caption", property(lambda self: f"sks ||| picture {self.index}"), raising=False)
    section = Dataset(folders=[Folder(path="set")], keep_separator="|||")
    texts = list_dataset_captions([FakeExample(i, 64, 64) for i in range(12)], section, 3)
    loader, _ = make(4, seed=3, sizes=[(64, 64)] * 12, cache=FakeCache(texts), keep_separator="|||")
    assert {value[5] for value in seen(loader, 0).values()} == {f"sks, picture {i}" for i in range(12)} == set(texts)


def test_conditioning_names_that_collide_are_an_error():
    family = SimpleNamespace(name="odd", make_image_conditioning=lambda *args: {"embeds": torch.zeros(1)}, collate=None)
    loader, _ = make()
    loader.family = family
    with pytest.raises(ValueError, match="odd.*embeds"):
        loader.take_batch(1, 0)


def test_no_examples_is_the_users_error():
    with pytest.raises(UserError, match="no examples"):
        make(sizes=[])


def test_no_global_random_state_is_touched():
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    loader, _ = make(3, flip=True, caption_dropout=0.5, shuffle_tags=True)
    seen(loader, 0)
    assert random.getstate() == states[0]
    assert all(np.array_equal(now, then) for now, then in zip(np.random.get_state(), states[1], strict=True))
    assert torch.equal(torch.get_rng_state(), states[2])
    # And the other way round: the loader does not read it.
    reference = seen(loader, 1)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert same(reference, seen(make(3, flip=True, caption_dropout=0.5, shuffle_tags=True)[0], 1))


def test_batches_of_an_epoch():
    items = {(64, 64): list("abcdefg"), (80, 48): list("xyz")}
    for epoch in range(20):
        batches = make_epoch_batches(items, 3, seed=1, epoch=epoch)
        assert sorted(map(len, batches)) == [1, 3, 3, 3]
        assert all(set(batch) <= set("abcdefg") or set(batch) <= set("xyz") for batch in batches)
        assert sorted(item for batch in batches for item in batch) == list("abcdefgxyz")
        assert batches == make_epoch_batches(dict(reversed(items.items())), 3, seed=1, epoch=epoch)
    # Batches and items are both shuffled: the partial batch comes at every place, with every item in it.
    many = [make_epoch_batches(items, 3, seed=1, epoch=epoch) for epoch in range(60)]
    assert {[len(batch) for batch in batches].index(1) for batches in many} == {0, 1, 2, 3}
    assert {batch[0] for batches in many for batch in batches if len(batch) == 1} == set("abcdefg")


def test_to_moves_tensors_and_keeps_the_rest():
    batch = make(3)[0].take_batch(4, 0)
    moved = batch.to("meta")
    assert {moved.latents_BCHW.device.type, moved.noise_BCHW.device.type, moved.cond["embeds"].device.type} == {"meta"}
    assert (moved.uids, moved.step, batch.latents_BCHW.device.type) == (batch.uids, 4, "cpu")


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_even_quantiles_go_round_by_the_golden_ratio_whatever_the_processes(batch_size, world):
    """One after another over the epochs, each further by the golden ratio; a third epoch can be asked for alone."""
    loader, _ = make(batch_size)

    def quantiles(loader, epoch):
        count = loader.batches_per_epoch
        for index in range(epoch * count, (epoch + 1) * count):
            shares = [loader.take_batch(0, index, rank, world) for rank in range(world)]
            lists = [share.quantiles if share else [] for share in shares]
            yield from (lists[n % world][n // world] for n in range(loader.count_samples(index)))

    drawn = [quantile for epoch in range(3) for quantile in quantiles(loader, epoch)]
    assert len(drawn) == 3 * loader.samples_per_epoch and 0 <= min(drawn) and max(drawn) < 1
    steps = np.diff(drawn) % 1
    np.testing.assert_allclose(steps, (5**0.5 - 1) / 2, atol=1e-9)
    assert list(quantiles(make(batch_size)[0], 2)) == drawn[2 * loader.samples_per_epoch :]
    assert next(quantiles(make(batch_size, seed=1)[0], 0)) != drawn[0]
