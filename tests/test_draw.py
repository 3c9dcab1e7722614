"""lora-fp8 draw: what is drawn is what training and diffusers draw, and nothing but its own folder is touched."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from lora_fp8 import cli, settings, train
from lora_fp8.adapters import copy_state, inject, kinds
from lora_fp8.adapters.attach import attached
from lora_fp8.errors import UserError, UserErrors
from lora_fp8.lora_files import safetensors_file
from lora_fp8.plan.resolve import make_family
from lora_fp8.precision import quantize_
from lora_fp8.run import drawings
from lora_fp8.stages.cache import PreviewPrompts
from lora_fp8.stages.previews import draw_clips
from lora_fp8.tools import draw as tool
from lora_fp8.verify.pipeline import build_clean_pipeline, load

STRONG = ("optimizer.lr=0.02", "train.steps=6", "checkpoint.every=2", "export.every=2", "checkpoint.keep=2")
PREVIEWS = ("preview.prompts=['a cat']", "preview.negative='fog'", "preview.guidance=3.0", "preview.every=2")


def pixels(path: Path) -> bytes:
    return Image.open(path).tobytes()


@pytest.fixture(scope="module")
def trained(make_job, tmp_path_factory):
    """A finished run with previews of steps 0, 2, 4 and 6. Not to be changed."""
    job = make_job(tmp_path_factory.mktemp("trained"), *STRONG, *PREVIEWS)
    return train.run(job, progress=False).run


def test_it_draws_what_the_run_drew(trained, tmp_path, tree_hash):
    """The preview of each step, pixel by pixel: from the checkpoint, and of step 2 from the LoRA file that is left."""
    assert not (trained.checkpoints / "step-000002").exists()
    before = tree_hash(trained.path)
    seen = []
    request = tool.Request((trained.path,), steps=(2, 6))
    record = tool.draw(request, tmp_path / "out", lambda record: seen.append(record["done"]))
    assert tree_hash(trained.path) == before
    assert seen == [1, 2, 3] and (record["state"], record["total"]) == ("done", 3)
    assert record == drawings.read(tmp_path / "out")
    told = [(image["lora"], image["strength"]) for image in record["images"]]
    assert told == [(None, 0.0), (0, 1.0), (1, 1.0)] and [lora["step"] for lora in record["loras"]] == [2, 6]
    drawn = [pixels(tmp_path / "out" / image["file"]) for image in record["images"]]
    # Step 2 comes from a file of another dtype, whose last bits differ; that it is close is the next test's.
    assert drawn[0] == pixels(trained.samples / "step-000000-0.png")
    assert drawn[2] == pixels(trained.samples / "step-000006-0.png") != drawn[0]
    assert record["negative"] == "fog" and record["guidance"] == 3.0 and record["seed"] == 42
    grid = Image.open(tmp_path / "out" / "grid.png")
    assert grid.width > 3 * 64 and grid.height > 2 * 64


@pytest.mark.parametrize("layout", ["diffusers", "kohya"])
def test_it_draws_what_diffusers_draws(trained, tmp_path, layout, tiny):
    """A file in a plain pipeline of diffusers, at its own scale; the base is not quantized."""
    (file,) = trained.export.glob(f"*_{layout}.safetensors")
    moved = shutil.copy(file, tmp_path / "elsewhere.safetensors")
    given = ("quantize.storage='none'", "model.dtype='fp32'", "dataset.resolution=64", "preview.steps=2")
    overrides = (*given, *tool.make_overrides("a dog", "", seed=5, negative="", guidance=2.0))
    request = tool.Request(
        (moved,), strengths=(0.5, 1.5), with_base=False, model=str(tiny("sd15")), overrides=overrides
    )
    record = tool.draw(request, tmp_path / "out")
    assert [image["strength"] for image in record["images"]] == [0.5, 1.5]
    job = tool.load_job((moved,), str(tiny("sd15")), "", overrides)
    family = make_family(job)
    pipeline = build_clean_pipeline(family, None)
    load(pipeline, moved, family)
    conds = dict(family.encode_in_turn([lambda: family.encode_prompts(["a dog", ""])]))[0]
    prompts = PreviewPrompts([job.preview], [""], conds[:1], conds[1:])
    for image in record["images"]:
        (name,) = pipeline.get_list_adapters()["unet"]
        pipeline.set_adapters(name, image["strength"])
        ((expected,),) = draw_clips(family, pipeline, prompts, 64)
        drawn = Image.open(tmp_path / "out" / image["file"])
        error = torch.tensor(list(drawn.tobytes())).float() - torch.tensor(list(expected.tobytes())).float()
        assert error.abs().max() <= 1, image["strength"]
    assert pixels(tmp_path / "out" / "000.png") != pixels(tmp_path / "out" / "001.png")


def test_a_lora_of_text_encoders_changes_the_prompt(make_job, tmp_path):
    job = make_job(tmp_path, *STRONG, *PREVIEWS, "adapter.text_encoder=true", family="sdxl")
    run = train.run(job, progress=False).run
    record = tool.draw(tool.Request((run.path,), strengths=(0.0, 1.0)), tmp_path / "out")
    drawn = [pixels(tmp_path / "out" / image["file"]) for image in record["images"]]
    assert drawn == [pixels(run.samples / f"step-{step:06d}-0.png") for step in (0, 6)]


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr", "loha"])
@pytest.mark.parametrize("storage", ["fp8", "none"])
def test_an_attached_adapter_computes_what_a_trained_one_does(kind, storage):
    """The authority is the adapter as it is trained; at another strength it is the merged weight."""

    def make() -> nn.Module:
        torch.manual_seed(1)
        model = nn.Sequential()
        model.add_module("linear", nn.Linear(64, 128))
        model.add_module("conv", nn.Conv2d(4, 8, 3, padding=1))
        if storage == "fp8":
            quantize_(model, settings.Quantize(fp8_min_features=1), (), torch.float32)
        return model

    model, plain = make(), make()
    section = settings.Adapter(type=kind, rank=4, alpha=2, dtype="fp32", factor=8 if kind == "lokr" else 0)
    inject(model, section, ["linear", "conv"], seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    tensors = copy_state(model)
    scaling = kinds.compute_scalings(tensors, section)
    for name, x in (("linear", torch.randn(3, 5, 64)), ("conv", torch.randn(2, 4, 6, 6))):
        trained, layer = model.get_submodule(name), plain.get_submodule(name)
        with torch.no_grad():
            base = layer(x)
            with attached(dict(plain.named_modules()), tensors, scaling, 1.0, x.device):
                torch.testing.assert_close(layer(x), trained(x), rtol=1e-4, atol=1e-5)
            with attached(dict(plain.named_modules()), tensors, scaling, 0.5, x.device):
                half = layer(x)
            torch.testing.assert_close(half, (base + trained(x)) / 2, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(layer(x), base, rtol=0, atol=0)
            assert not torch.allclose(base, trained(x), rtol=1e-2)


def test_everything_wrong_is_told_before_a_folder_is_made(trained, tmp_path, tiny):
    def problems(*sources, out=None, **given) -> str:
        with pytest.raises(UserError) as error:
            tool.draw(tool.Request(tuple(sources), **given), out or tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return str(error.value)

    assert "give a run folder" in problems()
    assert "name it with --family" in problems(model=str(tiny("sd15")))
    assert "at most 4" in problems(trained.path, strengths=(9.0,))
    assert "torch finds no GPU" in problems(trained.path, device="cuda") or torch.cuda.is_available()
    assert "accepted: auto, cpu, cuda" in problems(trained.path, device="tpu")
    assert "too many for one drawing" in problems(trained.path, strengths=tuple(i / 500 for i in range(1, 500)))
    assert "with --prompt" in problems(trained.path, overrides=("preview.prompts=[' ']",))
    assert "a drawing has one prompt" in problems(trained.path, overrides=("preview.prompts=['a', 'b']",))
    assert "multiple of 16" in problems(trained.path, overrides=("preview.width=13",))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "photo.png").write_bytes(b"mine")
    assert "1 entry: photo.png" in problems(trained.path, out=tmp_path / "mine")
    assert "not a run folder" in problems(tmp_path / "mine")

    other = next(trained.export.glob("*_diffusers.safetensors"))
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"nothing")
    with pytest.raises(UserErrors) as both:
        tool.draw(tool.Request((trained.path, tmp_path / "absent.safetensors", broken), steps=(3,)), tmp_path / "out")
    assert len(both.value.problems) == 3 and "no such checkpoint" in both.value.problems[0]
    text = problems(other, model=str(tiny("flux")), family="flux", overrides=("preview.prompts=['x']",))
    assert str(other) in text


def test_layers_of_another_size_are_named(trained, tmp_path, tiny):
    file = next(trained.export.glob("*_diffusers.safetensors"))
    tensors, metadata = safetensors_file.read(file)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    tensors[name] = torch.cat([tensors[name]] * 2)
    wide = tmp_path / "wide.safetensors"
    safetensors_file.write_file(wide, tensors, metadata)
    with pytest.raises(UserErrors, match="1 of its layers are missing in this base model or have another size"):
        tool.draw(
            tool.Request((wide,), model=str(tiny("sd15")), overrides=("preview.prompts=['x']",)), tmp_path / "out"
        )


def test_the_command(trained, tmp_path, monkeypatch):
    arguments = ["draw", str(trained.path), "--out", str(tmp_path / "out"), "--prompt", "a dog", "--seed", "3"]
    arguments += ["--strength", "0.5", "--no-base", "--width", "32", "--height", "48", "--device", "cpu", "--json"]
    result = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    record = json.loads(result.stdout)
    assert record["prompt"] == "a dog" and record["seed"] == 3 and record["negative"] == "fog"
    assert Image.open(tmp_path / "out" / "000.png").size == (32, 48) == (record["width"], record["height"])
    assert record["folder"] == str(tmp_path / "out") and record["device"] == "cpu"


def test_a_drawing_is_deleted_without_what_others_put_there(tmp_path):
    folder = tmp_path / "d"
    drawings.create(folder)
    drawings.write(folder, {"state": "done"})
    for name in ("000.png", "grid.png", "notes.txt"):
        (folder / name).write_bytes(b"x")
    (folder / "001.png").symlink_to(tmp_path / "elsewhere")
    assert drawings.is_drawing(folder) and drawings.read(folder) == {"state": "done"}
    assert drawings.remove(folder) == ["001.png", "notes.txt"]
    assert sorted(path.name for path in folder.iterdir()) == ["001.png", "notes.txt"]
    for stranger in (folder, tmp_path):
        with pytest.raises(UserError, match="not a drawing"):
            drawings.remove(stranger)
    whole = tmp_path / "whole"
    drawings.create(whole)
    with pytest.raises(UserError, match="new or empty"):
        drawings.create(whole)
    (tmp_path / "link").symlink_to(whole)
    assert not drawings.is_drawing(tmp_path / "link")
    assert drawings.remove(whole) == [] and not whole.exists()
