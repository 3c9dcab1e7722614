"""A base as one checkpoint, or as ComfyUI's component files, with nothing beside it: the same model as its folder.

The authority is the diffusers folder with the same weights, loaded by diffusers and transformers.
"""

import json
import shutil
from pathlib import Path

import diffusers
import pytest
import single_files
import torch
from editing import load_encoders
from safetensors.torch import load_file, save_file
from test_families import PROMPTS, load_denoiser, make
from test_original_names import native_shapes

from lora_fp8 import families, train
from lora_fp8.errors import UserError
from lora_fp8.families import _part_files

WHOLE = ("sd15", "sd2", "sdxl")
APART = ("flux", "qwen_image", "wan")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """made(family): (diffusers folder, file). The file is one checkpoint, or a denoiser in a `models/` of ComfyUI."""
    root = tmp_path_factory.mktemp("made")
    done = {}

    def make_once(family):
        if family not in done:
            folder = single_files.FOLDERS[family](root / family / "folder")
            if family in WHOLE:
                files = {"Stable-diffusion/mix_v1.safetensors": single_files.one_file(family, folder)}
            else:
                files = single_files.component_files(family, folder)
            done[family] = folder, single_files.write(root / family / "models", files)
            single_files.fill_hub_cache(root / "hub", family, folder)
        return done[family]

    make_once.hub = root / "hub"
    return make_once


@pytest.fixture(autouse=True)
def caches(made, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(made.hub))


def assert_same(one, whole):
    """Two families give the same weights, conditioning, latents, prediction, and noising process, bit for bit."""
    expected, loaded = load_denoiser(whole), load_denoiser(one)
    mine, theirs = loaded.state_dict(), expected.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)
    for parameter in (*loaded.parameters(), *expected.parameters()):
        parameter.data = parameter.data.clone()  # last bits of sums depend on where in its file a tensor begins
    load_encoders(one)
    load_encoders(whole)
    ours, conds = one.encode_prompts(PROMPTS), whole.encode_prompts(PROMPTS)
    for cond, other in zip(ours, conds, strict=True):
        assert cond.keys() == other.keys() and all(torch.equal(cond[name], other[name]) for name in other)
    pixels = torch.rand(1, 3, 32, 48)
    latents = whole.encode_images(pixels)
    assert torch.equal(one.encode_images(pixels), latents)
    more = whole.make_image_conditioning((32, 48), (0, 0), (32, 48))
    t = torch.tensor([0.5]) if whole.objective == "FlowMatching" else torch.tensor([500])
    predictions = [
        family.predict(denoiser, latents, t, family.collate([cond | more]), 3.5)
        for family, denoiser, (cond, *_) in ((one, loaded, ours), (whole, expected, conds))
    ]
    assert torch.equal(*predictions)
    path = "scheduler/scheduler_config.json"
    theirs = json.loads((whole.folder / path).read_text(encoding="utf-8"))
    mine = json.loads((one.folder / path).read_text(encoding="utf-8"))
    scheduler = one.make_pipeline(None).scheduler.config
    assert {key: scheduler[key] for key in theirs if key in mine} == {key: theirs[key] for key in theirs if key in mine}
    assert one.get_prediction() == whole.get_prediction()


@pytest.mark.parametrize("family", [*WHOLE, *APART])
def test_files_alone_are_the_model_of_the_folder(made, family):
    folder, file = made(family)
    Family = families.get(family)
    one, whole = make(Family, file), make(Family, folder)
    one.check_parts()
    assert_same(one, whole)
    if family not in ("sd2", "sdxl"):  # their checkpoints hold layers and tensors that nothing reads
        assert one.count_encoder_bytes() == whole.count_encoder_bytes()
    assert one.count_vae_bytes() == whole.count_vae_bytes()
    found = [warning for warning in one.warnings if "these components were found" in warning]
    assert len(found) == (family in APART)
    assert make(Family, file).folder == one.folder  # remembered


def in_fp8(folder, models):
    """Write ComfyUI's files again as people download them: denoiser and largest text encoder in fp8, without scales."""
    for path in Path(folder).rglob("*.safetensors"):
        tensors = load_file(path)
        if path.parent.name != "vae" and not path.name.startswith("clip_l"):
            shrunk = {n for n, t in tensors.items() if t.ndim == 2 and "embed" not in n and "shared" not in n}
            tensors = {n: t.to(torch.float8_e4m3fn) if n in shrunk else t for n, t in tensors.items()}
        single_files.write(models, {str(path.relative_to(folder)): tensors})
    return models


@pytest.mark.parametrize(
    ("family", "fp8"), [*((family, False) for family in (*WHOLE, *APART)), *((family, True) for family in APART)]
)
def test_files_alone_train_and_are_verified(made, job, tmp_path, family, fp8):
    """A checkpoint, or component files in a folder of ComfyUI, with nothing else named."""
    _, file = made(family)
    if fp8:
        models = file.parent.parent
        file = in_fp8(models, tmp_path / "models") / file.relative_to(models)
    given = ("train.steps=1", "export.verify=true", "dataset.resolution=32", "preview.prompts=[]")
    result = train.run(job(f"model.path='{file}'", *given, family=family), progress=False)
    for verified in json.loads((result.run.path / "verify.json").read_text(encoding="utf-8")).values():
        assert verified["ok"] is True and len(verified["checks"]) > 5


@pytest.mark.parametrize("family", APART)
def test_component_files_are_named_one_by_one(made, tmp_path, family):
    """Away from any models folder, each part by its setting; Wan's text encoder in the names of its own code."""
    folder, file = made(family)
    alone = shutil.copy(file, tmp_path / file.name)
    files = {}
    for path in file.parent.parent.rglob("*.safetensors"):
        for part in ("vae", "text_encoder", "text_encoder_2"):
            kind = families.get(family).text_parts.get(part, families.get(family).vae_class if part == "vae" else "")
            if _part_files.read_config(kind, {name: tuple(t.shape) for name, t in load_file(path).items()}):
                files[part] = str(path)
    if family == "wan":
        native = tmp_path / "native.safetensors"
        tensors = single_files.weights(folder, "text_encoder")
        save_file({name: t.clone() for name, t in single_files.ORIGINAL_UMT5(tensors).items()}, native)
        files["text_encoder"] = str(native)
    one = make(families.get(family), alone, files=files)
    one.check_parts()
    assert_same(one, make(families.get(family), folder))


def test_the_short_ending_is_that_of_a_safetensors_file(made, tmp_path):
    """Black Forest Labs published ae.sft, and fluxgym keeps its files so."""
    folder, file = made("flux")
    models = file.parent.parent
    for path in models.rglob("*.safetensors"):
        short = (tmp_path / path.relative_to(models)).with_suffix(".sft")
        short.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, short)
    file = (tmp_path / file.relative_to(models)).with_suffix(".sft")
    assert_same(make(families.get("flux"), file), make(families.get("flux"), folder))
    (vae,) = (tmp_path / "vae").glob("*.sft")
    named = {"vae": str(vae.rename(tmp_path / "ae.sft"))}
    assert_same(make(families.get("flux"), file, files=named), make(families.get("flux"), folder))


def test_a_scaled_fp8_text_encoder_is_dequantized(made, tmp_path):
    """The encoder of scaled fp8 is the encoder of the dequantized weights, in float32 and in bfloat16."""
    folder, file = made("flux")
    shutil.copytree(folder, tmp_path / "folder")
    tensors, stored, plain = single_files.weights(folder, "text_encoder_2"), {}, {}
    for name, tensor in tensors.items():
        if ".layer." in name and tensor.ndim == 2 and "relative" not in name:
            scale = tensor.abs().max() / 448
            codes = (tensor / scale).to(torch.float8_e4m3fn)
            stored |= {name: codes, name.replace(".weight", ".scale_weight"): scale.reshape(1)}
            plain[name] = codes.to(torch.float32) * scale
        else:
            stored[name] = plain[name] = tensor
    stored["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    save_file({k: t.clone() for k, t in stored.items()}, tmp_path / "t5xxl_fp8_scaled.safetensors")
    save_file(plain, tmp_path / "folder" / "text_encoder_2" / "model.safetensors", {"format": "pt"})
    Family, files = families.get("flux"), {"text_encoder_2": str(tmp_path / "t5xxl_fp8_scaled.safetensors")}
    for dtype in (torch.float32, torch.bfloat16):
        one, whole = make(Family, file, dtype, files=files), make(Family, tmp_path / "folder", dtype)
        load_encoders(one)
        load_encoders(whole)
        for mine, theirs in zip(one.encode_prompts(PROMPTS), whole.encode_prompts(PROMPTS), strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_files_beside_are_judged_by_their_headers(made, tmp_path):
    """Parts of other models, of other sizes, and damaged files are passed over; two that fit are asked about."""
    _, file = made("flux")
    models = shutil.copytree(file.parent.parent, tmp_path / "models")
    (models / "text_encoders" / "broken.safetensors").write_bytes(b"nothing")
    t5 = load_file(models / "clip" / "t5xxl_fp16.safetensors")
    wider = {name: torch.zeros(t.shape[0], 96) if t.ndim == 2 else t for name, t in t5.items()}
    save_file(wider, models / "text_encoders" / "t5xxl.safetensors")
    four = made("sd15")[0] / "vae" / "diffusion_pytorch_model.safetensors"
    shutil.copy(four, models / "vae" / "ae_of_sd.safetensors")
    Family, path = families.get("flux"), models / "diffusion_models" / file.name
    (warning,) = make(Family, path).warnings
    assert "t5xxl_fp16" in warning and "ae.safetensors" in warning and "clip_l" in warning
    shutil.copy(models / "clip" / "t5xxl_fp16.safetensors", models / "text_encoders" / "t5_copy.safetensors")
    shutil.copy(models / "vae" / "ae.safetensors", models / "vae" / "sd3_vae.safetensors")
    with pytest.raises(UserError) as caught:
        make(Family, path)
    text = str(caught.value)
    assert "model.files.text_encoder_2: several files" in text
    assert "t5xxl_fp16.safetensors" in text and "t5_copy.safetensors" in text
    assert "vae" not in text.replace("VAE", "")  # equal headers, but one is called as FLUX's
    (models / "clip" / "t5xxl_fp16.safetensors").unlink()
    (models / "text_encoders" / "clip_l.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no text_encoder \(CLIPTextModel\)\. Name their files in \[model.files\]"):
        make(Family, path)


def test_wrong_files_are_reported_at_once(made):
    folder, file = made("flux")
    vae = str(file.parent.parent / "vae" / "ae.safetensors")
    wrong = {"text_encoder": vae, "t5": vae, "vae": "/nowhere/ae.safetensors", "text_encoder_2": f"{vae}.gguf"}
    with pytest.raises(UserError) as caught:
        make(families.get("flux"), file, files=wrong)
    text = str(caught.value)
    assert "model.files.text_encoder:" in text and "is not that of a CLIPTextModel" in text
    assert (
        "model.files.t5: FLUX.1 has no such component; its components are vae (AutoencoderKL), text_encoder "
        "(CLIPTextModel)"
    ) in text
    assert "model.files.vae: '/nowhere/ae.safetensors' is not a file" in text
    assert "model.files.text_encoder_2" in text


def test_a_file_takes_the_place_of_a_folders_part(made, tmp_path):
    """As `--vae` of kohya: a VAE of one's own beside a whole model, in a folder and in a checkpoint."""
    folder, file = made("sdxl")
    vae = {name: tensor + 0.01 for name, tensor in single_files.weights(folder, "vae").items()}
    changed = shutil.copytree(folder, tmp_path / "changed")
    save_file(vae, changed / "vae" / "diffusion_pytorch_model.safetensors")
    single_files.write(tmp_path, {"sdxl_vae.safetensors": single_files.ldm_vae(vae, "")})
    Family, files = families.get("sdxl"), {"vae": str(tmp_path / "sdxl_vae.safetensors")}
    expected = make(Family, changed)
    expected.load_vae()
    pixels = torch.rand(1, 3, 32, 48)
    for path in (folder, file):
        one = make(Family, path, files=files)
        one.load_vae()
        assert torch.equal(one.encode_images(pixels), expected.encode_images(pixels))
        assert one.compute_encoder_identity("vae") != make(Family, path).compute_encoder_identity("vae")


RELEASED = {
    "sd3": (
        {},
        {"pos_embed_max_size": 192, "dual_attention_layers": [], "qk_norm": None},  # 3 medium
        {
            "num_layers": 38,  # 3.5 large
            "num_attention_heads": 38,
            "caption_projection_dim": 2432,
            "pos_embed_max_size": 192,
            "dual_attention_layers": [],
        },
    ),
    "flux": ({"guidance_embeds": True}, {"guidance_embeds": False}),  # dev, schnell
    "flux2_klein": (
        {},
        {"num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32, "joint_attention_dim": 12288},  # 9B
    ),
    "wan": ({}, {"num_layers": 30, "num_attention_heads": 12, "ffn_dim": 8960}),  # 1.3B
    "aura_flow": ({}, {"pos_embed_max_size": 4096}),  # 0.1
    **dict.fromkeys(("wan22_5b", "flux2", "chroma", "qwen_image", "z_image", "hunyuan_video", "lumina2"), ({},)),
    **dict.fromkeys(("krea2", "anima", "ltx_video", "ernie_image", "ideogram4"), ({},)),
}
"""Published entries of the denoisers' config.json, in which released variants differ from `reference_config`."""


@pytest.mark.parametrize("family", RELEASED)
def test_released_sizes_are_read_from_the_header(family):
    """Of a denoiser with the published config, on the meta device, whatever config is assumed for the rest."""
    Family = families.get(family)
    for variant in RELEASED[family]:
        with torch.device("meta"):
            denoiser = getattr(diffusers, Family.denoiser_class).from_config(Family.reference_config | variant)
        shapes = {name: tuple(tensor.shape) for name, tensor in denoiser.state_dict().items()}
        sizes = Family.infer_denoiser_sizes(
            native_shapes(Family, shapes), Family.reference_config, Path("model.safetensors")
        )
        published = dict(denoiser.config)
        assert sizes and sizes == {name: published[name] for name in sizes}
        assert Family.sizes_from.keys() | variant.keys() <= sizes.keys()


def test_without_the_tokenizers_one_sentence_says_what_to_do(made, monkeypatch, tmp_path):
    _, file = made("sd15")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    with pytest.raises(
        UserError, match=r"the tokenizer of Stable Diffusion 1.5 \(a few MB\) .* set model.components to"
    ):
        make(families.get("sd15"), file)
