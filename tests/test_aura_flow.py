"""AuraFlow: what the contract of all families does not ask. The judge of single files is diffusers' converter."""

import diffusers
import miniatures
import pytest
import torch
from diffusers.loaders.single_file_utils import convert_auraflow_transformer_checkpoint_to_diffusers
from original_code import ldm_vae
from safetensors.torch import load_file, save_file
from test_families import make, write_header

from lora_fp8 import families, train
from lora_fp8.errors import UserError
from lora_fp8.families import _files
from lora_fp8.lora_files import naming


def test_a_file_as_published_for_comfyui_is_the_same_model(tmp_path):
    """`model.` before the denoiser's names and `vae.` before the VAE's."""
    Family = families.get("aura_flow")
    miniatures.save(Family.name, tmp_path / "base")
    weights = load_file(tmp_path / "base" / "transformer" / "diffusion_pytorch_model.safetensors")
    weights = {name: torch.randn_like(tensor) for name, tensor in weights.items()}
    tensors = {}
    for name, tensor in weights.items():
        half = len(tensor) // 2 if name == "norm_out.linear.weight" else 0
        tensors[f"model.{naming.to_native(Family.native_layers, name)[0]}"] = tensor.roll(half, 0)
    whole = make(Family, tmp_path / "base")
    whole.load_vae()
    vae = ldm_vae(whole.vae.state_dict())
    tensors |= {key.replace("first_stage_model.", "vae."): tensor for key, tensor in vae.items()}
    save_file(tensors, tmp_path / "one.safetensors")
    (tmp_path / "base" / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    one = make(Family, tmp_path / "one.safetensors", components=str(tmp_path / "base"))
    one.load_vae()
    pixels = torch.rand(1, 3, *miniatures.get_hw(Family.name))
    assert torch.equal(one.encode_images(pixels), whole.encode_images(pixels))
    found = dict(one.read_denoiser_tensors())
    assert found.keys() == weights.keys() and all(torch.equal(found[key], weights[key]) for key in weights)


@pytest.mark.usefixtures("foreign_components")
@pytest.mark.parametrize("positions", [4096, 9216])
def test_full_size_files_are_read_as_diffusers_reads_them(positions, tmp_path):
    Family = families.get("aura_flow")
    released = {"joint_attention_dim": 2048, "num_mmdit_layers": 4, "num_single_dit_layers": 32}
    told = Family.reference_config | released | {"pos_embed_max_size": positions}
    with torch.device("meta"):
        denoiser = diffusers.AuraFlowTransformer2DModel.from_config(told)
    rows = {name: tuple(tensor.shape) for name, tensor in denoiser.state_dict().items()}
    shapes = {naming.to_native(Family.native_layers, name)[0]: shape for name, shape in rows.items()}
    assert len(shapes) == len(rows)
    assert [name for name in families.list_families() if families.get(name).recognises(shapes)] == ["aura_flow"]
    write_header(tmp_path / "big.safetensors", shapes)
    miniatures.save(Family.name, tmp_path / "rest")
    (tmp_path / "rest" / "transformer" / "config.json").unlink()
    family = make(Family, tmp_path / "big.safetensors", components=str(tmp_path / "rest"))
    assert family.read_denoiser_config() == told
    generator = torch.Generator().manual_seed(0)
    # Only the rows of a matrix matter to its conversion: one column each.
    small = {key: (*shape[:1], *(1 for _ in shape[1:])) for key, shape in shapes.items()}
    tensors = {key: torch.randint(0, 2**31, shape, generator=generator) for key, shape in small.items()}
    conversion = family.convert_checkpoint(_files.read_header(tmp_path / "big.safetensors"))
    mine = {new: change(tensors[key]) if change else tensors[key] for new, (key, change) in conversion.items()}
    theirs = convert_auraflow_transformer_checkpoint_to_diffusers(dict(tensors))
    assert mine.keys() == theirs.keys() == rows.keys()
    assert all(torch.equal(mine[new], theirs[new]) for new in theirs)
    assert len(Family.choose_adapter_layers(denoiser)) == 4 * 14 + 32 * 7
    with pytest.raises(UserError):
        Family.choose_adapter_layers(denoiser, ["^norm_out.linear"])


def test_an_image_beyond_the_positions_is_one_line_before_anything_is_encoded(job, monkeypatch):
    """diffusers takes other positions then, silently."""
    Family = families.get("aura_flow")
    monkeypatch.setattr(Family, "load_vae", lambda self: pytest.fail("too late"))
    mine = job("dataset.resolution=256", family="aura_flow")
    with pytest.raises(UserError, match=r"dataset\.resolution: .* accepts up to 128 pixels a side, but a bucket is"):
        train.run(mine)
    family = make(Family, mine.model.path)
    family.check_bucket(128, 64)
    with pytest.raises(UserError):
        family.check_bucket(64, 144)
