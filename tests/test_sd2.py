"""Stable Diffusion 2, and fine-tunes of the UNets that predict v: what the contract of all families does not ask."""

import json

import diffusers
import miniatures
import pytest
import torch
from editing import load_encoders
from original_code import ldm_names, ldm_vae, open_clip
from safetensors.torch import load_file, save_file
from test_families import PROMPTS, full_size_shapes, load_denoiser, make, write_header

from lora_fp8 import families, settings
from lora_fp8.errors import UserError
from lora_fp8.families import _files

NOOBAI = {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def single_file(folder, path):
    """The miniature as one file as Stability AI published it: LDM's UNet and VAE, and OpenCLIP."""
    unet = load_file(folder / "unet" / "diffusion_pytorch_model.safetensors")
    names = ldm_names(unet, layers_per_block=1)
    tensors = {names[name]: tensor for name, tensor in unet.items()}
    tensors |= ldm_vae(load_file(folder / "vae" / "diffusion_pytorch_model.safetensors"))
    text = open_clip(load_file(folder / "text_encoder" / "model.safetensors"))
    tensors |= {key.replace("conditioner.embedders.1.", "cond_stage_model."): t for key, t in text.items()}
    save_file(tensors, path)


def test_a_single_file_is_the_same_model_and_does_not_tell_what_it_predicts(tmp_path):
    Family = families.get("sd2")
    miniatures.save(Family.name, tmp_path / "base")
    single_file(tmp_path / "base", tmp_path / "one.safetensors")
    whole = make(Family, tmp_path / "base")
    load_encoders(whole)
    expected = load_denoiser(whole).state_dict()
    for weights in (tmp_path / "base").glob("*/*.safetensors"):
        weights.unlink()
    one = make(Family, tmp_path / "one.safetensors", components=str(tmp_path / "base"))
    load_encoders(one)
    loaded = load_denoiser(one).state_dict()
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[k], expected[k]) for k in expected)
    for mine, theirs in zip(one.encode_prompts(PROMPTS), whole.encode_prompts(PROMPTS), strict=True):
        assert torch.equal(mine["prompt_embeds"], theirs["prompt_embeds"])
    pixels = torch.rand(1, 3, *miniatures.get_hw(Family.name))
    assert torch.equal(one.encode_images(pixels), whole.encode_images(pixels))
    (told,) = one.warnings
    assert "'v' is taken from" in told and whole.warnings == []
    assert one.get_architecture_name() == "stable-diffusion-v2-768-v"
    edit(tmp_path / "base" / "scheduler" / "scheduler_config.json", prediction_type="epsilon")
    base = make(Family, tmp_path / "one.safetensors", components=str(tmp_path / "base"))
    assert "'epsilon'" in base.warnings[0] and base.get_architecture_name() == "stable-diffusion-v2-512"


@pytest.mark.usefixtures("foreign_components")
def test_a_full_size_file_is_read_whole_and_is_nobody_elses(tmp_path):
    Family = families.get("sd2")
    shapes = full_size_shapes("sd2")
    assert [name for name in families.list_families() if families.get(name).recognises(shapes)] == ["sd2"]
    first = "model.diffusion_model.input_blocks.0.0.weight"
    assert not Family.recognises({**shapes, first: (320, 9, 3, 3)})  # inpainting
    assert not Family.recognises({**shapes, "model.diffusion_model.label_emb.0.0.weight": (1280, 2048)})  # unCLIP
    miniatures.save(Family.name, tmp_path / "rest")
    (tmp_path / "rest" / "unet" / "config.json").unlink()
    write_header(tmp_path / "big.safetensors", shapes)
    family = make(Family, tmp_path / "big.safetensors", components=str(tmp_path / "rest"))
    expected = family.make_empty_denoiser().state_dict()
    conversion = family.convert_checkpoint(_files.read_header(tmp_path / "big.safetensors"))
    assert conversion.keys() == expected.keys()
    assert all(shapes[key] == tuple(expected[name].shape) for name, (key, _) in conversion.items())
    assert len(Family.choose_adapter_layers(family.make_empty_denoiser())) == 192


@pytest.mark.parametrize("chosen", ["sd15", "sdxl"])
def test_a_folder_of_sd2_is_named_though_sd15_shares_its_pipeline(chosen, tmp_path):
    miniatures.save("sd2", tmp_path)
    with pytest.raises(UserError, match="model.family = 'sd2'"):
        make(families.get(chosen), tmp_path)


@pytest.mark.parametrize("name", ["sd15", "sd2", "sdxl"])
def test_v_prediction_with_zero_terminal_snr_is_the_samplers(name, tmp_path):
    """NoobAI and its like: of the true v, the model's own sampler makes the image, from pure noise as well."""
    Family = families.get(name)
    miniatures.save(Family.name, tmp_path)
    edit(tmp_path / "scheduler" / "scheduler_config.json", _class_name="EulerDiscreteScheduler", **NOOBAI)
    family = make(Family, tmp_path)
    objective = Family.get_objective_type()(family.read_scheduler_config(), settings.Objective())
    x0, noise = (torch.randn(2, 4, 8, 12, generator=torch.Generator().manual_seed(i)) for i in range(2))
    for index in (0, 4, 9):
        scheduler = family.make_pipeline(None).scheduler
        assert isinstance(scheduler, diffusers.EulerDiscreteScheduler)
        scheduler.set_timesteps(10)
        t = scheduler.timesteps[index]
        t_B = t.long().expand(2)
        sample = x0 + scheduler.sigmas[index] * noise
        noisy = objective.add_noise(x0, noise, t_B)
        # Euler's first sigma stands for infinity and is 4096, so that a trace of the image is left in it.
        torch.testing.assert_close(scheduler.scale_model_input(sample, t), noisy, rtol=1e-3, atol=2e-3)
        assert index or (t_B[0] == 999 and torch.equal(noisy, noise))
        answer = scheduler.step(objective.compute_target(x0, noise, t_B), t, sample)
        torch.testing.assert_close(answer.pred_original_sample, x0, rtol=1e-3, atol=2e-3)
