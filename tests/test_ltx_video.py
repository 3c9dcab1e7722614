"""LTX-Video: decoders that take the last step of denoising, which of its versions a file is, and positions in time."""

import inspect
import json
import shutil

import miniatures
import pytest
import torch
from diffusers import AutoencoderKLLTXVideo, LTXPipeline
from diffusers.loaders.single_file_utils import infer_diffusers_model_type
from editing import load_encoders
from test_families import load_denoiser, make, write_header

from lora_fp8 import families, importing, settings
from lora_fp8.errors import UserError
from lora_fp8.stages import previews
from lora_fp8.stages.cache import PreviewPrompts

Family = families.get("ltx_video")

TRANSFORMER = {
    "adaln_single.linear.weight": (12288, 2048),
    "transformer_blocks.0.attn2.q_norm.weight": (2048,),
    "transformer_blocks.27.scale_shift_table": (6, 2048),
    "patchify_proj.weight": (2048, 128),
    "proj_out.weight": (128, 2048),
}
VAE = {"vae.encoder.conv_in.conv.bias": (128,), "vae.encoder.conv_out.conv.weight": (129, 512, 3, 3, 3)}
LAST_STEP = {
    "vae.decoder.last_scale_shift_table": (2, 128),
    "vae.decoder.last_time_embedder.timestep_embedder.linear_1.weight": (256, 256),
}


def prefixed(transformer, **others):
    return {f"model.diffusion_model.{key}": shape for key, shape in transformer.items()} | others


@pytest.fixture
def last_step(tmp_path):
    """The miniature of 0.9.1: its decoder is told a timestep."""
    miniatures.save(Family.name, tmp_path)
    told = json.loads((tmp_path / "vae" / "config.json").read_text(encoding="utf-8"))
    torch.manual_seed(0)
    AutoencoderKLLTXVideo.from_config(told | {"timestep_conditioning": True}).save_pretrained(tmp_path / "vae")
    return tmp_path


@pytest.mark.parametrize("num_frames", [1, 9])
def test_a_decoder_that_takes_the_last_step_is_told_when(last_step, num_frames):
    """Judged by the pipeline, which adds noise before it: none here, so that both can be compared."""
    family, (height, width) = make(Family, last_step), miniatures.get_hw(Family.name)
    pipeline = LTXPipeline.from_pretrained(last_step, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    load_encoders(family)
    drawn = {}
    for output_type in ("latent", "pt"):
        drawn[output_type] = pipeline(
            prompt="a cat",
            **{**Family.call_options, "num_frames": num_frames, "decode_noise_scale": 0.0},
            **family.make_size_inputs(width, height),
            guidance_scale=1.0,
            num_inference_steps=2,
            max_sequence_length=family.max_sequence_length,
            generator=torch.Generator().manual_seed(0),
            output_type=output_type,
        ).frames
    pixels = family.decode_latents(family.unpack(drawn["latent"], (height // 32, width // 32)))
    expected = drawn["pt"].transpose(1, 2).reshape(pixels.shape)
    torch.testing.assert_close((pixels / 2 + 0.5).clamp(0, 1), expected, rtol=1e-4, atol=1e-4)


def test_previews_with_such_a_decoder(last_step):
    """In bf16 beside a VAE in float32; drawn with the timestep and the noise that the model's makers draw with."""
    family, told = make(Family, last_step, torch.bfloat16), []
    load_encoders(family)
    conds = family.encode_prompts(["a cat"])
    negatives = family.encode_prompts(["blurry"])
    family.free_encoders()
    section = settings.Preview(prompts=["x"], steps=2, width=96, height=64, frames=9)
    pipeline = family.make_pipeline(load_denoiser(family, "fp8"))
    pipeline.vae.decoder.register_forward_pre_hook(lambda module, given: told.append(given))
    (frames,) = previews.draw_clips(family, pipeline, PreviewPrompts([section], ["blurry"], conds, negatives), 64)
    assert len(frames) == 9 and frames[0].size == (96, 64)
    ((latents, timestep),) = told
    assert latents.dtype == torch.float32 and timestep.item() == pytest.approx(0.05, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "header", "kind", "said"),
    [
        ("ltx-video-2b-v0.9", prefixed(TRANSFORMER, **VAE), "ltx-video", ""),
        ("ltx-video-2b-v0.9.1", prefixed(TRANSFORMER, **VAE, **LAST_STEP), "ltx-video-0.9.1", "another VAE"),
        ("some-transformer", TRANSFORMER, "ltx-video", ""),
    ],
)
def test_versions_that_are_trained(tmp_path, name, header, kind, said):
    """diffusers names them; the folder beside is of 0.9.0, whose autoencoder is not 0.9.1's."""
    assert infer_diffusers_model_type({key: torch.empty(shape, device="meta") for key, shape in header.items()}) == kind
    miniatures.save(Family.name, tmp_path)
    write_header(tmp_path / f"{name}.safetensors", header)
    warnings = make(Family, tmp_path / f"{name}.safetensors", components=str(tmp_path)).warnings
    assert [said in warning for warning in warnings] == [True] * bool(said)


def test_an_autoencoder_of_the_same_version_is_not_warned_of(last_step):
    write_header(last_step / "one.safetensors", prefixed(TRANSFORMER, **VAE, **LAST_STEP))
    assert make(Family, last_step / "one.safetensors", components=str(last_step)).warnings == []


NEWER = {**VAE, **LAST_STEP, "vae.encoder.conv_out.conv.weight": (129, 2048, 3, 3, 3)}
LARGE = {**TRANSFORMER, "transformer_blocks.28.scale_shift_table": (6, 4096)}
LARGE["transformer_blocks.47.scale_shift_table"] = (6, 4096)


@pytest.mark.parametrize(
    ("name", "header", "words"),
    [
        ("renamed", prefixed(TRANSFORMER, **NEWER), "is LTX-Video 0.9.5 or later.*give 0.9.0 or 0.9.1"),
        ("ltxv-2b-0.9.6-dev-04-25", TRANSFORMER, "is LTX-Video 0.9.5 or later"),
        ("ltxv-13b", prefixed(LARGE, **NEWER), "'ltx-video-0.9.7' .as diffusers calls it"),
        ("ltx-2", prefixed(TRANSFORMER | {"audio_patchify_proj.weight": (2048, 128)}), "as diffusers calls it"),
    ],
)
def test_versions_that_are_refused(tmp_path, name, header, words):
    miniatures.save(Family.name, tmp_path)
    write_header(tmp_path / f"{name}.safetensors", header)
    with pytest.raises(UserError, match=words):
        make(Family, tmp_path / f"{name}.safetensors", components=str(tmp_path))


def test_a_folder_of_a_later_version_is_refused_by_its_pipeline(tmp_path):
    miniatures.save(Family.name, tmp_path / "base")
    other = shutil.copytree(tmp_path / "base", tmp_path / "0.9.5")
    path = other / "model_index.json"
    edited = json.loads(path.read_text(encoding="utf-8")) | {"_class_name": "LTXConditionPipeline"}
    path.write_text(json.dumps(edited), encoding="utf-8")
    with pytest.raises(UserError, match="a model for LTXConditionPipeline"):
        make(Family, other)


def test_the_rate_of_clips_is_the_one_that_the_denoiser_and_previews_are_told(tmp_path):
    miniatures.save(Family.name, tmp_path)
    family, told = make(Family, tmp_path), {}

    def denoiser(**inputs):
        told.update(inputs)
        return (inputs["hidden_states"],)

    cond = {"prompt_embeds": torch.zeros(1, 2, 32), "prompt_embeds_mask": torch.ones(1, 2, dtype=torch.bool)}
    noisy = torch.randn(1, 8, 3, 2, 4)
    assert torch.equal(family.predict(denoiser, noisy, torch.tensor([0.5]), cond), noisy)
    assert (told["num_frames"], told["height"], told["width"]) == (3, 2, 4)
    frames, rate = Family.clips
    assert told["rope_interpolation_scale"] == (frames / rate, 32, 32)
    assert Family.call_options["frame_rate"] == rate and told["timestep"].item() == 500


def test_as_the_pipeline_has_it_unless_told():
    """A longer padding would be other conditioning: T5 reads the padding too."""
    usual = {name: told.default for name, told in inspect.signature(LTXPipeline.__call__).parameters.items()}
    assert usual["max_sequence_length"] == Family.prompt_tokens and usual["frame_rate"] == Family.clips[1]


def test_a_job_of_diffusion_pipe(tmp_path):
    """Lengths of 8 n + 1: the nearest below is taken."""
    (tmp_path / "main.toml").write_text(
        "dataset = 'd.toml'\n[model]\ntype = 'ltx-video'\ndiffusers_path = 'x'\nsingle_file_path = 'x.safetensors'\n"
    )
    (tmp_path / "d.toml").write_text(
        "resolutions = [512]\nframe_buckets = [1, 33, 20]\n[[directory]]\npath = 'clips'\n"
    )
    made = importing.import_file(tmp_path / "main.toml", "diffusion-pipe", "").settings
    assert made["model"] == {"family": "ltx_video", "path": "x.safetensors", "components": "x"}
    assert made["dataset"]["frames"] == [1, 17, 33]
