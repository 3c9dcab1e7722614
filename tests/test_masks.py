"""Masks: found beside their pictures, cut and mirrored with them, and counted in the loss."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from test_cache import Family
from test_prepare import Told
from torch.nn.functional import mse_loss
from typer.testing import CliRunner

from lora_fp8 import cli, config, jobs
from lora_fp8.data import buckets, decoding, doctor, images, mask_files
from lora_fp8.data.cache import Cache
from lora_fp8.data.examples import Example, Mask
from lora_fp8.data.loader import Batch
from lora_fp8.errors import UserErrors
from lora_fp8.objectives import Diffusion, FlowMatching
from lora_fp8.plan import plan as planning
from lora_fp8.settings import Dataset, Folder, Job, Model, Objective
from lora_fp8.stages import cache as stages_cache
from lora_fp8.stages import validate
from lora_fp8.stages.session import Session
from lora_fp8.stages.step import compute_loss
from lora_fp8.training import checkpoint
from webui import image_folders, translations


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "set"


def put(path, image, caption=True, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    if caption:
        path.with_suffix(".txt").write_text(path.stem, encoding="utf-8")
    return path


def drawn(size, white=None, mode="L"):
    """Black, and white inside (left, top, right, bottom)."""
    image = Image.new(mode, size)
    if white:
        image.paste("white", white)
    return image


def scanned(folder, mask, weight=0.1, **settings):
    section = Dataset(folders=[Folder(path=str(folder), mask=str(mask))], **settings)
    return images.scan(section, clip_rate=16, unmasked_weight=weight), section


def told(lines):
    """The lines as one text, each of which the page knows in Chinese."""
    assert [line for line in lines if translations.translate("zh-CN", line) == line] == []
    return "\n".join(lines)


# -- finding them


def test_masks_are_found_where_the_folder_says(folder, tmp_path):
    for number, name in enumerate(("a.png", "deep/b.jpg", "none.png", "c.x.png")):
        put(folder / name, drawn((64, 48), (0, 0, 9, 9 + number), "RGB"))
    for name in ("a.jpg", "deep/b.png", "c.x.webp", "stray.png"):
        put(tmp_path / "masks" / name, drawn((32, 24), (0, 0, 16, 24)), caption=False)
    clear = Image.new("RGBA", (64, 48), (9, 9, 9, 99))
    found = {}
    for mask in (tmp_path / "masks", "*-masklabel", "*-masklabel.png"):
        report, _ = scanned(folder, mask)
        assert (
            not report.problems and report.counts["masked"] == 3 and "3 images with a mask" in images.describe(report)
        )
        lines = told(report.warnings).splitlines()
        assert lines[0] == f"1 image has no mask and is trained whole: {folder / 'none.png'}"
        assert lines[1].startswith("1 mask has no matching image") and "stray" in lines[1] and len(lines) == 2
        found[str(mask)] = {one.relative: one.mask and one.mask.path for one in report.examples}
        for name in ("a-masklabel.png", "deep/b-masklabel.png", "c.x-masklabel.png", "stray-masklabel.png"):
            put(folder / name, drawn((64, 48), (0, 0, 32, 48)), caption=False)
    beside = {"a.png": "a-masklabel.png", "deep/b.jpg": "deep/b-masklabel.png", "c.x.png": "c.x-masklabel.png"}
    assert (
        found["*-masklabel"]
        == found["*-masklabel.png"]
        == {k: folder / v for k, v in beside.items()} | {"none.png": None}
    )
    apart = {"a.png": "a.jpg", "deep/b.jpg": "deep/b.png", "c.x.png": "c.x.webp"}
    assert found[str(tmp_path / "masks")] == {k: tmp_path / "masks" / v for k, v in apart.items()} | {"none.png": None}
    put(folder / "a-condlabel.png", drawn((64, 48), mode="RGB"), caption=False)
    # Without masks none of them is a picture, but for the one that lies beside none.
    report, _ = scanned(folder, "", missing_caption="skip")
    assert {one.relative for one in report.examples} == {"a.png", "c.x.png", "deep/b.jpg", "none.png"}
    assert report.counts["skipped"] == 1 and image_folders.count_files(folder).pictures == 5
    line, rest = told(report.warnings).split("; ", 1)
    assert line.startswith("4 files with names of OneTrainer's masks") and "stray" not in rest
    assert rest.startswith("to use masks, set dataset.folders.0.mask = '*-masklabel': ") and "a-condlabel.png" in rest
    for path in [*folder.glob("**/*-masklabel.png"), folder / "a-condlabel.png"]:
        path.unlink()
    put(folder / "a.png", clear)
    put(folder / "whole.png", Image.new("RGBA", (64, 48), (9, 9, 9, 255)))  # has an alpha channel and hides nothing
    report, _ = scanned(folder, "alpha")
    assert [one.relative for one in report.examples if one.mask] == ["a.png"]
    assert told(report.warnings).startswith("4 images have no mask and are trained whole: ")


def test_what_is_wrong_with_masks_is_told_by_name(folder, tmp_path):
    masks = tmp_path / "masks"
    for number, name in enumerate(("broken", "shape", "two", "black", "numbers")):
        put(folder / f"{name}.png", drawn((64, 48), (0, 0, 9, 9 + number), "RGB"))
    put(masks / "shape.png", drawn((64, 64), (0, 0, 9, 9)), caption=False)
    put(masks / "broken.png", drawn((64, 48)), caption=False).write_bytes(b"no picture")
    for name in ("two.png", "two.webp"):
        put(masks / name, drawn((64, 48), (0, 0, 9, 9)), caption=False)
    put(masks / "black.png", drawn((64, 48)), caption=False)
    put(masks / "numbers.png", Image.new("L", (64, 48), 1), caption=False)
    report, _ = scanned(folder, masks)
    problems = told(report.problems)
    for line in (
        f"mask {masks / 'broken.png'} cannot be used: this is not a readable image",
        (
            f"the mask {masks / 'shape.png'} has 64 x 64 pixels, but its image has 64 x 48, with another aspect ratio; "
            "draw the mask on the image"
        ),
        f"{folder / 'two.png'} has several candidates for its mask, two.png, two.webp; keep one of them",
    ):
        assert line in problems
    assert len(report.problems) == 3
    black = f"{folder / 'black.png'}, {folder / 'numbers.png'}"
    assert told(report.warnings) == f"2 masks are black all over: {black}"
    report, _ = scanned(folder, masks, weight=0.0)
    assert f"the mask of {folder / 'black.png'} is black all over, so" in told(report.problems)
    assert len(report.problems) == 5 and not report.warnings
    for mask, line in (
        (tmp_path / "nowhere", ": the folder does not exist"),
        (masks / "two.png", ": this is a file, not a folder"),
        (put(folder / "in/a.png", drawn((9, 9))).parent, " is inside the image folder"),
    ):
        assert told(scanned(folder, mask)[0].problems).startswith(f"mask folder {mask}{line}")
    for name in ("*", "*.png", "a*b*", "deep/*_mask"):
        with pytest.raises(UserErrors) as caught:
            config.loads("", [f"dataset.folders=[{{path='a', mask='{name}'}}]", "model.family=sd15", "model.path=demo"])
        (line,) = caught.value.problems
        assert line.startswith(f"dataset.folders.0.mask: '{name}' is not a name pattern of masks") and told([line])


def test_one_mask_counts_for_a_clip_whose_transparency_is_none(folder, tmp_path):
    frames = [Image.new("RGB", (48, 48), (20 * number, 0, 0)) for number in range(9)]
    put(folder / "clip.gif", frames[0], save_all=True, append_images=frames[1:], duration=62)
    put(tmp_path / "masks/clip.png", drawn((48, 48), (0, 0, 24, 48)), caption=False)
    report, _ = scanned(folder, tmp_path / "masks", frames=[5], clip="chunks")
    assert [one.mask.path.name for one in report.require()] == ["clip.png"] * len(report.examples)
    (line,) = scanned(folder, "alpha", frames=[5])[0].problems
    assert line.endswith(f"set dataset.folders.0.mask to a folder of masks: {folder / 'clip.gif'}") and told([line])
    assert not scanned(folder, "alpha")[0].problems  # its first frame is a picture


def test_the_doctor_tells_the_same(folder, tmp_path, capsys):
    for name in ("a", "b", "c"):
        put(folder / f"{name}.png", drawn((64, 48), mode="RGB"))
        put(tmp_path / "masks" / f"{name}.png", drawn((64, 48), (0, 0, 9, 9)), caption=False)
    put(tmp_path / "masks/b.png", drawn((64, 64), (0, 0, 9, 9)), caption=False)
    (tmp_path / "masks/c.png").unlink()
    put(folder / "a.png", drawn((300, 64), mode="RGB"))  # of which the crop leaves the middle
    put(tmp_path / "masks/a.png", drawn((150, 32), (0, 0, 9, 32)), caption=False)
    report, section = scanned(folder, tmp_path / "masks")
    answer = CliRunner().invoke(cli.app, ["dataset", str(folder), "--mask", str(tmp_path / "masks"), "--json"])
    found = json.loads(answer.stdout)
    lines = [
        (one["level"], file["detail"]) for one in found["findings"] if one["kind"] == "mask" for file in one["files"]
    ]
    assert lines == [("problem", report.problems[0]), ("warning", report.warnings[0])] and not found["ok"]
    assert found["counts"]["masked"] == 2 == report.counts["masked"]
    outside = [one["files"] for one in found["findings"] if one["kind"] == "mask_outside"]
    assert [[file["file"] for file in files] for files in outside] == [["a.png"]]
    followed = section.model_copy(update={"follow_mask": True})
    kinds = [one.kind for one in doctor.examine(followed, doctor.Target(48, 8)).findings]
    assert "cut" in kinds and "mask_outside" not in kinds


def test_a_crop_that_follows_its_mask_is_another_image_of_the_training(folder, tmp_path):
    """Resuming warns of it, and its held-out loss is not compared with that of the usual crop."""
    put(folder / "a.png", drawn((300, 64), mode="RGB"))
    put(tmp_path / "masks/a.png", drawn((300, 64), (0, 0, 9, 64)), caption=False)
    prints = []
    for follow in (False, True):
        report, section = scanned(folder, tmp_path / "masks", follow_mask=follow)
        (placed,) = buckets.assign(report.examples, section, resolution=48, step=8)
        prints.append(stages_cache._make_fingerprint(placed, 1))
    assert prints[1] == [*prints[0], "crop (0, 0)"]


# -- cut and mirrored with their picture


@pytest.mark.parametrize("kind", ["same size", "half the size", "turned", "transparent", "alpha", "16 bits"])
def test_a_mask_is_cut_and_mirrored_as_its_picture(folder, tmp_path, kind):
    """160 x 80 becomes 80 x 40, of which 56 x 40 are left: 24 to 80 is the left half of what is trained."""
    image, white = drawn((160, 80), (0, 0, 80, 80), "RGB"), (24, 0, 80, 80)
    mask, options = drawn((160, 80), white), {}
    if kind == "half the size":
        mask = drawn((80, 40), (12, 0, 40, 40))
    elif kind == "turned":  # shown when turned by 90 degrees
        options = {"exif": (exif := Image.Exif())}
        exif[0x0112], mask = 6, mask.transpose(Image.Transpose.ROTATE_90)
    elif kind == "transparent":
        mask = Image.merge("LA", (Image.new("L", (160, 80), 255), mask))
    elif kind == "16 bits":
        mask = Image.fromarray(np.asarray(mask).astype(np.uint16) * 257)
    elif kind == "alpha":
        image.putalpha(mask)
    put(folder / "a.png", image)
    put(tmp_path / "masks/a.png", mask, caption=False, **options)
    where = "alpha" if kind == "alpha" else tmp_path / "masks"
    report, section = scanned(folder, where, max_aspect=1.5, flip=True)
    (placed,) = buckets.assign(report.require(), section, resolution=48, step=8)
    assert placed.placement.bucket_wh == (56, 40)
    family = Family()
    cache = Cache(tmp_path / "cache", family, section)
    assert cache.fill([placed], ["a"]).encoded == 5 and family.calls == (2, 1)
    half = torch.tensor([1, 1, 1, 0.5, 0, 0, 0]).expand(5, 7)
    assert cache.read_mask(placed).shape == cache.read_latents(placed).shape[-2:]
    torch.testing.assert_close(cache.read_mask(placed), half, atol=0.04, rtol=0)
    torch.testing.assert_close(cache.read_mask(placed, True), half.flip(-1), atol=0.04, rtol=0)
    again = Cache(tmp_path / "cache", Family(), section)
    assert (report := again.fill([placed], ["a"])).encoded == 0 and report.reused == 5
    torch.testing.assert_close(again.read_mask(placed, True), cache.read_mask(placed, True), atol=0, rtol=0)
    assert mask_files.warn_of_outside_masks([placed]) == []
    # Of a mask that is white to the left of the crop, or to its right, nothing is left; of a black one that is no news.
    for white, left in (((0, 0, 16, 80), 0), ((144, 0, 160, 80), 0), ((0, 0, 32, 80), 1), (None, 0)):
        mask = drawn((160, 80), white)
        if kind == "alpha":
            image.putalpha(mask)
            put(folder / "a.png", image)
        else:
            mask = mask.transpose(Image.Transpose.ROTATE_90) if kind == "turned" else mask
            put(tmp_path / "masks/a.png", mask, caption=False, **options)
        (placed,) = buckets.assign(scanned(folder, where, max_aspect=1.5)[0].require(), section, resolution=48, step=8)
        greys = decoding.open_mask(placed.example.mask.path, kind == "alpha")
        assert any(buckets.fit_mask(greys, placed.placement).getextrema()) == left
        lines = mask_files.warn_of_outside_masks([placed])
        assert bool(lines) == (not left and white is not None)
        if lines:
            assert told(lines) == f"1 image has a mask whose white part lies outside the crop: {folder / 'a.png'}"


def test_entries_without_masks_keep_the_keys_that_they_had():
    """As they were on 2026-11-22, before there were masks."""
    family = SimpleNamespace(
        name="fake", dtype=torch.float32, prompts_see_controls=False, compute_encoder_identity=lambda what: what
    )
    section = Dataset(folders=[Folder(path="x")])
    still = Example(Path("a.png"), "a cat", 0, "a.png", 1, 160, 80, "0" * 64)
    clip = Example(Path("a.mp4"), "a cat", 0, "a.mp4", 1, 160, 80, "0" * 64, frames=(0, 1, 2))
    masked = Example(*vars(still).values())
    object.__setattr__(masked, "mask", Mask(Path("m.png"), "1" * 64))
    placed, moving, covered = buckets.assign([still, clip, masked], section, resolution=48, step=8)
    cache = Cache("nowhere", family, section)
    assert (cache.make_image_key(placed, False), cache.make_image_key(placed, True)) == (
        "68138950e615a8b19629c831b8c26f40dd30c73b1cfc3ad2acca6c97595302d6",
        "6f6bebb745893b385de3f6eb3f9a4be84abe6f1ae17fc7ea0ef14df4ebeb2a29",
    )
    assert cache.make_image_key(moving, False) == "5ee8b2ec4917e5eafbe1561dff38292011b4b43d0a48c545b245969defd050f8"
    assert cache.make_caption_key("a cat") == "9db46675eecbe85570626f3ffab14c29bd3581502f7b9c6e7d08a3773928ec3d"
    assert cache.make_image_key(covered, True) == cache.make_image_key(placed, True), "the picture is not encoded anew"
    greys = cache.make_mask_key(covered, False)
    object.__setattr__(masked, "mask", Mask(Path("m.png"), "1" * 64, alpha=True))
    assert greys != cache.make_mask_key(covered, False), "of one file either the greys are meant or the transparency"


# -- in training


class Alone:
    """The one process of a job."""

    world, is_main = 1, True

    def select_share(self, items):
        return items

    def gather(self, mine):
        return [mine]


def test_every_sample_of_a_batch_has_its_own_mask_and_an_edited_one_is_other_data(job, pictures, tmp_path):
    """Masks of two pictures of five, each its own, in batches of pictures with and without."""
    white = {"a": (0.0, 0.0, 0.5, 1.0), "b": (0.0, 0.0, 1.0, 0.5)}

    def draw(name, box):
        with Image.open(next(path for path in pictures.glob(f"{name}.*") if path.suffix != ".txt")) as image:
            size = image.size
        corners = [round(share * size[i % 2]) for i, share in enumerate(box)]
        put(tmp_path / "masks" / f"{name}.png", drawn(size, tuple(corners)), caption=False)

    for name, box in white.items():
        draw(name, box)
    given = (
        *("train.batch_size=2", "dataset.flip=true", "dataset.buckets=false", "dataset.resolution=48"),
        f"dataset.cache_dir='{tmp_path / 'cache'}'",
    )

    def cached(*overrides):
        made, run = job(*given, *overrides), Told()
        plan = planning.make(made)
        data = stages_cache.cache(Session(plan, run, Alone()))
        (counted,), (event,) = run.events["cache"], run.events["data"]
        return plan.job, data, counted["encoded"], event["masked"]

    plain, without, _, masked = cached()
    assert masked == 0 and all(without.loader.take_batch(0, i).mask_BHW is None for i in range(6))
    folders = f"dataset.folders=[{{path='{pictures}', mask='{tmp_path / 'masks'}'}}]"
    made, data, encoded, masked = cached(folders)
    assert (encoded, masked) == (4, 2), "masks of two, as they are and mirrored, and nothing else"
    seen = set()
    for number in range(4 * data.loader.batches_per_epoch):
        batch = data.loader.take_batch(0, number)
        stems = [path.stem for path in batch.paths]
        if not white.keys() & set(stems):
            assert batch.mask_BHW is None
            continue
        for stem, flipped, mask_HW in zip(stems, batch.flipped, batch.to("cpu").mask_BHW, strict=True):
            height, width = mask_HW.shape
            assert mask_HW.shape == batch.latents_BCHW.shape[-2:] and mask_HW.dtype == torch.float32
            expected = torch.ones(height, width)
            if stem == "a":
                expected[:, width // 2 :] = 0
            if stem == "b":
                expected[height // 2 :] = 0
            expected = expected.flip(-1) if flipped else expected
            assert (mask_HW - expected).abs().mean() < 0.12, (stem, flipped, mask_HW)
            seen.add((stem, flipped))
    assert {("a", False), ("a", True), ("b", False)} <= seen and {stem for stem, _ in seen} > {"a", "b"}
    again = cached(folders)
    assert again[2] == 0 and again[1].fingerprint == data.fingerprint != without.fingerprint
    draw("a", (0.5, 0.0, 1.0, 1.0))
    edited = cached(folders)
    assert edited[2] == 2 and edited[1].fingerprint != data.fingerprint
    before, now = (checkpoint.describe_job(made, "base", one.fingerprint) for one in (data, edited[1]))
    refused, changed = checkpoint.compare(before, now)
    assert not refused and "the images, captions or buckets changed" in changed[0]


def objective_of(kind, section):
    if kind == "flow":
        return FlowMatching({}, section)
    return Diffusion({"num_train_timesteps": 1000, "prediction_type": kind}, section)


@pytest.mark.parametrize("shape", [(2, 4, 6, 10), (2, 4, 3, 6, 10)], ids=["pictures", "clips"])
@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "flow"])
@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_the_loss_is_torchs_own_weighted_by_the_mask(kind, shape, weight):
    draw = torch.Generator().manual_seed(3)
    latents, noise, answer = torch.randn(3, *shape, generator=draw)
    mask_BHW = torch.rand(2, 6, 10, generator=draw).round(decimals=1)
    mask_BHW[0, :, 5:], mask_BHW[1] = 0, 1
    objective = objective_of(kind, Objective(unmasked_weight=weight, min_snr_gamma=2.0))
    answer.requires_grad_()
    family = SimpleNamespace(dtype=torch.float32, count_image_tokens=lambda size: 64, prepare=lambda *_: {})
    family.predict_prepared = family.predict = lambda *_: answer
    batch = Batch(
        *(latents, noise, [torch.Generator().manual_seed(7) for _ in range(2)], {}, ["a", "b"], [], ["", ""]),
        *([False] * 2, (80, 48), [1.0] * 2, 2, 0, 0, 0, mask_BHW),
    )
    denoiser = torch.nn.Linear(1, 1)
    losses_B = compute_loss(family, denoiser, objective, batch, 1.0)
    (gradient,) = torch.autograd.grad(losses_B.sum(), answer)
    t_B = objective.sample_t([torch.Generator().manual_seed(7) for _ in range(2)], 64)
    if kind == "flow":
        target = noise - latents
    elif kind == "epsilon":
        target = noise
    else:
        target = objective.scheduler.get_velocity(latents, noise, t_B)
    counts = (weight + (1 - weight) * mask_BHW).view(2, *[1] * (len(shape) - 3), 6, 10).expand(shape)
    ours = [
        mse_loss(answer[i], target[i], reduction="none", weight=counts[i]).mean() * objective.compute_weight(t_B)[i]
        for i in range(2)
    ]
    torch.testing.assert_close(losses_B, torch.stack(ours))
    outside = gradient[0][..., 5:]
    assert outside.eq(0).all() if weight == 0 else outside.ne(0).all()
    assert gradient[0][..., :5].ne(0).sum() > 0 and gradient[1].ne(0).all()
    plain_B = objective.compute_loss(answer, target, t_B)
    torch.testing.assert_close(losses_B[1], plain_B[1], rtol=0, atol=0)
    # The held-out loss counts the same.
    loaded = SimpleNamespace(objective=objective, denoiser=denoiser, text=None)
    data = SimpleNamespace(held_out=SimpleNamespace(take_batch=lambda step, number: batch))
    session = SimpleNamespace(family=family, job=SimpleNamespace(objective=SimpleNamespace(guidance=1.0)))
    objective.compute_loss = lambda *given, **named: type(objective).compute_loss(objective, *given, **named).sum()
    assert validate._measure_loss(session, data, loaded, 0, t_B) == losses_B.sum().item()


def test_a_queued_job_names_its_masks_from_anywhere():
    names = ["", "alpha", "./alpha", "*_mask", "masks", "/m"]
    made = Job(
        model=Model(family="sd15", path="demo"),
        dataset=Dataset(folders=[Folder(path="p", mask=name) for name in names]),
    )
    found = [folder.mask for folder in jobs.make_paths_absolute(made, Path("/x")).dataset.folders]
    assert found == ["", "alpha", "/x/alpha", "*_mask", "/x/masks", "/m"]
