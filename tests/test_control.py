"""Control pictures of editing models: found, cut, cached and shown as diffusers' own pipeline shows them."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from test_families import PROMPTS, bfl_tensors, load_denoiser, make

from lora_fp8 import config, estimate, families, importing, kit, sample
from lora_fp8.config import UserError, UserErrors
from lora_fp8.data import buckets, images
from lora_fp8.data.cache import Cache, dataset_captions, preview_pictures
from lora_fp8.data.loader import Loader
from lora_fp8.train import run
from webui import words

EDITING = [name for name in families.available() if "controls" in families.facts(name)]


@pytest.fixture(scope="session")
def controls(pictures, tmp_path_factory):
    """A control picture for each of `pictures`, of its size, but for one of another shape. Not to be changed."""
    folder = tmp_path_factory.mktemp("controls")
    for number, path in enumerate(sorted(pictures.glob("*.png")) + sorted(pictures.glob("*.jpg"))):
        size = (60, 30) if path.stem == "c" else Image.open(path).size
        noise = np.random.default_rng(number).integers(0, 255, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(noise).resize(size, Image.Resampling.NEAREST).save(folder / f"{path.stem}.png")
    return folder


@pytest.fixture
def editing_job(job, pictures, controls, small_controls):
    """editing_job("flux_kontext", ...): as job, of a family that edits, with control pictures."""

    def make_it(family, *overrides):
        folders = f"dataset.folders=[{{path='{pictures}', control='{controls}'}}]"
        return job(folders, *overrides, family=family)

    return make_it


def small(section, num_controls=(0, 3)):
    report = images.scan(section, num_controls)
    return report.problems, report.warnings, report.examples


def section_of(pictures, controls, **settings):
    return config.Dataset(folders=[config.Folder(path=str(pictures), control=str(controls))], **settings)


@pytest.fixture(scope="session")
def edited(tiny):
    """edited(name): the family, its denoiser, and diffusers' own pipeline of the same miniature; made once."""
    made = {}

    def it(name):
        if name not in made:
            Family, folder = families.get(name), tiny(name)
            family = make(Family, folder)
            family.load_encoders()
            parts = {"processor": family.text_pipeline.processor} if hasattr(family.text_pipeline, "processor") else {}
            pipeline = Family.pipeline_type().from_pretrained(folder, local_files_only=True, **parts)
            pipeline.set_progress_bar_config(disable=True)
            made[name] = SimpleNamespace(family=family, pipeline=pipeline, denoiser=load_denoiser(family))
        return made[name]

    return it


# -- finding them


def test_each_picture_gets_the_control_picture_of_its_name(pictures, controls):
    problems, warnings, examples = small(section_of(pictures, controls))
    assert not problems
    assert [one.controls[0].path.stem for one in examples] == [one.path.stem for one in examples]
    assert [(one.controls[0].width, one.controls[0].height) for one in examples if one.path.stem == "c"] == [(60, 30)]
    assert len(warnings) == 1 and "1 control picture(s) of another shape" in warnings[0]


def test_everything_wrong_with_control_pictures_is_told_at_once(pictures, controls, tmp_path):
    bad = shutil.copytree(controls, tmp_path / "bad")
    (bad / "a.png").unlink()
    (bad / "b.png").write_bytes(b"no picture")
    shutil.copy(bad / "c.png", bad / "c.jpg")
    for number in (1, 2, 4):
        shutil.copy(bad / "d.png", bad / f"d_{number}.png")
    (bad / "d.png").unlink()
    shutil.copy(bad / "e.png", bad / "nobody.png")
    problems, warnings, examples = small(section_of(pictures, bad), (0, 1))
    text = "\n".join(problems)
    assert len(problems) == 4 and [one.path.stem for one in examples] == ["e"]
    assert "a.png has no control picture a.png" in text
    assert "b.png is not a readable image" in text and "control picture" in text
    assert "c.png has several candidates for one control picture, c.jpg, c.png" in text
    assert "d.jpg has 2 control pictures, and this model takes at most 1" in text
    for line in [*problems, *warnings]:
        assert "控制图" in words.tell("zh-CN", line) or "is not a readable image" in line
    lonely = next(line for line in warnings if "belong to no picture" in line)
    assert "nobody.png" in lonely and "d_4.png" in lonely and "2 control" in lonely


def test_several_control_pictures_are_numbered_and_not_mistaken_for_another_pictures(tmp_path):
    for name in ("pictures/x.png", "pictures/sub/x.png", "pictures/y.png", "pictures/y_1.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), "red").save(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text("x", encoding="utf-8")
    for name in ("x_1.png", "x_2.webp", "x_10.png", "sub/x.bmp", "y_1.png"):
        (tmp_path / "controls" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "controls" / name)
    problems, warnings, examples = small(section_of(tmp_path / "pictures", tmp_path / "controls"))
    found = {one.relative: [control.path.name for control in one.controls] for one in examples}
    assert found == {"x.png": ["x_1.png", "x_2.webp"], "y_1.png": ["y_1.png"], "sub/x.png": ["x.bmp"]}
    assert len(problems) == 1 and "y.png has no control picture" in problems[0]
    assert any("x_10.png" in line for line in warnings)


@pytest.mark.parametrize("where", ["pictures", "pictures/control", "nowhere", "pictures/a.png"])
def test_a_control_folder_that_cannot_be_one(pictures, tmp_path, where):
    shutil.copytree(pictures, tmp_path / "pictures")
    shutil.copytree(pictures, tmp_path / "pictures" / "control")
    problems, _, examples = small(section_of(tmp_path / "pictures", tmp_path / where))
    word = {"nowhere": "does not exist", "pictures/a.png": "is a file"}.get(where, "all of which is trained on")
    assert len(problems) == 1 and word in problems[0] and not examples
    assert "控制图文件夹" in words.tell("zh-CN", problems[0])


def test_what_the_config_says_of_control_pictures_is_checked_before_anything_is_loaded():
    def problems(*given):
        with pytest.raises(UserErrors) as told:
            config.loads("", ["model.path=x", *given])
        return told.value.problems

    with_control = "dataset.folders=[{path='x', control='y'}]"
    found = problems("model.family=sd15", with_control, "preview.controls=['a.png']", "preview.prompts=['a']")
    assert len(found) == 2 and "dataset.folders.0.control" in found[0] and "flux_kontext" in found[0]
    assert "preview.controls: Stable Diffusion 1.5 is shown no control pictures" in found[1]
    found = problems("model.family=flux_kontext", with_control, "preview.controls=['a.png']")
    assert found == ["preview.controls: has 1 entries for 0 in preview.prompts; give one for each prompt (from --set)"]
    assert (
        "between 32 and 8192" in problems("model.family=flux_kontext", with_control, "dataset.control_resolution=8")[0]
    )


AI_TOOLKIT = """
job: extension
config:
  name: edit
  process:
    - type: sd_trainer
      model: {name_or_path: black-forest-labs/FLUX.1-Kontext-dev, arch: flux_kontext}
      datasets: [{folder_path: after, control_path: before, resolution: [512]}]
      train: {steps: 100, batch_size: 1, lr: 1e-4}
      network: {type: lora, linear: 16, linear_alpha: 16}
"""
DIFFUSION_PIPE = """
output_dir = "out"
dataset = "dataset.toml"
epochs = 10
micro_batch_size_per_gpu = 1
[model]
type = "flux"
diffusers_path = "FLUX.1-Kontext-dev"
transformer_path = "flux1-kontext-dev.safetensors"
[adapter]
type = "lora"
rank = 16
"""


@pytest.mark.parametrize("tool", ["ai-toolkit", "diffusion-pipe", "musubi-tuner"])
def test_control_folders_of_other_trainers_move_in(tool, tmp_path):
    folder = "[[{0}]]\n{1} = 'after'\n{2} = 'before'\nnum_repeats = 1\n"
    files = {
        "ai-toolkit": ("job.yaml", AI_TOOLKIT, ""),
        "diffusion-pipe": ("job.toml", DIFFUSION_PIPE, folder.format("directory", "path", "control_path")),
        "musubi-tuner": (
            "job.toml",
            "dit = 'flux1-kontext-dev.safetensors'\ndataset_config = 'dataset.toml'\nnetwork_dim = 16\n"
            "network_module = 'networks.lora_flux'\nmax_train_steps = 10\nlearning_rate = 1e-4\n",
            "[general]\nresolution = [512, 512]\ncaption_extension = '.txt'\n"
            + folder.format("datasets", "image_directory", "control_directory"),
        ),
    }
    name, text, dataset = files[tool]
    (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "dataset.toml").write_text(dataset, encoding="utf-8")
    made = importing.import_file(tmp_path / name, tool)
    assert made.settings["model"]["family"] == "flux_kontext"
    assert [one.get("control") for one in made.settings["dataset"]["folders"]] == ["before"]
    other = importing.import_file(tmp_path / name, tool, "sdxl")
    assert "control" not in other.settings["dataset"]["folders"][0]


# -- cutting and showing


def test_a_control_picture_of_its_pictures_shape_is_cut_as_the_picture_is():
    """Judged by pixels: a gradient that is the picture, and as its control at twice the size, stay the same."""
    ramp = np.add.outer(np.arange(50) * 2, np.arange(96)).astype(np.uint8)
    picture = Image.fromarray(np.stack([ramp] * 3, -1))
    control = picture.resize((192, 100), Image.Resampling.BICUBIC)
    section = config.Dataset(max_aspect=1.5)
    example = images.Example("x.png", "", 0, "x.png", 1, 96, 50, "")
    (placed,) = buckets.assign([example], section, resolution=48, step=8)
    box = buckets.control_box(placed.placement, control.size)
    assert box[0] > 10 and box[1] == 0 and box[3] == 100
    mine = np.asarray(control.crop(box).resize(placed.placement.bucket_wh, Image.Resampling.LANCZOS), dtype=float)
    theirs = np.asarray(buckets.fit(picture, placed.placement.bucket_wh), dtype=float)
    assert np.abs(mine - theirs).mean() < 1.5  # an uncut one is off by 12
    assert buckets.control_box(placed.placement, (100, 100)) == (0, 0, 100, 100)


class Told(Exception):
    pass


@pytest.mark.parametrize("size", [(512, 512), (640, 480), (333, 1000), (1600, 500), (39, 77)])
@pytest.mark.parametrize("name", EDITING)
def test_control_pictures_are_shown_in_the_pipelines_size(name, size, edited, monkeypatch):
    it = edited(name)
    resized = []

    def record(image, height, width, *args, **kwargs):
        resized.append((width, height))
        raise Told

    monkeypatch.setattr(it.pipeline.image_processor, "preprocess", record)
    with pytest.raises(Told):
        it.pipeline(image=Image.new("RGB", size), prompt="x")
    assert it.family.control_size(*size) == resized[-1]
    wide, high = it.family.control_size(*size, 512)
    assert abs(wide * high / 512**2 - 1) < 0.2 and wide % 16 == high % 16 == 0
    assert abs(np.log(wide / high) - np.log(resized[-1][0] / resized[-1][1])) < 0.1


# -- what the denoiser is shown


NOISE = np.random.default_rng(0).integers(0, 255, (20, 9, 3), dtype=np.uint8)


@pytest.fixture
def batch_of(edited, small_controls, tmp_path):
    """batch_of(name, prompts): a batch from files through scan, cache and loader, and the control picture."""

    def make_it(name, prompts, controls=1, **settings):
        it = edited(name)
        shown = [Image.fromarray(NOISE).rotate(30 * i, expand=True) for i in range(controls)]
        for folder in ("pictures", "controls"):
            (tmp_path / folder).mkdir(exist_ok=True)
        for i, prompt in enumerate(prompts):
            Image.fromarray(NOISE[:, ::-1] // (i + 1)).resize((64, 40)).save(tmp_path / "pictures" / f"{i}.png")
            (tmp_path / "pictures" / f"{i}.txt").write_text(prompt, encoding="utf-8")
            for number, picture in enumerate(shown):
                picture.save(tmp_path / "controls" / (f"{i}_{number + 1}.png" if controls > 1 else f"{i}.png"))
        section = section_of(tmp_path / "pictures", tmp_path / "controls", **settings)
        examples = images.scan(section, it.family.controls).require()
        placed = buckets.assign(examples, section, resolution=24, step=8)
        cache = Cache(tmp_path / "cache", it.family, section)
        cache.fill(placed, dataset_captions(examples, section, 0))
        loader = Loader(buckets.group(placed), cache, it.family, section, seed=0, batch_size=len(prompts))
        return it, loader, shown

    return make_it


def ask_the_pipeline(it, batch, prompts, shown, monkeypatch, guidance):
    """(noisy, t, answer) of the steps of diffusers' own pipeline, and the control tokens that its denoiser saw."""
    seen, tokens = [], []
    scheduler = type(it.pipeline.scheduler)
    step = scheduler.step

    def record(self, model_output, timestep, sample, *args, **kwargs):
        seen.append((sample.clone(), model_output.clone()))
        return step(self, model_output, timestep, sample, *args, **kwargs)

    def look(module, args, kwargs):
        tokens.append(kwargs["hidden_states"])

    monkeypatch.setattr(scheduler, "step", record)
    handle = it.pipeline.transformer.register_forward_pre_hook(look, with_kwargs=True)
    width, height = batch.bucket_wh
    try:
        it.pipeline(
            image=shown if len(shown) > 1 else shown[0],
            prompt=prompts,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
            max_sequence_length=it.family.max_sequence_length,
            **it.family.size_inputs(width, height),
            **it.family.guidance_inputs(guidance),
        )
    finally:
        handle.remove()
    told = it.pipeline.scheduler.timesteps / it.pipeline.scheduler.config.num_train_timesteps
    steps = [
        (it.family.unpack(a, batch.latent_hw), t, it.family.unpack(b, batch.latent_hw))
        for (a, b), t in zip(seen, told, strict=True)
    ]
    return steps, [each[:, seen[0][0].shape[1] :] for each in tokens]


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[1:]], ids=["both", "one"])
@pytest.mark.parametrize("name", EDITING)
def test_denoiser_answers_as_inside_the_pipeline_with_a_control_picture(name, prompts, batch_of, monkeypatch):
    """From files to the denoiser: a control picture of another shape than the picture, neither of them square."""
    it, loader, shown = batch_of(name, prompts)
    batch = loader.micro(0, 0)
    assert len(batch) == len(prompts) and batch.latent_hw[0] != batch.latent_hw[1]
    latents = batch.cond["control_0"]
    assert latents.shape[-2:] != batch.latent_hw and latents.shape[-1] != latents.shape[-2]
    guidance = 1.0 if it.family.uses_negative else 2.5
    steps, tokens = ask_the_pipeline(it, batch, batch.captions, shown, monkeypatch, guidance)
    torch.testing.assert_close(it.family.pack(latents), tokens[0], rtol=1e-4, atol=1e-4)
    for noisy, t, expected in steps:
        t_B = t.float().expand(len(batch))
        with torch.no_grad():
            answer = it.family.predict(it.denoiser, noisy, t_B, batch.cond, guidance)
            others = {**batch.cond, "control_0": latents.flip(-1)}
            other = it.family.predict(it.denoiser, noisy, t_B, others, guidance)
        torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-5)
        assert (other - answer).norm() > 1e-3 * answer.norm(), "blind to control pictures, and proves nothing"


@pytest.mark.parametrize("name", EDITING)
def test_previews_with_control_pictures_are_the_pipelines(name, edited, small_controls, tmp_path):
    it = edited(name)
    path = tmp_path / "control.png"
    Image.fromarray(NOISE).save(path)
    (tmp_path / "._control.png").write_bytes(b"resource fork")
    section = config.Preview(prompts=PROMPTS[:1], controls=[str(tmp_path)], steps=2, width=32, height=16)
    (shown,), problems = images.preview_controls(section, config.Dataset(), it.family.controls)
    assert not problems
    cache = Cache(tmp_path / "cache", it.family, config.Dataset())
    texts = [PROMPTS[0], it.family.negative_text("")]
    cache.fill([], texts)
    cond = cache.cond(texts[0]) | preview_pictures(shown, "#ffffff")
    (mine,) = sample.render(it.family, it.family.pipeline(it.denoiser), [cond], cache.cond(texts[1]), section, 0)
    guided = {"negative_prompt": ""} if it.family.uses_negative else {}
    theirs = it.pipeline(
        image=Image.fromarray(NOISE),
        prompt=PROMPTS[0],
        generator=torch.Generator().manual_seed(section.seed),
        num_inference_steps=2,
        max_sequence_length=it.family.max_sequence_length,
        **it.family.size_inputs(32, 16),
        **it.family.guidance_inputs(it.family.usual_guidance()),
        **guided,
    ).images[0]
    assert mine.size == (32, 16)
    assert np.abs(np.asarray(mine, dtype=int) - np.asarray(theirs, dtype=int)).max() <= 1


@pytest.mark.parametrize("name", EDITING)
def test_mirroring_mirrors_the_control_picture_too(name, batch_of):
    """A mirrored showing is what the same files give when both are mirrored on disk."""
    it, loader, _ = batch_of(name, PROMPTS[:1], flip=True)
    (placed,) = [item.placed for item in loader.items[next(iter(loader.items))]]
    flipped = loader._cond(placed, PROMPTS[0], True)
    latents = loader.cache.latents(placed, True)
    for path in (placed.example.path, placed.example.controls[0].path):
        Image.open(path).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path)
    section = loader.section
    again = buckets.assign(images.scan(section).require(), section, resolution=24, step=8)
    loader.cache.fill(again, [])
    plain = loader._cond(again[0], PROMPTS[0], False)
    torch.testing.assert_close(loader.cache.latents(again[0], False), latents, rtol=1e-4, atol=1e-4)
    assert plain.keys() == flipped.keys()
    for key in plain:  # Lanczos is symmetrical but for rounding to 8 bits
        torch.testing.assert_close(plain[key], flipped[key], rtol=0.05, atol=0.05)
    unlike = loader._cond(again[0], PROMPTS[0], True)
    assert not torch.allclose(unlike["control_0"], plain["control_0"], rtol=0.05, atol=0.05)


def test_batches_hold_control_pictures_of_one_size(editing_job):
    """`c` has a control picture of another shape than its picture, and b's bucket otherwise."""
    mine = editing_job("flux_kontext", "train.batch_size=5", "train.steps=1", "dataset.buckets=false")
    result = run(mine)
    sizes = [event for event in result.run.events() if event["event"] == "data"]
    assert sizes[0]["buckets"] == {"48x48": 5} and sizes[0]["steps_per_epoch"] == 2


# -- the whole way


@pytest.mark.parametrize("name", EDITING)
def test_an_editing_model_trains_to_verified_files(name, editing_job, pictures, controls, tmp_path, monkeypatch):
    """And nothing of the machine is in what is published of it, or in the log: the home, the user, a token."""
    home = tmp_path / "canary_home" / "canary_user"
    for variable, value in (("HOME", str(home)), ("USER", "canary_user"), ("HF_TOKEN", "hf_canary")):
        monkeypatch.setenv(variable, value)
    shutil.copytree(pictures, home / "pictures")
    shutil.copytree(controls, home / "controls")
    shown = [str(home / "controls" / "a.png"), "~/controls/b.png"]
    trained_text = bool(families.get(name).trained_text)
    mine = editing_job(
        name,
        f"dataset.folders=[{{path='{home}/pictures', control='~/controls'}}]",
        f"dataset.cache_dir='{home}/cache'",
        f"output_dir='{home}/runs'",
        f"adapter.text_encoder={str(trained_text).lower()}",
        "validation.pictures=1",
        "validation.every=3",
        "export.verify=true",
        "preview.prompts=['a cat', 'a dog']",
        f"preview.controls={shown}",
        "train.batch_size=2",
        "dataset.flip=true",
        "dataset.control_resolution=32",
    )
    result = run(mine)
    assert [report.ok for report in result.reports] == [True] * len(result.files) and result.files
    told = [event["text"] for event in result.run.events() if event["event"] == "warning"]
    assert not any("no effect" in text or "no preview" in text for text in told), told
    probe = result.run.path / "probe.safetensors"
    assert any(key.startswith("cond.control_") for key in load_file(probe))
    drawn = sorted((result.run.path / "samples").glob("step-*.png"))
    assert len(drawn) == 4
    metadata = json.loads((result.run.path / "verify.json").read_text(encoding="utf-8"))
    assert len(metadata) == len(result.files)

    about = kit.facts_of(result.files[0], {}, config.load(result.run.config_file))
    file, _, samples = kit.from_run(result.run.path)
    published = kit.make(file, tmp_path / "kit", about, samples, captions=True)
    assert "canary" in result.run.config_file.read_text(encoding="utf-8") and len(published.files) == 8
    log = [result.run.path / told for told in ("events.jsonl", "status.json", "verify.json")]
    for path in (*result.files, *published.files, *log):
        told = [line[:400] for line in path.read_bytes().splitlines() if b"canary" in line]
        assert not told, (path.name, told)


@pytest.mark.parametrize("name", EDITING)
def test_an_estimate_counts_the_tokens_of_control_pictures(name, editing_job):
    def step(side):
        mine = editing_job(name, f"dataset.control_resolution={side}", "train.batch_size=2")
        return estimate.estimate(mine, make(families.get(name), mine.model.path, dtype=torch.bfloat16))

    small, large = step(32), step(96)
    assert large.step_bytes > 1.5 * small.step_bytes and large.cache_bytes >= small.cache_bytes


@pytest.mark.parametrize("name", EDITING)
def test_a_control_picture_matters_and_an_edited_one_is_encoded_again(name, editing_job, controls, tmp_path):
    mine = tmp_path / "mine"
    shutil.copytree(controls, mine)

    def losses(*overrides):
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)
        job = editing_job(
            name,
            f"dataset.folders.0.control='{mine}'",
            f"dataset.cache_dir='{tmp_path / 'own'}'",
            "train.steps=2",
            *overrides,
        )
        events = list(run(job).run.events())
        encoded = [event["encoded"] for event in events if event["event"] == "cache"]
        return [event["loss"] for event in events if event["event"] == "step"], encoded[0]

    first, encoded = losses()
    again, reused = losses()
    assert again == first and reused == 0 and encoded >= 14  # 5 pictures, 5 control pictures, 4 or 5 captions and ""
    for path in mine.iterdir():
        Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path)
    edited, encoded_again = losses()
    assert edited != first and encoded_again == 5
    smaller, encoded_smaller = losses("dataset.control_resolution=48")
    assert smaller != edited and encoded_smaller == 5


def test_a_single_file_of_kontext_is_read_as_flux_and_told_by_its_name(tiny, tmp_path):
    Family = families.get("flux_kontext")
    whole = load_file(tiny("flux_kontext") / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file(bfl_tensors(whole), tmp_path / "flux1-kontext-dev.safetensors")
    for parts in ("flux_kontext", "flux"):  # the parts beside it are FLUX.1's
        one = make(Family, tmp_path / "flux1-kontext-dev.safetensors", components=str(tiny(parts)))
        found = {key: tensor for key, tensor in one.denoiser_tensors()}
        assert found.keys() == whole.keys() and all(torch.equal(found[key], whole[key]) for key in whole)
        assert one.warnings == []
    as_flux = make(families.get("flux"), tmp_path / "flux1-kontext-dev.safetensors", components=str(tiny("flux")))
    assert "model.family = 'flux_kontext'" in as_flux.warnings[0]
    (tmp_path / "flux1-kontext-dev.safetensors").rename(tmp_path / "other.safetensors")
    assert (
        "Kontext in its name" in make(Family, tmp_path / "other.safetensors", components=str(tiny("flux"))).warnings[0]
    )
    with pytest.raises(UserError, match="set model.family = 'flux_kontext'"):
        make(families.get("flux"), tiny("flux_kontext"))
