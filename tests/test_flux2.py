"""FLUX.2 and the models with its VAE: single files are told apart, and read as diffusers reads them."""

import json
from pathlib import Path

import diffusers
import miniatures
import pytest
import torch
from diffusers.loaders import single_file_utils
from diffusers.pipelines.ideogram4 import pipeline_ideogram4
from editing import load_encoders
from safetensors.torch import load_file, save_file
from test_families import make, write_header

from lora_fp8 import families, settings, train
from lora_fp8.errors import UserError
from lora_fp8.families._files import PREFIXES
from lora_fp8.lora_files import naming

FLUX2 = single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers
CONVERTERS = {
    "flux2": FLUX2,
    "flux2_klein": FLUX2,
    "ernie_image": single_file_utils.convert_ernie_image_transformer_checkpoint_to_diffusers,
}
NAMES = (*CONVERTERS, "ideogram4")


def native_shapes(Family, denoiser_config=None):
    """Names and shapes of the released single file, from a denoiser on the meta device."""
    with torch.device("meta"):
        denoiser = getattr(diffusers, Family.denoiser_class).from_config(denoiser_config or Family.reference_config)
    shapes = {}
    for name, tensor in denoiser.state_dict().items():
        native, _ = naming.to_native(Family.native_layers, name)
        rows, *rest = tensor.shape
        shapes[native] = (rows + shapes.get(native, (0,))[0], *rest)
    return shapes


def written(Family, folder, path):
    """The miniature in `folder` as one file in the original naming, and its tensors, which are all made to tell."""
    place = folder / Family.denoiser_name / "diffusion_pytorch_model.safetensors"
    tensors = {name: torch.randn_like(tensor) for name, tensor in load_file(place).items()}
    parts = {}
    for name in tensors:
        native, members = naming.to_native(Family.native_layers, name)
        parts[native] = torch.cat([tensors[member] for member in members])
    if "norm_out.linear.weight" in tensors:
        parts["final_layer.adaLN_modulation.1.weight"] = tensors["norm_out.linear.weight"].roll(
            len(tensors["norm_out.linear.weight"]) // 2, dims=0
        )
    save_file(parts, path)
    return tensors


@pytest.mark.parametrize("name", CONVERTERS)
def test_a_file_is_recognised_by_one_family_and_read_as_diffusers_reads_it(name, tmp_path):
    """At full size; only the rows matter to the conversion, so that every matrix has one column in it."""
    Family = families.get(name)
    shapes = native_shapes(Family)
    for prefix in PREFIXES:
        header = {prefix + key: shape for key, shape in shapes.items()}
        assert [other for other in families.list_families() if families.get(other).recognises(header)] == [name]
    miniatures.save(Family.name, tmp_path)
    family = make(Family, tmp_path)
    family.read_denoiser_config = lambda: dict(Family.reference_config)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        key: torch.randint(0, 2**31, (rows, *(1 for _ in rest)), generator=generator, dtype=torch.int32)
        for key, (rows, *rest) in shapes.items()
    }
    conversion = family.convert_checkpoint(shapes)
    mine = {new: change(tensors[key]) if change else tensors[key] for new, (key, change) in conversion.items()}
    theirs = CONVERTERS[name](dict(tensors))
    assert mine.keys() == theirs.keys() == family.make_empty_denoiser().state_dict().keys()
    assert all(torch.equal(mine[new], theirs[new]) for new in theirs)


@pytest.mark.parametrize("name", NAMES)
def test_a_lora_in_the_original_naming_is_one_to_diffusers(name):
    """Of every layer that the family adapts, at full size; the judge is the pipeline's own reading of LoRA files."""
    Family = families.get(name)
    with torch.device("meta"):
        denoiser = getattr(diffusers, Family.denoiser_class).from_config(Family.reference_config)
    layers = Family.choose_adapter_layers(denoiser)
    state = {}
    for native, members in dict(naming.to_native(Family.native_layers, layer) for layer in layers).items():
        state[f"diffusion_model.{native}.lora_A.weight"] = torch.zeros(1, 1)
        state[f"diffusion_model.{native}.lora_B.weight"] = torch.zeros(len(members), 1)
    read = getattr(diffusers, Family.pipeline_class).lora_state_dict(state)
    assert read.keys() == {f"transformer.{layer}.lora_{x}.weight" for layer in layers for x in "AB"}


def test_ideogram4_is_recognised_at_full_size():
    Family = families.get("ideogram4")
    for prefix in PREFIXES:
        header = {prefix + key: shape for key, shape in native_shapes(Family).items()}
        assert [other for other in families.list_families() if families.get(other).recognises(header)] == ["ideogram4"]


@pytest.mark.parametrize(
    ("name", "refused", "title"),
    [("ideogram4", "of_flux2", "Ideogram 4"), ("flux2", "of_ideogram", "FLUX.2-dev")],
)
def test_latents_are_not_normalised_as_a_relatives(name, refused, title, tmp_path):
    """The two VAEs have one class and one config; only the numbers of their batch norms tell."""
    Family = families.get(name)
    miniatures.save(Family.name, tmp_path)
    assert make(Family, tmp_path).warnings == []
    path = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    means = {
        "of_ideogram": [0.01984364, 0.10149707, 0.29689495, 0.27188619, -0.21445648, -0.15979549, 0.05021099],
        "of_flux2": [-0.06762, -0.07152, -0.07534, -0.07449, 0.02228, 0.01800, 0.01420],
    }
    for whose, mean in means.items():
        tensors["bn.running_mean"][: len(mean)] = torch.tensor(mean)
        save_file(tensors, path)
        if whose == refused:
            other = "FLUX.2" if whose == "of_flux2" else "Ideogram 4"
            with pytest.raises(UserError, match=f"is {other}'s VAE.*{title}'s diffusers folder"):
                make(Family, tmp_path)
        else:
            assert make(Family, tmp_path).warnings == []


def test_ideogram4_is_told_what_it_was_captioned_with(tmp_path):
    Family = families.get("ideogram4")
    miniatures.save(Family.name, tmp_path)
    family = make(Family, tmp_path)
    lines = (Path(__file__).parents[1] / "configs" / "ideogram4.toml").read_text(encoding="utf-8").splitlines()
    shown = [line[1:].strip() for line in lines if line.startswith("#   ")]
    example = " ".join(shown[2:])
    assert json.loads(example)["high_level_description"] and shown[0].startswith("lora-fp8")
    assert family.list_caption_caveats([example, ""]) == []
    (told,) = family.list_caption_caveats([example, "mychar at a window", "mychar, smiling"])
    assert told.startswith("2 of 3 captions are not JSON")


def test_ideogram4_reads_prompts_to_the_limit_that_its_pipeline_refuses_beyond(tmp_path):
    """The template's end counts; and what pads a shorter prompt of a batch stands in front of it."""
    Family = families.get("ideogram4")
    miniatures.save(Family.name, tmp_path)
    family = make(Family, tmp_path)
    load_encoders(family)
    conds = family.encode_prompts(["a red dog", "red dog " * 99])
    assert len(conds[1]["prompt_embeds"]) == family.max_sequence_length > len(conds[0]["prompt_embeds"])
    batch = family.collate(conds)
    assert torch.equal(batch["prompt_embeds_mask"], batch["prompt_embeds"].any(-1))
    assert not batch["prompt_embeds_mask"][0, 0] and batch["prompt_embeds_mask"][:, -1].all()


def test_ideogram4_draws_its_t_as_the_pipeline_places_its_steps():
    """Quantiles of many draws against the pipeline's own schedule, at 1024 x 768 pixels."""
    objective = families.get("ideogram4").get_objective_type()({}, settings.Objective())
    drawn = objective.sample_t([torch.Generator().manual_seed(i) for i in range(4000)], 64 * 48)
    mu = pipeline_ideogram4._resolution_aware_mu(1024, 768, base_mu=0.0)
    steps = pipeline_ideogram4._logit_normal_sigmas(10, mu, std=1.5)[1:]
    quantiles = torch.quantile(drawn, torch.linspace(0.9, 0.1, 9))
    torch.testing.assert_close(quantiles, steps, atol=0.02, rtol=0)
    part = families.get("ideogram4").get_objective_type()({}, settings.Objective(t_min=0.2, t_max=0.7))
    cut_off = part.sample_t([torch.Generator().manual_seed(i) for i in range(2000)], 64 * 48)
    cut_off = cut_off.quantile(torch.tensor([0.0, 0.5, 1.0]))
    left = drawn[(drawn > 0.2) & (drawn < 0.7)].median()
    torch.testing.assert_close(cut_off, torch.tensor([0.2, left, 0.7]), atol=0.02, rtol=0)


def test_guidance_that_ideogram4_cannot_give_is_refused_before_anything_is_encoded(job, monkeypatch):
    monkeypatch.setattr(families.get("ideogram4"), "load_vae", lambda self: pytest.fail("too late"))
    mine = job("preview.prompts=['a cat']", "preview.guidance=4.0", "export.formats=['diffusers']", family="ideogram4")
    with pytest.raises(UserError, match=r"preview.guidance = 4.0: .* accepted: 1.0 or 'auto'"):
        train.run(mine)


@pytest.mark.parametrize("name", NAMES)
def test_a_single_file_is_the_same_model(name, tmp_path):
    Family = families.get(name)
    miniatures.save(Family.name, tmp_path / "base")
    tensors = written(Family, tmp_path / "base", tmp_path / "one.safetensors")
    family = make(Family, tmp_path / "one.safetensors", components=str(tmp_path / "base"))
    found = {new: weight for new, weight in family.read_denoiser_tensors()}
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[new], tensors[new]) for new in tensors)


def test_the_last_norm_gets_no_adapter():
    """Its halves are swapped in the original: a LoRA of it would not be the same in another program."""
    Family = families.get("flux2")
    with torch.device("meta"):
        denoiser = diffusers.Flux2Transformer2DModel.from_config(Family.reference_config)
    assert "norm_out.linear" in dict(denoiser.named_modules())
    with pytest.raises(UserError, match="norm_out"):
        Family.choose_adapter_layers(denoiser, ["^norm_out.linear"])


def test_klein_is_read_in_both_sizes(tmp_path):
    """The sizes are the file's own, whatever config.json says; a text encoder of the other size is refused."""
    Family = families.get("flux2_klein")
    nine = {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288}
    shapes = native_shapes(Family, Family.reference_config | nine)
    write_header(tmp_path / "nine.safetensors", shapes)
    miniatures.save(Family.name, tmp_path / "base")
    path = tmp_path / "base" / "transformer" / "config.json"
    path.write_text(json.dumps(Family.reference_config | {"_class_name": Family.denoiser_class}), encoding="utf-8")
    with pytest.raises(
        UserError, match=r"3 \* text_encoder.hidden_size = 48, and transformer has joint_attention_dim = 12288"
    ):
        make(Family, tmp_path / "nine.safetensors", components=str(tmp_path / "base"))
    path = tmp_path / "base" / "text_encoder" / "config.json"
    path.write_text(json.dumps({"hidden_size": 4096}), encoding="utf-8")
    vae_config = tmp_path / "base" / "vae" / "config.json"
    held = json.loads(vae_config.read_text(encoding="utf-8"))
    vae_config.write_text(json.dumps(held | {"latent_channels": 32}), encoding="utf-8")  # as the released one has
    family = make(Family, tmp_path / "nine.safetensors", components=str(tmp_path / "base"))
    expected = family.make_empty_denoiser().state_dict()
    assert sum(tensor.numel() for tensor in expected.values()) == pytest.approx(9e9, rel=0.02)
    assert family.convert_checkpoint(shapes).keys() == expected.keys()
    assert family.get_architecture_name() == "Flux.2-klein-9b"
    path.write_text(json.dumps({"hidden_size": 2560}), encoding="utf-8")
    assert make(Family, tmp_path / "base").get_architecture_name() == "Flux.2-klein-4b"


def test_distilled_klein_is_told_and_drawn_without_guidance(tmp_path):
    Family = families.get("flux2_klein")
    miniatures.save(Family.name, tmp_path)
    assert make(Family, tmp_path).warnings == [] and make(Family, tmp_path).choose_guidance() == 4.0
    index = tmp_path / "model_index.json"
    told = json.loads(index.read_text(encoding="utf-8")) | {"is_distilled": True}
    index.write_text(json.dumps(told), encoding="utf-8")
    family = make(Family, tmp_path)
    assert "is_distilled" in family.warnings[0] and family.choose_guidance() == 1.0
    assert family.make_pipeline(None).config.is_distilled


@pytest.mark.parametrize("mark", ["folder", "config", "file"])
def test_distilled_ernie_is_told_and_drawn_without_guidance(mark, tmp_path):
    Family = families.get("ernie_image")
    folder = tmp_path / ("ERNIE-Image-Turbo" if mark == "folder" else "base")
    miniatures.save(Family.name, folder)
    path = folder / "transformer" / "config.json"
    if mark == "config":
        told = json.loads(path.read_text(encoding="utf-8")) | {"use_lora": False}
        path.write_text(json.dumps(told), encoding="utf-8")
    family = make(Family, folder)
    if mark == "file":
        assert family.warnings == [] and family.choose_guidance() == 4.0
        written(Family, folder, tmp_path / "ernie-image-turbo.safetensors")
        family = make(Family, tmp_path / "ernie-image-turbo.safetensors", components=str(folder))
    assert "ERNIE-Image-Turbo" in family.warnings[0] and family.choose_guidance() == 1.0
