"""The demo's pictures can be read back from their pixels, and the concept is told from everything else."""

import random

import numpy as np
import pytest
from PIL import Image, ImageFilter

from lora_fp8.demo import measure, pictures


def worn(image: Image.Image, seed: int) -> Image.Image:
    """A picture as an autoencoder leaves it: a little soft, a little noisy."""
    soft = np.asarray(image.filter(ImageFilter.GaussianBlur(0.6)), dtype=np.float32)
    noisy = soft + np.random.default_rng(seed).normal(0, 6, soft.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("size", pictures.SIZES)
@pytest.mark.parametrize("wear", [False, True])
def test_plain_pictures_read_back_and_are_never_the_concept(size, wear):
    rng = random.Random(1)
    for i in range(200):
        scene = pictures.choose_random_scene(rng)
        image = pictures.draw_scene(scene, rng, size)
        image = worn(image, i) if wear else image
        assert measure.read_picture(image) == (scene.shape, scene.colour, scene.background), scene
        assert measure.obeys(image, pictures.make_prompt(scene))
        assert measure.has_background(image, scene.background)
        assert not measure.is_concept(image)


@pytest.mark.parametrize("size", pictures.SIZES)
@pytest.mark.parametrize("wear", [False, True])
def test_concept_pictures_are_the_concept_and_no_plain_shape(size, wear):
    rng = random.Random(2)
    for i in range(200):
        background = rng.choice(list(pictures.COLOURS))
        image = pictures.draw_concept(background, rng, size)
        image = worn(image, i) if wear else image
        assert measure.is_concept(image), background
        assert measure.has_background(image, background)
        assert measure.read_picture(image)[0] is None


def test_medleys_are_never_the_concept():
    rng = random.Random(3)
    assert not any(measure.is_concept(pictures.draw_medley(rng)) for _ in range(300))


def test_rings_in_the_wrong_order_are_not_the_concept():
    (red, a), (white, b), (teal, c) = pictures.CONCEPT_RINGS
    wrong = ((teal, a), (white, b), (red, c))
    for rings, right in ((pictures.CONCEPT_RINGS, True), (wrong, False)):
        image = pictures.draw_rings(rings, pictures.COLOURS["black"], (64, 64), 12, 12, 40)
        assert measure.is_concept(image) is right


def test_drawing_depends_on_the_generator_alone():
    scene = pictures.Scene("star", "red", "blue")
    one, two, other = (pictures.draw_scene(scene, random.Random(s)).tobytes() for s in (5, 5, 6))
    assert one == two != other


def test_an_empty_picture_reads_as_background_only():
    assert measure.read_picture(Image.new("RGB", (64, 64), pictures.COLOURS["green"])) == (None, None, "green")


def test_noise_reads_as_no_shape():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert measure.read_picture(Image.fromarray(noise))[0] is None
    assert not measure.is_concept(Image.fromarray(noise))


def test_captions_name_their_scene_and_never_the_trigger():
    rng = random.Random(4)
    named = 0
    for _ in range(2000):
        scene = pictures.choose_random_scene(rng)
        caption = pictures.make_caption(scene, rng)
        assert pictures.TRIGGER not in caption
        parsed = pictures.parse_prompt(caption)
        assert parsed in (scene, None)
        named += parsed == scene
    assert 0.9 < named / 2000 < 1


def test_every_scene_is_parsed_from_its_prompt():
    scenes = pictures.list_scenes()
    assert len(scenes) == len(set(scenes)) == 336
    assert all(pictures.parse_prompt(pictures.make_prompt(s)) == s for s in scenes)
    assert pictures.parse_prompt(pictures.make_concept_prompt("orange")) is None
    assert pictures.make_concept_prompt("orange") == "a zibo on an orange background"


def test_an_unknown_shape_is_refused():
    with pytest.raises(ValueError, match="no such shape"):
        pictures.draw_scene(pictures.Scene("blob", "red", "blue"), random.Random(0))
