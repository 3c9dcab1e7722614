"""What is decided for each layer: golden plans of the large models, every rule, and CUDA's layout rules for each layer.

The golden files are made by `pytest tests/test_plan.py --write-golden`; look at the diff before committing it.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, UNet2DConditionModel
from torch import nn
from torch._subclasses import FakeTensorMode

from lora_fp8 import config, families, precision
from lora_fp8.errors import UserErrors
from lora_fp8.precision import matmul
from lora_fp8.settings import Quantize

GOLDEN = Path(__file__).parent / "golden"
SDXL = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
QWEN_PRECISE = ("time_text_embed", "img_in", "txt_in", "norm_out", "^proj_out")
QWEN_MODULATION = ("img_mod", "txt_mod")


def large(name: str) -> tuple[nn.Module, tuple[str, ...], tuple[str, ...]]:
    """The released architecture on the meta device, its precise parts and its modulation."""
    with torch.device("meta"):
        if name == "sdxl":
            model = UNet2DConditionModel(**SDXL)
        else:
            # The defaults of both classes are the released models.
            model = FluxTransformer2DModel() if name == "flux" else QwenImageTransformer2DModel()
    if name == "qwen_image":
        return model, QWEN_PRECISE, QWEN_MODULATION
    family = families.get(name)
    return model, family.keep_precise, family.modulation


def decide(model, precise=(), modulated=(), **settings) -> precision.Plan:
    return precision.decide(model, Quantize(**settings), precise, torch.bfloat16, modulated)


def folded(plan: precision.Plan) -> dict:
    """Layers that differ in their numbers only, as one line with their count; and the totals."""
    lines: dict[str, int] = {}
    for one in plan.layers:
        name = re.sub(r"\d+", "*", one.name)
        what = " ".join(filter(None, (one.storage, one.scale, one.compute)))
        why = "; ".join(filter(None, (one.reason, one.compute_reason)))
        key = f"{name} {one.shape[0]}x{one.shape[1]}: {what}" + (f" ({why})" if why else "")
        lines[key] = lines.get(key, 0) + 1
    return {"layers": lines, "num_bytes": plan.num_bytes, "plain_num_bytes": plan.plain_num_bytes}


@pytest.mark.parametrize("name", ["sdxl", "flux", "qwen_image"])
def test_plan_equals_the_golden_file(name, request):
    model, keep, modulation = large(name)
    plan = folded(decide(model, keep, modulation, compute="fp8"))
    path = GOLDEN / f"plan_{name}.json"
    if request.config.getoption("--write-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    assert plan == json.loads(path.read_text(encoding="utf-8"))


# Parameters in billions as the models' cards say: 2.6, 12, 20; the shares were counted from the classes by hand.
@pytest.mark.parametrize(
    ("name", "billions", "in_fp8", "modulated"),
    [("sdxl", 2.567, 2.19, 0.3332), ("flux", 11.90, 8.607, 3.2275), ("qwen_image", 20.43, 13.59, 6.795)],
)
def test_totals_of_the_large_models(name, billions, in_fp8, modulated):
    plan = decide(*large(name), compute="fp8")
    weights = {
        kind: sum(o.shape[0] * o.shape[1] for o in plan.quantized if o.storage == kind) for kind in ("fp8", "int8")
    }
    assert plan.plain_num_bytes / 2e9 == pytest.approx(billions, rel=0.003)
    assert weights["fp8"] / 1e9 == pytest.approx(in_fp8, rel=0.02)
    assert weights["int8"] / 1e9 == pytest.approx(modulated, rel=0.002)
    # One byte a weight, and a little for scales; the rest in two bytes.
    rest = plan.plain_num_bytes - 2 * sum(weights.values())
    assert plan.num_bytes == pytest.approx(weights["fp8"] * 1.003 + weights["int8"] * 1.0313 + rest, rel=0.004)


@pytest.mark.parametrize("name", ["sdxl", "flux", "qwen_image"])
def test_every_fp8_matmul_obeys_cudas_layout_rules(name):
    plan = decide(*large(name), compute="fp8")
    shapes = {one.shape for one in plan.layers if one.compute == "fp8"}
    assert len(shapes) >= 3
    for shape in shapes:
        fake_step(shape)


def fake_step(shape: tuple[int, int], tokens: int = 333) -> None:
    """Forward and backward of a layer of this shape on a CUDA device that only checks."""
    num_out, num_in = shape
    with FakeTensorMode():
        qweight = torch.empty(num_out, num_in, device="cuda", dtype=torch.uint8)
        scale = torch.empty(num_out, 1, device="cuda")
        values = torch.empty(tokens, num_in, device="cuda", dtype=matmul.E4M3)
        y = matmul._multiply(
            (values, torch.empty(tokens, 1, device="cuda")), qweight, scale, torch.bfloat16, "current", True
        )
        assert y.shape == (tokens, num_out) and y.dtype == torch.bfloat16
        # `.contiguous()` needs a real device; this is what it gives.
        transposed = torch.empty(num_in, num_out, device="cuda", dtype=torch.uint8)
        assert transposed.stride() == matmul.transpose(torch.empty(num_out, num_in, dtype=torch.uint8)).stride()
        grads = torch.empty(tokens, num_out, device="cuda", dtype=matmul.E4M3)
        x = matmul._multiply(
            (grads, torch.empty(tokens, 1, device="cuda")), transposed, None, torch.bfloat16, "current", False
        )
        assert x.shape == (tokens, num_in)


def test_the_layout_test_can_fail():
    with FakeTensorMode():
        one = torch.ones((), device="cuda")
        grads = torch.empty(16, 64, device="cuda", dtype=matmul.E4M3)
        untransposed = torch.empty(64, 128, device="cuda", dtype=matmul.E4M3)
        with pytest.raises(RuntimeError, match="col"):
            torch._scaled_mm(grads, untransposed, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="16"):
        fake_step((64, 72))


# -- the rules ---------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 1024)
        self.mod = nn.Linear(1024, 2048)
        self.to_q = nn.Linear(1024, 1024)
        self.odd = nn.Linear(1024, 2256 + 8)
        self.narrow = nn.Linear(1024, 128)
        self.attn = nn.MultiheadAttention(64, 2)
        self.norm = nn.LayerNorm(64)
        self.out = nn.Linear(1024, 64)


def rules(**settings) -> dict[str, tuple[str, str, str]]:
    with torch.device("meta"):
        plan = decide(Small(), ("embed", "^out"), ("mod",), **settings)
    return {
        one.name: (str(one.form or one.storage), one.compute, one.compute_reason or one.reason) for one in plan.layers
    }


def test_rules_of_the_fp8_matmul():
    assert rules(compute="fp8", fp8_exclude=["narrow"]) == {
        "embed": ("bf16", "plain", "'embed' is kept in high precision for this architecture"),
        "mod": ("int8 1x128", "upcast", "sees one row per image"),
        "to_q": ("fp8 row", "fp8", ""),
        "odd": ("fp8 row", "upcast", "a side is not a multiple of 16"),
        "narrow": ("fp8 row", "upcast", "'narrow' in quantize.fp8_exclude"),
        "attn.out_proj": ("bf16", "plain", "NonDynamicallyQuantizableLinear is not a plain nn.Linear"),
        "out": ("bf16", "plain", "'^out' is kept in high precision for this architecture"),
    }
    assert rules(compute="fp8")["narrow"] == ("fp8 row", "upcast", "a side is below quantize.fp8_min_features = 512")
    assert rules(compute="fp8", fp8_min_features=128)["narrow"][1] == "fp8"
    assert rules(compute="fp8_forward")["to_q"][1] == "fp8_forward"


def test_rules_of_the_storage():
    found = rules(modulation="fp8", override={"to_q": "int8", "embed": "fp8 1x64", "odd": "bf16"}, keep=["narrow"])
    assert {name: held for name, (held, _, _) in found.items()} == {
        "embed": "fp8 1x64",
        "mod": "fp8 row",
        "to_q": "int8 1x128",
        "odd": "bf16",
        "narrow": "bf16",
        "attn.out_proj": "bf16",
        "out": "bf16",
    }
    assert rules(modulation="bf16")["mod"] == ("bf16", "plain", "quantize.modulation is bf16")
    assert rules(storage="nf4")["to_q"][0] == "nf4" and rules(storage="nf4")["mod"][0] == "int8 1x128"
    assert {held for held, _, _ in rules(storage="bf16").values()} == {"bf16"}


LEAST = "model = {family = 'sd15', path = 'demo'}\ndataset = {folders = [{path = 'p'}]}\n"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"compute": "fp8", "fp8_min_features": 9999},
            ["quantize.compute has no effect: no layer can use an FP8 matmul"],
        ),
        ({"compute": "fp8"}, []),
        ({"modulation": "bf16"}, []),
    ],
)
def test_what_has_no_effect_is_said(settings, said):
    with torch.device("meta"):
        plan = decide(Small(), (), ("mod",), **settings)
    job = config.loads(LEAST, [f"quantize.{key}={value}" for key, value in settings.items()])
    found = config.find_unused_settings(job, plan.facts)
    assert len(found) == len(said) and all(line.startswith(text) for line, text in zip(found, said, strict=True))


def test_modulation_without_modulation_layers():
    with torch.device("meta"):
        assert decide(Small()).warnings == ()
        plan = decide(Small(), modulation="fp8")
    found = config.find_unused_settings(config.loads(LEAST, ["quantize.modulation=fp8"]), plan.facts)
    assert found == ["quantize.modulation has no effect: this model has no modulation layers"]
    assert config.find_unused_settings(config.loads(LEAST), plan.facts) == []


def test_a_kept_layer_is_not_modulation_because_of_its_name():
    with torch.device("meta"):
        model = nn.ModuleDict({"modulation": nn.Linear(1024, 1024), "to_q": nn.Linear(1024, 1024)})
        plan = decide(model, keep=["modulation"])
    assert [layer.name for layer in plan.kept] == ["modulation"] and not plan.facts["layers.modulation"]


def test_every_wrong_name_and_scale_is_said_at_once():
    with torch.device("meta"), pytest.raises(UserErrors) as error:
        decide(Small(), (), ("mod",), scale="128x128", keep=["to_qq"], override={"narow": "int8"}, fp8_exclude=["odd."])
    text = str(error.value)
    assert "quantize.keep: 'to_qq' matches no layer of this model; did you mean 'to_q'" in text
    assert "quantize.override: 'narow' matches no layer of this model; did you mean 'narrow'" in text
    assert "quantize.fp8_exclude: 'odd.' matches" in text
    assert "scale 128x128 does not divide 1024 x 64 (embed and 2 more layers)" in text
    assert "use scale 'row' or 'tensor' or '1x64'" in text


def test_plan_and_quantize_agree_with_the_bytes_that_are_held():
    for settings in ({}, {"storage": "int8"}, {"storage": "nf4"}, {"scale": "tensor"}, {"storage": "none"}):
        model = Small()
        section = Quantize(**settings)
        with torch.device("meta"):
            ahead = precision.decide(Small(), section, ("embed",), torch.bfloat16, ("mod",))
        plan = precision.quantize_(model, section, ("embed",), torch.bfloat16, ("mod",))
        assert plan == ahead
        assert plan.num_bytes == sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
        for layer in plan.layers:
            held = sum(tensor.nbytes for tensor in model.get_submodule(layer.name).state_dict().values())
            assert layer.num_bytes == held, layer


def test_table_and_json():
    with torch.device("meta"):
        plan = decide(Small(), ("embed",), ("mod",), compute="fp8")
    lines = plan.format_table().splitlines()
    assert lines[0].split() == ["layer", "shape", "storage", "compute", "reason"]
    assert lines[3].split() == ["to_q", "1024x1024", "fp8", "row", "fp8"]
    assert "7 linear layers: 1 in int8 1x128, 4 in fp8 row" in plan.format_table()
    data = json.loads(json.dumps(plan.to_json()))
    assert data["layers"][2]["compute"] == "fp8" and data["gb"] == plan.num_bytes / 1e9
