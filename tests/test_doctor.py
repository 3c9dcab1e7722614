"""The dataset's doctor: each kind of finding is planted by Pillow in a good dataset, and found in that file alone."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter

from lora_fp8 import cli, config, families
from lora_fp8.common import stamps
from lora_fp8.data import buckets, caption_operations, captions, decoding, diagnosis, doctor
from lora_fp8.settings import Dataset


def picture(seed: int, size: tuple[int, int] = (640, 640)) -> Image.Image:
    """Something with large shapes and fine detail, another one for every seed."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    fine = rng.integers(-20, 21, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.asarray(coarse).astype(int) + fine, 0, 255).astype(np.uint8))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four good pictures with captions of their own."""
    root = tmp_path / "set"
    root.mkdir()
    for seed in range(4):
        picture(seed).save(root / f"good{seed}.png")
        (root / f"good{seed}.txt").write_text(f"zibo, number {seed}", encoding="utf-8")
    return root


def put(image: Image.Image, path: Path, caption: str | bytes | None = None, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    caption = f"zibo, {path.stem} of its own" if caption is None else caption
    path.with_suffix(".txt").write_bytes(caption.encode() if isinstance(caption, str) else caption)


def examined(folder: Path, *, family: str = "sd15", remember: Path | None = None, **settings) -> diagnosis.Diagnosis:
    settings = {"folders": [{"path": str(folder)}], "trigger": "zibo", **settings}
    section = Dataset.model_validate(settings)
    target = doctor.Target(512, 64, caption_tokens=75 if family == "sd15" else 0)
    return doctor.examine(section, target, remember=remember)


def by_kind(found: diagnosis.Diagnosis) -> dict[str, list[tuple[str, str]]]:
    return {finding.kind: finding.files for finding in found.findings}


def test_a_good_dataset_has_no_findings(folder: Path) -> None:
    found = examined(folder)
    assert found.findings == [] and found.ok
    assert found.buckets == [{"size": "512x512", "count": 4, "cut": 0.0, "most_cut": 0.0, "enlarged": 0}]
    assert found.tags == {"zibo": 4, "number 0": 1, "number 1": 1, "number 2": 1, "number 3": 1}


def test_what_a_folder_adds_counts_and_marks_are_no_tags(folder: Path) -> None:
    long = {"path": str(folder), "prefix": "a cat " * 38}
    assert len(by_kind(examined(folder, folders=[long]))["caption_long"]) == 4
    put(picture(9), folder / "odd.png", "zibo ||| hat, sky ||| best")
    found = examined(folder, keep_separator="|||")
    assert {tag: found.tags[tag] for tag in ("zibo", "hat", "sky", "best")} == {
        "zibo": 5,
        "hat": 1,
        "sky": 1,
        "best": 1,
    }


def test_each_line_is_a_caption_where_one_is_drawn(folder: Path) -> None:
    put(picture(9), folder / "odd.png", "zibo, " + "a cat " * 25 + "\nzibo, " + "a dog " * 25)
    assert by_kind(examined(folder))["caption_long"][0][0] == "odd.png"
    for lines in ("one", "first"):
        assert examined(folder, caption_lines=lines).findings == []
    put(picture(9), folder / "odd.png", "zibo, hat\nred")
    assert by_kind(examined(folder, caption_lines="one"))["trigger_missing"] == [("odd.png", "'zibo'")]
    assert examined(folder, caption_lines="one").tags["hat"] == 1


def planted(kind: str, root: Path) -> str | None:
    """Put one odd picture or caption into the folder; what its detail has to say."""
    odd, path = picture(9), root / "odd.png"
    if kind == "unreadable":
        put(odd, path)
        path.write_bytes(path.read_bytes()[:5000])
        return "the file is truncated"
    if kind == "caption_encoding":
        put(odd, path, "红发".encode("gb18030"))
        return "byte 0 (0xba)"
    if kind == "caption_unreadable":
        put(odd, path)
        path.with_suffix(".txt").unlink()
        os.mkfifo(path.with_suffix(".txt"))
        return "is not a regular file"
    if kind == "caption_missing":
        odd.save(path)
        return "odd.txt"
    if kind == "caption_empty":
        put(odd, path, b" \n")
        return "odd.txt"
    if kind in ("caption_damaged", "caption_half_done"):
        put(odd, path)
        captions.apply(root, captions.preview(root, [caption_operations.Append("!")], ["odd.png"]))
        if kind == "caption_damaged":
            path.with_suffix(".txt").write_bytes(b"")
            return "odd.txt"
        journal = root / captions.JOURNAL  # without its end, the edit was never finished
        journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
        return "append '!'"
    if kind == "caption_leftover":
        (root / f".good0.txt.{2**22 + 1}.tmp").write_bytes(b"zibo")
        return ".good0.txt."
    if kind == "duplicate":
        put(odd, path)
        put(odd, root / "odd2.png")
        return "odd.png"
    if kind == "near_duplicate":
        put(odd, path)
        put(odd.resize((600, 600), Image.Resampling.LANCZOS), root / "odd2.jpg", quality=70)
        return "odd.png"
    if kind == "tiny":
        put(picture(9, (250, 250)), path)
        return "250 x 250"
    if kind == "small":
        put(picture(9, (400, 400)), path)
        return "400 x 400"
    if kind == "cut":
        put(picture(9, (1800, 600)), path)
        put(picture(8, (1200, 600)), root / "two_to_one.png")
        return "33%"
    if kind == "little_detail":
        put(odd.filter(ImageFilter.GaussianBlur(5)), path)
        return ""
    if kind == "animated":
        path = path.with_suffix(".gif")
        put(odd, path, save_all=True, append_images=[picture(10), picture(11)])
        return "3"
    if kind == "transparent":
        odd.putalpha(Image.linear_gradient("L").resize(odd.size))
        put(odd, path)
        return ""
    if kind == "cmyk":
        put(odd.convert("CMYK"), path.with_suffix(".jpg"), quality=95)
        return ""
    if kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        put(odd, path.with_suffix(".jpg"), quality=95, exif=exif)
        return "6"
    if kind == "profile":
        put(odd, path, icc_profile=b"no profile")
        return "damaged"
    if kind == "extension":
        put(odd, root / "odd.webp", format="PNG")
        return "PNG"
    if kind == "caption_repeated":
        put(odd, path, "zibo, number 0")
        return "1"
    if kind == "caption_long":
        put(odd, path, "zibo, " + "a cat " * 45)
        return "9"
    if kind == "trigger_missing":
        put(odd, path, "a zibot")
        return "'zibo'"
    if kind == "choice_unused":
        put(odd, path, "zibo, a {red|blue} car")
        return "{red|blue}"
    if kind in ("sentences_shuffled", "sentences_cut"):
        put(odd, path, "zibo stands in front of a tall house, and a small dog looks at her from the garden")
        return "'zibo stands in front"
    if kind == "wide_commas":
        put(odd, path, "zibo，一个女孩，红色头发")
        return "，"
    if kind == "uneven":
        put(odd, root / "few/odd.png")
        return ".: 4, few: 1"
    if kind == "kohya_folder":
        put(odd, root / "12_girl/odd.png")
        put(picture(10), root / "12_girl/odd2.png")
        return "12"
    if kind == "lonely_bucket":
        put(picture(9, (700, 560)), path)
        return "576x448"
    if kind == "folder":
        (root / "notes.md").write_text("x", encoding="utf-8")
        return "notes.md"
    raise AssertionError(f"no plant for {kind}")


NAMES = {
    **{"duplicate": "odd2.png", "near_duplicate": "odd2.jpg", "animated": "odd.gif", "cmyk": "odd.jpg"},
    **{"turned": "odd.jpg", "extension": "odd.webp", "uneven": "", "kohya_folder": "12_girl", "folder": ""},
    **{"caption_half_done": "", "caption_leftover": ""},
}


# Those of clips are in tests/test_video_clips.py, those of masks in tests/test_masks.py.
@pytest.mark.parametrize("kind", [kind for kind in diagnosis.KINDS if not kind.startswith(("clip_", "mask"))])
def test_each_kind_is_found_in_its_file_alone(folder: Path, kind: str) -> None:
    detail = planted(kind, folder)
    settings = {"sentences_cut": {"tag_dropout": 0.1}}.get(kind, {})
    if kind in ("sentences_shuffled", "wide_commas"):
        settings = {"shuffle_tags": True}
    found = by_kind(examined(folder, family="sd15", **settings))
    files = found.pop(kind)
    if kind == "caption_repeated":
        assert [name for name, _ in files] == ["good0.png", "odd.png"]
    else:
        assert [name for name, _ in files] == [NAMES.get(kind, "odd.png")]
    assert detail in files[0][1], files
    allowed = {"cut": {"lonely_bucket"}, "kohya_folder": set()}.get(kind, set())
    assert found.keys() <= allowed, found


def test_what_was_said_of_a_crop_is_what_pillow_cuts(folder: Path) -> None:
    """The share is measured: a picture whose left half is counted pixel by pixel after the training's own crop."""
    put(picture(9, (1800, 600)), folder / "odd.png")
    place = buckets.place((1800, 600), 512, 64)
    kept = buckets.fit(Image.open(folder / "odd.png"), place)
    assert kept.size == place.bucket_wh
    scale = place.resized_wh[1] / 600
    share = (kept.width / scale) * (kept.height / scale) / (1800 * 600)
    [(_, detail)] = by_kind(examined(folder))["cut"]
    assert abs(float(detail.rstrip("%")) / 100 - (1 - share)) < 0.01


@pytest.mark.parametrize("seed", range(3))
def test_near_duplicates_are_copies_and_not_merely_similar(seed: int, tmp_path: Path) -> None:
    """Recompressed, resized, brightened a little: found. Other pictures, mirrored ones, even surfaces: not."""
    original = picture(seed)
    for name, image in {
        "a.png": original,
        "b.jpg": original.resize((500, 500)),
        "c.png": original.point(lambda value: min(255, value + 6)),
        "d.png": picture(seed + 100),
        "e.png": original.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        "f.png": Image.new("RGB", (640, 640), (200, 200, 200)),
        "g.png": Image.new("RGB", (640, 640), (205, 200, 200)),
    }.items():
        put(image, tmp_path / name)
    assert by_kind(examined(tmp_path))["near_duplicate"] == [("b.jpg", "a.png"), ("c.png", "a.png")]


def test_missing_captions_are_as_grave_as_training_takes_them(folder: Path) -> None:
    picture(9).save(folder / "odd.png")
    assert not examined(folder).ok
    for setting in ("trigger", "skip"):
        found = examined(folder, missing_caption=setting)
        assert found.ok and [finding.level for finding in found.findings] == ["warning"]
    # A folder for regularization has no trigger word that could stand for a caption.
    one = {"path": str(folder), "regularization": True}
    assert not examined(folder, missing_caption="trigger", folders=[one]).ok


def test_a_folder_that_is_named_twice_is_no_copy_of_itself(folder: Path) -> None:
    found = examined(folder, folders=[{"path": str(folder)}, {"path": f"{folder}/", "resolution": 256}])
    assert [finding.kind for finding in found.findings] == ["folder"]  # which says that it is named twice
    assert [(one["size"], one["count"]) for one in found.buckets] == [("256x256", 4), ("512x512", 4)]


def test_folders_that_cannot_be_are_problems(tmp_path: Path) -> None:
    found = examined(tmp_path / "none")
    assert not found.ok and "does not exist" in found.findings[0].files[0][1]


def test_folders_of_a_config_are_weighed_with_their_repeats(folder: Path, tmp_path: Path) -> None:
    for seed in range(4):
        put(picture(20 + seed), tmp_path / f"other/p{seed}.png")
    both = [{"path": str(folder), "repeats": 2}, {"path": str(tmp_path / "other"), "repeats": 9}]
    found = examined(folder, folders=both)
    assert f"{tmp_path / 'other'}: 36" in by_kind(found)["uneven"][0][1] and found.counts["shown"] == 44
    expected = {f"{index}/{name}{i}.png" for index, name in ((0, "good"), (1, "p")) for i in range(4)}
    assert {one["file"] for one in found.pictures} == expected
    assert "uneven" not in by_kind(examined(folder, folders=[{**one, "repeats": 2} for one in both]))


def test_what_is_remembered_is_measured_again_when_the_file_changes(folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(stamps, "SETTLED", 0.0)
    decoded: list[str] = []
    look = decoding._inspect_file
    monkeypatch.setattr(decoding, "_inspect_file", lambda path, *rest: decoded.append(path.name) or look(path, *rest))
    for seed in range(3):
        put(Image.new("L", (320, 320), 100 * seed), tmp_path / f"masks/good{seed}.png")
    memory, masked = tmp_path / "memory", [{"path": str(folder), "mask": str(tmp_path / "masks")}]
    first = examined(folder, remember=memory, folders=masked)
    assert len(decoded) == 7 and "black all over" in str(by_kind(first)["mask"])
    assert examined(folder, remember=memory, folders=masked).to_json() == first.to_json()
    assert len(decoded) == 7
    put(Image.new("L", (320, 320), 7), tmp_path / "masks/good0.png")
    assert "black" not in str(by_kind(examined(folder, remember=memory, folders=masked))["mask"])
    assert decoded[7:] == ["good0.png"]
    picture(9, (300, 500)).save(folder / "good2.png")
    assert {"file": "good2.png", "width": 300, "height": 500} in examined(folder, remember=memory).pictures
    assert decoded[8:] == ["good2.png"]


def test_looking_changes_nothing(folder: Path, tree_hash) -> None:
    before = tree_hash(folder)
    examined(folder)
    assert tree_hash(folder) == before


def test_the_target_of_a_job_has_the_numbers_of_its_family() -> None:
    text = "[model]\nfamily='{}'\npath='x'\n[[dataset.folders]]\npath='y'\n"
    limits = {}
    for name in families.list_families():
        job = config.loads(text.format(name) + ("control='z'\n" if any(families.get(name).controls) else ""))
        target = doctor.Target.from_job(job, families.get(name))
        assert (target.resolution, target.bucket_step) == (families.get(name).native_resolution, 64), name
        limits[name] = target.caption_tokens
    # These have no text encoder but CLIP, whose 77 tokens include the first and the last one.
    assert {name: limit for name, limit in limits.items() if limit} == {"sd15": 75, "sd2": 75, "sdxl": 75}
    job = config.loads(text.format("sdxl"), ["dataset.resolution=640", "dataset.bucket_step=32"])
    target = doctor.Target.from_job(job, families.get("sdxl"))
    assert (target.resolution, target.bucket_step) == (640, 32)


def test_tokens_are_counted_roughly() -> None:
    """18 words and 4 marks, two words of which CLIP would split or not, and five ideographs."""
    text = "a photo of a cat sitting on a red chair, soft light, wide shot; 猫在椅子上"
    assert 20 <= doctor.estimate_tokens(text) <= 27
    assert doctor.estimate_tokens("") == 0


def ask(monkeypatch, capfd, *arguments: str | Path) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["lora-fp8", *map(str, arguments)])
    code = 0
    try:
        cli.main()
    except SystemExit as end:
        code = end.code
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    return code, out, err


def test_the_command_tells_and_edits(folder: Path, tmp_path: Path, monkeypatch, capfd, tree_hash) -> None:
    picture(9).save(folder / "odd.png")
    code, _, err = ask(monkeypatch, capfd, "dataset", "edit", folder)
    assert code == 2 and err == "no edit was given. `lora-fp8 dataset edit --help` lists the edits\n"
    (folder / "good0.txt").write_text("zibo, " + 50 * "long " + "tag", encoding="utf-8")
    code, out, _ = ask(monkeypatch, capfd, "dataset", folder, "--trigger", "zibo")
    assert "...: 1" in out and 20 * "long " not in out
    (folder / "good0.txt").write_text("zibo, number 0", encoding="utf-8")
    code, out, _ = ask(monkeypatch, capfd, "dataset", folder, "--trigger", "zibo")
    assert (
        code == 2 and "512x512" not in out and "1024x1024: 5 images" in out and "there is no caption (odd.txt)" in out
    )
    helped = ("--trigger", "zibo 😀", "--set", "dataset.missing_caption=trigger")
    assert ask(monkeypatch, capfd, "dataset", folder, *helped)[0] == 0
    code, out, err = ask(monkeypatch, capfd, "dataset", folder, "--json", "--resolution", "512")
    told = json.loads(out)
    assert code == 2 and not told["ok"] and told["findings"][0]["files"][0]["file"] == "odd.png"
    assert json.loads(err.splitlines()[-1]) == {"event": "progress", "done": 5, "total": 5}
    before = tree_hash(folder)
    code, out, _ = ask(monkeypatch, capfd, "dataset", "edit", folder, "--add-tag", "new", "--only", "odd*", "--dry-run")
    assert code == 0 and "+ new" in out and "1 of 1 captions would change" in out and tree_hash(folder) == before
    code, out, _ = ask(
        monkeypatch, capfd, "dataset", "edit", folder, "--add-tag", "new", "--rename-tag", "zibo", "zubo"
    )
    assert code == 0 and "5 of 5 captions changed" in out
    assert (folder / "good1.txt").read_text(encoding="utf-8") == "zubo, number 1, new"
    code, out, _ = ask(monkeypatch, capfd, "dataset", "history", folder, "--json")
    assert [entry["files"] for entry in json.loads(out)] == [5]
    code, out, _ = ask(monkeypatch, capfd, "dataset", "undo", folder)
    left = tree_hash(folder)
    left.pop(".lora_fp8_captions.jsonl")
    assert code == 0 and left == before
    assert ask(monkeypatch, capfd, "dataset", "redo", folder)[0] == 0
    repaired = (folder / "good1.txt").read_bytes()
    (folder / "good1.txt").write_bytes(bytes(len(repaired)))
    code, out, _ = ask(monkeypatch, capfd, "dataset", "repair", folder, "--dry-run")
    assert code == 0 and "1 damaged caption would be restored: good1.txt" in out
    code, out, _ = ask(monkeypatch, capfd, "dataset", "repair", folder, "--json")
    assert code == 0 and json.loads(out)["restored"] == ["good1.txt"]
    assert (folder / "good1.txt").read_bytes() == repaired
    assert "no caption needs repair" in ask(monkeypatch, capfd, "dataset", "repair", folder)[1]
    journal = folder / ".lora_fp8_captions.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:-1]))  # the redo never ended
    assert "(incomplete; " in ask(monkeypatch, capfd, "dataset", "history", folder)[1]
    assert "undone in 5 files" in ask(monkeypatch, capfd, "dataset", "repair", folder)[1]
    assert ask(monkeypatch, capfd, "dataset", "redo", folder)[0] == 0
    for wrong in (
        ["edit", folder],
        ["edit", folder, "--add-tag", "a,b"],
        ["edit", folder, "--first", "--sort"],
        ["undo", tmp_path],
        ["look", tmp_path / "no"],
        [tmp_path / "none.toml"],
        [folder, "--family", "sd51"],
        [folder, "--set", "train.steps=5"],
        [folder, "--set", "dataset.folders.0.repeats=2"],
        [folder, "--family", "sdxl", "--set", "dataset.frames=[5]"],
    ):
        code, out, err = ask(monkeypatch, capfd, "dataset", *wrong)
        assert code == 2 and err and not out, wrong


def test_the_command_reads_a_config(job, tmp_path: Path, monkeypatch, capfd) -> None:
    path = tmp_path / "job.toml"
    path.write_text(config.dumps(job()), encoding="utf-8")
    code, out, _ = ask(monkeypatch, capfd, "dataset", path, "--json", "--set", "dataset.resolution=64")
    told = json.loads(out)
    assert code == 0 and told["resolution"] == 64 and told["bucket_step"] == 16 and told["counts"]["pictures"] == 5
    assert os.path.basename(told["pictures"][0]["file"]) == "a.png"
