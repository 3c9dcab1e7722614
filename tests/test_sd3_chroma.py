"""Stable Diffusion 3 and Chroma1: what the contract of all families does not ask.

Judges are diffusers' converters of single files. Only the rows of a matrix matter to its conversion, so that every
matrix has one column there; headers have full shapes.
"""

import json

import diffusers
import miniatures
import pytest
import torch
from diffusers.loaders import single_file_utils
from editing import load_encoders
from original_code import ldm_vae
from safetensors.torch import load_file, save_file
from test_families import load_denoiser, make, write_header

from lora_fp8 import families
from lora_fp8.errors import UserError
from lora_fp8.families import _files
from lora_fp8.lora_files import naming

CONVERTERS = {
    "sd3": single_file_utils.convert_sd3_transformer_checkpoint_to_diffusers,
    "chroma": single_file_utils.convert_chroma_transformer_checkpoint_to_diffusers,
}
SD3 = {
    "medium": {"qk_norm": None, "dual_attention_layers": [], "pos_embed_max_size": 192},
    "3.5-medium": {},
    "3.5-large": {
        "num_layers": 38,
        "num_attention_heads": 38,
        "caption_projection_dim": 2432,
        "dual_attention_layers": [],
        "pos_embed_max_size": 192,
    },
}


def native_shapes(Family, denoiser_config):
    """Names and shapes of a single file, from a denoiser of diffusers on the meta device."""
    with torch.device("meta"):
        denoiser = getattr(diffusers, Family.denoiser_class).from_config(denoiser_config)
    shapes = {}
    for name, tensor in denoiser.state_dict().items():
        native, _ = naming.to_native(Family.native_layers, name)
        rows, *rest = tensor.shape
        shapes[native] = (rows + shapes.get(native, (0,))[0], *rest)
    return shapes


def without_config(Family, folder):
    """A folder to complement a single file with, which says nothing of the denoiser."""
    miniatures.save(Family.name, folder)
    (folder / Family.denoiser_name / "config.json").unlink()
    return str(folder)


@pytest.mark.usefixtures("foreign_components")
@pytest.mark.parametrize("name", CONVERTERS)
def test_full_size_files_are_read_as_diffusers_reads_them(name, tmp_path):
    Family = families.get(name)
    shapes = native_shapes(Family, Family.reference_config)
    write_header(tmp_path / "big.safetensors", shapes)
    family = make(Family, tmp_path / "big.safetensors", components=without_config(Family, tmp_path / "rest"))
    generator = torch.Generator().manual_seed(0)

    def numbers(rows, *rest):
        return torch.randint(0, 2**31, (rows, *(1 for _ in rest)), generator=generator, dtype=torch.int32)

    tensors = {key: numbers(*shape) for key, shape in shapes.items()}
    conversion = family.convert_checkpoint(_files.read_header(tmp_path / "big.safetensors"))
    mine = {new: change(tensors[key]) if change else tensors[key] for new, (key, change) in conversion.items()}
    left = dict(tensors)
    theirs = CONVERTERS[name](left)
    assert not left, "the converter takes what it reads out of the dict"
    assert mine.keys() == theirs.keys() == family.make_empty_denoiser().state_dict().keys()
    assert all(torch.equal(mine[new], theirs[new]) for new in theirs)


@pytest.mark.parametrize("name", CONVERTERS)
def test_a_file_with_a_vae_and_sizes_of_its_own(name, tmp_path):
    """The VAE in the file is taken, and the file's own sizes, whatever the components beside it were made for."""
    Family = families.get(name)
    miniatures.save(Family.name, tmp_path / "base")
    weights = tmp_path / "base" / Family.denoiser_name / "diffusion_pytorch_model.safetensors"
    denoiser = {key: torch.randn_like(tensor) for key, tensor in load_file(weights).items()}
    tensors, halves = {}, ("norm_out.linear", "transformer_blocks.2.norm1_context.linear") if name == "sd3" else ()
    for key in denoiser:
        native, members = naming.to_native(Family.native_layers, key)
        parts = denoiser[key].chunk(2)[::-1] if key.rpartition(".")[0] in halves else [denoiser[m] for m in members]
        tensors[f"model.diffusion_model.{native}"] = torch.cat(parts) if len(parts) > 1 else denoiser[key]
    vae = tmp_path / "base" / "vae" / "diffusion_pytorch_model.safetensors"
    save_file({**tensors, **ldm_vae(load_file(vae))}, tmp_path / "one.safetensors")
    whole = make(Family, tmp_path / "base")
    whole.load_vae()
    vae.unlink()
    weights.unlink()
    if name == "sd3":  # another size of the same architecture: what the file itself tells wins
        path = tmp_path / "base" / "transformer" / "config.json"
        edit = {"num_layers": 9, "qk_norm": None, "dual_attention_layers": []}
        path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | edit), encoding="utf-8")
    one = make(Family, tmp_path / "one.safetensors", components=str(tmp_path / "base"))
    load_encoders(one)
    pixels = torch.rand(1, 3, *miniatures.get_hw(Family.name))
    assert torch.equal(one.encode_images(pixels), whole.encode_images(pixels))
    loaded = load_denoiser(one).state_dict()
    assert loaded.keys() == denoiser.keys() and all(torch.equal(loaded[key], denoiser[key]) for key in denoiser)


@pytest.mark.usefixtures("foreign_components")
@pytest.mark.parametrize("variant", SD3)
def test_the_sizes_of_sd3_are_read_from_the_file(variant, tmp_path):
    Family = families.get("sd3")
    released = {"in_channels": 16, "joint_attention_dim": 4096, "pooled_projection_dim": 2048}
    told = Family.reference_config | released | SD3[variant]
    shapes = native_shapes(Family, told)
    write_header(tmp_path / "big.safetensors", shapes)
    family = make(Family, tmp_path / "big.safetensors", components=without_config(Family, tmp_path / "rest"))
    assert family.read_denoiser_config() == told
    assert family.get_architecture_name() == f"stable-diffusion-3-{variant.replace('3.5', '5')}"
    read = family.convert_checkpoint(_files.read_header(tmp_path / "big.safetensors"))
    assert read.keys() == family.make_empty_denoiser().state_dict().keys()
    controlnet = {key: shape for key, shape in shapes.items() if not key.startswith("final_layer")}
    assert not Family.recognises(controlnet)
    assert not Family.recognises({**shapes, "x_embedder.proj.weight": (1536, 33, 2, 2)})  # inpainting


def test_what_sd3_never_adapts():
    """The last block's text queries are read by nothing; two norms have their rows in another order in the original."""
    Family = families.get("sd3")
    with torch.device("meta"):
        denoiser = diffusers.SD3Transformer2DModel.from_config(Family.reference_config)
    names = Family.choose_adapter_layers(denoiser)
    assert len(names) == 24 * 12 - 3 + 13 * 4 - 1  # the last block has no text behind its attention
    assert "transformer_blocks.22.attn.add_q_proj" in names and "transformer_blocks.23.attn.add_k_proj" in names
    norms = Family.choose_adapter_layers(denoiser, ["norm1_context.linear"])
    assert len(norms) == 23 and "transformer_blocks.23.norm1_context.linear" not in norms
    for name in ("transformer_blocks.23.attn.add_q_proj", "norm_out.linear"):
        with pytest.raises(UserError):
            Family.choose_adapter_layers(denoiser, [f"^{name}"])


def test_sd3_turbo_is_told_to_be_distilled(tmp_path):
    Family = families.get("sd3")
    folder = tmp_path / "models--stabilityai--stable-diffusion-3.5-large-turbo" / "snapshots" / "a"
    miniatures.save(Family.name, folder)
    turbo = make(Family, folder)
    (told,) = turbo.warnings
    assert "distilled" in told and "3.5 large" in told and turbo.choose_guidance() == 1.0
    folder.rename(tmp_path / "medium")
    medium = make(Family, tmp_path / "medium")
    assert medium.warnings == [] and medium.choose_guidance() == 4.5
    path = tmp_path / "medium" / "transformer" / "config.json"
    told = json.loads(path.read_text(encoding="utf-8")) | {"dual_attention_layers": []}
    path.write_text(json.dumps(told), encoding="utf-8")
    assert make(Family, tmp_path / "medium").choose_guidance() == 7.0


def test_the_fast_chroma_is_told_and_drawn_without_guidance(tmp_path):
    Family = families.get("chroma")
    miniatures.save(Family.name, tmp_path / "models--lodestones--Chroma1-HD")
    base = make(Family, tmp_path / "models--lodestones--Chroma1-HD")
    assert base.warnings == [] and base.choose_guidance() == 3.0
    base.folder.rename(tmp_path / "models--lodestones--Chroma1-Flash")
    flash = make(Family, tmp_path / "models--lodestones--Chroma1-Flash")
    (told,) = flash.warnings
    assert "Chroma1-HD" in told and flash.choose_guidance() == 1.0


def test_chroma_does_not_see_padding(tmp_path):
    """diffusers' own pipeline does: when this fails in its first half, `mend_` has had its day."""
    Family = families.get("chroma")
    miniatures.save(Family.name, tmp_path)
    pipeline = diffusers.ChromaPipeline.from_pretrained(tmp_path, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)

    def draw(length):
        options = {"height": 16, "width": 24, "num_inference_steps": 2, "guidance_scale": 1.0, "output_type": "latent"}
        generator = torch.Generator().manual_seed(0)
        return pipeline("a cat", max_sequence_length=length, generator=generator, **options).images

    assert not torch.allclose(draw(8), draw(32), rtol=1e-3, atol=1e-4)
    Family.mend_(pipeline)
    torch.testing.assert_close(draw(8), draw(32), rtol=1e-4, atol=1e-5)


def test_chroma_keeps_one_padding_token(tmp_path):
    Family = families.get("chroma")
    miniatures.save(Family.name, tmp_path)
    family = make(Family, tmp_path)
    load_encoders(family)
    tokenizer = family.load_tokenizer("tokenizer")
    prompts = ["a cat", "a photo of the red dog and the blue cat", "z" * 99]
    lengths = [len(cond["prompt_embeds"]) for cond in family.encode_prompts(prompts)]
    assert lengths == [min(32, len(tokenizer(prompt).input_ids) + 1) for prompt in prompts]


def test_chroma_is_told_apart_from_its_relatives():
    Family = families.get("chroma")
    shapes = native_shapes(Family, Family.reference_config)
    radiance = {key: shape for key, shape in shapes.items() if not key.startswith(("final_layer", "img_in"))}
    assert Family.recognises(shapes) and not Family.recognises(radiance)
    assert not families.get("flux").recognises(shapes)
