"""Video clips, judged by diffusers' video pipelines and by clips whose frames carry their own number as a grey."""

import re
import sys
from fractions import Fraction
from pathlib import Path

import av
import diffusers
import miniatures
import numpy as np
import pytest
import torch
from editing import load_encoders
from PIL import Image

from lora_fp8 import config, families, importing
from lora_fp8.data import buckets, cache, clips, decoding, doctor, images, loader
from lora_fp8.errors import UserError
from lora_fp8.plan import disk_budget, estimate, placement, resolve
from lora_fp8.plan import plan as planning
from lora_fp8.plan.scan import scan
from lora_fp8.settings import Dataset, Folder, Model, Objective, Validation

FAMILIES = [name for name in families.list_families() if any(families.get(name).clips)]
PROMPTS = ["a photo of a cat", "two red dogs run over a long blue road"]
CODECS = {".mp4": "libx264", ".mov": "libx264", ".mkv": "libx264", ".webm": "libvpx-vp9"}
LOSSLESS = {"libx264": {"qp": "0", "sc_threshold": "0"}, "libvpx-vp9": {"lossless": "1"}}
STEP = 5  # between the greys of two frames


def write_video(path: Path, times: list[Fraction], size=(48, 32), colour=None, keyframes=250, **tags) -> Path:
    """A lossless video with a frame at each of these seconds, each of the grey `STEP * its number`.

    Args:
        keyframes: from one to the next.
        tags: attributes of the codec, such as colorspace; the pixels are converted to that matrix.
    """
    codec = CODECS[path.suffix]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=60, options={**LOSSLESS[codec], "g": str(keyframes)})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv444p"
        stream.codec_context.time_base = Fraction(1, 600)
        for name, value in tags.items():
            setattr(stream.codec_context, name, value)
        for number, time in enumerate(times):
            values = np.full((size[1], size[0], 3), colour or (STEP * number,) * 3, np.uint8)
            matrix = tags.get("colorspace")
            frame = av.VideoFrame.from_ndarray(values, format="rgb24").reformat(format="yuv444p", dst_colorspace=matrix)
            frame.pts, frame.time_base = int(time * 600), Fraction(1, 600)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def steadily(count: int, rate: int) -> list[Fraction]:
    return [Fraction(number, rate) for number in range(count)]


def write_animation(path: Path, count: int, milliseconds: int) -> Path:
    # A corner that is not grey, so that no encoder takes two frames for one.
    frames = [Image.new("RGB", (48, 32), (STEP * number,) * 3) for number in range(count)]
    lossless = {"lossless": True} if path.suffix == ".webp" else {}
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=milliseconds, **lossless)
    return path


def captioned(path: Path) -> Path:
    path.with_suffix(".txt").write_text("a cat walks", encoding="utf-8")
    return path


def section(folder: Path, **settings) -> Dataset:
    return Dataset(folders=[Folder(path=str(folder))], resolution=32, bucket_step=16, **settings)


def numbers_of(pictures: list[Image.Image]) -> list[int]:
    """The numbers that the frames carry; the two conversions of a colour cost less than half a step."""
    return [round(np.asarray(picture)[8:24, 8:40].mean() / STEP) for picture in pictures]


# ------------------------------------------------------------------------------------------------------ frames of files


@pytest.mark.parametrize("suffix", [*CODECS, ".gif", ".webp", ".png"])
def test_the_frames_that_are_read_are_those_that_were_asked_for(tmp_path, suffix):
    """The whole way: file -> scan -> the pictures that go to the VAE, from every kind of file."""
    path = tmp_path / f"clip{suffix}"
    if suffix in CODECS:
        write_video(path, steadily(20, 16))
    else:
        write_animation(path, 20, 60)  # 16.7 a second: a GIF counts in hundredths
    captioned(path)
    report = images.scan(section(tmp_path, frames=[5, 9], fps=8.0), clip_rate=16)
    assert not report.problems and not report.warnings, (report.problems, report.warnings)
    (example,) = report.examples
    assert (example.width, example.height, len(example.frames)) == (48, 32, 9)
    shown = decoding.read_clip(path, example.frames, "#ffffff")
    assert (
        numbers_of(shown)
        == list(example.frames)
        == [0, 2, 4, 6, 8, 10, 12, *((14, 16) if suffix in CODECS else (15, 17))]
    )
    assert f"1 clip: 1 of 9 frames, 9 of {10} frames" in "\n".join(images.describe(report))


@pytest.mark.parametrize(
    "times",
    [
        *(steadily(40, rate) for rate in (12, 16, 24, 25, 30, 60)),
        [Fraction(n, 30) for n in range(60) if n % 7 not in (2, 3)],  # a varying rate, as phones record
    ],
    ids=["12", "16", "24", "25", "30", "60", "varying"],
)
def test_a_clip_moves_as_fast_as_it_did(times):
    end = times[-1] + (times[1] - times[0])
    numbers = clips.resample(clips.Timeline(tuple(times), end), 16)
    assert abs(len(numbers) - end * 16) <= Fraction(1, 2)
    for k, number in enumerate(numbers):
        error = abs(times[number] - Fraction(k, 16))
        assert error == min(abs(time - Fraction(k, 16)) for time in times)
    if times == steadily(40, 16):
        assert numbers == list(range(40))


@pytest.mark.parametrize(
    "how, expected",
    [("head", [range(0, 9)]), ("middle", [range(6, 15)]), ("chunks", [range(0, 9), range(9, 18)])],
)
def test_pieces_of_a_clip(how, expected):
    assert clips.cut_pieces(range(21), [1, 5, 9, 33], how) == [tuple(one) for one in expected]
    assert clips.cut_pieces(range(4), [5, 9], how) == []
    assert clips.cut_pieces(range(4), [1, 9], how) == [
        (1,) if how == "middle" else (0,)
    ]  # never four pictures of one clip


def turned(path: Path) -> None:
    """Writes a turn of 90 degrees into the track's matrix, as phones do: x' = -y, y' = x (QuickTime, tkhd)."""
    raw = bytearray(path.read_bytes())
    at = raw.index(b"tkhd") + 4 + 40
    matrix = (0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    raw[at : at + 36] = b"".join(value.to_bytes(4, "big", signed=True) for value in matrix)
    path.write_bytes(raw)


def test_a_clip_is_upright_and_in_its_own_colours(tmp_path):
    path = write_video(tmp_path / "a.mp4", steadily(2, 16), size=(64, 32))
    with av.open(str(path)) as container:
        plain = next(container.decode(video=0)).to_image()
    turned(path)
    with av.open(str(path)) as container:
        assert abs(next(container.decode(video=0)).rotation) == 90
    _, first = clips.decode_video(path, 10**6)
    assert first.size == (32, 64) and plain.size == (64, 32)

    red = (200, 30, 60)
    for matrix, lines in ((1, 32), (1, 720), (6, 32), (6, 720)):  # BT.709 and SMPTE 170M, as H.273 numbers them
        path = write_video(tmp_path / "b.mp4", steadily(2, 16), (32, lines), red, colorspace=matrix)
        _, first = clips.decode_video(path, 10**6)
        assert np.abs(np.asarray(first).astype(int) - red).max() <= 2, (matrix, lines)


def test_which_way_a_clip_is_turned(tmp_path):
    """Left of the stored picture is up in the upright one, at the quarter turn that QuickTime's matrix above means."""
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=16, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv444p"
        values = np.zeros((32, 64, 3), np.uint8)
        values[:, :32] = 255  # the left half is white
        container.mux(stream.encode(av.VideoFrame.from_ndarray(values, format="rgb24")))
        container.mux(stream.encode())
    turned(path)
    _, first = clips.decode_video(path, 10**6)
    # x' = -y, y' = x: what lies at small x comes to lie at small y', which is up.
    assert first.getpixel((16, 8))[0] > 200 and first.getpixel((16, 56))[0] < 50


@pytest.mark.parametrize("suffix", CODECS)
def test_pieces_are_what_decoding_every_frame_gives(tmp_path, suffix, monkeypatch):
    """In any order; in their order no frame is decoded twice, and alone none from far before."""
    path = write_video(tmp_path / f"a{suffix}", steadily(50, 16), keyframes=8)
    timeline, _ = clips.decode_video(path, 10**6)
    decoded, decode = [], clips._decode_frames

    def counted(*args, **kwargs):
        for frame in decode(*args, **kwargs):
            decoded.append(frame.pts)
            yield frame

    monkeypatch.setattr(clips, "_decode_frames", counted)
    found = [tuple(range(begin, begin + 5)) for begin in range(0, 50, 5)]
    reader = clips.Reader(path)
    for piece in found:
        assert numbers_of(reader.read(piece, timeline.find_unique_start(piece[0]))) == list(piece)
    assert decoded == sorted(set(decoded)) and len(decoded) == 50
    assert numbers_of(reader.read((7, 7, 8, 9, 9), timeline.find_unique_start(7))) == [7, 7, 8, 9, 9]
    assert numbers_of(reader.read((9, 10, 10), timeline.find_unique_start(9))) == [9, 10, 10]
    reader.close()
    for piece in reversed(found):
        decoded.clear()
        assert numbers_of(reader.read(piece, timeline.find_unique_start(piece[0]))) == list(piece)
        # A second before it, and the keyframe before that; of H.264 in MKV nothing is left out.
        assert len(decoded) <= (piece[-1] + 1 if suffix == ".mkv" else 5 + 16 + 8), piece
    reader.close()


@pytest.mark.parametrize("what", ["hdr", "oblong", "torn", "text", "list", "film", "large", "still", "short"])
def test_clips_that_cannot_be_used_are_named(tmp_path, what, monkeypatch):
    path, settings = captioned(tmp_path / "a.mp4"), {}
    if what == "hdr":
        write_video(path, steadily(9, 16), color_trc=18)
        expected = r"a\.mp4: the file is HDR \(HLG\).*convert it to SDR"
    elif what == "oblong":
        write_video(path, steadily(9, 16), sample_aspect_ratio=Fraction(4, 3))
        expected = "non-square pixels"
    elif what == "torn":
        write_video(path, steadily(9, 16))
        path.write_bytes(path.read_bytes()[:600])
        expected = "cannot be decoded"
    elif what == "text":
        path.write_text("no video")
        expected = "cannot be decoded"
    elif what == "list":  # FFmpeg would open the file that it names
        write_video(tmp_path.parent / "b.mp4", steadily(9, 16)).rename(tmp_path / "b.mp4.hidden")
        path.write_text("ffconcat version 1.0\nfile b.mp4.hidden\n")
        expected = "the video cannot be decoded: its content is not one of .mp4 .mov .mkv .webm, despite its name"
    elif what == "film":
        write_video(path, steadily(9, 16))
        monkeypatch.setattr(clips, "MOST_FRAMES", 8)
        expected = "the video has more than 8 frames; cut out the part to be trained"
    elif what == "large":
        write_video(path, steadily(9, 16), (96, 64))
        settings, expected = {"max_pixels": 4096}, r"96 x 64 = 6,144 pixels, more than dataset\.max_pixels = 4,096"
    elif what == "still":
        write_animation(tmp_path / "a.webp", 9, 0)
        expected = "a duration of zero"
    else:
        write_video(path, steadily(4, 16))
        expected = r"has 4 frames at 16 a second, but the smallest of dataset\.frames is 5; add a smaller length"
    report = images.scan(section(tmp_path, frames=[5], **settings), clip_rate=16)
    (problem,) = report.problems
    assert not report.examples
    assert re.search(expected, problem), problem


def test_what_becomes_of_a_clip_is_told(tmp_path, monkeypatch):
    write_video(captioned(tmp_path / "slow.mp4"), steadily(20, 8))
    write_video(captioned(tmp_path / "short.mp4"), steadily(7, 16))
    Image.new("RGB", (48, 32), "red").save(captioned(tmp_path / "still.png"))
    report = images.scan(section(tmp_path, frames=[5, 9], clip="chunks"), clip_rate=16)
    slower, shorter = sorted(report.warnings)
    assert "1 clip is shorter" in shorter and "short.mp4 (5 of 7)" in shorter
    assert "fewer frames per second" in slower and "slow.mp4 (20 for 40)" in slower
    assert [(one.relative, len(one.frames)) for one in report.examples] == [
        ("short.mp4", 5),
        *[("slow.mp4", 9)] * 4,
        ("still.png", 0),
    ]
    assert len({one.uid for one in report.examples}) == 6
    found = doctor.examine(section(tmp_path, frames=[5, 9], clip="chunks"), doctor.Target(32, 16, clip_rate=16))
    assert found.ok and "2 of them videos, cut into 5 clips" in "\n".join(found.format_lines())
    assert {one["size"]: one["count"] for one in found.buckets} == {"32x32": 1, "32x32x5": 1, "32x32x9": 4}
    assert (found.counts["pictures"], found.counts["shown"]) == (3, len(report.examples))
    slow, short = found.pictures[1], found.pictures[0]
    assert slow == {"file": "slow.mp4", "width": 48, "height": 32, "seconds": 2.5, "fps": 8, "frames": 20,
                    "pieces": 4, "length": 9}  # fmt: skip
    assert (short["seconds"], short["pieces"], short["length"]) == (0.438, 1, 5)
    told = {one.kind: one.files for one in found.findings}
    assert told["clip_slower"] == [("slow.mp4", "has 20 frames, but needs 40")]
    assert told["clip_shorter"] == [("short.mp4", "7 frames at 16 a second")]
    # The same of other settings: each clip that stops a training, by its name.
    for frames, rate, kind in (([9, 17], 16, "clip_short"), ([], 16, "clip_unset"), ([], 0, "clip_refused")):
        found = doctor.examine(section(tmp_path, frames=frames), doctor.Target(32, 16, clip_rate=rate))
        told = {one.kind: [file for file, _ in one.files] for one in found.findings}
        assert not found.ok and told[kind] == ["short.mp4", "slow.mp4"][: 1 if frames else 2], kind
        assert found.counts["pieces"] == (1 if frames else 0)
    # Without PyAV one line says what to install, and pictures alone need none of it.
    monkeypatch.setattr(clips.importlib.util, "find_spec", lambda name: None)
    (problem,) = images.scan(section(tmp_path, frames=[5]), clip_rate=16).problems
    assert "pip install 'lora-fp8[video]'" in problem and "slow.mp4" in problem
    monkeypatch.setitem(sys.modules, "av", None)  # as an import that finds nothing
    found = doctor.examine(section(tmp_path, frames=[5]), doctor.Target(32, 16, clip_rate=16))
    told = [one.files for one in found.findings if one.kind == "unreadable"]
    assert told == [[("short.mp4", clips.NEEDED), ("slow.mp4", clips.NEEDED)]]


def test_who_takes_no_clips_says_so(tmp_path):
    Image.new("RGB", (48, 48), "red").save(captioned(tmp_path / "still.png"))
    write_video(tmp_path / "a.mp4", steadily(2, 16))
    (refused,) = images.scan(section(tmp_path), clip_rate=0).problems
    assert "1 video, but this model trains on images only; remove it: a.mp4" in refused
    (asked,) = images.scan(section(tmp_path), clip_rate=16).problems
    assert "set dataset.frames to the lengths" in asked
    text = "[model]\nfamily='{}'\npath='x'\n[dataset]\nfolders=[{{path='x'}}]\nframes={}\n[preview]\nframes={}"
    every = re.escape(" | ".join(FAMILIES))
    for family, lengths, drawn, lines in (
        ("sdxl", [1], 5, [rf"dataset.frames: .* generates images only; .*: {every}$", "preview.frames: "]),
        ("wan", [16, 33], 1, ["dataset.frames: .* accepts clips of 1, 5, 9 ... frames, got 16; use 17"]),
        ("hunyuan_video", [5, 5], 8, ["preview.frames: .*use 9", "dataset.frames: a length is listed twice"]),
    ):
        with pytest.raises(UserError) as error:
            config.loads(text.format(family, lengths, drawn))
        assert len(error.value.problems) == len(lines)
        for line, problem in zip(lines, error.value.problems, strict=True):
            assert re.match(line, problem), problem


@pytest.fixture
def mixed(tmp_path):
    """Two clips, one of which is long enough for two pieces of 9 frames, and two pictures; all of one size."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    write_video(captioned(folder / "long.mp4"), steadily(20, 16))
    write_animation(captioned(folder / "five.webp"), 5, 62)
    for name in ("red", "green"):
        Image.new("RGB", (48, 32), name).save(captioned(folder / f"{name}.png"))
    return folder


CLIPS = ("dataset.frames=[5, 9]", "dataset.clip='chunks'", "dataset.resolution=48")


def test_batches_are_of_one_length_and_pieces_stay_together(job, mixed, tmp_path):
    """From the files to what training gets: which frames, in which batch, and what the VAE makes of them."""
    made = job(*CLIPS, f"dataset.folders=[{{path='{mixed}'}}]", f"dataset.cache_dir='{tmp_path}/c'", family="wan")
    Family = families.get("wan")
    family = Family(made.model, device="cpu", dtype=torch.float32)
    made = resolve.resolve_auto(made, Family)
    assert made.dataset.fps == 16.0
    examples = scan(made).require()
    placed = placement.place(made, examples)
    assert {buckets.format_bucket(one): len(members) for one, members in placed.items()} == {
        "64x32": 2,
        "64x32x5": 1,
        "64x32x9": 2,
    }
    reckoned = estimate.estimate(planning.make(made))
    assert reckoned.heaviest_bucket == (64, 32, 9)
    store = cache.Cache(made.dataset.cache_dir, family, made.dataset)
    flat = [one for members in placed.values() for one in members]
    load_encoders(family)
    seen, encode = [], family.encode_images
    family.encode_images = lambda pixels: (seen.append(pixels), encode(pixels))[1]

    def shown(pixels):
        return tuple(((pixels.mean((0, 1, 3, 4)) + 1) * 127.5 / STEP).round().int().tolist())

    store.fill(flat, [example.caption for example in examples])
    family.load_vae()  # which the cache has freed
    pieces = [one for one in flat if one.example.relative == "long.mp4"]
    assert [one.example.frames for one in pieces] == [tuple(range(9)), tuple(range(9, 18))]
    for one in pieces:
        (given,) = [
            pixels for pixels in seen if pixels.shape == (1, 3, 9, 32, 64) and shown(pixels) == one.example.frames
        ]
        assert torch.equal(store.read_latents(one), encode(given)[0]) and store.read_latents(one).shape == (16, 3, 4, 8)
    batches = loader.Loader(placed, store, family, made.dataset, seed=0, batch_size=2)
    shapes = sorted(tuple(batches.take_batch(0, m).latents_BCHW.shape) for m in range(batches.batches_per_epoch))
    assert shapes == [(1, 16, 2, 4, 8), (2, 16, 3, 4, 8), (2, 16, 4, 8)]
    # Latents of the cache, of entries that are not there yet: reckoned and written alike.
    assert disk_budget.count_pixels(family, (64, 32, 9)) == 3 * 64 * 32
    for seed in range(8):
        drawn = made.model_copy(update={"seed": seed, "validation": Validation(every=1, pictures=2)})
        trained, held_out = placement.split(drawn, examples)
        assert len({one.file_uid for one in held_out}) == 2
        assert not {one.file_uid for one in held_out} & {one.file_uid for one in trained}
        assert len(trained) + len(held_out) == 5


# ------------------------------------------------------------------------------------------------------- the denoisers


@pytest.mark.parametrize("name", FAMILIES)
def test_clips_are_what_diffusers_pipeline_draws(name, tiny, monkeypatch):
    """A step inside the real pipeline, of two prompts and frames that are not square, three of latents, asked again
    through `predict`; and what its scheduler ends with, decoded here, is the clip that it draws."""
    Family = families.get(name)
    model = Model(family=name, path=str(tiny(name)))
    family = Family(model, device="cpu", dtype=torch.float32)
    load_encoders(family)
    pipeline = getattr(diffusers, Family.pipeline_class).from_pretrained(tiny(name), local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    names = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
    assert [Family.clips[0]] == [getattr(pipeline, name) for name in names if hasattr(pipeline, name)]
    num_frames = 1 + 2 * Family.clips[0]
    seen = []
    step = type(pipeline.scheduler).step

    def record(self, model_output, timestep, sample, *args, **kwargs):
        result = step(self, model_output, timestep, sample, *args, **kwargs)
        seen.append((sample.clone(), model_output.clone(), result[0].clone()))
        return result

    monkeypatch.setattr(type(pipeline.scheduler), "step", record)
    height, width = miniatures.get_hw(Family.name)
    drawn = pipeline(
        prompt=PROMPTS,
        **{**Family.call_options, "num_frames": num_frames, "height": height, "width": width},
        **family.make_guidance_inputs(1.0),
        max_sequence_length=family.max_sequence_length,
        num_inference_steps=3,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
    ).frames
    cond = family.collate(family.encode_prompts(PROMPTS))
    latent_hw = family.encode_images(torch.zeros(1, 3, height, width)).shape[-2:]
    with torch.no_grad():
        noisy, expected, _ = (family.unpack(packed, tuple(latent_hw)) for packed in seen[1])
        assert torch.equal(family.pack(noisy), seen[1][0])
        assert noisy.ndim == 5 and noisy.shape[0] == 2 and noisy.shape[2] == family.count_latent_frames(num_frames) == 3
        assert noisy.shape[-2] != noisy.shape[-1]
        told = pipeline.scheduler.timesteps[1] / pipeline.scheduler.config.num_train_timesteps
        answer = family.predict(pipeline.transformer, noisy, told.float().expand(2), cond)
    torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-5)
    latents = family.unpack(seen[-1][2], tuple(latent_hw))
    pixels = family.decode_latents(latents)
    assert pixels.shape == (2, 3, num_frames, height, width)
    torch.testing.assert_close((pixels / 2 + 0.5).clamp(0, 1), drawn.transpose(1, 2), rtol=1e-4, atol=1e-4)

    # Encoding is decoding's inverse: nothing but what diffusers' VAE does to a clip happens to it.
    clip = torch.rand(1, 3, num_frames, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1
    encoded = family.encode_images(clip)
    assert encoded.shape == latents[:1].shape
    with torch.no_grad():
        plain = pipeline.vae.decode(pipeline.vae.encode(clip).latent_dist.mode()).sample
    torch.testing.assert_close(family.decode_latents(encoded), plain, rtol=1e-4, atol=1e-4)
    # One frame is the picture that it always was.
    torch.testing.assert_close(family.encode_images(clip[:, :, :1]), family.encode_images(clip[:, :, 0]))


def test_flow_is_the_schedulers_on_clips():
    objective = families.get("wan").get_objective_type()({"flow_shift": 3.0, "use_flow_sigmas": True}, Objective())
    clean, noise = torch.randn(2, 2, 4, 3, 4, 6)
    t_B = torch.tensor([0.25, 0.8])
    noisy = objective.add_noise(clean, noise, t_B)
    for i, t in enumerate(t_B):
        torch.testing.assert_close(noisy[i], (1 - t) * clean[i] + t * noise[i])
    per_sample = objective.compute_loss(noisy, objective.compute_target(clean, noise, t_B), t_B)
    expected = torch.nn.functional.mse_loss(noisy, noise - clean, reduction="none").mean((1, 2, 3, 4))
    torch.testing.assert_close(per_sample, expected)


IMPORTED = {
    "diffusion-pipe": (
        {"main.toml": "dataset = 'd.toml'\nvideo_clip_mode = 'single_middle'\n[model]\ntype = 'wan'\nckpt_path = 'x'\n",
         "d.toml": "resolutions = [512]\nframe_buckets = [1, 33, 18]\n[[directory]]\npath = 'clips'\n"},
        {"frames": [1, 17, 33], "clip": "middle"},
    ),
    "musubi-tuner": (
        {"main.toml": "dit = 'x'\nnetwork_module = 'networks.lora_wan'\ndataset_config = 'd.toml'\n",
         "d.toml": "[general]\nresolution = [512, 512]\n[[datasets]]\nvideo_directory = 'clips'\n"
         "target_frames = [1, 25]\nframe_extraction = 'chunk'\nsource_fps = 30.0\n"},
        {"frames": [1, 25], "clip": "chunks"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", IMPORTED)
def test_clips_of_other_trainers(tool, tmp_path):
    files, expected = IMPORTED[tool]
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    made = importing.import_file(tmp_path / "main.toml", tool, "")
    ours = made.settings["dataset"]
    assert {name: ours[name] for name in expected} == expected
    assert [folder["path"] for folder in ours["folders"]] == ["clips"]
    assert not made.unknown and any("frames" in entry.key or "buckets" in entry.key for entry in made.differs)
    pictures = importing.import_file(tmp_path / "main.toml", tool, "sdxl")
    assert "frames" not in pictures.settings["dataset"]
