"""Control pictures of editing models: found, cut, cached and shown as diffusers' own pipeline shows them."""

import json
import shutil
from types import SimpleNamespace

import editing
import numpy as np
import pytest
import torch
import transformers
from editing import NOISE, load_encoders
from original_code import bfl_tensors
from PIL import Image
from safetensors.torch import load_file, save_file
from test_families import PROMPTS, load_denoiser, make

from lora_fp8 import config, families, importing
from lora_fp8.data import buckets, control_files, images
from lora_fp8.data.cache import Cache, decode_preview_controls
from lora_fp8.data.examples import Example
from lora_fp8.data.loader import Loader
from lora_fp8.errors import UserError, UserErrors
from lora_fp8.plan import estimate, placement
from lora_fp8.plan import plan as planning
from lora_fp8.settings import Dataset, Folder, Preview, split_preview
from lora_fp8.stages import previews
from lora_fp8.stages.cache import PreviewPrompts
from lora_fp8.tools import kit
from lora_fp8.train import run
from webui import translations

EDITING = [name for name in families.list_families() if any(families.get(name).controls)]


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
    return Dataset(folders=[Folder(path=str(pictures), control=str(controls))], **settings)


@pytest.fixture(scope="session")
def edited(tiny):
    """edited(name): the family, its denoiser, and diffusers' own pipeline of the same miniature; made once."""
    made = {}

    def it(name):
        if name not in made:
            Family, folder = families.get(name), tiny(name)
            family = make(Family, folder)
            load_encoders(family)
            pipeline = Family.get_pipeline_type().from_pretrained(
                folder, local_files_only=True, **editing.processor(Family, folder)
            )
            Family.mend_(pipeline)
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
    assert len(warnings) == 1 and "1 control image has another aspect ratio" in warnings[0]


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
    assert "a.png: there is no control image a.png" in text
    assert "b.png: this is not a readable image" in text and "control image" in text
    assert "c.png: there are several candidates for one control image, c.jpg, c.png" in text
    assert "d.jpg: there are 2 control images, but this model accepts at most 1" in text
    for line in [*problems, *warnings]:
        assert "控制图" in translations.translate("zh-CN", line) or "this is not a readable image" in line
    lonely = next(line for line in warnings if "have no matching image" in line)
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
    assert len(problems) == 1 and "y.png: there is no control image" in problems[0]
    assert any("x_10.png" in line for line in warnings)


@pytest.mark.parametrize("where", ["pictures", "pictures/control", "nowhere", "pictures/a.png"])
def test_a_control_folder_that_cannot_be_one(pictures, tmp_path, where):
    shutil.copytree(pictures, tmp_path / "pictures")
    shutil.copytree(pictures, tmp_path / "pictures" / "control")
    problems, _, examples = small(section_of(tmp_path / "pictures", tmp_path / where))
    word = {"nowhere": "does not exist", "pictures/a.png": "is a file"}.get(where, "whose images are all trained")
    assert len(problems) == 1 and word in problems[0] and not examples
    assert "控制图文件夹" in translations.translate("zh-CN", problems[0])


def test_what_the_config_says_of_control_pictures_is_checked_before_anything_is_loaded():
    def problems(*given):
        with pytest.raises(UserErrors) as told:
            config.loads("", ["model.path=x", *given])
        return told.value.problems

    with_control = "dataset.folders=[{path='x', control='y'}]"
    found = problems("model.family=sd15", with_control, "preview.controls=['a.png']", "preview.prompts=['a']")
    assert len(found) == 2 and "dataset.folders.0.control" in found[0] and "flux_kontext" in found[0]
    assert "preview.controls: Stable Diffusion 1.5 does not use control images" in found[1]
    found = problems("model.family=flux_kontext", with_control, "preview.controls=['a.png']")
    assert found == [
        ("preview.controls: the list has 1 entries, but preview.prompts has 0; give one for each prompt (from --set)")
    ]
    assert (
        "at least 32 and at most 8192"
        in problems("model.family=flux_kontext", with_control, "dataset.control_resolution=8")[0]
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


@pytest.mark.parametrize(
    ("name", "text", "family"),
    [
        ("m.toml", "dit = 'x.safetensors'\nnetwork_module = 'networks.lora_qwen_image'\nmodel_version = '{}'\n", said)
        for said in (("edit", ""), ("edit-2509", "_plus"), ("edit-2511", "_plus"))
    ]
    + [
        ("a.yaml", AI_TOOLKIT.replace("flux_kontext", "{}"), said)
        for said in (("qwen_image_edit", ""), ("qwen_image_edit_plus", "_plus"), ("qwen_image_edit_plus:2511", "_plus"))
    ],
)
def test_qwens_editing_models_are_told_apart_in_the_files_of_other_trainers(name, text, family, tmp_path):
    (tmp_path / name).write_text(text.replace("{}", family[0], 1), encoding="utf-8")
    made = importing.import_file(tmp_path / name, "musubi-tuner" if name == "m.toml" else "ai-toolkit")
    assert made.settings["model"]["family"] == f"qwen_image_edit{family[1]}"
    assert name == "m.toml" or [one.get("control") for one in made.settings["dataset"]["folders"]] == ["before"]


# -- cutting and showing


def test_a_control_picture_of_its_pictures_shape_is_cut_as_the_picture_is():
    """Judged by pixels: a gradient that is the picture, and as its control at twice the size, stay the same."""
    ramp = np.add.outer(np.arange(50) * 2, np.arange(96)).astype(np.uint8)
    picture = Image.fromarray(np.stack([ramp] * 3, -1))
    control = picture.resize((192, 100), Image.Resampling.BICUBIC)
    section = Dataset(folders=[Folder(path="set")], max_aspect=1.5)
    example = Example("x.png", "", 0, "x.png", 1, 96, 50, "")
    (placed,) = buckets.assign([example], section, resolution=48, step=8)
    box = buckets.compute_control_box(placed.placement, control.size)
    assert box[0] > 10 and box[1] == 0 and box[3] == 100
    mine = np.asarray(control.crop(box).resize(placed.placement.bucket_wh, Image.Resampling.LANCZOS), dtype=float)
    theirs = np.asarray(buckets.fit(picture, placed.placement), dtype=float)
    assert np.abs(mine - theirs).mean() < 1.5  # an uncut one is off by 12
    assert buckets.compute_control_box(placed.placement, (100, 100)) == (0, 0, 100, 100)


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
    assert it.family.compute_control_size(*size) == resized[-1]
    wide, high = it.family.compute_control_size(*size, 512)
    assert abs(wide * high / 512**2 - 1) < 0.2 and wide % 16 == high % 16 == 0
    assert abs(np.log(wide / high) - np.log(resized[-1][0] / resized[-1][1])) < 0.1


SEEING = [name for name in EDITING if families.get(name).prompts_see_controls]


def pictures_to_see(name, size=(333, 1000)):
    """As many as the model takes, none of them square."""
    noise = np.random.default_rng(1).integers(0, 255, (30, 40, 3), dtype=np.uint8)
    sizes = [size, (640, 480), (60, 200)][: families.get(name).controls[1]]
    return [Image.fromarray(noise).resize(each, Image.Resampling.BICUBIC) for each in sizes]


@pytest.mark.parametrize("name", SEEING)
def test_text_encoders_see_what_the_pipeline_lets_them_see(name, edited, monkeypatch):
    """Text and pictures, to the pixel and at their real size, as they come to the model's processor."""
    it, seen = edited(name), []
    load_encoders(it.family)  # a cache that was filled has let them go

    def record(self, text, images, **kwargs):
        images = images if isinstance(images, list) else [images]
        seen.append((text, [(image.size, image.tobytes()) for image in images]))
        raise Told

    pictures = pictures_to_see(name)
    monkeypatch.setattr(type(it.pipeline.processor), "__call__", record)
    for ask in (
        lambda: it.pipeline(image=pictures if len(pictures) > 1 else pictures[0], prompt="make it {blue}"),
        lambda: it.family.encode_prompts(["make it {blue}"], [pictures]),
    ):
        with pytest.raises(Told):
            ask()
    assert seen[0] == seen[1] and len(seen[0][1]) == len(pictures)


@pytest.mark.parametrize("name", SEEING)
def test_what_text_encoders_make_of_pictures_is_what_transformers_makes(name, edited, small_controls, monkeypatch):
    """Its own call hands the encoder all that the processor says, and so counts a picture's tokens by row and column;
    diffusers' pipelines leave that out (its issue 14194)."""
    it, said, made = edited(name), {}, {}
    load_encoders(it.family)
    real = type(it.pipeline.processor).__call__

    def record(self, **given):
        said.update(given)
        made.update(real(self, **given))
        return real(self, **given)

    monkeypatch.setattr(type(it.pipeline.processor), "__call__", record)
    pictures = pictures_to_see(name)
    (cond,) = it.family.encode_prompts(["a cat"], [pictures])
    encoder = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(it.family.folder / "text_encoder").eval()
    with torch.no_grad():
        whole = encoder(**made, output_hidden_states=True).hidden_states[-1][0]
        told_less = {key: tensor for key, tensor in made.items() if key != "mm_token_type_ids"}
        less = encoder(**told_less, output_hidden_states=True).hidden_states[-1][0]
    kept = cond["prompt_embeds"]
    torch.testing.assert_close(kept, whole[-len(kept) :])
    assert (less[-len(kept) :] - kept).abs().max() > 1e-3
    words = it.family.load_tokenizer("tokenizer").decode(made["input_ids"][0][-len(kept) :])
    assert words.startswith(("Picture 1: <|vision_start|>", "<|vision_start|>"))
    patches = made["image_grid_thw"].prod(dim=1) // 4
    assert len(patches) == len(pictures) and words.count("<|image_pad|>") == patches.sum()


# -- what the denoiser is shown


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
        cache.fill(placed, cache.list_prompts(placed, 0))
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
    # Pipelines whose prompts see the pictures take one prompt at a time.
    calls = [[prompt] for prompt in prompts] if it.family.prompts_see_controls else [prompts]
    try:
        for call in calls:
            it.pipeline(
                image=shown if len(shown) > 1 else shown[0],
                prompt=call,
                num_inference_steps=2,
                generator=torch.Generator().manual_seed(0),
                output_type="latent",
                max_sequence_length=it.family.max_sequence_length,
                **it.family.make_size_inputs(width, height),
                **it.family.make_guidance_inputs(guidance),
            )
    finally:
        handle.remove()
    seen = [tuple(map(torch.cat, zip(*seen[step::2], strict=True))) for step in range(2)]
    tokens = [torch.cat(tokens[step::2]) for step in range(2)]
    told = it.pipeline.scheduler.timesteps / it.pipeline.scheduler.config.num_train_timesteps
    steps = [
        (it.family.unpack(a, batch.latent_hw), t, it.family.unpack(b, batch.latent_hw))
        for (a, b), t in zip(seen, told, strict=True)
    ]
    return steps, [each[:, seen[0][0].shape[1] :] for each in tokens]


@pytest.mark.parametrize(
    ("name", "prompts", "num"),
    [(name, prompts, 1) for name in EDITING for prompts in (PROMPTS, PROMPTS[1:])]
    + [(name, PROMPTS, most) for name in EDITING if (most := families.get(name).controls[1]) > 1],
)
def test_denoiser_answers_as_inside_the_pipeline_with_control_pictures(name, prompts, num, batch_of, monkeypatch):
    """From files to the denoiser: control pictures of another shape than the picture, none of them square."""
    it, loader, shown = batch_of(name, prompts, num)
    batch = loader.take_batch(0, 0)
    assert len(batch) == len(prompts) and batch.latent_hw[0] != batch.latent_hw[1]
    latents = batch.cond["control_0"]
    assert latents.shape[-2:] != batch.latent_hw and latents.shape[-1] != latents.shape[-2]
    guidance = 1.0 if it.family.uses_negative else 2.5
    steps, tokens = ask_the_pipeline(it, batch, batch.captions, shown, monkeypatch, guidance)
    latents_of_all = [it.family.pack(batch.cond[f"control_{i}"]) for i in range(num)]
    torch.testing.assert_close(torch.cat(latents_of_all, dim=1), tokens[0], rtol=1e-4, atol=1e-4)
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
    """Two previews of one prompt: each is guided away from the negative prompt as it is beside its own picture."""
    it = edited(name)
    pictures = [Image.fromarray(NOISE), Image.fromarray(NOISE[::-1, :6].copy())]
    for number, picture in enumerate(pictures):
        (tmp_path / str(number)).mkdir()
        picture.save(tmp_path / str(number) / "control.png")
        (tmp_path / str(number) / "._control.png").write_bytes(b"resource fork")
    given = {"prompts": PROMPTS[:1] * 2, "controls": [str(tmp_path / str(number)) for number in range(2)]}
    section = Preview(**given, steps=2, width=32, height=16)
    shown, problems = control_files.find_preview_controls(section, Dataset(), it.family.controls)
    assert not problems
    cache = Cache(tmp_path / "cache", it.family, Dataset())
    drawn, away = placement.make_preview_prompts(section, cache)
    cache.fill([], [*drawn, *away])
    conds = [
        cache.read_cond(text) | decode_preview_controls(each, "#ffffff")
        for text, each in zip(drawn, shown, strict=True)
    ]
    pipeline = it.family.make_pipeline(it.denoiser)
    prompts = PreviewPrompts(split_preview(section), ["", ""], conds, [cache.read_cond(text) for text in away])
    mine = previews.render(it.family, pipeline, prompts, 0)
    guided = {"negative_prompt": ""} if it.family.uses_negative else {}
    for number, picture in enumerate(pictures):
        theirs = it.pipeline(
            image=picture,
            prompt=PROMPTS[0],
            generator=torch.Generator().manual_seed(section.seed + number),
            num_inference_steps=2,
            max_sequence_length=it.family.max_sequence_length,
            **it.family.make_size_inputs(32, 16),
            **it.family.make_guidance_inputs(it.family.choose_guidance()),
            **guided,
        ).images[0]
        assert mine[number].size == (32, 16)
        assert np.abs(np.asarray(mine[number], dtype=int) - np.asarray(theirs, dtype=int)).max() <= 1


@pytest.mark.parametrize("name", EDITING)
def test_mirroring_mirrors_the_control_picture_too(name, batch_of):
    """A mirrored showing is what the same files give when both are mirrored on disk."""
    it, loader, _ = batch_of(name, PROMPTS[:1], flip=True)
    (placed,) = [item.placed for item in loader.group_items(0)[next(iter(loader.images))]]
    flipped = loader._collect_cond(placed, PROMPTS[0], True)
    latents = loader.cache.read_latents(placed, True)
    for path in (placed.example.path, placed.example.controls[0].path):
        Image.open(path).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(path)
    section = loader.section
    again = buckets.assign(images.scan(section).require(), section, resolution=24, step=8)
    loader.cache.fill(again, loader.cache.list_prompts(again, 0))
    plain = loader._collect_cond(again[0], PROMPTS[0], False)
    torch.testing.assert_close(loader.cache.read_latents(again[0], False), latents, rtol=1e-4, atol=1e-4)
    assert plain.keys() == flipped.keys()
    for key in plain:  # Lanczos is symmetrical but for rounding to 8 bits
        torch.testing.assert_close(plain[key], flipped[key], rtol=0.05, atol=0.05)
    unlike = loader._collect_cond(again[0], PROMPTS[0], True)
    assert not torch.allclose(unlike["control_0"], plain["control_0"], rtol=0.05, atol=0.05)


def test_batches_hold_control_pictures_of_one_size(editing_job):
    """`c` has a control picture of another shape than its picture, and b's bucket otherwise."""
    mine = editing_job("flux_kontext", "train.batch_size=5", "train.steps=1", "dataset.buckets=false")
    result = run(mine)
    sizes = [event for event in result.run.read_events() if event["event"] == "data"]
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
    told = [event["text"] for event in result.run.read_events() if event["event"] == "warning"]
    assert not any("no effect" in text or "no preview" in text for text in told), told
    probe = result.run.path / "probe.safetensors"
    assert any(key.startswith("cond.control_") for key in load_file(probe))
    drawn = sorted((result.run.path / "samples").glob("step-*.png"))
    assert len(drawn) == 4
    metadata = json.loads((result.run.path / "verify.json").read_text(encoding="utf-8"))
    assert len(metadata) == len(result.files)

    about = kit.collect_facts(result.files[0], {}, config.load(result.run.config_file))
    file, _, samples = kit.collect_from_run(result.run.path)
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
        return estimate.estimate(planning.make(mine))

    small, large = step(32), step(192)
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
        events = list(run(job).run.read_events())
        encoded = [event["encoded"] for event in events if event["event"] == "cache"]
        return [event["loss"] for event in events if event["event"] == "step"], encoded[0]

    first, encoded = losses()
    again, reused = losses()
    assert again == first and reused == 0 and encoded >= 14  # 5 pictures, 5 control pictures, 4 or 5 captions and ""
    for path in mine.iterdir():
        Image.open(path).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(path)
    edited, encoded_again = losses()
    texts = encoded - 10 if families.get(name).prompts_see_controls else 0
    assert edited != first and encoded_again == 5 + texts
    smaller, encoded_smaller = losses("dataset.control_resolution=48")
    assert smaller != edited and encoded_smaller == 5


def test_a_single_file_of_kontext_is_read_as_flux_and_told_by_its_name(tiny, tmp_path):
    Family = families.get("flux_kontext")
    whole = load_file(tiny("flux_kontext") / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file(bfl_tensors(whole), tmp_path / "flux1-kontext-dev.safetensors")
    for parts in ("flux_kontext", "flux"):  # the parts beside it are FLUX.1's
        one = make(Family, tmp_path / "flux1-kontext-dev.safetensors", components=str(tiny(parts)))
        found = {key: tensor for key, tensor in one.read_denoiser_tensors()}
        assert found.keys() == whole.keys() and all(torch.equal(found[key], whole[key]) for key in whole)
        assert one.warnings == []
    as_flux = make(families.get("flux"), tmp_path / "flux1-kontext-dev.safetensors", components=str(tiny("flux")))
    assert "model.family = 'flux_kontext'" in as_flux.warnings[0]
    (tmp_path / "flux1-kontext-dev.safetensors").rename(tmp_path / "other.safetensors")
    assert (
        "does not contain Kontext"
        in make(Family, tmp_path / "other.safetensors", components=str(tiny("flux"))).warnings[0]
    )
    with pytest.raises(UserError, match="set model.family = 'flux_kontext'"):
        make(families.get("flux"), tiny("flux_kontext"))
