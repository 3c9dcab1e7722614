"""Datasets of other forms become images with captions.

Judged by files that the forms' own libraries write (pyarrow, tarfile, csv, json), by the bytes of the images, and by a
scan of the result.
"""

import csv
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from lora_fp8 import cli
from lora_fp8.common.messages import translate
from lora_fp8.data import captions, dataset_import, foreign_datasets, images
from lora_fp8.data.dataset_import import import_captions, import_images
from lora_fp8.data.foreign_datasets import find_source
from lora_fp8.errors import UserError
from lora_fp8.settings import Dataset, Folder


def encoded(seed: int, format: str = "JPEG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer := io.BytesIO(), format)
    return buffer.getvalue()


def write_images(folder: Path, *names: str) -> None:
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded(seed, "PNG" if name.endswith("png") else "JPEG"))


def texts(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in sorted(folder.rglob("*.txt"))}


def write_table(path: Path, rows: list[dict[str, Any]], schema: pyarrow.Schema | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path, row_group_size=3)


def write_tar(path: Path, members: dict[str, bytes], mode: str = "w") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as archive:
        for name, raw in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(raw)
            archive.addfile(entry, io.BytesIO(raw))


# ------------------------------------------------------------------------------------------- captions beside the images


def as_jsonl(folder: Path, rows: list[dict[str, Any]]) -> None:
    lines = "\n".join(json.dumps(row) for row in rows)
    (folder / "metadata.jsonl").write_text(f"\ufeff{lines}\n\n", encoding="utf-8")


def as_csv(folder: Path, rows: list[dict[str, Any]]) -> None:
    with open(folder / "metadata.csv", "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, sorted({name for row in rows for name in row}))
        table.writeheader()
        table.writerows(rows)


def as_table(folder: Path, rows: list[dict[str, Any]]) -> None:
    write_table(folder / "metadata.parquet", rows)


@pytest.mark.parametrize("write", [as_jsonl, as_csv, as_table])
def test_a_table_beside_images(tmp_path: Path, write: Callable[..., None]) -> None:
    write_images(tmp_path, "a.jpg", "deep/b.png", "c.jpg", "d.jpg")
    (tmp_path / "c.txt").write_text("mine", encoding="utf-8")
    rows = [
        {"file_name": "a.jpg", "text": "a cat, sitting"},
        {"file_name": "deep/b.png", "text": 'two "lines"\nof text'},
        {"file_name": "c.jpg", "text": "theirs"},
        {"file_name": "d.jpg", "text": ""},
        {"file_name": "gone.jpg", "text": "nobody"},
        {"file_name": "../other.jpg", "text": "outside"},
    ]
    (tmp_path.parent / "other.jpg").write_bytes(encoded(9))
    write(tmp_path, rows)
    report = import_captions(find_source(tmp_path))
    expected = {"a.txt": "a cat, sitting", "deep/b.txt": 'two "lines"\nof text', "c.txt": "mine"}
    assert texts(tmp_path) == expected
    assert (report.images, report.uncaptioned, report.kept) == (4, 1, 1)
    assert len(report.problems) == 2
    assert "gone.jpg does not exist" in report.problems[0] and "outside of" in report.problems[1]
    again = import_captions(find_source(tmp_path), overwrite=True)
    assert texts(tmp_path)["c.txt"] == "theirs" and again.kept == 0
    captions.undo(tmp_path)
    captions.undo(tmp_path)
    assert texts(tmp_path) == {"c.txt": "mine"}


def test_the_captions_of_sd_scripts(tmp_path: Path) -> None:
    """Its keys are paths of the machine that it ran on; a caption and tags are joined by a comma."""
    write_images(tmp_path, "a.jpg", "sub/b.png", "c.webp.jpg", "x/same.jpg", "y/same.jpg")
    table = {
        "C:\\data\\a.jpg": {"caption": "a dog", "tags": "red, blue"},
        "/elsewhere/b": {"tags": "one, two"},
        "c.webp.jpg": {"caption": "a third"},
        "/elsewhere/same.jpg": {"caption": "which?"},
        "y/same": {"caption": "this one"},
        "/elsewhere/none.jpg": {"caption": "none"},
        "a.jpg": 3,
    }
    (tmp_path / "meta_lat.json").write_text(json.dumps(table), encoding="utf-8")
    report = import_captions(find_source(tmp_path))
    assert texts(tmp_path) == {
        "a.txt": "a dog, red, blue", "sub/b.txt": "one, two", "c.webp.txt": "a third", "y/same.txt": "this one"
    }  # fmt: skip
    assert len(report.problems) == 3 and all("no image of this name" in line for line in report.problems)


def test_json_beside_each_image(tmp_path: Path) -> None:
    write_images(tmp_path, "a.jpg", "b.jpg", "c.jpg", "d.jpg")
    contents = {
        "a": {"tags": ["1girl", "solo "], "rating": "g"},
        "b": {"caption": ["a first", "a second"]},
        "c": {"tag_string": "1girl solo"},
        "d": [1, 2],
    }
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    report = import_captions(find_source(tmp_path))
    assert texts(tmp_path) == {"a.txt": "1girl, solo", "b.txt": "a first\na second", "c.txt": "1girl solo"}
    assert report.form == "json" and "the record is not a JSON object" in report.problems[0]


def test_the_column_is_chosen_and_named_where_none_is_known(tmp_path: Path) -> None:
    write_images(tmp_path, "a.jpg", "b.jpg")
    rows = [{"file_name": f"{name}.jpg", "de": f"auf {name}", "score": 3} for name in "ab"]
    as_jsonl(tmp_path, rows)
    with pytest.raises(UserError, match=r"no column has a known name.*: de, score; name one with --caption"):
        import_captions(find_source(tmp_path))
    with pytest.raises(UserError, match=r"metadata.jsonl: there is no column 'nope'; the columns are de, score"):
        import_captions(find_source(tmp_path, "nope"))
    assert not texts(tmp_path)
    import_captions(find_source(tmp_path, "de"))
    assert texts(tmp_path) == {"a.txt": "auf a", "b.txt": "auf b"}
    with pytest.raises(UserError, match="column score contains no text"):
        import_captions(find_source(tmp_path, "score"), overwrite=True)


def test_what_a_stranger_may_have_written(tmp_path: Path) -> None:
    """Half a character, names that no file can have, and an image that is a link to one elsewhere."""
    (tmp_path / "elsewhere.jpg").write_bytes(encoded(3))
    folder = tmp_path / "set"
    write_images(folder, "a.jpg", "b.jpg")
    rows = [{"file_name": "a.jpg", "text": "half \ud800"}, {"file_name": "b.jpg", "text": "whole"}]
    rows += [{"file_name": f"{'n' * 5000}.jpg", "text": "x"}, {"file_name": "a\0b.jpg", "text": "x"}]
    as_jsonl(folder, rows)
    for target in (None, tmp_path / "new"):
        source = find_source(folder)
        report = import_images(source, target) if target else import_captions(source)
        assert texts(target or folder) == {"b.txt": "whole"}
        assert (report.images, report.uncaptioned) == (2, 1)
        assert (len(report.problems), len(report.caption_problems)) == (2, 1)
        assert max(map(len, report.problems)) < 500
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "x.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    (linked / "x.json").write_text('{"caption": "of a link"}', encoding="utf-8")
    import_captions(find_source(linked))
    assert texts(linked) == {"x.txt": "of a link"} and not (tmp_path / "elsewhere.txt").exists()


def test_lines_that_are_none(tmp_path: Path) -> None:
    write_images(tmp_path, "a.jpg")
    lines = ["{broken", "[1]", '{"text": "no name"}', '{"file_name": "a.jpg", "text": "good"}', '"deep": ' + "[" * 9000]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    report = import_captions(find_source(tmp_path))
    assert texts(tmp_path) == {"a.txt": "good"}
    said = [line.split(", line ")[1] for line in report.problems]
    assert (
        [line[0] for line in said] == list("1235") and "the line is not JSON" in said[0] and "names no image" in said[2]
    )
    (tmp_path / "metadata.jsonl").write_bytes(b"x" * (2 << 20))
    with pytest.raises(UserError, match="line 1: the line is too long"):
        import_captions(find_source(tmp_path))
    (tmp_path / "metadata.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match="has no records"):
        import_captions(find_source(tmp_path))


@pytest.mark.parametrize("text", ["a\0b", "x" * 70_000])
def test_a_caption_that_could_not_be_read_again_is_not_written(tmp_path: Path, text: str) -> None:
    write_images(tmp_path / "given", "a.jpg", "b.jpg")
    rows = [{"file_name": "a.jpg", "text": text}, {"file_name": "b.jpg", "text": "good"}]
    as_jsonl(tmp_path / "given", rows)
    for target in (None, tmp_path / "new"):
        source = find_source(tmp_path / "given")
        report = import_images(source, target) if target else import_captions(source)
        folder = target or tmp_path / "given"
        assert texts(folder) == {"b.txt": "good"} and (report.images, report.uncaptioned) == (2, 1)
        (line,) = report.caption_problems
        assert "metadata.jsonl, line 1: " in line and ("NUL character" in line or "70,000 characters" in line)
        assert report.problems == []
        section = Dataset(folders=[Folder(path=str(folder))], resolution=32, missing_caption="skip")
        assert not images.scan(section).problems
    edit = captions.assign(tmp_path / "given", {"b.txt": text}, "of a page")
    assert not edit.changes and len(edit.problems) == 1


def test_of_an_image_that_is_listed_twice_the_first_caption_is_taken(tmp_path: Path) -> None:
    given = tmp_path / "given"
    write_images(given, "a.jpg", "b.jpg", "c.jpg", "c.png")
    names = {"a.jpg": "first", "b.jpg": "one", "./a.jpg": "second", "c.jpg": "shared"}
    as_jsonl(given, [{"file_name": name, "text": text} for name, text in names.items()])
    with open(given / "metadata.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in ({"file_name": "b.jpg", "text": "one"},))
    report = import_images(find_source(given), tmp_path / "new")
    expected = {"a.txt": "first", "b.txt": "one", "c.txt": "shared"}
    assert texts(tmp_path / "new") == expected and len(list((tmp_path / "new").iterdir())) == 6
    twice = "metadata.jsonl, line 3: ./a.jpg is listed again with another caption; the first caption is used"
    assert report.images == 3 and [line.split("given/")[1] for line in report.problems] == [twice]
    with open(given / "metadata.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"file_name": "c.png", "text": "another"}))
    report = import_captions(find_source(given))
    assert texts(given) == expected and report.images == 4
    assert [line.split("given/")[1] for line in report.problems] == [twice]
    assert report.caption_problems == ["c.png: another image has the same caption file; its caption is used"]


def test_a_caption_in_another_encoding_stays_and_the_others_are_taken(tmp_path: Path) -> None:
    write_images(tmp_path, "a.jpg", "b.jpg", "c.jpg")
    (tmp_path / "a.txt").write_bytes("中".encode("gbk"))
    (tmp_path / "c.txt").write_bytes(b"\0")
    as_jsonl(tmp_path, [{"file_name": f"{name}.jpg", "text": name} for name in "abc"])
    for overwrite in (False, True):
        report = import_captions(find_source(tmp_path), overwrite=overwrite)
        assert (tmp_path / "a.txt").read_bytes() == "中".encode("gbk")
        assert (tmp_path / "b.txt").read_text("utf-8") == "b" and (tmp_path / "c.txt").read_bytes() == b"\0"
        command = f"`lora-fp8 dataset edit {tmp_path} --recode ENCODING`"
        for name, line in zip("ac", report.caption_problems, strict=True):
            assert line.startswith(f"{tmp_path}: {name}.txt: ") and command in line


@pytest.mark.parametrize("write", [as_jsonl, as_csv, as_table])
def test_a_path_may_be_one_of_windows(tmp_path: Path, write: Callable[..., None]) -> None:
    write_images(tmp_path, "sub/x.jpg", r"sub\y.jpg")
    (tmp_path / "sub/y.jpg").write_bytes(encoded(5))
    write(tmp_path, [{"file_name": rf"sub\{name}.jpg", "text": name} for name in "xy"])
    report = import_captions(find_source(tmp_path))
    assert report.problems == [] and texts(tmp_path) == {"sub/x.txt": "x", r"sub\y.txt": "y"}
    write(tmp_path, [{"file_name": r"..\outside.jpg", "text": "x"}, {"file_name": "sub/x.jpg", "text": "x"}])
    (tmp_path.parent / "outside.jpg").write_bytes(encoded(9))
    assert "outside of" in import_captions(find_source(tmp_path)).problems[0]


def test_a_row_of_csv_in_another_encoding_is_told_with_its_line(tmp_path: Path) -> None:
    write_images(tmp_path, "a.jpg", "b.jpg", "c.jpg")
    table = tmp_path / "metadata.csv"
    table.write_bytes("file_name,text\na.jpg,one\nb.jpg,中\nc.jpg,three\n".encode("gbk"))
    report = import_captions(find_source(tmp_path))
    assert report.problems == [f"{table}, line 3: the text is not UTF-8; save the file as UTF-8"]
    assert texts(tmp_path) == {"a.txt": "one", "c.txt": "three"}
    table.write_bytes("file_name,text,标签\na.jpg,two,x\n".encode("gbk"))
    with pytest.raises(UserError, match="metadata.csv, line 1: the text is not UTF-8"):
        import_captions(find_source(tmp_path))
    table.write_text(f'file_name,text\na.jpg,one\nb.jpg,"{"x" * 200_000}"\n', encoding="utf-8")
    assert f"{table}, line 3: the line is not CSV" in import_captions(find_source(tmp_path)).problems[0]


# ----------------------------------------------------------------------------------------------- into a new folder

HF_IMAGE = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])


def published(folder: Path) -> list[bytes]:
    """As Hugging Face publishes datasets: shards with an image feature, whose paths need not be unique or safe."""
    files = [encoded(seed, format) for seed, format in enumerate(["JPEG", "PNG", "WEBP", "JPEG", "JPEG", "BMP", "GIF"])]
    paths = ["a.jpg", "a.jpg", None, "../../evil.jpg", "x/con.png", "A.jpg", ""]
    rows = [
        {"image": {"bytes": raw, "path": path}, "text": f"image {number}", "id": number}
        for number, (raw, path) in enumerate(zip(files, paths, strict=True))
    ]
    schema = pyarrow.schema([("image", HF_IMAGE), ("text", pyarrow.string()), ("id", pyarrow.int64())])
    write_table(folder / "data/train-00000-of-00002.parquet", rows[:4], schema)
    write_table(folder / "data/train-00001-of-00002.parquet", rows[4:], schema)
    return files


def test_tables_with_images(tmp_path: Path) -> None:
    files = published(tmp_path / "given")
    target = tmp_path / "new"
    report = import_images(find_source(tmp_path / "given"), target)
    assert (report.images, report.uncaptioned, report.problems) == (7, 0, [])
    names = [
        "a.jpg", "a_2.png", "train-00000-of-00002.webp", "evil.jpg", "_con.jpg", "A_3.bmp", "train-00001-of-00002.gif"
    ]  # fmt: skip
    assert {path.name: path.read_bytes() for path in target.iterdir() if path.suffix != ".txt"} == dict(
        zip(names, files, strict=True)
    )
    assert texts(target) == {f"{Path(name).stem}.txt": f"image {number}" for number, name in enumerate(names)}
    assert not (tmp_path / "evil.jpg").exists() and sorted(path.name for path in tmp_path.iterdir()) == ["given", "new"]
    scanned = images.scan(Dataset(folders=[Folder(path=str(target))], resolution=32))
    assert not scanned.problems and len(scanned.examples) == 7


def test_an_import_goes_on_and_replaces_nothing(tmp_path: Path) -> None:
    published(tmp_path / "given")
    source, target = tmp_path / "given", tmp_path / "new"
    import_images(find_source(source), target, limit=3)
    assert len(list(target.iterdir())) == 6
    before = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    assert import_images(find_source(source), target).images == 7
    assert {path: path.stat().st_mtime_ns for path in before} == before and len(list(target.iterdir())) == 14
    (target / "evil.txt").write_text("edited", encoding="utf-8")
    with pytest.raises(UserError, match=r"evil.txt: the file exists already with other content; name a new folder"):
        import_images(find_source(source), target)
    assert (target / "evil.txt").read_text("utf-8") == "edited"
    (target / "evil.txt").unlink()
    (target / "evil.jpg").rename(target / ".evil.jpg.123.tmp")  # as it is left by a kill while it is written
    (target / ".evil.jpg.123.tmp").write_bytes((source / "../new/.evil.jpg.123.tmp").read_bytes()[:99])
    assert import_images(find_source(source), target).images == 7 and len(list(target.iterdir())) == 14
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "a.jpg").symlink_to(tmp_path / "somewhere")
    with pytest.raises(UserError, match="exists already"):
        import_images(find_source(source), linked)
    assert not (tmp_path / "somewhere").exists()
    assert not [path for path in tmp_path.rglob("*.tmp")]


@pytest.mark.parametrize("theirs", ["evil.txt", "mine.jpg", ".evil.jpg.7.tmp", "a_2.txt", "deep/a.jpg"])
def test_an_import_takes_over_no_folder_of_the_users(tmp_path: Path, theirs: str) -> None:
    """Their caption would become that of a foreign image, or an image would be placed before a clash ends it."""
    published(tmp_path / "given")
    target = tmp_path / "mine"
    (target / theirs).parent.mkdir(parents=True)
    (target / theirs).write_text("mine", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"exists already with other content|contains files that this import does not write"
    ):
        import_images(find_source(tmp_path / "given"), target)
    assert [path.name for path in target.rglob("*") if path.is_file()] == [Path(theirs).name]
    assert (target / theirs).read_text("utf-8") == "mine"
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / ".DS_Store").write_bytes(b"of the Finder")
    assert import_images(find_source(tmp_path / "given"), empty).images == 7


@pytest.mark.parametrize("end", [".tar", ".tar.gz"])
def test_shards_of_webdataset(tmp_path: Path, end: str) -> None:
    files = [encoded(seed) for seed in range(5)]
    members = {
        "000.jpg": files[0], "000.txt": b"a first", "000.json": b'{"caption": "unused", "width": 4}',
        "dir/001.json": '{"caption": "ein zweites Bild: \u00e4"}'.encode(), "dir/001.jpg": files[1],
        "dir/001.cls": b"7",
        "002.seg.png": encoded(7, "PNG"), "002.txt": b"a third",
        "003.txt": b"no image",
        "../../004.jpg": files[4], "../../004.txt": b"\xff\xfe broken",
        "005.jpg": b"<html>", "005.txt": b"no image either",
    }  # fmt: skip
    write_tar(tmp_path / f"given/shard-0{end}", members, "w:gz" if end.endswith("gz") else "w")
    with tarfile.open(tmp_path / "given/shard-1.tar", "w") as archive:
        link = tarfile.TarInfo("006.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    target = tmp_path / "new"
    report = import_images(find_source(tmp_path / "given"), target)
    assert texts(target) == {"000.txt": "a first", "001.txt": "ein zweites Bild: ä", "002.txt": "a third"}
    assert sorted(path.name for path in target.iterdir() if path.suffix != ".txt") == [
        "000.jpg", "001.jpg", "002.png", "004.jpg"
    ]  # fmt: skip
    assert [(target / f"{name}.jpg").read_bytes() for name in ("000", "001", "004")] == [files[0], files[1], files[4]]
    assert report.images == 4 and report.uncaptioned == 1
    assert ["003" in line or "005" in line for line in report.problems] == [True] * 2
    assert ["004" in line for line in report.caption_problems] == [True]


def test_a_shard_that_was_made_on_a_mac(tmp_path: Path) -> None:
    """Its tar puts a hidden file of the system before each file: between an image and its caption too."""
    members: dict[str, bytes] = {}
    for number in (1, 2):
        members |= {f"d/._{number}.jpg": b"Mac OS X" * 9, f"d/{number}.jpg": encoded(number)}
        members |= {f"d/._{number}.txt": b"Mac OS X" * 9, f"d/{number}.txt": b"a cat"}
    write_tar(tmp_path / "given.tar", members)
    report = import_images(find_source(tmp_path / "given.tar"), tmp_path / "new")
    assert texts(tmp_path / "new") == {"1.txt": "a cat", "2.txt": "a cat"}
    assert report.images == 2 and not report.uncaptioned and not report.problems


def test_captions_of_a_table_that_are_not_utf8_are_told_with_their_rows(tmp_path: Path) -> None:
    """pyarrow reads and writes such texts without a look at them."""
    raw = pyarrow.array([b"a cat", "中国".encode("gbk"), b"a dog"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), len(raw), raw.buffers())
    files = pyarrow.array([{"bytes": encoded(seed), "path": f"{seed}.jpg"} for seed in range(3)])
    pyarrow.parquet.write_table(pyarrow.table({"image": files, "text": text}), tmp_path / "given.parquet")
    report = import_images(find_source(tmp_path / "given.parquet"), tmp_path / "new")
    assert texts(tmp_path / "new") == {"0.txt": "a cat", "2.txt": "a dog"}
    assert report.images == 3 and report.uncaptioned == 1 and not report.problems
    assert ["row 2" in line for line in report.caption_problems] == [True]


def test_images_beside_metadata_into_a_new_folder(tmp_path: Path) -> None:
    write_images(tmp_path / "given", "a.jpg", "deep/b.png")
    as_jsonl(tmp_path / "given", [{"file_name": name, "text": name} for name in ("a.jpg", "deep/b.png")])
    import_images(find_source(tmp_path / "given" / "metadata.jsonl"), tmp_path / "new")
    assert texts(tmp_path / "new") == {"a.txt": "a.jpg", "deep_b.txt": "deep/b.png"}
    assert (tmp_path / "new/deep_b.png").read_bytes() == (tmp_path / "given/deep/b.png").read_bytes()


def test_tables_that_cannot_be_used(tmp_path: Path) -> None:
    write_table(tmp_path / "links.parquet", [{"url": "https://x/a.jpg", "caption": "a"}])
    with pytest.raises(UserError, match=r"the file contains no images; its columns are url, caption"):
        import_images(find_source(tmp_path / "links.parquet"), tmp_path / "new")
    (tmp_path / "torn.parquet").write_bytes((tmp_path / "links.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match=r"torn.parquet: this is not a parquet file, or it is damaged"):
        import_images(find_source(tmp_path / "torn.parquet"), tmp_path / "new")
    (tmp_path / "torn.tar").write_bytes(b"\x01" * 700)
    with pytest.raises(UserError, match=r"torn.tar: this is not a tar file, or it is damaged"):
        import_images(find_source(tmp_path / "torn.tar"), tmp_path / "new")
    os.mkfifo(tmp_path / "pipe.parquet")
    with pytest.raises(UserError, match=r"pipe.parquet: no dataset|pipe.parquet: no such|cannot be read"):
        import_images(find_source(tmp_path / "pipe.parquet"), tmp_path / "new")
    write_table(tmp_path / "empty.parquet", [{"image": {"bytes": None, "path": "a.jpg"}, "text": "a"}],
                pyarrow.schema([("image", HF_IMAGE), ("text", pyarrow.string())]))  # fmt: skip
    with pytest.raises(
        UserError, match=r"no image could be imported: .*row 1: the record has no image in column image"
    ):
        import_images(find_source(tmp_path / "empty.parquet"), tmp_path / "new")
    published(tmp_path / "given")
    with pytest.raises(UserError, match="the file contains the images; name a new folder to unpack them into"):
        import_captions(find_source(tmp_path / "given"))
    (tmp_path / "nothing").mkdir()
    for path, line in (("nothing", "accepted: metadata.jsonl"), ("nowhere", "no such file or folder")):
        with pytest.raises(UserError, match=line):
            find_source(tmp_path / path)


@pytest.mark.parametrize("damage", ["cut", "header", "none"])
def test_of_a_damaged_shard_what_can_be_read_is_taken_and_the_next_one(tmp_path: Path, damage: str) -> None:
    files = [encoded(seed) for seed in range(4)]
    for shard in range(2):
        members = {f"{n}.{kind}": raw for n in (2 * shard, 2 * shard + 1)
                   for kind, raw in (("jpg", files[n]), ("txt", b"caption %d" % n))}  # fmt: skip
        write_tar(tmp_path / f"given/shard-{shard}.tar", members)
    first = tmp_path / "given/shard-0.tar"
    raw = bytearray(first.read_bytes())
    at = raw.index(b"1.jpg\0")
    if damage == "cut":
        first.write_bytes(raw[: at + 600])
    elif damage == "header":
        first.write_bytes(raw[:at] + b"\x07" * 512 + raw[at + 512 :])
    report = import_images(find_source(tmp_path / "given"), tmp_path / "new")
    taken = (0, 1, 2, 3) if damage == "none" else (0, 2, 3)
    assert texts(tmp_path / "new") == {f"{n}.txt": f"caption {n}" for n in taken} and report.images == len(taken)
    assert [f"{first}: the file is damaged near " in line for line in report.problems] == [True] * (damage != "none")


def test_of_damaged_tables_the_others_are_taken(tmp_path: Path) -> None:
    published(tmp_path / "given")
    (tmp_path / "given/data/train-00000-of-00002.parquet").write_bytes(b"PAR1 torn")
    report = import_images(find_source(tmp_path / "given"), tmp_path / "new")
    assert report.images == 3 and "this is not a parquet file, or it is damaged" in report.problems[0]


def test_few_rows_are_held_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard has some hundred MB of images."""
    sizes = []
    table, batches = pyarrow.parquet.ParquetFile, pyarrow.parquet.ParquetFile.iter_batches
    monkeypatch.setattr(table, "iter_batches", lambda *one, **named: sizes.append(named) or batches(*one, **named))
    published(tmp_path / "given")
    import_images(find_source(tmp_path / "given"), tmp_path / "new")
    assert sizes == [{"batch_size": 16}] * 2


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path) -> None:
    published(tmp_path / "given")
    code = "import sys; sys.modules['pyarrow'] = None; from lora_fp8.cli import main; main()"
    command = [sys.executable, "-c", code, "dataset", "import", str(tmp_path / "given"), str(tmp_path / "new")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2 and "pip install 'lora-fp8[parquet]'" in ended.stderr


# ------------------------------------------------------------------------------------------------------------ in use


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lora-fp8", "dataset", "import", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    published(tmp_path / "given")
    code, out, _ = ask(str(tmp_path / "given"), str(tmp_path / "new"))
    assert code == 0 and "7 images, 0 of them without a caption" in out
    assert f"next: lora-fp8 dataset {tmp_path / 'new'}" in out
    code, out, _ = ask(str(tmp_path / "given"), str(tmp_path / "new"), "--json")
    assert code == 0 and json.loads(out)["images"] == 7
    write_images(tmp_path / "plain", "a.jpg")
    as_jsonl(tmp_path / "plain", [{"file_name": "a.jpg", "text": "a"}, {"file_name": "b.jpg", "text": "b"}])
    code, out, _ = ask(str(tmp_path / "plain"))
    assert code == 0 and "1 image, 0 of them" in out
    assert "warning: 1 record or file was skipped" in out and texts(tmp_path / "plain") == {"a.txt": "a"}
    for wrong in (["--limit", "3"], ["--overwrite", str(tmp_path / "new")]):
        code, _, err = ask(str(tmp_path / "plain"), *wrong)
        assert code == 2 and wrong[0] in err and "Traceback" not in err


def test_a_scan_says_that_there_is_a_dataset_of_another_form(tmp_path: Path) -> None:
    published(tmp_path / "given")
    (problem,) = images.scan(Dataset(folders=[Folder(path=str(tmp_path / "given"))], resolution=32)).problems
    assert "has its images inside train-00000-of-00002.parquet" in problem
    assert f"`lora-fp8 dataset import {tmp_path / 'given'} FOLDER`" in problem
    assert "dataset import" in translate("zh-CN", problem) and translate("zh-CN", problem) != problem
    plain = tmp_path / "plain"
    write_images(plain, "a.jpg", "b.jpg")
    as_jsonl(plain, [{"file_name": "a.jpg", "text": "a"}])
    report = images.scan(Dataset(folders=[Folder(path=str(plain))], resolution=32))
    assert any(f"`lora-fp8 dataset import {plain}` saves them" in line for line in report.warnings)
    for name in "ab":
        (plain / f"{name}.txt").write_text("x", encoding="utf-8")
    report = images.scan(Dataset(folders=[Folder(path=str(plain))], resolution=32))
    assert not any("dataset import" in line for line in report.warnings)
    assert any("ignored: metadata.jsonl" in line for line in report.warnings)


def test_long_names_are_cut_to_what_file_systems_take(tmp_path: Path) -> None:
    """Counted in bytes: a Chinese character has three."""
    names = ["猫" * 80 + "a", "猫" * 80 + "b", "n" * 240]
    write_tar(tmp_path / "a.tar", {f"{name}.jpg": encoded(seed) for seed, name in enumerate(names)})
    report = import_images(find_source(tmp_path / "a.tar"), tmp_path / "new")
    written = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert report.images == 3 and written == ["n" * 200 + ".jpg", "猫" * 66 + ".jpg", "猫" * 66 + "_2.jpg"]


def test_the_lists_of_names_do_not_overlap() -> None:
    assert not set(foreign_datasets.PATHS) & set(foreign_datasets.CAPTIONS)
    assert set(dataset_import.SUFFIXES) >= {"PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF", "AVIF", "HEIF"}
