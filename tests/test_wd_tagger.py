"""WD taggers: what the network sees, which tags are taken, and what is said where a tagger cannot be used.

Its miniature (`onnx_models`) scores an image by a linear function of the pixels, computed here by hand.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hub_server import HubServer
from onnx_models import HEADER, SIZE, TAGS, write_tagger
from PIL import Image

from lora_fp8 import cli
from lora_fp8.data import captions
from lora_fp8.errors import UserError
from lora_fp8.families.sources import transfer
from lora_fp8.tools import captioner, wd_tagger

ORANGE = (255, 128, 0)
MAKERS_EMOTICONS = "0_0 (o)_(o) +_+ +_- ._. <o>_<o> <|>_<|> =_= >_< 3_3 6_9 >_o @_@ ^_^ o_o u_u x_x |_| ||_||".split()
"""Those of the makers' demonstration (the space SmilingWolf/wd-tagger)."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tagger(tmp_path / "wd")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two orange images, wide and square; b.png has a caption."""
    root = tmp_path / "set"
    root.mkdir()
    Image.new("RGB", (SIZE, 1), ORANGE).save(root / "a.png")
    Image.new("RGB", (SIZE, SIZE), ORANGE).save(root / "b.png")
    (root / "b.txt").write_text("mine", encoding="utf-8")
    return root


def caption(folder: Path, model: Path | str, **settings) -> str:
    captioner.run(folder, captioner.Settings(str(model), **settings))
    return (folder / "a.txt").read_text(encoding="utf-8")


def score(model: Path, image: Image.Image) -> dict[str, float]:
    (row,) = wd_tagger.WdTagger(model, "wd").score([image])
    return {name: round(float(value), 4) for (name, _, _), value in zip(TAGS, row, strict=True)}


def test_the_network_sees_a_white_square_blue_first_from_0_to_255(model: Path) -> None:
    """One orange row in a white square of four rows: (4 - 1) // 2 = 1 row is above it, and two are below."""
    wide = score(model, Image.new("RGB", (4, 1), ORANGE))
    half = round(128 / 255, 4)
    assert wide["1girl"] == 1.0 and wide["long_hair"] == 0.75 and wide["^_^"] == round((3 + half) / 4, 4)
    assert wide["upper_row"] == 1.0 and wide["second_row"] == 0.0 and wide["left_column"] == wide["^_^"]
    tall = score(model, Image.new("RGB", (1, 4), ORANGE))
    assert tall["upper_row"] == tall["second_row"] == 0.75 and tall["left_column"] == 1.0
    square = Image.new("RGB", (4, 4))
    square.putpixel((3, 3), (51, 0, 0))
    assert score(model, square)['say_"hello"'] == 0.2


def test_large_images_are_resized_bicubically() -> None:
    """Against the formula: Catmull-Rom (a = -0.5), stretched by the factor, as in the makers' demonstration."""
    values = np.array([10, 250, 30, 90, 200, 60, 140, 20], np.uint8)
    image = Image.fromarray(np.repeat(np.tile(values, (8, 1))[:, :, None], 3, axis=2))

    def cubic(x: float) -> float:
        x = abs(x)
        if x < 1:
            return 1.5 * x**3 - 2.5 * x**2 + 1
        return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0

    expected = []
    for column in range(4):
        weights = np.array([cubic((x + 0.5 - (column + 0.5) * 2) / 2) for x in range(8)])
        expected.append(float(values @ weights / weights.sum()))
    row = wd_tagger.prepare(image, 4)[1, :, 0]
    assert np.abs(row - expected).max() <= 1 and row.dtype == np.float32


def test_tags_are_those_above_the_thresholds_of_their_categories_most_probable_first(model: Path, folder: Path) -> None:
    """a.png: 1girl and upper_row 1, ^_^ and left_column 0.88, long_hair 0.75, second_row 0, the character 1."""
    everything = '1girl, upper row, say "hello", hatsune miku, ^_^, left column, long hair'
    assert caption(folder, model) == everything
    assert (folder / "b.txt").read_text(encoding="utf-8") == "mine"
    for settings, expected in (
        ({"threshold": 0.8}, everything.removesuffix(", long hair")),
        ({"threshold": 0.9, "rating": True}, '1girl, upper row, say "hello", hatsune miku, general'),
        ({"threshold": 1.0, "keep_underscores": True}, '1girl, upper_row, say_"hello", hatsune_miku'),
        ({"exclude": ("Long_Hair", "left column", 'say "hello"')}, "1girl, upper row, hatsune miku, ^_^"),
        ({"threshold": 0.9, "trigger": "zibo"}, 'zibo, 1girl, upper row, say "hello", hatsune miku'),
    ):
        captions.undo(folder)
        assert caption(folder, model, **settings) == expected
    names = wd_tagger.WdTagger(model, "wd").choose_tags(
        [Image.new("RGB", (4, 4), (204, 0, 0))], wd_tagger.Limits(general=0.5, character=0.81, rating=False)
    )
    assert names == [["1girl", 'say_"hello"']], "the character has 0.8"


def test_tags_are_added_to_a_caption_that_is_there(model: Path, folder: Path) -> None:
    (folder / "a.txt").write_text("zibo, Long_Hair, 1girl,\n", encoding="utf-8")
    (folder / "b.txt").write_bytes("红".encode("gb18030"))
    settings = captioner.Settings(str(model), append=True, threshold=0.8, trigger="zibo")
    result = captioner.run(folder, settings)
    added = 'zibo, Long_Hair, 1girl, upper row, say "hello", hatsune miku, ^_^, left column'
    assert (folder / "a.txt").read_text(encoding="utf-8") == f"{added}\n" and result.written == 1
    assert "b.txt" in result.problems[0] and (folder / "b.txt").read_bytes() == "红".encode("gb18030")
    captions.undo(folder)
    assert (folder / "a.txt").read_text(encoding="utf-8") == "zibo, Long_Hair, 1girl,\n"
    with pytest.raises(UserError, match="--append and --overwrite"):
        captioner.run(folder, captioner.Settings(str(model), append=True, overwrite=True))


def test_emoticons_keep_their_underscore() -> None:
    assert [captioner.replace_underscores(tag) for tag in MAKERS_EMOTICONS] == MAKERS_EMOTICONS
    words = {"long_hair": "long hair", "hatsune_miku_(append)": "hatsune miku (append)", "v-neck": "v-neck"}
    assert {tag: captioner.replace_underscores(tag) for tag in words} == words
    assert captioner.replace_underscores("d.va_(overwatch)") == "d.va (overwatch)"


def test_a_model_for_a_fixed_number_of_images_gives_the_same(model: Path, tmp_path: Path) -> None:
    fixed = write_tagger(tmp_path / "fixed", shape=(2, SIZE, SIZE, 3))
    images = [Image.new("RGB", (4, height), ORANGE) for height in (1, 2, 4)]
    any_number, two = (wd_tagger.WdTagger(path, "wd").score(images) for path in (model, fixed))
    assert (any_number == two).all() and len(two) == 3


def test_a_gpu_that_onnxruntime_cannot_use_is_reported(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    def list_events() -> list[dict]:
        events: list[dict] = []
        captioner.run(folder, captioner.Settings(str(model), overwrite=True), echo=events.append)
        captions.undo(folder)
        return events

    assert {"model": str(model), "device": "CPU"}.items() <= list_events()[1].items()
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider", "CUDAExecutionProvider"]
    )
    warning, captioning = list_events()[1:3]
    assert "CUDA" in warning["text"] and captioning["device"] == "CPU"


def test_a_tagger_that_cannot_be_used_is_refused(model: Path, folder: Path, tmp_path: Path, monkeypatch) -> None:
    def refused(path: Path, text: str, **settings) -> None:
        with pytest.raises(UserError, match=text):
            caption(folder, path, **settings)

    refused(
        write_tagger(tmp_path / "nchw", shape=("n", 3, SIZE, SIZE)),
        r"differs from that of WD taggers.*\['n', 3, 4, 4\]",
    )
    refused(write_tagger(tmp_path / "short", tags=3), r"has 10 tags, but the model returns \[1, 3\] numbers")
    refused(write_tagger(tmp_path / "logits", scale=1.0), "outside 0 to 1")
    torn = write_tagger(tmp_path / "torn")
    torn.joinpath("model.onnx").write_bytes(b"<html>")
    refused(torn, "model.onnx: onnxruntime cannot load it")
    for name, content in (("page", "<html>"), ("other", "id,tag\n1,1girl\n"), ("words", f"{HEADER}\n1,1girl,x,2\n")):
        wrong = write_tagger(tmp_path / name)
        wrong.joinpath("selected_tags.csv").write_text(content, encoding="utf-8")
        refused(wrong, "selected_tags.csv: this is not a list of tags")
    refused(model, "does not use --prompt, --max-tokens, --dtype;", prompt="x", max_tokens=9, dtype="bf16")
    refused(model, "use --kind tags", kind="text")
    refused(model, "has no revision", revision="main")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(model, r"wd: WD taggers need onnxruntime; run pip install 'lora-fp8\[tagger\]'")
    assert not (folder / "a.txt").exists()


def test_a_tagger_of_the_hub_through_the_command(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The released repositories also have weights and a config for timm, which are not downloaded."""
    repository_folder = write_tagger(tmp_path / "repository")
    (repository_folder / "model.safetensors").write_bytes(bytes(5000))
    (repository_folder / "config.json").write_text('{"architecture": "vit_base_patch16_224"}', encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "memory"))
    monkeypatch.setattr(transfer, "FIRST_WAIT", 0.01)
    hub.use(monkeypatch, tmp_path / "home")
    repository = hub.add("SmilingWolf/wd-vit-tagger-v3", repository_folder)

    def run(*arguments: str) -> tuple[object, str, str]:
        command = ["lora-fp8", "caption", str(folder), "--model", "SmilingWolf/wd-vit-tagger-v3", *arguments]
        monkeypatch.setattr(sys, "argv", command)
        code: object = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    with monkeypatch.context() as without:
        without.setattr("importlib.util.find_spec", lambda name: None)
        code, _, err = run()
    assert code == 2 and "pip install 'lora-fp8[tagger]'" in err and hub.downloads() == []

    repository.faults.wrong_bytes = {wd_tagger.MODEL}
    code, _, err = run()
    assert code == 3 and wd_tagger.MODEL in err and not (folder / "a.txt").exists(), "each download is verified"
    assert set(hub.downloads()) == {wd_tagger.MODEL}
    repository.faults.wrong_bytes = set()
    hub.forget()
    code, out, err = run("--threshold", "0.9", "--rating", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and hub.downloads() == [wd_tagger.MODEL], err
    kinds = [event["event"] for event in events]
    assert kinds == ["stage", *["download"] * kinds.count("download"), "captioner", "stage", "caption", "done"]
    progress = events[kinds.index("captioner") - 1]
    assert progress["bytes"] == progress["total"] >= (repository_folder / wd_tagger.MODEL).stat().st_size
    assert (folder / "a.txt").read_text(encoding="utf-8") == '1girl, upper row, say "hello", hatsune miku, general'

    captions.undo(folder)
    hub.forget()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, err = run()
    assert code == 0 and "on CPU" in out and hub.seen() == [] and (folder / "a.txt").exists(), err
