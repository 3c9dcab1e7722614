"""`model.training_adapter`: training sees a base with the adapter in its weights, everything else the base itself.

The authority is a base into whose weights the adapter was added, trained without the setting.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_fp8 import families, train
from lora_fp8.errors import UserError
from lora_fp8.lora_files import layouts
from lora_fp8.plan import estimate, resolve
from lora_fp8.plan import plan as planning
from lora_fp8.settings import Job
from lora_fp8.stages.finish import Result

EXACT = ("model.dtype=fp32", "adapter.dtype=fp32", "quantize.storage=none", "optimizer.name=adamw")
SHORT = ("train.steps=3", "preview.prompts=[]", "export.verify=false")


def losses_of(result: Result) -> list[float]:
    return [event["loss"] for event in result.run.read_events() if event["event"] == "step"]


def write_adapter(
    base: Path, family: str, file: Path, layout: str = "diffusers", scale: float = 0.4
) -> dict[str, torch.Tensor]:
    """Write a LoRA of rank 2 for a few layers of the denoiser. Returns what it adds to the weights, by layer."""
    Family = families.get(family)
    weights = load_file(next((base / Family.denoiser_name).glob("*.safetensors")))
    names = [name.removesuffix(".weight") for name in weights if name.endswith(("to_q.weight", "to_k.weight"))][:6]
    draw = torch.Generator().manual_seed(5)
    state = {}
    for name in names:
        rows, columns = weights[f"{name}.weight"].shape
        state[f"{name}.lora_A.weight"] = torch.randn(2, columns, generator=draw) * scale
        state[f"{name}.lora_B.weight"] = torch.randn(rows, 2, generator=draw) * scale * 4
    save_file(layouts.to_layout(state, 0.5, Family, {}, layout), file)
    return {name: 0.5 * state[f"{name}.lora_B.weight"] @ state[f"{name}.lora_A.weight"] for name in names}


@pytest.mark.parametrize(("family", "layout"), [("sd15", "kohya"), ("flux", "diffusers")])
@pytest.mark.parametrize("recomputes", ["false", "true"])
def test_training_is_that_of_a_base_with_the_adapter_in_its_weights(
    family: str, layout: str, recomputes: str, job: Callable[..., Job], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    file, base = tmp_path / "beneath.safetensors", tmp_path / "base"
    added = write_adapter(tiny(family), family, file, layout)
    shutil.copytree(tiny(family), base)
    weights_file = next((base / families.get(family).denoiser_name).glob("*.safetensors"))
    weights = load_file(weights_file)
    for name, delta in added.items():
        weights[f"{name}.weight"] = (weights[f"{name}.weight"].float() + delta).to(weights[f"{name}.weight"].dtype)
    weights = {name: tensor.float() for name, tensor in weights.items()}
    for name, delta in added.items():  # not rounded to the file's dtype
        weights[f"{name}.weight"] = (
            load_file(next((tiny(family) / weights_file.parent.name).glob("*.safetensors")))[f"{name}.weight"].float()
            + delta
        )
    save_file(weights, weights_file)

    settings = (*EXACT, *SHORT, f"memory.gradient_checkpointing={recomputes}")
    ours = train.run(job(*settings, f"model.training_adapter='{file}'", "name=ours", family=family), progress=False)
    theirs = train.run(job(*settings, f"model.path='{base}'", "name=theirs", family=family), progress=False)
    plain = train.run(job(*settings, "name=plain", family=family), progress=False)
    off, moved = (
        max(abs(one - other) for one, other in zip(losses_of(ours), losses_of(of), strict=True))
        for of in (theirs, plain)
    )
    assert losses_of(ours) == pytest.approx(losses_of(theirs), rel=1e-5) and moved > 10 * off
    tensors, wanted = (load_file(result.files[0]) for result in (ours, theirs))
    assert tensors.keys() == wanted.keys() and not any("beneath" in key for key in tensors)
    for key, tensor in tensors.items():
        torch.testing.assert_close(tensor.float(), wanted[key].float(), rtol=2e-2, atol=2e-4)


def test_previews_validation_and_files(job: Callable[..., Job], tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Previews draw the base itself, validation measures what training sees, and the file is verified without it."""
    file = tmp_path / "beneath.safetensors"
    write_adapter(tiny("sd15"), "sd15", file)
    settings = ("train.steps=2", "preview.prompts=['a dog']", "preview.steps=1", "validation.every=2",
                "validation.pictures=1", "export.verify=true")  # fmt: skip
    ours = train.run(job(*settings, f"model.training_adapter='{file}'", "name=ours"), progress=False)
    plain = train.run(job(*settings, "name=plain"), progress=False)
    first = "step-000000-0.png"
    assert (ours.run.samples / first).read_bytes() == (plain.run.samples / first).read_bytes()
    last = "step-000002-0.png"
    assert (ours.run.samples / last).read_bytes() != (plain.run.samples / last).read_bytes(), (
        "it trained something else"
    )
    held_out = [
        [event["loss"] for event in result.run.read_events() if event["event"] == "validation"]
        for result in (ours, plain)
    ]
    assert held_out[0][0] != held_out[1][0], "before training too"
    assert all(report.ok for report in ours.reports) and ours.reports
    (model,) = [event for event in ours.run.read_events() if event["event"] == "model"]
    assert any("training adapter is applied to 6 layers" in line for line in model["memory"])


def test_it_goes_on_with_the_same_bytes_and_says_when_the_adapter_is_another(
    job: Callable[..., Job], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    file, moved = tmp_path / "beneath.safetensors", tmp_path / "moved.safetensors"
    write_adapter(tiny("sd15"), "sd15", file)
    settings = (*SHORT, "schedule.name=constant", "checkpoint.every=1")
    whole = train.run(job(*settings, f"model.training_adapter='{file}'", "name=whole"), progress=False)
    train.run(job(*settings, f"model.training_adapter='{file}'", "train.steps=1", "name=parts"), progress=False)
    shutil.move(file, moved)
    parts = train.run(job(*settings, f"model.training_adapter='{moved}'", "name=parts"), resume=True, progress=False)
    for one, other in zip(whole.files, parts.files, strict=True):
        tensors, others = load_file(one), load_file(other)
        assert all(torch.equal(tensors[key], others[key]) for key in tensors) and tensors.keys() == others.keys()
    warned = [event["text"] for event in parts.run.read_events() if event["event"] == "warning"]
    assert not any("training adapter" in text for text in warned), "the file is the same, at another place"
    write_adapter(tiny("sd15"), "sd15", moved, scale=0.02)
    again = train.run(job(*settings, f"model.training_adapter='{moved}'", "train.steps=4", "name=parts"),
                      resume=True, progress=False)  # fmt: skip
    assert any("its training adapter differs" in event.get("text", "") for event in again.run.read_events())


def test_what_is_wrong_with_it_is_said_before_anything_is_loaded(
    job: Callable[..., Job], tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    def failure(file: Path, family: str = "sd15") -> str:
        with pytest.raises(UserError) as raised:
            planning.make(job(f"model.training_adapter='{file}'", family=family))
        return str(raised.value)

    assert "model.training_adapter" in failure(tmp_path / "none") and "this file does not exist" in failure(
        tmp_path / "none"
    )
    file = tmp_path / "flux.safetensors"
    write_adapter(tiny("flux"), "flux", file)
    assert "model.training_adapter" in failure(file)
    text = tmp_path / "text.safetensors"
    name = "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"
    save_file({f"{name}.lora_A.weight": torch.ones(2, 32), f"{name}.lora_B.weight": torch.ones(32, 2)}, text)
    assert "changes text encoders" in failure(text)


def test_it_is_counted_and_proposed(job: Callable[..., Job], tiny: Callable[[str], Path], tmp_path: Path) -> None:
    file = tmp_path / "beneath.safetensors"
    write_adapter(tiny("sd15"), "sd15", file)
    with_it = estimate.estimate(planning.make(job(f"model.training_adapter='{file}'")))
    without = estimate.estimate(planning.make(job()))
    elements = sum(tensor.numel() for key, tensor in load_file(file).items() if "alpha" not in key)
    assert with_it.base_bytes - without.base_bytes == 2 * elements
    turbo = tmp_path / "Z-Image-Turbo"
    shutil.copytree(tiny("z_image"), turbo)
    scheduler = turbo / "scheduler" / "scheduler_config.json"
    scheduler.write_text(
        scheduler.read_text(encoding="utf-8").replace('"shift": 6.0', '"shift": 3.0'), encoding="utf-8"
    )
    job_of_turbo = job(f"model.path='{turbo}'", family="z_image")
    lines = " ".join(resolve.make_family(job_of_turbo).warnings)
    assert "zimage_turbo_training_adapter" in lines and "undoes the distillation" in lines
    given = job(f"model.path='{turbo}'", f"model.training_adapter='{file}'", family="z_image")
    assert "distillation" not in " ".join(resolve.make_family(given).warnings)
    assert "training adapter" not in " ".join(resolve.make_family(job(family="z_image")).warnings)
