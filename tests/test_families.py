"""The contract that every file in families/ keeps, judged against diffusers' own pipelines; and loading from anywhere.

Parametrised over `families.list_families()`: a new family is tested without touching this file. The tests that bite
compare with the real diffusers pipeline, on latents that are not square. Single-file checkpoints are made here by
writing the miniatures in the original layouts; diffusers' converters are the authority for reading them back.
"""

import functools
import hashlib
import inspect
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import diffusers
import miniatures
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from editing import encode, image, load_encoders, processor, shown, shown_to_pipeline
from graph_emulation import Graph, graph
from original_code import bfl_tensors, ldm_names, ldm_vae, open_clip
from safetensors.torch import load_file, save_file

from lora_fp8 import config, families, precision
from lora_fp8.common import stamps
from lora_fp8.config import find_unused_settings
from lora_fp8.errors import RunFailure, UserError
from lora_fp8.families import _checks, _files, base
from lora_fp8.families._facts import Facts
from lora_fp8.objectives import FlowMatching
from lora_fp8.precision import name_matches
from lora_fp8.settings import Model, Objective, Preview, Quantize
from lora_fp8.stages import previews
from lora_fp8.stages.cache import PreviewPrompts
from lora_fp8.training import cuda_graphs

pytestmark = pytest.mark.usefixtures("small_controls")

PROMPTS = ["a photo of a cat", "Zwölf red dogs, and the blue one is rather longer than the other prompt of this batch"]
ORIGINAL_HW, CROP_TOP_LEFT = (40, 56), (4, 6)


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=families.list_families())
def Family(request):
    return families.get(request.param)


@pytest.fixture(scope="session")
def folder(Family, tiny):
    return tiny(Family.name)


STORED = ("sd15", "flux", "anima", "hidream", "qwen_image_edit")
"""How files are found and read is one code for all families, and asked of a few: one text encoder and several, a UNet
and transformers, two tokenizers for one encoder, a processor, parts beside those of the pipeline."""


@pytest.fixture(scope="session", params=STORED)
def Stored(request):
    return families.get(request.param)


@pytest.fixture(scope="session")
def stored(Stored, tiny):
    """The folder of a miniature. Not to be changed."""
    return tiny(Stored.name)


def make(Family, path, dtype=torch.float32, **settings):
    model = Model(family=Family.name, path=str(path), **settings)
    return Family(model, device="cpu", dtype=dtype)


def load_denoiser(family, storage="none"):
    denoiser = family.make_empty_denoiser()
    precision.quantize_(denoiser, Quantize(storage=storage), family.keep_precise, family.dtype, family.modulation)
    precision.fill_(denoiser, family.read_denoiser_tensors(), family.dtype, "cpu")
    return denoiser.eval()


@pytest.fixture(scope="session")
def family(Family, folder):
    family = make(Family, folder)
    load_encoders(family)
    return family


@pytest.fixture(scope="session")
def denoiser(family):
    return load_denoiser(family)


@pytest.fixture(scope="session")
def pipeline(Family, folder):
    """diffusers' own pipeline of the same miniature, loaded by diffusers."""
    pipeline = Family.get_pipeline_type().from_pretrained(folder, local_files_only=True, **processor(Family, folder))
    pipeline.set_progress_bar_config(disable=True)
    Family.mend_(pipeline)
    return pipeline


def conditioning(family, prompts=PROMPTS):
    facts = family.make_image_conditioning(ORIGINAL_HW, CROP_TOP_LEFT, miniatures.get_hw(family.name)) | shown(family)
    return family.collate([{**cond, **facts} for cond in encode(family, prompts)])


def some_pixels(family, num=2):
    return torch.rand(num, 3, *miniatures.get_hw(family.name), generator=torch.Generator().manual_seed(0)) * 2 - 1


def some_latents(family, num=2):
    shape = family.encode_images(torch.zeros(1, 3, *miniatures.get_hw(family.name))).shape[1:]
    return torch.randn(num, *shape, generator=torch.Generator().manual_seed(0))


def called(family, *, told_sizes=True, **options):
    """The options that this pipeline's call knows, and those that this family always gives."""
    accepted = inspect.signature(family.get_pipeline_type().__call__).parameters
    height, width = miniatures.get_hw(family.name)
    sizes = {"original_size": ORIGINAL_HW, "crops_coords_top_left": CROP_TOP_LEFT, "target_size": (height, width)}
    facts = sizes if told_sizes else {}
    facts["max_sequence_length"] = getattr(family, "max_sequence_length", None)
    facts = {name: value for name, value in facts.items() if name in accepted and value is not None}
    return {**facts, **image(family), **family.make_size_inputs(width, height), **family.call_options, **options}


def seq_len(family):
    return family.count_image_tokens(tuple(some_latents(family).shape[-2:]))


def some_t(family, num=2):
    objective = family.get_objective_type()(family.read_scheduler_config(), Objective())
    return objective.sample_t([torch.Generator().manual_seed(i) for i in range(num)], seq_len(family))


# -- the contract ----------------------------------------------------------------------------------------------------


def test_the_facts_are_stated(Family, denoiser):
    assert Family.__mro__[1] is base.ModelFamily  # depth of inheritance exactly one
    assert getattr(diffusers, Family.denoiser_class) is type(denoiser)
    height, width = miniatures.get_hw(Family.name)
    assert height != width
    assert set(Family.layouts) <= {"comfy", "diffusers", "kohya"} and "diffusers" in Family.layouts
    assert Family.bucket_step % Family.bucket_multiple == 0 and Family.native_resolution % Family.bucket_step == 0
    assert bool(Family.kohya_naming) == ("kohya" in Family.layouts)
    assert Family.modelspec_architecture and Family.kohya_base_version and Family.title
    names = [name for name, _ in denoiser.named_modules()]
    for entry in (*Family.keep_precise, *Family.modulation, *Family.adapter_exclude):
        assert any(precision.name_matches(name, entry) for name in names), f"{entry} matches nothing"


def test_miniature_is_random_small_and_repeatable(Family, folder, tmp_path):
    state = torch.get_rng_state()
    miniatures.save(Family.name, tmp_path)
    assert torch.equal(torch.get_rng_state(), state), "saving must leave the caller's random numbers alone"
    weights = f"{Family.denoiser_name}/diffusion_pytorch_model.safetensors"
    assert (tmp_path / weights).read_bytes() == (folder / weights).read_bytes()
    assert sum(p.stat().st_size for p in tmp_path.rglob("*")) < 10e6


def test_linears_of_the_miniature_fit_fp8_kernels(Family, denoiser):
    linears = {name: module for name, module in denoiser.named_modules() if isinstance(module, torch.nn.Linear)}
    held = [n for n in linears if not any(precision.name_matches(n, entry) for entry in Family.keep_precise)]
    sides = [side for name in held for side in linears[name].weight.shape]
    assert sides and all(side % 16 == 0 for side in sides)


def test_streamed_weights_are_the_files(Family, family, denoiser, pipeline):
    reference = getattr(pipeline, Family.denoiser_name).state_dict()
    loaded = denoiser.state_dict()
    assert loaded.keys() == reference.keys()
    assert all(torch.equal(loaded[name], reference[name]) for name in reference)
    assert not any(p.is_meta for p in denoiser.parameters())


def test_every_prompt_has_conditioning_of_its_own(Family, family):
    conds = encode(family, PROMPTS)
    assert len(conds) == len(PROMPTS) and conds[0].keys() == conds[1].keys()
    one, two = (cond["prompt_embeds"] for cond in conds)
    assert one.shape != two.shape or not torch.equal(one, two)
    for cond, prompt in zip(conds, PROMPTS, strict=True):  # whatever else is encoded beside it
        (alone,) = encode(family, [prompt])
        for name, tensor in cond.items():
            torch.testing.assert_close(tensor, alone[name], rtol=1e-4, atol=1e-5)


LONG = "a photo of the red dog and the blue cat, " * 100 + "seen from above"


def test_what_is_cut_from_a_long_prompt_is_what_the_encoders_do_not_read(Family, folder, family):
    """Judged by the encoders: another end in place of the lost one changes nothing, another word before it does."""
    fresh = make(Family, folder)
    (cut,) = fresh.find_overlong([PROMPTS[0], LONG])
    assert fresh._text_pipeline is None, "tokenizers are enough"
    assert cut.prompt == LONG and LONG.endswith(cut.lost) and cut.num_lost > 100
    kept = LONG.removesuffix(cut.lost)
    assert fresh.find_overlong([kept, ""]) == [] and fresh.find_overlong([]) == []
    word = cut.lost.split()[0]
    (again,) = fresh.find_overlong([f"{kept} {word}"])
    assert again.lost.strip() == word and again.num_lost <= len(word) and again.limit == cut.limit
    other = " " * cut.lost.startswith(" ") + "z " * 100
    texts = LONG, kept + other, kept.rsplit(maxsplit=1)[0] + " z" + cut.lost
    whole, alike, changed = (encode(family, [text])[0]["prompt_embeds"] for text in texts)
    assert torch.equal(whole, alike)
    assert changed.shape != whole.shape or not torch.equal(whole, changed)


def test_flux_reads_as_many_tokens_as_the_model_was_trained_with(tmp_path):
    """512 for dev, 256 for schnell (model cards); a tokenizer that says less wins."""
    Flux = families.get("flux")
    miniatures.save(Flux.name, tmp_path)
    assert make(Flux, tmp_path).max_sequence_length == 32
    settings = tmp_path / "tokenizer_2" / "tokenizer_config.json"
    edit = json.loads(settings.read_text(encoding="utf-8")) | {"model_max_length": 512}
    settings.write_text(json.dumps(edit), encoding="utf-8")
    assert make(Flux, tmp_path).max_sequence_length == 512
    path = tmp_path / "transformer" / "config.json"
    schnell = json.loads(path.read_text(encoding="utf-8")) | {"guidance_embeds": False}
    path.write_text(json.dumps(schnell), encoding="utf-8")
    assert make(Flux, tmp_path).max_sequence_length == 256


def test_conditioning_in_bf16_is_the_pipelines_and_can_be_stored(Family, folder, tmp_path):
    family = make(Family, folder, dtype=torch.bfloat16)
    load_encoders(family)
    pipeline = Family.get_pipeline_type().from_pretrained(folder, dtype=torch.bfloat16, **processor(Family, folder))
    encoders = [name for name in Family.text_parts if "tokenizer" not in name and "processor" not in name]
    assert encoders
    for name in encoders:
        theirs, mine = getattr(pipeline, name), getattr(family.text_pipeline, name)
        assert [p.dtype for p in mine.parameters()] == [p.dtype for p in theirs.parameters()]
        assert all(torch.equal(*pair) for pair in zip(mine.parameters(), theirs.parameters(), strict=True))
    cond = encode(family, PROMPTS)[1]
    assert all(tensor.dtype == torch.bfloat16 for tensor in cond.values() if tensor.is_floating_point())
    assert all(tensor._base is None and tensor.is_contiguous() for tensor in cond.values())
    save_file(cond, tmp_path / "cond.safetensors")
    assert all(torch.equal(t, cond[k]) for k, t in load_file(tmp_path / "cond.safetensors").items())


def test_sdxl_is_told_sizes_exactly(tmp_path):
    """bf16 would make 668 of 667."""
    sdxl, told = families.get("sdxl"), {}
    miniatures.save(sdxl.name, tmp_path)
    sizes = torch.tensor([[667.0, 401.0, 3.0, 259.0, 512.0, 768.0]])
    cond = {"prompt_embeds": torch.zeros(1, 2, 80), "text_embeds": torch.zeros(1, 32), "time_ids": sizes}

    def denoiser(**inputs):
        told.update(inputs)
        return (inputs["sample"],)

    make(sdxl, tmp_path, torch.bfloat16).predict(denoiser, torch.zeros(1, 4, 2, 4), torch.tensor([7]), cond)
    assert torch.equal(told["added_cond_kwargs"]["time_ids"], sizes)
    assert told["sample"].dtype == told["encoder_hidden_states"].dtype == torch.bfloat16


def test_images_are_encoded_as_diffusers_does(Family, family, pipeline, monkeypatch):
    """Where diffusers has image-to-image code for the model, the latents are its latents."""
    pixels = some_pixels(family)
    latents = family.encode_images(pixels)
    assert latents.ndim == 4 and latents.dtype == torch.float32 and latents.isfinite().all()
    assert latents.shape[-2] != latents.shape[-1]
    # diffusers samples the posterior; its mode is asked for here.
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())
    name = Family.pipeline_class.replace("Pipeline", "InpaintPipeline")
    inpainting = getattr(diffusers, name, None)
    encode = getattr(type(pipeline), "_encode_vae_image", None) or getattr(inpainting, "_encode_vae_image", None)
    if encode:
        given = pixels[:, :, None] if next(family.vae.encoder.parameters()).ndim == 5 else pixels
        with torch.no_grad():
            theirs = encode(pipeline, given, generator=None)
        torch.testing.assert_close(latents, theirs.reshape(latents.shape), rtol=1e-5, atol=1e-6)
    else:
        known = ("sd15", "sdxl", "sd3", "flux", "flux2", "flux2_klein", "qwen_image")
        assert Family.name not in known, f"diffusers has no {name} any more"


def test_latents_go_to_the_vae_as_in_the_pipeline(Family, family, pipeline, monkeypatch):
    """What the pipeline's scheduler ends with, unpacked and decoded here, is the picture that the pipeline draws."""
    ends = []  # and not its output "latent", which some pipelines have made ready for the VAE
    step = type(pipeline.scheduler).step

    def record(*args, **kwargs):
        result = step(*args, **kwargs)
        ends.append(result[0].clone())
        return result

    monkeypatch.setattr(type(pipeline.scheduler), "step", record)
    options = called(family, num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="pt")
    output = pipeline(prompt=PROMPTS[0], **options, **family.make_guidance_inputs(1.0))
    picture = torch.as_tensor(output[0]).float().reshape(1, 3, *miniatures.get_hw(Family.name))
    latents = family.unpack(ends[-1], tuple(some_latents(family).shape[-2:]))
    assert latents.shape == some_latents(family, 1).shape
    pixels = family.decode_latents(latents)
    torch.testing.assert_close((pixels / 2 + 0.5).clamp(0, 1), picture, rtol=1e-4, atol=1e-5)
    assert torch.equal(family.unpack(family.pack(latents), tuple(latents.shape[-2:])), latents)


def test_encoding_is_the_inverse_of_decoding(family):
    """Both normalise in opposite ways, so that what the VAE does to a picture is all that happens to it."""
    pixels = some_pixels(family)
    decoded = family.decode_latents(family.encode_images(pixels))
    frames = pixels
    if next(family.vae.encoder.parameters()).ndim == 5:
        frames = pixels[:, :, None]
    with torch.no_grad():
        encoded = family.vae.encode(frames)
        raw = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
        plain = family.vae.decode(raw).sample.reshape(decoded.shape)
    torch.testing.assert_close(decoded, plain, rtol=1e-4, atol=1e-4)


def test_prediction_has_the_shape_of_the_latents(family, denoiser):
    with torch.no_grad():
        noisy = some_latents(family)
        prediction = family.predict(denoiser, noisy, some_t(family), conditioning(family))
    assert prediction.shape == noisy.shape and prediction.isfinite().all()


def test_a_batch_is_its_samples(family, denoiser):
    noisy, t = some_latents(family), some_t(family)
    with torch.no_grad():
        both = family.predict(denoiser, noisy, t, conditioning(family))
        for i, prompt in enumerate(PROMPTS):
            alone = family.predict(denoiser, noisy[i : i + 1], t[i : i + 1], conditioning(family, [prompt]))
            torch.testing.assert_close(both[i : i + 1], alone, rtol=1e-4, atol=1e-5)


def test_which_denoisers_a_cuda_graph_can_hold(family, denoiser, monkeypatch):
    """In an emulation, which knows what reads a value, and not what copies a tensor to the GPU."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    recorder, t, cond = cuda_graphs.Recorder(), some_t(family, 1), conditioning(family, PROMPTS[:1])

    def run(given):
        inputs, noisy = given
        return family.predict_prepared(denoiser, inputs, noisy)

    with torch.no_grad():
        for number in (1, 2, 3):
            noisy = some_latents(family, 1) * number
            inputs = family.prepare(denoiser, noisy, t, cond, 1.0)
            if number > 1 and not family.is_recordable:
                with pytest.raises(RunFailure, match="not permitted when stream is capturing"):
                    recorder.run(run, (inputs, noisy))
                return
            answer = recorder.run(run, (inputs, noisy))
            assert torch.equal(answer, family.predict(denoiser, noisy, t, cond, 1.0))
    assert recorder.count == 1


def test_gradient_checkpointing_changes_nothing(family, denoiser):
    """Prompts of two lengths: a mask that is forgotten where the blocks run a second time would show."""
    cond, t = conditioning(family), some_t(family)

    def answer():
        noisy = some_latents(family).requires_grad_()
        prediction = family.predict(denoiser, noisy, t, cond)
        return prediction.detach(), *torch.autograd.grad(prediction.square().sum(), noisy)

    plain = answer()
    denoiser.enable_gradient_checkpointing()
    try:
        again = answer()
    finally:
        denoiser.disable_gradient_checkpointing()
    assert torch.equal(plain[0], again[0])
    torch.testing.assert_close(plain[1], again[1], rtol=1e-5, atol=1e-7)
    assert plain[1].isfinite().all()


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1], PROMPTS[1:]], ids=["both", "short", "long"])
def test_denoiser_answers_as_inside_the_diffusers_pipeline(Family, family, denoiser, pipeline, monkeypatch, prompts):
    """Steps of the real pipeline are recorded and asked again through `predict`: prompts, timestep, ids, sizes."""
    seen = []  # what the denoiser was given and what came of it, as the scheduler sees both
    flow = Family.objective == "FlowMatching"
    guidance = 1.0 if Family.uses_negative or Family.default_guidance == 1.0 else 2.5

    def record_call(module, args, kwargs, output):
        seen.append((args[0] if args else kwargs["hidden_states"], output[0]))

    step = type(pipeline.scheduler).step

    def record_step(self, model_output, timestep, sample, *args, **kwargs):
        seen.append((sample.clone(), model_output.clone()))
        return step(self, model_output, timestep, sample, *args, **kwargs)

    handle = None
    if flow:
        monkeypatch.setattr(type(pipeline.scheduler), "step", record_step)
    else:  # some diffusion samplers scale what they keep before the denoiser sees it
        handle = getattr(pipeline, Family.denoiser_name).register_forward_hook(record_call, with_kwargs=True)
    options = called(family, num_inference_steps=4, generator=torch.Generator().manual_seed(0), output_type="latent")
    # Pipelines whose prompts see the pictures take one prompt at a time; some write into the list.
    calls = [[prompt] for prompt in prompts] if Family.prompts_see_controls else [list(prompts)]
    try:
        for call in calls:
            options["generator"].manual_seed(0)
            pipeline(prompt=call, **options, **family.make_guidance_inputs(guidance))
    finally:
        if handle:
            handle.remove()
    assert len(seen) == 4 * len(calls)
    if len(calls) > 1:
        seen = [tuple(map(torch.cat, zip(*seen[step::4], strict=True))) for step in range(4)]

    hw = tuple(some_latents(family).shape[-2:])
    others = conditioning(family, [text[::-1] for text in prompts])
    for index in (1, 3):
        noisy, expected = (family.unpack(x, hw) if flow else x for x in seen[index])
        assert noisy.shape == some_latents(family, len(prompts)).shape
        if flow:  # as the denoiser was told: multistep solvers round their timesteps to whole numbers
            told = pipeline.scheduler.timesteps[index] / pipeline.scheduler.config.num_train_timesteps
            t_B = told.float().expand(len(prompts))
        else:
            t_B = pipeline.scheduler.timesteps[index].long().expand(len(prompts))
            assert t_B[0] == pipeline.scheduler.timesteps[index]
        with torch.no_grad():
            answer = family.predict(denoiser, noisy, t_B, conditioning(family, prompts), guidance=guidance)
            other = family.predict(denoiser, noisy, t_B, others, guidance=guidance)
        if flow:  # the pipeline's sigma goes through * 1000 / 1000
            torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-5)
        else:
            assert torch.equal(answer, expected)
        assert (other - answer).norm() > 1e-3 * answer.norm(), "this miniature is deaf to prompts, and proves nothing"


def test_objective_is_the_pipelines_scheduler(Family, family, pipeline):
    """With the true target as the model's answer, the scheduler that the model ships must find the image again."""
    objective = family.get_objective_type()(family.read_scheduler_config(), Objective())
    x0 = some_latents(family)
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(1))
    scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
    flow = Family.objective == "FlowMatching"
    dynamic = scheduler.config.get("use_dynamic_shifting", False)
    scheduler.set_timesteps(10, **({"mu": objective.compute_mu(seq_len(family))} if dynamic else {}))
    start = 4
    t = scheduler.timesteps[start]
    t_B = (scheduler.sigmas[start] if flow else t.long()).expand(2)
    x = objective.add_noise(x0, noise, t_B)
    if isinstance(scheduler, diffusers.EulerDiscreteScheduler):
        # Karras et al.'s convention: Euler's samples are x_0 + sigma * noise, and it scales them for the model.
        torch.testing.assert_close(
            scheduler.scale_model_input(x0 + scheduler.sigmas[start] * noise, t), x, rtol=1e-4, atol=1e-4
        )
        x = x0 + scheduler.sigmas[start] * noise
        scheduler._step_index = None
    for t in scheduler.timesteps[start:]:
        t_B = t_B if flow else t.long().expand(2)  # v is another at each t, noise and velocity are not
        x = scheduler.step(objective.compute_target(x0, noise, t_B), t, x).prev_sample
    # Diffusion samplers end a little before t = 0 (the abar of the first timestep), flow matching ends at it.
    torch.testing.assert_close(x, x0, atol=1e-5 if flow else 0.1, rtol=1e-3)


def test_quantized_base_stays_close(Family, family, denoiser):
    quantized = load_denoiser(family, storage="fp8")
    names = {n for n, m in quantized.named_modules() if isinstance(m, precision.FrozenLinear)}
    assert names
    for name in Family.choose_adapter_layers(quantized):  # every linear that learns is held in FP8
        assert name in names or not isinstance(quantized.get_submodule(name), torch.nn.Linear)
    for name, module in quantized.named_modules():
        if isinstance(module, torch.nn.Linear) and any(precision.name_matches(name, e) for e in Family.keep_precise):
            assert name not in names
    with torch.no_grad():
        arguments = some_latents(family), some_t(family), conditioning(family)
        plain, held = (family.predict(d, *arguments) for d in (denoiser, quantized))
    error = (held - plain).norm() / plain.norm()
    assert 0 < error < 0.05


def test_previews_are_the_pipelines_pictures(Family, family, denoiser, pipeline):
    """Cached conditioning and no text encoders must draw what the whole pipeline draws from the prompt."""
    options = family.make_guidance_inputs(Family.default_guidance) | {"num_inference_steps": 3, "output_type": "pt"}
    accepted = inspect.signature(type(pipeline).__call__).parameters
    worded = Family.uses_negative and "negative_prompt" in accepted  # others guide away from the empty prompt
    negative = {"negative_prompt": "blue"} if worded else {}
    generator = torch.Generator().manual_seed(3)
    expected = pipeline(
        prompt=PROMPTS[0], **called(family, told_sizes=False, **options, **negative, generator=generator)
    )
    cond, bad = encode(family, [PROMPTS[0], family.make_negative_text("blue" if worded else "")])
    mine = family.make_pipeline(denoiser)
    inputs = family.make_pipeline_inputs(cond | shown_to_pipeline(family), bad if Family.uses_negative else None)
    height, width = miniatures.get_hw(Family.name)
    options |= {**family.make_size_inputs(width, height), **family.call_options}
    picture = mine(**inputs, **options, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(torch.as_tensor(picture[0]), torch.as_tensor(expected[0]), rtol=1e-3, atol=1e-4)


def test_previews_in_bf16_decode_in_float32(Family, folder):
    family = make(Family, folder, dtype=torch.bfloat16)
    load_encoders(family)
    cond, negative = encode(family, [PROMPTS[0], ""])
    family.free_encoders()
    denoiser = load_denoiser(family, storage="fp8")
    height, width = miniatures.get_hw(Family.name)
    sizes = {"width": width, "height": height}  # smaller than a config may ask for
    section = Preview(prompts=["x"], steps=2).model_copy(update=sizes)
    pipeline = family.make_pipeline(denoiser)
    assert pipeline.vae.dtype == torch.float32
    prompts = PreviewPrompts([section], [""], [cond | shown_to_pipeline(family)], [negative])
    (drawn,) = previews.render(family, pipeline, prompts, 0)
    assert drawn.size == (width, height)


def test_encoders_come_and_go(Stored, stored):
    family = make(Stored, stored)
    with pytest.raises(RuntimeError, match="encode_in_turn"):
        encode(family, ["a"])
    with pytest.raises(RuntimeError, match="load_vae"):
        family.encode_images(torch.zeros(1, 3, *miniatures.get_hw(Stored.name)))
    load_encoders(family)
    assert not any(p.requires_grad for p in family.vae.parameters())
    family.free_encoders()
    assert family.vae is None
    with pytest.raises(RuntimeError, match="encode_in_turn"):
        encode(family, ["a"])


# -- adapter targets -------------------------------------------------------------------------------------------------

# For the UNets the layers that kohya's sd-scripts adapt; for FLUX attention and feed-forward of all blocks.
PUBLISHED = tomllib.loads((Path(__file__).parent / "data" / "facts.toml").read_text(encoding="utf-8"))
"""What the makers publish: see test_facts.py, which compares the rest of it."""


def test_adapter_targets_at_full_size(Family):
    with torch.device("meta"):
        denoiser = getattr(diffusers, Family.denoiser_class).from_config(Family.reference_config)
    names = Family.choose_adapter_layers(denoiser)
    facts, modules = PUBLISHED[Family.name], dict(denoiser.named_modules())
    assert len(names) == len(set(names)) == facts["layers"]
    assert [layer for layer in (*facts["precise"], *facts.get("modulation", ())) if layer not in modules] == []
    assert not any(name_matches(name, entry) for name in names for entry in (*Family.keep_precise, *Family.modulation))
    # never an embedder, a convolution of a ResNet, or the output
    assert all(any(part.isdigit() for part in name.split(".")[:-1]) for name in names)
    assert not any("resnets" in name for name in names)
    assert not any("norm" in name.split(".")[-2] for name in names)  # nor modulation


def test_chosen_targets_match_endings_of_whole_segments(Family, denoiser):
    names = Family.choose_adapter_layers(denoiser, ["to_q"])
    assert names and all(name.endswith(".to_q") for name in names)
    with pytest.raises(UserError, match="'o_q'"):
        Family.choose_adapter_layers(denoiser, ["to_q", "o_q"])


def test_the_last_layer_of_flux_is_not_a_single_blocks_proj_out():
    Family = families.get("flux")
    with torch.device("meta"):
        denoiser = diffusers.FluxTransformer2DModel.from_config({**Family.reference_config, "num_layers": 1})
    assert "proj_out" not in Family.choose_adapter_layers(denoiser, ["proj_out"])
    assert Family.choose_adapter_layers(denoiser, ["^proj_out"]) == ["proj_out"]
    held = [n for n, m in denoiser.named_modules() if isinstance(m, torch.nn.Linear)]
    precise = {n for n in held if any(precision.name_matches(n, e) for e in Family.keep_precise)}
    assert {"proj_out", "x_embedder", "norm_out.linear"} < precise
    modulation = {n for n in held if any(precision.name_matches(n, e) for e in Family.modulation)}
    assert len(modulation) == 2 * 1 + 38 and {n.split(".")[-2] for n in modulation} == {
        "norm1",
        "norm1_context",
        "norm",
    }
    both = precise | modulation
    assert not {"single_transformer_blocks.3.proj_out", "transformer_blocks.0.attn.to_q"} & both
    assert not precise & modulation


# -- SDXL and FLUX, in particular ------------------------------------------------------------------------------------


def test_sdxl_sizes_are_height_before_width(tmp_path):
    Family = families.get("sdxl")
    miniatures.save(Family.name, tmp_path)
    facts = make(Family, tmp_path).make_image_conditioning((40, 56), (4, 6), (16, 24))
    assert facts["time_ids"].tolist() == [40, 56, 4, 6, 16, 24]


def test_flux_without_guidance_embedding(tmp_path):
    """FLUX.1-schnell: no guidance input, and the setting is reported as unused."""
    Family = families.get("flux")
    miniatures.save(Family.name, tmp_path)
    assert make(Family, tmp_path).list_base_facts() == {"base.guidance": True}
    assert make(Family, tmp_path).get_architecture_name() == "flux-1-dev"
    schnell = diffusers.FluxTransformer2DModel.from_config(
        {**make(Family, tmp_path).read_denoiser_config(), "guidance_embeds": False}
    )
    schnell.save_pretrained(tmp_path / "transformer")
    family = make(Family, tmp_path)
    load_encoders(family)
    with torch.no_grad():
        answer = family.predict(load_denoiser(family), some_latents(family), some_t(family), conditioning(family))
    assert answer.isfinite().all()
    assert family.list_base_facts() == {"base.guidance": False}
    assert family.get_architecture_name() == "flux-1-schnell", "sai_model_spec.py of sd-scripts"


def test_guidance_is_reported_where_nothing_reads_it(Family, family, folder):
    def unused(*given):
        return find_unused_settings(config.loads(least(Family, folder), given), family.list_base_facts())

    takes_it = family.read_denoiser_config().get("guidance_embeds", False)
    assert takes_it <= Family.embeds_guidance, "else the declaration's `when` would call it unused"
    told = [line for line in unused("objective.guidance=2.0") if line.startswith("objective.guidance has no effect")]
    assert len(told) == (not takes_it) and unused() == []


# -- where a base model can lie --------------------------------------------------------------------------------------


def copy(folder, tmp_path):
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_the_registry_is_the_folder():
    assert {"sd15", "sdxl", "flux"} <= set(families.list_families())
    assert not {"base", "_files", "_ldm"} & set(families.list_families())
    assert set(miniatures.available()) == set(families.list_families())
    with pytest.raises(UserError, match="did you mean 'sdxl'"):
        families.get("SDLX")


def test_more_than_two_overrides_have_a_reason_in_the_guide(Family):
    """A family is facts and at most two methods; `README.md` lists the others with all that they override."""
    guide = Path(families.__file__).with_name("README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ((?:`\w+`(?:, )?)+) \| .{20,} \|$", guide, re.MULTILINE))
    assert len(rows) < len(families.list_families())
    parts = {name: value for name, value in vars(Family).items() if not name.startswith("__")}
    methods = {
        name
        for name, value in parts.items()
        if inspect.isroutine(value) or isinstance(value, classmethod | property | functools.cached_property)
    }
    listed = sorted(re.findall(r"\w+", rows.get(Family.name, "")))
    assert listed == (sorted(methods) if len(methods) > 2 else [])


def test_every_fact_is_in_the_guide():
    guide = Path(families.__file__).with_name("README.md").read_text(encoding="utf-8")
    for name in (name for name, kind in Facts.__annotations__.items() if "ClassVar" in str(kind)):
        needed = not hasattr(Facts, name) and name != "distilled_advice"  # only families with a distilled relative
        assert f"• `{name}`" in guide if needed else f" `{name}`" in guide.replace("• `", "!`"), name


def test_traits_are_those_of_the_family(Family):
    assert families.get_traits(Family.name) == {
        "objective": "FlowMatching" if issubclass(Family.get_objective_type(), FlowMatching) else "Diffusion",
        "text_encoder": bool(Family.trained_text),
        "controls": Family.controls[1] > 0,
        "clips": Family.clips[1] > 0,
        "guidance": Family.embeds_guidance,
        "negative": Family.uses_negative,
        "long_captions": Family.name in ("sd15", "sd2", "sdxl"),  # those whose UNet reads CLIP's states alone
        "clip_skip": Family.name == "sd15",
        "captions": Family.captions,
    }
    with pytest.raises(UserError, match="did you mean 'sdxl'"):
        families.get_traits("sdlx")


def test_of_two_sizes_of_one_structure_the_closer_one_is_meant(monkeypatch):
    def header(channels):
        shapes = {"patch_embedding.weight": (64, channels, 1, 2, 2), "head.head.weight": (4 * channels, 64)}
        return {"blocks.0.self_attn.q.weight": (64, 64), **shapes}

    wan, get = families.get("wan"), families.get
    marks = {**wan.single_file, "shapes": {"patch_embedding.weight": (None, 48, None, None, None)}}
    wider = type("Family", (wan,), {"name": "wan_48", "title": "Wan of 48 channels", "single_file": marks})
    monkeypatch.setattr(families, "list_families", lambda: ["wan", "wan_48"])
    monkeypatch.setattr(families, "get", lambda name: wider if name == "wan_48" else get(name))
    monkeypatch.setattr(_checks, "get", families.get)
    assert families.describe(header(16)) == ("Wan 2.1", "wan")
    assert families.describe(header(48)) == ("Wan of 48 channels", "wan_48")
    given = {"same_tensors_as": "", "checkpoint": Path("x.safetensors"), "recognises": wan.recognises}
    family = SimpleNamespace(**given, _header=header(48), name="wan", title="Wan 2.1")
    with pytest.raises(UserError, match="x.safetensors is Wan of 48 channels, .*'wan_48'"):
        _checks.check_architecture(family)


def test_facts_need_no_torch():
    """The settings page and `--help` import every family file for its facts."""
    code = "import sys; from lora_fp8 import families; [families.get(n).title for n in families.list_families()]"
    code += "; heavy = {'torch', 'diffusers', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)"
    code += "; sys.exit(str(heavy) if heavy else 0)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent).returncode == 0


def test_truncated_and_padded_weights_are_refused(Stored, stored, tmp_path):
    broken = copy(stored, tmp_path)
    sound = make(Stored, broken)
    for relative in (
        f"{Stored.denoiser_name}/diffusion_pytorch_model",
        "vae/diffusion_pytorch_model",
        "text_encoder/model",
    ):
        weights = broken / f"{relative}.safetensors"
        whole = weights.read_bytes()
        for content in (whole[:-100], whole + b"\0"):
            weights.write_bytes(content)
            with pytest.raises(UserError, match=f"the file has {len(content)} bytes, but its header says {len(whole)}"):
                make(Stored, broken)
        for content in (whole[:1000], b"", b"<html>not found</html>" * 9):
            weights.write_bytes(content)
            with pytest.raises(UserError, match=f"{weights.name} is not a"):
                make(Stored, broken)
        # Damaged after the family was made, before it is read: an error as well, and no SIGBUS.
        weights.write_bytes(whole[:-100])
        with pytest.raises(UserError, match="damaged"):
            list(sound.read_denoiser_tensors())
            load_encoders(sound)
        weights.write_bytes(whole)


def test_pickles_are_not_opened(Family, folder, tmp_path):
    pickled = copy(folder, tmp_path)
    weights = pickled / Family.denoiser_name / "diffusion_pytorch_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(UserError, match=r"contains only diffusion_pytorch_model\.bin"):
        make(Family, pickled)
    (tmp_path / "model.ckpt").write_bytes(b"")
    with pytest.raises(UserError, match="only .safetensors"):
        make(Family, tmp_path / "model.ckpt", components=str(folder))


def test_all_missing_files_are_listed_at_once(Family, folder, tmp_path):
    partial = copy(folder, tmp_path)
    (partial / "vae" / "config.json").unlink()
    (partial / "text_encoder" / "model.safetensors").unlink()
    shutil.rmtree(partial / "tokenizer")
    (partial / Family.denoiser_name / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(UserError) as caught:
        make(Family, partial)
    for missing in ("vae/config.json", "text_encoder/model.safetensors", "tokenizer/", f"{Family.denoiser_name}/diff"):
        assert missing in str(caught.value)


@pytest.mark.parametrize("variant", [None, "fp16"])
def test_sharded_and_half_precision_weights(Stored, stored, tmp_path, variant):
    sharded = copy(stored, tmp_path)
    place = sharded / Stored.denoiser_name
    (place / "diffusion_pytorch_model.safetensors").unlink()
    model = getattr(diffusers, Stored.denoiser_class).from_pretrained(stored / Stored.denoiser_name)
    model.to(torch.float16 if variant else torch.float32).save_pretrained(
        place, max_shard_size="200KB", variant=variant
    )
    shards = sorted(place.glob("*.safetensors"))
    assert len(shards) > 1 and all((variant or "-000") in shard.name for shard in shards)
    family = make(Stored, sharded)
    loaded = load_denoiser(family).state_dict()
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if variant else {"rtol": 0, "atol": 0}
    for name, tensor in load_denoiser(make(Stored, stored)).state_dict().items():
        torch.testing.assert_close(loaded[name], tensor, **tolerance)
    shards[-1].unlink()
    with pytest.raises(UserError, match=f"lacks {shards[-1].name}"):
        make(Stored, sharded)


def test_half_precision_encoders_are_found(Stored, stored, tmp_path):
    half = copy(stored, tmp_path)
    for stem in (half / "vae" / "diffusion_pytorch_model", half / "text_encoder" / "model"):
        tensors = {k: v.half() for k, v in load_file(f"{stem}.safetensors").items()}
        save_file(tensors, f"{stem}.fp16.safetensors", metadata={"format": "pt"})
        Path(f"{stem}.safetensors").unlink()
    family, other = make(Stored, stored), make(Stored, half)
    load_encoders(family)
    load_encoders(other)
    assert other.vae.dtype == torch.float32
    for mine, theirs in zip(encode(other, PROMPTS), encode(family, PROMPTS), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


def test_full_precision_is_preferred_to_a_half_precision_copy(Stored, stored, tmp_path):
    both = copy(stored, tmp_path)
    place = both / Stored.denoiser_name
    tensors = load_file(place / "diffusion_pytorch_model.safetensors")
    save_file(
        {k: torch.zeros_like(v).half() for k, v in tensors.items()}, place / "diffusion_pytorch_model.fp16.safetensors"
    )
    loaded, expected = (load_denoiser(make(Stored, path)).state_dict() for path in (both, stored))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_text_encoders_as_the_hub_has_them(tmp_path):
    """The released models were saved years ago: other parameter names, a stored buffer, a tokenizer in two files."""
    Family = families.get("sd15")
    miniatures.save(Family.name, tmp_path)
    new = make(Family, tmp_path)
    load_encoders(new)
    expected = new.encode_prompts(PROMPTS)
    weights = tmp_path / "text_encoder" / "model.safetensors"
    tensors = {f"text_model.{k}": v for k, v in load_file(weights).items()}
    tensors["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(tensors, weights, metadata={"format": "pt"})
    whole = tmp_path / "tokenizer" / "tokenizer.json"
    model = json.loads(whole.read_text(encoding="utf-8"))["model"]
    (tmp_path / "tokenizer" / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    (tmp_path / "tokenizer" / "merges.txt").write_text(
        "#version: 0.2\n" + "\n".join(map(" ".join, model["merges"])) + "\n", encoding="utf-8"
    )
    whole.unlink()
    old = make(Family, tmp_path)
    load_encoders(old)
    for mine, theirs in zip(old.encode_prompts(PROMPTS), expected, strict=True):
        assert torch.equal(mine["prompt_embeds"], theirs["prompt_embeds"])


def test_what_encoders_lack_is_never_made_up(tmp_path):
    """transformers fills missing weights with random numbers: captions would be encoded by chance."""
    Family = families.get("sd15")
    miniatures.save(Family.name, tmp_path)
    for path in (tmp_path / "text_encoder" / "model.safetensors", tmp_path / "vae/diffusion_pytorch_model.safetensors"):
        tensors = load_file(path)
        (gone, *_) = sorted(tensors)
        save_file({name: tensor for name, tensor in tensors.items() if name != gone}, path, metadata={"format": "pt"})
        with pytest.raises(UserError, match=f"{path.parent} lacks 1 weights.*{re.escape(gone)}"):
            load_encoders(make(Family, tmp_path))
        save_file(tensors, path, metadata={"format": "pt"})
    for broken, words in (("tokenizer/tokenizer.json", "tokenizer.*cannot be read"), ("scheduler", "as JSON")):
        path = tmp_path / broken if broken.endswith("json") else tmp_path / "scheduler/scheduler_config.json"
        kept = path.read_bytes()
        path.write_bytes(b"\xff{")
        with pytest.raises(UserError, match=words):
            load_encoders(make(Family, tmp_path))
        path.write_bytes(kept)
    load_encoders(make(Family, tmp_path))


def test_a_head_that_nothing_reads_may_be_missing(tmp_path):
    Family = families.get("flux2_klein")
    miniatures.save(Family.name, tmp_path)
    whole, headless = make(Family, tmp_path), make(Family, tmp_path)
    load_encoders(whole)
    path = tmp_path / "text_encoder" / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if k != "lm_head.weight"}, path, metadata={"format": "pt"})
    config_file = path.with_name("config.json")
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"tie_word_embeddings": False}))
    load_encoders(headless)
    for mine, theirs in zip(headless.encode_prompts(PROMPTS), whole.encode_prompts(PROMPTS), strict=True):
        assert torch.equal(mine["prompt_embeds"], theirs["prompt_embeds"])


def test_a_folder_of_another_architecture_is_named(tmp_path):
    miniatures.save("sdxl", tmp_path / "xl")
    with pytest.raises(UserError) as caught:
        make(families.get("sd15"), tmp_path / "xl")
    assert "is Stable Diffusion XL" in str(caught.value) and "model.family = 'sdxl'" in str(caught.value)
    # Stable Diffusion 2 has the pipeline of 1.5, and another network.
    miniatures.save("sd15", tmp_path / "two")
    path = tmp_path / "two" / "unet" / "config.json"
    edited = json.loads(path.read_text(encoding="utf-8")) | {"use_linear_projection": True}
    path.write_text(json.dumps(edited), encoding="utf-8")
    with pytest.raises(UserError, match="not Stable Diffusion 1.5.*use_linear_projection = True"):
        make(families.get("sd15"), tmp_path / "two")


@pytest.mark.parametrize(
    ("key", "value"), [("_class_name", "AsymmetricAutoencoderKL"), ("latents_mean", [0.1] * 4)], ids=["class", "mean"]
)
def test_a_vae_of_another_kind_is_refused(Family, folder, tmp_path, key, value):
    other = copy(folder, tmp_path)
    path = other / "vae" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | {key: value}), encoding="utf-8")
    with pytest.raises(UserError, match=f"vae/config.json has {key}"):
        make(Family, other)


def least(Family, folder):
    """The text of a job of this family with its base here."""
    control = ", control = 'c'" if any(Family.controls) else ""
    return f"model = {{family = '{Family.name}', path = '{folder}'}}\ndataset = {{folders = [{{path = 'p'{control}}}]}}"


def test_settings_without_effect_are_warned_about(Family, folder):
    assert make(Family, folder, components="elsewhere", revision="main").warnings == []
    job = config.loads(least(Family, folder), ["model.components=elsewhere", "model.revision=main"])
    assert find_unused_settings(job) == [
        "model.components has no effect: model.path is a whole model, not a single file",
        "model.revision has no effect: model.path is a local path",
    ]


def test_paths_that_lead_nowhere(Family, folder, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        make(Family, tmp_path / "nothing")
    with pytest.raises(UserError, match=f"no {Family.index_name}"):
        make(Family, tmp_path)
    (tmp_path / "one.safetensors").touch()
    with pytest.raises(UserError, match="not a complete safetensors file"):
        make(Family, tmp_path / "one.safetensors", components=str(tmp_path / "nothing"))


def test_demo_names_the_bundled_base(Family):
    bundled = Path(base.__file__).parent.parent / "demo" / "base"
    have = sorted(p.parent.name for p in bundled.glob("*/model_index.json"))
    if Family.name in have:
        family = make(Family, "demo", dtype=torch.bfloat16)
        assert family.folder == bundled / Family.name
        assert load_denoiser(family, "fp8").dtype == torch.bfloat16
    else:
        with pytest.raises(UserError, match=f"no demo base for '{Family.name}'"):
            make(Family, "demo")


def test_identities_follow_the_contents(Family, folder, tmp_path):
    one, moved = make(Family, folder), make(Family, copy(folder, tmp_path))
    before = (one.compute_base_identity(), one.compute_encoder_identity("vae"), one.compute_encoder_identity("text"))
    assert len(set(before)) == 3 and all(len(digest) == 64 for digest in before)
    assert before == (
        moved.compute_base_identity(),
        moved.compute_encoder_identity("vae"),
        moved.compute_encoder_identity("text"),
    )
    changed = {
        f"{Family.denoiser_name}/diffusion_pytorch_model.safetensors": 0,
        "vae/diffusion_pytorch_model.safetensors": 1,
        "text_encoder/model.safetensors": 2,
        "vae/config.json": 1,
    }
    names = ("tokenizer.json", "tokenizer.model")
    changed |= {f"tokenizer/{name}": 2 for name in names if (moved.folder / "tokenizer" / name).is_file()}
    assert any(relative.startswith("tokenizer/") for relative in changed)
    if (moved.folder / "tokenizer" / "chat_template.jinja").is_file():
        changed["tokenizer/chat_template.jinja"] = 2
    for relative, which in changed.items():
        path = moved.folder / relative
        content = bytearray(path.read_bytes())
        content[-2] ^= 1
        path.write_bytes(content)
        after = (
            moved.compute_base_identity(),
            moved.compute_encoder_identity("vae"),
            moved.compute_encoder_identity("text"),
        )
        assert [a != b for a, b in zip(before, after, strict=True)] == [i == which for i in range(3)], relative
        before = after


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A book of hashes of its own, and `reads`, the files that were really read; every size is worth keeping."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(_files, "WORTH_KEEPING", 0)
    monkeypatch.setattr(stamps, "SETTLED", 0.0)
    original, reads = _files._hash_file, []
    monkeypatch.setattr(_files, "_hash_file", lambda path: reads.append(path.name) or original(path))
    _files._compute_file_digest.cache_clear()
    yield SimpleNamespace(path=_files.hash_book(), reads=reads, new_process=_files._compute_file_digest.cache_clear)
    _files._compute_file_digest.cache_clear()


def hashed(path):
    """What `digest` must say of this file: its bytes are read here."""
    return hashlib.sha256(f"x\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode()).hexdigest()


def test_an_unchanged_file_is_read_once_and_never_again(book, tmp_path):
    path = tmp_path / "base.safetensors"
    path.write_bytes(b"a" * 1000)
    for _ in range(3):
        assert _files.compute_digest([("x", path)]) == hashed(path)
        book.new_process()
    assert book.reads == ["base.safetensors"] and book.path == tmp_path / "home" / "lora_fp8" / "hashes.json"
    link = tmp_path / "link"  # as the hub's snapshots are
    link.symlink_to(path)
    assert _files.compute_digest([("x", link)]) == hashed(path) and len(book.reads) == 1
    moved = path.rename(tmp_path / "moved")
    assert _files.compute_digest([("x", moved)]) == hashed(moved) and book.reads == ["base.safetensors", "moved"]


def edited(path):
    path.write_bytes(b"b" * 1000)


def edited_with_its_old_time(path):
    before = path.stat()
    path.write_bytes(b"b" * 1000)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def one_byte_in_place(path):
    with open(path, "r+b") as file:
        file.seek(500)
        file.write(b"b")


def replaced_with_the_same_time(path):
    other = path.with_suffix(".new")
    other.write_bytes(b"b" * 1000)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("edit", [edited, edited_with_its_old_time, one_byte_in_place, replaced_with_the_same_time])
@pytest.mark.parametrize("same_process", [True, False])
def test_an_edited_file_is_hashed_again(book, tmp_path, edit, same_process):
    path = tmp_path / "base.safetensors"
    path.write_bytes(b"a" * 1000)
    before = _files.compute_digest([("x", path)])
    time.sleep(0.02)  # more than a tick of the file system's clock, for which SETTLED stands
    edit(path)
    if not same_process:
        book.new_process()
    assert _files.compute_digest([("x", path)]) == hashed(path) != before
    assert len(book.reads) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null", "entry", "hash"])
def test_a_damaged_book_costs_one_more_reading(book, tmp_path, content):
    path = tmp_path / "base.safetensors"
    path.write_bytes(b"a" * 1000)
    _files.compute_digest([("x", path)])
    if content == "entry":
        content = json.dumps({str(path): ["no entry"]}).encode()
    elif content == "hash":
        kept = json.loads(book.path.read_bytes())
        content = json.dumps({key: {**entry, "sha256": "torn"} for key, entry in kept.items()}).encode()
    book.path.write_bytes(content)
    for _ in range(2):
        book.new_process()
        assert _files.compute_digest([("x", path)]) == hashed(path)
    assert len(book.reads) == 2, "the second time it is in the mended book"


def test_a_book_that_cannot_be_written_is_said_and_the_hash_is_right(book, tmp_path, caplog):
    (tmp_path / "home").write_bytes(b"a file where a folder would have to be")
    path = tmp_path / "base.safetensors"
    path.write_bytes(b"a" * 1000)
    assert _files.compute_digest([("x", path)]) == hashed(path)
    assert "hashes.json cannot be written (" in caplog.text and "read the base model again" in caplog.text


def test_the_book_keeps_large_files_only_that_have_lain_still_and_not_for_ever(book, tmp_path, monkeypatch):
    path = tmp_path / "base.safetensors"
    path.write_bytes(b"a" * 1000)
    monkeypatch.setattr(stamps, "SETTLED", 3600.0)
    _files.compute_digest([("x", path)])
    monkeypatch.setattr(stamps, "SETTLED", 0.0)
    monkeypatch.setattr(_files, "WORTH_KEEPING", 1001)
    book.new_process()
    _files.compute_digest([("x", path)])
    assert not book.path.exists() and len(book.reads) == 2
    monkeypatch.setattr(_files, "WORTH_KEEPING", 1000)
    monkeypatch.setattr(_files, "MOST_KEPT", 3)
    for i in range(5):
        (tmp_path / str(i)).write_bytes(b"a" * 1000)
        _files.compute_digest([("x", tmp_path / str(i))])
    assert [Path(name).name for name in json.loads(book.path.read_bytes())] == ["2", "3", "4"]


def test_the_base_of_a_second_run_is_not_read_again(book, Family, folder):
    first = make(Family, folder).compute_base_identity()
    num_read = len(book.reads)
    book.new_process()
    assert make(Family, folder).compute_base_identity() == first and len(book.reads) == num_read > 0


# -- single files: the original layouts ------------------------------------------------------------------------------


def original_layout(Family, folder):
    """The miniature as one file in the layout in which the architecture was first published."""
    denoiser = load_file(folder / Family.denoiser_name / "diffusion_pytorch_model.safetensors")
    # Random weights of norms are all ones: make every tensor tell.
    generator = torch.Generator().manual_seed(0)
    denoiser = {k: torch.randn(v.shape, generator=generator) * 0.1 for k, v in denoiser.items()}
    save_file(
        denoiser, folder / Family.denoiser_name / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"}
    )
    if Family.name == "flux":
        return bfl_tensors(denoiser)
    names = ldm_names(denoiser, layers_per_block=1)
    tensors = {names[name]: tensor for name, tensor in denoiser.items()}
    tensors |= ldm_vae(load_file(folder / "vae" / "diffusion_pytorch_model.safetensors"))
    prefix = "cond_stage_model." if Family.name == "sd15" else "conditioner.embedders.0."
    text = load_file(folder / "text_encoder" / "model.safetensors")
    tensors |= {f"{prefix}transformer.text_model.{k.removeprefix('text_model.')}": v for k, v in text.items()}
    tensors[f"{prefix}transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]  # as old files have it
    if Family.name == "sdxl":
        tensors |= open_clip(load_file(folder / "text_encoder_2" / "model.safetensors"))
    return tensors


@pytest.fixture(scope="session", params=["sd15", "sdxl", "flux"])
def single(request, tmp_path_factory):
    """(Family, diffusers folder, the same model as one file, a folder with what the file lacks and no more)"""
    Family = families.get(request.param)
    root = tmp_path_factory.mktemp(f"single_{Family.name}")
    miniatures.save(Family.name, root / "base")
    save_file(original_layout(Family, root / "base"), root / "one.safetensors")
    rest = Path(shutil.copytree(root / "base", root / "rest"))
    (rest / Family.denoiser_name / "diffusion_pytorch_model.safetensors").unlink()
    if Family.name != "flux":  # these files carry VAE and text encoders
        for weights in rest.glob("*/*.safetensors"):
            weights.unlink()
    return Family, root / "base", root / "one.safetensors", rest


def test_a_single_file_is_the_same_model(single):
    Family, folder, path, rest = single
    whole, one = make(Family, folder), make(Family, path, components=str(rest))
    expected, loaded = load_denoiser(whole).state_dict(), load_denoiser(one).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    load_encoders(whole)
    load_encoders(one)
    pixels = torch.rand(1, 3, *miniatures.get_hw(Family.name))
    assert torch.equal(one.encode_images(pixels), whole.encode_images(pixels))
    for mine, theirs in zip(one.encode_prompts(PROMPTS), whole.encode_prompts(PROMPTS), strict=True):
        assert all(torch.equal(mine[k], theirs[k]) for k in theirs)
    assert one.make_pipeline(None).vae is one.vae
    assert one.compute_base_identity() != one.compute_encoder_identity("vae") != one.compute_encoder_identity("text")


def test_a_single_denoiser_alone_takes_the_rest_from_components(single, tmp_path):
    Family, folder, path, rest = single
    prefix = "model.diffusion_model."
    tensors = load_file(path)
    bare = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix) or Family.name == "flux"}
    prefixed = {prefix + k: v for k, v in bare.items()}
    expected = dict(make(Family, folder).read_denoiser_tensors())
    for name, content in {"bare": bare, "prefixed": prefixed}.items():
        save_file(content, tmp_path / f"{name}.safetensors")
        family = make(Family, tmp_path / f"{name}.safetensors", components=str(folder))
        found = dict(family.read_denoiser_tensors())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[k], expected[k]) for k in expected)
        load_encoders(family)
    if Family.name != "flux":
        with pytest.raises(UserError) as caught:
            make(Family, tmp_path / "bare.safetensors", components=str(rest))
        assert "vae/diffusion_pytorch_model.safetensors" in str(caught.value)
        assert "text_encoder/model.safetensors" in str(caught.value)


def test_components_of_another_architecture_are_refused(single, tmp_path):
    Family, _, path, _ = single
    other = families.get("flux" if Family.name != "flux" else "sdxl")
    miniatures.save(other.name, tmp_path)
    with pytest.raises(UserError, match=f"is {other.title}.*but model.family = '{Family.name}'"):
        make(Family, path, components=str(tmp_path))


def test_v_prediction_marks_in_a_single_file(single, tmp_path):
    Family, _, path, rest = single
    save_file({**load_file(path), "v_pred": torch.zeros(1), "ztsnr": torch.zeros(1)}, tmp_path / "v.safetensors")
    scheduler = make(Family, tmp_path / "v.safetensors", components=str(rest)).read_scheduler_config()
    assert scheduler["prediction_type"] == "v_prediction"
    if Family.objective == "Diffusion":
        assert scheduler["rescale_betas_zero_snr"] is True and scheduler["timestep_spacing"] == "trailing"


def test_the_job_asks_for_zero_terminal_snr(single):
    """Of the true v, the previews' sampler makes the image from pure noise, also where the base's cannot (PNDM)."""
    Family, _, path, rest = single
    if Family.objective != "Diffusion":
        return
    model = Model(family=Family.name, path=str(path), components=str(rest))
    family = Family(model, device="cpu", dtype=torch.float32, prediction="v", zero_snr=True)
    section = Objective(prediction="v", zero_terminal_snr=True)
    objective = family.make_objective(section)
    scheduler = family.make_pipeline(None).scheduler
    scheduler.set_timesteps(10)
    t_B = scheduler.timesteps[:1].long()
    x0, noise = (torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(2))
    assert t_B.tolist() == [999] and torch.equal(objective.add_noise(x0, noise, t_B), noise)
    sample = noise * scheduler.init_noise_sigma
    answer = scheduler.step(objective.compute_target(x0, noise, t_B), scheduler.timesteps[0], sample)
    torch.testing.assert_close(answer.pred_original_sample, x0, rtol=1e-3, atol=5e-3)


def test_the_job_names_what_a_file_does_not(single, tmp_path):
    """A single file without a mark is what its components say; the job overrules them, for trainer and sampler."""
    Family, _, path, rest = single
    diffusion = Family.objective == "Diffusion"
    unmarked = make(Family, path, components=str(rest))
    assert (
        unmarked.get_prediction() == ("epsilon" if diffusion else "flow") and unmarked.assumes_prediction() is diffusion
    )
    if not diffusion:
        return
    model, section = Model(family=Family.name, path=str(path), components=str(rest)), Objective
    v = Family(model, device="cpu", dtype=torch.float32, prediction="v")
    assert v.get_prediction() == "v" and not v.assumes_prediction()
    assert v.make_pipeline(None).scheduler.config.prediction_type == "v_prediction"
    assert (
        Family.get_objective_type()(v.read_scheduler_config(), section(prediction="v")).prediction_type
        == "v_prediction"
    )
    with pytest.raises(ValueError, match="made without objective.prediction = 'v'"):
        Family.get_objective_type()(unmarked.read_scheduler_config(), section(prediction="v"))
    marked = tmp_path / "marked.safetensors"
    save_file({**load_file(path), "v_pred": torch.zeros(1)}, marked)
    assert make(Family, marked, components=str(rest)).get_prediction() == "v"
    model = Model(family=Family.name, path=str(marked), components=str(rest))
    assert Family(model, device="cpu", dtype=torch.float32, prediction="epsilon").get_prediction() == "epsilon"
    stated = tmp_path / "stated.safetensors"
    save_file(load_file(path), stated, {"modelspec.prediction_type": "v"})
    assert make(Family, stated, components=str(rest)).get_prediction() == "v"


@pytest.mark.parametrize("name", ["NoobAI-XL-Vpred-v1.0", "mix_v-prediction", "it_v_pred", "MyVpredMerge"])
def test_a_file_that_is_v_prediction_by_its_name_alone_is_asked_about(single, tmp_path, name):
    Family, _, path, rest = single
    called = Path(shutil.copy(path, tmp_path / f"{name}.safetensors"))
    family = make(Family, called, components=str(rest))
    if Family.objective != "Diffusion":
        family.check_parts()  # a flow is predicted whatever the name says
        return
    with pytest.raises(UserError, match="Set 'v', or 'epsilon' if the name is wrong"):
        family.check_parts()
    model = Model(family=Family.name, path=str(called), components=str(rest))
    for prediction in ("v", "epsilon"):
        Family(model, device="cpu", dtype=torch.float32, prediction=prediction).check_parts()


def write_header(path, shapes):
    """A safetensors file of the right length, without writing its gigabytes (a sparse file)."""
    entries, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        entries[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)


def full_size_shapes(name):
    Family = families.get(name)
    with torch.device("meta"):
        denoiser = getattr(diffusers, Family.denoiser_class).from_config(Family.reference_config)
    state = {k: tuple(v.shape) for k, v in denoiser.state_dict().items()}
    return {new: state[old] for old, new in ldm_names(state, layers_per_block=2).items()}


def test_full_size_checkpoints_are_told_apart_by_their_headers(single, tmp_path, monkeypatch):
    """A 5 GB file of another architecture is named in well under a second; the right one is mapped wholly."""
    Family, folder, _, _ = single
    path = tmp_path / "big.safetensors"
    other = "sd15" if Family.name == "sdxl" else "sdxl"
    write_header(path, full_size_shapes(other))
    with pytest.raises(UserError) as caught:
        make(Family, path, components=str(folder))
    assert f"is {families.get(other).title}, but model.family = {Family.name!r}" in str(caught.value)
    assert f"set model.family = {other!r}" in str(caught.value)
    if Family.name != "flux":
        shapes = full_size_shapes(Family.name)
        assert Family.recognises(shapes)
        shutil.copytree(folder, tmp_path / "rest")
        (tmp_path / "rest" / "unet" / "config.json").unlink()  # then the released model's config is meant
        write_header(path, shapes)
        with pytest.raises(UserError, match="belong to different models"):  # its text encoders are a miniature's
            make(Family, path, components=str(tmp_path / "rest"))
        monkeypatch.setattr("lora_fp8.families._checks.check_fit", lambda family: None)
        family = make(Family, path, components=str(tmp_path / "rest"))
        expected = family.make_empty_denoiser().state_dict()
        conversion = family.convert_checkpoint(_files.read_header(path))
        assert conversion.keys() == expected.keys()
        assert all(shapes[key] == tuple(expected[name].shape) for name, (key, _) in conversion.items())


SD3 = "model.diffusion_model.joint_blocks.0.context_block.adaLN_modulation.1.bias"


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"lora_unet_down_blocks_0.lora_up.weight": (4, 4)}, "a LoRA, not a base model"),
        ({"some.other.weight": (4, 4)}, "not a checkpoint of a known kind"),
        ({SD3: (9216,), "model.diffusion_model.pos_embed": (1, 36864, 1536)}, "'sd3' .as diffusers calls it"),
        ({SD3: (9216,)}, "not a checkpoint of a known kind"),
        ({"down_blocks.0.resnets.0.conv1.weight": (4, 4, 3, 3)}, "diffusers' naming"),
    ],
)
def test_other_files_are_described(tmp_path, shapes, words):
    Family = families.get("sd15")
    miniatures.save(Family.name, tmp_path / "base")
    write_header(tmp_path / "file.safetensors", shapes)
    with pytest.raises(UserError, match=words):
        make(Family, tmp_path / "file.safetensors", components=str(tmp_path / "base"))


def test_inpainting_refiner_and_fill_are_not_their_base_models():
    sd15, sdxl = (families.get(name) for name in ("sd15", "sdxl"))
    shapes = full_size_shapes("sd15")
    assert not sd15.recognises({**shapes, "model.diffusion_model.input_blocks.0.0.weight": (320, 9, 3, 3)})
    assert not sd15.recognises({**shapes, "model.diffusion_model.input_blocks.1.1.proj_in.weight": (320, 320)})  # SD 2
    assert not sdxl.recognises(shapes)
    shapes = full_size_shapes("sdxl")
    assert not sd15.recognises(shapes)
    assert not sdxl.recognises({**shapes, "model.diffusion_model.input_blocks.9.0.op.weight": (1536, 1536, 3, 3)})
    flux = families.get("flux")
    dev = {"img_in.weight": (3072, 64), "final_layer.linear.weight": (64, 3072)}
    dev |= {"double_blocks.0.img_attn.qkv.weight": (9216, 3072), "vector_in.in_layer.weight": (3072, 768)}
    assert flux.recognises(dev) and flux.recognises({f"model.diffusion_model.{k}": v for k, v in dev.items()})
    assert not flux.recognises({**dev, "img_in.weight": (3072, 384)})  # FLUX.1-Fill


@pytest.mark.usefixtures("foreign_components")
def test_flux_conversion_is_diffusers_own(tmp_path):
    """At full width and depth; only the rows matter to the conversion, so that every matrix has one column here."""
    d, shapes = 3072, {}
    for name in ("time_in", "vector_in", "guidance_in"):
        shapes |= {f"{name}.in_layer": d, f"{name}.out_layer": d}
    shapes |= {"txt_in": d, "img_in": d, "final_layer.linear": 64, "final_layer.adaLN_modulation.1": 2 * d}
    for i in range(19):
        for s in ("img", "txt"):
            block = f"double_blocks.{i}.{s}"
            shapes |= {f"{block}_mod.lin": 6 * d, f"{block}_attn.qkv": 3 * d, f"{block}_attn.proj": d}
            shapes |= {f"{block}_mlp.0": 4 * d, f"{block}_mlp.2": d}
    for i in range(38):
        shapes |= {f"single_blocks.{i}.modulation.lin": 3 * d, f"single_blocks.{i}.linear1": 7 * d}
        shapes |= {f"single_blocks.{i}.linear2": d}
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randint(0, 2**31, shape, generator=generator, dtype=torch.int32)

    tensors = {}
    for name, rows in shapes.items():
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = numbers(rows, 1), numbers(rows)
    norms = [f"double_blocks.{i}.{s}_attn.norm" for i in range(19) for s in ("img", "txt")]
    for norm in norms + [f"single_blocks.{i}.norm" for i in range(38)]:
        for part in ("query", "key"):
            tensors[f"{norm}.{part}_norm.scale"] = torch.randint(
                0, 2**31, (128,), generator=generator, dtype=torch.int32
            )
    Flux = families.get("flux")
    miniatures.save(Flux.name, tmp_path)
    told = json.dumps({"_class_name": Flux.denoiser_class, "guidance_embeds": True, **Flux.reference_config})
    (tmp_path / "transformer" / "config.json").write_text(told, encoding="utf-8")
    conversion = make(Flux, tmp_path).convert_checkpoint({k: tuple(v.shape) for k, v in tensors.items()})
    mine = {name: change(tensors[key]) if change else tensors[key] for name, (key, change) in conversion.items()}
    theirs = convert_flux_transformer_checkpoint_to_diffusers(dict(tensors))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
