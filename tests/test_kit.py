"""The publish kit, read by those it is for: huggingface_hub's card parser, safetensors, PIL, JSON as A1111 reads it."""

import hashlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lora_fp8 import cli, config, families
from lora_fp8.errors import UserError
from lora_fp8.lora_files import safetensors_file
from lora_fp8.run import Run
from lora_fp8.tools import kit

FORM = {
    *("title", "slug", "kind", "version", "trigger", "description", "license", "tags", "strength", "steps", "autov3"),
    "base_model",
}


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """ask("kit", file, ...) -> (exit code, stdout, stderr)."""

    def ask(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lora-fp8", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        told = capsys.readouterr()
        assert "Traceback" not in told.err
        return code, told.out, told.err

    return ask


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file whose header tells more than its owner may want to publish."""
    path = tmp_path / "lora.safetensors"
    state = {"lora_unet_a.lora_down.weight": torch.ones(2, 8), "lora_unet_a.lora_up.weight": torch.ones(8, 2)}
    metadata = {
        "modelspec.title": "Zibo 小狐",
        "modelspec.trigger_phrase": "zibo",
        "modelspec.tags": "fox, lora",
        "modelspec.description": 'Draws "zibo": a fox.',
        "modelspec.license": "apache-2.0",
        "ss_base_model_version": "sdxl_base_v1-0",
        "ss_tag_frequency": '{"jane_doe_private": {"jane doe": 3}}',
        "ss_dataset_dirs": '{"jane_doe_private": {"n_repeats": 1}}',
        "lora_fp8_config": 'path = "jane_doe_private"',
        "ss_datasets": '[{"subsets": [{"image_dir": "/home/jane/pictures"}]}]',  # sd-scripts, musubi-tuner
        "ot_config": '{"concept_file_name": "C:/Users/jane/concepts.json"}',  # OneTrainer
    }
    safetensors_file.write_file(path, state, metadata, hashes=True)
    return path


def test_a_file_with_its_sidecars_and_nothing_private(ask: Callable, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "kit"
    code, said, wrong = ask("kit", file, "--out", out, "--base-model", "owner/sdxl", "--strength", "0.8", "--json")
    assert code == 0, wrong
    (lora,) = out.glob("*.safetensors")
    assert {path.name for path in out.iterdir()} == {
        *(lora.name, lora.with_suffix(".json").name, "README.md", "publish.en.md", "publish.zh-CN.md"),
    }
    before, after = load_file(file), load_file(lora)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert safetensors_file.hash_payload(lora) == safetensors_file.hash_payload(file)  # hosts link by it
    with safe_open(lora, "pt") as opened:
        metadata = opened.metadata()
    assert metadata["modelspec.title"] == "Zibo 小狐" and metadata["sshs_model_hash"] == safetensors_file.hash_payload(
        lora
    )
    for path in out.rglob("*"):
        assert not path.is_file() or b"jane" not in path.read_bytes(), path
        assert not path.is_file() or str(tmp_path).encode() not in path.read_bytes(), path

    sidecar = json.loads(lora.with_suffix(".json").read_text(encoding="utf-8"))
    assert (
        sidecar["activation text"] == "zibo" and sidecar["preferred weight"] == 0.8 and sidecar["sd version"] == "SDXL"
    )
    assert sidecar["trainedWords"] == ["zibo"] and sidecar["baseModel"] == ""  # one of several: nobody knows which
    assert any("Pony" in note for note in json.loads(said)["notes"])

    loud = tmp_path / "loud"
    assert ask("kit", file, "--out", loud, "--with-captions")[0] == 0
    assert b"jane" in (loud / lora.name).read_bytes()


def test_the_card_as_the_hub_reads_it(ask: Callable, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "kit"
    trigger = "zibo: a 'fox' # 1"  # would be other YAML without quotes
    assert ask("kit", file, "--out", out, "--base-model", "owner/sdxl", "--trigger", trigger)[0] == 0
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == "owner/sdxl" and card.data.license == "apache-2.0"
    assert card.data.library_name == "diffusers" and card.data.instance_prompt == trigger
    assert {"lora", "text-to-image", "template:sd-lora", "fox"} <= set(card.data.tags)
    assert '"text-to-video"' in kit.render_card(kit.Facts("wan", "A motion"), "a.safetensors", [], "a")
    assert "StableDiffusionXLPipeline" in card.text and 'Draws "zibo": a fox.' in card.text
    bare = tmp_path / "bare"
    path = tmp_path / "plain.safetensors"
    save_file(load_file(file), path)
    code, said, _ = ask("kit", path, "--out", bare, "--family", "flux", "--title", "a: b # c")
    assert code == 0 and all(f"--{name}" in said for name in ("trigger", "description", "license", "base-model"))
    card = ModelCard.load(bare / "README.md")
    assert card.data.base_model is None and "# a: b # c" in card.text and "flux" in card.data.tags


def test_a_run_with_its_pictures(ask: Callable, job: Callable, tmp_path: Path) -> None:
    path, folder, out = tmp_path / "job.toml", tmp_path / "runs" / "lora", tmp_path / "kit"
    prompts = "preview.prompts=['a cat, red', '一只狐狸']"
    settings = (prompts, "preview.negative=blurry", "preview.guidance=3.5", "preview.seed=7", "train.steps=2")
    path.write_text(config.dumps(job(*settings)), encoding="utf-8")
    assert ask("train", path)[0] == 0
    whole = (folder / "events.jsonl").read_text(encoding="utf-8")
    (folder / "events.jsonl").write_text(f'[]\n3\n{{"event": "preview"}}\n{whole}', encoding="utf-8")  # anybody's lines
    code, said, wrong = ask("kit", folder, "--out", out, "--trigger", "zibo", "--base-model", "owner/base")
    assert code == 0, wrong
    (lora,) = out.glob("*.safetensors")
    images = sorted((out / "images").iterdir())
    events = [json.loads(line) for line in whole.splitlines()]
    drawn = [event for event in events if event["event"] == "preview"][-1]["images"]
    sha = hashlib.sha256(lora.read_bytes()[safetensors_file.read_header(lora).data_begin :]).hexdigest()
    for i, (image, prompt) in enumerate(zip(images, ("a cat, red", "一只狐狸"), strict=True)):
        with Image.open(image) as opened:
            text, (width, height) = opened.text["parameters"], opened.size
        first, negative, last = text.split("\n")
        assert first == f"{prompt} <lora:{lora.stem}:1>" and negative == "Negative prompt: blurry"
        found = dict(re.findall(r'([\w ]+): ("[^"]*"|[^,]+)(?:, |$)', last))
        assert found["Seed"] == str(7 + i) and found["Steps"] == "2" and found["CFG scale"] == "3.5"
        assert found["Size"] == f"{width}x{height}" and found["Lora hashes"] == f'"{lora.stem}: {sha[:12]}"'
        with Image.open(image) as published, Image.open(folder / drawn[i]) as own:
            assert published.tobytes() == own.convert("RGB").tobytes()
    with Image.open(out / f"{lora.stem}.png") as preview:
        assert preview.size == (width, height)
    card = ModelCard.load(out / "README.md")
    assert [row["output"]["url"] for row in card.data.widget] == [f"images/{image.name}" for image in images]
    for path in out.rglob("*"):
        assert not path.is_file() or b"sitting" not in path.read_bytes(), path  # a tag of the captions
        assert not path.is_file() or str(tmp_path).encode() not in path.read_bytes(), path


def test_exported_with_its_kit(ask: Callable, job: Callable, tmp_path: Path) -> None:
    """`export --kit`: of the checkpoint that is exported, with the previews of its step and what --set says of it."""
    path, folder, out = tmp_path / "job.toml", tmp_path / "runs" / "lora", tmp_path / "kit"
    settings = ("preview.prompts=['a cat']", "preview.every=2", "preview.steps=1", "train.steps=4")
    path.write_text(config.dumps(job(*settings)), encoding="utf-8")
    assert ask("train", path)[0] == 0
    about = ("--set", "export.dtype=fp16", "--set", "export.description=A zibo.", "--set", "dataset.trigger=zibo")
    code, said, wrong = ask("export", folder, "--step", "2", "--kit", out, *about, "--json")
    told = json.loads(said)
    assert code == 0 and len(told["files"]) == 2 and f"{folder}/export/step-000002/" in told["files"][0], wrong
    (lora,) = out.glob("*.safetensors")
    assert set(told["kit"]) == {str(file) for file in out.rglob("*") if file.is_file()} and told["notes"]
    exported = {safetensors_file.hash_payload(Path(file)): Path(file).stem for file in told["files"]}
    assert exported[safetensors_file.hash_payload(lora)] == "lora_kohya"  # what most programs read
    assert {tensor.dtype for name, tensor in load_file(lora).items() if "alpha" not in name} == {torch.float16}
    sidecar = json.loads(lora.with_suffix(".json").read_text(encoding="utf-8"))
    assert sidecar["activation text"] == "zibo" and sidecar["description"] == "A zibo."
    (image,) = (out / "images").iterdir()
    of_step = [event for event in Run.open(folder).read_events() if event["event"] == "preview" and event["step"] == 2]
    with Image.open(image) as published, Image.open(folder / of_step[-1]["images"][0]) as own:
        assert published.tobytes() == own.convert("RGB").tobytes()
    before = sorted(folder.rglob("*"))
    for arguments, words in {
        ("--kit", out): "not empty",
        ("--kit", tmp_path / "b", "--preview-metadata"): "one",
    }.items():
        code, _, said = ask("export", folder, "--step", "4", *arguments)
        assert code == 2 and words in said and said.count("\n") == 1
    assert sorted(folder.rglob("*")) == before and not (tmp_path / "b").exists()  # nothing was exported either


def test_each_host_knows_each_family_or_says_so() -> None:
    """A new family gets a line in each hosts/*.toml with [base_models]: the host's word, [], or "not offered"."""
    found = kit.load_hosts()
    assert set(found) == {"civitai", "huggingface", "tensor_art", "liblib", "seaart"}
    for name, host in found.items():
        if "base_models" in host:
            listed = set(host["base_models"])
            assert listed == set(families.list_families()), f"{name}: {listed ^ set(families.list_families())}"
        for family in families.list_families():
            known = kit.list_base_names(host, family)
            assert known is None or all(isinstance(word, str) and word for word in known), (name, family)
        assert {row["value"] for row in host["fields"]} <= FORM
        assert all(row["en"] and row["zh"] for row in host["fields"]) and {"en", "zh"} == set(host["unknown"])
    assert kit.list_base_names(found["civitai"], "flux2") == ["Flux.2 D"]
    assert kit.list_base_names(found["civitai"], "sd3") is None


CIVITAI = """
Anima|AuraFlow|Chroma|CogVideoX|Ernie|Flux.1 S|Flux.1 D|Flux.1 Krea|Flux.1 Kontext|Flux.2 D|Flux.2 Klein 9B
Flux.2 Klein 9B-base|Flux.2 Klein 4B|Flux.2 Klein 4B-base|Grok|HappyHorse|HiDream|HiDream-O1|Hunyuan 1|Hunyuan Video
Ideogram 4.0|Illustrious|Kolors|Krea 2|LTXV|LTXV2|LTXV 2.3|Lens|Lumina|MAI|Mochi|NoobAI|Upscaler|Other|PixArt a|PixArt E
Pony|Pony V7|Qwen|Qwen 2|SD 1.4|SD 1.5|SD 1.5 LCM|SD 1.5 Hyper|SD 2.0|SD 2.1|SDXL 1.0|SDXL Lightning|SDXL Hyper
Wan Video 1.3B t2v|Wan Video 14B t2v|Wan Video 14B i2v 480p|Wan Video 14B i2v 720p|Wan Video 2.2 TI2V-5B
Wan Video 2.2 I2V-A14B|Wan Video 2.2 T2V-A14B|Wan Video 2.5 T2V|Wan Video 2.5 I2V|Wan Image 2.7|Wan Video 2.7
ZImageTurbo|ZImageBase|ACE Audio
"""
"""Base models that Civitai's form offers: names of `baseModelRecords` that are not hidden, from
src/shared/constants/basemodel.constants.ts of github.com/civitai/civitai, commit 0143da9, read 2026-11-23."""


def test_the_words_for_civitai_are_its_own() -> None:
    offered = {name for line in CIVITAI.split("\n") for name in line.split("|") if name}
    host = kit.load_hosts()["civitai"]
    words = {name: kit.list_base_names(host, name) for name in families.list_families()}
    assert {name: set(known) - offered for name, known in words.items() if set(known or ()) - offered} == {}
    # Text-to-video models that train here; the other Wan models draw from an image or have another VAE.
    assert words["wan"] == ["Wan Video 14B t2v", "Wan Video 1.3B t2v", "Wan Video 2.2 T2V-A14B"]
    assert [name for name, known in words.items() if known is None] == ["sana", "sd3"]
    assert not [name for name in offered if name.startswith(("Sana", "SD 3"))]


def test_limits_are_checked_against_the_file(file: Path, tmp_path: Path) -> None:
    facts = kit.collect_facts(file, {})
    host = {"extensions": [".safetensors"], "max_mb": 1, "max_header_mb": 1, "root_safetensors": 1}
    assert kit.list_problems(host, facts, file) == [
        "the host's name for Stable Diffusion XL is unknown; choose it on the page"
    ]
    (tmp_path / "second.safetensors").write_bytes(b"")
    large = tmp_path / "large.safetensors"
    save_file({"x.lora_A.weight": torch.zeros(600, 600)}, large, {"x": "y" * (2 << 20)})
    said = kit.list_problems(host | {"base_models": {"sdxl": "not offered"}}, facts, large)
    assert (
        "limit of 1 MB" in said[0]
        and "header" in said[1]
        and "only one is accepted" in said[2]
        and "does not offer" in said[3]
    )
    assert len(said) == 4 and len(kit.list_problems(host | {"extensions": [".ckpt"]}, facts, file)) == 3


def test_pages_to_paste_from(ask: Callable, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "kit"
    assert ask("kit", file, "--out", out, "--base-model", "owner/sdxl")[0] == 0
    english = (out / "publish.en.md").read_text(encoding="utf-8")
    chinese = (out / "publish.zh-CN.md").read_text(encoding="utf-8")
    for host in kit.load_hosts().values():
        assert f"## {host['title']['en']}" in english and f"## {host['title']['zh']}" in chinese
    assert "- Trigger words: zibo" in english and "- 触发词: zibo" in chinese
    hub = english.partition("## Hugging Face Hub")[2].partition("##")[0]
    assert "- base_model: owner/sdxl" in hub and "!" not in hub  # given by hand: there is nothing to choose
    assert "! choose the base model that you trained on: SDXL 1.0 | Pony | Illustrious | NoobAI" in english
    assert "! 底模请按训练所用选择其一：SDXL 1.0 | Pony | Illustrious | NoobAI" in chinese
    assert f"- Hash (AutoV3): {safetensors_file.hash_payload(file)[:12].upper()}" in english


def test_what_cannot_be_made_is_one_line(ask: Callable, file: Path, tmp_path: Path) -> None:
    plain, full = tmp_path / "plain.safetensors", tmp_path / "full"
    save_file(load_file(file), plain)
    full.mkdir()
    (full / "mine.txt").write_text("mine", encoding="utf-8")
    for arguments, words in {
        (plain, "--out", tmp_path / "a"): "--family",
        (file, "--out", full): "not empty",
        (tmp_path / "absent.safetensors", "--out", tmp_path / "a"): "cannot be read",
        (full, "--out", tmp_path / "a"): "not a run folder",
        (file, "--out", tmp_path / "a", "--layout", "kohya"): "applies to runs only",
    }.items():
        code, _, said = ask("kit", *arguments)
        assert code == 2 and words in said and said.count("\n") == 1, (words, said)
    picture = kit.Picture(tmp_path / "plain.safetensors", "no picture")  # what fails half-way leaves nothing
    with pytest.raises(UserError, match="cannot be written"):
        kit.make(file, tmp_path / "a", kit.collect_facts(file, {}), [picture])
    assert not (tmp_path / "a").exists() and [path.name for path in full.iterdir()] == ["mine.txt"]
