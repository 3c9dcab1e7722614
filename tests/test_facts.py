"""Every family file against what the makers publish (`data/facts.toml`).

The comparison with diffusers runs on miniatures, which hide the constants of the released models: a miniature's
tokenizer is shorter than any limit, its layers are few, and previews without guidance look like others. No model is
built here; `test_adapter_targets_at_full_size` in test_families.py finds the layers of the table in the denoisers.
"""

import inspect
import tomllib
from pathlib import Path

import diffusers
import pytest

from lora_fp8 import families
from lora_fp8.precision import name_matches

FACTS = tomllib.loads((Path(__file__).parent / "data" / "facts.toml").read_text(encoding="utf-8"))
SCHNELL = {"guidance_embeds": False}
"""In the config of FLUX.1-schnell, which differs from dev in nothing else."""


@pytest.fixture(params=families.list_families())
def name(request):
    return request.param


@pytest.fixture
def facts(name):
    return FACTS[name]


@pytest.fixture
def family(name):
    return family_of(name, FACTS[name].get("guidance_input", False))


def family_of(name, guidance_embeds):
    """A family object without files, whose denoiser's config says nothing but this."""
    Family = families.get(name)
    family = Family.__new__(Family)
    family.read_denoiser_config = lambda: {"guidance_embeds": guidance_embeds}
    return family


def tuples(value):
    """Nested lists as tuples: TOML has no others, and files of configs have no tuples."""
    return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value


def test_every_family_has_an_entry():
    assert FACTS.keys() == set(families.list_families())
    required = {"latent_pixels", "token_pixels", "targets", "layers", "precise"}
    assert all(required <= facts.keys() for facts in FACTS.values())


def test_prompt_tokens(name, facts, family):
    pipeline = getattr(diffusers, family.pipeline_class)
    encode = getattr(pipeline, "encode_prompt", None)
    default = inspect.signature(encode).parameters.get("max_sequence_length") if encode else None
    # Without a length of ours, `encode_prompt` is called without one.
    told = family.get_trained_length() or (default and default.default) or None
    assert told == facts.get("prompt_tokens")


@pytest.mark.parametrize("name", ["flux"])
def test_prompt_tokens_of_schnell(name):
    # Its model card; black-forest-labs/flux src/flux/util.py: load_t5(max_length=256 if is_schnell else 512)
    assert family_of(name, guidance_embeds=False).get_trained_length() == 256


def test_sizes(facts, family):
    multiple = facts["token_pixels"]
    assert family.bucket_multiple == multiple
    assert family.patch * facts["latent_pixels"] == multiple
    if "native_size" in facts:  # the side of a square of this area, on the grid of buckets
        width, height = facts["native_size"]
        assert family.native_resolution == round((width * height) ** 0.5 / 64) * 64


def test_tokens(facts, family):
    if "tokens" not in facts:
        return  # a UNet, which has no tokens of its own
    width, height, frames, tokens = facts["tokens"]
    latents_hw = height // facts["latent_pixels"], width // facts["latent_pixels"]
    clip = (family.count_latent_frames(frames),) if frames > 1 else ()
    assert family.count_image_tokens((*clip, *latents_hw)) == tokens


def test_clips_and_control_images(facts, family):
    assert family.clips == tuple(facts.get("clips", (0, 0)))
    assert family.controls == tuple(facts.get("controls", (0, 0)))


def test_guidance(facts, family):
    assert family.embeds_guidance == facts.get("guidance_input", False)
    if "guidance" in facts:
        assert family.default_guidance == facts["guidance"]


def test_shift_of_training(facts, family):
    assert family.train_shift == facts.get("train_shift")


def test_targets(facts, family):
    assert sorted(family.adapter_targets) == sorted(facts["targets"])


@pytest.mark.parametrize("kind", ["precise", "modulation"])
def test_layers_that_are_treated_apart(kind, facts, family):
    layers, entries = facts.get(kind, []), {"precise": family.keep_precise, "modulation": family.modulation}[kind]
    assert [layer for layer in layers if not any(name_matches(layer, entry) for entry in entries)] == []
    assert [entry for entry in entries if not any(name_matches(layer, entry) for layer in layers)] == []


def test_text_encoders_that_can_be_trained(facts, family):
    sizes = {name: [about.width, about.hidden, about.num_layers] for name, about in family.trained_text.items()}
    assert sizes == facts.get("trained_text", {})


def test_config_of_the_released_denoiser(facts, family):
    """`reference_config` states what differs from the defaults of diffusers' class."""
    parameters = inspect.signature(getattr(diffusers, family.denoiser_class)).parameters
    config = {key: parameter.default for key, parameter in parameters.items()} | family.reference_config
    published = {key: tuples(value) for key, value in facts.get("config", {}).items()}
    assert {key: tuples(config[key]) for key in published} == published
