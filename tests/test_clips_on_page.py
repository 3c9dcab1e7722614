"""Videos and clips on the page: taken in, listed, counted, shown, as Pillow and the training's own scan have them."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image
from waiting import wait_until

from lora_fp8 import config, settings
from lora_fp8.data import caption_operations, captions, clips, images
from lora_fp8.errors import UserError
from lora_fp8.jobs import JobView, Sentence
from webui import decoder, estimate_panel, image_folders, run_monitor, translations
from webui.context import Place, Ui
from webui.images.listing import Filter
from webui.pages import compare, dataset, new
from webui.pages.run import rendering as run

NASTY = "<img src=x onerror=alert(1)>.mp4"
LIST = "ffconcat version 1.0\nfile walk.mp4\n"
FRAMES = 24


def video(path: Path, count: int = FRAMES, rate: int = 8) -> Path:
    """A lossless video, each frame of a grey of its own."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv444p"
        for number in range(count):
            values = np.full((32, 48, 3), 10 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgb24")))
        container.mux(stream.encode())
    return path


def animation(path: Path, greys: list[int], size: tuple[int, int] = (320, 192)) -> Path:
    frames = [Image.new("RGB", size, (grey,) * 3) for grey in greys]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=62, lossless=True)
    return path


@pytest.fixture
def ui(tmp_path: Path) -> Ui:
    (tmp_path / "home").mkdir()
    return Ui("en", Place(tmp_path / "home", [tmp_path]))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three videos of 3 s, 1 s (without a caption) and 3 s (its name is markup), a torn one, a picture."""
    root = tmp_path / "mixed"
    root.mkdir()
    video(root / "walk.mp4")
    video(root / "brief.mkv", 8)
    video(root / NASTY)
    (root / "torn.mp4").write_bytes((root / "walk.mp4").read_bytes()[:600])
    Image.new("RGB", (48, 32), "red").save(root / "still.png")
    for name in ("walk", NASTY[:-4], "torn", "still"):
        (root / f"{name}.txt").write_text("zibo, a ball")
    return root


def add_files(files: list[Path], folder: Path) -> tuple[int, list[str]]:
    """Add files to a folder as an upload does. Returns how many were taken in, and what is said of the others."""
    count, refused = 0, []
    for file in files:
        try:
            count += image_folders.add_file(file, folder, file.name) == "taken"
        except UserError as error:
            refused.append(str(error))
    return count, refused


def test_videos_are_taken_in_after_every_frame_was_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, kept = tmp_path / "sent", tmp_path / "kept"
    sent.mkdir()
    good = video(sent / "walk.mp4")
    with av.open(str(good)) as container:
        middle = list(container.demux(video=0))[FRAMES // 2].pos
    torn = bytearray(good.read_bytes())
    torn[middle : middle + 40] = bytes(40)  # the header and the first frame are whole
    (sent / "torn.mp4").write_bytes(torn)
    (sent / "list.mp4").write_text(LIST)
    (sent / "walk.txt").write_text("a ball")
    video(sent / "old.avi")
    names = ("walk.mp4", "walk.txt", "torn.mp4", "list.mp4", "old.avi")
    count, refused = add_files([sent / name for name in names], kept)
    assert count == 1 and sorted(path.name for path in kept.iterdir()) == ["walk.mp4", "walk.txt"]
    assert (kept / "walk.mp4").read_bytes() == good.read_bytes()
    assert [line.partition(": ")[0] for line in refused] == ["torn.mp4", "list.mp4", "old.avi"]
    assert all("the video cannot be read" in line and "\n" not in line for line in refused[:2])
    assert "not one of .mp4 .mov .mkv .webm" in refused[1] and ".avi cannot be read; convert it to MP4" in refused[2]
    assert (
        "视频无法读取" in translations.translate("zh-CN", refused[1])
        and "MP4" in translations.translate("zh-CN", refused[2])
        and "无法读取" in translations.translate("zh-CN", refused[2])
    )
    found = image_folders.count_files(kept)
    assert (found.pictures, found.videos, found.without_caption) == (0, 1, 0)
    assert image_folders.find_folders([tmp_path]) == [kept, sent]
    monkeypatch.setattr(clips, "can_read_videos", lambda: False)
    count, (line,) = add_files([good], tmp_path / "other")
    assert count == 0 and "pip install 'lora-fp8[video]'" in line


def test_a_decoder_gives_the_first_frame_and_previews_that_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoders = decoder.Decoders(count=1)
    poster = Image.open(io.BytesIO(decoders.encode_webp(video(tmp_path / "a.mp4"), 320)))
    assert poster.size == (48, 32) and not getattr(poster, "is_animated", False) and poster.getpixel((20, 20))[0] < 8
    greys = [0, 60, 120, 180, 240]
    path = animation(tmp_path / "a.webp", greys)
    still = Image.open(io.BytesIO(decoders.encode_webp(path, 160)))
    assert getattr(still, "n_frames", 1) == 1
    with Image.open(io.BytesIO(decoders.encode_webp(path, 160, moving=True))) as moving:
        assert (moving.size, moving.n_frames, moving.info["loop"]) == ((160, 96), 5, 0)
        for number, grey in enumerate(greys):
            moving.seek(number)
            moving.load()
            assert moving.info["duration"] == 62
            assert abs(moving.convert("RGB").getpixel((80, 48))[0] - grey) < 6
    (tmp_path / "list.mp4").write_text(LIST.replace("walk", "a"))
    large = decoder.MOST_FRAMES + 1
    animation(tmp_path / "long.gif", [number % 256 for number in range(large)], (4, 4))
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    for name, moving, why in (
        ("list.mp4", False, "not one of .mp4"),
        ("long.gif", True, f"{large} frames; shown moving are 2 to {decoder.MOST_FRAMES}"),
        ("one.png", True, "1 frames"),
        ("a.mp4", True, "not a readable image"),
    ):
        with pytest.raises(UserError, match=f"^{name}: the .* cannot be read .*{why}"):
            decoders.encode_webp(tmp_path / name, 96, moving)
    with pytest.raises(ValueError, match="48 x 32 = 1,536 pixels; the limit is 1,000"):
        monkeypatch.setattr(decoder, "MOST_PIXELS", 1000)
        decoder.encode_still(str(tmp_path / "a.mp4"), 96)


def test_videos_stand_among_the_pictures_with_what_is_trained_of_them(
    ui: Ui, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = dataset.Page(ui)
    cut = {"frames": "5, 9", "fps": "auto", "clip": "chunks"}
    at = {"folder": str(folder), "cut": cut}
    view = page.handlers.open_view(at, "wan", fresh=True)
    one = view.dataset
    assert one.videos == [NASTY, "brief.mkv", "torn.mp4", "walk.mp4"] and len(one.files) == 5
    found = view.examine()
    wait_until(lambda: not found.running)
    assert not found.problem, found.problem
    rows = {row["name"]: row for row in view.list_rows(Filter(), 0, 48)["rows"]}
    # 3 s are 48 frames at the model's 16 a second, 1 s is 16.
    size, _, *figures = rows["walk.mp4"]["figures"]
    assert [size, *figures] == ["48 × 32", "3 s", "8 fps", "5 × 9 frames"] and "crop" in rows["walk.mp4"]
    assert rows["brief.mkv"]["figures"][2:] == ["1 s", "8 fps", "1 × 9 frames"]
    assert "cannot be decoded" in rows["torn.mp4"]["badges"][0]["detail"] and not rows["torn.mp4"]["thumbnail"]
    assert rows["walk.mp4"]["video"] and not rows["still.png"]["video"]
    assert "768\u00a0×\u00a0512 · 9 frames" in page.renderer.render_buckets(found, "wan")
    told = page.renderer.render_findings(found)
    assert (
        'data-kind="unreadable"' in told and "3 videos, cut into 11 clips" in told and 'data-kind="clip_slower"' in told
    )

    # Their captions are edited as those of pictures.
    edit = captions.preview(folder, [caption_operations.Trigger("new")], ["walk.mp4", "brief.mkv"])
    captions.apply(folder, edit)
    assert (folder / "walk.txt").read_text() == "new, zibo, a ball" and (folder / "brief.txt").read_text() == "new"
    captions.undo(folder)
    assert not (folder / "brief.txt").exists()

    # The form reckons with the pieces that the training's own scan cuts, and names what it would refuse.
    form = new.Page(ui)
    values = {"model.family": "wan", "dataset.resolution": "auto", "dataset.frames": [5, 9], "dataset.fps": "auto",
              "dataset.clip": "chunks"}  # fmt: skip
    assert form.reader.examine(values, folder, "") is found
    counts = [(folder, image_folders.count_files(folder), 1, "")]
    assert [key for key, _ in form.problems._find_clip_problems(values, counts)] == ["dataset.folders"]
    ((_, line),) = form.problems._find_clip_problems(values, counts)
    assert "torn.mp4 (the file cannot be decoded" in line
    for family, key, part in (
        ("wan", "dataset.frames", "4 videos, but no clip lengths"),
        ("sd15", "dataset.folders", "trains on images only"),
    ):
        ((wrong, line),) = form.problems._find_clip_problems(
            values | {"model.family": family, "dataset.frames": []}, counts
        )
        assert wrong == key and part in line
    (folder / "torn.mp4").unlink()
    for skipping, missing in ((True, "skip"), (False, "trigger")):
        section = settings.Dataset(folders=[settings.Folder(path=str(folder))], frames=[5, 9], clip="chunks",
                                 missing_caption=missing, trigger="zibo")  # fmt: skip
        scanned = images.scan(section, clip_rate=16)
        assert not scanned.problems and len(scanned.examples) == estimate_panel.count_examples(found.report, skipping)

    monkeypatch.setattr(clips, "can_read_videos", lambda: False)
    rows = page.handlers.open_view(at, "wan").list_rows(Filter(), 0, 48)["rows"]
    videos = [row for row in rows if row["video"]]
    assert len(videos) == 4 and not any(row["thumbnail"] for row in videos)
    assert all("pip install 'lora-fp8[video]'" in row["badges"][0]["title"] for row in videos)


def test_settings_of_clips_are_asked_where_clips_are_drawn(ui: Ui) -> None:
    form = new.Page(ui)
    for family, frames, hidden in (
        ("sd15", "", {"frames", "fps", "clip"}),
        ("wan", "", {"fps", "clip"}),
        ("wan", "frames = [17]", set()),
    ):
        text = f"[model]\nfamily = '{family}'\npath = 'demo'\n[dataset]\n{frames}\n"
        style = form.styles.style_settings(text, [], everything=False)
        assert {name for name in ("frames", "fps", "clip") if f"#new-dataset-{name}" in style} == hidden, family


@pytest.fixture
def drawn(tmp_path: Path) -> Iterator[Path]:
    """A run with a clip of one prompt at two steps, whose log names a file outside, too."""
    folder = tmp_path / "runs" / "ball"
    (folder / "samples").mkdir(parents=True)
    job = config.loads("[model]\nfamily = 'wan'\npath = 'demo'\n[[dataset.folders]]\npath = 'p'")
    (folder / "config.toml").write_text(config.dumps(job))
    events = []
    for step in (0, 10):
        path = folder / "samples" / f"step-{step:06d}-0.png"
        Image.new("RGB", (320, 192)).save(path)
        animation(path.with_suffix(".webp"), [15 * number for number in range(17)])
        names = {"images": [f"samples/{path.name}"], "clips": [f"samples/{path.stem}.webp"]}
        events.append({"t": 1, "event": "preview", "step": step, "prompts": ["a ball"], **names})
    events[0]["clips"].append("../../secret.webp")
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    yield folder


def test_previews_of_clips_move_and_can_be_saved(ui: Ui, drawn: Path) -> None:
    view = JobView(7, "ball", "train", "done", Sentence("done", {}), folder=drawn, step=10, steps=10)
    log = run_monitor.read_run_log(ui, view)
    grid, pair = run.render_grid(ui, view, log), run.render_slider(ui, view, log, (0, 10), 0)
    side = compare.render_previews(ui, [(view, log)], "a ball")
    for made in (grid, side):
        assert made.count("moving=1") == 2 and made.count("prefers-reduced-motion") == 2 and "secret" not in made
    assert pair.count("moving=1") == 2 and pair.count("/download?path=") == 2 and pair.count(".webp") == 4
    assert "moving" not in run.render_grid(ui, view, log, moving=False)
    still = run.render_slider(ui, view, log, (0, 10), 0, moving=False)
    assert "moving" not in still and still.count(".png") == 2 and still.count("/download?path=") == 2
    single = run.render_slider(ui, view, log, (10, 10), 0)
    assert single.count("<img") == 1 and single.count("/download?path=") == 1 and 'type="range"' not in single
