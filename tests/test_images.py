"""Images and captions: pixels against Pillow and hand-computed values, and a table of everything that can be wrong."""

import io
import os
import re
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from lora_fp8 import config
from lora_fp8.data import images


def save(image: Image.Image, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def good(folder, name: str = "good", caption: str = "a caption", seed: int = 0, size=(80, 64)):
    path = save(noise(*size, seed), folder / f"{name}.png")
    path.with_suffix(".txt").write_text(caption)
    return path


def section(*folders, **settings) -> config.Dataset:
    listed = [folder if isinstance(folder, dict) else {"path": str(folder)} for folder in folders]
    return config.Dataset.model_validate({"resolution": 64, "folders": listed, **settings})


def only(lines: list[str]) -> str:
    assert len(lines) == 1, lines
    return lines[0]


# -------------------------------------------------------------------------------------------------------------- pixels


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".png", ".tif", ".jpg", ".webp"])
def test_all_exif_orientations_show_the_same_upright_pixels(tmp_path, orientation, suffix):
    upright = noise(24, 16, 3)
    # How a camera stores the upright picture so that this orientation undoes it (EXIF 2.3, table 6).
    stored = {
        1: lambda im: im,
        2: lambda im: im.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda im: im.transpose(Image.Transpose.ROTATE_180),
        4: lambda im: im.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda im: im.transpose(Image.Transpose.TRANSPOSE),
        6: lambda im: im.transpose(Image.Transpose.ROTATE_90),
        7: lambda im: im.transpose(Image.Transpose.TRANSVERSE),
        8: lambda im: im.transpose(Image.Transpose.ROTATE_270),
    }[orientation](upright)
    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {".jpg": {"quality": 100, "subsampling": 0}, ".webp": {"lossless": True}}.get(suffix, {})
    path = save(stored, tmp_path / f"a{suffix}", exif=exif, **lossless)
    path.with_suffix(".txt").write_text("x")
    opened = images.open_image(path)
    assert opened.mode == "RGB" and opened.size == (24, 16)
    difference = np.abs(np.asarray(opened).astype(int) - np.asarray(upright).astype(int)).max()
    assert difference <= (6 if suffix == ".jpg" else 0)
    if suffix != ".tif":  # Pillow turns TIFFs itself
        np.testing.assert_array_equal(opened, ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
    example = only(images.scan(section(tmp_path)).examples)
    assert (example.width, example.height) == (24, 16)


def test_sixteen_bit_ramp_is_scaled_and_not_clipped(tmp_path):
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    expected = np.round(ramp.astype(np.float64) / 257).astype(np.uint8)
    pictures = {
        "a.png": Image.fromarray(ramp),
        "a.tif": Image.fromarray(ramp),
        "int32.tif": Image.fromarray(ramp.astype(np.int32)),
        "float.tif": Image.fromarray((ramp / 65535).astype(np.float32)),
        "float16bit.tif": Image.fromarray(ramp.astype(np.float32)),
    }
    for name, picture in pictures.items():
        path = save(picture, tmp_path / name)
        assert Image.open(path).mode in ("I;16", "I", "F")
        opened = np.asarray(images.open_image(path))
        for channel in range(3):
            np.testing.assert_array_equal(opened[..., channel], expected, err_msg=name)
    # Pillow's own conversion is what we must not have.
    clipped = np.asarray(Image.open(tmp_path / "a.png").convert("RGB"))
    assert (clipped[1:] == 255).all()


def test_big_endian_sixteen_bit_tiff(tmp_path):
    values = np.array([[0, 257, 256 * 128, 65535]], dtype=">u2")
    # A minimal big-endian TIFF written by hand: header, one directory, one strip.
    tags = [(256, 3, 4 << 16), (257, 3, 1 << 16), (258, 3, 16 << 16), (259, 3, 1 << 16), (262, 3, 1 << 16)]
    tags += [(273, 4, 8), (277, 3, 1 << 16), (278, 3, 1 << 16), (279, 4, 8)]
    directory = len(tags).to_bytes(2, "big")
    for tag, kind, value in tags:
        directory += (
            tag.to_bytes(2, "big") + kind.to_bytes(2, "big") + (1).to_bytes(4, "big") + value.to_bytes(4, "big")
        )
    path = tmp_path / "a.tif"
    path.write_bytes(b"MM\0*" + (16).to_bytes(4, "big") + values.tobytes() + directory + bytes(4))
    assert Image.open(path).mode == "I;16B"
    assert np.asarray(images.open_image(path))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_float_images_whose_range_has_no_meaning_are_refused(tmp_path):
    for values in ([-1.0, 0.5], [0.0, 1.5], [0.0, np.nan], [0.0, 1e6]):
        path = save(Image.fromarray(np.array([values], dtype=np.float32)), tmp_path / "a.tif")
        with pytest.raises(images.ImageError, match="floating-point"):
            images.open_image(path)
    path = save(Image.fromarray(np.array([[0.0, 200.0]], dtype=np.float32)), tmp_path / "a.tif")
    assert np.asarray(images.open_image(path))[0, :, 0].tolist() == [0, 200]
    path = save(Image.fromarray(np.array([[0, 70000]], dtype=np.int32)), tmp_path / "a.tif")
    with pytest.raises(images.ImageError, match="0..70000"):
        images.open_image(path)


def palette(transparency=None) -> Image.Image:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    return image


RED, BLUE, GREEN = (255, 0, 0), (0, 0, 255), (0, 255, 0)
HALF_RED_ON_GREEN = (128, 127, 0)
MODES = [  # picture, file name, save options, RGB of its two pixels on green, tolerance
    (Image.frombytes("RGB", (2, 1), bytes([255, 0, 0, 0, 0, 255])), "a.png", {}, [RED, BLUE], 0),
    (Image.frombytes("RGBA", (2, 1), bytes([255, 0, 0, 128, 9, 9, 9, 0])), "a.png", {}, [HALF_RED_ON_GREEN, GREEN], 1),
    (Image.frombytes("RGBA", (2, 1), bytes([255, 0, 0, 128, 9, 9, 9, 0])), "a.tif", {}, [HALF_RED_ON_GREEN, GREEN], 1),
    (Image.frombytes("LA", (2, 1), bytes([200, 255, 200, 0])), "a.png", {}, [(200, 200, 200), GREEN], 0),
    (Image.frombytes("L", (2, 1), bytes([7, 250])), "a.png", {}, [(7, 7, 7), (250, 250, 250)], 0),
    (Image.frombytes("L", (2, 1), bytes([7, 250])), "a.png", {"transparency": 7}, [GREEN, (250, 250, 250)], 0),
    (
        Image.frombytes("RGB", (2, 1), bytes([9, 8, 7, 0, 0, 255])),
        "a.png",
        {"transparency": (9, 8, 7)},
        [GREEN, BLUE],
        0,
    ),
    (Image.fromarray(np.array([[0, 255]], dtype=np.uint8)).convert("1"), "a.png", {}, [(0, 0, 0), (255, 255, 255)], 0),
    (palette(), "a.png", {}, [RED, BLUE], 0),
    (palette(), "a.png", {"transparency": 0}, [GREEN, BLUE], 0),
    (palette(), "a.png", {"transparency": bytes([128, 0])}, [HALF_RED_ON_GREEN, GREEN], 1),
    (palette(), "a.gif", {"transparency": 1}, [RED, GREEN], 0),
    (palette(), "a.bmp", {}, [RED, BLUE], 0),
    (Image.frombytes("CMYK", (2, 1), bytes([0, 255, 255, 0, 0, 0, 0, 255])), "a.tif", {}, [RED, (0, 0, 0)], 0),
    (Image.new("CMYK", (2, 1), (0, 255, 255, 0)), "a.jpg", {"quality": 100}, [RED, RED], 3),
    (Image.new("YCbCr", (2, 1), (76, 85, 255)), "a.tif", {}, [RED, RED], 2),
    (Image.new("LAB", (2, 1), (136, 208, 195)), "a.tif", {}, [RED, RED], 12),
    (Image.new("RGB", (2, 1), RED), "a.avif", {"quality": 100, "subsampling": "4:4:4"}, [RED, RED], 8),
    (
        Image.frombytes("RGBA", (2, 1), bytes([255, 0, 0, 255, 0, 0, 0, 0])),
        "a.webp",
        {"lossless": True},
        [RED, GREEN],
        0,
    ),
]


@pytest.mark.parametrize("case", range(len(MODES)))
def test_every_mode_becomes_the_right_rgb_on_the_background(tmp_path, case):
    picture, name, options, expected, tolerance = MODES[case]
    path = save(picture, tmp_path / name, **options)
    opened = images.open_image(path, "#00ff00")
    assert opened.mode == "RGB"
    got = np.asarray(opened)[0].astype(int)
    assert np.abs(got - np.array(expected)).max() <= tolerance, (Image.open(path).mode, got)


def test_transparent_sixteen_bit_grey(tmp_path):
    path = tmp_path / "a.png"
    buffer = io.BytesIO()
    Image.fromarray(np.array([[300, 65535]], dtype=np.uint16)).save(buffer, "PNG")
    data = buffer.getvalue()
    chunk = b"tRNS" + (300).to_bytes(2, "big")
    chunk = (2).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    at = data.index(b"IDAT") - 4
    path.write_bytes(data[:at] + chunk + data[at:])
    assert np.asarray(images.open_image(path, "#00ff00"))[0].tolist() == [[0, 255, 0], [255, 255, 255]]


# ---------------------------------------------------------------------------------------------------------------- scan


def truncated_jpeg(folder):
    path = save(noise(64, 64), folder / "bad.jpg")
    path.write_bytes(path.read_bytes()[:-900])
    return path


def truncated_png(folder):
    path = save(noise(64, 64), folder / "bad.png")
    path.write_bytes(path.read_bytes()[:-6000])
    return path


def flipped_bit_png(folder):
    path = save(noise(64, 64), folder / "bad.png")
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(bytes(data))
    return path


def written(name: str, data: bytes):
    def make(folder):
        (folder / name).write_bytes(data)
        return folder / name

    return make


BROKEN = [
    (truncated_jpeg, "cannot be decoded: .*truncated"),
    (truncated_png, "cannot be decoded"),
    (flipped_bit_png, "cannot be decoded"),
    (written("bad.png", b""), "is empty \\(0 bytes\\)"),
    (written("bad.png", b"hello, I am text"), "is not a readable image .*hello"),
    (written("bad.webp", b"RIFF\x10\0\0\0WEBPVP8 "), "not a readable|cannot be decoded"),
    (written("bad.gif", b"GIF89a"), "not a readable|cannot be decoded"),
    (lambda folder: save(noise(200, 101), folder / "bad.png"), "has 200 x 101 = 20,200 pixels.*max_pixels = 20,000"),
]


@pytest.mark.parametrize("case", range(len(BROKEN)))
def test_broken_image_is_one_problem_that_names_it(tmp_path, case):
    make, message = BROKEN[case]
    good(tmp_path)
    path = make(tmp_path)
    path.with_suffix(".txt").write_text("x")
    report = images.scan(section(tmp_path, max_pixels=20_000))
    problem = only(report.problems)
    assert problem.startswith(str(path))
    assert re.search(message, problem), problem
    assert [example.relative for example in report.examples] == ["good.png"]
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_pixel_cap_comes_from_the_header_and_replaces_pillows_own(tmp_path):
    # 60000 x 60000 pixels in the header, no data at all: Pillow would call it a bomb, decoding it would take 10 GB.
    buffer = io.BytesIO()
    Image.new("L", (1, 1)).save(buffer, "PNG")
    data = bytearray(buffer.getvalue())
    data[16:24] = (60000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    (tmp_path / "huge.png").write_bytes(bytes(data))
    (tmp_path / "huge.txt").write_text("x")
    cap = Image.MAX_IMAGE_PIXELS
    assert "60000 x 60000 = 3,600,000,000 pixels" in only(images.scan(section(tmp_path)).problems)
    assert Image.MAX_IMAGE_PIXELS == cap


def test_all_problems_are_reported_at_once(tmp_path):
    good(tmp_path)
    truncated_jpeg(tmp_path)  # and it has no caption: two problems
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "empty.txt").write_text("x")
    good(tmp_path, "latin", seed=1).with_suffix(".txt").write_bytes("un café".encode("latin-1"))
    report = images.scan(section(tmp_path, tmp_path / "nowhere"))
    assert len(report.problems) == 5
    with pytest.raises(config.UserErrors) as raised:
        report.require()
    assert all(problem in str(raised.value) for problem in report.problems)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("naïve café".encode(), "naïve café"),
        ("naïve".encode("utf-8-sig"), "naïve"),
        ("naïve".encode("utf-16"), "naïve"),
        (b"\xfe\xff" + "naïve".encode("utf-16-be"), "naïve"),
        (b" one,\r\n two \n\n", "one, two"),
    ],
)
def test_captions_are_decoded(tmp_path, data, expected):
    good(tmp_path).with_suffix(".txt").write_bytes(data)
    assert only(images.scan(section(tmp_path)).examples).caption == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("un café".encode("latin-1"), r"good\.txt is not UTF-8 at byte 6 \(0xe9\)"),
        (b"\xef\xbb\xbfab\xff", r"good\.txt is not UTF-8 at byte 5 \(0xff\)"),
        (b"\xff\xfea\0b", r"good\.txt is not UTF-16 at byte"),
        ("ab".encode("utf-16-le"), r"good\.txt has a NUL character at byte 1"),
    ],
)
def test_undecodable_caption_is_a_problem_with_its_offset(tmp_path, data, message):
    good(tmp_path).with_suffix(".txt").write_bytes(data)
    report = images.scan(section(tmp_path))
    with pytest.raises(config.UserErrors, match=message):
        report.require()
    assert report.examples == []


@pytest.mark.parametrize("how", ["none", "empty", "blank"])
def test_missing_caption_policies(tmp_path, how):
    good(tmp_path, "has")
    path = good(tmp_path, "bare", seed=1)
    if how == "none":
        path.with_suffix(".txt").unlink()
    else:
        path.with_suffix(".txt").write_text("" if how == "empty" else " \n ")
    word = "no caption" if how == "none" else "an empty caption"
    problem = only(images.scan(section(tmp_path)).problems)
    assert problem.startswith(str(path)) and word in problem
    report = images.scan(section(tmp_path, missing_caption="trigger", trigger="sks"))
    assert not report.problems
    assert {example.relative: example.caption for example in report.examples} == {
        "bare.png": "sks",
        "has.png": "sks, a caption",
    }
    assert (report.counts["no_caption"], report.counts["triggered"]) == (1, 1)
    assert "no trigger word" in only(images.scan(section(tmp_path, missing_caption="trigger")).problems)
    report = images.scan(section(tmp_path, missing_caption="skip"))
    assert [example.relative for example in report.examples] == ["has.png"]
    assert "1 image(s) left out" in only(report.warnings)


def test_nothing_left_after_skipping_is_a_problem(tmp_path):
    good(tmp_path).with_suffix(".txt").unlink()
    assert "every image was left out" in only(images.scan(section(tmp_path, missing_caption="skip")).problems)


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a cat", "sks, a cat"),
        ("a sks cat", "a sks cat"),
        ("asks a cat", "sks, asks a cat"),
        ("SKS cat", "sks, SKS cat"),
        ("cat,sks", "cat,sks"),
    ],
)
def test_trigger_is_put_in_front_once(caption, expected):
    assert images.with_trigger(caption, "sks") == expected
    assert images.with_trigger(expected, "sks") == expected


def test_folder_trigger_wins_over_the_datasets(tmp_path):
    good(tmp_path / "a")
    good(tmp_path / "b", seed=1)
    folders = {"path": str(tmp_path / "a"), "trigger": "own", "repeats": 3}, tmp_path / "b"
    report = images.scan(section(*folders, trigger="shared"))
    assert [(e.uid, e.caption, e.repeats) for e in report.examples] == [
        ("0/good.png", "own, a caption", 3),
        ("1/good.png", "shared, a caption", 1),
    ]


def test_order_is_sorted_and_hidden_files_and_link_loops_are_left(tmp_path):
    for i, name in enumerate(["b/z", "b/a", "a/x", "c", "B"]):
        good(tmp_path, name, seed=i)
    good(tmp_path / ".hidden", seed=8)
    (tmp_path / ".DS_Store").write_bytes(b"x")
    (tmp_path / "._c.png").write_bytes(b"resource fork")
    os.symlink(tmp_path, tmp_path / "a" / "loop")
    os.symlink(tmp_path / "b", tmp_path / "a" / "again")
    report = images.scan(section(tmp_path))
    assert not report.problems and not report.warnings
    relatives = [example.relative for example in report.examples]
    assert len(relatives) == 5 and sorted(r.rsplit("/", 1)[-1] for r in relatives) == sorted(
        ["z.png", "a.png", "x.png", "c.png", "B.png"]
    )
    assert relatives == [example.relative for example in images.scan(section(tmp_path)).examples]


def test_linked_folder_outside_is_followed(tmp_path):
    good(tmp_path / "elsewhere")
    (tmp_path / "set").mkdir()
    os.symlink(tmp_path / "elsewhere", tmp_path / "set" / "link")
    assert only(images.scan(section(tmp_path / "set")).examples).relative == "link/good.png"


def test_folders_that_give_nothing_are_problems(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "film.mp4").write_bytes(b"x")
    (tmp_path / "file").write_bytes(b"x")
    names = ["nowhere", "empty", "other", "file"]
    missing, empty, other, file = images.scan(section(*(tmp_path / name for name in names))).problems
    assert "does not exist" in missing and "has no images, no image files" in empty
    assert "only film.mp4" in other and "is a file" in file
    assert "no folder is given" in only(images.scan(section()).problems)


def animated_gif(folder):
    frames = [Image.new("P", (64, 64), i) for i in range(3)]
    frames[0].putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    for frame in frames[1:]:
        frame.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    frames[0].save(folder / "odd.gif", save_all=True, append_images=frames[1:])
    (folder / "odd.txt").write_text("x")
    assert images.open_image(folder / "odd.gif").getpixel((0, 0)) == RED


def two_captions(folder):
    good(folder, "odd", "from txt", seed=1).with_suffix(".caption").write_text("from caption")


def copies(folder):
    good(folder, "odd", seed=0)


def png_named_jpg(folder):
    good(folder, "odd", seed=1).rename(folder / "odd.jpg")


def shared_caption(folder):
    save(noise(64, 64, 2), folder / "good.bmp")


ODD = [  # what is odd, warning, examples
    (png_named_jpg, r"named as another format.*odd\.jpg \(PNG\)", 2),
    (animated_gif, r"several frames.*odd\.gif \(3\)", 2),
    (two_captions, r"odd\.png has two captions; odd\.txt is used, odd\.caption is not", 2),
    (copies, r"1 image\(s\) that are copies.*odd\.png \(of .*good\.png\)", 2),
    (shared_caption, r"good\.png shares its caption good\.txt with good\.bmp", 2),
    (lambda folder: (folder / "lonely.txt").write_text("x"), r"1 caption file\(s\) .* no image: lonely\.txt", 1),
    (lambda folder: (folder / "film.mp4").write_text("x"), r"1 other file\(s\) .* not read: film\.mp4", 1),
    (lambda folder: good(folder, "odd", seed=1, size=(200, 50)), r"wider aspect ratio.*odd\.png \(4\.00\)", 2),
    (lambda folder: good(folder, "odd", seed=1, size=(60, 60)), r"1 image\(s\) smaller .* enlarged.*odd", 2),
]


@pytest.mark.parametrize("case", range(len(ODD)))
def test_oddity_is_one_warning(tmp_path, case):
    make, message, count = ODD[case]
    good(tmp_path, size=(80, 64))
    make(tmp_path)
    report = images.scan(section(tmp_path))
    assert not report.problems and len(report.examples) == count
    assert re.search(message, only(report.warnings)), report.warnings
    if make is two_captions:
        assert report.examples[1].caption == "from txt"


def test_tiny_images_and_upscale_off(tmp_path):
    good(tmp_path, size=(20, 20))
    tiny, upscaled = images.scan(section(tmp_path)).warnings
    assert "less than a quarter" in tiny and "enlarged" in upscaled
    tiny, small = images.scan(section(tmp_path, upscale=False)).warnings
    assert "less than a quarter" in tiny and "smaller buckets" in small
    assert images.scan(section(tmp_path, resolution="auto")).warnings == []
    assert len(images.scan(section(tmp_path, resolution="auto"), resolution=64).warnings) == 2


def test_folder_named_twice_or_inside_another_is_a_warning(tmp_path):
    good(tmp_path / "a", size=(80, 64))
    report = images.scan(section(tmp_path / "a", tmp_path / "a" / ".." / "a"))
    assert "named twice" in only(report.warnings) and not report.problems
    os.symlink(tmp_path / "a", tmp_path / "same")
    report = images.scan(section(tmp_path / "a", tmp_path / "same"))
    assert "named twice" in only(report.warnings) and len({example.uid for example in report.examples}) == 2
    assert "is inside folder" in only(images.scan(section(tmp_path / "a", tmp_path)).warnings)


def test_scan_writes_nothing_and_phones_double_pictures_are_jpegs(tmp_path):
    first, second = noise(80, 64), noise(80, 64, 1)
    first.save(tmp_path / "phone.jpg", format="MPO", save_all=True, append_images=[second])
    (tmp_path / "phone.txt").write_text("x")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = images.scan(section(tmp_path))
    assert not report.problems and not report.warnings and len(report.examples) == 1
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in tmp_path.rglob("*")}


def test_describe_counts(tmp_path):
    good(tmp_path, size=(80, 64))
    good(tmp_path, "b", seed=1, size=(100, 90))
    text = "\n".join(images.describe(images.scan(section({"path": str(tmp_path), "repeats": 5}, trigger="sks"))))
    for expected in [
        "2 images, 10 per epoch",
        "80 x 64 to 100 x 90",
        "2 captions had the trigger",
    ]:
        assert expected in text
