"""Buckets: the rule's bounds as properties over many sizes, and crops against arithmetic and Pillow."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from lora_fp8 import settings
from lora_fp8.data import buckets
from lora_fp8.errors import UserError

SETTINGS = [
    (512, 64, 2.0),
    (1024, 64, 2.0),
    (1024, 32, 4.0),
    (768, 8, 1.5),
    (64, 8, 2.0),
    (500, 64, 2.0),
    (512, 16, 1.0),
]


def random_sizes(count: int, low: int = 20, high: int = 5000) -> list[tuple[int, int]]:
    rng = random.Random(0)
    draw = lambda: int(math.exp(rng.uniform(math.log(low), math.log(high))))  # noqa: E731
    return [(draw(), draw()) for _ in range(count)]


@pytest.mark.parametrize(("resolution", "step", "max_aspect"), SETTINGS)
def test_bucket_sides_area_and_aspect(resolution, step, max_aspect):
    sizes = buckets.list_bucket_sizes(resolution, step, max_aspect)
    square = resolution // step * step
    assert (square, square) in sizes
    assert len(set(sizes)) == len(sizes)
    assert {(height, width) for width, height in sizes} == set(sizes)
    for width, height in sizes:
        assert width % step == 0 and height % step == 0 and width > 0 and height > 0
        assert width * height <= resolution**2
        assert max(width / height, height / width) <= max_aspect
        # Close to the area: a side cannot be longer by a step, or three quarters are reached.
        near = width * height >= 0.75 * resolution**2
        assert (
            near or min((width + step) * height, width * (height + step)) > resolution**2 or width == height == square
        )


@pytest.mark.parametrize(("resolution", "step", "max_aspect"), SETTINGS)
def test_no_bucket_is_forgotten(resolution, step, max_aspect):
    """By brute force: every admissible size that could not be a step longer is a bucket."""
    sizes = set(buckets.list_bucket_sizes(resolution, step, max_aspect))
    side = int(resolution * math.sqrt(max_aspect)) + step
    for width in range(step, side, step):
        for height in range(step, side, step):
            tallest = width * height <= resolution**2 < width * (height + step)
            if tallest and max(width / height, height / width) <= max_aspect:
                assert (width, height) in sizes and (height, width) in sizes


def test_known_set():
    assert list(buckets.list_bucket_sizes(512, 64, 2.0)) == [
        (320, 640), (384, 640), (448, 576), (512, 512), (576, 448), (640, 384), (640, 320),
    ]  # fmt: skip


@pytest.mark.parametrize(("resolution", "step", "max_aspect"), SETTINGS)
@pytest.mark.parametrize("upscale", [True, False])
@pytest.mark.parametrize("use_buckets", [True, False])
def test_placement_properties(resolution, step, max_aspect, upscale, use_buckets):
    sizes = buckets.list_bucket_sizes(resolution, step, max_aspect)
    for size in random_sizes(150):
        if not upscale and min(size) < step:
            with pytest.raises(UserError, match="less than one bucket step"):
                buckets.place(size, resolution, step, max_aspect=max_aspect, buckets=use_buckets, upscale=False)
            continue
        p = buckets.place(size, resolution, step, max_aspect=max_aspect, buckets=use_buckets, upscale=upscale)
        (width, height), (resized_width, resized_height), (left, top) = p.bucket_wh, p.resized_wh, p.crop_xy
        assert width % step == height % step == 0 and width * height <= resolution**2
        # The resized image covers the bucket, touching it on one side, and the crop is in its middle.
        assert (
            resized_width >= width and resized_height >= height and (resized_width == width or resized_height == height)
        )
        assert left >= 0 and top >= 0 and left + width <= resized_width and top + height <= resized_height
        assert abs(resized_width - width - 2 * left) <= 1 and abs(resized_height - height - 2 * top) <= 1
        # Its shape is kept to half a pixel.
        scale = max(width / size[0], height / size[1])
        assert (
            abs(resized_width - size[0] * scale) <= 0.5 + 1e-6 and abs(resized_height - size[1] * scale) <= 0.5 + 1e-6
        )
        assert (p.original_hw, p.target_hw, p.crop_top_left) == (size[::-1], (height, width), (top, left))
        assert p.flipped_crop_top_left == (top, resized_width - width - left)
        assert p.upscaled == (scale > 1)
        if not use_buckets:
            assert width == height
        if not upscale:
            assert not p.upscaled
        elif use_buckets:
            distance = lambda b: abs(math.log(size[0] / size[1]) - math.log(b[0] / b[1]))  # noqa: E731, B023
            assert distance(p.bucket_wh) <= min(map(distance, sizes)) + 1e-9


@pytest.mark.parametrize(("resolution", "step", "max_aspect"), SETTINGS)
def test_square_and_mirrored_shapes(resolution, step, max_aspect):
    square = resolution // step * step
    for side in (1, 77, 512, 1000, 3001):
        assert buckets.place((side, side), resolution, step, max_aspect=max_aspect).bucket_wh == (square, square)
    sizes = buckets.list_bucket_sizes(resolution, step, max_aspect)
    for width, height in sizes:
        # A bucket's own shape, in any scale, is cropped nowhere.
        p = buckets.place((3 * width, 3 * height), resolution, step, max_aspect=max_aspect)
        assert (p.bucket_wh, p.resized_wh, p.crop_xy) == ((width, height), (width, height), (0, 0))


def test_aspect_error_is_bounded_by_the_gap_between_buckets():
    sizes = buckets.list_bucket_sizes(1024, 64, 2.0)
    logs = sorted(math.log(width / height) for width, height in sizes)
    gap = max(after - before for before, after in zip(logs, logs[1:], strict=False))
    for size in random_sizes(300):
        aspect = math.log(size[0] / size[1])
        if abs(aspect) <= logs[-1]:
            bucket = buckets.find_nearest_bucket(size, sizes)
            assert abs(aspect - math.log(bucket[0] / bucket[1])) <= gap / 2 + 1e-9


def masked(size: tuple[int, int], white: tuple[float, ...] | None) -> SimpleNamespace:
    mask = SimpleNamespace(white=white) if white else None
    return SimpleNamespace(path="a.png", width=size[0], height=size[1], folder_index=0, mask=mask)


def test_a_crop_follows_the_mask_no_further_than_it_must():
    """Against all places that the crop could have: it shows as much as any, and is the nearest to the middle."""
    draw = random.Random(1)
    section = settings.Dataset(folders=[settings.Folder(path=".")], buckets=False, follow_mask=True)
    for size in random_sizes(80, 60, 400):
        white = tuple(
            side
            for pair in zip(*(sorted((draw.random(), draw.random())) for _ in range(2)), strict=True)
            for side in pair
        )
        (placed,) = buckets.assign([masked(size, white)], section, resolution=64, step=8)
        usual = buckets.place(size, 64, 8, buckets=False)
        assert (placed.placement.resized_wh, placed.placement.bucket_wh) == (usual.resized_wh, usual.bucket_wh)
        for axis in (0, 1):
            side, resized = usual.bucket_wh[axis], usual.resized_wh[axis]
            begin, end = math.floor(white[axis] * resized), math.ceil(white[axis + 2] * resized)
            shown = {edge: min(end, edge + side) - max(begin, edge) for edge in range(resized - side + 1)}
            best = [edge for edge in shown if shown[edge] == max(shown.values())]
            middle = usual.crop_xy[axis]
            assert placed.placement.crop_xy[axis] == min(best, key=lambda edge: abs(edge - middle)), (size, white)


def test_crops_stay_in_the_middle_where_no_mask_leads_them():
    for follow, white in ((False, (0.8, 0.8, 1.0, 1.0)), (True, None), (True, (0.0, 0.0, 0.0, 0.0))):
        section = settings.Dataset(folders=[settings.Folder(path=".")], buckets=False, follow_mask=follow)
        (placed,) = buckets.assign([masked((200, 90), white)], section, resolution=64, step=8)
        assert placed.placement == buckets.place((200, 90), 64, 8, buckets=False)


def test_without_upscale_the_largest_fitting_bucket_by_brute_force():
    resolution, step, max_aspect = 128, 16, 2.0
    for size in random_sizes(200, 16, 300):
        p = buckets.place(size, resolution, step, max_aspect=max_aspect, upscale=False)
        usual = buckets.find_nearest_bucket(size, buckets.list_bucket_sizes(resolution, step, max_aspect))
        if usual[0] <= size[0] and usual[1] <= size[1]:
            assert p.bucket_wh == usual
            continue
        fitting = [
            width * height
            for width in range(step, size[0] + 1, step)
            for height in range(step, size[1] + 1, step)
            if width * height <= resolution**2 and max(width / height, height / width) <= max_aspect
        ]
        assert p.bucket_wh[0] * p.bucket_wh[1] == max(fitting), size


def test_resolution_below_the_step_is_the_users_error():
    with pytest.raises(UserError, match="resolution = 32"):
        buckets.list_bucket_sizes(32, 64, 2.0)


def test_assign_and_group():
    folders = [settings.Folder(path="a"), settings.Folder(path="b", resolution=32)]
    section = settings.Dataset(folders=folders, resolution=64, bucket_step=8, upscale=False)
    examples = [
        SimpleNamespace(width=w, height=h, path=f"{i}.png", uid=f"0/{i}.png", frames=(), folder_index=0, mask=None)
        for i, (w, h) in enumerate([(200, 100), (64, 64), (100, 200), (90, 90), (40, 40)])
    ]
    placed = buckets.assign(examples, section, resolution=64, step=8)
    assert [one.uid for one in placed] == [example.uid for example in examples]
    groups = buckets.group(placed)
    assert list(groups) == sorted(groups)
    assert [one.uid for one in groups[64, 64]] == ["0/1.png", "0/3.png"]
    assert [one.uid for one in groups[40, 40]] == ["0/4.png"]
    assert sum(map(len, groups.values())) == 5
    examples[1].folder_index = 1
    assert [one.uid for one in buckets.group(buckets.assign(examples, section, resolution=64, step=8))[32, 32]] == [
        "0/1.png"
    ]
    examples.append(SimpleNamespace(width=5, height=50, path="sliver.png", folder_index=0, mask=None))
    with pytest.raises(UserError, match="sliver.png: the image has 5 x 50"):
        buckets.assign(examples, section, resolution=64, step=8)


def test_fit_gives_pillows_pixels():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 150, 3), dtype=np.uint8))
    fitted = buckets.fit(image, buckets.Placement(image.size, (64, 48), *buckets.compute_crop(image.size, (64, 48))))
    # 150 x 90 covers 64 x 48 at 80 x 48, of which 8 go on each side.
    expected = image.resize((80, 48), Image.Resampling.LANCZOS).crop((8, 0, 72, 48))
    np.testing.assert_array_equal(fitted, expected)
    whole = buckets.fit(image, buckets.Placement(image.size, (150, 90), (150, 90), (0, 0)))
    np.testing.assert_array_equal(whole, image)
