"""HiDream-I1 in training: the routed experts pass gradients on, and patches are put together as in inference."""

import json

import miniatures
import pytest
import torch
from editing import load_encoders
from safetensors.torch import load_file, save_file
from test_families import make

from lora_fp8 import families, precision, settings, train
from lora_fp8.errors import UserError


def hidream(tmp_path):
    Family = families.get("hidream")
    miniatures.save(Family.name, tmp_path)
    family = Family(settings.Model(family="hidream", path=str(tmp_path)), device="cpu", dtype=torch.float32)
    load_encoders(family)
    denoiser = family.make_empty_denoiser()
    precision.fill_(denoiser, family.read_denoiser_tensors(), torch.float32, "cpu")
    return family, denoiser


def test_training_mode_answers_as_inference_does_and_learns_through_the_experts(tmp_path):
    family, denoiser = hidream(tmp_path)
    denoiser.requires_grad_(True)
    cond = family.collate(family.encode_prompts(["a cat", "a dog"]))
    t_B = torch.tensor([0.3, 0.8])
    for hw in ((48, 32), (64, 64)):  # padded to the most patches, and not
        noisy = torch.randn(2, 4, *hw, generator=torch.Generator().manual_seed(0), requires_grad=True)
        answers = [family.predict(denoiser.train(mode), noisy, t_B, cond) for mode in (False, True)]
        torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-5)
        answers[1].square().sum().backward()
        for number in range(4):
            expert = denoiser.double_stream_blocks[0].block.ff_i.experts[number].w1.weight
            assert expert.grad is not None and expert.grad.norm() > 0
            expert.grad = None
    # by differences: the gradient of the whole is that of the function, in which no part is held constant
    family.dtype, denoiser = torch.float64, denoiser.double()
    generator = torch.Generator().manual_seed(0)
    noisy, way = (torch.randn(2, 4, 48, 32, dtype=torch.float64, generator=generator) for _ in range(2))

    def loss(x):
        return family.predict(denoiser, x, t_B, cond).square().sum()

    (slope,) = torch.autograd.grad(loss(noisy.requires_grad_()), noisy)
    with torch.no_grad():
        # The same numbers each time: where a token on this way is routed to another expert, the function jumps.
        rise = (loss(noisy + 1e-4 * way) - loss(noisy - 1e-4 * way)) / 2e-4
    torch.testing.assert_close((slope * way).sum(), rise, rtol=2e-3, atol=1e-6)


def test_a_bucket_with_too_many_patches_is_refused_before_anything_is_encoded(job, monkeypatch):
    Family = families.get("hidream")
    monkeypatch.setattr(Family, "load_vae", lambda self: pytest.fail("too late"))
    mine = job("dataset.resolution=256", "export.formats=['diffusers']", family="hidream")
    with pytest.raises(UserError, match=r"dataset\.resolution: .* at most 256 patches.*; lower the resolution to 1024"):
        train.run(mine)
    family = make(Family, mine.model.path)
    with pytest.raises(UserError, match="128 x 144 has 18 x 16"):
        family.check_bucket(128, 144)
    for width, height in ((128, 128), (256, 256), (112, 144)):  # what is square may be larger: see the transformer
        family.check_bucket(width, height)


def test_what_is_distilled_is_told(tmp_path):
    Family = families.get("hidream")
    miniatures.save(Family.name, tmp_path)
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps({"_class_name": "FlowMatchLCMScheduler", "shift": 6.0}), encoding="utf-8")
    distilled = make(Family, tmp_path)
    (warning,) = distilled.warnings
    assert "distilled" in warning and distilled.choose_guidance() == 1.0
    # a single file beside these components is what its name says
    save_file(load_file(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors"), tmp_path / "one.safetensors")
    for name, words, guidance in (
        ("hidream_i1_full_fp16", [], 5.0),
        ("hidream_i1_dev_bf16", ["distilled"], 1.0),
        ("hidream_e1_full_bf16", ["an editing model"], 5.0),
        ("other", ["distilled"], 1.0),
    ):
        (tmp_path / "one.safetensors").replace(tmp_path / f"{name}.safetensors")
        one = make(Family, tmp_path / f"{name}.safetensors", components=str(tmp_path))
        assert len(one.warnings) == len(words) and one.choose_guidance() == guidance
        assert all(word in warning for word, warning in zip(words, one.warnings, strict=True))
        (tmp_path / f"{name}.safetensors").replace(tmp_path / "one.safetensors")
