"""Where base models come from: what a person may give as `model.path`, and what is known of released models."""

import functools
import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_fp8 import config, families
from lora_fp8.common import messages
from lora_fp8.errors import UserError, UserErrors
from lora_fp8.families import _published
from lora_fp8.families.sources import Reference, known_bases, parse, reference
from lora_fp8.settings import Job

ROOT = Path(__file__).resolve().parent.parent
HF, MIRROR, MS, CIVITAI = (
    "https://huggingface.co",
    "https://hf-mirror.com",
    "https://modelscope.cn",
    "https://civitai.com",
)

SAME = {
    "the id": ["owner/name", " owner/name\n", '"owner/name"', "'owner/name'", "“owner/name”", "hf://owner/name"],
    "the page": [f"{HF}/owner/name", f"{HF}/owner/name/", "huggingface.co/owner/name", f"{HF}/owner/name.git"],
    "pages beside it": [f"{HF}/owner/name/tree/main", f"{HF}/owner/name?library=diffusers", "https://hf.co/owner/name"],
    "the mirror": [f"{MIRROR}/owner/name", f"{MIRROR}/owner/name/tree/main", "hf-mirror.com/owner/name"],
}


@pytest.mark.parametrize("given", [text for texts in SAME.values() for text in texts])
def test_a_repository_is_the_same_in_every_spelling(given: str) -> None:
    assert parse(given) == Reference("hub", "owner/name", repo="owner/name")


OTHERS = {
    f"{HF}/owner/name/tree/fp16": Reference("hub", "owner/name", repo="owner/name", revision="fp16"),
    f"{HF}/owner/name/tree/refs%2Fpr%2F7": Reference("hub", "owner/name", repo="owner/name", revision="refs/pr/7"),
    f"{HF}/owner/name/commit/0a1b": Reference("hub", "owner/name", repo="owner/name", revision="0a1b"),
    f"{MIRROR}/owner/name/resolve/main/sub/a%20b.safetensors?download=true": Reference(
        "hub",
        f"{HF}/owner/name/resolve/main/sub/a b.safetensors",
        repo="owner/name",
        revision="main",
        file="sub/a b.safetensors",
    ),
    f"{HF}/owner/name/blob/main/README.md": Reference("hub", "owner/name", repo="owner/name"),
    f"{MS}/models/owner/name/files": Reference("modelscope", "modelscope:owner/name", repo="owner/name"),
    "https://www.modelscope.cn/models/owner/name/summary": Reference(
        "modelscope", "modelscope:owner/name", repo="owner/name"
    ),
    f"{MS}/models/owner/name/file/view/v2/a.safetensors": Reference(
        "modelscope", "modelscope:owner/name@v2/a.safetensors", repo="owner/name", revision="v2", file="a.safetensors"
    ),
    f"{CIVITAI}/models/12/some-name?modelVersionId=345": Reference("civitai", "civitai:345", model="12", version="345"),
    f"{CIVITAI}/api/download/models/345?type=Model": Reference("civitai", "civitai:345", version="345"),
    "civitai:345": Reference("civitai", "civitai:345", version="345"),
    "urn:air:sdxl:checkpoint:civitai:12@345": Reference("civitai", "civitai:345", model="12", version="345"),
    f"{CIVITAI}/models/12": Reference("civitai", f"{CIVITAI}/models/12", model="12"),
    "demo": Reference("demo", "demo"),
    "C:\\models\\x.safetensors": Reference("path", "C:\\models\\x.safetensors"),
    '"C:\\my models\\x"': Reference("path", "C:\\my models\\x"),
    "file:///home/me/a%20b.safetensors": Reference("path", "/home/me/a b.safetensors"),
    "~/models/x": Reference("path", "~/models/x"),
    "models/x.safetensors": Reference("path", "models/x.safetensors"),
    "models/x.gguf": Reference("path", "models/x.gguf"),
}


@pytest.mark.parametrize("given", OTHERS)
def test_addresses_and_paths_are_read(given: str) -> None:
    assert parse(given) == OTHERS[given]


@pytest.mark.parametrize("given", OTHERS)
def test_the_normal_form_stays_as_it_is(given: str) -> None:
    name = parse(given).name
    assert parse(name).name == name
    assert parse(name).file == parse(given).file and parse(name).repo == parse(given).repo


WRONG = {
    f"{HF}/datasets/owner/name": "not a model on Hugging Face",
    f"{HF}/spaces/owner/name": "not a model on Hugging Face",
    f"{HF}/models": "names no model",
    f"{MS}/models/owner": "names no model",
    "https://example.com/owner/name": "name'. Download the file",
    f"{CIVITAI}/user/someone": "not the page of a Civitai model",
    "civitai:pony": "no version",
}


@pytest.mark.parametrize("given", WRONG)
def test_other_addresses_get_one_sentence(given: str) -> None:
    with pytest.raises(UserError, match=re.escape(WRONG[given])) as caught:
        parse(given)
    text = str(caught.value)
    assert given in text and text.startswith("model.path: ") and "\n" not in text
    assert re.search("[一-鿿]", messages.translate("zh-CN", caught.value.args[0]))


def test_the_hub_of_this_machine_is_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:8123")
    assert parse("http://127.0.0.1:8123/owner/name/tree/v2") == Reference(
        "hub", "owner/name", repo="owner/name", revision="v2"
    )


def load(path: str, revision: str = "") -> Job:
    folder = "[[dataset.folders]]\npath = 'pictures'"
    model = f"[model]\nfamily = 'sdxl'\npath = {json.dumps(path)}\nrevision = {json.dumps(revision)}"
    return config.loads(f"name = 'a'\n{model}\n{folder}\n")


def test_the_config_keeps_the_normal_form() -> None:
    job = load(f' "{HF}/owner/name/tree/fp16" ')
    assert (job.model.path, job.model.revision) == ("owner/name", "fp16")
    assert config.loads(config.dumps(job)) == job
    assert load(f"{HF}/owner/name/tree/fp16", "fp16").model.revision == "fp16"
    assert load("./owner/name").model.path == "./owner/name"
    with pytest.raises(UserErrors, match="names the revision 'fp16', but model.revision is 'main'"):
        load(f"{HF}/owner/name/tree/fp16", "main")
    with pytest.raises(UserErrors) as caught:
        load("https://example.com/x")
    assert len(caught.value.problems) == 1 and "example.com" in caught.value.problems[0]


SIMILAR = {
    "stabilityai/stable-difusion-xl-base-9.9": "stabilityai/stable-diffusion-xl-base-1.0",
    "stabilityAI/stable-diffusion-xl-base-1.0": "stabilityai/stable-diffusion-xl-base-1.0",
    "somebody/FLUX.1-dev": "black-forest-labs/FLUX.1-dev",
    "black-forest-labs/FLUX.1-dex": "black-forest-labs/FLUX.1-dev",
    "Wan-AI/Wan2.1-T2V-1.3B": "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
    "runwayml/stable-diffusion-v1-5": "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "Qwen Image": "Qwen/Qwen-Image",
    "somebody/my-cats": None,
    "/home/me/models/thing": None,
    "Qwen/Qwen-Image": None,
}


@pytest.mark.parametrize("given", SIMILAR)
def test_a_misspelt_base_is_recognised(given: str) -> None:
    assert reference.suggest(parse(given)) == SIMILAR[given]


def test_every_family_has_known_bases_and_they_are_whole() -> None:
    ids = [base.id for base in known_bases.read()]
    assert len(set(ids)) == len(ids)
    for base in known_bases.read():
        family = families.get(base.family)
        assert parse(base.id).kind == "hub"
        weighed = {name for name in (family.denoiser_name, "vae", *family.text_parts)}
        assert base.gigabytes.keys() <= weighed and {family.denoiser_name, "vae"} <= base.gigabytes.keys(), base.id
        assert base.unconfirmed <= {"size", "gate", "licence"} and ("gate" in base.unconfirmed) == (base.gated is None)
        assert re.search("[一-鿿]", messages.translate("zh-CN", base.purpose)), base.purpose
    # Ideogram 4 is distributed as single files.
    assert {base.family for base in known_bases.read()} == set(families.list_families()) - {"ideogram4"}
    examples = tomllib.loads((ROOT / "lora_fp8/tools/hosts/huggingface.toml").read_text(encoding="utf-8"))[
        "base_models"
    ]
    assert {one for names in examples.values() for one in names} <= set(ids)
    for name in families.list_families():
        usual = families.get(name).example_base
        if parse(usual).kind == "hub" and not usual.startswith("models/"):
            assert known_bases.list_of_family(name)[0].id == usual or name in ("sd3",)


@functools.cache
def count_weights(cls: str, config: str) -> int:
    """Count the weights of a class of diffusers or transformers with this config (JSON), on the meta device."""
    import diffusers
    import torch
    import transformers

    entries = json.loads(config)
    with torch.device("meta"):
        if hasattr(diffusers, cls):
            model = getattr(diffusers, cls).from_config(entries)
        else:
            model = getattr(transformers, cls)(getattr(transformers, cls).config_class(**entries))
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}  # a tied one once
    return sum(tensor.numel() for tensor in tensors.values())


def count_denoiser(family: type, sizes: Mapping[str, Any]) -> int:
    config = family.reference_config | {key: None if value == "" else value for key, value in sizes.items()}
    return count_weights(family.denoiser_class, json.dumps(config))


def test_the_denoisers_sizes_follow_from_the_released_configs() -> None:
    for base in known_bases.read():
        family = families.get(base.family)
        counted = count_denoiser(family, base.sizes)
        bytes_each = base.gigabytes[family.denoiser_name] * known_bases.GIGABYTE / counted
        # 0.02 of SD 3's are its position embeddings, which it keeps in float32
        assert min(abs(bytes_each - size) for size in (2, 4)) < 0.025, (base.id, bytes_each)


FACTS = tomllib.loads((ROOT / "tests" / "data" / "facts.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [name for name, facts in FACTS.items() if "weights" in facts])
def test_estimates_without_files_count_the_weights_of_the_released_files(name: str) -> None:
    """The sizes of denoiser, VAE and text encoders, against the files on the hub; a header takes up to 0.1 %."""
    family, usual = families.get(name), next(iter(known_bases.list_of_family(name)), None)
    published = {part: size / each for part, (size, each) in FACTS[name]["weights"].items()}
    counted: dict[str, float] = {}
    for part in published:
        if part == family.denoiser_name:
            counted[part] = count_denoiser(family, usual.sizes if usual else {})
        elif part == "vae":
            counted[part] = count_weights(family.vae_class, json.dumps(_published.find_released_vae(family)))
        elif part in family.published:
            cls = family.text_parts[part].rpartition(".")[2]
            counted[part] = count_weights(cls, json.dumps(family.published[part]))
    assert counted == {part: pytest.approx(published[part], rel=1e-3) for part in counted}
    text = [size for part, size in published.items() if part.startswith("text_encoder")]
    if text:  # the largest, in whole millions
        assert family.text_millions[0] * 1e6 == pytest.approx(max(text), rel=1e-3, abs=6e5)
