"""model.prompt_weights: weights in captions and prompts, judged by transformers' encoders and written-out rules.

The notation is A1111's; its own examples are below. The rule is sd-scripts': each piece is tokenized by itself, and the
states of its tokens are multiplied by its weight.
"""

import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_long_captions import LONG, expected, make, opened

from lora_fp8 import importing
from lora_fp8.families._prompt_weights import (
    find_largest_weight,
    has_weights,
    parse_weights,
    remove_weights,
    splits_bracket,
)
from lora_fp8.plan import plan as plans

A1111 = {
    "normal text": [("normal text", 1.0)],
    "an (important) word": [("an ", 1.0), ("important", 1.1), (" word", 1.0)],
    "(unbalanced": [("unbalanced", 1.1)],
    "\\(literal\\]": [("(literal]", 1.0)],
    "(unnecessary)(parens)": [("unnecessaryparens", 1.1)],
    "a (((house:1.3)) [on] a (hill:0.5), sun, (((sky))).": [
        ("a ", 1.0),
        ("house", 1.573),
        (" ", 1.1),
        ("on", 1.0),
        (" a ", 1.1),
        ("hill", 0.55),
        (", sun, ", 1.1),
        ("sky", 1.4641),
        (".", 1.1),
    ],
}
OURS = {
    "": [("", 1.0)],
    "()": [("", 1.0)],
    "a) b] c:1.2 d": [("a) b] c:1.2 d", 1.0)],
    "(a:1.2.3)": [("a:1.2.3)", 1.1)],
    "[a] (b: -0.5 )": [("a", 1 / 1.1), (" ", 1.0), ("b", -0.5)],
    f"(a:{'9' * 400})": [(f"a:{'9' * 400})", 1.1)],
    "(" * 22 + "a": [("((a", 1.1**20)],
    "back\\slash \\\\ end\\": [("back\\slash \\ end\\", 1.0)],
}


@pytest.mark.parametrize("prompt", [*A1111, *OURS])
def test_the_notation(prompt: str) -> None:
    pieces = parse_weights(prompt)
    wanted = (A1111 | OURS)[prompt]
    assert [text for text, _ in pieces] == [text for text, _ in wanted]
    assert [weight for _, weight in pieces] == pytest.approx([weight for _, weight in wanted])
    assert remove_weights(prompt) == "".join(text for text, _ in wanted)


def test_weights_that_are_hardly_meant() -> None:
    assert [find_largest_weight(text) for text in ("", "a (b:1.3)", "(a:-20)", "at (12:30)")] == [1.0, 1.3, 20.0, 30.0]
    for text in ("(red hair, blue eyes:1.4), hat", "[a, b]", "((a), b)"):
        assert splits_bracket(text, ",")
    for text in ("(red hair:1.4), [a]", "\\(x, y\\)", "smile :), 12:30), a", ""):
        assert not splits_bracket(text, ",")


def test_a_caption_of_brackets_is_read_in_time() -> None:
    """Each character is weighted at most forty times, or this would take hours."""
    for prompt in ("(a" * 100_000, "(a" * 50_000 + "b)" * 50_000, "[(x:2)" * 30_000):
        assert len(remove_weights(prompt)) > 30_000 and has_weights(prompt) == ("x:2" in prompt)


def test_brackets_that_may_be_text_are_no_weights() -> None:
    assert has_weights("a (smile:1.2) b") and has_weights("(a: .5)")
    assert not any(map(has_weights, ["hatsune miku (vocaloid)", "at 12:30", "\\(a:1.2\\)", "(a) b:1.2", "[x]"]))


LONG_PROMPT = "the (cat:1.5) and [a dog] in (((blue))), " * 9


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", LONG)
def test_states_are_multiplied(name: str, count: int, tiny: Any) -> None:
    family = opened(name, tiny(name), caption_tokens=75 * count, prompt_weights=True)
    for prompt in ("", "a cat", "a (red:1.3) [cat] \\(toy\\)", LONG_PROMPT):
        (got,) = family.encode_prompts([prompt])
        # What pieces are tokenized to is what the words are, as these are separated by spaces.
        plain = {"a (red:1.3) [cat] \\(toy\\)": "a red cat (toy)"}.get(prompt, remove_weights(prompt))
        with torch.no_grad():
            wanted = expected(family, plain, count)
        weights = [1.0]
        for text, weight in parse_weights(prompt):
            weights += [weight] * len(family.load_tokenizer("tokenizer")(text, add_special_tokens=False)["input_ids"])
        weights = [*weights[: 75 * count + 1], *[1.0] * (75 * count + 2)][: 75 * count + 2]
        wanted["prompt_embeds"] = wanted["prompt_embeds"] * torch.tensor(weights)[:, None]
        assert got.keys() == wanted.keys()
        for key, tensor in wanted.items():
            torch.testing.assert_close(got[key], tensor, rtol=0, atol=5e-5)


def test_prompts_without_weights_are_as_ever(tiny: Any) -> None:
    plain, weighted = opened("sdxl", tiny("sdxl")), opened("sdxl", tiny("sdxl"), prompt_weights=True)
    for (one,), (other,) in zip(
        *([family.encode_prompts([p]) for p in ("", "a cat, b")] for family in (plain, weighted)), strict=True
    ):
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_notation_does_not_count_as_tokens(tiny: Any) -> None:
    prompt = "(cat) " * 30
    assert make("sd15", tiny("sd15")).find_overlong([prompt]) and not make(
        "sd15", tiny("sd15"), prompt_weights=True
    ).find_overlong([prompt])


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["preview.prompts=['a (cat:1.3)', 'plain']"], True),
        (["preview.prompts=['plain']", "preview.negative='(blurry:1.4)'"], True),
        (["preview.prompts=['plain --n (blurry:1.4)']"], True),
        (["preview.prompts=['a (cat)']"], False),
        (["preview.prompts=['a (cat:1.3)']", "model.prompt_weights=true"], False),
    ],
)
def test_weights_that_are_not_read_are_told(job: Callable, overrides: list[str], told: bool) -> None:
    warnings = plans.make(job(*overrides)).images.warnings
    assert any("set model.prompt_weights = true" in line for line in warnings) == told


def test_doubtful_weights_are_told(job: Callable, pictures: Path, tmp_path: Path) -> None:
    images = shutil.copytree(pictures, tmp_path / "images")
    for file in images.glob("*.txt"):
        file.write_text("(red hair, blue eyes:1.4), hat", encoding="utf-8")
    weights = ["model.prompt_weights=true", "preview.prompts=['a (cat:30)']", f"dataset.folders.0.path='{images}'"]
    for more, told in (([], False), (["dataset.shuffle_tags=true"], True), (["dataset.tag_dropout=0.1"], True)):
        warnings = " ".join(plans.make(job(*weights, *more)).images.warnings)
        assert "a weight above 10, such as 'a (cat:30)'" in warnings
        assert ("have brackets around several tags, such as '(red hair" in warnings) == told


@pytest.mark.parametrize(
    ("base", "module", "read"),
    [("stabilityai/stable-diffusion-xl-base-1.0", "lora", True), ("black-forest-labs/FLUX.1-dev", "lora_flux", False)],
)
def test_it_is_taken_over_from_kohya(tmp_path: Path, base: str, module: str, read: bool) -> None:
    text = f'pretrained_model_name_or_path = "{base}"\nnetwork_module = "networks.{module}"\nweighted_captions = true\n'
    (tmp_path / "kohya.toml").write_text(text, encoding="utf-8")
    model = tomllib.loads(importing.to_toml(importing.import_file(tmp_path / "kohya.toml")))["model"]
    assert model.get("prompt_weights", False) == read
