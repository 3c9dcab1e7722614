"""Images that are excluded, turned and cropped by a folder's list are seen as if their files had been edited.

The authority is a folder whose files Pillow has turned and cropped, and whose excluded files are not there.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from test_cache import Family

from lora_fp8 import cli
from lora_fp8.data import buckets, captions, decoding, doctor, image_changes, image_edits, images
from lora_fp8.data.cache import Cache
from lora_fp8.data.image_edits import FILE, ImageEdit
from lora_fp8.errors import UserError
from lora_fp8.settings import Dataset, Folder
from lora_fp8.stages.cache import make_manifest
from lora_fp8.tools import captioner

EDITS = {
    "turned.png": ImageEdit(rotate=90),
    "cropped.png": ImageEdit(crop=(0.25, 0.0, 1.0, 0.5)),
    "sub/both.png": ImageEdit(rotate=270, crop=(0.0, 0.1, 0.5, 0.9)),
    "out.png": ImageEdit(exclude=True),
}
NAMES = (*EDITS, "plain.png")
UPRIGHT = 6
"""EXIF orientation of a photo that is stored on its side."""


def bake(image: Image.Image, edit: ImageEdit) -> Image.Image:
    """Edit an image as Pillow's own functions do."""
    image = ImageOps.exif_transpose(image).rotate(-edit.rotate, expand=True)
    width, height = image.size
    left, top, right, bottom = edit.crop
    return image.crop((round(left * width), round(top * height), round(right * width), round(bottom * height)))


def make_image(seed: int, mode: str = "RGBA") -> Image.Image:
    bands = len(mode)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (80, 160, bands), np.uint8).squeeze(), mode)


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Dataset, Dataset]:
    """A folder with a list of edits, and one whose files are edited; each with masks and control images."""
    sections = []
    for kind in ("listed", "baked"):
        for number, name in enumerate(NAMES):
            edit = EDITS.get(name, ImageEdit())
            if kind == "baked" and edit.exclude:
                continue
            for part, mode in (("images", "RGBA"), ("masks", "L"), ("controls", "RGB")):
                path = tmp_path / kind / part / name
                path.parent.mkdir(parents=True, exist_ok=True)
                image, exif = make_image(10 * number + len(part), mode), Image.Exif()
                exif[274] = UPRIGHT
                image.save(path, exif=exif)
                if kind == "baked":
                    with Image.open(path) as saved:
                        bake(saved, edit).save(path)
            (tmp_path / kind / "images" / name).with_suffix(".txt").write_text(f"a photo {number}")
        root = tmp_path / kind
        folder = Folder(path=str(root / "images"), mask=str(root / "masks"), control=str(root / "controls"))
        sections.append(Dataset(folders=[folder], resolution=64, background="#102030"))
    listed, baked = sections
    folder = Path(listed.folders[0].path)
    captions.apply(folder, captions.assign_images(folder, EDITS, "edits"))
    return listed, baked


def encode(section: Dataset, cache: Path) -> dict[str, list[torch.Tensor]]:
    """Latents of each image, its mask and its control image, by the image's name."""
    placed = buckets.assign(images.scan(section, (1, 1)).require(), section, resolution=64, step=16)
    family = Family()
    family.compute_control_size = lambda width, height, side: (32, 32)
    store = Cache(cache, family, section)
    store.fill(placed, [])
    return {
        one.example.relative: [
            store.read_latents(one, False),
            store._get("latents", store.make_mask_key(one, False), "mask")["mask"],
            store._get("latents", store.make_control_key(store.list_control_crops(one)[0], False), "control")[
                "latents"
            ],
        ]
        for one in placed
    }


def test_training_sees_what_edited_files_would_show(folders: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    listed, baked = folders
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.png")}
    wanted, encoded = encode(baked, tmp_path / "cache1"), encode(listed, tmp_path / "cache2")
    assert set(encoded) == set(wanted) == set(NAMES) - {"out.png"}
    for name, tensors in wanted.items():
        for tensor, other in zip(tensors, encoded[name], strict=True):
            torch.testing.assert_close(other, tensor, rtol=0, atol=0, msg=name)
    assert {path: path.read_bytes() for path in before} == before, "no image is written"
    report = images.scan(listed, (1, 1))
    assert all("out.png" in line for line in report.warnings), "of the excluded image, mask and control are left over"
    assert (report.counts["excluded"], report.counts["edited"]) == (1, 3)
    target = doctor.Target(64, 16)
    seen, wished = (doctor.examine(section, target) for section in folders)
    sizes = [{one["file"]: (one["width"], one["height"]) for one in told.pictures} for told in (seen, wished)]
    assert sizes[0] == sizes[1]


def test_an_edit_is_another_image_for_the_cache_and_for_a_resumed_run(folders: tuple[Dataset, Dataset]) -> None:
    listed, _ = folders
    folder = Path(listed.folders[0].path)
    edited = images.scan(listed).require()
    captions.undo(folder)
    assert not (folder / FILE).exists()
    plain = images.scan(listed).require()
    before, after = make_manifest(plain), make_manifest(edited)
    assert set(before) - set(after) == {"0/out.png"}
    assert {name for name in after if after[name] != before[name]} == {f"0/{name}" for name in EDITS} - {"0/out.png"}
    captions.redo(folder)
    assert make_manifest(images.scan(listed).require()) == after


def test_what_is_remembered_of_an_image_is_measured_again_when_its_edit_changes(
    folders: tuple[Dataset, Dataset], tmp_path: Path
) -> None:
    listed, _ = folders
    folder, target, kept = Path(listed.folders[0].path), doctor.Target(64, 16), tmp_path / "kept.json"

    def size_of_turned() -> tuple[int, int]:
        pictures = doctor.examine(listed, target, remember=kept).pictures
        return next((one["width"], one["height"]) for one in pictures if one["file"] == "turned.png")

    assert size_of_turned() == (160, 80) == size_of_turned()
    captions.undo(folder)
    assert size_of_turned() == (80, 160)


def test_a_model_captions_what_is_trained(folders: tuple[Dataset, Dataset], monkeypatch: pytest.MonkeyPatch) -> None:
    listed, baked = folders
    shown: list[tuple[int, int]] = []

    class Model:
        device, warnings = "CPU", ()

        def describe(self, pixels: list[Image.Image]) -> list[str]:
            shown.extend(image.size for image in pixels)
            return ["a cat"] * len(pixels)

    monkeypatch.setattr(captioner, "load", lambda settings, report: Model())
    for section in folders:
        captioner.run(Path(section.folders[0].path), captioner.Settings("model", overwrite=True))
    assert len(shown) == 8 and shown[:4] == shown[4:]
    excluded = Path(listed.folders[0].path) / "out.txt"
    assert excluded.read_text() == f"a photo {NAMES.index('out.png')}", "the caption of an excluded image stays"


WRONG = ("turn = 1", "rotate = 45", "rotate = true", "exclude = 1", "crop = [0, 0, 2, 1]", "crop = [0.5, 0, 0.5, 1]",
         "crop = [nan, 0, 1, 1]", "crop = [0, 0, 1]")  # fmt: skip


@pytest.mark.parametrize("text", ["[a", "a = 1\n", *(f'["a.png"]\n{line}\n' for line in WRONG)])
def test_a_list_with_something_else_in_it_is_refused(tmp_path: Path, text: str) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a photo")
    (tmp_path / FILE).write_text(text)
    section = Dataset(folders=[Folder(path=str(tmp_path))])
    (problem,) = images.scan(section).problems
    assert FILE in problem and ("a.png" in problem or text[0] != '"')
    with pytest.raises(UserError, match="lora_fp8_images"):
        captions.assign_images(tmp_path, {"a.png": ImageEdit(rotate=90)}, "x")
    assert (tmp_path / FILE).read_text() == text


def test_lists_come_back_as_they_were_written(tmp_path: Path) -> None:
    names = ["a.png", 'quo"te\\.png', "图 片.jpg", "x\x7f\t\x1b.png", "\U0001f408.png", "[a].png", "a.b.c.png"]
    edits = {
        name: ImageEdit(number == 0, 90 * (number % 4), (0.1, 0.2, 1 / 3, 1.0)) for number, name in enumerate(names)
    }
    assert image_edits.parse(image_edits.format_edits(edits)) == edits
    (tmp_path / FILE).write_bytes(b"\xef\xbb\xbf" + image_edits.format_edits(edits).replace("\n", "\r\n").encode())
    assert image_edits.read(tmp_path) == edits, "as Notepad saves it"


def test_unknown_names_and_folders_without_images_are_told(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a photo")
    (tmp_path / FILE).write_text('["gone.png"]\nrotate = 90\n["a.png"]\nexclude = true\n')
    report = images.scan(Dataset(folders=[Folder(path=str(tmp_path))]))
    assert any("gone.png" in line for line in report.warnings) and not report.examples
    (problem,) = report.problems
    assert "excluded" in problem and FILE in problem


def test_masks_and_control_images_of_excluded_images_are_not_left_over(tmp_path: Path) -> None:
    """Nor does an image take the numbered control image of an excluded one."""
    names = {"images": "a out 0 0_1", "masks": "a out 0 0_1 stray", "controls": "a out 0_1 stray"}
    for number, (part, stems) in enumerate(names.items()):
        (tmp_path / part).mkdir()
        for stem in stems.split():
            make_image(10 * len(stem) + number, "L" if part == "masks" else "RGB").save(tmp_path / part / f"{stem}.png")
            (tmp_path / "images" / f"{stem}.txt").write_text("a photo")
    (tmp_path / "images/stray.txt").unlink()
    (tmp_path / "images" / FILE).write_text('["out.png"]\nexclude = true\n["0_1.png"]\nexclude = true\n')
    folder = Folder(path=f"{tmp_path}/images", mask=f"{tmp_path}/masks", control=f"{tmp_path}/controls")
    section = Dataset(folders=[folder], resolution=64)
    report = images.scan(section, num_controls=(1, 1))
    assert [line.partition(": there is no control")[0] for line in report.problems] == [f"{tmp_path}/images/0.png"]
    strays = [f"{tmp_path}/masks/stray.png", f"{tmp_path}/controls/stray.png"]
    assert sorted(line.rpartition(": ")[2] for line in report.warnings) == sorted(strays)
    found = [str(line) for line in doctor.examine(section, doctor.Target(64, 16)).findings]
    assert any(strays[0] in line for line in found) and not any("/out.png" in line for line in found)


def test_a_list_that_is_a_link_is_not_followed(tmp_path: Path, link: Callable[[Path, Path], None] = os.symlink) -> None:
    folder, outside = tmp_path / "set", tmp_path / "outside.toml"
    folder.mkdir()
    outside.write_text("")
    link(outside, folder / FILE)
    with pytest.raises(UserError):
        captions.assign_images(folder, {"a.png": ImageEdit(rotate=90)}, "x")
    assert outside.read_text() == ""


def test_crops_keep_at_least_a_pixel() -> None:
    for box in ((0.999, 0.999, 1.0, 1.0), (0.0, 0.0, 0.001, 0.001), (0.4999, 0.0, 0.5, 1.0)):
        size = ImageEdit(crop=box).apply(Image.new("L", (10, 7))).size
        assert min(size) >= 1
    assert decoding.NOTHING == ImageEdit() and not ImageEdit(exclude=True)


def test_the_command_changes_and_lists_what_training_leaves_out(tmp_path: Path, monkeypatch, capfd) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("a.png", "b.png", "[x].png"):
        make_image(1, "RGB").save(folder / name)
    before = {path: path.read_bytes() for path in folder.iterdir()}

    def ask(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["lora-fp8", "dataset", "images", str(folder), *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
            raise SystemExit(0)
        out, err = capfd.readouterr()
        return f"{end.value.code or 0} {out}{err}"

    assert ask("--only", "[ab].png", "--turn", "270").startswith("0 ") and ask("--only", "b*", "--exclude")[0] == "0"
    assert ask("--only", "b*", "--crop", "0.5", "0", "1", "1")[0] == "0"
    both = ImageEdit(exclude=True, rotate=270, crop=(0.5, 0.0, 1.0, 1.0))
    assert image_edits.read(folder) == {"a.png": ImageEdit(rotate=270), "b.png": both}
    listed = ask()
    assert "a.png: rotate = 270\n" in listed and "b.png: exclude = true, rotate = 270, crop = [0.5," in listed
    assert json.loads(ask("--only", "b*", "--json")[2:]) == json.loads(json.dumps({"b.png": vars(both)}))
    for wrong in (
        ["--exclude"],
        ["--only", "*", "--exclude", "--include"],
        ["--only", "*", "--turn", "45"],
        ["--only", "*", "--crop", "1", "0", "0", "1"],
        ["--only", "c*", "--exclude"],
    ):
        said = ask(*wrong)
        assert said[0] == "2" and said.count("\n") == 1, said
    assert "2 images" in ask("--only", "[!b]*", "--exclude"), "none is left, and all can come back"
    assert "3 of 3" in ask() and "3 images" in ask("--only", "*", "--include")
    assert "nothing to change" in ask("--only", "*", "--include")
    captions.undo(folder)
    assert sorted(image_changes.list_excluded(folder, image_edits.read(folder))) == ["[x].png", "a.png", "b.png"]
    assert {path: path.read_bytes() for path in before} == before, "no image is written"
