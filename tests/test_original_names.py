"""Names in the original code: every layer of a full-size denoiser has one, files are told apart, diffusers agrees.

Files are made here in the original naming from a family's own table, at the released size and with one column, so that
a wrong row or a swapped name shows. Judges are diffusers' converters of single files, where diffusers has one.
"""

import json

import diffusers
import miniatures
import pytest
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file, save_file
from test_families import make, write_header

from lora_fp8 import families, settings
from lora_fp8.families._files import PREFIXES
from lora_fp8.lora_files import naming

NAMED = ("lumina2", "sana", "hidream", "wan", "wan22_5b", "hunyuan_video", "ltx_video")
"""Families whose table says all of a published file."""

BESIDE = {
    "lumina2": {"norm_final.weight": (2304,)},
    "sana": {"pos_embed": (1, 1024, 2240), "y_embedder.y_embedding": (300, 2304)},
}
"""Tensors of the published files that no network of diffusers has."""

JUDGED = ("lumina2", "sana", "hidream", "wan", "wan22_5b", "hunyuan_video", "ltx_video")
"""Families whose single files diffusers converts by names and rows."""


ASIDE = {
    "hunyuan_video": {
        f"norm_out.linear.{kind}": f"final_layer.adaLN_modulation.1.{kind}" for kind in ("weight", "bias")
    },
}
"""Tensors that a family converts by itself, as their rows stand in another order: its halves are swapped."""


def full_size(Family):
    """The released denoiser's tensors, with one column."""
    with torch.device("meta"):
        denoiser = getattr(diffusers, Family.denoiser_class).from_config(Family.reference_config)
    return {name: tuple(tensor.shape) for name, tensor in denoiser.state_dict().items()}


def native_shapes(Family, shapes):
    """Names and shapes of a published file."""
    groups = {}
    aside = ASIDE.get(Family.name, {})
    for name in shapes.keys() - aside:
        found = naming.to_native(Family.native_layers, name)
        assert found, f"{Family.name}: {name} has no name in the original"
        native, members = found
        groups.setdefault(native, members)
        assert groups[native] == members and name in members, f"{native} stands for two layers"
    header = {}
    for native, members in groups.items():
        rows = sum(shapes[member][0] for member in members)
        header[native] = (rows, *shapes[members[0]][1:])
    header |= {native: shapes[name] for name, native in aside.items()}
    return header | BESIDE.get(Family.name, {})


def loader(Family, tmp_path):
    """The family on its miniature, with the released denoiser's config in place of its own."""
    miniatures.save(Family.name, tmp_path)
    family = Family(settings.Model(family=Family.name, path=str(tmp_path)), device="cpu", dtype=torch.float32)
    family.read_denoiser_config = lambda: dict(Family.reference_config)
    return family


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", NAMED)
def test_a_full_size_file_is_recognised_by_its_family_alone(name, prefix):
    Family = families.get(name)
    header = {prefix + key: shape for key, shape in native_shapes(Family, full_size(Family)).items()}
    assert families.describe(header)[1] == name
    # A relative of another size states the side that differs, and is the closer one.
    known = [other for other in families.list_families() if families.get(other).recognises(header)]
    assert known == [name] or known == ["wan", "wan22_5b"] and name == "wan22_5b"


@pytest.mark.parametrize("name", NAMED)
def test_every_tensor_of_a_full_size_file_finds_its_place(name, tmp_path):
    Family = families.get(name)
    shapes = full_size(Family)
    header = {f"model.diffusion_model.{key}": shape for key, shape in native_shapes(Family, shapes).items()}
    assert loader(Family, tmp_path).convert_checkpoint(header).keys() == shapes.keys()


SANA = {
    "0.6 B": {"num_layers": 28, "num_attention_heads": 36, "num_cross_attention_heads": 16}
    | {"cross_attention_head_dim": 72, "cross_attention_dim": 1152},
    "1.5, 1.6 B": {"qk_norm": "rms_norm_across_heads"},
    "1.5, 4.8 B": {"num_layers": 60, "qk_norm": "rms_norm_across_heads"},
}
"""What the released sizes have in their config.json in place of Sana 1.6 B's."""


@pytest.mark.parametrize("variant", SANA)
@pytest.mark.parametrize("told", [False, True], ids=["no config", "config of 1.6 B"])
def test_the_sizes_of_sana_are_read_from_the_file(variant, told, tmp_path):
    Family = families.get("sana")
    expected = Family.reference_config | SANA[variant]
    with torch.device("meta"):
        denoiser = diffusers.SanaTransformer2DModel.from_config(expected)
    shapes = {name: tuple(tensor.shape) for name, tensor in denoiser.state_dict().items()}
    write_header(tmp_path / "one.safetensors", native_shapes(Family, shapes))
    miniatures.save(Family.name, tmp_path / "base")
    path = tmp_path / "base" / "transformer" / "config.json"
    path.unlink()
    if told:
        named = {"_class_name": "SanaTransformer2DModel", "cross_attention_dim": 2240, "num_attention_heads": 70}
        path.write_text(json.dumps(Family.reference_config | named), encoding="utf-8")
    encoder = tmp_path / "base" / "text_encoder" / "config.json"
    wide = json.loads(encoder.read_text(encoding="utf-8")) | {"hidden_size": denoiser.config.caption_channels}
    encoder.write_text(json.dumps(wide), encoding="utf-8")  # the miniature's is too narrow for these denoisers
    family = make(Family, tmp_path / "one.safetensors", components=str(tmp_path / "base"))
    found = family.make_empty_denoiser()
    assert {name: tuple(tensor.shape) for name, tensor in found.state_dict().items()} == shapes
    assert {key: found.config[key] for key in expected} == expected


@pytest.mark.parametrize("name", JUDGED)
def test_the_table_says_what_diffusers_converter_does(name, tmp_path):
    Family = families.get(name)
    header = native_shapes(Family, full_size(Family))
    generator = torch.Generator().manual_seed(0)
    # Only the rows matter to a conversion.
    small = {key: (*shape[:1], *(1 for _ in shape[1:])) for key, shape in header.items()}
    tensors = {
        key: torch.randint(0, 2**31, shape, generator=generator, dtype=torch.int32) for key, shape in small.items()
    }
    conversion = loader(Family, tmp_path).convert_checkpoint(header)
    mine = {ours: change(tensors[key]) if change else tensors[key] for ours, (key, change) in conversion.items()}
    convert = SINGLE_FILE_LOADABLE_CLASSES[Family.denoiser_class]["checkpoint_mapping_fn"]
    theirs = convert(checkpoint=dict(tensors), config=Family.reference_config)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[ours].squeeze(), theirs[ours].squeeze()) for ours in theirs)


@pytest.mark.parametrize("name", JUDGED)
def test_a_single_file_is_the_same_model(name, tmp_path):
    """The miniature written in the original naming gives every tensor back, bit for bit."""
    Family = families.get(name)
    miniatures.save(Family.name, tmp_path / "base")
    tensors = load_file(tmp_path / "base" / Family.denoiser_name / "diffusion_pytorch_model.safetensors")
    tensors = {key: torch.randn(tensor.shape) for key, tensor in tensors.items()}  # norms are all ones else
    written = {native: tensors[ours].roll(len(tensors[ours]) // 2, 0) for ours, native in ASIDE.get(name, {}).items()}
    for ours in tensors.keys() - ASIDE.get(name, {}):
        native, members = naming.to_native(Family.native_layers, ours)
        written[native] = torch.cat([tensors[member] for member in members])
    written |= {key: torch.zeros(shape) for key, shape in BESIDE.get(name, {}).items()}
    save_file(written, tmp_path / "one.safetensors")
    model = settings.Model(family=name, path=str(tmp_path / "one.safetensors"), components=str(tmp_path / "base"))
    found = dict(Family(model, device="cpu", dtype=torch.float32).read_denoiser_tensors())
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[ours], tensors[ours]) for ours in tensors)
