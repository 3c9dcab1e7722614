"""Variants of images: what of the image each shows, that masks and control images follow, and which are drawn."""

import hashlib
import math
import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from lora_fp8.data import buckets, image_variants, images
from lora_fp8.data import cache as caching
from lora_fp8.data.buckets import Change, Placed
from lora_fp8.data.cache import Cache
from lora_fp8.data.image_variants import disable_image_variants, draw_variant, list_variants, move_crop
from lora_fp8.data.loader import Loader
from lora_fp8.plan import plan as planning
from lora_fp8.settings import Dataset

ALL = {"random_crop": True, "zoom": 0.6, "rotate": 30.0, "color_jitter": 0.2, "image_variants": 8}


def placed_at(size: tuple[int, int], sha256: str = "abc", **more: bool) -> Placed:
    example = SimpleNamespace(image_sha256=sha256, uid=f"0/{sha256}.png", frames=(), mask=None)
    return Placed(example, buckets.place(size, 128, 8, **more))


def random_sizes(count: int) -> list[tuple[int, int]]:
    draw = random.Random(0)
    return [(draw.randint(40, 900), draw.randint(40, 900)) for _ in range(count)]


def test_no_variant_leaves_the_image():
    """A white image stays white: PIL fills what lies outside with black, and two pixels around it are blended."""
    for number, size in enumerate(random_sizes(60)):
        placed = placed_at(size, str(number))
        section = Dataset(random_crop=number % 2 == 0, zoom=0.5 * (number % 3), rotate=45.0 * (number % 4) / 3)
        for variant in list_variants(placed, section.model_copy(update={"image_variants": 5, "color_jitter": 0.0})):
            shown = buckets.fit(Image.new("RGB", size, "white"), variant.placement, variant.change)
            assert shown.size == placed.placement.bucket_wh
            assert np.asarray(shown).min() == 255, (size, variant)
            left, top, right, bottom = variant.placement.box
            assert 0 <= left < right <= variant.placement.resized_wh[0]
            assert 0 <= top < bottom <= variant.placement.resized_wh[1]


def test_random_crops_stay_around_the_mask():
    """Each version shows the white part, or where that is larger than the crop nothing but it; places still vary."""
    mask = SimpleNamespace(white=(0.7, 0.1, 0.95, 0.3))
    example = SimpleNamespace(image_sha256="abc", uid="0/abc.png", frames=(), mask=mask)
    section = Dataset(random_crop=True, zoom=1.0, image_variants=32, follow_mask=True)
    versions = list_variants(Placed(example, buckets.place((300, 200), 64, 8, buckets=False)), section)[1:]
    for version in versions:
        left, top, right, bottom = version.placement.box
        width, height = version.placement.resized_wh
        for begin, end, ends in (
            (left, right, (0.7 * width, 0.95 * width)),
            (top, bottom, (0.1 * height, 0.3 * height)),
        ):
            assert begin <= ends[0] and ends[1] <= end or ends[0] - 1 <= begin and end <= ends[1] + 1
    assert len({version.placement.crop_xy for version in versions}) > 20
    free = list_variants(Placed(example, versions[0].usual), section.model_copy(update={"follow_mask": False}))[1:]
    assert any(version.placement.crop_xy[0] == 0 or not version.placement.shows(mask.white) for version in free)


@pytest.mark.parametrize("angle", [0.0, 12.0, -33.0, 45.0])
@pytest.mark.parametrize("where", [(0.0, 0.0), None, (0.9, 0.2)])
def test_a_variant_shows_the_part_that_its_placement_names(angle: float, where: tuple[float, float] | None):
    """Interpolation keeps a linear ramp, so each pixel must have the ramp's value at the place it is taken from."""
    width, height = 300, 200
    ramp_y, ramp_x = np.mgrid[0:height, 0:width] + 0.5
    usual = buckets.place((width, height), 96, 8)
    placement = move_crop(usual, 1.3, angle, where)
    scale_x, scale_y = placement.resized_wh[0] / width, placement.resized_wh[1] / height
    assert scale_x == pytest.approx(scale_y, rel=0.01)
    for ramp, along in ((ramp_x, "x"), (ramp_y, "y")):
        picture = Image.fromarray((ramp * 0.8).astype(np.float32), mode="F")
        shown = np.asarray(buckets.fit(picture, placement, Change(angle)))
        left, top, right, bottom = placement.box
        y, x = np.mgrid[top:bottom, left:right] + 0.5
        centre_x, centre_y = (left + right) / 2, (top + bottom) / 2
        sine, cosine = math.sin(math.radians(angle)), math.cos(math.radians(angle))
        # Counterclockwise, with y downwards: what is shown at the right comes from further down.
        from_x = centre_x + cosine * (x - centre_x) - sine * (y - centre_y)
        from_y = centre_y + sine * (x - centre_x) + cosine * (y - centre_y)
        wanted = (from_x / scale_x if along == "x" else from_y / scale_y) * 0.8
        inner = (slice(4, -4), slice(4, -4))
        assert np.abs(shown - wanted)[inner].max() < 0.35, along


def test_the_crop_is_in_the_middle_or_anywhere():
    placed = placed_at((640, 300))
    middles, anywhere = (
        [variant.placement for variant in list_variants(placed, Dataset(zoom=0.5, image_variants=64, random_crop=how))]
        for how in (False, True)
    )
    for placement in middles:
        free = [side - size for side, size in zip(placement.resized_wh, placement.bucket_wh, strict=True)]
        assert all(abs(at - room / 2) <= 1 for at, room in zip(placement.crop_xy, free, strict=True))
    places = [
        placement.crop_xy[axis] / (placement.resized_wh[axis] - placement.bucket_wh[axis])
        for placement in anywhere[1:]
        for axis in (0, 1)
        if placement.resized_wh[axis] > placement.bucket_wh[axis]
    ]
    assert min(places) < 0.1 and max(places) > 0.9 and 0.4 < np.mean(places) < 0.6
    scales = [placement.resized_wh[0] / placed.placement.resized_wh[0] for placement in middles]
    assert scales[0] == 1 and min(scales) >= 1 and 1.4 < max(scales) <= 1.51 and 1.15 < np.mean(scales) < 1.35


def test_nothing_is_enlarged_where_the_job_says_so():
    section = Dataset(zoom=2.0, upscale=False, image_variants=32)
    for size in ((160, 160), (300, 200), (128, 128)):
        placed = placed_at(size, upscale=False)
        for variant in list_variants(placed, section):
            assert variant.placement.resized_wh[0] <= size[0] + 1 and variant.placement.resized_wh[1] <= size[1] + 1


def test_colours_are_changed_as_pillow_changes_them():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8))
    section = Dataset(color_jitter=0.3, image_variants=40)
    placed = placed_at(image.size)
    factors = []
    for variant in list_variants(placed, section)[1:]:
        brightness, contrast, saturation = variant.change.colour
        wanted = ImageEnhance.Brightness(image).enhance(brightness)
        wanted = ImageEnhance.Color(ImageEnhance.Contrast(wanted).enhance(contrast)).enhance(saturation)
        assert np.array_equal(buckets.fit(image, variant.placement, variant.change), wanted)
        assert variant.placement == placed.placement and not variant.change.angle
        factors += variant.change.colour
    assert 0.7 <= min(factors) < 0.75 and 1.25 < max(factors) <= 1.3


def test_variants_depend_on_the_image_and_their_number_alone():
    section = Dataset(**ALL)
    first = list_variants(placed_at((300, 200)), section)
    assert first[0] == placed_at((300, 200)) and len(set(map(str, first))) == 8
    assert list_variants(placed_at((300, 200)), section.model_copy(update={"image_variants": 3})) == first[:3]
    assert [draw_variant(placed_at((300, 200)), section, number) for number in range(1, 8)] == first[1:]
    other = list_variants(placed_at((300, 200), "other"), section)
    assert not {variant.placement for variant in other[1:]} & {variant.placement for variant in first[1:]}
    # One setting leaves what the others give.
    uncoloured = list_variants(placed_at((300, 200)), section.model_copy(update={"color_jitter": 0.0}))
    assert [variant.placement for variant in uncoloured] == [variant.placement for variant in first]
    assert (
        list_variants(first[0], Dataset(image_variants=8))
        == [first[0]]
        == list_variants(first[0], disable_image_variants(section))
    )


class Family:
    """Encoders that give the pixels themselves."""

    name = "fake"
    dtype = torch.float32
    prompts_see_controls = False

    def compute_encoder_identity(self, what):
        return what

    def encode_images(self, pixels_BCHW):
        return pixels_BCHW

    def encode_prompts(self, prompts, pictures=None):
        return [{"embeds": torch.zeros(1)} for _ in prompts]

    def make_image_conditioning(self, original, crop, target):
        return {"time_ids": torch.tensor([*original, *crop, *target])}

    def collate(self, conds):
        return {name: torch.stack([cond[name] for cond in conds]) for name in conds[0]}

    def encode_in_turn(self, asks):
        yield from enumerate(ask() for ask in asks)

    def compute_control_size(self, width, height, resolution):
        return width // 8 * 8, height // 8 * 8

    def find_overlong(self, texts):
        return []

    def load_vae(self):
        pass

    free_encoders = load_vae


def smooth(size: tuple[int, int], seed: int) -> Image.Image:
    """Return a picture without edges, which interpolation hardly changes."""
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path):
    """Three images; the mask of each is its own red, and its control image is itself."""
    for name in ("set", "control", "mask"):
        (tmp_path / name).mkdir()
    for number, size in enumerate([(200, 150), (120, 240), (400, 400)]):
        picture = smooth(size, number)
        picture.save(tmp_path / "set" / f"{number}.png")
        picture.save(tmp_path / "control" / f"{number}.png")
        picture.getchannel(0).save(tmp_path / "mask" / f"{number}.png")
        (tmp_path / "set" / f"{number}.txt").write_text(f"picture {number}", encoding="utf-8")
    return tmp_path


def filled(folder, **more):
    table = {"path": str(folder / "set"), "control": str(folder / "control"), "mask": str(folder / "mask")}
    section = Dataset.model_validate({"folders": [table], **more})
    examples = images.scan(section, num_controls=(1, 1)).require()
    placed = buckets.assign(examples, section, resolution=64, step=8)
    variants = [variant for image in placed for variant in list_variants(image, section)]
    cache = Cache(folder / "cache", Family(), section)
    report = cache.fill(variants, [example.caption for example in examples])
    return cache, section, placed, report


def test_masks_and_control_images_follow_the_image(folder):
    cache, section, placed, _ = filled(folder, **ALL)
    for image in placed:
        sizes = {tuple(control.size for control in cache.list_control_crops(v)) for v in list_variants(image, section)}
        assert len(sizes) == 1  # they share their batches
        for variant in list_variants(image, section):
            for flipped in (False, True) if section.flip else (False,):
                picture, mask = cache.read_latents(variant, flipped), cache.read_mask(variant, flipped)
                (control,) = cache.read_controls(variant, flipped).values()
                plain = buckets.fit(Image.open(image.example.path), variant.placement, Change(variant.change.angle))
                red = torch.from_numpy(np.asarray(plain, dtype=np.float32)[..., 0]) / 255
                assert (mask - red).abs().max() < 0.06, variant
                assert picture.shape[1:] == mask.shape
                control = torch.nn.functional.interpolate(control[None], size=picture.shape[1:], mode="bilinear")[0]
                gap = (control - picture).abs()[:, 4:-4, 4:-4]
                assert gap.mean() < 0.03 and gap.max() < 0.2, (variant, gap.max())


def test_the_cache_holds_each_variant_once_and_the_image_under_its_old_key(folder):
    cache, _, placed, report = filled(folder)
    keys = [cache.make_image_key(image, False) for image in placed]
    assert report.encoded == 3 * 3 + 3  # image, control, mask; caption
    more, section, same_images, report = filled(folder, **ALL)
    assert [more.make_image_key(image, False) for image in same_images] == keys
    assert (report.encoded, report.reused) == (3 * 3 * 7, 12)
    _, _, _, report = filled(folder, color_jitter=0.3, image_variants=4)
    assert (report.encoded, report.reused) == (3 * 2 * 3, 12)  # masks have no colours
    # A square image that is not zoomed has one crop: variants that show the same are one entry.
    plain = section.model_copy(update={"zoom": 0.0, "rotate": 0.0, "color_jitter": 0.0})
    square = next(image for image in placed if image.example.width == 400)
    assert len({more.make_image_key(variant, False) for variant in list_variants(square, plain)}) == 1


def test_an_image_is_decoded_once_for_all_its_variants(folder, monkeypatch):
    decoded = Counter()
    original = caching.open_image

    def count(raw, *arguments):
        decoded[hashlib.sha256(raw.getvalue()).hexdigest()] += 1
        return original(raw, *arguments)

    monkeypatch.setattr(caching, "open_image", count)
    cache, _, _, report = filled(folder, **ALL, flip=True)
    assert report.encoded == 3 * 3 * 8 * 2 + 3 and set(decoded.values()) == {2}  # as an image, and as a control image
    assert cache._image is None


def test_samples_draw_variants_evenly_and_their_conditioning_tells_the_crop(folder):
    cache, section, placed, _ = filled(folder, **(ALL | {"image_variants": 4}))
    loader = Loader(buckets.group(placed), cache, cache.family, section, seed=3, batch_size=2)
    again = Loader(buckets.group(placed), cache, cache.family, section, seed=3, batch_size=1)
    known = {cache.make_image_key(v, False): (image, v) for image in placed for v in list_variants(image, section)}
    latents = {key: cache.read_latents(variant, False) for key, (_, variant) in known.items()}
    drawn = Counter()
    by_uid = {}
    for micro in range(loader.batches_per_epoch * 80):
        batch = loader.take_batch(micro, micro)
        for row, uid in enumerate(batch.uids):
            (key,) = [k for k, tensor in latents.items() if torch.equal(tensor, batch.latents_BCHW[row].cpu())]
            image, variant = known[key]
            assert image.example.path == batch.paths[row]
            assert batch.cond["time_ids"][row].tolist()[2:4] == list(variant.placement.crop_top_left)
            assert torch.equal(batch.mask_BHW[row], cache.read_mask(variant, False))
            assert torch.equal(batch.cond["control_0"][row], cache.read_controls(variant, False)["control_0"])
            drawn[list_variants(image, section).index(variant)] += 1
            by_uid[batch.epoch, uid] = key
    assert sum(drawn.values()) == 240 and all(40 <= drawn[number] <= 85 for number in range(4))
    for micro in range(again.batches_per_epoch * 3):  # neither the batch size nor the order decides
        batch = again.take_batch(micro, micro)
        assert torch.equal(batch.latents_BCHW[0], latents[by_uid[batch.epoch, batch.uids[0]]])
    plain = Loader(buckets.group(placed), cache, cache.family, disable_image_variants(section), seed=3, batch_size=1)
    for micro in range(plain.batches_per_epoch * 3):
        batch = plain.take_batch(micro, micro)
        (image,) = [image for image in placed if image.example.path == batch.paths[0]]
        assert torch.equal(batch.latents_BCHW[0], cache.read_latents(image, False))


def test_held_out_images_are_measured_as_they_are(job):
    plan = planning.make(
        job("validation.every=2", "validation.pictures=2", "dataset.zoom=0.5", "dataset.image_variants=3")
    )
    held_out = {example.path for example in plan.images.held_out}
    counts = Counter(image.example.path for image in plan.images.placed)
    assert held_out and {counts[path] for path in held_out} == {1}
    assert {count for path, count in counts.items() if path not in held_out} == {3}


def test_the_room_that_a_turned_crop_needs():
    """The rectangle around the turned crop, from its corners."""
    for width, height, angle in ((96, 64, 30.0), (64, 128, -45.0), (8, 8, 5.0), (128, 128, 0.0)):
        turn = np.array(
            [
                [math.cos(math.radians(angle)), -math.sin(math.radians(angle))],
                [math.sin(math.radians(angle)), math.cos(math.radians(angle))],
            ]
        )
        corners = turn @ np.array([[-width, width, width, -width], [-height, -height, height, height]]) / 2
        wanted = np.ptp(corners, axis=1)
        assert image_variants._measure_turned((width, height), angle) == pytest.approx(wanted, abs=1e-9)
