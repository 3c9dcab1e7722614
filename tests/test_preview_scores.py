"""Scores of previews: cosines of CLIP and DINO as transformers computes them, logged, drawn, and without influence."""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import cosine_similarity

from lora_fp8.cli.events import print_event
from lora_fp8.data.decoding import open_image
from lora_fp8.errors import UserError, UserErrors
from lora_fp8.plan import plan as planning
from lora_fp8.plan.score_model import find_score_model
from lora_fp8.run.run_log import RunLog
from lora_fp8.settings import Job
from lora_fp8.stages import preview_scores
from lora_fp8.train import run

SHORT = ("train.steps=4", "checkpoint.every=4", "preview.steps=1", "preview.every=2", "preview.prompts=['a cat', 'b']")
TEXT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SIGHT = TEXT | {"image_size": 32, "patch_size": 8}


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[[str], Path]) -> Path:
    """A CLIP of miniature size with random weights, whose tokenizer is that of the miniature base."""
    folder = tmp_path_factory.mktemp("clip")
    tokenizer = transformers.CLIPTokenizer.from_pretrained(tiny("sd15") / "tokenizer")
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 16, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.CLIPConfig(text_config=TEXT | sizes, vision_config=SIGHT, projection_dim=8)
    torch.manual_seed(0)
    transformers.CLIPModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    pixels = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    pixels.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DINOv2 of miniature size, which reads no text."""
    folder = tmp_path_factory.mktemp("dino")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    transformers.Dinov2Model(transformers.Dinov2Config(**sizes)).save_pretrained(folder)
    pixels = transformers.BitImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    pixels.save_pretrained(folder)
    return folder


def events_of(result: Any, kind: str) -> list[dict[str, Any]]:
    return [event for event in result.run.read_events() if event["event"] == kind]


def embed(model: Any, processor: Any, pictures: list[Image.Image]) -> torch.Tensor:
    """One picture at a time, through the parts of the model itself."""
    rows = []
    for picture in pictures:
        pixels = processor(images=picture, return_tensors="pt")["pixel_values"]
        if hasattr(model, "visual_projection"):
            rows.append(model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output))
        else:
            rows.append(model(pixel_values=pixels).last_hidden_state[:, 0])
    return torch.cat(rows)


@pytest.mark.parametrize("kind", ["clip", "dino"])
@torch.no_grad()
def test_scores_are_transformers_cosines(
    kind: str, job: Callable[..., Job], request: pytest.FixtureRequest, pictures: Path
) -> None:
    folder = request.getfixturevalue(kind)
    with torch.enable_grad():
        result = run(job(*SHORT, f"preview.score_model={folder}"), progress=False)
    scores = events_of(result, "score")
    assert [event["step"] for event in scores] == [0, 2, 4]
    model = transformers.AutoModel.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    known = sorted(path for path in pictures.iterdir() if path.suffix != ".txt")
    references = embed(model, processor, [open_image(io.BytesIO(path.read_bytes())) for path in known])
    for event in scores:
        assert event["references"] == len(known)
        drawn = [Image.open(result.run.samples / f"step-{event['step']:06d}-{i}.png").convert("RGB") for i in (0, 1)]
        mine = embed(model, processor, drawn)
        pairs = [cosine_similarity(a, b, dim=0).item() for a in mine for b in references]
        assert event["likeness"] == pytest.approx(sum(pairs) / len(pairs), abs=1e-4)
        if kind == "dino":
            assert "prompt_fit" not in event
            continue
        tokenizer = transformers.CLIPTokenizer.from_pretrained(folder)
        asked = {"padding": "max_length", "max_length": 16, "return_tensors": "pt"}
        read = [model.text_model(**tokenizer(text, **asked)).pooler_output for text in ("a cat", "b")]
        texts = [model.text_projection(state)[0] for state in read]
        fits = [cosine_similarity(a, b, dim=0).item() for a, b in zip(mine, texts, strict=True)]
        assert event["prompt_fit"] == pytest.approx(sum(fits) / 2, abs=1e-4)
    log = RunLog(result.run.path / "events.jsonl").read()
    assert log.scores["likeness"].list_points() == [(event["step"], event["likeness"]) for event in scores]


def test_a_scored_training_gives_the_same_bytes(job: Callable[..., Job], clip: Path) -> None:
    plain = run(job(*SHORT), progress=False)
    scored = run(job(*SHORT, "name=scored", f"preview.score_model={clip}"), progress=False)
    states = [next(of.run.checkpoints.glob("step-*")).joinpath("adapter.safetensors") for of in (plain, scored)]
    assert states[0].read_bytes() == states[1].read_bytes()
    assert not events_of(plain, "score")


def test_held_out_images_are_what_previews_are_compared_with(job: Callable[..., Job], clip: Path) -> None:
    given = ("validation.pictures=2", "validation.every=4", f"preview.score_model={clip}")
    result = run(job(*SHORT, *given), progress=False)
    assert {event["references"] for event in events_of(result, "score")} == {2}


def test_where_only_clips_are_held_out_trained_images_are_compared(job: Callable[..., Job]) -> None:
    plan = planning.make(job("validation.pictures=1", "validation.every=1"))
    (clip,) = (replace(example, frames=(0, 1)) for example in plan.images.held_out)
    plan.images.held_out[:] = [clip]
    assert preview_scores.choose_references(SimpleNamespace(plan=plan, job=plan.job)) == plan.images.examples


def test_a_failure_is_told_once_and_ends_nothing(
    job: Callable[..., Job], clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise AttributeError("no such layer\nsecond line")  # a model may be anything

    monkeypatch.setattr(preview_scores.PreviewScorer, "score", fail)
    result = run(job(*SHORT, f"preview.score_model={clip}"), progress=False)
    texts = [event["text"] for event in events_of(result, "warning") if "scores" in event["text"]]
    assert texts == ["the previews have no scores: no such layer"] and events_of(result, "done")


def test_a_model_without_some_of_its_weights_gives_no_scores(
    job: Callable[..., Job], clip: Path, tmp_path: Path
) -> None:
    shutil.copytree(clip, tmp_path / "part")
    weights = load_file(tmp_path / "part" / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})
    result = run(job(*SHORT, f"preview.score_model={tmp_path / 'part'}"), progress=False)
    (text,) = [event["text"] for event in events_of(result, "warning") if "scores" in event["text"]]
    assert "lacks 1 weights of a CLIPModel: visual_projection.weight" in text
    assert not events_of(result, "score") and events_of(result, "done")


def test_scores_are_printed_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    for scores, text in (({"likeness": 0.5, "prompt_fit": 0.25}, "image similarity 0.500, prompt match 0.250"),
                         ({"likeness": 0.5}, "image similarity 0.500")):  # fmt: skip
        print_event({"event": "score", "step": 2, "references": 3, **scores})
        assert capsys.readouterr().out.strip() == f"scores of the previews at step 2: {text}"


def test_what_is_no_score_model_is_told_before_training(job: Callable[..., Job], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'a/b': there is no such folder.*`hf download a/b`"):
        find_score_model("a/b")
    with pytest.raises(UserError, match="not a Hugging Face id"):
        find_score_model("a/b/c/d")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    with pytest.raises(UserError, match="type 'llama'; models that compare images are clip"):
        find_score_model(str(tmp_path))
    with pytest.raises((UserError, UserErrors), match="type 'llama'"):
        planning.make(job(*SHORT, f"preview.score_model={tmp_path}"))
    planning.make(job(f"preview.score_model={tmp_path}"))  # no previews, so it is not read
