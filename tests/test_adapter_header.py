"""Alpha in the header of files that diffusers itself writes, judged by diffusers: every way through this program gives
the weights that diffusers' own loader gives."""

import json
from pathlib import Path

import diffusers
import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from lora_fp8 import families, verify
from lora_fp8.adapters import kinds
from lora_fp8.errors import UserError
from lora_fp8.lora_files import export, header, layouts, safetensors_file
from lora_fp8.plan import disk_budget
from lora_fp8.plan.start import read_start_values
from lora_fp8.settings import Model
from lora_fp8.tools import average, files, kit, merge, resize

CONFIGS = {
    "plain": {"r": 4, "lora_alpha": 16},
    "patterns": {
        "r": 4,
        "lora_alpha": 16,
        "rank_pattern": {"to_k": 2, r"^.*\.1\..*to_q": 3},
        "alpha_pattern": {"to_v": 6, "to_k": 1},
    },
    "rslora": {"r": 4, "lora_alpha": 6, "use_rslora": True},
    "dora": {"r": 4, "lora_alpha": 12, "use_dora": True},
}


def save(base: Path, family: str, folder: Path, **settings: object) -> Path:
    """A file as diffusers' training scripts save it, of random values."""
    cls = families.get(family)
    Pipeline = getattr(diffusers, cls.pipeline_class)
    denoiser = getattr(diffusers, cls.denoiser_class).from_pretrained(base / cls.denoiser_name)
    denoiser.add_adapter(LoraConfig(target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False, **settings))
    told = denoiser.peft_config["default"].to_dict()
    state = get_peft_model_state_dict(denoiser)
    Pipeline.save_lora_weights(
        folder, **{f"{cls.denoiser_name}_lora_layers": state, f"{cls.denoiser_name}_lora_adapter_metadata": told}
    )
    return folder / "pytorch_lora_weights.safetensors"


def fused(base: Path, family: str, file: Path | None) -> dict[str, torch.Tensor]:
    """The denoiser's weights with the file in them, by diffusers alone."""
    cls = families.get(family)
    pipe = getattr(diffusers, cls.pipeline_class).from_pretrained(base)
    if file:
        pipe.load_lora_weights(str(file.parent), weight_name=file.name)
        pipe.fuse_lora()
        pipe.unload_lora_weights()
    return {name: tensor.double() for name, tensor in getattr(pipe, cls.denoiser_name).state_dict().items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    error = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    change = sum(float((plain[name] - wanted[name]).square().sum()) for name in wanted)
    assert change > 0 and error / change < 1e-8


@pytest.mark.parametrize(
    ("family", "case"), [("flux", "patterns"), ("sdxl", "plain"), ("sdxl", "rslora"), ("flux", "dora")]
)
def test_each_way_through_gives_what_diffusers_draws(tiny, make_job, tmp_path, family, case):
    base, cls = tiny(family), families.get(family)
    file = save(base, family, tmp_path / "theirs", **CONFIGS[case])
    plain, wanted = fused(base, family, None), fused(base, family, file)

    merge.merge_into_base([(file, 1.0)], str(base), tmp_path / "merged", family_name=family)
    same(fused(tmp_path / "merged", family, None), wanted, plain)

    ways = [tmp_path / "diffusers.safetensors"]
    files.convert(file, ways[0], "diffusers", family=family, base=str(base), dtype="fp32")
    if case != "dora":
        ways += [tmp_path / f"{name}.safetensors" for name in ("resized", "summed", "mean")]
        resize.resize(file, ways[1], rank=64, energy=0, uniform=False, dtype="fp32")
        merge.merge([(file, 0.25), (file, 0.75)], ways[2], rank=0, energy=0.0, dtype="fp32")
        average.average_files([file, file], ways[3], what="delta", half_life=0, rank=0, dtype="fp32")
        # diffusers reads these names at the released models' sizes only
        files.convert(file, tmp_path / "kohya.safetensors", "kohya", family=family, base=str(base), dtype="fp32")
        merge.merge_into_base(
            [(tmp_path / "kohya.safetensors", 1.0)], str(base), tmp_path / "again", family_name=family
        )
        same(fused(tmp_path / "again", family, None), wanted, plain)
    for way in ways:
        same(fused(base, family, way), wanted, plain)
        assert header.KEY not in safetensors_file.read_header(way).metadata

    made = cls(Model(family=family, path=str(base)), device="cpu", dtype=torch.float32)
    tensors, _ = export.read_adapter(file)
    state, scaling = layouts.from_layout(tensors, made, made.read_denoiser_config())
    for layer, parts in kinds.group_by_layer(state).items():
        weight = plain[f"{layer}.weight"]
        assert torch.allclose(
            weight + kinds.compute_weight_change(weight, parts, scaling[layer]), wanted[f"{layer}.weight"], atol=1e-5
        )
    if case in ("plain", "dora"):
        settings = ("adapter.rank=4", "adapter.alpha=7", "adapter.targets=['to_q','to_k','to_v']")
        kind = "dora" if case == "dora" else "lora"
        given = (*settings, f"adapter.init_from='{file}'", f"adapter.type='{kind}'")
        job = make_job(tmp_path, *given, family=family)
        values = read_start_values(job, made, disk_budget.list_trainable(job, made))
        for layer, parts in kinds.group_by_layer(values).items():
            weight = plain[f"{layer}.weight"]
            got = weight + kinds.compute_weight_change(weight, parts, 7 / 4)
            assert torch.allclose(got, wanted[f"{layer}.weight"], atol=1e-5), layer


def test_inspect_verify_and_kit_know_it(tiny, tmp_path):
    base = tiny("flux")
    file = save(base, "flux", tmp_path / "theirs", **CONFIGS["patterns"], base_model_name_or_path="/home/ann/model")
    about = files.inspect(file)
    assert set(about.alphas) == {16.0, 6.0, 1.0} and header.KEY in about.metadata
    report = verify.check_file(file, family_name="flux", base=str(base))
    assert not [problem for problem in report.list_failures() if problem.startswith(("load", "pairs", "delta"))], (
        report.list_failures()
    )
    kit.make(file, tmp_path / "kit", kit.collect_facts(file, {"family": "flux", "title": "x"}))
    published = tmp_path / "kit/x.safetensors"
    same(fused(base, "flux", published), fused(base, "flux", file), fused(base, "flux", None))
    assert b"ann" not in published.read_bytes()[: safetensors_file.read_header(published).data_begin]


def test_alpha_as_a_tensor_goes_before_the_header(tmp_path):
    """Programs read the tensor, and a file with both is refused by diffusers."""
    state = {"unet.a.lora_A.weight": torch.ones(4, 8), "unet.a.lora_B.weight": torch.ones(8, 4)}
    told = {header.KEY: json.dumps({"unet.r": 4, "unet.lora_alpha": 16})}
    save_file(state | {"unet.a.alpha": torch.tensor(2.0)}, tmp_path / "both.safetensors", told)
    assert float(export.read_adapter(tmp_path / "both.safetensors")[0]["unet.a.alpha"]) == 2
    save_file(state, tmp_path / "one.safetensors", told)
    assert float(export.read_adapter(tmp_path / "one.safetensors")[0]["unet.a.alpha"]) == 16
    assert "unet.a.alpha" not in load_file(tmp_path / "one.safetensors")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("[1]", "not a JSON object"),
        ("{", "not a JSON object"),
        ('{"unet.r": 0}', "is not a valid r"),
        ('{"unet.r": 4, "unet.lora_alpha": "big"}', "is not a valid lora_alpha"),
        ('{"unet.r": 8, "unet.lora_alpha": 8}', "unet.a has rank 4, but the header says 8"),
        ('{"unet.r": 4, "unet.alpha_pattern": {"(a+)+b": 3}}', "which is not supported"),
        ('{"unet.r": 4, "unet.alpha_pattern": {".*.*.*.*a": 3}}', "which is not supported"),
        ('{"unet.r": 4, "unet.alpha_pattern": {"a": NaN}}', "which is not supported"),
        ('{"unet.r": 4, "unet.rank_pattern": [4]}', "not a readable list of layers"),
    ],
)
def test_headers_that_cannot_be_read_are_one_line(tmp_path, told, words):
    state = {"unet.a.lora_A.weight": torch.ones(4, 8), "unet.a.lora_B.weight": torch.ones(8, 4)}
    save_file(state, tmp_path / "a.safetensors", {header.KEY: told})
    with pytest.raises(UserError) as caught:
        export.read_adapter(tmp_path / "a.safetensors")
    assert words in str(caught.value) and "\n" not in str(caught.value)
