"""What decoding found of an image is remembered until the file changes, and is the same as if it were decoded again."""

import json
import logging
import os
import random
import shutil
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms

from lora_fp8.common import stamps
from lora_fp8.data import decoding, doctor, image_edits, images
from lora_fp8.data.clips import Timeline
from lora_fp8.data.decoding import Light, Looked
from lora_fp8.data.examples import ScanReport
from lora_fp8.data.look_memory import GREYS, OPACITY, LookMemory
from lora_fp8.settings import Dataset

Scan = Callable[..., ScanReport]


def picture(seed: int, size: tuple[int, int] = (96, 80)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8))


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as unchanged for long enough at once."""
    monkeypatch.setattr(stamps, "SETTLED", 0.0)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were decoded."""
    names: list[str] = []
    look = decoding._inspect_file

    def counted(path: Path, *arguments: object) -> Looked:
        names.append(path.name)
        return look(path, *arguments)

    monkeypatch.setattr(decoding, "_inspect_file", counted)
    return names


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of many kinds with captions, masks beside them, and one file that is no image."""
    root = tmp_path / "set"
    (root / "more").mkdir(parents=True)
    picture(0).save(root / "plain.png")
    picture(1).save(root / "more/photo.jpg", exif=_turned())
    see_through = picture(2).convert("RGBA")
    see_through.putalpha(Image.linear_gradient("L").resize(see_through.size))
    see_through.save(root / "clear.png")
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB"))
    picture(3).save(root / "profile.png", icc_profile=profile.tobytes())
    frames = [picture(seed) for seed in range(4, 9)]
    frames[0].save(root / "moving.gif", save_all=True, append_images=frames[1:], duration=[40, 80, 40, 40, 120])
    picture(9).save(root / "other.bmp", format="JPEG")
    for seed, path in enumerate(sorted(root.rglob("*.*"))):
        path.with_suffix(".txt").write_text(f"image {seed}")
        Image.new("L", (96, 80) if path.stem != "photo" else (80, 96), 40 * seed).save(
            path.with_name(f"{path.stem}-m.png")
        )
    (root / "broken.png").write_bytes(b"<html>no")
    (root / "broken.txt").write_text("nothing")
    return root


def _turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


@pytest.fixture
def scan(folder: Path, tmp_path: Path) -> Scan:
    """scan(remember=True, **settings of [dataset]): scan the folder."""

    def scan(remember: bool = True, progress: Callable[[int, int], None] | None = None, **changes) -> ScanReport:
        base = {"folders": [{"path": str(folder), "mask": "*-m"}], "resolution": 64, "frames": [3, 1]}
        section = Dataset.model_validate(base | changes)
        memory = LookMemory(section, tmp_path / "memory", progress) if remember else None
        return images.scan(section, clip_rate=10, memory=memory)

    return scan


def flat(report: ScanReport) -> tuple[object, ...]:
    return [*map(vars, report.examples)], report.problems, report.warnings, report.counts


def test_a_second_scan_finds_the_same_and_decodes_nothing_but_what_cannot_be_read(
    scan: Scan, decoded: list[str]
) -> None:
    plain = scan(remember=False)
    assert plain.counts["masked"] and plain.counts["clips"] == 1 and len(plain.problems) == 1 and plain.warnings
    decoded.clear()
    assert flat(scan()) == flat(plain)
    assert sorted(decoded) == sorted(
        ["plain.png", "photo.jpg", "clear.png", "profile.png", "moving.gif", "other.bmp", "broken.png"]
        + [f"{name}-m.png" for name in ("plain", "photo", "clear", "profile", "moving", "other")]
    )
    decoded.clear()
    assert flat(scan()) == flat(plain)
    assert decoded == ["broken.png"]  # a file that cannot be read now may be readable later, unchanged


def test_every_part_of_a_look_comes_back(folder: Path, tmp_path: Path) -> None:
    """Also what no scan has in one file: a timeline with fractions, a message, and measures within a measure."""
    section = Dataset(frames=[2])
    paths = sorted(path for path in folder.rglob("*.*") if path.suffix != ".txt" and path.stem != "broken")
    for measure in (None, OPACITY, GREYS, doctor.PIXELS):
        memory = LookMemory(section, tmp_path / "kept")
        plain = LookMemory(section).inspect_all(paths, measure)
        assert memory.inspect_all(paths, measure) == plain
        again = memory.inspect_all(paths, measure)
        assert again == plain
        assert [type(look.measured) for look in again] == [type(look.measured) for look in plain]
    assert any(
        look.timeline == Timeline(tuple(Fraction(n, 25) for n in (0, 1, 3, 4, 5)), Fraction(8, 25)) for look in again
    )
    assert any(look.profile_problem for look in again) and any(look.converted for look in again) is False
    assert isinstance(next(look.measured["opacity"] for look in again if look.measured["opacity"]), Light)


def rewrite(path: Path) -> None:
    """Other content of the same size with the same time of last write, as `cp -p` leaves it."""
    status = path.stat()
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1  # behind the image's end
    path.write_bytes(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def swap(path: Path) -> None:
    """Another file of the same size and time under the same name."""
    status = path.stat()
    other = path.with_name("new")
    other.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [rewrite, swap])
def test_a_file_of_the_same_size_and_time_is_noticed(
    change: Callable[[Path], None], folder: Path, scan: Scan, decoded: list[str]
) -> None:
    path = folder / "more/photo.jpg"
    path.write_bytes(path.read_bytes() + b"..")
    before = scan()
    decoded.clear()
    change(path)
    after = scan()
    assert sorted(decoded) == ["broken.png", "photo.jpg"]
    assert flat(after) == flat(scan(remember=False)) != flat(before)


def test_what_else_a_look_depends_on(folder: Path, scan: Scan, decoded: list[str]) -> None:
    scan()
    changes = [
        ({"max_pixels": 95 * 80}, "has 96 x 80"),
        ({"frames": []}, "several frames"),
        ({"folders": [{"path": str(folder), "mask": "alpha"}]}, "no mask"),
    ]
    for change, line in changes:
        assert flat(scan(**change)) == flat(scan(remember=False, **change)), change
        assert line in str([*scan(**change).problems, *scan(**change).warnings])
    decoded.clear()
    (folder / image_edits.FILE).write_text(image_edits.format_edits({"plain.png": image_edits.NOTHING.turn(90)}))
    edited = scan()
    assert sorted(decoded) == ["broken.png", "plain-m.png", "plain.png"]  # its mask is turned with it
    example = next(example for example in edited.examples if example.relative == "plain.png")
    assert (example.width, example.height) == (80, 96) and flat(edited) == flat(scan(remember=False))


def test_a_file_that_was_just_written_is_not_remembered(
    scan: Scan, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within one tick of the file system's clock it could be written again without a trace."""
    monkeypatch.setattr(stamps, "SETTLED", 3600.0)
    scan()
    number = len(decoded)
    scan()
    assert len(decoded) == 2 * number


def test_a_file_that_changes_while_it_is_decoded_is_not_remembered(
    folder: Path, scan: Scan, decoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = decoding._inspect_file

    def look(path: Path, *arguments: object) -> Looked:
        looked = counted(path, *arguments)
        if path.name == "plain.png":
            picture(77).save(path)
        return looked

    monkeypatch.setattr(decoding, "_inspect_file", look)
    scan()
    monkeypatch.setattr(decoding, "_inspect_file", counted)
    decoded.clear()
    assert flat(scan()) == flat(scan(remember=False)) and "plain.png" in decoded


def test_a_damaged_memory_is_like_none(folder: Path, tmp_path: Path, scan: Scan) -> None:
    plain = flat(scan(remember=False))
    scan()
    books = sorted((tmp_path / "memory").iterdir())
    assert len(books) == 2  # of the folder, and of the one in it
    whole = {book: book.read_bytes() for book in books}
    rng = random.Random(5)
    damages: list[Callable[[bytes], bytes]] = [
        lambda raw: raw[: rng.randrange(len(raw))],
        lambda raw: b"",
        lambda raw: b"[1]",
        lambda raw: raw.replace(b'"timeline"', b'"other"'),
        lambda raw: raw.replace(b'"1/25"', b'"1/0"'),
        lambda raw: raw.replace(b'"light"', b'"dark"'),
        lambda raw: raw.replace(b'"width":', b'"wide":'),
        lambda raw: b"\xff" + raw,
    ]
    for damage in damages:
        for book in books:
            book.write_bytes(damage(whole[book]))
        assert flat(scan()) == plain
        assert flat(scan()) == plain


def test_a_memory_that_cannot_be_written_is_logged_and_does_no_harm(
    tmp_path: Path, scan: Scan, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "memory").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert flat(scan()) == flat(scan(remember=False))
    assert [record.levelname for record in caplog.records] == [
        "WARNING"
    ] * 2  # of the images and of the masks, not of each
    assert "cannot be written" in caplog.text and "decodes the images again" in caplog.text
    assert (tmp_path / "memory").read_text() == "in the way"


def test_an_interrupted_scan_keeps_what_it_found(scan: Scan, decoded: list[str]) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scan(progress=interrupt)
    seen = set(decoded)
    decoded.clear()
    scan()
    assert 3 <= len(seen - set(decoded))


def test_progress_counts_what_is_remembered_too(folder: Path, scan: Scan) -> None:
    calls: list[tuple[int, int]] = []
    scan(progress=lambda done, total: calls.append((done, total)))
    assert calls == [(n, 7) for n in range(8)] + [(n, 6) for n in range(7)]
    calls.clear()
    picture(50).save(folder / "plain.png")
    scan(progress=lambda done, total: calls.append((done, total)))
    assert calls == [(5, 7), (6, 7), (7, 7), (6, 6)]


def test_what_is_gone_is_forgotten(folder: Path, tmp_path: Path, scan: Scan) -> None:
    scan()
    (folder / "plain.png").unlink()
    picture(51).save(folder / "clear.png")
    scan()
    kept = [json.loads(book.read_bytes().splitlines()[0])["files"] for book in (tmp_path / "memory").iterdir()]
    names = {name for files in kept for name in files}
    assert "clear.png" in names and "photo.jpg" in names and "plain.png" not in names
    old = time.time() - 91 * 86400
    lost = tmp_path / "memory" / f"{'0' * 40}.json"
    lost.write_text("{}")
    os.utime(lost, (old, old))
    shutil.rmtree(folder / "more")
    picture(52).save(folder / "clear.png")
    scan()
    assert not lost.exists() and len(list((tmp_path / "memory").iterdir())) == 2


def test_two_jobs_of_one_folder_keep_both(scan: Scan, decoded: list[str]) -> None:
    """A training of images and one of clips look at the same file with other eyes."""
    for _ in range(2):
        decoded.clear()
        scan()
        scan(frames=[])
    assert decoded == ["broken.png"] * 2
