"""The proof itself, put to the proof: right files pass in plain diffusers, and each kind of wrong file fails by name.

"Training" here is a plain diffusers model that peft has put a random LoRA on (alpha not equal to rank), so that nothing
of what is tested stands in for what it is compared with.
"""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import diffusers
import miniatures
import numpy as np
import pytest
import torch
from editing import encode, load_encoders, load_probe, shown
from peft import LoraConfig

from lora_fp8 import adapters, families, precision, verify
from lora_fp8.errors import RunFailure
from lora_fp8.lora_files import export, export_metadata, safetensors_file
from lora_fp8.settings import Adapter, Export, Model, Objective, Quantize

NAMES = ("sd15", "sdxl", "flux")
LAYOUTS = ("diffusers", "kohya")
RANK, ALPHA = 4, 6.0
PROMPT = "a photo of a red cat"


def train(denoiser, family, seed=1, num=None):
    """Put a random LoRA on the family's targets, with peft. -> (internal state, scaling)"""
    names = family.choose_adapter_layers(denoiser)[:num]
    settings = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="|".join(map(re.escape, names)), lora_dropout=0.5)
    denoiser.add_adapter(settings)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for path, module in denoiser.named_modules():
        if hasattr(module, "lora_A"):
            for half in "AB":
                weight = getattr(module, f"lora_{half}")["default"].weight
                weight.data = torch.randn(weight.shape, generator=generator) * 0.15
                state[f"{path}.lora_{half}.weight"] = weight.detach().clone()
    assert len(state) == 2 * len(names)
    return state, ALPHA / RANK


def fp8(tensors):
    """Weights as an FP8 base would decode to."""
    return {n: t.to(torch.float8_e4m3fn).float() if t.ndim == 2 else t.float() for n, t in tensors}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Per family: the miniature's folder, the family, a trained denoiser, its LoRA and files, a probe."""
    made = {}

    def get(name):
        if name in made:
            return made[name]
        folder = tmp_path_factory.mktemp(name)
        cls = families.get(name)
        miniatures.save(cls.name, folder / "base", seed=3)
        section = Model(family=name, path=str(folder / "base"), dtype="fp32")
        family = cls(section, device="cpu", dtype=torch.float32)
        denoiser = getattr(verify.build_clean_pipeline(family), family.denoiser_name)
        state, scaling = train(denoiser, family)
        denoiser.train()

        load_encoders(family)
        pixels = (128, 192)
        conds = [
            c | family.make_image_conditioning(pixels, (0, 8), pixels) | shown(family)
            for c in encode(family, [PROMPT, "a dog"])
        ]
        generator = torch.Generator().manual_seed(2)
        shape = family.encode_images(torch.zeros(1, 3, *miniatures.get_hw(family.name))).shape[1:]
        latents = torch.randn(2, *shape, generator=generator)
        batch = SimpleNamespace(
            latents_BCHW=latents,
            noise_BCHW=torch.randn(latents.shape, generator=generator),
            t_generators=[torch.Generator().manual_seed(i) for i in range(2)],
            cond=family.collate(conds),
        )
        objective = family.get_objective_type()(family.read_scheduler_config(), Objective())
        probe = verify.make_probe(family, denoiser, objective, batch, guidance=2.0)
        assert denoiser.training  # put back
        made[name] = SimpleNamespace(
            name=name, folder=folder, family=family, denoiser=denoiser, state=state, scaling=scaling, probe=probe
        )
        made[name].conds = conds
        both = [layout for layout in LAYOUTS if layout in cls.layouts]
        made[name].files = dict(zip(both, files_of(made[name], folder / "export", formats=both), strict=True))
        return made[name]

    return get


def files_of(it, folder, **section):
    facts = export_metadata.ExportFacts(it.name, 10, RANK, ALPHA, 1e-4, 0, (512, 512))
    denoiser_config = dict(it.denoiser.config)
    return export.write(
        export.Adapter(it.state, it.scaling),
        it.family,
        denoiser_config,
        Export(**({"dtype": "fp32", "formats": [*LAYOUTS]} | section)),
        facts,
        folder,
    )


def names_of(report):
    return [check.name for check in report.checks]


def failed_of(report):
    return [check.name for check in report.checks if not check.ok]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_right_file_passes(trained, name, layout):
    it = trained(name)
    report = verify.check(
        it.files[layout], it.family, verify.Reference(export.Adapter(it.state, it.scaling), probe=it.probe)
    )
    assert report.ok, report.format_lines()
    expected = ["file", "metadata", "hash", "pairs", "finite", "trained", "load", "delta", "prediction", "effect"]
    assert names_of(report) == expected
    assert report.measured["delta_error"] < 1e-6
    assert report.measured["prediction_error"] < 1e-5
    # the probe would notice a LoRA that does nothing, and the report says how much this one does
    bare = verify.build_clean_pipeline(it.family)
    answer = verify.predict(it.family, getattr(bare, it.family.denoiser_name), it.probe)
    without = verify.compute_relative_error(answer, it.probe.prediction_BCHW)
    assert without > 0.02 and report.measured["effect"] == pytest.approx(without, rel=1e-3)


REST = {
    name: [layout for layout in families.get(name).layouts if name not in NAMES or layout not in LAYOUTS]
    for name in families.list_families()
}


@pytest.mark.parametrize("name", [name for name in REST if REST[name]])
def test_every_layout_of_every_family_is_exact_in_float32(trained, name, small_controls, tmp_path):
    """With `test_a_right_file_passes` every family in every layout."""
    it = trained(name)
    for file in files_of(it, tmp_path, formats=REST[name]):
        report = verify.check(file, it.family, verify.Reference(export.Adapter(it.state, it.scaling), probe=it.probe))
        assert report.ok, report.format_lines()
        assert report.measured["delta_error"] < 1e-6 and report.measured["prediction_error"] < 1e-5
        assert report.measured["effect"] > 0.01  # the probe would notice


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32], ids=["bf16 adapter", "fp32 adapter"])
def test_bf16_files_of_bf16_training_pass_and_others_fail(trained, name, adapter, tmp_path):
    base = str(trained(name).folder / "base")
    family = families.get(name)(Model(family=name, path=base, dtype="bf16"), device="cpu", dtype=torch.bfloat16)
    denoiser = getattr(verify.build_clean_pipeline(family), family.denoiser_name)
    state, scaling = train(denoiser, family)
    for module in denoiser.modules():
        if hasattr(module, "lora_A"):
            module.lora_A.to(adapter), module.lora_B.to(adapter)
    state = {key: tensor.to(adapter) for key, tensor in state.items()}
    probe = trained(name).probe
    probe = replace(probe, prediction_BCHW=verify.predict(family, denoiser, probe))
    it = SimpleNamespace(name=name, family=family, denoiser=denoiser, state=state, scaling=scaling)
    for file in files_of(it, tmp_path, dtype="bf16"):
        report = verify.check(file, family, verify.Reference(export.Adapter(state, scaling), probe=probe))
        assert report.ok, report.format_lines()
    # a LoRA that is 5 % too strong is found, for all the rounding
    it.scaling *= 1.05
    file = files_of(it, tmp_path, dtype="bf16", formats=["diffusers"])[0]
    assert "delta" in failed_of(
        verify.check(file, family, verify.Reference(export.Adapter(state, scaling), probe=probe))
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_file_of_fp32_training_passes(trained, dtype, tmp_path):
    it = trained("sdxl")
    images = draw(it, it.denoiser)
    previews = verify.Previews(images, lambda pipeline: draw(it, pipeline.unet))
    options = {"adapter": export.Adapter(it.state, it.scaling), "probe": it.probe, "previews": previews}
    for file in files_of(it, tmp_path, dtype=dtype):
        report = verify.check(file, it.family, verify.Reference(**options))
        assert report.ok, report.format_lines()
        assert report.measured["prediction_error"] < 2 * report.measured["prediction_floor"] < 0.02


def test_fp8_training_is_judged_on_the_decoded_base_and_the_rest_is_told(trained):
    it = trained("sd15")
    decoded = fp8(it.family.read_denoiser_tensors())
    denoiser = verify.build_clean_pipeline(it.family, decoded).unet
    train(denoiser, it.family)
    probe = replace(it.probe, prediction_BCHW=verify.predict(it.family, denoiser, it.probe))
    previews = verify.Previews(draw(it, denoiser), lambda pipeline: draw(it, pipeline.unet))
    options = {"adapter": export.Adapter(it.state, it.scaling), "probe": probe, "previews": previews}
    report = verify.check(it.files["kohya"], it.family, verify.Reference(base=decoded, **options))
    assert report.ok, report.format_lines()
    assert names_of(report)[-5:] == ["prediction", "effect", "preview", "plain prediction", "plain preview"]
    assert report.measured["prediction_error"] < 1e-5 and report.measured["preview_psnr"] > 60
    assert report.measured["plain_prediction_error"] > 1e-3
    assert [check.judged for check in report.checks][-2:] == [False, False]
    json.dumps(report.to_json(), allow_nan=False)
    # a stream serves as well as a dict; and on the wrong base the same file is found out
    assert verify.check(it.files["kohya"], it.family, verify.Reference(probe=probe, base=lambda: decoded.items())).ok
    wrong = verify.check(it.files["kohya"], it.family, verify.Reference(probe=probe))
    assert failed_of(wrong) == ["prediction"]
    assert any(line.startswith("FAIL prediction") for line in wrong.format_lines())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_trainers_own_model_passes(trained, tmp_path, name, dtype):
    """The rooms together: FP8 layers and adapters as training holds them, against diffusers on the decoded base."""
    section = Model(family=name, path=str(trained(name).folder / "base"), dtype="fp32")
    family = families.get(name)(section, device="cpu", dtype=dtype)
    denoiser = family.make_empty_denoiser()
    precision.quantize_(denoiser, Quantize(storage="fp8"), family.keep_precise, dtype, family.modulation)
    precision.fill_(denoiser, family.read_denoiser_tensors(), dtype=dtype, device="cpu")
    adapters.inject(denoiser, Adapter(rank=4, alpha=6), family.choose_adapter_layers(denoiser), seed=0)
    generator = torch.Generator().manual_seed(4)
    for key, parameter in adapters.list_trained_parameters(denoiser):
        if "lora_B" in key:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.2).to(parameter.dtype)
    state, scaling = adapters.copy_state(denoiser), adapters.read_scalings(denoiser)
    probe = trained(name).probe
    probe = replace(probe, prediction_BCHW=verify.predict(family, denoiser, probe))
    it = SimpleNamespace(name=name, family=family, denoiser=denoiser, state=state, scaling=scaling)
    images = draw(trained(name), denoiser, family)
    previews = verify.Previews(images, lambda p: draw(trained(name), getattr(p, family.denoiser_name), family))
    kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    for file in files_of(it, tmp_path, dtype=kind):
        options = {"adapter": export.Adapter(state, scaling), "probe": probe, "previews": previews}
        report = verify.check(
            file, family, verify.Reference(base=lambda: precision.dequantize_tensors(denoiser), **options)
        )
        assert report.ok, report.format_lines()
        assert report.measured["plain_prediction_error"] > report.measured["prediction_error"]
        assert report.measured["effect"] > 0.02


def test_other_previews_are_found(trained):
    it = trained("sd15")
    bare = draw(it, verify.build_clean_pipeline(it.family).unet)
    previews = verify.Previews(bare, lambda pipeline: draw(it, pipeline.unet))
    report = verify.check(it.files["kohya"], it.family, verify.Reference(previews=previews))
    assert failed_of(report) == ["preview"], report.format_lines()


def draw(it, denoiser, family=None):
    family = family or it.family
    pipeline = family.make_pipeline(denoiser)
    denoiser.eval()
    height, width = 32, 48
    return pipeline(
        **family.make_pipeline_inputs(it.conds[0], it.conds[1]),
        num_inference_steps=2,
        guidance_scale=3.0,
        height=height,
        width=width,
        generator=torch.Generator().manual_seed(5),
    ).images


# -- a program that knows nothing of lora_fp8

PLAIN = """
import json, sys, torch, diffusers, numpy as np
torch.set_num_threads(1)
for job in json.loads(sys.argv[1]):
    pipe = getattr(diffusers, job["pipeline"]).from_pretrained(job["base"], local_files_only=True, **job["options"])
    pipe.set_progress_bar_config(disable=True)
    draw = lambda: pipe(job["prompt"], num_inference_steps=2, guidance_scale=3.0, height=32, width=48, output_type="np",
                        generator=torch.Generator().manual_seed(9)).images[0]
    before = draw()
    pipe.load_lora_weights(job["folder"], weight_name=job["file"])
    np.savez(job["out"], before=before, after=draw())
assert not any(name.split(".")[0] == "lora_fp8" for name in sys.modules)
"""


def test_plain_diffusers_draws_the_same_picture(trained, tmp_path):
    jobs, expected = [], {}
    for name in NAMES:
        it = trained(name)
        cls = getattr(diffusers, it.family.pipeline_class)
        options = {"safety_checker": None} if name == "sd15" else {}
        pipeline = cls.from_pretrained(it.folder / "base", local_files_only=True, **options)
        pipeline.register_modules(**{it.family.denoiser_name: it.denoiser.eval()})
        pipeline.set_progress_bar_config(disable=True)
        picture = pipeline(
            PROMPT,
            num_inference_steps=2,
            guidance_scale=3.0,
            height=32,
            width=48,
            output_type="np",
            generator=torch.Generator().manual_seed(9),
        ).images[0]
        for layout, file in it.files.items():
            if name == "flux" and layout == "kohya":
                continue  # diffusers knows one width of FLUX in that layout; at that width test_export shows it
            out = str(tmp_path / f"{name}_{layout}.npz")
            expected[out] = picture
            job = {"pipeline": it.family.pipeline_class, "base": str(it.folder / "base"), "options": options}
            jobs.append(job | {"folder": str(file.parent), "file": file.name, "prompt": PROMPT, "out": out})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # run from a folder without this repository, in isolation from the caller's PYTHONPATH
    subprocess.run([sys.executable, "-I", "-c", PLAIN, json.dumps(jobs)], check=True, env=environment, cwd=tmp_path)
    assert len(jobs) == 5
    for out, picture in expected.items():
        found = np.load(out)
        np.testing.assert_allclose(found["after"], picture, atol=1e-4)
        assert np.abs(found["before"] - picture).max() > 0.01


# -- wrong files


def rewrite(it, layout, path, change, **metadata):
    """The file again with other tensors, right hashes and all."""
    tensors, told = safetensors_file.read(it.files[layout])
    change(tensors)
    safetensors_file.write_file(path, tensors, told | metadata, hashes=True)
    return verify.check(path, it.family, verify.Reference(export.Adapter(it.state, it.scaling), probe=it.probe))


def first(tensors, end):
    return next(name for name in sorted(tensors) if name.endswith(end))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrong_tensors_fail_by_name(trained, tmp_path, layout):
    it = trained("sd15")
    down, up = {"diffusers": ("lora_A.weight", "lora_B.weight"), "kohya": ("lora_down.weight", "lora_up.weight")}[
        layout
    ]
    path = tmp_path / "x.safetensors"

    def orphan(tensors):
        del tensors[first(tensors, up)]

    def wrong_rank(tensors):
        tensors[first(tensors, down)] = tensors[first(tensors, down)][:-1].clone()

    def nan(tensors):
        tensors[first(tensors, up)][0, 0] = math.nan

    def zero(tensors):
        for name in [name for name in tensors if name.endswith(up)]:
            tensors[name].zero_()

    def stranger(tensors):
        stem = first(tensors, down).removesuffix("." + down)
        for name in [name for name in tensors if name.startswith(stem + ".")]:
            tensors[name.replace(stem, stem.replace("blocks", "blacks"))] = tensors.pop(name)

    def halved(tensors):
        tensors[first(tensors, up)] *= 0.5

    def lost(tensors):
        stem = first(tensors, down).removesuffix("." + down)
        for name in [name for name in tensors if name.startswith(stem + ".")]:
            del tensors[name]

    assert rewrite(it, layout, path, lambda tensors: None).ok
    for change, failing in [
        (orphan, ["pairs"]),
        (wrong_rank, ["pairs"]),
        (nan, ["finite"]),
        (zero, ["trained"]),
        (stranger, ["load"]),
        (halved, ["delta", "prediction"]),
        (lost, ["delta", "prediction"]),
    ]:
        report = rewrite(it, layout, path, change)
        assert failed_of(report) == failing, (change.__name__, report.format_lines())


def test_a_wrong_alpha_is_found(trained, tmp_path):
    it = trained("sdxl")

    def forget(tensors):
        for name in [name for name in tensors if name.endswith(".alpha")]:
            tensors[name].fill_(RANK)

    assert failed_of(rewrite(it, "kohya", tmp_path / "x.safetensors", forget)) == ["delta", "prediction"]


def test_wrong_bytes_and_headers_fail_by_name(trained, tmp_path):
    it = trained("sd15")
    raw = it.files["diffusers"].read_bytes()
    flipped = bytearray(raw)
    flipped[-2] ^= 1  # a bit of one weight: all else is right
    for name, content, failing in [
        ("flipped", bytes(flipped), ["hash"]),
        ("truncated", raw[:-8], ["file"]),
        ("empty", b"", ["file"]),
    ]:
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        assert failed_of(verify.check(path, it.family, verify.Reference(probe=it.probe))) == failing, name
    length = int.from_bytes(raw[:8], "little")
    (tmp_path / "odd.safetensors").write_bytes(
        (length + 1).to_bytes(8, "little") + raw[8 : 8 + length] + b" " + raw[8 + length :]
    )
    odd = verify.check(tmp_path / "odd.safetensors", it.family)
    assert (
        failed_of(odd) == ["file"]
        and f"its data begins at {9 + length}, not at a multiple of 8" in odd.list_failures()[0]
    )
    report = verify.check(tmp_path / "missing.safetensors", it.family)
    assert failed_of(report) == ["file"] and "No such file" in report.list_failures()[0]
    report = rewrite(it, "diffusers", tmp_path / "x.safetensors", lambda t: None, **{"modelspec.resolution": "512"})
    assert failed_of(report) == ["metadata"]


def test_a_lora_of_another_architecture_does_not_load(trained):
    report = verify.check(trained("sdxl").files["diffusers"], trained("sd15").family)
    assert failed_of(report) == ["load"]
    assert failed_of(verify.check(trained("flux").files["diffusers"], trained("sd15").family)) == ["file"]


@pytest.mark.parametrize(("name", "layout"), [("wan", "kohya"), ("hunyuan_video", "comfy")])
def test_some_of_the_layers_are_renamed_where_diffusers_wants_others_beside_them(tmp_path, name, layout):
    miniatures.save(name, tmp_path / "base")
    section = Model(family=name, path=str(tmp_path / "base"), dtype="fp32")
    family = families.get(name)(section, device="cpu", dtype=torch.float32)
    denoiser = getattr(verify.build_clean_pipeline(family), family.denoiser_name)
    state, scaling = train(denoiser, family, num=9)
    state = {key: value for key, value in state.items() if "to_out.0" in key}
    it = SimpleNamespace(name=name, family=family, denoiser=denoiser, state=state, scaling=scaling)
    (file,) = files_of(it, tmp_path / "export", formats=[layout])
    report = verify.check(file, family)
    assert not report.list_failures()
    (load,) = [check for check in report.checks if check.name == "load"]
    assert "after renaming" in load.detail and family.title in load.detail


def test_what_diffusers_warns_of_is_a_failure_however_quiet_it_is_set(trained, monkeypatch):
    it = trained("sd15")
    original = diffusers.StableDiffusionPipeline.load_lora_weights

    def load(pipeline, *args, **kwargs):
        original(pipeline, *args, **kwargs)
        diffusers.utils.logging.get_logger("diffusers.loaders.peft").warning("led to unexpected keys: x")

    monkeypatch.setattr(diffusers.StableDiffusionPipeline, "load_lora_weights", load)
    before = diffusers.utils.logging.get_verbosity()
    diffusers.utils.logging.set_verbosity_error()
    try:
        report = verify.check(it.files["kohya"], it.family)
        assert failed_of(report) == ["load"] and "unexpected keys: x" in report.list_failures()[0]
        assert diffusers.utils.logging.get_verbosity() == diffusers.utils.logging.ERROR  # as it was
    finally:
        diffusers.utils.logging.set_verbosity(before)


def test_partly_trained_fused_layers_pass(trained, tmp_path):
    """Only q and v of FLUX: the fused layer's k is zeros, and comes back from the file as no adapter."""
    it = trained("flux")
    state = {key: tensor for key, tensor in it.state.items() if re.search(r"\.attn\.to_[qv]\.", key)}
    partly = SimpleNamespace(**{**vars(it), "state": state})
    for file in files_of(partly, tmp_path):
        report = verify.check(file, it.family, verify.Reference(export.Adapter(state, it.scaling)))
        assert report.ok and report.measured["delta_error"] < 1e-6, report.format_lines()


# -- parts


def test_probe_survives_the_disk(trained, tmp_path):
    probe = trained("sdxl").probe
    verify.save_probe(probe, tmp_path / "probe.safetensors")
    back = load_probe(tmp_path / "probe.safetensors")
    assert back.guidance == probe.guidance and back.cond.keys() == probe.cond.keys() and "time_ids" in back.cond
    for name in ("noisy_BCHW", "t_B", "prediction_BCHW"):
        one, two = getattr(probe, name), getattr(back, name)
        assert one.dtype == two.dtype and torch.equal(one, two)


def test_probe_is_asked_with_dropout_off(trained):
    it = trained("flux")
    assert torch.equal(verify.predict(it.family, it.denoiser.train(), it.probe), it.probe.prediction_BCHW)
    assert it.denoiser.training


def test_delta_error_is_that_of_the_whole_matrices():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 40, generator=generator), torch.randn(30, 4, generator=generator)
    c, d = torch.randn(6, 40, generator=generator), torch.randn(30, 6, generator=generator)
    whole = ((d @ c * 2 - b @ a * 0.5).norm() / (b @ a * 0.5).norm()).item()
    assert verify.compute_delta_error((c, d, 2.0), (a, b, 0.5)) == pytest.approx(whole, rel=1e-5)
    assert verify.compute_delta_error((a, b * 2, 0.25), (a, b, 0.5)) < 1e-7
    assert verify.compute_delta_error((a, b * 1.001, 0.5), (a, b, 0.5)) == pytest.approx(1e-3, rel=1e-2)


def test_psnr():
    picture = np.full((4, 6, 3), 100, np.uint8)
    assert verify.compute_psnr(picture, picture) == math.inf
    assert verify.compute_psnr(picture, picture + 1) == pytest.approx(20 * math.log10(255))
    with pytest.raises(ValueError, match="cannot be compared"):
        verify.compute_psnr(picture, picture.transpose(1, 0, 2))


def test_a_base_that_is_not_whole_is_an_error(trained):
    family = trained("sd15").family
    tensors = dict(family.read_denoiser_tensors())
    tensors.pop("conv_in.weight")
    with pytest.raises(RunFailure, match="conv_in.weight"):
        verify.build_clean_pipeline(family, tensors)


# -- merging into an FP8 base


def test_what_merging_into_fp8_leaves_is_what_torchs_rounding_leaves():
    """Against torch's own cast: a large change is kept, one far below a step of the grid is noise, none is none."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 96, generator=generator) * 0.02
    delta = torch.randn(64, 96, generator=generator)

    def cast(x, scale):
        return (x / scale).to(torch.float8_e4m3fn).float() * scale

    def cosine(x, y):
        return float(torch.nn.functional.cosine_similarity(x.flatten().double(), y.flatten().double(), dim=0))

    unscaled = precision.Format("fp8", "none")
    for size in (1e-4, 1e-3, 1e-2):
        wanted = delta * size
        found = verify.measure_survival(weight, wanted, unscaled)
        assert found == pytest.approx(cosine(cast(weight + wanted, 1) - cast(weight, 1), wanted), abs=1e-6)
        rows = [x.abs().amax(1, keepdim=True) / 448 for x in (weight + wanted, weight)]
        change = cast(weight + wanted, rows[0]) - cast(weight, rows[1])
        # ours takes the better of two scales for each row
        assert verify.measure_survival(weight, wanted, precision.FP8_ROW) == pytest.approx(
            cosine(change, wanted), abs=0.05
        )
    assert (
        verify.measure_survival(weight, delta * 1e-2, unscaled)
        > 0.99
        > 0.5
        > verify.measure_survival(weight, delta * 1e-4, unscaled)
    )
    assert verify.measure_survival(weight, delta * 0, unscaled) == 0.0


def test_the_verify_command_tells_what_merging_would_leave(trained, tmp_path):
    it = trained("flux")
    base = str(it.folder / "base")
    report = verify.check_file(it.files["kohya"], base)
    assert report.ok and [c.judged for c in report.checks if c.name.startswith("merged")] == [False, False]
    assert report.measured["merged_row-scaled"] > 0.9  # as strong as this one is
    state = {key: tensor * (1e-4 if "lora_B" in key else 1) for key, tensor in it.state.items()}
    weak = SimpleNamespace(name="weak", family=it.family, denoiser=it.denoiser, state=state, scaling=it.scaling)
    (file,) = files_of(weak, tmp_path, formats=["comfy"])
    told = [line for line in verify.check_file(file, base).format_lines() if "merged" in line]
    assert len(told) == 2 and all("do not merge, load the LoRA file instead" in line for line in told)
