"""Captions by models: real loading code on random miniatures of four architectures and a tagger, made here."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    BlipImageProcessorPil,
    CLIPImageProcessorPil,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessorPil,
    ViTImageProcessorPil,
)
from waiting import LONG_SECONDS

from lora_fp8.data import captions, decoding
from lora_fp8.errors import Stopped, UserError
from lora_fp8.tools import captioner

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {% for c in m['content'] %}{% if c['type'] == 'image' %}IMAGE"
    "{% else %}{{ c['text'] }}{% endif %}{% endfor %} {% endfor %}assistant:"
)
TAGS = ["long_hair", "smile", "^_^", "red", "1girl"]


def tokenizer(*special: str, ends: bool = False, **options) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges."""
    words = ["<pad>", "<s>", "</s>", "<unk>", *special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    known = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    made.post_processor = (
        processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)]) if ends else None
    )
    extra = options.pop("extra_special_tokens", list(special))
    return PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=extra, **known, **options)


def blip(folder: Path) -> None:
    words = tokenizer("[DEC]", ends=True)
    config = transformers.BlipConfig(
        vision_config={**SIZES, "num_hidden_layers": 1, "image_size": 32, "patch_size": 16},
        text_config={
            **SIZES,
            **{"vocab_size": len(words), "encoder_hidden_size": 16, "num_hidden_layers": 1},
            **{"bos_token_id": 4, "sep_token_id": 2, "pad_token_id": 0, "eos_token_id": 2},
        },
        projection_dim=8,
        image_text_hidden_size=16,
    )
    transformers.BlipForConditionalGeneration(config).save_pretrained(folder)
    pixels = BlipImageProcessorPil(size={"height": 32, "width": 32})
    transformers.BlipProcessor(pixels, words).save_pretrained(folder)


LLAMA = {**SIZES, "num_hidden_layers": 1, "num_key_value_heads": 2, "max_position_embeddings": 512}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def llava(folder: Path) -> None:
    words = tokenizer("<image>")
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SIZES, num_hidden_layers=2, image_size=32, patch_size=16),
        text_config=transformers.LlamaConfig(vocab_size=len(words), **LLAMA, **ENDS),
        image_token_index=4,
    )
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    pixels = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    transformers.LlavaProcessor(
        pixels,
        words,
        patch_size=16,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE.replace("IMAGE", "<image>"),
    ).save_pretrained(folder)


def qwen(folder: Path) -> None:
    special = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    words = tokenizer(*special)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: 4 + i for i, name in enumerate(names)}
    config = transformers.Qwen2_5_VLConfig(
        vision_config={
            **{"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16},
            **{"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [0]},
        },
        text_config={
            **{"vocab_size": len(words), **LLAMA, **ENDS},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        },
        **ids,
    )
    transformers.Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=56 * 56).save_pretrained(folder)
    words.chat_template = TEMPLATE.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    words.save_pretrained(folder)


def florence(folder: Path) -> None:
    words = tokenizer("<image>", extra_special_tokens={"image_token": "<image>"})
    config = transformers.Florence2Config(
        vision_config={
            **{"depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1]},
            **{"patch_prenorm": [False, True], "embed_dim": [8, 16], "num_heads": [2, 2], "num_groups": [2, 2]},
            **{"window_size": 4, "projection_dim": 16, "max_temporal_embeddings": 4, "max_position_embeddings": 8},
        },
        text_config={
            **{"model_type": "bart", "vocab_size": len(words), "d_model": 16, "max_position_embeddings": 256},
            **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 16 for side in ("encoder", "decoder")},
            **{**ENDS, "decoder_start_token_id": 2, "forced_eos_token_id": None},
        },
        image_token_id=4,
    )
    transformers.Florence2ForConditionalGeneration(config).save_pretrained(folder)
    pixels = CLIPImageProcessorPil(size={"height": 32, "width": 32}, do_center_crop=False, image_seq_length=17)
    transformers.Florence2Processor(pixels, words).save_pretrained(folder)


def tagger(folder: Path) -> None:
    config = transformers.ViTConfig(
        **SIZES,
        num_hidden_layers=1,
        image_size=32,
        patch_size=16,
        problem_type="multi_label_classification",
        id2label=dict(enumerate(TAGS)),
        label2id={tag: i for i, tag in enumerate(TAGS)},
    )
    model = transformers.ViTForImageClassification(config)
    model.classifier.weight.data.mul_(0.01)
    model.classifier.bias.data.copy_(torch.tensor([2.0, -3.0, 1.0, 0.5, 3.0]))
    model.save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)


MODELS = {function.__name__: function for function in (blip, llava, qwen, florence, tagger)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """made("blip"): folder of a miniature; its answers are printable, as its output layer favours letters."""
    root = tmp_path_factory.mktemp("captioners")

    def folder(name: str) -> Path:
        if not (root / name).exists():
            torch.manual_seed(3)
            MODELS[name](root / name)
            if name != "tagger":
                _spell(root / name)
        return root / name

    return folder


def _spell(folder: Path) -> None:
    """Large weights, so that the picture decides, and an output layer that knows letters only."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder)
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    [layer] = [one for one in model.modules() if isinstance(one, torch.nn.Linear) and one.out_features == len(words)]
    letters = [i for i in range(len(words)) if re.fullmatch("[a-zA-Z]", words.convert_ids_to_tokens(i))]
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.4)
    weight = torch.zeros_like(layer.weight)
    weight[letters] = torch.randn(len(letters), weight.shape[1]) * 0.3
    layer.weight.data.copy_(weight)
    model.save_pretrained(folder)


@pytest.fixture
def folder(pictures: Path, tmp_path: Path) -> Path:
    """The shared pictures of five sizes; c.png has a caption, the others none."""
    root = tmp_path / "set"
    root.mkdir()
    for path in pictures.iterdir():
        if path.suffix != ".txt" or path.stem == "c":
            (root / path.name).write_bytes(path.read_bytes())
    return root


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))}


def by_hand(name: str, model_folder: Path, picture: Image.Image, prompt: str) -> str:
    """The answer by the model's own parts, without our code and without its processor's rules for text."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(model_folder).eval()
    words = PreTrainedTokenizerFast.from_pretrained(model_folder)
    pixels = transformers.AutoImageProcessor.from_pretrained(model_folder, backend="pil")
    seen = pixels(images=picture, return_tensors="pt")
    given: dict[str, torch.Tensor] = dict(seen)
    prefix = 0
    if name == "llava":
        ids = words(f"user: {'<image>' * 4}{prompt} assistant:", add_special_tokens=False)["input_ids"]
        given["input_ids"], prefix = torch.tensor([ids]), len(ids)
    if name == "qwen":
        tokens = int(seen["image_grid_thw"].prod()) // 4
        text = f"user: <|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|>{prompt} assistant:"
        ids = words(text, add_special_tokens=False)["input_ids"]
        given["input_ids"], prefix = torch.tensor([ids]), len(ids)
        given["mm_token_type_ids"] = (given["input_ids"] == 4).long()
    if name == "florence":
        ids = words("Describe with a paragraph what is shown in the image.")["input_ids"]
        given["input_ids"] = torch.tensor([[*[4] * 17, 1, *ids, 2]])
    if "input_ids" in given:
        given["attention_mask"] = torch.ones_like(given["input_ids"])
    out = model.generate(**given, max_new_tokens=12, do_sample=False)
    return words.decode(out[0, prefix:], skip_special_tokens=True).strip()


@pytest.mark.parametrize("name", ["blip", "llava", "qwen", "florence"])
def test_captions_are_what_the_model_says(name: str, made, folder: Path) -> None:
    settings = captioner.Settings(str(made(name)), max_tokens=12)
    result = captioner.run(folder, settings)
    assert (result.written, result.kept, result.problems) == (4, 1, [])
    found = texts(folder)
    assert found.pop("c.txt") == "a cat, blue, standing" and len(found) == 4 and all(found.values())
    assert len(set(found.values())) > 1, found  # the picture matters
    for picture in ("a.png", "b.jpg"):
        expected = by_hand(name, made(name), decoding.open_image(folder / picture), captioner.PROMPTS["text"])
        assert found[picture[0] + ".txt"] == " ".join(expected.split())


@pytest.mark.parametrize("name", ["blip", "llava", "qwen", "florence"])
def test_a_batch_says_what_its_pictures_say_alone(name: str, made, folder: Path) -> None:
    captioner.run(folder, captioner.Settings(str(made(name)), max_tokens=12))
    alone = texts(folder)
    captions.undo(folder)
    captioner.run(folder, captioner.Settings(str(made(name)), max_tokens=12, batch_size=3))
    assert texts(folder) == alone


def test_a_prompt_is_asked(made, folder: Path) -> None:
    captioner.run(folder, captioner.Settings(str(made("llava")), max_tokens=12))
    first = texts(folder)
    captions.undo(folder)
    captioner.run(folder, captioner.Settings(str(made("llava")), max_tokens=12, prompt="Which colours?"))
    assert texts(folder) != first
    captions.undo(folder)
    captioner.run(folder, captioner.Settings(str(made("blip")), max_tokens=12, prompt="a photo of"))
    assert all(text.startswith("a photo of") for name, text in texts(folder).items() if name != "c.txt")


def test_a_tagger_ticks_what_is_above_its_threshold(made, folder: Path) -> None:
    """The miniature's biases are 2, -3, 1, 0.5, 3: probabilities 0.88, 0.05, 0.73, 0.62, 0.95, whatever the picture."""
    settings = captioner.Settings(str(made("tagger")), trigger="zibo", exclude=("RED",))
    captioner.run(folder, settings)
    assert texts(folder)["a.txt"] == "zibo, 1girl, long hair, ^_^"
    captions.undo(folder)
    captioner.run(folder, captioner.Settings(str(made("tagger")), kind="tags", threshold=0.9))
    assert texts(folder)["a.txt"] == "1girl"
    with pytest.raises(UserError, match="--kind tags"):
        captioner.run(folder, captioner.Settings(str(made("tagger")), kind="text", overwrite=True))


def test_it_goes_on_where_it_was_stopped(made, folder: Path, monkeypatch) -> None:
    """Overwriting, too: what stands is not done again, what somebody changed is."""
    before = texts(folder)
    settings = captioner.Settings(str(made("blip")), max_tokens=12, overwrite=True)
    seen: list[str] = []

    def stopping(event: dict) -> None:
        if event["event"] == "caption":
            seen.append(event["file"])
            if len(seen) == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match="after 2 of 5"):
        captioner.run(folder, settings, echo=stopping)
    half = texts(folder)
    assert len(half) == 3
    result = captioner.run(folder, settings, echo=lambda e: seen.append(e["file"]) if e["event"] == "caption" else None)
    assert (result.written, result.kept) == (3, 2) and seen == ["a.png", "b.jpg", "c.png", "d.jpg", "e.png"]
    assert half.items() - before.items() <= texts(folder).items() and texts(folder)["c.txt"] != before["c.txt"]
    (folder / "a.txt").write_text("mine", encoding="utf-8")
    assert captioner.run(folder, settings).written == 1 and texts(folder)["a.txt"] == half["a.txt"]
    captions.undo(folder)
    assert texts(folder) == {"a.txt": "mine", "c.txt": before["c.txt"]} | {"a.txt": "mine"}


def test_one_undo_takes_a_captioning_back(made, folder: Path, tree_hash) -> None:
    before = tree_hash(folder)
    captioner.run(folder, captioner.Settings(str(made("blip")), max_tokens=12, overwrite=True))
    captions.undo(folder)
    left = tree_hash(folder)
    assert left.pop(captions.JOURNAL) and left == before


def test_pictures_that_cannot_be_read_keep_no_other_waiting(made, folder: Path) -> None:
    (folder / "b.jpg").write_bytes((folder / "b.jpg").read_bytes()[:300])
    (folder / "d.txt").write_bytes("红".encode("gb18030"))  # a caption, whatever its encoding
    result = captioner.run(folder, captioner.Settings(str(made("blip")), max_tokens=12, batch_size=2))
    assert result.written == 2 and result.kept == 2 and "b.jpg: the file is truncated" in result.problems[0]
    assert not (folder / "b.txt").exists()


def test_what_cannot_caption_is_refused_by_name(made, folder: Path, tmp_path: Path) -> None:
    def refused(model: Path | str, text: str, **settings) -> None:
        with pytest.raises(UserError, match=text):
            captioner.run(folder, captioner.Settings(str(model), **settings))

    def written(name: str, **config) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return tmp_path / name

    refused(tmp_path / "none", "there is no such folder, and this is not a Hugging Face id")
    refused(folder, "config.json")
    (tmp_path / "wd14").mkdir()
    (tmp_path / "wd14/model.onnx").write_bytes(b"x")
    refused(tmp_path / "wd14", "nor both files of a WD tagger")
    refused(written("timm", architecture="swinv2_base", num_classes=9), "this is a timm model")
    refused(
        written("own", model_type="moondream9", auto_map={"AutoModel": "x.X"}), "code that comes with a model is never"
    )
    refused(written("words", model_type="gpt2"), "does not describe images")
    refused(written("empty", model_type="blip"), "cannot load it")
    refused(made("florence"), "Florence-2 writes sentences", kind="tags")
    refused(made("blip"), "accepted: bf16", dtype="fp8")
    refused(made("blip"), "does not use --threshold, --exclude;", threshold=0.5, exclude=("red",))
    refused("nobody/nothing", "cannot be downloaded from Hugging Face")  # the tests are offline
    for name, kind in (("blip", "text"), ("tagger", "tags")):
        torn = tmp_path / f"torn-{name}"
        shutil.copytree(made(name), torn)
        tensors = load_file(torn / "model.safetensors")
        (gone, *_) = sorted(tensors)
        save_file(
            {k: v for k, v in tensors.items() if k != gone}, torn / "model.safetensors", metadata={"format": "pt"}
        )
        refused(torn, f"lacks 1 weights of a .*: {re.escape(gone)}", kind=kind)
    assert texts(folder) == {"c.txt": "a cat, blue, standing"}


def test_the_command_in_a_process_of_its_own(made, folder: Path) -> None:
    """As the queue runs it: events as JSON lines, SIGTERM saves and answers 75, and no code of a model is run."""
    model = made("blip")
    (model / "evil.py").write_text(f"open({str(folder / 'evil')!r}, 'w')", encoding="utf-8")
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoModelForImageTextToText": "evil.Evil", "AutoConfig": "evil.Evil"}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-c", "from lora_fp8.cli import main; main()", "caption", str(folder), "--json"]
    command += ["--model", str(model), "--max-tokens", "12"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    events = []
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["event"] == "caption":
            process.send_signal(signal.SIGTERM)
            break
    events += [json.loads(line) for line in process.stdout]
    assert process.wait(LONG_SECONDS) in (0, 75)
    told = [event for event in events if event["event"] == "caption"]
    assert [event["stage"] for event in events if event["event"] == "stage"] == ["load", "caption"]
    assert told[0]["file"] == "a.png" and told[0]["total"] == 4
    assert {path.name for path in folder.glob("*.txt")} == {"c.txt", *(event["file"][0] + ".txt" for event in told)}
    assert not (folder / "evil").exists()
