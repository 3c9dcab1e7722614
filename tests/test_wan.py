"""Wan: which of its models a folder or a file is."""

import json

import miniatures
import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_fp8 import families
from lora_fp8.errors import UserError
from lora_fp8.lora_files import naming
from lora_fp8.settings import Model


def wan(path, **settings):
    model = Model(family="wan", path=str(path), **settings)
    return families.get("wan")(model, device="cpu", dtype=torch.float32)


def test_a_folder_with_two_denoisers_is_refused(tmp_path):
    miniatures.save("wan", tmp_path)
    index = tmp_path / "model_index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    assert wan(tmp_path).warnings == []
    content |= {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.875}
    index.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=r"two denoisers.*model\.components"):
        wan(tmp_path)


def test_a_single_file_brings_its_own_size(tmp_path):
    """1.3 B beside a folder of 14 B, which is otherwise the same."""
    Family = families.get("wan")
    miniatures.save(Family.name, tmp_path)
    tensors = load_file(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    native = {naming.to_native(Family.native_layers, name)[0]: tensor for name, tensor in tensors.items()}
    save_file(native, tmp_path / "one.safetensors")
    path = tmp_path / "transformer" / "config.json"
    own = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**own, "num_layers": 9, "num_attention_heads": 8, "ffn_dim": 999}), encoding="utf-8")
    family = wan(tmp_path / "one.safetensors", components=str(tmp_path))
    assert family.read_denoiser_config() == own
    assert {name: t.shape for name, t in family.make_empty_denoiser().state_dict().items()} == {
        name: t.shape for name, t in family.read_denoiser_tensors()
    }


def single_file(folder, name, *, extra=None):
    """The miniature in `folder` in the original naming, as one file of this name."""
    tensors = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    native = {naming.to_native(families.get("wan").native_layers, key)[0]: tensor for key, tensor in tensors.items()}
    save_file(native | (extra or {}), folder / name)
    return wan(folder / name, components=str(folder))


def test_what_is_known_of_wan_2_2(tmp_path):
    """Its experts are told by their names, and TI2V-5B, which is another family, by the channels of its latents."""
    miniatures.save("wan", tmp_path)
    for name in ("wan2.2_t2v_high_noise_14B_fp8_scaled", "Wan2_2-T2V-A14B-LOW_fp8", "my_low_noise"):
        (warning,) = single_file(tmp_path, f"{name}.safetensors").warnings
        assert "expert of Wan 2.2" in warning and "objective.t_min" in warning and "\n" not in warning
    assert single_file(tmp_path, "wan2.1_t2v_14B.safetensors").warnings == []
    small = {"patch_embedding.weight": torch.zeros(64, 48, 1, 2, 2), "head.head.weight": torch.zeros(192, 64)}
    with pytest.raises(UserError, match=r"is Wan 2\.2 TI2V-5B.*set model\.family = 'wan22_5b'"):
        single_file(tmp_path, "small.safetensors", extra=small)


def test_image_to_video_and_vace_are_other_models():
    shapes = {"patch_embedding.weight": (5120, 16, 1, 2, 2), "head.head.weight": (64, 5120)}
    shapes |= {"blocks.0.self_attn.q.weight": (5120, 5120)}
    recognises = families.get("wan").recognises
    assert recognises(shapes)
    assert not recognises({**shapes, "patch_embedding.weight": (5120, 36, 1, 2, 2)})
    assert not recognises({**shapes, "blocks.0.cross_attn.k_img.weight": (5120, 5120)})
    assert not recognises({**shapes, "vace_blocks.0.before_proj.weight": (5120, 5120)})
