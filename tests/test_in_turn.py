"""Text encoders one at a time: the same conditioning, and never two of them in memory."""

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from editing import encode, load_encoders

from lora_fp8 import families, settings
from lora_fp8.families import _in_turn

SEVERAL = {"sdxl": 2, "flux": 2, "flux_kontext": 2, "anima": 2, "hunyuan_video": 2, "sd3": 3, "hidream": 4}
"""Families with more than one network between the text and the denoiser."""
SINGLE = ("sd15", "qwen_image_edit_plus", "wan")
"""Of those with one network: CLIP, one that sees control images, and T5. That each family encodes as its pipeline does
is asked in test_families.py."""
PROMPTS = ["a cat, red", "", "two dogs that run after a ball", "a bird"]


@pytest.mark.parametrize("name", [*SEVERAL, *SINGLE])
def test_captions_are_encoded_with_one_text_encoder_at_a_time(
    name: str, tiny: Callable[[str], Path], small_controls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against all of them in memory, bit for bit; and each is loaded once, unless too much had to be kept."""
    Family = families.get(name)
    model = settings.Model(family=name, path=str(tiny(name)))
    whole, family = (Family(model, device="cpu", dtype=torch.bfloat16) for _ in range(2))
    load_encoders(whole)
    expected = [encode(whole, [prompt])[0] for prompt in PROMPTS]
    alive: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    loaded: list[str] = []
    most = [0]
    load = Family._load_text_part

    def note(self: object, part: str, storage: str) -> object:
        made = load(self, part, storage)
        if isinstance(made, torch.nn.Module):
            alive.add(made)
            loaded.append(part)
            most[0] = max(most[0], sum(p.nbytes for module in alive for p in module.parameters()))
        return made

    monkeypatch.setattr(Family, "_load_text_part", note)
    asks = [partial(encode, family, [prompt]) for prompt in PROMPTS]

    def encoded() -> None:
        found = dict(family.encode_in_turn(asks))
        assert sorted(found) == list(range(len(PROMPTS)))
        for number, (cond,) in found.items():
            assert cond.keys() == expected[number].keys()
            assert all(torch.equal(tensor, expected[number][key]) for key, tensor in cond.items())

    encoded()
    assert len(loaded) == len(set(loaded)) == SEVERAL.get(name, 1)
    # The largest, and not the sum: what the estimate says.
    assert most[0] == pytest.approx(max(family.count_encoder_bytes().values()), rel=0.03)
    family.free_encoders()
    gc.collect()
    assert not alive
    if name in SEVERAL:
        loaded.clear()
        monkeypatch.setattr(_in_turn, "KEPT_BYTES", 1)  # nothing fits: each prompt by itself
        encoded()
        assert len(loaded) == SEVERAL[name] * len(PROMPTS)


def test_the_families_with_several_text_encoders_are_these() -> None:
    networks = {
        name: [part for part in families.get(name).text_parts if "tokenizer" not in part and part != "processor"]
        for name in families.list_families()
    }
    assert {name: len(parts) for name, parts in networks.items() if len(parts) > 1} == SEVERAL


def test_what_is_kept_of_an_answer_is_what_was_read(tiny: Callable[[str], Path]) -> None:
    """Of the hidden states of all layers one; and what is read too late is a mistake that shows."""
    states = tuple(torch.full((1, 4), float(layer)) for layer in range(30))
    output = type("Output", (), {"hidden_states": states, "__getitem__": lambda self, key: states[key]})()
    answer = _in_turn.Answer(output, torch.device("cpu"))
    assert torch.equal(answer.hidden_states[-2], states[28]) and torch.equal(answer[0], states[0])
    assert answer.drop_unread() == 2 * states[0].nbytes and answer.output is None
    assert torch.equal(answer.hidden_states[-2], states[28])
    with pytest.raises(RuntimeError, match="after another encoder"):
        answer.hidden_states[-1]
