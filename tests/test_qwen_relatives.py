"""Qwen-Image, Z-Image, Krea 2, Anima: names in the original code as diffusers converts them, which are distilled, and
a pipeline of our own held against diffusers' modular one.
"""

import json
import shutil
from types import SimpleNamespace

import diffusers
import miniatures
import pytest
import torch
from diffusers.loaders import lora_conversion_utils, single_file_utils
from diffusers.models.transformers import transformer_cosmos
from editing import load_encoders
from miniatures import _qwen
from safetensors.torch import load_file, save_file
from test_families import PROMPTS, make

from lora_fp8 import families, settings
from lora_fp8.errors import UserError
from lora_fp8.families import krea2
from lora_fp8.families._files import PREFIXES
from lora_fp8.lora_files import naming
from lora_fp8.objectives import FlowMatching

PREFIX = "model.diffusion_model."


def bare(tensors):
    return {key.removeprefix(PREFIX): t for key, t in tensors.items()}


def cosmos(tensors):
    tensors = {f"net.{key}": t for key, t in bare(tensors).items() if not key.startswith("llm_adapter.")}
    return single_file_utils.convert_cosmos_transformer_checkpoint_to_diffusers(tensors)


CONVERTERS = {
    "qwen_image": bare,
    "anima": cosmos,
    "z_image": single_file_utils.convert_z_image_transformer_checkpoint_to_diffusers,
    "krea2": single_file_utils.convert_krea2_transformer_checkpoint_to_diffusers,
}
"""How diffusers reads single files; Qwen-Image was published with diffusers' names."""


def native_tensors(Family, denoiser):
    """A denoiser of diffusers in the original naming; modulation of Krea 2's blocks as the one vector that it was."""
    native = {}
    for name in denoiser:
        original, members = naming.to_native(Family.native_layers, name)
        native[original] = torch.cat([denoiser[member] for member in members])
        if original.endswith(".mod.lin"):
            native[original] = native[original].flatten()
    if Family.name == "anima":  # the first tensor of the conditioner, which such files hold as well
        native["llm_adapter.embed.weight"] = torch.zeros(1, 1)
    return native


def full_size(Family):
    with torch.device("meta"):
        return getattr(diffusers, Family.denoiser_class).from_config(Family.reference_config)


@pytest.mark.parametrize("name", CONVERTERS)
def test_a_full_size_file_is_recognised_by_its_family_alone(name):
    Family = families.get(name)
    shapes = {key: tuple(t.shape) for key, t in native_tensors(Family, full_size(Family).state_dict()).items()}
    for prefix in PREFIXES:
        header = {prefix + key: shape for key, shape in shapes.items()}
        assert [other for other in families.list_families() if families.get(other).recognises(header)] == [name]


@pytest.mark.parametrize("name", CONVERTERS)
def test_a_single_file_is_read_as_diffusers_reads_it(name, tmp_path):
    Family = families.get(name)
    miniatures.save(Family.name, tmp_path / "base")
    weights = tmp_path / "base" / Family.denoiser_name / "diffusion_pytorch_model.safetensors"
    expected = {key: torch.randn(tensor.shape) for key, tensor in load_file(weights).items()}  # norms are all ones
    tensors = {f"{PREFIX}{key}": t for key, t in native_tensors(Family, expected).items()}
    if name == "z_image":
        tensors[f"{PREFIX}norm_final.weight"] = torch.zeros(48)  # some files have it, and no network
    save_file(tensors, tmp_path / "one.safetensors")
    found = dict(make(Family, tmp_path / "one.safetensors", components=str(tmp_path / "base")).read_denoiser_tensors())
    theirs = CONVERTERS[name](dict(tensors))
    assert found.keys() == theirs.keys() == expected.keys()
    assert all(torch.equal(found[key], theirs[key]) and torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", CONVERTERS)
def test_adapted_layers_are_called_as_diffusers_converter_of_loras_expects(name):
    Family = families.get(name)
    denoiser = full_size(Family)
    layers = Family.choose_adapter_layers(denoiser)
    assert len(layers) == {"qwen_image": 60 * 12 - 4, "z_image": 30 * 7, "krea2": 28 * 8, "anima": 28 * 10}[name]
    if name == "z_image":  # its converter knows the layers of diffusers only: see `layouts` of the family
        native = layers
    else:
        native = [naming.to_native(Family.native_layers, layer)[0] for layer in layers]
    tensors = {f"diffusion_model.{layer}.lora_{half}.weight": torch.ones(1, 1) for layer in native for half in "AB"}
    short = "qwen" if name == "qwen_image" else name
    convert = getattr(lora_conversion_utils, f"_convert_non_diffusers_{short}_lora_to_diffusers")
    assert set(convert(tensors)) == {f"transformer.{layer}.lora_{half}.weight" for layer in layers for half in "AB"}


def test_relatives_with_other_inputs_are_refused():
    """Layered, and Z-Image-Omni, have these tensors beside what their base has; 2511 of Qwen-Image-Edit is a family."""
    qwen, z_image = families.get("qwen_image"), families.get("z_image")
    header = {"transformer_blocks.0.img_mod.1.weight": (96, 16), "txt_norm.weight": (16,), "img_in.weight": (16, 64)}
    assert qwen.recognises(header)
    for key in ("time_text_embed.addition_t_embedding.weight", "__index_timestep_zero__"):
        known = [name for name in families.list_families() if families.get(name).recognises({**header, key: (2, 16)})]
        assert known == (["qwen_image_edit_plus"] if "index" in key else [])
    header = {"x_pad_token": (1, 16), "cap_pad_token": (1, 16), "layers.0.attention.qkv.weight": (48, 16)}
    header["layers.0.adaLN_modulation.0.weight"] = (64, 16)
    assert z_image.recognises(header) and not z_image.recognises({**header, "siglip_embedder.1.weight": (16, 16)})


def test_the_last_block_of_qwen_image_makes_nothing_of_the_text(tmp_path):
    """What gets no adapter is what no gradient reaches, and nothing else."""
    Family = families.get("qwen_image")
    miniatures.save(Family.name, tmp_path)
    family = make(Family, tmp_path)
    load_encoders(family)
    denoiser = diffusers.QwenImageTransformer2DModel.from_pretrained(tmp_path / "transformer")
    cond = family.collate(family.encode_prompts(PROMPTS[:1]))
    family.predict(denoiser, torch.randn(1, 16, 4, 6), torch.full((1,), 0.5), cond).square().sum().backward()
    layers = {name: module for name, module in denoiser.named_modules() if name.endswith(Family.adapter_targets)}
    silent = {name for name, layer in layers.items() if layer.weight.grad is None or not layer.weight.grad.any()}
    assert (
        silent
        == Family.find_layers_without_adapter(denoiser)
        == layers.keys() - set(Family.choose_adapter_layers(denoiser))
    )


def test_the_template_is_as_long_as_the_pipelines_count_it():
    """Miniatures would prove little if what is dropped of their template were part of the prompt."""
    tokenizer = _qwen.tokenizer()
    qwen = diffusers.QwenImagePipeline(None, None, None, None, None)
    assert len(tokenizer(qwen.prompt_template_encode.partition("{}")[0]).input_ids) == 34
    assert qwen.prompt_template_encode_start_idx == 34
    krea = diffusers.Krea2Pipeline(None, None, None, None, None)
    assert len(tokenizer(krea.prompt_template_encode_prefix).input_ids) == krea.prompt_template_encode_start_idx
    suffix = len(tokenizer(krea.prompt_template_encode_suffix).input_ids)
    assert suffix == krea.prompt_template_encode_num_suffix_tokens == krea2.SUFFIX_TOKENS


def edit(path, **entries):
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | entries), encoding="utf-8")


@pytest.mark.parametrize("name", ["z_image", "krea2"])
def test_distilled_models_are_told_and_drawn_without_guidance(name, tmp_path):
    Family = families.get(name)
    miniatures.save(Family.name, tmp_path)
    base = make(Family, tmp_path)
    assert base.warnings == [] and base.make_guidance_inputs(base.choose_guidance())["guidance_scale"] > 0
    if name == "z_image":
        edit(tmp_path / "scheduler" / "scheduler_config.json", shift=3.0)
    else:
        edit(tmp_path / "model_index.json", is_distilled=True)
    turbo = make(Family, tmp_path)
    warning, *more = turbo.warnings
    assert len(more) == (name == "z_image") and all("model.training_adapter" in line for line in more)
    assert "Turbo" in warning and "distill" in warning and "\n" not in warning
    assert turbo.make_guidance_inputs(turbo.choose_guidance()) == {"guidance_scale": 0.0}


@pytest.mark.parametrize("name", ["z_image", "krea2", "flux2_klein"])
@pytest.mark.parametrize("components", ["base", "distilled"])
def test_the_name_of_a_single_file_says_more_than_its_components(name, components, tmp_path):
    Family = families.get(name)
    miniatures.save(Family.name, tmp_path)
    if components == "distilled" and name == "z_image":
        edit(tmp_path / "scheduler" / "scheduler_config.json", shift=3.0)
    elif components == "distilled":
        edit(tmp_path / "model_index.json", is_distilled=True)
    weights = load_file(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    original = native_tensors(Family, weights)
    named = {"my_Turbo_fp8": True, **dict.fromkeys(("z_image_de_turbo", "x-de-distill", "krea2_raw", "z-base"), False)}
    if name == "flux2_klein":
        named = {"flux-2-klein-4b-fp8": True, "flux-2-klein-base-4b": False}
    for called, distilled in (named | {"drawing": components == "distilled"}).items():
        save_file(original, tmp_path / f"{called}.safetensors")
        family = make(Family, tmp_path / f"{called}.safetensors", components=str(tmp_path))
        assert [bool(family.warnings), family.choose_guidance() == 1.0] == [distilled] * 2, called
        if name != "z_image":
            assert family._assemble().config.is_distilled is distilled
        if name == "krea2":
            assert (family.read_scheduler_config()["base_shift"] == krea2.TURBO_MU) is distilled


@pytest.mark.parametrize("name", ["z_image", "krea2", "flux2_klein", "ernie_image"])
def test_a_de_distilled_folder_or_repository_is_not_distilled(name, tmp_path):
    """It keeps the config of the model that it was made from, so that its name alone tells."""
    Family = families.get(name)
    turbo = tmp_path / "Some-Turbo"
    miniatures.save(Family.name, turbo)
    if name == "z_image":
        edit(turbo / "scheduler" / "scheduler_config.json", shift=3.0)
    elif name == "ernie_image":
        edit(turbo / "transformer" / "config.json", use_lora=False)
    else:
        edit(turbo / "model_index.json", is_distilled=True)
    assert make(Family, turbo).is_distilled()
    snapshot = tmp_path / "models--ostris--Some-De-Turbo" / "snapshots" / "0a1b2c"  # as the hub's cache has it
    for place in (tmp_path / "Some-De-Turbo", tmp_path / "some_dedistilled", snapshot):
        shutil.copytree(turbo, place)
        family = make(Family, place)
        assert not family.is_distilled() and family.warnings == [], place
        assert family.choose_guidance() == Family.default_guidance
    copied = shutil.copytree(turbo, tmp_path / "models--x--Some-Turbo" / "snapshots" / "de-turbo")
    assert make(Family, copied).is_distilled(), "the repository's name counts, not the commit's"


def test_anima_turbo_is_told_by_its_name(tmp_path):
    Family = families.get("anima")
    miniatures.save(Family.name, tmp_path / "base")
    assert make(Family, tmp_path / "base").warnings == []
    places = {"Anima-Turbo": True, "Anima-De-Turbo": False, "models--someone--Anima-Turbo/snapshots/0a1b": True}
    for called, distilled in places.items():
        family = make(Family, shutil.copytree(tmp_path / "base", tmp_path / called))
        assert [bool(family.warnings), family.choose_guidance() == 1.0] == [distilled] * 2, called
    weights = load_file(tmp_path / "base" / "transformer" / "diffusion_pytorch_model.safetensors")
    original = native_tensors(Family, weights)
    for called, distilled in {"anima-turbo-v1.1": True, "anima-base-v1.0": False, "anima_de_turbo": False}.items():
        save_file(original, tmp_path / f"{called}.safetensors")
        family = make(Family, tmp_path / f"{called}.safetensors", components=str(tmp_path / "base"))
        assert [bool(family.warnings), family.choose_guidance() == 1.0] == [distilled] * 2, called


@pytest.mark.parametrize("name", ["qwen_image", "qwen_image_edit", "qwen_image_edit_plus"])
def test_qwen_image_edit_is_told_by_its_name(name, tmp_path):
    """The relatives have the same tensors, but for a marker in ComfyUI's files of 2511."""
    Family = families.get(name)
    miniatures.save(Family.name, tmp_path)
    weights = load_file(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    for called, meant in {
        "qwen_image_fp8": "qwen_image",
        "qwen_image_edit_fp8": "qwen_image_edit",
        "qwen_image_edit_2509_bf16": "qwen_image_edit_plus",
        "Qwen-Image-Edit-2511": "qwen_image_edit_plus",
        "credits": "qwen_image",
    }.items():
        save_file(weights, tmp_path / f"{called}.safetensors")
        family = make(Family, tmp_path / f"{called}.safetensors", components=str(tmp_path))
        assert all(torch.equal(tensor, weights[key]) for key, tensor in family.read_denoiser_tensors())
        assert bool(family.warnings) == (meant != name), called
        if meant not in (name, "qwen_image"):
            assert f"model.family = {meant!r}" in family.warnings[0]
        if name == "qwen_image_edit_plus" and "25" in called:
            assert family.make_empty_denoiser().zero_cond_t == ("2511" in called)
    if name != "qwen_image":
        miniatures.save("qwen_image", tmp_path / "text")
        with pytest.raises(UserError, match=r"lacks processor/ \(preprocessor_config.json"):
            make(Family, tmp_path / "qwen_image_edit_fp8.safetensors", components=str(tmp_path / "text"))
        marked = {**weights, "__index_timestep_zero__": torch.zeros(0)}
        save_file(marked, tmp_path / "edit.safetensors")
        if name == "qwen_image_edit":
            with pytest.raises(UserError, match="set model.family = 'qwen_image_edit_plus'"):
                make(Family, tmp_path / "edit.safetensors", components=str(tmp_path))
        else:
            edit(tmp_path / "transformer" / "config.json", zero_cond_t=False)
            family = make(Family, tmp_path / "edit.safetensors", components=str(tmp_path))
            assert family.make_empty_denoiser().zero_cond_t is True
    with pytest.raises(UserError, match=f"set model.family = {name!r}"):
        make(families.get("krea2"), tmp_path)


def test_krea2_turbo_is_trained_with_the_shift_that_it_draws_with(tmp_path, monkeypatch):
    """Its pipeline has one for all resolutions; judged by what it tells the scheduler."""
    Family = families.get("krea2")
    miniatures.save(Family.name, tmp_path)
    edit(tmp_path / "model_index.json", is_distilled=True)
    family = make(Family, tmp_path)
    pipeline = diffusers.Krea2Pipeline.from_pretrained(tmp_path, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    told = []
    scheduler = type(pipeline.scheduler)
    real = scheduler.set_timesteps

    def recorded(self, num_inference_steps=None, device=None, sigmas=None, mu=None):
        told.append(mu)
        real(self, num_inference_steps, device, sigmas, mu)

    monkeypatch.setattr(scheduler, "set_timesteps", recorded)
    for width in (24, 64):
        pipeline("a cat", height=16, width=width, num_inference_steps=1, guidance_scale=0.0, output_type="latent")
        objective = FlowMatching(family.read_scheduler_config(), settings.Objective())
        assert objective.compute_mu(family.count_image_tokens((8, width // 2))) == pytest.approx(told[-1])


# -- Anima -----------------------------------------------------------------------------------------------------------


class Torchvision:
    """What the transformer of Anima calls in torchvision, which is not among the dependencies: a nearest resize."""

    InterpolationMode = SimpleNamespace(NEAREST="nearest")
    functional = SimpleNamespace(resize=lambda x, size, interpolation: torch.nn.functional.interpolate(x, size))


def test_anima_is_drawn_as_diffusers_modular_pipeline_draws_it(tmp_path, monkeypatch):
    """From text to latents and pixels, with guidance and without; prompts of two lengths."""
    Family = families.get("anima")
    miniatures.save(Family.name, tmp_path)
    modular = diffusers.AnimaModularPipeline.from_pretrained(str(tmp_path), local_files_only=True)
    modular.load_components()
    modular.set_progress_bar_config(disable=True)
    monkeypatch.setattr(transformer_cosmos, "transforms", Torchvision, raising=False)
    assert modular.transformer.config.concat_padding_mask
    mine = Family.get_pipeline_type().from_pretrained(tmp_path)
    mine.set_progress_bar_config(disable=True)
    height, width = miniatures.get_hw(Family.name)
    for prompt in PROMPTS:
        for guidance in (1.0, 4.0):
            options = {"prompt": prompt, "height": height, "width": width, "num_inference_steps": 3}
            modular.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=guidance))
            generator = torch.Generator().manual_seed(0)
            state = modular(**options, generator=generator, output_type="pt")
            generator = torch.Generator().manual_seed(0)
            latents = mine(**options, guidance_scale=guidance, generator=generator, output_type="latent").images
            torch.testing.assert_close(latents, state.get("latents")[:, :, 0], rtol=1e-4, atol=1e-5)
            generator = torch.Generator().manual_seed(0)
            pixels = mine(**options, guidance_scale=guidance, generator=generator, output_type="pt").images
            torch.testing.assert_close(pixels, state.get("images"), rtol=1e-4, atol=1e-5)


def test_the_conditioner_of_anima_comes_from_the_file_that_holds_it(tmp_path):
    Family = families.get("anima")
    miniatures.save(Family.name, tmp_path / "base")
    miniatures.save(Family.name, tmp_path / "other", seed=1)
    stem = "diffusion_pytorch_model.safetensors"
    transformer, conditioner = (load_file(tmp_path / "other" / p / stem) for p in ("transformer", "text_conditioner"))
    tensors = {f"net.{key}": t for key, t in native_tensors(Family, transformer).items()}
    tensors |= {f"net.llm_adapter.{key}": t for key, t in conditioner.items()}
    tensors["net.pos_embedder.seq"] = torch.arange(64)
    save_file(tensors, tmp_path / "one.safetensors")
    for part in ("transformer", "text_conditioner"):
        (tmp_path / "base" / part / stem).unlink()
    one = make(Family, tmp_path / "one.safetensors", components=str(tmp_path / "base"))
    found = dict(one.read_denoiser_tensors())
    assert found.keys() == transformer.keys() and all(torch.equal(found[key], transformer[key]) for key in found)
    load_encoders(one)
    loaded = one.text_pipeline.text_conditioner.state_dict()
    assert loaded.keys() == conditioner.keys() and all(torch.equal(loaded[key], conditioner[key]) for key in loaded)
