"""model.text_storage: text encoders held in fewer bytes while captions are encoded, for every family."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from editing import encode, load_encoders
from torch import Tensor, nn

from lora_fp8 import families, settings
from lora_fp8.families.base import ModelFamily
from lora_fp8.precision import FrozenLinear

PROMPT = "a cat, red, sitting in front of a house"


def loaded(name: str, base: Path, storage: str) -> ModelFamily:
    model = settings.Model(family=name, path=str(base), text_storage=storage)
    family = families.get(name)(model, device="cpu", dtype=torch.bfloat16)
    load_encoders(family)
    return family


def encoders(family: ModelFamily) -> list[nn.Module]:
    parts = [getattr(family.text_pipeline, name, None) for name in family.text_parts]
    return [part for part in parts if isinstance(part, nn.Module)]


def held(module: nn.Module) -> int:
    return sum({id(t): t.nbytes for t in (*module.parameters(), *module.buffers())}.values())


@pytest.mark.parametrize("name", families.list_families())
def test_every_family_encodes_with_encoders_in_int8(
    name: str, tiny: Callable[[str], Path], small_controls: None
) -> None:
    """Close to bf16's answer and another one; the bytes are those that the estimate says; the cache knows the two
    apart."""
    plain, small = loaded(name, tiny(name), "none"), loaded(name, tiny(name), "int8")
    frozen = sum(isinstance(module, FrozenLinear) for part in encoders(small) for module in part.modules())
    assert frozen and not any(isinstance(m, FrozenLinear) for part in encoders(plain) for m in part.modules())
    (expected,), (found,) = encode(plain, [PROMPT]), encode(small, [PROMPT])

    def error(key: str) -> float:
        return float((found[key].float() - expected[key].float()).norm() / expected[key].float().norm())

    errors = {key: error(key) for key in expected}
    assert 0 < max(errors.values()) < 0.1, errors
    for family in (plain, small):
        assert family.count_vae_bytes() == pytest.approx(held(family.vae), rel=0.03)
        assert list(family.count_encoder_bytes().values()) == pytest.approx(list(map(held, encoders(family))), rel=0.03)
    assert plain.compute_encoder_identity("text") != small.compute_encoder_identity("text")
    assert plain.compute_encoder_identity("vae") == small.compute_encoder_identity("vae")


@pytest.mark.parametrize("storage", ["fp8", "nf4"])
def test_weights_are_those_of_the_file_in_the_storage(storage: str, tiny: Callable[[str], Path]) -> None:
    """Each layer of T5, whose `wo` transformers names as one to keep in float32, against the file's own weight."""
    plain, small = (loaded("flux", tiny("flux"), kind) for kind in ("none", storage))
    weights: dict[str, Tensor] = dict(plain.text_pipeline.text_encoder_2.named_parameters())
    layers = {n: m for n, m in small.text_pipeline.text_encoder_2.named_modules() if isinstance(m, FrozenLinear)}
    assert {name.rpartition(".")[2] for name in layers} >= {"q", "k", "v", "o", "wi_0", "wi_1", "wo"}
    for name, layer in layers.items():
        assert layer.form.storage == storage
        exact = weights[f"{name}.weight"].float()
        assert float((layer.weight.float() - exact).norm() / exact.norm()) < {"fp8": 0.04, "nf4": 0.12}[storage]
