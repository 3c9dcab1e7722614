"""model.caption_tokens and model.clip_skip, judged by transformers' encoders and by diffusers' pipelines.

The rule of sd-scripts is written out here: a caption is padded or cut to 75 n tokens, cut into n chunks, each encoded
between BOS and EOS; of the states, the first BOS, all tokens of the chunks, and the last position stay.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from editing import load_encoders
from PIL import Image
from safetensors.torch import load_file, save_file
from test_resume import run_until

from lora_fp8 import config, families, settings, train
from lora_fp8.data.caption_variants import warn_of_truncation
from lora_fp8.errors import UserError
from lora_fp8.families.base import ModelFamily
from lora_fp8.lora_files import safetensors_file
from lora_fp8.run import Run
from lora_fp8.settings import Adapter
from lora_fp8.tools import draw, draw_sources, kit
from lora_fp8.training import text_encoders

LONG = ("sd15", "sd2", "sdxl")
SKIPS = {"sd15": 2, "sd2": 1, "sdxl": 1}
SHORT = "a cat"
OVER = "a photo of the red cat, " * 40  # more than 225 tokens
CAPTIONS = ["", SHORT, "the cat and a dog in blue, " * 9, OVER]


def make(name: str, base: Path, **given: Any) -> ModelFamily:
    model = settings.Model(family=name, path=str(base), **given)
    return families.get(name)(model, device="cpu", dtype=torch.float32)


def opened(name: str, base: Path, **given: Any) -> ModelFamily:
    """A family whose text encoders are in memory. SD 2's tokenizer and SDXL's second one pad with "!", as released."""
    family = make(name, base, **given)
    pads = {"sd15": (), "sd2": ("tokenizer",), "sdxl": ("tokenizer_2",)}[name]
    for tokenizer in pads:
        family.load_tokenizer(tokenizer).pad_token = "!"
    load_encoders(family)
    return family


def chunks_of(tokenizer: Any, caption: str, count: int) -> torch.Tensor:
    """Token ids (count, 77) by the rule, from the tokenizer's own output for the whole caption."""
    bos, *tokens, eos = tokenizer(caption, padding=False, truncation=True, max_length=75 * count + 2)["input_ids"]
    assert (bos, eos) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    rows = []
    for number in range(count):
        own = tokens[75 * number : 75 * (number + 1)]
        rows.append(([bos, *own, eos] + [tokenizer.pad_token_id] * 77)[:77])
    return torch.tensor(rows)


def joined(states: torch.Tensor) -> torch.Tensor:
    """(count, 77, D) -> (75 * count + 2, D)."""
    return torch.cat([states[0, :1], *(chunk[1:76] for chunk in states), states[-1, 76:]])


def expected(family: ModelFamily, caption: str, count: int, skip: int = 1) -> dict[str, torch.Tensor]:
    """The conditioning, by transformers alone."""
    pipeline = family.text_pipeline
    if family.name != "sdxl":
        out = pipeline.text_encoder(chunks_of(pipeline.tokenizer, caption, count), output_hidden_states=True)
        states = pipeline.text_encoder.final_layer_norm(out.hidden_states[-skip])
        return {"prompt_embeds": joined(states)}
    pairs = [(pipeline.text_encoder, pipeline.tokenizer), (pipeline.text_encoder_2, pipeline.tokenizer_2)]
    outs = [encoder(chunks_of(of, caption, count), output_hidden_states=True) for encoder, of in pairs]
    embeds = torch.cat([joined(out.hidden_states[-2]) for out in outs], -1)
    return {"prompt_embeds": embeds, "text_embeds": outs[1].text_embeds[0]}


def close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=2e-5)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", LONG)
def test_captions_are_encoded_in_chunks_of_75_tokens(name: str, count: int, tiny: Any) -> None:
    family = opened(name, tiny(name), caption_tokens=75 * count)
    for caption in CAPTIONS:
        (found,) = family.encode_prompts([caption])
        with torch.no_grad():
            close(found, expected(family, caption, count))
        assert len(found["prompt_embeds"]) == 75 * count + 2 == family.longest_prompt
    shapes = family.estimate_longest_cond(dict(family.make_empty_denoiser().config))  # type: ignore[call-overload]
    assert {key: tuple(tensor.shape) for key, tensor in found.items()} == shapes


@pytest.mark.parametrize("name", LONG)
def test_the_default_is_the_pipelines_own_encoding(name: str, tiny: Any) -> None:
    """To the bit, and through the same call; so is the identity in the cache's keys."""
    family = opened(name, tiny(name))
    (found,) = family.encode_prompts([CAPTIONS[2]])
    own = family.text_pipeline.encode_prompt(
        CAPTIONS[2], device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
    )
    assert torch.equal(found["prompt_embeds"], own[0][0])
    identities = [
        make(name, tiny(name), **given).compute_encoder_identity("text") for given in ({}, {"caption_tokens": 75})
    ]
    assert identities[0] == identities[1] and re.fullmatch("[0-9a-f]{64}", identities[0])


def test_no_two_settings_share_a_cache(tiny: Any) -> None:
    given: list[dict[str, Any]] = [{}, {"caption_tokens": 150}, {"caption_tokens": 225}, {"clip_skip": 2}]
    given += [{"caption_tokens": 225, "clip_skip": 2}, {"text_storage": "int8"}, {"prompt_weights": True}]
    made = [make("sd15", tiny("sd15"), **one) for one in given]
    assert len({family.compute_encoder_identity("text") for family in made}) == len(given)
    assert len({family.compute_encoder_identity("vae") for family in made}) == 1


def test_a_pipeline_is_as_before_after_encoding(tiny: Any) -> None:
    family = opened("sdxl", tiny("sdxl"), caption_tokens=225)
    pipeline = family.text_pipeline
    before = dict(pipeline.config), pipeline.tokenizer, pipeline.tokenizer_2
    family.encode_prompts([SHORT])
    assert before == (dict(pipeline.config), pipeline.tokenizer, pipeline.tokenizer_2)
    short = opened("sd15", tiny("sd15"), clip_skip=2)
    names = [name for name, _ in short.text_pipeline.text_encoder.named_modules()]
    short.encode_prompts([SHORT])
    assert names == [name for name, _ in short.text_pipeline.text_encoder.named_modules()]


def test_what_is_cut_at_225_tokens_is_told(tiny: Any) -> None:
    for name in LONG:
        family = make(name, tiny(name), caption_tokens=225)
        (cut,) = family.find_overlong(CAPTIONS)
        tokens = len(family.load_tokenizer("tokenizer")(OVER, add_special_tokens=False)["input_ids"])
        assert (cut.prompt, cut.limit, cut.num_lost) == (OVER, 225, tokens - 225)
        assert OVER.endswith(cut.lost) and cut.caption_tokens == 0
        middle, over = make(name, tiny(name)).find_overlong(CAPTIONS)
        assert (middle.prompt, middle.caption_tokens, over.caption_tokens) == (CAPTIONS[2], 150, 225)
        (line,) = warn_of_truncation([middle, over], 4)
        assert "the limit of the text encoder, 75 tokens" in line and "set model.caption_tokens = 225, shorten" in line


# -- clip skip


@contextmanager
def as_older_transformers(encoder: Any) -> Iterator[None]:
    """diffusers takes the layer norm from `text_model`, a level that some versions of transformers have not."""
    missing = not hasattr(encoder, "text_model")
    if missing:
        vars(encoder)["text_model"] = encoder
    yield
    if missing:
        del vars(encoder)["text_model"]


@pytest.mark.parametrize("skip", [1, 2])
@pytest.mark.parametrize("tokens", [75, 225])
def test_clip_skip_takes_an_earlier_layer_and_the_final_norm(skip: int, tokens: int, tiny: Any) -> None:
    family = opened("sd15", tiny("sd15"), clip_skip=skip, caption_tokens=tokens)
    for caption in CAPTIONS:
        (found,) = family.encode_prompts([caption])
        with torch.no_grad():
            close(found, expected(family, caption, tokens // 75, skip))
    other = opened("sd15", tiny("sd15"), clip_skip=3 - skip, caption_tokens=tokens)
    (away,) = other.encode_prompts([SHORT])
    assert not torch.allclose(family.encode_prompts([SHORT])[0]["prompt_embeds"], away["prompt_embeds"], atol=1e-2)


def test_clip_skip_2_is_diffusers_clip_skip_1(tiny: Any) -> None:
    family = opened("sd15", tiny("sd15"), clip_skip=2)
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(tiny("sd15"))
    with torch.no_grad(), as_older_transformers(pipeline.text_encoder):
        own, _ = pipeline.encode_prompt(CAPTIONS[2], "cpu", 1, False, clip_skip=1)
    assert torch.equal(family.encode_prompts([CAPTIONS[2]])[0]["prompt_embeds"], own[0])


def test_more_layers_than_there_are_are_refused(tiny: Any) -> None:
    with pytest.raises(UserError, match=r"model\.clip_skip = 3: the text encoder has 2 layers. Use at most 2"):
        make("sd15", tiny("sd15"), clip_skip=3)


def test_other_families_say_that_it_has_no_effect(job: Any, tiny: Any) -> None:
    both = ("model.caption_tokens=225", "model.clip_skip=2")
    warnings = "\n".join(config.find_unused_settings(job(*both, family="flux")))
    assert re.search(
        r"model\.caption_tokens has no effect with \S+, whose text encoders do not read captions", warnings
    )
    assert re.search(r"model\.clip_skip has no effect with \S+, whose text encoders always use", warnings)
    (warning,) = [line for line in config.find_unused_settings(job(*both, family="sdxl")) if "model." in line]
    assert warning.startswith("model.clip_skip has no effect with")
    assert make("flux", tiny("flux"), caption_tokens=225).num_chunks == 1
    with pytest.raises(UserError, match="75 to 225, and a multiple of 75"):
        job("model.caption_tokens=100")


# -- trained text encoders


@pytest.mark.parametrize(("name", "skip"), [("sd15", 1), ("sd15", 2), ("sd2", 1), ("sdxl", 1)])
def test_gradients_flow_through_all_chunks(name: str, skip: int, tiny: Any) -> None:
    """The gradient of the adapters, against torch's through transformers' encoders and the rule above."""
    given = {"clip_skip": skip} if skip > 1 else {}
    family = opened(name, tiny(name), caption_tokens=225, **given)
    captions = [SHORT, CAPTIONS[2], OVER]
    cached = family.collate([family.encode_prompts([caption])[0] for caption in captions])
    text = text_encoders.TextEncoders(family, Adapter(rank=4, alpha=4.0, dtype="fp32"), seed=0)
    text.train()
    named = {
        f"{part}.{path}": parameter
        for part, encoder in text.encoders.items()
        for path, parameter in encoder.named_parameters()
        if parameter.requires_grad
    }
    generator = torch.Generator().manual_seed(1)
    for key, parameter in named.items():
        if "lora_B" in key:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    live = text.encode(captions, cached)
    weights = {key: torch.randn(tensor.shape, generator=generator) for key, tensor in live.items()}
    sum((tensor * weights[key]).sum() for key, tensor in live.items()).backward()
    gradients = {key: parameter.grad.clone() for key, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = None
    family._text_pipeline = text.pipeline
    rows = [expected(family, caption, 3, skip) for caption in captions]
    batch = {key: torch.stack([row[key] for row in rows]) for key in live}
    close({key: tensor.detach() for key, tensor in live.items()}, {key: one.detach() for key, one in batch.items()})
    sum((tensor * weights[key]).sum() for key, tensor in batch.items()).backward()
    assert len(named) >= 12
    for key, parameter in named.items():
        assert parameter.grad.any(), key
        torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-3, atol=1e-4 * float(parameter.grad.norm()))


def test_layers_behind_the_one_that_is_read_get_no_adapter(tiny: Any) -> None:
    numbers = []
    for skip in (1, 2):
        family = make("sd15", tiny("sd15"), clip_skip=skip)
        text = text_encoders.TextEncoders(family, Adapter(), seed=0)
        named = [name for name, _ in text.encoders["text_encoder"].named_parameters() if ".lora_A" in name]
        numbers.append({re.search(r"layers\.(\d+)", name)[1] for name in named})  # type: ignore[index]
    assert numbers == [{"0", "1"}, {"0"}]


# -- runs


ANIME = ("model.caption_tokens=225", "model.clip_skip=2", "train.batch_size=2", "optimizer.lr=1e-2")
SHOWN = ("preview.prompts=['a cat']", "preview.negative=blue", "preview.guidance=2.0", "preview.every=4")


@pytest.fixture
def long_job(job: Any, pictures: Path, tmp_path: Path) -> Any:
    """A job of which one caption is longer than 75 tokens, and one longer than 225."""
    folder = tmp_path / "pictures"
    shutil.copytree(pictures, folder)
    first, second, *_ = sorted(folder.glob("*.txt"))
    first.write_text(CAPTIONS[2], encoding="utf-8")
    second.write_text(OVER, encoding="utf-8")
    options = (
        *ANIME,
        *SHOWN,
        "train.steps=2",
        "checkpoint.every=1",
        "export.verify=true",
        f"dataset.folders=[{{path='{folder}'}}]",
    )
    return lambda *more, family="sd15": job(*options, *more, family=family)


def folder_of(job: Any) -> Path:
    return Path(job.output_dir) / job.name


@pytest.mark.parametrize("text", ["false", "true"])
def test_a_run_with_225_tokens_resumes_and_verifies(text: str, long_job: Any, tree_hash: Any) -> None:
    whole = long_job(f"adapter.text_encoder={text}", "name='whole'")
    train.run(whole, progress=False)
    parts = long_job(f"adapter.text_encoder={text}", "name='parts'", "export.verify=false")
    run_until(parts, 1)
    train.run(parts, resume=True, progress=False)
    files = [sorted((folder_of(one) / "export").glob("*.safetensors")) for one in (whole, parts)]
    for first, second in zip(*files, strict=True):
        a, b = load_file(first), load_file(second)
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
        metadata = safetensors_file.read_header(first).metadata
        assert (metadata["ss_clip_skip"], metadata["ss_max_token_length"]) == ("2", "225")
    assert len(files[0]) == 2
    events = list(Run.open(folder_of(whole)).read_events())
    verified = [event for event in events if event["event"] == "verify"]
    assert len(verified) == 2 and all(event["ok"] for event in verified), verified
    (cut,) = [event["text"] for event in events if event["event"] == "warning" and "exceed the limit" in event["text"]]
    assert "1 of" in cut and "225 tokens" in cut


@pytest.mark.parametrize("name", LONG)
def test_a_preview_is_what_diffusers_draws_from_these_embeddings(name: str, long_job: Any, tiny: Any) -> None:
    """Of the base itself, before step 1, with the embeddings by the rule above and none of ours."""
    plain = ("quantize.storage=none", "model.dtype=fp32", "preview.at_start=true", "preview.steps=2", "train.steps=1")
    prompt = f"preview.prompts=['{CAPTIONS[2]}']"
    job = long_job(
        *plain, prompt, "checkpoint.every=1", "export.verify=false", f"model.clip_skip={SKIPS[name]}", family=name
    )
    train.run(job, progress=False)
    family = make(name, tiny(name), caption_tokens=225)
    load_encoders(family)
    with torch.no_grad():
        cond, negative = (expected(family, text, 3, SKIPS[name]) for text in (CAPTIONS[2], "blue"))
    given = {}
    for prefix, side in (("", cond), ("negative_", negative)):
        given[f"{prefix}prompt_embeds"] = side["prompt_embeds"][None]
        if name == "sdxl":
            given[f"{prefix}pooled_prompt_embeds"] = side["text_embeds"][None]
    pipeline = diffusers.DiffusionPipeline.from_pretrained(tiny(name))
    side = job.preview.width or job.dataset.resolution
    (image,) = pipeline(
        **given,
        width=side,
        height=side,
        guidance_scale=2.0,
        num_inference_steps=2,
        generator=torch.Generator("cpu").manual_seed(job.preview.seed),
    ).images
    with Image.open(folder_of(job) / "samples" / "step-000000-0.png") as drawn:
        assert drawn.size == image.size == (side, side)
        gap = torch.tensor(list(drawn.tobytes())).float() - torch.tensor(list(image.tobytes())).float()
    assert gap.abs().max() <= 1


def test_sdxl_trains_both_encoders_with_225_tokens(long_job: Any, tmp_path: Path) -> None:
    """Verified in diffusers' own pipeline, and drawn again from the run with its settings."""
    job = long_job("adapter.text_encoder=true", "model.clip_skip=1", family="sdxl")
    train.run(job, progress=False)
    events = list(Run.open(folder_of(job)).read_events())
    assert [event["ok"] for event in events if event["event"] == "verify"] == [True, True]
    record = draw.draw(draw.Request((folder_of(job),), with_base=False), tmp_path / "drawing")
    (image,) = record["images"]
    with Image.open(tmp_path / "drawing" / image["file"]) as ours:
        with Image.open(folder_of(job) / "samples" / "step-000002-0.png") as preview:
            assert ours.tobytes() == preview.tobytes()


def test_a_file_of_another_trainer_is_drawn_with_its_own_settings(tmp_path: Path, tiny: Any) -> None:
    """sd-scripts writes numbers, and "None" for its defaults."""
    for metadata, wanted in (
        ({"ss_clip_skip": "2", "ss_max_token_length": "225"}, (225, 2)),
        ({"ss_clip_skip": "None", "ss_max_token_length": "None"}, (75, 1)),
        ({"ss_clip_skip": "x", "ss_max_token_length": "255"}, (225, 1)),
        ({}, (75, 1)),
    ):
        file = tmp_path / "lora.safetensors"
        save_file({"a": torch.zeros(1)}, file, metadata)
        job = draw_sources.load_job((file,), str(tiny("sd15")), "sd15", ())
        assert (job.model.caption_tokens, job.model.clip_skip) == wanted
        assert draw_sources.load_job((file,), str(tiny("flux")), "flux", ()).model.clip_skip == 1
    chosen = ("model.clip_skip=1", "model.caption_tokens=150")
    save_file({"a": torch.zeros(1)}, file, {"ss_clip_skip": "2"})
    job = draw_sources.load_job((file,), str(tiny("sd15")), "sd15", chosen)
    assert (job.model.caption_tokens, job.model.clip_skip) == (150, 1)


def test_a_kit_says_the_clip_skip(long_job: Any, tmp_path: Path) -> None:
    """As A1111 writes it under an image, so that hosts show it."""
    job = long_job("export.verify=false")
    train.run(job, progress=False)
    file, job, pictures = kit.collect_from_run(folder_of(job))
    facts = kit.collect_facts(file, {}, job)
    made = kit.make(file, tmp_path / "kit", facts, pictures)
    (image,) = (made.folder / "images").iterdir()
    with Image.open(image) as opened:
        assert re.search(r", Clip skip: 2, ", opened.text["parameters"])  # type: ignore[attr-defined]
    assert "clip skip 2." in (made.folder / kit.CARD).read_text(encoding="utf-8")


def test_it_starts_from_a_file_with_all_layers_of_the_text_encoder(long_job: Any, tmp_path: Path) -> None:
    """sd-scripts writes the layers behind the one that is read too, with an up matrix of zeros."""
    options = ("adapter.text_encoder=true", "export.verify=false")
    whole = long_job(*options, "model.clip_skip=1", "export.formats=['kohya']", "name='whole'")
    train.run(whole, progress=False)
    (file,) = (folder_of(whole) / "export").glob("*.safetensors")
    tensors = load_file(file)
    last = [name for name in tensors if "lora_te_text_model_encoder_layers_1_" in name]
    assert len(last) == 6 * 3
    for name in last:
        if "lora_up" in name:
            tensors[name].zero_()
    theirs = tmp_path / "theirs.safetensors"
    save_file(tensors, theirs, safetensors_file.read_header(file).metadata)
    onward = long_job(*options, f"adapter.init_from='{theirs}'", "name='onward'")
    train.run(onward, progress=False)
    refused = long_job(*options, f"adapter.init_from='{file}'", "name='refused'")
    with pytest.raises(UserError, match="12 tensors have no matching layer"):
        train.run(refused, progress=False)
