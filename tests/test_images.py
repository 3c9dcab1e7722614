"""Images and captions: pixels against Pillow and hand-computed values, and a table of everything that can be wrong."""

import hashlib
import io
import os
import re
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pillow_heif
import pytest
from PIL import Image, ImageCms, ImageFile, ImageOps

from lora_fp8.data import caption_text, decoding, doctor, image_files, images
from lora_fp8.errors import UserError, UserErrors
from lora_fp8.settings import Dataset, Folder
from webui import decoder, translations


def save(image: Image.Image, path, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def good(folder, name: str = "good", caption: str = "a caption", seed: int = 0, size=(80, 64)):
    path = save(noise(*size, seed), folder / f"{name}.png")
    path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    return path


def section(*folders, **settings) -> Dataset:
    listed = [folder if isinstance(folder, dict) else {"path": str(folder)} for folder in folders]
    return Dataset.model_validate({"resolution": 64, "folders": listed, **settings})


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
    path.with_suffix(".txt").write_text("x", encoding="utf-8")
    opened = decoding.open_image(path)
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
        opened = np.asarray(decoding.open_image(path))
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
    assert np.asarray(decoding.open_image(path))[0, :, 0].tolist() == [0, 1, 128, 255]


def test_float_images_whose_range_has_no_meaning_are_refused(tmp_path):
    for values in ([-1.0, 0.5], [0.0, 1.5], [0.0, np.nan], [0.0, 1e6]):
        path = save(Image.fromarray(np.array([values], dtype=np.float32)), tmp_path / "a.tif")
        with pytest.raises(decoding.ImageError, match="floating-point"):
            decoding.open_image(path)
    path = save(Image.fromarray(np.array([[0.0, 200.0]], dtype=np.float32)), tmp_path / "a.tif")
    assert np.asarray(decoding.open_image(path))[0, :, 0].tolist() == [0, 200]
    path = save(Image.fromarray(np.array([[0, 70000]], dtype=np.int32)), tmp_path / "a.tif")
    with pytest.raises(decoding.ImageError, match="0..70000"):
        decoding.open_image(path)


def palette(transparency=None) -> Image.Image:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    return image


RED, BLUE, GREEN = (255, 0, 0), (0, 0, 255), (0, 255, 0)
HEIC = b"\0\0\0\x18ftypheic" + b"\0" * 40
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
    (Image.new("YCbCr", (2, 1), (76, 85, 255)), "a.tif", {"compression": "tiff_lzw"}, [RED, RED], 2),
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
    opened = decoding.open_image(path, "#00ff00")
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
    assert np.asarray(decoding.open_image(path, "#00ff00"))[0].tolist() == [[0, 255, 0], [255, 255, 255]]


# ------------------------------------------------------------------------------------------------------------- colours
# Profiles are written here byte by byte (ICC.1:2001-04), and the expected sRGB is computed from the primaries, without
# the profiles' connection space: what LittleCMS makes of them is judged by other arithmetic.

SRGB_XY = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
P3_XY = ((0.680, 0.320), (0.265, 0.690), (0.150, 0.060))
ADOBE_XY = ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06))
D65 = np.array([0.3127 / 0.3290, 1, (1 - 0.3127 - 0.3290) / 0.3290])
D50 = np.array([0.9642, 1, 0.8249])
BRADFORD = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


def to_xyz(primaries) -> np.ndarray:
    """Linear RGB -> XYZ, both under D65 (SMPTE RP 177)."""
    columns = np.array([(x / y, 1, (1 - x - y) / y) for x, y in primaries]).T
    return columns * np.linalg.solve(columns, D65)


def to_d50(xyz) -> np.ndarray:
    gains = (BRADFORD @ D50) / (BRADFORD @ D65)
    return np.linalg.inv(BRADFORD) @ np.diag(gains) @ BRADFORD @ xyz


def encoded(linear) -> np.ndarray:
    """sRGB's curve (IEC 61966-2-1), to 0..255."""
    linear = np.clip(linear, 0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def decoded(values) -> np.ndarray:
    values = np.asarray(values) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def s15(*numbers) -> bytes:
    return b"".join(round(number * 65536).to_bytes(4, "big", signed=True) for number in numbers)


def icc(space: bytes, pcs: bytes, tags: dict[bytes, bytes], kind: bytes = b"mntr") -> bytes:
    tags = {
        b"desc": b"desc\0\0\0\0\0\0\0\5test\0" + bytes(11 + 67),
        b"cprt": b"text\0\0\0\0none\0",
        b"wtpt": b"XYZ \0\0\0\0" + s15(*D50),
    } | tags
    head = 128 + 4 + 12 * len(tags)
    table, data = len(tags).to_bytes(4, "big"), b""
    for name, content in tags.items():
        table += name + (head + len(data)).to_bytes(4, "big") + len(content).to_bytes(4, "big")
        data += content + bytes(-len(content) % 4)
    header = bytes(4) + b"\x02\x40\0\0" + kind + space + pcs + bytes(12) + b"acsp" + bytes(28) + s15(*D50) + bytes(48)
    return (head + len(data)).to_bytes(4, "big") + header[:124] + table + data


def curve(gamma=None) -> bytes:
    """A TRC: a gamma in 1/256, or sRGB's curve as a table of 4096."""
    if gamma is not None:
        return b"curv\0\0\0\0\0\0\0\1" + round(gamma * 256).to_bytes(2, "big")
    table = np.rint(decoded(np.linspace(0, 255, 4096)) * 65535).astype(">u2")
    return b"curv\0\0\0\0" + len(table).to_bytes(4, "big") + table.tobytes()


def rgb_profile(primaries, gamma=None) -> bytes:
    columns = to_d50(to_xyz(primaries)).T
    tags = {
        name + b"XYZ": b"XYZ \0\0\0\0" + s15(*column) for name, column in zip((b"r", b"g", b"b"), columns, strict=True)
    }
    return icc(b"RGB ", b"XYZ ", tags | {name + b"TRC": curve(gamma) for name in (b"r", b"g", b"b")})


def cmyk_profile(labs: dict[tuple[int, ...], tuple[float, float, float]]) -> bytes:
    """A2B0 as lut8Type with two grid points per ink; `labs` names corners, all others are black."""
    grid = b""
    for corner in np.ndindex(2, 2, 2, 2):
        lightness, a, b = labs.get(corner, (0, 0, 0))
        grid += bytes([round(lightness * 2.55), round(a + 128), round(b + 128)])
    straight = bytes(range(256))
    lut = b"mft1\0\0\0\0\4\3\2\0" + s15(1, 0, 0, 0, 1, 0, 0, 0, 1) + straight * 4 + grid + straight * 3
    return icc(b"CMYK", b"Lab ", {b"A2B0": lut}, b"prtr")


def lab_to_srgb(lightness, a, b) -> np.ndarray:
    """CIE 1976 under D50, to sRGB's D65 by Bradford."""
    y = (lightness + 16) / 116
    f = np.array([y + a / 500, y, y - b / 200])
    xyz = D50 * np.where(f > 6 / 29, f**3, 3 * (6 / 29) ** 2 * (f - 4 / 29))
    return encoded(np.linalg.inv(to_d50(to_xyz(SRGB_XY))) @ xyz)


COLOURS = [(200, 100, 50), (30, 60, 90), (250, 250, 250), (128, 128, 128), (0, 0, 0), (180, 160, 120), (90, 140, 100)]


@pytest.mark.parametrize("name", ["a.png", "a.tif", "a.webp", "a.jpg", "a.avif", "a.heic"])
@pytest.mark.parametrize(("primaries", "gamma"), [(P3_XY, None), (ADOBE_XY, 563 / 256), (SRGB_XY, 1.0)])
def test_wide_gamut_pictures_become_the_srgb_that_they_look_like(tmp_path, name, primaries, gamma):
    linear = decoded(COLOURS) if gamma is None else (np.array(COLOURS) / 255) ** gamma
    expected = encoded(linear @ (np.linalg.inv(to_xyz(SRGB_XY)) @ to_xyz(primaries)).T)
    picture = Image.fromarray(np.array([COLOURS], dtype=np.uint8)).resize((16 * len(COLOURS), 16), 0)
    options = {"a.webp": {"lossless": True}, "a.jpg": {"quality": 100, "subsampling": 0}, "a.avif": {"quality": 100}}
    options["a.heic"] = {"quality": 100, "chroma": 444}
    path = save(picture, tmp_path / name, icc_profile=rgb_profile(primaries, gamma), **options.get(name, {}))
    opened = np.asarray(decoding.open_image(path))[8, 8::16].astype(float)
    tolerance = {"a.jpg": 3, "a.avif": 6, "a.heic": 6}.get(name, 1.01)
    if gamma == 1.0:  # eight bits of linear light are coarse in the dark: lossy formats move them far
        tolerance = max(tolerance, 6) if tolerance > 1.01 else tolerance
    assert np.abs(opened - expected).max() <= tolerance, (opened, expected)
    assert np.abs(expected - COLOURS).max() > 8, "without the profile it would be seen"
    path.with_suffix(".txt").write_text("x", encoding="utf-8")
    report = images.scan(section(tmp_path, resolution=16))
    assert report.counts["converted"] == 1 and "1 image converted" in "\n".join(images.describe(report))
    assert not [line for line in report.warnings if "profile" in line]


def test_colours_that_srgb_does_not_have_become_the_nearest_it_has(tmp_path):
    path = save(Image.new("RGB", (2, 2), (0, 255, 0)), tmp_path / "a.png", icc_profile=rgb_profile(P3_XY))
    assert decoding.open_image(path).getpixel((0, 0)) == (0, 255, 0)


@pytest.mark.parametrize("profile", ["pillow", "by hand"])
def test_a_profile_that_is_srgb_leaves_every_pixel(tmp_path, profile):
    data = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes() if profile == "pillow" else None
    picture = noise(64, 64)
    path = save(picture, tmp_path / "a.png", icc_profile=data or rgb_profile(SRGB_XY))
    np.testing.assert_array_equal(decoding.open_image(path), picture)
    path.with_suffix(".txt").write_text("x", encoding="utf-8")
    report = images.scan(section(tmp_path))
    assert report.counts["converted"] == 0 and not report.warnings


def test_colours_are_converted_before_they_lie_on_the_background(tmp_path):
    profile = rgb_profile(ADOBE_XY, 563 / 256)
    solid = decoding.open_image(save(Image.new("RGB", (1, 1), (200, 100, 50)), tmp_path / "a.png", icc_profile=profile))
    picture = Image.frombytes("RGBA", (3, 1), bytes([200, 100, 50, 255, 200, 100, 50, 128, 1, 2, 3, 0]))
    opened = decoding.open_image(save(picture, tmp_path / "b.png", icc_profile=profile), "#0080ff")
    colour, half, ground = np.asarray(opened)[0].astype(int)
    assert tuple(colour) == solid.getpixel((0, 0)) and tuple(ground) == (0, 128, 255)
    assert np.abs(half - (colour * 128 + ground * 127) / 255).max() <= 1
    painted = Image.new("P", (2, 1))
    painted.putpalette([200, 100, 50, 0, 0, 255])
    opened = decoding.open_image(save(painted, tmp_path / "c.png", icc_profile=profile))
    assert opened.getpixel((0, 0)) == solid.getpixel((0, 0))


@pytest.mark.parametrize("kind", ["L", "LA", "I;16", "1"])
def test_grey_profiles(tmp_path, kind):
    profile = icc(b"GRAY", b"XYZ ", {b"kTRC": curve(1.5)})
    grey = np.array([[0, 40, 128, 200, 255]], dtype=np.uint8)
    picture = Image.fromarray(grey)
    if kind == "I;16":
        picture = Image.fromarray(grey.astype(np.uint16) * 257)
    elif kind != "L":
        picture = picture.convert(kind)
    path = save(picture, tmp_path / "a.png", icc_profile=profile)
    opened = np.asarray(decoding.open_image(path))[0].astype(float)
    shown = np.asarray(picture.convert("L"))[0] if kind == "1" else grey[0]
    expected = encoded((shown / 255) ** 1.5)
    assert np.abs(opened - expected[:, None]).max() <= 1.01, (opened, expected)


@pytest.mark.parametrize("name", ["a.tif", "a.jpg"])
def test_cmyk_profiles(tmp_path, name):
    labs = {
        (0, 0, 0, 0): (100, 0, 0),  # the paper, by definition
        (1, 0, 0, 0): (56, -20, -36),
        (0, 1, 0, 0): (50, 56, 0),
        (0, 0, 1, 0): (88, -6, 74),
    }
    profile = cmyk_profile(labs)
    for inks, lab in [*labs.items(), ((0, 0, 0, 1), (0, 0, 0))]:
        picture = Image.new("CMYK", (16, 16), tuple(255 * ink for ink in inks))
        options = {"quality": 100, "subsampling": 0} if name == "a.jpg" else {}
        opened = decoding.open_image(save(picture, tmp_path / name, icc_profile=profile, **options))
        got, expected = np.array(opened.getpixel((8, 8))), lab_to_srgb(*lab)
        assert np.abs(got - expected).max() <= 3, (inks, got, expected)  # lut8 holds a and b in whole steps
    plain = decoding.open_image(save(Image.new("CMYK", (16, 16), (255, 0, 0, 0)), tmp_path / "plain.tif"))
    assert plain.getpixel((8, 8)) == (0, 255, 255)


BAD_PROFILES = [  # mode, profile, what is said of it
    ("RGB", b"no profile at all", "damaged"),
    ("RGB", rgb_profile(P3_XY)[:300], "damaged"),
    ("RGB", icc(b"RGB ", b"XYZ ", {}), "damaged"),
    ("RGB", icc(b"GRAY", b"XYZ ", {b"kTRC": curve(1.5)}), "it is for GRAY pixels, but the image is RGB"),
    ("RGB", cmyk_profile({}), "it is for CMYK pixels, but the image is RGB"),
    ("CMYK", rgb_profile(P3_XY), "it is for RGB pixels, but the image is CMYK"),
]


@pytest.mark.parametrize("case", range(len(BAD_PROFILES)))
def test_a_profile_that_cannot_be_used_is_a_warning_and_the_picture_is_read_without_it(tmp_path, case):
    mode, profile, words = BAD_PROFILES[case]
    picture = noise(64, 64).convert(mode)
    path = save(picture, tmp_path / "a.tif", icc_profile=profile)
    path.with_suffix(".txt").write_text("x", encoding="utf-8")
    np.testing.assert_array_equal(decoding.open_image(path), picture.convert("RGB"))
    report = images.scan(section(tmp_path))
    assert not report.problems and report.counts["converted"] == 0
    assert (
        only(report.warnings)
        == f"1 image has a colour profile that cannot be used and is read as sRGB: {path} ({words})"
    )
    assert "damaged" not in translations.translate("zh-CN", only(report.warnings))


def test_a_profile_lost_in_the_file_is_told(tmp_path):
    """PNG packs the profile; Pillow gives None for one that cannot be unpacked."""
    path = save(noise(64, 64), tmp_path / "a.png", icc_profile=rgb_profile(P3_XY))
    path.with_suffix(".txt").write_text("x", encoding="utf-8")
    data = bytearray(path.read_bytes())
    at = data.index(b"iCCP")
    length = int.from_bytes(data[at - 4 : at], "big")
    data[at + 30 : at + 60] = bytes(30)
    data[at + 4 + length : at + 8 + length] = zlib.crc32(data[at : at + 4 + length]).to_bytes(4, "big")
    path.write_bytes(data)
    assert "(damaged)" in only(images.scan(section(tmp_path)).warnings)


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
    (truncated_jpeg, "the file is truncated; copy or download it again"),
    (truncated_png, "the file is truncated"),
    (flipped_bit_png, "cannot be decoded"),
    (written("bad.png", b""), "is empty \\(0 bytes\\)"),
    (written("bad.png", b"hello, I am text"), "this is not a readable image .*hello"),
    (written("bad.webp", b"RIFF\x10\0\0\0WEBPVP8 "), "not a readable|cannot be decoded"),
    (written("bad.gif", b"GIF89a"), "not a readable|cannot be decoded"),
    (lambda folder: save(noise(200, 101), folder / "bad.png"), "has 200 x 101 = 20,200 pixels.*max_pixels = 20,000"),
]


@pytest.mark.parametrize("case", range(len(BROKEN)))
def test_broken_image_is_one_problem_that_names_it(tmp_path, case):
    make, message = BROKEN[case]
    good(tmp_path)
    path = make(tmp_path)
    path.with_suffix(".txt").write_text("x", encoding="utf-8")
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
    (tmp_path / "huge.txt").write_text("x", encoding="utf-8")
    cap = Image.MAX_IMAGE_PIXELS
    assert "60000 x 60000 = 3,600,000,000 pixels" in only(images.scan(section(tmp_path)).problems)
    assert Image.MAX_IMAGE_PIXELS == cap


def test_all_problems_are_reported_at_once(tmp_path):
    good(tmp_path)
    truncated_jpeg(tmp_path)  # and it has no caption: two problems
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "empty.txt").write_text("x", encoding="utf-8")
    good(tmp_path, "latin", seed=1).with_suffix(".txt").write_bytes("un café".encode("latin-1"))
    report = images.scan(section(tmp_path, tmp_path / "nowhere"))
    assert len(report.problems) == 5
    with pytest.raises(UserErrors) as raised:
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
        ("un café".encode("latin-1"), r"good\.txt: the text is not UTF-8 at byte 6 \(0xe9\)"),
        (b"\xef\xbb\xbfab\xff", r"good\.txt: the text is not UTF-8 at byte 5 \(0xff\)"),
        (b"\xff\xfea\0b", r"good\.txt: the text is not UTF-16 at byte"),
        ("ab".encode("utf-16-le"), r"good\.txt: the text has a NUL character at byte 1"),
    ],
)
def test_undecodable_caption_is_a_problem_with_its_offset(tmp_path, data, message):
    good(tmp_path).with_suffix(".txt").write_bytes(data)
    report = images.scan(section(tmp_path))
    with pytest.raises(UserErrors, match=message):
        report.require()
    assert report.examples == []


@pytest.mark.parametrize("how", ["none", "empty", "blank"])
def test_missing_caption_policies(tmp_path, how):
    good(tmp_path, "has")
    path = good(tmp_path, "bare", seed=1)
    if how == "none":
        path.with_suffix(".txt").unlink()
    else:
        path.with_suffix(".txt").write_text("" if how == "empty" else " \n ", encoding="utf-8")
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
    assert "1 image without a caption was skipped" in only(report.warnings)


def test_nothing_left_after_skipping_is_a_problem(tmp_path):
    good(tmp_path).with_suffix(".txt").unlink()
    assert "every image was skipped" in only(images.scan(section(tmp_path, missing_caption="skip")).problems)


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a cat", "sks, a cat"),
        ("a sks cat", "a sks cat"),
        ("asks a cat", "sks, asks a cat"),
        ("SKS cat", "sks, SKS cat"),
        ("cat,sks", "cat,sks"),
        ("sks2 cat", "sks, sks2 cat"),
        ("ésks cat", "sks, ésks cat"),
        ("一只sks猫坐着", "一只sks猫坐着"),
        ("sksねこ", "sksねこ"),
        ("sks가 앉아 있다", "sks가 앉아 있다"),
    ],
)
def test_trigger_is_put_in_front_once(caption, expected):
    assert caption_text.with_trigger(caption, "sks") == expected
    assert caption_text.with_trigger(expected, "sks") == expected


def test_a_folders_prefix_and_suffix_are_around_its_captions(tmp_path):
    """As sd-scripts joins them, with a space; the trigger word is looked for in the whole."""
    for name, caption in (("a", "a cat"), ("b", "a cat"), ("c", "")):
        (tmp_path / name).mkdir()
        good(tmp_path / name, "x", caption=caption)
    folders = [
        {"path": str(tmp_path / "a"), "prefix": "masterpiece, ", "suffix": " best"},
        {"path": str(tmp_path / "b"), "suffix": ", sks"},
        {"path": str(tmp_path / "c"), "prefix": "so"},
    ]
    report = images.scan(section(*folders, trigger="sks", missing_caption="trigger"))
    assert [example.caption for example in report.examples] == [
        "sks, masterpiece, a cat best",
        "a cat , sks",
        "so sks",
    ]


def test_a_trigger_in_a_script_without_spaces_is_found_inside_a_sentence():
    assert caption_text.with_trigger("一只小狐狸坐在雪地里", "小狐狸") == "一只小狐狸坐在雪地里"
    assert caption_text.with_trigger("一只小猫坐在雪地里", "小狐狸") == "小狐狸, 一只小猫坐在雪地里"


def test_folder_trigger_wins_over_the_datasets(tmp_path):
    good(tmp_path / "a")
    good(tmp_path / "b", seed=1)
    folders = {"path": str(tmp_path / "a"), "trigger": "own", "repeats": 3}, tmp_path / "b"
    good(tmp_path / "c", seed=2)
    others = {"path": str(tmp_path / "c"), "regularization": True}
    report = images.scan(section(*folders, others, trigger="shared"))
    assert [(e.uid, e.caption, e.repeats) for e in report.examples] == [
        ("0/good.png", "own, a caption", 3),
        ("1/good.png", "shared, a caption", 1),
        ("2/good.png", "a caption", 1),
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
    assert "does not exist" in missing and "has no images; accepted: .png" in empty
    assert "only film.mp4" in other and "is a file" in file
    assert "~no-such-user/x does not exist" in only(images.scan(section("~no-such-user/x")).problems)
    assert "no image folder is given" in only(images.scan(section()).problems)


def animated_gif(folder):
    frames = [Image.new("P", (64, 64), i) for i in range(3)]
    frames[0].putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    for frame in frames[1:]:
        frame.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    frames[0].save(folder / "odd.gif", save_all=True, append_images=frames[1:])
    (folder / "odd.txt").write_text("x", encoding="utf-8")
    assert decoding.open_image(folder / "odd.gif").getpixel((0, 0)) == RED


def two_captions(folder):
    good(folder, "odd", "from txt", seed=1).with_suffix(".caption").write_text("from caption", encoding="utf-8")


def copies(folder):
    good(folder, "odd", seed=0)


def png_named_jpg(folder):
    good(folder, "odd", seed=1).rename(folder / "odd.jpg")


def shared_caption(folder):
    save(noise(64, 64, 2), folder / "good.bmp")


ODD = [  # what is odd, warning, examples
    (png_named_jpg, r"an extension that does not match its format.*odd\.jpg \(PNG\)", 2),
    (animated_gif, r"several frames.*odd\.gif \(3\)", 2),
    (two_captions, r"odd\.png has two captions; odd\.txt is used, odd\.caption is ignored", 2),
    (copies, r"1 image is a copy.*odd\.png \(of .*good\.png\)", 2),
    (shared_caption, r"good\.png shares its caption good\.txt with good\.bmp", 2),
    (
        lambda folder: (folder / "lonely.txt").write_text("x", encoding="utf-8"),
        r"1 caption file .* has no image: lonely\.txt",
        1,
    ),
    (
        lambda folder: (folder / "film.mp4").write_text("x", encoding="utf-8"),
        r"1 other file .* is ignored: film\.mp4",
        1,
    ),
    (
        lambda folder: Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt")).write_text("x", encoding="utf-8"),
        r"1 caption file .* has no image: \\xff\.txt",
        1,
    ),
    (
        lambda folder: Path(os.fsdecode(os.fsencode(folder) + b"/\xff.mp4")).write_text("x", encoding="utf-8"),
        r"1 other file .* is ignored: \\xff\.mp4",
        1,
    ),
    (lambda folder: good(folder, "odd", seed=1, size=(200, 50)), r"exceeds dataset.max_aspect.*odd\.png \(4\.00\)", 2),
    (lambda folder: good(folder, "odd", seed=1, size=(60, 60)), r"1 image is smaller .* enlarged.*odd", 2),
    (
        lambda folder: good(folder, "odd", "a {red|dark blue} car", seed=1),
        r"1 caption has a wildcard.*wildcards is off: .*odd\.png \(\{red\|dark blue\}\)",
        2,
    ),
]


@pytest.mark.parametrize("case", range(len(ODD)))
def test_oddity_is_one_warning(tmp_path, case):
    make, message, count = ODD[case]
    good(tmp_path, size=(80, 64))
    make(tmp_path)
    report = images.scan(section(tmp_path))
    assert not report.problems and len(report.examples) == count
    assert re.search(message, only(report.warnings)), report.warnings
    report.warnings[0].encode()  # a log and a page take nothing else
    if make is two_captions:
        assert report.examples[1].caption == "from txt"


def test_a_choice_that_is_drawn_and_braces_that_are_none_are_not_told(tmp_path):
    for number, text in enumerate(("{|}, smile", "{a} and {b", "a|b", "{{x}}", "f(x) = {x^2 : x > 0}", "|{}|")):
        good(tmp_path, f"{number}", text, seed=number, size=(80, 64))
    assert images.scan(section(tmp_path)).warnings == []
    good(tmp_path, "choice", "a {red|} car", seed=9, size=(80, 64))
    assert "1 caption has a wildcard" in only(images.scan(section(tmp_path)).warnings)
    assert images.scan(section(tmp_path, wildcards=True)).warnings == []


def test_tiny_images_and_upscale_off(tmp_path):
    good(tmp_path, size=(20, 20))
    tiny, upscaled = images.scan(section(tmp_path)).warnings
    assert "less than a quarter" in tiny and "enlarged" in upscaled
    tiny, small = images.scan(section(tmp_path, upscale=False)).warnings
    assert "less than a quarter" in tiny and "a smaller bucket" in small
    assert images.scan(section(tmp_path, resolution="auto")).warnings == []
    later = images.scan(section(tmp_path, resolution="auto"))
    images.warn_of_sizes(later, section(tmp_path, resolution="auto"), 64)
    assert later.warnings == images.scan(section(tmp_path)).warnings and later.counts["upscaled"] == 1


def test_folder_named_twice_or_inside_another_is_a_warning(tmp_path):
    good(tmp_path / "a", size=(80, 64))
    report = images.scan(section(tmp_path / "a", tmp_path / "a" / ".." / "a"))
    assert "listed twice" in only(report.warnings) and not report.problems
    os.symlink(tmp_path / "a", tmp_path / "same")
    report = images.scan(section(tmp_path / "a", tmp_path / "same"))
    assert "listed twice" in only(report.warnings) and len({example.uid for example in report.examples}) == 2
    assert "is inside folder" in only(images.scan(section(tmp_path / "a", tmp_path)).warnings)


def test_scan_writes_nothing_and_phones_double_pictures_are_jpegs(tmp_path):
    first, second = noise(80, 64), noise(80, 64, 1)
    first.save(tmp_path / "phone.jpg", format="MPO", save_all=True, append_images=[second])
    (tmp_path / "phone.txt").write_text("x", encoding="utf-8")
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


def phone_pictures(folder: Path) -> None:
    """Two that are read, one of them a .jfif, three HEIC with a caption each, a JPEG XL, an AVI and an MTS."""
    folder.mkdir(exist_ok=True)
    for name in ("a.jpg", "b.jfif"):
        Image.new("RGB", (64, 64), (len(name), 0, 0)).save(folder / name, "JPEG")
    for name in ("1.HEIC", "2.heic", "3.heif", "a.jxl", "c.avi", "d.MTS", "Thumbs.db"):
        (folder / name).write_bytes(HEIC)
    for name in "ab123":
        (folder / f"{name}.txt").write_text("a picture", encoding="utf-8")


@pytest.fixture
def without_heic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where pillow-heif is not installed."""
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "pillow_heif", None)
        for suffix in decoding.HEIC_EXTENSIONS:
            patched.delitem(decoding.EXTENSIONS, suffix)
            patched.setitem(image_files.HEIC_IMAGES, suffix, "HEIC")
        patched.setattr(image_files, "UNREADABLE", (*image_files.UNREADABLE, *decoding.HEIC_EXTENSIONS))
        decoding.list_formats.cache_clear()
        yield
    decoding.list_formats.cache_clear()


def test_what_is_known_without_pillow_heif() -> None:
    """The constants are made when the modules are imported."""
    code = "import sys; sys.modules['pillow_heif'] = None\nfrom lora_fp8.data import decoding, image_files\n"
    code += "print(decoding.list_formats() == decoding.FORMATS, '.heic' in decoding.EXTENSIONS, end=' ')\n"
    code += "print(*image_files.HEIC_IMAGES)\n"
    code += "print('.hif' in image_files.UNREADABLE)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert told == ["True", "False", ".heic", ".heif", ".hif", "True"]
    assert image_files.HEIC_IMAGES == {} and ".heic" not in image_files.UNREADABLE


def test_images_and_videos_of_other_formats_have_a_sentence_of_their_own(tmp_path: Path, without_heic: None) -> None:
    phone_pictures(tmp_path)
    section = Dataset(folders=[Folder(path=str(tmp_path))], resolution=64)
    report = images.scan(section, clip_rate=0)
    assert [example.path.name for example in report.examples] == ["a.jpg", "b.jfif"]
    assert report.problems == [
        (
            f"folder {tmp_path}: 3 of 6 images are HEIC, which needs pillow-heif; install it: pip install "
            "'lora-fp8[heic]', or convert them to JPEG or PNG: 1.HEIC, 2.heic, 3.heif"
        ),
        (
            f"folder {tmp_path}: 1 of 6 images are JPEG XL and cannot be read; convert them to JPEG or PNG, or remove "
            "them: a.jxl"
        ),
        (
            f"folder {tmp_path}: 2 of 2 videos are .avi and .mts and cannot be read; convert them to MP4, or remove "
            "them: c.avi, d.MTS"
        ),
    ]
    assert [line for line in report.warnings if "ignored: T" in line] == [
        f"1 other file in {tmp_path} is ignored: Thumbs.db"
    ]
    assert not any(
        "have no image" in line or "has an extension that does not match its format" in line for line in report.warnings
    )
    found = doctor.examine(section, doctor.Target(64, 64, clip_rate=0))
    told = [detail for one in found.findings if one.level == "problem" for _, detail in one.files]
    assert told == report.problems
    for line in report.problems:
        assert (
            re.search("无法读取|pillow-heif", (chinese := translations.translate("zh-CN", line)))
            and "文件夹" in chinese
        )
    for name in ("a.jpg", "b.jfif"):
        (tmp_path / name).unlink()
    assert len(images.scan(section).problems) == 3  # and not also that there are none


def test_a_heic_named_as_jpeg_is_told_as_what_it_is(tmp_path: Path, without_heic: None) -> None:
    (tmp_path / "a.jpg").write_bytes(HEIC)
    (tmp_path / "a.txt").write_text("a picture", encoding="utf-8")
    section = Dataset(folders=[Folder(path=str(tmp_path))], resolution=64)
    (line,) = images.scan(section).problems
    assert "a.jpg: this is a HEIC file, which needs pillow-heif" in line and "是 HEIC" in translations.translate(
        "zh-CN", line
    )


# ---------------------------------------------------------------------------------------------------------------- HEIC


def heic(picture: Image.Image, orientation: int = 1, **options: Any) -> bytes:
    """As a phone writes it: the turn is in the container too, where it counts, and EXIF repeats it."""
    pillow_heif.register_heif_opener()
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture.save(buffer := io.BytesIO(), "HEIF", quality=95, exif=exif.tobytes(), **options)
    return buffer.getvalue()


def marked(size: tuple[int, int] = (96, 64)) -> Image.Image:
    """A picture without symmetry."""
    picture = Image.linear_gradient("L").resize(size).convert("RGB")
    picture.paste((250, 20, 20), (0, 0, 32, 16))
    return picture


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_of_a_phone_is_upright_once(tmp_path: Path, orientation: int) -> None:
    """Judged by the same picture and orientation as JPEG, turned by Pillow."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    marked().save(tmp_path / "b.jpg", quality=95, exif=exif)
    (tmp_path / "a.heic").write_bytes(heic(marked(), orientation))
    photo, expected = decoding.open_image(tmp_path / "a.heic"), decoding.open_image(tmp_path / "b.jpg")
    assert photo.size == expected.size == ((64, 96) if orientation > 4 else (96, 64))
    assert np.abs(np.asarray(photo).astype(int) - np.asarray(expected)).mean() < 4
    (look,) = decoding.inspect_all([tmp_path / "a.heic"], Dataset())
    assert (look.width, look.height, look.format, look.error) == (*photo.size, "HEIF", "")
    assert look.sha256 == hashlib.sha256((tmp_path / "a.heic").read_bytes()).hexdigest()


def test_the_page_takes_and_shows_photos_of_phones(tmp_path: Path) -> None:
    (tmp_path / "IMG_1.HEIC").write_bytes(heic(marked(), 6))
    (tmp_path / "empty.jpg").write_bytes(b"")
    (tmp_path / "list.png").write_text("a list", encoding="utf-8")
    decoders = decoder.Decoders(count=1)
    decoders.decode_whole(tmp_path / "IMG_1.HEIC")
    assert Image.open(io.BytesIO(decoders.encode_webp(tmp_path / "IMG_1.HEIC", 96))).size == (64, 96)
    for name, line in (("empty.jpg", "为空（0 字节）"), ("list.png", "不是可读取的图片")):
        with pytest.raises(UserError) as refused:
            decoders.decode_whole(tmp_path / name)
        assert line in translations.translate("zh-CN", str(refused.value))


def test_photos_are_trained_on_like_other_images(tmp_path: Path) -> None:
    (tmp_path / "IMG_1.HEIC").write_bytes(heic(marked((64, 64))))
    (tmp_path / "burst.heif").write_bytes(heic(marked(), save_all=True, append_images=[marked((48, 48))]))
    (tmp_path / "named.jpg").write_bytes(heic(marked()))
    see_through = marked()
    see_through.putalpha(Image.linear_gradient("L").resize(see_through.size))
    (tmp_path / "clear.heic").write_bytes(heic(see_through))
    for path in sorted(tmp_path.iterdir()):
        path.with_suffix(".txt").write_text(path.stem, encoding="utf-8")
    report = images.scan(section(tmp_path, resolution=64))
    assert not report.problems
    assert [(example.caption, example.width) for example in report.examples] == [
        ("IMG_1", 64), ("burst", 96), ("clear", 96), ("named", 96)
    ]  # fmt: skip
    warnings = "\n".join(report.warnings)
    assert (
        "has an extension that does not match its format" in warnings
        and "named.jpg (HEIF)" in warnings
        and "burst.heif (2)" in warnings
    )
    see_through.save(tmp_path / "clear.png")
    photo, expected = (decoding.open_image(tmp_path / f"clear.{end}", "#00ff00") for end in ("heic", "png"))
    assert np.abs(np.asarray(photo).astype(int) - np.asarray(expected)).mean() < 4


def test_photos_whose_colours_are_not_those_of_a_picture(tmp_path: Path) -> None:
    """PQ and HLG are HDR. P3 that only the container names is read without it, and that is told."""
    for number, kind in ((16, "PQ"), (18, "HLG")):
        raw = heic(marked(), color_primaries=9, transfer_characteristics=number)
        with pytest.raises(decoding.ImageError, match=rf"HDR \({kind}\)"):
            decoding.open_image(io.BytesIO(raw))
    for primaries, expected in ((1, 0), (2, 0), (6, 0), (12, 1), (9, 1)):
        path = tmp_path / f"{primaries}.heic"
        path.write_bytes(heic(marked(), color_primaries=primaries, transfer_characteristics=13))
        (look,) = decoding.inspect_all([path], Dataset())
        assert not look.error and ("primaries" in look.profile_problem) == bool(expected), primaries


def test_damaged_photos_are_problems_and_large_ones_are_not_decoded(tmp_path: Path, monkeypatch) -> None:
    raw = heic(marked((640, 480)))
    for size in (12, 100, len(raw) // 2, len(raw) - 9):
        (tmp_path / f"{size:07}.heic").write_bytes(raw[:size])
    looks = list(decoding.inspect_all(sorted(tmp_path.iterdir()), Dataset()))
    assert all(look.error for look in looks), looks
    assert all(re.search("not a readable image|cannot be decoded|a HEIC file", look.error) for look in looks), looks
    path = tmp_path / "large.heic"
    path.write_bytes(raw)
    monkeypatch.setattr(decoding, "_inspect_image", lambda *_: pytest.fail("it is decoded"))
    (look,) = decoding.inspect_all([path], Dataset(max_pixels=640 * 480 - 1))
    assert "640 x 480" in look.error
